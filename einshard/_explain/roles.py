"""Finds the payloads of collectives: weights, gradients, caches or activations, with paths."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from .._program.hlo.collective import Collective
from .._program.hlo.flops import find_products
from .._program.hlo.graph import Graph, Node
from .._program.hlo.opcodes import MOVES
from .._program.hlo.queries import (
    Origins,
    moved_operand,
    output_uses,
    reached,
    results,
    strip,
)
from .._program.hlo.slices import padded_shard
from .._program.hlo.sources import operations
from .._program.jaxpr.graph import FlatJaxpr
from .._program.jaxpr.names import AxisNames, names_in
from .._program.jaxpr.spans import Span

_Arrays: TypeAlias = tuple[tuple[str, ...], ...]
# kinds of collectives that send their operand without summing it
_MOVES = ('all-gather', 'all-to-all', 'collective-broadcast', 'collective-permute')
_BARE_RESULT = re.compile(r'result(/\d+)*')
_MIN_NAMED = 0.01  # of the bytes of a collective, for arrays without the role of most bytes


class Payloads:
    """Says what each collective of a program sends.

    Args:
        inputs: (path, dtype) of each argument that the program uses, by parameter number.
        outputs: the paths of the program's outputs, by number.
        lines: the axis names on each source line.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[tuple[str, str]],
        outputs: Mapping[int, str],
        lines: NamedLines = MappingProxyType({}),
    ):
        self._lines = lines
        self._inputs = inputs
        self._output_paths = outputs
        self._uses = output_uses(graph)
        self._moved_from, self._computed_from = Origins(), Origins(elementwise=True)
        self._moved: dict[Node, Node] = {}
        # {output number: the parameters that the output replaces}
        self.updated, self.replaced = _updated_inputs(graph, inputs, outputs)
        self.gradients = _gradients(graph, self.replaced)
        self.roles = _find_roles(graph, inputs, self.updated)

    def of(self, collective: Collective) -> Collective:
        """Returns the collective with `role`, `of`, `is_backward` and `axes`."""
        is_backward = 'transpose(' in collective.op_name
        # several arrays may share a collective, such as 28 GiB of logits and the loss: its role is
        # that of most bytes, and arrays with other roles that hardly count are not named
        n_bytes: Counter[tuple[str, bool]] = Counter()
        found: dict[tuple[str, bool], dict[str, None]] = defaultdict(dict)
        is_computed = False
        for node in collective.nodes:
            for operand in node.inputs or (None,):  # a kernel may have no operands
                role, paths, is_argument = self._sent(collective, node, operand)
                n_bytes[role, bool(paths)] += operand.array.bytes if operand is not None else 0
                found[role, bool(paths)] |= dict.fromkeys(paths)
                is_computed |= operand is not None and not is_argument
        most = n_bytes.most_common()
        role, has_paths = most[0][0] if most else ('activations', False)
        least = _MIN_NAMED * n_bytes.total()
        named = [key for key, n in most if key == most[0][0] or n >= least] if has_paths else []
        return replace(
            collective,
            role=role,
            is_backward=is_backward or role == 'gradients',
            of=tuple(dict.fromkeys(path for key in named for path in found[key])),
            axes=_axes(collective, self._lines) if role == 'activations' and is_computed else '',
        )

    def _sent(
        self, collective: Collective, node: Node, operand: Node | None
    ) -> tuple[str, Sequence[str], bool]:
        """Returns the role and the paths of an operand, and whether it is an argument."""
        # of several arrays, each has its own operation: XLA may keep the name of one, or of all
        own = operand.op.op_name if operand is not None and len(node.inputs) > 1 else ''
        is_backward = 'transpose(' in (own or collective.op_name)
        shard = operand
        if operand is not None and collective.kind not in _MOVES:
            shard = padded_shard(operand)
        arguments = self._arguments(shard) if shard is not None else ()
        if arguments:
            roles = {self.roles[i] for i in arguments}
            role = roles.pop() if len(roles) == 1 else 'activations'
            return role, [self._inputs[i][0] for i in arguments], True
        values = [node] if operand is None else results(node, operand)
        used_by = sorted({i for value in values for i in self._uses.get(value, ())})
        paths = [self._output_paths[i] for i in used_by if i in self._output_paths]
        updates_weights = any(
            self.roles.get(i) == 'weights'
            for output in used_by
            for i in self.updated.get(output, ())
        )
        if not used_by or not (is_backward or updates_weights):
            return 'activations', paths, False
        # a gather outside the backward pass sends the new weights, as in ZeRO
        is_gather = collective.kind == 'all-gather' or shard not in (None, operand)
        return ('weights' if is_gather and not is_backward else 'gradients'), paths, False

    def _arguments(self, sent: Node) -> Sequence[int]:
        """Returns the numbers of the parameters that are sent, or () if it is another array.

        A weight stays one if only constants and other weights change it, as when int8 is converted
        to bf16 with a scale, and if the step has updated it: then the program returns it in the
        place of the argument.
        """
        moved = self._parameters(sent)
        if moved is not None:
            return moved
        computed = self._parameters(sent, elementwise=True)
        if computed and all(self.roles[i] == 'weights' for i in computed):
            return computed
        replaced = self._replaced_by(sent)
        if not replaced:
            return ()
        numbers, _ = self._computed_from.of(sent)
        return [i for i in replaced if i in numbers]

    def _parameters(self, node: Node, elementwise: bool = False) -> Sequence[int] | None:
        """Returns the parameters that a value consists of, or None if it has other numbers.

        Parameters after `inputs` are Refs that the function closes over, which have no path.
        """
        numbers, has_others = (self._computed_from if elementwise else self._moved_from).of(node)
        if has_others or not numbers or max(numbers) >= len(self._inputs):
            return None
        return sorted(numbers)

    def _replaced_by(self, node: Node) -> Sequence[int]:
        """Returns the parameters in whose place the program returns a value, or its next value."""
        values = [strip(node, MOVES, self._moved)]
        while values[-1].opcode == 'dynamic-update-slice':  # XLA may update a copy of a cache
            values.append(strip(values[-1].inputs[0], MOVES, self._moved))
        used_by = {output for value in values for output in self._uses.get(value, ())}
        return sorted({i for output in used_by for i in self.updated.get(output, ())})


