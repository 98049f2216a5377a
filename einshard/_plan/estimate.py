"""Estimates what a candidate costs, from the products of the model, without compiling it.

Compute: the flops of every product, over the devices that share them. Network: for every product
the cheapest way to bring its operands together and to add up its result. HBM: arguments are read
and results are written once. Memory: arguments, results, and the intermediate arrays of the peak.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from .._hlo.collectives import ring_bytes
from .._hlo.hardware import Chip, as_chip
from .._inspect.bounds import NO_BOUNDS, Bound, Bounds
from .._sharding.mesh import device_mesh
from .candidate import Candidate
from .judgement import Judgement
from .live import Stored
from .mesh_network import MeshNetwork
from .model import Model
from .names import Names
from .product_cost import Axes, Sent, Way, axes_of_shape, cheapest_way, shards
from .products import Product, Side

# the chip for choosing the cheapest way to compute a product, if the user's is unknown
_TYPICAL = 'TPU v5e'


class Totals(NamedTuple):
    """The costs of a candidate per device.

    Attributes:
        compute, hbm, network: seconds.
        sent, memory: bytes.
    """

    compute: float
    hbm: float
    network: float
    sent: float
    memory: float

    @property
    def seconds(self) -> float:
        return self.compute + self.hbm + self.network


class _Cost(NamedTuple):
    """The cost of all executions of a product per device.

    Attributes:
        compute, network: seconds.
        sent: bytes.
        way: how each execution is computed.
    """

    compute: float
    network: float
    sent: float
    way: Way


class Estimator:
    """Estimates the candidates of one model on some devices.

    Args:
        devices: a mesh of them, or a list in hardware order.
        chip: the chip of the devices; if None, judgements have no bounds.
    """

    def __init__(self, model: Model, devices: Mesh | Sequence[Any], chip: Chip | None):
        in_order = device_mesh(devices).devices.flat if isinstance(devices, Mesh) else devices
        self.devices = list(in_order)
        self.chip_is_known = chip is not None
        self.chip = as_chip(_TYPICAL) if chip is None else chip
        self.chip_share = self.chip.share(self.devices[0])  # 1/2 for one of two TensorCores
        self.network = MeshNetwork(self.devices, self.chip)
        self.products = [(one, _names_of([*one.operands, one.out])) for one in model.products]
        self.stored = _StoredArrays(model)
        # for each product, its cost by the mesh axes of its names
        self._known: list[dict[Any, _Cost]] = [{} for _ in self.products]

    def totals(self, axes: Axes) -> Totals:
        """Estimates the costs per device when each name is sharded over its mesh axes."""
        compute = network = sent = gathered = 0.0
        for one in self._costs(axes):
            compute += one.compute
            network += one.network
            sent += one.sent
            gathered = max(gathered, one.way.gathered)
        read_and_written, memory = self.stored.bytes(axes)
        hbm = read_and_written / (self.chip.memory_bandwidth * self.chip_share)
        return Totals(compute, hbm, network, sent, memory + gathered)

    def judge(self, candidate: Candidate) -> Judgement:
        """Estimates the bounds, the memory and the bytes sent of a candidate."""
        in_order = axes_of_shape([size for _, size in candidate.mesh])
        mesh = {name: axis for (name, _), axis in zip(candidate.mesh, in_order, strict=True)}
        axes = {name: tuple(mesh[axis] for axis in used) for name, used in candidate.axes}
        # specs may name mesh axes, too
        axes = {name: (axis,) for name, axis in mesh.items()} | axes
        totals = self.totals(axes)
        sent: Counter[str] = Counter()
        sent_by: Counter[tuple[str, str]] = Counter()
        seconds: dict[str, float] = defaultdict(float)
        for (product, _), cost in zip(self.products, self._costs(axes), strict=True):
            for one in cost.way.sent:
                along = ','.join(name for name, axis in mesh.items() if axis in one.axes)
                n_bytes = product.executions * _sent_bytes(one)
                sent[along] += round(n_bytes)
                sent_by[one.kind, one.role] += round(n_bytes)
                per_byte = self.network.seconds_per_byte(one.kind, one.axes)
                seconds[along] += product.executions * one.bytes * per_byte
        bounds = [Bound('compute', '', totals.compute), Bound('HBM', '', totals.hbm)]
        bounds += [Bound('network', along, time) for along, time in seconds.items()]
        positive = Bounds(bound for bound in bounds if bound.seconds)
        return Judgement(
            candidate,
            'estimate',
            positive if self.chip_is_known else NO_BOUNDS,
            round(totals.memory),
            dict(sent),
            dict(sent_by),
        )

    def _costs(self, axes: Axes) -> list[_Cost]:
        """Returns the cost of each product, in the order of `products`."""
        costs: list[_Cost] = []
        axes_of = axes.__getitem__
        for (product, names), known in zip(self.products, self._known, strict=True):
            key = tuple(map(axes_of, names))
            cost = known.get(key)
            if cost is None:
                cost = known[key] = self._cost(product, axes)
            costs.append(cost)
        return costs

    def _cost(self, product: Product, axes: Axes) -> _Cost:
        flop_seconds = product.flops / (self.chip.rate(product.dtype) * self.chip_share)
        way = cheapest_way(product, axes, flop_seconds, self.network.seconds_per_byte)
        n, compute = product.executions, flop_seconds / way.n_devices
        return _Cost(
            n * compute, n * (way.seconds - compute), n * sum(map(_sent_bytes, way.sent)), way
        )


def _sent_bytes(one: Sent) -> float:
    group_size = math.prod(axis.size for axis in one.axes)
    return ring_bytes(one.kind, round(one.bytes), group_size)


def _names_of(sides: Sequence[Side]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for side in sides for one in side.names for name in one))


class _StoredArrays:
    """The bytes of the arguments, the results, and the arrays in memory at each peak.

    Those of arrays with the same axis names are added up, because they have the same sharding.
    """

    def __init__(self, model: Model):
        arguments = [(one.names, one.bytes) for one in model.arrays]
        donated = [(one.names, one.bytes) for one in model.arrays if one.donated]
        peaks = [[(names, n * size) for (names, size), n in peak] for peak in model.peaks] or [[]]
        # arrays that are read or written (donated ones are both), then those in memory at each peak
        rows = [
            _summed([*arguments, *donated, *model.results]),
            *(_summed([*arguments, *model.results, *peak]) for peak in peaks),
        ]
        # arrays with the same names are of one kind
        kinds = list(dict.fromkeys(names for row in rows for names in row))
        # of the arrays of each kind: the names of all axes in one tuple, and those of each axis
        self.kinds = [(tuple(name for one in names for name in one), names) for names in kinds]
        self.sizes = np.array([[row[names] for names in kinds] for row in rows], float)
        # for each kind, the fraction that a device has, by the mesh axes of its names
        self._known: list[dict[Any, float]] = [{} for _ in self.kinds]

    def bytes(self, axes: Axes) -> tuple[float, float]:
        """Returns bytes per device: those that are read or written once, and the peak memory."""
        fractions: list[float] = []
        axes_of = axes.__getitem__
        for (flat_names, names), known in zip(self.kinds, self._known, strict=True):
            key = tuple(map(axes_of, flat_names))
            fraction = known.get(key)
            if fraction is None:
                fraction = known[key] = 1 / math.prod(axis.size for axis in shards(names, axes))
            fractions.append(fraction)
        read_and_written, *peaks = self.sizes.dot(fractions)
        return float(read_and_written), float(max(peaks))


def _summed(stored: Iterable[Stored]) -> Counter[tuple[Names, ...]]:
    """Adds up the bytes of arrays with the same names, leaving out axes without names."""
    total: Counter[tuple[Names, ...]] = Counter()
    for names, n_bytes in stored:
        total[tuple(one for one in names if one)] += n_bytes
    return total
