"""Mesh and axis rules in context: in cached traces, threads and tasks."""

import asyncio
import contextlib
import contextvars
import functools
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from placed import mesh_of
from refusal import refusal

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
)

MESH = mesh_of(data=4, tp=2)
X = np.arange(128, dtype=np.float32).reshape(16, 8) / 128


def transformed(place):
    """{name: (a function around a layer of sines placed by `place`, its value by numpy)}."""

    def layer(x):
        return jnp.sin(place(x))

    @jax.custom_vjp
    def with_vjp(x):
        return layer(x)

    with_vjp.defvjp(lambda x: (layer(x), x), lambda x, g: (place(g) * jnp.cos(x),))

    @jax.custom_jvp
    def with_jvp(x):
        return layer(x)

    with_jvp.defjvp(
        lambda primals, tangents: (layer(*primals), place(*tangents) * jnp.cos(*primals))
    )

    def scanned(x, **options):
        return jax.lax.scan(step, x, None, **options)[0]

    def step(carry, _):
        return layer(carry), None

    def rematted_step(carry, _):
        return rematted(carry), None

    def kept(x):
        return x

    def second(x):
        return layer(x)

    def looped(x):
        return jax.lax.while_loop(goes_on, loop_step, (0, x))[1]

    def goes_on(state):
        return state[0] < 1

    def loop_step(state):
        return state[0] + 1, layer(state[1])

    def counted_step(i, x):
        return layer(x)

    nested, rematted = jax.jit(layer), jax.checkpoint(layer)
    sines = {
        'jit': nested,
        'jit in jit': jax.jit(lambda x: nested(x)),
        'scan': functools.partial(scanned, length=1),
        'while_loop': looped,
        'fori_loop': lambda x: jax.lax.fori_loop(0, 1, counted_step, x),
        'map': lambda x: jax.lax.map(layer, x[None])[0],
        'cond': lambda x: jax.lax.cond(x.sum() > -1e9, layer, kept, x),
        'switch': lambda x: jax.lax.switch(jnp.int32(x.sum() > -1e9), [kept, layer, second], x),
        'checkpoint': rematted,
        'checkpoint of jit': jax.checkpoint(nested),
        'custom_vjp': with_vjp,
        'custom_jvp': with_jvp,
        'jit of custom_vjp': lambda x: jax.jit(with_vjp)(x),
        'vmap of jit': lambda x: jax.vmap(nested)(x[None])[0],
        'scan of checkpoint': lambda x: jax.lax.scan(rematted_step, x, None, 1)[0],
    }

    def gradient_of(name):
        return lambda x: jax.grad(lambda x: sines[name](x).sum())(x)

    differentiated = ['jit', 'scan', 'checkpoint', 'custom_vjp', 'custom_jvp', 'jit of custom_vjp']
    return {
        **{name: (function, np.sin) for name, function in sines.items()},
        **{f'grad of {name}': (gradient_of(name), np.cos) for name in differentiated},
        'unrolled scan': (
            functools.partial(scanned, length=2, unroll=2),
            lambda x: np.sin(np.sin(x)),
        ),
        'linearize': (lambda x: jax.linearize(nested, x)[1](x), lambda x: np.cos(x) * x),
        'jacfwd': (lambda x: jax.jacfwd(lambda s: nested(x * s))(1.0), lambda x: np.cos(x) * x),
        'eval_shape': (
            lambda x: layer(x) + jax.eval_shape(nested, x).size,
            lambda x: np.sin(x) + x.size,
        ),
    }


# JAX keeps their traces by identity, from one test to the next
BY_COUNTS = transformed(lambda x: einshard(x, 'batch d -> batch* d'))
BY_RULES = transformed(lambda x: einshard(x, 'batch d'))


def constraints(program):
    """The sharding of every constraint in a program, those in loops and calls included."""
    jaxpr = getattr(program, 'jaxpr', program)
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'sharding_constraint':
            yield equation.params['sharding']
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=has_equations):
            if has_equations(inner):
                yield from constraints(inner)


def has_equations(node):
    return hasattr(getattr(node, 'jaxpr', node), 'eqns')


