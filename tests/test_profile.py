"""Profiles: the program of the trace decides, and rows have the times of their events."""

import copy
import json
import lzma
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import jax
import pytest
from command import main
from flags import WITHOUT_TPU, simulating
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from profiled import ARGUMENTS, RUNS, SMALL, STEPS, looped, never, older
from refusal import refusal
from spawn import python_path
from xplane import programs_of, raw_events

import einshard
from einshard import explain, profile, topology

ROOT = Path(einshard.__file__).parents[1]
HERE = Path(__file__).parent


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """The traces of profiled.py, made in a process without libtpu."""
    path = tmp_path_factory.mktemp('traces')
    done = subprocess.run(
        [sys.executable, HERE / 'profiled.py', path],
        env={
            **os.environ,
            'PYTHONPATH': python_path(ROOT, HERE),
            'XLA_FLAGS': f'{simulating(16)} {WITHOUT_TPU}',
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope='module')
def profiles(folder):
    return pickle.loads((folder / 'reports.pickle').read_bytes())


def number(report):
    return int(report.profile.program.partition('(')[2].rstrip(')'))


def kept(report, raw):
    """The same events, without the first run if the report leaves it out."""
    runs = sorted({run for each in raw.values() for rows in each.values() for run, *_ in rows})
    runs = runs[len(runs) - report.profile.runs :]
    return {
        name: {device: [row for row in rows if row[0] in runs] for device, rows in each.items()}
        for name, each in raw.items()
    }


# --- which program -----------------------------------------------------------------------------


def test_programs_of_one_name_are_told_apart(folder):
    programs = set()
    for step in STEPS:
        report = explain(step, *ARGUMENTS, tries=0).with_profile(folder / 'four')
        assert report.profile.joined == 1
        assert report.profile.program.startswith('jit_step(')
        programs.add(report.profile.program)
    assert len(programs) == len(STEPS)


def test_events_are_those_of_the_program(folder):
    for step in STEPS:
        report = explain(step, *ARGUMENTS, tries=0).with_profile(folder / 'four')
        raw = raw_events(folder / 'four', number(report))
        assert report.collectives
        for row in report.profile.rows:
            assert sum(map(len, raw[row.name].values())) == 8 * RUNS
            assert row.events == 8 * report.profile.runs
            times = [
                end - start
                for each in kept(report, raw)[row.name].values()
                for _, start, end in each
            ]
            assert row.time.mean == pytest.approx(sum(times) / len(times) * 1e-9, rel=0.02)


def test_one_function_at_two_shapes(folder):
    large, small = (
        explain(older, *args, tries=0).with_profile(folder / 'two') for args in (ARGUMENTS, SMALL)
    )
    assert large.profile.program != small.profile.program
    assert large.profile.rows[0].arrays != small.profile.rows[0].arrays


def test_program_that_did_not_run(folder):
    error = refusal(explain(STEPS[0], *ARGUMENTS, tries=0).with_profile, folder / 'older')
    assert error.code == 'profile'
    assert 'did not run from start to end in the trace' in error.sentence
    report = explain(never, *ARGUMENTS, tries=0)
    error = refusal(report.with_profile, folder / 'four')
    assert error.sentence == 'the trace does not have the program of the report'
    assert 'jit_step(' in error.facts['programs in the trace']


def test_older_build_of_the_step_is_refused_with_the_first_difference(folder):
    fresh = explain(jax.jit(lambda x, a, b: jax.numpy.tanh(x @ a) @ b * 2), *ARGUMENTS, tries=0)
    error = refusal(fresh.with_profile, folder / 'older')
    label = next(label for label in error.facts if label.startswith('first difference to '))
    assert error.facts[label]
    other = refusal(explain(older, *ARGUMENTS, tries=0).with_profile, folder / 'four', program=99)
    assert other.sentence == 'the trace has no program with the number 99'


def test_a_program_by_its_number(folder):
    report = explain(STEPS[1], *ARGUMENTS, tries=0)
    n = number(report.with_profile(folder / 'four'))
    assert report.with_profile(folder / 'four', program=n).profile.program == f'jit_step({n})'
    (other, *_) = {
        number(explain(s, *ARGUMENTS, tries=0).with_profile(folder / 'four')) for s in STEPS
    } - {n}
    error = refusal(report.with_profile, folder / 'four', program=other)
    assert error.facts[f'first difference to jit_step({other})'].startswith('constant ')
    assert error.facts[f'first difference to jit_step({other})'].endswith('other value in it')


def test_topology_of_other_devices_is_refused(folder):
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    mesh = topology('v5e:2x4', data=4, tensor=2)
    specs = P('data'), P(None, 'tensor'), P('tensor')
    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(ARGUMENTS, specs, strict=True)
    ]
    report = explain(older, *structs, tries=0)
    error = refusal(report.with_profile, folder / 'older')
    assert error.sentence == 'the trace does not have the program of the report'


