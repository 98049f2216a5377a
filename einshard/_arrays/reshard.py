"""Reshards values over Explicit mesh axes."""

from __future__ import annotations

import math
from itertools import chain, zip_longest
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._errors import EinshardError
from .._sharding.mesh import is_partial, partition_spec, partition_text, spec_axes
from .._text import array_text


def reshard(x: Any, sharding: NamedSharding) -> Any:
    """Reshards a value, as `jax.sharding.reshard` does, but without its bugs for partial sums.

    A value that becomes a partial sum over mesh axes is replicated over them first. Without this,
    JAX makes some sums too large if an array axis was sharded over two mesh axes, and XLA aborts
    the process if the call also adds up a partial sum over other mesh axes (JAX 0.10.2 to 0.12).

    A value that stays a partial sum is gathered first, over the mesh axes that no longer shard it
    as before. Without this, JAX 0.10.2 to 0.12 adds up the wrong shards if some mesh axes take the
    place of others ('a@x +@z' to 'a@y +@z').

    The gradient of a reduced value is a partial sum that JAX reshards the other way around. So each
    step is one that JAX gets right in both directions.
    """
    aval: Any = jax.typeof(x)
    old: Any = aval.sharding.spec
    _check_dtype(aval, sharding)
    if not jax.numpy.issubdtype(aval.dtype, jax.numpy.complexfloating):
        return _reshard(x, sharding, by_hand=False)
    # XLA crashes when a replicated complex value becomes a partial sum
    if not (old.reduced or sharding.spec.reduced):
        return _reshard(x, sharding, by_hand=True)
    # in its gradient, one does too
    dual = NamedSharding(sharding.mesh, partition_spec(spec_axes(old), old.reduced, old.unreduced))
    by_hand: Any = jax.custom_vjp(lambda x: _reshard(x, sharding, by_hand=True))
    by_hand.defvjp(lambda x: (by_hand(x), None), lambda _, gradient: (reshard(gradient, dual),))
    return by_hand(x)


def _reshard(x: Any, sharding: NamedSharding, by_hand: bool) -> Any:
    old, spec, mesh = jax.typeof(x).sharding.spec, sharding.spec, sharding.mesh
    # 1. drop reduced axes
    kept = old.reduced & spec.reduced
    if kept != old.reduced:
        without = partition_spec(spec_axes(old), old.unreduced, kept)
        x = jax.sharding.reshard(x, NamedSharding(mesh, without))
    # 2. gather
    if kept or old.unreduced & spec.unreduced:
        pairs = zip_longest(spec_axes(old), spec_axes(spec), fillvalue=())
        stay = [
            tuple(axis for i, axis in enumerate(axes) if axes[: i + 1] == new_axes[: i + 1])
            for axes, new_axes in pairs
        ]
        removed, added = ({*chain(*spec_axes(s))} - {*chain(*stay)} for s in (old, spec))
        # JAX is right if mesh axes are only added, only removed, or moved to another array axis
        if removed and added and removed != added:
            gathered = partition_spec(stay, old.unreduced, kept)
            x = jax.sharding.reshard(x, NamedSharding(mesh, gathered))
    # 3. reduce and shard
    if spec.unreduced <= old.unreduced:
        return jax.sharding.reshard(x, sharding)
    kept = frozenset[Any]() if by_hand else spec.unreduced & old.unreduced
    replicated = NamedSharding(mesh, partition_spec(spec_axes(spec), kept, spec.reduced))
    x = jax.sharding.reshard(x, replicated)
    # 4. add unreduced axes
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
            code='array',
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
