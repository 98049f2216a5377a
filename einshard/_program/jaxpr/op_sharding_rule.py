"""OpShardingRule: how the operands and results of an operation can be sharded, as in Shardy.

For `a + b`, the rule links axis 0 of `a` and of `b` with axis 0 of the sum: if they are sharded
alike, no communication is needed. The rule of a contraction or a reduction also has an `Einsum`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Sequence[Shape]
# operand number, axis of the operand, result number, axis of the result
Link: TypeAlias = tuple[int, int, int, int]
Indices: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Einsum:
    """A contraction or a reduction, with an index for each axis, like the letters of an einsum.

    A gather is treated as a contraction of its operand with one-hot indices, and a scatter as a
    contraction of its updates with one-hot indices.

    Attributes:
        operands: the positions of the operands of the contraction. They do not include the array
            that a scatter updates.
        indices: for each operand in `operands`, the index of each axis.
        out: the index of each axis of the result.
        flops: the flops of one execution.
    """

    operands: tuple[int, ...]
    indices: tuple[Indices, ...]
    out: Indices
    flops: int = 0


@dataclass(frozen=True, slots=True)
class OpShardingRule:
    """How the operands and results of an operation can be sharded.

    Attributes:
        links: the pairs of an operand axis and a result axis that can be sharded alike.
        einsum: None unless the operation is a contraction or a reduction.
        unsharded: the (operand, axis) pairs of the axes that must be unsharded.
    """

    links: tuple[Link, ...] = ()
    einsum: Einsum | None = None
    unsharded: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """An axis whose shards an operation can compute on their own.

    Attributes:
        ins, outs: which axis of each operand and result it is, or None if they do not have it. If
            no result has it, each shard gives a term of a sum.
        groups: the parameter that counts groups along this axis, or ''. A shard has fewer of them.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    groups: str = ''

    @property
    def is_summed(self) -> bool:
        return all(d is None for d in self.outs)


# The number of last axes of the first operand along which these operate. All operands and results
# have the axes before them.
_LAST_AXES = {
    **dict.fromkeys(['cholesky', 'eig', 'eigh', 'geqrf', 'hessenberg', 'householder_product'], 2),
    **dict.fromkeys(['lu', 'qr', 'schur', 'svd', 'triangular_solve', 'tridiagonal'], 2),
    **dict.fromkeys(['lu_pivots_to_permutation', 'tridiagonal_solve'], 1),
}
_ONE_AXIS = {
    'sort': 'dimension',
    'approx_top_k': 'reduction_dimension',
    **dict.fromkeys(['top_k', 'cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp'], 'axis'),
}


def batch_axes(
    primitive: str, params: Mapping[str, Any], ins: Shapes, outs: Shapes
) -> dict[int | str, BatchAxis]:
    """Returns the batch axes of operations that the partitioner may gather, by a name.

    The name is the axis of the first operand, and for a convolution 'batch' or 'groups', which are
    the same axes in its gradients. Axes of other operations are left out: those of a callback, for
    example, have a meaning that only its function knows.
    """
    if primitive == 'conv_general_dilated':
        return _conv_batch_axes(params)
    if primitive == 'fft':
        dims = range(len(ins[0]) - len(params['fft_lengths']))
    elif primitive in _LAST_AXES:
        dims = range(len(ins[0]) - _LAST_AXES[primitive])
    elif primitive in _ONE_AXIS and len({len(shape) for shape in (*ins, *outs)}) == 1:
        axis = params.get(_ONE_AXIS[primitive], -1) % max(len(ins[0]), 1)
        dims = [d for d in range(len(ins[0])) if d != axis]
    else:
        return {}
    sizes = [[shape[d] for d in dims if d < len(shape)] for shape in (*ins, *outs)]
    if any(each != sizes[0] for each in sizes):
        return {}
    return {d: BatchAxis((d,) * len(ins), (d,) * len(outs)) for d in dims}


