"""The benchmarks at tiny size: that they run, and that their JSON is what its schema says.

No time is asserted anywhere: on a machine that does other things it says nothing.
"""

import argparse
import copy
import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax
import numpy as np
import pytest

from einshard import einshard, make_sharding

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks import (  # noqa: E402
    _counting,
    _handwritten,
    _hardware,
    _harness,
    _models,
    _page,
    _plot,
    _programs,
    _schema,
    _table,
    collectives,
    importing,
    layouts,
    memory,
    programs,
    tpu,
)
from benchmarks.__main__ import (  # noqa: E402
    DISTRIBUTED,
    MODULES,
    json_text,
    names_of,
    simulate_devices,
)

ENVIRONMENT = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_backend_optimization_level=0',
}


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, '-m', 'benchmarks', *arguments],
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope='module')
def tried(tmp_path_factory):
    """The JSON, the terminal's text and the plot of all benchmarks at tiny size."""
    folder = tmp_path_factory.mktemp('tried')
    file, plot = folder / 'all.json', folder / 'scaling.svg'
    finished = run('all', '--tiny', '--json', str(file), '--plot', str(plot))
    assert finished.returncode == 0, finished.stderr
    return json.loads(file.read_text(encoding='utf-8')), finished.stdout, plot.read_text()


@pytest.fixture(scope='module')
def results(tried):
    return {result['name']: result for result in tried[0]['benchmarks']}


def test_all_are_tried(tried, results):
    document, printed, _ = tried
    _schema.check(document)
    assert list(results) == list(MODULES)
    assert document['schema'] == _schema.VERSION
    assert document['environment']['device_count'] == 8
    assert document['environment']['platform'] == 'cpu'
    assert 'met' in printed


@pytest.mark.parametrize('name', MODULES)
def test_benchmark(tried, results, name):
    result, printed = results[name], tried[1]
    assert result['tiny']
    assert result['rows'] or result['left_out']
    for text in result['left_out']:
        assert f'left out: {text}' in printed
    for row in result['rows']:
        assert row['name'].split()[0] in printed
        for values in (row['figure'], row['other'], row['ratio']):
            assert values is None or values['q1'] <= values['median'] <= values['q3']
        assert (row['compared_with'] is None) == (row['other'] is None)
        if row['ratio'] is None:
            assert row['other'] is None or row['other']['median'] == 0
        assert (row['target'] is None) == (row['met'] is None)
        if row['target'] is not None:
            judged = row[row['target']['of']]['median']
            assert row['met'] == (judged <= row['target']['at_most'])


def test_placement_has_a_row_for_every_target(results):
    rows = results['placement']['rows']
    assert {row['target']['at_most'] for row in rows if row['target']} == {1 / 15, 1.05}
    names = ' / '.join(row['name'] for row in rows)
    for what in ('placed already', 'numpy array', 'jax array', 'numpy leaves', 'jax leaves'):
        assert what in names


def test_dispatch_has_a_row_for_every_target(results):
    rows = {row['name']: row for row in results['dispatch']['rows']}
    expected = {
        'one argument, 1 device': 1.1,
        'one argument, jax.set_mesh, 1 device': 1.1,
        'one argument, 8 devices': 1.03,
        'one argument, jax.set_mesh, 8 devices': 1.03,
        'a method, 1 device': 1.1,
        'one argument by keyword, 1 device: how much more': 20e-6,
        '4 leaves by keyword, 1 device: how much more': 20e-6,
    }
    for kind in ('one expression', 'a tree of expressions', 'a function of the path'):
        for on in ('4 leaves, 1 device', '4 leaves, 8 devices'):
            expected |= {f'{kind}, {on}': 1.05, f'{kind}, jax.set_mesh, {on}': 1.05}
    expected |= {f'a tree of 2 leaves, {on}': 1.05 for on in ('1 device', '2 devices')}
    targets = {name: rows[name]['target'] for name in expected}
    assert {name: target['at_most'] for name, target in targets.items()} == expected
    for name, target in targets.items():
        assert target['of'] == ('figure' if 'how much more' in name else 'ratio')


