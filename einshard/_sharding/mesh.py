"""The canonical mesh, and helpers for meshes.

By default, expressions are lowered onto the canonical mesh: the devices in hardware order, with one
mesh axis for each prime factor of the device count. So equal placements are equal shardings, and
one program can use arrays sharded by different expressions. One mesh per expression would fail with
Explicit axes, which require a single mesh, and on TPU, where `jax.make_mesh` orders the devices by
the mesh shape.
"""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .._cache import cached
from .._errors import EinshardError, public
from .._notation.counts import prime_factors
from .._notation.layout import mesh_text
from .axis_sizes import solve_sizes
from .libtpu import load_libtpu

AnyMesh: TypeAlias = Mesh | AbstractMesh
Device: TypeAlias = Any  # a jax.Device
# What `mesh=` accepts: a mesh, or devices to build the canonical mesh from.
MeshLike: TypeAlias = AnyMesh | Sequence[Device]


@overload
def device_mesh(
    devices: AbstractMesh, *, axis_types: AxisType | None = None, **axes: int
) -> AbstractMesh: ...
@overload
def device_mesh(
    devices: Mesh | Sequence[Device] | None = None,
    *,
    axis_types: AxisType | None = None,
    **axes: int,
) -> Mesh: ...
@public
def device_mesh(
    devices: MeshLike | None = None, *, axis_types: AxisType | None = None, **axes: int
) -> AnyMesh:
    """Returns a mesh with named axes, or the canonical mesh.

        >>> import jax
        >>> from einshard import device_mesh
        >>> mesh = device_mesh(data=-1, tensor=1)
        >>> mesh.axis_names, mesh.axis_sizes == (jax.device_count(), 1)
        (('data', 'tensor'), True)

    Devices are sorted in hardware order: on TPU by slice, chip coordinates and core; elsewhere by
    process and id. With named axes, the sorted devices are reshaped to the sizes: devices along the
    last axis are neighbors, and the first axis crosses slices, if there are several. By contrast,
    `jax.make_mesh` may reorder TPUs for the mesh shape, and takes the first devices if the sizes
    need fewer than all.

    Without axes, `device_mesh` returns the canonical mesh, which expressions are lowered onto
    unless you use a mesh of your own. Its axes `d0`, `d1`, ... are the prime factors of the number
    of devices. Each level of the hardware (slices, torus dimensions, hosts) adds its own factors,
    the larger ones first: on 2 hosts with 6 devices each, the sizes are 2 (hosts), then 3 and 2.

    Args:
        devices: the devices, in any order; or a mesh, whose devices are used. Default: all devices
            of the default backend.
        axis_types: the type of every axis. Default: `AxisType.Auto`. To use `AxisType.Explicit`,
            enter the mesh with `jax.set_mesh`.
        axes: the mesh axes and their sizes. One size may be -1, for the remaining devices.

    Returns:
        A `jax.sharding.Mesh`, or an `AbstractMesh` if `devices` is one. Equal calls return the same
        object.

    Raises:
        EinshardError: there are no devices, a device is listed twice, or the sizes do not use all
            devices. The error lists sizes that do.
    """
    mesh = _canonical_mesh(devices, axis_types)
    call = ('device_mesh(' if devices is None else 'device_mesh(devices, ') + types_text(axis_types)
    return named_mesh(mesh, axes, call) if axes else mesh


def types_text(axis_types: AxisType | None) -> str:
    """Returns the argument for suggested calls, as in 'axis_types=AxisType.Auto, ', or ''."""
    return '' if axis_types is None else f'axis_types=AxisType.{axis_types.name}, '


def named_mesh(mesh: AnyMesh, axes: Mapping[str, int], call: str) -> AnyMesh:
    """Reshapes a canonical mesh, like the one that `device_mesh()` returns, to named axes.

    `call` is the first part of suggested fixes, such as 'device_mesh('.
    """
    try:
        sizes = solve_sizes(axes, mesh.size, call)
    except EinshardError as error:
        raise error.about(**simulation_fact(mesh)) from None
    return reshaped(mesh, tuple(sizes), tuple(sizes.values()))


def simulation_fact(mesh: AnyMesh) -> dict[str, str]:
    """Returns how to simulate devices, for errors about their number, if JAX has one CPU device."""
    has_one_device = mesh.size == 1 and isinstance(mesh, Mesh) and jax.device_count() == 1
    if not has_one_device or jax.default_backend() != 'cpu':
        return {}
    simulated = 'XLA_FLAGS=--xla_force_host_platform_device_count=8'
    return {'to_simulate_devices': f'set {simulated} before JAX starts'}


@cached
def reshaped(mesh: AnyMesh, names: tuple[str, ...], sizes: tuple[int, ...]) -> AnyMesh:
    """Returns a mesh of the same devices with other axes, all of the type of its first one."""
    types = (mesh.axis_types[0],) * len(sizes)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names, axis_types=types)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)


