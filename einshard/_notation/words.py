"""Reads the words of an expression, and explains what is wrong with a word. Imports no JAX."""

from __future__ import annotations

import re
import unicodedata

from .._errors import EinshardError, Span, Suggestion

ELLIPSIS = '...'
# '+': devices hold terms of a sum (JAX: unreduced); '=': the gradient is such a sum (reduced)
SIGNS = '+='
_MESH_AXIS = re.compile(r'[^\s(),@*]+')


def read_name(text: str, start: int, end: int) -> str:
    """Returns the name at `start`; '' if there is none."""
    at = start
    while at < end and _in_name(text[at], first=at == start):
        at += 1
    return text[start:at]


def _in_name(character: str, first: bool) -> bool:
    if character == '_' or character.isalpha():
        return True
    # vowel signs and other marks that NFC does not combine, as in Devanagari
    return not first and unicodedata.category(character) in ('Mn', 'Mc')


def read_sign(text: str, start: int, end: int) -> str:
    """Returns the sign at `start`; '' if there is none. Raises for a sign without devices."""
    if text[start] not in SIGNS or text.startswith('=>', start):
        return ''
    sign = text[start]
    if end == start + 1:
        raise EinshardError(
            f"'{sign}' alone is not a valid term; add a count, a star or mesh axes",
            expression=text,
            spans=[(start, end)],
            facts={'by count': f"'{sign}2'  '{sign}*'", 'by name': f"'{sign}@tp'"},
        )
    return sign


def read_digits(text: str, start: int, end: int) -> str:
    """Returns the count at `start`; '' if there is none."""
    at = start
    while at < end and text[at] in '0123456789':
        at += 1
    return text[start:at]


def read_mesh_axes(text: str, at: int, end: int, span: Span, counted: bool) -> tuple[str, ...]:
    """Returns the mesh axes after the '@' at `at`; raises if a count comes before it."""
    if counted:
        word = text[slice(*span)]
        facts = {'by count': "'b4'  'b*'", 'by name': "'b@data'  'b@(data,fsdp)'"}
        raise EinshardError(
            f"'{word}' has both a count and mesh axes; use one or the other",
            expression=text,
            spans=[span],
            facts=_sign_examples(word[0]) if word[0] in SIGNS else facts,
        )
    written = text[at + 1 : end].strip()
    grouped = written.startswith('(') and written.endswith(')')
    words = written[1:-1].split(',') if grouped else [written]
    axes = tuple(word.strip() for word in words)
    if not all(map(is_mesh_axis, axes)):
        fix = None
        if re.fullmatch(r'[0-9]*\*', written):
            fix = f'{text[:at]}{written}{text[end:]}'
        elif ',' in written and not grouped:
            fix = f'{text[: at + 1]}({written}){text[end:]}'
        raise EinshardError(
            f"'{text[slice(*span)]}' has no valid mesh axes after '@'",
            expression=text,
            spans=[span],
            facts={'one mesh axis': "'b@data'", 'several': "'b@(data,fsdp)'"},
            fix=Suggestion(fix) if fix else None,
        )
    return axes


def is_mesh_axis(name: str) -> bool:
    """Whether this is a valid name of a mesh axis in an expression."""
    return _MESH_AXIS.fullmatch(name) is not None