def test_sharded_is_traced_and_compiled_as_often_as_jit(results):
    rows = [row for row in results['dispatch']['rows'] if row['unit'] != 's']
    assert {row['unit'] for row in rows} == {'traces', 'programs'}
    for row in rows:
        assert row['figure'] == row['other'], row['name']
        assert row['met'] is True


def test_traces_and_compilations_are_counted():
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


def test_import_starts_no_backend(results):
    row = results['import']['rows'][-1]
    assert row['unit'] == 'backends'
    assert row['figure']['q3'] == 0
    assert row['met'] is True


def test_a_backend_that_was_started_is_noticed():
    started = importing.PROGRAM.replace('import einshard\n', 'import einshard; jax.devices()\n')
    assert started != importing.PROGRAM
    assert importing.one_import(started)[2] == 1


def test_list_needs_no_jax():
    program = "import sys, benchmarks.__main__ as m; m.main([]); assert 'jax' not in sys.modules"
    finished = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert [line.split()[0] for line in finished.stdout.splitlines()[2:]] == list(MODULES)


def test_unknown_name():
    finished = run('speed')
    assert finished.returncode == 2
    assert "invalid choice: 'speed'" in finished.stderr


def test_published_wants_its_version(tmp_path):
    finished = run('placement', '--tiny', '--published', sys.executable)
    assert finished.returncode == 1
    assert 'einshard 0.2.0 could not be measured' in finished.stderr


PUBLISHED = os.environ.get('EINSHARD_PUBLISHED')


@pytest.mark.skipif(not PUBLISHED, reason='EINSHARD_PUBLISHED names no interpreter with 0.2.0')
def test_published(tmp_path):
    file = tmp_path / 'placement.json'
    finished = run('placement', '--tiny', '--published', PUBLISHED, '--json', str(file))
    assert finished.returncode == 0, finished.stderr
    document = json.loads(file.read_text(encoding='utf-8'))
    _schema.check(document)
    rows = document['benchmarks'][0]['rows']
    theirs = [row for row in rows if row['subject'] != 'einshard']
    ours = [row for row in rows if row['subject'] == 'einshard']
    assert [row['name'] for row in theirs] == [row['name'] for row in ours[: len(theirs)]]
    assert all(row['subject'].startswith('einshard 0.2.0 (jax') for row in theirs)
    assert all(row['target'] is None for row in theirs)


@pytest.mark.parametrize('flags', ['', '--xla_cpu_enable_fast_math=false'])
def test_devices_are_simulated(monkeypatch, flags):
    monkeypatch.setenv('XLA_FLAGS', flags)
    monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)
    simulate_devices(4)
    expected = f'{flags} --xla_force_host_platform_device_count=4'.strip()
    assert os.environ['XLA_FLAGS'] == expected


def test_the_users_devices_are_kept(monkeypatch):
    own = '--xla_force_host_platform_device_count=3'
    monkeypatch.setenv('XLA_FLAGS', own)
    simulate_devices(8)
    assert os.environ['XLA_FLAGS'] == own
    monkeypatch.setenv('XLA_FLAGS', '')
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '5')
    simulate_devices(8)
    assert os.environ['XLA_FLAGS'] == ''


