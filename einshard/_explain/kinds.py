"""The kinds of findings and of notes. docs/explain.md says what each reports, in this order."""

from __future__ import annotations

from typing import Literal, get_args

FindingKind = Literal[
    # those that a change corrects, named for the change
    'wrong constraint',
    'needless constraint',
    'missing constraint',
    'placement',
    'reshard',
    'full rematerialization',
    # rules
    'does not fit',
    'promise broken',
    'sliced all-reduce',
    'summed in a loop',
    'unsharded states',
    'unsharded new states',
    'replicated result',
    'second compile',
    'copied donation',
    'gathered again',
    'names without a rule',
    'slow network',
    'gathered for an operation',
    'no effect',
]
# A finding whose costs no change has lowered is a note of its kind, too.
NoteKind = Literal[
    'cost',
    'moved elements',
    'replicated',
    'constant',
    'donation',
    'sent again',
    'recomputation',
    'exposed communication',
    'dense groups',
    'collective in a condition',
    'many small collectives',
    'asks for local devices',
    'not checked',
    'not tried',
]
Kind = FindingKind | NoteKind

FINDINGS: tuple[FindingKind, ...] = get_args(FindingKind)
NOTES: tuple[NoteKind, ...] = get_args(NoteKind)

# The program does not run. They come first.
URGENT: tuple[Kind, ...] = ('does not fit', 'promise broken')
# They do not depend on what a change costs: the program does not run, or code has no effect.
FACTS: tuple[Kind, ...] = (*URGENT, 'no effect', 'names without a rule', 'unsharded new states')
# About results that are sharded unlike the arguments that they replace in the next call.
PINNED: tuple[Kind, ...] = ('second compile', 'replicated result')
