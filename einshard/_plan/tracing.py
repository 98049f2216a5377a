"""Traces a function so that its program has the axis names of the user.

The first trace finds the names. The second is on a mesh of one device with an axis for every name,
so each sharding constraint in the program has the names of its axes as mesh axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh

from .._arrays.constrain import constraints_of_trace
from .._errors import EinshardError
from .._functions.sharded import ShardedFunction
from .._inspect.lowered import Stages, lower
from .._notation.expression import ELLIPSIS, Expression, Term
from .._sharding.axis_rules import axis_rules
from .._sharding.context import current_context, mesh_scope
from .._sharding.leaf_spec import AnySpec, as_leaf_spec
from .._sharding.resolve import find_placement
from .flatten import entries_of
from .names import AxisNames

_count = itertools.count()


def first_trace(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh_axes: Sequence[str]
) -> tuple[Stages, list[Expression]]:
    """Traces a function; returns the expressions of its constraints and specs."""
    found: list[Expression] = []
    token = constraints_of_trace.set(found)
    try:
        with _scope((), mesh_axes):
            stages = _trace(fn, args, kwargs)
            specs = stages.argument_specs() or []
    finally:
        constraints_of_trace.reset(token)
    return stages, [as_leaf_spec(spec).expression for spec in specs if spec] + found


def trace_with_names(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    mesh_axes: Sequence[str],
) -> tuple[Stages, list[AxisNames | None], list[AxisNames | None]]:
    """Traces a function; returns the names of the axes of every argument and result leaf."""
    with _scope(names, mesh_axes):
        stages = _trace(fn, args, kwargs)
        traced = stages.traced
        assert traced is not None, 'a function was traced'
        given = stages.argument_specs()
        arguments = jtu.tree_leaves(traced.args_info)
        results = jtu.tree_leaves(traced.out_info)
        made = stages.result_specs(traced.out_info)
        return (
            stages,
            _names_of(given or [None] * len(arguments), arguments),
            _names_of(made or [None] * len(results), results),
        )


def _names_of(specs: Sequence[AnySpec | None], leaves: Sequence[Any]) -> list[AxisNames | None]:
    context = current_context()
    found: list[AxisNames | None] = []
    for spec, leaf in zip(specs, leaves, strict=True):
        if spec is None:
            found.append(None)
            continue
        placement = find_placement(spec, tuple(leaf.shape), context, None)
        found.append(entries_of(placement.sharding.spec, tuple(leaf.shape)))
    return found


def _trace(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stages:
    args, kwargs = jtu.tree_map(_struct, (tuple(args), dict(kwargs)))
    if isinstance(fn, ShardedFunction) or not hasattr(fn, 'trace'):
        # it raises an error for a function that has its own mesh
        return lower(fn, args, kwargs, current_context().lowering_mesh)
    return lower(fn, args, kwargs, None)


def _struct(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


@contextmanager
def _scope(names: Sequence[str], mesh_axes: Sequence[str]) -> Iterator[None]:
    """Enters a mesh with an axis of size 1 for each name, and rules that shard each name over it.

    One more rule, with a new name every time, makes JAX trace again: it caches traces by the rules.
    """
    axes = (*names, *(axis for axis in mesh_axes if axis not in names)) or ('x',)
    device = np.array(jax.devices()[:1], dtype=object).reshape((1,) * len(axes))
    mesh = Mesh(device, axes, axis_types=(AxisType.Auto,) * len(axes))
    number = ''.join(chr(ord('a') + int(digit)) for digit in str(next(_count)))
    rules = {name: f'@{name}' for name in names}
    with mesh_scope(mesh), axis_rules({**rules, f'einshard_plan_trace_{number}': ''}):
        yield


def names_in(expression: Expression) -> list[str]:
    """Returns the names that axis rules apply to: those without a placement, in short forms."""
    terms = expression.right if expression.short else ()
    return [str(t.name) for t in terms if t.name not in (None, ELLIPSIS) and t == Term(t.name)]


def check_has_names(
    stages: Stages, names: Sequence[str], leaves: Sequence[tuple[str, Any]]
) -> None:
    """Raises an error that shows how to add axis names, if a function has none."""
    if names:
        return
    path, leaf = max(leaves, key=lambda one: one[1].size, default=('w', np.zeros((1, 1))))
    letters = ' '.join(['rows', 'columns', 'depth', 'height', 'width'][: len(leaf.shape)])
    raise EinshardError(
        f'{stages.name or "the function"} has no axis names, so there is nothing to plan',
        facts={
            'arguments': ', '.join(p or '(the argument)' for p, _ in leaves[:4]),
            'expected': 'expressions without placements for arguments or values',
            'for arguments': f"@sharded(Rules([('{path.rpartition('/')[2] or 'w'}', "
            f"'{letters or 'rows'}')]), 'batch ...')",
            'for values': "x = einshard(x, 'batch embed')",
        },
    )
