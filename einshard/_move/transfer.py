"""Plans the move of one array: what happens on its devices, and which pieces change device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding

from .._cache import cached
from .._errors import EinshardError
from .._notation.counts import prime_factors
from .._sharding.collective_axes import as_named_sharding, sharding_of_blocks
from .._sharding.mesh import Device, device_mesh, spec_axes
from .placed import Boxes, Placed, bound, boxes, missing, refined
from .route import Move

Slices: TypeAlias = tuple[slice, ...]


class Piece(NamedTuple):
    """A part of the new shard of a device, which comes from a shard of another one."""

    source: int  # of the devices of the move
    inside: Slices  # where it is in that shard


@dataclass(frozen=True, eq=False)
class Transfer:
    """How an array moves.

    Attributes:
        devices: the source devices. The move is among them.
        move: the move on the source devices; None if `pieces` are cut from the shards as they are.
        pieces: for each target device, the parts of its new shard, in row-major order, and how many
            there are along each axis. Empty if both have the same devices: the shards stay.
        before, after: what each device holds, in the order of `all_devices`; nothing at first.
    """

    devices: tuple[Device, ...]
    target_devices: tuple[Device, ...]
    move: Move | None
    pieces: tuple[tuple[tuple[Piece, ...], tuple[int, ...]], ...]
    before: Boxes
    after: Boxes
    all_devices: tuple[Device, ...]
    itemsize: int

    @property
    def is_same(self) -> bool:
        """Whether source and target have the same devices."""
        return not self.pieces

    @functools.cached_property
    def old_bytes(self) -> int:
        """The bytes of the largest shard at first."""
        return int(self.before.volumes().max(initial=0)) * self.itemsize

    @functools.cached_property
    def new_bytes(self) -> int:
        """The bytes of the largest shard at the end, or on the way to pieces for other devices."""
        held = int(self.after.volumes().max(initial=0))
        if self.move is not None:
            on_source = boxes(self.move.after, self.move.shape)
            held = max(held, int(on_source.volumes().max(initial=0)))
        return held * self.itemsize

    def missing(self) -> Any:
        """Returns the bytes that each device must receive, in the order of `all_devices`."""
        return missing(self.before, self.after) * self.itemsize


def placed_of(sharding: Any, shape: Sequence[int]) -> tuple[tuple[Device, ...], Placed]:
    """Returns the devices of a sharding in order, and its placement over them."""
    ndim = len(shape)
    if isinstance(sharding, SingleDeviceSharding):
        return tuple(sharding.device_set), Placed((1,), ((),) * ndim)
    named = sharding
    if not isinstance(sharding, NamedSharding):
        named = as_named_sharding(sharding, shape, device_mesh(list(sharding.device_set)))
    if named is None:
        raise EinshardError(
            f'arrays that are sharded by a {type(sharding).__name__} cannot be moved',
            code='array',
            facts={'sharding': str(sharding)},
        )
    mesh = named.mesh
    entries = [tuple(map(mesh.axis_names.index, axes)) for axes in spec_axes(named.spec)]
    entries += [()] * (ndim - len(entries))
    devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
    return devices, Placed(tuple(mesh.axis_sizes), tuple(entries))


@cached
def plan_transfer(shape: tuple[int, ...], dtype: Any, source: Any, target: Any) -> Transfer:
    """Plans how an array moves. Remembers it."""
    devices, before = placed_of(source, shape)
    target_devices, after = placed_of(target, shape)
    held, new = boxes(before, shape), boxes(after, shape)
    all_devices = tuple(dict.fromkeys((*devices, *target_devices)))
    n, pieces = len(devices), ()
    ends = _of_all(devices, held, all_devices), _of_all(target_devices, new, all_devices)
    targets: tuple[int, ...] = ()
    on_source: Placed | None
    if {*devices} == {*target_devices}:
        on_source, targets = _in_order(devices, target_devices, before, after, new)
    else:
        on_source, numbers = _on_source(devices, target_devices, before, after, shape)
        on_the_way = held if on_source is None else boxes(on_source, shape)
        pieces = tuple(
            _cut(
                on_the_way, _from(j, n) if number is None else [number], new.starts[j], new.stops[j]
            )
            for j, number in enumerate(numbers)
        )
    move = None
    if on_source is not None:
        first, last = refined(before, on_source)
        move = Move(shape, dtype.name, dtype.itemsize, first, last, targets)
    return Transfer(devices, target_devices, move, pieces, *ends, all_devices, dtype.itemsize)


@cached
def by_pieces(shape: tuple[int, ...], dtype: Any, source: Any, target: Any) -> Transfer:
    """Plans a move without a program on the source devices, for moves that do not compile."""
    found = plan_transfer(shape, dtype, source, target)
    _, before = placed_of(source, shape)
    _, after = placed_of(target, shape)
    held, new = boxes(before, shape), boxes(after, shape)
    n = len(found.devices)
    pieces = tuple(
        _cut(
            held,
            _from(j, n),
            new.starts[j],
            new.stops[j],
            found.devices.index(device) if device in found.devices else -1,
        )
        for j, device in enumerate(found.target_devices)
    )
    ends = found.before, found.after, found.all_devices, found.itemsize
    return Transfer(found.devices, found.target_devices, None, pieces, *ends)


def _from(first: int, n: int) -> list[int]:
    """Lists n sources, such that targets prefer different ones of those that have a part."""
    return [(first + i) % n for i in range(n)]


def _of_all(devices: Sequence[Device], held: Boxes, all_devices: Sequence[Device]) -> Boxes:
    """Returns what each of `all_devices` holds, which is nothing on devices that are not listed."""
    shape = len(all_devices), held.starts.shape[1]
    starts, stops = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    at = {device: i for i, device in enumerate(all_devices)}
    rows = [at[device] for device in devices]
    starts[rows], stops[rows] = held
    return Boxes(starts, stops)


def _in_order(
    devices: Sequence[Device],
    target_devices: Sequence[Device],
    before: Placed,
    after: Placed,
    new: Boxes,
) -> tuple[Placed, tuple[int, ...]]:
    """Returns the new placement over the devices in the order of the source.

    If no mesh in that order has it, then shards are sent to the devices that are to have them.
    """
    if tuple(devices) == tuple(target_devices):
        return after, ()
    at = {device: i for i, device in enumerate(target_devices)}
    rows = [at[device] for device in devices]
    starts, sizes = new.starts[rows], (new.stops - new.starts)[rows]
    blocks = (starts // np.maximum(sizes, 1)).T.tolist()
    for factors in (refined(before)[0].sizes, tuple(prime_factors(len(devices)))):
        mesh = AbstractMesh(factors, tuple(f'd{i}' for i in range(len(factors))))
        found = sharding_of_blocks(blocks, mesh)
        if found is not None and starts[0].sum() == 0:
            entries = [tuple(map(mesh.axis_names.index, axes)) for axes in spec_axes(found.spec)]
            entries += [()] * (len(after.entries) - len(entries))
            return Placed(factors, tuple(entries)), ()
    order = {device: i for i, device in enumerate(devices)}
    return after, tuple(order[device] for device in target_devices)


def _on_source(
    devices: Sequence[Device],
    target_devices: Sequence[Device],
    before: Placed,
    after: Placed,
    shape: Sequence[int],
) -> tuple[Placed | None, list[int | None]]:
    """Finds a placement on the source devices whose shards contain those of the target.

    Returns it with the number of the source device for each target device; None if neither number
    of devices divides the other, or axes cannot be dropped.
    """
    n, n_targets = len(devices), len(target_devices)
    if n % n_targets == 0:  # each shard on several devices: next to each other, or far apart
        copies = n // n_targets
        sizes = (1,) if not after.sizes else after.sizes
        near = Placed((*sizes, copies), after.entries)
        moved = tuple(tuple(axis + 1 for axis in axes) for axes in after.entries)
        far = Placed((copies, *sizes), moved)
        choices = [(far, [*range(n_targets)]), (near, [j * copies for j in range(n_targets)])]

        def cost(choice: tuple[Placed, list[int]]) -> tuple[int, int]:
            placed, numbers = choice
            stay = sum(devices[i] == target_devices[j] for j, i in enumerate(numbers))
            return -stay, bound(boxes(before, shape), boxes(placed, shape))

        placed, numbers = min(choices, key=cost)
        return placed, [*numbers]
    if n_targets % n == 0:  # each source device holds the shards of several targets
        [fine] = refined(after)
        kept, entries = [*range(len(fine.sizes))], [*fine.entries]
        for factor in prime_factors(n_targets // n):
            axis = _droppable(fine.sizes, kept, entries, factor)
            if axis is None:
                return None, [None] * n_targets
            kept.remove(axis)
            entries = [tuple(a for a in axes if a != axis) for axes in entries]
        placed = Placed(
            tuple(fine.sizes[axis] for axis in kept),
            tuple(tuple(map(kept.index, axes)) for axes in entries),
        )
        grid = np.arange(n_targets).reshape(fine.sizes or (1,))
        coordinates = np.unravel_index(np.arange(n_targets), grid.shape)
        numbers = np.zeros(n_targets, int)
        for axis in kept:
            numbers = numbers * fine.sizes[axis] + coordinates[axis]
        return placed, numbers.tolist()
    return None, [None] * n_targets


def _droppable(
    sizes: Sequence[int], kept: Sequence[int], entries: Sequence[tuple[int, ...]], size: int
) -> int | None:
    """Returns a mesh axis of this size that shards nothing, or is the last one of its array axis.

    Without it, shards are larger, and contain those before.
    """
    used = {axis for axes in entries for axis in axes}
    last = {axes[-1] for axes in entries if axes}
    found = [axis for axis in kept if sizes[axis] == size and (axis not in used or axis in last)]
    return min(found, key=lambda axis: axis in used, default=None)


def _cut(
    held: Boxes, sources: Sequence[int], start: Any, stop: Any, own: int = -1
) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """Cuts a box into the parts that different shards contain, and picks a source for each.

    Args:
        own: the source that is the device itself, which is preferred; -1 if it is not one.
    """
    ndim = len(start)
    cuts: list[list[tuple[int, int]]] = []
    for axis in range(ndim):
        marks = {int(start[axis]), int(stop[axis])}
        for source in sources:
            ends = (int(held.starts[source, axis]), int(held.stops[source, axis]))
            marks |= {end for end in ends if start[axis] < end < stop[axis]}
        ordered = sorted(marks)
        cuts.append([*pairwise(ordered)] or [(ordered[0], ordered[0])])
    counts = tuple(map(len, cuts))
    in_turn = [*([own] if own >= 0 else []), *sources]
    pieces: list[Piece] = []
    for at in np.ndindex(*counts):
        box = [cuts[axis][i] for axis, i in enumerate(at)]
        source = next(
            source
            for source in in_turn
            if all(
                held.starts[source, axis] <= low and high <= held.stops[source, axis]
                for axis, (low, high) in enumerate(box)
            )
        )
        base = held.starts[source]
        inside = (
            slice(int(low - base[axis]), int(high - base[axis]))
            for axis, (low, high) in enumerate(box)
        )
        pieces.append(Piece(source, tuple(inside)))
    return tuple(pieces), counts


def is_plain(sharding: Any) -> bool:
    """Whether a program with Auto axes can have an argument or result with this sharding."""
    return (
        isinstance(sharding, NamedSharding)
        and isinstance(sharding.mesh, Mesh)
        and set(sharding.mesh.axis_types) == {AxisType.Auto}
        and sharding.memory_kind in (None, 'device')
    )
