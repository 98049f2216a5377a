"""The routes of the twenty moves of moves.py, and what moving takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import moves
import pytest
from command import main
from flags import WITHOUT_TPU, simulating
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from spawn import python_path

import einshard
from einshard import explain_move, topology
from einshard._explain.partition_worker import move_program
from einshard._move.route import find_route
from einshard._program.cost.chips import as_chip
from einshard._program.cost.network import Network
from einshard._program.hlo.collective import Collective
from einshard._program.hlo.find_collectives import read_collectives
from einshard._program.hlo.text import ArrayType

ROOT = Path(einshard.__file__).parents[1]
ABOVE = {'three axes': 1.43, 'layers to stages': 1.60, 'cache from batch to heads': 1.38}


@pytest.mark.slow
@pytest.mark.parametrize('row', moves.MOVES, ids=lambda row: row[0])
def test_route(row):
    """By the compiler: at most 1.3 times the bound, or the ratio of the best that is known."""
    move = moves.move_of(row)
    found = find_route(move)
    best, direct = found.best, found.direct
    assert best.sent <= (ABOVE.get(row[0], 1.3) + 0.005) * move.bound()
    assert best.sent >= move.bound()
    assert found.compilations <= 25
    if direct is not None:
        assert best.sent <= direct.sent
        assert best.temporaries <= direct.temporaries + 1024


@pytest.mark.slow
def test_direct_moves_that_the_route_beats():
    """The figures of the compiler that make routes worth it."""
    ratios = {}
    for number in (2, 9, 12):
        move = moves.move_of(moves.MOVES[number - 1])
        found = find_route(move)
        ratios[number] = round(found.direct.sent / found.best.sent, 1)
    assert ratios == {2: 3.3, 9: 5.6, 12: 10.0}


@pytest.mark.slow
@pytest.mark.parametrize(('how', 'most'), [('move', 200), ('others', 200)])
def test_memory_while_256_mib_move(how, most):
    env = {
        **os.environ,
        'XLA_FLAGS': f'{simulating(16)} {WITHOUT_TPU}',
        'PYTHONPATH': python_path(ROOT),
    }
    program = [sys.executable, str(ROOT / 'tests' / 'move_memory.py'), how]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= most


def llama(mesh, spec_of):
    """The shapes of a model with 7 billion parameters, layer by layer."""
    d, ff, vocabulary = 4096, 11008, 32000
    layer = {
        **dict.fromkeys('qkvo', (d, d)),
        'gate': (d, ff),
        'up': (d, ff),
        'down': (ff, d),
        'norm': (d,),
        'norm2': (d,),
    }
    model = {'embed': (vocabulary, d), 'head': (d, vocabulary), 'norm': (d,)}
    model['layers'] = [layer] * 32
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(
            shape, 'bfloat16', sharding=NamedSharding(mesh, spec_of(shape))
        ),
        model,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.slow
def test_a_model_of_seven_billion_parameters():
    """FSDP over 64 to 8 replicas of tensor parallelism over 8, on TPUs that are not there."""
    pytest.importorskip('libtpu', reason='libtpu describes TPUs, and is not installed')
    mesh = topology('v5e:8x8', data=8, tensor=8)
    fsdp = llama(mesh, lambda shape: P(('data', 'tensor')))
    tensor = jax.tree.map(
        lambda x: NamedSharding(mesh, P(None, 'tensor') if x.ndim > 1 else P()), fsdp
    )
    report = explain_move(fsdp, tensor)
    assert sum(row.leaves for row in report.rows) == 32 * 9 + 3
    assert all(row.ratio <= 1.3 for row in report.rows)
    n_bytes = sum(x.size for x in jax.tree.leaves(fsdp)) * 2
    # each device gets an eighth, of which it had some
    assert 0.8 * n_bytes / 8 <= report.network_bytes <= 1.3 * n_bytes / 8


@pytest.mark.gpu
@pytest.mark.parametrize(('number', 'name'), [(2, 'h100:2x8'), (9, 'h100:1x8')])
def test_compiled_for_gpus(number, name):
    check_on_target(number, name)


@pytest.mark.slow
def test_compiled_for_tpus():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    check_on_target(2, 'v5e:4x4')


def check_on_target(number, name):
    """The program that `move` runs sends, on the target, what the report says."""
    move = moves.move_of(moves.MOVES[number - 1])
    best = find_route(move).best
    devices = [*topology(name).devices.flat]
    sent = {}
    for through in (best.through, ()):
        program, first, last = move_program(devices, (move.before, *through, move.after))
        x = jax.ShapeDtypeStruct(move.shape, move.dtype, sharding=first)
        compiled = jax.jit(program, out_shardings=last).lower(x).compile()
        sent[through] = sum(c.total_bytes for c in read_collectives(compiled.as_text()))
    assert sent[best.through] <= 1.01 * best.sent
    assert sent[()] > 2 * sent[best.through]


def test_command(tmp_path, monkeypatch, capsys):
    (tmp_path / 'shapes_to_move.py').write_text(
        'import jax\n'
        'from jax.sharding import NamedSharding, PartitionSpec as P\n'
        'def trained(mesh):\n'
        "    sharding = NamedSharding(mesh, P('fsdp', 'tp'))\n"
        "    return {'w': jax.ShapeDtypeStruct((64, 64), 'float32', sharding=sharding)}\n"
        'def serving(mesh):\n'
        "    return NamedSharding(mesh, P(None, 'tp'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ['move', 'shapes_to_move:trained', 'shapes_to_move:serving', '--mesh', 'fsdp=4', 'tp=2']
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert 'a b -> a@fsdp b@tp' in printed
    assert 'sent by a device: 6.0 KiB' in printed
    assert main([*words[:2], 'a b -> a b@tp', *words[3:], '--json']) == 0
    assert json.loads(capsys.readouterr().out)['network_bytes'] == 6144
    assert main([*words, '--save', 'move.html']) == 0
    assert '<table' in (tmp_path / 'move.html').read_text()


def test_bytes_and_time_by_kind_of_link():
    """All-gathers within NVLink domains of 8 GPUs, and between two domains."""
    chip = as_chip('H100')
    network = Network([SimpleNamespace(id=i) for i in range(16)], chip)
    n_bytes = 2**20

    def gather(groups):
        array = (ArrayType('s8', (n_bytes,)),)
        return Collective('all-gather', 'gather', array, array, groups, (), 16)

    domains = gather((tuple(range(8)), tuple(range(8, 16))))
    pairs = gather(tuple((i, i + 8) for i in range(8)))
    found = network.by_link(domains)
    assert found['between'] == (0, 0.0)
    assert found['within'] == (n_bytes * 7 // 8, pytest.approx(n_bytes * 7 / 8 / chip.link))
    found = network.by_link(pairs)
    assert found['within'] == (0, 0.0)
    # each domain gets half of eight arrays, over eight network cards
    assert found['between'] == (n_bytes // 2, pytest.approx(n_bytes / 2 / chip.network))
    both = network.by_link(domains, pairs)
    assert [size for size, _ in both.values()] == [n_bytes * 7 // 8, n_bytes // 2]
