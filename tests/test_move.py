"""`move`: values, placements, donation, memory, errors, and the routes of the moves of moves.py."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import moves
import numpy as np
import pytest
from command import main
from flags import WITHOUT_TPU, simulating
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from refusal import refusal
from spawn import python_path

from einshard import clear_caches, describe, einshard, explain_move, move, topology
from einshard._chips.table import as_chip
from einshard._explain.partition_worker import move_program
from einshard._move import run as run_module
from einshard._move.candidates import list_candidates
from einshard._move.placed import Placed, bound, boxes, refined
from einshard._move.route import Found, Move, compile_route, find_route
from einshard._move.transfer import plan_transfer
from einshard._program.cost.network import Network
from einshard._program.hlo.collective import Collective
from einshard._program.hlo.find_collectives import read_collectives
from einshard._program.hlo.text import ArrayType

D = np.array(jax.devices())
ROWS = Mesh(D[:8], ('x',))
GRID = Mesh(D[:8].reshape(2, 4), ('a', 'b'))
TRANSPOSED = Mesh(D[:8].reshape(4, 2).T, ('p', 'q'))
REVERSED = Mesh(D[7::-1].reshape(2, 4), ('a', 'b'))
EXPLICIT = Mesh(D[:8], ('x',), axis_types=(AxisType.Explicit,))
FOUR = Mesh(D[:4], ('h',))
OTHERS = Mesh(D[8:].reshape(2, 4), ('w', 'v'))
ALL = Mesh(D, ('z',))
THREE = Mesh(D[:3], ('t',))
TWELVE = Mesh(D[:12].reshape(3, 4), ('p', 'q'))
FULL = np.arange(48 * 48, dtype=np.float32).reshape(48, 48)


@pytest.fixture(autouse=True)
def _guard():
    """Nothing goes through the host. JAX 0.10 does not guard transfers between CPU devices."""
    with jax.transfer_guard_device_to_host('disallow'):
        yield


@contextlib.contextmanager
def reading():
    with jax.transfer_guard_device_to_host('allow'):
        yield


def placed(sharding, full=FULL):
    with reading():
        return jax.device_put(full, sharding)


def check(x, sharding, full=FULL):
    """Each device has its block of the array, by JAX's own account."""
    assert x.sharding == sharding
    with reading():
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), full[shard.index])


# --- placements as numbers ------------------------------------------------------------------------


