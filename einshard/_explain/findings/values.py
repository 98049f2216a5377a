"""Values of a traced function, with the shardings implied by its arguments and constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from ..._program.jaxpr.spans import Span


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a value.

    Attributes:
        name: the user's name for it, or ''.
        mesh_axes: the mesh axes that shard it, unless the compiler reshards it.
        origin: the index of the argument or the source line of the constraint that the sharding
            comes from. None if the axis is unsharded, or if the origin is unknown.
        dim: if the value is a part of an argument, the index of this axis in the argument; else -1.
    """

    name: str = ''
    mesh_axes: tuple[str, ...] = ()
    origin: int | str | None = None
    dim: int = -1

    def without_mesh_axes(self, names: Collection[str]) -> Axis:
        kept = tuple(name for name in self.mesh_axes if name not in names)
        return dataclasses.replace(self, mesh_axes=kept, origin=self.origin if kept else None)


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a traced function.

    Attributes:
        axes: one for each array axis.
        argument: the index of an argument, if casts, reshapes, slices, arithmetic with scalars or
            similar operations turn it into the value. None for other values.
        is_data: whether it depends on an argument that is not a weight.
    """

    axes: tuple[Axis, ...] = ()
    argument: int | None = None
    is_data: bool = False

    @property
    def mesh_axes(self) -> set[str]:
        return {name for axis in self.axes for name in axis.mesh_axes}

    def sharding(self, without: Collection[str] = ()) -> dict[str, int]:
        """Maps the mesh axes, except those in `without`, to the array axes that they shard."""
        return {
            name: i
            for i, axis in enumerate(self.axes)
            for name in axis.mesh_axes
            if name not in without
        }

    def with_axes(self, axes: Iterable[Axis]) -> Value:
        return dataclasses.replace(self, axes=tuple(axes))


@dataclass(frozen=True, slots=True)
class Product:
    """A matmul (`dot_general`) or convolution, or the lookup of rows in a table.

    Attributes:
        left, right, result: the operands and the result; the operands of a lookup are the table and
            the indices.
        contracted, batch: (axis of left, axis of right) pairs.
        line: the user's source line, or ''.
        frames: the spans of the user's frames, innermost first; see `Site.frames`.
        aval: the shape and dtype of `result` before partitioning.
        runs: how often it runs in one run of the function. None if a loop around it has an unknown
            trip count.
        flops: the flops before partitioning, of all `runs`, or None.
        is_grouped: whether it is a convolution with groups of features, or of the batch.
        in_shard_map: whether it is in a `shard_map`, where shapes are those of a shard.
        sizes: the numbers of elements of `left`, `right` and `result` before partitioning.
    """

    left: Value
    right: Value
    result: Value
    contracted: tuple[tuple[int, int], ...] = ()
    batch: tuple[tuple[int, int], ...] = ()
    line: str = ''
    aval: Any = None
    runs: int | None = None
    flops: int | None = None
    is_backward: bool = False
    in_shard_map: bool = False
    is_lookup: bool = False
    is_convolution: bool = False
    is_grouped: bool = False
    sizes: tuple[int, ...] = ()
    frames: tuple[Span, ...] = ()

    @property
    def result_bytes(self) -> int:
        """The bytes of `result` before partitioning, in one execution."""
        return self.aval.size * self.aval.dtype.itemsize


def weight_and_data(product: Product) -> tuple[Value, Value] | None:
    """Returns (weight, other operand), or None if neither operand is a weight."""
    for weight, data in ((product.right, product.left), (product.left, product.right)):
        if weight.argument is not None and not weight.is_data:
            return weight, data
    return None


def merged_axis(axes: Sequence[Axis]) -> Axis:
    """Returns an axis with the first name and the first sharding among `axes`."""
    if len(axes) == 1:
        return axes[0]
    name = next((axis.name for axis in axes if axis.name), '')
    sharded = next((axis for axis in axes if axis.mesh_axes), axes[0])
    return Axis(name, sharded.mesh_axes, sharded.origin, axes[0].dim)


def drop_repeats(
    axes: Iterable[Axis], keep_dim: bool = False, order: Iterable[int] | None = None
) -> tuple[Axis, ...]:
    """Removes each mesh axis from all array axes but the first in `order` that it shards.

    Also sets `dim` to -1, unless `keep_dim` is true.
    """
    seen: set[str] = set()
    result = [axis if keep_dim else dataclasses.replace(axis, dim=-1) for axis in axes]
    for i in order or range(len(result)):
        result[i] = result[i].without_mesh_axes(seen)
        seen.update(result[i].mesh_axes)
    return tuple(result)


def reshaped(
    axes: Sequence[Axis], before: Sequence[int], after: Sequence[int], mesh_sizes: Mapping[str, int]
) -> Iterator[Axis]:
    """Yields the axes of a reshaped value.

    A merged axis has the name and sharding of the first sharded axis, or else of the first axis. If
    an axis is split, the largest part gets its name, and the first parts get its sharding. A mesh
    axis that would shard two parts shards only the first.

        >>> from einshard._explain.findings.values import Axis, reshaped
        >>> a, b = Axis('a', ('x',)), Axis('b')
        >>> split = reshaped([a, b], (8, 6), (2, 4, 6), {'x': 2})
        >>> [(axis.name, axis.mesh_axes) for axis in split]
        [('', ('x',)), ('a', ()), ('b', ())]
        >>> [axis.name for axis in reshaped([a, b], (8, 6), (48,), {'x': 2})]
        ['a']
    """
    i = j = 0
    while j < len(after):
        sources, targets = [i], [j]
        left, right = _size(before, i), after[j]
        i, j = i + 1, j + 1
        # take more axes on either side, until the products of their sizes are equal
        while left != right:
            if left < right and i < len(before):
                left, sources, i = left * before[i], [*sources, i], i + 1
            elif right < left and j < len(after):
                right, targets, j = right * after[j], [*targets, j], j + 1
            else:  # some sizes are 0
                break
        merging = [axes[at] for at in sources if at < len(axes) and before[at] > 1]
        merging = merging or [axes[at] for at in sources if at < len(axes)]
        taken = next((axis for axis in merging if axis.mesh_axes), (*merging, Axis())[0])
        yield from _split(taken, [after[at] for at in targets], mesh_sizes)


def _split(axis: Axis, sizes: Sequence[int], mesh_sizes: Mapping[str, int]) -> Iterator[Axis]:
    """Yields the parts of an axis that a reshape splits."""
    if len(sizes) == 1:
        yield axis
        return
    waiting, parts = list(axis.mesh_axes), list[tuple[str, ...]]()
    for size in sizes:
        taken: list[str] = []
        while waiting and size > 1:
            name, n = waiting[0], gcd(size, mesh_sizes[waiting[0]])
            taken += [name] * (n > 1)
            # after a mesh axis that does not fit in full, the other parts are unsharded
            size, waiting = size // n, waiting[1:] if n == mesh_sizes[name] else []
        parts.append(tuple(taken))
    # the largest part gets the name; of equally large parts, a sharded one, or else the last
    named = max(range(len(sizes)), key=lambda i: (sizes[i], bool(parts[i]), i))
    for i, mesh_axes in enumerate(parts):
        part = axis if i == named else Axis(origin=axis.origin)
        origin = axis.origin if mesh_axes else None
        yield dataclasses.replace(part, mesh_axes=mesh_axes, origin=origin)


def _size(sizes: Sequence[int], i: int) -> int:
    return sizes[i] if i < len(sizes) else 1
