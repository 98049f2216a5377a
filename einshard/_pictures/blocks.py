"""Splits an array into blocks, and finds the devices that hold each block."""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """An array split into blocks.

    Attributes:
        devices: device numbers, block by block; blocks in row-major order.
        parts: the number of shards of each array axis.
        names: the names of the array axes.
        sizes: the sizes of the array axes; None if the shape is unknown.
    """

    devices: Sequence[int]
    parts: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None

    @property
    def replicas(self) -> int:
        """The number of devices with a replica of each block."""
        return len(self.devices) // self.n_blocks

    @property
    def n_blocks(self) -> int:
        return math.prod(self.parts)

    def holders(self, block: int) -> Sequence[int]:
        """Returns the devices that hold a block."""
        # not stored: a list per block would take 2 s for a million blocks
        return self.devices[block * self.replicas : (block + 1) * self.replicas]

    def head(self, axis: int, part: int) -> str:
        """Labels a shard of an axis: '0:2', or 'part 0' if the size is unknown."""
        if self.sizes is None:
            return f'part {part}' if self.parts[axis] > 1 else ''
        step = self.sizes[axis] // self.parts[axis]
        return f'{part * step}:{(part + 1) * step}'

    def named_head(self, axis: int, part: int) -> str:
        """Labels a shard of an axis, with the axis name: 'a 0:2'."""
        return f'{self.names[axis]} {self.head(axis, part)}'.rstrip()


def blocks_on_mesh(
    mesh: Mapping[Any, int],
    entries: Sequence[Sequence[Any]],
    names: tuple[str, ...],
    sizes: tuple[int, ...] | None,
) -> Blocks:
    """Splits an array over a mesh whose devices are numbered in row-major order.

    Args:
        mesh: mesh axes and their sizes, slowest first.
        entries: for each array axis, the mesh axes that shard it, major to minor.
        names: the names of the array axes.
        sizes: the sizes of the array axes; None if unknown.
    """
    steps: dict[Any, range] = {}
    stride = math.prod(mesh.values())
    for axis, size in mesh.items():
        steps[axis] = range(0, stride, stride // size)
        stride //= size
    sharded = [axis for entry in entries for axis in entry]
    devices = [0]
    for axis in [*sharded, *(axis for axis in mesh if axis not in sharded)]:
        devices = [first + step for first in devices for step in steps[axis]]
    parts = tuple(math.prod(mesh[axis] for axis in entry) for entry in entries)
    return Blocks(devices, parts, names, sizes)


@dataclass(frozen=True)
class Slices:
    """Blocks as matrices over the last two axes, one for each combination of the other shards.

    If there are more than two axes, unsharded axes are omitted.

    Attributes:
        blocks: the blocks.
        row_axis: the array axis that the rows show, or None.
        column_axis: the array axis that the columns show, or None.
        titles: for each slice, the shards of the leading axes.
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
        """Returns the devices that hold a block of the n-th slice."""
        # omitted axes have a single shard, so they do not change the index
        return self.blocks.holders((n * self.n_rows + row) * self.n_columns + column)

    def row_head(self, row: int) -> str:
        return '' if self.row_axis is None else self.blocks.named_head(self.row_axis, row)

    def column_head(self, column: int) -> str:
        axis = self.column_axis
        return '' if axis is None else self.blocks.named_head(axis, column)


def slices_of(blocks: Blocks) -> Slices:
    """Arranges blocks as matrices over the last two sharded axes."""
    axes = list(range(len(blocks.parts)))
    if len(axes) > 2:
        axes = [axis for axis in axes if blocks.parts[axis] > 1]
    *leading, row_axis, column_axis = [None, None, *axes]
    heads = [
        [blocks.named_head(axis, part) for part in range(blocks.parts[axis])]
        for axis in leading
        if axis is not None
    ]
    titles = tuple(map(', '.join, itertools.product(*heads)))
    return Slices(blocks, row_axis, column_axis, titles)


def device_list(devices: Sequence[int], tight: bool = False) -> str:
    """Abbreviates a list of device numbers: '0,8', '0-7', '0,8,..,120'; if tight, '0,8,..'."""
    if len(devices) <= (2 if tight else 4):
        return ','.join(map(str, devices))
    runs = [f'{first}-{last}' if first < last else f'{first}' for first, last in _runs(devices)]
    if len(runs) > (2 if tight else 3):
        runs[2:] = ['..'] if tight else ['..', runs[-1]]
    return ','.join(runs)


def _runs(devices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and last of each run of consecutive numbers."""
    first = last = devices[0]
    for device in devices[1:]:
        if device != last + 1:
            yield first, last
            first = device
        last = device
    yield first, last


def color(device: int) -> str:
    """Returns the color of a device as '#rrggbb', light enough for black text."""
    # steps of the golden ratio give neighbors distinct hues for any number of devices
    hue = device * 0.6180339887 % 1
    rgb = colorsys.hls_to_rgb(hue, 0.74 if device % 2 else 0.82, 0.75)
    return '#' + ''.join(f'{round(255 * value):02x}' for value in rgb)
