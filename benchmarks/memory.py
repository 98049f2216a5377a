"""a tree of 1 GiB from the host onto the devices, against jax.device_put

The shardings for `jax.device_put` are made before. A peak does not go down again, so each is that
of a fresh process which has placed the tree once: it has Python, JAX, the tree on the host and,
where the devices are simulated, the tree on them. Then the process times both in turn.
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
    sides = ('ours', 'theirs') if bench.tiny else ('ours', 'theirs', 'theirs', 'ours')
    measured: dict[str, list[dict[str, Any]]] = {'ours': [], 'theirs': []}
    for i, side in enumerate(sides):
        bench.progress(f'fresh process {i + 1}, {side}')
        measured[side].append(in_a_process(side, n_bytes, 1 if bench.tiny else 3))
    every = [one for both in measured.values() for one in both]
    size: dict[str, Any] = {key: every[0][key] for key in ('leaves', 'devices')}
    size['bytes'] = n_bytes
    ours, theirs = ([time for one in every for time in one[key]] for key in ('ours', 'theirs'))
    bench.record(f'{name}: time', 's', ours, PUT, theirs, ratio_at_most(1.05), **size)
    limit = ratio_at_most(1.02)
    for key, where in (('host', 'host'), ('device', 'the first device')):
        ours, theirs = ([one[key] for one in measured[side]] for side in ('ours', 'theirs'))
        if None in ours:
            bench.leave_out(f'peak memory of {where}', 'it is not known of these devices')
            continue
        bench.record(f'{name}: peak of {where}', 'bytes', ours, PUT, theirs, limit, **size)


def in_a_process(side: str, n_bytes: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, '-m', 'benchmarks._placing', side, str(n_bytes), str(rounds)]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)
