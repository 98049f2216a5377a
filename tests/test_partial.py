# ruff: noqa: F722  (expressions in annotations)
"""'+' and '=', against hand-written PartitionSpecs: parsed, laid out, resharded, compiled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from counting import program
from jax.sharding import AbstractMesh, AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from placed import mesh_of, struct
from refusal import refusal

from einshard import (
    Rules,
    Sharded,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    einsum,
    explain,
    from_local,
    gather,
    make_sharding,
    sharded,
    show,
)

EXPLICIT = AxisType.Explicit
MESH = mesh_of(types=EXPLICIT, x=4, y=2)
A = np.random.default_rng(0).integers(0, 9, (8, 8)).astype(np.float32)
B = np.random.default_rng(1).integers(0, 9, (8, 8)).astype(np.float32)


@pytest.fixture(autouse=True)
def mesh_in_context():
    with jax.set_mesh(MESH):
        yield


# --- the notation -------------------------------------------------------------------------------

# Each expression with the spec that it stands for, on x=4, y=2.
SPECS = {
    'a b +@y': P(unreduced={'y'}),
    'None b +@y': P(unreduced={'y'}),
    'a@x b +@y': P('x', unreduced={'y'}),
    'a b@y +@x': P(None, 'y', unreduced={'x'}),
    'a b +@(x,y)': P(unreduced={'x', 'y'}),
    'a b +@(y,x)': P(unreduced={'x', 'y'}),
    'a b =@y': P(reduced={'y'}),
    'a b@x =@y': P(None, 'x', reduced={'y'}),
    'a b +@x =@y': P(unreduced={'x'}, reduced={'y'}),
    'a b -> a4 +2 b': P('x', unreduced={'y'}),
    'a b -> +4 a2 b': P('y', unreduced={'x'}),
    'a b -> 4 +* a b': P(unreduced={'y'}),
    'a b -> +* a b': P(unreduced={'x', 'y'}),
    'a b -> =* a2 b': P('y', reduced={'x'}),
    'a b -> +4 =2 a b': P(unreduced={'x'}, reduced={'y'}),
    'a b -> a@x +2 b': P('x', unreduced={'y'}),
    '... b -> ... b@x +@y': P(None, 'x', unreduced={'y'}),
}


@pytest.mark.parametrize('text', SPECS)
def test_make_sharding(text):
    sharding = make_sharding(text, ndim=2)
    assert sharding == NamedSharding(MESH, SPECS[text])
    assert make_sharding(describe(sharding), ndim=2) == sharding
    abstract = AbstractMesh((4, 2), ('x', 'y'), axis_types=(EXPLICIT,) * 2)
    assert make_sharding(text, ndim=2, mesh=abstract).spec == SPECS[text]


def test_a_mesh_axis_of_size_one():
    with jax.set_mesh(mesh_of(types=EXPLICIT, x=8, y=1)):
        for text in ('a@x b +@y', 'a@x b =@y'):
            x = einshard(A, text)
            assert describe(x) == f'a b -> {text}'
            np.testing.assert_array_equal(gather(x), A)


def test_a_named_term_between_the_replicas_of_one_mesh_axis():
    mesh = mesh_of(types=EXPLICIT, x=2, y=4)
    assert make_sharding('2 =@x 2 a b', mesh=mesh).spec == P(reduced={'x'})


def test_the_canonical_mesh_with_explicit_axes():
    mesh = device_mesh(jax.devices()[:8], axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        assert make_sharding('a b -> a2 +4 b').spec == P('d0', unreduced={'d1', 'd2'})
        assert describe(einshard(A, 'a b -> a2 +4 b')) == 'a b -> a2 b +4'
        not_adjacent = NamedSharding(mesh, P(unreduced={'d0', 'd2'}))
        assert make_sharding(describe(not_adjacent)) == not_adjacent


def test_axis_rules_and_rules():
    with axis_rules(batch='@x'):
        assert make_sharding('batch d +@y').spec == P('x', unreduced={'y'})
    rules = Rules([('w', P('x', reduced={'y'})), ('v', 'a b +@y')])
    tree = einshard({'w': A, 'v': A}, rules)
    assert describe(tree) == {'w': 'a b -> a@x b =@y', 'v': 'a b -> a b +@y'}
    assert 'a b +@y' in str(rules.table(tree))


def test_missing_mesh_axes():
    placed = einshard(A, 'a@x b +@tensor', missing='replicate')
    assert describe(placed) == 'a b -> a@x b'


def test_drawn():
    order = 'first:\nx (4 terms of a sum), y (2 replicas whose gradients are terms of a sum)'
    assert order in str(show('a b +@x =@y'))


def test_annotations():
    @sharded
    def f(x: Sharded[Float[Array, 'a b'], 'a@x b +@y']) -> Sharded[Array, 'a@x b']:
        return x

    np.testing.assert_array_equal(f(einshard(A, 'a@x b +@y')), A)


def test_annotations_that_beartype_checks():
    @beartype
    def same(x: Sharded[Array, 'a@x b =@y']):
        return x

    x = einshard(A, 'a@x b =@y')
    assert same(x) is x
    for other in ('a@x b', 'a@x b +@y'):
        error = refusal(same, einshard(A, other))
        assert error.sentence.startswith(f"the array is sharded as 'a b -> {other}'")


# --- placing and resharding ---------------------------------------------------------------------


def spec_of(state):
    """The spec of a state such as '0+': what x and y do with a matrix.

    R: replicate it; 0 or 1: shard this array axis; + or =: unreduced or reduced.
    """
    of = {s: tuple(axis for axis, own in zip('xy', state, strict=True) if own == s) for s in '01+='}
    return P(of['0'], of['1'], unreduced={*of['+']}, reduced={*of['=']})


def with_state(state):
    """A.T @ B with this state, computed without a reshard to a partial sum."""
    spec = spec_of(state)
    terms = tuple(axis for axis in 'xy' if axis in spec.unreduced)
    rows, columns = spec.partitions
    a, b = reshard(A, P(terms, rows)), reshard(B, P(terms, columns))
    out = P(rows, columns, unreduced=spec.unreduced)
    product = jax.jit(lambda a, b: jnp.einsum('ki,kj->ij', a, b, out_sharding=out))(a, b)
    return reshard(product, spec) if spec.reduced else product


STATES = [''.join(state) for state in itertools.product('R01+=', repeat=2)]


# The matrix is square, so states with 1 and without 0 are like those with 0 in place of 1.
FROM = [state for state in STATES if '1' not in state or '0' in state]


@pytest.mark.parametrize('state', FROM)
def test_resharded_from_and_to_everything(state):
    # In JAX 0.12, a single reshard multiplies the values of a partial sum from '00' to '++', and
    # makes XLA abort from '+R' to 'R+'.
    x = with_state(state)
    everything = STATES if '0' in state else FROM
    few = ['++', '0+', '=R']
    for other in everything if '+' in state or state in ('00', '01', '==') else few:
        expected = NamedSharding(MESH, spec_of(other))
        y = einshard(x, expected)
        assert y.sharding.is_equivalent_to(expected, 2)
        assert (y.sharding.spec.unreduced, y.sharding.spec.reduced) == (
            expected.spec.unreduced,
            expected.spec.reduced,
        )
        np.testing.assert_array_equal(gather(y), A.T @ B)


@pytest.mark.parametrize('text', ['a@x b +@y', 'a b +@(x,y)', 'a b@x =@y', 'a b +@x =@y'])
def test_placed_everywhere(text):
    sharding = make_sharding(text)
    identity = sharded(text, out=text)(lambda x: x)
    for x in (
        einshard(A, text),
        einshard({'x': A, 'y': B}, text)['x'],
        jax.jit(lambda a: einshard(a, text))(A),
        jax.jit(lambda: einshard(A, text))(),
        sharded(out=text)(lambda a: a)(A),
        sharded(text)(lambda a: a)(A),
        *(identity(a) for a in (A, A, einshard(A, text), einshard(A, '* a b'))),
        jax.jit(lambda a: identity(a))(A),
    ):
        spec = x.sharding.spec
        assert (spec.unreduced, spec.reduced) == (sharding.spec.unreduced, sharding.spec.reduced)
        np.testing.assert_array_equal(gather(x), A)
    x = einshard(A, text)
    assert einshard(x, text) is x
    assert einshard(struct(8, 8), text).sharding == sharding


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32', 'complex64', 'int32', 'uint8'])
@pytest.mark.parametrize('jitted', [False, True])
def test_numbers_of_every_type(dtype, jitted):
    def placed(x):
        return einshard(x, 'a b +@(x,y)')

    x = jnp.asarray([[1, 2], [3, 4]], dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        x = x.at[0, 0].set(jnp.inf).at[1, 1].set(jnp.nan)
    y = (jax.jit(placed) if jitted else placed)(x)
    assert y.dtype == dtype
    wide = 'complex64' if dtype == 'complex64' else 'float32'
    np.testing.assert_array_equal(gather(y).astype(wide), np.asarray(x, wide))
    assert gather((jax.jit(einshard, static_argnums=1) if jitted else einshard)(3.0, '+*')) == 3


@pytest.mark.parametrize('transform', [lambda f: f, jax.jit], ids=['eager', 'jit'])
def test_differentiated_and_vectorized(transform):
    x = einshard(A, '* a b')

    def loss(x):
        return (einshard(einshard(x, 'a b +@y'), 'a@y b') * B).sum()

    gradient = transform(jax.grad(loss))(x)
    assert not gradient.sharding.spec.unreduced
    np.testing.assert_array_equal(gradient, B)
    rows = transform(jax.vmap(lambda row: einshard(row, 'b +@y')))(x)
    np.testing.assert_array_equal(gather(rows), A)
    assert rows.sharding.spec.unreduced == {'y'}


def test_a_spec_without_a_partial_sum_refuses_partial_sums():
    f = sharded('* a b')(lambda x: x)
    for spec in ('a b +@y', 'a@x b +@y', 'a b +@(x,y)'):
        sentence = refusal(f, einshard(A, spec)).sentence
        assert 'the argument is a partial sum' in sentence
        assert f"'a b -> {spec}'" in sentence
    np.testing.assert_array_equal(f(einshard(A, 'a b =@y')), A)
    g = sharded('a b +@y')(lambda x: x)
    assert "as 'a b -> a@x b'" in refusal(g, einshard(A, 'a@x b')).sentence


# --- compiled programs --------------------------------------------------------------------------


def hlo(f, *arrays):
    return program(jax.jit(f).lower(*arrays).compile())


@pytest.mark.parametrize('target', ['* a b', 'a@y b', 'a b@y', 'a@x b', 'a@(x,y) b'])
def test_the_program_of_a_hand_written_sum(target):
    spec = make_sharding(target).spec
    a, b = reshard(A, P(None, 'y')), reshard(B, P('y'))

    def ours(a, b):
        terms = einsum('a b, b c -> a c +@y', a, b)
        assert jax.typeof(terms) == by_hand_type
        return einshard(terms, target)

    def by_hand(a, b):
        nonlocal by_hand_type
        terms = jnp.einsum('ij,jk->ik', a, b, out_sharding=P(None, None, unreduced={'y'}))
        by_hand_type = jax.typeof(terms)
        return reshard(terms, spec)

    by_hand_type = None
    expected = hlo(by_hand, a, b)
    assert hlo(ours, a, b) == expected
    assert expected.count(' all-reduce(') == 1  # the CPU has no reduce-scatter of its own
    np.testing.assert_array_equal(gather(jax.jit(ours)(a, b)), A @ B)


def test_the_gradient_of_a_reduced_weight():
    def loss(w, x):
        return ((x @ w) ** 2).sum()

    def ours(w, x):
        gradient = jax.grad(loss)(einshard(w, 'b c =@x'), x)
        assert str(jax.typeof(gradient)) == 'float32[8,8]{U:x}'
        assert describe(gradient) == 'a b -> a b +@x'
        return einshard(gradient, '* b c')

    def by_hand(w, x):
        gradient = jax.grad(loss)(reshard(w, P(None, None, reduced={'x'})), x)
        return reshard(gradient, P(None, None))

    w, x = reshard(B, P()), reshard(A, P('x'))
    assert hlo(ours, w, x) == hlo(by_hand, w, x)
    np.testing.assert_allclose(jax.jit(ours)(w, x), jax.grad(loss)(jnp.array(B), jnp.array(A)))


@pytest.mark.parametrize('out', [None, '-> *'])
def test_the_gradient_of_a_function_with_a_reduced_weight(out):
    f = sharded('b c =@x', 'a@x b', out=out, mesh=MESH)(lambda w, x: ((x @ w) ** 2).sum())
    w, x = einshard(B, 'b c =@x'), einshard(A, 'a@x b')
    expected = jax.grad(lambda w: ((A @ w) ** 2).sum())(jnp.array(B))
    for gradient in jax.grad(f), jax.jit(jax.grad(f)):
        np.testing.assert_allclose(gather(gradient(w, x)), expected)


def test_sums_of_one_operand():
    assert describe(total := einsum('a@x b@y -> +@(x,y)', A)) == '... -> ... +@(x,y)'
    assert gather(total) == A.sum()
    assert describe(einsum('a@x b -> b +@x', A)) == 'a -> a +@x'


def test_explained():
    report = explain(
        sharded('a b@y', 'b@y c', out='a c')(
            lambda a, b: einshard(einsum('a b, b c -> a c +@y', a, b), 'a@y c')
        ),
        A,
        B,
        intermediates=True,
    )
    partial_sums = [row for row in report.intermediates if row.placement == 'a b -> a b +@y']
    assert partial_sums
    assert all(row.sharded for row in partial_sums)


# --- what JAX does ------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', ['float32', 'complex64'])
def test_placed_while_another_mesh_is_in_context(dtype):
    with jax.set_mesh(mesh_of(types=EXPLICIT, a=2, b=4)):
        x = einshard(A.astype(dtype), NamedSharding(MESH, spec_of('0+')))
        np.testing.assert_array_equal(gather(x), A.astype(dtype))


def test_functions_of_partial_sums():
    terms = einshard(A, 'a b +@y')
    for f in (lambda x: x + x, lambda x: x.T, lambda x: x.astype('bfloat16'), jnp.zeros_like):
        assert jax.typeof(jax.jit(f)(terms)).sharding.spec.unreduced == {'y'}
    with pytest.raises(Exception, match='sin'):
        jax.jit(jnp.sin)(terms)
    assert describe(jax.jit(jnp.sum)(terms)) == '... -> ... +@y'


@pytest.mark.parametrize('sign', ['+', '='])
def test_memory_kinds(sign):
    expression = f'a b {sign}@y'
    on_host = einshard(A, 'a b', memory_kind='pinned_host')
    back = einshard(on_host, expression)
    assert back.sharding.memory_kind == 'device'
    np.testing.assert_array_equal(gather(back), A)
    for x in (A, einshard(A, 'a b'), back):
        placed = einshard(x, expression, memory_kind='pinned_host')
        assert describe(placed) == f'a b -> {expression} (in pinned_host)'
        np.testing.assert_array_equal(gather(placed), A)


def test_from_local_in_one_process():
    np.testing.assert_array_equal(gather(from_local(A, 'a b +@y')), A)


# --- three mesh axes ----------------------------------------------------------------------------

CUBE = mesh_of(types=EXPLICIT, x=2, y=2, z=2)
# jax.sharding.reshard is wrong for these, or XLA aborts the process, in JAX 0.12
MOVES = """
    a@x b +@y           -> a@z b +@y
    a@x b +@y           -> a b@z +@y
    a b@z +@x           -> a b@y +@x
    a@x b +@y           -> a@z b +@(x,y)
    a@x b +@y           -> a@z b@x +@y
    a@x b@z +@y         -> a b@x +@y
    a@z b@x +@y         -> a@x b +@y =@z
    a@(z,x) b +@y       -> a@x b +@y
    a b@(z,x) +@y       -> a b@x +@y
    a@x b +@y =@z       -> a b@z +@y
    a@x b +@y           -> a@z b +@y =@x
    a b@x +@z =@y       -> a b@y +@z =@x
    a b +@(x,z)         -> a@x b +@y
    a b +@y             -> a b +@z
    a@(x,z) b +@y       -> a b@(y,z) +@x
    a@x b@z +@y         -> a@z b@x +@y
    a@(x,z) b +@y       -> a@(z,x) b +@y
    a@x b =@y           -> a@z b =@y
    a@x b@z =@y         -> a b@x =@y
    a@y b =@z           -> a b@z =@x
    a b =@(z,y)         -> a@z b +@y =@x
    a b =@y             -> a b +@y =@(x,z)
    a b@z +@x =@y       -> a@y b@z =@x
    a b@(z,x) =@y       -> a@y b =@z
