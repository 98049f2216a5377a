"""Lays out an expression on devices."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from .._errors import Suggestion
from .axis_positions import axis_positions
from .counts import Devices, solve_counts
from .divisible import check_divisible
from .expression import ELLIPSIS, Expression, Term
from .layout import Layout, Split, merge_neighbors, replicate_axes
from .mesh_text import as_count, count_hint, mesh_text, no_mesh_text
from .repairs import with_terms


def lay_out(
    expression: Expression,
    shape: tuple[int, ...] | int | None,
    n_devices: int,
    axis_sizes: Mapping[str, int] | None = None,
    *,
    replicates_by_default: bool = False,
    replicate_indivisible: bool | Collection[str] = False,
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
            layout = replace(replicate_axes(layout, axes), replicated_axes=axes)
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
    by_mesh_axes = _splits_by_mesh_axes(expression, mesh_axis_terms, positions, axis_sizes)
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


def _splits_by_mesh_axes(
    expression: Expression,
    mesh_axis_terms: Sequence[Term],
    positions: Mapping[str, int],
    axis_sizes: Mapping[str, int] | None,
) -> list[Split]:
    if not mesh_axis_terms:
        return []
    if axis_sizes is None:
        counts = [(term, count) for term in mesh_axis_terms if (count := as_count(term))]
        raise expression.error(
            no_mesh_text(mesh_axis_terms),
            mesh_axis_terms,
            code='mesh',
            fix=Suggestion(with_terms(expression, counts[:1])) if counts else None,
            expected="mesh=mesh or 'with jax.set_mesh(mesh):'",
        )
    splits: list[Split] = []
    for term in mesh_axis_terms:
        sizes = [_axis_size(expression, term, axis, axis_sizes) for axis in term.mesh_axes]
        axis = None if term.name is None else positions[term.name]
        splits.append(Split(math.prod(sizes), axis, term.mesh_axes, term.sign))
    return splits


def _axis_size(expression: Expression, term: Term, axis: str, sizes: Mapping[str, int]) -> int:
    if axis in sizes:
        return sizes[axis]
    used = {name for other in expression.right for name in other.mesh_axes}
    count = as_count(term)
    meant = count or _similar_axes(term, axis, sizes.keys() - used)
    instead = ''
    if count:
        instead = count_hint(count)
    elif meant and len(meant.mesh_axes) > len(term.mesh_axes):
        instead = '; several mesh axes are written in parentheses, with commas'
    raise expression.error(
        f"the mesh has no axis '{axis}'{instead}",
        [term],
        code='mesh',
        fix=Suggestion(with_terms(expression, [(term, meant)])) if meant else None,
        mesh=mesh_text(sizes),
    )


def _similar_axes(term: Term, axis: str, free: Collection[str]) -> Term | None:
    """Corrects the mesh axis `axis` of a term, or returns None if no free axis is similar."""
    meant = re.findall(r'\w+', axis)  # 'data+tp' means '(data,tp)'
    if len(meant) == 1 or not {*meant} <= {*free}:
        meant = difflib.get_close_matches(axis, free, n=1)
    axes = [name for old in term.mesh_axes for name in (meant if old == axis else [old])]
    return replace(term, mesh_axes=tuple(axes)) if meant else None
