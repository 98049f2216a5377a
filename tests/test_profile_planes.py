"""Profiles of GPUs and TPUs, from planes that the tests write by the published schema."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusal import refusal
from xplane import Plane, module_of, space

from einshard import Chip, explain, topology
from einshard._chips.table import as_chip
from einshard._explain.estimate import estimate

# private: programs and events of devices that are not here
from einshard._explain.measure import measure
from einshard._explain.reading import Reading
from einshard._explain.timeline import measured_timeline
from einshard._page import Page, page_text
from einshard._profile.form import alike, pack, read_form
from einshard._profile.measured import LATENCY, SYNCHRONOUS, WAITS, find_gaps, measured_sections
from einshard._program.hlo.opcodes import FREE
from einshard._program.hlo.text import HloModule

GPU_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=4

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}

ENTRY %main (x: bf16[4096,4096], w: bf16[2048,4096]) -> bf16[4096,4096] {
  %x = bf16[4096,4096]{1,0} parameter(0)
  %w = bf16[2048,4096]{1,0} parameter(1)
  %s = (bf16[2048,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%w), GROUPS, dimensions={0}
  %y = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g = bf16[4096,4096]{1,0} all-gather-done(%s)
  %rs = bf16[4096,4096]{1,0} all-reduce-start(%y), GROUPS, to_apply=%sum
  %r = bf16[4096,4096]{1,0} all-reduce-done(%rs)
  ROOT %z = bf16[4096,4096]{1,0} dot(%r, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
""".replace('GROUPS', 'replica_groups={{0,1},{2,3}}')
H100 = as_chip('H100')


def devices(n, platform):
    return [
        SimpleNamespace(
            id=i,
            platform=platform,
            slice_index=0,
            coords=[0, 0, i],
            process_index=0,
            device_kind='H100',
        )
        for i in range(n)
    ]


def reading_of(text, n, platform='gpu', chip=H100):
    program = HloModule(text)
    form = pack(read_form(memoryview(module_of(program))))
    return Reading(program=program, memory=None, devices=devices(n, platform), chip=chip, form=form)


def stats(op, program=5):
    return {'hlo_op': op, 'hlo_module': 'jit_f', 'program_id': program}


def gpu_plane(n, late=0.0, runs=2, program=5, extra=()):
    """One GPU: two streams. The first product of odd devices takes `late` us longer."""
    compute, network = [], []
    for run in range(runs):
        at = 1000.0 * run
        y = 100 + late * (n % 2)
        compute += [
            ('gemm_y', at, y, stats('y', program)),
            ('gemm_z', at + 150, 50, stats('z', program)),
            ('MemcpyD2D', at + 200, 10, {'correlation_id': 7}),
        ]
        network += [
            ('ncclDevKernel_AllGather', at + 10, 50, stats('s', program)),
            ('ncclDevKernel_AllReduce', at + y, 150 - y, stats('rs', program)),
        ]
    lines = {
        'Stream #13(Compute)': [*compute, *extra],
        'Stream #20(Compute)': network,
        'XLA Ops': [('y', 0.0, 900, stats('y', program))],  # derived, and wrong
    }
    return Plane(f'/device:GPU:{n}', lines)


def write(folder, planes, programs, warnings=()):
    path = folder / 'it.xplane.pb'
    metadata = Plane('/host:metadata', programs=programs)
    path.write_bytes(space(metadata, *planes, warnings=warnings))
    return path


@dataclass
class Case:
    folder: Any

    def measured(self, planes, text=GPU_TEXT, theirs=None, warnings=(), n=4, program=None, **given):
        """What is measured; `theirs` is the text in the trace."""
        modules = {'jit_f(5)': module_of(HloModule(theirs or text))}
        path = write(self.folder, planes, modules, warnings)
        return measure(reading_of(text, n, **given), path, program)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


US = 1e-6


