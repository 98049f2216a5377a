"""Reads a profile of the program of a report: `Report.with_profile`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import EinshardError, plural
from .._profile.events import UNKNOWN, read_events
from .._profile.form import source_lines, unpack
from .._profile.join import CONTAINER, Subject, find_kinds, find_parts, find_sends
from .._profile.match import Match, find_programs, only_one
from .._profile.measured import Measured
from .._profile.rows import find_lines, find_rows, find_spans, find_totals
from .._profile.trace import Trace, read_trace
from .._program.cost.timeline import flops_by_op, line_of, rows_by_op
from .._program.hlo.find_collectives import async_phases
from .._text import first_of
from .collectives import payload_text
from .reading import Reading

_SIMULATED = (
    'the devices share the cores of one CPU: these times show what is joined with what, not what '
    'it costs'
)


def measure(reading: Reading, path: str | os.PathLike[str], program: int | None) -> Measured:
    """Joins a trace with the collectives and source lines of a program.

    Raises:
        EinshardError: the trace cannot be read; it does not have the program; the program did not
            run in it; or the compiler gave no program to compare.
    """
    if reading.form is None:
        raise EinshardError(
            'the compiler gave no program that could be compared with those of a trace, as when a '
            'program does not fit into memory',
            code='profile',
        )
    trace = read_trace(path)
    matches = find_programs(
        unpack(reading.form), trace, program, reading.devices[0].platform == 'gpu'
    )
    subject = _subject(reading)
    found = {match.name: read_events(trace.data, match, subject.entry) for match in matches}
    ran = [match for match in matches if found[match.name] is not None]
    if not ran:
        raise EinshardError(
            f'{first_of([*found], 3)} did not run from start to end in the trace',
            code='profile',
            facts={'trace': trace.path},
        )
    match = only_one(ran)
    events = found[match.name]
    assert events is not None
    # 1. which device of the program each one of the trace is
    places = _places(reading.devices, [device.ordinal for device in events.devices])
    # 2. what each event is; containers, such as a loop, hold others
    kinds = find_kinds(subject, match, events.names)
    events.devices = [device.kept(kinds.kind[device.op] != CONTAINER) for device in events.devices]
    lines = subject.line if match.renamed is None else _lines_of_both(subject, trace, match)
    # 3. the first run may load kernels or caches
    sends = find_sends(events, kinds, subject.rows, places)
    parts = find_parts(events, kinds, sends)
    notes = [_SIMULATED] if events.platform == 'cpu' and len(places) > 1 else []
    steps = parts.sum(2).max(0)
    if len(steps) > 2 and steps[0] > 1.5 * np.median(steps):
        notes.append('the first run is left out: it takes more than 1.5 times the median')
        events.n_runs -= 1
        for device in events.devices:
            device.run = device.run - 1
        events.devices = [device.kept(device.run >= 0) for device in events.devices]
        sends = find_sends(events, kinds, subject.rows, places)
        parts = find_parts(events, kinds, sends)
    if events.n_cut:
        notes.append(f'left out: runs of which the trace has only a part ({events.n_cut})')
    notes += [f'the profiler says: {text}' for text in trace.lost]
    # 4. the rows
    slowest = int(parts.sum(2).mean(1).argmax())
    of_slowest = parts.sum(2)[slowest]
    run = int(np.abs(of_slowest - np.median(of_slowest)).argmin())
    took = [(device.end - device.start, device.op != UNKNOWN) for device in events.devices]
    known = sum(float(seconds[is_known].sum()) for seconds, is_known in took)
    joined = known / (sum(float(seconds.sum()) for seconds, _ in took) or 1.0)
    measured = find_rows(subject, sends, events.n_runs, places)
    if n_idle := len(subject.rows) - len(measured):
        notes.append(
            f'{plural(n_idle, "collective")} did not run, as in a branch that is not taken'
        )
    if joined < 0.9 and events.platform == 'gpu':
        notes.append(
            'command buffers hide the instructions of kernels: compile with the option '
            "xla_gpu_enable_command_buffer='', as einshard.profile does"
        )
    return Measured(
        path=str(trace.path),
        program=match.name,
        platform=events.platform,
        devices=tuple(places),
        n_devices=reading.n_devices,
        runs=events.n_runs,
        joined=joined,
        same_kernels=match.renamed is None,
        totals=find_totals(parts, sends),
        rows=tuple(measured),
        lines=tuple(find_lines(subject, events, kinds, lines)),
        notes=tuple(notes),
        slowest=places[slowest],
        spans=tuple(find_spans(subject, events, kinds, sends, slowest, run, lines)),
    )


def _subject(reading: Reading) -> Subject:
    program, collectives = reading.program, reading.collectives
    phases = async_phases(program)
    ops = {op.name: op for ops in program.computations.values() for op in ops}
    return Subject(
        entry=[op.name for op in program.computations[program.entry]],
        rows=collectives,
        labels=[payload_text([row], True) for row in collectives],
        row_of=rows_by_op(collectives),
        dones=frozenset(
            op.name
            for op in (ops.values() if phases else ())
            if op.opcode == 'fusion'
            and any(phases.get(name) == 'Done' for name in op.callees.get('calls', ()))
        ),
        line=lambda name: line_of(program, ops[name]) if name in ops else '',
        flops={name: [*each.values()] for name, each in flops_by_op(reading.graph).items()},
        devices=list(reading.devices),
        chip=reading.chip,
    )


def _lines_of_both(subject: Subject, trace: Trace, match: Match) -> Callable[[str], str]:
    """Reads the lines of kernels from the program of the trace, as those of the report differ."""
    lines = source_lines(trace.modules[match.name])
    return lambda name: lines.get(name, '') or subject.line(name)


def _places(devices: Sequence[Any], ordinals: Sequence[int]) -> list[int]:
    """Returns the positions in the program of devices that a trace numbers within their host."""
    process = jax.process_index()
    own = {
        (d.id if (n := getattr(d, 'local_hardware_id', None)) is None else n): i
        for i, d in enumerate(devices)
        if getattr(d, 'process_index', 0) == process
    }
    if all(n in own for n in ordinals):
        return [own[n] for n in ordinals]
    # devices that this process does not have, as of `topology`: in the order of their ids
    first = sorted(range(len(devices)), key=lambda i: devices[i].id)
    return [first[i] for i in range(len(ordinals))] if len(ordinals) <= len(first) else []
