"""The time of collectives along mesh axes, for any shape of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._hlo.hardware import Chip
from .._inspect.network import Network


class MeshNetwork:
    """The network between devices, by the axes of meshes of them.

    Args:
        devices: in hardware order; meshes divide this order row by row.
    """

    def __init__(self, devices: Sequence[Any], chip: Chip):
        self.devices = devices
        self.network = Network(devices, chip)
        self._known: dict[Any, float] = {}

    def seconds_per_byte(self, kind: str, sizes: Sequence[int], axes: Sequence[int]) -> float:
        """The least time of a collective along some mesh axes, for each byte of its array."""
        if len(self.devices) == 1:
            return 0.0
        strides = _strides(sizes, axes)
        kind = 'all-gather' if kind == 'reduce-scatter' else kind  # the same in reverse
        key = kind, strides
        if key not in self._known:
            groups = _groups(len(self.devices), strides)
            self._known[key] = self.network.seconds_per_byte(kind, groups)
        return self._known[key]


def _strides(sizes: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the (distance, number) of devices along mesh axes; adjacent axes are merged."""
    found: list[tuple[int, int]] = []
    for axis in sorted(axes, reverse=True):
        stride, size = math.prod(sizes[axis + 1 :]), sizes[axis]
        if found and math.prod(found[-1]) == stride:
            stride, size = found[-1][0], found[-1][1] * size
            found.pop()
        found.append((stride, size))
    return tuple(one for one in found if one[1] > 1)


def _groups(n: int, strides: Sequence[tuple[int, int]]) -> list[list[int]]:
    offsets = np.zeros(1, int)
    for stride, size in strides:
        offsets = (np.arange(size)[:, None] * stride + offsets).reshape(-1)
    ids = np.arange(n)
    first = np.ones(n, bool)
    for stride, size in strides:
        first &= ids // stride % size == 0
    return (ids[first][:, None] + offsets).tolist()
