"""Every suggestion of einsum, parallelism and per_device works."""

import functools
import itertools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from oracle import ANY_SPACING, examples
from placed import mesh_of
from refusal import refusal

from einshard import EinshardError, einshard, einsum, make_sharding, parallelism, per_device

pytestmark = ANY_SPACING

EIGHT = jax.devices()[:8]


def suggested_device_counts(error):
    """The device counts that an error suggests."""
    fact = error.facts.get('works with', '')
    return sorted(map(int, set(re.findall(r'\d+', fact)))) if 'devices' in fact else []


# ------------------------------------------------------------------------- einsum and parallelism

COUNTS = ['', '', '1', '2', '3', '4', '8', '*', '2*']
REPLICAS = ['', '', '', '2', '4', '*']


@st.composite
def einsums(draw, named=()):
    def operand(axes):
        placed = draw(st.booleans())
        counts = COUNTS + [f'@{axis}' for axis in named] if placed else ['']
        terms = [axis + draw(st.sampled_from(counts)) for axis in axes]
        replica = draw(st.sampled_from(REPLICAS)) if placed else ''
        at = draw(st.integers(0, len(terms)))
        return ' '.join([*terms[:at], *([replica] if replica else []), *terms[at:]])

    return f'{operand("ij")}, {operand("jk")} -> {operand("ik")}'


@given(einsums(), st.sampled_from([16, 24, 48]))
@examples(50)
def test_fixes_of_einsum(text, size):
    x = np.ones((size, size), np.float32)
    try:
        einsum(text, x, x)
        return
    except EinshardError as error:
        caught = error
    if caught.fix is not None:
        np.testing.assert_array_equal(einsum(caught.fix.strip("'"), x, x), x @ x)
    for n in suggested_device_counts(caught):
        if n <= 16:
            einsum(text, x, x, mesh=jax.devices()[:n])


@pytest.mark.slow
@given(
    einsums(named='pq'),
    st.fixed_dictionaries({}, optional={'p': st.integers(1, 4), 'q': st.integers(1, 4)}),
    st.sampled_from([None, 2, 4, 6, 8, 16]),
)
@examples(200)
def test_fixes_of_parallelism(text, counts, devices):
    counts = {axis: count for axis, count in counts.items() if f'@{axis}' in text}
    options = {'devices': devices, **counts}
    try:
        parallelism(text, **options)
        return
    except EinshardError as error:
        caught = error
    if caught.fix is not None:
        parallelism(caught.fix.strip("'"), **options)
    for n in suggested_device_counts(caught):
        parallelism(text, **{**options, 'devices': n})


def test_a_fix_for_every_operand():
    x = np.ones((16, 16), np.float32)
    fix = "'* i j2, * j k2 -> i k'"
    assert refusal(einsum, 'i j2, j k2 -> i k', x, x).fix == fix
    assert refusal(parallelism, 'i j2, j k2 -> i k', devices=16).fix == fix
    assert refusal(einsum, 'i j2, j k3 -> i k', x, x).fix is None


# ------------------------------------------------------------ counts that keep what was sharded


def fix_of(text, shape, n):
    """The suggested expression, or None; `text` itself if the counts fit the devices."""
    try:
        einshard(jax.ShapeDtypeStruct(shape, np.float32), text, mesh=jax.devices()[:n])
    except EinshardError as error:
        return error.fix and error.fix.expression
    return text


