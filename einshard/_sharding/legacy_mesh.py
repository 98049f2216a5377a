"""Detects `with mesh:`, the deprecated way to enter a mesh, which einshard ignores.

`jax.sharding.get_mesh` does not return the mesh of `with mesh:`. So `_has_any_mesh` constrains a
value to a bare PartitionSpec, which raises RuntimeError without a mesh. This takes 10 us in a trace
and 200 us elsewhere, with `jax.eval_shape`, so it runs only in traces and for errors.
"""

from __future__ import annotations

import warnings

import jax
import numpy as np
from jax.sharding import PartitionSpec

from .._errors import EinshardError
from .context import user_stacklevel

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
    """Whether `with mesh:` or `jax.set_mesh` is in effect.

    Call it only in a trace, where JAX drops the unused constraint from the program.
    """
    try:
        jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except RuntimeError:
        return False
    return True
