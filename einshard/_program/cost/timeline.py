"""Simulates the schedule of a compiled program on one device.

The optimized HLO of GPUs and TPUs is scheduled: its instructions are in the order in which they
run, and -start and -done show behind what a collective may hide. Two kinds of queues run them: one
for computing, and one for collectives; on TPUs, one for those along each mesh axis, which have
their own links. An operation takes the larger of its flops at the rate that products reach, and of
its bytes at the rate that HBM reaches; a collective takes its lower bound over the part of it that
collectives reach, and a constant. An estimate: without contention, caches, the host, and waiting
for other devices.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..._chips.chip import Chip
from ..._spans import Bar
from ..._text import short_source
from ..hlo.collective import Collective
from ..hlo.find_collectives import async_phases, count_executions
from ..hlo.flops import flops_of
from ..hlo.graph import Graph
from ..hlo.integers import count_trips
from ..hlo.op_bytes import op_bytes
from ..hlo.opcodes import COLLECTIVES, FREE
from ..hlo.text import HloModule, Instruction, LineErrors
from .kernels import Kernel, scope_of, target_of
from .network import Network


@dataclass
class Run:
    """One run of a computation.

    Attributes:
        seconds: how long it takes.
        parts: its seconds by ('compute', line), ('copy', line) for waiting for copies, ('exposed',
            row) for waiting for collectives, and ('unknown', line); they add up to `seconds`. And
            ('busy', row): those of each collective, hidden or not. A row is the index of a
            collective, a line is '' if unknown.
        unknown: why its time is unknown.
        untimed: the rows whose own time is unknown.
        uncertain: the rows of which it is unknown how much is hidden.
        spans: what runs when; a loop is one span.
    """

    seconds: float = 0.0
    parts: defaultdict[tuple[str, Any], float] = field(default_factory=lambda: defaultdict(float))
    unknown: dict[str, None] = field(default_factory=dict)
    untimed: set[int] = field(default_factory=set)
    uncertain: set[int] = field(default_factory=set)
    spans: list[Bar] = field(default_factory=list)

    def total(self, what: str) -> float:
        return sum(seconds for (part, _), seconds in self.parts.items() if part == what)

    def emit(self, span: Bar) -> None:
        last = self.spans[-1] if self.spans else None
        joins = span.kind in ('product', 'other')  # of one line, in turn
        if joins and last and (last.kind, last.label) == (span.kind, span.label):
            self.spans[-1] = last._replace(seconds=span.start + span.seconds - last.start)
        else:
            self.spans.append(span)

    def add(self, inner: Run, trips: int) -> None:
        for key, seconds in inner.parts.items():
            self.parts[key] += trips * seconds
        self.unknown |= inner.unknown
        self.untimed |= inner.untimed
        self.uncertain |= inner.uncertain


_FREE = FREE | {'add-dependency', 'domain', 'iota', 'opt-barrier', 'partition-id', 'replica-id'}
_CONTROL = ('call', 'conditional', 'while')
# custom calls of the compiler's own that only move or make arrays
_OWN_CALLS = re.compile(
    'AllocateBuffer|AssumeGatherIndicesInBound|ConcatBitcast|TopK|__cub|cu_threefry'
)
_HOST_MEMORY = 'S(5)'
_KERNEL = 'KERNEL_STRATEGY_TRITON'


def rows_by_op(rows: Sequence[Collective]) -> dict[str, int]:
    """Returns the index of the row of each instruction that is a collective, or calls one."""
    row_of: dict[str, int] = {}
    for i, row in enumerate(rows):
        for op in (op for node in row.nodes for op in (node.op, *node.scope.calls)):
            if op.opcode not in _CONTROL:
                row_of.setdefault(op.name, i)
    return row_of


def flops_by_op(graph: Graph) -> dict[str, dict[str, tuple[float, str]]]:
    """Returns the (flops, dtype) of the products in each instruction, by name of the product."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for node in graph.nodes:  # what is called twice has two nodes of one name
        if flops := flops_of(node):
            dtype = node.inputs[0].array.dtype if node.inputs else ''
            unit = node.scope.fusion or node.op  # the fusion around it, if there is one
            found.setdefault(unit.name, {})[node.name] = flops, dtype
    return found


