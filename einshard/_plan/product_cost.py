"""The cheapest way to compute one product whose arrays are sharded over mesh axes.

Every mesh axis shards one index of the product, or none. An operand that it shards along another
index is gathered or exchanged first. If it shards a contracted index, the devices have partial
sums, which are added afterwards. `parallelism` lists the same for an einsum; this takes only
microseconds, because a search needs many thousands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .names import Names
from .products import Product, Side


class MeshAxis(NamedTuple):
    """A mesh axis: the distance between its devices in hardware order, and their number."""

    stride: int
    size: int


# the mesh axes of every name
Axes: TypeAlias = Mapping[str, tuple[MeshAxis, ...]]
# the time of a collective along mesh axes, for each byte of its array
Rate: TypeAlias = Callable[[str, Sequence[MeshAxis]], float]


class Sent(NamedTuple):
    """A collective: its kind, what it carries, the mesh axes, and the bytes of its array."""

    kind: str
    role: str
    axes: tuple[MeshAxis, ...]
    bytes: float


class Way(NamedTuple):
    """A way to compute a product, and its costs per execution and device.

    Attributes:
        parts: the number of devices that share the flops.
        gathered: the bytes of gathered or exchanged operands.
    """

    seconds: float
    parts: int
    sent: tuple[Sent, ...]
    gathered: float


def mesh_axes(sizes: Sequence[int]) -> tuple[MeshAxis, ...]:
    """Returns the axes of a mesh of these sizes."""
    found: list[MeshAxis] = []
    stride = 1
    for size in reversed(sizes):
        found.append(MeshAxis(stride, size))
        stride *= size
    return tuple(reversed(found))


def shards(names: Sequence[Names], axes: Axes) -> dict[MeshAxis, int]:
    """Returns the array axis that each mesh axis shards: the first one, if several name it."""
    found: dict[MeshAxis, int] = {}
    for at, several in enumerate(names):
        for name in several:
            for axis in axes[name]:
                found.setdefault(axis, at)
    return found


def cheapest_way(product: Product, axes: Axes, flop_seconds: float, rate: Rate) -> Way:
    """Returns the way with the least time, if flops and network do not overlap."""
    sides = [_Sharded(side, axes) for side in (*product.operands, product.out)]
    used = sorted({axis for side in sides for axis in side.holds})
    *operands, out = sides
    best: Way | None = None
    for chosen in itertools.product(*(_choices(axis, sides, product) for axis in used)):
        plan = {axis: at for axis, at in zip(used, chosen, strict=True) if at is not None}
        sent: list[Sent] = []
        gathered = 0.0
        for operand in operands:
            gathered += operand.reshard(plan, sent)
        out.reduce(plan, sent)
        parts = _size(plan)
        seconds = flop_seconds / parts
        for one in sent:
            seconds += one.bytes * rate(one.kind, one.axes)
        if best is None or seconds < best.seconds:
            best = Way(seconds, parts, tuple(sent), gathered)
    assert best is not None, 'itertools.product of no lists has one element'
    return best


def _choices(axis: MeshAxis, sides: Sequence[_Sharded], product: Product) -> list[int | None]:
    """The indices that a mesh axis may shard; with None if its devices may repeat work.

    If it shards an index in two of the arrays, it shards that index, as in XLA.
    """
    held = [side.holds[axis] for side in sides if axis in side.holds]
    for index in held:
        if held.count(index) > 1:
            return [index]
    return [*dict.fromkeys(held), *([None] if product.kind == 'product' else [])]


def _size(axes: Iterable[MeshAxis]) -> int:
    size = 1
    for axis in axes:
        size *= axis.size
    return size


class _Sharded:
    """An operand or the result with its sharding: the index that each mesh axis shards."""

    def __init__(self, side: Side, axes: Axes):
        self.bytes = side.bytes
        self.share = side.share
        self.role = side.role
        self.indices = side.indices
        self.holds = {
            axis: side.indices[at] for axis, at in shards(side.names, axes).items() if axis.size > 1
        }

    def add_collective(
        self, sent: list[Sent], kind: str, axes: list[MeshAxis], n_bytes: float
    ) -> None:
        sent.append(Sent(kind, self.role, tuple(axes), n_bytes * self.share))

    def reshard(self, plan: Mapping[MeshAxis, int], sent: list[Sent]) -> float:
        """Appends to `sent` the collectives that reshard an operand; returns its new bytes, or 0.

        `plan` has the index that each mesh axis shards. Slicing is free, and comes first.
        """
        new = {axis: index for axis, index in plan.items() if index in self.indices}
        gathered = [axis for axis in self.holds if axis not in new]
        exchanged = [axis for axis, index in self.holds.items() if new.get(axis, index) != index]
        if not gathered and not exchanged:
            return 0.0
        local = self.bytes / _size(new)
        if exchanged:
            self.add_collective(sent, 'all-to-all', exchanged, local / _size(gathered))
        if gathered:
            self.add_collective(sent, 'all-gather', gathered, local)
        return local

    def reduce(self, plan: Mapping[MeshAxis, int], sent: list[Sent]) -> None:
        """Appends to `sent` the collectives that add partial sums and reshard the result."""
        computed = {axis: index for axis, index in plan.items() if index in self.indices}
        holds = self.holds
        if computed == holds and len(computed) == len(plan):
            return
        partial = [axis for axis in plan if axis not in computed]
        sliced = [axis for axis in holds if axis not in plan]
        local = self.bytes / (_size(computed) * _size(sliced))
        scattered = [axis for axis in partial if axis in holds]
        added = [axis for axis in partial if axis not in holds]
        if scattered:
            self.add_collective(sent, 'reduce-scatter', scattered, local)
            local /= _size(scattered)
        if added:
            self.add_collective(sent, 'all-reduce', added, local)
        exchanged = [axis for axis, index in computed.items() if holds.get(axis, index) != index]
        gathered = [axis for axis in computed if axis not in holds]
        if exchanged:
            self.add_collective(sent, 'all-to-all', exchanged, local)
        if gathered:
            self.add_collective(sent, 'all-gather', gathered, local * _size(gathered))
