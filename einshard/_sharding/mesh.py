"""devices -> the one mesh; and named meshes.

Every expression over the same devices is lowered onto the same mesh: the devices in the order of
the hardware, their number in prime factors, one mesh axis each. Layouts that are equal then
compare equal, arrays of different expressions meet in one program, and explicit sharding, which
knows one mesh, works. A mesh for every expression would fail on TPU, where `jax.make_mesh` orders
the devices by the shape that it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec, Sharding

from .._cache import cached
from .._errors import EinshardError
from .._notation.layout import mesh_text, prime_factors

AnyMesh: TypeAlias = Mesh | AbstractMesh
Device: TypeAlias = Any  # a jax.Device, for which JAX has no static type
# What `mesh=` takes: a mesh, or devices to build the one mesh of.
MeshLike: TypeAlias = AnyMesh | Sequence[Device]


@overload
def device_mesh(devices: AbstractMesh, *, axis_types: AxisType | None = None) -> AbstractMesh: ...
@overload
def device_mesh(
    devices: Mesh | Sequence[Device] | None = None, *, axis_types: AxisType | None = None
) -> Mesh: ...
def device_mesh(devices: MeshLike | None = None, *, axis_types: AxisType | None = None) -> AnyMesh:
    """The one mesh of some devices, on which all expressions over them are lowered.

        >>> mesh = device_mesh(jax.devices()[:8])
        >>> mesh.axis_names, mesh.axis_sizes
        (('d0', 'd1', 'd2'), (2, 2, 2))

    The order in which the devices are given does not matter: on TPU they are ordered by slice,
    then by the chip's coordinates, then by core, so that a term which spans a dimension of the
    torus is a ring of it; elsewhere by process and id. Mesh axes to the left change slowest and
    cross the slower network. Inside each of those levels larger primes come first (24 devices on 3
    hosts: 3, 2, 2, 2).

    Args:
        devices: the devices; or a mesh, for the one mesh of its devices (abstract, if that mesh
            is). All devices of the default backend where left out.
        axis_types: the type of every axis, `AxisType.Auto` where left out. With
            `AxisType.Explicit`, enter the mesh by `jax.set_mesh`.

    Returns:
        A `jax.sharding.Mesh` with axes `d0`, `d1`, ...; the same object each time. For an
        `AbstractMesh`, an `AbstractMesh`.

    Raises:
        EinshardError: no devices, or one twice.
    """
    axis_type = AxisType.Auto if axis_types is None else axis_types
    if not isinstance(axis_type, AxisType):
        raise EinshardError(
            f'axis_types= is one AxisType for every axis, not {axis_types!r}',
            facts={'give': 'AxisType.Auto or AxisType.Explicit'},
        )
    if isinstance(devices, AbstractMesh):
        _check_size(devices)
        return _abstract_mesh(devices.size, axis_type)
    if isinstance(devices, Mesh):
        return _device_mesh(tuple(devices.devices.flat), axis_type)
    check_mesh(devices, 'devices=')
    chosen = tuple(jax.devices() if devices is None else devices)
    for device in chosen:
        if not isinstance(device, jax.Device):
            raise EinshardError(
                f'a mesh is made of devices, but one of them is {device!r}',
                facts={'give': 'a sequence of jax.Device, a Mesh or an AbstractMesh'},
            )
    return _device_mesh(chosen, axis_type)


@cached
def _device_mesh(devices: tuple[Device, ...], axis_type: AxisType) -> Mesh:
    if not devices:
        raise EinshardError('a mesh needs at least one device, but none is given')
    if len(set(devices)) != len(devices):
        raise EinshardError(
            'a device is given more than once',
            facts={'devices': ', '.join(map(str, devices))},
        )
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise EinshardError(
            f'a mesh is made of devices of one platform, not of {" and ".join(platforms)}',
        )
    in_order = tuple(sorted(devices, key=position))
    if in_order != devices:
        return _device_mesh(in_order, axis_type)
    return _mesh(in_order, axis_sizes_of(list(map(position, in_order))), axis_type)


@cached
def refactored_mesh(mesh: AnyMesh, sizes: tuple[int, ...]) -> AnyMesh:
    """The one mesh with other axis sizes: the same devices in the same order."""
    axis_type = mesh.axis_types[0]
    if isinstance(mesh, AbstractMesh):
        return _abstract_mesh(mesh.size, axis_type, sizes)
    return _mesh(tuple(mesh.devices.flat), sizes, axis_type)


def _mesh(devices: tuple[Device, ...], sizes: tuple[int, ...], axis_type: AxisType) -> Mesh:
    grid = np.array(devices, dtype=object).reshape(sizes)
    return Mesh(grid, axis_names(sizes), axis_types=(axis_type,) * len(sizes))


@cached
def _abstract_mesh(
    n_devices: int, axis_type: AxisType, sizes: tuple[int, ...] | None = None
) -> AbstractMesh:
    sizes = sizes or prime_factors(n_devices) or (1,)
    return AbstractMesh(sizes, axis_names(sizes), axis_types=(axis_type,) * len(sizes))


def axis_names(sizes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f'd{i}' for i in range(len(sizes)))


def position(device: Device) -> tuple[int, ...]:
    """Where a device is in the hardware, the slowest network first.

    Plain coordinates, not host by host: a host of a TPU holds a 2 x 2 block of chips, and a term
    over such blocks would be no ring of the torus. `slice_index` and `core_on_chip` are attributes
    of some devices only.
    """
    pod_slice = getattr(device, 'slice_index', None) or 0
    coordinates = getattr(device, 'coords', None)
    if coordinates is None:
        return (pod_slice, device.process_index, device.id)
    return (pod_slice, *coordinates, getattr(device, 'core_on_chip', None) or 0)


def axis_sizes_of(positions: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Mesh axis sizes of devices at these positions: prime factors, level by level.

    A level (slices, one dimension of the torus, hosts, ...) counts where it divides the devices
    evenly; devices that form no such hierarchy are one level.
    """
    sizes: list[int] = []
    groups = 1
    for depth in range(1, len(positions[0]) + 1):
        members: dict[tuple[int, ...], int] = {}
        for place in positions:
            members[place[:depth]] = members.get(place[:depth], 0) + 1
        even = len(set(members.values())) == 1
        if even and len(members) % groups == 0:
            sizes += prime_factors(len(members) // groups)
            groups = len(members)
    return tuple(sizes) or (1,)


def sizes_of(mesh: AnyMesh) -> dict[str, int]:
    """The axes that an expression may use: all but manual ones, which a shard_map has taken."""
    names = [str(name) for name in mesh.axis_names]
    if not has_names(mesh):
        raise EinshardError(
            'the axes of a mesh need names, which differ',
            facts={'mesh axes': ', '.join(map(repr, mesh.axis_names))},
        )
    _check_size(mesh)
    sizes = zip(names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in sizes if kind != AxisType.Manual}


def has_names(mesh: AnyMesh) -> bool:
    """Whether mesh axes have names that differ. JAX takes P(0) and P('') for no axis."""
    return all(mesh.axis_names) and len(set(map(str, mesh.axis_names))) == len(mesh.axis_names)


def _check_size(mesh: AnyMesh) -> None:
    if math.prod(mesh.axis_sizes) > _MOST_DEVICES:
        raise EinshardError(
            f'JAX has no shardings over more than {_MOST_DEVICES} devices',
            facts={'mesh': mesh_fact(mesh)},
        )


_MOST_DEVICES = 2**31 - 1  # beyond, it is a C++ exception: std::bad_cast


def entry_axes(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec: of P('x', None, ('y', 'z'))[2], y and z."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def spec_axes(spec: PartitionSpec) -> list[tuple[Any, ...]]:
    """The mesh axes of each entry of a PartitionSpec; not those in `unreduced` and `reduced`."""
    # With such axes JAX refuses to iterate over a spec, and 0.8.1, which lacks `partitions`, does
    # it and leaves them out.
    entries = spec.partitions if hasattr(spec, 'partitions') else tuple(spec)
    return [entry_axes(entry) for entry in entries]


def partition_spec(entries: Iterable[tuple[Any, ...]]) -> PartitionSpec:
    """The PartitionSpec with these mesh axes for each array axis."""
    # normalised, since PartitionSpec('x') != PartitionSpec(('x',))
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))


