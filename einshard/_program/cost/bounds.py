"""Lower bounds on the time of a program: compute, HBM, network. They are not predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..._chips.chip import Chip
from ..._page import Section
from ..._text import format_seconds
from ..hlo.collective import Collective
from ..hlo.flops import ProductRow
from ..hlo.graph import Graph
from ..hlo.hbm_traffic import min_hbm_bytes
from .network import Network


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the time of one run.

    Attributes:
        resource: 'compute', 'HBM' or 'network'.
        along: the mesh axes of a network bound, as in `Collective.along`. Empty if they are
            unknown, and for compute and HBM.
        seconds: the minimum time that a device needs.
        exposed: the part of `seconds` spent in synchronous collectives, which cannot overlap with
            computation. None for compute and HBM, and on CPUs, where it is unknown.
    """

    resource: str
    along: str
    seconds: float
    exposed: float | None = None

    def __str__(self) -> str:
        along = f' along {self.along or "unknown axes"}' if self.resource == 'network' else ''
        text = f'{self.resource}{along} at least {format_seconds(self.seconds)}'
        if self.exposed is None:
            return text
        if not self.exposed:
            return f'{text}, none exposed'
        if self.exposed >= self.seconds:
            return f'{text}, exposed'
        return f'{text}, of which {format_seconds(self.exposed)} exposed'


class Bounds(tuple[Bound, ...]):
    """The lower bounds of a program: compute, HBM, and the network along each mesh axis."""

    __slots__ = ()

    @property
    def largest(self) -> Bound | None:
        """The largest bound, or None if there are no bounds."""
        return max(self, key=lambda bound: bound.seconds, default=None)


NO_BOUNDS = Bounds()


def find_bounds(
    chip: Chip,
    devices: Sequence[Any],
    graph: Graph,
    products: Sequence[ProductRow],
    collectives: Sequence[Collective],
    is_cpu: bool = False,
) -> Bounds:
    """Returns the lower bounds on the time of one run of a program.

    Ignores branches of conditionals. A loop with an unknown trip count counts as one iteration.

    Args:
        devices: the devices of the program, in the order in which it numbers them.
        collectives: the collectives of the program, with the mesh axes that they run along.
        is_cpu: whether the program is compiled for CPUs that simulate the devices.
    """
    share = chip.share(devices[0])
    network = Network(devices, chip)
    is_cpu = is_cpu or devices[0].platform == 'cpu'
    by_axes: dict[str, list[Collective]] = {}
    for collective in collectives:
        if not collective.in_branch:
            by_axes.setdefault(collective.along, []).append(collective)
    unconditional = [row for row in products if not row.in_branch]
    # the CPU backend widens bf16 and fp8 matmuls to f32 or f16, so assume the narrow dtype
    narrow = 'f8e4m3fn' if ' f8e' in graph.program.text else 'bf16'
    dtypes = {'f32': narrow, 'f16': narrow} if is_cpu else {}
    compute = sum(
        row.flops / (chip.rate(dtypes.get(row.dtype, row.dtype)) * share) for row in unconditional
    )
    found = [
        Bound('compute', '', compute),
        Bound('HBM', '', min_hbm_bytes(graph) / (chip.memory_bandwidth * share)),
    ]
    for axes, group in by_axes.items():
        exposed = network.seconds_in_turn(*(c for c in group if not c.is_async))
        seconds = max(network.seconds(*group), 0 if is_cpu else exposed)
        found.append(Bound('network', axes, seconds, None if is_cpu else exposed))
    return Bounds(bound for bound in found if bound.seconds)


def bounds_section(chip: str, bounds: Bounds, step: float | None, unknown_loops: bool) -> Section:
    largest = bounds.largest
    mark = ' (the largest)' * (len(bounds) > 1)
    lines = [f'{bound}{mark * (bound is largest)}' for bound in bounds]
    if step is not None:
        lines.append(f'estimated step: {format_seconds(step)}')
    once = '; assuming that loops of unknown length run once' * unknown_loops
    return Section(f'lower bounds on the time of one run ({chip}{once})', lines=tuple(lines))
