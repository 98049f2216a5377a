"""Tests the suggestions in errors, and removes those that fail. Imports no JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ._errors import DeviceCounts, EinshardError, Suggestion


def keep_working_suggestions(
    error: EinshardError,
    with_fix: Callable[[str], object],
    on_devices: Callable[[int], object] | None = None,
) -> EinshardError:
    """Returns a copy of an error without the suggestions that fail.

    A fix that is not an expression is removed too.

    Args:
        error: the error. If its fix raises an error with another fix, as when several expressions
            are wrong, that fix is tested next.
        with_fix: makes the failed call with another expression.
        on_devices: makes the failed call on another number of devices; None if that is impossible,
            which removes all facts with device counts.
    """

    def holds(fact: str) -> bool:
        if not isinstance(fact, DeviceCounts):
            return True
        if on_devices is None:
            return False
        return all(works(functools.partial(on_devices, n)) for n in fact.counts)

    facts = {label: fact for label, fact in error.facts.items() if holds(fact)}
    return EinshardError(**error.parts(fix=working_fix(error, with_fix), facts=facts))


def working_fix(error: EinshardError, with_fix: Callable[[str], object]) -> Suggestion | None:
    """Returns the fix of an error if it works; else tests the fix of the error that it raises.

    Returns None if none works, or if a fix is not an expression.
    """
    fix = error.fix
    for _ in range(_MAX_FIXES):
        if not isinstance(fix, Suggestion):
            return None
        try:
            with_fix(fix.expression)
            return fix
        except EinshardError as other:
            fix = other.fix
    return None


_MAX_FIXES = 8  # a function may need one fix for each of its expressions


def works(attempt: Callable[[], object]) -> bool:
    """Whether a call raises no EinshardError."""
    try:
        attempt()
    except EinshardError:
        return False
    return True
