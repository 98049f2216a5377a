"""Specs for trees: an expression for every leaf, from a prefix tree or a function of the path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ._cache import cached, register
from ._errors import EinshardError
from ._expression import parse
from ._mesh import AnyMesh, given_mesh
from ._words import shape_text

# An expression, None, a function (path, leaf) -> spec, or a pytree of those that is a prefix of
# the tree it is for. Python has no type for the last.
Spec: TypeAlias = Any

REPLICATED = '... -> * ...'


@dataclass(frozen=True, slots=True)
class Lenient:
    """An expression, and what of it may be left out where it does not fit."""

    expression: str
    indivisible: bool = False  # axes that are not divisible are replicated
    missing: bool = False  # nothing is cut over mesh axes that the mesh does not have


LeafSpec: TypeAlias = str | Lenient


def as_lenient(spec: LeafSpec) -> Lenient:
    """The spec of a leaf with what may be left out of it: of an expression nothing."""
    return spec if isinstance(spec, Lenient) else Lenient(spec)


@cached
def allow(spec: LeafSpec, *, indivisible: bool = False, missing: bool = False) -> LeafSpec:
    """The spec of a leaf, with more of it that may be left out."""
    if not (indivisible or missing):
        return spec
    known = as_lenient(spec)
    return Lenient(known.expression, known.indivisible or indivisible, known.missing or missing)


def leaf_specs(
    tree: Any,
    leaves: Sequence[Any],
    spec: Spec,
    mesh: AnyMesh | None = None,
    treedef: Any = None,
) -> Sequence[LeafSpec | None]:
    """The expression of each leaf of `tree`, whose leaves are `leaves`; None leaves it alone.

    `mesh` is what functions among the specs find around them, where one is given; `treedef` the
    structure of the tree, where it is known.
    """
    if isinstance(spec, str) or spec is None:
        return [spec] * len(leaves)
    check_specs(spec)
    prefix, prefix_def = jtu.tree_flatten(spec, is_leaf=is_none)
    alone = len(prefix) == 1 and prefix[0] is spec
    subtrees = [tree] if alone else _subtrees(prefix_def, spec, tree)
    if all(isinstance(one, str) or one is None for one in prefix):
        counts = [len(jtu.tree_leaves(subtree)) for subtree in subtrees]
        return [one for one, count in zip(prefix, counts, strict=True) for _ in range(count)]
    specs: list[LeafSpec | None] = []
    paths = leaf_paths(tree, treedef)
    for one, subtree in zip(prefix, subtrees, strict=True):
        below = leaves if alone else jtu.tree_leaves(subtree)
        its_paths = paths[len(specs) : len(specs) + len(below)]
        with given_mesh(mesh):
            if hasattr(one, 'for_tree'):  # a type, which is followed by the keys of each leaf
                found = zip(one.for_tree(subtree), its_paths, below, strict=True)
                specs += [_called(spec, path, leaf) for spec, path, leaf in found]
            elif hasattr(one, 'for_leaves'):  # Rules, which see all of their leaves at once
                specs += one.for_leaves(its_paths, below)
            else:
                both = zip(its_paths, below, strict=True)
                specs += [_called(one, path, leaf) for path, leaf in both]
    return specs


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
        value = f' {x!r}' if isinstance(x, int | float | complex) else ''
        return f'{type(x).__name__}{value}'
    return f'{dtype}{shape_text(shape)}'


def leaf_text(path: str, leaf: Any, what: str = 'leaf') -> str:
    """An array with its place in a tree: float32[6,8], leaf 'layers/0/w'."""
    return f"{array_text(leaf)}, {what} '{path}'" if path else array_text(leaf)


def _called(spec: Spec, path: str, leaf: Any) -> LeafSpec | None:
    while spec is not None and not isinstance(spec, str | Lenient):
        if not callable(spec):
            raise EinshardError(
                f'a function of the path gave {spec!r} for a leaf, which is no spec for one',
                facts={'array': leaf_text(path, leaf), 'give': 'an expression or None'},
            )
        spec = spec(path, leaf)
    return spec


def _no_spec(path: Sequence[Any], spec: Any) -> EinshardError:
    where = f" at '{path_text(path)}'" if path else ''
    facts = {'specs are': 'an expression, None, a function (path, leaf) -> spec, a tree of those'}
    text = repr(spec)
    if isinstance(spec, NamedSharding | PartitionSpec):
        facts['instead'] = "name the mesh axes in an expression: 'b d -> b@data d'"
    elif hasattr(spec, 'shape') and hasattr(spec, 'dtype'):
        text = array_text(spec)
        facts['order'] = 'the array, then its spec: einshard(x, spec)'
    return EinshardError(f'{text}{where} is no spec', facts=facts)


def check_visible(leaf: Any) -> None:
    """Raises for a leaf that has arrays which JAX does not see, and so would leave where they are.

    Other leaves that are no arrays, functions and strings, are parts of models.
    """
    kind = type(leaf)
    if hasattr(kind, '__array__'):
        give = 'numpy.asarray(x)'
    elif isinstance(leaf, FunctionType) or not _has_arrays(leaf):
        return
    elif is_dataclass(leaf):
        give = f'it registered by jax.tree_util.register_dataclass({kind.__name__})'
    else:
        give = f'it registered by jax.tree_util.register_pytree_node({kind.__name__}, ...)'
    raise EinshardError(
        f'{kind.__name__} has arrays, but is no tree that JAX knows', facts={'give': give}
    )


def _has_arrays(node: Any) -> bool:
    inside = getattr(node, '__dict__', None)
    if inside is None and is_dataclass(node):
        inside = {field.name: getattr(node, field.name, None) for field in fields(node)}
    if not isinstance(inside, dict):
        return False
    # a Mesh has an array of devices
    return any(
        isinstance(x, jax.Array | np.ndarray) and x.dtype != object for x in jtu.tree_leaves(inside)
    )


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
