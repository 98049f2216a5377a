"""The shardings of values in a traced function, as its arguments and constraints imply them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a value.

    Attributes:
        name: the user's name for it, or ''.
        mesh: the mesh axes that shard it, unless the compiler reshards it.
        by: what shards it: the number of an argument, or the line of a constraint; else None.
        dim: the axis of the argument that it is, if the value is a part of an argument; else -1.
    """

    name: str = ''
    mesh: tuple[str, ...] = ()
    by: int | str | None = None
    dim: int = -1


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a traced function.

    Attributes:
        axes: one for each array axis.
        argument: the number of the argument that it is a part of, or None.
        is_data: whether it depends on an argument that is not a weight.
    """

    axes: tuple[Axis, ...] = ()
    argument: int | None = None
    is_data: bool = False

    @property
    def mesh(self) -> set[str]:
        """The mesh axes that shard the value."""
        return {name for axis in self.axes for name in axis.mesh}

    def with_axes(self, axes: Iterable[Axis]) -> Value:
        return dataclasses.replace(self, axes=tuple(axes))


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product or convolution, or the lookup of rows in a table.

    Attributes:
        line: the user's line, or ''.
        flops: of all executions in one run, of the unsharded operands; None if a loop has an
            unknown trip count.
        is_backward: whether it belongs to the backward pass.
        left, right, result: its values; of a lookup, the table and the indices.
        contracted: pairs of axes of left and right that are summed over.
        batch: pairs of axes of left and right that the result has once.
        in_shard_map: whether it is inside a `shard_map`, where shapes are those of a device.
        is_lookup, is_convolution: whether it is one.
    """

    line: str
    flops: int | None
    is_backward: bool
    left: Value
    right: Value
    result: Value
    contracted: tuple[tuple[int, int], ...] = ()
    batch: tuple[tuple[int, int], ...] = ()
    in_shard_map: bool = False
    is_lookup: bool = False
    is_convolution: bool = False


def without_dim(axis: Axis) -> Axis:
    return dataclasses.replace(axis, dim=-1)


def merged(values: Sequence[Value], ndim: int) -> Value:
    """The result of an elementwise operation."""
    full = [value for value in values if len(value.axes) == ndim]
    axes = (_merged(axes) for axes in zip(*(value.axes for value in full), strict=True))
    only = full[0].argument if len(full) == 1 else None
    return Value(
        unique(axes if full else (Axis(),) * ndim, only is not None),
        only,
        any(value.is_data for value in values),
    )


def _merged(axes: Sequence[Axis]) -> Axis:
    if len(axes) == 1:
        return axes[0]
    name = next((axis.name for axis in axes if axis.name), '')
    sharded = next((axis for axis in axes if axis.mesh), axes[0])
    return Axis(name, sharded.mesh, sharded.by)


def unique(axes: Iterable[Axis], is_argument: bool = False) -> tuple[Axis, ...]:
    """Lets each mesh axis shard only the first of the array axes that it would shard."""
    return tuple(_unique(axes, is_argument))


def _unique(axes: Iterable[Axis], is_argument: bool) -> Iterator[Axis]:
    seen: set[str] = set()
    for axis in axes:
        left = tuple(name for name in axis.mesh if name not in seen)
        seen.update(left)
        if left != axis.mesh:
            axis = dataclasses.replace(axis, mesh=left, by=axis.by if left else None)
        yield axis if is_argument else without_dim(axis)


def reshaped(axes: Sequence[Axis], before: Sequence[int], after: Sequence[int]) -> Iterator[Axis]:
    """The axes of a reshaped value.

    Merged axes have the sharding of the first that is sharded. Of the parts of a split axis, the
    largest has its name and sharding.

        >>> from einshard._inspect.findings.values import Axis, reshaped
        >>> a, b = Axis('a', ('x',)), Axis('b')
        >>> [axis.name for axis in reshaped([a, b], (8, 6), (2, 4, 6))]
        ['', 'a', 'b']
        >>> [axis.name for axis in reshaped([a, b], (8, 6), (48,))]
        ['a']
    """
    i = j = 0
    while j < len(after):
        sources, targets = [i], [j]
        left, right = _size(before, i), after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(before):
                left, sources, i = left * before[i], [*sources, i], i + 1
            elif right < left and j < len(after):
                right, targets, j = right * after[j], [*targets, j], j + 1
            else:  # sizes of 0, or trailing axes of size 1
                break
        known = [axes[at] for at in sources if at < len(axes) and before[at] > 1]
        known = known or [axes[at] for at in sources if at < len(axes)]
        taken = next((axis for axis in known if axis.mesh), known[0] if known else Axis())
        largest = max(targets, key=lambda at: after[at])
        yield from (taken if at == largest else Axis() for at in targets)


def _size(sizes: Sequence[int], i: int) -> int:
    return sizes[i] if i < len(sizes) else 1