@pytest.mark.parametrize('file', sorted((HERE / 'traces').glob('*.xz')), ids=lambda f: f.name)
def test_traces_of_each_version(file, tmp_path):
    """Stored ones, of STEPS on eight devices; their programs differ only in a constant."""
    path = tmp_path / 'it.xplane.pb'
    path.write_bytes(lzma.decompress(file.read_bytes()))
    programs = [*programs_of(path)]
    assert len(programs) == len(STEPS)
    for form, differences, events in programs:
        assert all('other value in it' in text for text in differences)
        assert (events.platform, events.n_runs, len(events.devices)) == ('cpu', RUNS, 8)
        sent = [i for i, op in enumerate(events.names) if form[op].is_collective]
        assert sent
        for device in events.devices:
            assert [(device.op == i).sum() for i in sent] == [RUNS] * len(sent)


# --- what is measured --------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['train', 'consumed', 'slow', 'one'])
def test_parts_add_up_to_the_step(profiles, name):
    t = profiles[0][name].profile.totals
    parts = t.compute + t.wait + t.collective + t.other + t.idle
    assert parts == pytest.approx(t.step.mean, rel=0.01)
    assert t.step.least <= t.step.mean <= t.step.most
    assert 0 <= t.hidden <= t.collectives


def test_rows_in_loops_and_recomputation(folder):
    report = explain(looped, *ARGUMENTS, tries=0).with_profile(folder / 'looped')
    measured = report.profile
    assert measured.joined == 1
    assert [row.name for row in measured.rows] == [row.name for row in report.collectives]
    raw = raw_events(folder / 'looped', number(report))
    for row, collective in zip(measured.rows, report.collectives, strict=True):
        assert row.events == 8 * measured.runs * collective.executions
        assert row.events * RUNS == sum(map(len, raw[row.name].values())) * measured.runs
    assert max(row.executions for row in report.collectives) == 3
    t = measured.totals
    assert t.compute + t.wait + t.collective + t.other + t.idle == pytest.approx(t.step.mean, 0.01)
    first, last = defaultdict(lambda: float('inf')), defaultdict(float)
    for devices in kept(report, raw).values():
        for device, rows in devices.items():
            for run, start, end in rows:
                first[run, device] = min(first[run, device], start)
                last[run, device] = max(last[run, device], end)
    steps = [last[key] - first[key] for key in first]
    assert t.step.mean == pytest.approx(sum(steps) / len(steps) * 1e-9, rel=0.02)


def test_wait_is_what_a_device_takes_longer_than_the_last_of_its_group(folder):
    report = explain(older, *ARGUMENTS, tries=0).with_profile(folder / 'older')
    raw = kept(report, raw_events(folder / 'older', number(report)))
    for row, collective in zip(report.profile.rows, report.collectives, strict=True):
        took = {(d, run): e - s for d, rows in raw[row.name].items() for run, s, e in rows}
        waits = []
        for run in {run for _, run in took}:
            for group in collective.device_groups:
                shortest = min(took[d, run] for d in group)
                waits += [took[d, run] - shortest for d in group]
        assert row.wait.mean == pytest.approx(sum(waits) / len(waits) * 1e-9, rel=0.02, abs=1e-9)
        assert row.wait.mean <= row.time.mean
        assert row.exposed.mean == pytest.approx(row.time.mean, rel=0.02)  # nothing overlaps


def test_a_slow_line_comes_first(profiles):
    lines = (HERE / 'profiled.py').read_text().splitlines()
    slow = next(i for i, line in enumerate(lines, 1) if '# slow' in line)
    assert profiles[0]['slow'].profile.lines[0].source.endswith(f'profiled.py:{slow}')


def test_compute_of_a_line(profiles):
    report = profiles[0]['train']
    measured = report.profile
    assert sum(line.flops for line in measured.lines) == report.flops
    for line in measured.lines:
        if line.flops:
            assert line.peak == pytest.approx(line.bound / line.time)
            assert line.bound == pytest.approx(line.flops / 494.75e12, rel=0.01)  # f32 as tf32
    assert all(row.bound > 0 for row in measured.rows)
    assert {row.cause for row in measured.rows} <= {'waits for another device', 'latency'}


