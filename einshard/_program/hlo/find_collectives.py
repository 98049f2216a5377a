"""Finds the collectives of an optimized HLO program.

XLA writes a collective in many forms: as one instruction; as a pair of -start and -done; inside a
fusion, a call or an async-start; as a send and a recv; as a loop of dots and permutes; and on
TPU as a chain of fusions that each contain the collective and other operations. This module reads
each form as one `Collective`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from .collective import KINDS, PERMUTE, Collective
from .collective_matmuls import find_collective_matmuls
from .graph import CallSite, Graph, Node
from .groups import MAX_DEVICES, Groups, Slices, connected, count_slices, read_groups, read_pairs
from .integers import count_trips
from .opcodes import FREE, SHAPES
from .queries import strip
from .sources import number_of
from .text import ArrayType, HloModule, Instruction, LineErrors, Unreadable


def read_collectives(text: str, device_ids: Sequence[int] = ()) -> tuple[Collective, ...]:
    """Reads the collectives of an optimized program, in execution order.

    >>> from einshard._program.hlo.find_collectives import read_collectives
    >>> text = '''HloModule jit_f, num_partitions=4
    ...
    ... ENTRY %main (x: f32[2,8]) -> f32[8,8] {
    ...   %x = f32[2,8]{1,0} parameter(0)
    ...   ROOT %g = f32[8,8]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
    ... }
    ... '''
    >>> [g] = read_collectives(text)
    >>> g.kind, g.arrays, g.device_groups, g.executions, g.network_bytes
    ('all-gather', 'f32[8,8]', ((0, 1, 2, 3),), 1, 192)

    Args:
        text: the program, from `jax.jit(f).lower(...).compile().as_text()`.
        device_ids: as for `find_collectives`.
    """
    first, *others = text.split('\nHloModule ')  # all JAX programs seen so far have one module
    texts = [first, *(f'HloModule {other}' for other in others)]
    graphs = (Graph(HloModule(text)) for text in texts)
    return tuple(c for graph in graphs for c in find_collectives(graph, device_ids))


def find_collectives(graph: Graph, device_ids: Sequence[int] = ()) -> tuple[Collective, ...]:
    """Finds the collectives of a program, in execution order.

    Omits collectives in groups of one device, which send nothing.

    Args:
        graph: the compiled program.
        device_ids: the ids of the program's devices in order. Needed only for multi-slice TPU
            programs, whose text contains ids. Default: sorted by id.
    """
    return _Finder(graph, device_ids).find()


_GROUPS = re.compile(
    r'replica_groups=(\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?'
    r'|mesh\[[^\]]*\](?:, device_ids=\((?:\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? \{[^}]*\}|\{\})'
)
_PAIRS = re.compile(r'source_target_pairs=(\{\{[\d,{}]*\}\})')
# not the "is_spmd_generated":false in the backend configs of GPU programs
_GENERATED = 'is_spmd_generated="true"'
_COMMUNICATES = '"has_communication":true'  # in Pallas kernels for TPU
_RENDEZVOUS = re.compile(
    r'_rendezvous="([^"]*)".*_xla_megascale_target="?([^"]*?)"?,'
    r'_xla_megascale_transfer_type="(\w+)"'
)
_PHASE = re.compile(r'custom_call_target="AsyncCollective(\w+)"')
_MAX_DISTANCE = 3  # steps beyond the direct users
_CHAIN_ID = re.compile(r'chain_id="(\d+)"')


class _Finder:
    def __init__(self, graph: Graph, device_ids: Sequence[int]):
        self.graph, self.program = graph, graph.program
        text = self.program.text
        n_devices = self.program.n_partitions * (n_slices := count_slices(text))
        if n_devices > MAX_DEVICES:
            raise self.program.error(1, f'begins a program for {n_devices:,} devices')
        self.slices = Slices(self.program.n_partitions, n_slices, device_ids)
        self.phases = async_phases(self.program)

    def find(self) -> tuple[Collective, ...]:
        order: dict[str, int] = {}
        found: dict[str, Collective] = {}
        for i, (nodes, fields) in enumerate(self.instructions()):
            with LineErrors(self.program) as errors:
                errors.op = nodes[0].op
                # a transfer between slices has two instructions, a send and a receive
                counts = [count_executions(node) for node in nodes if node.op is nodes[0].op]
                collective = Collective(
                    **fields,
                    name=nodes[0].name,
                    n_devices=self.slices.n_devices,
                    executions=sum(n for n, _ in counts),
                    is_exact=all(is_exact for _, is_exact in counts),
                    in_branch=nodes[0].scope.in_branch,
                    is_spmd_generated=any(map(self.is_spmd_generated, nodes)),
                    nodes=tuple(nodes),
                    **self.origin(nodes[0]),
                )
                if collective.group_size > 1:
                    found[collective.name] = self.with_callers(nodes[0], collective)
                    order[collective.name] = i
        for name in self.repeated([*found.values()]):
            del found[name]
        # a collective matmul is one collective, in place of its permutes
        permutes = {c.nodes[0]: c for c in found.values() if c.kind == PERMUTE}
        sizes = {node: c.group_size for node, c in permutes.items()}
        for kind, outside, nodes in find_collective_matmuls(self.graph, sizes):
            pieces = [found.pop(node.name) for node in nodes]
            found[pieces[0].name] = _merge_permutes(pieces, kind, *count_executions(outside))
        return tuple(sorted(found.values(), key=lambda c: order[c.name]))

    def instructions(self) -> Iterator[tuple[list[Node], dict[str, Any]]]:
        """Yields the nodes of each instruction that communicates, and `Collective` fields."""
        by_op: dict[int, list[Node]] = {}
        transfers: dict[tuple[Any, str], list[Node]] = {}
        for node in self.graph.nodes:
            kind = node.opcode.removesuffix('-start')
            if kind in KINDS or kind in ('send', 'recv'):
                by_op.setdefault(id(node.op), []).append(node)
        for nodes in by_op.values():
            with LineErrors(self.program) as errors:
                errors.op = nodes[0].op
                fields = self.read(nodes[0])
            if fields is not None:
                yield nodes, fields
            elif rendezvous := _RENDEZVOUS.search(nodes[0].attributes):
                transfers.setdefault((nodes[0].scope, rendezvous[1]), []).append(nodes[0])
        for nodes in transfers.values():
            # the send first, then the receive
            nodes.sort(key=lambda node: node.opcode != 'send')
            with LineErrors(self.program) as errors:
                errors.op = nodes[0].op
                fields = self.read_transfer(nodes[0].op, nodes[-1].op)
            yield nodes, fields

    def read(self, node: Node) -> dict[str, Any] | None:
        """Reads fields of `Collective` from a node.

        Returns None for any recv, for a send between slices (see `read_transfer`), and for custom
        calls that do not communicate.
        """
        op = node.op
        kind = op.opcode.removesuffix('-start')
        # from jax.lax.psend; GPU programs may also split a permute into send and recv
        is_send = kind == 'send' and 'source_target_pairs=' in op.attributes
        is_kernel = kind == 'custom-call' and _COMMUNICATES in op.config
        if not (is_send or is_kernel or kind in KINDS[:-1]):  # the last is custom-call
            return None
        operands = tuple(array for read in node.inputs for array in _unflattened(read).arrays)
        results = op.results
        dtypes = _user_dtypes(node)
        if kind != op.opcode and len(results) > len(operands):  # a -start lists operands first
            results = results[len(operands) : 2 * len(operands)]
        if is_send or kind == 'ragged-all-to-all':
            operands = operands[:1]  # the others are offsets, sizes or a token
        if is_send:
            kind, results = PERMUTE, operands
        pairs: tuple[tuple[int, int], ...] = ()
        groups: Groups = ()
        if match := _PAIRS.search(op.attributes):
            pairs, groups = read_pairs(self.slices.within(read_groups(match[1])))
        elif match := _GROUPS.search(op.attributes):
            groups = self.slices.within(read_groups(match[1]))
        if not (groups or is_kernel or 'channel_id=' in op.attributes):
            groups = (tuple(range(self.slices.n_devices)),)  # '{}', without a channel
        n = max(map(len, groups), default=self.slices.n_devices)
        last = max(map(max, filter(None, groups)), default=0)
        if last >= self.slices.n_devices > 1:
            what = f'names device {last} of {self.slices.n_devices}'
            raise Unreadable(op, what, str(last))
        # a kernel for GPUs, in which each device reads the full arrays of all others
        is_one_shot = 'KERNEL_STRATEGY_TRITON_ONE_SHOT' in op.config
        return {
            'kind': kind,
            'operands': _narrowed(operands, dtypes),
            'results': _narrowed(results, dtypes),
            'device_groups': groups,
            'pairs': pairs,
            'is_async': is_send or self.overlaps(op),
            'widened': any(dtypes),
            'sent': sum(array.bytes for array in operands) * (n - 1) if is_one_shot else None,
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
            'device_groups': connected(pairs) if pairs else groups,
            'pairs': pairs,
            'is_async': True,
        }

    def overlaps(self, op: Instruction) -> bool:
        """Whether an instruction starts a collective that can run while others compute.

        Not if its -done comes next, or after other communication only. With JAX 0.10, some of those
        on GPU are synchronous. A loop may hand a collective on to its next iteration.
        """
        if not op.opcode.endswith('-start') or '"is_sync":true' in op.config:
            return False
        return op.name not in self.exposed

    @functools.cached_property
    def exposed(self) -> set[str]:
        """The names of the -start instructions between which and their -done nothing computes."""
        exposed: set[str] = set()
        for ops in self.program.computations.values():
            waiting: set[str] = set()
            for op in ops:
                if op.opcode.endswith('-start'):
                    waiting.add(op.name)
                elif op.opcode.endswith('-done'):
                    exposed |= waiting.intersection(op.operands)
                elif op.opcode not in FREE and not op.opcode.endswith('-update'):
                    waiting.clear()
        return exposed

    def is_spmd_generated(self, node: Node) -> bool:
        """Whether an instruction, or an operation around it, has the partitioner's mark."""
        around = (op for op in node.scope.calls if op.opcode not in ('while', 'conditional'))
        return any(_GENERATED in op.attributes for op in (node.op, *around))

    def phase(self, node: Node) -> str:
        """Returns the phase of the fusions that contain a node, or ''."""
        for call in node.scope.calls:
            phase = self.phases.get(_callee(call), '') if call.opcode == 'fusion' else ''
            if phase or call.opcode != 'fusion':
                return phase
        return ''

    def repeated(self, collectives: Sequence[Collective]) -> set[str]:
        """Returns the names of the instructions that repeat another's collective.

        A TPU program may spread an asynchronous collective over several fusions, and repeat its
        instruction in each. Only the one in phase 'Start' counts. If none has that phase, only the
        one that runs least often counts.
        """
        by_id: dict[tuple[int, str], list[Collective]] = {}
        repeated: set[str] = set()
        for c in collectives:
            node = c.nodes[0]
            phase, chain_id = self.phase(node), _CHAIN_ID.search(node.attributes)
            if phase == 'Done':
                repeated.add(c.name)
            elif phase or (chain_id and node.scope.fusion is not None):
                # equal for all instructions of an asynchronous collective
                key = number_of('channel_id', node.attributes), chain_id[1] if chain_id else ''
                by_id.setdefault(key, []).append(c)
        for same in by_id.values():
            counted = [c for c in same if self.phase(c.nodes[0]) == 'Start']
            counted = counted or [min(same, key=lambda c: (not c.is_exact, c.executions))]
            repeated.update(c.name for c in same if c not in counted)
        return repeated

    def origin(self, node: Node) -> dict[str, Any]:
        """Returns the `source`, `column`, `called_at` and `op_name` of a collective.

        Falls back to its call sites, then to its consumers.
        """
        named = node.op
        for call in node.scope.calls:
            if named.op_name:
                break
            if call.opcode not in ('while', 'conditional'):
                named = call
        sourced, program = named, self.program
        if program.span(named) is None:  # the compiler inserted the collective
            sourced = user_with_source(program, node) or named
        span = program.span(sourced)
        return {
            'source': span.text if span else None,
            'column': span.column if span else 0,
            'called_at': program.sources.caller(sourced.metadata),
            'op_name': named.op_name or sourced.op_name,
        }

    def with_callers(self, node: Node, found: Collective) -> Collective:
        """Corrects `is_async`, `kind` and `results` of `found` from the calls around it."""
        if self.phase(node) == 'Start' or any(map(self.overlaps, node.scope.calls)):
            found = replace(found, is_async=True)
        for call in node.scope.calls:
            is_fusion = call.opcode == 'fusion' and found.kind == 'all-reduce'
            ops = self.program.computations[_callee(call)] if is_fusion else ()
            # how TPU writes a reduce-scatter
            if any(op.is_root and op.opcode == 'dynamic-slice' for op in ops):
                found = replace(found, kind='reduce-scatter', results=call.results)
        return found


