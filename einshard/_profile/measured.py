"""Measured: what a trace says about a program, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._errors import plural
from .._page import Column, Section
from .._spans import Bar
from .._text import format_flops, format_seconds, short_arrays, short_source


class Seconds(NamedTuple):
    """Seconds of one run, as means over the devices: their mean over runs, and their range."""

    mean: float
    least: float
    most: float

    def __str__(self) -> str:
        return format_seconds(self.mean)


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One collective of a program, in one run.

    Attributes:
        name, kind, arrays, along, source: as in `Report.collectives`.
        of: what it sends, in words.
        time: how long it takes, waiting included: from its start to the end of its done, if it is
            asynchronous.
        wait: the time in which the device waits for another device of its group. In one execution
            all devices of a group end together, so that the shortest duration is that of the
            transfer, and what others take longer is waiting. None unless the trace has two devices
            of a group.
        exposed: the time in which the device computes nothing meanwhile, waiting included.
        slowest: the device that comes last most often, so that others wait for it. None without
            `wait`.
        bound: a lower bound on the time of this collective alone. None without a chip.
        events: how many executions were measured, on all devices and in all runs.
        cause: why it takes longer than its bound, where that is proven: 'waits for another device',
            'latency' or 'synchronous'; else ''.
    """

    name: str
    kind: str
    arrays: str
    along: str
    source: str | None
    of: str
    time: Seconds
    wait: Seconds | None
    exposed: Seconds
    slowest: int | None
    bound: float | None
    events: int
    cause: str


@dataclass(frozen=True, slots=True)
class MeasuredLine:
    """What one source line computes in one run, on average over devices and runs.

    Attributes:
        source: such as 'model.py:12', or None if unknown.
        time: the seconds of its operations.
        flops: those of its products.
        peak: the part of the chip's peak rate that `flops` reach in `time`. None without a chip or
            flops.
        bound: the seconds that `flops` take at the peak rate. None without a chip.
    """

    source: str | None
    time: float
    flops: float
    peak: float | None
    bound: float | None


