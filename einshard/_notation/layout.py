"""The device grid of an expression."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Split:
    """A dimension of the device grid, which shards an array axis or holds replicas."""

    count: int
    axis: int | None  # the position of the array axis; None for replicas
    mesh_axes: tuple[str, ...] = ()  # () for a split by count
    sign: str = ''  # '+' or '=' as in expressions; '' for array axes and plain replicas


@dataclass(frozen=True, slots=True)
class Layout:
    """The device grid of an expression.

    Splits by mesh axes come first, then splits by count, each kind in the order written. Splits by
    count divide the remaining devices, slowest-varying first. Exception: if an array axis has
    splits of both kinds, its splits by mesh axes stay among the splits by count, as written.

    Every split by count has a count above 1, and neighboring splits by count are merged if they
    have the same axis and sign. So equal placements without mesh axes have equal layouts.
    """

    splits: tuple[Split, ...]
    # positions of the axes that are replicated because their size is not divisible
    replicated_axes: tuple[int, ...] = field(default=(), compare=False)

    @property
    def n_shards(self) -> dict[int, int]:
        """The number of shards of each sharded array axis, by the position of the axis."""
        n_shards: dict[int, int] = {}
        for split in self.splits:
            if split.axis is not None:
                n_shards[split.axis] = n_shards.get(split.axis, 1) * split.count
        return {axis: n for axis, n in n_shards.items() if n > 1}


def replicate_axes(layout: Layout, axes: Collection[int]) -> Layout:
    """Returns the layout with these array axes replicated."""
    splits = [replace(s, axis=None) if s.axis in axes else s for s in layout.splits]
    return Layout(tuple(merge_neighbors(splits)))


def merge_neighbors(splits: Sequence[Split]) -> list[Split]:
    """Merges neighboring splits by count that have the same axis and sign."""
    merged: list[Split] = []
    for split in splits:
        last = merged[-1] if merged else None
        same = last and (last.axis, last.sign) == (split.axis, split.sign)
        if last and same and not (last.mesh_axes or split.mesh_axes):
            merged[-1] = replace(split, count=last.count * split.count)
        else:
            merged.append(split)
    return merged
