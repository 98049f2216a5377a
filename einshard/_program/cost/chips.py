"""Published peak rates of TPUs and GPUs.

Sources:
- Google: the pages of each TPU at docs.cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x).
- The book: jax-ml.github.io/scaling-book, chapters 2 (TPUs) and 12 (GPUs).
- NVIDIA: data sheets of A100, H100, H200, HGX B200 and HGX B300, of GB200 NVL72 and GB300 NVL72;
  the RTX Blackwell PRO white paper. Rates are dense, usually half of those with sparsity.
- Memory of GPUs: what the driver reports, by openxla/xla/backends/gpu/target_config/specs.

The rates must be upper bounds, so where sources differ, this module uses the highest.
ICI: Google quotes both directions of all links of a chip, such as 400 GB/s for the 4 links of v5e:
50 GB/s per link and direction. The book has 10% less: 45 GB/s for v4 and v5e, 90 for v5p and v6e.
"""

from __future__ import annotations

import functools
import re
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..._errors import EinshardError
from ..._text import deprecated_alias


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

GIB = 2**30
# `memory` is what libtpu 0.0.52 lets a program use, according to its RESOURCE_EXHAUSTED errors:
# 15.75 of 16 GiB on v5e, 31.24 of 32 on v6e, 2 x 15.25 of 32 on v4, 2 x 94.74 of 192 on TPU7x.
# On v5p it is 95.73 GiB. Google says 95 GiB, and the book 96 GB.
# `network` (DCN): Google says 50 Gbit/s per chip for v5p, 100 for v6e and TPU7x, and for v5e two
# NICs of 100 Gbit/s for 8 chips. For v4, the book says 25 GB/s for a host of 4 chips.
# Small slices do not wrap around. On v5e and v6e, only dimensions of size 16 are rings. On others,
# all dimensions of a slice that consists of full 4x4x4 cubes are rings (book, chapter 2).
# `latency`: the book says that a hop takes around 1 us on any TPU (chapter 3, "A note on ICI
# latency"). It measured 8 us for an all-gather of 128 KiB over 3 hops of v5e.
_HOP = 1e-6
# `efficiency`: the cycles that libtpu 0.0.52 estimates for products of 4096 and of 8192 rows are 97
# and 88% of the peak on v5e, 96 and 90% on v5p, 87 and 70% on v6e; on v4 and TPU7x, unclear. The
# parts of HBM and links are assumed; the estimate of a published step (16B, 256 v5e) is 9% low.
_CYCLES = "libtpu's estimated cycles of products"
_ON_TPU = Efficiency(0.9, 0.85, 0.85, 0.85, 0.75, launch=3e-7, source=_CYCLES)
_ON_V6E = replace(_ON_TPU, products=0.8)
_UNMEASURED_TPU = replace(_ON_TPU, source='')
_chip_3d = functools.partial(
    Chip, torus=3, wraps_at=4, cores=2, latency=_HOP, efficiency=_UNMEASURED_TPU
)
_TPUS = (
    (
        r'TPU v4(?! lite)',
        _chip_3d(
            'TPU v4',
            {'bf16': 275e12, 'int8': 275e12},
            memory=30.5 * GIB,
            memory_bandwidth=1.2e12,
            link=50e9,
            network=6.25e9,
        ),
    ),
    (
        r'TPU v5 lite|TPU v5e',
        Chip(
            'TPU v5e',
            {'bf16': 197e12, 'int8': 394e12},  # Google says 393e12 for int8, the book 394e12
            memory=15.75 * GIB,
            memory_bandwidth=819e9,  # one version of Google's page says 800 GiB/s, likely a typo
            link=50e9,
            torus=2,
            wraps_at=16,
            network=3.125e9,
            latency=_HOP,
            efficiency=_ON_TPU,
        ),
    ),
    (
        r'TPU v5p?$',
        _chip_3d(
            'TPU v5p',
            # int8 from the book, fp8 from Google
            {'bf16': 459e12, 'fp8': 459e12, 'int8': 918e12},
            memory=95.73 * GIB,
            memory_bandwidth=2.8e12,  # the book; Google says 2.765e12
            link=100e9,
            network=6.25e9,
            efficiency=_ON_TPU,
        ),
    ),
    (
        r'TPU v6 lite|TPU v6e',
        Chip(
            'TPU v6e',
            # the book says 920e12 for bf16, 1840e12 for int8
            {'bf16': 920e12, 'fp8': 920e12, 'int8': 1840e12},
            memory=31.24 * GIB,
            memory_bandwidth=1.638e12,
            link=100e9,
            torus=2,
            wraps_at=16,
            network=12.5e9,
            latency=_HOP,
            efficiency=_ON_V6E,
        ),
    ),
    (
        r'TPU ?v?7',
        _chip_3d(
            'TPU7x',
            {'bf16': 2307e12, 'fp8': 4614e12},
            memory=2 * 94.74 * GIB,
            memory_bandwidth=7.38e12,
            link=100e9,
            network=12.5e9,
        ),
    ),
)

