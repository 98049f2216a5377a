"""explain at the size of real models: the train step of hlo/llama.py, for 256 TPUs and on CPU.

`hlo/v5e_16x16-llama*.txt.xz` are the programs that libtpu compiled, with 32 and 64 layers.
"""

import dataclasses
import functools
import importlib
import lzma
import math
import re
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import llama
from hlo.programs import MACHINES, B, D, F, floats
from jax.sharding import NamedSharding, PartitionSpec
from placed import mesh_of, struct
from test_collectives import kept

from einshard import einshard, explain, sharded, topology
from einshard._explain.collectives import Collectives
from einshard._explain.oversized import Oversized
from einshard._explain.roles import Payloads
from einshard._explain.stages import Stages
from einshard._page import page_text
from einshard._program.hlo.find_collectives import find_collectives, read_collectives
from einshard._program.hlo.flops import find_products, product_rows
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.slices import find_gather
from einshard._program.hlo.text import ArrayType, HloModule
from einshard._text import format_bytes

HLO = Path(__file__).parent / 'hlo'
LAYERS, CHUNKS = (32, 64), 4096 // 512
N_DEVICES = 256


@functools.cache
def text_of(layers):
    [path] = HLO.glob(f'v5e_16x16-llama{layers}-*.txt.xz')
    return lzma.open(path, 'rt', encoding='utf-8').read()


@functools.cache
def collectives_of(layers):
    return read_collectives(text_of(layers))


# --- collectives --------------------------------------------------------------------------------


def executions_by_depth(op_name, layers):
    """From the loops in an op_name: accumulation, in it layers, in them chunks of attention."""
    return math.prod([2, layers, CHUNKS][: op_name.count('while/body')])


def read_by_channel(text, layers):
    """How many channels have each (array, executions), by regular expressions; no permutes."""
    line = re.compile(r'= (\w+\[[\d,]*\]).* all-(?:gather|reduce|to-all)\(.*channel_id=(\d+),.*')
    names = dict(re.findall(r'calls=%([\w.-]+),.*op_name="([^"]*)"', text))
    channels = {}
    for computation in text.split('\n}\n'):
        inside = re.match(r'\s*%?([\w.-]+)', computation)
        for found in line.finditer(computation):
            array, channel = found.groups()
            op_name = re.search('op_name="([^"]*)"', found[0])
            op_name = op_name[1] if op_name else names.get(inside[1])
            op_name = MOVED.get(array, op_name)
            n = executions_by_depth(op_name, layers)
            channels.setdefault((channel, array), n)
    return Counter((array, n) for (_, array), n in channels.items())


# the compiler gathers two weights where the step accumulates gradients, and reshards the queries of
# a layer before its loop over their chunks
MOVED = {
    'bf16[128256,128]': 'while/body',
    'bf16[4096,16032]': 'while/body',
    'bf16[1,1,512,8,1,4,128]': 'while/body/while/body',
}


@pytest.mark.parametrize('layers', LAYERS)
def test_every_channel_is_one_collective(layers):
    text = text_of(layers)
    assert text.count('"AsyncCollectiveStart"') == 9
    assert len(re.findall('chain_id="2"', text)) == 19  # the links of one of them
    rows = Counter(
        (c.arrays, c.executions)
        for c in collectives_of(layers)
        if c.sent is None and c.kind != 'collective-permute' and ', ' not in c.arrays
    )
    assert rows == read_by_channel(text, layers)
    assert rows.total() > 30


@pytest.mark.parametrize('layers', LAYERS)
def test_every_collective_einsum_is_one_collective(layers):
    """The permutes of an einsum send about as much as the collective."""
    loops = re.findall(r' while\(.*body=%[\w.]*windowed_dot_general_body_(ag|rs)', text_of(layers))
    merged = [c for c in collectives_of(layers) if c.sent is not None]
    kinds = Counter({'all-gather': loops.count('ag'), 'reduce-scatter': loops.count('rs')})
    assert Counter(c.kind for c in merged) == kinds
    for c in merged:
        assert c.executions in (2, 2 * layers)
        assert (c.group_size - 1) / c.group_size < c.sent / c.bytes < 9 / 7
    permutes = [c for c in collectives_of(layers) if c.kind == 'collective-permute']
    assert all(c.bytes < 2**20 for c in permutes)


