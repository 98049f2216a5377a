"""Jaxprs of all versions of JAX, open or closed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from jax.extend import core as jex
from jax.sharding import AxisType


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def opened(jaxpr: Any) -> Any:
    return getattr(jaxpr, 'jaxpr', jaxpr)


def closed_like(closed: Any, jaxpr: Any) -> Any:
    """Closes `jaxpr` if `closed` is a ClosedJaxpr of JAX before 0.12."""
    if jex.ClosedJaxpr is not jex.Jaxpr and isinstance(closed, jex.ClosedJaxpr):  # type: ignore[reportUnnecessaryComparison]
        return jex.ClosedJaxpr(jaxpr, closed.consts)
    return jaxpr


def is_var(v: Any) -> bool:
    return not isinstance(v, jex.Literal)


def map_jaxprs(eqn: Any, function: Callable[[Any], Any]) -> Any:
    """Returns the parameters of an equation with other jaxprs in them.

    Returns the same object if `function` returns the jaxprs as they are.
    """

    def mapped(value: Any) -> Any:
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            several = tuple(map(mapped, value))
            return value if all(map(operator.is_, several, value)) else several
        return function(value) if is_jaxpr(value) else value

    params = {name: mapped(value) for name, value in eqn.params.items()}
    is_same = all(value is eqn.params[name] for name, value in params.items())
    return eqn.params if is_same else params


def has_explicit_axes(sharding: Any) -> bool:
    return AxisType.Explicit in getattr(getattr(sharding, 'mesh', None), 'axis_types', ())
