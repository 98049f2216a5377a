"""Finds the spec of every leaf of a pytree, from a pytree prefix or a function of the path."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._errors import EinshardError, quoted
from .._notation.layout import needs_rank
from .._sharding.context import Context, context_on
from .._sharding.leaf_spec import LEAF_SPECS, AnySpec, LeafSpec, as_leaf_spec, convert_jax_spec
from .._sharding.mesh import AnyMesh, mesh_fact
from .._sharding.scopes import mesh_scope
from .._text import array_text, name_of
from .partition import is_module
from .paths import leaf_paths, leaf_text, path_text

# An expression, a PartitionSpec, a NamedSharding, None, a function (path, leaf) -> spec, or a
# pytree prefix of these. Python's types cannot express a pytree prefix.
Spec: TypeAlias = Any


def leaf_specs(
    tree: Any, leaves: Sequence[Any], spec: Spec, mesh: AnyMesh | None = None, treedef: Any = None
) -> Sequence[AnySpec | None]:
    """Returns the spec of each leaf of `tree`, or None for a leaf without a spec.

    `leaves` and `treedef` come from flattening `tree`. Functions in `spec` are called with `mesh`
    as the mesh in context.
    """
    if spec is None or isinstance(spec, LEAF_SPECS):
        return [convert_jax_spec(spec)] * len(leaves)
    check_specs(spec, _ORDER)
    prefix, prefix_def = jtu.tree_flatten(spec, is_leaf=is_none)
    is_single = len(prefix) == 1 and prefix[0] is spec
    subtrees = [tree] if is_single else _subtrees(prefix_def, spec, tree)
    if all(prefix_leaf is None or isinstance(prefix_leaf, LEAF_SPECS) for prefix_leaf in prefix):
        counts = [len(jtu.tree_leaves(subtree)) for subtree in subtrees]
        return [
            prefix_leaf
            for prefix_leaf, count in zip(map(convert_jax_spec, prefix), counts, strict=True)
            for _ in range(count)
        ]
    specs: list[AnySpec | None] = []
    paths = leaf_paths(tree, treedef)
    for prefix_leaf, subtree in zip(prefix, subtrees, strict=True):
        subtree_leaves = leaves if is_single else jtu.tree_leaves(subtree)
        subtree_paths = paths[len(specs) : len(specs) + len(subtree_leaves)]
        with mesh_scope(mesh):
            if hasattr(prefix_leaf, 'for_leaves'):  # Rules: one error for all leaves
                specs += prefix_leaf.for_leaves(subtree_paths, subtree_leaves)
                continue
            own = [prefix_leaf] * len(subtree_leaves)
            if hasattr(prefix_leaf, 'for_tree'):  # type annotations with specs
                own = prefix_leaf.for_tree(subtree)
            specs += map(call_spec, own, subtree_paths, subtree_leaves)
    return specs


def leaves_with_own_spec(tree: Any, spec: Spec) -> set[int]:
    """Returns the indices of the leaves of `tree` that have their own entry in `spec`.

    Functions, None, and entries for a subtree do not count.
    """
    prefix, prefix_def = jtu.tree_flatten(spec, is_leaf=is_none)
    own: set[int] = set()
    index = 0
    for prefix_leaf, subtree in zip(prefix, prefix_def.flatten_up_to(tree), strict=True):
        if isinstance(prefix_leaf, LEAF_SPECS) and jtu.all_leaves([subtree]):
            own.add(index)
        index += len(jtu.tree_leaves(subtree))
    return own


def is_none(node: Any) -> bool:
    """Whether a node is None. Pass it as `is_leaf=` for pytrees of specs, where None is a spec."""
    return node is None


def is_function(spec: Spec) -> bool:
    """Whether a spec is a function of the path. A Mesh is callable, but is not a spec.

    A module of Equinox with a spec in place of each array is a prefix, although it is callable.
    """
    if not callable(spec) or isinstance(spec, Mesh):
        return False
    if not is_module(spec) or hasattr(spec, '__wrapped__'):  # a wrapper, as of `eqx.filter_jit`
        return True
    leaves = jtu.tree_leaves(spec)
    return not leaves or not all(isinstance(leaf, LEAF_SPECS) for leaf in leaves)


class ArgumentOrder(NamedTuple):
    """The order of a function's arguments, for errors about swapped arguments."""

    sentence: str
    call: str


