"""Traces values of a program to its parameters, and to source lines."""

from __future__ import annotations

from .module import Computation, Instruction, Module, Site, Value

# operations that gather, permute, slice, copy, reshape or convert their first operand
_MOVES = frozenset(
    (
        *('all-gather', 'all-gather-done', 'all-gather-start', 'bitcast', 'collective-permute'),
        *('convert', 'copy', 'copy-done', 'copy-start', 'dynamic-slice', 'opt-barrier'),
        *('reshape', 'slice', 'slice-done', 'slice-start', 'transpose'),
    )
)
_MAX_STEPS = 200  # keeps traces short in long programs


class Origins:
    """Traces values back to program parameters.

    Follows the operations in `_MOVES`, also in fusions. Follows loops that do not change the value:
    a scan over microbatches does not change the weights.
    """

    def __init__(self, module: Module):
        self._module = module
        self._cache: dict[tuple[str, str, int], int | None] = {}

    def of(self, site: Site) -> int | None:
        """Returns the number of the program parameter that operand 0 of `site.op` comes from."""
        operands = site.op.operands
        return self._trace(Value(site.comp, operands[0]), -1, _MAX_STEPS) if operands else None

    def _trace(self, value: Value, element: int, steps: int) -> int | None:
        """Traces an array (`element` -1), or an element of a tuple, in at most `steps` steps."""
        key = (value.comp.name, value.name, element)
        if key not in self._cache:
            self._cache[key] = self._trace_uncached(value, element, steps - 1) if steps else None
        return self._cache[key]

    def _trace_uncached(self, value: Value, element: int, steps: int) -> int | None:
        op = value.op
        if op.opcode == 'parameter':
            return self._trace_parameter(value, element, steps)
        if op.opcode == 'get-tuple-element':
            return self._trace(value.sibling(op.operands[0]), op.element, steps)
        if op.opcode == 'tuple' and element >= 0:
            return self._trace(value.sibling(op.operands[element]), -1, steps)
        if op.opcode in ('fusion', 'call'):
            called = self._module.called(op)
            return self._trace(Value(called), element, steps) if called else None
        if op.opcode == 'while':
            start = value.sibling(op.operands[0])
            return self._trace(start, element, steps) if self._is_invariant(op, element) else None
        operand = _moved_operand(op)
        return None if operand is None else self._trace(value.sibling(operand), element, steps)

    def _trace_parameter(self, value: Value, element: int, steps: int) -> int | None:
        op, comp = value.op, value.comp
        if comp.is_entry:
            return op.parameter_number
        if self._module.is_shared(comp):
            return None  # each call may pass a different value
        for _, caller, call in self._module.call_sites(comp):
            if call.opcode == 'while':
                if not self._is_invariant(call, element):
                    return None
                return self._trace(Value(caller, call.operands[0]), element, steps)
            if call.opcode in ('fusion', 'call'):
                passed = Value(caller, call.operands[op.parameter_number])
                return self._trace(passed, element, steps)
        return None

    def _is_invariant(self, loop: Instruction, element: int) -> bool:
        """Whether the loop body returns this element of the state unchanged, except by `_MOVES`."""
        body = self._module.computation(loop.body)
        root = body.root
        if element < 0 or root.opcode != 'tuple' or element >= len(root.operands):
            return False
        op = body[root.operands[element]]
        for _ in range(_MAX_STEPS):
            operand = _moved_operand(op)
            if op.opcode == 'get-tuple-element':
                state = body[op.operands[0]]
                if state.opcode == 'parameter':
                    return op.element == element
                if state.opcode != 'while' or not self._is_invariant(state, op.element):
                    return False
                state = body[state.operands[0]]
                operand = state.operands[op.element] if state.opcode == 'tuple' else None
            if operand is None:
                return False
            op = body[operand]
        return False


def _moved_operand(op: Instruction) -> str | None:
    is_move = op.opcode in _MOVES or op.joins_slices
    return op.operands[0] if is_move and op.operands else None


def user_with_source(
    module: Module, comp: Computation, name: str, distance: int = 3
) -> Instruction | None:
    """Finds a direct or indirect user of the array `name` that has a source line.

    `distance` limits the steps beyond the direct users. Entering a fusion is a step, too.
    """
    for user in comp.users(name):
        called = module.called(user)
        if module.source(user) is not None:
            return user
        if called is not None and module.source(called.root) is not None:
            return called.root
        if called is not None and distance and user.opcode in ('fusion', 'call'):
            inside = called.parameter(user.operands.index(name))
            found = user_with_source(module, called, inside, distance - 1)
            if found is not None:
                return found
        found = user_with_source(module, comp, user.name, distance - 1) if distance else None
        if found is not None:
            return found
    return None
