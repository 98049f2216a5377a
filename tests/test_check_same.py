"""check_same: mistakes that it finds, correct functions, and its errors and results."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import counted
from hlo.read import rounding_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

import einshard
from einshard import (
    DifferentResults,
    EinshardError,
    Rules,
    axis_rules,
    check_same,
    einsum,
    for_optimizer,
    per_device,
    sharded,
)

EIGHT = jax.devices()[:8]
NAMED = mesh_of(data=2, tp=4)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 64)).astype(np.float32)
W = RANDOM.normal(size=(64, 32)).astype(np.float32)


def product(x, w):
    return x @ w


def constrained(x, w):
    h = einshard.einshard(x @ w, 'b y -> b4 y2')
    return einshard.einshard(jax.nn.relu(h), 'b y -> 2 b4 y')


def twice_sharded(x, w):
    return einshard.einshard(x @ w, 'b y -> b2 y2 b2')


inner = sharded('b* x', 'x y -> * x y', mesh=EIGHT)(product)
psum = per_device('b x*', 'x* y', out='b y -> * b y', mesh=EIGHT)(
    lambda x, w: jax.lax.psum(x @ w, 'x')
)

CORRECT = {
    'product': sharded('b4 x2', 'x y -> 4 x2 y', mesh=EIGHT)(product),
    'constraints': sharded('b8 x', '8 x y', mesh=EIGHT)(constrained),
    'an axis sharded twice': sharded('b8 x', '8 x y', mesh=EIGHT)(twice_sharded),
    'named axes': sharded('b@data x', 'x y@tp', out='b@data y@tp', mesh=NAMED)(product),
    'mixed': sharded('b@data x4', '2 x4 y', mesh=NAMED)(product),
    'einsum': sharded(mesh=EIGHT)(lambda x, w: einsum('b4 x2, 4 x2 y -> b4 y2', x, w)),
    'nested': sharded('b* x', 'x y -> * x y', mesh=EIGHT)(lambda x, w: inner(x, w) * 2),
    'per device': psum,
    'per device, nested': jax.jit(lambda x, w: psum(x, w).sum()),
    'not jitted': lambda x, w: einshard.einshard(x @ w, 'b y -> b4 y2', mesh=EIGHT),
    'PartitionSpecs': sharded(P('data'), P(None, 'tp'), mesh=NAMED)(product),
    'NamedShardings': sharded(NamedSharding(NAMED, P('data')), None)(product),
}


@pytest.mark.parametrize('case', CORRECT)
def test_correct_functions(case):
    comparison = check_same(CORRECT[case], X, W)
    assert comparison.same
    assert comparison.n_devices == 8
    assert [row.path for row in comparison.rows][1:] == ['gradient of x', 'gradient of w']
    assert all(row.tolerance < 1e-4 for row in comparison.rows)


def unsummed(x, w):
    """x @ w, but each device multiplies the gradient of w by its number."""
    still_x, still_w = jax.lax.stop_gradient((x, w))
    return x @ still_w + still_x @ (w - still_w) * jax.lax.axis_index('b')


# functions with a mistake that one device does not have, and the arrays that show it
WRONG = {
    'a sum over devices is missing': (
        per_device('b x*', 'x* y', out='b y -> * b y', check_vma=False, mesh=EIGHT)(product),
        {'result', 'gradient of x', 'gradient of w'},
    ),
    'a sum over too many devices': (
        per_device('b* x', 'x y -> * x y', out='b* y', mesh=EIGHT)(
            lambda x, w: jax.lax.psum(x @ w, 'b')
        ),
        {'result', 'gradient of x', 'gradient of w'},
    ),
    'a mean of each device': (
        per_device('b* x', 'x y -> * x y', out='b*', check_vma=False, mesh=EIGHT)(
            lambda x, w: (x @ w - (x @ w).mean(0)).sum(1)
        ),
        {'result', 'gradient of x', 'gradient of w'},
    ),
    'a gradient that the devices do not sum': (
        per_device('b* x', 'x y -> * x y', out='b* y', mesh=EIGHT)(unsummed),
        {'gradient of w'},
    ),
}


@pytest.mark.parametrize('case', WRONG)
def test_wrong_functions(case):
    f, paths = WRONG[case]
    with pytest.raises(DifferentResults, match='has different results on 8 devices') as caught:
        check_same(f, X, W)
    assert caught.value.facts.keys() == paths


def test_replicas_that_differ():
    f = per_device('b* x', out='x -> * x', check_vma=False, mesh=EIGHT)(lambda x: x[0])
    with pytest.raises(DifferentResults) as caught:
        check_same(f, X, gradients=False)
    # the first device has the same as one device
    assert caught.value.facts['result'].endswith('; its replicas differ')
    np.testing.assert_array_equal(f(X).addressable_data(0), X[0])


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_in_context(types):
    mesh = mesh_of(types=types, data=2, tp=4)
    specs = {'in_specs': (P('data', 'tp'), P('tp')), 'out_specs': P('data')}

    def local(x, w):
        return jax.shard_map(lambda x, w: jax.lax.psum(x @ w, 'tp'), **specs)(x, w)

    def partial(x, w):
        return jax.shard_map(product, **specs, check_vma=False)(x, w)

    with jax.set_mesh(mesh):
        x, w = einshard.einshard(X, 'b x -> b@data x@tp'), einshard.einshard(W, 'x y -> x@tp y')
        before = jax.sharding.get_mesh()
        assert check_same(jax.jit(local), x, w).same
        with pytest.raises(DifferentResults, match='3 of 3 arrays differ'):
            check_same(jax.jit(partial), x, w)
        f = jax.jit(lambda x, w: einsum('b@data x@tp, x@tp y -> b@data y', x, w))
        assert check_same(f, x, w).same
        assert jax.sharding.get_mesh() == before


def test_an_explicit_mesh_of_the_function():
    """NumPy arrays get the mesh of the other arrays, as JAX requires of Explicit axes."""
    mesh = einshard.device_mesh(EIGHT, axis_types=AxisType.Explicit, data=8)
    f = sharded('b@data x', 'x y', mesh=mesh)(product)
    assert check_same(f, X, jnp.asarray(W)).same
    assert check_same(f, jnp.asarray(X), W, reference=lambda x, w: x @ w, gradients=False).same


def test_partial_sums():
    mesh = einshard.device_mesh(EIGHT, axis_types=AxisType.Explicit, data=2, tp=4)
    terms = sharded('b@data x@tp', 'x@tp y', out='b y +@tp', mesh=mesh)(
        lambda x, w: einsum('b x, x y -> b y +@tp', x, w)
    )
    assert check_same(terms, X, W).same
    assert check_same(terms, X, W, reference=product).same

    def accumulated(w, total, xs):
        def add(total, x):
            return total + jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), None

        return jax.lax.scan(add, total, xs)[0]

    gradient = sharded('... =@data', '... +@data', 'n b@data x', out='... +@data', mesh=mesh)
    w, zeros = (
        einshard.einshard(x, s, mesh=mesh) for x, s in ((W, '... =@data'), (0 * W, '... +@data'))
    )
    assert check_same(gradient(accumulated), w, zeros, X[None], gradients=False).same
    signed = sharded('... =@data', mesh=mesh)
    assert check_same(signed(jnp.transpose), W).same  # the result has '=' too
    with pytest.raises(EinshardError, match='cannot be differentiated'):
        check_same(signed(lambda w: 2 * w), W)  # JAX makes a mistake here


def test_axis_rules():
    f = sharded(mesh=NAMED)(lambda x, w: einshard.einshard(x @ w, 'b y'))
    with axis_rules(b='@data', y='4'):
        assert check_same(f, X, W).same


# --- a train step: a scan over layers, remat, Adam or SGD, in bfloat16 or float32 ----------------

N, D, F, B, S = 3, 32, 64, 8, 16
PARAMS = {
    'in': (RANDOM.normal(size=(N, D, F)) / 6).astype(np.float32),
    'out': (RANDOM.normal(size=(N, F, D)) / 8).astype(np.float32),
    'scale': np.ones((N, D), np.float32),
}
BATCH = RANDOM.normal(size=(B, S, D)).astype(np.float32)
SPEC = Rules([('in', 'n d f -> n d f@tp'), ('out', 'n f d -> n f@tp d')], default='...')


def make_step(tx, dtype, factor=1.0, constrain=True):
    def constraint(h, spec):
        return einshard.einshard(h, spec) if constrain else h

    def layer(h, p):
        p = jax.tree.map(lambda a: a.astype(dtype), p)
        z = constraint(jax.nn.gelu((h * p['scale']) @ p['in']), 'b s f -> b@data s f@tp')
        return constraint(h + z @ p['out'], 'b s d -> b@data s d'), None

    def loss(params, batch):
        h, _ = jax.lax.scan(jax.checkpoint(layer), batch.astype(dtype), params)
        return (h.astype(jnp.float32) ** 2).mean()

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.tree.map(lambda g: g * factor, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@pytest.mark.parametrize(
    ('tx', 'dtype', 'doubled'),
    [
        (optax.adam(1e-3), jnp.float32, 'result/1/0/mu/out'),
        (optax.sgd(1e-3), jnp.bfloat16, 'result/0/out'),
    ],
    ids=['adam', 'sgd'],
)
def test_a_train_step(tx, dtype, doubled):
    state = tx.init(PARAMS)
    specs = SPEC, for_optimizer(PARAMS, SPEC), 'b s d -> b@data s d'
    step = sharded(*specs, mesh=NAMED, donate_argnums=(0, 1))(make_step(tx, dtype))
    arguments = PARAMS, state, BATCH
    comparison = check_same(step, *arguments, gradients=False)
    paths = [row.path for row in comparison.rows]
    assert paths[:3] == ['result/0/in', 'result/0/out', 'result/0/scale']
    plain = make_step(tx, dtype, constrain=False)
    assert check_same(step, *arguments, gradients=False, reference=plain).same
    # the update of SGD is so small that rounding the weights to bfloat16 would hide it
    wrong = make_step(tx, dtype, factor=2.0, constrain=False)
    with pytest.raises(DifferentResults) as caught:
        check_same(step, *arguments, gradients=False, reference=wrong)
    assert doubled in caught.value.facts
    assert 'result/2' not in caught.value.facts


def test_arguments_stay_usable():
    x = einshard.einshard(X, 'b x -> b* x', mesh=EIGHT)
    f = sharded('b* x', mesh=EIGHT, donate_argnums=0)(lambda x: x + 1)
    check_same(f, x)
    g = jax.jit(lambda x: x + 1, donate_argnums=0)
    check_same(g, x)
    np.testing.assert_array_equal(x, X)
    check_same(f, einshard.einshard(X, 'b x -> 8 b x', mesh=EIGHT))  # placed as for a call


def test_in_threads(in_threads):
    wrong, _ = WRONG['a sum over devices is missing']

    def run(i):
        try:
            return check_same((psum, wrong, psum)[i], X, W, gradients=False).same
        except DifferentResults:
            return False

    assert in_threads(3, run) == [True, False, True]


def test_the_function_is_as_before():
    body = counted(lambda x, w: einshard.einshard(x @ w, 'b y -> b8 y'))
    f = sharded('b* x', 'x y -> * x y', mesh=EIGHT)(body)
    f(X, W)
    check_same(f, X, W, gradients=False)
    n = body.runs
    f(X, W)
    assert body.runs == n
    with pytest.raises(EinshardError, match='8'):  # counts hold outside of check_same
        sharded('b* x', 'x y -> * x y', mesh=EIGHT[:1])(f.__wrapped__)(X, W)


def test_integers_and_keys():
    f = sharded('b* x', None, mesh=EIGHT)(lambda x, key: (x * 2, key, jax.random.bits(key, (4,))))
    comparison = check_same(f, X.astype(np.int32), jax.random.key(0))
    assert [row.array for row in comparison.rows] == ['int32[16,64]', 'key<fry>[]', 'uint32[4]']
    assert [row.tolerance for row in comparison.rows] == [0.0] * 3
    assert comparison.notes == ('there are no gradients: no argument is a floating-point array',)
    wrong = per_device('b* x', out='b* x', mesh=EIGHT)(
        lambda x: x + (jax.lax.axis_index('b') == 3).astype(x.dtype)
    )
    with pytest.raises(
        DifferentResults, match=r'differs in 1\.2e-01 of the elements; tolerance: 0'
    ):
        check_same(wrong, X.astype(np.int32))


@pytest.mark.parametrize(
    'dtype', ['int4', 'uint4', 'float4_e2m1fn', 'float8_e4m3fn', 'float8_e5m2']
)
def test_narrow_dtypes(dtype):
    x = RANDOM.integers(2, size=(16, 64)).astype(getattr(jnp, dtype))
    comparison = check_same(sharded('b* x', mesh=EIGHT)(jnp.copy), x)
    assert comparison.rows[0].array == f'{dtype}[16,64]'
    assert [row.difference for row in comparison.rows] == [0.0] * len(comparison.rows)
    widened = sharded('b* x', mesh=EIGHT)(lambda x: x.astype(np.float32))
    assert check_same(widened, x).same
    wrong = per_device('b* x', out='b* x', mesh=EIGHT)(
        lambda x: 0 * x.astype(np.float32) + jax.lax.axis_index('b')
    )
    with pytest.raises(DifferentResults):
        check_same(wrong, x, gradients=False)


def test_differences_are_relative():
    def off(x, scale):  # on device 3, the result differs by 0.5
        wrong = 0.5 * (jax.lax.axis_index('b') == 3)
        return (x * scale).sum(1) + wrong, x + scale + wrong

    wrong = per_device('b* x', '* ...', out=('b*', 'b* x'), mesh=EIGHT)(off)
    x = np.full((16, 4), 8.0, np.float32)
    with pytest.raises(DifferentResults) as caught:
        check_same(wrong, x, np.float32(1), gradients=False)
    facts = caught.value.facts
    assert f'differs by {0.5 / 32:.1e} relative to the largest element; ' in facts['result/0']
    # result/1 is like x, so it counts as x after an update
    assert f'differs by {0.5 / 1:.1e} relative to the largest change; ' in facts['result/1']


def test_not_a_number():
    f = sharded('b* x', mesh=EIGHT)(jnp.log)
    assert check_same(f, X, gradients=False).rows[0].difference < 1e-6  # NaN on both sides
    wrong = per_device('b* x', out='b* x', mesh=EIGHT)(
        lambda x: jnp.where(jax.lax.axis_index('b') == 3, jnp.nan, x)
    )
    with pytest.raises(DifferentResults, match='differs by inf'):
        check_same(wrong, X, gradients=False)


def test_arrays_that_are_noise():
    @sharded('b* x', mesh=EIGHT)
    def f(x):
        return x.sum(), (x.mean() - x.mean(0).mean()) * 1e6

    comparison = check_same(f, X, gradients=False)
    assert [row.is_noise for row in comparison.rows] == [False, True]
    not_compared = 'not compared, because of large rounding errors: result/1'
    assert str(comparison).endswith(not_compared)
    wrong = dataclasses.replace(comparison.rows[1], difference=np.inf)
    comparison = dataclasses.replace(comparison, rows=(comparison.rows[0], wrong))
    assert not comparison.same
    assert not_compared not in str(comparison)


def test_names_of_arguments():
    @sharded(mesh=EIGHT)
    def f(p, *rest, scale):
        return p['w'] @ rest[0] * scale['s']

    comparison = check_same(f, {'w': X}, W, scale={'s': np.float32(2)})
    paths = [row.path for row in comparison.rows]
    assert paths[1:] == ['gradient of p/w', 'gradient of args[1]', 'gradient of scale/s']


def test_results_as_data_text_and_html():
    comparison = check_same(CORRECT['product'], X, W)
    data = json.loads(json.dumps(comparison.to_dict()))
    assert (data['same'], data['n_devices'], data['notes']) == (True, 8, [])
    assert data['rows'][0]['array'] == 'float32[16,32]'
    assert data['rows'][0]['because'] == 'float32, longest sum: 64 terms'
    assert str(comparison).startswith('product on 8 devices: same results as on one device\n')
    assert 'gradient of w' in comparison._repr_html_()


@pytest.mark.parametrize('n', [8, 512, 2**15])
def test_tolerances_of_sums(n):
    # sums in another order pass; a sum that lacks one of its terms does not
    rounding = rounding_of(lambda x: x.sum(1), np.ones((64, n), np.float32))
    assert (rounding.dtype, rounding.terms) == ('float32', n)
    x = RANDOM.normal(size=(64, n)).astype(np.float32)
    forward, backward = np.cumsum(x, 1)[:, -1], np.cumsum(x[:, ::-1], 1)[:, -1]
    scale = np.abs(forward).max()
    assert np.abs(forward - backward).max() / scale < rounding.tolerance
    assert np.abs(forward - (forward - x[:, 0])).max() / scale > rounding.tolerance


def loop(x):
    return jax.lax.scan(lambda c, _: (c @ x[:8, :8], None), x[:, :8], None, length=5)[0]


@pytest.mark.parametrize(
    ('f', 'dtype', 'terms'),
    [
        (lambda x: x * 2, 'float32', 1),
        (lambda x: x @ x.T, 'float32', 64),
        (loop, 'float32', 40),
        (lambda x: x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16), 'bfloat16', 9),
        (lambda x: jnp.zeros((4, 64)).at[jnp.arange(16) % 4].add(x), 'float32', 16),
        (jax.jit(jax.checkpoint(lambda x: jnp.cumsum(x, 1))), 'float32', 64),
    ],
)
def test_the_longest_sum(f, dtype, terms):
    rounding = rounding_of(f, X)
    assert (rounding.dtype, rounding.terms) == (dtype, terms)


def test_products_on_accelerators():
    for precision, dtype in ((None, 'bfloat16'), ('highest', 'float32')):
        matmul = functools.partial(jnp.matmul, precision=precision)
        rounding = rounding_of(matmul, X, W, platform='tpu')
        assert rounding.dtype == dtype


def test_a_function_that_does_not_fit():
    def large(x):
        y = jnp.broadcast_to(x[:, :, None, None], (16, 64, 2**15, 2**15))
        return jax.lax.sort(y, dimension=2)[:, :, 0, 0].sum()

    @sharded('b* x', mesh=EIGHT)
    def total(x):
        return x.sum()

    with pytest.raises(EinshardError, match='total does not fit in the memory') as caught:
        check_same(total, X, reference=large)
    assert list(caught.value.facts) == ['needs', 'device has', 'instead']


def test_a_reference_without_devices():
    on_mesh = NamedSharding(NAMED, P('data', 'tp'))
    f = jax.jit(lambda x, w: jax.lax.with_sharding_constraint(x @ w, on_mesh))
    x = jax.device_put(X, NamedSharding(NAMED, P('data')))
    with pytest.raises(EinshardError, match='does not run on one device'):
        check_same(f, x, W)
    assert check_same(f, x, W, reference=product).same
    jitted = jax.jit(product, in_shardings=(on_mesh, None))
    assert check_same(jitted, X, W).same
