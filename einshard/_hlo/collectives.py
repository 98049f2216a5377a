"""The collectives of an optimized HLO program. Imports no JAX.

XLA writes a collective in many forms: as one instruction; as a pair of -start and -done; inside a
fusion, a call or an async-start; as a send and a recv; and on TPU as a chain of fusions that all
contain it while they compute something else. Each becomes one `Collective` here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .groups import Groups, Slices, connected, count_slices, read_groups
from .loops import Executions
from .module import ArrayType, Computation, Instruction, Module, Place
from .sources import number_of

KINDS = (
    'all-reduce',
    'all-gather',
    'reduce-scatter',
    'all-to-all',
    'collective-permute',
    'ragged-all-to-all',
    'collective-broadcast',
    'custom-call',
)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: one of KINDS.
        name: the name of its instruction.
        operands: the inputs of each device; only the data of a ragged all-to-all.
        results: the outputs of each device.
        groups: the devices that communicate with each other, as positions in the device list of the
            program; for a permute, connected devices. Empty if the text does not list them, as for
            a custom call, and with JAX 0.8 to 0.10 and a newer libtpu.
        pairs: (source, target) of a permute.
        executions: how often it runs in one run of the program: the product of loop trip counts;
            all branches of a conditional count. None if a trip count is unknown.
        is_async: whether it overlaps with computation.
        source: 'model.py:12', with the path that JAX reports, or None.
        op_name: the JAX operation it comes from, such as 'jit(step)/jvp()/dot_general'.
        n_devices: the number of devices of the program.
    """

    kind: str
    name: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    executions: int | None
    is_async: bool
    source: str | None
    op_name: str
    n_devices: int

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The larger side: results of an all-gather, operands of all others."""
        return self.results if self.kind == 'all-gather' else self.operands

    @property
    def shape_text(self) -> str:
        return ', '.join(map(str, self.arrays))

    @property
    def group_size(self) -> int:
        """The size of the largest group."""
        return max(map(len, self.groups), default=self.n_devices)

    @property
    def n_groups(self) -> int:
        return len(self.groups) or 1

    @property
    def bytes(self) -> int:
        """Bytes of `arrays`, per device."""
        return sum(array.bytes for array in self.arrays)

    @property
    def network_bytes(self) -> int | None:
        """Bytes that a device sends in one execution, rounded up; None for a custom call.

        The bandwidth terms of ring algorithms, from Thakur, Rabenseifner, Gropp: "Optimization of
        Collective Communication Operations in MPICH", 2005. An all-gather, reduce-scatter or
        all-to-all in groups of n sends (n-1)/n of the array; an all-reduce sends twice that. In a
        permute, a device sends its operand unless the target is itself. In a broadcast, every
        device but the last sends the array. The sizes of a ragged all-to-all are known only at run
        time: this assumes equal pieces.
        """
        n = self.group_size
        if self.kind == 'custom-call':
            return None
        if self.kind == 'collective-permute':
            return self.bytes if any(a != b for a, b in self.pairs) else 0
        if self.kind == 'collective-broadcast':
            return self.bytes if n > 1 else 0
        rounds = 2 if self.kind == 'all-reduce' else 1
        return -(-rounds * self.bytes * (n - 1) // n)


def read_collectives(text: str, device_ids: Sequence[int] = ()) -> tuple[Collective, ...]:
    """The collectives of an optimized program, in execution order.

    >>> from einshard._hlo.collectives import read_collectives
    >>> text = '''HloModule jit_f, num_partitions=4
    ...
    ... ENTRY %main (x: f32[2,8]) -> f32[8,8] {
    ...   %x = f32[2,8]{1,0} parameter(0)
    ...   ROOT %g = f32[8,8]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
    ... }
    ... '''
    >>> [g] = read_collectives(text)
    >>> g.kind, g.shape_text, g.groups, g.executions, g.network_bytes
    ('all-gather', 'f32[8,8]', ((0, 1, 2, 3),), 1, 192)

    Args:
        text: the program, from `jax.jit(f).lower(...).compile().as_text()`.
        device_ids: as for `find_collectives`.
    """
    modules = text.split('\nHloModule ')  # JAX programs seen so far have one
    return tuple(one for text in modules for one in find_collectives(Module(text), device_ids))


def find_collectives(module: Module, device_ids: Sequence[int] = ()) -> tuple[Collective, ...]:
    """The collectives of a program, in execution order.

    Collectives in groups of one device are omitted: compilers leave them in, but they send nothing.

    Args:
        module: the compiled program.
        device_ids: the ids of the program's devices in order. Needed only for multi-slice TPU
            programs, whose text contains ids. Default: slice by slice, chips ordered by id.
    """
    return _Finder(module, device_ids).find()


_GROUPS = re.compile(
    r'replica_groups=(\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?'
    r'|mesh\[[^\]]*\](?:, device_ids=\((?:\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? \{[^}]*\}|\{\})'
)
_PAIRS = re.compile(r'source_target_pairs=(\{\{[\d,{}]*\}\})')
_COMMUNICATES = '"has_communication":true'  # in Pallas kernels for TPU
_BETWEEN_SLICES = '_xla_megascale_transfer_type="'
# every line that communicates has one of these
MARKS = ('replica_groups=', 'source_target_pairs=', _COMMUNICATES, _BETWEEN_SLICES)
_MEETING = re.compile(
    r'_rendezvous="([^"]*)".*_xla_megascale_target="?([^"]*?)"?,'
    r'_xla_megascale_transfer_type="(\w+)"'
)
_TRANSFERS = {'ONE_TO_ONE': 'collective-permute'}
_PHASE = re.compile(r'custom_call_target="AsyncCollective(\w+)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')


class _Finder:
    def __init__(self, module: Module, device_ids: Sequence[int]):
        self.module = module
        self.slices = Slices(module.n_partitions, count_slices(module.text), device_ids)
        # 'Start' or 'Done' for the fused computations at the ends of an asynchronous chain
        self.phases: dict[str, str] = {}
        for _, here, made in module.find('"AsyncCollective'):
            phase = _PHASE.search(made.attributes)
            self.phases[here.name] = phase[1] if phase else ''

    def find(self) -> tuple[Collective, ...]:
        found = list(self.instructions())
        started = (place.made for place, _ in found if self.phase(place.here) == 'Start')
        chains = {chain for made in started if (chain := _chain(made))[0]}
        executions = Executions(self.module)
        ordered: list[tuple[tuple[int, ...], Collective]] = []
        for place, what in found:
            path = self.module.path(place.here)
            if path is None or self.is_link(place, chains):
                continue
            one = Collective(
                **what,
                name=place.made.name,
                executions=executions.of(place.here),
                source=self.module.source(place.made),
                op_name=place.made.op_name,
                n_devices=self.slices.n_devices,
            )
            if one.group_size > 1:
                order = (*(site.start for site in path), place.start)
                ordered.append((order, self.with_callers(path, place, one)))
        return tuple(one for _, one in sorted(ordered, key=lambda pair: pair[0]))

    def instructions(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """The instructions that communicate, with fields of `Collective`."""
        meetings: dict[tuple[str, str], list[Place]] = {}
        for place in self.module.find(*MARKS):
            what = self.read(place)
            if what is not None:
                yield place, what
            elif meeting := _MEETING.search(place.made.attributes):
                meetings.setdefault((place.here.name, meeting[1]), []).append(place)
        for places in meetings.values():
            # the send first, then the receive
            places.sort(key=lambda place: place.made.opcode != 'send')
            yield places[0], self.read_transfer(places[0].made, places[-1].made)

    def read(self, place: Place) -> dict[str, Any] | None:
        """Fields of `Collective`; None if it is not one: user-given names may contain marks."""
        made = place.made
        kind = made.opcode.removesuffix('-start')
        # from jax.lax.psend; GPU programs may also split a permute into send and recv
        is_send = kind == 'send' and 'source_target_pairs=' in made.attributes
        is_kernel = kind == 'custom-call' and _COMMUNICATES in made.attributes + made.metadata
        if not (is_send or is_kernel or kind in KINDS[:-1]):
            return None
        operands = tuple(array for name in made.operands for array in place.here[name].results)
        results = made.results
        if kind != made.opcode and len(results) > len(
            operands
        ):  # its type lists the operands first
            results = results[len(operands) : 2 * len(operands)]
        if is_send or kind == 'ragged-all-to-all':
            operands = operands[:1]  # the others are offsets, sizes or a token
        if is_send:
            kind, results = 'collective-permute', operands
        pairs: tuple[tuple[int, int], ...] = ()
        groups: Groups = ()
        if found := _PAIRS.search(made.attributes):
            pairs = tuple((a, b) for a, b in self.slices.within(read_groups(found[1])))
            groups = connected(pairs)
        elif found := _GROUPS.search(made.attributes):
            groups = self.slices.within(read_groups(found[1]))
        if not (groups or is_kernel or 'channel_id=' in made.attributes):
            groups = (tuple(range(self.slices.n_devices)),)
        return {
            'kind': kind,
            'operands': operands,
            'results': results,
            'groups': groups,
            'pairs': pairs,
            'is_async': is_send or _is_async(made),
        }

    def read_transfer(self, send: Instruction, receive: Instruction) -> dict[str, Any]:
        """Fields of a transfer between TPU slices: a send and a recv with one rendezvous."""
        meeting = _MEETING.search(send.attributes)
        assert meeting is not None
        _, target, transfer = meeting.groups()
        groups = self.slices.across(target)
        pairs = tuple((a, b) for a, b in groups) if '->' in target else ()
        return {
            'kind': _TRANSFERS.get(transfer, transfer.lower().replace('_', '-')),
            # the last two are a number and a token
            'operands': send.results[:-2],
            'results': receive.results[:-2],
            'groups': connected(pairs) if pairs else groups,
            'pairs': pairs,
            'is_async': True,
        }

    def phase(self, here: Computation) -> str:
        """The end of an asynchronous chain that a computation belongs to: 'Start', 'Done' or ''."""
        fusions = [site for site in self.module.call_sites(here) if site.made.opcode == 'fusion']
        return self.phases.get(here.name) or (self.phase(fusions[0].here) if fusions else '')

    def is_link(self, place: Place, chains: Collection[object]) -> bool:
        """Whether it is a later link of an asynchronous chain, which counts only at its start."""
        if phase := self.phase(place.here):
            return phase == 'Done'
        sites = self.module.call_sites(place.here)
        is_fused = any(site.made.opcode == 'fusion' for site in sites)
        return is_fused and _chain(place.made) in chains

    def with_callers(self, path: Sequence[Place], place: Place, one: Collective) -> Collective:
        """Adds information from the instructions that run its computation."""
        if self.phase(place.here) == 'Start' or any(_is_async(site.made) for site in path):
            one = replace(one, is_async=True)
        for _, _, made in reversed(path):
            if made.opcode not in ('while', 'conditional') and not one.op_name:
                one = replace(one, op_name=made.op_name, source=self.module.source(made))
            called = self.module.called(made) if made.opcode == 'fusion' else None
            is_sliced = called is not None and called[''].opcode == 'dynamic-slice'
            if is_sliced and one.kind == 'all-reduce':  # TPU writes a reduce-scatter like this
                one = replace(one, kind='reduce-scatter', results=made.results)
        return one


def _chain(made: Instruction) -> tuple[int, str]:
    """(channel id, chain id), which the links of an asynchronous chain share."""
    chain = _CHAIN.search(made.attributes)
    return number_of('channel_id', made.attributes), chain[1] if chain else ''


def _is_async(made: Instruction) -> bool:
    """Whether it overlaps with other work; on GPU, JAX 0.8 also writes synchronous -starts."""
    waits = '"is_sync":true' in made.attributes + made.metadata
    return made.opcode.endswith('-start') and not waits
