"""The collectives that einshard reads in optimized programs are those that theory predicts.

The programs are plain JAX (`hlo/programs.py`), compiled here on simulated CPU devices and, ahead
of time, for TPU; `hlo/*.txt` keeps texts of other versions of JAX and of the other partitioner.
"""

import functools
import math
import tracemalloc
from collections import Counter
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
from hlo import programs
from hlo.programs import MACHINES, PROGRAMS, expected, partitioner
from placed import mesh_of

# private: stored HLO of other versions of JAX, which `explain` cannot compile
from einshard._program.hlo.arithmetic import ARITHMETIC
from einshard._program.hlo.collective import KINDS
from einshard._program.hlo.find_collectives import find_collectives, read_collectives
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.groups import connected, read_groups
from einshard._program.hlo.opcodes import _ROWS
from einshard._program.hlo.queries import Origins, is_invariant, output_uses
from einshard._program.hlo.slices import find_gather, find_reshards, find_sliced_sum
from einshard._program.hlo.sources import Sources, op_name
from einshard._program.hlo.text import ArrayType, HloModule, array_types, read_instruction

HLO = Path(__file__).parent / 'hlo'
ON_SPARSE_CORES = ('product_reduced', 'summed_and_scattered')
# the libtpu of JAX 0.10 ends collectives on sparse cores where it starts them
OVERLAPS_ON_SPARSE_CORES = jax.__version_info__ >= (0, 12)


@functools.cache
def compiled(name, machine, partition='shardy'):
    if not machine.startswith('cpu'):
        pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    with partitioner(partition):
        return programs.text_of(name, machine)


def read(text, machine):
    """Programs over several slices name devices by ids, which differ by 100000 between slices."""
    if machine.startswith('2_'):
        return read_collectives(text, [100000 * i + j for i in (1, 2) for j in range(8)])
    return read_collectives(text)


def axes_of(groups, machine):
    """'data', 'model' or 'data model': the mesh axes of these groups; else the groups."""
    data, model = MACHINES[machine]
    grid = np.arange(data * model).reshape(data, model)
    found = {frozenset(map(frozenset, groups))}
    if model > 1 and found == {frozenset(map(frozenset, grid.tolist()))}:
        return 'model'
    if data > 1 and found == {frozenset(map(frozenset, grid.T.tolist()))}:
        return 'data'
    return 'data model' if found == {frozenset([frozenset(grid.ravel().tolist())])} else groups


def summary(collectives, machine):
    """{(kind, axes, executions): bytes}; the axes are 'model' if all devices are on one axis."""
    data, _ = MACHINES[machine]
    total = Counter()
    for c in collectives:
        axes = axes_of(c.device_groups, machine)
        total[c.kind, axes, c.executions if c.is_exact else None] += c.bytes
    return total if data > 1 else Counter({(k, 'model', n): b for (k, _, n), b in total.items()})


def by_theory(name, machine):
    data, model = MACHINES[machine]
    kind = machine.split('_')[0]
    needed = expected(name, data, model, kind if kind in ('cpu', 'gpu') else 'tpu')
    if data == 1:
        needed = Counter({(kind, 'model', n): size for (kind, _, n), size in needed.items()})
    return needed


def check(name, machine, text):
    collectives = read(text, machine)
    needed = by_theory(name, machine)
    assert summary(collectives, machine) == needed
    assert bool(collectives) == bool(needed)
    for c in collectives:
        assert c.network_bytes == math.ceil(by_ring(c.kind, c.bytes, c.group_size))
        check_shapes(c)


def by_ring(kind, n_bytes, n):
    """The bytes that a device sends in the n - 1 or 2 (n - 1) steps of the algorithm."""
    piece = Fraction(n_bytes, n)
    return {
        'all-gather': (n - 1) * piece,  # in each step passes on the piece that came before
        'reduce-scatter': (n - 1) * piece,  # in each step passes on a sum of pieces
        'all-reduce': 2 * (n - 1) * piece,  # a reduce-scatter and an all-gather
        'all-to-all': (n - 1) * piece,  # a piece to each other device
        'collective-permute': n_bytes,
    }[kind]


def check_shapes(c):
    operands = sum(math.prod(array.shape) for array in c.operands)
    results = sum(math.prod(array.shape) for array in c.results)
    factor = {'all-gather': Fraction(c.group_size), 'reduce-scatter': Fraction(1, c.group_size)}
    assert results == operands * factor.get(c.kind, 1)
    assert c.groups * c.group_size == c.n_devices


@pytest.mark.parametrize('machine', ['cpu_4', 'cpu_8', 'cpu_16', 'v5e_4x4', 'v5p_2x2x2'])
@pytest.mark.parametrize('name', PROGRAMS)
def test_collectives_of_a_program(name, machine):
    check(name, machine, compiled(name, machine))


@pytest.mark.parametrize('name', ['product_scattered', 'fully_sharded', 'scanned', 'transposed'])
def test_program_of_the_other_partitioner(name):
    if not hasattr(jax.config, 'jax_use_shardy_partitioner'):
        pytest.skip('this JAX has one partitioner')
    check(name, 'cpu_16', compiled(name, 'cpu_16', 'gspmd'))


@pytest.mark.parametrize('name', ON_SPARSE_CORES)
def test_collective_on_sparse_cores(name):
    """An asynchronous custom call runs the computation that contains it."""
    text = compiled(name, 'tpu7x_2x2x1')
    assert 'async_execution_thread="sparsecore"' in text
    check(name, 'tpu7x_2x2x1', text)
    assert {c.is_async for c in read_collectives(text)} == {OVERLAPS_ON_SPARSE_CORES}


# --- texts of other versions --------------------------------------------------------------------


def kept(machine=''):
    """(machine, name, text) of each program in hlo/*.txt, for machines that start like this."""
    for path in sorted(HLO.glob(f'{machine}*.txt')):
        for module in path.read_text().split('HloModule jit_')[1:]:
            yield path.stem.split('-')[0], module.split(',')[0], f'HloModule jit_{module}'


