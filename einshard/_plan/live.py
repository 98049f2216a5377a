"""Finds which arrays of a program are in memory at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .flatten import Op, Program
from .names import Names

# an array: the names of each axis, and the bytes
Stored: TypeAlias = tuple[tuple[Names, ...], int]
# arrays that are in memory at the same time, and how many there are of each
Peak: TypeAlias = tuple[tuple[Stored, int], ...]

# operations whose result is another view of their operand, or is written over it
VIEWS = frozenset(
    {'broadcast_in_dim', 'carry', 'convert_element_type', 'copy', 'expand_dims', 'reshape'}
    | {'optimization_barrier', 'sharding_constraint', 'squeeze', 'transpose'}
)
_MAX_PEAKS = 24


@dataclass(slots=True)
class _Buffer:
    start: int
    end: int
    stored: Stored


class Roots:
    """Finds the value whose memory a view uses."""

    def __init__(self, program: Program, views: frozenset[str] = VIEWS):
        self.of = list(range(len(program.values)))
        for op in program.ops:
            if op.primitive in views:
                for old, new in zip(op.ins, op.outs, strict=False):
                    if old is not None and new is not None:
                        self.of[self(new)] = self(old)

    def __call__(self, value: int) -> int:
        while self.of[value] != value:
            value = self.of[value] = self.of[self.of[value]]
        return value


def find_peaks(program: Program, names: Sequence[tuple[Names, ...]]) -> tuple[Peak, ...]:
    """Returns the largest sets of arrays that are in memory at the same time.

    Only what has to be in memory counts: results of products and lookups, their operands, and what
    loops stack and carry. Other values may be fused. Arguments are left out.
    """
    roots = Roots(program)
    kept = {roots(value) for value in _in_memory(program.ops)}
    kept -= {roots(value) for value in program.arguments if value is not None}
    buffers = _buffers(program, names, roots, kept)
    if not buffers:
        return ()
    least = max(buffer.stored[1] for buffer in buffers) // 1000
    found: dict[Peak, None] = {}
    for end in sorted({buffer.end for buffer in buffers}):
        live = [b.stored for b in buffers if b.start <= end <= b.end and b.stored[1] > least]
        found[tuple(sorted(Counter(live).items(), key=repr))] = None
    largest = sorted(found, key=lambda peak: -sum(n * one[1] for one, n in peak))
    return tuple(_not_contained(largest[: 4 * _MAX_PEAKS])[:_MAX_PEAKS])


def _in_memory(ops: Iterable[Op]) -> Iterable[int]:
    for op in ops:
        einsum = op.relation.einsum
        if op.primitive in ('carry', 'scan_output'):
            yield from (value for value in op.outs if value is not None)
        elif einsum is not None and len(einsum.operands) > 1:
            operands = [op.ins[i] for i in einsum.operands]
            yield from (value for value in (*operands, *op.outs) if value is not None)


def _buffers(
    program: Program, names: Sequence[tuple[Names, ...]], roots: Roots, kept: set[int]
) -> list[_Buffer]:
    spans = _spans(program)
    buffers: dict[int, _Buffer] = {}
    results = {value for value in program.results if value is not None}
    scopes: dict[int, int] = {}
    for at, op in enumerate(program.ops):
        for value in (value for value in op.outs if value is not None):
            root = roots(value)
            if root in kept:
                start = spans[op.body][0] if op.primitive == 'scan_output' else at
                stored = (names[value], program.values[value].bytes)
                one = buffers.setdefault(root, _Buffer(start, at, stored))
                scopes.setdefault(root, op.scope)
                one.end = max(one.end, at)
                if program.values[value].bytes > one.stored[1]:
                    one.stored = stored
                if value in results:
                    one.end = len(program.ops)
        for value in (value for value in op.ins if value is not None):
            root = roots(value)
            if root in buffers:
                end = spans[op.body][1] if op.primitive == 'scan_input' else at
                inner = _outermost_within(op.scope, scopes[root], program.parents)
                buffers[root].end = max(buffers[root].end, end, spans[inner][1] if inner else 0)
    return list(buffers.values())


def _spans(program: Program) -> dict[int, tuple[int, int]]:
    """The first and the last operation of every scope."""
    spans: dict[int, tuple[int, int]] = {0: (0, 0)}
    for at, op in enumerate(program.ops):
        for scope in {op.scope, op.body} - {0}:
            while scope:
                first, _ = spans.get(scope, (at, at))
                spans[scope] = first, at
                scope = program.parents[scope]
    return spans


def _outermost_within(scope: int, outer: int, parents: Sequence[int]) -> int:
    """Returns the outermost loop inside `outer` that contains `scope`; 0 if there is none."""
    found = 0
    while scope != outer and scope:
        found, scope = scope, parents[scope]
    return found if scope == outer else 0


def _not_contained(peaks: Sequence[Peak]) -> list[Peak]:
    kept: list[tuple[Peak, Counter[Stored]]] = []
    for peak in peaks:
        counted = Counter(dict(peak))
        if not any(counted <= other for _, other in kept):
            kept.append((peak, counted))
    return [peak for peak, _ in kept]
