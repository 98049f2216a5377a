"""What each row, each line and a run take, from joined events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._program.cost.network import Network
from .._program.hlo.collective import Collective
from .._spans import Bar
from .._text import short_source
from .events import UNKNOWN, Events
from .join import COLLECTIVE, COMPUTE, CONTAINER, DONE, OTHER, Kinds, Sends, Subject
from .measured import (
    LATENCY,
    SYNCHRONOUS,
    WAITS,
    MeasuredLine,
    MeasuredRow,
    MeasuredTotals,
    Seconds,
)


def find_totals(parts: Any, sends: Sends) -> MeasuredTotals:
    n_devices, n_runs, _ = parts.shape
    compute, wait, collective, other, idle = parts.mean((0, 1)).tolist()
    n = n_devices * n_runs * 1e9
    took, exposed = (sends.end - sends.start).sum() / n, sends.exposed.sum() / n
    step = _seconds(parts.sum(2).mean(0))
    hidden = float(max(0.0, took - exposed))
    return MeasuredTotals(step, compute, wait, collective, other, idle, float(took), hidden)


def _seconds(runs: Any) -> Seconds:
    return Seconds(float(runs.mean()), float(runs.min()), float(runs.max()))


# --- rows and lines -----------------------------------------------------------------------------

_SMALL, _SLOW = 64 * 1024, 5  # bytes sent in one execution, and times its bound


def find_rows(
    subject: Subject, sends: Sends, n_runs: int, places: Sequence[int]
) -> list[MeasuredRow]:
    network = None if subject.chip is None else Network(subject.devices, subject.chip)
    found: list[MeasuredRow] = []
    for r, (row, label) in enumerate(zip(subject.rows, subject.labels, strict=True)):
        mine = np.flatnonzero(sends.row == r)
        if not len(mine):
            continue
        device, run = sends.device[mine], sends.run[mine]

        def by_run(values: Any, run: Any = run, device: Any = device) -> Seconds:
            n_devices = len(np.unique(device))
            return _seconds(np.bincount(run, values, n_runs) * 1e-9 / n_devices)

        took, waits = sends.end[mine] - sends.start[mine], sends.wait[mine]
        wait = slowest = None
        if not np.isnan(waits).all():
            wait = by_run(np.nan_to_num(waits))
            if wait.mean:
                slowest = places[int(np.bincount(device, waits == 0).argmax())]
        time, exposed = by_run(took), by_run(sends.exposed[mine])
        bound = network.seconds(row) if network is not None and row.kind != 'custom-call' else None
        found.append(
            MeasuredRow(
                *(row.name, row.kind, row.arrays, row.along, row.source, label),
                *(time, wait, exposed, slowest, bound, len(mine)),
                _cause(row, time.mean, wait and wait.mean, exposed.mean, bound),
            )
        )
    return found


def _cause(
    row: Collective, time: float, wait: float | None, exposed: float, bound: float | None
) -> str:
    if wait is not None and wait > time / 2:
        return WAITS
    sent = row.network_bytes
    if bound is not None and sent is not None and sent < _SMALL and time > _SLOW * bound:
        return LATENCY
    return SYNCHRONOUS if not row.is_async and exposed > time / 2 else ''


def find_lines(
    subject: Subject, events: Events, kinds: Kinds, line_of: Callable[[str], str]
) -> list[MeasuredLine]:
    n_runs = len(events.devices) * events.n_runs
    time: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    peak: dict[str, float] = defaultdict(float)
    seconds, count = np.zeros(len(kinds.kind)), np.zeros(len(kinds.kind))
    for device in events.devices:
        known = device.op != UNKNOWN
        took = (device.end - device.start)[known]
        seconds += np.bincount(device.op[known], took, len(seconds))
        count += np.bincount(device.op[known], minlength=len(seconds))
    chip = subject.chip
    share = chip.share(subject.devices[0]) if chip else 1.0
    for i, name in enumerate(events.names):
        if kinds.kind[i] == COMPUTE:
            line = line_of(name)
            time[line] += seconds[i] * 1e-9 / n_runs
            for n, dtype in subject.flops.get(name, ()):
                flops[line] += n * count[i] / n_runs
                if chip:
                    peak[line] += n * count[i] / n_runs / (chip.rate(dtype) * share)
    found = [
        MeasuredLine(
            line or None,
            took,
            flops[line],
            peak[line] / took if peak[line] and took else None,
            peak[line] if chip else None,
        )
        for line, took in time.items()
    ]
    return sorted(found, key=lambda line: -line.time)


# --- the picture --------------------------------------------------------------------------------

_MAX_SPANS = 400


def find_spans(
    subject: Subject,
    events: Events,
    kinds: Kinds,
    sends: Sends,
    n: int,
    run: int,
    line_of: Callable[[str], str],
) -> list[Bar]:
    """Returns what one device does in one run, in one lane for each stream."""
    device = events.devices[n]
    device = device.kept(device.run == run)
    origin = device.start.min()
    spans: list[Bar] = []
    mine = np.flatnonzero((sends.device == n) & (sends.run == run))
    starts: dict[tuple[int, float], int] = {
        (int(sends.row[i]), float(sends.start[i])): int(i) for i in mine
    }
    columns = device.op, device.lane, device.start, device.end
    for op, lane, start, end in zip(*(column.tolist() for column in columns), strict=True):
        kind, row, at = int(kinds.kind[op]), int(kinds.row[op]), (start - origin) * 1e-9
        lane = device.lanes[lane]
        if kind in (CONTAINER, DONE):
            continue
        if kind == COLLECTIVE:
            i = starts.pop((row, start), None)
            if i is None:
                continue
            label = f'{short_source(subject.rows[row].source)} {subject.labels[row]}'.strip()
            wait = float(np.nan_to_num(sends.wait[i])) * 1e-9
            took = float(sends.end[i] - start) * 1e-9
            if wait:
                spans.append(Bar(lane, at, wait, 'wait', label, row))
            spans.append(Bar(lane, at + wait, took - wait, subject.rows[row].kind, label, row))
            continue
        name = '' if op == UNKNOWN else events.names[op]
        what = 'copy' if kind == OTHER else 'product' if name in subject.flops else 'other'
        label = short_source(line_of(name)) if name else 'unknown'
        spans.append(Bar(lane, at, (end - start) * 1e-9, what, label))
    return _merged(spans) if len(spans) > _MAX_SPANS else spans


def _merged(spans: Sequence[Bar]) -> list[Bar]:
    """Joins neighbors of one lane, line and kind."""
    merged: list[Bar] = []
    last_of: dict[str, int] = {}
    for span in spans:
        i = last_of.get(span.lane)
        if i is not None:
            last = merged[i]
            if (last.kind, last.label, last.row) == (span.kind, span.label, span.row):
                merged[i] = last._replace(seconds=span.start + span.seconds - last.start)
                continue
        last_of[span.lane] = len(merged)
        merged.append(span)
    return merged
