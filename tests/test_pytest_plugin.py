"""The pytest plugin: golden files and assert_collectives, in sessions of pytest of their own."""

import contextlib
import functools
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from placed import struct
from refusal import refusal
from spawn import python_path

import einshard
from einshard import explain, sharded

try:
    from einshard import _pytest_plugin
except ImportError:  # of a wheel
    import _einshard_pytest_plugin as _pytest_plugin

sys.path.append(str(Path(__file__).parents[1] / 'docs' / 'examples'))
import transformer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'explain.md').read_text(encoding='utf-8')
ARGUMENTS = np.ones((8, 64)), np.ones((64, 8))
PRODUCT = """\
product on 8 devices

arguments
  x: float32[8,64]  x y -> x y8
  w: float32[64,8]  y z -> y8 z
results
  result: float32[8,8]  a b -> 8 a b
collectives
  1 x all-reduce f32[8,8], 1 group of 8 along y
"""
# the beginning of test files
MODULE = """\
import jax
import numpy as np
import pytest
from einshard import explain, sharded

@sharded('x y -> x y*', 'y z -> y* z', mesh=jax.devices()[:8])
def product(x, w):
    return x @ w

arguments = np.ones((8, 64)), np.ones((64, 8))
"""


@pytest.fixture(scope='module')
def report():
    @sharded('x y -> x y*', 'y z -> y* z', mesh=jax.devices()[:8])
    def product(x, w):
        return x @ w

    return explain(product, *ARGUMENTS)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Runs pytest in this process with only this plugin; returns whether tests pass, and output."""
    monkeypatch.delenv('PYTEST_ADDOPTS', raising=False)
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)  # files change within a second
    path = tmp_path / 'tests' / 'test_model.py'
    # unraisableexception collects garbage several times at the end
    plugins = ('einshard', 'xdist', 'cacheprovider', 'threadexception', 'unraisableexception')
    without = [f'-pno:{name}' for name in plugins]
    isolated = ['-c', os.devnull, f'--rootdir={tmp_path}', '--import-mode=importlib', '-s']

    def run(source, *options):
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding='utf-8')
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = pytest.main([*without, *isolated, *options, str(path)], [_pytest_plugin])
        ours = [name for name, m in sys.modules.items() if getattr(m, '__file__', '') == str(path)]
        for name in ours:
            del sys.modules[name]
        assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), printed.getvalue()
        return status == pytest.ExitCode.OK, printed.getvalue()

    return run


def goldens_of(folder):
    """The golden files of the test file in sessions: texts by name."""
    files = (folder / 'tests' / 'golden' / 'test_model').glob('*')
    return {file.name: file.read_text(encoding='utf-8') for file in files}


@pytest.fixture
def golden_files(session, tmp_path, monkeypatch):
    """Writes golden files of a report in a session, by default one; returns texts by name."""

    def write(report, test=lambda golden, report: golden(report)):
        monkeypatch.setitem(sys.modules, 'given', SimpleNamespace(report=report, test=test))
        source = """import given

def test_step(einshard_golden):
    given.test(einshard_golden, given.report)
"""
        passed, printed = session(source, '--einshard-update')
        assert passed, printed
        return goldens_of(tmp_path)

    return write


@pytest.fixture
def golden_text(golden_files):
    return lambda report: golden_files(report)['test_step.golden']


def failures(printed):
    """The output of a session, without the margin of failures."""
    return re.sub(r'^E {7}(Failed: )?', '', printed, flags=re.MULTILINE)


def test_the_example_of_the_page(session, tmp_path):
    section = PAGE.partition('## Golden files')[2]
    module, golden, difference = re.findall(r'^```\w*\n(.*?)^```$', section, re.M | re.S)
    changed = module.replace("'y z -> y* z'", "'y z -> y z*'")
    file = 'tests/golden/test_model/test_mlp.golden'
    unknown = f'no golden file {file} for mlp\n  to write it: pytest --einshard-update\n'
    # test file, options; whether it passes, a part of the output, and of the golden file
    sessions = [
        (module, [], False, unknown, None),
        (module, ['--einshard-update'], True, f'\nwrote {file}\n', golden),
        (module, [], True, None, golden),
        (changed, [], False, difference, golden),
        (changed, ['--einshard-update'], True, f'\nrewrote {file}\n', 'all-gather'),
        (changed, ['--einshard-update'], True, None, 'all-gather'),
    ]
    for source, options, passes, message, content in sessions:
        passed, printed = session(source, *options)
        assert passed == passes
        assert message in failures(printed) if message else 'golden' not in printed
        files = goldens_of(tmp_path)
        assert content in files['test_mlp.golden'] if content else files == {}


ONE = f"""{MODULE}
def test_step(einshard_golden):
    einshard_golden(explain(product, *arguments))
