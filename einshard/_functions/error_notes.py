"""Adds notes to errors that JAX raises while it traces a function.

Users can still catch JAX's own exception, and JAX's traceback filtering keeps the notes. They say
what JAX does not: which parameters have the sizes that do not match, that arrays are global where a
collective has no axis, and how to write the sharding that JAX asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, NamedTuple

from .._errors import EinshardError
from .._notation.expression import ELLIPSIS, Expression
from .._notation.layout import axis_positions
from .._sharding.context import Context
from .._sharding.leaf_spec import as_leaf_spec
from .._sharding.resolve import resolve
from .._trees.paths import leaves_with_paths
from .._trees.specs import leaf_specs
from .value_spec import ValueSpec


@dataclass
class ErrorNotes:
    """In a `with` block, adds a note to an error of JAX in a function with specs."""

    function: str
    arguments: Sequence[ValueSpec]
    values: Sequence[Any]
    context: Context

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            note_error(self.function, error)
            with suppress(Exception):  # a failure here must not hide the error
                sizes = '; '.join(sizes_that_differ(self._leaves(), str(error)))
                if sizes and is_jax_error(error):
                    _add_note(error, f'in the specs of {self.function}, {sizes}')

    def _leaves(self) -> Iterator[SpecLeaf]:
        for argument, value in zip(self.arguments, self.values, strict=True):
            leaves = leaves_with_paths(value)
            specs = leaf_specs(value, [x for _, x in leaves], argument.spec, self.context.mesh)
            for (path, leaf), spec in zip(leaves, specs, strict=True):
                expression = None
                # PartitionSpecs and NamedShardings name no array axes
                if spec is not None and as_leaf_spec(spec).partition is None:
                    expression = resolve(spec, leaf.shape, self.context).expression
                yield SpecLeaf(argument.leaf_name(path), leaf, expression)


def note_error(function: str, error: BaseException) -> None:
    """Adds a note to an error of JAX, if there is something to say without the specs."""
    if facts := sharding_facts(error):
        sentence = f'JAX cannot infer a sharding in {function}, because the mesh axes are Explicit'
    elif axis := unbound_axis(error):
        sentence = (
            f"{function} calls a collective over '{axis}', but no jax.shard_map or per_device "
            'around the call has this axis'
        )
        facts = {
            'without it': 'arrays are global, so x.mean(0) and x.sum(0) are over all devices',
            'instead': 'per_device, whose function sees the shards of one device',
        }
    else:
        return
    _add_note(error, str(EinshardError(sentence, code='tracing', facts=facts)))


def sharding_facts(error: BaseException) -> dict[str, str]:
    """Returns what to write where JAX cannot infer a sharding; empty for other errors."""
    # for scans over a sharded axis, and for jnp.repeat, JAX raises ValueErrors
    texts = 'all xs should be replicated', '`out_sharding` parameter'
    is_value_error = type(error) is ValueError and any(text in str(error) for text in texts)
    if not (is_value_error or is_sharding_type_error(error)):
        return {}
    return {
        'try': 'einshard(operand, expression) before the operation, or '
        'out_sharding=make_sharding(expression) where JAX has this option',
        'with Auto axes': 'jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)',
    }


def _add_note(error: BaseException, note: str) -> None:
    # a sharded function that was called inside may have added one
    if not any(n.startswith('einshard: ') for n in getattr(error, '__notes__', ())):
        error.add_note(f'einshard: {note}')


def unbound_axis(error: BaseException) -> str | None:
    """Returns the axis of JAX's NameError about a collective over an unknown axis, or None."""
    match = re.search(r'unbound axis name: ([^\s,.]+)', str(error))
    return match[1] if match and type(error) is NameError else None


def is_sharding_type_error(error: BaseException) -> bool:
    # JAX's class is private
    cls = type(error)
    return cls.__name__ == 'ShardingTypeError' and cls.__module__.split('.')[0] == 'jax'


def is_jax_error(error: BaseException) -> bool:
    """Whether `error` is a TypeError or ValueError that JAX raised."""
    *_, (innermost, _) = walk_tb(error.__traceback__)
    package = innermost.f_globals.get('__name__', '').split('.')[0]
    # jnp.einsum checks sizes in opt_einsum
    return type(error) in (TypeError, ValueError) and package in ('jax', 'jaxlib', 'opt_einsum')


class SpecLeaf(NamedTuple):
    """A leaf of an argument, with its spec."""

    name: str  # such as 'w' or 'params/w'
    value: Any
    expression: Expression | None  # None unless the spec is an expression


def sizes_that_differ(leaves: Iterable[SpecLeaf], message: str) -> Iterator[str]:
    """Yields sentences such as "axis 'x' has size 6 in parameter 'x' and 8 in 'w'".

    Compares only sizes that JAX's `message` contains, because in a valid program, two expressions
    may use one name for axes of different sizes. Skips leaves of one parameter
    with the same expression if the axis has different sizes in them, as in a list of layers.
    """
    groups: dict[tuple[str, str, str], dict[int, str]] = {}  # {group: {size: first leaf}}
    for name, value, expression in leaves:
        positions = axis_positions(expression, len(value.shape)) if expression else {}
        for axis, i in positions.items():
            group = axis, name.split('/')[0], str(expression)
            if axis != ELLIPSIS:
                groups.setdefault(group, {}).setdefault(value.shape[i], name)
    in_message = {*map(int, re.findall(r'\b\d+\b', message))}
    by_axis: dict[str, dict[int, str]] = {}
    for (axis, *_), sizes in groups.items():
        (size, name), *others = sizes.items()
        if size in in_message and not others:
            by_axis.setdefault(axis, {}).setdefault(size, name)
    for axis, names in by_axis.items():
        (size, name), *others = names.items()
        if others:
            rest = ''.join(f" and {size} in '{name}'" for size, name in others)
            yield f"axis '{axis}' has size {size} in parameter '{name}'{rest}"
