"""Optimised HLO text to the collectives of the program; no JAX.

XLA shows one collective in many ways: as an instruction, as a pair of -start and -done, inside a
computation that a fusion, a call or an async-start runs, as a send with its recv, and on TPU as a
chain of fusions that all contain it while they compute something else. Here each is one
`Collective`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .device_groups import Groups, Slices, connected, count_slices, read_groups
from .syntax import (
    ArrayType,
    Instruction,
    Program,
    Sources,
    array_types,
    number_of,
    op_name,
    read_instruction,
)
from .trip_counts import trip_count

KINDS = (
    'all-reduce',
    'all-gather',
    'reduce-scatter',
    'all-to-all',
    'collective-permute',
    'ragged-all-to-all',
    'collective-broadcast',
)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: one of KINDS.
        name: of its instruction in the program.
        operands: what each device puts in. Of a ragged all-to-all the data alone.
        results: what each device gets.
        groups: positions, in the program's list of devices, of those that communicate with each
            other. Of a permute, the devices that its pairs connect. Empty if the text does not
            tell them, as JAX 0.8 to 0.10 with a newer libtpu.
        pairs: of a permute, who sends to whom.
        times: how often it runs in one run of the program: by the trip counts of the loops around
            it, and once for each branch of a conditional. None in a loop whose trip count the
            compiler does not know.
        is_async: whether the program computes something else while it runs.
        source: 'model.py:12', with the path as JAX knows it, or None.
        op_name: JAX's name for what became it, such as 'jit(step)/jvp()/dot_general'.
        n_devices: devices of the whole program.
    """

    kind: str
    name: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    times: int | None
    is_async: bool
    source: str | None
    op_name: str
    n_devices: int

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The arrays in full: results of an all-gather, operands of all others."""
        return self.results if self.kind == 'all-gather' else self.operands

    @property
    def shape_text(self) -> str:
        return ', '.join(map(str, self.arrays))

    @property
    def parties(self) -> int:
        """How many devices communicate with each other, at most."""
        return max(map(len, self.groups), default=self.n_devices)

    @property
    def n_groups(self) -> int:
        return len(self.groups) or 1

    @property
    def bytes(self) -> int:
        """Bytes of `arrays`, on one device."""
        return sum(array.bytes for array in self.arrays)

    @property
    def network_bytes(self) -> int:
        """Bytes that a device sends in one run of it, rounded up.

        By the bandwidth terms of ring algorithms (Thakur, Rabenseifner, Gropp: Optimization of
        Collective Communication Operations in MPICH, 2005): of the array in full, (n-1)/n for an
        all-gather, a reduce-scatter or an all-to-all, and an all-reduce is a reduce-scatter and an
        all-gather. In a permute a device sends its operand, if to another; in a broadcast each but
        the last passes the array on. Of a ragged all-to-all, which is told how much goes where
        when it runs, this is what it sends if all pieces are equal.
        """
        n = self.parties
        if self.kind == 'collective-permute':
            return self.bytes if any(a != b for a, b in self.pairs) else 0
        if self.kind == 'collective-broadcast':
            return self.bytes if n > 1 else 0
        rounds = 2 if self.kind == 'all-reduce' else 1
        return -(-rounds * self.bytes * (n - 1) // n)


def read_collectives(text: str, device_ids: Sequence[int] = ()) -> tuple[Collective, ...]:
    """The collectives of an optimised program, in the order in which they run.

    >>> from einshard._hlo.collectives import read_collectives
    >>> text = '''HloModule jit_f, num_partitions=4
    ...
    ... ENTRY %main (x: f32[2,8]) -> f32[8,8] {
    ...   %x = f32[2,8]{1,0} parameter(0)
    ...   ROOT %g = f32[8,8]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
    ... }
    ... '''
    >>> [g] = read_collectives(text)
    >>> g.kind, g.shape_text, g.groups, g.times, g.network_bytes
    ('all-gather', 'f32[8,8]', ((0, 1, 2, 3),), 1, 192)

    Args:
        text: of a compiled program, `jax.jit(f).lower(...).compile().as_text()`.
        device_ids: the ids of the program's devices in its order, which matter for TPU slices
            alone: their text has ids. Without, slices come one after another, chips by their ids.
    """
    modules = text.split('\nHloModule ')  # one, in all that JAX was seen to compile
    return tuple(one for module in modules for one in _Reader(module, device_ids).read())


@dataclass(slots=True)
class _Computation:
    """What is known of a computation that runs collectives."""

    name: str
    header: str
    times: dict[int, int | None] = field(default_factory=dict[int, int | None])  # by collective
    begun: set[int] = field(default_factory=set[int])  # channels of chains of async fusions
    meetings: dict[str, int] = field(default_factory=dict[str, int])  # of slices, unfinished
    phase: str = ''  # 'Start' or 'Done' of a chain of async fusions
    root: str = ''  # its opcode


_LINE = re.compile('.+')
_CALLEES = re.compile(
    r'\b(?:calls|to_apply|(condition)|body|(?:true|false)_computation'
    r'|(?:branch|called)_computations)=(?:\{(%[^}]*)\}|(%[^\s,]+))'
)
_GROUPS = re.compile(
    r'replica_groups=(\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?'
    r'|mesh\[[^\]]*\](?:, device_ids=\((?:\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? \{[^}]*\}|\{\})'
)
_PAIRS = re.compile(r'source_target_pairs=(\{\{[\d,{}]*\}\})')
_ASYNC_FUSION = 'custom_call_target="AsyncCollective'
_BETWEEN_SLICES = '_xla_megascale_transfer_type="'
_MEETING = re.compile(
    r'_rendezvous="([^"]*)".*_xla_megascale_target="?([^"]*?)"?,'
    r'_xla_megascale_transfer_type="(\w+)"'
)


class _Reader:
    """One pass over the lines: callees come before their callers, and the entry last."""

    def __init__(self, text: str, device_ids: Sequence[int]):
        self.program = Program(text)
        self.found: list[Collective] = []
        self.channels: list[int] = []  # of those found
        self.computations: dict[str, _Computation] = {}
        first = re.search(r'\n(?:%|ENTRY )', text)
        self.head_end = first.start() + 1 if first else len(text)
        head = text[: self.head_end]
        self.sources = Sources(head.splitlines())
        n_partitions = number_of('num_partitions', head) or number_of('replica_count', head) or 1
        self.slices = Slices(n_partitions, count_slices(text), device_ids)

    def read(self) -> tuple[Collective, ...]:
        entry = here = _Computation('', '')
        for match in _LINE.finditer(self.program.text, self.head_end):
            line = match[0]
            if line[0] == ' ':
                self.read_line(line, here)
            elif line[-1] == '{':
                name = line.removeprefix('ENTRY ').split(' ', 1)[0].lstrip('%')
                here = _Computation(name, line)
                entry = here if line.startswith('ENTRY ') else entry
                self.program.open(name, match.end())
            elif here.times:
                self.computations[here.name] = here
        return tuple(replace(self.found[i], times=times) for i, times in entry.times.items())

    def read_line(self, line: str, here: _Computation) -> None:
        if 'replica_groups=' in line or 'source_target_pairs=' in line:
            self.read_collective(line, here)
        elif _BETWEEN_SLICES in line:
            self.read_transfer(line, here)
        elif _ASYNC_FUSION in line:
            here.phase = line.partition(_ASYNC_FUSION)[2].partition('"')[0]
        elif self.computations:
            self.read_call(line, here)
        if here.times and line.startswith('  ROOT '):
            here.root = read_instruction(line).opcode

    def read_collective(self, line: str, here: _Computation) -> None:
        made = read_instruction(line)
        kind = made.opcode.removesuffix('-start')
        # jax.lax.psend is one, and GPU programs may take a permute apart
        is_send = kind == 'send' and 'source_target_pairs=' in made.attributes
        if kind not in KINDS and not is_send:  # a name of the user's was taken for groups
            return self.read_call(line, here)
        operands = self.operands(made, here)
        results = made.results
        if kind != made.opcode and len(results) > len(operands):  # it shows its operands, too
            results = results[len(operands) : 2 * len(operands)]
        if is_send:
            kind, results = 'collective-permute', operands[:1]
        pairs: tuple[tuple[int, int], ...] = ()
        groups: Groups = ()
        if found := _PAIRS.search(made.attributes):
            pairs = tuple((a, b) for a, b in self.slices.within(read_groups(found[1])))
            groups = connected(pairs)
        elif found := _GROUPS.search(made.attributes):
            groups = self.slices.within(read_groups(found[1]))
        if not groups and 'channel_id=' not in made.attributes:
            groups = (tuple(range(self.slices.n_devices)),)
        self.add(
            Collective(
                kind=kind,
                name=made.name,
                # the others are offsets and sizes, or a token
                operands=operands[:1] if is_send or kind == 'ragged-all-to-all' else operands,
                results=results,
                groups=groups,
                pairs=pairs,
                times=1,
                is_async=is_send or _is_async(made),
                source=self.sources.line(made.metadata),
                op_name=op_name(made.metadata),
                n_devices=self.slices.n_devices,
            ),
            number_of('channel_id', made.attributes),
            here,
        )

    def read_transfer(self, line: str, here: _Computation) -> None:
        """Between TPU slices a collective is a send and a receive that name each other."""
        made = read_instruction(line)
        meeting = _MEETING.search(made.attributes)
        if not meeting:
            return
        name, target, transfer = meeting.groups()
        kind = _TRANSFERS.get(transfer, transfer.lower().replace('_', '-'))
        if name not in here.meetings:
            here.meetings[name] = len(self.found)
            groups = self.slices.across(target)
            pairs = tuple((a, b) for a, b in groups) if '->' in target else ()
            self.add(
                Collective(
                    kind=kind,
                    name=made.name,
                    operands=(),
                    results=(),
                    groups=connected(pairs) if pairs else groups,
                    pairs=pairs,
                    times=1,
                    is_async=True,
                    source=self.sources.line(made.metadata),
                    op_name=op_name(made.metadata),
                    n_devices=self.slices.n_devices,
                ),
                number_of('channel_id', made.attributes),
                here,
            )
        i = here.meetings[name]
        data = made.results[:-2]  # then a number and a token
        if made.opcode == 'send':
            self.found[i] = replace(self.found[i], name=made.name, operands=data)
        else:
            self.found[i] = replace(self.found[i], results=data)

    def operands(self, made: Instruction, here: _Computation) -> tuple[ArrayType, ...]:
        """Their types, from where they are made."""
        return tuple(
            array
            for name in made.operands
            for array in self.program.instruction(here.name, name).results
        )

    def add(self, collective: Collective, channel: int, here: _Computation) -> None:
        here.times[len(self.found)] = 1
        self.found.append(collective)
        self.channels.append(channel)

    def read_call(self, line: str, here: _Computation) -> None:
        if '=%' not in line and '={%' not in line:  # which most lines have not
            return
        # what comes after may hold words of the user
        attributes = line.partition(', metadata={')[0].partition(', backend_config=')[0]
        callees = [
            (self.computations[name], condition != '')
            for condition, several, one in _CALLEES.findall(attributes)
            for name in (several or one).replace('%', '').split(', ')
            if name in self.computations
        ]
        if not callees:
            return
        made = read_instruction(line)
        if made.opcode.endswith(('-update', '-done')):
            return
        runs = trip_count(self.program, here.name, line, made) if made.opcode == 'while' else 1
        for callee, is_condition in callees:
            if callee.phase != 'Done':
                # a condition holds once for each run of the body, and then fails
                n = runs + 1 if is_condition and runs is not None else runs
                self.include(callee, n, made, here)

    def include(
        self, callee: _Computation, runs: int | None, made: Instruction, here: _Computation
    ) -> None:
        for i, times in callee.times.items():
            if callee.phase == 'Start':
                here.begun.add(self.channels[i])
            elif made.opcode == 'fusion' and self.channels[i] in here.begun:
                continue  # a later link of the chain
            before = here.times.get(i, 0)
            known = None not in (runs, times, before)
            here.times[i] = (before or 0) + (runs or 0) * (times or 0) if known else None
            found = self.found[i]
            if _is_async(made) or callee.phase == 'Start':
                found = replace(found, is_async=True)
            if made.opcode not in ('while', 'conditional') and not found.op_name:
                source = self.sources.line(made.metadata)
                found = replace(found, op_name=op_name(made.metadata), source=source)
            is_sliced = made.opcode == 'fusion' and callee.root == 'dynamic-slice'
            if is_sliced and found.kind == 'all-reduce':  # so TPU writes a reduce-scatter
                results = array_types(callee.header.rpartition(' -> ')[2])
                found = replace(found, kind='reduce-scatter', results=results)
            self.found[i] = found


_TRANSFERS = {'ONE_TO_ONE': 'collective-permute'}


def _is_async(made: Instruction) -> bool:
    """Whether other work goes on after it; on GPU, JAX 0.8 also writes a -start where none does."""
    waits = '"is_sync":true' in made.attributes + made.metadata
    return made.opcode.endswith('-start') and not waits
