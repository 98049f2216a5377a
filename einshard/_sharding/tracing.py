"""Whether a function is being traced, and which frames are the user's."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import get_mesh


def is_tracing() -> bool:
    """Whether a function is being traced.

    JAX has no public function for this. `get_mesh` is documented to raise while tracing;
    tests/test_jax_facts.py fails if that changes.
    """
    try:
        get_mesh()
    except ValueError:
        return True
    return False


def is_staging() -> bool:
    """Whether operations are staged into a program, as in `jax.jit`, instead of run eagerly.

    Under `jax.grad` or `jax.vmap` alone they run eagerly. The check adds an unused equation to the
    jaxpr, which JAX drops when lowering, so avoid it on fast paths.
    """
    # not another operation: eagerly, this one runs on no device, and the devices of the mesh in
    # context may not exist
    return isinstance(jax.lax.stop_gradient(np.float32(0)), Tracer)


def user_stacklevel() -> int:
    """Returns the `stacklevel` for a warning at the first frame outside einshard and JAX."""
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
        depth, frame = depth + 1, frame.f_back
    return depth


LIBRARY_FOLDERS = tuple(
    f'{folder}{os.sep}' for folder in (Path(__file__).parents[1], Path(jax.__file__).parent)
)