def is_device_mesh(mesh: AnyMesh) -> bool:
    """Whether a mesh is the one mesh of its devices, or that with other factors."""
    types = set(mesh.axis_types)
    if mesh.axis_names != axis_names(mesh.axis_sizes) or len(types) != 1:
        return False
    if isinstance(mesh, AbstractMesh):
        return True
    return list(mesh.devices.flat) == list(device_mesh(mesh).devices.flat)


def memory_kind_of(sharding: Sharding) -> str | None:
    """The memory that a sharding is for, also where that is the default of its devices."""
    if sharding.memory_kind is None and isinstance(getattr(sharding, 'mesh', None), AbstractMesh):
        return 'device'
    return sharding.memory_kind


def memory_kinds(mesh: AnyMesh) -> list[str] | None:
    """The memories that each device of a mesh has; None where there are no devices to tell."""
    if isinstance(mesh, AbstractMesh):
        return None
    return sorted({memory.kind for memory in mesh.devices.flat[0].addressable_memories()})


def check_mesh(mesh: Any, option: str = 'mesh=') -> None:
    """Raises where `mesh=` can be none; asks for no devices."""
    if mesh is None or isinstance(mesh, Mesh | AbstractMesh):
        return
    n_dims = getattr(mesh, 'ndim', 1)
    if n_dims > 1:
        raise EinshardError(
            f'{option} is an array of {n_dims} dimensions, which does not name its axes',
            facts={'instead': f'jax.sharding.Mesh(devices, {tuple(_NAMES[:n_dims])})'},
        )
    made = _making(mesh)
    several = isinstance(mesh, Iterable) and not isinstance(mesh, str | Mapping) and n_dims == 1
    if made or not several:
        facts = {'give': 'a Mesh, an AbstractMesh or a sequence of devices'}
        facts |= {'as in': made} if made else {}
        raise EinshardError(f'{option} is {mesh!r}, which is no mesh', facts=facts)


_NAMES = 'xyzuvw'


def _making(sizes: Any) -> str | None:
    """How a mesh is made of these sizes, if they are sizes: (4, 2) or {'data': 4}."""
    if isinstance(sizes, Mapping):
        names, numbers = tuple(sizes), tuple(sizes.values())
    elif isinstance(sizes, tuple):
        names, numbers = tuple(_NAMES[: len(sizes)]), sizes
    else:
        return None
    are_sizes = all(type(number) is int and number > 0 for number in numbers)
    if not numbers or not are_sizes or len(names) != len(numbers):
        return None
    return f'jax.make_mesh({numbers}, {names})'


def mesh_fact(mesh: AnyMesh) -> str:
    """A mesh as errors show it: 'data': 4, 'tp': 2"""
    kinds = {kind.name for kind in mesh.axis_types}
    sizes = dict(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
    return f'{mesh_text(sizes)} ({", ".join(sorted(kinds))})'
