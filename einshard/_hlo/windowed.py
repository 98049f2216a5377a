"""Finds collective matmuls: dots and permutes that replace a collective.

XLA may split an all-gather or reduce-scatter and the dot next to it, to send one piece while it
multiplies another. This package reports the permutes, in a loop or unrolled, as the one collective
that they replace.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .module import Computation, Module, Site
from .sources import number_of

_BODY = re.compile(r'windowed_dot_general_body_(ag|rs)')  # a name from the SPMD partitioner
_KINDS = {'ag': 'all-gather', 'rs': 'reduce-scatter'}
_MOVES = frozenset(
    (
        *('bitcast', 'collective-permute-done', 'copy', 'copy-done', 'copy-start'),
        'get-tuple-element',
    )
)


def collective_matmuls(
    module: Module, permutes: Mapping[Site, int]
) -> Iterator[tuple[str, Computation, list[Site]]]:
    """Yields (kind, computation that contains the matmul, its permutes) of each collective matmul.

    The kind is that of the replaced collective: 'all-gather' or 'reduce-scatter'. `permutes` maps
    each permute of the program to its group size.
    """
    loops = {
        loop.start: (loop, _KINDS[body[1]])
        for loop in (module.find(' while(') if permutes else ())
        if (body := _BODY.search(loop.op.attributes))
    }
    looped: dict[int, list[Site]] = {}
    others: list[Site] = []
    for site in permutes:
        start = _loop_of(module, site, [loop for loop, _ in loops.values()])
        (others if start is None else looped.setdefault(start, [])).append(site)
    for start, sites in looped.items():
        loop, kind = loops[start]
        yield kind, loop.comp, sites
    for kind, sites in _unrolled(others):
        n = permutes[sites[0]]
        if max(2, n - 1) <= len(sites) <= n + 1:  # the permutes of one matmul
            yield kind, sites[0].comp, sites


# --- loops --------------------------------------------------------------------------------------


def _loop_of(module: Module, site: Site, loops: Sequence[Site]) -> int | None:
    path = {call.start for call in module.path(site.comp) or ()}
    for loop in loops:
        # the first or the last step may be outside of the loop
        is_next_to = loop.comp is site.comp and (
            _feeds_loop(site, loop) or _sends_output(site, loop)
        )
        if loop.start in path or is_next_to:
            return loop.start
    return None


def _feeds_loop(site: Site, loop: Site) -> bool:
    state = loop.comp[loop.op.operands[0]]
    return any(_origin(loop.comp, operand) == site.op.name for operand in state.operands)


def _sends_output(site: Site, loop: Site) -> bool:
    """Whether a permute sends an output of the loop, directly or through one fusion."""
    comp = site.comp
    op = comp[_origin(comp, site.op.operands[0])]
    is_same_dot = site.op.op_name == loop.op.op_name != ''
    sources = op.operands if op.opcode == 'fusion' and is_same_dot else [op.name]
    return loop.op.name in [_origin(comp, source) for source in sources]


def _origin(comp: Computation, name: str) -> str:
    """Traces a value back through `_MOVES`; returns the name of the instruction."""
    while comp[name].opcode in _MOVES:
        name = comp[name].operands[0]
    return name


# --- unrolled -----------------------------------------------------------------------------------


def _unrolled(permutes: Sequence[Site]) -> Iterator[tuple[str, list[Site]]]:
    """Groups permutes by dot and by the kind of the collective that they replace."""
    by_dot: dict[tuple[str, str, tuple[int, ...]], list[Site]] = {}
    for site in permutes:
        op = site.op
        if op.op_name.endswith('/dot_general'):  # not the user's own ppermute
            line = (number_of(field, op.metadata) for field in ('stack_frame_id', 'source_line'))
            key = site.comp.name, op.op_name, tuple(line)
            by_dot.setdefault(key, []).append(site)
    for sites in by_dot.values():
        by_kind: dict[str, list[Site]] = {}
        for chain, kind in _chains(sites):
            by_kind.setdefault(kind, []).extend(chain)
        yield from by_kind.items()


@dataclass
class _Chain:
    """A chain of permutes that pass an array from device to device in one direction."""

    start: str  # the name of the value that the first permute sends
    permutes: list[Site]
    is_sum: bool  # whether each device adds to the array before it sends it


def _chains(permutes: Sequence[Site]) -> Iterator[tuple[list[Site], str]]:
    """Groups the permutes of a windowed dot into chains.

    Yields each chain with the kind of collective that it replaces.
    """
    comp = permutes[0].comp
    by_name = {site.op.name: site for site in permutes}
    chains: list[_Chain] = []
    for site in sorted(permutes, key=lambda site: site.start):
        sent = _origin(comp, site.op.operands[0])
        op = comp[sent]
        operands = map(functools.partial(_origin, comp), op.operands)
        added = next((name for name in operands if name in by_name), None)
        # this permute sends the result of the one before, or of a fusion that adds to that result
        before = by_name.get(sent) or (by_name[added] if added and op.opcode == 'fusion' else None)
        chain = next((chain for chain in chains if before in chain.permutes), None)
        if chain is None:
            chains.append(_Chain(sent, [site], op.opcode in ('broadcast', 'constant')))
        else:
            chain.permutes.append(site)
            chain.is_sum |= sent not in by_name
    starts = {chain.start for chain in chains}
    gathered = {chain.start for chain in chains if len(chain.permutes) > 1 and not chain.is_sum}
    has_sums = any(chain.is_sum for chain in chains)
    if not gathered and not has_sums and len(starts) == len(chains):
        return  # permutes of different arrays
    for chain in chains:
        # a single permute may have either kind: next to sums, it is a sum in the other direction
        is_alone = len(chain.permutes) == 1 and chain.start not in gathered and has_sums
        yield chain.permutes, 'reduce-scatter' if chain.is_sum or is_alone else 'all-gather'
