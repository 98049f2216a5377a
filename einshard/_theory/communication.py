"""Predicts the collectives that reshard the arrays of a contraction. Does not import JAX.

Here, a `Layout` has one split for each mesh axis, and `Split.axis` is an index into `Space.names`.
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
        of: the array: 'operand 0', 'operand 1' or 'the result'.
        over: the mesh axes along which it runs.
        group_size: the number of devices in each group.
        groups: the number of groups.
        block: the block of a device before or after the collective, whichever is larger, such as
            'b/2 x'.
        bytes: the bytes of that block, or None if sizes are not given.
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
    """The axes and sizes that all arrays of a contraction share."""

    names: tuple[str, ...]  # all array axes
    mesh_shape: Mapping[str, int]  # mesh axes and their sizes, slowest-varying first
    sizes: Mapping[str, int] | None = None  # of the array axes; None if unknown
    item_bytes: int = 4

    @property
    def replicated(self) -> Layout:
        return Layout(tuple(Split(size, None, (axis,)) for axis, size in self.mesh_shape.items()))

    def reassign(self, layout: Layout, array_axes: Mapping[str, str | None]) -> Layout:
        """Returns `layout` with the mesh axes in `array_axes` reassigned.

        `array_axes` maps them to the array axes to shard, or to None to replicate. They become
        minor to the mesh axes that already shard the array axis.
        """
        positions = {a: None if n is None else self.names.index(n) for a, n in array_axes.items()}
        splits = [split for split in layout.splits if split.mesh_axes[0] not in positions]
        splits += [Split(self.mesh_shape[axis], at, (axis,)) for axis, at in positions.items()]
        # sort the splits, so that equal layouts compare equal: replicas last, in mesh order
        last = {axis: i for i, axis in enumerate(self.mesh_shape, len(self.names))}
        splits.sort(key=lambda s: last[s.mesh_axes[0]] if s.axis is None else s.axis)
        return Layout(tuple(splits))

    def is_divisible(self, layout: Layout) -> bool:
        """Whether each array axis is divisible by its number of shards, or sizes are unknown."""
        return self.sizes is None or all(
            self.sizes[self.names[at]] % n == 0 for at, n in layout.n_shards.items()
        )


@dataclass(frozen=True)
class ShardedArray:
    """An operand or the result of a contraction, and its layout."""

    label: str  # 'operand 0', 'the result'
    names: tuple[str, ...]
    layout: Layout
    space: Space

    def with_layout(self, layout: Layout) -> ShardedArray:
        """Returns the array in `layout`, ignoring splits of array axes that are not in `names`."""
        others = {i for i, name in enumerate(self.space.names) if name not in self.names}
        return replace(self, layout=self.space.reassign(replicate_axes(layout, others), {}))

    def reassign(self, array_axes: Mapping[str, str | None]) -> ShardedArray:
        """Reassigns mesh axes, as `Space.reassign` does."""
        return replace(self, layout=self.space.reassign(self.layout, array_axes))

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that shard an array axis, major to minor."""
        if name not in self.names:
            return ()
        at = self.space.names.index(name)
        return tuple(split.mesh_axes[0] for split in self.layout.splits if split.axis == at)

    def array_axis(self, mesh_axis: str) -> str | None:
        return next((name for name in self.names if mesh_axis in self.mesh_axes(name)), None)

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
        """Writes the layout with counts, or mesh axes if an array axis has them out of order."""
        left, mesh_shape = ' '.join(self.names), self.space.mesh_shape
        if not all(is_in_order(self.mesh_axes(name), mesh_shape) for name in self.names):
            by_name = [str(Term(name, mesh_axes=self.mesh_axes(name))) for name in self.names]
            return f'{left} -> {" ".join(by_name)}'
        axes = {split.mesh_axes[0]: split.axis for split in self.layout.splits}
        splits = [Split(size, axes[axis]) for axis, size in mesh_shape.items() if size > 1]
        terms = [
            Term(None if s.axis is None else self.space.names[s.axis], s.count)
            for s in merge_neighbors(splits)
        ]
        return f'{left} -> {" ".join(map(str, with_unsharded(terms, self.names)))}'.strip()

    def communication(self, kind: str, over: Sequence[str]) -> Communication:
        mesh_shape = self.space.mesh_shape
        group_size = math.prod(mesh_shape[axis] for axis in over)
        groups = math.prod(mesh_shape.values()) // group_size
        block, n_bytes = self.block, self.bytes
        return Communication(kind, self.label, tuple(over), group_size, groups, block, n_bytes)


def is_in_order(axes: Sequence[str], order: Iterable[str]) -> bool:
    return [axis for axis in order if axis in axes] == list(axes)


def resharding(old: ShardedArray, new: ShardedArray) -> tuple[Communication, ...]:
    """Returns the collectives that reshard an array from `old` to `new`.

    Devices first take slices, which need no communication.
    """
    current = old
    for name in old.names:
        # slice only if `new` keeps all mesh axes that shard this array axis
        if set(old.mesh_axes(name)) <= set(new.mesh_axes(name)):
            unused = [axis for axis in new.mesh_axes(name) if old.array_axis(axis) is None]
            current = current.reassign(dict.fromkeys(unused, name))
    sharded = [axis for axis in old.space.mesh_shape if current.array_axis(axis)]
    gathered = [axis for axis in sharded if not new.array_axis(axis)]
    exchanged = [
        axis for axis in sharded if new.array_axis(axis) not in (None, current.array_axis(axis))
    ]
    collectives: list[Communication] = []
    if gathered:
        current = current.reassign(dict.fromkeys(gathered))
        collectives.append(current.communication('all-gather', gathered))
    # mesh axes that shard an array axis in a different order than in `new`
    permuted = [
        axis
        for name in old.names
        if current.mesh_axes(name) != new.mesh_axes(name)[: len(current.mesh_axes(name))]
        for axis in current.mesh_axes(name)
    ]
    if exchanged:
        collectives.append(current.communication('all-to-all', exchanged))
    elif permuted:
        collectives.append(current.communication('collective-permute', permuted))
    return tuple(collectives)
