"""Finds the largest temporary arrays of an HLO program."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..._text import short_source
from .graph import Graph, Loop, Node
from .hbm_traffic import is_in_hbm
from .opcodes import MOVES, VIEWS
from .queries import strip
from .text import Instruction


@dataclass(frozen=True, slots=True)
class Temporary:
    """Equal intermediate arrays in the memory of a device.

    Attributes:
        array: the dtype and shape of each on one device: 'bf16[8,128]'.
        bytes: bytes per device of all of them, without padding.
        source: the source line that computes them, such as 'model.py:12'.
        op_name: the JAX operation that computes the first, or an HLO opcode such as 'copy' if the
            compiler added the array.
        count: how many the program needs at the same time.
        kept: what keeps them, such as 'residuals of the loop in model.py:15'. Empty if unknown.
    """

    array: str
    bytes: int
    source: str | None
    op_name: str
    count: int = 1
    kept: str = ''


_NOT_ALLOCATING = VIEWS | {'phi', 'exit', 'branch'}
_UPDATES = ('dynamic-update-slice', 'scatter')


def largest_temporaries(graph: Graph, n: int = 5) -> tuple[Temporary, ...]:
    """Finds the `n` largest groups of temporaries, of one source line, dtype and shape each.

    Groups that are not needed at the same time may share memory.
    """
    groups: dict[tuple[str, str | None, str], list[_Buffer]] = defaultdict(list)
    for buffer in _buffers(graph):
        groups[str(buffer.made.array), buffer.source(graph), buffer.kept(graph)].append(buffer)
    found = [
        Temporary(
            array,
            buffers[0].made.array.bytes * (count := _most_at_once(buffers)),
            source,
            buffers[0].op_name,
            count,
            kept if count == 1 else kept.replace('residual ', 'residuals '),
        )
        for (array, source, kept), buffers in groups.items()
    ]
    return tuple(sorted(found, key=lambda row: -row.bytes)[:n])


@dataclass(eq=False)
class _Buffer:
    """Memory of one array, which operations in place and loops pass on.

    Attributes:
        nodes: the nodes that are in it, in execution order.
        made: the node for which it is allocated.
        start, end: the positions between which it is needed.
    """

    nodes: Sequence[Node]
    made: Node
    start: int
    end: int

    @property
    def update(self) -> Node | None:
        """The first update of a slice, which computes the numbers of an array of zeros."""
        return next((node for node in self.nodes if node.opcode in _UPDATES), None)

    @property
    def computed(self) -> Node:
        """The node that computes its numbers, or those of the first slice."""
        node, seen = self.update or self.made, set[Node]()
        while node.opcode in _UPDATES and node not in seen:  # once for each of nested loops
            seen.add(node)
            new = 1 if node.opcode == 'dynamic-update-slice' else len(node.inputs) - 1
            node = strip(node.inputs[new], MOVES)
        return node

    @property
    def ops(self) -> Iterator[Instruction]:
        """The instructions that may have a name and a line, the best first."""
        for node in (self.computed, self.update or self.made):
            yield node.op
            yield from (call for call in node.scope.calls if call.opcode == 'fusion')

    @property
    def op_name(self) -> str:
        return next(filter(None, (op.op_name for op in self.ops)), self.made.op.opcode)

    def source(self, graph: Graph) -> str | None:
        return next(filter(None, map(graph.program.source, self.ops)), None)

    def kept(self, graph: Graph) -> str:
        """Says which loop keeps it, and whether only for the backward pass."""
        update, name = self.update, self.op_name
        users = (user for node in self.nodes for user in node.users)
        used = (op.op_name for user in users for op in (user.op, *user.scope.calls))
        is_residual = 'transpose(' not in name and any('transpose(' in use for use in used)
        if update is None or not update.loops:
            return 'residual of the forward pass' if is_residual else ''
        line = graph.program.source(update.loops[-1].op)
        what = 'residual' if is_residual else 'results'
        return f'{what} of the loop in {short_source(line)}' if line else f'{what} of a loop'


def _buffers(graph: Graph) -> Iterator[_Buffer]:
    """Yields the buffers in HBM that hold neither arguments nor results of the program."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    ends: dict[Loop, int] = {}
    for node, i in at.items():
        ends |= dict.fromkeys(node.loops, i)
    outputs = {*graph.outputs}
    groups = {node: [node] for node in graph.nodes if _is_stored(node, outputs)}
    loops = {node: {node.loops[-1]} if node.opcode == 'phi' else set() for node in groups}
    group_of = {node: node for node in groups}

    def join(node: Node, other: Node) -> None:
        a, b = group_of[node], group_of.get(other)
        # equal arrays of the state of one loop are different buffers
        if b is None or a is b or loops[a] & loops[b]:
            return
        small, large = sorted((a, b), key=lambda key: len(groups[key]))
        for one in groups[small]:
            group_of[one] = large
        groups[large] += groups.pop(small)
        loops[large] |= loops.pop(small)

    for node in [*groups]:
        for other in _in_place(node):
            join(node, other)
    for nodes in groups.values():
        nodes.sort(key=at.__getitem__)
        made = next((node for node in nodes if node.opcode not in _NOT_ALLOCATING), None)
        if made is None or not is_in_hbm(made.type) or not made.arrays:
            continue
        if any(node.opcode == 'parameter' or node in outputs for node in nodes):
            continue
        end = at[nodes[-1]]
        for node in nodes:
            if node.opcode == 'phi':
                end = max(end, ends[node.loops[-1]])
            for user in node.users:
                # what a loop reads is needed until the outermost such loop ends
                around = itertools.zip_longest(node.loops, user.loops)
                inside = next((loop for own, loop in around if loop and own is not loop), None)
                end = max(end, at[user] if inside is None else ends[inside])
        yield _Buffer(nodes, made, at[nodes[0]], end)


def _is_stored(node: Node, outputs: set[Node]) -> bool:
    """Whether an array is in memory: not within a fusion, nor several arrays of an operation."""
    if node.opcode.endswith(('-start', '-update')) or node.type.startswith('('):
        return False
    fusion = node.scope.fusion
    is_used_outside = any(user.scope.fusion is not fusion for user in node.users)
    return fusion is None or is_used_outside or node in outputs


def _in_place(node: Node) -> Sequence[Node]:
    """Returns the arrays whose memory a node reuses."""
    if node.opcode in ('phi', 'branch'):
        return node.inputs
    fusion, is_update = node.scope.fusion, False
    moves = ('bitcast', 'exit') if fusion is None else ('bitcast', 'exit', 'convert', 'copy')
    source = node
    while source.opcode in moves or (source.opcode in _UPDATES and not is_update):
        is_update |= source.opcode in _UPDATES
        source = source.inputs[0]
        if source.scope.fusion is not fusion or fusion is None:
            # in a fusion, only an update of a slice writes to the memory of its operand
            return (source,) if fusion is None or is_update else ()
    return ()


def _most_at_once(buffers: Iterable[_Buffer]) -> int:
    changes = sorted(
        change for buffer in buffers for change in ((buffer.start, 1), (buffer.end + 1, -1))
    )
    n = most = 0
    for _, change in changes:
        n += change
        most = max(most, n)
    return most
