"""Finds the ways to compute a contraction of sharded operands. Imports no JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._notation.layout import Layout
from .communication import Blocks, Communication, in_order, resharding


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
        """The bytes of all collectives: 0 if there are none, else None if sizes are not given."""
        if any(collective.bytes is None for collective in self.collectives):
            return None
        return sum(collective.bytes or 0 for collective in self.collectives)

    def __str__(self) -> str:
        steps = [f'slice {text} (no communication)' for text in self.slices]
        steps += map(str, self.collectives)
        return '\n'.join([f"result '{self.result}'", *(steps or ['no communication'])])


def find_conflicts(operands: Sequence[Blocks]) -> Iterable[str]:
    """Yields the reasons why the blocks of the operands do not match; nothing if they match."""
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
        left_devices, right_devices = left.device_axes(name), right.device_axes(name)
        if name not in right.names or left_devices == right_devices:
            continue
        if left_devices and right_devices:
            yield f"'{name}' is sharded differently in operand 0 and operand 1"
            continue
        sharded, replicated = (0, 1) if left_devices else (1, 0)
        # if these devices shard another axis of the other operand, that is reported above
        if not any(map(operands[replicated].array_axis, left_devices or right_devices)):
            yield f"'{name}' is sharded in operand {sharded} but not in operand {replicated}"


def find_targets(operands: Sequence[Blocks], result: Blocks) -> Iterable[Layout]:
    """Finds layouts in which the blocks of the operands match.

    In these, each device axis shards no array axis, or one that it shards in an operand or in the
    result. The sharding of the result is a candidate because XLA may first reshard an operand to
    match it, which may send less data.
    """
    space = result.space
    # device axes by the array axes that they shard, in each operand and in the result
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for axis in space.devices:
        sharded = tuple(array.array_axis(axis) for array in (*operands, result))
        groups.setdefault(sharded, []).append(axis)
    candidates: list[list[str | None]] = []  # for each group: the array axes that it may shard
    for *sharded, requested in groups:
        names = list(dict.fromkeys(name for name in sharded if name))
        # if only one of the operands with this array axis shards it, it can also be gathered
        is_one_sided = len(names) == 1 and any(
            names[0] in operand.names and name is None
            for operand, name in zip(operands, sharded, strict=True)
        )
        options: list[str | None] = [*names, None] if is_one_sided or not names else [*names]
        if requested and requested not in options:
            options.append(requested)
        candidates.append(options)
    targets: dict[Layout, None] = {}
    for chosen in itertools.product(*candidates):
        pairs = zip(chosen, groups.values(), strict=True)
        array_axes = {axis: name for name, axes in pairs for axis in axes}
        targets[space.sharded(space.replicated, _ordered([*operands, result], array_axes))] = None
    return targets


def _ordered(
    arrays: Sequence[Blocks], array_axes: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Sorts `array_axes`, which has the array axis that each device axis shards.

    Device axes of the same array axis come in the order that they have in the array that shards it
    over the most of them.
    """
    ordered: dict[str, str | None] = {}
    for name in dict.fromkeys(array_axes.values()):
        if name:
            longest = max((array.device_axes(name) for array in arrays), key=len)
            ordered |= {axis: name for axis in longest if array_axes[axis] == name}
    return ordered | {axis: name for axis, name in array_axes.items() if axis not in ordered}


def choices_for(
    operands: Sequence[Blocks], target: Layout, result: Blocks, result_is_placed: bool
) -> Iterable[Choice]:
    """Yields the choices that multiply operands in the layout `target`.

    A result with a placement is resharded to it. One without keeps the layout of the product, or
    that of a reduce-scatter.
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
    product = result.with_layout(target)
    used = {split.mesh_axes[0] for split in target.splits if split.axis is not None}
    # device axes that shard a contracted axis
    partial = [a for a in result.space.devices if a in used and not product.array_axis(a)]
    for final in [result] if result_is_placed else [product, *_scattered(product, partial)]:
        yield Choice(
            final.expression(),
            (*before, *_sums(product, partial, final)),
            tuple(slices),
            tuple(operand.expression() for operand in matched),
            block,
        )


def _sums(product: Blocks, partial: Sequence[str], final: Blocks) -> Iterable[Communication]:
    """Yields the collectives that add partial sums and reshard the result."""
    scattered = {axis: final.array_axis(axis) for axis in partial if final.array_axis(axis)}
    added = [axis for axis in partial if axis not in scattered]
    if scattered:
        yield product.communication('reduce-scatter', list(scattered))
    summed = product.sharded(scattered)
    if added:
        yield summed.communication('all-reduce', added)
    yield from resharding(summed, final)


def _scattered(product: Blocks, partial: Sequence[str]) -> Iterable[Blocks]:
    """Yields the result of a reduce-scatter along each array axis that can be scattered.

    Its size must be divisible, and its device axes must stay in device order.
    """
    devices, sizes = product.space.devices, product.space.sizes
    for name in product.names if partial else ():
        over = (*product.device_axes(name), *partial)
        n_shards = math.prod(devices[axis] for axis in over)
        if (sizes is None or sizes[name] % n_shards == 0) and in_order(over, devices):
            yield product.sharded(dict.fromkeys(partial, name))
