"""einsum against numpy, and against jnp.einsum with constraints written by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of
from refusal import refusal

from einshard import (
    axis_rules,
    describe,
    device_mesh,
    einshard,
    einsum,
    explain,
    gather,
    make_sharding,
    per_device,
    sharded,
)


def array(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ('expression', 'shapes'),
    [
        ('batch x, x y -> batch y', [(4, 16), (16, 8)]),
        ('batch x*, x* y -> batch y', [(4, 16), (16, 8)]),
        ('batch* x, x y -> batch y', [(16, 4), (4, 8)]),
        ('batch x*, x* y -> batch y8 2', [(4, 16), (16, 8)]),
        ('batch x, x y -> batch4 y4', [(4, 16), (16, 8)]),
        ('b s4 h d 4, b t h d -> b h s t', [(2, 8, 4, 16), (2, 8, 4, 16)]),
        ('n a4 b 4, n 4 b c4 -> n a4 c4', [(3, 4, 5), (3, 5, 8)]),
        ('... x*, x* y -> ... y', [(2, 3, 16), (16, 8)]),
        ('... x, x y -> * ... y4', [(2, 3, 16), (16, 8)]),
        ('a, b -> a b', [(3,), (4,)]),
        ('x, x ->', [(16,), (16,)]),
        ('x16, x16 ->', [(16,), (16,)]),
        (', x -> x', [(), (4,)]),
        ('a b -> b a', [(4, 8)]),
        ('a b* -> a', [(4, 16)]),
        ('a b, b c, c d -> a d', [(2, 3), (3, 4), (4, 5)]),
        ('α ключ, ключ β -> β α', [(2, 3), (3, 4)]),
    ],
)
def test_numpy_agrees(expression, shapes):
    arrays = [array(*shape) for shape in shapes]
    left, right = expression.split('->')
    letters = {}

    def plain(operand):
        words = [word.rstrip('0123456789*') for word in operand.split()]
        kept = [word for word in words if word]
        return ''.join(
            word if word == '...' else letters.setdefault(word, 'abcdefgh'[len(letters)])
            for word in kept
        )

    subscripts = ','.join(map(plain, left.split(','))) + '->' + plain(right)
    expected = np.einsum(subscripts, *arrays)
    np.testing.assert_allclose(einsum(expression, *arrays), expected, rtol=1e-5, atol=1e-5)
    jitted = jax.jit(lambda *xs: einsum(expression, *xs))
    np.testing.assert_allclose(jitted(*arrays), expected, rtol=1e-5, atol=1e-5)


def test_the_result_is_placed_as_written():
    y = einsum('b x*, x* y -> b2 y8', array(4, 16), array(16, 8))
    assert y.sharding == make_sharding('b2 y8')
    assert describe(y) == 'a b -> a2 b8'


def test_numbers_as_operands():
    for result in ('a', 'a*'):
        expression = f', a -> {result}'
        np.testing.assert_array_equal(einsum(expression, 2.0, np.ones(16)), np.full(16, 2.0))
        doubled = jax.jit(lambda x, text=expression: einsum(text, 2.0, x))
        np.testing.assert_array_equal(doubled(jnp.ones(16)), np.full(16, 2.0))
    assert einsum(' -> ', 3.0) == 3


def test_sixty_axes():
    """More than there are letters."""
    names = [f'{a}{b}' for a in 'abcdef' for b in 'abcdefghij']
    ones = np.ones((1,) * 30, np.float32)
    expression = f'{" ".join(names[:30])}, {" ".join(names[30:])} ->'
    assert einsum(expression, ones, ones) == 1


def test_reports_have_the_axis_names():
    def product(x, w):
        return einsum('batch mlp*, mlp* embed -> * batch embed', x, w)

    (row,) = explain(product, array(16, 32), array(32, 8)).collectives
    assert (row.kind, row.axes) == ('all-reduce', 'batch embed')


def test_options_are_those_of_jnp_einsum():
    x, w = (array(4, 16).astype(jnp.bfloat16), array(16, 8).astype(jnp.bfloat16))
    y = einsum('b x, x y -> b y', x, w, preferred_element_type=jnp.float32, precision='highest')
    assert y.dtype == jnp.float32
    with pytest.raises(TypeError, match='unknown'):
        einsum('b x, x y -> b y', x, w, unknown=1)


def test_nothing_is_compiled_twice():
    x, w = array(4, 16), array(16, 8)
    einsum('b x*, x* y -> b y', x, w, precision='high')
    with counting() as counts:
        einsum('b x*, x* y -> b y', x, w, precision='high')
    assert counts.compiled == []


def test_the_program_is_that_written_by_hand(devices8):
    mesh = device_mesh(devices8)
    columns, rows = (NamedSharding(mesh, P(*axes, mesh.axis_names)) for axes in ([None], []))

    def by_hand(x, w):
        x = jax.lax.with_sharding_constraint(x, columns)
        w = jax.lax.with_sharding_constraint(w, rows)
        return jax.lax.with_sharding_constraint(jnp.einsum('bx,xy->by', x, w), rows)

    def ours(x, w):
        return einsum('b x8, x8 y -> b8 y', x, w, mesh=mesh)

    x, w = array(8, 16), array(16, 8)
    ours.__name__ = by_hand.__name__
    texts = [jax.jit(f).lower(x, w).as_text() for f in (ours, by_hand)]
    assert texts[0] == texts[1]


def test_the_mesh_of_the_function_around(devices8):
    @sharded('* b x', None, mesh=devices8)
    def layer(x, w):
        return einsum('b x*, x* y -> b y*', x, w)

    assert layer(array(4, 16), array(16, 8)).sharding == make_sharding('b y*', mesh=devices8)


@pytest.mark.parametrize(
    ('expression', 'rules', 'expected'),
    [
        # the result is placed as einshard places its expression
        ('a b, b c -> a c', {'a': '@data'}, P('data')),
        ('a b, b c -> a c@tp', {'a': '@data'}, P('data', 'tp')),
        ('a b@tp, b c -> a c', {'a': '@data', 'c': '@tp'}, P('data', 'tp')),
        # rules for other axes, or without a placement, leave it to the compiler
        ('a b, b c@tp -> a c', {'b': '@data'}, P(None, 'tp')),
        ('a b, b c@tp -> a c', {'a': ''}, P(None, 'tp')),
        # operands without a placement may break the rules
        ('a b, b c -> a c', {'a': '@data', 'b': '@data'}, P('data')),
    ],
)
def test_axis_rules(expression, rules, expected):
    mesh, x = mesh_of(data=4, tp=2), array(8, 8)
    with jax.set_mesh(mesh), axis_rules(rules):
        for product in (einsum, jax.jit(einsum, static_argnums=0)):
            found = product(expression, x, x).sharding
            assert found.is_equivalent_to(NamedSharding(mesh, expected), 2)


def test_axis_rules_do_not_apply_to_the_arrays_of_devices():
    x = array(8, 8)
    with axis_rules(a='@data'):
        product = per_device('a@data b', 'b c', out='a@data c', mesh=mesh_of(data=4))
        y = product(lambda x, w: einsum('a b, b c -> a c', x, w))(x, x)
    np.testing.assert_allclose(y, x @ x, rtol=1e-4, atol=1e-5)


def test_grad_and_vmap():
    x, w = array(4, 16), array(16, 8)

    def loss(w):
        return (einsum('b x*, x* y -> b y', x, w) ** 2).sum()

    expected = jax.grad(lambda w: ((x @ w) ** 2).sum())(jnp.asarray(w))
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(w)), expected, rtol=1e-4)
    many = jax.vmap(lambda x: einsum('x*, x* y -> y', x, w))(jnp.asarray(x))
    np.testing.assert_allclose(many, x @ w, rtol=1e-4, atol=1e-5)


class TestExplicit:
    @pytest.fixture(autouse=True)
    def mesh(self):
        with jax.set_mesh(device_mesh(axis_types=AxisType.Explicit)):
            yield

    def test_the_result_is_placed_as_written(self):
        x, w = array(4, 16), array(16, 8)
        y = einsum('b x*, x* y -> b y8 2', x, w)
        assert str(jax.typeof(y)) == 'float32[4,8@(d0,d1,d2)]'
        np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)

    def test_free_axes_need_no_result(self):
        y = einsum('b* x, * x y -> b y', array(16, 4), array(4, 8))
        assert str(jax.typeof(y)) == 'float32[16@(d0,d1,d2,d3),8]'

    def test_a_sum_over_a_sharded_axis_needs_one(self):
        error = refusal(einsum, 'batch x*, x* y -> batch y', array(4, 16), array(16, 8))
        assert error.fix == "'batch x*, x* y -> * batch y'"
        y = einsum('batch x*, x* y -> * batch y', array(4, 16), array(16, 8))
        assert str(jax.typeof(y)) == 'float32[4,8]'


@pytest.mark.parametrize(
    ('text', 'shapes', 'fix'),
    [
        ('bx,xy->by', [(2, 3), (3, 4)], 'b x, x y -> b y'),
        ('ij, ij -> ', [(2, 3), (2, 3)], 'i j, i j ->'),
        ('ab->ba', [(2, 3)], 'a b -> b a'),
        ('cb, ba', [(2, 3), (3, 4)], 'c b, b a -> a c'),
        ('ij,ji', [(2, 3), (3, 2)], 'i j, j i ->'),
        ('bhqd,bhkd->bhqk', [(2, 3, 4, 5)] * 2, 'b h q d, b h k d -> b h q k'),
    ],
)
def test_letters_without_spaces(text, shapes, fix):
    arrays = [array(*shape) for shape in shapes]
    assert refusal(einsum, text, *arrays).fix == f"'{fix}'"
    np.testing.assert_allclose(einsum(fix, *arrays), np.einsum(text, *arrays), rtol=1e-5)


@pytest.mark.parametrize(
    ('text', 'shapes'),
    [
        ('bx,xy->by', [(2,), (2, 3)]),
        ('bx,xy->bz', [(2, 3), (3, 4)]),
        ('b x, xy->b', [(2, 3), (3, 4)]),
    ],
)
def test_words_that_spaces_do_not_fix(text, shapes):
    assert refusal(einsum, text, *(array(*shape) for shape in shapes)).fix is None


def test_a_path_of_contractions():
    arrays = [array(2, 3), array(3, 4), array(4, 5)]
    product = np.linalg.multi_dot(arrays)
    for path in ([(1, 2), (0, 1)], ((0, 1), (0, 1)), [[0, 1], [0, 1]], 'greedy', True):
        found = einsum('a b, b c, c d -> a d', *arrays, optimize=path)
        np.testing.assert_allclose(found, product, rtol=1e-5)


# JAX's gradient of most of these raises, because the reduced axes do not shard what it contracts;
# that of three operands returns wrong numbers, or XLA aborts the process.
REDUCED = [
    'b@x k, k n =@x -> b@x n',
    'b@x k, k n =@x -> * b n',
    'b@x k, k n =@x -> b@y n',
    'b@(x,y) k, k n =@x -> b@(x,y) n',
    'b@(x,y) k@z, k n@z =@x -> b@(x,y) n@z',
    'b@x k, k n@y =@(x,z) -> b@x n@y',
    'b@(y,z) k@x, k n =@(x,z) -> b@z n@y',
    'b@x k@y, k@y n =@x -> b@x n +@y',
    '... b@x k, k n =@x -> ... b@x n',
    'k n =@x, ... b@x k -> ... b@x n',
    'g b k =@x, g@x k n@y -> n@y b g *',
    'b@x k =@y, k@z =@x -> b@x',
    'b n@z =@x, b@x n =@y -> *',
    'b@y k@z =@x -> b@(y,x)',
    'b k@y =@x -> k@y =@x',
    'b k@y, k n =@x -> b n@z =@x',
    'b k =@x, k@y n -> * b n',
    'b@x k, k n =@x -> b n',
    'b@z k =@(x,y), n@y k =@x -> b n@y',
    'b@(x,y) k, k@y n =@x -> b@(x,y) n',
    'b@z k@y, k@y n@x =@z -> b n@z +@y',
    'b@x k@y =@z, n@x k@y =@z -> n b@z +@y',
    'b@(x,z) k@y, n k@y =@(x,z) -> n b@z +@y',
    'g b k@y, g k@y n@(x,z) -> g b@z n +@y',
    'b@(x,z) k@y -> b@z +@y',
    'b k@x, k@y n =@x, n m@(x,y,z) -> b@y m',
    'b k@x =@y, k n =@(z,x), n@(x,z,y) m -> b@y m',
]


@pytest.mark.parametrize(
    ('expression', 'jitted'),
    # without jit, JAX compiles each operation
    [*((each, True) for each in REDUCED), *((each, False) for each in REDUCED[::4])],
)
def test_gradients_of_reduced_operands(expression, jitted):
    rng = np.random.default_rng(0)
    *operands, result = re.split(r',(?![^(]*\))|->', expression)
    letters = [''.join(re.findall(r'(?<![@(,])\b[a-z]\b', part)) for part in (*operands, result)]
    axes = [
        'uv' * ('...' in part) + own for part, own in zip((*operands, result), letters, strict=True)
    ]
    *arrays, weights = [rng.integers(-4, 5, (8,) * len(own)).astype(np.float32) for own in axes]
    unplaced = ' '.join(('...', *letters[-1]) if '...' in result else letters[-1])

    def loss(*arrays):
        return (einshard(einsum(expression, *arrays), f'* {unplaced}') * weights).sum()

    with jax.set_mesh(mesh_of(types=AxisType.Explicit, x=2, y=2, z=2)):
        placed = [einshard(a, spec) for a, spec in zip(arrays, operands, strict=True)]
        gradient = jax.value_and_grad(loss, range(len(arrays)))
        value, gradients = (jax.jit(gradient) if jitted else gradient)(*placed)
        assert value == (np.einsum(f'{",".join(axes[:-1])}->{axes[-1]}', *arrays) * weights).sum()
        for i, (got, operand) in enumerate(zip(gradients, placed, strict=True)):
            others = [
                *zip(axes, (*arrays, weights), strict=True),
                (axes[i], np.ones_like(arrays[i])),
            ]
            del others[i]
            subscripts = ','.join(own for own, _ in others)
            expected = np.einsum(f'{subscripts}->{axes[i]}', *(a for _, a in others))
            np.testing.assert_array_equal(gather(got), expected)
            assert got.sharding.spec.unreduced == operand.sharding.spec.reduced


def test_a_gradient_that_stays_a_partial_sum_needs_no_collective():
    def loss(w, x):
        return einsum('b k, k n -> b@(x,y) n', x, w).sum()

    with jax.set_mesh(mesh_of(types=AxisType.Explicit, x=2, y=2, z=2)):
        x = einshard(array(8, 8), 'b@(x,y) k')
        for axes, expected in (('(x,y)', 0), ('x', 1)):  # all-reduces over y
            w = einshard(array(8, 8), f'k n =@{axes}')
            text = jax.jit(jax.grad(loss)).lower(w, x).compile().as_text()
            assert text.count(' all-reduce(') == expected
