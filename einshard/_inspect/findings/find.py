"""Runs all diagnoses of a program."""

from __future__ import annotations

import itertools

from ..report_rows import Finding
from .activations import contracted_axes, missing_constraint
from .arguments import replicated_results, unsharded_states
from .constraints import names_without_rule, repeated_constraints, unused_constraints
from .facts import Facts
from .gathers import fully_rematerialized, gathered_again, weights_gathered_again
from .large_arrays import large_constants, replicated
from .limits import does_not_fit, not_checked, promise_broken
from .reductions import recomputed_collectives, sliced_sums, summed_in_loop
from .replicated_compute import replicated_compute
from .sharded_loops import sharded_loop_axis
from .sliced_axes import sliced_axis
from .slow_network import slow_network

_URGENT = ('does not fit', 'promise broken')  # findings about programs that do not run
_DIAGNOSES = (
    does_not_fit,
    promise_broken,
    missing_constraint,
    contracted_axes,
    sharded_loop_axis,
    sliced_axis,
    replicated_compute,
    sliced_sums,
    summed_in_loop,
    unsharded_states,
    replicated_results,
    fully_rematerialized,
    gathered_again,
    names_without_rule,
    slow_network,
    unused_constraints,
)
_NOTES = (
    not_checked,
    replicated,
    large_constants,
    recomputed_collectives,
    weights_gathered_again,
    repeated_constraints,
)


def find_findings(facts: Facts) -> tuple[Finding, ...]:
    found = itertools.chain.from_iterable(diagnose(facts) for diagnose in _DIAGNOSES)
    return tuple(sorted(found, key=lambda finding: (finding.kind not in _URGENT, -finding.bytes)))


def find_notes(facts: Facts) -> tuple[Finding, ...]:
    found = itertools.chain.from_iterable(note(facts) for note in _NOTES)
    return tuple(sorted(found, key=lambda finding: -finding.bytes))
