"""Expression, rank, device count -> Layout: counts and stars become integers. Imports no jax.

Devices are a row of numbers here, 0 to N - 1, from the slow side of the network to the fast one.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .._cache import cached
from .._errors import Suggestion, plural, quoted
from .counts import Devices, solve_counts
from .expression import ELLIPSIS, Expression, Term


@dataclass(frozen=True, slots=True)
class Split:
    """One dimension of the device grid, and the array axis that it cuts into `count` parts."""

    count: int
    axis: int | None  # position in the array; None where the devices hold replicas
    mesh_axes: tuple[str, ...] = ()  # () where the count alone says which devices


@dataclass(frozen=True, slots=True)
class Layout:
    """The device grid of an expression: its dimensions, slowest first.

    Equal placements are equal layouts, however they were written: dimensions of one device are
    left out, and neighbours that cut the same axis are one. Splits by name come first, in the
    order written; splits by count share the devices that the names leave. An axis that is cut
    both ways has its splits among the latter, in the order written.
    """

    splits: tuple[Split, ...]
    replicated_axes: tuple[int, ...] = field(default=(), compare=False)  # that are not divisible

    @property
    def parts(self) -> dict[int, int]:
        """Into how many parts each sharded array axis is cut."""
        parts: dict[int, int] = {}
        for split in self.splits:
            if split.axis is not None:
                parts[split.axis] = parts.get(split.axis, 1) * split.count
        return {axis: count for axis, count in parts.items() if count > 1}


def lay_out(
    expression: Expression,
    shape: tuple[int, ...] | int | None,
    n_devices: int,
    axis_sizes: Mapping[str, int] | None = None,
    *,
    replicates: bool = False,
    replicate_indivisible: bool = False,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Shares `n_devices` out among the terms of an expression.

    Args:
        shape: that of the array, which the parts must divide; or its rank alone. None will do
            unless a sharded axis comes after '...'.
        axis_sizes: the named axes of the mesh that the devices form, if there is such a mesh.
        replicates: whether all devices hold replicas if no term takes any, as on a user's mesh.
        replicate_indivisible: whether axes are replicated that their parts do not divide.
        hints: facts for errors about the number of devices.
    """
    n_dims = len(shape) if isinstance(shape, tuple) else shape
    layout = _lay_out(expression, n_dims, n_devices, axis_sizes, replicates, hints)
    if not isinstance(shape, tuple):
        return layout
    if replicate_indivisible:
        axes = tuple(axis for axis, parts in layout.parts.items() if shape[axis] % parts)
        return replace(without_axes(layout, axes), replicated_axes=axes) if axes else layout
    check_divisible(expression, layout, shape, n_devices)
    return layout


def _lay_out(
    expression: Expression,
    n_dims: int | None,
    n_devices: int,
    axis_sizes: Mapping[str, int] | None,
    replicates: bool,
    hints: Mapping[str, str],
) -> Layout:
    positions = axis_positions(expression, n_dims)
    named = [term for term in expression.right if term.mesh_axes]
    laid = [term for term in expression.right if not term.mesh_axes]
    by_name = _named_splits(expression, named, positions, axis_sizes)
    taken = math.prod(split.count for split in by_name)
    if (by_name or replicates) and not any(term.takes_devices for term in laid):
        return Layout(tuple(by_name))
    left = n_devices // taken
    counts = solve_counts(expression, laid, left, Devices(n_devices, named, taken, hints))
    named_splits, laid_counts = iter(by_name), iter(counts)
    written: list[Split] = []
    for term in expression.right:
        if term.mesh_axes:
            written.append(next(named_splits))
            continue
        count = next(laid_counts)
        if term.name != ELLIPSIS and count > 1:
            written.append(Split(count, None if term.name is None else positions[term.name]))
    # an axis that is cut both ways is cut in the order written, the major part first
    counted_axes = {split.axis for split in written if not split.mesh_axes}
    first = [split for split in by_name if split.axis not in counted_axes]
    rest = [split for split in written if not split.mesh_axes or split.axis in counted_axes]
    return Layout((*first, *merged(rest)))


def check_divisible(
    expression: Expression, layout: Layout, shape: Sequence[int], n_devices: int
) -> None:
    """Raises for the first axis of `shape` that its parts do not divide."""
    for axis, parts in layout.parts.items():
        size = shape[axis]
        if size % parts:
            name, guilty = terms_of_axis(expression, axis, len(shape))
            if not isinstance(size, int):  # a symbol of jax.export
                raise expression.error(
                    f"axis '{name}' has size {size}, which {parts} parts need not divide",
                    guilty,
                    works_with=f"a multiple of {parts}, as in symbolic_shape('{parts}*n')",
                )
            common = math.gcd(size, n_devices)
            divisors = [str(n) for n in range(1, common + 1) if common % n == 0]
            raise expression.error(
                f"axis '{name}' has size {size}, which {parts} parts do not divide",
                guilty,
                devices=n_devices,
                works_with=f'{", ".join(divisors)} {"part" if divisors == ["1"] else "parts"}',
            )


@cached
def prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors of n, larger ones first: 12 -> (3, 2, 2)."""
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return tuple(reversed(factors))


def fit(layout: Layout, axis_sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes of each split, or None where the counts do not fall on mesh axes.

    A split by count takes consecutive axes, of those that no split names, until its count is
    reached.
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


def refactor(layout: Layout) -> tuple[int, ...]:
    """Mesh axis sizes on which a layout by counts falls: each dimension in prime factors."""
    return tuple(itertools.chain.from_iterable(prime_factors(s.count) for s in layout.splits))


def spec_entries(layout: Layout, fitted: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each array axis, up to the last one that is sharded; major axes first."""
    entries: dict[int, tuple[str, ...]] = {}
    for split, mesh_axes in zip(layout.splits, fitted, strict=True):
        if split.axis is not None:
            entries[split.axis] = entries.get(split.axis, ()) + mesh_axes
    last = max((axis for axis, mesh_axes in entries.items() if mesh_axes), default=-1)
    return tuple(entries.get(axis, ()) for axis in range(last + 1))


