"""Finds the ways to compute a contraction of sharded operands. Does not import JAX."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._program.cost.contraction import reduce
from .communication import Communication, ShardedArray, is_in_order, resharding


@dataclass(frozen=True)
class Choice:
    """One way to compute a contraction of sharded operands.

    Attributes:
        result: the placement of the result.
        collectives: the collectives, in order.
        slices: the slices of operands that devices take locally, such as 'operand 0 along x'.
        operands: the placements of the operands when they are multiplied.
        block: what each device multiplies, such as '[b/2 x/4] [x/4 y]'.
    """

    result: str
    collectives: tuple[Communication, ...]
    slices: tuple[str, ...]
    operands: tuple[str, ...]
    block: str

    @property
    def bytes(self) -> int | None:
        """The total bytes of all collectives, or None if array sizes are not given."""
        if any(collective.bytes is None for collective in self.collectives):
            return None
        return sum(collective.bytes or 0 for collective in self.collectives)

    def __str__(self) -> str:
        steps = [f'slice {text} (no communication)' for text in self.slices]
        steps += map(str, self.collectives)
        return '\n'.join([f"result '{self.result}'", *(steps or ['no communication'])])


def find_conflicts(operands: Sequence[ShardedArray]) -> Iterable[str]:
    """Yields the reasons why the devices cannot multiply their blocks of the operands."""
    if len(operands) < 2:
        return
    left, right = operands
    for mesh_axis in left.space.mesh_shape:
        left_axis, right_axis = left.array_axis(mesh_axis), right.array_axis(mesh_axis)
        if left_axis and right_axis and left_axis != right_axis:
            yield (
                f"'{left_axis}' of operand 0 and '{right_axis}' of operand 1 are sharded over the "
                'same devices, so for some blocks of the product no device has both inputs'
            )
    for name in left.names:
        left_axes, right_axes = left.mesh_axes(name), right.mesh_axes(name)
        if name not in right.names or left_axes == right_axes:
            continue
        if left_axes and right_axes:
            yield f"'{name}' is sharded differently in operand 0 and operand 1"
            continue
        sharded, unsharded = (0, 1) if left_axes else (1, 0)
        # the loop above reports mesh axes that shard another axis of the unsharded operand
        if not any(map(operands[unsharded].array_axis, left_axes or right_axes)):
            yield f"'{name}' is sharded in operand {sharded} but not in operand {unsharded}"


def find_targets(
    operands: Sequence[ShardedArray], result: ShardedArray
) -> Iterable[Mapping[str, str]]:
    """Yields shardings in which the devices can multiply their blocks of the operands.

    Tries, for each mesh axis, the array axes that it shards in the operands and in the result. XLA
    may reshard an operand to match the result if that sends less data. Skips shardings whose array
    axes are not divisible. At least one remains: that which keeps the sharding of operand 0, and of
    the axes that only operand 1 has.
    """
    # {(array axis in each operand, array axis in the result): the mesh axes that shard them}
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for axis in result.space.mesh_shape:
        sharded = tuple(array.array_axis(axis) for array in (*operands, result))
        groups.setdefault(sharded, []).append(axis)
    options = [
        _array_axis_options(operands, in_operands, in_result) for *in_operands, in_result in groups
    ]
    for chosen in itertools.product(*options):
        pairs = zip(chosen, groups.values(), strict=True)
        array_axes = {axis: name for name, axes in pairs if name for axis in axes}
        target = _sort_mesh_axes([*operands, result], array_axes)
        if result.space.is_divisible(target):
            yield target


def _array_axis_options(
    operands: Sequence[ShardedArray], in_operands: Sequence[str | None], in_result: str | None
) -> list[str | None]:
    """Lists the array axes that a mesh axis may shard in the contraction, or None to replicate.

    Args:
        in_operands: the array axis that the mesh axis shards in each operand.
        in_result: the array axis that it shards in the result.
    """
    options: list[str | None] = list(dict.fromkeys(name for name in in_operands if name))
    # if only one of two operands that have an array axis shards it, that one can be all-gathered
    can_gather = len(options) == 1 and any(
        options[0] in operand.names and name is None
        for operand, name in zip(operands, in_operands, strict=True)
    )
    if can_gather or not options:
        options.append(None)
    if in_result and in_result not in options:
        options.append(in_result)
    return options


def _sort_mesh_axes(
    arrays: Sequence[ShardedArray], array_axes: dict[str, str]
) -> Mapping[str, str]:
    """Sorts {mesh axis: array axis}, so that the mesh axes of an array axis are major to minor.

    Takes their order from the array that shards this array axis over the most mesh axes.
    """
    ordered: dict[str, str] = {}
    for name in dict.fromkeys(array_axes.values()):
        longest = max((array.mesh_axes(name) for array in arrays), key=len)
        ordered |= {axis: name for axis in longest if array_axes.get(axis) == name}
    return ordered | array_axes


def choices_for(
    operands: Sequence[ShardedArray],
    target: Mapping[str, str],
    result: ShardedArray,
    is_result_placed: bool,
) -> Iterable[Choice]:
    """Yields the ways to compute a contraction with the operands resharded to `target`.

    If not `is_result_placed`, yields one choice that all-reduces any partial sums, and one for each
    array axis along which they can be reduce-scattered.
    """
    matched = [operand.with_sharding(target) for operand in operands]
    pairs = list(zip(operands, matched, strict=True))
    before = [collective for old, new in pairs for collective in resharding(old, new)]
    slices = [
        f'{old.label} along {name}'
        for old, new in pairs
        for name in new.names
        if any(old.array_axis(axis) is None for axis in new.mesh_axes(name))
    ]
    block = ' '.join(f'[{operand.block}]' for operand in matched)
    product = result.with_sharding(target)
    # mesh axes that shard a contracted axis, so that `product` is a partial sum over them
    partial = [a for a in result.space.mesh_shape if a in target and not product.array_axis(a)]
    for final in [result] if is_result_placed else [product, *_scatter_results(product, partial)]:
        steps, summed = reduce(product.sharding, partial, final.sharding)
        after = resharding(product.with_sharding(summed), final)
        yield Choice(
            final.expression(),
            (*before, *product.communications(steps), *after),
            tuple(slices),
            tuple(operand.expression() for operand in matched),
            block,
        )


def _scatter_results(product: ShardedArray, partial: Sequence[str]) -> Iterable[ShardedArray]:
    """Yields the results of reduce-scattering `product` over `partial` along each array axis.

    Skips array axes that are not divisible, or whose blocks would be out of device order.
    """
    if not partial:
        return
    space = product.space
    for name in product.names:
        scattered = product.with_sharding({**product.sharding, **dict.fromkeys(partial, name)})
        is_divisible = space.is_divisible(scattered.sharding)
        if is_divisible and is_in_order(scattered.mesh_axes(name), space.mesh_shape):
            yield scattered
