"""The axes of an operation whose shards it can compute on their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Shapes: TypeAlias = Sequence[tuple[int, ...]]


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
