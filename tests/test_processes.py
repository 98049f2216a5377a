"""Two processes with four simulated devices each: every process places its own shards.

This file is the test, and the program that each of the processes runs.
"""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import einshard
from einshard import describe, device_mesh, make_sharding

PROCESSES, DEVICES_EACH = 2, 4
SECONDS = 120

# expression, and its device grid: (array axis or None for replicas, count)
EXPRESSIONS = [
    ('a b -> a8 b', [(0, 8)]),
    ('a b -> a2 b4', [(0, 2), (1, 4)]),
    ('a b -> b2 a4', [(1, 2), (0, 4)]),
    ('a b -> 2 a b4', [(None, 2), (1, 4)]),  # each process has a replica
    ('a b -> a4 2 b', [(0, 4), (None, 2)]),
    ('a b -> 8 a b', [(None, 8)]),
]


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    root = str(pathlib.Path(einshard.__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
    env = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={DEVICES_EACH}',
        'PYTHONPATH': path,
    }
    with tempfile.TemporaryFile('w+') as output:
        processes = [
            subprocess.Popen(
                [sys.executable, '-W', 'error::UserWarning', __file__, str(port), str(i)],
                env=env,
                stdout=output,
                stderr=output,
            )
            for i in range(PROCESSES)
        ]
        try:
            deadline = time.monotonic() + SECONDS
            # one that fails leaves the other waiting for it
            while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
                assert time.monotonic() < deadline, _read(output)
                time.sleep(0.05)
            assert [p.poll() for p in processes] == [0, 0], _read(output)
            assert _read(output).count('all checks passed') == PROCESSES
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _read(output):
    output.seek(0)
    return output.read()


# --- what each process runs -------------------------------------------------------------------


def check_shards(x, whole, grid):
    """Compares the shards of this process with numpy slices."""
    whole = np.asarray(whole)
    devices = list(device_mesh().devices.flat)
    shards = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    assert set(shards) == set(jax.local_devices())
    for device, shard in shards.items():
        place = np.unravel_index(devices.index(device), [count for _, count in grid])
        expected = whole
        for (axis, count), part in zip(grid, place, strict=True):
            if axis is not None:
                expected = np.split(expected, count, axis)[part]
        assert shard.shape == expected.shape
        np.testing.assert_array_equal(shard, expected)


def check_mesh():
    mesh = device_mesh()
    assert mesh.axis_sizes == (2, 2, 2)
    assert [d.process_index for d in mesh.devices.flat] == [0] * 4 + [1] * 4
    assert mesh is device_mesh(jax.devices()[::-1])


def check_arrays():
    whole = np.arange(128, dtype=np.float32).reshape(8, 16)
    for expression, grid in EXPRESSIONS:
        x = einshard.einshard(whole, expression)
        check_shards(x, whole, grid)
        assert x.sharding == make_sharding(expression)
        assert make_sharding(describe(x)) == x.sharding
        assert einshard.einshard(x, expression) is x
    # host arrays that only this process's devices hold
    x = einshard.einshard(whole, 'a b -> a4 b', mesh=jax.local_devices())
    np.testing.assert_array_equal(x, whole)
    # from placement to placement
    y = einshard.einshard(einshard.einshard(whole, 'a b -> a8 b'), 'a b -> b8 a')
    check_shards(y, whole, [(1, 8)])
    # whole again, on every process; leaves that no device holds stay
    tree = {'sharded': x, 'moved': y, 'host': whole, 'name': 'w', 'none': None}
    tree['local'] = jnp.arange(3)
    gathered = einshard.gather(tree)
    assert gathered['host'] is whole
    assert (gathered['name'], gathered['none']) == ('w', None)
    for name in ('sharded', 'moved'):
        assert type(gathered[name]) is np.ndarray
        np.testing.assert_array_equal(gathered[name], whole)
    np.testing.assert_array_equal(gathered['local'], np.arange(3))
    # an array that one device of each process holds
    check_shards(einshard.einshard(jnp.asarray(whole), 'a b -> a8 b'), whole, [(0, 8)])


def check_kinds():
    whole = np.arange(16)
    for given, dtype in [
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.complex128, np.complex64),
        (np.bool_, np.bool_),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ]:
        x = einshard.einshard(whole.astype(given), 'a -> a*')
        assert x.dtype == dtype
        check_shards(x, whole.astype(given).astype(dtype), [(0, 8)])
    for scalar in (3, 2.5, True, 1j, np.float64(2), np.ones(())):
        x = einshard.einshard(scalar, '... -> * ...')
        assert x.shape == ()
        assert x.dtype == jnp.asarray(scalar).dtype
        check_shards(x, np.asarray(scalar, x.dtype), [(None, 8)])
    with pytest.raises(einshard.EinshardError, match='size 6, which 8 parts'):
        einshard.einshard(np.ones(6), 'a -> a*')


def check_trees():
    whole = np.arange(128, dtype=np.float32).reshape(8, 16)
    right = einshard.einshard(whole, 'a b -> a8 b')
    tree = {'w': whole, 'right': right, 'n': 2, 'f': len, 'none': None}
    placed = einshard.einshard(
        tree, {'w': 'a b -> b8 a', 'right': 'a8 b', 'n': '* ...', 'f': None, 'none': None}
    )
    check_shards(placed['w'], whole, [(1, 8)])
    check_shards(placed['n'], np.int32(2), [(None, 8)])
    assert placed['right'] is right
    assert placed['f'] is len


def check_jit():
    whole = np.arange(128, dtype=np.float32).reshape(8, 16)
    x = einshard.einshard(whole, 'a b -> a8 b')
    y = jax.jit(lambda x: einshard.einshard(x * 2, 'a b -> b8 a'))(x)
    check_shards(y, 2 * whole, [(1, 8)])
    total = jax.jit(lambda x: einshard.einshard(x.sum(), '... -> * ...'))(x)
    assert float(total.addressable_shards[0].data) == whole.sum()


def check_that_nothing_is_gathered(process):
    """Host data is not compared between processes, and nobody waits for anybody."""
    mine = np.full((8, 16), float(process), np.float32)
    check_shards(einshard.einshard(mine, 'a b -> a8 b'), mine, [(0, 8)])
    check_shards(einshard.einshard(mine, '* a b'), mine, [(None, 8)])
    if process == 0:
        # a collective would wait for process 1 here
        check_shards(
            einshard.einshard({'x': mine, 'n': 1.0}, '... -> ... *')['x'], mine, [(None, 8)]
        )
    # device_put does compare
    with pytest.raises(AssertionError, match='the same'):
        jax.device_put(mine, make_sharding('a b -> a8 b'))


def main(port, process):
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(f'127.0.0.1:{port}', PROCESSES, process, initialization_timeout=60)
    assert jax.device_count() == PROCESSES * DEVICES_EACH
    check_mesh()
    check_arrays()
    check_kinds()
    check_trees()
    check_jit()
    check_that_nothing_is_gathered(process)
    print('all checks passed', flush=True)
    jax.distributed.shutdown()


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
