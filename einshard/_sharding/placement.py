"""Makes the Placement of a spec: its mesh, its axis rules, its device grid, its NamedSharding."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, replace
from typing import TypeAlias

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._cache import cached
from .._errors import EinshardError, quoted
from .._notation.expression import ELLIPSIS, Expression, Term, write_short
from .._notation.layout import (
    Layout,
    fit,
    fitting_sizes,
    lay_out,
    misfit_error,
    signed_axes,
    spec_entries,
)
from .._notation.words import SIGNS
from .apply_axis_rules import AppliedRules, apply_axis_rules
from .context import Context, context_on
from .leaf_spec import AnySpec, LeafSpec, as_leaf_spec, with_ndim
from .mesh import (
    UNCONSTRAINED,
    AnyMesh,
    is_canonical_mesh,
    memory_kinds,
    mesh_fact,
    named_sharding,
    partition_spec,
    reshape_canonical_mesh,
    simulation_fact,
    sizes_of,
    spec_axes,
)

Shape: TypeAlias = tuple[int, ...]

_MAX_DIMS = 2**16  # '...' becomes one entry per dimension


@dataclass(frozen=True, slots=True)
class Placement:
    """The sharding of a spec, with what `resolve` and its callers say about it."""

    spec: LeafSpec  # without axis rules, and with those mesh axes that the mesh has
    sharding: NamedSharding
    replicated_axes: tuple[int, ...] = ()  # array axes that are not divisible, as allowed
    missing_axes: tuple[str, ...] = ()  # mesh axes that were ignored because the mesh lacks them
    # the mesh is the user's, and there is no arrow, placement or axis rule, and no likely typo
    replicated_by_default: bool = False
    is_unconstrained: bool = False  # some axes are P.UNCONSTRAINED; for traced values only
    names_without_rule: tuple[str, ...] = ()  # axis names, in a short form under axis rules

    @property
    def expression(self) -> Expression:
        return self.spec.expression


def make_placement(spec: AnySpec, shape: Shape | int | None, context: Context) -> Placement:
    """Finds the placement, without testing fixes in errors or looking for typos."""
    # 1. the spec, with all axes of the array if it was a PartitionSpec
    check_types(spec, shape, context.memory_kind)
    spec = as_leaf_spec(spec)
    if spec.partition is not None and shape is not None:
        spec = with_ndim(spec, len(shape) if isinstance(shape, tuple) else shape)
    memory_kind = spec.memory_kind or context.memory_kind
    if context.memory_kind not in (None, memory_kind):
        raise EinshardError(
            f'the spec has memory kind {memory_kind!r}, but memory_kind= is '
            f'{context.memory_kind!r}',
            code='array',
            expression=str(spec),
        )
    # 2. the mesh: that of a NamedSharding, or of the context
    if spec.mesh is not None:
        context = context_on(spec.mesh, context)
    mesh = context.lowering_mesh
    # a PartitionSpec that fits needs nothing of what follows
    if spec.partition is not None and _fits_as_it_is(spec.partition, shape, memory_kind, context):
        return Placement(spec, _shared_sharding(mesh, spec.partition, memory_kind))
    written = spec.expression
    # 3. axis rules. Without a mesh, expressions cannot name the axes d0, d1, ... of the canonical
    # mesh.
    axis_sizes = sizes_of(context.mesh) if context.mesh else {}
    on_missing = 'replicate' if context.missing == 'replicate' else spec.on_missing
    applied = AppliedRules(written)
    if context.axis_rules or on_missing == 'replicate':
        applied = apply_axis_rules(written, context.axis_rules, axis_sizes, on_missing)
    if context.on_one_device:
        applied = applied._replace(expression=applied.expression.on_one_device())
    try:
        # 4. the device grid
        applied, layout = _lay_out_rules(applied, spec, shape, context)
        # 5. mesh axes for the grid
        _check_memory_kind(applied.expression, memory_kind, mesh)
        _check_explicit(applied.expression, mesh)
        sharding = lower(layout, mesh, context.mesh_is_ambient, memory_kind)
        if sharding is None:
            raise misfit_error(applied.expression, layout, mesh_fact(mesh))
    except EinshardError as error:
        if may_use_rules(written, context):
            raise error.about(before_axis_rules=f"'{written.text}'") from None
        raise
    if spec.unconstrained:
        sharding = with_unconstrained(sharding, spec)
    changes = applied.missing_axes or layout.replicated_axes or context.on_one_device
    if spec.partition is not None and not changes:
        # the result has the sharding that was given: P('data', None) and not P('data'), which JAX
        # places alike, but does not call equal
        sharding = _shared_sharding(sharding.mesh, spec.partition, sharding.memory_kind)
    is_bare = written.short and not any(term.spans_devices for term in written.right)
    has_rule = {ELLIPSIS, *(rule.name for rule in context.axis_rules)}
    return Placement(
        spec
        if applied.expression is spec.expression
        else replace(spec, written=applied.expression),
        sharding,
        layout.replicated_axes,
        missing_axes=applied.missing_axes,
        is_unconstrained=bool(spec.unconstrained),
        replicated_by_default=is_bare and is_users_mesh(context) and not context.axis_rules,
        names_without_rule=tuple(name for name in written.names if name not in has_rule)
        if is_bare and context.axis_rules
        else (),
    )


def _fits_as_it_is(
    partition: PartitionSpec, shape: Shape | int | None, memory_kind: str | None, context: Context
) -> bool:
    """Whether a PartitionSpec fits the array and the mesh, so that it needs no letters.

    Whatever does not fit, or has rules of its own (partial sums, P.UNCONSTRAINED), is resolved as
    an expression, whose errors have fixes.
    """
    mesh, entries = context.lowering_mesh, spec_axes(partition)
    is_special = partition.unreduced or partition.reduced or UNCONSTRAINED in entries
    if is_special or context.mesh is None or context.on_one_device:
        return False
    kinds = None if memory_kind is None else memory_kinds(mesh)
    sizes = sizes_of(mesh)
    if not sizes or (kinds is not None and memory_kind not in kinds):
        return False
    ndim = len(shape) if isinstance(shape, tuple) else shape
    if ndim is not None and len(entries) > ndim:
        return False
    for i, axes in enumerate(entries):
        if not all(str(axis) in sizes for axis in axes):
            return False
        n_shards = math.prod(sizes[str(axis)] for axis in axes)
        if isinstance(shape, tuple) and n_shards > 1 and shape[i] % n_shards:
            return False
    return True


# so that arrays of many shapes share one sharding object, as in `lower`
_shared_sharding = cached(named_sharding)


@cached
def lower(
    layout: Layout, mesh: AnyMesh, mesh_is_ambient: bool = False, memory_kind: str | None = None
) -> NamedSharding | None:
    """Lowers a layout to a sharding on `mesh`.

    If the counts do not match the mesh axes, reshapes the mesh, or returns None. Reshapes only a
    canonical mesh (see `device_mesh`) with Auto axes, for layouts without mesh axes, and never a
    mesh in JAX's context, because JAX rejects arrays on any other mesh.

    This function is cached, so arrays of many shapes share one sharding object. That makes
    `device_put` faster.
    """
    fitted = fit(layout, sizes_of(mesh))
    if fitted is None:
        has_mesh_axes = any(split.mesh_axes for split in layout.splits)
        is_auto = set(mesh.axis_types) == {AxisType.Auto}
        if mesh_is_ambient or has_mesh_axes or not (is_auto and is_canonical_mesh(mesh)):
            return None
        mesh = reshape_canonical_mesh(mesh, fitting_sizes(layout))
        fitted = fit(layout, sizes_of(mesh))
        assert fitted is not None, 'the reshaped mesh does not fit its layout'
    names = {str(name): name for name in mesh.axis_names}
    entries = [tuple(names[axis] for axis in axes) for axes in spec_entries(layout, fitted)]
    unreduced, reduced = (
        [names[axis] for axis in signed_axes(layout, fitted, sign)] for sign in SIGNS
    )
    spec = partition_spec(entries, unreduced, reduced)
    return named_sharding(mesh, spec, memory_kind)


def _lay_out_rules(
    applied: AppliedRules, spec: LeafSpec, shape: Shape | int | None, context: Context
) -> tuple[AppliedRules, Layout]:
    """Lays out an expression. Moves a '*' of axis rules to the end if it fits the mesh only there.

    The counts of '* batch2 d' do not match mesh axes of sizes 2 and 4, those of 'batch2 d *' do.
    """
    mesh = context.lowering_mesh
    axis_sizes = sizes_of(mesh)
    if mesh.axis_types and not axis_sizes:
        raise applied.expression.error(
            'an array cannot be sharded inside shard_map with all mesh axes Manual: each device '
            'already has its own array',
            code='mesh',
            mesh=mesh_fact(mesh),
            instead='shard arrays before shard_map',
        )

    def attempt(expression: Expression) -> Layout:
        return lay_out(
            expression,
            shape,
            math.prod(axis_sizes.values()),
            axis_sizes if context.mesh else None,
            replicates_by_default=is_users_mesh(context),
            replicate_indivisible='replicate' in (spec.on_indivisible, context.indivisible)
            or applied.replicate_indivisible,
            # types on Explicit axes have no uneven shards
            pad_indivisible=context.indivisible == 'pad'
            and AxisType.Explicit not in mesh.axis_types,
            hints=_device_facts(mesh, context),
        )

    layout = attempt(applied.expression)
    right, star = applied.expression.right, Term(star=True)
    if right[:1] != (star,) or star in spec.expression.right:
        return applied, layout
    if lower(layout, mesh, context.mesh_is_ambient) is None:
        moved = write_short([*right[1:], star])
        moved_layout = attempt(moved)
        if lower(moved_layout, mesh, context.mesh_is_ambient) is not None:
            return applied._replace(expression=moved), moved_layout
    return applied, layout


def is_users_mesh(context: Context) -> bool:
    """Whether the context has a mesh other than the canonical mesh of its devices."""
    return context.mesh is not None and not is_canonical_mesh(context.mesh)


def _check_memory_kind(expression: Expression, memory_kind: str | None, mesh: AnyMesh) -> None:
    kinds = None if memory_kind is None else memory_kinds(mesh)
    if kinds is not None and memory_kind not in kinds:
        raise expression.error(
            f'the devices have no memory kind {memory_kind!r}',
            code='array',
            memory_kinds=', '.join(kinds),
        )


def may_use_rules(expression: Expression, context: Context) -> bool:
    """Whether an axis rule may shard an axis of the expression."""
    have_rule = {rule.name for rule in context.axis_rules if rule.placement}
    return expression.short and not have_rule.isdisjoint(expression.names)


def _check_explicit(expression: Expression, mesh: AnyMesh) -> None:
    """Raises for terms with '+' or '=' unless all mesh axes are Explicit, as JAX requires."""
    signed = [term for term in expression.right if term.sign]
    if signed and set(mesh.axis_types) != {AxisType.Explicit}:
        raise expression.error(
            f'{quoted(map(str, signed))} {"needs" if len(signed) == 1 else "need"} a mesh whose '
            'axes are all Explicit',
            signed,
            code='mesh',
            mesh=mesh_fact(mesh),
            expected='mesh=device_mesh(devices, axis_types=AxisType.Explicit)'
            if is_canonical_mesh(mesh)
            else f'a mesh with axis_types=(AxisType.Explicit,) * {len(mesh.axis_types)}',
        )


def with_unconstrained(sharding: NamedSharding, spec: LeafSpec) -> NamedSharding:
    mesh = sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
        raise EinshardError(
            'P.UNCONSTRAINED needs a mesh without Explicit axes',
            code='mesh',
            facts={'mesh': mesh_fact(mesh)},
        )
    entries = spec_axes(sharding.spec)
    entries += [()] * (max(spec.unconstrained) + 1 - len(entries))
    for axis in spec.unconstrained:
        entries[axis] = UNCONSTRAINED
    return NamedSharding(mesh, partition_spec(entries), memory_kind=sharding.memory_kind)


def _device_facts(mesh: AnyMesh, context: Context) -> dict[str, str]:
    """Returns facts for errors about the number of devices, with the axes of a user's mesh."""
    return {'mesh': mesh_fact(mesh)} if is_users_mesh(context) else simulation_fact(mesh)


def check_types(expression: object, shape: object, memory_kind: object) -> None:
    if not isinstance(expression, str | LeafSpec):
        raise EinshardError(
            'an expression must be a string, not '
            f'{reprlib.repr(expression)} ({type(expression).__name__})',
            code='syntax',
        )
    ndim = len(shape) if isinstance(shape, tuple) else shape
    if ndim is not None and (
        not isinstance(ndim, int) or isinstance(ndim, bool) or not 0 <= ndim < _MAX_DIMS
    ):
        raise EinshardError(
            f'ndim= must be an integer from 0 to {_MAX_DIMS - 1}, not {ndim!r}',
            expression=str(expression),
        )
    check_memory_kind(expression, memory_kind)


def check_memory_kind(expression: object, memory_kind: object) -> None:
    if memory_kind is not None and not isinstance(memory_kind, str):
        raise EinshardError(
            f'memory_kind= must be a string, not {memory_kind!r}',
            code='array',
            expression=str(expression) if isinstance(expression, str | LeafSpec) else None,
        )
