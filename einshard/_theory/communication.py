"""Predicts the collectives that reshard the arrays of a contraction. Imports no JAX.

All layouts of a contraction have the same device axes (the axes of the device grid), and refer to
array axes by their index in `Space.names`. A `Layout` here has one split per device axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .._notation.expression import Term
from .._notation.layout import Layout, Split, merge_neighbors, replicate_axes
from .._notation.write import with_unsharded
from .._text import deprecated_alias


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective predicted by `parallelism`.

    Attributes:
        kind: 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' or 'collective-permute'.
        of: the array that it communicates, such as 'operand 0' or 'the result'.
        over: the device axes along which it runs.
        group_size: the number of devices in each group.
        groups: the number of groups.
        block: the block of a device before or after the collective, whichever is larger, such as
            'b/2 x'.
        bytes: the bytes of that block; None if sizes are not given.
    """

    kind: str
    of: str
    over: tuple[str, ...]
    group_size: int
    groups: int
    block: str
    bytes: int | None

    parties = deprecated_alias('parties', 'group_size')

    def __str__(self) -> str:
        amount = '' if self.bytes is None else f', {self.bytes:,} bytes'
        among = f'{self.groups} groups of ' if self.groups > 1 else ''
        return (
            f'{self.kind} of {self.of} over {", ".join(self.over)}: '
            f'[{self.block}]{amount}, among {among}{self.group_size} devices'
        )


@dataclass(frozen=True)
class Space:
    """The array axes, the device axes and the sizes of a contraction, common to all its arrays."""

    names: tuple[str, ...]  # all array axes
    devices: Mapping[str, int]  # device axes and their sizes, slowest-varying first
    sizes: Mapping[str, int] | None = None  # of the array axes; None if unknown
    item_bytes: int = 4

    @property
    def replicated(self) -> Layout:
        return Layout(tuple(Split(size, None, (axis,)) for axis, size in self.devices.items()))

    def sharded(self, layout: Layout, array_axes: Mapping[str, str | None]) -> Layout:
        """Reassigns device axes: {device axis: array axis, or None for replicas}.

        They become minor to the device axes that already shard the array axis.
        """
        positions = {a: None if n is None else self.names.index(n) for a, n in array_axes.items()}
        splits = [split for split in layout.splits if split.mesh_axes[0] not in positions]
        splits += [Split(self.devices[axis], at, (axis,)) for axis, at in positions.items()]
        # in a canonical order, so that equal layouts compare equal
        places = {axis: i for i, axis in enumerate(self.devices, len(self.names))}
        splits.sort(key=lambda s: places[s.mesh_axes[0]] if s.axis is None else s.axis)
        return Layout(tuple(splits))


@dataclass(frozen=True)
class Blocks:
    """An operand or the result of a contraction, with its layout; each device has one block."""

    array: str  # 'operand 0', 'the result'
    names: tuple[str, ...]
    layout: Layout
    space: Space

    def with_layout(self, layout: Layout) -> Blocks:
        """Returns the array in `layout`; device axes that shard axes it lacks hold replicas."""
        others = {i for i, name in enumerate(self.space.names) if name not in self.names}
        return replace(self, layout=self.space.sharded(replicate_axes(layout, others), {}))

    def sharded(self, array_axes: Mapping[str, str | None]) -> Blocks:
        """Reassigns device axes, as `Space.sharded` does."""
        return replace(self, layout=self.space.sharded(self.layout, array_axes))

    def device_axes(self, name: str) -> tuple[str, ...]:
        """Returns the device axes that shard an array axis, major to minor."""
        if name not in self.names:
            return ()
        at = self.space.names.index(name)
        return tuple(split.mesh_axes[0] for split in self.layout.splits if split.axis == at)

    def array_axis(self, device_axis: str) -> str | None:
        return next((name for name in self.names if device_axis in self.device_axes(name)), None)

    def n_shards(self, name: str) -> int:
        return self.layout.n_shards.get(self.space.names.index(name), 1)

    @property
    def block(self) -> str:
        """Formats the block of one device, such as 'b/2 x'."""
        counts = {name: self.n_shards(name) for name in self.names}
        return ' '.join(f'{name}/{n}' if n > 1 else name for name, n in counts.items())

    @property
    def bytes(self) -> int | None:
        sizes = self.space.sizes
        if sizes is None:
            return None
        return self.space.item_bytes * math.prod(
            sizes[name] // self.n_shards(name) for name in self.names
        )

    def expression(self) -> str:
        """Writes the layout with counts, or with device axes if these are out of device order."""
        left, devices = ' '.join(self.names), self.space.devices
        if not all(is_in_order(self.device_axes(name), devices) for name in self.names):
            by_name = [str(Term(name, mesh_axes=self.device_axes(name))) for name in self.names]
            return f'{left} -> {" ".join(by_name)}'
        axes = {split.mesh_axes[0]: split.axis for split in self.layout.splits}
        splits = [Split(size, axes[axis]) for axis, size in devices.items() if size > 1]
        names = [*self.space.names, None]  # the last name is for replicas
        terms = [
            Term(names[-1 if s.axis is None else s.axis], s.count) for s in merge_neighbors(splits)
        ]
        return f'{left} -> {" ".join(map(str, with_unsharded(terms, self.names)))}'.strip()

    def communication(self, kind: str, over: Sequence[str]) -> Communication:
        devices = self.space.devices
        group_size = math.prod(devices[axis] for axis in over)
        groups = math.prod(devices.values()) // group_size
        block, n_bytes = self.block, self.bytes
        return Communication(kind, self.array, tuple(over), group_size, groups, block, n_bytes)


def is_in_order(axes: Sequence[str], order: Iterable[str]) -> bool:
    return [axis for axis in order if axis in axes] == list(axes)


def resharding(old: Blocks, new: Blocks) -> tuple[Communication, ...]:
    """Returns the collectives that reshard an array from `old` to `new`.

    Devices first take slices, which need no communication.
    """
    current = old
    for name in old.names:
        # a slice needs all device axes that shard this array axis to shard it in `new`, too
        if set(old.device_axes(name)) <= set(new.device_axes(name)):
            unused = [axis for axis in new.device_axes(name) if old.array_axis(axis) is None]
            current = current.sharded(dict.fromkeys(unused, name))
    sharded = [axis for axis in old.space.devices if current.array_axis(axis)]
    gathered = [axis for axis in sharded if not new.array_axis(axis)]
    exchanged = [
        axis for axis in sharded if new.array_axis(axis) not in (None, current.array_axis(axis))
    ]
    collectives: list[Communication] = []
    if gathered:
        current = current.sharded(dict.fromkeys(gathered))
        collectives.append(current.communication('all-gather', gathered))
    # device axes that shard the same array axis, but in another order
    permuted = [
        axis
        for name in old.names
        if current.device_axes(name) != new.device_axes(name)[: len(current.device_axes(name))]
        for axis in current.device_axes(name)
    ]
    if exchanged:
        collectives.append(current.communication('all-to-all', exchanged))
    elif permuted:
        collectives.append(current.communication('collective-permute', permuted))
    return tuple(collectives)
