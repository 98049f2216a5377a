"""einshard: places arrays, constrains traced values, and annotates ShapeDtypeStructs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal, TypeAlias, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, get_mesh
from jax.typing import ArrayLike

from .._cache import cached
from .._errors import EinshardError, combine_errors, hide_frames
from .._notation.expression import Expression
from .._sharding.axis_rules import check_flag, check_option
from .._sharding.context import Context, Fallback, Indivisible, changed, in_memory
from .._sharding.describe import describe
from .._sharding.leaf_spec import AnySpec, with_memory_kind
from .._sharding.mesh import AnyMesh, MeshLike
from .._sharding.placement import Placement, check_memory_kind
from .._sharding.resolve import find_placement, resolve
from .._sharding.scopes import current_context
from .._sharding.tracing import is_tracing
from .._trees.paths import leaf_paths, leaf_text
from .._trees.specs import (
    Spec,
    check_registered_pytree,
    context_of,
    leaf_specs,
    leaves_with_own_spec,
    not_an_array,
)
from .constrain import constrain, place_constant, warn_replicated
from .device_put import is_placed, put, put_array
from .process_agreement import PlannedArray, check_same_contents, mesh_to_compare_on

T = TypeVar('T')
LeafKind: TypeAlias = Literal['array', 'tracer', 'numpy', 'number', 'struct', 'ref', 'other']


# NumPy arrays inside a pytree keep their type for a type checker: Python cannot say "this pytree,
# with other leaves"
@overload
def einshard(  # type: ignore[reportOverlappingOverload]
    x: ArrayLike,
    spec: Spec,
    *,
    mesh: MeshLike | None = None,
    donate: bool = False,
    memory_kind: str | None = None,
    missing: Fallback = 'error',
    indivisible: Indivisible = 'error',
    check_processes: bool = True,
) -> jax.Array: ...
@overload
def einshard(
    x: T,
    spec: Spec,
    *,
    mesh: MeshLike | None = None,
    donate: bool = False,
    memory_kind: str | None = None,
    missing: Fallback = 'error',
    indivisible: Indivisible = 'error',
    check_processes: bool = True,
) -> T: ...
def einshard(
    x: Any,
    spec: Spec,
    *,
    mesh: MeshLike | None = None,
    donate: bool = False,
    memory_kind: str | None = None,
    missing: Fallback = 'error',
    indivisible: Indivisible = 'error',
    check_processes: bool = True,
) -> Any:
    """Shards an array, or every array of a pytree, as specified by an expression.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import einshard
        >>> x = einshard(np.ones((2 * jax.device_count(), 4)), 'batch d -> batch* d')
        >>> x.sharding.shard_shape(x.shape)
        (2, 4)

    What it does depends on the leaf:

    * An array that already has this sharding is returned as it is.
    * Other arrays, NumPy arrays and scalars are moved. A single process moves all of them with one
      `jax.device_put`. On CPU, the result may share memory with a NumPy array, so do not overwrite
      that array later.
    * An array that is a partial sum, or becomes one (`'a b +@tp'`), is resharded by `jax.reshard`.
    * A traced value, as inside `jax.jit`, is constrained: by `jax.lax.with_sharding_constraint`,
      or by `jax.reshard` if the mesh axes are explicit. `jax.device_put` moves it to other memory.
    * A `jax.ShapeDtypeStruct` is returned with the sharding.
    * A `jax.Ref` is returned if it already has this sharding; otherwise it is an error.
    * A leaf that is not an array, such as a function or a string, is returned as it is. It is an
      error if it has its own spec in a pytree of specs, or if it contains arrays but is not a
      registered pytree.

    Args:
        x: an array or a pytree of arrays.
        spec: an expression, such as the text that `describe` returns; a `PartitionSpec`; a
            `NamedSharding`, whose mesh is used; `Rules`; a function `(path, leaf) -> spec`, with
            paths such as 'layers/0/w'; None to leave `x` as it is; or a pytree of these that is a
            prefix of `x`, like `in_shardings` of `jax.jit`. In a traced function, axes may be
            `P.UNCONSTRAINED`.
        mesh: a mesh, or a sequence of devices, as for `make_sharding`.
        donate: whether to donate the arrays that are moved, as in `jax.device_put`.
        memory_kind: the memory on each device, as for `make_sharding`.
        missing: what to do if a spec names mesh axes that the mesh lacks: 'error', or 'replicate'
            to treat them as axes of size 1.
        indivisible: what to do if the size of an axis is not divisible by its number of shards:
            'error'; 'replicate' to replicate that axis only; or 'pad', for traced values on Auto
            axes, to let XLA pad the last shards, as with `jax.lax.with_sharding_constraint`. JAX
            has no such arrays outside of a program, so an argument or result cannot be padded.
        check_processes: whether the processes of a multi-process mesh compare digests of host data,
            like `jax.device_put`, which compares the data. If so, all of them must call `einshard`.

    Returns:
        `x` with the new shardings. To a type checker, an array or a number becomes a `jax.Array`,
        and a pytree keeps its type, also if it contains NumPy arrays.

    Raises:
        EinshardError: an expression is invalid, or does not fit its array or the mesh; or `spec`
            is not a prefix of `x`. The error lists all arrays that do not fit; no array is moved.
            Or processes pass different host data, which raises in each of them.
    """
    try:
        context = current_context(mesh)
        if missing != 'error' or indivisible != 'error':
            check_option('missing', missing)
            check_option('indivisible', indivisible, ('error', 'replicate', 'pad'))
            context = changed(context, missing=missing, indivisible=indivisible)
        if check_processes is not True or donate is not False:
            check_flag('check_processes', check_processes)
            check_flag('donate', donate)
        if memory_kind is not None:
            check_memory_kind(spec, memory_kind)
            context = in_memory(context, memory_kind)
        if type(spec) is str and indivisible != 'pad':
            placed = _place_array(x, spec, context, donate, check_processes)
            if placed is not None:
                return placed
        if type(spec) is not str:
            context = context_of(spec, context)
        leaves, treedef = jtu.tree_flatten(x)
        specs = leaf_specs(x, leaves, spec, context.mesh, treedef)
        tracing = is_tracing()
        # not a closure, which would add 0.2 us to the fast path
        find = partial(resolve, context=context, owner='einshard', traced=tracing)
        try:
            mesh = context.lowering_mesh if check_processes else None
            placed = _place_leaves(x, leaves, spec, specs, find, tracing, donate, mesh)
        except EinshardError as error:
            raise _suggest_numpy(error, x, leaves, spec, context) from None
        return jtu.tree_unflatten(treedef, placed)
    except EinshardError as error:
        hide_frames(error)
        raise


def _place_array(x: Any, spec: str, context: Context, donate: bool, check_processes: bool) -> Any:
    """Places a single concrete array. Returns None if it needs the slow path, `_place_leaves`.

    Takes 1.0 us for an array that already has the sharding of `spec`; `device_put` takes 16 us.
    """
    kind = kind_of(type(x))
    if kind != 'array' and kind != 'numpy':
        return None
    try:
        placement = find_placement(spec, x.shape, context)
        get_mesh()  # raises while tracing; see is_tracing
    except (ValueError, TypeError):
        return None
    if type(placement) is not Placement:  # the slow path raises an error that names it, or warns
        return None
    sharding = placement.sharding
    if kind == 'array':
        current = x.sharding
        if current is sharding or current == sharding or is_placed(x, sharding):
            return x
    elif not _is_jax_dtype(x.dtype):
        return None
    if check_processes and mesh_to_compare_on(x, sharding.mesh) is not None:
        return None
    return put_array(x, sharding, donate)


def _place_leaves(
    tree: Any,
    leaves: list[Any],
    spec_tree: Spec,
    specs: Sequence[AnySpec | None],
    find: partial[Placement],
    tracing: bool,
    donate: bool,
    compare_on: AnyMesh | None,
) -> list[Any]:
    """Replaces each array in `leaves` with a placed one.

    If some leaves do not fit, raises one error for all of them, and moves none. The processes of
    the mesh `compare_on` compare host data first.
    """
    moving: dict[int, NamedSharding] = {}  # leaf index to sharding
    others: set[int] = set()  # indices of leaves that are not arrays, but have a spec
    errors: list[tuple[int, EinshardError]] = []
    to_compare: dict[Mesh, list[tuple[PlannedArray, Any]]] = {}
    paths = cache(lambda: leaf_paths(tree))
    for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        try:
            kind = kind_of(type(leaf))
            placement = placement_of_leaf(leaf, kind, spec, find)
            if placement is None:
                if spec is not None:
                    others.add(i)
                continue
            if tracing or kind not in _CONCRETE:
                leaves[i] = _apply(placement, leaf, kind)
            elif kind != 'array' or not is_placed(leaf, placement.sharding):
                moving[i] = placement.sharding
                shared = compare_on and mesh_to_compare_on(leaf, placement.sharding.mesh)
                if shared is not None:
                    planned = leaf_text(paths()[i], leaf), placement.expression.text
                    to_compare.setdefault(shared, []).append((planned, leaf))
        except EinshardError as error:
            errors.append((i, error))
            shared = compare_on and mesh_to_compare_on(leaf, compare_on)
            if shared is not None and not tracing:
                # without this, processes without an error would wait for this one
                planned = leaf_text(paths()[i], leaf), str(spec)
                to_compare.setdefault(shared, []).append((planned, error))
    for mesh, arrays in to_compare.items():
        check_same_contents(arrays, mesh)
    own = sorted(others & leaves_with_own_spec(tree, spec_tree)) if others else []
    if errors or own:
        texts = [error.about(array=leaf_text(paths()[i], leaves[i])) for i, error in errors]
        texts += [not_an_array(paths()[i], leaves[i]) for i in own]
        raise combine_errors(texts) from None
    if moving:
        moved = put([leaves[i] for i in moving], [*moving.values()], donate)
        for i, leaf in zip(moving, moved, strict=True):
            leaves[i] = leaf
    return leaves


def placement_of_leaf(
    leaf: Any, kind: LeafKind, spec: AnySpec | None, find: partial[Placement]
) -> Placement | None:
    if spec is None:
        return None
    if kind == 'other':
        check_registered_pytree(leaf)
        return None
    options: dict[str, Any] = {'traced': False} if kind in ('struct', 'ref') else {}
    context: Context = find.keywords['context']
    if context.indivisible == 'pad' and kind != 'tracer':  # only values in a program are padded
        options['context'] = changed(context, indivisible='error')
    placement = find(spec, () if kind == 'number' else leaf.shape, **options)
    if kind == 'number':
        try:
            jax.typeof(leaf)
        except OverflowError as error:
            text = placement.expression.text
            raise EinshardError(str(error), code='array', expression=text) from None
    if kind == 'numpy':
        check_dtype(placement.expression, leaf.dtype)
    return placement


def _suggest_numpy(
    error: EinshardError, x: Any, leaves: list[Any], spec: Spec, context: Context
) -> EinshardError:
    """If `x` is a list of numbers, suggests `np.array(x)`."""
    kinds = {kind_of(type(leaf)) for leaf in leaves}
    if kinds != {'number'} or not isinstance(x, list | tuple) or not isinstance(spec, str):
        return error
    facts = {**error.facts, 'note': 'a list is a pytree, and each number in it is a leaf'}
    error = EinshardError(**error.parts(facts=facts))
    try:
        found = find_placement(spec, np.shape(x), context)
    except ValueError:  # raised by np.shape for rows of different lengths
        return error
    if isinstance(found, EinshardError):
        return error
    return error.with_fix(f'einshard(np.array(x), {spec!r})')


def _apply(placement: Placement, leaf: Any, kind: LeafKind) -> Any:
    """Applies a placement to a ShapeDtypeStruct or Ref, or to any array in a traced function."""
    if kind == 'struct':
        return leaf.update(sharding=placement.sharding)
    if kind == 'ref':
        check_ref(leaf, placement)
        return leaf
    if placement.replicated_by_default:
        warn_replicated(placement)
    # constants are constrained too, because jit drops their shardings
    return constrain(leaf, placement) if kind == 'tracer' else place_constant(leaf, placement)


def check_ref(ref: Any, placement: Placement) -> None:
    """Raises if a `jax.Ref` is not sharded as `placement` says.

    Resharding would create a new Ref, and code with the old Ref would miss writes to the new one.
    """
    if not is_placed(ref, placement.sharding):
        text = with_memory_kind(placement.expression.text, placement.sharding.memory_kind)
        facts = {'instead': f"jax.new_ref(einshard(ref[...], '{text}'))"}
        if text != placement.expression.text:  # JAX 0.10.2 cannot create a Ref in this memory
            facts = {'expected': f"'{text}'"}
        raise EinshardError(
            f"a jax.Ref cannot be resharded, and this one is sharded as '{describe(ref)}'",
            code='array',
            expression=placement.expression.text,
            facts=facts,
        )


_CONCRETE = frozenset({'array', 'numpy', 'number'})


@cached
def kind_of(leaf_type: type) -> LeafKind:
    if issubclass(leaf_type, Tracer):
        return 'tracer'
    if issubclass(leaf_type, jax.Array):
        return 'array'
    if issubclass(leaf_type, np.ma.MaskedArray):
        return 'other'
    if issubclass(leaf_type, np.ndarray | np.generic):
        return 'numpy'
    if issubclass(leaf_type, bool | int | float | complex):
        return 'number'
    if issubclass(leaf_type, jax.ShapeDtypeStruct):
        return 'struct'
    if issubclass(leaf_type, jax.Ref):
        return 'ref'
    return 'other'


def check_dtype(expression: Expression, dtype: np.dtype[Any]) -> None:
    if not _is_jax_dtype(dtype):
        raise EinshardError(
            f'JAX does not support dtype {dtype}', code='array', expression=expression.text
        )


@cached
def _is_jax_dtype(dtype: np.dtype[Any]) -> bool:
    try:
        jax.typeof(np.empty((), dtype))
    except TypeError:
        return False
    return True
