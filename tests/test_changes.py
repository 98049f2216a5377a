"""einshard check: stored reports, merge bases, and what a pull request is told."""

import http.server
import json
import os
import runpy
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from command import main

from einshard import EinshardError, topology

# private: what the command prints is made of these
from einshard._changes.base import merge_base
from einshard._changes.command import Options, check
from einshard._changes.compare import compare
from einshard._changes.config import Step, read_config
from einshard._changes.text import MARK, MAX_LENGTH, as_markdown, as_text
from einshard._cli.check_step import function_at

ROOT = Path(__file__).parents[1]
MIB = 2**20
MODEL = """import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def shapes(mesh):
    def s(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, 'float32', sharding=NamedSharding(mesh, spec))

    return {'up': s(P(None, 'tensor'), 512, 2048), 'down': s(P('tensor', None), 2048, 512)}


def batch(mesh):
    return jax.ShapeDtypeStruct((256, 512), 'float32', sharding=NamedSharding(mesh, P('data')))


@jax.jit
def step(params, x):
    def loss(params):
        h = jax.nn.relu(x @ params['up'])
        return jnp.mean((h @ params['down']) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))
"""
CONFIG = """[tool.einshard]
tries = 0

[[tool.einshard.step]]
name = "train"
function = "model:step"
args = ["model:shapes", "model:batch"]
mesh = {data = 2, tensor = 4}
targets = ["cpu:8"]
chip = "v5e"
"""
WRONG = MODEL.replace("P('tensor', None), 2048", "P(None, 'tensor'), 2048")


def git(folder, *arguments):
    command = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b.c', *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path):
    (tmp_path / 'model.py').write_text(MODEL)
    (tmp_path / 'pyproject.toml').write_text(CONFIG)
    git(tmp_path, 'init', '-q', '-b', 'main')
    git(tmp_path, 'add', '-A')
    git(tmp_path, 'commit', '-qm', 'base')
    return tmp_path


@pytest.fixture(autouse=True)
def own_einshard(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(ROOT))


# --- the whole command ----------------------------------------------------------------------------


@pytest.mark.slow
def test_stored_reports(project):
    missing = check(Options(fail_on=frozenset({'missing'})), project)
    assert (missing.text.splitlines()[0], missing.status) == ('train on cpu:8: new', 3)
    stale = project / '.einshard' / 'old@cpu-8.json'
    stale.parent.mkdir()
    stale.write_text('{}')
    assert 'wrote' in check(Options(update=True), project).text
    assert not stale.exists()
    stored = json.loads((project / '.einshard' / 'train@cpu-8.json').read_text())
    sources = {row['source'] for row in stored['collectives']}
    assert sources == {'model.py:20', 'model.py:21'} or sources == {'model.py:21'}
    assert str(project) not in json.dumps(stored)
    assert stored['functions']['model.py:21'] == 'step.loss'
    assert stored['versions'].keys() >= {'jax', 'jaxlib', 'einshard'}
    assert stored['command'].startswith('einshard explain model:step --args')
    same = check(Options(fail_on=frozenset({'bytes', 'findings'})), project)
    assert (same.text, same.status) == ('train on cpu:8: no change', 0)

    (project / 'model.py').write_text(f'"""Other lines."""\n{WRONG}')
    changed = check(Options(fail_on=frozenset({'bytes'}), json=True), project)
    (change,) = json.loads(changed.text)['changes']
    assert (change['status'], change['fails'], changed.status) == ('changed', ['bytes'], 3)
    (sent,) = (figure for figure in change['figures'] if figure['kind'] == 'bytes')
    # gradients: 2 MiB over 2 devices; over 4, sums of f32[128,512], or of f32[128,2048] and gathers
    sums, gathers = 2 * 3 / 4, 3 / 4
    assert sent['before'] == stored['network_bytes'] == 2 * MIB + sums * MIB / 4
    assert sent['after'] == 2 * MIB + sums * MIB + gathers * MIB
    placements = {
        'path': '{params,result}/down',
        'before': 'a b -> a@tensor b',
        'after': 'a b -> a b@tensor',
    }
    assert change['placements'] == [placements]
    # gradients of other shapes are the same bytes, and no row; lines have moved
    assert {row['along'] for row in change['collectives']} == {'tensor'}
    assert {row['source'] for row in change['collectives']} <= {'model.py:21', 'model.py:22'}


