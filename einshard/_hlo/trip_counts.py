"""How often the body of a `while` in an optimised HLO program runs; no JAX.

XLA notes it beside the loop on CPU and GPU. On TPU it does not, but JAX's scans and fori_loops
count there too, so the count is read off the loop: where its counter starts, what one run of the
body adds, and what the condition compares it with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .syntax import Instruction, Program

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MOVES = frozenset(('copy', 'copy-start', 'copy-done', 'bitcast', 'opt-barrier'))


def trip_count(program: Program, computation: str, line: str, loop: Instruction) -> int | None:
    """Runs of the body of a loop in a computation; None if it cannot be told."""
    if known := _KNOWN.search(line):
        return int(known[1])
    names = dict(re.findall(r'\b(condition|body)=%?([^\s,]+)', loop.attributes))
    return _Loop(program, computation, loop.operands[0], names['condition'], names['body']).count()


@dataclass(frozen=True, slots=True)
class _Frame:
    """A computation; with what its parameters are, if that is known."""

    computation: str
    arguments: tuple[tuple[_Frame, str], ...] = ()


# an element of the state of a loop, or None for none, plus a constant
_Sum = tuple[int | None, int]


@dataclass(frozen=True, slots=True)
class _Loop:
    program: Program
    outside: str
    state: str
    condition: str
    body: str

    def count(self) -> int | None:
        comparison, frame, _ = self.trace(_Frame(self.condition), '')
        if comparison.opcode != 'compare':
            return None
        direction = re.search(r'direction=(\w+)', comparison.attributes)
        sums = [self.sum(frame, operand) for operand in comparison.operands]
        if not direction or len(sums) != 2:
            return None
        how = direction[1]
        left, right = (self.unless_changed(sum_) for sum_ in sums)
        if left and left[0] is None:
            left, right, how = right, left, _MIRRORED.get(how, how)
        if not left or not right or left[0] is None or right[0] is not None:
            return None
        counter, ahead = left
        start = self.sum(_Frame(self.outside), self.state, counter)
        after = self.sum(_Frame(self.body), '', counter)
        if not start or start[0] is not None or not after or after[0] != counter:
            return None
        return _runs(start[1] + ahead, after[1], how, right[1])

    def unless_changed(self, sum_: _Sum | None) -> _Sum | None:
        """What the loop hands on unchanged is as it was outside, if that is a constant."""
        if (
            sum_
            and sum_[0] is not None
            and self.sum(_Frame(self.body), '', sum_[0]) == (sum_[0], 0)
        ):
            outside = self.sum(_Frame(self.outside), self.state, sum_[0])
            if outside and outside[0] is None:
                return None, outside[1] + sum_[1]
        return sum_

    def sum(self, frame: _Frame, name: str, element: int | None = None) -> _Sum | None:
        """A value, or an element of a tuple, as a sum; None where it is no such sum."""
        made, frame, element = self.trace(frame, name, element)
        if made.opcode == 'constant':
            return (None, int(made.given)) if re.fullmatch(r'-?\d+', made.given) else None
        if made.opcode == 'parameter':
            return None if element is None else (element, 0)
        if made.opcode in ('add', 'subtract'):
            a, b = (self.sum(frame, operand) for operand in made.operands)
            sign = 1 if made.opcode == 'add' else -1
            if a and b and b[0] is None:
                return a[0], a[1] + sign * b[1]
            if a and b and a[0] is None and sign == 1:
                return b[0], a[1] + b[1]
        return None

    def trace(
        self, frame: _Frame, name: str, element: int | None = None
    ) -> tuple[Instruction, _Frame, int | None]:
        """The instruction that made a value, behind copies, tuples and calls."""
        while True:
            made = self.program.instruction(frame.computation, name)
            if made.opcode in _MOVES:
                name = made.operands[0]
            elif made.opcode == 'get-tuple-element' and element is None:
                name = made.operands[0]
                element = int(made.attributes.removeprefix('index=').split(',')[0])
            elif made.opcode == 'tuple' and element is not None:
                name, element = made.operands[element], None
            elif made.opcode in ('fusion', 'call') and made.callee in self.program.spans:
                arguments = tuple((frame, operand) for operand in made.operands)
                frame, name = _Frame(made.callee, arguments), ''
            elif made.opcode == 'parameter' and frame.arguments:
                frame, name = frame.arguments[int(made.given)]
            else:
                return made, frame, element


_MIRRORED = {'LT': 'GT', 'LE': 'GE', 'GT': 'LT', 'GE': 'LE'}


def _runs(start: int, step: int, direction: str, limit: int) -> int | None:
    """How often `start`, `start + step`, ... hold against `limit` before the first that does not.

    >>> from einshard._hlo.trip_counts import _runs
    >>> _runs(0, 1, 'LT', 12), _runs(12, -2, 'GE', 1), _runs(0, 3, 'NE', 12), _runs(5, 1, 'LT', 3)
    (12, 6, 4, 0)
    """
    if direction in ('GT', 'GE'):
        mirrored = _MIRRORED[direction]
        return _runs(-start, -step, mirrored, -limit)
    if direction == 'LE':
        limit += 1
    if direction == 'NE' and step and not (limit - start) % step and (limit - start) // step >= 0:
        return (limit - start) // step
    if direction in ('LT', 'LE') and step > 0:
        return max(0, -(-(limit - start) // step))
    return None
