"""topology: GPU clusters you don't have. What compiles needs JAX's CUDA plugin, but no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import struct
from refusal import refusal
from spawn import python_path

from einshard import (
    UnexpectedCollectives,
    assert_collectives,
    device_mesh,
    einshard,
    expect_collectives,
    explain,
    plan,
    sharded,
    to_jax,
    topology,
)
from einshard._chips.table import GPUS, find_chip
from einshard._explain.golden_files import golden_text
from einshard._program.cost.network import Network
from einshard._sharding import cuda_plugin
from einshard._sharding.gpu_names import is_gpu_name, read_gpu_name

# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'sizes'),
    [
        ('h100:8', '1x1x8'),
        ('h100:1x8', '1x1x8'),
        ('h100:4x8', '4x1x8'),
        ('h100:1', '1x1x1'),
        ('h100:7', '1x1x7'),
        ('a100-40gb:2x4', '2x1x4'),
        ('h100:8192x8', '8192x1x8'),
        ('gb200:2x72', '2x18x4'),
        ('gb300:72', '1x18x4'),
        ('gb200:3', '1x1x3'),
        ('gb200:3x8', '3x2x4'),
        ('rtx6000pro:8', '1x1x8'),
        ('rtx6000pro:2x8', '2x1x8'),
    ],
)
def test_domains_hosts_and_gpus(name, sizes):
    gpu, found = read_gpu_name(name)
    assert (gpu, found) == (GPUS[name.partition(':')[0]], sizes)


@pytest.mark.parametrize(
    ('name', 'sentence', 'fix'),
    [
        ('h100', "'h100' is not a valid topology name", "'h100:8'"),
        ('gb200', "'gb200' is not a valid topology name", "'gb200:72'"),
        ('gpu', "'gpu' is not a valid topology name", None),
        ('cuda', "'cuda' is not a valid topology name", None),
        ('gpu:2x4', "'gpu' is not a GPU that einshard knows", None),
        ('v100:8', "'v100' is not a GPU that einshard knows", None),
        ('h800:8', "'h800' is not a GPU that einshard knows", None),
        ('gh200:1', "'gh200' is not a GPU that einshard knows", None),
        ('h100-pcie:8', "'h100-pcie' is not a GPU that einshard knows", None),
        ('h100:0', "'h100:0' has no GPUs", None),
        ('h100:8193x8', "'h100:8193x8' has more than 65,536 GPUs", None),
        ('h100:9999999', "'h100:9999999' is not a valid topology name", "'h100:8'"),
        ('h100:4x8x2', "'h100:4x8x2' is not a valid topology name", "'h100:8'"),
        ('h100:\uff18', "'h100:\uff18' is not a valid topology name", "'h100:8'"),
        (
            'h100:16',
            "'h100:16' has 16 GPUs in an NVLink domain, but h100 has at most 8",
            "'h100:2x8'",
        ),
        (
            'gb200:2x80',
            "'gb200:2x80' has 80 GPUs in each NVLink domain, but gb200 has at most 72",
            None,
        ),
        (
            'rtx6000pro:16',
            "'rtx6000pro:16' has 16 GPUs in a host, but rtx6000pro has at most 8",
            "'rtx6000pro:2x8'",
        ),
        (
            'gb200:2x6',
            "'gb200:2x6' has 6 GPUs in a domain, which do not fill hosts of 4",
            "'gb200:2x8'",
        ),
    ],
)
def test_invalid_names(name, sentence, fix):
    error = refusal(topology, name)
    assert (error.sentence, error.fix) == (sentence, fix)
    if 'hosts of' in sentence:
        assert error.facts == {'GPUs in a domain': '1 to 4, or a multiple of 4'}
    else:
        is_known = name.partition(':')[0] in GPUS and 'not a valid' not in sentence
        assert error.facts.get('GPUs') == (None if is_known else ', '.join(GPUS))
        assert "'h100:4x8'" in error.facts['GPU clusters']


@pytest.mark.parametrize(
    ('name', 'fix'),
    [
        ('H100:8', 'h100:8'),
        ('h100: 4 x 8', 'h100:4x8'),
        ('A100-40GB:8', 'a100-40gb:8'),
        ('a2-highgpu-8g', 'a100-40gb:8'),
        ('a2-ultragpu-8g', 'a100:8'),
        ('a3-highgpu-8g', 'h100:8'),
        ('a3-megagpu-8g', 'h100:8'),
        ('a3-ultragpu-8g', 'h200:8'),
        ('a4-highgpu-8g', 'b200:8'),
        ('a4x-highgpu-4g', 'gb200:72'),
        ('a4x-maxgpu-4g-metal', 'gb300:72'),
        ('g4-standard-384', 'rtx6000pro:8'),
        ('p4d.24xlarge', 'a100-40gb:8'),
        ('p4de.24xlarge', 'a100:8'),
        ('p5.48xlarge', 'h100:8'),
        ('p5en.48xlarge', 'h200:8'),
        ('p6-b200.48xlarge', 'b200:8'),
        ('ND H100 v5', 'h100:8'),
        ('Standard_ND96isr_H200_v5', 'h200:8'),
        ('GB200 NVL72', 'gb200:72'),
        ('DGX B300', 'b300:8'),
        ('NVIDIA H100 80GB HBM3', 'h100:8'),
        ('H100 NVL', None),
        ('A100-PCIE-40GB', None),
    ],
)
def test_names_of_machines_and_other_spellings(name, fix):
    assert refusal(topology, name).fix == (fix and f"'{fix}'")


def test_the_page_lists_every_gpu():
    page = Path(__file__).parents[1] / 'docs' / 'gpus.md'
    if not page.exists():
        pytest.skip('no checkout')
    table = page.read_text(encoding='utf-8').partition('| GPU |')[2].partition('\n\n')[0]
    listed = {}
    for names, domain, host in re.findall(r'^\| (`.*) \| (.*) \| (.*) \|$', table, re.MULTILINE):
        most = [int(re.findall(r'\d+', text)[-1]) for text in (domain, host) if 'no' not in text]
        listed |= dict.fromkeys(re.findall(r'`([^`]+)`', names), (most[0], most[-1]))
    assert listed == {name: (gpu.domain, gpu.host) for name, gpu in GPUS.items()}


def test_amd_gpus():
    facts = refusal(topology, 'mi300x:8').facts
    assert facts['AMD GPUs'] == "JAX's plugin for ROCm compiles only where a GPU is"


@pytest.mark.parametrize(
    'name', ['v5e:4x4', 'v5p-128', 'v4 lite:2x2', 'v5litepod-16', 'tpu7x:2x2x1', 'v2-8', 'tpu', '']
)
def test_names_of_tpus(name):
    assert not is_gpu_name(name)


@pytest.mark.parametrize(('name', 'fix'), [('h100:8', "topology('h100:2x8')"), ('h100:4x8', None)])
def test_slices_are_of_tpus(name, fix):
    error = refusal(topology, name, n_slices=2)
    assert error.sentence == (
        'n_slices= is for TPUs; with GPUs, the name has the number of NVLink domains'
    )
    assert error.fix == fix


# --- without what compiles ------------------------------------------------------------------------

VERSIONS = {
    'jaxlib': '0.12.0',
    'jax-cuda13-plugin': '0.12.0',
    'jax-cuda13-pjrt': '0.12.0',
    'jax-cuda12-plugin': '0.12.0',
}


def installed(monkeypatch, plugins, **versions):
    """Sets which plugins are installed, and with which versions."""
    versions = {**VERSIONS, **{name.replace('_', '-'): v for name, v in versions.items()}}
    found = {
        name: version
        for name, version in versions.items()
        if name == 'jaxlib' or any(plugin in name for plugin in plugins)
    }
    monkeypatch.setattr(cuda_plugin, '_is_installed', lambda name: name[-6:] in plugins)
    monkeypatch.setattr(cuda_plugin, '_version', found.get)
    monkeypatch.setattr(jax, '__version__', '0.12.0')


def test_no_plugin(monkeypatch):
    installed(monkeypatch, [])
    assert str(refusal(topology, 'h100:3x8')) == (
        "compiling for GPUs needs JAX's CUDA plugin, which is not installed\n"
        "  install:    pip install 'jax[cuda13-local]' nvidia-cuda-nvcc\n"
        '  or:         jax[cuda12] or jax[cuda13], which have both\n'
        '  exists for: Linux on x86_64 and aarch64'
    )


def test_two_plugins(monkeypatch):
    installed(monkeypatch, ['cuda12', 'cuda13'])
    assert str(refusal(topology, 'h100:3x8')) == (
        "JAX's plugins for CUDA 12 and CUDA 13 are both installed, and break each other\n"
        '  installed:  jax-cuda12-plugin 0.12.0, jax-cuda13-plugin 0.12.0, jax-cuda13-pjrt 0.12.0\n'
        '  remove one: pip uninstall jax-cuda12-plugin jax-cuda12-pjrt'
    )


def test_a_plugin_of_another_version(monkeypatch):
    installed(monkeypatch, ['cuda13'], jax_cuda13_pjrt='0.11.1')
    assert str(refusal(topology, 'h100:3x8')) == (
        "JAX's CUDA plugin has another version than jaxlib, so it would compile other programs\n"
        '  installed: jax-cuda13-pjrt 0.11.1, jaxlib 0.12.0\n'
        "  install:   pip install 'jax[cuda13-local]==0.12.0'"
    )


@pytest.mark.parametrize(
    ('program', 'says'),
    [
        (
            'echo jax.errors.JaxRuntimeError: INTERNAL: no >&2; exit 1',
            'INTERNAL: no',
        ),
        ('kill -SEGV $$', 'the process ended with SIGSEGV'),
        ('echo this is new >&2; exit 3', 'this is new'),
    ],
)
def test_no_ptx_compiler(monkeypatch, tmp_path, program, says):
    installed(monkeypatch, ['cuda13'])
    python = tmp_path / 'python'
    python.write_text(f'#!/bin/sh\n{program}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(python))
    cuda_plugin._check_compiler.cache_clear()
    error = refusal(topology, 'h100:3x8')
    assert error.sentence == (
        'XLA cannot compile a test program for GPUs, usually because there is no PTX compiler'
    )
    assert error.facts == {'XLA says': says, 'install': 'pip install nvidia-cuda-nvcc'}


def test_the_check_of_a_machine_with_gpus_is_not_skipped(monkeypatch):
    name = 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK'
    for before in (None, '0'):
        monkeypatch.delenv(name, raising=False)
        if before:
            monkeypatch.setenv(name, before)
        for has_gpu, within in ((False, '1'), (True, before)):
            monkeypatch.setattr(cuda_plugin, '_has_gpu', lambda has_gpu=has_gpu: has_gpu)
            with cuda_plugin._without_check():
                assert os.environ.get(name) == within
            assert os.environ.get(name) == before


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize('name', GPUS)
def test_compiles_for_every_gpu(name):
    mesh = topology(f'{name}:2x4', data=2, tensor=4)
    assert {device.device_kind for device in mesh.devices.flat} == {GPUS[name].kind}
    x, w, v = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (
            ((512, 1024), P('data', None)),
            ((1024, 2048), P(None, 'tensor')),
            ((2048, 1024), P('tensor', None)),
        )
    )
    report = explain(jax.jit(lambda x, w, v: jnp.tanh(x @ w) @ v), x, w, v, tries=0)
    assert report.collectives.counts == {'all-reduce': 1}
    assert report.collectives[0].along == 'tensor'
    assert report.chip == find_chip(GPUS[name].kind).name
    assert report.memory.arguments == 2 * (256 * 1024 + 2 * 1024 * 512)
    assert report.memory.capacity == GPUS[name].memory * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize(
    ('name', 'sizes', 'domain', 'host'),
    [
        ('h100:8', (2, 2, 2), 8, 8),
        ('h100:1', (1,), 1, 1),
        ('h100:7', (7,), 7, 7),
        ('h100:3x8', (3, 2, 2, 2), 8, 8),
        ('gb200:2x72', (2, 3, 3, 2, 2, 2), 72, 4),
        ('gb300:3x2', (3, 2), 2, 2),
        ('rtx6000pro:2x8', (2, 2, 2, 2), 8, 8),
    ],
)
def test_canonical_mesh(name, sizes, domain, host):
    """Domains, then hosts, then devices."""
    mesh = topology(name)
    assert mesh.axis_sizes == sizes
    assert mesh == device_mesh(mesh) == device_mesh([*mesh.devices.flat][::-1])
    assert topology(name) is mesh
    devices = [*mesh.devices.flat]
    assert [device.coords[0] for device in devices] == [i // domain for i in range(len(devices))]
    assert [device.process_index for device in devices] == [i // host for i in range(len(devices))]
    network = Network(devices, find_chip(devices[0].device_kind))
    assert list(network.slices) == [device.coords[0] for device in devices]


@pytest.mark.gpu
def test_named_axes():
    mesh = topology('h100:4x8', data=4, tensor=8, axis_types=AxisType.Explicit)
    assert dict(mesh.shape) == {'data': 4, 'tensor': 8}
    assert {*mesh.axis_types} == {AxisType.Explicit}
    assert [{d.coords[0] for d in row} for row in mesh.devices] == [{0}, {1}, {2}, {3}]
    error = refusal(topology, 'h100:4x8', data=4, tensor=4)
    assert error.fix is not None
    assert "topology('h100:4x8', " in str(error)


@pytest.mark.gpu
def test_the_compiler_is_tried_once(monkeypatch):
    topology('h100:8')
    monkeypatch.setattr(subprocess, 'run', None)
    assert topology('b200:3x8').size == 24


@pytest.mark.gpu
def test_one_topology_in_a_mesh():
    devices = [*topology('h100:8').devices.flat, *topology('b200:8').devices.flat]
    error = refusal(device_mesh, devices)
    assert error.sentence == 'all devices of a mesh must be of one topology'
    assert error.facts == {'devices': 'NVIDIA H100 80GB HBM3, NVIDIA B200'}
    mesh = Mesh(np.array(devices), ('x',))
    f = sharded('a@x', mesh=mesh)(jnp.tanh)
    for call in (
        lambda: f.lower(struct(16)),
        lambda: explain(f, struct(16), tries=0),
        lambda: explain(sharded('a@x')(jnp.tanh), struct(16), mesh=mesh, tries=0),
        lambda: einshard(struct(16), 'a@x', mesh=mesh),
        lambda: einshard(np.ones(16), 'a@x', mesh=mesh),
        lambda: to_jax('a@x', mesh=mesh),
    ):
        assert refusal(call).sentence == error.sentence
    with jax.set_mesh(mesh):
        in_context = refusal(explain, sharded('a@x')(jnp.tanh), struct(16))
    assert in_context.sentence == error.sentence


@pytest.mark.gpu
def test_a_topology_holds_no_arrays():
    mesh = topology('h100:8')
    f = sharded('b*', mesh=mesh)(lambda x: x + 1)
    for error in (refusal(einshard, np.ones(8), 'b*', mesh=mesh), refusal(f, np.ones(8))):
        assert 'can neither hold arrays nor run programs' in error.sentence


PROGRAM = """
import os, sys
import jax
before = []
if sys.argv[1] == 'after':
    try:
        before = jax.devices()
    except (AssertionError, RuntimeError):  # with JAX_PLATFORMS=cuda
        pass
    sys.stderr.write('-- einshard')
