"""Shards arrays over mesh axes that are still free: ZeRO, and fully sharded data parallelism."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jax.sharding import NamedSharding

from .._cache import cached
from .._errors import EinshardError, quoted
from .._notation.expression import axis_letters, parse
from .._notation.layout import axis_positions
from .._sharding.context import Context
from .._sharding.describe import find_expression
from .._sharding.leaf_spec import REPLICATED, AnySpec, LeafSpec, as_leaf_spec
from .._sharding.mesh import (
    AnyMesh,
    is_device_mesh,
    mesh_fact,
    partition_spec,
    sizes_of,
    spec_axes,
)
from .._sharding.resolve import resolve

Shape: TypeAlias = tuple[int, ...]
MeshAxes: TypeAlias = Literal[True] | tuple[str, ...]  # all mesh axes, or these
# For each axis of a state array: the axis of its parameter, or None for an added axis.
AxisMap: TypeAlias = tuple[int | None, ...]
Entry: TypeAlias = tuple[Any, ...]  # the mesh axes that shard an array axis

_REPLICATED = parse(REPLICATED)


@cached
def state_specs(
    spec: AnySpec,
    param_shape: Shape,
    shape: Shape,
    axis_maps: tuple[AxisMap, ...],
    also_over: MeshAxes,
    context: Context,
    all_or_none: bool = False,
) -> tuple[LeafSpec, ...]:
    """The distinct specs that the axis maps give a state array; usually one.

    Args:
        spec: the spec of the parameter.
        axis_maps: for each axis of the array, the axis of the parameter.
        also_over: mesh axes to shard the array over too, if they do not shard the parameter.
        all_or_none: whether to shard one array axis over all of those, or none.
    """
    known = as_leaf_spec(spec)
    placement = resolve(known, param_shape, context)
    mesh, memory_kind = placement.sharding.mesh, placement.sharding.memory_kind
    entries = spec_axes(placement.sharding.spec)
    entries += [()] * (len(param_shape) - len(entries))
    free = [axis for axis in mesh.axis_names if axis not in itertools.chain(*entries)]
    free = [axis for axis in free if also_over is True or str(axis) in also_over]
    positions = axis_positions(placement.expression, len(param_shape))
    names = {axis: name for name, axis in positions.items()}
    found: dict[NamedSharding, LeafSpec] = {}
    for axis_map in axis_maps:
        of_param = [() if axis is None else entries[axis] for axis in axis_map]
        of_state = _shard_over(free, of_param, shape, mesh, all_or_none)
        sharding = NamedSharding(mesh, partition_spec(of_state), memory_kind=memory_kind)
        letters = (letter for letter in axis_letters() if letter not in names.values())
        own_names = [names[axis] if axis in names else next(letters) for axis in axis_map]
        expression = _REPLICATED
        if any(of_state):
            expression = find_expression(sharding, len(shape), own_names)
        if expression is None:
            raise EinshardError(
                'the mesh has axis names that cannot be written in an expression',
                facts={'mesh': mesh_fact(mesh)},
            )
        own = LeafSpec(expression, memory_kind, rule=known.rule, mesh=known.mesh)
        found.setdefault(sharding, own)
    return tuple(found.values())


def _shard_over(
    free: Sequence[Any],
    entries: Sequence[Entry],
    shape: Shape,
    mesh: AnyMesh,
    all_or_none: bool,
) -> list[Entry]:
    """Shards an array also over free mesh axes: the largest axis over as many as divide it.

    Free mesh axes become minor to those that shard an array axis already, so that a device keeps a
    part of its shard. On the canonical mesh the order of mesh axes is fixed. There, array axes
    without a minor mesh axis come first, then the one sharded over the next minor axis. For a
    parameter float32[256,1024] as 'd f -> * d f2' on 16 devices, moments 'f8 d f2' made XLA
    all-reduce unsharded gradients and gather activations; 'd8 f2' only gathered new parameters.
    """
    sizes = sizes_of(mesh)
    free = [axis for axis in free if sizes.get(str(axis), 1) > 1]
    in_order = is_device_mesh(mesh)
    place = {axis: i if in_order else 0 for i, axis in enumerate(mesh.axis_names)}
    sharded = list(entries)
    while free:
        choices: list[tuple[int, int, int, int]] = []
        for i, (size, axes) in enumerate(zip(shape, sharded, strict=True)):
            on_device = size // _n_shards(axes, sizes)
            minor = (place[axis] for axis in axes if place[axis] > place[free[0]])
            next_minor = min(minor, default=-1)
            for n in range(len(free) if all_or_none else 1, len(free) + 1):
                if on_device and on_device % _n_shards(free[:n], sizes) == 0:
                    choices.append((next_minor, -n, -on_device, i))
        n = len(free) if all_or_none else 1
        if choices:
            _, minus_n, _, i = min(choices)
            n = -minus_n
            sharded[i] = tuple(sorted((*sharded[i], *free[:n]), key=lambda axis: place[axis]))
        free = free[n:]
    return sharded


def _n_shards(axes: Sequence[Any], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[str(axis)] for axis in axes)


class Option(NamedTuple):
    """An argument that names mesh axes, as errors show it."""

    name: str
    call: str  # with {} for its value
    for_all: str  # the call for all mesh axes


ZERO = Option('zero=', 'zero={}', 'zero=True')
LARGEST = Option('shard_largest', 'shard_largest({})', 'shard_largest without mesh axes')


def read_mesh_axes(given: object, option: Option) -> MeshAxes:
    """The mesh axes that an option names; raises if it is invalid."""
    if isinstance(given, bool):
        return given or ()
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        examples = [option.call.format(axes) for axes in ("'data'", "('data', 'fsdp')")]
        raise EinshardError(
            f'{option.name} takes names of mesh axes, not {given!r}',
            facts={'example': ', '.join([option.for_all, *examples])},
        )
    return tuple(names)


def check_mesh_axes(axes: MeshAxes, context: Context, option: Option) -> None:
    """Raises if the mesh lacks an axis that an option names."""
    if axes is True or not axes:
        return
    mesh = context.mesh
    if mesh is None:
        raise EinshardError(
            f'{option.name} names {quoted(axes)}, but there is no mesh',
            facts={'expected': f"mesh= or 'with jax.set_mesh(mesh):'; or {option.for_all}"},
        )
    sizes = sizes_of(mesh)
    for name in axes:
        if name not in sizes:
            near = difflib.get_close_matches(name, sizes, n=1)
            raise EinshardError(
                f"{option.name} names '{name}', but the mesh has no such axis",
                facts={'mesh': mesh_fact(mesh)},
                fix=option.call.format(f"'{near[0]}'") if near and len(axes) == 1 else None,
            )
