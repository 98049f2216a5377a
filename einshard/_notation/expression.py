"""text -> Expression: the notation and its grammar. Imports no jax.

expression  =  left '->' right            an array's axes, then their placement
            |  right                      short form: the axes once, in array order
left        =  (name | '...')*
right       =  (placed axis | replica | '...')*
placed axis =  name [count] ['*']  |  name '@' axis  |  name '@(' axis {',' axis} ')'
replica     =  count ['*']  |  '*'
name        =  letters and underscores of any script (NFC), case-sensitive; no digits
"""

from __future__ import annotations

import difflib
import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .._cache import cached
from .._errors import EinshardError, Span, Suggestion, quoted

ELLIPSIS = '...'


@dataclass(frozen=True, slots=True)
class Term:
    """One term of an expression: an axis, a replica count (no name) or the ellipsis."""

    name: str | None = None
    count: int | None = None  # None: not written, which means 1
    star: bool = False
    mesh_axes: tuple[str, ...] = ()
    span: Span = field(default=(0, 0), compare=False)

    @property
    def factor(self) -> int:
        return 1 if self.count is None else self.count

    @property
    def takes_devices(self) -> bool:
        """Whether the term takes a share of the devices by its count or star."""
        return self.star or self.factor > 1

    @property
    def is_sharded(self) -> bool:
        """Whether the term says which devices: it cuts an axis, or replicates."""
        return self.takes_devices or bool(self.mesh_axes)

    def __str__(self) -> str:
        if self.mesh_axes:
            axes = ','.join(self.mesh_axes)
            return f'{self.name}@{axes}' if len(self.mesh_axes) == 1 else f'{self.name}@({axes})'
        return f'{self.name or ""}{"" if self.count is None else self.count}{"*" * self.star}'


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: every axis of the array, then the placement in device order.

    Expressions are equal when they say the same, whatever the white space.
    """

    left: tuple[Term, ...]
    right: tuple[Term, ...]
    short: bool = field(default=False, compare=False)
    text: str = field(default='', compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The array's axes in order, '...' included."""
        return tuple(term.name for term in self.left if term.name is not None)

    def error(
        self,
        sentence: str,
        terms: Iterable[Term] = (),
        *,
        fix: str | None = None,
        **facts: object,
    ) -> EinshardError:
        """An error about `terms` of this expression."""
        spans = [term.span for term in terms]
        return EinshardError(sentence, expression=self.text, spans=spans, facts=facts, fix=fix)

    def __str__(self) -> str:
        left, right = (' '.join(map(str, side)) for side in (self.left, self.right))
        return f'{left} -> {right}'.strip()


@cached
def parse(text: str) -> Expression:
    """Reads an expression; raises EinshardError where it breaks a rule of the notation."""
    text = unicodedata.normalize('NFC', text)
    arrows = [match.span() for match in re.finditer('->', text)]
    if not text.strip():
        raise EinshardError(
            'the expression is empty',
            facts={'for a scalar': "'... -> * ...'", 'for a matrix': "'a b -> a* b'"},
        )
    if len(arrows) > 1:
        raise EinshardError(
            f"an expression has one '->', this one has {len(arrows)}",
            expression=text,
            spans=arrows,
        )
    if not arrows:
        right = _terms(text, 0, len(text))
        left = tuple(Term(term.name, span=term.span) for term in right if term.name is not None)
        expression = Expression(left, right, short=True, text=text)
        _check_right(expression)
        _check_short(expression)
        return expression
    ((start, end),) = arrows
    left, right = _terms(text, 0, start), _terms(text, end, len(text))
    expression = Expression(left, right, text=text)
    _check_left(expression)
    _check_sides(expression)
    _check_right(expression)
    return expression


