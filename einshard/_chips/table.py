"""The chips that einshard knows: TPUs and GPUs, one row each. A new chip is a row.

Sources of peak rates:
- Google: the pages of each TPU at docs.cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x).
- The book: jax-ml.github.io/scaling-book, chapters 2 (TPUs) and 12 (GPUs).
- NVIDIA: data sheets of A100, H100, H200, HGX B200 and HGX B300, of GB200 NVL72 and GB300 NVL72;
  the RTX Blackwell PRO white paper. Rates are dense, usually half of those with sparsity.
The rates must be upper bounds, so where sources differ, this table has the highest.

Sources of what XLA's compiler for GPUs needs to know:
- SMs, units, L2: NVIDIA's white papers of the Ampere, Hopper, Blackwell and RTX Blackwell
  architectures; B200, B300, GB200, GB300: what the driver reports.
- shared memory, threads: CUDA programming guide, tables of compute capabilities.
- clock, memory: what the driver reports, by openxla/xla/backends/gpu/target_config/specs.
- bandwidth: the memory clock times the width of the bus, as the driver computes it.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .._errors import EinshardError
from .chip import Chip, Efficiency

# --- TPUs ---------------------------------------------------------------------------------------

# The cycles that libtpu 0.0.52 estimates for products of 4096 and of 8192 rows are 97 and 88% of
# the peak on v5e, 96 and 90% on v5p, 87 and 70% on v6e; on v4 and TPU7x, unclear. The parts of HBM
# and links are assumed; the estimate of a published step (16B, 256 v5e) is 9% low.
_ON_TPU = Efficiency(
    0.9, 0.85, 0.85, 0.85, 0.75, launch=3e-7, source="libtpu's estimated cycles of products"
)
_LIKE_TPUS = replace(_ON_TPU, source='')


@dataclass(frozen=True, eq=False)
class Tpu:
    """A generation of TPUs.

    Attributes:
        name: its name in `topology`.
        ndim: the number of torus dimensions.
        cores: the number of TensorCores in a chip.
        cloud: its names in Cloud accelerator types, whose number counts TensorCores.
        slices: the numbers of chips of the slices that Google Cloud offers.
        kinds: matches the `device_kind` of its devices.
        label: its name in reports. Empty: its rates are not in this table.
        flops: {dtype: dense flops per second of a chip}.
        memory: GiB that libtpu 0.0.52 lets a program use, by its RESOURCE_EXHAUSTED errors.
        hbm: bytes per second of HBM.
        link: bytes per second over one ICI link in one direction. Google quotes both directions of
            all links of a chip, such as 400 GB/s for the 4 links of v5e. The book has 10% less: 45
            GB/s for v4 and v5e, 90 for v5p and v6e.
        network: bytes per second of the data center network for each chip. Google says 50 Gbit/s
            for v5p, 100 for v6e and TPU7x, and for v5e two NICs of 100 Gbit/s for 8 chips. For v4,
            the book says 25 GB/s for a host of 4 chips.
        efficiency: what programs reach.
    """

    name: str
    ndim: int
    cores: int = 1
    cloud: tuple[str, ...] = ()
    slices: tuple[int, ...] = ()
    kinds: str = ''
    label: str = ''
    flops: Mapping[str, float] | None = None
    memory: float = 0
    hbm: float = 0
    link: float = 0
    network: float = 0
    efficiency: Efficiency = _LIKE_TPUS

    @functools.cached_property
    def chip(self) -> Chip | None:
        """Its peak rates, or None if they are not in this table."""
        if self.flops is None:
            return None
        return Chip(
            self.label,
            self.flops,
            memory=self.memory * 2**30,
            memory_bandwidth=self.hbm,
            link=self.link,
            torus=self.ndim,
            # Small slices do not wrap around. On v5e and v6e, only dimensions of size 16 are rings.
            # On others, all dimensions of a slice that consists of full 4x4x4 cubes are rings
            # (book, chapter 2).
            wraps_at=16 if self.ndim == 2 else 4,
            network=self.network,
            cores=self.cores,
            # The book says that a hop takes around 1 us on any TPU (chapter 3, "A note on ICI
            # latency"). It measured 8 us for an all-gather of 128 KiB over 3 hops of v5e.
            latency=1e-6,
            efficiency=self.efficiency,
        )


TPUS = {
    tpu.name: tpu
    for tpu in (
        Tpu('v2', ndim=2, cores=2, cloud=('v2',), slices=(4, 16, 64, 128, 256)),
        Tpu('v3', ndim=2, cores=2, cloud=('v3',), slices=(4, 16, 32, 64, 128, 256, 512, 1024)),
        Tpu('v4 lite', ndim=2),  # v4i
        Tpu(
            'v4', ndim=3, cores=2, cloud=('v4',), slices=(4, 8, 16, 32, *range(64, 4097, 64)),
            kinds=r'TPU v4(?! lite)', label='TPU v4',
            flops={'bf16': 275e12, 'int8': 275e12},
            memory=30.5, hbm=1.2e12, link=50e9, network=6.25e9,
        ),
        Tpu(
            'v5e', ndim=2, cloud=('v5e', 'v5litepod'), slices=(1, 4, 8, 16, 32, 64, 128, 256),
            kinds=r'TPU v5 lite|TPU v5e', label='TPU v5e',
            flops={'bf16': 197e12, 'int8': 394e12},  # Google says 393e12 for int8, the book 394e12
            memory=15.75,
            hbm=819e9,  # one version of Google's page says 800 GiB/s, likely a typo
            link=50e9, network=3.125e9, efficiency=_ON_TPU,
        ),
        Tpu(
            'v5p', ndim=3, cores=2, cloud=('v5p',), slices=(4, 8, 16, 32, *range(64, 6145, 64)),
            kinds=r'TPU v5p?$', label='TPU v5p',
            flops={'bf16': 459e12, 'fp8': 459e12, 'int8': 918e12},  # int8: the book; fp8: Google
            memory=95.73,  # Google says 95 GiB, and the book 96 GB
            hbm=2.8e12,  # the book; Google says 2.765e12
            link=100e9, network=6.25e9, efficiency=_ON_TPU,
        ),
        Tpu(
            'v6e', ndim=2, cloud=('v6e',), slices=(1, 4, 8, 16, 32, 64, 128, 256),
            kinds=r'TPU v6 lite|TPU v6e', label='TPU v6e',
            # the book says 920e12 for bf16, 1840e12 for int8
            flops={'bf16': 920e12, 'fp8': 920e12, 'int8': 1840e12},
            memory=31.24, hbm=1.638e12, link=100e9, network=12.5e9,
            efficiency=replace(_ON_TPU, products=0.8),
        ),
        Tpu(
            'tpu7x', ndim=3, cores=2, kinds=r'TPU ?v?7', label='TPU7x',
            flops={'bf16': 2307e12, 'fp8': 4614e12},
            memory=2 * 94.74, hbm=7.38e12, link=100e9, network=12.5e9,
        ),
    )
}  # fmt: skip

# --- GPUs ---------------------------------------------------------------------------------------

# XLA ships tables of times on H100, which it uses for H200, too, and on B200; for others, a
# collective takes 5 ms. `python -m benchmarks.xla_schedule --calibrate` reads them. Products reach
# 79% of the peak on H100 and 62% on B200; among 8 GPUs, all-gathers 75 and 63% of their bounds'
# rate, reduce-scatters 70 and 62%, all-to-alls 72 and 60%, all-reduces 49 and 37%; plus 34 to 47 us
# on both, and 70 us for all-reduces. Pairs of GPUs reach less, 41 to 62% and 35 to 49%. The parts
# of HBM and of networks are assumed.
_ON_H100 = Efficiency(
    0.75, 0.85, 0.75, 0.5, 0.75, collective=40e-6, launch=2e-6, source="XLA's tables for H100"
)
_ON_B200 = replace(
    _ON_H100, products=0.6, links=0.62, all_reduces=0.38, source="XLA's tables for B200"
)
_LIKE_H100 = replace(_ON_H100, source='')
_LIKE_B200 = replace(_ON_B200, source='')
_A100 = {'bf16': 312e12, 'tf32': 156e12, 'int8': 624e12}
_H100 = {'bf16': 989.5e12, 'tf32': 494.7e12, 'fp8': 1979e12, 'int8': 1979e12}


@dataclass(frozen=True, eq=False)
class Gpu:
    """A GPU.

    Attributes:
        name: its name in `topology`.
        label: its name in reports.
        kind: the name that the driver reports, which is the `device_kind` in JAX.
        kinds: matches the `device_kind` of all GPUs that have these rates.
        machines: matches names of machines that do not contain the name of their GPU: of Google
            Cloud, then AWS.
        flops: {dtype: dense flops per second}.
        hbm: bytes per second of device memory, by data sheets, which may round up.
        network: bytes per second of the NIC of a GPU: 200 Gbit/s in DGX A100; 400 in DGX H100,
            H200, B200, GB200 NVL72 and servers with RTX PRO 6000; and 800 in HGX B300 and GB300
            NVL72.
        domain: how many GPUs one NVLink network connects. Without NVLink, the GPUs of a host.
        host: the number of GPUs in a host.
        capability: the CUDA compute capability, (major, minor).
        sms: the number of streaming multiprocessors (SMs).
        fp32: the number of float32 units in an SM.
        clock: the maximum clock of the SMs, in GHz.
        memory: MiB of device memory that the driver reports to programs.
        bandwidth: bytes per second of device memory that the driver reports.
        l2: MiB of L2 cache.
        shared: KiB of shared memory in an SM. A block can use 1 KiB less.
        threads: how many threads an SM can hold.
        links: the number of NVLink links.
        efficiency: what programs reach.
    """

    name: str
    label: str
    kind: str
    kinds: str
    flops: Mapping[str, float]
    hbm: float
    network: float
    capability: tuple[int, int]
    sms: int
    clock: float
    memory: int
    bandwidth: float
    l2: float
    machines: str = ''
    domain: int = 8
    host: int = 8
    fp32: int = 128
    shared: int = 228
    threads: int = 2048
    links: int = 18
    efficiency: Efficiency = _LIKE_H100

    @functools.cached_property
    def chip(self) -> Chip:
        """Its peak rates."""
        # NVIDIA quotes both directions, such as 600 GB/s for the 12 links of A100
        nvlink = 50e9 if self.capability >= (10, 0) else 25e9
        return Chip(
            self.label,
            self.flops,
            memory=self.memory * 2**20,
            memory_bandwidth=self.hbm,
            link=self.links * nvlink or 64e9,  # PCIe 5.0 x16
            domain=self.domain,
            network=self.network,
            # XLA's cost model has 5 us for the launch of an NCCL kernel on any of these GPUs
            # (kNcclKernelLaunchOverhead in xla/service/gpu/model/gpu_performance_model_base.h)
            latency=5e-6,
            efficiency=self.efficiency,
        )


# HGX B200 and B300: 2.25e15 for bf16 in NVIDIA's sheets, 2.3e15 in the book. int8 of B300 and GB300
# is slow: 3 and 24 POPS with sparsity for 8 and 72 GPUs. Max-Q is a slower RTX PRO 6000.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            'a100', 'A100 80GB', 'NVIDIA A100-SXM4-80GB', r'A100-SXM(?!.*40GB)', _A100,
            machines=r'a2-ultragpu|p4de\b', hbm=2.039e12, network=25e9, links=12,
            capability=(8, 0), sms=108, fp32=64, clock=1.41, memory=81158, bandwidth=2.03904e12,
            l2=40, shared=164,
        ),
        Gpu(
            'a100-40gb', 'A100 40GB', 'NVIDIA A100-SXM4-40GB', r'A100-SXM.*40GB', _A100,
            machines=r'a2-(?!ultragpu)|p4d\b', hbm=1.555e12, network=25e9, links=12,
            capability=(8, 0), sms=108, fp32=64, clock=1.41, memory=40370, bandwidth=1.5552e12,
            l2=40, shared=164,
        ),
        Gpu(
            'h100', 'H100', 'NVIDIA H100 80GB HBM3', r'H100(?!.*(PCIe|NVL))', _H100,
            machines=r'a3-(?!ultragpu)|p5\b', hbm=3.4e12, network=50e9,
            capability=(9, 0), sms=132, clock=1.98, memory=81008, bandwidth=3.35232e12, l2=50,
            efficiency=_ON_H100,
        ),
        Gpu(
            'h200', 'H200', 'NVIDIA H200', r'(?<!G)H200(?!.*NVL)', _H100,
            machines=r'a3-ultragpu|p5en?\b', hbm=4.8e12, network=50e9,
            capability=(9, 0), sms=132, clock=1.98, memory=144384, bandwidth=4.8e12, l2=50,
            efficiency=_ON_H100,
        ),
        Gpu(
            'b200', 'B200', 'NVIDIA B200', r'\bB200',
            {'bf16': 2.3e15, 'tf32': 1.15e15, 'fp8': 4.5e15, 'int8': 4.5e15, 'fp4': 9e15},
            machines='a4-', hbm=8e12, network=50e9,
            capability=(10, 0), sms=148, clock=1.965, memory=182642, bandwidth=7.67232e12,
            l2=126.5, efficiency=_ON_B200,
        ),
        Gpu(
            'b300', 'B300', 'NVIDIA B300', r'\bB300',
            {'bf16': 2.3e15, 'tf32': 1.15e15, 'fp8': 4.5e15, 'int8': 188e12, 'fp4': 13.5e15},
            hbm=8e12, network=100e9,
            capability=(10, 3), sms=158, clock=1.965, memory=283262, bandwidth=7.936e12,
            l2=129.25, efficiency=_LIKE_B200,
        ),
        Gpu(
            'gb200', 'GB200', 'NVIDIA GB200', r'\bGB200',
            {'bf16': 2.5e15, 'tf32': 1.25e15, 'fp8': 5e15, 'int8': 5e15, 'fp4': 10e15},
            machines='a4x-(?!max)', hbm=8e12, network=50e9, domain=72, host=4,
            capability=(10, 0), sms=152, clock=2.062, memory=188730, bandwidth=7.928064e12,
            l2=129.25, efficiency=_LIKE_B200,
        ),
        Gpu(
            'gb300', 'GB300', 'NVIDIA GB300', r'\bGB300',
            {'bf16': 2.5e15, 'tf32': 1.25e15, 'fp8': 5e15, 'int8': 167e12, 'fp4': 15e15},
            machines='a4x-max', hbm=8e12, network=100e9, domain=72, host=4,
            capability=(10, 3), sms=152, clock=2.07, memory=283261, bandwidth=7.928064e12,
            l2=129.25, efficiency=_LIKE_B200,
        ),
        Gpu(
            'rtx6000pro', 'RTX PRO 6000', 'NVIDIA RTX PRO 6000 Blackwell Server Edition',
            r'RTX PRO 6000 Blackwell(?!.*Max-Q)',
            {'bf16': 504e12, 'tf32': 252e12, 'fp8': 1008e12, 'int8': 1008e12, 'fp4': 2015e12},
            machines='g4-standard', hbm=1.792e12, network=50e9, links=0,
            capability=(12, 0), sms=188, clock=2.6, memory=98304, bandwidth=1.792e12, l2=128,
            shared=128, threads=1536,
        ),
    )
}  # fmt: skip

# --- lookups ------------------------------------------------------------------------------------


def find_chip(device_kind: str) -> Chip | None:
    """Finds the chip of a JAX device, or returns None if it is unknown, as for a CPU.

    >>> from einshard._chips.table import find_chip
    >>> find_chip('TPU v5 lite').name, find_chip('NVIDIA H100 80GB HBM3').name, find_chip('cpu')
    ('TPU v5e', 'H100', None)
    """
    for row in (*TPUS.values(), *GPUS.values()):
        if row.kinds and re.search(row.kinds, device_kind):
            return row.chip
    return None


def as_chip(value: Chip | str) -> Chip:
    """Returns a chip by its name, such as 'H100' or 'TPU v5e', or by the name in `topology`.

    >>> from einshard._chips.table import as_chip
    >>> as_chip('h100').name, as_chip('v5e').name, as_chip('a100').name
    ('H100', 'TPU v5e', 'A100 80GB')
    """
    if isinstance(value, Chip):
        return value
    known = [(row.name, row.chip) for row in (*TPUS.values(), *GPUS.values()) if row.chip]
    if isinstance(value, str):  # type: ignore[reportUnnecessaryIsInstance]
        for name, chip in known:
            if _key(value) in (_key(name), _key(chip.name)):
                return chip
    raise EinshardError(
        f'chip={reprlib.repr(value)} is not a known chip',
        facts={
            'known chips': ', '.join(chip.name for _, chip in known),
            'other chips': 'chip=einshard.Chip(...)',
        },
    )


def _key(name: str) -> str:
    """Returns a name without case, spaces and hyphens."""
    return re.sub(r'[ _-]', '', name.lower())


def default_chip() -> Chip:
    """The chip whose bounds are compared where the devices have no known speeds, as CPUs."""
    return as_chip('v5e')
