"""Finds the mesh axes or array axes that a collective runs along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .mesh import AnyMesh, is_canonical_mesh, spec_axes

# Maps the name of an array axis to the mesh axes that shard it: {'b': [('d0', 'd1'), ('d0',)]} if
# 'b' is sharded over d0 and d1 in some arrays of a program, and over d0 in others.
ShardedBy = Mapping[str, Sequence[tuple[str, ...]]]


def mesh_axes_of(groups: Sequence[Sequence[int]], mesh: AnyMesh) -> tuple[str, ...] | None:
    """Returns the mesh axes that each group of devices spans, or None if no mesh axes match.

    Devices are numbered in mesh order. If `groups` is empty, all devices are one group.

        >>> import jax
        >>> from einshard._sharding.collective_axes import mesh_axes_of
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ('data', 'tp'))
        >>> mesh_axes_of(((0, 4), (1, 5), (2, 6), (3, 7)), mesh)
        ('data',)
    """
    axes = [(str(name), size) for name, size in mesh.shape.items() if size > 1]
    if not groups:
        return tuple(name for name, _ in axes)
    grid = np.arange(mesh.size).reshape([size for _, size in axes])
    first_group = set(groups[0])
    origin = np.unravel_index(groups[0][0], grid.shape)
    varying: list[int] = []  # the axes that the first group spans
    for i in range(len(axes)):
        other = (*origin[:i], 0 if origin[i] else 1, *origin[i + 1 :])
        if int(grid[other]) in first_group:
            varying.append(i)
    others = [i for i in range(len(axes)) if i not in varying]
    rows = grid.transpose([*others, *varying]).reshape(-1, math.prod(axes[i][1] for i in varying))
    expected = {frozenset(row) for row in rows.tolist()}
    # the groups need not cover the mesh: a permute omits devices that send nothing
    if not all(len(group) > 1 and frozenset(group) in expected for group in groups):
        return None
    return tuple(axes[i][0] for i in varying)


def mesh_axes_between(pairs: Sequence[tuple[int, int]], mesh: AnyMesh) -> tuple[str, ...]:
    """Finds the mesh axes along which the sources and targets of a permute differ.

    Devices are numbered in mesh order.

        >>> import jax
        >>> from einshard._sharding.collective_axes import mesh_axes_between
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ('data', 'tp'))
        >>> mesh_axes_between(((0, 1), (1, 2), (5, 5)), mesh)
        ('tp',)
    """
    # indexed by mesh axis, pair, and source or target
    coordinates = np.array(np.unravel_index(np.array(pairs), mesh.axis_sizes))
    differ = (coordinates[..., 0] != coordinates[..., 1]).any(axis=1)
    return tuple(map(str, itertools.compress(mesh.axis_names, differ)))


def sharding_of_blocks(blocks: Sequence[Sequence[int]], mesh: AnyMesh) -> NamedSharding | None:
    """Returns the sharding on `mesh` that assigns these blocks to devices, or None if none does.

    Args:
        blocks: for each array axis, the block index of each device, in mesh order.
    """
    sizes = mesh.axis_sizes
    entries: list[tuple[str, ...]] = []
    for block_indices in blocks:
        grid = np.asarray(block_indices).reshape(sizes)
        # the block of the second device along each mesh axis; the first device has block 0
        steps = {
            i: int(grid[tuple(int(i == j) for j in range(len(sizes)))])
            for i, size in enumerate(sizes)
            if size > 1
        }
        major_to_minor = sorted((i for i, step in steps.items() if step), key=lambda i: -steps[i])
        row_major = np.zeros(sizes, int)
        for i in major_to_minor:
            shape = [sizes[i] if i == j else 1 for j in range(len(sizes))]
            row_major = row_major * sizes[i] + np.arange(sizes[i]).reshape(shape)
        if not np.array_equal(row_major, grid):
            return None
        entries.append(tuple(mesh.axis_names[i] for i in major_to_minor))
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))


def as_named_sharding(
    sharding: Sharding, shape: Sequence[int], mesh: AnyMesh
) -> NamedSharding | None:
    """Returns the sharding on `mesh` that places an array like `sharding`, or None if none does.

    JAX has other shardings than NamedShardings for arrays that the compiler shards, and for
    arguments without a sharding.
    """
    if not isinstance(mesh, Mesh) or {*mesh.devices.flat} != sharding.device_set:
        return None
    try:
        sizes = sharding.shard_shape(tuple(shape))
    except ValueError:  # not divisible
        return None
    indices = sharding.devices_indices_map(tuple(shape))
    blocks = [
        [(indices[device][axis].start or 0) // max(size, 1) for device in mesh.devices.flat]
        for axis, size in enumerate(sizes)
    ]
    found = sharding_of_blocks(blocks, mesh)
    if found is None:
        return None
    return NamedSharding(mesh, found.spec, memory_kind=sharding.memory_kind)


def find_sharded_by(arrays: Iterable[tuple[Sequence[str], NamedSharding]]) -> ShardedBy:
    """Collects the mesh axes that shard each named axis in any of the arrays."""
    sharded_by: dict[str, list[tuple[str, ...]]] = {}
    for names, sharding in arrays:
        for name, axes in zip(names, spec_axes(sharding.spec), strict=False):
            if axes and axes not in sharded_by.setdefault(name, []):
                sharded_by[name].append(axes)
    return sharded_by


def along_text(
    groups: Sequence[Sequence[int]],
    pairs: Sequence[tuple[int, int]],
    meshes: Sequence[AnyMesh],
    sharded_by: ShardedBy,
) -> str:
    """Formats the axes that a collective runs along. Returns '' if they are unknown.

    'part of data' means that the groups do not span all of mesh axis data.

    Args:
        groups: the groups of devices of the collective; for a permute, the devices that its pairs
            connect. Empty if unknown.
        pairs: the sources and targets of a permute; empty for other collectives.
        meshes: the meshes of the program.
    """
    for mesh in meshes if groups else ():
        axes = mesh_axes_of(groups, mesh)
        if axes is not None:
            return axes_text(axes, mesh, sharded_by)
    if not (groups and meshes):
        return ''
    # the pairs of a permute need not connect all devices along its axes
    of_groups = [(first, other) for first, *others in groups for other in others]
    axes = mesh_axes_between(pairs or of_groups, meshes[0])
    text = axes_text(axes, meshes[0], sharded_by)
    return text if pairs or text in ('', 'all') else f'part of {text}'


def axes_text(axes: tuple[str, ...] | None, mesh: AnyMesh, sharded_by: ShardedBy) -> str:
    """Formats the mesh axes of a collective.

    On a user's mesh, returns their names. Axes d0, d1, ... of `device_mesh()` are shown as the
    array axes that they shard: 'b,x' stands for the mesh axes that shard b and those that shard x,
    and 'h|k' for mesh axes that shard h in some arrays and k in others. If no array axes match,
    returns the mesh axes, or 'all' for all of them. If `axes` is None, returns ''.
    """
    if axes is None:
        return ''
    if not is_canonical_mesh(mesh):
        return ','.join(axes)
    target = frozenset(axes)
    names = [name for name, entries in sharded_by.items() if target in map(frozenset, entries)]
    if names:
        return '|'.join([*names[:3], *['..'] * (len(names) > 3)])
    name_of = {
        frozenset(entry): name
        for name, entries in reversed(list(sharded_by.items()))
        for entry in entries
        if target > set(entry)
    }
    for entries in itertools.chain(*(itertools.combinations(name_of, n) for n in (2, 3))):
        if sum(map(len, entries)) == len(target) and target == frozenset().union(*entries):
            in_order = sorted(entries, key=lambda entry: min(map(axes.index, entry)))
            names = [name_of[entry] for entry in in_order]
            if len({*names}) == len(names):  # two entries of axis b would give 'b,b'
                return ','.join(names)
    return 'all' if len(axes) == sum(size > 1 for size in mesh.axis_sizes) else ','.join(axes)