def test_streams_of_gpus(case):
    measured = case.measured([gpu_plane(n, late=30) for n in range(4)])
    assert (measured.platform, measured.devices, measured.runs) == ('gpu', (0, 1, 2, 3), 2)
    t = measured.totals
    # even devices compute 150 us and wait 30, odd ones compute 180 us
    assert t.step == pytest.approx([210 * US] * 3)
    assert (t.compute, t.wait, t.collective, t.other, t.idle) == pytest.approx(
        (165 * US, 15 * US, 20 * US, 10 * US, 0), abs=1e-12
    )
    gather, reduce = measured.rows
    assert (gather.kind, reduce.kind) == ('all-gather', 'all-reduce')
    assert (gather.time.mean, gather.wait.mean, gather.exposed.mean) == pytest.approx(
        (50 * US, 0, 0), abs=1e-12
    )
    assert (reduce.time.mean, reduce.wait.mean, reduce.exposed.mean) == pytest.approx(
        (35 * US, 15 * US, 35 * US)
    )
    assert (reduce.slowest, reduce.events) == (1, 8)
    text = page_text(Page('', tuple(measured_sections(measured))), 100)
    assert 'over runs 35 us to 35 us; comes last: device 1; cause: synchronous' in text
    assert (t.collectives, t.hidden) == pytest.approx((85 * US, 50 * US))
    even, odd = 100 + 50 + 50 + 50, 130 + 50 + 50 + 20
    assert measured.joined == pytest.approx((even + odd) / (even + odd + 20))
    (line,) = measured.lines
    assert line.flops == 4 * 4096**3
    assert line.peak == pytest.approx(4 * 4096**3 / 989.5e12 / (165 * US), rel=0.01)


def test_causes(case):
    # an all-reduce whose done follows its start; waiting is a cause if it is more than half
    causes = {
        late: case.measured([gpu_plane(n, late) for n in range(4)]).rows[1].cause
        for late in (30, 35, 45)
    }
    assert causes == {30: SYNCHRONOUS, 35: WAITS, 45: WAITS}
    assert case.measured([gpu_plane(n) for n in range(4)]).rows[0].cause == ''  # hidden
    for sync, chip, cause in (
        ('f32[65536]', 'H100', SYNCHRONOUS),
        ('f32[256]', 'H100', LATENCY),
        ('f32[256]', None, SYNCHRONOUS),  # no bound, so that latency is not proven
    ):
        text = SYNCHRONOUS_TEXT.replace('f32[8]', sync)
        events = [('nccl', 100.0 * i, 50, stats('r')) for i in range(2)]
        plane = [Plane(f'/device:GPU:{n}', {'Stream #1': events}) for n in range(2)]
        chosen = chip and as_chip(chip)
        assert case.measured(plane, text, n=2, chip=chosen).rows[0].cause == cause


SYNCHRONOUS_TEXT = """HloModule jit_f, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum
}
"""


def test_first_run_is_left_out_if_it_is_slow(case):
    def plane(n, first):
        starts = [0, *(first + 100 * i for i in range(3))]
        took = [first, 50, 50, 50]
        events = [('nccl', float(s), t, stats('r')) for s, t in zip(starts, took, strict=True)]
        return Plane(f'/device:GPU:{n}', {'Stream #1': events})

    for first, runs in ((60, 4), (90, 3)):
        measured = case.measured([plane(n, first) for n in range(2)], SYNCHRONOUS_TEXT, n=2)
        assert measured.runs == runs
        assert any('the first run is left out' in note for note in measured.notes) == (runs == 3)
        assert measured.rows[0].events == 2 * runs


def test_runs_of_which_a_part_is_missing(case):
    """The trace starts and ends within a run: with z, and with y."""
    before = [('gemm_z', 0.0, 50, stats('z'))]
    planes = []
    for n in range(4):
        compute = [*before]
        network = []
        for run in range(2):
            at = 1000.0 * (run + 1)
            compute += [('y', at, 100, stats('y')), ('z', at + 150, 50, stats('z'))]
            network += [('s', at + 10, 50, stats('s')), ('rs', at + 100, 50, stats('rs'))]
        compute.append(('y', 4000.0, 100, stats('y')))
        network.append(('s', 4010.0, 50, stats('s')))
        lines = {'Stream #13': compute, 'Stream #20': network}
        planes.append(Plane(f'/device:GPU:{n}', lines))
    measured = case.measured(planes)
    assert measured.runs == 2
    assert measured.totals.step.mean == pytest.approx(200 * US)
    assert any('of which the trace has only a part' in note for note in measured.notes)


