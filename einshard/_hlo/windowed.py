"""Collective einsums: loops of matrix products and permutes that replace a collective. No JAX.

XLA may split an all-gather or reduce-scatter and the product next to it into pieces, to send one
piece while it multiplies another. The program then has a loop with permutes. Together they are one
collective, with pieces as its operands or results.
"""

from __future__ import annotations

import re

from .module import Computation, Module, Place

_BODY = re.compile(r'windowed_dot_general_body_(ag|rs)')  # named so by the SPMD partitioner
_MOVES = frozenset(
    ('copy', 'copy-start', 'copy-done', 'bitcast', 'collective-permute-done', 'get-tuple-element')
)


class Windowed:
    """The loops of collective einsums in a program.

    Attributes:
        loops: by the offset of the loop, the loop, and 'ag' or 'rs'.
    """

    def __init__(self, module: Module):
        self._module = module
        self.loops = {
            loop.start: (loop, body[1])
            for loop in module.find(' while(')
            if (body := _BODY.search(loop.made.attributes))
        }

    def loop(self, place: Place) -> int | None:
        """The offset of the loop that a permute belongs to, or None."""
        path = {site.start for site in self._module.path(place.here) or () if self.loops}
        for start, (loop, _) in self.loops.items():
            # the first or the last step may be outside of the loop
            is_next_to = loop.here is place.here and (
                _is_first(place, loop) or _is_last(place, loop)
            )
            if start in path or is_next_to:
                return start
        return None


def _is_first(place: Place, loop: Place) -> bool:
    """Whether a permute sends what the loop starts with."""
    state = loop.here[loop.made.operands[0]]
    return any(_origin(loop.here, operand) == place.made.name for operand in state.operands)


def _is_last(place: Place, loop: Place) -> bool:
    """Whether a permute sends what the loop ends with, maybe after an elementwise fusion."""
    here, (sent, *_) = place.here, place.made.operands
    made = here[_origin(here, sent)]
    sources = made.operands if made.opcode == 'fusion' and _is_alike(place, loop) else [made.name]
    return loop.made.name in [_origin(here, source) for source in sources]


def _is_alike(place: Place, loop: Place) -> bool:
    return place.made.op_name == loop.made.op_name != ''


def _origin(here: Computation, name: str) -> str:
    """The instruction that made a value, traced through copies."""
    while here[name].opcode in _MOVES:
        name = here[name].operands[0]
    return name
