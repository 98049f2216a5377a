"""Collective einsums: loops of matrix products and permutes that replace a collective. No JAX.

XLA may split an all-gather or reduce-scatter and the product next to it into pieces, to send one
piece while it multiplies another. The program then has a loop with permutes. Together they are one
collective, with pieces as its operands or results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .loops import Executions
from .module import Computation, Module, Place

if TYPE_CHECKING:
    from .collectives import Collective

    Found = tuple[tuple[int, ...], Place, Collective]  # with the path of offsets to it

_BODY = re.compile(r'windowed_dot_general_body_(ag|rs)')  # named so by the SPMD partitioner
_MOVES = frozenset(
    ('copy', 'copy-start', 'copy-done', 'bitcast', 'collective-permute-done', 'get-tuple-element')
)


def merge_windowed(
    module: Module, executions: Executions, found: Sequence[Found]
) -> Iterator[Found]:
    """The collectives, with the permutes of each collective einsum merged into one."""
    loops = {
        loop.start: (loop, body[1])
        for loop in module.find(' while(')
        if (body := _BODY.search(loop.made.attributes))
    }
    members: dict[int, list[Found]] = {}
    for one in found:
        start = _loop(module, one[1], [loop for loop, _ in loops.values()]) if loops else None
        if start is None or one[2].kind != 'collective-permute':
            yield one
        else:
            members.setdefault(start, []).append(one)
    for start, several in members.items():
        loop, form = loops[start]
        yield _merged(several, form, executions.of(loop.here))


def _loop(module: Module, place: Place, loops: Sequence[Place]) -> int | None:
    """The offset of the loop that a permute belongs to."""
    path = {site.start for site in module.path(place.here) or ()}
    for loop in loops:
        if loop.start in path:
            return loop.start
        # the first or the last step may be outside of the loop
        if loop.here is place.here and (_is_first(place, loop) or _is_last(place, loop)):
            return loop.start
    return None


def _is_first(place: Place, loop: Place) -> bool:
    """Whether a permute sends what the loop starts with."""
    state = loop.here[loop.made.operands[0]]
    return any(_origin(loop.here, operand) == place.made.name for operand in state.operands)


def _is_last(place: Place, loop: Place) -> bool:
    """Whether a permute sends what the loop ends with, maybe after an elementwise fusion."""
    here, (sent, *_) = place.here, place.made.operands
    made = here[_origin(here, sent)]
    sources = made.operands if made.opcode == 'fusion' and _is_alike(place, loop) else [made.name]
    return loop.made.name in [_origin(here, source) for source in sources]


def _is_alike(place: Place, loop: Place) -> bool:
    return place.made.op_name == loop.made.op_name != ''


def _origin(here: Computation, name: str) -> str:
    """The instruction that made a value, traced through copies."""
    while here[name].opcode in _MOVES:
        name = here[name].operands[0]
    return name


def _merged(several: Sequence[Found], form: str, executions: int | None) -> Found:
    order, place, first = several[0]
    permutes = [one for _, _, one in several]
    piece = max((one.operands for one in permutes), key=lambda arrays: sum(a.bytes for a in arrays))
    n = max(one.group_size for one in permutes)
    sent = [(one.network_bytes or 0) * (one.executions or 1) for one in permutes]
    return (
        order,
        place,
        replace(
            max(permutes, key=lambda one: one.executions or 0),
            name=first.name,
            kind='all-gather' if form == 'ag' else 'reduce-scatter',
            operands=piece * (1 if form == 'ag' else n),
            results=piece * (n if form == 'ag' else 1),
            pairs=(),
            executions=executions,
            is_async=any(one.is_async for one in permutes),
            sent=sum(sent) // (executions or 1),
        ),
    )
