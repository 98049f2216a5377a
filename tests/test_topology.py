"""topology: TPU slices you don't have, and reports of programs compiled for them."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from placed import struct, struct_on
from refusal import refusal

from einshard import (
    EinshardError,
    UnexpectedCollectives,
    assert_collectives,
    clear_caches,
    device_mesh,
    einshard,
    explain,
    plan,
    sharded,
    topology,
)

pytest.importorskip('libtpu', reason='libtpu describes TPUs, and is not installed')


@pytest.mark.parametrize(
    ('name', 'n', 'kind'),
    [
        ('v5e:4x4', 16, 'TPU v5 lite'),
        ('v6e:16x16', 256, 'TPU v6 lite'),
        ('v5p:2x2x2', 8, 'TPU v5'),
        ('v4:2x2x1', 8, 'TPU v4'),  # two cores to a chip
        ('v5e:2x2x1', 4, 'TPU v5 lite'),
    ],
)
def test_slices(name, n, kind):
    mesh = topology(name)
    assert mesh.size == n
    assert {device.device_kind for device in mesh.devices.flat} == {kind}
    assert mesh == device_mesh(mesh)
    assert topology(name) is mesh


def test_several_slices():
    mesh = topology('v5e:2x2', n_slices=3)
    assert mesh.axis_sizes == (3, 2, 2)
    slices = [device.slice_index for device in mesh.devices.flat]
    assert slices == [0] * 4 + [1] * 4 + [2] * 4
    assert topology('v5e:2x2', n_slices=3) is mesh
    assert topology('v5e:2x2').size == 4
    assert topology('3*v5e:2x2') is topology('1*v5e:2x2', n_slices=3) is mesh
    assert topology('2*v5e-4', data=2, tensor=4).axis_sizes == (2, 4)


@pytest.mark.parametrize(
    ('name', 'sentence'),
    [
        ('V9:2x2', "'V9' is not a TPU generation"),
        ('v5e', "'v5e' is not a valid topology name"),
        ('0*v5e:4x4', "'0*v5e:4x4' is not a valid topology name"),
        ('tpu7x-16', "'tpu7x-16' is not a valid topology name"),
        ('', "'' is not a valid topology name"),
        ('v5e:16', "'v5e:16' has 1 dimension, but v5e slices have 2"),
        ('v5e:3x3', "libtpu does not know the slice 'v5e:3x3'"),
        ('v5p:4x4x8_twisted', "libtpu does not know the slice 'v5p:4x4x8_twisted'"),
    ],
)
def test_invalid_names(name, sentence):
    error = refusal(topology, name)
    assert error.sentence == sentence
    known = ['2D slices', '3D slices', 'Cloud accelerator types']
    if 'libtpu' in sentence:
        assert error.facts['libtpu says'].startswith('INVALID_ARGUMENT: ')
        known.insert(0, 'libtpu says')
    elif 'not a' in sentence:
        known += ['GPUs', 'GPU clusters']
    assert list(error.facts) == known


@pytest.mark.parametrize('n_slices', [0, True, 2.0])
def test_numbers_of_slices(n_slices):
    sentence = refusal(topology, 'v5e:2x2', n_slices=n_slices).sentence
    assert sentence == f'n_slices= must be a positive integer, not {n_slices}'


def test_without_libtpu(monkeypatch):
    clear_caches()  # of a slice that another test has described
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert str(refusal(topology, 'v5e:2x4')) == (
        'topology() needs libtpu, which is not installed\n'
        "  topology: 'v5e:2x4'\n"
        "  install:  pip install 'jax[tpu]'"
    )


def test_collectives_on_sparse_cores():
    bf16 = struct_on(topology('tpu7x:2x2x1', data=4, model=2))
    x = bf16((8192, 4096), 'data', 'model', dtype=jnp.bfloat16)
    w = bf16((4096, 16384), 'data', 'model', dtype=jnp.bfloat16)
    report = explain(jax.jit(lambda x, w: jax.nn.relu(x @ w) @ w.T), x, w, tries=0)
    sent = {(c.kind, c.along): c.total_bytes for c in report.collectives}
    assert sent == {
        ('all-gather', 'data'): 4096 * 8192 * 2 * 3 // 4,
        ('all-reduce', 'model'): 2048 * 4096 * 2,
        ('all-gather', 'model'): 2048 * 4096 * 2 // 2,
    }


def test_programs_that_jax_cannot_read(monkeypatch):
    def as_text(_):
        raise jax.errors.JaxRuntimeError(
            'INTERNAL: instruction should have 1 operands\n*** trace ***'
        )

    monkeypatch.setattr(jax.stages.Compiled, 'as_text', as_text)
    assert str(refusal(explain, jax.jit(jnp.sin), jnp.ones(4), tries=0)) == (
        f'JAX {jax.__version__} cannot read the compiled program of sin\n'
        '  it says: INTERNAL: instruction should have 1 operands\n'
        "  instead: install the compiler of this version of JAX: pip install 'jax[tpu]'"
    )


VARIABLES = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'here',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
PROGRAM = """
import os
import jax
import numpy as np
from einshard import einshard, explain, topology
from jax._src import xla_bridge
before = dict(os.environ)  # JAX sets TPU_SKIP_MDS_QUERY when it is imported
{}
assert os.environ == before
print(xla_bridge.backends_are_initialized())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ('line', 'starts_a_backend'),
    [
        ("assert topology('v5e:4x4').size == 16", False),
        ("topology('v5e:4x4'), jax.devices()", True),
        ("explain(jax.jit(jax.numpy.negative), einshard(np.ones(2), 'a*'))", True),
    ],
)
def test_libtpu_prints_nothing_without_tpus(line, starts_a_backend):
    """einshard sets variables while libtpu loads, and does not replace those that are set."""
    unset = {*VARIABLES, 'XLA_FLAGS', 'JAX_PLATFORMS'}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM.format(line)],
        env={**kept, 'TPU_WORKER_HOSTNAMES': 'here'},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout == f'{starts_a_backend}\n'


