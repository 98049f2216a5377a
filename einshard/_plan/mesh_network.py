"""The time of collectives along mesh axes, for any shape of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._hlo.hardware import Chip
from .._inspect.network import Network
from .product_cost import MeshAxis


class MeshNetwork:
    """Finds the time of collectives along mesh axes, for any mesh shape of the same devices.

    Args:
        devices: in hardware order; a mesh is a row-major reshape of them.
    """

    def __init__(self, devices: Sequence[Any], chip: Chip):
        self.n_devices = len(devices)
        self.network = Network(devices, chip)
        self._known: dict[tuple[str, tuple[MeshAxis, ...]], float] = {}

    def seconds_per_byte(self, kind: str, axes: Sequence[MeshAxis]) -> float:
        """Returns the minimum time of a collective along mesh axes, per byte of its array."""
        kind = 'all-gather' if kind == 'reduce-scatter' else kind  # the same in reverse
        # also kept by the axes as given: merging them each time makes estimates 20 % slower
        key = kind, tuple(axes)
        found = self._known.get(key)
        if found is None:
            merged = kind, _merged(axes)
            if merged not in self._known:
                groups = self._without_copies(_groups(self.n_devices, merged[1])).tolist()
                self._known[merged] = self.network.seconds_per_byte(kind, groups)
            found = self._known[key] = self._known[merged]
        return found

    def _without_copies(self, groups: Any) -> Any:
        """Keeps one of the groups that lie in parallel rows or planes of a torus.

        They share no links, so each takes the same time. For 8,192 devices, it would take 100 ms to
        find the time of all. With several slices, or without coordinates, all groups are kept.
        """
        network = self.network
        if not network.has_coords or len(set(network.slices[groups].ravel().tolist())) > 1:
            return groups
        at = network.positions[groups]
        fixed = (at.max(1) == at.min(1)).all(0)
        return groups[(at[:, 0][:, fixed] == 0).all(1)]


def _merged(axes: Sequence[MeshAxis]) -> tuple[MeshAxis, ...]:
    """Merges adjacent mesh axes."""
    found: list[MeshAxis] = []
    for axis in sorted(axes):
        if found and found[-1].stride * found[-1].size == axis.stride:
            axis = MeshAxis(found[-1].stride, found[-1].size * axis.size)
            found.pop()
        found.append(axis)
    return tuple(found)


def _groups(n: int, axes: Sequence[MeshAxis]) -> Any:
    """Returns an array of device numbers, with a row for each group along these mesh axes."""
    offsets, ids = np.zeros(1, int), np.arange(n)
    first = np.ones(n, bool)
    for stride, size in axes:
        offsets = (np.arange(size)[:, None] * stride + offsets).reshape(-1)
        first &= ids // stride % size == 0
    return ids[first][:, None] + offsets
