"""Estimates what a candidate costs, from the products of the model, without compiling it.

Compute: the flops of every product, over the devices that share them. Network: for every product
the cheapest way to bring its operands together and to add up its result. HBM: arguments are read
and results are written once. Memory: arguments, results, and the arrays that live at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
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
from .product_cost import Axes, Sent, Sizes, Way, cheapest_way, shards
from .products import Product, Side

# ways are chosen by time; without a chip, by the rates of this one, which is in the middle
_TYPICAL = 'TPU v5e'


class Totals(NamedTuple):
    """The costs of a candidate, as a search needs them: seconds and bytes per device."""

    compute: float
    hbm: float
    network: float
    sent: float
    memory: float

    @property
    def seconds(self) -> float:
        return self.compute + self.hbm + self.network


class _Cost(NamedTuple):
    """The cost of all executions of a product."""

    compute: float
    network: float
    sent: float
    way: Way


class Estimator:
    """Estimates the candidates of one model on some devices.

    Args:
        chip: of the devices; None if it is unknown, for judgements without bounds.
    """

    def __init__(self, model: Model, devices: Mesh | Sequence[Any], chip: Chip | None):
        self.model = model
        self.devices = list(device_mesh(devices).devices.flat)
        self.chip_is_known = chip is not None
        self.chip = as_chip(_TYPICAL) if chip is None else chip
        self.share = self.chip.share(self.devices[0])
        self.network = MeshNetwork(self.devices, self.chip)
        named = [(one, _names_of([*one.operands, one.out])) for one in model.products]
        self.products = [(one, names) for one, names in named if one.flops or names]
        self.stored = _StoredArrays(model)
        self._known: dict[Sizes, list[tuple[tuple[str, ...], dict[Any, _Cost]]]] = {}

    def totals(self, sizes: Sizes, axes: Axes) -> Totals:
        """The costs on a mesh of these sizes, with the mesh axes of every name, by position."""
        compute = network = sent = gathered = 0.0
        for one in self._costs(sizes, axes):
            compute += one[0]
            network += one[1]
            sent += one[2]
            gathered = max(gathered, one[3].gathered)
        read_and_written, memory = self.stored.bytes(sizes, axes)
        hbm = read_and_written / (self.chip.memory_bandwidth * self.share)
        return Totals(compute, hbm, network, sent, memory + gathered)

    def judge(self, candidate: Candidate) -> Judgement:
        """Estimates one candidate in detail."""
        sizes = tuple(size for _, size in candidate.mesh)
        mesh_axes = [name for name, _ in candidate.mesh]
        axes = self.axes(candidate)
        totals = self.totals(sizes, axes)
        sent: Counter[str] = Counter()
        sent_by: Counter[tuple[str, str]] = Counter()
        seconds: Counter[str] = Counter()
        costs = self._costs(sizes, axes)
        for (product, _), cost in zip(self.products, costs, strict=True):
            for one in cost.way.sent:
                along = ','.join(mesh_axes[axis] for axis in sorted(one.axes))
                n_bytes = product.executions * _sent(one, sizes)
                sent[along] += round(n_bytes)
                sent_by[one.kind, one.role] += round(n_bytes)
                rate = self.network.seconds_per_byte(one.kind, sizes, one.axes)
                seconds[along] += product.executions * one.bytes * rate  # type: ignore[reportArgumentType]
        bounds = [Bound('compute', '', totals.compute), Bound('HBM', '', totals.hbm)]
        bounds += [Bound('network', along, its) for along, its in seconds.items()]
        known = Bounds(bound for bound in bounds if bound.seconds)
        return Judgement(
            candidate,
            'estimate',
            known if self.chip_is_known else NO_BOUNDS,
            round(totals.memory),
            dict(sent),
            dict(sent_by),
        )

    def axes(self, candidate: Candidate) -> dict[str, tuple[int, ...]]:
        """The mesh axes of every name of a candidate, by position, and of every mesh axis."""
        at = {name: i for i, (name, _) in enumerate(candidate.mesh)}
        axes = {name: (i,) for name, i in at.items()}
        return axes | {
            name: tuple(at[axis] for axis in mesh_axes) for name, mesh_axes in candidate.axes
        }

    def _costs(self, sizes: Sizes, axes: Axes) -> list[_Cost]:
        known = self._known.get(sizes)
        if known is None:
            known = self._known[sizes] = [(names, {}) for _, names in self.products]
        costs: list[_Cost] = []
        of = axes.__getitem__
        for i, (names, its) in enumerate(known):
            key = tuple(map(of, names))
            cost = its.get(key)
            if cost is None:
                cost = its[key] = self._cost(self.products[i][0], sizes, axes)
            costs.append(cost)
        return costs

    def _cost(self, product: Product, sizes: Sizes, axes: Axes) -> _Cost:
        def rate(kind: str, along: tuple[int, ...]) -> float:
            return self.network.seconds_per_byte(kind, sizes, along)

        flop_seconds = product.flops / (self.chip.rate(product.dtype) * self.share)
        way = cheapest_way(product, axes, sizes, flop_seconds, rate)
        n, compute = product.executions, flop_seconds / way.parts
        sent = n * sum(_sent(one, sizes) for one in way.sent)
        return _Cost(n * compute, n * (way.seconds - compute), sent, way)


def _sent(one: Sent, sizes: Sizes) -> float:
    group = math.prod(sizes[axis] for axis in one.axes)
    return ring_bytes(one.kind, round(one.bytes), group)


def _names_of(sides: Sequence[Side]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for side in sides for one in side.names for name in one))


class _StoredArrays:
    """The bytes of the arrays in memory. Arrays with the same names have the same shards."""

    def __init__(self, model: Model):
        arguments = [(one.names, one.bytes) for one in model.arrays]
        kept = [(one.names, one.bytes) for one in model.arrays if one.donated]
        peaks = [[(names, n * size) for (names, size), n in peak] for peak in model.peaks] or [[]]
        rows = [
            [*arguments, *kept, *model.results],
            *([*arguments, *model.results, *peak] for peak in peaks),
        ]
        totals = [_merged(row) for row in rows]
        kinds = list(dict.fromkeys(names for row in totals for names in row))
        self.kinds = [(tuple(name for one in names for name in one), names) for names in kinds]
        self.sizes = np.array([[row[names] for names in kinds] for row in totals], float)
        self._known: dict[Sizes, list[dict[Any, float]]] = {}

    def bytes(self, sizes: Sizes, axes: Axes) -> tuple[float, float]:
        """The bytes per device that are read and written once, and those in memory at the peak."""
        known = self._known.get(sizes)
        if known is None:
            known = self._known[sizes] = [{} for _ in self.kinds]
        parts: list[float] = []
        of = axes.__getitem__
        for (flat, names), its in zip(self.kinds, known, strict=True):
            key = tuple(map(of, flat))
            part = its.get(key)
            if part is None:
                part = its[key] = 1 / math.prod(sizes[axis] for axis in shards(names, axes))
            parts.append(part)
        once, *peaks = self.sizes.dot(parts)
        return float(once), float(max(peaks))


def _merged(stored: Iterable[Stored]) -> Counter[tuple[Names, ...]]:
    """Adds up the bytes of arrays with the same names."""
    total: Counter[tuple[Names, ...]] = Counter()
    for names, n_bytes in stored:
        total[tuple(one for one in names if one)] += n_bytes
    return total
