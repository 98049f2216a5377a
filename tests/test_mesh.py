"""The canonical mesh, its device order and factors; and users' own meshes."""

import contextlib
import enum
import itertools
import random

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import struct
from refusal import refusal

import einshard
from einshard import device_mesh, make_sharding

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def user_mesh(shape, names, types=None, devices=None):
    devices = jax.devices() if devices is None else devices
    grid = np.array(devices[: np.prod(shape, dtype=int)], dtype=object).reshape(shape)
    return Mesh(grid, names, axis_types=types or (AUTO,) * len(names))


class StandIn:
    """A fake device for any machine; `isinstance` accepts it as a `jax.Device`."""

    __class__ = property(lambda self: jax.Device)
    platform = 'tpu'
    device_kind = 'stand-in'

    def __init__(self, id, process_index=0, **attributes):
        self.id = id
        self.process_index = process_index
        self.__dict__.update(attributes)

    def __repr__(self):
        return f'StandIn({self.id})'


# --- the canonical mesh ---------------------------------------------------------------------------


def test_same_object_for_any_order(devices):
    mesh = device_mesh(devices)
    assert list(mesh.devices.flat) == sorted(devices, key=lambda d: d.id)
    reversed_mesh = user_mesh((len(devices),), ('x',), devices=devices[::-1])
    shuffled = random.Random(0).sample(devices, len(devices))
    containers = tuple(devices), np.array(devices), iter(devices), dict.fromkeys(devices).keys()
    for same in (devices, *containers, shuffled, reversed_mesh):
        assert device_mesh(same) is mesh
    explicit = device_mesh(reversed_mesh, axis_types=EXPLICIT)
    assert explicit is device_mesh(devices, axis_types=EXPLICIT)
    assert explicit.axis_types == (EXPLICIT,) * len(mesh.axis_names)
    assert explicit.axis_sizes == mesh.axis_sizes
    assert list(explicit.devices.flat) == list(mesh.devices.flat)


def test_all_devices_by_default():
    assert device_mesh() is device_mesh(jax.devices())
    assert device_mesh(axis_types=EXPLICIT) is device_mesh(jax.devices(), axis_types=EXPLICIT)
    mesh, sharding = device_mesh(), make_sharding('a b -> a4 b4')
    einshard.clear_caches()
    assert device_mesh() == mesh
    assert make_sharding('a b -> a4 b4') == sharding


FACTORS = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2), 5: (5,), 6: (3, 2), 9: (3, 3), 12: (3, 2, 2)}


