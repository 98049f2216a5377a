"""Tracebacks of a user's errors end in the user's code, and have no frames of einshard."""

import os
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import einshard as package
from einshard import (
    EinshardError,
    Rules,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    einsum,
    explain,
    from_local,
    gather,
    make_sharding,
    per_device,
    plan,
    sharded,
    show,
    to_jax,
)

EIGHT = jax.devices()[:8]
X = np.ones((6, 8), np.float32)
FOLDER = str(Path(package.__file__).parent)


def identity(x):
    return x


def fails(x):
    return jnp.dot(x, x)  # (6, 8) @ (6, 8)


def bad_spec(path, leaf):
    raise KeyError(path)


placed = sharded('a* b', mesh=EIGHT)(identity)
mapped = per_device('a* b', out='a* b', mesh=EIGHT)(identity)
failing = sharded('* a b', mesh=EIGHT)(fails)

CALLS = {
    'einshard': lambda: einshard(X, 'a* b', mesh=EIGHT),
    'einshard of a tree': lambda: einshard({'w': X}, 'a* b', mesh=EIGHT),
    'einshard with an option': lambda: einshard(X, 'a b*', indivisible='pad'),
    'einshard in jit': lambda: jax.jit(lambda x: einshard(x, 'a* b', mesh=EIGHT))(X),
    'make_sharding': lambda: make_sharding('a b -> c*'),
    'sharded': lambda: sharded('a b -> c*')(identity),
    'sharded without a function': lambda: sharded('a b')(3),
    'a call': lambda: placed(X),
    'a keyword call': lambda: placed(x=X),
    'lower': lambda: placed.lower(X),
    'eval_shape': lambda: placed.eval_shape(X),
    'per_device': lambda: mapped(X),
    'rules': lambda: Rules([('w', 'a b -> c')]),
    'axis_rules': lambda: axis_rules(batch='data'),
    'describe': lambda: describe('a'),
    'device_mesh': lambda: device_mesh(EIGHT, data=3),
    'einsum': lambda: einsum('a b, b -> a*', X, X),
    'gather': lambda: jax.jit(gather)(X),
    'from_local': lambda: from_local(X, 'a16 b'),
    'show': lambda: show('a* b', (6, 8), 4),
    'to_jax': lambda: to_jax('a* b', shape=8),
    'plan': lambda: plan(3),
    'explain': lambda: explain(placed, X),
}
UNTRACEABLE = {'jit': jax.jit(fails), 'a sharded function': failing, 'a function': fails}


def frames_of(call):
    """The (file, line of code) of each frame of the traceback."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return [(x.filename, x.line) for x in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize('case', CALLS)
def test_no_frame_is_ours(case):
    with pytest.raises(EinshardError):
        CALLS[case]()
    frames = frames_of(CALLS[case])
    assert not [file for file, _ in frames if file.startswith(FOLDER)]
    if 'jit' not in case and case != 'gather':
        assert frames[-1][0] == __file__


@pytest.mark.parametrize('call', [failing, failing.lower, failing.trace])
def test_an_error_in_a_trace_ends_in_the_users_code(call):
    frames = [x for x in frames_of(lambda: call(X)) if 'site-packages' not in x[0]]
    assert frames[-1] == (__file__, 'return jnp.dot(x, x)  # (6, 8) @ (6, 8)')
    assert not [file for file, _ in frames if file.startswith(FOLDER)]


@pytest.mark.parametrize('kind', UNTRACEABLE)
def test_explain_of_a_program_that_does_not_trace_ends_with_the_users_line(kind):
    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(EinshardError, match='tracing fails with these arguments failed') as caught:
        explain(UNTRACEABLE[kind], X)
    last = str(caught.value).splitlines()[-1]
    source = 'return jnp.dot(x, x)  # (6, 8) @ (6, 8)'
    assert last.split(':', 1) == ['  line', f'      {Path(__file__).name}:{line}: {source}']
    cause = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert not [x.filename for x in cause if x.filename.startswith(FOLDER)]


def test_an_error_of_a_spec_function_ends_in_it():
    frames = frames_of(lambda: einshard({'w': X}, bad_spec))
    assert frames[-1] == (__file__, 'raise KeyError(path)')


def test_all_frames_are_kept_without_filtering():
    usual = jax.config.jax_traceback_filtering
    jax.config.update('jax_traceback_filtering', 'off')
    try:
        frames = frames_of(CALLS['einshard'])
    finally:
        jax.config.update('jax_traceback_filtering', usual)
    assert len([file for file, _ in frames if file.startswith(FOLDER)]) > 2


@pytest.mark.slow
def test_pytest_shows_no_frame(tmp_path):
    (tmp_path / 'test_user.py').write_text(
        textwrap.dedent("""
            import numpy as np
            from einshard import einshard, sharded

            def test_placement():
                einshard(np.ones((3, 4)), 'a b -> a2 c')

            def test_call():
                sharded('a b -> a b')(lambda x: x)(np.ones(3))
        """)
    )
    environment = {**os.environ, 'PYTHONPATH': str(Path(FOLDER).parent)}
    options = '-q', '-p', 'no:cacheprovider', str(tmp_path)
    output = subprocess.run(
        [sys.executable, '-m', 'pytest', *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
        cwd=tmp_path,
    ).stdout
    assert '2 failed' in output
    assert 'EinshardError' in output
    assert FOLDER not in output
    assert 'einshard/_' not in output
