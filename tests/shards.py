"""Shards against numpy slices. Importing it starts no backend."""

import jax
import numpy as np

from einshard import device_mesh

# expression, and its device grid on eight devices: (array axis or None for replicas, count)
ON_EIGHT = [
    ('a b -> a8 b', [(0, 8)]),
    ('a b -> a b8', [(1, 8)]),
    ('a b -> a2 b4', [(0, 2), (1, 4)]),
    ('a b -> b4 a2', [(1, 4), (0, 2)]),
    ('a b -> 2 a4 b', [(None, 2), (0, 4)]),
    ('a b -> 2 a b4', [(None, 2), (1, 4)]),
    ('a b -> a2 2 b2', [(0, 2), (None, 2), (1, 2)]),
    ('a b -> a2 b2 a2', [(0, 2), (1, 2), (0, 2)]),
    ('a b -> 8 a b', [(None, 8)]),
]


def slice_of(full, grid, i):
    """The slice of an array on the i-th device of a row-major grid."""
    position = np.unravel_index(i, [count for _, count in grid])
    for (axis, count), part in zip(grid, position, strict=True):
        if axis is not None:
            full = np.split(full, count, axis)[part]
    return full


def check_shards(x, full, grid, devices=None):
    """Compares each shard of this process with its slice; `devices` are all devices by default."""
    devices = list(device_mesh().devices.flat if devices is None else devices)
    full = np.asarray(full)
    shards = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    assert x.shape == full.shape
    assert set(shards) == {d for d in devices if d.process_index == jax.process_index()}
    for device, shard in shards.items():
        expected = slice_of(full, grid, devices.index(device))
        assert shard.shape == expected.shape
        np.testing.assert_array_equal(shard, expected)
