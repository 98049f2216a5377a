"""The mesh of a TPU slice by name, from libtpu; works without a TPU."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from .._cache import cached
from .._errors import EinshardError, plural
from .mesh import device_mesh

# Dimensions of the torus by generation. 'v4 lite' is v4i.
_GENERATIONS = {
    'v2': 2,
    'v3': 2,
    'v4 lite': 2,
    'v4': 3,
    'v5e': 2,
    'v5p': 3,
    'v6e': 2,
    'tpu7x': 3,
}
_NAME = re.compile(r'(?P<generation>[\w ]+?)[:=](?P<sizes>\d+(?:x\d+)*)(?P<twist>_(?:un)?twisted)?')
_GPU = re.compile(r'(?i)\b(a100|h100|h200|gh200|b100|b200|gb200|v100|l4|mi\d+|gpu|cuda|rocm)')

# Without these variables, and without a TPU, libtpu waits for a metadata server, prints its failure
# to standard error, and locks out other processes.
_WITHOUT_TPU = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def topology(name: str, *, n_slices: int = 1) -> Mesh:
    """The mesh of a TPU slice you don't have, to compile for ahead of time.

        >>> from einshard import topology
        >>> mesh = topology('v5e:4x4')
        >>> mesh.size, mesh.devices.flat[0].device_kind
        (16, 'TPU v5 lite')

    Pass it to `explain` or `assert_collectives` as `mesh=`. Programs can be lowered and compiled
    for these devices, but they hold no arrays. On a machine without TPUs, this sets environment
    variables that libtpu reads, unless they are set already.

    Args:
        name: TPU generation and chips along each dimension, such as 'v5e:4x4' or 'v5p:2x2x2'. A
            chip of v2, v3, v4 or tpu7x may have two devices.
        n_slices: number of slices, connected by the data center network. Slices are the slowest
            mesh axes.

    Returns:
        The canonical mesh (`device_mesh`) of those devices; the same object on each call.

    Raises:
        EinshardError: libtpu is not installed, or does not know the slice.
    """
    if not isinstance(name, str):
        raise EinshardError(
            f'the name of a topology is a string, not {name!r}', facts={'example': "'v5e:4x4'"}
        )
    if not isinstance(n_slices, int) or isinstance(n_slices, bool) or n_slices < 1:
        raise EinshardError(f'n_slices= must be a positive integer, not {n_slices!r}')
    return _topology(name, n_slices)


@cached
def _topology(name: str, n_slices: int) -> Mesh:
    _check_name(name)
    if importlib.util.find_spec('libtpu') is None:
        raise EinshardError(
            'topology() needs libtpu, which is not installed',
            facts={'topology': f"'{name}'", 'install': 'pip install libtpu'},
        )
    if not _has_tpu():
        for variable, value in _WITHOUT_TPU.items():
            os.environ.setdefault(variable, value)
    # imported here because it loads modules that nothing else needs
    from jax.experimental.topologies import get_topology_desc

    slices: dict[str, Any] = {'num_slices': n_slices} if n_slices > 1 else {}
    try:
        description = get_topology_desc(name, 'tpu', **slices)
    except jax.errors.JaxRuntimeError as error:
        raise EinshardError(
            f"libtpu does not know the slice '{name}'",
            facts={'libtpu says': str(error).splitlines()[0], **_known()},
        ) from None
    return device_mesh(description.devices)


def _check_name(name: str) -> None:
    """Raises for invalid names: the errors of libtpu use its internal names."""
    if _GPU.search(name):
        raise EinshardError(
            f"'{name}' is not a TPU slice: topology() knows only TPUs",
            facts={
                'on these GPUs': 'leave out mesh=, or mesh=jax.devices()',
                'elsewhere': 'simulate as many CPU devices: same layouts, '
                'mostly the same collectives',
            },
        )
    found = _NAME.fullmatch(name)
    generation = found['generation'] if found else ''
    if found is None or generation not in _GENERATIONS:
        what = (
            f"'{generation}' is not a TPU generation"
            if found
            else f"'{name}' is not a valid topology name"
        )
        raise EinshardError(what, facts=_known())
    sizes = found['sizes'].split('x')
    if any(int(size) == 0 for size in sizes):  # libtpu would divide by zero
        raise EinshardError(f"'{name}' has no chips", facts=_known())
    n_dims, dims = _GENERATIONS[generation], len(sizes)
    if dims == 1 or any(int(size) > 1 for size in sizes[n_dims:]):
        raise EinshardError(
            f"'{name}' has {plural(dims, 'dimension')}, but {generation} slices have {n_dims}",
            facts=_known(),
        )


def _known() -> dict[str, str]:
    two = [name for name, n_dims in _GENERATIONS.items() if n_dims == 2]
    three = [name for name, n_dims in _GENERATIONS.items() if n_dims == 3]
    return {
        '2 dimensions': f"{', '.join(two)}; for example 'v5e:4x4'",
        '3 dimensions': f"{', '.join(three)}; for example 'v5p:2x2x2'",
    }


def _has_tpu() -> bool:
    """Whether this machine has TPUs, by their device files."""
    vfio = Path('/dev/vfio')
    return Path('/dev/accel0').exists() or (
        vfio.is_dir() and any(entry.name.isdecimal() for entry in vfio.iterdir())
    )
