"""Finds collectives after which each device keeps only a slice of the result.

If the SPMD partitioner finds no better way to reshard an array, it all-gathers the array, along
one dimension after the other, and each device keeps one slice: "involuntary full
rematerialization". XLA reports this only on standard error. After an all-reduce, a slice means that
a reduce-scatter would send half as much. XLA makes one of the two if nothing comes between them,
but never on CPU. Both show as slices whose offsets depend on the device number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .collective import Collective
from .graph import Graph, Node
from .groups import Groups
from .integers import Unknown, evaluate
from .opcodes import COPIES, ELEMENTWISE
from .queries import depends_on_device, done_of, has_no_numbers, moved_operand, strip
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


def _slices(graph: Graph, start: Node) -> list[_Slice] | None:
    """Finds the slices of an array, and of what is computed from it elementwise and by reductions.

    Returns None if the array is also used in other ways.
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
    """

    array: ArrayType
    dimension: int
    origin: Node
    parameter: int | None
    is_invariant: bool


def find_gather(graph: Graph, collective: Collective) -> Gather | None:
    """Describes an all-gather of one array. Returns None for other collectives."""
    node = collective.nodes[0]
    dimension = re.search(r'dimensions=\{(\d+)\}', node.attributes)
    is_gather = node.opcode in _GATHERS  # not a collective matmul
    if not is_gather or len(node.inputs) != 1 or dimension is None:
        return None
    origin = strip(node.inputs[0])
    return Gather(
        array=node.arrays[-1],
        dimension=int(dimension[1]),
        origin=origin,
        parameter=int(origin.op.operand_text) if origin.opcode == 'parameter' else None,
        is_invariant=node.loop is not None and node.loop not in origin.loops,
    )


@dataclass(frozen=True)
class Reshard:
    """An array that is all-gathered although each device keeps only a slice of it.

    Attributes:
        array: the gathered array.
        before, after: the block of the array that each device has, and the one that it keeps.
        gathers: its all-gathers, one after the other.
        slices: the operations that slice it.
    """

    array: ArrayType
    before: Blocks
    after: Blocks
    gathers: tuple[Node, ...]
    slices: tuple[Node, ...]


_GATHERS = ('all-gather', 'all-gather-start')


def find_reshards(graph: Graph, collectives: Sequence[Collective]) -> Mapping[str, Reshard]:
    """Finds arrays that are all-gathered although each device keeps only a slice.

    Returns them by the name of the first of their all-gathers.
    """
    groups_of = {
        node: c.device_groups or (tuple(range(c.n_devices)),)
        for c in collectives
        for node in c.nodes
        if node.opcode in _GATHERS and len(node.inputs) == 1  # not a collective matmul
    }
    found: dict[str, Reshard] = {}
    later: set[Node] = set()
    for c in collectives:
        if c.nodes and c.nodes[0] in groups_of and c.nodes[0] not in later:
            reshard = _find_reshard(graph, c, groups_of)
            if reshard is not None:
                found[c.name] = reshard
                later.update(reshard.gathers)
    return found


def _find_reshard(
    graph: Graph, first: Collective, groups_of: Mapping[Node, Groups]
) -> Reshard | None:
    """Describes the reshard that begins with an all-gather.

    Returns None if a device uses all of the array, several blocks or an unknown part of it, or if
    all devices use the same block. `groups_of` has the device groups of each all-gather.
    """
    start, outputs = first.nodes[0], set(graph.outputs)
    slices: list[tuple[Node, tuple[Node, ...]]] = []
    pending: list[tuple[Node, tuple[Node, ...]]] = [(start, (start,))]
    for _ in range(_MAX_USES):
        if not pending:
            break
        last, path = pending.pop()
        node = _finished(last)
        if node in outputs:
            return None
        for user in node.users:
            if user.opcode == 'dynamic-slice' and user.inputs[0] is node:
                slices.append((user, path))
            elif user in groups_of or moved_operand(user) is node:
                pending.append((user, (*path, user)))
            else:
                return None
    if pending or not slices:
        return None
    try:
        found = {_blocks(node, path, first.n_devices, groups_of) for node, path in slices}
    except Unknown:
        return None
    array, before, after = found.pop()
    if found or all(len(set(indices)) == 1 for indices in after):
        return None
    gathers = dict.fromkeys(node for _, path in slices for node in path if node in groups_of)
    return Reshard(array, before, after, tuple(gathers), tuple(node for node, _ in slices))


def _finished(node: Node) -> Node:
    """Returns the node that holds the result of a collective; other nodes as they are.

    On TPU, an asynchronous collective ends in the fusion that calls AsyncCollectiveDone.
    """
    for user in node.users:
        if '"AsyncCollectiveStart"' in user.attributes:
            ends = (end for element in user.users for end in element.users)
            return next((end for end in ends if '"AsyncCollectiveDone"' in end.attributes), node)
    return done_of(node)


def _blocks(
    node: Node, path: Sequence[Node], n_devices: int, groups_of: Mapping[Node, Groups]
) -> tuple[ArrayType, Blocks, Blocks]:
    """Returns the array that `node` slices, and its blocks before `path` and after the slice.

    Follows the corners of each device's shard along `path`. If the shards become blocks, the axes
    of the array are in the order of the shard, else raises `Unknown`.
    """
    shard: Any = np.array(path[0].inputs[0].array.shape)
    ndim = len(shard)
    if 0 in shard:
        raise Unknown
    # the first element of a shard, the last one along each axis, and the last one
    corners: Any = np.array([0 * shard, *np.diag(shard - 1), shard - 1])
    at: Any = np.array([corners] * n_devices)
    for moves in path:
        if moves in groups_of:
            dimension = int(re.findall(r'dimensions=\{(\d+)\}', moves.attributes)[0])
            size = moves.inputs[0].array.shape[dimension]
            for group in groups_of[moves]:
                at[[*group], :, dimension] += np.arange(len(group))[:, None] * size
        else:
            operand = moved_operand(moves)
            assert operand is not None
            at = _moved(at, moves, operand)
    first, steps, last = at[:, 0], at[:, 1:-1] - at[:, :1], at[:, -1]
    extents = last - first + 1
    if extents.min(initial=1) < 1 or (extents != extents[0]).any() or (first % extents).any():
        raise Unknown
    if prod(extents[0].tolist()) != prod(shard.tolist()):
        raise Unknown
    starts = [
        [int(evaluate(offset, device).reshape(-1)[0]) for offset in node.inputs[1:]]
        for device in range(n_devices)
    ]
    array = node.inputs[0].array
    axes = range(len(array.shape))
    before: Any = first // extents
    after: Any = np.array(starts) // np.array(node.array.shape)
    # on GPU and TPU, axes may have been transposed; those of size 1 may be anywhere
    to = [int(np.flatnonzero(step)[0]) if step.any() else -1 for step in steps[0]]
    free = [axis for axis in axes if axis not in to and len(axes) == ndim]
    order = [axis if axis >= 0 else free.pop(0) for axis in to if axis >= 0 or free]
    if sorted(order) == [*axes]:
        array = ArrayType(array.dtype, tuple(array.shape[axis] for axis in order))
        before, after = before[:, order], after[:, order]
    return array, _as_blocks(before), _as_blocks(after)


def _as_blocks(indices: Any) -> Blocks:
    return tuple(tuple(map(int, axis)) for axis in indices.T)


def _moved(at: Any, node: Node, operand: Node) -> Any:
    """Returns the positions, in a copied or reshaped array, of elements of its operand."""
    before, after = operand.array.shape, node.array.shape
    if node.opcode == 'transpose':
        (dimensions,) = re.findall(r'dimensions=\{([\d,]*)\}', node.attributes)
        return at[..., [int(axis) for axis in dimensions.split(',') if axis]]
    if node.opcode == 'bitcast':
        # an element stays at its place in memory, in which the layout orders the axes
        orders = [[*_minor_to_major(each)][::-1] for each in (operand, node)]
    elif node.opcode == 'reshape':
        orders = [[*range(len(before))], [*range(len(after))]]
    elif before == after:
        return at
    else:
        raise Unknown
    sizes = [
        [shape[axis] for axis in order]
        for shape, order in zip((before, after), orders, strict=True)
    ]
    if prod(sizes[0]) != prod(sizes[1]) or [*map(len, orders)] != [len(before), len(after)]:
        raise Unknown
    flat = np.ravel_multi_index(tuple(np.moveaxis(at[..., orders[0]], -1, 0)), tuple(sizes[0]))
    moved = np.stack(np.unravel_index(flat, tuple(sizes[1])), -1)
    return moved[..., np.argsort(orders[1])]


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
    slices = _slices(graph, done_of(node)) or []
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