class Clock:
    """A clock that moves only when a call says how long it took."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def call(self, name, *durations):
        left = itertools.cycle(durations)

        def called():
            self.calls.append(name)
            self.now += next(left)

        return called


def test_interleaved_rounds_alternate():
    clock = Clock()
    a, b = clock.call('a', 3.0), clock.call('b', 2.0)
    a_times, b_times = _harness.interleave(a, b, 100.0, clock=lambda: clock.now)
    assert set(a_times) == {3.0}
    assert set(b_times) == {2.0}
    assert len(a_times) == len(b_times) == 20  # of 5 seconds each
    assert ''.join(clock.calls) == 'aabb' + 'abba' * 10  # after a warm-up and an estimate each


def test_short_calls_are_timed_in_blocks():
    clock = Clock()
    a, b = clock.call('a', 2**-20), clock.call('b', 2**-7)
    a_times, b_times = _harness.interleave(a, b, 0.05, clock=lambda: clock.now)
    assert set(a_times) == {2**-20}
    assert set(b_times) == {2**-7}
    rounds = len(a_times)
    assert rounds == _harness.MIN_ROUNDS
    assert clock.calls.count('b') == 4 + rounds
    assert clock.calls.count('a') == 4 + rounds * 525  # 525 of them are half a millisecond


def test_ratio_is_taken_round_by_round():
    # a machine that is half as fast from the third round on: no ratio notices
    bench = _harness.Bench('steady')
    row = bench.record(
        'x', 's', [1.0, 1.0, 2.0, 2.0], 'y', [2.0, 2.0, 4.0, 4.0], _harness.ratio_at_most(0.5)
    )
    assert row['ratio'] == {'q1': 0.5, 'median': 0.5, 'q3': 0.5}
    assert row['figure'] == {'q1': 1.0, 'median': 1.5, 'q3': 2.0}
    assert row['met'] is True
    assert bench.record('x', 's', [0.2], target=_harness.figure_at_most(0.1))['met'] is False
    with pytest.raises(ValueError, match='compared with nothing'):
        bench.record('x', 's', [1.0], target=_harness.ratio_at_most(1))


def test_figures_are_of_one_call():
    clock = Clock()
    bench = _harness.Bench('loops', tiny=True, clock=lambda: clock.now)
    ours, theirs = clock.call('a', 3.0), clock.call('b', 2.0)
    limit = _harness.figure_at_most(0.05)
    more = bench.difference('x', ours, 'y', theirs, limit, 10, devices=2)
    beside = bench.rows[0]
    assert (beside['figure']['median'], beside['other']['median']) == (0.3, 0.2)
    assert beside['ratio']['median'] == pytest.approx(1.5)
    assert beside['target'] is None
    assert more['figure']['median'] == pytest.approx(0.1)
    assert more['met'] is False
    assert [row['parameters'] for row in bench.rows] == [{'devices': 2}] * 2


def edits(document):
    """The document, each time with one thing wrong."""
    for path in [
        ('schema',),
        ('environment', 'jax'),
        ('environment', 'device_count'),
        ('benchmarks',),
        ('benchmarks', 0, 'tiny'),
        ('benchmarks', 0, 'rows'),
        ('benchmarks', 0, 'rows', 0, 'figure', 'median'),
        ('benchmarks', 0, 'rows', 0, 'target', 'of'),
        ('benchmarks', 0, 'rows', 0, 'met'),
        ('benchmarks', 0, 'rows', 0, 'parameters', 'devices'),
    ]:
        changed = copy.deepcopy(document)
        *way, last = path
        node = changed
        for step in way:
            node = node[step]
        node[last] = [None]
        yield changed
    for way in [(), ('environment',), ('benchmarks', 0), ('benchmarks', 0, 'rows', 0)]:
        changed = copy.deepcopy(document)
        node = changed
        for step in way:
            node = node[step]
        node['more'] = 1
        yield changed
        del node['more'], node[next(iter(node))]
        yield changed


def test_schema_refuses_what_is_wrong(tried, results):
    document = {**tried[0], 'benchmarks': [results['placement']]}
    for changed in edits(document):
        with pytest.raises(ValueError, match='report'):
            _schema.check(changed)


@pytest.mark.parametrize(
    ('value', 'unit', 'text'),
    [
        (1.25e-5, 's', '12.5 us'),
        (-4e-8, 's', '-40 ns'),
        (9.996e-7, 's', '1 us'),
        (-2.5e-3, 's', '-2.5 ms'),
        (0.0, 's', '0 ns'),
        (3.0, 's', '3 s'),
        (1536, 'bytes', '1.5 KiB'),
        (5, 'bytes', '5 bytes'),
        (2.5e9, 'bytes/s', '2.5 GB/s'),
        (1, 'programs', '1 program'),
        (0, 'programs', '0 programs'),
    ],
)
def test_quantity(value, unit, text):
    assert _table.quantity(value, unit) == text


def test_plain_table(capsys):
    bench = _harness.Bench('b')
    bench.record('a call', 's', [4e-7] * 3, 'another', [8e-6] * 3, _harness.ratio_at_most(1 / 15))
    bench.record('b call', 's', [4e-7] * 3, 'a third', [8e-6] * 3)
    assert _table.legend(bench.rows) == ['beside a: another', 'beside b: a third']
    _table.print_plain('b: about', *_table.columns(bench.rows))
    title, headings, row, other = capsys.readouterr().out.splitlines()[1:]
    assert title == 'b: about'
    assert headings.split() == ' '.join(_table.HEADINGS).split()
    assert row == 'a call  400 ns  a       8 us        1/20   1/20 .. 1/20  <= 1/15  met'
    assert other == 'b call  400 ns  b       8 us        1/20   1/20 .. 1/20'


def test_empty_columns_are_left_out():
    bench = _harness.Bench('b')
    bench.record('x', 's', [0.5], 'y', [1.0])
    assert _table.columns(bench.rows) == (
        ['what', 'figure', 'its figure', 'ratio', 'quartiles'],
        [['x', '500 ms', '1 s', '0.500', '0.500 .. 0.500']],
    )
    assert _table.legend(bench.rows) == ['beside y']


@pytest.mark.parametrize('width', [60, 120])
def test_terminal(monkeypatch, capsys, width):
    """A narrow one folds names, and no numbers."""
    pytest.importorskip('rich')
    monkeypatch.setenv('COLUMNS', str(width))
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    bench = _harness.Bench('b')
    name = 'a tree of 1,000 leaves [each] on the host'
    bench.record(name, 's', [4e-7] * 3, 'another', [8e-6] * 3, _harness.ratio_at_most(1 / 15))
    _table.print_rows('b: about', *_table.columns(bench.rows))
    lines = re.sub(r'\x1b\[[\d;]*m', '', capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert ('quartiles' in ''.join(lines)) == (width == 120)
    assert any('400 ns' in line and '1/20' in line and '<= 1/15' in line for line in lines)
    assert '[each]' in ''.join(lines)


@pytest.mark.parametrize('width', [0, 40])
def test_progress_is_one_line(monkeypatch, capsys, width):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, 'fileno', lambda: 2, raising=False)
    monkeypatch.setattr(os, 'get_terminal_size', lambda fd: os.terminal_size((width, 24)))
    show = _harness.progress_line('memory')
    show('x' * 200)
    show('')
    line, end = capsys.readouterr().err.split('\r\x1b[K')[1:]
    assert (len(line), end) == ((width or 80) - 1, '')


# --- the programs and what is made of them ------------------------------------------------------


def test_programs_are_those_of_hand_written_jax(results):
    """Of both models, forward and training, on eight devices; and of one for a slice of TPUs."""
    differences = {
        row['parameters']['case']: row
        for name in ('programs', 'tpu')
        for row in results[name]['rows']
        if row['parameters'].get('measure') == 'differences'
    }
    expected = {f'{m}, {p}' for m in ('MLP', 'transformer') for p in ('forward', 'training step')}
    if importlib.util.find_spec('libtpu'):
        expected.add('v5e:2x2, MLP, training step')
    assert set(differences) == expected
    assert {row['figure']['q3'] for row in differences.values()} == {0}
    for name in ('programs', 'tpu'):
        for row in results[name]['rows']:
            if row['parameters'].get('measure') in ('collectives', 'network bytes', 'memory'):
                assert row['figure'] == row['other'], row['name']
                assert row['figure']['median'] > 0


@pytest.mark.parametrize('parts', [2, 4])
def test_differences_are_noticed(devices8, parts):
    weights, x = (_models.floats(32, 64), _models.floats(64, 32)), _models.floats(8, 32)
    ours, by_hand = (
        new.lower(weights, x).compile()
        for new in (
            _models.mlp_forward(devices8, 2),
            _handwritten.mlp_forward(_models.mesh_by_hand(devices8, parts)),
        )
    )
    assert (_programs.differences(ours, by_hand) == 0) == (parts == 2)


def test_other_shardings_are_a_difference(devices8):
    """The program is the same: it numbers its devices from 0, whichever they are."""
    first, last = (
        jax.jit(lambda x: x + 1, in_shardings=make_sharding('x*', mesh=devices))
        .lower(_models.floats(8))
        .compile()
        for devices in (devices8, jax.devices()[8:])
    )
    assert _programs.differences(first, first) == 0
    assert _programs.differences(first, last) == 2  # argument and result


def test_model_flops_are_those_of_the_products():
    """Three times those of the forward pass, which is traced and counted here."""
    transformer = _models.transformer
    c = _models.config_on(2, _models.TINY)
    c = _models.Config(**{**vars(c), 'n_layers': 3, 'n_kv_heads': 4})

    def loss(weights, tokens):
        return transformer.mean_loss(weights, tokens, transformer.UNSHARDED)

    traced = jax.make_jaxpr(loss)(_models.state_shapes(c).weights, _models.token_shapes(c))
    assert 3 * product_flops(traced.jaxpr) == _models.model_flops(c)


def product_flops(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params.get('length', 1)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
        ):
            if hasattr(inner, 'eqns'):
                total += times * product_flops(getattr(inner, 'jaxpr', inner))
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * int(np.prod(sizes)) * equation.outvars[0].aval.size
    return total


def test_layouts_cut_what_they_say(devices8):
    c = _models.config_on(8, _models.SMALL)
    shapes = _models.state_shapes(c).weights
    shares = {
        'data': ({1}, {1}),
        'tensor': ({1 / 8}, {1}),
        'data and tensor': ({1 / 2}, {1}),
        'FSDP': ({1 / 8}, {1}),
        'FSDP and tensor': ({1 / 8}, {1}),
    }
    assert set(shares) == set(layouts.LAYOUTS)
    for name, placement in layouts.LAYOUTS.items():
        placed = einshard(shapes, placement.weights, mesh=devices8)
        norms = placed.layers.attention_norm, placed.layers.mlp_norm, placed.norm
        matrices = [x for x in jax.tree.leaves(placed) if not any(x is norm for norm in norms)]
        assert len(matrices) == 9
        found = [{held(x) for x in part} for part in (matrices, norms)]
        assert found == list(shares[name]), name


def held(x):
    """What share of an array a device has."""
    return np.prod(x.sharding.shard_shape(x.shape)) / x.size


def test_layouts_are_measured(results):
    rows = results['layouts']['rows']
    measures = {row['parameters']['measure'] for row in rows}
    assert measures == {'time', 'collectives', 'network bytes', 'memory'}
    data = [row for row in rows if row['parameters']['case'] == 'transformer: data']
    for row in data[1:]:  # all but the time is that of what is written by hand
        assert row['figure'] == row['other']


@pytest.mark.parametrize('n', [2, 8])
def test_products_have_all_placements(n):
    expressions = layouts.placements_of('b', 'x', n)
    assert len(set(expressions)) == (3 if n == 2 else 5)
    for expression in expressions:
        make_sharding(expression, n_dims=2, mesh=jax.devices()[:n])


def test_groups_of_devices_are_those_by_hand():
    near, far = [], []
    for group in collectives.groups(jax.device_count()):
        _, by_hand = collectives.by_hand(collectives.all_reduce, group)
        assert make_sharding(group.expression, n_dims=3).is_equivalent_to(by_hand, 3)
        ids = np.array([device.id for device in by_hand.mesh.devices.flat])
        (far if group.far else near).append(ids.reshape(by_hand.mesh.devices.shape))
    assert [np.diff(ids, axis=1).max() for ids in near] == [1, 1]
    assert [np.diff(ids, axis=0).max() for ids in far] == [8]


def test_bandwidth_is_what_is_sent_in_the_time(results):
    rows = results['collectives']['rows']
    times, bandwidths = (
        {row['parameters']['case']: row['figure']['median'] for row in rows if row['unit'] == unit}
        for unit in ('s', 'bytes/s')
    )
    sizes = {row['parameters']['case']: row['parameters'] for row in rows}
    assert len(times) == 15
    for case, time in times.items():
        kind, n = case.split()[0], 8 if 'all 8' in case else 2
        parts = {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1}.get(kind, (n - 1) / n)
        sent = parts * sizes[case]['bytes']
        assert bandwidths[case] * time == pytest.approx(sent, rel=1e-4), case


def test_other_collectives_are_named():
    assert collectives.instead({'all-gather': 1}, 'all-gather') == ''
    assert collectives.instead({'all-reduce': 1}, 'reduce-scatter') == ' (as 1 all-reduce)'
    assert collectives.instead({}, 'all-reduce') == ' (as none)'


def test_utilisation(monkeypatch):
    """The model's flops in what so many devices can do in that time."""
    bench = _harness.Bench('programs')
    size = {'case': 'c', 'measure': 'time', 'devices': 16}
    row = bench.record('c: time', 's', [2.0], 'by hand', [4.0], **size)
    programs.utilisation(bench, row, 1e12)
    assert bench.left_out == [
        f'model flops utilisation: no published peak is known of {jax.devices()[0].device_kind}'
    ]
    monkeypatch.setattr(programs, 'peak_flops', lambda kind: 1e11)
    programs.utilisation(bench, row, 1e12)
    found = bench.rows[-1]
    assert found['figure']['median'] == 1e12 / (2.0 * 16 * 1e11)
    assert found['ratio']['median'] == 2
    assert _table.figure_text(found) == '0.3125 of the peak'


