"""Pages of tables and notes, and their rendering as text."""

from __future__ import annotations

import bisect
import itertools
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ._errors import printable
from ._text import display_width

Segment: TypeAlias = tuple[str, str]  # text and its rich style

_MAX_TEXT_WIDTH = 100
_MIN_SHORTENED_WIDTH = 12
_MIN_COLUMNS = 4  # this many stay side by side on a narrow page; the others go below


@dataclass(frozen=True)
class Column:
    head: str
    right: bool = False  # align right, for numbers
    # the part of a long cell that text output omits: 'middle', 'start', or '' for none
    shorten: str = ''
    below: bool = False  # write the cell on a line below its row; such columns come last


@dataclass(frozen=True)
class Section:
    """A table with lines of text below it. In text output, everything below the title is indented.

    Attributes:
        lines: the text below the table.
        has_rule: whether to draw a line between headings and rows.
        max_rows: the maximum number of rows in text, counting '.. and 3 more'. HTML shows all.
        omitted: text about the omitted rows, after '.. and 3 more', such as ': 3 MiB'.
        code: lines of source code above the table; they are not wrapped.
        comes_first: whether HTML, where tables are long, shows it before the other sections.
        picture: an SVG, which only HTML shows, below the title.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()
    has_rule: bool = False
    max_rows: int | None = None
    omitted: str = ''
    code: tuple[str, ...] = ()
    comes_first: bool = False
    picture: str = ''

    def shortened(self) -> Section:
        if self.max_rows is None or len(self.rows) <= self.max_rows:
            return self
        rows = self.rows[: self.max_rows - 1]
        more = f'.. and {len(self.rows) - len(rows)} more{self.omitted}'
        return replace(self, rows=rows, lines=(more, *self.lines), max_rows=None)


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
                rows=tuple(tuple(map(printable, row)) for row in section.rows),
                lines=tuple(map(printable, section.lines)),
                code=tuple(map(printable, section.code)),
            )
            for section in self.sections
        )
        findings, notes = (tuple(map(printable, texts)) for texts in (self.findings, self.notes))
        return Page(printable(self.title), tuple(sections), findings, notes)


# --- text ---------------------------------------------------------------------------------------


def page_text(page: Page, width: int | None, *, shortens: bool = True) -> str:
    """Renders a page as plain text.

    If width is None, lines are not wrapped. Without `shortens`, rows of tables keep all their text.
    """
    lines = page_lines(page, width, shortens=shortens)
    return '\n'.join(''.join(text for text, _ in line).rstrip() for line in lines)


def page_lines(page: Page, width: int | None, *, shortens: bool = True) -> Iterator[list[Segment]]:
    page = page.printable()
    # long lines of text are hard to read; tables use the width
    text_width = None if width is None else min(width, _MAX_TEXT_WIDTH)
    if page.title:
        yield [(page.title, 'bold')]
    for i, section in enumerate(page.sections):
        if i or page.title:
            yield [('', '')]
        yield from _section_lines(section.shortened(), width if shortens else None, text_width)
    for title, texts, color in (
        ('findings', page.findings, 'yellow'),
        ('notes', page.notes, ''),
    ):
        if texts:
            yield [('', '')]
            yield [(title, f'bold {color}'.strip())]
        for text in texts:
            for i, line in enumerate(_wrapped(text, text_width)):
                yield [('    ' if i else '  - ', ''), (line, color)]


def _section_lines(
    section: Section, width: int | None, text_width: int | None
) -> Iterator[list[Segment]]:
    indent = '  ' * bool(section.title)
    if section.title:
        yield [(section.title, 'bold')]
    yield from ([(f'{indent}{line}'.rstrip(), '')] for line in section.code)
    if section.columns:
        room = None if width is None else width - len(indent)
        n, widths = _columns_in_row(section, room)
        in_row, below = section.columns[:n], section.columns[n:]
        heads = [column.head for column in in_row]
        yield [(indent, ''), (_line(heads, in_row, widths), 'dim')]
        if section.has_rule:
            yield [(indent, ''), ('  '.join('-' * width for width in widths), 'dim')]
        for row, cells in zip(section.rows, _fit_cells(section.rows, in_row, widths), strict=True):
            yield [(indent, ''), (_line(cells, in_row, widths), '')]
            for i, line in enumerate(_wrap_below(below_text(row[n:], below), text_width)):
                yield [(' ' * (10 if i else 8), ''), (line, 'dim')]
    for text in section.lines:
        for i, line in enumerate(_wrapped(text, text_width)):
            yield [(indent * 2 if i else indent, ''), (line, '')]


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(1, width - 4), break_long_words=False)


def below_text(cells: Sequence[str], columns: Sequence[Column]) -> str:
    """Writes each cell after its heading: 'of weights; called at model.py:8'."""
    return '; '.join(f'{c.head} {cell}' for cell, c in zip(cells, columns, strict=True) if cell)


def _wrap_below(text: str, width: int | None) -> list[str]:
    room = len(text) if width is None else max(1, width - 12)
    return textwrap.wrap(text, room, break_on_hyphens=False) if text else []


def _columns_in_row(section: Section, width: int | None) -> tuple[int, list[int]]:
    """Returns how many columns to put side by side, and their widths."""
    n = sum(not column.below for column in section.columns)
    while True:
        widths = _widths(section.columns[:n], section.rows, width)
        if width is None or n <= _MIN_COLUMNS or sum(widths) + 2 * (n - 1) <= width:
            return n, widths
        n -= 1


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None
) -> list[int]:
    """Computes column widths. If rows are too long, narrows the columns that allow shortening."""
    texts = [[column.head for column in columns], *(row[: len(columns)] for row in rows)]
    widths = [max(map(display_width, column)) for column in zip(*texts, strict=True)]
    narrowable = [i for i, column in enumerate(columns) if column.shorten]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(narrowable, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= _MIN_SHORTENED_WIDTH:
            break
        widths[widest] -= 1
    return widths


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded: list[str] = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        blank = ' ' * (width - display_width(cell))
        padded.append(blank + cell if column.right else cell + blank)
    return '  '.join(padded)


def _fit_cells(
    rows: Sequence[Sequence[str]], columns: Sequence[Column], widths: Sequence[int]
) -> list[list[str]]:
    """Shortens cells that are too wide, except those that would look like another cell."""
    fitted = [list(map(_fit_cell, row, columns, widths)) for row in rows]
    for i in range(len(columns)):
        texts: dict[str, set[str]] = {}
        for row, cells in zip(rows, fitted, strict=True):
            texts.setdefault(cells[i], set()).add(row[i])
        for row, cells in zip(rows, fitted, strict=True):
            if len(texts[cells[i]]) > 1:
                cells[i] = row[i]
    return fitted


def _fit_cell(cell: str, column: Column, width: int) -> str:
    """Shortens a cell that is too wide: 'layers/..kernel'."""
    if display_width(cell) <= width:
        return cell
    cell = unicodedata.normalize('NFC', cell)
    ends = list(itertools.accumulate(map(display_width, cell)))  # where each character ends
    head = cell[: bisect.bisect(ends, (width - 2) // 2)] if column.shorten == 'middle' else ''
    # also omit the combining marks of the last omitted character
    last_omitted = bisect.bisect_left(ends, ends[-1] - (width - 2 - display_width(head)))
    return f'{head}..{cell[bisect.bisect(ends, ends[last_omitted]) :]}'
