"""The texts of the errors, whole. A change of wording is a change of this file."""

import copy
import pickle
import textwrap
import traceback

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from einshard import EinshardError, clear_caches, device_mesh, einshard, make_sharding


def message(function, *args, **kwargs):
    with pytest.raises(EinshardError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def expected(text):
    return textwrap.dedent(text).strip('\n')


def mesh_of(n, axis_type=AxisType.Auto, **sizes):
    grid = np.array(jax.devices()[:n]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(axis_type,) * len(sizes))


# ---------------------------------------------------------------------------------- the notation


def test_empty():
    for text in ('', ' ', '\t\n '):
        assert message(make_sharding, text) == expected("""
            the expression is empty
              for a scalar: '... -> * ...'
              for a matrix: 'a b -> a* b'
            """)


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            'a b ->',
            """
            there is no right side: after '->' comes the placement of every axis
                a b ->
                      ^
              here: 'a b -> * a b'
            """,
        ),
        (
            '->',
            """
            there is no right side: after '->' comes the placement of every axis
                ->
                  ^
              here: '-> *'
            """,
        ),
        (
            'a -> b -> c',
            """
            an expression has one '->', this one has 2
                a -> b -> c
                  ^^   ^^
            """,
        ),
        (
            'a b->a* b->b a->a',
            """
            an expression has one '->', this one has 3
                a b->a* b->b a->a
                   ^^    ^^   ^^
            """,
        ),
    ],
)
def test_arrows(expression, text, devices8):
    assert message(make_sharding, expression, mesh=devices8) == expected(text)


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            'a b -> a! b*',
            """
            '!' is not part of the notation
                a b -> a! b*
                        ^
              terms are: a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  ...
            """,
        ),
        (
            'a, b -> a* b',
            """
            ',' is not part of the notation
                a, b -> a* b
                 ^
              terms are: a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  ...
            """,
        ),
        (
            '(a b) -> a* b',
            """
            '(' is not part of the notation
                (a b) -> a* b
                ^
              terms are: a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  ...
            """,
        ),
        (
            'a b - > a b*',
            """
            '-' alone is not part of the notation; the arrow is '->'
                a b - > a b*
                    ^
            """,
        ),
        (
            'a b->>a* b',
            """
            '>' alone is not part of the notation; the arrow is '->'
                a b->>a* b
                     ^
            """,
        ),
        (
            'a b → a* b',
            """
            '→' is not part of the notation; the arrow is '->'
                a b → a* b
                    ^
              here: 'a b -> a* b'
            """,
        ),
        (
            'a b => a* b',
            """
            '=>' is not part of the notation; the arrow is '->'
                a b => a* b
                    ^^
              here: 'a b -> a* b'
            """,
        ),
        (
            'a² -> a²*',
            """
            '²' is not a digit of the notation; counts are written in 0 to 9
                a² -> a²*
                 ^
            """,
        ),
        (
            'a b -> a٣ b',
            """
            '٣' is not a digit of the notation; counts are written in 0 to 9
                a b -> a٣ b
                        ^
            """,
        ),
    ],
)
def test_characters(expression, text, devices8):
    assert message(make_sharding, expression, mesh=devices8) == expected(text)


@pytest.mark.parametrize(('character', 'name'), [('\u200b', 'U+200B'), ('\x1b', 'U+001B')])
def test_characters_that_do_not_show(character, name, devices8):
    # shown as itself it would be no help, and a terminal would obey an escape
    assert message(make_sharding, f'a{character}b -> a*', mesh=devices8) == expected("""
        the character U+XXXX, which does not show, is not part of the notation
            a\ufffdb -> a*
             ^
          terms are: a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  ...
        """).replace('U+XXXX', name)


