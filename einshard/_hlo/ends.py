"""Optimised HLO text -> the results of the program that collectives end in; no JAX."""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection

from .collectives import KINDS
from .computations import Computation, Computations
from .syntax import Instruction

# what comes of these is no longer the array, a number of which each of its own numbers became
_OTHERWISE = {
    'broadcast',
    'conditional',
    'convolution',
    'custom-call',
    'dot',
    'gather',
    'reduce',
    'reduce-window',
    'scatter',
    'select-and-scatter',
    'sort',
    'while',
}
_INDEX = re.compile(r'index=(\d+)')


def read_ends(text: str, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The numbers of the program's results that each of its collectives becomes.

    By arithmetic on elements alone: the sum of a gradient ends in the weights that it updates, but
    nothing is followed through products, sums over axes and loops.

        >>> from einshard._hlo.ends import read_ends
        >>> text = '''HloModule jit_f, num_partitions=4
        ...
        ... ENTRY %main (w: f32[8], g: f32[8]) -> (f32[], f32[8]) {
        ...   %w = f32[8]{0} parameter(0)
        ...   %g = f32[8]{0} parameter(1)
        ...   %sum = f32[8]{0} all-reduce(%g), channel_id=1, to_apply=%add
        ...   %new = f32[8]{0} subtract(%w, %sum)
        ...   %norm = f32[] dot(%sum, %sum), lhs_contracting_dims={0}
        ...   ROOT %both = (f32[], f32[8]{0}) tuple(%norm, %new)
        ... }
        ... '''
        >>> read_ends(text, ['sum'])
        {'sum': (1,)}

    Args:
        text: of an optimised program.
        names: of the instructions of the collectives.
    """
    reader = _Reader(text)
    return {name: tuple(sorted(reader.ends_of(name))) for name in names}


class _Reader(Computations):
    def ends_of(self, name: str) -> set[int]:
        found = re.search(rf'\n +(?:ROOT )?%?{re.escape(name)} = ', self.text)
        if found is None:
            return set()
        here = self.computation(bisect.bisect(self.starts, found.start()) - 1)
        if not here.is_entry:  # TPU has collectives in fusions
            caller, call = self.caller('calls', here.name)
            if caller is None or call is None or not caller.is_entry:
                return set()
            here, name = caller, call.name
        return self.reached(here, name)

    def reached(self, here: Computation, name: str) -> set[int]:
        """The elements of a computation's result that an array becomes; 0 if it is no tuple."""
        found: set[int] = set()
        seen, left = {name}, [name]
        while left:
            value = left.pop()
            if value == here.root:
                found.add(0)
            for user in map(here.__getitem__, here.users.get(value, ())):
                at = {i for i, operand in enumerate(user.operands) if operand == value}
                if user.name == here.root and user.opcode == 'tuple':
                    found |= at
                elif user.opcode not in _OTHERWISE and user.name not in seen:
                    made = self.made_of(here, user, at)
                    seen.update(made)
                    left += made
        return found

    def made_of(self, here: Computation, user: Instruction, at: set[int]) -> list[str]:
        """What an instruction makes of some of its operands: itself, or elements of its tuple."""
        outputs = at
        if user.opcode in ('fusion', 'call'):
            if user.callee not in self.numbers:
                return []
            callee = self.computation(self.numbers[user.callee])
            outputs = set[int]().union(*(self.reached(callee, callee.parameter(i)) for i in at))
        if not user.type.startswith('('):
            return [user.name] if outputs else []
        if user.opcode not in ('fusion', 'call', *KINDS):  # a tuple of something else, as -start
            return [user.name] if len(user.operands) == 1 else []
        elements = map(here.__getitem__, here.users.get(user.name, ()))
        return [one.name for one in elements if _index(one) in outputs]


def _index(element: Instruction) -> int:
    found = _INDEX.search(element.attributes)
    return int(found[1]) if found else -1
