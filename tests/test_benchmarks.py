"""The benchmarks at a tiny size run, and the performance page is that of the figures.

No test asserts a time.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from flags import WITHOUT_TPU
from spawn import free_port

from einshard import einshard, make_sharding

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks import (  # noqa: E402
    __main__,
    _counting,
    _handwritten,
    _hardware,
    _measure,
    _models,
    _page,
    _programs,
    _report,
    _table,
    collectives,
    importing,
    layouts,
    memory,
    programs,
    tpu,
)
from benchmarks._headlines import HEADLINES, Headline, find_headline, headline_rows  # noqa: E402

HAS_LIBTPU = importlib.util.find_spec('libtpu') is not None


def start(*arguments, program=('-m', 'benchmarks')):
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': WITHOUT_TPU}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def finish(*processes):
    """The output of each process; all must succeed."""
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {0}, printed
    return printed


def read(path):
    return _report.Report.from_json(path.read_text(encoding='utf-8'))


@pytest.fixture(scope='module')
def tiny_run(tmp_path_factory):
    """The report and the output of all benchmarks at a tiny size, on the tests' devices."""
    file = tmp_path_factory.mktemp('tiny') / 'all.json'
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # which the command changes
        patch.setattr('gc.collect', lambda: 0)  # before each figure, half of the time
        __main__.main(['all', '--tiny', '--json', str(file)])
    return read(file), printed.getvalue()


def rows_of(report, benchmark):
    return [row for row in report.rows if row.benchmark == benchmark]


def test_published_peaks(monkeypatch):
    assert _hardware.published_peak('NVIDIA A100-SXM4-40GB') == (156e12, 300e9)
    assert _hardware.published_peak('cpu') is None
    monkeypatch.setattr(collectives, 'published_peak', lambda kind: _hardware.Peak(1e11, 1e9))
    bench = _measure.Bench('collectives', tiny=True)
    collectives.measure(bench, 'all-gather', collectives.groups(16)[0], 2**12)
    assert bench.rows[0].details['published'] == (1e9, 'bytes/s')


@pytest.mark.slow
@pytest.mark.parametrize('name', __main__.MODULES)
def test_benchmark(tiny_run, name):
    report, printed = tiny_run
    assert rows_of(report, name) or (name == 'tpu' and not HAS_LIBTPU)
    assert f'{name}: ' in printed
    for row in rows_of(report, name):
        assert row.name.split()[0] in printed
        assert (row.against == '') == (row.other is None)
        assert (row.ratio is None) == (not row.other)
        assert row.rounds > 0
    for text in report.left_out:
        assert f'left out: {text}' in printed


@pytest.mark.slow
def test_sharded_is_traced_and_compiled_as_often_as_jit(tiny_run):
    rows = [row for row in tiny_run[0].rows if row.unit in ('traces', 'compilations')]
    assert len(rows) == 6
    for row in rows:
        assert row.figure == row.other, row.name


@pytest.mark.slow
def test_programs_are_those_of_hand_written_jax(tiny_run):
    rows = [row for row in tiny_run[0].rows if row.unit == 'lines']
    cases = [f'{m}, {p}' for m in ('MLP', 'transformer') for p in ('forward', 'training step')]
    if HAS_LIBTPU:
        cases.append('v5e:2x2, MLP, training step')
    assert [row.name for row in rows] == [f'{case}: different lines' for case in cases]
    assert {row.figure for row in rows} == {0}


@pytest.mark.slow
def test_import_starts_no_backend(tiny_run, capsys):
    assert rows_of(tiny_run[0], 'import')[-1].figure == 0
    exec(importing.PROGRAM)  # here a backend runs
    assert capsys.readouterr().out.split()[2] == '1'


@pytest.mark.slow
def test_bandwidth_is_bytes_per_time(tiny_run):
    rows = rows_of(tiny_run[0], 'collectives')
    assert len(rows) == 15
    for row in rows:
        kind, size = re.match(r'(\S+) of (\d) KiB', row.name).groups()
        n = 16 if 'all 16' in row.name else 2
        sent = {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1}.get(kind, (n - 1) / n)
        bandwidth, unit = row.details['bandwidth']
        assert unit == 'bytes/s'
        assert bandwidth * row.figure == pytest.approx(sent * int(size) * 1024), row.name


