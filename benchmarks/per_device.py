"""Call per-device functions, against jax.jit of the same hand-written jax.shard_map.

Both functions are compiled beforehand and get the same arrays: ours on the canonical mesh, the
other on a mesh with the axis name that the body uses. Calls are timed as in `dispatch`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from einshard import einshard, per_device

from ._measure import Bench
from .dispatch import Setting, record_counts

BY_HAND = 'jax.jit of hand-written jax.shard_map'
SPLIT = 'a b -> a* b'


def run(bench: Bench) -> None:
    n_leaves = 4 if bench.tiny else 200
    for n_devices in sorted({1, jax.device_count()}):
        setting = Setting(n_devices)
        leaf = np.ones((n_devices, 8), np.float32)
        compare(bench, setting, 'one argument', leaf)
        compare(bench, setting, f'{n_leaves} leaves', {f'w{i}': leaf for i in range(n_leaves)})
    count(bench, Setting(jax.device_count()))


def summed(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + jax.lax.psum(leaf.sum(), 'a'), x)


def by_hand(setting: Setting, function: Any = summed) -> tuple[Any, NamedSharding]:
    """jit of shard_map over a mesh with one axis 'a', and the sharding over it."""
    mesh = Mesh(np.array(setting.devices), ('a',), axis_types=(AxisType.Auto,))
    split = PartitionSpec('a')
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(split,), out_specs=split)
    sharding = NamedSharding(mesh, split)
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding), sharding


def compare(bench: Bench, setting: Setting, name: str, value: Any) -> None:
    theirs, sharding = by_hand(setting)
    ours = per_device(SPLIT, out=SPLIT, mesh=setting.devices)(summed)
    x, y = einshard(value, SPLIT, mesh=setting.devices), jax.device_put(value, sharding)
    setting.compare(bench, name, lambda: ours(x), BY_HAND, lambda: theirs(y))


def count(bench: Bench, setting: Setting) -> None:
    narrow, wide = (np.ones((setting.n_devices, width), np.float32) for width in (8, 16))
    values = [narrow, narrow, wide, narrow, wide]
    ours = per_device(SPLIT, out=SPLIT, mesh=setting.devices)
    theirs = lambda function: by_hand(setting, function)[0]  # noqa: E731
    record_counts(bench, '', summed, ours, BY_HAND, theirs, values)
