"""Reads the axis names that Flax keeps with its arrays.

`flax.linen` boxes arrays with the names of their axes (`Partitioned`, `LogicallyPartitioned`);
`flax.nnx` keeps the names in the metadata of variables. Both are recognized by their attributes, so
Flax is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._sharding.mesh import UNCONSTRAINED, spec_axes
from .._trees.paths import path_text
from .names import AxisNames

# the names of each axis of an array; () for an axis without a name
FlaxNames: TypeAlias = tuple[AxisNames, ...]


def flax_axis_names(args: Any) -> list[FlaxNames | None]:
    """Returns the axis names of each leaf, or None if Flax has no entry for each of its axes."""
    return [names if _fits(names, leaf) else None for _, leaf, names in _leaves(args)]


def names_without_axes(args: Any) -> list[tuple[str, Any, FlaxNames]]:
    """Returns (path, leaf, names) where Flax has names, but not one for each axis.

    Layers that `nnx.vmap` or `nn.scan` stack have an axis more, unless it is named too.
    """
    return [
        (path_text(path), leaf, names)
        for path, leaf, names in _leaves(args)
        if names and not _fits(names, leaf)
    ]


def _fits(names: FlaxNames | None, leaf: Any) -> bool:
    return names is not None and len(names) == len(getattr(leaf, 'shape', ()))


def _leaves(args: Any) -> Iterator[tuple[Sequence[Any], Any, FlaxNames | None]]:
    """Yields the path and the names of each leaf."""
    for path, node in jtu.tree_leaves_with_path(args, is_leaf=_has_names):
        entries = _names(node)
        names = None if entries is None else tuple(map(_as_tuple, entries))
        for leaf in jtu.tree_leaves(node):
            yield path, leaf, names


def _has_names(node: Any) -> bool:
    return _names(node) is not None


def _names(node: Any) -> Sequence[Any] | None:
    """Returns the names in a Flax box or variable, or None if the node has none."""
    if hasattr(node, 'unbox') and isinstance(getattr(node, 'names', None), tuple):
        return node.names
    get_metadata: Callable[[], dict[str, Any]] | None = getattr(node, 'get_metadata', None)
    if get_metadata is None or isinstance(node, type):
        return None
    metadata = get_metadata()
    # versions of Flax have different keys for the names
    found = [metadata.get(key) for key in ('out_sharding', 'sharding_names', 'sharding')]
    found = [x.spec if isinstance(x, NamedSharding) else x for x in found]
    found = [spec_axes(x) if isinstance(x, PartitionSpec) else x for x in found]
    return next((names for names in found if isinstance(names, tuple | list)), None)


def _as_tuple(entry: Any) -> tuple[str, ...]:
    names = entry if isinstance(entry, tuple | list) else (entry,)
    return tuple(str(name) for name in names if name not in (None, *UNCONSTRAINED))