# --- the command ---------------------------------------------------------------------------------


def test_list_needs_no_jax():
    program = "import sys, benchmarks.__main__ as m; m.main([]); assert 'jax' not in sys.modules"
    (printed,) = finish(start(program=('-c', program)))
    assert [line.split()[0] for line in printed.splitlines()[2:]] == list(__main__.MODULES)


COUNT = '--xla_force_host_platform_device_count='


@pytest.mark.parametrize(
    ('flags', 'in_jax', 'expected'),
    [
        ('', '', f'{COUNT}4'),
        ('--xla_other=1', '', f'--xla_other=1 {COUNT}4'),
        # the user's count is kept
        (f'{COUNT}3', '', f'{COUNT}3'),
        ('', '5', ''),
    ],
)
def test_devices_are_simulated(monkeypatch, flags, in_jax, expected):
    monkeypatch.setenv('XLA_FLAGS', flags)
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', in_jax)
    if not in_jax:
        monkeypatch.delenv('JAX_NUM_CPU_DEVICES')
    __main__.simulate_devices(4)
    assert os.environ['XLA_FLAGS'] == expected


def test_one_device(monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    bench = _measure.Bench('collectives', tiny=True)
    collectives.run(bench)
    assert (bench.rows, bench.left_out) == ([], ['collectives: there is one device'])


@pytest.mark.slow
def test_several_processes(tmp_path):
    options = ['--tiny', '--devices', '1', '--processes', '2']
    options += ['--coordinator', f'127.0.0.1:{free_port()}']
    files = [tmp_path / '0.json', tmp_path / '1.json']
    processes = [
        start('collectives', *options, '--process', str(i), '--json', str(file))
        for i, file in enumerate(files)
    ]
    printed = finish(*processes)
    assert ['all-gather of' in text for text in printed] == [True, False]
    assert [file.exists() for file in files] == [True, False]
    report = read(files[0])
    assert report.environment['process_count'] == 2
    assert len(report.rows) == len(collectives.COLLECTIVES)


def test_benchmarks_of_several_processes():
    assert __main__.names_of('all', True) == list(__main__.DISTRIBUTED)
    assert __main__.names_of('all', False) == list(__main__.MODULES)
    assert __main__.names_of('programs', True) == ['programs']
    with pytest.raises(SystemExit, match='placement measures one process; several processes can'):
        __main__.names_of('placement', True)


@pytest.mark.parametrize('processes', [1, 2])
def test_on_a_tpu_other_benchmarks_follow(monkeypatch, processes):
    ran = []
    for module in tpu.FOLLOWING:
        monkeypatch.setattr(module, 'run', lambda bench: ran.append(bench.name))
    monkeypatch.setattr(tpu, 'compile_for', lambda bench, name: None)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
    monkeypatch.setattr(jax, 'process_count', lambda: processes)
    options = argparse.Namespace(name='tpu', topology=None)
    tpu.run(_measure.Bench('tpu', options=options))
    alone = ['placement', 'dispatch'] if processes == 1 else []
    assert ran == [*alone, 'programs', 'layouts', 'collectives', 'scaling']


# --- the measurement -----------------------------------------------------------------------------


class Clock:
    """A clock that moves only when a call says how long it took."""

    def __init__(self):
        self.now = 0.0
        self.calls = ''

    def call(self, name, duration):
        def called():
            self.calls += name
            self.now += duration

        return called

    def read(self):
        return self.now


ROUNDS = _measure.MIN_ROUNDS
SHORT = 2**-20, 2**-7
asked = []
# durations, options; rounds and calls
INTERLEAVED = {
    # 20 rounds of 5 seconds, after a warm-up and an estimate each
    'alternating': ((3.0, 2.0), {'seconds': 100.0}, 20, 'aabb' + 'abba' * 10),
    # 525 short calls take half a millisecond
    'in blocks': (SHORT, {'seconds': 0.05}, ROUNDS, {'a': 4 + ROUNDS * 525, 'b': 4 + ROUNDS}),
    # without a warm-up
    'given': ((3.0, 2.0), {'seconds': 100.0, 'rounds': 3}, 3, 'abbaab'),
    'of processes that agree': (
        (3.0, 2.0),
        {'seconds': 100.0, 'agree': lambda n: asked.append(n) or 2},
        2,
        'aabb' + 'aabbbbaa',
    ),
}


@pytest.mark.parametrize('case', INTERLEAVED)
def test_interleaved_rounds(case):
    durations, options, rounds, calls = INTERLEAVED[case]
    clock = Clock()
    a, b = itertools.starmap(clock.call, zip('ab', durations, strict=True))
    times = _measure.interleave(a, b, clock=clock.read, **options)
    assert times == tuple([duration] * rounds for duration in durations)
    assert (Counter(clock.calls) if isinstance(calls, dict) else clock.calls) == calls
    assert asked == ([1, 1, 20] if 'agree' in options else [])
    asked.clear()


def test_ratios_are_taken_round_by_round():
    # a machine at half the speed from the third round on: no ratio changes
    row = _measure.Bench('b').record('x', 's', [1.0, 1.0, 2.0, 2.0], 'y', [2.0, 2.0, 4.0, 4.0])
    assert (row.figure, row.other, row.ratio, row.spread) == (1.5, 3.0, 0.5, 0.0)


def test_spread_is_half_the_interquartile_range():
    assert _measure.relative_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3, rel=1e-5)
    assert _measure.relative_spread([2.0]) is None