def _canonical_mesh(devices: MeshLike | None, axis_types: AxisType | None) -> AnyMesh:
    axis_type = AxisType.Auto if axis_types is None else axis_types
    if axis_type not in (AxisType.Auto, AxisType.Explicit):
        raise EinshardError(
            f'axis_types= must be one AxisType for all axes, not {axis_types!r}',
            code='mesh',
            facts={'expected': 'AxisType.Auto or AxisType.Explicit'},
        )
    if isinstance(devices, AbstractMesh):
        _check_size(devices)
        return _abstract_device_mesh(devices.size, axis_type)
    if isinstance(devices, Mesh):
        return _mesh_of_devices(tuple(devices.devices.flat), axis_type)
    check_mesh(devices, 'devices=')
    if devices is None:
        load_libtpu()
        devices = jax.devices()
    chosen = tuple(devices)
    for device in chosen:
        if not isinstance(device, jax.Device):
            raise EinshardError(
                f'a list of devices must contain jax.Device objects, not {reprlib.repr(device)}',
                code='mesh',
            )
    return _mesh_of_devices(chosen, axis_type)


def check_one_topology(devices: Sequence[Device]) -> None:
    """Raises if no program can use all devices: several platforms, or several topologies."""
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise EinshardError(
            f'all devices of a mesh must be on one platform, not on {" and ".join(platforms)}',
            code='mesh',
        )
    # the devices of different topologies have the same positions and ids
    if len({getattr(device, 'client', None) for device in devices}) > 1:
        kinds = dict.fromkeys(device.device_kind for device in devices)
        raise EinshardError(
            'all devices of a mesh must be of one topology',
            code='mesh',
            facts={'devices': ', '.join(kinds)},
        )


@cached
def _mesh_of_devices(devices: tuple[Device, ...], axis_type: AxisType) -> Mesh:
    if not devices:
        raise EinshardError('a mesh needs at least one device, but got none', code='device-count')
    if len(set(devices)) != len(devices):
        raise EinshardError(
            'the same device is listed more than once',
            code='mesh',
            facts={'devices': ', '.join(map(str, devices))},
        )
    check_one_topology(devices)
    in_order = tuple(sorted(devices, key=position))
    if in_order != devices:
        return _mesh_of_devices(in_order, axis_type)
    sizes = axis_sizes_of(list(map(position, devices)))
    grid = np.array(devices, dtype=object).reshape(sizes)
    return Mesh(grid, _canonical_names(sizes), axis_types=(axis_type,) * len(sizes))


def reshape_canonical_mesh(mesh: AnyMesh, sizes: tuple[int, ...]) -> AnyMesh:
    return reshaped(mesh, _canonical_names(sizes), sizes)


@cached
def _abstract_device_mesh(n_devices: int, axis_type: AxisType) -> AbstractMesh:
    sizes = prime_factors(n_devices) or (1,)
    return AbstractMesh(sizes, _canonical_names(sizes), axis_types=(axis_type,) * len(sizes))


def _canonical_names(sizes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f'd{i}' for i in range(len(sizes)))


def process_count() -> int:
    """Returns `jax.process_count()`, or 0 if JAX has no backend.

    With JAX_PLATFORMS=cuda and no GPU, an assertion in JAX fails. `topology` works there.
    """
    try:
        return jax.process_count()
    except AssertionError:
        return 0


def position(device: Device) -> tuple[int, ...]:
    """Returns (slice, *coordinates, core) for TPUs, (slice, process, id) for other devices.

    TPUs are sorted by coordinates, not by host: a host may have a 2 x 2 block of chips, and a mesh
    axis over such blocks would not be a ring of the torus. Only some devices have `slice_index` and
    `core_on_chip`.
    """
    pod_slice = getattr(device, 'slice_index', None) or 0
    coordinates = getattr(device, 'coords', None)
    if coordinates is None:
        return (pod_slice, device.process_index, device.id)
    return (pod_slice, *coordinates, getattr(device, 'core_on_chip', None) or 0)