@pytest.mark.parametrize(
    ('hosts', 'sizes', 'order'),
    [
        # the host of each device, by its id
        *[([0] * n, sizes, range(n)) for n, sizes in FACTORS.items()],
        ([i // 8 for i in range(24)], (3, 2, 2, 2), range(24)),
        # not 3, 2, 2, 2: hosts are the slower network
        ([i // 3 for i in range(24)], (2, 2, 2, 3), range(24)),
        ([i // 6 for i in range(12)], (2, 3, 2), range(12)),
        ([i // 2 for i in range(12)], (3, 2, 2), range(12)),
        (range(24), (3, 2, 2, 2), range(24)),
        # hosts come before ids
        ([0, 1] * 4, (2, 2, 2), [0, 2, 4, 6, 1, 3, 5, 7]),
        # uneven hosts are one level
        ([0, 0, 0, 0, 1, 1], (3, 2), range(6)),
    ],
)
def test_axes_are_prime_factors_level_by_level_larger_first(hosts, sizes, order):
    row = [StandIn(i, process_index=host) for i, host in enumerate(hosts)]
    mesh = device_mesh(row[::-1])
    assert device_mesh(row) is mesh
    assert mesh.axis_sizes == sizes
    assert mesh.axis_names == tuple(f'd{i}' for i in range(len(sizes)))
    assert [device.id for device in mesh.devices.flat] == list(order)


def test_two_slices_slice_is_slowest():
    # ids alternate between slices; 2 slices x (2 x 3) chips
    places = list(itertools.product(range(2), range(3), range(2)))  # x, y, slice: slice fastest
    row = [
        StandIn(i, process_index=0, slice_index=s, coords=(x, y, 0), core_on_chip=0)
        for i, (x, y, s) in enumerate(places)
    ]
    mesh = device_mesh(row)
    assert mesh.axis_sizes == (2, 2, 3)
    found = [(d.slice_index, *d.coords[:2]) for d in mesh.devices.flat]
    assert found == list(itertools.product(range(2), range(2), range(3)))
    # only data parallelism, on the left, crosses slices
    sharding = make_sharding('batch d -> batch2 d6', mesh=row)
    assert sharding.spec == P('d0', ('d1', 'd2'))
    grid = sharding.mesh.devices.reshape(2, 6)
    assert [{d.slice_index for d in line} for line in grid] == [{0}, {1}]


def test_from_an_abstract_mesh():
    for types in (AUTO, EXPLICIT):
        mesh = device_mesh(AbstractMesh((2, 6), ('x', 'y')), axis_types=types)
        assert mesh == AbstractMesh((3, 2, 2), ('d0', 'd1', 'd2'), axis_types=(types,) * 3)
    assert device_mesh(AbstractMesh((1,), ('x',))).axis_sizes == (1,)


SIXTEEN = np.array(jax.devices(), dtype=object)
FIRST = jax.devices()[0]


@pytest.mark.parametrize(
    ('devices', 'sentence'),
    [
        ([], 'at least one device'),
        ([FIRST, FIRST], 'more than once'),
        ([FIRST, StandIn(1)], 'cpu and tpu'),
        *[([thing], 'must contain jax.Device objects') for thing in ('cpu', 0, ['cpu'])],
        *[(thing, 'must be a Mesh') for thing in (FIRST, make_sharding('*'), 'data', object)],
        (SIXTEEN.reshape(4, 4), 'an array with 2 dimensions'),
        ([[FIRST], [FIRST]], 'must contain jax.Device objects'),
    ],
)
def test_invalid_devices(devices, sentence):
    assert sentence in refusal(device_mesh, devices).sentence


@pytest.mark.parametrize('axis_types', ['auto', (AUTO,) * 4, 0])
def test_invalid_axis_types(axis_types):
    assert 'axis_types=' in refusal(device_mesh, axis_types=axis_types).sentence


@pytest.mark.parametrize(
    'mesh', ['xyz', 8, 2.5, object(), np.array(3), (4, 2), {'data': 4}, SIXTEEN.reshape(8, 2)]
)
def test_invalid_meshes_in_every_function(mesh):
    def f(x):
        return x

    x, options = np.ones((16, 16), np.float32), {'mesh': mesh}
    calls = [
        lambda: make_sharding('a -> a*', **options),
        lambda: einshard.einshard(x, 'a b -> a* b', **options),
        lambda: einshard.sharded('a b -> a* b', **options)(f),
        lambda: einshard.per_device('a* b', out='a* b', **options)(f)(x),
        lambda: einshard.Rules([('', 'a b -> a* b')]).table(x, **options),
        lambda: einshard.explain(f, x, **options),
    ]
    for call in calls:
        assert refusal(call).sentence.startswith('mesh= ')


@pytest.mark.parametrize('given', [(4, 2), {'data': 4}, SIXTEEN.reshape(8, 2)])
def test_suggested_meshes_work(given):
    fix = refusal(make_sharding, 'a -> a*', mesh=given).facts['try']
    mesh = eval(fix.removeprefix('mesh='), {'jax': jax, 'devices': given})
    assert make_sharding('a*', mesh=mesh).num_devices == mesh.size


@pytest.mark.parametrize('shape', [(2**31,), (2**16, 2**16), (2**61 - 1,)])
def test_too_many_devices_for_jax(shape):
    assert make_sharding('a@x', mesh=AbstractMesh((2**31 - 1,), ('x',))).spec == P('x')
    mesh = AbstractMesh(shape, ('x', 'y')[: len(shape)], axis_types=(AUTO,) * len(shape))
    for error in (refusal(device_mesh, mesh), refusal(make_sharding, 'a', mesh=mesh)):
        assert error.sentence == 'JAX supports at most 2147483647 devices in a mesh'
        assert error.facts['mesh'].startswith("'x': ")


# --- counts that do not match -------------------------------------------------------------------


def test_reshaped_mesh_under_auto():
    devices = jax.devices()[:12]
    mesh = device_mesh(devices)
    assert mesh.axis_sizes == (3, 2, 2)
    fits = make_sharding('a b -> a3 b4', mesh=devices)
    assert fits.mesh is mesh
    other = make_sharding('a b -> a4 b3', mesh=devices)
    assert other.mesh.axis_sizes == (2, 2, 3)
    assert other.spec == P(('d0', 'd1'), 'd2')
    assert other.mesh.axis_types == (AUTO,) * 3
    assert list(other.mesh.devices.flat) == list(mesh.devices.flat)
    # the same however the mesh is given
    assert make_sharding('a b -> a4 b3', mesh=mesh) == other
    assert make_sharding('a b -> a4 b3', mesh=devices[::-1]) == other
    assert make_sharding('a b -> a4 b3', mesh=other.mesh) == other
    assert make_sharding('a b -> a3 b4', mesh=other.mesh).mesh == fits.mesh


def test_reshaped_meshes_of_other_devices():
    row = [StandIn(i, process_index=i // 8) for i in range(24)]
    mesh = make_sharding('a b -> a8 b3', mesh=row).mesh
    assert mesh.axis_sizes == (2, 2, 2, 3)
    assert list(mesh.devices.flat) == row
    mesh = make_sharding('a b -> a4 b3', mesh=device_mesh(AbstractMesh((12,), ('x',)))).mesh
    assert mesh == AbstractMesh((2, 2, 3), ('d0', 'd1', 'd2'), axis_types=(AUTO,) * 3)


@pytest.mark.parametrize('abstract', [False, True])
def test_counts_that_do_not_fit_are_an_error_under_explicit(abstract):
    mesh = device_mesh(jax.devices()[:12], axis_types=EXPLICIT)
    mesh = mesh.abstract_mesh if abstract else mesh
    assert make_sharding('a b -> a3 b4', mesh=mesh).spec == P('d0', ('d1', 'd2'))
    assert refusal(make_sharding, 'a b -> a4 b3', mesh=mesh).facts['device grid'] == '4 x 3'


SIZES = [-1, 1, 2, 3, 5, 8, 30]


@pytest.mark.parametrize(
    ('n', 'axis_types'),
    [*((n, None) for n in (*range(1, 13), 16, 30, 60, 97, 4096)), (12, EXPLICIT), (60, EXPLICIT)],
)
def test_suggested_sizes_always_fit(n, axis_types):
    # a suggestion is not tried, as it has the number of devices for its product
    devices = AbstractMesh((n,), ('n',))
    scope = {'device_mesh': device_mesh, 'AxisType': AxisType, 'devices': devices}
    n_errors = 0
    for sizes in itertools.chain.from_iterable(
        itertools.product(SIZES, repeat=r) for r in (1, 2, 3)
    ):
        axes = dict(zip('xyz', sizes, strict=False))
        try:
            device_mesh(devices, axis_types=axis_types, **axes)
            continue
        except einshard.EinshardError as error:
            if error.fix is None:
                assert sizes.count(-1) > 1
                continue
            fix, fitting = error.fix, error.facts['sizes that fit'].split('; ')
        n_errors += 1
        mesh = eval(fix, scope)
        found = mesh.size, mesh.axis_names, *set(mesh.axis_types)
        assert found == (n, tuple(axes), axis_types or AUTO)
        for text in fitting:
            assert eval(f'device_mesh(devices, {text})', scope).size == n
    assert n_errors > 30


def test_suggested_devices_fit():
    n = jax.device_count()
    for size in range(1, n):
        fact = refusal(device_mesh, data=size).facts[f'on {size} devices']
        assert eval(fact, {'device_mesh': device_mesh, 'jax': jax}).size == size


# --- users' meshes ----------------------------------------------------------------------------


class Axis(enum.Enum):
    MODEL = 'model'


THREE = {'replica': 2, 'data': 2, 'tp': 4}
ONES = {'p': 1, 'q': 2, 'r': 1, 's': 4, 't': 1}


@pytest.mark.parametrize(
    ('sizes', 'expression', 'spec'),
    [
        # counts take consecutive axes
        (THREE, 'a b -> a4 b4', P(('replica', 'data'), 'tp')),
        (THREE, 'a b -> 2 a8 b', P(('data', 'tp'))),
        (THREE, 'a b -> b2 a2 4', P('data', 'replica')),
        (THREE, 'a b -> a16 b', P(('replica', 'data', 'tp'))),
        (THREE, 'a b -> b* a', P(None, ('replica', 'data', 'tp'))),
        (THREE, 'a b -> a@(tp,data) b', P(('tp', 'data'))),
        (THREE, 'a b -> a* b@data', P(('replica', 'tp'), 'data')),
        # axes of size one are skipped
        (ONES, 'a b -> a2 b4', P('q', 's')),
        (ONES, 'a b -> a8 b', P(('q', 's'))),
        (ONES, 'a b -> 8 a b', P()),
        (ONES, 'a b -> a@r b', P('r')),  # asked for by name
        ({'p': 1, 'q': 1}, 'a b -> a b', P()),
        ({'p': 1, 'q': 1}, 'a b -> a* b', P()),
        # a mesh without axes, and names that are not strings
        ({}, 'a b -> a b', P()),
        ({}, 'a b -> a* b', P()),
        ({1: 2, Axis.MODEL: 4}, 'a b -> a2 b4', P(1, Axis.MODEL)),
        ({1: 2, Axis.MODEL: 4}, 'a b -> a@1 b', P(1)),
    ],
)
def test_axes_of_user_meshes(sizes, expression, spec):
    for types in ([AUTO] * 5, [EXPLICIT] * 5, [AUTO, EXPLICIT, AUTO, EXPLICIT, AUTO]):
        mesh = user_mesh(tuple(sizes.values()), tuple(sizes), tuple(types[: len(sizes)]))
        for given in (mesh, mesh.abstract_mesh):
            sharding = make_sharding(expression, mesh=given)
            assert sharding.mesh is given
            assert sharding.spec == spec


@pytest.mark.parametrize(
    'names',
    [
        # JAX leaves an axis on P(0) unsharded and says nothing (tests/test_jax_facts.py)
        (0, 'tp'),
        ('', 'tp'),
        # JAX has two axes, 1 and '1', but an expression cannot tell them apart
        (1, '1'),
    ],
)
def test_invalid_axis_names(names):
    error = refusal(make_sharding, 'a b -> a2 b4', mesh=user_mesh((2, 4), names))
    assert 'distinct, nonempty names' in str(error)


def test_user_mesh_named_like_ours_in_another_order():
    # not in hardware order, so it must not be reshaped
    mesh = user_mesh((3, 2, 2), ('d0', 'd1', 'd2'), devices=jax.devices()[:12][::-1])
    assert make_sharding('a b -> a3 b4', mesh=mesh).mesh is mesh
    error = refusal(make_sharding, 'a b -> a4 b3', mesh=mesh)
    assert 'do not match the mesh axes' in error.sentence


# --- the mesh in context ----------------------------------------------------------------------


def test_mesh_in_context():
    mesh = user_mesh((2, 8), ('data', 'tp'))
    found = []
    with jax.set_mesh(mesh):
        assert make_sharding('a b -> a2 b8') == NamedSharding(mesh, P('data', 'tp'))
        # mesh= overrides it
        assert make_sharding('a b -> a8 b2', mesh=jax.devices()).mesh is device_mesh()
        jax.jit(lambda x: found.append(make_sharding('a b -> a2 b8')) or x)(1.0)
    assert found == [NamedSharding(mesh.abstract_mesh, P('data', 'tp'))]
    assert make_sharding('a b -> a2 b8').mesh is device_mesh()


def test_abstract_mesh_in_context():
    mesh = AbstractMesh((2, 1024), ('data', 'tp'))
    with jax.sharding.use_abstract_mesh(mesh):
        sharding = make_sharding('a b -> a2 b1024')
        assert sharding == NamedSharding(mesh, P('data', 'tp'))
        assert einshard.einshard(struct(2, 1024), 'a b -> a2 b1024').sharding == sharding
        error = refusal(einshard.einshard, np.ones((2, 1024)), 'a b -> a2 b1024')
    assert 'no devices' in error.sentence


# --- arrays of different expressions together -----------------------------------------------------

EXPRESSIONS_ON_12 = [
    'a b -> a3 b4',
    'a b -> a4 b3',  # reshaped
    'a b -> 2 b3 a2',
    'a b -> b12 a',
    'a b -> a2 b3 a2',  # reshaped
    'a b -> 12 a b',
]


@pytest.mark.parametrize('in_context', [False, True])
def test_different_expressions_in_one_jit(in_context):
    devices = jax.devices()[:12]
    x = np.arange(144, dtype=np.float32).reshape(12, 12)

    def total(*arrays):
        return sum((i + 1) * array for i, array in enumerate(arrays)).sum()

    with jax.set_mesh(device_mesh(devices)) if in_context else contextlib.nullcontext():
        arrays = [einshard.einshard(x, e, mesh=devices) for e in EXPRESSIONS_ON_12]
        assert float(jax.jit(total)(*arrays)) == 21 * x.sum()


# 'a b -> b12 a' is left out: compiled from these two arguments, it makes the XLA of jaxlib 0.12.0.1
# abort the process ('Could not slice dimension 1 with size 4'), with hand-made meshes as well;
# jaxlib 0.10.2 compiles it
@pytest.mark.parametrize('expression', [e for e in EXPRESSIONS_ON_12 if 'b12' not in e])
def test_result_of_different_expressions_is_sharded_as_requested(expression):
    devices = jax.devices()[:12]
    x = np.arange(144, dtype=np.float32).reshape(12, 12)
    a = einshard.einshard(x, 'a b -> a4 b3', mesh=devices)
    b = einshard.einshard(x, 'a b -> a3 b4', mesh=devices)
    out = make_sharding(expression, mesh=devices)
    result = jax.jit(lambda a, b: a + b, out_shardings=out)(a, b)
    np.testing.assert_array_equal(result, 2 * x)
    assert result.sharding == out


# --- TPU slices, as libtpu describes them -----------------------------------------------------


@pytest.fixture(scope='module')
def tpu():
    pytest.importorskip('libtpu', reason='libtpu describes TPU slices, and is not installed')
    from jax.experimental.topologies import get_topology_desc

    return lambda name: get_topology_desc(name, 'tpu').devices


TPU_SLICES = [
    # name, chips in x, y, z, cores a chip that are devices, mesh axis sizes
    ('v5e:4x4', (4, 4, 1), 1, (2,) * 4),
    ('v5e:16x16', (16, 16, 1), 1, (2,) * 8),
    ('v4:2x2x2', (2, 2, 2), 2, (2,) * 4),
    ('v5p:4x4x4', (4, 4, 4), 1, (2,) * 6),
    ('v5p:4x4x12', (4, 4, 12), 1, (2, 2, 2, 2, 3, 2, 2)),
]


@pytest.mark.parametrize(('name', 'chips', 'cores', 'sizes'), TPU_SLICES)
def test_tpu_order_is_x_y_z_core(tpu, name, chips, cores, sizes):
    devices = tpu(name)
    mesh = device_mesh(devices)
    assert device_mesh(devices[::-1]) is mesh
    found = [(*device.coords, device.core_on_chip) for device in mesh.devices.flat]
    assert found == list(itertools.product(*map(range, chips), range(cores)))
    assert mesh.axis_sizes == sizes


@pytest.mark.parametrize(('name', 'chips', 'cores', 'sizes'), TPU_SLICES)
def test_tpu_last_term_is_a_line_of_neighbors(tpu, name, chips, cores, sizes):
    devices = tpu(name)
    dimension = max(i for i, size in enumerate(chips) if size > 1)
    along = chips[dimension]
    expression = f'a b -> a* b{along} {cores if cores > 1 else ""}'
    sharding = make_sharding(expression, mesh=devices)
    n = len(devices)
    # the shards of b, for each shard of a: which device holds which column
    columns = {}
    for device, (rows, cols) in sharding.devices_indices_map((n, along)).items():
        columns.setdefault((rows.start, device.core_on_chip), {})[cols.start or 0] = device
    assert len(columns) == n // along
    for line in columns.values():
        coordinates = [np.array(line[i].coords) for i in range(along)]
        for here, there in itertools.pairwise(coordinates):
            step = there - here
            assert step[dimension] == 1
            assert np.abs(step).sum() == 1


def test_tpu_different_expressions_compile_together(tpu):
    """On TPU, meshes of different shapes have different device orders, which jit refuses to mix."""
    devices = tpu('v5e:4x4')
    shardings = tuple(make_sharding(e, mesh=devices) for e in ('a b -> a4 b4', 'b c -> b2 c4 2'))
    operands = (jax.ShapeDtypeStruct((64, 64), np.float32, sharding=s) for s in shardings)
    compiled = jax.jit(lambda a, b: a @ b).lower(*operands).compile()
    assert compiled.input_shardings[0] == shardings


def test_errors_list_axis_types_that_differ():
    types = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4, 2), ('x', 'y', 'z'), axis_types=types)
    error = refusal(make_sharding, 'a b +@x', mesh=mesh)
    assert error.facts['mesh'] == "'x': 2, 'y': 4, 'z': 2 (Explicit, Auto, Explicit)"
