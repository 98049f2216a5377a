"""per_device against hand-written `jax.shard_map` and numpy, in every mode of JAX."""

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, counting
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on
from refusal import refusal
from test_hlo import assert_same_program, compiled, floats

from einshard import EinshardError, device_mesh, einshard, make_sharding, per_device, sharded

EIGHT = jax.devices()[:8]
RANDOM = np.random.default_rng(0)
KEYS = jax.random.split(jax.random.key(0), 8)
X = RANDOM.normal(size=(48, 48)).astype(np.float32)
W = RANDOM.normal(size=(48, 48)).astype(np.float32) / 7
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def product(x, w):
    return jax.lax.psum(x @ w, 'x')


LAYER = per_device('b x -> b4 x2', 'x y -> x2 y', out='b y -> b4 y', mesh=EIGHT)


def by_hand(function, mesh):
    """What LAYER makes of a function, written with jit and shard_map."""
    specs, out = (P('b', 'x'), P('x', None)), P('b', None)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
    return jax.jit(mapped, in_shardings=on(mesh, specs), out_shardings=on(mesh, out))


# ---------------------------------------------------------------- against shard_map, and numpy

# expressions of x, w and the result for counts b and x; all give the same placements
SPELLINGS = [
    ('b x -> b{b} x{x}', 'x y -> x{x} y', 'b y -> b{b} y'),
    ('b x -> b{b} x{x}', 'x y -> {b} x{x} y', 'b y -> b{b} {x} y'),
    ('b x -> b* x{x}', 'x y -> x{x} y', 'b y -> b* y'),
    ('b x -> b{b} x*', 'x* y', 'b* y'),
    ('b x -> b{b} x*', 'x y -> * x{x} y', 'b ... -> b* ...'),
    ('b{b} x{x}', 'x{x} ...', 'b{b} ...'),
]


@pytest.mark.parametrize(
    ('n', 'spelling'),
    [
        *((n, SPELLINGS[1 + n % 2]) for n in (1, 2, 3, 4, 6, 12, 16)),
        *((8, spelling) for spelling in SPELLINGS),
    ],
    ids=str,
)
def test_product_on_every_number_of_devices(n, spelling):
    devices = jax.devices()[:n]
    for b in {b for b in (1, 2, 4, n) if n % b == 0}:
        parts = {'b': b, 'x': n // b}
        *specs, out = (text.format(**parts) for text in spelling)
        f = per_device(*specs, out=out, mesh=devices)(product)
        y = f(X, W)
        close(y, X @ W)
        assert y.sharding == make_sharding(f'b y -> b{b} {n // b} y', mesh=devices)


def test_each_device_has_its_shard_and_its_axis_indices():
    """Against numpy slices."""
    seen = {}

    @per_device('b r x -> x2 r2 b2', out='i j -> i@(x,r,b) j', mesh=EIGHT)
    def show(x):
        seen.update(shape=x.shape, sizes={a: jax.lax.axis_size(a) for a in 'brx'})
        place = jnp.stack([jax.lax.axis_index(a) for a in 'xrb'])
        return jnp.concatenate([place, x.reshape(-1)])[None]

    x = np.arange(64).reshape(4, 2, 8)
    rows = np.asarray(show(x))
    assert seen == {'shape': (2, 1, 4), 'sizes': {'b': 2, 'r': 2, 'x': 2}}
    for number, row in enumerate(rows):
        i, j, k = np.unravel_index(number, (2, 2, 2))
        assert row[:3].tolist() == [i, j, k]
        expected = x[2 * k : 2 * k + 2, j : j + 1, 4 * i : 4 * i + 4]
        assert row[3:].tolist() == expected.reshape(-1).tolist()


def test_program_is_that_of_shard_map_by_hand():
    arguments = floats(16, 32), floats(32, 64)
    hand = by_hand(product, mesh_of(b=4, x=2))
    assert_same_program(compiled(LAYER(product), *arguments), compiled(hand, *arguments))


def test_program_of_a_gradient_is_that_of_shard_map_by_hand():
    def mlp(weights, x):
        x = jax.lax.all_gather(x, 'm', axis=1, tiled=True)
        hidden = jax.nn.relu(x @ weights[0])
        return jax.lax.psum_scatter(hidden @ weights[1], 'm', scatter_dimension=1, tiled=True)

    def loss(f):
        return jax.grad(lambda weights, x: (f(weights, x) ** 2).sum())

    mesh = mesh_of(b=4, m=2)
    specs = (P(None, 'm'), P('m')), P('b', 'm')
    hand = jax.jit(
        loss(jax.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=specs[1])),
        in_shardings=on(mesh, specs),
        out_shardings=on(mesh, specs[0]),
    )
    ours = per_device(('d f@m', 'f@m d'), 'b m -> b4 m2', out='b m -> b4 m2', mesh=EIGHT)(mlp)
    places = 'd f -> 4 d f2', 'f d -> 4 f2 d'
    step = sharded(places, 'b d -> b4 d2', out=places, mesh=EIGHT)(loss(ours))
    arguments = (floats(32, 64), floats(64, 32)), floats(16, 32)
    assert_same_program(compiled(step, *arguments), compiled(hand, *arguments))


