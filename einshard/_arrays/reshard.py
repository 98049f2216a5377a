"""Reshards values along Explicit mesh axes: `jax.sharding.reshard`, without its errors."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._sharding.mesh import partition_spec, spec_axes

# JAX 0.8.1 copies a value to every device, so that the sum is too large; 0.10.2 adds zeros.
_COPIES_TERMS = jax.__version_info__ < (0, 10)


def reshard(x: Any, sharding: NamedSharding) -> Any:
    """Reshards a value, as `jax.sharding.reshard` does.

    A value that becomes a partial sum is replicated first. Directly, JAX 0.8.1 to 0.12 multiply it
    if one of its axes is sharded over two of the mesh axes, and XLA aborts the process if it is a
    partial sum over other mesh axes.
    """
    old, spec = jax.typeof(x).sharding.spec.unreduced, sharding.spec
    if spec.unreduced <= old:
        return jax.sharding.reshard(x, sharding)
    kept = frozenset[Any]() if _COPIES_TERMS else spec.unreduced & old
    replicated = NamedSharding(sharding.mesh, partition_spec(spec_axes(spec), kept, spec.reduced))
    x = jax.sharding.reshard(x, replicated)
    return (_as_terms if _COPIES_TERMS else jax.sharding.reshard)(x, sharding)


def _as_terms(x: Any, sharding: NamedSharding) -> Any:
    """Makes the first device of each group hold the value, and the others zeros."""
    mesh, entries = sharding.mesh, spec_axes(sharding.spec)
    entries += [()] * (x.ndim - len(entries))
    devices = tuple(axis for axis in mesh.axis_names if axis in sharding.spec.unreduced)
    n = math.prod(size for axis, size in mesh.shape.items() if axis in devices)
    stacked = NamedSharding(mesh, partition_spec([devices, *entries]))
    x = jax.sharding.reshard(x, NamedSharding(mesh, partition_spec(entries)))
    copies = jax.lax.broadcast(x, (n,), out_sharding=stacked)
    device = jax.lax.broadcasted_iota('int32', copies.shape, 0, out_sharding=stacked)
    terms = jax.numpy.where(device == 0, copies, jax.numpy.zeros_like(copies))
    summed = NamedSharding(mesh, partition_spec(entries, sharding.spec.unreduced))
    return jax.sharding.reshard(jax.lax.reduce_sum(terms, (0,), out_sharding=summed), sharding)
