"""gather: copies sharded arrays to NumPy."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import EinshardError
from .._sharding.mesh import device_mesh, is_partial
from .._trees.paths import leaf_paths, leaf_text
from .device_put import without_partial_axes

T = TypeVar('T')


def gather(tree: T) -> T:
    """Copies the full arrays of a pytree to NumPy, in every process.

        >>> import numpy as np
        >>> from einshard import einshard, gather
        >>> x = einshard(np.ones((4, 6)), 'a b -> * a b')
        >>> gather({'x': x})['x'].shape
        (4, 6)

    In one process this is `jax.device_get`. With several processes, all of them must call `gather`:
    one program first replicates all arrays that have shards in other processes, so each device
    needs memory for the full arrays.

    Args:
        tree: a pytree. Leaves that are not JAX arrays are returned as they are. A `jax.Ref` is
            read, partial sums are added up, and PRNG keys are returned as key data (see
            `jax.random.wrap_key_data`).

    Returns:
        The same pytree with NumPy arrays. For an array that `einshard` has sharded,
        `einshard(gather(x), describe(x))` on the same mesh restores `x` exactly, unless it is a
        `jax.Ref`, a partial sum, or an array of PRNG keys.

    Raises:
        EinshardError: a leaf is a traced value.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tracer):
            array = leaf_text(leaf_paths(tree, treedef)[i], leaf)
            raise EinshardError(
                'a traced value cannot be gathered: it has no data yet',
                facts={'array': array, 'instead': 'return it and gather the result'},
            )
    leaves = [_plain_array(leaf) for leaf in leaves]
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    remote = {i: leaf for i, leaf in arrays.items() if not leaf.is_fully_addressable}
    if remote:
        shardings = {i: _replicated_sharding(leaf) for i, leaf in remote.items()}
        replicated = jax.jit(_identity, out_shardings=shardings)(remote)
        arrays |= {i: leaf.addressable_data(0) for i, leaf in replicated.items()}
    for i, host in jax.device_get(arrays).items():
        leaves[i] = host
    return jtu.tree_unflatten(treedef, leaves)


def _plain_array(leaf: Any) -> Any:
    """Reads a Ref, converts PRNG keys to key data, and adds up partial sums."""
    if isinstance(leaf, jax.Ref):
        leaf = leaf[...]
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and is_partial(leaf.sharding):
        leaf = without_partial_axes(leaf, _replicated_sharding(leaf))
    return leaf


def _identity(arrays: T) -> T:
    return arrays


def _replicated_sharding(x: Any) -> NamedSharding:
    sharding = x.sharding
    is_named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if is_named else device_mesh(list(sharding.device_set))
    return NamedSharding(mesh, PartitionSpec())
