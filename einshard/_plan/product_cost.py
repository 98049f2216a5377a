"""The cheapest way to compute one product whose arrays are sharded over mesh axes.

Every mesh axis shards one index of the product, or none. What an operand has along it in another
form is gathered or exchanged first. Along an axis that shards a contracted index, devices have
partial sums, which are added afterwards. This is what `parallelism` lists for an einsum; here it
takes a few microseconds, because a search asks for many thousands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .names import Names
from .products import Product, Side

# the mesh axes of every name, by position
Axes: TypeAlias = Mapping[str, tuple[int, ...]]
Sizes: TypeAlias = tuple[int, ...]


class Sent(NamedTuple):
    """A collective: its kind, what it carries, the mesh axes, and the bytes of its array."""

    kind: str
    role: str
    axes: tuple[int, ...]
    bytes: float


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a product: per execution, and for one device.

    Attributes:
        parts: the number of devices that share the flops.
        gathered: the bytes of the operands that collectives make.
    """

    seconds: float
    parts: int
    sent: tuple[Sent, ...]
    gathered: float


def shards(names: Sequence[Names], axes: Axes) -> dict[int, int]:
    """Returns the array axis that each mesh axis shards. A mesh axis shards one, the first."""
    found: dict[int, int] = {}
    for at, several in enumerate(names):
        for name in several:
            for axis in axes[name]:
                found.setdefault(axis, at)
    return found


def cheapest_way(
    product: Product,
    axes: Axes,
    sizes: Sizes,
    flop_seconds: float,
    seconds_per_byte: Callable[[str, tuple[int, ...]], float],
) -> Way:
    """Returns the way that takes the least time: flops and network, one after the other."""
    sides = [_Sharded(side, axes, sizes) for side in (*product.operands, product.out)]
    used = sorted({axis for side in sides for axis in side.holds})
    choices = [list(dict.fromkeys([*(s.holds[a] for s in sides if a in s.holds), None])) for a in used]
    best: Way | None = None
    for chosen in itertools.product(*choices):
        plan = {axis: index for axis, index in zip(used, chosen, strict=True) if index is not None}
        parts = math.prod(sizes[axis] for axis in plan)
        *operands, out = sides
        sent: list[Sent] = []
        gathered = 0.0
        for operand in operands:
            its = list(operand.brought_to(plan))
            gathered += operand.local(operand.of(plan)) if its else 0.0
            sent += its
        sent += out.summed_from(plan)
        seconds = flop_seconds / parts
        for one in sent:
            seconds += one.bytes * seconds_per_byte(one.kind, one.axes)
        if best is None or seconds < best.seconds:
            best = Way(seconds, parts, tuple(sent), gathered)
    assert best is not None, 'itertools.product of no lists has one element'
    return best


class _Sharded:
    """An operand or the result with its sharding: the index that each mesh axis shards."""

    def __init__(self, side: Side, axes: Axes, sizes: Sizes):
        self.side = side
        self.sizes = sizes
        self.indices = frozenset(side.indices)
        self.holds = {
            axis: side.indices[at]
            for axis, at in shards(side.names, axes).items()
            if sizes[axis] > 1
        }

    def local(self, holds: Mapping[int, int]) -> float:
        return self.side.bytes / math.prod(self.sizes[axis] for axis in holds)

    def of(self, plan: Mapping[int, int]) -> dict[int, int]:
        """The sharding of this array in a plan for the product."""
        return {axis: index for axis, index in plan.items() if index in self.indices}

    def sent(self, kind: str, axes: Sequence[int], n_bytes: float) -> Sent:
        return Sent(kind, self.side.role, tuple(axes), n_bytes * self.side.share)

    def brought_to(self, plan: Mapping[int, int]) -> Iterator[Sent]:
        """Yields the collectives that bring an operand to a plan. Slices are free, and come first."""
        new = self.of(plan)
        gathered = [axis for axis in self.holds if axis not in new]
        exchanged = [axis for axis, index in self.holds.items() if new.get(axis, index) != index]
        local = self.local(new)
        if exchanged:
            before = local / math.prod(self.sizes[axis] for axis in gathered)
            yield self.sent('all-to-all', exchanged, before)
        if gathered:
            yield self.sent('all-gather', gathered, local)

    def summed_from(self, plan: Mapping[int, int]) -> Iterator[Sent]:
        """Yields the collectives that add the partial sums of a plan, and reshard the result."""
        made = self.of(plan)
        partial = [axis for axis in plan if axis not in made]
        sliced = [axis for axis in self.holds if axis not in plan]
        local = self.local({**made, **dict.fromkeys(sliced, 0)})
        scattered = [axis for axis in partial if axis in self.holds]
        added = [axis for axis in partial if axis not in self.holds]
        if scattered:
            yield self.sent('reduce-scatter', scattered, local)
            local /= math.prod(self.sizes[axis] for axis in scattered)
        if added:
            yield self.sent('all-reduce', added, local)
        exchanged = [a for a, index in made.items() if self.holds.get(a, index) != index]
        gathered = [axis for axis in made if axis not in self.holds]
        if exchanged:
            yield self.sent('all-to-all', exchanged, local)
        if gathered:
            local *= math.prod(self.sizes[axis] for axis in gathered)
            yield self.sent('all-gather', gathered, local)
