"""Parses text into an Expression, and writes one from terms.

expression  =  left '->' right            an array's axes, then their placement
            |  right                      short form: each axis once, in array order
left        =  (name | '...')*
right       =  (placed axis | replica | partial | '...')*
placed axis =  name [count] ['*']  |  name '@' axis  |  name '@(' axis {',' axis} ')'
replica     =  count ['*']  |  '*'
partial     =  ('+' | '=') (replica | '@' axis | '@(' axis {',' axis} ')'), each sign at most once
name        =  letters of any script (NFC) and underscores, case-sensitive; no digits
"""

from __future__ import annotations

import difflib
import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .._cache import cached
from .._errors import EinshardError, Span, Suggestion, quoted
from .._working_fixes import with_working_fix
from .words import (
    ELLIPSIS,
    SIGNS,
    not_a_term,
    read_digits,
    read_mesh_axes,
    read_name,
    read_sign,
    syntax_error,
)


@dataclass(frozen=True, slots=True)
class Term:
    """A term of an expression: an axis, replicas (no name) or the ellipsis.

    The sign '+' means that devices hold partial sums (JAX: unreduced), and '=' that they hold
    replicas whose gradients are partial sums (JAX: reduced).
    """

    name: str | None = None
    count: int | None = None  # None if not written; see `factor`
    star: bool = False
    mesh_axes: tuple[str, ...] = ()
    sign: str = ''
    span: Span = field(default=(0, 0), compare=False)

    @property
    def factor(self) -> int:
        return 1 if self.count is None else self.count

    @property
    def is_counted(self) -> bool:
        return self.star or self.factor > 1

    @property
    def spans_devices(self) -> bool:
        return self.is_counted or bool(self.mesh_axes)

    def __str__(self) -> str:
        named = f'{self.sign}{self.name or ""}'
        if self.mesh_axes:
            axes = ','.join(self.mesh_axes)
            return f'{named}@{axes}' if len(self.mesh_axes) == 1 else f'{named}@({axes})'
        return f'{named}{"" if self.count is None else self.count}{"*" * self.star}'


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: array axes on the left, a row-major device grid on the right.

    Expressions are equal if they differ only in whitespace or in the use of the short form.
    """

    left: tuple[Term, ...]
    right: tuple[Term, ...]
    short: bool = field(default=False, compare=False)  # whether it was written without '->'
    text: str = field(default='', compare=False)  # as written; the spans of terms are offsets in it

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the array axes in order, including '...'."""
        return tuple(term.name for term in self.left if term.name is not None)

    def error(
        self,
        sentence: str,
        terms: Iterable[Term] = (),
        *,
        code: str | None = None,
        fix: str | None = None,
        **facts: object,
    ) -> EinshardError:
        """Returns an error with carets under `terms` of this expression."""
        spans = [term.span for term in terms]
        return EinshardError(
            sentence, code=code, expression=self.text, spans=spans, facts=facts, fix=fix
        )

    def on_one_device(self) -> Expression:
        """Returns the expression with every count and star replaced by 1, without unnamed terms."""
        terms = [
            term if term.count is None and not term.star else replace(term, count=1, star=False)
            for term in self.right
            if term.name is not None
        ]
        # 'i2 o i4' becomes 'i1 o'
        distinct = [t for i, t in enumerate(terms) if t.mesh_axes or t not in terms[:i]]
        return replace(self, right=tuple(distinct))

    def __str__(self) -> str:
        left, right = (' '.join(map(str, side)) for side in (self.left, self.right))
        return f'{left} -> {right}'.strip()


@cached
def parse(text: str, where: str = '') -> Expression:
    """Parses an expression; raises EinshardError if it is invalid.

    `where` names the operand in errors about repeated terms, such as ' in operand 0'.
    """
    try:
        return _parse(text, where)
    except EinshardError as error:
        raise with_working_fix(error, _parse) from None


