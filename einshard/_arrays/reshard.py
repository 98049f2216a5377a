"""Reshards values over Explicit mesh axes."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._errors import EinshardError
from .._sharding.mesh import is_partial, partition_spec, partition_text, spec_axes
from .._text import array_text

# When a replicated value becomes a partial sum, JAX 0.8.1 keeps all replicas, so the sum is too
# large. JAX 0.10.2 sets all replicas but one to zero, but XLA crashes for complex numbers.
_KEEPS_REPLICAS = jax.__version_info__ < (0, 10)


def reshard(x: Any, sharding: NamedSharding) -> Any:
    """Reshards a value, as `jax.sharding.reshard` does, but without its bugs for partial sums.

    A value that becomes a partial sum over mesh axes is replicated over them first. Without this,
    JAX 0.8.1 to 0.12 makes some sums too large if an array axis was sharded over two mesh axes, and
    XLA aborts the process if the call also adds up a partial sum over other mesh axes.
    """
    aval: Any = jax.typeof(x)
    old_unreduced, spec = aval.sharding.spec.unreduced, sharding.spec
    _check_dtype(aval, sharding)
    if spec.unreduced <= old_unreduced:
        return jax.sharding.reshard(x, sharding)
    by_hand = _KEEPS_REPLICAS or jax.numpy.issubdtype(aval.dtype, jax.numpy.complexfloating)
    kept = frozenset[Any]() if by_hand else spec.unreduced & old_unreduced
    replicated = NamedSharding(sharding.mesh, partition_spec(spec_axes(spec), kept, spec.reduced))
    x = jax.sharding.reshard(x, replicated)
    return (_as_partial_sum if by_hand else jax.sharding.reshard)(x, sharding)


def _check_dtype(aval: Any, sharding: NamedSharding) -> None:
    """Raises where JAX fails: partial sums of non-numbers, and PRNG keys with reduced axes."""
    is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)
    is_number = jax.numpy.issubdtype(aval.dtype, jax.numpy.number)
    if (is_key and is_partial(sharding)) or (sharding.spec.unreduced and not is_number):
        limit = 'it cannot be a partial sum'
        if not sharding.spec.unreduced:
            limit = "its gradient cannot be a partial sum ('=')"
        raise EinshardError(
            f'{array_text(aval)} does not contain numbers, so {limit}',
            facts={'sharding': partition_text(sharding.spec)},
        )


def _as_partial_sum(x: Any, sharding: NamedSharding) -> Any:
    """Makes a partial sum: along the unreduced axes, one device has the value, the others zeros."""
    mesh, entries = sharding.mesh, spec_axes(sharding.spec)
    entries += [()] * (x.ndim - len(entries))
    summed_over = tuple(axis for axis in mesh.axis_names if axis in sharding.spec.unreduced)
    n = math.prod(size for axis, size in mesh.shape.items() if axis in summed_over)
    stacked = NamedSharding(mesh, partition_spec([summed_over, *entries]))
    x = jax.sharding.reshard(x, NamedSharding(mesh, partition_spec(entries)))
    copies = jax.sharding.reshard(jax.lax.broadcast(x, (n,)), stacked)
    position = jax.sharding.reshard(jax.lax.broadcasted_iota('int32', copies.shape, 0), stacked)
    zeros = jax.sharding.reshard(jax.numpy.zeros_like(copies), stacked)
    terms = jax.lax.select(position == 0, copies, zeros)
    summed = NamedSharding(mesh, partition_spec(entries, sharding.spec.unreduced))
    return jax.sharding.reshard(jax.lax.reduce_sum(terms, (0,), out_sharding=summed), sharding)
