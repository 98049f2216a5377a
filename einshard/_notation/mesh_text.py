"""Formats mesh axes for errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .._errors import quoted
from .expression import Term


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
    return f'{quoted(map(str, terms))} {names} {axes}, but there is no mesh'
