"""sharded: arguments with other placements than their spec, at the first call and later."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import EinshardError, describe, einshard, make_sharding, sharded

X = np.arange(64, dtype=np.float32).reshape(8, 8)
EIGHT = jax.devices()[:8]
ROWS, COLUMNS, WHOLE = 'a b -> a* b', 'a b -> a b*', 'a b -> * a b'
ON_ROWS, ON_COLUMNS = (make_sharding(text, mesh=EIGHT) for text in (ROWS, COLUMNS))


def plus(x, y=0.0):
    return x + y + 1


def placed(spec, mesh=EIGHT):
    return einshard(X, spec, mesh=mesh)


# name, and the array: all of them the values X
PLACED_BY_SHARDED = {
    'numpy': lambda: X,
    'uncommitted': lambda: jnp.asarray(X),
    'on the first device': lambda: jax.device_put(X, EIGHT[0]),
    'on another device': lambda: jax.device_put(X, EIGHT[5]),
    'on a device beyond the mesh': lambda: jax.device_put(X, jax.devices()[12]),
    'replicated': lambda: placed(WHOLE),
    'replicated on other devices': lambda: placed(WHOLE, jax.devices()),
    'replicated on a named mesh': lambda: jax.device_put(
        X, NamedSharding(Mesh(np.array(EIGHT).reshape(2, 4), ('p', 'q')), P())
    ),
    'as asked': lambda: placed(ROWS),
    'as asked, on a named mesh': lambda: jax.device_put(
        X, NamedSharding(Mesh(np.array(EIGHT).reshape(2, 4), ('p', 'q')), P(('p', 'q')))
    ),
}
SHARDED_DIFFERENTLY = {
    'by columns': lambda: placed(COLUMNS),
    'by fewer rows': lambda: placed('a b -> 2 a* b'),
    'by rows of fewer devices': lambda: placed(ROWS, EIGHT[:4]),
}


@pytest.fixture(params=[False, True], ids=['first call', 'later call'])
def f(request):
    """A sharded function before or after its first call."""
    function = sharded(ROWS, out=COLUMNS, mesh=EIGHT)(plus)
    if request.param:
        function(X)
        function(placed(ROWS))
    return function


@pytest.mark.parametrize('kind', PLACED_BY_SHARDED)
def test_unsharded_arrays_are_placed(kind, f):
    for call in (f, lambda x: f(x=x), lambda x: f(x, y=0.0)):
        x = PLACED_BY_SHARDED[kind]()
        result = call(x)
        np.testing.assert_array_equal(result, X + 1)
        assert result.sharding == ON_COLUMNS
        if isinstance(x, jax.Array):
            assert not x.is_deleted()


@pytest.mark.parametrize('kind', SHARDED_DIFFERENTLY)
def test_arrays_sharded_differently_are_errors(kind, f):
    x = SHARDED_DIFFERENTLY[kind]()
    for call in (f, lambda x: f(x=x), f.lower):
        with pytest.raises(EinshardError, match='already sharded differently') as caught:
            call(x)
        assert "float32[8,8], parameter 'x' of plus" in str(caught.value)
        assert 'a b -> a* b' in str(caught.value)
        assert not x.is_deleted()
    # and the function is as it was
    np.testing.assert_array_equal(f(X), X + 1)


@pytest.mark.parametrize('kind', SHARDED_DIFFERENTLY)
def test_reshard_moves_them(kind):
    f = sharded(ROWS, out=COLUMNS, mesh=EIGHT, reshard=True)(plus)
    for _ in range(2):
        x = SHARDED_DIFFERENTLY[kind]()
        result = f(x)
        np.testing.assert_array_equal(result, X + 1)
        assert result.sharding == ON_COLUMNS
        assert not x.is_deleted()


@pytest.mark.parametrize('kind', [*PLACED_BY_SHARDED, *SHARDED_DIFFERENTLY])
def test_donated_arguments_are_placed(kind):
    f = sharded(ROWS, out=ROWS, mesh=EIGHT, reshard=True, donate_argnums=0)(plus)
    for _ in range(2):
        x = {**PLACED_BY_SHARDED, **SHARDED_DIFFERENTLY}[kind]()
        result = f(x)
        np.testing.assert_array_equal(result, X + 1)
        assert result.sharding == ON_ROWS
    np.testing.assert_array_equal(X, np.arange(64).reshape(8, 8))


def test_traces_and_compilations_for_all_placements():
    """jit traces again for arguments on other meshes, even if it then rejects them."""

    def by_ours(x):
        runs.append(1)
        return plus(x)

    counted = []
    f = sharded(ROWS, out=COLUMNS, mesh=EIGHT, reshard=True)(by_ours)
    g = jax.jit(by_ours, in_shardings=ON_ROWS, out_shardings=ON_COLUMNS)
    for one in (f, g):
        jax.clear_caches()
        runs = []
        with counting() as counts:
            for make in [*PLACED_BY_SHARDED.values(), *SHARDED_DIFFERENTLY.values()]:
                with contextlib.nullcontext() if one is f else contextlib.suppress(ValueError):
                    one(make())
        counted.append((len(runs), counts.of('by_ours')[1]))
    (our_runs, our_compiles), (their_runs, their_compiles) = counted
    assert our_runs <= their_runs
    assert our_compiles <= their_compiles


def test_the_leaf_of_a_tree_is_named():
    tree = {'layers': [{'w': placed(ROWS)}, {'w': placed(COLUMNS)}]}
    f = sharded({'layers': ROWS}, mesh=EIGHT)(lambda tree: tree['layers'][1]['w'] + 1)
    with pytest.raises(EinshardError, match="parameter 'tree/layers/1/w' of <lambda>"):
        f(tree)
    assert tree['layers'][0]['w'].sharding == ON_ROWS


def test_leaves_with_different_placements():
    tree = {'a': placed(ROWS), 'b': placed(WHOLE), 'c': X, 'd': jax.device_put(X, EIGHT[1])}
    f = sharded('a b -> a* b', mesh=EIGHT)(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    for result in f(tree).values():
        np.testing.assert_array_equal(result, X + 1)


def test_an_argument_without_a_spec_may_be_anywhere_on_the_mesh():
    f = sharded(ROWS, out=ROWS, mesh=EIGHT)(plus)
    for y in (X, jnp.asarray(X), placed(COLUMNS), placed(WHOLE), placed(ROWS), 1.0):
        np.testing.assert_array_equal(f(X, y), X + np.asarray(y) + 1)


@pytest.mark.parametrize('first', [False, True])
def test_an_argument_without_a_spec_on_other_devices_is_refused(first):
    f = sharded(ROWS, out=ROWS, mesh=EIGHT)(plus)
    if not first:
        f(X, X)
    for y in (placed(ROWS, EIGHT[:4]), jax.device_put(X, EIGHT[3]), placed(WHOLE, jax.devices())):
        with pytest.raises(EinshardError, match='has no spec and is committed to') as caught:
            f(X, y)
        assert "parameter 'y' of plus" in str(caught.value)


def test_mesh_with_out_alone():
    f = sharded(out=ROWS, mesh=EIGHT)(plus)
    assert f(X).sharding == ON_ROWS
    assert f(placed(COLUMNS)).sharding == ON_ROWS
    with pytest.raises(ValueError, match=r'device'):
        f(placed(ROWS, EIGHT[:4]))


def test_arguments_are_checked_before_they_move():
    x = placed(WHOLE)
    f = sharded('a b -> a* b', 'a b -> a* b', mesh=EIGHT)(plus)
    with pytest.raises(EinshardError, match="parameter 'y' of plus"):
        f(x, np.ones((6, 8), np.float32))


@pytest.mark.parametrize('later', [False, True])
@pytest.mark.parametrize(
    ('shape', 'text'),
    [
        ((6, 8), "axis 'a' (size 6) is not divisible by 8"),
        ((8,), 'the expression names 2 axes, but the array has 1'),
        ((8, 8, 8), 'the expression names 2 axes, but the array has 3'),
    ],
)
def test_arrays_that_do_not_fit(shape, text, later):
    f = sharded(ROWS, mesh=EIGHT)(plus)
    if later:
        f(X)
    for x in (np.ones(shape, np.float32), jnp.ones(shape)):
        with pytest.raises(EinshardError) as caught:
            f(x)
        assert str(caught.value).startswith(text)
        assert "parameter 'x' of plus" in str(caught.value)


@pytest.mark.parametrize(
    ('spec', 'argument'),
    [
        ({'layers': ['a b*']}, {'layers': [X, X]}),
        ({'layers': [{'w': 'a b*'}]}, {'layers': [{'w': X, 'b': X[0]}]}),
        ({'layers': 'a b*'}, X),
        ('a b*', X[0]),
        (['a b*', {'bias': 'a*'}], [X, {'bias': X}]),
        ('a* b', X[:6]),
        ('a16 b', X),
        ('a* b', placed(COLUMNS)),
        ({'w': 'rows* columns', 'b': None}, {'w': placed('a2 b2 2'), 'b': X}),
    ],
)
def test_the_error_is_the_same_by_position_and_by_name(spec, argument):
    f = sharded(x=spec, mesh=EIGHT)(plus)
    with pytest.raises(EinshardError) as by_position:
        f(argument)
    with pytest.raises(EinshardError) as by_name:
        f(x=argument)
    assert str(by_name.value) == str(by_position.value)


@pytest.mark.parametrize('later', [False, True])
@pytest.mark.parametrize('out', [ROWS, '... b -> ... b*'])
def test_results_that_do_not_fit(out, later):
    f = sharded(None, out=out, mesh=EIGHT)(lambda x: x[:6, :6])
    if later:
        f = sharded(None, out=out, mesh=EIGHT)(lambda x: x if x.shape == (8, 8) else x[:6, :6])
        f(X)
    with pytest.raises(EinshardError, match='is not divisible by 8') as caught:
        f(np.ones((9, 9), np.float32))
    assert 'float32[6,6], result of <lambda>' in str(caught.value)


def test_rows_in_another_order_of_devices():
    """jit reorders such an array at its first call, and fails at the second."""
    backwards = NamedSharding(Mesh(np.array(EIGHT[::-1]), ('p',)), P('p'))
    f = sharded(ROWS, out=COLUMNS, mesh=EIGHT)(plus)
    for _ in range(2):
        with pytest.raises(EinshardError, match='is already sharded differently'):
            f(jax.device_put(X, backwards))


def test_an_array_that_is_deleted():
    f = sharded(ROWS, mesh=EIGHT)(plus)
    x = placed(ROWS)
    f(x)
    x.delete()
    with pytest.raises(RuntimeError, match='deleted'):
        f(x)


# ------------------------------------------------------------- one function after the other


def test_results_of_one_are_arguments_of_another():
    """Equal placements in other spellings: no transfer, no retrace."""
    runs = []

    def same(x):
        runs.append(1)
        return x

    forward = sharded('a b -> a2 b4', out='i j -> i2 j* ', mesh=EIGHT)(same)
    back = sharded('rows columns -> rows2 columns4', out='a b -> a2 b4', mesh=EIGHT)(same)
    x = einshard(X, 'a b -> a2 b*', mesh=EIGHT)
    for _ in range(3):
        x = back(forward(x))
    assert len(runs) == 2
    assert x.sharding == make_sharding('a b -> a2 b4', mesh=EIGHT)
    np.testing.assert_array_equal(x, X)


def test_two_in_one_jit():
    first = sharded('a b -> a8 b', out='a b -> b8 a', mesh=EIGHT)(lambda x: jnp.sin(x))
    second = sharded('a b -> a2 2 b2', out='a b -> b2 a4', mesh=EIGHT)(lambda x: jnp.cos(x))
    third = sharded('a b -> 2 a4 b', mesh=EIGHT[::-1])(lambda x: 2 * x)

    @jax.jit
    def all_three(x):
        return third(second(first(x))) + first(second(x))

    np.testing.assert_allclose(
        all_three(X), 2 * np.cos(np.sin(X)) + np.sin(np.cos(X)), rtol=1e-5, atol=1e-6
    )


def test_canonical_arrays_under_a_mesh_in_context():
    """An equivalent sharding on another mesh of the same devices."""
    x = placed(ROWS)
    f = sharded(ROWS, out=ROWS)(plus)
    mesh = Mesh(np.array(EIGHT).reshape(4, 2), ('p', 'q'), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        result = f(x)
        assert result.sharding == NamedSharding(mesh, P(('p', 'q')))
        np.testing.assert_array_equal(result, X + 1)
        np.testing.assert_array_equal(f(result), X + 2)
        np.testing.assert_array_equal(f(X), X + 1)
        np.testing.assert_array_equal(f(jnp.asarray(X)), X + 1)


# ------------------------------------------------------------------- defaults that are arrays

ONES, SIX_ONES = np.ones(8), np.ones(6)


@pytest.mark.parametrize('form', ['by position', 'by keyword'])
def test_a_default_is_placed_by_its_spec(devices8, form):
    @sharded(y='a*', mesh=devices8)
    def f(x, y=ONES):
        return y

    for _ in range(2):
        y = f(np.ones(3)) if form == 'by position' else f(x=np.ones(3))
        assert describe(y) == 'a -> a8'
        assert describe(f(np.ones(3), np.zeros(16))) == 'a -> a8'


def test_a_default_has_to_fit_its_spec(devices8):
    @sharded(y='a*', mesh=devices8)
    def f(x, y=SIX_ONES):
        return y

    with pytest.raises(EinshardError, match='is not divisible by 8'):
        f(np.ones(3))
    assert describe(f(np.ones(3), np.ones(8))) == 'a -> a8'


# ------------------------------------------------- arguments without a spec, on other devices


def test_without_a_spec_in_another_order(devices8):
    other = Mesh(np.array([devices8[i] for i in (3, 1, 7, 0, 2, 4, 6, 5)]), ('p',))

    @sharded(x='a*', mesh=devices8)
    def add(x, y):
        return x + y

    y = einshard(np.arange(8), 'a*', mesh=other)
    for _ in range(2):
        with pytest.raises(EinshardError, match='committed to the devices of the mesh in another'):
            add(np.arange(8), y)
    assert add(np.arange(8), np.arange(8)).tolist() == list(range(0, 16, 2))
    with pytest.raises(EinshardError, match='in another order'):
        add(np.arange(8), y)


def test_without_a_spec_elsewhere_where_only_the_result_has_one(devices8):
    @sharded(out='a* b', mesh=devices8)
    def same(x):
        return x

    with pytest.raises(EinshardError, match='committed to 1 of the 8 devices'):
        same(jax.device_put(X, jax.devices()[12]))
    assert describe(same(X)) == 'a b -> a8 b'
