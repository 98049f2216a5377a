"""Placements as numbers: which box of an array each device holds, without JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .._notation.counts import prime_factors

Entries = tuple[tuple[int, ...], ...]


class Placed(NamedTuple):
    """A placement over devices in a fixed order.

    Attributes:
        sizes: the mesh axes, slowest first.
        entries: for each array axis, the numbers of the mesh axes that shard it, major first.
    """

    sizes: tuple[int, ...]
    entries: Entries

    def parts(self) -> list[int]:
        """Returns the number of shards of each array axis."""
        return [prod(self.sizes[axis] for axis in axes) for axes in self.entries]


class Boxes(NamedTuple):
    """The box that each device holds: arrays [device, array axis]."""

    starts: Any
    stops: Any

    def volumes(self) -> Any:
        return np.prod(self.stops - self.starts, axis=1, dtype=np.int64)


def boxes(placed: Placed, shape: Sequence[int]) -> Boxes:
    """Returns the box of each device, in the order of the devices.

    >>> from einshard._move.placed import Placed, boxes
    >>> boxes(Placed((2, 2), ((1,),)), (6,)).starts.tolist()
    [[0], [3], [0], [3]]
    """
    n = prod(placed.sizes)
    coordinates = np.indices(placed.sizes).reshape(len(placed.sizes), n)
    starts = np.zeros((n, len(shape)), np.int64)
    for i, axes in enumerate(placed.entries):
        for axis in axes:
            starts[:, i] = starts[:, i] * placed.sizes[axis] + coordinates[axis]
    steps = np.array(shape, np.int64) // np.array(placed.parts(), np.int64)
    return Boxes(starts * steps, (starts + 1) * steps)


def missing(before: Boxes, after: Boxes) -> Any:
    """Returns the elements of its new box that each device does not hold yet."""
    widths = np.minimum(before.stops, after.stops) - np.maximum(before.starts, after.starts)
    return after.volumes() - np.prod(np.maximum(widths, 0), axis=1, dtype=np.int64)


def bound(before: Boxes, after: Boxes) -> int:
    """Returns the bound by pieces: the most elements that any device must receive.

    >>> from einshard._move.placed import Placed, bound, boxes
    >>> rows, columns = Placed((4,), ((0,), ())), Placed((4,), ((), (0,)))
    >>> bound(boxes(rows, (8, 8)), boxes(columns, (8, 8)))
    12
    """
    return int(missing(before, after).max(initial=0))


def refined(*several: Placed) -> list[Placed]:
    """Writes placements over the same devices on one mesh, whose axes have prime sizes.

    Meshes such as 3 x 4 and 4 x 3 have no common refinement. Then each is refined alone.
    """
    # how many devices come after each mesh axis, and before the first
    sizes_of = [placed.sizes for placed in several]
    marks = sorted({prod(sizes[i:]) for sizes in sizes_of for i in range(len(sizes) + 1)})
    if any(large % small for small, large in pairwise(marks)):
        return [refined(placed)[0] for placed in several]
    sizes: list[int] = []
    starts: dict[int, int] = {marks[0]: 0}  # counted from the fastest axis
    for small, large in pairwise(marks):
        sizes += sorted(prime_factors(large // small))
        starts[large] = len(sizes)

    def parts(placed: Placed, axis: int) -> Iterator[int]:
        after = prod(placed.sizes[axis + 1 :])
        first, last = starts[after], starts[after * placed.sizes[axis]]
        return (len(sizes) - 1 - i for i in reversed(range(first, last)))

    return [
        Placed(
            tuple(reversed(sizes)),
            tuple(
                tuple(part for axis in axes for part in parts(placed, axis))
                for axes in placed.entries
            ),
        )
        for placed in several
    ]
