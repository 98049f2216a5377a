"""Builds the mesh of a TPU slice from its name. Needs libtpu, but no TPU."""

from __future__ import annotations

from typing import Any, cast

import jax
from jax.sharding import AxisType, Mesh

from .._cache import cached
from .._errors import EinshardError
from .libtpu import has_libtpu, quiet_libtpu
from .mesh import device_mesh, named_mesh, types_text
from .tpu_names import known_names, topology_name


def topology(
    name: str, *, n_slices: int = 1, axis_types: AxisType | None = None, **axes: int
) -> Mesh:
    """Returns the mesh of a TPU slice you don't have, for compiling ahead of time.

        >>> from einshard import topology
        >>> mesh = topology('v5e:4x4', data=4, tensor=4)
        >>> mesh.axis_names, mesh.devices.flat[0].device_kind
        (('data', 'tensor'), 'TPU v5 lite')

    Pass the mesh to `explain` or `assert_collectives` as `mesh=`. Programs can be lowered and
    compiled for its devices, but these cannot hold arrays. On a machine without TPUs, this sets
    environment variables that libtpu reads, unless they are set already.

    Args:
        name: TPU generation and chips along each dimension, such as 'v5e:4x4' or 'v5p:2x2x2'; or
            a Cloud accelerator type with its default shape, such as 'v5litepod-16' (16 chips,
            v5e:4x4) or 'v5p-128' (128 TensorCores, 64 chips, v5p:4x4x4). A chip of v2, v3, v4 or
            tpu7x may have two devices.
        n_slices: number of slices, connected by the data center network. The devices of a slice
            are consecutive, so the first mesh axis crosses slices.
        axis_types: the type of every mesh axis, as in `device_mesh`.
        axes: the mesh axes and their sizes, as in `device_mesh`. Default: the canonical mesh.

    Returns:
        The mesh. Equal calls return the same object.

    Raises:
        EinshardError: libtpu is not installed or does not know the slice, or the sizes do not use
            all devices. The error lists valid sizes.
    """
    if not isinstance(name, str):
        raise EinshardError(
            f'the name of a topology must be a string, not {name!r}',
            facts={'example': "topology('v5e:4x4')"},
        )
    if not isinstance(n_slices, int) or isinstance(n_slices, bool) or n_slices < 1:
        raise EinshardError(f'n_slices= must be a positive integer, not {n_slices!r}')
    mesh = _topology(topology_name(name), n_slices)
    if axis_types is not None:
        mesh = device_mesh(mesh, axis_types=axis_types)
    call = f"topology('{name}', " + (f'n_slices={n_slices}, ' if n_slices > 1 else '')
    call += types_text(axis_types)
    return cast(Mesh, named_mesh(mesh, axes, call)) if axes else mesh


@cached
def _topology(name: str, n_slices: int) -> Mesh:
    if not has_libtpu():
        raise EinshardError(
            'topology() needs libtpu, which is not installed',
            facts={'topology': f"'{name}'", 'install': 'pip install libtpu'},
        )
    quiet_libtpu()
    # imported here because it loads modules that nothing else needs
    from jax.experimental.topologies import get_topology_desc

    slices: dict[str, Any] = {'num_slices': n_slices} if n_slices > 1 else {}
    try:
        description = get_topology_desc(name, 'tpu', **slices)
    except jax.errors.JaxRuntimeError as error:
        raise EinshardError(
            f"libtpu does not know the slice '{name}'",
            facts={'libtpu says': str(error).splitlines()[0], **known_names()},
        ) from None
    return device_mesh(description.devices)