def test_a_lone_surrogate_can_be_printed(devices8):
    text = message(make_sharding, 'a\ud800 b*', mesh=devices8)
    assert 'U+D800' in text
    assert text.encode()


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            'w1 -> w1*',
            """
            'w1' is a placement, but the left side lists the array's axes by name alone
                w1 -> w1*
                ^^
              to place: write counts, stars and mesh axes on the right side
              in names: letters and underscores, no digits
            """,
        ),
        (
            'a* b -> a b*',
            """
            'a*' is a placement, but the left side lists the array's axes by name alone
                a* b -> a b*
                ^^
              to place: write counts, stars and mesh axes on the right side
              in names: letters and underscores, no digits
            """,
        ),
        (
            'a b@tp -> a b@tp',
            """
            'b@tp' is a placement, but the left side lists the array's axes by name alone
                a b@tp -> a b@tp
                  ^^^^
              to place: write counts, stars and mesh axes on the right side
              in names: letters and underscores, no digits
            """,
        ),
        (
            'a 2 -> a2',
            """
            '2' is a placement, but the left side lists the array's axes by name alone
                a 2 -> a2
                  ^
              to place: write counts, stars and mesh axes on the right side
              in names: letters and underscores, no digits
            """,
        ),
        (
            'a b -> a2b4',
            """
            'a2b4' is no term: names carry no digits, and spaces separate terms
                a b -> a2b4
                       ^^^^
              two terms: 'a2 b4'
              one axis:  'a_b'
            """,
        ),
        (
            'a b -> a*b*',
            """
            'a*b*' is no term: spaces separate terms
                a b -> a*b*
                       ^^^^
              two terms: 'a* b*'
            """,
        ),
        (
            'a b -> *a b',
            """
            '*a' is no term: spaces separate terms, and a star comes after the name
                a b -> *a b
                       ^^
              two terms: '* a'
              one term:  'a*'
            """,
        ),
        (
            'a b -> 2a b',
            """
            '2a' is no term: spaces separate terms, and a count comes after the name
                a b -> 2a b
                       ^^
              two terms: '2 a'
              one term:  'a2'
            """,
        ),
        (
            'a b -> a** b',
            """
            'a**' has more than one star; several stars are several terms
                a b -> a** b
                       ^^^
            """,
        ),
        (
            'a b -> a*2 b*',
            """
            in 'a*2' the count comes after the star
                a b -> a*2 b*
                       ^^^
              here: 'a b -> a2* b*'
            """,
        ),
        (
            'a b -> @x a b',
            """
            '@x' gives mesh axes to no array axis; a name goes before '@'
                a b -> @x a b
                       ^^
            """,
        ),
        (
            'a b -> a@ b',
            """
            'a@' does not name mesh axes
                a b -> a@ b
                       ^^
              one axis: 'b@data'
              several:  'b@(data,fsdp)'
            """,
        ),
        (
            'a b -> a@(data,\n tp*) b',
            """
            'a@(data,  tp*)' does not name mesh axes
                a b -> a@(data,  tp*) b
                       ^^^^^^^^^^^^^^
              one axis: 'b@data'
              several:  'b@(data,fsdp)'
            """,
        ),
        (
            'a b -> a2@data b',
            """
            'a2@data' has both a count and mesh axes; it is placed by one of them
                a b -> a2@data b
                       ^^^^^^^
              by count: 'b4'  'b*'
              by name:  'b@data'  'b@(data,fsdp)'
            """,
        ),
    ],
)
def test_words_that_are_no_terms(expression, text, devices8):
    assert message(make_sharding, expression, mesh=devices8) == expected(text)


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            'a b -> a0 b*',
            """
            'a0' has the count 0, but a count is at least 1
                a b -> a0 b*
                       ^^
            """,
        ),
        (
            'a b -> 00* a b',
            """
            '00*' has the count 0, but a count is at least 1
                a b -> 00* a b
                       ^^^
            """,
        ),
        (
            'a b -> a9999999999999 b',
            """
            a count of 13 digits is more than any machine has devices
                a b -> a9999999999999 b
                       ^^^^^^^^^^^^^^
            """,
        ),
    ],
)
def test_counts_that_are_none(expression, text, devices8):
    assert message(make_sharding, expression, mesh=devices8) == expected(text)


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            '... a ... -> ... a*',
            """
            '...' is on the left side 2 times, but it stands once for all axes without a name
                ... a ... -> ... a*
                ^^^   ^^^
            """,
        ),
        (
            '... a -> ... a* ...',
            """
            '...' is on the right side 2 times, but it stands once for all axes without a name
                ... a -> ... a* ...
                         ^^^    ^^^
            """,
        ),
        (
            '... a* ...',
            """
            '...' is there 2 times, but it stands once for all axes without a name
                ... a* ...
                ^^^    ^^^
            """,
        ),
        (
            '... a -> a*',
            """
            '...' is on the left side only; an axis that is not sharded is named without a count
                ... a -> a*
                ^^^
              here: '... a -> a* ...'
            """,
        ),
        (
            'a -> ... a*',
            """
            '...' is on the right side only
                a -> ... a*
                     ^^^
              left side: a
            """,
        ),
        (
            '... a -> ...2 a',
            """
            '...' stands for unsharded axes and carries no placement: '...2'
                ... a -> ...2 a
                         ^^^^
            """,
        ),
        (
            '...* a',
            """
            '...' stands for unsharded axes and carries no placement: '...*'
                ...* a
                ^^^^
            """,
        ),
        (
            'a... b*',
            """
            '...' stands apart from other terms, here it is glued to 'a'
                a... b*
                ^^^^
            """,
        ),
        (
            '...a b*',
            """
            '...' stands apart from other terms, here it is glued to 'a'
                ...a b*
                ^^^^
            """,
        ),
        (
            'a .. -> a* ..',
            """
            '..' is no term; unnamed axes are written '...'
                a .. -> a* ..
                  ^^
            """,
        ),
    ],
)
def test_ellipsis(expression, text, devices8):
    assert message(make_sharding, expression, mesh=devices8, n_dims=1) == expected(text)


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            'a b a -> a* b',
            """
            axis 'a' is on the left side 2 times, but each axis of the array has a name of its own
                a b a -> a* b
                ^   ^
            """,
        ),
        (
            'a* b a',
            """
            the short form lists each axis once, but 'a' comes again
                a* b a
                ^^   ^
              with an arrow: an axis may come again on the right: 'i o -> i2 o4 i2'
            """,
        ),
        (
            'a b -> a*',
            """
            'b' is on the left side only; an axis that is not sharded is named without a count
                a b -> a*
                  ^
              here: 'a b -> a* b'
            """,
        ),
        (
            'a b c -> b*',
            """
            'a' and 'c' are on the left side only; an axis that is not sharded is named without a count
                a b c -> b*
                ^   ^
              here: 'a b c -> b* a c'
            """,  # noqa: E501
        ),
        (
            'a b -> a',
            """
            'b' is on the left side only; an axis that is not sharded is named without a count
                a b -> a
                  ^
              here: 'a b -> * a b'
            """,
        ),
        (
            'a b -> a3',
            """
            'b' is on the left side only; an axis that is not sharded is named without a count
                a b -> a3
                  ^
            """,
        ),
        (
            'batch d -> bach* d',
            """
            'bach' is on the right side only
                batch d -> bach* d
                           ^^^^^
              left side: batch d
              here:      'batch d -> batch* d'
            """,
        ),
        (
            'batch d -> Batch2 4 d',
            """
            'Batch' is on the right side only
                batch d -> Batch2 4 d
                           ^^^^^^
              left side: batch d
              here:      'batch d -> batch2 4 d'
            """,
        ),
        (
            'a b -> a* b c2',
            """
            'c' is on the right side only
                a b -> a* b c2
                            ^^
              left side: a b
            """,
        ),
        (
            '-> a*',
            """
            'a' is on the right side only
                -> a*
                   ^^
              left side: names no axes, as for a scalar
            """,
        ),
    ],
)  # fmt: skip
def test_names_on_one_side(expression, text, devices8):
    assert message(make_sharding, expression, mesh=devices8) == expected(text)


