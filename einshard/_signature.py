"""What tells the programs of a `sharded` function apart: of arguments what their specs look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from ._expression import parse
from ._layout import needs_rank
from ._mesh import AnyMesh, is_tracing
from ._specs import Spec, is_none


def looks_at_leaves(spec: Spec) -> bool:
    """Whether the shardings of a spec depend on the leaves: their ranks, paths or shapes."""
    return any(
        needs_rank(parse(one)) if isinstance(one, str) else one is not None
        for one in jtu.tree_leaves(spec, is_leaf=is_none)
    )


def signature(
    specs: Sequence[Spec], out: Spec, values: Sequence[Any], static: Sequence[int]
) -> Any:
    """What the shardings depend on: structure, shapes and dtypes of the arguments looked at."""
    all_of_them = looks_at_leaves(out)
    looked_at: list[Any] = []
    for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
        if all_of_them and i in static:
            looked_at.append(value)
        elif all_of_them or looks_at_leaves(spec):
            leaves, treedef = jtu.tree_flatten(value)
            looked_at.append((treedef, tuple(map(_shape_and_dtype, leaves))))
    return tuple(looked_at)


def placements(values: Sequence[Any], which: Sequence[int]) -> tuple[Any, ...]:
    """Where the arrays of some arguments are; None for host data. While tracing, nothing."""
    if not which or is_tracing():
        return ()
    # whether an array is committed would take as long again, and where it matters jit refuses it
    leaves = [leaf for i in which for leaf in jtu.tree_leaves(values[i])]
    return tuple([getattr(leaf, 'sharding', None) for leaf in leaves])


def _shape_and_dtype(leaf: Any) -> Any:
    """The same for a value and for its tracer."""
    try:
        aval: Any = jax.typeof(leaf)
    except TypeError:  # no array: jit will say so
        return type(leaf)
    return aval.shape, aval.dtype


def same_shardings(some: Any, others: Any) -> bool:
    """Whether trees of shardings are the same, be their meshes those of a trace or not."""
    leaves, treedef = jtu.tree_flatten(some, is_leaf=is_none)
    other_leaves, other_treedef = jtu.tree_flatten(others, is_leaf=is_none)
    return treedef == other_treedef and all(
        one is other is None or (one and other and _unbound(one) == _unbound(other))
        for one, other in zip(leaves, other_leaves, strict=True)
    )


def _unbound(sharding: NamedSharding) -> Any:
    return abstract_mesh(sharding.mesh), sharding.spec


def abstract_mesh(mesh: AnyMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
