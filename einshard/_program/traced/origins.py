"""Where each mesh axis of each value comes from, and how it got there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .propagated import (
    CONSTRAINT,
    MANUAL_IN,
    MANUAL_OUT,
    SHARD,
    Axis,
    Frame,
    Operation,
    Propagated,
    Value,
    name_of,
)

ARGUMENT, RESULT, ASKED, TYPE, MANUAL, UNKNOWN = (
    *('argument', 'result', 'constraint', 'type', 'shard_map', 'unknown'),
)
# the last part of the path of constraints that the user writes: those on Auto axes, and those that
# change a type on Explicit axes
_ASKED = re.compile(r'(?:^|/)(?:sharding_constraint|reshard)$')
_END = re.compile(r'(input|output): (\d+)')


@dataclass(frozen=True)
class Origin:
    """Where a mesh axis of a value starts.

    Attributes:
        kind: 'argument' of the program, or 'result' for `out_shardings`; 'constraint' for
            `with_sharding_constraint`, `reshard` and einshard's own; 'type' for an operation whose
            type, on Explicit axes, has the axis though no operand does, as with `out_sharding=`;
            'shard_map' for its `in_specs` and `out_specs`; or 'unknown'.
        value: the argument or result.
        operation: the constraint, the operation of the type, or the side of the `shard_map`.
        name: what Shardy says, if unknown.
    """

    kind: str
    value: Value | None = None
    operation: Operation | None = None
    name: str = ''


def origin(program: Propagated, value: Value, axis: Axis) -> Origin:
    """Returns where a mesh axis of a value comes from.

    Args:
        axis: the name of a mesh axis, or a part of one.
    """
    name = _origin_name(value, axis)
    if end := _END.fullmatch(name):
        kind, values = (
            (ARGUMENT, program.arguments) if end[1] == 'input' else (RESULT, program.results)
        )
        return Origin(kind, values[int(end[2])])
    if name in program.manual:
        return Origin(MANUAL, operation=program.manual[name])
    if name == 'self' or not name:
        if value.argument is not None:
            return Origin(ARGUMENT, value)
        if value.result is not None and name:
            return Origin(RESULT, value)
        producer = value.producer
        if producer is not None and producer.kind == SHARD:  # inside a shard_map
            producer = producer.operands[0].producer
        if producer is not None and producer.kind in (MANUAL_IN, MANUAL_OUT):
            return Origin(MANUAL, operation=producer)
        if producer is not None and producer.kind == CONSTRAINT:
            return _of_constraint(producer, axis)
        return Origin(UNKNOWN, name=name)
    constraint = program.constraints.get(name)
    if constraint is None:
        return Origin(UNKNOWN, name=name)
    if constraint.results[0].dimension(axis) is None:
        # A slip of Shardy: where a constraint applies to a value that it has sharded already, all
        # axes of the value count as the constraint's. This one drops the axis, so walk back.
        return _without_name(program, value, axis) or Origin(UNKNOWN, name=name)
    return _of_constraint(constraint, axis)


def travelled(value: Value, axis: Axis) -> list[Frame]:
    """Returns the user's lines through which a mesh axis came to a value, from its origin on."""
    found: dict[tuple[str, int], Frame] = {}
    for step in reversed(_steps(value, axis)):
        frame = step.producer.frame if step.producer is not None else None
        if frame is not None:
            found.setdefault((frame.file, frame.line), frame)
    return list(found.values())


def is_asked(op: Operation) -> bool:
    """Whether the user wrote this constraint, and not the type of an operation on Explicit axes."""
    return op.kind == CONSTRAINT and bool(_ASKED.search(op.path))


def _origin_name(value: Value, axis: Axis) -> str:
    names = value.origin_names
    if axis in names:
        return names[axis]
    return next((names[a] for a in names if name_of(a) == name_of(axis)), '')


def _of_constraint(constraint: Operation, axis: Axis) -> Origin:
    """Returns the origin of an axis that a constraint has.

    With Explicit mesh axes JAX constrains every result to its type, so such a constraint only
    repeats what the operands have: the origin is what first gave them the axis.
    """
    op, seen = constraint, set[Operation]()
    while op not in seen:
        seen.add(op)
        if is_asked(op):
            return Origin(ASKED, operation=op)
        source = next((v for v in op.operands if v.dimension(axis) is not None), None)
        if source is None:
            return Origin(TYPE, operation=op)
        if source.argument is not None:
            return Origin(ARGUMENT, source)
        if source.producer is None:
            break
        op = source.producer
        if op.kind in (MANUAL_IN, MANUAL_OUT):
            return Origin(MANUAL, operation=op)
    return Origin(TYPE, operation=constraint)


def _without_name(program: Propagated, value: Value, axis: Axis) -> Origin | None:
    """Returns the origin of an axis by the steps that it made, or None."""
    for step in reversed(_steps(value, axis)):
        if step.argument is not None:
            return Origin(ARGUMENT, step)
        if step.result is not None:
            return Origin(RESULT, step)
        name, producer = _origin_name(step, axis), step.producer
        if name in program.manual:
            return Origin(MANUAL, operation=program.manual[name])
        if producer is not None and producer.kind == CONSTRAINT and name == 'self':
            return _of_constraint(producer, axis)
    return None


def _steps(value: Value, axis: Axis) -> list[Value]:
    """Returns the values that an axis passed, from `value` back to where it started.

    A part of an axis starts where the axis does: Shardy may split it on its way.
    """
    name = name_of(axis)
    steps, seen, at = list[Value](), set[Value](), value
    while at not in seen:
        seen.add(at)
        steps.append(at)
        places = [(op, i) for op, i in at.users]
        if at.producer is not None:
            places.insert(0, (at.producer, len(at.producer.operands) + at.index))
        for op, position in places:
            source = next(
                (s for a, s, ends in op.edges if name_of(a) == name and position in ends), None
            )
            if source is not None:
                at = op.values[source]
                break
    return steps
