"""Builds the mesh of a per-device function, and resolves expressions on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from .._cache import cached
from .._errors import EinshardError, quoted
from .._notation.expression import Expression, Term, write_short
from .._notation.layout import axis_positions, check_divisible, lay_out, mesh_text, needs_rank
from .._sharding.apply_axis_rules import apply_axis_rules
from .._sharding.context import AxisRules
from .._sharding.leaf_spec import LeafSpec
from .._sharding.mesh import (
    AnyMesh,
    entry_axes,
    is_canonical_mesh,
    partition_spec,
    reshaped,
    sizes_of,
    spec_axes,
)
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context
from .joint_mesh import JointMesh, joint_mesh
from .spec_axes import SpecAxes


@dataclass(frozen=True, slots=True, eq=False)  # by identity: a fast cache key
class Resolver:
    """Resolves the expressions of a per-device function on its mesh."""

    mesh: AnyMesh  # for `jax.shard_map`
    uses_array_names: bool  # whether `mesh` is made from `joint`, with axes named after array axes
    joint: JointMesh  # the mesh of all expressions that name no axes of the user's mesh
    n_devices: int
    rules: AxisRules
    on_one_device: bool  # whether to read every count and star as 1, for `check_same`
    manual: frozenset[str]  # mesh axes

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes, keyed by name, without 'replica0', 'replica1' and so on."""
        return self.joint.named_sizes if self.uses_array_names else sizes_of(self.mesh)

    def expression(self, spec: LeafSpec) -> Expression:
        sizes = {} if self.uses_array_names else sizes_of(self.mesh)
        return _apply_rules(spec.expression, self.rules, sizes, self.on_one_device)

    @cached
    def complete(self, spec: LeafSpec) -> LeafSpec:
        """Extends an expression to all devices: 'x2 y' becomes 'x y -> 4 x2 y' on 8 devices.

        An expression that names axes of the user's mesh stays as it is.
        """
        expression = self.expression(spec)
        if not self._is_on_joint_mesh(expression):
            return spec
        return LeafSpec(self.joint.complete(expression))

    def check(self, spec: LeafSpec, shape: Sequence[int]) -> None:
        """Raises if an array of this shape does not fit its spec."""
        expression = self.expression(spec)
        axis_positions(expression, len(shape))  # raises if the rank does not fit
        if self._is_on_joint_mesh(expression):  # otherwise `sharded` checks the sizes
            layout = lay_out(self.complete(spec).expression, len(shape), self.n_devices)
            check_divisible(expression, layout, shape, self.n_devices)

    def needs_rank(self, spec: LeafSpec) -> bool:
        return needs_rank(self._on_mesh_axes(spec).expression)

    def partition_spec(self, leaf_spec: LeafSpec, ndim: int | None) -> PartitionSpec:
        context = current_context(self.mesh)
        spec = resolve(self._on_mesh_axes(leaf_spec), ndim, context).sharding.spec
        position = self._position_of_size_one_axes(leaf_spec, ndim)
        if position is None and self.manual.issuperset(sizes_of(self.mesh)):
            return spec
        entries = self._manual(map(entry_axes, spec))
        if position is not None:
            entries += [()] * (position + 1 - len(entries))
            entries[position] += self._unnamed_size_one_axes(entries)
        return PartitionSpec(*entries)

    def _position_of_size_one_axes(self, spec: LeafSpec, ndim: int | None) -> int | None:
        """Returns the array axis of the last term with a count or a star, on the user's mesh.

        It gets the mesh axes of size 1, so that a body that sums over all mesh axes works for every
        shape of the mesh: JAX counts a value as varying along the mesh axes that its spec names.
        """
        # for Explicit axes, JAX requires that in_specs match the type of the argument
        is_explicit = AxisType.Explicit in self.mesh.axis_types
        if self.uses_array_names or ndim is None or is_explicit:
            return None
        expression = self.expression(spec)
        terms = [term for term in expression.right if term.star or term.count is not None]
        return axis_positions(expression, ndim).get(terms[-1].name or '') if terms else None

    def _manual(self, entries: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [tuple(axis for axis in axes if axis in self.manual) for axes in entries]

    def _unnamed_size_one_axes(self, entries: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
        named = {axis for entry in entries for axis in entry}
        return tuple(axis for axis in self.size_one_axes if axis not in named)

    @property
    def is_explicit(self) -> bool:
        """Whether all manual mesh axes are Explicit."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {kind for name, kind in types if name in self.manual} == {AxisType.Explicit}

    def spec_of_type(self, leaf: Any) -> PartitionSpec:
        spec = jax.typeof(leaf).sharding.spec
        return partition_spec(self._manual(spec_axes(spec)), spec.unreduced, spec.reduced)

    def shard_shape(self, shape: Sequence[int], spec: PartitionSpec) -> list[int]:
        # `NamedSharding.shard_shape` fails on a mesh with manual axes, as in nested shard_maps
        sizes = sizes_of(self.mesh)
        entries = spec_axes(spec)
        entries += [()] * (len(shape) - len(entries))
        counts = [math.prod(sizes[axis] for axis in entry) for entry in entries]
        return [size // count for size, count in zip(shape, counts, strict=True)]

    @property
    def size_one_axes(self) -> tuple[str, ...]:
        return tuple(a for a, n in sizes_of(self.mesh).items() if n == 1 and a in self.manual)

    def result_spec(self, leaf_spec: LeafSpec, ndim: int) -> PartitionSpec:
        """Returns the spec of a result, or of a scalar result as an array of shape (1,)."""
        # JAX counts a value as varying along a mesh axis of size 1, so the spec must name that axis
        spec = self.partition_spec(leaf_spec, ndim)
        first, *others = [*map(entry_axes, spec)] or [()]
        unnamed = self._unnamed_size_one_axes((first, *others))
        return partition_spec([(*first, *unnamed), *others]) if unnamed else spec

    def mesh_axes_of(self, axis: str) -> str:
        """Lists, for an error, the axes of the user's mesh that shard an array axis."""
        expression = write_short([Term(axis, self.joint.named_sizes[axis])])
        spec = LeafSpec(self.joint.complete(expression))
        sharding = resolve(spec, None, current_context(self.mesh)).sharding
        entry = next(iter(sharding.spec), ())
        return quoted(entry_axes(entry) or ['none'])

    @cached
    def _on_mesh_axes(self, spec: LeafSpec) -> LeafSpec:
        """Rewrites an expression so that `resolve` can lower it onto `self.mesh`."""
        if not self.uses_array_names:
            return self.complete(spec)
        return LeafSpec(self.joint.use_mesh_axes(self.expression(spec)))

    def _is_on_joint_mesh(self, expression: Expression) -> bool:
        """Whether an expression names no axes of the user's mesh, and so is on `self.joint`."""
        return self.uses_array_names or not any(term.mesh_axes for term in expression.right)


@cached
def make_resolver(
    specs: tuple[SpecAxes, ...],
    mesh: AnyMesh,
    is_in_context: bool,
    rules: AxisRules,
    on_one_device: bool,
    axis_names: frozenset[str],
) -> Resolver:
    """Finds the mesh of a per-device function, from the expressions of its arguments and result.

    Args:
        mesh: the user's mesh or, without one, the canonical mesh of all devices.
        axis_names: the mesh axes that are manual; empty for all.
    """
    sizes = sizes_of(mesh)
    n_devices = math.prod(sizes.values())
    # a mesh in context keeps its axis names, because JAX accepts no other mesh
    uses_array_names = (
        not is_in_context and is_canonical_mesh(mesh) and mesh.axis_types[0] == AxisType.Auto
    )
    # 'x@d0' names an axis of the canonical mesh
    uses_array_names &= not any(sizes.keys() & spec.uses.keys() for spec in specs)
    named_sizes = {} if uses_array_names else sizes
    specs = tuple(
        replace(s, expression=_apply_rules(s.expression, rules, named_sizes, on_one_device))
        for s in specs
    )
    replicated = JointMesh(((None, n_devices),))
    if uses_array_names:
        # without any expression, the error about None as a spec is that of the argument
        joint = joint_mesh(specs, n_devices) if specs else replicated
        mesh = reshaped(mesh, tuple(joint.mesh_shape), tuple(joint.mesh_shape.values()))
    else:
        by_count = tuple(spec for spec in specs if not spec.uses)
        has_counts = any(spec.defines or spec.lists_replicas for spec in by_count)
        uses_mesh_axes = len(by_count) < len(specs)
        if not has_counts and (uses_mesh_axes or not is_canonical_mesh(mesh)):
            joint = replicated  # the expressions without mesh axes replicate
        else:  # raises if there are several devices and no counts
            joint = joint_mesh(by_count, n_devices, tuple(sizes.values()))
    manual = axis_names or frozenset(sizes_of(mesh))
    resolver = Resolver(mesh, uses_array_names, joint, n_devices, rules, on_one_device, manual)
    for axis in sorted(axis_names - {*resolver.axes}):
        raise EinshardError(
            f"axis_names= includes '{axis}', but the mesh has no such axis",
            code='mesh',
            facts={'mesh': mesh_text(resolver.axes)},
        )
    return resolver


def _apply_rules(
    expression: Expression, rules: AxisRules, sizes: Mapping[str, int], on_one_device: bool
) -> Expression:
    ruled = apply_axis_rules(expression, rules, sizes).expression
    return ruled.on_one_device() if on_one_device else ruled
