"""Estimates what a candidate costs, from the products of the model, without compiling it.

Compute: the flops of every product, over the devices that share them. Network: for every product
the cheapest way to bring its operands together and to add up its result. HBM: arguments are read
and results are written once. Memory: arguments, results, and the arrays that live at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from .product_cost import Axes, Sizes, Way, cheapest_way, shards

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


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of all executions of a product."""

    way: Way
    compute: float
    network: float
    sent: float


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
        products = [(one, _names_of([*one.operands, one.out])) for one in model.products]
        self.products = [one for one in products if one[0].flops or one[1]]
        self.arguments = _merged((one.names, one.bytes) for one in model.arrays)
        self.results = _merged(model.results)
        kept = Counter[tuple[Names, ...]]()
        for one in model.arrays:
            kept[one.names] += one.bytes * one.donated
        self.written = _merged([*kept.items(), *model.results])
        self._known: dict[Sizes, list[dict[Any, _Cost]]] = {}

    def totals(self, sizes: Sizes, axes: Axes) -> Totals:
        """The costs on a mesh of these sizes, with the mesh axes of every name, by position."""
        costs = self._costs(sizes, axes)
        arguments = _local(self.arguments, sizes, axes)
        results = _local(self.results, sizes, axes)
        written = _local(self.written, sizes, axes)
        live = max(
            (
                sum(n * stored[1] / _parts(stored[0], sizes, axes) for stored, n in peak)
                for peak in self.model.peaks
            ),
            default=0.0,
        )
        gathered = max((cost.way.gathered for cost in costs), default=0.0)
        return Totals(
            sum(cost.compute for cost in costs),
            (arguments + written) / (self.chip.memory_bandwidth * self.share),
            sum(cost.network for cost in costs),
            sum(cost.sent for cost in costs),
            arguments + results + live + gathered,
        )

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
                along = ','.join(mesh_axes[axis] for axis in one.axes)
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
            known = self._known[sizes] = [{} for _ in self.products]
        costs: list[_Cost] = []
        for (product, names), its in zip(self.products, known, strict=True):
            key = tuple([axes[name] for name in names])
            cost = its.get(key)
            if cost is None:
                cost = its[key] = self._cost(product, sizes, axes)
            costs.append(cost)
        return costs

    def _cost(self, product: Any, sizes: Sizes, axes: Axes) -> _Cost:
        def rate(kind: str, along: tuple[int, ...]) -> float:
            return self.network.seconds_per_byte(kind, sizes, along)

        flop_seconds = product.flops / (self.chip.rate(product.dtype) * self.share)
        way = cheapest_way(product, axes, sizes, flop_seconds, rate)
        n, compute = product.executions, flop_seconds / way.parts
        sent = n * sum(_sent(one, sizes) for one in way.sent)
        return _Cost(way, n * compute, n * (way.seconds - compute), sent)


def _sent(one: Any, sizes: Sizes) -> float:
    group = math.prod(sizes[axis] for axis in one.axes)
    return ring_bytes(one.kind, round(one.bytes), group)


def _names_of(sides: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for side in sides for one in side.names for name in one))


def _merged(stored: Any) -> list[Stored]:
    """Adds up the bytes of arrays with the same names."""
    total: Counter[tuple[Names, ...]] = Counter()
    for names, n_bytes in stored:
        total[tuple(one for one in names if one)] += n_bytes
    return list(total.items())


def _local(stored: Sequence[Stored], sizes: Sizes, axes: Axes) -> float:
    return sum(n_bytes / _parts(names, sizes, axes) for names, n_bytes in stored)


def _parts(names: Sequence[Names], sizes: Sizes, axes: Axes) -> int:
    return math.prod(sizes[axis] for axis in shards(names, axes))