# ---------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            '行 列 -> 行3 列',
            """
            the counts ask for 3 devices, which do not divide the 8 there are
                行 列 -> 行3 列
                         ^^^
              devices:    8
              works with: 3 devices, or a multiple of 3 with a replica '*'
            """,
        ),
        (
            'バッチ 列 -> バッチ* 烈',
            """
            '烈' is on the right side only
                バッチ 列 -> バッチ* 烈
                                     ^^
              left side: バッチ 列
            """,
        ),
        (
            '행\u3000列 -> 행3\u3000列',
            """
            the counts ask for 3 devices, which do not divide the 8 there are
                행 列 -> 행3 列
                         ^^^
              devices:    8
              works with: 3 devices, or a multiple of 3 with a replica '*'
            """,
        ),
        (
            'e\u0301 x -> e\u0301 y',
            """
            'y' is on the right side only
                é x -> é y
                         ^
              left side: é x
            """,
        ),
        (
            'הל x -> x7 הל',
            """
            the counts ask for 7 devices, which do not divide the 8 there are
                הל x -> x7 הל
                        ^^
              devices:    8
              works with: 7 devices, or a multiple of 7 with a replica '*'
            """,
        ),
        (
            # the vowel signs above and below (Mn) have no column, those beside (Mc) have one
            'हिन्दी x -> हिन्दी3 x',
            """
            the counts ask for 3 devices, which do not divide the 8 there are
                हिन्दी x -> हिन्दी3 x
                           ^^^^^^
              devices:    8
              works with: 3 devices, or a multiple of 3 with a replica '*'
            """,
        ),
        (
            'a\tb\n->\ta3\tb',
            """
            the counts ask for 3 devices, which do not divide the 8 there are
                a b -> a3 b
                       ^^
              devices:    8
              works with: 3 devices, or a multiple of 3 with a replica '*'
            """,
        ),
        (
            'a b\n-> a2 b',
            """
            'a2' uses 2 of 8 devices, and nothing says that the others hold replicas
                a b -> a2 b
                       ^^
              devices: 8
              here:    'a b -> * a2 b'
            """,
        ),
    ],
)
def test_carets_are_under_the_terms(expression, text, devices8):
    assert message(make_sharding, expression, mesh=devices8) == expected(text)


# ------------------------------------------------------------------------------- counts of devices


