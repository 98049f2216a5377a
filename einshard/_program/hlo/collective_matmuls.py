"""Finds collective matmuls: dots and permutes that replace a collective.

XLA may split an all-gather or reduce-scatter and the dot next to it, to send one piece while it
multiplies another. This package reports the permutes, in a loop or unrolled, as the one collective
that they replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .graph import Graph, Loop, Node
from .queries import moved_operand, reached
from .sources import number_of

_BODY = re.compile(r'body=%?[\w.]*windowed_dot_general_body_(ag|rs)')  # from the partitioner
_KINDS = {'ag': 'all-gather', 'rs': 'reduce-scatter'}


def find_collective_matmuls(
    graph: Graph, permutes: Mapping[Node, int]
) -> Iterator[tuple[str, Node, list[Node]]]:
    """Yields (kind, a node that runs as often as the matmul, its permutes) of each one.

    The kind is that of the replaced collective: 'all-gather' or 'reduce-scatter'. `permutes` maps
    each permute of the program to its group size.
    """
    if not permutes:
        return
    kinds: dict[Loop, str] = {}
    outside: dict[Loop, Node] = {}  # a node of the computation that contains the loop
    for node in graph.nodes:
        if node.opcode == 'phi' and (body := _BODY.search(node.attributes)):
            assert node.loop is not None
            loop = node.loop
            kinds[loop], outside[loop] = _KINDS[body[1]], node
    looped: dict[Loop, list[Node]] = {}
    others: list[Node] = []
    for permute in permutes:
        loop = next((loop for loop in kinds if _belongs(permute, loop)), None)
        (others if loop is None else looped.setdefault(loop, [])).append(permute)
    for loop, nodes in looped.items():
        yield kinds[loop], Node('loop', loop.op, '()', (), [], loop.scope), nodes
    for kind, nodes in _unrolled(others):
        n = permutes[nodes[0]]
        if max(2, n - 1) <= len(nodes) <= n + 1:  # the permutes of one matmul
            yield kind, nodes[0], nodes


def _source(node: Node) -> Node:
    while (moved := moved_operand(node)) is not None and node.opcode not in ('phi', 'exit'):
        node = moved
    return node


# --- loops --------------------------------------------------------------------------------------


def _belongs(permute: Node, loop: Loop) -> bool:
    """Whether a permute is in a loop, or next to it: its first or last step may be outside."""
    if loop in permute.loops:
        return True
    if permute.scope is not loop.scope:
        return False
    if any(_source(phi.inputs[0]) is permute for phi in loop.phis):
        return True
    sent = _source(permute.inputs[0])
    # an output of the loop, sent as it is or after one fusion of the same dot
    is_same_dot = permute.op.op_name == loop.op.op_name != ''
    sources = _fusion_inputs(sent) if is_same_dot else [sent]
    return any(_source(node).op is loop.op for node in sources)


def _fusion_inputs(node: Node) -> list[Node]:
    """Returns the nodes that a fusion reads, given its result; or the node, if it is in none."""
    fusion = node.scope.fusion
    if fusion is None:
        return [node]
    found = reached([node], lambda one: one.inputs if one.scope.fusion is fusion else ())
    return [one for one in found if one.scope.fusion is not fusion]


# --- unrolled -----------------------------------------------------------------------------------


def _unrolled(permutes: Sequence[Node]) -> Iterator[tuple[str, list[Node]]]:
    """Groups permutes by dot and by the kind of the collective that they replace."""
    by_dot: dict[object, list[Node]] = {}
    for node in permutes:
        op = node.op
        if op.op_name.endswith('/dot_general'):  # not the user's own ppermute
            place = node.scope, op.op_name, number_of('stack_frame_id', op.metadata)
            by_dot.setdefault(place, []).append(node)
    for nodes in by_dot.values():
        by_kind: dict[str, list[Node]] = {}
        for chain, kind in _chains(nodes):
            by_kind.setdefault(kind, []).extend(chain)
        yield from by_kind.items()


@dataclass
class _Chain:
    """A chain of permutes that pass an array from device to device in one direction."""

    start: Node  # what the first permute sends
    permutes: list[Node]
    is_sum: bool  # whether each device adds to the array before it sends it


def _chains(permutes: Sequence[Node]) -> Iterator[tuple[list[Node], str]]:
    """Groups the permutes of a windowed dot into chains.

    Yields each chain with the kind of collective that it replaces.
    """
    chains: list[_Chain] = []
    for permute in permutes:
        sent = _source(permute.inputs[0])
        before = sent
        if sent not in permutes:
            # this permute may send the result of a fusion that adds to that of the one before
            added = [*map(_source, _fusion_inputs(sent))] if sent.scope.fusion else []
            before = next((node for node in added if node in permutes), sent)
        chain = next((chain for chain in chains if before in chain.permutes), None)
        if chain is None:
            chains.append(_Chain(sent, [permute], sent.opcode in ('broadcast', 'constant')))
        else:
            chain.permutes.append(permute)
            chain.is_sum |= sent not in permutes
    starts = {chain.start for chain in chains}
    gathered = {chain.start for chain in chains if len(chain.permutes) > 1 and not chain.is_sum}
    has_sums = any(chain.is_sum for chain in chains)
    if not gathered and not has_sums and len(starts) == len(chains):
        return  # permutes of different arrays
    for chain in chains:
        # a single permute may have either kind: next to sums, it is a sum in the other direction
        is_alone = len(chain.permutes) == 1 and chain.start not in gathered and has_sums
        yield chain.permutes, 'reduce-scatter' if chain.is_sum or is_alone else 'all-gather'
