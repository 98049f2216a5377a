"""jax.export of sharded functions, and calls of the deserialized programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import MESH, check_placed, struct
from refusal import refusal

from einshard import Rules, device_mesh, einshard, sharded

RNG = np.random.default_rng(0)
X, W = np.float32(RNG.normal(size=(16, 8))), np.float32(RNG.normal(size=(8, 4)))
ROWS, COLUMNS = 'b d -> b8 d 2', 'd f -> * d f2'


def through_bytes(exported, **options):
    return export.deserialize(exported.serialize(**options))


@sharded(ROWS, COLUMNS, out=ROWS)
def layer(x, w):
    return jax.nn.relu(einshard(x @ w, 'b f -> b8 f2'))


@pytest.fixture(scope='module')
def exported():
    return through_bytes(export.export(layer)(struct(16, 8), struct(8, 4)), vjp_order=1)


def placed_arguments():
    return einshard(X, ROWS), einshard(W, COLUMNS)


def check(y, expected):
    check_placed(y, {'': P('data')})
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_an_exported_function_has_the_shardings_of_its_specs(exported):
    assert exported.fun_name == 'layer'
    assert exported.nr_devices == 16
    mesh = device_mesh()
    shardings = *exported.in_shardings_jax(mesh), *exported.out_shardings_jax(mesh)
    expected = [P('data'), P(None, 'tp'), P('data')]
    for sharding, spec in zip(shardings, expected, strict=True):
        assert sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)


def test_called_with_placed_arrays_and_by_sharded_with_host_arrays(exported):
    check(exported.call(*placed_arguments()), np.maximum(X @ W, 0))
    check(sharded(ROWS, COLUMNS, out=ROWS)(exported.call)(X, W), np.maximum(X @ W, 0))


def test_gradients_are_exported_too(exported):
    x, w = placed_arguments()
    gradient = jax.grad(lambda w: exported.call(x, w).sum())(w)
    expected = jax.grad(lambda w: jax.nn.relu(jnp.asarray(X) @ w).sum())(jnp.asarray(W))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_jax_refuses_other_numbers_of_devices(exported):
    with pytest.raises(ValueError, match='exported for 16 devices'):
        exported.call(X, W)


def test_a_model_by_rules_and_keywords():
    rules = Rules([('w', COLUMNS)], default='... -> * ...')
    params = {'w': W, 'b': np.ones(4, np.float32)}

    @sharded(rules, x=ROWS, out=ROWS)
    def apply(params, x):
        return x @ params['w'] + params['b']

    shapes = jax.tree.map(lambda leaf: struct(*leaf.shape), params)
    exported = through_bytes(export.export(apply)(shapes, x=struct(16, 8)))
    check(exported.call(einshard(params, rules), x=einshard(X, ROWS)), X @ W + 1)


def test_a_method():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: jax.Array

        @sharded(ROWS, out=ROWS)
        def __call__(self, x):
            return x @ self.w

    exported = export.export(Layer.__call__)(Layer(struct(8, 4)), struct(16, 8))
    check(exported.call(Layer(einshard(W, COLUMNS)), einshard(X, ROWS)), X @ W)


def test_for_devices_you_do_not_have():
    mesh = AbstractMesh((8, 2), ('data', 'tp'), axis_types=(AxisType.Auto,) * 2)
    specs = 'b d -> b@data d', 'd f -> d f@tp'
    function = sharded(*specs, out='b f -> b@data f', mesh=mesh)(lambda x, w: x @ w)
    exported = export.export(function, platforms=['tpu', 'cpu'])(struct(16, 8), struct(8, 4))
    assert exported.nr_devices == 16
    assert exported.platforms == ('tpu', 'cpu')
    x, w = (einshard(a, spec, mesh=MESH) for a, spec in zip((X, W), specs, strict=True))
    check(through_bytes(exported).call(x, w), X @ W)


def test_symbolic_sizes_that_are_divisible():
    n, d = export.symbolic_shape('8*n, d')
    exported = through_bytes(export.export(layer)(struct(n, d), struct(d, 4)))
    for rows in (8, 24):
        x = np.ones((rows, 8), np.float32)
        check(exported.call(einshard(x, ROWS), einshard(W, COLUMNS)), np.maximum(x @ W, 0))


@pytest.mark.parametrize('traced', [layer, jax.jit(lambda x, w: einshard(x, ROWS) @ w)])
def test_symbolic_sizes_that_may_not_be_divisible(traced):
    n, d = export.symbolic_shape('n, d')
    error = refusal(export.export(traced), struct(n, d), struct(d, 4))
    assert error.sentence == "axis 'b' (size n) may not be divisible by 8"
