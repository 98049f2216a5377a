"""The difference between two reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._errors import plural, printable
from .._program.hlo.collective import Collective
from .._text import format_bytes, format_flops, short_arrays, short_source
from .fold_layers import fold
from .report_rows import ArrayRow

_MAX_ROWS = 20


@dataclass(frozen=True)
class Diff:
    """The differences between two reports, made by `Report.diff`.

    Attributes:
        arrays: (path, before, after) for each changed argument or result. Before and after are
            texts such as "float32[8,4] 'a b -> a8 b'", or None if the report has no such array.
        collectives: (text, executions before, executions after) for each collective whose number of
            executions changed, the largest change in bytes first. Executions are 0 if the report
            has no such collective, and None if a loop has an unknown trip count.
        numbers: (name, before, after) for each total of bytes or flops that prints differently.
        details: (increase in bytes, source lines) for each entry of `collectives`. The bytes are
            those that a device sends in one run. The lines come from the later report, or from the
            earlier one if the collective no longer runs.
    """

    arrays: tuple[tuple[str, str | None, str | None], ...]
    collectives: tuple[tuple[str, int | None, int | None], ...]
    numbers: tuple[tuple[str, int, int], ...]
    details: tuple[tuple[int, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Converts the differences to dictionaries, lists, strings and numbers, for JSON."""
        details = self.details or ((0, ''),) * len(self.collectives)
        collectives = zip(self.collectives, details, strict=True)
        keys = 'text', 'before', 'after', 'bytes', 'lines'
        return {
            'schema': 1,
            'arrays': [
                dict(zip(('path', 'before', 'after'), row, strict=True)) for row in self.arrays
            ],
            'collectives': [
                dict(zip(keys, (*row, *detail), strict=True)) for row, detail in collectives
            ],
            'numbers': [
                dict(zip(('name', 'before', 'after'), row, strict=True)) for row in self.numbers
            ],
        }

    def __bool__(self) -> bool:
        return bool(self.arrays or self.collectives or self.numbers)

    def __str__(self) -> str:
        return '\n'.join(map(printable, self._lines())) or 'no difference'

    def __repr__(self) -> str:
        return str(self)

    def _lines(self) -> Iterator[str]:
        changes = [(before, after) for _, before, after in self.arrays]
        folded = fold([path for path, _, _ in self.arrays], changes)
        for path, indices in folded[:_MAX_ROWS]:
            before, after = changes[indices[0]]
            yield f'  {path}: {before or "none"}  =>  {after or "none"}'
        if len(folded) > _MAX_ROWS:
            yield f'  .. and {plural(len(folded) - _MAX_ROWS, "other change")} of placements'
        for (text, before, after), (sent, lines) in zip(
            self.collectives[:_MAX_ROWS], self.details, strict=False
        ):
            sign = '+' if before == 0 else '-' if after == 0 else ' '
            counts = ['?' if n is None else str(n) for n in (before, after) if n != 0]
            notes = [f'{"+" if sent > 0 else "-"}{format_bytes(abs(sent))}'] if sent else []
            notes += [f'at {lines}'] if lines else []
            in_brackets = f' ({", ".join(notes)})' if notes else ''
            yield f'{sign} {text}: {" => ".join(counts)}{in_brackets}'
        if len(self.collectives) > _MAX_ROWS:
            others = self.details[_MAX_ROWS:]
            more = sum(sent for sent, _ in others if sent > 0)
            less = -sum(sent for sent, _ in others if sent < 0)
            yield (
                f'  .. and {plural(len(others), "other collective")}: '
                f'+{format_bytes(more)}, -{format_bytes(less)}'
            )
        for name, before, after in self.numbers:
            ratio = f' (x {after / before:.3g})' if before and after else ''
            texts = _format_number(name, before), _format_number(name, after)
            yield f'  {name}: {" => ".join(texts)}{ratio}'


@dataclass(frozen=True)
class DiffInput:
    """The parts of a report that `make_diff` compares."""

    arguments: Sequence[ArrayRow]
    results: Sequence[ArrayRow]
    collectives: Sequence[Collective]
    numbers: Mapping[str, int]  # bytes by name, and 'flops'


def make_diff(before: DiffInput, after: DiffInput) -> Diff:
    old, new = _placements(before), _placements(after)
    keys = list(dict.fromkeys([*old, *new]))
    old_totals, new_totals = _totals(before.collectives), _totals(after.collectives)
    texts = dict.fromkeys([*old_totals, *new_totals])
    totals = [(text, old_totals.get(text, _ZERO), new_totals.get(text, _ZERO)) for text in texts]
    changed = [(text, a, b) for text, a, b in totals if a.executions != b.executions]
    changed.sort(key=lambda change: -abs(change[2].sent - change[1].sent))
    return Diff(
        arrays=tuple(
            (key.path, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)
        ),
        collectives=tuple((text, a.executions, b.executions) for text, a, b in changed),
        details=tuple((b.sent - a.sent, _lines_text(b.lines or a.lines)) for _, a, b in changed),
        numbers=tuple(
            (name, number, after.numbers[name])
            for name, number in before.numbers.items()
            if _format_number(name, number) != _format_number(name, after.numbers[name])
        ),
    )


def _lines_text(lines: Sequence[str | None]) -> str:
    return ', '.join(dict.fromkeys(filter(None, map(short_source, lines))))


def _format_number(name: str, number: int) -> str:
    return format_flops(number) if name == 'flops' else format_bytes(number)


class _Key(NamedTuple):
    """Identifies an array. An argument may be called 'result', and paths may repeat.

    Attributes:
        n_before: the number of arguments, or of results, with the same path before this one.
    """

    is_result: bool
    path: str
    n_before: int


def _placements(report: DiffInput) -> Mapping[_Key, str]:
    counts: Counter[tuple[bool, str]] = Counter()
    placements: dict[_Key, str] = {}
    for is_result, rows in ((False, report.arguments), (True, report.results)):
        for row in rows:
            key = _Key(is_result, row.path, counts[is_result, row.path])
            counts[is_result, row.path] += 1
            placements[key] = f"{row.array} '{row.placement}'"
    return placements


class _Totals(NamedTuple):
    """Totals of all collectives with the same text in `Diff.collectives`."""

    executions: int | None  # None if a loop has an unknown trip count
    sent: int  # bytes that a device sends in one run
    lines: tuple[str | None, ...]


_ZERO = _Totals(0, 0, ())


def _totals(rows: Sequence[Collective]) -> dict[str, _Totals]:
    """Returns totals by text, such as 'all-reduce f32[8,4], 2 of 4 along tp'."""
    totals: dict[str, _Totals] = {}
    for row in rows:
        along = f' along {row.along}' if row.along else ''
        text = (
            f'{row.kind} {short_arrays(row.arrays)}, {row.groups or "?"} of {row.group_size}{along}'
        )
        so_far = totals.get(text, _ZERO)
        totals[text] = _Totals(
            so_far.executions + row.executions
            if row.is_exact and so_far.executions is not None
            else None,
            so_far.sent + row.total_bytes,
            (*so_far.lines, row.source),
        )
    return totals