def not_a_term(text: str, start: int, at: int, end: int) -> EinshardError:
    """Returns the error for a word that is not a term because of the characters from `at` on."""
    word, rest = text[start:end], text[at:end]
    character = rest[0]
    if character.isalpha() or character == '_':
        after_sign = word[0] in SIGNS and at == start + 1
        return (_signed_name if after_sign else _two_terms)(text, start, at, end)
    facts: dict[str, object] = {}
    fix = None
    span = (start, end)
    if character == '*' and text[at - 1 : at] == '*':
        sentence = f"'{word}' has more than one star; a term has at most one"
    elif character in '0123456789':
        sentence = f"'{word}' has its count after the star; the star comes last"
        if read_digits(text, at, end) == rest:
            fix = Suggestion(f'{text[: at - 1]}{rest}*{text[end:]}')
    elif character == '@':
        sentence = f"'{word}' has no array axis before '@'"
    elif character == '.' and word.strip('.') and ELLIPSIS in word:
        other = word.replace(ELLIPSIS, '', 1)
        if word.startswith(ELLIPSIS) and (other[0] in '*@' or read_digits(other, 0, 1)):
            sentence = f"'{word}' is not a valid term: the axes in '...' are unsharded"
        else:
            sentence = f"'{word}' is not a valid term: put a space between '...' and '{other}'"
    elif character == '.':
        sentence = f"'{word}' is not a valid term; write '...' for unnamed axes"
    elif character in '→⟶⇒' or rest.startswith('=>'):
        arrow = rest[: 2 if character == '=' else 1]
        sentence = f"'{arrow}' is not part of the notation; the arrow is '->'"
        span = (at, at + len(arrow))
        fix = Suggestion(f'{text[:at]}->{text[at + len(arrow) :]}')
    elif character in '->':
        sentence = f"'{character}' alone is not part of the notation; the arrow is '->'"
        span = (at, at + 1)
    elif character in '/:=' and at > start and len(rest) > 1 and rest[1] != '@':
        is_count = re.fullmatch(r'[0-9]*\*?', rest[1:]) is not None
        instead = 'a count comes right after the name' if is_count else "mesh axes come after '@'"
        if character == '=':  # a sign, but not between a name and a count
            sentence = f"'{word}' is not a valid term; {instead}"
        else:
            sentence = f"'{character}' is not part of the notation; {instead}"
            span = (at, at + 1)
        fix = Suggestion(f'{text[:at]}{"" if is_count else "@"}{text[at + 1 :]}')
    elif character in SIGNS and at > start:
        sentence = f"'{word}' is not a valid term: put a space before '{character}'"
        fix = Suggestion(f'{text[:at]} {text[at:]}')
    elif character.isdigit():
        sentence = f"'{character}' is not a valid digit; counts use the digits 0 to 9"
        span = (at, at + 1)
    else:
        span = (at, at + 1)
        written = f"'{character}'"
        if not character.isprintable():
            written = f'unprintable character U+{ord(character):04X}'
        sentence = f'{written} is not part of the notation'
        facts['valid terms'] = 'a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  +@axis  =2  ...'
    return EinshardError(sentence, expression=text, spans=[span], facts=facts, fix=fix)


def _signed_name(text: str, start: int, at: int, end: int) -> EinshardError:
    """Returns the error for a sign right before a name, as in '+tp'."""
    sign, rest = text[start], text[at:end]
    fix = Suggestion(f'{text[:start]}{sign}@{rest}{text[end:]}') if is_mesh_axis(rest) else None
    return EinshardError(
        f"'{text[start:end]}' is not a valid term: '{sign}' is for devices, not for array axes",
        expression=text,
        spans=[(start, end)],
        facts=_sign_examples(sign),
        fix=fix,
    )


def _sign_examples(sign: str) -> dict[str, str]:
    return {'by count': f"'{sign}2'  '{sign}*'", 'by name': f"'{sign}@tp'"}


def _two_terms(text: str, start: int, at: int, end: int) -> EinshardError:
    """Returns the error for a name right after a count, a star or a term, as in 'a2b' or '2a'."""
    word, head, rest = text[start:end], text[start:at], text[at:end]
    facts: dict[str, object] = {'as two terms': f"'{head} {rest}'"}
    if read_name(text, start, end):
        digits = 'names have no digits, and ' if read_digits(text, at - 1, at) else ''
        sentence = f"'{word}' is not a valid term: {digits}spaces separate terms"
        if re.fullmatch(r'\w+', word):
            facts['as one name'] = f"'{re.sub('[0-9]+', '_', word).strip('_')}'"
    else:
        part = 'star' if head.endswith('*') else 'count'
        sentence = f"'{word}' is not a valid term: a {part} comes after the name"
        if read_name(text, at, end) == rest:
            facts['as one term'] = f"'{rest}{head}'"
    return EinshardError(sentence, expression=text, spans=[(start, end)], facts=facts)
