"""Finds all-reduces of which each device keeps a slice. Imports no JAX.

A reduce-scatter would send half as much. XLA makes one of an all-reduce and a slice of it, but not
if the sum is added to something first. The CPU backend makes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .all_gathers import Blocks, SliceFinder
from .module import Computation, Module, Place, Value

_ELEMENTWISE = frozenset(
    (
        *('abs', 'add', 'ceil', 'convert', 'cosine', 'divide', 'exponential', 'floor', 'log'),
        *('logistic', 'maximum', 'minimum', 'multiply', 'negate', 'power', 'rsqrt', 'select'),
        *('sine', 'sqrt', 'subtract', 'tanh'),
    )
)
_COPIES = frozenset(('copy', 'convert', 'bitcast', 'opt-barrier', 'optimization-barrier'))
_MOST_USES = 200


class SlicedSum(NamedTuple):
    """The slices of an all-reduce.

    Attributes:
        blocks: for each dimension, the block that each device keeps.
        is_direct: whether the sum itself is sliced, without an operation in between.
    """

    blocks: Blocks
    is_direct: bool


def find_sliced_sum(module: Module, place: Place, n_devices: int) -> SlicedSum | None:
    """Finds the slices of an all-reduce; None if the sum has other uses."""
    made = place.made
    if len(made.operands) != 1 or made.type.startswith('('):
        return None
    finder = _Finder(module, n_devices)
    uses = list(finder.uses(Value(place.here, made.name), (), True))
    if not uses or None in uses or len({use.blocks for use in uses if use}) > 1:
        return None
    blocks = uses[0].blocks if uses[0] else ()
    if not any(len(set(of_axis)) > 1 for of_axis in blocks):
        return None
    return SlicedSum(blocks, all(use.is_direct for use in uses if use))


class _Finder:
    def __init__(self, module: Module, n_devices: int):
        self.module = module
        self.slices = SliceFinder(module, n_devices)
        self.left = _MOST_USES

    def uses(
        self, value: Value, outside: tuple[Value, ...], is_direct: bool
    ) -> Iterator[SlicedSum | None]:
        """Yields the slice at each end of the uses of a value; None for another use.

        Args:
            value: the sum, or what elementwise operations make of it.
            outside: the fusions that it is in.
            is_direct: whether it is the sum itself.
        """
        here, shape = value.here, value.made.results[0].shape
        self.left -= 1
        if self.left < 0:
            yield None
            return
        if value.name == here[''].name:
            if outside:
                yield from self.uses(outside[-1], outside[:-1], is_direct)
            else:
                yield None
        for user in here.users(value.name):
            made = value.beside(user.name)
            callee = self.module.called(user) if user.opcode == 'fusion' else None
            same = not user.type.startswith('(') and user.results[0].shape == shape
            if user.opcode == 'dynamic-slice' and user.operands[0] == value.name:
                blocks = self.slices.blocks(value, user)
                yield None if blocks is None else SlicedSum(blocks, is_direct)
            elif callee is not None and not user.type.startswith('('):
                yield from self.inside(value, made, callee, outside, is_direct)
            elif same and user.opcode in _COPIES | _ELEMENTWISE:
                yield from self.uses(made, outside, is_direct and user.opcode in _COPIES)
            else:
                yield None

    def inside(
        self,
        value: Value,
        fusion: Value,
        callee: Computation,
        outside: tuple[Value, ...],
        is_direct: bool,
    ) -> Iterator[SlicedSum | None]:
        for i, operand in enumerate(fusion.made.operands):
            if operand == value.name:
                parameter = fusion.inside(callee, callee.parameter(i))
                yield from self.uses(parameter, (*outside, fusion), is_direct)
