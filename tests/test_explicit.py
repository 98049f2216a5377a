"""Explicit mesh axes, the default of `jax.make_mesh`."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from placed import check_equal, is_of_sharding_types, mesh_of

from einshard import EinshardError, Rules, einshard, einsum, make_sharding, per_device, sharded

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
MESH = mesh_of(types=EXPLICIT, data=4, tensor=2)
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_default_of_make_mesh():
    mesh = jax.make_mesh((4, 2), ('data', 'tensor'), devices=jax.devices()[:8])
    assert set(mesh.axis_types) == {EXPLICIT}


IDS = np.array([3, 1, 7])


def scan(body, x, layers):
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, layers)[0]


def total(x, start):
    return scan(lambda total, row: total + row, start, x)


# the table of docs/meshes.md: what fails, and what to write instead
OPERATIONS = {
    'product': (lambda x, y: x @ y, lambda x, y: einsum('a b, b c -> a@data c', x, y)),
    'product, by out_sharding': (
        lambda x, y: x @ y,
        lambda x, y: jnp.matmul(x, y, out_sharding=make_sharding('a@data c')),
    ),
    'look-up': (
        lambda x, y: x[IDS],
        lambda x, y: x.at[IDS].get(out_sharding=make_sharding('a b@tensor')),
    ),
    'update': (
        lambda x, y: x.at[IDS].set(1.0),
        lambda x, y: x.at[IDS].set(1.0, out_sharding=make_sharding('a@data b@tensor')),
    ),
    'reshape': (
        lambda x, y: x.reshape(2, 32),
        lambda x, y: x.reshape(2, 32, out_sharding=make_sharding('a b@tensor')),
    ),
    'addition': (lambda x, y: x + y, lambda x, y: x + einshard(y, 'a@data b@tensor')),
    'where': (
        lambda x, y: jnp.where(x > 3, x, jnp.ones(x.shape)),
        lambda x, y: jnp.where(x > 3, x, einshard(jnp.ones(x.shape), 'a@data b@tensor')),
    ),
    'slice': (lambda x, y: x[:3], lambda x, y: einshard(x, 'a b@tensor')[:3]),
    'scan over a sharded axis': (
        lambda x, y: total(x, jnp.zeros(8)),
        lambda x, y: total(einshard(x, 'a b@tensor'), einshard(jnp.zeros(8), 'b@tensor')),
    ),
    'carry of a scan': (
        lambda x, y: scan(lambda x, w: x @ w, x, jnp.ones((2, 8, 8))),
        lambda x, y: scan(lambda x, w: einshard(x @ w, 'a@data b@tensor'), x, jnp.ones((2, 8, 8))),
    ),
}


@pytest.mark.parametrize('operation', OPERATIONS)
def test_operations_that_need_a_sharding(operation):
    specs = sharded('a b -> a@data b@tensor', 'a b -> a@tensor b@data')
    fails, works = OPERATIONS[operation]
    with jax.set_mesh(MESH):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            specs(fails)(X, X.T)
        result = specs(works)(X, X.T)
    if 'scan' in operation:
        assert type(caught.value) is (TypeError if 'carry' in operation else ValueError)
    else:
        assert is_of_sharding_types(caught.value)
    np.testing.assert_allclose(result, fails(jnp.asarray(X), jnp.asarray(X.T)), rtol=1e-6)


# functions of JAX that take out_sharding=, with the sharding of an expression
TAKES_OUT_SHARDING = {
    'matmul': lambda x, out: jnp.matmul(x, x, out_sharding=out),
    'dot': lambda x, out: jnp.dot(x, x, out_sharding=out),
    'einsum': lambda x, out: jnp.einsum('ab,bc->ac', x, x, out_sharding=out),
    'dot_general': lambda x, out: jax.lax.dot_general(
        x, x, (((1,), (0,)), ((), ())), out_sharding=out
    ),
    'tensordot': lambda x, out: jnp.tensordot(x, x, 1, out_sharding=out),
    'reshape': lambda x, out: x.reshape(8, 8, out_sharding=out),
    'get': lambda x, out: x.at[np.arange(8)].get(out_sharding=out),
    'set': lambda x, out: einshard(x, 'a@data b').at[:2].set(1.0, out_sharding=out),
    'zeros': lambda x, out: jnp.zeros((8, 8), out_sharding=out),
    'array': lambda x, out: jnp.array(X, out_sharding=out),
    'iota': lambda x, out: jax.lax.broadcasted_iota(int, (8, 8), 0, out_sharding=out),
    'normal': lambda x, out: jax.random.normal(jax.random.key(0), (8, 8), out_sharding=out),
    'reshard': lambda x, out: jax.sharding.reshard(x, out),
    'auto_axes': lambda x, out: jax.sharding.auto_axes(lambda x: x @ x, out_sharding=out)(x),
}


@pytest.mark.parametrize('name', TAKES_OUT_SHARDING)
@pytest.mark.parametrize('jitted', [False, True])
def test_make_sharding_is_an_out_sharding(name, jitted):
    def call(x):
        return TAKES_OUT_SHARDING[name](x, make_sharding('a@data b'))

    with jax.set_mesh(MESH):
        x = einshard(X, 'a b -> a@data b@tensor')
        y = (jax.jit(call) if jitted else call)(x)
        assert jax.typeof(y).sharding.spec == P('data', None)
        expected = TAKES_OUT_SHARDING[name](x, P('data', None))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
def test_einsum_works_on_both_kinds_of_axes_and_out_sharding_on_explicit_ones(types):
    def by_option(x):
        return jnp.matmul(x, x.T, out_sharding=make_sharding('a@data c'))

    @sharded('a b -> a@data b@tensor')
    def by_einsum(x):
        return einsum('a b, c b -> a@data c', x, einshard(x, 'c b -> c b@tensor'))

    with jax.set_mesh(mesh_of(types=types, data=4, tensor=2)):
        np.testing.assert_array_equal(by_einsum(X), X @ X.T)
        if types == AUTO:
            with pytest.raises(ValueError, match='Auto'):
                jax.jit(by_option)(X)


# models


RULES = Rules(
    [
        ('embed', 'v d -> v@tensor d'),
        ('up/kernel', 'd f -> d f@tensor'),
        ('down/kernel', 'f d -> f@tensor d'),
    ],
    default='... -> * ...',
)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16), dtype=np.int32)


def nnx_loss(explicit):
    """The loss of a model of NNX and its state, with out_sharding= in its layers or not."""
    nnx = pytest.importorskip('flax.nnx')
    if explicit and 'out_sharding' not in inspect.signature(nnx.Embed.__call__).parameters:
        pytest.skip('this version of Flax has no out_sharding=')

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(64, 32, rngs=rngs)
            self.up = nnx.Linear(32, 128, rngs=rngs)
            self.down = nnx.Linear(128, 32, rngs=rngs)

        def __call__(self, tokens, **to_layers):
            x = self.embed(tokens, **to_layers)
            return self.embed.attend(x + self.down(jax.nn.gelu(self.up(x)), **to_layers))

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def loss(state, tokens):
        given = {'out_sharding': make_sharding('b@data s d')} if explicit else {}
        return jax.nn.logsumexp(nnx.merge(graph, state)(tokens, **given)).mean()

    return loss, state


def linen_loss(explicit):
    nn = pytest.importorskip('flax.linen')

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(64, 32, name='embed')
            rows = make_sharding('b@data s d') if explicit else None
            x = embed.embedding.at[tokens].get(out_sharding=rows)
            product = functools.partial(jax.lax.dot_general, out_sharding=rows)
            hidden = jax.nn.gelu(nn.Dense(128, name='up')(x))
            x += nn.Dense(32, name='down', dot_general=product)(hidden)
            return jax.nn.logsumexp(embed.attend(x)).mean()

    return Model().apply, None if explicit else Model().init(jax.random.key(0), TOKENS)


@pytest.mark.parametrize('make', [nnx_loss, linen_loss])
def test_layers_of_flax_take_out_sharding(make):
    (loss, _), (auto_loss, state) = make(explicit=True), make(explicit=False)
    expected, gradients = jax.jit(jax.value_and_grad(auto_loss))(state, TOKENS)
    step = sharded(RULES, 'b s -> b@data s', out=(None, RULES))(jax.value_and_grad(loss))
    with jax.set_mesh(MESH):
        found, sharded_gradients = step(state, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    check_equal(sharded_gradients, gradients, rtol=1e-4, atol=1e-6)


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
@pytest.mark.parametrize('transformed', [lambda f: f, jax.jit])
@pytest.mark.parametrize('context', [False, True])
def test_specs_are_inferred_as_by_shard_map(spec, expression, transformed, context):
    x = jax.device_put(X, jax.NamedSharding(MESH, spec))
    shapes = set()

    def double(x):
        shapes.add(x.shape)
        return x * 2

    expected = jax.shard_map(double, mesh=MESH, out_specs=spec)(x)
    ours = transformed(per_device(out=expression, mesh=None if context else MESH)(double))
    with jax.set_mesh(MESH) if context else contextlib.nullcontext():
        y = ours(x)
    assert y.sharding.is_equivalent_to(expected.sharding, 2)
    assert shapes == {x.addressable_shards[0].data.shape}
    np.testing.assert_array_equal(y, X * 2)


def test_inferred_and_given_specs_mix():
    @per_device(None, 'x y -> x@tensor y', out='b y -> b@data y')
    def product(x, w):
        return jax.lax.psum(x['x'] @ w, 'tensor')

    @per_device(out='a b -> a@data b', axis_names='data')
    def double(x):
        assert x.shape == (2, 8)  # global along 'tensor'
        return x * 2

    with jax.set_mesh(MESH):
        x = einshard(X, 'b x -> b@data x@tensor')
        np.testing.assert_array_equal(product({'x': x}, X), X @ X)
        np.testing.assert_array_equal(double(x), X * 2)


def test_inferred_specs_of_partial_sums():
    reduce = per_device(out='a c -> a@data c')(lambda y: jax.lax.psum(y, 'tensor'))

    @jax.jit
    def product(x, w):
        partial = P('data', None, unreduced={'tensor'})
        return reduce(jnp.einsum('ab,bc->ac', x, w, out_sharding=partial))

    with jax.set_mesh(MESH):
        x, w = einshard(X, 'a b -> a@data b@tensor'), einshard(X, 'b c -> b@tensor c')
        np.testing.assert_array_equal(product(x, w), X @ X)


@pytest.mark.parametrize('types', [(AUTO, AUTO), (EXPLICIT, AUTO)])
def test_auto_axes_need_specs(types):
    mesh = mesh_of(types=types, data=4, tensor=2)
    double = per_device(out='a b -> a@data b')(lambda x: x * 2)
    with jax.set_mesh(mesh), pytest.raises(EinshardError, match='has no spec'):
        double(X)


# nested per-device functions


def psum(axes):
    return lambda x: jax.lax.psum(x, axes)


def nested(inner, between=lambda x: x, out='a b -> a@data b', **options):
    """A function over 'data' that calls one over the axes that are left."""
    options = {'axis_names': 'data', **options}
    return per_device('a b -> a@data b', out=out, **options)(lambda x: inner(between(x)) + 0)


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
@pytest.mark.parametrize('given', [False, True])
@pytest.mark.parametrize('spec', ['a b -> a b@tensor', 'a b -> a b2', 'a b -> a b*'])
@pytest.mark.parametrize(
    'transformed', [lambda f: f, lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))]
)
def test_nested_functions(types, given, spec, transformed):
    mesh = mesh_of(types=types, data=4, tensor=2)
    inner = per_device(spec, out='a b -> a b')(lambda x: jax.lax.psum(x * x, 'tensor'))
    function = nested(inner, **({'mesh': mesh} if given else {}))

    def plain(x):
        return (x * x).reshape(8, 2, 4).sum(1)

    with contextlib.nullcontext() if given else jax.set_mesh(mesh):
        y = transformed(function)(X)
    np.testing.assert_allclose(y, transformed(plain)(X), rtol=1e-6)


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
def test_collectives_and_constraints_of_nested_functions(types):
    over_both = per_device('a b@tensor', out='a b -> a b')(psum(('data', 'tensor')))
    double = per_device('a b@tensor', out='a b@tensor')(lambda x: x * 2)
    constrained = nested(double, between=lambda x: einshard(x + 1, 'a b -> a b@tensor'))
    with jax.set_mesh(mesh_of(types=types, data=4, tensor=2)):
        total = nested(over_both, out='a b -> a b')(X)
        np.testing.assert_array_equal(total, X.reshape(4, 2, 2, 4).sum((0, 2)))
        np.testing.assert_array_equal(constrained(X), (X + 1) * 2)


def test_nested_functions_on_the_canonical_mesh():
    inner = per_device('a b -> a b@b', out='a b -> a b')(psum('b'))
    outer = per_device('a b -> a8 b2', out='a b -> a8 2 b', axis_names='a')(lambda x: inner(x))
    np.testing.assert_array_equal(outer(X), X.reshape(8, 2, 4).sum(1))


@pytest.mark.parametrize('types', [('Auto', 'Explicit'), ('Explicit', 'Auto')])
def test_checkpoint_outside_jit_keeps_both_kinds_of_axes(types):
    mesh = jax.make_mesh((2, 4), ('data', 'tp'), axis_types=tuple(AxisType[t] for t in types))
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    with jax.set_mesh(mesh):
        y = jax.checkpoint(lambda x: einshard(x * 2, 'a b -> a@data b@tp'))(x)
    assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, P('data', 'tp')), 2)
    np.testing.assert_array_equal(y, x * 2)
