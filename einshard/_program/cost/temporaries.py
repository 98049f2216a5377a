"""The memory of intermediate arrays, from the shardings of a program's values.

XLA fuses most of them. What stays in memory is what products, gathers and scatters take and return,
what loops carry (also the arrays that they stack), and the copies that an operation makes of
operands that are resharded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..traced.outline import MOVE, PRODUCTS, Outline, bytes_of
from ..traced.propagated import Axes

_WRITTEN = PRODUCTS | {'gather', 'scatter'}
# the result is in the memory of the operand, or is computed from it where it is needed
_VIEWS = frozenset(('broadcast_in_dim', 'convert', 'reshape', 'transpose', MOVE))


class _Buffer(NamedTuple):
    """Memory of a value and its views.

    Attributes:
        start, end: the first and the last step at which it is live.
        value, bytes: of the largest array in it.
    """

    start: int
    end: int
    value: int
    bytes: int


class Temporaries:
    """The intermediate arrays of an outline that stay in memory, and when they are live."""

    def __init__(self, outline: Outline):
        self._n_steps = len(outline.steps)
        self._buffers = _find_buffers(outline)

    def peak(
        self,
        axes: Sequence[Axes],
        n_shards: Callable[[Axes], int],
        copies: Mapping[int, int],
    ) -> int:
        """The most bytes that are live at the same time on a device.

        Args:
            axes: of each value.
            n_shards: into how many shards axes divide an array.
            copies: the bytes that steps take for resharded operands, by their position.
        """
        changes = [0] * (self._n_steps + 1)
        for start, end, value, n_bytes in self._buffers:
            n = n_bytes // n_shards(axes[value])
            changes[start] += n
            changes[end + 1] -= n
        live = accumulate(changes)
        return max(n + copies.get(i, 0) for i, n in enumerate(live))


def _find_buffers(outline: Outline) -> list[_Buffer]:
    roots = _Roots(len(outline.types))
    loops = outline.carried
    moves: dict[int, list[int]] = {}  # to each result of a loop: the initial value, then the next
    for step in outline.steps:
        if step.form.kind in _VIEWS and step.operands:
            [new] = step.results
            if new in loops:
                moves.setdefault(new, []).append(step.operands[0])
            else:
                roots.join(new, step.operands[0])
    kept = set[int]()
    # before any loop is in place, as what a loop passes on unchanged is where it was before
    is_same = {r: {roots.of(v) for v in each[1:]} <= {*loops[r]} for r, each in moves.items()}
    for result, each in moves.items():
        for value in (*loops[result], *(each if is_same[result] else each[1:])):
            roots.join(value, result)
    for result in moves:
        if not is_same[result]:
            kept.add(roots.of(result))
    for step in outline.steps:
        if step.form.kind in _WRITTEN:
            kept.update(map(roots.of, (*step.operands, *step.results)))
    # they are counted apart
    kept -= {roots.of(value) for value in outline.arguments}
    kept -= {roots.of(value) for value in outline.ends}
    found: dict[int, _Buffer] = {}
    for at, step in enumerate(outline.steps):
        for value in (*step.operands, *step.results):
            root = roots.of(value)
            if root in kept:
                n_bytes = bytes_of(outline.types[value])
                start, _, largest, most = found.get(root, (at, at, value, n_bytes))
                if n_bytes > most:
                    largest, most = value, n_bytes
                found[root] = _Buffer(start, at, largest, most)
    if outline.n_standing > 1:
        parts = _standing_parts(outline)
        for root, (start, end, value, n_bytes) in found.items():
            # what the backward pass of a layer needs, all equal layers keep
            if any(start <= a.stop and end in b for a, b in pairwise(parts)):
                found[root] = _Buffer(start, end, value, n_bytes * outline.n_standing)
    least = max((buffer.bytes for buffer in found.values()), default=0) // 1000
    return [buffer for buffer in found.values() if buffer.bytes > least]


def _standing_parts(outline: Outline) -> list[range]:
    """The steps of a layer that stands for others: forward, backward, and maybe more."""
    parts = list[range]()
    is_apart = True
    for at, step in enumerate(outline.steps):
        if step.op in outline.standing:
            start = at if is_apart else parts.pop().start
            parts.append(range(start, at + 1))
            is_apart = False
        elif step.form.kind in _WRITTEN:  # of another layer
            is_apart = True
    return parts


class _Roots:
    """The value that each value shares memory with."""

    def __init__(self, n: int):
        self._parents = [*range(n)]

    def of(self, value: int) -> int:
        parents = self._parents
        while parents[value] != value:
            value = parents[value] = parents[parents[value]]
        return value

    def join(self, a: int, b: int) -> None:
        self._parents[self.of(a)] = self.of(b)
