"""Which axes of a program's arrays belong together."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from .outline import MOVE, Outline

# the number of a value, and one of its dimensions
Dim: TypeAlias = tuple[int, int]


class AxisClasses:
    """Classes of array axes that operations link or contract, such as a batch or a width.

    The axes of one class are of the same thing: if one is sharded along a mesh axis and another is
    not, something is resharded, unless the compiler shards that as well. Of the axes that a reshape
    joins or splits, the major one is linked.
    """

    def __init__(self, outline: Outline):
        self._linked: dict[Dim, Dim] = {}
        for form, operands, results, _, _ in outline.steps:
            if form.kind == MOVE:
                [value], [to] = operands, results
                self.link_all(value, to, len(outline.types[value].shape))
            elif form.rule is not None:
                first: dict[int, Dim] = {}
                for value, dims in zip((*operands, *results), form.rule.tensors, strict=False):
                    for d, factors in enumerate(dims):
                        if factors:
                            self.link(first.setdefault(factors[0], (value, d)), (value, d))

    def link(self, a: Dim, b: Dim) -> None:
        a, b = self.of(a), self.of(b)
        if a != b:
            self._linked[max(a, b)] = min(a, b)

    def link_all(self, a: int, b: int, ndim: int) -> None:
        """Links the dimensions of two values one by one."""
        for d in range(ndim):
            self.link((a, d), (b, d))

    def of(self, dim: Dim) -> Dim:
        """The first dimension of its class."""
        linked, path = self._linked, list[Dim]()
        while dim in linked:
            path.append(dim)
            dim = linked[dim]
        for each in path:  # the next time is shorter
            linked[each] = dim
        return dim

    def members(self, values: dict[int, int]) -> list[dict[int, int]]:
        """Returns for each class the values of `values` ({number: dimensions}) and their axis.

        A value with two axes of a class is not in it.
        """
        found: dict[Dim, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for value, ndim in values.items():
            for d in range(ndim):
                found[self.of((value, d))][value].append(d)
        return [
            {value: dims[0] for value, dims in each.items() if len(dims) == 1}
            for each in found.values()
        ]
