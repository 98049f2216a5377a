"""Predicts the collectives that reshard the arrays of a contraction. Does not import JAX.

Here, a sharding is a dict {mesh axis: array axis}, with the mesh axes of each array axis major to
minor. `_program/cost/contraction.py` finds the collectives. This adds blocks and the order of axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .._notation.expression import Term, with_unsharded
from .._program.cost.contraction import Step, reshard, restrict


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

    def n_shards(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh_shape[axis] for axis in axes)

    def is_divisible(self, sharding: Mapping[str, str]) -> bool:
        """Whether each array axis is divisible by its number of shards, or sizes are unknown."""
        return self.sizes is None or all(
            self.sizes[name] % self.n_shards(a for a, n in sharding.items() if n == name) == 0
            for name in set(sharding.values())
        )


@dataclass(frozen=True)
class ShardedArray:
    """An operand or the result of a contraction, and its sharding."""

    label: str  # 'operand 0', 'the result'
    names: tuple[str, ...]
    sharding: Mapping[str, str]
    space: Space

    def with_sharding(self, sharding: Mapping[str, str]) -> ShardedArray:
        """Returns the array in `sharding`, ignoring array axes that are not in `names`."""
        return replace(self, sharding=restrict(sharding, self.names))

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that shard an array axis, major to minor."""
        return tuple(axis for axis, sharded in self.sharding.items() if sharded == name)

    def array_axis(self, mesh_axis: str) -> str | None:
        return self.sharding.get(mesh_axis)

    def n_shards(self, name: str) -> int:
        return self.space.n_shards(self.mesh_axes(name))

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
        grid = [(self.array_axis(axis), size) for axis, size in mesh_shape.items() if size > 1]
        terms = [
            Term(name, math.prod(size for _, size in neighbors))
            for name, neighbors in itertools.groupby(grid, lambda pair: pair[0])
        ]
        return f'{left} -> {" ".join(map(str, with_unsharded(terms, self.names)))}'.strip()

    def communications(self, steps: Iterable[Step[str, str]]) -> Iterable[Communication]:
        mesh_shape = self.space.mesh_shape
        for step in steps:
            array, over = replace(self, sharding=step.block), step.axes
            if step.kind != 'collective-permute':
                over = tuple(axis for axis in mesh_shape if axis in over)
            n = self.space.n_shards(over)
            groups = math.prod(mesh_shape.values()) // n
            yield Communication(step.kind, self.label, over, n, groups, array.block, array.bytes)


def is_in_order(axes: Sequence[str], order: Iterable[str]) -> bool:
    return [axis for axis in order if axis in axes] == list(axes)


def resharding(old: ShardedArray, new: ShardedArray) -> Iterable[Communication]:
    """Yields the collectives that reshard an array from `old` to `new`.

    Devices first take slices, which need no communication.
    """
    current = dict(old.sharding)
    for name in old.names:
        # slice only if `new` keeps all mesh axes that shard this array axis
        if set(old.mesh_axes(name)) <= set(new.mesh_axes(name)):
            current |= {axis: name for axis in new.mesh_axes(name) if axis not in old.sharding}
    steps = reshard(current, new.sharding)
    kept = new.with_sharding({axis: n for axis, n in current.items() if axis in new.sharding})
    # mesh axes that shard an array axis in a different order than in `new`
    permuted = tuple(
        axis
        for name in old.names
        if kept.mesh_axes(name) != new.mesh_axes(name)[: len(kept.mesh_axes(name))]
        for axis in kept.mesh_axes(name)
    )
    if permuted and not any(step.kind == 'all-to-all' for step in steps):
        steps.append(Step('collective-permute', permuted, kept.sharding))
    return old.communications(steps)
