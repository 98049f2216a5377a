"""Reads the parts of a term from its text, and explains invalid terms."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping

from .._errors import EinshardError, Span, Suggestion

ELLIPSIS = '...'
SIGNS = '+='  # see `Term`
_MESH_AXIS = re.compile(r'[^\s(),@*]+')


def syntax_error(
    sentence: str,
    text: str,
    span: Span,
    facts: Mapping[str, object] | None = None,
    fix: str | None = None,
) -> EinshardError:
    """Returns an error with carets under `text[start:end]`. `fix` is an expression."""
    suggestion = Suggestion(fix) if fix else None
    return EinshardError(
        sentence, code='syntax', expression=text, spans=[span], facts=facts, fix=suggestion
    )


def signs_text(signs: Collection[str]) -> str:
    """Names terms with these signs, for errors: "'+' or '=' terms"."""
    return f'{" or ".join(repr(sign) for sign in SIGNS if sign in signs)} terms'


def read_name(text: str, start: int, end: int) -> str:
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
    """Returns the sign at `start`, or ''. Raises if nothing follows the sign."""
    if text[start] not in SIGNS or text.startswith('=>', start):  # '=>' is a wrong arrow
        return ''
    sign = text[start]
    if end == start + 1:
        sentence = f"'{sign}' alone is not a valid term; add a count, a star or mesh axes"
        raise syntax_error(sentence, text, (start, end), _sign_examples(sign))
    return sign


def read_digits(text: str, start: int, end: int) -> str:
    at = start
    while at < end and text[at] in '0123456789':
        at += 1
    return text[start:at]


def read_mesh_axes(text: str, start: int, at: int, end: int, count: str) -> tuple[str, ...]:
    """Returns the mesh axes of the term from `start` to `end`, whose '@' is at `at`.

    Raises if they are invalid, or if the term also has a `count`, such as '2', '*' or '2*'.
    """
    word, name = text[start:end], text[start : at - len(count)]
    written = text[at + 1 : end].strip()
    is_star = re.fullmatch(r'[0-9]*\*', written) is not None
    if written.endswith('*') and not is_star:  # 'a@data*'
        count, written = '*', written[:-1]
    is_grouped = written.startswith('(') and written.endswith(')')
    names = written[1:-1].split(',') if is_grouped else [written]
    axes = tuple(name.strip() for name in names)
    if not all(map(is_mesh_axis, axes)):
        by_space = written[1:-1].replace(',', ' ').split()
        fix, sentence = None, f"'{word}' needs a mesh axis after '@', or several in parentheses"
        if is_star:
            fix = f'{text[:at]}{written}{text[end:]}'
            sentence = f"'{word}' is not a valid term: a star is written without '@'"
        elif written.startswith('(') and not is_grouped:
            fix = f'{text[:end]}){text[end:]}'
            sentence = f"'{word}' is not a valid term: ')' is missing"
        elif written.endswith(',') and is_mesh_axis(written[:-1]):
            fix = f'{text[: end - 1]}{text[end:]}'
            sentence = f"'{word}' is not a valid term: spaces separate terms"
        elif ',' in written and not is_grouped:
            fix = f'{text[: at + 1]}({written}){text[end:]}'
            sentence = f"'{word}' is not a valid term: several mesh axes need parentheses"
        elif is_grouped and all(axes) and all(map(is_mesh_axis, by_space)):
            fix = f'{text[: at + 1]}({",".join(by_space)}){text[end:]}'
            sentence = f"'{word}' is not a valid term: commas separate mesh axes"
        elif is_grouped and (wrong := next((a for a in axes if a and not is_mesh_axis(a)), None)):
            sentence = f"'{wrong}' is not a valid mesh axis name"
        facts = {} if fix else {'examples': f"'{name}@data', '{name}@(data,fsdp)'"}
        raise syntax_error(sentence, text, (start, end), facts, fix)
    if count:
        part = 'star' if count == '*' else 'count'
        sentence = f"'{word}' has both a {part} and mesh axes; use one or the other"
        facts = {f'by {part}': f"'{name}{count}'", 'by name': f"'{name}@{written}'"}
        raise syntax_error(sentence, text, (start, end), facts)
    return axes


def is_mesh_axis(name: str) -> bool:
    """Whether a mesh axis of this name can be written in an expression."""
    is_normalized = unicodedata.is_normalized('NFC', name)  # expressions are
    return bool(_MESH_AXIS.fullmatch(name)) and '->' not in name and is_normalized


def not_a_term(text: str, start: int, at: int, end: int) -> EinshardError:
    """Returns the error for a word that is not a term because of the characters from `at` on."""
    word, rest = text[start:end], text[at:end]
    character = rest[0]
    if _in_name(character, first=True):
        after_sign = word[0] in SIGNS and at == start + 1
        return (_signed_name if after_sign else _two_terms)(text, start, at, end)
    if character in '->→⟶⇒' or rest.startswith('=>'):
        return _wrong_arrow(text, at, rest)
    # 'a=@tp' is not a wrong separator: only the space before '=' is missing
    if character in '/:=' and at > start and len(rest) > 1 and rest[1] != '@':
        return _wrong_separator(text, start, at, end)
    fix = None
    if character == '.':
        sentence = f"'{word}' is not a valid term{_about_dots(word)}"
    elif character == '*':
        sentence = f"'{word}' has more than one star; a term has at most one"
    elif character in '0123456789':
        sentence = f"'{word}' has its count after the star; the star comes last"
        if read_digits(text, at, end) == rest:
            fix = f'{text[: at - 1]}{rest}*{text[end:]}'
    elif character == '@':
        sentence = f"'{word}' has no array axis before '@'"
    elif character in SIGNS and at > start:
        sentence = f"'{word}' is not a valid term: put a space before '{character}'"
        fix = f'{text[:at]} {text[at:]}'
    else:
        return _invalid_character(text, at)
    return syntax_error(sentence, text, (start, end), fix=fix)


def _about_dots(word: str) -> str:
    """Returns the end of the error sentence for a word with a dot, such as '..' or '...a'."""
    if re.search(r'[0-9]\.[0-9]', word):
        return ': counts are integers'
    other = word.replace(ELLIPSIS, '', 1)
    if other == word or not word.strip('.'):
        return "; write '...' for unnamed axes"
    if word.startswith(ELLIPSIS) and (other[0] in '*@' or read_digits(other, 0, 1)):
        return ': only a named axis can be sharded'
    return ": put spaces around '...'"


def _wrong_arrow(text: str, at: int, rest: str) -> EinshardError:
    """Returns the error for a wrong arrow, as in 'a => a2', or half an arrow, as in 'a - > a2'."""
    is_part = rest[0] in '->'
    arrow = rest[: 2 if rest[0] == '=' else 1]
    start, end = at, at + len(arrow)
    if is_part:
        parts = re.finditer(r'[->](?:\s*[->])*', text)
        start, end = next(match.span() for match in parts if at in range(*match.span()))
    # not the hyphen of a name, as in 'batch-size d'
    is_arrow = len(text[start:end]) > 1 or not text[start - 1 : end + 1].strip(' ->')
    alone = 'alone ' if is_part else ''
    sentence = f"'{arrow}' {alone}is not part of the notation; the arrow is '->'"
    fix = f'{text[:start]}->{text[end:]}' if is_arrow or not is_part else None
    return syntax_error(sentence, text, (at, at + len(arrow)), fix=fix)


def _wrong_separator(text: str, start: int, at: int, end: int) -> EinshardError:
    """Returns the error for a wrong character after a name, as in 'a/data', 'a:2' or 'a=2'."""
    character = text[at]
    is_count = re.fullmatch(r'[0-9]*\*?', text[at + 1 : end]) is not None
    instead = 'a count comes right after the name' if is_count else "mesh axes come after '@'"
    sentence, span = f"'{character}' is not part of the notation; {instead}", (at, at + 1)
    if character == '=':  # part of the notation, as a sign
        sentence, span = f"'{text[start:end]}' is not a valid term; {instead}", (start, end)
    fix = f'{text[:at]}{"" if is_count else "@"}{text[at + 1 :]}'
    return syntax_error(sentence, text, span, fix=fix)


def _invalid_character(text: str, at: int) -> EinshardError:
    """Returns the error for a character that is not valid at `at`, as in 'a, b' or 'a%'."""
    character, span = text[at], (at, at + 1)
    if character.isdigit():
        sentence = f"'{character}' is not a valid digit; counts use the digits 0 to 9"
        return syntax_error(sentence, text, span)
    written = f"'{character}'"
    if not character.isprintable():
        written = f'unprintable character U+{ord(character):04X}'
    if character == ',':
        where = 'valid here: spaces separate terms, and each array has its own expression'
    elif character in '()':
        where = "valid here: parentheses only group mesh axes, as in 'a@(x,y)'"
    else:
        where = 'part of the notation'
    if at < text.find('->'):
        facts = {'expected on the left': "axis names, and '...' for unnamed axes"}
    else:
        terms = "'a'  'a2'  'a*'  'a2*'  'a@x'  'a@(x,y)'  '...'  '2'  '*'  '2*'"
        facts = {'valid terms': f"{terms}  '+2'  '+@x'  '=2'  '=@x'"}
    return syntax_error(f'{written} is not {where}', text, span, facts)


def _signed_name(text: str, start: int, at: int, end: int) -> EinshardError:
    """Returns the error for a sign right before a name, as in '+tp'."""
    word, sign, rest = text[start:end], text[start], text[at:end]
    sentence = f"'{word}' is not a valid term: '{sign}' is followed by a count, a star or '@'"
    fix = f'{text[:start]}{sign}@{rest}{text[end:]}' if is_mesh_axis(rest) else None
    return syntax_error(sentence, text, (start, end), _sign_examples(sign), fix)


def _sign_examples(sign: str) -> dict[str, str]:
    return {'by count or star': f"'{sign}2'  '{sign}*'", 'by name': f"'{sign}@tp'"}


def _two_terms(text: str, start: int, at: int, end: int) -> EinshardError:
    """Returns the error for a name right after a count or a star, as in 'a2b', 'a*b' or '2a'."""
    word, head, rest = text[start:end], text[start:at], text[at:end]
    facts: dict[str, object] = {'as two terms': f"'{head} {rest}'"}
    if read_name(text, start, end):
        digits = 'names have no digits, and ' if read_digits(text, at - 1, at) else ''
        sentence = f"'{word}' is not a valid term: {digits}spaces separate terms"
        names_on_left = {*text.partition('->')[0].split()} if '->' in text else set[str]()
        if re.fullmatch(r'\w+', word) and not names_on_left.issuperset(re.findall('[^0-9]+', word)):
            facts['as one name'] = f"'{re.sub('[0-9]+', '_', word).strip('_')}'"
    elif head[0] in SIGNS:
        sentence = f"'{word}' is not a valid term: spaces separate terms"
    else:
        part = 'star' if head.endswith('*') else 'count'
        sentence = f"'{word}' is not a valid term: a {part} comes after the name"
        if read_name(text, at, end) == rest:
            facts['as one term'] = f"'{rest}{head}'"
    return syntax_error(sentence, text, (start, end), facts)
