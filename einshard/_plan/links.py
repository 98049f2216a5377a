"""Links the axes of operands and results that can share a sharding, for each JAX primitive.

In `a + b`, axis 0 of `a`, of `b` and of the sum are linked: if they are sharded in the same way, no
communication is needed. Contractions and reductions also get an index for each axis, like the
letters of an einsum.
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
    """The indices of a contraction or a reduction, like the letters of an einsum.

    A gather or a scatter counts as a contraction with its index array in one-hot form.

    Attributes:
        operands: the positions of the operands that have indices; the array that a scatter
            updates has none.
        indices: for each operand in `operands`, the index of each axis.
        out: the index of each axis of the result.
        flops: the flops of one execution.
    """

    operands: tuple[int, ...]
    indices: tuple[Indices, ...]
    out: Indices
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Relation:
    """How the axes of an operation's operands and results are related.

    Attributes:
        links: the pairs of an operand axis and a result axis that can share a sharding.
        einsum: the indices of a contraction or a reduction; None for other operations.
        unsharded: (operand, axis) pairs; these axes are gathered first if they are sharded.
    """

    links: tuple[Link, ...] = ()
    einsum: Einsum | None = None
    unsharded: tuple[tuple[int, int], ...] = ()


def relate(primitive: str, params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Returns the relation of an operation; `ins` and `outs` are operand and result shapes."""
    if primitive in _RULES:
        rule = _RULES[primitive]
    elif primitive.startswith(('reduce_window', 'select_and_')):  # pooling and its gradients
        rule = _window
    elif primitive.startswith(('reduce_', 'argmax', 'argmin')) and 'axes' in params:
        rule = _reduce
    else:
        rule = _scatter if primitive.startswith('scatter') else _elementwise
    return rule(params, ins, outs)