@pytest.mark.parametrize(
    ('n', 'expression', 'text'),
    [
        (
            16,
            'a b -> a2 b',
            """
            'a2' uses 2 of 16 devices, and nothing says that the others hold replicas
                a b -> a2 b
                       ^^
              devices: 16
              here:    'a b -> * a2 b'
            """,
        ),
        (
            12,
            'a b -> 3 a2 b',
            """
            '3' and 'a2' use 6 of 12 devices, and nothing says that the others hold replicas
                a b -> 3 a2 b
                       ^ ^^
              devices: 12
              here:    'a b -> * 3 a2 b'
            """,
        ),
        (
            8,
            'a b -> a b',
            """
            nothing is sharded, and nothing says that 8 devices hold replicas
                a b -> a b
                       ^ ^
              devices: 8
              here:    'a b -> * a b'
            """,
        ),
        (
            8,
            'x y',
            """
            nothing is sharded, and nothing says that 8 devices hold replicas
                x y
                ^ ^
              devices: 8
              here:    '* x y'
            """,
        ),
        (
            8,
            '... -> ...',
            """
            nothing is sharded, and nothing says that 8 devices hold replicas
                ... -> ...
                       ^^^
              devices: 8
              here:    '... -> * ...'
            """,
        ),
        (
            8,
            '-> 4',
            """
            '4' uses 4 of 8 devices, and nothing says that the others hold replicas
                -> 4
                   ^
              devices: 8
              here:    '-> * 4'
            """,
        ),
        (
            8,
            'a b -> 4 a2 b4',
            """
            the counts ask for 4 x 2 x 4 = 32 devices, more than the 8 there are
                a b -> 4 a2 b4
                       ^ ^^ ^^
              devices:    8
              works with: 32 devices, or a multiple of 32 with a replica '*'
            """,
        ),
        (
            8,
            'a b -> a3 b',
            """
            the counts ask for 3 devices, which do not divide the 8 there are
                a b -> a3 b
                       ^^
              devices:    8
              works with: 3 devices, or a multiple of 3 with a replica '*'
            """,
        ),
        (
            1,
            'a b -> a2 b',
            """
            the counts ask for 2 devices, more than the 1 there is
                a b -> a2 b
                       ^^
              devices:    1
              works with: 2 devices, or a multiple of 2 with a replica '*'
            """,
        ),
        (
            8,
            'a b -> a3 b*',
            """
            8 devices cannot be shared out in multiples of 3
                a b -> a3 b*
                       ^^
              devices:    8
              works with: 3, 6, 9, 12, ... devices
            """,
        ),
        (
            16,
            'a b -> 2 a3* b2*',
            """
            16 devices cannot be shared out in multiples of 2 x 3 x 2 = 12
                a b -> 2 a3* b2*
                       ^ ^^^ ^^^
              devices:    16
              works with: 12, 48, 108, 192, ... devices
            """,
        ),
    ],
)
def test_products(n, expression, text):
    assert message(make_sharding, expression, mesh=jax.devices()[:n]) == expected(text)


@pytest.mark.parametrize(
    ('n', 'expression', 'text'),
    [
        (
            8,
            'a b -> 2 a2* b*',
            """
            4 devices cannot be shared 2 : 1 between 'a2*' and 'b*'
                a b -> 2 a2* b*
                         ^^^ ^^
              devices:    8, of which '2' replicates, leaving 4
              works with: 4, 16, 36, 64, ... devices
              here:       'a b -> 2 a4 b'
            """,
        ),
        (
            8,
            'a b -> a* b*',
            """
            8 devices cannot be shared 1 : 1 between 'a*' and 'b*'
                a b -> a* b*
                       ^^ ^^
              devices:    8
              works with: 1, 4, 9, 16, ... devices
              here:       'a b -> a8 b'
            """,
        ),
        (
            16,
            'a b c -> a* b* c*',
            """
            16 devices cannot be shared 1 : 1 : 1 among 'a*', 'b*' and 'c*'
                a b c -> a* b* c*
                         ^^ ^^ ^^
              devices:    16
              works with: 1, 8, 27, 64, ... devices
              here:       'a b c -> a16 b c'
            """,
        ),
        (
            8,
            'a b -> * a* b',  # the fix shards what the user wanted sharded
            """
            8 devices cannot be shared 1 : 1 between '*' and 'a*'
                a b -> * a* b
                       ^ ^^
              devices:    8
              works with: 1, 4, 9, 16, ... devices
              here:       'a b -> a8 b'
            """,
        ),
        (
            16,
            'a b -> 2 b4 a* b*',
            """
            2 devices cannot be shared 1 : 1 between 'a*' and 'b*'
                a b -> 2 b4 a* b*
                            ^^ ^^
              devices:    16, of which '2' and 'b4' take 8, leaving 2
              works with: 8, 32, 72, 128, ... devices
              here:       'a b -> 2 b4 a2 b'
            """,
        ),
    ],
)
def test_shares_that_are_no_integers(n, expression, text):
    assert message(make_sharding, expression, mesh=jax.devices()[:n]) == expected(text)


# ---------------------------------------------------------------------------------------- the rank


