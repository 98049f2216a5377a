"""Propagates axis names through a flattened program.

An axis of a value has the names that its sharding depends on: `('embed',)`; or `()` if it is not
sharded; or None if unknown. Names come from arguments, results and constraints. They go
forward through all operations. They also go backward from constraints and results to the product
that computes the value, because it can add its partial sums directly in that sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .flatten import Op, Program

# the names of one axis
Names: TypeAlias = tuple[str, ...]
# the names of each axis of an array
AxisNames: TypeAlias = tuple[Names | None, ...]

_CONSTRAINT = 'sharding_constraint'


def name_axes(
    program: Program,
    arguments: Sequence[AxisNames | None],
    results: Sequence[AxisNames | None],
) -> list[AxisNames]:
    """Returns the names of the axes of every value.

    Args:
        arguments, results: the axis names from specs and metadata; None for arrays without them.
    """
    required = _Table(program)
    for value, names in zip(program.results, results, strict=True):
        if value is not None:
            required.set(value, names)
    # twice: the names of a loop's carry are known only after the first pass
    for _ in range(2):
        for op in reversed(program.ops):
            _name_operands(op, required)
    forward = _Table(program)
    for value, names in zip(program.arguments, arguments, strict=True):
        if value is not None:
            forward.set(value, names)
            forward.set(value, required.names[value])
    for _ in range(2):
        for op in program.ops:
            _name_results(op, forward, required)
    return [tuple(names) for names in forward.names]


class _Table:
    """The axis names of every value. Names that are known do not change."""

    def __init__(self, program: Program):
        self.specs = [value.spec for value in program.values]
        self.names: list[list[Names | None]] = [[None] * len(v.shape) for v in program.values]

    def set(self, value: int, names: Sequence[Names | None] | None) -> None:
        for axis, of_axis in enumerate(names or ()):
            if self.names[value][axis] is None:
                self.names[value][axis] = of_axis


def _name_operands(op: Op, required: _Table) -> None:
    """Gives each operand the axis names that the operation requires.

    These are the names of a constraint, or those that consumers require of the results. An
    operation with an einsum requires none.
    """
    if op.primitive == _CONSTRAINT:
        for old, new in zip(op.arrays_in, op.arrays_out, strict=True):
            required.set(old, required.specs[new])
    elif op.relation.einsum is None and op.primitive != 'scan_axis':
        for i, axis, o, of_out in op.relation.links:
            old, new = op.ins[i], op.outs[o]
            if old is not None and new is not None and required.names[old][axis] is None:
                required.names[old][axis] = required.names[new][of_out]


def _name_results(op: Op, forward: _Table, required: _Table) -> None:
    """Gives each result the axis names of its constraint, its operands or its consumers.

    They are tried in this order; if the operation has an einsum, consumers come before operands.
    """
    for out in op.arrays_out:
        if op.primitive == _CONSTRAINT:
            forward.set(out, forward.specs[out])
        elif op.relation.einsum is not None:
            forward.set(out, required.names[out])
    for i, axis, o, of_out in op.relation.links:
        old, new = op.ins[i], op.outs[o]
        if old is not None and new is not None and forward.names[new][of_out] is None:
            forward.names[new][of_out] = forward.names[old][axis]
    # the names of what a loop carries or stacks may come from another operation
    if op.primitive not in ('carry', 'scan_input', 'scan_output', 'scan_axis'):
        for out in op.arrays_out:
            forward.set(out, required.names[out])
