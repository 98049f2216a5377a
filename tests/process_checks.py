"""Checks that run in each of several processes, started by tests/test_processes.py.

    python tests/process_checks.py PORT PROCESSES PROCESS FOLDER

Each process writes a line per check into its own file in the folder. If a check fails in one
process, the others may wait for it until they are killed.
"""

import importlib.util
import json
import re
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from refusal import refusal
from shards import ON_EIGHT, check_shards, slice_of

from einshard import (
    EinshardError,
    Rules,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    from_local,
    gather,
    make_sharding,
    move,
    shard_largest,
    sharded,
)

CHECKS = {}  # run in two processes
IN_FOUR = {}  # those that also run in four
FULL = np.arange(128, dtype=np.float32).reshape(8, 16)


def check(function):
    CHECKS[function.__name__] = function
    return function


def check_in_four_too(function):
    IN_FOUR[function.__name__] = function
    return check(function)


def part_of(full, grid):
    """The local array of this process for `from_local`."""
    devices = list(device_mesh().devices.flat)
    numbers = np.arange(full.size).reshape(full.shape)
    mine = [slice_of(numbers, grid, devices.index(device)) for device in jax.local_devices()]
    kept = np.unravel_index(np.concatenate([part.ravel() for part in mine]), full.shape)
    return full[np.ix_(*(np.unique(along) for along in kept))]


def refused(function, *args, **kwargs):
    return str(refusal(function, *args, **kwargs))


# --- einshard ---------------------------------------------------------------------------------


@check_in_four_too
def the_mesh():
    n_each = jax.local_device_count()
    mesh = device_mesh()
    assert mesh.axis_sizes == (2, 2, 2)
    assert [d.process_index for d in mesh.devices.flat] == [i // n_each for i in range(8)]
    assert mesh is device_mesh(jax.devices()[::-1])


@check
def arrays():
    for expression, grid in ON_EIGHT:
        x = einshard(FULL, expression)
        check_shards(x, FULL, grid)
        assert x.sharding == make_sharding(expression)
        assert make_sharding(describe(x)) == x.sharding
        assert einshard(x, expression) is x
    # an array on one device of each process, then from placement to placement
    x = einshard(jnp.asarray(FULL), 'a b -> a8 b')
    check_shards(x, FULL, [(0, 8)])
    check_shards(einshard(x, 'a b -> b8 a'), FULL, [(1, 8)])
    # an array of one process
    local = einshard(FULL, 'a b -> a* b', mesh=jax.local_devices())
    np.testing.assert_array_equal(local, FULL)
    assert local.sharding.device_set == set(jax.local_devices())
    assert 'not divisible by 8' in refused(einshard, np.ones(6), 'a -> a*')


@check_in_four_too
def moves():
    x = einshard({'w': FULL, 'b': FULL[0], 'n': 3}, {'w': 'a b -> a8 b', 'b': 'a -> a8', 'n': None})
    y = move(x, {'w': 'a b -> b8 a', 'b': '... -> * ...', 'n': None})
    check_shards(y['w'], FULL, [(1, 8)])
    check_shards(y['b'], FULL[0], [(None, 8)])
    assert x['w'].is_deleted()
    # through a placement on the way, which the first process chooses
    x = einshard(FULL, 'a b -> a4 b2')
    check_shards(move(x, 'a b -> 2 b4 a'), FULL, [(None, 2), (1, 4)])
    # the same devices in another order
    reverse = Mesh(np.array(device_mesh().devices.flat)[::-1], ('x',))
    y = move(einshard(FULL, 'a b -> a8 b'), 'a b -> a b@x', mesh=reverse)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), FULL[shard.index])
    # arrays of one process
    local = einshard(FULL, 'a b -> a* b', mesh=jax.local_devices())
    np.testing.assert_array_equal(move(local, 'a b -> a b*', mesh=jax.local_devices()), FULL)
    # each process has a copy of what is on its devices
    local = einshard(FULL, 'a b -> a* b', mesh=jax.local_devices())
    check_shards(move(local, 'a b -> a8 b', donate=False), FULL, [(0, 8)])


