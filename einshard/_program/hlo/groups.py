"""Parses replica groups, in all forms that XLA writes, and the devices of TPU slices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod

Groups = tuple[tuple[int, ...], ...]
MAX_DEVICES = 2**20  # of a program; the largest TPU slices have 2**14


@lru_cache(maxsize=256)
def read_groups(text: str) -> Groups:
    """Parses the device groups of a collective.

    >>> from einshard._program.hlo.groups import read_groups
    >>> read_groups('{{0,1},{2,3}}')
    ((0, 1), (2, 3))
    >>> read_groups('[2,2]<=[2,2]T(1,0)')
    ((0, 2), (1, 3))
    >>> read_groups("mesh['a'=2,'b'=2] {'a'}")
    ((0, 2), (1, 3))

    The second example reshapes 0, 1, 2, 3 to (2, 2), transposes, and splits into rows of two.
    The third groups devices along mesh axis 'a'.
    """
    if text.startswith('{'):
        return tuple(_numbers(group) for group in re.findall(r'\{([\d, ]+)\}', text))
    if iota := re.fullmatch(r'\[(.*)\]<=\[(.*?)\](?:T\((.*)\))?', text):
        shape, dims, order = iota.groups()
        if prod(_numbers(shape)) != prod(_numbers(dims)):
            raise ValueError(f'groups of different sizes: {text}')
        return _rows(_iota(_numbers(dims), _numbers(order or '')), _numbers(shape)[-1])
    if mesh := _MESH.fullmatch(text):
        return _groups_of_mesh(*mesh.groups())
    raise ValueError(f'unknown replica groups: {text}')


_MESH = re.compile(
    r'mesh\[(.*?)\](?:, device_ids=\((?:\[(.*?)\](?:T\((.*?)\))?|([\d,]+))\))? \{(.*)\}'
)


def _groups_of_mesh(
    mesh: str, dims: str | None, order: str | None, listed: str | None, axes: str
) -> Groups:
    """Groups the devices of a mesh along some of its axes.

    Args:
        mesh: the mesh axes, such as "'a'=2,'b'=8".
        dims, order: '8,2' and '1,0' if device_ids is the transposed iota [8,2]T(1,0).
        listed: device_ids, if it is a list such as '0,2,1,3'.
        axes: the axes to group along. "'a','b':(2)4" means axis a, and the sub-axis of b that has
            size 4 and follows a sub-axis of size 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    grouped = [  # (axis, product of the sub-axes before, size)
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    ]
    shape: list[int] = []  # of the mesh, with all axes split into sub-axes
    sub_axes: list[tuple[str, int]] = []  # for each dim: (axis, product of the sub-axes before)
    for axis, size in sizes.items():
        bounds = {1, size}
        for name, before, n in grouped:
            if name == axis:
                bounds |= {before, before * n}
        for start, end in pairwise(sorted(bounds)):
            sub_axes.append((axis, start))
            shape.append(end // start)
    group_dims = [
        dim
        for name, before, n in grouped
        for dim, (axis, start) in enumerate(sub_axes)
        if axis == name and before <= start < before * n
    ]
    other_dims = [dim for dim in range(len(shape)) if dim not in group_dims]
    ids = _numbers(listed or '') or _iota(_numbers(dims or '') or shape, _numbers(order or ''))
    in_groups = [ids[i] for i in _iota(shape, other_dims + group_dims)]
    return _rows(in_groups, prod(shape[dim] for dim in group_dims))


def _iota(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Returns an iota 0, 1, 2, ... of shape `dims`, transposed by `order`, as a flat list."""
    if prod(dims) > MAX_DEVICES:
        raise ValueError(f'more than {MAX_DEVICES:,} devices')
    strides = [prod(dims[dim + 1 :]) for dim in range(len(dims))]
    ranges = [range(0, dims[dim] * strides[dim], strides[dim]) for dim in order or range(len(dims))]
    return [sum(index) for index in product(*ranges)]


def _rows(numbers: list[int], size: int) -> Groups:
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(',') if number)


def connected(pairs: Iterable[tuple[int, int]]) -> Groups:
    """Finds the connected components of (source, target) pairs.

    >>> from einshard._program.hlo.groups import connected
    >>> connected([(0, 1), (1, 0), (2, 3), (3, 4)])
    ((0, 1), (2, 3, 4))
    """
    group_of: dict[int, list[int]] = {}
    for pair in pairs:
        group_a, group_b = (group_of.setdefault(device, [device]) for device in pair)
        if group_a is not group_b:
            group_a += group_b
            group_of.update(dict.fromkeys(group_b, group_a))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


@lru_cache(maxsize=256)
def read_pairs(groups: Groups) -> tuple[tuple[tuple[int, int], ...], Groups]:
    """Returns groups of two as (source, target) pairs, and their connected components."""
    pairs = tuple((source, target) for source, target in groups)
    return pairs, connected(pairs)


class Slices:
    """Converts partition numbers and device ids to positions in the device list of a program.

    A multi-slice TPU program is compiled for one slice. Its collectives within a slice use
    partition numbers, which are the same in each slice. Its transfers between slices use device
    ids: 300002 is device 2 of slice 3. Slice numbers start at 1.

    Args:
        n_partitions: the number of devices of one slice.
        n_slices: the number of slices.
        device_ids: the ids of the program's devices in order. Default: slice by slice, sorted by
            id. Ignored if the list has at most `n_partitions` ids.
    """

    def __init__(self, n_partitions: int, n_slices: int, device_ids: Sequence[int] = ()):
        if len(device_ids) <= n_partitions:
            device_ids = range(n_partitions)
            if n_slices > 1:
                device_ids = [
                    s * _IDS_PER_SLICE + i for s in range(1, n_slices + 1) for i in device_ids
                ]
        self._position = {device: i for i, device in enumerate(device_ids)}
        self._slices: dict[int, list[int]] = {}
        for position, device in enumerate(device_ids):
            self._slices.setdefault(device // _IDS_PER_SLICE, []).append(position)
        if len(device_ids) == n_partitions:
            self._slices = {1: list(range(n_partitions))}
        self.n_devices = len(device_ids)

    def within(self, groups: Groups) -> Groups:
        """Converts groups of partition numbers to groups of positions in every slice."""
        if len(self._slices) == 1:
            return groups
        return tuple(
            tuple(positions[partition] for partition in group)
            for positions in self._slices.values()
            for group in groups
        )

    def parse_target(self, target: str) -> Groups:
        """Returns the positions of the devices in a transfer between slices.

        '{1,2}x{0:15}' has 16 groups: device i of slice 1 and device i of slice 2, for i from 0 to
        15. '{{100000,200000},...}' lists groups of device ids. A permute lists pairs of device ids:
        '{{100000->200000},...}'.
        """
        if ranges := re.fullmatch(r'\{([\d,]+)\}x\{(\d+):(\d+)\}', target):
            slices, first, last = ranges.groups()
            return tuple(
                tuple(self._slices[slice_][i] for slice_ in _numbers(slices))
                for i in range(int(first), int(last) + 1)
            )
        listed = read_groups(target.replace('->', ','))
        return tuple(tuple(self._position[device] for device in group) for group in listed)


_IDS_PER_SLICE = 100_000


def count_slices(text: str) -> int:
    """Returns the number of slices: the highest slice number in `text`, or 1."""
    found = 1
    for target in set(re.findall(r'_xla_megascale_target=("[^"]*"|\{[\d,>{}-]*\})', text)):
        if listed := re.match(r'"\{([\d,]+)\}x', target):
            found = max(found, *_numbers(listed[1]))
        else:
            found = max(found, *(int(n) // _IDS_PER_SLICE for n in re.findall(r'\d{6,}', target)))
    return found
