"""One transformer in several layouts, and one matrix product in all layouts: what each costs.

The training step of docs/examples/transformer.py, each time with other expressions and nothing else
changed, against hand-written data parallelism. Which layout is best depends on what is scarce. With
data parallelism every device has all weights and sends a gradient for each. With tensor parallelism
it has a shard of the weights and the full batch, and sends activations in every layer. With FSDP
(fully sharded data parallelism) it has shards of both, and gathers a layer's weights where they
are used. Bytes sent and memory are per device and step.

Then the product `x @ w` for every placement of x and of w over one or two of their axes, against
the same product on one device; the compiler places the result. Simulated devices share the cores
and the memory of one machine: their times show what a layout computes twice, not what it would cost
on chips. The compiled programs are timed.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp

from einshard import EinshardError, sharded

from . import _handwritten
from ._handwritten import transformer
from ._measure import Bench
from ._models import config_on, floats, mesh_by_hand, sizes_for, state_shapes, token_shapes
from ._programs import communication_and_memory, compiled, runner

DATA_BY_HAND = 'hand-written data parallelism'
ONE_DEVICE = 'the same product on one device'

# Every matrix is sharded over all devices.
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
# Heads, hidden units and vocabulary are sharded over neighbors, the other axis over the rest.
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
    by_hand = compiled(partial(_handwritten.transformer_step, c, mesh_by_hand(devices, 1)), shapes)
    theirs = runner(by_hand, shapes, carries=True)
    for layout, placement in list(LAYOUTS.items())[: 1 if bench.tiny else None]:
        bench.progress(f'compiling: {layout}')
        try:
            ours = compiled(lambda p=placement: transformer.make_model(c, p).train_step, shapes)
        except EinshardError as error:  # it does not fit this number of devices
            bench.leave_out(layout, str(error).partition('\n')[0])
            continue
        call, details = runner(ours, shapes, carries=True), communication_and_memory(ours)
        bench.compare(f'transformer: {layout}', call, DATA_BY_HAND, theirs, details=details)


def products(bench: Bench) -> None:
    n = jax.device_count()
    if n == 1 or jax.process_count() > 1:
        why = 'it needs several devices' if n == 1 else 'it needs one process'
        bench.leave_out('the product in all layouts', why)
        return
    side = 8 * n if bench.tiny else 512 if jax.default_backend() == 'cpu' else 8192
    shapes = floats(side, side), floats(side, side)
    theirs = runner(compiled(lambda: jax.jit(jnp.matmul), shapes), shapes, carries=False)
    placements = [*itertools.product(placements_of('b', 'x', n), placements_of('x', 'y', n))]
    for x_spec, w_spec in placements[:: 12 if bench.tiny else 1]:
        ours = compiled(partial(sharded(x_spec, w_spec), jnp.matmul), shapes)
        call, details = runner(ours, shapes, carries=False), communication_and_memory(ours)
        name = f'product: {short(x_spec)}, {short(w_spec)}'
        bench.compare(name, call, ONE_DEVICE, theirs, details=details)


def placements_of(a: str, b: str, n: int) -> list[str]:
    """Expressions of a matrix over n devices: replicated, split along one axis, along both."""
    rights = [f'{n} {a} {b}', f'{a}{n} {b}', f'{a} {b}{n}']
    if n % 2 == 0 and n > 2:
        rights += [f'{a}{n // 2} {b}2', f'{a}2 {b}{n // 2}']
    return [f'{a} {b} -> {right}' for right in rights]


def short(expression: str) -> str:
    return expression.rpartition(' -> ')[2]
