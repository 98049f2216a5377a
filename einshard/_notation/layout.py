"""The device grid of an expression, its mesh axes, and the positions of its axes in an array."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from types import MappingProxyType

from .._errors import EinshardError, Suggestion, plural, quoted
from .counts import Devices, prime_factors, solve_counts
from .expression import ELLIPSIS, Expression, Term
from .repairs import repairs, with_terms


def mesh_text(axis_sizes: Mapping[str, int]) -> str:
    """Formats mesh axes: "'data': 4, 'tp': 2"."""
    return ', '.join(f"'{name}': {size}" for name, size in axis_sizes.items())


def mesh_size_text(mesh_axes: Sequence[str]) -> str:
    kind = 'size of mesh axis' if len(mesh_axes) == 1 else 'product of mesh axes'
    return f'the {kind} {quoted(mesh_axes)}'


def no_mesh_text(terms: Sequence[Term]) -> str:
    """Returns the sentence of the error for terms with mesh axes when there is no mesh."""
    names = 'names' if len(terms) == 1 else 'name'
    axes = 'mesh axes' if sum(len(term.mesh_axes) for term in terms) > 1 else 'a mesh axis'
    count = next(filter(None, map(as_count, terms)), None)
    hint = count_hint(count) if count else ''
    return f'{quoted(map(str, terms))} {names} {axes}, but there is no mesh{hint}'


def as_count(term: Term) -> Term | None:
    """Converts 'a@8' to 'a8', or returns None if the term has anything else after '@'."""
    (axis, *others) = term.mesh_axes
    is_count = not others and re.fullmatch('[1-9][0-9]*', axis)
    return replace(term, count=int(axis), mesh_axes=()) if is_count else None


def count_hint(count: Term) -> str:
    use = (
        'for a count' if count.name is None else f"to split '{count.name}' into {count.count} parts"
    )
    return f"; {use}, write '{count}'"


def axis_positions(
    expression: Expression, ndim: int | None, rank_text: str | None = None
) -> dict[str, int]:
    """Returns the position of each named axis in an array of `ndim` dimensions.

    If `ndim` is None, '...' counts as no axes, and a sharded axis after it is an error. Errors
    quote `rank_text`, such as 'ndim=3'. Default: 'the array has 3 dimensions'.
    """
    names = expression.names

    def rank() -> str:
        return rank_text or f'the array has {plural(ndim or 0, "dimension")}'

    if ELLIPSIS not in names:
        if ndim is not None and ndim != len(names):
            raise expression.error(
                f'the expression names {plural(len(names), "axis")}, but {rank()}',
                expression.left if not expression.short else expression.right,
                code='ndim',
                fix=repairs(expression, ndim=ndim),
            )
        return {name: i for i, name in enumerate(names)}
    before = names.index(ELLIPSIS)
    after = len(names) - before - 1
    if ndim is None:
        if needs_rank(expression):
            come = 'comes' if after == 1 else 'come'
            raise expression.error(
                f"{quoted(names[before + 1 :])} {come} after '...', so the sharding depends on "
                'ndim, which is unknown',
                [t for t in expression.left if t.name == ELLIPSIS],
                code='ndim',
                expected='ndim=x.ndim, for an array x',
            )
        ndim = len(names) - 1
    if ndim < before + after:
        raise expression.error(
            f"the expression names {plural(before + after, 'axis')} and '...', but {rank()}",
            [t for t in expression.left if t.name != ELLIPSIS],
            code='ndim',
        )
    first = {name: i for i, name in enumerate(names[:before])}
    last = {name: ndim - after + i for i, name in enumerate(names[before + 1 :])}
    return first | last


def terms_of_axis(expression: Expression, axis: int, ndim: int) -> tuple[str, list[Term]]:
    """Returns the name of an array axis and its terms on the right side."""
    positions = axis_positions(expression, ndim)
    name = next(name for name, position in positions.items() if position == axis)
    return name, [term for term in expression.right if term.name == name]


def needs_rank(expression: Expression) -> bool:
    """Whether the sharding depends on ndim: a sharded axis comes after '...' on the left side."""
    names = expression.names
    after = names[names.index(ELLIPSIS) + 1 :] if ELLIPSIS in names else ()
    return any(term.name in after and term.spans_devices for term in expression.right)


@dataclass(frozen=True, slots=True)
class Split:
    """A dimension of the device grid, which shards an array axis or holds replicas."""

    count: int
    axis: int | None  # the position of the array axis; None for replicas
    mesh_axes: tuple[str, ...] = ()  # () for a split by count
    sign: str = ''  # '+' or '=' as in expressions; '' for array axes and plain replicas


@dataclass(frozen=True, slots=True)
class Layout:
    """The device grid of an expression.

    Splits by mesh axes come first, then splits by count, each kind in the order written. Splits by
    count divide the remaining devices, slowest-varying first. Exception: if an array axis has
    splits of both kinds, its splits by mesh axes stay among the splits by count, as written.

    Every split by count has a count above 1, and neighboring splits by count are merged if they
    have the same axis and sign. So equal placements without mesh axes have equal layouts.
    """

    splits: tuple[Split, ...]
    # positions of the axes that are replicated because their size is not divisible
    replicated_axes: tuple[int, ...] = field(default=(), compare=False)

    @property
    def n_shards(self) -> dict[int, int]:
        """The number of shards of each sharded array axis, by the position of the axis."""
        n_shards: dict[int, int] = {}
        for split in self.splits:
            if split.axis is not None:
                n_shards[split.axis] = n_shards.get(split.axis, 1) * split.count
        return {axis: n for axis, n in n_shards.items() if n > 1}


def lay_out(
    expression: Expression,
    shape: tuple[int, ...] | int | None,
    n_devices: int,
    axis_sizes: Mapping[str, int] | None = None,
    *,
    replicates_by_default: bool = False,
    replicate_indivisible: bool | Collection[str] = False,
    pad_indivisible: bool = False,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Returns the layout of an expression on `n_devices` devices, or raises if it does not fit.

    Args:
        shape: the shape of the array, or its ndim if the user passed only that. None is allowed if
            no sharded axis comes after '...'.
        n_devices: the number of devices.
        axis_sizes: the mesh axes and their sizes, if the devices form a mesh with named axes.
        replicates_by_default: whether an unsharded expression, such as 'a b', replicates over all
            devices instead of raising. True on a user's mesh.
        replicate_indivisible: whether to replicate axes whose size is not divisible, instead of
            raising: True for all axes, or the names of the axes that may be replicated.
        pad_indivisible: whether such axes are left to XLA, which pads them.
        hints: facts to add to errors about the number of devices.
    """
    ndim, rank_text = (len(shape), None) if isinstance(shape, tuple) else (shape, f'ndim={shape}')
    positions = axis_positions(expression, ndim, rank_text)
    layout = _lay_out(expression, positions, n_devices, axis_sizes, replicates_by_default, hints)
    if not isinstance(shape, tuple):
        return layout
    if replicate_indivisible:
        axes = tuple(axis for axis, n in layout.n_shards.items() if shape[axis] % n)
        if not isinstance(replicate_indivisible, bool):
            named = [positions[name] for name in replicate_indivisible]
            axes = tuple(axis for axis in axes if axis in named)
        if axes:
            splits = [replace(s, axis=None) if s.axis in axes else s for s in layout.splits]
            layout = Layout(tuple(merge_neighbors(splits)), axes)
    if not pad_indivisible:
        check_divisible(expression, layout, shape, n_devices)
    return layout


