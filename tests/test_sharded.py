"""sharded: specs, meshes and options, against hand-written jax.jit."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, counting, program
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import check_equal, mesh_of, shardings

from einshard import EinshardError, device_mesh, einshard, make_sharding, sharded

X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
W = np.arange(128, dtype=np.float32).reshape(8, 16) / 128
EIGHT = jax.devices()[:8]
MESH = mesh_of(p=2, q=4)
ALL = ('p', 'q')
ROWS = 'x y -> x* y'

on_eight = functools.partial(sharded, mesh=EIGHT)


def on(*entries):
    return NamedSharding(MESH, P(*entries))


def matmul(x, w):
    return jnp.tanh(x @ w)


def is_sharded_as(x, sharding):
    return x.sharding.is_equivalent_to(sharding, x.ndim)


# ------------------------------------------------------------------------------------- the specs

# specs of x, w and the result, and the shardings by hand
BY_HAND = [
    (('x y -> x2 y4', 'y z -> * y z', 'x z -> 2 x z4'), (on('p', 'q'), on()), on(None, 'q')),
    (('x y -> 2 x y4', 'y z -> 2 y4 z', 'x z -> x8 z'), (on(None, 'q'), on('q')), on(ALL)),
    (('x y*', 'y* z', '... -> * ...'), (on(None, ALL), on(ALL)), on()),
    (('x2 4 y', None, 'x z8'), (on('p'), None), on(None, ALL)),
    (('x ... -> 2 x4 ...', '... z -> ... z2 4', None), (on('q'), on(None, 'p')), None),
    ((None, None, '... z -> 2 ... z4'), (None, None), on(None, 'q')),
    (('... -> * ...', '... -> * ...', '... -> * ...'), (on(), on()), on()),
    (('x@p y@q', 'y@q z', 'x@(p,q) z'), (on('p', 'q'), on('q')), on(ALL)),
]


def by_name(x, w, **options):
    return sharded(w=w, x=x, **options)


@pytest.mark.parametrize('decorate', [sharded, by_name])
@pytest.mark.parametrize(('specs', 'ins', 'out'), BY_HAND)
def test_the_program_is_that_written_by_hand(specs, ins, out, decorate):
    x, w, result = specs
    ours = decorate(x, w, out=result, mesh=MESH if '@' in f'{x}' else EIGHT)(matmul)
    options = {} if ins == (None, None) else {'in_shardings': ins}
    theirs = jax.jit(matmul, **options, **({} if out is None else {'out_shardings': out}))
    np.testing.assert_array_equal(ours(X, W), theirs(X, W))
    assert is_sharded_as(ours(X, W), theirs(X, W).sharding)
    assert program(ours.lower(X, W).compile()) == program(theirs.lower(X, W).compile())


def test_without_specs_it_is_jit():
    ours, theirs = sharded(matmul), jax.jit(matmul)
    assert program(ours.lower(X, W).compile()) == program(theirs.lower(X, W).compile())
    assert ours(X, W).sharding == theirs(X, W).sharding


@pytest.mark.parametrize(
    ('spec', 'shapes'),
    [
        ('... -> * ...', {(): (), (8, 2): ()}),
        ('-> 8', {(): ()}),
        ('... d -> ... d*', {(16,): (ALL,), (2, 16): (None, ALL), (2, 2, 8): (None, None, ALL)}),
        ('b ... -> b* ...', {(8,): (ALL,), (8, 2): (ALL,), (8, 2, 3): (ALL,), (16, 1): (ALL,)}),
    ],
)
def test_one_function_for_every_rank(spec, shapes):
    f = on_eight(spec, out=spec)(lambda x: 2 * x)
    for shape, entries in [*shapes.items()] * 2:
        x = np.ones(shape, np.float32)
        assert is_sharded_as(f(x), on(*entries))
        assert f.in_shardings(x)['x'].is_equivalent_to(on(*entries), x.ndim)
        np.testing.assert_array_equal(f(x), 2 * x)


# ---------------------------------------------------------------------------------------- pytrees


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


def test_a_prefix_of_a_tree_is_a_spec():
    specs = {'layers': [Layer('i o -> i o*', 'o*'), '... o -> ... o8'], 'head': None}
    f = on_eight(specs, None, out={'y': 'b o -> 8 b o', 'hidden': None})(network)
    layer = Layer(on(None, ALL), on(ALL))
    g = jax.jit(
        network,
        in_shardings=({'layers': [layer, layer], 'head': None}, None),
        out_shardings={'y': on(), 'hidden': None},
    )
    assert program(f.lower(PARAMETERS, X).compile()) == program(g.lower(PARAMETERS, X).compile())
    ours, theirs = f(PARAMETERS, X), g(PARAMETERS, X)
    check_equal(ours, theirs)
    assert all(jax.tree.leaves(jax.tree.map(is_sharded_as, ours, shardings(theirs))))


@pytest.mark.parametrize(
    ('spec', 'expected'),
    [
        ('... o -> ... o*', [(None, ALL), (None, ALL), (ALL,), (None, ALL), (ALL,)]),
        (
            lambda path, leaf: 'i o -> i o*' if path.endswith('/w') else '... -> * ...',
            [(), (None, ALL), (), (None, ALL), ()],
        ),
        (
            {'layers': lambda path, leaf: f'... o -> ... o{leaf.ndim}*', 'head': 'i* o'},
            [(ALL,), (None, ALL), (ALL,), (None, ALL), (ALL,)],
        ),
    ],
)
def test_specs_of_the_leaves_of_a_pytree(spec, expected):
    f = on_eight(spec, out=spec)(lambda tree: tree)
    asked, placed = f.in_shardings(PARAMETERS)['tree'], f(PARAMETERS)
    leaves = [jax.tree.leaves(tree) for tree in (asked, placed)]
    for sharding, leaf, entries in zip(*leaves, expected, strict=True):
        assert sharding.is_equivalent_to(on(*entries), leaf.ndim)
        assert is_sharded_as(leaf, sharding)


@pytest.mark.parametrize('inside', [False, True])
def test_functions_of_path_and_leaf_get_both(inside):
    seen = set()

    def by_path(path, leaf):
        seen.add((path, leaf.shape))

    spec = {'layers': by_path, 'head': by_path} if inside else by_path
    on_eight(spec, None)(network).in_shardings(PARAMETERS, X)
    layers = {(f'layers/{i}/{name}', (8,) * n) for i in (0, 1) for name, n in (('w', 2), ('b', 1))}
    assert seen == layers | {('head', (8, 16))}


def test_specs_may_depend_on_the_shape():
    def wide(path, leaf):
        return 'a b -> a b*' if leaf.shape[1] % 8 == 0 else 'a b -> * a b'

    f = on_eight(wide, out=wide)(lambda x: x + 1)
    for n, expected in ((8, on(None, ALL)), (6, on()), (8, on(None, ALL))):
        assert is_sharded_as(f(np.ones((2, n), np.float32)), expected)


# ------------------------------------------------------------------------------------------- mesh


def test_the_mesh_is_the_default_only_inside_the_function():
    seen = []

    @sharded('a b -> a b*', out='a b -> a b*')
    def inner(x):
        seen.append(make_sharding('a b -> a* b').mesh)
        return einshard(2 * x, 'a b -> a2 b2')

    @sharded('a b -> a* b', out='a b -> a* b', mesh=EIGHT[:4])
    def outer(x):
        if x.shape != X.shape:
            raise RuntimeError('no')
        return einshard(inner(x), 'a b -> a b*')

    result = outer(X)
    assert result.sharding == make_sharding('a b -> a* b', mesh=EIGHT[:4])
    np.testing.assert_array_equal(result, 2 * X)
    with pytest.raises(RuntimeError, match='no'):
        outer(X[:4])
    with pytest.raises(EinshardError, match='use only 4 of 16 devices'):
        inner(np.ones((2, 16), np.float32))
    assert seen == [device_mesh(EIGHT[:4]), device_mesh()]
    assert make_sharding('a b -> a* b').mesh == device_mesh()


# --------------------------------------------------------------------------------- options of jit


def weigh(n, x, k=1, *, y):
    assert type(n) is type(k) is int
    return n * x + k * y


@pytest.mark.parametrize(
    ('options', 'deleted'),
    [
        ({'static_argnums': (0, 2)}, ''),
        ({'static_argnums': (-3, -1), 'donate_argnums': 1}, 'x'),
        ({'static_argnums': 0, 'static_argnames': 'k', 'donate_argnums': (1,)}, 'x'),
        ({'static_argnames': ('n', 'k'), 'donate_argnames': 'x'}, 'x'),
        ({'static_argnames': ['k', 'n'], 'donate_argnames': ('y',)}, 'y'),
    ],
)
def test_static_and_donated_arguments_by_number_and_by_name(options, deleted):
    f = on_eight(x=ROWS, y=ROWS, out=ROWS, **options)(weigh)
    calls = [
        (5, lambda x, y: f(2, x, 3, y=y)),
        (7, lambda x, y: f(2, x, k=5, y=y)),
        (3, lambda x, y: f(2, y=y, x=x)),
        (6, lambda x, y: f(y=y, k=1, x=x, n=5)),
    ]
    for factor, call in calls * 2:
        arrays = {name: einshard(X, ROWS, mesh=EIGHT) for name in 'xy'}
        result = call(**arrays)
        np.testing.assert_allclose(result, factor * X, rtol=1e-6)
        assert is_sharded_as(result, on(ALL))
        assert [name for name, x in arrays.items() if x.is_deleted()] == [*deleted]


@pytest.mark.parametrize('out', [None, ROWS, lambda path, leaf: ROWS])
def test_static_arguments_must_be_hashable(out):
    f = on_eight(ROWS, out=out, static_argnames='n')(lambda x, n: x + n[0])
    for call in (f, lambda x, n: f(x, n=n)) * 2:
        for n in ([1], ([1],)):
            with pytest.raises(ValueError, match='Non-hashable static arguments'):
                call(X, n)
        np.testing.assert_array_equal(call(X, (1,)), X + 1)


@pytest.mark.parametrize('keep', [False, True])
def test_keep_unused(keep):
    drop = lambda x, unused: x + 1  # noqa: E731
    f = on_eight(ROWS, None, keep_unused=keep)(drop)
    g = jax.jit(drop, in_shardings=(on(ALL), None), keep_unused=keep)
    ours, theirs = (program(h.lower(X, X).compile()) for h in (f, g))
    assert ours == theirs
    assert ours.partition('ENTRY')[2].count(' parameter(') == 1 + keep


@pytest.mark.parametrize('inline', [False, True])
def test_inline(inline):
    f = sharded(None, inline=inline)(lambda x: jnp.sin(x) + 1)
    g = jax.jit(lambda x: jnp.sin(x) + 1, inline=inline)
    ours, theirs = (str(jax.make_jaxpr(lambda x, h=h: h(x))(X)) for h in (f, g))
    assert ours == theirs


def test_compiler_options():
    with pytest.raises(Exception, match='no_such_option'):
        on_eight(ROWS, compiler_options={'no_such_option': True})(lambda x: x + 1)(X)
    decorate = functools.partial(on_eight, compiler_options={'xla_embed_ir_in_executable': True})
    np.testing.assert_array_equal(decorate(ROWS)(lambda x: x + 1)(X), X + 1)
    # the constraints of out= are around a nested jit
    mapped = jax.vmap(decorate('b*', out='b*')(lambda x: x + 1))
    np.testing.assert_array_equal(mapped(X), X + 1)


# ------------------------------------------------------------------------------- methods of jit


@pytest.mark.parametrize(('args', 'kwargs'), [((X, W), {}), ((X,), {'w': W})])
def test_lower_trace_and_eval_shape_are_those_of_jit(args, kwargs):
    f = on_eight(ROWS, 'y z -> * y z', out='x z -> x* z')(matmul)
    g = jax.jit(matmul, in_shardings=(on(ALL), on()), out_shardings=on(ALL))
    ours, theirs = f.eval_shape(*args, **kwargs), g.eval_shape(X, W)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert ours.sharding.is_equivalent_to(theirs.sharding, 2)
    assert str(f.trace(*args, **kwargs).jaxpr) == str(g.trace(X, W).jaxpr)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (args, kwargs))
    by_hand = program(g.lower(X, W).compile())
    for positional, named in ((args, kwargs), structs):
        assert program(f.lower(*positional, **named).compile()) == by_hand


def test_in_shardings_and_out_shardings_by_parameter():
    f = on_eight(ROWS, None, out='x z -> x z*')(matmul)
    rows, columns = (make_sharding(text, mesh=EIGHT) for text in (ROWS, 'a b -> a b*'))
    asked = f.in_shardings(X, w=W)
    assert list(asked.items()) == [('x', rows), ('w', None)]
    assert f.out_shardings(X, W) == columns
    assert on_eight(None, 'y z*')(matmul).out_shardings(X, W) is None


# ------------------------------------------------------------------------- as often as jit itself


@pytest.mark.parametrize(
    ('spec', 'out'),
    [
        (ROWS, None),
        (ROWS, 'x y -> * x y'),
        ('... y -> ... y*', None),
        ('... y -> ... y*', '... y -> ... y*'),
        (None, '... y -> ... y*'),
        (lambda path, leaf: ROWS, lambda path, leaf: 'x y -> x y*'),
    ],
)
def test_each_type_is_traced_and_compiled_once(spec, out):
    """Like jit, for calls before or after `lower`, by position or by keyword."""
    body = counted(lambda x: jnp.sin(x))
    f = on_eight(spec, out=out)(body)
    types = [X, np.ones((16, 8), np.float32), X.astype(np.int32)]
    with counting() as counts:
        f.lower(X).compile()
        for x in types * 2:
            f(x), f(x=x)
    assert (body.runs, counts.of('<lambda>')[1]) == (3, 3)


@pytest.mark.parametrize('out', ['... -> * ...', {'a': '... b -> ... b*', 'b': None}])
def test_ellipsis_in_out_over_a_tree_is_one_trace(out):
    body = counted(lambda x: {'a': x, 'b': [x[0], x.sum()]})
    f = on_eight('... -> * ...', out=out)(body)
    assert is_sharded_as(f(X)['a'], on() if isinstance(out, str) else on(None, ALL))
    f(X)
    assert body.runs == 1


# ------------------------------------------------------------------------------- errors inside


def test_errors_of_jax_name_the_function_and_not_ours():
    @on_eight('a*', None)
    def chosen(x, flag):
        return x if flag else x + 1

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        chosen(np.ones(16), True)
    assert f'the function chosen at {__file__}' in str(caught.value)
