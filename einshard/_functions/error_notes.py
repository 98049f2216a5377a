"""Adds notes to errors that JAX raises while it traces a function with specs.

Users can still catch JAX's own exception, and JAX's traceback filtering keeps the notes.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from inspect import CO_VARARGS, CO_VARKEYWORDS
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
from .._sharding.mesh import AnyMesh, is_canonical_mesh, spec_axes
from .._sharding.resolve import resolve
from .._text import short_source
from .._trees.paths import leaves_with_paths, path_text
from .._trees.specs import leaf_specs
from .value_spec import ValueSpec

_JAX = frozenset({'jax', 'jaxlib', 'opt_einsum'})  # jnp.einsum checks sizes in opt_einsum
_OURS = __name__.split('.')[0]
_LIBRARIES = tuple(f'{sysconfig.get_path(name)}{os.sep}' for name in ('purelib', 'stdlib'))
_PREFIX = 'einshard: '

_MAX_OPERANDS = 4

_Frame: TypeAlias = tuple[FrameType, int]  # a frame and its current line


class ErrorNotes:
    """In a `with` block, adds a note to a JAX error about shardings or shapes."""

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
        if error is not None:
            with suppress(Exception):  # a failure here must not hide the error
                _add_note(error, self._note(error, [*walk_tb(traceback)]))

    def _note(self, error: BaseException, frames: Sequence[_Frame]) -> str | None:
        leaves = _leaves(self._arguments, self._values, self._context)
        if _is_about_sharding(error):
            facts = _sharding_facts(error, frames, leaves, self._context.lowering_mesh)
            return _sharding_note(self._function, facts)
        if is_jax_error(error):
            sizes = '; '.join(sizes_that_differ(leaves, str(error)))
            return sizes and f'in the specs of {self._function}, {sizes}'
        return _unbound_axis_note(self._function, error, frames)


def note_error(function: str, error: BaseException) -> None:
    """Adds a note to an error of JAX in a function without specs, if there is something to say."""
    with suppress(Exception):  # a failure here must not hide the error
        if facts := sharding_facts(error):
            _add_note(error, _sharding_note(function, facts))
        else:
            _add_note(error, _unbound_axis_note(function, error, [*walk_tb(error.__traceback__)]))


def sharding_facts(error: BaseException) -> dict[str, str]:
    """Returns the facts of the note on an error about Explicit mesh axes; empty for other errors.

    JAX may have removed its own frames from the traceback, and with them the operands.
    """
    with suppress(Exception):  # a failure here must not hide the error
        if _is_about_sharding(error):
            return _sharding_facts(error, [*walk_tb(error.__traceback__)], iter(()), None)
    return {}


def _add_note(error: BaseException, note: str | None) -> None:
    # a sharded function that was called inside may have added one
    if note and not any(n.startswith(_PREFIX) for n in getattr(error, '__notes__', ())):
        error.add_note(_PREFIX + note)


def unbound_axis(error: BaseException) -> str | None:
    """Returns the axis of JAX's NameError about a collective over an unknown axis, or None."""
    match = re.search(r'unbound axis name: ([^\s,.]+)', str(error))
    return match[1] if match and type(error) is NameError else None


def _unbound_axis_note(function: str, error: BaseException, frames: Sequence[_Frame]) -> str | None:
    axis = unbound_axis(error)
    if axis is None:
        return None
    *_, user_frame = (f for f in frames if _package(f) not in {*_JAX, _OURS} and not _is_library(f))
    sentence = (
        f"{function} calls a collective over '{axis}', but no jax.shard_map or per_device around "
        'the call has this axis'
    )
    facts = {
        'line': _source_line(user_frame),
        'without them': 'arrays are global, so x.mean(0) and x.sum(0) are over all devices',
        'instead': 'remove the call, or use per_device, whose function sees the shards of a device',
    }
    return str(EinshardError(sentence, code='tracing', facts=facts))


def is_sharding_type_error(error: BaseException) -> bool:
    # JAX's class is private
    cls = type(error)
    return cls.__name__ == 'ShardingTypeError' and cls.__module__.split('.')[0] == 'jax'


def is_jax_error(error: BaseException) -> bool:
    """Whether `error` is a TypeError or ValueError that JAX raised."""
    *_, innermost = walk_tb(error.__traceback__)
    return type(error) in (TypeError, ValueError) and _package(innermost) in _JAX


