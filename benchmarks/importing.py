"""Import einshard after jax in fresh processes, against the import of jax before it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from ._measure import Bench

# jax.config rejects a number of devices once a backend is initialized. Counting them afterwards
# shows that the question did not initialize one.
PROGRAM = """
import time
start = time.perf_counter()
import jax
jax_done = time.perf_counter()
import einshard
einshard_done = time.perf_counter()
try:
    jax.config.update('jax_num_cpu_devices', 3)
    initialized = 0 if jax.device_count() == 3 else 1
except RuntimeError:
    initialized = 1
print(jax_done - start, einshard_done - jax_done, initialized)
"""


def run(bench: Bench) -> None:
    # a process takes a second or two, whatever the time per figure
    rounds = 1 if bench.tiny else max(5, int(bench.seconds * 5))
    with tempfile.TemporaryDirectory() as folder:
        bytecode = '' if bench.tiny else folder  # the files of Python's own folders will do
        if not bench.tiny:
            one_import(PROGRAM, bytecode)  # writes the bytecode, warms the file cache
        measured: list[tuple[float, float, int]] = []
        for i in range(rounds):
            bench.progress(f'fresh process {i + 1}')
            measured.append(one_import(PROGRAM, bytecode))
    theirs, ours, initialized = zip(*measured, strict=True)
    bench.record('import einshard, after import jax', 's', ours, 'import jax', theirs)
    bench.record('backends initialized by the import', 'backends', initialized)


def one_import(program: str, bytecode: str) -> tuple[float, float, int]:
    """Seconds for jax, seconds for einshard, and whether a backend was initialized.

    `bytecode` is a folder for Python's: without any, compiling is two thirds of the time. With ''
    Python uses its own folders.
    """
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ('XLA_FLAGS', 'JAX_NUM_CPU_DEVICES', 'PYTHONDONTWRITEBYTECODE')
    }
    environment |= {'JAX_PLATFORMS': 'cpu', 'PYTHONPYCACHEPREFIX': bytecode}
    done = subprocess.run(
        [sys.executable, '-c', program],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    jax_time, einshard_time, initialized = done.stdout.split()
    return float(jax_time), float(einshard_time), int(initialized)