@pytest.mark.parametrize('has_tpu', [True, False])
def test_variables_are_set_while_libtpu_loads(monkeypatch, has_tpu):
    def variables():
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}

    asked = []
    in_dev = re.compile('/dev/(accel|vfio)')
    there = lambda path: has_tpu if in_dev.match(str(path)) else os.path.exists(path)  # noqa: E731
    monkeypatch.setattr(Path, 'exists', there)
    monkeypatch.setattr(topologies, 'get_topology_desc', lambda *_: asked.append(variables()))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TPU_WORKER_HOSTNAMES', 'here')
    alone = {'TPU_WORKER_HOSTNAMES': 'here'}
    clear_caches()
    with contextlib.suppress(AttributeError):  # there is no description
        topology('v5e:2x2')
    assert asked == [alone if has_tpu else VARIABLES]
    assert variables() == alone


@pytest.fixture
def described(monkeypatch):
    """The slices that `topology` asks libtpu for, which takes minutes for large ones."""
    asked = []

    def describe(name, *_, **options):
        asked.append(name)
        return SimpleNamespace(devices=jax.devices()[:1])

    clear_caches()
    monkeypatch.setattr(topologies, 'get_topology_desc', describe)
    yield asked
    clear_caches()


# --- names of the cloud ---------------------------------------------------------------------------


