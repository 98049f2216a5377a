"""Fits layouts to the axes of a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from .._errors import EinshardError
from .counts import prime_factors
from .expression import Expression
from .layout import Layout
from .repairs import repairs

COUNTS_THAT_FIT = 'each count is the size of the next mesh axis, or the product of the next few'


def fit(layout: Layout, axis_sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes of each split, or None if the counts do not match the mesh axes.

    Each split by count takes the next mesh axes, in mesh order, that the layout does not name,
    until the product of their sizes is its count.
    """
    names = {axis for split in layout.splits for axis in split.mesh_axes}
    free = [(name, size) for name, size in axis_sizes.items() if name not in names and size > 1]
    fitted: list[tuple[str, ...]] = []
    at = 0
    for split in layout.splits:
        if split.mesh_axes:
            fitted.append(split.mesh_axes)
            continue
        start, count = at, 1
        while count < split.count and at < len(free):
            count *= free[at][1]
            at += 1
        if count != split.count:
            return None
        fitted.append(tuple(name for name, _ in free[start:at]))
    return tuple(fitted)


def misfit_error(expression: Expression, layout: Layout, mesh: str) -> EinshardError:
    counts = [split.count for split in layout.splits if not split.mesh_axes]
    grid = ' x '.join(map(str, counts))
    return expression.error(
        'the counts do not match the mesh axes',
        [term for term in expression.right if term.is_counted],
        code='device-count',
        fix=repairs(expression, math.prod(counts)),
        device_grid=grid,
        mesh=mesh,
        expected=f'from left to right, {COUNTS_THAT_FIT}',
    )


def fitting_sizes(layout: Layout) -> tuple[int, ...]:
    """Returns mesh axis sizes that fit a layout: the prime factors of the count of each split."""
    return tuple(itertools.chain.from_iterable(prime_factors(s.count) for s in layout.splits))


def spec_entries(layout: Layout, fitted: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each array axis, major to minor, up to the last sharded axis.

    `fitted` is what `fit` returns.
    """
    entries: dict[int, tuple[str, ...]] = {}
    for split, mesh_axes in zip(layout.splits, fitted, strict=True):
        if split.axis is not None:
            entries[split.axis] = entries.get(split.axis, ()) + mesh_axes
    last = max((axis for axis, mesh_axes in entries.items() if mesh_axes), default=-1)
    return tuple(entries.get(axis, ()) for axis in range(last + 1))


def signed_axes(layout: Layout, fitted: Sequence[tuple[str, ...]], sign: str) -> tuple[str, ...]:
    """Returns the mesh axes of the terms with this sign, '+' or '='."""
    splits = zip(layout.splits, fitted, strict=True)
    return tuple(axis for split, axes in splits if split.sign == sign for axis in axes)
