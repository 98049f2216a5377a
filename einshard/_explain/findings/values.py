"""The arrays of a traced function, with the shardings that the compiler propagates to them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.sharding import NamedSharding

from ..._program.hlo.sources import is_user_file
from ..._program.jaxpr.graph import FlatJaxpr, Op
from ..._program.jaxpr.names import names_in
from ..._program.traced.propagated import (
    CONSTRAINT,
    LOOP,
    PASSING,
    SHARD,
    Operation,
    Propagated,
    Value,
    axis_names,
    name_of,
)
from ..._sharding.mesh import spec_axes


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of an array: the user's name for it, or '', and the mesh axes that shard it."""

    name: str = ''
    mesh_axes: tuple[str, ...] = ()

    def without_mesh_axes(self, names: Collection[str]) -> Axis:
        kept = tuple(name for name in self.mesh_axes if name not in names)
        return dataclasses.replace(self, mesh_axes=kept)


Axes: TypeAlias = tuple[Axis, ...]  # those of `traced.propagated` are mesh axes, without names
PRODUCTS = ('dot_general', 'convolution')
# an array after these is still the argument that it was, or a part of it
_PARTS = PASSING | {
    *('convert', 'reshape', 'transpose', 'dynamic_slice', 'slice', 'broadcast_in_dim'),
    *('reduce_precision', CONSTRAINT),
}
# an equation may be lowered to several operations, of which these prepare operands
_PREPARING = ('broadcast_in_dim', 'convert', 'iota', 'reshape', 'constant')


def drop_repeats(axes: Iterable[Axis]) -> Axes:
    """Removes each mesh axis from all array axes but the first that it shards."""
    seen, result = set[str](), list[Axis]()
    for axis in axes:
        result.append(axis.without_mesh_axes(seen))
        seen.update(axis.mesh_axes)
    return tuple(result)


