"""collectives= of sharded, and assert_collectives: which programs are checked, and messages."""

import dataclasses
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from test_sharded_dispatch import frames, twice

from einshard import (
    EinshardError,
    Sharded,
    UnexpectedCollectives,
    assert_collectives,
    device_mesh,
    einshard,
    sharded,
)

EIGHT = jax.devices()[:8]
X, W = np.ones((8, 64), np.float32), np.ones((64, 16), np.float32)
HERE = pathlib.Path(__file__).name


Rows = Sharded[Float[Array, 'a b'], 'a* b']
Columns = Sharded[Float[Array, 'a b'], 'a b*']


def product(x, w):
    return x @ w


# specs of x, w and the product, and what every compiler has to do for it
BY_THEORY = {
    'free axes': (('x* y', '* y z', 'x* z'), {}),
    'nothing cut': (('* x y', '* y z', '* x z'), {}),
    'the reduced axis': (('x y*', 'y* z', '* x z'), {'all-reduce': 1}),
    'both on one axis': (('x* y', 'y z*', 'x* z'), {'all-gather': 1}),
}


def test_a_program_for_a_mesh_that_is_given():
    f = sharded('x y*', 'y* z')(product)
    assert_collectives(f, X, W, allowed={'all-reduce': 1}, mesh=EIGHT)
    assert_collectives(f, X, W, allowed=(), mesh=EIGHT[:1])
    with pytest.raises(UnexpectedCollectives, match=r'\(16 B\), 4 devices'):
        assert_collectives(f, X[:1, :4], W[:4, :4], allowed=(), mesh=EIGHT[:4])
    with pytest.raises(EinshardError, match='the arguments do not match the parameters of product'):
        assert_collectives(f, X, allowed=())


@pytest.mark.parametrize('case', BY_THEORY)
def test_limits_of_products(case):
    (x, w, out), has = BY_THEORY[case]

    def ours(promise):
        return sharded(x, w, out=out, mesh=EIGHT, collectives=promise)(product)

    kept = [has, list(has), set(has), tuple(has), dict.fromkeys(has, 3), ['all-to-all', *has]]
    kept += [kind for kind in has if len(has) == 1]
    for promise in kept:
        np.testing.assert_array_equal(ours(promise)(X, W), X @ W)
        assert_collectives(ours(None), X, W, allowed=promise)
    broken = [(), {}, [], 'all-to-all', {'all-to-all': 5}, dict.fromkeys(has, 0)] if has else []
    for promise in broken:
        for call in (
            lambda p: ours(p)(X, W),
            lambda p: assert_collectives(ours(None), X, W, allowed=p),
        ):
            with pytest.raises(UnexpectedCollectives, match=f': 1 {next(iter(has))}\n'):
                call(promise)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize('out', ['x z*', '... z -> ... z*'])
def test_a_limit_adds_no_trace_and_no_compilation(out):
    runs = []

    def body(x, w):
        runs.append(1)
        return x @ w

    f = sharded('* x y', 'y z*', out=out, mesh=EIGHT, collectives=())(body)
    with counting() as counts:
        for _ in range(3):
            f(X, W)
            f(w=W, x=X)
    # which sharding '...' means in a result is found without the promise, by a trace of its own
    assert len(runs) == (2 if '...' in out else 1)
    assert counts.compiled.count('jit(body)') == 1


def test_a_limit_adds_frames_to_calls():
    def scale(x, y=1.0):
        return x * y

    for promise, more in ((None, 0), ((), 2), ('all-reduce', 2)):
        f = sharded('a* b', '-> *', out='a* b', mesh=EIGHT, collectives=promise)(scale)
        assert frames(twice(lambda f=f: f(X, 2.0))) == 1 + more
        assert frames(twice(lambda f=f: f(y=2.0, x=X))) == 1 + more
        assert frames(twice(lambda f=f: f(W, 2.0))) == 1 + more
        assert frames(lambda f=f: f(X, 2.0)) == 1 + more


# --------------------------------------------------------------------- every program that is called


def gathers_if_wide(x):
    return einshard(x, 'a b -> * a b') if x.shape[1] > 8 else x + 1