@pytest.mark.slow
def test_merge_base(project, monkeypatch):
    (project / 'pyproject.toml').write_text(CONFIG.replace('tries = 0', 'tries = 4'))
    git(project, 'commit', '-qam', 'tries')
    git(project, 'checkout', '-qb', 'change')
    (project / 'model.py').write_text(WRONG)
    git(project, 'commit', '-qam', 'change')
    (project / 'extra.py').write_text('from model import *\n')
    text = CONFIG.replace('tries = 0', 'tries = 4')
    extra = text.partition('[[')[2].replace('train', 'new').replace('model:step', 'extra:step')
    (project / 'pyproject.toml').write_text(f'{text}\n[[{extra}')
    # the folder of the change is found first, as an editable install makes it
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(project), str(ROOT)]))
    comment = project / 'comment.md'
    done = check(Options(base='main', markdown=str(comment), json=True), project)
    train, new = json.loads(done.text)['changes']
    assert (train['status'], new['status'], done.status) == ('changed', 'new', 0)
    (finding,) = train['findings']
    assert "shard params/down with 'a b -> a@tensor b'" in finding['suggestion']
    markdown = comment.read_text()
    assert markdown.startswith(f'{MARK}\n### einshard: 2 of 2 programs changed\n')
    assert 'Tried: sends 2.4 MiB instead of 4.2 MiB' in markdown
    assert len(git(project, 'worktree', 'list').splitlines()) == 1


@pytest.mark.slow
def test_a_module_of_the_change_is_no_base(project, monkeypatch):
    """What finds the modules of the change from the base would compare it with itself."""
    git(project, 'checkout', '-qb', 'change')
    hook = project / 'hook'
    hook.mkdir()
    (hook / 'sitecustomize.py').write_text(
        'import importlib.util, sys\n'
        'class Finder:\n'
        '    def find_spec(name, path=None, target=None):\n'
        f'        file = {str(project / "model.py")!r}\n'
        "        return importlib.util.spec_from_file_location(name, file) if name == 'model' "
        'else None\n'
        'sys.meta_path.insert(0, Finder)\n'
    )
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(hook), str(ROOT)]))
    done = check(Options(base='main'), project)
    assert done.status == 2
    assert "module 'model' is not that of the base" in done.text


@pytest.mark.slow
def test_a_step_that_does_not_compile(project):
    config = (project / 'pyproject.toml').read_text()
    step = config.partition('[[')[2]
    broken = step.replace('"train"', '"broken"').replace('model:step', 'model:missing')
    (project / 'pyproject.toml').write_text(f'{config}\n[[{broken}')
    done = check(Options(), project)
    assert done.status == 2
    assert "broken on cpu:8: error: module 'model' has no 'missing'" in done.text
    assert 'train on cpu:8: new' in done.text  # others still run


# --- git ------------------------------------------------------------------------------------------


def test_no_merge_base(project, tmp_path_factory):
    with pytest.raises(EinshardError, match="no merge base of 'nowhere' and HEAD"):
        merge_base(project, 'nowhere').__enter__()
    (project / 'more').write_text('')
    git(project, 'add', '-A')
    git(project, 'commit', '-qm', 'more')
    shallow = tmp_path_factory.mktemp('clone') / 'shallow'
    git(project, 'clone', '-q', '--depth', '1', f'file://{project}', str(shallow))
    with pytest.raises(EinshardError, match='fetch-depth: 0'):
        merge_base(shallow, 'origin/main~1').__enter__()
    outside = tmp_path_factory.mktemp('outside')
    with pytest.raises(EinshardError, match='not in a git repository'):
        merge_base(outside, 'main').__enter__()


@pytest.mark.parametrize(
    'setting', ['color.ui=always', 'diff.noprefix=true', 'diff.mnemonicPrefix=true']
)
def test_lines_of_the_base(setting, project):
    git(project, 'config', *setting.split('='))
    before = [f'line {i}\n' for i in range(1, 21)]
    after = [*before]
    after[11:12] = []  # 12 goes
    after[5:7] = ['a\n', 'b\n', 'c\n']  # 6 and 7 become three
    after[2:2] = ['x\n', 'y\n']  # two lines before 3
    (project / 'model.py').write_text(''.join(before))
    (project / 'notes').write_bytes(b'caf\xe9')  # Latin-1
    git(project, 'add', '-A')
    git(project, 'commit', '-qm', 'before')
    (project / 'model.py').write_text(''.join(after))
    (project / 'notes').write_bytes(b'the caf\xe9')
    with merge_base(project, 'HEAD') as base:
        for old in (1, 2, 3, 4, 5, 8, 9, 10, 11, 13, 20):
            new = after.index(f'line {old}\n') + 1
            assert base.new_line(f'model.py:{old}') == f'model.py:{new}'
        assert base.new_line('other.py:3') == 'other.py:3'
        assert base.new_line('') == ''
    assert not base.tree.exists()


