"""Optimised HLO text -> all-gathers, what they gather and what becomes of it; no JAX.

A resharding for which the partitioner knows no better way is an all-gather of the whole array, of
which every device then keeps a part: "involuntary full rematerialization". XLA says so on standard
error alone; in the program it is to be read: all that is done with the array is to take slices
that start where the number of the device says.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .computations import Computation, Computations
from .syntax import ArrayType, Instruction


@dataclass(frozen=True)
class Gathering:
    """An all-gather.

    Attributes:
        name: of its instruction.
        array: what each device gets.
        dimension: along which its parts are joined.
        origin: computation and instruction that make what is gathered.
        parameter: the number of the program's parameter that this is, or None.
        invariant: whether it is in a loop, and gathers the same in each turn.
        source: the line that uses it, 'model.py:12', or None.
        kept: for each dimension, which block of it each device keeps; None where devices use the
            array otherwise, too.
    """

    name: str
    array: ArrayType
    dimension: int
    origin: tuple[str, str]
    parameter: int | None
    invariant: bool
    source: str | None
    kept: tuple[tuple[int, ...], ...] | None


def read_gatherings(text: str, n_devices: int) -> list[Gathering]:
    """The all-gathers of an optimised program that join one array each."""
    return list(_Reader(text, n_devices).read())


_GATHER = re.compile(r' all-gather(?:-start)?\(')
_DIMENSION = re.compile(r'dimensions=\{(\d+)\}')
_INDEX = re.compile(r'index=(\d+)')
_SIZES = re.compile(r'dynamic_slice_sizes=\{([\d,]+)\}')
# these pass an array on as it is, or in another form
_COPIES = {'copy', 'copy-start', 'copy-done', 'all-gather-done', 'optimization-barrier'}
_PASSES_ON = frozenset({'bitcast', 'reshape', 'transpose', 'convert', *_COPIES})


class _Value(NamedTuple):
    """An instruction, and what the parameters of its computation stand for."""

    computation: Computation
    name: str
    given: tuple[_Value, ...] = ()


class _Unknown(Exception):
    """An instruction that is no plain arithmetic of the device's number."""


