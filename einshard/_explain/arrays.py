"""The arguments and results of a compiled program, with the user's names."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, Sharding
from jax.stages import Compiled, Traced

from .._notation.expression import ELLIPSIS, axis_letters
from .._program.hlo.text import HloModule
from .._sharding.collective_axes import as_named_sharding
from .._sharding.describe import Description, describe, describe_named
from .._sharding.leaf_spec import AnySpec, as_leaf_spec, with_memory_kind
from .._sharding.mesh import AnyMesh
from .._trees.paths import argument_path, result_path
from .frameworks import equinox_path, framework_result_path, program_leaves
from .oversized import Oversized
from .report_rows import ArrayRow
from .stages import Stages

_NOT_USED = Description('not used')


@dataclass(frozen=True)
class ProgramArray:
    """An argument leaf or result leaf of a program."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None  # None if the program does not use the array
    names: tuple[str, ...] | None  # the axis names, or None if unknown
    is_on_host: bool = False  # if `sharding` does not say so


def find_arguments(
    stages: Stages,
    compiled: Compiled | Oversized,
    shardings: Sequence[Sharding | None],
    names: Mapping[int, str],
) -> list[ProgramArray]:
    """Returns all argument leaves. Those that the program does not use have None in `shardings`."""
    leaves = program_leaves(compiled.args_info)
    specs = stages.argument_specs() or [None] * len(leaves)
    paths = stages.paths
    if paths is None:
        is_equinox = stages.framework == 'equinox'
        format_path = equinox_path if is_equinox else functools.partial(argument_path, names=names)
        paths = [format_path(path) for path, _ in leaves]
    return [
        _make_array(path, leaf, sharding, spec)
        for path, (_, leaf), sharding, spec in zip(paths, leaves, shardings, specs, strict=True)
    ]


def find_results(stages: Stages, out_info: Any, names: Mapping[int, str]) -> list[ProgramArray]:
    leaves = program_leaves(out_info)
    specs = stages.result_specs(out_info) or [None] * len(leaves)
    paths = [result_path(path) for path, _ in leaves]
    if stages.framework is not None:
        paths = [framework_result_path(path, out_info, names) for path, _ in leaves]
    return [
        _make_array(path, leaf, leaf.sharding, spec)
        for path, (_, leaf), spec in zip(paths, leaves, specs, strict=True)
    ]


def with_memory(arrays: list[ProgramArray], variables: Sequence[Any]) -> list[ProgramArray]:
    """Finds arrays in host memory by the types of the program.

    JAX's described GPUs have no memories, so their compiled programs do not say it.
    """
    if len(variables) != len(arrays):
        return arrays
    return [
        replace(array, is_on_host=True)
        if array.sharding is not None
        and array.sharding.memory_kind is None
        and variable.aval.memory_space == jax.memory.Space.Host
        else array
        for array, variable in zip(arrays, variables, strict=True)
    ]


def _make_array(
    path: str, leaf: Any, sharding: Sharding | None, spec: AnySpec | None
) -> ProgramArray:
    shape = tuple(leaf.shape)
    memory = None if spec is None else as_leaf_spec(spec).memory_kind
    lacks_memory = sharding is not None and sharding.memory_kind is None
    is_on_host = lacks_memory and memory == 'pinned_host'
    return ProgramArray(
        path, shape, leaf.dtype, sharding, _axis_names(spec, len(shape)), is_on_host
    )


def find_names(
    stages: Stages,
    stage: Compiled | Oversized | Traced,
    shardings: Sequence[Sharding | None] = (),
    program: HloModule | None = None,
) -> Mapping[int, str]:
    """Returns the names of positional arguments, by position.

    `stage` has their paths. Without a trace, the names are those in the compiled `program`.
    """
    if stages.argument_names is not None:
        return stages.argument_names
    paths = [path for path, _ in jtu.tree_leaves_with_path(stage.args_info)]
    if stages.traced is not None:
        names = stages.traced.jaxpr.jaxpr.debug_info.arg_names
    else:  # the compiled program has only the arguments that it uses
        assert program is not None
        paths = [path for path, s in zip(paths, shardings, strict=True) if s is not None]
        # XLA combines the names of equal parameters: '(weights[1]:weights[0])'
        in_program = [op.op_name.lstrip('(') for op in program.parameters]
        names = [*in_program, *[''] * len(paths)][: len(paths)]
        # if an argument is a `jax.Ref`, JAX names the parameters Arg_0, Arg_1, ..
        if any(name.startswith('Arg_') for name in names):
            return {}
    found = {
        # JAX adds the keys of the leaf, of which strings have no mark in front
        path[1].idx: re.split(r'[\[.]', name.removesuffix(jtu.keystr(path[2:])))[0]
        for path, name in zip(paths, names, strict=True)
        if path[0].idx == 0
    }
    # JAX gives all values of *args the same name, 'args': leave them without a name
    counts = Counter(found.values())
    return {i: name for i, name in found.items() if name and counts[name] == 1}


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


def array_row(array: ProgramArray, meshes: Sequence[AnyMesh]) -> ArrayRow:
    sharding, shape = array.sharding, array.shape
    shard_shape = shape if sharding is None else sharding.shard_shape(shape)
    is_partial_sum = isinstance(sharding, NamedSharding) and bool(sharding.spec.unreduced)
    return ArrayRow(
        path=array.path,
        shape=shape,
        dtype=str(array.dtype),
        placement=with_memory_kind(
            _text(array, meshes), 'pinned_host' if array.is_on_host else None
        ),
        bytes=0 if sharding is None else math.prod(shard_shape) * array.dtype.itemsize,
        sharded=is_partial_sum or shard_shape != shape,
    )


def _text(array: ProgramArray, meshes: Sequence[AnyMesh]) -> str:
    sharding, ndim = array.sharding, len(array.shape)
    if sharding is None:
        return _NOT_USED
    if not isinstance(sharding, NamedSharding) and meshes:
        sharding = as_named_sharding(sharding, array.shape, meshes[0]) or sharding
    if isinstance(sharding, NamedSharding):
        return describe_named(sharding, ndim, array.names)
    return describe(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))


def results_in_place(
    arguments: Sequence[ArrayRow], results: Sequence[ArrayRow], program: HloModule
) -> tuple[tuple[str, str], ...]:
    """Returns (result path, argument path) for each result that reuses a donated argument's memory.

    Includes only pairs with the same shape, dtype and placement.
    """
    inputs = [row for row in arguments if row.placement != _NOT_USED]
    pairs = [
        (results[output], inputs[parameter])
        for output, parameter in program.aliases.items()
        if output < len(results) and parameter < len(inputs)
    ]
    return tuple((a.path, b.path) for a, b in pairs if replace(a, path=b.path) == b)
