"""Reads the events of a program on each device of a trace, and which run each belongs to."""

from __future__ import annotations

import bisect
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .match import Match, number_of

UNKNOWN = -1  # the op of an event of the program that no instruction has
_TPU = re.compile(r'/device:TPU:(\d+)')
_GPU = re.compile(r'/device:GPU:(\d+)')
ASYNC_LINE = 'Async XLA Ops'


@dataclass
class DeviceEvents:
    """The events of one program on one device.

    Attributes:
        ordinal: the number of the device on its host.
        lanes: the names of its streams.
        op, lane, run: of each event, an index into `Events.names`, one into `lanes`, and its run.
        start, end: of each event, in nanoseconds.
    """

    ordinal: int
    lanes: list[str] = field(default_factory=list)
    op: Any = field(default_factory=list)
    lane: Any = field(default_factory=list)
    run: Any = field(default_factory=list)
    start: Any = field(default_factory=list)
    end: Any = field(default_factory=list)

    def lane_of(self, name: str) -> int:
        if name not in self.lanes:
            self.lanes.append(name)
        return self.lanes.index(name)

    def add(self, op: int, lane: int, run: int, start: float, seconds: float) -> None:
        self.op.append(op)
        self.lane.append(lane)
        self.run.append(run)
        self.start.append(start)
        self.end.append(start + seconds)

    def arrays(self) -> DeviceEvents:
        """Returns the events as arrays, in the order in which they start."""
        order = np.argsort(np.array(self.start, float), kind='stable')
        whole = {name: np.array(getattr(self, name), np.int64)[order] for name in ('op', 'lane')}
        times = {name: np.array(getattr(self, name), float)[order] for name in ('start', 'end')}
        return replace(self, **whole, **times, run=np.array(self.run, np.int64)[order])

    def kept(self, keep: Any) -> DeviceEvents:
        names = 'op', 'lane', 'run', 'start', 'end'
        return replace(self, **{name: getattr(self, name)[keep] for name in names})


@dataclass
class Events:
    """The events of one program.

    Attributes:
        platform: 'cpu', 'gpu' or 'tpu'.
        names: the instructions, by the index that events have.
        devices: by number on the host.
        n_runs: how many runs they have. They are numbered from 0, in order.
        n_cut: how many more runs the trace has of which a part is missing.
    """

    platform: str
    names: list[str]
    devices: list[DeviceEvents]
    n_runs: int
    n_cut: int


def read_events(data: bytes, match: Match, entry: Sequence[str]) -> Events | None:
    """Reads the events of a program. Returns None if it has none.

    Args:
        entry: the instructions that each run of the program executes once, in their order.
    """
    with warnings.catch_warnings():
        # of the bindings of ProfileData, on Python 3.11 and 3.12
        warnings.filterwarnings('ignore', 'builtin type', DeprecationWarning)
        from jax.profiler import ProfileData

        planes = list(ProfileData.from_serialized_xspace(data).planes)
        names: dict[str, int] = {}
        for platform, read in (('tpu', _read_tpu), ('gpu', _read_gpu), ('cpu', _read_cpu)):
            devices = [each for each in read(planes, match, names, entry) if len(each.start)]
            if devices:
                ordered = [names[name] for name in entry if name in names]
                kept, n_runs, n_cut = _whole_runs(devices, ordered)
                return Events(platform, list(names), kept, n_runs, n_cut) if n_runs else None
    return None


def _read_cpu(
    planes: Sequence[Any], match: Match, names: dict[str, int], _: Sequence[str]
) -> Iterable[DeviceEvents]:
    """Events say which device and which run they are of. Devices share the threads."""
    devices: dict[int, DeviceEvents] = {}
    is_op: dict[str, bool] = {}  # of each name: most events are not of programs
    number = match.number
    for plane in planes:
        for line in plane.lines if plane.name == '/host:CPU' else ():
            for event in line.events:
                name = event.name
                if is_op.get(name) is False:
                    continue
                stats = dict(event.stats)
                if name not in is_op:
                    is_op[name] = 'hlo_op' in stats
                if stats.get('program_id', -1) % 2**64 != number or 'hlo_op' not in stats:
                    continue
                op = stats['hlo_op']
                ordinal = stats.get('device_ordinal', 0)
                device = devices.get(ordinal)
                if device is None:
                    device = devices[ordinal] = DeviceEvents(ordinal, ['operations'])
                index = names.setdefault(op, len(names)) if op in match.form else UNKNOWN
                device.add(index, 0, stats.get('run_id', 0), event.start_ns, event.duration_ns)
    return [devices[n].arrays() for n in sorted(devices)]


def _read_gpu(
    planes: Sequence[Any], match: Match, names: dict[str, int], entry: Sequence[str]
) -> Iterable[DeviceEvents]:
    """Kernels say which program and instruction they are of, but not which run."""
    number, module, known = match.number, match.name.rpartition('(')[0], match.form.keys()
    for plane in planes:
        if not (found := _GPU.fullmatch(plane.name)):
            continue
        device, n_in_doubt = DeviceEvents(int(found[1])), 0
        # the line 'XLA Ops' is derived from the streams, and not exact
        for line in (line for line in plane.lines if line.name.startswith('Stream')):
            lane = device.lane_of(line.name)
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats)
                program, op = stats.get('program_id'), stats.get('hlo_op')
                is_ours = stats.get('hlo_module') == module
                if program is not None:
                    is_ours = program % 2**64 == number
                elif op is None:  # such as a kernel of a command buffer
                    n_in_doubt += 1
                    is_ours = True
                if is_ours:
                    index = names.setdefault(f'{op}', len(names)) if op in known else UNKNOWN
                    device.add(index, lane, 0, event.start_ns, event.duration_ns)
        if n_in_doubt < len(device.start):
            yield _numbered_by(device.arrays(), [names[n] for n in entry if n in names])


