"""Tests the suggestions in errors, and removes those that fail. Does not import JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ._errors import DeviceCounts, EinshardError, Suggestion


def keep_working_suggestions(
    error: EinshardError,
    retry: Callable[[str], object],
    retry_on: Callable[[int], object] | None = None,
) -> EinshardError:
    """Returns a copy of an error without the suggestions that fail.

    A fix that is not an expression is removed too.

    Args:
        retry: repeats the failed call with another expression.
        retry_on: repeats it on n devices. If None, all `DeviceCounts` in `error.facts` are removed.
    """

    def works_as_stated(fact: str) -> bool:
        if not isinstance(fact, DeviceCounts):
            return True
        if retry_on is None:
            return False
        return all(works(functools.partial(retry_on, n)) for n in fact.counts)

    facts = {label: fact for label, fact in error.facts.items() if works_as_stated(fact)}
    return with_working_fix(EinshardError(**error.parts(facts=facts)), retry)


def with_working_fix(error: EinshardError, retry: Callable[[str], object]) -> EinshardError:
    """Returns a copy of an error with a fix that works, or without a fix.

    `retry` repeats the failed call with another expression. If this and its alternatives fail too,
    for example because several expressions are wrong, tests the fix of the new error next. The fact
    'also wrong' lists the sentences of the new errors.
    """
    fix, also_wrong = error.fix, [*filter(None, [error.facts.get('also wrong')])]
    for _ in range(_MAX_FIXES):
        if not isinstance(fix, Suggestion):
            break
        other: EinshardError | None = None
        texts = [fix.expression, *fix.alternatives]
        for i, text in enumerate(texts):
            try:
                retry(text)
            except EinshardError as failure:
                other = other or failure
            else:
                facts = {'also wrong': '; '.join(also_wrong)} if also_wrong else {}
                facts = {**error.facts, **facts}
                working = Suggestion(text, texts[i + 1 :])  # the rest may work on another mesh
                return EinshardError(**error.parts(fix=working, facts=facts))
        assert other is not None
        # if only the order of terms in `fix` was wrong, `other` is not about the user's code
        is_reordered = _terms(other.fix) == _terms(fix)
        if other.sentence not in (error.sentence, *also_wrong) and not is_reordered:
            also_wrong.append(other.sentence)
        fix = other.fix
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
