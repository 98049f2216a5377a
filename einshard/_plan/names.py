"""Propagates axis names through a flattened program.

The sharding of an array axis depends on its names. Most axes have one name, as in ('embed',). An
axis that is not sharded has none. The names of arguments and constraints propagate forward through
all operations. The names of constraints and results also propagate backward, but only up to the
last contraction or reduction: its partial sums can be reduced directly to the required sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .._program.jaxpr.graph import Op, Program

# the names of one array axis
AxisNames: TypeAlias = tuple[str, ...]
# the names of each axis of an array; None for an axis whose names are not known yet
ArrayNames: TypeAlias = tuple[AxisNames | None, ...]

_CONSTRAINT = 'sharding_constraint'


def name_axes(
    program: Program,
    arguments: Sequence[ArrayNames | None],
    results: Sequence[ArrayNames | None],
) -> list[ArrayNames]:
    """Returns the axis names of each value of a program.

    `arguments` and `results` are the axis names that specs or metadata give, or None.
    """
    required = _NameTable(program)
    for value, names in zip(program.results, results, strict=True):
        if value is not None:
            required.fill(value, names)
    # twice, because the first pass finds the names of the values that loops carry
    for _ in range(2):
        for op in reversed(program.ops):
            # contractions, reductions and 'scan_axis' require no names of their operands
            if op.primitive == _CONSTRAINT:
                for old, new in zip(op.arrays_in, op.arrays_out, strict=True):
                    required.fill(old, required.specs[new])
            elif op.rule.einsum is None and op.primitive != 'scan_axis':
                for i, axis, o, out_axis in op.rule.links:
                    old, new = op.ins[i], op.outs[o]
                    if old is not None and new is not None and required.names[old][axis] is None:
                        required.names[old][axis] = required.names[new][out_axis]
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
        self.names: list[list[AxisNames | None]] = [[None] * len(v.shape) for v in program.values]

    def fill(self, value: int, names: Sequence[AxisNames | None] | None) -> None:
        """Sets the axis names of a value that are still unknown."""
        for axis, axis_names in enumerate(names or ()):
            if self.names[value][axis] is None:
                self.names[value][axis] = axis_names


def _name_results(op: Op, forward: _NameTable, required: _NameTable) -> None:
    """Adds the axis names of an operation's results to `forward`.

    A constraint gives the names in its spec. Otherwise, the names come from the operands, then from
    `required`. Contractions and reductions try `required` first.
    """
    for out in op.arrays_out:
        if op.primitive == _CONSTRAINT:
            forward.fill(out, forward.specs[out])
        elif op.rule.einsum is not None:
            forward.fill(out, required.names[out])
    for i, axis, o, out_axis in op.rule.links:
        old, new = op.ins[i], op.outs[o]
        if old is not None and new is not None and forward.names[new][out_axis] is None:
            forward.names[new][out_axis] = forward.names[old][axis]
    # not for what loops carry, slice or stack, because other operations may still name it
    if op.primitive not in ('carry', 'scan_input', 'scan_output', 'scan_axis'):
        for out in op.arrays_out:
            forward.fill(out, required.names[out])