def _conv_batch_axes(params: Mapping[str, Any]) -> dict[int | str, BatchAxis]:
    """Returns the batch and the groups of a convolution with groups of features.

    The gradient of its kernel has groups of the batch, and the batch as features, which it sums.
    """
    (lhs, rhs, out), features = params['dimension_numbers'], params['feature_group_count']
    batch = params['batch_group_count']
    if features > 1 and batch == 1:
        groups = BatchAxis((lhs[1], rhs[0]), (out[1],), 'feature_group_count')
        return {'batch': BatchAxis((lhs[0], None), (out[0],)), 'groups': groups}
    if batch > 1 and features == 1:
        groups = BatchAxis((lhs[0], rhs[0]), (out[1],), 'batch_group_count')
        return {'batch': BatchAxis((lhs[1], rhs[1]), (None,)), 'groups': groups}
    return {}


def op_sharding_rule(
    primitive: str, params: Mapping[str, Any], ins: Shapes, outs: Shapes
) -> OpShardingRule:
    """Returns the rule of an operation with operand shapes `ins` and result shapes `outs`."""
    if primitive in _RULES:
        rule = _RULES[primitive]
    elif primitive.startswith(('reduce_window', 'select_and_')):  # pooling and its gradients
        rule = _window
    elif primitive.startswith(('reduce_', 'argmax', 'argmin')) and 'axes' in params:
        rule = _reduce
    else:
        rule = _scatter if primitive.startswith('scatter') else _elementwise
    return rule(params, ins, outs)