def async_phases(program: HloModule) -> dict[str, str]:
    """Returns 'Start' or 'Done' of computations on TPU, by what AsyncCollective they call."""
    is_async = '"AsyncCollective' in program.text
    return {
        name: phase[1]
        for name, ops in (program.computations if is_async else {}).items()
        for op in ops
        if op.opcode == 'custom-call' and (phase := _PHASE.search(op.attributes))
    }


def count_executions(node: Node) -> tuple[int, bool]:
    """Returns how often one run of the program runs a node, and whether that number is exact.

    Counts all branches of conditionals. A loop with an unknown trip count counts as one iteration.
    """
    trips = [count_trips(loop) for loop in node.loops]
    if node.scope.is_condition and trips[-1] is not None:
        trips[-1] += 1  # the condition runs once more than the body
    return prod(n for n in trips if n is not None), None not in trips


def user_with_source(program: HloModule, node: Node) -> Instruction | None:
    """Finds a near user, direct or not, that has a source line, or the fusion around one."""
    tried: dict[tuple[Node, CallSite], int] = {}  # how many steps were left after each user
    pending = [(user, node.scope, _MAX_DISTANCE) for user in reversed(node.users)]
    while pending:
        user, scope, left = pending.pop()
        if tried.get((user, scope), -1) >= left:
            continue
        tried[user, scope] = left
        calls: list[Instruction] = []
        if user.scope is not scope:
            around = {id(call) for call in scope.calls}
            calls = [call for call in user.scope.calls if id(call) not in around]
        for op in (*calls[::-1], user.op):
            if program.span(op) is not None:
                return op
        if left:
            pending += [(other, user.scope, left - 1) for other in reversed(user.users)]
    return None


