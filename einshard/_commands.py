"""python -m einshard explain and table: functions and rules of modules, on the command line."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
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

from ._errors import EinshardError
from ._mesh import AnyMesh, device_mesh
from ._parameters import name_of
from ._reports.explain import explain
from ._reports.lowered import check_arguments
from ._rules import Rules
from ._topology import topology

_EXPLAIN_EXAMPLES = """\
examples:
  python -m einshard explain model:layer --args 'f32[8,128]' 'f32[128,512]' --devices 8
  python -m einshard explain model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
  python -m einshard explain model:step --args model:init_state lr=0.1 --mesh data=4 tp=2 --json
"""
_TABLE_EXAMPLES = """\
examples:
  python -m einshard table model:rules model:init_params --devices 8
  python -m einshard table model:rules model:init_params --args 'u32[2]' --mesh data=4 tp=2
"""
_ARGUMENT = (
    "what it is called with: arrays as 'f32[8,128]', Python's numbers, module:name for a value or "
    'for a function whose result it is, and name=... by keyword'
)
_DTYPES = {
    'bf16': 'bfloat16',
    'f16': 'float16',
    'f32': 'float32',
    'f64': 'float64',
    'i8': 'int8',
    'i16': 'int16',
    'i32': 'int32',
    'i64': 'int64',
    'u8': 'uint8',
    'u16': 'uint16',
    'u32': 'uint32',
    'u64': 'uint64',
    'c64': 'complex64',
    'pred': 'bool',
}


def mesh_axis(text: str) -> tuple[str, int]:
    """'data=4' -> ('data', 4)"""
    name, _, size = text.partition('=')
    if not name or not size.isdecimal() or int(size) == 0:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a mesh axis with its size, as in data=4 '
            '(the expression goes before --mesh)'
        )
    return name, int(size)


def abstract_mesh(axes: Sequence[tuple[str, int]]) -> AbstractMesh:
    """The mesh of --mesh, without devices."""
    names = [name for name, _ in axes]
    again = sorted({name for name in names if names.count(name) > 1})
    if again:
        raise EinshardError(f"--mesh gives the axis '{again[0]}' more than once")
    sizes = tuple(size for _, size in axes)
    return AbstractMesh(sizes, tuple(names), axis_types=(AxisType.Auto,) * len(axes))


def run_explain(arguments: Sequence[str]) -> str:
    """What `python -m einshard explain ...` prints."""
    parser = _parser('explain', 'Shows what the compiler made of a function.', _EXPLAIN_EXAMPLES)
    parser.add_argument('function', metavar='module:function')
    parser.add_argument('--args', nargs='*', default=[], metavar='ARG', help=_ARGUMENT)
    parser.add_argument('--json', action='store_true', help='the report as JSON')
    _add_devices(parser, simulated=True)
    parser.add_argument(
        '--topology', metavar='NAME', help='compiles for a slice of TPUs, as in v5e:4x4'
    )
    options = parser.parse_args(arguments)
    mesh = _mesh(options)
    function = _load(options.function)
    args, kwargs = _read_arguments(options.args)
    report = explain(function, *args, mesh=mesh, **kwargs)
    return json.dumps(report.to_dict(), indent=2) if options.json else str(report)


def run_table(arguments: Sequence[str]) -> str:
    """What `python -m einshard table ...` prints."""
    parser = _parser('table', 'Shows what rules make of the arrays of a model.', _TABLE_EXAMPLES)
    parser.add_argument('rules', metavar='module:rules')
    parser.add_argument(
        'tree', metavar='module:init', help='a tree of arrays, or the function that makes it'
    )
    parser.add_argument('--args', nargs='*', default=[], metavar='ARG', help=_ARGUMENT)
    _add_devices(parser, simulated=False)
    options = parser.parse_args(arguments)
    rules, tree = _load(options.rules), _load(options.tree)
    if not isinstance(rules, Rules):
        raise EinshardError(f'{options.rules} is no Rules, but of type {type(rules).__name__}')
    args, kwargs = _read_arguments(options.args)
    if callable(tree):
        tree = _result_shapes(tree, args, kwargs)
    elif args or kwargs:
        kind = type(tree).__name__
        raise EinshardError(f'{options.tree} is of type {kind}, which takes no arguments')
    mesh = None if options.mesh is None else abstract_mesh(options.mesh)
    if options.devices is not None:
        mesh = device_mesh(AbstractMesh((options.devices,), ('d0',), axis_types=(AxisType.Auto,)))
    return str(rules.table(tree, mesh=mesh))


def _result_shapes(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The shapes that a function makes, which may depend on numbers among its arguments."""
    check_arguments(function, name_of(function), args, kwargs)
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}

    def call(arrays: Mapping[int, Any]) -> Any:
        args, kwargs = treedef.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    return jax.eval_shape(call, arrays)


