"""Expression, context -> Placement -> NamedSharding: what a spec means for an array."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from .._cache import cached
from .._errors import EinshardError, Suggestion
from .._notation.expression import Expression
from .._notation.layout import Layout, lay_out, mesh_entries, refactor
from .._suggestions import working_fix
from .axis_rules import Missing, apply_axis_rules
from .context import Context, current_context, make_context
from .leaf_spec import AnySpec, LeafSpec, as_leaf_spec, lenient, rewritten
from .mesh import (
    AnyMesh,
    MeshLike,
    is_device_mesh,
    memory_kinds,
    mesh_fact,
    partition_spec,
    refactored_mesh,
    sizes_of,
)

Shape: TypeAlias = tuple[int, ...]

_MOST_DIMS = 2**16  # far more than arrays have: '...' has an entry for each


@dataclass(frozen=True, slots=True)
class Placement:
    """An expression with all that was made of it."""

    expression: Expression
    layout: Layout
    sharding: NamedSharding
    missing_axes: tuple[str, ...] = ()  # mesh axes that are named and not there, where that may be


def make_sharding(
    expression: str,
    *,
    n_dims: int | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
) -> NamedSharding:
    """The `jax.sharding.NamedSharding` that an expression means.

        >>> sharding = make_sharding('a b -> 2 a2* b*', mesh=jax.devices()[:16])
        >>> sharding.shard_shape((8, 4))
        (2, 2)

    Equal placements give equal shardings with equal hashes, however they were written, so `jax.jit`
    traces once for all of them. A known expression costs a look-up.

    Args:
        expression: the placement, in the notation of the package.
        n_dims: the number of dimensions of the array; needed only where a sharded axis comes
            after '...' on the left, checked wherever it is given.
        mesh: a mesh whose axes are used, or devices; the mesh of `jax.set_mesh` where left out,
            else all devices. An `AbstractMesh` gives a sharding without devices.
        memory_kind: where on each device, as for `NamedSharding`: 'device', 'pinned_host', ...

    Raises:
        EinshardError: the expression breaks a rule, or does not fit the rank or the mesh.
    """
    if n_dims is not None and type(n_dims) is not int:
        check_types(expression, n_dims, memory_kind)  # the cache takes 2.0 for 2
    return resolve(expression, n_dims, current_context(mesh), memory_kind).sharding


def resolve(
    spec: AnySpec,
    shape: Shape | int | None,
    context: Context,
    memory_kind: str | None = None,
    missing: Missing = 'error',
    *,
    option: str | None = None,
) -> Placement:
    """What a spec means for arrays of a shape, or of a number of dimensions that may be unknown.

    Errors have a fix that works here, if one is known. `option` is how users of the caller ask it
    to leave out mesh axes that the mesh does not have.
    """
    try:
        if missing == 'replicate':
            spec = lenient(spec, on_missing=missing)
        return find_placement(spec, shape, context, memory_kind)
    except TypeError:  # of the cache, for what has no hash
        check_types(spec, shape, memory_kind)
        raise
    except EinshardError as error:
        fix = _working_fix(error, spec, shape, context, memory_kind, option)
        raise error.with_fix(fix) from None


@cached
def find_placement(
    spec: AnySpec, shape: Shape | int | None, context: Context, memory_kind: str | None
) -> Placement:
    """`resolve` in one look-up, without fixes in its errors."""
    check_types(spec, shape, memory_kind)
    spec = as_leaf_spec(spec)
    if memory_kind is not None and spec.memory_kind not in (None, memory_kind):
        raise EinshardError(
            f'the expression is for the memory {spec.memory_kind!r}, but memory_kind= is '
            f'{memory_kind!r}',
            expression=str(spec),
        )
    memory_kind = spec.memory_kind or memory_kind
    mesh = context.lowering_mesh
    axis_sizes = sizes_of(mesh)
    # the axes d0, d1, ... of the canonical mesh are names for nobody
    named_sizes = axis_sizes if context.mesh else {}
    expression, missing = apply_axis_rules(
        spec.expression, context.axis_rules, tuple(named_sizes), spec.on_missing
    )
    if mesh.axis_types and not axis_sizes:
        raise expression.error(
            'every mesh axis is manual here: in a per-device function each device '
            'has its own array, which cannot be sharded',
            mesh=mesh_fact(mesh),
        )
    layout = lay_out(
        expression,
        shape,
        math.prod(axis_sizes.values()),
        named_sizes if context.mesh else None,
        replicate_indivisible=spec.on_indivisible == 'replicate',
        hints=_hints(mesh),
    )
    known = None if memory_kind is None else memory_kinds(mesh)
    if known is not None and memory_kind not in known:
        raise expression.error(
            f'the devices have no memory kind {memory_kind!r}', devices_have=', '.join(known)
        )
    sharding = lower(layout, mesh, context.mesh_is_ambient, memory_kind)
    if sharding is None:
        counts = ' x '.join(str(split.count) for split in layout.splits if not split.mesh_axes)
        raise expression.error(
            f'the counts {counts} do not fall on the axes of the mesh',
            [term for term in expression.right if term.takes_devices and not term.mesh_axes],
            mesh=mesh_fact(mesh),
            a_count_takes='consecutive mesh axes, in order, and all of an axis',
        )
    return Placement(expression, layout, sharding, missing)


def _hints(mesh: AnyMesh) -> dict[str, str]:
    """What errors about the number of devices tell those who have one only."""
    alone = mesh.size == 1 and isinstance(mesh, Mesh) and jax.device_count() == 1
    if not alone or jax.default_backend() != 'cpu':
        return {}
    simulated = 'XLA_FLAGS=--xla_force_host_platform_device_count=8'
    return {'to_simulate_8': f'{simulated}, set before JAX starts'}


@cached
def lower(
    layout: Layout, mesh: AnyMesh, mesh_is_ambient: bool = False, memory_kind: str | None = None
) -> NamedSharding | None:
    """A layout in the axes of a mesh; None where its counts do not fall on them.

    The canonical mesh may be one with other factors, unless it is ambient: there JAX takes arrays
    on other factors for arrays on other devices. One object for arrays of many shapes, since
    device_put takes one sharding faster than many.
    """
    entries = mesh_entries(layout, sizes_of(mesh))
    if entries is None:
        by_name = any(split.mesh_axes for split in layout.splits)
        other_factors = is_device_mesh(mesh) and mesh.axis_types[0] == AxisType.Auto
        if mesh_is_ambient or by_name or not other_factors:
            return None
        mesh = refactored_mesh(mesh, refactor(layout))
        entries = mesh_entries(layout, sizes_of(mesh))
        assert entries is not None, 'a mesh made for the layout fits it'
    names = {str(name): name for name in mesh.axis_names}
    spec = partition_spec(tuple(names[axis] for axis in axes) for axes in entries)
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _working_fix(
    error: EinshardError,
    spec: AnySpec,
    shape: Shape | int | None,
    context: Context,
    memory_kind: str | None,
    option: str | None,
) -> str | None:
    """What the error, or else what is known here, suggests and what works."""

    def attempt(one: AnySpec, where: Context = context) -> Placement:
        return find_placement(one, shape, where, memory_kind)

    fix = working_fix(error, lambda text: attempt(rewritten(spec, text)))
    if fix is not None:
        return Suggestion(str(rewritten(spec, fix.expression)))
    mesh, rules = context.mesh, context.axis_rules
    if mesh is None:  # more likely it has been forgotten
        return None
    lenient_rules = tuple((name, placement, True) for name, placement, _ in rules)
    there = make_context(mesh, context.mesh_is_ambient, lenient_rules)
    try:
        if there is not context:
            attempt(spec, there)
            return "axis_rules(..., missing='replicate')"
    except EinshardError:
        pass
    if option is None:
        return None
    try:
        placement = attempt(lenient(spec, on_missing='replicate'))
    except EinshardError:
        return None
    # not where the spec is lenient already, and names no mesh axis that is missing
    return option if placement.missing_axes else None


def check_types(expression: object, shape: object, memory_kind: object) -> None:
    if not isinstance(expression, str | LeafSpec):
        raise EinshardError(
            'an expression is a string, not '
            f'{reprlib.repr(expression)} of type {type(expression).__name__}'
        )
    n_dims = len(shape) if isinstance(shape, tuple) else shape
    if n_dims is not None and (
        not isinstance(n_dims, int) or isinstance(n_dims, bool) or not 0 <= n_dims < _MOST_DIMS
    ):
        raise EinshardError(
            f'n_dims= is the number of dimensions of an array, not {n_dims!r}',
            expression=str(expression),
        )
    if memory_kind is not None and not isinstance(memory_kind, str):
        raise EinshardError(
            f'memory_kind= is a string, not {memory_kind!r}', expression=str(expression)
        )