@check
def moves_that_are_refused():
    x = einshard(FULL, 'a b -> a8 b')
    first = jax.process_index() == 0
    said = refused(move, x, 'a b -> a b8' if first else 'a b -> a4 b2')
    assert 'different arrays' in said
    assert 'process 1' in said
    said = refused(move, x, 'a b -> a b8' if first else 'a b -> a3 b')
    assert ('different arrays' if first else 'divisible') in said or 'different' in said
    said = refused(move, x, 'a b -> a* b', mesh=jax.local_devices())
    assert 'jax_cross_host_transfer_socket_address' in said
    assert 'cross-host transfers' in said
    assert not x.is_deleted()


@check
def kinds():
    for given, dtype in [
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.complex128, np.complex64),
        (np.bool_, np.bool_),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ]:
        full = np.arange(16).astype(given)
        x = einshard(full, 'a -> a*')
        assert x.dtype == dtype
        check_shards(x, full.astype(dtype), [(0, 8)])
    for scalar in (3, 2.5, True, 1j, np.float64(2), np.ones(()), jnp.asarray(0.5), np.int32(1)):
        x = einshard(scalar, '... -> * ...')
        array = jnp.asarray(scalar)
        assert (x.shape, x.dtype, x.weak_type) == ((), array.dtype, array.weak_type)
        check_shards(x, np.asarray(scalar, x.dtype), [(None, 8)])
    on_host = einshard(3, '... -> * ...', memory_kind='pinned_host')
    assert on_host.weak_type
    check_shards(on_host, np.asarray(3, np.int32), [(None, 8)])
    x = einshard(jnp.full(16, 0.5), 'a -> a*')
    assert x.weak_type
    check_shards(x, np.full(16, 0.5, np.float32), [(0, 8)])
    half = sharded('a*', '*', out='a*')(jnp.multiply)(np.ones(8, ml_dtypes.bfloat16), 0.5)
    assert half.dtype == ml_dtypes.bfloat16
    for place in (einshard, from_local):
        with pytest.raises(EinshardError, match='too large'):
            place(2**40, '... -> * ...')
    keys = jax.random.split(jax.random.key(0), 8)
    x = einshard(keys, 'a -> a*')
    check_shards(jax.random.key_data(x), jax.random.key_data(keys), [(0, 8)])


@check
def trees():
    right = einshard(FULL, 'a b -> a8 b')
    layers = [{'kernel': FULL + i, 'bias': np.ones(3, np.float32)} for i in range(2)]
    model = {'embed': FULL, 'layers': layers, 'step': np.int32(0)}
    tree = {'model': model, 'w': FULL, 'right': right, 'n': 2, 'f': len, 'none': None}
    table = Rules([('kernel', 'i o -> * i o2'), ('bias', '... -> * ...')], default=shard_largest)
    specs = {'w': 'a b -> b8 a', 'right': 'a8 b', 'n': '* ...', 'f': None, 'none': None}
    placed = einshard(tree, specs | {'model': table})
    for matrix in (placed['w'], placed['model']['embed']):
        check_shards(matrix, FULL, [(1, 8)])
    for i, layer in enumerate(placed['model']['layers']):
        check_shards(layer['kernel'], FULL + i, [(None, 4), (1, 2)])
        check_shards(layer['bias'], np.ones(3), [(None, 8)])
    check_shards(placed['model']['step'], np.int32(0), [(None, 8)])
    check_shards(placed['n'], np.int32(2), [(None, 8)])
    assert placed['right'] is right
    assert placed['f'] is len
    assert 'matches no rule' in refused(einshard, {'w': FULL}, Rules([]))


@check
def traced_values():
    x = einshard(FULL, 'a b -> a8 b')
    y = jax.jit(lambda x: einshard(x * 2, 'a b -> b8 a'))(x)
    check_shards(y, 2 * FULL, [(1, 8)])
    total = jax.jit(lambda x: einshard(x.sum(), '... -> * ...'))(x)
    assert float(total.addressable_shards[0].data) == FULL.sum()


@check
def arguments_of_jitted_functions():
    @sharded('a b -> a* b', '... -> * ...', out='a b -> b* a')
    def add(x, y):
        return x + y

    first = jax.local_devices()[0]
    for given in (FULL, jnp.asarray(FULL), jax.device_put(FULL, first), FULL):
        check_shards(add(given, 1), FULL + 1, [(1, 8)])
    check_shards(add(einshard(FULL, 'a* b'), np.float64(1)), FULL + 1, [(1, 8)])


