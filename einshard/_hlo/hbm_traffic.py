"""Computes a lower bound on the bytes that a program reads from and writes to HBM."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import numpy as np

from .loops import find_counter
from .module import ArrayType, Instruction, Module, Value

_MOVES = ('bitcast', 'convert', 'copy')


def min_hbm_bytes(module: Module) -> int:
    """Counts the bytes of arguments read from HBM and of results written to it, per device.

    Each byte counts once. If an array is only sliced, only the slices count. Not counted: results
    that are updated in place, and reads of unknown size (by a gather, in a branch of a conditional,
    in a computation with several calls, or in a Pallas kernel). A loop with an unknown trip count
    counts as one iteration.
    """
    entry = module.entry
    reads, total = _Reads(module), 0
    for op in entry.parameters():
        if op.is_in_hbm:
            total += _min_covered_bytes(op.results[0], reads.of(Value(entry, op.name)))
    root = entry.root
    for op in [entry[name] for name in root.operands] if root.opcode == 'tuple' else [root]:
        if op.is_in_hbm and _is_written(module, Value(entry, op.name)):
            total += sum(array.bytes for array in op.results)
    return total


# --- results ------------------------------------------------------------------------------------


def _is_written(module: Module, value: Value) -> bool:
    """Whether `value` is a new array. False if it is an argument, updated in place, or unknown."""
    # in the entry (no `arguments`), a convert or copy writes an array; elsewhere it may be fused
    moves = _MOVES if value.arguments else ('bitcast',)
    while value.op.opcode in moves:
        value = value.sibling(value.op.operands[0])
    op = value.op
    if op.opcode == 'get-tuple-element':
        tuple_value = value.sibling(op.operands[0])
        comp = module.called(tuple_value.op)
        if tuple_value.op.opcode == 'while':
            comp = module.computation(tuple_value.op.body)
        if comp is None or comp.root.opcode != 'tuple':
            not_written = ('parameter', 'conditional', 'custom-call', 'while')
            return tuple_value.op.opcode not in not_written
        return _is_written(module, tuple_value.in_callee(comp, comp.root.operands[op.element]))
    if op.opcode == 'fusion' and (called := module.called(op)):
        return _is_written(module, value.in_callee(called))
    in_place = ('conditional', 'dynamic-update-slice', 'parameter', 'scatter')
    return op.opcode not in in_place and 'output_to_operand_aliasing' not in op.attributes


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
    for region in sorted(set(regions), key=lambda region: -region.n_elements):
        if all(region.is_disjoint(other) for other in disjoint):
            disjoint.append(region)
    n = min(sum(region.n_elements for region in disjoint), prod(array.shape))
    return array.bytes * n // max(prod(array.shape), 1)


_SLICE = re.compile(r'\bslice=\{([^}]*)\}')
_SIZES = re.compile(r'dynamic_slice_sizes=\{([\d,]*)\}')
_LIBRARY = 'custom_call_target="__'  # calls to cuBLAS and cuDNN, which read all operands


class _Reads:
    """Finds the regions of values that a program reads.

    A fusion or call computes its full result, but only those parts of the values inside it that
    the result needs.
    """

    def __init__(self, module: Module):
        self._module = module
        self._cache: dict[tuple[str, str, int], list[_Region]] = {}

    def of(self, value: Value, element: int = -1, loop: Value | None = None) -> list[_Region]:
        """Returns the regions of an array, or of an element of a tuple, that the program reads.

        `element` is -1 for an array. `loop` is the loop whose body contains `value`, if any.
        """
        key = value.comp.name, value.name, element
        if key not in self._cache:
            regions = [
                region
                for user in value.comp.users(value.name)
                for region in self._read_by_user(value, element, user, loop)
            ]
            if value.arguments and value.name == value.comp.root.name:
                regions.append(_all_of(value.op.results[0]))
            self._cache[key] = regions
        return self._cache[key]

    def _read_by_user(
        self, value: Value, element: int, user: Instruction, loop: Value | None
    ) -> list[_Region]:
        """Returns the regions of `value` that `user`, or a use of its result, reads."""
        at, result = user.operands.index(value.name), value.sibling(user.name)
        match user.opcode.removesuffix('-start'):
            case 'tuple' if user.name != value.comp.root.name:
                return self.of(result, at, loop)
            case 'tuple':
                return [_all_of(value.op.results[0])] if value.arguments else []
            case 'get-tuple-element':
                return self.of(result, -1, loop) if user.element == element else []
            case 'while' | 'fusion' | 'call' if self._is_shared(user):
                return []  # `_cache` does not tell several calls of a computation apart
            case 'while':
                body = self._module.computation(user.body)
                start = Value(body, body.parameter(0))
                return self.of(start, element, result)
            case 'fusion' | 'call' if called := self._module.called(user):
                inside = result.in_callee(called, called.parameter(at))
                # on TPU, some fusions contain only a bitcast
                only_moves = _name_before_moves(result.in_callee(called)) == inside.name
                return self.of(result if only_moves else inside, element, loop)
            case 'bitcast' | 'opt-barrier':
                return self._read_for(result, value, loop)
            case 'slice':
                read = self._read_for(result, value, loop)
                return [_sliced_region(value.op, user)] if read else []
            case 'dynamic-slice' if at == 0:
                read = not value.arguments or self._read_for(result, value, loop)
                return [self._dynamic_slice(value, result, loop)] if read else []
            case 'gather' | 'dynamic-update-slice' | 'scatter' if at == 0:
                return []
            case 'conditional' | 'async':
                return []
            case 'pad' if re.search(r'padding=\S*-', user.attributes):
                return []  # negative padding drops elements
            case 'custom-call' if _LIBRARY not in user.attributes:
                return []
            case _:
                if value.arguments:
                    return self._read_for(result, value, loop)
                return [_all_of(array) for array in value.op.results[:1]]

    def _is_shared(self, op: Instruction) -> bool:
        """Whether another instruction runs the computation of this fusion, call or loop."""
        names = [name for name in (op.callee, op.body) if name]
        return any(self._module.is_shared(self._module.computation(name)) for name in names)

    def _read_for(self, result: Value, value: Value, loop: Value | None) -> list[_Region]:
        """Returns the regions of `value` that the needed regions of `result` depend on."""
        array, needed = value.op.results[0], self.of(result, -1, loop)
        if any(region.is_full for region in needed):
            return [_all_of(array)]
        n = [region.n_elements for region in needed if prod(region.shape) == prod(array.shape)]
        return [_Region(array.shape, (), max(n))] if n else []

    def _dynamic_slice(self, value: Value, result: Value, loop: Value | None) -> _Region:
        """Returns the region that the dynamic-slice `result` reads in all iterations of `loop`."""
        array, sizes = value.op.results[0], _SIZES.search(result.op.attributes)
        slice_shape = [int(n) for n in sizes[1].split(',') if n] if sizes else []
        counter = find_counter(self._module, loop) if loop else None
        offsets = [result.sibling(name) for name in result.op.operands[1:]]
        values = [counter.values(offset) for offset in offsets] if counter else []
        starts = [start for start in values if start is not None]
        n = 1
        if len(starts) == len(slice_shape):
            moving = [  # (starts in all iterations, size) of each dimension whose start changes
                (np.clip(start, 0, full - size).tolist(), size)
                for start, full, size in zip(starts, array.shape, slice_shape, strict=True)
                if start.size > 1
            ]
            n = _max_disjoint_slices(*moving[0]) if len(moving) == 1 else 1
        n_elements = n * prod(slice_shape)
        is_full = n_elements == prod(array.shape)
        return _all_of(array) if is_full else _Region(array.shape, (), n_elements)


def _max_disjoint_slices(starts: Iterable[int], size: int) -> int:
    n, end = 0, 0
    for start in sorted(starts):
        if not n or start >= end:
            n, end = n + 1, start + size
    return n


def _sliced_region(op: Instruction, slice_: Instruction) -> _Region:
    match = _SLICE.search(slice_.attributes)
    limits = re.findall(r'\[(\d+):(\d+)(?::(\d+))?\]', match[1] if match else '')
    box = tuple((int(start), int(end)) for start, end, _ in limits)
    steps = [int(step or 1) for _, _, step in limits]
    n = prod(-(-(end - start) // step) for (start, end), step in zip(box, steps, strict=True))
    return _Region(op.results[0].shape, box, n)


def _name_before_moves(value: Value) -> str:
    while value.op.opcode in _MOVES:
        value = value.sibling(value.op.operands[0])
    return value.op.name
