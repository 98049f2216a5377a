"""import einshard after import jax, in fresh processes, against the import of jax before it"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from ._harness import Bench, figure_at_most

# jax.config says whether a backend has been initialised: it refuses a number of devices then.
# That it was the import of einshard, and not the question, shows in the devices counted after.
PROGRAM = """
import time
start = time.perf_counter()
import jax
jax_done = time.perf_counter()
import einshard
einshard_done = time.perf_counter()
try:
    jax.config.update('jax_num_cpu_devices', 3)
    initialised = 0 if jax.device_count() == 3 else 1
except RuntimeError:
    initialised = 1
print(jax_done - start, einshard_done - jax_done, initialised)
"""


def run(bench: Bench) -> None:
    if bench.tiny:
        measure(bench, rounds=1)
        return
    with tempfile.TemporaryDirectory() as bytecode:
        bench.progress('fresh processes')
        one_import(PROGRAM, bytecode)  # writes it, reads the files from disk
        # a process takes a second or two, whatever the time for a figure
        measure(bench, max(5, int(bench.seconds * 5)), bytecode)


def measure(bench: Bench, rounds: int, bytecode: str | None = None) -> None:
    ours: list[float] = []
    theirs: list[float] = []
    backends: list[float] = []
    for i in range(rounds):
        bench.progress(f'fresh process {i + 1}')
        jax_time, einshard_time, initialised = one_import(PROGRAM, bytecode)
        theirs.append(jax_time)
        ours.append(einshard_time)
        backends.append(initialised)
    bench.record(
        'import einshard, after import jax',
        's',
        ours,
        'import jax, before it',
        theirs,
        figure_at_most(0.1),
    )
    bench.record(
        'backends initialised by the import', 'backends', backends, target=figure_at_most(0)
    )


def one_import(program: str, bytecode: str | None = None) -> tuple[float, float, int]:
    """Seconds for jax, seconds for einshard, and whether a backend was initialised.

    `bytecode` is a folder for it; without one, it is where Python has it, if anywhere.
    """
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    environment.pop('JAX_NUM_CPU_DEVICES', None)
    environment['JAX_PLATFORMS'] = 'cpu'
    if bytecode is not None:
        # as after any first import; without it two thirds of the time are Python's compiler
        environment.pop('PYTHONDONTWRITEBYTECODE', None)
        environment['PYTHONPYCACHEPREFIX'] = bytecode
    done = subprocess.run(
        [sys.executable, '-c', program],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    jax_time, einshard_time, initialised = done.stdout.split()
    return float(jax_time), float(einshard_time), int(initialised)
