"""Sets environment variables for libtpu on a machine without TPUs."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

# Without these variables, and without a TPU, libtpu waits for a metadata server, prints errors to
# standard error, and locks out other processes.
_WITHOUT_TPU = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def has_libtpu() -> bool:
    return importlib.util.find_spec('libtpu') is not None


@functools.cache
def quiet_libtpu() -> None:
    """Stops libtpu from waiting on a machine without TPUs. Call it before libtpu loads."""
    if has_libtpu() and not _has_tpu():
        for variable, value in _WITHOUT_TPU.items():
            os.environ.setdefault(variable, value)


def _has_tpu() -> bool:
    vfio = Path('/dev/vfio')
    return Path('/dev/accel0').exists() or (
        vfio.is_dir() and any(entry.name.isdecimal() for entry in vfio.iterdir())
    )