from einshard import explain, sharded, topology
function = sharded('a*', mesh=topology('h100:8'))(jax.numpy.tanh)
report = explain(function, jax.ShapeDtypeStruct((8,), 'float32'))
assert (report.device_kind, report.memory.arguments) == ('NVIDIA H100 80GB HBM3', 4), report
assert 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK' not in os.environ
assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '1'  # JAX's
if os.environ['JAX_PLATFORMS'] != 'cuda':
    assert {device.platform for device in jax.devices()} == {'cpu'}
    assert before in ([], jax.devices())
if (sys.argv[1], os.environ['JAX_PLATFORMS']) == ('after', 'cpu'):
    raise SystemExit  # JAX has loaded the plugin, which reads its log level then
square = sharded('a* b')(lambda a: a @ a)
report = explain(square, jax.ShapeDtypeStruct((400000,) * 2, 'bfloat16'), mesh=topology('h100:8'))
assert report.memory.total > report.memory.capacity, report.memory  # XLA logs this
"""


@pytest.mark.gpu
@pytest.mark.parametrize('platforms', ['', 'cpu', 'cuda'])
@pytest.mark.parametrize('when', ['before', 'after'])
def test_quiet_before_and_after_the_backend_starts(platforms, when):
    """What JAX prints when its backend starts without a GPU is JAX's."""
    unset = {'XLA_FLAGS', 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK'}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, when],
        env={**kept, 'JAX_PLATFORMS': platforms, 'PYTHONPATH': python_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr.rpartition('-- einshard')[2]) == ('', '')


PROGRAM_WITHOUT_BACKEND = """
import jax, numpy as np
from einshard import EinshardError, einshard, explain, plan, sharded, to_jax, topology
try:
    jax.devices()
except (AssertionError, RuntimeError):
    pass
else:
    raise SystemExit('JAX has devices')
mesh = topology('h100:2x4', data=2, tensor=4)
x, w = (jax.ShapeDtypeStruct(shape, 'float32') for shape in ((256, 1024), (1024, 4096)))
f = sharded('b d -> b@data d', 'd f -> d f@tensor', mesh=mesh)(jax.numpy.matmul)
assert explain(f, x, w).memory.arguments == 4 * (128 * 1024 + 1024 * 1024)
assert 'sorted(jax.devices()' in to_jax('b*', mesh=topology('h100:2x4'))
assert 'jax.make_mesh((2, 4)' in to_jax('b d -> b@data d@tensor', mesh=mesh)
assert "P('data')" in to_jax(f, x, w)
g = sharded('b d', 'd f')(jax.numpy.matmul)
assert plan(g, x, w, mesh=topology('h100:2x4'), compilations=2).explain().chip == 'H100'
for run in (f, lambda x, w: einshard(x, 'b@data d', mesh=mesh)):
    try:
        run(np.ones(x.shape, x.dtype), np.ones(w.shape, w.dtype))
    except EinshardError as error:
        assert 'can neither hold arrays nor run programs' in str(error)
    else:
        raise SystemExit('ran')
"""


@pytest.mark.gpu
def test_programs_where_jax_has_no_backend():
    """JAX_PLATFORMS=cuda on a machine without a GPU."""
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM_WITHOUT_BACKEND],
        env={**os.environ, 'JAX_PLATFORMS': 'cuda', 'PYTHONPATH': python_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


# --- programs ------------------------------------------------------------------------------------


@sharded('x y -> x* y', 'y z -> y z*', out='x z -> x* z')
def gathering(x, w):
    return x @ w


@sharded('x y -> x y*', 'y z -> y* z', out='x z -> * x z')
def summing(x, w):
    return x @ w


@pytest.mark.gpu
@pytest.mark.parametrize('name', ['h100:8', 'h100:2x8', 'gb200:2x4'])
@pytest.mark.parametrize(
    ('function', 'kind', 'shape', 'along'),
    [
        (gathering, 'all-gather', (512, 256), 'x|z'),
        (summing, 'all-reduce', (1024, 256), 'y'),
    ],
)
def test_matrix_products(name, function, kind, shape, along):
    mesh = topology(name)
    report = explain(function, struct(1024, 512), struct(512, 256), mesh=mesh, tries=0)
    (row,) = report.collectives
    assert (row.kind, row.along) == (kind, along)
    assert (row.groups, row.group_size, row.bytes) == (1, mesh.size, 4 * shape[0] * shape[1])
    assert_collectives(function, struct(1024, 512), struct(512, 256), allowed={kind: 1}, mesh=mesh)


def instructions(jitted, *args):
    """The instructions of the compiled program, without metadata such as source lines."""
    text = jitted.lower(*args).compile().as_text()
    return re.findall(r'^.* = .*', re.sub(r', metadata=\{[^}]*\}', '', text), re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize('name', ['h100:8', 'h100:2x8'])
def test_tensor_parallelism_by_hand(name):
    mesh = topology(name, data=2, tensor=topology(name).size // 2)
    hidden, out = NamedSharding(mesh, P('data', 'tensor')), NamedSharding(mesh, P('data'))

    @sharded('b d -> b@data d', 'd f -> d f@tensor', 'f d -> f@tensor d', out='b@data d', mesh=mesh)
    def mlp(x, w, v):
        return jax.nn.gelu(einshard(x @ w, 'b@data f@tensor')) @ v

    def by_hand(x, w, v):
        return jax.nn.gelu(jax.lax.with_sharding_constraint(x @ w, hidden)) @ v

    specs = P('data'), P(None, 'tensor'), P('tensor')
    in_shardings = [NamedSharding(mesh, spec) for spec in specs]
    jitted = jax.jit(by_hand, in_shardings=in_shardings, out_shardings=out)
    args = struct(64, 128), struct(128, 512), struct(512, 128)
    assert instructions(mlp, *args) == instructions(jitted, *args)


@pytest.mark.gpu
@pytest.mark.parametrize('name', ['h100:8', 'h100:2x8'])
def test_an_fsdp_step_by_hand(name):
    mesh = topology(name, data=topology(name).size)
    by_batch = NamedSharding(mesh, P('data'))
    weights = {'up': struct(4, 256, 512), 'down': struct(4, 512, 256)}

    def step_with(constrain):
        def loss(weights, x):
            @jax.checkpoint
            def layer(x, w):
                return constrain(x + constrain(jnp.tanh(x @ w['up'])) @ w['down']), None

            return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

        def step(weights, x):
            value, gradients = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

        return step

    spec = 'layers rows@data columns'
    step = step_with(lambda x: einshard(x, 'batch@data features'))
    decorate = sharded(
        spec, 'batch@data features', out=(spec, '... -> * ...'), mesh=mesh, donate_argnums=0
    )
    fsdp = NamedSharding(mesh, P(None, 'data'))
    by_hand = jax.jit(
        step_with(lambda x: jax.lax.with_sharding_constraint(x, by_batch)),
        in_shardings=(fsdp, by_batch),
        out_shardings=(fsdp, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    args = weights, struct(64, 256)
    assert instructions(decorate(step), *args) == instructions(by_hand, *args)


@pytest.mark.gpu
def test_expectations_and_golden_files():
    mesh = topology('h100:2x8')
    f = sharded('x y -> x* y', 'y z -> y z*', out='x z -> x* z', mesh=mesh)(jnp.matmul)
    args = struct(1024, 512), struct(512, 256)
    with pytest.warns(match='of matmul were not checked'), expect_collectives(()):
        f.lower(*args).compile()  # for devices of another process
    limited = sharded('x y -> x* y', 'y z -> y z*', mesh=mesh, collectives=())(jnp.matmul)
    assert 'collectives= allows no collectives, but' in str(explain(limited, *args, tries=0))
    with pytest.raises(UnexpectedCollectives, match='all-gather'):
        assert_collectives(f, *args, allowed=())
    text = golden_text(explain(f, *args, tries=0))
    assert text.startswith('matmul on 16 devices')
    assert '1 x all-gather f32[512,256], 1 group of 16' in text
    assert text == golden_text(explain(f, *args, tries=0))


@pytest.mark.gpu
def test_plain_jax():
    """jax.make_mesh keeps the order of GPUs."""
    mesh = topology('h100:2x4', data=2, tensor=4)
    text = to_jax('b d -> b@data d@tensor', mesh=mesh)
    assert 'jax.make_mesh((2, 4)' in text
    assert 'reorder' not in text
    types = (AxisType.Auto,) * 2
    devices = [*mesh.devices.flat]
    assert jax.make_mesh((2, 4), ('data', 'tensor'), types, devices=devices) == mesh


@pytest.mark.gpu
@pytest.mark.slow
def test_plan():
    def loss(w, x):
        w, x = einshard(w, 'd f'), einshard(x, 'b d')
        return jnp.sum(jnp.tanh(jnp.einsum('bd,df->bf', x, w)) ** 2)

    args = struct(1024, 4096), struct(256, 1024)
    found = plan(jax.grad(loss), *args, mesh=topology('h100:2x4'), compilations=4)
    assert found.explain().device_kind == 'NVIDIA H100 80GB HBM3'


def struct_of(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# --- findings -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_names_of_gradients_that_an_all_reduce_joins():
    mesh = topology('h100:4x8', batch=4, fsdp=8)

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(('batch', 'fsdp'))))

    def step(w, x):
        def loss(w):
            h = constrain(jnp.tanh(constrain(x) @ w['first']))
            h = constrain(jnp.tanh(h @ w['second']))
            return (constrain(h @ w['third']) ** 2).mean()

        return jax.tree.map(lambda a, b: a - b, w, jax.grad(loss)(w))

    def f32(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = {
        'first': f32((1024, 2048), None, 'fsdp'),
        'second': f32((2048, 512), 'fsdp', None),
        'third': f32((512, 4096), None, 'fsdp'),
    }
    apart = {'xla_gpu_reduce_scatter_combine_threshold_bytes': 0}
    jitted = jax.jit(step, donate_argnums=0, compiler_options=apart)
    report = explain(jitted, w, f32((8192, 1024), ('batch', 'fsdp')), tries=0)
    named = {c.of: c.arrays for c in report.collectives if c.kind == 'reduce-scatter'}
    assert named == {
        (f'result/{name}',): f'f32[{",".join(map(str, leaf.shape))}]' for name, leaf in w.items()
    }
    (summed,) = [c for c in report.collectives if c.kind == 'all-reduce']
    assert {*summed.of} == {f'result/{name}' for name in w}


@pytest.mark.gpu
def test_donated_caches_that_are_copied_for_a_layout():
    """XLA transposes the keys for the product, and back: the temporaries hold the copies."""
    mesh = topology('h100:1x8', tensor=8)

    def bf16(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def step(w, caches, x, at):
        new = []
        for keys, values in caches:
            q = (x @ w).reshape(16, 8, 4, 128)
            keys = jax.lax.dynamic_update_slice(keys, q[:, None, :, 0], (0, at, 0, 0))
            values = jax.lax.dynamic_update_slice(values, q[:, None, :, 1], (0, at, 0, 0))
            scores = jnp.einsum('bhgd,bthd->bhgt', q, keys)
            mask = jnp.arange(8192) <= at
            scores = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9))
            mixed = jnp.einsum('bhgt,bthd->bhgd', scores.astype(x.dtype), values)
            x = x + mixed.reshape(16, 4096)[:, :1024]
            new.append((keys, values))
        return x, new

    cache = bf16((16, 8192, 8, 128), None, None, 'tensor')
    arguments = bf16((1024, 4096), None, 'tensor'), [(cache, cache)] * 2, bf16((16, 1024)), 3
    report = explain(jax.jit(step, donate_argnums=1), *arguments, tries=0)
    found = [row for row in report.findings if row.kind == 'copied donation']
    assert report.memory is not None
    n_copied = round(sum(row.bytes for row in found) / 2**26)  # once in, once out: 64 MiB
    assert n_copied == 2
    line = step.__code__.co_firstlineno + 4
    assert [row.source for row in found] == [f'{__file__}:{line}']
    assert found[0].text.startswith('caches/0-1/0, bf16[16,8192,1,128] on a device, are donated')
    assert report.memory.temporaries >= 2**25


@pytest.mark.gpu
@pytest.mark.parametrize('kind', ['arrays', 'specs', 'constraints'])
def test_host_memory(kind):
    """JAX's described GPUs have no memories, but the compiler knows both."""
    mesh = topology('h100:1x8', x=8)
    on_device, on_host = 'a b -> a@x b', 'a b -> a@x b (in pinned_host)'
    shape = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    n_bytes = 8192 * 8192 * 4 // 8
    states, params = (einshard(shape, spec, mesh=mesh) for spec in (on_host, on_device))

    def moved(states, params):
        states = jax.device_put(states, jax.memory.Space.Device)
        return jax.device_put(0.9 * states + params, jax.memory.Space.Host)

    def constrained(states, params):
        return einshard(0.9 * einshard(states, on_device) + params, on_host)

    if kind == 'arrays':
        report = explain(jax.jit(moved), states, params, tries=0)
    elif kind == 'specs':
        report = explain(
            sharded(on_host, on_device, out=on_host, mesh=mesh)(moved), shape, shape, tries=0
        )
    else:
        with jax.set_mesh(mesh):
            report = explain(jax.jit(constrained), states, params, tries=0)
    assert report.memory is not None
    assert (report.memory.arguments, report.memory.results) == (n_bytes, 0)
    assert report.memory.temporaries >= n_bytes  # the states have to be on the device, too
    rows = (*report.arguments, *report.results)
    assert [row.placement for row in rows] == [on_host, on_device, on_host]
    assert report.findings == ()


@pytest.mark.gpu
def test_memory_kinds_that_jax_drops():
    mesh = topology('h100:1x8', x=8)
    shape = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    assert einshard(shape, 'a b -> a@x b', mesh=mesh, memory_kind='device').sharding.mesh is mesh
    refused = refusal(einshard, shape, 'a b -> a@x b', mesh=mesh, memory_kind='hbm')
    assert refused.facts['memory kinds'] == 'device, pinned_host'
    host = NamedSharding(mesh, P('x'), memory_kind='pinned_host')
    assert host.memory_kind is None  # JAX
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32, sharding=host)
    (finding,) = explain(jax.jit(lambda x: 2 * jax.device_put(x, host)), x, tries=0).findings
    assert 'so it drops memory_kind=. For host memory, use jax.memory.Space.Host' in finding.text


QUIET = """
import jax
from einshard import explain, topology
x = jax.ShapeDtypeStruct((64, 64), 'float32')
print(explain(lambda x: x @ x.T, x, mesh=topology('v5e:2x4'), tries=0).n_devices)
"""


@pytest.mark.gpu
def test_tpus_without_lines_about_cudnn():
    """The extra gpu has no cuDNN, which the plugin of JAX looks for when the backend starts."""
    pytest.importorskip('libtpu')
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
    done = subprocess.run(
        [sys.executable, '-c', QUIET],
        env={**environment, 'PYTHONPATH': python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, '8\n'), done.stderr
    assert done.stderr == ''