def test_a_trace_of_one_host_of_several(case):
    """Two of four devices, of which no group has two."""
    measured = case.measured([gpu_plane(n, late=30) for n in (0, 2)])
    assert measured.devices == (0, 2)
    assert [row.wait for row in measured.rows] == [None, None]
    assert measured.totals.wait == 0
    lines = measured_sections(measured)[0].lines
    assert 'devices 0, 2 of 4' in lines[0]
    half = case.measured([gpu_plane(n, late=30) for n in (2, 3)])
    assert 'devices 2 to 3 of 4' in measured_sections(half)[0].lines[0]
    assert half.rows[1].wait.mean == pytest.approx(15 * US)
    assert half.rows[1].slowest == 3


def test_command_buffers_hide_instructions(case):
    """Kernels of a graph have neither an instruction nor a program."""
    graph = [('graph_kernel', 160.0, 30, {'cuda_graph_id': 1}), ('k', 1160.0, 30, {'x': 1})]
    planes = [gpu_plane(n, extra=graph) for n in range(4)]
    planes[0] = gpu_plane(0, extra=[('k', 300.0, 2000, {'cuda_graph_id': 1})])
    measured = case.measured(planes)
    assert measured.joined < 0.9
    assert any('xla_gpu_enable_command_buffer' in note for note in measured.notes)


def test_kernels_of_other_programs_do_not_count(case):
    others = [('other', 300.0, 500, stats('y', 6)), ('other', 1300.0, 500, stats('y', 6))]
    with_others = case.measured([gpu_plane(n, extra=others) for n in range(4)])
    assert with_others.totals == case.measured([gpu_plane(n) for n in range(4)]).totals


def test_the_kernels_of_a_gpu_may_differ(case):
    renamed = GPU_TEXT.replace('%y ', '%cublas ').replace('%y)', '%cublas)').replace('%rs', '%s2')
    renamed = renamed.replace(
        'dot(%r, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}',
        'custom-call(%r, %g), custom_call_target="__cublas$gemm"',
    )
    planes = [gpu_plane(n, late=30) for n in range(4)]
    swapped = []
    for n in range(4):
        late = 30 * (n % 2)
        compute, network = [], []
        for at in (0.0, 1000.0):
            compute += [('a', at, 100 + late, stats('cublas')), ('b', at + 150, 50, stats('z'))]
            network += [
                ('c', at + 10, 50, stats('s')),
                ('d', at + 100 + late, 50 - late, stats('s2')),
            ]
        swapped.append(Plane(f'/device:GPU:{n}', {'Stream #13': compute, 'Stream #20': network}))
    measured = case.measured(swapped, theirs=renamed)
    assert not measured.same_kernels
    assert measured.joined == 1
    plain = case.measured(planes)
    assert [row.time for row in measured.rows] == [row.time for row in plain.rows]
    assert [row.wait for row in measured.rows] == [row.wait for row in plain.rows]
    text = measured_sections(measured)[0].lines
    assert "the kernels differ from the report's: joined by collectives" in text
    # a TPU's or a CPU's kernels do not differ from one compilation to the next
    error = refusal(case.measured, swapped, theirs=renamed, platform='tpu')
    assert error.facts['first difference to jit_f(5)'] == 'dot y is not in it'


def test_programs_that_are_not_alike():
    ours = read_form(memoryview(module_of(HloModule(GPU_TEXT))))
    for old, new in (
        (
            'all-gather-start(%w), replica_groups={{0,1},{2,3}}',
            'all-gather-start(%w), replica_groups={{0,2},{1,3}}',
        ),
        ('all-reduce-start(%y)', 'reduce-scatter(%y)'),
        ('bf16[2048,4096]', 'bf16[1024,4096]'),
    ):
        theirs = read_form(memoryview(module_of(HloModule(GPU_TEXT.replace(old, new)))))
        assert theirs != ours
        assert alike(ours, theirs) is None
    assert alike(ours, ours) == {'s': 's', 'rs': 'rs'}


