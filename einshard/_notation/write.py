"""Writes terms as expressions: the only module that does. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .expression import Expression, Term


def write(left: Iterable[Term], right: Iterable[Term]) -> Expression:
    """Makes an expression from its sides, with text and spans, as if parsed from that text."""
    written_left = _written(left, 0)
    arrow = _end(written_left)
    written_right = _written(right, arrow + len('-> '))
    text = f'{_text(written_left)} -> {_text(written_right)}'.lstrip()
    return Expression(written_left, written_right, text=text)


def write_short(right: Iterable[Term]) -> Expression:
    """Makes an expression in the short form, with text and spans."""
    written = _written(right, 0)
    left = tuple(Term(term.name, span=term.span) for term in written if term.name is not None)
    return Expression(left, written, short=True, text=_text(written))


def _written(terms: Iterable[Term], at: int) -> tuple[Term, ...]:
    written: list[Term] = []
    for term in terms:
        end = at + len(str(term))
        written.append(replace(term, span=(at, end)))
        at = end + 1
    return tuple(written)


def _end(terms: tuple[Term, ...]) -> int:
    return terms[-1].span[1] + 1 if terms else 0


def _text(terms: tuple[Term, ...]) -> str:
    return ' '.join(map(str, terms))
