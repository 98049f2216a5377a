"""Splits an array into blocks, and finds the devices that hold each block."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Colors of blocks in the order of their first devices. Their lightness differs, for gray prints
# and color-blind readers. Black text has a contrast ratio of at least 4.5 on each.
_COLORS = ((255, 244, 184), (172, 224, 178), (105, 192, 190), (94, 151, 205), (128, 104, 190))


@dataclass(frozen=True)
class Blocks:
    """An array split into blocks.

    Attributes:
        devices: the numbers of the devices that hold the blocks, block by block in row-major order.
        parts: the number of shards of each array axis.
        sizes: the sizes of the array axes; None if the shape is unknown.
        terms: the number of partial sums that add up to a block (unreduced in JAX), or 1. The
            devices of a block are grouped by partial sum.
    """

    devices: Sequence[int]
    parts: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None
    terms: int = 1

    @property
    def n_blocks(self) -> int:
        return math.prod(self.parts)

    @property
    def n_holders(self) -> int:
        """The number of devices that hold a block or, for partial sums, a term of it."""
        return len(self.devices) // self.n_blocks

    @property
    def replicas(self) -> int:
        """The number of devices that hold each block or, for partial sums, each term of a block."""
        return self.n_holders // self.terms

    @property
    def aspect(self) -> float:
        """Height divided by width of a picture. Depends only on the shape, not on the placement."""
        if self.sizes is None or len(self.parts) != 2:
            return 0.5 if len(self.parts) > 1 else 0.1
        high, wide = (max(1, size) for size in self.sizes)
        return min(max(high / wide, 0.5), 2.0)

    def holders(self, block: int) -> Sequence[int]:
        # a precomputed list for each block would take 2 s for a million blocks
        return self.devices[block * self.n_holders : (block + 1) * self.n_holders]

    def devices_label(self, holders: Sequence[int], limit: int = 4) -> str:
        """Lists at most `limit` devices or ranges: '0,8', '0-7', '0,8,..,56'.

        For partial sums, joins at most `limit` such lists by '+': '0+8' says that devices 0 and 8
        hold terms of the block.
        """
        step = len(holders) // self.terms
        groups = (holders[i : i + step] for i in range(0, len(holders), step))
        return _shorten([_device_list(group, limit) for group in groups], '+', limit)

    def color(self, first_device: int) -> str:
        """Returns the color of a block as '#rrggbb'."""
        position = self._color_order[first_device] / max(self.n_blocks - 1, 1) * (len(_COLORS) - 1)
        i = min(int(position), len(_COLORS) - 2)
        channels = zip(_COLORS[i], _COLORS[i + 1], strict=True)
        return '#' + ''.join(f'{round(a + (b - a) * (position - i)):02x}' for a, b in channels)

    @functools.cached_property
    def _color_order(self) -> dict[int, int]:
        return {first: i for i, first in enumerate(sorted(self.devices[:: self.n_holders]))}

    def part_label(self, axis: int, part: int) -> str:
        """Labels a shard of an axis with its range, such as '0:2'.

        If the sizes are unknown, returns 'part 0' for a sharded axis and '' for an unsharded one.
        """
        if self.sizes is None:
            return f'part {part}' if self.parts[axis] > 1 else ''
        step = self.sizes[axis] // self.parts[axis]
        return f'{part * step}:{(part + 1) * step}'

    def named_part_label(self, axis: int, part: int) -> str:
        """Labels a shard with the axis name: 'a 0:2'."""
        return f'{self.names[axis]} {self.part_label(axis, part)}'.rstrip()


def blocks_on_mesh(
    mesh: Mapping[Any, int],
    entries: Sequence[Sequence[Any]],
    names: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    signs: Mapping[Any, str],
) -> Blocks:
    """Splits an array over a mesh whose devices are numbered in row-major order.

    Args:
        mesh: mesh axes and their sizes, slowest-varying first.
        entries: for each array axis, the mesh axes that shard it, major to minor.
        sizes: the sizes of the array axes; None if unknown.
        signs: the signs of mesh axes: '+' if devices along the axis hold partial sums (unreduced in
            JAX), '=' if they hold partial sums of the gradient (reduced in JAX).
    """
    offsets: dict[Any, range] = {}  # of device numbers, by mesh axis
    stride = math.prod(mesh.values())
    for axis, size in mesh.items():
        offsets[axis] = range(0, stride, stride // size)
        stride //= size
    sharded = [axis for entry in entries for axis in entry]
    summed = [axis for axis in mesh if signs.get(axis) == '+']
    devices = [0]
    for axis in dict.fromkeys([*sharded, *summed, *mesh]):
        devices = [device + offset for device in devices for offset in offsets[axis]]
    parts = tuple(math.prod(mesh[axis] for axis in entry) for entry in entries)
    return Blocks(devices, parts, names, sizes, math.prod(mesh[axis] for axis in summed))


@dataclass(frozen=True)
class Slices:
    """The blocks of an array, arranged as matrices ("slices") over two array axes.

    There is one slice for each combination of shards of the other axes. If an array has more than
    two axes, unsharded axes are omitted.

    Attributes:
        titles: for each slice, its shards of the other axes, such as 'a 0:2, b 4:8'. May be ''.
    """

    blocks: Blocks
    row_axis: int | None
    column_axis: int | None
    titles: tuple[str, ...]

    @property
    def n_rows(self) -> int:
        return 1 if self.row_axis is None else self.blocks.parts[self.row_axis]

    @property
    def n_columns(self) -> int:
        return 1 if self.column_axis is None else self.blocks.parts[self.column_axis]

    def holders(self, n: int, row: int, column: int) -> Sequence[int]:
        # omitted axes have a single shard, so they do not change the index
        return self.blocks.holders((n * self.n_rows + row) * self.n_columns + column)

    def row_label(self, row: int) -> str:
        return '' if self.row_axis is None else self.blocks.named_part_label(self.row_axis, row)

    def column_label(self, column: int) -> str:
        axis = self.column_axis
        return '' if axis is None else self.blocks.named_part_label(axis, column)


def slices_of(blocks: Blocks) -> Slices:
    """Arranges blocks over the last two array axes or, if ndim > 2, the last two sharded ones."""
    axes = list(range(len(blocks.parts)))
    if len(axes) > 2:
        axes = [axis for axis in axes if blocks.parts[axis] > 1]
    *leading, row_axis, column_axis = [None, None, *axes]
    labels = [
        [blocks.named_part_label(axis, part) for part in range(blocks.parts[axis])]
        for axis in leading
        if axis is not None
    ]
    titles = tuple(map(', '.join, itertools.product(*labels)))
    return Slices(blocks, row_axis, column_axis, titles)


def _device_list(devices: Sequence[int], limit: int) -> str:
    texts = [str(device) for device in devices]
    if len(devices) > limit:  # runs of consecutive numbers: '3', '4-7'
        groups = itertools.groupby(enumerate(devices), lambda item: item[1] - item[0])
        runs = [[device for _, device in group] for _, group in groups]
        texts = [f'{run[0]}-{run[-1]}' if len(run) > 1 else f'{run[0]}' for run in runs]
    return _shorten(texts, ',', limit)


def _shorten(texts: list[str], separator: str, limit: int) -> str:
    if len(texts) > limit:
        texts = [*texts[:2], '..', texts[-1]] if limit > 2 else [*texts[:limit], '..']
    return separator.join(texts)
