"""Reads the shardings that users pass to `plan` as `candidates=`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._errors import EinshardError, quoted
from .._notation.expression import Term, parse
from .._sharding.axis_rules import axis_rules
from .candidate import Candidate
from .model import Model


def read_table(number: int, given: Any, model: Model, n_devices: int) -> Candidate:
    """Reads one of `candidates=`: the mesh sizes, and a placement by axis name.

    Names that the model lacks are ignored, because a table usually serves several models.
    """
    label = f'candidates[{number}]'
    pair = isinstance(given, tuple | list) and len(given) == 2
    if not (pair and isinstance(given[0], Mapping) and isinstance(given[1], Mapping)):
        raise EinshardError(
            f'{label} must be a pair of mesh sizes and placements, not {given!r}',
            facts={'example': "({'data': 16, 'tensor': 16}, {'batch': '@data'})"},
        )
    mesh = {str(axis): size for axis, size in given[0].items()}
    if math.prod(mesh.values()) != n_devices:
        sizes = ', '.join(f'{axis}={size}' for axis, size in mesh.items())
        raise EinshardError(
            f'the mesh of {label} has {math.prod(mesh.values())} devices, not {n_devices}',
            facts={'mesh sizes': sizes},
        )
    placed = {name: mesh_axes(name, text, mesh) for name, text in placements(given[1]).items()}
    for name, size in model.divisors.items():
        n_shards = math.prod(mesh[axis] for axis in placed.get(name, ()))
        if size % n_shards:
            raise EinshardError(
                f"{label} does not fit: axis '{name}' (size {size}) is not divisible by {n_shards}",
                facts={'mesh sizes': ', '.join(f'{axis}={n}' for axis, n in mesh.items())},
            )
    return Candidate(
        tuple(mesh.items()), tuple((name, placed.get(name, ())) for name in model.names)
    )


def placements(given: Mapping[str, Any]) -> dict[str, str]:
    """Reads placements as `axis_rules` does."""
    return {rule.name: rule.placement for rule in axis_rules(given).rules}


def mesh_axes(name: str, placement: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes of a placement such as '@(x,y)'."""
    (term,) = parse(f'{name}{placement}').right
    if term != Term(term.name, mesh_axes=term.mesh_axes):
        raise EinshardError(
            f"a plan places '{name}' on mesh axes, but got {placement!r}",
            facts={'example': f"'@{next(iter(mesh), 'x')}', or '' for not sharded"},
        )
    missing = [axis for axis in term.mesh_axes if axis not in mesh]
    if missing:
        raise EinshardError(
            f"the placement {placement!r} of '{name}' names {quoted(missing)}, which is not a "
            'mesh axis of the plan',
            facts={'mesh axes': quoted(list(mesh))},
        )
    return term.mesh_axes
