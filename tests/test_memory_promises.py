"""memory= of sharded: limits on the memory of programs, and the errors of calls that need more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einshard import EinshardError, MemoryExceeded, UnexpectedCollectives, explain, sharded

X = np.ones((64, 512), np.float32)
W = np.ones((512, 512), np.float32)


def product(x, w):
    return jnp.tanh(x @ w) @ w.T


def limited(memory, **options):
    return sharded('b* x', '* x y', memory=memory, **options)(product)


def needed(x=X):
    return explain(limited(None), x, W).memory.total


@pytest.mark.parametrize(
    ('given', 'allowed'),
    [
        ('0.001 GB', '976.6 KiB'),
        ('0.001GB', '976.6 KiB'),
        ('0.0009765625 GiB', '1.0 MiB'),
        ('0.0625 MiB', '64.0 KiB'),
        ('3 kB', '2.9 KiB'),
        ('3 KiB', '3.0 KiB'),
        ('0.000001 TB', '976.6 KiB'),
        ('7 B', '7 B'),
        (7, '7 B'),
        (np.int64(7), '7 B'),
    ],
)
def test_sizes(given, allowed):
    with pytest.raises(MemoryExceeded) as caught:
        limited(given)(X, W)
    assert caught.value.facts['allowed'] == allowed


@pytest.mark.parametrize('given', ['15', '15 gigabytes', 'GB', '', -1, True, 1.5, [1]])
def test_invalid_sizes(given):
    with pytest.raises(EinshardError, match=' is not a valid size for memory='):
        limited(given)


def test_enough_memory():
    found = limited(needed())(X, W)
    assert np.allclose(found, product(X, W), rtol=1e-4)


def test_too_little_memory():
    run = []

    def function(x, w):
        jax.debug.callback(lambda: run.append(1))
        return product(x, w)

    limit = needed() // 2
    f = sharded('b* x', '* x y', memory=limit)(function)
    for _ in range(2):  # nothing runs, also not the second time
        with pytest.raises(MemoryExceeded) as caught:
            f(X, W)
    assert run == []
    error = caught.value
    assert error.sentence.startswith('function needs ')
    assert error.sentence.endswith(' of memory on each device')
    assert list(error.facts)[:3] == ['allowed', 'arguments', 'results']
    assert error.facts['arguments'] == '1.0 MiB'
    assert 'largest temporary 1' in error.facts


def test_too_little_memory_for_a_program_without_text(monkeypatch, without_events):
    monkeypatch.setattr(jax.stages.Compiled, 'as_text', lambda self: None)
    with pytest.raises(MemoryExceeded) as caught:
        limited('1 kB')(X, W)
    assert 'largest temporary 1' not in caught.value.facts


def test_programs_for_other_shapes_are_checked():
    f = limited(needed())
    f(X, W)
    with pytest.raises(MemoryExceeded):
        f(np.ones((4096, 512), np.float32), W)
    f(X, W)


def test_one_device_has_memory_too():
    options = {'mesh': jax.devices()[:1], 'collectives': ()}
    with pytest.raises(MemoryExceeded):
        limited('1 kB', **options)(X, W)
    limited('1 GB', **options)(X, W)


def test_both_promises():
    summed = sharded('b x*', 'x* y', out='* b y', collectives=(), memory='1 GB')(jnp.dot)
    with pytest.raises(UnexpectedCollectives):
        summed(X, W)


@pytest.mark.parametrize(
    ('options', 'unchecked'),
    [
        ({}, 'memory= of product is not checked'),
        ({'collectives': ()}, 'collectives= and memory= of product are not checked'),
    ],
)
def test_a_gradient_outside_of_jit_is_not_checked(options, unchecked):
    f = limited('1 kB', **options)
    with pytest.warns(UserWarning, match=f'^{unchecked} inside jax.grad'):
        jax.grad(lambda x: f(x, W).sum())(X)


def test_explain_reports_a_broken_promise():
    report = explain(limited('1 KiB'), X, W)
    (finding,) = (f for f in report.findings if f.kind == 'promise broken')
    assert finding.text.startswith('memory= allows 1.0 KiB, but the program needs ')


def test_an_unknown_memory(monkeypatch, without_events):
    monkeypatch.setattr(jax.stages.Compiled, 'memory_analysis', lambda self: None)
    with pytest.raises(EinshardError, match=r'^cannot read the memory of product: '):
        limited('1 GB')(X, W)
