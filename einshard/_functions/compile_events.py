"""Calls a watcher with every program that a thread compiles, before the program runs.

Watchers of `with` blocks see every program of their thread. Those of single calls of jitted
functions are in `this_thread.calls`.

`jax.monitoring` reports each compilation, but without the program. So this module looks for the
program among the loaded programs of each backend, newest first. If the watcher raises, so does the
call that compiles. The names of the events and the order of the loaded programs are not documented;
tests/test_jax_facts.py fails if they change.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import jax

# the events that JAX reports before and after it compiles a program
LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'
COMPILED = '/jax/core/compile/backend_compile_duration'
_PING = '/einshard/ping'

# Called with the name of a jitted function and the programs compiled for it, or [] if this process
# has none of their devices.
Watcher: TypeAlias = Callable[[str, Sequence[Any]], None]


class _Thread(threading.local):
    """The state of a thread.

    Attributes:
        watchers: the watchers of `with` blocks. Only the last one is called.
        calls: the watchers of calls, innermost last; None while no program is for the call, such as
            while its function is traced. A list and no method, because a call with limits takes
            0.4 us longer with two method calls.
    """

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.calls: list[CallWatcher | None] = []
        self.ping_received = False


class CallWatcher(Protocol):
    def on_compiled(self, name: str, programs: Sequence[Any]) -> None:
        """Called with the program that was compiled, or with none if it was not found.

        Several programs are this one and those of other threads.
        """


@dataclass
class _Compilation:
    """A compilation in progress in one thread.

    Attributes:
        newest: the newest loaded program of each platform when the compilation started.
        others: programs that other threads have compiled since then.
    """

    newest: dict[str, Any] = field(default_factory=dict[str, Any])
    others: list[Any] = field(default_factory=list[Any])


this_thread = _Thread()
_lock = threading.Lock()
_n_watchers = 0  # in all threads
_n_registered = 0  # how often `_on_event` was registered
_has_seen_compilation = False
# Keyed by thread id. Includes threads without watchers, so that other threads do not take the
# programs of these threads for their own.
_compilations: dict[int, _Compilation] = {}


def watch(watcher: Watcher) -> None:
    """Adds a watcher for this thread. Only the watcher added last is called."""
    listen()
    global _n_watchers
    with _lock:
        _n_watchers += 1
    this_thread.watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    this_thread.watchers.reverse()
    this_thread.watchers.remove(watcher)  # the last occurrence
    this_thread.watchers.reverse()
    global _n_watchers
    with _lock:
        _n_watchers -= 1
        if not _n_watchers:
            _compilations.clear()  # references to programs keep them in memory


def listen() -> None:
    global _n_registered
    n_before = _n_registered
    if is_listening():  # outside the lock, because it calls every listener
        return
    with _lock:
        if _n_registered == n_before:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _n_registered += 1


def sees_compilations() -> bool:
    """Whether the watchers of calls will be called; False if JAX has not reported any yet."""
    return _has_seen_compilation and is_listening()


def is_listening() -> bool:
    """Whether JAX still calls `_on_event`; `jax.monitoring.clear_event_listeners` removes it."""
    this_thread.ping_received = False
    jax.monitoring.record_event_duration_secs(_PING, 0.0)
    return this_thread.ping_received


def _on_event(event: str, duration_secs: float, **fields: Any) -> None:
    if event == _PING:
        this_thread.ping_received = True
    if event not in (LOWERED, COMPILED):
        return
    global _has_seen_compilation
    _has_seen_compilation |= event == COMPILED
    call = this_thread.calls[-1] if this_thread.calls else None
    if not _n_watchers and call is None:
        return
    # imported here to keep `import einshard` fast
    from jax.extend.backend import backends

    loaded: dict[str, Sequence[Any]] = {}  # by platform, the newest program first
    # with JAX_PLATFORMS=cuda and no GPU, an assertion in JAX fails
    with suppress(AssertionError):
        loaded = {name: backend.live_executables() for name, backend in backends().items()}
    newest = {platform: programs[0] for platform, programs in loaded.items() if programs}
    with _lock:
        compilation = _compilations.pop(threading.get_ident(), None)
        if event == LOWERED:
            _compilations[threading.get_ident()] = _Compilation(newest)
            return
        name = str(fields.get('fun_name', 'the program'))
        found = [
            program
            for platform, programs in loaded.items()
            for program in _compiled_since(programs, name, platform, compilation)
        ]
        # a single new program is this thread's; several may include programs of other threads
        if compilation and len(found) == 1:
            for other in _compilations.values():
                other.others += found
    # JAX also reports failed compilations, which have no program
    if not found and sys.exc_info()[0] is not None:
        return
    name = re.sub(r'^\w+\((.*)\)$', r'\1', name)  # 'jit(f)' to 'f'
    if call is not None:
        # compiled again from what another thread has lowered, it may be an older program
        call.on_compiled(name, found if compilation else ())
    if this_thread.watchers:
        this_thread.watchers[-1](name, found)


def _compiled_since(
    programs: Sequence[Any], name: str, platform: str, compilation: _Compilation | None
) -> Iterator[Any]:
    """Yields the programs called `name` that any thread has compiled since `compilation` started.

    If it is None, yields only the newest program called `name`: older ones may have the same name.
    """
    for program in programs:
        if compilation and program is compilation.newest.get(platform):
            return
        module_names = (_alphanumeric(module.name) for module in program.hlo_modules())
        if _alphanumeric(name) not in module_names:
            continue
        if compilation is None:
            yield program
            return
        if program not in compilation.others:
            yield program


def _alphanumeric(name: str) -> str:
    # the HLO module of 'jit(<lambda>)' is called 'jit__lambda'
    return re.sub('[^A-Za-z0-9]', '', name)


def loaded_text(program: Any) -> str:
    """Returns the HLO of a loaded program, which has no `as_text`."""
    return '\n'.join(module.to_string() for module in program.hlo_modules())
