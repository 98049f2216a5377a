"""The collectives of a contraction of sharded arrays.

A sharding maps mesh axes to the array axes that they shard. First, operands are resharded, so that
a mesh axis shards the same array axis in all of them. Then, if it is contracted, partial sums are
reduced. Slicing needs no communication. If it comes first, `old` and `product` include the slices.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Generic, NamedTuple, TypeVar

M = TypeVar('M')  # a mesh axis: its name, or a `MeshAxis` of `plan`
A = TypeVar('A')  # an array axis: its name, or its number


class Step(NamedTuple, Generic[M, A]):
    """A collective along `axes`. `block` is the sharding of its input or output if that is larger.

    So the bytes of a device are those of the array, divided by the sizes of the mesh axes in
    `block`.
    """

    kind: str
    axes: tuple[M, ...]
    block: Mapping[M, A]


def restrict(sharding: Mapping[M, A], array_axes: Container[A]) -> dict[M, A]:
    """Returns the sharding of an array that has only these axes."""
    return {axis: name for axis, name in sharding.items() if name in array_axes}


def reshard(
    old: Mapping[M, A], new: Mapping[M, A], exchange_first: bool = False
) -> list[Step[M, A]]:
    """Returns the collectives that reshard an array.

    XLA gathers first (measured on CPU). If `exchange_first`, the all-to-all comes before the
    all-gather, and its blocks are smaller.
    """
    if old == new:
        return []
    gathered = [axis for axis in old if axis not in new]
    exchanged = [axis for axis, name in old.items() if new.get(axis, name) != name]
    kept = {axis: name for axis, name in old.items() if axis in new}
    steps = [Step('all-gather', tuple(gathered), kept)] if gathered else []
    if exchanged:
        at = 0 if exchange_first else len(steps)
        steps.insert(at, Step('all-to-all', tuple(exchanged), old if exchange_first else kept))
    return steps


def reduce(
    product: Mapping[M, A], partial: Collection[M], result: Mapping[M, A]
) -> tuple[list[Step[M, A]], Mapping[M, A]]:
    """Returns the collectives that add up partial sums over `partial`, and the sharding of the sum.

    A partial sum is reduce-scattered over a mesh axis that shards the result, and all-reduced over
    the others.
    """
    steps: list[Step[M, A]] = []
    scattered = {axis: result[axis] for axis in partial if axis in result}
    added = [axis for axis in partial if axis not in result]
    if scattered:
        steps.append(Step('reduce-scatter', tuple(scattered), product))
        product = {**product, **scattered}
    if added:
        steps.append(Step('all-reduce', tuple(added), product))
    return steps, product