@pytest.mark.parametrize(
    ('text', 'shape', 'n', 'fix'),
    [
        ('x y -> x* y*', (64, 64), 8, 'x y -> x4 y2'),
        ('a b -> 2 a2* b*', (64, 64), 8, 'a b -> 2 a2 b2'),
        ('x y -> x* y*', (6, 64), 8, 'x y -> x2 y4'),  # 6 is not divisible by 4
        ('x y -> x* y*', (64, 3), 8, 'x y -> x8 y'),
        ('x y -> x* y*', (24, 24), 12, 'x y -> x4 y3'),
        ('x y -> 2 x* y*', (8, 8), 4, 'x y -> x2 y2'),
        ('x y -> x* y*', (64, 64), 2, 'x y -> x2 y'),
        ('x y z -> x* y* z*', (8, 8, 8), 16, 'x y z -> x4 y2 z2'),
        ('x y -> * x* y', (64, 64), 8, 'x y -> 2 x4 y'),
        ('x y -> x8 y4', (64, 64), 8, 'x y -> x2 y4'),
        ('x y -> x2 y8', (64, 64), 8, 'x y -> x2 y4'),
        ('x y -> x* y16', (64, 64), 8, 'x y -> x* y4'),
        ('x y -> x16 y', (64, 64), 8, 'x y -> x8 y'),
        ('i o -> i4 o4 i4', (64, 64), 16, 'i o -> i4 o4 i'),
        ('x y -> x3 y', (6, 64), 8, None),
        ('x y -> x4 y', (6, 8), 4, 'x y -> x2 2 y'),  # the size is not divisible
        ('x y -> x* y', (12, 8), 8, 'x y -> x4 2 y'),
        ('x y -> 2 x* y', (6, 8), 8, 'x y -> 4 x* y'),
        ('x y -> x8 y', (5, 8), 8, None),
        ('x y -> 2 x4 y', (6, 8), 8, 'x y -> 4 x2 y'),
        ('x -> x*', (8, 8), 8, 'x ... -> x* ...'),  # the rank
        ('x*', (8, 8, 8), 8, 'x* ...'),
        ('x y -> x* y', (8, 8, 8), 8, None),  # any axis may be the one without a name
        ('x y -> x2 y', (8, 8), 8, 'x y -> * x2 y'),
    ],
)
def test_counts_that_fit_keep_axes_sharded(text, shape, n, fix):
    assert fix_of(text, shape, n) == fix
    if fix:
        assert fix_of(fix, shape, n) == fix


@pytest.mark.parametrize('n', [4, 6, 8, 16])
@pytest.mark.parametrize('shape', [(16, 16), (6, 16), (12, 2), (3, 5)])
def test_no_axis_is_dropped_if_another_fix_keeps_it(shape, n):
    """Against all counts of two axes, and of replicas if there are any."""
    for x, y, replicas in itertools.product(['*', '2*', '4', '16'], ['*', '4', '8'], ['', '2 ']):
        text = f'x y -> {replicas}x{x} y{y}'
        fix = fix_of(text, shape, n)
        splits = [
            (i, j)
            for i, j in itertools.product(range(2, n + 1), repeat=2)
            if (n == i * j or (replicas and n == 2 * i * j)) and shape[0] % i == shape[1] % j == 0
        ]
        needed = math.prod(int(count) for count in re.findall(r'\d+', text))
        if splits and fix != text and (fix or needed > n):
            assert fix, text
            sharding = make_sharding(fix, mesh=jax.devices()[:n])
            assert all(map(operator.gt, shape, sharding.shard_shape(shape))), (text, fix)


# -------------------------------------------------------------------- the mesh of per_device


def identity(*arrays):
    return arrays


@st.composite
def functions(draw):
    """Expressions for two arguments, which are also the results."""
    counts = {name: draw(st.sampled_from(['', '2', '2', '4', '*'])) for name in 'abc'}
    texts = []
    for names in ('ab', 'bc'):
        terms = [name + draw(st.sampled_from([*[counts[name]] * 4, '', '3'])) for name in names]
        if draw(st.integers(0, 5)) == 0:
            terms[1] = f'{names[1]}@{draw(st.sampled_from("abc"))}'
        if draw(st.booleans()):
            terms.reverse()
        if draw(st.integers(0, 2)) == 0:
            terms.insert(draw(st.integers(0, 2)), draw(st.sampled_from(['2', '4', '*'])))
        texts.append(f'{" ".join(names)} -> {" ".join(terms)}')
    return texts


