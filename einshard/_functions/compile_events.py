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
from typing import Any, TypeAlias

import jax

# the events that JAX reports before and after it compiles a program
LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'
COMPILED = '/jax/core/compile/backend_compile_duration'
_PING = '/einshard/ping'

# Called with the name of a jitted function, and the HLO texts of the programs compiled for it; no
# texts for a program on devices that this process does not have.
Watcher: TypeAlias = Callable[[str, Sequence[str]], None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.newest: dict[str, Any] = {}  # {platform: newest program at the last event}
        self.ping_received = False


_thread = _Thread()
_lock = threading.Lock()


def watch(watcher: Watcher) -> None:
    """Adds a watcher for this thread. Only the watcher added last is called."""
    with _lock:
        if not is_listening():
            jax.monitoring.register_event_duration_secs_listener(_on_event)
    _thread.watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    _thread.watchers.reverse()
    _thread.watchers.remove(watcher)  # the one added last
    _thread.watchers.reverse()
    if not _thread.watchers:
        _thread.newest = {}  # references to programs keep them in memory


def is_listening() -> bool:
    """Whether JAX still calls `_on_event`; `jax.monitoring.clear_event_listeners` removes it."""
    _thread.ping_received = False
    jax.monitoring.record_event_duration_secs(_PING, 0.0)
    return _thread.ping_received


def _on_event(event: str, duration_secs: float, **fields: Any) -> None:
    if event == _PING:
        _thread.ping_received = True
    if not _thread.watchers or event not in (LOWERED, COMPILED):
        return
    before, _thread.newest = _thread.newest, {}
    name = str(fields.get('fun_name', 'the program'))
    texts: list[str] = []
    for platform, programs in _loaded_programs():
        if programs:
            _thread.newest[platform] = programs[0]
        if event == COMPILED:
            texts += map(_text, _compiled_since(programs, name, before.get(platform)))
    # JAX also reports a compilation that failed, which has no program
    failed = sys.exc_info()[0] is not None
    if event == COMPILED and (texts or not failed):
        name = re.sub(r'^\w+\((.*)\)$', r'\1', name)  # 'jit(f)' to 'f'
        _thread.watchers[-1](name, texts)


def _loaded_programs() -> Iterator[tuple[str, Sequence[Any]]]:
    """Yields each platform, and its loaded programs, newest first."""
    # imported here because it would add to the import time
    from jax.extend.backend import backends

    for platform, backend in backends().items():
        yield platform, backend.live_executables()


def _compiled_since(programs: Sequence[Any], name: str, newest_before: Any) -> Iterator[Any]:
    """Yields the programs called `name`, of all threads, that are newer than `newest_before`.

    If `newest_before` is None, yields only the newest program called `name`.
    """
    for program in programs:
        if program is newest_before:
            return
        module_names = (_alphanumeric(module.name) for module in program.hlo_modules())
        if _alphanumeric(name) in module_names:
            yield program
            if newest_before is None:  # the others may be older
                return


def _alphanumeric(name: str) -> str:
    # the HLO module of 'jit(<lambda>)' is called 'jit__lambda'
    return re.sub('[^A-Za-z0-9]', '', name)


def _text(program: Any) -> str:
    return '\n'.join(module.to_string() for module in program.hlo_modules())
