"""Place a pytree of 1 GiB from the host, against jax.device_put: time and peak memory.

The shardings of `jax.device_put` are made beforehand. A process's peak never goes down, so each
side gets fresh processes that place the tree once: Python, JAX, the tree on the host and, with
simulated devices, the tree on them. Then each process times both sides in turn.
"""

from __future__ import annotations

import json
import pathlib
import resource
import subprocess
import sys
from typing import Any

import jax
import numpy as np

from einshard import einshard, make_sharding

from ._measure import Bench, interleave
from ._table import quantity

PUT = 'one jax.device_put, shardings made beforehand'
EXPRESSION = 'a b -> a* b'
N_LEAVES = 64


def run(bench: Bench) -> None:
    n_bytes = 2**20 if bench.tiny else 2**30
    name = f'numpy tree of {quantity(n_bytes, "bytes")}'
    sides = ('ours', 'theirs') if bench.tiny else ('ours', 'theirs', 'theirs', 'ours')
    measured: dict[str, list[dict[str, Any]]] = {'ours': [], 'theirs': []}
    for i, side in enumerate(sides):
        bench.progress(f'fresh process {i + 1}, {side}')
        measured[side].append(in_a_process(side, n_bytes, 1 if bench.tiny else 3))
    every = [one for both in measured.values() for one in both]
    ours, theirs = ([time for one in every for time in one[key]] for key in ('ours', 'theirs'))
    bench.record(f'{name}: time', 's', ours, PUT, theirs)
    for key, where in (('host', 'host'), ('device', 'first device')):
        ours, theirs = ([one[key] for one in measured[side]] for side in ('ours', 'theirs'))
        if None in ours:
            bench.leave_out(f'peak memory of the {where}', 'these devices do not report it')
            continue
        bench.record(f'{name}: peak of the {where}', 'bytes', ours, PUT, theirs)


def in_a_process(side: str, n_bytes: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, '-m', 'benchmarks.memory', side, str(n_bytes), str(rounds)]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def place(side: str, n_bytes: int, rounds: int) -> dict[str, Any]:
    """The peaks after `side` has placed the tree, then the times of both sides."""
    n = jax.device_count()
    shape = (n, max(n_bytes // 4 // N_LEAVES // n, 1))
    tree = {f'w{i}': np.full(shape, i, np.float32) for i in range(N_LEAVES)}
    shardings = dict.fromkeys(tree, make_sharding(EXPRESSION))

    def ours() -> None:
        jax.block_until_ready(einshard(tree, EXPRESSION))

    def theirs() -> None:
        jax.block_until_ready(jax.device_put(tree, shardings))

    first, second = (ours, theirs) if side == 'ours' else (theirs, ours)
    first()
    # in kilobytes, on macOS in bytes
    scale = 1 if sys.platform == 'darwin' else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    device = (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use')
    second()
    our_times, their_times = interleave(ours, theirs, 0, rounds=rounds)
    return {'host': host, 'device': device, 'ours': our_times, 'theirs': their_times}


if __name__ == '__main__':
    print(json.dumps(place(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
