"""Blocks of an array and the devices that hold them -> boxes or a table.

What is where on a page of text is decided once, in `arrange`; text and colour follow it.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._words import columns

Segment: TypeAlias = tuple[str, int | None]  # text, and the device whose colour it has

_MOST_SLICES = 8
_MOST_ROWS = 64  # longer pictures show the first and the last rows
_FIRST_ROWS, _LAST_ROWS = 24, 8
_MOST_RULED_ROWS = 16  # more rows than that go without rules between them
_WIDEST_BOX, _HIGHEST_BOX = 20, 5
_WIDEST_STRETCHED = 72  # boxes are not stretched in proportion beyond that


@dataclass(frozen=True)
class Blocks:
    """An array cut in blocks.

    Attributes:
        devices: the numbers of the devices that hold each block, in shape (*parts, replicas).
        names: the array's axes.
        sizes: their sizes, where the array's shape is known.
    """

    devices: NDArray[np.int64]
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None

    @property
    def parts(self) -> tuple[int, ...]:
        return self.devices.shape[:-1]

    def head(self, axis: int, part: int) -> str:
        """What part of an axis: '0:2', or 'part 0' where its size is not known."""
        if self.sizes is None:
            return f'part {part}' if self.parts[axis] > 1 else ''
        step = self.sizes[axis] // self.parts[axis]
        return f'{part * step}:{(part + 1) * step}'

    def named_head(self, axis: int, part: int) -> str:
        return f'{self.names[axis]} {self.head(axis, part)}'.rstrip()


@dataclass(frozen=True)
class Slice:
    """Boxes over at most two axes: all of a matrix, or one block of the axes before."""

    title: str
    cells: tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True)
class Boxes:
    """Slices, with what they have in common; widths in columns, heights in lines."""

    slices: tuple[Slice, ...]
    row_heads: tuple[str, ...]
    column_heads: tuple[str, ...]
    corner: str  # the column axis, where the column heads do not name it
    box_width: int
    box_height: int
    ruled: bool

    @property
    def margin(self) -> int:
        widest = max(map(columns, (*self.row_heads, self.corner)))
        return widest + 1 if widest else 0

    @property
    def width(self) -> int:
        return self.margin + len(self.column_heads) * (self.box_width + 1) + 1


@dataclass(frozen=True)
class Table:
    """One row for each block; the last column names its devices."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Segment, ...], ...]

    @property
    def widths(self) -> list[int]:
        texts = [self.heads, *([text for text, _ in row] for row in self.rows)]
        return [max(map(columns, column)) + 2 for column in zip(*texts, strict=True)]


def arrange(blocks: Blocks, width: int) -> Boxes | Table:
    """Boxes where they fit in `width` columns, a table elsewhere."""
    axes = list(range(len(blocks.parts)))
    if len(axes) > 2:
        axes = [axis for axis in axes if blocks.parts[axis] > 1]
    leading = axes[:-2]
    if math.prod(blocks.parts[axis] for axis in leading) <= _MOST_SLICES:
        boxes = _boxes(blocks, leading, axes[-2:], width)
        if boxes is not None:
            return boxes
    return _table(blocks, width)


def device_list(devices: NDArray[np.int64], tight: bool = False) -> str:
    """Device numbers in few characters: '0,8', '0-7', '0,8,..,120'; '0,8,..' where it is tight."""
    if len(devices) <= (2 if tight else 4):
        return ','.join(map(str, devices))
    breaks = np.flatnonzero(np.diff(devices) != 1)
    starts = devices[np.concatenate(([0], breaks + 1))]
    ends = devices[np.concatenate((breaks, [-1]))]
    runs = [0, 1] if len(starts) > 3 or (tight and len(starts) > 2) else list(range(len(starts)))
    texts = [f'{starts[i]}-{ends[i]}' if starts[i] != ends[i] else f'{starts[i]}' for i in runs]
    if len(runs) < len(starts):
        last = f'{starts[-1]}-{ends[-1]}' if starts[-1] != ends[-1] else f'{ends[-1]}'
        texts += ['..'] if tight else ['..', last]
    return ','.join(texts)


def colour(device: int) -> str:
    """The colour of a device, in every picture; light enough for black text: '#rrggbb'."""
    # steps of the golden ratio keep neighbours apart, however many devices there are
    hue = device * 0.6180339887 % 1
    rgb = colorsys.hls_to_rgb(hue, 0.74 if device % 2 else 0.82, 0.75)
    return '#' + ''.join(f'{round(255 * value):02x}' for value in rgb)


def _boxes(blocks: Blocks, leading: list[int], axes: list[int], width: int) -> Boxes | None:
    row_axis, column_axis = [None, None, *axes][-2:]
    n_rows = 1 if row_axis is None else blocks.parts[row_axis]
    n_columns = 1 if column_axis is None else blocks.parts[column_axis]
    if 2 * n_columns > width:
        return None
    kept = _kept(n_rows)
    row_heads = tuple(_row_head(blocks, row_axis, row) for row in kept)
    for tight in (False, True):
        slices = _slices(blocks, leading, kept, n_columns, tight)
        label = max(len(text) for one in slices for row in one.cells for text, _ in row)
        for named, padding, thin in _HEADINGS:
            heads = _column_heads(blocks, column_axis, n_columns, named)
            corner = '' if named or column_axis is None else _corner(blocks, column_axis)
            head = 0 if thin else max(map(columns, heads))
            box = max(label, head) + 2 * padding
            page = Boxes(slices, row_heads, heads, corner, box, 1, n_rows <= _MOST_RULED_ROWS)
            title = max(columns(one.title) for one in slices)
            if max(page.width, page.margin + title) > width:
                continue
            if thin:
                return replace(page, column_heads=_thinned(heads, box))
            return _in_proportion(blocks, row_axis, column_axis, page, width)
    return None