def test_on_a_tpu_all_follow(monkeypatch):
    """With the options of those that follow; of several processes, not what is about one."""
    ran = []
    for module in tpu.ALSO:
        monkeypatch.setattr(module, 'run', lambda bench, name=module.__name__: ran.append(name))
    monkeypatch.setattr(tpu, 'compile_for', lambda bench, name: None)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
    names = [module.__name__.split('.')[1] for module in tpu.ALSO]
    for count, expected in ((1, names), (2, [name for name in names if name in LATER])):
        monkeypatch.setattr(jax, 'process_count', lambda count=count: count)
        ran.clear()
        options = argparse.Namespace(name='tpu', topology=None)
        bench = _harness.Bench('tpu', options=options)
        tpu.run(bench)
        assert [name.split('.')[1] for name in ran] == expected
    finished = run('tpu', '--help')
    assert {'--plot', '--large', '--topology'} <= set(finished.stdout.split()), finished.stderr


LATER = {*DISTRIBUTED, 'scaling'}


def test_bandwidth_beside_what_is_published(monkeypatch):
    monkeypatch.setattr(collectives, 'link_bandwidth', lambda kind: 1e9)
    bench = _harness.Bench('collectives', tiny=True)
    collectives.measure(bench, 'all-gather', collectives.groups(16)[0], 2**12)
    time, bandwidth = bench.rows
    assert bandwidth['compared_with'] == collectives.PUBLISHED
    assert bandwidth['other']['median'] == 1e9
    assert bandwidth['ratio']['median'] == pytest.approx(bandwidth['figure']['median'] / 1e9)
    assert time['parameters']['devices'] == 16


