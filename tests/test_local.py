"""from_local in one process, where it is einshard; test_processes.py has several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from refusal import refusal

from einshard import Rules, device_mesh, einshard, from_local, make_sharding, sharded

X = np.arange(128, dtype=np.float64).reshape(8, 16)


@pytest.mark.parametrize(
    'expression', ['batch d -> batch* d', '* ...', 'b d -> d2 b*', 'a ... -> ... a8 *']
)
def test_array(expression, devices8):
    for given in (X, jnp.asarray(X), jax.ShapeDtypeStruct((8, 16), np.float32)):
        ours = from_local(given, expression, mesh=devices8)
        theirs = einshard(given, expression, mesh=devices8)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.sharding == theirs.sharding
        if not isinstance(given, jax.ShapeDtypeStruct):
            np.testing.assert_array_equal(ours, X)


def test_tree():
    batch = {'x': X, 'y': np.arange(16), 'step': np.int32(1), 'left': X}
    batch |= {'of': 'training', 'none': None}
    rules = Rules([('^x$', 'b d -> b8 d 2'), ('y', 'b -> b*'), ('left', None)])
    x = from_local(batch, rules, check=False)
    assert x['x'].sharding == make_sharding('b d -> b8 2 d')
    assert x['y'].sharding == make_sharding('b -> b16')
    assert x['step'].sharding == make_sharding('... -> * ...')
    assert (x['of'], x['none']) == ('training', None)
    assert x['left'] is X


def test_mesh_in_context():
    mesh = device_mesh(jax.devices()[:4], axis_types=AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert from_local(X, 'a b -> a4 b').sharding.mesh == mesh


def test_a_placed_array_is_returned():
    x = einshard(X, 'a b -> a8 2 b')
    assert from_local(x, 'a b -> a8 2 b') is x


@pytest.mark.parametrize(
    'trace',
    [
        lambda place: jax.jit(place)(X),
        lambda place: jax.jit(lambda: place(X))(),
        lambda place: jax.vmap(place)(X),
        lambda place: jax.grad(lambda x: place(x).sum())(jnp.ones((8, 4))),
        lambda place: sharded('a b -> a8 b2')(place)(X),
    ],
)
def test_traced_values(trace):
    error = refusal(trace, lambda x: from_local(x, '* ...'))
    assert error.sentence == 'from_local cannot be traced: it needs the data of each process'


@pytest.mark.parametrize(
    ('batch', 'spec', 'options'),
    [
        (X[:7], 'a b -> a8 2 b', {}),
        (X, 'a b -> a* c', {}),
        ({'x': X}, {'y': '* ...'}, {}),
        (np.array(['a']), '* a', {}),
        (X, AbstractMesh((2,), ('x',)), {}),
        (X, '* ...', {'mesh': 'data'}),
    ],
)
def test_errors_are_those_of_einshard(batch, spec, options):
    error = refusal(from_local, batch, spec, **options)
    assert str(error) == str(refusal(einshard, batch, spec, **options))
