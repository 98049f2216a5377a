"""The paths of leaves in a pytree, as in 'layers/0/w'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu

from .._cache import register
from .._text import array_text


def leaf_paths(tree: Any, treedef: Any = None) -> Sequence[str]:
    """The path of every leaf, kept by the structure of the tree."""
    treedef = jtu.tree_structure(tree) if treedef is None else treedef
    try:
        known = _paths.get(treedef)
    except TypeError:  # a node whose static part has no hash
        return [path_text(path) for path, _ in jtu.tree_leaves_with_path(tree)]
    if known is None:
        if len(_paths) >= 256:
            _paths.clear()
        # 10 us a leaf to write, 0.03 us to look up
        known = _paths[treedef] = [path_text(path) for path, _ in jtu.tree_leaves_with_path(tree)]
    return known


_paths: dict[Any, Sequence[str]] = register({})


def path_text(path: Sequence[Any]) -> str:
    """A key path as in 'layers/0/w'."""
    return jtu.keystr(tuple(path), simple=True, separator='/')


def leaf_text(path: str, leaf: Any, what: str = 'leaf') -> str:
    """An array with its place in a tree: float32[6,8], leaf 'layers/0/w'."""
    return f"{array_text(leaf)}, {what} '{path}'" if path else array_text(leaf)
