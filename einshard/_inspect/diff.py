"""The difference between two reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._errors import shown
from .._text import flops_text, format_bytes, short_arrays
from .fold_layers import fold
from .report_rows import ArrayRow, CollectiveRow


@dataclass(frozen=True)
class Diff:
    """What changed between two reports, made by `Report.diff`.

    Attributes:
        arrays: (path, before, after) of changed arguments and results, each with its placement:
            "float32[8,4] 'a b -> a8 b'"; None if the array is missing.
        collectives: (collective, executions before, executions after).
        numbers: (name, before, after) of bytes and flops whose printed values differ.
    """

    arrays: tuple[tuple[str, str | None, str | None], ...]
    collectives: tuple[tuple[str, int, int], ...]
    numbers: tuple[tuple[str, int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.arrays or self.collectives or self.numbers)

    def __str__(self) -> str:
        return '\n'.join(map(shown, self._lines())) or 'no difference'

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
            ratio = f' (x {after / before:.3g})' if before and after else ''
            yield f'  {name}: {_shown(name, before)} => {_shown(name, after)}{ratio}'


@dataclass(frozen=True)
class Compared:
    """What is compared of a report."""

    arrays: Sequence[ArrayRow]
    collectives: Sequence[CollectiveRow]
    numbers: Mapping[str, int]  # bytes, and flops under that name


def make_diff(before: Compared, after: Compared) -> Diff:
    """What changed from `before` to `after`."""
    old, new = _arrays(before.arrays), _arrays(after.arrays)
    paths = list(dict.fromkeys([*old, *new]))
    ours, theirs = _collectives(before.collectives), _collectives(after.collectives)
    kinds = list(dict.fromkeys([*ours, *theirs]))
    return Diff(
        arrays=tuple((p, old.get(p), new.get(p)) for p in paths if old.get(p) != new.get(p)),
        collectives=tuple((k, ours[k], theirs[k]) for k in kinds if ours[k] != theirs[k]),
        numbers=tuple(
            (name, number, after.numbers[name])
            for name, number in before.numbers.items()
            if _shown(name, number) != _shown(name, after.numbers[name])
        ),
    )


def _shown(name: str, number: int) -> str:
    return flops_text(number) if name == 'flops' else format_bytes(number)


def _arrays(rows: Sequence[ArrayRow]) -> Mapping[str, str]:
    return {row.path: f"{row.array} '{row.placement}'" for row in rows}


def _collectives(rows: Sequence[CollectiveRow]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows:
        along = f' along {row.along}' if row.along else ''
        what = f'{row.kind} {short_arrays(row.arrays)}, {row.groups} of {row.group_size}{along}'
        found[what] += 1 if row.executions is None else row.executions
    return found
