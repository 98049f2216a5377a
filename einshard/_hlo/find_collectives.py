"""Finds the collectives of an optimized HLO program.

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
from .module import Computation, Instruction, Module, Site
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

    Omits collectives in groups of one device, which send nothing.

    Args:
        module: the compiled program.
        device_ids: the ids of the program's devices in order. Needed only for multi-slice TPU
            programs, whose text contains ids. Default: sorted by id.
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
    order: tuple[int, ...]  # the text offsets of the call sites and of `site`
    site: Site
    collective: Collective


class _Finder:
    def __init__(self, module: Module, device_ids: Sequence[int]):
        self.module = module
        self.slices = Slices(module.n_partitions, count_slices(module.text), device_ids)
        # {computation: 'Start' if it calls AsyncCollectiveStart, 'Done' if AsyncCollectiveDone}
        self.phases: dict[str, str] = {}
        for _, comp, op in module.find('"AsyncCollective'):
            phase = _PHASE.search(op.attributes)
            self.phases[comp.name] = phase[1] if phase else ''

    def find(self) -> tuple[Collective, ...]:
        executions = Executions(self.module)
        candidates = [
            (site, fields, path)
            for site, fields in self.instructions()
            if (path := self.module.path(site.comp)) is not None
        ]
        repeated = self.repeated([site for site, _, _ in candidates], executions)
        records: list[_Record] = []
        for site, fields, path in candidates:
            collective = Collective(
                **fields,
                name=site.op.name,
                executions=executions.of(site.comp),
                n_devices=self.slices.n_devices,
                in_branch=self.module.is_in_branch(site.comp),
                **self.origin(path, site),
            )
            if collective.group_size > 1 and site.start not in repeated:
                order = (*(call.start for call in path), site.start)
                records.append(_Record(order, site, self.with_callers(path, site, collective)))
        return self.merged(records, executions)

    def merged(self, records: list[_Record], executions: Executions) -> tuple[Collective, ...]:
        """Merges the permutes of collective matmuls, and sorts by execution order."""
        permutes = {site: c.group_size for _, site, c in records if c.kind == PERMUTE}
        by_site = {record.site: record for record in records}
        for kind, comp, sites in collective_matmuls(self.module, permutes):
            pieces = [by_site.pop(site) for site in sites]
            by_site[sites[0]] = _merge_permutes(pieces, kind, executions.of(comp))
        ordered = sorted(by_site.values(), key=lambda record: record.order)
        return tuple(record.collective for record in ordered)

    def instructions(self) -> Iterator[tuple[Site, dict[str, Any]]]:
        """Yields the sites that communicate, each with some fields of its `Collective`."""
        transfers: dict[tuple[str, str], list[Site]] = {}
        for site in self.module.find(*MARKS):
            fields = self.read(site)
            if fields is not None:
                yield site, fields
            elif rendezvous := _RENDEZVOUS.search(site.op.attributes):
                transfers.setdefault((site.comp.name, rendezvous[1]), []).append(site)
        for sites in transfers.values():
            # the send first, then the receive
            sites.sort(key=lambda site: site.op.opcode != 'send')
            yield sites[0], self.read_transfer(sites[0].op, sites[-1].op)

    def read(self, site: Site) -> dict[str, Any] | None:
        """Reads fields of `Collective` from the instruction at `site`.

        Returns None for any recv, for a send between slices (see `read_transfer`), and for an
        instruction in which only a user-chosen name contains one of `MARKS`.
        """
        op = site.op
        kind = op.opcode.removesuffix('-start')
        # from jax.lax.psend; GPU programs may also split a permute into send and recv
        is_send = kind == 'send' and 'source_target_pairs=' in op.attributes
        is_kernel = kind == 'custom-call' and _COMMUNICATES in op.attributes + op.metadata
        if not (is_send or is_kernel or kind in KINDS[:-1]):  # the last is custom-call
            return None
        operands = tuple(array for name in op.operands for array in site.comp[name].results)
        results = op.results
        dtypes = widened_dtypes(self.module, site.comp, op)
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
            groups = (tuple(range(self.slices.n_devices)),)  # '{}', without a channel
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
        """Returns the phase of `comp`, or of the computation it is fused into, or ''."""
        fusions = [site for site in self.module.call_sites(comp) if site.op.opcode == 'fusion']
        return self.phases.get(comp.name) or (self.phase(fusions[0].comp) if fusions else '')

    def repeated(self, sites: Sequence[Site], executions: Executions) -> set[int]:
        """Returns the text offsets of the sites that repeat another site's collective.

        A TPU program may spread an asynchronous collective over several fusions, and repeat its
        instruction in each. Only the site in phase 'Start' counts. If no site has that phase, only
        the one that runs least often counts.
        """
        by_id: dict[tuple[int, str], list[Site]] = {}
        repeated: set[int] = set()
        for site in sites:
            phase, (channel_id, chain_id) = self.phase(site.comp), _async_id(site.op)
            if phase == 'Done':
                repeated.add(site.start)
            elif phase or (chain_id and self.is_fused(site.comp)):
                by_id.setdefault((channel_id, chain_id), []).append(site)
        for same in by_id.values():
            counted = [site.start for site in same if self.phase(site.comp) == 'Start']
            if not counted:
                runs = {site.start: executions.of(site.comp) for site in same}
                counted = [min(runs, key=lambda at: (runs[at] is None, runs[at] or 0))]
            repeated.update(site.start for site in same if site.start not in counted)
        return repeated

    def is_fused(self, comp: Computation) -> bool:
        return any(site.op.opcode == 'fusion' for site in self.module.call_sites(comp))

    def origin(self, path: Sequence[Site], site: Site) -> dict[str, Any]:
        """Returns the `source`, `called_at` and `op_name` of a collective.

        Falls back to its call sites, then to its consumers.
        """
        named = site.op
        for _, _, op in reversed(path):
            if op.opcode not in ('while', 'conditional') and not named.op_name:
                named = op
        sourced, module = named, self.module
        if module.source(named) is None and (not named.op_name or module.sources.has_stacks):
            # The compiler inserted the collective: use the line of a consumer. But without stack
            # frames (JAX 0.8), an op_name and no line means that JAX did not know the line.
            sourced = user_with_source(module, site.comp, site.op.name) or named
        return {
            'source': module.source(sourced),
            'called_at': module.sources.caller(sourced.metadata),
            'op_name': named.op_name or sourced.op_name,
        }

    def with_callers(self, path: Sequence[Site], site: Site, found: Collective) -> Collective:
        """Corrects `is_async`, `kind` and `results` of `found` from the call sites in `path`."""
        if self.phase(site.comp) == 'Start' or any(_is_async(call.op) for call in path):
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