# from https://cloud.google.com/tpu/docs/v5p, v5e and v6e; v4 also from xpk's table
@pytest.mark.parametrize(
    ('cloud', 'name'),
    [
        ('v2-8', 'v2:2x2'),
        ('v3-32', 'v3:4x4'),
        ('v4-8', 'v4:2x2x1'),
        ('v4-32', 'v4:2x2x4'),
        ('v4-1536', 'v4:8x8x12'),
        ('v5p-8', 'v5p:2x2x1'),
        ('v5p-16', 'v5p:2x2x2'),
        ('v5p-64', 'v5p:2x4x4'),
        ('v5p-128', 'v5p:4x4x4'),
        ('v5p-256', 'v5p:4x4x8'),
        ('v5p-512', 'v5p:4x8x8'),
        ('v5p-1024', 'v5p:8x8x8'),
        ('v5p-2048', 'v5p:8x8x16'),
        ('v5p-4096', 'v5p:8x16x16'),
        ('v5p-8192', 'v5p:16x16x16'),
        ('v5p-12288', 'v5p:16x16x24'),
        ('v5litepod-1', 'v5e:1x1'),
        ('v5litepod-4', 'v5e:2x2'),
        ('v5litepod-8', 'v5e:2x4'),
        ('v5litepod-32', 'v5e:4x8'),
        ('v5litepod-128', 'v5e:8x16'),
        ('v5e-64', 'v5e:8x8'),
        ('v6e-256', 'v6e:16x16'),
        ('v5e:4x4', 'v5e:4x4'),
    ],
)
def test_default_shapes_of_the_cloud(described, cloud, name):
    topology(cloud)
    assert described == [name]


@pytest.mark.parametrize(
    ('name', 'counts'),
    [
        ('v5p-100', 'valid numbers of TensorCores: 8, 16, 32, 64, 128, 256, 384, ..., 12288'),
        ('v5p-9', 'valid numbers of TensorCores: 8, 16, 32, 64, 128, 256, 384, ..., 12288'),
        ('v2-4', 'valid numbers of TensorCores: 8, 32, 128, 256, 512'),
        ('v6e-512', 'valid numbers of chips: 1, 4, 8, 16, 32, 64, 128, 256'),
        ('v5litepod-0', 'valid numbers of chips: 1, 4, 8, 16, 32, 64, 128, 256'),
    ],
)
def test_sizes_that_the_cloud_does_not_have(name, counts):
    error = refusal(topology, name)
    assert error.sentence == f"'{name}' is not a Cloud accelerator type"
    assert counts in str(error)


@pytest.mark.parametrize(
    ('name', 'fix'),
    [
        (' v5e:4x4', "'v5e:4x4'"),
        ('V5E:4X4', "'v5e:4x4'"),
        ('v5e: 4 x 4', "'v5e:4x4'"),
        ('v5e-4x4', "'v5e:4x4'"),
        ('v5litepod:256', "'v5litepod-256'"),
        ('v6e:16', "'v6e-16'"),
        ('V5P-128 ', "'v5p-128'"),
        ('v4 Lite:2x2', "'v4 lite:2x2'"),
        ('v5e-16x', None),
        ('v5p-\uff11\uff12\uff18', None),
        ('H100', "'h100:8'"),
    ],
)
def test_other_spellings(name, fix):
    assert refusal(topology, name).fix == fix


@pytest.mark.parametrize(
    ('name', 'instead'),
    [
        ('v5p:16x16', 'v5p:4x8x8'),
        ('v5p:2x2x8', 'v5p:2x4x4'),
        ('v5p:8x8x1', 'v5p:4x4x4'),
        ('v5p:1x1x1', None),
        ('v5p:16x24x24', None),  # 9,216 chips
        ('v4:2x4x8', 'v4:4x4x4'),
        ('v5e:2x8', 'v5e:4x4'),
        ('v5e:16x32', None),
        ('v6e:1x8', 'v6e:2x4'),
        ('v3:8x32', 'v3:16x16'),
    ],
)
def test_shapes_that_the_cloud_does_not_offer(described, name, instead):
    with pytest.warns(match='Google Cloud') as caught:
        topology(name)
    [warning] = [str(one.message) for one in caught]
    assert warning.startswith(f"Google Cloud does not offer slices '{name}'")
    assert (instead is None) == ('it offers' not in warning)
    if instead is not None:
        assert f"it offers '{instead}'" in warning
        topology(instead)  # without a warning