def mesh_entries(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes of size > 1 that shard each axis; none for unconstrained axes."""
    sizes = sharding.mesh.shape  # without UNCONSTRAINED
    entries = [*spec_axes(sharding.spec), *[()] * ndim][:ndim]
    return [tuple(str(axis) for axis in entry if sizes.get(axis, 1) > 1) for entry in entries]


def argument_of(value: Value) -> int | None:
    """Returns the argument that a value is, or is a cast, a slice or the like of."""
    while value.argument is None:
        producer = value.producer
        if producer is None or producer.kind not in _PARTS or not producer.operands:
            return None
        value = producer.operands[0]
    return value.argument


def name_values(
    program: Propagated, arguments: Mapping[int, Sequence[str]]
) -> dict[Value, tuple[str, ...]]:
    """Returns the user's names of the axes of values, from those of arguments and constraints.

    Dimensions that belong together by the compiler's rule of an operation have one name.

    Args:
        arguments: the names of the axes of arguments, by number; '' for an axis without a name.
    """
    names: dict[Value, tuple[str, ...]] = {}
    for value in program.arguments:
        if value.argument is not None and any(given := arguments.get(value.argument, ())):
            names[value] = tuple(given)
    # what the body of a loop computes, its next iteration gets in the second pass
    for _ in range(1 + any(op.kind == LOOP for op in program.operations)):
        for op in program.operations:
            of_scope = names_in(op.path) if op.kind == CONSTRAINT else None
            given = None if of_scope is None else of_scope.of_constraint
            if given is not None and len(given) == len(op.results[0].shape):
                before = names.get(op.operands[0], ('',) * len(given))
                names[op.results[0]] = tuple(n or b for n, b in zip(given, before, strict=True))
                continue
            named = [value for value in op.operands if value in names]
            if not named or op.kind == SHARD:
                continue
            if op.rule is None:
                for result in op.results if op.kind in PASSING else ():
                    if len(result.shape) == len(names[named[0]]):
                        names.setdefault(result, names[named[0]])
                continue
            of_factor: dict[int, str] = {}
            sizes = op.rule.sizes
            for value, factors in zip(op.values, op.rule.tensors, strict=False):
                for name, several in zip(names.get(value, ()), factors, strict=False):
                    if name and several:  # the largest part of a split axis keeps the name
                        of_factor.setdefault(max(several, key=lambda f: sizes[f]), name)
            results = op.rule.tensors[len(op.operands) :]
            for value, factors in zip(op.results, results, strict=False):
                found = [
                    next((of_factor[f] for f in several if f in of_factor), '')
                    for several in factors
                ]
                if value not in names and any(found):
                    names[value] = tuple(found)
    return names


def axes_of_values(
    traced: FlatJaxpr,
    program: Propagated,
    arguments: Mapping[int, int],
    names: Mapping[Value, tuple[str, ...]],
) -> list[Axes]:
    """Returns the axes of the values of a traced function, by index; unsharded where unknown.

    Equations and operations are joined by primitive, shape and place in the source: in order where
    there are as many of one as of the other, else if all of them have one sharding.

    Args:
        arguments: {index of an argument of the function: its number in `program`}.
        names: see `name_values`.
    """
    found: dict[int, Axes] = {}

    def learn(v: int | None, value: Value) -> None:
        if v is not None and v not in found and traced.values[v].shape == value.shape:
            entries = value.axes or ((),) * len(value.shape)
            given = names.get(value, ('',) * len(entries))
            found[v] = tuple(
                Axis(name, tuple(dict.fromkeys(map(name_of, axes))))
                for name, axes in zip(given, entries, strict=True)
            )

    for index, number in arguments.items():
        if index < len(traced.arguments):
            learn(traced.arguments[index], program.arguments[number])
    groups: dict[Any, tuple[list[Op], list[Operation]]] = defaultdict(lambda: ([], []))
    for op in traced.ops:
        if op.arrays_out and op.eqn is not None and op.site.frames:
            shape = traced.values[op.arrays_out[0]].shape
            span = op.site.frames[0]
            groups[op.primitive, shape, span.source, span.column + 1][0].append(op)
    for operation in program.operations:
        primitive = operation.path.rpartition('/')[2]
        frame = next((f for f in operation.frames if is_user_file(f.file)), None)
        own = 'convert' if primitive == 'convert_element_type' else primitive
        is_last = operation.kind not in _PREPARING or operation.kind == own
        if frame is not None and operation.results and operation.kind not in PASSING and is_last:
            key = primitive, operation.results[0].shape, frame.place, frame.column
            groups[key][1].append(operation)
    for ops, operations in groups.values():
        if not operations:
            continue
        if len(ops) != len(operations):
            if len({tuple(v.axes for v in each.values) for each in operations}) > 1:
                continue
            operations = [operations[0]] * len(ops)
        for op, operation in zip(ops, operations, strict=True):
            for indices, values in ((op.ins, operation.operands), (op.outs, operation.results)):
                arrays = [v for v in indices if v is not None]
                for v, value in zip(arrays, (v for v in values if v.shape), strict=False):
                    learn(v, value)
    # what passes values into and out of loops has no place in the source
    for op in traced.ops:
        for d, e in op.links if op.primitive in _LINKS else ():
            [old], [new] = op.ins, op.outs
            if old in found and new is not None:
                axes = [*found.get(new, (Axis(),) * len(traced.values[new].shape))]
                if axes[e] == Axis():
                    axes[e] = found[old][d]
                    found[new] = drop_repeats(axes)
    unknown = ((Axis(),) * len(value.shape) for value in traced.values)
    return [found.get(v, axes) for v, axes in enumerate(unknown)]


_LINKS = ('carry', 'scan_input', 'scan_output')


def unused_mesh_axes(op: Operation, program: Propagated) -> list[str]:
    """Returns the mesh axes of size > 1 that shard no array of an operation."""
    used = {name for value in op.values for name in axis_names(value)}
    return [name for name, size in program.mesh.items() if size > 1 and name not in used]