def axis_sizes_of(positions: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Computes the axis sizes of the canonical mesh, for devices at these positions.

    Element i of a position is the index at level i of the hardware, such as slice, torus dimension
    or host. Each level adds the prime factors of its size. Levels that split the devices unevenly
    are skipped.
    """
    sizes: list[int] = []
    n_groups = 1
    for depth in range(1, len(positions[0]) + 1):
        group_sizes = Counter(p[:depth] for p in positions)
        is_even = len(set(group_sizes.values())) == 1
        if is_even and len(group_sizes) % n_groups == 0:
            sizes += prime_factors(len(group_sizes) // n_groups)
            n_groups = len(group_sizes)
    return tuple(sizes) or (1,)


def sizes_of(mesh: AnyMesh) -> dict[str, int]:
    """Returns the mesh axis sizes by name, without Manual axes, which expressions cannot use."""
    names = [str(name) for name in mesh.axis_names]
    if not has_valid_names(mesh):
        raise EinshardError(
            'mesh axes need distinct, nonempty names',
            code='mesh',
            facts={'mesh axes': ', '.join(map(repr, mesh.axis_names))},
        )
    _check_size(mesh)
    sizes = zip(names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in sizes if kind != AxisType.Manual}


def has_valid_names(mesh: AnyMesh) -> bool:
    """Whether axis names are distinct and not 0 or '': JAX reads P(0) and P('') as unsharded."""
    return all(mesh.axis_names) and len(set(map(str, mesh.axis_names))) == len(mesh.axis_names)


def _check_size(mesh: AnyMesh) -> None:
    if math.prod(mesh.axis_sizes) > _MAX_DEVICES:
        raise EinshardError(
            f'JAX supports at most {_MAX_DEVICES} devices in a mesh',
            code='device-count',
            facts={'mesh': mesh_fact(mesh)},
        )


_MAX_DEVICES = 2**31 - 1  # above this, JAX raises the C++ exception std::bad_cast


def entry_axes(entry: Any) -> tuple[Any, ...]:
    """Converts an entry of a PartitionSpec to a tuple of mesh axes: () for None, ('x',) for 'x'."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def spec_axes(spec: PartitionSpec) -> list[tuple[Any, ...]]:
    """Returns the mesh axes of each entry of a PartitionSpec. Omits unreduced and reduced axes."""
    # JAX refuses to iterate over a spec with unreduced axes
    return [entry_axes(entry) for entry in spec.partitions]


def shards_by_axis(sharding: NamedSharding) -> dict[int, int]:
    """Returns the number of shards of each sharded array axis, by the position of the axis."""
    sizes = sharding.mesh.shape
    entries = enumerate(spec_axes(sharding.spec))
    counts = {i: math.prod(sizes[axis] for axis in axes) for i, axes in entries}
    return {i: n for i, n in counts.items() if n > 1}


def partition_spec(
    entries: Iterable[tuple[Any, ...]],
    unreduced: Collection[Any] = (),
    reduced: Collection[Any] = (),
) -> PartitionSpec:
    # 'x' instead of ('x',), so that equal specs are written the same way
    partitions = (axes[0] if len(axes) == 1 else axes or None for axes in entries)
    return PartitionSpec(*partitions, unreduced=frozenset(unreduced), reduced=frozenset(reduced))


def partial_axes(sharding: Sharding) -> tuple[frozenset[Any], frozenset[Any]]:
    """Returns the unreduced mesh axes, and the reduced ones."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    return spec.unreduced, spec.reduced


def is_partial(sharding: Sharding) -> bool:
    return any(partial_axes(sharding))


def are_equivalent(sharding: Sharding, other: Sharding, ndim: int) -> bool:
    """Whether two shardings are equivalent. Unlike JAX, compares reduced mesh axes too."""
    same = partial_axes(sharding) == partial_axes(other)
    return same and sharding.is_equivalent_to(other, ndim)


def unreduced_kind(spec: PartitionSpec) -> str:
    """Returns how unreduced values are combined: 'sum', or in newer JAX 'max' or 'min'."""
    kind = getattr(spec, 'unreduced_kind', None)
    return 'sum' if kind is None else kind.name


UNCONSTRAINED = (PartitionSpec.UNCONSTRAINED,)  # P.UNCONSTRAINED in the result of `spec_axes`


def partition_text(spec: PartitionSpec) -> str:
    """Formats a PartitionSpec as P('data', None). Its repr differs between versions of JAX."""
    texts = [
        'P.UNCONSTRAINED'
        if entry == UNCONSTRAINED
        else repr(entry[0] if len(entry) == 1 else entry or None)
        for entry in spec_axes(spec)
    ]
    keywords = {'unreduced': spec.unreduced, 'reduced': spec.reduced}
    texts += [
        f'{keyword}={{{", ".join(sorted(map(repr, axes)))}}}'
        for keyword, axes in keywords.items()
        if axes
    ]
    return f'P({", ".join(texts)})'


def is_canonical_mesh(mesh: AnyMesh) -> bool:
    """Whether a mesh is the canonical mesh of its devices, except for its axis sizes."""
    types = set(mesh.axis_types)
    if mesh.axis_names != _canonical_names(mesh.axis_sizes) or len(types) != 1:
        return False
    if isinstance(mesh, AbstractMesh):
        return True
    return list(mesh.devices.flat) == list(device_mesh(mesh).devices.flat)


def is_reshaped(mesh: AnyMesh, other: AnyMesh) -> bool:
    """Whether both are the canonical mesh of the same devices, except for axis sizes."""
    if mesh.size != other.size or not (is_canonical_mesh(mesh) and is_canonical_mesh(other)):
        return False
    return reshape_canonical_mesh(other, mesh.axis_sizes) == mesh


def has_equal_axes(mesh: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes have the same axes, with the same sizes and types, in the same order.

    In JAX 0.10.2 to 0.12, an `AbstractMesh` that the user creates differs from that of
    `jax.set_mesh` only in its `abstract_device`. JAX accepts either in place of the other.
    """
    return (mesh.axis_names, mesh.axis_sizes, mesh.axis_types) == (
        other.axis_names,
        other.axis_sizes,
        other.axis_types,
    )


def is_reordered(mesh: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes have the same devices in different orders."""
    if isinstance(mesh, AbstractMesh) or isinstance(other, AbstractMesh):
        return False
    devices, others = list(mesh.devices.flat), list(other.devices.flat)
    return devices != others and {*devices} == {*others}


@cached
def shrink_mesh(mesh: AnyMesh, single_mesh: AnyMesh) -> AnyMesh:
    """Returns a mesh with the axes of `mesh`, all of size 1, on the device of `single_mesh`."""
    shape, types = (1,) * len(mesh.axis_names), mesh.axis_types
    if isinstance(single_mesh, AbstractMesh) or isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, mesh.axis_names, axis_types=types)
    return Mesh(single_mesh.devices.reshape(shape), mesh.axis_names, axis_types=types)


def memory_kind_of(sharding: Sharding) -> str | None:
    """Returns the memory kind of a sharding. The default on an abstract mesh is 'device'."""
    if sharding.memory_kind is None and isinstance(getattr(sharding, 'mesh', None), AbstractMesh):
        return 'device'
    return sharding.memory_kind


def memory_kinds(mesh: AnyMesh) -> list[str] | None:
    """Returns the kinds of memory that the devices have, or None for an abstract mesh."""
    if isinstance(mesh, AbstractMesh):
        return None
    kinds = {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}
    return sorted(kinds or {'device', 'pinned_host'})  # JAX's described GPUs have no memories


def named_sharding(
    mesh: AnyMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """Makes a NamedSharding that keeps its memory kind.

    On described GPUs, which have no memories, JAX drops it. On the abstract mesh it keeps it, and
    compiles for the devices of the other arrays. Without a memory kind, `NamedSharding` will do.
    """
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
    if memory_kind in (None, 'device', sharding.memory_kind) or isinstance(mesh, AbstractMesh):
        return sharding
    return NamedSharding(mesh.abstract_mesh, spec, memory_kind=memory_kind)


def check_mesh(mesh: Any, option: str = 'mesh=') -> None:
    """Raises if `mesh` is not a valid value of `option`. Does not start a backend."""
    if mesh is None or isinstance(mesh, Mesh | AbstractMesh):
        return
    ndim = getattr(mesh, 'ndim', 1)
    if ndim > 1:
        raise EinshardError(
            f'{option} is an array with {ndim} dimensions, whose axes have no names',
            code='mesh',
            facts={'try': f'{option}jax.sharding.Mesh(devices, {tuple(_NAMES[:ndim])})'},
        )
    make_mesh = _make_mesh_call(mesh)
    is_sequence = isinstance(mesh, Iterable) and not isinstance(mesh, str | Mapping) and ndim == 1
    if make_mesh or not is_sequence:
        raise EinshardError(
            f'{option} must be a Mesh, an AbstractMesh or a sequence of devices, not {mesh!r}',
            code='mesh',
            facts={'try': f'{option}{make_mesh}'} if make_mesh else {},
        )


_NAMES = 'xyzuvw'


def _make_mesh_call(sizes: Any) -> str | None:
    """Formats a `jax.make_mesh` call for sizes such as (4, 2) or {'data': 4}, or returns None."""
    if isinstance(sizes, Mapping):
        names, numbers = tuple(sizes), tuple(sizes.values())
    elif isinstance(sizes, tuple):
        names, numbers = tuple(_NAMES[: len(sizes)]), sizes
    else:
        return None
    are_sizes = all(type(size) is int and size > 0 for size in numbers)
    if not numbers or not are_sizes or len(names) != len(numbers):
        return None
    return f'jax.make_mesh({numbers}, {names})'


def mesh_fact(mesh: AnyMesh) -> str:
    """Formats a mesh for errors: "'data': 4, 'tp': 2 (Auto)", or "... (Auto, Explicit)"."""
    kinds = [kind.name for kind in mesh.axis_types]
    sizes = dict(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
    text = ', '.join(kinds if len({*kinds}) > 1 else kinds[:1])
    return f'{mesh_text(sizes)} ({text}{", canonical mesh" if is_canonical_mesh(mesh) else ""})'