def _elementwise(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Links operands with results of the same shape: the default rule."""
    return Relation(
        tuple(
            (i, dim, o, dim)
            for (i, shape), (o, out) in itertools.product(enumerate(ins), enumerate(outs))
            if shape == out
            for dim in range(len(shape))
        )
    )


def _pairwise(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Links each operand with the result at the same position."""
    return Relation(tuple((i, d, i, d) for i, shape in enumerate(ins) for d in range(len(shape))))


def _dot(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
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
    return _einsum_relation(Einsum((0, 1), indices, out, 2 * math.prod(sizes.values())))


def _ragged_dot(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Treats a ragged dot (or its gradient) as a dot with a separate matrix per group of rows."""
    numbers = params['ragged_dot_dimension_numbers']
    plain = _dot({'dimension_numbers': numbers.dot_dimension_numbers}, ins, ()).einsum
    assert plain is not None, 'a dot has indices'
    group_indices = {plain.indices[1][d] for d in numbers.rhs_group_dimensions}
    flops = plain.flops // math.prod(ins[1][d] for d in numbers.rhs_group_dimensions)
    out = tuple(index for index in plain.out if index not in group_indices)
    if len(out) < len(outs[0]):  # the gradient has a matrix for each group: index -1 is the group
        out = (-1, *out)
    return _einsum_relation(Einsum((0, 1), plain.indices, out, flops))


def _einsum_relation(einsum: Einsum, links: Iterable[Link] = ()) -> Relation:
    """Links operand and result axes of an einsum that have the same index; adds `links`."""
    same_index = (
        (i, dim, 0, einsum.out.index(index))
        for i, indices in zip(einsum.operands, einsum.indices, strict=True)
        for dim, index in enumerate(indices)
        if index in einsum.out
    )
    return Relation((*links, *same_index), einsum)


def _conv(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Relates the axes of a convolution, which contracts features; a kernel gradient, positions."""
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
        # A window larger than the result means a gradient with respect to the kernel: it contracts
        # the positions of the image, and its result has the positions of the kernel.
        is_kernel_gradient = rhs[window_dim] > out[out_dim]
        rhs_index[window_dim] = position if is_kernel_gradient else next(new)
        out_index[out_dim] = next(new) if is_kernel_gradient else position
    *indices, result = (
        tuple(index[d] for d in range(len(index))) for index in (lhs_index, rhs_index, out_index)
    )
    return _einsum_relation(Einsum((0, 1), tuple(indices), result, flops))


def _reduce(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    indices = tuple(range(len(ins[0])))
    out = tuple(i for i in indices if i not in params['axes'])
    return _einsum_relation(Einsum((0,), (indices,), out))


def _linked(dims: Iterable[tuple[int, int]]) -> Relation:
    return Relation(tuple((0, d, 0, to) for d, to in dims))


def _broadcast(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    dims = params['broadcast_dimensions']
    return _linked((d, to) for d, to in enumerate(dims) if ins[0][d] == outs[0][to])


def _transpose(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    return _linked((d, to) for to, d in enumerate(params['permutation']))


def _squeeze(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    dropped = {d % len(ins[0]) for d in params['dimensions']}
    kept = [d for d in range(len(ins[0])) if d not in dropped]
    return _linked((d, to) for to, d in enumerate(kept))


def _reshape(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    return _linked(major_axes(ins[0], outs[0]))


def major_axes(old: Shape, new: Shape) -> Iterator[tuple[int, int]]:
    """Yields the (old, new) pairs of axes of a reshape that can share a sharding.

    A split axis is paired with the most major of its parts, a merged axis with the most major of
    its sources: (8, 6) reshaped to (2, 4, 6) gives (0, 0) and (1, 2); to (48,), it gives (0, 0).
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


def _same_sizes(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Links axes that keep their size; sliced, padded and concatenated axes must be unsharded."""
    links: list[Link] = []
    unsharded: list[tuple[int, int]] = []
    for (i, shape), (o, out) in itertools.product(enumerate(ins), enumerate(outs)):
        if len(shape) == len(out) and shape:
            for dim, (size, new) in enumerate(zip(shape, out, strict=True)):
                if size == new:
                    links.append((i, dim, o, dim))
                else:
                    unsharded.append((i, dim))
    return Relation(tuple(links), unsharded=tuple(dict.fromkeys(unsharded)))


def _update_slice(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    links = [(0, d, 0, d) for d in range(len(ins[0]))]
    links += [(1, d, 0, d) for d, size in enumerate(ins[1]) if size == ins[0][d]]
    return Relation(tuple(links))


def _window(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Links all axes of a pooling operation; halo exchanges count as free."""
    same = (i for i, shape in enumerate(ins) if len(shape) == len(outs[0]))
    return Relation(tuple((i, d, 0, d) for i in same for d in range(len(outs[0]))))


def _unsharded_axis(parameter: str) -> Callable[..., Relation]:
    """Returns the rule for primitives that need one axis unsharded, such as a sort.

    `parameter` is the name of the primitive's parameter that holds the axis, such as 'dimension'.
    """

    def rule(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
        axis = params.get(parameter, -1) % max(len(ins[0]), 1)
        links = [
            (i, d, o, d)
            for i, o in itertools.product(range(len(ins)), range(len(outs)))
            if len(ins[i]) == len(outs[o])
            for d in range(len(ins[i]))
            if d != axis
        ]
        return Relation(tuple(links), unsharded=tuple((i, axis) for i in range(len(ins))))

    return rule


def _gather(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Treats a gather as a contraction of its operand with its index array in one-hot form."""
    numbers, sizes = params['dimension_numbers'], params['slice_sizes']
    operand, starts = ins[:2]
    new = itertools.count(len(starts))
    operand_indices = [next(new) for _ in operand]
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d, at in batching:
        operand_indices[d] = at
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = (d for d in range(len(operand)) if d not in dropped)
    # an axis of which the gather takes slices is not linked: in the result, it has a new index
    windows = (operand_indices[d] if sizes[d] == operand[d] else next(new) for d in kept)
    rest = iter(range(len(starts) - 1))  # the last axis of `starts` is the coordinates
    out = [next(windows if d in numbers.offset_dims else rest) for d in range(len(outs[0]))]
    indices = tuple(range(len(starts))), tuple(operand_indices)
    return _einsum_relation(Einsum((1, 0), indices, tuple(out)))


def _scatter(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Relation:
    """Treats a scatter as a contraction of its updates with its index array in one-hot form."""
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
    return _einsum_relation(Einsum((1, 2), indices, tuple(out)), links)


_RULES: dict[str, Callable[..., Relation]] = {
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
    **dict.fromkeys(['slice', 'dynamic_slice', 'split', 'concatenate', 'pad'], _same_sizes),
    **dict.fromkeys(
        ['top_k', 'cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp'], _unsharded_axis('axis')
    ),
}
