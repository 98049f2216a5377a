"""Parses einsums with named axes and placements. Does not import JAX."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .._cache import cached
from .._errors import EinshardError, Span, Suggestion, plural, quoted
from .._notation.expression import ELLIPSIS, Expression, parse
from .._notation.layout import axis_positions


@dataclass(frozen=True, slots=True)
class Contraction:
    """A parsed einsum. Its operands and result are expressions without '->'."""

    operands: tuple[Expression, ...]
    result: Expression
    text: str

    @property
    def arrays(self) -> tuple[Expression, ...]:
        return (*self.operands, self.result)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that the placements name."""
        terms = [term for array in self.arrays for term in array.right]
        return tuple(dict.fromkeys(axis for term in terms for axis in term.mesh_axes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for operand in self.operands for name in operand.names))

    @property
    def contracted(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.result.names)

    def numpy_subscripts(self) -> str:
        """Returns the einsum without placements, such as 'ab,bc->ac'."""
        named = [name for name in self.names if name != ELLIPSIS]
        letters = {name: _letter(i) for i, name in enumerate(named)} | {ELLIPSIS: ELLIPSIS}
        sides = [''.join(letters[name] for name in array.names) for array in self.arrays]
        return f'{",".join(sides[:-1])}->{sides[-1]}'

    def plain(self) -> str:
        """Returns the einsum without placements, such as 'a b, b c -> a c'."""
        sides = [' '.join(array.names) for array in self.arrays]
        return f'{", ".join(sides[:-1])} -> {sides[-1]}'.rstrip()

    def error(
        self,
        sentence: str,
        spans: Iterable[Span] = (),
        *,
        code: str | None = None,
        fix: str | None = None,
        **facts: object,
    ) -> EinshardError:
        return EinshardError(
            sentence, code=code, expression=self.text, spans=spans, facts=facts, fix=fix
        )


def is_placed(array: Expression) -> bool:
    return any(term.spans_devices for term in array.right)


def placement_text(array: Expression) -> str:
    """Returns the text of an operand or the result, such as 'b x*'."""
    return ' '.join(map(str, array.right))


def read_contraction(text: str) -> Contraction:
    """Parses an einsum such as 'b x*, x* y -> b y'."""
    if not isinstance(text, str):
        kind = type(text).__name__
        raise EinshardError(
            f'an einsum must be a string, not {text!r} ({kind})',
            code='syntax',
            facts={'example': "'batch x, x y -> batch y'"},
        )
    return _read(text)


@cached
def _read(text: str) -> Contraction:
    text = unicodedata.normalize('NFC', text)
    arrows = [match.span() for match in re.finditer('->', text)]
    if len(arrows) != 1:
        raise EinshardError(
            f"an einsum has one '->', but this one has {len(arrows) or 'none'}",
            code='syntax',
            expression=text,
            spans=arrows,
            facts={'example': "'b x, x y -> b y'"},
        )
    ((end, start),) = arrows
    operands = tuple(
        _parse_array(text, *span, f' in operand {i}')
        for i, span in enumerate(_between_commas(text, end))
    )
    result = _parse_array(text, start, len(text), ' in the result')
    contraction = Contraction(operands, result, text)
    _check_result(contraction)
    return contraction


def from_numpy_subscripts(
    text: object, shapes: Sequence[Sequence[int]] | None = None
) -> Suggestion | None:
    """Rewrites NumPy subscripts with one axis per letter: 'b x, x y -> b y' for 'bx,xy->by'.

    Returns None if `text` is not valid NumPy subscripts, or if they do not fit `shapes`.
    """
    if not isinstance(text, str):
        return None
    if ',' in text and '->' not in text:  # NumPy sorts the letters that appear once
        once = sorted(c for c in text if c.isalpha() and text.count(c) == 1)
        text = f'{text}->{"".join(once)}'
    words = [word.strip() for word in re.split(',|->', text)]
    if not all(word.isalpha() or not word for word in words) or max(map(len, words), default=0) < 2:
        return None
    *operands, result = [' '.join(word) for word in words]
    einsum = f'{", ".join(operands)} -> {result}'.rstrip()
    try:
        contraction = read_contraction(einsum)
        if shapes is not None:
            result_shape(contraction, shapes)
    except EinshardError:
        return None
    return Suggestion(einsum)


