"""Formats mesh axes for errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
