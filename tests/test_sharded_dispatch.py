"""sharded: the cost of repeated calls, and which program a call runs."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import einshard
from einshard import axis_rules, device_mesh, make_sharding, sharded

EIGHT = jax.devices()[:8]
ROWS, COLUMNS, WHOLE = 'a b -> a* b', 'a b -> a b*', 'a b -> * a b'
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def entered(call, package):
    """The functions of a package that Python enters in a call, in order."""
    names = []
    folder = str(pathlib.Path(package.__file__).parent)

    def enter(frame, event, _):
        if event == 'call' and frame.f_code.co_filename.startswith(folder):
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names


def frames(call):
    """How many functions of ours Python enters in a call."""
    return len(entered(call, einshard))


# whether JAX traces is asked where a tree is given, of which no type tells
ASKED = 1


def frames_of_jax(call):
    """The functions of JAX that Python enters in a call, but for those that say if it traces."""
    asked = entered(jax.sharding.get_mesh, jax)
    names = entered(call, jax)
    for i in range(len(names) - len(asked), -1, -1):
        if names[i : i + len(asked)] == asked:
            del names[i : i + len(asked)]
    return names


def twice(call):
    call()
    call()
    return call


def by_path(path, leaf):
    return COLUMNS if path.endswith('w') else '... -> * ...'


def tree(n, m=8):
    return {'w': np.ones((n, m), np.float32), 'b': np.ones(n, np.float32)}


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def on(*entries):
    return NamedSharding(device_mesh(EIGHT), P(*entries))


CUT = ('d0', 'd1', 'd2')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array

    @sharded(ROWS, COLUMNS, out=ROWS, mesh=EIGHT)
    def add(self, x, y=0.0, *, times=1.0):
        """Adds."""
        return times * x + y + self.w

    @sharded(ROWS, out=ROWS, mesh=EIGHT)
    def __call__(self, x):
        return x + self.w


# ------------------------------------------------------------------------------- Python's frames


def test_a_call_by_position_is_one_frame():
    f = sharded(ROWS, COLUMNS, out=ROWS, mesh=EIGHT)(lambda x, y=0.0: x + y)
    assert frames(twice(lambda: f(X))) == 1
    assert frames(twice(lambda: f(X, X))) == 1
    assert frames(lambda: f(X)) == 1


@pytest.mark.parametrize(
    'call',
    [
        lambda f: f(x=X),
        lambda f: f(y=X, x=X),
        lambda f: f(X, times=2.0, y=X),
        lambda f: f(X, X, times=2.0),
    ],
)
def test_a_call_by_keyword_is_one_frame(call):
    f = sharded(ROWS, COLUMNS, out=ROWS, mesh=EIGHT)(lambda x, y=0.0, *, times=1.0: times * x + y)
    assert frames(twice(lambda: call(f))) == 1


def test_a_method_of_a_tree_is_three():
    model = Model(X)
    assert frames(twice(lambda: model.add(X))) == 2 + ASKED
    assert frames(twice(lambda: model(X))) == 2 + ASKED
    # another instance, the same program
    assert frames(lambda: Model(2 * X).add(X)) == 2 + ASKED


@pytest.mark.parametrize('promise', [None, ()])
def test_repeated_calls_run_no_python_of_jax(promise):
    """Repeated calls stay on the fast path of jit."""
    placed = [jax.device_put(x, make_sharding(ROWS, mesh=EIGHT)) for x in (X, X[:, :4], X[:, :2])]
    f = sharded(ROWS, out=ROWS, mesh=EIGHT, collectives=promise)(lambda x: x + 1)
    g = sharded(by_path, out=by_path, mesh=EIGHT, collectives=promise)(lambda x: x)
    jax.jit(f)(X)
    for x in placed:
        for call in (lambda x=x: f(x), lambda x=x: f(x=x)):
            assert frames_of_jax(twice(call)) == []
    jax.jit(f)(np.ones((16, 3), np.float32))  # part of another program
    for x in placed:
        assert frames_of_jax(twice(lambda x=x: f(x))) == []
    trees = [g(tree(n)) for n in (8, 16)]
    for one in trees:
        assert frames_of_jax(twice(lambda one=one: g(one))) == []
    model = Model(placed[0])
    assert frames_of_jax(twice(lambda: model.add(placed[0]))) == []


@pytest.mark.parametrize('out', [by_path, None])
def test_other_shapes_do_not_slow_it_down_where_the_shardings_are_the_same(out):
    f = sharded(by_path, out=out, mesh=EIGHT)(lambda tree: jax.tree.map(jnp.negative, tree))
    for n in (8, 16, 24):
        assert frames(twice(lambda n=n: f(tree(n)))) == 1 + ASKED
    assert frames(lambda: f(tree(8))) == 1 + ASKED


def by_position(f, x):
    return f(x)


def by_keyword(f, x):
    return f(x=x)


@pytest.mark.parametrize('call', [by_position, by_keyword])
def test_the_fast_path_is_for_one_mesh_and_one_set_of_rules(call):
    x = np.ones((16, 16), np.float32)
    f = sharded(ROWS, out=ROWS)(lambda x: x + 1)
    meshes = [device_mesh(), device_mesh(EIGHT), device_mesh(EIGHT[:4]), device_mesh(EIGHT)]
    for mesh in meshes:
        with jax.set_mesh(mesh):
            for _ in range(3):
                assert call(f, x).sharding.mesh == mesh
    assert call(f, x).sharding.mesh == device_mesh()
    g = sharded('a b', out='a b')(lambda x: x + 1)
    cut = ('d0', 'd1', 'd2', 'd3')
    for axis, spec in (('a', P(cut)), ('b', P(None, cut)), ('a', P(cut))):
        with axis_rules(**{axis: '*'}):
            for _ in range(3):
                assert call(g, x).sharding.spec == spec


# ------------------------------------------------------------------------------ the right program


def counted(function, decorate, values):
    """Results, runs of the function's body, and compilations."""
    runs = []

    def body(*args):
        runs.append(1)
        return function(*args)

    f = decorate(body)
    with counting() as counts:
        results = [f(*args) for args in values]
    return results, len(runs), counts.of('body')[1]


