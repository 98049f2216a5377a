"""compare: one program over hardware and sizes."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from command import main
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import EinshardError, compare, explain, sharded, topology

MESH = {'data': 4, 'tensor': 2}


@jax.jit
def step(x, w):
    return jax.nn.relu(x @ w)


def arguments(size, mesh):
    def struct(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, 'bfloat16', sharding=NamedSharding(mesh, spec))

    return struct(P('data', 'tensor'), size, 256), struct(P('tensor'), 256, 512)


def test_bytes_are_those_by_hand():
    """An all-reduce of the [size/4, 512] of each device over 2, of 2 bytes or, on CPUs, of 4."""
    table = compare(step, arguments, ['cpu:8'], [64, 128], MESH)
    assert [(row.target, row.size) for row in table.rows] == [('cpu:8', 64), ('cpu:8', 128)]
    sent = [row.network_bytes for row in table.rows]
    assert sent[0] in (16 * 512 * 2, 16 * 512 * 4)
    assert sent[1] == 2 * sent[0]
    assert all(row.bound is None and row.step is None and row.fits for row in table.rows)


def test_targets():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    targets = ['v5e:2x4', 'v6e:2x4', 'nowhere:8', 'cpu:8']
    table = compare(step, arguments, targets, [4096], MESH)
    tpu, newer, nowhere, cpu = table.rows
    with jax.set_mesh(topology('v5e:2x4', **MESH)):
        report = explain(step, *arguments(4096, jax.sharding.get_mesh()), tries=0)
    assert (tpu.network_bytes, tpu.memory) == (report.network_bytes, report.memory.total)
    assert tpu.bound == report.bounds.largest.seconds
    assert tpu.step == report.timeline.totals.step
    assert newer.step < 0.9 * tpu.step
    assert 'nowhere' in nowhere.error
    assert cpu.network_bytes
    assert "'v6e:2x4' is fastest, by the estimate, at size 4096" in str(table)
    assert re.search(r'4096 +nowhere:8 +error', str(table))
    data = json.loads(json.dumps(table.to_dict()))
    assert data['rows'][0]['target'] == 'v5e:2x4'


def test_a_program_that_does_not_fit():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    table = compare(step, arguments, ['v5e:2x4'], [2**26], MESH)
    (row,) = table.rows
    assert not row.fits
    assert 'does not fit: ' in str(table)


def test_a_function_that_raises_does_not_end_the_table():
    def fails(size, mesh):
        if size == 8:
            raise KeyError('no size 8')
        return arguments(size, mesh)

    table = compare(step, fails, ['cpu:8'], [8, 16], MESH)
    assert [bool(row.error) for row in table.rows] == [True, False]
    assert 'no size 8' in str(table)


def test_sharded_functions_and_axes_by_the_number_of_devices():
    layer = sharded('b@data d', 'd f@tensor')(jnp.dot)
    args = jax.ShapeDtypeStruct((16, 8), 'float32'), jax.ShapeDtypeStruct((8, 16), 'float32')
    table = compare(layer, args, ['cpu:4', 'cpu:8'], mesh=lambda n: {'data': 2, 'tensor': n // 2})
    assert [(row.n_devices, row.network_bytes, row.error) for row in table.rows] == [
        (4, 0, ''),
        (8, 0, ''),
    ]


def test_bad_calls():
    with pytest.raises(EinshardError, match='targets= must be a list of names'):
        compare(step, (), 'cpu:8')
    with pytest.raises(EinshardError, match='no sizes='):
        compare(step, lambda size: (), ['cpu:8'])
    with pytest.raises(EinshardError, match='must be a function of a size'):
        compare(step, (1,), ['cpu:8'], [8])
    (row,) = compare(step, (), ['cpu:800'], mesh=MESH).rows
    assert 'CPU devices' in row.error


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / 'model.py').write_text(
        'import os, jax\n'
        '@jax.jit\n'
        'def step(x, y):\n'
        '    return x @ y\n'
        'def data(n):\n'
        "    return jax.ShapeDtypeStruct((n, 8), 'float32')\n"
        'def weights(mesh):\n'
        '    if mesh.size == 4:\n'
        '        os.abort()\n'
        "    return jax.ShapeDtypeStruct((8, 8), 'float32')\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ['compare', 'model:step', '--args', 'f32[SIZE,8]', 'model:weights', '--json']
    assert main([*words, '--targets', 'cpu:2', 'cpu:4', '--sizes', '8']) == 0
    rows = json.loads(capsys.readouterr().out)['rows']
    assert [(row['size'], row['target'], bool(row['error'])) for row in rows] == [
        (8, 'cpu:2', False),
        (8, 'cpu:4', True),
    ]
    assert 'the process ended with status' in rows[1]['error']
    words[3] = 'model:data(SIZE)'
    assert main([*words, '--targets', 'cpu:2', '--sizes', '16']) == 0
    (row,) = json.loads(capsys.readouterr().out)['rows']
    assert (row['size'], row['error']) == (16, '')
    words[3] = 'f32[8,8]'
    assert main([*words, '--targets', 'cpu:2']) == 0
    (row,) = json.loads(capsys.readouterr().out)['rows']
    assert (row['size'], row['error']) == (None, '')
    assert (
        main(['compare', 'model:step', '--args', 'f32[8]', '--targets', 'cpu:2', '--sizes', '1'])
        == 2
    )
    assert '--args has no SIZE' in capsys.readouterr().err
