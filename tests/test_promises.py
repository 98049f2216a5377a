"""collectives= of sharded, and assert_collectives: which programs are checked, and messages."""

import dataclasses
import inspect
import pathlib
import re
from contextlib import nullcontext
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, counting
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from placed import struct
from refusal import refusal

from einshard import (
    EinshardError,
    Sharded,
    UnexpectedCollectives,
    assert_collectives,
    device_mesh,
    einshard,
    explain,
    sharded,
)

EIGHT = jax.devices()[:8]
X, W = np.ones((8, 64), np.float32), np.ones((64, 16), np.float32)
NARROW, WIDE = np.ones((8, 8), np.float32), np.ones((8, 16), np.float32)
W_REPLICATED, W_SHARDED = (einshard(W, spec, mesh=EIGHT) for spec in ('* y z', 'y* z'))
HERE = pathlib.Path(__file__).name


def limited(*specs, collectives=(), mesh=EIGHT, **options):
    return sharded(*specs, mesh=mesh, collectives=collectives, **options)


def product(x, w):
    return x @ w


# specs of x, w and the product, and the collectives that every compiler needs
BY_THEORY = {
    'free axes': (('x* y', '* y z', 'x* z'), {}),
    'nothing sharded': (('* x y', '* y z', '* x z'), {}),
    'the contracted axis': (('x y*', 'y* z', '* x z'), {'all-reduce': 1}),
    'both on one axis': (('x* y', 'y z*', 'x* z'), {'all-gather': 1}),
}


@pytest.mark.parametrize('case', BY_THEORY)
def test_limits_of_products(case):
    (x, w, out), needed = BY_THEORY[case]
    unlimited = limited(x, w, out=out, collectives=None)(product)
    kinds = [*needed]
    kept = [
        needed,
        kinds,
        {*kinds},
        (*kinds,),
        dict.fromkeys(kinds, np.int64(3)),
        ['all-to-all', *kinds],
    ]
    for promise in [*kept, *kinds]:
        f = limited(x, w, out=out, collectives=promise)(product)
        np.testing.assert_array_equal(f(X, W), X @ W)
        assert_collectives(unlimited, X, W, allowed=promise)
    broken = [(), {}, [], 'all-to-all', {'all-to-all': 5}, dict.fromkeys(kinds, 0)] * bool(kinds)
    for promise in broken:
        f = limited(x, w, out=out, collectives=promise)(product)
        for error in (
            refusal(f, X, W),
            refusal(assert_collectives, unlimited, X, W, allowed=promise),
        ):
            assert type(error) is UnexpectedCollectives
            assert error.sentence.endswith(f': 1 {kinds[0]}')


@pytest.mark.parametrize('out', ['x z*', '... z -> ... z*'])
def test_a_limit_adds_no_compilation(out):
    body = counted(product)
    f = limited('* x y', 'y z*', out=out)(body)
    with counting() as counts:
        for _ in range(3):
            f(X, W)
            f(w=W, x=X)
    # which sharding '...' means in a result is found without the promise, by a trace of its own
    assert body.runs == (2 if '...' in out else 1)
    assert counts.compiled.count('jit(product)') == 1
    with mock.patch.object(jax.stages.Traced, 'lower') as lower:
        f(X, W)
    lower.assert_not_called()  # a check lowers the trace


# --------------------------------------------------------------------- every program that is called


def gathers_if_wide(x):
    return einshard(x, 'a b -> * a b') if x.shape[1] > 8 else x + 1


def of_leaves(x, w):
    return x @ w['u'] + x @ w['v']


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: jax.Array

    @limited('x* y', out='x* z')
    def product(self, x):
        return x @ self.w


Rows = Sharded[Float[Array, 'a b'], 'a* b']
Columns = Sharded[Float[Array, 'a b'], 'a b*']


@sharded(collectives=())
def annotated(x: Rows) -> Columns:
    return x


