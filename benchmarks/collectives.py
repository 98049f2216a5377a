"""bandwidth of each collective, by size and by which devices take part

Each in a `per_device` function, beside the same `jax.shard_map` by hand: among all devices; between
two neighbours; and between two that are half of the devices apart. To the left of an expression
the network is slow, to the right it is fast.

The size is that of the array in full: what each device gets from an all-gather, and what each puts
into the others. Bandwidth is what a device sends, by the ring algorithms that `explain` counts by,
divided by the time of the call; where the maker publishes what all links of a chip send together,
it stands beside that. A ring along one axis of a torus uses two links of four or six.
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

from ._arrays import size_text
from ._hardware import link_bandwidth
from ._harness import Bench

BY_HAND = 'jax.jit of jax.shard_map by hand'
PUBLISHED = 'published, of all links together'


class Group(NamedTuple):
    """Devices that take part together: `parties` of them, in so many groups."""

    name: str
    expression: str  # of an array [g, a, x]; a is cut over those who take part
    shape: tuple[int, int]  # of the devices, in groups
    far: bool  # whether they are apart: then the first axis of the grid is theirs


def run(bench: Bench) -> None:
    n = jax.device_count()
    if n == 1:
        bench.leave_out('collectives', 'there is one device, and nobody to talk to')
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
    every = Group(f'all {n}', f'g a x -> g a{n} x', (1, n), far=False)
    if n % 2 or n == 2:
        return [every]
    half = n // 2
    return [
        every,
        Group('2 neighbours', f'g a x -> g{half} a2 x', (half, 2), far=False),
        Group('2 far apart', f'g a x -> a2 g{half} x', (half, 2), far=True),
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
    n_groups, parties = group.shape
    words = n_bytes // 4 // parties * parties  # what each device has a part of
    n_bytes, length = 4 * words, words // (parties if kind == 'all-gather' else 1)
    shape = (n_groups, parties, length)
    body, spec = COLLECTIVES[kind], group.expression
    # replicas are not told apart from values that differ: all results count as different
    ours = per_device(spec, out=spec, check_vma=False)(body)
    theirs, sharding = by_hand(body, group)
    report = explain(ours, jax.ShapeDtypeStruct(shape, np.float32))
    x, y = ones(shape, make_sharding(spec, n_dims=3)), ones(shape, sharding)
    case = f'{kind} of {size_text(n_bytes)}, {group.name}{instead(report.collectives.counts, kind)}'
    size: dict[str, Any] = {'case': case, 'bytes': n_bytes, 'devices': n_groups * parties}
    bench.compare(
        f'{case}: time',
        lambda: jax.block_until_ready(ours(x)),
        BY_HAND,
        lambda: jax.block_until_ready(theirs(y)),
        measure='time',
        **size,
    )
    sent = report.network_bytes
    bandwidth = [sent / bench.rows[-1]['figure']['median']]
    published = link_bandwidth(jax.devices()[0].device_kind)
    bench.record(
        f'{case}: bandwidth',
        'bytes/s',
        bandwidth,
        PUBLISHED if published else None,
        [published] if published else None,
        measure='bandwidth',
        **size,
    )


def instead(counts: Mapping[str, int], kind: str) -> str:
    """What the compiler took instead, if it did: libtpu an all-reduce for a reduce-scatter."""
    if counts == {kind: 1}:
        return ''
    return f' (as {", ".join(f"{n} {other}" for other, n in counts.items()) or "none"})'


def ones(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    shard = np.ones(sharding.shard_shape(shape), np.float32)
    return jax.make_array_from_callback(shape, sharding, lambda at: shard)


def by_hand(body: Callable[[Any], Any], group: Group) -> tuple[Any, NamedSharding]:
    """jit of shard_map over the same grid of devices, and the sharding over it."""
    n_groups, parties = group.shape
    grid = device_mesh().devices.reshape((parties, n_groups) if group.far else group.shape)
    names = ('a', 'g') if group.far else ('g', 'a')
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * 2)
    spec = P('g', 'a')
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding), sharding
