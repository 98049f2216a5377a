"""The benchmarks at tiny size: that they run, and that their JSON is what its schema says.

No time is asserted anywhere: on a machine that does other things it says nothing.
"""

import copy
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks import _counting, _harness, _schema, _table, importing  # noqa: E402
from benchmarks.__main__ import MODULES, simulate_devices  # noqa: E402

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'}


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
def reports(tmp_path_factory):
    """The JSON and the terminal's text of each benchmark, measured when first asked for."""
    done = {}

    def report_of(name):
        if name not in done:
            file = tmp_path_factory.mktemp('json') / f'{name}.json'
            finished = run(name, '--tiny', '--json', str(file))
            assert finished.returncode == 0, finished.stderr
            done[name] = json.loads(file.read_text(encoding='utf-8')), finished.stdout
        return done[name]

    return report_of


@pytest.mark.parametrize('name', MODULES)
def test_benchmark(reports, name):
    document, printed = reports(name)
    _schema.check(document)
    assert document['schema'] == _schema.VERSION
    assert document['environment']['device_count'] == 8
    assert document['environment']['platform'] == 'cpu'
    (result,) = document['benchmarks']
    assert result['name'] == name
    assert result['tiny']
    assert result['rows']
    assert 'met' in printed
    for row in result['rows']:
        assert row['name'].split()[0] in printed
        for values in (row['figure'], row['other'], row['ratio']):
            assert values is None or values['q1'] <= values['median'] <= values['q3']
        assert (row['compared_with'] is None) == (row['other'] is None) == (row['ratio'] is None)
        assert (row['target'] is None) == (row['met'] is None)
        if row['target'] is not None:
            judged = row[row['target']['of']]['median']
            assert row['met'] == (judged <= row['target']['at_most'])


def test_placement_has_a_row_for_every_target(reports):
    document, _ = reports('placement')
    rows = document['benchmarks'][0]['rows']
    assert {row['target']['at_most'] for row in rows if row['target']} == {1 / 15, 1.05}
    names = ' / '.join(row['name'] for row in rows)
    for what in ('placed already', 'numpy array', 'jax array', 'numpy leaves', 'jax leaves'):
        assert what in names


def test_dispatch_has_a_row_for_every_target(reports):
    document, _ = reports('dispatch')
    rows = {row['name']: row for row in document['benchmarks'][0]['rows']}
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
    targets = {name: rows[name]['target'] for name in expected}
    assert {name: target['at_most'] for name, target in targets.items()} == expected
    for name, target in targets.items():
        assert target['of'] == ('figure' if 'how much more' in name else 'ratio')


def test_sharded_is_traced_and_compiled_as_often_as_jit(reports):
    document, _ = reports('dispatch')
    rows = [row for row in document['benchmarks'][0]['rows'] if row['unit'] != 's']
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


def test_import_starts_no_backend(reports):
    document, _ = reports('import')
    row = document['benchmarks'][0]['rows'][-1]
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
    assert ''.join(clock.calls[8:]) == 'abba' * 10  # after a warm-up and three estimates each


def test_short_calls_are_timed_in_blocks():
    clock = Clock()
    a, b = clock.call('a', 2**-20), clock.call('b', 2**-7)
    a_times, b_times = _harness.interleave(a, b, 0.1, clock=lambda: clock.now)
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


def test_schema_refuses_what_is_wrong(reports):
    document, _ = reports('placement')
    for changed in edits(document):
        with pytest.raises(ValueError, match='report'):
            _schema.check(changed)


@pytest.mark.parametrize(
    ('value', 'text'),
    [(1.25e-5, '12.5 us'), (-4e-8, '-40 ns'), (-2.5e-3, '-2.5 ms'), (0.0, '0 ns'), (3.0, '3 s')],
)
def test_quantity(value, text):
    assert _table.quantity(value, 's') == text


def test_plain_table(capsys):
    bench = _harness.Bench('b')
    bench.record('a call', 's', [4e-7] * 3, 'another', [8e-6] * 3, _harness.ratio_at_most(1 / 15))
    _table.print_plain('b: about', [_table.cells(row) for row in bench.rows])
    title, headings, row = capsys.readouterr().out.splitlines()[1:]
    assert title == 'b: about'
    assert ' '.join(headings.split()) == ' '.join(_table.HEADINGS).strip()
    assert row == ('a call  400 ns  another        8 us      1/20   1/20 .. 1/20  <= 1/15  met')
