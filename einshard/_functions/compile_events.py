"""Calls a watcher with every program that a thread compiles, before the program runs.

`jax.monitoring` reports each compilation, but without the program. So this module looks for the
program among the loaded programs of each backend, newest first. If the watcher raises, so does the
call that compiles. The names of the events and the order of the loaded programs are not documented;
tests/test_compile_events.py fails if they change.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

# the events that JAX reports before and after it compiles a program
LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'
COMPILED = '/jax/core/compile/backend_compile_duration'
_PING = '/einshard/ping'

# Called with the name of a jitted function and the HLO texts of the programs compiled for it, or []
# if this process has none of their devices.
Watcher: TypeAlias = Callable[[str, Sequence[str]], None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.ping_received = False


@dataclass
class _Compilation:
    """A compilation in progress in one thread.

    Attributes:
        newest: the newest loaded program of each platform when the compilation started.
        others: programs that other threads have compiled since then.
    """

    newest: dict[str, Any] = field(default_factory=dict[str, Any])
    others: list[Any] = field(default_factory=list[Any])


_thread = _Thread()
_lock = threading.Lock()
_n_watchers = 0  # in all threads
_n_registered = 0  # how often `_on_event` was registered
# Keyed by thread id. Includes threads without watchers, so that other threads do not take the
# programs of these threads for their own.
_compilations: dict[int, _Compilation] = {}


def watch(watcher: Watcher) -> None:
    """Adds a watcher for this thread. Only the watcher added last is called."""
    global _n_watchers, _n_registered
    n_before = _n_registered
    is_registered = is_listening()  # outside the lock, because it calls every listener
    with _lock:
        if not is_registered and _n_registered == n_before:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _n_registered += 1
        _n_watchers += 1
    _thread.watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    _thread.watchers.reverse()
    _thread.watchers.remove(watcher)  # the last occurrence
    _thread.watchers.reverse()
    global _n_watchers
    with _lock:
        _n_watchers -= 1
        if not _n_watchers:
            _compilations.clear()  # references to programs keep them in memory


def is_listening() -> bool:
    """Whether JAX still calls `_on_event`; `jax.monitoring.clear_event_listeners` removes it."""
    _thread.ping_received = False
    jax.monitoring.record_event_duration_secs(_PING, 0.0)
    return _thread.ping_received


def _on_event(event: str, duration_secs: float, **fields: Any) -> None:
    if event == _PING:
        _thread.ping_received = True
    if not _n_watchers or event not in (LOWERED, COMPILED):
        return
    loaded = dict(_loaded_programs())
    newest = {platform: programs[0] for platform, programs in loaded.items() if programs}
    with _lock:
        compilation = _compilations.pop(threading.get_ident(), _Compilation())
        if event == LOWERED:
            _compilations[threading.get_ident()] = _Compilation(newest)
            return
        name = str(fields.get('fun_name', 'the program'))
        found = [
            program
            for platform, programs in loaded.items()
            for program in _compiled_since(programs, name, compilation.newest.get(platform))
            if program not in compilation.others
        ]
        # a single new program is this thread's; several may include programs of other threads
        if compilation.newest and len(found) == 1:
            for other in _compilations.values():
                other.others += found
    # JAX also reports failed compilations, which have no program
    failed = sys.exc_info()[0] is not None
    if _thread.watchers and (found or not failed):
        name = re.sub(r'^\w+\((.*)\)$', r'\1', name)  # 'jit(f)' to 'f'
        _thread.watchers[-1](name, [_text(program) for program in found])


def _loaded_programs() -> Iterator[tuple[str, Sequence[Any]]]:
    """Yields each platform, and its loaded programs, newest first."""
    # imported here to keep `import einshard` fast
    from jax.extend.backend import backends

    # with JAX_PLATFORMS=cuda and no GPU, an assertion in JAX fails
    with suppress(AssertionError):
        for platform, backend in backends().items():
            yield platform, backend.live_executables()


def _compiled_since(programs: Sequence[Any], name: str, newest_before: Any) -> Iterator[Any]:
    """Yields the programs called `name` that any thread has compiled after `newest_before`.

    If `newest_before` is None, yields only the newest program called `name`.
    """
    for program in programs:
        if program is newest_before:
            return
        module_names = (_alphanumeric(module.name) for module in program.hlo_modules())
        if _alphanumeric(name) in module_names:
            yield program
            if newest_before is None:  # older programs may have the same name
                return


def _alphanumeric(name: str) -> str:
    # the HLO module of 'jit(<lambda>)' is called 'jit__lambda'
    return re.sub('[^A-Za-z0-9]', '', name)


def _text(program: Any) -> str:
    return '\n'.join(module.to_string() for module in program.hlo_modules())