# NVLink: NVIDIA quotes both directions, 600 GB/s for A100. PCIe 5.0 x16 has 64 GB/s per direction.
# `network`: one NIC per GPU, of 200 Gbit/s in DGX A100; 400 in DGX H100, H200, B200, GB200 NVL72
# and servers with RTX PRO 6000; and 800 in HGX B300 and GB300 NVL72.
# HGX B200 and B300: 2.25e15 for bf16 in NVIDIA's sheets, 2.3e15 in the book. int8 of B300 and GB300
# is slow: 3 and 24 POPS with sparsity for 8 and 72 GPUs. Max-Q is a slower RTX PRO 6000.
# `latency`: XLA's cost model has 5 us for the launch of an NCCL kernel on any of these GPUs
# (kNcclKernelLaunchOverhead in xla/service/gpu/model/gpu_performance_model_base.h).
# `efficiency`: XLA ships tables of times on H100, which it uses for H200, too, and on B200; for
# others, a collective takes 5 ms. `python -m benchmarks.xla_schedule --calibrate` reads them.
# Products reach 79% of the peak on H100 and 62% on B200; among 8 GPUs, all-gathers 75 and 63% of
# their bounds' rate, reduce-scatters 70 and 62%, all-to-alls 72 and 60%, all-reduces 49 and 37%;
# plus 34 to 47 us on both, and 70 us for all-reduces. Pairs of GPUs reach less, 41 to 62% and
# 35 to 49%. The parts of HBM and of networks are assumed.
MIB = 2**20
_A100 = {'bf16': 312e12, 'tf32': 156e12, 'int8': 624e12}
_H100 = {'bf16': 989.5e12, 'tf32': 494.7e12, 'fp8': 1979e12, 'int8': 1979e12}
_B200 = {'bf16': 2.3e15, 'tf32': 1.15e15, 'fp8': 4.5e15, 'int8': 4.5e15, 'fp4': 9e15}
_B300 = {'bf16': 2.3e15, 'tf32': 1.15e15, 'fp8': 4.5e15, 'int8': 188e12, 'fp4': 13.5e15}
_GB200 = {'bf16': 2.5e15, 'tf32': 1.25e15, 'fp8': 5e15, 'int8': 5e15, 'fp4': 10e15}
_GB300 = {'bf16': 2.5e15, 'tf32': 1.25e15, 'fp8': 5e15, 'int8': 167e12, 'fp4': 15e15}
_RTX = {'bf16': 504e12, 'tf32': 252e12, 'fp8': 1008e12, 'int8': 1008e12, 'fp4': 2015e12}
_ON_H100 = Efficiency(
    0.75, 0.85, 0.75, 0.5, 0.75, collective=40e-6, launch=2e-6, source="XLA's tables for H100"
)
_ON_B200 = replace(
    _ON_H100, products=0.6, links=0.62, all_reduces=0.38, source="XLA's tables for B200"
)
_gpu = functools.partial(Chip, latency=5e-6, efficiency=replace(_ON_H100, source=''))
_hopper = functools.partial(_gpu, efficiency=_ON_H100)
_blackwell = functools.partial(_gpu, efficiency=replace(_ON_B200, source=''))
_rack = functools.partial(_blackwell, link=900e9, domain=72)
_GPUS = (
    (r'A100-SXM.*40GB', _gpu('A100 40GB', _A100, 40370 * MIB, 1.555e12, 300e9, network=25e9)),
    (r'A100-SXM', _gpu('A100 80GB', _A100, 81158 * MIB, 2.039e12, 300e9, network=25e9)),
    (r'H100(?!.*(PCIe|NVL))', _hopper('H100', _H100, 81008 * MIB, 3.4e12, 450e9, network=50e9)),
    (r'(?<!G)H200(?!.*NVL)', _hopper('H200', _H100, 144384 * MIB, 4.8e12, 450e9, network=50e9)),
    (
        r'\bB200',
        _gpu('B200', _B200, 182642 * MIB, 8e12, 900e9, network=50e9, efficiency=_ON_B200),
    ),
    (r'\bB300', _blackwell('B300', _B300, 283262 * MIB, 8e12, 900e9, network=100e9)),
    (r'\bGB200', _rack('GB200', _GB200, 188730 * MIB, 8e12, network=50e9)),
    (r'\bGB300', _rack('GB300', _GB300, 283261 * MIB, 8e12, network=100e9)),
    (
        r'RTX PRO 6000 Blackwell(?!.*Max-Q)',
        _gpu('RTX PRO 6000', _RTX, 98304 * MIB, 1.792e12, 64e9, network=50e9),
    ),
)


