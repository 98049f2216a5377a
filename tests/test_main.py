"""python -m einshard: what it prints and how it exits."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from command import main
from jax.sharding import AbstractMesh

from einshard import show

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']
SCRIPT = PROJECT['scripts']['einshard']


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, '-m', 'einshard', *arguments],
        env=os.environ | environment,
        capture_output=True,
        encoding='utf-8',
        check=False,
    )


def test_a_picture_without_a_backend():
    # a platform that does not exist: any backend that was started would be an error
    done = run(
        'a b -> 2 a2* b*', '--shape', '4', '8', '--devices', '16',
        **NO_BACKEND,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'{show("a b -> 2 a2* b*", (4, 8), 16)}\n'


NO_BACKEND = {'JAX_PLATFORMS': 'no_such_platform', 'PYTHONIOENCODING': 'utf-8'}


def test_doctor_says_what_is_installed_without_a_backend():
    done = run('doctor', '--json', **NO_BACKEND)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found['versions']['jax'] == jax.__version__
    assert found['platforms'] == 'no_such_platform'
    for feature, package in (('tpu', 'libtpu'), ('plan', 'flatbuffers'), ('rich', 'rich')):
        installed = importlib.util.find_spec(package) is not None
        assert found['features'][feature]['works'] == installed
    assert found['missing'] == []


@pytest.mark.gpu
def test_doctor_finds_the_cuda_plugin(capsys):
    assert main(['doctor', 'gpu']) == 0
    assert 'PTX compiler /' in capsys.readouterr().out


def test_doctor_exits_1_if_something_is_missing(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, 'find_spec', lambda name: None if name == 'libtpu' else find_spec(name)
    )
    assert main(['doctor', 'tpu', 'rich']) == 1
    printed = capsys.readouterr().out
    assert "tpu: no, pip install 'jax[tpu]'" in printed
    assert printed.endswith('\nmissing: tpu\n')
    assert main(['doctor', 'rich']) == 0
    capsys.readouterr()
    assert main(['doctor', 'tpus']) == 2
    assert "'tpus' is not a feature" in capsys.readouterr().err


def test_a_wrong_expression_exits_2():
    done = run('a b -> a* c', '--devices', '8')
    assert done.returncode == 2
    assert done.stdout == ''
    assert done.stderr.startswith("einshard.EinshardError: 'c' is not on the left side\n")
    assert '^' in done.stderr
    assert 'Traceback' not in done.stderr


def test_output_without_box_characters(monkeypatch):
    printed = io.TextIOWrapper(io.BytesIO(), encoding='cp1252')
    monkeypatch.setattr(sys, 'stdout', printed)
    assert main(['a b -> a2 b2', '--shape', '4', '4']) == 0
    printed.seek(0)
    text = printed.read()
    assert '|       0       |' in text
    assert '+-' in text


@pytest.mark.skipif(sys.platform == 'win32', reason='needs a pseudo-terminal')
def test_a_terminal_has_color(monkeypatch):
    pytest.importorskip('rich')
    import pty

    for name in ('NO_COLOR', 'FORCE_COLOR'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TERM', 'xterm-256color')
    reader, writer = pty.openpty()
    with open(writer, 'w', encoding='utf-8') as terminal:
        monkeypatch.setattr(sys, 'stdout', terminal)
        assert main(['a b -> a2 b2']) == 0
        terminal.flush()
        assert b'\x1b[30;48;' in os.read(reader, 65536)
    os.close(reader)


def test_the_command_finds_modules_in_the_current_folder(tmp_path):
    """Python puts the folder of a script into sys.path, not the current one."""
    (tmp_path / 'model.py').write_text('def double(x): return x * 2')
    module, name = SCRIPT.split(':')
    start = f"import sys; sys.path.remove(''); from {module} import {name}; sys.exit({name}())"
    done = subprocess.run(
        [sys.executable, '-c', start, 'explain', 'model:double', '--args', 'f32[8]'],
        cwd=tmp_path,
        env=os.environ | {'PYTHONPATH': str(ROOT)},
        capture_output=True,
        encoding='utf-8',
        check=False,
    )
    assert done.stdout.startswith('double on '), done.stderr


def test_the_reader_may_close_the_pipe():
    """As in `einshard ... | head`, if head exits before einshard prints."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, '-m', 'einshard', 'a b -> a4 b2']
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b'')