def _numbered_by(device: DeviceEvents, entry: Sequence[int]) -> DeviceEvents:
    """Numbers the runs.

    On each stream, a run starts with the first of the instructions that run there, which may have
    several kernels. Streams may start late, so that each is numbered on its own; one on which no
    instruction runs once, such as that of copies, has the times of the fullest.
    """
    starts: dict[int, Any] = {}
    order = {op: i for i, op in enumerate(entry)}
    for lane in range(len(device.lanes)):
        on_lane = np.flatnonzero(device.lane == lane)
        ops = device.op[on_lane]
        first = min(
            (op for op in {*ops.tolist()} if op in order), key=order.__getitem__, default=None
        )
        if first is not None:
            is_only = len({*ops.tolist()} - {UNKNOWN}) == 1
            is_new = np.append(UNKNOWN, ops[:-1]) != first
            starts[lane] = device.start[on_lane[(ops == first) & (is_new | is_only)]]
    if not starts:
        return device.kept(device.start < 0)
    fullest = max(starts, key=lambda lane: int((device.lane == lane).sum()))
    run = np.zeros(len(device.start), np.int64)
    for lane in range(len(device.lanes)):
        own = starts.get(lane, ())
        at = own if len(own) == len(starts[fullest]) else starts[fullest]
        on_lane = device.lane == lane
        run[on_lane] = np.searchsorted(at, device.start[on_lane], 'right') - 1
    return replace(device, run=run).kept(run >= 0)


def _read_tpu(
    planes: Sequence[Any], match: Match, names: dict[str, int], _: Sequence[str]
) -> Iterable[DeviceEvents]:
    """Events lie in those of the line 'XLA Modules', whose names have the program."""
    for plane in planes:
        if not (found := _TPU.fullmatch(plane.name)):
            continue
        lines = {line.name: line for line in plane.lines}
        windows: list[tuple[float, float, int]] = []
        modules = lines['XLA Modules'].events if 'XLA Modules' in lines else ()
        for event in modules:
            if number_of(event.name) == match.number:
                run = dict(event.stats).get('run_id', len(windows))
                start = event.start_ns
                windows.append((start, start + event.duration_ns, int(run)))
        windows.sort()
        starts = [window[0] for window in windows]
        device = DeviceEvents(int(found[1]))
        for name in ('XLA Ops', ASYNC_LINE) if windows else ():
            lane = device.lane_of(name)
            for event in lines[name].events if name in lines else ():
                start = event.start_ns
                i = bisect.bisect_right(starts, start) - 1
                if i < 0 or start >= windows[i][1]:
                    continue
                op = event.name.partition(' = ')[0].lstrip('%')
                index = names.setdefault(op, len(names)) if op in match.form else UNKNOWN
                device.add(index, lane, windows[i][2], start, event.duration_ns)
        if len(device.start):
            yield device.arrays()


def _whole_runs(
    devices: Sequence[DeviceEvents], entry: Sequence[int]
) -> tuple[list[DeviceEvents], int, int]:
    """Drops runs of which the trace has only a part, and numbers the others alike on all devices.

    A run has all of its events if it has those of the first and the last instruction.
    """
    whole: list[list[int]] = []
    n_seen = 0
    for device in devices:
        ids, first, number = np.unique(device.run, return_index=True, return_inverse=True)
        runs = ids[np.argsort(first)].tolist()  # in their order
        pairs = np.unique(device.op * len(ids) + number)  # UNKNOWN is negative, and not in order

        def runs_with(op: int, ids: Any = ids, pairs: Any = pairs) -> set[int]:
            start, end = np.searchsorted(pairs, (op * len(ids), (op + 1) * len(ids)))
            return {*ids[pairs[start:end] % len(ids)].tolist()}

        usual = (
            next((found for op in ops if 2 * len(found := runs_with(op)) >= len(runs)), {*runs})
            for ops in (entry, entry[::-1])
        )
        complete = set[int].intersection(*usual)
        whole.append([run for run in runs if run in complete])
        n_seen = max(n_seen, len(runs))
    counts = Counter(run for runs in whole for run in runs)
    common = [run for run in whole[0] if counts[run] == len(devices)]
    if not common:  # run ids of their own: the last runs are the same, as the first may be missing
        n = min(map(len, whole))
        whole = [runs[len(runs) - n :] for runs in whole]
    n_runs = len(common) or min(map(len, whole))
    kept: list[DeviceEvents] = []
    for device, runs in zip(devices if n_runs else (), whole if n_runs else (), strict=True):
        wanted = np.array(common or runs, np.int64)
        order = np.argsort(wanted)
        at = np.searchsorted(wanted[order], device.run).clip(max=len(wanted) - 1)
        run = np.where(wanted[order[at]] == device.run, order[at], -1)
        kept.append(replace(device, run=run).kept(run >= 0))
    return kept, n_runs, n_seen - n_runs
