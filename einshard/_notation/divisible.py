"""Checks that the sizes of axes are divisible by their numbers of shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

from .axis_positions import terms_of_axis
from .expression import Expression
from .layout import Layout
from .mesh_text import mesh_size_text
from .repairs import repairs


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
            facts = _shard_counts(size, n_devices)
            if _mesh_axes_of(layout, axis):
                facts = _padding_facts(expression, layout, shape, axis)
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


def _shard_counts(size: int, n_devices: int) -> dict[str, str]:
    """Returns a fact: the numbers of shards that divide both the size and the device count."""
    common = math.gcd(size, n_devices)
    *most, last = [str(n) for n in range(1, common + 1) if common % n == 0]
    if not most:
        return {'works with': '1 shard (unsharded)'}
    both = f'both {size} and {n_devices}' if n_devices != size else str(size)
    return {'works with': f'{", ".join(most)} or {last} shards, the divisors of {both}'}
