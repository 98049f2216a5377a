"""Place arrays and pytrees by an expression, against jax.device_put with ready shardings.

Both sides put the same arrays into the same shardings and wait for them (`block_until_ready`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np

from einshard import einshard, make_sharding

from ._measure import Bench
from ._table import quantity

EXPRESSION = 'a b -> a* b'
READY = 'jax.device_put, sharding made beforehand'
TOGETHER = 'one jax.device_put, shardings made beforehand'
LOOP = 'a loop of jax.device_put, shardings made beforehand'


def run(bench: Bench) -> None:
    arrays(bench)
    for n_leaves in (3, 10) if bench.tiny else (10, 1000):
        trees(bench, n_leaves)
    if bench.options.large and not bench.tiny:
        trees(bench, 10_000)


def arrays(bench: Bench) -> None:
    n, sharding = jax.device_count(), make_sharding(EXPRESSION)
    side = 8 if bench.tiny else 512
    shape = (n * -(-side // n), side)
    unaligned, aligned = ones_at(16, shape), ones_at(0, shape)
    placed = jax.device_put(unaligned, sharding)
    bench.compare(
        'array placed already',
        partial(einshard, placed, EXPRESSION),
        'jax.device_put to its sharding',
        partial(jax.device_put, placed, sharding),
    )
    size = quantity(unaligned.nbytes, 'bytes')
    for name, x in {
        f'numpy array of {size}': unaligned,
        f'numpy array of {size}, aligned to 64 bytes': aligned,
        f'jax array of {size}': jax.device_put(unaligned, jax.devices()[0]),
    }.items():
        bench.compare(
            name,
            lambda x=x: einshard(x, EXPRESSION).block_until_ready(),
            READY,
            lambda x=x: jax.device_put(x, sharding).block_until_ready(),
        )


def ones_at(offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array whose memory starts `offset` bytes after a multiple of 64.

    `device_put` to a CPU copies an array unless it starts at a multiple of 64, which takes twice
    as long; where numpy's own arrays start is random.
    """
    n_bytes = math.prod(shape) * 4
    memory = np.empty(n_bytes + 64, np.uint8)
    start = (offset - memory.ctypes.data) % 64
    ones = memory[start : start + n_bytes].view(np.float32).reshape(shape)
    ones[:] = 1
    return ones


def trees(bench: Bench, n_leaves: int) -> None:
    leaf = np.ones((jax.device_count(), 8), np.float32)
    names = [f'w{i}' for i in range(n_leaves)]
    shardings = dict.fromkeys(names, make_sharding(EXPRESSION))
    expressions = dict.fromkeys(names, EXPRESSION)
    on_host = {name: leaf.copy() for name in names}
    on_device = jax.device_put(on_host, jax.devices()[0])
    placed = jax.device_put(on_device, shardings)

    def ours(tree: Any, spec: Any) -> Any:
        return lambda: jax.block_until_ready(einshard(tree, spec))

    def put(tree: Any) -> Any:
        return lambda: jax.block_until_ready(jax.device_put(tree, shardings))

    def put_each(tree: Any) -> Any:
        return lambda: jax.block_until_ready(
            {name: jax.device_put(x, shardings[name]) for name, x in tree.items()}
        )

    for kind, tree in (('numpy', on_host), ('jax', on_device)):
        name = f'{n_leaves:,} {kind} leaves'
        bench.compare(name, ours(tree, EXPRESSION), TOGETHER, put(tree))
        bench.compare(f'{name}, against a loop', ours(tree, EXPRESSION), LOOP, put_each(tree))
    name = f'{n_leaves:,} jax leaves, an expression each'
    bench.compare(name, ours(on_device, expressions), TOGETHER, put(on_device))
    name = f'{n_leaves:,} leaves placed already'
    bench.compare(name, ours(placed, EXPRESSION), TOGETHER, put(placed))