def find_chip(device_kind: str) -> Chip | None:
    """Finds the chip of a JAX device, or returns None if it is unknown, as for a CPU.

    >>> from einshard._program.cost.chips import find_chip
    >>> find_chip('TPU v5 lite').name, find_chip('NVIDIA H100 80GB HBM3').name, find_chip('cpu')
    ('TPU v5e', 'H100', None)
    """
    for pattern, chip in (*_TPUS, *_GPUS):
        if re.search(pattern, device_kind):
            return chip
    return None


def as_chip(value: Chip | str) -> Chip:
    """Returns a chip by its name, such as 'H100' or 'TPU v5e', or by the name in `topology`.

    >>> from einshard._program.cost.chips import as_chip
    >>> as_chip('h100').name, as_chip('v5e').name, as_chip('a100').name
    ('H100', 'TPU v5e', 'A100 80GB')
    """
    if isinstance(value, Chip):
        return value
    known = {chip.name: chip for _, chip in (*_TPUS, *_GPUS)}
    by_key = {_key(name): chip for name, chip in known.items()}
    by_key |= {key.removeprefix('tpu'): by_key[key] for key in by_key if key.startswith('tpuv')}
    # as in `topology`
    by_key |= {'a100': by_key['a10080gb'], 'rtx6000pro': by_key['rtxpro6000']}
    found = by_key.get(_key(value)) if isinstance(value, str) else None  # type: ignore[reportUnnecessaryIsInstance]
    if found is None:
        raise EinshardError(
            f'chip={reprlib.repr(value)} is not a known chip',
            facts={'known chips': ', '.join(known), 'other chips': 'chip=einshard.Chip(...)'},
        )
    return found


def _key(name: str) -> str:
    """Returns a name without case, spaces and hyphens."""
    return re.sub(r'[ _-]', '', name.lower())


def default_chip() -> Chip:
    """The chip whose bounds are compared where the devices have no known speeds, as CPUs."""
    chip = find_chip('TPU v5 lite')
    assert chip is not None
    return chip
