"""Counts how often an HLO program executes each of its computations.

On CPU and GPU, XLA annotates loops with their trip counts. For TPU, this module computes the trip
count from the start of the counter, the step in the body, and the limit in the condition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import ARITHMETIC
from .module import Computation, Module, Site, Value

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MOVES = frozenset(('copy', 'copy-start', 'copy-done', 'bitcast', 'opt-barrier'))


class Executions:
    def __init__(self, module: Module):
        self._module = module
        self._cache: dict[str, int | None] = {}

    def of(self, computation: Computation) -> int | None:
        """Counts executions in one run of the program, if all branches of conditionals run.

        Returns None if a trip count is unknown.
        """
        if computation.is_entry:
            return 1
        if computation.name not in self._cache:
            total: int | None = 0
            for site in self._module.call_sites(computation):
                if self._module.path(site.comp) is None:
                    continue
                outside, runs = self.of(site.comp), self._runs(site, computation.name)
                if total is None or outside is None or runs is None:
                    total = None
                else:
                    total += outside * runs
            self._cache[computation.name] = total
        return self._cache[computation.name]

    def _runs(self, site: Site, name: str) -> int | None:
        """Counts how often one execution of `site` runs the computation `name`."""
        if site.op.opcode != 'while':
            return 1
        trips = trip_count(self._module, site)
        # the condition runs once more than the body
        is_condition = f'condition=%{name},' in f'{site.op.attributes},'
        return trips + 1 if is_condition and trips is not None else trips


def trip_count(module: Module, loop: Site) -> int | None:
    op = loop.op
    if match := _TRIP_COUNT.search(op.attributes + op.metadata):
        return int(match[1])
    counter = find_counter(module, Value(loop.comp, op.name))
    return counter.trips if counter else None


def find_counter(module: Module, loop: Value) -> Counter | None:
    op = loop.op
    names = dict(re.findall(r'\b(condition|body)=%?([^\s,]+)', op.attributes))
    condition, body = (Value(module.computation(names[part])) for part in ('condition', 'body'))
    return _Loop(module, loop.sibling(op.operands[0]), condition, body).counter()


@dataclass(frozen=True, slots=True)
class Counter:
    """An element of the loop state that counts iterations: `start`, `start + step`, ..."""

    loop: _Loop
    element: int
    start: int
    step: int
    trips: int

    def values(self, value: Value) -> Any:
        """Returns the integer `value` of the loop body in each iteration, with shape (trips,).

        The shape is () if `value` never changes. Returns None if `value` is unknown.
        """
        value, element = self.loop.find_source(value)
        op = value.op
        if op.integer_constant is not None:
            return np.array(op.integer_constant)
        if op.opcode == 'parameter' and value.comp is self.loop.body.comp and element is not None:
            if element == self.element:
                return self.start + self.step * np.arange(self.trips)
            resolved = self.loop.resolve_constant(_Sum(element, 0))
            return np.array(resolved.constant) if resolved.element is None else None
        if op.opcode not in ARITHMETIC:
            return None
        operands = [self.values(value.sibling(operand)) for operand in op.operands]
        evaluated = [n for n in operands if n is not None]
        return ARITHMETIC[op.opcode](*evaluated) if len(evaluated) == len(operands) else None


class _Sum(NamedTuple):
    """An element of the loop state plus a constant."""

    element: int | None  # its index; None if the sum is only the constant
    constant: int


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop; `condition` and `body` are the roots of its two computations."""

    module: Module
    initial_state: Value
    condition: Value
    body: Value

    def counter(self) -> Counter | None:
        """Finds the element that the condition compares with a constant.

        Returns None unless it starts at a constant and the body adds a constant to it.
        """
        compared, _ = self.find_source(self.condition)
        comparison = compared.op
        if comparison.opcode != 'compare':
            return None
        match = re.search(r'direction=(\w+)', comparison.attributes)
        sums = [self.sum(compared.sibling(operand)) for operand in comparison.operands]
        if not match or len(sums) != 2:
            return None
        direction = match[1]
        left, right = (sum_ and self.resolve_constant(sum_) for sum_ in sums)
        if left and left.element is None:
            left, right, direction = right, left, _MIRRORED.get(direction, direction)
        if not left or not right or left.element is None or right.element is not None:
            return None
        element = left.element
        start, after = self.sum(self.initial_state, element), self.sum(self.body, element)
        if not start or start.element is not None or not after or after.element != element:
            return None
        step = after.constant
        trips = _count_terms(start.constant + left.constant, step, direction, right.constant)
        return None if trips is None else Counter(self, element, start.constant, step, trips)

    def resolve_constant(self, sum_: _Sum) -> _Sum:
        """Replaces the element in a sum by its value if that is a loop-invariant constant."""
        element, constant = sum_
        if element is not None and self.sum(self.body, element) == _Sum(element, 0):
            initial = self.sum(self.initial_state, element)
            if initial and initial.element is None:
                return _Sum(None, initial.constant + constant)
        return sum_

    def sum(self, value: Value, element: int | None = None) -> _Sum | None:
        """Reads a value, or an element of a tuple, as a `_Sum`. Returns None if it is not a sum."""
        value, element = self.find_source(value, element)
        op = value.op
        if op.integer_constant is not None:
            return _Sum(None, op.integer_constant)
        if op.opcode == 'parameter':
            return None if element is None else _Sum(element, 0)
        if op.opcode in ('add', 'subtract'):
            a, b = (self.sum(value.sibling(operand)) for operand in op.operands)
            sign = 1 if op.opcode == 'add' else -1
            if a and b and b.element is None:
                return _Sum(a.element, a.constant + sign * b.constant)
            if a and b and a.element is None and sign == 1:
                return _Sum(b.element, a.constant + b.constant)
        return None

    def find_source(self, value: Value, element: int | None = None) -> tuple[Value, int | None]:
        """Traces a value, or an element of a tuple, back through copies, tuples and calls.

        If the trace ends at a tuple, such as the parameter of a loop body, the second result is
        the index of the element. Otherwise it is None.
        """
        while True:
            op = value.op
            if op.opcode in _MOVES:
                value = value.sibling(op.operands[0])
            elif op.opcode == 'get-tuple-element' and element is None:
                value, element = value.sibling(op.operands[0]), op.element
            elif op.opcode == 'tuple' and element is not None:
                value, element = value.sibling(op.operands[element]), None
            elif op.opcode in ('fusion', 'call') and (called := self.module.called(op)):
                value = value.in_callee(called)
            elif op.opcode == 'parameter' and value.arguments:
                value = value.arguments[op.parameter_number]
            else:
                return value, element


_MIRRORED = {'LT': 'GT', 'LE': 'GE', 'GT': 'LT', 'GE': 'LE'}


def _count_terms(start: int, step: int, direction: str, limit: int) -> int | None:
    """Counts the terms of `start`, `start + step`, ... before the comparison with `limit` fails.

    Returns None if the count is unknown.

    >>> from einshard._hlo.loops import _count_terms
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