def test_program_for_a_tpu_slice():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    from jax.experimental.topologies import get_topology_desc

    devices = get_topology_desc('v5e:4x4', 'tpu').devices
    ours = per_device('b x -> b* x4', 'x y -> x4 y', out='b y -> b* y', mesh=devices)(product)
    arguments = floats(64, 128), floats(128, 64)
    hand = by_hand(product, mesh_of(device_mesh(devices).devices, b=4, x=4))
    assert_same_program(compiled(ours, *arguments), compiled(hand, *arguments))


# --------------------------------------------------------------------------------- collectives

MATRIX = np.arange(64.0, dtype=np.float32).reshape(8, 8)
BLOCKS = MATRIX.reshape(4, 2, 8)  # by device along a

COLLECTIVES = {
    'psum': (lambda x: jax.lax.psum(x, 'a'), 'a b -> a b', BLOCKS.sum(0)),
    'pmean': (lambda x: jax.lax.pmean(x, 'a'), 'a b -> a b', BLOCKS.mean(0)),
    'pmax': (lambda x: jax.lax.pmax(x, 'a'), 'a b -> a b', BLOCKS.max(0)),
    'all_gather': (
        lambda x: jax.lax.all_gather(x, 'a', axis=1, tiled=True),
        'a b -> a4 b',
        np.concatenate([np.concatenate(BLOCKS, 1)] * 4),
    ),
    'psum_scatter': (
        lambda x: jax.lax.psum_scatter(x, 'a', scatter_dimension=1, tiled=True),
        'a b -> a b@a',
        BLOCKS.sum(0),
    ),
    'all_to_all': (
        lambda x: jax.lax.all_to_all(x, 'a', split_axis=1, concat_axis=0, tiled=True),
        'a b -> a b@a',
        MATRIX,
    ),
    'ppermute': (
        lambda x: jax.lax.ppermute(x, 'a', [(i, (i + 1) % 4) for i in range(4)]),
        'a b -> a4 b',
        np.roll(BLOCKS, 1, 0).reshape(8, 8),
    ),
    'axis_index': (
        lambda x: x + jax.lax.axis_index('a'),
        'a b -> a4 b',
        MATRIX + np.arange(8)[:, None] // 2,
    ),
    'axis_size': (lambda x: x * jax.lax.axis_size('a'), 'a b -> a4 b', MATRIX * 4),
}  # fmt: skip


@pytest.mark.parametrize('name', COLLECTIVES)
def test_collectives_by_axis_name(name):
    function, out, expected = COLLECTIVES[name]
    f = per_device('a b -> a4 b', out=out, mesh=EIGHT[:4])(function)
    np.testing.assert_array_equal(f(MATRIX), expected)
    # on eight devices, the other axis takes no part
    g = per_device('a b -> a4 2 b', out=out, mesh=EIGHT)(function)
    np.testing.assert_array_equal(g(MATRIX), expected)


# -------------------------------------------------------------------------- arguments and results


