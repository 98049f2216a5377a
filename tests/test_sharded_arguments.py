"""sharded: arguments with other placements than their spec, at the first call and later."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, counting
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import COLUMNS, EIGHT, MOVED, NAMED, REFUSED, REPLICATED, ROWS, mesh_of
from refusal import refusal

from einshard import Rules, Sharded, describe, einshard, make_sharding, sharded

X = np.arange(64, dtype=np.float32).reshape(8, 8)
ON_ROWS, ON_COLUMNS = (make_sharding(text, mesh=EIGHT) for text in (ROWS, COLUMNS))
UNORDERED = [EIGHT[i] for i in (3, 1, 7, 0, 2, 4, 6, 5)]


def plus(x, y=0.0):
    return x + y + 1


def placed(spec, mesh=EIGHT):
    return einshard(X, spec, mesh=mesh)


MISPLACED = placed(ROWS, jax.devices()[8:])


@pytest.fixture(params=[False, True], ids=['first call', 'later call'])
def f(request):
    """A sharded function before or after its first call."""
    function = sharded(ROWS, None, out=COLUMNS, mesh=EIGHT)(plus)
    if request.param:
        function(X)
        function(placed(ROWS))
        function(X, X)
    return function


@pytest.mark.parametrize('kind', MOVED)
def test_unsharded_arrays_are_placed(kind, f):
    for call in (f, lambda x: f(x=x), lambda x: f(x, y=0.0)):
        x = MOVED[kind](X)
        result = call(x)
        np.testing.assert_array_equal(result, X + 1)
        assert result.sharding == ON_COLUMNS
        np.testing.assert_array_equal(x, X)  # not deleted


@pytest.mark.parametrize('kind', REFUSED)
def test_arrays_sharded_differently_are_errors(kind, f):
    x = REFUSED[kind](X)
    for call in (f, lambda x: f(x=x), f.lower, lambda x: f.lower(x=x), f.trace):
        error = refusal(call, x)
        assert error.sentence.startswith('the argument is already sharded differently')
        assert error.facts['array'] == "float32[8,8], parameter 'x' of plus"
        assert 'a b -> a* b' in str(error)
    np.testing.assert_array_equal(x, X)
    # and the function is as it was
    np.testing.assert_array_equal(f(X), X + 1)


def test_rows_in_another_order_of_devices():
    """jit reorders such an array at its first call, and fails at the second."""
    f = sharded(ROWS, out=COLUMNS, mesh=EIGHT)(plus)
    f.lower(X)
    for _ in range(2):
        x = placed('a@p b', mesh_of(EIGHT[::-1], p=8))
        assert 'is already sharded differently' in refusal(f, x).sentence


def test_another_mesh_with_the_same_axes():
    mesh, backwards, others = (
        mesh_of(devices, p=8) for devices in (EIGHT, EIGHT[::-1], jax.devices()[8:])
    )
    with jax.set_mesh(mesh):
        sentence = 'the argument is sharded as its spec says, but in a different device order'
        f = sharded('a@p b')(plus)
        assert refusal(f, placed('a@p b', backwards)).sentence == sentence
        error = refusal(sharded('a@p b')(plus), placed('a@p b', others))
    assert error.sentence == (
        "the argument is on devices outside the mesh, sharded as 'a b -> a@p b'"
    )
    assert error.facts['outside the mesh'].startswith('cpu:8, cpu:9')


@pytest.mark.parametrize('donated', [(), 0])
@pytest.mark.parametrize('kind', [*MOVED, *REFUSED])
def test_reshard_moves_all_of_them(kind, donated):
    f = sharded(ROWS, out=ROWS, mesh=EIGHT, reshard=True, donate_argnums=donated)(plus)
    for _ in range(2):
        x = {**MOVED, **REFUSED}[kind](X)
        result = f(x)
        np.testing.assert_array_equal(result, X + 1)
        assert result.sharding == ON_ROWS
        if donated == ():
            np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(X, np.arange(64).reshape(8, 8))


def test_traces_and_compilations_for_all_placements():
    """jit traces again for arguments on other meshes, even if it then rejects them."""
    found = []
    for is_ours in (True, False):
        jax.clear_caches()
        body = counted(plus)
        ours = sharded(ROWS, out=COLUMNS, mesh=EIGHT, reshard=True)
        theirs = jax.jit(body, in_shardings=ON_ROWS, out_shardings=ON_COLUMNS)
        f = ours(body) if is_ours else theirs
        with counting() as counts:
            for make in [*MOVED.values(), *REFUSED.values()]:
                with contextlib.nullcontext() if is_ours else contextlib.suppress(ValueError):
                    f(make(X))
        found.append((body.runs, counts.of('plus')[1]))
    (our_runs, our_compiles), (their_runs, their_compiles) = found
    assert our_runs <= their_runs
    assert our_compiles <= their_compiles


def test_leaves_with_different_placements():
    f = sharded(ROWS, mesh=EIGHT)(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    tree = {kind: make(X) for kind, make in MOVED.items()}
    for result in f(tree).values():
        np.testing.assert_array_equal(result, X + 1)
    error = refusal(f, {'layers': [{'w': X}, {'w': placed(COLUMNS)}]})
    assert error.facts['array'] == "float32[8,8], parameter 'tree/layers/1/w' of <lambda>"


# ------------------------------------------------------------------- arguments without a spec


@pytest.mark.parametrize('y', [X, jnp.asarray(X), 1.0, *map(placed, (COLUMNS, REPLICATED, ROWS))])
def test_an_argument_without_a_spec_may_be_anywhere_on_the_mesh(y, f):
    np.testing.assert_array_equal(f(X, y), X + np.asarray(y) + 1)


@pytest.mark.parametrize(
    ('y', 'where'),
    [
        (placed(ROWS, EIGHT[:4]), '4 '),
        (jax.device_put(X, EIGHT[3]), '1 '),
        (placed(REPLICATED, jax.devices()), 'devices outside the mesh'),
        (placed('a@p b', mesh_of(UNORDERED, p=8)), 'the devices of the mesh in a different order'),
    ],
)
def test_an_argument_without_a_spec_on_other_devices_is_refused(y, where, f):
    for _ in range(2):
        error = refusal(f, X, y)
        assert error.sentence.startswith(f"argument 'y' has no spec and is committed to {where}")
        assert error.facts['array'] == "float32[8,8], parameter 'y' of plus"
    np.testing.assert_array_equal(f(X, X), 2 * X + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: jax.Array

    def forward(self, x):
        return x + self.w


@pytest.mark.parametrize(
    ('function', 'args', 'kwargs'),
    [
        (lambda x, y: x, (X, MISPLACED), {}),
        (lambda x, *y: x, (X, X, MISPLACED), {}),
        (lambda x, /, **y: x, (X,), {'x': MISPLACED}),
        (lambda x, **y: x, (X,), {'z': MISPLACED}),
    ],
)
def test_the_fix_for_an_argument_on_other_devices_works(function, args, kwargs):
    error = refusal(sharded(ROWS, y=None, mesh=EIGHT)(function), *args, **kwargs)
    text = "'... -> * ...' instead of None, and reshard=True, in the decorator, to replicate it"
    assert error.facts['try'] == text
    fixed = sharded(ROWS, y='... -> * ...', reshard=True, mesh=EIGHT)(function)
    found = fixed(*args, **kwargs)
    assert found.sharding == ON_ROWS


@pytest.mark.parametrize('x', [MISPLACED, placed('a@p b', mesh_of(UNORDERED, p=8))])
def test_a_leaf_without_a_spec_on_other_devices_is_refused(x):
    for spec in ({'w': ROWS, 'b': None}, Rules([('w', ROWS), ('b', None)])):
        f = sharded(spec, mesh=EIGHT)(lambda p: p['w'] + p['b'])
        error = refusal(f, {'w': X, 'b': x})
        assert error.sentence.startswith("argument 'p/b' has no spec and is committed to")
        np.testing.assert_array_equal(f({'w': X, 'b': X}), 2 * X)
        assert str(refusal(f, {'w': X, 'b': x})) == str(error)
    assert error.facts['try'].startswith("'... -> * ...' instead of None, and reshard=True, in")
    fixed = sharded({'w': ROWS, 'b': '... -> * ...'}, reshard=True, mesh=EIGHT)(f.__wrapped__)
    np.testing.assert_array_equal(fixed({'w': X, 'b': x}), X + np.asarray(x))


def test_the_fix_for_a_method_of_an_object_on_other_devices_works():
    forward = sharded(ROWS, out=ROWS, mesh=EIGHT)(Layer.forward)
    error = refusal(forward, Layer(MISPLACED), X)
    fix, _, _ = error.facts['try'].partition(' before ')
    moved = eval(fix.replace('...)', 'EIGHT)'), {**globals(), 'self': Layer(MISPLACED)})
    assert forward(moved, X).sharding == ON_ROWS


def test_the_fix_for_an_annotated_function_keeps_the_annotations():
    @sharded(mesh=EIGHT)
    def f(x: Sharded[jax.Array, ROWS], y: jax.Array) -> Sharded[jax.Array, ROWS]:
        return x + y

    y = MISPLACED
    fix, _, _ = refusal(f, X, y).facts['try'].partition(' before ')
    assert f(X, eval(fix.replace('...)', 'EIGHT)'))).sharding == ON_ROWS


def test_a_mesh_with_out_alone():
    f = sharded(out=ROWS, mesh=EIGHT)(plus)
    for x in (X, placed(COLUMNS)):
        assert f(x).sharding == ON_ROWS
    for x in (placed(ROWS, EIGHT[:4]), jax.device_put(X, jax.devices()[12])):
        assert 'has no spec and is committed to' in refusal(f, x).sentence


def test_specs_of_none_leave_the_devices_to_the_arguments():
    for device in (EIGHT[3], EIGHT[4]):
        x = jax.device_put(X, device)
        f = sharded((None, None), None, out=(None, {'sum': None}), mesh=EIGHT)(
            lambda pair, y: (y, {'sum': pair[0] + pair[1] + y})
        )
        for call in (f, f, jax.jit(f)):
            (_, found) = call((x, x), x)
            np.testing.assert_array_equal(found['sum'], 3 * X)
            assert found['sum'].devices() == {device}


# ------------------------------------------------------------------------ arrays that do not fit


@pytest.mark.parametrize(
    ('shape', 'text'),
    [
        ((6, 8), "axis 'a' (size 6) is not divisible by 8"),
        ((8,), 'the expression names 2 axes, but the array has 1'),
        ((8, 8, 8), 'the expression names 2 axes, but the array has 3'),
    ],
)
def test_arrays_that_do_not_fit(shape, text, f):
    x = np.ones(shape, np.float32)
    for call in (lambda: f(x), lambda: f(jnp.asarray(x)), lambda: f.lower(x=x)):
        error = refusal(call)
        assert error.sentence.startswith(text)
        assert "parameter 'x' of plus" in error.facts['array']


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
    assert str(refusal(f, argument)) == str(refusal(f, x=argument))


@pytest.mark.parametrize('later', [False, True])
@pytest.mark.parametrize('out', [ROWS, '... b -> ... b*'])
def test_results_that_do_not_fit(out, later):
    f = sharded(None, out=out, mesh=EIGHT)(lambda x: x if x.shape == (8, 8) else x[:6, :6])
    if later:
        f(X)
    error = refusal(f, np.ones((9, 9), np.float32))
    assert 'is not divisible by 8' in error.sentence
    assert error.facts['array'] == 'float32[6,6], result of <lambda>'


def test_an_array_that_is_deleted(f):
    x = placed(ROWS)
    x.delete()
    with pytest.raises(RuntimeError, match='deleted'):
        f(x)


# ------------------------------------------------------------- one function after the other


def test_results_of_one_are_arguments_of_another():
    """Equal placements in other spellings: no transfer, no retrace."""
    body = counted(lambda x: x)
    forward = sharded('a b -> a2 b4', out='i j -> i2 j* ', mesh=EIGHT)(body)
    back = sharded('rows columns -> rows2 columns4', out='a b -> a2 b4', mesh=EIGHT)(body)
    x = placed('a b -> a2 b*')
    for _ in range(3):
        x = back(forward(x))
    assert body.runs == 2
    assert x.sharding == make_sharding('a b -> a2 b4', mesh=EIGHT)
    np.testing.assert_array_equal(x, X)


def test_several_in_one_jit():
    first = sharded('a b -> a8 b', out='a b -> b8 a', mesh=EIGHT)(lambda x: jnp.sin(x))
    second = sharded('a b -> a2 2 b2', out='a b -> b2 a4', mesh=EIGHT)(lambda x: jnp.cos(x))
    third = sharded('a b -> 2 a4 b', mesh=EIGHT[::-1])(lambda x: 2 * x)
    found = jax.jit(lambda x: third(second(first(x))) + first(second(x)))(X)
    expected = 2 * np.cos(np.sin(X)) + np.sin(np.cos(X))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_canonical_arrays_under_a_mesh_in_context():
    """An equivalent sharding on another mesh of the same devices."""
    x = placed(ROWS)
    f = sharded(ROWS, out=ROWS)(plus)
    with jax.set_mesh(NAMED):
        result = f(x)
        assert result.sharding == NamedSharding(NAMED, P(('p', 'q')))
        np.testing.assert_array_equal(f(result), X + 2)
        for given in (x, X, jnp.asarray(X)):
            np.testing.assert_array_equal(f(given), X + 1)


# ------------------------------------------------------------------- defaults that are arrays


@pytest.mark.parametrize('size', [8, 6])
def test_a_default_is_placed_by_its_spec(size):
    default = np.ones(size)

    @sharded(x=None, y='a*', mesh=EIGHT)
    def f(x, y=default):
        return y

    for call in (lambda: f(X), lambda: f(x=X)) * 2:
        if size == 8:
            assert describe(call()) == 'a -> a8'
        else:
            assert 'is not divisible by 8' in refusal(call).sentence
        assert describe(f(X, np.zeros(16))) == 'a -> a8'


@pytest.mark.parametrize('default', [np.ones(8), einshard(np.ones(8), 'a -> a8', mesh=EIGHT)])
def test_a_default_of_a_positional_only_parameter_is_placed_by_its_spec(default):
    @sharded(v=None, w='a*', x='a*', y='a*', z='a*', mesh=EIGHT)
    def f(v, w=default, x=default, /, y=0.0, z=default):
        return w, x, z

    calls = [(0.0,), (0.0, X[:, 0]), (0.0, default, default)]
    for args in calls:
        for results in (f(*args), f.lower(*args).compile()(*args), f(*args, z=default)):
            assert [describe(x) for x in results] == ['a -> a8'] * 3


def test_a_default_is_not_donated():
    default = einshard(np.ones(8), 'a*', mesh=EIGHT)
    f = sharded('a*', mesh=EIGHT, donate_argnums=0)(lambda x=default: x + 1)
    for call in (f, f, f.lower().compile()):
        np.testing.assert_array_equal(call(), 2 * np.ones(8))
    given = einshard(np.ones(8), 'a*', mesh=EIGHT)
    f(given)
    assert (default.is_deleted(), given.is_deleted()) == (False, True)
