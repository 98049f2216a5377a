"""expect_placements: models that are not placed as their rules say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from placed import struct

from einshard import EinshardError, Rules, device_mesh, einshard, expect_placements, topology

RULES = Rules([('(^|/)w/', 'i o -> i o@tensor'), ('b', 'o')])


@pytest.fixture
def mesh():
    return device_mesh(jax.devices()[:8], data=2, tensor=4)


def model():
    return {'layers': {'w': {str(i): jnp.ones((4, 8)) for i in range(9)}}, 'b': jnp.ones(8)}


def test_a_model_as_its_rules_say(mesh):
    expect_placements(einshard(model(), RULES, mesh=mesh), RULES, mesh)
    expect_placements(einshard(jax.eval_shape(model), RULES, mesh=mesh), RULES, mesh=mesh)
    expect_placements({'w': None, 'f': jnp.sin}, RULES, mesh)


def test_replicated_arrays(mesh):
    """By hand: 9 arrays of 4 x 8 x 4 bytes, of which a device should hold a quarter."""
    replicated = einshard(model(), '... -> * ...', mesh=mesh)
    with pytest.raises(EinshardError) as caught:
        expect_placements(replicated, RULES, mesh)
    error = caught.value
    assert error.code == 'placed-differently'
    assert error.sentence == (
        '9 of 10 arrays are not sharded though the rules shard them: 864 B more on a device'
    )
    assert "layers/w/0: 'a b -> 8 a b', not 'a b -> a b@tensor'" in error.facts['arrays']
    assert ', and 4 more' in error.facts['arrays']
    assert error.facts['instead'].startswith('einshard(model, rules, mesh=mesh) moves them')


def test_arrays_that_are_sharded_otherwise(mesh):
    placed = einshard(model(), RULES, mesh=mesh)
    placed['layers']['w']['3'] = einshard(np.ones((4, 8)), 'i@tensor o', mesh=mesh)
    placed['b'] = einshard(np.ones(8), 'o@data', mesh=mesh)
    with pytest.raises(EinshardError, match=r'^2 of 10 arrays are not placed as the rules say\n'):
        expect_placements(placed, RULES, mesh)
    placed = einshard(model(), RULES, mesh=mesh)
    placed['layers']['w']['3'] = np.ones((4, 8))
    with pytest.raises(EinshardError, match=r'1 of 10 arrays is not sharded(.|\n)*in host memory'):
        expect_placements(placed, RULES, mesh)


def test_gradients_that_are_not_reduced():
    mesh = device_mesh(jax.devices()[:4], axis_types=AxisType.Explicit, tensor=4)
    replicated = einshard(np.ones((4, 8)), '* i o', mesh=mesh)
    with pytest.raises(EinshardError, match=r"'a b -> 4 a b', not 'a b -> a b =@tensor'"):
        expect_placements(replicated, '=@tensor i o', mesh)


def test_a_shape_without_a_sharding(mesh):
    shapes = jax.eval_shape(model)
    with pytest.raises(EinshardError, match="w/0: without a sharding, not 'a b -> a b@tensor'"):
        expect_placements(shapes, RULES, mesh)


def test_one_device_is_not_a_mesh(mesh):
    # they are not replicated, and only that device holds more
    message = (
        '10 of 10 arrays are not placed as the rules say, 9 of which are not sharded.* on a device'
    )
    with pytest.raises(EinshardError, match=message):
        expect_placements(model(), RULES, mesh)


def test_rules_that_do_not_fit(mesh):
    with pytest.raises(EinshardError, match="'x'"):
        expect_placements({'x': jnp.ones(3)}, RULES, mesh)


def test_modules(mesh):
    nnx = pytest.importorskip('flax.nnx')
    equinox = pytest.importorskip('equinox')
    net = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    rules = Rules([('kernel', 'i o@tensor'), ('bias', 'o@tensor')])
    with pytest.raises(EinshardError, match='2 of 2 arrays'):
        expect_placements(net, rules, mesh)
    expect_placements(einshard(net, rules, mesh=mesh), rules, mesh)
    linear = equinox.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
    rules = Rules([('weight', 'o@tensor i'), ('bias', 'o@tensor')])
    with pytest.raises(EinshardError, match=r'4 of 4 arrays(.|\n)*layers/0/weight'):
        expect_placements(linear, rules, mesh)
    expect_placements(einshard(linear, rules, mesh=mesh), rules, mesh)


def test_shapes_on_devices_that_are_not_here():
    pytest.importorskip('libtpu')
    mesh = topology('v5e:2x4', data=2, tensor=4)
    shapes = {'w': struct(4, 8), 'b': struct(8)}
    placed = einshard(shapes, Rules([('w', 'i o@tensor'), ('b', 'o')]), mesh=mesh)
    with pytest.raises(EinshardError, match='1 of 2 arrays'):
        expect_placements(placed, Rules([('w', 'i@tensor o'), ('b', 'o')]), mesh=mesh)
