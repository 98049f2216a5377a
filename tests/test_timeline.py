"""Report.timeline: each instant counts once, and what hides communication is in the schedule."""

import copy
import dataclasses
import itertools
import json
import pickle
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of
from test_bounds import gpus_of, tpus
from test_collectives import kept

from einshard import Chip, Efficiency, EinshardError, explain, topology
from einshard._chips.table import as_chip
from einshard._explain.estimate import estimate

# private: HLO that no compiler here writes
from einshard._explain.reading import Reading
from einshard._explain.report_rows import Figures, Tried
from einshard._program.cost.kernels import Kernel, count_calls
from einshard._program.cost.network import Network
from einshard._program.cost.timeline import Simulation
from einshard._program.hlo.find_collectives import find_collectives
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.op_bytes import op_bytes
from einshard._program.hlo.text import HloModule
from einshard._program.jaxpr.graph import flatten
from einshard._spans import Bar, spans_svg

H100 = as_chip('H100')
E = H100.efficiency
GPUS = gpus_of(1, 4)


def run_of(text, devices=GPUS, chip=H100):
    ids = [device.id for device in devices]
    graph = Graph(HloModule(text))
    rows = find_collectives(graph, ids)
    return Simulation(graph, rows, [row.name for row in rows], devices, chip).run(), rows


def timeline_of(text, devices=GPUS, chip=H100):
    program = HloModule(text)
    return estimate(Reading(program=program, memory=None, devices=devices, chip=chip))


SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def program(*lines, others=''):
    body = '\n'.join(f'  {line}' for line in lines)
    head = 'HloModule jit_f, is_scheduled=true, num_partitions=4'
    start = 'ENTRY %main (x: bf16[4096,4096], w: bf16[1024,4096]) -> bf16[4096,4096] {'
    x = '  %x = bf16[4096,4096]{1,0} parameter(0)\n  %w = bf16[1024,4096]{1,0} parameter(1)'
    return f'{head}\n\n{SUM}\n{others}\n{start}\n{x}\n{body}\n}}\n'


N = 4096
DOT = (
    '{} = bf16[4096,4096]{{1,0}} dot({}, %x), lhs_contracting_dims={{1}}, '
    'rhs_contracting_dims={{0}}'
)
GATHER = 'bf16[4096,4096]{1,0} all-gather(%w), replica_groups=[1,4]<=[4], dimensions={0}'
START = (
    '(bf16[1024,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%w), '
    'replica_groups=[1,4]<=[4], dimensions={0}'
)
DONE = 'bf16[4096,4096]{1,0} all-gather-done('
STATE = '(s32[], bf16[4096,4096]{1,0}, bf16[1024,4096]{1,0})'
# by hand, from the data sheet and what is assumed
PRODUCT = 2 * N**3 / (989.5e12 * 0.75) + 2e-6
GATHERED = 3 / 4 * 2 * N**2 / 450e9 / 0.75 + 40e-6
ADDED = 3 * 2 * N**2 / (3.4e12 * 0.85) + 2e-6


def product(name='y', of='x', root=False):
    return f'{"ROOT " * root}{DOT.format(f"%{name}", f"%{of}")}'


@pytest.mark.parametrize(('devices', 'name'), [(gpus_of(1, 1), 'H100'), (tpus(1, 1), 'v5e')])
def test_one_device(devices, name):
    text = program(product(root=True)).replace('num_partitions=4', 'num_partitions=1')
    run, _ = run_of(text, devices, as_chip(name))
    assert run.seconds == pytest.approx(2 * N**3 / as_chip(name).flops['bf16'] / 0.9, rel=0.25)


def test_no_collectives():
    text = program(product(), 'ROOT %z = bf16[4096,4096]{1,0} add(%x, %y)')
    run, rows = run_of(text)
    assert not rows
    assert run.seconds == pytest.approx(PRODUCT + ADDED)
    assert [span.kind for span in run.spans] == ['product', 'other']
    timeline = timeline_of(text)
    assert timeline.totals.step == timeline.totals.compute == pytest.approx(PRODUCT + ADDED)
    assert (timeline.totals.exposed, timeline.totals.hidden, timeline.rows) == (0, None, ())


@pytest.mark.parametrize(
    'lines',
    [
        (f'ROOT %g = {GATHER}',),
        (f'%s = {START}', f'ROOT %g = {DONE}%s)'),
        (product(), f'%s = {START}', f'%g = {DONE}%s)', product('z', 'g', True)),
    ],
)
def test_one_collective_alone_is_exposed(lines):
    timeline = timeline_of(program(*lines))
    (row,) = timeline.rows
    assert row.time == row.exposed == timeline.totals.exposed == pytest.approx(GATHERED)
    assert (row.hidden, row.share, timeline.totals.hidden) == (0, 1, 0)
    n = sum('dot(' in line for line in lines)
    assert timeline.totals.step == pytest.approx(GATHERED + n * PRODUCT)


