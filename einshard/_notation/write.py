"""Writes expressions from terms. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable
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