# --- comparing reports ----------------------------------------------------------------------------


def collective(kind='all-gather', line=3, n_bytes=1000, of=('w',), name='c', **fields):
    return {
        'name': name,
        'kind': kind,
        'arrays': 'f32[8]',
        'along': 'data',
        'executions': 1,
        'network_bytes': n_bytes,
        'source': f'model.py:{line}',
        'of': [*of],
        'role': 'weights',
        'axes': '',
        **fields,
    }


def report(*collectives, findings=(), memory=100, exposed=None, **fields):
    parts = dict.fromkeys(('results', 'temporaries', 'code', 'aliased', 'constants', 'peak'), 0)
    return {
        'network_bytes': sum(c['network_bytes'] * c['executions'] for c in collectives),
        'memory': {**parts, 'arguments': memory, 'capacity': 1000},
        'bounds': [{'resource': 'network', 'along': 'data', 'seconds': 1e-3}],
        'timeline': exposed and {'totals': {'exposed': exposed}},
        'collectives': [*collectives],
        'arguments': [],
        'results': [],
        'findings': [*findings],
        'functions': {f'model.py:{i}': 'f' if i < 10 else 'g' for i in range(20)},
        'versions': {'jax': '1'},
        **fields,
    }


STEP = Step('train', 'model:step', (), {}, ('cpu:8',), {}, None, 0, frozenset())


def compared(before, after, **options):
    return compare(STEP, 'cpu:8', before, after, 0.03, **options)


def rows(change):
    return [(row.source, row.before, row.after) for row in change.rows]


def test_lines_that_move_are_no_change():
    change = compared(report(collective(line=3)), report(collective(line=7)))
    assert change.status == 'same'
    # but another function is
    change = compared(report(collective(line=3)), report(collective(line=12)))
    assert rows(change) == [('model.py:3', 1000, 0), ('model.py:12', 0, 1000)]


def test_collectives_that_the_compiler_combines_otherwise():
    before = report(
        collective(of=('a', 'b', 'c'), line=3), collective(of=('d',), line=3, n_bytes=500)
    )
    after = report(collective(of=('a', 'b'), line=15, n_bytes=700))
    change = compared(before, after)
    assert {*rows(change)} == {('model.py:15', 1000, 700), ('model.py:3', 500, 0)}


def test_many_paths_are_folded():
    paths = [f'layers/{i}/{name}' for i in range(20) for name in ('up', 'down')]
    change = compared(report(), report(collective(of=paths)))
    assert change.rows[0].of == 'layers/0-19/{up,down}'


def test_collectives_of_one_line_are_paired_first():
    before = report(collective(line=3), collective(line=4, n_bytes=2000))
    after = report(collective(line=5, n_bytes=2000), collective(line=4))
    change = compared(before, after, new_line=lambda s: s.replace(':4', ':5').replace(':3', ':4'))
    assert change.status == 'same'
    change = compared(before, after)
    assert {*rows(change)} == {('model.py:5', 1000, 2000), ('model.py:4', 2000, 1000)}


def test_changes_below_the_threshold_are_none():
    big = collective(n_bytes=100_000, of=('big',))
    change = compared(report(big, collective(n_bytes=1000)), report(big, collective(n_bytes=3000)))
    assert change.status == 'same'
    change = compared(report(big, collective(n_bytes=1000)), report(big, collective(n_bytes=5000)))
    assert rows(change) == [('model.py:3', 1000, 5000)]
    assert change.fails == {'bytes'}


@pytest.mark.parametrize(
    ('before', 'after', 'fails'),
    [
        ({'memory': 100}, {'memory': 102}, set()),
        ({'memory': 100}, {'memory': 110}, {'memory'}),
        ({'memory': 900}, {'memory': 1100}, {'memory', 'does-not-fit'}),
        ({'exposed': 1.0}, {'exposed': 1.1}, {'exposed'}),
        ({'exposed': 1.0}, {'exposed': 0.5}, set()),
        ({'exposed': None}, {'exposed': 0.5}, set()),
        ({}, {'versions': {'jax': '2'}}, {'versions'}),
    ],
)
def test_kinds_of_failures(before, after, fails):
    assert compared(report(**before), report(**after)).fails == fails
    assert compared(None, report()).fails == {'missing'}