def _parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f'python -m einshard {command}',
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_devices(parser: argparse.ArgumentParser, simulated: bool) -> None:
    devices = parser.add_mutually_exclusive_group()
    what = 'simulated CPU devices' if simulated else 'devices, which need not be there'
    devices.add_argument('--devices', type=_count, metavar='N', help=f'N {what}')
    devices.add_argument(
        '--mesh',
        type=mesh_axis,
        nargs='+',
        metavar='AXIS=SIZE',
        help=f'a mesh of {what} by its axes, slowest first'
        + ', or of those of --topology' * simulated,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'{text!r} is no number of devices')
    return int(text)


def _mesh(options: argparse.Namespace) -> AnyMesh | None:
    """The mesh that the options ask for; None for the devices that are there."""
    shape = None if options.mesh is None else abstract_mesh(options.mesh)
    if options.topology is not None:
        if options.devices is not None:
            raise EinshardError('--topology and --devices are two kinds of devices: give one')
        devices = list(topology(options.topology).devices.flat)
    elif shape is not None:
        devices = _simulated(shape.size)
    elif options.devices is not None:
        devices = _simulated(options.devices)
    else:
        return None
    in_order = device_mesh(devices)
    if shape is None:
        return in_order
    if shape.size != len(devices):
        raise EinshardError(
            f'--mesh has {shape.size} devices, but {options.topology} has {len(devices)}'
        )
    grid = in_order.devices.reshape(shape.axis_sizes)
    return Mesh(grid, shape.axis_names, axis_types=shape.axis_types)


def _simulated(n_devices: int) -> list[Any]:
    """CPU devices, as many as asked for; JAX must not have started."""
    flags = os.environ.get('XLA_FLAGS', '')
    os.environ['XLA_FLAGS'] = f'{flags} --xla_force_host_platform_device_count={n_devices}'
    jax.config.update('jax_platforms', 'cpu')
    devices = jax.devices('cpu')
    if len(devices) < n_devices:
        raise EinshardError(
            f'JAX has started with {len(devices)} CPU devices, and cannot simulate {n_devices} now'
        )
    return devices[:n_devices]


def _load(text: str) -> Any:
    """What module:name names."""
    module_name, colon, path = text.partition(':')
    if not (colon and module_name and path):
        raise EinshardError(
            f"'{text}' does not name something in a module", facts={'as in': 'model:step'}
        )
    found: Any = _import(module_name)
    for name in path.split('.'):
        if not hasattr(found, name):
            raise EinshardError(
                f"module '{module_name}' has no '{path}'",
                facts={'it has': ', '.join(_names_in(found, module_name)[:20]) or 'nothing'},
            )
        found = getattr(found, name)
    return found


def _names_in(found: Any, module_name: str) -> list[str]:
    """What a module or a class has of its own; what it imports, if that is all."""
    holder = found if isinstance(found, ModuleType | type) else type(found)
    values = vars(holder)
    names = sorted(name for name in values if not name.startswith('_'))
    return [name for name in names if not _is_imported(values[name], module_name)] or names


def _is_imported(value: Any, module_name: str) -> bool:
    if inspect.isroutine(value) or inspect.isclass(value) or hasattr(value, '__wrapped__'):
        return getattr(value, '__module__', module_name) != module_name
    return inspect.ismodule(value)


def _import(name: str) -> ModuleType:
    if name.startswith('.'):
        raise EinshardError(
            f"'{name}' is no module: its name starts with a dot, and there is no package around it",
            facts={'as in': 'package.model:step'},
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # one that the module itself imports, and that is missing, is the user's to see
        if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):
            raise
        raise EinshardError(
            f"there is no module '{error.name}' here",
            facts={'looked in': 'the current folder, and where Python looks for modules'},
        ) from None


_ARRAY = re.compile(r'(\w+)\[([\d,\s]*)\]')
_KEYWORD = re.compile(r'([^\W\d]\w*)=(.*)', re.DOTALL)


def _read_arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        keyword = _KEYWORD.fullmatch(text)
        if keyword:
            kwargs[keyword[1]] = _read_argument(keyword[2])
        else:
            args.append(_read_argument(text))
    return args, kwargs


def _read_argument(text: str) -> Any:
    array = _ARRAY.fullmatch(text.strip())
    if array:
        sizes = tuple(int(size) for size in array[2].split(',') if size.strip())
        return jax.ShapeDtypeStruct(sizes, _dtype(array[1], text))
    if ':' in text:
        value = _load(text)
        return _result_shapes(value, (), {}) if callable(value) else value
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise EinshardError(
            f"'{text}' is no argument",
            facts={'arrays': "'f32[8,128]'", 'values': '0.1, True, module:name'},
        ) from None


def _dtype(name: str, text: str) -> Any:
    try:
        return np.dtype(jnp.dtype(_DTYPES.get(name, name)))
    except TypeError:
        raise EinshardError(
            f"'{text}' has no dtype of JAX: '{name}'",
            facts={'dtypes': f'{", ".join(_DTYPES)}, or their long names, as in float32'},
        ) from None