@pytest.mark.parametrize(
    'name',
    # the tables at docs.cloud.google.com/tpu/docs/v5p and /v5e
    [f'v5p:{shape}' for shape in ('2x2x1', '2x2x2', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8')]
    + [f'v5p:{shape}' for shape in ('8x8x16', '8x16x16', '16x16x16', '16x16x24')]
    + [f'v5e:{shape}' for shape in ['1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16']]
    + ['v5e:8x4', 'v5e:2x2x1', 'v4:4x4x12', 'v5p:4x4x8_twisted', 'tpu7x:2x2x1', 'v4 lite:2x2'],
)
def test_shapes_that_the_cloud_offers(described, name):
    topology(name)  # without a warning
    assert described == [name]


def test_topology_warns_about_shapes():
    with pytest.warns(
        UserWarning, match="does not offer slices 'v5e:2x8'; with 16 chips, it offers"
    ):
        assert topology('v5e:2x8').size == 16


def test_a_name_of_tpu7x():
    assert refusal(topology, 'v7x:2x2x1').fix == "'tpu7x:2x2x1'"


# --- reports of TPU programs ----------------------------------------------------------------------


@sharded('x y -> x* y', 'y z -> y z*', out='x z -> x* z')
def gathering(x, w):
    return x @ w


@sharded('x y -> x y*', 'y z -> y* z', out='x z -> * x z')
def summing(x, w):
    return x @ w


@pytest.mark.parametrize('name', ['v5e:4x4', 'v5p:2x2x2'])
@pytest.mark.parametrize(
    ('function', 'kind', 'array', 'share', 'along'),
    [
        (gathering, 'all-gather', (512, 256), 1, 'x|z'),
        (summing, 'all-reduce', (1024, 256), 2, 'y'),
    ],
)
def test_matrix_products(name, function, kind, array, share, along):
    mesh = topology(name)
    report = explain(function, struct(1024, 512), struct(512, 256), mesh=mesh, tries=0)
    assert (report.n_devices, report.device_kind) == (mesh.size, mesh.devices.flat[0].device_kind)
    assert report.collectives.counts == {kind: 1}
    (row,) = report.collectives
    width = {'f32': 4, 'bf16': 2}[row.arrays.partition('[')[0]]
    assert row.arrays.endswith(f'[{array[0]},{array[1]}]')
    assert row.bytes == width * array[0] * array[1]
    assert report.network_bytes == share * row.bytes * (mesh.size - 1) // mesh.size
    if row.group_size == mesh.size and row.along:
        assert row.along == along
    assert report.memory.code > 0


def test_arrays_are_used_for_their_shapes_only():
    x, w = np.ones((1024, 512), np.float32), jnp.ones((512, 256))
    report = explain(gathering, x, w, mesh=topology('v5e:4x4'), tries=0)
    assert report.device_kind == 'TPU v5 lite'
    assert [row.bytes for row in report.arguments] == [4 * 1024 * 512 // 16, 4 * 512 * 256 // 16]


@pytest.mark.parametrize('name', ['v5e:2x2', 'v5e:4x4'])
def test_arrays_on_other_devices_are_used_for_their_shapes_only(name):
    mesh = topology(name)
    w = np.ones((64, 64), np.float32)
    arrays = [
        jax.device_put(w, jax.devices()[3]),
        einshard(w, '... -> * ...'),
        einshard(w, 'a* b', mesh=jax.devices()[:8]),
    ]
    f = sharded('a* b', out='a b*', mesh=mesh, reshard=True)(lambda x: x + 1)
    expected = f.lower(w).as_text()
    for x in arrays:
        assert f.lower(x).as_text() == expected
        assert f.trace(x=x).out_info.shape == f.eval_shape(x).shape == (64, 64)
        assert explain(f, x, tries=0).collectives.counts == {'all-to-all': 1}
        for run in (f, lambda x: einshard(x, 'a* b', mesh=mesh)):
            assert refusal(run, x).sentence.startswith('the devices of a topology can neither')


def test_plain_functions_are_traced_for_the_mesh_each_time():
    def f(x):
        return einshard(x * 2, 'a b -> a* b')

    for mesh in (topology('v5e:4x4'), topology('v5p:2x2x2'), device_mesh()):
        report = explain(f, struct(64, 128), mesh=mesh, tries=0)
        assert report.device_kind == mesh.devices.flat[0].device_kind
        assert report.results[0].placement == f'a b -> a{mesh.size} b'
    # without a sharding in the function, JAX would compile for the CPU
    report = explain(lambda x: x @ x.T, struct(64, 128), mesh=topology('v5e:2x4'), tries=0)
    assert (report.n_devices, report.device_kind) == (8, 'TPU v5 lite')
    assert report.results[0].placement == 'a b -> 8 a b'


def test_a_loop_that_gathers_the_same_array_in_each_iteration():
    @sharded('x y -> x* y', 'i y -> i* y')
    def loop(w, x):
        return jax.lax.fori_loop(0, 12, lambda i, x: jnp.tanh(x @ w), x)

    report = explain(loop, struct(64, 64), struct(64, 64), mesh=topology('v5e:2x4'), tries=0)
    (row,) = [row for row in report.collectives if row.kind == 'all-gather']
    if row.executions == 1:
        pytest.skip('this libtpu gathers before the loop')
    assert row.executions == 12
    (note,) = (note for note in report.notes if note.kind != 'exposed communication')
    assert (note.kind, note.bytes) == ('cost', row.total_bytes)
    assert note.text.startswith('all-gather of w along')
    mesh, wide = topology('v5e:2x4'), struct(512, 512)
    (finding,) = explain(loop, wide, wide, mesh=mesh, tries=4).findings
    assert finding.suggestion == "shard w with 'x y -> 8 x y'"
    assert finding.tried.network_bytes == 0


def test_the_same_program_runs_here_afterwards():
    """A function that was explained for TPUs still runs on the local devices."""
    explain(gathering, struct(1024, 512), struct(512, 256), mesh=topology('v5e:4x4'), tries=0)
    x, w = np.ones((32, 16), np.float32), np.ones((16, 32), np.float32)
    assert np.array_equal(gathering(x, w), x @ w)


def shift(x):
    """A Pallas kernel that sends its shard to the next device."""
    n = jax.lax.axis_size('x')

    def kernel(x_ref, out_ref, sent, received):
        to = jax.lax.rem(jax.lax.axis_index('x') + 1, n)
        copy = pltpu.make_async_remote_copy(x_ref, out_ref, sent, received, device_id=(to,))
        copy.start()
        copy.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
    )(x)


def double(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize(
    ('function', 'runs'),
    [
        (double, None),
        (shift, '1'),
        (lambda x: jax.lax.fori_loop(0, 5, lambda _, x: shift(x), x), '5'),
    ],
)
def test_communication_in_pallas_kernels(function, runs):
    mesh, rows = topology('v5e:2x2', x=4), jax.P('x')
    mapped = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )
    x = einshard(struct(32, 128), 'a@x b', mesh=mesh)
    report = explain(mapped, x, tries=0)
    if runs is None:
        assert report.collectives == ()
        return assert_collectives(mapped, x, allowed=())
    (row,) = report.collectives
    assert (row.kind, row.arrays, row.bytes) == ('custom-call', 'f32[8,128]', 8 * 128 * 4)
    assert (row.network_bytes, report.network_bytes) == (None, 0)
    assert re.search(rf' {runs}  custom-call  f32\[8,128\]  \? ', str(report))
    with pytest.raises(UnexpectedCollectives, match='unexpected collectives: 1 custom-call'):
        assert_collectives(mapped, x, allowed=())
    assert_collectives(mapped, x, allowed='custom-call')


@pytest.mark.parametrize(
    ('name', 'options'), [('v5e:2x2', {'n_slices': 10**9}), ('v5e:1000x1000', {})]
)
def test_more_chips_than_libtpu_describes(name, options):
    with pytest.raises(EinshardError, match='more than 65,536 chips'):
        topology(name, **options)


# --- functions that ask for the devices of this process ------------------------------------------


def asking(question):
    """A constraint that is dropped on CPUs, as in public code, and the line that asks."""

    def shard(x, *spec):
        if question() in ('cpu', 16):
            return x
        return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))

    return shard, question.__code__.co_firstlineno


