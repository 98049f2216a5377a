"""Writes the programs that the installed JAX compiles, for `tests/test_collectives.py` to read.

    cd tests && python -m hlo.write
    cd tests && JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m hlo.write gpu_8
    cd tests && python -m hlo.write v5e_16x16

The second needs JAX's CUDA plugin, but no GPU. The third takes minutes: it writes the train step
of llama.py with 32 and 64 layers, complete but compressed.

There is a file for each machine and partitioner, `<machine>-<partitioner>-<JAX>.txt`. That of JAX
0.10 for GPUs stays, because it writes collectives as pairs of -start and -done that newer versions
do not; it cannot compile for tpu7x. Of `backend_config`, which is half of a TPU program, the files
keep only trip counts and `is_sync`. Paths are relative to the repository.
"""

import lzma
import os
import re
import sys
from pathlib import Path

from conftest import jax  # which simulates CPU devices first, and lets libtpu be loaded
from hlo import llama, programs
from hlo.programs import partitioner, text_of

HERE = Path(__file__).parent
FORMS = (
    'product_scattered',
    'fully_sharded',
    'scanned',
    'ring',
    'transposed',
    'nested',
    'branches',
)
WRITTEN = {
    ('cpu_16', 'shardy'): FORMS,
    ('cpu_16', 'gspmd'): FORMS,
    ('v5e_4x4', 'shardy'): FORMS,
    ('v5e_4x4', 'gspmd'): FORMS,
    ('v5p_2x2x2', 'shardy'): ('product_scattered', 'summed_and_scattered'),
    ('tpu7x_2x2x1', 'shardy'): ('product_reduced', 'summed_and_scattered'),  # on SparseCores
    ('2_v5e_2x4', 'shardy'): ('data_parallel', 'tensor_parallel'),
    ('gpu_8', 'shardy'): FORMS,
}


def write(machine, partition, names):
    with partitioner(partition):
        text = '\n'.join(without_noise(text_of(name, machine)) for name in names)
    path = HERE / f'{machine}-{partition}-{jax.__version__}.txt'
    path.write_text(text)
    print(f'{len(text):>8} {path.name}')


def write_llama(layers):
    mesh = programs.mesh_of('v5e_16x16', ('data', 'tensor'))
    text = llama.text_of(mesh, llama.Config(layers=layers))
    path = HERE / f'v5e_16x16-llama{layers}-{jax.__version__}.txt.xz'
    path.write_bytes(lzma.compress(relative(text).encode(), preset=9))
    print(f'{path.stat().st_size:>8} {path.name}')


def relative(text):
    return text.replace(f'{HERE.parent.parent}{os.sep}', '')


def without_noise(text):
    text = relative(text)
    read = re.compile(r'"known_trip_count":\{"n":"\d+"\}|"is_sync":true')
    lines = []
    for line in text.splitlines():
        line, config, rest = line.partition(', backend_config={')
        kept = read.search(rest)
        lines.append(f'{line}{config}{kept[0]}}}' if kept else line)
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    for (machine, partition), names in WRITTEN.items():
        if machine in sys.argv[1:] or (not sys.argv[1:] and machine != 'gpu_8'):
            write(machine, partition, names)
    if 'v5e_16x16' in sys.argv[1:]:
        write_llama(32)
        write_llama(64)