def _callee(call: Instruction) -> str:
    return next(iter(call.callees.get('calls', ())), '')


def _merge_permutes(
    permutes: Sequence[Collective], kind: str, executions: int, is_exact: bool
) -> Collective:
    """Merges the permutes of a collective matmul into the all-gather or reduce-scatter `kind`."""
    piece = max((p.operands for p in permutes), key=lambda arrays: sum(a.bytes for a in arrays))
    n = max(permute.group_size for permute in permutes)
    operands, results = (piece, piece * n) if kind == 'all-gather' else (piece * n, piece)
    return replace(
        max(permutes, key=lambda permute: permute.executions),
        name=permutes[0].name,
        kind=kind,
        operands=operands,
        results=results,
        pairs=(),
        executions=executions,
        is_exact=is_exact,
        is_async=any(permute.is_async for permute in permutes),
        sent=sum(permute.total_bytes for permute in permutes) // (executions or 1),
        nodes=tuple(node for permute in permutes for node in permute.nodes),
    )


def _unflattened(node: Node) -> Node:
    """Returns the array that was flattened for a kernel, or the node itself."""
    is_flattened = node.opcode == 'bitcast' and len(node.array.shape) == 1
    source = node.inputs[0] if is_flattened else node
    return source if source.array.bytes == node.array.bytes else node


