"""Count the traces and compilations of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'
_compiled: list[str] = []  # names of all programs since the import of this module


def count_calls(
    function: Callable[[Any], Any], decorate: Callable[[Any], Any], values: Iterable[Any]
) -> tuple[int, int]:
    """Traces and compilations of the decorated function, called with each of the values.

    A trace is a run of its body: JAX reports cached traces too. Compilations
    are those that JAX reports for this function.
    """
    traced, before = 0, len(_compiled)

    def counted(x: Any) -> Any:
        nonlocal traced
        traced += 1
        return function(x)

    decorated = decorate(counted)
    for value in values:
        decorated(value)
    compiled = _compiled[before:]
    n_compiled = compiled.count('jit(counted)')
    if not (traced and n_compiled):
        raise RuntimeError(f'{traced} traces, and JAX reports these programs: {compiled}')
    return traced, n_compiled


def _listen(event: str, duration: float, **about: Any) -> None:
    if event == _COMPILED:
        _compiled.append(str(about.get('fun_name')))


jax.monitoring.register_event_duration_secs_listener(_listen)