def test_peaks_of_devices_are_recorded(monkeypatch):
    """As of accelerators, which say how much they held."""
    asked = []

    def in_a_process(side, n_bytes, rounds):
        asked.append(side)
        both = {'ours': [1.0] * rounds, 'theirs': [2.0] * rounds}
        peak = 300 if side == 'ours' else 200
        return {'leaves': 64, 'devices': 4, 'host': 100, 'device': peak, **both}

    monkeypatch.setattr(memory, 'in_a_process', in_a_process)
    bench = _harness.Bench('memory')
    memory.run(bench)
    assert asked == ['ours', 'theirs', 'theirs', 'ours']
    time, host, device = bench.rows
    assert (time['ratio']['median'], time['rounds']) == (0.5, 12)
    assert (host['met'], device['met']) == (True, False)
    assert device['ratio']['median'] == 1.5


def test_hardware():
    assert set(_hardware._PEAK_FLOPS) == set(_hardware._LINK_BANDWIDTH)
    v5e, v5p = _hardware.peak_flops('TPU v5 lite'), _hardware.peak_flops('TPU v5p')
    assert v5e < v5p
    assert _hardware.peak_flops('NVIDIA A100-SXM4-40GB') == 156e12
    assert _hardware.link_bandwidth('NVIDIA H200') == 450e9
    assert _hardware.peak_flops('cpu') is None
    assert _hardware.link_bandwidth('NVIDIA H100 PCIe') is None


