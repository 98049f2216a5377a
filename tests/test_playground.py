"""The playground: what it computes, without JAX, and the page in a browser."""

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import Browser
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import einshard
from einshard import EinshardError, device_mesh, make_sharding, show

FOLDER = Path(__file__).parents[1] / 'docs' / '_playground'
if not FOLDER.exists() or Path(einshard.__file__).parents[1] != FOLDER.parents[1]:
    pytest.skip('no checkout', allow_module_level=True)
sys.path.insert(0, str(FOLDER))
import build_playground  # noqa: E402
import playground  # noqa: E402

EXPRESSIONS = [
    'a b -> a* b',
    'a b -> a4 b2',
    'a b -> b2 a4',
    'a b -> a2 b3',
    'a b -> a* b*',
    'a b -> 2 a2* b*',
    'a b -> a2 * b a2',
    'a b -> a2 b',
    'a b -> a8 b2',
    'x y*',
    '* x y',
    'x 8 y',
    'data y',
    'a ... -> * a2 ...',
    '... d -> * ... d2',
    'b d -> b@data d@tensor',
    'b d -> b@(data,tensor) d',
    'b d -> b@data d*',
    'b d -> b* d@tensor',
    'b d -> b@dta d',
    'b d -> b@8 d',
    'b d -> b@data d +@tensor',
    'b d -> b2 d +*',
    'b d -> b d =4 2',
    'a b -> a2b',
    'a b ->',
    '',
]
COUNTS = [1, 2, 4, 6, 8, 12, 60]
MESHES = [
    {'data': 4, 'tensor': 2},
    {'data': 2, 'tensor': 2, 'fsdp': 2},
    {'tensor': 1, 'data': 8},
    {'x': 6},
]
SHAPE = (24, 48)


def ask(expression, shape, devices):
    """Asks as the page does; `devices` is a number or the sizes of mesh axes."""
    shape = ' '.join(map(str, shape or ()))
    if not isinstance(devices, int):
        devices = ' '.join(f'{name}={size}' for name, size in devices.items())
    return json.loads(playground.answer(expression, shape, str(devices)))


def on_mesh(expression, devices):
    """The mesh of the page. Partial sums need Explicit axes."""
    kind = AxisType.Explicit if '+' in expression or '=' in expression else AxisType.Auto
    if isinstance(devices, int):
        return device_mesh(AbstractMesh((devices,), ('d0',), axis_types=(kind,)), axis_types=kind)
    return AbstractMesh(tuple(devices.values()), tuple(devices), axis_types=(kind,) * len(devices))


def outcome(function):
    """The result, the error and the warning of a call."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter('always')
        try:
            result = function()
        except EinshardError as error:
            return None, error, None
    return result, None, str(shown[0].message) if shown else None


@pytest.mark.parametrize('expression', EXPRESSIONS)
def test_answers_are_those_of_make_sharding_and_show(expression):
    for devices in COUNTS + MESHES:
        mesh = on_mesh(expression, devices)
        given = None if isinstance(devices, int) and '@' in expression else mesh
        sharding, error, warning = outcome(
            functools.partial(make_sharding, expression, ndim=2, mesh=given)
        )
        answer = ask(expression, SHAPE, devices)
        if error is not None:
            assert answer['error'].splitlines()[:3] == str(error).splitlines()[:3]
            assert answer['fix'] is None or 'svg' in ask(answer['fix'], SHAPE, devices)
            continue
        picture, error, _ = outcome(
            functools.partial(show, expression, SHAPE, devices if devices in COUNTS else mesh)
        )
        if error is not None:
            assert 'not divisible' in error.sentence
            assert answer['error'] == str(error)
            assert answer['fix'] is None or 'svg' in ask(answer['fix'], SHAPE, devices)
            continue
        assert eval(answer['spec'], {'P': P}) == sharding.spec
        kind = sharding.mesh.axis_types[0].name
        assert answer['mesh'] == f'{str(dict(sharding.mesh.shape))[1:-1]} ({kind})'
        assert answer['warning'] == warning
        assert (answer['svg'], answer['words']) == (picture.svg, list(picture.words))


def test_a_shape_may_be_unknown_or_that_of_a_scalar():
    assert ask('a b -> a4 b2', None, 8)['words'] == list(show('a b -> a4 b2').words)
    scalar = json.loads(playground.answer('... -> * ...', '()', '8'))
    assert scalar['words'] == list(show('... -> * ...', (), 8).words)
    for text in ('8 16', ' 8,16 ', '(8, 16)', '[8,16]', '(8,16,)'):
        assert playground.read_shape(text) == (8, 16)


@pytest.mark.parametrize(
    ('shape', 'devices', 'message'),
    [
        ('8 x', '8', "'8 x' is not a shape\n  example: 8 16"),
        ('-8', '8', "'-8' is not a shape\n  example: 8 16"),
        ('8', '', 'how many devices?\n  number: 8\n  mesh:   data=4 tensor=2'),
        ('8', '0', "'0' is not a number of devices or a mesh\n  number: 8"),
        ('8', '4 data=2', "'4 data=2' is not a number of devices or a mesh"),
        ('8', '4 2', "'4 2' is not a number of devices or a mesh"),
        ('8', 'a=4 a=2', "the mesh lists axis 'a' more than once"),
        ('8', '4097', 'a picture of 4097 devices would be too large here'),
        ('8', '9' * 30, 'is not a number of devices or a mesh'),
        ('8', 'a=64 b=65', 'a picture of 4160 devices would be too large here'),
    ],
)
def test_unreadable_fields_are_errors(shape, devices, message):
    answer = json.loads(playground.answer('a -> a*', shape, devices))
    assert message in answer['error']
    assert answer['fix'] is None


def test_the_error_for_mesh_axes_without_a_mesh_has_an_example():
    error = json.loads(playground.answer('b d -> b@data d@tensor', '8 16', '8'))['error']
    assert 'on this page: devices data=2 tensor=2' in error


def test_names_are_escaped_in_pictures():
    name = '<img/src=x/onerror=alert`1`>'
    answer = ask(f'b d -> b@{name} d', (8, 16), {name: 4})
    ET.fromstring(answer['svg'])
    assert '<img' not in answer['svg']
    assert name in answer['words'][0]


# imports every module of the bundle, and answers; -I -S: no environment, no installed packages
ALONE = """
import importlib, json, sys, zipfile
sys.path.insert(0, sys.argv[1])
for name in zipfile.ZipFile(sys.argv[1]).namelist():
    importlib.import_module(name.removesuffix('.py').replace('/', '.'))
