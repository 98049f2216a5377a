"""Places concrete arrays with `jax.device_put`, and works around its limits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from .._errors import EinshardError
from .._sharding.mesh import (
    are_equivalent,
    is_partial,
    is_reordered,
    partition_spec,
    process_count,
    spec_axes,
)
from .._sharding.tracing import is_tracing
from .._trees.specs import reject_masked_array
from .reshard import reshard

T = TypeVar('T')


def is_placed(x: Any, sharding: NamedSharding) -> bool:
    """Whether an array already has this sharding, or an equivalent one on the same mesh."""
    if x.sharding == sharding:
        return True
    if not isinstance(x.sharding, NamedSharding) or x.sharding.mesh != sharding.mesh:
        return False
    # under explicit axes, JAX itself turns P('x') into P('x', None)
    return are_equivalent(x.sharding, sharding, len(x.shape))


def make_movable(x: Any, sharding: NamedSharding) -> Any:
    """Returns `x`, or an equal array that `device_put` can move to `sharding`."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return x
    mesh = x.sharding.mesh
    x = without_partial_axes(x, sharding) if is_partial(x.sharding) else x
    memory_kind = x.sharding.memory_kind
    if memory_kind != sharding.memory_kind and is_reordered(sharding.mesh, mesh):
        # in two steps: XLA cannot change the memory kind and the order of the devices at once
        if memory_kind == 'device':
            return put_array(x, sharding.with_memory_kind(memory_kind))
        x = jax.device_put(x, x.sharding.with_memory_kind(sharding.memory_kind))
    return x


def without_partial_axes(x: Any, sharding: NamedSharding) -> Any:
    """Reshards an array so that it has no unreduced or reduced axes, which `device_put` rejects."""
    return _reshard(x, reduced_sharding(x.sharding, sharding))


def reduced_sharding(sharding: NamedSharding, target: NamedSharding) -> NamedSharding:
    """Returns a sharding without unreduced or reduced axes, on the way to `target`."""
    # that of the target allows a reduce-scatter instead of an all-reduce
    on_way = target if sharding.mesh == target.mesh else sharding
    return NamedSharding(sharding.mesh, partition_spec(spec_axes(on_way.spec)))


def _reshard(x: Any, sharding: NamedSharding) -> Any:
    # in `reshard`, operations on complex numbers reject arrays whose mesh is not the one in context
    mesh: Any = sharding.mesh
    with nullcontext() if is_tracing() else jax.set_mesh(mesh):
        return reshard(x, sharding)


def put(leaves: list[Any], shardings: list[NamedSharding], donate: bool = False) -> list[Any]:
    """Places concrete leaves with one `jax.device_put`.

    Places them one by one if there are several processes or a sharding is partial.
    """
    if len(leaves) == 1:  # device_put of a list of one takes 8 us longer
        return [put_array(leaves[0], shardings[0], donate)]
    if process_count() > 1 or any(map(is_partial, shardings)):
        return [put_array(x, s, donate) for x, s in zip(leaves, shardings, strict=True)]
    for sharding in shardings:
        check_devices(sharding)
    leaves = [make_movable(x, sharding) for x, sharding in zip(leaves, shardings, strict=True)]
    # with a list of shardings, device_put takes 0.7 us longer per leaf
    first = shardings[0]
    is_shared = all(sharding is first for sharding in shardings)
    return device_put(leaves, first if is_shared else shardings, donate)


def put_array(x: Any, sharding: NamedSharding, donate: bool = False) -> Any:
    check_devices(sharding)
    if is_partial(sharding):  # which `device_put` rejects
        mesh, kind = sharding.mesh, sharding.memory_kind
        is_on_mesh = isinstance(x, jax.Array) and getattr(x.sharding, 'mesh', None) == mesh
        if not is_on_mesh or x.sharding.memory_kind != kind:
            spec = partition_spec(spec_axes(sharding.spec))
            x = put_array(x, NamedSharding(mesh, spec, memory_kind=kind), donate)
        return _reshard(x, sharding)
    x = make_movable(x, sharding)
    if process_count() > 1:
        return _put_global(x, sharding, donate)
    return device_put(x, sharding, donate)


def device_put(x: Any, sharding: Any, donate: bool = False) -> Any:
    """Calls `jax.device_put`, with clearer errors for `topology` devices and failed donations."""
    try:
        return jax.device_put(x, sharding, donate=donate)
    except (jax.errors.JaxRuntimeError, ValueError, AssertionError) as error:
        converted = topology_error(error)
        if donate and 'different memory kinds' in str(error):
            converted = EinshardError(
                'an array cannot be donated if it moves to another kind of memory',
                code='array',
                facts={'JAX says': str(error), 'try': 'omit donate=True'},
            )
        if converted is None:
            raise
        raise converted from None


class TopologyError(EinshardError):
    """Raised because the devices of a `topology` cannot hold arrays."""

    code = 'topology'


def topology_error(error: Exception) -> TopologyError | None:
    """Converts a JAX error about `topology` devices. Returns None for other errors."""
    text = str(error)
    parts = ['compile-only', "no attribute 'local_devices'"]
    if process_count() < 2:  # with several processes, these errors have other causes
        parts += ['non-addressable device', 'represents addressable devices']
    has_no_backend = isinstance(error, AssertionError) and process_count() == 0
    if not has_no_backend and not any(part in text for part in parts):
        return None
    return TopologyError(
        'the devices of a topology can neither hold arrays nor run programs',
        facts={'instead': 'compile for them: explain(...), or .lower(...).compile()'},
    )


def check_devices(sharding: NamedSharding) -> None:
    if isinstance(sharding.mesh, AbstractMesh):
        raise EinshardError(
            'an abstract mesh has no devices to put an array on',
            code='mesh',
            facts={'instead': 'pass a Mesh with devices, or a jax.ShapeDtypeStruct as the array'},
        )


def _put_global(x: Any, sharding: NamedSharding, donate: bool) -> Any:
    """Places an array when there are several processes.

    If only `sharding` spans several processes, each of them slices its shards from its own copy of
    the array. `device_put` would first gather all copies, to check that they are equal.
    """
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    is_key = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
    if is_global and is_key:  # device_put fails
        data = _put_global(jax.random.key_data(x), sharding, donate)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(x, sharding, donate=donate)
    # `make_array_from_callback` would drop the weak type.
    is_weak = type(x) in (int, float, complex)
    if isinstance(x, jax.Array):
        is_weak = not is_key and x.weak_type and not x.committed
    if is_weak:
        return jax.jit(identity, out_shardings=sharding)(x)
    full = x if is_key else as_host(x)
    # without dtype=, this fails in a process that has no device of the mesh
    return jax.make_array_from_callback(
        full.shape, sharding, lambda index: full[index], dtype=full.dtype
    )


def identity(x: T) -> T:
    return x


def as_host(x: Any) -> np.ndarray[Any, Any]:
    """Converts an array or a number to NumPy, with the dtype that JAX uses for it."""
    reject_masked_array(x)
    try:
        host = np.asarray(jax.numpy.asarray(x) if type(x) is int else x)
    except OverflowError as error:
        raise EinshardError(str(error), code='array') from None
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
