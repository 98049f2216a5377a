"""Checks the names of GPU clusters. Does not import JAX."""

from __future__ import annotations

import re

from .._chips.table import GPUS, Gpu
from .._errors import EinshardError

_MAX_GPUS = 2**16  # XLA describes these in 1 s
_NAME = re.compile(
    r'(?P<gpu>[a-z][a-z0-9-]*):(?:(?P<domains>\d{1,6})x)?(?P<size>\d{1,6})', re.ASCII
)

_MACHINES = {gpu.machines: name for name, gpu in GPUS.items() if gpu.machines}
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
        raise EinshardError(f"'{name}' has no GPUs", code='topology', facts=_CLUSTERS)
    if domains * size > _MAX_GPUS:
        raise EinshardError(
            f"'{name}' has more than {_MAX_GPUS:,} GPUs", code='topology', facts=_CLUSTERS
        )
    if size > gpu.domain:
        what = 'NVLink domain' if gpu.links else 'host'
        raise EinshardError(
            f"'{name}' has {size} GPUs in {'each' if domains > 1 else 'an'} {what}, but "
            f'{match["gpu"]} has at most {gpu.domain}'.replace('an host', 'a host'),
            code='topology',
            facts=_CLUSTERS,
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
    return {'GPUs': ', '.join(GPUS), **_CLUSTERS}


_CLUSTERS = {'GPU clusters': "NVLink domains x GPUs in each: 'h100:8', 'h100:4x8', 'gb200:2x72'"}
