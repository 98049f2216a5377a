"""Draws a placement given by mesh axes, or by an expression without a mesh."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from .._errors import EinshardError
from .._notation.counts import prime_factors
from .._notation.expression import ELLIPSIS, Expression, parse
from .._notation.layout import as_count, axis_positions, lay_out, no_mesh_text, spec_entries
from .._notation.repairs import factorizations
from .._working_fixes import with_working_fix
from .blocks import blocks_on_mesh
from .caption import describe_device_order, describe_shards
from .picture import Picture

_MAX_DEVICES = 1_000_000
_NO_SIGNS: Mapping[Any, str] = MappingProxyType({})
_MAX_FACTORED = 4096  # devices; factoring 720,720 takes 2 s
_MAX_FACTORIZATIONS = 2000  # checking them takes 1 s; 4096 has 1.35 million into 12 factors
_MAX_DIMS = 63


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
    """Draws how an array is sharded over a mesh.

    Args:
        mesh, entries, names, sizes, signs: as for `blocks_on_mesh`.
        named: whether the user named the mesh axes.
    """
    check_drawable(math.prod(mesh.values()), len(names))
    blocks = blocks_on_mesh(mesh, entries, names, sizes, signs)
    words = [describe_shards(blocks, dtype, entries if named else [])]
    return Picture(blocks, (*words, *describe_device_order(mesh, named, names, entries, signs)))


def draw_expression(
    expression: Expression, shape: tuple[int, ...] | None, n_devices: object = None
) -> Picture:
    """Draws an expression. Raises an error if it names mesh axes.

    Args:
        shape: the shape of the array; if None, '...' stands for no axes.
        n_devices: the number of devices. Default: the product of the counts.
    """
    terms = [term for term in expression.right if term.mesh_axes]
    if terms:
        given = None if n_devices is None else _device_count(expression, n_devices)
        mesh, sentence = _find_mesh(expression, shape, given), no_mesh_text(terms)
        if mesh is None or any(map(as_count, terms)):
            raise expression.error(
                sentence, terms, code='mesh', expected='devices=mesh, a Mesh or AbstractMesh'
            )
        sizes = ' '.join(f'{axis}={n}' for axis, n in mesh.items())
        raise expression.error(
            sentence,
            terms,
            code='mesh',
            on_the_command_line=f"einshard show '{expression.text}' --mesh {sizes}",
            fix=f'devices=AbstractMesh({(*mesh.values(),)}, {(*mesh,)})',
        )
    n_devices = _device_count(expression, n_devices)
    ndim = drawn_ndim(expression, shape)
    try:
        layout = lay_out(expression, ndim if shape is None else shape, n_devices)
    except EinshardError as error:

        def retry(text: str) -> None:
            lay_out(parse(text), ndim if shape is None else shape, n_devices)

        raise with_working_fix(error, retry) from None
    mesh = {f'd{i}': split.count for i, split in enumerate(layout.splits)}
    signs = {f'd{i}': split.sign for i, split in enumerate(layout.splits) if split.sign}
    entries = spec_entries(layout, [(axis,) for axis in mesh])
    entries += ((),) * (ndim - len(entries))
    return draw(mesh, entries, axis_names(expression, ndim), shape, named=False, signs=signs)


def drawn_ndim(expression: Expression, shape: Sequence[int] | None) -> int:
    names = expression.names
    return len(names) - (ELLIPSIS in names) if shape is None else len(shape)


def axis_names(expression: Expression, ndim: int) -> tuple[str, ...]:
    """Returns the name of each axis, or '...' for axes without a name."""
    positions = axis_positions(expression, ndim)
    names = {position: name for name, position in positions.items()}
    return tuple(names.get(i, ELLIPSIS) for i in range(ndim))


def _device_count(expression: Expression, devices: Any) -> int:
    if devices is None:
        stars = [term for term in expression.right if term.star]
        if stars:
            raise expression.error(
                'a star needs the number of devices',
                stars,
                code='device-count',
                expected='devices=8, devices=mesh or devices=jax.devices()',
                on_the_command_line=f"einshard show '{expression.text}' --devices 8",
            )
        n_devices = math.prod(term.factor for term in expression.right)
    else:
        try:
            n_devices = 0 if isinstance(devices, bool) else operator.index(devices)
        except TypeError:
            n_devices = 0
        if n_devices < 1:
            raise EinshardError(
                f'devices={devices!r} is neither a number of devices nor a mesh',
                code='mesh',
                facts={'expected': 'a positive integer, a mesh or a list of devices'},
            )
    check_drawable(n_devices, 0, expression.text)
    return n_devices


def _find_mesh(
    expression: Expression, shape: tuple[int, ...] | None, n_devices: int | None
) -> Mapping[str, int] | None:
    """Finds sizes for the mesh axes of an expression: {'data': 4, 'tensor': 2} for 8 devices.

    Sizes are as equal as possible, larger ones first. Returns None if no sizes fit, if there are
    too many devices or factorizations, or if the expression also has counts, stars or signs.
    """
    names = list(dict.fromkeys(axis for term in expression.right for axis in term.mesh_axes))
    if any(term.sign or (term.is_counted and not term.mesh_axes) for term in expression.right):
        return None
    n = 2 ** len(names) if n_devices is None else n_devices  # 2 for each axis
    if n > _MAX_FACTORED:
        return None
    exponents = Counter(prime_factors(n)).values()
    n_ways = math.prod(math.comb(e + len(names) - 1, e) for e in exponents)
    if n_ways > _MAX_FACTORIZATIONS:
        return None
    by_spread = sorted(factorizations(n, len(names)), key=lambda s: (max(s) - min(s), -s[0]))
    for sizes in by_spread:
        mesh = dict(zip(names, sizes, strict=True))
        with suppress(EinshardError):
            lay_out(expression, shape or drawn_ndim(expression, shape), n, mesh)
            return mesh
    return None


def check_drawable(n_devices: int, ndim: int, expression: str | None = None) -> None:
    for n, limit, what in ((n_devices, _MAX_DEVICES, 'devices'), (ndim, _MAX_DIMS, 'dimensions')):
        if n > limit:
            raise EinshardError(
                f'a picture of {n} {what} would be too large',
                expression=expression,
                facts={'at most': f'{limit} {what}'},
            )
