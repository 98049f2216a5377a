"""Separates collectives that the user's code requests from those that the compiler inserts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..._program.hlo.collective import Collective
from ..._program.hlo.sources import operations
from ..why import REQUESTED, UNKNOWN
from .facts import Facts

_CONSTRAINTS = {'sharding_constraint', 'reshard'}


def with_causes(facts: Facts) -> Sequence[Collective]:
    return [replace(c, cause=_cause(facts, c)) for c in facts.collectives]


def _cause(facts: Facts, collective: Collective) -> str:
    if collective.name in facts.reasons:
        return facts.reasons[collective.name].cause
    # without the traced program, the name of a constraint says what the user asked for
    found = {*operations(collective.op_name)}
    in_shard_map = 'shard_map' in collective.op_name.rpartition('/')[0]
    is_written = in_shard_map and not collective.is_spmd_generated
    return REQUESTED if found <= _CONSTRAINTS or is_written else UNKNOWN
