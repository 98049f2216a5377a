"""Draws blocks as lines of text, in boxes or in a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from .._text import display_width
from .blocks import Blocks, Slices, slices_of

Segment: TypeAlias = tuple[str, int | None]  # text, and a device for its color
Line: TypeAlias = list[Segment]

_MAX_SLICES = 8
_MAX_ROWS = 64
_FIRST_ROWS, _LAST_ROWS = 24, 8  # the rows that longer pictures show
_MAX_RULED_ROWS = 16  # no lines between rows if there are more
_COLUMNS, _LINES = 32, 8  # of a matrix, if its labels fit


@dataclass(frozen=True)
class _Boxes:
    """A picture made of boxes. Widths are in terminal columns, heights in lines."""

    slices: Slices
    rows: Sequence[int | None]  # None for omitted rows
    cells: Sequence[Sequence[Line]]  # by slice, then by row
    column_heads: Sequence[str]
    corner: str  # the name of the column axis, if the column labels omit it
    box_width: int
    box_height: int = 1

    @property
    def ruled(self) -> bool:
        return self.slices.n_rows <= _MAX_RULED_ROWS

    @property
    def row_heads(self) -> list[str]:
        more = f'{self.slices.n_rows - _FIRST_ROWS - _LAST_ROWS} more ..'
        return [more if row is None else self.slices.row_head(row) for row in self.rows]

    @property
    def margin(self) -> int:
        widest = max(map(display_width, (*self.row_heads, self.corner)))
        return widest + 1 if widest else 0

    @property
    def width(self) -> int:
        return self.margin + len(self.column_heads) * (self.box_width + 1) + 1


def text_lines(blocks: Blocks, width: int) -> list[Line]:
    """Draws boxes if they fit in `width` columns; otherwise a table."""
    slices = slices_of(blocks)
    boxes = _boxes(slices, width) if len(slices.titles) <= _MAX_SLICES else None
    if boxes is None:
        return list(_table_lines(blocks, width))
    beside = max(1, (width + 2) // (boxes.width + 2))
    lines: list[Line] = []
    for start in range(0, len(slices.titles), beside):
        numbers = range(start, min(start + beside, len(slices.titles)))
        if lines:
            lines.append([])
        drawn = [_slice_lines(boxes, n) for n in numbers]
        lines += [_join(pieces, boxes.width) for pieces in zip(*drawn, strict=True)]
    return lines


# Styles of column labels, from clearest to shortest:
#   whether each label includes the axis name; if not, the name is in the corner
#   the number of spaces on each side of a label
#   whether only some columns are labeled, like the ticks of a ruler
_HEADINGS = (
    (True, 1, False),
    (False, 1, False),
    (False, 0, False),
    (False, 1, True),
    (False, 0, True),
)


def _boxes(slices: Slices, width: int) -> _Boxes | None:
    """Returns the clearest boxes that fit in `width` columns; None if none fit."""
    if 2 * slices.n_columns > width:
        return None
    rows = _kept(slices.n_rows)
    title = max(map(display_width, slices.titles))
    for most in (4, 2, 1):
        cells = [[_cells(slices, n, row, most) for row in rows] for n in range(len(slices.titles))]
        label = max(len(text) for one in cells for row in one for text, _ in row)
        for named, padding, thin in _HEADINGS:
            heads, corner = _column_heads(slices, named)
            head = 0 if thin else max(map(display_width, heads))
            boxes = _Boxes(slices, rows, cells, heads, corner, max(label, head) + 2 * padding)
            if max(boxes.width, boxes.margin + title) > width:
                continue
            if thin:
                return replace(boxes, column_heads=_thinned(heads, boxes.box_width))
            return _enlarged(boxes, width)
    return None


def _kept(n: int) -> list[int | None]:
    """Returns the indices of n rows to show; None stands for omitted rows."""
    if n <= _MAX_ROWS:
        return list(range(n))
    return [*range(_FIRST_ROWS), None, *range(n - _LAST_ROWS, n)]


def _cells(slices: Slices, n: int, row: int | None, most: int) -> Line:
    if row is None:
        return [('..', None)] * slices.n_columns
    row_devices = [slices.holders(n, row, column) for column in range(slices.n_columns)]
    return [(slices.blocks.label(devices, most), devices[0]) for devices in row_devices]


def _column_heads(slices: Slices, named: bool) -> tuple[list[str], str]:
    """Returns the column labels; and the axis name for the corner, if the labels omit it."""
    blocks, axis = slices.blocks, slices.column_axis
    if axis is None:
        return [''], ''
    if named:
        return [blocks.named_head(axis, column) for column in range(slices.n_columns)], ''
    heads = [blocks.head(axis, part).removeprefix('part ') for part in range(slices.n_columns)]
    return heads, f'{blocks.names[axis]}{" part" if blocks.sizes is None else ""}'


def _thinned(heads: Sequence[str], box_width: int) -> list[str]:
    """Keeps every k-th label, so that each has room up to the next label or the last box."""
    step = max(map(display_width, heads)) // (box_width + 1) + 1
    last = len(heads) - step
    return [head if i % step == 0 and i <= last else '' for i, head in enumerate(heads)]


def _enlarged(boxes: _Boxes, width: int) -> _Boxes:
    """Enlarges boxes so that an array has one size however it is sharded, if its labels fit."""
    slices = boxes.slices
    if not slices.blocks.parts or not boxes.ruled or len(slices.titles) > 1:
        return boxes
    room = (width - 1 - boxes.margin) // slices.n_columns - 1
    box_width = max(boxes.box_width, min(_COLUMNS // slices.n_columns - 1, room))
    height = _LINES // slices.n_rows - 1 if len(slices.blocks.parts) > 1 else 1
    height -= height % 2 == 0  # odd, so that labels are centered
    return replace(boxes, box_width=box_width, box_height=max(height, 1))


def _slice_lines(boxes: _Boxes, n: int) -> list[Line]:
    margin = ' ' * boxes.margin
    lines: list[Line] = []
    if title := boxes.slices.titles[n]:
        lines.append([(margin + title, None)])
    if any(boxes.column_heads):
        lines.append([(_heads_text(boxes), None)])
    lines.append([(margin + _rule('┌┬┐', boxes), None)])
    for i, (head, row) in enumerate(zip(boxes.row_heads, boxes.cells[n], strict=True)):
        if i and boxes.ruled:
            lines.append([(margin + _rule('├┼┤', boxes), None)])
        for at in range(boxes.box_height):
            middle = at == boxes.box_height // 2
            line: Line = [(_in_margin(head if middle else '', boxes), None)]
            for text, device in row:
                line += [('│', None), (_center(text if middle else '', boxes.box_width), device)]
            lines.append([*line, ('│', None)])
    lines.append([(margin + _rule('└┴┘', boxes), None)])
    return lines


def _heads_text(boxes: _Boxes) -> str:
    text = _in_margin(boxes.corner, boxes)
    if all(display_width(head) <= boxes.box_width for head in boxes.column_heads):
        return text + ''.join(' ' + _center(head, boxes.box_width) for head in boxes.column_heads)
    for i, head in enumerate(boxes.column_heads):  # ticks, at the left edge of their boxes
        at = boxes.margin + 1 + i * (boxes.box_width + 1)
        text += (' ' * (at - display_width(text)) + head) if head else ''
    return text


def _rule(corners: str, boxes: _Boxes) -> str:
    left, between, right = corners
    return left + between.join(['─' * boxes.box_width] * len(boxes.column_heads)) + right


def _join(pieces: Iterable[Line], width: int) -> Line:
    """Joins lines of slices that are drawn side by side."""
    joined: Line = []
    for piece in pieces:
        if joined:
            joined.append(('  ', None))
        joined += piece
        joined.append((' ' * (width - sum(display_width(text) for text, _ in piece)), None))
    return joined


def _table_lines(blocks: Blocks, width: int) -> Iterator[Line]:
    """Draws a table with a row for each block; the last column has its devices."""
    everything = list(range(len(blocks.parts)))
    sharded = [axis for axis in everything if blocks.parts[axis] > 1]
    rows, widths = _table(blocks, everything if blocks.sizes is not None else sharded)
    if sum(widths) > width:
        rows, widths = _table(blocks, sharded)
    for i, row in enumerate(rows):
        if i == 1:
            yield [('─' * sum(widths), None)]
        cells = zip(row, widths, strict=True)
        yield [(_left(f' {text}', width), device) for (text, device), width in cells]


def _table(blocks: Blocks, axes: Sequence[int]) -> tuple[list[Line], list[int]]:
    """Returns the rows, starting with the headings; and the column widths."""
    heads: Line = [*((blocks.names[axis], None) for axis in axes), ('devices', None)]
    rows = [heads, *(_table_row(blocks, axes, block) for block in _kept(blocks.n_blocks))]
    texts = zip(*([text for text, _ in row] for row in rows), strict=True)
    return rows, [max(map(display_width, column)) + 2 for column in texts]


def _table_row(blocks: Blocks, axes: Sequence[int], block: int | None) -> Line:
    if block is None:
        n = blocks.n_blocks - _FIRST_ROWS - _LAST_ROWS
        return [*[('..', None)] * len(axes), (f'{n} more', None)]
    devices = blocks.holders(block)
    heads: list[str] = []
    for axis in axes:
        part = block // math.prod(blocks.parts[axis + 1 :]) % blocks.parts[axis]
        heads.append(blocks.head(axis, part))
    return [*((head, None) for head in heads), (blocks.label(devices), devices[0])]


def _left(text: str, width: int) -> str:
    return text + ' ' * (width - display_width(text))


def _in_margin(text: str, boxes: _Boxes) -> str:
    """Right-aligns text in the margin, with a space after it."""
    return ' ' * (boxes.margin - 1 - display_width(text)) + text + ' ' * bool(boxes.margin)


def _center(text: str, width: int) -> str:
    space = width - display_width(text)
    return ' ' * (space // 2) + text + ' ' * (space - space // 2)
