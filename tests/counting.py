"""What JAX traces and compiles, as JAX reports it."""

import contextlib
import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks._canonical import canonical

_TRACED = '/jax/core/compile/jaxpr_trace_duration'
_COMPILED = '/jax/core/compile/backend_compile_duration'
_open: list['Counts'] = []
_heard: list[str] = []


@dataclass
class Counts:
    """Names of the functions traced and of the programs compiled, in order.

    JAX reports cached traces too: to count traces, count the runs of the function's body.
    """

    traced: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)

    def of(self, name):
        """(traces, compilations) of the function with this name."""
        return self.traced.count(name), self.compiled.count(f'jit({name})')


def _listen(event, duration, **about):
    _heard[:] = [event]
    for counts in _open:
        if event == _TRACED:
            counts.traced.append(str(about.get('fun_name')))
        elif event == _COMPILED:
            counts.compiled.append(str(about.get('fun_name')))


def listen():
    """Registers the listener again if a test has cleared all listeners."""
    _heard.clear()
    jax.monitoring.record_event_duration_secs('/tests/ping', 0.0)
    if not _heard:
        jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def counting():
    """Count traces and compilations in this context, in every thread."""
    counts = Counts()
    listen()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


def program(compiled):
    """The computations of `lower(...).compile()` in canonical form."""
    text = '\n'.join(canonical(compiled.as_text()))
    # the module's name and layouts come before the first computation
    return text[re.search(r'^(%|ENTRY)', text, re.MULTILINE).start() :]


def counted(function):
    """The function, which counts the runs of its body in `runs`."""

    @functools.wraps(function)
    def body(*args, **kwargs):
        body.runs += 1
        return function(*args, **kwargs)

    body.runs = 0
    return body


def entered(call, package):
    """The functions of a package that Python enters in a call, in order."""
    names = []
    folder = str(Path(package.__file__).parent)

    def enter(frame, event, _):
        if event == 'call' and frame.f_code.co_filename.startswith(folder):
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names
