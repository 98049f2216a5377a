"""What the playground shows. Runs in the browser, so it imports neither numpy nor JAX."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from einshard._draw.draw import axis_names, draw, drawn_ndim
from einshard._draw.picture import Picture
from einshard._errors import EinshardError, Suggestion
from einshard._notation.counts import prime_factors
from einshard._notation.expression import Expression, parse
from einshard._notation.hints import mesh_axes_hint, spacing_hint
from einshard._notation.layout import (
    fit,
    fitting_sizes,
    lay_out,
    mesh_text,
    misfit_error,
    signed_axes,
    spec_entries,
)
from einshard._working_fixes import keep_working_suggestions

_MAX_DEVICES = 4096  # a picture of more takes seconds on a phone
_MESH_AXIS = re.compile(r'([^\s(),@*]+)[=:]([0-9]+)')


@dataclass(frozen=True)
class Found:
    """An expression on a mesh.

    Attributes:
        picture: the picture.
        spec: its PartitionSpec.
        mesh: the axes of its mesh, with their type.
    """

    picture: Picture
    spec: str
    mesh: str


def answer(expression: str, shape: str, devices: str) -> str:
    """Returns what the page shows for the texts in its fields, as JSON."""
    try:
        sizes = read_shape(shape)
        mesh = read_devices(devices)
        return json.dumps(_answer(expression, sizes, mesh))
    except EinshardError as error:
        fix = error.fix.expression if isinstance(error.fix, Suggestion) else None
        return json.dumps({'error': str(error), 'fix': fix})


def _answer(text: str, shape: tuple[int, ...] | None, mesh: int | Mapping[str, int]) -> object:
    def attempt(text: str) -> Found:
        return find(parse(text), shape, mesh)

    try:
        expression = parse(text)
        found = find(expression, shape, mesh)
    except EinshardError as error:
        by_number = isinstance(mesh, int)
        raise keep_working_suggestions(
            error, attempt, (lambda n: find(parse(text), shape, n)) if by_number else None
        ) from None
    is_bare = expression.short and not any(term.spans_devices for term in expression.right)
    if not isinstance(mesh, int) and is_bare:
        names = [name for name, size in mesh.items() if size > 1]
        warning = mesh_axes_hint(expression, names, attempt)
    else:
        warning = spacing_hint(expression, attempt)
    return {
        'svg': found.picture.svg,
        'words': found.picture.words,
        'spec': found.spec,
        'mesh': found.mesh,
        'warning': warning,
    }


def find(
    expression: Expression, shape: tuple[int, ...] | None, mesh: int | Mapping[str, int]
) -> Found:
    """Lays out an expression on a number of devices, or on a mesh with named axes."""
    named = not isinstance(mesh, int)
    sizes = mesh if named else _canonical(prime_factors(mesh))
    n_devices = math.prod(sizes.values())
    ndim = drawn_ndim(expression, shape)
    try:
        layout = lay_out(
            expression,
            ndim if shape is None else shape,
            n_devices,
            sizes if named else None,
            replicates_by_default=named,
        )
    except EinshardError as error:
        axes = dict.fromkeys(axis for term in expression.right for axis in term.mesh_axes)
        if named or not axes or error.fix:
            raise
        raise error.about(on_this_page=f'devices {" ".join(f"{a}=2" for a in axes)}') from None
    signs = {term.sign for term in expression.right} - {''}
    kind = 'Explicit' if signs else 'Auto'  # partial sums need Explicit axes
    fitted = fit(layout, sizes)
    if fitted is None:
        if named or signs:
            raise misfit_error(expression, layout, f'{mesh_text(sizes)} ({kind})')
        sizes = _canonical(fitting_sizes(layout))
        fitted = fit(layout, sizes) or ()
    entries = spec_entries(layout, fitted)
    partial = {sign: signed_axes(layout, fitted, sign) for sign in sorted(signs)}
    picture = draw(
        sizes,
        (*entries, *[()] * (ndim - len(entries))),
        axis_names(expression, ndim),
        shape,
        named=named,
        signs={axis: sign for sign, axes in partial.items() for axis in axes},
    )
    return Found(picture, _spec(entries, partial), f'{mesh_text(sizes)} ({kind})')


def _canonical(factors: Sequence[int]) -> dict[str, int]:
    """Returns the axes of the canonical mesh."""
    return {f'd{i}': factor for i, factor in enumerate(factors or (1,))}


def _spec(entries: Sequence[tuple[str, ...]], partial: Mapping[str, tuple[str, ...]]) -> str:
    """Writes a PartitionSpec as Python code."""
    texts = [repr(axes[0] if len(axes) == 1 else axes or None) for axes in entries]
    for sign, keyword in (('+', 'unreduced'), ('=', 'reduced')):
        if axes := partial.get(sign):
            texts.append(f'{keyword}={{{", ".join(map(repr, axes))}}}')
    return f'P({", ".join(texts)})'


def read_shape(text: str) -> tuple[int, ...] | None:
    """Reads a shape: '8 16', '(8, 16)' or '[8,16]'; None for no text, since () is a scalar."""
    if not text.strip():
        return None
    words = re.sub(r'^\s*[(\[](.*)[)\]]\s*$', r'\1', text).replace(',', ' ').split()
    if not all(re.fullmatch(r'[0-9]{1,15}', word) for word in words):
        raise EinshardError(f"'{text}' is not a shape", facts={'example': '8 16'})
    return tuple(map(int, words))


def read_devices(text: str) -> int | dict[str, int]:
    """Reads a number of devices, or mesh axes and their sizes: 'data=4 tensor=2'."""
    words = text.replace(',', ' ').split()
    axes = [_MESH_AXIS.fullmatch(word) for word in words]
    numbers = [axis[2] if axis else word for axis, word in zip(axes, words, strict=True)]
    are_numbers = all(re.fullmatch('0*[1-9][0-9]{0,9}', number) for number in numbers)
    if not are_numbers or not words or not (all(axes) or len(words) == 1):
        raise EinshardError(
            f"'{text}' is not a number of devices or a mesh" if words else 'how many devices?',
            facts={'number': '8', 'mesh': 'data=4 tensor=2'},
        )
    names = [axis[1] for axis in axes if axis]
    for name in names:
        if names.count(name) > 1:
            raise EinshardError(f"the mesh lists axis '{name}' more than once")
    n_devices = math.prod(map(int, numbers))
    if n_devices > _MAX_DEVICES:
        raise EinshardError(
            f'a picture of {n_devices} devices would be too large here',
            facts={'at most': f'{_MAX_DEVICES} devices; in Python, show(...) draws more'},
        )
    return dict(zip(names, map(int, numbers), strict=True)) if names else n_devices
