"""Arrays -> devices: what moves concrete arrays, and what keeps them from moving."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from .._errors import EinshardError
from .._sharding.context import is_tracing
from .._sharding.mesh import partition_spec, spec_axes


def is_placed(x: Any, sharding: NamedSharding) -> bool:
    """Whether an array is placed so already."""
    if x.sharding == sharding:
        return True
    if not isinstance(x.sharding, NamedSharding) or x.sharding.mesh != sharding.mesh:
        return False
    # under explicit axes JAX itself writes P('x', None) for P('x')
    return not x.sharding.spec.reduced and x.sharding.is_equivalent_to(sharding, len(x.shape))


def movable(x: Any, sharding: NamedSharding) -> Any:
    """An array as `device_put` can bring it to `sharding`."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return x
    mesh = x.sharding.mesh
    if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
        return x
    whole: Any = reduced(x, sharding) if is_partial(x) else x
    if jax.__version_info__ >= (0, 10) or mesh.axis_names == sharding.mesh.axis_names:
        return whole
    # JAX 0.8.1 looks for the mesh axes in the type of an array in the mesh that it is moved to
    untyped = NamedSharding(
        Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim),
        partition_spec(spec_axes(whole.sharding.spec)),
        memory_kind=whole.sharding.memory_kind,
    )
    shards = [shard.data for shard in whole.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, untyped, shards)


def reduced(x: Any, sharding: NamedSharding) -> Any:
    """An array with unreduced or reduced axes, which `device_put` cannot move, without them.

    On the mesh of `sharding` it is brought there, for then a sum may be a reduce-scatter.
    """
    mesh, entries = x.sharding.mesh, spec_axes(x.sharding.spec)
    if mesh == sharding.mesh:
        entries = spec_axes(sharding.spec)
    # JAX 0.8.1 takes no array of another mesh than that in context
    with nullcontext() if is_tracing() else jax.set_mesh(mesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, partition_spec(entries)))


def is_partial(x: Any) -> bool:
    """Whether an array has unreduced axes, or reduced ones, which JAX has in its type alike."""
    sharding = x.sharding if isinstance(x, jax.Array) else None
    if not isinstance(sharding, NamedSharding):
        return False
    return bool(sharding.spec.unreduced or sharding.spec.reduced)


def put(leaves: list[Any], shardings: list[NamedSharding], donate: bool = False) -> list[Any]:
    """Moves concrete leaves, all in one `jax.device_put`."""
    if len(leaves) == 1:  # 8 us less than as a list
        return [put_array(leaves[0], shardings[0], donate)]
    if jax.process_count() > 1:
        return [put_array(x, s, donate) for x, s in zip(leaves, shardings, strict=True)]
    for sharding in shardings:
        _check_devices(sharding)
    leaves = [movable(x, sharding) for x, sharding in zip(leaves, shardings, strict=True)]
    # one sharding for all spares device_put 0.7 us a leaf: it walks no tree of shardings
    first = shardings[0]
    same = all(sharding is first for sharding in shardings)
    return jax.device_put(leaves, first if same else shardings, donate=donate)


def put_array(x: Any, sharding: NamedSharding, donate: bool = False) -> Any:
    """Moves one concrete array or scalar."""
    _check_devices(sharding)
    x = movable(x, sharding)
    if jax.process_count() > 1:
        return _put_global(x, sharding, donate)
    return jax.device_put(x, sharding, donate=donate)


def _check_devices(sharding: NamedSharding) -> None:
    if isinstance(sharding.mesh, AbstractMesh):
        raise EinshardError(
            'an abstract mesh has no devices to put an array on',
            facts={
                'give': 'a jax.ShapeDtypeStruct, which is annotated; or a mesh of devices',
            },
        )


def _put_global(x: Any, sharding: NamedSharding, donate: bool) -> Any:
    """Moves one leaf where several processes hold the devices.

    `device_put` of data that each process has to itself would first gather it from all of them, to
    see that it is the same; each process takes its own shards instead.
    """
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(x, sharding, donate=donate)
    is_key = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
    whole = x if is_key else as_host(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def as_host(x: Any) -> np.ndarray[Any, Any]:
    """An array or a number as numpy has it, of a dtype that JAX has, if there is one."""
    # an int that JAX has no room for overflows here, as it does in one process
    host = np.asarray(jax.numpy.asarray(x) if type(x) is int else x)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