MESHES = [None, {'p': 4, 'q': 2}, {'p': 2, 'q': 2, 'r': 2}, {'p': 2, 'q': 4}]


@given(functions(), st.sampled_from(MESHES), st.sampled_from([24, 12, 6]))
@examples(120)
def test_per_device_suggests_no_expression_that_may_not_fit_the_others(texts, sizes, size):
    x = np.arange(1.0 * size * size).reshape(size, size)
    mesh = EIGHT if sizes is None else mesh_of(**sizes)
    try:
        y = per_device(*texts, out=tuple(texts), mesh=mesh)(identity)(x, x)
        np.testing.assert_array_equal(y, [x, x])
        return
    except EinshardError as error:
        caught = error
    assert caught.fix is None
    assert suggested_device_counts(caught) == []


# ------------------------------------------------ results that JAX does not know to be replicated


def ring(x, axis):
    """A sum by ppermute: all devices end with the same value."""
    n = lax.axis_size(axis)
    total = x
    for _ in range(n - 1):
        x = lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
        total = total + x
    return total


def scanned(step):
    def body(x, axis, gather):
        return lax.scan(lambda carry, _: (step(carry, axis, gather), None), x, None, length=2)[0]

    return body


def gathered(x, axis, gather):
    return gather(x, axis).sum(0)


# each keeps the shape, and different values stay different
STEPS = {
    'all_gather': gathered,
    'psum': lambda x, axis, _: lax.psum(x, axis),
    'pmax': lambda x, axis, _: lax.pmax(x, axis),
    'ring': lambda x, axis, _: ring(x, axis),
    'axis_index': lambda x, axis, _: x + lax.axis_index(axis),
    'all_to_all': lambda x, axis, _: lax.all_to_all(
        jnp.stack([x] * lax.axis_size(axis)), axis, 0, 0
    ).max(0),
    'constant': lambda x, axis, _: jnp.where(x > 3, x, x - jnp.ones(x.shape)),
    'relu': lambda x, axis, _: jax.jit(jax.nn.relu)(x + 5),
    'scan': scanned(lambda x, axis, _: 2 * x + 1),
    'gather in a jit': lambda x, axis, gather: jax.jit(
        functools.partial(gathered, axis=axis, gather=gather)
    )(x),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from('ab')), max_size=3),
    st.sampled_from(['a b -> a4 b2', 'a b -> 4 a b2', 'a b -> a4 2 b', 'a b -> * a b']),
    st.sampled_from(['a b', 'a b -> a4 b', 'a b -> a b2', '...']),
    st.booleans(),
)
@examples(60)
def test_suggestions_for_results_that_may_vary_work(steps, spec, out, scalar):
    x = np.arange(64, dtype=np.float32).reshape(8, 8) % 7

    def body(x, gather=lax.all_gather, end=lambda x: x):
        for step, axis in steps:
            x = STEPS[step](x, axis, gather)
        return end(x.sum() if scalar and out == '...' else x)

    def mapped(function, out=out, **options):
        # the second argument makes the axes
        two = per_device(spec, 'a b -> a4 b2', out=out, mesh=EIGHT, **options)
        return two(lambda x, _: function(x))

    def trace(*args, **options):
        return jax.eval_shape(mapped(*args, **options), x, np.zeros((8, 8)))

    try:
        trace(body)
        return
    except EinshardError as error:
        caught = error
    assert str(caught).startswith('out= declares the result of ')
    said = caught.facts['if they differ']
    names = re.search(r'with jax\.lax\.psum\(result, (.*?)\), or', said)[1]
    names = tuple(re.findall("'(.)'", names))
    trace(functools.partial(body, end=lambda z: lax.psum(z, names)))
    unchecked = trace(body, check_vma=False)
    if unchecked.ndim:
        terms = [a + n if a in names or a + n in out else a for a, n in [('a', '4'), ('b', '2')]]
        trace(body, out=f'a b -> {" ".join(terms)}')
