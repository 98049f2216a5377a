"""Joins the events of a program with the rows of its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._chips.chip import Chip
from .._program.hlo.collective import Collective
from .._program.hlo.opcodes import FREE
from .events import ASYNC_LINE, DeviceEvents, Events
from .form import Form
from .match import Match


@dataclass(frozen=True)
class Subject:
    """The program of a report.

    Attributes:
        entry: the instructions that each run executes once, in order.
        rows: its collectives, with `labels` that say what each sends.
        row_of: the index of the row of each instruction that is, starts or calls a collective.
        dones: the fusions that wait for a collective, by name; other dones have such an opcode.
        line: returns the source line of an instruction, or ''.
        flops: (flops, dtype) of the products of each instruction.
        devices: the devices of the program, in order.
    """

    entry: Sequence[str]
    rows: Sequence[Collective]
    labels: Sequence[str]
    row_of: Mapping[str, int]
    dones: frozenset[str]
    line: Callable[[str], str]
    flops: Mapping[str, Sequence[tuple[float, str]]]
    devices: Sequence[Any]
    chip: Chip | None


COMPUTE, COLLECTIVE, DONE, OTHER, CONTAINER = range(5)
_CONTAINERS = ('while', 'call', 'conditional')
_OTHER = FREE | {
    *('copy', 'copy-start', 'copy-done', 'slice-start', 'slice-done', 'infeed', 'outfeed'),
    *('send', 'send-done', 'recv', 'recv-done', 'partition-id', 'replica-id'),
}


class Kinds(NamedTuple):
    """What each instruction is, by the index that events have; the last entry is for UNKNOWN."""

    kind: Any
    row: Any


def find_kinds(subject: Subject, match: Match, names: Sequence[str]) -> Kinds:
    form, renamed = match.form, match.renamed
    row_of = {
        name: subject.row_of[ours]
        for name in form
        if (ours := name if renamed is None else renamed.get(name, '')) in subject.row_of
    }
    kinds = np.full(len(names) + 1, OTHER)
    rows = np.full(len(names) + 1, -1)
    for i, name in enumerate(names):
        opcode = form[name].opcode
        if name in row_of and not opcode.endswith('-done'):
            kinds[i], rows[i] = COLLECTIVE, row_of[name]
        elif opcode.endswith('-done') or name in subject.dones:
            row = _started(form, name, row_of)
            kinds[i], rows[i] = (OTHER, -1) if row is None else (DONE, row)
        elif opcode in _CONTAINERS:
            kinds[i] = CONTAINER
        elif opcode not in _OTHER:
            kinds[i] = COMPUTE
    return Kinds(kinds, rows)


def _started(form: Form, name: str, row_of: Mapping[str, int]) -> int | None:
    """Returns the row of the collective that a -done ends, through tuples and updates."""
    pending, seen = form[name].operands.split(), set[str]()
    while pending:
        operand = pending.pop()
        if operand in row_of:
            return row_of[operand]
        op = form.get(operand)
        is_link = op is not None and (op.opcode in FREE or op.opcode.endswith('-update'))
        if op is not None and is_link and operand not in seen:
            seen.add(operand)
            pending += op.operands.split()
    return None


class Sends(NamedTuple):
    """The executions of collectives on all devices, as arrays."""

    device: Any
    row: Any
    run: Any
    start: Any
    end: Any
    wait: Any  # NaN if unknown
    exposed: Any


def find_sends(
    events: Events, kinds: Kinds, rows: Sequence[Collective], places: Sequence[int]
) -> Sends:
    """Finds how long each execution of a collective takes, waits and is exposed on each device.

    Args:
        places: the positions of the devices in the program.
    """
    parts: list[tuple[Any, ...]] = []
    for n, device in enumerate(events.devices):
        row, run, start, end = _executions(device, kinds)
        busy = _covered(*_of_kind(device, kinds, COMPUTE))
        exposed = end - start - (busy(end) - busy(start))
        parts.append((np.full(len(row), n), row, run, start, end, exposed))
    device, row, run, start, end, exposed = map(np.concatenate, zip(*parts, strict=True))
    # the n-th execution of a run is the same one on all devices
    order = np.lexsort((start, run, row, device))
    keys = np.stack((device, row, run))[:, order]
    first = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(0))[: len(order)]
    starts = np.flatnonzero(first)
    nth = np.empty(len(order), np.int64)
    nth[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    group_of = np.full((len(rows), len(places)), -1)
    for r, collective in enumerate(rows):
        for g, group in enumerate(collective.device_groups or [range(collective.n_devices)]):
            members = {*group}
            group_of[r, [n for n, place in enumerate(places) if place in members]] = g
    group = group_of[row, device] if len(row) else row
    _, same = np.unique(np.stack((row, run, nth, group)), axis=1, return_inverse=True)
    same = same.reshape(-1)
    shortest = np.full(len(row), np.inf)
    np.minimum.at(shortest, same, end - start)
    several = np.bincount(same, minlength=len(row))[same] > 1
    wait = np.where(several, end - start - shortest[same], np.nan)
    return Sends(device, row, run, start, end, wait, exposed)


def _of_kind(device: DeviceEvents, kinds: Kinds, kind: int) -> tuple[Any, Any]:
    found = kinds.kind[device.op] == kind
    return device.start[found], device.end[found]


def _executions(device: DeviceEvents, kinds: Kinds) -> tuple[Any, Any, Any, Any]:
    """Returns row, run, start and end of each execution; an asynchronous one ends with its done."""
    kind, row = kinds.kind[device.op], kinds.row[device.op]
    is_send = kind == COLLECTIVE
    if ASYNC_LINE in device.lanes:  # has a second event of the same start
        is_async = device.lane == device.lanes.index(ASYNC_LINE)
        is_send &= ~(is_async & np.isin(device.op, device.op[is_send & ~is_async]))
    at = np.flatnonzero(is_send)
    end = device.end[at].copy()
    for r in np.unique(row[kind == DONE]):
        dones = np.flatnonzero((kind == DONE) & (row == r))
        mine = np.flatnonzero(row[at] == r)
        if len(dones) == len(mine):  # in a loop, a done may end what the iteration before started
            nth = np.arange(len(mine))
        else:
            nth = np.searchsorted(device.start[dones], device.start[at][mine]).clip(
                max=len(dones) - 1
            )
        end[mine] = np.maximum(end[mine], device.end[dones[nth]])
    return row[at], device.run[at], device.start[at], end


def _covered(start: Any, end: Any) -> Callable[[Any], Any]:
    """Returns a function of time: how much of the time before it the intervals cover."""
    if not len(start):
        return np.zeros_like
    order = np.argsort(start)
    start, latest = start[order], np.maximum.accumulate(end[order])
    begins = np.append(True, start[1:] > latest[:-1])
    start, end = start[begins], latest[np.append(np.flatnonzero(begins)[1:] - 1, len(latest) - 1)]
    points = np.stack((start, end), 1).reshape(-1)
    covered = np.repeat(np.append(0.0, np.cumsum(end - start)), 2)[1:-1]
    return lambda t: np.interp(t, points, covered)


# --- totals -------------------------------------------------------------------------------------

PARTS = 'compute', 'wait', 'collective', 'other', 'idle'


def find_parts(events: Events, kinds: Kinds, sends: Sends) -> Any:
    """Returns the seconds [device, run, part] of `PARTS`: each instant counts for the first."""
    found = np.zeros((len(events.devices), events.n_runs, len(PARTS)))
    for n, device in enumerate(events.devices):
        mine = sends.device == n
        start, wait = sends.start[mine], np.nan_to_num(sends.wait[mine])
        intervals = [
            _of_kind(device, kinds, COMPUTE),
            (start, start + wait),
            (start, sends.end[mine]),
            _of_kind(device, kinds, OTHER),
        ]
        first = np.full(events.n_runs, np.inf)
        last = np.full(events.n_runs, -np.inf)
        np.minimum.at(first, device.run, device.start)
        np.maximum.at(last, device.run, device.end)
        first[1:] = np.maximum(first[1:], last[:-1])  # a late stream of the run before
        points = np.unique(
            np.concatenate([first, last, *(each for pair in intervals for each in pair)])
        )
        is_in = np.zeros((len(PARTS), len(points)), bool)
        is_in[-1] = True
        for part, (begin, end) in enumerate(intervals):
            steps = np.zeros(len(points), np.int64)
            np.add.at(steps, np.searchsorted(points, begin), 1)
            np.add.at(steps, np.searchsorted(points, end), -1)
            is_in[part] = np.cumsum(steps) > 0
        run = np.searchsorted(first, points[:-1], 'right') - 1
        inside = (run >= 0) & (points[:-1] < last[run.clip(0)])
        part = is_in.argmax(0)[:-1]
        np.add.at(found[n], (run[inside], part[inside]), np.diff(points)[inside])
    return found * 1e-9