@pytest.mark.parametrize('n', [1, 2, 3])
def test_computing_hides_a_collective(n):
    """Either is the longer one."""
    names = [f'y{i}' for i in range(n)]
    lines = [product(name, of) for name, of in zip(names, ['x', *names], strict=False)]
    timeline = timeline_of(program(f'%s = {START}', *lines, f'ROOT %g = {DONE}%s)'))
    (row,) = timeline.rows
    left = max(0.0, GATHERED - n * PRODUCT)
    assert timeline.totals.step == pytest.approx(max(GATHERED, n * PRODUCT))
    assert row.time == pytest.approx(GATHERED)
    assert row.exposed == timeline.totals.exposed == pytest.approx(left)
    assert row.hidden == timeline.totals.hidden == pytest.approx(1 - left / GATHERED)


def test_collectives_queue_up_on_gpus():
    """A second one starts when the first is done, and the wait is for both."""
    second = START.replace('%w', '%w2')
    text = program(
        '%w2 = bf16[1024,4096]{1,0} copy(%w)',
        f'%s = {START}',
        f'%t = {second}',
        f'%h = {DONE}%t)',
        f'%g = {DONE}%s)',
        product('z', 'g', True),
    )
    timeline = timeline_of(text)
    assert [row.exposed for row in timeline.rows] == pytest.approx([GATHERED] * 2)


LOOP = f"""%body (s: (s32[], bf16[], bf16[])) -> (s32[], bf16[], bf16[]) {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[4096,4096]{{1,0}} get-tuple-element(%s), index=1
  %w = bf16[1024,4096]{{1,0}} get-tuple-element(%s), index=2
  %s0 = {START}
  {DOT.format('%d', '%x')}
  %g0 = {DONE}%s0)
  {DOT.format('%e', '%g0')}
  ROOT %t = {STATE} tuple(%i, %e, %w)
}}

%test (c: (s32[], bf16[], bf16[])) -> pred[] {{
  %c = {STATE} parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  ROOT %p = pred[] compare(%j, %j), direction=LT
}}
"""


def loop(trips):
    config = (
        f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ''
    )
    return program(
        '%zero = s32[] constant(0)',
        f'%in = {STATE} tuple(%zero, %x, %w)',
        f'%out = {STATE} while(%in), condition=%test, body=%body{config}',
        'ROOT %y = bf16[4096,4096]{1,0} get-tuple-element(%out), index=1',
        others=LOOP,
    )


def test_a_loop_takes_as_long_as_its_iterations():
    one, many = timeline_of(loop(1)), timeline_of(loop(100))
    assert one.totals.step == pytest.approx(max(PRODUCT, GATHERED) + PRODUCT)
    for name in ('step', 'compute', 'exposed', 'copies'):
        assert getattr(many.totals, name) == pytest.approx(100 * getattr(one.totals, name))
    assert many.totals.hidden == pytest.approx(one.totals.hidden)
    assert many.rows[0].time == pytest.approx(100 * GATHERED)
    (span,) = (span for span in many.spans if span.inner)
    assert (span.kind, span.trips, span.inner) == ('loop', 100, one.spans)
    assert span.waiting == pytest.approx(many.totals.exposed)


def test_a_loop_that_never_runs():
    timeline = timeline_of(loop(0))
    assert timeline.totals.step == 0
    assert [row.time for row in timeline.rows] == [0]
    assert 'the step: 0 ns' in timeline.svg
    assert str(timeline)


# --- every instant counts once --------------------------------------------------------------------

DEVICES = {
    'gpu_8': (gpus_of(1, 8), 'H100'),
    'v5e_4x4': (tpus(4, 4), 'v5e'),
    'v5p_2x2x2': (tpus(2, 2, 2), 'v5p'),
    'tpu7x_2x2x1': (tpus(2, 2, 1, cores=2), 'tpu7x'),
    'v5e_16x16': (tpus(16, 16), 'v5e'),
    '2_v5e_2x4': (tpus(2, 4, slices=2), 'v5e'),
}
KEPT = [
    pytest.param(machine, text, id=f'{machine}-{name}-{i}')
    for i, (machine, name, text) in enumerate(kept())
    if not machine.startswith('cpu')
]