@pytest.mark.parametrize('name', BY_COUNTS)
def test_traces_know_the_mesh_of_the_enclosing_sharded(name):
    function, expected = BY_COUNTS[name]
    for n in (4, 8, 4):
        step = sharded(mesh=jax.devices()[:n])(lambda x: function(x))
        assert {sharding.mesh.size for sharding in constraints(step.trace(X).jaxpr)} == {n}
        y = step(X)
        np.testing.assert_allclose(y, expected(X), rtol=1e-5, atol=1e-5)
        assert len(y.sharding.device_set) == n


@pytest.mark.parametrize('around', ['jit', 'sharded'])
@pytest.mark.parametrize('name', BY_RULES)
def test_traces_know_the_axis_rules(name, around):
    function, expected = BY_RULES[name]
    step = jax.jit(function) if around == 'jit' else sharded(mesh=MESH)(lambda x: function(x))
    for rule, entry in [('@data', 'data'), ('@(tp,data)', ('tp', 'data')), ('@data', 'data')]:
        in_context = jax.set_mesh(MESH) if around == 'jit' else contextlib.nullcontext()
        with in_context, axis_rules(batch=rule):
            found = constraints(step.trace(X).jaxpr)
            named = {axes for sharding in found for axes in sharding.spec} - {None, P.UNCONSTRAINED}
            assert named == {entry}
            np.testing.assert_allclose(step(X), expected(X), rtol=1e-5, atol=1e-5)


NESTED, _ = BY_COUNTS['jit']
SCANNED, _ = BY_COUNTS['scan']


@sharded('batch d -> batch* d', out='batch d -> batch* d')
def trained(x):
    return SCANNED(x) + NESTED(x)


def test_explain_on_other_devices_leaves_no_trace_behind():
    for devices in (jax.devices()[:4], jax.devices()[4:12], jax.devices()[:4]):
        assert explain(trained, X, mesh=devices).n_devices == len(devices)
        np.testing.assert_allclose(trained(X), 2 * np.sin(X), rtol=1e-5, atol=1e-5)
        assert trained(X).sharding.mesh.size == 16
        plain = explain(lambda x: trained(x) + NESTED(x), X, mesh=devices)
        assert plain.n_devices == len(devices)


def test_per_device_in_a_cached_trace():
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


def test_functions_are_traced_once_for_each_set_of_rules():
    place = counted(lambda x: einshard(x + 1, 'batch d', mesh=MESH))
    ruled, by_sharded, plain = (counted(lambda x: x + 1) for _ in range(3))
    ruled_step, bare_step = sharded('batch d', mesh=MESH)(ruled), jax.jit(place)
    step_in_sharded = jax.jit(by_sharded)
    unruled_step = jax.jit(plain)
    ready = axis_rules(TRAINING_AXES, missing='replicate')
    for _ in range(3):
        for rules in (axis_rules(batch='@data'), axis_rules(batch='@tp'), ready):
            with rules:
                if rules is not ready:
                    ruled_step(X)
                bare_step(X), unruled_step(X)
    # the same rules, in another order, from another object, in two steps
    with axis_rules(other='', batch='@data'):
        bare_step(X)
    with axis_rules(batch='@tp', other=''), axis_rules(batch='@data'):
        bare_step(X)
    unruled_step(X)
    with axis_rules():
        unruled_step(X)
    assert (ruled.runs, place.runs, plain.runs) == (2, 3 + 1, 3 + 1)
    # a helper is traced once for all sharded functions on a mesh
    for _ in range(3):
        sharded(mesh=MESH)(lambda x: step_in_sharded(x))(X)
    assert by_sharded.runs == 1


# ------------------------------------------------------------------------------ tasks and threads


@jax.jit
def held(x):
    return einshard(x + 1, 'batch d', mesh=MESH)


@sharded(mesh=MESH)
def held_sharded(x):
    return einshard(x + 1, 'batch d')


HELD = pytest.mark.parametrize('function', [held, held_sharded], ids=['jit', 'sharded'])
CANONICAL = device_mesh()
AWAIT = 'axis_rules cannot span an await'
COPIED = 'this thread runs in a copied contextvars'


def entered(rules):
    """A `with` block's worth of rules, which an async function can hold, but not enter itself."""
    stack = contextlib.ExitStack()
    stack.enter_context(rules)
    return stack