def _parse(text: str, where: str = '') -> Expression:
    text = unicodedata.normalize('NFC', text)
    arrows = [match.span() for match in re.finditer('->', text)]
    if not text.strip():
        raise EinshardError(
            'the expression is empty',
            code='syntax',
            facts={'to replicate': "'... -> * ...'", 'to shard a matrix': "'a b -> a* b'"},
        )
    if len(arrows) > 1:
        raise EinshardError(
            f"an expression has at most one '->', but this one has {len(arrows)}",
            code='syntax',
            expression=text,
            spans=arrows,
        )
    if not arrows:
        right = _terms(text, 0, len(text))
        left = tuple(Term(term.name, span=term.span) for term in right if term.name is not None)
        expression = Expression(left, right, short=True, text=text)
        _check_right(expression, where)
        if repeated := _repeated(right):
            raise expression.error(
                f"axis '{repeated[0].name}' appears {len(repeated)} times{where}; "
                'it can appear only once',
                repeated,
                code='axis-names',
                to_shard_an_axis_twice="repeat it after '->', as in 'i o -> i2 o4 i2'",
            )
        return expression
    ((start, end),) = arrows
    left, right = _terms(text, 0, start), _terms(text, end, len(text))
    expression = Expression(left, right, text=text)
    _check_left(expression)
    _check_same_axes(expression)
    _check_right(expression, ' on the right side')
    return expression


