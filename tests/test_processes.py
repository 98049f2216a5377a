"""Several processes with simulated devices: two with four of them, and four with two.

Each process runs many checks of process_checks.py, since starting a process takes seconds. The
tests compare the results of the processes with each other and with those of this process.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import process_checks
import pytest
import test_docs
from flags import WITHOUT_TPU, simulating
from spawn import free_port, python_path

import einshard

ROOT = pathlib.Path(einshard.__file__).parents[1]
TWO_AND_FOUR = [2, pytest.param(4, marks=pytest.mark.slow)]
PATIENCE = 60  # seconds in which no process finishes a check


def launch(folder, n_processes):
    """Runs the checks in new processes; returns their results and output."""
    folder.mkdir()
    env = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'{simulating(8 // n_processes)} {WITHOUT_TPU}',
        'PYTHONPATH': python_path(ROOT),
    }
    program = [sys.executable, '-W', 'error::UserWarning', process_checks.__file__]
    program += [str(free_port()), str(n_processes)]
    with open(folder / 'output', 'w') as output:
        processes = [
            subprocess.Popen([*program, str(i), str(folder)], env=env, stdout=output, stderr=output)
            for i in range(n_processes)
        ]
        try:
            # if one fails, the others wait for it
            written, since = -1, time.monotonic()
            while any(process.poll() is None for process in processes):
                size = sum(path.stat().st_size for path in folder.glob('*.jsonl'))
                if size != written:
                    written, since = size, time.monotonic()
                if time.monotonic() > since + PATIENCE:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    results = []
    for i in range(n_processes):
        path = folder / f'{i}.jsonl'
        lines = path.read_text().splitlines() if path.exists() else []
        results.append({line['check']: line for line in map(json.loads, lines)})
    return results, (folder / 'output').read_text()[-4000:]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """The results with a number of processes, cached."""
    folder = tmp_path_factory.mktemp('processes')

    @functools.cache
    def run(n_processes):
        return launch(folder / str(n_processes), n_processes)

    run.folder = folder
    return run


def said(run, n_processes, check):
    """What each process returned from a check. No process failed."""
    results, output = run(n_processes)
    for process, result in enumerate(results):
        assert check in result, f'process {process} never finished {check}:\n{output}'
        assert result[check]['error'] is None, f'process {process}:\n{result[check]["error"]}'
    return [result[check]['said'] for result in results]


@pytest.mark.parametrize(
    ('n_processes', 'check'),
    [
        *[(2, check) for check in process_checks.CHECKS],
        *[pytest.param(4, check, marks=pytest.mark.slow) for check in process_checks.IN_FOUR],
    ],
)
def test_check(run, n_processes, check):
    if check == 'checkpoint':
        pytest.importorskip('orbax.checkpoint')
    assert len(said(run, n_processes, check)) == n_processes


@pytest.fixture(scope='module')
def trained():
    """One process, on as many devices."""
    return process_checks.train(mesh=jax.devices()[:8])


def check_same_training(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('n_processes', TWO_AND_FOUR)
def test_training_as_in_one_process(run, trained, n_processes):
    first, *others = said(run, n_processes, 'training')
    assert all(other == first for other in others)  # bit for bit
    # gloo adds in another order than one process
    check_same_training(first, trained)
    assert len(first['losses']) == 5
    assert first['losses'][-1] < first['losses'][0]


def test_training_on_one_device_is_the_same(trained):
    check_same_training(process_checks.train(mesh=jax.devices()[:2]), trained)


def test_checkpoint_of_two_processes_is_read_by_one(run):
    pytest.importorskip('orbax.checkpoint')
    said(run, 2, 'checkpoint')
    restored = process_checks.restore(run.folder / 'checkpoint', mesh=jax.devices()[:4])
    assert einshard.describe(restored['w']) == 'a b -> a b4'


# --- the documentation ------------------------------------------------------------------------


@pytest.mark.slow
def test_page_and_its_program_run(monkeypatch):
    """The program of the page learns the same in two processes as in one."""
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.chdir(test_docs.DOCS)
    _, printed = test_docs.run(test_docs.DOCS / 'many_hosts.md')
    lines = printed.strip().splitlines()
    assert [line[:10] for line in lines] == ['process 0:', 'process 1:']
    first, second = (line[10:] for line in lines)
    assert first == second
    before, after = map(float, re.search(r'loss ([\d.]+) -> ([\d.]+)', first).groups())
    assert after < 0.8 * before
    monkeypatch.syspath_prepend(test_docs.DOCS / 'examples')
    import many_hosts

    with jax.set_mesh(einshard.device_mesh(jax.devices()[:8])):
        _, losses = many_hosts.train(30)
    assert [f'{losses[0]:.5f}', f'{losses[-1]:.5f}'] == [f'{before:.5f}', f'{after:.5f}']


@pytest.mark.slow
def test_error_in_the_documentation(run):
    text = said(run, 4, 'uneven_rows')[0]['other rows']
    shown = textwrap.indent('einshard.EinshardError: ' + text, '    ')
    assert f'\n\n{shown}\n\n' in (test_docs.DOCS / 'many_hosts.md').read_text()


# --- the texts of errors ----------------------------------------------------------------------


def different(*said, expression='batch d -> batch* d'):
    width = max(len(label) for label in ('expected', *dict(said))) + 1
    return '\n'.join(
        [
            'the processes are about to build different arrays',
            *([f'    {expression}'] if expression else []),
            *(f'  {label + ":":<{width}} {text}' for label, text in said),
            f'  {"expected:":<{width}} '
            'the same shapes, dtypes, paths and expressions in every process',
        ]
    )


@pytest.mark.parametrize('n', TWO_AND_FOUR)
def test_all_processes_raise_the_same_difference(run, n):
    everyone = said(run, n, 'uneven_rows')
    rest = {2: 'process 1', 4: 'processes 1, 2, 3'}[n]
    uneven = f"axis 'batch' (local size 5) is not divisible by {8 // n}, the number of local shards"
    x, y = "float32[4,4], leaf 'x'", "float32[8,4], leaf 'y'"
    same = 'float32[8,4]'
    expected = {
        'indivisible in one': [('process 0', f"float32[5,4], leaf 'x': {uneven}"), (rest, x)],
        'other rows': [('process 0', y), (rest, "float32[4,4], leaf 'y'")],
        'other dtype': [('process 0', 'int32[8,4]'), (rest, same)],
        'other tree': [('process 0', 'no more arrays'), (rest, y)],
        'other function': [('process 0', 'RuntimeError: no file'), (rest, same)],
        'a string in one': [
            ('process 0', "str, leaf 'of': 'training' (str) is not an array"),
            (rest, "float32[8,4], leaf 'of'"),
        ],
    }
    texts = {name: different(*facts) for name, facts in expected.items()}
    texts['other expression'] = different(
        ('process 0', "float32[8,4] as '* batch d'"),
        (rest, "float32[8,4] as 'batch d -> batch* d'"),
        expression=None,
    )
    for name, text in texts.items():
        assert {said[name] for said in everyone} == {text}


def indivisible(size, array, process, n):
    each = 8 // n
    return (
        f"axis 'batch' (local size {size}) is not divisible by {each}, the number of local shards\n"
        '    batch d -> batch* d\n'
        '               ^^^^^^\n'
        f'  array:       float32{array}\n'
        f'  process:     {process}\n'
        f'  global size: {size * n} in 8 shards\n'
        f'  works with:  multiples of {each}'
    )


@pytest.mark.parametrize('n', TWO_AND_FOUR)
def test_each_process_raises_its_own_error(run, n):
    for process, texts in enumerate(said(run, n, 'uneven_rows')):
        assert texts['indivisible in all'] == indivisible(5, '[5,4]', process, n)
        note = "\n  note:        indivisible='replicate' is ignored: processes have different rows"
        expected = indivisible(7, "[7,4], leaf 'x'", process, n)
        assert texts['lenient rules'] == expected + note
        assert texts['lenient axis rules'].endswith(note)
        assert texts['no rule'] == expected
        assert texts['bad expression'] == (
            "'e' is not on the left side\n"
            '    batch d -> batch* e\n'
            '                      ^\n'
            "  array:     float32[8,4], leaf 'x'\n"
            '  left side: batch d\n'
            "  try:       'batch d -> batch* d'"
        )
        assert texts['global'] == (
            'the array is already global: its shards are on several processes\n'
            '    batch d -> batch* d\n'
            f"  array:   float32[{8 * n},4], leaf 'x'\n"
            '  instead: use einshard(x, ...) to reshard it'
        )
        assert texts['strings'] == (
            'JAX does not support dtype <U1\n    batch -> batch*\n  array: <U1[8]'
        )
        assert texts['a string'] == (
            "'training' (str) is not an array\n"
            "  got:     str, leaf 'of'\n"
            '  instead: use None as its spec to return it unchanged'
        )
        assert texts['another library'] == (
            'Foreign is not a JAX or numpy array\n'
            "  array:   Foreign, leaf 'x'\n"
            '  instead: convert it: numpy.asarray(x)'
        )
        assert texts['abstract mesh'] == (
            "from_local needs a mesh of devices, but this mesh is abstract\n  mesh: 'x': 8 (Auto)"
        )
        if process:
            sizes = {2: "'d0': 2, 'd1': 2", 4: "'d0': 2"}[n]
            assert texts['other mesh'] == (
                f'process {process} has no device in the mesh\n'
                f'  mesh:           {sizes} (Auto, canonical mesh)\n'
                '  devices are in: process 0'
            )


@pytest.mark.parametrize('n', TWO_AND_FOUR)
def test_meshes_that_differ(run, n):
    everyone = said(run, n, 'meshes_that_differ')
    assert all(texts == everyone[0] for texts in everyone)
    texts, ids = everyone[0]
    rest, last = {2: ('process 0', 1), 4: ('processes 0, 1, 2', 3)}[n]
    m = 8 // n

    def differ(before, after):
        width = max(len(rest), len('expected')) + 1
        return (
            'the processes have different meshes of the same devices\n'
            f'  {rest + ":":<{width}} {before}\n'
            f'  {f"process {last}:":<{width}} {after}\n'
            f'  {"expected:":<{width}} '
            'the same axes, and the same order of devices, in every process'
        )

    expected = []
    for kind in ('Auto', 'Explicit'):
        mesh = f"'h': {n}, 'l': {m} ({kind})"
        end = f'h={last}, l={m - 2}'
        found = [
            differ(f'device {ids[0]} at h=0, l=0', f'device {ids[-m]} at h=0, l=0'),
            differ(f'device {ids[-2]} at {end}', f'device {ids[-1]} at {end}'),
            differ(mesh, f"'h': {m}, 'l': {n} ({kind})"),
            differ(mesh, f"'l': {n}, 'h': {m} ({kind})"),
        ]
        expected += [text for text in found for _ in range(5)]
    assert texts == expected


def test_gather_without_a_device_in_the_mesh(run):
    assert said(run, 2, 'a_mesh_of_one_process')[0] == (
        'process 0 has no device in the mesh\n'
        "  array:          float32[8,16], leaf 'stage'\n"
        "  mesh:           'd0': 2, 'd1': 2 (Auto, canonical mesh)\n"
        '  devices are in: process 1'
    )


def test_axes_split_unevenly_across_processes(run):
    for texts in said(run, 2, 'uneven_rows'):
        assert texts['split unevenly'] == (
            "axis 'batch' is split unevenly across processes, so its global size is unknown\n"
            '    batch d -> batch3 d 2\n'
            '               ^^^^^^\n'
            '  array:     float32[8,4]\n'
            '  process 0: shards 0, 1\n'
            '  process 1: shards 1, 2\n'
            '  instead:   use jax.make_array_from_callback'
        )
        shards = '  process 0: shards 0, 1, 2, 3\n  process 1: shards 4, 5, 6\n'
        assert shards in texts['unlike numbers']