def _elementwise(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    """Links axes of the same size. This is the default rule.

    It applies to operands that have the shape of the result, apart from axes of size 1, which `==`
    in `jax.nn.one_hot` broadcasts.
    """
    return OpShardingRule(
        tuple(
            (i, dim, o, dim)
            for (i, shape), (o, out) in itertools.product(enumerate(ins), enumerate(outs))
            if len(shape) == len(out)
            and all(size in (1, new) for size, new in zip(shape, out, strict=True))
            for dim in range(len(shape))
            if shape[dim] == out[dim]
        )
    )


def _pairwise(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    """Links each operand with the result at the same position."""
    return OpShardingRule(
        tuple((i, d, i, d) for i, shape in enumerate(ins) for d in range(len(shape)))
    )


def _dot(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = params['dimension_numbers']
    new = itertools.count()
    # the index of each axis; a batch or contracted axis has the same index in both operands
    lhs = {d: next(new) for d in (*lhs_batch, *lhs_sum)}
    rhs = dict(zip((*rhs_batch, *rhs_sum), lhs.values(), strict=True))
    for dims, shape in zip((lhs, rhs), ins, strict=False):
        dims.update({d: next(new) for d in range(len(shape)) if d not in dims})
    free = [lhs[d] for d in range(len(ins[0])) if d not in (*lhs_batch, *lhs_sum)]
    free += [rhs[d] for d in range(len(ins[1])) if d not in (*rhs_batch, *rhs_sum)]
    sizes = {dims[d]: shape[d] for dims, shape in zip((lhs, rhs), ins, strict=False) for d in dims}
    indices = tuple(tuple(dims[d] for d in range(len(dims))) for dims in (lhs, rhs))
    out = (*(lhs[d] for d in lhs_batch), *free)
    return _einsum_rule(Einsum((0, 1), indices, out, 2 * math.prod(sizes.values())))


def _ragged_dot(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    """Treats a ragged dot or its gradient as a dot that has one matrix for each group of rows."""
    numbers = params['ragged_dot_dimension_numbers']
    plain = _dot({'dimension_numbers': numbers.dot_dimension_numbers}, ins, ()).einsum
    assert plain is not None, '_dot returned no einsum'
    group_indices = {plain.indices[1][d] for d in numbers.rhs_group_dimensions}
    flops = plain.flops // math.prod(ins[1][d] for d in numbers.rhs_group_dimensions)
    out = tuple(index for index in plain.out if index not in group_indices)
    if len(out) < len(outs[0]):  # a gradient has a first axis for the groups, with index -1
        out = (-1, *out)
    return _einsum_rule(Einsum((0, 1), plain.indices, out, flops))


def _einsum_rule(einsum: Einsum, links: Iterable[Link] = ()) -> OpShardingRule:
    """Links the operand and result axes of an einsum that have the same index. Adds `links`."""
    same_index = (
        (i, dim, 0, einsum.out.index(index))
        for i, indices in zip(einsum.operands, einsum.indices, strict=True)
        for dim, index in enumerate(indices)
        if index in einsum.out
    )
    return OpShardingRule((*links, *same_index), einsum)


def _conv(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    """Returns the rule of a convolution or of its gradient with respect to the kernel.

    A convolution contracts the input features. A kernel gradient contracts the positions and the
    batch, and its `dimension_numbers` give the batch as the input features.
    """
    numbers, rhs, out = params['dimension_numbers'], ins[1], outs[0]
    groups = params['feature_group_count'] * params['batch_group_count']
    new = itertools.count(3)
    lhs_index, rhs_index, out_index = {}, {}, {}
    batch, in_features, out_features = 0, 1, 2
    lhs_index[numbers.lhs_spec[0]] = out_index[numbers.out_spec[0]] = batch
    lhs_index[numbers.lhs_spec[1]] = in_features
    rhs_index[numbers.rhs_spec[0]] = out_index[numbers.out_spec[1]] = out_features
    rhs_index[numbers.rhs_spec[1]] = in_features if groups == 1 else next(new)
    flops = 2 * rhs[numbers.rhs_spec[1]] * math.prod(out)
    spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for image_dim, window_dim, out_dim in spatial:
        position = lhs_index[image_dim] = next(new)
        flops *= rhs[window_dim]
        # in a kernel gradient, the window is larger than the result, which has the kernel's shape
        is_kernel_gradient = rhs[window_dim] > out[out_dim]
        rhs_index[window_dim] = position if is_kernel_gradient else next(new)
        out_index[out_dim] = next(new) if is_kernel_gradient else position
    *indices, result = (
        tuple(index[d] for d in range(len(index))) for index in (lhs_index, rhs_index, out_index)
    )
    return _einsum_rule(Einsum((0, 1), tuple(indices), result, flops))


def _reduce(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    indices = tuple(range(len(ins[0])))
    out = tuple(i for i in indices if i not in params['axes'])
    return _einsum_rule(Einsum((0,), (indices,), out))


def _linked(dims: Iterable[tuple[int, int]]) -> OpShardingRule:
    return OpShardingRule(tuple((0, d, 0, to) for d, to in dims))


def _broadcast(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    dims = params['broadcast_dimensions']
    return _linked((d, to) for d, to in enumerate(dims) if ins[0][d] == outs[0][to])


def _transpose(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    return _linked((d, to) for to, d in enumerate(params['permutation']))


def _squeeze(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    dropped = {d % len(ins[0]) for d in params['dimensions']}
    kept = [d for d in range(len(ins[0])) if d not in dropped]
    return _linked((d, to) for to, d in enumerate(kept))


def _reshape(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    return _linked(major_axes(ins[0], outs[0]))


def major_axes(old: Shape, new: Shape) -> Iterator[tuple[int, int]]:
    """Yields the (old, new) pairs of axes of a reshape that can be sharded alike.

    If a reshape splits an axis or merges axes, only the first of the split or merged axes is in a
    pair: (8, 6) to (2, 4, 6) gives (0, 0) and (1, 2), and (8, 6) to (48,) gives (0, 0).
    """
    i = j = 0
    while i < len(old) and j < len(new):
        if old[i] == 1 or new[j] == 1:
            if old[i] == new[j]:
                yield i, j
            i, j = i + (old[i] == 1), j + (new[j] == 1)
            continue
        yield i, j
        before, after = old[i], new[j]
        i, j = i + 1, j + 1
        while before != after:
            if before < after and i < len(old):
                before, i = before * old[i], i + 1
            elif after < before and j < len(new):
                after, j = after * new[j], j + 1
            else:  # the array has size 0
                return


def _same_sizes(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    """Links axes that keep their size. Sliced, padded or concatenated axes must be unsharded."""
    links: list[Link] = []
    unsharded: list[tuple[int, int]] = []
    for (i, shape), (o, out) in itertools.product(enumerate(ins), enumerate(outs)):
        if len(shape) == len(out) and shape:
            for dim, (size, new) in enumerate(zip(shape, out, strict=True)):
                if size == new:
                    links.append((i, dim, o, dim))
                else:
                    unsharded.append((i, dim))
    return OpShardingRule(tuple(links), unsharded=tuple(dict.fromkeys(unsharded)))


def _update_slice(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    links = [(0, d, 0, d) for d in range(len(ins[0]))]
    links += [(1, d, 0, d) for d, size in enumerate(ins[1]) if size == ins[0][d]]
    return OpShardingRule(tuple(links))


def _window(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    """Links all axes of a pooling operation, as if halo exchanges were free."""
    same = (i for i, shape in enumerate(ins) if len(shape) == len(outs[0]))
    return OpShardingRule(tuple((i, d, 0, d) for i in same for d in range(len(outs[0]))))


def _unsharded_axis(parameter: str) -> Callable[..., OpShardingRule]:
    """Returns the rule of primitives such as sort that need axis `params[parameter]` unsharded."""

    def rule(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
        axis = params.get(parameter, -1) % max(len(ins[0]), 1)
        links = [
            (i, d, o, d)
            for i, o in itertools.product(range(len(ins)), range(len(outs)))
            if len(ins[i]) == len(outs[o])
            for d in range(len(ins[i]))
            if d != axis
        ]
        return OpShardingRule(tuple(links), unsharded=tuple((i, axis) for i in range(len(ins))))

    return rule


def _batched(primitive: str) -> Callable[..., OpShardingRule]:
    """Returns the rule of primitives that operate along the axes that are not batch axes."""

    def rule(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
        found = batch_axes(primitive, params, ins, outs).values()
        links = [
            (i, d, o, e)
            for axis in found
            for (i, d), (o, e) in itertools.product(enumerate(axis.ins), enumerate(axis.outs))
            if d is not None and e is not None
        ]
        used = {(i, d) for axis in found for i, d in enumerate(axis.ins)}
        every = ((i, d) for i, shape in enumerate(ins) for d in range(len(shape)))
        return OpShardingRule(tuple(links), unsharded=tuple(at for at in every if at not in used))

    return rule


def _gather(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    numbers, sizes = params['dimension_numbers'], params['slice_sizes']
    operand, starts = ins[:2]
    new = itertools.count(len(starts))
    operand_indices = [next(new) for _ in operand]
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d, at in batching:
        operand_indices[d] = at
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = (d for d in range(len(operand)) if d not in dropped)
    # an axis that the gather slices has a new index in the result, so that it is not linked
    windows = (operand_indices[d] if sizes[d] == operand[d] else next(new) for d in kept)
    rest = iter(range(len(starts) - 1))  # the last axis of `starts` holds coordinates
    out = [next(windows if d in numbers.offset_dims else rest) for d in range(len(outs[0]))]
    indices = tuple(range(len(starts))), tuple(operand_indices)
    return _einsum_rule(Einsum((1, 0), indices, tuple(out)))


def _scatter(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpShardingRule:
    numbers = params['dimension_numbers']
    array, positions, updates = ins[:3]
    new = itertools.count(len(positions))
    out = [next(new) for _ in array]
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    for d, at in batching:
        out[d] = at
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = iter([d for d in range(len(array)) if d not in dropped])
    rest = iter(range(len(positions) - 1))
    update_indices: list[int] = []
    for d, size in enumerate(updates):
        if d in numbers.update_window_dims:
            at = next(kept)
            update_indices.append(out[at] if size == array[at] else next(new))
        else:
            update_indices.append(next(rest))
    indices = tuple(range(len(positions))), tuple(update_indices)
    links = ((0, d, 0, d) for d in range(len(array)))
    return _einsum_rule(Einsum((1, 2), indices, tuple(out)), links)


_RULES: dict[str, Callable[..., OpShardingRule]] = {
    'dot_general': _dot,
    'ragged_dot_general': _ragged_dot,
    'conv_general_dilated': _conv,
    'broadcast_in_dim': _broadcast,
    'transpose': _transpose,
    'squeeze': _squeeze,
    'reshape': _reshape,
    'gather': _gather,
    'dynamic_update_slice': _update_slice,
    'sort': _unsharded_axis('dimension'),
    'optimization_barrier': _pairwise,
    **{primitive: _batched(primitive) for primitive in ('fft', *_LAST_AXES)},
    **dict.fromkeys(['slice', 'dynamic_slice', 'split', 'concatenate', 'pad'], _same_sizes),
    **dict.fromkeys(
        ['top_k', 'cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp'], _unsharded_axis('axis')
    ),
}
