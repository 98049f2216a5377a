"""Compile and run an MLP and a transformer, against the same JAX with hand-written shardings.

The forward pass and a training step, with data and tensor parallelism. 'different lines' counts the
lines in which the optimized HLO differs once instructions are numbered alike. With none, all else
is equal but for noise, and for tracing, which is part of 'trace and compile'. Bytes sent and memory
are per device and run, as `explain` reports them. The compiled programs are timed, without the
dispatch that `dispatch` measures.
"""

from __future__ import annotations

import jax

from ._hardware import published_peak
from ._measure import Bench
from ._models import cases, config_on, model_flops, sizes_for
from ._programs import BY_HAND, compare_programs, runner
from ._report import Row


def run(bench: Bench) -> None:
    sizes = sizes_for(bench)
    for case in cases(jax.devices(), sizes):
        programs = compare_programs(bench, case, rounds=1 if bench.tiny else 3)
        ours, by_hand = (runner(one, case.arguments, case.carries) for one in programs)
        row = bench.compare(f'{case.name}: time', ours, BY_HAND, by_hand)
        if case.name == 'transformer, training step':
            utilization(bench, row, model_flops(config_on(jax.device_count(), sizes)))


def utilization(bench: Bench, row: Row, flops: float) -> None:
    """The model's flops per second, as a fraction of what the devices can do."""
    kind = jax.devices()[0].device_kind
    peak = published_peak(kind)
    if peak is None:
        bench.leave_out('model flops utilization', f'no published peak is known for {kind}')
    else:
        fraction = flops / (row.figure * jax.device_count() * peak.flops)
        row.details['model flops utilization'] = f'{fraction:.1%}'