LEAVES = [[(X, {'u': W_REPLICATED, 'v': w})] for w in (W_REPLICATED, W_SHARDED)]
# a function without collectives, arguments that keep to it, and some that do not: JAX compiles
# again for other shardings of arguments without a spec, without tracing
PROGRAMS = {
    'other shapes': (limited('a* b')(gathers_if_wide), [(NARROW,)], [(WIDE,)]),
    'an argument without a spec': (
        limited('x* y', None)(product),
        [(X, W), (X, jnp.asarray(W)), (X, W_REPLICATED)],
        [(X, W_SHARDED)],
    ),
    'a leaf without a spec': (limited('x* y', {'u': '* y z', 'v': None})(of_leaves), *LEAVES),
    'a leaf without a spec, by a function': (
        limited('x* y', lambda path, leaf: '* y z' if path == 'u' else None)(of_leaves),
        *LEAVES,
    ),
    'a method': (Layer.product, [(Layer(W), X)], [(Layer(W_SHARDED), X)]),
    'annotations': (annotated, [], [(np.ones((16, 16), np.float32),)]),
}


@pytest.mark.parametrize('case', PROGRAMS)
def test_every_program_is_checked(case):
    f, kept, broken = PROGRAMS[case]
    *_, last = inspect.signature(f).parameters
    calls = [f, lambda *args: f(*args[:-1], **{last: args[-1]})]
    for call in calls * 2:
        for args in kept:
            np.testing.assert_array_equal(call(*args), f.__wrapped__(*args))
        for args in broken:
            with pytest.raises(UnexpectedCollectives, match=': 1 all-'):
                call(*args)


def test_a_retrace_for_another_jax_config_is_checked():
    allowed = [True]
    f = limited('a* b')(lambda x: x + 1 if allowed[0] else einshard(x, 'a b -> * a b'))
    f(X)
    allowed[0] = False
    f(X)  # not traced again
    with jax.default_matmul_precision('float32'), pytest.raises(UnexpectedCollectives):
        f(X)


@pytest.mark.filterwarnings('ignore:Some donated buffers were not usable')
def test_a_program_over_its_limit_never_runs():
    f = limited('a* b', out='* a b', donate_argnums=0)(lambda x: x + 1)
    x = einshard(X, 'a* b', mesh=EIGHT)
    for _ in range(3):
        with pytest.raises(UnexpectedCollectives):
            f(x)
        assert not x.is_deleted()
    f.clear_cache()
    with pytest.raises(UnexpectedCollectives):
        f(x)


def test_each_placement_is_compiled_once():
    body = counted(product)
    f = limited('x* y', None, collectives='all-gather')(body)
    with counting() as counts:
        for w in (W_REPLICATED, W_SHARDED, W, W_REPLICATED, W, W_SHARDED):
            np.testing.assert_array_equal(f(X, w), X @ W)
    assert counts.compiled.count('jit(product)') == body.runs == 3


def test_a_loop_counts_once():
    def tower(x, layers):
        def layer(h, w):
            return einshard(einshard(h, 'b d*') @ w, '* b d'), None

        return jax.lax.scan(layer, x, layers)[0]

    def ours(promise):
        specs = 'b d -> * b d', 'l d e -> l d* e'
        return limited(*specs, out='b d -> * b d', collectives=promise)(tower)

    x, layers = np.ones((2, 16), np.float32), np.ones((5, 16, 16), np.float32)
    ours({'all-reduce': 1, 'all-gather': 1})(x, layers)  # the last result is gathered
    row = r'f32\[2,16\] \(128 B\), 8 devices along d, 5 executions'
    with pytest.raises(UnexpectedCollectives, match=row):
        ours(())(x, layers)


# ----------------------------------------------------------------------------- in other functions


TRACED = {
    'jit': lambda f: jax.jit(f)(X),
    'grad': lambda f: jax.grad(lambda x: f(x).sum())(X),
    'vmap': lambda f: jax.vmap(f)(X[None]),
    'scan': lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, X[None]),
    'sharded': lambda f: sharded('a* b', mesh=EIGHT)(lambda x: f(x))(X),
    'lower': lambda f: f.lower(X),
    'compile': lambda f: f.lower(X).compile()(X),
    'trace': lambda f: f.trace(X),
    'eval_shape': lambda f: f.eval_shape(X),
    'out_shardings': lambda f: f.out_shardings(X),
    'jit of grad': lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
}


