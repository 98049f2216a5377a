"""Timeline: what a device does when in one run of a program, and which communication is exposed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._chips.chip import Efficiency
from .._display import Display
from .._page import Column, Page, Section
from .._profile.measured import Measured
from .._spans import Bar, spans_svg
from .._text import format_seconds, short_arrays, short_source


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One collective of a program, in one run.

    Attributes:
        name, kind, arrays, along, source: as in `Report.collectives`.
        of: what it sends, in words.
        time: its seconds, hidden or not. None if unknown.
        exposed: those in which the device waits for it. None if unknown.
        share: its part of all the exposed time. None if unknown.
        hidden: the part of its time that computation hides. None if unknown.
    """

    name: str
    kind: str
    arrays: str
    along: str
    source: str | None
    of: str
    time: float | None
    exposed: float | None
    share: float | None
    hidden: float | None


@dataclass(frozen=True, slots=True)
class TimelineLine:
    """What one source line takes in one run.

    Attributes:
        source: such as 'model.py:12', or None if unknown.
        compute, exposed, copies: its parts of the step: computing, waiting for its collectives,
            and waiting for copies. Over all lines, they and what is unknown add up to 1.
    """

    source: str | None
    compute: float
    exposed: float
    copies: float

    @property
    def share(self) -> float:
        return self.compute + self.exposed + self.copies


@dataclass(frozen=True, slots=True)
class TimelineTotals:
    """The seconds of one run. Each instant counts once: the parts add up to the step.

    Attributes:
        step: how long the run takes. None if unknown; then the others are None, too.
        compute: the time in which the device computes.
        exposed: the time in which it waits for collectives.
        copies: the time in which it waits for copies.
        idle: the time in which it does nothing else. In an estimate, 0.
        hidden: the part of the collectives' time that computation hides. None if unknown, and
            without collectives.
    """

    step: float | None = None
    compute: float | None = None
    exposed: float | None = None
    copies: float | None = None
    idle: float | None = None
    hidden: float | None = None