KEPT = [pytest.param(*case, id=f'{case[0]}-{case[1]}-{i}') for i, case in enumerate(kept())]


@pytest.mark.parametrize(('machine', 'name', 'text'), KEPT)
def test_collectives_of_a_kept_text(machine, name, text):
    check(name, machine, text)


def test_kept_texts_have_all_forms():
    forms = [
        'StackFrames\n',
        'replica_groups={{0,',
        'replica_groups=[2,8]<=[16]',
        "replica_groups=mesh['data'=2,'model'=8] {'model'}",
        'collective-permute-start(',
        'custom_call_target="AsyncCollectiveStart"',
        'calls=%async_collective_fusion',
        'calls=%all-reduce-scatter',
        'custom-call-start(',
        '_xla_megascale_transfer_type="ALL_REDUCE"',
        '"known_trip_count":{"n":"12"}',
        '"is_sync":true',
        ' all-reduce-start(',
    ]
    files = sorted(HLO.glob('*.txt'))
    texts = [path.read_text() for path in files]
    assert [form for form in forms if not any(form in text for text in texts)] == []
    partitioners = {tuple(path.stem.split('-')[:2]) for path in files}
    assert {(m, p) for m in ('cpu_16', 'v5e_4x4') for p in ('shardy', 'gspmd')} <= partitioners


# compiling for GPU needs a plugin, see hlo/write.py
COMPILED = [case for case in KEPT if case.values[0] != 'gpu_8']


@pytest.mark.parametrize(('machine', 'name', 'text'), COMPILED)
def test_a_kept_text_is_read_like_a_new_one(machine, name, text):
    if machine.startswith('tpu7x') and not OVERLAPS_ON_SPARSE_CORES:
        pytest.skip('the libtpu of this JAX does not overlap them')
    then, now = read(text, machine), read(compiled(name, machine), machine)
    assert summary(now, machine) == summary(then, machine)
    assert sum(c.is_async for c in now) == sum(c.is_async for c in then)
    files = {c.source.rpartition(':')[0].rpartition('/')[2] for c in now + then if c.source}
    assert files <= {'programs.py'}


def test_a_start_that_waits_is_not_asynchronous():
    """JAX 0.10 writes all collectives for GPU as a -start, newer versions the asynchronous ones."""
    texts = list(kept('gpu'))
    assert all('-start(' in text for *_, text in texts[:7])
    found = [name for _, name, text in texts if any(c.is_async for c in read_collectives(text))]
    assert found == ['scanned', 'ring', 'nested'] * 2


# --- source lines -------------------------------------------------------------------------------


def line_of(end):
    lines = Path(programs.__file__).read_text().splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.endswith(end)]
    return f'{programs.__file__}:{number}'


@pytest.mark.parametrize('machine', ['cpu_8', 'v5e_4x4'])
@pytest.mark.parametrize(
    ('name', 'end', 'primitive'),
    [
        ('transposed', "all_to_all(x, 'model', 1, 0, tiled=True)", 'all_to_all'),
        ('ring', "shard = jax.lax.ppermute(shard, 'model', right(m))", 'ppermute'),
        ('summed_and_scattered', 'scatter_dimension=0, tiled=True)', 'reduce_scatter'),
        ('nested', "return jax.lax.psum(jnp.sin(x), 'model'), None", 'psum'),
        ('product_reduced', '# else TPU would gather in bfloat16', 'dot_general'),
    ],
)
def test_line_of_source(name, end, primitive, machine):
    [c] = read_collectives(compiled(name, machine))
    assert c.source == line_of(end)
    assert c.op_name.startswith(f'jit({name})/')
    assert c.op_name.endswith(f'/{primitive}')


TABLES = """FileNames
1 "/site-packages/jax/_src/pjit.py"
2 "/home/user/train.py"
3 "/home/user/model.py"
4 "/lib/python3.13/site-packages/jax/_src/lax.py"
5 "{einshard}/_constraint.py"

FunctionNames
1 "<module>"

FileLocations
1 {{file_name_id=2 function_name_id=1 line=70 end_line=70 column=1 end_column=2}}
2 {{file_name_id=3 function_name_id=1 line=12 end_line=12 column=1 end_column=2}}
3 {{file_name_id=4 function_name_id=1 line=99 end_line=99 column=1 end_column=2}}
4 {{file_name_id=5 function_name_id=1 line=33 end_line=33 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id={0}}}
2 {{file_location_id=2 parent_frame_id={1}}}
3 {{file_location_id=3 parent_frame_id={2}}}
4 {{file_location_id=4 parent_frame_id={2}}}
5 {{file_location_id=3 parent_frame_id={0}}}
"""


@pytest.mark.parametrize('parents', [(1, 2, 3), (0, 1, 2)], ids=['one more', 'as it is'])
def test_innermost_line_of_the_user(parents):
    import einshard

    def lines(text, *frames):
        sources = Sources(text.splitlines())
        spans = [sources.span(f'op_name="f" stack_frame_id={frame}') for frame in frames]
        return [span and span.text for span in spans]

    text = TABLES.format(*parents, einshard=Path(einshard.__file__).parent)
    train, model = '/home/user/train.py:70', '/home/user/model.py:12'
    jax_alone = '/lib/python3.13/site-packages/jax/_src/lax.py:99'
    assert lines(text, 1, 2, 3, 4, 5, 6) == [train, model, model, model, jax_alone, None]
    flax = text.replace('/home/user/model.py', '/lib/python3.13/site-packages/flax/nnx/linear.py')
    assert lines(flax, 2, 3) == [train, train]
    nobody = flax.replace('/home/user/train.py', '/usr/lib/python3.13/runpy.py')
    assert lines(nobody, 2) == ['/lib/python3.13/site-packages/flax/nnx/linear.py:12']
    sources = Sources(text.splitlines())
    assert sources.span('op_name="f"') is None
    # HLO counts columns from 0
    assert Sources(text.splitlines()).span('stack_frame_id=2') == ('/home/user/model.py', 12, 2)


