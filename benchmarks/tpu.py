"""the perceptron and the transformer compiled for TPU slices; on a TPU, run as well

Without a TPU libtpu compiles for slices that are named, `--topology v5e:4x4`, also several times;
`--topology '2*v5e:4x4'` is two of them, joined by the data centre's network. Training steps of
einshard and of the same JAX by hand side by side: lines in which the optimised programs differ,
time to compile, collectives, and on each device the bytes that it sends in a step and the memory
that it needs. On a TPU, `placement`, `dispatch`, `programs`, `layouts`, `collectives` and `scaling`
follow.
"""

from __future__ import annotations

import argparse
import importlib.util

import jax

from einshard import topology

from . import collectives, dispatch, layouts, placement, programs, scaling
from ._harness import Bench
from ._models import MEDIUM, TINY, cases
from ._programs import compare_programs

ALSO = placement, dispatch, programs, layouts, collectives, scaling  # on a TPU


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--topology',
        metavar='NAME',
        action='append',
        help="a slice to compile for, 'v5e:16x16', or several, '2*v5e:4x4'; v5e:4x4 if left out",
    )


def run(bench: Bench) -> None:
    if importlib.util.find_spec('libtpu') is None:
        bench.leave_out('programs for TPU slices', 'libtpu compiles them, and is not installed')
    else:
        names = bench.options.topology or ['v5e:2x2' if bench.tiny else 'v5e:4x4']
        for name in names:
            compile_for(bench, name)
    if jax.default_backend() != 'tpu':
        bench.leave_out('runs', 'there is no TPU')
    elif bench.options.name != 'all':  # which has them anyway
        alone = (placement, dispatch) if jax.process_count() > 1 else ()  # are about one process
        for module in ALSO:
            if module not in alone:
                module.run(bench)


def compile_for(bench: Bench, name: str) -> None:
    many, _, one = name.rpartition('*')
    mesh = topology(one, n_slices=int(many or 1))
    devices = list(mesh.devices.flat)
    _, mlp, _, model = cases(devices, TINY if bench.tiny else MEDIUM)
    bench.progress(f'{name}: the first program, for which libtpu gets ready')
    mlp.by_hand().lower(*mlp.arguments).compile()
    size = {'topology': name, 'devices': len(devices)}
    for case in (mlp,) if bench.tiny else (mlp, model):
        compare_programs(bench, case, 1 if bench.tiny else 2, f'{name}, ', **size)