@pytest.mark.parametrize(
    ('expression', 'n_dims', 'text'),
    [
        (
            'a b -> a* b',
            3,
            """
            the expression names 2 axes, but the array has 3 dimensions
                a b -> a* b
                ^ ^
            """,
        ),
        (
            'a b*',
            1,
            """
            the expression names 2 axes, but the array has 1 dimension
                a b*
                ^ ^^
            """,
        ),
        (
            '-> *',
            1,
            """
            the expression names 0 axes, but the array has 1 dimension
                -> *
            """,
        ),
        (
            'a ... b -> a* ... b',
            1,
            """
            beside '...' the expression names 2 axes, but the array has 1 dimension
                a ... b -> a* ... b
                ^     ^
            """,
        ),
        (
            '... b -> ... b*',
            None,
            """
            where 'b' is behind '...' depends on the rank of the array, which is not known here
                ... b -> ... b*
                ^^^
              give: n_dims=, the number of dimensions of the array
            """,
        ),
        (
            'a ... b c -> a ... b2 c4',
            None,
            """
            where 'b' and 'c' are behind '...' depends on the rank of the array, which is not known here
                a ... b c -> a ... b2 c4
                  ^^^
              give: n_dims=, the number of dimensions of the array
            """,  # noqa: E501
        ),
        (
            'a b -> a* b',
            -1,
            """
            n_dims= is the number of dimensions of an array, not -1
                a b -> a* b
            """,
        ),
        (
            'a b -> a* b',
            '2',
            """
            n_dims= is the number of dimensions of an array, not '2'
                a b -> a* b
            """,
        ),
        (
            'a b -> a* b',
            True,
            """
            n_dims= is the number of dimensions of an array, not True
                a b -> a* b
            """,
        ),
    ],
)  # fmt: skip
def test_rank(expression, n_dims, text, devices8):
    assert message(make_sharding, expression, mesh=devices8, n_dims=n_dims) == expected(text)


# ------------------------------------------------------------------------------- meshes with names


@pytest.mark.parametrize(
    ('expression', 'text'),
    [
        (
            'b d -> b@dta d',
            """
            the mesh has no axis 'dta'
                b d -> b@dta d
                       ^^^^^
              mesh: 'data': 4, 'tp': 2
              here: 'b d -> b@data d'
            """,
        ),
        (
            'b d -> b@(tp,dat) d',
            """
            the mesh has no axis 'dat'
                b d -> b@(tp,dat) d
                       ^^^^^^^^^^
              mesh: 'data': 4, 'tp': 2
              here: 'b d -> b@(tp,data) d'
            """,
        ),
        (
            'b d -> b@(data,dat) d',  # the nearest name is taken already
            """
            the mesh has no axis 'dat'
                b d -> b@(data,dat) d
                       ^^^^^^^^^^^^
              mesh: 'data': 4, 'tp': 2
            """,
        ),
        (
            'b d -> b@fsdp d',
            """
            the mesh has no axis 'fsdp'
                b d -> b@fsdp d
                       ^^^^^^
              mesh: 'data': 4, 'tp': 2
            """,
        ),
        (
            'b d -> b@data d@(tp,data)',
            """
            mesh axis 'data' is used 2 times, but it can shard only one place
                b d -> b@data d@(tp,data)
                       ^^^^^^ ^^^^^^^^^^^
            """,
        ),
        (
            'b d -> b@(tp,tp) d',
            """
            mesh axis 'tp' is used 2 times, but it can shard only one place
                b d -> b@(tp,tp) d
                       ^^^^^^^^^
            """,
        ),
        (
            'b d -> b2 d4',
            """
            the counts 2 x 4 do not fall on the axes of the mesh
                b d -> b2 d4
                       ^^ ^^
              mesh:          'data': 4, 'tp': 2 (Auto)
              a count takes: consecutive mesh axes, in order, and all of an axis
            """,
        ),
        (
            'b d -> b4 d',  # '* b4 d' would be wrong: the first axis has size 4
            """
            'b4' uses 4 of 8 devices, and nothing says that the others hold replicas
                b d -> b4 d
                       ^^
              devices: 8
            """,
        ),
        (
            'b d -> b d2',
            """
            'd2' uses 2 of 8 devices, and nothing says that the others hold replicas
                b d -> b d2
                         ^^
              devices: 8
              here:    'b d -> * b d2'
            """,
        ),
        (
            'b d -> b2 d@tp',
            """
            'b2' uses 2 of 4 devices, and nothing says that the others hold replicas
                b d -> b2 d@tp
                       ^^
              devices: 8, of which 'd@tp' takes 2, leaving 4
            """,
        ),
        (
            'b d -> b@data d4',
            """
            the counts ask for 4 devices, more than the 2 that the names leave
                b d -> b@data d4
                              ^^
              devices:    8, of which 'b@data' takes 4, leaving 2
              works with: 16 devices, or a multiple of 16 with a replica '*'
            """,
        ),
        (
            'b d -> b3 d@tp',
            """
            the counts ask for 3 devices, which do not divide the 4 that the names leave
                b d -> b3 d@tp
                       ^^
              devices:    8, of which 'd@tp' takes 2, leaving 4
              works with: 6 devices, or a multiple of 6 with a replica '*'
            """,
        ),
        (
            'b d -> b@data d@tp 2',
            """
            the counts ask for 2 devices, more than the 1 that the names leave
                b d -> b@data d@tp 2
                                   ^
              devices:    8, of which 'b@data' and 'd@tp' take 8, leaving 1
              works with: 16 devices, or a multiple of 16 with a replica '*'
            """,
        ),
        (
            'b d -> b3* d@tp',
            """
            4 devices cannot be shared out in multiples of 3
                b d -> b3* d@tp
                       ^^^
              devices:    8, of which 'd@tp' takes 2, leaving 4
              works with: 6, 12, 18, 24, ... devices
            """,
        ),
        (
            'b d -> b2* d* b@tp',
            """
            4 devices cannot be shared 2 : 1 between 'b2*' and 'd*'
                b d -> b2* d* b@tp
                       ^^^ ^^
              devices:    8, of which 'b@tp' takes 2, leaving 4
              works with: 4, 16, 36, 64, ... devices
              here:       'b d -> b4 d b@tp'
            """,
        ),
    ],
)
def test_named_mesh(expression, text):
    assert message(make_sharding, expression, mesh=mesh_of(8, data=4, tp=2)) == expected(text)


