"""Builds the mesh of a TPU slice or a GPU cluster from its name, without a TPU or a GPU."""

from __future__ import annotations

import warnings
from typing import Any, cast

import jax
from jax.sharding import AxisType, Mesh

from .._cache import cached
from .._errors import EinshardError, public
from .._text import first_line
from .cuda_plugin import describe_gpus
from .gpu_names import gpu_forms, is_gpu_name, read_gpu_name
from .libtpu import describe_slice, has_libtpu
from .mesh import device_mesh, named_mesh, types_text
from .tpu_names import check_size, known_names, not_offered, split_slices, topology_name
from .tracing import user_stacklevel


@public
def topology(
    name: str, *, n_slices: int = 1, axis_types: AxisType | None = None, **axes: int
) -> Mesh:
    """Returns the mesh of a TPU slice or a GPU cluster you don't have, to compile ahead of time.

        >>> from einshard import topology
        >>> mesh = topology('v5e:4x4', data=4, tensor=4)
        >>> mesh.axis_names, mesh.devices.flat[0].device_kind
        (('data', 'tensor'), 'TPU v5 lite')

    Pass the mesh to `explain` or `assert_collectives` as `mesh=`. Programs can be lowered and
    compiled for its devices, but these cannot hold arrays, and nothing runs there: under
    `jax.set_mesh` of this mesh, also no eager operation of JAX, such as `jnp.ones(8)`.

    TPUs need libtpu. GPUs need JAX's CUDA plugin and a PTX compiler: the extra
    `gpu`, `jax[cuda12]` or `jax[cuda13]`. The first topology of GPUs in a process
    compiles a small program in another process, to see whether the compiler works.

    Args:
        name: one of

            - TPU generation and chips along each dimension, such as 'v5e:4x4' or 'v5p:2x2x2'. A
              chip of v2, v3, v4 or tpu7x may have two devices. '2*v5e:4x4' is two slices.
            - a Cloud accelerator type with its default shape, such as 'v5litepod-16' (16 chips,
              v5e:4x4) or 'v5p-128' (128 TensorCores, 64 chips, v5p:4x4x4).
            - GPU, NVLink domains and GPUs in each: 'h100:4x8' is four machines with eight H100s;
              'h100:8' is one. 'gb200:2x72' is two racks with hosts of 4. Without NVLink, a domain
              is a host, as in 'rtx6000pro:8'. The error of `topology('gpu')` lists the GPUs.
        n_slices: number of TPU slices, connected by the data center network. The devices of a
            slice are consecutive, so the first mesh axis crosses slices. With GPUs, the name has
            the number of NVLink domains; their devices are consecutive, too.
        axis_types: the type of every mesh axis, as in `device_mesh`.
        axes: the mesh axes and their sizes, as in `device_mesh`. Default: the canonical mesh.

    Returns:
        The mesh. Equal calls return the same object. A shape that Google Cloud does not offer gives
        a warning.

    Raises:
        EinshardError: the name is not valid, there are more than 65,536 chips, what compiles for it
            is not installed, or the sizes do not use all devices. The error lists valid names and
            sizes.
    """
    if not isinstance(name, str):
        raise EinshardError(
            f'the name of a topology must be a string, not {name!r}',
            code='topology',
            facts={'example': "topology('v5e:4x4')"},
        )
    if not isinstance(n_slices, int) or isinstance(n_slices, bool) or n_slices < 1:
        raise EinshardError(
            f'n_slices= must be a positive integer, not {n_slices!r}', code='topology'
        )
    count, one = split_slices(name)
    if count > 1 and n_slices > 1:
        raise EinshardError(
            f"'{name}' has the number of slices, and so has n_slices={n_slices}",
            code='topology',
            fix=f"topology('{one}', n_slices={n_slices})",
        )
    name, n_slices = one, max(count, n_slices)
    if is_gpu_name(name):
        mesh = _gpu_mesh(name, n_slices)
    else:
        converted = topology_name(name)
        check_size(name, converted, n_slices)
        mesh = _topology(converted, n_slices)
        if warning := not_offered(converted):
            warnings.warn(warning, stacklevel=user_stacklevel())
    if axis_types is not None:
        mesh = device_mesh(mesh, axis_types=axis_types)
    call = f"topology('{name}', " + (f'n_slices={n_slices}, ' if n_slices > 1 else '')
    call += types_text(axis_types)
    return cast(Mesh, named_mesh(mesh, axes, call)) if axes else mesh


@cached
def _gpu_mesh(name: str, n_slices: int) -> Mesh:
    gpu, sizes = read_gpu_name(name)
    if n_slices > 1:
        kind, _, shape = name.rpartition(':')
        fix = f"topology('{kind}:{n_slices}x{shape}')" if 'x' not in shape else None
        raise EinshardError(
            'n_slices= is for TPUs; with GPUs, the name has the number of NVLink domains',
            code='topology',
            facts=gpu_forms(),
            fix=fix,
        )
    return device_mesh(describe_gpus(gpu, sizes))


@cached
def _topology(name: str, n_slices: int) -> Mesh:
    if not has_libtpu():
        raise EinshardError(
            'topology() needs libtpu, which is not installed',
            code='not-installed',
            facts={'topology': f"'{name}'", 'install': "pip install 'jax[tpu]'"},
        )
    slices: dict[str, Any] = {'num_slices': n_slices} if n_slices > 1 else {}
    try:
        description = describe_slice(name, **slices)
    except jax.errors.JaxRuntimeError as error:
        raise EinshardError(
            f"libtpu does not know the slice '{name}'",
            code='topology',
            facts={'libtpu says': first_line(error), **known_names()},
        ) from None
    return device_mesh(description.devices)
