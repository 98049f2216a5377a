"""Finds the ways to compute a contraction of sharded operands. Imports no JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._notation.layout import Layout
from .communication import Blocks, Communication, is_in_order, resharding


@dataclass(frozen=True)
class Choice:
    """One way to compute a contraction of sharded operands.

    Attributes:
        result: the placement of the result.
        collectives: the collectives, in order.
        slices: the slices that devices take of their operands, without communication, such as
            'operand 0 along x'.
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
        """The bytes of all collectives; None if array sizes are not given."""
        if any(collective.bytes is None for collective in self.collectives):
            return None
        return sum(collective.bytes or 0 for collective in self.collectives)

    def __str__(self) -> str:
        steps = [f'slice {text} (no communication)' for text in self.slices]
        steps += map(str, self.collectives)
        return '\n'.join([f"result '{self.result}'", *(steps or ['no communication'])])


def find_conflicts(operands: Sequence[Blocks]) -> Iterable[str]:
    """Yields the reasons why the devices cannot multiply their blocks of the operands."""
    if len(operands) < 2:
        return
    left, right = operands
    for device_axis in left.space.devices:
        left_axis, right_axis = left.array_axis(device_axis), right.array_axis(device_axis)
        if left_axis and right_axis and left_axis != right_axis:
            yield (
                f"'{left_axis}' of operand 0 and '{right_axis}' of operand 1 are sharded over the "
                'same devices, so for some blocks of the product no device has both inputs'
            )
    for name in left.names:
        left_axes, right_axes = left.device_axes(name), right.device_axes(name)
        if name not in right.names or left_axes == right_axes:
            continue
        if left_axes and right_axes:
            yield f"'{name}' is sharded differently in operand 0 and operand 1"
            continue
        sharded, unsharded = (0, 1) if left_axes else (1, 0)
        # device axes that shard another axis of the `unsharded` operand are reported above
        if not any(map(operands[unsharded].array_axis, left_axes or right_axes)):
            yield f"'{name}' is sharded in operand {sharded} but not in operand {unsharded}"


def find_targets(operands: Sequence[Blocks], result: Blocks) -> Iterable[Layout]:
    """Finds layouts in which the devices can multiply their blocks of the operands.

    Each device axis holds replicas, or shards an array axis that it shards in an operand or in the
    result: XLA may reshard an operand to match the result, which may send less data.
    """
    space = result.space
    # device axes, keyed by the array axis that they shard in each operand and in the result
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for axis in space.devices:
        sharded = tuple(array.array_axis(axis) for array in (*operands, result))
        groups.setdefault(sharded, []).append(axis)
    options = [_options(operands, in_operands, in_result) for *in_operands, in_result in groups]
    targets: dict[Layout, None] = {}
    for chosen in itertools.product(*options):
        pairs = zip(chosen, groups.values(), strict=True)
        array_axes = {axis: name for name, axes in pairs for axis in axes}
        targets[space.sharded(space.replicated, _ordered([*operands, result], array_axes))] = None
    return targets


def _options(
    operands: Sequence[Blocks], in_operands: Sequence[str | None], in_result: str | None
) -> list[str | None]:
    """Lists the array axes that a device axis may shard in the contraction; None for replicas.

    In the operands and the result, it shards `in_operands` and `in_result`.
    """
    options: list[str | None] = list(dict.fromkeys(name for name in in_operands if name))
    # an array axis that both operands have, but only one shards, can be gathered
    can_gather = len(options) == 1 and any(
        options[0] in operand.names and name is None
        for operand, name in zip(operands, in_operands, strict=True)
    )
    if can_gather or not options:
        options.append(None)
    if in_result and in_result not in options:
        options.append(in_result)
    return options


def _ordered(
    arrays: Sequence[Blocks], array_axes: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Sorts `array_axes`: {device axis: array axis that it shards}.

    The device axes of one array axis are ordered as in the array that shards it over the most.
    """
    ordered: dict[str, str | None] = {}
    for name in dict.fromkeys(array_axes.values()):
        if name:
            longest = max((array.device_axes(name) for array in arrays), key=len)
            ordered |= {axis: name for axis in longest if array_axes[axis] == name}
    return ordered | {axis: name for axis, name in array_axes.items() if axis not in ordered}


def choices_for(
    operands: Sequence[Blocks], target: Layout, result: Blocks, is_result_placed: bool
) -> Iterable[Choice]:
    """Yields the ways to compute a contraction with the operands resharded to the layout `target`.

    If not `is_result_placed`, the result stays as the devices compute it, or is reduce-scattered.
    """
    matched = [operand.with_layout(target) for operand in operands]
    pairs = list(zip(operands, matched, strict=True))
    before = [collective for old, new in pairs for collective in resharding(old, new)]
    slices = [
        f'{old.array} along {name}'
        for old, new in pairs
        for name in new.names
        if any(old.array_axis(axis) is None for axis in new.device_axes(name))
    ]
    block = ' '.join(f'[{operand.block}]' for operand in matched)
    product = result.with_layout(target)  # the result before the sum over `partial`
    sharding_axes = {split.mesh_axes[0] for split in target.splits if split.axis is not None}
    # device axes that shard a contracted axis
    partial = [a for a in result.space.devices if a in sharding_axes and not product.array_axis(a)]
    for final in [result] if is_result_placed else [product, *_scattered(product, partial)]:
        yield Choice(
            final.expression(),
            (*before, *_final_steps(product, partial, final)),
            tuple(slices),
            tuple(operand.expression() for operand in matched),
            block,
        )


def _final_steps(product: Blocks, partial: Sequence[str], final: Blocks) -> Iterable[Communication]:
    """Yields the collectives that sum `product` along the device axes `partial`, to get `final`."""
    scattered = {axis: final.array_axis(axis) for axis in partial if final.array_axis(axis)}
    added = [axis for axis in partial if axis not in scattered]
    if scattered:
        yield product.communication('reduce-scatter', list(scattered))
    summed = product.sharded(scattered)
    if added:
        yield summed.communication('all-reduce', added)
    yield from resharding(summed, final)


def _scattered(product: Blocks, partial: Sequence[str]) -> Iterable[Blocks]:
    """Yields the result of a reduce-scatter of `product` along `partial`, for each array axis.

    Skips array axes that are not divisible, or whose blocks would be out of device order.
    """
    if not partial:
        return
    devices, sizes = product.space.devices, product.space.sizes
    for name in product.names:
        over = (*product.device_axes(name), *partial)
        n_shards = math.prod(devices[axis] for axis in over)
        if (sizes is None or sizes[name] % n_shards == 0) and is_in_order(over, devices):
            yield product.sharded(dict.fromkeys(partial, name))
