"""Draws blocks as SVG, with text in the color of the page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .._text import display_width
from .blocks import Blocks, Slices, color, device_list, slices_of

_WIDTH, _HEIGHT = 480, 360  # pixels, for the blocks of one slice or of all slices
_MAX_BOX_WIDTH, _MAX_BOX_HEIGHT = 120, 60
_FONT, _MIN_FONT = 12, 7
_CHARACTER = 0.62  # the width of a monospaced character, in font sizes
_GAP = 18
_MIN_STRIPE = 5  # pixels; thinner stripes blur to gray
_MIN_SCALE = 0.7  # smaller text is unreadable, so narrow pages scroll the picture instead
_MAX_BOXES = 20_000


@dataclass(frozen=True)
class _Sheet:
    """Sizes in pixels, the same for all slices."""

    slices: Slices
    box_width: float
    box_height: float
    margin: float  # on the left, for row labels
    top: float  # for the title and column labels
    reach: float  # width of titles and column labels, from the margin
    digits: int  # of the largest device number: all numbers use one font size

    @property
    def width(self) -> float:
        return self.margin + max(self.slices.n_columns * self.box_width, self.reach)

    @property
    def height(self) -> float:
        return self.top + self.slices.n_rows * self.box_height


def svg_text(blocks: Blocks) -> str:
    """Draws blocks in the colors of their devices; a replicated block has a stripe per device.

    An array with more than two sharded axes is drawn as several slices.
    """
    slices = slices_of(blocks)
    n_slices = len(slices.titles)
    # as many slices per row as fit, with at most twice as many columns as rows
    beside = min(n_slices, math.ceil(math.sqrt(2 * n_slices)))
    while (sheet := _sheet(slices, beside)).width * beside > 2 * _WIDTH and beside > 1:
        beside -= 1
    if blocks.n_blocks > _MAX_BOXES:
        n_slices = min(n_slices, max(1, _MAX_BOXES // (slices.n_rows * slices.n_columns)))
    parts: list[str] = []
    for i in range(n_slices):
        left = i % beside * (sheet.width + _GAP)
        above = i // beside * (sheet.height + _GAP)
        drawing = ''.join(_slice(sheet, i))
        parts.append(f'<g transform="translate({_px(left)} {_px(above)})">{drawing}</g>')
    width = beside * (sheet.width + _GAP) - _GAP + 1
    height = math.ceil(n_slices / beside) * (sheet.height + _GAP) - _GAP + 1
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(width)}" height="{_px(height)}" '
        f'viewBox="-0.5 -0.5 {_px(width)} {_px(height)}" fill="currentColor" '
        f'style="max-width: 100%; min-width: {_px(_MIN_SCALE * width)}px; height: auto; '
        'overflow: visible" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{_FONT}">'
        f'{"".join(parts)}</svg>'
    )


def _sheet(slices: Slices, beside: int) -> _Sheet:
    blocks, n_rows, n_columns = slices.blocks, slices.n_rows, slices.n_columns
    below = math.ceil(len(slices.titles) / beside)
    sizes = blocks.sizes or blocks.parts
    high, wide = (
        1 if axis is None else max(1, sizes[axis]) for axis in (slices.row_axis, slices.column_axis)
    )
    # close to the aspect ratio of the array, within limits
    ratio = min(max(high / wide, 1 / 6), 2.0)
    width = min(_WIDTH / beside, _HEIGHT / below / ratio)
    last_column = range(n_columns - 1, blocks.n_blocks, n_columns)
    label = max(len(device_list(blocks.holders(block), tight=True)) for block in last_column)
    least = label * _MIN_FONT * _CHARACTER + 4
    box_width, box_height = width / n_columns, width * ratio / n_rows
    scale = min(1, _MAX_BOX_WIDTH / box_width, _MAX_BOX_HEIGHT / box_height)
    last = slices.column_head(n_columns - 1)
    head = _text_width(last) + 8 if last and n_columns <= 4 else 0
    # make room for labels, up to twice the width and height
    box_width = max(scale * box_width, min(max(least, head), 2 * _WIDTH / n_columns / beside))
    box_height = max(scale * box_height, min(16, 2 * _HEIGHT / n_rows / below))
    margin = max(_text_width(slices.row_head(row)) for row in range(n_rows))
    margin += 6 * bool(margin)
    reach = max(map(_text_width, slices.titles))
    top = (bool(reach) + (slices.column_axis is not None)) * 1.5 * _FONT
    for text, center in _column_heads(slices, box_width):
        half = _text_width(text) / 2
        margin, reach = max(margin, half - center), max(reach, center + half)
    digits = len(str(max(blocks.devices)))
    return _Sheet(slices, box_width, box_height, margin, top, reach, digits)


def _slice(sheet: _Sheet, n: int) -> Iterator[str]:
    slices = sheet.slices
    if title := slices.titles[n]:
        yield _text(title, sheet.margin, _FONT, 'start')
    for text, center in _column_heads(slices, sheet.box_width):
        yield _text(text, sheet.margin + center, sheet.top - 0.5 * _FONT, 'middle')
    for row in _thinned(_FONT + 2, sheet.box_height, slices.n_rows):
        at = sheet.top + (row + 0.5) * sheet.box_height + 0.35 * _FONT
        yield _text(slices.row_head(row), sheet.margin - 6, at, 'end')
    for row in range(slices.n_rows):
        for column in range(slices.n_columns):
            yield from _box(sheet, row, column, slices.holders(n, row, column))


def _box(sheet: _Sheet, row: int, column: int, holders: Sequence[int]) -> Iterator[str]:
    """Draws a block: a stripe for each device, and the device numbers if there is room."""
    x, y = sheet.margin + column * sheet.box_width, sheet.top + row * sheet.box_height
    width, height = sheet.box_width, sheet.box_height
    stripes = holders if width / len(holders) >= _MIN_STRIPE else holders[:1]
    step = width / len(stripes)
    for i, device in enumerate(stripes):
        yield (
            f'<rect x="{_px(x + i * step)}" y="{_px(y)}" width="{_px(step)}" '
            f'height="{_px(height)}" fill="{color(device)}"/>'
        )
    numbers = ', '.join(map(str, holders)) if len(holders) <= 1024 else device_list(holders)
    about = f'<title>device {numbers}</title>'
    line = 'stroke="#555"' if width >= 6 and height >= 6 else 'stroke="none"'
    yield f'<rect x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}" '
    yield f'fill="none" pointer-events="all" {line}>{about}</rect>'
    middle = y + height / 2
    size = min(_FONT, height * 0.8, (step - 2) / sheet.digits / _CHARACTER)
    if size >= _MIN_FONT and len(stripes) == len(holders):
        for i, device in enumerate(stripes):
            yield _label(str(device), x + (i + 0.5) * step, middle, size)
        return
    for tight in (False, True):
        text = device_list(holders, tight)
        size = min(_FONT, height * 0.8, (width - 2) / len(text) / _CHARACTER)
        if size >= _MIN_FONT:
            room = len(text) * _CHARACTER * size + 4
            yield (
                f'<rect x="{_px(x + (width - room) / 2)}" y="{_px(middle - 0.6 * size)}" '
                f'width="{_px(room)}" height="{_px(1.2 * size)}" fill="#fff" opacity="0.75" '
                'pointer-events="none"/>'
            )
            yield _label(text, x + width / 2, middle, size)
            return


def _column_heads(slices: Slices, box_width: float) -> Iterator[tuple[str, float]]:
    """Yields as many column labels as fit, each with the center of its column."""
    heads = [slices.column_head(column) for column in range(slices.n_columns)]
    for i in _thinned(max(map(_text_width, heads)) + 6, box_width, slices.n_columns):
        if heads[i]:
            yield heads[i], (i + 0.5) * box_width


def _thinned(needed: float, box: float, n: int) -> range:
    """Returns the indices of every k-th of n labels, so that each has the space it needs."""
    return range(0, n, math.ceil(needed / box))


def _label(text: str, x: float, y: float, size: float) -> str:
    return (
        f'<text x="{_px(x)}" y="{_px(y + 0.35 * size)}" text-anchor="middle" '
        f'font-size="{_px(size)}" fill="#000" pointer-events="none">{text}</text>'
    )


def _text_width(text: str) -> float:
    return display_width(text) * _FONT * _CHARACTER


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return (
        f'<text x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}" opacity="0.8">'
        f'{html.escape(text)}</text>'
    )


def _px(size: float) -> str:
    return f'{size:.2f}'.rstrip('0').rstrip('.')
