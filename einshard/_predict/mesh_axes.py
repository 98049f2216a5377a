"""Finds the mesh of an einsum with placements or counts. Does not import JAX."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import replace

from .._errors import EinshardError, quoted
from .._notation.counts import prime_factors
from .._notation.expression import Expression
from .._notation.layout import COUNTS_THAT_FIT, fit, lay_out, mesh_text
from .contraction import Contraction, is_placed, placement_text


def mesh_and_operands(
    contraction: Contraction, n_devices: int | None, counts: Mapping[str, int]
) -> tuple[dict[str, int], tuple[Expression, ...]]:
    """Returns the mesh, as {axis: size}, and the operands with their placements.

    If the einsum names mesh axes, `counts` has their sizes. If not, `counts` has the number of
    shards of array axes.
    """
    if mesh_axes := contraction.mesh_axes:
        by_keyword = {n: counts[n] for n in contraction.names if n in counts.keys() - mesh_axes}
        if by_keyword:
            raise _two_placements_error(contraction, by_keyword)
        missing = [axis for axis in mesh_axes if axis not in counts]
        if missing:
            what, how = 'size of mesh axis', 'a keyword argument'
            if len(missing) > 1:
                what, how = 'sizes of mesh axes', 'keyword arguments'
            raise contraction.error(
                f'parallelism needs the {what} {quoted(missing)} as {how}',
                example=', '.join(f'{axis}=4' for axis in missing),
            )
        n_left = _n_left(contraction, counts, n_devices)
        names = (name for i in itertools.count() if (name := f'd{i}') not in counts)
        # one mesh axis per prime factor, so that a count in the einsum can use some of them
        unnamed = dict(zip(names, prime_factors(n_left), strict=False))
        return {**unnamed, **counts}, contraction.operands
    if any(map(is_placed, contraction.arrays)):
        if counts:
            raise _two_placements_error(contraction, counts)
        return _mesh_from_placements(contraction, n_devices), contraction.operands
    mesh_shape = {name: count for name, count in counts.items() if count > 1}
    n_replicas = _n_left(contraction, mesh_shape, n_devices)
    # each array axis is sharded over the mesh axis of the same name, if there is one
    operands: list[Expression] = []
    for operand in contraction.operands:
        axes_of = {name: (name,) for name in operand.names if name in mesh_shape}
        terms = (replace(x, mesh_axes=axes_of.get(str(x.name), ())) for x in operand.right)
        operands.append(replace(operand, right=tuple(terms)))
    # no array axis can be called '*'
    return {'*': n_replicas, **mesh_shape} if n_replicas > 1 else mesh_shape, tuple(operands)


def _n_left(contraction: Contraction, counts: Mapping[str, int], n_devices: int | None) -> int:
    product = math.prod(counts.values())
    if n_devices is not None and n_devices % product:
        raise contraction.error(
            f'the number of devices ({n_devices}) is not divisible by {product} '
            f'({", ".join(f"{name}={count}" for name, count in counts.items())})',
            code='device-count',
        )
    return 1 if n_devices is None else n_devices // product


def array_axes_of(array: Expression, mesh_shape: Mapping[str, int]) -> dict[str, str]:
    """Maps each mesh axis to the array axis that it shards, except those that replicate.

    Mesh axes are major to minor. Returns {} for an array without a placement.
    """
    if not is_placed(array):
        return {}
    layout = lay_out(array, len(array.names), math.prod(mesh_shape.values()), mesh_shape)
    fitted = fit(layout, mesh_shape)
    if fitted is None:
        counts = [split.count for split in layout.splits if not split.mesh_axes]
        raise array.error(
            'the counts do not match the mesh axes',
            [term for term in array.right if term.is_counted],
            code='device-count',
            device_grid=' x '.join(map(str, counts)),
            mesh=mesh_text(mesh_shape),
            axis_order='unnamed axes (d0, d1, ...), then the axes given by keyword',
            expected=f'in this order, {COUNTS_THAT_FIT}',
        )
    return {
        axis: array.names[split.axis]
        for split, axes in zip(layout.splits, fitted, strict=True)
        if split.axis is not None
        for axis in axes
    }


def _two_placements_error(contraction: Contraction, counts: Mapping[str, int]) -> EinshardError:
    return contraction.error(
        'shard axes either in the einsum or by keyword, not both',
        [term.span for array in contraction.arrays for term in array.right if term.spans_devices],
        by_keyword=', '.join(f'{name}={count}' for name, count in counts.items()),
    )


def _mesh_from_placements(contraction: Contraction, n_devices: int | None) -> dict[str, int]:
    """Splits the devices into mesh axes d0, d1, ... that fit the counts of all arrays."""
    placed = list(filter(is_placed, contraction.arrays))
    if n_devices is None:
        counted = [array for array in placed if not any(term.star for term in array.right)]
        if not counted:
            raise contraction.error(
                'a star needs the number of devices', code='device-count', example='devices=8'
            )
        n_devices = max(math.prod(term.factor for term in array.right) for array in counted)
    # the prefix products of each array's counts; ratios of successive ones are mesh axis sizes
    products = {1, n_devices}
    grids: dict[str, str] = {}
    for array in placed:
        layout = lay_out(array, len(array.names), n_devices)
        counts = [split.count for split in layout.splits]
        products.update(itertools.accumulate(counts, operator.mul))
        grids[f"'{placement_text(array)}'"] = ' x '.join(map(str, counts))
    pairs = list(itertools.pairwise(sorted(products)))
    if any(after % before for before, after in pairs):
        raise contraction.error(
            f'the expressions split the {n_devices} devices differently',
            [term.span for array in placed for term in array.right if term.is_counted],
            code='device-count',
            **{f'device grid of {text}': grid for text, grid in grids.items()},
        )
    return {f'd{i}': after // before for i, (before, after) in enumerate(pairs)}