@pytest.mark.parametrize(
    ('how', 'out'),
    [
        *zip(TRACED, ['* a b', '... b -> * ... b'] * 6, strict=False),
        *[(how, 'a* b') for how in ('jit', 'scan', 'compile', 'eval_shape')],
    ],
)
def test_only_calls_are_checked(how, out):
    """A cached trace does not count as checked."""
    f = limited('a* b', out=out)(lambda x: x * 2)
    warns = pytest.warns(match='not checked') if how in ('grad', 'vmap') else nullcontext()
    for context in (warns, nullcontext()):
        with context:
            TRACED[how](f)
        if out == 'a* b':
            np.testing.assert_array_equal(f(X), 2 * X)
        else:
            with pytest.raises(UnexpectedCollectives):
                f(X)


def test_the_outer_limit_counts():
    inner = limited('a* b', out='* a b')(lambda x: x * 2)
    outer = limited('a* b', out='* a b', collectives={'all-gather': 1})(lambda x: inner(x) + 1)
    np.testing.assert_array_equal(outer(X), 2 * X + 1)


# -------------------------------------------------------------------------------- ways of using it


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('promise', ['all-to-all', ()])
def test_meshes_in_context(kind, promise):
    f = sharded('a* b', out='... b -> ... b*', collectives=promise)(
        lambda x: einshard(x + 1, 'a b*')
    )
    for devices in (EIGHT, EIGHT[:4], EIGHT):
        with jax.set_mesh(device_mesh(devices, axis_types=kind)):
            for _ in range(2):
                if promise:
                    np.testing.assert_array_equal(f(X), X + 1)
                else:
                    with pytest.raises(UnexpectedCollectives):
                        f(X)


def test_arguments_are_placed_and_refused_as_without_a_limit():
    f = limited('a* b')(lambda x: x + 1)
    for x in (jax.device_put(X, EIGHT[3]), einshard(X, '* a b', mesh=EIGHT), jnp.asarray(X)):
        np.testing.assert_array_equal(f(x), X + 1)
    for x, text in (
        (einshard(X, 'a b*', mesh=EIGHT), 'already sharded differently'),
        (X[:6], '(size 6) is not divisible'),
    ):
        error = refusal(f, x)
        assert type(error) is EinshardError
        assert text in error.sentence


def test_an_error_of_the_function_has_no_context():
    def body(x):
        raise KeyError('no')

    f = limited('a* b')(body)
    for _ in range(2):
        with pytest.raises(KeyError, match='no') as caught:
            f(X)
        assert caught.value.__context__ is None


# ------------------------------------------------------------------------------- assert_collectives


def test_functions_of_every_kind_are_asserted():
    traced = []

    def body(x):
        traced.append(isinstance(x, jax.core.Tracer))
        return x.sum()

    shape = struct(8, 64)
    placed = einshard(shape, 'a* b', mesh=EIGHT)
    rows = limited('a* b', collectives=None)(body)
    promised = limited('a* b', collectives='all-reduce')(body)  # its own limit is not checked here
    for fn, x in ((body, placed), (jax.jit(body), placed), (rows, shape), (promised, shape)):
        assert_collectives(fn, x, allowed={'all-reduce': 1})
        assert_collectives(fn, x=x, allowed='all-reduce')
        with pytest.raises(UnexpectedCollectives, match='body has unexpected collectives'):
            assert_collectives(fn, x, allowed=())
    for fn in (body, jax.jit(body)):
        assert_collectives(fn, X, allowed=())
    assert_collectives(Layer(W).product, X, allowed=())
    assert all(traced)


def test_a_program_for_a_mesh_that_is_given():
    f = sharded('x y*', 'y* z')(product)
    assert_collectives(f, X, W, allowed={'all-reduce': 1}, mesh=EIGHT)
    assert_collectives(f, X, W, allowed=(), mesh=EIGHT[:1])
    with pytest.raises(UnexpectedCollectives, match=r'\(16 B\), 4 devices along y'):
        assert_collectives(f, X[:1, :4], W[:4, :4], allowed=(), mesh=EIGHT[:4])
    with pytest.raises(EinshardError, match='the arguments do not match the parameters of product'):
        assert_collectives(f, X, allowed=())


# ------------------------------------------------------------------------------------ the messages