_ORDER = ArgumentOrder('einshard takes the array first, then its spec', 'einshard(x, spec)')
_LEAF_SPEC = 'an expression, a PartitionSpec, a NamedSharding'
_FUNCTION = 'a function (path, leaf) -> spec'
_SPECS = f'{_LEAF_SPEC}, None, {_FUNCTION}, or a pytree of these'


def check_specs(spec: Spec, order: ArgumentOrder | None = None, expected: str = _SPECS) -> None:
    """Raises if a leaf of `spec` is an invalid expression or not a spec.

    Args:
        order: the order of the caller's arguments. The error shows it if all leaves are arrays,
            because the user has probably swapped the arguments.
        expected: the list of valid specs in the error.
    """
    leaves = jtu.tree_leaves_with_path(spec, is_leaf=is_none)
    for path, leaf in leaves:
        if isinstance(leaf, LEAF_SPECS):
            try:
                as_leaf_spec(leaf)
            except EinshardError as error:
                raise (error.about(path_in_spec=repr(path_text(path))) if path else error) from None
        elif leaf is not None and is_function(leaf):
            check_signature(leaf)
        elif leaf is not None:
            swapped = order if all(shape_of(leaf) is not None for _, leaf in leaves) else None
            raise _not_a_spec(path, leaf, swapped, expected)


def check_spec_functions(specs: Sequence[Spec]) -> None:
    """Raises if a function in `specs` does not take (path, leaf).

    In `sharded(spec, f)`, the user means f as the function to shard, not as a spec.
    """
    for spec in specs:
        if is_function(spec):
            check_signature(spec, {'try': f'sharded(...)({name_of(spec)})'})


def check_signature(spec: Any, facts: Mapping[str, str] | None = None) -> None:
    """Raises if a spec function does not take (path, leaf)."""
    try:
        signature = inspect.signature(spec)
    except (TypeError, ValueError):  # some C functions have no signature
        return
    try:
        signature.bind('path', None)
    except TypeError:
        raise EinshardError(
            f'{name_of(spec)} is read as a spec function, but does not take (path, leaf)',
            code='spec',
            facts=facts or {'expected': 'a function (path, leaf) -> spec'},
        ) from None


def read_specs(spec: Spec) -> Spec:
    """Converts the leaves of a pytree of specs to LeafSpecs, except None and functions."""
    check_specs(spec)
    return jtu.tree_map(
        lambda leaf: as_leaf_spec(leaf) if isinstance(leaf, LEAF_SPECS) else leaf,
        spec,
        is_leaf=is_none,
    )


def needs_leaves(spec: Spec) -> bool:
    """Whether the shardings for a spec depend on the ranks, paths or shapes of leaves."""
    return any(
        # '...' ends a PartitionSpec in letters
        leaf.partition is None and needs_rank(leaf.expression)
        if isinstance(leaf, LeafSpec)
        else leaf is not None
        for leaf in jtu.tree_leaves(spec, is_leaf=is_none)
    )


def call_spec(spec: Spec, path: str, leaf: Any) -> AnySpec | None:
    """Returns `spec`, or if it is a function, its result for a leaf.

    A PartitionSpec or NamedSharding becomes a LeafSpec.
    """
    while spec is not None and not isinstance(spec, LEAF_SPECS):
        if not is_function(spec):
            raise EinshardError(
                f'the spec function returned {spec!r}, which is not a spec',
                code='spec',
                facts={'array': leaf_text(path, leaf), 'expected': f'{_LEAF_SPEC} or None'},
            )
        spec = spec(path, leaf)
    return convert_jax_spec(spec)


def meshes_of(spec: Spec) -> Set[AnyMesh]:
    """Returns the meshes of the NamedShardings in a pytree of specs, also of those in `Rules`."""
    meshes: set[AnyMesh] = set()
    for leaf in jtu.tree_leaves(spec):
        if isinstance(leaf, LeafSpec | NamedSharding):
            meshes |= {leaf.mesh} if leaf.mesh else set()
        else:  # `Rules`, `for_optimizer` and `shard_largest` have this attribute
            meshes |= getattr(leaf, 'meshes', set())
    return meshes