def spec_of(function):
    return function(X).sharding.spec


def assert_no_rules():
    """On the canonical mesh the short form is an error without rules."""
    assert refusal(make_sharding, 'batch d', mesh=CANONICAL).sentence.startswith(
        'nothing is sharded'
    )


@pytest.fixture
def clean():
    """Checks after a test that no rules are left, and that cached traces are still used."""
    yield
    assert_no_rules()
    traced = jax.jit(lambda x: einshard(x, 'batch d', mesh=CANONICAL))
    assert refusal(traced, X).sentence.startswith('nothing is sharded')
    body = counted(lambda x: x)
    jitted = jax.jit(body)
    jitted(X)
    with axis_rules(batch='@tp'):
        assert spec_of(held) == P('tp')
    jitted(X)
    assert body.runs == 1


@HELD
@pytest.mark.parametrize('warm', [False, True])
@pytest.mark.parametrize('one_object', [False, True])
def test_two_tasks_that_hold_rules_across_an_await(function, warm, one_object, clean):
    jax.clear_caches()
    shared = axis_rules(batch='@data')
    other = shared if one_object else axis_rules(batch='@tp')
    results = []

    async def task(rules):
        with entered(rules):
            for _ in range(2):
                await asyncio.sleep(0)
                results.append(spec_of(function))

    async def main():
        return await asyncio.gather(task(shared), task(other), return_exceptions=True)

    if warm:
        for rule in ('@data', '@tp'):
            with axis_rules(batch=rule):
                function(X)
    first, second = asyncio.run(main())
    assert first is None
    assert isinstance(second, EinshardError)
    assert str(second).startswith(AWAIT)
    assert results == [P('data')] * 2


@HELD
def test_tasks_that_take_turns_and_do_not_await_inside(function, clean):
    shared = {entry: axis_rules(batch=f'@{entry}') for entry in ('data', 'tp')}

    def call(entry):
        with shared[entry]:
            return spec_of(function)

    async def task(entry):
        for _ in range(3):
            assert call(entry) == P(entry)
            assert await asyncio.to_thread(call, entry) == P(entry)
            assert shared[entry](spec_of)(function) == P(entry)
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(*(task(entry) for entry in ('data', 'tp', 'data')))

    asyncio.run(main())


def test_a_task_without_rules_beside_one_that_holds_them(clean):
    jax.clear_caches()

    async def holds():
        with entered(axis_rules(batch='@data')):
            await asyncio.sleep(0.01)
            return spec_of(held)

    async def has_none():
        await asyncio.sleep(0)
        for function in (held, held_sharded, jax.checkpoint(held)):
            assert refusal(function, X).sentence.startswith(AWAIT)
        # eager calls need no trace
        assert describe(einshard(X, 'batch d -> batch@tp d', mesh=MESH)) == 'a b -> a@tp b'

    async def main():
        return (await asyncio.gather(holds(), has_none()))[0]

    assert asyncio.run(main()) == P('data')


def test_tasks_that_leave_in_another_order_than_they_entered(clean):
    async def inner(left):
        with entered(axis_rules(batch='@tp')):  # begun inside the rules of the other task
            await left.wait()

    async def main():
        left = asyncio.Event()
        with entered(axis_rules(batch='@data')):
            task = asyncio.create_task(inner(left))
            await asyncio.sleep(0)
        left.set()
        await task

    assert 'must be exited innermost first' in refusal(lambda: asyncio.run(main())).sentence


@contextlib.contextmanager
def in_generator(rules):
    with rules:
        yield


@contextlib.asynccontextmanager
async def in_async_generator(rules):
    with rules:
        yield


class InClass:
    def __init__(self, rules):
        self.rules = rules

    def __enter__(self):
        return self.rules.__enter__()

    def __exit__(self, *raised):
        return self.rules.__exit__(*raised)


@contextlib.contextmanager
def in_exit_stack(rules):
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(InClass(rules))


MANAGERS = [lambda rules: rules, in_generator, InClass, in_exit_stack, in_async_generator]


