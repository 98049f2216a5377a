"""Renders pages of tables and notes as text or HTML, for reports and tables of rules."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ._errors import shown
from ._text import MONO, display_width

Segment: TypeAlias = tuple[str, str]  # text and its rich style

_MIN_ELASTIC_WIDTH = 12
_MIN_BESIDE = 4  # columns that stay side by side on a narrow page; others go below


@dataclass(frozen=True)
class Column:
    head: str
    right: bool = False  # align right, for numbers
    elastic: str = ''  # 'middle' or 'start': the part of a cell to omit on a narrow page
    below: bool = False  # for long paths: whether text has these cells on lines of their own


@dataclass(frozen=True)
class Section:
    """A table with notes below it. In text, a section with a title is indented."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    words: tuple[str, ...] = ()
    ruled: bool = False  # draw a line between headings and rows


@dataclass(frozen=True)
class Page:
    title: str
    sections: tuple[Section, ...]
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def printable(self) -> Page:
        """Replaces control characters, which paths may contain and terminals would interpret."""
        sections = (
            replace(
                section,
                rows=tuple(tuple(map(shown, row)) for row in section.rows),
                words=tuple(map(shown, section.words)),
            )
            for section in self.sections
        )
        findings, notes = (tuple(map(shown, texts)) for texts in (self.findings, self.notes))
        return Page(shown(self.title), tuple(sections), findings, notes)


# --- text ---------------------------------------------------------------------------------------


def page_text(page: Page, width: int | None) -> str:
    """Renders a page as plain text; if width is None, lines are not wrapped."""
    lines = page_lines(page, width)
    return '\n'.join(''.join(text for text, _ in line).rstrip() for line in lines)


def page_lines(page: Page, width: int | None) -> Iterator[list[Segment]]:
    """Renders a page as lines of styled segments."""
    page = page.printable()
    if page.title:
        yield [(page.title, 'bold')]
    for i, section in enumerate(page.sections):
        if i or page.title:
            yield [('', '')]
        yield from _section_lines(section, width)
    for title, texts, color in (
        ('findings', page.findings, 'yellow'),
        ('notes', page.notes, ''),
    ):
        if texts:
            yield [('', '')]
            yield [(title, f'bold {color}'.strip())]
        for text in texts:
            for i, line in enumerate(_wrapped(text, width)):
                yield [('    ' if i else '  - ', ''), (line, color)]


def _section_lines(section: Section, width: int | None) -> Iterator[list[Segment]]:
    indent = '  ' * bool(section.title)
    if section.title:
        yield [(section.title, 'bold')]
    if section.columns:
        room = None if width is None else width - len(indent)
        n, widths = _beside(section, room)
        beside, below = section.columns[:n], section.columns[n:]
        heads = [column.head for column in beside]
        yield [(indent, ''), (_line(heads, beside, widths), 'dim')]
        if section.ruled:
            yield [(indent, ''), ('  '.join('-' * width for width in widths), 'dim')]
        for row in section.rows:
            fitted = zip(row, beside, widths, strict=False)
            cells = [_shortened(cell, column, width) for cell, column, width in fitted]
            yield [(indent, ''), (_line(cells, beside, widths), '')]
            cells = [f'{c.head} {cell}' for cell, c in zip(row[n:], below, strict=True) if cell]
            for i, line in enumerate(_below('; '.join(cells), width)):
                yield [(' ' * (10 if i else 8), ''), (line, 'dim')]
    for words in section.words:
        for i, line in enumerate(_wrapped(words, width)):
            yield [(indent * 2 if i else indent, ''), (line, '')]


def _wrapped(words: str, width: int | None) -> list[str]:
    if width is None:
        return [words]
    return textwrap.wrap(words, width - 4, break_long_words=False)


def _below(text: str, width: int | None) -> list[str]:
    """Wraps the lines below a row; long paths break anywhere."""
    wide = len(text) if width is None else width - 12
    return textwrap.wrap(text, wide, break_on_hyphens=False) if text else []


