"""Behavior of JAX beyond its documented API that the package relies on.

If one of these tests fails after an upgrade, its comment names the code that relies on it.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.backend import backends
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard._functions import compile_events
from einshard._program import private_jax

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = np.arange(64, dtype=np.float32).reshape(8, 8)
ONES = np.ones(8, np.float32)
ONE_AXIS = mesh_of(x=8)


def shard_shapes(x):
    return {shard.data.shape for shard in x.addressable_shards}


def mesh_is_hidden():
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize('mesh', [None, AUTO, EXPLICIT])
def test_get_mesh_refuses_inside_every_transformation(mesh):
    # _sharding.tracing.is_tracing
    seen = []

    def fresh():  # JAX remembers what it traced, by function
        def f(x):
            seen.append(mesh_is_hidden())
            return x * 2.0

        return f

    def run():
        jax.jit(fresh())(1.0)
        jax.eval_shape(fresh(), 1.0)
        jax.make_jaxpr(fresh())(1.0)
        assert seen == [True] * 3
        f = fresh()
        jax.lax.scan(lambda carry, _: (f(carry), None), 1.0, None, length=1)
        assert seen[3:]
        assert all(seen)
        seen.clear()
        # so it does in transformations that run operation by operation, where concrete arrays
        # stay concrete
        jax.grad(fresh())(1.0)
        jax.vmap(fresh())(jnp.ones(2))
        assert seen == [True] * 2
        assert not mesh_is_hidden()

    if mesh is None:
        run()
    else:
        with jax.set_mesh(mesh_of(types=mesh, x=8)):
            run()


def test_abstract_mesh_in_context_is_empty_outside():
    # _sharding.scopes.ambient_mesh
    assert jax.sharding.get_abstract_mesh().empty
    with jax.set_mesh(ONE_AXIS):
        assert jax.sharding.get_abstract_mesh() == ONE_AXIS.abstract_mesh
        assert jax.sharding.get_mesh() is ONE_AXIS
    assert jax.sharding.get_abstract_mesh().empty
    with jax.sharding.use_abstract_mesh(AbstractMesh((8,), ('x',))):
        assert not jax.sharding.get_abstract_mesh().empty
        assert jax.sharding.get_mesh().empty


def test_specs_that_mean_the_same_are_not_equal():
    # _sharding.placement normalizes them
    assert P('x') != P('x', None)
    assert NamedSharding(ONE_AXIS, P('x')) != NamedSharding(ONE_AXIS, P('x', None))
    assert NamedSharding(ONE_AXIS, P('x')) == NamedSharding(ONE_AXIS, P('x'))


def test_shardings_on_equal_meshes_are_equal():
    sharding, equal = (NamedSharding(mesh_of(x=2, y=4), P('x')) for _ in 'ab')
    assert sharding == equal
    assert hash(sharding) == hash(equal)
    assert sharding != NamedSharding(mesh_of(x=2, y=2, z=2), P('x'))


def test_default_axis_types():
    # the package always passes axis_types=
    assert Mesh(np.array(jax.devices()), ('x',)).axis_types == (AUTO,)


def test_device_put_in_jit_does_nothing_under_auto():
    # so _arrays.constrain does not use device_put
    sharding = NamedSharding(ONE_AXIS, P('x'))
    y = jax.jit(lambda x: jax.device_put(x * 2, sharding))(X)
    assert shard_shapes(y) == {(8, 8)}
    y = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding))(X)
    assert shard_shapes(y) == {(1, 8)}


def test_indivisible_constraint_in_jit_silently_replicates():
    # so Placement.check compares the sizes
    sharding = NamedSharding(ONE_AXIS, P('x'))
    x = np.ones((7, 8), np.float32)
    y = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding))(x)
    assert shard_shapes(y) == {(7, 8)}
    with pytest.raises(ValueError, match='divi'):
        jax.device_put(x, sharding)


def test_constraint_in_jit_drops_the_memory_kind():
    sharding = NamedSharding(ONE_AXIS, P('x'), memory_kind='pinned_host')
    y = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding))(X)
    assert y.sharding.memory_kind == 'device'


def test_jit_drops_the_sharding_of_a_constant():
    # a placed array inside jit is constrained, even if it is sharded as asked
    x = jax.device_put(X, NamedSharding(ONE_AXIS, P('x')))
    y = jax.jit(lambda: x + 0)()
    assert len(y.sharding.device_set) == 1


def test_constraint_asserts_under_explicit():
    # _arrays.constrain reshards explicit axes
    mesh = mesh_of(types=EXPLICIT, x=8)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P()))
        with pytest.raises(AssertionError, match='reshard'):
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('x')))
        y = jax.jit(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, P('x'))))(x)
        assert shard_shapes(y) == {(1, 8)}


def test_reshard_refuses_auto_axes():
    sharding = NamedSharding(ONE_AXIS, P('x'))
    with jax.set_mesh(ONE_AXIS), pytest.raises(ValueError, match='reshard cannot'):
        jax.jit(lambda x: jax.sharding.reshard(x, sharding))(X)


def test_different_auto_meshes_meet_in_one_jit():
    # so the canonical mesh may have other factors for some expressions
    x = jax.device_put(X, NamedSharding(ONE_AXIS, P('x')))
    y = jax.device_put(X, NamedSharding(mesh_of(x=2, y=4), P('y', 'x')))
    np.testing.assert_array_equal(jax.jit(lambda a, b: (a + b).sum())(x, y), 2 * X.sum())
    backwards = mesh_of(jax.devices()[7::-1], x=8)
    z = jax.device_put(X, NamedSharding(backwards, P('x')))
    with pytest.raises(ValueError, match='incompatible devices'):
        jax.jit(lambda a, b: a + b)(x, z)


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
def test_sharding_on_the_abstract_mesh_in_context(types):
    # while tracing, expressions are lowered onto it
    mesh = mesh_of(types=types, x=2, y=4)

    @jax.jit
    def f(x):
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), P('y', 'x'))
        if types == AUTO:
            return jax.lax.with_sharding_constraint(x * 2, sharding)
        return jax.sharding.reshard(x * 2, sharding)

    with jax.set_mesh(mesh):
        y = f(X)
    assert shard_shapes(y) == {(2, 4)}
    assert y.sharding.mesh == mesh


def test_mesh_axis_named_zero_is_ignored():
    # _sharding.placement refuses such a mesh
    mesh = Mesh(np.array(jax.devices()[:8]), (0,))
    assert shard_shapes(jax.device_put(X, NamedSharding(mesh, P(0)))) == {(8, 8)}


def test_device_is_a_class_for_isinstance():
    # _sharding.mesh checks devices by it
    assert all(isinstance(device, jax.Device) for device in jax.devices())


def test_traced_values_show_whether_axes_are_auto_or_explicit():
    # describe
    seen = []

    @jax.jit
    def f(x):
        seen.append(jax.typeof(x).sharding)
        return x

    f(jax.device_put(X, NamedSharding(ONE_AXIS, P('x'))))
    mesh = mesh_of(types=EXPLICIT, x=8)
    f(jax.device_put(X, NamedSharding(mesh, P('x'))))
    automatic, explicit = seen
    assert EXPLICIT not in automatic.mesh.axis_types
    assert explicit.mesh == mesh.abstract_mesh
    assert explicit.spec == P('x', None)


def test_none_is_an_empty_tree_and_a_leaf_of_a_prefix():
    # _trees.specs.leaf_specs
    treedef = jax.tree.structure([0, None], is_leaf=lambda node: node is None)
    assert treedef.flatten_up_to([{'a': 1}, {'b': 2}]) == [{'a': 1}, {'b': 2}]
    assert jax.tree.leaves({'a': None}) == []


def test_a_user_context_is_in_the_keys_of_jit_and_of_traces_by_equality():
    # _sharding.scopes puts the mesh and the axis rules there
    context = jax.make_user_context(default_value=None)
    seen = []

    def body(carry, _):
        seen.append(context.value)
        return carry, None

    @jax.jit
    def outer(x):
        return jax.lax.scan(body, x, None, length=1)[0]

    def sees(value):
        with context(value):
            outer(1.0)  # a trace each, not one for all
            return seen[-1:], len(seen)

    outer(1.0)
    assert sees(('a', 1))[0] == [('a', 1)]
    assert sees(('b', 1))[0] == [('b', 1)]
    n = len(seen)
    assert sees(('a', int('1')))[1] == sees(('b', 1))[1] == n
    outer(1.0)
    assert len(seen) == n
    # a value that is set inside a trace reaches what is traced there
    jax.jit(lambda x: [sees(('c', 1)), sees(('a', 1))] and x)(1.0)
    assert ('c', 1) in seen
    assert context.value is None


def test_lowered_programs_keep_their_devices_and_shardings_in_private():
    # if Lowered gets properties for them, use these instead
    rows, columns = NamedSharding(ONE_AXIS, P('x')), NamedSharding(ONE_AXIS, P(None, 'x'))

    def f(unused, x):
        return jax.lax.with_sharding_constraint(x + 1, columns) * 2

    lowered = jax.jit(f, in_shardings=rows, out_shardings=rows).lower(X, X)
    options = private_jax.compile_options(lowered)
    assert private_jax.devices_of(lowered) == [*ONE_AXIS.devices.flat]
    assert private_jax.kept_arguments(lowered) == [1]
    assert options['in_shardings'] == (rows,)
    assert options['out_shardings'] == (rows,)
    assert columns in options['intermediate_shardings']
    with jax.set_mesh(ONE_AXIS):
        in_context = jax.jit(lambda x: x + 1).lower(X)
    assert private_jax.compile_options(in_context)['context_mesh'] == ONE_AXIS


def test_compiler_options_are_in_private():
    options = {'xla_cpu_enable_fast_math': False}
    jitted = jax.jit(lambda x: x + 1, compiler_options=options)
    with pytest.raises(ValueError, match='`compiler_options` can only be passed to top-level'):
        jax.make_jaxpr(lambda x: jitted(x))(X)
    params = private_jax.jit_params(jitted.trace(X))
    assert dict(params['compiler_options_kvs']) == options
    plain = jax.jit(lambda x: x + 1)
    assert {*params} == {*jax.make_jaxpr(lambda x: plain(x))(X).eqns[0].params}


def test_programs_with_refs_keep_their_shardings_in_private():
    # if the first two properties work, use them alone
    rows, replicated = NamedSharding(ONE_AXIS, P('x')), NamedSharding(ONE_AXIS, P())
    ref = jax.new_ref(jax.device_put(jnp.ones(8), replicated))

    def f(unused, ref, x):
        ref[...] += x.sum()
        return x * 2

    x = jax.device_put(jnp.ones(8), rows)
    compiled = jax.jit(f).lower(x, ref, x).compile()
    with pytest.raises(ValueError, match='Too many leaves'):
        _ = compiled.out_info
    with pytest.raises(ValueError, match='Too many leaves'):
        _ = compiled.output_shardings
    arguments, outputs = private_jax.shardings_of_compiled(compiled)
    assert {i: s.spec for i, s in arguments.items()} == {1: P(), 2: P('x')}
    assert [s.spec for _, s in outputs] == [P('x'), P()]
    assert [a.shape for a, _ in outputs] == [(8,), (8,)]


def test_one_module_reads_private_fields_of_jax():
    reader = Path(private_jax.__file__)
    fields = {*re.findall(r'\._[a-z]\w*', reader.read_text())}
    assert '._lowering' in fields
    others = [path for path in reader.parents[1].rglob('*.py') if path != reader]
    for path in others:
        # attributes of our own objects, of the same names, are not followed by more
        assert not [f for f in fields if re.search(rf'(?<!self)\{f}\b', path.read_text())], path


# --- what compile_events reads; see its module docstring ------------------------------------------


def fresh(name='step'):
    def f(x):
        return x * 2 + 1

    f.__name__ = f.__qualname__ = name
    return jax.jit(f)


@pytest.fixture
def seen():
    """What a watcher gets, as (name of the function, texts of its programs)."""
    calls = []

    def watcher(name, programs):
        calls.append((name, [compile_events.loaded_text(x) for x in programs]))

    compile_events.watch(watcher)
    yield calls
    compile_events.unwatch(watcher)


def test_jax_reports_each_compilation_by_these_events():
    events = []

    def listen(event, duration, **given):
        events.append((event, given.get('fun_name')))

    jax.monitoring.register_event_duration_secs_listener(listen)
    f = fresh()
    f(ONES)
    f(ONES)
    jax.monitoring.unregister_event_duration_listener(listen)
    known = compile_events.LOWERED, compile_events.COMPILED
    ours = [pair for pair in events if pair[0] in known]
    assert ours == [(event, 'jit(step)') for event in known]


def test_a_backend_lists_its_newest_program_first():
    def names():
        return [m.name for p in backends()['cpu'].live_executables() for m in p.hlo_modules()]

    f, g = fresh('older'), fresh('newer')
    f(ONES)
    assert names()[0] == 'jit_older'
    g(ONES)
    assert names()[:2] == ['jit_newer', 'jit_older']
    same = zip(*(backends()['cpu'].live_executables() for _ in range(2)), strict=True)
    assert all(one is other for one, other in same)


def test_the_program_is_that_of_the_compiled_function(seen):
    compiled = fresh().lower(ONES).compile()
    ((_, (text,)),) = seen
    assert text.strip() == compiled.as_text().strip()


def test_an_error_in_a_watcher_stops_the_call_each_time():
    class Stop(Exception):
        pass

    def watcher(name, programs):
        raise Stop

    ran, f = [], jax.jit(lambda x: jax.debug.callback(ran.append, x))
    compile_events.watch(watcher)
    for _ in range(3):
        with pytest.raises(Stop):
            f(ONES)
    compile_events.unwatch(watcher)
    assert not ran
    f(ONES)
    jax.effects_barrier()
    assert len(ran) == 1


@pytest.mark.parametrize('name', ['step', '<lambda>', 'a_b_', 'größe', 'step.<locals>.f'])
def test_a_program_is_found_by_the_name_of_its_function(seen, name):
    f = fresh(name)
    f(ONES)
    f(ONES)
    ((given, (text,)),) = seen
    assert given == name
    assert text.startswith('HloModule jit_')


def test_a_program_that_was_lowered_before(seen):
    older, lowered = fresh(), fresh().lower(ONES)
    older(ONES)
    seen.clear()
    compile_events._compilations.clear()  # as in a thread that lowered nothing
    lowered.compile()
    ((name, (text,)),) = seen
    assert name == 'step'
    assert text.startswith('HloModule jit_step,')


def test_programs_for_devices_elsewhere_have_no_text(seen):
    pytest.importorskip('libtpu')
    from jax.experimental import topologies

    devices = topologies.get_topology_desc('v5e:2x2', 'tpu').devices
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    fresh().lower(jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)).compile()
    assert seen == [('step', [])]


def test_a_program_that_does_not_compile_is_not_reported(seen):
    f = fresh()
    with pytest.raises(jax.errors.JaxRuntimeError):
        f.lower(ONES).compile(compiler_options={'xla_no_such_option': True})
    assert seen == []


def test_programs_are_not_kept_alive():
    def watcher(name, programs):
        pass

    compile_events.watch(watcher)
    compile_events.watch(watcher)
    fresh().lower(ONES)
    compile_events.unwatch(watcher)
    assert compile_events._compilations
    compile_events.unwatch(watcher)
    assert not compile_events._compilations
