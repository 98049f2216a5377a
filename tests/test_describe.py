"""describe: the expression for a sharding, which make_sharding accepts."""

import dataclasses
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from oracle import ANY_SPACING, MESHES, cases, examples, expressible, mesh_cases
from placed import mesh_of, shardings, struct
from refusal import refusal

from einshard import (
    Rules,
    describe,
    device_mesh,
    einshard,
    for_optimizer,
    make_sharding,
    sharded,
    show,
)

pytestmark = ANY_SPACING

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
DEVICES = jax.devices()


# --- the property: make_sharding(describe(s)) == s --------------------------------------------


def check_round_trip(case, mesh):
    rank = case.n_dims
    sharding = make_sharding(case.text, ndim=rank, mesh=mesh)
    text = describe(sharding)
    for ndim in (None, rank, rank + 1):
        again = make_sharding(text, ndim=ndim, mesh=mesh)
        assert again == sharding, text
        assert hash(again) == hash(sharding)
    # an array knows its rank: every axis is named
    text = describe(jax.ShapeDtypeStruct(case.shape, np.float32, sharding=sharding))
    assert make_sharding(text, ndim=rank, mesh=mesh) == sharding, text
    assert text.split('->')[0].split() == (list(string.ascii_lowercase[:rank]) or ['...'])


@examples(200)
@given(cases(), st.sampled_from(['devices', 'mesh', 'abstract']))
def test_round_trip_on_devices(case, kind):
    devices = DEVICES[: case.n_devices]
    abstract = AbstractMesh((case.n_devices,), ('x',))
    meshes = {'devices': devices, 'mesh': device_mesh(devices), 'abstract': device_mesh(abstract)}
    check_round_trip(case, meshes[kind])


NAMESAKES = [(('d0', 2), ('d1', 4)), (('d1', 2), ('d0', 2), ('x_1', 2)), (('d0', 2), ('d1', 2))]


@examples(200)
@given(mesh_cases([*MESHES, *NAMESAKES]), st.data())
def test_round_trip_on_user_meshes(case, data):
    assume(expressible(case))
    types = tuple(data.draw(st.sampled_from([AUTO, EXPLICIT])) for _ in case.mesh)
    mesh = mesh_of(types=types, **dict(case.mesh))
    check_round_trip(case, data.draw(st.sampled_from([mesh, mesh.abstract_mesh])))


# --- the text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('expression', 'rank', 'of_array', 'of_sharding'),
    [
        ('x y -> x4 * y', 2, 'a b -> a4 4 b', 'a ... -> a4 4 ...'),
        ('x y -> y* x', 2, 'a b -> a b16', 'a b ... -> a b16 ...'),
        ('x y -> 2 x2* y*', 2, 'a b -> 2 a4 b2', 'a b ... -> 2 a4 b2 ...'),
        ('x y -> x y 16', 2, 'a b -> 16 a b', '... -> 16 ...'),
        ('x y -> x2 y4 x2', 2, 'a b -> a2 b4 a2', 'a b ... -> a2 b4 a2 ...'),
        ('x y z -> x4 y z 4', 3, 'a b c -> a4 b c 4', 'a ... -> a4 4 ...'),
        ('... -> * ...', 0, '... -> 16 ...', '... -> 16 ...'),
    ],
)
def test_arrays_name_every_axis(expression, rank, of_array, of_sharding):
    x = einshard(np.ones((16,) * rank), expression)
    assert sorted(describe(x).split()) == sorted(of_array.split())
    assert sorted(describe(x.sharding).split()) == sorted(of_sharding.split())
    assert make_sharding(describe(x), ndim=rank) == x.sharding
    assert describe(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)) == describe(x)


def test_arrays_of_many_dimensions():
    text = describe(einshard(np.ones((1,) * 30 + (2,)), '... z -> ... z2 *'))
    assert text.startswith('a b c d')
    assert ' z aa ab ac ad ae -> ' in text


USER = mesh_of(data=2, one=1, tp=4)
CANONICAL = device_mesh(DEVICES[:8])


