"""Converts groups of devices to the mesh axes or array axes that they run along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._sharding.mesh import AnyMesh, is_device_mesh

# The mesh axes that shard an array axis, by axis name. Expressions may shard axes of one name in
# different ways.
ShardedBy = Mapping[str, Sequence[tuple[str, ...]]]


def mesh_axes_of(groups: Sequence[Sequence[int]], mesh: AnyMesh) -> tuple[str, ...] | None:
    """Finds the mesh axes that groups run along; None if they do not run along full mesh axes.

    Devices are numbered in mesh order. An empty sequence means one group of all devices.

        >>> import jax
        >>> from einshard._inspect.collective_axes import mesh_axes_of
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ('data', 'tp'))
        >>> mesh_axes_of(((0, 4), (1, 5), (2, 6), (3, 7)), mesh)
        ('data',)
    """
    axes = [(str(n), s) for n, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if s > 1]
    if not groups:
        return tuple(name for name, _ in axes)
    grid = np.arange(mesh.size).reshape([size for _, size in axes])
    first_group = set(groups[0])
    origin = np.unravel_index(groups[0][0], grid.shape)
    varying: list[int] = []
    for i in range(len(axes)):
        next_to = (*origin[:i], 1 - min(origin[i], 1), *origin[i + 1 :])
        if int(grid[next_to]) in first_group:
            varying.append(i)
    others = [i for i in range(len(axes)) if i not in varying]
    rows = grid.transpose([*others, *varying]).reshape(-1, math.prod(axes[i][1] for i in varying))
    possible = {frozenset(row) for row in rows.tolist()}
    # a permute may leave out groups of devices that send nothing
    if not all(len(group) > 1 and frozenset(group) in possible for group in groups):
        return None
    return tuple(axes[i][0] for i in varying)


def mesh_axes_between(pairs: Sequence[tuple[int, int]], mesh: AnyMesh) -> tuple[str, ...]:
    """Finds the mesh axes along which the sources and targets of a permute differ.

    Devices are numbered in mesh order.

        >>> import jax
        >>> from einshard._inspect.collective_axes import mesh_axes_between
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ('data', 'tp'))
        >>> mesh_axes_between(((0, 1), (1, 2), (5, 5)), mesh)
        ('tp',)
    """
    places = np.array(np.unravel_index(np.array(pairs), mesh.axis_sizes))  # [axis, pair, end]
    differ = (places[..., 0] != places[..., 1]).any(axis=1).tolist()
    return tuple(str(name) for name, n in zip(mesh.axis_names, differ, strict=True) if n)


def sharding_of(blocks: Sequence[Sequence[int]], mesh: AnyMesh) -> NamedSharding | None:
    """Finds the sharding over a mesh in which devices hold these blocks; None if there is none.

    For each array axis, `blocks` lists the block index of each device.
    """
    sizes = mesh.axis_sizes
    entries: list[tuple[str, ...]] = []
    for of_axis in blocks:
        grid = np.asarray(of_axis).reshape(sizes)
        steps = {
            i: int(grid[tuple(int(i == j) for j in range(len(sizes)))])
            for i, size in enumerate(sizes)
            if size > 1
        }
        sharding = sorted((i for i, step in steps.items() if step), key=lambda i: -steps[i])
        # a sharding is row-major over its axes
        numbers = np.zeros(sizes, int)
        for i in sharding:
            shape = [sizes[i] if i == j else 1 for j in range(len(sizes))]
            numbers = numbers * sizes[i] + np.arange(sizes[i]).reshape(shape)
        if not np.array_equal(numbers, grid):
            return None
        entries.append(tuple(mesh.axis_names[i] for i in sharding))
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))


def along(axes: tuple[str, ...] | None, mesh: AnyMesh, sharded_by: ShardedBy) -> str:
    """Formats the mesh axes of a collective; on the canonical mesh, as the array axes they shard.

    'b,x': along the mesh axes that shard b, and along those that shard x. 'h|k': along mesh axes
    that shard h in some arrays, and k in others. '' means unknown.
    """
    if axes is None:
        return ''
    if not is_device_mesh(mesh):
        return ','.join(axes)
    target = frozenset(axes)
    names = [name for name, several in sharded_by.items() if target in map(frozenset, several)]
    if names:
        return '|'.join([*names[:3], *['..'] * (len(names) > 3)])
    parts = {
        frozenset(sharding): name
        for name, several in reversed(list(sharded_by.items()))
        for sharding in several
        if target > set(sharding)
    }
    for chosen in itertools.chain(*(itertools.combinations(parts, n) for n in (2, 3))):
        if sum(map(len, chosen)) == len(target) and target == frozenset().union(*chosen):
            first = sorted(chosen, key=lambda part: min(axes.index(axis) for axis in part))
            words = [parts[part] for part in first]
            if len({*words}) == len(words):  # two parts may shard axes of one name
                return ','.join(words)
    return 'all' if len(axes) == sum(size > 1 for size in mesh.axis_sizes) else ','.join(axes)
