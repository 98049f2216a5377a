"""Writes expressions from terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .expression import Expression, Term


def write(left: Iterable[Term], right: Iterable[Term]) -> Expression:
    """Returns the expression with these sides, as if parsed from its text."""
    left = _with_spans(left, 0)
    arrow = left[-1].span[1] + 1 if left else 0
    right = _with_spans(right, arrow + len('-> '))
    return Expression(left, right, text=f'{_text(left)} -> {_text(right)}'.lstrip())


def write_short(right: Iterable[Term]) -> Expression:
    """Returns the expression in the short form (without '->'), as if parsed from its text."""
    right = _with_spans(right, 0)
    left = tuple(Term(term.name, span=term.span) for term in right if term.name is not None)
    return Expression(left, right, short=True, text=_text(right))


def with_unsharded(terms: Sequence[Term], names: Sequence[str]) -> list[Term]:
    """Adds an unsharded term for each of `names` that no term has, in the order of `names`."""
    terms = list(terms)
    for i, name in enumerate(names):
        named = [term.name for term in terms]
        if name in named:
            continue
        if i:
            at = len(named) - named[::-1].index(names[i - 1])
        else:  # the first axis goes before all others
            at = min((named.index(other) for other in names if other in named), default=len(named))
        terms.insert(at, Term(name))
    return terms


def _with_spans(terms: Iterable[Term], start: int) -> tuple[Term, ...]:
    """Sets the span of each term, for terms written from offset `start` with a space between."""
    spanned: list[Term] = []
    for term in terms:
        end = start + len(str(term))
        spanned.append(replace(term, span=(start, end)))
        start = end + 1
    return tuple(spanned)


def _text(terms: tuple[Term, ...]) -> str:
    return ' '.join(map(str, terms))