def test_sharded_arguments_are_not_copied_and_results_are_canonical():
    f = LAYER(product)
    x, w = einshard(X, 'b x -> b4 x2', mesh=EIGHT), einshard(W, 'x y -> 4 x2 y', mesh=EIGHT)
    with jax.transfer_guard('disallow'):
        y = f(x, w)
    assert y.sharding == make_sharding('b y -> b4 2 y', mesh=EIGHT)
    assert f.in_shardings(x, w) == {'x': x.sharding, 'w': w.sharding}
    text = f.lower(x, w).compile().as_text()
    assert [kind for kind in ('all-gather', 'all-to-all', 'permute') if kind in text] == []


def test_as_many_programs_as_by_hand_and_a_trace_for_each():
    mesh = mesh_of(b=4, x=2)
    hand, ours = counted(product), counted(product)
    for f, placed in (
        (by_hand(hand, mesh), jax.device_put(X, NamedSharding(mesh, P('b', 'x')))),
        (LAYER(ours), einshard(X, 'b x -> b4 x2', mesh=EIGHT)),
    ):
        with counting() as counts:
            for x in (X, placed, X, X[:24], placed):
                f(x, W)
        # from the host, placed, and of another shape
        assert counts.compiled.count('jit(product)') == 3
    assert ours.runs == 3


def affine(x, weights):
    a, b = weights['rest']
    y = product(x, weights['w']) * a + b
    return y, {'mean': jax.lax.pmean(y.mean(), 'b')}


WEIGHTS = {'w': 'x y -> x2 y', 'rest': '...'}
IN_ROWS = per_device('... x -> ... x4', out=('... x -> ... x@x', '... x -> ... x'), mesh=EIGHT[:4])
ADDED = MATRIX.reshape(8, 4, 2).sum(1)
CALLS = {
    'no arguments': (
        per_device(out='a -> a8', mesh=EIGHT), lambda: jax.lax.axis_index('a')[None], (),
        np.arange(8),
    ),
    'scalars': (
        per_device('a*', '...', out='...', mesh=EIGHT),
        lambda a, s: jax.lax.psum(a.sum(), 'a') + s, (np.arange(16.0), 2.0), 122,
    ),
    'keys': (
        per_device('k -> k8', out='k -> k8', mesh=EIGHT),
        lambda own: jax.random.uniform(own[0], (1,)), (KEYS,),
        np.array([jax.random.uniform(key) for key in KEYS]),
    ),
    'trees, prefixes and specs by name': (
        per_device('b4 x2', weights=WEIGHTS, out=('b4 y', {'mean': '...'}), mesh=EIGHT), affine,
        (X, {'w': W, 'rest': (2.0, np.ones(48))}),
        (2 * (X @ W) + 1, {'mean': np.mean(2 * (X @ W) + 1)}),
    ),
    'axes after an ellipsis': (
        IN_ROWS, lambda x: (jnp.stack([x, x]), jax.lax.psum(x, 'x')), (MATRIX,),
        (np.stack([MATRIX, MATRIX]), ADDED),
    ),
    'another rank': (
        IN_ROWS, lambda x: (jnp.stack([x, x]), jax.lax.psum(x, 'x')), (MATRIX[0],),
        (np.stack([MATRIX[0], MATRIX[0]]), ADDED[0]),
    ),
    'unchecked replication': (
        per_device('a b -> a8 b', out='b -> b', mesh=EIGHT, check_vma=False),
        lambda x: x[0] * 0, (MATRIX,), np.zeros(8),
    ),
    'axis_names= from an iterator': (
        per_device('i@p j', out='i@p j', mesh=mesh_of(p=4, q=2), axis_names=iter(['p'])),
        lambda x: x + x.shape[0], (MATRIX,), MATRIX + 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', CALLS)
def test_calls(name):
    decorate, function, args, expected = CALLS[name]
    jax.tree.map(close, decorate(function)(*args), expected)


def test_static_and_donated_arguments_and_methods():
    @per_device('a -> a8', out='a -> a8', mesh=EIGHT, static_argnames='power', donate_argnames='x')
    def f(x, *, power=2):
        return x**power

    x = einshard(np.arange(8.0), 'a -> a8', mesh=EIGHT)
    np.testing.assert_array_equal(f(x, power=3), np.arange(8.0) ** 3)
    assert x.is_deleted()

    @per_device('a*', powers='a*', out='a*', mesh=EIGHT, static_argnums=1)
    def g(x, *powers):
        return x ** powers[0]

    close(g(np.arange(8.0), 3), np.arange(8.0) ** 3)

    class Model:
        @per_device('b x -> b8 x', out='b y -> b8 y', mesh=EIGHT, static_argnums=0)
        def __call__(self, x):
            return x @ W

    close(Model()(X), X @ W)


def test_decoration_asks_for_no_devices(monkeypatch):
    with monkeypatch.context() as patch:
        for name in ('devices', 'local_devices', 'device_count'):
            patch.delattr(jax, name)
        f = per_device('b x -> b4 x2 2', 'x y -> x2 y', out='b y -> b4 y')(product)
    close(f(X, W), X @ W)


def test_other_numbers_of_devices_after_each_other():
    f = per_device('b x -> b* x2', 'x2 y', out='b* y')(product)
    for n in (2, 8, 4, 8):
        with jax.set_mesh(mesh_of(devices=jax.devices()[:n], b=n // 2, x=2)):
            y = f(X, W)
        close(y, X @ W)
        assert len(y.sharding.device_set) == n
    assert len(f(X, W).sharding.device_set) == 16


# --------------------------------------------------------------------------------- transformations


@pytest.mark.parametrize(
    'wrap', [lambda f: f, jax.jit, jax.checkpoint], ids=['eager', 'jit', 'remat']
)
def test_gradient(wrap):
    f = wrap(LAYER(product))
    gradient = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))(X, W)
    expected = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), argnums=(0, 1))(X, W)
    jax.tree.map(functools.partial(close, rtol=1e-4, atol=1e-3), gradient, expected)