SHAPES = [tree(8), tree(8), tree(16), tree(8), tree(16, 16), tree(16)]


@pytest.mark.parametrize('out', [by_path, None])
def test_several_shapes_are_traced_and_compiled_as_often_as_by_jit(out):
    by_leaf = {'w': on(None, CUT), 'b': on()}
    given = {} if out is None else {'out_shardings': by_leaf}

    def by_hand(f):
        return jax.jit(f, in_shardings=(by_leaf,), **given)

    def ours(f):
        return sharded(by_path, out=out, mesh=EIGHT)(f)

    calls = [(one,) for one in SHAPES]
    function = lambda tree: jax.tree.map(lambda x: 2 * x, tree)  # noqa: E731
    expected, *by_jit = counted(function, by_hand, calls)
    results, *by_us = counted(function, ours, calls)
    assert by_us == by_jit
    for one, other in zip(results, expected, strict=True):
        assert out is None or shardings(one) == by_leaf
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)


def test_each_rank_has_a_program():
    def decorate(f):
        return sharded('... d -> ... d*', out='... d -> ... d*', mesh=EIGHT)(f)

    arrays = [np.ones((2,) * (n - 1) + (8 * m,), np.float32) for m in (1, 2) for n in (1, 2, 3)] * 2
    results, runs, compilations = counted(lambda x: x + 1, decorate, [(x,) for x in arrays])
    for x, result in zip(arrays, results, strict=True):
        assert result.sharding == on(*[None] * (x.ndim - 1), CUT)
        np.testing.assert_array_equal(result, x + 1)
    assert (runs, compilations) == (6, 6)  # for six shapes


def test_arguments_placed_alike_may_have_results_that_are_not():
    """Only a trace shows the shapes of the result."""

    def wide(path, leaf):
        return COLUMNS if leaf.shape[1] > 8 else ROWS

    def grow(x, n):
        return jnp.tile(x, (1, n))

    f = sharded(None, None, out=wide, mesh=EIGHT, static_argnames='n')(grow)
    g = sharded(ROWS, out=wide, mesh=EIGHT)(lambda x: jnp.tile(x, (1, 2)))
    for _ in range(2):
        for n in (2, 1, 3):
            assert f(X, n).sharding == (on(None, CUT) if n > 1 else on(CUT))
        for m, expected in ((8, on(None, CUT)), (4, on(CUT)), (3, on(CUT)), (16, on(None, CUT))):
            assert g(X[:, :1].repeat(m, 1)).sharding == expected
            assert g(x=X[:, :1].repeat(m, 1)).sharding == expected


def test_a_result_of_another_structure():
    f = sharded(out=by_path, mesh=EIGHT)(lambda x: {'w': x} if x.shape[1] > 8 else {'b': x[0]})
    for m in (16, 8, 16):
        key, expected = ('w', on(None, CUT)) if m > 8 else ('b', on())
        assert shardings(f(np.ones((8, m), np.float32))) == {key: expected}


