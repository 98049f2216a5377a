"""expect_collectives: which programs it checks, when, and its errors and warnings."""

import threading
from contextlib import nullcontext

import counting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import EinshardError, UnexpectedCollectives, expect_collectives, explain, sharded

MESH = mesh_of(data=4, tp=2)
LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'  # an event of JAX
X = np.ones((8, 64), np.float32)
ON_MESH = NamedSharding(MESH, P('data', 'tp'))


def total(x):
    return x.sum()


def double(x):
    return x * 2


@pytest.fixture
def x():
    return jax.device_put(X, ON_MESH)


def test_allowed_collectives_pass(x):
    with expect_collectives('all-reduce'):
        assert jax.jit(total)(x) == X.sum()
    with expect_collectives({'all-reduce': 2}):  # one for each mesh axis
        assert jax.jit(total)(x) == X.sum()
    with expect_collectives(()):
        np.testing.assert_array_equal(jax.jit(double)(x), X * 2)


def test_all_functions_of_the_block_are_checked(x):
    step = sharded('b d -> b@data d@tp', mesh=MESH)(total)
    for call in (
        lambda: step(x),
        lambda: jax.jit(total)(x),
        lambda: x.sum(),
        lambda: jax.jit(total).lower(x).compile()(x),
        lambda: jax.grad(lambda w: (x @ w).sum())(jnp.ones((64, 2))),
    ):
        with pytest.raises(UnexpectedCollectives), expect_collectives(()):
            call()
        with expect_collectives('all-reduce'):
            call()


def test_an_error_comes_before_the_program_runs_and_again_at_each_call(x):
    ran = []

    @jax.jit
    def f(x):
        jax.debug.callback(ran.append, x.sum())
        return x

    with expect_collectives(()):
        for _ in range(2):
            with pytest.raises(UnexpectedCollectives, match='f has unexpected collectives'):
                f(x)
    jax.effects_barrier()
    assert not ran


def test_a_function_that_was_called_before_the_block(x):
    f = jax.jit(total)
    f(x)
    with pytest.raises(UnexpectedCollectives), expect_collectives(()):
        f(x)
    f(x)


def test_equal_blocks_share_programs(x):
    body = counting.counted(total)
    f = jax.jit(body)
    for _ in range(3):
        with expect_collectives(['all-reduce', 'all-gather']):
            f(x)
        with expect_collectives(('all-gather', 'all-reduce')):
            f(x)
    assert body.runs == 1


def test_warnings(x):
    f = jax.jit(total)
    with expect_collectives((), on_unexpected='warn'):
        with pytest.warns(UserWarning, match='total has unexpected collectives') as caught:
            f(x)
        assert caught[0].filename == __file__
        assert f(x) == X.sum()  # once for each program: pytest turns warnings into errors


def test_the_inner_block_applies(x):
    f = jax.jit(total)
    with expect_collectives(()):
        with expect_collectives('all-reduce'):
            f(x)
        with pytest.raises(UnexpectedCollectives):
            f(x)


def test_each_thread_has_its_own_promise(x, in_threads):
    f = jax.jit(total)
    both_entered, all_called = threading.Barrier(3), threading.Barrier(3)

    def run(i):
        try:
            with [expect_collectives('all-reduce'), expect_collectives(()), nullcontext()][i]:
                both_entered.wait(60)
                return float(f(x))
        except UnexpectedCollectives:
            return 'unexpected'
        finally:
            all_called.wait(60)

    assert in_threads(3, run) == [X.sum(), 'unexpected', X.sum()]


