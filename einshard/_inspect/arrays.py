"""The arguments and results of a compiled program, with the user's names."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding, Sharding
from jax.stages import Compiled

from .._hlo.module import Module
from .._notation.expression import ELLIPSIS, axis_letters
from .._sharding.describe import Description, describe, describe_named
from .._sharding.leaf_spec import AnySpec, as_leaf_spec
from .._trees.paths import path_text
from .lowered import Stages
from .oversized import Oversized
from .report_rows import ArrayRow

_NOT_USED = Description('not used')


@dataclass(frozen=True)
class ProgramArray:
    """An argument leaf or result leaf of a program."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None  # None if the program does not use the array
    names: tuple[str, ...] | None  # the axis names, or None if unknown


def find_arguments(
    stages: Stages,
    compiled: Compiled | Oversized,
    shardings: Sequence[Sharding | None],
    module: Module,
) -> list[ProgramArray]:
    """Returns all argument leaves. Those that the program does not use have None in `shardings`."""
    leaves = jtu.tree_leaves_with_path(compiled.args_info)
    specs = stages.argument_specs() or [None] * len(leaves)
    names = stages.argument_names
    if names is None:
        names = _names_in_program([path for path, _ in leaves], shardings, module)
        # if an argument is a `jax.Ref`, JAX names the parameters Arg_0, Arg_1, ..
        if any(name.startswith('Arg_') for name in names.values()):
            # static parameters, which `args_info` omits, shift the positions
            is_shifted = len(stages.parameters) != len(compiled.args_info[0])
            names = {} if is_shifted else dict(enumerate(stages.parameters))
    return [
        _make_array(argument_path(path, names), leaf, sharding, spec)
        for (path, leaf), sharding, spec in zip(leaves, shardings, specs, strict=True)
    ]


def find_results(stages: Stages, out_info: Any) -> list[ProgramArray]:
    leaves = jtu.tree_leaves_with_path(out_info)
    specs = stages.result_specs(out_info) or [None] * len(leaves)
    return [
        _make_array(result_path(path), leaf, leaf.sharding, spec)
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    ]


def _make_array(
    path: str, leaf: Any, sharding: Sharding | None, spec: AnySpec | None
) -> ProgramArray:
    shape = tuple(leaf.shape)
    return ProgramArray(path, shape, leaf.dtype, sharding, _axis_names(spec, len(shape)))


def argument_path(path: Sequence[Any], names: Mapping[int, str]) -> str:
    """Formats a key path of (args, kwargs): 'params/w', or 'args[0]/w' for an unnamed argument."""
    container, key, *rest = path
    by_keyword = container.idx == 1
    name = str(key.key) if by_keyword else names.get(key.idx, f'args[{key.idx}]')
    return '/'.join(filter(None, (name, path_text(rest))))


def result_path(path: Sequence[Any]) -> str:
    """Formats 'result/0/w', or 'result' for a single array."""
    return '/'.join(filter(None, ('result', path_text(path))))


def _names_in_program(
    paths: Sequence[Sequence[Any]], shardings: Sequence[Sharding | None], module: Module
) -> dict[int, str]:
    """Reads the names of positional arguments, by position, from the program's parameters."""
    parameters = module.entry.parameters()
    in_program = {op.parameter_number: re.split(r'[\[.]', op.op_name)[0] for op in parameters}
    used = [path for path, s in zip(paths, shardings, strict=True) if s is not None]
    names = {path[1].idx: in_program.get(i, '') for i, path in enumerate(used) if path[0].idx == 0}
    # JAX gives all values of *args the same name, 'args': leave them without a name
    counts = Counter(names.values())
    return {i: name for i, name in names.items() if name and counts[name] == 1}


def _axis_names(spec: AnySpec | None, ndim: int) -> tuple[str, ...] | None:
    """Returns the axis names in `spec`, with unused letters for the axes of '...'.

    Returns None if '...' is the only name.
    """
    if spec is None:
        return None
    names = as_leaf_spec(spec).expression.names
    if names == (ELLIPSIS,):
        return None
    if ELLIPSIS not in names:
        return names
    at = names.index(ELLIPSIS)
    free = (letter for letter in axis_letters() if letter not in names)
    between = itertools.islice(free, ndim - len(names) + 1)
    return (*names[:at], *between, *names[at + 1 :])


def array_row(array: ProgramArray) -> ArrayRow:
    sharding, shape = array.sharding, array.shape
    shard_shape = shape if sharding is None else sharding.shard_shape(shape)
    is_partial_sum = isinstance(sharding, NamedSharding) and bool(sharding.spec.unreduced)
    return ArrayRow(
        path=array.path,
        shape=shape,
        dtype=str(array.dtype),
        placement=_placement(array),
        bytes=0 if sharding is None else math.prod(shard_shape) * array.dtype.itemsize,
        sharded=is_partial_sum or shard_shape != shape,
    )


def _placement(array: ProgramArray) -> str:
    if array.sharding is None:
        return _NOT_USED
    if isinstance(array.sharding, NamedSharding):
        return describe_named(array.sharding, len(array.shape), array.names)
    return describe(array.sharding)


def results_in_place(
    arguments: Sequence[ArrayRow], results: Sequence[ArrayRow], module: Module
) -> tuple[tuple[str, str], ...]:
    """Returns (result path, argument path) for each result that reuses a donated argument's memory.

    Includes only pairs with the same shape, dtype and placement.
    """
    inputs = [row for row in arguments if row.placement != _NOT_USED]
    pairs = [
        (results[output], inputs[parameter])
        for output, parameter in module.aliases.items()
        if output < len(results) and parameter < len(inputs)
    ]
    return tuple((a.path, b.path) for a, b in pairs if replace(a, path=b.path) == b)
