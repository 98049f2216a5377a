"""Model: the arrays and costly operations of a function, with the names of their axes."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu

from .._explain.arrays import find_names
from .._explain.local_devices import asked_texts
from .._explain.lowered import Stages
from .._program.jaxpr.graph import Program, flatten
from .._trees.axis_names import MetadataNames, fitting_names
from .._trees.paths import argument_path, path_and_array
from .costly_ops import CostlyOp, find_costly_ops
from .live_sets import LiveSet, StoredArray, find_live_sets
from .names import ArrayNames, AxisNames, name_axes
from .tracing import first_trace, names_in, trace_with_names


@dataclass(frozen=True, slots=True)
class Array:
    """An array (leaf) in the arguments of a function.

    Attributes:
        names: the names of each axis. An axis without names has `()`, and is never sharded.
        is_state: whether the array is a weight or other state, not data. This is a guess. Donated
            arrays are state. So are the arrays of a pytree argument if their first axis names
            differ (in data, all arrays start with the batch). If nothing is donated and there are
            several results, arrays with the shape and dtype of a result are state, too.
        donated: whether the argument is donated, so that a result can reuse its memory.
    """

    shape: tuple[int, ...]
    dtype: str
    names: tuple[AxisNames, ...]
    is_state: bool
    donated: bool
    bytes: int


@dataclass(frozen=True)
class Model:
    """The arrays and costly operations of a function, with the names of their axes.

    Attributes:
        axis_sizes: the axis names in order of appearance, each with the distinct sizes of its axes
            in ascending order.
        array_names: the axis names of each array that is an argument or has a constraint. Each
            combination of names occurs once.
        results: the results that do not reuse the memory of a donated argument.
        live_sets: see `find_live_sets`.
        metadata_names: for each leaf of the arguments of the call, the axis names in its metadata
            that shard it, or None.
        unnamed_data: the arguments without axis names that carry data, as text.
        is_named_in_code: whether expressions have names, and not only metadata of arguments.
        asked: see `asked_texts`.
    """

    name: str
    axis_sizes: Mapping[str, Sequence[int]]
    array_names: tuple[tuple[str, ...], ...]
    arrays: tuple[Array, ...]
    results: tuple[StoredArray, ...]
    costly_ops: tuple[CostlyOp, ...]
    live_sets: tuple[LiveSet, ...]
    metadata_names: tuple[MetadataNames | None, ...]
    unnamed_data: tuple[str, ...] = ()
    is_named_in_code: bool = False
    asked: tuple[str, ...] = ()

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of the largest axis with each name, or 0 if no axis has it."""
        return {name: max(sizes, default=0) for name, sizes in self.axis_sizes.items()}

    @functools.cached_property
    def divisors(self) -> dict[str, int]:
        """The greatest common divisor of the sizes, which the number of shards must divide."""
        return {name: math.gcd(*sizes) for name, sizes in self.axis_sizes.items()}

    def axis_text(self, name: str) -> str:
        """Formats an axis name with its sizes: "'a' (size 6)" or "'a' (sizes 9 and 15)"."""
        sizes = self.axis_sizes[name]
        if len(sizes) < 2:
            return f"'{name}' (size {sizes[0] if sizes else 'unknown'})"
        return f"'{name}' (sizes {', '.join(map(str, sizes[:-1]))} and {sizes[-1]})"


def find_model(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh_axes: Sequence[str] = (),
    device_kind: str = '',
) -> Model | None:
    """Traces a function, and finds the axis names of all its arrays.

    Returns None if it has none.

    `mesh_axes` are the mesh axes that the expressions of the function may name directly, and
    `device_kind` is that of the devices to plan for.
    """
    expressions, metadata_names = first_trace(fn, args, kwargs, mesh_axes)
    in_code = [name for expression in expressions for name in names_in(expression)]
    names = [name for array in metadata_names for axis in array or () for name in axis]
    names = [name for name in dict.fromkeys([*names, *in_code]) if name not in mesh_axes]
    if not names:
        return None
    stages, spec_names, result_names = trace_with_names(fn, args, kwargs, names, mesh_axes)
    assert stages.traced is not None, 'only a jax.stages.Lowered has no trace'
    known = {*names, *mesh_axes}
    in_metadata = metadata_of_traced(args, kwargs, metadata_names, stages.traced.args_info)
    argument_names = _with_metadata_names(spec_names, in_metadata, known)
    result_names = _with_metadata_names(result_names, fitting_names(stages.traced.out_info), known)
    program = flatten(stages.traced.jaxpr)
    found = name_axes(program, argument_names, result_names)
    axis_names = [tuple(axis or () for axis in value_names) for value_names in found]
    names_by_argument = [() if i is None else axis_names[i] for i in program.arguments]
    axis_sizes, array_names = _sizes_and_array_names(program, axis_names, names)
    results = jtu.tree_leaves(stages.traced.out_info)
    arrays = _arrays(stages.traced.args_info, names_by_argument, results)
    pairs = zip(program.arguments, arrays, strict=True)
    states = [value for value, one in pairs if value is not None and one.is_state]
    return Model(
        name=stages.name,
        axis_sizes=axis_sizes,
        array_names=array_names,
        arrays=arrays,
        results=_new_results(program, axis_names, arrays, results),
        costly_ops=find_costly_ops(program, axis_names, states),
        live_sets=find_live_sets(program, axis_names),
        metadata_names=tuple(metadata_names),
        unnamed_data=_unnamed_data(stages, program, argument_names, result_names, axis_names),
        is_named_in_code=bool(in_code),
        asked=tuple(asked_texts(stages.jaxpr, device_kind)),
    )


