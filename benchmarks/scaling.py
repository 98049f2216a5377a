"""Run a training step on 1, 2, 4, ... devices, against one: a fixed and a growing problem.

A transformer with data parallelism. The fixed problem has the same batch on every number of
devices: the best ratio is 1 / devices. The batch of the growing problem is proportional to the
devices: the best ratio is 1. Simulated devices share the cores of the machine, so there the fixed
problem gains only what one device leaves idle. The compiled programs are timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ._handwritten import transformer
from ._measure import Bench, Call
from ._models import config_on, device_counts, sizes_for, state_shapes, token_shapes
from ._programs import compiled, runner


def run(bench: Bench) -> None:
    devices = jax.devices()
    counts = device_counts(len(devices))
    if jax.process_count() > 1 or len(counts) == 1:
        why = 'it needs one process' if jax.process_count() > 1 else 'there is one device'
        bench.leave_out('scaling', why)
        return
    if bench.tiny:
        counts = [counts[0], counts[-1]]
    calls: dict[tuple[int, int], Call] = {}  # the problems share some
    for problem in ('fixed', 'growing'):
        for n in counts:
            batches = len(devices) if problem == 'fixed' else n
            for count in (n, 1):
                if (count, batches) not in calls:
                    bench.progress(f'compiling for {count} devices')
                    calls[count, batches] = step(bench, devices[:count], batches)
            name = f'{problem} problem, {n} device{"s" * (n > 1)}'
            bench.compare(name, calls[n, batches], 'one device', calls[1, batches])


def step(bench: Bench, devices: Sequence[Any], batches: int) -> Call:
    """A call of the training step with that many devices' batches."""
    c = config_on(batches, sizes_for(bench))
    shapes = state_shapes(c), token_shapes(c)
    placement = transformer.DATA if len(devices) > 1 else transformer.UNSHARDED
    model = transformer.make_model(c, placement, mesh=devices)
    return runner(compiled(lambda: model.train_step, shapes), shapes, carries=True)