# --- loops --------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['scanned', 'ring', 'nested', 'until_small'])
def test_trip_counts_with_and_without_the_note_of_the_compiler(name):
    """Programs for CPU have a note, those for TPU have none."""
    text = compiled(name, 'cpu_16')
    without = text.replace('"known_trip_count"', '"unknown"')
    assert (without != text) == (name != 'until_small')
    [c], [again] = read_collectives(text), read_collectives(without)
    assert c == again


LOOP = """HloModule m, num_partitions=2

%body (s: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %s = (s32[], f32[4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %step = s32[] constant({step})
  %next = s32[] {add}
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %sum = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %t = (s32[], f32[4], s32[]) tuple(%next, %sum, {handed_on})
}}

%condition (s.1: (s32[], f32[4], s32[])) -> pred[] {{
  %s.1 = (s32[], f32[4], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=2
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare({compared}), direction={direction}
}}

ENTRY %main (x.2: f32[4], k: s32[]) -> f32[4] {{
  %x.2 = f32[4]{{0}} parameter(0)
  %k = s32[] parameter(1)
  %start = s32[] constant({start})
  %twelve = s32[] constant(12)
  %copied = s32[] copy(%start)
  %state = (s32[], f32[4], s32[]) tuple({init}, %x.2, %twelve)
  %w = (s32[], f32[4], s32[]) while(%state), condition=%condition, body=%body
  ROOT %r = f32[4]{{0}} get-tuple-element(%w), index=1
}}
"""
COUNTED = {
    'start': 0,
    'step': 1,
    'limit': 12,
    'direction': 'LT',
    'add': 'add(%i, %step)',
    'compared': '%i.1, %limit',
    'init': '%copied',
    'handed_on': '%n',
}


@pytest.mark.parametrize(
    ('changed', 'executions'),
    [
        ({}, 12),
        ({'start': 2, 'step': 3}, 4),  # 2, 5, 8, 11
        ({'direction': 'LE'}, 13),
        ({'direction': 'NE'}, 12),
        ({'direction': 'NE', 'step': 5}, None),  # skips the limit
        ({'direction': 'GT', 'compared': '%limit, %i.1'}, 12),
        ({'add': 'add(%step, %i)'}, 12),
        ({'start': 12, 'limit': 0, 'direction': 'GT', 'add': 'subtract(%i, %step)'}, 12),
        ({'start': 12, 'limit': 1, 'direction': 'GE', 'step': -2}, 6),  # 12, 10, ..., 2
        ({'start': 20}, 0),
        ({'compared': '%i.1, %n.1'}, 12),  # a limit that the loop hands on
        ({'compared': '%i.1, %n.1', 'handed_on': '%next'}, None),  # and one that it changes
        ({'step': 0}, None),
        ({'step': -1}, None),
        ({'direction': 'EQ'}, None),
        ({'init': '%k'}, None),
        ({'add': 'subtract(%step, %i)'}, None),
        ({'add': 'multiply(%i, %step)'}, None),
    ],
)
def test_trip_count(changed, executions):
    [c] = read_collectives(LOOP.format(**{**COUNTED, **changed}))
    assert (c.executions if c.is_exact else None) == executions
    assert c.executions == (executions if executions is not None else 1)


# --- forms that these machines do not write -----------------------------------------------------

SUM = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


FRAMES = TABLES.format(1, 2, 3, einshard='/einshard')


def module(*lines, computations=''):
    lines = ['%x = f32[8,4]{1,0} parameter(0)', *lines]
    body = ''.join(f'  {line}\n' for line in lines)
    main = f'ENTRY %main (x: f32[8,4]) -> f32[8,4] {{\n{body}}}\n'
    return f'HloModule jit_f, num_partitions=4\n\n{FRAMES}\n{SUM}\n{computations}\n{main}'


# types of the start, type of the result, attributes
STARTS = {
    'all-reduce': (
        *('f32[8,4]{1,0}', 'f32[8,4]'),
        'replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add',
    ),
    'all-gather': (
        *('(f32[8,4]{1,0}, f32[32,4]{1,0})', 'f32[32,4]'),
        'replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true',
    ),
    'reduce-scatter': (
        *('((f32[8,4]{1,0}), f32[2,4]{1,0})', 'f32[2,4]'),
        'replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add',
    ),
    'collective-permute': (
        *('(f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[])', 'f32[8,4]'),
        'source_target_pairs={{0,1},{1,2},{2,3},{3,0}}',
    ),
}


def check_asynchronous(c, kind, result, is_async=True):
    assert (c.kind, *map(str, c.operands), *map(str, c.results)) == (kind, 'f32[8,4]', result)
    assert (c.is_async, c.executions, c.device_groups) == (is_async, 1, ((0, 1, 2, 3),))


@pytest.mark.parametrize(
    ('between', 'is_async'),
    [
        ('%w = f32[8,4]{1,0} negate(%x)', True),
        # nothing to overlap with
        (None, False),
        ('%w = f32[4,8]{1,0} bitcast(%x)', False),
        ('%w = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%x)', False),
    ],
)
@pytest.mark.parametrize('kind', STARTS)
def test_asynchronous_pair_is_one_collective(kind, between, is_async):
    types, result, attributes = STARTS[kind]
    operand = 'f32[8,4]{1,0:T(8,128)} %x' if kind == 'collective-permute' else '%x'
    start = f'%s = {types} {kind}-start({operand}), channel_id=1, {attributes}'
    done = f'ROOT %d = {result}{{1,0}} {kind}-done(%s)'
    wait = '%v = f32[8,4]{1,0} copy-done(%w)' if between and 'copy-start' in between else None
    [c] = read_collectives(module(*filter(None, (start, between, wait, done))))
    check_asynchronous(c, kind, result, is_async)