def test_vmap():
    xs = np.stack([X, 2 * X, -X])
    close(jax.vmap(LAYER(product), in_axes=(0, None))(xs, W), xs @ W)


@pytest.mark.parametrize('ambient', [False, True])
@pytest.mark.parametrize('transform', [jax.jit, lambda f: f], ids=['jit', 'eager'])
def test_vmap_keeps_an_axis_that_is_not_manual(transform, ambient):
    """As `jax.shard_map` with `axis_names` does; with in_shardings, jit would gather the axis."""
    mesh = mesh_of(p=2, q=4)

    def body(x, w):
        return jax.lax.psum(x @ w, 'q')

    hand = jax.shard_map(
        body, mesh=mesh, in_specs=(P('q'), P('q')), out_specs=P(), axis_names={'q'}
    )
    specs = 'x -> x@q', 'x y -> x@q y'
    decorate = per_device(*specs, out='y -> y', axis_names='q', mesh=None if ambient else mesh)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        xs = einshard(X, 'b x -> b@p x@q', mesh=mesh)
        w = einshard(W, 'x y -> x@q y', mesh=mesh)
        ours, theirs = (transform(jax.vmap(f, (0, None))) for f in (decorate(body), hand))
        close(ours(xs, w), X @ W)
        assert ours(xs, w).sharding.is_equivalent_to(theirs(xs, w).sharding, 2)
        assert ours(xs, w).sharding.spec == P('p')
        if transform is jax.jit:
            assert 'all-gather' not in ours.lower(xs, w).compile().as_text()
        else:  # an axis that the function sees is sharded differently
            wrong = einshard(X, 'b x -> b x@p', mesh=mesh)
            assert 'is already sharded differently' in refusal(ours, wrong, w).sentence


def test_scan():
    f = LAYER(product)

    @jax.jit
    def tower(x, layers):
        return jax.lax.scan(lambda x, w: (f(x, w), None), x, layers)[0]

    close(tower(X, np.stack([W, W])), X @ W @ W)


def test_inside_sharded_the_mesh_is_that_of_sharded():
    f = per_device('b x -> b* x2', 'x2 y', out='b* y')(product)

    @sharded('b x -> b4 x2', out='b y -> b4 2 y', mesh=EIGHT)
    def layer(x):
        return einshard(f(x, W), 'b y -> b4 y2')

    y = layer(X)
    close(y, X @ W)
    assert y.sharding == make_sharding('b y -> b4 2 y', mesh=EIGHT)


