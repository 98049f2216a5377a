"""Loads libtpu on a machine without TPUs."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

# Without these variables, and without a TPU, libtpu waits for a metadata server, prints errors to
# standard error, and locks out other processes. It reads them only when it loads.
_WITHOUT_TPU = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_lock = threading.Lock()  # while environment variables are set


def has_libtpu() -> bool:
    return importlib.util.find_spec('libtpu') is not None


@functools.cache
def load_libtpu() -> None:
    """Loads libtpu if JAX's default backend would load it, so that it does not wait then."""
    platforms: str | None = jax.config.jax_platforms  # type: ignore[reportAttributeAccessIssue]
    if has_libtpu() and not _has_tpu() and (not platforms or 'tpu' in platforms.split(',')):
        with suppress(jax.errors.JaxRuntimeError):
            describe_slice('v5e:2x2')


def describe_slice(name: str, **options: Any) -> Any:
    """Returns libtpu's description of a TPU slice, for which JAX compiles."""
    # imported here because it loads modules that nothing else needs
    from jax.experimental.topologies import get_topology_desc

    unset = {k: v for k, v in _WITHOUT_TPU.items() if k not in os.environ}
    with set_variables({} if _has_tpu() else unset):
        return get_topology_desc(name, 'tpu', **options)


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Generator[None]:
    """Sets environment variables in a `with` block."""
    with _lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _has_tpu() -> bool:
    vfio = Path('/dev/vfio')
    return Path('/dev/accel0').exists() or (
        vfio.is_dir() and any(entry.name.isdecimal() for entry in vfio.iterdir())
    )
