"""Describes shardings as expressions: the inverse of `make_sharding`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, Sharding, SingleDeviceSharding

from .._errors import EinshardError, public
from .._notation.expression import ELLIPSIS, Expression, Term, axis_letters, with_unsharded, write
from .._notation.layout import Layout, Split, merge_neighbors
from .._notation.words import is_mesh_axis
from .collective_axes import as_named_sharding
from .leaf_spec import signed_terms, with_memory_kind
from .mesh import (
    UNCONSTRAINED,
    device_mesh,
    has_valid_names,
    is_canonical_mesh,
    partial_axes,
    position,
    sizes_of,
    spec_axes,
    unreduced_kind,
)
from .placement import lower


@overload
def describe(x: jax.Array | np.ndarray | jax.ShapeDtypeStruct | Sharding) -> str: ...
@overload
def describe(x: Any) -> Any: ...
@public
def describe(x: Any) -> Any:
    """Describes the sharding of an array, or of each array in a pytree, as an expression.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import describe, einshard
        >>> types = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=types)
        >>> w = einshard(np.ones((8 * mesh.size, 4)), 'x@data y', mesh=mesh)
        >>> describe({'w': w, 'b': jax.numpy.zeros(3)})
        {'b': 'on one device: ...', 'w': 'a b -> a@data b'}

    Axes are named a, b, c, ... in array order. `make_sharding(describe(s))` equals `s` for every
    `s` from `make_sharding`; if `s` is on your own mesh, pass the same `mesh=`. Axes sharded over
    your own mesh are described by mesh axis names, others by counts: `'a b -> a16 b'`. A memory
    kind other than 'device' comes last, as in `'a b -> a16 b (in pinned_host)'`. In a spec, this
    suffix means `memory_kind='pinned_host'`.

    If all arrays of a pytree have expressions, the result is a spec: `einshard(other,
    describe(tree))` shards another pytree of the same structure in the same way.

    Args:
        x: an array, a sharding, a `ShapeDtypeStruct` or a tracer, or a pytree of those. A sharding
            has no rank, so '...' stands for the axes after those in its spec.

    Returns:
        An expression, or a description such as 'on one device: cpu:0', which is not a valid spec.
        For example, host arrays, arrays with a `SingleDeviceSharding` and tracers sharded by the
        compiler have only a description. For a pytree, returns a pytree of these, with None for
        other leaves.

    Raises:
        EinshardError: `x` is a leaf that is neither an array nor a sharding.
    """
    if isinstance(x, Sharding) or jtu.all_leaves([x]):
        text = _describe_leaf(x)
        if text is None:
            raise EinshardError(
                f'describe needs an array or a sharding, not {type(x).__name__}',
                facts={'expected': 'an array, ShapeDtypeStruct or sharding, or a pytree of these'},
            )
        return text
    return jtu.tree_map(_describe_leaf, x)


class Description(str):
    """A description of a sharding that has no expression. It is not a valid spec.

    `portable` is the description without device names, which differ between machines.
    """

    portable: str

    def __new__(cls, text: str, portable: str | None = None):
        description = super().__new__(cls, text)
        description.portable = text if portable is None else portable
        return description


def _describe_leaf(x: Any) -> str | None:
    sharding: Any = x if isinstance(x, Sharding) else sharding_of(x)
    if sharding is None or isinstance(sharding, Description):
        return sharding
    shape = None if isinstance(x, Sharding) else x.shape
    ndim = None if shape is None else len(shape)
    if isinstance(sharding, NamedSharding):
        return describe_named(sharding, ndim)
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        portable = 'on one device'
        text = f'{portable}: {device}'
    else:
        mesh = device_mesh(sorted(sharding.device_set, key=position))
        named = None if shape is None else as_named_sharding(sharding, shape, mesh)
        if named is not None:
            return describe_named(named, ndim)
        text = portable = (
            f'sharded by a {type(sharding).__name__} over {len(sharding.device_set)} devices'
        )
    kind = sharding.memory_kind
    return Description(with_memory_kind(text, kind), with_memory_kind(portable, kind))


def describe_named(
    sharding: NamedSharding, ndim: int | None = None, names: Sequence[str] | None = None
) -> str:
    """Describes a NamedSharding. If `names` is None, axes are named a, b, c, ..."""
    expression = find_expression(sharding, ndim, names)
    if expression is not None:
        return with_memory_kind(expression.text, sharding.memory_kind)
    return _describe_with_notes(sharding, ndim, names)


def _describe_with_notes(
    sharding: NamedSharding, ndim: int | None, names: Sequence[str] | None, *notes: str
) -> Description:
    """Adds notes on unconstrained and partial axes and the memory kind: ' (in pinned_host)'."""
    axes, rest = _axis_names(sharding, ndim, names)
    named = write(map(Term, (*axes, *rest)), (*_terms_by_name(sharding, axes), *map(Term, rest)))
    listed = [*notes]
    if None in _entries(sharding):
        listed.append('with unconstrained axes')
    unreduced, reduced = (', '.join(sorted(map(str, axes))) for axes in partial_axes(sharding))
    if unreduced:
        listed.append(f'with partial {unreduced_kind(sharding.spec)}s over {unreduced}')
    if reduced:
        listed.append(f'with gradients unreduced over {reduced}')
    if sharding.memory_kind not in (None, 'device'):
        listed.append(f'in {sharding.memory_kind}')
    return Description(f'{named.text} ({"; ".join(listed)})' if listed else named.text)


def describe_in(
    expression: Expression, sharding: Sharding, ndim: int, n_batch_axes: int = 0
) -> str:
    """Describes a sharding with the axis names of `expression`, unless that has '...'.

    The axes of the array are `n_batch_axes` axes that `expression` lacks, and then its `ndim` axes.
    """
    if not isinstance(sharding, NamedSharding):
        return describe(sharding)
    names = expression.names
    letters = (letter for letter in axis_letters() if letter not in names)
    all_names = (*itertools.islice(letters, n_batch_axes), *names)
    return describe_named(sharding, n_batch_axes + ndim, None if ELLIPSIS in names else all_names)


def sharding_of(x: Any) -> Sharding | Description | None:
    """Returns the sharding of an array.

    Returns a description if the sharding is unknown, and None if `x` is not an array.
    """
    if isinstance(x, Tracer):
        sharding = jax.typeof(x).sharding
        types = sharding.mesh.axis_types
        if AxisType.Explicit not in types:
            return Description('decided by the compiler: a traced value')
        if AxisType.Auto in types:  # JAX's types of traced values omit Auto axes
            note = 'Auto axes decided by the compiler'
            return _describe_with_notes(sharding, len(x.shape), None, note)
        return sharding
    if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
        kind = f'{type(x).__module__.split(".")[0]}.{type(x).__name__}'
        return Description(f'on the host: {kind.removeprefix("builtins.")}')
    sharding = getattr(x, 'sharding', None)
    if isinstance(sharding, Sharding):
        return sharding
    if isinstance(x, jax.ShapeDtypeStruct):
        return Description('not placed: a ShapeDtypeStruct without a sharding')
    return None


def _entries(sharding: NamedSharding) -> list[tuple[Any, ...] | None]:
    """Returns the mesh axes of each array axis, with None for unconstrained axes."""
    return [None if axes == UNCONSTRAINED else axes for axes in spec_axes(sharding.spec)]


def find_expression(
    sharding: NamedSharding, ndim: int | None = None, names: Sequence[str] | None = None
) -> Expression | None:
    """Returns the expression that lowers to `sharding`, or None. Ignores the memory kind."""
    spec, mesh = sharding.spec, sharding.mesh
    entries = _entries(sharding)
    if unreduced_kind(spec) != 'sum' or None in entries or not has_valid_names(mesh):
        return None
    axes, rest = _axis_names(sharding, ndim, names)
    sizes, sets = sizes_of(mesh), (*entries, spec.unreduced, spec.reduced)
    used = [str(axis) for axes in sets for axis in axes or ()]
    can_use_names = bool(used) and all(axis in sizes and is_mesh_axis(axis) for axis in used)
    # on a user's mesh, use counts only if the spec has no mesh axes, or one whose name the notation
    # cannot write
    if _fits_counts(sharding) and (is_canonical_mesh(mesh) or not can_use_names):
        splits = _device_grid(sharding)
        pairs = ((None if s.axis is None else axes[s.axis], s) for s in splits)
        counted = [Term(name, s.count, sign=s.sign) for name, s in pairs]
        right = (*with_unsharded(counted, axes), *map(Term, rest))
    elif can_use_names:
        signed = signed_terms(spec, mesh.axis_names)
        right = (*_terms_by_name(sharding, axes), *map(Term, rest), *signed)
    else:
        return None
    return write(map(Term, (*axes, *rest)), right)


def _axis_names(
    sharding: NamedSharding, ndim: int | None, names: Sequence[str] | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the names of the array axes, and either ['...'] or [].

    '...' stands for the axes after these if the rank is unknown. A scalar also needs it, because
    the right side of an expression cannot be empty.
    """
    n_named = len(_entries(sharding)) if ndim is None else ndim
    axes = list(itertools.islice(axis_letters(), n_named)) if names is None else names
    return axes, [ELLIPSIS] if ndim is None or not axes else []