def _find_roles(
    graph: Graph, inputs: Sequence[tuple[str, str]], by_output: Mapping[int, Sequence[int]]
) -> dict[int, str]:
    """Returns the role of each parameter: 'weights', 'cache' or 'activations'.

    In a train step, weights are the updated arguments, also optimizer states, or all arguments if
    none is updated. In inference, updated arguments are caches, and all others are weights, also
    those that are returned as they are: `nnx.jit` returns the state of its modules. Only
    floating-point arrays count and, in inference, arrays of int8 and int4.
    """
    is_train_step = _is_train_step(graph)
    pattern = r'b?float' if is_train_step else r'b?float|int[48]\b'
    numbers = [i for i, (_, dtype) in enumerate(inputs) if re.match(pattern, dtype)]
    kept = set() if is_train_step else _returned_inputs(graph)
    pairs = {(output, i) for output, indices in by_output.items() for i in indices}
    updated = {i for _, i in pairs - kept}
    roles = dict.fromkeys(range(len(inputs)), 'activations')
    updates_none = updated.isdisjoint(numbers)
    for i in numbers:
        if is_train_step:
            roles[i] = 'weights' if updates_none or i in updated else 'activations'
        else:
            roles[i] = 'cache' if i in updated else 'weights'
    return roles


def _returned_inputs(graph: Graph) -> set[tuple[int, int]]:
    """Returns (output, parameter) for each output that is a parameter."""
    sources = ((output, strip(node)) for output, node in enumerate(graph.outputs))
    return {(o, int(n.op.operand_text)) for o, n in sources if n.opcode == 'parameter'}


def _is_train_step(graph: Graph) -> bool:
    """Whether a program has a backward pass or, like an optimizer update, no matmuls."""
    return '/transpose(' in graph.program.text or next(find_products(graph), None) is None