@pytest.mark.parametrize('promise', [(), 'all-reduce'])
def test_a_program_of_the_same_name_in_another_thread(x, promise, in_threads):
    """The other thread compiles while this one has lowered, but not yet compiled."""

    def compile_other(_):
        def step(x):
            return x.sum()

        with nullcontext() if promise == () else expect_collectives(promise):
            jitted = jax.jit(step)
            return jitted, float(jitted(x))  # the function keeps its program in memory

    def step(x):
        return x * 2

    def listen(event, duration, **fields):
        if event == LOWERED and threading.current_thread() is this_thread:
            others.extend(in_threads(1, compile_other))

    others, this_thread = [], threading.current_thread()
    older = jax.jit(double)
    older(x)  # else, no programs are loaded, and only the newest one would be checked
    with expect_collectives(()):
        # after the listener of the block, so that this one is called later
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            np.testing.assert_array_equal(jax.jit(step)(x), X * 2)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert [result for _, result in others] == [X.sum()]


def test_one_object_in_several_threads_and_again(x, in_threads):
    promise = expect_collectives('all-reduce')

    def run(_):
        with promise, promise:
            return float(jax.jit(total)(x))

    assert [*in_threads(2, run), run(0)] == [X.sum()] * 3


def test_promises_of_functions_still_hold(x):
    f = sharded('b d -> b@data d@tp', mesh=MESH, collectives=())(total)
    with expect_collectives('all-reduce'), pytest.raises(UnexpectedCollectives):
        f(x)
    g = sharded('b d -> b@data d@tp', mesh=MESH, collectives='all-reduce')(total)
    g(x)
    with expect_collectives(()), pytest.raises(UnexpectedCollectives):
        g(x)
    assert g(x) == X.sum()


def test_explain_in_a_block(x):
    with expect_collectives(()), pytest.raises(UnexpectedCollectives):
        explain(jax.jit(total), x)
    with expect_collectives('all-reduce'):
        assert explain(jax.jit(total), x).collectives.counts == {'all-reduce': 2}


def train_step(mesh):
    """A scan over layers with remat, and Adam; the batch is sharded over all devices."""
    tx = optax.adam(1e-2)

    def loss(w, x):
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        h, _ = jax.lax.scan(layer, x, w)
        return (h**2).mean()

    @jax.jit
    def step(w, state, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(w, updates), state, value

    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    w = jax.device_put(np.full((3, 8, 8), 0.1, np.float32), replicated)
    state = jax.device_put(tx.init(w), replicated)
    return step, (w, state, jax.device_put(np.ones((16, 8), np.float32), rows))


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('sizes', [{'data': 8}, {'data': 4, 'tp': 2}])
def test_a_train_step(types, sizes):
    mesh = mesh_of(types=types, **sizes)
    step, arguments = train_step(mesh)
    with jax.set_mesh(mesh), expect_collectives('all-reduce'):
        first = step(*arguments)
        step(*first[:2], arguments[2])
    with (
        jax.set_mesh(mesh),
        pytest.raises(UnexpectedCollectives, match='step has unexpected'),
        expect_collectives(['all-gather', 'reduce-scatter']),
    ):
        step(*arguments)


def test_a_program_from_the_persistent_cache(x, persistent_cache):
    jax.jit(total)(x)
    jax.clear_caches()
    with pytest.raises(UnexpectedCollectives), expect_collectives(()):
        jax.jit(total)(x)


def test_blocks_that_are_not_checked_are_errors(x):
    with (
        pytest.raises(EinshardError, match='the collectives of this block were not checked'),
        expect_collectives(()),
    ):
        jax.monitoring.clear_event_listeners()
    counting.listen()  # other tests count
    with pytest.raises(UnexpectedCollectives), expect_collectives(()):  # registered again
        jax.jit(total)(x)


def test_exits_out_of_order(x):
    f = jax.jit(total)
    f(x)
    outer, inner = expect_collectives(()), expect_collectives({'all-reduce': 0})
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(EinshardError, match='innermost first'):
        outer.__exit__(None, None, None)
    with pytest.raises(UnexpectedCollectives):
        f(x)
    inner.__exit__(None, None, None)
    f(x)
    with pytest.raises(EinshardError, match='innermost first'):
        inner.__exit__(None, None, None)
    with pytest.raises(UnexpectedCollectives), expect_collectives(()):  # no key is left behind
        f(x)
