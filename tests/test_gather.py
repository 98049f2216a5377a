"""gather: sharded arrays to numpy, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from refusal import refusal

from einshard import describe, einshard, gather

X = np.arange(12 * 16, dtype=np.float32).reshape(12, 16)


@pytest.mark.parametrize(
    'expression', ['a b -> * a b', 'a b -> a* b', 'a b -> b* a', 'a b -> a2 b*', '... -> * ...']
)
def test_there_and_back(expression):
    placed = einshard(X, expression, mesh=jax.devices()[:4])
    full = gather(placed)
    assert type(full) is np.ndarray
    np.testing.assert_array_equal(full, X)
    again = einshard(full, describe(placed), mesh=jax.devices()[:4])
    assert again.sharding == placed.sharding
    np.testing.assert_array_equal(again, X)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, np.int8, np.bool_, np.complex64])
def test_dtypes_stay(dtype):
    full = gather(einshard(X.astype(dtype), 'a b -> a4 * b'))
    assert full.dtype == dtype
    np.testing.assert_array_equal(full, X.astype(dtype))


def test_leaves_that_are_not_arrays_are_returned():
    tree = {'w': einshard(X, '* a b'), 'n': None, 'f': jnp.sin, 'h': X, 's': 'relu', 'i': 3}
    host = gather(tree)
    np.testing.assert_array_equal(host['w'], X)
    assert host['h'] is X
    assert (host['n'], host['f'], host['s'], host['i']) == (None, jnp.sin, 'relu', 3)
    assert gather({}) == {}


def test_arrays_of_other_meshes_and_of_one_device():
    mesh = Mesh(np.array(jax.devices()[:6])[::-1].reshape(2, 3), ('p', 'q'))
    by_hand = jax.device_put(X, NamedSharding(mesh, P(('q', 'p'))))
    tree = [by_hand, jnp.asarray(X), jax.device_put(X, jax.devices()[3])]
    for full in gather(tree):
        np.testing.assert_array_equal(full, X)


def test_traced_values():
    error = refusal(jax.jit(lambda tree: gather(tree)), {'w': X})
    assert error.sentence == 'a traced value cannot be gathered: it has no data yet'
    assert error.facts['array'] == "float32[12,16], leaf 'w'"


def test_values_that_a_traced_function_closes_over():
    mesh = Mesh(np.array(jax.devices()[:2]), ('x',), axis_types=(AxisType.Explicit,))
    key, terms = jax.random.key(0), einshard(X, 'a b +@x', mesh=mesh)
    host = []
    jax.jit(lambda x: host.append(gather({'key': key, 'terms': terms, 'x': X})))(1)
    np.testing.assert_array_equal(host[0]['key'], jax.random.key_data(key))
    np.testing.assert_array_equal(host[0]['terms'], X)
    ref = jax.new_ref(X)
    error = refusal(jax.jit(lambda x: gather({'r': ref})), 1)
    assert error.sentence == 'a traced value cannot be gathered: it has no data yet'
    assert error.facts['array'].endswith("leaf 'r'")


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_keys_are_gathered_as_their_data(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 8)
    tree = {'key': jax.random.key(4, impl=impl), 'keys': einshard(keys, 'a8 2'), 'x': X}
    host = gather(tree)
    assert {type(leaf) for leaf in jax.tree.leaves(host)} == {np.ndarray}
    for name in ('key', 'keys'):
        np.testing.assert_array_equal(host[name], jax.random.key_data(tree[name]))
        assert (jax.random.wrap_key_data(host[name], impl=impl) == tree[name]).all()