def test_names_without_a_mesh():
    assert message(make_sharding, 'b d -> b@data d@tp') == expected("""
        'b@data' and 'd@tp' name mesh axes, but there is no mesh
            b d -> b@data d@tp
                   ^^^^^^ ^^^^
          give: mesh=, or enter one: 'with jax.set_mesh(mesh):'
        """)
    assert message(make_sharding, 'b@data d') == expected("""
        'b@data' names mesh axes, but there is no mesh
            b@data d
            ^^^^^^
          give: mesh=, or enter one: 'with jax.set_mesh(mesh):'
        """)


def test_mesh_in_context():
    with jax.set_mesh(mesh_of(8, data=2, tp=4)):
        assert message(make_sharding, 'b d -> b4 d2') == expected("""
            the counts 4 x 2 do not fall on the axes of the mesh
                b d -> b4 d2
                       ^^ ^^
              mesh:          'data': 2, 'tp': 4 (Auto)
              a count takes: consecutive mesh axes, in order, and all of an axis
            """)
        assert message(make_sharding, 'b d -> b@fsdp d') == expected("""
            the mesh has no axis 'fsdp'
                b d -> b@fsdp d
                       ^^^^^^
              mesh: 'data': 2, 'tp': 4
            """)


def test_explicit_axes_are_not_refactored():
    mesh = device_mesh(jax.devices()[:12], axis_types=AxisType.Explicit)
    assert message(make_sharding, 'a b -> a4 b3', mesh=mesh) == expected("""
        the counts 4 x 3 do not fall on the axes of the mesh
            a b -> a4 b3
                   ^^ ^^
          mesh:          'd0': 3, 'd1': 2, 'd2': 2 (Explicit)
          a count takes: consecutive mesh axes, in order, and all of an axis
        """)


@pytest.mark.parametrize(
    ('mesh', 'text'),
    [
        (
            'data',
            """
            mesh= is 'data', which is no mesh
              give: a Mesh, an AbstractMesh or a sequence of devices
            """,
        ),
        ([], 'a mesh needs at least one device, but none is given'),
        (
            [1, 2],
            """
            a mesh is made of devices, but one of them is 1
              give: a sequence of jax.Device, a Mesh or an AbstractMesh
            """,
        ),
        (
            [['cpu'], 2],
            """
            a mesh is made of devices, but one of them is ['cpu']
              give: a sequence of jax.Device, a Mesh or an AbstractMesh
            """,
        ),
    ],
)
def test_things_that_are_no_mesh(mesh, text):
    assert message(make_sharding, 'a b -> a* b', mesh=mesh) == expected(text)


def test_a_device_twice():
    first, second, *_ = jax.devices()
    assert message(make_sharding, 'a*', mesh=[first, second, first]) == expected(f"""
        a device is given more than once
          devices: {first}, {second}, {first}
        """)


# ----------------------------------------------------------------------------- arrays and arguments


@pytest.mark.parametrize(
    ('shape', 'expression', 'text'),
    [
        (
            (6, 8),
            'a b -> a* b',
            """
            axis 'a' has size 6, which 4 parts do not divide
                a b -> a* b
                       ^^
              array:      float32[6,8]
              devices:    4
              works with: 1, 2 parts
            """,
        ),
        (
            (5, 8),
            'a b -> a2 b 2',
            """
            axis 'a' has size 5, which 2 parts do not divide
                a b -> a2 b 2
                       ^^
              array:      float32[5,8]
              devices:    4
              works with: 1 part
            """,
        ),
        (
            (6, 8),
            'a b -> a2 b a2',
            """
            axis 'a' has size 6, which 4 parts do not divide
                a b -> a2 b a2
                       ^^   ^^
              array:      float32[6,8]
              devices:    4
              works with: 1, 2 parts
            """,
        ),
        (
            (3, 4, 6),
            '... d*',
            """
            axis 'd' has size 6, which 4 parts do not divide
                ... d*
                    ^^
              array:      float32[3,4,6]
              devices:    4
              works with: 1, 2 parts
            """,
        ),
        (
            (),
            'a b -> a* b',
            """
            the expression names 2 axes, but the array has 0 dimensions
                a b -> a* b
                ^ ^
              array: float32[]
            """,
        ),
    ],
)
def test_arrays(shape, expression, text):
    devices = jax.devices()[:4]
    for x in (
        np.ones(shape, np.float32),
        jax.numpy.ones(shape),
        jax.ShapeDtypeStruct(shape, np.float32),
    ):
        assert message(einshard, x, expression, mesh=devices) == expected(text)


