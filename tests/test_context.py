"""Mesh and axis rules in context: in cached traces, threads and tasks."""

import asyncio
import contextlib
import contextvars
import functools
import importlib.util
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from einshard import (
    TRAINING_AXES,
    EinshardError,
    Rules,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    explain,
    for_optimizer,
    from_local,
    make_sharding,
    per_device,
    sharded,
    topology,
)

MESH = Mesh(
    np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'tp'), axis_types=(AxisType.Auto,) * 2
)
X = np.arange(128, dtype=np.float32).reshape(16, 8) / 128

# Module-level functions: JAX keeps their traces by identity, from one test to the next.


def place(x):
    return einshard(x, 'batch d' if RULED else 'batch d -> batch* d')


def layer(x):
    return jnp.sin(place(x))


RULED = False


@jax.custom_vjp
def with_vjp(x):
    return layer(x)


with_vjp.defvjp(lambda x: (layer(x), x), lambda x, g: (place(g) * jnp.cos(x),))


@jax.custom_jvp
def with_jvp(x):
    return layer(x)


with_jvp.defjvp(lambda primals, tangents: (layer(*primals), place(*tangents) * jnp.cos(*primals)))


def carry_layer(carry, _):
    return layer(carry), None


def counted_layer(i, x):
    return layer(x)


def loop_layer(state):
    return state[0] + 1, layer(state[1])


def goes_on(state):
    return state[0] < 1


def kept(x):
    return x


def second(x):
    return layer(x)


nested = jax.jit(layer)
twice_nested = jax.jit(lambda x: nested(x))
rematted = jax.checkpoint(layer)
rematted_jit = jax.checkpoint(nested)

TRANSFORMED = {
    'jit': nested,
    'jit in jit': twice_nested,
    'scan': lambda x: jax.lax.scan(carry_layer, x, None, length=1)[0],
    'unrolled scan': lambda x: jax.lax.scan(carry_layer, x, None, length=2, unroll=2)[0],
    'while_loop': lambda x: jax.lax.while_loop(goes_on, loop_layer, (0, x))[1],
    'fori_loop': lambda x: jax.lax.fori_loop(0, 1, counted_layer, x),
    'map': lambda x: jax.lax.map(layer, x[None])[0],
    'cond': lambda x: jax.lax.cond(x.sum() > -1e9, layer, kept, x),
    'switch': lambda x: jax.lax.switch(jnp.int32(x.sum() > -1e9), [kept, layer, second], x),
    'checkpoint': rematted,
    'checkpoint of jit': rematted_jit,
    'custom_vjp': with_vjp,
    'custom_jvp': with_jvp,
    'vmap of jit': lambda x: jax.vmap(nested)(x[None])[0],
    'grad of jit': lambda x: jax.grad(lambda x: nested(x).sum())(x),
    'grad of checkpoint': lambda x: jax.grad(lambda x: rematted(x).sum())(x),
    'grad of scan': lambda x: jax.grad(
        lambda x: jax.lax.scan(carry_layer, x, None, length=1)[0].sum()
    )(x),
    'grad of custom_vjp': lambda x: jax.grad(lambda x: with_vjp(x).sum())(x),
    'grad of custom_jvp': lambda x: jax.grad(lambda x: with_jvp(x).sum())(x),
    'grad of jit of custom_vjp': lambda x: jax.grad(lambda x: jax.jit(with_vjp)(x).sum())(x),
    'linearize': lambda x: jax.linearize(nested, x)[1](x),
    'jacfwd': lambda x: jax.jacfwd(lambda s: nested(x * s))(1.0),
    'scan of checkpoint': lambda x: jax.lax.scan(
        lambda carry, _: (rematted(carry), None), x, None, length=1
    )[0],
    'eval_shape': lambda x: layer(x) + jax.eval_shape(nested, x).size,
}


def by_hand(name, x):
    x = np.float64(x)
    if name == 'unrolled scan':
        return np.sin(np.sin(x))
    if name == 'eval_shape':
        return np.sin(x) + x.size
    if name == 'linearize' or name == 'jacfwd':
        return np.cos(x) * x
    return np.cos(x) if name.startswith('grad') else np.sin(x)


