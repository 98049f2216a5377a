"""Draws blocks as SVG. Text outside of blocks has the text color of the page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .._errors import plural
from .._text import MONOSPACED, display_width
from .blocks import Blocks, Slices, slices_of
from .caption import legend

# sizes in pixels
_SIDE = 290  # of a square array; all matrices have about the same area
_SCALAR_WIDTH = 100
_MIN_HEIGHT = 40  # of an array
_MIN_SLICE_HEIGHT = 60  # slices of fewer than 5 rows need only _FONT pixels for each row
_FONT, _MIN_FONT = 12, 9
_CHARACTER = 0.62  # the width of a monospaced character, in font sizes
_GAP = 18  # between slices
_LINE = '#444'  # the color of lines between blocks
_HATCH = 8  # distance between the lines of the hatching
_MAX_BOXES = 20_000


@dataclass(frozen=True)
class _LabelStyle:
    max_devices: int  # the most devices, or ranges of them, that a label lists
    font_size: float
    row_step: int = 1  # label every `row_step`-th row
    column_step: int = 1


@dataclass(frozen=True)
class _Sheet:
    """The sizes in a drawing, in pixels, and the style of its labels."""

    slices: Slices
    slices_per_row: int
    width: float  # of a slice, without its labels
    height: float
    margin: float  # on the left, for row labels
    top: float  # for the title and column labels
    content_width: float  # of the picture, without the margin
    label_style: _LabelStyle

    @property
    def box_width(self) -> float:
        return self.width / self.slices.n_columns

    @property
    def box_height(self) -> float:
        return self.height / self.slices.n_rows


def svg_text(blocks: Blocks) -> str:
    """Draws blocks, colored by their first devices. Replicated blocks are hatched.

    An array with more than two sharded axes is drawn as several matrices (slices). If it has more
    than `_MAX_BOXES` blocks, only the first slices are drawn.
    """
    slices = slices_of(blocks)
    sheet = _sheet(slices)
    max_slices = max(1, _MAX_BOXES // (slices.n_rows * slices.n_columns))
    n_slices = min(len(slices.titles), max_slices)
    n_more = len(slices.titles) - n_slices
    parts: list[str] = []
    bottom = 0.0
    for i in range(n_slices):
        left = sheet.margin + i % sheet.slices_per_row * (sheet.width + _GAP)
        top = i // sheet.slices_per_row * (sheet.top + sheet.height + _GAP) + sheet.top
        bottom = top + sheet.height
        drawing = ''.join(_slice(sheet, i))
        parts.append(f'<g transform="translate({_px(left)} {_px(top)})">{drawing}</g>')
    more = f'and {plural(n_more, "more slice")}' if n_more else ''
    for text in filter(None, (more, legend(blocks))):
        bottom += 1.5 * _FONT
        parts.append(_text(text, sheet.margin, bottom - 0.3 * _FONT, 'start'))
    width, height = sheet.margin + sheet.content_width + 1, bottom + 1
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(width)}" height="{_px(height)}" '
        f'viewBox="-0.5 -0.5 {_px(width)} {_px(height)}" fill="currentColor" '
        'style="max-width: 100%; height: auto; overflow: visible" '
        f'font-family="{MONOSPACED}" font-size="{_FONT}">'
        f'{"".join(parts)}</svg>'
    )


def _sheet(slices: Slices) -> _Sheet:
    """Computes sizes with which all slices together are about as large as a 2-D array."""
    blocks, n_slices = slices.blocks, len(slices.titles)
    full_width = _SIDE / math.sqrt(max(blocks.aspect, 0.5)) if blocks.parts else _SCALAR_WIDTH
    full_height = max(full_width * blocks.aspect, _MIN_HEIGHT)
    title_width = max(map(_text_width, slices.titles))
    max_per_row = max(1, int((full_width + _GAP) / (title_width + _GAP)))
    # sqrt(2 n) slices per row: about twice as many as there are rows of slices
    slice_rows = math.ceil(n_slices / min(max_per_row, math.ceil(math.sqrt(2 * n_slices))))
    slices_per_row = math.ceil(n_slices / slice_rows)
    width = (full_width + _GAP) / slices_per_row - _GAP
    height = max(full_height / slice_rows, min(_FONT * slices.n_rows, _MIN_SLICE_HEIGHT))
    margin = max(_text_width(slices.row_label(row)) for row in range(slices.n_rows))
    margin += 6 * bool(margin)
    content_width = max(title_width, _text_width(legend(blocks)), full_width)
    # column labels may be wider than their columns
    for text, center in _column_labels(slices, width / slices.n_columns):
        half = _text_width(text) / 2
        margin = max(margin, half - center)
        content_width = max(content_width, full_width - width + center + half)
    top = (bool(title_width) + (slices.column_axis is not None)) * 1.5 * _FONT
    style = _fit_labels(blocks, width / slices.n_columns, height / slices.n_rows)
    return _Sheet(slices, slices_per_row, width, height, margin, top, content_width, style)


def _slice(sheet: _Sheet, n: int) -> Iterator[str]:
    """Draws a slice; the top left corner of its first block is the origin."""
    slices, blocks = sheet.slices, sheet.slices.blocks
    if title := slices.titles[n]:
        yield _text(title, 0, _FONT - sheet.top, 'start')
    for text, center in _column_labels(slices, sheet.box_width):
        yield _text(text, center, -0.5 * _FONT, 'middle')
    if n % sheet.slices_per_row == 0:
        for row in _every_kth(_FONT + 1, sheet.box_height, slices.n_rows):
            at = (row + 0.5) * sheet.box_height + 0.35 * _FONT
            yield _text(slices.row_label(row), -6, at, 'end')
    size = f'width="{_px(sheet.box_width)}" height="{_px(sheet.box_height)}"'
    is_small = min(sheet.box_width, sheet.box_height) < 6  # dark lines would hide the color
    for row in range(slices.n_rows):
        for column in range(slices.n_columns):
            holders = slices.holders(n, row, column)
            is_long = len(holders) > 1024
            numbers = blocks.devices_label(holders) if is_long else ', '.join(map(str, holders))
            x, y = _px(column * sheet.box_width), _px(row * sheet.box_height)
            color = blocks.color(holders[0])
            yield f'<rect x="{x}" y="{y}" {size} fill="{color}" '
            yield f'stroke="{color if is_small else _LINE}"><title>device {numbers}</title></rect>'
    if blocks.replicas > 1:
        # a path, because an SVG pattern needs an id, which must be unique in the page
        lines: list[str] = []
        for at in range(_HATCH // 2, int(sheet.width + sheet.height), _HATCH):
            low, high = min(at, sheet.height), max(0, at - sheet.width)
            lines.append(f'M{_px(at - low)} {_px(low)}L{_px(at - high)} {_px(high)}')
        yield f'<path d="{"".join(lines)}" stroke="#000" opacity="0.3" pointer-events="none"/>'
    yield from _labels(sheet, n)


def _labels(sheet: _Sheet, n: int) -> Iterator[str]:
    """Labels the blocks with their devices, or only every k-th row and column if space is short."""
    slices, blocks, style = sheet.slices, sheet.slices.blocks, sheet.label_style
    size, row_step, column_step = style.font_size, style.row_step, style.column_step
    anchor = 'middle' if column_step == 1 else 'start'
    yield (
        f'<g font-size="{_px(size)}" fill="#000" text-anchor="{anchor}" stroke-width="4" '
        'stroke-linejoin="round" paint-order="stroke" pointer-events="none">'
    )
    for row in range(0, slices.n_rows, row_step):
        for column in range(0, slices.n_columns, column_step):
            holders = slices.holders(n, row, column)
            text = blocks.devices_label(holders, style.max_devices)
            x = column * sheet.box_width + (2 if column_step > 1 else sheet.box_width / 2)
            y = row * sheet.box_height + max(size, sheet.box_height) / 2
            if column_step > 1 and x + len(text) * _CHARACTER * size > sheet.width:
                continue
            if row_step > 1 and y + size / 2 > sheet.height:
                continue
            # labels that cross lines get an outline in the color of the block
            has_outline = row_step > 1 or column_step > 1 or blocks.replicas > 1
            color = f' stroke="{blocks.color(holders[0])}"' if has_outline else ''
            yield f'<text x="{_px(x)}" y="{_px(y + 0.35 * size)}"{color}>{text}</text>'
    yield '</g>'


def _fit_labels(blocks: Blocks, width: float, height: float) -> _LabelStyle:
    """Chooses the most detailed labels that fit into boxes of this size."""
    all_holders = [blocks.holders(i) for i in range(min(blocks.n_blocks, _MAX_BOXES))]
    widths = {  # {max_devices: the width of the widest label, in font sizes}
        n: _CHARACTER * max(len(blocks.devices_label(holders, n)) for holders in all_holders)
        for n in (4, 2, 1)
    }
    for max_devices, label_width in widths.items():
        size = min(_FONT, 0.95 * height, (width - 1) / label_width)
        if size >= _MIN_FONT:
            return _LabelStyle(max_devices, size)
    min_width = widths[2] * _MIN_FONT
    row_step = 1 if 0.95 * height >= _MIN_FONT else math.ceil(2 * _MIN_FONT / height)
    column_step = 1 if width - 1 >= min_width else math.ceil(2 * min_width / width)
    return _LabelStyle(2, _MIN_FONT, row_step, column_step)


def _column_labels(slices: Slices, box_width: float) -> Iterator[tuple[str, float]]:
    """Yields as many column labels as fit, each with the center of its column."""
    labels = [slices.column_label(column) for column in range(slices.n_columns)]
    for i in _every_kth(max(map(_text_width, labels)) + 6, box_width, slices.n_columns):
        if labels[i]:
            yield labels[i], (i + 0.5) * box_width


def _every_kth(label_size: float, box_size: float, n: int) -> range:
    """Returns every k-th of n boxes, where k is the number of boxes that a label takes."""
    return range(0, n, max(1, math.ceil(label_size / box_size)))


def _text_width(text: str) -> float:
    return display_width(text) * _FONT * _CHARACTER


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return (
        f'<text x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}" opacity="0.8">'
        f'{html.escape(text)}</text>'
    )


def _px(size: float) -> str:
    return f'{size:.2f}'.rstrip('0').rstrip('.')
