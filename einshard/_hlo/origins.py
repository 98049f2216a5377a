"""Traces values of a program to its parameters, and to source lines. Imports no JAX."""

from __future__ import annotations

from .module import Computation, Instruction, Module, Place, Value

# operations that slice, copy, reshape or convert their first operand
_PARTS = frozenset(
    (
        *('all-gather', 'all-gather-done', 'all-gather-start', 'bitcast', 'collective-permute'),
        *('convert', 'copy', 'copy-done', 'copy-start', 'dynamic-slice', 'opt-barrier'),
        *('optimization-barrier', 'reshape', 'slice', 'slice-done', 'slice-start', 'transpose'),
    )
)
_MAX_STEPS = 200  # because a loop may lead to a cycle


class Origins:
    """Traces values of a program back to its parameters.

    Follows copies, slices and conversions, into fusions and out of loops that do not change the
    value, such as a scan over the weights of layers.
    """

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[tuple[str, str, int], int | None] = {}

    def of(self, place: Place) -> int | None:
        """Returns the number of the parameter from which the first operand is copied, or None."""
        operands = place.op.operands
        return self._trace(Value(place.comp, operands[0]), -1, _MAX_STEPS) if operands else None

    def _trace(self, value: Value, element: int, left: int) -> int | None:
        key = (value.comp.name, value.name, element)
        if key not in self._known:
            self._known[key] = None  # ends the recursion if a value depends on itself
            self._known[key] = self._step(value, element, left - 1) if left else None
        return self._known[key]

    def _step(self, value: Value, element: int, left: int) -> int | None:
        op = value.op
        if op.opcode == 'parameter':
            return self._outside(value, element, left)
        if op.opcode == 'get-tuple-element':
            return self._trace(value.beside(op.operands[0]), op.element, left)
        if op.opcode == 'tuple' and element >= 0:
            return self._trace(value.beside(op.operands[element]), -1, left)
        if op.opcode in ('fusion', 'call'):
            called = self._module.called(op)
            return self._trace(Value(called), element, left) if called else None
        if op.opcode == 'while':
            start = value.beside(op.operands[0])
            return self._trace(start, element, left) if self._keeps(op, element) else None
        source = _source(op)
        return None if source is None else self._trace(value.beside(source), element, left)

    def _outside(self, value: Value, element: int, left: int) -> int | None:
        """Traces a parameter of a computation to its origin."""
        op, comp = value.op, value.comp
        if comp.is_entry:
            return int(op.given)
        for _, caller, call in self._module.call_sites(comp):
            if call.opcode == 'while':
                if not self._keeps(call, element):
                    return None
                return self._trace(Value(caller, call.operands[0]), element, left)
            if call.opcode in ('fusion', 'call'):
                return self._trace(Value(caller, call.operands[int(op.given)]), element, left)
        return None

    def _keeps(self, loop: Instruction, element: int) -> bool:
        """Whether a loop does not change an element of its state, except for a permute."""
        body = self._module.computation(loop.body)
        root = body.root
        if element < 0 or root.opcode != 'tuple' or element >= len(root.operands):
            return False
        op = body[root.operands[element]]
        for _ in range(_MAX_STEPS):
            source = _source(op)
            if op.opcode == 'get-tuple-element':
                state = body[op.operands[0]]
                if state.opcode == 'parameter':
                    return op.element == element
                if state.opcode != 'while' or not self._keeps(state, op.element):
                    return False
                state, at = body[state.operands[0]], op.element
                source = state.operands[at] if state.opcode == 'tuple' else None
            if source is None:
                return False
            op = body[source]
        return False


def _source(op: Instruction) -> str | None:
    """Returns the operand if an instruction only slices, reshapes or converts it; else None."""
    is_part = op.opcode in _PARTS or op.joins_slices
    return op.operands[0] if is_part and op.operands else None


def user_with_source(
    module: Module, comp: Computation, name: str, far: int = 3
) -> Instruction | None:
    """Finds the first user of an array that has a source line, up to `far` instructions away."""
    for user in comp.users(name):
        called = module.called(user)
        if module.source(user) is not None:
            return user
        if called is not None and module.source(called.root) is not None:
            return called.root
        if called is not None and far and user.opcode in ('fusion', 'call'):
            inside = called.parameter(user.operands.index(name))
            further = user_with_source(module, called, inside, far - 1)
            if further is not None:
                return further
        further = user_with_source(module, comp, user.name, far - 1) if far else None
        if further is not None:
            return further
    return None