@pytest.mark.parametrize(('other', 'ratio'), [(0, None), (10, 0.5)])
def test_no_ratio_to_zero(other, ratio):
    assert _measure.Bench('b').record('x', 'bytes', [5], 'y', [other]).ratio == ratio


def test_times_are_of_one_call():
    clock = Clock()
    bench = _measure.Bench('loops', tiny=True, clock=clock.read)
    row = bench.compare('x', clock.call('a', 3.0), 'y', clock.call('b', 2.0), n_calls=10)
    assert (row.figure, row.other, row.ratio) == (0.3, 0.2, 1.5)


def test_counts_of_traces_and_compilations():
    # other tests clear the listeners of JAX
    jax.monitoring.clear_event_listeners()
    jax.monitoring.register_event_duration_secs_listener(_counting._listen)
    values = [np.ones(3, np.float32), np.ones(3, np.float32), np.ones(4, np.float32)]

    def forgetful(function):
        jitted = jax.jit(function)

        def call(x):
            jitted.clear_cache()
            return jitted(x)

        return call

    assert _counting.count_calls(abs, jax.jit, values) == (2, 2)
    assert _counting.count_calls(abs, forgetful, values) == (3, 3)
    with pytest.raises(RuntimeError, match='3 traces'):
        _counting.count_calls(abs, lambda function: function, values)


@pytest.mark.parametrize('width', [0, 40])
def test_progress_is_one_line(monkeypatch, capsys, width):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, 'fileno', lambda: 2, raising=False)
    monkeypatch.setattr(os, 'get_terminal_size', lambda fd: os.terminal_size((width, 24)))
    show = _measure.progress_line('memory')
    show('x' * 200)
    show('')
    line, end = capsys.readouterr().err.split('\r\x1b[K')[1:]
    assert (len(line), end) == ((width or 80) - 1, '')


# --- what the benchmarks measure -----------------------------------------------------------------


@pytest.mark.parametrize('parts', [2, 4])
def test_different_lines_are_counted(devices8, parts):
    shapes = (_models.floats(32, 64), _models.floats(64, 32)), _models.floats(8, 32)
    by_hand = _handwritten.mlp_forward(_models.mesh_by_hand(devices8, parts))
    ours = _programs.compiled(lambda: _models.mlp_forward(devices8, 2), shapes)
    theirs = _programs.compiled(lambda: by_hand, shapes)
    assert (_programs.different_lines(ours, theirs) == 0) == (parts == 2)


