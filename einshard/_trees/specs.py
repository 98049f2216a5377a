"""Specs for trees: an expression for every leaf, from a prefix tree or a function of the path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._errors import EinshardError
from .._notation.layout import needs_rank
from .._sharding.context import mesh_scope
from .._sharding.leaf_spec import AnySpec, LeafSpec, as_leaf_spec
from .._sharding.mesh import AnyMesh
from .._text import array_text
from .paths import leaf_paths, leaf_text, path_text

# An expression, None, a function (path, leaf) -> spec, or a pytree of those that is a prefix of
# the tree it is for. Python has no type for the last.
Spec: TypeAlias = Any


def leaf_specs(
    tree: Any,
    leaves: Sequence[Any],
    spec: Spec,
    mesh: AnyMesh | None = None,
    treedef: Any = None,
) -> Sequence[AnySpec | None]:
    """The expression of each leaf of `tree`, whose leaves are `leaves`; None leaves it alone.

    `mesh` is what functions among the specs find around them, where one is given; `treedef` the
    structure of the tree, where it is known.
    """
    if isinstance(spec, str | LeafSpec) or spec is None:
        return [spec] * len(leaves)
    check_specs(spec)
    prefix, prefix_def = jtu.tree_flatten(spec, is_leaf=is_none)
    alone = len(prefix) == 1 and prefix[0] is spec
    subtrees = [tree] if alone else _subtrees(prefix_def, spec, tree)
    if all(isinstance(one, str | LeafSpec) or one is None for one in prefix):
        counts = [len(jtu.tree_leaves(subtree)) for subtree in subtrees]
        return [one for one, count in zip(prefix, counts, strict=True) for _ in range(count)]
    specs: list[AnySpec | None] = []
    paths = leaf_paths(tree, treedef)
    for one, subtree in zip(prefix, subtrees, strict=True):
        below = leaves if alone else jtu.tree_leaves(subtree)
        its_paths = paths[len(specs) : len(specs) + len(below)]
        with mesh_scope(mesh):
            if hasattr(one, 'for_tree'):  # a type, which is followed by the keys of each leaf
                found = zip(one.for_tree(subtree), its_paths, below, strict=True)
                specs += [_called(spec, path, leaf) for spec, path, leaf in found]
            elif hasattr(one, 'for_leaves'):  # Rules, which see all of their leaves at once
                specs += one.for_leaves(its_paths, below)
            else:
                both = zip(its_paths, below, strict=True)
                specs += [_called(one, path, leaf) for path, leaf in both]
    return specs


def is_none(node: Any) -> bool:
    """For `is_leaf=`: None in a tree of specs is a spec, not an empty tree."""
    return node is None


def is_function(spec: Spec) -> bool:
    """Whether a spec is a function of the path. A Mesh can be called too, as a decorator."""
    return callable(spec) and not isinstance(spec, Mesh)


def check_specs(spec: Spec) -> None:
    """Raises where a tree of specs has a leaf that is none, or an expression with a mistake."""
    for path, one in jtu.tree_leaves_with_path(spec, is_leaf=is_none):
        if isinstance(one, str):
            try:
                as_leaf_spec(one)
            except EinshardError as error:
                raise (error.about(spec_at=f"'{path_text(path)}'") if path else error) from None
        elif not (one is None or isinstance(one, LeafSpec) or is_function(one)):
            raise _no_spec(path, one)


def read_specs(spec: Spec) -> Spec:
    """A tree of specs with its expressions parsed; raises as `check_specs`."""
    check_specs(spec)
    return jtu.tree_map(
        lambda one: as_leaf_spec(one) if isinstance(one, str) else one, spec, is_leaf=is_none
    )


def needs_leaves(spec: Spec) -> bool:
    """Whether the shardings of a spec depend on the leaves: their ranks, paths or shapes."""
    return any(
        needs_rank(one.expression) if isinstance(one, LeafSpec) else one is not None
        for one in jtu.tree_leaves(spec, is_leaf=is_none)
    )


def _called(spec: Spec, path: str, leaf: Any) -> AnySpec | None:
    while spec is not None and not isinstance(spec, str | LeafSpec):
        if not is_function(spec):
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
    elif isinstance(spec, Mesh | AbstractMesh | jax.Device):
        facts['instead'] = "mesh=, next to an expression: einshard(x, 'b d -> b* d', mesh=mesh)"
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