def devices_of(machine):
    devices, name = DEVICES[machine]
    if machine.startswith('2_'):
        for i, device in enumerate(devices):
            device.id = 100000 * (i // 8 + 1) + i % 8
    return devices, as_chip(name)


def check_sums(run, rows):
    parts = ('compute', 'exposed', 'copy', 'unknown')
    assert sum(map(run.total, parts)) == pytest.approx(run.seconds)
    for i, row in enumerate(rows):
        busy, exposed = run.parts['busy', i], run.parts['exposed', i]
        assert exposed <= busy * (1 + 1e-9), row
        assert busy > 0 or i in run.untimed, row


def check_lanes(spans, seconds):
    """What the compute lane shows covers each instant once; collectives do not overlap."""
    at = 0.0
    for span in spans:
        if span.lane == 'compute':
            assert span.start == pytest.approx(at, rel=1e-9, abs=1e-12)
            at = span.start + span.seconds
        if span.inner:
            check_lanes(span.inner, span.seconds / span.trips)
    assert at == pytest.approx(seconds)


@pytest.mark.parametrize(('machine', 'text'), KEPT)
def test_kept_texts(machine, text):
    run, rows = run_of(text, *devices_of(machine))
    assert run.seconds > 0
    check_sums(run, rows)
    check_lanes(run.spans, run.seconds)
    for i in range(len(rows)):
        is_inside = rows[i].in_branch or not rows[i].is_exact
        assert (i in run.untimed) == is_inside
    assert bool(run.unknown) == (machine != 'cpu' and 'conditional(' in text)
    shown = {span.row for span in walk(run.spans) if span.lane == 'network'} - {None}
    assert shown == {i for i in range(len(rows)) if i not in run.untimed}


def walk(spans):
    for span in spans:
        yield span
        yield from walk(span.inner)


def test_time_of_each_collective_is_its_bound_over_what_is_reached():
    machine = 'v5e_4x4'
    devices, chip = devices_of(machine)
    checked = 0
    for _, _, text in kept(machine):
        run, rows = run_of(text, devices, chip)
        for i, row in enumerate(rows):
            if i not in run.untimed and row.sent is None:
                network = Network(devices, chip)
                by_hand = network.seconds(row) / 0.85 + row.executions * network.latency(row)
                assert run.parts['busy', i] == pytest.approx(by_hand)
                checked += 1
    assert checked > 10


# --- what is unknown ------------------------------------------------------------------------------

CALL = 'bf16[4096,4096]{1,0} custom-call(%x), custom_call_target="my_kernel"'
BRANCHES = f"""%one (a1: bf16[1024,4096]) -> bf16[4096,4096] {{
  %w = bf16[1024,4096]{{1,0}} parameter(0)
  ROOT %g1 = {GATHER}
}}

%two (a2: bf16[1024,4096]) -> bf16[4096,4096] {{
  %a2 = bf16[1024,4096]{{1,0}} parameter(0)
  %z2 = bf16[] constant(0)
  ROOT %b2 = bf16[4096,4096]{{1,0}} broadcast(%z2), dimensions={{}}
}}
"""


@pytest.mark.parametrize(
    ('lines', 'others', 'why'),
    [
        ((f'%y = {CALL}',), '', r'a kernel without a cost \(my_kernel\)'),
        (
            (
                '%p = pred[] constant(true)',
                '%y = bf16[4096,4096]{1,0} conditional(%p, %w, %w), true_computation=%one, '
                'false_computation=%two',
            ),
            BRANCHES,
            'a conditional',
        ),
        (
            (
                '%zero = s32[] constant(0)',
                f'%in = {STATE} tuple(%zero, %x, %w)',
                f'%out = {STATE} while(%in), condition=%test, body=%body',
                '%y = bf16[4096,4096]{1,0} get-tuple-element(%out), index=1',
            ),
            LOOP,
            'a loop of unknown length',
        ),
        (
            ('%y = bf16[4096,4096]{1,0:S(5)} copy(%x)',),
            '',
            'a transfer between host and device',
        ),
    ],
)
def test_no_step_where_a_part_is_unknown(lines, others, why):
    outside = GATHER.replace('%w', '%w0')
    before = ('%w0 = bf16[1024,4096]{1,0} copy(%w)', f'%first = {outside}')
    text = program(*before, *lines, 'ROOT %z = bf16[4096,4096]{1,0} add(%y, %first)', others=others)
    timeline = timeline_of(text)
    assert timeline.totals == type(timeline.totals)()
    (found,) = timeline.unknown
    assert re.fullmatch(why, found)
    rows = {row.name: row for row in timeline.rows}
    first = rows.pop('first')
    assert first.time == first.exposed == pytest.approx(GATHERED)  # outside, it keeps its times
    assert all(row.time is row.exposed is row.share is row.hidden is None for row in rows.values())
    assert bool(rows) == ('all-gather' in others)
    assert f'the time of a step is unknown: {found}' in str(timeline)
    assert ' a step takes' not in str(timeline)
    run, rows = run_of(text)
    check_sums(run, rows)
    check_lanes(run.spans, run.seconds)


def test_what_hides_behind_a_kernel_without_a_cost_is_unknown():
    timeline = timeline_of(program(f'%s = {START}', f'%y = {CALL}', f'ROOT %g = {DONE}%s)'))
    (row,) = timeline.rows
    assert row.time == pytest.approx(GATHERED)
    assert row.exposed is row.hidden is row.share is None


def test_a_kernel_that_declares_its_cost():
    cost = '"cost_estimate":{"flops":"137438953472","bytes_accessed":"100663296"}'
    call = f'{CALL}, backend_config={{{cost}}}'
    run, _ = run_of(program(f'ROOT %y = {call}'))
    assert run.seconds == pytest.approx(PRODUCT)
    assert not run.unknown


def test_ragged_sends_unknown_bytes():
    ragged = (
        'bf16[4096,4096]{1,0} ragged-all-to-all(%x, %x, %o, %o, %o, %o), channel_id=1, '
        'replica_groups={{0,1,2,3}}'
    )
    timeline = timeline_of(program('%o = s32[4]{0} constant({0,1,2,3})', f'ROOT %y = {ragged}'))
    assert timeline.unknown == ('a ragged all-to-all that sends unknown bytes',)
    assert timeline.rows[0].time is None


# --- declared costs -------------------------------------------------------------------------------

SCOPED = 'metadata={op_name="jit(f)/jvp(layer)/flash/dot_general"}'


def with_kernels(text, **kernels):
    graph = Graph(HloModule(text))
    rows = find_collectives(graph, [device.id for device in GPUS])
    return Simulation(graph, rows, [row.name for row in rows], GPUS, H100, kernels).run()


def seconds_of(flops, n_bytes):
    return max(flops / (989.5e12 * 0.75), n_bytes / (3.4e12 * 0.85)) + 2e-6


@pytest.mark.parametrize('cost', [(1e12, 1e6), (1e6, 1e9), (0, 0)])
def test_a_scope_takes_what_is_declared(cost):
    text = program(product(), f'{product("z", "y", True)}, {SCOPED}')
    run = with_kernels(text, flash=Kernel(*cost, calls=3))
    assert run.seconds == pytest.approx(PRODUCT + 3 * seconds_of(*cost))


def test_a_scope_in_a_loop_takes_what_is_declared():
    """Calls are those of the whole run."""
    scoped = loop(10).replace(DOT.format('%d', '%x'), f'{DOT.format("%d", "%x")}, {SCOPED}')
    run, plain = with_kernels(scoped, flash=Kernel(1e13, 0, calls=10)), with_kernels(loop(10))
    gain = seconds_of(1e13, 0) - max(PRODUCT, GATHERED)
    assert run.seconds - plain.seconds == pytest.approx(10 * gain)


def test_a_custom_call_takes_what_is_declared():
    run = with_kernels(program(f'ROOT %y = {CALL}'), my_kernel=Kernel(1e12, 1e6))
    assert run.seconds == pytest.approx(seconds_of(1e12, 1e6))
    assert not run.unknown


def test_a_scope_of_which_nothing_is_left():
    run = with_kernels(program(product(root=True)), flash=Kernel(1e12, 0, calls=1))
    assert list(run.unknown) == ["'flash', no operation of which is left in the program"]


def attention(x, w):
    def layer(x, w):
        with jax.named_scope('layer'):
            x = x @ w
            with jax.named_scope('flash'):
                return jax.jit(jnp.sin)(jnp.tanh(x @ x.T) @ x), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
    for _ in range(3):  # the first follows the loop
        with jax.named_scope('flash'):
            x = jnp.tanh(x @ x.T) @ x
        x = x * 2
    return x.sum()


def test_calls_of_scopes_are_counted():
    """By hand: 4 and 3 in the forward pass and in the backward pass, and 4 are recomputed."""
    args = np.ones((8, 16), np.float32), np.ones((4, 16, 16), np.float32)
    traced = jax.jit(jax.grad(attention)).trace(*args)
    calls = count_calls(flatten(traced.jaxpr), ['flash', 'transpose(flash)'])
    assert (calls['flash'], calls['transpose(flash)']) == (11, 7)
    traced = jax.jit(attention).trace(*args)
    calls = count_calls(flatten(traced.jaxpr), ['flash'])
    assert calls['flash'] == 7


def test_blocks_of_a_declared_scope_are_one_call():
    """A loop in the scope runs in each call."""

    def f(x):
        for _ in range(2):
            with jax.named_scope('flash'):
                x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, length=5)
                x = x + 1
            x = x * 2
        return x

    traced = jax.jit(f).trace(np.ones((8, 8), np.float32))
    assert count_calls(flatten(traced.jaxpr), ['flash'])['flash'] == 2