UNROLLED = """HloModule jit_f, num_partitions=4

%add (g: f32[8], s: f32[8]) -> f32[8] {
  %g = f32[8]{0} parameter(0)
  %s = f32[8]{0} parameter(1)
  ROOT %t = f32[8]{0} add(%g, %s)
}

ENTRY %main (w: f32[8], z: f32[8]) -> (f32[8], f32[8], f32[8]) {
  %w = f32[8]{0} parameter(0)
  %z = f32[8]{0} parameter(1)
  %a.1 = f32[8]{0} collective-permute(%w), channel_id=1, RIGHT
  %a.2 = f32[8]{0} collective-permute(%w), channel_id=2, LEFT
  %a.3 = f32[8]{0} collective-permute(%a.1), channel_id=3, RIGHT
  %b.1 = f32[8]{0} collective-permute(%z), channel_id=4, RIGHT
  %b.2 = f32[8]{0} fusion(%z, %b.1), kind=kLoop, calls=%add
  %b.3 = f32[8]{0} collective-permute(%b.2), channel_id=5, RIGHT
  %b.4 = f32[8]{0} fusion(%z, %b.3), kind=kLoop, calls=%add
  %b.5 = f32[8]{0} collective-permute(%b.4), channel_id=6, LEFT
  ROOT %all = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%a.2, %a.3, %b.5)
}
"""


def test_collective_einsums_that_are_unrolled():
    """The first einsum passes pieces on in both directions, the second passes on sums."""
    text = UNROLLED
    for ring, step in (('RIGHT', 1), ('LEFT', -1)):
        pairs = ','.join(f'{{{i},{(i + step) % 4}}}' for i in range(4))
        text = text.replace(
            ring,
            f'source_target_pairs={{{pairs}}}, metadata={{op_name="jit(f)/dot_general" '
            'stack_frame_id=3}',
        )
    pieces = ', '.join(['f32[8]'] * 4)
    assert [(c.kind, c.arrays, c.network_bytes) for c in read_collectives(text)] == [
        ('all-gather', pieces, 3 * 32),
        ('reduce-scatter', pieces, 3 * 32),
    ]
    others = read_collectives(text.replace('/dot_general', '/ppermute'))
    assert [c.kind for c in others] == ['collective-permute'] * 6


def test_layers_multiply():
    rows = {
        n: Counter(
            (c.kind, c.arrays.replace('[32,4096,128]', '[b,s,d]'), c.executions)
            for c in collectives_of(n)
        )
        for n in LAYERS
    }
    doubled = Counter()
    for (kind, shape, n), count in rows[32].items():
        doubled[kind, shape, 2 * n if n >= 64 else n] += count
    assert doubled == rows[64]


def test_weights_and_gradients_have_paths():
    graph = Graph(HloModule(text_of(32)))
    names = [parameter.op_name for parameter in graph.program.parameters]
    inputs = [(name, 'float32' if 'state' in name else 'int32') for name in names]
    payloads = Payloads(graph, inputs, {i: inputs[i][0] for i in graph.program.aliases})
    matrices = {name for name in llama.SHAPES if 'norm' not in name}
    gathered, summed = set(), set()
    for c in map(payloads.of, find_collectives(graph)):
        if c.role == 'weights':
            assert c.kind == 'all-gather'
            gathered |= {re.sub(r".*\['(\w+)'\]$", r'\1', path) for path in c.of}
        if c.role == 'gradients' and c.kind == 'reduce-scatter':
            assert c.is_backward
            assert {path.split("'")[1] for path in c.of} == {'params', 'm', 'v'}
            summed |= {path.split("'")[3] for path in c.of}
        if 4096 in c.array_types[0].shape[:2] and c.group_size == 8:
            assert c.role == 'activations'
    assert gathered == summed == matrices


def test_lines_outside_of_helpers():
    source = Path(llama.__file__).read_text().splitlines()

    def text(location):
        file, _, line = location.rpartition(':')
        assert file == 'tests/hlo/llama.py'
        return source[int(line) - 1]

    found = {(text(c.source), c.called_at) for c in collectives_of(32)}
    constrained = {outside for line, outside in found if 'with_sharding_constraint' in line}
    assert len(constrained) == 3
    assert all('constrain(' in text(outside) for outside in constrained)
    normed = {outside for line, outside in found if 'jax.lax.rsqrt' in line}
    assert normed
    assert all('rms_norm(' in text(outside) for outside in normed)
    assert {outside for line, outside in found if 'logits = ' in line} == {None}