def held(sharding, shape):
    """The elements that each device holds, as sets, by JAX."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    indices = sharding.devices_indices_map(shape)
    return [set(numbers[indices[device]].flat) for device in sharding.mesh.devices.flat]


SPECS = [P(), P('a'), P(None, 'b'), P('a', 'b'), P('b', 'a'), P(('a', 'b')), P(None, ('b', 'a'))]


@pytest.mark.parametrize('before', SPECS, ids=str)
def test_bound_is_what_a_device_lacks(before):
    shape = (8, 16)
    names = ('a', 'b')

    def numbers(spec):
        entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec.partitions]
        entries += [()] * (2 - len(entries))
        return Placed((2, 4), tuple(tuple(map(names.index, axes)) for axes in entries))

    for after in SPECS:
        pairs = zip(
            held(NamedSharding(GRID, after), shape),
            held(NamedSharding(GRID, before), shape),
            strict=True,
        )
        expected = max(len(new - old) for new, old in pairs)
        ends = numbers(before), numbers(after)
        assert bound(*(boxes(end, shape) for end in ends)) == expected
        # on the common refinement, devices hold the same
        for end, fine in zip(ends, refined(*ends), strict=True):
            for old, new in zip(boxes(end, shape), boxes(fine, shape), strict=True):
                np.testing.assert_array_equal(old, new)


def test_refinement():
    assert [p.sizes for p in refined(Placed((12,), ((0,),)), Placed((4, 3), ((0,),)))] == [
        (2, 2, 3),
        (2, 2, 3),
    ]
    # 3 x 4 and 4 x 3 have no common refinement: each alone
    sizes = [p.sizes for p in refined(Placed((3, 4), ((0,),)), Placed((4, 3), ((0,),)))]
    assert sizes == [(3, 2, 2), (2, 2, 3)]


def test_candidates_hold_no_more_than_the_ends_and_come_in_order():
    shape = (512, 512, 512)
    before, after = refined(Placed((4, 2), ((1,), (), (0,))), Placed((4, 2), ((), (0, 1), ())))
    found = list_candidates(before, after, shape)
    ends = [boxes(end, shape) for end in (before, after)]
    most = max(int(end.volumes().max()) for end in ends)
    sums = []
    for candidate in found:
        there = boxes(candidate.placed, shape)
        assert there.volumes().max() <= most
        sums.append(bound(ends[0], there) + bound(there, ends[1]))
    assert sums == sorted(sums)
    assert len({candidate.placed for candidate in found}) == len(found) == 58


def test_at_most_3000_candidates():
    fine = Placed((2,) * 6, ((0, 1, 2, 3, 4, 5), (), ()))
    after = Placed((2,) * 6, ((), (3, 4, 5), ()))
    found = list_candidates(fine, after, (1024, 1024, 1024))
    assert len(found) == 3000
    assert {candidate.steps for candidate in found} <= {1, 2, 3}


def test_a_route_is_found_and_remembered():
    # FSDP x tensor to tensor with replicas: 3.75 times the bound directly
    before, after = refined(Placed((8, 2), ((0,), (1,))), Placed((4, 4), ((), (1,))))
    a_move = Move((1024, 3584), 'bfloat16', 2, before, after)
    found = find_route(a_move)
    assert found.direct.sent == pytest.approx(3.75 * a_move.bound())
    assert found.best.sent <= 1.13 * a_move.bound()
    assert found.best.temporaries < found.direct.temporaries
    assert len(found.best.through) == 1
    assert find_route(a_move) is found


def test_a_move_that_needs_nothing_compiles_nothing():
    same = Placed((2, 2), ((0, 1),))
    assert find_route(Move((8,), 'float32', 4, same, same)) == Found(
        *[compile_route(Move((8,), 'float32', 4, same, same), ())] * 2, 0
    )


# --- values --------------------------------------------------------------------------------------

SOURCES = {
    'rows': NamedSharding(ROWS, P('x')),
    'grid': NamedSharding(GRID, P('b', 'a')),
    'explicit': NamedSharding(EXPLICIT, P(None, 'x')),
    'four': NamedSharding(FOUR, P('h')),
    'three': NamedSharding(THREE, P(None, 't')),
    'one': SingleDeviceSharding(D[2]),
    'host': NamedSharding(ROWS, P('x'), memory_kind='pinned_host'),
}
TARGETS = {
    'columns': NamedSharding(ROWS, P(None, 'x')),
    'replicas': NamedSharding(GRID, P(None, 'a')),
    'transposed': NamedSharding(TRANSPOSED, P('q', 'p')),
    'reversed': NamedSharding(REVERSED, P('b', 'a')),
    'explicit': NamedSharding(EXPLICIT, P('x')),
    'others': NamedSharding(OTHERS, P('v', 'w')),
    'all': NamedSharding(ALL, P('z')),
    'three': NamedSharding(THREE, P('t')),
    'host': NamedSharding(ROWS, P(None, 'x'), memory_kind='pinned_host'),
}


PAIRS = {
    *((source, target) for source in SOURCES for target in ('columns', 'others', 'host')),
    *((source, target) for source in ('rows', 'explicit') for target in TARGETS),
    *((source, target) for source in ('three', 'one') for target in ('all', 'three')),
}
# of which 25 routes are compiled
SEARCHED = {
    ('explicit', 'reversed'),
    ('explicit', 'transposed'),
    ('host', 'others'),
    ('rows', 'reversed'),
}


@pytest.mark.parametrize(
    ('source', 'target'),
    [
        *sorted(PAIRS - SEARCHED),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in sorted(SEARCHED)),
    ],
)
def test_values_and_donation(source, target):
    sharding = TARGETS[target]
    for donate in (True, False):
        x = placed(SOURCES[source])
        y = move({'w': x}, sharding, donate=donate)['w']
        check(y, sharding)
        if y is not x:
            assert x.is_deleted() == donate
        if not donate:
            check(x, SOURCES[source])


@pytest.mark.slow
def test_the_move_that_aborts_xla_arrives():
    """XLA of JAX 0.12 aborts the process that compiles this move directly."""
    x = placed(NamedSharding(TWELVE, P(('p', 'q'))))
    y = move(x, NamedSharding(TWELVE, P('q', 'p')))
    check(y, NamedSharding(TWELVE, P('q', 'p')))
    assert x.is_deleted()


def test_piece_by_piece_where_nothing_compiles(monkeypatch):
    monkeypatch.setattr('einshard._move.move.find_route', lambda move: Found(None, None, 25))
    for target in (NamedSharding(GRID, P('b', 'a')), NamedSharding(GRID, P())):
        x = placed(NamedSharding(ROWS, P(None, 'x')))
        check(move(x, target), target)
        assert x.is_deleted()


@pytest.mark.parametrize('dtype', ['int8', 'bool', 'complex64'])
def test_dtypes(dtype):
    full = (np.arange(64).reshape(8, 8) % 2).astype(jnp.dtype(dtype))
    x = placed(NamedSharding(ROWS, P('x')), full)
    check(move(x, NamedSharding(GRID, P(None, 'b'))), NamedSharding(GRID, P(None, 'b')), full)


@pytest.mark.parametrize(
    ('dtype', 'mesh', 'spec'),
    [
        ('bfloat16', GRID, P(None, 'a')),
        pytest.param('bfloat16', REVERSED, P('b'), marks=pytest.mark.slow),
        pytest.param('float8_e5m2', GRID, P(), marks=pytest.mark.slow),
    ],
)
def test_every_bit_stays(dtype, mesh, spec):
    """CPUs send bf16 as f32, which makes signaling NaNs quiet."""
    n = jnp.dtype(dtype).itemsize
    bits = np.arange(2 ** (8 * n), dtype=f'uint{8 * n}').reshape(16, -1)
    x = placed(NamedSharding(ROWS, P('x')), bits.view(jnp.dtype(dtype)))
    y = move(x, NamedSharding(mesh, spec))
    with reading():
        np.testing.assert_array_equal(np.asarray(y).view(bits.dtype), bits)


@pytest.mark.parametrize('shape', [(), (0,), (0, 48), (1, 8)])
def test_scalars_and_empty_arrays(shape):
    full = np.full(shape, 3, np.float32)
    x = placed(NamedSharding(ROWS, P()), full)
    split = P(None, 'b') if len(shape) == 2 else P()
    for mesh, spec in [(REVERSED, split), (OTHERS, P()), (THREE, P()), (GRID, split)]:
        x = move(x, NamedSharding(mesh, spec))
        check(x, NamedSharding(mesh, spec), full)


def test_keys():
    with reading():
        keys = jax.random.split(jax.random.key(0), 8)
        expected = np.asarray(jax.random.key_data(keys))
    for target in (NamedSharding(GRID, P('b')), NamedSharding(OTHERS, P(('w', 'v')))):
        x = placed(NamedSharding(ROWS, P('x')), keys)
        y = move(x, target)
        assert y.dtype == keys.dtype
        assert y.sharding.is_equivalent_to(target, 1)
        assert x.is_deleted()
        with reading():
            np.testing.assert_array_equal(jax.random.key_data(y), expected)


def test_other_leaves():
    x = placed(NamedSharding(ROWS, P('x')))
    tree = {'w': x, 'host': FULL, 'none': None, 'number': 2.0, 'name': 'adam', 'kept': x}
    specs = {
        'w': P(None, 'x'),
        'host': P('x'),
        'none': None,
        'number': P(),
        'name': None,
        'kept': None,
    }
    with jax.set_mesh(ROWS):
        y = move(tree, specs)
    check(y['w'], NamedSharding(ROWS, P(None, 'x')))
    check(y['host'], NamedSharding(ROWS, P('x')))
    assert (y['none'], y['name']) == (None, 'adam')
    assert y['number'].shape == ()
    # another leaf still needs the array
    assert y['kept'] is x
    check(x, NamedSharding(ROWS, P('x')))


def test_from_one_device_to_another():
    x = placed(SingleDeviceSharding(D[2]))
    y = move(x, 'a b', mesh=[D[5]])
    assert y.sharding.device_set == {D[5]}
    assert x.is_deleted()
    with reading():
        np.testing.assert_array_equal(np.asarray(y), FULL)


def test_placed_already():
    x = placed(NamedSharding(ROWS, P('x')))
    assert move(x, NamedSharding(ROWS, P('x', None))) is x
    assert move([x], 'a b -> a* b', mesh=ROWS)[0] is x


def test_an_array_at_two_paths_moves_once():
    x = placed(NamedSharding(ROWS, P('x')))
    y = move({'embed': x, 'head': x}, NamedSharding(ROWS, P(None, 'x')))
    assert y['embed'] is y['head']
    assert x.is_deleted()
    x = placed(NamedSharding(ROWS, P('x')))
    both = move(
        {'a': x, 'b': x}, {'a': NamedSharding(ROWS, P(None, 'x')), 'b': NamedSharding(ROWS, P())}
    )
    check(both['a'], NamedSharding(ROWS, P(None, 'x')))
    check(both['b'], NamedSharding(ROWS, P()))


def test_partial_sums_are_reduced():
    mesh = Mesh(D[:8].reshape(2, 4), ('a', 'b'), axis_types=(AxisType.Explicit,) * 2)
    with reading(), jax.set_mesh(mesh):
        x = jax.device_put(FULL, NamedSharding(mesh, P(None, 'a')))
        w = jax.device_put(FULL, NamedSharding(mesh, P('a', None)))
        product = jnp.einsum('xy,yz->xz', x, w, out_sharding=P(None, None, unreduced={'a'}))
        expected = FULL @ FULL
    target = NamedSharding(mesh, P(None, 'b'))
    y = move(product, target)
    assert y.sharding == target
    assert product.is_deleted()
    with reading():
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5)
    z = move(y, NamedSharding(mesh, P(None, None, unreduced={'b'})))
    assert z.sharding.spec.unreduced == {'b'}
    with jax.set_mesh(mesh):
        back = move(z, NamedSharding(mesh, P('a')))
    with reading():
        np.testing.assert_allclose(np.asarray(back), expected, rtol=1e-5)


def test_uneven_shards_cannot_be_a_source():
    """JAX has them only inside of a program: an output with such a constraint is replicated."""
    with pytest.raises(ValueError, match='9'):
        placed(NamedSharding(ROWS, P('x')), np.ones((9, 4), np.float32))
    struct = jax.ShapeDtypeStruct((9, 4), 'float32', sharding=NamedSharding(ROWS, P('x')))
    error = refusal(explain_move, struct, NamedSharding(ROWS, P()))
    assert error.code == 'not-divisible'


def test_in_the_context_of_another_mesh():
    for mesh in (EXPLICIT, GRID, ROWS):
        with jax.set_mesh(mesh):
            x = placed(NamedSharding(ROWS, P('x')))
            check(move(x, NamedSharding(GRID, P('b', 'a'))), NamedSharding(GRID, P('b', 'a')))
            x = placed(NamedSharding(ROWS, P('x')))
            check(move(x, NamedSharding(THREE, P('t'))), NamedSharding(THREE, P('t')))


# --- memory --------------------------------------------------------------------------------------


def programs_of(monkeypatch):
    """The numbers of arrays that each program moves."""
    sizes = []
    original = run_module.run_program

    def spy(jobs, donate):
        sizes.append(len(jobs))
        return original(jobs, donate)

    monkeypatch.setattr('einshard._move.move.run_program', spy)
    return sizes


def test_groups_need_no_more_than_memory(monkeypatch):
    sizes = programs_of(monkeypatch)
    full = np.ones((512, 512), np.float32)  # 128 KiB on a device; moving it needs 400
    for memory, expected in [('1 GiB', [8]), ('1 MiB', [2, 2, 2, 2]), (2**19, [1] * 8)]:
        tree = [placed(NamedSharding(ROWS, P('x')), full) for _ in range(8)]
        moved = move(tree, NamedSharding(ROWS, P(None, 'x')), memory=memory)
        assert sizes == expected
        assert all(x.is_deleted() for x in tree)
        for x in moved:
            check(x, NamedSharding(ROWS, P(None, 'x')), full)
        sizes.clear()


def test_an_error_in_the_middle_has_what_moved(monkeypatch):
    original = run_module.run_program
    calls = []

    def fails(jobs, donate):
        calls.append(jobs)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')
        return original(jobs, donate)

    monkeypatch.setattr('einshard._move.move.run_program', fails)
    full = np.ones((1024, 1024), np.float32)
    tree = {name: placed(NamedSharding(ROWS, P('x')), full) for name in 'abc'}
    error = refusal(move, tree, NamedSharding(ROWS, P(None, 'x')), memory=3 * 2**20 // 2)
    assert error.sentence == 'the move stopped after 1 of 3 arrays'
    assert 'RESOURCE_EXHAUSTED' in error.facts['JAX says']
    assert [*error.moved] == ['a']
    check(error.moved['a'], NamedSharding(ROWS, P(None, 'x')), full)
    assert tree['a'].is_deleted()
    check(tree['b'], NamedSharding(ROWS, P('x')), full)


# --- report --------------------------------------------------------------------------------------


def test_report():
    mesh = Mesh(D.reshape(8, 2), ('fsdp', 'tensor'))
    serving = Mesh(D.reshape(4, 4), ('data', 'tensor'))
    source = NamedSharding(mesh, P('fsdp', 'tensor'))
    tree = {
        'layers': [jax.ShapeDtypeStruct((1024, 3584), 'bfloat16', sharding=source)] * 3,
        'norm': jax.ShapeDtypeStruct((16,), 'float32', sharding=NamedSharding(serving, P())),
        'step': np.ones(()),
    }
    specs = {
        'layers': NamedSharding(serving, P(None, 'tensor')),
        'norm': NamedSharding(serving, P()),
        'step': NamedSharding(serving, P()),
    }
    report = explain_move(tree, specs)
    [row] = report.rows
    piece = 1024 * 3584 * 2 // 16
    assert (row.leaves, row.path, row.array) == (3, 'layers/0', 'bfloat16[1024,3584]')
    assert (row.source, row.target) == ('a b -> a@fsdp b@tensor', 'a b -> a b@tensor')
    assert (row.bound, row.kept) == (4 * piece, 0)  # of device 15
    assert row.sent == row.received == row.ratio * row.bound
    assert row.ratio < 1.13
    assert len(row.route) == 1
    assert (report.placed, report.from_host, report.chip) == (1, 1, None)
    assert report.network_bytes == row.sent
    text = str(report)
    assert row.route[0] in text
    assert 'placed from the host: 1 array' in text
    assert '<table' in report._repr_html_()


def test_report_on_other_devices():
    x = jax.ShapeDtypeStruct((48, 48), 'float32', sharding=NamedSharding(ROWS, P('x')))
    [row] = explain_move(x, NamedSharding(OTHERS, P('v', 'w'))).rows
    piece = 48 * 48 * 4 // 8
    assert (row.bound, row.kept) == (piece, 0)
    assert row.sent >= piece
    [row] = explain_move(x, NamedSharding(FOUR, P('h'))).rows
    assert row.bound == 2 * piece - 0 or row.bound <= 2 * piece
    [row] = explain_move(x, NamedSharding(THREE, P('t'))).rows
    assert row.by_pieces
    assert 'pieces' in str(explain_move(x, NamedSharding(THREE, P('t'))))


def test_nothing_to_move():
    x = placed(NamedSharding(ROWS, P('x')))
    report = explain_move(x, NamedSharding(ROWS, P('x')))
    assert report.rows == ()
    assert 'none' in str(report)
    assert describe(move(x, NamedSharding(ROWS, P('x')))) == 'a b -> a@x b'


def test_planning_again_takes_little(monkeypatch):
    """The second time, nothing is compiled."""
    clear_caches()
    plan_transfer.cache_clear()
    x = placed(NamedSharding(ROWS, P('x')))
    first = explain_move(x, NamedSharding(ROWS, P(None, 'x')))
    monkeypatch.setattr('einshard._move.route.compile_in_worker', None)
    assert explain_move(x, NamedSharding(ROWS, P(None, 'x'))).rows == first.rows


def test_einshard_places_what_was_moved():
    x = placed(NamedSharding(ROWS, P('x')))
    y = move(x, 'a b -> a b*', mesh=ROWS)
    assert einshard(y, 'a b -> a b*', mesh=ROWS) is y


# --- the twenty moves of moves.py, and what moving takes ------------------------------------------

ROOT = Path(__file__).parents[1]
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