QUESTIONS = {
    'jax.devices()': lambda: jax.devices()[0].platform,
    'jax.local_devices()': lambda: jax.local_devices()[0].platform,
    'jax.default_backend()': lambda: jax.default_backend(),
    'jax.device_count()': lambda: jax.device_count(),
    'jax.local_device_count()': lambda: jax.local_device_count(),
}


def asks(report):
    return [note.text for note in report.notes if note.kind == 'asks for local devices']


@pytest.mark.slow
@pytest.mark.parametrize('call', QUESTIONS)
def test_functions_that_ask_for_local_devices(call):
    shard, line = asking(QUESTIONS[call])
    mesh = topology('v5e:2x4', data=2, tensor=4)

    def mlp(batch, ws):
        x = shard(batch['x'] @ ws[0], 'data', 'tensor')
        return shard(jax.jit(lambda x: shard(x, 'data', None))(x @ ws[1]), 'data', None)

    x, w_in, w_out = struct(512, 256), struct(256, 1024), struct(1024, 256)
    specs = {'batch': 'b d -> b@data d', 'ws': ['d f -> d f@tensor', 'f d -> f@tensor d']}
    args = {'batch': {'x': x}, 'ws': [w_in, w_out]}
    placed = einshard(args, specs, mesh=mesh)
    own = sharded(**specs, mesh=mesh)(mlp)
    for function, given in ((jax.jit(mlp), placed), (mlp, placed), (own, args)):
        for tries in (0, 1):  # the second is traced already
            report = explain(function, **given, tries=tries)
            (text,) = asks(report)
            assert text.startswith(f'test_topology.py:{line}: {call} returns what this process has')
            assert '(cpu)' in text
            assert '(TPU v5 lite)' in text
        assert sys.getprofile() is None
    # on its own devices, a function may ask
    here = einshard(args, specs, mesh=device_mesh(jax.devices()[:8], data=2, tensor=4))
    assert not asks(explain(jax.jit(mlp), **here, tries=0))