class SpecLeaf(NamedTuple):
    """A leaf of an argument, with its spec."""

    name: str  # such as 'w' or 'params/w'
    value: Any
    expression: Expression | None  # None unless the spec is an expression

    @property
    def axes(self) -> dict[str, int]:
        """The position of each named axis in the shape."""
        if self.expression is None:
            return {}
        positions = axis_positions(self.expression, len(self.value.shape))
        return {name: i for name, i in positions.items() if name != ELLIPSIS}


def _leaves(
    arguments: Sequence[ValueSpec], values: Sequence[Any], context: Context
) -> Iterator[SpecLeaf]:
    for argument, value in zip(arguments, values, strict=True):
        leaves = leaves_with_paths(value)
        specs = leaf_specs(value, [leaf for _, leaf in leaves], argument.spec, context.mesh)
        for (path, leaf), spec in zip(leaves, specs, strict=True):
            expression = None
            # PartitionSpecs and NamedShardings name no array axes
            if spec is not None and as_leaf_spec(spec).partition is None:
                expression = resolve(spec, leaf.shape, context).expression
            yield SpecLeaf(f'{argument.name}/{path_text(path)}'.rstrip('/'), leaf, expression)


def _package(frame: _Frame) -> str:
    return frame[0].f_globals.get('__name__', '').split('.')[0]


def _is_library(frame: _Frame) -> bool:
    return frame[0].f_code.co_filename.startswith((*_LIBRARIES, '<@'))  # '<@': made by beartype


def _is_about_sharding(error: BaseException) -> bool:
    # for scans over a sharded axis, and for jnp.repeat, JAX raises ValueErrors
    return is_sharding_type_error(error) or (
        type(error) is ValueError and any(text in str(error) for text in _VALUE_ERRORS)
    )


def _sharding_note(function: str, facts: dict[str, str]) -> str:
    sentence = f'JAX cannot infer a sharding in {function}, because the mesh axes are Explicit'
    return str(EinshardError(sentence, code='tracing', facts=facts))


def _sharding_facts(
    error: BaseException,
    frames: Sequence[_Frame],
    leaves: Iterator[SpecLeaf],
    mesh: AnyMesh | None,
) -> dict[str, str]:
    callers = [i for i, frame in enumerate(frames) if _package(frame) not in {*_JAX, _OURS}]
    user_frames = [i for i in callers if not _is_library(frames[i])]
    # the innermost user frame and, if it calls another library, the frame that calls JAX
    shown = dict.fromkeys([*user_frames[-1:], *callers[-1:]])
    labels = ('line', 'library line')
    facts = {label: _source_line(frames[i]) for label, i in zip(labels, shown, strict=False)}
    in_jax = frames[callers[-1] + 1 :] if callers else ()
    operands: list[Any] = []
    for frame, _ in in_jax:  # up to the outermost frame with traced arguments
        arguments = [frame.f_locals[name] for name in _parameters(frame.f_code)]
        tracers = {id(x): x for x in jtu.tree_leaves(arguments) if isinstance(x, Tracer)}
        if tracers:
            operands = [*tracers.values()]
            break
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    mesh = next((operand_mesh for operand_mesh in meshes if operand_mesh.axis_names), mesh)
    by_id = {id(leaf.value): leaf for leaf in leaves}
    mesh_axes = _axes_in_message(str(error), mesh) if mesh is not None else set[str]()
    for i, operand in enumerate(operands[:_MAX_OPERANDS]):
        text = _operand_text(operand, by_id.get(id(operand)), mesh_axes)
        facts[f'operand {i}' if len(operands) > 1 else 'operand'] = text
    facts['try'] = _fix(str(error), in_jax, user_frames[-1:] != callers[-1:])
    if mesh is not None:
        sizes, names = tuple(mesh.axis_sizes), tuple(mesh.axis_names)
        types = f'(jax.sharding.AxisType.Auto,) * {len(names)}'
        make_mesh = f'jax.make_mesh({sizes}, {names}, axis_types={types})'
        facts['with Auto axes'] = 'device_mesh()' if is_canonical_mesh(mesh) else make_mesh
    return facts


def _fix(message: str, in_jax: Sequence[_Frame], in_library: bool) -> str:
    """Returns what to write instead of the line that calls JAX.

    What JAX's message names may be inside a function: `jnp.take` indexes, for example.
    """
    if in_library:
        return _FIX_OF_CALL
    for frame, _ in in_jax if '.at[...]' in message else ():
        name = frame.f_code.co_name
        if frame.f_globals.get('__name__', '').endswith('.array_methods'):
            break  # x[i], x.at[i].add(...)
        if any(hasattr(public, name) for public in _PUBLIC):
            has_option = 'out_sharding' in _parameters(frame.f_code)
            return _FIXES['out_sharding'] if has_option else _FIX_OF_CALL
    return next(fix for text, fix in _FIXES.items() if text in message)


