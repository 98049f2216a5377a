"""Expressions for suggestions, in the user's axis names."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from ..._notation.expression import axis_letters
from ..._program.jaxpr.spans import Span
from ..._sharding.describe import describe_named
from ..._sharding.mesh import AnyMesh
from ..._text import first_of
from ..fold_layers import fold_paths
from .values import Axis, drop_repeats


def expression_of(axes: Sequence[Axis], mesh: AnyMesh) -> str:
    """Writes the sharding of a value as an expression. Axes without a name get unused letters.

    If several axes have the same name, such as the two sequence axes of attention scores, only the
    first keeps it.
    """
    spec = PartitionSpec(*(axis.mesh_axes or None for axis in drop_repeats(axes)))
    return describe_named(NamedSharding(mesh, spec), len(axes), _axis_names(axes))


def _axis_names(axes: Sequence[Axis]) -> list[str]:
    known = [axis.name for axis in axes]
    free = (letter for letter in axis_letters() if letter not in known)
    names: list[str] = []
    for name in known:
        names.append(name if name and name not in names else next(free))
    return names


def shard_text(placements: Mapping[str, str]) -> str:
    """Formats {'w': 'x y*'} as "shard w with 'x y*'"."""
    texts = [f"{paths} with '{placement}'" for placement, paths in _by_placement(placements)]
    return f'shard {", ".join(texts)}' if texts else ''


def partition_text(specs: Mapping[str, PartitionSpec]) -> str:
    """Formats {'w': P(None, 'y')} as "P(None, 'y') for w"."""
    codes = {path: f'P({", ".join(map(repr, spec))})' for path, spec in specs.items()}
    return ', '.join(f'{code} for {paths}' for code, paths in _by_placement(codes))


def _by_placement(placements: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each placement with its paths."""
    found: dict[str, list[str]] = {}
    for path, placement in placements.items():
        found.setdefault(placement, []).append(path)
    for placement, paths in found.items():
        yield placement, first_of(fold_paths(paths), 3)


def short_code(span: Span) -> str:
    """Returns the text of an expression in backticks, or '' if it is long or unknown."""
    source = source_of(span)
    return f'`{source}`' if source and len(source) < 60 and '\n' not in source else ''


def source_of(span: Span) -> str | None:
    """Returns the text of an expression, or None if its file cannot be read."""
    lines = [line.encode() for line in linecache.getlines(span.file)[span.line - 1 : span.end_line]]
    if len(lines) < span.end_line - span.line + 1:
        return None
    lines[-1] = lines[-1][: span.end_column]
    lines[0] = lines[0][span.column :]
    return b''.join(lines).decode()