def _unnamed_data(
    stages: Stages,
    program: Program,
    argument_names: Sequence[ArrayNames | None],
    result_names: Sequence[ArrayNames | None],
    axis_names: Sequence[tuple[AxisNames, ...]],
) -> tuple[str, ...]:
    """Returns the arguments without axis names that have an axis of half of all flops.

    The batch is an axis of nearly all products, an axis of a weight only of its own.
    """
    traced: Any = stages.traced
    leaves = jtu.tree_leaves_with_path(traced.args_info)
    marks: dict[int, str] = {}
    marked: list[ArrayNames | None] = []
    for i, (value, names) in enumerate(zip(program.arguments, argument_names, strict=True)):
        if value is not None and names is None and not any(axis_names[value]):
            marks[i] = f'#{i}'  # not a name of the user's
            names = ((marks[i],),) * len(program.values[value].shape)
        marked.append(names)
    if not marks:
        return ()
    found = name_axes(program, marked, result_names)
    flops: Counter[str] = Counter()
    total = 0
    for op in find_costly_ops(program, [tuple(x or () for x in names) for names in found], ()):
        names = {n for array in (*op.operands, op.out) for axis in array.names for n in axis}
        flops.update(dict.fromkeys(names, op.flops * op.executions))
        total += op.flops * op.executions
    of_position = find_names(stages, traced)
    return tuple(
        path_and_array(argument_path(leaves[i][0], of_position), leaves[i][1])
        for i, mark in marks.items()
        if 2 * flops[mark] >= total > 0
    )


def metadata_of_traced(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    metadata_names: Sequence[MetadataNames | None],
    args_info: Any,
) -> Sequence[MetadataNames | None]:
    """Returns the axis names in the metadata of each traced argument.

    `nnx.jit` passes the arrays of a module in a list, without their metadata but in their order.
    """
    leaves = zip(jtu.tree_leaves((args, kwargs)), metadata_names, strict=True)
    given = [(tuple(leaf.shape), names) for leaf, names in leaves if hasattr(leaf, 'shape')]
    traced = fitting_names(args_info)
    if [shape for shape, _ in given] != [leaf.shape for leaf in jtu.tree_leaves(args_info)]:
        return traced
    return [names or in_call for names, (_, in_call) in zip(traced, given, strict=True)]


def _with_metadata_names(
    spec_names: Sequence[ArrayNames | None],
    metadata_names: Sequence[MetadataNames | None],
    known: Collection[str],
) -> list[ArrayNames | None]:
    """Replaces None by the names in the metadata of the leaf, without names not in `known`.

    Names are not in `known` if only results have them, or the `self` of a method.
    """
    found: list[ArrayNames | None] = []
    for names, in_metadata in zip(spec_names, metadata_names, strict=True):
        if names is None and in_metadata is not None:
            names = tuple(tuple(name for name in axis if name in known) for axis in in_metadata)
        found.append(names)
    return found


def _sizes_and_array_names(
    program: Program, axis_names: Sequence[tuple[AxisNames, ...]], names: Sequence[str]
) -> tuple[dict[str, list[int]], tuple[tuple[str, ...], ...]]:
    sizes: dict[str, set[int]] = {name: set() for name in names}
    array_names: dict[tuple[str, ...], None] = {}
    indices = [i for i in program.arguments if i is not None]
    indices += [i for i, value in enumerate(program.values) if value.spec is not None]
    for i in indices:
        array_names[tuple(name for axis in axis_names[i] for name in axis)] = None
        for axis, size in zip(axis_names[i], program.values[i].shape, strict=True):
            for name in axis:
                if name in sizes:
                    sizes[name].add(size)
    return {name: sorted(sizes[name]) for name in names}, tuple(array_names)


def _arrays(
    args_info: Any, axis_names: Sequence[tuple[AxisNames, ...]], results: Sequence[Any]
) -> tuple[Array, ...]:
    leaves = jtu.tree_leaves_with_path(args_info)
    n_leaves: Counter[Any] = Counter()
    first_names: defaultdict[Any, set[str]] = defaultdict(set)
    for (path, _), names in zip(leaves, axis_names, strict=True):
        argument = path[:2]  # args or kwargs, and the position or keyword
        n_leaves[argument] += 1
        first_names[argument].add(next((name for one in names for name in one), ''))
    returned = Counter((tuple(one.shape), str(one.dtype)) for one in results)
    # a single result may have the shape of an argument by coincidence
    returns_state = len(results) > 1 and not any(info.donated for _, info in leaves)
    found: list[Array] = []
    for (path, info), names in zip(leaves, axis_names, strict=True):
        shape, dtype = tuple(map(int, info.shape)), str(info.dtype)
        argument = path[:2]
        has_weights = n_leaves[argument] > 1 and len(first_names[argument]) > 1
        is_state = info.donated or has_weights or (returns_state and returned[shape, dtype] > 0)
        n_bytes = math.prod(shape) * info.dtype.itemsize
        found.append(Array(shape, dtype, names, is_state, info.donated, n_bytes))
    return tuple(found)


def _new_results(
    program: Program,
    axis_names: Sequence[tuple[AxisNames, ...]],
    arrays: Sequence[Array],
    results: Sequence[Any],
) -> tuple[StoredArray, ...]:
    free = Counter((one.shape, one.dtype) for one in arrays if one.donated)
    found: list[StoredArray] = []
    for value, info in zip(program.results, results, strict=True):
        key = tuple(map(int, info.shape)), str(info.dtype)
        if free[key]:
            free[key] -= 1
        elif value is not None:
            found.append((axis_names[value], program.values[value].bytes))
    return tuple(found)
