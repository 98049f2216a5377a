"""Reads the axis names that Flax keeps with its arrays.

`flax.linen` has boxes around arrays (`Partitioned`, `LogicallyPartitioned`), `flax.nnx` has
metadata of variables. Both are recognized by their attributes, so Flax is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu

from .names import AxisNames


def metadata_names(args: Any) -> list[AxisNames | None]:
    """Returns the names of the axes of every leaf; None for a leaf without metadata."""
    found: list[AxisNames | None] = []
    for node in jtu.tree_leaves(args, is_leaf=_has_names):
        names = _names(node)
        leaves = jtu.tree_leaves(node)
        for leaf in leaves:
            fits = names is not None and len(names) == len(getattr(leaf, 'shape', ()))
            found.append(tuple(map(_as_tuple, names)) if fits and names is not None else None)
    return found


def _has_names(node: Any) -> bool:
    return _names(node) is not None


def _names(node: Any) -> Sequence[Any] | None:
    if hasattr(node, 'unbox') and isinstance(getattr(node, 'names', None), tuple):
        return node.names
    read: Callable[[], dict[str, Any]] | None = getattr(node, 'get_metadata', None)
    if read is None or isinstance(node, type):
        return None
    known = read()
    # versions of Flax have different keys for the names
    found = (known.get(key) for key in ('out_sharding', 'sharding_names', 'sharding'))
    return next((names for names in found if isinstance(names, tuple | list)), None)


def _as_tuple(entry: Any) -> tuple[str, ...]:
    """Makes a tuple of an entry: the name of an axis, or several of mesh axes, or None."""
    several = entry if isinstance(entry, tuple | list) else (entry,)
    return tuple(str(one) for one in several if one is not None)