@pytest.mark.parametrize(
    ('mesh', 'spec', 'text'),
    [
        (USER, P('data'), 'a ... -> a@data ...'),
        (USER, P(None, 'tp'), 'a b ... -> a b@tp ...'),
        (USER, P('tp', 'data'), 'a b ... -> a@tp b@data ...'),
        (USER, P(('data', 'tp')), 'a ... -> a@(data,tp) ...'),
        (USER, P(('tp', 'data'), 'one'), 'a b ... -> a@(tp,data) b@one ...'),
        # canonical axes out of order
        (CANONICAL, P(('d1', 'd0')), 'a ... -> a@(d1,d0) ...'),
        (CANONICAL, P(('d0', 'd2')), 'a ... -> a2 2 a2 ...'),
        # not the canonical mesh: its devices are in another order
        (mesh_of(DEVICES[7::-1], d0=2, d1=2, d2=2), P('d0'), 'a ... -> a@d0 ...'),
    ],
)
def test_shardings_on_meshes(mesh, spec, text):
    sharding = NamedSharding(mesh, spec)
    assert describe(sharding) == text
    assert make_sharding(text, mesh=mesh) == sharding
    with jax.set_mesh(mesh):
        assert make_sharding(text) == sharding


@pytest.mark.parametrize('mesh', [USER, CANONICAL])
def test_specs_that_are_not_normalized(mesh):
    """Their shardings are equivalent to those of normalized specs, but unequal in JAX."""
    first, last = mesh.axis_names[0], mesh.axis_names[-1]
    for spec in [P(first, None), P((first,), None, None), P((), last), P(None, (last, first))]:
        sharding = NamedSharding(mesh, spec)
        for x in (sharding, jax.ShapeDtypeStruct((8, 8, 8), np.float32, sharding=sharding)):
            again = make_sharding(describe(x), ndim=3, mesh=mesh)
            assert again.is_equivalent_to(sharding, 3)


@pytest.mark.parametrize('name', ['my data', 'a,b', '(x)', 'x@y', '*', 'a->b', 'e\u0301'])
def test_mesh_axis_names_that_expressions_cannot_write(name):
    """Shardings by counts are described by counts."""
    mesh = mesh_of(**{name: 2, 'tp': 4})
    for expression in ('a b -> a2 b4', 'a b -> b8 a', 'a b -> a2 b 4'):
        sharding = make_sharding(expression, mesh=mesh)
        assert make_sharding(describe(sharding), mesh=mesh) == sharding


# --- shardings without an expression ---------------------------------------------------------

ONE = f'on one device: {DEVICES[0]}'


@pytest.mark.parametrize(
    ('x', 'text'),
    [
        (jnp.zeros(3), ONE),
        (jnp.zeros(3).sharding, ONE),
        (jax.random.key(0), ONE),
        (jax.jit(lambda: jnp.zeros(3))(), ONE),
        (jax.device_put(jnp.zeros(3), DEVICES[3]), f'on one device: {DEVICES[3]}'),
        (SingleDeviceSharding(DEVICES[0], memory_kind='pinned_host'), f'{ONE} (in pinned_host)'),
        # on a mesh of one device it has an expression
        (einshard(np.ones(3), 'a*', mesh=DEVICES[:1]), 'a -> a'),
        *[(x, f'on the host: {type(x).__name__}') for x in (1, True, 1.5, 1j)],
        (np.ones(3), 'on the host: numpy.ndarray'),
        (np.float32(3), 'on the host: numpy.float32'),
        (struct(2), 'not placed: a ShapeDtypeStruct without a sharding'),
        (
            NamedSharding(USER, P(P.UNCONSTRAINED, 'tp')),
            'a b ... -> a b@tp ... (with unconstrained axes)',
        ),
    ],
)
def test_descriptions(x, text):
    assert describe(x) == text


@pytest.mark.parametrize(
    ('mesh', 'text'),
    [
        (device_mesh(), 'decided by the compiler: a traced value'),
        (device_mesh(axis_types=EXPLICIT), 'a b -> a4 b4'),
        (mesh_of(types=EXPLICIT, data=4, tp=4), 'a b -> a@data b@tp'),
        (
            mesh_of(types=(EXPLICIT, AUTO), data=4, tp=4),
            'a b -> a@data b (Auto axes decided by the compiler)',
        ),
    ],
)
def test_traced_values(mesh, text):
    seen = []

    @jax.jit
    def f(x):
        y = einshard(x * 2, 'a b -> a4 b4')
        seen.append(describe(y))
        return y

    with jax.set_mesh(mesh):
        y = f(np.ones((16, 16)))
        assert seen == [text]
        if AUTO not in mesh.axis_types:
            assert describe(y) == text
            assert jax.typeof(einshard(y, text)) == jax.typeof(y)