"""


def test_old_files_are_read_and_renamed(session, tmp_path):
    assert session(ONE, '--einshard-update')[0]
    folder = tmp_path / 'tests' / 'golden' / 'test_model'
    text = (folder / 'test_step.golden').read_text(encoding='utf-8')
    (folder / 'test_step.golden').rename(folder / 'test_step.txt')
    assert session(ONE)[0]
    assert goldens_of(tmp_path) == {'test_step.txt': text}
    passed, printed = session(ONE, '--einshard-update')
    assert passed
    assert 'renamed tests/golden/test_model/test_step.golden' in printed
    assert goldens_of(tmp_path) == {'test_step.golden': text}
    (folder / 'test_step.golden').rename(folder / 'test_step.txt')
    (folder / 'test_step.txt').write_text('old', encoding='utf-8')
    passed, printed = session(ONE)
    assert not passed
    assert 'product differs from tests/golden/test_model/test_step.txt' in printed
    passed, printed = session(ONE, '--einshard-update')
    assert 'rewrote tests/golden/test_model/test_step.golden' in printed
    assert goldens_of(tmp_path) == {'test_step.golden': text}


@pytest.mark.slow
def test_pytest_does_not_collect_golden_files(session, tmp_path):
    """A merge conflict in a doctest, as in `>>>>>>> branch`, ends the run of pytest."""
    assert session(ONE, '--einshard-update')[0]
    (file,) = (tmp_path / 'tests' / 'golden').rglob('*.*')
    file.write_text(f'<<<<<<< ours\n{file.read_text()}>>>>>>> theirs\n')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '--collect-only', '-pno:einshard', str(file.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


MANY = f"""{MODULE}
REPORT = explain(product, *arguments)

@pytest.mark.parametrize('n', [8, 0.5, 'a b -> a* b', 'a b -> a b*'])
def test_parameters(einshard_golden, n):
    einshard_golden(REPORT)

class TestLayers:
    class TestFirst:
        def test_step(self, einshard_golden):
            for name in (None, 'forward', None, 'a/b', None):
                einshard_golden(REPORT, name)

def test_step(einshard_golden):
    einshard_golden(REPORT, name='forward')
"""


def test_each_report_has_a_file_of_its_own(session, tmp_path):
    passed, printed = session(MANY, '--einshard-update')
    assert passed
    files = goldens_of(tmp_path)
    assert sorted(files) == [
        'TestLayers.TestFirst.test_step+2.golden',
        'TestLayers.TestFirst.test_step+3.golden',
        'TestLayers.TestFirst.test_step+a-b-c14cddc0.golden',
        'TestLayers.TestFirst.test_step+forward.golden',
        'TestLayers.TestFirst.test_step.golden',
        'test_parameters-0.5.golden',
        'test_parameters-8.golden',
        'test_parameters-a-b-a-b-70833276.golden',
        'test_parameters-a-b-a-b-b2eefbac.golden',
        'test_step+forward.golden',
    ]
    assert set(files.values()) == {PRODUCT}
    written = re.findall(r'^wrote tests/golden/test_model/(.*)$', printed, re.MULTILINE)
    assert sorted(written) == sorted(files)
    # plugins may run a failing test again: its numbers start again
    path = str(tmp_path / 'tests' / 'test_model.py')
    passed, printed = session(MANY, '--keep-duplicates', path)
    assert passed
    assert '12 passed' in printed


def test_a_session_can_end_at_the_first_difference(session, tmp_path):
    session(MANY, '--einshard-update')
    files = goldens_of(tmp_path)
    changed = MANY.replace("'y z -> y* z'", "'y z -> y z*'")
    passed, printed = session(changed, '-x')
    assert not passed
    assert '1 failed' in printed
    assert 'passed' not in printed
    # only the tests that run are written
    assert session(changed, '--einshard-update', '-k', 'TestLayers')[0]
    after = goldens_of(tmp_path)
    assert {name for name in files if after[name] != files[name]} == {
        name for name in files if name.startswith('TestLayers')
    }


def test_assert_collectives_is_a_fixture(session):
    source = f"""{MODULE}
