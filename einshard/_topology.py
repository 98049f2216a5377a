"""TPU slices without a TPU: the mesh of a slice by its name, from the compiler that libtpu is."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ._cache import cached
from ._errors import EinshardError, plural
from ._mesh import device_mesh

# The dimensions of a slice by generation; v5e and v6e are tori of two dimensions, the others of
# three. 'v4 lite' is v4i.
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

# What libtpu asks the machine for, in vain where it is no part of a TPU. Without these it waits
# for a metadata server, writes of its failure to standard error, and locks out other processes.
_WITHOUT_TPU = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def topology(name: str, *, n_slices: int = 1) -> Mesh:
    """The one mesh of a slice of TPUs that need not be there: to compile for it, and explain.

        >>> mesh = topology('v5e:4x4')
        >>> mesh.size, mesh.devices.flat[0].device_kind
        (16, 'TPU v5 lite')

    The devices can be lowered and compiled for, but hold no arrays. On a machine with TPUs it is
    the same; on one without, the variables of the environment that libtpu looks for are set where
    they are not set yet.

    Args:
        name: generation and chips along each dimension, as in 'v5e:4x4' or 'v5p:2x2x2'. Chips of
            v2, v3, v4 and tpu7x may be two devices each.
        n_slices: how many such slices, joined by the data centre's network: the slowest mesh axes.

    Returns:
        The mesh that `device_mesh` makes of those devices; the same object each time.

    Raises:
        EinshardError: libtpu is not installed, or knows no such slice.
    """
    if not isinstance(name, str):
        raise EinshardError(
            f'the name of a topology is a string, not {name!r}', facts={'as in': "'v5e:4x4'"}
        )
    if not isinstance(n_slices, int) or isinstance(n_slices, bool) or n_slices < 1:
        raise EinshardError(f'n_slices= is a positive number, not {n_slices!r}')
    return _topology(name, n_slices)


@cached
def _topology(name: str, n_slices: int) -> Mesh:
    _check_name(name)
    if importlib.util.find_spec('libtpu') is None:
        raise EinshardError(
            'to describe TPUs and to compile for them takes libtpu, which is not installed',
            facts={'topology': f"'{name}'", 'install': 'pip install libtpu'},
        )
    if not _has_tpu():
        for variable, value in _WITHOUT_TPU.items():
            os.environ.setdefault(variable, value)
    # not at import: it loads what only this function needs
    from jax.experimental.topologies import get_topology_desc

    slices: dict[str, Any] = {'num_slices': n_slices} if n_slices > 1 else {}
    try:
        description = get_topology_desc(name, 'tpu', **slices)
    except jax.errors.JaxRuntimeError as error:
        raise EinshardError(
            f"libtpu has no slice '{name}'",
            facts={'libtpu says': str(error).splitlines()[0], **_known()},
        ) from None
    return device_mesh(description.devices)


def _check_name(name: str) -> None:
    """Raises for names of nothing, where the answer of libtpu would be its own names for things."""
    if _GPU.search(name):
        raise EinshardError(
            f"'{name}' is no slice of TPUs: JAX describes GPUs by those that are there, "
            'not by a name',
            facts={
                'on such GPUs': 'mesh=jax.devices(), or leave it out',
                'elsewhere': 'as many simulated CPU devices have the same layouts, and mostly the '
                'same collectives',
            },
        )
    found = _NAME.fullmatch(name)
    generation = found['generation'] if found else ''
    if found is None or generation not in _GENERATIONS:
        what = f"no TPU is called '{generation}'" if found else f"'{name}' is no name of a topology"
        raise EinshardError(what, facts=_known())
    sizes = found['sizes'].split('x')
    if any(int(size) == 0 for size in sizes):  # by which libtpu divides
        raise EinshardError(f"'{name}' has no chips", facts=_known())
    n_dims, dims = _GENERATIONS[generation], len(sizes)
    if dims == 1 or any(int(size) > 1 for size in sizes[n_dims:]):
        raise EinshardError(
            f"'{name}' has {plural(dims, 'dimension')}, and a slice of {generation} has {n_dims}",
            facts=_known(),
        )


def _known() -> dict[str, str]:
    two = [name for name, n_dims in _GENERATIONS.items() if n_dims == 2]
    three = [name for name, n_dims in _GENERATIONS.items() if n_dims == 3]
    return {
        'in 2 dimensions': f"{', '.join(two)}, as in 'v5e:4x4'",
        'in 3 dimensions': f"{', '.join(three)}, as in 'v5p:2x2x2'",
    }


def _has_tpu() -> bool:
    """Whether this machine is part of a TPU, which its kernel shows as devices."""
    vfio = Path('/dev/vfio')
    return Path('/dev/accel0').exists() or (
        vfio.is_dir() and any(entry.name.isdecimal() for entry in vfio.iterdir())
    )
