"""The one exception of the package, and how it looks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._words import columns

Span = tuple[int, int]


class EinshardError(ValueError):
    """What is wrong with a sharding: a sentence, the expression with carets, facts, a fix.

    Every bad expression, spec, shape, mesh or device count raises this class and no other. The
    parts are attributes, so that a tool can show them its own way.

    Attributes:
        sentence: one sentence, values included.
        expression: the expression as the user wrote it, or None.
        spans: (start, end) offsets of the guilty terms in `expression`.
        facts: labelled facts, in the order shown.
        fix: an expression or call that works here, where one is certain.
    """

    def __init__(
        self,
        sentence: str,
        *,
        expression: str | None = None,
        spans: Iterable[Span] = (),
        facts: Mapping[str, object] | None = None,
        fix: str | None = None,
    ):
        self.sentence = sentence
        self.expression = expression
        self.spans = tuple(spans)
        self.facts = {label: str(fact) for label, fact in (facts or {}).items()}
        self.fix = fix
        super().__init__(self._render())

    def about(self, **facts: object) -> EinshardError:
        """The same error with what it is about, where that was not known when it arose."""
        return type(self)(**self.parts(facts={**labelled(facts), **self.facts}))

    def with_fix(self, fix: str | None) -> EinshardError:
        """The same error with another fix, or none."""
        return type(self)(**self.parts(fix=fix))

    def parts(self, **others: Any) -> dict[str, Any]:
        """What the class takes to make the same error, or one with other parts."""
        return {
            'sentence': self.sentence,
            'expression': self.expression,
            'spans': self.spans,
            'facts': self.facts,
            'fix': self.fix,
            **others,
        }

    def _render(self) -> str:
        lines = [shown(self.sentence)]
        if self.expression is not None:
            lines.append('    ' + shown(self.expression))
            if self.spans:
                lines.append('    ' + _carets(self.expression, self.spans))
        rows = dict(self.facts)
        if self.fix is not None:
            rows['here'] = self.fix
        width = max(map(len, rows), default=0) + 1
        lines += [f'  {label + ":":<{width}} {shown(fact)}' for label, fact in rows.items()]
        return '\n'.join(lines)

    def __reduce__(self):
        # args holds the rendered text: rebuilding from it alone would render the parts twice
        return functools.partial(type(self), **self.parts()), ()


EinshardError.__module__ = 'einshard'  # errors print their public name


def labelled(facts: Mapping[str, object]) -> dict[str, object]:
    """Facts given by keyword, with blanks in their labels."""
    return {label.replace('_', ' '): fact for label, fact in facts.items()}


def _carets(text: str, spans: Sequence[Span]) -> str:
    guilty = {i for start, end in spans for i in range(start, end)}
    line = ''
    for i, character in enumerate(text):
        line += ('^' if i in guilty else ' ') * columns(shown(character))
    past_the_end = any(start >= len(text) for start, _ in spans)
    return (line + '^' if past_the_end else line).rstrip()


def shown(text: str) -> str:
    """Text for one line of a terminal: white space as blanks, what cannot be seen as a mark."""
    return ''.join(' ' if c.isspace() else c if c.isprintable() else '\ufffd' for c in text)


def quoted(words: Iterable[str]) -> str:
    """'a', 'b' and 'c'"""
    *most, last = [f"'{word}'" for word in words]
    return f'{", ".join(most)} and {last}' if most else last


def plural(n: int, noun: str) -> str:
    """1 device, 2 devices"""
    if n == 1:
        return f'{n} {noun}'
    return f'{n} {noun.replace("axis", "axe")}s'
