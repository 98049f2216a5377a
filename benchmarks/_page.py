"""benchmarks/results/*.json -> docs/performance.md: `python -m benchmarks page`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from ._headlines import headline_rows
from ._list import MODULES, about
from ._report import Report, Row, machine
from ._table import (
    bound_text,
    detail_text,
    judged_text,
    met_text,
    other_text,
    quantity,
    ratio_text,
)

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / 'results', HERE.parent / 'docs' / 'performance.md'

INTRODUCTION = """\
<!-- Written by `python -m benchmarks page` from benchmarks/results; edit neither. -->

# Performance

What einshard costs, against the JAX that you would write by hand. Each time was measured in pairs:
einshard and the hand-written JAX took turns in one process, and each round gave one ratio. The
tables show median times, the median ratio, and its spread: half the interquartile range of the
ratios, in percent. Below 1 einshard is faster; 1/20 is twenty times faster. Numbers of lines,
traces and compilations are exact. Simulated devices share the cores and the memory of one machine:
their times compare einshard with JAX, not one layout or collective with another.
"""
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

Accelerators are used if there are any; else JAX simulates eight devices, or `--devices` of them.
On several hosts, start it on each with `--distributed`. Each module in `benchmarks/` says exactly
what it measures:
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
    head = ('what is compared', 'einshard', 'by hand', 'ratio')
    yield f'## {machine(report.environment)}'
    yield versions(report.environment)
    yield markdown(head, [[words, *figures(row)] for _, words, row in headlines])
    bounds = [
        [
            f'{row.benchmark}: {row.name}',
            judged_text(headline, headline.judged(row), row.unit),
            bound_text(headline, row),
            met_text(headline, row),
        ]
        for headline, _, row in headlines
    ]
    n_met = sum(headline.is_met(row) for headline, _, row in headlines)
    table = markdown(('figure', 'measured', 'bound', ''), bounds)
    yield folded(f'Bounds: {n_met} of {len(bounds)} are met', table)
    shown = [id(row) for _, _, row in headlines]
    rest = [row for row in report.rows if id(row) not in shown]
    head = ('benchmark', 'what', 'einshard', 'compared with', 'ratio', 'details')
    yield folded(f'The other {len(rest)} figures', markdown(head, [*map(other_figure, rest)]))
    if report.left_out:
        yield 'Not measured here:\n\n' + '\n'.join(f'* {text}' for text in report.left_out)


def versions(environment: dict[str, Any]) -> str:
    libtpu = f', libtpu {environment["libtpu"]}' if environment['libtpu'] else ''
    return (
        f'einshard {environment["einshard"]}, JAX {environment["jax"]}{libtpu}, '
        f'Python {environment["python"]}, {environment["date"]}.'
    )


def figures(row: Row) -> list[str]:
    return [quantity(row.figure, row.unit), other_text(row), ratio_text(row)]


def other_figure(row: Row) -> list[str]:
    figure, other, ratio = figures(row)
    compared_with = f'{other}, {row.against}' if row.against else ''
    details = '; '.join(map(detail_text, row.details.items()))
    return [row.benchmark, row.name, figure, compared_with, ratio, details]


def folded(summary: str, text: str) -> str:
    return f'<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return '\n'.join(
        '| ' + ' | '.join(text.replace('|', '\\|').replace('*', '\\*') for text in line) + ' |'
        for line in (head, ['---'] * len(head), *lines)
    )
