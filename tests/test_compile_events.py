"""What compile_events reads of JAX beyond its documented API; see its module docstring."""

import jax
import numpy as np
import pytest
from jax.extend.backend import backends

# private: JAX's undocumented events, which this module alone depends on
from einshard._functions import compile_events

X = np.ones(8, np.float32)


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
    f(X)
    f(X)
    jax.monitoring.unregister_event_duration_listener(listen)
    known = compile_events.LOWERED, compile_events.COMPILED
    ours = [pair for pair in events if pair[0] in known]
    assert ours == [(event, 'jit(step)') for event in known]


def test_a_backend_lists_its_newest_program_first():
    def names():
        return [m.name for p in backends()['cpu'].live_executables() for m in p.hlo_modules()]

    f, g = fresh('older'), fresh('newer')
    f(X)
    assert names()[0] == 'jit_older'
    g(X)
    assert names()[:2] == ['jit_newer', 'jit_older']
    same = zip(*(backends()['cpu'].live_executables() for _ in range(2)), strict=True)
    assert all(one is other for one, other in same)


def test_the_program_is_that_of_the_compiled_function(seen):
    compiled = fresh().lower(X).compile()
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
            f(X)
    compile_events.unwatch(watcher)
    assert not ran
    f(X)
    jax.effects_barrier()
    assert len(ran) == 1


@pytest.mark.parametrize('name', ['step', '<lambda>', 'a_b_', 'größe', 'step.<locals>.f'])
def test_a_program_is_found_by_the_name_of_its_function(seen, name):
    f = fresh(name)
    f(X)
    f(X)
    ((given, (text,)),) = seen
    assert given == name
    assert text.startswith('HloModule jit_')


def test_a_program_that_was_lowered_before(seen):
    older, lowered = fresh(), fresh().lower(X)
    older(X)
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
        f.lower(X).compile(compiler_options={'xla_no_such_option': True})
    assert seen == []


def test_programs_are_not_kept_alive():
    def watcher(name, programs):
        pass

    compile_events.watch(watcher)
    compile_events.watch(watcher)
    fresh().lower(X)
    compile_events.unwatch(watcher)
    assert compile_events._compilations
    compile_events.unwatch(watcher)
    assert not compile_events._compilations
