"""Explicit mesh axes, which `jax.make_mesh` makes by default since JAX 0.9."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import EinshardError, einshard, per_device

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
MESH = mesh_of(types=EXPLICIT, data=4, tensor=2)
X = np.arange(64, dtype=np.float32).reshape(8, 8)
JAX = jax.__version_info__


def test_default_of_make_mesh():
    # docs/explicit_sharding.md says since when
    warned = pytest.warns(DeprecationWarning, match='axis_types')
    with warned if JAX < (0, 9) else contextlib.nullcontext():
        mesh = jax.make_mesh((4, 2), ('data', 'tensor'), devices=jax.devices()[:8])
    assert set(mesh.axis_types) == {AUTO if JAX < (0, 9) else EXPLICIT}


# per-device functions without specs


@pytest.mark.parametrize(
    ('spec', 'expression'),
    [
        (P(), '* a b'),
        (P('data'), 'a@data b'),
        (P('data', 'tensor'), 'a@data b@tensor'),
        (P(None, ('tensor', 'data')), 'a b@(tensor,data)'),
    ],
)
@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize('context', [False, True])
def test_specs_are_inferred_as_by_shard_map(spec, expression, jitted, context):
    x = jax.device_put(X, jax.NamedSharding(MESH, spec))
    shapes = []

    def double(x):
        shapes.append(x.shape)
        return x * 2

    mapped = jax.shard_map(double, mesh=MESH, out_specs=spec)
    mesh = None if context else MESH
    ours = per_device(out=expression, mesh=mesh)(double)
    if jitted:
        ours = jax.jit(ours)
    with jax.set_mesh(MESH) if context else contextlib.nullcontext():
        y = ours(x)
    expected = mapped(x)
    assert y.sharding.is_equivalent_to(expected.sharding, 2)
    assert set(shapes) == {x.addressable_shards[0].data.shape}
    np.testing.assert_array_equal(y, X * 2)


def test_inferred_and_given_specs_mix():
    @per_device(None, 'x y -> x@tensor y', out='b y -> b@data y')
    def product(x, w):
        return jax.lax.psum(x['x'] @ w, 'tensor')

    with jax.set_mesh(MESH):
        y = product({'x': einshard(X, 'b x -> b@data x@tensor')}, X)
    np.testing.assert_array_equal(y, X @ X)


def test_inferred_specs_along_manual_axes():
    shapes = []

    @per_device(out='a b -> a@data b', axis_names='data')
    def double(x):
        shapes.append(x.shape)
        return x * 2

    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(double(einshard(X, 'a b -> a@data b@tensor')), X * 2)
    assert set(shapes) == {(2, 8)}  # global along 'tensor'


def test_inferred_specs_of_partial_sums():
    reduce = per_device(out='a c -> a@data c')(lambda y: jax.lax.psum(y, 'tensor'))

    @jax.jit
    def product(x, w):
        partial = P('data', None, unreduced={'tensor'})
        return reduce(jnp.einsum('ab,bc->ac', x, w, out_sharding=partial))

    with jax.set_mesh(MESH):
        x, w = einshard(X, 'a b -> a@data b@tensor'), einshard(X, 'b c -> b@tensor c')
        if JAX < (0, 9):  # psum does not take them
            with pytest.raises(ValueError, match='unreduced'):
                product(x, w)
        else:
            np.testing.assert_array_equal(product(x, w), X @ X)


@pytest.mark.parametrize('types', [(AUTO, AUTO), (EXPLICIT, AUTO)])
def test_auto_axes_need_specs(types):
    mesh = mesh_of(types=types, data=4, tensor=2)
    double = per_device(out='a b -> a@data b')(lambda x: x * 2)
    with jax.set_mesh(mesh), pytest.raises(EinshardError, match='has no spec'):
        double(X)


# nested per-device functions


def nested(body, spec, **options):
    """A function over 'data' that calls one over the axes that are left."""
    inner = per_device(spec, out='a b -> a b')(body)
    return per_device('a b -> a@data b', out='a b -> a@data b', axis_names='data', **options)(
        lambda x: inner(x) + 0
    )


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
@pytest.mark.parametrize('given', [False, True])
@pytest.mark.parametrize('spec', ['a b -> a b@tensor', 'a b -> a b2', 'a b -> a b*'])
@pytest.mark.parametrize(
    'transformed', [lambda f: f, jax.jit, lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))]
)
def test_nested_functions(types, given, spec, transformed):
    mesh = mesh_of(types=types, data=4, tensor=2)
    function = nested(
        lambda x: jax.lax.psum(x * x, 'tensor'), spec, **({'mesh': mesh} if given else {})
    )

    def plain(x):
        return (x * x).reshape(8, 2, 4).sum(1)

    with contextlib.nullcontext() if given else jax.set_mesh(mesh):
        y = transformed(function)(X)
    np.testing.assert_allclose(y, transformed(plain)(X), rtol=1e-6)


def test_nested_functions_on_the_canonical_mesh():
    inner = per_device('a b -> a b@b', out='a b -> a b')(lambda x: jax.lax.psum(x, 'b'))
    outer = per_device('a b -> a8 b2', out='a b -> a8 2 b', axis_names='a')(lambda x: inner(x))
    np.testing.assert_array_equal(outer(X), X.reshape(8, 2, 4).sum(1))


def test_collectives_over_axes_of_the_outer_function():
    inner = per_device('a b -> a b@tensor', out='a b -> a b')(
        lambda x: jax.lax.psum(x, ('data', 'tensor'))
    )
    outer = per_device('a b -> a@data b', out='a b -> a b', axis_names='data')(lambda x: inner(x))
    with jax.set_mesh(MESH):
        y = outer(X)
    np.testing.assert_array_equal(y, X.reshape(4, 2, 2, 4).sum((0, 2)))


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
def test_constraints_between_nested_functions(types):
    inner = per_device('a b -> a b@tensor', out='a b -> a b@tensor')(lambda x: x * 2)

    @per_device('a b -> a@data b', out='a b -> a@data b', axis_names='data')
    def outer(x):
        return inner(einshard(x + 1, 'a b -> a b@tensor'))

    with jax.set_mesh(mesh_of(types=types, data=4, tensor=2)):
        y = outer(X)
    np.testing.assert_array_equal(y, (X + 1) * 2)
