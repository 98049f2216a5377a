"""The options that commands share, and what they stand for."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Lowered, Traced

from .._errors import EinshardError
from .._explain.frameworks import is_jitted
from .._sharding.mesh import AnyMesh, device_mesh
from .arguments import abstract_mesh, read_arguments

ARGUMENT_HELP = (
    "arguments of the call: 'f32[8,128]' for an array, a Python number, or module:name for a "
    'value, or for a function that returns one, or its shapes with shardings; module:name(8) calls '
    'it with 8; *module:name passes each value of a tuple, and name=... an argument by keyword'
)

# --- parsers ------------------------------------------------------------------------------------


def program() -> str:
    """Returns how the user started the command: 'einshard' or 'python -m einshard'."""
    is_script = Path(sys.argv[0]).stem == 'einshard'
    return 'einshard' if is_script else 'python -m einshard'


class Parser(argparse.ArgumentParser):
    """The parser of a command, and the options that several commands have."""

    def __init__(self, command: str, description: str, examples: str = ''):
        super().__init__(
            prog=f'{program()} {command}'.rstrip(),
            description=description,
            epilog=examples.replace('{prog}', program()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def option(self, name: str, metavar: str, text: str, **how: Any) -> None:
        self.add_argument(name, metavar=metavar, help=text, **how)

    def flag(self, name: str, text: str) -> None:
        self.add_argument(name, action='store_true', help=text)

    def add_mesh(self, noun: str = 'devices, which do not have to exist') -> None:
        group = self.add_mutually_exclusive_group()
        group.add_argument('--devices', type=positive_int, metavar='N', help=f'number of {noun}')
        text = f'a mesh of {noun}: its axes, slowest-varying first'
        group.add_argument('--mesh', type=mesh_axis, nargs='+', metavar='AXIS=SIZE', help=text)

    def add_args(self, text: str = ARGUMENT_HELP) -> None:
        self.option('--args', 'ARG', text, nargs='*', default=[])

    def add_json(self) -> None:
        self.flag('--json', 'print the result as JSON')

    def add_topology(self, text: str = 'devices such as v5e:4x4 or h100:4x8') -> None:
        self.option('--topology', 'NAME', text)

    def add_save(self) -> None:
        text = "also write the report to a file: '.html' for a web page, '.svg' for the timeline"
        self.option('--save', 'FILE', text, type=output_file)

    def add_function(self, has_topology: bool = True) -> None:
        """Adds a function, its arguments and what it is compiled for."""
        self.add_mesh('simulated CPU devices')
        self.add_argument('function', metavar='module:function')
        self.add_args()
        self.add_json()
        self.set_defaults(topology=None)
        if has_topology:
            text = 'compile for devices such as v5e:4x4 or h100:4x8; --mesh then names their axes'
            self.add_topology(text)
        text = 'the chip that lower bounds on time are for, such as H100'
        self.option('--chip', 'NAME', text)


# --- values of options --------------------------------------------------------------------------


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive integer')
    return int(text)


def mesh_axis(text: str) -> tuple[str, int]:
    """Reads a mesh axis: ('data', 4) for 'data=4'."""
    name, _, size = text.partition('=')
    if not name or not size.isdecimal() or int(size) == 0:
        several = re.fullmatch(r'\w+=[1-9]\d*([ ,]+\w+=[1-9]\d*)+', text)
        hint = (
            f'write --mesh {re.sub("[ ,]+", " ", text)}'
            if several
            else 'put other arguments before it'
        )
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a mesh axis with its size, such as data=4 ({hint})'
        )
    return name, int(size)


def output_file(text: str) -> str:
    """Checks that the directory of a file exists, before anything is compiled."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f'{text!r} is a directory')
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f'the directory of {text!r} does not exist')
    return text


def package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- what commands do with them -----------------------------------------------------------------


def read_call(
    command: Any, function: Any, mesh: AnyMesh | None, options: argparse.Namespace
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Returns a function and its arguments.

    Binds keyword arguments of the function that have the names of options of the command.
    """
    args, kwargs = read_arguments(options.args, mesh, enter=names_mesh(options))
    names = inspect.signature(command).parameters
    bound = {name: value for name, value in kwargs.items() if name in names}
    others = {name: value for name, value in kwargs.items() if name not in names}
    return functools.partial(function, **bound) if bound else function, args, others


@contextmanager
def mesh_for(
    function: Any, mesh: AnyMesh | None, options: argparse.Namespace
) -> Generator[AnyMesh | None]:
    """Returns the `mesh=` with which a function is called. Enters the mesh for a jitted function.

    A jitted function takes no `mesh=`: its shardings, its arguments or the mesh in context say
    where it runs. --devices only simulates devices, so that the module can make a mesh of them.
    """
    if isinstance(function, functools.partial):
        function = function.func
    has_mesh = getattr(function, 'has_mesh', None)  # None if the function is not `sharded`
    is_stage = isinstance(function, Traced | Lowered | Compiled)
    option = '--topology' if options.topology is not None else '--mesh'
    if (is_stage or has_mesh) and names_mesh(options):
        raise EinshardError(
            f'{getattr(options, "function", None) or options.what} has its own mesh, so {option} '
            'cannot be given',
            code='command',
            facts={'instead': 'omit it; --devices N simulates N devices'},
        )
    if is_stage or has_mesh:
        yield None
    elif has_mesh is None and is_jitted(function):
        with (
            jax.set_mesh(mesh) if names_mesh(options) and isinstance(mesh, Mesh) else nullcontext()
        ):
            yield None
    else:
        yield mesh


def names_mesh(options: argparse.Namespace) -> bool:
    """Whether the options name a mesh. --devices only simulates devices."""
    return options.topology is not None or options.mesh is not None


def abstract_mesh_of(options: argparse.Namespace) -> AbstractMesh | None:
    if options.devices is not None:
        return device_mesh(abstract_mesh([('d0', options.devices)]))
    return None if options.mesh is None else abstract_mesh(options.mesh)


def text_of(found: Any, options: argparse.Namespace) -> str:
    """Returns a result as text, or as JSON with --json."""
    return json.dumps(found.to_dict(), indent=2) if options.json else str(found)


def save_report(report: Any, options: argparse.Namespace) -> None:
    if options.save is not None:
        with writing(options.save):
            report.save(options.save)


@contextmanager
def writing(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(f"'{path}'", error) from None


def cannot_write(what: str, error: OSError) -> EinshardError:
    return EinshardError(f'cannot write {what}: {error.strerror}', code='command')
