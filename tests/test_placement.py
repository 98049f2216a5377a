"""einshard: places arrays, constrains traced values, annotates structs."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import memory
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal
from shards import ON_EIGHT, check_shards

import einshard as package
from einshard import (
    EinshardError,
    Rules,
    describe,
    device_mesh,
    einshard,
    einsum,
    make_sharding,
    per_device,
    sharded,
)

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture
def moves(monkeypatch):
    """The calls of `jax.device_put`: the number of leaves, and donate=."""
    calls = []
    original = jax.device_put

    def device_put(x, *args, **kwargs):
        calls.append((len(jax.tree.leaves(x)), kwargs.get('donate', False)))
        return original(x, *args, **kwargs)

    monkeypatch.setattr(jax, 'device_put', device_put)
    return calls


@pytest.fixture(params=['given', AUTO, EXPLICIT], ids=str)
def options(request, devices8):
    """Options of einshard for eight devices: mesh=, or none where the mesh is in context."""
    if request.param == 'given':
        yield {'mesh': devices8}
    else:
        with jax.set_mesh(device_mesh(devices8, axis_types=request.param)):
            yield {}


def user_mesh(types=(AUTO, AUTO)):
    return mesh_of(types=types, data=2, tp=4)


X = np.arange(128, dtype=np.float32).reshape(8, 16)


# --- values -----------------------------------------------------------------------------------

SOURCES = {
    'numpy': lambda options: X,
    'jax': lambda options: jnp.asarray(X),
    'placed': lambda options: einshard(X, 'a b -> a4 b2', **options),
    'placed differently': lambda options: einshard(X, 'a b -> b8 a', **options),
    'other devices': lambda options: jax.device_put(X, jax.devices()[9]),
}


@pytest.mark.parametrize('source', SOURCES)
@pytest.mark.parametrize(('expression', 'grid'), ON_EIGHT)
def test_shards_are_the_slices(devices8, expression, grid, source):
    before = SOURCES[source]({'mesh': devices8})
    x = einshard(before, expression, mesh=devices8)
    check_shards(x, X, grid, devices8)
    assert x.sharding == make_sharding(expression, mesh=devices8)
    assert x.committed
    np.testing.assert_array_equal(before, X)


@pytest.mark.parametrize(
    ('n', 'expression', 'grid'),
    [
        *[(n, 'a b -> a* b', [(0, n)]) for n in range(1, 17)],
        *[(n, 'a b -> * a b', [(None, n)]) for n in range(1, 17)],
        # counts that need another factorization
        (12, 'a b -> a4 b3', [(0, 4), (1, 3)]),
        (12, 'a b -> b2 a3 b2', [(1, 2), (0, 3), (1, 2)]),
    ],
)
def test_every_device_count(n, expression, grid):
    devices, full = jax.devices()[:n], np.arange(n * 144).reshape(n * 12, 12)
    check_shards(einshard(full, expression, mesh=devices), full, grid, devices)


# --- kinds of leaves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    'scalar', [1, True, 2.5, 1j, np.float32(2), np.int64(3), np.bool_(True), np.ones(())]
)
def test_scalars(devices8, scalar):
    x = einshard(scalar, '... -> * ...', mesh=devices8)
    assert x.shape == ()
    assert x == scalar
    assert x.sharding == make_sharding('... -> * ...', mesh=devices8)
    assert x.dtype == jnp.asarray(scalar).dtype
    assert x.weak_type == jnp.asarray(scalar).weak_type


@pytest.mark.parametrize(
    'dtype',
    ['f8', 'i8', 'u8', 'c16', 'f2', '?', 'u1', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'int4'],
)
def test_dtypes(devices8, dtype):
    full = np.arange(8).astype(getattr(ml_dtypes, dtype, dtype))
    x = einshard(full, 'a -> a*', mesh=devices8)
    assert x.dtype == jnp.asarray(full).dtype
    check_shards(x, full, [(0, 8)], devices8)


@pytest.mark.parametrize('dtype', ['U3', 'S3', 'M8[s]', object, [('f', 'i4')], np.longdouble])
def test_unsupported_dtypes(devices8, moves, dtype):
    bad = np.zeros(8, dtype)
    with pytest.raises(EinshardError, match='JAX does not support dtype'):
        einshard(bad, 'a -> a*', mesh=devices8)
    with pytest.raises(EinshardError, match="leaf 'bad'"):
        einshard({'bad': bad, 'x': X}, '... a -> a* ...', mesh=devices8)
    assert moves == []


def test_key_arrays(devices8):
    keys = jax.random.split(jax.random.key(0), 8)
    place = functools.partial(einshard, spec='a*', mesh=devices8)
    for placed in (place(keys), jax.jit(place)(keys)):
        assert placed.dtype == keys.dtype
        assert placed.sharding.is_equivalent_to(make_sharding('a*', mesh=devices8), 1)
        np.testing.assert_array_equal(jax.random.key_data(placed), jax.random.key_data(keys))
        assert place(placed) is placed
    key = einshard(keys[0], '... -> * ...', mesh=devices8)
    assert float(jax.random.uniform(key)) == float(jax.random.uniform(keys[0]))


@pytest.mark.parametrize(('shape', 'shard'), [((0, 8), (0, 4)), ((8, 0), (2, 0))])
def test_axes_of_size_zero(devices8, shape, shard):
    x = einshard(np.zeros(shape), 'a b -> a4 b2', mesh=devices8)
    assert {s.data.shape for s in x.addressable_shards} == {shard}


def test_structs(devices8):
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, weak_type=True)
    placed = einshard(x, 'a b -> a8 b', mesh=devices8)
    assert placed.sharding == make_sharding('a b -> a8 b', mesh=devices8)
    assert (placed.shape, placed.dtype, placed.weak_type) == ((8, 16), jnp.bfloat16, True)
    assert x.sharding is None
    abstract = einshard(x, 'a b -> a8 b', mesh=AbstractMesh((2, 4), ('x', 'y')))
    assert abstract.sharding.spec == P(('x', 'y'))


def test_leaves_that_are_not_arrays_are_returned():
    tree = {
        'functions': [jax.nn.relu, jax.nn.gelu, np.sin, functools.partial(jax.nn.relu), len],
        'types': [Unregistered, np.float32, jnp.float32, np.dtype('int8')],
        'settings': [Unregistered('w'), types.SimpleNamespace(n=1), 'text', pathlib.Path(), {1}],
        'none': None,
    }
    placed = einshard({**tree, 'array': np.ones(16)}, 'a*')
    assert describe(placed.pop('array')) == 'a -> a16'
    assert placed == tree
    assert einshard({'tree': tree}, {'tree': 'a*'}) == {'tree': tree}
    assert einshard(None, 'a b -> a* b') is None
    assert einshard({'b': None, 'f': len}, {'b': 'a*', 'f': None}) == {'b': None, 'f': len}


@pytest.mark.parametrize('thing', ['text', jnp.sin, np.float32, {1}])
@pytest.mark.parametrize('spec', ['a b -> a* b', '... -> * ...', P('x')])
def test_a_leaf_that_is_not_an_array_has_no_expression_of_its_own(thing, spec):
    def on_trace(x):
        return einshard({'x': x, 'thing': thing}, {'x': 'a*', 'thing': spec})['x']

    layers = [{'x': X}, {'x': thing}]
    mesh = device_mesh(x=16)
    for error in (
        refusal(einshard, thing, spec, mesh=mesh),
        refusal(einshard, layers, [None, {'x': spec}], mesh=mesh),
        refusal(jax.jit(on_trace), np.ones(16)),
    ):
        assert error.sentence.endswith(f'({type(thing).__name__}) is not an array')
    assert einshard(layers, [None, spec])[1]['x'] is thing


def test_leaves_without_a_spec_are_returned(moves):
    assert einshard(X, None) is X
    assert einshard({'x': X}, None)['x'] is X
    assert moves == []


def test_masked_arrays():
    masked = np.ma.masked_array(np.ones(16), mask=[True] * 16)
    jitted = sharded('a*')(lambda x: x + 1)
    on_each = per_device('a*', out='a*')(lambda x: x + 1)
    for _ in range(2):
        for error in (
            refusal(einshard, masked, 'a*'),
            refusal(einshard, {'w': masked}, Rules([('w', 'a*')])),
            refusal(Rules([('w', 'a*')]).table, {'w': masked}),
            refusal(einsum, 'a* -> a', masked),
            refusal(jitted, masked),
            refusal(on_each, masked),
        ):
            assert error.sentence == 'JAX does not support masked arrays'
        jitted(masked.filled(1))
        on_each(masked.filled(1))
    assert einshard(masked, None) is masked


# --- pytrees that are not registered -----------------------------------------------------------


@dataclasses.dataclass
class Unregistered:
    w: np.ndarray


@dataclasses.dataclass(slots=True)
class UnregisteredSlots:
    w: np.ndarray


@pytest.mark.parametrize(
    ('thing', 'instead'),
    [
        (Unregistered(np.ones(8)), 'register it: jax.tree_util.register_dataclass'),
        (UnregisteredSlots(np.ones(8)), 'register it: jax.tree_util.register_dataclass'),
        (types.SimpleNamespace(w=[np.ones(8)]), 'jax.tree_util.register_pytree_node'),
    ],
)
def test_unregistered_pytrees(thing, instead):
    rules = Rules([('.*', '* ...')])
    for error in (
        refusal(einshard, thing, 'a*'),
        refusal(einshard, {'inner': [thing]}, 'a*'),
        refusal(einshard, thing, rules),
        refusal(rules.table, {'inner': thing}),
    ):
        assert 'contains arrays but is not a registered pytree' in error.sentence
        assert instead in error.facts['instead']


class Foreign:
    """An array of another library, such as a torch.Tensor."""

    dtype = 'float32'

    def __init__(self, shape=(16,)):
        self.shape = shape

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, np.float32)


class OnAccelerator(Foreign):
    def __array__(self, dtype=None, copy=None):
        raise TypeError('use Tensor.cpu() first')

    def __dlpack__(self, **options):
        return super().__array__().__dlpack__(**options)

    def __dlpack_device__(self):
        return super().__array__().__dlpack_device__()


class OfObjects(Foreign):
    def __array__(self, dtype=None, copy=None):
        return np.array([None] * 16)


@pytest.mark.parametrize(
    ('array', 'call'),
    [
        (Foreign(), 'numpy.asarray(x)'),
        (OnAccelerator(), 'jax.dlpack.from_dlpack(x)'),
        (OfObjects(), None),
        (Foreign((2**40,)), None),  # would be read from a file
    ],
)
def test_arrays_of_other_libraries(array, call):
    name = type(array).__name__
    for error in (
        refusal(einshard, array, 'a*'),
        refusal(einshard, {'w': array}, 'a*'),
        refusal(einshard, {'w': array}, {'w': 'a*'}),
        refusal(einshard, {'w': array}, Rules([('w', 'a*')])),
        refusal(Rules([('w', 'a*')]).table, {'w': array}),
        refusal(sharded('a*')(lambda x: x), array),
        refusal(sharded(out='... -> * ...')(lambda: {'w': array})),
        refusal(per_device('a*', out='a*')(lambda x: x), {'w': array}),
    ):
        assert error.sentence == f'{name} is not a JAX or numpy array'
        assert error.facts.get('instead') == (call and f'convert it: {call}')
    if call is not None:
        converted = eval(call, {'numpy': np, 'jax': jax, 'x': array})
        assert describe(einshard(converted, 'a*')) == 'a -> a16'


@pytest.mark.parametrize('array', [np.ma.masked_array(np.ones(16)), Foreign(), OnAccelerator()])
def test_without_a_spec_the_error_is_that_of_jit(array):
    errors = []
    for decorate in (jax.jit, sharded(x='a*', array=None), sharded):
        function = decorate(lambda x, array: x)
        for given in (array, {'w': array}):
            with pytest.raises((TypeError, ValueError)) as caught:
                function(np.ones(16), given)
            errors.append(type(caught.value))
    assert len({*errors}) == 1
    assert EinshardError not in errors


@pytest.mark.parametrize(('shape', 'expression'), [((6, 8), 'a b -> a* b'), ((), 'a b -> a* b')])
def test_arrays_of_every_kind_that_do_not_fit(shape, expression):
    kinds = np.ones(shape, np.float32), jnp.ones(shape), struct(*shape)
    messages = {str(refusal(einshard, x, expression, mesh=jax.devices()[:4])) for x in kinds}
    assert len(messages) == 1


# --- mesh, donate, memory_kind ----------------------------------------------------------------


@pytest.mark.parametrize('types', list(itertools.product([AUTO, EXPLICIT], repeat=2)))
@pytest.mark.parametrize(
    'expression', ['a b -> a2 b4', 'a b -> a@data b@tp', 'a b -> a@data b*', 'a2 b4']
)
def test_mesh_axis_types(devices8, types, expression):
    mesh = user_mesh(types)
    x = einshard(X, expression, mesh=mesh)
    assert x.sharding == NamedSharding(mesh, P('data', 'tp'))
    check_shards(x, X, [(0, 2), (1, 4)], devices8)
    with jax.set_mesh(mesh):
        y = einshard(X, expression)
        assert y.sharding == x.sharding
        assert einshard(y, expression) is y
    for array in (X, jnp.asarray(X)):
        error = refusal(einshard, array, expression, mesh=mesh.abstract_mesh)
        assert 'no devices' in error.sentence


def test_order_of_devices(devices8):
    """A sequence of devices is sorted; a mesh keeps its order."""
    x = einshard(X, 'a b -> a8 b', mesh=devices8[::-1])
    assert x.sharding == make_sharding('a b -> a8 b', mesh=devices8)
    assert einshard(x, 'a b -> a8 b', mesh=iter(devices8)) is x
    mesh = Mesh(np.array(devices8[::-1]), ('x',))
    check_shards(einshard(X, 'a b -> a* b', mesh=mesh), X, [(0, 8)], devices8[::-1])


def test_donate_is_for_the_arrays_that_move(devices8, moves):
    tree = {name: einshard(X, 'a8 b', mesh=devices8) for name in ('moves', 'stays', 'control')}
    jax.device_put([tree['control']], [make_sharding('a b8', mesh=devices8)], donate=True)
    moves.clear()
    specs = {'moves': 'a b8', 'stays': 'a8 b', 'control': None, 'host': '8 a b'}
    placed = einshard({**tree, 'host': X}, specs, mesh=devices8, donate=True)
    assert moves == [(2, True)]
    assert placed['stays'] is tree['stays']
    assert not tree['stays'].is_deleted()
    # whether donated memory is reused depends on the backend: the CPU backend deletes nothing here
    assert tree['moves'].is_deleted() == tree['control'].is_deleted()
    np.testing.assert_array_equal(placed['moves'], X)
    einshard(placed['moves'], 'a8 b', mesh=devices8)
    assert moves[-1] == (1, False)


@pytest.mark.parametrize('kind', ['device', 'pinned_host', 'unpinned_host'])
def test_memory_kind(devices8, kind):
    x = einshard(X, 'a b -> a8 b', mesh=devices8, memory_kind=kind)
    assert x.sharding.memory_kind == kind
    assert {shard.data.sharding.memory_kind for shard in x.addressable_shards} == {kind}
    assert x.sharding == make_sharding('a b -> a8 b', mesh=devices8, memory_kind=kind)
    assert einshard(x, 'a b -> a8 b', mesh=devices8, memory_kind=kind) is x
    back = einshard(x, 'a b -> a8 b', mesh=devices8)
    assert (back is x) == (kind == 'device')
    assert back.sharding.memory_kind == 'device'
    np.testing.assert_array_equal(back, X)


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('old', ['device', 'pinned_host'])
@pytest.mark.parametrize('new', [None, 'device', 'pinned_host'])
def test_memory_kind_in_jit(devices8, types, old, new):
    with jax.set_mesh(device_mesh(devices8, axis_types=types)):
        x = einshard(X, 'a8 b', memory_kind=old)

        def move(x):
            return einshard(x, 'a8 b', memory_kind=new)

        target = new or 'device'
        space = memory.Space.Host if target == 'pinned_host' else memory.Space.Device
        assert jax.eval_shape(lambda x: move({'x': x})['x'], x).shape == X.shape
        assert jax.make_jaxpr(move)(x).out_avals[0].memory_space == space
        moved = jax.jit(move)(x)
        assert moved.sharding.is_equivalent_to(make_sharding('a8 b', memory_kind=target), 2)
        assert moved.sharding.memory_kind == target
        np.testing.assert_array_equal(moved, X)
        gradient = jax.jit(jax.grad(lambda x: (einshard(x, 'a8 b') ** 2).sum()))(x)
        assert gradient.sharding.memory_kind == old
        np.testing.assert_array_equal(gradient, 2 * X)


@pytest.mark.parametrize('kinds', [('device', 'pinned_host'), ('pinned_host', 'device')])
@pytest.mark.parametrize('tree', [lambda x: x, lambda x: [x, x + 1]])
def test_other_memory_and_device_order(devices8, kinds, tree):
    old, new = kinds
    reverse = Mesh(np.array(devices8[::-1]), ('x',))
    x = tree(einshard(X, 'a8 b', mesh=devices8, memory_kind=old))
    moved = einshard(x, 'a b@x', mesh=reverse, memory_kind=new)
    sharding = NamedSharding(reverse, P(None, 'x'), memory_kind=new)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(moved))
    jax.tree.map(np.testing.assert_array_equal, moved, tree(X))


@pytest.mark.parametrize('tree', [lambda x: x, lambda x: [x, x + 1]])
def test_donation_to_another_kind_of_memory(devices8, tree):
    on_devices = tree(einshard(X, 'a b -> a8 b', mesh=devices8))
    options = {'mesh': devices8, 'memory_kind': 'pinned_host'}
    error = refusal(einshard, on_devices, 'a b -> a8 b', donate=True, **options)
    assert error.sentence == 'an array cannot be donated if it moves to another kind of memory'
    assert error.facts['try'] == 'omit donate=True'
    moved = einshard(on_devices, 'a b -> a8 b', **options)
    jax.tree.map(np.testing.assert_array_equal, moved, tree(X))


@pytest.mark.parametrize('bad', ['hbm', '', 3])
def test_invalid_memory_kind(devices8, moves, bad):
    with pytest.raises(EinshardError, match='memory'):
        einshard(X, 'a b -> a8 b', mesh=devices8, memory_kind=bad)
    assert moves == []


# --- device_put calls -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('expression', 'same'),
    [(expression, expression) for expression, _ in ON_EIGHT]
    + [
        ('a b -> a2 b4', s)
        for s in ('a2 b4', 'a b -> a2 b*', 'x y -> x2 y2 y2', 'i ... j -> i2 ... j4')
    ],
)
def test_a_placed_array_is_returned(devices8, moves, expression, same):
    x = einshard(X, expression, mesh=devices8)
    moves.clear()
    assert einshard(x, same, mesh=devices8) is x
    assert einshard([x], same, mesh=devices8)[0] is x
    assert einshard(x, lambda path, leaf: same, mesh=devices8) is x
    assert moves == []


def test_a_tree_moves_in_one_device_put(devices8, moves):
    right = einshard(X, 'a b -> a8 b', mesh=devices8)
    moves.clear()
    tree = {'w': X, 'right': right, 'deep': [jnp.asarray(X), (right, {'x': X + 1})], 'n': 2}
    specs = {'w': 'a b -> a8 b', 'right': 'a8 b', 'deep': 'a b -> a8 b', 'n': '... -> * ...'}
    placed = einshard(tree, specs, mesh=devices8)
    assert moves == [(4, False)]
    assert placed['right'] is right
    assert placed['deep'][1][0] is right
    jax.tree.map(np.testing.assert_array_equal, placed, tree)
    check_shards(placed['deep'][1][1]['x'], X + 1, [(0, 8)], devices8)
    again = einshard(placed, specs, mesh=devices8)
    assert moves == [(4, False)]
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True))


@pytest.mark.parametrize('bad', [np.ones((6, 16)), np.ones(8), np.zeros((8, 16), 'U1')])
def test_nothing_moves_when_a_leaf_is_bad(devices8, moves, bad):
    source = einshard(X, 'a b -> b8 a', mesh=devices8)
    moves.clear()
    for tree in ({'a': X, 'z': bad}, {'a': bad, 'z': source}, [source, X, [bad]]):
        with pytest.raises(EinshardError):
            einshard(tree, 'a b -> a8 b', mesh=devices8, donate=True)
    with pytest.raises(EinshardError, match='no devices'):
        einshard({'x': X}, 'a b -> a8 b', mesh=AbstractMesh((8,), ('x',)))
    assert moves == []
    assert not source.is_deleted()


# --- inside a traced function -----------------------------------------------------------------


@pytest.mark.parametrize(('expression', 'grid'), ON_EIGHT)
def test_jit_constrains(devices8, expression, grid):
    def f(x):
        return einshard(x * 2, expression, mesh=devices8)

    assert 'sharding_constraint' in str(jax.make_jaxpr(f)(X))
    y = jax.jit(f)(X)
    check_shards(y, 2 * X, grid, devices8)
    assert y.sharding == make_sharding(expression, mesh=devices8)


BOTH, FIRST, LAST = (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)


@pytest.mark.parametrize(
    ('types', 'expression', 'spec', 'typed'),
    [
        # the type of a traced value has the explicit axes
        ((AUTO, AUTO), 'a b -> a2 b4', P('data', 'tp'), P(None, None)),
        (BOTH, 'a b -> a2 b4', P('data', 'tp'), P('data', 'tp')),
        (FIRST, 'a b -> a2 b4', P('data', 'tp'), P('data', None)),
        (LAST, 'a b -> a2 b4', P('data', 'tp'), P(None, 'tp')),
        (BOTH, 'a b -> b2 a4', P('tp', 'data'), P('tp', 'data')),
        (FIRST, 'a b -> a@(data,tp) b', P(('data', 'tp')), P('data', None)),
        (LAST, 'a b -> a@(tp,data) b', P(('tp', 'data')), P('tp', None)),
        (BOTH, 'a b -> 2 a4 b', P('tp'), P('tp', None)),
        (FIRST, 'a b -> a2 b 4', P('data'), P('data', None)),
        (LAST, 'a b -> 8 a b', P(), P(None, None)),
    ],
)
def test_jit_with_mesh_axis_types(types, expression, spec, typed):
    mesh = user_mesh(types)
    traced = []

    @jax.jit
    def f(x):
        y = einshard(x * 2, expression)
        traced.append(jax.typeof(y).sharding.spec)
        return y

    with jax.set_mesh(mesh):
        y = f(X)
    np.testing.assert_array_equal(y, 2 * X)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert traced == [typed]


@pytest.mark.parametrize(('types', 'axes'), [(LAST, 'data,tp'), (FIRST, 'tp,data')])
def test_jit_needs_explicit_axes_before_auto_ones(types, axes):
    with jax.set_mesh(user_mesh(types)):
        error = refusal(jax.jit(lambda x: einshard(x, f'a b -> a@({axes}) b')), X)
    assert "'data': 2, 'tp': 4" in error.facts['mesh']


@pytest.mark.parametrize('source', ['numpy', 'jax', 'placed', 'tree'])
def test_jit_constrains_constants(options, source):
    """jit does not keep the shardings of arrays that a function closes over."""
    x = {
        'numpy': X,
        'jax': jnp.asarray(X),
        'placed': einshard(X, 'a b -> a4 b2', **options),
        'tree': [einshard(X, 'a b -> a4 b2', **options)],
    }[source]
    f = jax.jit(lambda: jax.tree.map(lambda y: y + 0, einshard(x, 'a b -> a4 b2', **options)))
    (y,) = jax.tree.leaves(f())
    check_shards(y, X, [(0, 4), (1, 2)], jax.devices()[:8])
    scalar = jax.jit(lambda: einshard(2.5, '... -> * ...', **options) + 0)()
    check_shards(scalar, np.float32(2.5), [(None, 8)], jax.devices()[:8])


ON_12 = device_mesh(jax.devices()[:12])  # its axes have the sizes 3, 2, 2
ABSTRACT = AbstractMesh((8,), ('x',), axis_types=(AUTO,))
AUTO_8, EXPLICIT_8 = (device_mesh(jax.devices()[:8], axis_types=t) for t in (AUTO, EXPLICIT))
OTHER_MESH = 'mesh= must match the mesh in context'
DIVISIBLE, RANK = 'is not divisible by 4', '2 axes, but the array has 1 dimension'


@pytest.mark.parametrize(
    ('context', 'shape', 'expression', 'options', 'sentence'),
    [
        *[(mesh, (6, 16), 'a b -> a4 b2', {}, DIVISIBLE) for mesh in (AUTO_8, EXPLICIT_8)],
        *[(mesh, (8,), 'a b -> a4 b2', {}, RANK) for mesh in (AUTO_8, EXPLICIT_8)],
        (AUTO_8, (8, 16), 'a b -> a3 b', {}, 'is not divisible by 3'),
        (AUTO_8, (8, 16), 'a b -> a@tp b', {}, "no axis 'tp'"),
        (ON_12, (12, 12), 'a b -> a4 b3', {}, 'the counts do not match the mesh axes'),
        (EXPLICIT_8, (8, 16), 'a b -> a8 b', {'mesh': AUTO_8}, OTHER_MESH),
        (AUTO_8, (8, 16), 'a b -> a8 b', {'mesh': EXPLICIT_8}, OTHER_MESH),
        (None, (8, 16), 'a b -> a8 b', {'mesh': ABSTRACT}, 'must be the mesh in context'),
        (AUTO_8, (8, 16), 'a8 b', {'memory_kind': 'unpinned_host'}, "memory_kind='unpinned_host'"),
    ],
)
def test_errors_in_jit(context, shape, expression, options, sentence):
    for f in (lambda x: einshard(x, expression, **options),
              lambda x: einshard({'k': x}, expression, **options)):  # fmt: skip
        with jax.set_mesh(context) if context else contextlib.nullcontext():
            assert sentence in refusal(jax.jit(f), np.ones(shape)).sentence
            assert sentence in refusal(jax.eval_shape, f, np.ones(shape)).sentence


# --- transformations --------------------------------------------------------------------------


@pytest.fixture(params=[lambda f: f, jax.jit], ids=['eager', 'jit'])
def transform(request):
    return request.param


def test_grad(options, transform):
    weights = np.linspace(-1, 1, 16, dtype=np.float32)

    def loss(x):
        return (jnp.sin(einshard(x, 'a b -> a4 b2', **options)) * weights).sum()

    gradient = transform(jax.grad(loss))(X)
    np.testing.assert_allclose(gradient, np.cos(X) * weights, rtol=1e-5, atol=1e-6)
    assert len(gradient.sharding.device_set) == 8


@pytest.mark.parametrize('axis', [0, 1, 2])
def test_vmap_leaves_the_batch_axis_alone(devices8, options, transform, axis):
    batch = np.stack([X, X + 1, X + 2], axis)

    def f(x):
        return einshard(x * 2, 'a b -> a4 b2', **options)

    y = transform(jax.vmap(f, in_axes=axis, out_axes=axis))(jnp.asarray(batch))
    a, b = (i for i in range(3) if i != axis)
    check_shards(y, 2 * batch, [(a, 4), (b, 2)], devices8)


EAGER = {
    'grad': (lambda f: jax.grad(f)(jnp.asarray(X)), X),
    'vmap': (lambda f: jax.vmap(f)(jnp.stack([X, X + 1])), [(X * X).sum(), ((X + 1) * X).sum()]),
}


@pytest.mark.parametrize('eager', EAGER)
@pytest.mark.parametrize('source', SOURCES)
def test_arrays_that_an_eager_transformation_does_not_trace(devices8, options, eager, source):
    constant, placed = SOURCES[source](options), []

    def f(x):
        placed.append(einshard(constant, 'a b -> a4 b2', **options))
        return (x * placed[-1]).sum()

    run, expected = EAGER[eager]
    if source == 'other devices' and not options:
        # JAX hides the devices of the mesh in context here
        with pytest.raises(EinshardError, match='to the devices of the mesh'):
            run(f)
    else:
        np.testing.assert_allclose(run(f), expected, rtol=1e-6)
        check_shards(placed[0], X, [(0, 4), (1, 2)], devices8)


# --- threads ----------------------------------------------------------------------------------


def test_threads_agree(devices8, in_threads):
    package.clear_caches()

    def work(i):
        found = []
        for expression, grid in ON_EIGHT[i % 9 :] + ON_EIGHT[: i % 9]:
            x = einshard({'x': X + i}, expression, mesh=devices8)['x']
            check_shards(x, X + i, grid, devices8)
            assert einshard(x, expression, mesh=devices8) is x
            found.append((expression, x.sharding))
        return dict(found)

    results = in_threads(16, work)
    assert all(result == results[0] for result in results)


# --- from mesh to mesh ------------------------------------------------------------------------

EXPLICIT_MESHES = {
    'xy': lambda: mesh_of(types=EXPLICIT, x=4, y=2),
    'yx': lambda: mesh_of(types=EXPLICIT, y=2, x=4),
    'e': lambda: mesh_of(types=EXPLICIT, e=4),
    'canonical': lambda: device_mesh(jax.devices()[:8], axis_types=EXPLICIT),
    'auto': lambda: jax.devices()[:6],
}


@pytest.mark.parametrize('after', EXPLICIT_MESHES)
@pytest.mark.parametrize('before', EXPLICIT_MESHES)
def test_from_one_explicit_mesh_to_another(before, after):
    x = np.arange(24.0 * 24).reshape(24, 24)
    here, there = EXPLICIT_MESHES[before](), EXPLICIT_MESHES[after]()
    for spec in ('a* b', 'a b*'):
        placed = einshard({'x': x}, spec, mesh=here)['x']
        for moved in (
            einshard(placed, 'a b*', mesh=there),
            einshard([placed, 1.0], ['a b*', None], mesh=there)[0],
            sharded('a b*', mesh=there, reshard=True)(lambda x: x)(placed),
        ):
            np.testing.assert_array_equal(moved, x)
            assert moved.sharding.is_equivalent_to(make_sharding('a b*', mesh=there), 2)
    keys = einshard(jax.random.split(jax.random.key(0), 24), 'a*', mesh=here)
    moved = einshard(keys, '* a', mesh=there)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
