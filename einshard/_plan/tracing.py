"""Traces a function so that its jaxpr has the user's axis names.

The first trace finds the names. The second trace uses a mesh of one device that has a mesh axis for
each name, so that the sharding constraints in the jaxpr contain the names.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from .._arrays.constrain import constraints_of_trace
from .._explain.stages import Stages
from .._explain.trace_call import trace_call
from .._notation.expression import ELLIPSIS, Expression, Term
from .._sharding.axis_rules import axis_rules
from .._sharding.leaf_spec import as_leaf_spec
from .._sharding.scopes import only_mesh_scope
from .._trees.axis_names import MetadataNames, fitting_names

_trace_numbers = itertools.count()


def first_trace(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh_axes: Sequence[str]
) -> tuple[list[Expression], list[MetadataNames | None]]:
    """Traces a function, and returns where its axis names come from.

    Returns:
        The expressions in its argument specs and constraints. For each leaf of `(args, kwargs)`,
        the axis names in its metadata, or None if there are none, or if the leaf has a
        spec, whose names count instead.
    """
    constraints: list[Expression] = []
    token = constraints_of_trace.set(constraints)
    try:
        with _scope((), mesh_axes):
            stages, structs = _trace(fn, args, kwargs)
            specs = stages.argument_specs() or []
    finally:
        constraints_of_trace.reset(token)
    # By identity, because a `sharded` function has the values of a call in an order of its own.
    # `_trace` has made an object for each array.
    specs_of = {
        id(leaf): spec for leaf, spec in zip(stages.dynamic_leaves(), specs, strict=bool(specs))
    }
    metadata_names = [
        names if specs_of.get(id(leaf)) is None else None
        for leaf, names in zip(jtu.tree_leaves(structs), fitting_names(structs), strict=True)
    ]
    return [as_leaf_spec(spec).expression for spec in specs if spec] + constraints, metadata_names


@contextmanager
def trace_with_names(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    mesh_axes: Sequence[str],
) -> Generator[Stages]:
    """Traces a function on a mesh that has an axis for each name, in a `with` block.

    Shardings of arguments, results and constraints then consist of names.
    """
    with _scope(names, mesh_axes):
        yield _trace(fn, args, kwargs)[0]


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


def _trace(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Stages, tuple[Sequence[Any], Mapping[str, Any]]]:
    """Traces a function, and also returns the arguments with a ShapeDtypeStruct for each array."""
    args, kwargs = jtu.tree_map(without_values, (tuple(args), dict(kwargs)))
    return trace_call(fn, args, kwargs, mesh=None), (args, kwargs)


def without_values(leaf: Any) -> Any:
    """Returns the shape and dtype of an array. Returns other leaves unchanged."""
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


@contextmanager
def _scope(names: Sequence[str], mesh_axes: Sequence[str]) -> Generator[None]:
    """Enters a mesh with an axis for each name, and rules that shard each name over its axis.

    The mesh also has `mesh_axes`, because expressions may name them. All axes have size 1.

    Each call adds a rule with a new name. The rules are part of JAX's cache key, so JAX traces the
    function again. Without a new trace, no constraints would be recorded.
    """
    axes = (*names, *(axis for axis in mesh_axes if axis not in names)) or ('x',)
    # without devices, because an array of devices has at most 32 axes
    mesh = AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
    # letters, because axis names have no digits
    number = ''.join(chr(ord('a') + int(digit)) for digit in str(next(_trace_numbers)))
    rules = {name: f'@{name}' for name in names}
    with only_mesh_scope(mesh), axis_rules({**rules, f'einshard_plan_trace_{number}': ''}):
        yield


def names_in(expression: Expression) -> list[str]:
    """Returns the names in an expression to which axis rules apply: those without a placement.

    Axis rules do not apply to expressions with '->', nor to `...`, `None` and names such as `_`.
    """
    terms = expression.right if expression.short else ()
    names = [str(term.name) for term in terms if term == Term(term.name)]
    return [name for name in names if name not in ('None', ELLIPSIS) and name.strip('_')]