def axis_letters() -> Iterator[str]:
    """Yields names for unnamed axes: a, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield ''.join(letters)


# Words are separated by spaces, except within '@(...)'.
_WORD = re.compile(r'(?:@\s*\([^()]*\)|\S)+')
_MAX_DIGITS = 12


def _terms(text: str, start: int, end: int) -> tuple[Term, ...]:
    return tuple(_term(text, *match.span()) for match in _WORD.finditer(text, start, end))


def _term(text: str, start: int, end: int) -> Term:
    if text[start:end] == ELLIPSIS:
        return Term(ELLIPSIS, span=(start, end))
    sign = read_sign(text, start, end)
    name = '' if sign else read_name(text, start, end)
    at = start + len(sign) + len(name)
    count = read_digits(text, at, end)
    at += len(count)
    star = text[at:end].startswith('*')
    at += star
    mesh_axes = ()
    if at < end and text[at] == '@' and (name or sign):
        mesh_axes = read_mesh_axes(text, start, at, end, count + '*' * star)
        at = end
    if at < end:
        raise not_a_term(text, start, at, end)
    if len(count) > _MAX_DIGITS:
        sentence = f'the count has {len(count)} digits; at most {_MAX_DIGITS} are allowed'
        raise syntax_error(sentence, text, (start, end))
    if count and int(count) == 0:
        sentence = f"'{text[start:end]}' has count 0; counts must be at least 1"
        raise syntax_error(sentence, text, (start, end))
    return Term(name or None, int(count) if count else None, star, mesh_axes, sign, (start, end))


def _check_left(expression: Expression) -> None:
    for term in expression.left:
        if term.name is None or term.star or term.count is not None or term.mesh_axes:
            written = expression.text[slice(*term.span)]
            raise expression.error(
                f"'{written}' is not an axis name; the left side lists only the names of the axes",
                [term],
                code='syntax',
                axis_names='letters and underscores, no digits',
                right_side='counts, stars and mesh axes',
            )
    _check_ellipsis(expression, expression.left, ' on the left side')
    repeated = _repeated(expression.left)
    if repeated:
        raise expression.error(
            f"axis '{repeated[0].name}' appears {len(repeated)} times on the left side, "
            'but each axis of the array needs its own name',
            repeated,
            code='axis-names',
        )


def _check_same_axes(expression: Expression) -> None:
    left, right = expression.left, expression.right
    if not right:
        end = len(expression.text)
        sentence = "the right side is empty; list every axis after '->', and '*' to replicate"
        fix = ' '.join([*map(str, left), '->', '*', *map(str, left)])
        raise syntax_error(sentence, expression.text, (end, end + 1), fix=fix)
    for term in right:
        if term.name is not None and term.name not in expression.names:
            raise _only_on_right(expression, term)
    placed = {term.name for term in right}
    missing = [term for term in left if term.name not in placed]
    if missing:
        names = [str(term.name) for term in missing]
        raise expression.error(
            f'{quoted(names)} {"is" if len(names) == 1 else "are"} missing on the right side; '
            'list unsharded axes there too, without a count',
            missing,
            code='axis-names',
            fix=Suggestion(_with_missing(expression)),
        )


def _with_missing(expression: Expression) -> str:
    """Inserts the missing axes on the right side, in the order of the left side."""
    names = [term.name for term in expression.left]
    right = [(term.name, str(term)) for term in expression.right]
    for i, name in reversed(list(enumerate(names))):
        if name not in (other for other, _ in right):
            later = (at for at, (other, _) in enumerate(right) if other in names[i + 1 :])
            right.insert(next(later, len(right)), (name, str(name)))
    left = ' '.join(str(term) for term in expression.left)
    return f'{left} -> {" ".join(text for _, text in right)}'


def _only_on_right(expression: Expression, term: Term) -> EinshardError:
    name, start = str(term.name), term.span[0]
    before, after = expression.text[:start], expression.text[start + len(name) :]
    known = [other for other in expression.names if other != ELLIPSIS]
    others: list[str] = []
    if name != ELLIPSIS:
        others = difflib.get_close_matches(name, known, n=1)
        placed = {other.name for other in expression.right}
        missing = [other for other in known if other not in placed]
        if len(missing) == 1 and len(placed - {*known, None, ELLIPSIS}) == 1:
            by_count = any(other.is_counted for other in expression.right)
            # 'b d -> b data' probably names a mesh axis, as PartitionSpecs do
            others += [f'{missing[0]}@{name}'] * (term == Term(name) and not by_count) + missing
    fixes = [f'{before}{other}{after}' for other in dict.fromkeys(others)]
    return expression.error(
        f"'{name}' is not on the left side",
        [term],
        code='axis-names',
        fix=Suggestion(fixes[0], fixes[1:]) if fixes else None,
        left_side=' '.join(expression.names) or 'no axes (a scalar)',
    )


def _check_right(expression: Expression, where: str) -> None:
    _check_ellipsis(expression, expression.right, where)
    check_mesh_axes(expression)
    for sign in SIGNS:
        signed = [term for term in expression.right if term.sign == sign]
        if len(signed) > 1:
            raise expression.error(
                f"'{sign}' appears {len(signed)} times; write it once, with all its mesh axes",
                signed,
                code='mesh',
                example=f"'{sign}@(data,tp)'",
            )


def check_mesh_axes(expression: Expression) -> None:
    counts = Counter(axis for term in expression.right for axis in term.mesh_axes)
    for axis, times in counts.items():
        if times > 1:
            raise expression.error(
                f"mesh axis '{axis}' is used {times} times; each mesh axis can be used only once",
                [term for term in expression.right if axis in term.mesh_axes],
                code='mesh',
            )


def _check_ellipsis(expression: Expression, terms: Sequence[Term], where: str) -> None:
    ellipses = [term for term in terms if term.name == ELLIPSIS]
    if len(ellipses) > 1:
        raise expression.error(
            f"'...' appears {len(ellipses)} times{where}; "
            'it can appear only once, for all unnamed axes',
            ellipses,
            code='axis-names',
        )


def _repeated(terms: Sequence[Term]) -> list[Term]:
    """Returns all terms with the first name that appears more than once, or []."""
    for name, times in Counter(term.name for term in terms if term.name is not None).items():
        if times > 1:
            return [term for term in terms if term.name == name]
    return []


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
