"""Neighbours as edits of the traced program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from ..._program.edits.edit import (
    Constrain,
    Edit,
    PlaceArguments,
    PlaceResults,
    RemoveConstraint,
    ReplaceConstraint,
)
from ..._program.jaxpr.spans import Span
from ..._program.traced.outline import Site
from ..._program.traced.program import Axes
from ..._program.traced.variants import Variants
from ..._sharding.mesh import AnyMesh


def edits_of(
    changes: Mapping[Site, Axes | None],
    variants: Variants,
    mesh: AnyMesh,
    used_arguments: Sequence[int],
) -> tuple[Edit, ...]:
    """Returns the edits that make changes of a module in the program that it was lowered from.

    Args:
        used_arguments: the index of each argument that the module has.
    """
    arguments, results = dict[int, NamedSharding](), dict[int, NamedSharding]()
    by_path: dict[tuple[Span, ...], Edit] = {}
    for site, axes in changes.items():
        if site.kind == 'constraint':
            path = variants.path(site)
            if axes is None:
                by_path[path] = RemoveConstraint(path)
            elif variants.given[site] is None:
                by_path[path] = Constrain(path, sharding_of(axes, mesh))
            else:
                by_path[path] = ReplaceConstraint(path, sharding_of(axes, mesh))
        elif site.kind == 'argument':
            arguments[used_arguments[site.index]] = sharding_of(axes or (), mesh)
        else:
            results[site.index] = None if axes is None else sharding_of(axes, mesh)
    placed: list[Edit] = []
    if arguments:
        placed = [PlaceArguments(arguments, results)]
    elif results:
        placed = [PlaceResults(results)]
    return (*placed, *by_path.values())


def sharding_of(axes: Axes, mesh: AnyMesh) -> NamedSharding:
    spec = (dim[0] if len(dim) == 1 else dim or None for dim in axes)
    return NamedSharding(mesh, PartitionSpec(*spec))