def test_other_shapes_are_checked():
    f = sharded('a* b', mesh=EIGHT, collectives=())(gathers_if_wide)
    narrow, wide = np.ones((8, 8), np.float32), np.ones((8, 16), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(f(narrow), narrow + 1)
        for call in (lambda: f(wide), lambda: f(x=wide)):
            with pytest.raises(UnexpectedCollectives):
                call()


def test_a_retrace_for_another_jax_config_is_checked():
    allowed = [True]

    def body(x):
        return x + 1 if allowed[0] else einshard(x, 'a b -> * a b')

    f = sharded('a* b', mesh=EIGHT, collectives=())(body)
    f(X)
    allowed[0] = False
    f(X)  # not traced again
    with jax.default_matmul_precision('float32'), pytest.raises(UnexpectedCollectives):
        f(X)


@pytest.mark.filterwarnings('ignore:Some donated buffers were not usable')
def test_a_program_over_its_limit_never_runs():
    f = sharded('a* b', out='* a b', mesh=EIGHT, collectives=(), donate_argnums=0)(lambda x: x + 1)
    x = einshard(X, 'a* b', mesh=EIGHT)
    for _ in range(3):
        with pytest.raises(UnexpectedCollectives):
            f(x)
        assert not x.is_deleted()
    f.clear_cache()
    with pytest.raises(UnexpectedCollectives):
        f(x)


def test_other_shardings_of_arguments_without_a_spec_are_checked():
    """JAX compiles again for them without tracing."""
    f = sharded('x* y', None, mesh=EIGHT, collectives=())(product)
    whole, cut = einshard(W, '* y z', mesh=EIGHT), einshard(W, 'y* z', mesh=EIGHT)
    for _ in range(2):
        for w in (W, jnp.asarray(W), whole):
            np.testing.assert_array_equal(f(X, w), X @ W)
        for call in (lambda: f(X, cut), lambda: f(w=cut, x=X)):
            with pytest.raises(UnexpectedCollectives, match='1 all-gather'):
                call()


@pytest.mark.parametrize(
    'spec',
    [
        {'u': '* y z', 'v': None},
        lambda path, leaf: '* y z' if path == 'u' else None,
    ],
)
def test_other_shardings_of_leaves_without_a_spec_are_checked(spec):
    f = sharded('x* y', spec, mesh=EIGHT, collectives=())(lambda x, w: x @ w['u'] + x @ w['v'])
    whole, cut = einshard(W, '* y z', mesh=EIGHT), einshard(W, 'y* z', mesh=EIGHT)
    for _ in range(2):
        np.testing.assert_array_equal(f(X, {'u': whole, 'v': whole}), 2 * X @ W)
        with pytest.raises(UnexpectedCollectives):
            f(X, {'u': whole, 'v': cut})


def test_each_placement_is_compiled_once():
    runs = []

    def body(x, w):
        runs.append(1)
        return x @ w

    f = sharded('x* y', mesh=EIGHT, collectives='all-gather')(body)
    whole, cut = einshard(W, '* y z', mesh=EIGHT), einshard(W, 'y* z', mesh=EIGHT)
    with counting() as counts:
        for w in (whole, cut, W, whole, W, cut):
            np.testing.assert_array_equal(f(X, w), X @ W)
    assert counts.compiled.count('jit(body)') == len(runs) == 3


def test_a_loop_counts_once():
    def tower(x, layers):
        def layer(h, w):
            return einshard(einshard(h, 'b d*') @ w, '* b d'), None

        return jax.lax.scan(layer, x, layers)[0]

    def ours(promise):
        return sharded(
            'b d -> * b d', 'l d e -> l d* e', out='b d -> * b d', mesh=EIGHT, collectives=promise
        )(tower)

    x, layers = np.ones((2, 16), np.float32), np.ones((5, 16, 16), np.float32)
    ours({'all-reduce': 1, 'all-gather': 1})(x, layers)  # the last result is gathered
    row = r'f32\[2,16\] \(128 B\), 8 devices, 5 executions'
    with pytest.raises(UnexpectedCollectives, match=row):
        ours(())(x, layers)


# -------------------------------------------------------------------------- part of other programs


TRACED = {
    'jit': lambda f: jax.jit(f)(X),
    'grad': lambda f: jax.grad(lambda x: f(x).sum())(X),
    'vmap': lambda f: jax.vmap(f)(X[None]),
    'scan': lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, X[None]),
    'sharded': lambda f: sharded('a* b', mesh=EIGHT)(lambda x: f(x))(X),
    'lower': lambda f: f.lower(X),
    'trace': lambda f: f.trace(X),
    'eval_shape': lambda f: f.eval_shape(X),
    'out_shardings': lambda f: f.out_shardings(X),
}


UNCHECKED = pytest.mark.filterwarnings('ignore:collectives= of .* is not checked')


@UNCHECKED
@pytest.mark.parametrize('out', ['* a b', '... b -> * ... b'])
@pytest.mark.parametrize('how', TRACED)
def test_only_calls_are_checked(how, out):
    """A cached trace does not count as checked."""
    f = sharded('a* b', out=out, mesh=EIGHT, collectives=())(lambda x: x * 2)
    TRACED[how](f)
    with pytest.raises(UnexpectedCollectives):
        f(X)
    TRACED[how](f)