@pytest.mark.slow
def test_explain_takes_costs():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    mesh = topology('v5e:2x2', data=4)
    x = jax.ShapeDtypeStruct((4096, 512), 'bfloat16', sharding=NamedSharding(mesh, P('data')))
    w = jax.ShapeDtypeStruct((4, 512, 512), 'bfloat16', sharding=NamedSharding(mesh, P()))
    step = jax.jit(jax.grad(attention, argnums=1))
    costs = {'flash': (1e12, 0), 'transpose(flash)': (2e12, 0)}
    timeline = explain(step, x, w, tries=0, costs=costs).timeline
    chip = as_chip('v5e')
    declared = 25e12 / (chip.flops['bf16'] * chip.efficiency.products)
    assert declared < timeline.totals.compute < 1.05 * declared


# --- chips ----------------------------------------------------------------------------------------


def test_axes_of_a_torus_have_their_own_links():
    """Along two mesh axes, collectives run at the same time on TPUs, and in turn on GPUs."""
    first = START.replace('[1,4]<=[4]', '[2,2]<=[4]')
    second = START.replace('[1,4]<=[4]', '[2,2]<=[2,2]T(1,0)').replace('%w', '%w2')
    text = program(
        '%w2 = bf16[1024,4096]{1,0} copy(%w)',
        f'%s = {first}',
        f'%t = {second}',
        f'%g = {DONE}%s)',
        f'%h = {DONE}%t)',
        'ROOT %z = bf16[4096,4096]{1,0} add(%g, %h)',
    ).replace('bf16[4096,4096]{1,0}) all-gather-start', 'bf16[2048,4096]{1,0}) all-gather-start')
    graph, ends = Graph(HloModule(text)), {}
    rows = [
        dataclasses.replace(row, along=axis)
        for row, axis in zip(find_collectives(graph), 'xy', strict=True)
    ]
    for chip, devices in (('v5e', tpus(2, 2)), ('H100', GPUS)):
        run = Simulation(graph, rows, ['', ''], devices, as_chip(chip)).run()
        spans = [span for span in run.spans if span.lane == 'network']
        assert len(spans) == 2
        ends[chip] = [span.start for span in spans]
    assert ends['v5e'][0] == ends['v5e'][1]
    assert ends['H100'][0] < ends['H100'][1]


