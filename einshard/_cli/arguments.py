"""Reads command-line arguments: arrays, values from modules, and meshes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .._errors import EinshardError, plural, quoted
from .._explain.call_checks import check_arguments
from .._notation.counts import prime_factors
from .._sharding.mesh import AnyMesh, device_mesh
from .._sharding.topology import topology
from .._text import name_of

# this many simulated devices take 2 GB and 12 s to start; 4 times as many take more than 100 s
_MAX_SIMULATED = 16_384
_MAX_ELEMENTS = 2**58
_ARRAY = re.compile(r'(\w+)\[([\d,\s]*)\]')
_KEYWORD = re.compile(r'([^\W\d]\w*)=(.*)', re.DOTALL)
_SHORT_DTYPE = re.compile(r'^(bf|f|i|u|c)(?=\d+$)|^pred$')
# parameters of functions that are options of the command with the same name
_OPTIONS = 'chip|compilations|devices|memory|mesh|objective|pin|program|runs|seconds|shape|tries'
_CALL = re.compile(r'([^()]+)\((.+)\)')  # 'model:tokens(64)'
_DTYPES = {'bf': 'bfloat', 'f': 'float', 'i': 'int', 'u': 'uint', 'c': 'complex', 'pred': 'bool'}


def read_arguments(
    texts: Sequence[str], mesh: AnyMesh | None = None, enter: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Reads arguments such as 'f32[8]' and 'rate=0.1' into positional and keyword arguments.

    '*model:shapes' is each value of a tuple, 'model:tokens(64)' the result of a call.
    A function in `texts` is given the mesh if it has a parameter `mesh`. It runs inside of
    `jax.set_mesh(mesh)` if `enter`.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        if text.startswith('*'):
            values = _read_argument(text[1:], mesh, enter)
            if not isinstance(values, tuple | list):
                kind = type(values).__name__
                raise EinshardError(f"'{text}' is not a tuple, but {kind}", code='command')
            args += values
        elif keyword := _KEYWORD.fullmatch(text):
            kwargs[keyword[1]] = _read_argument(keyword[2], mesh, enter)
        else:
            args.append(_read_argument(text, mesh, enter))
    return args, kwargs


def _read_argument(text: str, mesh: AnyMesh | None, enter: bool) -> Any:
    if array := _ARRAY.fullmatch(text.strip()):
        sizes = tuple(int(size) for size in array[2].split(',') if size.strip())
        if math.prod(sizes) >= _MAX_ELEMENTS:  # XLA counts elements and bytes in 64 bits
            raise EinshardError(
                f"'{text}' has too many elements", code='array', facts={'at most': '2^58'}
            )
        return jax.ShapeDtypeStruct(sizes, _dtype(array[1], text))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if ':' not in text:
        raise EinshardError(
            f"'{text}' is not a valid argument",
            code='command',
            facts={'arrays': "'f32[8,128]'", 'values': '0.1, True, module:name'},
        )
    if call := _CALL.fullmatch(text):
        try:
            values = ast.literal_eval(f'({call[2]},)')
        except (ValueError, SyntaxError):
            raise EinshardError(
                f"'{call[2]}' in '{text}' are not numbers or strings", code='command'
            ) from None
        function = load(call[1])
        if not callable(function):
            kind = type(function).__name__
            raise EinshardError(f"'{call[1]}' is not a function, but {kind}", code='command')
        try:
            inspect.signature(function).bind_partial(*values)
        except ValueError:  # some callables of C have no signature
            pass
        except TypeError as error:
            raise EinshardError(
                f"'{call[1]}' cannot be called with ({call[2]}): {error}", code='command'
            ) from None
        return call_with_mesh(functools.partial(function, *values), text, mesh, enter)
    value = load(text)
    return call_with_mesh(value, text, mesh, enter) if is_plain_function(value) else value


def call_with_mesh(value: Any, text: str, mesh: AnyMesh | None, enter: bool = False) -> Any:
    """Calls a function that the user names `text`, with the mesh if it has a parameter for it."""
    kwargs: dict[str, Any] = {}
    if _needs_mesh(value):
        if mesh is None:
            names = _axes_looked_up(value, abstract_mesh([('_', 8)]), enter=False)
            options = f'{_mesh_option(names)} or --topology v5e:4x4 {_mesh_option(names, 16)}'
            raise EinshardError(
                f"{text} has a parameter 'mesh', so the command needs a mesh",
                code='command',
                facts={'looked up': quoted(names), 'options': options}
                if names
                else {'options': '--mesh data=4 tp=2, --topology v5e:4x4 or --devices 8'},
            )
        kwargs = {'mesh': mesh}
    try:
        return _call_on(value, mesh, kwargs, enter)
    except (EinshardError, KeyError, ValueError) as error:
        names = _axes_looked_up(value, mesh, enter) if mesh is not None and kwargs else None
        if not names:
            raise
        raise EinshardError(
            f'{text} looks up mesh axes that the mesh does not have',
            code='mesh',
            facts={'looked up': quoted(names), 'example': _mesh_option(names)},
        ) from error


def _call_on(function: Any, mesh: AnyMesh | None, kwargs: Mapping[str, Any], enter: bool) -> Any:
    with jax.set_mesh(mesh) if enter and isinstance(mesh, Mesh) else nullcontext():
        return result_shapes(function, (), kwargs, mesh)


_LOOKED_UP = re.compile(r"""axis:? '?([^\W\d]\w*)'?|^'([^\W\d]\w*)'$""")


def _axes_looked_up(function: Any, mesh: AnyMesh, enter: bool) -> dict[str, int] | None:
    """Returns the mesh axes that a function looks up, with example sizes for which it runs.

    Calls the function with a mesh of the names so far, as long as its errors name another one.
    """
    names: dict[str, int] = {}
    while True:
        if names:
            names = dict(zip(names, _example_sizes(mesh.size, len(names)), strict=True))
        named: AnyMesh = abstract_mesh([*names.items()] or [('_', mesh.size)])
        if isinstance(mesh, Mesh):
            grid = mesh.devices.reshape(named.axis_sizes)
            named = Mesh(grid, named.axis_names, axis_types=named.axis_types)
        try:
            _call_on(function, named, {'mesh': named}, enter)
        except Exception as error:  # the function may raise anything
            found = _LOOKED_UP.search(str(error))
            name = found and (found[1] or found[2])
            if name is None or name in names:
                return None
            names[name] = 1
        else:
            return names


def _mesh_option(names: Mapping[str, int] | None, n_devices: int | None = None) -> str:
    sizes = [*(names or {}).values()]
    if n_devices is not None:
        sizes = _example_sizes(n_devices, len(sizes))
    return f'--mesh {" ".join(f"{n}={size}" for n, size in zip(names or (), sizes, strict=True))}'


def _example_sizes(n: int, n_axes: int) -> list[int]:
    """Returns sizes whose product is n, about equal; the first ones are larger."""
    sizes = [1] * n_axes
    for factor in sorted(prime_factors(n), reverse=True):
        sizes[sizes.index(min(sizes))] *= factor
    return sorted(sizes, reverse=True)


def _needs_mesh(function: Any) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get('mesh')
    except (TypeError, ValueError):  # some callables of C have no signature
        return False
    return parameter is not None and parameter.default is parameter.empty


def replicated(tree: Any, mesh: AnyMesh) -> Any:
    """Gives each shape without a sharding that of an array that is replicated over the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> Any:
        is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
        return leaf.update(sharding=sharding) if is_struct and leaf.sharding is None else leaf

    return jtu.tree_map(placed, tree)


