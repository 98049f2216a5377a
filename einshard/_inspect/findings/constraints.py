"""Finds constraints without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jax.sharding import AxisType, NamedSharding

from ..._sharding.describe import describe_named
from ..report_rows import Finding
from .facts import Facts

_UNUSED = 'the result of this constraint is not used; write x = einshard(x, ...)'
_PUT = (
    'jax.device_put has no effect in a jitted function; use einshard or '
    'jax.lax.with_sharding_constraint'
)


def idle_constraints(facts: Facts) -> Iterator[Finding]:
    """Reports constraints without effect, one per source line.

    Reports constraints whose result is unused, and `jax.device_put` over Auto mesh axes.
    """
    return (finding for finding, is_repeated in _idle(facts) if not is_repeated)


def repeated_constraints(facts: Facts) -> Iterator[Finding]:
    """Notes constraints that repeat the sharding of an argument or of another constraint.

    Constraints that match the compiler's own choice are not detected.
    """
    return (finding for finding, is_repeated in _idle(facts) if is_repeated)


def _idle(facts: Facts) -> Iterator[tuple[Finding, bool]]:
    """Yields findings, and whether the constraint repeats a known sharding."""
    if facts.stages.traced is None:
        return
    jaxpr = facts.stages.traced.jaxpr.jaxpr
    # by line: the reason, or None if one on that line has an effect
    idle: dict[str, str | None] = {}
    known = {
        variable: array.sharding
        for variable, array in zip(jaxpr.invars, facts.arguments, strict=False)
        if array.sharding is not None
    }
    for line, why in _walk(jaxpr, known):
        idle[line] = why and idle.get(line, why) and why
    for line, why in idle.items():
        if why is not None:
            yield Finding('no effect', why, line or None), why not in (_UNUSED, _PUT)


def _walk(jaxpr: Any, known: dict[Any, Any]) -> Iterator[tuple[str, str | None]]:
    """Yields (source line, reason) of every constraint; the reason is None if it has an effect."""
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    read |= {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == 'sharding_constraint':
            sharding, made = eqn.params['sharding'], eqn.outvars[0]
            before = known.get(eqn.invars[0])
            why = None
            if id(made) not in read:
                why = _UNUSED
            elif before is not None and before.is_equivalent_to(sharding, made.aval.ndim):
                text = sharding
                if isinstance(sharding, NamedSharding):
                    text = describe_named(sharding, made.aval.ndim)
                why = f"the value already is '{text}', so this constraint has no effect"
            known[made] = sharding
            yield _line(eqn), why
        elif name == 'device_put':
            targets = [s for s in eqn.params['devices'] if isinstance(s, NamedSharding)]
            if targets and all(map(_only_places, targets)):
                yield _line(eqn), _PUT
        for inner in _inner(eqn.params.values()):
            yield from _walk(inner, {})


def _only_places(sharding: NamedSharding) -> bool:
    """Whether it sets only a sharding over Auto axes, not a memory kind."""
    return sharding.memory_kind in (None, 'device') and set(sharding.mesh.axis_types) == {
        AxisType.Auto
    }


def _inner(parameters: Any) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation."""
    for parameter in parameters:
        if isinstance(parameter, list | tuple):
            yield from _inner(parameter)
        elif hasattr(parameter, 'eqns'):
            yield parameter
        elif hasattr(parameter, 'jaxpr') and hasattr(parameter.jaxpr, 'eqns'):
            yield parameter.jaxpr


def _line(eqn: Any) -> str:
    # imported here because it loads modules that nothing else needs
    from jax.extend.source_info_util import summarize

    found = re.match(r'(.*?:\d+)\b', summarize(eqn.source_info))
    return found[1] if found else ''
