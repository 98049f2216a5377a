"""Reads command-line arguments: arrays, values from modules, and meshes."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ._errors import EinshardError, plural
from ._inspect.lowered import check_arguments
from ._sharding.mesh import AnyMesh, device_mesh
from ._sharding.topology import topology
from ._text import name_of

# this many simulated devices take 2 GB and 12 s to start; 4 times as many take more than 100 s
_MAX_SIMULATED = 16_384
_ARRAY = re.compile(r'(\w+)\[([\d,\s]*)\]')
_KEYWORD = re.compile(r'([^\W\d]\w*)=(.*)', re.DOTALL)
_SHORT_DTYPE = re.compile(r'^(bf|f|i|u|c)(?=\d+$)|^pred$')
_DTYPES = {'bf': 'bfloat', 'f': 'float', 'i': 'int', 'u': 'uint', 'c': 'complex', 'pred': 'bool'}


def read_arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Reads arguments such as 'f32[8]' and 'rate=0.1' into positional and keyword arguments."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        if keyword := _KEYWORD.fullmatch(text):
            kwargs[keyword[1]] = _read_argument(keyword[2])
        else:
            args.append(_read_argument(text))
    return args, kwargs


def _read_argument(text: str) -> Any:
    if array := _ARRAY.fullmatch(text.strip()):
        sizes = tuple(int(size) for size in array[2].split(',') if size.strip())
        return jax.ShapeDtypeStruct(sizes, _dtype(array[1], text))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if ':' not in text:
        raise EinshardError(
            f"'{text}' is not a valid argument",
            facts={'arrays': "'f32[8,128]'", 'values': '0.1, True, module:name'},
        )
    value = load(text)
    return result_shapes(value, (), {}) if is_plain_function(value) else value


def is_plain_function(value: Any) -> bool:
    """Whether a value is a function, and not a callable pytree, such as a module of Equinox."""
    return callable(value) and jtu.all_leaves([value])


def _dtype(name: str, text: str) -> Any:
    try:
        return np.dtype(jnp.dtype(_SHORT_DTYPE.sub(lambda match: _DTYPES[match[0]], name)))
    except TypeError:
        raise EinshardError(
            f"'{name}' in '{text}' is not a JAX dtype",
            facts={
                'dtypes': 'bf16, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, c64, pred, '
                'or the full names, such as float32'
            },
        ) from None


def result_shapes(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Like `jax.eval_shape`, but traces only the arguments that are ShapeDtypeStructs."""
    check_arguments(function, name_of(function), args, kwargs)
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}

    def call(arrays: Mapping[int, Any]) -> Any:
        args, kwargs = treedef.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    return jax.eval_shape(call, arrays)


def load(text: str) -> Any:
    """Imports a module and returns one of its attributes: `model.step` for 'model:step'."""
    module_name, _, path = text.partition(':')
    if not (module_name and path):
        raise EinshardError(
            f"'{text}' does not have the form module:name", facts={'example': 'model:step'}
        )
    value: Any = _import(module_name)
    names = path.split('.')
    for i, name in enumerate(names):
        if not hasattr(value, name):
            owner = '.'.join(names[:i]) or 'module'
            raise EinshardError(
                f"module '{module_name}' has no '{path}'",
                facts={f'{owner} has': ', '.join(_names_in(value, module_name)[:20]) or 'none'},
            )
        value = getattr(value, name)
    return value


def _import(name: str) -> ModuleType:
    if name.startswith('.'):
        raise EinshardError(
            f"'{name}' is a relative import; use the full name of the module",
            facts={'example': 'package.model:step'},
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # the module exists, but an import in it fails: show the traceback
        if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):
            raise
        raise EinshardError(
            f"no module named '{error.name}'",
            facts={'searched': 'the current folder and sys.path'},
        ) from None


def _names_in(owner: Any, module_name: str) -> list[str]:
    """Lists the public attributes of `owner`. Omits imported ones unless all are imported."""

    def is_imported(value: Any) -> bool:
        if inspect.isroutine(value) or inspect.isclass(value) or hasattr(value, '__wrapped__'):
            return getattr(value, '__module__', module_name) != module_name
        return inspect.ismodule(value)

    values = dict(vars(owner if isinstance(owner, ModuleType | type) else type(owner)))
    values |= getattr(owner, '__dict__', {})
    names = sorted(name for name in values if not name.startswith('_'))
    return [name for name in names if not is_imported(values[name])] or names


def abstract_mesh(axes: Sequence[tuple[str, int]]) -> AbstractMesh:
    names, sizes = zip(*axes, strict=True)
    for name in names:
        if names.count(name) > 1:
            raise EinshardError(f"--mesh lists axis '{name}' more than once")
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes))


def mesh_of(
    n_devices: int | None, axes: Sequence[tuple[str, int]] | None, topology_name: str | None
) -> AnyMesh | None:
    """Builds the mesh for --devices, --mesh and --topology.

    Returns None if no option is given. Simulates the devices unless --topology is given.
    """
    requested = None if axes is None else abstract_mesh(axes)
    n_devices = n_devices if requested is None else requested.size
    if topology_name is not None:
        if requested is None and n_devices is not None:
            raise EinshardError('--topology and --devices cannot be combined')
        mesh = topology(topology_name)
    elif n_devices is not None:
        mesh = device_mesh(_simulate_devices(n_devices))
    else:
        return None
    if requested is None:
        return mesh
    if requested.size != mesh.size:
        raise EinshardError(
            f'--mesh has {requested.size} devices, but {topology_name} has {mesh.size}'
        )
    grid = mesh.devices.reshape(requested.axis_sizes)
    return Mesh(grid, requested.axis_names, axis_types=requested.axis_types)


def _simulate_devices(n_devices: int) -> list[Any]:
    if n_devices > _MAX_SIMULATED:
        raise EinshardError(
            f'cannot simulate {n_devices} devices',
            facts={'at most': _MAX_SIMULATED},
        )
    flags = os.environ.get('XLA_FLAGS', '')
    os.environ['XLA_FLAGS'] = f'{flags} --xla_force_host_platform_device_count={n_devices}'
    jax.config.update('jax_platforms', 'cpu')
    devices = jax.devices('cpu')
    if len(devices) < n_devices:
        raise EinshardError(
            f'JAX has already started with {plural(len(devices), "CPU device")}, '
            f'so {n_devices} devices cannot be simulated'
        )
    return devices[:n_devices]
