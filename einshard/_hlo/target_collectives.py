"""Predicts the collectives of a program on TPU from the same program compiled for CPU.

XLA for CPU inserts no reduce-scatter: it all-reduces, and each device slices the result. It
combines all-reduces even if only some of the results are sliced. It all-reduces each term of a sum,
all-reduces along one mesh axis after another, and all-gathers an array once per use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from .collective import Collective
from .find_collectives import MARKS
from .groups import Groups, connected
from .module import ArrayType, Computation, Instruction, Module, Site

_MOVES = ('bitcast', 'convert', 'copy', 'reshape', 'transpose')
_CHANNEL = re.compile(r'channel_id=\d+')


def target_collectives(module: Module, collectives: Sequence[Collective]) -> list[Collective]:
    """Returns the collectives of a program compiled for CPU, as a TPU would run them.

    An all-reduce followed by a slice becomes a reduce-scatter, all-reduces that a TPU would combine
    become one, and repeated all-gathers of an array are dropped.

        >>> from einshard._hlo.find_collectives import find_collectives
        >>> from einshard._hlo.module import Module
        >>> from einshard._hlo.target_collectives import target_collectives
        >>> text = '''HloModule jit_f, num_partitions=4
        ...
        ... ENTRY %main (g: f32[8]) -> f32[2] {
        ...   %g = f32[8]{0} parameter(0)
        ...   %i = u32[] partition-id()
        ...   %sum = f32[8]{0} all-reduce(%g), replica_groups=[1,4]<=[4], to_apply=%add
        ...   ROOT %mine = f32[2]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={2}
        ... }
        ... '''
        >>> module = Module(text)
        >>> [c.kind for c in target_collectives(module, find_collectives(module))]
        ['reduce-scatter']
    """
    sites = {site.op.name: site for site in module.find(*MARKS)} if collectives else {}
    seen: set[tuple[str, ...]] = set()
    kept: list[Collective] = []
    for collective in collectives:
        _, comp, op = sites[collective.name]
        key = comp.name, op.operand_text, _CHANNEL.sub('', op.attributes)
        if not (collective.kind == 'all-gather' and key in seen):
            kept.append(collective)
        seen.add(key)
    return list(_Reductions(module, sites, kept).on_target(kept))


class _Use(NamedTuple):
    """An instruction that uses the result of an all-reduce, or a sum of such results."""

    user: Instruction
    operand_index: int  # of the result in `user.operands`; -1 if `user` is the result, and a root
    terms: frozenset[_Key]  # the all-reduces whose results are summed before this use


@dataclass
class _Reduction:
    """One array of an all-reduce, and how a TPU would reduce it."""

    array: ArrayType
    groups: Groups
    kind: str = 'all-reduce'  # or 'reduce-scatter'; '' if another reduction includes this one


_Key = tuple[str, int]  # the name of an all-reduce, and the index of the array in it


class _Reductions:
    def __init__(
        self, module: Module, sites: Mapping[str, Site], collectives: Sequence[Collective]
    ):
        self._module = module
        self._sites = sites
        self._by_key: dict[_Key, _Reduction] = {
            (c.name, i): _Reduction(array, c.groups)
            for c in collectives
            if c.kind == 'all-reduce' and len(sites[c.name].op.operands) == len(c.operands)
            for i, array in enumerate(c.operands)
        }
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
                    yield replace(collective, kind=kind, groups=groups, operands=tuple(arrays))
            if not parts:
                yield collective

    def _classify(self, key: _Key, reduction: _Reduction) -> None:
        """Sets the kind of a reduction, or joins it to the all-reduce that is its only use."""
        site = self._sites[key[0]]
        uses = list(self._array_uses(site, key))
        terms = {use.terms for use in uses}
        # the terms of a sum need only one all-reduce: the one with the smallest key
        if len(terms) == 1 and min(next(iter(terms))) != key:
            reduction.kind = ''
            return
        users = [use.user for use in uses]
        next_keys = [(use.user.name, use.operand_index) for use in uses]
        if len(uses) == 1 and next_keys[0] in self._by_key:
            after = self._by_key[next_keys[0]]
            if joined := _joined_groups(reduction.groups, after.groups):
                reduction.kind, after.groups = '', joined
        elif users and all(user.opcode == 'dynamic-slice' for user in users):
            n = len(reduction.groups[0]) if reduction.groups else 1
            sizes = {n * prod(user.results[0].shape) for user in users}
            if sizes == {prod(reduction.array.shape)}:
                reduction.kind = 'reduce-scatter'

    def _array_uses(self, site: Site, key: _Key) -> Iterator[_Use]:
        op, comp = site.op, site.comp
        names = [op.name]
        if op.type.startswith('('):
            names = [user.name for user in comp.users(op.name) if user.element == key[1]]
        for name in names:
            yield from self._uses(comp, name, frozenset([key]))

    def _uses(self, comp: Computation, name: str, terms: frozenset[_Key]) -> Iterator[_Use]:
        """Yields the uses of the value `name`, which is the sum of `terms`.

        Looks through moves, fusions, calls, and sums of all-reduces with equal groups.
        """
        for user in comp.users(name):
            called = self._module.called(user) if user.opcode in ('fusion', 'call') else None
            added = self._terms(comp, user.name) if user.opcode == 'add' else None
            if added and len({self._by_key[key].groups for key in added}) == 1:
                yield from self._uses(comp, user.name, added)
            elif user.opcode in _MOVES:
                yield from self._uses(comp, user.name, terms)
            else:
                for i, operand in enumerate(user.operands):
                    if operand == name and called is not None:
                        yield from self._uses(called, called.parameter(i), terms)
                    elif operand == name:
                        yield _Use(user, i, terms)
        root = comp.root
        if name == root.name:
            callers = _callers(self._module, comp)
            for site in callers:
                yield from self._uses(site.comp, site.op.name, terms)
            if not callers:
                yield _Use(root, -1, terms)

    def _terms(self, comp: Computation, name: str) -> frozenset[_Key] | None:
        """Returns the keys of the all-reduces whose sum is the value `name`, or None."""
        op = comp[name]
        if op.opcode in _MOVES:
            return self._terms(comp, op.operands[0])
        if op.opcode == 'add':
            parts = [self._terms(comp, operand) for operand in op.operands]
            return frozenset[_Key]().union(*filter(None, parts)) if all(parts) else None
        if op.opcode == 'parameter':
            callers = _callers(self._module, comp)
            if len(callers) == 1:
                _, caller, call = callers[0]
                return self._terms(caller, call.operands[op.parameter_number])
        is_element = op.opcode == 'get-tuple-element'
        key = (op.operands[0], op.element) if is_element else (name, 0)
        return frozenset([key]) if key in self._by_key else None


def _callers(module: Module, comp: Computation) -> list[Site]:
    sites = [] if comp.is_entry else module.call_sites(comp)
    return [site for site in sites if site.op.opcode in ('fusion', 'call')]


def _joined_groups(first: Groups, second: Groups) -> Groups | None:
    """Returns the groups of one all-reduce that can replace two successive ones, or None."""
    pairs = [(group[0], other) for group in (*first, *second) for other in group]
    joined = connected(pairs)
    size = len(first[0]) * len(second[0]) if first and second else 0
    return joined if all(len(group) == size for group in joined) else None
