"""Compares the report of a program with that of an earlier version, both as dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

from .._explain.fold_layers import fold, fold_paths
from .._program.hlo.memory import Memory
from .config import KINDS, Step

ReportDict: TypeAlias = Mapping[str, Any]
Collective: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure of a program; None where it is unknown.

    Attributes:
        kind: 'bytes', 'memory', 'bound' or 'exposed'.
    """

    kind: str
    before: float | None
    after: float | None
    resource: str = ''  # of the largest bound

    def grows(self, threshold: float) -> bool:
        if self.before is None or self.after is None:
            return False
        return self.after - self.before > threshold * self.before


@dataclass(frozen=True)
class Row:
    """Collectives of one kind, of the same arrays and in one function, and what a device sends."""

    kind: str
    of: str
    along: str
    source: str
    before: int
    after: int
    name: str = ''  # of the collective in the later program


@dataclass(frozen=True)
class Placed:
    """Another placement of arguments or results, whose paths are folded."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Change:
    """What has become of one step for one target.

    Attributes:
        before, after: the reports; None if there is none.
        error: why a report could not be made; '' if it could.
        figures, rows, placements: what is compared. Without `before`, or if other versions made
            it, no rows and no placements.
        findings: those that the earlier program lacks.
        versions: those that differ, such as 'jax 0.10.2 -> 0.12.0'.
        fails: the kinds of `fail_on` that hold, as in `KINDS`.
    """

    step: Step
    target: str
    before: ReportDict | None
    after: ReportDict | None
    error: str = ''
    figures: Sequence[Figure] = ()
    rows: Sequence[Row] = ()
    findings: Sequence[Mapping[str, Any]] = ()
    versions: Sequence[str] = ()
    fails: frozenset[str] = frozenset()
    placements: Sequence[Placed] = ()

    @property
    def status(self) -> str:
        if self.error:
            return 'error'
        if self.before is None:
            return 'new'
        if self.versions:
            return 'versions'
        return 'changed' if self.is_changed else 'same'

    @property
    def is_changed(self) -> bool:
        return bool(
            self.rows or self.findings or self.fails & {'bytes', 'memory', 'bound', 'exposed'}
        )


def compare(
    step: Step,
    target: str,
    before: ReportDict | None,
    after: ReportDict,
    threshold: float,
    new_line: Callable[[str], str] = lambda source: source,
) -> Change:
    """Compares two reports.

    Args:
        threshold: the growth that counts, as a fraction.
        new_line: returns where a line of the earlier source is now.
    """
    resource = {'bound': _resource(after)}
    figures = tuple(
        Figure(kind, read(before) if before else None, read(after), resource.get(kind, ''))
        for kind, read in _FIGURES.items()
    )
    fails = {'does-not-fit'} if does_not_fit(after) else set[str]()
    change = Change(step, target, before, after, figures=figures)
    if before is None:
        return replace(change, fails=frozenset({*fails, 'missing'}))
    if versions := _other_versions(before, after):
        return replace(change, versions=versions, fails=frozenset({*fails, 'versions'}))
    fails |= {figure.kind for figure in figures if figure.grows(threshold)}
    findings = _new_findings(before, after)
    fails |= {'findings'} if findings else set()
    assert fails <= KINDS.keys()
    return replace(
        change,
        rows=_changed_rows(before, after, threshold, new_line),
        findings=findings,
        fails=frozenset(fails),
        placements=_changed_placements(before, after),
    )


def with_suggestions(change: Change, after: ReportDict) -> Change:
    """Adds the findings with suggestions, of a later report, about what has changed.

    The earlier program was not searched for suggestions, so others are not new.
    """
    grown = [row for row in change.rows if row.after > row.before]
    about = {row.name for row in grown}
    about.update(name for finding in change.findings for name in finding['explains'])

    def is_about(finding: Mapping[str, Any]) -> bool:
        # simulated CPUs, on which changes are tried, have other collectives at the same lines
        at_line = (row for row in grown if row.source == finding['source'])
        is_near = any(f'along {row.along} ' in finding['text'] for row in at_line)
        return is_near or not about.isdisjoint(finding['explains'])

    found = [finding for finding in after['findings'] if is_about(finding)]
    explained = {name for finding in found for name in finding['explains']}
    left = [each for each in change.findings if explained.isdisjoint(each['explains'])]
    findings = (*found, *left)
    fails = change.fails | ({'findings'} if findings else set())
    return replace(change, after=after, findings=findings, fails=fails)


def does_not_fit(report: ReportDict) -> bool:
    memory = report.get('memory')
    return bool(memory and memory['capacity'] and _memory(report) > memory['capacity'])


# --- figures --------------------------------------------------------------------------------------


def _memory(report: ReportDict) -> float | None:
    memory = report.get('memory')
    if not memory:
        return None
    return Memory(**memory).total


def _resource(report: ReportDict) -> str:
    largest = max(report['bounds'], key=lambda bound: bound['seconds'], default=None)
    return '' if largest is None else f'{largest["resource"]} {largest["along"]}'.strip()


def _exposed(report: ReportDict) -> float | None:
    timeline = report.get('timeline')
    return timeline and timeline['totals']['exposed']


_FIGURES: Mapping[str, Callable[[ReportDict], float | None]] = {
    'bytes': lambda report: report['network_bytes'],
    'memory': _memory,
    'bound': lambda report: max((b['seconds'] for b in report['bounds']), default=None),
    'exposed': _exposed,
}


def _other_versions(before: ReportDict, after: ReportDict) -> Sequence[str]:
    old, new = before.get('versions', {}), after['versions']
    names = dict.fromkeys([*old, *new])
    return tuple(
        f'{name} {old.get(name, "none")} -> {new.get(name, "none")}'
        for name in names
        if old.get(name) != new.get(name) and name != 'python'
    )


# --- findings -------------------------------------------------------------------------------------


def _new_findings(before: ReportDict, after: ReportDict) -> tuple[Mapping[str, Any], ...]:
    """Returns the findings that differ from all earlier ones in kind, arrays or function."""
    known = [_key_of_finding(before, each) for each in before['findings']]
    new: list[Mapping[str, Any]] = []
    for finding in after['findings']:
        key = _key_of_finding(after, finding)
        if key in known:
            known.remove(key)
        else:
            new.append(finding)
    return tuple(new)


def _key_of_finding(report: ReportDict, finding: Mapping[str, Any]) -> object:
    """The kind, arrays and function of a finding."""
    rows = {row['name']: row for row in report['collectives']}
    arrays: set[str] = set()
    for name in finding['explains']:
        row = rows.get(name)
        # source lines of products are no arrays, and lines move
        found = [name] if ':' not in name else []
        arrays |= {*(row['of'] or [row['arrays']])} if row else {*found}
    return finding['kind'], frozenset(arrays), _function(report, finding['source'])


def _function(report: ReportDict, source: str | None) -> str:
    """The file and function of a source line."""
    file = (source or '').rpartition(':')[0]
    return f'{file}:{report.get("functions", {}).get(source, "")}'


# --- placements -----------------------------------------------------------------------------------


def _changed_placements(before: ReportDict, after: ReportDict) -> tuple[Placed, ...]:
    old, new = (
        {
            (part, row['path']): row['placement']
            for part in ('arguments', 'results')
            for row in report[part]
        }
        for report in (before, after)
    )
    changed = {
        key: (old[key], placement)
        for key, placement in new.items()
        if key in old and _partition(old[key]) != _partition(placement)
    }
    changes = [*changed.values()]
    folded = fold([path for _, path in changed], changes, few=1)
    return tuple(Placed(path, *changes[indices[0]]) for path, indices in folded)


def _partition(placement: str) -> str | list[str]:
    """How each dimension is sharded, such as ['@data', ''], without the names of axes."""
    names, arrow, terms = placement.partition(' -> ')
    pairs = zip_longest(names.split(), terms.split(), fillvalue='')
    return [term.removeprefix(name) for name, term in pairs] if arrow else placement


# --- collectives ----------------------------------------------------------------------------------

_MAX_PATHS = 100  # characters


def _payload(row: Collective) -> str:
    """Formats what a collective sends, as tables of reports do."""
    folded = ', '.join(fold_paths(path for path in row['of'] if path != 'result'))
    if len(folded) > _MAX_PATHS:
        folded = f'{folded[:_MAX_PATHS]}..'
    if folded:
        return f'{folded} (gradients)' if row['role'] == 'gradients' else folded
    return f'{row["role"]} {row["axes"]}'.strip() or row['arrays']


_Pair: TypeAlias = tuple[Collective | None, Collective | None]


def _changed_rows(
    before: ReportDict, after: ReportDict, threshold: float, new_line: Callable[[str], str]
) -> tuple[Row, ...]:
    """Returns the collectives whose bytes change by a fraction of those of the step."""
    least = threshold * max(before['network_bytes'], after['network_bytes'])
    rows: list[Row] = []
    for one, other in _pairs(before, after, new_line):
        a, b = (each['network_bytes'] * each['executions'] if each else 0 for each in (one, other))
        if abs(b - a) > least:
            shown = other or one
            assert shown is not None
            name = other['name'] if other else ''
            place = shown['along'], shown['source'] or ''
            rows.append(Row(shown['kind'], _payload(shown), *place, a, b, name))
    return tuple(sorted(rows, key=lambda row: -abs(row.after - row.before)))


def _pairs(before: ReportDict, after: ReportDict, new_line: Callable[[str], str]) -> list[_Pair]:
    """Pairs the collectives of both programs.

    By kind, arrays, mesh axes and function, those of one line first, and then in order. What is
    left, by what it sends, as other shardings change the shapes of arrays, and then combined
    collectives by role, as the compiler may combine others.
    """

    def strict(report: ReportDict, row: Collective) -> object:
        return row['kind'], row['arrays'], row['along'], _function(report, row['source'])

    def loose(report: ReportDict, row: Collective) -> object:
        sent = tuple(row['of']), row['role'], row['axes']
        return row['kind'], sent, row['along'], _function(report, row['source'])

    old, new, pairs = [*before['collectives']], [*after['collectives']], list[_Pair]()

    def pair_by(is_same: Callable[[Collective, Collective], bool]) -> None:
        for row in [*old]:
            other = next((each for each in new if is_same(row, each)), None)
            if other is not None:
                old.remove(row)
                new.remove(other)
                pairs.append((row, other))

    def combined(report: ReportDict, row: Collective) -> object:
        return (row['kind'], row['role'], row['along']) if len(row['of']) > 1 else id(row)

    for key in (strict, loose, combined):
        keys = {id(row): key(before, row) for row in old}
        keys |= {id(row): key(after, row) for row in new}
        pair_by(
            lambda a, b, keys=keys: (
                keys[id(a)] == keys[id(b)] and new_line(a['source'] or '') == (b['source'] or '')
            )
        )
        pair_by(lambda a, b, keys=keys: keys[id(a)] == keys[id(b)])
    return [*pairs, *((row, None) for row in old), *((None, row) for row in new)]
