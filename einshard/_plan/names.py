"""Propagates axis names through a flattened program.

An array axis has a tuple of names, which determine its sharding: usually one, `('embed',)`; `()` if
the axis is not sharded; None while they are unknown. Names come from arguments, results and
constraints. They propagate forward through all operations, and backward from constraints and
results to the contraction that computes the value, whose partial sums can be reduced directly to
that sharding.
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
    """Returns the axis names of each value of a program.

    `arguments` and `results` have the axis names from specs and from Flax, or None.
    """
    required = _NameTable(program)
    for value, names in zip(program.results, results, strict=True):
        if value is not None:
            required.fill(value, names)
    # twice, because the names of a loop's carry are known only after the first time
    for _ in range(2):
        for op in reversed(program.ops):
            _name_operands(op, required)
    forward = _NameTable(program)
    for value, names in zip(program.arguments, arguments, strict=True):
        if value is not None:
            forward.fill(value, names)
            forward.fill(value, required.names[value])
    for _ in range(2):
        for op in program.ops:
            _name_results(op, forward, required)
    return [tuple(names) for names in forward.names]


class _NameTable:
    def __init__(self, program: Program):
        self.specs = [value.spec for value in program.values]
        self.names: list[list[Names | None]] = [[None] * len(v.shape) for v in program.values]

    def fill(self, value: int, names: Sequence[Names | None] | None) -> None:
        """Sets the names of the axes whose names are unknown."""
        for axis, axis_names in enumerate(names or ()):
            if self.names[value][axis] is None:
                self.names[value][axis] = axis_names


def _name_operands(op: Op, required: _NameTable) -> None:
    """Adds to `required` the axis names that an operation requires of its operands.

    A constraint requires the names in its spec. Operations with an `Einsum`, such as contractions,
    and 'scan_axis' operations require none. Others pass on the names required of their results.
    """
    if op.primitive == _CONSTRAINT:
        for old, new in zip(op.arrays_in, op.arrays_out, strict=True):
            required.fill(old, required.specs[new])
    elif op.relation.einsum is None and op.primitive != 'scan_axis':
        for i, axis, o, out_axis in op.relation.links:
            old, new = op.ins[i], op.outs[o]
            if old is not None and new is not None and required.names[old][axis] is None:
                required.names[old][axis] = required.names[new][out_axis]


def _name_results(op: Op, forward: _NameTable, required: _NameTable) -> None:
    """Adds the axis names of an operation's results to `forward`.

    The names come from a constraint, else from the operands, else from `required`; for an operation
    with an `Einsum`, from `required` first.
    """
    for out in op.arrays_out:
        if op.primitive == _CONSTRAINT:
            forward.fill(out, forward.specs[out])
        elif op.relation.einsum is not None:
            forward.fill(out, required.names[out])
    for i, axis, o, out_axis in op.relation.links:
        old, new = op.ins[i], op.outs[o]
        if old is not None and new is not None and forward.names[new][out_axis] is None:
            forward.names[new][out_axis] = forward.names[old][axis]
    # values that a loop carries or stacks may still get their names from another operation
    if op.primitive not in ('carry', 'scan_input', 'scan_output', 'scan_axis'):
        for out in op.arrays_out:
            forward.fill(out, required.names[out])