"""
MOVES = [tuple(' '.join(s.split()) for s in m.split('->')) for m in MOVES.strip().splitlines()]


def cube_spec(text):
    """The spec of a short expression, and that of a gradient: '+' and '=' exchanged."""
    axes = {'a': (), 'b': (), '+': (), '=': ()}
    for term in text.split():
        key, _, names = term.partition('@')
        axes[key] = tuple(names.strip('()').split(',')) if names else ()
    entries = (axes['a'] or None, axes['b'] or None)
    plus, equal = {*axes['+']}, {*axes['=']}
    return P(*entries, unreduced=plus, reduced=equal), P(*entries, unreduced=equal, reduced=plus)


def random_terms(spec, seed):
    """A value with random terms, and its sum. No reshard to a partial sum is involved."""
    rows, columns = spec.partitions
    n = 2 ** len(spec.unreduced)
    terms = np.random.default_rng(seed).integers(-9, 9, (n, 8, 8)).astype(np.float32)
    stacked = NamedSharding(CUBE, P((*spec.unreduced,), rows, columns))
    out = NamedSharding(CUBE, P(rows, columns, unreduced=spec.unreduced))
    x = jax.jit(lambda t: jax.lax.reduce_sum(t, (0,), out_sharding=out))(
        jax.device_put(terms, stacked)
    )
    return reshard(x, NamedSharding(CUBE, P(rows, columns, **parts(spec)))), terms.sum(0)


def parts(spec):
    return {'unreduced': spec.unreduced, 'reduced': spec.reduced}


def check_terms(y, spec, total):
    """Adds up the shards in numpy."""
    assert parts(y.sharding.spec) == parts(spec)
    assert y.sharding.is_equivalent_to(NamedSharding(CUBE, spec), 2)
    rows, columns = spec.partitions
    slices = NamedSharding(CUBE, P(rows, columns)).devices_indices_map((8, 8))
    coordinates = {device: at for at, device in np.ndenumerate(CUBE.devices)}
    sums = {}
    for shard in y.addressable_shards:
        at = zip(CUBE.axis_names, coordinates[shard.device], strict=True)
        group = tuple(i for axis, i in at if axis not in spec.unreduced)
        index, added = sums.get(group, (slices[shard.device], 0))
        sums[group] = index, added + np.asarray(shard.data)
    for index, added in sums.values():
        np.testing.assert_array_equal(added, total[index])


@pytest.mark.parametrize('move', MOVES)
def test_moves_on_three_mesh_axes(move):
    (old, old_dual), (new, new_dual) = map(cube_spec, move)
    with jax.set_mesh(CUBE):
        x, total = random_terms(old, 0)
        terms_of_gradient, total_gradient = random_terms(new_dual, 1)

        @jax.jit
        def moved(x, terms):
            y, pull_back = jax.vjp(lambda x: einshard(x, move[1]), x)
            return y, *pull_back(terms)

        y, gradient = moved(x, terms_of_gradient)
        check_terms(y, new, total)
        check_terms(gradient, old_dual, total_gradient)


@pytest.mark.parametrize('move', MOVES[:4])
def test_eager_moves_on_three_mesh_axes(move):
    (old, _), (new, _) = map(cube_spec, move)
    with jax.set_mesh(CUBE):
        x, total = random_terms(old, 0)
        check_terms(einshard(x, move[1]), new, total)
        check_terms(sharded(move[1], reshard=True)(lambda x: x)(x), new, total)


def test_jax_adds_up_the_wrong_shards_of_a_partial_sum():
    (old, _), (new, _) = cube_spec('a@x b +@y'), cube_spec('a@z b +@y')
    with jax.set_mesh(CUBE):
        x, total = random_terms(old, 0)
        y = reshard(reshard(x, NamedSharding(CUBE, new)), NamedSharding(CUBE, P()))
    assert not np.array_equal(y, total)