# --- widened arrays -----------------------------------------------------------------------------

_PROMOTED = re.compile(r'to_apply=%?\S+_promoted\b')  # suffix from XLA's all-reduce promotion


def _user_dtypes(node: Node) -> tuple[str, ...]:
    """Returns the dtype of each operand before XLA widened it to f32, as on CPU, and '' for others.

    A convert that XLA added has no op_name, unlike a convert in the user's program.
    """
    dtypes: list[str] = []
    promoted = 'bf16' if _PROMOTED.search(node.attributes) else ''
    for operand in node.inputs:
        source = strip(operand, SHAPES)
        dtype = ''
        if source.opcode == 'convert' and not source.op.op_name:
            dtype = source.inputs[0].array.dtype
        narrow = dtype if dtype in ('bf16', 'f16') else promoted
        dtypes.append(narrow if 'f32[' in operand.type and 'f32[' in node.type else '')
    return tuple(dtypes)


def _narrowed(arrays: tuple[ArrayType, ...], dtypes: tuple[str, ...]) -> tuple[ArrayType, ...]:
    """Replaces the dtypes of `arrays` by `dtypes`, where '' keeps the dtype."""
    if len(arrays) != len(dtypes):
        return arrays
    return tuple(
        replace(array, dtype=dtype or array.dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    )
