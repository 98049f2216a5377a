"""Bandwidth of each collective, by size and group, against hand-written jax.shard_map.

Each collective runs in a `per_device` function: over all devices, between two neighbors, and
between two that are half of the devices apart. On the left of an expression the network is slow,
on the right it is fast.

The size is that of the unsharded array: what each device gets from an all-gather, and what each
puts into the others. Bandwidth is what a device sends, by the ring algorithms that `explain`
assumes, divided by the time of the call. Next to it stands what the manufacturer publishes for all
links of a chip together, if known; a ring along one axis of a torus uses two of its four or six.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import device_mesh, explain, make_sharding, per_device

from ._hardware import published_peak
from ._measure import Bench
from ._table import quantity

BY_HAND = 'jax.jit of hand-written jax.shard_map'


class Group(NamedTuple):
    """The groups of devices that run a collective."""

    name: str
    expression: str  # of an array [g, a, x]; the collective runs along a
    shape: tuple[int, int]  # number of groups, group size
    apart: bool  # whether the devices of a group are the major axis of the grid


def run(bench: Bench) -> None:
    n = jax.device_count()
    if n == 1:
        bench.leave_out('collectives', 'there is one device')
        return
    sizes = [2**12] if bench.tiny else [2**16, 2**22]
    if jax.default_backend() != 'cpu' and not bench.tiny:
        sizes += [2**26, 2**28]
    bench = dataclasses.replace(bench, seconds=bench.seconds / 2)  # there are many
    for group in groups(n):
        for kind in COLLECTIVES:
            for size in sizes:
                measure(bench, kind, group, size)


def groups(n: int) -> list[Group]:
    every = Group(f'all {n}', f'g a x -> g a{n} x', (1, n), apart=False)
    if n % 2 or n == 2:
        return [every]
    half = n // 2
    return [
        every,
        Group('2 neighbors', f'g a x -> g{half} a2 x', (half, 2), apart=False),
        Group('2 far apart', f'g a x -> a2 g{half} x', (half, 2), apart=True),
    ]


def all_reduce(x: Any) -> Any:
    return jax.lax.psum(x, 'a')


def all_gather(x: Any) -> Any:
    return jax.lax.all_gather(x, 'a', axis=2, tiled=True)


def reduce_scatter(x: Any) -> Any:
    return jax.lax.psum_scatter(x, 'a', scatter_dimension=2, tiled=True)


def all_to_all(x: Any) -> Any:
    return jax.lax.all_to_all(x, 'a', split_axis=2, concat_axis=2, tiled=True)


def permute(x: Any) -> Any:
    n = jax.lax.axis_size('a')
    return jax.lax.ppermute(x, 'a', [(i, (i + 1) % n) for i in range(n)])


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    'all-reduce': all_reduce,
    'all-gather': all_gather,
    'reduce-scatter': reduce_scatter,
    'all-to-all': all_to_all,
    'collective-permute': permute,
}


def measure(bench: Bench, kind: str, group: Group, n_bytes: int) -> None:
    n_groups, size = group.shape
    n_words = n_bytes // 4 // size * size
    shape = (n_groups, size, n_words // (size if kind == 'all-gather' else 1))
    body, spec = COLLECTIVES[kind], group.expression
    # per_device cannot tell replicated results from different ones: declare all as different
    ours = per_device(spec, out=spec, check_vma=False)(body)
    theirs, sharding = by_hand(body, group)
    report = explain(ours, jax.ShapeDtypeStruct(shape, np.float32))
    x, y = ones(shape, make_sharding(spec)), ones(shape, sharding)
    name = f'{kind} of {quantity(4 * n_words, "bytes")}, {group.name}'
    row = bench.compare(
        name + instead(report.collectives.counts, kind),
        lambda: jax.block_until_ready(ours(x)),
        BY_HAND,
        lambda: jax.block_until_ready(theirs(y)),
    )
    row.details['bandwidth'] = report.network_bytes / row.figure, 'bytes/s'
    peak = published_peak(jax.devices()[0].device_kind)
    if peak is not None:
        row.details['published'] = peak.bandwidth, 'bytes/s'


def instead(counts: Mapping[str, int], kind: str) -> str:
    """What the compiler emitted instead, if it did: libtpu an all-reduce for a reduce-scatter."""
    if counts == {kind: 1}:
        return ''
    return f' (as {", ".join(f"{n} {other}" for other, n in counts.items()) or "none"})'


def ones(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    shard = np.ones(sharding.shard_shape(shape), np.float32)
    return jax.make_array_from_callback(shape, sharding, lambda at: shard)


def by_hand(body: Callable[[Any], Any], group: Group) -> tuple[Any, NamedSharding]:
    """jit of shard_map over the same grid of devices, and the sharding over it."""
    n_groups, size = group.shape
    grid = device_mesh().devices.reshape((size, n_groups) if group.apart else group.shape)
    names = ('a', 'g') if group.apart else ('g', 'a')
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * 2)
    spec = P('g', 'a')
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding), sharding