class _Reader(Computations):
    def __init__(self, text: str, n_devices: int):
        super().__init__(text)
        self.n_devices = n_devices

    def read(self) -> Iterator[Gathering]:
        for found in _GATHER.finditer(self.text):
            here = self.computation(bisect.bisect(self.starts, found.start()) - 1)
            made = self.line(found.start())
            dimension = _DIMENSION.search(made.attributes)
            if len(made.operands) != 1 or dimension is None:
                continue
            made_in, origin, invariant = self.origin(here, made.operands[0])
            is_parameter = made_in.is_entry and origin.opcode == 'parameter'
            array = made.results[-1]
            yield Gathering(
                name=made.name,
                array=array,
                dimension=int(dimension[1]),
                origin=(made_in.name, origin.name),
                parameter=int(origin.given) if is_parameter else None,
                invariant=invariant,
                source=self.used_at(here, made.name),
                kept=self.kept(_Value(here, made.name), array),
            )

    def origin(self, here: Computation, name: str) -> tuple[Computation, Instruction, bool]:
        """What made an array, before it took other forms and went into fusions and loops.

        And whether that is outside of a loop which gathers it.
        """
        made = here[name]
        while self.passes_on(made):
            made = here[made.operands[0]]
        outside = self.outside(here, made)
        if outside is None:
            return here, made, False
        caller, operand = outside
        made_in, origin, invariant = self.origin(caller, operand)
        return made_in, origin, invariant or made.opcode == 'get-tuple-element'

    def passes_on(self, made: Instruction) -> bool:
        """Whether it is its operand in another form; on CPU a copy is in a fusion of its own."""
        if len(made.operands) != 1 or made.opcode in _PASSES_ON:
            return len(made.operands) == 1
        if made.opcode != 'fusion' or made.callee not in self.numbers:
            return False
        callee = self.computation(self.numbers[made.callee])
        inner = callee[callee.root]
        while inner.opcode in _PASSES_ON and len(inner.operands) == 1:
            inner = callee[inner.operands[0]]
        return inner.opcode == 'parameter'

    def outside(self, here: Computation, made: Instruction) -> tuple[Computation, str] | None:
        """Where what comes into a fusion or, unchanged by its turns, into a loop, comes from."""
        if made.opcode == 'parameter' and not here.is_entry:
            caller, call = self.caller('calls', here.name)
            return (caller, call.operands[int(made.given)]) if caller and call else None
        at = _carried(here, made)
        caller, call = self.caller('body', here.name) if at is not None else (None, None)
        if at is None or caller is None or call is None:
            return None
        start = caller[call.operands[0]]
        return (caller, start.operands[at]) if start.opcode == 'tuple' else None

    def used_at(self, here: Computation, name: str, far: int = 3) -> str | None:
        """The line of the source of what uses an array; what only copies it may have none."""
        for user in map(here.__getitem__, here.users.get(name, ())):
            source = self.sources.line(user.metadata) if user.metadata else None
            if source is None and user.callee in self.numbers:
                callee = self.computation(self.numbers[user.callee])
                source = self.sources.line(callee[callee.root].metadata)
            if source is None and far:
                source = self.used_at(here, user.name, far - 1)
            if source is not None:
                return source
        return None

    def kept(self, value: _Value, array: ArrayType) -> tuple[tuple[int, ...], ...] | None:
        slices = list(self.slices(value, array))
        if not slices or None in slices or len(set(slices)) > 1:
            return None
        blocks = slices[0]
        return blocks if blocks and any(len(set(of_axis)) > 1 for of_axis in blocks) else None

    def slices(
        self, value: _Value, array: ArrayType
    ) -> Iterator[tuple[tuple[int, ...], ...] | None]:
        """The blocks that devices take of an array, for each use; None for another use."""
        here = value.computation
        if value.name == here.root:
            yield None
        for user in map(here.__getitem__, here.users.get(value.name, ())):
            axes = _axes(user, here[value.name], array)
            if axes is not None:
                for blocks in self.slices(value._replace(name=user.name), user.results[0]):
                    yield blocks and tuple(blocks[axes.index(axis)] for axis in range(len(axes)))
            elif user.opcode == 'fusion' and user.callee in self.numbers:
                callee = self.computation(self.numbers[user.callee])
                given = tuple(_Value(here, name, value.given) for name in user.operands)
                for i, operand in enumerate(user.operands):
                    if operand == value.name:
                        yield from self.slices(_Value(callee, callee.parameter(i), given), array)
            elif user.opcode == 'dynamic-slice' and user.operands[0] == value.name:
                yield self.blocks(value, user)
            else:
                yield None

    def blocks(self, value: _Value, user: Instruction) -> tuple[tuple[int, ...], ...] | None:
        sizes = _SIZES.search(user.attributes)
        if sizes is None:
            return None
        blocks: list[tuple[int, ...]] = []
        for operand, size in zip(user.operands[1:], sizes[1].split(','), strict=True):
            try:
                start = [
                    int(self.evaluate(value._replace(name=operand), device).reshape(-1)[0])
                    for device in range(self.n_devices)
                ]
            except _Unknown:
                return None
            blocks.append(tuple(at // int(size) for at in start))
        return tuple(blocks)

    def evaluate(self, value: _Value, device: int) -> Any:
        """What an integer is on a device."""
        here = value.computation
        made = here[value.name]
        if made.opcode in ('partition-id', 'replica-id'):
            return np.array(device)
        if made.opcode == 'constant':
            numbers = [int(number) for number in re.findall(r'-?\d+', made.given)]
            if not numbers:
                raise _Unknown
            return np.array(numbers).reshape(made.results[0].shape)
        if made.opcode == 'parameter' and value.given:
            return self.evaluate(value.given[int(made.given)], device)
        if made.opcode == 'get-tuple-element':
            outside = self.outside(here, made)
            if outside is not None:
                return self.evaluate(_Value(*outside), device)
        operands = (
            self.evaluate(value._replace(name=operand), device) for operand in made.operands
        )
        if made.opcode == 'fusion' and made.callee in self.numbers:
            callee = self.computation(self.numbers[made.callee])
            given = tuple(_Value(here, name, value.given) for name in made.operands)
            return self.evaluate(_Value(callee, callee.root, given), device)
        if made.opcode in _PASSES_ON:
            return next(operands).reshape(made.results[0].shape)
        if made.opcode == 'dynamic-slice' and len(made.operands) == 2:
            table, start = operands
            size = made.results[0].shape[0]
            first = min(max(int(start.reshape(-1)[0]), 0), len(table) - size)
            return table[first : first + size]
        if made.opcode == 'clamp':
            low, number, high = operands
            return np.minimum(np.maximum(number, low), high)
        if made.opcode in _ARITHMETIC:
            return _ARITHMETIC[made.opcode](*operands)
        raise _Unknown


_ARITHMETIC: Mapping[str, Any] = {
    'add': np.add,
    'subtract': np.subtract,
    'multiply': np.multiply,
    'divide': np.floor_divide,
    'remainder': np.remainder,
    'minimum': np.minimum,
    'maximum': np.maximum,
    'and': np.bitwise_and,
    'shift-left': np.left_shift,
    'shift-right-logical': np.right_shift,
}


def _axes(made: Instruction, before: Instruction, array: ArrayType) -> Sequence[int] | None:
    """Which axis of an array each axis is in another form of it; None if it has others.

    On GPU a bitcast to another layout stands for a transpose.
    """
    if made.opcode not in _PASSES_ON:
        return None
    shape, axes = made.results[0].shape, range(len(array.shape))
    if made.opcode == 'transpose':
        (dimensions,) = re.findall(r'dimensions=\{([\d,]*)\}', made.attributes)
        return [int(axis) for axis in dimensions.split(',') if axis]
    if made.opcode == 'bitcast' and len(shape) == len(axes):
        axis_of = dict(zip(_layout(made), _layout(before), strict=True))
        axes = [axis_of[axis] for axis in axes]
    same = len(shape) == len(axes) and all(
        shape[i] == array.shape[axis] for i, axis in enumerate(axes)
    )
    return axes if same else None


def _layout(made: Instruction) -> Sequence[int]:
    """The axes of an array as they lie in memory, the fastest first."""
    found = re.search(r'\{([\d,]+)', made.type)
    rank = len(made.results[0].shape)
    return [int(axis) for axis in found[1].split(',')] if found else range(rank)[::-1]


def _carried(here: Computation, made: Instruction) -> int | None:
    """Where in what a loop carries along an element is, if each turn leaves it as it is."""
    root, index = here[here.root], _INDEX.search(made.attributes)
    if made.opcode != 'get-tuple-element' or root.opcode != 'tuple' or index is None:
        return None
    at = int(index[1])
    if here[made.operands[0]].opcode != 'parameter' or at >= len(root.operands):
        return None
    last = here[root.operands[at]]
    same = _INDEX.search(last.attributes)
    unchanged = last.opcode == made.opcode and last.operands == made.operands
    return at if unchanged and same is not None and same[1] == index[1] else None