def constraints(program):
    """The sharding of every constraint in a program, those in loops and calls included."""
    found = []
    for equation in program.jaxpr.eqns:
        if equation.primitive.name == 'sharding_constraint':
            found.append(equation.params['sharding'])
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=has_equations):
            if has_equations(inner):
                found += constraints(inner if hasattr(inner, 'jaxpr') else Closed(inner))
    return found


class Closed(NamedTuple):
    jaxpr: Any


def has_equations(node):
    return hasattr(getattr(node, 'jaxpr', node), 'eqns')


@pytest.fixture
def ruled(monkeypatch):
    """`layer` has the short form, which axis rules place."""
    monkeypatch.setattr(f'{__name__}.RULED', True)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize('name', TRANSFORMED)
def test_traces_know_the_mesh_of_the_enclosing_sharded(name):
    for n in (4, 8, 16, 4, 8):

        @sharded(mesh=jax.devices()[:n])
        def step(x):
            return TRANSFORMED[name](x)

        assert {sharding.mesh.size for sharding in constraints(step.trace(X).jaxpr)} == {n}
        y = step(X)
        np.testing.assert_allclose(y, by_hand(name, X), rtol=1e-5, atol=1e-5)
        assert len(y.sharding.device_set) == n


RULES = [('@data', 'data'), ('@tp', 'tp'), ('@(tp,data)', ('tp', 'data'))]


@pytest.mark.parametrize('around', ['jit', 'sharded'])
@pytest.mark.parametrize('name', TRANSFORMED)
def test_traces_know_the_axis_rules(name, around, ruled):
    bare = jax.jit(TRANSFORMED[name])
    made = sharded(mesh=MESH)(lambda x: TRANSFORMED[name](x))
    for rule, entry in RULES * 2:
        in_context = jax.set_mesh(MESH) if around == 'jit' else contextlib.nullcontext()
        with in_context, axis_rules(batch=rule):
            step = bare if around == 'jit' else made
            found = constraints(step.trace(X).jaxpr)
            named = {axes for sharding in found for axes in sharding.spec} - {None, P.UNCONSTRAINED}
            assert named == {entry}
            np.testing.assert_allclose(step(X), by_hand(name, X), rtol=1e-5, atol=1e-5)


@sharded('batch d -> batch* d', out='batch d -> batch* d')
def trained(x):
    return jax.lax.scan(carry_layer, x, None, length=1)[0] + nested(x)


def test_explain_on_other_devices_leaves_no_trace_behind():
    for devices in (jax.devices()[:4], jax.devices()[4:12], jax.devices()[:4]):
        assert explain(trained, X, mesh=devices).n_devices == len(devices)
        np.testing.assert_allclose(trained(X), 2 * np.sin(X), rtol=1e-5, atol=1e-5)
        assert trained(X).sharding.mesh.size == 16
        plain = explain(lambda x: trained(x) + nested(x), X, mesh=devices)
        assert plain.n_devices == len(devices)


@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='needs libtpu')
def test_explain_for_a_tpu_and_then_run():
    assert explain(trained, X, mesh=topology('v5e:4x4')).device_kind == 'TPU v5 lite'
    np.testing.assert_allclose(trained(X), 2 * np.sin(X), rtol=1e-5, atol=1e-5)


def test_per_device_in_a_cached_trace(ruled):
    @per_device('batch d', out='batch d')
    def doubled(x):
        seen.append(x.shape)
        return 2 * x

    seen = []
    step = jax.jit(lambda x: jax.lax.scan(lambda x, _: (doubled(x), None), x, None, length=1)[0])
    with jax.set_mesh(MESH):
        for rule, shape in [('@data', (4, 8)), ('@(data,tp)', (2, 8)), ('@data', (4, 8))]:
            seen.clear()
            with axis_rules(batch=rule):
                np.testing.assert_array_equal(step(X), 2 * X)
                assert set(seen) <= {shape}
                jax.make_jaxpr(step)(X)


# ---------------------------------------------------------------- how often JAX traces and compiles


@sharded('batch d', mesh=MESH)
def ruled_step(x):
    TRACED.append('sharded')
    return x + 1


@jax.jit
def bare_step(x):
    TRACED.append('jit')
    return einshard(x + 1, 'batch d', mesh=MESH)


