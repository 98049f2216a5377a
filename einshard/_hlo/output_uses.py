"""Maps collectives to the program outputs that they become. Imports no JAX."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from .collectives import KINDS, MARKS
from .module import Computation, Instruction, Module

# operations that are not elementwise, where tracking stops
_NOT_ELEMENTWISE = {
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


def output_uses(module: Module, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Returns, for each collective, the indices of the program outputs computed from its result.

    Follows only elementwise operations, including inside loops: from the all-reduce of a gradient
    to the updated weights, but not through matrix products and reductions.

        >>> from einshard._hlo.module import Module
        >>> from einshard._hlo.output_uses import output_uses
        >>> text = '''HloModule jit_f, num_partitions=4
        ...
        ... ENTRY %main (w: f32[8], g: f32[8]) -> (f32[], f32[8]) {
        ...   %w = f32[8]{0} parameter(0)
        ...   %g = f32[8]{0} parameter(1)
        ...   %sum = f32[8]{0} all-reduce(%g), replica_groups=[1,4]<=[4], to_apply=%add
        ...   %new = f32[8]{0} subtract(%w, %sum)
        ...   %norm = f32[] dot(%sum, %sum), lhs_contracting_dims={0}
        ...   ROOT %both = (f32[], f32[8]{0}) tuple(%norm, %new)
        ... }
        ... '''
        >>> output_uses(Module(text), ['sum'])
        {'sum': (1,)}

    Args:
        module: an optimized program.
        names: the names of the collectives' instructions.
    """
    places = {place.made.name: place for place in module.find(*MARKS)} if names else {}
    uses = _Uses(module)
    return {
        name: tuple(sorted(uses.outputs(places[name].here, [name]))) if name in places else ()
        for name in names
    }


class _Uses:
    def __init__(self, module: Module):
        self._module = module
        self._known: dict[tuple[str, str], set[int]] = {}

    def outputs(self, here: Computation, names: Iterable[str]) -> set[int]:
        """Returns the indices of the program outputs computed from values of a computation."""
        elements = self.reached_by(here, names)
        if here.is_entry or not elements:
            return elements
        outputs: set[int] = set()
        for _, caller, call in self._module.call_sites(here):
            if call.opcode == 'while':
                outputs |= self.outputs(caller, _elements(caller, call, elements))
            elif call.opcode in ('fusion', 'call'):
                made = _elements(caller, call, elements) if call.type[0] == '(' else [call.name]
                outputs |= self.outputs(caller, made)
        return outputs

    def reached_by(self, here: Computation, names: Iterable[str]) -> set[int]:
        """Returns the elements of a computation's result that are computed from these values."""
        return set[int]().union(*(self.reached(here, name) for name in names))

    def reached(self, here: Computation, name: str) -> set[int]:
        """Does the same for one value; 0 stands for a result that is not a tuple."""
        key = here.name, name
        if key not in self._known:
            self._known[key] = set()  # ends the recursion if a value depends on itself
            self._known[key] = set(self._reached(here, name))
        return self._known[key]

    def _reached(self, here: Computation, name: str) -> Iterator[int]:
        seen, left = {name}, [name]
        root = here['']
        while left:
            value = left.pop()
            if value == root.name and root.opcode != 'tuple':
                yield 0
            for user in here.users(value):
                at = {i for i, operand in enumerate(user.operands) if operand == value}
                if user.opcode == 'tuple':
                    if user.name == root.name:
                        yield from at
                    made = [name for i in at for name in self._of_loops(here, user, i)]
                elif user.opcode in _NOT_ELEMENTWISE and not user.joins_slices:
                    continue
                else:
                    made = self._made_of(here, user, at)
                left += set(made) - seen
                seen.update(made)

    def _of_loops(self, here: Computation, state: Instruction, at: int) -> Iterator[str]:
        """Yields the loop outputs that depend on element `at` of the initial loop state."""
        for loop in here.users(state.name):
            body = loop.body if loop.opcode == 'while' else ''
            if body:
                inside = self._module.computation(body)
                start = _elements(inside, inside[inside.parameter(0)], {at})
                yield from _elements(here, loop, self.reached_by(inside, start))

    def _made_of(self, here: Computation, user: Instruction, at: set[int]) -> list[str]:
        """Lists the values that a user computes from operands `at`: itself, or its elements."""
        outputs = at
        if user.opcode in ('fusion', 'call'):
            callee = self._module.called(user)
            if callee is None:
                return []
            outputs = self.reached_by(callee, map(callee.parameter, at))
        if not user.type.startswith('('):
            return [user.name] if outputs else []
        if user.opcode not in ('fusion', 'call', *KINDS):  # such as copy-start
            return [user.name] if len(user.operands) == 1 else []
        return _elements(here, user, outputs)


def _elements(here: Computation, made: Instruction, at: Collection[int]) -> list[str]:
    """Returns the names of the instructions that read elements `at` of a tuple."""
    return [user.name for user in here.users(made.name) if user.element in at]
