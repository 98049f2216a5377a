"""Where the leaves of a tree are, against NamedShardings written by hand."""

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(devices, **sizes):
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


MESH = mesh_of(jax.devices()[:16], data=8, tp=2)


def check_placed(tree, cut, mesh=MESH):
    """Leaves whose path ends in a key of `cut` are placed as it says, all others everywhere."""
    unseen = set(cut)
    for path, leaf in jtu.tree_leaves_with_path(tree):
        name = jtu.keystr(path, simple=True, separator='/')
        ends = [end for end in cut if name.endswith(end)]
        wanted = NamedSharding(mesh, cut[ends[0]] if ends else P())
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), f'{name}: {leaf.sharding}'
        assert {s.data.shape for s in leaf.addressable_shards} == {wanted.shard_shape(leaf.shape)}
        unseen -= set(ends)
    assert not unseen


def check_equal(tree, other, **tolerances):
    """The same tree with the same values, exactly or within tolerances."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        if jax.numpy.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, **{'rtol': 0, **tolerances})
