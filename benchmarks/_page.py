"""benchmarks/results/*.json -> docs/performance.md: `python -m benchmarks page`."""

from __future__ import annotations

import ast
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._plot import scaling_svg
from ._schema import Environment, Report, Result, Row, check
from ._table import cells, columns, figure_text, legend, quantity, quartiles, ratio_text

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
# The rows that answer most questions: benchmark, name of the row, what it is in words.
MAIN = (
    (
        'programs',
        r'transformer, training step: differences',
        'Lines in which a compiled training step of a transformer is another than by hand',
    ),
    ('tpu', r'(.*), transformer, training step: differences', 'The same, compiled for {0}'),
    ('programs', r'transformer, training step: time', 'That training step'),
    ('programs', r'transformer, training step: compile time', 'Tracing and compiling it'),
    ('dispatch', r'one argument, 1 device', 'A call of a `sharded` function, one device'),
    ('dispatch', r'one argument, (\d+ devices)', 'The same, {0}'),
    (
        'dispatch',
        r'a function of the path, (\d+) leaves, 1 device',
        'A call with {0} arrays, one device',
    ),
    ('placement', r'array placed already', '`einshard` of an array that is there already'),
    ('placement', r'tree of (1,000|10,000) jax leaves', '`einshard` of {0} arrays'),
    ('memory', r'numpy tree of (.*): peak of host', 'Memory of the host at most, placing {0}'),
    ('expressions', r'make_sharding, cached', 'The sharding of an expression met before'),
    ('expressions', r'make_sharding, a new expression, (9,216 devices)', 'Of a new one, {0}'),
    (
        'rules',
        r'([\d,]+) leaves, the first time, (4,096 devices)',
        'Shardings of {0} arrays by their paths, {1}',
    ),
    ('import', r'import einshard, after import jax', '`import einshard`'),
)
LONG = 12  # lines; a longer table is folded
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


READING = """\
## How to read the tables

* *figure*: what einshard takes; *its figure*: what stands beside it takes, as is said above each
  table; both are medians. Where there are several such things, *beside* has the letter of one.
* *ratio*: of the two, round by round; 1/20 where einshard is twenty times faster. *quartiles*: half
  of the rounds gave a ratio between these. Where they lie on both sides of 1, no difference was
  seen.
* *target*: what einshard sets itself for the median of the ratio or, where the target has a unit,
  of the figure.
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
    every = [measured for both in by_name.values() for measured in both]
    parts = [INTRODUCTION, in_short(every), targets(every)]
    parts += [machines([report['environment'] for report in reports]), REPEAT, READING]
    for name, measured in by_name.items():
        parts += [f'## {name}', about(name)]
        for environment, result in measured:
            if len(measured) > 1:
                parts.append(f'### {machine(environment)}')
            parts += tables(result)
    return '\n\n'.join(part.strip() for part in parts) + '\n'


def in_short(every: Sequence[Measured]) -> str:
    """The rows of MAIN; where there are several machines, of each."""
    where = {machine(environment) for environment, _ in every}
    lines: list[list[str]] = []
    for name, pattern, words in MAIN:
        for environment, result in every:
            found = {}  # by name: the first of a name is beside what is hardest to beat
            for row in result['rows'] if result['name'] == name else ():
                if match := re.fullmatch(pattern, row['name']):
                    found.setdefault(row['name'], (row, words.format(*match.groups())))
            for row, text in found.values():
                on = [machine(environment)] if len(where) > 1 else []
                lines.append([text, *on, *short(row)])
    head = ['', *(['devices'] if len(where) > 1 else []), 'einshard', 'compared with', 'ratio']
    return f'## In short\n\n{markdown(head, lines)}'


def short(row: Row) -> list[str]:
    """The figure, what it is compared with, and the ratio."""
    if row['ratio'] is None or row['other'] is None:
        return [figure_text(row), '', '']
    other = quantity(row['other']['median'], row['unit'])
    ratio = ratio_text(row['ratio']['median'])
    if row['rounds'] > 1:
        ratio += f' ({quartiles(row["ratio"])})'
    return [figure_text(row), f'{other}, {row["compared_with"]}', ratio]


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
    several = len({machine(environment) for environment, _ in measured}) > 1
    n_judged = n_met = 0
    missed: list[tuple[str, ...]] = []
    for environment, result in measured:
        judged = [row for row in result['rows'] if row['met'] is not None]
        n_judged += len(judged)
        n_met += sum(row['met'] is True for row in judged)
        where = [machine(environment)] if several else []
        missed += [
            (result['name'], *where, *(cells(row, '')[i] for i in (0, 1, 4, 5, 6)))
            for row in judged
            if not row['met']
        ]
    text = f'## Targets\n\nEinshard sets itself a target for {n_judged} of the figures'
    if not missed:
        return f'{text}. All of them are met.'
    on = ['devices'] if several else []
    head = ['benchmark', *on, 'not met', 'figure', 'ratio', 'quartiles', 'target']
    return f'{text}, and meets {n_met}.\n\n{markdown(head, missed)}'


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
        yield '\n'.join(f'* {text}' for text in legend(rows))
        yield folded(*columns(rows))
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
    text = folded(['case', *measures], lines)
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


def folded(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table, behind a line to click on where it is long."""
    text = markdown(head, rows)
    if len(rows) <= LONG:
        return text
    return f'<details>\n<summary>{len(rows)} rows</summary>\n\n{text}\n\n</details>'


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(
        '| ' + ' | '.join(text.replace('|', '\\|').replace('*', '\\*') for text in line) + ' |'
        for line in lines
    )
