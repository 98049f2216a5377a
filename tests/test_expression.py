"""The grammar, equality and spans of parsed expressions."""

import unicodedata

import oracle
import pytest
from hypothesis import given

from einshard import EinshardError

# private: the grammar: terms, which placements alone do not tell apart
from einshard._notation.expression import ELLIPSIS, Expression, Term, parse, write, write_short

# ------------------------------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    ('text', 'term'),
    [
        ('a', Term('a')),
        ('a2', Term('a', 2)),
        ('a*', Term('a', star=True)),
        ('a2*', Term('a', 2, star=True)),
        ('a1', Term('a', 1)),
        ('a02', Term('a', 2)),
        ('a16384', Term('a', 16384)),
        ('2', Term(count=2)),
        ('*', Term(star=True)),
        ('2*', Term(count=2, star=True)),
        ('12*', Term(count=12, star=True)),
        ('...', Term(ELLIPSIS)),
        ('a@data', Term('a', mesh_axes=('data',))),
        ('a@(data)', Term('a', mesh_axes=('data',))),
        ('a@(data,fsdp)', Term('a', mesh_axes=('data', 'fsdp'))),
        ('a@(fsdp,data,tp)', Term('a', mesh_axes=('fsdp', 'data', 'tp'))),
        ('a@( data , fsdp )', Term('a', mesh_axes=('data', 'fsdp'))),
        ('a@d0', Term('a', mesh_axes=('d0',))),
        ('a@tp-2', Term('a', mesh_axes=('tp-2',))),
        ('行@層', Term('行', mesh_axes=('層',))),
    ],
)
def test_terms(text, term):
    assert parse(text).right == (term,)


@pytest.mark.parametrize(
    ('text', 'term'),
    [
        ('+2', Term(count=2, sign='+')),
        ('+*', Term(star=True, sign='+')),
        ('=2*', Term(count=2, star=True, sign='=')),
        ('+@tp', Term(mesh_axes=('tp',), sign='+')),
        ('=@(data,tp)', Term(mesh_axes=('data', 'tp'), sign='=')),
    ],
)
def test_terms_of_partial_sums(text, term):
    parsed = parse(f'b d {text}')
    assert parsed.right[2] == term
    assert parsed.names == ('b', 'd')
    assert str(term) == text
    assert write_short(parsed.right) == parsed


@pytest.mark.parametrize(
    'name',
    ['a', 'Z', '_', '__', '_a', 'a_', 'd_model', 'BatchSize', 'x' * 1000, 'é', 'ß', 'β', 'Ω', 'ось',
     '行', '列数', 'バッチ', '배치', 'ציר', 'محور', 'हिन्दी', 'แกน', 'ª', 'ʰ', 'ﬁ', '𝛼', 'ａ'],
)  # fmt: skip
def test_names_in_any_script(name):
    name = unicodedata.normalize('NFC', name)
    right = (Term(name, 4, star=True), Term('b'), Term(name, mesh_axes=('x', 'y')))
    assert parse(f'{name} b -> {name}4* b {name}@(x,y)').right == right


def test_names_are_case_sensitive():
    assert parse('a A -> A2 a').names == ('a', 'A')
    with pytest.raises(EinshardError, match="'A' is not on the left side"):
        parse('a -> A')


def test_names_are_equal_in_all_normal_forms():
    composed, decomposed = 'é b -> é* b', 'e\u0301 b -> e\u0301* b'
    assert parse(composed) == parse(decomposed)
    assert hash(parse(composed)) == hash(parse(decomposed))
    assert parse('é b -> e\u0301* b') == parse(composed)
    # the Angstrom and Ohm signs are canonically the letters
    assert parse('\u212b \u2126') == parse('\u00c5 \u03a9')
    # compatibility characters stay different
    assert parse('ﬁ') != parse('fi')
    assert parse('ａ') != parse('a')


@pytest.mark.parametrize(
    ('text', 'names'),
    [
        ('a ... b -> ... a b', ('a', '...', 'b')),
        ('-> *', ()),
        ('->4', ()),
        ('2 a* 3 b 4', ('a', 'b')),
        ('* ...', ('...',)),
        ('8', ()),
    ],
)
def test_names_are_the_axes_in_order(text, names):
    assert parse(text).names == names