# --- profile -----------------------------------------------------------------------------------


def test_profile_runs_and_joins(profiles):
    reports, deleted, _ = profiles
    for report, runs in ((reports['train'], 5), (reports['consumed'], 2)):
        assert report.profile.joined == 1
        assert runs - 1 <= report.profile.runs <= runs  # the first may be left out
        assert {row.name for row in report.profile.rows} == {r.name for r in report.collectives}
    assert not any(deleted)


def test_results_are_the_next_arguments(profiles):
    # two calls to warm up, and three runs, on one device
    assert profiles[0]['seen'] == [0, 1, 2, 3, 4]


def test_it_compiles_once(profiles):
    assert profiles[0]['compiled'] == 1


def test_without_command_buffers(profiles):
    """The path for GPUs: the program is compiled with an option, and what was compiled runs."""
    report = profiles[0]['as on GPUs']
    assert report.profile.joined == 1
    assert report.profile.runs >= 4
    assert report.profile.notes[0].startswith('compiled without command buffers')
    # a function with static arguments runs as it is
    note = profiles[0]['static'].profile.notes[0]
    assert note.startswith('command buffers hide the instructions of kernels in them')


def test_one_device(profiles):
    report = profiles[0]['one']
    assert (report.profile.rows, report.profile.devices) == ((), (0,))
    assert report.profile.totals.collectives == 0
    assert 'the devices share the cores' not in str(report)


def test_threads_wait_for_each_other(profiles):
    reports = profiles[0]['in threads']
    assert all(report.profile.rows and report.profile.runs <= RUNS for report in reports)


def test_another_trace_is_running(profiles):
    error = profiles[2]
    assert error.code == 'profile'
    assert 'Only one profile' in error.facts['it says']


def test_findings_have_the_exposed_time_of_what_they_explain(profiles):
    report = profiles[0]['train']
    exposed = {row.name: row.exposed.mean for row in report.profile.rows}
    rows = (*report.findings, *report.notes)
    assert rows
    for finding in rows:
        assert finding.seconds == pytest.approx(sum(exposed.get(n, 0) for n in finding.explains))
    seconds = [finding.seconds for finding in report.notes]
    assert seconds == sorted(seconds, reverse=True)


def test_refused_arguments():
    assert (
        'runs= must be a positive integer' in refusal(profile, older, *ARGUMENTS, runs=0).sentence
    )
    struct = jax.ShapeDtypeStruct((4,), 'float32')
    assert refusal(profile, jax.numpy.sin, struct).code == 'profile'


# --- reports -----------------------------------------------------------------------------------


def test_report_without_a_profile_is_unchanged(folder):
    report = explain(older, *ARGUMENTS, tries=0)
    measured = report.with_profile(folder / 'older')
    assert 'profile' not in report.to_dict()
    assert all('seconds' not in finding for finding in report.to_dict()['notes'])
    data, before = measured.to_dict(), report.to_dict()
    assert data.pop('profile')['program'] == measured.profile.program
    for rows in (data['notes'], data['findings']):
        for row in rows:
            row.pop('seconds')
    key = str
    assert sorted(data.pop('notes'), key=key) == sorted(before.pop('notes'), key=key)
    assert data == before


def test_schema(folder, profiles):
    pytest.importorskip('jsonschema')
    from test_schemas import check

    measured = explain(looped, *ARGUMENTS, chip='H100', tries=0).with_profile(folder / 'looped')
    assert measured.timeline.source == 'measured'
    check('report', measured.to_dict())
    check('report', profiles[0]['one'].to_dict())


def test_measured_timeline(folder):
    report = explain(looped, *ARGUMENTS, tries=0).with_profile(folder / 'looped')
    timeline = report.timeline
    assert (timeline.source, timeline.assumed, timeline.estimate) == ('measured', None, None)
    t = timeline.totals
    assert t.compute + t.exposed + t.copies + t.idle == pytest.approx(t.step, rel=0.01)
    assert {span.lane for span in timeline.spans} == {'operations'}
    end = max(span.start + span.seconds for span in timeline.spans)
    assert min(span.start for span in timeline.spans) == 0
    assert end <= 2 * report.profile.totals.step.most
    assert '<svg' in timeline.svg
    assert 'measured' in str(timeline)
    # another picture below, on the same scale
    estimate = timeline.__class__(**{**vars(timeline), 'source': 'estimated'})
    both = timeline.__class__(**{**vars(timeline), 'estimate': estimate}).svg
    assert both.count('>measured') == 2  # the title, and the panel
    assert both.count('>estimated') == 1