@dataclass(frozen=True, slots=True)
class MeasuredTotals:
    """The seconds of one run, on average over devices and runs.

    Each instant of a device counts once, for the first of the five parts that holds: compute, wait,
    collective, other, idle. They add up to the step.

    Attributes:
        step: from the first to the last event of a device.
        compute: the device computes.
        wait: it waits for another device in a collective.
        collective: it is in a collective, and neither computes nor waits for another device.
        other: it only copies, or runs something that is unknown.
        idle: nothing runs.
        collectives: the time of all collectives, hidden or not.
        hidden: the part of `collectives` in which the device computes.
    """

    step: Seconds
    compute: float
    wait: float
    collective: float
    other: float
    idle: float
    collectives: float
    hidden: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A run of a program, as a trace has it: `Report.profile`.

    Attributes:
        path: the trace; '' if `einshard.profile` made it, which keeps none.
        program: the program in it, with its number: 'jit_step(2)'.
        platform: 'cpu', 'gpu' or 'tpu'.
        devices: the positions of its devices in the program.
        n_devices: the number of devices of the program.
        runs: how many runs were measured.
        joined: the part of the device time of the program's events whose instruction is known.
        same_kernels: whether the program is equal to that of the report. If only its collectives
            are, they are joined by their order.
        totals: the seconds of a run.
        rows: the collectives, in the order of the program.
        lines: the source lines that compute, those that take longest first.
        notes: what else to know about these times.
        slowest: the device with the longest step, whose run `spans` shows.
        spans: what runs when.
    """

    path: str
    program: str
    platform: str
    devices: tuple[int, ...]
    n_devices: int
    runs: int
    joined: float
    same_kernels: bool
    totals: MeasuredTotals
    rows: tuple[MeasuredRow, ...]
    lines: tuple[MeasuredLine, ...]
    notes: tuple[str, ...]
    slowest: int
    spans: tuple[Bar, ...]

    @property
    def json_fields(self) -> tuple[str, ...]:
        return tuple(name for name in self.__slots__ if name != 'spans')


# --- the page -----------------------------------------------------------------------------------

_MAX_ROWS = 20  # in a printed table
_ROW_COLUMNS = (
    Column('time', right=True),
    Column('wait', right=True),
    Column('exposed', right=True),
    Column('bound', right=True),
    Column('kind'),
    Column('array', shorten='middle'),
    Column('along'),
    Column('line'),
    Column('of', below=True),
    Column('over runs', below=True),
    Column('comes last:', below=True),
    Column('cause:', below=True),
)
_LINE_COLUMNS = (
    Column('time', right=True),
    Column('of compute', right=True),
    Column('flops', right=True),
    Column('of peak', right=True),
    Column('line'),
)
_GAP_COLUMNS = (
    Column('gap', right=True),
    Column('measured', right=True),
    Column('bound', right=True),
    Column('what'),
)


def measured_sections(measured: Measured) -> list[Section]:
    sections = [Section('measured', lines=tuple(_summary(measured)), comes_first=True)]
    if measured.rows:
        rows = sorted(measured.rows, key=lambda row: -row.exposed.mean)
        cells = tuple(map(_row_cells, rows))
        title = 'collectives, measured, most exposed first'
        sections.append(Section(title, _ROW_COLUMNS, cells, max_rows=_MAX_ROWS))
    if measured.lines:
        total = sum(line.time for line in measured.lines) or 1.0
        cells = tuple(
            (
                format_seconds(line.time),
                f'{line.time / total:.0%}',
                format_flops(line.flops) if line.flops else '',
                '' if line.peak is None else f'{line.peak:.0%}',
                short_source(line.source) or 'unknown lines',
            )
            for line in measured.lines
        )
        sections.append(
            Section('compute, measured, by line', _LINE_COLUMNS, cells, max_rows=_MAX_ROWS)
        )
    if gaps := find_gaps(measured):
        cells = tuple((*map(format_seconds, gap[:3]), gap[3]) for gap in gaps)
        title = 'measured minus bound, largest first'
        sections.append(Section(title, _GAP_COLUMNS, cells, max_rows=_MAX_ROWS // 2))
    return sections


def find_gaps(measured: Measured) -> list[tuple[float, float, float, str]]:
    """Returns (gap, time, bound, what) of the rows and lines that have a bound, largest first."""
    gaps = [
        (
            row.time.mean - row.bound,
            row.time.mean,
            row.bound,
            f'{row.kind} {short_source(row.source)}',
        )
        for row in measured.rows
        if row.bound is not None
    ]
    gaps += [
        (line.time - line.bound, line.time, line.bound, f'compute {short_source(line.source)}')
        for line in measured.lines
        if line.bound
    ]
    return sorted(gaps, key=lambda gap: -gap[0])


def devices_text(devices: Sequence[int], n_devices: int) -> str:
    """Formats 'devices 0 to 7 of 32', or '8 devices' if they are all."""
    if len(devices) == n_devices:
        return plural(n_devices, 'device')
    is_range = [*devices] == [*range(devices[0], devices[-1] + 1)] and len(devices) > 1
    text = f'{devices[0]} to {devices[-1]}' if is_range else ', '.join(map(str, devices))
    return f'device{"s" * (len(devices) > 1)} {text} of {n_devices}'


def _summary(measured: Measured) -> list[str]:
    t, text = measured.totals, format_seconds
    in_file = f' in {measured.path}' if measured.path else ''
    lines = [
        f'{measured.program}{in_file}: {plural(measured.runs, "run")} on '
        f'{devices_text(measured.devices, measured.n_devices)}; joined: {measured.joined:.0%} of '
        'device time',
        f'a step takes {t.step} ({text(t.step.least)} to {text(t.step.most)}): compute '
        f'{text(t.compute)}, wait for other devices {text(t.wait)}, rest of exposed collectives '
        f'{text(t.collective)}, other operations {text(t.other)}, idle {text(t.idle)}',
    ]
    if measured.rows:
        share = f' ({t.hidden / t.collectives:.0%})' if t.collectives else ''
        lines.append(
            f'collectives take {text(t.collectives)}, of which {text(t.hidden)}{share} hidden'
        )
    if not measured.same_kernels:
        lines.append("the kernels differ from the report's: joined by collectives")
    return [*lines, *measured.notes]


def _row_cells(row: MeasuredRow) -> tuple[str, ...]:
    return (
        str(row.time),
        '?' if row.wait is None else str(row.wait),
        str(row.exposed),
        '' if row.bound is None else format_seconds(row.bound),
        row.kind,
        short_arrays(row.arrays),
        row.along,
        short_source(row.source),
        row.of,
        f'{format_seconds(row.time.least)} to {format_seconds(row.time.most)}',
        '' if row.slowest is None else f'device {row.slowest}',
        row.cause,
    )


WAITS, LATENCY, SYNCHRONOUS = 'waits for another device', 'latency', 'synchronous'
