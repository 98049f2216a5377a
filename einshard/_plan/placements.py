"""Reads `pin=` and `candidates=` of `plan`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from .._errors import EinshardError, quoted
from .._notation.expression import Term, parse
from .._notation.mesh_text import mesh_size_text, mesh_text
from .._sharding.axis_rules import AxisPlacement, axis_rules
from .candidate import Candidate
from .model import Model

# the mesh axes that shard each axis name: {'embed': ('x',), 'mlp': ('x', 'y'), 'layers': ()}
MeshAxesByName: TypeAlias = Mapping[str, tuple[str, ...]]


def read_pins(pin: Mapping[str, AxisPlacement], mesh_axes: Collection[str]) -> MeshAxesByName:
    """Reads `pin=`, such as {'embed': '@x', 'mlp': '@(x,y)', 'layers': ''}."""
    return _read_placements('pin=', pin, mesh_axes)


def read_candidate(number: int, given: Any, model: Model, n_devices: int) -> Candidate:
    """Reads element `number` of `candidates=`: a pair of mesh sizes and placements of axis names.

    Ignores names that are not in the model, so that several models can use the same placements.
    """
    label = f'candidates[{number}]'
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not (is_pair and all(isinstance(part, Mapping) for part in given)):
        raise EinshardError(
            f'{label} must be a pair of mesh sizes and placements, not {given!r}',
            code='plan',
            facts={'example': "({'data': 16, 'tensor': 16}, {'batch': '@data'})"},
        )
    mesh = {str(axis): size for axis, size in given[0].items()}
    if math.prod(mesh.values()) != n_devices:
        raise EinshardError(
            f'the mesh of {label} has {math.prod(mesh.values())} devices, but the plan is for '
            f'{n_devices}',
            code='plan',
            facts={'mesh sizes': mesh_text(mesh)},
        )
    placed = _read_placements(label, given[1], mesh)
    axes = {name: placed.get(name, ()) for name in model.sizes}
    check_divisible(label, axes, model, mesh)
    return Candidate(tuple(mesh.items()), tuple(axes.items()))


def check_divisible(
    label: str, placed: MeshAxesByName, model: Model, mesh: Mapping[str, int]
) -> None:
    """Raises if the size of an axis is not divisible by its number of shards."""
    for name, axes in placed.items():
        n_shards = math.prod(mesh[axis] for axis in axes)
        if model.divisors[name] % n_shards:
            raise EinshardError(
                f'{label} does not fit the mesh: axis {model.axis_text(name)} is not divisible by '
                f'{n_shards}, {mesh_size_text(axes)}',
                code='not-divisible',
                facts={'mesh': mesh_text(mesh)},
            )


def _read_placements(
    label: str, given: Mapping[str, AxisPlacement], mesh_axes: Collection[str]
) -> MeshAxesByName:
    found: dict[str, tuple[str, ...]] = {}
    for rule in axis_rules(given).rules:
        (term,) = parse(f'{rule.name}{rule.placement}').right
        if term != Term(term.name, mesh_axes=term.mesh_axes):
            raise EinshardError(
                f"{label} must name the mesh axes of '{rule.name}', not {rule.placement!r}",
                code='plan',
                facts={'expected': "'@x' or '@(x,y)'; '' for an axis that is not sharded"},
            )
        unknown = [axis for axis in term.mesh_axes if axis not in mesh_axes]
        if unknown:
            raise EinshardError(
                f"{label} shards '{rule.name}' over {quoted(unknown)}, "
                f'but the mesh has only {quoted(list(mesh_axes))}',
                code='mesh',
            )
        found[rule.name] = term.mesh_axes
    return found
