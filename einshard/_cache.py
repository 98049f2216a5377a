"""The caches of the package, in one place so that `clear_caches` finds them all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec('_P')
_R = TypeVar('_R')
_K = TypeVar('_K')
_V = TypeVar('_V')
_caches: list[Callable[[], None]] = []


def cached(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`functools.lru_cache`, whose C look-up takes 0.1 us and is safe in threads.

    Bounded, since a long-running notebook may make meshes and expressions without end.
    """
    wrapped: Any = functools.lru_cache(maxsize=8192)(function)
    _caches.append(wrapped.cache_clear)
    return cast(Callable[_P, _R], wrapped)


def register(cache: dict[_K, _V]) -> dict[_K, _V]:
    """Adds a dictionary to those that `clear_caches` empties."""
    _caches.append(cache.clear)
    return cache


def clear_caches() -> None:
    """Forgets every parsed expression, sharding and mesh.

    For tests, and after the devices of the process have changed.
    """
    for clear in _caches:
        clear()
