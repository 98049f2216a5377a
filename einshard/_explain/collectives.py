"""The collectives of a report, and their table."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .._display import Display
from .._page import Column, Page, Section
from .._program.hlo.collective import Collective
from .._text import format_bytes, short_arrays, short_source
from .fold_layers import fold_paths

_MAX_ROWS = 40  # in a printed table
_LARGE_FRACTION = 0.01  # rows that send more than this fraction of all bytes show their role


class Collectives(Display, tuple[Collective, ...]):
    """The collectives of a program in execution order. A collective in a loop appears once."""

    __slots__ = ()

    @property
    def counts(self) -> dict[str, int]:
        """The number of collectives by kind. A collective in a loop counts once."""
        return dict(Counter(row.kind for row in self))

    @property
    def network_bytes(self) -> dict[str, int]:
        """Bytes that a device sends in one run, by kind. Custom calls do not count."""
        return self.bytes_by('kind')

    def bytes_by(self, *fields: str) -> dict[Any, int]:
        """Bytes that a device sends in one run, by fields of the rows, most bytes first.

        A field is, for example, 'kind', 'along', 'role' or 'source'. With several, the keys are
        tuples. Custom calls do not count.
        """
        total: Counter[Any] = Counter()
        for row in self:
            if row.network_bytes is not None:
                total[operator.attrgetter(*fields)(row)] += row.total_bytes
        return dict(total.most_common())

    def _page(self) -> Page:
        return Page('', (collective_section(self),))


_COLUMNS = (
    Column('runs', right=True),
    Column('kind'),
    Column('array', shorten='middle'),
    Column('groups'),
    Column('along'),
    Column('sent', right=True),
    Column('line'),
    Column('of', below=True),
    Column('called at', below=True),
)


def collective_section(collectives: Collectives) -> Section:
    """Lists collectives, most bytes first. Collectives that look the same share a row."""
    alike: dict[object, list[Collective]] = {}
    for row in collectives:
        shape = (row.kind, row.arrays, row.group_size, row.groups, row.along, row.runs)
        origin = (row.source, row.column, row.called_at, row.role, row.axes)
        alike.setdefault((shape, origin, row.is_async, row.widened), []).append(row)
    in_order = sorted(alike.values(), key=lambda rows: -_total_bytes(rows))
    threshold = _LARGE_FRACTION * sum(collectives.network_bytes.values())
    columns_of: dict[str | None, set[int]] = {}
    for rows in in_order:
        columns_of.setdefault(rows[0].source, set()).add(rows[0].column)
    shown = [
        _collective_cells(rows, _total_bytes(rows) > threshold, len(columns_of[rows[0].source]) > 1)
        for rows in in_order
    ]
    if not shown:
        return Section('collectives', lines=('none',))
    filled = [any(cells) for cells in zip(*shown, strict=True)]
    kept = [i for i, column in enumerate(_COLUMNS) if filled[i] or not column.below]
    columns = tuple(_COLUMNS[i] for i in kept)
    rows = tuple(tuple(cells[i] for i in kept) for cells in shown)
    # the last of _MAX_ROWS lines shows the bytes of all remaining rows
    rest = f': {format_bytes(sum(map(_total_bytes, in_order[_MAX_ROWS - 1 :])))}'
    return Section('collectives', columns, rows, max_rows=_MAX_ROWS, omitted=rest)


def _collective_cells(
    rows: Sequence[Collective], is_large: bool, has_columns: bool
) -> tuple[str, ...]:
    """`has_columns` shows the column, to tell two operations on one line apart."""
    row = rows[0]
    column = f':{row.column}' if has_columns and row.column and row.source else ''
    return (
        str(len(rows)) if row.runs == '1' else f'{len(rows)} x {row.runs}',
        f'{row.kind}{" (async)" * row.is_async}{" (f32)" * row.widened}',
        short_arrays(row.arrays),
        f'{row.groups} of {row.group_size}' if row.groups else '?',
        row.along,
        '?' if row.network_bytes is None else format_bytes(_total_bytes(rows)),
        f'{short_source(row.source)}{column}',
        payload_text(rows, is_large),
        short_source(row.called_at),
    )


def payload_text(rows: Sequence[Collective], is_large: bool) -> str:
    """Formats what the collectives of a row send: 'params/0-3/{q,k}', or 'activations b s d'.

    If neither paths nor axes are known, a large row shows only its role, and a small row nothing.
    """
    # 'result', the path of a function's only result, is not worth showing
    folded = ', '.join(fold_paths(path for row in rows for path in row.of if path != 'result'))
    row = rows[0]
    if folded:
        return f'{folded} (gradients)' if row.role == 'gradients' else folded
    if not row.axes and not is_large:
        return ''
    axes = f' {row.axes}' if row.axes else ''
    n, n_backward = len(rows), sum(row.is_backward for row in rows)
    if n_backward == n:
        return f'{row.role}{axes} (backward)'
    return f'{row.role}{axes}{f" ({n_backward} of {n} backward)" if n_backward else ""}'


def _total_bytes(rows: Sequence[Collective]) -> int:
    return sum(row.total_bytes for row in rows)
