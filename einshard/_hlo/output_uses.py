"""Maps collectives to the program outputs computed from their results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from .collective import KINDS
from .find_collectives import MARKS
from .module import Computation, Instruction, Module

# operations that are not followed, except a custom-call that joins slices
_STOPS = {
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
    'while',  # `_loop_outputs` follows loops from the tuple of their initial state
}


def output_uses(module: Module, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Returns {collective: indices of the program outputs computed from its result}.

    For example, follows an all-reduced gradient to the updated weights. Follows loops, but not
    dots, reductions or other operations in `_STOPS`.

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
    """
    sites = {site.op.name: site for site in module.find(*MARKS)} if names else {}
    uses = _Uses(module)
    return {
        name: tuple(sorted(uses.outputs(sites[name].comp, [name]))) if name in sites else ()
        for name in names
    }


class _Uses:
    def __init__(self, module: Module):
        self._module = module
        self._cache: dict[tuple[str, str], set[int]] = {}

    def outputs(self, comp: Computation, names: Iterable[str]) -> set[int]:
        """Returns the indices of the program outputs that depend on `names` in `comp`."""
        elements = self.result_elements(comp, names)
        if comp.is_entry or not elements:
            return elements
        outputs: set[int] = set()
        for _, caller, call in self._module.call_sites(comp):
            if call.opcode == 'while':
                outputs |= self.outputs(caller, _element_names(caller, call, elements))
            elif call.opcode in ('fusion', 'call'):
                is_tuple = call.type[0] == '('
                values = _element_names(caller, call, elements) if is_tuple else [call.name]
                outputs |= self.outputs(caller, values)
        return outputs

    def result_elements(self, comp: Computation, names: Iterable[str]) -> set[int]:
        """Returns the indices of the elements in the result of `comp` that depend on `names`."""
        return set[int]().union(*(self.elements_from(comp, name) for name in names))

    def elements_from(self, comp: Computation, name: str) -> set[int]:
        """Like `result_elements`, for one name. A result that is not a tuple is element 0."""
        key = comp.name, name
        if key not in self._cache:
            self._cache[key] = set(self._trace(comp, name))
        return self._cache[key]

    def _trace(self, comp: Computation, name: str) -> Iterator[int]:
        seen, pending = {name}, [name]
        root = comp.root
        while pending:
            value = pending.pop()
            if value == root.name and root.opcode != 'tuple':
                yield 0
            for user in comp.users(value):
                indices = {i for i, operand in enumerate(user.operands) if operand == value}
                if user.opcode == 'tuple':
                    if user.name == root.name:
                        yield from indices
                    values = [name for i in indices for name in self._loop_outputs(comp, user, i)]
                elif user.opcode in _STOPS and not user.joins_slices:
                    continue
                else:
                    values = self._values_of(comp, user, indices)
                pending += set(values) - seen
                seen.update(values)

    def _loop_outputs(self, comp: Computation, state: Instruction, i: int) -> Iterator[str]:
        """Yields the loop outputs that depend on element `i` of the initial state `state`."""
        for loop in comp.users(state.name):
            body = loop.body if loop.opcode == 'while' else ''
            if body:
                inside = self._module.computation(body)
                start = _element_names(inside, inside[inside.parameter(0)], {i})
                yield from _element_names(comp, loop, self.result_elements(inside, start))

    def _values_of(self, comp: Computation, user: Instruction, indices: set[int]) -> list[str]:
        """Returns the names of the values that `user` computes from the operands `indices`."""
        elements = indices  # element i of a collective's result comes from operand i
        if user.opcode in ('fusion', 'call'):
            callee = self._module.called(user)
            if callee is None:
                return []
            elements = self.result_elements(callee, map(callee.parameter, indices))
        if not user.type.startswith('('):
            return [user.name] if elements else []
        if user.opcode not in ('fusion', 'call', *KINDS):  # such as copy-start
            return [user.name] if len(user.operands) == 1 else []
        return _element_names(comp, user, elements)


def _element_names(comp: Computation, tuple_: Instruction, indices: Collection[int]) -> list[str]:
    return [user.name for user in comp.users(tuple_.name) if user.element in indices]