def test_memory_has_its_targets(results):
    rows = results['memory']['rows']
    assert [(row['unit'], row['target']['at_most']) for row in rows[:2]] == [
        ('s', 1.05),
        ('bytes', 1.02),
    ]


def test_no_ratio_to_nothing():
    bench = _harness.Bench('b')
    assert bench.record('x', 'bytes', [5], 'y', [0])['ratio'] is None
    assert bench.record('x', 'bytes', [5], 'y', [10])['ratio']['median'] == 0.5


def test_rounds_that_are_given():
    clock = Clock()
    a, b = clock.call('a', 3.0), clock.call('b', 2.0)
    times = _harness.interleave(a, b, 100.0, clock=lambda: clock.now, rounds=3)
    assert times == ([3.0] * 3, [2.0] * 3)
    assert ''.join(clock.calls) == 'abbaab'  # nothing is warmed up


def test_rounds_are_agreed_upon():
    clock = Clock()
    a, b = clock.call('a', 3.0), clock.call('b', 2.0)
    asked = []
    times = _harness.interleave(
        a, b, 100.0, clock=lambda: clock.now, agree=lambda n: asked.append(n) or 2
    )
    assert asked == [1, 1, 20]
    assert times == ([3.0] * 2, [2.0] * 2)
    assert ''.join(clock.calls[4:]) == 'aabbbbaa'