def test_asynchronous_computation_is_one_collective():
    wrapped = (
        '%wrapped (y: f32[8,4]) -> f32[2,4] {\n'
        '  %y = f32[8,4]{1,0} parameter(0)\n'
        '  ROOT %z = f32[2,4]{1,0} reduce-scatter(%y), replica_groups={{0,1,2,3}}, '
        'dimensions={0}, to_apply=%add\n}\n'
    )
    text = module(
        '%s = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%x), calls=%wrapped, '
        'metadata={op_name="jit(f)/here" stack_frame_id=2}',
        '%w = f32[8,4]{1,0} negate(%x)',
        '%u = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-update(%s), calls=%wrapped',
        'ROOT %d = f32[2,4]{1,0} async-done(%u), calls=%wrapped',
        computations=wrapped,
    )
    [c] = read_collectives(text)
    check_asynchronous(c, 'reduce-scatter', 'f32[2,4]')
    assert (c.op_name, c.source) == ('jit(f)/here', '/home/user/model.py:12')


def test_sparse_cores_by_a_custom_call():
    """As libtpu 0.0.52 writes it: operands come with the update, and a custom call sends."""
    computations = (
        '%on_core (a: f32[8,4]) -> f32[2,4] {\n'
        '  %a = f32[8,4]{1,0} parameter(0)\n'
        '  ROOT %z = f32[2,4]{1,0} reduce-scatter(%a), replica_groups={{0,1,2,3}}, '
        'dimensions={0}, to_apply=%add\n}\n\n'
        '%wrapped (y: f32[8,4]) -> f32[2,4] {\n'
        '  %y = f32[8,4]{1,0} parameter(0)\n'
        '  ROOT %call = f32[2,4]{1,0} custom-call(%y), custom_call_target="any", '
        'called_computations={%on_core}\n}\n'
    )
    text = module(
        '%s = ((), (), s32[]) async-start(), calls=%wrapped, '
        'metadata={op_name="jit(f)/here" stack_frame_id=2}',
        '%w = f32[8,4]{1,0} negate(%x)',
        '%u = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-update(%s, %x)',
        'ROOT %d = f32[2,4]{1,0} async-done(%u)',
        computations=computations,
    )
    [c] = read_collectives(text)
    check_asynchronous(c, 'reduce-scatter', 'f32[2,4]')
    assert c.source == '/home/user/model.py:12'


@pytest.mark.parametrize(('strategy', 'n'), [('ONE_SHOT', 3), ('TWO_SHOT', 2 * 3 / 4)])
def test_kernel_of_a_gpu(strategy, n):
    """In one shot, each of 4 devices reads the arrays of 3 others; in two, as in a ring."""
    fused = (
        '%fused (p: f32[32]) -> f32[32] {\n'
        '  %p = f32[32]{0} parameter(0)\n'
        '  ROOT %sum = f32[32]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, '
        'to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false,'
        f'"kernel_strategy":"KERNEL_STRATEGY_TRITON_{strategy}"}}}}\n}}\n'
    )
    text = module(
        '%flat = f32[32]{0} bitcast(%x)',
        '%s = ((f32[32]), f32[32]) fusion-start(%flat), kind=kCustom, calls=%fused',
        '%d = f32[32]{0} fusion-done(%s), calls=%fused',
        'ROOT %r = f32[8,4]{1,0} bitcast(%d)',
        computations=fused,
    )
    [c] = read_collectives(text)
    assert (c.kind, c.arrays, c.is_async) == ('all-reduce', 'f32[8,4]', False)
    assert c.network_bytes == n * 128


def test_several_arrays_in_one_collective():
    [c] = read_collectives(
        module(
            '%y = bf16[6]{0} constant({...})',
            '%s = (f32[8,4]{1,0}, bf16[6]{0}) all-reduce(%x, /*index=1*/%y), '
            'replica_groups={}, to_apply=%add',
            'ROOT %r = f32[8,4]{1,0} get-tuple-element(%s), index=0',
        )
    )
    assert (c.arrays, c.bytes) == ('f32[8,4], bf16[6]', 8 * 4 * 4 + 6 * 2)
    assert c.device_groups == ((0, 1, 2, 3),)  # no groups and no channel: all of them
    assert c.network_bytes == 2 * 3 * 140 // 4


@pytest.mark.parametrize(
    ('line', 'pairs', 'groups'),
    [
        ('{{0,1},{1,0},{2,3},{3,2}}', ((0, 1), (1, 0), (2, 3), (3, 2)), ((0, 1), (2, 3))),
        ('{{0,2}}', ((0, 2),), ((0, 2),)),
        ('{{0,0},{1,2}}', ((0, 0), (1, 2)), ((0,), (1, 2))),
    ],
)
def test_permute(line, pairs, groups):
    [c] = read_collectives(
        module(f'ROOT %p = f32[8,4]{{1,0}} collective-permute(%x), source_target_pairs={line}')
    )
    assert (c.pairs, c.device_groups, c.network_bytes) == (pairs, groups, 128)
    assert c.groups == sum(len(group) == 2 for group in groups)


def test_send():
    """GPU programs have sends for `jax.lax.psend` and for permutes that XLA splits."""
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}'
    [c] = read_collectives(
        module(
            '%t = token[] after-all()',
            f'%s = (f32[8,4]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=1, {pairs}, '
            'metadata={op_name="jit(f)/psend" stack_frame_id=2}',
            f'%u = token[] send-done(%s), channel_id=1, {pairs}',
            f'%r = (f32[8,4]{{1,0}}, u32[], token[]) recv(%u), channel_id=1, {pairs}',
            f'%d = (f32[8,4]{{1,0}}, token[]) recv-done(%r), channel_id=1, {pairs}',
            'ROOT %g = f32[8,4]{1,0} get-tuple-element(%d), index=0',
        )
    )
    assert (c.kind, c.arrays, c.operands) == ('collective-permute', 'f32[8,4]', c.results)
    assert (c.pairs, c.device_groups, c.network_bytes) == (((0, 1), (1, 2)), ((0, 1, 2),), 128)
    assert (c.source, c.op_name) == ('/home/user/model.py:12', 'jit(f)/psend')


