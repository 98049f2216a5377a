"""Warnings about likely mistakes in a compiled program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding

from .._errors import plural
from .._functions.promise import Limits, allowed_text, counts_text, more_than
from .._hlo.all_gathers import AllGather
from .._hlo.collectives import Collective
from .._hlo.memory import Memory
from .._sharding.describe import describe_named
from .._sharding.mesh import AnyMesh
from .._text import format_bytes, short_source
from .collective_axes import sharding_of
from .report_rows import ArrayRow, Caution

Names = tuple[str, ...] | None


def promise_broken(
    limits: Limits | None, collectives: Sequence[Collective], memory: Memory | None
) -> Iterator[Caution]:
    """Reports a program that `collectives=` or `memory=` does not allow, so that calls raise."""
    if limits is None:
        return
    if limits.collectives is not None and (too_many := more_than(limits.collectives, collectives)):
        allowed, found = allowed_text(limits.collectives), counts_text(too_many)
        text = f'collectives= allows {allowed}, but it has {found}'
        yield Caution('promise broken', text, too_many[0].source)
    if limits.memory is not None and memory is not None and memory.total > limits.memory:
        needs = format_bytes(memory.total)
        text = f'memory= allows {format_bytes(limits.memory)}, but it needs {needs}'
        yield Caution('promise broken', text)


def replicated(rows: Sequence[ArrayRow], n_devices: int, above: int) -> Iterator[Caution]:
    """Reports large replicated arrays."""
    for row in rows:
        if n_devices > 1 and not row.sharded and row.bytes > above:
            yield Caution(
                'replicated',
                f'{row.path}, {row.array}, is replicated on {n_devices} devices: '
                f'{format_bytes(row.bytes)} on each',
            )


def fully_rematerialized(
    all_gathers: Mapping[str, AllGather],
    collectives: Sequence[Collective],
    meshes: Sequence[AnyMesh],
    inputs: Sequence[tuple[str, tuple[int, ...], Names]],
) -> Iterator[Caution]:
    """Reports arrays that are resharded by a full all-gather, of which devices keep a slice.

    `inputs` has path, shape and axis names of the program parameters.
    """
    for one in collectives:
        gather = all_gathers.get(one.name)
        if gather is None or gather.kept is None:
            continue
        names: Names = None
        what, is_full = str(gather.array), one.n_groups == 1
        if gather.parameter is not None:
            path, shape, names = inputs[gather.parameter]
            same_shape = shape == gather.array.shape
            names = names if same_shape else None
            what, is_full = f'{path}, {what},', is_full or same_shape
        ways = _from_and_to(gather, one, meshes, names) if is_full else None
        route = f" from '{ways[0]}' to '{ways[1]}'" if ways else ''
        if ways and ways[0] == ways[1]:
            route = f", '{ways[0]}' before and after,"
        among = plural(one.group_size, 'device')
        via = 'a full all-gather' if is_full else f'an all-gather among {among}'
        yield Caution(
            'full rematerialization',
            f'{what} is resharded{route} via {via} (involuntary full rematerialization): '
            f'{format_bytes(gather.array.bytes)}',
            one.source,
        )


def _from_and_to(
    gather: AllGather, one: Collective, meshes: Sequence[AnyMesh], names: Names
) -> tuple[str, str] | None:
    n_dims = len(gather.array.shape)
    assert gather.kept is not None
    held = [[0] * one.n_devices for _ in range(n_dims)]
    for group in one.groups or (tuple(range(one.n_devices)),):
        for i, device in enumerate(group):
            held[gather.dimension][device] = i
    for mesh in meshes:
        before, after = sharding_of(held, mesh), sharding_of(gather.kept, mesh)
        if before is not None and after is not None:
            return describe_named(before, n_dims, names), describe_named(after, n_dims, names)
    return None


def gathered_again(
    all_gathers: Mapping[str, AllGather],
    collectives: Sequence[Collective],
    inputs: Sequence[tuple[str, tuple[int, ...], Names]],
) -> Iterator[Caution]:
    """Reports arrays that are all-gathered repeatedly: by several collectives, or in a loop."""
    of_one: dict[object, list[tuple[AllGather, Collective]]] = {}
    for one in collectives:
        gather = all_gathers.get(one.name)
        if gather is not None:
            key = (gather.origin, gather.dimension, one.groups)
            of_one.setdefault(key, []).append((gather, one))
    for several in of_one.values():
        gather, one = several[0]
        what = str(gather.array)
        if gather.parameter is not None:
            what = f'{inputs[gather.parameter][0]}, {what},'
        if len(several) > 1:
            lines = dict.fromkeys(other.source for _, other in several if other.source)
            elsewhere = list(map(short_source, lines))[1:]
            also = f', also at {", ".join(elsewhere)}' if elsewhere else ''
            yield Caution(
                'gathered again', f'{what} is gathered {len(several)} times{also}', one.source
            )
        elif gather.invariant:
            iterations = 'every iteration'
            if one.executions is not None:
                iterations = f'each of {one.executions} iterations'
            yield Caution(
                'gathered again',
                f'{what} is gathered in {iterations} of a loop that does not change it',
                one.source,
            )


# --- constraints --------------------------------------------------------------------------------

_UNUSED = 'the result of this constraint is not used; write x = einshard(x, ...)'
_PUT = (
    'jax.device_put has no effect in a jitted function; use einshard or '
    'jax.lax.with_sharding_constraint'
)


def idle_constraints(jaxpr: Any, inputs: Mapping[int, Any]) -> Iterator[Caution]:
    """Reports constraints without effect, one per source line.

    Reports constraints whose result is unused; constraints that repeat the known sharding of an
    argument or of another constraint's output; and `jax.device_put` over Auto mesh axes.
    Constraints that match the compiler's own choice are not detected.

    Args:
        jaxpr: the traced function.
        inputs: shardings of its arguments by index.
    """
    idle: dict[
        str, str | None
    ] = {}  # by line: the reason, or None if one on that line has an effect
    known = {variable: inputs[i] for i, variable in enumerate(jaxpr.jaxpr.invars) if inputs.get(i)}
    for line, why in _walk(jaxpr.jaxpr, known):
        idle[line] = why and idle.get(line, why) and why
    for line, why in idle.items():
        if why is not None:
            yield Caution('no effect', why, line or None)


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
