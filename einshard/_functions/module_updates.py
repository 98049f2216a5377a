"""Finds updates of Flax NNX modules in place, which a jitted copy of the function would drop."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu

from .._errors import EinshardError, quoted
from .._text import first_of
from .._trees.paths import argument_path, leaves_with_paths


def module_leaves(arguments: Any) -> Mapping[tuple[Any, ...], Any]:
    """Returns the leaves of the NNX modules in `(args, kwargs)`, by path."""
    nnx: Any = sys.modules.get('flax.nnx')
    if nnx is None:
        return {}

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Pytree)

    return {
        (*path, *inner): leaf
        for path, node in jtu.tree_leaves_with_path(arguments, is_leaf=is_module)
        if is_module(node)
        for inner, leaf in leaves_with_paths(node)
    }


def check_updates(
    name: str,
    names: Mapping[int, str],
    before: Mapping[tuple[Any, ...], Any],
    arguments: Any,
    result: Any,
) -> None:
    """Raises if a function updates a module in its arguments, and does not return the new array.

    The function gets copies of the modules, so the caller's modules keep their arrays.
    """
    after = module_leaves(arguments) if before else {}
    returned = {id(leaf) for leaf in jtu.tree_leaves(result)}
    lost = [
        argument_path(path, names)
        for path in {**before, **after}
        if after.get(path) is not before.get(path) and id(after.get(path)) not in returned
    ]
    if lost:
        raise EinshardError(
            f'{name} updates {quoted(lost[:1])} in place, and sharded drops the update',
            code='tracing',
            facts={
                'updated': first_of(lost, 8),
                'instead': f'nnx.jit({name}), with einshard on arguments and results; '
                'or return nnx.state(...) of the module',
            },
        )
