"""a training step of the transformer on 1, 2, 4, ... devices: a fixed and a growing problem

Data parallel, each number of devices beside one. The fixed problem has the same batch on all
numbers of devices: the best ratio is 1 / devices. The batch of the growing problem is as many times
larger: the best ratio is 1. Simulated devices share the cores of the machine, so there the fixed
problem can only be faster by so much as one device leaves idle. Timed are the compiled programs.

`--plot FILE.svg` draws both as parts of the best there is.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from ._handwritten import transformer
from ._harness import Bench, Call
from ._models import config_on, device_counts, sizes_for, state_shapes, token_shapes
from ._plot import scaling_svg
from ._programs import compiled, host_values, runner

PROBLEMS = ('fixed', 'growing')


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--plot', metavar='FILE.svg', type=pathlib.Path, help='draw it there')


def run(bench: Bench) -> None:
    devices = jax.devices()
    counts = device_counts(len(devices))
    if jax.process_count() > 1 or len(counts) == 1:
        why = 'it takes one process' if jax.process_count() > 1 else 'there is one device'
        bench.leave_out('scaling', why)
        return
    if bench.tiny:
        counts = [counts[0], counts[-1]]
    calls: dict[tuple[int, int], Call] = {}  # on all devices the two problems are one
    for problem in PROBLEMS:
        for n in counts:
            bench.progress(f'compiling: {problem}, {n} devices')
            both = [(count, len(devices) if problem == 'fixed' else count) for count in (n, 1)]
            for count, batches in both:
                if (count, batches) not in calls:
                    calls[count, batches] = step(bench, devices[:count], batches)
            call, alone = (calls[key] for key in both)
            on = f'{n} device{"s" * (n > 1)}'
            case = f'{problem} problem, {on}'
            size: dict[str, Any] = {'case': case, 'measure': 'time', 'problem': problem}
            bench.compare(f'{case}: time', call, 'one device', alone, devices=n, **size)
    if bench.options.plot:
        bench.options.plot.write_text(scaling_svg(bench.rows), encoding='utf-8')


def step(bench: Bench, devices: Sequence[Any], batches: int) -> Call:
    """A call of the step, with the batches of so many devices."""
    c = config_on(batches, sizes_for(bench))
    shapes = state_shapes(c), token_shapes(c)
    placement = transformer.DATA if len(devices) > 1 else transformer.UNSHARDED
    made = compiled(lambda: transformer.make_model(c, placement, mesh=devices).train_step, shapes)
    return runner(made, host_values(shapes), carries=True)