def test_broadcast_and_ragged():
    broadcast, ragged = read_collectives(
        module(
            '%b = f32[8,4]{1,0} collective-broadcast(%x), channel_id=1, replica_groups={{0,1}}',
            '%o = f32[16,4]{1,0} constant({...})',
            '%i = s32[2]{0} constant({...})',
            'ROOT %r = f32[16,4]{1,0} ragged-all-to-all(%x, %o, %i, %i, %i, /*index=5*/%i), '
            'channel_id=2, replica_groups={{0,1},{2,3}}',
        )
    )
    assert (broadcast.kind, broadcast.bytes, broadcast.network_bytes) == (KINDS[6], 128, 128)
    assert (ragged.kind, ragged.arrays, ragged.network_bytes) == (KINDS[5], 'f32[8,4]', 64)
    assert [str(array) for array in ragged.results] == ['f32[16,4]']


CALLED = """%called (y: f32[8,4]) -> f32[8,4] {
  %y = f32[8,4]{1,0} parameter(0)
  ROOT %z = f32[8,4]{1,0} all-reduce(%y), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_results_that_contain_tuples():
    read = module(
        '%t = token[] after-all()',
        '%in = ((f32[8,4]{1,0:T(8,128)}, (s32[], f32[2])), token[]) infeed(%t)',
        '%pair = (f32[8,4]{1,0}, (s32[], f32[2])) get-tuple-element(%in), index=0',
        '%y = f32[8,4]{1,0} get-tuple-element(%pair), index=0',
        '%inner = (s32[], f32[2]) get-tuple-element(%pair), index=1',
        '%z = f32[2]{0} get-tuple-element(%inner), index=1',
        '%sums = (f32[8,4]{1,0}, f32[2]{0}) all-reduce(%y, %z), replica_groups={}, to_apply=%add',
        'ROOT %r = f32[8,4]{1,0} get-tuple-element(%sums), index=0',
    )
    [c] = read_collectives(read)
    assert c.arrays == 'f32[8,4], f32[2]'


def test_computation_called_twice_runs_twice():
    text = module(
        '%y1 = f32[8,4]{1,0} call(%x), to_apply=%called',
        'ROOT %y2 = f32[8,4]{1,0} call(%y1), to_apply=%called',
        computations=CALLED,
    )
    assert [c.executions for c in read_collectives(text)] == [2]


def test_several_modules_are_read_one_after_another():
    text = module('ROOT %y = f32[8,4]{1,0} call(%x), to_apply=%called', computations=CALLED)
    assert read_collectives(f'{text}\n\n{text}') == read_collectives(text) * 2


@pytest.mark.parametrize(
    'branches',
    ['true_computation=%called, false_computation=%other', 'branch_computations={%called, %other}'],
)
def test_branches_count_once_each(branches):
    text = module(
        '%p = pred[] constant(true)',
        f'ROOT %c = f32[8,4]{{1,0}} conditional(%p, %x, %x), {branches}',
        computations=CALLED + CALLED.replace('%called', '%other').replace('%z', '%w'),
    )
    assert [(c.name, c.executions) for c in read_collectives(text)] == [('z', 1), ('w', 1)]


CHAINED = """%begin (a: f32[2,4]) -> (f32[2,4], f32[8,4]) {
  %a = f32[2,4]{1,0} parameter(0)
  %g.0 = f32[8,4]{1,0} all-gather(%a), GATHER
  ROOT %c.0 = (f32[2,4], f32[8,4]) custom-call(%g.0), custom_call_target="AsyncCollectiveStart"
}

%link (b: f32[2,4], s: f32[4]) -> f32[4] {
  %b = f32[2,4]{1,0} parameter(0)
  %s = f32[4]{0} parameter(1)
  %g.1 = f32[8,4]{1,0} all-gather(%b), GATHER
  ROOT %t.1 = f32[4]{0} tanh(%s)
}

%end (d: f32[2,4]) -> f32[8,4] {
  %d = f32[2,4]{1,0} parameter(0)
  %g.2 = f32[8,4]{1,0} all-gather(%d), GATHER
  ROOT %c.2 = f32[8,4]{1,0} custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}

%body (p: (f32[2,4], f32[4])) -> (f32[2,4], f32[4]) {
  %p = (f32[2,4]{1,0}, f32[4]{0}) parameter(0)
  %w = f32[2,4]{1,0} get-tuple-element(%p), index=0
  %h = f32[4]{0} get-tuple-element(%p), index=1
  %f.1 = f32[4]{0} fusion(%w, %h), kind=kOutput, calls=%link
  ROOT %r = (f32[2,4]{1,0}, f32[4]{0}) tuple(%w, %f.1)
}