@pytest.mark.parametrize(
    ('strategy', 'sent'), [('DEFAULT', 1), ('TRITON_ONE_SHOT', 3), ('TRITON_TWO_SHOT', 1)]
)
def test_kernels_of_xla_need_no_nccl(strategy, sent):
    """In one shot, each of 4 GPUs reads the arrays of 3 others; else the switch may add them up."""
    config = f'{{"collective_backend_config":{{"kernel_strategy":"KERNEL_STRATEGY_{strategy}"}}}}'
    run, _ = run_of(
        program(
            'ROOT %y = bf16[4096,4096]{1,0} all-reduce(%x), replica_groups=[1,4]<=[4], '
            f'to_apply=%sum, backend_config={config}'
        )
    )
    constant = E.collective if strategy == 'DEFAULT' else H100.latency
    assert run.seconds == pytest.approx(sent * 2 * N**2 / 450e9 / 0.5 + constant)


def test_between_domains_a_collective_takes_the_slower_network():
    within, across = (
        run_of(program(f'ROOT %g = {GATHER}'), devices)[0].seconds
        for devices in (gpus_of(1, 4), gpus_of(2, 2))
    )
    assert within == pytest.approx(GATHERED)
    # a domain of two receives half of the array, over two NICs of 50 GB/s
    assert across == pytest.approx(N**2 / 100e9 / 0.75 + 40e-6)


def test_chips_without_measurements_have_shares_and_no_times():
    added = '%y = bf16[4096,4096]{1,0} add(%x, %x)'
    text = program(f'%s = {START}', added, f'%g = {DONE}%s)', product('z', 'g', True))
    timeline, known = (timeline_of(text, chip=as_chip(name)) for name in ('A100', 'H100'))
    assert not timeline.assumed.source
    assert timeline.totals.step is timeline.totals.compute is timeline.totals.exposed is None
    (row,) = timeline.rows
    assert row.time is row.exposed is None
    assert 0 < row.hidden < 1
    assert row.share == 1
    assert timeline.totals.hidden == row.hidden
    assert not re.search(r'\d (s|ms)\b', str(timeline))
    assert 'shares, not times' in str(timeline)
    assert '100%' in str(timeline)
    assert 'a step takes about' in str(known)
    assert not re.search(r'\d [mu]?s\b', timeline.svg)
    assert re.search(r'\d [mu]?s\b', known.svg)


def test_own_figures():
    half = Efficiency(0.5, 0.5, 0.5, 0.5, 0.5, collective=1e-3, launch=0)
    ours = Chip('ours', {'bf16': 1e15}, 1e11, 1e12, 1e11, efficiency=half)
    timeline = timeline_of(program(product(), f'ROOT %g = {GATHER}'), chip=ours)
    assert timeline.totals.compute == pytest.approx(2 * N**3 / 0.5e15)
    assert timeline.totals.exposed == pytest.approx(3 / 4 * 2 * N**2 / 0.5e11 + 1e-3)
    assert 'given by the user' in re.sub(r'\s+', ' ', str(timeline))


def test_chips_without_efficiency_have_no_timeline():
    plain = Chip('plain', {'bf16': 1e15}, 1e11, 1e12, 1e11)
    with pytest.raises(EinshardError, match='there is no timeline for plain: it is unknown'):
        timeline_of(program(product(root=True)), chip=plain)
    unknown = [SimpleNamespace(id=0, platform='gpu', device_kind='NVIDIA X1')]
    with pytest.raises(EinshardError, match='there is no timeline for NVIDIA X1'):
        timeline_of(program(product(root=True)), unknown, None)


# --- bytes of operations --------------------------------------------------------------------------

FUSED = """%fused (p0: f32[100,8], p1: s32[], p2: f32[1,8]) -> f32[100,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,8]{1,0} parameter(2)
  %z = s32[] constant(0)
  %old = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %z), dynamic_slice_sizes={1,8}
  %new = f32[1,8]{1,0} add(%old, %p2)
  ROOT %r = f32[100,8]{1,0} dynamic-update-slice(%p0, %new, %p1, %z)
}

%reads (q0: f32[100,8], q1: s32[]) -> f32[100,8] {
  %q0 = f32[100,8]{1,0} parameter(0)
  %q1 = s32[] parameter(1)
  ROOT %q = f32[100,8]{1,0} add(%q0, %q0)
}
"""


