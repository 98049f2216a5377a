"""`clear_caches`, and the caches that it clears."""

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
    """Like `functools.lru_cache`, with a cache that `clear_caches` clears.

    Lookups run in C, and are thread-safe. The size is limited because a long-running notebook may
    create any number of meshes and expressions.
    """
    wrapped: Any = functools.lru_cache(maxsize=8192)(function)
    _caches.append(wrapped.cache_clear)
    return cast(Callable[_P, _R], wrapped)


def register_cache(cache: dict[_K, _V]) -> dict[_K, _V]:
    """Registers a dictionary for `clear_caches` to clear, and returns it."""
    _caches.append(cache.clear)
    return cache


def remember(cache: dict[_K, _V], key: _K, value: _V, limit: int = 65_536) -> _V:
    """Adds an entry to a dictionary that is a cache, and returns its value.

    Empties a full dictionary first: a server may see any number of shapes and paths. The limit is
    above the number of leaves of large models, because dropping entries one at a time while all
    leaves are looked up in order would lose every entry before its next use.
    """
    if len(cache) >= limit and key not in cache:
        cache.clear()
    cache[key] = value
    return value


def clear_caches() -> None:
    """Clears all caches of einshard, such as parsed expressions, shardings and meshes.

        >>> from einshard import clear_caches
        >>> clear_caches()

    Use it in tests, or after the devices of the process have changed.
    """
    for clear in _caches:
        clear()