def test_ahead_of_time():
    f = LAYER(product)
    arguments = floats(48, 48), floats(48, 48)
    close(f.lower(*arguments).compile()(X, W), X @ W)
    abstract = device_mesh(AbstractMesh((8,), ('any',), axis_types=(AxisType.Auto,)))
    g = per_device('b x -> b4 x2', 'x2 y', out='b4 y', mesh=abstract)(product)
    assert g.eval_shape(*arguments).sharding.spec == P(('d0', 'd1'))
    text = g.trace(*arguments).lower(lowering_platforms=('cpu',)).as_text()
    assert text.count('all_reduce') >= 1


# ------------------------------------------------------------------------------ meshes of the user


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('context', [False, True])
@pytest.mark.parametrize(
    'specs',
    [
        ('b x -> b@data x@tp', 'x y -> x@tp y', 'b y -> b@data y'),
        ('b x -> b4 x2', 'x y -> x2 y', 'b y -> b4 y'),
        ('b x -> b* x@tp', 'x y -> x@tp y', 'b y -> b@data y'),
        ('b x -> b* x2', 'x y -> * x2 y', 'b y -> b@data y'),
    ],
    ids=str,
)
def test_collectives_use_the_axes_of_the_mesh(specs, context, types):
    mesh = mesh_of(types=types, data=4, tp=2)
    decorate = per_device(*specs[:2], out=specs[2], mesh=None if context else mesh)
    # explicit axes need their mesh in context
    inside = context or types == AxisType.Explicit
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        y = decorate(lambda x, w: jax.lax.psum(x @ w, 'tp'))(X, W)
    close(y, X @ W)
    assert y.sharding == NamedSharding(mesh, P('data'))


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
def test_canonical_mesh_in_context(types):
    f = per_device('b4 x2', 'x2 y', out='b4 y')(lambda x, w: jax.lax.psum(x @ w, 'd2'))
    with jax.set_mesh(device_mesh(EIGHT, axis_types=types)):
        y = f(X, W)
        assert y.sharding == make_sharding('b y -> b4 2 y')
    close(y, X @ W)


def test_partly_manual():
    shapes = []

    @per_device('b x -> b4 x2', 'x y -> x2 y', out='b y -> b4 y', mesh=EIGHT, axis_names=('x',))
    def f(x, w):
        shapes.append((x.shape, w.shape))
        return einshard(jax.lax.psum(x @ w, 'x'), 'b y -> b* y')

    y = f(X, W)
    close(y, X @ W)
    assert set(shapes) == {((48, 24), (24, 48))}
    assert y.sharding == make_sharding('b y -> b4 2 y', mesh=EIGHT)


# ------------------------------------------------------------------------------------------- errors


def test_einshard_in_the_body():
    with pytest.raises(EinshardError, match='each device already has its own array'):
        LAYER(lambda x, w: einshard(x, 'b x -> b* x'))(X, W)


@pytest.mark.parametrize(
    'error', [KeyError('x'), ValueError('x'), AssertionError(), NameError('x')]
)
def test_errors_of_the_body_are_unchanged(error):
    def body(x, w):
        raise error

    with pytest.raises(type(error)) as caught:
        LAYER(body)(X, W)
    assert caught.value is error


def test_sizes_that_do_not_match():
    expected = "axis 'x' has size 24 in parameter 'x' and 6 in 'w'"
    with pytest.raises(EinshardError, match=expected) as caught:
        LAYER(product)(X, W[:12])
    assert isinstance(caught.value.__cause__, TypeError)  # shows the line of the body


def test_sizes_that_do_not_match_in_a_nested_function():
    mesh = device_mesh(EIGHT, data=2, tp=4)
    specs = 'b x -> b x@tp', 'x y -> x@tp y'
    inner = per_device(*specs, out='b y', axis_names='tp')(lambda x, w: jax.lax.psum(x @ w, 'tp'))
    outer = per_device('b@data x', 'x y', out='b@data y', mesh=mesh, axis_names='data')(inner)
    with pytest.raises(EinshardError, match="axis 'x' has size 12 in parameter 'x' and 3 in 'w'"):
        outer(X, W[:12])


