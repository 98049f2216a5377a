"""gather: copies sharded arrays to NumPy."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import EinshardError, public
from .._sharding.mesh import device_mesh, is_partial
from .._trees.paths import leaf_paths, leaf_text
from .device_put import identity, without_partial_axes
from .process_agreement import check_has_device

T = TypeVar('T')


@overload
def gather(tree: jax.Array) -> np.ndarray[Any, np.dtype[Any]]: ...  # type: ignore[reportOverlappingOverload]
@overload
def gather(tree: T) -> T: ...
@public
def gather(tree: Any) -> Any:
    """Copies the full arrays of a pytree to NumPy, in every process.

        >>> import numpy as np
        >>> from einshard import einshard, gather
        >>> x = einshard(np.ones((4, 6)), 'a b -> * a b')
        >>> gather({'x': x})['x'].shape
        (4, 6)

    In one process this is `jax.device_get`. With several processes, all of them must call `gather`:
    it first replicates the arrays that have shards in other processes, so each device needs memory
    for the full arrays. Arrays with the same order of devices share one program.

    Args:
        tree: a pytree. Leaves that are not JAX arrays are returned as they are. A `jax.Ref` is
            read, partial sums are added up, and PRNG keys are returned as key data (see
            `jax.random.wrap_key_data`).

    Returns:
        The same pytree with NumPy arrays. For an array that `einshard` has sharded,
        `einshard(gather(x), describe(x))` on the same mesh restores `x` exactly, unless it is a
        `jax.Ref`, a partial sum, or an array of PRNG keys. Weak types become strong.

    Raises:
        EinshardError: a leaf is a traced value, or this process has no device in the mesh of an
            array.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        leaves[i] = _plain_array(leaf)
        if isinstance(leaves[i], Tracer):
            array = leaf_text(leaf_paths(tree, treedef)[i], leaf)
            raise EinshardError(
                'a traced value cannot be gathered: it has no data yet',
                code='tracing',
                facts={'array': array, 'instead': 'return it and gather the result'},
            )
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    remote = {i: leaf for i, leaf in arrays.items() if not leaf.is_fully_addressable}
    shardings: dict[int, Any] = {i: _replicated_sharding(leaf) for i, leaf in remote.items()}
    groups: dict[tuple[Any, ...], list[int]] = {}  # leaf indices by device order
    for i, sharding in shardings.items():
        groups.setdefault(tuple(sharding.mesh.devices.flat), []).append(i)
    for group in groups.values():  # jit needs arrays with the same order of devices
        replicate = jax.jit(identity, out_shardings={i: shardings[i] for i in group})
        arrays |= replicate({i: remote[i] for i in group})
    for i, leaf in remote.items():  # after the programs, for which other processes wait
        try:
            check_has_device(shardings[i].mesh)
        except EinshardError as error:
            raise error.about(array=leaf_text(leaf_paths(tree, treedef)[i], leaf)) from None
        arrays[i] = arrays[i].addressable_data(0)
    for i, host in jax.device_get(arrays).items():
        leaves[i] = host
    return jtu.tree_unflatten(treedef, leaves)


def _plain_array(leaf: Any) -> Any:
    """Reads a Ref, converts PRNG keys to key data, and adds up partial sums."""
    if isinstance(leaf, jax.Ref):
        leaf = leaf[...]
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return leaf
    with jax.ensure_compile_time_eval():  # a traced function may close over the array
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if is_partial(leaf.sharding):
            leaf = without_partial_axes(leaf, _replicated_sharding(leaf))
    return leaf


def _replicated_sharding(x: Any) -> NamedSharding:
    sharding = x.sharding
    is_named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if is_named else device_mesh(list(sharding.device_set))
    return NamedSharding(mesh, PartitionSpec())
