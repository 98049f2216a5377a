"""The graph of a compiled program: which array each operation computes from which.

HLO passes arrays through tuples, fusions, calls, asynchronous pairs, conditionals and loops. Here,
tuples are Python tuples; fusions, calls and asynchronous computations are inlined at each call; and
the state of a loop is `phi` nodes. So an analysis follows `inputs` and `users`, and meets none of
them. The idea of phi nodes is that of SSA form: R. Cytron et al., "Efficiently Computing
Static Single Assignment Form and the Control Dependence Graph", 1991.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .opcodes import COLLECTIVES, SOURCES
from .text import ArrayType, HloModule, Instruction, LineErrors, Unreadable


class Node:
    """An array that the program computes, or the arrays of one operation.

    Attributes:
        op: the instruction. For a phi or an exit, the loop; for an element, the operation.
        opcode: that of `op`, or one of these:
            'phi': an array of a loop's state, in an iteration. Its inputs are the value before the
                loop, and the value after an iteration.
            'exit': an array of a loop's state after the loop. Its input is the value after an
                iteration.
            'branch': a result of a conditional. Its inputs are the results of the branches. (The
                node of the conditional itself has the predicate as input, and no result.)
            'element': one of several results of an operation. Its input is the operation.
        type: the HLO type, with its layout.
        arrays: the dtypes and shapes of its arrays; see `array` for that of one array.
        index: the number of an element; -1 for other nodes.
        inputs, users: the nodes that this one reads, and those that read it.
        scope: the calls and loops that contain it.
    """

    __slots__ = ('arrays', 'index', 'inputs', 'op', 'opcode', 'scope', 'type', 'users')

    def __init__(
        self,
        opcode: str,
        op: Instruction,
        type_: str,
        arrays: tuple[ArrayType, ...],
        inputs: Sequence[Node],
        scope: CallSite,
        index: int = -1,
    ):
        self.opcode, self.op, self.type, self.inputs = opcode, op, type_, tuple(inputs)
        self.arrays, self.scope, self.index = arrays, scope, index
        self.users: list[Node] = []

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def array(self) -> ArrayType:
        """The first of `arrays`."""
        return self.arrays[0]

    @property
    def attributes(self) -> str:
        return self.op.attributes

    @property
    def loop(self) -> Loop | None:
        """The innermost loop that contains it."""
        return self.scope.loop

    @property
    def loops(self) -> Sequence[Loop]:
        """The loops that contain it, outermost first."""
        found: list[Loop] = []
        loop = self.scope.loop
        while loop is not None:
            found.append(loop)
            loop = loop.scope.loop
        return found[::-1]

    def __repr__(self) -> str:
        return f'{self.opcode} {self.name}'


@dataclass(frozen=True, eq=False, slots=True)
class CallSite:
    """A call of a computation, and the calls around it.

    Attributes:
        op: the instruction that calls: a fusion, a call, a loop, a conditional, .. None for the
            program itself.
        outside: the scope of that instruction. It is not copied, because calls may be nested deep.
        loop: the innermost loop.
        fusion: the outermost fusion, or None. What is inside needs no memory of its own.
        in_branch: whether one of the calls is a conditional.
        is_condition: whether this is in the condition of the innermost loop.
    """

    op: Instruction | None = None
    outside: CallSite | None = None
    loop: Loop | None = None
    fusion: Instruction | None = None
    in_branch: bool = False
    is_condition: bool = False

    @property
    def calls(self) -> Iterator[Instruction]:
        """The instructions that call, innermost first."""
        scope: CallSite | None = self
        while scope is not None and scope.op is not None:
            yield scope.op
            scope = scope.outside

    def inside(self, op: Instruction) -> CallSite:
        fusion = self.fusion or (op if op.opcode.startswith('fusion') else None)
        in_branch = self.in_branch or op.opcode == 'conditional'
        return CallSite(op, self, self.loop, fusion, in_branch, self.is_condition)

    def inside_loop(self, loop: Loop, is_condition: bool) -> CallSite:
        return CallSite(loop.op, self, loop, self.fusion, self.in_branch, is_condition)


@dataclass(eq=False)
class Loop:
    """A while loop: its state, and its condition.

    Attributes:
        trips: the result of `integers.count_trips`, in a tuple, once it is known.
        invariants: the results of `queries.is_invariant` that are known, for a phi and moves.
    """

    op: Instruction
    scope: CallSite
    phis: list[Node] = field(default_factory=list)
    condition: Node | None = None
    trips: tuple[int | None] | None = None
    invariants: dict[tuple[Node, Collection[str]], bool] = field(default_factory=dict)


# the result of an instruction: a node, or a tuple of results
Result: TypeAlias = 'Node | tuple[Result, ...]'
# yields (instruction, called computation, arguments, scope), is sent its result, returns a result
_Call: TypeAlias = Generator[tuple[Instruction, str, Sequence[Result], 'CallSite'], Result, Result]

_INDEX = re.compile(r'index=(\d+)')
_TYPE_TOKEN = re.compile(r'[()]|[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?')  # a layout has parentheses
_ENTRY = CallSite()
_MAX_PARAMETERS = 2**20  # queries.py has a bit for each


class Graph:
    """The arrays of a program, and how it computes them.

        >>> from einshard._program.hlo.graph import Graph
        >>> from einshard._program.hlo.text import HloModule
        >>> text = '''HloModule jit_f
        ...
        ... %double (a: f32[8]) -> f32[8] {
        ...   %a = f32[8]{0} parameter(0)
        ...   ROOT %b = f32[8]{0} add(%a, %a)
        ... }
        ...
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   ROOT %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%double
        ... }
        ... '''
        >>> graph = Graph(HloModule(text))
        >>> graph.outputs, graph.outputs[0].inputs
        ([add b], (parameter x, parameter x))
        >>> graph.parameters[0].users
        [add b]

    Attributes:
        program: the parsed text.
        nodes: all nodes, in execution order.
        parameters: the parameters of the program, by number.
        outputs: the results of the program, by number.
    """

    def __init__(self, program: HloModule):
        self.program = program
        self.nodes: list[Node] = []
        self.parameters: dict[int, Node] = {}
        self.outputs: list[Node] = []
        if program.entry:
            self.outputs = list(leaves(self._inline(program.entry)))
        for node in self.nodes:
            for read in dict.fromkeys(node.inputs):
                read.users.append(node)

    def _add(
        self,
        opcode: str,
        op: Instruction,
        type_: str,
        inputs: Sequence[Node],
        scope: CallSite,
        index: int = -1,
    ) -> Node:
        arrays = self.program.array_types(type_)
        node = Node(opcode, op, type_, arrays, inputs, scope, index)
        self.nodes.append(node)
        return node

    def _inline(self, entry: str) -> Result:
        """Adds the nodes of the program, and returns its results.

        Calls are on a list, not on the stack of Python, because they may be nested deep.
        """
        calls: list[_Call] = [self._call(entry, None, _ENTRY)]
        names = [entry]
        active = {entry}
        result: Any = None
        while calls:
            try:
                op, name, arguments, scope = calls[-1].send(result)
            except StopIteration as returned:
                result = returned.value
                calls.pop()
                active.discard(names.pop())
            else:
                if name in active:
                    raise self.program.error(op.line, f'is in %{name}, and calls it', name)
                calls.append(self._call(name, arguments, scope))
                names.append(name)
                active.add(name)
                result = None
        return result

    def _call(self, name: str, arguments: Sequence[Result] | None, scope: CallSite) -> _Call:
        """Adds the nodes of one call of a computation, and returns its result.

        Yields the calls in it, and is sent their results.
        """
        values: dict[str, Any] = {}
        computations = self.program.computations
        started: dict[str, CallSite] = {}  # asynchronous calls that get their operands later
        result: Result = ()
        root: Result = ()

        def value(operand: str) -> Result:
            found = values.get(operand)
            if found is None:  # since JAX 0.12, '%pair#0' is an element of the tuple '%pair'
                operand, *indices = operand.split('#')
                found = values[operand]
                for index in indices:
                    found = found[int(index)]
            return found

        with LineErrors(self.program) as errors:
            for op in computations[name]:
                errors.op = op
                opcode = op.opcode
                operands: list[Result] = []
                if opcode not in SOURCES:
                    operands = [value(operand) for operand in op.operands]
                callee = self._inlined(op)
                if opcode == 'parameter':
                    number = int(op.operand_text)
                    if number >= _MAX_PARAMETERS:
                        raise Unreadable(op, 'has no valid number', op.operand_text)
                    if arguments is None:
                        result = self._split(self._add(opcode, op, op.type, [], scope), op.type)
                        if isinstance(result, Node):
                            self.parameters[number] = result
                    else:
                        if number >= len(arguments):
                            what = f'reads argument {number} of {len(arguments)} that %{name} gets'
                            raise Unreadable(op, what, str(number))
                        result = arguments[number]
                elif opcode == 'tuple':
                    result = tuple(operands)
                elif opcode == 'get-tuple-element':
                    index = _INDEX.match(op.attributes)
                    given = operands[0]
                    if index is None or not isinstance(given, tuple) or int(index[1]) >= len(given):
                        raise Unreadable(op, 'reads an element that its operand does not have')
                    result = given[int(index[1])]
                elif opcode == 'opt-barrier':
                    result = operands[0]
                elif opcode == 'while':
                    result = yield from self._loop(op, operands[0], scope)
                elif opcode == 'conditional':
                    result = yield from self._branches(op, operands, scope)
                elif (
                    callee
                    and not operands
                    and any(inner.opcode == 'parameter' for inner in computations[callee])
                ):  # the operands come with the -update
                    started[op.name] = scope.inside(op)
                    result = ()
                elif callee:
                    result = yield op, callee, operands, scope.inside(op)
                elif opcode.endswith(('-update', '-done')) and op.operands[0] in started:
                    at = started.pop(op.operands[0])
                    assert at.op is not None
                    result = yield at.op, self._inlined(at.op), operands[1:], at
                elif opcode.endswith(('-update', '-done')) and not _is_node(values, op.operands[0]):
                    result = operands[0]
                else:
                    inputs = [node for operand in operands for node in leaves(operand)]
                    node = self._add(opcode, op, op.type, inputs, scope)
                    is_pair = opcode.endswith('-start')
                    result = node if is_pair else self._split(node, op.type)
                values[op.name] = result
                if op.is_root:
                    root = result
        return root

    def _inlined(self, op: Instruction) -> str:
        """Returns the computation that replaces an instruction, or ''.

        Not those that reduce, sort and scatter apply to each element, nor those of custom calls,
        but for a collective that libtpu runs on the sparse cores of a TPU.
        """
        if op.opcode == 'custom-call':
            (name,) = op.callees.get('called_computations', ('',))[:1]
            ops = self.program.computations[name] if name else ()
            return name if any(each.opcode in COLLECTIVES for each in ops) else ''
        if op.opcode in ('fusion', 'call') or op.opcode.endswith('-start'):
            callees = op.callees
            for attribute in ('calls', 'called_computations', 'to_apply'):
                is_reducer = attribute == 'to_apply' and op.opcode not in ('call', 'call-start')
                if attribute in callees and not is_reducer:
                    return callees[attribute][0]
        return ''

    def _split(self, node: Node, type_: str) -> Result:
        """Adds a node for each array of a tuple, which may contain tuples."""
        if not type_.startswith('('):
            return node
        nested: list[list[Result]] = [[]]
        n = 0
        for token in _TYPE_TOKEN.finditer(type_):
            if token[0] == '(':
                nested.append([])
            elif token[0] == ')':
                elements = tuple(nested.pop())
                nested[-1].append(elements)
            else:
                nested[-1].append(self._add('element', node.op, token[0], [node], node.scope, n))
                n += 1
        [[result]] = nested
        return result

    def _branches(self, op: Instruction, operands: Sequence[Result], scope: CallSite) -> _Call:
        callees = op.callees
        names = callees.get('branch_computations') or [
            *callees['true_computation'],
            *callees['false_computation'],
        ]
        self._add(op.opcode, op, '()', [*leaves(operands[0])], scope)
        inside = scope.inside(op)
        results: list[Result] = []
        for name, operand in zip(names, operands[1:], strict=True):
            results.append((yield op, name, [operand], inside))

        def join(nodes: Sequence[Node]) -> Node:
            return self._add('branch', op, nodes[0].type, list(nodes), scope)

        return _map_leaves(join, *results)

    def _loop(self, op: Instruction, state: Result, scope: CallSite) -> _Call:
        loop = Loop(op, scope)
        callees = op.callees
        [body], [condition] = callees['body'], callees['condition']
        inside = scope.inside_loop(loop, False)
        unchanged = self._unchanged(body)

        def enter(before: Sequence[Node]) -> Node:
            phi = self._add('phi', op, before[0].type, [before[0]], inside)
            loop.phis.append(phi)
            return phi

        # an array that the body returns as it is stays one node, inside and after the loop
        entered: Result = tuple(
            part if i in unchanged else _map_leaves(enter, part)
            for i, part in enumerate(state if isinstance(state, tuple) else (state,))
        )
        entered = entered if isinstance(state, tuple) else entered[0]
        after = yield op, body, [entered], inside
        for phi, new in zip(leaves(entered), leaves(after), strict=True):
            if phi.opcode == 'phi' and phi.scope is inside:
                phi.inputs = (*phi.inputs, new)
        tested = yield op, condition, [entered], scope.inside_loop(loop, True)
        loop.condition = tested if isinstance(tested, Node) else None

        def leave(nodes: Sequence[Node]) -> Node:
            phi, new = nodes
            if new is phi:
                return phi.inputs[0] if phi.scope is inside else phi
            return self._add('exit', op, new.type, [new], scope)

        return _map_leaves(leave, entered, after)

    def _unchanged(self, body: str) -> set[int]:
        """Returns the numbers of the elements of its state that a loop body returns as they are."""
        ops = {op.name: op for op in self.program.computations[body]}
        root = next(op for op in ops.values() if op.is_root)
        if root.opcode != 'tuple':
            return set()
        unchanged: set[int] = set()
        for i, name in enumerate(root.operands):
            base, _, element = name.partition('#')
            op = ops[base]
            index = _INDEX.match(op.attributes)
            if op.opcode == 'get-tuple-element' and not element and index:
                base, element = op.operands[0], index[1]
            if element == str(i) and ops.get(base, root).opcode == 'parameter':
                unchanged.add(i)
        return unchanged


def _is_node(values: dict[str, Any], name: str) -> bool:
    """Whether an instruction has its own node. False for an asynchronous call that is inlined."""
    return isinstance(values[name], Node) and values[name].name == name


def leaves(result: Result) -> Iterator[Node]:
    """Yields the nodes of a result, in order."""
    pending = [result]
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending += part[::-1]
        else:
            yield part


def _map_leaves(function: Callable[[Sequence[Node]], Node], *results: Result) -> Result:
    """Calls `function` on the corresponding leaves of results of equal structure."""
    left: list[Iterator[Any]] = [iter([results])]  # the parts that are left, of each tuple
    made: list[list[Result]] = [[]]
    while left:
        parts = next(left[-1], None)
        if parts is None:
            left.pop()
            if left:
                whole = tuple(made.pop())
                made[-1].append(whole)
        elif isinstance(parts[0], tuple):
            left.append(zip(*parts, strict=True))
            made.append([])
        else:
            made[-1].append(function(parts))
    [[result]] = made
    return result
