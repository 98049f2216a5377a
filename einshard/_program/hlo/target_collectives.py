"""Predicts the collectives of a program on TPU from the same program compiled for CPU.

XLA for CPU inserts no reduce-scatter: it all-reduces, and each device slices the result. It
combines all-reduces even if only some of the results are sliced. It all-reduces each term of a sum,
all-reduces along one mesh axis after another, and all-gathers an array once per use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from .collective import Collective
from .graph import Graph, Node
from .groups import Groups, connected
from .opcodes import COPIES
from .queries import results
from .text import ArrayType

_CHANNEL = re.compile(r'channel_id=\d+')
_MAX_TERMS = 256  # of a sum; keeps sets small in a chain of all-reduces and additions


def target_collectives(graph: Graph, collectives: Sequence[Collective]) -> list[Collective]:
    """Returns the collectives of a program compiled for CPU, as a TPU would run them.

    An all-reduce followed by a slice becomes a reduce-scatter, all-reduces that a TPU would combine
    become one, and repeated all-gathers of an array are dropped.

        >>> from einshard._program.hlo.find_collectives import find_collectives
        >>> from einshard._program.hlo.graph import Graph
        >>> from einshard._program.hlo.target_collectives import target_collectives
        >>> from einshard._program.hlo.text import HloModule
        >>> text = '''HloModule jit_f, num_partitions=4
        ...
        ... ENTRY %main (g: f32[8]) -> f32[2] {
        ...   %g = f32[8]{0} parameter(0)
        ...   %i = u32[] partition-id()
        ...   %sum = f32[8]{0} all-reduce(%g), replica_groups=[1,4]<=[4], to_apply=%add
        ...   ROOT %mine = f32[2]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={2}
        ... }
        ... '''
        >>> graph = Graph(HloModule(text))
        >>> [c.kind for c in target_collectives(graph, find_collectives(graph))]
        ['reduce-scatter']
    """
    seen: set[object] = set()
    kept: list[Collective] = []
    for collective in collectives:
        node = collective.nodes[0]
        key = node.scope, node.inputs, _CHANNEL.sub('', node.attributes)
        if not (collective.kind == 'all-gather' and key in seen):
            kept.append(collective)
        seen.add(key)
    return list(_Reductions(graph, kept).on_target(kept))


class _Use(NamedTuple):
    """An operation that uses the result of an all-reduce, or a sum of such results."""

    user: Node | None  # None if it is a result of the program
    operand_index: int
    terms: frozenset[_Key]  # the all-reduces whose results are summed before this use


@dataclass
class _Reduction:
    """One array of an all-reduce, and how a TPU would reduce it."""

    node: Node
    array: ArrayType
    groups: Groups
    kind: str = 'all-reduce'  # or 'reduce-scatter'; '' if another reduction includes this one


_Key = tuple[str, int]  # the name of an all-reduce, and the index of the array in it


class _Reductions:
    def __init__(self, graph: Graph, collectives: Sequence[Collective]):
        self._outputs = set(graph.outputs)
        self._by_key: dict[_Key, _Reduction] = {
            (c.name, i): _Reduction(c.nodes[0], array, c.device_groups)
            for c in collectives
            if c.kind == 'all-reduce' and len(c.nodes[0].inputs) == len(c.operands)
            for i, array in enumerate(c.operands)
        }
        self._terms = self._find_terms(graph) if self._by_key else {}
        for key, reduction in self._by_key.items():
            self._classify(key, reduction)

    def on_target(self, collectives: Sequence[Collective]) -> Iterator[Collective]:
        """Yields what a TPU runs. May drop an all-reduce, or split it by kind and groups."""
        for collective in collectives:
            parts: dict[tuple[str, Groups], list[ArrayType]] = {}
            for i in range(len(collective.operands)):
                reduction = self._by_key.get((collective.name, i))
                if reduction is not None:
                    parts.setdefault((reduction.kind, reduction.groups), []).append(reduction.array)
            for (kind, groups), arrays in parts.items():
                if kind:
                    yield replace(
                        collective, kind=kind, device_groups=groups, operands=tuple(arrays)
                    )
            if not parts:
                yield collective

    def _classify(self, key: _Key, reduction: _Reduction) -> None:
        """Sets the kind of a reduction, or joins it to the all-reduce that is its only use."""
        node = reduction.node
        summed = results(node, node.inputs[key[1]])
        uses = [use for result in summed for use in self._uses(result, frozenset([key]))]
        terms = {use.terms for use in uses}
        # the terms of a sum need only one all-reduce: the one with the smallest key
        if len(terms) == 1 and min(next(iter(terms))) != key:
            reduction.kind = ''
            return
        users = [use.user for use in uses]
        next_keys = [(use.user.name if use.user else '', use.operand_index) for use in uses]
        if len(uses) == 1 and next_keys[0] in self._by_key:
            after = self._by_key[next_keys[0]]
            if joined := _joined_groups(reduction.groups, after.groups):
                reduction.kind, after.groups = '', joined
            return
        sliced = [user for user in users if user is not None and user.opcode == 'dynamic-slice']
        if users and len(sliced) == len(users):
            n = len(reduction.groups[0]) if reduction.groups else 1
            sizes = {n * prod(user.array.shape) for user in sliced}
            if sizes == {prod(reduction.array.shape)}:
                reduction.kind = 'reduce-scatter'

    def _uses(self, node: Node, terms: frozenset[_Key]) -> Iterator[_Use]:
        """Yields the uses of `node`, which is the sum of `terms`.

        Looks through moves, and through sums of all-reduces with equal groups.
        """
        pending = [(node, terms)]
        seen = {*pending}
        while pending:
            node, terms = pending.pop()
            if node in self._outputs:
                yield _Use(None, -1, terms)
            summed: list[tuple[Node, frozenset[_Key]]] = []
            for user in node.users:
                added = self._terms.get(user) if user.opcode == 'add' else None
                if added and len({self._by_key[key].groups for key in added}) == 1:
                    summed.append((user, added))
                elif user.opcode in COPIES:
                    summed.append((user, terms))
                else:
                    at = (i for i, operand in enumerate(user.inputs) if operand is node)
                    yield from (_Use(user, i, terms) for i in at)
            pending += [pair for pair in summed if pair not in seen]
            seen.update(summed)

    def _find_terms(self, graph: Graph) -> dict[Node, frozenset[_Key]]:
        """Finds the nodes that are sums of all-reduces, with the keys of these."""
        found: dict[Node, frozenset[_Key]] = {}
        for node in graph.nodes:
            if node.opcode in COPIES or node.opcode == 'add':
                parts = [found.get(operand) for operand in node.inputs]
                terms = frozenset[_Key]().union(*filter(None, parts))
                if parts and all(parts) and len(terms) <= _MAX_TERMS:
                    found[node] = terms
            elif (key := (node.name, max(node.index, 0))) in self._by_key:
                found[node] = frozenset([key])
        return found


def _joined_groups(first: Groups, second: Groups) -> Groups | None:
    """Returns the groups of one all-reduce that can replace two successive ones, or None."""
    pairs = [(group[0], other) for group in (*first, *second) for other in group]
    joined = connected(pairs)
    size = len(first[0]) * len(second[0]) if first and second else 0
    return joined if all(len(group) == size for group in joined) else None
