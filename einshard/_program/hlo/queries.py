"""Where the values of a program come from, and what uses them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .graph import Graph, Node

COLLECTIVES = frozenset(
    (
        *('all-gather', 'all-reduce', 'all-to-all', 'collective-broadcast', 'collective-permute'),
        *('ragged-all-to-all', 'reduce-scatter'),
    )
)
# operations that copy, reshape, transpose or convert an array
COPIES = frozenset(
    (
        *('all-gather-done', 'all-reduce-done', 'bitcast', 'collective-permute-done', 'convert'),
        *('copy', 'copy-done', 'copy-start', 'recv-done', 'reshape', 'slice-done', 'transpose'),
    )
)
# operations that move the numbers of their first operand, or some of them
MOVES = COPIES | {
    *('all-gather', 'all-gather-start', 'all-to-all', 'collective-broadcast', 'collective-permute'),
    *('collective-permute-start', 'dynamic-slice', 'pad', 'reverse', 'slice', 'slice-start'),
}
# operations that join the numbers of all operands
_JOINS = frozenset(('branch', 'concatenate'))
ELEMENTWISE = frozenset(
    (
        *('abs', 'add', 'ceil', 'clamp', 'cosine', 'divide', 'exponential', 'floor', 'log'),
        *('log-plus-one', 'logistic', 'exponential-minus-one', 'maximum', 'minimum', 'multiply'),
        *('negate', 'power', 'remainder', 'round-nearest-even', 'rsqrt', 'select', 'sign', 'sine'),
        *('sqrt', 'subtract', 'tanh', 'erf', 'cbrt', 'and', 'or', 'not', 'xor'),
    )
)
# the operands that are not indices or predicates
_NUMBERS = {
    'dynamic-slice': slice(1),
    'dynamic-update-slice': slice(2),
    'pad': slice(1),
    'select': slice(1, 3),
}
_NO_NUMBERS = frozenset(('constant', 'iota', 'partition-id', 'replica-id', 'rng-bit-generator'))
_MAX_PHIS = 200  # keeps the search for an invariant short in programs with many nested loops


def joins_slices(node: Node) -> bool:
    """Whether this is a ConcatBitcast, which on TPU joins slices of an array without a copy."""
    return node.opcode == 'custom-call' and '"ConcatBitcast"' in node.attributes


def moved_operand(node: Node, moves: Collection[str]) -> Node | None:
    """Returns the node whose numbers `node` has, if it is one of `moves`, or None.

    The array of an element of a collective comes from the operand with the same number. On TPU, an
    asynchronous collective may be three fusions: the first returns its operand and its result, and
    the last repeats the collective.
    """
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
    if opcode == 'phi':
        return node.inputs[0] if is_invariant(node, moves) else None
    if opcode in moves or joins_slices(node):
        return node.inputs[0] if node.inputs else None
    if opcode == 'custom-call' and '"AsyncCollectiveDone"' in node.attributes:
        return next((read for read in node.inputs if read.opcode in COLLECTIVES), None)
    return None


def is_invariant(phi: Node, moves: Collection[str] = COPIES) -> bool:
    """Whether each iteration hands on the same array, except for `moves`."""
    node = phi.inputs[1] if len(phi.inputs) > 1 else phi
    for _ in range(_MAX_PHIS):
        if node is phi:
            return True
        moved = moved_operand(node, moves)
        if moved is None:
            return False
        node = moved
    return False


def strip(node: Node, moves: Collection[str] = COPIES) -> Node:
    """Follows a value back through `moves`, to the node that computes it."""
    while (moved := moved_operand(node, moves)) is not None:
        node = moved
    return node


def has_no_numbers(node: Node) -> bool:
    """Whether an array is a constant, or is made of constants."""
    while node.opcode == 'broadcast' or node.opcode in COPIES:
        node = node.inputs[0]
    return node.opcode in _NO_NUMBERS or '"AllocateBuffer"' in node.attributes


def origins(node: Node, elementwise: bool = False) -> Iterator[Node]:
    """Yields the nodes whose numbers an array consists of.

    Follows moves, concatenations, updates of slices and loop state; if `elementwise`, also
    elementwise operations and broadcasts. Leaves out constants, such as the zeros into which a loop
    writes its results.
    """
    seen, pending = {node}, [node]
    while pending:
        node = pending.pop()
        sources = _sources(node, elementwise)
        if not sources and not has_no_numbers(node):
            yield node
        for source in sources:
            if source not in seen:
                seen.add(source)
                pending.append(source)


def _sources(node: Node, elementwise: bool) -> Sequence[Node]:
    moved = moved_operand(node, MOVES)
    if moved is not None:
        return (moved,)
    if node.opcode in _JOINS or node.opcode == 'phi':
        return node.inputs
    if node.opcode == 'dynamic-update-slice':
        return node.inputs[:2]
    if elementwise and (node.opcode in ELEMENTWISE or node.opcode == 'broadcast'):
        return node.inputs[_NUMBERS.get(node.opcode, slice(None))]
    return ()


# --- users --------------------------------------------------------------------------------------

# operations whose result is another quantity than their operand
_STOPS = frozenset(
    (
        *('broadcast', 'compare', 'conditional', 'convolution', 'custom-call', 'dot', 'gather'),
        *('is-finite', 'reduce', 'reduce-window', 'scatter', 'select-and-scatter', 'sort'),
    )
)


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
    new weights. Follows loops, but not products, reductions and the other operations in `_STOPS`.

        >>> from einshard._program.hlo.graph import Graph
        >>> from einshard._program.hlo.queries import output_uses
        >>> from einshard._program.hlo.text import Program
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
        >>> graph = Graph(Program(text))
        >>> {node.name: sorted(uses) for node, uses in output_uses(graph).items()}
        {'norm': [0], 'new': [1], 'sum': [1], 'g': [1], 'w': [1]}
    """
    masks: dict[Node, int] = {}  # bit i: output i
    for i, node in enumerate(graph.outputs):
        masks[node] = masks.get(node, 0) | 1 << i
    outputs = dict(masks)
    followed = {
        node: [
            result for user in node.users if _keeps(user, node) for result in results(user, node)
        ]
        for node in reversed(graph.nodes)
    }
    changes = True
    while changes:  # a few times: loops lead back to nodes that came before
        changes = False
        for node, uses in followed.items():
            mask = outputs.get(node, 0)
            for use in uses:
                mask |= masks.get(use, 0)
            if mask != masks.get(node, 0):
                masks[node], changes = mask, True
    sets = {mask: frozenset(_bits(mask)) for mask in set(masks.values())}
    return {node: sets[masks[node]] for node in followed if masks.get(node)}


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _keeps(user: Node, node: Node) -> bool:
    if user.opcode in _NUMBERS:
        return node in user.inputs[_NUMBERS[user.opcode]]
    if user.opcode not in _STOPS:
        return True
    if user.opcode != 'custom-call':
        return False
    is_async = '"AsyncCollectiveStart"' in user.attributes or (
        '"AsyncCollectiveDone"' in user.attributes and user.arrays == node.arrays
    )
    return is_async or joins_slices(user)
