"""The arrays and products of a function, with axis names. `find_model` traces the function."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu

from .flatten import Program, flatten
from .live import Peak, Stored, find_peaks
from .metadata import metadata_names
from .names import AxisNames, Names, name_axes
from .products import Product, find_products
from .tracing import first_trace, names_in, no_names, trace_with_names


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the arguments.

    Attributes:
        names: the names of each axis; `()` for one without a name, which no plan shards.
        is_state: whether it seems to be a weight, or another array that the function updates, and
            not data. It is state if it is donated, or if its argument is a pytree of arrays with
            different first axis names. If nothing is donated and there are several results, it is
            also state if a result has its shape and dtype.
        donated: whether a result can take its memory.
    """

    shape: tuple[int, ...]
    dtype: str
    names: tuple[Names, ...]
    is_state: bool
    donated: bool
    bytes: int


@dataclass(frozen=True)
class Model:
    """The arrays and products of a function, with the names of their axes.

    Attributes:
        name: of the function.
        sizes: the axis names in order of appearance, each with the size of its largest axis.
        divisors: for each axis name, the greatest common divisor of the sizes of its axes, which
            the number of shards must divide.
        names_by_array: the axis names of each argument, and of each array with a constraint,
            without repetitions.
        arrays: the arguments.
        results: the results that do not reuse the memory of a donated argument.
        products: the operations that have flops or may communicate.
        peaks: sets of arrays that are in memory at the same time, in addition to the arguments.
    """

    name: str
    sizes: Mapping[str, int]
    divisors: Mapping[str, int]
    names_by_array: tuple[tuple[str, ...], ...]
    arrays: tuple[Array, ...]
    results: tuple[Stored, ...]
    products: tuple[Product, ...]
    peaks: tuple[Peak, ...]


def find_model(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh_axes: Sequence[str] = ()
) -> Model:
    """Traces a function, and finds the axis names of all its arrays.

    Args:
        fn, args, kwargs: the call. Arguments may be shapes.
        mesh_axes: the mesh axes that the function's expressions may name.

    Raises:
        EinshardError: the function has no axis names, or cannot be traced.
    """
    expressions = first_trace(fn, args, kwargs, mesh_axes)
    metadata = metadata_names((tuple(args), dict(kwargs)))
    names = [name for axes in metadata for one in axes or () for name in one]
    names += [name for one in expressions for name in names_in(one)]
    names = [name for name in dict.fromkeys(names) if name not in mesh_axes]
    if not names:
        raise no_names(fn, args, kwargs)
    stages, of_arguments, of_results = trace_with_names(fn, args, kwargs, names, mesh_axes)
    assert stages.traced is not None, 'a function was traced'
    of_arguments = _with_metadata(of_arguments, metadata)
    of_results = _with_metadata(of_results, metadata_names(stages.traced.out_info))
    program = flatten(stages.traced.jaxpr)
    found = name_axes(program, of_arguments, of_results)
    axis_names = [tuple(one or () for one in of_value) for of_value in found]
    arguments = [() if value is None else axis_names[value] for value in program.arguments]
    sizes, divisors, names_by_array = _sizes(program, axis_names, names)
    results = jtu.tree_leaves(stages.traced.out_info)
    arrays = _arrays(stages.traced.args_info, arguments, results)
    pairs = zip(program.arguments, arrays, strict=True)
    states = [value for value, one in pairs if value is not None and one.is_state]
    return Model(
        stages.name,
        sizes,
        divisors,
        names_by_array,
        arrays,
        _new_results(program, axis_names, arrays, results),
        find_products(program, axis_names, states),
        find_peaks(program, axis_names),
    )


def _with_metadata(
    specified: list[AxisNames | None], metadata: Sequence[AxisNames | None]
) -> list[AxisNames | None]:
    """Returns the axis names of each leaf: those of its spec, else those of its metadata."""
    # `metadata` has entries for static arguments too, which cannot be told from the others
    if len(specified) != len(metadata):
        return specified
    pairs = zip(specified, metadata, strict=True)
    return [known if names is None else names for names, known in pairs]


def _sizes(
    program: Program, axis_names: Sequence[tuple[Names, ...]], names: Sequence[str]
) -> tuple[dict[str, int], dict[str, int], tuple[tuple[str, ...], ...]]:
    """Returns `sizes`, `divisors` and `names_by_array` of the model.

    They are those of the arguments and of arrays with a constraint.
    """
    sizes, divisors = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    names_by_array: dict[tuple[str, ...], None] = {}
    numbers = [value for value in program.arguments if value is not None]
    numbers += [i for i, value in enumerate(program.values) if value.spec is not None]
    for i in numbers:
        of_array = tuple(name for one in axis_names[i] for name in one)
        names_by_array[of_array] = None
        for one, size in zip(axis_names[i], program.values[i].shape, strict=True):
            for name in one:
                if name in sizes:
                    sizes[name] = max(sizes[name], size)
                    divisors[name] = math.gcd(divisors[name], size)
    return sizes, divisors, tuple(names_by_array)


def _arrays(
    args_info: Any, axis_names: Sequence[tuple[Names, ...]], results: Sequence[Any]
) -> tuple[Array, ...]:
    leaves = jtu.tree_leaves_with_path(args_info)
    n_leaves: Counter[Any] = Counter()
    first_names: defaultdict[Any, set[str]] = defaultdict(set)
    for (path, _), names in zip(leaves, axis_names, strict=True):
        argument = path[:2]
        n_leaves[argument] += 1
        first_names[argument].add(next((name for one in names for name in one), ''))
    returned = Counter((tuple(one.shape), str(one.dtype)) for one in results)
    # if there is only one result, an argument of the same shape may be a coincidence
    by_shape = len(results) > 1 and not any(info.donated for _, info in leaves)
    found: list[Array] = []
    for (path, info), names in zip(leaves, axis_names, strict=True):
        shape, dtype = tuple(map(int, info.shape)), str(info.dtype)
        argument = path[:2]
        has_weights = n_leaves[argument] > 1 and len(first_names[argument]) > 1
        is_state = info.donated or has_weights or (by_shape and returned[shape, dtype] > 0)
        found.append(
            Array(
                shape,
                dtype,
                names,
                is_state,
                info.donated,
                math.prod(shape) * info.dtype.itemsize,
            )
        )
    return tuple(found)


def _new_results(
    program: Program,
    axis_names: Sequence[tuple[Names, ...]],
    arrays: Sequence[Array],
    results: Sequence[Any],
) -> tuple[Stored, ...]:
    """Returns the results that do not reuse the memory of a donated argument."""
    free = Counter((one.shape, one.dtype) for one in arrays if one.donated)
    found: list[Stored] = []
    for value, info in zip(program.results, results, strict=True):
        key = tuple(map(int, info.shape)), str(info.dtype)
        if free[key]:
            free[key] -= 1
        elif value is not None:
            found.append((axis_names[value], program.values[value].bytes))
    return tuple(found)
