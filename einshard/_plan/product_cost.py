"""The cheapest way to compute one product whose arrays are sharded over mesh axes.

A way chooses for every mesh axis which index of the product it shards, or none. An operand is
resharded first if the mesh axis shards it along another index. If the mesh axis shards a contracted
index, the devices have partial sums, which are added afterwards. `parallelism` lists such ways for
an einsum; this module takes microseconds for a product, because a search needs many thousands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .names import Names
from .products import Product, Side


class MeshAxis(NamedTuple):
    """A mesh axis: the distance in hardware order between neighbors along it, and its size."""

    stride: int
    size: int


# the mesh axes of every name
Axes: TypeAlias = Mapping[str, tuple[MeshAxis, ...]]
# the time of a collective of this kind along these mesh axes, per byte of its array
SecondsPerByte: TypeAlias = Callable[[str, Sequence[MeshAxis]], float]


class Sent(NamedTuple):
    """A collective that a product needs.

    Attributes:
        role: what it carries, as in `Side`.
        axes: the mesh axes along which it runs.
        bytes: on each device, of its operand or of its result, whichever is larger. If several
            products share the collective, each has a fraction of them.
    """

    kind: str
    role: str
    axes: tuple[MeshAxis, ...]
    bytes: float


class Way(NamedTuple):
    """A way to compute a product, with its costs per execution and device.

    Attributes:
        seconds: of compute and network, without overlap.
        n_devices: the number of devices that share the flops.
        sent: the collectives.
        gathered: the bytes of resharded operands, which need memory in addition.
    """

    seconds: float
    n_devices: int
    sent: tuple[Sent, ...]
    gathered: float


def axes_of_shape(sizes: Sequence[int]) -> tuple[MeshAxis, ...]:
    """Returns the axes of a mesh with these axis sizes, slowest first."""
    found: list[MeshAxis] = []
    stride = 1
    for size in reversed(sizes):
        found.append(MeshAxis(stride, size))
        stride *= size
    return tuple(reversed(found))


def shards(names: Sequence[Names], axes: Axes) -> dict[MeshAxis, int]:
    """Returns the array axis that each mesh axis shards.

    If the names of several array axes have the same mesh axis, it shards the first of them.
    """
    found: dict[MeshAxis, int] = {}
    for i, axis_names in enumerate(names):
        for name in axis_names:
            for axis in axes[name]:
                found.setdefault(axis, i)
    return found


def cheapest_way(
    product: Product, axes: Axes, flop_seconds: float, seconds_per_byte: SecondsPerByte
) -> Way:
    """Returns the way that takes the least time.

    Args:
        flop_seconds: the time of the product's flops on one device.
    """
    sides = [_Sharded(side, axes) for side in (*product.operands, product.out)]
    used = sorted({axis for side in sides for axis in side.index_of})
    *operands, out = sides
    best: Way | None = None
    for chosen in itertools.product(*(_choices(axis, sides, product) for axis in used)):
        in_product = {axis: i for axis, i in zip(used, chosen, strict=True) if i is not None}
        sent: list[Sent] = []
        gathered = 0.0
        for operand in operands:
            gathered += operand.reshard(in_product, sent)
        out.reduce(in_product, sent)
        n_devices = _n_devices(in_product)
        seconds = flop_seconds / n_devices
        for one in sent:
            seconds += one.bytes * seconds_per_byte(one.kind, one.axes)
        if best is None or seconds < best.seconds:
            best = Way(seconds, n_devices, tuple(sent), gathered)
    assert best is not None, 'itertools.product of no lists has one element'
    return best


def _choices(axis: MeshAxis, sides: Sequence[_Sharded], product: Product) -> list[int | None]:
    """Lists the indices that a mesh axis may shard, and None if its devices may repeat work.

    If the mesh axis shards the same index of two arrays, that index is the only choice, as in XLA.
    """
    sharded = [side.index_of[axis] for side in sides if axis in side.index_of]
    for index in sharded:
        if sharded.count(index) > 1:
            return [index]
    return [*dict.fromkeys(sharded), *([None] if product.kind == 'product' else [])]


def _n_devices(axes: Iterable[MeshAxis]) -> int:
    return math.prod(axis.size for axis in axes)


class _Sharded:
    """An operand or the result with its sharding.

    Attributes:
        index_of: the index that each mesh axis shards.
    """

    def __init__(self, side: Side, axes: Axes):
        self.bytes = side.bytes
        self.share = side.share
        self.role = side.role
        self.indices = side.indices
        self.index_of = {
            axis: side.indices[i] for axis, i in shards(side.names, axes).items() if axis.size > 1
        }

    def add_collective(
        self, sent: list[Sent], kind: str, axes: list[MeshAxis], n_bytes: float
    ) -> None:
        sent.append(Sent(kind, self.role, tuple(axes), n_bytes * self.share))

    def reshard(self, in_product: Mapping[MeshAxis, int], sent: list[Sent]) -> float:
        """Appends to `sent` the collectives that reshard an operand.

        Slicing is free, and comes first.

        Args:
            in_product: the index that each mesh axis shards in the product.

        Returns:
            The bytes of the resharded operand per device; 0 if it needs no collective.
        """
        new = {axis: index for axis, index in in_product.items() if index in self.indices}
        old = self.index_of
        gathered = [axis for axis in old if axis not in new]
        exchanged = [axis for axis, index in old.items() if new.get(axis, index) != index]
        if not gathered and not exchanged:
            return 0.0
        local = self.bytes / _n_devices(new)
        if exchanged:
            self.add_collective(sent, 'all-to-all', exchanged, local / _n_devices(gathered))
        if gathered:
            self.add_collective(sent, 'all-gather', gathered, local)
        return local

    def reduce(self, in_product: Mapping[MeshAxis, int], sent: list[Sent]) -> None:
        """Appends to `sent` the collectives that add partial sums and reshard the result."""
        old = {axis: index for axis, index in in_product.items() if index in self.indices}
        new = self.index_of
        if old == new and len(old) == len(in_product):
            return
        partial = [axis for axis in in_product if axis not in old]
        sliced = [axis for axis in new if axis not in in_product]
        local = self.bytes / (_n_devices(old) * _n_devices(sliced))
        scattered = [axis for axis in partial if axis in new]
        added = [axis for axis in partial if axis not in new]
        if scattered:
            self.add_collective(sent, 'reduce-scatter', scattered, local)
            local /= _n_devices(scattered)
        if added:
            self.add_collective(sent, 'all-reduce', added, local)
        exchanged = [axis for axis, index in old.items() if new.get(axis, index) != index]
        gathered = [axis for axis in old if axis not in new]
        if exchanged:
            self.add_collective(sent, 'all-to-all', exchanged, local)
        if gathered:
            self.add_collective(sent, 'all-gather', gathered, local * _n_devices(gathered))