@dataclass(frozen=True, repr=False)
class Timeline(Display):
    """What one device does in one run of a program: `Report.timeline`.

    It prints as text, with a bar for each source line. `timeline.save('step.svg')` draws it.

    Attributes:
        source: 'estimated', or 'measured'.
        chip: the name of the chip.
        rows: the collectives, most exposed first.
        totals: the seconds of the step and of its parts. If measured, `copies` has other operations
            that do not compute, too.
        lines: the source lines, those that take longest first.
        assumed: what the estimate assumes of the chip. None if measured.
        unknown: why the time of the step is unknown. Empty if it is known.
        spans: what runs when. Of a loop, one iteration, if estimated. If measured, on the slowest
            device, with one lane for each of its streams.
        estimate: what was estimated, if this was measured and there is an estimate.
    """

    source: str
    chip: str
    rows: tuple[TimelineRow, ...]
    totals: TimelineTotals
    lines: tuple[TimelineLine, ...]
    assumed: Efficiency | None
    unknown: tuple[str, ...]
    spans: tuple[Bar, ...]
    estimate: Timeline | None = None

    @property
    def json_fields(self) -> tuple[str, ...]:
        names = 'source', 'chip', 'totals', 'rows', 'lines', 'assumed', 'unknown'
        return names if self.source == 'estimated' else (*names, 'estimate')

    @property
    def svg(self) -> str:
        """An SVG of the step, and of one iteration of each long loop, for use in a web page."""
        end = max((span.start + span.seconds for span in self.spans), default=0.0)
        step = self.totals.step
        title = f'{_SOURCE[self.source]} on {self.chip}'
        below = None
        if self.estimate is not None and self.estimate.totals.step is not None:
            below = self.estimate.spans, self.estimate.totals.step
        if self.source == 'measured':  # spans show one run, and totals the mean
            return spans_svg(title, self.spans, end, estimate=below)
        return spans_svg(title, self.spans, step or end, has_times=step is not None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: a picture if the name ends in '.svg', '.html' for a page, or text."""
        if Path(path).suffix.lower() != '.svg':
            super().save(path)
            return
        # alone, the picture has the colors of the viewer
        style = (
            ':root { color-scheme: light dark; color: CanvasText; background: Canvas; '
            'padding: 8px; box-sizing: border-box }'
        )
        start = self.svg.index('>') + 1
        text = f'{self.svg[:start]}<style>{style}</style>{self.svg[start:]}\n'
        Path(path).write_text(text, encoding='utf-8')

    def _page(self) -> Page:
        return Page('', tuple(timeline_sections(self)))


_SOURCE = {
    'estimated': 'estimate, not measured: the compiled schedule',
    'measured': 'measured',
}


def measured_timeline(measured: Measured, chip: str, estimate: Timeline | None) -> Timeline:
    """Returns what was measured, in the form of an estimate."""
    t = measured.totals
    exposed = sum(row.exposed.mean for row in measured.rows) or 1.0
    rows = [
        TimelineRow(
            *(row.name, row.kind, row.arrays, row.along, row.source, row.of),
            *(row.time.mean, row.exposed.mean, row.exposed.mean / exposed),
            max(0.0, 1 - row.exposed.mean / row.time.mean) if row.time.mean else 0.0,
        )
        for row in measured.rows
    ]
    step = t.step.mean or 1.0
    compute = {line.source: line.time / step for line in measured.lines}
    waiting: defaultdict[str | None, float] = defaultdict(float)
    for row in measured.rows:
        waiting[row.source] += row.exposed.mean / step
    lines = [
        TimelineLine(source, compute.get(source, 0.0), waiting[source], 0.0)
        for source in {**compute, **waiting}
    ]
    hidden = t.hidden / t.collectives if t.collectives else None
    totals = TimelineTotals(t.step.mean, t.compute, t.wait + t.collective, t.other, t.idle, hidden)
    return Timeline(
        source='measured',
        chip=chip,
        rows=tuple(sorted(rows, key=lambda row: -(row.exposed or 0.0))),
        totals=totals,
        lines=tuple(sorted(lines, key=lambda line: -line.share)),
        assumed=None,
        unknown=(),
        spans=measured.spans,
        estimate=estimate,
    )


# --- the page -----------------------------------------------------------------------------------

_BAR = 40  # characters of the longest line
_MAX_LINES, _MAX_ROWS = 16, 16  # in a printed table
_LINE_COLUMNS = (
    Column('line'),
    Column('time', right=True),
    Column('waiting', right=True),
    Column('computing \u2588  waiting \u2591'),
)
_ROW_COLUMNS = (
    Column('exposed', right=True),
    Column('of', right=True),
    Column('kind'),
    Column('array', shorten='middle'),
    Column('along'),
    Column('line'),
    Column('of', below=True),
)


def timeline_sections(timeline: Timeline) -> list[Section]:
    totals, step = timeline.totals, timeline.totals.step

    def amount(share: float) -> str:
        return f'{share:.0%}' if step is None else format_seconds(share * step)

    longest = max((line.share for line in timeline.lines), default=0.0) or 1.0
    lines = tuple(
        (
            short_source(line.source) or 'unknown lines',
            amount(line.share),
            amount(line.exposed + line.copies) if line.exposed + line.copies else '',
            _bar(line, longest),
        )
        for line in timeline.lines
        if line.share
    )
    title = f'timeline on {timeline.chip} ({_SOURCE[timeline.source]})'
    sections = [Section(title, lines=_summary(timeline), picture=timeline.svg, comes_first=True)]
    if lines:
        sections.append(Section('time by line', _LINE_COLUMNS, lines, max_rows=_MAX_LINES))
    alike: dict[object, list[TimelineRow]] = {}
    for row in timeline.rows:
        if row.share != 0:
            alike.setdefault((row.kind, row.arrays, row.along, row.source, row.of), []).append(row)
    if alike:
        groups = sorted(alike.values(), key=lambda rows: -sum(row.share or 0.0 for row in rows))
        hidden = '' if totals.hidden is None else f' ({totals.hidden:.0%} of their time is hidden)'
        title = f'collectives, most exposed first{hidden}'
        rows = tuple(_row_cells(rows) for rows in groups)
        sections.append(Section(title, _ROW_COLUMNS, rows, max_rows=_MAX_ROWS))
    return sections


def _summary(timeline: Timeline) -> tuple[str, ...]:
    totals, e = timeline.totals, timeline.assumed

    def text(seconds: float | None) -> str:
        return format_seconds(seconds or 0.0)

    if totals.step is not None:
        first = f'a step takes about {text(totals.step)}: computing {text(totals.compute)}, waiting'
        first += f' for collectives {text(totals.exposed)}, for copies {text(totals.copies)}'
        if e is None:
            estimate = timeline.estimate and timeline.estimate.totals.step
            other = f'; the estimate is {text(estimate)}' if estimate else ''
            return (f'{first.replace("about ", "")}, idle {text(totals.idle)}{other}',)
    elif timeline.unknown:
        first = f'the time of a step is unknown: {"; ".join(timeline.unknown)}'
    else:
        first = f'shares, not times: what programs reach on {timeline.chip} has not been measured'
    assert e is not None
    constant = '' if e.collective is None else f', {text(e.collective)} for each collective'
    source = f' ({e.source})' if e.source else ' (those of a similar chip)'
    return (
        first,
        f'assumed: products at {e.products:.0%} of the peak, HBM at {e.hbm:.0%}, links at '
        f'{e.links:.0%}, all-reduces at {e.all_reduces:.0%}, between slices or domains '
        f'{e.network:.0%}{constant}, {text(e.launch)} for each other operation{source}',
    )


def _row_cells(rows: Sequence[TimelineRow]) -> tuple[str, ...]:
    """Writes rows that look the same; their times add up."""

    def total(values: Sequence[float | None], text: Callable[[float], str]) -> str:
        known = [value for value in values if value is not None]
        return text(sum(known)) if len(known) == len(values) else '?'

    row, exposed = rows[0], total([row.exposed for row in rows], format_seconds)
    if row.time is None:  # the chip is not measured, or the time is unknown
        exposed = total([row.share for row in rows], '{:.0%}'.format)
    times = exposed, total([row.time for row in rows], format_seconds)
    what = row.kind, short_arrays(row.arrays), row.along, short_source(row.source), row.of
    return *times, *what


def _bar(line: TimelineLine, longest: float) -> str:
    computing = round(_BAR * line.compute / longest)
    waiting = round(_BAR * line.share / longest) - computing
    return '\u2588' * computing + '\u2591' * waiting
