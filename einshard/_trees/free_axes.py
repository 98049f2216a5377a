"""Shards arrays over mesh axes that do not shard them yet, for ZeRO and FSDP."""

from __future__ import annotations

import difflib
import itertools
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jax.sharding import AxisType, NamedSharding

from .._cache import cached
from .._errors import EinshardError, quoted
from .._notation.expression import axis_letters, parse
from .._notation.layout import axis_positions
from .._sharding.context import Context
from .._sharding.describe import find_expression
from .._sharding.leaf_spec import REPLICATED, AnySpec, LeafSpec, as_leaf_spec
from .._sharding.mesh import (
    AnyMesh,
    is_canonical_mesh,
    mesh_fact,
    partition_spec,
    partition_text,
    sizes_of,
    spec_axes,
)
from .._sharding.resolve import resolve

Shape: TypeAlias = tuple[int, ...]
MeshAxes: TypeAlias = Literal[True] | tuple[str, ...]  # True: all mesh axes
# the parameter axis of each axis of an optimizer-state array, or None for an added axis
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
    """Returns the specs that an optimizer-state array can have: one per axis map, deduplicated.

    Args:
        spec: the spec of the parameter.
        axis_maps: the ways to match axes of the state array to axes of the parameter. There are
            several only if parameter axes have the same size.
        also_over: shard the state array over these mesh axes too, unless they shard the parameter.
        all_or_none: shard one array axis over all of these mesh axes, or use none of them. Also
            keeps the partial sums of `spec`, as `shard_largest` needs.
    """
    param_spec = as_leaf_spec(spec)
    if param_spec.partition is not None and param_spec.unconstrained:
        raise EinshardError(
            'mesh axes cannot be added to a spec with P.UNCONSTRAINED',
            code='mesh',
            facts={
                'spec': partition_text(param_spec.partition),
                'instead': 'replace P.UNCONSTRAINED with None or mesh axes',
            },
        )
    placement = resolve(param_spec, param_shape, context)
    mesh, partition = placement.sharding.mesh, placement.sharding.spec
    entries = spec_axes(partition)
    entries += [()] * (len(param_shape) - len(entries))
    # `shard_largest` keeps partial sums; the moments of a parameter are not partial sums
    signed = {'unreduced': partition.unreduced, 'reduced': partition.reduced} if all_or_none else {}
    used = {*itertools.chain(*entries, *signed.values())}
    free = [axis for axis in mesh.axis_names if axis not in used]
    free = [axis for axis in free if also_over is True or str(axis) in also_over]
    positions = axis_positions(placement.expression, len(param_shape))
    names = {i: name for name, i in positions.items()}
    specs: dict[NamedSharding, LeafSpec] = {}
    for axis_map in axis_maps:
        param_entries = [() if axis is None else entries[axis] for axis in axis_map]
        state_entries = _add_mesh_axes(free, param_entries, shape, mesh, all_or_none)
        sharding = NamedSharding(mesh, partition_spec(state_entries, **signed))
        letters = (letter for letter in axis_letters() if letter not in names.values())
        state_names = [names[axis] if axis in names else next(letters) for axis in axis_map]
        expression = _REPLICATED
        if any((*state_entries, *signed.values())):
            expression = find_expression(sharding, len(shape), state_names)
        if expression is None:
            raise EinshardError(
                'the mesh has axis names that cannot be written in an expression',
                code='mesh',
                facts={'mesh': mesh_fact(mesh)},
            )
        specs.setdefault(
            sharding,
            LeafSpec(
                expression, param_spec.memory_kind, rule=param_spec.rule, mesh=param_spec.mesh
            ),
        )
    return tuple(specs.values())


