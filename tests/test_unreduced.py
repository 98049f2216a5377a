"""Arrays with unreduced axes: each device has a term of a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import Rules, describe, device_mesh, einshard, gather, make_sharding, sharded, show

A, B = np.arange(32.0).reshape(8, 4), np.arange(32.0).reshape(4, 8)
SUM = A @ B


@pytest.fixture
def mesh():
    with jax.set_mesh(mesh_of(types=AxisType.Explicit, x=4, y=2)):
        yield jax.sharding.get_mesh()


@pytest.fixture
def terms(mesh):
    """A @ B with the contracted axis sharded over y, unreduced."""

    @jax.jit
    def product(a, b):
        return jnp.einsum('ij,jk->ik', a, b, out_sharding=P('x', None, unreduced={'y'}))

    return product(reshard(A, P('x', 'y')), reshard(B, P('y', None)))


def test_described(mesh, terms):
    words = 'a b -> a@x b +@y'
    assert describe(terms) == words
    assert describe({'t': terms}) == {'t': words}
    assert describe(terms.sharding) == 'a b ... -> a@x b ... +@y'
    both = P('x', unreduced={'y'}), P(unreduced={'y', 'x'}), P(('x',), None, reduced={'y'})
    assert [describe(NamedSharding(mesh, spec)) for spec in both] == [
        'a ... -> a@x ... +@y',
        '... -> ... +@(x,y)',
        'a b ... -> a@x b ... =@y',
    ]
    traced = []
    jax.jit(lambda x: traced.append(describe(x)))(terms)
    assert traced == [words]


def test_unreduced_axes_of_the_canonical_mesh_are_not_replicas():
    mesh = device_mesh(jax.devices()[:4], axis_types=AxisType.Explicit)
    assert describe(NamedSharding(mesh, P('d0'))) == 'a ... -> a2 2 ...'
    assert describe(NamedSharding(mesh, P('d0', unreduced={'d1'}))) == 'a ... -> a2 +2 ...'


def test_drawn(mesh, terms):
    text = str(show(terms))
    assert 'mesh axes, slowest-varying first: x (4 parts of a), y (2 terms of a sum)' in text
    assert text.endswith("in the notation: 'a b -> a@x b +@y'")
    assert str(show(terms.sharding, (8, 8))).count('0+1') == 1
    assert "'a b -> a@x b +@y'" in str(show({'t': terms}))


@pytest.mark.parametrize(
    'expression', ['a b -> a@x b', 'a b -> a@x b@y', 'a b -> a b@(y,x)', '* a b']
)
def test_einshard_reduces(terms, expression):
    for placed in (
        einshard(terms, expression),
        einshard({'t': terms}, expression)['t'],
        einshard({'t': terms}, Rules([('t', expression)]))['t'],
        jax.jit(lambda x: einshard(x, expression))(terms),
        sharded(expression, reshard=True)(lambda x: x)(terms),
    ):
        np.testing.assert_array_equal(placed, SUM)
        assert placed.sharding.is_equivalent_to(make_sharding(expression), 2)
        assert not placed.sharding.spec.unreduced


def test_to_another_mesh(terms):
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:6], 'z', axis_types=(AxisType.Auto,))):
        placed = einshard(terms, '* a b')
        host = gather({'t': terms})['t']
    assert type(host) is np.ndarray
    np.testing.assert_array_equal(host, SUM)
    np.testing.assert_array_equal(placed, SUM)
    assert placed.sharding.mesh.axis_names == ('z',)


def test_einshard_removes_reduced_axes_of_a_weight(mesh):
    weight = reshard(A, P('x', None, reduced={'y'}))
    for placed in (
        einshard(weight, 'a b -> a@x b'),
        jax.jit(lambda w: einshard(w, 'a b -> a@x b'))(weight),
    ):
        np.testing.assert_array_equal(placed, A)
        assert not placed.sharding.spec.reduced