# --- flops --------------------------------------------------------------------------------------


@pytest.mark.parametrize('layers', LAYERS)
def test_flops_on_tpu(layers):
    c = llama.Config(layers=layers)
    products = list(find_products(Graph(HloModule(text_of(layers)))))
    assert sum(product.total for product in products) * N_DEVICES == llama.flops(c)
    assert {product.dtype for product in products} == {'bf16', 'f32'}
    # 6 flops for each parameter and token; attention and remat come on top
    n = sum(np.prod([getattr(c, axis) for axis in axes]) for axes, _ in llama.SHAPES.values())
    n -= c.vocab * c.d  # the embedding is a lookup
    assert 1.2 < llama.flops(c) / (6 * n * c.batch * c.sequence) < 1.6


PRODUCTS = {  # how many of 2 * B * D * F flops, and whether the data axis shares them
    'product_scattered': (1, False),
    'fully_sharded': (5 * 16, True),
    'scanned': (2 * 12, True),
    'ring': (0, True),
}


@pytest.mark.parametrize(
    ('machine', 'name', 'text'),
    [
        pytest.param(machine, name, text, id=f'{machine}-{name}-{i}')
        for i, (machine, name, text) in enumerate(kept())
        # cuBLAS has its axes in backend_config, which the kept texts leave out
        if name in PRODUCTS and '__cublas' not in text
    ],
)
def test_flops_of_other_programs(machine, name, text):
    flops = sum(product.total for product in find_products(Graph(HloModule(text))))
    n, is_shared = PRODUCTS[name]
    data, model = MACHINES[machine]
    assert flops * model * (data if is_shared else 1) == n * 2 * B * D * F


BY_HAND = """HloModule jit_f

ENTRY %main (x: f32[4,6,8], w: f32[8,5]) -> f32[4,6,5] {{
  %x = f32[4,6,8]{{2,1,0}} parameter(0)
  %w = f32[8,5]{{1,0}} parameter(1)
  %k = f32[3,8,2]{{2,1,0}} constant({{...}})
  ROOT %y = {line}
}}
"""


@pytest.mark.parametrize(
    ('line', 'flops'),
    [
        (
            '(f32[4,6,5]{2,1,0}, s8[64]{0}) custom-call(%x, %w), '
            'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}',
            2 * 4 * 6 * 5 * 8,
        ),
        (
            'f32[4,6,5]{2,1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call", '
            'backend_config={"custom_call_config":{"cost_estimate":{"flops":"77"}}}',
            77,
        ),
        # a convolution of 6 positions with a window of 3, of which two fall into the padding
        (
            'f32[4,6,2]{2,1,0} convolution(%x, %k), window={size=3 pad=1_1}, '
            'dim_labels=b0f_0io->b0f',
            2 * 4 * (3 * 6 - 2) * 8 * 2,
        ),
        (
            'f32[4,3,2]{2,1,0} convolution(%x, %k), window={size=3 stride=2 pad=0_1}, '
            'dim_labels=b0f_0io->b0f',
            2 * 4 * (3 * 3 - 1) * 8 * 2,
        ),
    ],
)
def test_flops_by_hand(line, flops):
    products = find_products(Graph(HloModule(BY_HAND.format(line=line))))
    assert [product.total for product in products] == [flops]


# --- on simulated devices -----------------------------------------------------------------------


@pytest.fixture(scope='module')
def report():
    mesh = mesh_of(data=4, tensor=4)
    with jax.set_mesh(mesh):
        return explain(llama.train_step(mesh, llama.SMALL), *llama.arguments(llama.SMALL), tries=0)


def test_flops_on_cpu(report):
    assert report.flops * 16 == pytest.approx(llama.flops(llama.SMALL), rel=0.05)
    assert report.flops == sum(row.flops for row in report.products)
    assert 'compute: ' in str(report)


