"""Renders pages as HTML, for notebooks and files."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ._errors import printable
from ._page import Column, Page, Section, below_text
from ._text import MONOSPACED

# Styles are inline, because some notebook viewers drop style sheets.
_MONO = f'font-family: {MONOSPACED}'
_FRAME = 'font: 13px/1.45 system-ui, sans-serif; text-align: left; max-width: 70em'
_TITLE = 'font-size: 15px; font-weight: 600; margin: 2px 0 8px'
_SECTION = 'font-weight: 600; margin: 12px 0 2px'
# These styles override the table styles of notebooks. Text inherits the color of the page, so it is
# readable on light and on dark backgrounds.
_TABLE = 'border-collapse: collapse; border: none; margin: 0; font-size: 12px; color: inherit'
_HEAD = 'border: none; padding: 2px 14px 2px 0; font-weight: normal; opacity: 0.65'
_CELL = 'border: none; border-top: 1px solid rgba(128,128,128,0.3); padding: 2px 14px 2px 0'
_CODE = f'margin: 4px 0; overflow: auto; font-size: 12px; {_MONO}'
_LINES = 'list-style: none; margin: 4px 0; padding: 0'
_WARNING = 'border-left: 3px solid #d9a400; background: rgba(217,164,0,0.12); padding: 3px 10px'
# In notebooks, long tables scroll, so that the totals below stay visible.
_SCROLL = 'overflow: auto; max-height: 32em'
_BELOW = f'border: none; padding: 0 0 4px 28px; text-align: left; {_MONO}; opacity: 0.75'
# On a narrow page, each row of a table becomes a list of its cells, with their headings.
# !important overrides the inline styles.
_NARROW = """<style>
.einshard-page { container-type: inline-size; overflow-wrap: anywhere }
@container (max-width: 640px) {
.einshard-page div { max-height: none !important }
.einshard-page tr:first-child { display: none !important }
.einshard-page :is(table, tbody, tr) { display: block !important; width: auto !important }
.einshard-page tr { border-top: 1px solid rgba(128,128,128,0.3) !important;
  padding: 4px 0 !important }
.einshard-page td { display: flex !important; border: none !important; padding: 0 !important;
  text-align: left !important; white-space: normal !important;
  overflow-wrap: anywhere !important }
.einshard-page td:empty { display: none !important }
.einshard-page tr.below { border: none !important }
.einshard-page td[data-head]::before { content: attr(data-head); flex: 0 0 8.5em; opacity: 0.65;
  font-family: system-ui, sans-serif }
}
</style>"""


def page_html(page: Page, *, scroll: bool = True) -> str:
    """Renders a page as self-contained HTML; long tables scroll unless `scroll` is false."""
    page = page.printable()
    table_style = _SCROLL if scroll else 'overflow: auto'
    first = [section for section in page.sections if section.comes_first]
    rest = [section for section in page.sections if not section.comes_first]
    parts = [
        _div(page.title, _TITLE),
        *_texts('findings', page.findings, f'{_WARNING}; margin: 3px 0'),
        *(_section(section, table_style) for section in [*first, *rest]),
        *_texts('notes', page.notes, 'margin: 3px 0'),
    ]
    return f'<div class="einshard-page" style="{_FRAME}">{_NARROW}{"".join(parts)}</div>'


def section_html(section: Section) -> str:
    """Renders one section, for a document with a style of its own."""
    (made,) = Page('', (section,)).printable().sections
    return f'<div class="einshard-page">{_NARROW}{_section(made, "overflow: auto")}</div>'


def _texts(title: str, texts: Sequence[str], style: str) -> list[str]:
    return [_div(title, _SECTION), *(_div(text, style) for text in texts)] if texts else []


_DOCUMENT = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def page_document(page: Page) -> str:
    return document(page.title, 'body { margin: 1em }', page_html(page, scroll=False))


def document(title: str, style: str, body: str) -> str:
    """Returns an HTML document with a style sheet."""
    return _DOCUMENT.format(title=html.escape(printable(title)), style=style, body=body)


def _div(text: str, style: str) -> str:
    return f'<div style="{style}">{html.escape(text)}</div>' if text else ''


def _section(section: Section, table_style: str) -> str:
    parts = [_div(section.title, _SECTION), section.picture]
    if section.code:
        code = html.escape('\n'.join(section.code))
        parts.append(f'<pre style="{_CODE}">{code}</pre>')
    if section.columns:
        rows = _head(section.columns)
        rows += ''.join(_row(row, section.columns) for row in section.rows)
        parts.append(f'<div style="{table_style}"><table style="{_TABLE}">{rows}</table></div>')
    if section.lines:
        items = ''.join(f'<li>{html.escape(line)}</li>' for line in section.lines)
        parts.append(f'<ul style="{_LINES}">{items}</ul>')
    return ''.join(parts)


def _head(columns: Sequence[Column]) -> str:
    cells = (
        f'<th style="{_HEAD}; {_align(column)}">{html.escape(column.head)}</th>'
        for column in columns
        if not column.below
    )
    return f'<tr style="background: transparent">{"".join(cells)}</tr>'


def _row(row: Sequence[str], columns: Sequence[Column]) -> str:
    in_row = [
        f'<td data-head="{html.escape(column.head)}" '
        f'style="{_CELL}; {_align(column)}; {_MONO}">{_cell(cell, column)}</td>'
        for cell, column in zip(row, columns, strict=True)
        if not column.below
    ]
    below = below_text(row[len(in_row) :], columns[len(in_row) :])
    line = ''
    if below:
        below = _breakable(below, '/,')
        cell = f'<td colspan="{len(in_row)}" style="{_BELOW}">{below}</td>'
        line = f'<tr class="below" style="background: transparent">{cell}</tr>'
    return f'<tr style="background: transparent">{"".join(in_row)}</tr>{line}'


def _cell(text: str, column: Column) -> str:
    return _breakable(text, '/') if column.shorten else html.escape(text)


def _breakable(text: str, separators: str) -> str:
    """Escapes text, and allows line breaks after the separators."""
    text = html.escape(text)
    for separator in separators:
        text = text.replace(separator, f'{separator}<wbr>')
    return text


def _align(column: Column) -> str:
    align = f'text-align: {"right" if column.right else "left"}'
    return align + ('; overflow-wrap: normal' if column.shorten else '; white-space: nowrap')
