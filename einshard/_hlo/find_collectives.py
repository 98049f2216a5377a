"""The collectives of an optimized HLO program. Imports no JAX.

XLA writes a collective in many forms: as one instruction; as a pair of -start and -done; inside a
fusion, a call or an async-start; as a send and a recv; as a loop of dots and permutes; and on
TPU as a chain of fusions that each contain the collective and other operations. This module reads
each form as one `Collective`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .collective import KINDS, PERMUTE, Collective
from .groups import Groups, Slices, connected, count_slices, read_groups
from .loops import Executions
from .module import Computation, Instruction, Module, Place
from .origins import user_with_source
from .sources import number_of
from .widened import narrowed, widened_dtypes
from .windowed import collective_matmuls


def read_collectives(text: str, device_ids: Sequence[int] = ()) -> tuple[Collective, ...]:
    """Reads the collectives of an optimized program, in execution order.

    >>> from einshard._hlo.find_collectives import read_collectives
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
    modules = text.split('\nHloModule ')  # all JAX programs seen so far have one module
    return tuple(c for text in modules for c in find_collectives(Module(text), device_ids))


def find_collectives(module: Module, device_ids: Sequence[int] = ()) -> tuple[Collective, ...]:
    """Finds the collectives of a program, in execution order.

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
# the line of every instruction that communicates contains one of these
MARKS = ('replica_groups=', 'source_target_pairs=', _COMMUNICATES, _BETWEEN_SLICES)
_RENDEZVOUS = re.compile(
    r'_rendezvous="([^"]*)".*_xla_megascale_target="?([^"]*?)"?,'
    r'_xla_megascale_transfer_type="(\w+)"'
)
_PHASE = re.compile(r'custom_call_target="AsyncCollective(\w+)"')
_CHAIN_ID = re.compile(r'chain_id="(\d+)"')


class _Record(NamedTuple):
    order: tuple[int, ...]  # sorts by execution: the offsets of the call sites, then of `place`
    place: Place
    collective: Collective


class _Finder:
    def __init__(self, module: Module, device_ids: Sequence[int]):
        self.module = module
        self.slices = Slices(module.n_partitions, count_slices(module.text), device_ids)
        # {name of a computation: 'Start' or 'Done' if it calls AsyncCollectiveStart or -Done}
        self.phases: dict[str, str] = {}
        for _, comp, op in module.find('"AsyncCollective'):
            phase = _PHASE.search(op.attributes)
            self.phases[comp.name] = phase[1] if phase else ''

    def find(self) -> tuple[Collective, ...]:
        executions = Executions(self.module)
        candidates = [
            (place, fields, path)
            for place, fields in self.instructions()
            if (path := self.module.path(place.comp)) is not None
        ]
        repeated = self.repeated([place for place, _, _ in candidates], executions)
        records: list[_Record] = []
        for place, fields, path in candidates:
            collective = Collective(
                **fields,
                name=place.op.name,
                executions=executions.of(place.comp),
                n_devices=self.slices.n_devices,
                in_branch=self.module.is_in_branch(place.comp),
                **self.origin(path, place),
            )
            if collective.group_size > 1 and place.start not in repeated:
                order = (*(site.start for site in path), place.start)
                records.append(_Record(order, place, self.with_callers(path, place, collective)))
        return self.merged(records, executions)

    def merged(self, records: list[_Record], executions: Executions) -> tuple[Collective, ...]:
        """Merges the permutes of collective matmuls; returns the collectives in execution order."""
        permutes = {place: c.group_size for _, place, c in records if c.kind == PERMUTE}
        by_place = {record.place: record for record in records}
        for kind, comp, places in collective_matmuls(self.module, permutes):
            pieces = [by_place.pop(place) for place in places]
            by_place[places[0]] = _merge_permutes(pieces, kind, executions.of(comp))
        ordered = sorted(by_place.values(), key=lambda record: record.order)
        return tuple(record.collective for record in ordered)

    def instructions(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yields the instructions that communicate, each with fields of `Collective`."""
        transfers: dict[tuple[str, str], list[Place]] = {}
        for place in self.module.find(*MARKS):
            fields = self.read(place)
            if fields is not None:
                yield place, fields
            elif rendezvous := _RENDEZVOUS.search(place.op.attributes):
                transfers.setdefault((place.comp.name, rendezvous[1]), []).append(place)
        for places in transfers.values():
            # the send first, then the receive
            places.sort(key=lambda place: place.op.opcode != 'send')
            yield places[0], self.read_transfer(places[0].op, places[-1].op)

    def read(self, place: Place) -> dict[str, Any] | None:
        """Reads fields of `Collective` from the instruction at `place`.

        None for half of a transfer between slices, or if only a name chosen by the user matches.
        """
        op = place.op
        kind = op.opcode.removesuffix('-start')
        # from jax.lax.psend; GPU programs may also split a permute into send and recv
        is_send = kind == 'send' and 'source_target_pairs=' in op.attributes
        is_kernel = kind == 'custom-call' and _COMMUNICATES in op.attributes + op.metadata
        if not (is_send or is_kernel or kind in KINDS[:-1]):  # the last is custom-call
            return None
        operands = tuple(array for name in op.operands for array in place.comp[name].results)
        results = op.results
        dtypes = widened_dtypes(self.module, place.comp, op)
        if kind != op.opcode and len(results) > len(operands):  # a -start lists operands first
            results = results[len(operands) : 2 * len(operands)]
        if is_send or kind == 'ragged-all-to-all':
            operands = operands[:1]  # the others are offsets, sizes or a token
        if is_send:
            kind, results = PERMUTE, operands
        pairs: tuple[tuple[int, int], ...] = ()
        groups: Groups = ()
        if match := _PAIRS.search(op.attributes):
            pairs = tuple((a, b) for a, b in self.slices.within(read_groups(match[1])))
            groups = connected(pairs)
        elif match := _GROUPS.search(op.attributes):
            groups = self.slices.within(read_groups(match[1]))
        if not (groups or is_kernel or 'channel_id=' in op.attributes):
            groups = (tuple(range(self.slices.n_devices)),)  # '{}' means all devices
        return {
            'kind': kind,
            'operands': narrowed(operands, dtypes),
            'results': narrowed(results, dtypes),
            'groups': groups,
            'pairs': pairs,
            'is_async': is_send or _is_async(op),
            'widened': any(dtypes),
        }

    def read_transfer(self, send: Instruction, receive: Instruction) -> dict[str, Any]:
        """Reads a transfer between TPU slices: a send and a recv with the same rendezvous."""
        [(_, target, kind)] = _RENDEZVOUS.findall(send.attributes)
        groups = self.slices.parse_target(target)
        pairs = tuple((a, b) for a, b in groups) if '->' in target else ()
        return {
            'kind': PERMUTE if kind == 'ONE_TO_ONE' else kind.lower().replace('_', '-'),
            # the last two results are a context number and a token
            'operands': send.results[:-2],
            'results': receive.results[:-2],
            'groups': connected(pairs) if pairs else groups,
            'pairs': pairs,
            'is_async': True,
        }

    def phase(self, comp: Computation) -> str:
        """Returns the phase of `comp`, or else of the computation it is fused into; '' if none."""
        fusions = [site for site in self.module.call_sites(comp) if site.op.opcode == 'fusion']
        return self.phases.get(comp.name) or (self.phase(fusions[0].comp) if fusions else '')

    def repeated(self, places: Sequence[Place], executions: Executions) -> set[int]:
        """Returns the offsets of those `places` that repeat the collective of another one.

        A TPU program may spread an asynchronous collective over several fusions, and repeat its
        instruction in each. The first one has the phase 'Start'; if none has, it is the one that
        runs least often.
        """
        by_id: dict[tuple[int, str], list[Place]] = {}
        repeated: set[int] = set()
        for place in places:
            phase, (channel_id, chain_id) = self.phase(place.comp), _async_id(place.op)
            if phase == 'Done':
                repeated.add(place.start)
            elif phase or (chain_id and self.is_fused(place.comp)):
                by_id.setdefault((channel_id, chain_id), []).append(place)
        for same in by_id.values():
            first = [place.start for place in same if self.phase(place.comp) == 'Start']
            if not first:
                runs = {place.start: executions.of(place.comp) for place in same}
                first = [min(runs, key=lambda at: (runs[at] is None, runs[at] or 0))]
            repeated.update(place.start for place in same if place.start not in first)
        return repeated

    def is_fused(self, comp: Computation) -> bool:
        return any(site.op.opcode == 'fusion' for site in self.module.call_sites(comp))

    def origin(self, path: Sequence[Place], place: Place) -> dict[str, Any]:
        """Finds the `source`, `called_at` and `op_name` of a collective.

        Falls back to those of its call sites, then to those of its consumers.
        """
        named = place.op
        for _, _, op in reversed(path):
            if op.opcode not in ('while', 'conditional') and not named.op_name:
                named = op
        sourced, module = named, self.module
        if module.source(named) is None and (not named.op_name or module.sources.has_stacks):
            # The compiler inserted the collective: use the line of a consumer. But if HLO without
            # stack frames (JAX 0.8) has an op_name and no line, JAX did not know the line.
            sourced = user_with_source(module, place.comp, place.op.name) or named
        return {
            'source': module.source(sourced),
            'called_at': module.sources.caller(sourced.metadata),
            'op_name': named.op_name or sourced.op_name,
        }

    def with_callers(self, path: Sequence[Place], place: Place, found: Collective) -> Collective:
        """Corrects `is_async`, `kind` and `results` of `found` from the call sites in `path`."""
        if self.phase(place.comp) == 'Start' or any(_is_async(site.op) for site in path):
            found = replace(found, is_async=True)
        for _, _, op in reversed(path):
            called = self.module.called(op) if op.opcode == 'fusion' else None
            is_sliced = called is not None and called.root.opcode == 'dynamic-slice'
            if is_sliced and found.kind == 'all-reduce':  # how TPU writes a reduce-scatter
                found = replace(found, kind='reduce-scatter', results=op.results)
        return found