def test_arrays_in_jit():
    def function(x):
        return einshard(x, 'a b -> a* b', mesh=jax.devices()[:4])

    assert message(jax.jit(function), np.ones((6, 8), np.float32)) == expected("""
        axis 'a' has size 6, which 4 parts do not divide
            a b -> a* b
                   ^^
          array:      float32[6,8]
          devices:    4
          works with: 1, 2 parts
        """)


def test_an_axis_of_a_named_mesh_does_not_divide():
    x = np.ones((6, 8), np.float32)
    assert message(einshard, x, 'b d -> b@data d', mesh=mesh_of(8, data=4, tp=2)) == expected("""
        axis 'b' has size 6, which 4 parts do not divide
            b d -> b@data d
                   ^^^^^^
          array:      float32[6,8]
          devices:    8
          works with: 1, 2 parts
        """)


def test_arrays_that_jax_has_not(devices8):
    assert message(einshard, np.array(['x', 'y']), 'a -> * a', mesh=devices8) == expected("""
        JAX has no arrays of <U1
            a -> * a
          array: <U1[2]
        """)


def test_abstract_mesh_for_an_array():
    assert message(einshard, np.ones(8), 'a*', mesh=AbstractMesh((4,), ('x',))) == expected("""
        an abstract mesh has no devices to put an array on
          give: a jax.ShapeDtypeStruct, which is annotated; or a mesh of devices
        """)


def test_expressions_that_are_no_strings(devices8):
    assert message(make_sharding, None) == (
        'an expression is a string, not None of type NoneType'
    )  # fmt: skip
    assert message(make_sharding, ['a', 'b'], mesh=devices8) == (
        "an expression is a string, not ['a', 'b'] of type list"
    )


def test_memory_kinds(devices8):
    known = ', '.join(sorted(memory.kind for memory in devices8[0].addressable_memories()))
    assert message(make_sharding, 'a*', mesh=devices8, memory_kind='hbm') == expected(f"""
        the devices have no memory kind 'hbm'
            a*
          devices have: {known}
        """)
    assert message(make_sharding, 'a*', mesh=devices8, memory_kind=3) == expected("""
        memory_kind= is a string, not 3
            a*
        """)


# -------------------------------------------------------------------------------------------- trees

W, B = np.ones((6, 8), np.float32), np.ones(3, np.float32)


@pytest.mark.parametrize(
    ('tree', 'spec', 'text'),
    [
        (
            {'layers': [{'w': W, 'b': B}]},
            {'layers': [{'w': 'a b -> a* b', 'b': '* ...'}]},
            """
            axis 'a' has size 6, which 4 parts do not divide
                a b -> a* b
                       ^^
              array:      float32[6,8], leaf 'layers/0/w'
              devices:    4
              works with: 1, 2 parts
            """,
        ),
        (
            {'w': W, 'b': B},
            'x y -> x2 y2',
            """
            the expression names 2 axes, but the array has 1 dimension
                x y -> x2 y2
                ^ ^
              array: float32[3], leaf 'b'
            """,
        ),
        (
            {'w': W, 'b': 1.5},
            'x y -> x2 y2',
            """
            the expression names 2 axes, but the array has 0 dimensions
                x y -> x2 y2
                ^ ^
              array: float 1.5, leaf 'b'
            """,
        ),
        (
            {'w': W, 'b': B},
            {'w': '* ...', 'c': '* ...'},
            """
            the specs are no prefix of the tree: they differ at the top
              specs: dict with c, w
              tree:  dict with b, w
            """,
        ),
        (
            [W, W],
            ['* ...'],
            """
            the specs are no prefix of the tree: they differ at the top
              specs: list with 0
              tree:  list with 0, 1
            """,
        ),
        (
            [W, W],
            ('* ...', '* ...'),
            """
            the specs are no prefix of the tree: they differ at the top
              specs: tuple with 0, 1
              tree:  list with 0, 1
            """,
        ),
        (
            {'layers': [W, {'w': W}]},
            {'layers': ['* ...', {'w': {'q': '* ...'}}]},
            """
            the specs are no prefix of the tree: they differ at 'layers/1/w'
              specs: dict with q
              tree:  float32[6,8]
            """,
        ),
        (
            W,
            ['* ...'],
            """
            the specs are no prefix of the tree: they differ at the top
              specs: list with 0
              tree:  float32[6,8]
            """,
        ),
        (
            {'w': W},
            {'w': 3},
            """
            3 at 'w' is no spec
              specs are: an expression, None, a function (path, leaf) -> spec, a tree of those
            """,
        ),
        (
            {'w': W},
            lambda path, leaf: 3,
            """
            a function of the path gave 3 for a leaf, which is no spec for one
              array: float32[6,8], leaf 'w'
              give:  an expression or None
            """,
        ),
        (
            {'w': W},
            PartitionSpec('data'),
            """
            {spec} is no spec
              specs are: an expression, None, a function (path, leaf) -> spec, a tree of those
              instead:   name the mesh axes in an expression: 'b d -> b@data d'
            """,
        ),
        (
            {'w': W, 'b': B},
            {'w': 'a b -> a! b', 'b': '* ...'},
            """
            '!' is not part of the notation
                a b -> a! b
                        ^
              spec at:   'w'
              terms are: a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  ...
            """,
        ),
    ],
)
def test_trees(tree, spec, text):
    text = expected(text).replace('{spec}', repr(spec))  # JAX changes its repr
    assert message(einshard, tree, spec, mesh=jax.devices()[:4]) == text