def result_shape(contraction: Contraction, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    if len(shapes) != len(contraction.operands):
        raise contraction.error(
            f'the einsum has {plural(len(contraction.operands), "operand")}, '
            f'but got {plural(len(shapes), "array")}',
            code='axis-names',
        )
    # the size of each axis, as a 1-tuple, or all sizes of '...'; and the first operand with them
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for i, (operand, shape) in enumerate(zip(contraction.operands, shapes, strict=True)):
        try:
            positions = axis_positions(operand, len(shape))
        except EinshardError as error:
            sentence, code = error.sentence, error.code
            raise contraction.error(sentence, error.spans, code=code, operand=i) from None
        n_unnamed = len(shape) - len(positions)
        for at, name in enumerate(operand.names):
            start, n = (at, n_unnamed) if name == ELLIPSIS else (positions[name], 1)
            size = tuple(shape[start : start + n])
            first_size, first = found.setdefault(name, (size, i))
            if first_size == size:
                continue
            is_named = name != ELLIPSIS
            what = f"axis '{name}' has size" if is_named else "'...' stands for sizes"
            one, other = (first_size[0], size[0]) if is_named else (first_size, size)
            sentence = f'{what} {one} in operand {first}, but {other} in operand {i}'
            terms = [term for operand in contraction.operands for term in operand.right]
            spans = [term.span for term in terms if term.name == name]
            raise contraction.error(sentence, spans, code='axis-names')
    return tuple(size for name in contraction.result.names for size in found[name][0])


def _between_commas(text: str, end: int) -> Iterable[Span]:
    """Yields the spans between commas in `text[:end]`, ignoring commas in parentheses."""
    start = depth = 0
    for at, character in enumerate(text[:end]):
        depth += (character == '(') - (character == ')')
        if character == ',' and depth <= 0:
            yield start, at
            start = at + 1
    yield start, end


def _parse_array(text: str, start: int, end: int, where: str) -> Expression:
    """Parses `text[start:end]`; `where` names the operand or the result in errors."""
    written = text[start:end]
    if not written.strip():  # a scalar
        return Expression((), (), short=True, text=text)
    try:
        # pad with spaces, so that spans are offsets into the full text
        parsed = parse(' ' * start + written, where)
        return replace(parsed, text=text)
    except EinshardError as error:
        # drop the fix, because it replaces only this array; drop facts about '->'
        facts = {label: fact for label, fact in error.facts.items() if "'->'" not in fact}
        raise EinshardError(
            error.sentence, code=error.code, expression=text, spans=error.spans, facts=facts
        ) from None


def _check_result(contraction: Contraction) -> None:
    operand_axes = contraction.names
    unknown = [term for term in contraction.result.left if term.name not in operand_axes]
    if not unknown:
        return
    names = [str(term.name) for term in unknown]
    facts: dict[str, object] = {'operands have': ' '.join(operand_axes) or 'no axes'}
    near = difflib.get_close_matches(names[0], operand_axes, n=1)
    if near:
        facts['similar'] = f"'{near[0]}'"
    raise EinshardError(
        f'{quoted(names)} {"is" if len(names) == 1 else "are"} in the result but in no operand',
        code='axis-names',
        expression=contraction.text,
        spans=[term.span for term in unknown],
        facts=facts,
    )


def _letter(i: int) -> str:
    """Returns the i-th subscript: a to z, A to Z, then non-ASCII letters, as in opt_einsum."""
    ascii_letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
    return ascii_letters[i] if i < len(ascii_letters) else chr(i + 140)
