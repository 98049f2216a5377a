"""Changes of programs as text, Markdown for a pull request, and JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .._errors import plural
from .._explain.report_rows import Figures, Tried
from .._text import format_bytes, format_seconds, short_source
from .base import Base
from .compare import Change, Figure, Row
from .config import KINDS

MARK = '<!-- einshard check -->'
MAX_LENGTH = 60_000  # GitHub takes 65,536 characters in a comment
_MAX_ROWS = 20
_MAX_PLACEMENTS = 8
_PLACEMENTS = 'placements that changed'
_NAMES = {
    'bytes': 'sent',
    'memory': 'memory',
    'bound': 'largest bound',
    'exposed': 'exposed (estimate)',
}


def as_text(changes: Sequence[Change]) -> str:
    lines: list[str] = []
    for change in changes:
        lines += [f'{change.step.name} on {change.target}: {_status(change)}']
        lines += [f'  {line}' for line in _details(change)]
    return '\n'.join(lines)


def _status(change: Change) -> str:
    texts = {
        'error': f'error: {change.error}',
        'versions': f'other versions, not compared: {", ".join(change.versions)}',
        'same': 'no change',
    }
    return texts.get(change.status, change.status)


def _details(change: Change) -> list[str]:
    if change.status in ('same', 'error'):
        return []
    placements = _placements(change)
    lines = [f'{_PLACEMENTS}:'] if placements else []
    lines += [f'  {line}' for line in placements]
    lines += [
        f'{_NAMES[figure.kind]}: {_figure(figure)}' for figure in change.figures if _figure(figure)
    ]
    lines += _rows(change)
    lines += [f'new finding: {_finding(finding)}' for finding in change.findings]
    lines += [
        f'fails: {KINDS[kind]} ({kind})' for kind in sorted(change.fails & change.step.fail_on)
    ]
    return lines


def _placements(change: Change) -> list[str]:
    lines = [f"{each.path}: '{each.before}' -> '{each.after}'" for each in change.placements]
    return _first(lines, _MAX_PLACEMENTS)


def _first(lines: list[str], n: int) -> list[str]:
    return lines if len(lines) <= n else [*lines[:n], f'and {len(lines) - n} more']


def _figure(figure: Figure) -> str:
    """Formats '1.0 MiB -> 2.0 MiB (+100%)'."""
    text = format_bytes if figure.kind in ('bytes', 'memory') else format_seconds

    def one(value: float | None) -> str:
        return '' if value is None else text(int(value) if text is format_bytes else value)  # type: ignore[reportArgumentType]

    before, after = one(figure.before), one(figure.after)
    resource = f' {figure.resource}' if figure.resource and after else ''
    if not before or before == after:
        return f'{after}{resource}'
    percent = ''
    if figure.before and figure.after is not None:
        percent = f' ({figure.after / figure.before - 1:+.0%})'
    return f'{before} -> {after or "unknown"}{percent}{resource}'


def _rows(change: Change) -> list[str]:
    counts = Counter(replace(row, name='') for row in change.rows)
    return _first([_row(row, n) for row, n in counts.items()], _MAX_ROWS)


def _row(row: Row, n: int) -> str:
    where = f' along {row.along}' if row.along else ''
    line = f', {_place(row.source)}' if row.source else ''
    sent = f'{format_bytes(row.before)} -> {format_bytes(row.after)}'
    times, each = (f'{n} x ', ' each') if n > 1 else ('', '')
    return f'{times}{row.kind} of {row.of}{where}: {sent}{each}{line}'


def _place(source: str) -> str:
    """A line as git names it, such as 'src/model.py:12'; of installed packages, the file alone."""
    return short_source(source) if Path(source).is_absolute() else source


def _finding(finding: Mapping[str, Any]) -> str:
    line = f'{_place(finding["source"])}: ' if finding['source'] else ''
    suggestion = ''
    if text := finding['suggestion']:
        suggestion = f'. {text[0].upper()}{text[1:]}'
        if tried := finding['tried']:
            on = ' on simulated CPUs' * tried['is_simulated']
            costs: dict[str, Any] = {**tried, 'before': Figures(**tried['before'])}
            suggestion += f'. Tried{on}: {Tried(**costs)}'
    return f'{line}{finding["text"]}{suggestion}'


# --- Markdown -------------------------------------------------------------------------------------


def as_markdown(changes: Sequence[Change], base: Base | None) -> str:
    n = sum(change.status not in ('same', 'versions') for change in changes)
    lines = [MARK, f'### einshard: {n} of {plural(len(changes), "program")} changed', '']
    shown = [change for change in changes if change.status != 'same']
    if shown:
        lines += [
            '| step | target | sent | memory | largest bound | exposed (estimate) |',
            '| --- | --- | --- | --- | --- | --- |',
        ]
        lines += [_table_row(change) for change in shown]
    for change in shown:
        lines += _markdown_details(change)
    lines += ['', _foot(changes, base)]
    return _cut('\n'.join(lines) + '\n')


def _table_row(change: Change) -> str:
    if change.status == 'error':
        cells = [f'error: {change.error.splitlines()[0]}', '', '', '']
    else:
        cells = [_figure(figure) for figure in change.figures]
    return f'| {" | ".join(map(_cell, (change.step.name, change.target, *cells)))} |'


def _markdown_details(change: Change) -> list[str]:
    title = f'**{change.step.name}** on {_cell(change.target)}'
    if change.status == 'error':
        return ['', f'{title} could not be compiled:', '', *_fenced(change.error)]
    if change.status == 'versions':
        versions = _cell(', '.join(change.versions))
        return ['', f'{title}: not compared, as versions differ: {versions}']
    # not a diff, whose colors would say that what a device sends more is good
    lines = _list(f'{title}, {_PLACEMENTS}', _placements(change))
    lines += _list(f'{title}, what a device sends', _rows(change))
    for finding in change.findings:
        lines += ['', f'New: {_cell(_finding(finding))}.']
    if change.after and (patch := change.after.get('patch')):
        # the patch has all suggestions of the program
        suggested = [each for each in change.after['findings'] if each['suggestion']]
        if all(each in change.findings for each in suggested):
            lines += ['', 'As tried:', '', *_fenced(patch.rstrip('\n'), 'diff')]
    for kind in sorted(change.fails & change.step.fail_on):
        lines += ['', f':x: {KINDS[kind]} (`{kind}`)']
    return lines


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return ['', f'{title}:', '', *(f'* {_cell(line)}' for line in lines)] if lines else []


def _foot(changes: Sequence[Change], base: Base | None) -> str:
    report = next((change.after for change in changes if change.after), None)
    versions = ', '.join(
        f'{name} {version}' for name, version in (report or {}).get('versions', {}).items()
    )
    same = [
        f'{change.step.name} on {change.target}' for change in changes if change.status == 'same'
    ]
    parts = [
        f'Compared with {base.commit[:10]}, the merge base.'
        if base
        else 'Compared with the stored reports.'
    ]
    parts += [f'Compiled with {versions}.'] if versions else []
    parts += [f'No change: {", ".join(same)}.'] if same else []
    return f'<sub>{_cell(" ".join(parts))}</sub>'


def _fenced(text: str, language: str = '') -> list[str]:
    fence = '`' * max(3, *(len(run) + 1 for run in re.findall('`+', text)), 3)
    return [f'{fence}{language}', *text.splitlines(), fence]


def _cell(text: str) -> str:
    """Escapes what Markdown and tables would take for their own."""
    return re.sub(r'([|*_<\[\]`])', r'\\\1', text.replace('\n', ' '))


def _cut(text: str) -> str:
    if len(text) <= MAX_LENGTH:
        return text
    note = '\n\n.. cut: einshard check prints the rest\n'
    kept = text[: MAX_LENGTH - len(note) - 8].rpartition('\n')[0]
    is_open = sum(line.startswith('```') for line in kept.splitlines()) % 2
    return f'{kept}{chr(10) + "```" if is_open else ""}{note}'


def as_json(changes: Sequence[Change], base: Base | None) -> dict[str, Any]:
    return {
        'schema': 1,
        'base': base and base.commit,
        'changes': [
            {
                'step': change.step.name,
                'target': change.target,
                'status': change.status,
                'error': change.error,
                'figures': [
                    {'kind': f.kind, 'before': f.before, 'after': f.after} for f in change.figures
                ],
                'collectives': [
                    {k: v for k, v in asdict(row).items() if k != 'name'}
                    | {'source': row.source or None}
                    for row in change.rows
                ],
                'placements': [asdict(each) for each in change.placements],
                'findings': [dict(finding) for finding in change.findings],
                'versions': list(change.versions),
                'fails': sorted(change.fails & change.step.fail_on),
            }
            for change in changes
        ],
    }