def line_of(program: HloModule, op: Instruction) -> str:
    """The source line of an operation, or of the last in a fusion that has one."""
    callee = next(iter(op.callees.get('calls', ())), '')
    inside = reversed(program.computations.get(callee, ()))
    return next((line for o in (op, *inside) if (line := program.source(o))), '')


class Simulation:
    """One run of a program.

    Args:
        rows: the collectives of the program, with their nodes.
        labels: names each in `Bar.label`.
        devices: the devices of the program, in its order.
        chip: has an `efficiency`.
        kernels: those whose costs are declared, by the name of their scope or custom call.
    """

    def __init__(
        self,
        graph: Graph,
        rows: Sequence[Collective],
        labels: Sequence[str],
        devices: Sequence[Any],
        chip: Chip,
        kernels: Mapping[str, Kernel] = MappingProxyType({}),
    ):
        assert chip.efficiency is not None
        self.program, self.rows, self.labels = graph.program, rows, labels
        self.chip, self.efficiency = chip, chip.efficiency
        self.share = chip.share(devices[0])
        self.network = Network(devices, chip)
        self.slices: list[int] = self.network.slices.tolist()
        self.uses_host = _HOST_MEMORY in self.program.text
        self.row_of = rows_by_op(rows)
        self.seconds: dict[int, float] = {}  # of one execution of each row
        self.pieces: list[int] = []  # the permutes that make up one collective matmul
        for row in rows:
            runs = sum(count_executions(node)[0] for node in row.nodes)
            is_matmul = row.kind != row.nodes[0].opcode.removesuffix('-start') and row.sent
            self.pieces.append(max(1, runs // (row.executions or 1)) if is_matmul else 1)
        self.trips = {
            node.loop.op.name: count_trips(node.loop)
            for node in graph.nodes
            if node.opcode == 'phi' and node.loop is not None
        }
        self.flops = flops_by_op(graph)
        self.phases = async_phases(self.program)
        self.runs: dict[str, Run] = {}  # by computation
        self.kernels = kernels
        self.scales = self._scales() if kernels else {}

    def run(self) -> Run:
        """Simulates each computation once, after those that it calls."""
        for name in self.order:
            with LineErrors(self.program) as errors:
                self.runs[name] = self.simulate(name, errors)
        run = self.runs[self.program.entry]
        for name, kernel in self.kernels.items():
            if kernel.calls and name not in self.scales:
                run.unknown[f"'{name}', no operation of which is left in the program"] = None
        return run

    @functools.cached_property
    def order(self) -> Sequence[str]:
        """The computations of the compute queue, after those that they call."""
        order, pending = dict[str, None](), [self.program.entry]  # calls may be nested deep
        while pending:
            ops = self.program.computations[pending[-1]]
            missing = {callee for op in ops for callee in _called(op)} - order.keys()
            pending += missing
            if not missing:
                order[pending.pop()] = None
        return [*order]

    # --- what one operation takes ---------------------------------------------------------------

    def collective_seconds(self, i: int) -> float:
        if i in self.seconds:
            return self.seconds[i]
        row, e = replace(self.rows[i], executions=1), self.efficiency
        part = e.all_reduces if row.kind == 'all-reduce' else e.links
        groups = row.pairs or row.device_groups
        if any(len({self.slices[device] for device in group}) > 1 for group in groups):
            part = e.network  # between slices or NVLink domains
        # kernels that XLA generates for GPUs are as fast as the chip's latency
        is_kernel = row.sent is not None or any(_KERNEL in node.op.config for node in row.nodes)
        has_constant = e.collective is not None and not is_kernel
        latency = e.collective if has_constant else self.network.latency(row)
        seconds = self.network.seconds(row) / part / self.pieces[i] + (latency or 0.0)
        self.seconds[i] = seconds
        return seconds

    def op_seconds(self, op: Instruction, types: Mapping[str, str]) -> float:
        kernel = self.kernel(op)
        if kernel and self.kernels[kernel].calls is None:
            return self.kernel_seconds(kernel)
        return self.compiled_seconds(op, types) * self.scales.get(kernel, 1.0)

    def compiled_seconds(self, op: Instruction, types: Mapping[str, str]) -> float:
        work = self.flops.get(op.name, {}).values()
        return self.seconds_of(work, op_bytes(self.program, op, types))

    def seconds_of(self, work: Iterable[tuple[float, str]], n_bytes: float) -> float:
        """The seconds of an operation, from (flops, dtype) of its products and the bytes of HBM."""
        e = self.efficiency
        compute = sum(
            flops / (self.chip.rate(dtype) * self.share * e.products) for flops, dtype in work
        )
        bandwidth = self.chip.memory_bandwidth * self.share * e.hbm
        return max(compute, n_bytes / bandwidth) + e.launch

    def line(self, op: Instruction) -> str:
        return line_of(self.program, op)

    def unknown(self, op: Instruction, types: Mapping[str, str]) -> str:
        """Says why the time of an operation is unknown; '' if it is not."""
        opcode = op.opcode
        if opcode in ('infeed', 'outfeed') or 'is_host_transfer=true' in op.attributes:
            return 'a transfer between host and device'
        if self.uses_host:
            operands = (types.get(name.partition('#')[0], '') for name in op.operands)
            if any(_HOST_MEMORY in type_ for type_ in (op.type, *operands)):
                return 'a transfer between host and device'
        if opcode != 'custom-call' or op.name in self.flops or '"cost_estimate"' in op.config:
            return ''
        target = target_of(op)
        is_known = _OWN_CALLS.match(target) or self.kernel(op)
        return '' if is_known else f'a kernel without a cost ({target or "?"})'

    # --- kernels with declared costs ------------------------------------------------------------

    def kernel(self, op: Instruction) -> str:
        """The kernel that an operation is, or belongs to; '' if it is none with a declared cost."""
        if not self.kernels:
            return ''
        target = target_of(op)
        return target if target in self.kernels else scope_of(op.op_name, self.kernels)

    def kernel_seconds(self, name: str, dtype: str = 'bf16') -> float:
        kernel = self.kernels[name]
        return self.seconds_of([(kernel.flops, dtype)], kernel.bytes)

    def _scales(self) -> dict[str, float]:
        """The factors by which the operations of scopes take longer than they are compiled to."""
        compiled: dict[str, float] = defaultdict(float)
        dtypes: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        runs = Counter({self.program.entry: 1})
        for name in reversed(self.order):
            types = {op.name: op.type for op in self.program.computations[name]}
            for op in self.program.computations[name]:
                for callee in _called(op):
                    runs[callee] += runs[name] * (self.trips.get(op.name) or 1)
                kernel = self.kernel(op)
                is_computing = op.opcode not in (*_FREE, *_CONTROL) and op.name not in self.row_of
                if kernel and is_computing and not op.opcode.endswith(('-done', '-update')):
                    compiled[kernel] += runs[name] * self.compiled_seconds(op, types)
                    for flops, dtype in self.flops.get(op.name, {}).values():
                        dtypes[kernel][dtype] += runs[name] * flops
        scales: dict[str, float] = {}
        for name, kernel in self.kernels.items():
            if kernel.calls is not None and compiled[name]:
                dtype = max(dtypes[name], key=dtypes[name].__getitem__, default='bf16')
                scales[name] = kernel.calls * self.kernel_seconds(name, dtype) / compiled[name]
        return scales

    # --- one computation ------------------------------------------------------------------------

    def simulate(self, name: str, errors: LineErrors) -> Run:
        ops = self.program.computations[name]
        computation = _Computation(self, {op.name: op.type for op in ops})
        for op in ops:
            errors.op = op
            computation.execute(op)
        return computation.end()

    def at(self, line: str | None) -> str:
        return f' at {short_source(line)}' if line else ''


class _Computation:
    """The instructions of one computation, executed in their order.

    Attributes:
        now: when the device has computed what is executed so far.
        copies: when the queue of copies is free.
        queues: when each queue of collectives is free.
        ends: when what has started ends, by its name, and whether it is a collective.
        flying: the collectives that may still go on.
    """

    def __init__(self, simulation: Simulation, types: Mapping[str, str]):
        self.simulation, self.types, self.run = simulation, types, Run()
        self.now = self.copies = 0.0
        self.queues: dict[str, float] = {}
        self.ends: dict[str, tuple[float, bool]] = {}
        self.flying: list[Bar] = []

    def execute(self, op: Instruction) -> None:
        simulation, ends, opcode = self.simulation, self.ends, op.opcode
        row = simulation.row_of.get(op.name)
        started = [ends[n] for o in op.operands if (n := o.partition('#')[0]) in ends]
        # what takes no time hands on what it waits for
        if opcode in _FREE or opcode.endswith('-update'):
            if started and opcode != 'tuple':
                ends[op.name] = max(started)
            return
        has_callee = 'calls=' in op.attributes
        callee = next(iter(op.callees.get('calls', ())), '') if has_callee else ''
        phase = simulation.phases.get(callee, '') if opcode == 'fusion' else ''
        if opcode in _CONTROL:
            self.call(op)
        # a transfer between slices is a send and a receive
        elif row is not None and opcode in ('send', 'recv'):
            same = next((ends[n] for n in ends if simulation.row_of.get(n) == row), None)
            ends[op.name] = same or (self.start(row), True)
        elif row is not None and (opcode.endswith('-start') or phase == 'Start'):
            ends[op.name] = self.start(row), True
        elif opcode.endswith('-done') or phase == 'Done':
            self.wait_for(op, *max(started, default=(self.now, False)))
        # a synchronous collective
        elif row is not None and opcode in (simulation.rows[row].kind, 'fusion'):
            self.wait(self.start(row))
        # a copy, or a fusion on a queue of its own
        elif opcode.endswith('-start'):
            self.copy(op)
        else:
            # a fusion on TPU may compute while a collective goes on
            inside = simulation.program.computations.get(callee, ()) if started else ()
            if any(each.opcode in COLLECTIVES for each in inside):
                ends[op.name] = max(started)
            self.compute(op)

    def end(self) -> Run:
        self.wait(max([self.now, *self.queues.values()]))
        self.run.seconds = self.now
        return self.run

    # --- collectives ----------------------------------------------------------------------------

    def start(self, row: int) -> float:
        """Queues a collective, and returns when it ends."""
        simulation, run = self.simulation, self.run
        collective = simulation.rows[row]
        kind, queue = collective.kind, collective.along if simulation.chip.torus else ''
        if kind in ('custom-call', 'ragged-all-to-all') or not collective.device_groups:
            at = simulation.at(collective.source)
            run.unknown[f'a {kind.replace("-", " ", 1)} that sends unknown bytes{at}'] = None
            run.untimed.add(row)
        begin, seconds = (
            max(self.now, self.queues.get(queue, 0.0)),
            simulation.collective_seconds(row),
        )
        self.queues[queue] = begin + seconds
        run.parts['busy', row] += seconds
        self.flying.append(Bar('network', begin, seconds, kind, simulation.labels[row], row))
        run.emit(self.flying[-1])
        return begin + seconds

    def wait(self, end: float) -> None:
        """Waits until `end`, for the collectives that go on meanwhile."""
        overlaps: defaultdict[int, float] = defaultdict(float)
        for span in self.flying if end > self.now else ():
            overlap = min(end, span.start + span.seconds) - max(self.now, span.start)
            if overlap > 0 and span.row is not None:
                overlaps[span.row] += overlap
        at, share = self.now, (end - self.now) / (sum(overlaps.values()) or 1)
        for row, seconds in overlaps.items():
            label = self.simulation.labels[row]
            self.run.parts['exposed', row] += seconds * share
            self.run.emit(Bar('compute', at, seconds * share, 'wait', label, row))
            at += seconds * share
        self.now = max(self.now, end)
        self.flying = [span for span in self.flying if span.start + span.seconds > self.now]

    def wait_for(self, op: Instruction, end: float, is_collective: bool) -> None:
        """Waits for what an operation ends: a collective, or a copy."""
        if is_collective:
            self.wait(end)
        elif end > self.now:
            self.run.parts['copy', self.simulation.line(op)] += end - self.now
            self.run.emit(Bar('compute', self.now, end - self.now, 'copy', 'waits for a copy'))
            self.now = end

    # --- computing and copies -------------------------------------------------------------------

    def compute(self, op: Instruction) -> None:
        simulation, line = self.simulation, self.simulation.line(op)
        seconds, why = simulation.op_seconds(op, self.types), simulation.unknown(op, self.types)
        if why:
            self.lose_track(why, line)
        kind = 'unknown' if why else 'product' if op.name in simulation.flops else 'other'
        self.run.parts['unknown' if why else 'compute', line] += seconds
        self.run.emit(Bar('compute', self.now, seconds, kind, short_source(line)))
        self.now += seconds

    def copy(self, op: Instruction) -> None:
        line = self.simulation.line(op)
        if why := self.simulation.unknown(op, self.types):
            self.lose_track(why, line)
        seconds = self.simulation.op_seconds(op, self.types)
        self.copies = max(self.now, self.copies) + seconds
        self.ends[op.name] = self.copies, False
        begin = self.copies - seconds
        self.run.emit(Bar('copy', begin, seconds, 'copy', short_source(line)))

    def lose_track(self, why: str, line: str) -> None:
        """What goes on now is hidden for an unknown time."""
        self.run.unknown[f'{why}{self.simulation.at(line)}'] = None
        going = (span for span in self.flying if span.start + span.seconds > self.now)
        self.run.uncertain.update(span.row for span in going if span.row is not None)

    # --- loops, branches and calls --------------------------------------------------------------

    def call(self, op: Instruction) -> None:
        run, now = self.run, self.now
        inners = [self.simulation.runs[name] for name in _called(op)]
        inner = max(inners, key=lambda inner: inner.seconds)
        trips = self.simulation.trips.get(op.name) if op.opcode == 'while' else 1
        if op.opcode == 'conditional' or trips is None:
            self.guess(op, inners, inner)
        elif trips == 1:
            run.add(inner, 1)
            for span in inner.spans:
                run.emit(span._replace(start=now + span.start))
        elif trips:
            run.add(inner, trips)
            seconds, waiting = inner.seconds * trips, inner.total('exposed') * trips
            if busy := min(seconds, inner.total('busy') * trips):
                run.emit(Bar('network', now, busy, 'loop', 'inside the loop'))
            loop = Bar('compute', now, seconds, 'loop', f'{trips} iterations')
            run.emit(loop._replace(trips=trips, waiting=waiting, inner=tuple(inner.spans)))
        self.now += inner.seconds * (1 if trips is None else trips)

    def guess(self, op: Instruction, inners: Sequence[Run], inner: Run) -> None:
        """Takes the longest branch, or one iteration, and says that the time is unknown."""
        line, is_loop = self.simulation.line(op), op.opcode == 'while'
        self.lose_track('a loop of unknown length' if is_loop else 'a conditional', line)
        for each in inners:
            busy = {key for part, key in each.parts if part == 'busy'}
            self.run.untimed |= each.untimed | busy
        self.run.parts['unknown', line] += inner.seconds
        label = 'unknown length' if is_loop else 'branches'
        self.run.emit(Bar('compute', self.now, inner.seconds, 'unknown', label))


def _called(op: Instruction) -> list[str]:
    """The computations that an instruction runs on the compute queue, in turn or one of them."""
    if op.opcode == 'while':
        return op.callees['body']
    if op.opcode in _CONTROL:
        return [name for names in op.callees.values() for name in names]
    return []
