"""Every line of code in the README and in the pages of the documentation, run."""

import ast
import contextlib
import functools
import graphlib
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import counting
import jax
import numpy as np
import pytest
from spawn import python_path

import einshard

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
README = (ROOT / 'README.md').read_text(encoding='utf-8')
PAGES = sorted([*DOCS.glob('*.md'), *DOCS.glob('recipes/*.md')])

# the opening fence of a cell or of Python in the README, up to the closing one
_CODE = re.compile(r'^```(?:python|\{code-cell\}[^\n]*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def name_of(page):
    """'recipes/lora' for docs/recipes/lora.md."""
    return page.relative_to(DOCS).with_suffix('').as_posix()


def code_of(page):
    """The code of a page as one program, with every line where the page has it."""
    text = page.read_text(encoding='utf-8')
    lines = [''] * (text.count('\n') + 1)
    for match in _CODE.finditer(text):
        first = text.count('\n', 0, match.start(1))
        for i, line in enumerate(match[1].splitlines()):
            lines[first + i] = '' if re.match(r':[a-z-]+:', line) else line
    return '\n'.join(lines)


def run(page):
    """Runs a page; returns its names and what it printed."""
    printed = io.StringIO()
    names = {'__name__': page.stem}
    with contextlib.redirect_stdout(printed):
        exec(compile(code_of(page), str(page), 'exec'), names)
    return names, printed.getvalue()


def test_there_are_pages():
    pages = {'index', 'notation', 'functions', 'how_it_works', 'recipes/index'}
    assert {name_of(page) for page in PAGES} >= pages


# what pages show, of packages that the extra `test` brings
PACKAGES = {
    'coming_from': ['flax'],
    'explain': ['libtpu'],
    'gpus': ['jax_cuda13_plugin'],
    'meshes': ['flax', 'optax'],
    'recipes/equinox_training': ['equinox', 'optax', 'orbax'],
    'recipes/experts': ['optax'],
    'recipes/flax_nnx_scan': ['flax', 'optax'],
    'recipes/flax_nnx_trainer': ['flax', 'optax', 'orbax'],
    'recipes/fsdp_tensor': ['optax'],
    'recipes/gradient_accumulation': ['optax'],
    'recipes/lora': ['optax'],
    'recipes/orbax_restore': ['optax', 'orbax'],
    'recipes/pallas': ['libtpu'],
    'recipes/ring_attention': ['optax'],
    'recipes/states_on_host': ['optax'],
    'recipes/zero1': ['optax'],
    'scaling_book_gpus': ['jax_cuda13_plugin'],
    'training_step': ['flatbuffers', 'optax'],
    'whole_models': ['equinox', 'flax', 'optax', 'orbax'],
}


# tests/test_processes.py runs the first, which starts processes, and test_real_code.py the second;
# in a process with libtpu, JAX 0.10 crashes when a profile starts
ELSEWHERE = {'many_hosts', 'real_code', 'profiling'}
WITHOUT_CODE = {'api', 'pull_requests', 'notebooks', 'performance', 'playground', 'recipes/index'}


def marked(page):
    is_for_gpus = 'jax_cuda13_plugin' in PACKAGES.get(name_of(page), ())
    return pytest.param(page, marks=[pytest.mark.gpu] * is_for_gpus, id=name_of(page))


@pytest.mark.slow
@pytest.mark.parametrize('page', [marked(p) for p in PAGES if name_of(p) not in ELSEWHERE])
def test_page_runs(page, monkeypatch):
    for package in PACKAGES.get(name_of(page), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(DOCS)
    names, _ = run(page)
    assert name_of(page) in WITHOUT_CODE or len(names) > 2


@pytest.mark.slow
def test_profiling_runs_in_a_process_without_libtpu():
    done = subprocess.run(
        [sys.executable, '-c', code_of(DOCS / 'profiling.md')],
        env={**os.environ, 'PYTHONPATH': python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    row, joined = done.stdout.splitlines()
    kind, array, _, axis, n, _ = row.split()
    assert (kind, array, axis) == ('all-reduce', 'f32[128,256]', 'tensor:')
    assert int(n) in (32, 40)  # 5 runs on 8 devices, of which the first may be left out
    assert joined == 'joined: 100% of device time, 8 devices'


def test_every_example_is_offered_as_page_script_and_notebook():
    offered = (DOCS / 'notebooks.md').read_text(encoding='utf-8')
    for path in (DOCS / 'examples').glob('*.py'):
        name = f'examples/{path.stem}'
        assert f'({name}.py)' in offered
        assert f'{{download}}`script <{name}.py>`' in offered
        assert f'{{nb-download}}`notebook <{name}.ipynb>`' in offered


@pytest.mark.gpu
def test_readme_runs():
    """The output of the README, and that its `mlp` compiles to the same program as `by_hand`."""
    pytest.importorskip('jax_cuda13_plugin')
    names, printed = run(ROOT / 'README.md')
    shown = re.search(r'```\n(collectives\n.*?)```', README, re.DOTALL)[1]
    printed = re.sub(r'README\.md:\d+', 'model.py:16', printed)
    # the compilers of the oldest and the newest JAX have other schedules
    step = r'the estimated\s+step \d+%'
    printed = re.sub(step, re.search(step, README)[0], printed)
    for part in shown.split('..\n'):
        assert ' '.join(part.split()) in ' '.join(printed.split())
    shapes = [jax.ShapeDtypeStruct(names[x].shape, np.float32) for x in ('x', 'w_in', 'w_out')]
    ours, theirs = names['mlp'].lower(*shapes), names['by_hand'].lower(*shapes)
    assert counting.program(ours.compile()) == counting.program(theirs.compile())


def test_the_picture_of_the_readme_is_that_of_show():
    mesh = einshard.device_mesh(jax.devices()[:8], data=4, tensor=2)
    picture = str(einshard.show('b d -> b@data d@tensor', (8, 16), mesh))
    assert f'```\n{picture}\n```' in README


@pytest.mark.parametrize('page', [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *PAGES], ids=str)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding='utf-8')
    links = re.findall(r'\]\(([^)#\s]+)', text)
    for link in links:
        if not link.startswith('https://'):
            assert (page.parent / link).exists(), f'{page.name} links to {link}'


def listed_in(index):
    """The names of the pages in the tables of contents of a page."""
    trees = re.findall(r'^```\{toctree\}\n(.*?)^```$', index.read_text(), re.MULTILINE | re.DOTALL)
    lines = {line for tree in trees for line in tree.split() if not line.startswith(':')}
    return {name_of(index.parent / f'{line}.md') for line in lines}


def test_every_page_is_in_the_table_of_contents():
    listed = listed_in(DOCS / 'index.md') | listed_in(DOCS / 'recipes' / 'index.md')
    examples = {f'examples/{path.stem}' for path in (DOCS / 'examples').glob('*.py')}
    assert {name_of(page) for page in PAGES} - {'index'} | examples <= listed


def test_the_reference_has_every_public_name_once():
    reference = (DOCS / 'api.md').read_text()
    names = re.findall(r'^\.\. auto\w+:: einshard\.(\w+)$', reference, re.MULTILINE)
    assert sorted(names) == sorted(einshard.__all__)


def documented(name):
    """A class of the reference that functions return."""
    reference = (DOCS / 'api.md').read_text(encoding='utf-8')
    module = re.search(rf'^\.\. autoclass:: (einshard\._[\w.]+)\.{name}$', reference, re.MULTILINE)
    return getattr(importlib.import_module(module[1]), name)


def test_the_reference_has_the_objects_that_functions_return():
    for name in ('Report', 'Finding', 'Tried', 'Collective', 'Memory', 'Bound', 'Plan'):
        assert documented(name).__doc__


def test_readme_names_the_versions_that_the_package_asks_for():
    wanted = (ROOT / 'pyproject.toml').read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', wanted)[1]
    jax_version = re.search(r'"jax>=([\d.]+)"', wanted)[1]
    assert f'Python {python} or newer' in README
    assert f'JAX {jax_version} or newer' in README


def test_the_page_lists_every_kind_of_findings():
    page = (DOCS / 'explain.md').read_text(encoding='utf-8')
    headings = '| kind | what it reports |', '| kind | what it says |'
    of_findings_and_notes = get_args(get_type_hints(documented('Finding'))['kind'])
    for kinds, heading in zip(of_findings_and_notes, headings, strict=True):
        table = page.partition(heading)[2].partition('\n\n')[0]
        assert re.findall(r'^\| ([a-z][\w -]*) \|', table, re.MULTILINE) == [*get_args(kinds)]


def imports(module):
    """The modules of einshard that a module imports, as paths, also those only for types."""
    package = ROOT / 'einshard'
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding='utf-8'))):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = module.parents[node.level - 1]
            target = folder.joinpath(*(node.module or '').split('.'))
            found.add(target.with_suffix('.py').relative_to(package))
    return found


@functools.cache
def modules():
    package = ROOT / 'einshard'
    if not package.exists():
        pytest.skip('no checkout')
    return {path.relative_to(package): imports(path) for path in package.rglob('*.py')}


def test_imports_have_no_cycles():
    graph = modules()
    assert set().union(*graph.values()) <= set(graph)
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_map_of_modules_is_complete_and_in_the_order_of_imports():
    contributing = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    table = contributing.partition('| module | holds |')[2].partition('Imports go one way')[0]
    listed = [name + ending.strip('/') for name, ending in re.findall(r'`(_\w+)(\.py|/)`', table)]
    graph = modules()
    apart = {'__init__.py', '_version.py'}
    assert sorted(listed) == sorted({path.parts[0] for path in graph} - apart)
    for path, others in graph.items():
        if path.parts[0] not in apart:
            names = {o: o.parts[0] for o in others if o.parts[0] not in apart}
            row = listed.index(path.parts[0])
            late = [o for o, name in names.items() if listed.index(name) > row]
            assert not late, f'{path} imports {late} from below'
