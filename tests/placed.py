"""Meshes, shapes, and the shardings of pytrees, against hand-written NamedShardings."""

import math

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import einshard


def mesh_of(devices=None, types=AxisType.Auto, **sizes):
    """A mesh of these axis sizes over the devices, or over the first ones of the process."""
    shape = tuple(sizes.values())
    grid = np.array(jax.devices()[: math.prod(shape)] if devices is None else devices, dtype=object)
    types = types if isinstance(types, tuple) else (types,) * len(shape)
    return Mesh(grid.reshape(shape), tuple(sizes), axis_types=types)


def struct(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def struct_on(mesh):
    """The function struct((8, 4), 'data'), of shapes that are sharded over this mesh."""

    def struct(shape, *spec, dtype=np.float32, mesh=mesh):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    return struct


def shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def on(mesh, specs):
    """A pytree of PartitionSpecs as NamedShardings."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P)
    )


def is_of_sharding_types(error):
    """Whether JAX raised it about the sharding types of a function. JAX's class is private."""
    cls = type(error)
    return cls.__name__ == 'ShardingTypeError' and cls.__module__.startswith('jax')


MESH = mesh_of(data=8, tp=2)


def by_path(tree):
    """The leaves that are not None, by path, such as 'layers/0/w'."""
    leaves = jtu.tree_leaves_with_path(tree)
    return {jtu.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def check_placed(tree, specs, mesh=MESH):
    """Leaves whose path ends in a key of `specs` are sharded as it says, the others replicated."""
    unseen = set(specs)
    for path, leaf in by_path(tree).items():
        ends = [end for end in specs if path.endswith(end)]
        expected = NamedSharding(mesh, specs[ends[0]] if ends else P())
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), f'{path}: {leaf.sharding}'
        assert {s.data.shape for s in leaf.addressable_shards} == {expected.shard_shape(leaf.shape)}
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


EIGHT = jax.devices()[:8]
NAMED = mesh_of(p=2, q=4)
ROWS, COLUMNS, REPLICATED = 'a b -> a* b', 'a b -> a b*', 'a b -> * a b'

# Matrices for a function whose spec is ROWS on EIGHT: these are moved ..
MOVED = {
    'numpy': lambda x: x,
    'uncommitted': jax.numpy.asarray,
    'on the first device': lambda x: jax.device_put(x, EIGHT[0]),
    'on another device': lambda x: jax.device_put(x, EIGHT[5]),
    'on a device beyond the mesh': lambda x: jax.device_put(x, jax.devices()[12]),
    'replicated': lambda x: einshard(x, REPLICATED, mesh=EIGHT),
    'replicated on more devices': lambda x: einshard(x, REPLICATED),
    'replicated on a named mesh': lambda x: jax.device_put(x, NamedSharding(NAMED, P())),
    'as asked': lambda x: einshard(x, ROWS, mesh=EIGHT),
    'as asked, on a named mesh': lambda x: jax.device_put(x, NamedSharding(NAMED, P(('p', 'q')))),
}
# .. and these are refused without reshard=
REFUSED = {
    'by columns': lambda x: einshard(x, COLUMNS, mesh=EIGHT),
    'by fewer rows': lambda x: einshard(x, 'a b -> 2 a* b', mesh=EIGHT),
    'by rows of fewer devices': lambda x: einshard(x, ROWS, mesh=EIGHT[:4]),
}