@UNCHECKED
@pytest.mark.parametrize('how', TRACED)
def test_allowed_programs_inside_transformations(how):
    f = sharded('a* b', out='a* b', mesh=EIGHT, collectives=())(lambda x: x * 2)
    for _ in range(2):
        TRACED[how](f)
        np.testing.assert_array_equal(f(X), 2 * X)


def test_the_outer_limit_counts():
    inner = sharded('a* b', out='* a b', mesh=EIGHT, collectives=())(lambda x: x * 2)
    outer = sharded('a* b', out='* a b', mesh=EIGHT, collectives={'all-gather': 1})(
        lambda x: inner(x) + 1
    )
    np.testing.assert_array_equal(outer(X), 2 * X + 1)
    with pytest.raises(UnexpectedCollectives):
        inner(X)


def test_lowered_programs_are_those_of_jax():
    f = sharded('a* b', out='* a b', mesh=EIGHT, collectives=())(lambda x: x * 2)
    lowered = f.lower(X)
    assert type(lowered) is jax.stages.Lowered
    np.testing.assert_array_equal(lowered.compile()(X), 2 * X)


# -------------------------------------------------------------------------------- ways of using it


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: jax.Array

    @sharded('x* y', out='x* z', mesh=EIGHT, collectives=())
    def __call__(self, x):
        return x @ self.w

    @sharded('x* y', out='x* z', mesh=EIGHT, collectives=())
    def named(self, x):
        return x @ self.w


def test_methods():
    for _ in range(2):
        for method in (Layer.__call__, Layer.named):
            np.testing.assert_array_equal(method(Layer(W), X), X @ W)
            with pytest.raises(UnexpectedCollectives, match='1 all-gather'):
                method(Layer(einshard(W, 'y* z', mesh=EIGHT)), X)
    assert_collectives(Layer(W).named, X, allowed=())


def test_static_donated_and_other_arguments():
    f = sharded(
        'a* b',
        out='a* b',
        mesh=EIGHT,
        collectives=(),
        static_argnames='n',
        donate_argnames='x',
    )(lambda x, n, *, plus=0.0: n * x + plus)
    for n in (2, 3, 2):
        x = einshard(X, 'a* b', mesh=EIGHT)
        np.testing.assert_array_equal(f(x, n=n, plus=1.0), n * X + 1)
        assert x.is_deleted()


def test_annotations():
    @sharded(collectives=())
    def f(x: Rows) -> Columns:
        return x

    with pytest.raises(UnexpectedCollectives, match='1 all-to-all'):
        f(np.ones((16, 16), np.float32))


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_meshes_in_context(kind):
    f = sharded('a* b', out='... b -> ... b*', collectives='all-to-all')(
        lambda x: einshard(x + 1, 'a b*')
    )
    for devices in (EIGHT, EIGHT[:4], EIGHT):
        with jax.set_mesh(device_mesh(devices, axis_types=kind)):
            for _ in range(2):
                np.testing.assert_array_equal(f(X), X + 1)
    g = sharded('a* b', out='... b -> ... b*', collectives=())(lambda x: einshard(x + 1, 'a b*'))
    with jax.set_mesh(device_mesh(EIGHT, axis_types=kind)), pytest.raises(UnexpectedCollectives):
        g(X)


def test_placement_of_arguments_with_a_limit():
    f = sharded('a* b', mesh=EIGHT, collectives=())(lambda x: x + 1)
    for x in (jax.device_put(X, EIGHT[3]), einshard(X, '* a b', mesh=EIGHT), jnp.asarray(X)):
        np.testing.assert_array_equal(f(x), X + 1)
    with pytest.raises(EinshardError, match='already sharded differently') as caught:
        f(einshard(X, 'a b*', mesh=EIGHT))
    assert not isinstance(caught.value, UnexpectedCollectives)
    with pytest.raises(EinshardError, match=r'\(size 6\) is not divisible'):
        f(np.ones((6, 8), np.float32))


@pytest.mark.parametrize('kept', [True, False])
def test_first_calls_in_many_threads(kept):
    runs, results, errors = [], [], []
    start = threading.Barrier(8)

    def body(x):
        runs.append(1)
        return x + 1

    out = 'a* b' if kept else '* a b'
    f = sharded('a* b', out=out, mesh=EIGHT, collectives=())(body)

    def call():
        start.wait()
        try:
            results.append(np.asarray(f(X)))
        except UnexpectedCollectives as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    with counting() as counts:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if kept:
        assert (len(results), len(errors)) == (8, 0)
        assert counts.compiled.count('jit(body)') == 1
        assert len(runs) == 1
    else:
        assert (len(results), len(errors)) == (0, 8)
        with pytest.raises(UnexpectedCollectives):
            f(X)


