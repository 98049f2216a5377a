"""benchmarks/results/*.json -> docs/performance.md: `python -m benchmarks page`."""

from __future__ import annotations

import ast
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._plot import scaling_svg
from ._schema import Environment, Report, Result, Row, check
from ._table import HEADINGS, cells, figure_text, quartiles, ratio_text

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / 'results', HERE.parent / 'docs' / 'performance.md'

INTRODUCTION = """\
<!-- Written by `python -m benchmarks page` from benchmarks/results; edit neither. -->

# Performance

What does einshard cost, against the JAX that one would write by hand? A figure on its own says as
much about a machine, and about what else ran on it, as about code. So whatever takes time was
measured in pairs: einshard and what it is compared with took turns in one process, each round gave
a ratio, and the median of the ratios is the result, with its quartiles for the spread. Below 1
einshard is faster. Where a program is compiled and not run, the figures are counts, and exact.
"""
REPEAT = """\
## How to repeat

In a clone of the repository, on a laptop as on a slice of TPUs:

```
make bench                               # everything short, under five minutes on two cores
python -m benchmarks                     # the list of the benchmarks
python -m benchmarks layouts --json layouts.json
python -m benchmarks tpu --topology v5e:16x16 --topology '2*v5e:4x4'
make bench-page                          # everything, and this page from it
```

Accelerators are used where there are any, else eight simulated devices; `--devices` says how many.
On several hosts start it in each, with `--distributed`.
"""


class Measured(NamedTuple):
    environment: Environment
    result: Result


def write_page() -> None:
    PAGE.write_text(page_of(read_results()), encoding='utf-8')


def read_results() -> list[Report]:
    reports: list[Report] = []
    for path in sorted(RESULTS.glob('*.json')):
        report = json.loads(path.read_text(encoding='utf-8'))
        check(report, where=path.name)
        reports.append(report)
    return reports


def page_of(reports: Sequence[Report]) -> str:
    by_name: dict[str, list[Measured]] = {}
    for report in reports:
        for result in report['benchmarks']:
            if result['tiny']:
                raise ValueError(f'{result["name"]} was only tried: its figures mean nothing')
            by_name.setdefault(result['name'], []).append(Measured(report['environment'], result))
    parts = [INTRODUCTION, machines([report['environment'] for report in reports]), REPEAT]
    parts.append(targets([measured for both in by_name.values() for measured in both]))
    for name, measured in by_name.items():
        parts += [f'## {name}', about(name)]
        for environment, result in measured:
            if len(measured) > 1:
                parts.append(f'### {machine(environment)}')
            parts += tables(result)
    return '\n\n'.join(part.strip() for part in parts) + '\n'


def machines(environments: Sequence[Environment]) -> str:
    rows = [
        (
            machine(env),
            env['system'],
            str(env['cores']),
            env['einshard'],
            env['jax'],
            env['libtpu'] or '',
            env['python'],
            env['date'],
        )
        for env in environments
    ]
    head = ('devices', 'system', 'cores', 'einshard', 'JAX', 'libtpu', 'Python', 'date')
    return '## On what\n\n' + markdown(head, rows)


def machine(environment: Environment) -> str:
    kind = environment['device_kind']
    devices = f'{environment["device_count"]} x {"simulated" if kind == "cpu" else kind}'
    n = environment['process_count']
    return devices if n == 1 else f'{devices} in {n} processes'


def targets(measured: Sequence[Measured]) -> str:
    counts: list[tuple[str, ...]] = []
    missed: list[tuple[str, ...]] = []
    for environment, result in measured:
        judged = [row for row in result['rows'] if row['met'] is not None]
        if judged:
            n_met = sum(row['met'] is True for row in judged)
            where = machine(environment)
            counts.append((result['name'], where, str(len(judged)), str(n_met)))
            missed += [
                (result['name'], where, *(cells(row)[i] for i in (0, 1, 4, 5, 6)))
                for row in judged
                if not row['met']
            ]
    text = (
        '## Targets\n\nWhat einshard sets itself, judged by the median: of the ratio, or of the '
        'figure where the\ntarget has a unit.\n\n'
        + markdown(('benchmark', 'devices', 'targets', 'met'), counts)
    )
    if missed:
        head = ('benchmark', 'devices', 'not met', 'figure', 'ratio', 'quartiles', 'target')
        return f'{text}\n\n{markdown(head, missed)}'
    return f'{text}\n\nAll of them are met.'


def about(name: str) -> str:
    """The docstring of the benchmark: what is measured, and what the figures mean."""
    from .__main__ import MODULES

    path = HERE / (MODULES[name].rpartition('.')[2] + '.py')
    text = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    first, _, rest = text.partition('\n')
    return f'{first[:1].upper()}{first[1:]}.\n\n{rest.strip()}'


def tables(result: Result) -> Iterator[str]:
    rows = result['rows']
    if all('measure' in row['parameters'] for row in rows):
        groups: dict[str, list[Row]] = {}
        others = {row['parameters']['case']: row['compared_with'] for row in reversed(rows)}
        for row in rows:
            groups.setdefault(str(others[row['parameters']['case']]), []).append(row)
        for compared_with, group in groups.items():
            yield by_case(group, compared_with)
    elif rows:
        yield markdown([heading or 'met' for heading in HEADINGS], [cells(row) for row in rows])
    if any('problem' in row['parameters'] for row in rows):
        yield scaling_svg(rows)
    if result['left_out']:
        yield 'Left out:\n\n' + '\n'.join(f'* {text}' for text in result['left_out'])


def by_case(rows: Sequence[Row], compared_with: str) -> str:
    """A line for each case, a column for each measure."""
    measures = list(dict.fromkeys(str(row['parameters']['measure']) for row in rows))
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        case, measure = (str(row['parameters'][name]) for name in ('case', 'measure'))
        table.setdefault(case, {})[measure] = cell(row)
    lines = [[case, *(texts.get(m, '') for m in measures)] for case, texts in table.items()]
    text = markdown(['case', *measures], lines)
    others = {row['parameters']['measure']: row['compared_with'] for row in rows}
    beside = [f'; of {m}, to: {o}' for m, o in others.items() if o not in (None, compared_with)]
    return (
        f'In brackets the ratio, and its quartiles, to: {compared_with}{"".join(beside)}.\n\n{text}'
    )


def cell(row: Row) -> str:
    text = figure_text(row)
    if row['ratio'] is None or row['unit'] == 'collectives':
        return text
    spread = f', {quartiles(row["ratio"])}' if row['rounds'] > 1 else ''
    return f'{text} ({ratio_text(row["ratio"]["median"])}{spread})'


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(
        '| ' + ' | '.join(text.replace('|', '\\|').replace('*', '\\*') for text in line) + ' |'
        for line in lines
    )
