"""Two reports -> what is otherwise in the second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._words import amount, short_arrays
from .fold import fold
from .page import flops_text
from .rows import ArrayRow, CollectiveRow

if TYPE_CHECKING:
    from .report import Report


@dataclass(frozen=True)
class Diff:
    """What is otherwise in the second of two reports; printed, it is text.

    Attributes:
        arrays: (path, before, after) of arguments and results that differ, each with its
            placement: "float32[8,4] 'a b -> a8 b'"; None where there is no such array.
        collectives: (collective, how often before, how often after), with loops. A collective is
            its kind, its arrays and what it is along.
        numbers: (name, before, after) of bytes and flops that differ in the digits shown.
    """

    arrays: tuple[tuple[str, str | None, str | None], ...]
    collectives: tuple[tuple[str, int, int], ...]
    numbers: tuple[tuple[str, int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.arrays or self.collectives or self.numbers)

    def __str__(self) -> str:
        return '\n'.join(self._lines()) or 'no difference'

    def __repr__(self) -> str:
        return str(self)

    def _lines(self) -> Iterator[str]:
        changes = [(before, after) for _, before, after in self.arrays]
        for path, numbers in fold([path for path, _, _ in self.arrays], changes):
            before, after = changes[numbers[0]]
            yield f'  {path}: {before or "none"}  =>  {after or "none"}'
        for what, before, after in self.collectives:
            sign = '+' if not before else '-' if not after else ' '
            runs = f'{before} => {after}' if before and after else f'{before or after}'
            yield f'{sign} {what}: {runs}'
        for name, before, after in self.numbers:
            times = f' (x {after / before:.3g})' if before and after else ''
            yield f'  {name}: {_shown(name, before)} => {_shown(name, after)}{times}'


def make_diff(before: Report, after: Report) -> Diff:
    """What is otherwise in `after`."""
    old, new = _arrays(before), _arrays(after)
    paths = list(dict.fromkeys([*old, *new]))
    ours, theirs = _collectives(before.collectives), _collectives(after.collectives)
    kinds = list(dict.fromkeys([*ours, *theirs]))
    numbers, others = _numbers(before), _numbers(after)
    return Diff(
        arrays=tuple((p, old.get(p), new.get(p)) for p in paths if old.get(p) != new.get(p)),
        collectives=tuple((k, ours[k], theirs[k]) for k in kinds if ours[k] != theirs[k]),
        numbers=tuple(
            (name, number, others[name])
            for name, number in numbers.items()
            if _shown(name, number) != _shown(name, others[name])
        ),
    )


def _shown(name: str, number: int) -> str:
    return flops_text(number) if name == 'flops' else amount(number)


def _arrays(report: Report) -> Mapping[str, str]:
    rows: Sequence[ArrayRow] = (*report.arguments, *report.results)
    return {row.path: f"{row.array} '{row.placement}'" for row in rows}


def _collectives(rows: Sequence[CollectiveRow]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows:
        along = f' along {row.along}' if row.along else ''
        what = f'{row.kind} {short_arrays(row.arrays)}, {row.groups} of {row.parties}{along}'
        found[what] += 1 if row.times is None else row.times
    return found


def _numbers(report: Report) -> dict[str, int]:
    memory = report.memory
    return {
        'sent in one run': report.network_bytes,
        'memory': memory.total if memory else 0,
        'temporaries': memory.temporaries if memory else 0,
        'flops': int(report.flops or 0),
    }