@jax.jit
def unruled_step(x):
    TRACED.append('unruled')
    return x + 1


TRACED = []


def test_each_set_of_rules_compiles_what_is_called_under_it_once():
    TRACED.clear()
    ready = axis_rules(TRAINING_AXES, missing='replicate')
    for _ in range(3):
        for rules in (axis_rules(batch='@data'), axis_rules(batch='@tp'), ready):
            with rules:
                if rules is not ready:
                    ruled_step(X)
                bare_step(X)
                unruled_step(X)
    # the same rules, in another order, from another object, in two steps
    with axis_rules(other='', batch='@data'):
        bare_step(X)
    with axis_rules(batch='@tp', other=''), axis_rules(batch='@data'):
        bare_step(X)
    unruled_step(X)
    with axis_rules():
        unruled_step(X)
    assert TRACED.count('sharded') == 2
    assert TRACED.count('jit') == 3 + 1
    assert TRACED.count('unruled') == 3 + 1


def test_a_helper_is_traced_once_for_all_sharded_functions_on_a_mesh():
    TRACED.clear()
    jax.clear_caches()
    for _ in range(3):
        sharded(mesh=MESH)(lambda x: unruled_step(x))(X)
    assert TRACED == ['unruled']


# ------------------------------------------------------------------------------ tasks and threads


@jax.jit
def held(x):
    return einshard(x + 1, 'batch d', mesh=MESH)


@sharded(mesh=MESH)
def held_sharded(x):
    return einshard(x + 1, 'batch d')


CANONICAL = device_mesh()
AWAIT = 'axis_rules cannot span an await'


def assert_clean():
    """On the canonical mesh the short form is an error without rules, in new traces too."""
    with pytest.raises(EinshardError, match='nothing is sharded'):
        make_sharding('batch d', mesh=CANONICAL)
    with pytest.raises(EinshardError, match='nothing is sharded'):
        jax.jit(lambda x: einshard(x, 'batch d', mesh=CANONICAL))(X)
    traced = []
    jitted = jax.jit(lambda x: traced.append(1) or x)
    jitted(X)
    with axis_rules(batch='@tp'):
        assert held(X).sharding.spec == P('tp')
    jitted(X)
    assert traced == [1]


@pytest.mark.parametrize('function', [held, held_sharded], ids=['jit', 'sharded'])
@pytest.mark.parametrize('warm', [False, True])
@pytest.mark.parametrize('one_object', [False, True])
def test_two_tasks_that_hold_rules_across_an_await(function, warm, one_object):
    jax.clear_caches()
    shared = axis_rules(batch='@data')
    results = {}

    async def task(rules, entry):
        with rules:
            await asyncio.sleep(0)
            results[entry] = [function(X).sharding.spec]
            await asyncio.sleep(0)
            results[entry].append(function(X).sharding.spec)

    async def main():
        both = [shared, shared if one_object else axis_rules(batch='@tp')]
        return await asyncio.gather(
            *(task(rules, entry) for rules, entry in zip(both, 'ab', strict=True)),
            return_exceptions=True,
        )

    if warm:
        for rule in ('@data', '@tp'):
            with axis_rules(batch=rule):
                function(X)
    first, second = asyncio.run(main())
    assert first is None
    assert isinstance(second, EinshardError)
    assert str(second).startswith(AWAIT)
    assert results == {'a': [P('data')] * 2}
    assert_clean()


@pytest.mark.parametrize('function', [held, held_sharded], ids=['jit', 'sharded'])
def test_tasks_that_take_turns_and_do_not_await_inside(function):
    shared = {entry: axis_rules(batch=f'@{entry}') for entry in ('data', 'tp')}

    async def task(entry):
        for _ in range(3):
            with shared[entry]:
                assert function(X).sharding.spec == P(entry)
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(*(task(entry) for entry in ('data', 'tp', 'data')))

    asyncio.run(main())
    assert_clean()


