"""The groups of devices that communicate, in each form in which XLA writes them; no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod

Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def read_groups(text: str) -> Groups:
    """Groups of devices, written out.

    >>> from einshard._hlo.device_groups import read_groups
    >>> read_groups('{{0,1},{2,3}}')
    ((0, 1), (2, 3))
    >>> read_groups('[2,2]<=[2,2]T(1,0)')
    ((0, 2), (1, 3))
    >>> read_groups("mesh['a'=2,'b'=2] {'a'}")
    ((0, 2), (1, 3))

    The second is 0, 1, 2, 3 in an array of shape (2, 2), transposed, in rows of two; the third
    are the devices along an axis of a mesh.
    """
    if text.startswith('{'):
        return tuple(_numbers(group) for group in re.findall(r'\{([\d, ]+)\}', text))
    if iota := re.fullmatch(r'\[(.*)\]<=\[(.*?)\](?:T\((.*)\))?', text):
        shape, dims, order = iota.groups()
        return _rows(_iota(_numbers(dims), _numbers(order or '')), _numbers(shape)[-1])
    if mesh := _MESH.fullmatch(text):
        return _groups_of_mesh(*mesh.groups())
    raise ValueError(f'unknown form of replica groups: {text}')


_MESH = re.compile(
    r'mesh\[(.*?)\](?:, device_ids=\((?:\[(.*?)\](?:T\((.*?)\))?|([\d,]+))\))? \{(.*)\}'
)


def _groups_of_mesh(
    mesh: str, dims: str | None, order: str | None, listed: str | None, axes: str
) -> Groups:
    """The devices along some axes of a mesh.

    Of axes such as 'b':(2)4 that part of b which has size 4 and comes after one of size 2. `dims`
    and `order`, or `listed`, if any, say which devices form the mesh.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    ]
    shape: list[int] = []  # of the mesh, its axes cut where a part begins or ends
    pieces: list[tuple[str, int]] = []  # for each of these dims, the axis and where it begins
    for name, size in sizes.items():
        ends = {end for other, before, n in parts if other == name for end in (before, before * n)}
        for before, end in pairwise(sorted(ends | {1, size})):
            pieces.append((name, before))
            shape.append(end // before)
    last = [
        dim
        for name, before, n in parts
        for dim, (other, at) in enumerate(pieces)
        if other == name and before <= at < before * n
    ]
    first = [dim for dim in range(len(shape)) if dim not in last]
    ids = _numbers(listed or '') or _iota(_numbers(dims or '') or shape, _numbers(order or ''))
    in_groups = [ids[i] for i in _iota(shape, first + last)]
    return _rows(in_groups, prod(shape[dim] for dim in last))


def _iota(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """0, 1, 2, ... in an array of these dims, read with its dims in another order."""
    strides = [prod(dims[dim + 1 :]) for dim in range(len(dims))]
    ranges = [range(0, dims[dim] * strides[dim], strides[dim]) for dim in order or range(len(dims))]
    return [sum(index) for index in product(*ranges)]


def _rows(numbers: list[int], size: int) -> Groups:
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(',') if number)


def connected(pairs: Iterable[tuple[int, int]]) -> Groups:
    """Those whom pairs connect, directly or through others.

    >>> from einshard._hlo.device_groups import connected
    >>> connected([(0, 1), (1, 0), (2, 3), (3, 4)])
    ((0, 1), (2, 3, 4))
    """
    group_of: dict[int, list[int]] = {}
    for pair in pairs:
        ours, theirs = (group_of.setdefault(device, [device]) for device in pair)
        if ours is not theirs:
            ours += theirs
            group_of.update(dict.fromkeys(theirs, ours))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


class Slices:
    """TPU slices: the positions, in the program's list of devices, of those of each slice.

    A program over several slices is compiled for one of them. Its collectives name partitions of
    the slice; what crosses slices names devices by ids: 300002 is number 2 of the third slice.

    Args:
        n_partitions: devices of one slice.
        n_slices: how many the program's text tells of; 1 if none.
        device_ids: of the program's devices in its order. Without, one slice after another.
    """

    def __init__(self, n_partitions: int, n_slices: int, device_ids: Sequence[int] = ()):
        if len(device_ids) <= n_partitions:
            device_ids = range(n_partitions)
            if n_slices > 1:
                device_ids = [s * _SLICE + i for s in range(1, n_slices + 1) for i in device_ids]
        self._position = {device: i for i, device in enumerate(device_ids)}
        self._slices: dict[int, list[int]] = {}
        for position, device in enumerate(device_ids):
            self._slices.setdefault(device // _SLICE, []).append(position)
        if len(device_ids) == n_partitions:
            self._slices = {1: list(range(n_partitions))}
        self.n_devices = len(device_ids)

    def within(self, groups: Groups) -> Groups:
        """Positions, in every slice, of groups of partitions."""
        if len(self._slices) == 1:
            return groups
        return tuple(
            tuple(positions[partition] for partition in group)
            for positions in self._slices.values()
            for group in groups
        )

    def across(self, target: str) -> Groups:
        """Positions of '{1,2}x{0:15}' or '{{100000,200000},...}'; of pairs with '->' too."""
        if product_ := re.fullmatch(r'\{([\d,]+)\}x\{(\d+):(\d+)\}', target):
            slices, first, last = product_.groups()
            return tuple(
                tuple(self._slices[slice_][i] for slice_ in _numbers(slices))
                for i in range(int(first), int(last) + 1)
            )
        listed = read_groups(target.replace('->', ','))
        return tuple(tuple(self._position[device] for device in group) for group in listed)


_SLICE = 100_000  # by how much the ids of a slice's devices go beyond those of the one before


def count_slices(text: str) -> int:
    """The number of slices that the transfers between slices in a program's text tell of."""
    found = 1
    for target in set(re.findall(r'_xla_megascale_target=("[^"]*"|\{[\d,>{}-]*\})', text)):
        if listed := re.match(r'"\{([\d,]+)\}x', target):
            found = max(found, *_numbers(listed[1]))
        else:
            found = max(found, *(int(n) // _SLICE for n in re.findall(r'\d{6,}', target)))
    return found