def context_of(spec: Spec, context: Context) -> Context:
    """Returns the context, on the mesh of the NamedShardings in `spec` if it has no mesh.

    Without this, scalars and leaves with expressions may be on other devices than the leaves with
    NamedShardings. If these have several meshes, returns the context unchanged.
    """
    meshes = meshes_of(spec) if context.mesh is None else set()
    return context_on(next(iter(meshes)), context) if len(meshes) == 1 else context


def mesh_of(spec: Spec) -> AnyMesh | None:
    """Returns the mesh of the NamedShardings in a pytree of specs.

    Returns None if there are none or their mesh is abstract; raises if the meshes differ.
    """
    meshes = meshes_of(spec)
    if len(meshes) > 1:
        raise EinshardError(
            'the NamedShardings in the specs are on different meshes',
            code='mesh',
            facts={'meshes': '; '.join(sorted(map(mesh_fact, meshes)))},
        )
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _not_a_spec(
    path: Sequence[Any], spec: Any, swapped: ArgumentOrder | None, expected: str
) -> EinshardError:
    where = f" at '{path_text(path)}'" if path else ''
    text = repr(spec)
    facts = {'expected': expected}
    if isinstance(spec, Mesh | AbstractMesh | jax.Device):
        facts['instead'] = "an expression and mesh=, as in einshard(x, 'b d -> b* d', mesh=mesh)"
    elif shape_of(spec) is not None:
        text = array_text(spec)
        if swapped is not None:
            facts = {'got': f'{text}{where}, instead of a spec', 'try': swapped.call}
            return EinshardError(swapped.sentence, code='spec', facts=facts)
    path_fact = {'path in spec': repr(path_text(path))} if path else {}
    return EinshardError(f'{text} is not a spec', code='spec', facts={**path_fact, **facts})


def check_registered_pytree(leaf: Any) -> None:
    """Raises for an array of another library, or an unregistered pytree that contains arrays.

    Functions, strings and other leaves without arrays are allowed, because models contain them.
    """
    reject_masked_array(leaf)
    cls = type(leaf)
    if isinstance(leaf, jax.Array | jax.Ref | np.ndarray | np.generic):
        return
    if hasattr(cls, '__array__') or hasattr(cls, '__dlpack__'):
        conversion = _conversion(leaf)
        raise EinshardError(
            f'{cls.__name__} is not a JAX or numpy array',
            code='array',
            facts={'instead': f'convert it: {conversion}'} if conversion else {},
        )
    if isinstance(leaf, FunctionType) or not _has_arrays(leaf):
        return
    elif is_dataclass(leaf):
        instead = f'register it: jax.tree_util.register_dataclass({cls.__name__})'
    else:
        instead = f'register it: jax.tree_util.register_pytree_node({cls.__name__}, ...)'
    raise EinshardError(
        f'{cls.__name__} contains arrays but is not a registered pytree',
        code='array',
        facts={'instead': instead},
    )


