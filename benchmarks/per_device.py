"""calls of a per-device function, against jax.jit of the same jax.shard_map by hand

Both are compiled before, and are given the same arrays: ours on the one mesh, the others on a mesh
with the names that the body uses. How calls are timed is told in benchmarks/dispatch.py, and on one
device the limit is that of `sharded`, whose frame it is.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from einshard import einshard, per_device

from ._counting import count_calls
from ._harness import Bench, ratio_at_most
from .dispatch import ONE_DEVICE, Setting

BY_HAND = 'jax.jit of jax.shard_map by hand'
SPLIT = 'a b -> a* b'
SEVERAL = ratio_at_most(1.05)


def run(bench: Bench) -> None:
    for n_devices in sorted({1, jax.device_count()}):
        setting = Setting(n_devices)
        one_argument(bench, setting)
        parameter_tree(bench, setting, 4 if bench.tiny else 200)
    count(bench, Setting(jax.device_count()))


def summed(x: Any) -> Any:
    return x + jax.lax.psum(x.sum(), 'a')


def each_summed(x: Any) -> Any:
    return jax.tree.map(summed, x)


def by_hand(function: Any, setting: Setting) -> tuple[Any, NamedSharding]:
    """jit of shard_map over a mesh with one axis 'a', and the sharding over it."""
    mesh = Mesh(np.array(setting.devices), ('a',), axis_types=(AxisType.Auto,))
    split = PartitionSpec('a')
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(split,), out_specs=split)
    sharding = NamedSharding(mesh, split)
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding), sharding


def one_argument(bench: Bench, setting: Setting) -> None:
    compare(bench, setting, 'one argument', summed, np.ones((setting.n_devices, 8), np.float32))


def parameter_tree(bench: Bench, setting: Setting, n_leaves: int) -> None:
    leaf = np.ones((setting.n_devices, 8), np.float32)
    tree = {f'w{i}': leaf for i in range(n_leaves)}
    compare(bench, setting, f'{n_leaves} leaves', each_summed, tree)


def compare(bench: Bench, setting: Setting, name: str, function: Any, x: Any) -> None:
    theirs, sharding = by_hand(function, setting)
    ours = per_device(SPLIT, out=SPLIT, mesh=setting.devices)(function)
    again, _ = by_hand(lambda x: function(x), setting)
    placed = jax.device_put(x, sharding)
    calls = setting.calls(theirs, placed)
    limit = ONE_DEVICE if setting.n_devices == 1 else SEVERAL
    for what, other, array, target in (
        ('jax.jit beside itself', again, placed, None),
        (name, ours, einshard(x, SPLIT, mesh=setting.devices), limit),
    ):
        n_calls = setting.calls_in_a_loop
        label = f'{what}, {setting.on}' if other is ours else f'{what}, {name}, {setting.on}'
        called = setting.calls(other, array)
        bench.compare(label, called, BY_HAND, calls, target, n_calls, devices=setting.n_devices)


def count(bench: Bench, setting: Setting) -> None:
    """Traces and compilations over a few calls, of two shapes."""
    theirs = count_calls(summed, lambda f: by_hand(f, setting)[0], values(setting))
    decorate = per_device(SPLIT, out=SPLIT, mesh=setting.devices)
    ours = count_calls(summed, decorate, values(setting))
    for what, mine, other in zip(('traces', 'programs'), ours, theirs, strict=True):
        bench.record(
            f'{what} of {len(values(setting))} calls',
            what,
            [mine],
            BY_HAND,
            [other],
            ratio_at_most(1.0),
            devices=setting.n_devices,
        )


def values(setting: Setting) -> list[np.ndarray]:
    narrow, wide = (np.ones((setting.n_devices, width), np.float32) for width in (8, 16))
    return [narrow, narrow, wide, narrow, wide]
