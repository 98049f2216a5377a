"""Report: placements, collectives and memory of a compiled function, as plain data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._errors import plural
from .._hlo.buffers import Temporary
from .._page import Column, Page, Section, page_html, page_lines, page_text
from .._text import flops_text, format_bytes, short_arrays, short_source
from .bounds import NO_BOUNDS, Bounds, bounds_section
from .diff import Compared, Diff, make_diff
from .fold_layers import fold
from .memory import temporaries_section
from .report_rows import ArrayRow, Caution, CollectiveRow, Collectives, Memory

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_WIDTH = 100
_MOST_ROWS = 40


@dataclass(frozen=True, repr=False)
class Report:
    """A report on a compiled function, made by `explain`. Text in print, HTML in notebooks.

    Attributes:
        name: the name of the function.
        n_devices: the number of devices that run the program.
        device_kind: such as 'cpu' or 'TPU v5 lite'.
        mesh: (axis, size) of the user's mesh; empty if there is none.
        arguments, results: one row per array, in order.
        collectives: one row per collective, with `counts` and `network_bytes` by kind.
        memory: bytes per device; None if the compiler does not report it.
        flops: flops per device in one run, as the compiler counts them: a loop body counts once.
            None if the compiler does not count.
        warnings: likely mistakes.
        intermediates: one row per intermediate value with a source line; None if not requested.
        temporaries: the largest arrays that the program computes in between.
        chip: the name of the chip that `bounds` are for; None if it is unknown, as for CPUs.
        bounds: lower bounds on the time of one run: compute, HBM, and the network along each mesh
            axis, with `largest`. Empty without a chip.
    """

    name: str
    n_devices: int
    device_kind: str
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[ArrayRow, ...]
    results: tuple[ArrayRow, ...]
    collectives: Collectives
    memory: Memory | None
    flops: float | None
    warnings: tuple[Caution, ...]
    intermediates: tuple[ArrayRow, ...] | None = None
    temporaries: tuple[Temporary, ...] = ()
    chip: str | None = None
    bounds: Bounds = NO_BOUNDS

    @property
    def network_bytes(self) -> int:
        """Bytes that each device sends in one run.

        A loop with unknown trip count counts as one iteration. Custom calls are not included.
        """
        return sum(self.collectives.network_bytes.values())

    def diff(self, after: Report) -> Diff:
        """What changed from this report to another: `before.diff(after)`."""
        return make_diff(self._compared(), after._compared())

    def _compared(self) -> Compared:
        memory = self.memory
        numbers = {
            'sent in one run': self.network_bytes,
            'memory': memory.total if memory else 0,
            'temporaries': memory.temporaries if memory else 0,
            'flops': int(self.flops or 0),
        }
        return Compared((*self.arguments, *self.results), self.collectives, numbers)

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings and numbers, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **{name: _plain(value) for name, value in fields.items()},
            'mesh': dict(self.mesh),
            'counts': dict(self.collectives.counts),
            'network_bytes': self.network_bytes,
        }

    def __str__(self) -> str:
        return page_text(_page(self), _WIDTH)

    def __repr__(self) -> str:
        return str(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in page_lines(_page(self), min(_WIDTH, options.max_width)):
            yield Text.assemble(*line)

    def _repr_html_(self) -> str:
        return page_html(_page(self))


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as dictionaries and lists."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# --- the page -----------------------------------------------------------------------------------

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


def _page(report: Report) -> Page:
    sections = [
        _array_section('arguments', report.arguments),
        _array_section('results', report.results),
        _collective_section(report),
    ]
    if report.intermediates is not None:
        sections.insert(2, _intermediates(report.intermediates))
    sections.append(Section('on each device', words=tuple(_resources(report))))
    sections.append(temporaries_section(report.temporaries, report.memory))
    sections.append(bounds_section(report.chip or '', report.bounds))
    mesh = ', '.join(f'{name}={size}' for name, size in report.mesh)
    devices = plural(report.n_devices, 'device')
    title = f'{report.name} on {devices} ({report.device_kind}{"; " * bool(mesh)}{mesh})'
    warnings = Counter(
        f'{f"{short_source(caution.source)}: " if caution.source else ""}{caution.text}'
        for caution in report.warnings
    )
    listed = tuple(f'{text} ({n} times)' if n > 1 else text for text, n in warnings.items())
    filled = tuple(section for section in sections if section.rows or section.words)
    return Page(title, filled, listed)


def _array_section(title: str, rows: Sequence[ArrayRow]) -> Section:
    shown: list[tuple[str, ...]] = []
    alike = [(row.array, row.placement) for row in rows]
    for path, numbers in fold([row.path for row in rows], alike):
        row = rows[numbers[0]]
        n = f'{len(numbers)} x ' if len(numbers) > 1 else ''
        shown.append((path, row.array, row.placement, f'{n}{format_bytes(row.bytes)}'))
    return Section(title, _ARRAYS, *_first(shown))


def _intermediates(rows: Sequence[ArrayRow]) -> Section:
    shown = [
        (row.path, row.array, row.placement, format_bytes(row.bytes), short_source(row.source))
        for row in rows
    ]
    path = Column('name', elastic='start')
    return Section('intermediates', (path, *_ARRAYS[1:], _SOURCE), *_first(shown))


def _first(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The first rows, and a note about the others."""
    if len(rows) <= _MOST_ROWS:
        return tuple(rows), ()
    return tuple(rows[: _MOST_ROWS - 1]), (f'.. and {len(rows) - _MOST_ROWS + 1} more',)


