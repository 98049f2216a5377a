"""Follows the shardings of arguments and constraints through a traced function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._program.jaxpr.graph import Op, Program
from ..._program.jaxpr.graph import Value as Array
from ..._program.jaxpr.names import dims_of_vmap
from ..._program.jaxpr.spans import Span
from ..._sharding.mesh import AnyMesh, spec_axes
from .lines import line_of
from .values import Axis, Product, Value, drop_repeats, merged_axis, reshaped


@dataclass(frozen=True, slots=True)
class Constraint:
    line: str
    before: Value
    after: Value
    is_backward: bool
    without_rule: tuple[str, ...]  # the names of its axes that have no axis rule


class Scanned(NamedTuple):
    """An array that a scan runs over."""

    value: Value
    aval: Array


@dataclass(frozen=True, slots=True)
class Loop:
    """A `jax.lax.scan`."""

    line: str
    length: int
    sums: tuple[Value, ...]  # the elements of the carry to which the body only adds
    xs: tuple[Scanned, ...]  # the scanned arrays


class Slice(NamedTuple):
    """A slice along a sharded axis."""

    line: str
    value: Value
    dim: int
    frames: tuple[Span, ...] = ()

    @property
    def axis(self) -> Axis:
        return self.value.axes[self.dim]


@dataclass(frozen=True, slots=True)
class Trace:
    """The operations of a function, as far as diagnoses need them.

    `values` are the values of the function, by index.
    """

    values: Sequence[Value] = ()
    products: list[Product] = field(default_factory=list)  # in program order
    constraints: list[Constraint] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)


PRODUCTS = ('dot_general', 'conv_general_dilated')
_CONSTRAINTS = ('sharding_constraint', 'reshard', 'mesh_cast')
_SLICES = ('split', 'slice', 'dynamic_slice')


def read_trace(program: Program, arguments: Sequence[Value], mesh: AnyMesh) -> Trace:
    """Reads a function that is called with `arguments`."""
    values = propagate(program, arguments, mesh)
    trace = Trace(values)
    for op in program.ops:
        if op.primitive in PRODUCTS or is_lookup(op):
            trace.products.append(_product(op, values))
        elif op.primitive in _CONSTRAINTS and op.outs[0] is not None:
            before, after = values[op.arrays_in[0]], values[op.outs[0]]
            if _has_mesh(_sharding_of(op), mesh):
                without_rule = op.site.names.without_rule if op.site.names else ()
                is_backward = op.site.is_backward
                constraint = Constraint(line_of(op.eqn), before, after, is_backward, without_rule)
                trace.constraints.append(constraint)
        elif op.primitive in _SLICES and op.arrays_in:
            trace.slices.extend(_slices(op, values[op.arrays_in[0]], line_of(op.eqn)))
    for scan in program.scans:
        sums = tuple(Value() if i is None else values[i] for i in scan.sums)
        xs = tuple(Scanned(values[i], program.values[i]) for i in scan.xs)
        trace.loops.append(Loop(line_of(scan.eqn), scan.eqn.params['length'], sums, xs))
    return trace


# --- propagation --------------------------------------------------------------------------------


def propagate(program: Program, arguments: Sequence[Value], mesh: AnyMesh) -> list[Value]:
    """Returns the values of a program that is called with `arguments`, by index.

    An axis of a result has the names and the sharding of the operand axes that are linked with it.
    """
    values = [Value((Axis(),) * len(value.shape)) for value in program.values]
    known: set[int] = set()
    for i, argument in zip(program.arguments, arguments, strict=False):
        if i is not None:
            values[i] = argument
    # the second pass brings what a loop body computes to its next iteration
    for _ in range(min(len(program.parent_loops), 2)):
        for op in program.ops:
            if op.primitive == 'scan_axis':
                continue
            for o, out in enumerate(op.outs):
                if out is None:
                    continue
                new = _typed(_result(op, o, program, values, mesh), program.values[out].sharding)
                if op.primitive == 'carry' and out in known:
                    new = _merged(values[out], new, is_branch=op.eqn.primitive.name == 'cond')
                values[out] = new
                known.add(out)
    return values


def _result(op: Op, o: int, program: Program, values: Sequence[Value], mesh: AnyMesh) -> Value:
    """Returns result `o` of an operation."""
    out = op.outs[o]
    assert out is not None
    shape, links = program.values[out].shape, op.rule.links
    arrays = {i: values[v] for i, v in enumerate(op.ins) if v is not None}
    # an optimization barrier passes several arrays, each to one result
    linked = {i for i, _, to, _ in links if to == o} if len(op.outs) > 1 else ()
    is_data = any(arrays[i].is_data for i in linked or arrays)
    unsharded = Value((Axis(),) * len(shape), None, is_data)
    if op.primitive == 'shards':
        return unsharded
    if op.primitive in _CONSTRAINTS:
        return _constrained(op, arrays[0], unsharded, mesh)
    if op.primitive == 'reshape' and arrays:
        before = program.values[op.arrays_in[0]].shape
        return arrays[0].with_axes(reshaped(arrays[0].axes, before, shape, dict(mesh.shape)))
    # 1. the operand axes for each axis of the result
    sources: list[list[tuple[int, Axis]]] = [[] for _ in shape]
    for i, d, to, at in links:
        if to == o:
            sources[at].append((i, arrays[i].axes[d]))
    # 2. a resized axis keeps its name. The parts of a split axis, and concatenated axes, also keep
    # the sharding: the compiler reshards them over the same mesh axes
    is_sliced = op.primitive in ('slice', 'dynamic_slice', 'pad')
    for i, d in op.rule.unsharded:
        if len(arrays[i].axes) == len(shape):
            axis = arrays[i].axes[d]
            sources[d].append((i, axis.without_mesh_axes(axis.mesh_axes) if is_sliced else axis))
    # 3. a mesh axis shards one axis of the result: one of both operands, or else of the data. A
    # weight is gathered
    axes = [merged_axis([axis for _, axis in found]) if found else Axis() for found in sources]
    order: Iterable[int] = range(len(shape))
    if op.rule.einsum is not None:
        ranks = {i: rank for rank, i in enumerate(op.rule.einsum.operands)}
        if op.primitive in PRODUCTS and arrays[1].is_data and not arrays[0].is_data:
            ranks = {0: 1, 1: 0}
        order = sorted(order, key=lambda at: _rank(ranks, {i for i, _ in sources[at]}))
    # 4. casts, slices and the like of one array are a part of the argument that it is part of
    is_part = len(arrays) == 1 and op.primitive not in ('concatenate', 'scan_output')
    is_part = is_part and op.rule.einsum is None and bool(links or op.rule.unsharded)
    is_part = is_part or op.primitive == 'dynamic_update_slice'
    argument = values[op.arrays_in[0]].argument if is_part else None
    return Value(drop_repeats(axes, argument is not None, order), argument, is_data)


def _rank(ranks: Mapping[int, int], operands: set[int]) -> int:
    return -1 if len(operands) > 1 else max((ranks.get(i, -1) for i in operands), default=-1)


def _merged(before: Value, new: Value, is_branch: bool) -> Value:
    """Merges two values of a variable: from the branches of a `cond`, or before and in a loop."""
    axes = map(merged_axis, zip(before.axes, new.axes, strict=True))
    if is_branch:
        argument = before.argument if before.argument == new.argument else None
        before = Value((), argument, before.is_data or new.is_data)
    return before.with_axes(drop_repeats(axes, before.argument is not None))


def _constrained(op: Op, before: Value, unsharded: Value, mesh: AnyMesh) -> Value:
    sharding = _sharding_of(op)
    if not isinstance(sharding, NamedSharding):
        return before
    if not _has_mesh(sharding, mesh):
        return unsharded
    line, names = line_of(op.eqn), [''] * len(before.axes)
    if op.site.names is not None and op.site.names.of_constraint is not None:
        names = list(op.site.names.of_constraint)
        for dim in dims_of_vmap(op.eqn, len(names)):
            names.insert(dim, '')
    entries = mesh_entries(sharding, len(before.axes))
    axes = [
        replace(axis, name=name or axis.name)
        if entry is None
        else Axis(name or axis.name, entry, line)
        for axis, name, entry in zip(before.axes, names, entries, strict=True)
    ]
    return Value(drop_repeats(axes), None, before.is_data)


def _sharding_of(op: Op) -> Any:
    return op.eqn.params.get('sharding', op.eqn.params.get('dst_sharding'))


def _has_mesh(sharding: Any, mesh: AnyMesh) -> bool:
    return isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape)


def _typed(value: Value, sharding: Any) -> Value:
    """Returns `value` with the sharding of its type, if the mesh has Explicit axes."""
    types = getattr(getattr(sharding, 'mesh', None), 'axis_types', ())
    if AxisType.Explicit not in types:
        return value
    entries = mesh_entries(sharding, len(value.axes))
    axes = (
        axis if entry is None else replace(axis, mesh_axes=entry)
        for axis, entry in zip(value.axes, entries, strict=True)
    )
    return value.with_axes(axes)


def mesh_entries(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...] | None]:
    """Returns the mesh axes of size > 1 that shard each axis, or None for unconstrained axes."""
    entries: list[tuple[str, ...] | None] = []
    for entry in [*spec_axes(sharding.spec), *[()] * ndim][:ndim]:
        if entry and entry[0] is PartitionSpec.UNCONSTRAINED:
            entries.append(None)
        else:
            entries.append(tuple(str(axis) for axis in entry if sharding.mesh.shape[axis] > 1))
    return entries


def argument_values(
    arrays: Sequence[Any], is_data: Mapping[int, bool], mesh: AnyMesh
) -> list[Value]:
    """`is_data[i]` is whether argument i is data, not a weight."""
    values: list[Value] = []
    for i, array in enumerate(arrays):
        ndim = len(array.shape)
        sharding, names = array.sharding, array.names or ('',) * ndim
        entries: list[tuple[str, ...] | None] = [()] * ndim
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            entries = mesh_entries(sharding, ndim)
        axes = (
            Axis(name, entry or (), i if entry else None, dim)
            for dim, (name, entry) in enumerate(zip(names, entries, strict=True))
        )
        values.append(Value(tuple(axes), i, is_data.get(i, False)))
    return values


# --- operations ---------------------------------------------------------------------------------


def is_lookup(op: Op) -> bool:
    """Whether an operation gathers full rows of a table."""
    if op.primitive != 'gather' or op.outs[0] is None:
        return False
    numbers, sizes = op.eqn.params['dimension_numbers'], op.eqn.params['slice_sizes']
    is_rows = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    return is_rows and sizes[1:] == op.eqn.invars[0].aval.shape[1:]


def _product(op: Op, values: Sequence[Value]) -> Product:
    site, eqn, einsum = op.site, op.eqn, op.rule.einsum
    assert einsum is not None
    left, right = op.ins[:2]
    assert left is not None
    assert right is not None
    indices = dict(zip(einsum.operands, einsum.indices, strict=True))
    pairs = [
        (i, indices[1].index(index), index in einsum.out)
        for i, index in enumerate(indices[0])
        if index in indices[1]
    ]
    # for complex numbers, a multiplication and an addition take 8 flops
    per_flop = 4 if eqn.invars[0].aval.dtype.kind == 'c' else 1
    flops = per_flop * einsum.flops * max(site.n_shards, 1)
    calls = (call for call in reversed(site.calls) if call.primitive.name not in ('scan', 'while'))
    is_convolution = op.primitive == 'conv_general_dilated'
    return Product(
        values[left],
        values[right],
        Value() if op.outs[0] is None else values[op.outs[0]],
        tuple((i, j) for i, j, is_batch in pairs if not is_batch),
        tuple((i, j) for i, j, is_batch in pairs if is_batch),
        line=next(filter(None, map(line_of, (eqn, *calls))), ''),
        aval=eqn.outvars[0].aval,
        runs=site.runs,
        flops=None if site.runs is None else flops * site.runs,
        is_backward=site.is_backward,
        in_shard_map=site.n_shards > 0,
        is_lookup=op.primitive == 'gather',
        is_convolution=is_convolution,
        is_grouped=is_convolution
        and max(eqn.params['feature_group_count'], eqn.params['batch_group_count']) > 1,
        sizes=tuple(v.aval.size for v in (*eqn.invars[:2], eqn.outvars[0])),
        frames=site.frames,
    )


def _slices(op: Op, value: Value, line: str) -> Iterator[Slice]:
    sizes, parts = op.eqn.invars[0].aval.shape, op.eqn.outvars[0].aval.shape
    for dim, (axis, size, part) in enumerate(zip(value.axes, sizes, parts, strict=True)):
        if 0 < part != size and axis.mesh_axes:
            yield Slice(line, value, dim, op.site.frames)
