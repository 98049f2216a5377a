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
        slices: operands that devices slice locally, without communication.
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
        """The bytes of all collectives; None if sizes are not given."""
        if any(one.bytes is None for one in self.collectives):
            return None
        return sum(one.bytes or 0 for one in self.collectives)

    def __str__(self) -> str:
        steps = [f'slice {one} (no communication)' for one in self.slices]
        steps += map(str, self.collectives)
        return '\n'.join([f"result '{self.result}'", *(steps or ['no communication'])])


def find_conflicts(operands: Sequence[Blocks]) -> Iterable[str]:
    """Explains why the blocks of the operands do not match; nothing if they match."""
    if len(operands) < 2:
        return
    one, other = operands
    for axis in one.space.devices:
        mine, its = one.holder(axis), other.holder(axis)
        if mine and its and mine != its:
            yield (
                f"'{mine}' of operand 0 and '{its}' of operand 1 are sharded over the same "
                'devices, so no device has what most blocks of the product need'
            )
    for name in one.names:
        mine, its = one.over(name), other.over(name)
        if name not in other.names or mine == its:
            continue
        if mine and its:
            yield f"'{name}' is sharded differently in operand 0 and operand 1"
            continue
        sharded, replicated = (0, 1) if mine else (1, 0)
        if not any(map(operands[replicated].holder, mine or its)):  # else already reported
            yield f"'{name}' is sharded in operand {sharded} but not in operand {replicated}"


def find_targets(operands: Sequence[Blocks], result: Blocks) -> Iterable[Layout]:
    """Finds layouts in which the blocks match, combined from shardings of operands and result.

    The sharding of the result is a candidate because XLA may first reshard an operand to match it,
    which may send less data.
    """
    space = result.space
    alike: dict[tuple[str | None, ...], list[str]] = {}  # device axes that shard the same axes
    for axis in space.devices:
        sharded = tuple(one.holder(axis) for one in (*operands, result))
        alike.setdefault(sharded, []).append(axis)
    candidates: list[list[str | None]] = []  # for each group of device axes: the axes to shard
    for *sharded, requested in alike:
        names = list(dict.fromkeys(name for name in sharded if name))
        one_sided = len(names) == 1 and any(
            names[0] in operand.names and name is None
            for operand, name in zip(operands, sharded, strict=True)
        )
        either: list[str | None] = [*names, None] if one_sided or not names else [*names]
        if requested and requested not in either:
            either.append(requested)
        candidates.append(either)
    targets: dict[Layout, None] = {}
    for chosen in itertools.product(*candidates):
        pairs = zip(chosen, alike.values(), strict=True)
        holders = {axis: name for name, axes in pairs for axis in axes}
        targets[space.sharded(space.replicated, _in_order([*operands, result], holders))] = None
    return targets


def _in_order(arrays: Sequence[Blocks], holders: Mapping[str, str | None]) -> dict[str, str | None]:
    """Orders device axes as in the most sharded array; returns the axis that each one shards."""
    first: dict[str, str | None] = {}
    for name in dict.fromkeys(holders.values()):
        if name:
            longest = max((array.over(name) for array in arrays), key=len)
            first |= {axis: name for axis in longest if holders[axis] == name}
    return first | {axis: name for axis, name in holders.items() if axis not in first}


def choices_for(
    operands: Sequence[Blocks], target: Layout, result: Blocks, placed: bool
) -> Iterable[Choice]:
    """Yields the choices that multiply operands in the layout `target`.

    If `placed`, the result ends up in its own layout.
    """
    matched = [operand.with_layout(target) for operand in operands]
    pairs = list(zip(operands, matched, strict=True))
    before = [one for old, new in pairs for one in resharding(old, new)]
    slices = [
        f'{old.array} along {name}'
        for old, new in pairs
        for name in new.names
        if any(old.holder(axis) is None for axis in new.over(name))
    ]
    block = ' '.join(f'[{one.block}]' for one in matched)
    product = result.with_layout(target)
    sharding = {split.mesh_axes[0] for split in target.splits if split.axis is not None}
    partial = [a for a in result.space.devices if a in sharding and not product.holder(a)]
    for final in [result] if placed else [product, *_scattered(product, partial)]:
        yield Choice(
            final.expression(),
            (*before, *_sums(product, partial, final)),
            tuple(slices),
            tuple(one.expression() for one in matched),
            block,
        )


def _sums(product: Blocks, partial: Sequence[str], final: Blocks) -> Iterable[Communication]:
    """Yields the collectives that add partial sums and reshard the result."""
    scattered = {axis: final.holder(axis) for axis in partial if final.holder(axis)}
    added = [axis for axis in partial if axis not in scattered]
    if scattered:
        yield product.communication('reduce-scatter', list(scattered))
    summed = product.sharded(scattered)
    if added:
        yield summed.communication('all-reduce', added)
    yield from resharding(summed, final)


def _scattered(product: Blocks, partial: Sequence[str]) -> Iterable[Blocks]:
    """Yields the results of a reduce-scatter along one axis, if the notation can express them."""
    devices, sizes = product.space.devices, product.space.sizes
    for name in product.names if partial else ():
        over = (*product.over(name), *partial)
        parts = math.prod(devices[axis] for axis in over)
        if (sizes is None or sizes[name] % parts == 0) and in_order(over, devices):
            yield product.sharded(dict.fromkeys(partial, name))
