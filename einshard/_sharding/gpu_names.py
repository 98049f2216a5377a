"""Checks the names of GPU clusters, and describes their GPUs to XLA. Does not import JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .._errors import EinshardError


@dataclass(frozen=True)
class Gpu:
    """A GPU, as XLA's GPU compiler needs to know it.

    Attributes:
        kind: the name that the driver reports, which is the `device_kind` in JAX.
        capability: the CUDA compute capability, (major, minor).
        domain: how many GPUs one NVLink network connects. Without NVLink, the GPUs of a host.
        host: the number of GPUs in a host.
        sms: the number of streaming multiprocessors (SMs).
        fp32: the number of float32 units in an SM.
        clock: the maximum clock of the SMs, in GHz.
        memory: MiB of device memory that the driver reports to programs.
        bandwidth: bytes per second of device memory.
        l2: MiB of L2 cache.
        shared: KiB of shared memory in an SM. A block can use 1 KiB less.
        threads: how many threads an SM can hold.
        links: the number of NVLink links.
    """

    kind: str
    capability: tuple[int, int]
    domain: int
    host: int
    sms: int
    clock: float
    memory: int
    bandwidth: float
    l2: float
    fp32: int = 128
    shared: int = 228
    threads: int = 2048
    links: int = 18

    def target_config(self) -> str:
        """Returns the description of the GPU, a GpuTargetConfigProto of XLA in text format."""
        major, minor = self.capability
        links = f'device_interconnect_info {{ active_links: {self.links} }}'
        return '\n'.join(
            (
                'gpu_device_info {',
                *(f'  {field}: {value}' for field, value in _ALL_GPUS.items()),
                f'  cuda_compute_capability {{ major: {major} minor: {minor} }}',
                f'  core_count: {self.sms}',
                f'  fpus_per_core: {self.fp32}',
                f'  clock_rate_ghz: {self.clock}',
                f'  device_memory_size: {self.memory * 2**20}',
                f'  memory_bandwidth: {self.bandwidth:.0f}',
                f'  l2_cache_size: {self.l2 * 2**20:.0f}',
                f'  shared_memory_per_core: {self.shared * 2**10}',
                f'  shared_memory_per_block_optin: {(self.shared - 1) * 2**10}',
                f'  threads_per_core_limit: {self.threads}',
                f'  {links}' if self.links else '',
                '}',
                'platform_name: "CUDA"',
                'dnn_version_info { major: 9 minor: 10 }',
                f'device_description_str: "{self.kind}"',
            )
        )


# Limits that all these GPUs share: CUDA programming guide, tables of compute capabilities. Without
# `threads_per_warp` or `block_dim_limit_x`, the compiler ends the process.
_ALL_GPUS = {
    'threads_per_warp': 32,
    'threads_per_block_limit': 1024,
    'block_dim_limit_x': 2**31 - 1,
    'block_dim_limit_y': 2**16 - 1,
    'block_dim_limit_z': 2**16 - 1,
    'registers_per_core_limit': 2**16,
    'registers_per_block_limit': 2**16,
    'shared_memory_per_block': 48 * 2**10,
}

# Sources:
# - SMs, units, L2: NVIDIA's white papers of the Ampere, Hopper, Blackwell and RTX Blackwell
#   architectures; B200, B300, GB200, GB300: what the driver reports.
# - shared memory, threads: CUDA programming guide, tables of compute capabilities.
# - clock, memory: what the driver reports, by openxla/xla/backends/gpu/target_config/specs.
# - bandwidth: the memory clock times the width of the bus, as the driver computes it. Data sheets
#   round it: 3.35 TB/s for H100, 8 TB/s for B200.
GPUS = {
    'a100': Gpu(
        'NVIDIA A100-SXM4-80GB', (8, 0), domain=8, host=8, sms=108, fp32=64, clock=1.41,
        memory=81158, bandwidth=2.03904e12, l2=40, shared=164, links=12,
    ),
    'a100-40gb': Gpu(
        'NVIDIA A100-SXM4-40GB', (8, 0), domain=8, host=8, sms=108, fp32=64, clock=1.41,
        memory=40370, bandwidth=1.5552e12, l2=40, shared=164, links=12,
    ),
    'h100': Gpu(
        'NVIDIA H100 80GB HBM3', (9, 0), domain=8, host=8, sms=132, clock=1.98,
        memory=81008, bandwidth=3.35232e12, l2=50,
    ),
    'h200': Gpu(
        'NVIDIA H200', (9, 0), domain=8, host=8, sms=132, clock=1.98,
        memory=144384, bandwidth=4.8e12, l2=50,
    ),
    'b200': Gpu(
        'NVIDIA B200', (10, 0), domain=8, host=8, sms=148, clock=1.965,
        memory=182642, bandwidth=7.67232e12, l2=126.5,
    ),
    'b300': Gpu(
        'NVIDIA B300', (10, 3), domain=8, host=8, sms=158, clock=1.965,
        memory=283262, bandwidth=7.936e12, l2=129.25,
    ),
    'gb200': Gpu(
        'NVIDIA GB200', (10, 0), domain=72, host=4, sms=152, clock=2.062,
        memory=188730, bandwidth=7.928064e12, l2=129.25,
    ),
    'gb300': Gpu(
        'NVIDIA GB300', (10, 3), domain=72, host=4, sms=152, clock=2.07,
        memory=283261, bandwidth=7.928064e12, l2=129.25,
    ),
    'rtx6000pro': Gpu(
        'NVIDIA RTX PRO 6000 Blackwell Server Edition', (12, 0), domain=8, host=8, sms=188,
        clock=2.6, memory=98304, bandwidth=1.792e12, l2=128, shared=128, threads=1536, links=0,
    ),
}  # fmt: skip

_MAX_GPUS = 2**16  # XLA describes these in 1 s
_NAME = re.compile(
    r'(?P<gpu>[a-z][a-z0-9-]*):(?:(?P<domains>\d{1,6})x)?(?P<size>\d{1,6})', re.ASCII
)

# Names of machines that do not contain the name of their GPU: Google Cloud, then AWS.
_MACHINES = {
    r'a2-ultragpu': 'a100',
    r'a2-': 'a100-40gb',
    r'a3-ultragpu': 'h200',
    r'a3-': 'h100',
    r'a4-': 'b200',
    r'a4x-max': 'gb300',
    r'a4x-': 'gb200',
    r'g4-standard': 'rtx6000pro',
    r'p4de\b': 'a100',
    r'p4d\b': 'a100-40gb',
    r'p5\b': 'h100',
    r'p5en?\b': 'h200',
}
_OTHERS = r'g?[abhlv]\d+0|l4|t4|rtx|mi\d+|[dh]gx|gpu|cuda|rocm|nvidia|amd'
_GPU = re.compile(
    rf'(?i)(?<![a-z])({"|".join([*_MACHINES, *GPUS, _OTHERS])})|^(standard_)?(nc|nd|p6)', re.ASCII
)


def is_gpu_name(name: str) -> bool:
    """Whether a name, valid or not, asks for GPUs."""
    return bool(_GPU.search(name))


def read_gpu_name(name: str) -> tuple[Gpu, str]:
    """Reads 'h100:4x8': the GPU, and the sizes for XLA: domains x hosts in each x GPUs in each.

    Raises for invalid names, because XLA would divide by zero or end the process.
    """
    try:
        return _read(name)
    except EinshardError as error:
        raise error.with_fix(_corrected_name(name)) from None


def _read(name: str) -> tuple[Gpu, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise EinshardError(
            f"'{name}' is not a valid topology name", code='topology', facts=_facts(name)
        )
    gpu = GPUS.get(match['gpu'])
    if gpu is None:
        raise EinshardError(
            f"'{match['gpu']}' is not a GPU that einshard knows",
            code='topology',
            facts=_facts(name),
        )
    domains, size = int(match['domains'] or 1), int(match['size'])
    if not domains * size:
        raise EinshardError(f"'{name}' has no GPUs", code='topology', facts=_facts(name))
    if domains * size > _MAX_GPUS:
        raise EinshardError(
            f"'{name}' has more than {_MAX_GPUS:,} GPUs", code='topology', facts=_facts(name)
        )
    if size > gpu.domain:
        what = 'NVLink domain' if gpu.links else 'host'
        raise EinshardError(
            f"'{name}' has {size} GPUs in {'each' if domains > 1 else 'an'} {what}, but "
            f'{match["gpu"]} has at most {gpu.domain}'.replace('an host', 'a host'),
            code='topology',
            facts=_facts(name),
        )
    hosts, rest = divmod(size, gpu.host)
    if hosts and rest:
        raise EinshardError(
            f"'{name}' has {size} GPUs in a domain, which do not fill hosts of {gpu.host}",
            code='topology',
            facts={'GPUs in a domain': f'1 to {gpu.host}, or a multiple of {gpu.host}'},
        )
    return gpu, f'{domains}x{max(hosts, 1)}x{gpu.host if hosts else size}'


def _corrected_name(name: str) -> str | None:
    """Corrects case, spaces, and sizes. Of a machine or a GPU alone, returns a full domain."""
    lower = name.strip().lower()
    text = re.sub(r'\s*([-:x*])\s*', r'\1', lower).replace('*', 'x')
    match = _NAME.fullmatch(text)
    if match and match['gpu'] in GPUS:
        gpu, shape = GPUS[match['gpu']], text.partition(':')[2]
        domains, size = int(match['domains'] or 1), int(match['size'])
        full_domains, rest = divmod(domains * size, gpu.domain)
        full_hosts = -(-size // gpu.host) * gpu.host
        sizes = [shape, *([] if rest else [f'{full_domains}x{gpu.domain}'])]
        sizes += [f'{domains}x{full_hosts}' if domains > 1 else str(full_hosts)]
        names = [f'{match["gpu"]}:{size}' for size in sizes]
    elif re.search(r'pcie|nvl(?!\d)', lower):  # H100 PCIe and NVL are other GPUs
        return None
    else:
        found = [gpu for machine, gpu in _MACHINES.items() if re.match(machine, lower)]
        longest_first = sorted(GPUS, key=len, reverse=True)
        found += [gpu for gpu in longest_first if re.search(rf'(?<![a-z]){gpu}', lower)]
        names = [f'{gpu}:{GPUS[gpu].domain}' for gpu in found[:1]]
    for candidate in names:
        try:
            _read(candidate)
        except EinshardError:
            continue
        return f"'{candidate}'"
    return None


def _facts(name: str) -> dict[str, str]:
    facts = gpu_forms()
    if re.search(r'(?i)amd|rocm|\bmi\d+', name):
        facts['AMD GPUs'] = "JAX's plugin for ROCm compiles only where a GPU is"
    return facts


def gpu_forms() -> dict[str, str]:
    return {
        'GPUs': ', '.join(GPUS),
        'GPU clusters': "NVLink domains x GPUs in each: 'h100:8', 'h100:4x8', 'gb200:2x72'",
    }
