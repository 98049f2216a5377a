"""How blocks of an array move from one cutting to another: which collectives it takes.

A cutting says for each array axis which device axes cut it. Imports no jax.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._layout import with_unsharded

# The device axes that cut each array axis, major first; axes that are not cut may be left out.
Cuts: TypeAlias = Mapping[str, tuple[str, ...]]
Devices: TypeAlias = Mapping[str, int]  # the device axes, slowest first, with their sizes


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective that theory asks for.

    Attributes:
        kind: 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' or 'collective-permute'.
        of: which array: 'operand 0', 'the result'.
        over: the device axes it goes over.
        parties: how many devices take part in one group of it.
        groups: how many such groups there are.
        block: what a device holds of the array where it holds most, as in 'b/2 x'.
        bytes: the size of that block, where sizes are given.
    """

    kind: str
    of: str
    over: tuple[str, ...]
    parties: int
    groups: int
    block: str
    bytes: int | None

    def __str__(self) -> str:
        amount = '' if self.bytes is None else f', {self.bytes:,} bytes'
        among = f'{self.groups} groups of {self.parties}' if self.groups > 1 else f'{self.parties}'
        return (
            f'{self.kind} of {self.of} over {", ".join(self.over)}: '
            f'[{self.block}]{amount}, among {among} devices'
        )


@dataclass(frozen=True)
class Cutting:
    """An array in blocks: its axes, what cuts them, and what there is to cut them with."""

    array: str  # 'operand 0', 'the result'
    names: tuple[str, ...]
    cuts: Cuts
    devices: Devices
    sizes: Mapping[str, int] | None = None
    item_bytes: int = 4

    def but(self, cuts: Cuts) -> Cutting:
        """The same array, cut otherwise."""
        return Cutting(self.array, self.names, cuts, self.devices, self.sizes, self.item_bytes)

    def holder(self, device_axis: str) -> str | None:
        """The array axis that a device axis cuts."""
        cut = (name for name in self.names if device_axis in self.cuts.get(name, ()))
        return next(cut, None)

    @property
    def block(self) -> str:
        """What one device holds: 'b/2 x'."""
        parts = {name: self._parts(name) for name in self.names}
        return ' '.join(f'{name}/{n}' if n > 1 else name for name, n in parts.items())

    @property
    def bytes(self) -> int | None:
        """The bytes that one device holds."""
        if self.sizes is None:
            return None
        return self.item_bytes * math.prod(
            self.sizes[name] // self._parts(name) for name in self.names
        )

    def expression(self) -> str:
        """The cutting in the notation, by count; by name where the order is not the devices'."""
        left = ' '.join(self.names)
        order = list(self.devices)
        for cut in self.cuts.values():
            if [axis for axis in order if axis in cut] != list(cut):
                return f'{left} -> {" ".join(map(self._by_name, self.names))}'
        grid: list[tuple[str, int]] = []
        for axis, size in self.devices.items():
            name = self.holder(axis) or ''
            if size > 1 and grid and grid[-1][0] == name:
                grid[-1] = (name, grid[-1][1] * size)
            elif size > 1:
                grid.append((name, size))
        terms = with_unsharded([f'{name}{n}' for name, n in grid], [n for n, _ in grid], self.names)
        return f'{left} -> {" ".join(terms)}'.strip()

    def communication(self, kind: str, over: Sequence[str]) -> Communication:
        """A collective on blocks of this size."""
        parties = math.prod(self.devices[axis] for axis in over)
        groups = math.prod(self.devices.values()) // parties
        return Communication(kind, self.array, tuple(over), parties, groups, self.block, self.bytes)

    def _parts(self, name: str) -> int:
        return math.prod(self.devices[axis] for axis in self.cuts.get(name, ()))

    def _by_name(self, name: str) -> str:
        cut = self.cuts.get(name, ())
        listed = ','.join(cut)
        return name if not cut else f'{name}@{listed}' if len(cut) == 1 else f'{name}@({listed})'


def moves(old: Cutting, new: Cuts) -> tuple[Communication, ...]:
    """The collectives that bring an array from one cutting to another.

    To cut what was whole costs nothing, and comes first: each device keeps a part of what it has.
    For the rest see "Optimization of Collective Communication Operations in MPICH" (Thakur,
    Rabenseifner, Gropp, 2005).
    """
    free = {axis for axis in old.devices if not old.holder(axis)}
    kept = old.but({n: _cut_first(old.cuts.get(n, ()), new.get(n, ()), free) for n in old.names})
    wanted = old.but(new)
    before, after = ({axis: one.holder(axis) for axis in old.devices} for one in (kept, wanted))
    gone = [axis for axis in old.devices if before[axis] and not after[axis]]
    moved = [axis for axis in old.devices if before[axis] and after[axis]]
    exchanged = [axis for axis in moved if before[axis] != after[axis]]
    found: list[Communication] = []
    if gone:
        kept = kept.but(_without(kept.cuts, gone))
        found.append(kept.communication('all-gather', gone))
    if exchanged:
        found.append(kept.communication('all-to-all', exchanged))
    # the parts of an axis in another order than they are in
    still = _without(kept.cuts, exchanged)
    turned = [
        axis
        for name, cut in still.items()
        if cut != tuple(new.get(name, ()))[: len(cut)]
        for axis in cut
    ]
    if turned and not exchanged:
        found.append(kept.communication('collective-permute', turned))
    return tuple(found)


def _cut_first(
    cut: tuple[str, ...], wanted: tuple[str, ...], free: Collection[str]
) -> tuple[str, ...]:
    """An axis cut also by those device axes that cut nothing yet, if none has to leave it."""
    more = [axis for axis in wanted if axis in free] if set(cut) <= set(wanted) else []
    return (*cut, *more)


def _without(cuts: Cuts, axes: Iterable[str]) -> Cuts:
    gone = set(axes)
    return {name: tuple(axis for axis in cut if axis not in gone) for name, cut in cuts.items()}
