"""Computes integers of a program: trip counts of loops, and offsets of slices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import ARITHMETIC
from .graph import Loop, Node
from .queries import fold, moved_operand, strip
from .text import MAX_NUMBER, Unreadable

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


# --- loops --------------------------------------------------------------------------------------


def count_trips(loop: Loop) -> int | None:
    """Returns how often the body of a loop runs, or None if that is unknown.

    On CPU and GPU, XLA annotates loops with their trip counts. For TPU, this computes it from the
    start of the counter, the step in the body, and the limit in the condition.
    """
    if loop.trips is None:
        match, counter = _TRIP_COUNT.search(loop.op.config), None
        if not match:
            counter = find_counter(loop)
        elif len(match[1]) > 19 or int(match[1]) >= MAX_NUMBER:
            raise Unreadable(loop.op, 'has a trip count of more than 2**63', match[1])
        loop.trips = (int(match[1]) if match else counter and counter.trips,)
    return loop.trips[0]


class Counter(NamedTuple):
    """A phi that counts iterations: `start`, `start + step`, ..."""

    phi: Node
    start: int
    step: int
    trips: int

    @property
    def values(self) -> Any:
        """Its value in each iteration, with shape (trips,)."""
        return self.start + self.step * np.arange(self.trips)


def find_counter(loop: Loop) -> Counter | None:
    test = strip(loop.condition) if loop.condition else None
    if test is None or test.opcode != 'compare':
        return None
    match = re.search(r'direction=(\w+)', test.attributes)
    direction = match[1] if match else ''
    left, right = (_read_sum(node) for node in test.inputs)
    if left and right and left.phi is None:
        left, right, direction = right, left, _MIRRORED.get(direction, direction)
    if left is None or right is None or left.phi is None or right.phi is not None:
        return None
    phi = left.phi
    if phi not in loop.phis:
        return None
    start, after = (_read_sum(node) for node in phi.inputs)
    if start is None or start.phi is not None or after is None or after.phi is not phi:
        return None
    limit = right.constant - left.constant
    trips = _count_terms(start.constant, after.constant, direction, limit)
    return None if trips is None else Counter(phi, start.constant, after.constant, trips)


class _Sum(NamedTuple):
    """A phi plus a constant, or only the constant if `phi` is None."""

    phi: Node | None
    constant: int


def _read_sum(node: Node) -> _Sum | None:
    def terms(node: Node) -> Sequence[Node]:
        moved = moved_operand(node)
        if moved is not None:
            return (moved,)
        return node.inputs if node.opcode in ('add', 'subtract') else ()

    def add_up(node: Node, sums: Sequence[_Sum | None]) -> _Sum | None:
        if len(sums) == 1:  # a copy
            return sums[0]
        if sums:
            a, b = sums
            sign = 1 if node.opcode == 'add' else -1
            if a and b and b.phi is None:
                return _Sum(a.phi, a.constant + sign * b.constant)
            if a and b and a.phi is None and sign == 1:
                return _Sum(b.phi, a.constant + b.constant)
        elif node.opcode == 'phi':
            return _Sum(node, 0)
        elif node.opcode == 'constant' and re.fullmatch(r'-?\d+', node.op.operand_text):
            return _Sum(None, int(node.op.operand_text))
        return None

    return fold(node, terms, add_up)


_MIRRORED = {'LT': 'GT', 'LE': 'GE', 'GT': 'LT', 'GE': 'LE'}


def _count_terms(start: int, step: int, direction: str, limit: int) -> int | None:
    """Counts the terms of `start`, `start + step`, ... before the comparison with `limit` fails.

    Returns None if the count is unknown.

    >>> from einshard._program.hlo.integers import _count_terms
    >>> _count_terms(0, 1, 'LT', 12), _count_terms(12, -2, 'GE', 1), _count_terms(5, 1, 'LT', 3)
    (12, 6, 0)
    """
    if direction in ('GT', 'GE'):
        return _count_terms(-start, -step, _MIRRORED[direction], -limit)
    if direction == 'LE':
        limit += 1
    if direction == 'NE' and step and not (limit - start) % step and (limit - start) // step >= 0:
        return (limit - start) // step
    if direction in ('LT', 'LE') and step > 0:
        return max(0, -(-(limit - start) // step))
    return None


# --- offsets ------------------------------------------------------------------------------------


class Unknown(Exception):
    """Raised for a value that is not simple arithmetic on known integers."""


def evaluate(node: Node, device: int | None = None, phis: Mapping[Node, Any] | None = None) -> Any:
    """Computes an integer array, or raises `Unknown`.

    Args:
        device: the number of the device; None if the value must not depend on it.
        phis: the values of phis, such as those of a loop's counter in all iterations. If they are
            arrays, so is the result.
    """
    known = phis or {}
    sources = ('partition-id', 'replica-id') if device is not None else ()

    def reads(node: Node) -> Sequence[Node]:
        opcode = node.opcode
        if node in known or opcode == 'constant' or opcode in sources:
            return ()
        moved = moved_operand(node)
        if moved is not None:
            return (moved,)
        is_scalar = opcode == 'broadcast' and not node.inputs[0].array.shape
        if is_scalar or opcode in ARITHMETIC or opcode in ('dynamic-slice', 'clamp'):
            return node.inputs
        raise Unknown

    def value(node: Node, operands: Sequence[Any]) -> Any:
        opcode = node.opcode
        if node in known:
            return known[node]
        if opcode in sources:
            return np.array(device)
        if opcode == 'constant':
            numbers = [int(number) for number in re.findall(r'-?\d+', node.op.operand_text)]
            is_large = any(abs(number) >= MAX_NUMBER for number in numbers)
            if is_large or len(numbers) != prod(node.array.shape):
                raise Unknown  # such as '{...}'
            return np.array(numbers).reshape(node.array.shape)
        if opcode == 'clamp':
            low, number, high = operands
            return np.minimum(np.maximum(number, low), high)
        if opcode == 'dynamic-slice':
            if len(operands) != 2 or phis:
                raise Unknown
            table, start = operands
            size = node.array.shape[0]
            first = min(max(int(start.reshape(-1)[0]), 0), len(table) - size)
            return table[first : first + size]
        if opcode in ARITHMETIC:
            return ARITHMETIC[opcode](*operands)
        (moved,) = operands
        return moved.reshape(node.array.shape) if not phis and opcode != 'broadcast' else moved

    return fold(node, reads, value)
