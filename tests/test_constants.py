"""Arrays that functions close over: constants of the program, in full on each device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einshard import MemoryExceeded, device_mesh, einshard, explain, sharded, topology

RAW = np.random.default_rng(0).normal(size=(64, 64, 512)).astype(np.float32)  # 8 MiB
X = np.ones(512, np.float32)


def closures():
    big = einshard(RAW, 'e q s -> e8 q s', mesh=device_mesh(jax.devices()[:8]))

    def of_sharded(x):
        return (big @ x).sum(0)

    def of_numpy(x):
        return (RAW @ x).sum(0)

    def in_loop(x):
        return jax.lax.fori_loop(0, 64, lambda i, y: y + (big[i] @ x), jnp.zeros(64))

    def in_nested_jit(x):
        return jax.jit(of_sharded)(x)

    def constrained(x):
        return (einshard(jnp.asarray(RAW), 'e q s -> e* q s') @ x).sum(0)

    return [of_sharded, of_numpy, in_loop, in_nested_jit, constrained]


def constants_of(report):
    return [note for note in report.notes if note.kind == 'constant']


@pytest.mark.parametrize('f', closures(), ids=lambda f: f.__name__)
def test_closed_over_arrays(f):
    report = explain(f, X)
    memory = report.memory
    # one copy, even if several computations use it; and a few scalars
    assert RAW.nbytes <= memory.constants <= RAW.nbytes + 1024
    parts = memory.arguments + memory.results + memory.temporaries + memory.code
    assert memory.total == parts + memory.constants - memory.aliased
    (note,) = constants_of(report)
    # XLA may reshape it
    assert re.fullmatch(
        r'f32\[[\d,]+\] is a constant of the program, such as an array that the function closes '
        r'over: 8.0 MiB on each device',
        note.text,
    )
    assert note.bytes == RAW.nbytes
    assert 'constants 8.0 MiB' in str(report)
    assert report.to_dict()['memory']['constants'] == memory.constants


def test_arguments_are_not_constants():
    report = explain(lambda raw, x: (raw @ x).sum(0), RAW, X)
    assert report.memory.constants < 1024
    assert not constants_of(report)


def test_small_constants_are_counted_but_not_noted():
    rows = RAW[:4]
    report = explain(lambda x: (rows @ x).sum(0), X)
    assert rows.nbytes <= report.memory.constants <= rows.nbytes + 1024
    assert not constants_of(report)


def test_two_constants():
    halves = RAW[:32], RAW[32:48]
    report = explain(lambda x: sum((half @ x).sum(0) for half in halves), X)
    size = sum(half.nbytes for half in halves)
    assert size <= report.memory.constants <= size + 1024
    assert [note.bytes for note in constants_of(report)] == [half.nbytes for half in halves]


@pytest.mark.parametrize('f', closures(), ids=lambda f: f.__name__)
def test_memory_limits_count_constants(f):
    ran = []

    @sharded('* a', memory='4 MB')
    def limited(x):
        jax.debug.callback(lambda: ran.append(1))
        return f(x)

    with pytest.raises(MemoryExceeded) as caught:
        limited(X)
    jax.effects_barrier()
    assert caught.value.facts['constants'] == '8.0 MiB'
    assert ran == []
    allowed = sharded('* a', memory='24 MB')(f)
    assert np.allclose(allowed(X), (RAW @ X).sum(0), rtol=1e-3)


@pytest.fixture
def on_tpus():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPUs, and is not installed')
    return {'mesh': topology('v5e:2x2')}


def test_constants_on_tpus(on_tpus):
    function = sharded('* a')(lambda x: (RAW @ x).sum(0))
    report = explain(function, jax.ShapeDtypeStruct(X.shape, X.dtype), **on_tpus)
    assert report.memory.code >= RAW.nbytes
    assert report.memory.constants == 0
    (note,) = constants_of(report)
    assert note.bytes == RAW.nbytes


def test_constants_of_programs_that_do_not_fit(on_tpus):
    @sharded('* a', '* a b')
    def function(x, huge):
        return (RAW @ x).sum(0), huge @ huge

    huge = jax.ShapeDtypeStruct((100_000, 100_000), np.float32)
    report = explain(function, jax.ShapeDtypeStruct(X.shape, X.dtype), huge, **on_tpus, tries=0)
    assert report.findings[0].kind == 'does not fit'
    assert report.memory.constants >= RAW.nbytes
    (note,) = constants_of(report)
    assert note.bytes == RAW.nbytes