def _merge_permutes(records: Sequence[_Record], kind: str, executions: int | None) -> _Record:
    """Merges the permutes of a collective matmul into the all-gather or reduce-scatter `kind`."""
    permutes = [record.collective for record in records]
    piece = max((p.operands for p in permutes), key=lambda arrays: sum(a.bytes for a in arrays))
    n = max(permute.group_size for permute in permutes)
    operands, results = (piece, piece * n) if kind == 'all-gather' else (piece * n, piece)
    sent = [(permute.network_bytes or 0) * (permute.executions or 1) for permute in permutes]
    merged = replace(
        max(permutes, key=lambda permute: permute.executions or 0),
        name=permutes[0].name,
        kind=kind,
        operands=operands,
        results=results,
        pairs=(),
        executions=executions,
        is_async=any(permute.is_async for permute in permutes),
        sent=sum(sent) // (executions or 1),
    )
    return records[0]._replace(collective=merged)


def _async_id(op: Instruction) -> tuple[int, str]:
    """Returns (channel_id, chain_id), equal for all instructions of an asynchronous collective."""
    chain_id = _CHAIN_ID.search(op.attributes)
    return number_of('channel_id', op.attributes), chain_id[1] if chain_id else ''


def _is_async(op: Instruction) -> bool:
    """Whether an instruction can overlap with others. With JAX 0.8, not every -start on GPU can."""
    is_sync = '"is_sync":true' in op.attributes + op.metadata
    return op.opcode.endswith('-start') and not is_sync
