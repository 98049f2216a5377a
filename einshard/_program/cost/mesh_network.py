"""The time of collectives and reshards along the axes of a mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ..traced.propagated import Axes, Axis, name_of
from .network import Network


class MeshNetwork:
    """Lower bounds on the time of collectives along mesh axes, or along parts of them.

    Args:
        mesh: the size of each axis.
        network: of the devices of the mesh.
        order: the number of the device of `network` at each position of the mesh, row-major.
            Default: the order of `network`.
    """

    def __init__(self, mesh: Mapping[str, int], network: Network, order: Any = None):
        self.mesh, self.network = dict(mesh), network
        shape = [*self.mesh.values()]
        ids = np.arange(prod(shape)) if order is None else np.asarray(order)
        self._ids: Any = ids.reshape(-1)
        self._coordinates = dict(
            zip(self.mesh, np.indices(shape).reshape(len(shape), -1), strict=True)
        )
        self._per_byte: dict[tuple[str, frozenset[Axis]], float] = {}
        self._reshards: dict[tuple[Axes, Axes], float] = {}

    def size(self, axis: Axis) -> int:
        return self._part(axis)[1]

    def n_shards(self, axes: Axes) -> int:
        return prod(self.size(a) for dim in axes for a in dim)

    def _part(self, axis: Axis) -> tuple[int, int]:
        """Returns how many parts come before, and how many the axis has."""
        name, _, part = axis.partition(':')
        if not part:
            return 1, self.mesh[name]
        before, _, size = part[1:].partition(')')
        return int(before), int(size)

    def _digit(self, axis: Axis) -> tuple[Any, int]:
        """Returns the coordinates of all devices along an axis, and what one step of it adds."""
        before, size = self._part(axis)
        step = self.mesh[name_of(axis)] // (before * size)
        return self._coordinates[name_of(axis)] // step % size, step

    def seconds(self, kind: str, axes: Collection[Axis], n_bytes: float) -> float:
        """Returns the time of a collective with this many bytes of its larger side."""
        if not axes or not n_bytes:
            return 0.0
        key = kind, frozenset(axes)
        if key not in self._per_byte:
            rest = {name: at.copy() for name, at in self._coordinates.items()}
            for axis in key[1]:
                digit, step = self._digit(axis)
                rest[name_of(axis)] -= digit * step
            groups: dict[tuple[int, ...], list[int]] = {}
            others = np.stack([*rest.values()], 1).tolist()
            for other, device in zip(map(tuple, others), self._ids.tolist(), strict=True):
                groups.setdefault(other, []).append(device)
            self._per_byte[key] = self.network.seconds_per_byte(kind, [*groups.values()])
        return self._per_byte[key] * n_bytes

    def reshard(self, have: Axes, want: Axes, n_bytes: float) -> float:
        """Returns the time in which XLA reshards an array of so many bytes, over all devices."""
        if have == want:
            return 0.0
        key = have, want
        if key not in self._reshards:
            # costs are proportional to bytes
            self._reshards[key] = self._reshard(*self.split(have, want))
        return self._reshards[key] * n_bytes

    def split(self, *several: Axes) -> list[Axes]:
        """Splits mesh axes into parts, such that equal devices have equal parts in all layouts."""
        marks: dict[str, set[int]] = {}
        for axis in {a for axes in several for dim in axes for a in dim}:
            before, size = self._part(axis)
            marks.setdefault(name_of(axis), set()).update((before, before * size))
        marks = {name: each for name, each in marks.items() if each != {1, self.mesh[name]}}
        if not marks:
            return [*several]

        def parts(axis: Axis) -> Iterable[Axis]:
            name, (before, size) = name_of(axis), self._part(axis)
            if name not in marks:
                return [axis]
            inside = sorted(m for m in marks[name] if before <= m <= before * size)
            return [f'{name}:({a}){b // a}' for a, b in pairwise(inside)]

        return [
            tuple(tuple(part for axis in dim for part in parts(axis)) for dim in axes)
            for axes in several
        ]

    def _reshard(self, have: Axes, want: Axes) -> float:
        """The seconds of one byte. XLA exchanges, gathers, then slices."""
        old, new = ({a: d for d, dim in enumerate(x) for a in dim} for x in (have, want))
        gone = [a for a in old if a not in new]
        moved = [a for a in old if new.get(a, old[a]) != old[a]]
        sizes = [[prod(map(self.size, dim)) for dim in x] for x in (have, want)]
        if sizes[0] == sizes[1]:  # each device gets the shard of another one
            return self._permute(have, want) / prod(sizes[0])

        def is_minor(x: Axes, d: int, axis: Axis) -> bool:
            return x[d][-1] == axis

        def before(x: Axes, d: int, axis: Axis) -> tuple[Axis, ...]:
            return x[d][: x[d].index(axis)]

        swapped = any(
            before(have, d, a) != before(want, d, a) for a, d in old.items() if new.get(a) == d
        )
        if swapped or not all(
            is_minor(have, old[a], a) and is_minor(want, new[a], a) for a in moved
        ):
            return self.seconds('all-gather', [*old], 1.0)  # of the array, then slices
        # it slices afterwards (measured on CPU)
        local = 1.0 / prod(map(self.size, old))
        n_gone = prod(map(self.size, gone))
        exchanged = self.seconds('all-to-all', moved, local)
        return exchanged + self.seconds('all-gather', gone, local * n_gone)

    def _permute(self, have: Axes, want: Axes) -> float:
        """The seconds of one byte of each device."""

        def shards(x: Axes) -> Any:
            number = np.zeros(len(self._ids), int)
            for axis in (a for dim in x for a in dim):
                number = number * self.size(axis) + self._digit(axis)[0]
            return self._ids[np.argsort(number, kind='stable')]

        pairs = zip(shards(have).tolist(), shards(want).tolist(), strict=True)
        groups = [(a, b) for a, b in pairs if a != b]
        return self.network.seconds_per_byte('collective-permute', groups) if groups else 0.0