def test_different_shardings_are_counted(devices8):
    """The lines are the same: HLO numbers any devices from 0."""
    first, last = (
        jax.jit(lambda x: x + 1, in_shardings=make_sharding('x*', mesh=devices))
        .lower(_models.floats(8))
        .compile()
        for devices in (devices8, jax.devices()[8:])
    )
    assert _programs.different_lines(first, first) == 0
    assert _programs.different_lines(first, last) == 2  # argument and result


def test_model_flops_are_those_of_the_products():
    """The flops are three times those of the forward pass, which are counted in its trace."""
    transformer = _models.transformer
    c = dataclasses.replace(_models.config_on(2, _models.TINY), n_layers=3, n_kv_heads=4)

    def loss(weights, tokens):
        return transformer.mean_loss(weights, tokens, transformer.UNSHARDED)

    traced = jax.make_jaxpr(loss)(_models.state_shapes(c).weights, _models.token_shapes(c))
    assert 3 * product_flops(traced.jaxpr) == _models.model_flops(c)


def product_flops(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(inner, 'eqns'):
                executions = equation.params.get('length', 1)
                total += executions * product_flops(getattr(inner, 'jaxpr', inner))
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * int(np.prod(sizes)) * equation.outvars[0].aval.size
    return total


@pytest.mark.parametrize(
    ('layout', 'parts'),
    [('data', 1), ('tensor', 8), ('data and tensor', 2), ('FSDP', 8), ('FSDP and tensor', 8)],
)
def test_layouts_shard_the_matrices(devices8, layout, parts):
    """Each device has one of so many parts of every matrix, and all of every norm."""
    shapes = _models.state_shapes(_models.config_on(8, _models.SMALL)).weights
    placed = einshard(shapes, layouts.LAYOUTS[layout].weights, mesh=devices8)
    norms = placed.layers.attention_norm, placed.layers.mlp_norm, placed.norm
    matrices = [x for x in jax.tree.leaves(placed) if not any(x is norm for norm in norms)]
    assert len(matrices) == 9
    for arrays, expected in ((matrices, parts), (norms, 1)):
        assert {x.size / np.prod(x.sharding.shard_shape(x.shape)) for x in arrays} == {expected}


@pytest.mark.parametrize('n', [2, 8])
def test_products_have_all_placements(n):
    expressions = layouts.placements_of('b', 'x', n)
    assert len(set(expressions)) == (3 if n == 2 else 5)
    for expression in expressions:
        make_sharding(expression, mesh=jax.devices()[:n])


def test_groups_are_those_of_the_hand_written_mesh():
    near, far = [], []
    for group in collectives.groups(jax.device_count()):
        _, by_hand = collectives.by_hand(collectives.all_reduce, group)
        assert make_sharding(group.expression).is_equivalent_to(by_hand, 3)
        ids = np.array([device.id for device in by_hand.mesh.devices.flat])
        (far if group.apart else near).append(ids.reshape(by_hand.mesh.devices.shape))
    assert [np.diff(ids, axis=1).max() for ids in near] == [1, 1]
    assert [np.diff(ids, axis=0).max() for ids in far] == [8]


@pytest.mark.parametrize(
    ('counts', 'kind', 'text'),
    [
        ({'all-gather': 1}, 'all-gather', ''),
        ({'all-reduce': 1}, 'reduce-scatter', ' (as 1 all-reduce)'),
        ({}, 'all-reduce', ' (as none)'),
    ],
)
def test_other_collectives_are_named(counts, kind, text):
    assert collectives.instead(counts, kind) == text


def test_utilization(monkeypatch):
    """The model's flops, relative to what 16 devices can do in that time."""
    bench = _measure.Bench('programs')
    row = bench.record('time', 's', [2.0])
    programs.utilization(bench, row, 1e12)
    kind = jax.devices()[0].device_kind
    assert bench.left_out == [f'model flops utilization: no published peak is known for {kind}']
    monkeypatch.setattr(programs, 'published_peak', lambda kind: _hardware.Peak(1e11, 1e9))
    programs.utilization(bench, row, 1e12)
    assert row.details == {'model flops utilization': '31.2%'}


def test_peaks_of_devices_are_recorded(monkeypatch):
    """Accelerators report their peaks; the test imitates one."""
    asked = []

    def in_a_process(side, n_bytes, rounds):
        asked.append(side)
        peak = 300 if side == 'ours' else 200
        return {'host': 100, 'device': peak, 'ours': [1.0] * rounds, 'theirs': [2.0] * rounds}

    monkeypatch.setattr(memory, 'in_a_process', in_a_process)
    bench = _measure.Bench('memory')
    memory.run(bench)
    assert asked == ['ours', 'theirs', 'theirs', 'ours']
    assert [(row.ratio, row.rounds) for row in bench.rows] == [(0.5, 12), (1.0, 2), (1.5, 2)]


# --- the report, the tables and the page ---------------------------------------------------------


@pytest.mark.slow
def test_json_has_a_line_per_row(tiny_run):
    report, _ = tiny_run
    text = report.to_json()
    assert _report.Report.from_json(text) == report
    lines = [line for line in text.splitlines() if line.startswith('{"benchmark"')]
    assert len(lines) == len(report.rows)
    with pytest.raises(TypeError, match='unexpected keyword argument'):
        _report.Report.from_json(text.replace('"figure"', '"number"', 1))


def test_cpu_model(tmp_path):
    cpuinfo = tmp_path / 'cpuinfo'
    cpuinfo.write_text('processor\t: 0\nmodel name\t: AMD EPYC 7B13\n', encoding='utf-8')
    assert _report.cpu_model(cpuinfo) == 'AMD EPYC 7B13'
    assert _report.cpu_model(tmp_path / 'missing')


@pytest.mark.parametrize(
    ('value', 'unit', 'text'),
    [
        (1.25e-5, 's', '12.5 us'),
        (-4e-8, 's', '-40 ns'),
        (9.996e-7, 's', '1 us'),
        (0.0, 's', '0 ns'),
        (3.0, 's', '3 s'),
        (1536, 'bytes', '1.5 KiB'),
        (5, 'bytes', '5 bytes'),
        (2.5e9, 'bytes/s', '2.5 GB/s'),
        (1, 'traces', '1 trace'),
        (0, 'traces', '0 traces'),
    ],
)
def test_quantity(value, unit, text):
    assert _table.quantity(value, unit) == text


ROW = _report.Row('placement', 'array placed already', 's', 4e-7, 'put', 8e-6, 0.05, 0.024, 9)


@pytest.mark.parametrize(
    ('of', 'at_most', 'texts'),
    [
        ('ratio', 1 / 15, ('<= 1/15', '1/20', 'met')),
        ('figure', 3e-7, ('<= 300 ns', '400 ns', 'missed')),
        ('difference', 1e-6, ('<= +1 us', '-7.6 us', 'met')),
        ('ratio', None, ('', '1/20', '')),
    ],
)
def test_targets(of, at_most, texts):
    headline = Headline('placement', 'array.*', '', of, at_most)
    judged = _table.judged_text(headline, headline.judged(ROW), 's')
    assert (_table.target_text(headline, ROW), judged, _table.met_text(headline, ROW)) == texts
    assert headline.is_met(ROW) == (texts[2] != 'missed')
    alone = _report.Row('placement', 'array placed already', 's', 1.0)
    if of != 'figure':
        with pytest.raises(ValueError, match='compared with nothing'):
            headline.judged(alone)


@pytest.mark.parametrize(
    ('ratio', 'spread', 'words'),
    [
        (1 / 17.3, 0.02, '1/17'),
        (56.5, 0.03, '56 times more'),
        (1.13, 0.03, '13% more'),
        (0.742, 0.07, '26% less'),
        (1.032, 0.07, 'equal'),
        (1.004, 0.001, 'equal'),
        (1.0, None, 'equal'),
        (None, None, ''),
    ],
)
def test_ratios_in_words(ratio, spread, words):
    row = dataclasses.replace(ROW, ratio=ratio, spread=spread)
    assert _table.words_of_ratio(row) == words
    same = _report.Row('programs', 'different lines', 'lines', 0)
    assert _table.words_of_ratio(same) == 'none'


def test_plain_table(capsys):
    other = dataclasses.replace(ROW, name='b', details={'memory': (1536, 'bytes'), 'kind': 'c'})
    _table.print_plain('title', [_table.cells(row) for row in (ROW, other)])
    title, headings, *lines = capsys.readouterr().out.splitlines()[1:]
    assert (title, headings.split()) == ('title', ' '.join(_table.HEADINGS).split())
    assert [re.split('  +', line) for line in lines] == [
        ['array placed already', '400 ns', '8 us', '1/20 ± 2%', '<= 1/15 met'],
        ['b; memory 1.5 KiB; kind c', '400 ns', '8 us', '1/20 ± 2%'],
    ]


def test_narrow_terminal(monkeypatch, capsys):
    """Names are folded, numbers are not."""
    pytest.importorskip('rich')
    monkeypatch.setenv('COLUMNS', '70')
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    row = dataclasses.replace(ROW, name='a tree of 1,000 leaves [each] on the host')
    _table.print_benchmark('b: about', [row], ['x: y'])
    lines = re.sub(r'\x1b\[[\d;]*m', '', capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 70
    assert any('400 ns' in line and '1/20 ± 2%' in line for line in lines)
    assert '[each]' in ''.join(lines)
    assert lines[-2:] == ['compared with: put', 'left out: x: y']


def test_every_headline_was_measured():
    for report in _page.read_results():
        assert {headline for headline, _, _ in headline_rows(report.rows)} == set(HEADLINES)


@pytest.mark.slow
def test_every_headline_is_a_row_of_the_code(tiny_run):
    """The names in HEADLINES are those of the benchmarks, but for the tiny sizes."""
    sizes = {
        '512 bytes': '1 MiB',
        '4 leaves': '200 leaves',
        r'10 (?=numpy|jax)': '1,000 ',
        'new expression, 8': 'new expression, 9,216',
        'v5e:2x2, MLP': 'v5e:4x4, transformer',
    }
    found = set()
    for row in tiny_run[0].rows:
        name = row.name
        for tiny, full in sizes.items():
            name = re.sub(tiny, full, name)
        found.add(find_headline(dataclasses.replace(row, name=name)))
    missing = {line.benchmark for line in set(HEADLINES) - found}
    assert missing <= (set() if HAS_LIBTPU else {'tpu'})


def test_page_is_that_of_the_results():
    assert _page.PAGE.read_text(encoding='utf-8') == _page.page_of(_page.read_results())


@pytest.mark.slow
def test_page_shows_every_figure(tiny_run):
    report, _ = tiny_run
    with pytest.raises(ValueError, match='--tiny mean nothing'):
        _page.page_of([report])
    page = _page.page_of([dataclasses.replace(report, tiny=False)])
    shown = [words for headline, words, _ in headline_rows(report.rows) if headline.shown]
    assert shown
    above, _, _ = page.partition('<details>')
    assert all(f'| {words} |' in above for words in shown)
    for row in report.rows:
        name = row.name.replace('*', '\\*')
        assert f'| {row.benchmark} | {name} |' in page
        assert f'| {_table.quantity(row.figure, row.unit)} |' in page, row.name
    for text in report.left_out:
        assert f'* {text}' in page


@pytest.mark.slow
def test_page_names_each_machine(tiny_run):
    simulated = dataclasses.replace(tiny_run[0], tiny=False)
    environment = {'device_kind': 'TPU v5 lite', 'device_count': 4, 'process_count': 2}
    environment |= {'cpu': 'Xeon', 'cores': 112}
    on_tpu = dataclasses.replace(simulated, environment=simulated.environment | environment)
    page = _page.page_of([simulated, on_tpu])
    assert '## 16 simulated devices (' in page
    assert '## 4 TPU v5 lite in 2 processes (Xeon, 112 cores)\n' in page