def test_expected(assert_collectives):
    assert_collectives(product, *arguments, allowed={{'all-reduce': 1}})

def test_unexpected(assert_collectives):
    assert_collectives(product, *arguments, allowed=())
"""
    passed, printed = session(source)
    assert not passed
    assert '1 failed, 1 passed' in printed
    assert 'product has unexpected collectives: 1 all-reduce' in printed


def test_golden_files_are_portable(report, golden_text):
    """Golden files do not depend on the machine, source lines or the order of collectives."""
    (row,) = report.collectives
    rows = type(report.collectives)
    two, four = (replace(row.results[0], shape=(n,)) for n in (2, 4))
    other = replace(row, kind='all-gather', results=(two, four, two), along='')
    same = [
        replace(row, source='elsewhere.py:1', op_name='', sent=1, is_async=True),
        replace(other, results=(four, two, two)),
    ]
    before = replace(report, collectives=rows([row, other]))
    after = replace(
        report,
        collectives=rows(same[::-1]),
        device_kind='TPU v5 lite',
        memory=None,
        flops=None,
    )
    assert before != after
    assert golden_text(before) == golden_text(after)
    assert golden_text(before).endswith(
        'collectives\n'
        '  1 x all-gather 2 x f32[2], f32[4], 1 group of 8\n'
        '  1 x all-reduce f32[8,8], 1 group of 8 along y\n'
    )


@pytest.mark.parametrize(
    ('executions', 'shown'),
    [((3,), '3'), ((1, 1, 4), '6'), ((3, None), '4 x ?'), ((None,), '?'), ((0,), '0')],
)
def test_executions_are_counted(report, golden_text, executions, shown):
    (row,) = report.collectives
    rows = type(report.collectives)(
        replace(row, executions=1 if n is None else n, is_exact=n is not None) for n in executions
    )
    text = golden_text(replace(report, collectives=rows))
    assert text == PRODUCT.replace('1 x all-reduce', f'{shown} x all-reduce')


def layers(w, h):
    return jax.lax.scan(lambda h, w: (jax.numpy.tanh(h + w.sum() * h), None), h, w)[0]


EIGHT = jax.devices()[:8]
NAMED = einshard.device_mesh(EIGHT, data=4, tp=2)
# a function, its arguments, and lines of its text
TEXTS = {
    'a loop': (
        sharded('l x y -> l x y*', '... -> * ...', mesh=EIGHT)(layers),
        (np.ones((5, 4, 8)), np.float32(0)),
        ['collectives', '  5 x all-reduce f32[], 1 group of 8 along y'],
    ),
    'a named mesh': (
        sharded('b x@tp', 'x@tp y@data', mesh=NAMED)(jax.numpy.matmul),
        (np.ones((8, 8)), np.ones((8, 8))),
        ['matmul on 8 devices: data=4, tp=2', '  1 x all-reduce f32[8,2], 4 groups of 2 along tp'],
    ),
    'one device': (
        lambda: np.float32(0),
        (),
        ['<lambda> on 1 device', '  result: float32[]  on one device', '  none'],
    ),
}


@pytest.mark.parametrize('case', TEXTS)
def test_texts_of_other_programs(golden_text, case):
    function, args, lines = TEXTS[case]
    assert set(lines) <= set(golden_text(explain(function, *args)).splitlines())


NAMES = {
    'test_step': 'test_step',
    'test_step[8-float32]': 'test_step-8-float32',
    'test_step[0.5]': 'test_step-0.5',
    'test_step[a/b]': 'test_step-a-b-8f34a2f5',
    'test_step[a:b]': 'test_step-a-b-990200dc',
    'test_step[]': 'test_step-7e33b75a',
    'ü': '-607474ca',
}


def test_file_names(report, golden_files):
    def of_names(golden, report):
        for name in NAMES:
            golden(report, name)
            golden(report, name * 99)

    files = {*golden_files(report, of_names)}
    short = {f'test_step+{file}.golden' for file in NAMES.values()}
    assert short < files
    assert len(files) == 2 * len(short)
    assert all(len(file) < 150 + len('test_step+.golden') for file in files)


NO_NAME = "name= must be a non-empty string, not {}\n  example: name='forward'"
TWICE = "test_step uses the golden file name 'forward' twice\n  file: test_step+forward.golden"
NOT_A_REPORT = (
    'einshard_golden takes a Report, not str\n  example: einshard_golden(explain(step, x))'
)


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (('forward',), TWICE),
        (('',), NO_NAME.format("''")),
        ((3,), NO_NAME.format(3)),
        (None, NOT_A_REPORT),
    ],
)
def test_refusals(report, golden_files, args, message):
    def refused(golden, report):
        golden(report, 'forward')
        error = refusal(golden, str(report) if args is None else report, *(args or ()))
        assert str(error) == message

    golden_files(report, refused)


CONFTEST = """
import sys

