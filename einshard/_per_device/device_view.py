"""What a per-device function sees of the devices: a mesh, and where arrays are on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .._axis_rules import apply_axis_rules
from .._cache import cached
from .._errors import quoted
from .._expression import Expression, parse
from .._layout import axis_positions, check_divisible, lay_out, needs_rank
from .._mesh import AnyMesh, AxisRules, entry_axes, is_device_mesh, partition_spec, sizes_of
from .._sharding import make_sharding
from .mesh_members import Member
from .shared_mesh import SharedMesh, share


class View(NamedTuple):
    """What a function sees of the devices that are around."""

    mesh: AnyMesh  # that `jax.shard_map` is given
    by_name: bool  # whether its axes have the names of array axes
    shared: SharedMesh
    n_devices: int
    rules: AxisRules

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return () if self.by_name else tuple(sizes_of(self.mesh))

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes that the function can name."""
        return self.shared.sizes if self.by_name else sizes_of(self.mesh)

    def expression(self, text: str) -> Expression:
        return _ruled(parse(text), self.rules, self.mesh_axes)

    def completed(self, text: str) -> str:
        """An expression as it is for all of the devices, whatever others name."""
        expression = self.expression(text)
        return self.shared.complete(expression) if self._is_shared(expression) else text

    def check(self, text: str, shape: Sequence[int]) -> None:
        """Raises where rank or sizes do not fit, in the words of the user."""
        expression = self.expression(text)
        axis_positions(expression, len(shape))
        if self._is_shared(expression):
            layout = lay_out(parse(self.completed(text)), len(shape), self.n_devices)
            check_divisible(expression, layout, shape, self.n_devices)

    def needs_rank(self, text: str) -> bool:
        return needs_rank(parse(self._in_mesh(text)))

    def partition_spec(
        self, text: str, n_dims: int | None, manual: frozenset[str]
    ) -> PartitionSpec:
        """Over the mesh axes that the function works on device by device."""
        spec = make_sharding(self._in_mesh(text), n_dims=n_dims, mesh=self.mesh).spec
        if not manual:
            return spec
        rows = map(entry_axes, spec)
        return PartitionSpec(*(tuple(axis for axis in row if axis in manual) for row in rows))

    def uncut(self, manual: frozenset[str]) -> tuple[str, ...]:
        """The mesh axes of one device that the function works on."""
        sizes = sizes_of(self.mesh)
        return tuple(a for a in sizes if sizes[a] == 1 and (not manual or a in manual))

    def result_spec(self, text: str, n_dims: int, manual: frozenset[str]) -> PartitionSpec:
        """The same for a result, where there may be axes of one device."""
        spec = self.partition_spec(text, n_dims, manual)
        if not n_dims:
            return spec
        # JAX takes what was over an axis of one device to differ along it, and a result that does
        # not name it to be wrong
        first, *others = [*map(entry_axes, spec)] or [()]
        named = {axis for row in (first, *others) for axis in row}
        unnamed = (axis for axis in self.uncut(manual) if axis not in named)
        return partition_spec([(*first, *unnamed), *others])

    def mesh_axes_of(self, axis: str) -> str:
        """The mesh axes that an array axis is over, where they have other names."""
        text = self.shared.complete(parse(f'{axis}{self.shared.sizes[axis]}'))
        entry = next(iter(make_sharding(text, mesh=self.mesh).spec), ())
        return quoted(entry_axes(entry) or ['none'])

    def _in_mesh(self, text: str) -> str:
        return self.shared.by_name(self.expression(text)) if self.by_name else self.completed(text)

    def _is_shared(self, expression: Expression) -> bool:
        """Whether it is read together with others; on a mesh as it is, names say enough."""
        return self.by_name or not any(term.mesh_axes for term in expression.right)


@cached
def make_view(
    members: tuple[Member, ...], mesh: AnyMesh, in_context: bool, rules: AxisRules
) -> View:
    sizes = sizes_of(mesh)
    n_devices = math.prod(sizes.values())
    # JAX refuses another mesh than that in context
    by_name = not in_context and is_device_mesh(mesh) and mesh.axis_types[0] == AxisType.Auto
    names = () if by_name else tuple(sizes)
    members = tuple(Member(m.of, _ruled(m.expression, rules, names)) for m in members)
    if not by_name:
        joined = tuple(member for member in members if not member.shares)
        by_count = any(member.cuts or member.is_whole for member in joined)
        if len(joined) < len(members) and not by_count:
            shared = SharedMesh(((None, n_devices),))
        else:
            shared = share(joined, n_devices)
        return View(mesh, False, shared, n_devices, rules)
    shared = share(members, n_devices)
    names, shape = tuple(shared.axis_sizes), tuple(shared.axis_sizes.values())
    types = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        named: AnyMesh = AbstractMesh(shape, names, axis_types=types)
    else:
        named = Mesh(mesh.devices.reshape(shape), names, axis_types=types)
    return View(named, True, shared, n_devices, rules)


def _ruled(expression: Expression, rules: AxisRules, mesh_axes: tuple[str, ...]) -> Expression:
    return apply_axis_rules(expression, rules, mesh_axes) if rules else expression
