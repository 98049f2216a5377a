"""Finds the operations of a program that have flops or may communicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .._program.jaxpr.graph import Op, Program
from .live_sets import Roots
from .names import AxisNames


@dataclass(frozen=True, slots=True)
class OpArray:
    """An operand or the result of an operation.

    Attributes:
        indices: the einsum index of each axis, as in `Einsum`.
        names: the names of each axis. An axis without names has `()`, and is never sharded.
        share: 1 / n if n operations share the collective of this array. Operations share the
            all-gather of a common operand, and the all-reduce of results that are added up.
        role: what the array holds: 'weights', 'gradients' or 'activations'.
    """

    indices: tuple[int, ...]
    names: tuple[AxisNames, ...]
    bytes: int
    share: float = 1.0
    role: str = 'activations'


@dataclass(frozen=True, slots=True)
class CostlyOp:
    """An operation that has flops or may communicate.

    Attributes:
        kind: 'contraction' (a dot, convolution, gather or scatter), 'reduction', or 'reshard' (a
            constraint, or unsharding an axis before an operation such as a sort).
        flops: the flops of one execution.
        dtype: the HLO dtype of the first operand, or '' for a reshard.
        executions: the number of executions in one run of the function.
    """

    kind: str
    operands: tuple[OpArray, ...]
    out: OpArray
    flops: int
    dtype: str
    executions: int


def find_costly_ops(
    program: Program, names: Sequence[tuple[AxisNames, ...]], states: Sequence[int]
) -> tuple[CostlyOp, ...]:
    """Finds the costly operations of a program. Merges equal ones, and adds up their executions.

    Args:
        names: the axis names of each value in `program.values`.
        states: the positions in `program.values` of the weights and other state.
    """
    usage = _Usage(program, names, states)
    counts: Counter[CostlyOp] = Counter()
    for op in program.ops:
        for costly in _costly_ops(op, program, names, usage):
            counts[costly] += op.executions
    return tuple(replace(costly, executions=n) for costly, n in counts.items())


def _costly_ops(
    op: Op, program: Program, names: Sequence[tuple[AxisNames, ...]], usage: _Usage
) -> Iterator[CostlyOp]:
    """Yields the reshards that `op` needs, then `op` itself if it is costly."""
    out = op.outs[0] if op.outs else None
    einsum = op.rule.einsum
    for operand, axis in op.rule.unsharded:
        value = op.ins[operand]
        if value is not None and names[value][axis]:
            old = names[value]
            yield _reshard(value, old, (*old[:axis], (), *old[axis + 1 :]), program, usage)
    if op.primitive == 'sharding_constraint':
        value = op.ins[0]
        if value is not None and out is not None and names[value] != names[out]:
            yield _reshard(value, names[value], names[out], program, usage)
    if einsum is None or out is None:
        return
    values = [value for i in einsum.operands if (value := op.ins[i]) is not None]
    if len(values) < len(einsum.operands):  # an operand is a scalar
        return
    is_contraction = len(values) > 1
    operands = tuple(
        OpArray(
            indices,
            names[value],
            program.values[value].bytes,
            usage.share_of_operand(op, value) if is_contraction else 1.0,
            usage.role(value),
        )
        for value, indices in zip(values, einsum.indices, strict=True)
    )
    result = OpArray(
        einsum.out,
        names[out],
        program.values[out].bytes,
        usage.share_of_result(out) if is_contraction else 1.0,
        usage.role_of_result(out),
    )
    # any named axis of a gather or scatter may communicate, but only reduced axes of a reduction
    may_communicate = any(
        names and (is_contraction or index not in einsum.out)
        for operand in operands
        for index, names in zip(operand.indices, operand.names, strict=True)
    )
    if einsum.flops or may_communicate:
        dtype = _hlo_dtype(program.values[values[0]].dtype)
        kind = 'contraction' if is_contraction else 'reduction'
        yield CostlyOp(kind, operands, result, einsum.flops, dtype, 1)


def _reshard(
    value: int,
    old: tuple[AxisNames, ...],
    new: tuple[AxisNames, ...],
    program: Program,
    usage: _Usage,
) -> CostlyOp:
    indices, size, role = tuple(range(len(old))), program.values[value].bytes, usage.role(value)
    before, after = (OpArray(indices, names, size, 1.0, role) for names in (old, new))
    return CostlyOp('reshard', (before,), after, 0, '', 1)


def _hlo_dtype(dtype: object) -> str:
    """Returns the HLO name of a dtype: 'bf16' for bfloat16."""
    kinds = {'bfloat': 'bf', 'float': 'f', 'uint': 'u', 'int': 's', 'complex': 'c'}
    name = str(dtype)
    for kind, short in kinds.items():
        if name.startswith(kind):
            return short + name.removeprefix(kind).replace('_', '')
    return name


# a slice of a weight counts as a weight
_SLICES = ('scan_input', 'slice', 'dynamic_slice')
# 'add_any' adds gradients. The others may come between a contraction and 'add_any'.
_SUM_OPS = ('add_any', 'convert_element_type', 'transpose')


class _Usage:
    """Finds `OpArray.share` and `OpArray.role` for the arrays of a program."""

    def __init__(
        self, program: Program, names: Sequence[tuple[AxisNames, ...]], states: Sequence[int]
    ):
        self._names = names
        self._roots = roots = Roots(program)
        # the number of contractions that use an array, keyed by (loop, array)
        self._n_users: Counter[tuple[int, int]] = Counter()
        # for each value, the end of its chain of `_SUM_OPS`: for a gradient, the sum of gradients
        self._sum_of = list(range(len(program.values)))
        # the number of contractions whose results are added, keyed by the sum
        self._n_terms: Counter[int] = Counter()
        for op in reversed(program.ops):
            if op.primitive in _SUM_OPS and op.outs[0] is not None:
                for value in op.arrays_in:
                    self._sum_of[value] = self._sum_of[op.outs[0]]
        for op in program.ops:
            einsum = op.rule.einsum
            if einsum is not None and len(einsum.operands) > 1 and op.outs[0] is not None:
                operands = [op.ins[i] for i in einsum.operands]
                used = {roots(value) for value in operands if value is not None}
                self._n_users.update((op.loop, root) for root in used)
                self._n_terms[self._sum_of[op.outs[0]]] += 1
        self._weights = {roots(value) for value in states}
        for op in program.ops:
            old = op.ins[0] if op.primitive in _SLICES else None
            if old is not None and roots(old) in self._weights:
                self._weights.update(map(roots, op.arrays_out))
        self._weight_names = {names[value] for value in states if any(names[value])}
        # weights that a scan slices have one axis more than their gradients in the loop body
        self._weight_names |= {one[1:] for one in self._weight_names if any(one[1:])}

    def share_of_operand(self, op: Op, value: int) -> float:
        return 1 / self._n_users[op.loop, self._roots(value)]

    def share_of_result(self, value: int) -> float:
        return 1 / self._n_terms[self._sum_of[value]]

    def role(self, value: int) -> str:
        return 'weights' if self._roots(value) in self._weights else 'activations'

    def role_of_result(self, value: int) -> str:
        return 'gradients' if self._names[value] in self._weight_names else 'activations'
