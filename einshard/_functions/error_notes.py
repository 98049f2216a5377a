"""Notes on errors that JAX raises while it traces a function with specs.

The exception stays JAX's. A note (`add_note`) adds what the specs know; JAX's traceback filtering
keeps it.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from .._errors import EinshardError, quoted
from .._notation.expression import ELLIPSIS, Expression
from .._notation.layout import axis_positions
from .._sharding.context import Context
from .._sharding.leaf_spec import as_leaf_spec
from .._sharding.mesh import AnyMesh, is_device_mesh, spec_axes
from .._sharding.resolve import resolve
from .._text import short_source
from .._trees.paths import path_text
from .._trees.specs import leaf_specs
from .value_spec import ValueSpec

_JAX = frozenset({'jax', 'jaxlib', 'opt_einsum'})  # jnp.einsum checks sizes in opt_einsum
_OURS = __name__.split('.')[0]
_LIBRARIES = tuple(f'{sysconfig.get_path(name)}{os.sep}' for name in ('purelib', 'stdlib'))
_PREFIX = 'einshard: '

# A frame, and the number of the line that it runs.
_Frame: TypeAlias = tuple[FrameType, int]


class ErrorNotes:
    """Adds a note to JAX's errors about shardings and shapes that leave the `with` block.

    Nothing is computed unless an error is raised.
    """

    def __init__(
        self, function: str, arguments: Sequence[ValueSpec], values: Sequence[Any], context: Context
    ):
        self._function = function
        self._arguments = arguments
        self._values = values
        self._context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, traceback: Any) -> None:
        noted = [note for note in getattr(error, '__notes__', ()) if note.startswith(_PREFIX)]
        if error is None or noted:  # by a sharded function that this one calls
            return
        with suppress(Exception):  # a failure here must not hide the error
            note = self._note(error, [*walk_tb(traceback)])
            if note:
                error.add_note(_PREFIX + note)

    def _note(self, error: BaseException, frames: Sequence[_Frame]) -> str | None:
        leaves = _leaves(self._arguments, self._values, self._context)
        if is_sharding_type_error(error):
            mesh = self._context.lowering_mesh
            return _sharding_note(self._function, error, frames, leaves, mesh)
        if type(error) in (TypeError, ValueError) and _package(frames[-1]) in _JAX:
            sizes = '; '.join(_sizes_that_differ(leaves, str(error)))
            return sizes and f'in the specs of {self._function}, {sizes}'
        return None


def is_sharding_type_error(error: BaseException) -> bool:
    """Whether it is JAX's error about explicit mesh axes, whose class is private."""
    kind = type(error)
    return kind.__name__ == 'ShardingTypeError' and kind.__module__.split('.')[0] == 'jax'


class _Leaf(NamedTuple):
    """A leaf of an argument, its name ("w" or "params/w"), and its expression if it has one."""

    name: str
    value: Any
    expression: Expression | None

    @property
    def axes(self) -> dict[str, int]:
        """The axes that the expression names, and their positions."""
        if self.expression is None:
            return {}
        found = axis_positions(self.expression, len(self.value.shape))
        return {name: i for name, i in found.items() if name != ELLIPSIS}


def _leaves(
    arguments: Sequence[ValueSpec], values: Sequence[Any], context: Context
) -> Iterator[_Leaf]:
    for argument, value in zip(arguments, values, strict=True):
        leaves = jtu.tree_leaves_with_path(value)
        specs = leaf_specs(value, [leaf for _, leaf in leaves], argument.spec, context.mesh)
        for (path, leaf), spec in zip(leaves, specs, strict=True):
            expression = None
            # a PartitionSpec names no array axes
            if spec is not None and as_leaf_spec(spec).partition is None:
                expression = resolve(spec, leaf.shape, context).expression
            yield _Leaf(f'{argument.name}/{path_text(path)}'.rstrip('/'), leaf, expression)


def _package(frame: _Frame) -> str:
    return frame[0].f_globals.get('__name__', '').split('.')[0]


def _is_library(frame: _Frame) -> bool:
    """Whether a frame is of an installed package, or of code that beartype generates."""
    return frame[0].f_code.co_filename.startswith((*_LIBRARIES, '<@'))