def test_sizes_that_no_spec_explains():
    with pytest.raises(TypeError, match='got'):
        LAYER(lambda x, w: x @ jnp.ones(5))(X, W)


def test_too_many_arguments():
    with pytest.raises(TypeError, match='takes 2 positional arguments but 3 were given'):
        LAYER(product)(X, W, W)


def test_errors_come_before_transfers():
    with jax.transfer_guard('disallow'), pytest.raises(EinshardError, match='is not divisible by'):
        LAYER(product)(X[:6], W)


def gathered(x):
    return jax.lax.all_gather(x, 'a', tiled=True) + jnp.ones(8)


def around(x):
    return jax.lax.ppermute(x, 'a', RING)


SUM_OR_SHARD = "sum over 'a' with jax.lax.psum(result, 'a'), or shard the result over 'a' in out="
RING = [(i, (i + 1) % 4) for i in range(4)]
LOOP = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: gathered(y)[:2], x))


@pytest.mark.parametrize(
    ('function', 'x'),
    [
        (lambda x: x * 2, MATRIX),
        (lambda x: x.sum(), MATRIX),
        (lambda x: x @ gathered(x), MATRIX),
        # a ring: every device has the sum, which JAX does not see
        (lambda x: x + around(x), MATRIX),
        (LOOP, MATRIX),
        (lambda x: (gathered(x), x), MATRIX),
        (lambda k: k, KEYS[:4]),
    ],
)
def test_results_that_vary(function, x):
    error = refusal(per_device('a ... -> a4 ...', out='...', mesh=EIGHT[:4])(function), x)
    assert 'declares the result of <lambda> replicated' in error.sentence
    assert error.facts['if they differ'] == SUM_OR_SHARD


def test_one_of_two_fields_with_a_common_prefix():
    class Results(NamedTuple):
        w: Any
        w_sum: Any

    out = Results('...', '...')
    f = per_device('a b -> a4 b', out=out, mesh=EIGHT[:4])(lambda x: Results(x.sum(), gathered(x)))
    assert refusal(f, MATRIX).sentence.startswith("out= declares result 'w' of <lambda> replicated")


@pytest.mark.parametrize('key', ['a-b', 'a.b', 'my key', "it's", 'a "b"', 'x]y', '', 'a is b'])
def test_keys_of_results_that_vary(key):
    f = per_device('a*', out={'z': [{key: '...'}]}, mesh=EIGHT[:4])(lambda x: {'z': [{key: x}]})
    error = refusal(f, MATRIX[0])
    assert error.sentence.startswith(f"out= declares result 'z/0/{key}' of <lambda> replicated")


# ------------------------------------------------------------------------ axes of size 1

SMALL = np.arange(16, dtype=np.float32).reshape(2, 8)
MEANS = SMALL + SMALL.mean(1, keepdims=True)
BODIES = {
    'nothing': (lambda x: x + 1, SMALL + 1),
    'psum': (lambda x: jax.lax.psum(x, 'i'), SMALL),
    'pmean over both': (lambda x: x + jax.lax.pmean(x, ('i', 'j')), MEANS),
    'all_gather': (lambda x: jax.lax.all_gather(x, 'i', axis=0, tiled=True), SMALL),
    'psum_scatter': (lambda x: jax.lax.psum_scatter(x, 'i', tiled=True), SMALL),
    'ppermute': (lambda x: jax.lax.ppermute(x, 'i', [(0, 0)]), SMALL),
    'axis_index': (lambda x: x + jax.lax.axis_index('i'), SMALL),
}
ONE_BY_EIGHT = [mesh_of(types=types, i=1, j=8) for types in (AxisType.Auto, AxisType.Explicit)]


SPECS = [
    *itertools.product(['i1 j8', 'i* j8'], ['i j8', 'i1 j8', '... j -> ... j8'], [EIGHT]),
    *itertools.product(['i@i j@j'], ['i@i j@j', 'i j@j'], ONE_BY_EIGHT),
]
# all specs for psum, a third of them for each other body
CASES = [
    (name, *specs)
    for i, name in enumerate(BODIES)
    for j, specs in enumerate(SPECS)
    if name == 'psum' or (i + j) % 3 == 0
]