@pytest.mark.parametrize(
    ('line', 'n_bytes'),
    [
        # the old slice, the number of the row, the new numbers, and the row that is written
        ('f32[100,8]{1,0} fusion(%x, %i, %u), kind=kLoop, calls=%fused', 32 + 4 + 32 + 32),
        ('f32[100,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%reads', 3200 + 3200),
        ('f32[100,8]{1,0} add(%x, %x)', 3 * 3200),
        ('f32[1,8]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,8}', 32 + 8 + 32),
        ('f32[100,8]{1,0} dynamic-update-slice(%x, %u, %i, %i)', 32 + 8 + 32),
        ('f32[100,8]{1,0} copy(%x)', 2 * 3200),
        ('f32[100,8]{1,0:S(1)} copy(%x)', 3200),
        ('(f32[100,8]{1,0}, f32[100,8]{1,0}, u32[]) copy-start(%x)', 2 * 3200),
    ],
)
def test_bytes_of_operations(line, n_bytes):
    is_start = 'copy-start' in line
    root = '' if is_start else 'ROOT '
    end = '  ROOT %e = f32[100,8]{1,0} copy-done(%y)\n' if is_start else ''
    text = (
        f'HloModule jit_f\n\n{FUSED}\n'
        'ENTRY %main (x: f32[100,8], i: s32[], u: f32[1,8]) -> f32[100,8] {\n'
        '  %x = f32[100,8]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n'
        f'  %u = f32[1,8]{{1,0}} parameter(2)\n  {root}%y = {line}\n{end}}}\n'
    )
    program = HloModule(text)
    ops = program.computations['main']
    types = {op.name: op.type for op in ops}
    (op,) = (op for op in ops if op.name == 'y')
    assert op_bytes(program, op, types) == n_bytes


# --- long programs --------------------------------------------------------------------------------


def test_calls_may_be_nested_deep():
    n = 2000
    called = '\n'.join(
        f'%f{i} (a{i}: f32[8]) -> f32[8] {{\n  %a{i} = f32[8]{{0}} parameter(0)\n'
        + (
            f'  ROOT %c{i} = f32[8]{{0}} call(%a{i}), to_apply=%f{i - 1}\n}}\n'
            if i
            else '  ROOT %c0 = f32[8]{0} add(%a0, %a0)\n}\n'
        )
        for i in range(n)
    )
    text = (
        f'HloModule jit_f\n\n{called}\nENTRY %main (x: f32[8]) -> f32[8] {{\n'
        f'  %x = f32[8]{{0}} parameter(0)\n'
        f'  ROOT %y = f32[8]{{0}} call(%x), to_apply=%f{n - 1}\n}}\n'
    )
    run, _ = run_of(text)
    assert run.seconds == pytest.approx(E.launch, rel=0.01)


