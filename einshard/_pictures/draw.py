"""The picture of a placement: which devices hold which block of an array."""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from .._describe import describe, describe_named
from .._errors import EinshardError, plural
from .._expression import ELLIPSIS, Expression, parse
from .._layout import axis_positions, check_divisible, lay_out
from .._mesh import (
    MeshLike,
    context_mesh,
    device_mesh,
    entry_axes,
    is_device_mesh,
    resolve_mesh,
)
from .._reports.report import Report
from .._reports.rows import ArrayRow
from .._sharding import find_placement, lower
from .._specs import array_text, path_text
from .boxes import Blocks
from .picture import Gallery, Picture
from .words import device_order, meaning

_MOST_DEVICES = 1_000_000


_MOST_PICTURES = 12


@overload
def show(
    x_or_expression: str | jax.Array | jax.ShapeDtypeStruct | Sharding,
    shape: Sequence[int] | None = None,
    devices: int | MeshLike | None = None,
) -> Picture: ...
@overload
def show(
    x_or_expression: Any,
    shape: Sequence[int] | None = None,
    devices: int | MeshLike | None = None,
) -> Picture | Gallery: ...
def show(
    x_or_expression: Any,
    shape: Sequence[int] | None = None,
    devices: int | MeshLike | None = None,
) -> Picture | Gallery:
    """Draws which devices hold which block of an array.

        >>> show('a b -> 2 a2* b*', (4, 8), 16)
                b 0:4    b 4:8
              ┌────────┬────────┐
        a 0:1 │  0,8   │  1,9   │
              ├────────┼────────┤
        a 1:2 │  2,10  │  3,11  │
              ├────────┼────────┤
        a 2:3 │  4,12  │  5,13  │
              ├────────┼────────┤
        a 3:4 │  6,14  │  7,15  │
              └────────┴────────┘
        a is in 4 parts, b in 2; each shard is on 2 devices; a device holds [1,4], 1/8 of the array
        devices, slowest first: 2 replicas x 4 parts of a x 2 parts of b

    An expression is drawn from itself alone: there need be no such devices, and no backend of JAX
    is started. Devices are the numbers from 0 on, in the order of the mesh.

    Args:
        x_or_expression: an expression; or an array, a `ShapeDtypeStruct` or a sharding, to see
            where it is; or a tree of them, or a report of `explain`.
        shape: the shape of the array. Without it the blocks are numbered, and '...' in an
            expression stands for no axis. Arrays know theirs.
        devices: for an expression, how many devices; or a mesh, whose axes the expression may
            name, or a sequence of devices. Where left out: the mesh of `jax.set_mesh`, else as
            many as the counts of the expression ask for.

    Returns:
        A picture, which `print`, the prompt, rich and notebooks show, and whose `save` writes an
        SVG file. For a tree, one for all leaves of the same shape and placement.

    Raises:
        EinshardError: as for `make_sharding`; the shape is not divisible; or there is nothing to
            draw, as for an array of the host.
    """
    if shape is not None:
        shape = _checked_shape(shape)
    if isinstance(x_or_expression, str):
        return _of_expression(parse(x_or_expression), shape, devices)
    if devices is not None:
        raise EinshardError(
            'devices= is for expressions; arrays and shardings have their own',
            facts={'given': type(x_or_expression).__name__},
        )
    if isinstance(x_or_expression, Report):
        return _of_report(x_or_expression)
    if not jtu.all_leaves([x_or_expression]):
        return _of_tree(x_or_expression)
    return _of_value(x_or_expression, shape)


def _of_tree(tree: Any) -> Gallery:
    """Pictures of the leaves that have a sharding."""
    alike: dict[Any, list[str]] = {}
    leaves: dict[Any, Any] = {}
    for path, leaf in jtu.tree_leaves_with_path(tree):
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, 'sharding', None)
        if isinstance(sharding, Sharding):
            key = (getattr(leaf, 'shape', None), getattr(leaf, 'dtype', None), sharding)
            alike.setdefault(key, []).append(path_text(path))
            leaves[key] = leaf
    if not leaves:
        raise EinshardError(
            f'there is nothing to draw: no leaf of the {type(tree).__name__} has a sharding'
        )
    drawn = list(leaves.items())[:_MOST_PICTURES]
    pictures = [
        (
            _caption(alike[key], None if isinstance(leaf, Sharding) else array_text(leaf)),
            _of_value(leaf, None),
        )
        for key, leaf in drawn
    ]
    return Gallery(pictures, len(leaves) - len(drawn))


