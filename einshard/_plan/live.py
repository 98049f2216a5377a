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
# arrays that are in memory at the same time, each with its count
Peak: TypeAlias = tuple[tuple[Stored, int], ...]

# operations whose result may share the memory of their operand
_VIEWS = frozenset(
    {'broadcast_in_dim', 'carry', 'convert_element_type', 'copy', 'expand_dims', 'reshape'}
    | {'optimization_barrier', 'sharding_constraint', 'squeeze', 'transpose'}
)
_MAX_PEAKS = 24  # every estimate computes the bytes of each peak


@dataclass(slots=True)
class _Buffer:
    """A buffer that holds a value and its views, as in `Roots`.

    Attributes:
        start, end: the positions of the first and the last operation that need the buffer.
        stored: the largest array in it.
    """

    start: int
    end: int
    stored: Stored


class Roots:
    """Maps a view to the value whose memory it uses, and other values to themselves."""

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


def find_peaks(program: Program, names: Sequence[tuple[Names, ...]]) -> tuple[Peak, ...]:
    """Returns sets of arrays that are in memory at the same time, the largest set first.

    Which set has the most bytes on a device depends on the sharding, so this returns up to
    `_MAX_PEAKS` sets. A set contains the operands and results of contractions, gathers and
    scatters, and the arrays that loops stack or carry. XLA may fuse other values. Arguments are
    left out.
    """
    roots = Roots(program)
    kept = {roots(value) for value in _in_memory(program.ops)}
    kept -= {roots(value) for value in program.arguments if value is not None}
    buffers = _buffers(program, names, roots, kept)
    if not buffers:
        return ()
    # arrays with less than 1/1000 of the bytes of the largest are left out
    least = max(buffer.stored[1] for buffer in buffers) // 1000
    found: dict[Peak, None] = {}
    for end in sorted({buffer.end for buffer in buffers}):
        live = [b.stored for b in buffers if b.start <= end <= b.end and b.stored[1] > least]
        found[tuple(sorted(Counter(live).items(), key=repr))] = None
    largest = sorted(found, key=lambda peak: -sum(n * stored[1] for stored, n in peak))
    return tuple(_without_subsets(largest[: 4 * _MAX_PEAKS])[:_MAX_PEAKS])


def _in_memory(ops: Iterable[Op]) -> Iterable[int]:
    """Yields the values that need memory, because XLA does not fuse them into their users."""
    for op in ops:
        einsum = op.relation.einsum
        if op.primitive in ('carry', 'scan_output'):
            yield from op.arrays_out
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
        for value in op.arrays_out:
            root = roots(value)
            if root not in kept:
                continue
            # a stacked result is in memory from the start of its loop
            start = spans[op.scan][0] if op.primitive == 'scan_output' else at
            n_bytes = program.values[value].bytes
            buffer = buffers.setdefault(root, _Buffer(start, at, (names[value], n_bytes)))
            scopes.setdefault(root, op.scope)
            buffer.end = len(program.ops) if value in results else max(buffer.end, at)
            if n_bytes > buffer.stored[1]:
                buffer.stored = names[value], n_bytes
        for value in op.arrays_in:
            root = roots(value)
            if root in buffers:
                end = spans[op.scan][1] if op.primitive == 'scan_input' else at
                # a loop that uses a value from outside needs it until its last iteration
                loop = _outermost_within(op.scope, scopes[root], program.parents)
                buffers[root].end = max(buffers[root].end, end, spans[loop][1] if loop else 0)
    return list(buffers.values())


def _spans(program: Program) -> dict[int, tuple[int, int]]:
    """Returns the positions of the first and the last operation of each loop, keyed by loop id."""
    spans: dict[int, tuple[int, int]] = {0: (0, 0)}
    for at, op in enumerate(program.ops):
        for scope in {op.scope, op.scan} - {0}:
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


def _without_subsets(peaks: Sequence[Peak]) -> list[Peak]:
    kept: list[tuple[Peak, Counter[Stored]]] = []
    for peak in peaks:
        counted = Counter(dict(peak))
        if not any(counted <= other for _, other in kept):
            kept.append((peak, counted))
    return [peak for peak, _ in kept]
