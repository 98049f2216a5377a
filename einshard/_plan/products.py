"""Finds the operations of a program that have flops or may communicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .flatten import Op, Program
from .links import Einsum
from .live import Roots
from .names import Names


@dataclass(frozen=True, slots=True)
class Side:
    """An operand or the result of a product.

    Attributes:
        indices: the index of every axis, as the letters of an einsum.
        names: the names of every axis; `()` for one without a name, which is never sharded.
        share: 1 / n, if n products share one collective, because all of them use this operand, or
            are added up to this result.
        role: what a collective on it carries: 'weights', 'gradients' or 'activations', as in the
            rows of `explain`.
    """

    indices: tuple[int, ...]
    names: tuple[Names, ...]
    bytes: int
    share: float = 1.0
    role: str = 'activations'


@dataclass(frozen=True, slots=True)
class Product:
    """An operation that has flops or may communicate.

    Attributes:
        kind: 'product' (also for a lookup or a scatter), 'reduction', or 'reshard' (of an operand,
            or by a constraint).
        flops: of one execution.
        dtype: of the first operand, as in HLO; '' for a reshard.
        executions: how often it and equal products run in one run of the function.
    """

    kind: str
    operands: tuple[Side, ...]
    out: Side
    flops: int
    dtype: str
    executions: int


def find_products(
    program: Program, names: Sequence[tuple[Names, ...]], states: Sequence[int]
) -> tuple[Product, ...]:
    """Returns the operations that have flops or may communicate; equal ones are merged.

    Args:
        names: the names of the axes of every value.
        states: the numbers of the values of arguments that are weights or other state.
    """
    shares = _Shares(program, names, states)
    counts: Counter[Product] = Counter()
    for op in program.ops:
        for product in _products(op, program, names, shares):
            counts[product] += op.executions
    return tuple(replace(product, executions=n) for product, n in counts.items())


def _products(
    op: Op, program: Program, names: Sequence[tuple[Names, ...]], shares: _Shares
) -> Iterator[Product]:
    """Yields the products of an operation: reshards of its operands, then the operation itself."""
    out = op.outs[0] if op.outs else None
    einsum = op.relation.einsum
    for operand, axis in op.relation.unsharded:
        value = op.ins[operand]
        if value is not None and names[value][axis]:
            replicated = tuple(() if i == axis else one for i, one in enumerate(names[value]))
            yield _reshard(value, names[value], replicated, program, shares)
    if op.primitive == 'sharding_constraint':
        old = op.ins[0]
        if old is not None and out is not None and names[old] != names[out]:
            yield _reshard(old, names[old], names[out], program, shares)
    if einsum is None or out is None:
        return
    values = [value for i in einsum.operands if (value := op.ins[i]) is not None]
    if len(values) < len(einsum.operands):  # an operand is a scalar
        return
    is_product = len(values) > 1
    sides = tuple(
        Side(
            indices,
            names[value],
            program.values[value].bytes,
            shares.of_operand(op, value) if is_product else 1.0,
            shares.role(value),
        )
        for value, indices in zip(values, einsum.indices, strict=True)
    )
    result = Side(
        einsum.out,
        names[out],
        program.values[out].bytes,
        shares.of_result(out) if is_product else 1.0,
        shares.role_of_result(out),
    )
    if einsum.flops or _may_communicate(sides, einsum):
        dtype = _hlo_dtype(program.values[values[0]].dtype)
        kind = 'product' if is_product else 'reduction'
        yield Product(kind, sides, result, einsum.flops, dtype, 1)


def _may_communicate(sides: Sequence[Side], einsum: Einsum) -> bool:
    """Whether an operation without flops may communicate.

    A lookup or a scatter may if any axis of its operands has a name; a reduction, if an axis that
    it reduces has one.
    """
    return any(
        names and (len(sides) > 1 or index not in einsum.out)
        for side in sides
        for index, names in zip(side.indices, side.names, strict=True)
    )


def _reshard(
    value: int, old: tuple[Names, ...], new: tuple[Names, ...], program: Program, shares: _Shares
) -> Product:
    indices, size, role = tuple(range(len(old))), program.values[value].bytes, shares.role(value)
    before, after = (Side(indices, names, size, 1.0, role) for names in (old, new))
    return Product('reshard', (before,), after, 0, '', 1)


def _hlo_dtype(dtype: object) -> str:
    """Names a dtype as HLO does: 'bf16' for bfloat16."""
    kinds = {'bfloat': 'bf', 'float': 'f', 'uint': 'u', 'int': 's', 'complex': 'c'}
    name = str(dtype)
    for kind, short in kinds.items():
        if name.startswith(kind):
            return short + name.removeprefix(kind).replace('_', '')
    return name


# operations whose result is a part of their operand: a part of a weight is a weight
_PARTS = ('scan_input', 'slice', 'dynamic_slice')
# operations that add gradients, or come between a gradient and its addition
_SUMS = ('add_any', 'convert_element_type', 'transpose')


class _Shares:
    """Finds the products that share a collective, and the roles of arrays in collectives."""

    def __init__(self, program: Program, names: Sequence[tuple[Names, ...]], states: Sequence[int]):
        self._names = names
        self._roots = roots = Roots(program)
        # by scope and root value: how many products of the scope use the array
        self._n_users: Counter[tuple[int, int]] = Counter()
        # for each value, the sum (also a value) that it is a term of; if there is none, itself
        self._sum_of = list(range(len(program.values)))
        # by sum: how many products are added up to it
        self._n_terms: Counter[int] = Counter()
        for op in reversed(program.ops):
            if op.primitive in _SUMS and op.outs[0] is not None:
                for value in op.arrays_in:
                    self._sum_of[value] = self._sum_of[op.outs[0]]
        for op in program.ops:
            einsum = op.relation.einsum
            if einsum is not None and len(einsum.operands) > 1 and op.outs[0] is not None:
                operands = [op.ins[i] for i in einsum.operands]
                used = {roots(value) for value in operands if value is not None}
                self._n_users.update((op.scope, root) for root in used)
                self._n_terms[self._sum_of[op.outs[0]]] += 1
        self._weights = {roots(value) for value in states}
        for op in program.ops:
            old = op.ins[0] if op.primitive in _PARTS else None
            if old is not None and roots(old) in self._weights:
                self._weights.update(map(roots, op.arrays_out))
        self._weight_names = {names[value] for value in states if any(names[value])}
        # in a scan over layers, the gradient of one layer lacks the first axis
        self._weight_names |= {one[1:] for one in self._weight_names if any(one[1:])}

    def of_operand(self, op: Op, value: int) -> float:
        return 1 / self._n_users[op.scope, self._roots(value)]

    def of_result(self, value: int) -> float:
        return 1 / self._n_terms[self._sum_of[value]]

    def role(self, value: int) -> str:
        return 'weights' if self._roots(value) in self._weights else 'activations'

    def role_of_result(self, value: int) -> str:
        """Returns 'gradients' if a result has the axis names of a weight, else 'activations'."""
        return 'gradients' if self._names[value] in self._weight_names else 'activations'
