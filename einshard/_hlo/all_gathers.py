"""Finds the all-gathers of an HLO program, and which slice of the result each device keeps.

If the SPMD partitioner finds no better way to reshard an array, it all-gathers the array, and each
device keeps one slice: "involuntary full rematerialization". XLA reports this only on standard
error. This module recognizes it by slices whose offsets depend on the device number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .arithmetic import ARITHMETIC
from .module import ArrayType, Computation, Instruction, Module, Value

# blocks[dimension][device]: the index of the device's block along this dimension
Blocks: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AllGather:
    """An all-gather with one operand.

    Attributes:
        array: the result on each device.
        dimension: the dimension along which shards are concatenated.
        origin: where the operand comes from, before copies and reshapes: (computation name,
            instruction name).
        parameter: the parameter number if `origin` is a parameter of the program, or None.
        is_invariant: whether every iteration of a loop gathers the same array.
        kept: the block of the result that each device uses. None if a device uses several blocks
            or an unknown part, or if all devices use the same block.
    """

    name: str
    array: ArrayType
    dimension: int
    origin: tuple[str, str]
    parameter: int | None
    is_invariant: bool
    kept: Blocks | None


def find_all_gathers(module: Module, n_devices: int) -> list[AllGather]:
    return list(_Finder(module, n_devices).find())


_DIMENSION = re.compile(r'dimensions=\{(\d+)\}')
_SIZES = re.compile(r'dynamic_slice_sizes=\{([\d,]+)\}')
# operations that copy, reshape or convert an array
_MOVES = frozenset(
    (
        *('all-gather-done', 'bitcast', 'convert', 'copy', 'copy-done', 'copy-start'),
        *('opt-barrier', 'reshape', 'transpose'),
    )
)


class _Unknown(Exception):
    """Raised for a value that is not simple arithmetic on the device number."""


class _Finder:
    def __init__(self, module: Module, n_devices: int):
        self.module = module
        self.n_devices = n_devices

    def find(self) -> Iterator[AllGather]:
        for _, comp, op in self.module.find(' all-gather(', ' all-gather-start('):
            dimension = _DIMENSION.search(op.attributes)
            if len(op.operands) != 1 or dimension is None:
                continue
            origin_comp, origin, is_invariant = self.origin(comp, op.operands[0])
            is_parameter = origin_comp.is_entry and origin.opcode == 'parameter'
            array = op.results[-1]
            yield AllGather(
                name=op.name,
                array=array,
                dimension=int(dimension[1]),
                origin=(origin_comp.name, origin.name),
                parameter=origin.parameter_number if is_parameter else None,
                is_invariant=is_invariant,
                kept=self.kept(Value(comp, op.name), array),
            )

    def origin(self, comp: Computation, name: str) -> tuple[Computation, Instruction, bool]:
        """Traces `name` back through copies. Returns (computation, instruction, is_invariant).

        `is_invariant` says that `name` is in a loop and its value comes from outside, so that all
        iterations use the same value.
        """
        op = comp[name]
        while self.only_moves(op):
            op = comp[op.operands[0]]
        passed = self.passed_value(comp, op)
        if passed is None:
            return comp, op, False
        caller, operand = passed
        origin_comp, origin, is_invariant = self.origin(caller, operand)
        return origin_comp, origin, is_invariant or op.opcode == 'get-tuple-element'

    def only_moves(self, op: Instruction) -> bool:
        """Whether `op`, which may be a fusion, only copies, reshapes or converts its operand."""
        if len(op.operands) != 1:
            return False
        if op.opcode in _MOVES:
            return True
        callee = self.module.called(op) if op.opcode == 'fusion' else None
        if callee is None:
            return False
        inner = callee.root
        while inner.opcode in _MOVES and len(inner.operands) == 1:
            inner = callee[inner.operands[0]]
        return inner.opcode == 'parameter'

    def passed_value(self, comp: Computation, op: Instruction) -> tuple[Computation, str] | None:
        """Finds the value passed to a fusion parameter, or the initial value of a loop invariant.

        Returns (computation, name), or None if `op` is neither.
        """
        if op.opcode == 'parameter' and not comp.is_entry:
            for _, caller, call in self.module.call_sites(comp):
                if 'calls=' in call.attributes:
                    return caller, call.operands[op.parameter_number]
        element = _invariant_element(comp, op)
        if element is None:
            return None
        for _, caller, call in self.module.call_sites(comp):
            start = caller[call.operands[0]]
            if f'body=%{comp.name},' in f'{call.attributes},' and start.opcode == 'tuple':
                return caller, start.operands[element]
        return None

    def kept(self, value: Value, array: ArrayType) -> Blocks | None:
        used = list(self.used_blocks(value, array))
        if not used or None in used or len(set(used)) > 1:
            return None
        blocks = used[0]
        return blocks if blocks and any(len(set(indices)) > 1 for indices in blocks) else None

    def used_blocks(self, value: Value, array: ArrayType) -> Iterator[Blocks | None]:
        """Yields the blocks that each use of `value` reads. None means unknown, or not a slice."""
        comp = value.comp
        if value.name == comp.root.name:
            yield None
        for user in comp.users(value.name):
            callee = self.module.called(user) if user.opcode == 'fusion' else None
            axes = source_axes(user, comp[value.name], array)
            if axes is not None:
                for blocks in self.used_blocks(value.sibling(user.name), user.results[0]):
                    yield blocks and tuple(blocks[axes.index(axis)] for axis in range(len(axes)))
            elif callee is not None:
                for i, operand in enumerate(user.operands):
                    if operand == value.name:
                        inside = value.sibling(user.name).in_callee(callee, callee.parameter(i))
                        yield from self.used_blocks(inside, array)
            elif user.opcode == 'dynamic-slice' and user.operands[0] == value.name:
                yield self.sliced_blocks(value, user)
            else:
                yield None

    def sliced_blocks(self, value: Value, user: Instruction) -> Blocks | None:
        sizes = _SIZES.search(user.attributes)
        if sizes is None:
            return None
        blocks: list[tuple[int, ...]] = []
        for operand, size in zip(user.operands[1:], sizes[1].split(','), strict=True):
            try:
                starts = [
                    int(self.evaluate(value.sibling(operand), device).reshape(-1)[0])
                    for device in range(self.n_devices)
                ]
            except _Unknown:
                return None
            blocks.append(tuple(start // int(size) for start in starts))
        return tuple(blocks)

    def evaluate(self, value: Value, device: int) -> Any:
        """Computes the integer array `value` on one device, or raises `_Unknown`."""
        op = value.op
        if op.opcode in ('partition-id', 'replica-id'):
            return np.array(device)
        if op.opcode == 'constant':
            numbers = [int(number) for number in re.findall(r'-?\d+', op.operand_text)]
            if not numbers:
                raise _Unknown
            return np.array(numbers).reshape(op.results[0].shape)
        if op.opcode == 'parameter' and value.arguments:
            return self.evaluate(value.arguments[op.parameter_number], device)
        if op.opcode == 'get-tuple-element':
            passed = self.passed_value(value.comp, op)
            if passed is not None:
                return self.evaluate(Value(*passed), device)
        operands = (self.evaluate(value.sibling(operand), device) for operand in op.operands)
        callee = self.module.called(op) if op.opcode == 'fusion' else None
        if callee is not None:
            return self.evaluate(value.in_callee(callee), device)
        if op.opcode in _MOVES:
            return next(operands).reshape(op.results[0].shape)
        if op.opcode == 'dynamic-slice' and len(op.operands) == 2:
            table, start = operands
            size = op.results[0].shape[0]
            first = min(max(int(start.reshape(-1)[0]), 0), len(table) - size)
            return table[first : first + size]
        if op.opcode == 'clamp':
            low, number, high = operands
            return np.minimum(np.maximum(number, low), high)
        if op.opcode in ARITHMETIC:
            return ARITHMETIC[op.opcode](*operands)
        raise _Unknown


def source_axes(op: Instruction, operand: Instruction, array: ArrayType) -> Sequence[int] | None:
    """Returns the operand axis of each result axis, or None if `op` may do more than transpose.

    On GPU, a bitcast to another layout may be a transpose. `array` is the type of `operand`.
    """
    if op.opcode not in _MOVES:
        return None
    shape, axes = op.results[0].shape, range(len(array.shape))
    if op.opcode == 'transpose':
        (dimensions,) = re.findall(r'dimensions=\{([\d,]*)\}', op.attributes)
        return [int(axis) for axis in dimensions.split(',') if axis]
    if op.opcode == 'bitcast' and len(shape) == len(axes):
        axis_of = dict(zip(_minor_to_major(op), _minor_to_major(operand), strict=True))
        axes = [axis_of[axis] for axis in axes]
    shapes_match = len(shape) == len(axes) and all(
        shape[i] == array.shape[axis] for i, axis in enumerate(axes)
    )
    return axes if shapes_match else None


def _minor_to_major(op: Instruction) -> Sequence[int]:
    match = re.search(r'\{([\d,]+)', op.type)
    rank = len(op.results[0].shape)
    return [int(axis) for axis in match[1].split(',')] if match else range(rank)[::-1]


def _invariant_element(comp: Computation, op: Instruction) -> int | None:
    """Returns the index of the loop-invariant element that `op` reads in the loop body `comp`.

    Returns None if the loop changes the element, or if `op` does not read the loop state.
    """
    root = comp.root
    if op.opcode != 'get-tuple-element' or root.opcode != 'tuple':
        return None
    if comp[op.operands[0]].opcode != 'parameter' or op.element >= len(root.operands):
        return None
    new = comp[root.operands[op.element]]
    is_unchanged = (new.opcode, new.operands, new.element) == (op.opcode, op.operands, op.element)
    return op.element if is_unchanged else None
