"""Finds sets of arrays that are live (in memory) at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._program.jaxpr.graph import Op, Program
from .names import AxisNames

# the names of each axis of an array, and its bytes
StoredArray: TypeAlias = tuple[tuple[AxisNames, ...], int]
# arrays that are live at the same time, each with its count
LiveSet: TypeAlias = tuple[tuple[StoredArray, int], ...]

# operations whose result may share the memory of their operand
_VIEWS = frozenset(
    {'broadcast_in_dim', 'carry', 'convert_element_type', 'copy', 'expand_dims', 'reshape'}
    | {'optimization_barrier', 'sharding_constraint', 'squeeze', 'transpose'}
)
_MAX_LIVE_SETS = 24  # every estimate computes the bytes of each set


@dataclass(slots=True)
class _Buffer:
    """The memory of a value and its views.

    Attributes:
        start, end: the positions of the operations between which the buffer is live.
        stored: the largest array in the buffer.
    """

    start: int
    end: int
    stored: StoredArray


class Roots:
    """Maps values that share memory, such as a value and its views, to the same root."""

    def __init__(self, program: Program):
        self._parents = list(range(len(program.values)))
        for op in program.ops:
            if op.primitive in _VIEWS:
                for old, new in zip(op.ins, op.outs, strict=False):
                    if old is not None and new is not None:
                        self._parents[self(new)] = self(old)

    def __call__(self, value: int) -> int:
        parents = self._parents
        while parents[value] != value:
            value = parents[value] = parents[parents[value]]
        return value


def find_live_sets(program: Program, names: Sequence[tuple[AxisNames, ...]]) -> tuple[LiveSet, ...]:
    """Returns up to `_MAX_LIVE_SETS` sets of arrays that are live at the same time.

    How much memory each needs depends on the sharding. The set that is largest without sharding
    comes first. A set contains operands and results of contractions, gathers and scatters, and
    arrays that loops stack or carry, but no arguments of the program. XLA may fuse other values.
    """
    roots = Roots(program)
    kept = {roots(value) for value in _unfused_values(program.ops)}
    kept -= {roots(value) for value in program.arguments if value is not None}
    buffers = _buffers(program, names, roots, kept)
    if not buffers:
        return ()
    # smaller arrays are left out
    least = max(buffer.stored[1] for buffer in buffers) // 1000
    found: dict[LiveSet, None] = {}
    for end in sorted({buffer.end for buffer in buffers}):
        live = [b.stored for b in buffers if b.start <= end <= b.end and b.stored[1] > least]
        found[tuple(sorted(Counter(live).items(), key=repr))] = None
    largest = sorted(found, key=lambda live: -sum(n * stored[1] for stored, n in live))
    kept_sets: list[tuple[LiveSet, Counter[StoredArray]]] = []
    for live_set in largest[: 4 * _MAX_LIVE_SETS]:
        counted = Counter(dict(live_set))
        if not any(counted <= other for _, other in kept_sets):  # not a subset
            kept_sets.append((live_set, counted))
    return tuple(live_set for live_set, _ in kept_sets[:_MAX_LIVE_SETS])


def _unfused_values(ops: Iterable[Op]) -> Iterator[int]:
    for op in ops:
        einsum = op.rule.einsum
        if op.primitive in ('carry', 'scan_output'):
            yield from op.arrays_out
        elif einsum is not None and len(einsum.operands) > 1:
            operands = [op.ins[i] for i in einsum.operands]
            yield from (value for value in (*operands, *op.outs) if value is not None)


def _buffers(
    program: Program, names: Sequence[tuple[AxisNames, ...]], roots: Roots, kept: set[int]
) -> list[_Buffer]:
    spans = _spans(program)
    buffers: dict[int, _Buffer] = {}
    results = {value for value in program.results if value is not None}
    loops: dict[int, int] = {}  # the loop in which each buffer is written first
    for at, op in enumerate(program.ops):
        for value in op.arrays_out:
            root = roots(value)
            if root not in kept:
                continue
            # a stacked result is live from the start of its loop
            start = spans[op.scan][0] if op.primitive == 'scan_output' else at
            n_bytes = program.values[value].bytes
            buffer = buffers.setdefault(root, _Buffer(start, at, (names[value], n_bytes)))
            loops.setdefault(root, op.loop)
            buffer.end = len(program.ops) if value in results else max(buffer.end, at)
            if n_bytes > buffer.stored[1]:
                buffer.stored = names[value], n_bytes
        for value in op.arrays_in:
            root = roots(value)
            if root in buffers:
                end = spans[op.scan][1] if op.primitive == 'scan_input' else at
                # a value that a loop reads from outside is live until the last iteration
                loop = _outermost_within(op.loop, loops[root], program.parent_loops)
                buffers[root].end = max(buffers[root].end, end, spans[loop][1] if loop else 0)
    return list(buffers.values())


def _spans(program: Program) -> dict[int, tuple[int, int]]:
    """Returns the positions of the first and the last operation of each loop, keyed by loop id."""
    spans: dict[int, tuple[int, int]] = {0: (0, 0)}
    for at, op in enumerate(program.ops):
        for loop in {op.loop, op.scan} - {0}:
            while loop:
                first, _ = spans.get(loop, (at, at))
                spans[loop] = first, at
                loop = program.parent_loops[loop]
    return spans


def _outermost_within(loop: int, outer: int, parent_loops: Sequence[int]) -> int:
    """Returns the child loop of `outer` that is or contains `loop`, or 0 if there is none."""
    found = 0
    while loop != outer and loop:
        found, loop = loop, parent_loops[loop]
    return found if loop == outer else 0