def test_other_versions_are_not_compared():
    change = compared(report(collective()), report(versions={'jax': '2'}))
    assert (change.status, change.rows, change.versions) == ('versions', (), ('jax 1 -> 2',))


def placed(**placements):
    return [{'path': path, 'placement': text} for path, text in placements.items()]


def test_placements_that_changed():
    before = placed(w='a b -> a@x b', b='a -> a8', u='not used', old='a -> a', n='a b -> a b')
    after = placed(w='a b -> a@y b', b='c -> c8', u='a -> a', new='a -> a', n='i o -> i o@x')
    big = report(collective(n_bytes=2000), results=after)
    change = compared(report(collective(), arguments=before, results=before), big)
    assert [(each.path, each.before, each.after) for each in change.placements] == [
        ('w', 'a b -> a@x b', 'a b -> a@y b'),
        ('u', 'not used', 'a -> a'),
        ('n', 'a b -> a b', 'i o -> i o@x'),
    ]
    lines = "w: 'a b -> a@x b' -> 'a b -> a@y b'", "u: 'not used' -> 'a -> a'"
    assert as_text([change]).startswith(
        f'train on cpu:8: changed\n  placements that changed:\n    {lines[0]}\n    {lines[1]}\n'
    )
    title = '**train** on cpu:8, placements that changed:'
    assert f'\n{title}\n\n* {lines[0]}\n* {lines[1]}\n' in as_markdown([change], None)


def test_many_placements_that_changed():
    before, after = ({f'w{i}': f'a -> a@{x}{i}' for i in range(10)} for x in 'xy')
    change = compared(report(arguments=placed(**before)), report(arguments=placed(**after)))
    assert change.status == 'same'  # nothing that counts
    grown = report(collective(), arguments=placed(**after))
    change = compared(report(arguments=placed(**before)), grown)
    assert as_text([change]).count(' -> a@') == 8 * 2
    assert '\n    and 2 more\n' in as_text([change])


def finding(kind='placement', line=3, explains=('c',), suggestion=''):
    text = {'text': 'it is slow', 'suggestion': suggestion, 'tried': None}
    return {'kind': kind, 'source': f'model.py:{line}', 'explains': [*explains], **text}


@pytest.mark.parametrize(
    ('after', 'is_new'),
    [
        (finding(line=5), False),
        (finding(line=15), True),
        (finding(kind='reshard'), True),
        (finding(explains=('d',)), True),
    ],
)
def test_findings_are_new_by_kind_arrays_and_function(after, is_new):
    collectives = collective(), collective(name='d', of=('v',), n_bytes=0)
    before = report(*collectives, findings=[finding()])
    change = compared(before, report(*collectives, findings=[after]))
    assert (len(change.findings) == 1) == ('findings' in change.fails) == is_new


# --- text -----------------------------------------------------------------------------------------


def test_equal_rows_are_one_line():
    many = [collective(name=str(i)) for i in range(4)]
    change = compared(report(), report(*many, collective(line=5)))
    row = 'all-gather of w along data: 0 B -> 1000 B'
    lines = f'4 x {row} each, model.py:3', f'{row}, model.py:5'
    assert as_text([change]).endswith(f'\n  {lines[0]}\n  {lines[1]}')
    # a list, as the colors of a diff would praise what is new
    markdown = as_markdown([change], None)
    title = '**train** on cpu:8, what a device sends:'
    assert f'\n{title}\n\n* {lines[0]}\n* {lines[1]}\n' in markdown
    assert '```' not in markdown


def test_sources_are_relative_to_the_repository():
    sources = 'src/model.py:3', '/site-packages/flax/linear.py:8'
    rows = [collective(name=source, source=source) for source in sources]
    findings = [{**finding(explains=(source,)), 'source': source} for source in sources]
    change = compared(report(), report(*rows, findings=findings))
    lines = as_text([change]).splitlines()
    assert [line.rpartition(', ')[2] for line in lines if 'all-gather' in line] == [
        'src/model.py:3',
        'linear.py:8',
    ]
    assert '  new finding: src/model.py:3: it is slow' in lines
    assert '  new finding: linear.py:8: it is slow' in lines


PATCH = """--- a/model.py
+++ b/model.py
@@ -2,3 +2,3 @@
 x
-y = f(a)
+y = g(a)
 z
"""


