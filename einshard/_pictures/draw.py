"""Draws a placement given by mesh axes, or by an expression without a mesh."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .._errors import EinshardError
from .._notation.expression import ELLIPSIS, Expression
from .._notation.layout import axis_positions, lay_out, spec_entries
from .blocks import blocks_on_mesh
from .caption import describe_device_order, describe_shards
from .picture import Picture

_MAX_DEVICES = 1_000_000
_NO_SIGNS: Mapping[Any, str] = MappingProxyType({})
_MAX_DIMS = 63  # numpy allows 64 dimensions, JAX fewer


def draw(
    mesh: Mapping[Any, int],
    entries: Sequence[tuple[Any, ...]],
    names: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    *,
    dtype: str = '',
    named: bool = True,
    signs: Mapping[Any, str] = _NO_SIGNS,
) -> Picture:
    """Draws an array.

    Args:
        mesh: mesh axes and their sizes, slowest first.
        entries: for each array axis, the mesh axes that shard it, major to minor.
        names: the names of the array axes.
        sizes: the sizes of the array axes; None if unknown.
        dtype: the dtype; '' if unknown.
        named: whether the user named the mesh axes.
        signs: by mesh axis, the sign of its replicas: '+' for terms of a sum.
    """
    check_drawable(math.prod(mesh.values()), len(names))
    blocks = blocks_on_mesh(mesh, entries, names, sizes, signs)
    words = [describe_shards(blocks, dtype, entries if named else [])]
    return Picture(blocks, (*words, *describe_device_order(mesh, named, names, entries, signs)))


def draw_expression(
    expression: Expression, shape: tuple[int, ...] | None, n_devices: object = None
) -> Picture:
    """Draws an expression, without a mesh.

    Args:
        expression: an expression with counts only.
        shape: the shape of the array; if None, '...' stands for no axes.
        n_devices: the number of devices. Default: the number that the counts use.
    """
    n_devices = _device_count(expression, n_devices)
    ndim = rank_drawn(expression, shape)
    layout = lay_out(expression, ndim if shape is None else shape, n_devices)
    mesh = {f'd{i}': split.count for i, split in enumerate(layout.splits)}
    signs = {f'd{i}': split.sign for i, split in enumerate(layout.splits) if split.sign}
    entries = spec_entries(layout, [(axis,) for axis in mesh])
    entries += ((),) * (ndim - len(entries))
    return draw(mesh, entries, axis_names(expression, ndim), shape, named=False, signs=signs)


def rank_drawn(expression: Expression, shape: Sequence[int] | None) -> int:
    """Returns the number of array axes that the picture of an expression shows."""
    names = expression.names
    return len(names) - (ELLIPSIS in names) if shape is None else len(shape)


def axis_names(expression: Expression, ndim: int) -> tuple[str, ...]:
    """Returns the name of each axis; '...' for unnamed axes."""
    positions = axis_positions(expression, ndim)
    names = {position: name for name, position in positions.items()}
    return tuple(names.get(i, ELLIPSIS) for i in range(ndim))


def _device_count(expression: Expression, devices: Any) -> int:
    """Returns the given number of devices, or the number that the counts use."""
    by_name = [term for term in expression.right if term.mesh_axes]
    if by_name:
        raise expression.error(
            f"'{by_name[0]}' names mesh axes, but there is no mesh",
            by_name,
            expected='devices=mesh, a Mesh or AbstractMesh',
            command_line='--mesh data=4 tp=2',
        )
    if devices is None:
        stars = [term for term in expression.right if term.star]
        if stars:
            raise expression.error(
                'a star needs the number of devices',
                stars,
                example='devices=8; also a mesh or a list of devices',
                command_line='--devices 8',
            )
        n_devices = math.prod(term.factor for term in expression.right)
    else:
        try:
            n_devices = 0 if isinstance(devices, bool) else operator.index(devices)
        except TypeError:
            n_devices = 0
        if n_devices < 1:
            raise EinshardError(
                f'devices= must be a number of devices, not {devices!r}',
                facts={'expected': 'a positive integer, a Mesh, an AbstractMesh or devices'},
            )
    check_drawable(n_devices, 0, expression.text)
    return n_devices


def check_drawable(n_devices: int, ndim: int, expression: str | None = None) -> None:
    """Raises if a picture would be too large."""
    for n, limit, what in (
        (n_devices, _MAX_DEVICES, 'devices'),
        (ndim, _MAX_DIMS, 'dimensions'),
    ):
        if n > limit:
            raise EinshardError(
                f'a picture of {n} {what} would be too large',
                expression=expression,
                facts={'at most': f'{limit} {what}'},
            )
