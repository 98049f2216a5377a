"""Tests the suggestions in errors, and removes those that fail. Does not import JAX."""

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
        with_fix: repeats the failed call with another expression.
        on_devices: repeats the failed call on n devices. If None, all facts with device counts are
            removed.
    """

    def works_as_stated(fact: str) -> bool:
        if not isinstance(fact, DeviceCounts):
            return True
        if on_devices is None:
            return False
        return all(works(functools.partial(on_devices, n)) for n in fact.counts)

    facts = {label: fact for label, fact in error.facts.items() if works_as_stated(fact)}
    return with_working_fix(EinshardError(**error.parts(facts=facts)), with_fix)


def with_working_fix(error: EinshardError, with_fix: Callable[[str], object]) -> EinshardError:
    """Returns a copy of an error with a fix that works, or without a fix.

    `with_fix` repeats the failed call with another expression. If that fails too, for example
    because several expressions are wrong, the fix of the new error is tested next. The fact 'also
    wrong' lists the sentences of the new errors.
    """
    fix, others = error.fix, [*filter(None, [error.facts.get('also wrong')])]
    for _ in range(_MAX_FIXES):
        if not isinstance(fix, Suggestion):
            break
        try:
            with_fix(fix.expression)
        except EinshardError as other:
            # if its fix only reorders the last one, the error is not about the user's expression
            is_reordered = _terms(other.fix) == _terms(fix)
            if other.sentence not in (error.sentence, *others) and not is_reordered:
                others.append(other.sentence)
            fix = other.fix
            continue
        facts = {'also wrong': '; '.join(others)} if others else {}
        return EinshardError(**error.parts(fix=fix, facts={**error.facts, **facts}))
    return error.with_fix(None)


def _terms(fix: str | None) -> list[str]:
    return sorted(fix.expression.split()) if isinstance(fix, Suggestion) else []


_MAX_FIXES = 8  # a function may need one fix for each of its expressions


def works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except EinshardError:
        return False
    return True