from playground import answer
print(json.dumps([answer(*fields) for fields in json.load(sys.stdin)]))
"""


def test_bundle_runs_on_the_standard_library_alone(tmp_path):
    bundle = tmp_path / 'einshard.zip'
    build_playground.write_bundle(bundle)
    asked = [(expression, shape, '8') for expression in EXPRESSIONS for shape in ('8 16', '6', '')]
    done = subprocess.run(
        [sys.executable, '-I', '-S', '-W', 'error', '-c', ALONE, str(bundle)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [playground.answer(*fields) for fields in asked]


def test_site_is_built_without_npm(tmp_path, monkeypatch, capsys):
    app = SimpleNamespace(
        builder=SimpleNamespace(format='html'), config=SimpleNamespace(exclude_patterns=[])
    )
    monkeypatch.setattr(build_playground, 'HERE', tmp_path / 'docs' / '_playground')
    monkeypatch.setenv('PATH', str(tmp_path))
    build_playground.add(app)
    assert capsys.readouterr().out == 'the site has no playground: npm is not installed\n'
    index = (FOLDER.parent / 'index.md').read_text(encoding='utf-8')
    assert index.count('(playground.md)') == index.count('\nplayground\n') == 1
    page = [index]
    build_playground.drop_links(app, 'index', page)
    assert 'playground' not in page[0]
    assert page[0].count('\n') == index.count('\n') - 2


def needed(found, reason):
    if not found:
        # CI has all of it
        (pytest.fail if os.environ.get('CI') else pytest.skip)(reason)
    return found


@pytest.fixture(scope='module')
def url():
    site = os.environ.get('SITE') or pytest.skip('SITE= names no built site')
    needed(Path(site, 'playground.html').exists(), f'{site} has no playground')

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/playground.html'
        server.shutdown()


@pytest.fixture(scope='module')
def browser(url, tmp_path_factory):
    names = ['chromium', 'chromium-browser', 'google-chrome', 'chrome']
    binary = next(filter(None, map(shutil.which, names)), None)
    needed(binary, 'Chromium is not installed')
    browser = Browser(binary, tmp_path_factory.mktemp('profile'))
    phone = {'width': 390, 'height': 844, 'deviceScaleFactor': 2, 'mobile': True}
    browser.call('Emulation.setDeviceMetricsOverride', **phone)
    browser.call('Page.navigate', url=url)
    yield browser
    browser.close()


SHOWN = """new Promise((resolve, reject) => {
  const end = Date.now() + 120e3
  const look = () => {
    const root = document.querySelector('.playground')
    const part = (name) => root.querySelector(`[data-part=${name}]`)
    const state = root?.dataset.state
    if (state === 'failed' || Date.now() > end) return reject(part('status').textContent)
    if (state !== 'ready') return setTimeout(look, 20)
    resolve({
      error: part('problem').hidden ? null : part('error').textContent,
      fix: part('problem').hidden || part('fix').hidden ? null : part('fix').textContent,
      stale: part('result').inert,
      svg: part('picture').innerHTML,
      words: [...part('words').children].map((line) => line.textContent),
      spec: part('spec').textContent,
      mesh: part('mesh').textContent,
      warning: part('warning').hidden ? null : part('warning').textContent,
      fields: [...root.querySelectorAll('input')].map((field) => field.value),
      link: location.href,
      fits: document.documentElement.scrollWidth <= innerWidth,
    })
  }
  look()
})"""


def type_in(browser, **fields):
    """Types into the fields, and returns what the page then shows."""
    browser.run(f"""new Promise((done) => {{
      const form = document.querySelector('.playground form')
      for (const [name, value] of Object.entries({json.dumps(fields)}))
        form.elements[name].value = value
      form.dispatchEvent(new Event('input'))
      setTimeout(done, 400)  // more than the page waits for the next key
    }})""")
    return browser.run(SHOWN)


def as_shown(browser, svg):
    """SVG as the browser writes it."""
    return browser.run(f"""(() => {{
      const box = document.createElement('div')
      box.innerHTML = {json.dumps(svg)}
      return box.innerHTML
    }})()""")


FIELDS = [
    ('batch d -> batch* d2', '32 64', '8'),
    ('b d -> b@data d +@tensor', '8 16', 'data=4 tensor=2'),
    ('a b c d e -> a2 b2 c2 d2 e*', '16 16 16 16 16', '256'),
    ('λάμδα 高 -> λάμδα* 高', '', '3'),
    ('x 8 y', '', '8'),
    ('a b -> a4 b', '8 16', '8'),
    ('alpha beta gamma delta -> alpha2 beta2 gamma2 delta2 epsilon2 zeta', '', '16'),
    ('b d -> b@<img/src=x/onerror=boom()> d', '8 16', '<img/src=x/onerror=boom()>=4'),
    ('', 'x', '0'),
]


def test_the_page_shows_the_answers_of_python(browser):
    """On a phone: pictures, words, specs and errors, without scrolling the page sideways."""
    browser.run(SHOWN)
    for expression, shape, devices in FIELDS:
        expected = json.loads(playground.answer(expression, shape, devices))
        page = type_in(browser, expression=expression, shape=shape, devices=devices)
        assert page['fits']
        assert page['stale'] == ('error' in expected)
        if 'error' in expected:
            assert page['error'] == expected['error'] + '\n'
            assert page['fix'] == (expected['fix'] and f'Use {expected["fix"]}')
            continue
        assert page['error'] is None
        assert page['svg'] == as_shown(browser, expected['svg'])
        assert [page[part] for part in ('words', 'spec', 'mesh', 'warning')] == [
            expected[part] for part in ('words', 'spec', 'mesh', 'warning')
        ]
    assert not browser.errors


def test_carets_stay_below_their_terms(browser):
    page = type_in(browser, expression=FIELDS[6][0], shape='', devices='16')
    expression, carets = page['error'].splitlines()[1:3]
    assert carets.strip() == '^' * len('epsilon2')
    assert carets.index('^') == expression.index('epsilon2')
    heights, font = browser.run("""[
      [...document.querySelectorAll('.playground .exact')].map((line) => line.offsetHeight),
      getComputedStyle(document.querySelector('.playground pre')).fontFamily,
    ]""")
    assert heights[0] == heights[1]  # one line each
    assert 'monospace' in font


def test_a_fix_and_an_example_fill_the_fields(browser):
    type_in(browser, expression='a b -> a4 b', shape='8 16', devices='8')
    browser.run("document.querySelector('.playground [data-part=fix]').click()")
    page = browser.run(SHOWN)
    assert page['fields'] == ['a b -> * a4 b', '8 16', '8']
    assert page['spec'] == "P(('d1', 'd2'))"
    examples = browser.run("document.querySelectorAll('.playground [data-expression]').length")
    for i in range(examples):
        browser.run(f"document.querySelectorAll('.playground [data-expression]')[{i}].click()")
        page = browser.run(SHOWN)
        assert (page['error'] is None) == (i < examples - 1)  # the last shows an error
        assert page['fits']


def test_a_link_shows_the_same(browser, url):
    fields = {'expression': 'b d -> b@data d@(tensor,fsdp)', 'shape': '8 16'}
    page = type_in(browser, **fields, devices='data=2 tensor=2 fsdp=2')
    state = urllib.parse.parse_qs(urllib.parse.urlsplit(page['link']).fragment)
    assert state == {k: [v] for k, v in {**fields, 'devices': 'data=2 tensor=2 fsdp=2'}.items()}
    browser.call('Page.navigate', url='about:blank')
    browser.call('Page.navigate', url=page['link'])
    assert browser.run(SHOWN) == page
    browser.run("""new Promise((done) => {
      addEventListener('hashchange', () => setTimeout(done))
      location.hash = '#expression=a+b+-%3E+a'  // a link without the other fields
    })""")
    page = browser.run(SHOWN)
    assert page['fields'] == ['a b -> a', '32 64', '8']
    assert "'b' is missing on the right side" in page['error']
    assert not browser.errors


def test_opened_as_a_file_it_says_what_to_do(browser):
    page = Path(os.environ['SITE'], 'playground.html').resolve().as_uri()
    browser.call('Page.navigate', url=page)
    status = browser.run("""new Promise((resolve) => {
      const look = () => {
        const status = document.querySelector('.playground [data-part=status]')
        if (document.readyState !== 'complete' || !status) return setTimeout(look, 20)
        resolve(status.textContent)
      }
      look()
    })""")
    assert 'make serve-docs' in status