def test_the_command_is_named_as_it_was_called(monkeypatch, capsys):
    module, name = SCRIPT.split(':')
    script = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(sys, 'path', [*sys.path])  # the script adds the current folder
    monkeypatch.setattr(sys, 'argv', ['/usr/bin/einshard', 'explain', '--help'])
    with pytest.raises(SystemExit):
        script()
    help_ = capsys.readouterr().out
    assert help_.startswith('usage: einshard explain [-h]')
    assert '\n  einshard explain model:layer --args' in help_
    assert 'python -m' not in help_
    monkeypatch.setattr(sys, 'argv', ['/usr/bin/einshard', 'explian'])
    assert script() == 2
    assert capsys.readouterr().err.endswith('try: einshard explain\n')


@pytest.mark.parametrize(
    ('arguments', 'picture'),
    [
        (['a b -> a4 b2'], show('a b -> a4 b2')),
        (['show', 'a b -> a4 b2'], show('a b -> a4 b2')),
        (['... -> * ...', '--shape', '--devices', '8'], show('... -> * ...', (), 8)),
        (
            ['b@data d@tp', '--shape', '32', '512', '--mesh', 'data=4', 'tp=2'],
            show('b@data d@tp', (32, 512), AbstractMesh((4, 2), ('data', 'tp'))),
        ),
    ],
)
def test_pictures(arguments, picture, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out == f'{picture}\n'


@pytest.mark.parametrize(
    ('arguments', 'error'),
    [
        (['eject', 'a b -> a* c', '--devices', '8'], "'c' is not on the left side"),
        (['a b -> a4 b', '--shape', '6', '8'], "axis 'a' (size 6) is not divisible by 4"),
        (['a b -> a4 b', '--shape', '8'], 'the expression names 2 axes, but the array has 1'),
        (
            ['a b -> a* b'],
            'a star needs the number of devices\n    a b -> a* b\n           ^^\n'
            "  on the command line: einshard show 'a b -> a* b' --devices 8\n",
        ),
        (['a b -> a@tp b', '--devices', '4'], "'a@tp' names a mesh axis, but there is no mesh"),
        (['a b -> a@tp b', '--mesh', 'data=4'], "the mesh has no axis 'tp'"),
        (['a -> a@tp', '--mesh', 'tp=4', 'tp=2'], "--mesh lists axis 'tp' more than once"),
        (
            ['a -> a*', '--shape', '-4', '--devices', '4'],
            '--shape must be a sequence of sizes, not [-4]\n  example: --shape 4 8',
        ),
        ([''], 'the expression is empty'),
    ],
)
def test_errors_are_printed(arguments, error, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ''
    assert printed.err.startswith(f'einshard.EinshardError: {error}')


@pytest.mark.parametrize(
    ('arguments', 'error'),
    [
        (['a -> a4', '--mesh', 'tp'], "'tp' is not a mesh axis with its size, such as data=4"),
        (['a -> a4', '--mesh', 'tp=0'], "'tp=0' is not a mesh axis with its size"),
        (['--mesh', 'tp=4', 'a -> a4'], '(put other arguments before it)'),
        (
            ['a', '--mesh', 'x=2,y=4'],
            "'x=2,y=4' is not a mesh axis with its size, such as data=4 (write --mesh x=2 y=4)",
        ),
        (['a -> a4', '--shape', 'x'], "invalid int value: 'x'"),
        (['a -> a*', '--devices', '-4'], "--devices: '-4' is not a positive integer"),
        (['a -> a4', '--devices', '4', '--mesh', 'tp=4'], 'not allowed with argument'),
    ],
)
def test_wrong_options_exit_2(arguments, error, capsys):
    assert main(arguments) == 2
    assert error in capsys.readouterr().err


def test_no_arguments_print_the_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert main(['--help']) == 0
    assert capsys.readouterr().out == printed
    for word in ('usage: python -m einshard', '--shape', '--devices', '--mesh', 'examples:'):
        assert word in printed
    commands = {
        path.name.removesuffix('_command.py')
        for path in (ROOT / 'einshard/_cli').glob('*_command.py')
    } - {'show'}
    assert set(re.findall(r'  python -m einshard (\w+) --help', printed)) == commands


# --- output that cannot be written, and sizes that are too large ----------------------------------

MODULE = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P

def shapes(mesh):
    return jax.ShapeDtypeStruct((64, 64), 'float32', sharding=NamedSharding(mesh, P('data', 'tp')))

def by_size(mesh):
    shape = 2 * mesh.shape['batch'], mesh.shape['tp']
    return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P('batch', 'tp')))