def test_collectives_that_the_cpu_backend_widens(report):
    """The step casts its weights to bf16; XLA has no such collectives for CPU."""
    by_dtype = {True: Counter(), False: Counter()}
    for row in report.collectives:
        by_dtype[row.widened].update(re.findall(r'(\w+)\[', row.arrays))
    assert set(by_dtype[False]) <= {'f32', 's32'}
    assert by_dtype[True]['bf16'] > 20
    weights = [row for row in report.collectives if row.role == 'weights']
    assert weights
    assert all(row.widened and 'f32' not in row.arrays for row in weights)
    note = '\n  (f32): the compiler runs these collectives in f32; bytes are for bf16\n'
    assert note in str(report)


def test_arrays_that_the_user_widens_are_not_marked():
    mesh = mesh_of(x=8)
    rows, replicated = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (('x',), ()))

    @functools.partial(jax.jit, in_shardings=rows, out_shardings=replicated)
    def gathered(x):
        return jax.lax.with_sharding_constraint(x.astype(np.float32) * 2, rows)

    (row,) = explain(gathered, struct(64, 8, dtype=jnp.bfloat16), tries=0).collectives
    assert (row.arrays, row.widened) == ('f32[64,8]', False)


SPECS = {'stream': 'b s d -> b4 s4 d', 'all': 'b s d -> b4 s d 4', 'hidden': 'b s f -> b4 s f4'}


def put(x, name):
    return einshard(x, SPECS[name])


def test_activations_have_axis_names():
    @sharded(SPECS['stream'], 'd f -> 4 d f4', 'f d -> 4 f4 d', out=SPECS['stream'])
    def mlp(x, w_in, w_out):
        def layer(x, _):
            x = put(jnp.tanh(x), 'all')
            hidden = put(jnp.einsum('bsd,df->bsf', x, w_in), 'hidden')
            return put(jnp.einsum('bsf,fd->bsd', hidden, w_out), 'stream'), None

        return jax.lax.scan(layer, x, length=5)[0]

    report = explain(
        mlp, *(floats(*shape) for shape in [(16, 32, 64), (64, 128), (128, 64)]), tries=0
    )
    found = {(row.kind, row.axes, row.executions) for row in report.collectives}
    assert found == {('all-gather', 'b s d', 5), ('all-reduce', 'b s d', 5)}
    assert str(report).count('\n        of activations b s d\n') == 2


def test_axis_names_that_are_not_certain():
    """One line constrains values with different names."""

    @sharded('a b -> a* b', 'c d -> c* d', out=('a b -> * a b', 'c d -> * c d'))
    def both(*arrays):
        specs = ('a b -> * a b', 'c d -> * c d')
        return tuple(einshard(jnp.tanh(x), spec) for x, spec in zip(arrays, specs, strict=True))

    rows = explain(both, floats(32, 64), floats(64, 32), tries=0).collectives
    assert {row.kind for row in rows} == {'all-gather'}
    assert {row.axes for row in rows} == {''}


def test_names_of_two_constraints_on_one_line():
    @sharded('a b -> a* b', 'c d -> c* d')
    def both(*arrays):
        def step(carry, _):
            x, y = carry
            x, y = einshard(jnp.tanh(x), 'a b -> * a b'), einshard(jnp.tanh(y), 'c d -> * c d')
            return (
                einshard(x @ x.T @ x, 'a b -> a* b'),
                einshard(y @ y.T @ y, 'c d -> c* d'),
            ), None

        return jax.lax.scan(step, arrays, length=3)[0]

    rows = explain(both, floats(32, 64), floats(64, 32), tries=0).collectives
    found = {(row.kind, row.arrays, row.axes) for row in rows}
    assert found == {('all-gather', 'f32[32,64]', 'a b'), ('all-gather', 'f32[64,32]', 'c d')}


def test_totals(report):
    rows, total = report.collectives, report.network_bytes
    for field in ('kind', 'along', 'role', 'is_backward', 'source'):
        assert sum(rows.bytes_by(field).values()) == total
    assert rows.bytes_by('kind') == rows.network_bytes
    assert set(rows.bytes_by('role')) == {'weights', 'gradients', 'activations'}
    shown = str(report)
    for words in ('in one run: ', 'along: tensor ', 'for: ', 'in: backward pass'):
        assert f'\n  sent {words}' in shown
    shares = re.findall(r'(\d+)%', re.search(r'\n  sent for: (.*)', shown)[1])
    assert sum(map(int, shares)) in (99, 100, 101)


