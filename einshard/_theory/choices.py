"""Ways to compute a contraction whose operands are cut already. Imports no jax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .contraction import Contraction
from .cuts import Communication, Cuts, Cutting, moves


@dataclass(frozen=True)
class Choice:
    """One way to compute a contraction whose operands are where they are.

    Attributes:
        result: the placement of the result.
        collectives: what it costs, in order.
        slices: operands of which each device drops a part, which is no communication.
        operands: the placements in which the operands meet.
        block: what each device multiplies, as in '[b/2 x/4] [x/4 y]'.
    """

    result: str
    collectives: tuple[Communication, ...]
    slices: tuple[str, ...]
    operands: tuple[str, ...]
    block: str

    @property
    def bytes(self) -> int | None:
        """The bytes of all its collectives together, where sizes are given."""
        if any(one.bytes is None for one in self.collectives):
            return None
        return sum(one.bytes or 0 for one in self.collectives)

    def __str__(self) -> str:
        steps = [f'slice {one}, which is no communication' for one in self.slices]
        steps += map(str, self.collectives)
        return '\n'.join([f"result '{self.result}'", *(steps or ['no communication'])])


def find_conflicts(contraction: Contraction, operands: Sequence[Cutting]) -> Iterable[str]:
    """Why the blocks of the operands do not fit together."""
    if len(operands) < 2:
        return
    one, other = operands
    for axis in one.devices:
        mine, its = one.holder(axis), other.holder(axis)
        if mine and its and mine != its:
            yield (
                f"'{mine}' of operand 0 and '{its}' of operand 1 are cut over the same devices, "
                'so no device has what a block of the product needs'
            )
    for name in contraction.names:
        mine, its = one.cuts.get(name, ()), other.cuts.get(name, ())
        both = name in one.names and name in other.names
        if both and mine != its and not (mine and its):
            cut, whole = (0, 1) if mine else (1, 0)
            if not any(map(operands[whole].holder, mine or its)):  # else it is said above
                yield f"'{name}' is cut in operand {cut}, and whole in operand {whole}"
        elif both and mine != its:
            yield f"'{name}' is cut otherwise in operand 0 than in operand 1"


def find_targets(operands: Sequence[Cutting]) -> Iterable[Cuts]:
    """Cuttings of all axes in which blocks fit together, that keep something of each."""
    options: dict[tuple[str | None, ...], list[str | None]] = {}
    for axis in operands[0].devices:
        held = tuple(operand.holder(axis) for operand in operands)
        options.setdefault(held, []).append(axis)
    users: list[list[str | None]] = []
    for held in options:
        names = list(dict.fromkeys(name for name in held if name))
        one_sided = len(names) == 1 and any(
            names[0] in operand.names and name is None
            for operand, name in zip(operands, held, strict=True)
        )
        users.append([*names, None] if one_sided or not names else [*names])
    seen: list[Cuts] = []
    for chosen in itertools.product(*users):
        target: dict[str, tuple[str, ...]] = {}
        for name, axes in zip(chosen, options.values(), strict=True):
            if name:
                target[name] = target.get(name, ()) + tuple(str(axis) for axis in axes)
        target = {name: _in_written_order(name, axes, operands) for name, axes in target.items()}
        if target not in seen:
            seen.append(target)
    return seen


def _in_written_order(
    name: str, axes: tuple[str, ...], operands: Sequence[Cutting]
) -> tuple[str, ...]:
    """The device axes that cut an axis, in the order of the operand that has most of them."""
    cuts = [operand.cuts.get(name, ()) for operand in operands]
    longest = max(cuts, key=len)
    others = [axis for axis in axes if axis not in longest]
    return tuple(sorted(axes, key=[*longest, *others].index))


def choices_for(
    operands: Sequence[Cutting], target: Cuts, result: Cutting, asked: Cuts | None
) -> Iterable[Choice]:
    """The ways to go on, once the blocks fit together."""
    met: list[Cutting] = []
    before: list[Communication] = []
    slices: list[str] = []
    for operand in operands:
        new = {name: target[name] for name in operand.names if name in target}
        before += moves(operand, new)
        met.append(operand.but(new))
        held = {axis for cut in operand.cuts.values() for axis in cut}
        slices += [
            f'{operand.array} along {name}' for name, cut in new.items() if not held.issuperset(cut)
        ]
    block = ' '.join(f'[{one.block}]' for one in met)
    at_once = result.but({name: target[name] for name in result.names if name in target})
    partial = [
        axis
        for axis in result.devices
        if any(axis in cut for name, cut in target.items() if name not in result.names)
    ]
    wanted = [asked] if asked is not None else [at_once.cuts, *_scattered(at_once, partial)]
    for cuts in wanted:
        after = [*_sums(at_once, partial, cuts)]
        placed = result.but(cuts)
        yield Choice(
            placed.expression(),
            (*before, *after),
            tuple(slices),
            tuple(one.expression() for one in met),
            block,
        )


def _sums(at_once: Cutting, partial: Sequence[str], wanted: Cuts) -> Iterable[Communication]:
    """Partial sums added up, and the result brought to where it is asked for."""
    final = at_once.but(wanted)
    scattered = [axis for axis in partial if final.holder(axis)]
    added = [axis for axis in partial if not final.holder(axis)]
    now = at_once
    if scattered:
        yield now.communication('reduce-scatter', scattered)
        now = now.but(
            {
                name: (*now.cuts.get(name, ()), *(a for a in scattered if final.holder(a) == name))
                for name in now.names
            }
        )
    if added:
        yield now.communication('all-reduce', added)
    yield from moves(now, wanted)


def _scattered(at_once: Cutting, partial: Sequence[str]) -> Iterable[Cuts]:
    """The result with partial sums scattered along one of its axes, where the notation has it."""
    order = list(at_once.devices)
    for name in at_once.names if partial else ():
        cut = (*at_once.cuts.get(name, ()), *partial)
        parts = math.prod(at_once.devices[axis] for axis in cut)
        fits = at_once.sizes is None or at_once.sizes[name] % parts == 0
        if fits and list(cut) == sorted(cut, key=order.index):
            yield {**at_once.cuts, name: cut}
