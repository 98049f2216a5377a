"""sharded: specs, meshes and options, against hand-written jax.jit."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting, program
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import EinshardError, describe, device_mesh, einshard, make_sharding, sharded

X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
W = np.arange(128, dtype=np.float32).reshape(8, 16) / 128


MESH = mesh_of(p=2, q=4)


def on(*entries, mesh=MESH):
    return NamedSharding(mesh, P(*entries))


def matmul(x, w):
    return jnp.tanh(x @ w)


def same_placement(x, sharding):
    return x.sharding.is_equivalent_to(sharding, x.ndim)


# ------------------------------------------------------------------------------------- the specs

# specs of x, w and the result, and the shardings by hand
BY_HAND = [
    (('x y -> x2 y4', 'y z -> * y z', 'x z -> 2 x z4'), (on('p', 'q'), on()), on(None, 'q')),
    (('x y -> 2 x y4', 'y z -> 2 y4 z', 'x z -> x8 z'), (on(None, 'q'), on('q')), on(('p', 'q'))),
    (('x y*', 'y* z', '... -> * ...'), (on(None, ('p', 'q')), on(('p', 'q'))), on()),
    (('x2 4 y', None, 'x z'.replace('z', 'z8')), (on('p'), None), on(None, ('p', 'q'))),
    (('x ... -> 2 x4 ...', '... z -> ... z2 4', None), (on('q'), on(None, 'p')), None),
    ((None, None, '... z -> 2 ... z4'), (None, None), on(None, 'q')),
    (('... -> * ...', '... -> * ...', '... -> * ...'), (on(), on()), on()),
]


def by_hand(ins, out):
    options = {} if ins == (None, None) else {'in_shardings': ins}
    return jax.jit(matmul, **options, **({} if out is None else {'out_shardings': out}))


@pytest.mark.parametrize(('specs', 'ins', 'out'), BY_HAND)
def test_specs_by_position_make_the_program_written_by_hand(specs, ins, out, devices8):
    ours = sharded(*specs[:2], out=specs[2], mesh=devices8)(matmul)
    theirs = by_hand(ins, out)
    result, expected = ours(X, W), theirs(X, W)
    np.testing.assert_array_equal(result, expected)
    assert same_placement(result, expected.sharding)
    assert program(ours.lower(X, W).compile()) == program(theirs.lower(X, W).compile())


@pytest.mark.parametrize(('specs', 'ins', 'out'), BY_HAND[:4])
def test_specs_by_name_are_those_by_position(specs, ins, out, devices8):
    ours = sharded(w=specs[1], x=specs[0], out=specs[2], mesh=devices8)(matmul)
    assert program(ours.lower(X, W).compile()) == program(by_hand(ins, out).lower(X, W).compile())
    assert same_placement(ours(X, W), by_hand(ins, out)(X, W).sharding)


def test_without_specs_it_is_jit(devices8):
    ours = sharded(matmul)
    assert program(ours.lower(X, W).compile()) == program(jax.jit(matmul).lower(X, W).compile())
    assert ours(X, W).sharding == jax.jit(matmul)(X, W).sharding


def test_every_device_count(devices):
    n = len(devices)
    x = np.arange(48 * 6, dtype=np.float32).reshape(48, 6)
    f = sharded('a b -> a* b', out='a b -> * a b', mesh=devices)(lambda x: x + 1)
    result = f(x)
    assert result.sharding.device_set == set(devices)
    assert result.is_fully_replicated
    np.testing.assert_array_equal(result, x + 1)
    pieces = f.in_shardings(x)['x'].devices_indices_map(x.shape)
    starts = sorted(index[0].start or 0 for index in pieces.values())
    assert starts == [48 // n * i for i in range(n)]


def test_scalars_take_specs(devices8):
    f = sharded('-> *', '... -> * ...', out='-> 8', mesh=devices8)(lambda a, b: a * b)
    result = f(3, np.float32(2))
    assert float(result) == 6
    assert result.sharding.device_set == set(devices8)


def test_axes_after_an_ellipsis(devices8):
    f = sharded('... d -> ... d*', out='... d -> ... d*', mesh=devices8)(lambda x: 2 * x)
    for n_dims in (1, 2, 3, 4, 2, 1):
        x = np.ones((2,) * (n_dims - 1) + (16,), np.float32)
        expected = on(*[None] * (n_dims - 1), ('p', 'q'))
        result = f(x)
        assert same_placement(result, expected), n_dims
        assert f.in_shardings(x)['x'].is_equivalent_to(expected, n_dims)


def test_the_same_axes_by_prefix_for_every_rank(devices8):
    """With '...' last no rank is needed: one program text, several traces, as for jit."""
    f = sharded('b ... -> b* ...', out='b ... -> b* ...', mesh=devices8)(lambda x: 2 * x)
    for shape in ((8,), (8, 2), (8, 2, 3), (16, 1)):
        assert same_placement(f(np.ones(shape, np.float32)), on(('p', 'q')))


# ------------------------------------------------------------------------------------------ trees


class Layer(NamedTuple):
    w: object
    b: object


PARAMETERS = {
    'layers': [Layer(np.ones((8, 8), np.float32), np.ones(8, np.float32)) for _ in range(2)],
    'head': np.ones((8, 16), np.float32),
}


def network(parameters, x):
    for layer in parameters['layers']:
        x = jnp.tanh(x @ layer.w + layer.b)
    return {'y': x @ parameters['head'], 'hidden': (x, x.sum())}


def leaves_by_path(tree):
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_a_prefix_of_a_tree_is_a_spec(devices8):
    specs = {'layers': [Layer('i o -> i o*', 'o*'), '... o -> ... o8'], 'head': None}
    f = sharded(specs, None, out={'y': 'b o -> 8 b o', 'hidden': None}, mesh=devices8)(network)
    by_columns, by_entries = on(None, ('p', 'q')), on(('p', 'q'))
    layer = Layer(by_columns, by_entries)
    g = jax.jit(
        network,
        in_shardings=({'layers': [layer, layer], 'head': None}, None),
        out_shardings={'y': on(), 'hidden': None},
    )
    assert program(f.lower(PARAMETERS, X).compile()) == program(g.lower(PARAMETERS, X).compile())
    ours, theirs = leaves_by_path(f(PARAMETERS, X)), leaves_by_path(g(PARAMETERS, X))
    assert list(ours) == list(theirs)
    for path, leaf in theirs.items():
        np.testing.assert_array_equal(ours[path], leaf)
        assert same_placement(ours[path], leaf.sharding), path


def test_one_expression_for_a_pytree(devices8):
    f = sharded('... o -> ... o*', mesh=devices8)(lambda tree: jax.tree.map(jnp.sin, tree))
    tree = {'a': np.ones((4, 8), np.float32), 'b': (np.ones(16, np.float32), None)}
    asked = f.in_shardings(tree)['tree']
    assert asked['a'].is_equivalent_to(on(None, ('p', 'q')), 2)
    assert asked['b'][0].is_equivalent_to(on(('p', 'q')), 1)
    assert asked['b'][1] is None
    np.testing.assert_allclose(f(tree)['a'], np.sin(tree['a']), rtol=1e-6)


def test_a_function_of_path_and_leaf_is_a_spec(devices8):
    seen = []

    def by_path(path, leaf):
        seen.append((path, leaf.shape))
        return 'i o -> i o*' if path.endswith('/w') else '... -> * ...'

    f = sharded(by_path, mesh=devices8)(network)
    asked = leaves_by_path(f.in_shardings(PARAMETERS, X)['parameters'])
    assert asked["['layers'][0].w"].is_equivalent_to(on(None, ('p', 'q')), 2)
    assert asked["['head']"].is_equivalent_to(on(), 2)
    assert set(seen) == {
        ('head', (8, 16)),
        *(
            (f'layers/{i}/{name}', shape)
            for i in (0, 1)
            for name, shape in (('w', (8, 8)), ('b', (8,)))
        ),
    }


def test_functions_inside_a_prefix_get_the_path_from_the_argument(devices8):
    seen = set()

    def by_path(path, leaf):
        seen.add(path)

    sharded({'layers': by_path, 'head': 'i o*'}, mesh=devices8)(network).in_shardings(PARAMETERS, X)
    assert seen == {'layers/0/w', 'layers/0/b', 'layers/1/w', 'layers/1/b'}


def test_out_may_be_a_function_of_path_and_leaf(devices8):
    out = lambda path, leaf: 'b o -> b o*' if path == 'y' else None  # noqa: E731
    result = sharded(out=out, mesh=devices8)(network)(PARAMETERS, X)
    assert same_placement(result['y'], on(None, ('p', 'q')))


def test_functions_see_leaves_of_one_kind_at_calls_and_traces(devices8):
    """A spec may depend on shape and dtype; other shapes then are other shardings."""

    def wide(path, leaf):
        return 'a b -> a b*' if leaf.shape[1] % 8 == 0 else 'a b -> * a b'

    f = sharded(wide, out=wide, mesh=devices8)(lambda x: x + 1)
    for shape, expected in (
        ((2, 8), on(None, ('p', 'q'))),
        ((2, 6), on()),
        ((2, 8), on(None, ('p', 'q'))),
    ):
        assert same_placement(f(np.ones(shape, np.float32)), expected)


@pytest.mark.parametrize('n_calls', [1, 3])
def test_ellipsis_in_out_over_a_tree_is_one_trace(n_calls, devices8):
    runs = []

    def tree_of(x):
        runs.append(1)
        return {'a': x, 'b': [x[0], x.sum()], 'c': x[None]}

    f = sharded('... -> * ...', out='... -> * ...', mesh=devices8)(tree_of)
    g = sharded(
        '... b -> ... b*',
        out={'a': '... b -> ... b*', 'b': None, 'c': '... b -> ... b*'},
        mesh=devices8,
    )(tree_of)
    for one in (f, g):
        runs.clear()
        with counting() as counts:
            for _ in range(n_calls):
                result = one(X)
        assert len(runs) == 1
        assert counts.of('tree_of')[1] == 1
    assert same_placement(result['a'], on(None, ('p', 'q')))
    assert same_placement(result['c'], on(None, None, ('p', 'q')))


# ------------------------------------------------------------------------------------------- mesh


def test_reversed_device_lists_give_the_canonical_mesh(devices8):
    forth = sharded('x y -> x* y', out='x y -> x* y', mesh=devices8)(lambda x: 2 * x)
    back = sharded('x y -> x* y', out='x y -> x* y', mesh=devices8[::-1])(lambda x: 3 * x)
    result = back(forth(X))
    assert result.sharding == forth(X).sharding
    np.testing.assert_array_equal(result, 6 * X)
    both = jax.jit(lambda x: back(forth(x)))
    np.testing.assert_array_equal(both(X), 6 * X)


def test_a_mesh_with_its_devices_reversed_is_taken_as_it_is(devices8):
    mesh = mesh_of(p=8, devices=devices8[::-1])
    result = sharded('x y -> x* y', out='x y -> x@p y', mesh=mesh)(lambda x: 2 * x)(X)
    assert result.sharding == NamedSharding(mesh, P('p'))
    rows = {shard.device: shard.index[0].start for shard in result.addressable_shards}
    assert [rows[device] for device in devices8] == list(range(7, -1, -1))
    np.testing.assert_array_equal(result, 2 * X)


def test_expressions_name_the_axes_of_a_mesh(devices8):
    f = sharded('x@p y@q', 'y@q z', out='x@(p,q) z', mesh=MESH)(matmul)
    g = jax.jit(matmul, in_shardings=(on('p', 'q'), on('q')), out_shardings=on(('p', 'q')))
    assert f(X, W).sharding == g(X, W).sharding
    assert program(f.lower(X, W).compile()) == program(g.lower(X, W).compile())


def test_an_abstract_mesh_lowers_without_devices():
    mesh = AbstractMesh((4,), ('p',), axis_types=(AxisType.Auto,))
    f = sharded('x@p y', out='x y@p', mesh=mesh)(lambda x: x + 1)
    assert f.eval_shape(X).shape == X.shape
    assert f.in_shardings(X)['x'] == NamedSharding(mesh, P('p'))
    lowered = f.trace(X).lower(lowering_platforms=('cpu',))
    assert lowered.as_text().count('stablehlo.add') == 1


def test_nothing_is_initialised_by_decoration():
    """A mesh in context, or the devices, are looked at when the function is called."""

    @sharded('x y -> x* y', out='x@p y')
    def f(x):
        return x + 1

    with jax.set_mesh(mesh_of(p=8)):
        assert f(X).sharding.spec == P('p')
    with pytest.raises(EinshardError, match='p'):
        f(X)


def test_the_mesh_is_the_default_inside(devices8):
    seen = []

    @sharded('x y -> x* y', mesh=devices8[:4])
    def f(x):
        seen.append(make_sharding('a b -> a* b'))
        return einshard(x, 'a b -> a b*') + 1

    result = f(X)
    assert result.sharding.device_set == set(devices8[:4])
    assert seen[0].mesh == device_mesh(devices8[:4])
    # and only inside
    assert make_sharding('a b -> a* b').mesh == device_mesh()


def test_the_mesh_is_the_default_of_sharded_functions_inside(devices8):
    @sharded('a b -> a b*', out='a b -> a b*')
    def inner(x):
        return einshard(2 * x, 'a b -> a2 b2')

    @sharded('a b -> a* b', out='a b -> a* b', mesh=devices8[:4])
    def outer(x):
        return inner(x)

    result = outer(X)
    assert result.sharding == make_sharding('a b -> a* b', mesh=devices8[:4])
    np.testing.assert_array_equal(result, 2 * X)
    # the inner one on its own has all devices
    x = np.ones((2, 16), np.float32)
    with pytest.raises(EinshardError, match='use only 4 of 16 devices'):
        inner(x)


def test_the_mesh_is_forgotten_after_an_error(devices8):
    @sharded('a b -> a* b', mesh=devices8[:2])
    def f(x):
        raise RuntimeError('no')

    with pytest.raises(RuntimeError, match='no'):
        f(X)
    assert make_sharding('a b -> a* b').mesh == device_mesh()


# --------------------------------------------------------------------------------- options of jit


def test_static_by_number_and_by_name(devices8):
    def power(x, n, scale=1):
        assert type(n) is int
        assert type(scale) is int
        return scale * x**n

    for options in (
        {'static_argnums': (1, 2)},
        {'static_argnames': ('n', 'scale')},
        {'static_argnums': 1, 'static_argnames': 'scale'},
        {'static_argnums': (-2, -1)},
    ):
        f = sharded('a b -> a* b', out='a b -> a* b', mesh=devices8, **options)(power)
        g = jax.jit(power, static_argnames=('n', 'scale'))
        for args, kwargs in (
            ((X, 2), {}),
            ((X,), {'n': 3}),
            ((X, 2), {'scale': 5}),
            ((X, 2, 5), {}),
        ):
            result = f(*args, **kwargs)
            np.testing.assert_allclose(result, g(*args, **kwargs), rtol=1e-6)
            assert same_placement(result, on(('p', 'q')))


def test_a_static_parameter_may_be_left_to_its_default(devices8):
    f = sharded('a b -> a* b', mesh=devices8, static_argnames='n')(lambda x, n=2: x**n)
    np.testing.assert_allclose(f(X), X**2)
    np.testing.assert_allclose(f(X, n=3), X**3)


@pytest.mark.parametrize(
    'options', [{'donate_argnums': 0}, {'donate_argnums': (0,)}, {'donate_argnames': 'x'}]
)
def test_donation_by_number_and_by_name(options, devices8):
    f = sharded('a b -> a* b', out='a b -> a* b', mesh=devices8, **options)(lambda x, y: x + y)
    for call in (lambda x: f(x, 1.0), lambda x: f(y=1.0, x=x), lambda x: f(x, y=1.0)):
        x = einshard(X, 'a b -> a* b', mesh=devices8)
        np.testing.assert_array_equal(call(x), X + 1)
        assert x.is_deleted()


def test_donation_of_a_parameter_by_keyword_only(devices8):
    def add(x, *, y):
        return x + y

    f = sharded(y='a b -> a* b', out='a b -> a* b', mesh=devices8, donate_argnames=('y',))(add)
    y = einshard(X, 'a b -> a* b', mesh=devices8)
    np.testing.assert_array_equal(f(X, y=y), 2 * X)
    assert y.is_deleted()


def test_donated_arguments_beside_static_ones(devices8):
    """jit numbers donated arguments with the static ones counted."""

    def f(n, x, k, y):
        return n * x + k * y

    g = sharded(
        x='a b -> a* b',
        y='a b -> a b*',
        out='a b -> a b*',
        mesh=devices8,
        static_argnums=(0, 2),
        donate_argnums=3,
    )(f)
    x, y = einshard(X, 'a b -> a* b', mesh=devices8), einshard(X, 'a b -> a b*', mesh=devices8)
    np.testing.assert_array_equal(g(2, x, 3, y), 5 * X)
    assert not x.is_deleted()
    assert y.is_deleted()


def test_keep_unused(devices8):
    drop = lambda x, unused: x + 1  # noqa: E731
    for keep in (False, True):
        f = sharded('a b -> a* b', mesh=devices8, keep_unused=keep)(drop)
        g = jax.jit(drop, in_shardings=(on(('p', 'q')), None), keep_unused=keep)
        ours, theirs = (one.lower(X, X).compile() for one in (f, g))
        assert program(ours) == program(theirs)
        entry = program(ours).partition('ENTRY')[2]
        assert entry.count(' parameter(') == 1 + keep


def test_inline(devices8):
    for inline in (False, True):
        f = sharded(None, inline=inline)(lambda x: jnp.sin(x) + 1)
        g = jax.jit(lambda x: jnp.sin(x) + 1, inline=inline)
        ours, theirs = (str(jax.make_jaxpr(lambda x, one=one: one(x))(X)) for one in (f, g))
        # before jax 0.9 the body is in the text of the caller, later when the program is lowered
        assert ours == theirs


def test_compiler_options(devices8):
    with pytest.raises(Exception, match='no_such_option'):
        sharded('a b -> a* b', mesh=devices8, compiler_options={'no_such_option': True})(
            lambda x: x + 1
        )(X)
    f = sharded('a b -> a* b', mesh=devices8, compiler_options={'xla_embed_ir_in_executable': True})
    np.testing.assert_array_equal(f(lambda x: x + 1)(X), X + 1)


# -------------------------------------------------------------------------------- what stays of jit


def test_lower_trace_and_eval_shape_are_those_of_jit(devices8):
    f = sharded('x y -> x* y', 'y z -> * y z', out='x z -> x* z', mesh=devices8)(matmul)
    g = jax.jit(matmul, in_shardings=(on(('p', 'q')), on()), out_shardings=on(('p', 'q')))
    for kwargs in ({}, {'w': W}):
        args = (X,) if kwargs else (X, W)
        ours, theirs = f.eval_shape(*args, **kwargs), g.eval_shape(X, W)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.sharding.is_equivalent_to(theirs.sharding, 2)
        assert str(f.trace(*args, **kwargs).jaxpr) == str(g.trace(X, W).jaxpr)
        lowered = f.lower(*args, **kwargs)
        assert lowered.compile().input_shardings[0][0].is_equivalent_to(on(('p', 'q')), 2)
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]
    assert program(f.lower(*structs).compile()) == program(g.lower(X, W).compile())


def test_lowering_and_calling_compile_once(devices8):
    f = sharded('x y -> x* y', out='x y -> x* y', mesh=devices8)(lambda x: jnp.cos(x))
    with counting() as ours:
        f.lower(X).compile()
        f(X)
        f(X)
    g = jax.jit(lambda x: jnp.cos(x), in_shardings=(on(('p', 'q')),), out_shardings=on(('p', 'q')))
    with counting() as theirs:
        g.lower(X).compile()
        g(X)
        g(X)
    assert ours.of('<lambda>') == theirs.of('<lambda>')


def test_in_shardings_and_out_shardings_by_parameter(devices8):
    f = sharded('x y -> x* y', out='x z -> x z*', mesh=devices8)(matmul)
    asked = f.in_shardings(X, w=W)
    assert list(asked) == ['x', 'w']
    assert asked['x'] == make_sharding('a b -> a* b', mesh=devices8)
    assert asked['w'] is None
    assert f.out_shardings(X, W) == make_sharding('a b -> a b*', mesh=devices8)
    assert sharded(None, 'y z*', mesh=devices8)(matmul).out_shardings(X, W) is None


def test_clear_cache_drops_traces(devices8):
    f = sharded('x y -> x* y', mesh=devices8)(lambda x: jnp.exp(x))
    with counting() as counts:
        f(X)
        f(X)
        assert counts.of('<lambda>') == (1, 1)
        f.clear_cache()
        f(X)
    assert counts.of('<lambda>') == (2, 2)


# ------------------------------------------------------------------------- as often as jit itself


def calls_of(f):
    small, large = X, np.ones((16, 8), np.float32)
    f(small), f(small), f(large), f(small), f(large)
    f(small.astype(np.int32)), f(small)


@pytest.mark.parametrize(
    ('spec', 'out'),
    [
        ('x y -> x* y', None),
        ('x y -> x* y', 'x y -> * x y'),
        ('... y -> ... y*', None),
        ('... y -> ... y*', '... y -> ... y*'),
        (None, '... y -> ... y*'),
        (lambda path, leaf: 'x y -> x* y', lambda path, leaf: 'x y -> x y*'),
    ],
)
def test_traced_and_compiled_as_often_as_by_jit(spec, out, devices8):
    runs = []

    def ours_too(x):
        runs.append(x.shape)
        return jnp.sin(x) * 2

    f = sharded(x=spec, out=out, mesh=devices8)(ours_too)
    ins, outs = f.in_shardings(X)['x'], f.out_shardings(X)
    f.clear_cache()
    jax.clear_caches()
    options = {} if ins is None else {'in_shardings': (ins,)}
    g = jax.jit(ours_too, **options, **({} if outs is None else {'out_shardings': outs}))
    counted = []
    for one in (g, f):
        runs.clear()
        with counting() as counts:
            calls_of(one)
        counted.append((len(runs), counts.of('ours_too')[1]))
    assert counted == [(3, 3), (3, 3)]


def test_forms_of_call_share_one_program(devices8):

    def scaled(x, s):
        return x * s

    f = sharded('x y -> x* y', mesh=devices8)(scaled)
    with counting() as counts:
        for _ in range(2):
            f(X, 2.0), f(X, s=2.0), f(s=2.0, x=X)
    assert counts.of('scaled') == (1, 1)


def test_a_user_error_is_raised_unchanged_after_one_run(devices8):
    runs, error = [], ValueError('a plain error of the user')

    @sharded('x y -> x* y', mesh=devices8)
    def f(x, flag=None):
        runs.append(1)
        raise error

    for call in (lambda: f(x=X), lambda: f(x=X, flag=1), lambda: f(X)):
        runs.clear()
        with pytest.raises(ValueError, match='a plain error of the user') as caught:
            call()
        assert caught.value is error
        assert len(runs) == 1


def test_a_user_error_of_a_later_trace_comes_out_after_one_run(devices8):
    runs = []

    @sharded('... y -> ... y*', out='... y -> ... y*', mesh=devices8)
    def f(x):
        runs.append(x.ndim)
        if x.ndim == 2:
            raise ValueError('not with two')
        return x

    f(np.ones(8, np.float32))
    runs.clear()
    with pytest.raises(ValueError, match='not with two'):
        f(X)
    assert runs == [2]


def test_errors_of_jax_name_the_function_and_not_ours(devices8):
    @sharded('a*', mesh=devices8)
    def chosen(x, flag):
        return x if flag else x + 1

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        chosen(np.ones(16), True)
    assert f'the function chosen at {__file__}' in str(caught.value)


def test_functools_partial_of_the_decorator(devices8):
    rows = functools.partial(sharded, 'x y -> x* y', mesh=devices8)
    f = rows(out='x y -> x* y')(lambda x: x + 1)
    assert describe(f(X)) == 'a b -> a8 b'
