"""Boxes and tables -> lines of text, each segment with the device whose colour it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from .._words import columns
from .boxes import Boxes, Segment, Slice, Table

Line: TypeAlias = list[Segment]


def text_lines(page: Boxes | Table, width: int) -> list[Line]:
    """A page in box-drawing characters."""
    if isinstance(page, Table):
        return list(_table_lines(page))
    beside = max(1, (width + 2) // (page.width + 2))
    lines: list[Line] = []
    for start in range(0, len(page.slices), beside):
        row = [_slice_lines(page, one) for one in page.slices[start : start + beside]]
        if lines:
            lines.append([])
        lines += [_join(pieces, page.width) for pieces in zip(*row, strict=True)]
    return lines


def _slice_lines(page: Boxes, one: Slice) -> list[Line]:
    margin = ' ' * page.margin
    lines: list[Line] = []
    if one.title:
        lines.append([(margin + one.title, None)])
    if any(page.column_heads):
        lines.append([(_heads_text(page), None)])
    lines.append([(margin + _rule('┌┬┐', page), None)])
    for i, (head, row) in enumerate(zip(page.row_heads, one.cells, strict=True)):
        if i and page.ruled:
            lines.append([(margin + _rule('├┼┤', page), None)])
        for at in range(page.box_height):
            middle = at == page.box_height // 2
            line: Line = [
                (_right(head if middle else '', page.margin - 1) + ' ' * bool(margin), None)
            ]
            for text, device in row:
                line += [('│', None), (_centre(text if middle else '', page.box_width), device)]
            lines.append([*line, ('│', None)])
    lines.append([(margin + _rule('└┴┘', page), None)])
    return lines


def _heads_text(page: Boxes) -> str:
    text = _right(page.corner, page.margin - 1) + ' ' * bool(page.margin)
    if all(columns(head) <= page.box_width for head in page.column_heads):
        return text + ''.join(' ' + _centre(head, page.box_width) for head in page.column_heads)
    for i, head in enumerate(page.column_heads):  # ticks, at the left ends of their boxes
        at = page.margin + 1 + i * (page.box_width + 1)
        text += (' ' * (at - columns(text)) + head) if head else ''
    return text


def _rule(corners: str, page: Boxes) -> str:
    left, between, right = corners
    return left + between.join(['─' * page.box_width] * len(page.column_heads)) + right


def _join(pieces: Iterable[Line], width: int) -> Line:
    """Lines of slices side by side."""
    joined: Line = []
    for piece in pieces:
        if joined:
            joined.append(('  ', None))
        joined += piece
        joined.append((' ' * (width - sum(columns(text) for text, _ in piece)), None))
    return joined


def _table_lines(table: Table) -> Iterator[Line]:
    widths = table.widths
    yield [
        (_left(f' {head}', width), None) for head, width in zip(table.heads, widths, strict=True)
    ]
    yield [('─' * sum(widths), None)]
    for row in table.rows:
        cells = zip(row, widths, strict=True)
        yield [(_left(f' {text}', width), device) for (text, device), width in cells]


def _left(text: str, width: int) -> str:
    return text + ' ' * (width - columns(text))


def _right(text: str, width: int) -> str:
    return ' ' * (width - columns(text)) + text


def _centre(text: str, width: int) -> str:
    space = width - columns(text)
    return ' ' * (space // 2) + text + ' ' * (space - space // 2)