def test_an_error_of_the_function_is_its_own():
    def body(x):
        raise KeyError('no')

    f = sharded('a* b', mesh=EIGHT, collectives=())(body)
    for _ in range(2):
        with pytest.raises(KeyError, match='no') as caught:
            f(X)
        assert caught.value.__context__ is None


# ------------------------------------------------------------------------------- assert_collectives


def test_functions_of_every_kind_are_asserted():
    runs = []

    def body(x):
        runs.append(x)
        return x.sum()

    shape = jax.ShapeDtypeStruct((8, 64), np.float32)
    placed = einshard(shape, 'a* b', mesh=EIGHT)
    for fn in (body, jax.jit(body)):
        assert_collectives(fn, X, allowed=())
        assert_collectives(fn, placed, allowed={'all-reduce': 1})
        assert_collectives(fn, x=placed, allowed='all-reduce')
        with pytest.raises(UnexpectedCollectives, match='body has unexpected collectives'):
            assert_collectives(fn, placed, allowed=())
    ours = sharded('a* b', mesh=EIGHT)(body)
    assert_collectives(ours, shape, allowed='all-reduce')
    promised = sharded('a* b', mesh=EIGHT, collectives='all-reduce')(body)
    with pytest.raises(UnexpectedCollectives):
        assert_collectives(promised, shape, allowed=())  # its own promise is another matter
    assert all(isinstance(x, jax.core.Tracer) for x in runs)


# ------------------------------------------------------------------------------------ the messages


def message_of(call):
    with pytest.raises(EinshardError) as caught:
        call()
    return str(caught.value)


def test_the_message_lists_every_unexpected_collective():
    @sharded('b d -> b* d', 'd e -> d* e', 'e f -> e* f', mesh=EIGHT, collectives={'all-reduce': 1})
    def layer(x, u, v):
        return (x @ u @ v).sum()

    u, v = np.ones((64, 16), np.float32), np.ones((16, 64), np.float32)
    # newer versions of JAX have no line for a gather
    found = re.sub(rf', {HERE}:\d+', '', message_of(lambda: layer(X, u, v)))
    assert found == (
        'layer has unexpected collectives: 2 all-gathers\n'
        '  allowed:      at most 1 all-reduce\n'
        '  all-gather 1: f32[64,16] (4.0 KiB), 8 devices\n'
        '  all-gather 2: f32[16,64] (4.0 KiB), 8 devices'
    )


def test_the_message_has_the_source_line():
    @sharded('x y*', 'y* z', mesh=EIGHT, collectives=())
    def layer(x, w):
        return x @ w

    line = layer.__wrapped__.__code__.co_firstlineno + 2
    assert message_of(lambda: layer(X, W)) == (
        'layer has unexpected collectives: 1 all-reduce\n'
        '  allowed:    no collectives\n'
        f'  all-reduce: f32[8,16] (512 B), 8 devices, {HERE}:{line}'
    )


def test_groups_of_one_device_do_not_count():
    mesh = jax.make_mesh((1, 8), ('a', 'b'), (AxisType.Auto,) * 2, devices=EIGHT)
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, 'a'), mesh=mesh, in_specs=P('a', 'b'), out_specs=P(None, 'b')
    )
    # XLA leaves it in the program
    assert 'all-reduce(' in jax.jit(mapped).lower(X).compile().as_text()
    assert sharded(mesh=mesh, collectives=())(mapped)(X).shape == X.shape


def test_identical_collectives_share_a_line():
    @sharded('4 x y2', '4 y2 z', out='8 x z', mesh=EIGHT, collectives='all-gather')
    def twice(x, w):
        return jnp.sin(einshard(x @ w, '8 x z')) @ jnp.cos(einshard(x @ (2 * w), '8 x z')).T

    found = message_of(lambda: twice(X, W)).splitlines()
    assert found[0].startswith('twice has unexpected collectives: ')
    assert found[1].split(maxsplit=1) == ['allowed:', 'any number of all-gathers']
    assert '4 groups of 2 devices' in found[2]


@pytest.mark.parametrize('promise', [5, 'all_reduce', ('all-gather', 'psum')])
def test_invalid_kinds(promise):
    ours = message_of(lambda: sharded(collectives=promise)(product))
    theirs = message_of(lambda: assert_collectives(product, X, W, allowed=promise))
    assert (
        theirs.split()
        == ours.replace('collectives=', 'allowed=').replace('  function: product\n', '').split()
    )


@pytest.mark.parametrize('most', [-1, 1.0, True, None, 'one'])
def test_invalid_limits(most):
    message = message_of(lambda: sharded(collectives={'all-reduce': most})(product))
    assert f"the limit for 'all-reduce' must be a non-negative integer, not {most!r}" in message
