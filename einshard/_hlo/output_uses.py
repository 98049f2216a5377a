"""Maps collectives to the program outputs that they become. Imports no JAX."""

from __future__ import annotations

from collections.abc import Collection

from .collectives import KINDS, MARKS
from .module import Computation, Instruction, Module, Place

# operations that are not elementwise in their operands, so tracking stops
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
    """The numbers of the program outputs that each collective becomes.

    Follows elementwise operations only: the all-reduce of a gradient becomes the updated weights.
    Matrix products, reductions and loops are not followed.

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
    found = ((name, places.get(name)) for name in names)
    return {name: tuple(sorted(_outputs(module, place)) if place else ()) for name, place in found}


def _outputs(module: Module, place: Place) -> set[int]:
    if place.here.is_entry:
        return _reached(module, place.here, place.made.name)
    for _, caller, call in module.call_sites(place.here):  # on TPU, collectives may be in fusions
        if caller.is_entry and 'calls=' in call.attributes:
            return _reached(module, caller, call.name)
    return set()


def _reached(module: Module, here: Computation, name: str) -> set[int]:
    """The tuple elements of a computation's result that an array becomes; 0 without a tuple."""
    found: set[int] = set()
    seen, left = {name}, [name]
    root = here['']
    while left:
        value = left.pop()
        if value == root.name:
            found.add(0)
        for user in here.users(value):
            at = {i for i, operand in enumerate(user.operands) if operand == value}
            if user.name == root.name and user.opcode == 'tuple':
                found |= at
            elif user.opcode not in _NOT_ELEMENTWISE and user.name not in seen:
                made = _made_of(module, here, user, at)
                seen.update(made)
                left += made
    return found


def _made_of(module: Module, here: Computation, user: Instruction, at: set[int]) -> list[str]:
    """The values that an instruction makes of some operands: itself, or elements of its tuple."""
    outputs = at
    if user.opcode in ('fusion', 'call'):
        callee = module.called(user)
        if callee is None:
            return []
        reached = (_reached(module, callee, callee.parameter(i)) for i in at)
        outputs = set[int]().union(*reached)
    if not user.type.startswith('('):
        return [user.name] if outputs else []
    if user.opcode not in ('fusion', 'call', *KINDS):  # another tuple, as of -start
        return [user.name] if len(user.operands) == 1 else []
    return [one.name for one in here.users(user.name) if one.element in outputs]
