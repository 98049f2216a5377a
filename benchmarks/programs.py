"""a perceptron and a transformer, against the same JAX with its shardings by hand

Forward and a training step, data and tensor parallel. `differences` counts the lines in which the
optimised programs differ, after instructions are numbered alike; with none, all else is the same
but for noise, and for the tracing that compile time contains. Memory and network bytes are those
of one device and one run, as `explain` reports them. Timed are the compiled programs; what a call
costs besides is told under `dispatch`.
"""

from __future__ import annotations

import jax

from ._hardware import peak_flops
from ._harness import Bench
from ._models import Case, cases, config_on, model_flops, sizes_for
from ._programs import BY_HAND, Made, compare_programs, host_values, record, runner
from ._schema import Row


def run(bench: Bench) -> None:
    devices = jax.devices()
    sizes = sizes_for(bench)
    for case in cases(devices, sizes):
        rounds = 1 if bench.tiny else 3
        made = compare_programs(bench, case, rounds, devices=len(devices))
        row = time_calls(bench, case, made, len(devices))
        if case.name == 'transformer, training step':
            utilisation(bench, row, model_flops(config_on(len(devices), sizes)))


def time_calls(bench: Bench, case: Case, made: tuple[Made, Made], n_devices: int) -> Row:
    values = host_values(case.arguments)
    # a call of the function would compile it once more
    programs = (Made(one.compiled, one.compiled) for one in made)
    ours, by_hand = (runner(one, values, case.carries) for one in programs)
    name = f'{case.name}: time'
    size: dict[str, str | int] = {'case': case.name, 'measure': 'time', 'devices': n_devices}
    return bench.compare(name, ours, BY_HAND, by_hand, **size)


def utilisation(bench: Bench, row: Row, flops: float) -> None:
    """The model's flops a second in a row of times, in parts of what the devices can do."""
    kind, n_devices = jax.devices()[0].device_kind, jax.device_count()
    peak = peak_flops(kind)
    if peak is None:
        bench.leave_out('model flops utilisation', f'no published peak is known of {kind}')
        return
    times = [spread['median'] for spread in (row['figure'], row['other']) if spread]
    both = [flops / (time * n_devices * peak) for time in times]
    case = str(row['parameters']['case'])
    size = {'devices': n_devices}
    record(bench, case, 'utilisation', 'of the peak', *both, compared_with=BY_HAND, **size)