@pytest.mark.parametrize('warm', [False, True])
@pytest.mark.parametrize('manager', MANAGERS)
def test_an_async_function_cannot_enter_rules(manager, warm, clean):
    """It may await in the block, and there, nothing of einshard runs before a compiled function."""
    jax.clear_caches()
    if warm:
        with pytest.warns(UserWarning, match='has no placement'):
            held(X)
    manage = manager(axis_rules(batch='@data'))

    async def holds():
        if manager is in_async_generator:
            async with manage:
                await asyncio.to_thread(held, X)
        else:
            with manage:
                await asyncio.to_thread(held, X)

    error = refusal(lambda: asyncio.run(holds()))
    name = 'in_async_generator' if manager is in_async_generator else 'holds'
    assert error.sentence.startswith(f'axis_rules cannot be entered in the async function {name}')
    if manager is not in_async_generator:  # a plain function may
        with manager(axis_rules(batch='@data')):
            assert spec_of(held) == P('data')


def test_generators_that_leave_in_another_order_than_they_entered(clean):
    def holds(rule):
        with axis_rules(batch=rule):
            yield

    first, second = holds('@data'), holds('@tp')
    next(first), next(second)
    assert spec_of(held) == P('tp')
    with pytest.raises(EinshardError, match='without await or yield inside'):
        next(first)
    assert spec_of(held) == P('tp')
    next(second, None)


def in_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_rules_that_another_thread_leaves(clean):
    rules = axis_rules(batch='@data')
    with rules:
        in_thread(refusal, rules.__exit__, None, None, None)
        assert spec_of(held) == P('data')


@pytest.mark.parametrize('rule', ['data', 'tp'])
def test_a_context_copied_to_a_thread(rule, clean):
    jax.clear_caches()

    def work():
        assert describe(einshard(X, 'batch d', mesh=MESH)) == f'a b -> a@{rule} b'
        assert [spec_of(held_sharded) for _ in range(3)] == [P(rule)] * 3
        assert refusal(held, X).sentence.startswith(COPIED)
        with axis_rules(d=''):  # entered here, the rules are those of the thread too
            assert spec_of(held) == P(rule)
        mapped = refusal(jax.lax.map, lambda x: einshard(x, 'batch d', mesh=MESH), X[None])
        assert mapped.sentence.startswith(COPIED)

    with axis_rules(batch=f'@{rule}'):
        in_thread(contextvars.copy_context().run, work)
        assert spec_of(held) == P(rule)
    in_thread(assert_no_rules)