def axis_letters() -> Iterator[str]:
    """Names for axes that have none: a, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield ''.join(letters)


# A word is a term with what is glued to it; '@(' keeps its spaces.
_WORD = re.compile(r'(?:@\s*\([^()]*\)|\S)+')
_MESH_AXIS = re.compile(r'[^\s(),@*]+')
_MOST_DIGITS = 12


def _terms(text: str, start: int, end: int) -> tuple[Term, ...]:
    return tuple(_term(text, *match.span()) for match in _WORD.finditer(text, start, end))


def _term(text: str, start: int, end: int) -> Term:
    if text[start:end] == ELLIPSIS:
        return Term(ELLIPSIS, span=(start, end))
    name = _name(text, start, end)
    at = start + len(name)
    count = _digits(text, at, end)
    at += len(count)
    star = text[at:end].startswith('*')
    at += star
    mesh_axes = ()
    if at < end and text[at] == '@' and name:
        mesh_axes = _mesh_axes(text, at, end, span=(start, end), counted=bool(count) or star)
        at = end
    if at < end:
        raise _unreadable(text, start, at, end)
    if len(count) > _MOST_DIGITS:
        raise EinshardError(
            f'a count of {len(count)} digits is more than any machine has devices',
            expression=text,
            spans=[(start, end)],
        )
    if count and int(count) == 0:
        raise EinshardError(
            f"'{text[start:end]}' has the count 0, but a count is at least 1",
            expression=text,
            spans=[(start, end)],
        )
    return Term(name or None, int(count) if count else None, star, mesh_axes, (start, end))


def _name(text: str, start: int, end: int) -> str:
    at = start
    while at < end and _in_name(text[at], first=at == start):
        at += 1
    return text[start:at]


def _in_name(character: str, first: bool) -> bool:
    if character == '_' or character.isalpha():
        return True
    # vowel signs and other marks that NFC leaves apart, as in Devanagari
    return not first and unicodedata.category(character) in ('Mn', 'Mc')


def _digits(text: str, start: int, end: int) -> str:
    at = start
    while at < end and text[at] in '0123456789':
        at += 1
    return text[start:at]


def _mesh_axes(text: str, at: int, end: int, span: Span, counted: bool) -> tuple[str, ...]:
    """The mesh axes behind the '@' at `at`."""
    if counted:
        raise EinshardError(
            f"'{text[slice(*span)]}' has both a count and mesh axes; it is placed by one of them",
            expression=text,
            spans=[span],
            facts={'by count': "'b4'  'b*'", 'by name': "'b@data'  'b@(data,fsdp)'"},
        )
    written = text[at + 1 : end].strip()
    grouped = written.startswith('(') and written.endswith(')')
    words = written[1:-1].split(',') if grouped else [written]
    axes = tuple(word.strip() for word in words)
    if not all(map(is_mesh_axis, axes)):
        raise EinshardError(
            f"'{text[slice(*span)]}' does not name mesh axes",
            expression=text,
            spans=[span],
            facts={'one axis': "'b@data'", 'several': "'b@(data,fsdp)'"},
        )
    return axes


def is_mesh_axis(name: str) -> bool:
    """Whether an expression can name a mesh axis so."""
    return _MESH_AXIS.fullmatch(name) is not None


def _unreadable(text: str, start: int, at: int, end: int) -> EinshardError:
    """The error for a word whose characters from `at` on belong to no term."""
    word, rest = text[start:end], text[at:end]
    character = rest[0]
    if character.isalpha() or character == '_':
        return _two_terms(text, start, at, end)
    facts: dict[str, object] = {}
    fix = None
    span = (start, end)
    if character == '*' and text[at - 1 : at] == '*':
        sentence = f"'{word}' has more than one star; several stars are several terms"
    elif character in '0123456789':
        sentence = f"in '{word}' the count comes after the star"
        if _digits(text, at, end) == rest:
            fix = _fix(f'{text[: at - 1]}{rest}*{text[end:]}')
    elif character == '@':
        sentence = f"'{word}' gives mesh axes to no array axis; a name goes before '@'"
    elif character == '.' and word.strip('.') and ELLIPSIS in word:
        other = word.replace(ELLIPSIS, '', 1)
        if word.startswith(ELLIPSIS) and (other[0] in '*@' or _digits(other, 0, 1)):
            sentence = f"'...' stands for unsharded axes and carries no placement: '{word}'"
        else:
            sentence = f"'...' stands apart from other terms, here it is glued to '{other}'"
    elif character == '.':
        sentence = f"'{word}' is no term; unnamed axes are written '...'"
    elif character in '→⟶⇒' or rest.startswith('=>'):
        arrow = rest[: 2 if character == '=' else 1]
        sentence = f"'{arrow}' is not part of the notation; the arrow is '->'"
        span = (at, at + len(arrow))
        fix = _fix(f'{text[:at]}->{text[at + len(arrow) :]}')
    elif character in '->':
        sentence = f"'{character}' alone is not part of the notation; the arrow is '->'"
        span = (at, at + 1)
    elif character.isdigit():
        sentence = f"'{character}' is not a digit of the notation; counts are written in 0 to 9"
        span = (at, at + 1)
    else:
        span = (at, at + 1)
        written = f"'{character}'"
        if not character.isprintable():
            written = f'the character U+{ord(character):04X}, which does not show,'
        sentence = f'{written} is not part of the notation'
        facts['terms are'] = 'a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  ...'
    return EinshardError(sentence, expression=text, spans=[span], facts=facts, fix=fix)


def _two_terms(text: str, start: int, at: int, end: int) -> EinshardError:
    """The error for a name that is glued to what stands before it, as in a2b or 2a."""
    word, head, rest = text[start:end], text[start:at], text[at:end]
    facts: dict[str, object] = {'two terms': f"'{head} {rest}'"}
    if _name(text, start, end):
        digits = 'names carry no digits, and ' if _digits(text, at - 1, at) else ''
        sentence = f"'{word}' is no term: {digits}spaces separate terms"
        if re.fullmatch(r'\w+', word):
            facts['one axis'] = f"'{re.sub('[0-9]+', '_', word).strip('_')}'"
    else:
        part = 'star' if head.endswith('*') else 'count'
        sentence = f"'{word}' is no term: spaces separate terms, and a {part} comes after the name"
        if _name(text, at, end) == rest:
            facts['one term'] = f"'{rest}{head}'"
    return EinshardError(sentence, expression=text, spans=[(start, end)], facts=facts)


def _check_short(expression: Expression) -> None:
    again = _repeated(expression.right)
    if again:
        raise expression.error(
            f"the short form lists each axis once, but '{again[0].name}' comes again",
            again,
            with_an_arrow="an axis may come again on the right: 'i o -> i2 o4 i2'",
        )


def _check_left(expression: Expression) -> None:
    for term in expression.left:
        if term.name is None or term.star or term.count is not None or term.mesh_axes:
            written = expression.text[slice(*term.span)]
            raise expression.error(
                f"'{written}' is a placement, but the left side lists the array's axes by name "
                'alone',
                [term],
                to_place='write counts, stars and mesh axes on the right side',
                in_names='letters and underscores, no digits',
            )
    _check_ellipsis(expression, expression.left, 'on the left side ')
    again = _repeated(expression.left)
    if again:
        raise expression.error(
            f"axis '{again[0].name}' is on the left side {len(again)} times, "
            'but each axis of the array has a name of its own',
            again,
        )


def _check_sides(expression: Expression) -> None:
    """Both sides name the same axes."""
    left, right = expression.left, expression.right
    if not right:
        end = len(expression.text)
        raise EinshardError(
            "there is no right side: after '->' comes the placement of every axis",
            expression=expression.text,
            spans=[(end, end + 1)],
            fix=_fix(' '.join([*map(str, left), '->', '*', *map(str, left)])),
        )
    for term in right:
        if term.name is not None and term.name not in expression.names:
            raise _only_on_right(expression, term)
    placed = {term.name for term in right}
    missing = [term for term in left if term.name not in placed]
    if missing:
        names = [str(term.name) for term in missing]
        raise expression.error(
            f'{quoted(names)} {"is" if len(names) == 1 else "are"} on the left side only; '
            'an axis that is not sharded is named without a count',
            missing,
            fix=_fix(f'{expression.text.rstrip()} {" ".join(names)}'),
        )


def _only_on_right(expression: Expression, term: Term) -> EinshardError:
    name = str(term.name)
    known = [other for other in expression.names if other != ELLIPSIS]
    near = difflib.get_close_matches(name, known, n=1) if name != ELLIPSIS else []
    fix = None
    if near:
        start, _ = term.span
        end = start + len(name)
        fix = _fix(f'{expression.text[:start]}{near[0]}{expression.text[end:]}')
    return expression.error(
        f"'{name}' is on the right side only",
        [term],
        fix=fix,
        left_side=' '.join(expression.names) or 'names no axes, as for a scalar',
    )


def _check_right(expression: Expression) -> None:
    _check_ellipsis(expression, expression.right, '' if expression.short else 'on the right side ')
    check_mesh_axes(expression)


def check_mesh_axes(expression: Expression) -> None:
    """Raises where two terms name one mesh axis."""
    counts = Counter(axis for term in expression.right for axis in term.mesh_axes)
    for axis, times in counts.items():
        if times > 1:
            raise expression.error(
                f"mesh axis '{axis}' is used {times} times, but it can shard only one place",
                [term for term in expression.right if axis in term.mesh_axes],
            )


def _check_ellipsis(expression: Expression, terms: Sequence[Term], where: str) -> None:
    ellipses = [term for term in terms if term.name == ELLIPSIS]
    if len(ellipses) > 1:
        raise expression.error(
            f"'...' is {where or 'there '}{len(ellipses)} times, but it stands once for all "
            'axes without a name',
            ellipses,
        )


def _repeated(terms: Sequence[Term]) -> list[Term]:
    """The terms of the first name that comes more than once."""
    for name, times in Counter(term.name for term in terms if term.name is not None).items():
        if times > 1:
            return [term for term in terms if term.name == name]
    return []


def _fix(text: str) -> Suggestion | None:
    """The suggestion of `text`, if it is an expression: a fix is certain or it is not offered."""
    try:
        parse(text)
    except EinshardError:
        return None
    return Suggestion(text)