def test_a_patch_is_a_diff():
    after = report(collective(), findings=[finding(suggestion='use g')], patch=PATCH)
    text = as_markdown([compared(report(collective()), after)], None)
    # GitHub takes suggestions only in comments on lines
    assert f'As tried:\n\n```diff\n{PATCH}```\n' in text
    assert 'Use g.' in text


def test_tables_and_length():
    many = [collective(line=i, of=(f'a|b_{i}<!--',), name=str(i), arrays=str(i)) for i in range(9)]
    change = compared(report(), report(*many))
    text = as_markdown([change] * 500, None)
    assert len(text) <= MAX_LENGTH
    assert text.endswith('einshard check prints the rest\n')
    assert sum(line.startswith('```') for line in text.splitlines()) % 2 == 0
    same = as_markdown([compared(report(), report())], None)
    assert same.splitlines()[1] == '### einshard: 0 of 1 program changed'
    assert 'No change: train on cpu:8.' in same
    assert as_text([compared(report(), report())]) == 'train on cpu:8: no change'


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('old', 'new', 'says'),
    [
        ('tries = 0', 'trys = 0', r"'trys' of \[tool.einshard\] is unknown(.|\n)*try: +tries"),
        ('targets =', 'target =', "'target' of step 1(.|\n)*try: +targets"),
        ('["cpu:8"]', '["cpu"]', "'cpu' of step 1(.|\n)*is not a target"),
        ('["cpu:8"]', '["cpu:4"]', "has 8 devices, and 'cpu:4' has 4"),
        (
            '["cpu:8"]',
            '["cpu:8", "v5e:4x4"]',
            "has 8 devices, and 'v5e:4x4' has 16(.|\n)*another step",
        ),
        ('["cpu:8"]', '["h100:2x8"]', "mesh of step 1 (.|\n)*, and 'h100:2x8' has 16"),
        ('["cpu:8"]', '["v5p:2x2x4"]', "and 'v5p:2x2x4' has 16 or 32"),
        ('["cpu:8"]', '["v5e:4x4x4"]', 'but v5e slices have 2'),
        ('["cpu:8"]', '[]', 'has no targets'),
        ('data = 2', 'data = "2"', "mesh axis 'data'(.|\n)*size '2'"),
        ('"train"', '"a/b"', 'cannot be part of a file name'),
        ('"train"', '3', 'name = 3(.|\n)*another type'),
        ('tries = 0', 'fail_on = ["byte"]', "'byte' of fail_on(.|\n)*try: +bytes"),
        ('tries = 0', 'threshold = 3', 'is not a fraction'),
        ('[[tool.einshard.step]]', '[[tool.einshard.steps]]', "'steps'(.|\n)*try: +step"),
        ('tool.einshard', 'tool.other', r'has no \[tool.einshard\]'),
        ('tries = 0', 'tries =', 'is not valid TOML'),
    ],
)
def test_bad_configuration(tmp_path, old, new, says):
    assert old in CONFIG
    (tmp_path / 'pyproject.toml').write_text(CONFIG.replace(old, new))
    with pytest.raises(EinshardError, match=says):
        read_config(tmp_path)


@pytest.mark.parametrize('option', ['--base main', '--json', '--markdown a.md', '--fail-on bytes'])
def test_an_update_compares_nothing(project, option, monkeypatch, capsys):
    monkeypatch.chdir(project)
    assert main(['check', '--update', *option.split()]) == 2
    assert f'so it takes no {option.split()[0]}' in capsys.readouterr().err
    assert not (project / '.einshard').exists()


_SLICES = 'v5e:2x4', '2*v5e:2x2', 'v6e:4x2', 'v5p:2x2x2', 'v4:2x2x1', 'v3:2x2', 'tpu7x:2x2x1'


def test_meshes_that_fit_their_targets(tmp_path):
    targets = ['cpu:8', 'h100:8', 'h100:2x4', 'gb200:2x4', 'rtx6000pro:8', *_SLICES]
    (tmp_path / 'pyproject.toml').write_text(CONFIG.replace('["cpu:8"]', str(targets)))
    config = read_config(tmp_path)
    (step,) = config.steps
    assert step.targets == targets
    assert config.file(step, '2*v5e:2x2').name == f'{step.name}@2x-v5e-2x2.json'
    assert "--topology '2*v5e:2x2' --mesh" in step.command('2*v5e:2x2')
    assert replace(step, chip='TPU v5e').command('cpu:8').endswith("--chip 'TPU v5e'")


