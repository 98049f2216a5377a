"""Groups of devices -> the axes of the layout that they are groups along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh import AnyMesh, is_device_mesh

# The mesh axes that cut an array axis, by the name that the user has for it; several expressions
# may cut axes of one name differently.
Cuts = Mapping[str, Sequence[tuple[str, ...]]]


def mesh_axes_of(groups: Sequence[Sequence[int]], mesh: AnyMesh) -> tuple[str, ...] | None:
    """The mesh axes along which groups lie; None where they lie along none, or part of one.

    Groups are numbered in the order of the mesh. No groups are one of all devices.

        >>> from einshard._reports.along import mesh_axes_of
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ('data', 'tp'))
        >>> mesh_axes_of(((0, 4), (1, 5), (2, 6), (3, 7)), mesh)
        ('data',)
    """
    axes = [(str(n), s) for n, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if s > 1]
    if not groups:
        return tuple(name for name, _ in axes)
    grid = np.arange(mesh.size).reshape([size for _, size in axes])
    together = set(groups[0])
    origin = np.unravel_index(groups[0][0], grid.shape)
    varying: list[int] = []
    for i in range(len(axes)):
        next_to = (*origin[:i], 1 - min(origin[i], 1), *origin[i + 1 :])
        if int(grid[next_to]) in together:
            varying.append(i)
    others = [i for i in range(len(axes)) if i not in varying]
    rows = grid.transpose([*others, *varying]).reshape(-1, math.prod(axes[i][1] for i in varying))
    formed = {frozenset(row) for row in rows.tolist()}
    # a permute may leave out devices, which send nothing
    if not all(len(group) > 1 and frozenset(group) in formed for group in groups):
        return None
    return tuple(axes[i][0] for i in varying)


def sharding_of(blocks: Sequence[Sequence[int]], mesh: AnyMesh) -> NamedSharding | None:
    """The sharding in which devices hold these blocks, numbered along each axis of the array.

    None where it cannot be written in the axes of the mesh.
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
        cut = sorted((i for i, step in steps.items() if step), key=lambda i: -steps[i])
        # row-major over those axes, or it is no sharding
        numbers = np.zeros(sizes, int)
        for i in cut:
            shape = [sizes[i] if i == j else 1 for j in range(len(sizes))]
            numbers = numbers * sizes[i] + np.arange(sizes[i]).reshape(shape)
        if not np.array_equal(numbers, grid):
            return None
        entries.append(tuple(mesh.axis_names[i] for i in cut))
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))


def along(axes: tuple[str, ...] | None, mesh: AnyMesh, cuts: Cuts) -> str:
    """Mesh axes in words: by name on a mesh of the user's; else by the array axes they cut.

    Comma is and, bar is or: 'b,x' are all devices among which b and x are shared out, 'h|k' those
    among which h is, and k too. '' where there is nothing to say.
    """
    if axes is None:
        return ''
    if not is_device_mesh(mesh):
        return ','.join(axes)
    wanted = frozenset(axes)
    names = [
        name for name, several in cuts.items() if any(wanted == frozenset(cut) for cut in several)
    ]
    if names:
        return '|'.join([*names[:3], *['..'] * (len(names) > 3)])
    parts = {
        frozenset(cut): name
        for name, several in reversed(list(cuts.items()))
        for cut in several
        if wanted > set(cut)
    }
    for chosen in itertools.chain(*(itertools.combinations(parts, n) for n in (2, 3))):
        if sum(map(len, chosen)) == len(wanted) and wanted == frozenset().union(*chosen):
            first = sorted(chosen, key=lambda part: min(axes.index(axis) for axis in part))
            return ','.join(parts[part] for part in first)
    return 'all' if len(axes) == sum(size > 1 for size in mesh.axis_sizes) else ','.join(axes)