def _beside(section: Section, width: int | None) -> tuple[int, list[int]]:
    """Returns the number of columns of a table that fit side by side, and their widths."""
    n = sum(not column.below for column in section.columns)
    while True:
        widths = _widths(section.columns[:n], section.rows, width)
        if width is None or n <= _MIN_BESIDE or sum(widths) + 2 * (n - 1) <= width:
            return n, widths
        n -= 1


def _widths(along: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Computes column widths; shrinks the widest elastic column until a row fits."""
    texts = [[column.head for column in along], *(row[: len(along)] for row in rows)]
    widths = [max(map(display_width, column)) for column in zip(*texts, strict=True)]
    elastic = [i for i, column in enumerate(along) if column.elastic]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(elastic, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= _MIN_ELASTIC_WIDTH:
            break
        widths[widest] -= 1
    return widths


def _line(cells: Sequence[str], along: Sequence[Column], widths: Sequence[int]) -> str:
    padded: list[str] = []
    for cell, column, width in zip(cells, along, widths, strict=True):
        blank = ' ' * (width - display_width(cell))
        padded.append(blank + cell if column.right else cell + blank)
    return '  '.join(padded)


def _shortened(cell: str, column: Column, width: int) -> str:
    """Replaces the middle or start of a cell by '..' if it is too long."""
    if display_width(cell) <= width:
        return cell
    head = (width - 2) // 2 if column.elastic == 'middle' else 0
    return f'{cell[:head]}..{cell[len(cell) - (width - 2 - head) :]}'


# --- HTML for notebooks: inline styles, text in the page's color ---------------------------------

_FRAME = 'font: 13px/1.45 system-ui, sans-serif; text-align: left; max-width: 70em'
_TITLE = 'font-size: 15px; font-weight: 600; margin: 2px 0 8px'
_SECTION = 'font-weight: 600; margin: 12px 0 2px'
# Notebooks style all tables. These styles override that, so that text has the page's color, which
# is readable on light and dark backgrounds.
_TABLE = 'border-collapse: collapse; border: none; margin: 0; font-size: 12px; color: inherit'
_HEAD = 'border: none; padding: 2px 14px 2px 0; font-weight: normal; opacity: 0.65'
_CELL = 'border: none; border-top: 1px solid rgba(128,128,128,0.3); padding: 2px 14px 2px 0'
_WORDS = 'list-style: none; margin: 4px 0; padding: 0'
_WARNING = 'border-left: 3px solid #d9a400; background: rgba(217,164,0,0.12); padding: 3px 10px'
# tables of large models have hundreds of rows: they scroll, so that totals stay visible
_SCROLL = 'overflow: auto; max-height: 32em'


def page_html(page: Page) -> str:
    """Renders a page as self-contained HTML."""
    page = page.printable()
    parts = [_titled(page.title, _TITLE), *map(_section, page.sections)]
    for title, texts, style in (
        ('findings', page.findings, f'{_WARNING}; margin: 3px 0'),
        ('notes', page.notes, 'margin: 3px 0'),
    ):
        if texts:
            parts.append(_titled(title, _SECTION))
        parts += [_titled(text, style) for text in texts]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


_DOCUMENT = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
</head>
<body style="margin: 1em">
{body}
</body>
</html>
"""


def page_document(page: Page) -> str:
    """Renders a page as an HTML file."""
    return _DOCUMENT.format(title=html.escape(shown(page.title)), body=page_html(page))


def _titled(text: str, style: str) -> str:
    return f'<div style="{style}">{html.escape(text)}</div>' if text else ''


def _section(section: Section) -> str:
    parts = [_titled(section.title, _SECTION)]
    if section.columns:
        heads = [column.head for column in section.columns]
        rows = _row('th', _HEAD, heads, section.columns)
        rows += ''.join(_row('td', _CELL, row, section.columns) for row in section.rows)
        parts.append(f'<div style="{_SCROLL}"><table style="{_TABLE}">{rows}</table></div>')
    if section.words:
        words = ''.join(f'<li>{html.escape(words)}</li>' for words in section.words)
        parts.append(f'<ul style="{_WORDS}">{words}</ul>')
    return ''.join(parts)


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