def test_shardings_without_a_call():
    f = sharded('... d -> ... d*', out='d ... -> d* ...', mesh=EIGHT)(lambda x: x.T)
    g = sharded(out='... d -> ... d*', mesh=EIGHT)(lambda x: x.T)
    f(X)
    g(X)
    for n in (1, 2, 3):
        x = np.ones((8,) * n, np.float32)
        assert f.in_shardings(x) == {'x': on(*[None] * (n - 1), CUT)}
        assert f.out_shardings(x) == on(CUT)
        assert g.out_shardings(x) == on(*[None] * (n - 1), CUT)


@pytest.mark.parametrize('call', [by_position, by_keyword])
def test_explicit_axes_with_an_out_spec_that_needs_ranks(call):
    mesh = device_mesh(EIGHT, axis_types=AxisType.Explicit)
    with jax.set_mesh(mesh):
        f = sharded('... d -> ... d*', out='... d -> ... d*')(lambda x: x + 1)
        for x in (X, X[0], jnp.asarray(X), 1.0 + X, X):
            expected = NamedSharding(mesh, P(*[None] * (x.ndim - 1), CUT))
            for _ in range(2):
                assert call(f, x).sharding == expected
            np.testing.assert_array_equal(call(f, x), x + 1)
            assert f.out_shardings(x) == expected


# ----------------------------------------------------------------------------- ways of writing it


def test_every_way_to_write_a_call():
    """The same values by position and by keyword, in every order: once each is traced."""

    def decorate(f):
        return sharded(ROWS, COLUMNS, scale='... -> * ...', mesh=EIGHT)(f)

    def body(x, y, /, z=0.0, *rest, scale=1.0, **others):
        runs.append(1)
        return x + 2 * y + 3 * z + sum(rest) + 100 * scale + 1000 * others.get('y', 0)

    f = decorate(body)
    x, y = X, X.T.copy()
    calls = [
        lambda: f(x, y),
        lambda: f(x, y, 4.0),
        lambda: f(x, y, z=4.0),
        lambda: f(x, y, scale=2.0),
        lambda: f(x, y, scale=2.0, z=4.0),
        lambda: f(x, y, z=4.0, scale=2.0),
        lambda: f(x, y, 4.0, 5.0, scale=2.0),
        lambda: f(x, y, y=7.0),
        lambda: f(x, y, y=7.0, z=4.0),
    ]
    n = x + 2 * y
    expected = [100, 112, 112, 200, 212, 212, 217, 7100, 7112]
    runs = []
    for turn in range(3):
        for call, more in zip(calls, expected, strict=True):
            np.testing.assert_allclose(call(), n + more)
        if turn == 0:
            first = len(runs)
    assert len(runs) == first == 7  # two are the same two ways


def test_a_keyword_that_is_missing_or_unknown_is_still_missed():
    f = sharded(ROWS, mesh=EIGHT)(lambda x, y: x + y)
    for _ in range(2):
        f(x=X, y=X)
        f(X, y=X)
        for call in (lambda: f(x=X), lambda: f(X, X, y=X), lambda: f(x=X, y=X, z=X)):
            with pytest.raises(TypeError):
                call()


def test_static_and_donated_arguments_by_keyword():
    f = sharded(ROWS, out=ROWS, mesh=EIGHT, static_argnames=('n',), donate_argnames=('x',))(
        lambda x, n=1: x * n
    )
    for n in (2, 3, 2, 3):
        for call in (lambda x, n: f(n=n, x=x), lambda x, n: f(x, n=n), lambda x, n: f(x=x, n=n)):
            x = jax.device_put(X, make_sharding(ROWS, mesh=EIGHT))
            np.testing.assert_array_equal(call(x, n), n * X)
            assert x.is_deleted()


def test_clear_cache_clears_the_fast_path():
    runs = []

    def body(x):
        runs.append(1)
        return x + 1

    f = sharded(ROWS, mesh=EIGHT)(body)
    for call in (by_position, by_keyword):
        runs.clear()
        call(f, X)
        call(f, X)
        f.clear_cache()
        call(f, X)
        assert len(runs) == 2
        f.clear_cache()


# ------------------------------------------------------------------------------ methods, as before


def test_bound_methods():
    model = Model(X)
    assert model.add.__name__ == 'add'
    assert model.add.__doc__ == 'Adds.'
    assert model.add.__self__ is model
    assert list(model.add.__wrapped__(X).shape) == [8, 8]
    for _ in range(2):
        np.testing.assert_array_equal(model.add(X, times=2.0), 3 * X)
        np.testing.assert_array_equal(model.add(y=X, x=X), 3 * X)
        np.testing.assert_array_equal(Model.add(model, X), 2 * X)
    assert model.add.in_shardings(X) == {'self': None, 'x': on(CUT)}
    model.add.clear_cache()
    np.testing.assert_array_equal(jax.jit(model.add)(X), 2 * X)