@pytest.mark.parametrize('name', _SLICES)
def test_libtpu_says_the_number_of_devices_of_a_slice(name):
    pytest.importorskip('libtpu', reason='libtpu describes TPUs, and is not installed')
    assert topology(name).size == 8


def test_names_and_targets(project):
    step = CONFIG.partition('[[')[2]
    (project / 'pyproject.toml').write_text(f'{CONFIG}\n[[{step}')
    with pytest.raises(EinshardError, match="two steps have the name 'train'"):
        check(Options(), project)
    (project / 'pyproject.toml').write_text(CONFIG)
    with pytest.raises(EinshardError, match="no step is named 'other'"):
        check(Options(names=('other',)), project)
    with pytest.raises(EinshardError, match="no step has the target 'cpu:4'"):
        check(Options(targets=('cpu:4',)), project)


@pytest.mark.parametrize('options', [[], ['--update']])
def test_a_selection_of_nothing(project, options, monkeypatch, capsys):
    step = CONFIG.partition('[[')[2].replace('"train"', '"other"').replace('cpu:8', 'h100:8')
    (project / 'pyproject.toml').write_text(f'{CONFIG}\n[[{step}')
    monkeypatch.chdir(project)
    assert main(['check', 'other', '--target', 'cpu:8', *options]) == 2
    message = capsys.readouterr().err
    assert "no selected step has the target 'cpu:8'" in message
    assert "targets of 'other': 'h100:8'" in message


# --- the action -----------------------------------------------------------------------------------


class GitHub(http.server.BaseHTTPRequestHandler):
    """The comments of one pull request."""

    comments: list
    status = 200

    def do_GET(self):
        self.answer(self.comments)

    def do_POST(self):
        self.comments.append({'id': len(self.comments), 'body': self.body()})
        self.answer(self.comments[-1])

    def do_PATCH(self):
        self.comments[int(self.path.rpartition('/')[2])]['body'] = self.body()
        self.answer({})

    def body(self):
        return json.loads(self.rfile.read(int(self.headers['Content-Length'])))['body']

    def answer(self, data):
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def github(tmp_path, monkeypatch):
    handler = type('Handler', (GitHub,), {'comments': [{'id': 0, 'body': 'nice'}]})
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    event = tmp_path / 'event.json'
    event.write_text(json.dumps({'pull_request': {'number': 7}}))
    monkeypatch.setenv('GITHUB_API_URL', f'http://127.0.0.1:{server.server_port}')
    monkeypatch.setenv('GITHUB_EVENT_PATH', str(event))
    monkeypatch.setenv('GITHUB_REPOSITORY', 'a/b')
    yield handler
    server.shutdown()
    server.server_close()


def test_one_comment(github):
    action = runpy.run_path(str(ROOT / '.github/actions/check/check.py'))
    write = action['write_comment']
    assert action['MARK'] == MARK
    before = report(collective())
    change, same = [compared(before, report())], [compared(before, before)]
    assert write(as_markdown(same, None))
    assert len(github.comments) == 1  # nothing to say
    assert write(as_markdown(change, None))
    assert write(as_markdown(same, None))  # nothing changed any more
    assert [each['body'] for each in github.comments] == ['nice', as_markdown(same, None)]
    github.status = 403
    assert not write(as_markdown(change, None))


@pytest.mark.slow
def test_the_action_runs_in_a_bare_environment(project, tmp_path):
    """As for a pull request of a fork: the summary of the job has the text."""
    git(project, 'checkout', '-qb', 'change')
    summary = tmp_path / 'summary.md'
    environment = {
        'PATH': os.environ['PATH'],
        'PYTHONPATH': str(ROOT),
        'BASE': 'main',
        'COMMENT': 'false',
        'FAIL_ON': 'bytes findings',
        'GITHUB_STEP_SUMMARY': str(summary),
        'JAX_PLATFORMS': 'cpu',
    }
    script = ROOT / '.github/actions/check/check.py'
    done = subprocess.run([sys.executable, str(script)], cwd=project, env=environment, check=False)
    assert done.returncode == 0
    assert summary.read_text().startswith(f'{MARK}\n### einshard: 0 of 1 program changed')


def test_the_function_of_a_line_in_a_long_expression(tmp_path):
    file = tmp_path / 'long.py'
    file.write_text(f'def f():\n    return {" + ".join(["1"] * 1_200)}\n')
    assert function_at(f'{file}:2') == 'f'
