"""Strategy: how to compute one operation whose operands and result are sharded.

The axes of an operation have indices, like the letters of an einsum. A strategy shards at most one
index over each mesh axis. It first reshards the operands to match. If it shards a contracted index,
it reduces the partial sums afterwards. `parallelism` lists these strategies for an einsum, but is
too slow for a search over thousands of shardings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .costly_ops import CostlyOp, OpArray
from .names import AxisNames


class MeshAxis(NamedTuple):
    """A mesh axis without a name. Neighbors are `stride` devices apart in hardware order."""

    stride: int
    size: int


# the mesh axes over which each axis name is sharded
AxesByName: TypeAlias = Mapping[str, tuple[MeshAxis, ...]]
# maps the kind and the mesh axes of a collective to its time per byte of `OpCollective.bytes`
SecondsPerByte: TypeAlias = Callable[[str, Sequence[MeshAxis]], float]


class OpCollective(NamedTuple):
    """A collective that an operation needs.

    Attributes:
        role: what the collective carries: 'weights', 'gradients' or 'activations'.
        bytes: the bytes per device of its operand or its result, whichever is larger, times
            `OpArray.share`.
    """

    kind: str
    role: str
    axes: tuple[MeshAxis, ...]
    bytes: float


class Strategy(NamedTuple):
    """How to compute an operation, with the costs of one execution per device.

    Attributes:
        seconds: the time of compute and network, without overlap.
        n_devices: the number of devices that share the flops.
        extra_memory: the bytes of the resharded copies of operands.
    """

    seconds: float
    n_devices: int
    collectives: tuple[OpCollective, ...]
    extra_memory: float


def axes_of_shape(sizes: Sequence[int]) -> tuple[MeshAxis, ...]:
    """Returns the axes of a mesh with these axis sizes, slowest-varying first."""
    found: list[MeshAxis] = []
    stride = 1
    for size in reversed(sizes):
        found.append(MeshAxis(stride, size))
        stride *= size
    return tuple(reversed(found))


def sharded_axes(names: Sequence[AxisNames], axes: AxesByName) -> dict[MeshAxis, int]:
    """Maps each mesh axis to the position of the array axis that is sharded over it.

    `names` are the names of each array axis. If the names of two array axes share a mesh axis, it
    shards the first of the two.
    """
    found: dict[MeshAxis, int] = {}
    for i, axis_names in enumerate(names):
        for name in axis_names:
            for axis in axes[name]:
                found.setdefault(axis, i)
    return found


def fastest_strategy(
    op: CostlyOp, axes: AxesByName, flop_seconds: float, seconds_per_byte: SecondsPerByte
) -> Strategy:
    """Returns the fastest strategy. `flop_seconds` is the time of the flops on a single device."""
    arrays = [_ShardedArray(array, axes) for array in (*op.operands, op.out)]
    used = sorted({axis for array in arrays for axis in array.index_of})
    *operands, out = arrays
    strategies: list[Strategy] = []
    for chosen in itertools.product(*(_choices(axis, arrays, op) for axis in used)):
        op_sharding = {axis: i for axis, i in zip(used, chosen, strict=True) if i is not None}
        collectives: list[OpCollective] = []
        extra_memory = 0.0
        for operand in operands:
            n_bytes, found = operand.reshard(op_sharding)
            extra_memory += n_bytes
            collectives += found
        collectives += out.reduce(op_sharding)
        n_devices = _n_devices(op_sharding)
        seconds = flop_seconds / n_devices
        for one in collectives:
            seconds += one.bytes * seconds_per_byte(one.kind, one.axes)
        strategies.append(Strategy(seconds, n_devices, tuple(collectives), extra_memory))
    return min(strategies, key=lambda strategy: strategy.seconds)


def _choices(axis: MeshAxis, arrays: Sequence[_ShardedArray], op: CostlyOp) -> list[int | None]:
    """Lists the indices of `op` that may be sharded over `axis`. None means no index.

    If two of the `arrays` shard the same index over `axis`, it is the only choice, as in XLA.
    """
    sharded = [array.index_of[axis] for array in arrays if axis in array.index_of]
    for index in sharded:
        if sharded.count(index) > 1:
            return [index]
    return [*dict.fromkeys(sharded), *([None] if op.kind == 'contraction' else [])]


def _n_devices(axes: Iterable[MeshAxis]) -> int:
    return math.prod(axis.size for axis in axes)


class _ShardedArray:
    """An operand or the result of an operation, with the index sharded over each mesh axis."""

    def __init__(self, array: OpArray, axes: AxesByName):
        self.bytes = array.bytes
        self.share = array.share
        self.role = array.role
        self.indices = array.indices
        self.index_of = {
            axis: array.indices[i]
            for axis, i in sharded_axes(array.names, axes).items()
            if axis.size > 1
        }

    def collective(self, kind: str, axes: list[MeshAxis], n_bytes: float) -> OpCollective:
        return OpCollective(kind, self.role, tuple(axes), n_bytes * self.share)

    def reshard(self, op_sharding: Mapping[MeshAxis, int]) -> tuple[float, Sequence[OpCollective]]:
        """Returns the bytes per device of a resharded operand, and the collectives that reshard it.

        `op_sharding` maps each mesh axis to the index that is sharded over it during the operation.
        Slicing comes first, and is free. If slicing is enough, the bytes are 0.
        """
        new = {axis: index for axis, index in op_sharding.items() if index in self.indices}
        old = self.index_of
        gathered = [axis for axis in old if axis not in new]
        exchanged = [axis for axis, index in old.items() if new.get(axis, index) != index]
        if not gathered and not exchanged:
            return 0.0, ()
        local = self.bytes / _n_devices(new)
        found: list[OpCollective] = []
        if exchanged:
            n_bytes = local / _n_devices(gathered)
            found.append(self.collective('all-to-all', exchanged, n_bytes))
        if gathered:
            found.append(self.collective('all-gather', gathered, local))
        return local, found

    def reduce(self, op_sharding: Mapping[MeshAxis, int]) -> Sequence[OpCollective]:
        """Returns the collectives that reduce partial sums and reshard the result."""
        old = {axis: index for axis, index in op_sharding.items() if index in self.indices}
        new = self.index_of
        if old == new and len(old) == len(op_sharding):
            return ()
        partial = [axis for axis in op_sharding if axis not in old]  # for contracted indices
        sliced = [axis for axis in new if axis not in op_sharding]  # slicing needs no communication
        local = self.bytes / (_n_devices(old) * _n_devices(sliced))
        scattered = [axis for axis in partial if axis in new]
        added = [axis for axis in partial if axis not in new]
        found: list[OpCollective] = []
        if scattered:
            found.append(self.collective('reduce-scatter', scattered, local))
            local /= _n_devices(scattered)
        if added:
            found.append(self.collective('all-reduce', added, local))
        exchanged = [axis for axis, index in old.items() if new.get(axis, index) != index]
        gathered = [axis for axis in old if axis not in new]
        if exchanged:
            found.append(self.collective('all-to-all', exchanged, local))
        if gathered:
            n_bytes = local * _n_devices(gathered)
            found.append(self.collective('all-gather', gathered, n_bytes))
        return found
