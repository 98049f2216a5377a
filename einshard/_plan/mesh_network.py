"""MeshNetwork: the minimum time of collectives along mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._program.cost.chips import Chip
from .._program.cost.network import Network
from .strategy import MeshAxis


class MeshNetwork:
    """The network between devices in hardware order. Meshes are row-major reshapes of `devices`."""

    def __init__(self, devices: Sequence[Any], chip: Chip):
        self.n_devices = len(devices)
        self.network = Network(devices, chip)
        self._cache: dict[tuple[str, tuple[MeshAxis, ...]], float] = {}

    def seconds_per_byte(self, kind: str, axes: Sequence[MeshAxis]) -> float:
        """Returns the minimum time per byte of a collective's operand or result (the larger)."""
        kind = 'all-gather' if kind == 'reduce-scatter' else kind  # both take the same time
        # unmerged axes are keys, too, because merging in each call would make estimates 20% slower
        key = kind, tuple(axes)
        found = self._cache.get(key)
        if found is None:
            merged = kind, _merged(axes)
            if merged not in self._cache:
                groups = self._one_of_parallel(_groups(self.n_devices, merged[1])).tolist()
                self._cache[merged] = self.network.seconds_per_byte(kind, groups)
            found = self._cache[key] = self._cache[merged]
        return found

    def _one_of_parallel(self, groups: Any) -> Any:
        """Keeps one of several device groups that are parallel rows or planes of a torus.

        Each takes the same time, because parallel groups share no links. With 8,192 devices,
        `Network` would take 100 ms for all groups. Keeps all groups if the devices are in several
        TPU slices, or have no coordinates.
        """
        network = self.network
        if not network.has_coords or len(set(network.slices[groups].ravel().tolist())) > 1:
            return groups
        at = network.positions[groups]
        fixed = (at.max(1) == at.min(1)).all(0)  # coordinates that are constant within each group
        return groups[(at[:, 0][:, fixed] == 0).all(1)]


def _merged(axes: Sequence[MeshAxis]) -> tuple[MeshAxis, ...]:
    """Merges adjacent mesh axes: those with (stride, size) = (1, 4) and (4, 2) become (1, 8)."""
    found: list[MeshAxis] = []
    for axis in sorted(axes):
        if found and found[-1].stride * found[-1].size == axis.stride:
            axis = MeshAxis(found[-1].stride, found[-1].size * axis.size)
            found.pop()
        found.append(axis)
    return tuple(found)


def _groups(n: int, axes: Sequence[MeshAxis]) -> Any:
    """Returns the groups of devices 0 to n - 1 along mesh axes, one group in each row."""
    offsets, ids = np.zeros(1, int), np.arange(n)
    is_first = np.ones(n, bool)  # whether the device is the first one of its group
    for stride, size in axes:
        offsets = (np.arange(size)[:, None] * stride + offsets).reshape(-1)
        is_first &= ids // stride % size == 0
    return ids[is_first][:, None] + offsets
