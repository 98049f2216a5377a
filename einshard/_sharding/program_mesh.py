"""Compares a mesh with the devices of the program that is being traced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, get_abstract_mesh

from .._cache import cached
from .._errors import EinshardError, plural
from .context import innermost_scope, is_staging
from .mesh import AnyMesh, is_reordered, mesh_fact


def device_mismatch_error(mesh: AnyMesh, values: Iterable[Any]) -> EinshardError | None:
    """Returns an error if the devices of `mesh` differ from those of the program being traced.

    JAX raises its own error only after the trace. Outside `sharded` functions, compares only the
    number of devices, because JAX exposes only abstract meshes: in context and in the types of
    `values`.
    """
    scope = innermost_scope.get()
    program_mesh = scope and scope.program_mesh()
    if program_mesh is None:
        types: list[Any] = [jax.typeof(x) for x in values if isinstance(x, Tracer)]
        meshes: list[AnyMesh] = [aval.sharding.mesh for aval in types]
    else:  # `sharded` may reshard its arguments, but their traced types name the old mesh
        meshes = [program_mesh]
    for other in (get_abstract_mesh(), *meshes):
        if not other.empty and _have_other_devices_or_order(mesh, other):
            return _error(mesh, other) if is_staging() else None
    return None


@cached
def _have_other_devices_or_order(mesh: AnyMesh, other: AnyMesh) -> bool:
    if isinstance(mesh, Mesh) and isinstance(other, Mesh):
        return tuple(mesh.devices.flat) != tuple(other.devices.flat)
    return mesh.size != other.size


def _error(mesh: AnyMesh, other: AnyMesh) -> EinshardError:
    n, n_program = mesh.size, other.size
    sentence = f'the mesh has {plural(n, "device")}, but the program runs on {n_program}'
    if n == n_program:
        sentence = (
            'the mesh has the devices of the program in a different order'
            if is_reordered(mesh, other)
            else 'the mesh and the program are on different devices'
        )
    return EinshardError(
        sentence,
        code='placed-differently',
        facts={
            'mesh': mesh_fact(mesh),
            'mesh of the program': mesh_fact(other),
            'instead': 'use the mesh of the program; arrays are replicated over unused mesh axes',
        },
    )
