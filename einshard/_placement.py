"""NamedSharding -> array: arrays are placed, tracers constrained, structs annotated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ._axis_rules import Missing, check_missing
from ._cache import cached
from ._constraint import constrain, place_constant
from ._errors import EinshardError
from ._expression import Expression
from ._mesh import MeshLike, is_tracing
from ._sharding import Placement, Where, check_types, find_fitting, find_mesh, offer_missing
from ._specs import LeafSpec, Spec, allow, check_visible, leaf_paths, leaf_specs, leaf_text

T = TypeVar('T')


def einshard(
    x: T,
    spec: Spec,
    *,
    mesh: MeshLike | None = None,
    donate: bool = False,
    memory_kind: str | None = None,
    missing: Missing = 'error',
) -> T:
    """Puts an array, or every array of a tree, where an expression says.

        >>> x = einshard(np.ones((8, 4)), 'batch d -> batch4 d 2', mesh=jax.devices()[:8])
        >>> describe(x)
        'a b -> a4 b 2'

    What happens depends on what `x` is:

    * an array that is placed so already is returned as it is;
    * other arrays, numpy arrays and scalars move, all of a tree in one `jax.device_put`;
    * a traced value, inside `jax.jit` and its like, is constrained: by
      `jax.lax.with_sharding_constraint`, under explicit axes by `jax.reshard`;
    * a `jax.ShapeDtypeStruct` gets the sharding;
    * a leaf that is no array (a function, a string, None) is passed through; one that has arrays
      in it and is no tree that JAX knows is an error.

    Args:
        x: an array or a tree of arrays.
        spec: an expression; None, to leave `x` alone; a function `(path, leaf) -> spec`, with
            the path as in 'layers/0/w'; or a tree of those which is a prefix of `x`, as for
            `in_shardings` of `jax.jit`.
        mesh: as for `make_sharding`.
        donate: gives up the arrays that move, as `donate` of `jax.device_put` does.
        memory_kind: as for `make_sharding`.
        missing: what becomes of mesh axes that a spec names and the mesh does not have: 'error',
            or 'replicate' to cut nothing over them, as if they had one device.

    Returns:
        `x`, placed. Same values, shapes and tree.

    Raises:
        EinshardError: an expression is wrong, does not fit its array or the mesh, or `spec` is no
            prefix of `x`. Nothing has moved then.
    """
    where = find_mesh(mesh)
    kind = _kind(type(x))
    lenient = missing != 'error'
    if lenient:
        check_missing(missing)
    elif kind == _ARRAY and type(spec) is str and _stays(x, spec, where, memory_kind):
        return x
    if type(spec) is str and kind in _CONCRETE:
        # one array: 3 us beside the device_put, which takes 60 to 120 for 1 MiB; 16 as a tree
        one = allow(spec, missing=True) if lenient else spec
        try:
            placement = _new_placement(x, kind, one, where, memory_kind)
        except EinshardError as error:
            raise _about_leaf(error, x, 0, one, where, memory_kind) from None
        if not is_tracing():
            if placement is None:
                return x
            sharding = placement.sharding
            if isinstance(sharding.mesh, Mesh) and jax.process_count() == 1:
                return jax.device_put(x, sharding, donate=donate)
    leaves, treedef = jtu.tree_flatten(x)
    specs = leaf_specs(x, leaves, spec, where[0] if where else None, treedef)
    if lenient:
        specs = [None if one is None else allow(one, missing=True) for one in specs]
    placed = _place_leaves(x, leaves, specs, where, donate, memory_kind)
    return jtu.tree_unflatten(treedef, placed)


def _stays(x: Any, spec: str, where: Where, memory_kind: str | None) -> bool:
    """Whether an array is placed so already and stays as it is; where in doubt, False.

    The fast path: 1.0 us in all, against 18 for a device_put that moves nothing.
    """
    try:
        sharding = find_fitting(spec, x.shape, where, memory_kind).sharding
    except (EinshardError, TypeError):  # tried again, where it is known what it is about
        return False
    placed = x.sharding
    return (placed is sharding or placed == sharding) and not is_tracing()


def _place_leaves(
    tree: Any,
    leaves: list[Any],
    specs: Sequence[LeafSpec | None],
    where: Where,
    donate: bool,
    memory_kind: str | None,
) -> list[Any]:
    placed = list(leaves)
    moving: list[int] = []
    shardings: list[NamedSharding] = []
    tracing = is_tracing()
    for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        kind = _kind(type(leaf))
        if spec is None:
            continue
        try:
            if kind == _OTHER:
                check_visible(leaf)
                continue
            placement = _new_placement(leaf, kind, spec, where, memory_kind, tracing)
            if placement is None:
                continue
            if kind == _STRUCT:
                placed[i] = leaf.update(sharding=placement.sharding)
            elif kind == _TRACER:
                placed[i] = constrain(leaf, placement)
            elif tracing:
                placed[i] = place_constant(leaf, placement)
            else:
                moving.append(i)
                shardings.append(placement.sharding)
        except EinshardError as error:
            raise _about_leaf(error, tree, i, spec, where, memory_kind) from None
    if moving:
        moved = put([leaves[i] for i in moving], shardings, donate)
        for i, leaf in zip(moving, moved, strict=True):
            placed[i] = leaf
    return placed


def _new_placement(
    leaf: Any,
    kind: int,
    spec: LeafSpec,
    where: Where,
    memory_kind: str | None,
    tracing: bool = False,
) -> Placement | None:
    """The placement that a leaf is to get; None where it is placed so already."""
    shape = leaf.shape if kind != _SCALAR else ()
    try:
        placement = find_fitting(spec, shape, where, memory_kind)
    except TypeError:
        check_types(spec, len(shape), memory_kind)
        raise
    if kind == _ARRAY:
        # where a function is traced, jit forgets how the constants in it are placed
        if not tracing and _is_placed(leaf, placement.sharding):
            return None
    elif kind == _HOST:
        check_dtype(placement.expression, leaf.dtype)
    return placement


def _is_placed(x: Any, sharding: NamedSharding) -> bool:
    if x.sharding == sharding:
        return True
    # under explicit axes JAX itself writes P('x', None) for P('x')
    same_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == sharding.mesh
    return same_mesh and x.sharding.is_equivalent_to(sharding, x.ndim)


def put(leaves: list[Any], shardings: list[NamedSharding], donate: bool = False) -> list[Any]:
    """Moves concrete leaves, all in one `jax.device_put`."""
    for sharding in shardings:
        if isinstance(sharding.mesh, AbstractMesh):
            raise EinshardError(
                'an abstract mesh has no devices to put an array on',
                facts={
                    'give': 'a jax.ShapeDtypeStruct, which is annotated; or a mesh of devices',
                },
            )
    if jax.process_count() > 1:
        return [_put_global(x, s, donate) for x, s in zip(leaves, shardings, strict=True)]
    # one sharding for all spares device_put 0.7 us a leaf: it walks no tree of shardings
    first = shardings[0]
    same = all(sharding is first for sharding in shardings)
    return jax.device_put(leaves, first if same else shardings, donate=donate)


def _put_global(x: Any, sharding: NamedSharding, donate: bool) -> Any:
    """Moves one leaf where several processes hold the devices.

    `device_put` of data that each process has to itself would first gather it from all of them, to
    see that it is the same; each process takes its own shards instead.
    """
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(x, sharding, donate=donate)
    is_key = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
    whole = x if is_key else as_host(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def as_host(x: Any) -> np.ndarray[Any, Any]:
    """An array or a number as numpy has it, of a dtype that JAX has, if there is one."""
    # an int that JAX has no room for overflows here, as it does in one process
    host = np.asarray(jax.numpy.asarray(x) if type(x) is int else x)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)


_ARRAY, _TRACER, _HOST, _SCALAR, _STRUCT, _OTHER = range(6)
_CONCRETE = frozenset({_ARRAY, _HOST})


@cached
def _kind(leaf_type: type) -> int:
    """What einshard does with leaves of a type."""
    if issubclass(leaf_type, Tracer):
        return _TRACER
    if issubclass(leaf_type, jax.Array):
        return _ARRAY
    if issubclass(leaf_type, np.ndarray | np.generic):
        return _HOST
    if issubclass(leaf_type, bool | int | float | complex):
        return _SCALAR
    if issubclass(leaf_type, jax.ShapeDtypeStruct):
        return _STRUCT
    return _OTHER


@cached
def check_dtype(expression: Expression, dtype: np.dtype[Any]) -> None:
    """Raises for a dtype of numpy's that JAX has no arrays of."""
    try:
        jax.typeof(np.empty((), dtype))
    except TypeError:
        raise expression.error(f'JAX has no arrays of {dtype}') from None


def _about_leaf(
    error: EinshardError,
    tree: Any,
    index: int,
    spec: LeafSpec,
    where: Where,
    memory_kind: str | None,
) -> EinshardError:
    path, leaf = leaf_paths(tree)[index], jtu.tree_leaves(tree)[index]
    shape: tuple[int, ...] = np.shape(leaf)
    error = offer_missing(error, "missing='replicate'", spec, shape, where, memory_kind)
    return error.about(array=leaf_text(path, leaf))
