"""Single arrays: the measurements that einshard has in common with its published version."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from ._harness import Bench, ratio_at_most
from ._table import quantity

EXPRESSION = 'a b -> a* b'


def measure(
    bench: Bench, place: Callable[[Any, str], Any], sharding: jax.sharding.Sharding
) -> None:
    """Rows for `place(x, EXPRESSION)`, whose result has this sharding."""
    n = jax.device_count()
    side = 8 if bench.tiny else 512
    shape = (n * -(-side // n), side)
    host, aligned = ones_at(16, shape), ones_at(0, shape)
    size: dict[str, int] = {'bytes': host.nbytes, 'devices': n}
    placed = jax.device_put(host, sharding)
    bench.compare(
        'array placed already',
        partial(place, placed, EXPRESSION),
        'jax.device_put to the sharding it has',
        partial(jax.device_put, placed, sharding),
        ratio_at_most(1 / 15),
        **size,
    )
    kinds = {
        'numpy array of {}': host,
        'numpy array of {}, aligned to 64': aligned,
        'jax array of {}': jax.device_put(host, jax.devices()[0]),
    }
    for kind, x in kinds.items():
        bench.compare(
            kind.format(size_text(host.nbytes)),
            lambda x=x: place(x, EXPRESSION).block_until_ready(),
            'jax.device_put, sharding made before',
            lambda x=x: jax.device_put(x, sharding).block_until_ready(),
            ratio_at_most(1.05),
            **size,
        )


def ones_at(offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array whose memory starts `offset` bytes after a multiple of 64.

    `device_put` to a CPU copies an array unless it starts at such a multiple, and then takes half
    as long; where numpy puts one is chance.
    """
    n_bytes = math.prod(shape) * 4
    memory = np.empty(n_bytes + 64, np.uint8)
    start = (offset - memory.ctypes.data) % 64
    ones = memory[start : start + n_bytes].view(np.float32).reshape(shape)
    ones[:] = 1
    return ones


def size_text(n_bytes: int) -> str:
    return quantity(n_bytes, 'bytes')
