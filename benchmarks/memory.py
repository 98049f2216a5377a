"""a tree of 1 GiB from the host onto the devices, against jax.device_put

The shardings for `jax.device_put` are made before. Times are of interleaved rounds in one process.
A peak does not go down again, so each peak is that of a process of its own, which has Python, JAX,
the tree on the host and, where the devices are simulated, the tree on them.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

from ._arrays import size_text
from ._harness import Bench, ratio_at_most

PUT = 'one jax.device_put, a sharding for each leaf made before'


def run(bench: Bench) -> None:
    n_bytes = 2**20 if bench.tiny else 2**30
    name = f'numpy tree of {size_text(n_bytes)}'
    rounds = 1 if bench.tiny else 5
    bench.progress('time, in its own process')
    time = measure('both', n_bytes, rounds)
    size: dict[str, Any] = {'bytes': n_bytes, 'leaves': time['leaves'], 'devices': time['devices']}
    limit = ratio_at_most(1.05)
    bench.record(f'{name}: time', 's', time['ours'], PUT, time['theirs'], limit, **size)
    peaks: dict[str, list[dict[str, Any]]] = {'ours': [], 'theirs': []}
    for i in range(1 if bench.tiny else 2):
        for side in ('ours', 'theirs') if i % 2 == 0 else ('theirs', 'ours'):
            bench.progress(f'peak, fresh process {i + 1}, {side}')
            peaks[side].append(measure(side, n_bytes, 1))
    limit = ratio_at_most(1.02)
    for key, where in (('host', 'host'), ('device', 'the first device')):
        ours, theirs = ([peak[key] for peak in peaks[side]] for side in ('ours', 'theirs'))
        if None in ours:
            bench.leave_out(f'peak memory of {where}', 'it is not known of these devices')
            continue
        bench.record(f'{name}: peak of {where}', 'bytes', ours, PUT, theirs, limit, **size)


def measure(side: str, n_bytes: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, '-m', 'benchmarks._placing', side, str(n_bytes), str(rounds)]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)
