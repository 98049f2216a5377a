"""show: draws which devices hold which block of an array."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, overload

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from .._errors import EinshardError, plural, printable, public
from .._explain.report import Report
from .._explain.report_rows import ArrayRow
from .._notation.expression import axis_letters, parse
from .._sharding.describe import Description, describe, describe_named, sharding_of, signs_of
from .._sharding.leaf_spec import split_memory_kind
from .._sharding.mesh import UNCONSTRAINED, MeshLike, is_canonical_mesh, spec_axes
from .._sharding.resolve import resolve
from .._sharding.scopes import ambient_mesh, current_context
from .._text import array_text
from .._trees.paths import leaves_with_paths, path_text
from .blocks import Blocks
from .caption import describe_shards
from .draw import axis_names, check_drawable, draw, draw_expression, drawn_ndim
from .picture import Gallery, Picture

_T = TypeVar('_T')
_MAX_PICTURES = 12


@overload
def show(
    x_or_expression: str | jax.Array | jax.ShapeDtypeStruct | Sharding,
    shape: Sequence[int] | None = None,
    devices: int | MeshLike | None = None,
) -> Picture: ...
@overload
def show(
    x_or_expression: Any, shape: Sequence[int] | None = None, devices: int | MeshLike | None = None
) -> Picture | Gallery: ...
@public
def show(
    x_or_expression: Any, shape: Sequence[int] | None = None, devices: int | MeshLike | None = None
) -> Picture | Gallery:
    """Draws which devices hold which block of an array.

        >>> from einshard import show
        >>> show('a b -> 2 a2* b*', (4, 8), 16)
                    b 0:4           b 4:8
              ┌───────────────┬───────────────┐
        a 0:1 │      0,8      │      1,9      │
              ├───────────────┼───────────────┤
        a 1:2 │     2,10      │     3,11      │
              ├───────────────┼───────────────┤
        a 2:3 │     4,12      │     5,13      │
              ├───────────────┼───────────────┤
        a 3:4 │     6,14      │     7,15      │
              └───────────────┴───────────────┘
        a is split into 4 parts, b into 2; each shard is replicated on 2 devices;
        a device holds [1,4], 1/8 of the array
        devices, slowest-varying first: 2 replicas x 4 parts of a x 2 parts of b

    Drawing an expression needs no devices and starts no JAX backend. Devices are numbered from 0,
    in mesh order.

    Args:
        x_or_expression: an expression, an array, a `ShapeDtypeStruct`, a sharding, a pytree of
            arrays or shardings, or a report of `explain`.
        shape: the shape of the array, for an expression or shardings. If omitted, labels
            are block numbers instead of ranges of indices, and '...' stands for no axes.
        devices: the devices to draw an expression on: their number, a sequence of devices, or a
            mesh, whose axes the expression can name. Default: the mesh of `jax.set_mesh`. If none
            is set, as many devices as the counts use.

    Returns:
        A picture, which renders in the REPL, notebooks, rich and print. `picture.save('x.svg')`
        writes a file. For a pytree or a report, one picture per distinct shape and placement.

    Raises:
        EinshardError: the expression is not valid, as for `make_sharding`; the shape is not
            divisible; or `x_or_expression` has no sharding, like a numpy array.
    """
    if shape is not None:
        shape = checked_shape(shape)
    if isinstance(x_or_expression, str):
        return _draw_text(x_or_expression, shape, devices)
    if devices is not None:
        raise EinshardError(
            'devices= is only for expressions; arrays and shardings have their own devices',
            facts={'instead': 'omit devices='},
        )
    if isinstance(x_or_expression, Report):
        if shape is not None:
            raise EinshardError('a report has the shapes of its arrays; omit shape=')
        return _draw_report(x_or_expression)
    if not jtu.all_leaves([x_or_expression]):
        return _draw_pytree(x_or_expression, shape)
    return _draw_value(x_or_expression, shape)


def _draw_pytree(tree: Any, shape: tuple[int, ...] | None) -> Gallery:
    distinct: dict[Any, tuple[Any, list[str]]] = {}
    for path, leaf in leaves_with_paths(tree):
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, 'sharding', None)
        if isinstance(sharding, Sharding):
            key = (getattr(leaf, 'shape', None), getattr(leaf, 'dtype', None), sharding)
            distinct.setdefault(key, (leaf, []))[1].append(path_text(path))
    if not distinct:
        raise EinshardError(f'nothing to draw: no leaf of the {type(tree).__name__} has a sharding')

    def draw_leaf(leaf: Any) -> tuple[str, Picture]:
        about = '' if isinstance(leaf, Sharding) else f': {array_text(leaf)}'
        return about, _draw_value(leaf, shape)

    return _gallery(distinct.values(), draw_leaf)


def _draw_report(report: Report) -> Gallery:
    meshes: list[AbstractMesh] = []
    for axes in report.meshes:
        names, sizes = zip(*axes, strict=True)
        meshes.append(AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names)))
    distinct: dict[tuple[str, str], tuple[ArrayRow, list[str]]] = {}
    for row in (*report.arguments, *report.results):
        if not isinstance(row.placement, Description):
            distinct.setdefault((row.array, row.placement), (row, []))[1].append(row.path)
    if not distinct:
        raise EinshardError(
            f'nothing to draw: no argument or result of {report.name} is on a mesh', code='mesh'
        )

    def draw_row(row: ArrayRow) -> tuple[str, Picture]:
        terms = parse(split_memory_kind(row.placement)[0]).right
        axes = {axis for term in terms for axis in term.mesh_axes}
        mesh = next((mesh for mesh in meshes if axes <= {*mesh.axis_names}), None)
        # an expression with counts uses all devices of the program, not the user's mesh
        has_counts = not axes and any(term.is_counted for term in terms)
        devices = report.n_devices if mesh is None or has_counts else mesh
        return f': {row.array}, {row.placement}', _draw_text(row.placement, row.shape, devices)

    return _gallery(distinct.values(), draw_row)


def _gallery(
    distinct: Collection[tuple[_T, list[str]]], draw_item: Callable[[_T], tuple[str, Picture]]
) -> Gallery:
    """Draws the first `_MAX_PICTURES` of the (item, paths) pairs in `distinct`.

    `draw_item` returns the text that follows the paths in a caption, and the picture.
    """
    pictures: list[tuple[str, Picture]] = []
    for item, paths in itertools.islice(distinct, _MAX_PICTURES):
        about, picture = draw_item(item)
        more = f' and {len(paths) - 3} more' if len(paths) > 3 else ''
        pictures.append((printable(f'{", ".join(paths[:3])}{more}{about}'), picture))
    return Gallery(pictures, len(distinct) - len(pictures))


def _draw_text(text: str, shape: tuple[int, ...] | None, devices: int | MeshLike | None) -> Picture:
    written, memory_kind = split_memory_kind(text)
    expression = parse(written)
    if devices is None:
        devices = ambient_mesh()
    if isinstance(devices, Mesh | AbstractMesh) or _is_device_sequence(devices):
        ndim = drawn_ndim(expression, shape)
        context = current_context(devices)
        placement = resolve(expression.text, ndim if shape is None else shape, context)
        picture = _draw_named_sharding(placement.sharding, axis_names(expression, ndim), shape)
    else:
        picture = draw_expression(expression, shape, devices)
    words = picture.words if memory_kind is None else (*picture.words, f'in {memory_kind}')
    return Picture(picture.blocks, words)


def _draw_value(x: Any, shape: tuple[int, ...] | None) -> Picture:
    if isinstance(x, Sharding):
        return _draw_sharding(x, shape, '')
    own_shape = getattr(x, 'shape', None)
    if own_shape is None:
        raise EinshardError(
            f'show cannot draw an object of type {type(x).__name__}',
            facts={
                'expected': 'an expression, an array, a ShapeDtypeStruct, a sharding, '
                'or a pytree of these'
            },
        )
    sharding = sharding_of(x)
    if not isinstance(sharding, Sharding):
        raise EinshardError(
            'nothing to draw: the array has no known sharding', facts={'placement': describe(x)}
        )
    if shape is not None and shape != tuple(own_shape):
        raise EinshardError(
            f'shape= is {shape}, but the array has shape {tuple(own_shape)}',
            facts={'instead': 'omit shape='},
        )
    return _draw_sharding(sharding, tuple(own_shape), str(x.dtype))


def _draw_sharding(sharding: Sharding, shape: tuple[int, ...] | None, dtype: str) -> Picture:
    if not isinstance(sharding, NamedSharding):
        if shape is None:
            raise EinshardError(f'drawing a {type(sharding).__name__} needs shape=')
        return _draw_other_sharding(sharding, shape, dtype)
    n_entries = len(spec_axes(sharding.spec))
    ndim = n_entries if shape is None else len(shape)
    if n_entries > ndim:
        raise EinshardError(
            f'the sharding needs at least {plural(n_entries, "dimension")}, '
            f'but shape= is {list(shape or ())}',
            facts={'sharding': sharding.spec},
        )
    names = _letters(ndim)
    picture = _draw_named_sharding(sharding, names, shape, dtype)
    written = describe_named(sharding, None if shape is None else ndim, names)
    notes = [written if isinstance(written, Description) else f"in the notation: '{written}'"]
    if isinstance(sharding.mesh, Mesh):
        ids = [device.id for device in sharding.mesh.devices.flat]
        if ids != list(range(len(ids))):
            first = ','.join(map(str, ids[:16])) + ',..' * (len(ids) > 16)
            notes.append(f'devices are numbered in mesh order; their ids: {first}')
    return Picture(picture.blocks, (*picture.words, *notes))


def _draw_named_sharding(
    sharding: NamedSharding, names: tuple[str, ...], shape: tuple[int, ...] | None, dtype: str = ''
) -> Picture:
    mesh = sharding.mesh
    axis_sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    entries = spec_axes(sharding.spec)
    if UNCONSTRAINED in entries:
        raise EinshardError(
            'the sharding has unconstrained axes, which are left to the compiler',
            facts={'sharding': sharding.spec},
        )
    entries += [()] * (len(names) - len(entries))
    for i, size in enumerate(shape or ()):
        n_shards = math.prod(axis_sizes[axis] for axis in entries[i])
        if size % n_shards:
            raise EinshardError(
                f'axis {i} (size {size}) is not divisible by {n_shards}',
                code='not-divisible',
                facts={'sharding': sharding.spec},
            )
    named, signs = not is_canonical_mesh(mesh), signs_of(sharding)
    return draw(axis_sizes, entries, names, shape, dtype=dtype, named=named, signs=signs)


def _draw_other_sharding(sharding: Sharding, shape: tuple[int, ...], dtype: str) -> Picture:
    """Draws a sharding without a mesh: a `SingleDeviceSharding`, or one that XLA chose."""
    check_drawable(len(sharding.device_set), len(shape))
    devices_of: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        pairs = zip(index or (), shape, strict=True)
        block = tuple(part.indices(size)[:2] for part, size in pairs)
        devices_of.setdefault(block, []).append(device.id)
    parts = [len({block[axis] for block in devices_of}) for axis in range(len(shape))]
    # sorted blocks are in row-major order
    devices = [device for block in sorted(devices_of) for device in sorted(devices_of[block])]
    blocks = Blocks(devices, tuple(parts), _letters(len(shape)), shape)
    return Picture(blocks, (describe_shards(blocks, dtype, []), describe(sharding)))


def _letters(n: int) -> tuple[str, ...]:
    return tuple(itertools.islice(axis_letters(), n))


def _is_device_sequence(devices: object) -> TypeGuard[Sequence[Any]]:
    return hasattr(devices, '__iter__') and not isinstance(devices, str | Mapping)


def checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise EinshardError(
            f'shape= must be a sequence of sizes, not {shape!r}', facts={'example': 'shape=(4, 8)'}
        )
    return sizes
