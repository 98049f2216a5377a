"""Blocks of an array and the devices that hold them -> SVG, in the page's own text colour."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .._words import columns
from .boxes import Blocks, colour, device_list

_WIDE, _HIGH = 480, 360  # pixels, of the blocks of one slice or of all of them together
_WIDEST_BOX, _HIGHEST_BOX = 120, 60
_FONT, _LEAST_FONT = 12, 7
_CHARACTER = 0.62  # the width of a monospaced character, in font sizes
_GAP = 18
_LEAST_STRIPE = 5  # pixels; thinner ones would be a grey
_LEAST_SCALE = 0.7  # on a narrow page; smaller text could not be read, so the picture scrolls
_MOST_BOXES = 20_000


@dataclass(frozen=True)
class _Sheet:
    """The sizes that all slices have in common, in pixels."""

    n_rows: int
    n_columns: int
    box_width: float
    box_height: float
    margin: float  # to the left, for the heads of rows
    top: float  # for a title and the heads of columns
    reach: float  # of titles and of the heads of columns, from the margin on
    digits: int  # of the largest device: all numbers are of one size

    @property
    def width(self) -> float:
        return self.margin + max(self.n_columns * self.box_width, self.reach)

    @property
    def height(self) -> float:
        return self.top + self.n_rows * self.box_height


def svg_text(blocks: Blocks) -> str:
    """A drawing that stands for itself: every device has its colour, replicas share a block.

    A slice for each block of the axes before the last two.
    """
    axes = list(range(len(blocks.parts)))
    if len(axes) > 2:
        axes = [axis for axis in axes if blocks.parts[axis] > 1]
    leading, drawn = axes[:-2], [None, None, *axes[-2:]][-2:]
    counts = [blocks.parts[axis] for axis in leading]
    n_slices = math.prod(counts)
    titles = [
        ', '.join(blocks.named_head(axis, part) for axis, part in zip(leading, place, strict=True))
        for place in np.ndindex(*counts)
    ]
    # as many slices side by side as there is room for, up to twice as many as below each other
    beside = min(n_slices, math.ceil(math.sqrt(2 * n_slices)))
    while (
        sheet := _sheet(blocks, drawn, titles, beside)
    ).width * beside > 2 * _WIDE and beside > 1:
        beside -= 1
    devices = blocks.devices.reshape(n_slices, sheet.n_rows, sheet.n_columns, -1)
    if devices.size // devices.shape[-1] > _MOST_BOXES:
        devices = devices[: max(1, _MOST_BOXES // (sheet.n_rows * sheet.n_columns))]
    parts: list[str] = []
    for i, its_devices in enumerate(devices):
        left = i % beside * (sheet.width + _GAP)
        above = i // beside * (sheet.height + _GAP)
        drawing = ''.join(_slice(blocks, sheet, drawn, titles[i], its_devices))
        parts.append(f'<g transform="translate({_px(left)} {_px(above)})">{drawing}</g>')
    rows = math.ceil(len(devices) / beside)
    width = beside * (sheet.width + _GAP) - _GAP + 1
    height = rows * (sheet.height + _GAP) - _GAP + 1
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(width)}" height="{_px(height)}" '
        f'viewBox="-0.5 -0.5 {_px(width)} {_px(height)}" fill="currentColor" '
        f'style="max-width: 100%; min-width: {_px(_LEAST_SCALE * width)}px; height: auto; '
        'overflow: visible" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{_FONT}">'
        f'{"".join(parts)}</svg>'
    )


def _sheet(
    blocks: Blocks, drawn: Sequence[int | None], titles: Sequence[str], beside: int
) -> _Sheet:
    row_axis, column_axis = drawn
    below = math.ceil(len(titles) / beside)
    n_rows = 1 if row_axis is None else blocks.parts[row_axis]
    n_columns = 1 if column_axis is None else blocks.parts[column_axis]
    sizes = blocks.sizes or blocks.parts
    high = max(1, 1 if row_axis is None else sizes[row_axis])
    wide = max(1, 1 if column_axis is None else sizes[column_axis])
    # about as the array is, but no thinner than can be seen
    ratio = min(max(high / wide, 1 / 6), 2.0)
    width = min(_WIDE / beside, _HIGH / below / ratio)
    label = max(
        len(device_list(row[-1], tight=True))
        for row in blocks.devices.reshape(-1, n_columns, blocks.devices.shape[-1])
    )
    least = label * _LEAST_FONT * _CHARACTER + 4
    box_width, box_height = width / n_columns, width * ratio / n_rows
    scale = min(1, _WIDEST_BOX / box_width, _HIGHEST_BOX / box_height)
    last = '' if column_axis is None else blocks.named_head(column_axis, n_columns - 1)
    head = columns(last) * _FONT * _CHARACTER + 8 if n_columns <= 4 else 0
    # room for labels and heads, up to twice the width and the height
    box_width = max(scale * box_width, min(max(least, head), 2 * _WIDE / n_columns / beside))
    box_height = max(scale * box_height, min(16, 2 * _HIGH / n_rows / below))
    row_heads = [_row_head(blocks, row_axis, row) for row in range(n_rows)]
    margin = max(map(columns, row_heads), default=0) * _FONT * _CHARACTER
    margin += 6 * bool(margin)
    reach = max(map(columns, titles)) * _FONT * _CHARACTER
    top = (bool(reach) + (column_axis is not None)) * 1.5 * _FONT
    for text, centre in _column_heads(blocks, column_axis, n_columns, box_width):
        half = columns(text) * _FONT * _CHARACTER / 2
        margin, reach = max(margin, half - centre), max(reach, centre + half)
    digits = len(str(blocks.devices.max()))
    return _Sheet(n_rows, n_columns, box_width, box_height, margin, top, reach, digits)


def _slice(
    blocks: Blocks,
    sheet: _Sheet,
    drawn: Sequence[int | None],
    title: str,
    devices: np.ndarray,
) -> Iterator[str]:
    row_axis, column_axis = drawn
    if title:
        yield _text(title, sheet.margin, _FONT, 'start')
    for text, centre in _column_heads(blocks, column_axis, sheet.n_columns, sheet.box_width):
        yield _text(text, sheet.margin + centre, sheet.top - 0.5 * _FONT, 'middle')
    for row in _thinned(_FONT + 2, sheet.box_height, sheet.n_rows):
        at = sheet.top + (row + 0.5) * sheet.box_height + 0.35 * _FONT
        yield _text(_row_head(blocks, row_axis, row), sheet.margin - 6, at, 'end')
    for row, column in np.ndindex(sheet.n_rows, sheet.n_columns):
        yield from _box(sheet, row, column, devices[row, column])


def _box(sheet: _Sheet, row: int, column: int, holders: np.ndarray) -> Iterator[str]:
    """A block: a stripe for each device that holds it, and their numbers where there is room."""
    x, y = sheet.margin + column * sheet.box_width, sheet.top + row * sheet.box_height
    width, height = sheet.box_width, sheet.box_height
    stripes = [int(device) for device in holders]
    stripes = stripes if width / len(stripes) >= _LEAST_STRIPE else stripes[:1]
    step = width / len(stripes)
    for i, device in enumerate(stripes):
        yield (
            f'<rect x="{_px(x + i * step)}" y="{_px(y)}" width="{_px(step)}" '
            f'height="{_px(height)}" fill="{colour(device)}"/>'
        )
    numbers = ', '.join(map(str, holders)) if len(holders) <= 1024 else device_list(holders)
    about = f'<title>device {numbers}</title>'
    line = 'stroke="#555"' if width >= 6 and height >= 6 else 'stroke="none"'
    yield f'<rect x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}" '
    yield f'fill="none" pointer-events="all" {line}>{about}</rect>'
    own = [str(device) for device in stripes]
    middle = y + height / 2
    size = min(_FONT, height * 0.8, (step - 2) / sheet.digits / _CHARACTER)
    if size >= _LEAST_FONT and len(stripes) == len(holders):
        for i, text in enumerate(own):
            yield _label(text, x + (i + 0.5) * step, middle, size)
        return
    for tight in (False, True):
        text = device_list(holders, tight)
        size = min(_FONT, height * 0.8, (width - 2) / len(text) / _CHARACTER)
        if size >= _LEAST_FONT:
            room = len(text) * _CHARACTER * size + 4
            yield (
                f'<rect x="{_px(x + (width - room) / 2)}" y="{_px(middle - 0.6 * size)}" '
                f'width="{_px(room)}" height="{_px(1.2 * size)}" fill="#fff" opacity="0.75" '
                'pointer-events="none"/>'
            )
            yield _label(text, x + width / 2, middle, size)
            return


def _row_head(blocks: Blocks, axis: int | None, row: int) -> str:
    return '' if axis is None else blocks.named_head(axis, row)


def _column_heads(
    blocks: Blocks, axis: int | None, n: int, box_width: float
) -> Iterator[tuple[str, float]]:
    """As many heads as there is room for, and the middles of their boxes."""
    if axis is None:
        return
    heads = [blocks.named_head(axis, i) for i in range(n)]
    for i in _thinned(max(map(columns, heads)) * _FONT * _CHARACTER + 6, box_width, n):
        yield heads[i], (i + 0.5) * box_width


def _thinned(needed: float, box: float, n: int) -> range:
    """Every k-th of n heads, so that each has the room that it needs."""
    return range(0, n, math.ceil(needed / box))


def _label(text: str, x: float, y: float, size: float) -> str:
    return (
        f'<text x="{_px(x)}" y="{_px(y + 0.35 * size)}" text-anchor="middle" '
        f'font-size="{_px(size)}" fill="#000" pointer-events="none">{text}</text>'
    )


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return (
        f'<text x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}" opacity="0.8">'
        f'{html.escape(text)}</text>'
    )


def _px(size: float) -> str:
    return f'{size:.2f}'.rstrip('0').rstrip('.')
