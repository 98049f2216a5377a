"""How often a function is traced and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'
_open: list[list[str]] = []


def count_calls(
    function: Callable[[Any], Any],
    decorate: Callable[[Any], Any],
    values: Iterable[Any],
) -> tuple[int, int]:
    """Traces and compilations of a function, decorated and then called with each of the values.

    Traces are runs of its body: JAX reports one also where it finds it in its cache, from version
    0.9 on. Compilations are what it reports of the program of that name.
    """
    traced = 0

    def counted(x: Any) -> Any:
        nonlocal traced
        traced += 1
        return function(x)

    decorated = decorate(counted)
    with compilations() as compiled:
        for value in values:
            decorated(value)
    n_compiled = compiled.count('jit(counted)')
    if not (traced and n_compiled):
        raise RuntimeError(f'{traced} traces and these programs are reported: {compiled}')
    return traced, n_compiled


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the programs that JAX compiles meanwhile."""
    names: list[str] = []
    _open.append(names)
    try:
        yield names
    finally:
        _open[:] = [other for other in _open if other is not names]


def _listen(event: str, duration: float, **about: Any) -> None:
    if event == _COMPILED:
        for names in _open:
            names.append(str(about.get('fun_name')))


jax.monitoring.register_event_duration_secs_listener(_listen)