@check
def host_data_under_transformations():
    @sharded('a b -> a* b')
    def square(x):
        return x * x

    check_shards(jax.grad(lambda x: square(x).sum())(FULL), 2 * FULL, [(0, 8)])
    both = np.stack([FULL, FULL + 1])
    check_shards(jax.vmap(square)(both), both * both, [(1, 8)])


@check_in_four_too
def arguments_that_differ():
    """Each process passes its local rows, without `from_local`."""

    @sharded('a b -> a* b')
    def total(x):
        return x.sum()

    @sharded('... -> * ...', '... -> * ...', static_argnames='name')
    def scaled(tree, scale, name):
        return tree['x'].sum() * scale

    process, n = jax.process_index(), jax.process_count()
    rows = np.full((8, 16), float(process), np.float32)
    first = jax.device_put(rows, jax.local_devices()[0])
    for given in (jnp.asarray(rows), rows, first, rows):
        error = refusal(total, given)
        assert 'about to build different arrays' in error.sentence
        assert "parameter 'x' of total, contents" in error.facts['process 0']
        assert 'from_local' in error.facts['for local rows']
    assert float(total(from_local(rows, 'a b -> a* b'))) == 128 * sum(range(n))
    for _ in range(2):  # after a call with the same arrays, too
        assert float(total(FULL)) == FULL.sum()
        assert 'about to build different arrays' in refusal(total, rows).sentence
        assert 'about to build different arrays' in refusal(total, jnp.asarray(rows)).sentence
        # replicated arrays and numbers, in a tree
        assert float(scaled({'x': FULL}, 2.0, name='a')) == 2 * FULL.sum()
        for given in (({'x': rows}, 2.0), ({'x': FULL}, float(process))):
            error = refusal(scaled, *given, name='a')
            assert 'about to build different arrays' in error.sentence
        everywhere = einshard(FULL, '* a b')
        assert float(scaled({'x': everywhere}, einshard(1.0, '*'), name='a')) == FULL.sum()
    if process == 0:
        total.lower(rows)  # does not run, so the others need not call it
    unchecked = sharded('a b -> a* b', check_processes=False)(lambda x: x)
    for given in (rows, first, rows):
        check_shards(unchecked(given), rows, [(0, 8)])


@check_in_four_too
def host_data_that_differs():
    process, n = jax.process_index(), jax.process_count()
    mine = np.full((8, 16), float(process), np.float32)
    first = jax.device_put(mine, jax.local_devices()[0])
    keys = jax.random.split(jax.random.key(process), 8)
    for expression in ('a b -> a* b', '... -> * ...', '... -> ... *'):
        for given in (mine, first, jnp.asarray(mine)):
            error = refusal(einshard, given, expression)
            assert 'about to build different arrays' in error.sentence
            assert error.facts['process 0'].startswith('float32[8,16], contents ')
        np.testing.assert_array_equal(gather(einshard(FULL, expression)), FULL)
    refused(einshard, keys, 'a*')
    refused(einshard, float(process), '*')
    error = refusal(einshard, {'same': FULL, 'n': {'x': mine}}, 'a* ...')
    assert error.facts['process 0'].startswith("float32[8,16], leaf 'n/x', contents ")
    # one process differs in its shape, dtype, path, expression or with an error
    last = process == n - 1
    for given, expression in (
        (np.ones((8, 2 if last else 4)), 'a* b'),
        (np.ones((8, 4), np.int32 if last else np.float32), 'a* b'),
        ({'x' if last else 'y': FULL}, 'a* b'),
        (FULL, 'a b*' if last else 'a* b'),
        (np.ones((6 if last else 8, 4)), 'a* b'),
        ({'x': FULL, 'y': np.ones(6 if last else 8)}, {'x': 'a* b', 'y': 'a*'}),
    ):
        assert 'about to build different arrays' in refusal(einshard, given, expression).sentence
    # values of the same bits are equal
    nans = np.array([np.nan] * 8)
    np.testing.assert_array_equal(gather(einshard(nans, 'a*')), nans)
    # a placed array, a struct or a mesh of one process is not compared
    placed = einshard(FULL, 'a* b')
    if process == 0:
        assert einshard(placed, 'a* b') is placed
        einshard(jax.ShapeDtypeStruct((8,), np.float32), 'a*')
        einshard(mine, 'a* b', mesh=jax.local_devices())
        refused(einshard, np.ones(7), 'a*', mesh=jax.local_devices())


