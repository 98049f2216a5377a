"""Boxes and tables -> HTML for notebooks: styles inline, text in the page's own colour."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ._boxes import Boxes, Segment, Slice, Table, colour

_FONT = 'font: 13px/1.35 ui-monospace, Menlo, Consolas, monospace; text-align: left'
# Notebooks style every table; what they set is set back here. The heads take the page's own text
# colour, so that they can be read on light and on dark.
_TABLE = 'border-collapse: collapse; border: none; margin: 0; font: inherit; color: inherit'
_ROW = 'background: transparent'
_HEAD = 'border: none; padding: 1px 8px; font-weight: normal; white-space: nowrap; opacity: 0.8'
_CELL = 'border: 1px solid #777; padding: 1px 8px; white-space: nowrap'


def page_html(page: Boxes | Table, words: Sequence[str]) -> str:
    """A page with its words, self-contained."""
    if isinstance(page, Table):
        drawing = _table(page)
    else:
        slices = ''.join(_slice(page, one) for one in page.slices)
        drawing = f'<div style="display: flex; flex-wrap: wrap; gap: 16px">{slices}</div>'
    lines = ''.join(f'<div>{html.escape(line)}</div>' for line in words)
    return f'<div style="{_FONT}">{drawing}<div style="margin-top: 6px">{lines}</div></div>'


def _slice(page: Boxes, one: Slice) -> str:
    rows: list[str] = []
    with_rows = any(page.row_heads) or bool(page.corner)
    if one.title:
        rows.append(_row([*[_head('', 'right')] * with_rows, _head(one.title, 'left', page)]))
    if any(page.column_heads):
        corner = [_head(page.corner, 'right')] * with_rows
        # a head of a thin column may reach over the columns to its right
        over = 'text-align: center; max-width: 0; overflow: visible; padding: 1px 0'
        centre = 'center' if not page.corner else over.removeprefix('text-align: ')
        heads = [_head(text, centre) for text in page.column_heads]
        rows.append(_row([*corner, *heads]))
    size = f'min-width: {page.box_width}ch; height: {1.5 * page.box_height:g}em'
    for head, cells in zip(page.row_heads, one.cells, strict=True):
        row_head = [_head(head, 'right')] * with_rows
        boxes = [_cell(cell, f'{size}; text-align: center') for cell in cells]
        rows.append(_row([*row_head, *boxes]))
    return f'<table style="{_TABLE}">{"".join(rows)}</table>'


def _table(table: Table) -> str:
    rows = [_row([_head(head, 'left') for head in table.heads])]
    rows += [_row([_cell(cell, 'text-align: left') for cell in row]) for row in table.rows]
    return f'<table style="{_TABLE}">{"".join(rows)}</table>'


def _row(cells: Sequence[str]) -> str:
    return f'<tr style="{_ROW}">{"".join(cells)}</tr>'


def _head(text: str, align: str, over: Boxes | None = None) -> str:
    span = f' colspan="{len(over.column_heads)}"' if over else ''
    return f'<th{span} style="{_HEAD}; text-align: {align}">{html.escape(text)}</th>'


def _cell(cell: Segment, style: str) -> str:
    text, shard = cell
    if shard is not None:
        style = f'{style}; background: {colour(shard)}; color: black'
    return f'<td style="{_CELL}; {style}">{html.escape(text)}</td>'