def test_two_equal_programs_that_ran(tmp_path):
    module = module_of(HloModule(GPU_TEXT))
    path = tmp_path / 'it.xplane.pb'
    metadata = Plane('/host:metadata', programs={'jit_f(5)': module, 'jit_f(6)': module})
    events = [
        (op, at + base, 10, stats(op, program))
        for program, base in ((5, 0.0), (6, 500.0))
        for op, at in (('s', 0.0), ('y', 20.0), ('rs', 40.0), ('z', 60.0))
    ]
    planes = [Plane(f'/device:GPU:{n}', {'Stream #13': events}) for n in range(4)]
    path.write_bytes(space(metadata, *planes))
    reading = reading_of(GPU_TEXT, 4)
    error = refusal(measure, reading, path, None)
    assert error.sentence == '2 programs of the trace are equal to that of the report, and ran'
    assert error.facts['instead'] == 'pass program=5, the number in jit_f(5)'
    assert measure(reading, path, 6).program == 'jit_f(6)'
    # one that did not run is no reason to ask
    path.write_bytes(space(metadata, *(gpu_plane(n) for n in range(4))))
    assert measure(reading, path, None).program == 'jit_f(5)'


def test_lost_events(case):
    planes = [gpu_plane(n) for n in range(4)]
    warning = 'GPU 0 dropped 12 activity events'
    measured = case.measured(planes, warnings=[warning])
    assert f'the profiler says: {warning}' in measured.notes
    lost = Plane('/device:GPU:7', stats={'dropped_traces': 3})
    measured = case.measured([*planes, lost])
    assert 'the profiler says: /device:GPU:7 lost 3 events' in measured.notes


def test_a_trace_without_programs(tmp_path):
    path = tmp_path / 'it.xplane.pb'
    path.write_bytes(space(gpu_plane(0)))
    error = refusal(measure, reading_of(GPU_TEXT, 4), path, None)
    assert 'has no programs' in error.sentence
    assert '/host:metadata' in error.facts['missing']


def test_a_program_without_a_form(tmp_path):
    reading = Reading(program=HloModule(GPU_TEXT), memory=None, devices=devices(4, 'gpu'))
    error = refusal(measure, reading, tmp_path, None)
    assert error.sentence.startswith('the compiler gave no program')


# --- TPUs ----------------------------------------------------------------------------------------