def test_results_of_jit():
    x = einshard(np.ones((16, 16), np.float32), 'a b -> a4 b4')
    assert describe(jax.jit(lambda x: x + 1)(x)) == 'a b -> a4 b4'
    transposed = jax.jit(lambda x: x.T)(x)
    assert make_sharding(describe(transposed)).is_equivalent_to(transposed.sharding, 2)


@pytest.mark.parametrize('shape', [(4, 2, 8), (2, 8, 4), (64,)])
def test_results_that_the_mesh_may_not_express(shape):
    """XLA could shard them over 4 x 2 of 8 devices, which are on one mesh axis."""
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Auto,), devices=DEVICES[:8])
    x = einshard(np.ones((8, 8), np.float32), 'a b -> a@x b', mesh=mesh)
    y = jax.jit(lambda x: x.reshape(shape))(x)
    text = describe(y)
    described = make_sharding(text, mesh=mesh if '@' in text else DEVICES[:8])
    assert described.devices_indices_map(shape) == y.sharding.devices_indices_map(shape)


@pytest.mark.parametrize('x', [object(), P('x'), device_mesh(), len, jax.Array, {1, 2}])
def test_things_without_a_sharding(x):
    assert refusal(describe, x).sentence.endswith(f'an array or a sharding, not {type(x).__name__}')


# ---------------------------------------------------------------------------------------- trees


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    act: Any = dataclasses.field(default=jax.nn.relu, metadata={'static': True})


EXPRESSIONS = {
    'embed': 'a b -> a8 b2',
    'layers': [Layer('a b -> 2 a8 b', 'a -> * a'), Layer('a b -> b4 a4', 'a -> a2 8')],
    'keys': 'a -> a16',
    'scalar': '... -> * ...',
    'pair': ('a b c -> b2 8 a c', None),
}
HOST = {
    'embed': np.ones((16, 4), np.float32),
    'layers': [Layer(np.ones((8, 8)), np.ones(3)), Layer(np.ones((4, 8)), np.ones(2))],
    'keys': jax.random.split(jax.random.key(0), 16),
    'scalar': 2.5,
    'pair': (np.ones((1, 2, 3)), 'no array'),
}


def test_trees():
    placed = einshard(HOST, EXPRESSIONS)
    assert describe(placed) == {
        'embed': 'a b -> a8 b2',
        'layers': [Layer('a b -> 2 a8 b', 'a -> 16 a'), Layer('a b -> b4 a4', 'a -> a2 8')],
        'keys': 'a -> a16',
        'scalar': '... -> 16 ...',
        'pair': ('a b c -> a b2 c 8', None),
    }
    assert describe(shardings({'w': placed['embed'], 'x': placed['pair'][0]})) == {
        'w': 'a b ... -> a8 b2 ...',
        'x': 'a b ... -> a b2 8 ...',
    }


def test_the_description_of_a_tree_is_a_spec():
    placed = einshard(HOST, EXPRESSIONS)
    spec = describe(placed)
    shapes = jax.eval_shape(lambda: {**HOST, 'pair': (HOST['pair'][0], None)})
    for other in (HOST, placed, shapes):
        again = einshard(other, spec)
        assert describe(again) == spec
        assert again['embed'].sharding == placed['embed'].sharding
        assert again['pair'][0].sharding == placed['pair'][0].sharding
    error = refusal(einshard, {**HOST, 'embed': np.ones((16, 4, 1))}, spec)
    assert error.sentence == 'the expression names 2 axes, but the array has 3 dimensions'


def test_descriptions_in_trees():
    tree = {'host': np.ones(3), 'one': jnp.ones(3), 'f': len, 'none': None, 'mesh': USER}
    words = describe(tree)
    assert words == {
        'host': 'on the host: numpy.ndarray', 'one': ONE, 'f': None, 'none': None, 'mesh': None
    }  # fmt: skip
    refusal(einshard, tree, words)  # descriptions are not specs