def _updated_inputs(
    graph: Graph, inputs: Sequence[tuple[str, str]], outputs: Mapping[int, str]
) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
    """Returns {output number: the parameters that the output replaces}.

    Also those that it replaces in the next call. It may reuse the memory of another one.

    An output replaces a parameter that is donated to it. It also replaces parameters with a
    matching path, such as 'state/w' for 'result/state/w', 'result/w' or 'result/1/0/w'. In
    inference, these parameters must also have the shape and dtype of the output.

    Arrays that are passed and returned bare, as by `w, m, loss = step(w, m, batch)`, have no path
    in common: see `_updated_bare`.
    """
    by_path: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(inputs):
        for end in {path, path.partition('/')[2]}:
            by_path.setdefault(end, []).append(i)
    is_train_step = _is_train_step(graph)
    types = {number: node.arrays for number, node in graph.parameters.items()}
    results = [node.arrays for node in graph.outputs]
    updated: dict[int, list[int]] = defaultdict(list)
    for output, path in outputs.items():
        ends = [path.partition('/')[2]]  # without 'result'
        while ends[-1].partition('/')[0].isdecimal() or len(ends) == 1:  # and without positions
            ends.append(ends[-1].partition('/')[2])
        for end in {*ends} - {''}:
            for i in by_path.get(end, ()):
                if is_train_step or types.get(i) == results[output]:
                    updated[output].append(i)
    numbers = {i for replaced in updated.values() for i in replaced}
    bare = [i for i, (path, _) in enumerate(inputs) if '/' not in path and i not in numbers]
    rest = [
        output
        for output, path in outputs.items()
        if output not in updated and output < len(results) and _BARE_RESULT.fullmatch(path)
    ]
    found = _updated_bare(graph, bare, rest)
    updated |= {output: [i] for output, i in found.items()}
    replaced = {output: [*parameters] for output, parameters in updated.items()}
    # JAX donates an argument to the first result of its type, which may replace another argument
    for output, parameter in graph.program.aliases.items():
        if parameter < len(inputs) and output not in found and parameter not in found.values():
            updated[output].insert(0, parameter)
            replaced.setdefault(output, [parameter])
    return updated, replaced