def _sharding_note(
    function: str,
    error: BaseException,
    frames: Sequence[_Frame],
    leaves: Iterator[_Leaf],
    mesh: AnyMesh,
) -> str:
    """The line, the operands and their axes, and two ways to fix an error of explicit axes."""
    facts: dict[str, str] = {}
    outside = [i for i, frame in enumerate(frames) if _package(frame) not in {*_JAX, _OURS}]
    users = [i for i in outside if not _is_library(frames[i])]
    if users:
        facts['line'] = _line(frames[users[-1]])
    if outside and outside[-1:] != users[-1:]:
        facts['which calls' if users else 'line'] = _line(frames[outside[-1]])
    operands = _operands(frames[outside[-1] + 1 :] if outside else ())
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    mesh = next((one for one in meshes if one.axis_names), mesh)
    concerned = _axes_in_message(str(error), mesh)
    by_id = {id(leaf.value): leaf for leaf in leaves}
    for i, operand in enumerate(operands[:_MOST_OPERANDS]):
        text = _operand_text(operand, by_id.get(id(operand)), concerned)
        facts[f'operand {i}' if len(operands) > 1 else 'operand'] = text
    facts['try'] = next(fix for part, fix in _FIXES.items() if part in str(error))
    facts['or Auto axes'] = _auto_mesh(mesh)
    sentence = f'JAX cannot infer a sharding in {function}, because the mesh axes are Explicit'
    return str(EinshardError(sentence, facts=facts))


_MOST_OPERANDS = 4


def _line(frame: _Frame) -> str:
    file, number = frame[0].f_code.co_filename, frame[1]
    source = linecache.getline(file, number, frame[0].f_globals).strip()
    return ': '.join(filter(None, [short_source(f'{file}:{number}'), source]))


def _operands(frames: Sequence[_Frame]) -> list[Any]:
    """The traced arguments of the outermost of these frames that has any."""
    for frame, _ in frames:
        arguments = [frame.f_locals[name] for name in _parameters(frame.f_code)]
        found = {id(x): x for x in jtu.tree_leaves(arguments) if isinstance(x, Tracer)}
        if found:
            return [*found.values()]
    return []


def _parameters(code: CodeType) -> tuple[str, ...]:
    variadic = bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + variadic]


def _axes_in_message(message: str, mesh: AnyMesh) -> set[str]:
    """The mesh axes in a message of JAX; all of them if it names none."""
    message = re.sub(r'AbstractMesh\(.*?axis_types=\(.*?\).*?\)', '', message)
    names = {str(name) for name in mesh.axis_names}
    found = {a for a in names if re.search(rf"""[@'"(,]{re.escape(a)}['"),\]]""", message)}
    return found or names


def _operand_text(operand: Any, leaf: _Leaf | None, concerned: set[str]) -> str:
    """float32[128@tensor,16], parameter 'w': axis 'y' is sharded over 'tensor'"""
    aval: Any = jax.typeof(operand)
    names = {i: f"'{name}'" for name, i in leaf.axes.items()} if leaf else {}
    axes = [
        f'axis {names.get(i, i)} is sharded over {quoted(entry)}'
        for i, entry in enumerate(spec_axes(aval.sharding.spec))
        if concerned.intersection(entry)
    ]
    parameter = f", parameter '{leaf.name}'" if leaf else ''
    return f'{aval}{parameter}{": " if axes else ""}{", ".join(axes)}'


# What to write, by a part of JAX's message; the first that matches.
_FIXES = {
    '.get(out_sharding': 'table.at[index].get(out_sharding=make_sharding(expression))',
    '.set/add': 'table.at[index].set(values, out_sharding=make_sharding(expression))',
    'Contracting': 'out_sharding=make_sharding(expression), or einshard.einsum',
    'out_sharding': 'out_sharding=make_sharding(expression)',
    '': 'einshard(operand, expression), to reshard an operand first',
}


def _auto_mesh(mesh: AnyMesh) -> str:
    if is_device_mesh(mesh):
        return 'device_mesh()'
    sizes, names = tuple(mesh.axis_sizes), tuple(mesh.axis_names)
    types = f'(jax.sharding.AxisType.Auto,) * {len(names)}'
    return f'jax.make_mesh({sizes}, {names}, axis_types={types})'


def _sizes_that_differ(leaves: Iterator[_Leaf], message: str) -> Iterator[str]:
    """Axis names with different sizes, both of which the message of JAX has.

    Names are local to an expression, so different sizes alone do not mean an error. Leaves of one
    parameter that share an expression, as under `Rules`, are not compared with each other.
    """
    named: dict[str, dict[tuple[str, str], tuple[int, str]]] = {}
    mixed: set[tuple[str, tuple[str, str]]] = set()
    for leaf in leaves:
        for axis, i in leaf.axes.items():
            spec = leaf.name.split('/')[0], str(leaf.expression)
            size, known = leaf.value.shape[i], named.setdefault(axis, {})
            if known.setdefault(spec, (size, leaf.name))[0] != size:
                mixed.add((axis, spec))
    in_message = {*map(int, re.findall(r'\b\d+\b', message))}
    for axis, known in named.items():
        first: dict[int, str] = {}
        for spec, (size, name) in known.items():
            if size in in_message and (axis, spec) not in mixed:
                first.setdefault(size, f"{size} in '{name}'")
        if len(first) > 1:
            sizes = ' and '.join(first.values()).replace('in', 'in parameter', 1)
            yield f"axis '{axis}' is {sizes}"
