"""A chip as users see it: its peak rates, and what programs reach of them."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._text import deprecated_alias


@dataclass(frozen=True)
class Efficiency:
    """What programs reach of the peak rates of a chip, for the estimates of `Report.timeline`.

        >>> from einshard import Chip, Efficiency
        >>> ours = Efficiency(products=0.6, hbm=0.8, links=0.7, all_reduces=0.5, network=0.7)
        >>> Chip('ours', {'bf16': 1e15}, 1e11, 4e12, 1e11, efficiency=ours).efficiency.launch
        1e-06

    Attributes:
        products: the part of the peak flops that matrix products reach.
        hbm: the part of the HBM bandwidth that other operations reach.
        links: the part of its lower bound's rate that a collective reaches, within a slice of TPUs
            or an NVLink domain.
        all_reduces: the same for all-reduces.
        network: the same for collectives between slices or domains.
        collective: seconds that a collective takes however little it sends. None: the latency of
            the chip, for each link that data crosses.
        launch: seconds that each other operation takes however little it computes.
        source: what the figures were measured on. Empty if it is another chip: then a timeline has
            shares, and no times.
    """

    products: float
    hbm: float
    links: float
    all_reduces: float
    network: float
    collective: float | None = None
    launch: float = 1e-6
    source: str = 'given by the user'


@dataclass(frozen=True)
class Chip:
    """Peak rates of a chip, for the lower bounds in `explain` and `plan`.

        >>> from einshard import Chip
        >>> chip = Chip('ours', {'bf16': 1e15}, memory=1e11, memory_bandwidth=4e12, link=1e11)
        >>> chip.name
        'ours'

    Attributes:
        name: the name shown in reports.
        flops: {dtype: dense flops per second}, for 'bf16', 'tf32', 'fp8', 'int8' and 'fp4'. float16
            uses the rate of bf16. float32 uses that of tf32 or, without it, that of bf16. Other
            dtypes use the highest rate.
        memory: bytes of HBM that programs can use.
        memory_bandwidth: HBM bytes per second.
        link: bytes per second that a chip can send. In a torus: over one link, in one direction.
            Without a torus: over all its NVLink links, or over PCIe.
        torus: the number of torus dimensions; 0 for devices that a switch connects.
        wraps_at: a slice dimension is a ring if its size is a multiple of this number, and a line
            otherwise. With three dimensions, either all are rings or none.
        domain: without a torus, the largest number of devices that NVLink connects; for GPUs
            without NVLink, the number of devices in a host.
        network: bytes per second that a chip can send to other slices or domains.
        cores: the number of TensorCores, if each can be a JAX device.
        latency: seconds that a collective takes however little it sends. In a torus: for each link
            that data crosses one after another. None if unknown; then `explain` has no notes
            about latency. Bounds leave it out.
        efficiency: what programs reach of these rates, for estimates; see `Efficiency`. None if
            unknown; then there is no timeline.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory: float
    memory_bandwidth: float
    link: float
    torus: int = 0
    wraps_at: int = 1
    domain: int = 8
    network: float = float('inf')
    cores: int = 1
    latency: float | None = None
    efficiency: Efficiency | None = None
    node = deprecated_alias('node', 'domain')

    def share(self, device: Any) -> float:
        """Returns which fraction of a chip `device` has, such as 1/2 for one of two TensorCores."""
        return getattr(device, 'num_cores', self.cores) / self.cores

    def rate(self, dtype: str) -> float:
        """Returns the peak flops per second for an HLO dtype."""
        if dtype == 'f32' and 'tf32' not in self.flops:
            dtype = 'bf16'  # on TPU, matmuls round float32 operands to bf16 by default
        if dtype in ('c64', 'c128'):  # flops.py counts 4 real products for a complex one; 3 suffice
            return max(self.flops.values()) * 4 / 3
        names = {'f32': 'tf32', 'f16': 'bf16', 's8': 'int8', 'u8': 'int8'}
        name = names.get(dtype) or re.sub(r'^f([48])e.*', r'fp\1', dtype)
        return self.flops.get(name) or max(self.flops.values())


def _accept_node(init: Any) -> Any:
    """Accepts the old name of `domain`, deprecated."""

    @functools.wraps(init)
    def init_chip(self: Chip, *args: Any, **kwargs: Any) -> None:
        if 'node' in kwargs:
            warnings.warn('node= of Chip is now domain=', DeprecationWarning, stacklevel=2)
            kwargs['domain'] = kwargs.pop('node')
        init(self, *args, **kwargs)

    return init_chip


Chip.__init__ = _accept_node(Chip.__init__)
