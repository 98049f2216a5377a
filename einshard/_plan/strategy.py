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

from .._program.cost.contraction import Step, reduce, reshard, restrict
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
_Step: TypeAlias = Step[MeshAxis, int]


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
    best = math.inf, {}, []
    for chosen in itertools.product(*(_choices(axis, arrays, op) for axis in used)):
        op_sharding = {axis: i for axis, i in zip(used, chosen, strict=True) if i is not None}
        seconds = flop_seconds / _n_devices(op_sharding)
        if seconds >= best[0]:  # collectives only add to it
            continue
        steps = [(array, step) for array in operands for step in array.reshard(op_sharding)]
        steps += [(out, step) for step in out.reduce(op_sharding)]
        for array, step in steps:
            seconds += array.step_bytes(step) * seconds_per_byte(step.kind, step.axes)
        if seconds < best[0]:
            best = seconds, op_sharding, steps
    seconds, op_sharding, steps = best
    resharded = dict.fromkeys(array for array, _ in steps if array is not out)
    return Strategy(
        seconds,
        _n_devices(op_sharding),
        tuple(
            OpCollective(step.kind, array.role, step.axes, array.step_bytes(step))
            for array, step in steps
        ),
        sum(one.bytes / _n_devices(restrict(op_sharding, one.indices)) for one in resharded),
    )


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
    n = 1  # a loop takes half the time of `math.prod`, in the inner loop of the search
    for axis in axes:
        n *= axis.size
    return n


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

    def reshard(self, op_sharding: Mapping[MeshAxis, int]) -> list[_Step]:
        """Returns the collectives that reshard an operand. Slicing comes first, and is free.

        `op_sharding` maps each mesh axis to the index that is sharded over it during the operation.
        """
        old, new = self.index_of, restrict(op_sharding, self.indices)
        if old.items() <= new.items():
            return []
        return reshard(old | new | old, new, exchange_first=True)

    def reduce(self, op_sharding: Mapping[MeshAxis, int]) -> list[_Step]:
        """Returns the collectives that reduce partial sums and reshard the result."""
        new, product = self.index_of, restrict(op_sharding, self.indices)
        if product == new and len(product) == len(op_sharding):
            return []
        partial = [axis for axis in op_sharding if axis not in product]  # for contracted indices
        # slicing comes first
        product |= {axis: index for axis, index in new.items() if axis not in op_sharding}
        steps, summed = reduce(product, partial, new)
        return steps + reshard(summed, new, exchange_first=True)

    def step_bytes(self, step: _Step) -> float:
        return self.bytes / _n_devices(step.block) * self.share
