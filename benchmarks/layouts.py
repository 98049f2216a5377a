"""one transformer in several layouts, and one matrix product in all: what each costs

The training step of docs/examples/transformer.py, each time with other expressions and nothing else
changed, beside data parallelism written by hand. Which layout to take depends on what is scarce.
In data parallelism every device has all weights, and sends a gradient for each. In tensor
parallelism it has its share of them and the whole batch, and sends activations in every layer. In
FSDP (fully sharded data parallelism) it has its share of both, and gathers the weights of a layer
where they are used. Network bytes and memory are those of one device in one step.

Then the product `x @ w` for every placement of x and of w over one or two of their axes, beside
the same product with both on one device; the compiler chooses where the result is. Simulated
devices share the cores of the machine and their network is its memory: times there say what a
layout computes twice, not what it would cost between chips. Timed are the compiled programs.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from einshard import EinshardError, sharded

from . import _handwritten
from ._handwritten import transformer
from ._harness import Bench
from ._models import config_on, floats, mesh_by_hand, sizes_for, state_shapes, token_shapes
from ._programs import compiled, host_values, record_report, runner

DATA_BY_HAND = 'data parallelism by hand'
ONE_DEVICE = 'the same product on one device'

# Every device has its share of every matrix, along an axis that nothing else cuts.
FSDP_WEIGHTS = transformer.Weights(
    embed='v d*',
    layers=transformer.Layers(
        attention_norm='* l d',
        q='l d* h e',
        k='l d* k e',
        v='l d* k e',
        o='l h e d*',
        mlp_norm='* l d',
        gate='l d* f',
        up='l d* f',
        down='l f d*',
    ),
    norm='* d',
    head='d* v',
)
# Neighbours share heads, hidden units and vocabulary; groups of them the other axis.
BOTH_WEIGHTS = transformer.Weights(
    embed='v d -> d* v2',
    layers=transformer.Layers(
        attention_norm='* l d',
        q='l d* h2 e',
        k='l d* k2 e',
        v='l d* k2 e',
        o='l h e d -> l d* h2 e',
        mlp_norm='* l d',
        gate='l d* f2',
        up='l d* f2',
        down='l f d -> l d* f2',
    ),
    norm='* d',
    head='d* v2',
)
DATA, BOTH = transformer.DATA, transformer.BOTH
LAYOUTS = {
    'data': DATA,
    'tensor': transformer.TENSOR,
    'data and tensor': BOTH,
    'FSDP': DATA._replace(weights=FSDP_WEIGHTS),
    'FSDP and tensor': BOTH._replace(weights=BOTH_WEIGHTS),
}


def run(bench: Bench) -> None:
    transformers(bench)
    products(dataclasses.replace(bench, seconds=bench.seconds / 4))  # there are many


def transformers(bench: Bench) -> None:
    devices = jax.devices()
    c = config_on(len(devices), sizes_for(bench))
    shapes = state_shapes(c), token_shapes(c)
    values = host_values(shapes)
    by_hand = compiled(partial(_handwritten.transformer_step, c, mesh_by_hand(devices, 1)), shapes)
    theirs = runner(by_hand, values, carries=True)
    for layout, placement in list(LAYOUTS.items())[: 1 if bench.tiny else None]:
        bench.progress(f'compiling: {layout}')
        try:
            ours = compiled(lambda p=placement: transformer.make_model(c, p).train_step, shapes)
        except EinshardError as error:  # it does not fit this number of devices
            bench.leave_out(layout, str(error).partition('\n')[0])
            continue
        case = f'transformer: {layout}'
        size: dict[str, Any] = {'case': case, 'measure': 'time', 'devices': len(devices)}
        call = runner(ours, values, carries=True)
        bench.compare(f'{case}: time', call, DATA_BY_HAND, theirs, **size)
        record_report(bench, case, ours, DATA_BY_HAND, by_hand, devices=len(devices))


def products(bench: Bench) -> None:
    n = jax.device_count()
    if n == 1:
        bench.leave_out('the product in all placements', 'it takes several devices')
        return
    if jax.process_count() > 1:
        bench.leave_out('the product in all placements', 'it takes one process')
        return
    side = 8 * n if bench.tiny else 512 if jax.default_backend() == 'cpu' else 8192
    shapes = floats(side, side), floats(side, side)
    values = host_values(shapes)
    alone = compiled(lambda: jax.jit(jnp.matmul), shapes)
    theirs = runner(alone, values, carries=False)
    placements = [*itertools.product(placements_of('b', 'x', n), placements_of('x', 'y', n))]
    for x_spec, w_spec in placements[:: 12 if bench.tiny else 1]:
        ours = compiled(partial(sharded(x_spec, w_spec), jnp.matmul), shapes)
        case = f'product: {short(x_spec)}, {short(w_spec)}'
        size: dict[str, Any] = {'case': case, 'measure': 'time', 'devices': n, 'side': side}
        call = runner(ours, values, carries=False)
        bench.compare(f'{case}: time', call, ONE_DEVICE, theirs, **size)
        record_report(bench, case, ours, ONE_DEVICE, alone, devices=n, side=side)


def placements_of(a: str, b: str, n: int) -> list[str]:
    """Expressions of a matrix over n devices: whole, cut along an axis, cut along both."""
    rights = [f'{n} {a} {b}', f'{a}{n} {b}', f'{a} {b}{n}']
    if n % 2 == 0 and n > 2:
        rights += [f'{a}{n // 2} {b}2', f'{a}2 {b}{n // 2}']
    return [f'{a} {b} -> {right}' for right in rights]


def short(expression: str) -> str:
    return expression.rpartition(' -> ')[2]