def test_one_object_in_many_threads(clean):
    """Each thread enters it twice while others hold it, and leaves it while others enter it."""
    n = 4
    rules = {entry: axis_rules(batch=f'@{entry}') for entry in ('data', 'tp')}
    together = threading.Barrier(n)

    def work(entry):
        for _ in range(5):
            together.wait(60)
            with rules[entry], rules[entry]:
                together.wait(60)
                assert make_sharding('batch d', mesh=MESH).spec == P(entry)
                assert spec_of(held) == P(entry)
        assert_no_rules()

    with ThreadPoolExecutor(n) as pool:
        list(pool.map(work, ['data', 'tp'] * (n // 2)))


def test_rules_are_left_where_the_code_inside_raises(clean):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), axis_rules(batch='@data'), axis_rules(d='@tp'):
            jax.jit(lambda x: 1 / (0 * einshard(x, 'batch d', mesh=MESH).size))(X)
    with pytest.raises(ZeroDivisionError):
        sharded(mesh=MESH)(lambda x: 1 / 0)(X)


@pytest.mark.parametrize('event', ['call', 'line', 'opcode'])
@pytest.mark.parametrize('nested', [False, True])
def test_rules_are_left_where_an_interrupt_stops_their_block(event, nested, clean):
    """An interrupt at each step of the functions that enter and leave rules."""
    rules = axis_rules(batch='@data')

    def interrupted(n):
        """Whether the block is interrupted, at the n-th step."""
        steps = 0

        def trace(frame, kind, _):
            nonlocal steps
            frame.f_trace_opcodes = event == 'opcode'
            if kind == event and re.search(
                r'(context|scopes)\.py$|_src.config\.py$', frame.f_code.co_filename
            ):
                steps += 1
                if steps == n:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            with rules:
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    with rules if nested else contextlib.nullcontext():
        n = 1
        while interrupted(n):
            n += 1
            if nested:
                assert spec_of(held) == P('data')
            else:
                assert_no_rules()
    assert n > 10


# --------------------------------------------------------------------------------- as a decorator


async def coroutine():
    pass


def generator():
    yield


async def asynchronous_generator():
    yield


class AsyncCallable:
    async def __call__(self):
        pass


@pytest.mark.parametrize(
    'function',
    [coroutine, generator, asynchronous_generator, functools.partial(coroutine), AsyncCallable()],
)
def test_functions_whose_body_runs_later_are_not_decorated(function):
    error = refusal(axis_rules(batch='@data'), function)
    assert 'cannot span an await or a yield' in error.sentence


# ------------------------------------------------------------------------------ meshes in context


@pytest.mark.parametrize('axes', [('x', 'y'), ('x',)])
@pytest.mark.parametrize('of_tree', [False, True])
def test_eager_code_in_auto_axes_has_the_abstract_mesh_in_context(axes, of_tree):
    mesh = mesh_of(x=4, y=2, types=AxisType.Explicit)

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


# JAX's own abstract mesh differs from one with the same axes in its `abstract_device`
@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    'function',
    [
        lambda mesh: lambda x: einshard(x, 'a@data b@tp', mesh=mesh),
        lambda mesh: lambda x: einshard(x, jax.sharding.NamedSharding(mesh, P('data', 'tp'))),
        # in Explicit mode, both terms need one mesh in their types
        lambda mesh: (
            lambda x: einshard(x, 'a@data b@tp', mesh=mesh) * 0.5 + einshard(x, 'a@data b@tp') * 0.5
        ),
        lambda mesh: (
            lambda x: einshard(
                einshard(jnp.asarray(X), 'a@data b@tp', mesh=mesh) + 0 * x, 'a@data b@tp'
            )
        ),
        lambda mesh: sharded('a@data b@tp', out='a@data b@tp', mesh=mesh)(
            lambda x: einshard(x, 'a@data b', mesh=mesh)
        ),
        lambda mesh: per_device('a@data b@tp', out='a@data b@tp', mesh=mesh)(lambda x: x),
    ],
    ids=['einshard', 'NamedSharding', 'two', 'constant', 'sharded', 'per_device'],
)
def test_an_abstract_mesh_with_the_axes_of_the_mesh_in_context(function, types):
    mesh = mesh_of(data=4, tp=2, types=types)
    given = AbstractMesh((4, 2), ('data', 'tp'), axis_types=(types,) * 2)
    with jax.set_mesh(mesh):
        result = jax.jit(function(given))(X)
    assert result.sharding.is_equivalent_to(make_sharding('a@data b@tp', mesh=mesh), 2)
    np.testing.assert_array_equal(result, X)
    traced = [given, mesh.abstract_mesh]
    for in_context, other in (traced, traced[::-1]):
        with jax.sharding.use_abstract_mesh(in_context):
            assert jax.eval_shape(function(other), X).shape == X.shape


@pytest.mark.parametrize(
    'given',
    [
        AbstractMesh((4, 2), ('data', 'tp'), axis_types=(AxisType.Explicit,) * 2),
        AbstractMesh((2, 4), ('data', 'tp'), axis_types=(AxisType.Auto,) * 2),
        AbstractMesh((2, 4), ('tp', 'data'), axis_types=(AxisType.Auto,) * 2),
    ],
)
def test_an_abstract_mesh_with_other_axes_than_the_mesh_in_context(given):
    with jax.set_mesh(MESH):
        error = refusal(jax.jit(lambda x: einshard(x, 'a@data b', mesh=given)), X)
    assert error.sentence == 'mesh= must match the mesh in context'


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
    assert re.match(r'.*Mesh\(.*is not a spec', refusal(call, mesh).sentence)


@pytest.mark.parametrize('mesh', [MESH, MESH.abstract_mesh, jax.devices()])
def test_the_error_for_a_mesh_suggests_a_call(mesh):
    call = refusal(einshard, X, mesh).facts['instead'].partition(' as in ')[2]
    assert call == "einshard(x, 'b d -> b* d', mesh=mesh)"
    if mesh is not MESH.abstract_mesh:
        eval(call, {'einshard': einshard, 'x': X, 'mesh': mesh})