def _source_line(frame: _Frame) -> str:
    file, number = frame[0].f_code.co_filename, frame[1]
    source = linecache.getline(file, number, frame[0].f_globals).strip()
    return ': '.join(filter(None, [short_source(f'{file}:{number}'), source]))


def _parameters(code: CodeType) -> tuple[str, ...]:
    n_variadic = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + n_variadic]


def _axes_in_message(message: str, mesh: AnyMesh) -> set[str]:
    """Returns the mesh axes that JAX's message names, or all mesh axes if it names none."""
    message = re.sub(r'AbstractMesh\(.*?axis_types=\(.*?\).*?\)', '', message)
    names = {str(name) for name in mesh.axis_names}
    mentioned = {a for a in names if re.search(rf"""[@'"(,]{re.escape(a)}['"),\]]""", message)}
    return mentioned or names


def _operand_text(operand: Any, leaf: SpecLeaf | None, mesh_axes: set[str]) -> str:
    """Returns "float32[128@tensor,16], parameter 'w': axis 'y' is sharded over 'tensor'".

    Lists only the axes that are sharded over any of `mesh_axes`.
    """
    aval: Any = jax.typeof(operand)
    names = {i: f"'{name}'" for name, i in leaf.axes.items()} if leaf else {}
    axes = [
        f'axis {names.get(i, i)} is sharded over {quoted(entry)}'
        for i, entry in enumerate(spec_axes(aval.sharding.spec))
        if mesh_axes.intersection(entry)
    ]
    parameter = f", parameter '{leaf.name}'" if leaf else ''
    return f'{aval}{parameter}{": " if axes else ""}{", ".join(axes)}'


_RESHARD = 'einshard(operand, expression), to reshard an operand first'
_OUT_SHARDING = 'out_sharding=make_sharding(expression)'
# {substring of JAX's message: fix}; the first match applies
_FIXES = {
    '.get(out_sharding': f'table.at[index].get({_OUT_SHARDING})',
    '.set/add': f'table.at[index].set(values, {_OUT_SHARDING})',
    'Contracting': f'{_OUT_SHARDING}, or einshard.einsum',
    'out_sharding': f'{_OUT_SHARDING}, or {_RESHARD}',
    '': _RESHARD,
}
# for an operation inside a function of JAX or of a library
_FIX_OF_CALL = f'{_RESHARD}, or jax.sharding.auto_axes(function, {_OUT_SHARDING})'
_VALUE_ERRORS = ('all xs should be replicated', '`out_sharding` parameter')
_PUBLIC = (jax.numpy, jax.lax, jax.nn, jax.ops, jax.random)


def sizes_that_differ(leaves: Iterable[SpecLeaf], message: str) -> Iterator[str]:
    """Yields sentences such as "axis 'x' has size 6 in parameter 'x' and 8 in 'w'".

    Compares only sizes that JAX's `message` contains, because in a valid program, two expressions
    may use one name for axes of different sizes. Skips leaves of one parameter
    with the same expression if the axis has different sizes in them, as in a list of layers.
    """
    # {axis name: {(parameter, expression): (size, name) of the first leaf}}
    first_leaves: dict[str, dict[tuple[str, str], tuple[int, str]]] = {}
    differing: set[tuple[str, tuple[str, str]]] = set()
    for leaf in leaves:
        for axis, i in leaf.axes.items():
            source = leaf.name.split('/')[0], str(leaf.expression)
            size, by_source = leaf.value.shape[i], first_leaves.setdefault(axis, {})
            if by_source.setdefault(source, (size, leaf.name))[0] != size:
                differing.add((axis, source))
    in_message = {*map(int, re.findall(r'\b\d+\b', message))}
    for axis, by_source in first_leaves.items():
        names: dict[int, str] = {}  # keyed by size
        for source, (size, name) in by_source.items():
            if size in in_message and (axis, source) not in differing:
                names.setdefault(size, name)
        if len(names) > 1:
            (size, name), *others = names.items()
            rest = ''.join(f" and {size} in '{name}'" for size, name in others)
            yield f"axis '{axis}' has size {size} in parameter '{name}'{rest}"
