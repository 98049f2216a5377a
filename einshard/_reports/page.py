"""A report -> the tables and sentences that it is shown as; text and HTML follow them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._errors import plural
from .._words import amount, short_arrays, short_source
from .fold import fold
from .rows import ArrayRow, CollectiveRow, Memory

if TYPE_CHECKING:
    from .report import Report

_MOST_ROWS = 40


@dataclass(frozen=True)
class Column:
    head: str
    right: bool = False  # numbers are aligned to the right
    elastic: str = ''  # where the page is too narrow, the 'middle' or 'start' is left out
    below: bool = False  # text has it on a line of its own, for paths are long


@dataclass(frozen=True)
class Section:
    """A table with what is to be said of it."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    title: str
    sections: tuple[Section, ...]
    warnings: tuple[str, ...]


_ARRAYS = (
    Column('path', elastic='middle'),
    Column('array', elastic='middle'),
    Column('placement'),
    Column('on a device', right=True),
)
_SOURCE = Column('line')
_COLLECTIVES = (
    Column('runs', right=True),
    Column('kind'),
    Column('array', elastic='middle'),
    Column('groups'),
    Column('along'),
    Column('sent', right=True),
    _SOURCE,
    Column('of', below=True),
)


def lay_out_report(report: Report) -> Page:
    """The page of a report."""
    sections = [
        _array_section('arguments', report.arguments),
        _array_section('results', report.results),
        _collective_section(report),
    ]
    if report.intermediates is not None:
        sections.insert(2, _intermediates(report.intermediates))
    sections.append(Section('on each device', words=tuple(_resources(report))))
    mesh = ', '.join(f'{name}={size}' for name, size in report.mesh)
    devices = plural(report.n_devices, 'device')
    title = f'{report.name} on {devices} ({report.device_kind}{"; " * bool(mesh)}{mesh})'
    warnings = Counter(
        f'{f"{short_source(caution.source)}: " if caution.source else ""}{caution.text}'
        for caution in report.warnings
    )
    listed = tuple(f'{text} ({n} times)' if n > 1 else text for text, n in warnings.items())
    shown = tuple(section for section in sections if section.rows or section.words)
    return Page(title, shown, listed)


def _array_section(title: str, rows: Sequence[ArrayRow]) -> Section:
    shown: list[tuple[str, ...]] = []
    alike = [(row.array, row.placement) for row in rows]
    for path, numbers in fold([row.path for row in rows], alike):
        row = rows[numbers[0]]
        n = f'{len(numbers)} x ' if len(numbers) > 1 else ''
        shown.append((path, row.array, row.placement, f'{n}{amount(row.bytes)}'))
    return Section(title, _ARRAYS, *_first(shown))


def _intermediates(rows: Sequence[ArrayRow]) -> Section:
    shown = [
        (row.path, row.array, row.placement, amount(row.bytes), short_source(row.source))
        for row in rows
    ]
    path = Column('name', elastic='start')
    return Section('intermediates', (path, *_ARRAYS[1:], _SOURCE), *_first(shown))


def _first(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The rows shown, and a word about the others."""
    if len(rows) <= _MOST_ROWS:
        return tuple(rows), ()
    return tuple(rows[: _MOST_ROWS - 1]), (f'.. and {len(rows) - _MOST_ROWS + 1} more',)


def _collective_section(report: Report) -> Section:
    groups: dict[object, list[CollectiveRow]] = {}
    for row in report.collectives:
        key = (row.kind, row.arrays, row.parties, row.groups, row.along, row.times, row.source)
        groups.setdefault((*key, row.is_async), []).append(row)
    in_order = sorted(groups.values(), key=lambda rows: -_sent(rows))
    shown = [collective_cells(rows) for rows in in_order]
    if not shown:
        return Section('collectives', words=('none',))
    columns = _COLLECTIVES
    if not any(cells[-1] for cells in shown):
        columns, shown = columns[:-1], [cells[:-1] for cells in shown]
    return Section('collectives', columns, *_first(shown))


def collective_cells(rows: Sequence[CollectiveRow]) -> tuple[str, ...]:
    """A line about collectives that differ in nothing shown."""
    row = rows[0]
    n = str(len(rows))
    if row.times is None:
        runs = f'{n} x ?'
    elif row.times == 1:
        runs = n
    else:
        runs = str(row.times) if len(rows) == 1 else f'{n} x {row.times}'
    return (
        runs,
        f'{row.kind}{" (async)" * row.is_async}',
        short_arrays(row.arrays),
        f'{row.groups} of {row.parties}',
        row.along,
        amount(_sent(rows)),
        short_source(row.source),
        _of(rows),
    )


def _of(rows: Sequence[CollectiveRow]) -> str:
    """What several collectives are of, in a few words: 'params/0-3/{q,k}'."""
    # 'result' is the whole of it, and tells nothing
    paths = list(dict.fromkeys(path for row in rows for path in row.of if path != 'result'))
    return ', '.join(path for path, _ in fold(paths, [None] * len(paths), few=1))


def _sent(rows: Sequence[CollectiveRow]) -> int:
    return sum(row.network_bytes * (1 if row.times is None else row.times) for row in rows)


def _resources(report: Report) -> list[str]:
    by_kind = report.collectives.network_bytes
    words: list[str] = []
    if by_kind:
        at_least = 'at least ' * any(row.times is None for row in report.collectives)
        listed = ', '.join(f'{kind} {amount(n)}' for kind, n in by_kind.items())
        listed = f': {listed}' if len(by_kind) > 1 else ''
        words.append(f'sent in one run: {at_least}{amount(report.network_bytes)}{listed}')
    if report.memory is not None:
        words.append(f'memory: {memory_text(report.memory)}')
    if report.flops is not None:
        words.append(f'compute: {flops_text(report.flops)} in one run')
    return words


def memory_text(memory: Memory) -> str:
    parts = {
        'arguments': memory.arguments,
        'results': memory.results,
        'temporaries': memory.temporaries,
        'code': memory.code,
    }
    listed = {name: f'{name} {amount(n)}' for name, n in parts.items() if n}
    if memory.aliased:
        listed['results'] += f' ({amount(memory.aliased)} in place of arguments)'
    return f'{amount(memory.total)}{": " * bool(listed)}{", ".join(listed.values())}'


def flops_text(n: float) -> str:
    """1.5e9 -> '1.5 Gflop'"""
    units = ['', 'k', 'M', 'G', 'T', 'P']
    while n >= 1000 and len(units) > 1:
        n /= 1000
        units.pop(0)
    return f'{n:.3g} {units[0]}flop'