def test_copies_and_files_keep_the_profile_but_not_the_program(folder):
    report = explain(older, *ARGUMENTS, tries=0).with_profile(folder / 'older')
    copied = copy.deepcopy(report)
    assert copied.profile == report.profile
    assert copied.timeline.totals == report.timeline.totals
    error = refusal(pickle.loads(pickle.dumps(report)).with_profile, folder / 'older')
    assert error.facts['instead'] == 'call explain on the function'


# --- the command -------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_profile(tmp_path):
    (tmp_path / 'model.py').write_text(
        'from einshard import sharded\n'
        "@sharded('b x -> b* x', 'x y -> x y*', out='b y -> b* y')\n"
        'def layer(x, w):\n'
        '    return x @ w\n'
        'def plain(x, w):\n'
        '    return x @ w\n'
    )
    for function in ('layer', 'plain'):
        words = f'profile model:{function} --args f32[64,32] f32[32,64] --devices 4 --runs 3 --json'
        done = subprocess.run(
            [sys.executable, '-m', 'einshard', *words.split(), '--save', 'it.html'],
            env={**os.environ, 'PYTHONPATH': python_path(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report['profile']['joined'] == 1
        assert report['profile']['devices'] == [0, 1, 2, 3]
        assert len(report['profile']['rows']) == len(report['collectives'])
        assert 'compute, measured, by line' in (tmp_path / 'it.html').read_text()


def test_command_explain(folder, capsys):
    arguments = ['profiled:X', 'profiled:W_IN', 'profiled:W_OUT']
    options = ['--tries', '0', '--profile', str(folder / 'older'), '--timeline', '--json']
    assert main(['explain', 'profiled:older', '--args', *arguments, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = explain(older, *ARGUMENTS, tries=0).with_profile(folder / 'older').profile
    assert report['profile']['totals']['step'] == [*expected.totals.step]
    assert report['timeline']['source'] == 'measured'
    assert main(['explain', 'profiled:older', '--args', *arguments, '--profile', 'no']) == 2
    assert "there is no file or folder 'no'" in capsys.readouterr().err


# --- files -------------------------------------------------------------------------------------


def test_the_newest_run_of_a_folder(folder, tmp_path):
    for name, seconds in (('four', -100), ('older', 0)):
        shutil.copytree(folder / name, tmp_path, dirs_exist_ok=True)
        for file in (folder / name).rglob('*.xplane.pb'):
            new = tmp_path / file.relative_to(folder / name)
            os.utime(new, (time.time() + seconds,) * 2)
    report = explain(older, *ARGUMENTS, tries=0).with_profile(tmp_path)
    (newest,) = (folder / 'older').rglob('*.xplane.pb')
    assert report.profile.path == str(tmp_path / newest.relative_to(folder / 'older'))
    assert report.profile.path in ''.join(str(report).split())
    assert (
        explain(older, *ARGUMENTS, tries=0).with_profile(newest).profile.runs == report.profile.runs
    )


@pytest.mark.parametrize('size', [0.2, 0.5, 0.9])
def test_truncated_file(folder, tmp_path, size):
    [newest] = (folder / 'older').rglob('*.xplane.pb')
    data = newest.read_bytes()
    path = tmp_path / 'cut.xplane.pb'
    path.write_bytes(data[: int(len(data) * size)])
    error = refusal(explain(older, *ARGUMENTS, tries=0).with_profile, path)
    assert 'is not a complete trace' in error.sentence


def test_missing_files(tmp_path):
    report = explain(older, *ARGUMENTS, tries=0)
    assert 'there is no file or folder' in refusal(report.with_profile, tmp_path / 'no').sentence
    assert 'has no *.xplane.pb file' in refusal(report.with_profile, tmp_path).sentence
    for name in ('a', 'b'):
        (tmp_path / f'{name}.xplane.pb').write_bytes(b'')
    error = refusal(report.with_profile, tmp_path)
    assert error.facts['pass one of'] == 'a.xplane.pb, b.xplane.pb'
    error = refusal(report.with_profile, tmp_path / 'a.xplane.pb')
    assert 'has no programs' in error.sentence


def test_import_does_not_read_profiles():
    code = 'import sys, einshard; print([m for m in sys.modules if "einshard._profile" in m])'
    done = subprocess.run(
        [sys.executable, '-c', code], env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == '[]\n'
