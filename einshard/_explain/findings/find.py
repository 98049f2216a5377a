"""Runs all diagnoses of a program. `search/advice.py` adds suggestions, which were compiled."""

from __future__ import annotations

from dataclasses import replace

from ..costs import cost_notes
from ..kinds import URGENT
from ..report_rows import Finding
from .arguments import replicated_results, unsharded_new_states, unsharded_states
from .constraints import names_without_rule, repeated_constraints, unused_constraints
from .exposed import exposed_communication
from .facts import Facts
from .gathered_axes import gathered_for_operation
from .gathers import (
    gathered_for_each_call,
    weights_gathered_again,
)
from .large_arrays import large_constants, replicated
from .latency import tested_in_loop, too_many_small
from .limits import asks_for_local_devices, does_not_fit, not_checked, promise_broken
from .next_call import (
    compiles_again,
    copied_donations,
    dense_groups,
    not_donated,
    other_types,
    unused_donations,
)
from .recomputation import recomputed_products
from .reductions import recomputed_collectives, sliced_sums, summed_in_loop
from .slow_network import slow_network

# In this order: each sees what earlier ones have not explained. Those that find the cause of
# several collectives come first, then those that describe single ones.
_DIAGNOSES = (
    does_not_fit,
    promise_broken,
    sliced_sums,
    summed_in_loop,
    unsharded_states,
    unsharded_new_states,
    replicated_results,
    compiles_again,
    copied_donations,
    gathered_for_each_call,
    names_without_rule,
    slow_network,
    unused_constraints,
)
_NOTES = (
    not_checked,
    asks_for_local_devices,
    replicated,
    large_constants,
    recomputed_collectives,
    recomputed_products,
    weights_gathered_again,
    repeated_constraints,
    gathered_for_operation,
    other_types,
    unused_donations,
    not_donated,
    dense_groups,
    tested_in_loop,
    too_many_small,
    exposed_communication,
    cost_notes,
)


def find_findings(facts: Facts) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Returns (findings, notes), those of the most exposed time first, then of the most bytes.

    A note says nothing about what a finding explains.
    """
    for diagnose in _DIAGNOSES:
        for found in [*diagnose(facts)]:
            rows = (c for c in facts.collectives if c.name in found.explains)
            facts.found.append(replace(found, reason=facts.reason_of(rows)))
    notes = [note for diagnose in _NOTES for note in diagnose(facts)]
    moved = {name for note in notes if note.kind == 'moved elements' for name in note.explains}
    notes = [
        n for n in notes if n.kind != 'gathered for an operation' or not moved >= {*n.explains}
    ]

    def order(found: Finding) -> tuple[bool, float, int]:
        exposed = sum(facts.exposed.get(name, 0.0) for name in found.explains)
        return found.kind not in URGENT, -exposed, -found.bytes

    return tuple(sorted(facts.found, key=order)), tuple(sorted(notes, key=order))
