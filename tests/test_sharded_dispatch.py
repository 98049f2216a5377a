"""sharded: the cost of repeated calls, and which program a call runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, counting, entered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import shardings

import einshard
from einshard import axis_rules, device_mesh, make_sharding, sharded

EIGHT = jax.devices()[:8]
ROWS, COLUMNS = 'a b -> a* b', 'a b -> a b*'
LAST = '... d -> ... d*'
X = np.arange(64, dtype=np.float32).reshape(8, 8)
AXES = ('d0', 'd1', 'd2')


def by_path(path, leaf):
    return COLUMNS if path.endswith('w') else '... -> * ...'


def tree(n, m=8):
    return {'w': np.ones((n, m), np.float32), 'b': np.ones(n, np.float32)}


def on(*entries):
    return NamedSharding(device_mesh(EIGHT), P(*entries))


def on_last(x, mesh=None):
    mesh = device_mesh(EIGHT) if mesh is None else mesh
    return NamedSharding(mesh, P(*[None] * (x.ndim - 1), AXES))


def by_position(f, x):
    return f(x)


def by_keyword(f, x):
    return f(x=x)


BOTH_WAYS = pytest.mark.parametrize('call', [by_position, by_keyword])


# ------------------------------------------------------------------- the cost of repeated calls


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array

    @sharded(ROWS, ROWS, out=ROWS, mesh=EIGHT)
    def add(self, x, y=0.0, *, times=1.0):
        return times * x + y + self.w

    @sharded(ROWS, out=ROWS, mesh=EIGHT)
    def __call__(self, x):
        return x + self.w


def combine(x, y=0.0, *, times=1.0):
    return times * x + y


PLACED, NARROW = (jax.device_put(x, make_sharding(ROWS, mesh=EIGHT)) for x in (X, X[:, :4]))
TWO = jax.device_put(2.0, make_sharding('-> *', mesh=EIGHT))
TREES = [sharded(out=by_path, mesh=EIGHT)(lambda x: x)(tree(n)) for n in (8, 16, 24)]

CHEAP = [
    lambda f: f(PLACED),
    lambda f: f(PLACED, PLACED),
    lambda f: f(NARROW),
    lambda f: f(x=PLACED),
    lambda f: f(y=PLACED, x=PLACED),
    lambda f: f(PLACED, PLACED, times=TWO),
    lambda f: f(PLACED, times=TWO, y=PLACED),
]


def entered_of_jax(call):
    """The functions of JAX that Python enters in a call, without those of `get_mesh`."""
    of_get_mesh, names = entered(jax.sharding.get_mesh, jax), entered(call, jax)
    n = len(of_get_mesh)
    for i in range(len(names) - n, -1, -1):
        if names[i : i + n] == of_get_mesh:
            del names[i : i + n]
    return names


def check_cheap(call, most):
    """From the third call on, Python enters few functions of ours, and none of JAX."""
    call(), call()
    assert len(entered(call, einshard)) <= most
    assert entered_of_jax(call) == []


@pytest.mark.parametrize(('promise', 'more'), [(None, 0), ((), 2), ('all-reduce', 2)])
def test_repeated_calls_enter_few_functions(promise, more):
    options = {'mesh': EIGHT, 'collectives': promise}
    f = sharded(ROWS, ROWS, times='-> *', out=ROWS, **options)(combine)
    jax.jit(f)(np.ones((16, 3), np.float32))  # part of another program
    for call in CHEAP * 2:
        check_cheap(lambda call=call: call(f), 1 + more)
    g = sharded(by_path, out=by_path, **options)(lambda x: x)
    for tree in TREES * 2:  # with one more function, which asks whether JAX is tracing
        check_cheap(lambda tree=tree: g(tree), 2 + more)


def test_methods_enter_few_functions():
    model, other = Model(PLACED), Model(2 * PLACED)
    for call in (lambda: model.add(PLACED), lambda: model(PLACED), lambda: other.add(PLACED)):
        check_cheap(call, 3)


@BOTH_WAYS
def test_the_fast_path_is_for_one_mesh_and_one_set_of_rules(call):
    x = np.ones((16, 16), np.float32)
    f = sharded(ROWS, out=ROWS)(lambda x: x + 1)
    for mesh in (device_mesh(), device_mesh(EIGHT), device_mesh(EIGHT[:4]), device_mesh(EIGHT)):
        with jax.set_mesh(mesh):
            for _ in range(3):
                assert call(f, x).sharding.mesh == mesh
    assert call(f, x).sharding.mesh == device_mesh()
    g = sharded('a b', out='a b')(lambda x: x + 1)
    axes = (*AXES, 'd3')
    for axis, spec in (('a', P(axes)), ('b', P(None, axes)), ('a', P(axes))):
        with axis_rules(**{axis: '*'}):
            for _ in range(3):
                assert call(g, x).sharding.spec == spec


@BOTH_WAYS
def test_clear_cache_clears_the_fast_path(call):
    body = counted(lambda x: x + 1)
    f = sharded(ROWS, mesh=EIGHT)(body)
    for runs in (1, 2):
        call(f, X), call(f, X)
        assert body.runs == runs
        f.clear_cache()


# ------------------------------------------------------------------------------ the right program


RANKS = [np.ones((2,) * (n - 1) + (8 * m,), np.float32) for m in (1, 2) for n in (1, 2, 3)]


@BOTH_WAYS
def test_each_shape_of_each_rank_has_a_program(call):
    body = counted(lambda x: x + 1)
    f = sharded(LAST, out=LAST, mesh=EIGHT)(body)
    with counting() as counts:
        for x in RANKS * 2:
            assert call(f, x).sharding == on_last(x)
            np.testing.assert_array_equal(call(f, x), x + 1)
    assert (body.runs, counts.of('<lambda>')[1]) == (6, 6)


@BOTH_WAYS
def test_each_rank_on_explicit_axes(call):
    mesh = device_mesh(EIGHT, axis_types=AxisType.Explicit)
    f = sharded(LAST, out=LAST)(lambda x: x + 1)
    with jax.set_mesh(mesh):
        for x in [*RANKS, *map(jnp.asarray, RANKS)] * 2:
            assert call(f, x).sharding == f.out_shardings(x) == on_last(x, mesh)
            np.testing.assert_array_equal(call(f, x), x + 1)


def test_shardings_without_a_call():
    f = sharded(LAST, out='d ... -> d* ...', mesh=EIGHT)(lambda x: x.T)
    g = sharded(out=LAST, mesh=EIGHT)(lambda x: x.T)
    f(X), g(X)
    for n in (1, 2, 3):
        x = np.ones((8,) * n, np.float32)
        assert f.in_shardings(x) == {'x': on_last(x)}
        assert f.out_shardings(x) == on(AXES)
        assert g.out_shardings(x) == on_last(x)


def wide(path, leaf):
    return COLUMNS if leaf.shape[1] > 8 else ROWS


def test_equal_argument_shardings_with_different_result_shardings():
    """Only a trace shows the shapes of the result."""
    f = sharded(None, None, out=wide, mesh=EIGHT, static_argnames='n')(
        lambda x, n: jnp.tile(x, (1, n))
    )
    g = sharded(ROWS, out=wide, mesh=EIGHT)(lambda x: jnp.tile(x, (1, 2)))
    for _ in range(2):
        for n in (2, 1, 3):
            assert f(X, n).sharding == (on(None, AXES) if n > 1 else on(AXES))
        for m in (8, 4, 3, 16):
            for call in (by_position, by_keyword):
                result = call(g, X[:, :1].repeat(m, 1))
                assert result.sharding == (on(None, AXES) if m > 4 else on(AXES))


def test_a_result_of_another_structure():
    f = sharded(out=by_path, mesh=EIGHT)(lambda x: {'w': x} if x.shape[1] > 8 else {'b': x[0]})
    for m in (16, 8, 16):
        key, expected = ('w', on(None, AXES)) if m > 8 else ('b', on())
        assert shardings(f(np.ones((8, m), np.float32))) == {key: expected}
