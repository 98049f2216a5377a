"""Lists placements on the way from one placement to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .placed import Boxes, Entries, Placed, bound, boxes

MAX_LISTED = 3000
_MAX_SEEN = 20_000  # listed or not; 6 axes over 2 array axes have 13,000 placements


class Candidate(NamedTuple):
    """A placement on the way. `bounds` are those of the move to it, and of the move from it."""

    placed: Placed
    boxes: Boxes
    bounds: tuple[int, int]
    steps: int


def list_candidates(before: Placed, after: Placed, shape: Sequence[int]) -> list[Candidate]:
    """Lists placements that hold no more on a device than the ends, the most promising first."""
    first, last = boxes(before, shape), boxes(after, shape)
    most = max(int(first.volumes().max()), int(last.volumes().max()))
    listed: list[Candidate] = []
    for placed, steps in _by_distance(before, after):
        if placed in (before, after) or any(
            size % parts for size, parts in zip(shape, placed.parts(), strict=True)
        ):
            continue
        held = boxes(placed, shape)
        if held.volumes().max() <= most:
            bounds = bound(first, held), bound(held, last)
            listed.append(Candidate(placed, held, bounds, steps))
            if len(listed) == MAX_LISTED:
                break
    return sorted(listed, key=lambda c: (sum(c.bounds), c.steps))


def _by_distance(before: Placed, after: Placed) -> Iterator[tuple[Placed, int]]:
    """Yields placements, first those that differ from either end in the fewest mesh axes."""
    seen = dict.fromkeys((before, after), 0)
    level = [*seen]
    steps = 0
    while level and len(seen) < _MAX_SEEN:
        steps += 1
        found: list[Placed] = []
        for placed in level:
            for entries in _neighbors(placed.entries, len(placed.sizes)):
                other = Placed(placed.sizes, entries)
                if other not in seen:
                    seen[other] = steps
                    found.append(other)
                    yield other, steps
        level = found


def _neighbors(entries: Entries, n_axes: int) -> Iterator[Entries]:
    """Yields the placements in which one mesh axis is elsewhere."""
    for axis in range(n_axes):
        without = tuple(tuple(a for a in axes if a != axis) for axes in entries)
        yield without
        for i, axes in enumerate(without):
            for at in range(len(axes) + 1):
                yield (*without[:i], (*axes[:at], axis, *axes[at:]), *without[i + 1 :])
