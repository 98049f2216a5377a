"""Compares pytrees of shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding

from .._sharding.context import is_tracing
from .._sharding.mesh import AnyMesh, is_partial
from .._trees.specs import is_none


def shardings_of(values: Sequence[Any], positions: Sequence[int]) -> tuple[Any, ...]:
    """Returns the sharding of each leaf of `values[i]` for `i` in `positions`, or () in a trace.

    For host data, the sharding is None.
    """
    if not positions or is_tracing():
        return ()
    # Does not read `leaf.committed`, which would double the time. It matters only for arrays on a
    # part of the mesh, and jit rejects those if they are committed.
    leaves = [leaf for i in positions for leaf in jtu.tree_leaves(values[i])]
    return tuple([getattr(leaf, 'sharding', None) for leaf in leaves])


def has_partial_axes(shardings: Any) -> bool:
    return any(map(is_partial, jtu.tree_leaves(shardings)))


def same_shardings(a: Any, b: Any) -> bool:
    """Whether pytrees of shardings are equal, ignoring devices and memory kinds."""
    a_leaves, a_treedef = jtu.tree_flatten(a, is_leaf=is_none)
    b_leaves, b_treedef = jtu.tree_flatten(b, is_leaf=is_none)
    return a_treedef == b_treedef and all(
        x is y is None or (x and y and _without_devices(x) == _without_devices(y))
        for x, y in zip(a_leaves, b_leaves, strict=True)
    )


def _without_devices(sharding: NamedSharding) -> Any:
    return abstract_mesh(sharding.mesh), sharding.spec


def abstract_mesh(mesh: AnyMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