def test_layers_in_a_row_take_time_in_proportion():
    """A computation that is called many times is simulated once."""
    n = 300
    called = """%layer (v0: bf16[4096,4096]) -> bf16[4096,4096] {
  %v0 = bf16[4096,4096]{1,0} parameter(0)
  ROOT %d0 = bf16[4096,4096]{1,0} dot(%v0, %v0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    names = ['x', *(f'y{i}' for i in range(n))]
    lines = [
        f'{"ROOT " * (i == n - 1)}%y{i} = bf16[4096,4096]{{1,0}} call(%{names[i]}), to_apply=%layer'
        for i in range(n)
    ]
    run, _ = run_of(program(*lines, others=called))
    assert run.seconds == pytest.approx(n * PRODUCT)


# --- compiled programs ----------------------------------------------------------------------------


def layers(w, x):
    def layer(x, w):
        return jax.nn.relu(x @ w), None

    return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))


def arguments(mesh, n=8):
    def shape(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    return shape(P(None, 'data'), n, 2048, 2048), shape(P('data'), 8192, 2048)


@pytest.fixture(scope='module')
def report():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    mesh = topology('v5e:2x4', data=8)
    return explain(jax.jit(jax.grad(layers)), *arguments(mesh), tries=0)


def test_compiled_for_tpus(report):
    timeline = report.timeline
    totals = timeline.totals
    assert report.timeline is timeline
    assert timeline.source == 'estimated'
    assert sum((totals.compute, totals.exposed, totals.copies, totals.idle)) == pytest.approx(
        totals.step
    )
    assert totals.step > max(bound.seconds for bound in report.bounds)
    assert {row.name for row in timeline.rows} == {row.name for row in report.collectives}
    exposed = [row.exposed for row in timeline.rows]
    assert exposed == sorted(exposed, reverse=True)
    assert sum(exposed) == pytest.approx(totals.exposed)
    assert sum(line.share for line in timeline.lines) == pytest.approx(1)
    assert totals.hidden == pytest.approx(1 - sum(exposed) / sum(r.time for r in timeline.rows))
    # the forward pass has one product a layer, the backward pass two
    line = f'test_timeline.py:{layers.__code__.co_firstlineno + 2}'
    assert timeline.lines[0].source.endswith(line)
    (rows,) = ([*group] for _, group in itertools.groupby(timeline.rows, lambda r: r.along))
    assert rows[0].along == 'data'


@pytest.mark.slow
def test_notes_are_ordered_by_exposed_time():
    """Before them, by bytes alone: what nothing sends came first."""
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    mesh = topology('v5e:2x4', tensor=8)
    table = jax.ShapeDtypeStruct((8192, 512), np.float32, sharding=NamedSharding(mesh, P('tensor')))
    w = jax.ShapeDtypeStruct((8192, 2048), np.float32, sharding=NamedSharding(mesh, P()))
    report = explain(jax.jit(lambda table, w: (jnp.sort(table, 0), jnp.cos(w))), table, w, tries=0)
    first, *_, last = report.notes
    assert first.kind == 'gathered for an operation'
    assert last.kind == 'replicated'
    assert first.bytes < last.bytes
    exposed = {row.name: row.exposed for row in report.timeline.rows}
    assert sum(exposed[name] for name in first.explains) > 0.5 * report.timeline.totals.exposed


@pytest.mark.slow
def test_the_collective_that_nothing_hides():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    mesh = topology('v5e:2x4', data=8)
    x = jax.ShapeDtypeStruct((8192, 8192), 'bfloat16', sharding=NamedSharding(mesh, P('data')))
    report = explain(jax.jit(lambda x: jnp.sort(x, 0)), x, tries=0)
    (note,) = (note for note in report.notes if note.kind == 'exposed communication')
    rows = [row for row in report.timeline.rows if row.name in note.explains]
    assert report.timeline.rows[0] in rows
    share = sum(row.exposed for row in rows) / report.timeline.totals.step
    assert f'{share:.0%} of the estimated step' in note.text
    assert 'it is synchronous' in note.text
    # computing hides all of these
    w = jax.ShapeDtypeStruct((8, 4096, 4096), 'bfloat16', sharding=NamedSharding(mesh, P()))
    hidden = explain(
        jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]),
        *(
            jax.ShapeDtypeStruct(
                (65536, 4096), 'bfloat16', sharding=NamedSharding(mesh, P('data'))
            ),
            w,
        ),
        tries=0,
    )
    assert not [note for note in hidden.notes if note.kind == 'exposed communication']


def test_text_and_page(report, tmp_path):
    timeline = report.timeline
    text = str(timeline)
    assert 'estimate, not measured: the compiled schedule' in text
    assert re.search(r'a step takes about [\d.]+ [mu]s: computing', text)
    assert 'assumed: products at 90% of the peak, HBM at 85%' in text
    bars = [line.count('█') + line.count('░') for line in text.splitlines()]
    assert max(bars) == 40
    # from then on, the report has it, too
    assert 'timeline on TPU v5e' in str(report)
    report.save(tmp_path / 'report.html')
    page = (tmp_path / 'report.html').read_text()
    assert timeline.svg in page
    timeline.save(tmp_path / 'timeline.txt')
    assert (tmp_path / 'timeline.txt').read_text() == f'{timeline}\n'


def test_json_has_the_timeline_only_if_it_was_asked_for(report):
    assert dataclasses.replace(report).to_dict()['timeline'] is None
    timeline = report.timeline
    found = json.loads(json.dumps(report.to_dict()))['timeline']
    assert found['totals']['step'] == timeline.totals.step
    assert [row['exposed'] for row in found['rows']] == [row.exposed for row in timeline.rows]
    assert found['assumed']['products'] == 0.9
    assert 'spans' not in found


def test_copies_of_a_report(report):
    fresh = pickle.loads(pickle.dumps(dataclasses.replace(report)))
    with pytest.raises(EinshardError, match='this report no longer has its program'):
        _ = fresh.timeline
    timeline = report.timeline
    for stored in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert stored.timeline == timeline


@pytest.mark.gpu
def test_compiled_for_gpus():
    mesh = topology('h100:2x8', data=16)
    report = explain(jax.jit(jax.grad(layers)), *arguments(mesh), tries=0)
    totals = report.timeline.totals
    assert totals.step > report.bounds.largest.seconds
    assert totals.compute + totals.exposed + totals.copies == pytest.approx(totals.step)
    assert 0 <= totals.hidden < 1


def test_programs_for_cpus_have_no_timeline():
    mesh = mesh_of(data=8)
    report = explain(layers, *arguments(mesh, 2), chip='H100', tries=0)
    with pytest.raises(EinshardError, match=r'compiled for CPUs.* not that of H100') as caught:
        _ = report.timeline
    assert "topology('h100:8')" in str(caught.value)


def test_schedules_of_tpus_are_not_those_of_gpus(report):
    reading = dataclasses.replace(report.reading, chip=H100)
    with pytest.raises(EinshardError, match='for TPU v5 lite: its schedule is not that of H100'):
        estimate(reading)
    assert estimate(dataclasses.replace(reading, chip=as_chip('v6e'))).chip == 'TPU v6e'


def test_texts_without_a_schedule():
    text = program(product(root=True)).replace('is_scheduled=true, ', '')
    with pytest.raises(EinshardError, match='has no schedule'):
        timeline_of(text)


# --- the picture ----------------------------------------------------------------------------------

SVG = '{http://www.w3.org/2000/svg}'


def boxes(svg):
    """(lane text or None, x, width, color, title) of the boxes of an SVG."""
    root = ET.fromstring(svg)
    for box in root.iter(f'{SVG}svg'):
        title = box.find(f'{SVG}title')
        if title is not None:
            x, width = (float(box.get(name).rstrip('%')) for name in ('x', 'width'))
            yield x, width, box.find(f'{SVG}rect').get('fill'), title.text


def test_boxes_are_where_spans_are():
    spans = (
        Bar('compute', 0.0, 1.0, 'product', 'a.py:1'),
        Bar('network', 0.5, 1.5, 'all-gather', 'a.py:2 params/w', 0),
        Bar('compute', 1.0, 1.0, 'wait', 'a.py:2 params/w', 0),
        Bar('compute', 2.0, 2.0, 'other', 'a<b>.py:3'),
    )
    svg = spans_svg('title', spans, 4.0)
    found = [(x, width, title) for x, width, _, title in boxes(svg)]
    assert found == [
        (0, 25, '1 s: products a.py:1'),
        (25, 25, '1 s: waiting a.py:2 params/w'),
        (50, 50, '2 s: other computing a<b>.py:3'),
        (12.5, 37.5, '1.5 s: all-gather a.py:2 params/w'),
    ]
    colors = [color for _, _, color, _ in boxes(svg)]
    assert len({*colors}) == 4
    red = [int(colors[1][i : i + 2], 16) for i in (1, 3, 5)]
    assert red[0] > 2 * red[1]


def test_labels_are_for_wide_and_narrow_pages():
    spans = (
        Bar('compute', 0.0, 0.16, 'other', 'some_model.py:123 params/w'),
        Bar('compute', 0.16, 0.84, 'wait', 'b.py:2'),
    )
    root = ET.fromstring(spans_svg('title', spans, 1.0))
    texts = {
        (t.get('class'), t.text)
        for t in root.iter(f'{SVG}text')
        if 'spans' in (t.get('class') or '')
    }
    assert texts == {
        ('spans-wide', 'some_model.py:123'),
        ('spans-narrow', ':123'),
        ('spans-wide', 'b.py:2'),
        ('spans-narrow', 'b.py:2'),
    }


def test_long_loops_have_their_own_panel_and_short_ones_none():
    def span(start, seconds, inner=()):
        kind = 'loop' if inner else 'other'
        return Bar('compute', start, seconds, kind, '', trips=10, inner=inner)

    inside = (span(0, 0.05),)
    svg = spans_svg('title', (span(0, 0.05, inside), span(0.05, 0.95, inside)), 1.0)
    assert svg.count('one of 10 iterations') == 1


def test_loops_in_loops_have_panels():
    def loop(trips, seconds, inner):
        return Bar('compute', 0, seconds, 'loop', '', trips=trips, inner=inner)

    layers = loop(50, 0.01, (Bar('compute', 0, 0.0002, 'other'),))
    svg = spans_svg('title', (loop(100, 1.0, (layers,)),), 1.0)
    assert [svg.count(f'one of {n} iterations') for n in (100, 50)] == [1, 1]
    assert 'one of 50 iterations: 200 us' in svg


def test_many_spans_make_a_small_picture():
    spans = tuple(Bar('compute', i * 1e-6, 1e-6, 'other', f'a.py:{i}') for i in range(20_000))
    svg = spans_svg('title', spans, 0.02)
    assert len(svg) < 1_500_000
    found = list(boxes(svg))
    assert sum(width for _, width, _, _ in found) == pytest.approx(100, abs=1)


def test_a_saved_picture_follows_the_viewer(report, tmp_path):
    report.timeline.save(tmp_path / 'step.svg')
    text = (tmp_path / 'step.svg').read_text()
    ET.fromstring(text)
    assert 'color-scheme: light dark' in text
    assert 'color-scheme' not in report.timeline.svg
    assert 'estimate, not measured' in text
    assert 'one of 8 iterations' in text
    assert np.isclose(max(x + width for x, width, _, _ in boxes(text)), 100, atol=0.5)


# --- estimates of suggestions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ('before', 'after', 'says'),
    [
        (2e-3, 1e-3, 'the estimated step 50% shorter'),
        (2e-3, 3e-3, 'the estimated step 50% longer'),
        (2e-3, 1.9e-3, None),
        (None, 1e-3, None),
        (2e-3, None, None),
    ],
)
def test_estimates_of_suggestions(before, after, says):
    tried = Tried(5, None, 0, 1.0, Figures(10, None, 0, 1.0, step=before), step=after)
    assert str(tried) == '; '.join(filter(None, ['sends 5 B instead of 10 B', says]))