def mesh_entries(
    layout: Layout, axis_sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes of each array axis, or None where the counts do not fall on mesh axes."""
    fitted = fit(layout, axis_sizes)
    return None if fitted is None else spec_entries(layout, fitted)


def without_axes(layout: Layout, axes: Collection[int]) -> Layout:
    """The layout with replicas in place of the parts of some array axes."""
    splits = [replace(s, axis=None) if s.axis in axes else s for s in layout.splits]
    return Layout(tuple(merged(splits)))


def with_unsharded(terms: Sequence[Term], names: Sequence[str]) -> list[Term]:
    """Adds the axes that are not sharded: each behind the axis before it, or first."""
    terms = list(terms)
    for i, name in enumerate(names):
        holders = [term.name for term in terms]
        if name in holders:
            continue
        if i and names[i - 1] in holders:
            at = len(holders) - holders[::-1].index(names[i - 1])
        else:
            followers = [holders.index(other) for other in names[i:] if other in holders]
            at = min(followers, default=len(holders))
        terms.insert(at, Term(name))
    return terms


def needs_rank(expression: Expression) -> bool:
    """Whether the sharding depends on the rank of the array: a sharded axis comes after '...'."""
    names = expression.names
    late = names[names.index(ELLIPSIS) + 1 :] if ELLIPSIS in names else ()
    return any(term.name in late and term.is_sharded for term in expression.right)


def axis_positions(expression: Expression, n_dims: int | None) -> dict[str, int]:
    """The position of each name, in an array of `n_dims` dimensions."""
    names = expression.names
    if ELLIPSIS not in names:
        if n_dims is not None and n_dims != len(names):
            raise expression.error(
                f'the expression names {plural(len(names), "axis")}, '
                f'but the array has {plural(n_dims, "dimension")}',
                expression.left if not expression.short else expression.right,
            )
        return {name: i for i, name in enumerate(names)}
    before = names.index(ELLIPSIS)
    after = len(names) - before - 1
    if n_dims is None:
        if needs_rank(expression):
            raise expression.error(
                f"where {quoted(names[before + 1 :])} {'is' if after == 1 else 'are'} behind '...' "
                'depends on the rank of the array, which is not known here',
                [t for t in expression.left if t.name == ELLIPSIS],
                give='ndim=, the number of dimensions of the array',
            )
        n_dims = len(names) - 1
    if n_dims < before + after:
        raise expression.error(
            f"beside '...' the expression names {plural(before + after, 'axis')}, "
            f'but the array has {plural(n_dims, "dimension")}',
            [t for t in expression.left if t.name != ELLIPSIS],
        )
    first = {name: i for i, name in enumerate(names[:before])}
    last = {name: n_dims - after + i for i, name in enumerate(names[before + 1 :])}
    return first | last


def terms_of_axis(expression: Expression, axis: int, n_dims: int) -> tuple[str, list[Term]]:
    """The name of an array axis, and the terms that place it."""
    positions = axis_positions(expression, n_dims)
    name = next(name for name, position in positions.items() if position == axis)
    return name, [term for term in expression.right if term.name == name]


def _named_splits(
    expression: Expression,
    terms: Sequence[Term],
    positions: Mapping[str, int],
    axis_sizes: Mapping[str, int] | None,
) -> list[Split]:
    if not terms:
        return []
    if axis_sizes is None:
        raise expression.error(
            f'{quoted(map(str, terms))} {"names" if len(terms) == 1 else "name"} mesh axes, '
            'but there is no mesh',
            terms,
            give="mesh=, or enter one: 'with jax.set_mesh(mesh):'",
        )
    splits: list[Split] = []
    for term in terms:
        sizes = [_axis_size(expression, term, axis, axis_sizes) for axis in term.mesh_axes]
        splits.append(Split(math.prod(sizes), positions[str(term.name)], term.mesh_axes))
    return splits


def _axis_size(expression: Expression, term: Term, axis: str, sizes: Mapping[str, int]) -> int:
    if axis in sizes:
        return sizes[axis]
    fix = None
    used = {name for other in expression.right for name in other.mesh_axes}
    near = difflib.get_close_matches(axis, sizes.keys() - used, n=1)
    if near:
        start, end = term.span
        axes = tuple(near[0] if name == axis else name for name in term.mesh_axes)
        fixed = Term(term.name, mesh_axes=axes)
        fix = Suggestion(f'{expression.text[:start]}{fixed}{expression.text[end:]}')
    raise expression.error(
        f"the mesh has no axis '{axis}'",
        [term],
        fix=fix,
        mesh=mesh_text(sizes),
    )


def mesh_text(axis_sizes: Mapping[str, int]) -> str:
    """'data': 4, 'tp': 2"""
    return ', '.join(f"'{name}': {size}" for name, size in axis_sizes.items())


def merged(splits: Sequence[Split]) -> list[Split]:
    """Joins neighbours that cut the same axis by count."""
    merged: list[Split] = []
    for split in splits:
        last = merged[-1] if merged else None
        if last and last.axis == split.axis and not (last.mesh_axes or split.mesh_axes):
            merged[-1] = Split(last.count * split.count, split.axis)
        else:
            merged.append(split)
    return merged