def test_donated_states_are_listed_once(report):
    assert len(report.results) == len(report.in_place) + 1
    results = str(report).partition('\nresults\n')[2].partition('\n\n')[0].splitlines()
    assert [line.split()[0] for line in results] == ['path', 'result/1', 'result/0:']
    assert results[-1] == '  result/0: 37 arrays in place of state, with the same shardings'


@pytest.mark.parametrize('width', [80, 100])
def test_width(report, width):
    lines = page_text(report._page(), width).splitlines()
    assert max(map(len, lines)) <= width


# --- cost ---------------------------------------------------------------------------------------


def read(text):
    """Everything that `explain` reads of a program."""
    graph = Graph(HloModule(text))
    inputs = [(str(i), 'float32') for i in range(len(graph.parameters))]
    payloads = Payloads(graph, inputs, {i: str(i) for i in graph.program.aliases})
    for collective in find_collectives(graph):
        payloads.of(collective)
        find_gather(graph, collective)
    product_rows(graph)


def test_a_large_program_is_read_quickly():
    text = text_of(64)
    start = time.process_time()
    read(text)
    assert time.process_time() - start < 2


def test_a_large_program_is_read_in_little_memory():
    text = text_of(64)
    tracemalloc.start()
    read(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * len(text)


# --- differences --------------------------------------------------------------------------------


def more_axes(arrays, n):
    """The same bytes, in arrays that are unlike those of other numbers."""
    return tuple(ArrayType(array.dtype, (*array.shape, *[1] * n)) for array in arrays)


def test_large_differences_come_first_and_others_are_folded(report):
    fewer = dataclasses.replace(report, collectives=Collectives(report.collectives[::2]))
    diff = report.diff(fewer)
    sent = [abs(n) for n, _ in diff.details]
    assert sent == sorted(sent, reverse=True)
    assert sum(n for n, _ in diff.details) == fewer.network_bytes - report.network_bytes
    many = dataclasses.replace(
        report,
        collectives=Collectives(
            dataclasses.replace(
                row, operands=more_axes(row.operands, i), results=more_axes(row.results, i)
            )
            for i, row in enumerate(report.collectives)
        ),
    )
    lines = str(many.diff(dataclasses.replace(many, collectives=Collectives()))).splitlines()
    assert re.fullmatch(
        r'- all-reduce .+, 4 of 4 along tensor: 6 \(-432.0 KiB, at llama.py:\d+\)', lines[0]
    )
    assert len([line for line in lines if line.startswith('- ')]) == 20
    [others] = [line for line in lines if line.startswith('  .. and ')]
    rest = sum(sorted(row.total_bytes for row in many.collectives)[:-20])
    assert others == (
        f'  .. and {len(many.collectives) - 20} other collectives: +0 B, -{format_bytes(rest)}'
    )


def test_a_train_step_of_64_layers_for_256_devices():
    """The program that libtpu compiled."""
    pytest.importorskip('libtpu')
    mesh, c = topology('v5e:16x16', data=32, tensor=8), llama.Config(layers=64)
    with jax.set_mesh(mesh):
        traced = llama.train_step(mesh, c).trace(*llama.arguments(c))
        lowered = traced.lower()
    (path,) = Path(llama.__file__).parent.glob('v5e_16x16-llama64-*.txt.xz')
    with lzma.open(path, 'rt', encoding='utf-8') as file:
        text = file.read().replace('tests/hlo/llama.py', llama.__file__)
    specs = {name: NamedSharding(mesh, spec) for name, (_, spec) in llama.SHAPES.items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    state = {'params': specs, 'm': specs, 'v': specs, 'n': replicated}
    placed = ((state, NamedSharding(mesh, PartitionSpec(None, 'data'))), {})
    out = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        lowered.out_info,
        (state, replicated),
    )
    compiled = Oversized(lowered.args_info, placed, out, text, None, 0)
    module = importlib.import_module('einshard._explain.explain')
    report = module.explain_stages(Stages('step', compiled=compiled, traced=traced))
    assert report.findings == ()
    assert len(report.collectives) > 40
