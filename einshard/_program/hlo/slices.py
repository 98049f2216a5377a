"""Finds collectives after which each device keeps only a slice of the result.

If the SPMD partitioner finds no better way to reshard an array, it all-gathers the array, and each
device keeps one slice: "involuntary full rematerialization". XLA reports this only on standard
error. After an all-reduce, a slice means that a reduce-scatter would send half as much. XLA makes
one of the two if nothing comes between them, but never on CPU. Both show as slices whose offsets
depend on the device number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .collective import Collective
from .graph import Graph, Node
from .integers import Unknown, depends_on_device, evaluate
from .queries import COPIES, ELEMENTWISE, done_of, has_no_numbers, strip
from .text import ArrayType

# blocks[dimension][device]: the index of the device's block along this dimension
Blocks: TypeAlias = tuple[tuple[int, ...], ...]


class _Slice(NamedTuple):
    """A dynamic-slice of an array, or of a value computed from it.

    Attributes:
        node: the dynamic-slice.
        axes: for each dimension of its operand, the dimension of the array.
        is_direct: whether only copies are between the array and the slice.
    """

    node: Node
    axes: Sequence[int]
    is_direct: bool


_MAX_USES = 200


def _slices(graph: Graph, start: Node, moves_only: bool) -> list[_Slice] | None:
    """Finds the slices of an array. Returns None if it is also used in other ways.

    Unless `moves_only`, also finds the slices of values that elementwise operations and reductions
    compute from it.
    """
    found: list[_Slice] = []
    outputs = set(graph.outputs)
    pending = [(start, tuple(range(len(start.array.shape))), True)]
    for _ in range(_MAX_USES):
        if not pending:
            return found
        node, axes, is_direct = pending.pop()
        if node in outputs:
            return None
        for user in node.users:
            moved = source_axes(user, node)
            shape = user.array.shape if user.arrays else ()
            if user.opcode == 'dynamic-slice' and user.inputs[0] is node:
                found.append(_Slice(user, axes, is_direct))
            elif moved is not None:
                # a transpose may keep XLA from merging the slice into the collective
                still_direct = is_direct and user.opcode != 'transpose'
                pending.append((user, tuple(axes[i] for i in moved), still_direct))
            elif moves_only:
                return None
            elif user.opcode in ELEMENTWISE and shape == node.array.shape:
                pending.append((user, axes, False))
            elif user.opcode == 'reduce' and user.inputs[0] is node:
                dimensions = re.search(r'dimensions=\{([\d,]*)\}', user.attributes)
                reduced = {int(i) for i in re.findall(r'\d+', dimensions[1] if dimensions else '')}
                kept = tuple(axis for i, axis in enumerate(axes) if i not in reduced)
                pending.append((user, kept, False))
            else:
                return None
    return None


def source_axes(node: Node, operand: Node) -> Sequence[int] | None:
    """Returns the operand axis of each result axis, or None if `node` may do more than transpose.

    On GPU, a bitcast to another layout may be a transpose.
    """
    if node.opcode not in COPIES or node.type.startswith('('):
        return None
    shape, before = node.array.shape, operand.array.shape
    axes: Sequence[int] = range(len(before))
    if node.opcode == 'transpose':
        (dimensions,) = re.findall(r'dimensions=\{([\d,]*)\}', node.attributes)
        return [int(axis) for axis in dimensions.split(',') if axis]
    if node.opcode == 'bitcast' and len(shape) == len(before):
        axis_of = dict(zip(_minor_to_major(node), _minor_to_major(operand), strict=True))
        axes = [axis_of[axis] for axis in axes]
    is_same = len(shape) == len(axes) and all(
        n == before[axis] for n, axis in zip(shape, axes, strict=True)
    )
    return axes if is_same else None


def _minor_to_major(node: Node) -> Sequence[int]:
    match = re.search(r'\{([\d,]+)', node.type)
    rank = len(node.array.shape)
    return [int(axis) for axis in match[1].split(',')] if match else range(rank)[::-1]


# --- gathers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """An all-gather of one array.

    Attributes:
        array: the result on each device.
        dimension: the dimension along which shards are concatenated.
        origin: where the operand comes from, before copies and reshapes.
        parameter: the number of the parameter if `origin` is a parameter of the program, or None.
        is_invariant: whether every iteration of a loop gathers the same array.
        kept: the block of the result that each device uses. None if a device uses several blocks
            or an unknown part, or if all devices use the same block.
    """

    array: ArrayType
    dimension: int
    origin: Node
    parameter: int | None
    is_invariant: bool
    kept: Blocks | None


def find_gather(graph: Graph, collective: Collective) -> Gather | None:
    """Describes an all-gather of one array. Returns None for other collectives."""
    node = collective.nodes[0]
    dimension = re.search(r'dimensions=\{(\d+)\}', node.attributes)
    is_gather = node.opcode in ('all-gather', 'all-gather-start')  # not a collective matmul
    if not is_gather or len(node.inputs) != 1 or dimension is None:
        return None
    origin = strip(node.inputs[0])
    return Gather(
        array=node.arrays[-1],
        dimension=int(dimension[1]),
        origin=origin,
        parameter=int(origin.op.operand_text) if origin.opcode == 'parameter' else None,
        is_invariant=bool(node.loops) and node.loops[-1] not in origin.loops,
        kept=_kept(graph, done_of(node), collective.n_devices),
    )


def _kept(graph: Graph, gathered: Node, n_devices: int) -> Blocks | None:
    slices = _slices(graph, gathered, moves_only=True)
    if not slices:
        return None
    try:
        used = {_blocks(found, n_devices) for found in slices}
    except Unknown:
        return None
    blocks = used.pop()
    differ = any(len(set(indices)) > 1 for indices in blocks)
    return blocks if not used and differ else None


def _blocks(found: _Slice, n_devices: int) -> Blocks:
    """Returns the blocks of the array that each device uses, or raises `Unknown`."""
    blocks: dict[int, tuple[int, ...]] = {}
    offsets = found.node.inputs[1:]
    for axis, offset, size in zip(found.axes, offsets, found.node.array.shape, strict=True):
        starts = [int(evaluate(offset, device).reshape(-1)[0]) for device in range(n_devices)]
        blocks[axis] = tuple(start // size for start in starts)
    return tuple(blocks[axis] for axis in range(len(blocks)))


def padded_shard(node: Node) -> Node | None:
    """Returns the shard of an array that is zero elsewhere, or None for other arrays.

    XLA for TPU gathers small shards by an all-reduce of such arrays.
    """
    padded = strip(node)
    if padded.opcode != 'dynamic-update-slice' or not has_no_numbers(padded.inputs[0]):
        return None
    return padded.inputs[1] if any(map(depends_on_device, padded.inputs[2:])) else None


# --- sums ---------------------------------------------------------------------------------------


class SlicedSum(NamedTuple):
    """An all-reduce after which each device keeps only a slice of the result."""

    parts: tuple[tuple[int, int], ...]  # (dimension, number of slices) for each sliced dimension
    is_direct: bool  # whether only copies are between the all-reduce and the slice


def find_sliced_sum(graph: Graph, collective: Collective) -> SlicedSum | None:
    """Returns None unless each device uses only one slice of an all-reduced array."""
    node = collective.nodes[0]
    if len(node.inputs) != 1 or node.type.startswith('('):
        return None
    shape = node.array.shape
    found: set[tuple[tuple[int, int], ...]] = set()
    slices = _slices(graph, done_of(node), moves_only=False) or []
    for one in slices:
        offsets = one.node.inputs[1:]
        parts: dict[int, int] = {}
        for axis, offset, size in zip(one.axes, offsets, one.node.array.shape, strict=True):
            if 0 < size < shape[axis]:
                if not depends_on_device(offset):
                    return None
                parts[axis] = shape[axis] // size
        found.add(tuple(sorted(parts.items())))
    if len(found) != 1 or () in found:
        return None
    return SlicedSum(found.pop(), all(one.is_direct for one in slices))