def not_an_array(path: str, leaf: Any) -> EinshardError:
    """Returns the error for a leaf that has its own spec but is not an array."""
    return EinshardError(
        f'{reprlib.repr(leaf)} ({type(leaf).__name__}) is not an array',
        code='array',
        facts={
            **({'got': leaf_text(path, leaf)} if path else {}),
            'instead': 'use None as its spec to return it unchanged',
        },
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, a number or a ShapeDtypeStruct."""
    return shape_of(leaf) is not None or isinstance(leaf, int | float | complex)


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """Returns the shape of an array or a ShapeDtypeStruct, or None for other leaves."""
    # types such as `np.float32` have a dtype, but their `shape` is not a tuple; a Mesh has no dtype
    shape = getattr(leaf, 'shape', None)
    return shape if isinstance(shape, tuple) and hasattr(leaf, 'dtype') else None


def without_values(leaf: Any) -> Any:
    """Replaces an array with its shape and dtype. Returns other leaves unchanged."""
    shape = shape_of(leaf)
    return leaf if shape is None else jax.ShapeDtypeStruct(shape, leaf.dtype)


def reject_masked_array(x: Any) -> None:
    """Raises for a masked array of numpy. JAX rejects it, and `np.asarray` drops the mask."""
    if isinstance(x, np.ma.MaskedArray):
        raise EinshardError(
            'JAX does not support masked arrays', code='array', facts={'instead': 'x.filled(value)'}
        )


_MAX_READ = 2**24  # elements


def _conversion(x: Any) -> str | None:
    """Returns the call that converts an array of another library, or None if none works.

    Returns None for large arrays without `__dlpack__`, because converting one may read a file.
    """
    shape = getattr(x, 'shape', None)
    n_elements = math.prod(shape) if isinstance(shape, tuple) else 0
    if n_elements > _MAX_READ and not hasattr(x, '__dlpack__'):
        return None
    conversions: dict[str, Callable[[Any], Any]] = {
        'numpy.asarray(x)': np.asarray,
        'jax.dlpack.from_dlpack(x)': jax.dlpack.from_dlpack,
    }
    for call, convert in conversions.items():
        try:
            jax.typeof(convert(x))  # raises for arrays of objects
        except Exception:  # the other library may raise anything
            continue
        return call
    return None


def _has_arrays(node: Any) -> bool:
    attributes = getattr(node, '__dict__', None)
    if attributes is None and is_dataclass(node):
        attributes = {field.name: getattr(node, field.name, None) for field in fields(node)}
    if not isinstance(attributes, dict):
        return False
    # a Mesh contains a numpy array of devices, of dtype object
    return any(
        isinstance(x, jax.Array | np.ndarray) and x.dtype != object
        for x in jtu.tree_leaves(attributes)
    )


def _subtrees(prefix_def: Any, spec: Spec, tree: Any) -> list[Any]:
    try:
        return prefix_def.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        # remove the value at the end of JAX's message: it may contain whole arrays
        difference = str(error).partition('; value: ')[0]
        raise _mismatch(spec, tree, ()) or EinshardError(
            f'the specs do not match the tree: {difference}', code='spec'
        ) from None


def _mismatch(spec: Spec, tree: Any, path: tuple[Any, ...]) -> EinshardError | None:
    """Returns the error for the first node where `spec` and `tree` differ, or None."""
    if jtu.all_leaves([spec]) or spec is None:
        return None
    spec_children, tree_children = _children(spec), _children(tree)
    where = f"at '{path_text(path)}'" if path else 'at the root'
    keys, tree_keys = ([path_text(p) for p, _ in xs] for xs in (spec_children, tree_children))
    if type(spec) is not type(tree) or keys != tree_keys:
        return EinshardError(
            f'the specs do not match the tree: {where}, '
            f'{_mismatch_text(spec, tree, keys, tree_keys)}',
            code='spec',
            facts={'specs': _node_text(spec, keys), 'tree': _node_text(tree, tree_keys)},
        )
    for (key, spec_child), (_, tree_child) in zip(spec_children, tree_children, strict=True):
        error = _mismatch(spec_child, tree_child, (*path, *key))
        if error is not None:
            return error
    return None


def _mismatch_text(spec: Any, tree: Any, keys: Sequence[str], tree_keys: Sequence[str]) -> str:
    """Describes how two nodes differ, such as "no spec for 'b'"."""
    if jtu.all_leaves([tree]):
        return f'the spec is of type {type(spec).__name__}, but the tree has a leaf'
    if type(spec) is not type(tree):
        types = type(spec).__name__, type(tree).__name__
        return 'the spec is of type {}, but the tree is of type {}'.format(*types)
    if missing := [key for key in tree_keys if key not in keys]:
        return f'no spec for {_keys_text(tree, missing[:8])}'
    if extra := [key for key in keys if key not in tree_keys]:
        return f'the tree has no {_keys_text(tree, extra[:8])}'
    return 'different order of keys'


def _is_sequence(node: Any, keys: Sequence[str]) -> bool:
    """Whether a node is a list or a tuple, but not a NamedTuple."""
    return isinstance(node, list | tuple) and all(key.isdecimal() for key in keys)


def _keys_text(node: Any, keys: Sequence[str]) -> str:
    """Formats some keys of a node: "'w' and 'b'", or 'elements 1, 2' of a list."""
    if not _is_sequence(node, keys):
        return quoted(keys)
    return f'element{"s" if len(keys) > 1 else ""} {", ".join(keys)}'


def _children(node: Any) -> list[tuple[Any, Any]]:
    """Returns (key path, child) pairs. The only child of a leaf is itself, with path ()."""
    children, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    return children


def _node_text(node: Any, keys: Sequence[str]) -> str:
    if keys == [''] or not keys:
        return array_text(node)
    if _is_sequence(node, keys):
        return f'{type(node).__name__} of length {len(keys)}'
    return f'{type(node).__name__} with {quoted(keys)}'
