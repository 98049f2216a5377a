"""benchmarks/results/*.json -> docs/performance.md: `python -m benchmarks page`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from ._headlines import headline_rows
from ._list import MODULES, about
from ._report import Report, Row, machine
from ._table import (
    detail_text,
    judged_text,
    met_text,
    other_text,
    quantity,
    ratio_text,
    target_text,
    words_of_ratio,
)

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / 'results', HERE.parent / 'docs' / 'performance.md'

INTRODUCTION = """\
<!-- Written by `python -m benchmarks page` from benchmarks/results; edit neither. -->

# Performance

What einshard costs, against hand-written JAX. Where no line of the compiled programs differs, they
run equally fast; placing arrays, tracing and calling functions were timed.

einshard and hand-written JAX took turns in one process, and each round gave one ratio. The table
has median times, the difference according to the median ratio, and the spread of the ratios: half
their interquartile range. "Equal" is a difference within the spread. Simulated devices share the
cores of one machine: their times compare einshard with JAX, not one layout or number of devices
with another.
"""
TARGETS = 'Ratios are einshard to hand-written JAX: 1.050 is 5% slower, 1/20 twenty times faster.'
REPEAT = """\
## Measure it yourself

In a clone of the repository, on a laptop, a GPU or a TPU slice:

```
make bench                               # a short run, under five minutes on two cores
python -m benchmarks                     # the list of benchmarks
python -m benchmarks layouts --json layouts.json
python -m benchmarks tpu --topology v5e:16x16 --topology '2*v5e:4x4'
make bench-page                          # all of it, and this page
```

Accelerators are used if there are any; otherwise JAX simulates eight devices, or `--devices` of
them. On several hosts, run the command on each with `--distributed`. Each module in `benchmarks/`
says exactly what it measures:
"""


def write_page() -> None:
    PAGE.write_text(page_of(read_results()), encoding='utf-8')


def read_results() -> list[Report]:
    paths = sorted(RESULTS.glob('*.json'))
    return [Report.from_json(path.read_text(encoding='utf-8')) for path in paths]


def page_of(reports: Sequence[Report]) -> str:
    if any(report.tiny for report in reports):
        raise ValueError('the figures of a run with --tiny mean nothing')
    sections = [text for report in reports for text in of_one_machine(report)]
    benchmarks = '\n'.join(f'* `{name}`: {about(name)}' for name in MODULES)
    parts = [INTRODUCTION, *sections, REPEAT, benchmarks]
    return '\n\n'.join(part.strip() for part in parts) + '\n'


def of_one_machine(report: Report) -> Iterator[str]:
    headlines = [*headline_rows(report.rows)]
    head = ('what is compared', 'einshard', 'by hand', 'difference', 'spread')
    yield f'## {machine(report.environment)}'
    yield versions(report.environment)
    shown = [(words, row) for headline, words, row in headlines if headline.shown]
    lines = [[words, *in_words(row)] for words, row in shown]
    yield markdown(head, lines, ('---', *['---:'] * 4))
    targets = [
        [
            f'{row.benchmark}: {row.name}',
            judged_text(headline, headline.judged(row), row.unit),
            target_text(headline, row),
            met_text(headline, row),
        ]
        for headline, _, row in headlines
        if headline.at_most is not None
    ]
    n_met = sum(target[-1] == 'met' for target in targets)
    table = markdown(('figure', 'measured', 'target', ''), targets)
    yield folded(f'Targets: {n_met} of {len(targets)} are met', f'{TARGETS}\n\n{table}')
    head = ('benchmark', 'what', 'einshard', 'compared with', 'ratio', 'details')
    table = markdown(head, [*map(every_figure, report.rows)])
    yield folded(f'All {len(report.rows)} figures', table)
    if report.left_out:
        yield 'Not measured here:\n\n' + '\n'.join(f'* {text}' for text in report.left_out)


def versions(environment: dict[str, Any]) -> str:
    libtpu = f', libtpu {environment["libtpu"]}' if environment['libtpu'] else ''
    return (
        f'einshard {environment["einshard"]}, JAX {environment["jax"]}{libtpu}, '
        f'Python {environment["python"]}, {environment["date"]}.'
    )


def in_words(row: Row) -> list[str]:
    spread = '' if row.spread is None else f'± {row.spread:.0%}'
    cells = quantity(row.figure, row.unit), other_text(row), words_of_ratio(row), spread
    return [cell.replace(' ', '\N{NO-BREAK SPACE}') for cell in cells]


def every_figure(row: Row) -> list[str]:
    compared_with = f'{other_text(row)}, {row.against}' if row.against else ''
    details = '; '.join(map(detail_text, row.details.items()))
    figure = quantity(row.figure, row.unit)
    return [row.benchmark, row.name, figure, compared_with, ratio_text(row), details]


def folded(summary: str, text: str) -> str:
    return f'<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def markdown(
    head: Sequence[str], lines: Sequence[Sequence[str]], alignments: Sequence[str] = ()
) -> str:
    return '\n'.join(
        '| ' + ' | '.join(text.replace('|', '\\|').replace('*', '\\*') for text in line) + ' |'
        for line in (head, [*alignments, *['---'] * (len(head) - len(alignments))], *lines)
    )