def assert_nothing_heavy():
    assert not {'jax', 'einshard', 'numpy', 'jaxtyping'} & set(sys.modules)

assert_nothing_heavy()

def pytest_unconfigure(config):
    if not hasattr(config, 'workerinput'):
        assert_nothing_heavy()
        print('JAX was never imported')
"""


@pytest.mark.slow
def test_jax_is_imported_only_for_tests_that_ask(tmp_path):
    """So a conftest.py can set the environment variables that JAX reads on import.

    The summary lists files written by processes of xdist.
    """
    (tmp_path / 'tests').mkdir()
    (tmp_path / 'tests' / 'conftest.py').write_text(CONFTEST)
    source = """
from conftest import assert_nothing_heavy

def test_that_does_not_ask():
    assert_nothing_heavy()

def test_that_asks(einshard_golden, assert_collectives):
    import einshard
    assert assert_collectives is einshard.assert_collectives
    einshard_golden(einshard.explain(abs, 1.5))
"""
    (tmp_path / 'tests' / 'test_model.py').write_text(source)
    module = '_einshard_pytest_plugin'  # as it is installed
    shutil.copy(_pytest_plugin.__file__, tmp_path / f'{module}.py')
    env = {
        **os.environ,
        'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1',
        'PYTHONPATH': python_path(tmp_path, ROOT),
    }
    env.pop('PYTEST_ADDOPTS', None)
    plugins = ['-p', module, '-p', 'xdist', '-n', '1', '--einshard-update']
    command = [sys.executable, '-m', 'pytest', '-c', os.devnull, f'--rootdir={tmp_path}', *plugins]
    done = subprocess.run(
        [*command, 'tests'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '2 passed' in done.stdout
    assert '\nwrote tests/golden/test_model/test_that_asks.golden\n' in done.stdout
    assert 'JAX was never imported' in done.stdout
    assert list(goldens_of(tmp_path)) == ['test_that_asks.golden']


def test_a_wheel_has_the_plugin_beside_the_package():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))
    wheel = project['tool']['hatch']['build']['targets']['wheel']
    module = project['project']['entry-points']['pytest11']['einshard']
    assert wheel['force-include'] == {'einshard/_pytest_plugin.py': f'{module}.py'}
    assert wheel['exclude'] == ['/einshard/_pytest_plugin.py']


def test_the_installed_plugin_imports_no_jax():
    points = importlib.metadata.entry_points(group='pytest11', name='einshard')
    if not points:
        pytest.skip('einshard is not installed here')
    program = (
        'import importlib.metadata, sys\n'
        "(point,) = importlib.metadata.entry_points(group='pytest11', name='einshard')\n"
        "assert hasattr(point.load(), 'einshard_golden')\n"
        "assert not {'jax', 'einshard'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, '-c', program], check=True, cwd=Path.home())


@pytest.mark.slow
def test_training_step_of_the_transformer(einshard_golden):
    """The file shows whether JAX or einshard changes the program."""
    c = transformer.Config(n_layers=3, d_model=32, d_ff=64, sequence=12, batch=8)
    model = transformer.make_model(c, transformer.BOTH, mesh=jax.devices()[:8])
    state = jax.eval_shape(functools.partial(transformer.init_state, c=c), jax.random.key(0))
    tokens = struct(c.batch, c.sequence + 1, dtype=np.int32)
    einshard_golden(einshard.explain(model.train_step, state, tokens, tries=0))
