"""Orbax: saves shards, and restores other shards on other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from placed import check_equal, check_placed, mesh_of

from einshard import Rules, einshard, sharded

SIZE = 48
OPTIMIZER = optax.adamw(1e-3)

# from sixteen devices
SAVED = Rules([('up', 'd f -> d8 f2'), ('down', 'f d -> f* d')], default='... -> * ...')
# to six others, with other shards
RESTORED = Rules([('up', 'd f -> d3 f2'), ('down', 'f d -> 3 f d2')], default='... -> * ...')
SPECS = {'up': P('a', 'b'), 'down': P(None, 'b')}


def init(key):
    first, second = jax.random.split(key)
    params = {
        'up': jax.random.normal(first, (SIZE, 4 * SIZE)),
        'down': jax.random.normal(second, (4 * SIZE, SIZE), jnp.bfloat16),
    }
    return {'params': params, 'state': OPTIMIZER.init(params), 'step': jnp.int32(7)}


@pytest.fixture(scope='module')
def tree():
    return sharded(out=SAVED)(init)(jax.random.key(0))


SHAPES = jax.eval_shape(init, jax.random.key(0))
DEVICES = jax.devices()[10:16]
SIX = mesh_of(DEVICES, a=3, b=2)
TARGET = einshard(SHAPES, RESTORED, mesh=DEVICES)


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


@pytest.fixture
def put(monkeypatch):
    """The shapes of arrays that jax.device_put gets."""
    shapes = set()
    device_put = jax.device_put

    def recorded(x, *args, **kwargs):
        shapes.update(np.shape(leaf) for leaf in jax.tree.leaves(x))
        return device_put(x, *args, **kwargs)

    monkeypatch.setattr(jax, 'device_put', recorded)
    return shapes


def test_restored_by_other_rules_on_other_devices(tree, tmp_path, put):
    save(tmp_path / 'checkpoint', tree)
    put.clear()
    restored = restore(tmp_path / 'checkpoint', TARGET)
    check_placed(restored, SPECS, SIX)
    check_equal(restored, tree)
    # sharded arrays were put on devices as shards
    assert put == {(SIZE // 3, 2 * SIZE), (4 * SIZE, SIZE // 2), ()}


def test_files_hold_shards(tree, tmp_path):
    """Each device wrote its shard; nothing was gathered."""
    save(tmp_path / 'checkpoint', tree)
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / 'checkpoint')
    metadata = getattr(metadata, 'item_metadata', metadata)
    params = getattr(metadata, 'tree', metadata)['params']
    assert params['up'].storage.write_shape == (SIZE // 8, 2 * SIZE)
    assert params['down'].storage.write_shape == (SIZE // 4, SIZE)


def test_from_few_devices_to_many(tmp_path):
    tree = sharded(out=RESTORED, mesh=SIX)(init)(jax.random.key(0))
    check_placed(tree, SPECS, SIX)
    save(tmp_path / 'checkpoint', tree)
    restored = restore(tmp_path / 'checkpoint', einshard(SHAPES, SAVED))
    mesh = mesh_of(jax.devices(), a=8, b=2)
    check_placed(restored, {'up': P('a', 'b'), 'down': P(('a', 'b'))}, mesh)
    check_equal(restored, tree)


def test_by_a_manager_and_on_with_the_training(tree, tmp_path):
    @sharded(RESTORED, out=RESTORED, mesh=DEVICES)
    def step(tree):
        gradient = tree['params']
        updates, state = OPTIMIZER.update(gradient, tree['state'], tree['params'])
        params = optax.apply_updates(tree['params'], updates)
        return {'params': params, 'state': state, 'step': tree['step'] + 1}

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(TARGET))
    check_placed(step(restored), SPECS, SIX)


def test_state_of_nnx_with_typed_keys(tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(SIZE, 4 * SIZE, use_bias=False, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    def state():
        return nnx.state(Model(nnx.Rngs(0)))

    saved = sharded(out=SAVED)(state)()
    save(tmp_path / 'checkpoint', saved)
    target = einshard(nnx.eval_shape(state), RESTORED, mesh=DEVICES)
    restored = restore(tmp_path / 'checkpoint', target)
    check_placed(restored, {'up/kernel/value': P('a', 'b')}, SIX)
    check_equal(restored, saved)
    assert jnp.issubdtype(restored['drop']['rngs']['key'].dtype, jax.dtypes.prng_key)


def test_sharded_typed_keys(tmp_path):
    keys = einshard(jax.random.split(jax.random.key(0), 16), 'k -> k*')
    save(tmp_path / 'checkpoint', {'keys': keys})
    target = {'keys': jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))}
    devices = jax.devices()[:8]
    restored = restore(tmp_path / 'checkpoint', einshard(target, 'k -> k4 2', mesh=devices))
    check_placed(restored, {'keys': P('a')}, mesh_of(devices, a=4, b=2))
    check_equal(restored, {'keys': keys})