# --- one device, several processes --------------------------------------------------------------


def test_one_device(tmp_path):
    file = tmp_path / 'one.json'
    finished = run('collectives', '--tiny', '--devices', '1', '--json', str(file))
    assert finished.returncode == 0, finished.stderr
    (result,) = json.loads(file.read_text(encoding='utf-8'))['benchmarks']
    assert result['rows'] == []
    assert result['left_out'] == ['collectives: there is one device, and nobody to talk to']


def test_several_processes(tmp_path):
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{listener.getsockname()[1]}'
    arguments = ['collectives', '--tiny', '--devices', '4', '--coordinator', address]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, '-m', 'benchmarks', *arguments, '--processes', '2'),
                *('--process', str(i), '--json', str(tmp_path / f'{i}.json')),
            ],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    assert 'all-gather of' in said[0]
    assert 'all-gather of' not in said[1]
    assert not (tmp_path / '1.json').exists()
    document = json.loads((tmp_path / '0.json').read_text(encoding='utf-8'))
    _schema.check(document)
    assert document['environment']['process_count'] == 2
    assert len(document['benchmarks'][0]['rows']) == 30


def test_what_is_about_one_process():
    assert names_of('all', True) == list(DISTRIBUTED)
    assert names_of('all', False) == list(MODULES)
    assert names_of('programs', True) == ['programs']
    with pytest.raises(SystemExit, match='placement is about one process; about several: programs'):
        names_of('placement', True)


# --- the plot and the page ----------------------------------------------------------------------


def test_json_has_a_line_for_each_row(tried):
    document, _, _ = tried
    text = json_text(document)
    assert json.loads(text) == document
    lines = text.splitlines()
    for result in document['benchmarks']:
        for row in result['rows']:
            assert sum(line.strip(' ,') == json.dumps(row) for line in lines) >= 1


