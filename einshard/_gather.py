"""array -> host: whole arrays as numpy, on every process."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ._errors import EinshardError
from ._mesh import device_mesh
from ._specs import leaf_paths, leaf_text

T = TypeVar('T')


def gather(tree: T) -> T:
    """The arrays of a tree as numpy arrays, whole, on the host of every process.

        >>> x = einshard(np.arange(16), 'x -> x*')
        >>> bool((gather({'x': x})['x'] == np.arange(16)).all())
        True

    In one process this is `jax.device_get`. In several, arrays that none of them holds whole are
    first brought to every device, in one program for the whole tree, in which all processes take
    part; so each of them has to call it. A device must have room for the largest tree gathered.

    Args:
        tree: a tree of arrays; leaves that are no jax arrays are passed through.

    Returns:
        The same tree. `einshard(gather(x), describe(x))` is `x` again, exactly.

    Raises:
        EinshardError: a leaf is a traced value, which has no contents yet.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tracer):
            array = leaf_text(leaf_paths(tree, treedef)[i], leaf)
            raise EinshardError(
                'a traced value cannot be gathered: it has no contents yet',
                facts={'array': array, 'instead': 'return it, and gather that'},
            )
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    spread = {i: leaf for i, leaf in arrays.items() if not leaf.is_fully_addressable}
    if spread:
        everywhere = {i: _replicated(leaf) for i, leaf in spread.items()}
        whole = jax.jit(_same, out_shardings=everywhere)(spread)
        arrays |= {i: leaf.addressable_data(0) for i, leaf in whole.items()}
    for i, host in jax.device_get(arrays).items():
        leaves[i] = host
    return jtu.tree_unflatten(treedef, leaves)


def _same(arrays: T) -> T:
    return arrays


def _replicated(x: Any) -> NamedSharding:
    sharding = x.sharding
    named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if named else device_mesh(list(sharding.device_set))
    return NamedSharding(mesh, PartitionSpec())