def test_a_task_without_rules_beside_one_that_holds_them():
    jax.clear_caches()

    async def holds():
        with axis_rules(batch='@data'):
            await asyncio.sleep(0.01)
            return held(X).sharding.spec

    async def has_none():
        await asyncio.sleep(0)
        for function in (held, held_sharded, jax.checkpoint(held)):
            with pytest.raises(EinshardError, match=AWAIT):
                function(X)
        # eager calls need no trace
        assert describe(einshard(X, 'batch d -> batch@tp d', mesh=MESH)) == 'a b -> a@tp b'

    async def main():
        return (await asyncio.gather(holds(), has_none()))[0]

    assert asyncio.run(main()) == P('data')
    assert_clean()


def test_tasks_that_leave_in_another_order_than_they_entered():
    async def inner(left):
        with axis_rules(batch='@tp'):  # begun inside the rules of the other task
            await left.wait()

    async def main():
        left = asyncio.Event()
        with axis_rules(batch='@data'):
            task = asyncio.create_task(inner(left))
            await asyncio.sleep(0)
        left.set()
        await task

    with pytest.raises(EinshardError, match='must be exited in reverse order'):
        asyncio.run(main())
    assert_clean()


def test_generators_that_leave_in_another_order_than_they_entered():
    def holds(rule):
        with axis_rules(batch=rule):
            yield

    first, second = holds('@data'), holds('@tp')
    next(first)
    next(second)
    assert held(X).sharding.spec == P('tp')
    with pytest.raises(EinshardError, match='does not await or yield'):
        next(first)
    assert held(X).sharding.spec == P('tp')
    next(second, None)
    assert_clean()


def test_rules_that_another_thread_leaves():
    rules = axis_rules(batch='@data')
    raised = []

    def leave():
        try:
            rules.__exit__(None, None, None)
        except EinshardError as error:
            raised.append(error)

    with rules:
        run_in_thread(leave)
        assert held(X).sharding.spec == P('data')
    assert len(raised) == 1
    assert_clean()


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_context_copied_to_a_thread():
    jax.clear_caches()
    results = {}

    def work(name):
        results[name, 'eager'] = describe(einshard(X, 'batch d', mesh=MESH))
        results[name, 'sharded'] = [held_sharded(X).sharding.spec for _ in range(3)]
        with pytest.raises(EinshardError, match='this thread runs in a copied contextvars'):
            held(X)
        with axis_rules(d=''):  # entered here, the rules are those of the thread too
            results[name, 'jit'] = held(X).sharding.spec
        with pytest.raises(EinshardError, match='this thread runs in a copied contextvars'):
            jax.lax.map(lambda x: einshard(x, 'batch d', mesh=MESH), X[None])

    for rule in ('data', 'tp'):
        with axis_rules(batch=f'@{rule}'):
            copied = contextvars.copy_context()
            run_in_thread(lambda rule=rule, copied=copied: copied.run(work, rule))
            assert held(X).sharding.spec == P(rule)
        assert results[rule, 'eager'] == f'a b -> a@{rule} b'
        assert results[rule, 'sharded'] == [P(rule)] * 3
        assert results[rule, 'jit'] == P(rule)
    run_in_thread(assert_clean)
    assert_clean()


def test_one_object_in_many_threads():
    shared = axis_rules(batch='@data')
    other = axis_rules(batch='@tp')
    failed = []

    def work(rules, entry):
        for _ in range(50):
            with rules, rules:
                if held(X).sharding.spec != P(entry):
                    failed.append(entry)
        try:
            assert_clean()
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=work, args=args) for args in [(shared, 'data'), (other, 'tp')] * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_rules_are_left_where_the_code_inside_raises():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), axis_rules(batch='@data'), axis_rules(d='@tp'):
            jax.jit(lambda x: x / 0 if einshard(x, 'batch d', mesh=MESH) is None else 1 / 0)(X)
    with pytest.raises(ZeroDivisionError):
        sharded(mesh=MESH)(lambda x: 1 / 0)(X)
    assert_clean()


# --------------------------------------------------------------------------------- as a decorator


async def a_coroutine():
    pass


def a_generator():
    yield


async def an_asynchronous_generator():
    yield


class CallableCoroutine:
    async def __call__(self):
        pass


@pytest.mark.parametrize(
    'function',
    [
        a_coroutine,
        a_generator,
        an_asynchronous_generator,
        functools.partial(a_coroutine),
        CallableCoroutine(),
    ],
)
def test_functions_whose_body_runs_later_are_not_decorated(function):
    with pytest.raises(EinshardError, match='cannot span an await or a yield'):
        axis_rules(batch='@data')(function)