TPU_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%test (t: (s32[], f32[64,64])) -> pred[] {
  %t = (s32[], f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (t2: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %t2 = (s32[], f32[64,64]{1,0}) parameter(0)
  %i2 = s32[] get-tuple-element(%t2), index=0
  %v = f32[64,64]{1,0} get-tuple-element(%t2), index=1
  %start = (f32[64,64]{1,0}, f32[64,64]{1,0}) collective-permute-start(%v), PAIRS
  %dot = f32[64,64]{1,0} dot(%v, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[64,64]{1,0} collective-permute-done(%start)
  %add = f32[64,64]{1,0} add(%dot, %done)
  %one = s32[] constant(1)
  %next = s32[] add(%i2, %one)
  ROOT %both = (s32[], f32[64,64]{1,0}) tuple(%next, %add)
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %r = f32[64,64]{1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum
  %init = (s32[], f32[64,64]{1,0}) tuple(%zero, %r)
  %loop = (s32[], f32[64,64]{1,0}) while(%init), condition=%test, body=%body
  ROOT %out = f32[64,64]{1,0} get-tuple-element(%loop), index=1
}
""".replace('PAIRS', 'source_target_pairs={{0,1},{1,0}}')
V5E = as_chip('v5e')


def tpu_plane(n, with_async=True, run_ids=(70, 71)):
    """One TPU: the all-reduce of device 1 starts 10 us late."""
    modules, ops, starts = [], [], []
    for run, run_id in enumerate(run_ids):
        at = 1000.0 * run
        modules.append(('jit_f(5)', at, 200, {'run_id': run_id}))
        modules.append(('jit_other(6)', at + 300, 100, {'run_id': run_id + 9}))
        late = 10 * n
        ops += [
            ('%r = f32[64,64] all-reduce(%x)', at + late, 30 - late, {}),
            ('%loop = (s32[], f32[64,64]) while(%init)', at + 30, 150, {}),
            ('%r = f32[64,64] all-reduce(%x)', at + 310, 50, {}),  # of the other program
        ]
        for i in range(3):
            t = at + 30 + 50 * i
            ops += [
                ('%start = (f32[64,64]) collective-permute-start(%v)', t, 1, {}),
                ('%dot = f32[64,64] dot(%v, %v)', t + 1, 30, {}),
                ('%done = f32[64,64] collective-permute-done(%start)', t + 31, 9, {}),
                ('%add = f32[64,64] add(%dot, %done)', t + 40, 10, {}),
            ]
            starts.append(('%start = (f32[64,64]) collective-permute-start(%v)', t, 40, {}))
    lines = {'XLA Modules': modules, 'XLA Ops': ops}
    if with_async:
        lines['Async XLA Ops'] = starts
    return Plane(f'/device:TPU:{n}', lines)


@pytest.mark.parametrize('with_async', [False, True])
def test_lines_of_tpus(case, with_async):
    planes = [tpu_plane(n, with_async) for n in range(2)]
    planes.append(Plane('/device:TPU:0 SparseCore 0', {'XLA Ops': [('%r = x', 0.0, 9, {})]}))
    measured = case.measured(planes, TPU_TEXT, n=2, platform='tpu', chip=V5E)
    assert (measured.platform, measured.runs, measured.joined) == ('tpu', 2, 1)
    reduce, permute = sorted(measured.rows, key=lambda row: row.kind)
    assert (reduce.kind, permute.kind) == ('all-reduce', 'collective-permute')
    # from its start to the end of its done, of which the dot hides 30 us, three times
    assert permute.time.mean == pytest.approx(120 * US)
    assert permute.exposed.mean == pytest.approx(30 * US)
    assert permute.wait.mean == pytest.approx(0, abs=1e-12)
    assert permute.events == 2 * 2 * 3
    assert (reduce.time.mean, reduce.wait.mean) == pytest.approx((25 * US, 5 * US))
    t = measured.totals
    # device 0 starts at 0, device 1 at 10
    assert t.step.mean == pytest.approx(175 * US)
    assert t.compute == pytest.approx(120 * US)  # the loop itself is not added
    assert (t.wait, t.collective, t.other, t.idle) == pytest.approx(
        (5 * US, 50 * US, 0, 0), abs=1e-12
    )
    assert reduce.slowest == 1


def test_run_ids_of_their_own(case):
    """Devices whose run ids differ: the last runs are the same."""
    planes = [tpu_plane(0, run_ids=(1, 2)), tpu_plane(1, run_ids=(8, 9))]
    measured = case.measured(planes, TPU_TEXT, n=2, platform='tpu', chip=V5E)
    assert measured.runs == 2
    assert measured.rows[0].wait.mean == pytest.approx(5 * US)


def test_gaps_are_sorted(case):
    measured = case.measured(
        [tpu_plane(n) for n in range(2)], TPU_TEXT, n=2, chip=V5E, platform='tpu'
    )
    gaps = find_gaps(measured)
    assert [gap[0] for gap in gaps] == sorted((gap[0] for gap in gaps), reverse=True)
    assert {gap[3].split()[0] for gap in gaps} == {'all-reduce', 'collective-permute', 'compute'}
    for gap, took, bound, _ in gaps:
        assert gap == pytest.approx(took - bound)


def test_lanes_of_the_picture(case):
    measured = case.measured([gpu_plane(n, late=30) for n in range(4)])
    assert {span.lane for span in measured.spans} == {'Stream #13(Compute)', 'Stream #20(Compute)'}
    kinds = [span.kind for span in sorted(measured.spans)]
    assert kinds.count('product') == 2
    assert measured.slowest == 0
    assert kinds.count('wait') == 1  # device 0 waits for device 1
    reading = reading_of(GPU_TEXT, 4)
    timeline = measured_timeline(measured, 'H100', estimate(reading))
    assert timeline.estimate.source == 'estimated'
    # one scale: the longer run is as wide as the page
    svg = timeline.svg
    assert svg.index('>measured:') < svg.index('>estimated:')
    assert 'Stream #13' in svg


def test_many_events_are_drawn_as_one(case):
    text = SYNCHRONOUS_TEXT.replace(
        'ROOT %r = f32[8]{0} all-reduce(%x)',
        '%y = f32[8]{0} add(%x, %x)\n  ROOT %r = f32[8]{0} all-reduce(%y)',
    )
    events = [('k', float(i), 0.5, stats('y')) for i in range(500)]
    events.append(('nccl', 600.0, 50, stats('r')))
    planes = [Plane(f'/device:GPU:{n}', {'Stream #1': events}) for n in range(2)]
    measured = case.measured(planes, text, n=2)
    assert len(measured.spans) == 2
    first, _ = measured.spans
    assert first.seconds == pytest.approx(499.5 * US)


def test_a_chip_without_an_estimate(case):
    chip = Chip('ours', {'bf16': 1e15}, 1e11, 4e12, 1e11)
    measured = case.measured([gpu_plane(n) for n in range(4)], chip=chip)
    assert measured.rows[0].bound > 0
    assert measured_timeline(measured, chip.name, None).estimate is None


# --- programs of real compilers ----------------------------------------------------------------


def compiled_for(mesh):
    """A train step for devices that this machine does not have, and its module."""

    def shape(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def loss(w, x):
        for layer in w:
            x = jax.nn.relu(x @ layer) @ layer.T
        return (x.astype(jnp.float32) ** 2).sum()

    w = [shape(P(None, 'tensor'), 1024, 4096) for _ in range(2)]
    compiled = jax.jit(jax.grad(loss)).lower(w, shape(P('data'), 2048, 1024)).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    return explain(compiled, tries=0), module.as_serialized_hlo_module_proto()


def entry_events(report, event):
    """Each instruction of the entry computation takes a microsecond, one after another."""
    program = report.reading.program
    ops = [op for op in program.computations[program.entry] if op.opcode not in FREE]
    return ops, [event(op.name, float(i)) for i, op in enumerate(ops)]


def check_joined(report, path, n):
    measured = report.with_profile(path).profile
    assert (measured.joined, measured.same_kernels, len(measured.devices)) == (1, True, n)
    assert [row.name for row in measured.rows] == [row.name for row in report.collectives]
    assert all(row.time.mean > 0 for row in measured.rows)
    assert all(row.wait.mean == pytest.approx(0, abs=1e-12) for row in measured.rows)
    t = measured.totals
    assert t.compute + t.wait + t.collective + t.other + t.idle == pytest.approx(t.step.mean)
    assert {line.source for line in measured.lines if line.flops} == {
        row.source for row in report.products
    }


@pytest.mark.slow
def test_a_program_of_the_compiler_for_tpus(tmp_path):
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    report, module = compiled_for(topology('v5e:2x4', data=4, tensor=2))
    ops, events = entry_events(report, lambda name, at: (f'%{name} = x', at, 1.0, {}))
    modules = [('jit_loss(5)', 0.0, float(len(ops)), {'run_id': 1})]
    planes = [
        Plane(f'/device:TPU:{n}', {'XLA Modules': modules, 'XLA Ops': events}) for n in range(8)
    ]
    check_joined(report, write(tmp_path, planes, {'jit_loss(5)': module}), 8)


@pytest.mark.gpu
def test_a_program_of_the_compiler_for_gpus(tmp_path):
    report, module = compiled_for(topology('h100:1x8', data=4, tensor=2))
    _, events = entry_events(report, lambda name, at: ('k', at, 1.0, stats(name)))
    planes = [Plane(f'/device:GPU:{n}', {'Stream #13': events}) for n in range(8)]
    check_joined(report, write(tmp_path, planes, {'jit_loss(5)': module}), 8)