def _gradients(graph: Graph, replaced: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
    """Returns {output: its parameters} for a function that returns gradients by the same paths.

    A new weight or state is computed from the old one by elementwise operations, a gradient is not.
    Empty if one output is new, since a step may also replace a state by a gradient, or donated.
    """
    if '/transpose(' not in graph.program.text:
        return {}
    kept, found = _returned_inputs(graph), dict[int, Sequence[int]]()
    computed_from = Origins(elementwise=True)
    for output, parameters in replaced.items():
        if any((output, i) in kept for i in parameters):
            continue
        numbers, _ = computed_from.of(graph.outputs[output])
        if not numbers.isdisjoint(parameters):
            return {}
        found[output] = parameters
    return {} if any(output in graph.program.aliases for output in found) else found


def _updated_bare(graph: Graph, inputs: Sequence[int], outputs: Sequence[int]) -> dict[int, int]:
    """Returns {output number: the parameter that the output replaces}, by what is computed.

    In a train step, an output replaces a parameter of its shard's shape and dtype that elementwise
    operations update: `w - lr * g`. New weights depend on the states of the optimizer, too, so the
    outputs that can replace only one parameter take theirs first. In inference, an output replaces
    a parameter if only slices of it are updated, as in a cache. What stays ambiguous is left out.
    """
    has_backward = '/transpose(' in graph.program.text
    candidates: dict[int, set[int]] = {}
    computed_from = Origins(elementwise=True)
    for output in outputs:
        node = graph.outputs[output]
        if has_backward:
            numbers, _ = computed_from.of(node)
        else:
            found = _updated_in_place(node)
            numbers = {int(n.op.operand_text) for n in found if n.opcode == 'parameter'}
        candidates[output] = {
            i for i in numbers & {*inputs} if graph.parameters[i].arrays == node.arrays
        }
    updated: dict[int, int] = {}
    while single := {o: min(found) for o, found in candidates.items() if len(found) == 1}:
        # several that replace the same parameter are ambiguous
        counts = Counter(single.values())
        updated |= {output: i for output, i in single.items() if counts[i] == 1}
        for found in candidates.values():
            found -= {*counts}
    return updated


def _updated_in_place(node: Node) -> Sequence[Node]:
    """Returns the array of which an output has updated slices, or () if there is not one."""

    def sources(node: Node) -> Sequence[Node]:
        moved = moved_operand(node)
        if moved is not None:
            return (moved,)
        if node.opcode in _UPDATES:
            return node.inputs[:1]
        return node.inputs if node.opcode == 'phi' else ()

    found = reached([node], sources)
    ends = [one for one in found if not sources(one)]
    is_updated = any(one.opcode in _UPDATES for one in found)
    return ends if is_updated and len(ends) == 1 else ()


_UPDATES = ('dynamic-update-slice', 'scatter')


# the axis names of a constraint also hold for elementwise operations on its source line
_ELEMENTWISE = frozenset(
    (
        *('add', 'convert_element_type', 'cos', 'div', 'exp', 'logistic', 'max', 'min', 'mul'),
        *('neg', 'select_n', 'sharding_constraint', 'sin', 'sqrt', 'square', 'sub', 'tanh'),
    )
)
_EINSUM = re.compile(r'/([A-Za-z,]+)->([A-Za-z]*)/')
# {'file:line': the expressions on the line that have axis names}
NamedLines: TypeAlias = Mapping[str, Sequence[tuple[Span, AxisNames]]]


def find_named_lines(traced: FlatJaxpr) -> NamedLines:
    """Finds the source lines of constraints and einsums of einshard, and of the calls of helpers.

    A compiled program drops most scopes, so a collective finds its names by its source line.
    """
    found: dict[str, dict[tuple[Span, AxisNames], None]] = {}
    for op in traced.ops:
        if op.site.names is not None:
            # the second frame may call a helper function, such as `shard_activations`
            for span in op.site.frames[:2]:
                for line in range(span.line, span.end_line + 1):
                    key = f'{span.file}:{line}'
                    found.setdefault(key, {})[span, op.site.names] = None
    return {line: tuple(names) for line, names in found.items()}


def _axes(collective: Collective, lines: NamedLines) -> str:
    """Reads `Collective.axes` from the einsum or the constraint on the source line."""
    ndim, op_name = len(collective.array_types[0].shape), collective.op_name
    own = names_in(op_name)
    if own is not None and own.of_constraint is None:
        return _axes_of_einsum(collective, own.arrays)
    if einsum := _EINSUM.search(op_name):
        letters = tuple(map(tuple, (*einsum[1].split(','), einsum[2])))
        names = _names_on_line(collective, lines, lambda names: len(names) == len(letters))
        axes = _axes_of_einsum(collective, names or letters)
        return axes if names or '>' not in axes else einsum[0][1:-1]
    if _ELEMENTWISE.issuperset(operations(op_name)):
        found = own and own.arrays
        if found is None or len(found[0]) != ndim:
            found = _names_on_line(collective, lines, lambda names: [*map(len, names)] == [ndim])
        return ' '.join(found[0]) if found and all(found[0]) else ''
    return ''


def _axes_of_einsum(collective: Collective, arrays: _Arrays) -> str:
    *operands, result = arrays
    ndim, op_name = len(collective.array_types[0].shape), collective.op_name
    is_forward = 'transpose(' not in op_name or '/rematted_computation/' in op_name
    if collective.kind in _MOVES:  # an operand, or the gradient of the result
        candidates = operands if is_forward else [*operands, result]
    else:  # the result, or the gradient of an operand
        candidates = [result] if is_forward else operands
    # the compiler may have merged axes, so accept a single candidate of any ndim
    fitting = [c for c in candidates if len(c) == ndim or len(candidates) == 1]
    if len(fitting) == 1:
        return ' '.join(fitting[0])
    return f'{", ".join(map(" ".join, operands))} -> {" ".join(result)}'


def _names_on_line(
    collective: Collective, lines: NamedLines, fits: Callable[[_Arrays], bool]
) -> _Arrays | None:
    """Returns the names on the line of a collective, or None if several constraints are there."""
    for line in filter(None, (collective.called_at, collective.source)):
        found = [(span, names.arrays) for span, names in lines.get(line, ()) if fits(names.arrays)]
        if line == collective.source and collective.column:
            number, column = int(line.rpartition(':')[2]), collective.column - 1
            inside = [pair for pair in found if pair[0].contains(number, column)]
            found = inside or found
        if len({arrays for _, arrays in found}) == 1:
            return found[0][1]
    return None
