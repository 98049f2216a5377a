"""Estimates the timeline of a program from its compiled schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .._errors import EinshardError
from .._program.cost.timeline import Run, Simulation
from .._program.hlo.collective import Collective
from .._text import short_source
from .collectives import payload_text
from .reading import Reading
from .timeline import Timeline, TimelineLine, TimelineRow, TimelineTotals


def refusal(reading: Reading) -> EinshardError | None:
    """Returns the error that says why a program has no timeline, or None if it has one."""
    chip, device = reading.chip, reading.devices[0]
    platform = 'cpu' if reading.is_simulated else device.platform
    is_others = chip is not None and platform != ('tpu' if chip.torus else 'gpu')
    if platform == 'cpu' or is_others:
        target = 'CPUs' if platform == 'cpu' else device.device_kind
        return EinshardError(
            f'there is no timeline of a program that is compiled for {target}: its schedule is not '
            f'that of {chip.name if chip else "a GPU or a TPU"}',
            code='argument',
            facts={
                'instead': "compile for devices you don't have: shardings or mesh= on "
                "topology('h100:8') or topology('v5e:4x4')",
            },
        )
    if 'is_scheduled=true' not in reading.program.head:
        return EinshardError(
            'there is no timeline of a program whose text has no schedule', code='argument'
        )
    if chip is None or chip.efficiency is None:
        what = device.device_kind if chip is None else chip.name
        return EinshardError(
            f'there is no timeline for {what}: it is unknown what programs reach of its peak rates',
            code='argument',
            facts={'instead': 'chip=einshard.Chip(..., efficiency=einshard.Efficiency(...))'},
        )
    return None


def estimate(reading: Reading) -> Timeline:
    """Estimates the timeline of a program.

    Raises:
        EinshardError: the program is compiled for CPUs, has no schedule, or the chip is unknown.
    """
    if (error := refusal(reading)) is not None:
        raise error
    chip = reading.chip
    assert chip is not None
    assert chip.efficiency is not None
    rows = reading.collectives
    of = [payload_text([row], True) for row in rows]
    labels = [f'{short_source(row.source)} {text}' for row, text in zip(rows, of, strict=True)]
    devices = list(reading.devices)
    run = Simulation(reading.graph, rows, labels, devices, chip, reading.kernels).run()
    is_measured, is_known = bool(chip.efficiency.source), not run.unknown
    exposed, busy = run.total('exposed'), run.total('busy')
    hidden = max(0.0, 1 - exposed / busy) if busy and is_known else None
    totals = TimelineTotals(hidden=hidden)
    if is_measured and is_known:
        parts = run.total('compute'), exposed, run.total('copy')
        totals = TimelineTotals(run.seconds, *parts, max(0.0, run.seconds - sum(parts)), hidden)
    made = [_row(run, i, *pair, is_measured) for i, pair in enumerate(zip(rows, of, strict=True))]
    return Timeline(
        source='estimated',
        chip=chip.name,
        rows=tuple(sorted(made, key=lambda row: -(row.share or 0.0))),
        totals=totals,
        lines=tuple(_lines(run, rows)),
        assumed=chip.efficiency,
        unknown=tuple(run.unknown),
        spans=tuple(run.spans),
    )


def step_of(reading: Reading) -> float | None:
    """Estimates the seconds of one run. None if there is no timeline, or if it is unknown."""
    return estimate(reading).totals.step if refusal(reading) is None else None


def _row(run: Run, i: int, row: Collective, of: str, is_measured: bool) -> TimelineRow:
    time = None if i in run.untimed else run.parts['busy', i]
    exposed = None if time is None or i in run.uncertain else run.parts['exposed', i]
    share = hidden = None
    if time is not None and exposed is not None:
        share = exposed / (run.total('exposed') or 1.0)
        hidden = max(0.0, 1 - exposed / time) if time else 0.0
    seconds = (time, exposed) if is_measured else (None, None)
    where = row.name, row.kind, row.arrays, row.along, row.source
    return TimelineRow(*where, of, *seconds, share, hidden)


def _lines(run: Run, rows: Sequence[Collective]) -> list[TimelineLine]:
    parts: dict[str, defaultdict[str, float]] = {}
    for (part, key), seconds in run.parts.items():
        if part in ('compute', 'copy', 'exposed'):
            source = rows[key].source or '' if part == 'exposed' else key
            parts.setdefault(source, defaultdict(float))[part] += seconds / (run.seconds or 1.0)
    lines = [
        TimelineLine(source or None, each['compute'], each['exposed'], each['copy'])
        for source, each in parts.items()
    ]
    return sorted(lines, key=lambda line: -line.share)