def zeros(tree: Any) -> Any:
    """Returns arrays of zeros in place of shapes, with their shardings."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise EinshardError(
                'profile makes arrays of zeros, but an argument is a PRNG key',
                code='command',
                facts={'instead': 'make the key in the function, from a number'},
            )
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    return jtu.tree_map(made, tree)


def is_spec_function(value: Any) -> bool:
    """Whether a function takes (path, leaf), as Rules do."""
    try:
        inspect.signature(value).bind('path', None)
    except (TypeError, ValueError):
        return False
    return True


def is_plain_function(value: Any) -> bool:
    """Whether a value is a function, and not a callable pytree, such as a module of Equinox."""
    return callable(value) and jtu.all_leaves([value])


def _dtype(name: str, text: str) -> Any:
    try:
        return np.dtype(jnp.dtype(_SHORT_DTYPE.sub(lambda match: _DTYPES[match[0]], name)))
    except TypeError:
        raise EinshardError(
            f"'{name}' in '{text}' is not a JAX dtype",
            code='array',
            facts={
                'dtypes': 'bf16, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, c64, pred, '
                'or the full names, such as float32'
            },
        ) from None


def result_shapes(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: AnyMesh | None = None
) -> Any:
    """Returns the result of a function, with a ShapeDtypeStruct in place of each array.

    Traces only the arguments that are ShapeDtypeStructs. ShapeDtypeStructs in the result stay as
    they are, and so do other values that are not arrays, such as activation functions. An array
    that a constraint, `device_put` or `out_shardings` places keeps its sharding, which
    `jax.eval_shape` drops.
    """
    check_arguments(function, name_of(function), args, kwargs)
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}
    results: list[Any] = []

    def call(arrays: Mapping[int, Any]) -> list[Any]:
        args, kwargs = treedef.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        leaves_of_result, tree = jtu.tree_flatten(function(*args, **kwargs))
        results[:] = tree, leaves_of_result
        return [leaf for leaf in leaves_of_result if _is_array(leaf)]

    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(arrays)
    traced = iter(zip(_shardings_of(jaxpr.jaxpr), shapes, strict=True))
    tree, structs = results
    for i, struct in enumerate(structs):
        if isinstance(struct, jax.ShapeDtypeStruct):
            structs[i] = _placed(struct, struct.sharding, mesh)
        elif _is_array(struct):
            sharding, shape = next(traced)
            structs[i] = _placed(shape, sharding, mesh)
    return tree.unflatten(structs)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | complex | float | int)


def _placed(
    shape: jax.ShapeDtypeStruct, sharding: Sharding | None, mesh: AnyMesh | None
) -> jax.ShapeDtypeStruct:
    """Gives a shape a sharding, on the devices of `mesh` if it names only their axes."""
    if not isinstance(sharding, NamedSharding):
        return shape
    if isinstance(mesh, Mesh) and sharding.mesh == mesh.abstract_mesh:
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _shardings_of(jaxpr: Any) -> list[Sharding | None]:
    """Returns the shardings that the equations of the results of a jaxpr give them."""
    equations = {id(var): (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)}
    return [_sharding_by(*equations.get(id(var), (None, 0))) for var in jaxpr.outvars]


def _sharding_by(eqn: Any, i: int) -> Sharding | None:
    match eqn and eqn.primitive.name:
        case 'sharding_constraint':
            return eqn.params['sharding']
        case 'reshard':
            return eqn.params['dst_sharding']
        case 'device_put':
            return eqn.params['devices'][i]
        case 'jit':
            sharding = eqn.params['out_shardings'][i]
            # of a type of its own if unspecified
            is_given = isinstance(sharding, Sharding)
            return sharding if is_given else _shardings_of(eqn.params['jaxpr'].jaxpr)[i]
        case _:
            return None


def load(text: str) -> Any:
    """Imports a module and returns one of its attributes: `model.step` for 'model:step'."""
    module_name, _, path = text.partition(':')
    if not (module_name and path):
        raise EinshardError(
            f"'{text}' does not have the form module:name",
            code='command',
            facts={'example': 'model:step'},
        )
    value: Any = _import(module_name)
    names = path.split('.')
    for i, name in enumerate(names):
        if not hasattr(value, name):
            owner = '.'.join(names[:i]) or 'module'
            raise EinshardError(
                f"module '{module_name}' has no '{path}'",
                code='missing',
                facts={f'{owner} has': ', '.join(_names_in(value, module_name)[:20]) or 'none'},
            )
        value = getattr(value, name)
    return value


def _import(name: str) -> ModuleType:
    if name.startswith('.'):
        raise EinshardError(
            f"'{name}' is a relative import; use the full name of the module",
            code='command',
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
            code='missing',
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
            raise EinshardError(f"--mesh lists axis '{name}' more than once", code='mesh')
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
            raise EinshardError('--topology and --devices cannot be combined', code='command')
        mesh = topology(topology_name)
    elif n_devices is not None:
        mesh = device_mesh(_simulate_devices(n_devices))
    else:
        return None
    if requested is None:
        return mesh
    if requested.size != mesh.size:
        raise EinshardError(
            f'--mesh has {requested.size} devices, but {topology_name} has {mesh.size}',
            code='device-count',
        )
    grid = mesh.devices.reshape(requested.axis_sizes)
    return Mesh(grid, requested.axis_names, axis_types=requested.axis_types)


def with_options(error: EinshardError, typed: Sequence[str]) -> EinshardError:
    """Names options of the command in place of parameters of functions: --chip for 'chip='."""
    mesh = next((option for option in ('--topology', '--mesh', '--devices') if option in typed), '')

    def reworded(text: str) -> str:
        text = re.sub(r"mesh=topology\('([^']*)'\)", r'--topology \1', text)
        text = re.sub(
            r"XLA_FLAGS='--xla_force_host_platform_device_count=(\d+)'", r'--devices \1', text
        )
        text = re.sub(r'shape=\(([\d, ]*)\)', lambda m: f'--shape {m[1].replace(",", "")}', text)
        text = re.sub(
            r'mesh=device_mesh\(devices, ([^()]*)\)',
            lambda m: f'--mesh {m[1].replace(",", "")}',
            text,
        )
        text = text.replace("mesh=mesh or 'with jax.set_mesh(mesh):'", '--mesh AXIS=SIZE')
        if re.search(r'\w\(', text):  # Python code
            return text
        text = re.sub(r'\bmesh=(?! from sharded)(?=\W|$)', mesh or '--mesh', text)
        return re.sub(
            rf"\b({_OPTIONS})=(?:'([^']*)'|(?=\W|$))",
            lambda m: f'--{m[1]}' if m[2] is None else f'--{m[1]} {shlex.quote(m[2])}',
            text,
        )

    facts = {reworded(label): reworded(fact) for label, fact in error.facts.items()}
    facts.pop('other chips', None)  # those that Python code describes
    parts = error.parts(sentence=reworded(error.sentence), facts=facts)
    if 'on the command line' in facts:  # the same as this, in Python
        facts.pop('expected', None)
        parts['fix'] = None
    return type(error)(**parts)


def _simulate_devices(n_devices: int) -> list[Any]:
    if n_devices > _MAX_SIMULATED:
        raise EinshardError(
            f'cannot simulate {n_devices} devices',
            code='device-count',
            facts={'at most': _MAX_SIMULATED},
        )
    flags = os.environ.get('XLA_FLAGS', '')
    os.environ['XLA_FLAGS'] = f'{flags} --xla_force_host_platform_device_count={n_devices}'
    jax.config.update('jax_platforms', 'cpu')
    devices = jax.devices('cpu')
    if len(devices) < n_devices:
        raise EinshardError(
            f'JAX has already started with {plural(len(devices), "CPU device")}, '
            f'so {n_devices} devices cannot be simulated',
            code='device-count',
        )
    return devices[:n_devices]