@check_in_four_too
def meshes_that_differ():
    """The last process has another mesh of the same devices."""
    n = jax.process_count()
    last = jax.process_index() == n - 1
    grid = np.array(jax.devices()).reshape(n, -1)
    names = ('h', 'l')

    def place(mesh):
        return einshard(FULL, 'a b -> a@h b', mesh=mesh)

    def call(mesh):
        spec = 'a b -> a@h b'
        return sharded(spec, out=spec, mesh=mesh)(lambda x: 2 * x)(FULL)

    def place_trees(mesh):
        return einshard({'x': [FULL, jnp.ones(8)]}, 'a ... -> a@h ...', mesh=mesh)

    def join(mesh):
        return from_local(np.ones((8, 2)), 'a b -> a@l b', mesh=mesh)

    def in_context(mesh):
        with jax.set_mesh(mesh):
            return einshard(FULL, 'a b -> a@h b')

    said = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(grid, names, axis_types=(kind,) * 2)
        others = {
            'reversed': Mesh(grid[::-1], names, axis_types=(kind,) * 2),
            'two devices': Mesh(
                np.append(grid.ravel()[:-2], grid.ravel()[:-3:-1]).reshape(grid.shape),
                names,
                axis_types=(kind,) * 2,
            ),
            'transposed': Mesh(grid.reshape(-1, n), names, axis_types=(kind,) * 2),
            'names': Mesh(grid, names[::-1], axis_types=(kind,) * 2),
        }
        for other in others.values():
            for use in (place, call, place_trees, join, in_context):
                said.append(refused(use, other if last else mesh))
            assert place(mesh).sharding.mesh == mesh  # the next one works
    return said, [device.id for device in jax.devices()]


@check
def host_data_is_not_compared():
    """Without the check, processes place their own data, and do not communicate."""
    process = jax.process_index()
    mine = np.full((8, 16), float(process), np.float32)
    check_shards(einshard(mine, 'a b -> a8 b', check_processes=False), mine, [(0, 8)])
    check_shards(einshard(mine, '* a b', check_processes=False), mine, [(None, 8)])
    if process == 0:
        # a collective would wait for the others here
        tree = einshard({'x': mine, 'n': 1.0}, '... -> ... *', check_processes=False)
        check_shards(tree['x'], mine, [(None, 8)])
        assert 'not divisible' in refused(einshard, np.ones(6), 'a*', check_processes=False)
    # device_put does compare
    with pytest.raises(AssertionError, match='the same'):
        jax.device_put(mine, make_sharding('a b -> a8 b'))


@check
def gathered_arrays():
    x = einshard(FULL, 'a b -> a* b', mesh=jax.local_devices())
    y = einshard(FULL, 'a b -> b2 a4')
    tree = {'local': x, 'global': y, 'host': FULL, 'name': 'w', 'none': None, 'one': jnp.arange(3)}
    gathered = gather(tree)
    assert gathered['host'] is FULL
    assert (gathered['name'], gathered['none']) == ('w', None)
    for name in ('local', 'global'):
        assert type(gathered[name]) is np.ndarray
        np.testing.assert_array_equal(gathered[name], FULL)
    np.testing.assert_array_equal(gathered['one'], np.arange(3))
    again = einshard(gathered['global'], describe(y))
    assert again.sharding == y.sharding
    check_shards(again, FULL, [(1, 2), (0, 4)])
    # meshes whose devices are in different orders
    crosswise = Mesh(np.array(jax.devices()).reshape(2, 4).T, ('x', 'y'))
    pair = Mesh(np.array(jax.devices())[[0, 7]], ('x',))
    arrays = [einshard(FULL, 'a@x b', mesh=mesh) for mesh in (crosswise, pair)]
    for full in gather([y, *arrays, y]):
        np.testing.assert_array_equal(full, FULL)


