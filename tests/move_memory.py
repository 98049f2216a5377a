"""Samples the memory of this process while a tree of 256 MiB moves: python tests/move_memory.py HOW

HOW is 'move', 'device_put' or 'jit' (one donated program), on the same devices, or 'others': by
`move` to other devices. Prints by how many MiB the resident memory grows.
"""

import os
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import move

PAGE = os.sysconf('SC_PAGE_SIZE')


def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * PAGE


def main(how):
    mesh = Mesh(np.array(jax.devices()[:8]), ('x',))
    there = Mesh(np.array(jax.devices()[8:]), ('x',)) if how == 'others' else mesh
    rows, columns = NamedSharding(mesh, P('x')), NamedSharding(there, P(None, 'x'))

    def run(tree):
        if how == 'device_put':
            return jax.device_put(tree, columns, donate=True)
        if how == 'jit':
            return jax.jit(lambda t: t, out_shardings=columns, donate_argnums=0)(tree)
        return move(tree, columns)

    def tree(size, n):
        make = jax.jit(lambda i: jax.numpy.full((size, size), i, 'float32'), out_shardings=rows)
        return [jax.block_until_ready(make(float(i))) for i in range(n)]

    jax.block_until_ready(run(tree(64, 2)))  # imports, and what runs first
    given = tree(2048, 16)
    start = peak = resident()
    running = True

    def sample():
        nonlocal peak
        while running:
            peak = max(peak, resident())
            time.sleep(0.0005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    moved = run(given)
    jax.block_until_ready(moved)
    running = False
    sampler.join()
    assert all(float(x[0, 0]) == i for i, x in enumerate(moved))
    print(round((peak - start) / 2**20))


if __name__ == '__main__':
    main(sys.argv[1])