def _collective_section(report: Report) -> Section:
    groups: dict[object, list[CollectiveRow]] = {}
    for row in report.collectives:
        key = (row.kind, row.arrays, row.group_size, row.groups, row.along, row.executions)
        groups.setdefault((*key, row.source, row.is_async), []).append(row)
    in_order = sorted(groups.values(), key=lambda rows: -_sent(rows))
    shown = [_collective_cells(rows) for rows in in_order]
    if not shown:
        return Section('collectives', words=('none',))
    columns = _COLLECTIVES
    if not any(cells[-1] for cells in shown):
        columns, shown = columns[:-1], [cells[:-1] for cells in shown]
    return Section('collectives', columns, *_first(shown))


def _collective_cells(rows: Sequence[CollectiveRow]) -> tuple[str, ...]:
    """One line for collectives that look the same."""
    row = rows[0]
    n = str(len(rows))
    if row.executions is None:
        runs = f'{n} x ?'
    elif row.executions == 1:
        runs = n
    else:
        runs = str(row.executions) if len(rows) == 1 else f'{n} x {row.executions}'
    return (
        runs,
        f'{row.kind}{" (async)" * row.is_async}',
        short_arrays(row.arrays),
        '?' if row.network_bytes is None else f'{row.groups} of {row.group_size}',
        row.along,
        '?' if row.network_bytes is None else format_bytes(_sent(rows)),
        short_source(row.source),
        _of(rows),
    )


def _of(rows: Sequence[CollectiveRow]) -> str:
    """The arrays of several collectives, folded: 'params/0-3/{q,k}'."""
    # skip 'result', which is the entire result
    paths = list(dict.fromkeys(path for row in rows for path in row.of if path != 'result'))
    return ', '.join(path for path, _ in fold(paths, [None] * len(paths), few=1))


def _sent(rows: Sequence[CollectiveRow]) -> int:
    return sum(row.total_bytes for row in rows)


def _resources(report: Report) -> list[str]:
    by_kind = report.collectives.network_bytes
    words: list[str] = []
    if by_kind:
        unknown = any(None in (row.executions, row.network_bytes) for row in report.collectives)
        at_least = 'at least ' * unknown
        listed = ', '.join(f'{kind} {format_bytes(n)}' for kind, n in by_kind.items())
        listed = f': {listed}' if len(by_kind) > 1 else ''
        words.append(f'sent in one run: {at_least}{format_bytes(report.network_bytes)}{listed}')
    if report.memory is not None:
        words.append(f'memory: {_memory_text(report.memory)}')
    if report.flops is not None:
        words.append(f'compute: {flops_text(report.flops)} in one run')
    return words


def _memory_text(memory: Memory) -> str:
    share = ''
    if memory.capacity:
        used = memory.total / memory.capacity
        percent = f'{used:.0%}' if used >= 0.01 else '<1%'
        share = f', {percent} of {format_bytes(memory.capacity)}'
    listed = ', '.join(f'{name} {text}' for name, text in memory.parts.items())
    return f'{format_bytes(memory.total)}{share}{": " * bool(listed)}{listed}'
