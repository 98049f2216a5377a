"""Estimates the costs of a candidate without compiling it.

Compute: the flops of each operation, divided by the number of devices that share them.
Network: the collectives of the fastest strategy for each operation.
HBM: each argument is read once, and each result is written once.
Memory: arguments, results, the largest set of intermediate arrays that are live at the same time,
and the largest copies that an operation makes of its operands to reshard them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from .._program.cost.bounds import NO_BOUNDS, Bound, Bounds
from .._program.cost.chips import Chip, as_chip
from .._program.cost.network import Network
from .._program.hlo.collective import ring_bytes
from .._sharding.mesh import device_mesh
from .candidate import Candidate, Evaluation
from .costly_ops import CostlyOp, OpArray
from .live_sets import StoredArray
from .model import Model
from .names import AxisNames
from .strategy import (
    AxesByName,
    MeshAxis,
    OpCollective,
    Strategy,
    axes_of_shape,
    fastest_strategy,
    sharded_axes,
)

# the chip for which the fastest strategies are chosen if the user's chip is unknown
_DEFAULT_CHIP = 'TPU v5e'


class Totals(NamedTuple):
    """The costs of a candidate per device: `sent` and `memory` in bytes, the others in seconds."""

    compute: float
    hbm: float
    network: float
    sent: float
    memory: float

    @property
    def seconds(self) -> float:
        return self.compute + self.hbm + self.network


class _Cost(NamedTuple):
    """The cost of all executions of an operation, per device."""

    compute: float  # seconds
    network: float  # seconds
    sent: float  # bytes
    strategy: Strategy


class Estimator:
    """Estimates the costs of the candidates of one model.

    Args:
        devices: a mesh, or a list of devices in hardware order.
        chip: the chip of the devices. If it is None, `evaluate` gives no bounds.
    """

    def __init__(self, model: Model, devices: Mesh | Sequence[Any], chip: Chip | None):
        in_order = device_mesh(devices).devices.flat if isinstance(devices, Mesh) else devices
        self.devices = list(in_order)
        self.chip_is_known = chip is not None
        self.chip = as_chip(_DEFAULT_CHIP) if chip is None else chip
        self.chip_share = self.chip.share(self.devices[0])  # 1/2 if each chip has 2 devices
        self.network = MeshNetwork(self.devices, self.chip)
        self.costly_ops = [(op, _names_in([*op.operands, op.out])) for op in model.costly_ops]
        self.stored = _StoredArrays(model)
        # for each operation, the costs computed so far, keyed by the mesh axes of its names
        self._cached_costs: list[dict[Any, _Cost]] = [{} for _ in self.costly_ops]

    def totals(self, axes: AxesByName) -> Totals:
        """Estimates the costs per device if each name is sharded over the given mesh axes."""
        compute = network = sent = extra_memory = 0.0
        for cost in self._costs(axes):
            compute += cost.compute
            network += cost.network
            sent += cost.sent
            extra_memory = max(extra_memory, cost.strategy.extra_memory)
        read_and_written, memory = self.stored.bytes(axes)
        hbm = read_and_written / (self.chip.memory_bandwidth * self.chip_share)
        return Totals(compute, hbm, network, sent, memory + extra_memory)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        mesh_axes = axes_of_shape([size for _, size in candidate.mesh])
        mesh = {name: axis for (name, _), axis in zip(candidate.mesh, mesh_axes, strict=True)}
        axes = {name: tuple(mesh[axis] for axis in used) for name, used in candidate.axes}
        # specs may name mesh axes directly
        axes = {name: (axis,) for name, axis in mesh.items()} | axes
        totals = self.totals(axes)
        sent: Counter[str] = Counter()
        sent_by: Counter[tuple[str, str]] = Counter()
        seconds: dict[str, float] = defaultdict(float)
        for (op, _), cost in zip(self.costly_ops, self._costs(axes), strict=True):
            for one in cost.strategy.collectives:
                along = ','.join(name for name, axis in mesh.items() if axis in one.axes)
                n_bytes = round(op.executions * _sent_bytes(one))
                sent[along] += n_bytes
                sent_by[one.kind, one.role] += n_bytes
                per_byte = self.network.seconds_per_byte(one.kind, one.axes)
                seconds[along] += op.executions * one.bytes * per_byte
        bounds = [Bound('compute', '', totals.compute), Bound('HBM', '', totals.hbm)]
        bounds += [Bound('network', along, time) for along, time in seconds.items()]
        positive = Bounds(bound for bound in bounds if bound.seconds)
        shown = positive if self.chip_is_known else NO_BOUNDS
        memory = round(totals.memory)
        return Evaluation(candidate, 'estimate', shown, memory, dict(sent), dict(sent_by))

    def _costs(self, axes: AxesByName) -> list[_Cost]:
        costs: list[_Cost] = []
        axes_of = axes.__getitem__
        for (op, names), cached in zip(self.costly_ops, self._cached_costs, strict=True):
            key = tuple(map(axes_of, names))
            cost = cached.get(key)
            if cost is None:
                cost = cached[key] = self._cost(op, axes)
            costs.append(cost)
        return costs

    def _cost(self, op: CostlyOp, axes: AxesByName) -> _Cost:
        flop_seconds = op.flops / (self.chip.rate(op.dtype) * self.chip_share)
        strategy = fastest_strategy(op, axes, flop_seconds, self.network.seconds_per_byte)
        n, compute = op.executions, flop_seconds / strategy.n_devices
        return _Cost(
            n * compute,
            n * (strategy.seconds - compute),
            n * sum(map(_sent_bytes, strategy.collectives)),
            strategy,
        )


def _sent_bytes(one: OpCollective) -> float:
    group_size = math.prod(axis.size for axis in one.axes)
    return ring_bytes(one.kind, round(one.bytes), group_size)


def _names_in(arrays: Sequence[OpArray]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for x in arrays for names in x.names for name in names))


class _StoredArrays:
    """The bytes of arguments, results and intermediate arrays, per device.

    Arrays with the same axis names have the same sharding, so their bytes are added up.
    """

    def __init__(self, model: Model):
        arguments = [(one.names, one.bytes) for one in model.arrays]
        donated = [(one.names, one.bytes) for one in model.arrays if one.donated]
        live_sets = [
            [(names, n * size) for (names, size), n in live_set] for live_set in model.live_sets
        ] or [[]]
        # Row 0 has the bytes that are read or written. Donated arguments count twice, because a
        # result is written to their memory. Each other row has the bytes of one live set. A column
        # has the bytes of the arrays with the same axis names.
        rows = [
            _summed([*arguments, *donated, *model.results]),
            *(_summed([*arguments, *model.results, *live_set]) for live_set in live_sets),
        ]
        columns = list(dict.fromkeys(names for row in rows for names in row))
        # for each column, the names in one flat tuple, and the names of each axis
        self.columns = [(tuple(name for one in names for name in one), names) for names in columns]
        self.sizes = np.array([[row[names] for names in columns] for row in rows], float)
        # for each column, the fraction that a device holds, keyed by the mesh axes of the names
        self._cached_fractions: list[dict[Any, float]] = [{} for _ in self.columns]

    def bytes(self, axes: AxesByName) -> tuple[float, float]:
        """Returns the bytes that a device reads or writes, and its peak memory in bytes."""
        fractions: list[float] = []
        axes_of = axes.__getitem__
        for (flat_names, names), cached in zip(self.columns, self._cached_fractions, strict=True):
            key = tuple(map(axes_of, flat_names))
            fraction = cached.get(key)
            if fraction is None:
                fraction = cached[key] = 1 / math.prod(
                    axis.size for axis in sharded_axes(names, axes)
                )
            fractions.append(fraction)
        read_and_written, *live = self.sizes.dot(fractions)
        return float(read_and_written), float(max(live))


def _summed(stored: Iterable[StoredArray]) -> Counter[tuple[AxisNames, ...]]:
    """Adds up the bytes of arrays with the same axis names, ignoring axes without names."""
    total: Counter[tuple[AxisNames, ...]] = Counter()
    for names, n_bytes in stored:
        total[tuple(one for one in names if one)] += n_bytes
    return total


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
