"""Draws blocks as lines of text, in boxes or in a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from .._text import display_width
from .blocks import Blocks, Slices, slices_of

Segment: TypeAlias = tuple[str, int | None]  # text, and the device that sets its color
Line: TypeAlias = list[Segment]

_MAX_SLICES = 8
_MAX_ROWS = 64
_FIRST_ROWS, _LAST_ROWS = 24, 8  # the rows that pictures of more than _MAX_ROWS rows show
_MAX_RULED_ROWS = 16  # pictures of more rows have no lines between rows
_WIDTH, _HEIGHT = 32, 8  # of a single matrix, if its labels fit


@dataclass(frozen=True)
class _Boxes:
    """A picture made of boxes. Widths are in terminal columns, heights in lines."""

    slices: Slices
    rows: Sequence[int | None]  # None for omitted rows
    cells: Sequence[Sequence[Line]]  # by slice, then by row
    column_labels: Sequence[str]
    corner: str  # the name of the column axis, if the column labels omit it
    box_width: int
    box_height: int = 1

    @property
    def has_row_lines(self) -> bool:
        return self.slices.n_rows <= _MAX_RULED_ROWS

    @property
    def row_labels(self) -> list[str]:
        more = f'{self.slices.n_rows - _FIRST_ROWS - _LAST_ROWS} more ..'
        return [more if row is None else self.slices.row_label(row) for row in self.rows]

    @property
    def margin(self) -> int:
        widest = max(map(display_width, (*self.row_labels, self.corner)))
        return widest + 1 if widest else 0

    @property
    def width(self) -> int:
        return self.margin + len(self.column_labels) * (self.box_width + 1) + 1


def text_lines(blocks: Blocks, width: int) -> list[Line]:
    """Draws boxes if they fit in `width` columns and there are few slices; otherwise a table."""
    slices = slices_of(blocks)
    boxes = _fit_boxes(slices, width) if len(slices.titles) <= _MAX_SLICES else None
    if boxes is None:
        return list(_table_lines(blocks, width))
    n_per_row = max(1, (width + 2) // (boxes.width + 2))
    lines: list[Line] = []
    for start in range(0, len(slices.titles), n_per_row):
        indices = range(start, min(start + n_per_row, len(slices.titles)))
        if lines:
            lines.append([])
        drawn = [_slice_lines(boxes, n) for n in indices]
        for pieces in zip(*drawn, strict=True):
            line: Line = []
            for piece in pieces:
                width_of_piece = sum(display_width(text) for text, _ in piece)
                gap: Line = [('  ', None)] if line else []
                line += [*gap, *piece, (' ' * (boxes.width - width_of_piece), None)]
            lines.append(line)
    return lines


# Styles of column labels, from clearest to shortest, as tuples (has_names, padding, is_ruler)
#   has_names: whether each label includes the axis name; if not, the name is in the corner
#   padding: the number of spaces on each side of the widest label or cell
#   is_ruler: whether only every k-th column has a label, like the ticks of a ruler
_LABEL_STYLES = (
    (True, 1, False),
    (False, 1, False),
    (False, 0, False),
    (False, 1, True),
    (False, 0, True),
)


def _fit_boxes(slices: Slices, width: int) -> _Boxes | None:
    """Chooses the clearest labels with which the boxes fit in `width`, or returns None."""
    if 2 * slices.n_columns > width:  # a box has a line on its left and at least one character
        return None
    rows = _shown_rows(slices.n_rows)
    title_width = max(map(display_width, slices.titles))
    for max_devices in (4, 2, 1):
        cells = [
            [_cells(slices, n, row, max_devices) for row in rows] for n in range(len(slices.titles))
        ]
        cell_width = max(len(text) for slice_rows in cells for row in slice_rows for text, _ in row)
        for has_names, padding, is_ruler in _LABEL_STYLES:
            labels, corner = _column_labels(slices, has_names)
            label_width = 0 if is_ruler else max(map(display_width, labels))
            box_width = max(cell_width, label_width) + 2 * padding
            boxes = _Boxes(slices, rows, cells, labels, corner, box_width)
            if max(boxes.width, boxes.margin + title_width) > width:
                continue
            if is_ruler:
                return replace(boxes, column_labels=_every_kth(labels, boxes.box_width))
            return _enlarged(boxes, width)
    return None


def _shown_rows(n: int) -> list[int | None]:
    """Returns which of n rows to show; None stands for omitted rows."""
    if n <= _MAX_ROWS:
        return list(range(n))
    return [*range(_FIRST_ROWS), None, *range(n - _LAST_ROWS, n)]


def _cells(slices: Slices, n: int, row: int | None, max_devices: int) -> Line:
    if row is None:
        return [('..', None)] * slices.n_columns
    row_devices = [slices.holders(n, row, column) for column in range(slices.n_columns)]
    return [
        (slices.blocks.devices_label(devices, max_devices), devices[0]) for devices in row_devices
    ]


def _column_labels(slices: Slices, has_names: bool) -> tuple[list[str], str]:
    blocks, axis = slices.blocks, slices.column_axis
    if axis is None:
        return [''], ''
    if has_names:
        return [blocks.named_part_label(axis, column) for column in range(slices.n_columns)], ''
    labels = [
        blocks.part_label(axis, part).removeprefix('part ') for part in range(slices.n_columns)
    ]
    return labels, f'{blocks.names[axis]}{" part" if blocks.sizes is None else ""}'


def _every_kth(labels: Sequence[str], box_width: int) -> list[str]:
    """Blanks all but every k-th label. The widest label takes the width of k boxes."""
    step = max(map(display_width, labels)) // (box_width + 1) + 1
    last = len(labels) - step
    return [label if i % step == 0 and i <= last else '' for i, label in enumerate(labels)]


def _enlarged(boxes: _Boxes, width: int) -> _Boxes:
    """Enlarges boxes, so that the size of a picture depends little on the sharding.

    Does not enlarge scalars, boxes without lines between rows, or an array with more than two
    dimensions that is drawn as several 2-d slices.
    """
    slices = boxes.slices
    if not slices.blocks.parts or not boxes.has_row_lines or len(slices.titles) > 1:
        return boxes
    room = (width - 1 - boxes.margin) // slices.n_columns - 1
    box_width = max(boxes.box_width, min(_WIDTH // slices.n_columns - 1, room))
    height = _HEIGHT // slices.n_rows - 1 if len(slices.blocks.parts) > 1 else 1
    height -= height % 2 == 0  # odd, so that labels are centered
    return replace(boxes, box_width=box_width, box_height=max(height, 1))


def _slice_lines(boxes: _Boxes, n: int) -> list[Line]:
    margin = ' ' * boxes.margin
    lines: list[Line] = []
    if title := boxes.slices.titles[n]:
        lines.append([(margin + title, None)])
    if any(boxes.column_labels):
        lines.append([(_column_label_line(boxes), None)])
    lines.append([(margin + _rule('┌┬┐', boxes), None)])
    for i, (label, row) in enumerate(zip(boxes.row_labels, boxes.cells[n], strict=True)):
        if i and boxes.has_row_lines:
            lines.append([(margin + _rule('├┼┤', boxes), None)])
        for line_index in range(boxes.box_height):
            is_middle = line_index == boxes.box_height // 2
            line: Line = [(_in_margin(label if is_middle else '', boxes), None)]
            for text, device in row:
                line += [('│', None), (_center(text if is_middle else '', boxes.box_width), device)]
            lines.append([*line, ('│', None)])
    lines.append([(margin + _rule('└┴┘', boxes), None)])
    return lines


def _column_label_line(boxes: _Boxes) -> str:
    text = _in_margin(boxes.corner, boxes)
    if all(display_width(label) <= boxes.box_width for label in boxes.column_labels):
        return text + ''.join(
            ' ' + _center(label, boxes.box_width) for label in boxes.column_labels
        )
    for i, label in enumerate(boxes.column_labels):  # ticks, at the left edge of their boxes
        at = boxes.margin + 1 + i * (boxes.box_width + 1)
        text += (' ' * (at - display_width(text)) + label) if label else ''
    return text


def _rule(corners: str, boxes: _Boxes) -> str:
    left, between, right = corners
    return left + between.join(['─' * boxes.box_width] * len(boxes.column_labels)) + right


def _table_lines(blocks: Blocks, width: int) -> Iterator[Line]:
    """Draws a table with a row for each block; the last column lists the devices of the block.

    Unsharded axes have no column if the sizes are unknown, or if the table would be too wide.
    """
    axes = list(range(len(blocks.parts)))
    sharded = [axis for axis in axes if blocks.parts[axis] > 1]
    rows, widths = _table(blocks, axes if blocks.sizes is not None else sharded)
    if sum(widths) > width:
        rows, widths = _table(blocks, sharded)
    for i, row in enumerate(rows):
        if i == 1:
            yield [('─' * sum(widths), None)]
        line: Line = []
        for (text, device), width in zip(row, widths, strict=True):
            line.append((f' {text}{" " * (width - 1 - display_width(text))}', device))
        yield line


def _table(blocks: Blocks, axes: Sequence[int]) -> tuple[list[Line], list[int]]:
    """Returns the rows, with the headings first, and the column widths."""
    rows: list[Line] = [[*((blocks.names[axis], None) for axis in axes), ('devices', None)]]
    for block in _shown_rows(blocks.n_blocks):
        if block is None:
            n = blocks.n_blocks - _FIRST_ROWS - _LAST_ROWS
            rows.append([*[('..', None)] * len(axes), (f'{n} more', None)])
            continue
        row: Line = []
        for axis in axes:
            part = block // math.prod(blocks.parts[axis + 1 :]) % blocks.parts[axis]
            row.append((blocks.part_label(axis, part), None))
        devices = blocks.holders(block)
        rows.append([*row, (blocks.devices_label(devices), devices[0])])
    texts = zip(*([text for text, _ in row] for row in rows), strict=True)
    return rows, [max(map(display_width, column)) + 2 for column in texts]


def _in_margin(text: str, boxes: _Boxes) -> str:
    return ' ' * (boxes.margin - 1 - display_width(text)) + text + ' ' * bool(boxes.margin)


def _center(text: str, width: int) -> str:
    space = width - display_width(text)
    return ' ' * (space // 2) + text + ' ' * (space - space // 2)
