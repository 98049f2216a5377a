"""EinshardError, and the format of its message."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from ._text import display_width

Span = tuple[int, int]


class EinshardError(ValueError):
    """An invalid expression, spec, shape, mesh or device count.

    The message is a sentence. It may be followed by the expression with carets, labeled facts, and
    a fix after `try:`.

        >>> from einshard import EinshardError, make_sharding
        >>> try:
        ...     make_sharding('batch d -> bacth* d')
        ... except EinshardError as error:
        ...     print(error)
        'bacth' is not on the left side
            batch d -> bacth* d
                       ^^^^^^
          left side: batch d
          try:       'batch d -> batch* d'

    The parts are also attributes, for tools that format errors themselves.

    Attributes:
        sentence: what is wrong, with the values.
        expression: the expression as written, or None.
        spans: (start, end) offsets of the marked terms in `expression`.
        facts: facts by label, in the order shown.
        fix: an expression (tested), option or call to write instead, or None.
        code: what kind of error it is, such as 'not-divisible', for programs. docs/errors.md lists
            the codes.
    """

    code = 'argument'

    def __init__(
        self,
        sentence: str,
        *,
        code: str | None = None,
        expression: str | None = None,
        spans: Iterable[Span] = (),
        facts: Mapping[str, object] | None = None,
        fix: str | None = None,
    ):
        self.sentence = sentence
        self.code = code or type(self).code
        self.expression = expression
        self.spans = tuple(spans)
        self.facts = {
            _label(key): fact if isinstance(fact, str) else str(fact)
            for key, fact in (facts or {}).items()
        }
        self.fix = fix
        super().__init__(sentence)

    def about(self, **facts: object) -> EinshardError:
        """Returns a copy with more facts, shown first. Does not replace existing facts."""
        return type(self)(
            **self.parts(facts={**{_label(key): fact for key, fact in facts.items()}, **self.facts})
        )

    def with_fix(self, fix: str | None) -> EinshardError:
        return type(self)(**self.parts(fix=fix))

    def parts(self, **others: Any) -> dict[str, Any]:
        """Returns the constructor arguments, with some of them replaced by `others`."""
        return {
            'sentence': self.sentence,
            'code': self.code,
            'expression': self.expression,
            'spans': self.spans,
            'facts': self.facts,
            'fix': self.fix,
            **others,
        }

    def __str__(self) -> str:
        # formatted when it is shown: a tree with 10,000 wrong leaves makes 50,000 errors
        lines = [printable(self.sentence)]
        if self.expression is not None:
            lines.append('    ' + printable(self.expression))
            if self.spans:
                lines.append('    ' + _carets(self.expression, self.spans))
        rows = dict(self.facts)
        if self.fix is not None:
            rows['try'] = self.fix
        width = max(map(display_width, rows), default=0)
        for label, fact in rows.items():
            lines.append(f'  {label}:{" " * (width - display_width(label))} {printable(fact)}')
        return '\n'.join(lines)

    def __reduce__(self):
        # self.args has only the sentence
        return functools.partial(type(self), **self.parts()), ()


def combine_errors(errors: Sequence[EinshardError]) -> EinshardError:
    """Returns the first error, with a fact 'also' that lists the arrays of the other errors.

    Errors whose sentence differs from that of the first error are listed with their sentence. If
    there is no mesh, says only that: without a mesh, specs that need none have other errors.
    """
    no_mesh = [error for error in errors if error.sentence.endswith('but there is no mesh')]
    first, *others = no_mesh[:1] or errors
    if not others:
        return first
    also: list[str] = []
    for error in others[:_MAX_ALSO]:
        sentence = '' if error.sentence == first.sentence else f': {error.sentence}'
        also.append(error.facts.get('array', '') + sentence)
    more = len(others) - len(also)
    text = '; '.join(also) + (f'; and {more} more' if more else '')
    return type(first)(**first.parts(facts={**first.facts, 'also': text}))


_MAX_ALSO = 8


EinshardError.__module__ = 'einshard'  # tracebacks print the public name


_F = TypeVar('_F', bound=Callable[..., Any])
PUBLIC: list[Callable[..., Any]] = []  # what `public` decorates


def public(function: _F) -> _F:
    """Decorates a public function: the tracebacks of its errors have no frames of this package."""
    PUBLIC.append(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise  # does not add this frame again

    return cast(_F, call)


def hide_frames(error: BaseException) -> None:
    """Removes the frames of this package from a traceback, for an error of the user's code.

    An error of this package keeps them, except EinshardError. With JAX_TRACEBACK_FILTERING=off, so
    does every error.
    """
    jax = sys.modules.get('jax')
    if jax is not None and jax.config.jax_traceback_filtering == 'off':
        return
    entries: list[types.TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if not isinstance(error, EinshardError) and (not entries or _is_inner(entries[-1])):
        return
    kept = None
    for entry in reversed(entries):
        if not _is_inner(entry):
            entry.tb_next = kept
            kept = entry
    error.__traceback__ = kept


def _is_inner(entry: types.TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_FOLDER)


_FOLDER = f'{Path(__file__).parent}{os.sep}'


def _label(key: str) -> str:
    """Turns a keyword into the label of a fact: 'works with' for 'works_with'."""
    return key.replace('_', ' ') if key.isidentifier() else key


class Suggestion(str):
    """An expression to write instead of an invalid one, as a string in quotes.

    `alternatives` are more expressions, for the case that this one does not work.
    """

    expression: str
    alternatives: tuple[str, ...]

    def __new__(cls, expression: str, alternatives: Sequence[str] = ()) -> Suggestion:
        suggestion = super().__new__(cls, f"'{expression}'")
        suggestion.expression = expression
        suggestion.alternatives = tuple(alternatives)
        return suggestion

    def __reduce__(self):
        return Suggestion, (self.expression, self.alternatives)

    def inside(self, before: str, after: str) -> Suggestion:
        """Returns the same suggestion for a longer expression."""
        texts = [f'{before}{text}{after}' for text in (self.expression, *self.alternatives)]
        return Suggestion(texts[0], texts[1:])


class RuleSuggestion(str):
    """An axis rule that replaces one that does not fit: "axis_rules(batch='@data')"."""

    name: str
    placement: str

    def __new__(cls, name: str, placement: str) -> RuleSuggestion:
        suggestion = super().__new__(cls, f"axis_rules({name}='{placement}')")
        suggestion.name, suggestion.placement = name, placement
        return suggestion

    def __reduce__(self):
        return RuleSuggestion, (self.name, self.placement)


class DeviceCounts(str):
    """A fact that lists device counts for which a call works: '1, 4, 9, ... devices'."""

    counts: tuple[int, ...]

    def __new__(cls, text: str, counts: Sequence[int] = ()) -> DeviceCounts:
        fact = super().__new__(cls, text)
        fact.counts = tuple(counts)
        return fact


def _carets(text: str, spans: Sequence[Span]) -> str:
    marked = {i for start, end in spans for i in range(start, end)}
    shown = printable(text)
    line = ''
    for i in range(len(text)):
        # not of each character: the letters of a decomposed Hangul syllable are as wide as one
        width = i + 1 if shown.isascii() else display_width(shown[: i + 1])
        line += ('^' if i in marked else ' ') * (width - len(line))
    past_the_end = any(start >= len(text) for start, _ in spans)
    return (line + '^' if past_the_end else line).rstrip()


def printable(text: str) -> str:
    """Replaces whitespace with spaces, and unprintable characters with U+FFFD."""
    if text.isascii() and text.isprintable():
        return text
    return ''.join(' ' if c.isspace() else c if c.isprintable() else '\ufffd' for c in text)


def quoted(words: Iterable[str]) -> str:
    """Quotes and lists words: "'a', 'b' and 'c'"."""
    *others, last = [f"'{word}'" for word in words]
    return f'{", ".join(others)} and {last}' if others else last


def plural(n: int, noun: str) -> str:
    """Formats a number of things: '1 device', '2 devices', '2 axes'."""
    if n == 1:
        return f'{n} {noun}'
    return f'{n} {noun.replace("axis", "axe")}s'
