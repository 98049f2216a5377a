"""Where the values of a program come from, and what uses them.

All walks over a `Graph` are here, or go through `reached`: each has a list of nodes to visit and
visits a node once, because programs have chains of 100,000 operations and loops that lead back.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from .graph import Graph, Node
from .opcodes import COLLECTIVES, COPIES, ELEMENTWISE, FIXED, JOINS, MOVES, NUMBERS, STOPS

_Node = TypeVar('_Node')


def reached(start: Iterable[_Node], step: Callable[[_Node], Iterable[_Node]]) -> list[_Node]:
    """Returns the nodes of `start` and all that `step` leads to from them, nearest first."""
    found = list(dict.fromkeys(start))
    seen = {*found}
    for node in found:  # which grows
        for other in step(node):
            if other not in seen:
                seen.add(other)
                found.append(other)
    return found


# --- moves --------------------------------------------------------------------------------------


def joins_slices(node: Node) -> bool:
    """Whether this is a ConcatBitcast, which on TPU joins slices of an array without a copy."""
    return node.opcode == 'custom-call' and '"ConcatBitcast"' in node.attributes


def moved_operand(node: Node, moves: Collection[str] = COPIES) -> Node | None:
    """Returns the node whose numbers `node` has, if it is one of `moves`, or None.

    The array of an element of a collective comes from the operand with the same number. On TPU, an
    asynchronous collective may be three fusions: the first returns its operand and its result, and
    the last repeats the collective. A phi has the numbers from before its loop if each iteration
    hands them on.
    """
    if node.opcode == 'phi':
        return node.inputs[0] if is_invariant(node, moves) else None
    return _moved_by_one(node, moves)


def _moved_by_one(node: Node, moves: Collection[str]) -> Node | None:
    """Returns what `moved_operand` does for all nodes but phis."""
    opcode = node.opcode
    if opcode == 'element':
        base = node.inputs[0]
        while base.opcode.endswith('-done') and base.inputs:
            base = base.inputs[0]
        if '"AsyncCollectiveStart"' in base.attributes and base.inputs and node.index < 2:
            [gathered] = base.inputs[:1]
            return gathered if node.index or not gathered.inputs else gathered.inputs[0]
        if base.opcode in moves and node.index < len(base.inputs):
            return base.inputs[node.index]
        return None
    if opcode == 'exit':
        return node.inputs[0]
    if opcode in moves or joins_slices(node):
        return node.inputs[0] if node.inputs else None
    if opcode == 'custom-call' and '"AsyncCollectiveDone"' in node.attributes:
        return next((read for read in node.inputs if read.opcode in COLLECTIVES), None)
    return None


def is_invariant(phi: Node, moves: Collection[str] = COPIES) -> bool:
    """Whether each iteration hands on the same array, except for `moves`.

    Goes back from the value after an iteration. It may meet other phis, which it passes if they are
    invariant: those of loops inside, and those of the same loop if the loop rotates arrays. The
    latter lead back to a phi that is being asked: none in such a circle is invariant.
    """
    asked = [phi]  # each is on the way back from the one before
    at = {phi: phi.inputs[-1] if len(phi.inputs) > 1 else phi}  # how far that way has come
    while asked:
        last = asked[-1]
        node: Node | None = at[last]
        while node is not None and node.opcode != 'phi':
            node = _moved_by_one(node, moves)
        is_back = node is last
        if node is not None and not is_back:
            known = _invariants(node).get((node, moves))
            if known is None and node not in at:
                asked.append(node)
                at[last], at[node] = node, node.inputs[-1] if len(node.inputs) > 1 else node
                continue
            if known:
                at[last] = node.inputs[0]
                continue
        _invariants(last)[last, moves] = is_back
        asked.pop()
    return _invariants(phi)[phi, moves]


def _invariants(phi: Node) -> dict[tuple[Node, Collection[str]], bool]:
    assert phi.loop is not None
    return phi.loop.invariants


def strip(
    node: Node, moves: Collection[str] = COPIES, known: dict[Node, Node] | None = None
) -> Node:
    """Follows a value back through `moves`, to the node that computes it.

    `known` has results for the same `moves`, to which this adds, for those who ask often.
    """
    passed: list[Node] = []
    while known is None or node not in known:
        moved = moved_operand(node, moves)
        if moved is None:
            break
        passed.append(node)
        node = moved
    if known is not None:
        node = known.get(node, node)
        known.update(dict.fromkeys(passed, node))
    return node


# --- origins ------------------------------------------------------------------------------------


def has_no_numbers(node: Node) -> bool:
    """Whether an array is a constant, or is made of constants."""
    while node.inputs and (node.opcode == 'broadcast' or node.opcode in COPIES):
        node = node.inputs[0]
    return node.opcode in FIXED or '"AllocateBuffer"' in node.attributes


class Origins:
    """The parameters whose numbers arrays consist of.

    Follows moves, concatenations, updates of slices and loop state; if `elementwise`, also
    elementwise operations and broadcasts. Leaves out constants, such as the zeros into which a loop
    writes its results. Remembers what it finds: each of 1,000 permutes in a row asks.
    """

    def __init__(self, elementwise: bool = False):
        self._elementwise = elementwise
        self._masks: dict[Node, int] = {}  # bit i + 1: parameter i; bit 0: other origins

    def of(self, node: Node) -> tuple[frozenset[int], bool]:
        """Returns the numbers of the parameters, and whether there are other numbers, too."""
        if node not in self._masks:
            found: dict[Node, Sequence[Node]] = {}

            def step(node: Node) -> Sequence[Node]:
                if node in self._masks:
                    return ()
                found[node] = sources = _sources(node, self._elementwise)
                if sources or has_no_numbers(node):
                    self._masks[node] = 0
                elif node.opcode == 'parameter':
                    self._masks[node] = 2 << int(node.op.operand_text)
                else:
                    self._masks[node] = 1
                return sources

            reached([node], step)
            # from the origins
            _spread(self._masks, dict(reversed(found.items())))
        mask = self._masks[node]
        return frozenset(_bits(mask >> 1)), bool(mask & 1)


def _sources(node: Node, elementwise: bool = False) -> Sequence[Node]:
    moved = moved_operand(node, MOVES)
    if moved is not None:
        return (moved,)
    if node.opcode in JOINS or node.opcode == 'phi':
        return node.inputs
    if node.opcode == 'dynamic-update-slice':
        return node.inputs[:2]
    if elementwise and (node.opcode in ELEMENTWISE or node.opcode == 'broadcast'):
        return node.inputs[NUMBERS.get(node.opcode, slice(None))]
    return ()


def _spread(masks: dict[Node, int], followed: Mapping[Node, Sequence[Node]]) -> None:
    """Adds to the mask of each node those of the nodes that it follows, until nothing changes.

    A node comes again only if one that it follows has changed, as in a loop. So those that others
    follow should come first.
    """
    before: dict[Node, list[Node]] = {}
    for node, uses in followed.items():
        for use in {*uses}:  # a square follows one node twice
            before.setdefault(use, []).append(node)
    pending = deque(followed)
    waiting = {*followed}
    while pending:
        node = pending.popleft()
        waiting.remove(node)
        old = mask = masks.get(node, 0)
        for use in followed[node]:
            mask |= masks.get(use, 0)
        if mask != old:
            masks[node] = mask
            again = [one for one in before.get(node, ()) if one not in waiting]
            pending += again
            waiting.update(again)


def depends_on_device(node: Node) -> bool:
    """Whether a value is computed from the number of the device."""
    found = reached([node], lambda node: node.inputs)
    return any(node.opcode in ('partition-id', 'replica-id') for node in found)


_Value = TypeVar('_Value')


def fold(
    start: Node,
    reads: Callable[[Node], Sequence[Node]],
    value: Callable[[Node, Sequence[_Value]], _Value],
    values: dict[Node, _Value] | None = None,
) -> _Value:
    """Computes a value of a node from those of the nodes that it reads, and so on.

    Args:
        reads: the nodes whose values the value of a node needs. They must not lead in a circle.
        value: computes the value of a node from theirs.
        values: those that are known, to which this adds what it computes.
    """
    values = {} if values is None else values
    pending = [start]
    while pending:
        node = pending[-1]
        if node in values:
            pending.pop()
            continue
        needed = reads(node)
        missing = [read for read in needed if read not in values]
        pending += missing
        if not missing:
            values[node] = value(node, [values[read] for read in needed])
            pending.pop()
    return values[start]


def between(start: Node, end: Node) -> set[Node]:
    """Returns the nodes through which numbers of `start` get into `end`, with both.

    Follows what `Origins` follows, and scatters into an array. Empty if no number does.
    """
    users: dict[Node, list[Node]] = {}

    def sources(node: Node) -> Sequence[Node]:
        found = node.inputs[:1] if node.opcode == 'scatter' else _sources(node)
        for source in found:
            users.setdefault(source, []).append(node)
        return found

    if start not in reached([end], sources):
        return set()
    return {*reached([start], lambda node: users.get(node, ()))}


# --- users --------------------------------------------------------------------------------------


def done_of(node: Node) -> Node:
    """Returns the -done of a -start, which holds its results, or the node itself."""
    done = (user for user in node.users if user.opcode.endswith('-done'))
    return next(done, node) if node.opcode.endswith('-start') else node


def results(node: Node, operand: Node) -> list[Node]:
    """Returns the nodes that hold what `node` computes from `operand`.

    Result i of a collective of several arrays comes from operand i.
    """
    elements = [user for user in done_of(node).users if user.opcode == 'element']
    if len(node.inputs) > 1 and node.opcode.removesuffix('-start') in COLLECTIVES:
        elements = [one for one in elements if node.inputs[one.index] is operand]
    return elements or [node]


def output_uses(graph: Graph) -> Mapping[Node, frozenset[int]]:
    """Returns the numbers of the program outputs that are computed from each node.

    Follows only operations that keep what a value is, such as from an all-reduced gradient to the
    new weights. Follows loops, but not products, reductions and the other operations in `STOPS`.

        >>> from einshard._program.hlo.graph import Graph
        >>> from einshard._program.hlo.queries import output_uses
        >>> from einshard._program.hlo.text import HloModule
        >>> text = '''HloModule jit_f, num_partitions=4
        ...
        ... ENTRY %main (w: f32[8], g: f32[8]) -> (f32[], f32[8]) {
        ...   %w = f32[8]{0} parameter(0)
        ...   %g = f32[8]{0} parameter(1)
        ...   %sum = f32[8]{0} all-reduce(%g), replica_groups=[1,4]<=[4], to_apply=%add
        ...   %new = f32[8]{0} subtract(%w, %sum)
        ...   %norm = f32[] dot(%sum, %sum), lhs_contracting_dims={0}
        ...   ROOT %both = (f32[], f32[8]{0}) tuple(%norm, %new)
        ... }
        ... '''
        >>> graph = Graph(HloModule(text))
        >>> {node.name: sorted(uses) for node, uses in output_uses(graph).items()}
        {'norm': [0], 'new': [1], 'sum': [1], 'g': [1], 'w': [1]}
    """
    masks: dict[Node, int] = {}  # bit i: output i
    for i, node in enumerate(graph.outputs):
        masks[node] = masks.get(node, 0) | 1 << i
    followed = {
        node: [
            result
            for user in node.users
            if _keeps(user, node)
            for result in (_parts(user, node, masks) or results(user, node))
        ]
        for node in reversed(graph.nodes)
    }
    _spread(masks, followed)
    sets = {mask: frozenset(_bits(mask)) for mask in set(masks.values())}
    return {node: sets[masks[node]] for node in followed if masks.get(node)}


_SLICE = re.compile(r'\[(\d+):(\d+)')
_DIMENSION = re.compile(r'dimensions=\{(\d+)\}')
_SCATTER = re.compile(r'/scatter[a-z_-]*$')


def _parts(joined: Node, operand: Node, outputs: Collection[Node]) -> list[Node]:
    """Returns what is computed of one operand of a concatenation that is taken apart again.

    XLA for GPUs may join gradients for one all-reduce. Empty if parts cannot be told apart.
    """
    match = _DIMENSION.search(joined.attributes) if joined.opcode == 'concatenate' else None
    if match is None or joined.inputs.count(operand) != 1:
        return []
    dim, at = int(match[1]), joined.inputs.index(operand)
    start = sum(before.array.shape[dim] for before in joined.inputs[:at])
    end = start + operand.array.shape[dim]
    found: list[Node] = []
    seen, pending = {joined}, [joined]
    for node in pending:
        if node in outputs:
            return []
        for user in node.users:
            if user.opcode == 'slice':
                limits = _SLICE.findall(user.attributes)
                first, last = map(int, limits[dim])
                found += [user] * (first < end and start < last)
            elif _keeps(user, node):
                for result in results(user, node):
                    if not result.arrays or result.array.shape != joined.array.shape:
                        return []
                    if result not in seen:
                        seen.add(result)
                        pending.append(result)
    return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _keeps(user: Node, node: Node) -> bool:
    if user.opcode in NUMBERS:
        return node in user.inputs[NUMBERS[user.opcode]]
    if user.opcode == 'exit':  # XLA for TPUs and CPUs expands a scatter to a loop
        return not _SCATTER.search(user.op.op_name)
    if user.opcode not in STOPS:
        return True
    if user.opcode != 'custom-call':
        return False
    is_async = '"AsyncCollectiveStart"' in user.attributes or (
        '"AsyncCollectiveDone"' in user.attributes and user.arrays == node.arrays
    )
    return is_async or joins_slices(user)
