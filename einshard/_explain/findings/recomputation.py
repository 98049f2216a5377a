"""Notes matmuls that `jax.checkpoint` computes again although their results fit in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ..._program.jaxpr.flops import eqn_flops
from ..._text import format_bytes, format_flops, short_source
from ..report_rows import Finding
from .facts import Facts

_PRODUCTS = ('dot_general', 'conv_general_dilated')

_MIN_SHARE = 0.05  # of the flops of a step
_RESERVE = 0.1  # of the memory: buffers are padded, and fragment


def recomputed_products(facts: Facts) -> Iterator[Finding]:
    """Notes recomputed matmuls. Their results, saved, must fit in the memory that is free.

    A laxer policy cannot be tried: in a step that is traced, the derivative of the checkpointed
    function is already split into a forward pass and one that recomputes.
    """
    memory, mesh = facts.memory, facts.mesh
    if not facts.axes or facts.traced is None or mesh is None:
        return
    if memory is None or memory.capacity is None:
        return
    compiled: Counter[str] = Counter()
    for row in facts.products:
        compiled[row.source or ''] += row.flops
    flops, expected = Counter[str](), Counter[str]()
    sizes = {True: 0, False: 0}  # by whether the matmul has batch axes
    for op in facts.traced.ops:
        if op.primitive not in _PRODUCTS or not op.arrays_out:
            continue
        line, runs = op.site.source, op.site.runs or 1
        result = facts.traced.values[op.arrays_out[0]]
        # without a shard_map, shapes are those of all devices
        n = 1 if op.site.n_shards else facts.n_devices
        n_flops = eqn_flops(op.eqn) * runs // n
        expected[line] += n_flops
        if not op.site.is_recomputed:
            continue
        flops[line] += n_flops
        sharded = {} if op.site.n_shards else mesh.shape
        names = {name for axis in facts.axes[op.arrays_out[0]] for name in axis.mesh_axes}
        n_shards = math.prod(sharded.get(name, 1) for name in names)
        is_dot = op.primitive == 'dot_general'
        has_batch = is_dot and any(op.eqn.params['dimension_numbers'][1])
        sizes[has_batch] += result.bytes * runs // n_shards
    # XLA may have merged them with those of the forward pass
    flops = {line: n for line, n in flops.items() if compiled[line] > 0.99 * expected[line]}
    total, again = sum(compiled.values()), sum(flops.values())
    free = facts.free_memory - _RESERVE * memory.capacity
    fits_all = sum(sizes.values()) <= free
    if not again or again < _MIN_SHARE * total or not (fits_all or 0 < sizes[False] <= free):
        return
    policy = 'dots_saveable' if fits_all else 'dots_with_no_batch_dims_saveable'
    size = sum(sizes.values()) if fits_all else sizes[False]
    largest = max(flops, key=lambda line: flops[line])
    yield Finding(
        'recomputation',
        f'jax.checkpoint computes matmuls again, most in {short_source(largest)}: '
        f'{format_flops(again)} of {format_flops(total)} on each device in one run. '
        f'{format_bytes(int(facts.free_memory))} of memory are free, and the results of '
        f'{"these matmuls" if fits_all else "those without batch axes"} take about '
        f'{format_bytes(size)}: the policy jax.checkpoint_policies.{policy} keeps them (not tried)',
        largest,
        size,
    )