%condition (q: (f32[2,4], f32[4])) -> pred[] {
  %q = (f32[2,4]{1,0}, f32[4]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}
""".replace('GATHER', 'channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, CHAIN')


def test_links_of_a_chain_in_a_loop_are_its_collective():
    text = module(
        '%k = f32[2,4]{1,0} constant({...})',
        '%h.0 = f32[4]{0} constant({...})',
        '%f.0 = (f32[2,4]{1,0}, f32[8,4]{1,0}) fusion(%k), kind=kOutput, calls=%begin',
        '%i = (f32[2,4]{1,0}, f32[4]{0}) tuple(%k, %h.0)',
        '%l = (f32[2,4]{1,0}, f32[4]{0}) while(%i), condition=%condition, body=%body, '
        'backend_config={"known_trip_count":{"n":"7"}}',
        'ROOT %f.2 = f32[8,4]{1,0} fusion(%k), kind=kOutput, calls=%end',
        computations=CHAINED.replace('CHAIN', 'frontend_attributes={chain_id="0"}'),
    )
    [c] = read_collectives(text)
    assert (c.name, c.executions, c.is_async) == ('g.0', 1, True)
    # a link of another chain is a collective of its own
    other = text.replace('chain_id="0"', 'chain_id="1"', 2).replace(
        'chain_id="1"', 'chain_id="0"', 1
    )
    assert [(c.name, c.executions) for c in read_collectives(other)] == [('g.0', 1), ('g.1', 7)]
    # without a mark at the start, the link that runs least often is the collective
    unmarked = text.replace('"AsyncCollectiveStart"', '"Other"')
    assert [(c.name, c.executions) for c in read_collectives(unmarked)] == [('g.0', 1)]


@pytest.mark.parametrize(
    'line',
    [
        'all-reduce(%x), channel_id=1, replica_groups={{0},{1},{2},{3}}, to_apply=%add',
        "all-reduce(%x), channel_id=1, replica_groups=mesh['a'=1,'b'=4] {'a'}, to_apply=%add",
        'all-gather(%x), channel_id=1, replica_groups=[4,1]<=[4], dimensions={0}',
        'reduce-scatter(%x), channel_id=1, replica_groups={{0},{1},{2},{3}}, to_apply=%add',
        'collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{1,1},{2,2},{3,3}}',
    ],
)
def test_groups_of_one_device_communicate_nothing(line):
    assert read_collectives(module(f'ROOT %y = f32[8,4]{{1,0}} {line}')) == ()


def test_one_group_of_several_devices_is_enough():
    line = 'all-reduce(%x), channel_id=1, replica_groups={{0},{1},{2,3}}, to_apply=%add'
    [c] = read_collectives(module(f'ROOT %y = f32[8,4]{{1,0}} {line}'))
    assert (c.group_size, c.device_groups) == (2, ((0,), (1,), (2, 3)))


KERNEL = (
    '%k = f32[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", '
    'frontend_attributes={kernel_metadata={\n"mesh_axes":"[\\"x\\"]",\n"note":"all-reduce"\n}}, '
    'metadata={op_name="jit(f)/pallas_call" stack_frame_id=2}, backend_config={"flag_configs":[],'
    '"custom_call_config":{"body":"TUzvU",HAS"needs_layout_passes":true}}'
)


def test_pallas_kernels_that_communicate_count():
    body = (
        KERNEL.replace('HAS', '"has_communication":true,'),
        'ROOT %y = f32[8,4]{1,0} all-reduce(%k), channel_id=1, replica_groups={{0,1},{2,3}}, '
        'to_apply=%add',
    )
    kernel, _ = read_collectives(module(*body))
    assert (kernel.kind, kernel.name, kernel.arrays) == ('custom-call', 'k', 'f32[8,4]')
    assert (kernel.op_name, kernel.device_groups, kernel.network_bytes) == (
        'jit(f)/pallas_call',
        (),
        None,
    )
    local = module(KERNEL.replace('HAS', ''), body[1])
    assert [c.name for c in read_collectives(local)] == ['y']
    # the reader of uses finds what comes after a kernel, too
    uses = output_uses(Graph(HloModule(module(*body))))
    assert {node.name: set(outputs) for node, outputs in uses.items()} == {'k': {0}, 'y': {0}}


def test_names_in_metadata_are_not_attributes():
    text = module(
        '%y = f32[8,4]{1,0} fusion(%x, %x), calls=%add, metadata={op_name="calls=%called, f"}',
        'ROOT %z = f32[8,4]{1,0} copy(%y), metadata={op_name="replica_groups={{0,1}} all-reduce("}',
        computations=CALLED,
    )
    assert read_collectives(text) == ()
    text = module(
        'ROOT %y = f32[8,4]{1,0} call(%x), to_apply=%called, metadata={op_name="replica_groups="}',
        computations=CALLED,
    )
    assert [c.name for c in read_collectives(text)] == ['z']


TO_HOST = module(
    '%t = token[] after-all()',
    'ROOT %s = (f32[8,4]{1,0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true, '
    'metadata={op_name="f"}',
)
NEVER_CALLED = module('ROOT %y = f32[8,4]{1,0} copy(%x)', computations=CALLED)


@pytest.mark.parametrize('text', ['', TO_HOST, NEVER_CALLED])
def test_no_collectives(text):
    assert read_collectives(text) == ()


# --- slices of gathered arrays --------------------------------------------------------------------

GATHERED = """HloModule m, num_partitions=4

ENTRY %main (x: f32[{n},4]) -> f32[16,2] {{
  %x = f32[{n},4]{{0,1}} parameter(0)
  %g = f32[{n},16]{{{layout}}} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={{1}}
  %t = f32[16,{n}]{{1,0}} {form}
  %zero = s32[] constant(0)
  %number = u32[] partition-id()
  %device = s32[] convert(%number)
  %size = s32[] constant(2)
  %start = s32[] multiply(%device, %size)
  ROOT %kept = f32[16,2]{{1,0}} dynamic-slice(%t, %zero, %start), dynamic_slice_sizes={{16,2}}
}}
"""


@pytest.mark.parametrize(
    ('n', 'layout', 'form', 'axis'),
    [
        (8, '0,1', 'bitcast(%g)', 0),  # as GPU programs write a transpose
        (8, '1,0', 'transpose(%g), dimensions={1,0}', 0),
        (16, '0,1', 'bitcast(%g)', 0),
        (16, '1,0', 'transpose(%g), dimensions={1,0}', 0),
        (16, '1,0', 'bitcast(%g)', 1),
        (16, '0,1', 'copy(%g)', 1),
        (16, '0,1', 'opt-barrier(%g)', 1),
        (8, '1,0', 'bitcast(%g)', None),  # other axes
    ],
)
def test_slices_of_a_gathered_array_in_another_form(n, layout, form, axis):
    """Each device keeps a slice along this axis of the gathered array."""
    text = GATHERED.format(n=n, layout=layout, form=form)
    graph = Graph(HloModule(text))
    [collective] = find_collectives(graph)
    gather = find_gather(graph, collective)
    assert (str(gather.array), gather.dimension) == (f'f32[{n},16]', 1)
    parts = (0, 1, 2, 3), (0, 0, 0, 0)
    found = find_reshards(graph, [collective])
    if axis is None:
        assert found == {}
    else:
        reshard = found[collective.name]
        assert str(reshard.array) == f'f32[{n},16]'
        assert reshard.before == parts[::-1]
        assert reshard.after == (parts if axis == 0 else parts[::-1])


# --- TPU slices ---------------------------------------------------------------------------------


def test_collective_between_slices():
    """The collective is a send and a receive, whose text names devices by their ids."""
    [text] = [text for _, name, text in kept('2_v5e_2x4') if name == 'data_parallel']
    assert ' all-reduce(' not in text
    [c] = read_collectives(text)
    assert (c.kind, c.bytes, c.is_async) == ('all-reduce', 4 * 2 * programs.D * programs.F, True)
    assert c.device_groups == tuple((i, 8 + i) for i in range(8))


@pytest.mark.parametrize('order', ['slices first', 'slices last', 'backwards'])
def test_positions_of_devices_in_slices(order):
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    devices = np.array(programs.devices_of('4_v5e_2x2')).reshape(2, 2, 4)  # slices 2 by 2, chips
    grid, axes = {
        'slices first': (devices, ('a', 'b', 'chip')),
        'slices last': (devices.transpose(2, 0, 1), ('chip', 'a', 'b')),
        'backwards': (devices[::-1, ::-1, ::-1], ('a', 'b', 'chip')),
    }[order]
    mesh = jax.sharding.Mesh(grid, axes)
    everywhere = jax.P(axes)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    def communicate(x):
        x = jax.lax.psum(x, 'chip') + x
        x = jax.lax.all_gather(x, 'a').sum(0) + x
        return jax.lax.ppermute(x, 'b', [(0, 1), (1, 0)])

    text = communicate.lower(programs.floats(16, 512)).compile().as_text()
    found = read_collectives(text, [device.id for device in grid.flat])
    positions = np.arange(16).reshape(grid.shape)

    def along(axis):
        rows = np.moveaxis(positions, axes.index(axis), -1).reshape(-1, mesh.shape[axis])
        return set(map(frozenset, rows.tolist()))

    assert {(c.kind, frozenset(map(frozenset, c.device_groups))) for c in found} == {
        ('all-reduce', frozenset(along('chip'))),
        ('all-gather', frozenset(along('a'))),
        ('collective-permute', frozenset(along('b'))),
    }
    assert {c.n_devices for c in found} == {16}


# --- groups, types and instructions -------------------------------------------------------------


@pytest.mark.parametrize(
    'text',
    [
        '{{0,2,4,6},{1,3,5,7}}',
        '[2,4]<=[4,2]T(1,0)',
        "mesh['d0'=2,'d1'=2,'d2'=2] {'d0','d1'}",
        "mesh['data'=4,'model'=2] {'data'}",
        "mesh['data'=4,'model'=2] {'data':(1)2,'data':(2)2}",
        "mesh['x'=2,'y'=1,'z'=4], device_ids=([4,2]T(1,0)) {'z'}",
        "mesh['x'=2,'z'=4], device_ids=(0,2,4,6,1,3,5,7) {'z'}",
    ],
)
def test_groups_in_each_form(text):
    line = f'all-reduce(%x), replica_groups={text}, use_global_device_ids=true, to_apply=%add'
    text = module(f'ROOT %y = f32[8,4]{{1,0}} {line}').replace('partitions=4', 'partitions=8')
    [c] = read_collectives(text)
    assert c.device_groups == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ('text', 'groups'),
    [
        ('[1,4]<=[4]', ((0, 1, 2, 3),)),
        ('[4,1]<=[4]', ((0,), (1,), (2,), (3,))),
        ('[2,2,2]<=[8]', ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8,'y'=1] {'x':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'b','a'}", ((0, 4, 2, 6), (1, 5, 3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'c'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ('{}', ()),
    ],
)
def test_groups(text, groups):
    assert read_groups(text) == groups


def test_groups_in_no_known_form():
    with pytest.raises(ValueError, match='unknown replica groups: new'):
        read_groups('new[4]')


def test_connected():
    assert connected([]) == ()
    assert connected([(3, 2), (1, 0), (2, 1), (5, 5)]) == ((0, 1, 2, 3), (5,))


@pytest.mark.parametrize(
    ('dtype', 'n_bytes'),
    [
        *(('pred', 15), ('s8', 15), ('u16', 30), ('bf16', 30), ('f32', 60), ('s64', 120)),
        *(('c64', 120), ('c128', 240), ('f8e4m3fn', 15), ('f8e5m2', 15), ('f8e8m0fnu', 15)),
        # rounded up: 60, 30 and 15 bits
        *(('s4', 8), ('u2', 4), ('f4e2m1fn', 8), ('s1', 2)),
    ],
)
def test_bytes(dtype, n_bytes):
    assert ArrayType(dtype, (3, 5)).bytes == n_bytes


def test_types():
    nested = '((f32[8,128]{1,0:T(8,128)S(1)}, s4[5]{0:E(4)}), /*index=1*/pred[], f8e5m2[<=7,2])'
    found = array_types(nested)
    assert list(map(str, found)) == ['f32[8,128]', 's4[5]', 'pred[]', 'f8e5m2[7,2]']
    assert array_types('token[]')[0].bytes == 0


def test_types_of_operands_can_be_nested():
    line = '  %d = f32[4]{0} async-done(((f32[4]{0}), f32[4]{0}, u32[]) %s), calls=%c, metadata={}'
    found = read_instruction(line)
    assert found.operands == ['s']
    assert found.attributes == 'calls=%c, '


def test_instruction():
    line = (
        '  ROOT %f.1 = (f32[8]{0:T(8)}, u32[]) fusion(f32[8]{0:T(8,1)(2,1)} %a, %b), kind=kLoop, '
        'calls=%c.2, metadata={op_name="f/g" stack_frame_id=3}'
    )
    found = read_instruction(line)
    assert (found.name, found.opcode, found.operands) == ('f.1', 'fusion', ['a', 'b'])
    assert (found.callees, found.metadata) == (
        {'calls': ['c.2']},
        'op_name="f/g" stack_frame_id=3}',
    )
    with pytest.raises(ValueError, match='is not an instruction'):
        read_instruction('}')


# --- cost ---------------------------------------------------------------------------------------


def test_memory_stays_below_seven_texts():
    """A long program, with a collective in every ten lines."""
    lines = ['%y0 = f32[8,4]{1,0} copy(%x)']
    for i in range(1, 5_000):
        metadata = f'metadata={{op_name="jit(f)/jvp()/layer/dot_general" stack_frame_id={i}}}'
        operation = f'multiply(%y{i - 1}, %y{i - 1})'
        if i % 10 == 0:
            groups = 'replica_groups={{0,1,2,3}}'
            operation = f'all-reduce(%y{i - 1}), channel_id=1, {groups}, to_apply=%add'
        lines.append(f'%y{i} = f32[8,4]{{1,0}} {operation}, {metadata}')
    lines[-1] = f'ROOT {lines[-1]}'
    text = module(*lines)
    tracemalloc.start()
    collectives = read_collectives(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(collectives) == 499
    assert peak < 7 * len(text)


def test_names_as_jax_has_them():
    name = op_name(r'op_name="gr\303\266\303\237e[\'w\'][\"a\\b\"]" stack_frame_id=3')
    assert name == 'größe[\'w\']["a\\b"]'
    assert op_name('stack_frame_id=3') == ''


@pytest.mark.parametrize('arguments', [[{'a0'}], [{'a0'}, {'a1'}]])
def test_the_origin_of_what_a_shared_computation_gathers(arguments):
    """Each call may pass another argument of the program."""
    calls = '\n'.join(
        f'  %call{i} = f32[16] call(%a{i}), to_apply=%gathers' for i in range(len(arguments))
    )
    text = f"""HloModule jit_f

%gathers (p: f32[8]) -> f32[16] {{
  %p = f32[8] parameter(0)
  ROOT %gathered = f32[16] all-gather(%p), replica_groups={{{{0,1}}}}, dimensions={{0}}
}}

ENTRY %main (a0: f32[8], a1: f32[8]) -> f32[16] {{
  %a0 = f32[8] parameter(0)
  %a1 = f32[8] parameter(1)
{calls}
  ROOT %result = f32[16] copy(%call0)
}}
"""
    [gathered] = read_collectives(text)
    read = [Origins().of(node) for node in gathered.nodes]
    numbers = [{int(name[1:]) for name in names} for names in arguments]
    assert read == [(found, False) for found in numbers]
    assert gathered.executions == len(arguments)


@pytest.mark.parametrize(
    ('moved', 'parts'),
    [
        ('f32[8,8]{1,0} copy(%sum)', ((0, 4),)),
        ('f32[8,8]{0,1} bitcast(%sum)', ((0, 4),)),
        ('f32[8,8]{1,0} bitcast(%sum)', ((1, 4),)),  # a transpose on GPU
        ('f32[8,8]{1,0} transpose(%sum), dimensions={1,0}', ((1, 4),)),
        ('f32[8,8]{1,0} negate(%sum)', ((0, 4),)),
        ('f32[8,8]{1,0} reverse(%sum), dimensions={0}', None),
    ],
)
def test_the_sliced_dimension_of_a_sum(moved, parts):
    text = f"""HloModule m, num_partitions=4

ENTRY %main (g: f32[8,8]) -> f32[2,8] {{
  %g = f32[8,8]{{0,1}} parameter(0)
  %i = u32[] partition-id()
  %zero = u32[] constant(0)
  %sum = f32[8,8]{{0,1}} all-reduce(%g), replica_groups=[1,4]<=[4], to_apply=%add
  %moved = {moved}
  ROOT %slice = f32[2,8]{{1,0}} dynamic-slice(%moved, %i, %zero), dynamic_slice_sizes={{2,8}}
}}
"""
    graph = Graph(HloModule(text))
    [collective] = find_collectives(graph)
    found = find_sliced_sum(graph, collective)
    assert (found and found.parts) == parts


# --- integer arithmetic -------------------------------------------------------------------------

LAX = {
    'add': jax.lax.add,
    'subtract': jax.lax.sub,
    'multiply': jax.lax.mul,
    'divide': jax.lax.div,
    'remainder': jax.lax.rem,
    'minimum': jax.lax.min,
    'maximum': jax.lax.max,
    'and': jax.lax.bitwise_and,
    'shift-left': jax.lax.shift_left,
    'shift-right-logical': jax.lax.shift_right_logical,
}


def test_arithmetic_is_that_of_xla():
    assert set(LAX) == set(ARITHMETIC)
    for name, function in LAX.items():
        least = 0 if 'shift' in name else -7
        a, b = np.meshgrid(np.arange(least, 8, dtype=np.int32), np.arange(least, 5, dtype=np.int32))
        if name in ('divide', 'remainder'):
            a, b = a[b != 0], b[b != 0]
        np.testing.assert_array_equal(ARITHMETIC[name](a, b), function(a, b), err_msg=name)


def test_a_swapped_phi_is_not_invariant():
    def run(kept, a, b):
        def step(state, _):
            kept, a, b = state
            return (kept * 1, b, a), (a * kept).sum()

        return jax.lax.scan(step, (kept, a, b), None, length=6)

    rows = jax.sharding.NamedSharding(mesh_of(m=8), jax.P('m'))
    array = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=rows)
    text = jax.jit(run).lower(array, array, array).compile().as_text()
    swapped = []
    for phi in Graph(HloModule(text)).nodes:
        after = phi.inputs[1] if phi.opcode == 'phi' else phi
        while after.opcode == 'copy':
            after = after.inputs[0]
        if phi.opcode == after.opcode == 'phi' and after is not phi:
            swapped.append(phi)
    assert len(swapped) == 2
    assert not any(map(is_invariant, swapped))


def test_each_opcode_is_in_one_row():
    counts = Counter(opcode for opcodes in _ROWS.values() for opcode in opcodes.split())
    assert [opcode for opcode, n in counts.items() if n > 1] == []
