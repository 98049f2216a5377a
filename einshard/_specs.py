"""Specs for trees: an expression for every leaf, from a prefix tree or a function of the path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from ._errors import EinshardError
from ._expression import parse

# An expression, None, a function (path, leaf) -> spec, or a pytree of those that is a prefix of
# the tree it is for. Python has no type for the last.
Spec: TypeAlias = Any


def leaf_specs(tree: Any, leaves: Sequence[Any], spec: Spec) -> Sequence[str | None]:
    """The expression of each leaf of `tree`, whose leaves are `leaves`; None leaves it alone."""
    if isinstance(spec, str) or spec is None:
        return [spec] * len(leaves)
    check_specs(spec)
    prefix, prefix_def = jtu.tree_flatten(spec, is_leaf=is_none)
    if all(isinstance(one, str) or one is None for one in prefix):
        subtrees = _subtrees(prefix_def, spec, tree)
        counts = [len(jtu.tree_leaves(subtree)) for subtree in subtrees]
        return [one for one, count in zip(prefix, counts, strict=True) for _ in range(count)]
    specs: list[str | None] = []
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    for one, subtree in zip(prefix, _subtrees(prefix_def, spec, tree), strict=True):
        for leaf in jtu.tree_leaves(subtree):
            specs.append(_called(one, path_text(paths[len(specs)]), leaf))
    return specs


def is_none(node: Any) -> bool:
    """For `is_leaf=`: None in a tree of specs is a spec, not an empty tree."""
    return node is None


def check_specs(spec: Spec) -> None:
    """Raises where a tree of specs has a leaf that is none, or an expression with a mistake."""
    for path, one in jtu.tree_leaves_with_path(spec, is_leaf=is_none):
        if isinstance(one, str):
            try:
                parse(one)
            except EinshardError as error:
                raise (error.about(spec_at=f"'{path_text(path)}'") if path else error) from None
        elif one is not None and not callable(one):
            raise _no_spec(path, one)


def path_text(path: Sequence[Any]) -> str:
    """A key path as in 'layers/0/w'."""
    return jtu.keystr(tuple(path), simple=True, separator='/')


def array_text(x: Any) -> str:
    """An array as in float32[6,8]; anything else by its type."""
    shape, dtype = getattr(x, 'shape', None), getattr(x, 'dtype', None)
    if shape is None or dtype is None:
        return (
            f'{type(x).__name__} {x!r}'
            if isinstance(x, int | float | complex)
            else type(x).__name__
        )
    return f'{dtype}[{",".join(map(str, shape))}]'


def leaf_text(path: Sequence[Any], leaf: Any) -> str:
    """An array with its place in a tree: float32[6,8], leaf 'layers/0/w'."""
    return f"{array_text(leaf)}, leaf '{path_text(path)}'" if path else array_text(leaf)


def _called(spec: Spec, path: str, leaf: Any) -> str | None:
    while spec is not None and not isinstance(spec, str):
        if not callable(spec):
            raise EinshardError(
                f'a function of the path gave {spec!r} for a leaf, which is no spec for one',
                facts={
                    'array': f"{array_text(leaf)}, leaf '{path}'",
                    'give': 'an expression or None',
                },
            )
        spec = spec(path, leaf)
    return spec


def _no_spec(path: Sequence[Any], spec: Any) -> EinshardError:
    where = f" at '{path_text(path)}'" if path else ''
    facts = {'specs are': 'an expression, None, a function (path, leaf) -> spec, a tree of those'}
    if isinstance(spec, NamedSharding | PartitionSpec):
        facts['instead'] = "name the mesh axes in an expression: 'b d -> b@data d'"
    return EinshardError(f'{spec!r}{where} is no spec', facts=facts)


def _subtrees(prefix_def: Any, spec: Spec, tree: Any) -> list[Any]:
    """The subtrees of `tree` that the leaves of `spec` stand for."""
    try:
        return prefix_def.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        raise _mismatch(spec, tree, ()) or EinshardError(
            f'the specs are no prefix of the tree: {error}'
        ) from None


def _mismatch(spec: Spec, tree: Any, path: tuple[Any, ...]) -> EinshardError | None:
    """The first place where `spec` has another structure than `tree`."""
    if jtu.all_leaves([spec]) or spec is None:
        return None
    spec_children, tree_children = _children(spec), _children(tree)
    where = f"at '{path_text(path)}'" if path else 'at the top'
    keys, tree_keys = ([_key(child) for child in node] for node in (spec_children, tree_children))
    if type(spec) is not type(tree) or keys != tree_keys:
        return EinshardError(
            f'the specs are no prefix of the tree: they differ {where}',
            facts={'specs': _node_text(spec, keys), 'tree': _node_text(tree, tree_keys)},
        )
    for (key, spec_child), (_, tree_child) in zip(spec_children, tree_children, strict=True):
        error = _mismatch(spec_child, tree_child, (*path, *key))
        if error is not None:
            return error
    return None


def _children(node: Any) -> list[tuple[Any, Any]]:
    children, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    return children


def _key(child: tuple[Any, Any]) -> str:
    return path_text(child[0])


def _node_text(node: Any, keys: Sequence[str]) -> str:
    if keys == [''] or not keys:
        return array_text(node)
    return f'{type(node).__name__} with {", ".join(keys)}'