@pytest.mark.parametrize('tree', [{}, [], (), None, {'a': {}, 'b': [None]}])
def test_trees_without_leaves(tree):
    assert describe(tree) == tree


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'mesh', [DEVICES[:8], USER, mesh_of(types=EXPLICIT, data=4, tp=2), DEVICES[:1]]
)
@pytest.mark.parametrize('kind', ['pinned_host', 'device', None])
@pytest.mark.parametrize('expression', ['a b -> * a b', 'a b -> a* b', '... -> * ...'])
def test_memory_survives(expression, kind, mesh):
    x = np.arange(32.0).reshape(8, 4)
    placed = einshard(x, expression, mesh=mesh, memory_kind=kind)
    words = describe(placed)
    assert words.endswith(' (in pinned_host)') == (kind == 'pinned_host')
    again = einshard(x, words, mesh=mesh)
    assert again.sharding == placed.sharding
    assert again.sharding.memory_kind == placed.sharding.memory_kind
    assert einshard(placed, words, mesh=mesh) is placed
    np.testing.assert_array_equal(again, x)
    described = describe(placed.sharding)
    assert make_sharding(described, ndim=2, mesh=mesh) == placed.sharding


def test_memory_survives_in_trees():
    """Moments in host memory, parameters on devices."""
    w = np.ones((16, 4))
    tree = {'w': einshard(w, 'a* b'), 'mu': einshard(w, 'a b -> a8 b 2', memory_kind='pinned_host')}
    assert describe(tree) == {'w': 'a b -> a16 b', 'mu': 'a b -> a8 b 2 (in pinned_host)'}
    kinds = {'w': 'device', 'mu': 'pinned_host'}
    for spec in (describe(tree), Rules([(f'^{k}', text) for k, text in describe(tree).items()])):
        again = einshard({'w': w, 'mu': w}, spec)
        assert {k: x.sharding.memory_kind for k, x in again.items()} == kinds
        assert shardings(again) == shardings(tree)
    rows = Rules([('', describe(tree['mu']))]).table({'mu': w}).rows
    assert rows[0].expression == describe(tree['mu'])
    state = {'m': {'w': w, 'v_row': np.ones(16)}}
    spec = for_optimizer({'w': w}, 'a b -> a8 b 2 (in pinned_host)', default='a* (in pinned_host)')
    for leaf in jax.tree.leaves(einshard(state, spec)):
        assert leaf.sharding.memory_kind == 'pinned_host'


def test_memory_is_drawn():
    placed = einshard(np.ones((8, 4)), 'a* b', mesh=DEVICES[:8], memory_kind='pinned_host')
    assert "in the notation: 'a b -> a8 b (in pinned_host)'" in str(show(placed))
    assert str(show(describe(placed), (8, 4))).endswith('\nin pinned_host')


@pytest.mark.parametrize(
    ('spec', 'options', 'sentence'),
    [
        ('a* b (in hbm)', {}, "the devices have no memory kind 'hbm'"),
        ('a* b (in pinned_host)', {'memory_kind': 'device'}, "has memory kind 'pinned_host'"),
        ('a* b (pinned_host)', {}, "'(' is not valid here"),
        ('(in pinned_host)', {}, "'(' is not valid here"),
        ('a3 b (in pinned_host)', {}, 'the number of devices (8) is not divisible by 3'),
    ],
)
def test_memory_in_an_expression_is_checked(spec, options, sentence):
    error = refusal(einshard, np.ones((8, 4)), spec, mesh=DEVICES[:8], **options)
    assert sentence in error.sentence


def test_memory_in_traces_and_fixes():
    def place(x, spec='a* b (in pinned_host)', **options):
        return einshard(x, spec, mesh=DEVICES[:8], **options)

    x = np.ones((16, 4))
    assert place(x, memory_kind='pinned_host').sharding.memory_kind == 'pinned_host'
    unpinned = 'a* b (in unpinned_host)'
    assert (
        'cannot be set on a traced value'
        in refusal(jax.jit(lambda x: place(x, unpinned)), x).sentence
    )
    fix = refusal(place, x, 'a b -> a2 b (in pinned_host)').fix
    assert fix == "'a b -> * a2 b (in pinned_host)'"
    assert place(x, fix[1:-1]).sharding.memory_kind == 'pinned_host'


def test_sharded_takes_the_memory():
    words = 'a b -> a8 b (in pinned_host)'
    offload = sharded('a* b', out=words, mesh=DEVICES[:8])(lambda x: x + 1)
    fetch = sharded(words, out='a* b', mesh=DEVICES[:8])(lambda x: x)
    x = einshard(np.arange(32.0).reshape(8, 4), 'a* b', mesh=DEVICES[:8])
    expected = make_sharding(words, mesh=DEVICES[:8])
    assert offload.out_shardings(x) == fetch.in_shardings(x)['x'] == expected