def _of_report(report: Report) -> Gallery:
    """Pictures of the arguments and results of a compiled program."""
    devices: int | AbstractMesh = report.n_devices
    if report.mesh:
        names, sizes = zip(*report.mesh, strict=True)
        mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        devices = devices if is_device_mesh(mesh) else mesh
    alike: dict[tuple[str, str], list[ArrayRow]] = {}
    for row in (*report.arguments, *report.results):
        if '->' in row.placement and '(with' not in row.placement:  # an expression, not words
            alike.setdefault((row.array, row.placement), []).append(row)
    if not alike:
        raise EinshardError(f'there is nothing to draw: no array of {report.name} is on a mesh')
    drawn = list(alike.items())[:_MOST_PICTURES]
    pictures = [
        (
            _caption([row.path for row in rows], f'{array}, {placement}'),
            _of_expression(parse(placement), rows[0].shape, devices),
        )
        for (array, placement), rows in drawn
    ]
    return Gallery(pictures, len(alike) - len(drawn))


def _caption(paths: Sequence[str], about: str | None) -> str:
    listed = ', '.join(paths[:3]) + (f' and {len(paths) - 3} more' if len(paths) > 3 else '')
    return listed if about is None else f'{listed}: {about}'


def _of_expression(
    expression: Expression, shape: tuple[int, ...] | None, devices: int | MeshLike | None
) -> Picture:
    n_dims = len(expression.names) - (ELLIPSIS in expression.names) if shape is None else len(shape)
    if devices is None:
        devices = context_mesh()
    if isinstance(devices, Mesh | AbstractMesh) or _is_sequence(devices):
        placement = find_placement(expression.text, n_dims, resolve_mesh(devices), None)
        layout, sharding = placement.layout, placement.sharding
    else:
        n_devices = _device_count(expression, devices)
        layout = lay_out(expression, n_dims, n_devices)
        # the axes d0, d1, ... of this mesh are names for nobody, so the lay-out does not see them
        mesh = device_mesh(AbstractMesh((n_devices,), ('d0',)))
        sharding = lower(expression, layout, mesh)
    if shape is not None:
        check_divisible(expression, layout, shape, sharding.mesh.size)
    positions = axis_positions(expression, n_dims)
    names = {position: name for name, position in positions.items()}
    return _of_named(sharding, tuple(names.get(i, ELLIPSIS) for i in range(n_dims)), shape)


def _device_count(expression: Expression, devices: object) -> int:
    """The number of devices given, or the one that the expression asks for."""
    by_name = [term for term in expression.right if term.mesh_axes]
    if by_name:
        raise expression.error(
            f"'{by_name[0]}' names mesh axes, but there is no mesh",
            by_name,
            give='devices=, a Mesh or AbstractMesh (--mesh data=4 tp=2 on the command line)',
        )
    if devices is None:
        stars = [term for term in expression.right if term.star]
        if stars:
            raise expression.error(
                'a star stands for the devices that are left, but how many there are is not said',
                stars,
                give='devices=, a number, a mesh or devices (--devices on the command line)',
            )
        n_devices = math.prod(term.factor for term in expression.right)
    else:
        n_devices = int(devices) if isinstance(devices, int | np.integer) else 0
        if n_devices < 1 or isinstance(devices, bool):
            raise EinshardError(
                f'devices= is {devices!r}, which is no number of devices',
                facts={'give': 'a positive number, a Mesh, an AbstractMesh or devices'},
            )
    if n_devices > _MOST_DEVICES:
        raise EinshardError(
            f'a picture of {n_devices} devices would be too large',
            expression=expression.text,
            facts={'draws': f'up to {_MOST_DEVICES} devices'},
        )
    return n_devices


def _of_value(x: Any, shape: tuple[int, ...] | None) -> Picture:
    """The picture of an array, a struct or a sharding."""
    if isinstance(x, Sharding):
        return _of_sharding(x, shape, '')
    own_shape = getattr(x, 'shape', None)
    if own_shape is None:
        raise EinshardError(
            f'{type(x).__name__} cannot be drawn',
            facts={
                'give': 'an expression, an array, a ShapeDtypeStruct or a sharding; '
                'for trees, use jax.tree.map'
            },
        )
    placed = describe(x)
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, 'sharding', None)
    if not isinstance(sharding, Sharding) or (isinstance(x, Tracer) and '->' not in placed):
        raise EinshardError(f'there is nothing to draw: the array is {placed}')
    if shape is not None and shape != tuple(own_shape):
        raise EinshardError(
            f'shape= is {list(shape)}, but the array has the shape {list(own_shape)}',
            facts={'leave out': 'shape=; an array knows its own'},
        )
    return _of_sharding(sharding, tuple(own_shape), str(x.dtype))