def test_the_message_lists_every_unexpected_collective():
    @limited('b d -> b* d', 'd e -> d* e', 'e f -> e* f', collectives={'all-reduce': 1})
    def layer(x, u, v):
        return (x @ u @ v).sum()

    u, v = np.ones((64, 16), np.float32), np.ones((16, 64), np.float32)
    # newer versions of JAX have no line for a gather
    found = re.sub(rf', {HERE}:\d+', '', str(refusal(layer, X, u, v)))
    assert found == (
        'layer has unexpected collectives: 2 all-gathers\n'
        '  allowed:      at most 1 all-reduce\n'
        '  all-gather 1: f32[64,16] (4.0 KiB), 8 devices along b|d|e\n'
        '  all-gather 2: f32[16,64] (4.0 KiB), 8 devices along b|d|e'
    )


def test_the_message_has_the_source_line():
    @limited('x y*', 'y* z')
    def layer(x, w):
        return x @ w

    line = layer.__wrapped__.__code__.co_firstlineno + 2
    assert str(refusal(layer, X, W)) == (
        'layer has unexpected collectives: 1 all-reduce\n'
        '  allowed:    no collectives\n'
        f'  all-reduce: f32[8,16] (512 B), 8 devices along y, {HERE}:{line}'
    )


MESH = jax.make_mesh((2, 4), ('data', 'tp'), (AxisType.Auto,) * 2, devices=EIGHT)


@pytest.mark.parametrize(
    ('specs', 'options', 'axes'),
    [
        (('x y@tp', 'y@tp z'), {'mesh': MESH, 'out': 'x@data z'}, 'tp'),
        (('x y@(data,tp)', 'y z'), {'mesh': MESH}, 'data,tp'),
        (('2 x y4', '2 y4 z'), {'out': '8 x z'}, 'y'),
        (('x2 y4', 'y z -> 8 y z'), {'out': 'x2 z4'}, 'y|z'),  # z only in the result
    ],
)
def test_the_message_has_the_axes_of_explain(specs, options, axes):
    f = limited(*specs, **options)(product)
    assert {row.along for row in explain(f, X, W).collectives} == {axes}
    assert f' devices along {axes}, {HERE}' in str(refusal(f, X, W))


def test_the_message_has_the_axes_of_a_program_with_a_ref():
    def body(x, total):
        total[...] = x.sum(1)

    total = jax.new_ref(einshard(np.zeros(8, np.float32), '* x', mesh=EIGHT))
    assert ', 8 devices along y' in str(refusal(limited('x y*', None)(body), X, total))


def test_groups_of_one_device_do_not_count():
    mesh = jax.make_mesh((1, 8), ('a', 'b'), (AxisType.Auto,) * 2, devices=EIGHT)
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, 'a'), mesh=mesh, in_specs=P('a', 'b'), out_specs=P(None, 'b')
    )
    # XLA leaves it in the program
    assert 'all-reduce(' in jax.jit(mapped).lower(X).compile().as_text()
    assert limited(mesh=mesh)(mapped)(X).shape == X.shape


def test_identical_collectives_share_a_line():
    @limited('4 x y2', '4 y2 z', out='8 x z', collectives='all-gather')
    def twice(x, w):
        return jnp.sin(einshard(x @ w, '8 x z')) @ jnp.cos(einshard(x @ (2 * w), '8 x z')).T

    sentence, allowed, *rows = str(refusal(twice, X, W)).splitlines()
    assert sentence.startswith('twice has unexpected collectives: ')
    assert allowed.split(maxsplit=1) == ['allowed:', 'any number of all-gathers']
    assert '4 groups of 2 devices' in rows[0]


@pytest.mark.parametrize('promise', [5, 'all_reduce', ('all-gather', 'psum')])
def test_invalid_kinds(promise):
    ours = refusal(limited(collectives=promise), product)
    theirs = refusal(assert_collectives, product, X, W, allowed=promise)
    assert theirs.sentence == ours.sentence.replace('collectives=', 'allowed=')
    assert {**theirs.facts, 'function': 'product'} == ours.facts


@pytest.mark.parametrize('most', [-1, 1.0, True, None, 'one'])
def test_invalid_limits(most):
    error = refusal(limited(collectives={'all-reduce': most}), product)
    expected = f"the limit for 'all-reduce' must be a non-negative integer, not {most!r}"
    assert expected in error.sentence
