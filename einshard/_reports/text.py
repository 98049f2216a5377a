"""The page of a report -> lines of text, each segment with the role that its colour has."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .._words import columns
from .page import Column, Page, Section

Segment: TypeAlias = tuple[str, str]  # text, and its style as rich names it

_NARROWEST = 12  # an elastic column is not cut further


def text_of(page: Page, width: int) -> str:
    """A page as plain text."""
    lines = page_lines(page, width)
    return '\n'.join(''.join(text for text, _ in line).rstrip() for line in lines)


def page_lines(page: Page, width: int) -> Iterator[list[Segment]]:
    """A page in columns of text."""
    yield [(page.title, 'bold')]
    for section in page.sections:
        yield [('', '')]
        yield from _section_lines(section, width)
    if page.warnings:
        yield [('', '')]
        yield [('warnings', 'bold yellow')]
    for warning in page.warnings:
        wrapped = textwrap.wrap(warning, width - 4, break_long_words=False)
        for i, line in enumerate(wrapped):
            yield [('    ' if i else '  - ', ''), (line, 'yellow')]


def _section_lines(section: Section, width: int) -> Iterator[list[Segment]]:
    yield [(section.title, 'bold')]
    if section.rows:
        beside = [column for column in section.columns if not column.below]
        below = section.columns[len(beside) :]
        widths = _widths(beside, section.rows, width - 2)
        heads = [column.head for column in beside]
        yield [('  ', ''), (_line(heads, beside, widths), 'dim')]
        for row in section.rows:
            cut = zip(row, beside, widths, strict=False)
            cells = [_cut(cell, column, width) for cell, column, width in cut]
            yield [('  ', ''), (_line(cells, beside, widths), '')]
            for cell, column in zip(row[len(beside) :], below, strict=True):
                if cell:
                    yield [(' ' * 8, ''), (f'{column.head} {cell}', 'dim')]
    for words in section.words:
        lines = textwrap.wrap(words, width - 4, break_long_words=False)
        yield from ([('    ' if i else '  ', ''), (line, '')] for i, line in enumerate(lines))


def _widths(along: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the columns; the widest elastic ones give way until the page is wide enough."""
    texts = [[column.head for column in along], *(row[: len(along)] for row in rows)]
    widths = [max(map(columns, column)) for column in zip(*texts, strict=True)]
    elastic = [i for i, column in enumerate(along) if column.elastic]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(elastic, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return widths


def _line(cells: Sequence[str], along: Sequence[Column], widths: Sequence[int]) -> str:
    padded: list[str] = []
    for cell, column, width in zip(cells, along, widths, strict=True):
        blank = ' ' * (width - columns(cell))
        padded.append(blank + cell if column.right else cell + blank)
    return '  '.join(padded)


def _cut(cell: str, column: Column, width: int) -> str:
    """The text without its middle or its start, where it is too long."""
    if columns(cell) <= width:
        return cell
    head = (width - 2) // 2 if column.elastic == 'middle' else 0
    return f'{cell[:head]}..{cell[len(cell) - (width - 2 - head) :]}'
