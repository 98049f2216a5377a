"""Neighbours as edits of the traced program."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._program.edits.call import JittedCall
from ..._program.edits.edit import (
    Constrain,
    Edit,
    PlaceArguments,
    PlaceResults,
    RemoveConstraint,
    ReplaceConstraint,
)
from ..._program.edits.keys import Path
from ..._program.edits.marks import tags_in
from ..._program.edits.sites import Sites
from ..._program.jaxpr.graph import flatten
from ..._program.traced.outline import Place
from ..._program.traced.program import Axes
from ..._program.traced.variants import Variants
from ..._sharding.mesh import AnyMesh

# results at which a constraint may help: products, lookups, sums of a residual stream
_CANDIDATES = frozenset(
    ('dot_general', 'conv_general_dilated', 'gather', 'add', 'reshape', 'concatenate')
)


def edits_of(
    changes: Mapping[Place, Axes | None], variants: Variants, mesh: AnyMesh
) -> tuple[Edit, ...]:
    """Returns the edits that make changes of the module of `Sites` in its program."""
    arguments, results = dict[int, NamedSharding](), dict[int, NamedSharding]()
    by_path: dict[Path, Edit] = {}
    for site, axes in changes.items():
        if site.kind == 'constraint':
            path = variants.paths[site]
            if axes is None:
                by_path[path] = RemoveConstraint(path)
            elif variants.given[site] is None:
                by_path[path] = Constrain(path, sharding_of(axes, mesh))
            else:
                by_path[path] = ReplaceConstraint(path, sharding_of(axes, mesh))
        elif site.kind == 'argument':
            arguments[site.index] = sharding_of(axes or (), mesh)
        else:
            results[site.index] = sharding_of(axes or (), mesh)
    placed: list[Edit] = []
    if arguments:
        placed = [PlaceArguments(arguments, results)]
    elif results:
        placed = [PlaceResults(results)]
    return (*placed, *by_path.values())


def variants_of(call: JittedCall, mesh: Mesh) -> Variants:
    """Returns the variants of a call, with constraints at the results of `_CANDIDATES`.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """
    program = flatten(call.jaxpr, keep_unused=True)
    paths = [
        op.site.frames
        for op in program.ops
        if op.primitive in _CANDIDATES and op.site.frames and not op.site.n_mapped
    ]
    sites = Sites(call, paths, mesh)
    keys = sites.keys

    def path_of(location: str) -> Path:
        for number, n_mapped in tags_in(location):
            kind, path = keys[number]
            if not n_mapped and kind in ('constraint', 'value'):
                return path  # type: ignore[reportReturnType]
        return ()

    return Variants(sites.module, path_of)


def sharding_of(axes: Axes, mesh: AnyMesh) -> NamedSharding:
    spec = (dim[0] if len(dim) == 1 else dim or None for dim in axes)
    return NamedSharding(mesh, PartitionSpec(*spec))
