"""Propagates array axes from the operands of JAX operations to their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from .values import Axis, Product, Value, drop_repeats, merged, merged_axis, without_dim


def elementwise(v: Any, values: Sequence[Value]) -> Value:
    """Returns the value of `v`, a result of an operation that is treated as elementwise."""
    return merged(values, getattr(v.aval, 'ndim', 0))


def _transpose(eqn: Any, values: Sequence[Value]) -> Value:
    (value,) = values
    return value.with_axes(value.axes[i] for i in eqn.params['permutation'])


def _broadcast(eqn: Any, values: Sequence[Value]) -> Value:
    value, before = values[0], eqn.invars[0].aval.shape
    shape = eqn.outvars[0].aval.shape
    axes = [Axis()] * len(shape)
    for i, at in enumerate(eqn.params['broadcast_dimensions']):
        if before[i] == shape[at]:
            axes[at] = value.axes[i]
    return value.with_axes(axes)


def _drop_axes(value: Value, dropped: Sequence[int]) -> Value:
    ndim = len(value.axes)
    indices = {i % ndim for i in dropped} if ndim else set[int]()
    return value.with_axes(axis for i, axis in enumerate(value.axes) if i not in indices)


def _squeeze(eqn: Any, values: Sequence[Value]) -> Value:
    return _drop_axes(values[0], eqn.params['dimensions'])


def _reduce(eqn: Any, values: Sequence[Value]) -> Value:
    result = _drop_axes(values[0], eqn.params['axes'])
    return Value(tuple(map(without_dim, result.axes)), None, result.is_data)


def _slice_or_update(eqn: Any, values: Sequence[Value]) -> Value:
    """Axes whose size changes lose their sharding."""
    value, before = values[0], eqn.invars[0].aval.shape
    after = eqn.outvars[0].aval.shape
    axes = (
        axis if size == new_size else replace(axis, mesh_axes=(), origin=None)
        for axis, size, new_size in zip(value.axes, before, after, strict=True)
    )
    return value.with_axes(axes)


def _concatenate(eqn: Any, values: Sequence[Value]) -> Value:
    result = merged(values, eqn.outvars[0].aval.ndim)
    return replace(result, argument=None)


PRODUCTS = ('dot_general', 'conv_general_dilated')
_REDUCTIONS = ('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or')
# {primitive: function of (equation, values of the operands) that returns the result}
RULES: Mapping[str, Callable[[Any, Sequence[Value]], Value]] = {
    'transpose': _transpose,
    'broadcast_in_dim': _broadcast,
    'squeeze': _squeeze,
    'concatenate': _concatenate,
    **dict.fromkeys((*_REDUCTIONS, 'argmax', 'argmin'), _reduce),
    **dict.fromkeys(('slice', 'dynamic_slice', 'pad', 'dynamic_update_slice'), _slice_or_update),
}


# --- products -----------------------------------------------------------------------------------


def flops_of(eqn: Any) -> int:
    """Returns the flops of an unsharded matmul or convolution, or 0 for other operations."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == 'dot_general':
        (contracted, _), _ = eqn.params['dimension_numbers']
        left = eqn.invars[0].aval
        per_term = 8 if left.dtype.kind == 'c' else 2
        return per_term * prod(shape) * prod(left.shape[i] for i in contracted)
    if name == 'conv_general_dilated':
        kernel, (out, *_) = eqn.invars[1].aval.shape, eqn.params['dimension_numbers'].rhs_spec
        return 2 * prod(shape) * prod(kernel) // kernel[out]
    return 0


def product_of(eqn: Any, values: Sequence[Value]) -> Product | None:
    """Reads a matmul, convolution or lookup. Returns None for gathers that are not lookups.

    The caller sets `line`, `aval`, `sizes`, `runs`, `flops`, `is_backward` and `in_shard_map`.
    """
    if eqn.primitive.name == 'gather':
        return _lookup(eqn, values)
    if eqn.primitive.name == 'conv_general_dilated':
        return _convolution(eqn, values)
    left, right = values[:2]
    contracted, batch = eqn.params['dimension_numbers']
    batch_axes = [merged_axis([left.axes[i], right.axes[j]]) for i, j in zip(*batch, strict=True)]
    free = [
        [axis for i, axis in enumerate(value.axes) if i not in (*contracted_dims, *batch_dims)]
        for value, contracted_dims, batch_dims in zip(values[:2], contracted, batch, strict=True)
    ]
    return Product(
        left,
        right,
        _result(left, right, batch_axes, free),
        tuple(zip(*contracted, strict=True)),
        tuple(zip(*batch, strict=True)),
    )


def _result(left: Value, right: Value, batch_axes: Sequence[Axis], free: list[list[Axis]]) -> Value:
    """`free` has the free axes of the left and of the right operand."""
    used = {name for axis in batch_axes for name in axis.mesh_axes}
    # if a mesh axis shards both operands, the data stays sharded and the weight is gathered
    order = (0, 1) if left.is_data or not right.is_data else (1, 0)
    for i in order:
        free[i] = [axis.without_mesh_axes(used) for axis in free[i]]
        used |= {name for axis in free[i] for name in axis.mesh_axes}
    return Value(
        drop_repeats((*batch_axes, *free[0], *free[1])), None, left.is_data or right.is_data
    )


def _lookup(eqn: Any, values: Sequence[Value]) -> Product | None:
    """Reads a gather of full rows of a table; returns None for other gathers."""
    table, indices = values[:2]
    numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
    shape = eqn.invars[0].aval.shape
    kept = [i for i in range(len(shape)) if i not in numbers.collapsed_slice_dims]
    is_rows = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    if not is_rows or any(sizes[i] != shape[i] for i in kept):
        return None
    # in the result, a mesh axis that shards the indices cannot shard the rows too
    row_axes = iter([table.axes[i].without_mesh_axes(indices.mesh_axes) for i in kept])
    index_axes = iter(indices.axes[:-1])
    axes = [
        next(row_axes if i in numbers.offset_dims else index_axes)
        for i in range(eqn.outvars[0].aval.ndim)
    ]
    result = Value(drop_repeats(axes), None, table.is_data or indices.is_data)
    return Product(table, indices, result, is_lookup=True)


def _convolution(eqn: Any, values: Sequence[Value]) -> Product:
    image, kernel = values[:2]
    numbers = eqn.params['dimension_numbers']
    axes = [Axis()] * eqn.outvars[0].aval.ndim
    axes[numbers.out_spec[0]] = image.axes[numbers.lhs_spec[0]]
    axes[numbers.out_spec[1]] = kernel.axes[numbers.rhs_spec[0]]
    result = Value(drop_repeats(axes), None, image.is_data or kernel.is_data)
    contracted = ((numbers.lhs_spec[1], numbers.rhs_spec[1]),)
    is_grouped = max(eqn.params['feature_group_count'], eqn.params['batch_group_count']) > 1
    return Product(image, kernel, result, contracted, is_convolution=True, is_grouped=is_grouped)