def _lay_out(
    expression: Expression,
    positions: Mapping[str, int],
    n_devices: int,
    axis_sizes: Mapping[str, int] | None,
    replicates_by_default: bool,
    hints: Mapping[str, str],
) -> Layout:
    """Returns the layout without checking the sizes of axes."""
    mesh_axis_terms = [term for term in expression.right if term.mesh_axes]
    other_terms = [term for term in expression.right if not term.mesh_axes]
    if mesh_axis_terms and axis_sizes is None:
        as_counts = [(term, count) for term in mesh_axis_terms if (count := as_count(term))]
        raise expression.error(
            no_mesh_text(mesh_axis_terms),
            mesh_axis_terms,
            code='mesh',
            fix=Suggestion(with_terms(expression, as_counts[:1])) if as_counts else None,
            expected="mesh=mesh or 'with jax.set_mesh(mesh):'",
        )
    by_mesh_axes: list[Split] = []
    for term in mesh_axis_terms:
        sizes = [_axis_size(expression, term, axis, axis_sizes or {}) for axis in term.mesh_axes]
        axis = None if term.name is None else positions[term.name]
        by_mesh_axes.append(Split(math.prod(sizes), axis, term.mesh_axes, term.sign))
    taken = math.prod(split.count for split in by_mesh_axes)
    if (by_mesh_axes or replicates_by_default) and not any(term.is_counted for term in other_terms):
        return Layout(tuple(by_mesh_axes))
    devices = Devices(n_devices, mesh_axis_terms, taken, hints, replicates_by_default)
    counts = iter(solve_counts(expression, other_terms, n_devices // taken, devices))
    splits = iter(by_mesh_axes)
    written: list[Split] = []
    for term in expression.right:
        if term.mesh_axes:
            written.append(next(splits))
            continue
        count = next(counts)
        if term.name != ELLIPSIS and count > 1:
            axis = None if term.name is None else positions[term.name]
            written.append(Split(count, axis, sign=term.sign))
    # if mesh axes and counts shard an axis, its splits stay in the order written
    counted_axes = {split.axis for split in written if not split.mesh_axes} - {None}
    first = [split for split in by_mesh_axes if split.axis not in counted_axes]
    rest = [split for split in written if not split.mesh_axes or split.axis in counted_axes]
    return Layout((*first, *merge_neighbors(rest)))


def _axis_size(expression: Expression, term: Term, axis: str, sizes: Mapping[str, int]) -> int:
    if axis in sizes:
        return sizes[axis]
    count = as_count(term)
    meant, instead = count, ''
    if count:
        instead = count_hint(count)
    else:
        used = {name for other in expression.right for name in other.mesh_axes}
        free = sizes.keys() - used
        names = re.findall(r'\w+', axis)  # 'data+tp' means '(data,tp)'
        if len(names) == 1 or not {*names} <= free:
            names = difflib.get_close_matches(axis, free, n=1)
        axes = [name for old in term.mesh_axes for name in (names if old == axis else [old])]
        meant = replace(term, mesh_axes=tuple(axes)) if names else None
        if len(names) > 1:
            instead = '; several mesh axes are written in parentheses, with commas'
    raise expression.error(
        f"the mesh has no axis '{axis}'{instead}",
        [term],
        code='mesh',
        fix=Suggestion(with_terms(expression, [(term, meant)])) if meant else None,
        mesh=mesh_text(sizes),
    )


def merge_neighbors(splits: Sequence[Split]) -> list[Split]:
    """Merges neighboring splits by count that have the same axis and sign."""
    merged: list[Split] = []
    for split in splits:
        last = merged[-1] if merged else None
        same = last and (last.axis, last.sign) == (split.axis, split.sign)
        if last and same and not (last.mesh_axes or split.mesh_axes):
            merged[-1] = replace(split, count=last.count * split.count)
        else:
            merged.append(split)
    return merged


def check_divisible(
    expression: Expression, layout: Layout, shape: Sequence[int], n_devices: int
) -> None:
    """Raises if the size of an axis is not divisible by its number of shards."""
    for axis, n_shards in layout.n_shards.items():
        size = shape[axis]
        if size % n_shards:
            name, marked = terms_of_axis(expression, axis, len(shape))
            if not isinstance(size, Integral):  # a symbolic dimension of jax.export
                raise expression.error(
                    f"axis '{name}' (size {size}) may not be divisible by {n_shards}",
                    marked,
                    code='not-divisible',
                    expected=f"a multiple of {n_shards}, such as symbolic_shape('{n_shards}*n')",
                )
            if _mesh_axes_of(layout, axis):
                facts = _padding_facts(expression, layout, shape, axis)
            else:
                common = math.gcd(size, n_devices)
                *most, last = [str(n) for n in range(1, common + 1) if common % n == 0]
                both = f'both {size} and {n_devices}' if n_devices != size else str(size)
                shards = f'{", ".join(most)} or {last} shards, the divisors of {both}'
                facts = {'works with': shards if most else '1 shard (unsharded)'}
            left = n_devices // math.prod(x.count for x in layout.splits if x.mesh_axes)
            raise expression.error(
                _indivisible_text(expression, layout, shape, axis),
                marked,
                code='not-divisible',
                fix=repairs(expression, left),
                devices=n_devices,
                **facts,
            )


def _indivisible_text(
    expression: Expression, layout: Layout, shape: Sequence[int], axis: int
) -> str:
    name, _ = terms_of_axis(expression, axis, len(shape))
    mesh_axes = _mesh_axes_of(layout, axis)
    source = f', {mesh_size_text(mesh_axes)}' if mesh_axes else ''
    n_shards = layout.n_shards[axis]
    return f"axis '{name}' (size {shape[axis]}) is not divisible by {n_shards}{source}"


def _mesh_axes_of(layout: Layout, axis: int) -> list[str]:
    """Returns the mesh axes that shard an array axis, or [] if a count shards it."""
    splits = [split for split in layout.splits if split.axis == axis]
    by_name = all(split.mesh_axes for split in splits)
    return [name for split in splits for name in split.mesh_axes] if by_name else []


def _padding_facts(
    expression: Expression, layout: Layout, shape: Sequence[int], axis: int
) -> dict[str, str]:
    """Returns facts on how to pad an array so that all axes are divisible."""
    n_shards = layout.n_shards
    padding = [
        -int(size) % n_shards.get(i, 1) if isinstance(size, Integral) else 0
        for i, size in enumerate(shape)
    ]
    widths = tuple((0, n) for n in padding)
    others = [i for i, n in enumerate(padding) if n and i != axis]
    also = '; '.join(_indivisible_text(expression, layout, shape, i) for i in others)
    return {
        **({'also wrong': also} if also else {}),
        f'next multiple of {n_shards[axis]}': str(shape[axis] + padding[axis]),
        'to pad': f'jnp.pad(x, {widths})',
    }


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
