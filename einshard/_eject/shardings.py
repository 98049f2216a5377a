"""Writes meshes, PartitionSpecs and NamedShardings as source text."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._errors import EinshardError
from .._plan.source import find_devices_call
from .._sharding.mesh import (
    UNCONSTRAINED,
    AnyMesh,
    Device,
    device_mesh,
    is_canonical_mesh,
    position,
    spec_axes,
)
from .source import Brackets, Code, literal, statement

# sorts devices as `position` of _sharding/mesh.py does
_HARDWARE_ORDER = '''\
def hardware_order(device):
    """Sort key: slice, coordinates, core for TPUs; slice, process, id for others."""
    slice_index = getattr(device, 'slice_index', None) or 0
    coords = getattr(device, 'coords', None)
    if coords is None:
        return slice_index, device.process_index, device.id
    return slice_index, *coords, getattr(device, 'core_on_chip', None) or 0'''


class Writer:
    """Writes shardings and their meshes.

    Args:
        mesh: the mesh in context. It is written in place of its abstract mesh, which the shardings
            of traced values have.
    """

    def __init__(self, mesh: AnyMesh) -> None:
        self._mesh_in_context = mesh
        self._meshes: dict[AnyMesh, str] = {}  # the variable of each mesh
        # the variable of each sorted list of devices, keyed by code such as 'jax.devices()'
        self._devices: dict[str, str] = {}

    def mesh(self, mesh: AnyMesh) -> str:
        """Returns the variable of a mesh, such as 'mesh_2'."""
        if mesh == getattr(self._mesh_in_context, 'abstract_mesh', None):
            mesh = self._mesh_in_context
        if mesh in self._meshes:
            return self._meshes[mesh]
        if not all(isinstance(name, str) for name in mesh.axis_names):
            names = ', '.join(f'{name!r} ({type(name).__name__})' for name in mesh.axis_names)
            raise EinshardError(
                'the axis names of a mesh must be strings to be written as source text',
                code='mesh',
                facts={'axis names': names},
            )
        self._meshes[mesh] = numbered('mesh', len(self._meshes))
        return self._meshes[mesh]

    def sharding(self, sharding: NamedSharding | None) -> Code:
        if sharding is None:
            return 'None'
        items = [self.mesh(sharding.mesh), spec_code(sharding.spec)]
        if not has_default_memory(sharding):
            items.append(f'memory_kind={sharding.memory_kind!r}')
        return Brackets('NamedSharding(', tuple(items))

    def definitions(self) -> list[str]:
        """Defines the mesh variables and the sorted devices that they use."""
        meshes = [self._definition(mesh, name) for mesh, name in self._meshes.items()]
        if not self._devices:
            return meshes
        devices = [
            statement(Brackets(f'{name} = sorted(', (call, 'key=hardware_order')))
            for call, name in self._devices.items()
        ]
        return [_HARDWARE_ORDER, '\n'.join([*devices, *meshes])]

    def _definition(self, mesh: AnyMesh, name: str) -> str:
        types = [f'AxisType.{kind.name}' for kind in mesh.axis_types]
        axis_types: Code = Brackets('axis_types=(', tuple(types))
        if len(set(types)) == 1 < len(types):
            axis_types = f'axis_types=({types[0]},) * {len(types)}'
        axes = Brackets('(', _literals(mesh.axis_names))
        if _uses_make_mesh(mesh):
            sizes = Brackets('(', tuple(map(str, mesh.axis_sizes)))
            code = statement(Brackets(f'{name} = jax.make_mesh(', (sizes, axes, axis_types)))
            if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != 'cpu':
                return code  # `_uses_make_mesh` has checked the device order
            return f'# jax.make_mesh may reorder the devices of a TPU slice\n{code}'
        devices = f'{self._device_array(mesh)}.reshape({", ".join(map(str, mesh.axis_sizes))})'
        code = statement(Brackets(f'{name} = Mesh(', (devices, axes, axis_types)))
        is_canonical = is_canonical_mesh(mesh) and device_mesh(mesh).axis_sizes == mesh.axis_sizes
        if is_canonical and len(types) > 1:
            return f'# one axis for each prime factor of {mesh.size}\n{code}'
        return code

    def _device_array(self, mesh: AnyMesh) -> str:
        """Writes the devices of a mesh as a NumPy array, in mesh order."""
        if isinstance(mesh, AbstractMesh):
            return f'np.array({self._sorted_devices("jax.devices()")})'
        devices: list[Device] = list(mesh.devices.flat)
        call, available = find_devices_call(devices)
        available = sorted(available, key=position)
        name = self._sorted_devices(call)
        order = [available.index(device) for device in devices]
        if order != list(range(len(order))):
            return f'np.array({name})[{order}]'
        return f'np.array({name}{f"[:{len(order)}]" if len(order) < len(available) else ""})'

    def _sorted_devices(self, call: str) -> str:
        return self._devices.setdefault(call, numbered('devices', len(self._devices)))


def numbered(name: str, index: int) -> str:
    return f'{name}_{index + 1}' if index else name


def _uses_make_mesh(mesh: AnyMesh) -> bool:
    """Whether the written code can call `jax.make_mesh`, which may reorder devices."""
    if is_canonical_mesh(mesh):
        return False  # the written code sorts the devices in hardware order
    if isinstance(mesh, AbstractMesh):
        return True  # an AbstractMesh has no device order
    call, available = find_devices_call(list(mesh.devices.flat))
    if call != 'jax.devices()':
        return False
    # make_mesh raises NotImplementedError for shapes that do not fit the torus of a TPU slice
    with suppress(ValueError, NotImplementedError):
        axes = mesh.axis_sizes, mesh.axis_names
        return jax.make_mesh(*axes, axis_types=mesh.axis_types, devices=available) == mesh
    return False


def has_default_memory(sharding: NamedSharding) -> bool:
    default = NamedSharding(sharding.mesh, PartitionSpec()).memory_kind
    return sharding.memory_kind in (None, default)


def spec_code(spec: PartitionSpec) -> Code:
    entries: list[Code] = []
    for axes in spec_axes(spec):
        names = ('P.UNCONSTRAINED',) if axes == UNCONSTRAINED else _literals(axes)
        entries.append(Brackets('(', names) if len(names) > 1 else names[0] if names else 'None')
    for keyword, axes in (('unreduced', spec.unreduced), ('reduced', spec.reduced)):
        if axes:
            entries.append(Brackets(f'{keyword}={{', _literals(sorted(axes)), '}'))
    return Brackets('P(', tuple(entries))


def _literals(names: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(literal, names))