@check
def a_mesh_of_one_process():
    """All processes make arrays for the mesh of a pipeline stage."""
    keys = jax.random.split(jax.random.key(0), 8)
    stage = einshard({'x': FULL, 'keys': keys}, 'a* ...', mesh=jax.devices()[4:])
    assert {name: x.dtype for name, x in stage.items()} == {'x': FULL.dtype, 'keys': keys.dtype}
    everywhere = einshard(FULL, 'a* b')
    if jax.process_index() == 0:
        return refused(gather, {'stage': stage['x'], 'x': everywhere})
    gathered = gather({**stage, 'everywhere': everywhere})
    for name in ('x', 'everywhere'):
        np.testing.assert_array_equal(gathered[name], FULL)
    np.testing.assert_array_equal(gathered['keys'], jax.random.key_data(keys))


@check
def partial_sums():
    mesh = Mesh(
        device_mesh().devices.reshape(4, 2), ('x', 'y'), axis_types=(AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        for expression in ('a b +@y', 'a@y b +@x', 'a b +@(x,y)', 'a@x b =@y'):
            x = einshard(FULL, expression)
            assert describe(x) == f'a b -> {expression}'
            np.testing.assert_array_equal(gather(x), FULL)
            check_shards(einshard(x, 'a@x b@y'), FULL, [(0, 4), (1, 2)])
            np.testing.assert_array_equal(gather(sharded(expression)(jnp.copy)(FULL)), FULL)
        assert 'unreduced or reduced' in refused(from_local, FULL, 'a b +@y')


@check
def refs_and_keys():
    ref = jax.new_ref(einshard(FULL, 'a b -> a* b'))
    assert einshard({'r': ref}, 'a* b')['r'] is ref
    refused(einshard, ref, 'a b*')
    jax.jit(lambda r: r.__setitem__(..., r[...] + 1))(ref)
    np.testing.assert_array_equal(gather(ref), FULL + 1)
    keys = jax.random.split(jax.random.key(0), 8)
    data = gather({'keys': einshard(keys, 'a8'), 'key': jax.random.key(1)})
    np.testing.assert_array_equal(data['keys'], jax.random.key_data(keys))
    assert type(data['key']) is np.ndarray
    # keys move between placements and meshes
    explicit = Mesh(np.array(jax.devices())[::-1], ('x',), axis_types=(AxisType.Explicit,))
    for expression, mesh in [('a -> * a', None), ('a -> a2 4', None), ('a@x', explicit)]:
        moved = einshard({'k': einshard(keys, 'a8')}, expression, mesh=mesh)['k']
        assert einshard(moved, expression, mesh=mesh) is moved
        np.testing.assert_array_equal(gather(moved), jax.random.key_data(keys))
    error = refused(from_local, {'r': ref, 'x': FULL}, 'a* b')
    assert 'a jax.Ref' in str(error)
    assert 'masked arrays' in refused(from_local, np.ma.masked_array(FULL, FULL > 0), 'a* b')


# --- from_local -------------------------------------------------------------------------------


@check_in_four_too
def own_parts():
    for expression, grid in ON_EIGHT:
        mine = part_of(FULL, grid)
        for given in (mine, jnp.asarray(mine)):
            x = from_local(given, expression)
            check_shards(x, FULL, grid)
            assert x.sharding == make_sharding(expression)
        np.testing.assert_array_equal(gather(x), FULL)
    on_host = einshard(FULL, 'a* b', mesh=jax.local_devices(), memory_kind='pinned_host')
    x = from_local(on_host, 'a* b')
    assert x.sharding.memory_kind == 'device'
    np.testing.assert_array_equal(gather(x), np.concatenate([FULL] * jax.process_count()))
    # an axis behind '...', and one that is empty
    images = np.arange(8 * 2 * 4).reshape(8, 2, 4)
    x = from_local(part_of(images, [(0, 8)]), 'batch ... c -> batch* ... c')
    check_shards(x, images, [(0, 8)])
    x = from_local(part_of(images, [(2, 4), (None, 2)]), '... c -> ... c4 2')
    check_shards(x, images, [(2, 4), (None, 2)])
    assert from_local(np.ones((0, 3)), 'a b -> a* b').shape == (0, 3)


@check_in_four_too
def rows_in_order_of_processes():
    """The usual case, without ON_EIGHT."""
    process, n = jax.process_index(), jax.process_count()
    rows = np.full((8, 3), float(process))
    x = from_local(rows, 'batch d -> batch* d')
    assert (x.shape, x.dtype) == ((8 * n, 3), np.float32)
    np.testing.assert_array_equal(gather(x)[:, 0], np.repeat(np.arange(n), 8))
    # 16 columns in groups of 8 / n devices, and the batch over the groups
    x = from_local(np.full((2, 16), process), f'batch d -> batch{n} d*')
    assert x.shape == (2 * n, 16)
    np.testing.assert_array_equal(gather(x)[:, 5], np.repeat(np.arange(n), 2))


@check_in_four_too
def shapes_in_the_documentation():
    """The table of docs/many_hosts.md, for four processes with two devices each."""
    if jax.process_count() != 4:
        return
    page = (Path(__file__).parents[1] / 'docs' / 'many_hosts.md').read_text()
    rows = re.findall(r"\| `'(.+)'` \| (\d+) x (\d+) \| (\d+) x (\d+) \|", page)
    assert len(rows) == 5
    for expression, *sizes in rows:
        x = from_local(np.zeros((32, 16)), expression)
        shard = x.addressable_shards[0].data
        assert (*x.shape, *shard.shape) == tuple(map(int, sizes))


@check
def local_trees():
    process, n = jax.process_index(), jax.process_count()
    batch = {
        'images': np.full((8, 2, 2), process, np.float64),
        'labels': np.arange(8) + 8 * process,
        'keys': jax.random.split(jax.random.key(process), 8),
        'step': 3,
        'scale': np.ones(()),
        'of': 'training',
        'none': None,
        'left': FULL,
    }
    rows, replicated = 'batch ... -> batch* ...', '... -> * ...'

    def by_path(path, leaf):
        if path in ('left', 'none'):
            return None
        return replicated if np.ndim(leaf) == 0 else rows

    by_leaf = {name: by_path(name, leaf) for name, leaf in batch.items()} | {'of': None}
    for spec in (by_leaf, by_path):
        x = from_local(batch, spec)
        np.testing.assert_array_equal(gather(x['labels']), np.arange(8 * n))
        assert x['labels'].dtype == np.int32
        assert (x['images'].shape, x['images'].dtype) == ((8 * n, 2, 2), np.float32)
        expected = [jax.random.key_data(jax.random.split(jax.random.key(p), 8)) for p in range(n)]
        np.testing.assert_array_equal(gather(x['keys']), np.concatenate(expected))
        check_shards(x['step'], np.int32(3), [(None, 8)])
        check_shards(x['scale'], np.float32(1), [(None, 8)])
        assert (x['of'], x['none']) == ('training', None)
        assert x['left'] is FULL
    x = from_local({name: batch[name] for name in ('images', 'scale')}, Rules([('images', rows)]))
    assert x['images'].sharding == make_sharding('b ... -> b* ...')
    assert x['scale'].sharding == make_sharding(replicated)
    # strings and functions under a prefix
    x = from_local({'x': FULL, 'of': ['training', len]}, {'x': rows, 'of': replicated})
    assert x['of'] == ['training', len]
    struct = from_local(jax.ShapeDtypeStruct((8, 4), np.float32), 'b d -> b* d')
    assert (struct.shape, struct.dtype) == ((8 * n, 4), np.float32)
    assert struct.sharding == make_sharding('b d -> b* d')


@check_in_four_too
def meshes():
    process, n, n_each = jax.process_index(), jax.process_count(), jax.local_device_count()
    rows = np.full((8, 3), process)
    # a mesh of one process: only that process calls it
    if process == 0:
        x = from_local(rows, 'b d -> b* d', mesh=jax.local_devices())
        assert x.shape == (8, 3)
        assert len(x.addressable_shards) == n_each
    # a mesh with all devices of one process and one of another; the rest take no part
    few = jax.devices()[: n_each + 1]
    if process < 2:
        x = from_local(rows[:, :1] * 0, 'b d -> * b d', mesh=few)
        assert x.shape == (8, 1)
        assert len(x.addressable_shards) == (1 if process else n_each)
    # the user's mesh, given or in context, with Auto or Explicit axes
    for kind in (AxisType.Auto, AxisType.Explicit):
        grid = np.array(jax.devices()).reshape(n, n_each)
        mesh = Mesh(grid, ('data', 'tp'), axis_types=(kind,) * 2)
        x = from_local(rows, 'b d -> b@data d', mesh=mesh)
        with jax.set_mesh(mesh):
            y = from_local(rows, 'b d -> b@data d')
        for array in (x, y):
            assert array.sharding.mesh == mesh
            np.testing.assert_array_equal(gather(array)[:, 0], np.repeat(np.arange(n), 8))
    # if the devices of the processes alternate, each passes the rows of its devices in order
    crosswise = Mesh(np.array(jax.devices()).reshape(n, n_each).T.reshape(-1), ('x',))
    x = from_local(rows, 'b d -> b@x d', mesh=crosswise)
    each = 8 // n_each
    expected = np.concatenate([np.repeat(np.arange(n), each)] * n_each)
    np.testing.assert_array_equal(gather(x)[:, 0], expected)


@check
def unchecked():
    process = jax.process_index()
    rows = np.full((8, 3), process)
    if process == 0:  # with the check it would wait for the others here
        from_local(rows, 'b d -> b* d', check=False)
    # differences between replicas are not detected
    x = from_local(rows, 'b d -> * b d')
    assert all((np.asarray(shard.data) == process).all() for shard in x.addressable_shards)


@check_in_four_too
def uneven_rows():
    """All of them are errors in every process, after which the next one works."""
    process, n_each = jax.process_index(), jax.local_device_count()
    first = process == 0
    rows = np.ones((8, 4), np.float32)
    spec = 'batch d -> batch* d'

    spec_by_leaf = {'x': spec, 'of': spec}

    class Foreign:
        def __array__(self, dtype=None, copy=None):
            return rows

    def broken(path, leaf):
        if first:
            raise RuntimeError('no file')
        return spec

    cases = {
        'indivisible in all': (rows[:5], spec),
        'indivisible in one': ({'x': rows[: 5 if first else 4]}, spec),
        'other rows': ({'x': rows, 'y': rows[: 8 if first else 4]}, spec),
        'other dtype': (rows.astype(np.int32) if first else rows, spec),
        'other tree': ({'x': rows} | ({} if first else {'y': rows}), spec),
        'other expression': (rows, '* batch d' if first else spec),
        'other function': (rows, broken),
        'bad expression': ({'x': rows}, 'batch d -> batch* e'),
        'lenient rules': ({'x': rows[:7]}, Rules([('x', spec)], indivisible='replicate')),
        'global': ({'x': from_local(rows, spec)}, spec),
        'strings': (np.array(['a'] * 8), 'batch -> batch*'),
        'a string': ({'x': rows, 'of': 'training'}, {'x': spec, 'of': '...'}),
        'a string in one': ({'x': rows, 'of': 'training' if first else rows}, spec_by_leaf),
        'another library': ({'x': Foreign()}, spec),
    }
    said = {}
    for name, (batch, its_spec) in cases.items():
        said[name] = refused(from_local, batch, its_spec)
        assert from_local(rows, spec).shape == (8 * jax.process_count(), 4)
    with axis_rules(batch='*', indivisible='replicate'):
        said['lenient axis rules'] = refused(from_local, {'x': rows[:7]}, 'batch d')
        said['no rule'] = refused(from_local, {'x': rows[:7]}, spec)
    if jax.process_count() == 2:
        said['split unevenly'] = refused(
            from_local, rows, 'batch d -> batch3 d 2', mesh=jax.devices()[1:7]
        )
        said['unlike numbers'] = refused(from_local, rows, spec, mesh=jax.devices()[:7])
    if not first:
        said['other mesh'] = refused(from_local, rows, spec, mesh=jax.devices()[:n_each])
    abstract = AbstractMesh((8,), ('x',), axis_types=(AxisType.Auto,))
    said['abstract mesh'] = refused(from_local, rows, 'batch d -> batch@x d', mesh=abstract)
    # axes that are sharded only within a process may be replicated if indivisible
    inner = Rules([('x', f'b d -> b{jax.process_count()} d*')], indivisible='replicate')
    x = from_local({'x': np.full((4, 3), process)}, inner)['x']
    assert x.shape == (4 * jax.process_count(), 3)
    assert x.sharding == make_sharding(f'a b -> a* {n_each} b')
    return said


# --- a model ----------------------------------------------------------------------------------

TRAINING = Rules(
    [
        ('up/kernel', 'i h -> * i h2'),
        ('up/bias', 'h -> * h2'),
        ('down/kernel', 'h o -> * h2 o'),
        ('down/bias', '... -> * ...'),
    ]
)


def train(process=0, n_processes=1, mesh=None):
    """Losses and parameters of five steps; each process has its rows of the batches."""
    rng = np.random.default_rng(0)

    def dense(n_in, n_out):
        kernel = rng.normal(scale=n_in**-0.5, size=(n_in, n_out)).astype(np.float32)
        return {'kernel': kernel, 'bias': np.zeros(n_out, np.float32)}

    host = {'up': dense(8, 16), 'down': dense(16, 2)}
    params = einshard(host, TRAINING, mesh=mesh)
    momentum = einshard(jax.tree.map(np.zeros_like, host), TRAINING, mesh=mesh)

    def loss_of(params, x, y):
        hidden = jnp.tanh(x @ params['up']['kernel'] + params['up']['bias'])
        return jnp.mean((hidden @ params['down']['kernel'] + params['down']['bias'] - y) ** 2)

    batch_spec = 'batch d -> batch* d 2'

    @sharded(
        TRAINING, TRAINING, batch_spec, batch_spec, out=(TRAINING, TRAINING, '* ...'), mesh=mesh
    )
    def step(params, momentum, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss

    losses = []
    for _ in range(5):
        x = rng.normal(size=(32, 8))
        batch = {'x': x, 'y': np.stack([x.sum(1), x[:, 0] * x[:, 1]], axis=1)}
        mine = jax.tree.map(lambda rows: np.split(rows, n_processes)[process], batch)
        batch = from_local(mine, batch_spec, mesh=mesh)
        assert batch['x'].shape == (32, 8)
        params, momentum, loss = step(params, momentum, **batch)
        losses.append(loss)
    leaves = jax.tree_util.tree_leaves_with_path(gather(params))
    named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
    return {'losses': np.array(gather(losses)), **named}


@check_in_four_too
def training():
    process, n = jax.process_index(), jax.process_count()
    return {name: array.tolist() for name, array in train(process, n).items()}


# --- a checkpoint -----------------------------------------------------------------------------

SAVED = {
    'w': FULL,
    'b': np.arange(16, dtype=np.float32).astype(ml_dtypes.bfloat16),
    'step': np.int32(7),
}
SAVED_AS = {'w': 'a b -> a4 b2', 'b': 'a -> * a2', 'step': '... -> * ...'}
RESTORED_AS = {'w': 'a b -> b* a', 'b': 'a -> a*', 'step': '... -> * ...'}


def restore(folder, mesh=None):
    """Restores the checkpoint with other shardings."""
    import orbax.checkpoint

    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, SAVED))
    target = einshard(shapes, RESTORED_AS, mesh=mesh)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(Path(folder).absolute(), target)
    for name, struct in target.items():
        assert restored[name].sharding == struct.sharding
        assert restored[name].dtype == SAVED[name].dtype
        np.testing.assert_array_equal(gather(restored[name]), SAVED[name])
    return restored


@check
def checkpoint(folder):
    """Two processes save and restore, with other shardings."""
    if importlib.util.find_spec('orbax') is None:
        return
    import orbax.checkpoint

    saved = folder.parent / 'checkpoint'
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(saved, einshard(SAVED, SAVED_AS))
    restored = restore(saved)
    check_shards(restored['w'], FULL, [(1, 8)])
    check_shards(restored['b'], SAVED['b'], [(0, 8)])


# --- the program ------------------------------------------------------------------------------


def main(port, n_processes, process, folder):
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(f'127.0.0.1:{port}', n_processes, process, initialization_timeout=60)
    assert jax.device_count() == 8
    with open(folder / f'{process}.jsonl', 'w') as results:
        for name, function in (CHECKS if n_processes == 2 else IN_FOUR).items():
            said, error = None, None
            try:
                said = function(folder) if name == 'checkpoint' else function()
            except BaseException:
                error = traceback.format_exc()
            results.write(json.dumps({'check': name, 'said': said, 'error': error}) + '\n')
            results.flush()
    jax.distributed.shutdown()


if __name__ == '__main__':
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