def _of_sharding(sharding: Sharding, shape: tuple[int, ...] | None, dtype: str) -> Picture:
    if not isinstance(sharding, NamedSharding):
        if shape is None:
            raise EinshardError(f'to draw a {type(sharding).__name__}, give shape= too')
        return _of_other(sharding, shape, dtype)
    n_dims = len(sharding.spec) if shape is None else len(shape)
    names = tuple(map(_letters, range(n_dims)))
    picture = _of_named(sharding, names, shape, dtype)
    written = describe_named(sharding, None if shape is None else n_dims, names)
    notes = [f"in the notation: '{written}'" if '(with' not in written else written]
    if isinstance(sharding.mesh, Mesh):
        ids = [device.id for device in sharding.mesh.devices.flat]
        if ids != list(range(len(ids))):
            notes.append(f'devices are numbered in mesh order; their ids: {_first(ids)}')
    return Picture(picture.blocks, (*picture.words, *notes))


def _of_named(
    sharding: NamedSharding,
    names: tuple[str, ...],
    shape: tuple[int, ...] | None,
    dtype: str = '',
) -> Picture:
    mesh = sharding.mesh
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    entries = _entries(sharding, len(names), shape)
    parts = [math.prod(sizes[axis] for axis in entry) for entry in entries]
    if shape is not None:
        for i, (size, count) in enumerate(zip(shape, parts, strict=True)):
            if size % count:
                raise EinshardError(
                    f'axis {i} has size {size}, which {count} parts do not divide',
                    facts={'sharding': sharding.spec},
                )
    sharded = [axis for entry in entries for axis in entry]
    order = [*sharded, *(axis for axis in mesh.axis_names if axis not in sharded)]
    grid = np.arange(mesh.size).reshape(mesh.axis_sizes)
    devices = grid.transpose([mesh.axis_names.index(axis) for axis in order]).reshape(*parts, -1)
    blocks = Blocks(devices, names, shape)
    words = [meaning(blocks, dtype, [] if is_device_mesh(mesh) else entries)]
    words += device_order(mesh, names, entries)
    return Picture(blocks, tuple(words))


def _entries(
    sharding: NamedSharding, n_dims: int, shape: tuple[int, ...] | None
) -> list[tuple[Any, ...]]:
    """The mesh axes of each array axis."""
    spec = list(sharding.spec)
    if len(spec) > n_dims:
        raise EinshardError(
            f'the sharding is for {plural(len(spec), "dimension")} or more, '
            f'but the shape {list(shape or ())} has {n_dims}',
            facts={'sharding': sharding.spec},
        )
    if PartitionSpec.UNCONSTRAINED in spec:
        raise EinshardError(
            'the sharding leaves axes unconstrained: where they lie is up to the compiler',
            facts={'sharding': sharding.spec},
        )
    spec += [None] * (n_dims - len(spec))
    return list(map(entry_axes, spec))


def _of_other(sharding: Sharding, shape: tuple[int, ...], dtype: str) -> Picture:
    """The picture of a sharding without a mesh: on one device, or as the compiler left it."""
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        whole = zip(index or (), shape, strict=True)
        block = tuple(cut.indices(size)[:2] for cut, size in whole)
        holders.setdefault(block, []).append(device.id)
    parts = [len({block[axis] for block in holders}) for axis in range(len(shape))]
    # blocks in ascending order are the blocks of a grid, row by row
    devices = np.array([sorted(holders[block]) for block in sorted(holders)])
    blocks = Blocks(devices.reshape(*parts, -1), tuple(map(_letters, range(len(shape)))), shape)
    return Picture(blocks, (meaning(blocks, dtype, []), describe(sharding)))


def _first(ids: Sequence[int]) -> str:
    shown = ','.join(map(str, ids[:16]))
    return shown if len(ids) <= 16 else f'{shown},..'


def _letters(i: int) -> str:
    """The name of an axis that has none, as `describe` names it: a, b, c, ..."""
    letters = string.ascii_lowercase
    return letters[i] if i < 26 else _letters(i // 26 - 1) + letters[i % 26]


def _is_sequence(devices: object) -> TypeGuard[Sequence[Any]]:
    return hasattr(devices, '__iter__') and not isinstance(devices, str | Mapping)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise EinshardError(
            f'shape= is {shape!r}, which is no shape', facts={'give': 'sizes, as in (4, 8)'}
        )
    return sizes