def _add_mesh_axes(
    free: Sequence[Any], entries: Sequence[Entry], shape: Shape, mesh: AnyMesh, all_or_none: bool
) -> list[Entry]:
    """Adds the mesh axes in `free` to `entries`, which lists mesh axes for each array axis.

    Each step shards one array axis over the first n free mesh axes, with the largest possible n. If
    several array axes are divisible, it picks the one with the largest shards. If none is, the
    first free mesh axis stays unused. With `all_or_none`, one step uses all free mesh axes or none.

    New mesh axes become minor to those of the array axis, so that no data moves: each device keeps
    a part of its shard. But expressions on `device_mesh()` list mesh axes in mesh order, where a
    new mesh axis may become major. Array axes where that happens are picked last. For example,
    parameters float32[256,1024] were sharded 'd f -> * d f2' on 16 devices. With the moments as
    'd f -> f8 d f2', where the new f8 is major, XLA all-reduced unsharded gradients and gathered
    activations. With 'd f -> d8 f2', it gathered only the new parameters.

    Explicit mesh axes come before Auto ones. JAX allows no other order for traced values.
    """
    sizes = sizes_of(mesh)
    if is_canonical_mesh(mesh):
        position = {axis: i for i, axis in enumerate(mesh.axis_names)}
    else:
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        position = {axis: int(kind == AxisType.Auto) for axis, kind in kinds}
    free = sorted((axis for axis in free if sizes.get(str(axis), 1) > 1), key=position.__getitem__)
    sharded = list(entries)
    while free:
        # (next_minor, -n, -shard_size, array axis): the smallest is picked
        choices: list[tuple[int, int, int, int]] = []
        for i, (size, axes) in enumerate(zip(shape, sharded, strict=True)):
            shard_size = size // _n_shards(axes, sizes)
            # the position of the first mesh axis that would become minor to the new ones, or -1
            minor = (position[axis] for axis in axes if position[axis] > position[free[0]])
            next_minor = min(minor, default=-1)
            for n in range(len(free) if all_or_none else 1, len(free) + 1):
                if shard_size and shard_size % _n_shards(free[:n], sizes) == 0:
                    choices.append((next_minor, -n, -shard_size, i))
        n = len(free) if all_or_none else 1
        if choices:
            _, minus_n, _, i = min(choices)
            n = -minus_n
            sharded[i] = tuple(sorted((*sharded[i], *free[:n]), key=lambda axis: position[axis]))
        free = free[n:]
    return sharded


def _n_shards(axes: Sequence[Any], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[str(axis)] for axis in axes)


class Option(NamedTuple):
    """Texts of errors about an option that names mesh axes."""

    name: str
    expected: str  # comes after `name` in the error
    usage: str  # with {} for the value
    usage_for_all: str  # how to use all mesh axes


ZERO = Option('zero=', 'must be True or the names of mesh axes', 'zero={}', 'zero=True')
LARGEST = Option(
    'shard_largest',
    'takes the names of mesh axes',
    'shard_largest({})',
    'pass shard_largest without calling it',
)


def read_mesh_axes(value: object, option: Option) -> MeshAxes:
    """Reads an option that names mesh axes, or is True for all."""
    if value is True:
        return True
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        examples = [option.usage.format(axes) for axes in ("'data'", "('data', 'fsdp')")]
        raise EinshardError(
            f'{option.name} {option.expected}, not {reprlib.repr(value)}',
            code='spec',
            facts={'examples': ', '.join(examples), 'to use all devices': option.usage_for_all},
        )
    return tuple(names)


def check_mesh_axes(axes: MeshAxes, context: Context, option: Option) -> None:
    if axes is True or not axes:
        return
    mesh = context.mesh
    if mesh is None:
        raise EinshardError(
            f'{option.name} names {quoted(axes)}, but there is no mesh',
            code='mesh',
            facts={
                'expected': "mesh=mesh or 'with jax.set_mesh(mesh):'",
                'to use all devices': option.usage_for_all,
            },
        )
    sizes = sizes_of(mesh)
    for name in axes:
        if name not in sizes:
            near = difflib.get_close_matches(name, sizes, n=1)
            raise EinshardError(
                f"{option.name} names '{name}', but the mesh has no such axis",
                code='mesh',
                facts={'mesh': mesh_fact(mesh)},
                fix=option.usage.format(f"'{near[0]}'") if near and len(axes) == 1 else None,
            )
