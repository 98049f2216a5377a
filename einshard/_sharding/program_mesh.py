"""Errors about a mesh that is not that of the program, and about one of `with mesh:`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec, get_abstract_mesh

from .._cache import cached
from .._errors import EinshardError, plural
from .mesh import AnyMesh, is_reordered, mesh_fact
from .scopes import innermost_scope
from .tracing import is_staging, user_stacklevel

_NOTE = "einshard does not use the mesh of 'with mesh:'; use 'with jax.set_mesh(mesh):'"


def warn_if_legacy_mesh(function: str, context_mesh: object) -> None:
    """Warns in the trace of `function` if the only mesh is that of `with mesh:`."""
    if context_mesh is None and _has_any_mesh():
        warnings.warn(f'{function}: {_NOTE}', stacklevel=user_stacklevel())


def with_legacy_mesh_note(error: EinshardError, context_mesh: object) -> EinshardError:
    """Adds a note to an error about mesh axes if the only mesh is that of `with mesh:`."""
    if context_mesh is not None or '@' not in (error.expression or ''):
        return error
    results: list[bool] = []
    jax.eval_shape(lambda: results.append(_has_any_mesh()))
    return error.about(note=_NOTE) if results[0] else error


def _has_any_mesh() -> bool:
    """Whether `jax.set_mesh` or the deprecated `with mesh:` is in effect.

    `jax.sharding.get_mesh` does not return the mesh of `with mesh:`, but without either, a
    constraint to a bare PartitionSpec raises. This takes 10 us in a trace, where JAX drops the
    constraint from the program, and 200 us in `jax.eval_shape`.
    """
    try:
        jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except RuntimeError:
        return False
    return True


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
    others = [x for x in (get_abstract_mesh(), *meshes) if not x.empty]
    other = next((x for x in others if _have_other_devices_or_order(mesh, x)), None)
    if other is None or not is_staging():
        return None
    sentence = f'the mesh has {plural(mesh.size, "device")}, but the program runs on {other.size}'
    if mesh.size == other.size:
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


@cached
def _have_other_devices_or_order(mesh: AnyMesh, other: AnyMesh) -> bool:
    if isinstance(mesh, Mesh) and isinstance(other, Mesh):
        return tuple(mesh.devices.flat) != tuple(other.devices.flat)
    return mesh.size != other.size
