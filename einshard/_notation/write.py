"""Writes expressions from terms. No other module does. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .expression import Expression, Term


def write(left: Iterable[Term], right: Iterable[Term]) -> Expression:
    """Returns the expression with these sides, as if parsed from its text."""
    placed_left = _with_spans(left, 0)
    arrow = placed_left[-1].span[1] + 1 if placed_left else 0
    placed_right = _with_spans(right, arrow + len('-> '))
    text = f'{_text(placed_left)} -> {_text(placed_right)}'.lstrip()
    return Expression(placed_left, placed_right, text=text)


def write_short(right: Iterable[Term]) -> Expression:
    """Returns the expression in the short form (without '->'), as if parsed from its text."""
    placed = _with_spans(right, 0)
    left = tuple(Term(term.name, span=term.span) for term in placed if term.name is not None)
    return Expression(left, placed, short=True, text=_text(placed))


def _with_spans(terms: Iterable[Term], start: int) -> tuple[Term, ...]:
    """Sets the span of each term, for terms written from offset `start` with a space between."""
    placed: list[Term] = []
    for term in terms:
        end = start + len(str(term))
        placed.append(replace(term, span=(start, end)))
        start = end + 1
    return tuple(placed)


def _text(terms: tuple[Term, ...]) -> str:
    return ' '.join(map(str, terms))
