"""collectives= where several threads call, in per_device, and in eager transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import listen

from einshard import (
    EinshardError,
    MemoryExceeded,
    UnexpectedCollectives,
    einshard,
    expect_collectives,
    per_device,
    sharded,
)

# threads meet in another order each time
TURNS = [0, 1, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(2, 5))]
EIGHT = jax.devices()[:8]
X = np.ones((8, 64), np.float32)
NARROW, WIDE = np.ones((8, 8), np.float32), np.ones((8, 16), np.float32)


@pytest.fixture
def together(in_threads):
    """A function that returns the results or errors of n calls that start together."""

    def outcome(call, i):
        try:
            return np.asarray(call(i))
        except EinshardError as error:
            return error

    return lambda n, call: in_threads(n, functools.partial(outcome, call))


def broken_if_wide():
    def gathers(x):
        return einshard(x, '* a b') if x.shape[1] > 8 else x + 1

    return sharded('a* b', mesh=EIGHT, collectives=())(gathers)


@pytest.mark.parametrize('called_before', [False, True])
@pytest.mark.parametrize('turn', TURNS)
def test_one_new_shape_in_many_threads(turn, called_before, together):
    f = broken_if_wide()
    if called_before:
        f(NARROW)
    for _ in range(2):
        outcomes = together(4, lambda i: f(WIDE) if i % 2 else f(x=WIDE))
        assert set(map(type, outcomes)) == {UnexpectedCollectives}, outcomes


@pytest.mark.parametrize('called_before', [False, True])
@pytest.mark.parametrize('turn', TURNS)
def test_new_shapes_in_many_threads(turn, called_before, together):
    f = broken_if_wide()
    if called_before:
        f(np.ones((8, 4), np.float32))
    for _ in range(2):
        outcomes = together(6, lambda i: f((WIDE, NARROW, WIDE[:, :12])[i % 3]))
        for i, outcome in enumerate(outcomes):
            if i % 3 == 1:
                np.testing.assert_array_equal(outcome, NARROW + 1)
            else:
                assert isinstance(outcome, UnexpectedCollectives), outcome


def test_placements_without_a_spec_in_many_threads(together):
    f = sharded('a* b', None, mesh=EIGHT, collectives=())(lambda x, w: x @ w)
    w = np.ones((64, 16), np.float32)
    replicated, rows = (einshard(w, spec, mesh=EIGHT) for spec in ('* y z', 'y* z'))
    for _ in range(2):
        outcomes = together(6, lambda i: f(X, rows if i % 2 else replicated))
        for i, outcome in enumerate(outcomes):
            if i % 2:
                assert isinstance(outcome, UnexpectedCollectives), outcome
            else:
                np.testing.assert_array_equal(outcome, X @ w)


def test_a_program_that_fails_is_read_when_it_runs_later():
    fail = [True]

    def checked(x):
        if fail[0]:
            raise KeyError('not yet')

    def body(x):
        jax.debug.callback(checked, 0)
        return einshard(x, '* a b') if x.shape[1] > 8 else x + 1

    f = sharded('a* b', mesh=EIGHT, collectives=())(body)
    fail[0] = False
    f(NARROW)
    for _ in range(2):
        with pytest.raises(UnexpectedCollectives):
            f(WIDE)


# --------------------------------------------------- no program runs before it has been checked


def gathering(ran, wide=8):
    """A function that records the shapes of its runs, and gathers arrays wider than `wide`."""

    def body(x):
        jax.debug.callback(lambda: ran.append(x.shape))
        return einshard(x, '* a b') if x.shape[1] > wide else x + 1

    return sharded('a* b', mesh=EIGHT, collectives=())(body)


def test_a_program_for_a_new_shape_is_checked_before_it_runs():
    ran = []
    f = gathering(ran)
    for x in (NARROW, WIDE, WIDE, NARROW, WIDE):
        if x is NARROW:
            f(x)
        else:
            with pytest.raises(UnexpectedCollectives, match='1 all-gather'):
                f(x)
    jax.effects_barrier()
    assert set(ran) == {NARROW.shape}
    too_large = sharded('a* b', mesh=EIGHT, memory='1 KiB')(lambda x: ran.append(x.shape) or x + 1)
    too_large(NARROW)
    with pytest.raises(MemoryExceeded):
        too_large(np.ones((64, 64), np.float32))


@pytest.mark.parametrize('called_before', [False, True])
@pytest.mark.parametrize('turn', TURNS)
def test_no_thread_runs_a_program_before_it_is_checked(turn, called_before, together):
    ran = []
    f = gathering(ran)
    if called_before:
        f(NARROW)
    for _ in range(2):
        outcomes = together(6, lambda i: f((WIDE, NARROW, WIDE)[i % 3]))
        assert [type(x) is UnexpectedCollectives for x in outcomes] == [True, False, True] * 2
    jax.effects_barrier()
    assert set(ran) == {NARROW.shape}


def test_functions_of_one_name_in_many_threads(together):
    """A program is found by its name, so others of this name must not be taken for it."""
    ran = []
    for _ in range(3):
        allowed, refused = gathering(ran, wide=100), gathering(ran, wide=0)
        outcomes = together(6, lambda i: (allowed, refused)[i % 2](WIDE))  # noqa: B023
        for i, outcome in enumerate(outcomes):
            if i % 2:
                assert type(outcome) is UnexpectedCollectives
            else:
                np.testing.assert_array_equal(outcome, WIDE + 1)


def test_programs_compiled_while_a_function_is_traced_are_not_its_own():
    def body(x):
        with jax.ensure_compile_time_eval():
            jax.block_until_ready(inner(einshard(NARROW, 'a* b', mesh=EIGHT)))
        return x + 1

    @jax.jit
    def inner(x):
        return x.sum()

    inner.__name__ = 'body'
    f = sharded('a* b', mesh=EIGHT, collectives=())(body)
    for x in (NARROW, WIDE):
        np.testing.assert_array_equal(f(x), x + 1)


def test_limits_and_expect_collectives_both_check():
    f = sharded('a* b', out='* a b', mesh=EIGHT, collectives='all-gather')(lambda x: x + 1)
    f(NARROW)
    with pytest.raises(UnexpectedCollectives), expect_collectives(()):
        f(WIDE)
    with expect_collectives('all-gather'):
        f(WIDE)
    refused = sharded('a* b', out='* a b', mesh=EIGHT, collectives=())(lambda x: x + 1)
    with expect_collectives('all-gather'), pytest.raises(UnexpectedCollectives):
        refused(WIDE)


@pytest.mark.parametrize('cleared', ['before', 'between'])
def test_without_the_events_of_jax(cleared, request):
    """Another version may report compilations by another name, or a user clears listeners."""
    if cleared == 'before':
        request.getfixturevalue('without_events')
    ran = []
    f = gathering(ran)
    if cleared == 'between':
        f(NARROW)
        jax.monitoring.clear_event_listeners()
        listen()  # other tests count
    for _ in range(2):
        with pytest.raises(UnexpectedCollectives):
            f(WIDE)
    jax.effects_barrier()
    assert (WIDE.shape in ran) == (cleared == 'between')  # then before the result is returned
    f(NARROW)


# ------------------------------------------------------------------------------------ per_device


def test_per_device_checks_collectives(together):
    def body(x):
        return jax.lax.psum(x.sum(), 'a')

    for promise in ('all-reduce', {'all-reduce': 1}, ['all-reduce', 'all-gather']):
        f = per_device('a* b', out='-> *', mesh=EIGHT, collectives=promise)(body)
        for _ in range(2):
            assert float(f(X)) == X.size
    f = per_device('a* b', out='-> *', mesh=EIGHT, collectives=())(body)
    for call in (lambda: f(X), lambda: f(x=X), lambda: f(X)):
        with pytest.raises(UnexpectedCollectives, match='body has unexpected collectives'):
            call()
    outcomes = together(4, lambda i: f(X))
    assert set(map(type, outcomes)) == {UnexpectedCollectives}


def test_per_device_methods_and_results_that_need_ranks():
    class Layer:
        @per_device(x='a* b', out='a* ...', mesh=EIGHT, collectives=())
        def __call__(self, x):
            return jax.lax.all_gather(x, 'a', tiled=True)[:1] if x.shape[1] > 8 else x + 1

    jax.tree_util.register_pytree_node(Layer, lambda _: ((), None), lambda *_: Layer())
    np.testing.assert_array_equal(Layer()(NARROW), NARROW + 1)
    with pytest.raises(UnexpectedCollectives, match='1 all-gather'):
        Layer()(WIDE)


def test_invalid_kind_in_per_device():
    with pytest.raises(EinshardError, match='all-reduced'):
        per_device('a*', out='a*', collectives='all-reduced')(lambda x: x)


# ---------------------------------------------------------------------------- eager transformations

EAGER = {
    'grad': lambda f: jax.grad(lambda x: f(x).sum())(X),
    'vmap': lambda f: jax.vmap(f)(X[None]),
    'jvp': lambda f: jax.jvp(f, (X,), (X,)),
    'linearize': lambda f: jax.linearize(f, X),
    'vjp': lambda f: jax.vjp(f, X),
}


@pytest.mark.parametrize('called_before', [False, True])
@pytest.mark.parametrize('how', EAGER)
def test_an_eager_transformation_warns_once(how, called_before):
    def doubled(x):
        return 2 * x

    f = sharded('a* b', out='a* b', mesh=EIGHT, collectives=())(doubled)
    if called_before:
        f(X)
    with pytest.warns(UserWarning, match='is not checked') as caught:
        EAGER[how](f)
    (warning,) = caught
    assert 'sharded(..., collectives=...)(jax.grad(doubled))' in str(warning.message)
    assert warning.filename == __file__
    for again in EAGER.values():
        again(f)  # pytest turns warnings into errors
    f(X)


def test_per_device_warns_too():
    f = per_device('a* b', out='a* b', mesh=EIGHT, collectives=())(lambda x: 2 * x)
    with pytest.warns(UserWarning, match='is not checked'):
        jax.grad(lambda x: f(x).sum())(X)


def test_a_gradient_with_a_limit_is_checked():
    energy = sharded('a* b', mesh=EIGHT, collectives=())(lambda x: (jnp.sin(x) ** 2).sum())
    gradient = sharded('a* b', mesh=EIGHT, collectives=(), out='* a b')(jax.grad(energy))
    with pytest.raises(UnexpectedCollectives):
        gradient(X)