@pytest.mark.parametrize(('name', 'spec', 'out', 'mesh'), CASES)
def test_results_need_not_name_an_axis_of_size_1(name, spec, out, mesh):
    function, expected = BODIES[name]
    x = SMALL if mesh is EIGHT else jax.device_put(SMALL, NamedSharding(mesh, P('i', 'j')))
    y = per_device(spec, out=out, mesh=mesh)(function)(x)
    close(y, expected)
    assert y.sharding == make_sharding(out, ndim=2, mesh=mesh)


def test_pytree_results_with_an_axis_of_size_1():
    @per_device('i1 j8', out={'t': 'j i -> j8 i', 'sum': '... -> * ...'}, mesh=EIGHT)
    def f(x):
        return {'t': x.T, 'sum': jax.lax.psum(x, 'j')}

    found = f(SMALL)
    np.testing.assert_array_equal(found['t'], SMALL.T)
    np.testing.assert_array_equal(found['sum'], SMALL.sum(1, keepdims=True))
    assert found['t'].sharding == make_sharding('j8 i', mesh=EIGHT)
    assert 'all-gather' not in f.lower(SMALL).compile().as_text()
    with pytest.raises(EinshardError, match="replicated over 'j'"):
        per_device('i1 j8', out='i j -> * i j', mesh=EIGHT)(lambda x: x)(SMALL)


@pytest.mark.parametrize('spec', ['i* j', 'i j*', 'i8 j', 'i* j@p', '... j -> ... j*'])
@pytest.mark.parametrize('sizes', [(4, 2), (8, 1), (1, 8), (2, 4, 1), (1, 1)], ids=str)
def test_a_body_for_meshes_of_every_shape(sizes, spec):
    mesh = mesh_of(**dict(zip('pqr', sizes, strict=False)))
    spec = spec.replace('8', str(mesh.size))

    def body(x):
        y = jax.lax.all_gather(x, 'p', axis=1, tiled=True) if '@p' in spec else x
        return y, jax.lax.psum((x.sum(), (x * x).sum()), mesh.axis_names)

    out = spec.replace('@p', ''), '...'
    f = per_device(spec, out=out, mesh=mesh)(body)
    _, (total, squares) = f(MATRIX)
    close((total, squares), (MATRIX.sum(), (MATRIX * MATRIX).sum()))
    assert total.sharding.is_fully_replicated
    close(jax.grad(lambda x: f(x)[1][1])(MATRIX), 2 * MATRIX)


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('spec', ['i* j', 'i8 j', 'i@(p,q) j', 'i@p j'])
def test_scalar_results_need_not_be_reduced_over_an_axis_of_size_1(spec, types):
    mesh = mesh_of(p=8, q=1, types=types)
    x = einshard(MATRIX, spec, mesh=mesh)
    f = per_device(spec, out='...', mesh=mesh)(lambda x: jax.lax.psum(x.sum(), 'p'))
    close(f(x), MATRIX.sum())
    assert f(x).sharding.is_fully_replicated
    assert refusal(per_device(spec, out='...', mesh=mesh)(jnp.sum), x).sentence.startswith(
        "out= declares the result of sum replicated over 'p'"
    )


def test_array_with_explicit_mesh_axes():
    x = jax.device_put(SMALL.T, NamedSharding(mesh_of(types=AxisType.Explicit, d=8), P('d')))
    y = per_device('i* j', out='i* j', mesh=x.sharding.mesh)(jnp.sin)(x)
    np.testing.assert_allclose(y, np.sin(SMALL.T), rtol=1e-6)


def test_without_jit():
    # the arguments are not tracers then
    @per_device('i* j', '...', out='i* j', mesh=EIGHT, static_argnames='power')
    def f(x, scale, power=1):
        return scale * x**power - jax.lax.psum(x, 'i')

    x = SMALL.T
    with jax.disable_jit():
        found = f(x, 2.0), f(x, scale=np.float32(2), power=2)
        gradient = jax.grad(lambda x: f(x, 2.0).sum())(x)
    for power, y in enumerate(found, 1):
        np.testing.assert_allclose(y, 2 * x**power - x.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.full(x.shape, 2 - 8))