def step(x):
    return 2 * x
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / 'shaped.py').write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield 'shaped'
    sys.modules.pop('shaped', None)


def refused(capsys, *arguments):
    """The error of a command, without its first word."""
    assert main(arguments) == 2
    return capsys.readouterr().err.removeprefix('einshard.EinshardError: ')


@pytest.mark.slow
def test_a_full_disk(module, capsys):
    call = ['explain', f'{module}:step', '--args', 'f32[8]', '--tries', '0']
    error = refused(capsys, *call, '--save', '/dev/full')
    assert error == "cannot write '/dev/full': No space left on device\n"
    for arguments in (['a b -> a2 b', '--devices', '2'], ['explain', '--help']):
        with Path('/dev/full').open('w') as full:
            done = subprocess.run(
                [sys.executable, '-m', 'einshard', *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                encoding='utf-8',
                check=False,
            )
        error = 'einshard.EinshardError: cannot write standard output: No space left on device\n'
        assert (done.returncode, done.stderr) == (2, error)


@pytest.mark.slow
@pytest.mark.parametrize('arguments', [['--help'], ['a b -> a1000 b', '--devices', '1000']])
def test_a_closed_pipe(arguments):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, '-m', 'einshard', *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        encoding='utf-8',
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, '')


def test_absurd_shapes(module, capsys):
    for size in (2**58, 10**30):
        error = refused(capsys, 'explain', f'{module}:step', '--args', f'f32[{size}]')
        assert error == f"'f32[{size}]' has too many elements\n  at most: 2^58\n"


@pytest.mark.parametrize('command', ['explain', 'plan'])
@pytest.mark.parametrize(
    ('function', 'options', 'names', 'example'),
    [
        ('shapes', ['--devices', '8'], "'data' and 'tp'", '--mesh data=4 tp=2'),
        ('by_size', ['--devices', '8'], "'batch' and 'tp'", '--mesh batch=4 tp=2'),
        ('by_size', ['--mesh', 'data=4', 'tp=3'], "'batch' and 'tp'", '--mesh batch=4 tp=3'),
    ],
)
def test_axes_that_are_looked_up(command, function, options, names, example, module, capsys):
    call = [command, f'{module}:step', '--args', f'{module}:{function}']
    assert refused(capsys, *call, *options) == (
        f'{module}:{function} looks up mesh axes that the mesh does not have\n'
        f'  looked up: {names}\n'
        f'  example:   {example}\n'
    )
    # the example runs
    if command == 'explain':
        assert main([*call, *example.split(), '--tries', '0']) == 0
    options = f'{example} or --topology v5e:4x4'
    assert options.replace('tp=3', 'tp=2') in refused(capsys, *call)
