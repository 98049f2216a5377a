"""The line that shows on a terminal that a compilation takes long."""

import contextlib
import io
import sys
import time

import jax
import numpy as np
import pytest

from einshard import _progress, explain

# private: a line that disappears, without a compilation that takes seconds
from einshard._progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(_progress, '_DELAY', 0.05)
    monkeypatch.setattr(_progress, '_INTERVAL', 0.05)


def run(monkeypatch, stream, seconds=0.2):
    monkeypatch.setattr(sys, 'stderr', stream)
    with progress('compiling step'):
        time.sleep(seconds)
    return stream.getvalue() if stream else ''


def test_a_long_block_on_a_terminal(monkeypatch, quick):
    text = run(monkeypatch, Terminal())
    assert text.startswith('\rcompiling step: 0 s\rcompiling step: 0 s')
    assert text.endswith('\r' + ' ' * len('compiling step: 0 s') + '\r')


def test_nothing_is_written_otherwise(monkeypatch, quick):
    assert run(monkeypatch, io.StringIO()) == ''
    assert run(monkeypatch, None) == ''
    assert run(monkeypatch, Terminal(), seconds=0) == ''


def test_the_default_waits_for_seconds(monkeypatch):
    assert run(monkeypatch, Terminal(), seconds=0.2) == ''


def test_an_error_ends_the_line(monkeypatch, quick):
    stream = Terminal()
    monkeypatch.setattr(sys, 'stderr', stream)
    with contextlib.suppress(ZeroDivisionError), progress('compiling'):
        time.sleep(0.1)
        raise ZeroDivisionError
    assert stream.getvalue().endswith('\r')


def test_explain(monkeypatch):
    monkeypatch.setattr(_progress, '_DELAY', 0.0)
    stream = Terminal()
    monkeypatch.setattr(sys, 'stderr', stream)

    @jax.jit
    def step(x):
        return jax.lax.scan(lambda c, _: (c @ x + 1, None), x, None, length=3)

    explain(step, np.ones((4, 4), np.float32))
    assert '\rcompiling step: 0 s' in stream.getvalue()
