"""Lowers a Layout to a NamedSharding on a mesh."""

from __future__ import annotations

from jax.sharding import AxisType, NamedSharding

from .._cache import cached
from .._notation.fit import fit, fitting_sizes, signed_axes, spec_entries
from .._notation.layout import Layout
from .._notation.words import SIGNS
from .mesh import AnyMesh, is_canonical_mesh, partition_spec, reshape_canonical_mesh, sizes_of


@cached
def lower(
    layout: Layout, mesh: AnyMesh, mesh_is_ambient: bool = False, memory_kind: str | None = None
) -> NamedSharding | None:
    """Lowers a layout to a sharding on `mesh`.

    If the counts do not match the mesh axes, reshapes the mesh, or returns None. Reshapes only a
    canonical mesh (see `device_mesh`) with Auto axes, for layouts without mesh axes, and never a
    mesh in JAX's context, because JAX rejects arrays on any other mesh.

    This function is cached, so arrays of many shapes share one sharding object. That makes
    `device_put` faster.
    """
    fitted = fit(layout, sizes_of(mesh))
    if fitted is None:
        has_mesh_axes = any(split.mesh_axes for split in layout.splits)
        is_auto = set(mesh.axis_types) == {AxisType.Auto}
        if mesh_is_ambient or has_mesh_axes or not (is_auto and is_canonical_mesh(mesh)):
            return None
        mesh = reshape_canonical_mesh(mesh, fitting_sizes(layout))
        fitted = fit(layout, sizes_of(mesh))
        assert fitted is not None, 'the reshaped mesh does not fit its layout'
    names = {str(name): name for name in mesh.axis_names}
    entries = [tuple(names[axis] for axis in axes) for axes in spec_entries(layout, fitted)]
    unreduced, reduced = (
        [names[axis] for axis in signed_axes(layout, fitted, sign)] for sign in SIGNS
    )
    spec = partition_spec(entries, unreduced, reduced)
    return NamedSharding(mesh, spec, memory_kind=memory_kind)
