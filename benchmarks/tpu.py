"""Compile the MLP and the transformer for TPU slices; on a TPU, run the other benchmarks too.

Without a TPU, libtpu compiles for the slices given by `--topology v5e:4x4`, which may be repeated;
`--topology '2*v5e:4x4'` is two slices joined by the data-center network. Training steps with
einshard and with hand-written JAX: compile time and differing lines, collectives, and the bytes
that each device sends in a step and the memory that it needs.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import jax

from einshard import topology

from . import collectives, dispatch, layouts, placement, programs, scaling
from ._measure import Bench
from ._models import MEDIUM, TINY, cases
from ._programs import compare_programs, compiled

FOLLOWING = placement, dispatch, programs, layouts, collectives, scaling  # on a TPU
ONE_PROCESS = placement, dispatch


def run(bench: Bench) -> None:
    if importlib.util.find_spec('libtpu') is None:
        bench.leave_out('programs for TPU slices', 'libtpu is not installed')
    else:
        for name in bench.options.topology or ['v5e:2x2' if bench.tiny else 'v5e:4x4']:
            compile_for(bench, name)
    if jax.default_backend() != 'tpu':
        bench.leave_out('runs on a TPU', 'there is no TPU')
    elif bench.options.name != 'all':  # which runs them anyway
        for module in FOLLOWING:
            if jax.process_count() == 1 or module not in ONE_PROCESS:
                name = module.__name__.rpartition('.')[2]
                module.run(dataclasses.replace(bench, name=name))


def compile_for(bench: Bench, name: str) -> None:
    many, _, one = name.rpartition('*')
    mesh = topology(one, n_slices=int(many or 1))
    _, mlp, _, transformer = cases(list(mesh.devices.flat), TINY if bench.tiny else MEDIUM)
    bench.progress(f'{name}: starting libtpu')
    compiled(mlp.by_hand, mlp.arguments)
    for case in (mlp,) if bench.tiny else (mlp, transformer):
        compare_programs(bench, case, 1 if bench.tiny else 2, f'{name}, ')
