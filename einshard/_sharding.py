"""Layout, mesh -> NamedSharding; and the cache of all the way from text to sharding."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    get_abstract_mesh,
)

from ._axis_rules import apply_axis_rules, drop_missing, named_axes
from ._cache import cached
from ._errors import EinshardError
from ._expression import Expression, parse
from ._layout import Layout, check_divisible, fit, lay_out, refactor, spec_entries, without_axes
from ._mesh import (
    AnyMesh,
    AxisRules,
    MeshLike,
    around,
    device_mesh,
    is_device_mesh,
    mesh_fact,
    partition_spec,
    refactored_mesh,
    resolve_mesh,
    sizes_of,
)
from ._specs import LeafSpec, Lenient, allow, as_lenient

_MOST_DIMS = 2**16  # far more than arrays have: '...' has an entry for each


@dataclass(frozen=True, slots=True)
class Placement:
    """An expression with all that was made of it."""

    expression: Expression
    layout: Layout
    sharding: NamedSharding
    fixed: bool = False  # whether a mesh in context fixes the mesh axes
    given_up: tuple[int, ...] = ()  # array axes replicated since they are not divisible
    missing: tuple[str, ...] = ()  # mesh axes that are named and not there, where that may be

    def replicating(self, shape: Sequence[int], mesh: AnyMesh) -> Placement:
        """The same, but for axes of `shape` that are not divisible: the devices replicate them.

        On `mesh`: that of the sharding may have other factors, which are needed no more.
        """
        given_up = tuple(axis for axis, parts in self.layout.parts.items() if shape[axis] % parts)
        if not given_up:
            return self
        layout = without_axes(self.layout, given_up)
        sharding = lower(self.expression, layout, mesh, self.sharding.memory_kind, fixed=self.fixed)
        return replace(self, layout=layout, sharding=sharding, given_up=given_up)


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
    return find_placement(expression, n_dims, mesh, memory_kind).sharding


# Where a placement is looked up: a mesh given or around, whether a mesh in context fixes its axes,
# and the axis rules; None for the one mesh of all devices without rules.
Where: TypeAlias = tuple[AnyMesh | None, bool, AxisRules] | None


def find_placement(
    expression: str,
    n_dims: int | None,
    mesh: MeshLike | None,
    memory_kind: str | None,
    missing: bool = False,
) -> Placement:
    """The placement an expression means for arrays of `n_dims` dimensions, here and now."""
    where = find_mesh(mesh)
    try:
        return _find_placement(expression, missing, n_dims, where, memory_kind)
    except TypeError:
        check_types(expression, n_dims, memory_kind)
        raise


def find_mesh(mesh: MeshLike | None) -> Where:
    """The mesh given, or that around us.

    Resolved once for a tree, not for every leaf: to find the mesh in context takes a microsecond,
    to hash a sequence of devices one for each few of them.
    """
    no_context = get_abstract_mesh().empty
    surroundings = around.get()
    if mesh is None and no_context and surroundings is None:
        return None
    rules = surroundings.axis_rules if surroundings else ()
    if mesh is None and no_context and not (surroundings and surroundings.mesh):
        return None, False, rules
    if isinstance(mesh, (Mesh, AbstractMesh)) and no_context:
        return mesh, False, rules
    return resolve_mesh(mesh), mesh is None and not no_context, rules


def mesh_at(where: Where) -> AnyMesh:
    """The mesh that expressions are lowered onto there."""
    return (where and where[0]) or device_mesh()


@cached
def find_fitting(
    spec: LeafSpec, shape: tuple[int, ...], where: Where, memory_kind: str | None
) -> Placement:
    """The placement an expression means for arrays of a shape.

    One look-up for the placement and for whether its parts divide the shape.
    """
    known = as_lenient(spec)
    try:
        placement = _find_placement(known.expression, known.missing, len(shape), where, memory_kind)
    except EinshardError as error:
        raise _fix_that_fits(error, known, shape, where, memory_kind) from None
    if known.indivisible:
        return placement.replicating(shape, mesh_at(where))
    n_devices = placement.sharding.mesh.size
    check_divisible(placement.expression, placement.layout, shape, n_devices)
    return placement


def _fix_that_fits(
    error: EinshardError,
    spec: Lenient,
    shape: tuple[int, ...],
    where: Where,
    memory_kind: str | None,
) -> EinshardError:
    """The error, without an expression that would do here but for the sizes of the array."""
    if error.fix is None or not error.fix.startswith("'"):
        return error
    try:
        find_fitting(replace(spec, expression=error.fix[1:-1]), shape, where, memory_kind)
    except EinshardError:
        return error.with_fix(None)
    return error


def offer_missing(
    error: EinshardError,
    fix: str,
    spec: LeafSpec,
    shape: tuple[int, ...],
    where: Where,
    memory_kind: str | None,
) -> EinshardError:
    """The error with `fix`, which leaves missing mesh axes out, where that works.

    Not where there is no mesh: the user has then more likely forgotten it.
    """
    lenient = allow(spec, missing=True)
    if error.fix is not None or lenient == spec or where is None or where[0] is None:
        return error
    try:
        placement = find_fitting(lenient, shape, where, memory_kind)
    except EinshardError:
        return error
    return error.with_fix(fix) if placement.missing else error


@cached
def _find_placement(
    text: str, missing: bool, n_dims: int | None, where: Where, memory_kind: str | None
) -> Placement:
    check_types(text, n_dims, memory_kind)
    try:
        return _make_placement(text, missing, n_dims, where, memory_kind)
    except EinshardError as error:
        fix = _working_fix(error, missing, n_dims, where, memory_kind)
        fix = fix or _lenient_rules(text, missing, n_dims, where, memory_kind)
        raise error.with_fix(fix) from None


def _working_fix(
    error: EinshardError, missing: bool, n_dims: int | None, where: Where, memory_kind: str | None
) -> str | None:
    """The fix that an error offers, if it works here; else the fix of the fix.

    The parser does not know the devices, nor the lay-out the axes of the mesh: only here is it
    certain.
    """
    fix = error.fix
    for _ in range(3):
        if fix is None:
            return None
        text = fix.removeprefix("'").removesuffix("'")
        try:
            _make_placement(text, missing, n_dims, where, memory_kind)
        except EinshardError as again:
            fix = again.fix
        else:
            return fix
    return None


def _lenient_rules(
    text: str, missing: bool, n_dims: int | None, where: Where, memory_kind: str | None
) -> str | None:
    """The fix of axis rules for mesh axes that are not there, if it works."""
    given, fixed, rules = where or (None, False, ())
    lenient = tuple((name, placement, True) for name, placement, _ in rules)
    if given is None or lenient == rules:
        return None
    try:
        _make_placement(text, missing, n_dims, (given, fixed, lenient), memory_kind)
    except EinshardError:
        return None
    return "axis_rules(..., missing='replicate')"


def _make_placement(
    text: str, missing: bool, n_dims: int | None, where: Where, memory_kind: str | None
) -> Placement:
    given, fixed, rules = where or (None, False, ())
    mesh = given or device_mesh()
    axis_sizes = sizes_of(mesh)
    # the axes d0, d1, ... of the default mesh are names for nobody
    names = tuple(axis_sizes) if given else ()
    written = parse(text)
    expression = apply_axis_rules(written, rules, names) if rules else written
    if missing:
        expression = drop_missing(expression, names)
    if mesh.axis_types and not axis_sizes:
        raise expression.error(
            'every mesh axis is manual here: in a per-device function each device '
            'has its own array, which cannot be sharded',
            mesh=mesh_fact(mesh),
        )
    n_devices = math.prod(axis_sizes.values())
    try:
        layout = lay_out(expression, n_dims, n_devices, axis_sizes if given else None)
    except EinshardError as error:
        alone = mesh.size == 1 and jax.device_count() == 1 and jax.default_backend() == 'cpu'
        if alone and 'works with' in error.facts:
            simulated = 'XLA_FLAGS=--xla_force_host_platform_device_count=8'
            raise error.about(to_simulate_8=f'{simulated}, set before JAX starts') from None
        raise
    sharding = lower(expression, layout, mesh, memory_kind, fixed=fixed)
    left_out = tuple(axis for axis in named_axes(written, rules) if axis not in names)
    return Placement(expression, layout, sharding, fixed, missing=left_out)


def lower(
    expression: Expression,
    layout: Layout,
    mesh: AnyMesh,
    memory_kind: str | None = None,
    fixed: bool = False,
) -> NamedSharding:
    """Writes a layout in the axes of a mesh; of the one mesh, in other factors unless `fixed`."""
    fitted = fit(layout, sizes_of(mesh))
    if fitted is None:
        mesh, fitted = _fit_other_factors(expression, layout, mesh, fixed)
    names = {str(name): name for name in mesh.axis_names}
    entries = [tuple(names[axis] for axis in axes) for axes in spec_entries(layout, fitted)]
    _check_memory_kind(expression, mesh, memory_kind)
    return NamedSharding(mesh, partition_spec(entries), memory_kind=memory_kind)


def _fit_other_factors(
    expression: Expression, layout: Layout, mesh: AnyMesh, fixed: bool
) -> tuple[AnyMesh, tuple[tuple[str, ...], ...]]:
    """The one mesh with factors on which the layout falls, if it may be another mesh."""
    counted = [term for term in expression.right if term.laid and not term.mesh_axes]
    # under a mesh in context, JAX takes arrays on other factors for arrays on other devices
    ours = not fixed and is_device_mesh(mesh)
    by_name = any(split.mesh_axes for split in layout.splits)
    if ours and not by_name and mesh.axis_types[0] == AxisType.Auto:
        mesh = refactored_mesh(mesh, refactor(layout))
        fitted = fit(layout, sizes_of(mesh))
        assert fitted is not None, 'a mesh made for the layout fits it'
        return mesh, fitted
    counts = ' x '.join(str(split.count) for split in layout.splits if not split.mesh_axes)
    raise expression.error(
        f'the counts {counts} do not fall on the axes of the mesh',
        counted,
        mesh=mesh_fact(mesh),
        a_count_takes='consecutive mesh axes, in order, and all of an axis',
    )


def _check_memory_kind(expression: Expression, mesh: AnyMesh, memory_kind: str | None) -> None:
    if memory_kind is None or isinstance(mesh, AbstractMesh):
        return
    known = sorted({memory.kind for memory in mesh.devices.flat[0].addressable_memories()})
    if memory_kind not in known:
        raise expression.error(
            f'the devices have no memory kind {memory_kind!r}', devices_have=', '.join(known)
        )


def check_types(expression: object, n_dims: object, memory_kind: object) -> None:
    if not isinstance(expression, str):
        raise EinshardError(
            'an expression is a string, not '
            f'{reprlib.repr(expression)} of type {type(expression).__name__}'
        )
    if n_dims is not None and (
        not isinstance(n_dims, int) or isinstance(n_dims, bool) or not 0 <= n_dims < _MOST_DIMS
    ):
        raise EinshardError(
            f'n_dims= is the number of dimensions of an array, not {n_dims!r}',
            expression=expression,
        )
    if memory_kind is not None and not isinstance(memory_kind, str):
        raise EinshardError(f'memory_kind= is a string, not {memory_kind!r}', expression=expression)