# ------------------------------------------------------------------------------ meshes in context


@pytest.mark.parametrize('axes', [('x', 'y'), ('x',)])
@pytest.mark.parametrize('of_tree', [False, True])
def test_eager_code_in_auto_axes_has_the_abstract_mesh_in_context(axes, of_tree):
    mesh = Mesh(MESH.devices, ('x', 'y'), axis_types=(AxisType.Explicit,) * 2)

    def inside(x):
        y = einshard({'w': x}, 'a b -> a@y b@x')['w'] if of_tree else einshard(x, 'a b -> a@y b@x')
        by_hand = jax.lax.with_sharding_constraint(x, P('y', 'x')) if len(axes) == 2 else y
        assert y.sharding == by_hand.sharding
        assert y.sharding.mesh.axis_types == jax.sharding.get_abstract_mesh().axis_types
        assert einshard(y, 'a b -> a@y b@x') is y
        host = einshard(np.ones((16, 8), np.float32), 'a b -> a@y b@x')
        doubled = sharded('a b -> a@y b@x')(lambda x: 2 * x)(y)
        return x + y + host + doubled

    with jax.set_mesh(mesh):
        x = einshard(X, 'a b -> a@x b')
        result = jax.sharding.auto_axes(inside, axes=axes, out_sharding=P('x', 'y'))(x)
        assert jax.typeof(result).sharding.spec == P('x', 'y')
        assert describe(einshard(result, 'a b -> a@y b')) == 'a b -> a@y b'
    np.testing.assert_allclose(result, 4 * X + 1, rtol=1e-6)


def test_eager_code_in_explicit_axes_has_the_abstract_mesh_in_context():
    def inside(x):
        y = einshard(x, 'a b -> a@tp b@data')
        assert jax.typeof(y).sharding.spec == P('tp', 'data')
        return y + 1

    with jax.set_mesh(MESH):
        f = jax.sharding.explicit_axes(inside, axes=('data', 'tp'), in_sharding=P('data', 'tp'))
        np.testing.assert_array_equal(f(jnp.asarray(X)), X + 1)


def test_another_abstract_mesh_in_context():
    other = AbstractMesh((2, 4), ('u', 'v'))
    with jax.set_mesh(MESH), jax.sharding.use_abstract_mesh(other):
        assert make_sharding('a b -> a@u b@v').mesh == other


# ------------------------------------------------------------------------- a mesh given as a spec


@pytest.mark.parametrize('mesh', [MESH, MESH.abstract_mesh], ids=['mesh', 'abstract'])
@pytest.mark.parametrize(
    'call',
    [
        lambda mesh: einshard(X, mesh),
        lambda mesh: jax.jit(lambda x: einshard(x, mesh))(X),
        lambda mesh: einshard({'w': X}, {'w': mesh}),
        lambda mesh: einshard({'w': X}, lambda path, leaf: mesh),
        lambda mesh: sharded(mesh)(lambda x: x),
        lambda mesh: sharded(x=mesh)(lambda x: x),
        lambda mesh: sharded(out=mesh)(lambda x: x),
        lambda mesh: per_device(mesh, out='...')(lambda x: x),
        lambda mesh: Rules([('w', mesh)]),
        lambda mesh: einshard({'w': X}, Rules([('w', lambda path, leaf: mesh)])),
        lambda mesh: for_optimizer({'w': X}, mesh),
        lambda mesh: from_local(X, mesh),
    ],
)
def test_a_mesh_is_not_a_spec(call, mesh):
    with pytest.raises(EinshardError, match=r'Mesh\(.*is not a spec'):
        call(mesh)


def test_the_error_for_a_mesh_says_where_it_goes():
    for mesh in (MESH, MESH.abstract_mesh, jax.devices()):
        with pytest.raises(EinshardError) as caught:
            einshard(X, mesh)
        call = caught.value.facts['instead'].partition(': ')[2]
        assert call == "einshard(x, 'b d -> b* d', mesh=mesh)"
        if mesh is not MESH.abstract_mesh:
            eval(call, {'einshard': einshard, 'x': X, 'mesh': mesh})
