"""A sharding -> the expression that means it; the inverse of `make_sharding`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ._errors import EinshardError
from ._expression import ELLIPSIS, Expression, Term, axis_letters
from ._layout import with_unsharded
from ._mesh import device_mesh, entry_axes, is_device_mesh
from ._sharding import make_sharding


@overload
def describe(x: jax.Array | np.ndarray | jax.ShapeDtypeStruct | Sharding) -> str: ...
@overload
def describe(x: Any) -> Any: ...
def describe(x: Any) -> Any:
    """The expression of where an array, or anything with a sharding, lives; or a tree of those.

        >>> describe(make_sharding('x y -> x4 * y', n_dims=2, mesh=jax.devices()[:8]))
        'a ... -> a4 2 ...'
        >>> describe({'w': einshard(np.ones((16, 4)), 'x* y'), 'b': jax.numpy.zeros(3)})
        {'b': 'on one device: ...', 'w': 'a b -> a16 b'}

    Axes are called a, b, c, ... in array order. `make_sharding(describe(s))` equals `s` for every
    `s` that `make_sharding` makes (with the same `mesh=`, if `s` is on a mesh of your own: such a
    sharding is described by its axis names, as in `'a b -> a@data b'`).

    Of a tree whose arrays are all placed this is a spec: `einshard(other, describe(tree))` places
    another tree of that structure in the same way.

    Args:
        x: an array, a sharding, a `ShapeDtypeStruct`, or a tracer. A sharding alone does not
            know its rank, so axes after the last sharded one are '...'. Or a tree of those.

    Returns:
        An expression; or words where there is none to give, as for host arrays, arrays on a single
        device, and tracers whose placement the compiler decides: `einshard` refuses those. For a
        tree, the tree of them, with None for leaves that are no arrays.

    Raises:
        EinshardError: `x` is no tree, and has no sharding.
    """
    if isinstance(x, Sharding) or jtu.all_leaves([x]):
        text = _describe_leaf(x)
        if text is None:
            raise EinshardError(
                f'{type(x).__name__} has no sharding to describe',
                facts={'give': 'an array, a ShapeDtypeStruct, a sharding, or a tree of those'},
            )
        return text
    return jtu.tree_map(_describe_leaf, x)


def _describe_leaf(x: Any) -> str | None:
    """Where a leaf is; None for what is no array."""
    sharding: Any = x if isinstance(x, Sharding) else _sharding_of(x)
    n_dims = None if isinstance(x, Sharding) else np.ndim(x)
    if sharding is None or isinstance(sharding, str):
        return sharding
    if isinstance(sharding, NamedSharding):
        return describe_named(sharding, n_dims)
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return f'on one device: {device}'
    return f'by a {type(sharding).__name__} over {len(sharding.device_set)} devices'


def describe_named(
    sharding: NamedSharding, n_dims: int | None = None, names: Sequence[str] | None = None
) -> str:
    """The expression of a NamedSharding, in the axis names given or in a, b, c, ..."""
    n_named = len(sharding.spec) if n_dims is None else n_dims
    axes = list(names) if names is not None else list(itertools.islice(axis_letters(), n_named))
    rest = ['...'] if n_dims is None or not axes else []
    left = ' '.join([*axes, *rest])
    by_count, by_name = _by_count(sharding, axes), _by_name(sharding, axes)
    ours = is_device_mesh(sharding.mesh) or not any(_entries(sharding))
    in_order = [by_count, by_name] if ours else [by_name, by_count]
    expressions = [f'{left} -> {" ".join([*terms, *rest])}' for terms in in_order]
    for expression in expressions:
        if _means(expression, sharding, n_dims):
            return expression
    return f'{left} -> {" ".join([*by_name, *rest])}{_rest(sharding)}'


def describe_in(expression: Expression, sharding: Sharding, n_dims: int) -> str:
    """Where an array lives that an expression is for, in the axis names of that."""
    if not isinstance(sharding, NamedSharding):
        return describe(sharding)
    names = expression.names
    return describe_named(sharding, n_dims, None if ELLIPSIS in names else names)


def _sharding_of(x: Any) -> Sharding | str | None:
    """The sharding of an array, or words for where it is; None for what is no array."""
    if isinstance(x, Tracer):
        sharding = jax.typeof(x).sharding
        if not any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
            return 'where the compiler decides: a traced value'
        return sharding
    if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
        return f'on the host: {type(x).__module__.split(".")[0]}.{type(x).__name__}'.replace(
            'builtins.', ''
        )
    sharding = getattr(x, 'sharding', None)
    if isinstance(sharding, Sharding):
        return sharding
    if isinstance(x, jax.ShapeDtypeStruct):
        return 'nowhere yet: a ShapeDtypeStruct without a sharding'
    return None


def _entries(sharding: NamedSharding) -> list[tuple[Any, ...] | None]:
    """The mesh axes of each array axis; None for an axis left unconstrained."""
    free = PartitionSpec.UNCONSTRAINED
    return [None if entry is free else entry_axes(entry) for entry in sharding.spec]


def _by_count(sharding: NamedSharding, axes: Sequence[str]) -> list[str]:
    """The right side in counts, as far as counts can say it."""
    entries = _entries(sharding)
    owner = {name: axes[i] for i, entry in enumerate(entries) for name in entry or ()}
    grid: list[tuple[str, int]] = []
    for name, size in zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True):
        holder = owner.get(name, '')
        if size > 1 and grid and grid[-1][0] == holder:
            grid[-1] = (holder, grid[-1][1] * size)
        elif size > 1:
            grid.append((holder, size))
    terms = [f'{holder}{count}' for holder, count in grid]
    return with_unsharded(terms, [holder for holder, _ in grid], axes)


def _by_name(sharding: NamedSharding, axes: Sequence[str]) -> list[str]:
    entries = [*_entries(sharding), *[()] * len(axes)]
    pairs = zip(axes, entries, strict=False)
    return [str(Term(axis, mesh_axes=tuple(map(str, entry or ())))) for axis, entry in pairs]


def _rest(sharding: NamedSharding) -> str:
    """What the notation has no words for."""
    notes: list[str] = []
    if None in _entries(sharding):
        notes.append('with axes left unconstrained')
    unreduced = getattr(sharding.spec, 'unreduced', None)
    if unreduced:
        notes.append(f'with partial sums over {", ".join(sorted(map(str, unreduced)))}')
    return f' ({"; ".join(notes)})' if notes else ''


def _means(expression: str, sharding: NamedSharding, n_dims: int | None) -> bool:
    """Whether the expression would be lowered onto just this mesh and spec."""
    mesh = sharding.mesh
    meshes = [mesh]
    if is_device_mesh(mesh):
        meshes.insert(0, device_mesh(mesh, axis_types=mesh.axis_types[0]))
    for candidate in meshes:
        try:
            made = make_sharding(expression, n_dims=n_dims, mesh=candidate)
        except EinshardError:
            continue
        # devices are not compared: those of an abstract mesh are not known, others are the same
        same = (made.mesh.axis_names, made.mesh.axis_sizes) == (mesh.axis_names, mesh.axis_sizes)
        if same and _entries(made) == _strip(_entries(sharding)):
            return True
    return False


def _strip(entries: list[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None]:
    while entries and entries[-1] == ():
        entries.pop()
    return entries