def _terms_by_name(sharding: NamedSharding, axes: Sequence[str]) -> list[Term]:
    """Returns the terms of the array axes, with mesh axes, as in 'a@data b'."""
    entries = [*_entries(sharding), *[()] * len(axes)]
    pairs = zip(axes, entries, strict=False)
    return [Term(axis, mesh_axes=tuple(map(str, entry or ()))) for axis, entry in pairs]


def _fits_counts(sharding: NamedSharding) -> bool:
    """Whether an expression with counts lowers to this sharding."""
    grid = _device_grid(sharding)
    signs = [split.sign for split in grid if split.sign]
    # an expression has each sign at most once
    if AxisType.Manual in sharding.mesh.axis_types or len(signs) > len(set(signs)):
        return False
    lowered = lower(Layout(tuple(grid)), sharding.mesh)
    assert lowered is not None, 'the device grid does not fit its own mesh'
    entries = _entries(sharding)
    while entries and not entries[-1]:
        entries.pop()
    same = partial_axes(lowered) == partial_axes(sharding)
    return same and _entries(lowered) == entries


def _device_grid(sharding: NamedSharding) -> list[Split]:
    array_axis = {axis: i for i, entry in enumerate(_entries(sharding)) for axis in entry or ()}
    sizes, signs = sharding.mesh.shape, signs_of(sharding)
    axes = [axis for axis, size in sizes.items() if size > 1]
    return merge_neighbors(
        [Split(sizes[axis], array_axis.get(axis), sign=signs.get(axis, '')) for axis in axes]
    )


def signs_of(sharding: NamedSharding) -> dict[Any, str]:
    """Maps each unreduced mesh axis to '+', and each reduced mesh axis to '='."""
    unreduced, reduced = partial_axes(sharding)
    return dict.fromkeys(unreduced, '+') | dict.fromkeys(reduced, '=')