def test_libraries_that_ask_for_local_devices():
    """A call in Flax, Equinox or JAX is not one of the user's."""
    nnx = pytest.importorskip('flax.nnx')
    mesh = topology('v5e:2x4', data=2, tensor=4)
    code = 'import jax\n\n\ndef silent(x):\n    jax.devices()\n    return x * 2\n'
    file = os.path.join(os.path.dirname(nnx.__file__), 'silent.py')
    library = {}
    exec(compile(code, file, 'exec'), library)
    x = struct(512, 256)

    def step(x):
        return nnx.relu(library['silent'](x))

    assert not asks(explain(step, einshard(x, 'b d -> b@data d', mesh=mesh), tries=0))


def test_plan_notes_questions_about_local_devices():
    shard, line = asking(QUESTIONS['jax.devices()'])

    @sharded('batch embed', 'embed mlp')
    def up(x, w):
        return shard(x @ w, 'data', None)

    found = plan(up, struct(512, 256), struct(256, 1024), mesh=topology('v5e:2x4'), compilations=1)
    (note,) = (note for note in found.notes if 'jax.devices()' in note)
    assert note.startswith(f'test_topology.py:{line}: jax.devices() returns what this process has')
    assert '(TPU v5 lite)' in note


def test_a_function_traced_as_on_the_target():
    """What the FAQ says: with the devices of the mesh, the constraints stay."""
    shard, _ = asking(QUESTIONS['jax.devices()'])
    mesh = topology('v5e:2x4', data=2, tensor=4)

    def constrained(question):
        x = einshard(struct(512, 256), 'b d -> b d', mesh=mesh)
        with question, jax.set_mesh(mesh):
            return explain(jax.jit(lambda x: shard(x * 2, 'data', None)), x, tries=0)

    asked = constrained(contextlib.nullcontext())
    patched = constrained(mock.patch('jax.devices', return_value=[*mesh.devices.flat]))
    assert (asked.results[0].placement, len(asks(asked))) == ('a b -> 8 a b', 1)
    assert (patched.results[0].placement, asks(patched)) == ('a b -> a@data b', [])
