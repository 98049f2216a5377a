"""The page of a report -> HTML for notebooks: styles inline, text in the page's own colour."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .._words import MONO
from .page import Column, Page, Section

_FRAME = 'font: 13px/1.45 system-ui, sans-serif; text-align: left; max-width: 70em'
_TITLE = 'font-size: 15px; font-weight: 600; margin: 2px 0 8px'
_SECTION = 'font-weight: 600; margin: 12px 0 2px'
# Notebooks style every table; what they set is set back here, so that the text keeps the page's
# own colour and can be read on light and on dark.
_TABLE = 'border-collapse: collapse; border: none; margin: 0; font-size: 12px; color: inherit'
_HEAD = 'border: none; padding: 2px 14px 2px 0; font-weight: normal; opacity: 0.65'
_CELL = 'border: none; border-top: 1px solid rgba(128,128,128,0.3); padding: 2px 14px 2px 0'
_WARNING = 'border-left: 3px solid #d9a400; background: rgba(217,164,0,0.12); padding: 3px 10px'
# an array of a large model has hundreds of rows: they scroll, and the totals stay in sight
_SCROLL = 'overflow: auto; max-height: 32em'


def html_of(page: Page) -> str:
    """A page, self-contained."""
    sections = ''.join(map(_section, page.sections))
    warnings = ''.join(
        f'<div style="{_WARNING}; margin: 3px 0">{html.escape(text)}</div>'
        for text in page.warnings
    )
    if warnings:
        warnings = f'<div style="{_SECTION}">warnings</div>{warnings}'
    title = f'<div style="{_TITLE}">{html.escape(page.title)}</div>'
    return f'<div style="{_FRAME}">{title}{sections}{warnings}</div>'


def _section(section: Section) -> str:
    table = ''
    if section.rows:
        heads = [column.head for column in section.columns]
        rows = _row('th', _HEAD, heads, section.columns)
        rows += ''.join(_row('td', _CELL, row, section.columns) for row in section.rows)
        table = f'<div style="{_SCROLL}"><table style="{_TABLE}">{rows}</table></div>'
    words = ''.join(f'<div>{html.escape(words)}</div>' for words in section.words)
    return f'<div style="{_SECTION}">{html.escape(section.title)}</div>{table}{words}'


def _row(tag: str, style: str, cells: Sequence[str], along: Sequence[Column]) -> str:
    made: list[str] = []
    for cell, column in zip(cells, along, strict=True):
        align = 'right' if column.right else 'left'
        family = f'; {MONO}' if tag == 'td' else ''
        made.append(
            f'<{tag} style="{style}; text-align: {align}; white-space: nowrap{family}">'
            f'{html.escape(cell)}</{tag}>'
        )
    return f'<tr style="background: transparent">{"".join(made)}</tr>'
