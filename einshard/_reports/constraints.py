"""A traced function -> constraints in it that constrain nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import AxisType, NamedSharding

from .._describe import describe_named
from .rows import Caution

_UNUSED = (
    'the result of this constraint is not used: to constrain a value is to make another, '
    'x = einshard(x, ...)'
)
_PUT = (
    'jax.device_put in a jitted function leaves the placement to the compiler: einshard, or '
    'jax.lax.with_sharding_constraint, constrains it'
)


def idle_constraints(jaxpr: Any, inputs: Mapping[int, Any]) -> Iterator[Caution]:
    """Constraints without effect, one for each line of the source.

    Those whose result nothing uses; those of an argument, or of the result of another constraint,
    to the sharding which that has anyway; and `jax.device_put`, which under automatic mesh axes
    moves nothing. What the compiler would have chosen without a constraint is not asked.

    Args:
        jaxpr: of the traced function.
        inputs: shardings of its arguments, by their number.
    """
    idle: dict[str, str | None] = {}  # by line: why, or None where one of that line has an effect
    known = {variable: inputs[i] for i, variable in enumerate(jaxpr.jaxpr.invars) if inputs.get(i)}
    for line, why in _walk(jaxpr.jaxpr, known):
        idle[line] = why and idle.get(line, why) and why
    for line, why in idle.items():
        if why is not None:
            yield Caution('no effect', why, line or None)


def _walk(jaxpr: Any, known: dict[Any, Any]) -> Iterator[tuple[str, str | None]]:
    """Line of the source, and why it has no effect, of every constraint; None for those with."""
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
                why = f"the value is '{text}' already: this constraint changes nothing"
            known[made] = sharding
            yield _line(eqn), why
        elif name == 'device_put':
            targets = [s for s in eqn.params['devices'] if isinstance(s, NamedSharding)]
            if targets and all(map(_only_places, targets)):
                yield _line(eqn), _PUT
        for inner in _inner(eqn.params.values()):
            yield from _walk(inner, {})


def _only_places(sharding: NamedSharding) -> bool:
    """Whether it asks for devices, not for a kind of memory, over automatic axes."""
    return sharding.memory_kind in (None, 'device') and set(sharding.mesh.axis_types) == {
        AxisType.Auto
    }


def _inner(parameters: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for parameter in parameters:
        if isinstance(parameter, list | tuple):
            yield from _inner(parameter)
        elif hasattr(parameter, 'eqns'):
            yield parameter
        elif hasattr(parameter, 'jaxpr') and hasattr(parameter.jaxpr, 'eqns'):
            yield parameter.jaxpr


def _line(eqn: Any) -> str:
    # not at import: it loads much that nothing else needs
    from jax.extend.source_info_util import summarize

    found = re.match(r'(.*?:\d+)\b', summarize(eqn.source_info))
    return found[1] if found else ''