# Column heads from the clearest to the shortest: the axis in each head or in the corner; columns
# of padding around a label; whether only some columns have heads, as ticks on an axis.
_HEADINGS = (
    (True, 1, False),
    (False, 1, False),
    (False, 0, False),
    (False, 1, True),
    (False, 0, True),
)


def _slices(
    blocks: Blocks, leading: list[int], kept: list[int | None], n_columns: int, tight: bool
) -> tuple[Slice, ...]:
    counts = [blocks.parts[axis] for axis in leading]
    n_slices = math.prod(counts)
    # axes that are not drawn have one part, so that a slice is a plain matrix of blocks
    devices = blocks.devices.reshape(n_slices, -1, n_columns, blocks.devices.shape[-1])

    def cell(i: int, row: int | None, column: int) -> Segment:
        if row is None:
            return '..', None
        return device_list(devices[i, row, column], tight), int(devices[i, row, column, 0])

    slices: list[Slice] = []
    for i, parts in enumerate(np.ndindex(*counts)):
        heads = (blocks.named_head(axis, part) for axis, part in zip(leading, parts, strict=True))
        cells = tuple(tuple(cell(i, row, column) for column in range(n_columns)) for row in kept)
        slices.append(Slice(', '.join(heads), cells))
    return tuple(slices)


def _kept(n: int) -> list[int | None]:
    """The rows that are shown, with None for those left out."""
    if n <= _MOST_ROWS:
        return list(range(n))
    return [*range(_FIRST_ROWS), None, *range(n - _LAST_ROWS, n)]


def _row_head(blocks: Blocks, axis: int | None, row: int | None) -> str:
    if axis is None:
        return ''
    if row is None:
        return f'{blocks.parts[axis] - _FIRST_ROWS - _LAST_ROWS} more ..'
    return blocks.named_head(axis, row)


def _column_heads(blocks: Blocks, axis: int | None, n: int, named: bool) -> tuple[str, ...]:
    if axis is None:
        return ('',)
    if named:
        return tuple(blocks.named_head(axis, column) for column in range(n))
    return tuple(blocks.head(axis, column).removeprefix('part ') for column in range(n))


def _corner(blocks: Blocks, axis: int) -> str:
    return f'{blocks.names[axis]}{" part" if blocks.sizes is None else ""}'


def _thinned(heads: Sequence[str], box_width: int) -> tuple[str, ...]:
    """Every k-th head, so that each has room to the left end of the next or of the last box."""
    step = max(map(columns, heads)) // (box_width + 1) + 1
    last = len(heads) - step
    return tuple(head if i % step == 0 and i <= last else '' for i, head in enumerate(heads))


def _in_proportion(
    blocks: Blocks, row_axis: int | None, column_axis: int | None, page: Boxes, width: int
) -> Boxes:
    """Boxes about as wide and high as the blocks are; a character is twice as high as wide."""
    if row_axis is None or column_axis is None or not page.ruled or len(page.slices) > 1:
        return page
    sizes = blocks.sizes or (1,) * len(blocks.parts)
    rows, cols = (max(sizes[i], 1) / blocks.parts[i] for i in (row_axis, column_axis))
    height = round(page.box_width * rows / cols / 2)
    height = min(height, _HIGHEST_BOX, 2 * _MOST_RULED_ROWS // len(page.row_heads))
    height -= height % 2 == 0  # odd, so that a label is in the middle
    box = page.box_width
    if height <= 1:
        room = (min(_WIDEST_STRETCHED, width - 1) - page.margin) // len(page.column_heads) - 1
        box = max(box, min(round(2 * cols / rows), _WIDEST_BOX, room))
    return replace(page, box_width=box, box_height=max(height, 1))


def _table(blocks: Blocks, width: int) -> Table:
    everything = list(range(len(blocks.parts)))
    sharded = [axis for axis in everything if blocks.parts[axis] > 1]
    table = _table_of(blocks, everything if blocks.sizes is not None else sharded)
    if sum(table.widths) > width:
        return _table_of(blocks, sharded)
    return table


def _table_of(blocks: Blocks, axes: Sequence[int]) -> Table:
    n = math.prod(blocks.parts)
    devices = blocks.devices.reshape(n, -1)
    rows: list[tuple[Segment, ...]] = []
    for shard in _kept(n):
        if shard is None:
            rows.append((*[('..', None)] * len(axes), (f'{n - len(rows) - _LAST_ROWS} more', None)))
            continue
        parts = np.unravel_index(shard, blocks.parts)
        heads = [blocks.head(axis, int(parts[axis])) for axis in axes]
        rows.append(
            (
                *((head, None) for head in heads),
                (device_list(devices[shard]), int(devices[shard, 0])),
            )
        )
    return Table((*(blocks.names[axis] for axis in axes), 'devices'), tuple(rows))
