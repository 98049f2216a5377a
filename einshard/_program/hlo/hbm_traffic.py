"""Computes a lower bound on the bytes that a program reads from and writes to HBM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from .graph import Graph, Node
from .integers import Unknown, count_trips, evaluate, find_counter
from .queries import between, fold, reached
from .text import ArrayType, LineErrors

_OTHER_MEMORY = re.compile(r'\{[^}]*S\([1-9]')  # host memory, or the VMEM of a TPU


def is_in_hbm(type_: str) -> bool:
    return _OTHER_MEMORY.search(type_) is None


def min_hbm_bytes(graph: Graph) -> int:
    """Counts the bytes of arguments read from HBM and of results written to it, per device.

    Each byte counts once. If an array is only sliced, only the slices count. Not counted: results
    that are updated in place, and reads of unknown size (by a gather, in a branch of a conditional,
    or in a Pallas kernel). A loop with an unknown trip count counts as one iteration.
    """
    total = sum(min_bytes_read(graph).values())
    for node in graph.outputs:
        if is_in_hbm(node.type) and _is_written(node):
            total += node.array.bytes
    return total


def min_bytes_read(graph: Graph) -> dict[int, int]:
    """Returns the part of `min_hbm_bytes` of each argument, by parameter number."""
    reads = _Reads(graph)
    return {
        number: _min_covered_bytes(node.array, reads.of(node))
        for number, node in graph.parameters.items()
        if is_in_hbm(node.type)
    }


# --- results ------------------------------------------------------------------------------------


def _is_written(node: Node) -> bool:
    """Whether a result is a new array. False if it is an argument, updated in place, or unknown."""
    while True:
        # outside of a fusion, a convert or copy writes an array
        is_move = node.opcode in ('convert', 'copy') and node.scope.fusion is not None
        if is_move or node.opcode in _IN_PLACE:
            node = node.inputs[0]
        else:
            break
    is_call = node.opcode == 'element' and node.op.opcode == 'custom-call'
    aliased = 'output_to_operand_aliasing' in node.attributes
    return node.opcode not in ('branch', 'parameter') and not is_call and not aliased


# operations whose result may be in the place of the first operand
_IN_PLACE = ('bitcast', 'dynamic-update-slice', 'exit', 'phi', 'scatter')


class Copied(NamedTuple):
    """A donated argument that is copied, though a result only updates slices of it.

    Attributes:
        output, parameter: the numbers of the result and the argument.
        update: the first update of a slice.
        bytes: those that the copies write to HBM in one run, per device.
    """

    output: int
    parameter: int
    update: Node
    bytes: int


def find_copied(graph: Graph) -> Iterator[Copied]:
    """Finds results that reuse a donated argument, but get its numbers by a copy.

    XLA copies a cache if it cannot order all reads of the old numbers before the update, if the
    update needs another layout, if a loop gets the cache as `xs` and returns it as `ys`, or if the
    result is in the place of another donated argument. On TPU, it may also update a copy in VMEM,
    and write all of it back. Or the program asks for it, though an update of a slice would do; see
    `_writes_all`.
    """
    donated = {
        graph.parameters[number]: number
        for number in graph.program.aliases.values()
        if number in graph.parameters
    }
    for output, place in graph.program.aliases.items():
        end = graph.outputs[output]
        start = origin if (origin := _updated(end)) in donated else graph.parameters.get(place)
        if start is None or start is end or not is_in_hbm(start.type):
            continue
        path = between(start, end)
        updated = {  # whether the new numbers of each update are from the argument, too
            node: node.opcode == 'dynamic-update-slice' and node.inputs[1] in path
            for node in graph.nodes
            if node in path and node.opcode in ('dynamic-update-slice', 'scatter')
        }
        written, update = (
            0,
            next((node for node, is_moved in updated.items() if not is_moved), None),
        )
        if update is None and _writes_all(origin, start):
            written, update = start.array.bytes, origin
        elif update is None or update.inputs[0] not in path:
            continue
        in_place = {node.scope.fusion for node in updated if node.scope.fusion is not None}
        for node in path:
            if updated.get(node):
                n = prod(node.inputs[1].array.shape) * _n_runs(node)
                written += (
                    start.array.bytes * n // prod(start.array.shape)
                )  # XLA widens bf16 on CPU
            elif node.opcode in _COPYING and is_in_hbm(node.type):
                fusion = node.scope.fusion
                is_result = any(user.scope.fusion is not fusion for user in node.users)
                # in the fusion of an update, XLA copies and converts only the slice
                is_slice = fusion in in_place and node.opcode != 'transpose'
                if fusion is None or (not is_slice and (is_result or node is end)):
                    written += node.array.bytes * _n_runs(node)
        if written:
            yield Copied(output, donated[start], update, written)


_COPYING = ('copy', 'copy-done', 'transpose')
_MOVING = ('convert', 'copy', 'copy-done', 'copy-start')


def _updated(node: Node) -> Node:
    """Returns the array of which this one is a copy, but for updates of slices."""
    while node.opcode in (*_IN_PLACE, *_MOVING) and node.inputs:
        node = node.inputs[0]
    return node


def _writes_all(node: Node, start: Node) -> bool:
    """Whether this is `where(arange(n) == i, new, x)`, which writes all of x to change a row."""
    is_of_start = any(_updated(x) is start for x in node.inputs[1:])
    return node.opcode == 'select' and is_of_start and _is_one(node.inputs[0])


def _is_one(mask: Node) -> bool:
    """Whether a mask is of one index along an axis: an iota that equals a scalar."""
    compare = _unbroadcast(mask)
    if compare.opcode != 'compare' or 'direction=EQ' not in compare.attributes:
        return False
    sides = [_unbroadcast(node) for node in compare.inputs]
    has_iota = any(node.opcode == 'iota' for node in sides)
    return has_iota and any(not node.array.shape for node in sides)


def _unbroadcast(node: Node) -> Node:
    while node.opcode in ('bitcast', 'broadcast', 'convert', 'copy') and node.inputs:
        node = node.inputs[0]
    return node


def _n_runs(node: Node) -> int:
    return prod(count_trips(loop) or 1 for loop in node.loops)


# --- arguments ----------------------------------------------------------------------------------


class _Region(NamedTuple):
    """The part of an array that a program reads."""

    shape: tuple[int, ...]  # of the array
    box: tuple[tuple[int, int], ...]  # (start, end) in each dimension; () if unknown
    n_elements: int

    @property
    def is_full(self) -> bool:
        return self.n_elements == prod(self.shape)

    def is_disjoint(self, other: _Region) -> bool:
        """Whether the boxes do not overlap. False if one is unknown."""
        sides = zip(self.box, other.box, strict=False)
        return self.shape == other.shape and any(a[1] <= b[0] or b[1] <= a[0] for a, b in sides)


def _all_of(array: ArrayType) -> _Region:
    return _Region(array.shape, tuple((0, size) for size in array.shape), prod(array.shape))


def _min_covered_bytes(array: ArrayType, regions: Iterable[_Region]) -> int:
    disjoint: list[_Region] = []
    for region in sorted(set(regions), key=lambda region: -region.n_elements)[:_MAX_REGIONS]:
        if all(region.is_disjoint(other) for other in disjoint):
            disjoint.append(region)
    n = min(sum(region.n_elements for region in disjoint), prod(array.shape))
    return array.bytes * n // max(prod(array.shape), 1)


_SLICE = re.compile(r'\bslice=\{([^}]*)\}')
_SIZES = re.compile(r'dynamic_slice_sizes=\{([\d,]*)\}')
_MAX_TRIPS = 2**20  # of a loop whose slices are listed one by one
_MAX_REGIONS = 1000  # that are compared with each other; fewer give a lower bound, too
_LIBRARY = 'custom_call_target="__'  # calls to cuBLAS and cuDNN, which read all operands


class _Reads:
    """Finds the regions of values that a program reads.

    A fusion computes its full result, but only those parts of the values inside it that the result
    needs.
    """

    def __init__(self, graph: Graph):
        self._outputs = set(graph.outputs)
        self._program = graph.program
        self._found: dict[Node, list[_Region]] = {}
        self._after_update: dict[Node, int] = {}

    def of(self, node: Node) -> list[_Region]:
        if node not in self._found:
            with LineErrors(self._program) as errors:

                def find(node: Node, _: object) -> list[_Region]:
                    errors.op = node.op
                    if node.opcode in _UPDATES:
                        self._after_update[node] = self._count_after_update(node)
                    regions = [
                        region for user in node.users for region in self._read_by(user, node)
                    ]
                    # a result of a fusion is computed in full
                    fusion = node.scope.fusion
                    is_read_outside = any(user.scope.fusion is not fusion for user in node.users)
                    if fusion is not None and (is_read_outside or node in self._outputs):
                        regions.append(_all_of(node.array))
                    return regions

                fold(node, _passing_on, find, self._found)
        return self._found[node]

    def _read_by(self, user: Node, node: Node, is_updated: bool = False) -> list[_Region]:
        """Returns the regions of `node` that `user`, or a use of its result, reads.

        `is_updated` is whether `node` is an array that was updated in place.
        """
        at = user.inputs.index(node)
        # a value that a fusion passes on to its own operations
        in_fusion = user.scope.fusion is not None
        leaves = node.scope.fusion is not None and user.scope.fusion is not node.scope.fusion
        if user.scope.in_branch or (leaves and not is_updated):
            return []  # unknown, or counted as a result of the fusion
        match user.opcode.removesuffix('-start'):
            case 'phi':
                return self.of(user) if at == 0 else []
            case 'exit' | 'branch' | 'conditional':
                return []
            case 'bitcast':
                return self._read_for(user, node)
            case 'slice':
                return [_sliced_region(node, user)] if self._read_for(user, node) else []
            case 'dynamic-slice' if at == 0:
                needed = not in_fusion or self._read_for(user, node)
                return [self._dynamic_slice(node, user)] if needed else []
            case 'dynamic-update-slice' | 'scatter' if at == 0:
                n = self._after_update[user]
                return [_Region(node.array.shape, (), n)] if n > 0 else []
            case 'gather' if at == 0:
                return []
            case 'pad' if re.search(r'padding=\S*-', user.attributes):
                return []  # negative padding drops elements
            case 'custom-call' if _LIBRARY not in user.attributes:
                return []
            case _:
                if in_fusion:
                    return self._read_for(user, node)
                return [_all_of(array) for array in node.arrays[:1]]

    def _read_for(self, result: Node, node: Node) -> list[_Region]:
        """Returns the regions of `node` that the needed regions of `result` depend on."""
        array, needed = node.array, self.of(result)
        if any(region.is_full for region in needed):
            return [_all_of(array)]
        n = [region.n_elements for region in needed if prod(region.shape) == prod(array.shape)]
        return [_Region(array.shape, (), max(n))] if n else []

    def _count_after_update(self, updated: Node) -> int:
        """Counts the elements of an array read after an update in place, but not those it writes.

        A cache is read in this way.
        """
        n_updates = [count_trips(loop) for loop in updated.loops]
        if None in n_updates or (updated.opcode == 'scatter' and len(updated.inputs) != 3):
            return 0
        update = updated.inputs[1 if updated.opcode == 'dynamic-update-slice' else 2]
        n_written = prod(update.array.shape) * prod(n or 0 for n in n_updates)
        n_read = 0
        for value in reached([updated], lambda at: [u for u in at.users if u.opcode == 'bitcast']):
            for user in value.users:
                if user.opcode != 'bitcast':
                    regions = self._read_by(user, value, is_updated=True)
                    n_read = max((n_read, *(region.n_elements for region in regions)))
        return n_read - n_written

    def _dynamic_slice(self, node: Node, sliced: Node) -> _Region:
        """Returns the region that a dynamic-slice reads in all iterations of its loop."""
        array, sizes = node.array, _SIZES.search(sliced.attributes)
        slice_shape = [int(n) for n in sizes[1].split(',') if n] if sizes else []
        counter = find_counter(sliced.loop) if sliced.loop is not None else None
        n = 1
        is_counted = counter is not None and counter.trips <= _MAX_TRIPS
        if counter is not None and is_counted and len(slice_shape) == len(sliced.inputs) - 1:
            try:
                phis = {counter.phi: counter.values}
                starts = [evaluate(offset, phis=phis) for offset in sliced.inputs[1:]]
            except Unknown:
                starts = []
            moving = [  # (starts in all iterations, size) of each dimension whose start changes
                (np.clip(start, 0, full - size).tolist(), size)
                for start, full, size in zip(starts, array.shape, slice_shape, strict=False)
                if np.size(start) > 1
            ]
            n = _max_disjoint_slices(*moving[0]) if len(moving) == 1 else 1
        n_elements = n * prod(slice_shape)
        is_full = n_elements == prod(array.shape)
        return _all_of(array) if is_full else _Region(array.shape, (), n_elements)


# operations of whose operands a program reads what it reads of their results, or part of it
_UPDATES = ('dynamic-update-slice', 'scatter')
_PASSING_ON = ('bitcast', 'phi', 'slice', 'slice-start', *_UPDATES)


def _passing_on(node: Node) -> list[Node]:
    """Returns the users on whose own users it depends what is read of a node."""
    return [
        user
        for user in node.users
        if user.scope.fusion is not None or user.opcode in _PASSING_ON
        if user.opcode != 'phi' or user.inputs[0] is node
    ]


def _max_disjoint_slices(starts: Iterable[int], size: int) -> int:
    n, end = 0, 0
    for start in sorted(starts):
        if not n or start >= end:
            n, end = n + 1, start + size
    return n


def _sliced_region(node: Node, slice_: Node) -> _Region:
    match = _SLICE.search(slice_.attributes)
    limits = re.findall(r'\[(\d+):(\d+)(?::(\d+))?\]', match[1] if match else '')
    box = tuple((int(start), int(end)) for start, end, _ in limits)
    steps = [int(step or 1) for _, _, step in limits]
    n = prod(-(-(end - start) // step) for (start, end), step in zip(box, steps, strict=True))
    return _Region(node.array.shape, box, n)
