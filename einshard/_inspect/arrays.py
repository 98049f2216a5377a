"""The arguments and results of a compiled program, with the user's names."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ProgramArray:
    """An argument or a result."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None  # None: the program does not use it
    names: tuple[str, ...] | None  # the axis names of its spec; None if it has none


def find_arguments(
    stages: Stages,
    compiled: Compiled | Oversized,
    shardings: Sequence[Sharding | None],
    module: Module,
) -> list[ProgramArray]:
    leaves = jtu.tree_leaves_with_path(compiled.args_info)
    specs = stages.argument_specs() or [None] * len(leaves)
    labels = stages.labels or _labels([path for path, _ in leaves], shardings, module)
    labels = _signature_labels(labels, len(compiled.args_info[0]), stages.parameters)
    return [
        ProgramArray(
            '/'.join(filter(None, (_label(path, labels), path_text(path[2:])))),
            tuple(leaf.shape),
            leaf.dtype,
            sharding,
            _names(spec, len(leaf.shape)),
        )
        for (path, leaf), sharding, spec in zip(leaves, shardings, specs, strict=True)
    ]


def find_results(stages: Stages, results: Any) -> list[ProgramArray]:
    leaves = jtu.tree_leaves_with_path(results)
    specs = stages.result_specs(results) or [None] * len(leaves)
    return [
        ProgramArray(
            '/'.join(filter(None, ('result', path_text(path)))),
            tuple(leaf.shape),
            leaf.dtype,
            leaf.sharding,
            _names(spec, len(leaf.shape)),
        )
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    ]


def _label(path: Sequence[Any], labels: Mapping[Any, str]) -> str:
    """Labels an argument by its parameter name, or as args[i]."""
    by_keyword = path[0].idx == 1
    if by_keyword:
        return str(path[1].key)
    return labels.get(path[1].idx, f'args[{path[1].idx}]')


def _labels(
    paths: Sequence[Sequence[Any]], shardings: Sequence[Sharding | None], module: Module
) -> dict[int, str]:
    """Finds parameter names by position, from the input names in the program.

    The program does not name arguments that it does not use.
    """
    parameters = module.entry.parameters()
    names = {op.parameter_number: re.split(r'[\[.]', op.op_name)[0] for op in parameters}
    used = [path for path, s in zip(paths, shardings, strict=True) if s is not None]
    labels = {path[1].idx: names.get(i, '') for i, path in enumerate(used) if path[0].idx == 0}
    named = [label for label in labels.values() if label]
    # all values of *args have the name 'args'
    return {i: label for i, label in labels.items() if label and named.count(label) == 1}


def _signature_labels(
    labels: Mapping[int, str], n_positions: int, parameters: Sequence[str]
) -> Mapping[int, str]:
    """Returns names from the signature if JAX has only Arg_0, .., as with a `jax.Ref`."""
    if not any(label.startswith('Arg_') for label in labels.values()):
        return labels
    # with static parameters, the numbers differ
    return dict(enumerate(parameters if len(parameters) == n_positions else ()))


def _names(spec: AnySpec | None, n_dims: int) -> tuple[str, ...] | None:
    """Returns the axis names of an array; axes in '...' get unused letters."""
    if spec is None:
        return None
    names = as_leaf_spec(spec).expression.names
    if ELLIPSIS not in names:
        return names
    if len(names) == 1:
        return None
    at = names.index(ELLIPSIS)
    free = (letter for letter in axis_letters() if letter not in names)
    between = itertools.islice(free, n_dims - len(names) + 1)
    return (*names[:at], *between, *names[at + 1 :])


def array_row(array: ProgramArray) -> ArrayRow:
    sharding, shape = array.sharding, array.shape
    shard_shape = shape if sharding is None else sharding.shard_shape(shape)
    is_term = isinstance(sharding, NamedSharding) and bool(sharding.spec.unreduced)
    return ArrayRow(
        path=array.path,
        shape=shape,
        dtype=str(array.dtype),
        placement=_placement(array),
        bytes=0 if sharding is None else math.prod(shard_shape) * array.dtype.itemsize,
        sharded=is_term or shard_shape != shape,
    )


def _placement(array: ProgramArray) -> str:
    if array.sharding is None:
        return Description('not used')
    if isinstance(array.sharding, NamedSharding):
        return describe_named(array.sharding, len(array.shape), array.names)
    return describe(array.sharding)
