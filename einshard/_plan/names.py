"""Propagates axis names through a flattened program.

An axis has the names that its sharding comes from: `('embed',)`, or `()` for an axis that is not
sharded, or None if unknown. Names come from arguments and constraints. They go forward through
all operations; and backward from constraints and results to the product that makes the value, which
can sum its partial results directly into that sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .flatten import Op, Program

Names: TypeAlias = tuple[str, ...]
AxisNames: TypeAlias = tuple[Names | None, ...]

_CONSTRAINT = 'sharding_constraint'


def name_axes(
    program: Program,
    arguments: Sequence[AxisNames | None],
    results: Sequence[AxisNames | None],
) -> list[AxisNames]:
    """Returns the names of the axes of every value."""
    required = _Table(program)
    for value, names in zip(program.results, results, strict=True):
        required.set(value, names)
    # twice: the names of a loop's carry are known only after the first pass
    for _ in range(2):
        for op in reversed(program.ops):
            _name_operands(op, required)
    forward = _Table(program)
    for value, names in zip(program.arguments, arguments, strict=True):
        forward.set(value, names)
        if value is not None:
            forward.set(value, required.names[value])
    for _ in range(2):
        for op in program.ops:
            _name_results(op, forward, required)
    return [tuple(names) for names in forward.names]


class _Table:
    """The axis names of every value; a name that is set does not change."""

    def __init__(self, program: Program):
        self.specs = [value.spec for value in program.values]
        self.names: list[list[Names | None]] = [[None] * len(v.shape) for v in program.values]

    def set(self, value: int | None, names: Sequence[Names | None] | None) -> None:
        for axis, one in enumerate(names or ()):
            if value is not None and self.names[value][axis] is None:
                self.names[value][axis] = one


def _name_operands(op: Op, required: _Table) -> None:
    """Gives each operand the axis names that its consumers require."""
    if op.primitive == _CONSTRAINT:
        required.set(op.ins[0], (op.outs[0] is not None and required.specs[op.outs[0]]) or ())
    elif op.relation.einsum is None and op.primitive != 'scan_axis':
        for i, axis, o, of_out in op.relation.links:
            old, new = op.ins[i], op.outs[o]
            if old is not None and new is not None and required.names[old][axis] is None:
                required.names[old][axis] = required.names[new][of_out]


def _name_results(op: Op, forward: _Table, required: _Table) -> None:
    """Gives each result the axis names of its constraint, its operands or its consumers."""
    chooses = op.relation.einsum is not None
    for out in op.outs:
        if out is not None and op.primitive == _CONSTRAINT:
            forward.set(out, forward.specs[out])
        elif out is not None and chooses:
            forward.set(out, required.names[out])
    for i, axis, o, of_out in op.relation.links:
        old, new = op.ins[i], op.outs[o]
        if old is not None and new is not None and forward.names[new][of_out] is None:
            forward.names[new][of_out] = forward.names[old][axis]
    if op.primitive not in _CONNECTIONS:
        for out in op.outs:
            if out is not None:
                forward.set(out, required.names[out])


# the names of what a loop carries or stacks may come from another operation
_CONNECTIONS = ('carry', 'scan_input', 'scan_output', 'scan_axis')
