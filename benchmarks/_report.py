"""The figures of a run, and their JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# text, or a number and its unit
Detail = str | Sequence[Any]


@dataclass
class Row:
    """One figure, and the same of the hand-written JAX."""

    benchmark: str
    name: str
    unit: str  # of figure and other: 's' for one call, 'bytes', 'lines', ...
    figure: float  # the median of the rounds
    against: str = ''  # what the figure is compared with
    other: float | None = None
    ratio: float | None = None  # the median of figure / other, round by round
    spread: float | None = None  # half the interquartile range of that, relative to the median
    rounds: int = 1
    details: dict[str, Detail] = field(default_factory=dict)


@dataclass
class Report:
    """A complete run."""

    environment: dict[str, Any]
    tiny: bool = False  # at a size at which the figures mean nothing
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """One line per row, so that a changed figure is a changed line."""
        fields = dataclasses.asdict(self)
        rows = ',\n'.join(json.dumps(row) for row in fields.pop('rows'))
        return f'{json.dumps(fields, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Report:
        document = json.loads(text)
        rows = [Row(**row) for row in document.pop('rows')]
        return cls(**document, rows=rows)


def environment() -> dict[str, Any]:
    """The machine and the versions of this run. Starts JAX's backend."""
    import jax

    import einshard

    affinity = getattr(os, 'sched_getaffinity', None)  # Linux only
    return {
        'cpu': cpu_model(),
        'cores': len(affinity(0)) if affinity else os.cpu_count() or 1,
        'device_kind': jax.devices()[0].device_kind,
        'device_count': jax.device_count(),
        'process_count': jax.process_count(),
        'einshard': einshard.__version__,
        'jax': jax.__version__,
        'libtpu': version_of('libtpu'),
        'python': platform.python_version(),
        'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cpu_model(cpuinfo: pathlib.Path = pathlib.Path('/proc/cpuinfo')) -> str:
    """The CPU's name, or its architecture if the system does not say."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding='utf-8').splitlines():
            key, _, value = line.partition(':')
            if key.strip() == 'model name':
                return value.strip()
    return platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(environment: Mapping[str, Any]) -> str:
    """'8 simulated devices (AMD EPYC, 2 cores)'"""
    kind, n = environment['device_kind'], environment['process_count']
    devices = 'simulated devices' if kind == 'cpu' else kind
    processes = '' if n == 1 else f' in {n} processes'
    host = f'{environment["cpu"]}, {environment["cores"]} cores'
    return f'{environment["device_count"]} {devices}{processes} ({host})'
