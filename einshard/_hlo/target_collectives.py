"""Finds the collectives that a TPU would run, in a program compiled for CPU. Imports no JAX.

The CPU backend has no reduce-scatter: it reduces all, and each device slices its part. It merges
all-reduces whether they are sliced or not, and gathers an array as often as it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from .collectives import MARKS, Collective
from .module import Computation, Instruction, Module, Place

_MOVES = ('bitcast', 'convert', 'copy', 'reshape', 'transpose')
_CHANNEL = re.compile(r'channel_id=\d+')


def target_collectives(module: Module, collectives: Sequence[Collective]) -> list[Collective]:
    """Returns the collectives with reduce-scatters, and without those that repeat another.

        >>> from einshard._hlo.collectives import find_collectives
        >>> from einshard._hlo.module import Module
        >>> text = '''HloModule jit_f, num_partitions=4
        ...
        ... ENTRY %main (g: f32[8]) -> f32[2] {
        ...   %g = f32[8]{0} parameter(0)
        ...   %i = u32[] partition-id()
        ...   %sum = f32[8]{0} all-reduce(%g), replica_groups=[1,4]<=[4], to_apply=%add
        ...   ROOT %mine = f32[2]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={2}
        ... }
        ... '''
        >>> module = Module(text)
        >>> [one.kind for one in target_collectives(module, find_collectives(module))]
        ['reduce-scatter']

    Args:
        module: a program compiled for CPU.
        collectives: its collectives.
    """
    places = {place.made.name: place for place in module.find(*MARKS)} if collectives else {}
    seen: set[tuple[str, ...]] = set()
    found: list[Collective] = []
    for one in collectives:
        here, made = places[one.name].here, places[one.name].made
        key = here.name, made.opcode, made.given, _CHANNEL.sub('', made.attributes)
        if one.kind == 'all-gather' and key in seen:
            continue
        seen.add(key)
        found += _scattered(module, places[one.name], one) if one.kind == 'all-reduce' else [one]
    return found


def _scattered(module: Module, place: Place, one: Collective) -> Iterator[Collective]:
    """Splits an all-reduce into what is reduced for all devices, and what is scattered."""
    is_tuple = place.made.type.startswith('(')
    elements = [place.made]
    if is_tuple:
        users = {user.element: user for user in place.here.users(place.made.name)}
        elements = [users.get(i) for i in range(len(one.operands))]
    sliced = [
        made is not None and _is_sliced(module, place.here, made, one.group_size)
        for made in elements
    ]
    for kind, scattered in (('all-reduce', False), ('reduce-scatter', True)):
        pairs = zip(one.operands, sliced, strict=True)
        arrays = tuple(array for array, is_sliced in pairs if is_sliced == scattered)
        if arrays:
            yield replace(one, kind=kind, operands=arrays)


def _is_sliced(module: Module, here: Computation, made: Instruction, n: int) -> bool:
    """Whether all that uses a value takes a slice of 1/n or less."""
    size = prod(made.results[0].shape)
    uses = list(_uses(module, here, made.name))
    return bool(uses) and all(
        use.opcode == 'dynamic-slice' and size % (n * prod(use.results[0].shape)) == 0
        for use in uses
    )


def _uses(module: Module, here: Computation, name: str) -> Iterator[Instruction]:
    """What uses a value in its computation, in fusions too, after moves and conversions."""
    for user in here.users(name):
        called = module.called(user) if user.opcode in ('fusion', 'call') else None
        if user.opcode in _MOVES:
            yield from _uses(module, here, user.name)
        elif called is not None:
            for i, operand in enumerate(user.operands):
                if operand == name:
                    yield from _uses(module, called, called.parameter(i))
        else:
            yield user
    root = here['']
    if name == root.name:
        sites = module.call_sites(here) if not here.is_entry else ()
        outside = [site for site in sites if site.made.opcode in ('fusion', 'call')]
        for site in outside:
            yield from _uses(module, site.here, site.made.name)
        if not outside:
            yield root