def scaling_rows():
    bench = _harness.Bench('scaling')
    for problem, ratios in {'fixed': (1.0, 0.5, 0.5), 'growing': (1.0, 1.0, 4.0)}.items():
        for i, ratio in enumerate(ratios):
            size = {'problem': problem, 'devices': 2**i}
            bench.record(f'{problem}, {2**i}', 's', [ratio] * 3, 'one device', [1.0] * 3, **size)
    return bench.rows


@pytest.mark.parametrize(
    ('n', 'counts'), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_device_counts(n, counts):
    assert _models.device_counts(n) == counts


def test_points_are_shares_of_the_best():
    points = [_plot.point(row, row['parameters']['problem']) for row in scaling_rows()]
    shares = [(devices, share['median']) for devices, share in points]
    assert shares == [(1, 1), (2, 1), (4, 0.5), (1, 1), (2, 1), (4, 0.25)]


def test_plot():
    root = ElementTree.fromstring(_plot.scaling_svg(scaling_rows()))
    space = '{http://www.w3.org/2000/svg}'
    lines = [node.get('points').split() for node in root.iter(f'{space}polyline')]
    (at_1, at_2, at_4), growing = (
        [tuple(map(float, p.split(','))) for p in line] for line in lines
    )
    assert at_1[0] < at_2[0] < at_4[0]
    assert at_2[0] - at_1[0] == pytest.approx(at_4[0] - at_2[0])  # a logarithmic axis
    assert at_1[1] == at_2[1] < at_4[1] < growing[2][1]  # downwards
    assert {node.text for node in root.iter(f'{space}text')} >= {'1', '2', '4', '50%', 'devices'}
    assert root.get('fill') == 'currentColor'


def test_plot_of_a_run(tried):
    assert ElementTree.fromstring(tried[2]).get('class') == 'einshard-plot'


def test_page_is_that_of_the_results():
    reports = _page.read_results()
    assert reports
    assert _page.PAGE.read_text(encoding='utf-8') == _page.page_of(reports)


def test_page_shows_every_figure(tried):
    document = copy.deepcopy(tried[0])
    with pytest.raises(ValueError, match='memory was only tried'):
        _page.page_of([document])
    for result in document['benchmarks']:
        result['tiny'] = False
    page = _page.page_of([document])
    for result in document['benchmarks']:
        assert f'\n## {result["name"]}\n' in page
        for row in result['rows']:
            assert _table.figure_text(row) in page, row['name']
            if row['met'] is False:
                name = row['name'].replace('*', '\\*')
                assert f'| {result["name"]} | {name} |' in page, name
    assert '<svg' in page


def test_main_figures_are_found():
    """Each row that the page shows first is there, in what it is written from."""
    names = {
        (result['name'], row['name'])
        for report in _page.read_results()
        for result in report['benchmarks']
        for row in result['rows']
    }
    for benchmark, pattern, words in _page.MAIN:
        found = [re.fullmatch(pattern, row) for name, row in names if name == benchmark]
        assert any(found), pattern
        for match in filter(None, found):
            assert '{' not in words.format(*match.groups())


def test_long_tables_are_folded():
    short, long = ([[str(i)] for i in range(n)] for n in (_page.LONG, _page.LONG + 1))
    assert _page.folded(['a'], short) == _page.markdown(['a'], short)
    folded = _page.folded(['a'], long)
    assert folded.startswith('<details>\n<summary>13 rows</summary>\n\n| a |')
    assert folded.endswith('| 12 |\n\n</details>')


def test_page_names_machines_where_there_are_several():
    bench = _harness.Bench('expressions')
    bench.record('a | b*', 's', [1.0], target=_harness.figure_at_most(2))
    one = _harness.report([bench.result('x')])
    other = copy.deepcopy(one)
    other['environment'] |= {'device_kind': 'TPU v5 lite', 'device_count': 4, 'process_count': 2}
    page = _page.page_of([one, other])
    assert '### 16 x simulated\n' in page
    assert '### 4 x TPU v5 lite in 2 processes\n' in page
    assert 'a target for 2 of the figures. All of them are met.' in page
    assert page.count('| a \\| b\\* | 1 s |') == 2
    assert '###' not in _page.page_of([one])