def test_sides():
    expression = parse('i o ... -> 2 i2* o4 ... i@tp *')
    assert expression.left == (Term('i'), Term('o'), Term('...'))
    assert expression.right == (
        Term(count=2),
        Term('i', 2, star=True),
        Term('o', 4),
        Term('...'),
        Term('i', mesh_axes=('tp',)),
        Term(star=True),
    )
    assert not expression.short


@pytest.mark.parametrize(
    ('short', 'long'),
    [
        ('x y*', 'x y -> x y*'),
        ('x', 'x -> x'),
        ('2 x y4', 'x y -> 2 x y4'),
        ('x 2 y4 *', 'x y -> x 2 y4 *'),
        ('* ...', '... -> * ...'),
        ('b@data ... d@(fsdp,tp)', 'b ... d -> b@data ... d@(fsdp,tp)'),
        ('8', '-> 8'),
    ],
)
def test_the_short_form_equals_the_long_form(short, long):
    assert parse(short) == parse(long)
    assert hash(parse(short)) == hash(parse(long))
    assert parse(short).short
    assert not parse(long).short


@pytest.mark.parametrize(
    'text',
    ['a b->a* b', 'a b ->a* b', 'a b-> a* b', '  a b -> a* b  ', 'a\tb\t->\ta*\tb',
     'a\nb\n->\na*\nb', 'a\r\nb -> a* b', 'a   b   ->   a*   b', 'a\u00a0b -> a*\u00a0b',
     'a\u3000b\u3000->\u3000a* b',
     'a\u2003b->a* b', 'a\x0cb -> a* b'],
)  # fmt: skip
def test_white_space(text):
    assert parse(text) == parse('a b -> a* b')
    assert hash(parse(text)) == hash(parse('a b -> a* b'))


# ------------------------------------------------------------------------------ equality and spans


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        ('a b -> a* b', 'a b -> b a*'),
        ('a b -> a* b', 'b a -> a* b'),
        ('a b -> a* b', 'x y -> x* y'),
        ('a -> a', 'a -> a1'),
        ('a -> a2', 'a -> a2*'),
        ('a -> 2 a', 'a -> a 2'),
        ('a -> a@(x,y)', 'a -> a@(y,x)'),
        ('a ...', 'a'),
    ],
)
def test_different_expressions_differ(first, second):
    assert parse(first) != parse(second)


def test_spans():
    text = '  é ...->\té2*  ... 4 é@( x , y )'
    expression = parse(text)
    written = [expression.text[slice(*term.span)] for term in expression.left + expression.right]
    assert written == ['é', '...', 'é2*', '...', '4', 'é@( x , y )']


def test_spans_are_offsets_in_the_normalized_text():
    expression = parse('e\u0301 x -> e\u0301 x*')
    assert expression.text == 'é x -> é x*'
    assert [term.span for term in expression.right] == [(7, 8), (9, 11)]


@oracle.examples(200)
@given(case=oracle.cases() | oracle.mesh_cases())
def test_parse_finds_the_terms(case):
    expression = parse(case.text)
    found = [(t.name, t.count, t.star, t.mesh_axes) for t in expression.right]
    assert found == [(t.axis, t.count, t.star, t.mesh_axes) for t in case.right]
    assert [term.name for term in expression.left] == list(case.left)
    assert expression.text == unicodedata.normalize('NFC', case.text)
    for term in expression.left:  # in the short form, the span includes the placement
        written = expression.text[slice(*term.span)]
        assert written.startswith(term.name) if expression.short else written == term.name
    for term in expression.right:
        assert ''.join(expression.text[slice(*term.span)].split()) == str(term)


@oracle.examples(150)
@given(case=oracle.cases() | oracle.mesh_cases())
def test_str_and_write_agree_with_parse(case):
    parsed = parse(case.text)
    assert parse(str(parsed)) == parsed
    assert str(parse(str(parsed))) == str(parsed)
    for written in [write(parsed.left, parsed.right), write_short(parsed.left)]:
        read = parse(written.text) if written.text else written
        assert (written, written.short) == (read, read.short)
        spans = [[term.span for term in (*e.left, *e.right)] for e in (written, read)]
        assert spans[0] == spans[1]


def test_str():
    assert str(parse(' a  b->a2*  3 b@( x,y )')) == 'a b -> a2* 3 b@(x,y)'
    assert str(parse('x y*')) == 'x y -> x y*'
    assert str(parse('->*')) == '-> *'
    assert str(Expression((), (Term(star=True),))) == '-> *'