def test_nothing_has_moved_after_an_error():
    tree = {'a': jax.numpy.ones(8), 'b': jax.numpy.ones(3)}
    with pytest.raises(EinshardError):
        einshard(tree, 'x -> x*', mesh=jax.devices()[:4], donate=True)
    assert not tree['a'].is_deleted()
    assert len(tree['a'].devices()) == 1


# -------------------------------------------------------------------------------- the error itself


def test_errors_print_their_public_name(devices8):
    try:
        make_sharding('a b -> 2 a2* b*', mesh=devices8)
    except EinshardError as error:
        printed = ''.join(traceback.format_exception_only(error))
    assert printed == (
        "einshard.EinshardError: 4 devices cannot be shared 2 : 1 between 'a2*' and 'b*'\n"
        '    a b -> 2 a2* b*\n'
        '             ^^^ ^^\n'
        "  devices:    8, of which '2' replicates, leaving 4\n"
        '  works with: 4, 16, 36, 64, ... devices\n'
        "  here:       'a b -> 2 a4 b'\n"
    )
    assert issubclass(EinshardError, ValueError)


def test_parts_of_an_error_are_its_attributes(devices8):
    with pytest.raises(EinshardError) as caught:
        make_sharding('a b -> 2 a2* b*', mesh=devices8)
    error = caught.value
    assert error.sentence == "4 devices cannot be shared 2 : 1 between 'a2*' and 'b*'"
    assert error.expression == 'a b -> 2 a2* b*'
    assert [error.expression[slice(*span)] for span in error.spans] == ['a2*', 'b*']
    assert error.facts == {
        'devices': "8, of which '2' replicates, leaving 4",
        'works with': '4, 16, 36, 64, ... devices',
    }
    assert error.fix == "'a b -> 2 a4 b'"


@pytest.mark.parametrize(
    'clone', [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_survive_pickling(clone, devices8):
    # a worker process sends them to its parent
    with pytest.raises(EinshardError) as caught:
        make_sharding('a b -> 2 a2* b*', mesh=devices8)
    other = clone(caught.value)
    assert type(other) is EinshardError
    assert str(other) == str(caught.value)
    assert other.spans == caught.value.spans
    assert other.facts == caught.value.facts


def test_no_other_error_is_shown_above_ours():
    for spec in ('x y -> x* y', {'c': '* ...'}, 'a2b', {'w': 'x y ->'}):
        with pytest.raises(EinshardError) as caught:
            einshard({'w': W}, spec, mesh=jax.devices()[:4])
        printed = ''.join(traceback.format_exception(caught.value))
        assert printed.count('Traceback') == 1
        assert 'During handling' not in printed


def test_a_named_sharding_is_no_spec(devices8):
    spec = NamedSharding(mesh_of(8, data=4, tp=2), PartitionSpec('data'))
    assert message(einshard, W, spec) == (
        f'{spec!r} is no spec\n'
        '  specs are: an expression, None, a function (path, leaf) -> spec, a tree of those\n'
        "  instead:   name the mesh axes in an expression: 'b d -> b@data d'"
    )


def test_on_a_machine_with_one_device(monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    clear_caches()
    text = """
        the counts ask for 8 devices, more than the 1 there is
            a b -> a8 b
                   ^^
          to simulate 8: XLA_FLAGS=--xla_force_host_platform_device_count=8, set before JAX starts
          devices:       1
          works with:    8 devices, or a multiple of 8 with a replica '*'
    """
    assert message(make_sharding, 'a b -> a8 b', mesh=jax.devices()[:1]) == expected(text)
    clear_caches()
