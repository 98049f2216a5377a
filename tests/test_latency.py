"""Notes on collectives of a few numbers that cost their latency, and programs without them."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo.read import collectives_of, latency_of
from jax import lax
from modules import line_of
from refusal import refusal

from einshard import Chip, device_mesh, einshard, explain, per_device, sharded

MESH = device_mesh(jax.devices()[:8], data=8)
KINDS = ('collective in a condition', 'many small collectives')
SLOW = Chip('slow', {'bf16': 1e9}, 1e11, memory_bandwidth=1e9, link=1e9, latency=1e-6)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def latency_notes(function, *args, chip='TPU v5e'):
    report = explain(function, *args, chip=chip, tries=0)
    assert not [finding for finding in report.findings if finding.kind in KINDS]
    return [note for note in report.notes if note.kind in KINDS]


# --- the latency of a collective ------------------------------------------------------------------


def seconds(chip, devices, groups=(), pairs=()):
    listed = ','.join('{' + ','.join(map(str, group)) + '}' for group in pairs or groups)
    how = (
        'collective-permute(%x), source_target_pairs='
        if pairs
        else 'all-reduce(%x), replica_groups='
    )
    [one] = collectives_of(f"""HloModule jit_f, num_partitions={len(devices)}

ENTRY %main (x: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  ROOT %y = f32[] {how}{{{listed}}}
}}
""")
    return latency_of(one, chip, devices)


def torus(*sizes):
    places = itertools.product(*map(range, sizes))
    return [SimpleNamespace(id=i, coords=list(at)) for i, at in enumerate(places)]


def test_latency_is_that_of_the_longest_way():
    """Counted by hand: 1 us for each link."""
    grid = np.arange(256).reshape(16, 16)
    pod = torus(16, 16)
    assert seconds('TPU v5e', pod, grid) == 8e-6  # half of a ring of 16
    assert seconds('TPU v5e', pod, grid[:, :4]) == 3e-6  # 4 neighbors in it
    assert seconds('TPU v5e', pod, [grid.ravel()]) == 16e-6
    assert seconds('TPU v5e', torus(2, 4), [range(8)]) == 4e-6  # without rings
    assert seconds('TPU v5e', torus(2, 4), pairs=((0, 1), (2, 3))) == 1e-6
    assert seconds('TPU v4', torus(4, 4, 4), [range(64)]) == 6e-6


def test_latency_without_coordinates():
    devices = [SimpleNamespace(id=i) for i in range(8)]
    known = refusal(explain, jnp.tanh, f32(8), chip='unknown').facts['known chips'].split(', ')
    assert {'TPU v5e', 'H100'} < {*known}
    for chip in known:
        assert seconds(chip, devices, [range(8)]) == (1e-6 if 'TPU' in chip else 5e-6), chip


def test_collectives_in_a_call_of_a_condition():
    """XLA for GPUs wraps them in fusions; the condition runs once more than the body."""
    text = """HloModule jit_f, num_partitions=4

%reduced (x: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  ROOT %sum = s32[] all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add
}

%condition (state: (s32[])) -> pred[] {
  %state = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %all = s32[] call(%i), to_apply=%reduced
  %limit = s32[] constant(40)
  ROOT %test = pred[] compare(%all, %limit), direction=LT
}

%body (state: (s32[])) -> (s32[]) {
  %state = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %new = (s32[]) tuple(%next)
}

ENTRY %main (x: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  %start = (s32[]) tuple(%x)
  %loop = (s32[]) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"10"}}
  ROOT %end = s32[] get-tuple-element(%loop), index=0
}
"""
    (one,) = collectives_of(text)
    assert one.nodes[0].scope.is_condition
    assert (one.executions, one.is_exact) == (11, True)


# --- conditions of loops --------------------------------------------------------------------------


def norm_in_condition(a, b):
    def is_running(state):
        _, r, i = state
        return (jnp.sqrt(jnp.sum(r * r)) > 1e-3) & (i < 100)

    def iterate(state):
        x, r, i = state
        step = jnp.vdot(r, r) / jnp.vdot(r, a * r)
        return x + step * r, r - step * a * r, i + 1

    return lax.while_loop(is_running, iterate, (jnp.zeros_like(b), b, 0))[0]


def norm_carried(a, b):
    def is_running(state):
        _, _, rr, i = state
        return (rr > 1e-6) & (i < 100)

    def iterate(state):
        x, r, rr, i = state
        step = rr / jnp.vdot(r, a * r)
        x, r = x + step * r, r - step * a * r
        return x, r, jnp.vdot(r, r), i + 1

    return lax.while_loop(is_running, iterate, (jnp.zeros_like(b), b, jnp.vdot(b, b), 0))[0]


def all_in_condition(x, n):
    def is_running(state):
        return (state[1] < 64) & ~jnp.all(state[0] > 3)

    return lax.while_loop(is_running, lambda state: (state[0] * 1.1 + n, state[1] + 1), (x, 0))[0]


def all_after_several_iterations(x, n):
    def is_running(state):
        return (state[1] < 64) & ~jnp.all(state[0] > 3)

    def several(state):
        return lax.fori_loop(0, 8, lambda i, s: (s[0] * 1.1 + n, s[1] + 1), state)

    return lax.while_loop(is_running, several, (x, 0))[0]


def around(inner):
    """A loop whose condition tests what no inner loop computes."""

    def run(x, n):
        def body(state):
            return inner(state[0], n), state[1] + jnp.where(n > 50, 0.01, 0.02)

        return lax.while_loop(lambda s: jnp.any(s[1] < 1), body, (x, jnp.zeros_like(n)))[0]

    return run


def solver(function):
    return sharded('n@data', 'n@data', out='n@data', mesh=MESH)(function)


def test_norm_in_the_condition_of_a_loop():
    (note,) = latency_notes(solver(norm_in_condition), f32(4096), f32(4096))
    assert note.kind == 'collective in a condition'
    assert 'needs an all-reduce of f32[] along data before each iteration' in note.text
    assert 'at least 1 us each time by the latency of TPU v5e' in note.text
    assert note.source.endswith(line_of(norm_in_condition, 'jnp.sqrt'))
    assert note.bytes == 7  # 4 B to 7 of 8 devices, in two rounds
    assert not note.suggestion


def test_both_ways_out_of_a_condition():
    """What the note says to do instead leaves no note, and gives the same values."""
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(1, 2, 4096).astype('f4') for _ in range(2))
    carried = solver(norm_carried)
    assert latency_notes(carried, f32(4096), f32(4096)) == []
    np.testing.assert_allclose(carried(a, b), solver(norm_in_condition)(a, b), rtol=1e-5)

    tested = sharded('n@data', None, out='n@data', mesh=MESH)(all_in_condition)
    seldom = sharded('n@data', None, out='n@data', mesh=MESH)(all_after_several_iterations)
    (note,) = latency_notes(tested, f32(64), f32())
    assert 'all-reduce of pred[] along data' in note.text
    assert 'jax.lax.fori_loop in the body' in note.text
    assert latency_notes(seldom, f32(64), f32()) == []
    assert (np.asarray(seldom(np.ones(64, 'f4'), np.float32(0))) > 3).all()


@pytest.mark.parametrize(
    'inner',
    [
        lambda y, k: y * 0.9 + k,
        lambda y, k: lax.fori_loop(0, 50, lambda i, z: z * 0.9 + k, y),
        lambda y, k: lax.scan(lambda z, _: (z * 0.9 + k, None), y, None, length=5)[0],
        lambda y, k: lax.cond(True, lambda: y * 0.9 + k, lambda: y),
    ],
    ids=['no loop', 'fori_loop', 'scan', 'cond'],
)
def test_a_condition_around_another_loop(inner):
    """The inner loop does not compute what the condition tests."""
    (note,) = latency_notes(solver(around(inner)), f32(4096), f32(4096))
    assert note.kind == 'collective in a condition'


@pytest.mark.parametrize('chip', [dataclasses.replace(SLOW, latency=None), SLOW, None])
def test_without_a_latency_or_with_a_small_share(chip):
    """SLOW needs 1 ms for the arrays of an iteration; CPUs and some chips have no latency."""
    large = f32(2**22)
    assert latency_notes(solver(norm_in_condition), large, large, chip=chip) == []


# --- many small collectives -----------------------------------------------------------------------


def metric_of_each_layer(weights, x):
    def layer(x, w):
        x = jnp.tanh(x @ w)
        return x, jnp.mean(jnp.abs(x))

    return lax.scan(layer, x, weights)


def metric_after_the_loop(weights, x):
    def layer(x, w):
        x = jnp.tanh(x @ w)
        return x, jnp.mean(jnp.abs(x), 1)

    x, metrics = lax.scan(layer, x, weights)
    return x, metrics.mean(1)


def modified_gram_schmidt(v, x):
    return lax.fori_loop(0, 32, lambda j, x: x - jnp.vdot(v[j], x) * v[j], x)


def classical_gram_schmidt(v, x):
    return x - (v @ x) @ v


def statistics_of_each_layer(gains, x):
    scales = []
    for gain in gains:
        x = jnp.tanh(x * gain)
        scales.append(lax.pmean(jnp.mean(jnp.abs(x)), 'data'))
        x = x / scales[-1]
    return scales


def statistics_of_each_shard(gains, x):
    scales = []
    for gain in gains:
        x = jnp.tanh(x * gain)
        scales.append(jnp.mean(jnp.abs(x)))
        x = x / scales[-1]
    return list(lax.pmean(jnp.stack(scales), 'data'))


LAYERS = (f32(24, 64, 64), f32(128, 64))
in_loop = sharded('l d f', 'b@data d', out=('b@data d', 'l'), mesh=MESH)
rows = sharded('i n@data', 'n@data', out='n@data', mesh=MESH)
each = per_device('...', 'b@data d', out='...', mesh=MESH)
GAINS = ([f32(64)] * 20, f32(128, 64))
# {name: (with the mistake, without it, arguments, times, what the note says, what its line says)}
MANY = {
    'loop': (
        in_loop(metric_of_each_layer),
        in_loop(metric_after_the_loop),
        LAYERS,
        '24 us',
        '24 all-reduces of at most 4 B along data run in a loop, whose iterations do not need them',
        'return x, jnp.mean(jnp.abs(x))',
    ),
    'rows': (
        rows(modified_gram_schmidt),
        rows(classical_gram_schmidt),
        (f32(32, 4096), f32(4096)),
        '32 us',
        '32 all-reduces of at most 4 B along data run in a loop over the rows of an array',
        'jnp.vdot',
    ),
    'chain': (
        each(statistics_of_each_layer),
        each(statistics_of_each_shard),
        GAINS,
        '20 us',
        '20 all-reduces of at most 4 B along data run one after another',
        'lax.pmean',
    ),
}


@pytest.mark.parametrize('name', MANY)
def test_many_small_collectives_and_the_way_out(name):
    bad, good, args, time, text, line = MANY[name]
    (note,) = latency_notes(bad, *args)
    assert note.kind == 'many small collectives'
    assert text in note.text
    assert f'at least {time} by the latency of TPU v5e' in note.text
    function = {
        'loop': metric_of_each_layer,
        'rows': modified_gram_schmidt,
        'chain': statistics_of_each_layer,
    }[name]
    assert note.source.endswith(line_of(function, line))
    assert latency_notes(good, *args) == []


def test_values_of_the_ways_out():
    rng = np.random.default_rng(0)
    weights, x = (rng.normal(0, 0.1, a.shape).astype('f4') for a in LAYERS)
    for one, other in zip(MANY['loop'][0](weights, x), MANY['loop'][1](weights, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    v, _ = np.linalg.qr(rng.normal(size=(4096, 32)))
    v, x = v.T.astype('f4'), rng.normal(size=4096).astype('f4')
    np.testing.assert_allclose(MANY['rows'][0](v, x), MANY['rows'][1](v, x), rtol=1e-3, atol=1e-4)


def test_reductions_that_xla_merges():
    @per_device('...', out='...', mesh=MESH)
    def norms(leaves):
        return [lax.psum(jnp.vdot(leaf, leaf), 'data') for leaf in leaves]

    report = explain(norms, [f32(16)] * 200, chip='TPU v5e', tries=0)
    assert len(report.collectives) == 1
    assert latency_notes(norms, [f32(16)] * 200) == []


def power_iteration(a, x):
    def iterate(i, x):
        y = a * x
        return y / jnp.sqrt(jnp.sum(y * y))

    return lax.fori_loop(0, 100, iterate, x)


def clipped_steps(batches, w):
    """Each step clips by the norm of all gradients, next to the all-reduce of the gradients."""

    def step(w, batch):
        g = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - g / jnp.maximum(1, jnp.sqrt(jnp.sum(g * g))), None

    return lax.scan(step, w, batches)[0]


def tensor_parallel(weights, x):
    """A norm of each token for two large all-reduces of a layer."""
    for up, down in weights:
        x = einshard(x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)), 't d -> t d')
        h = jnp.tanh(einshard(x @ up, 't f@data'))
        x = x + einshard(h @ down, 't d -> t d')
    return x


def batch_norm(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
        x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return x


TENSOR = ([(f32(64, 256), f32(256, 64))] * 20, f32(1, 64))
WITHOUT = {
    'power iteration': (rows(lambda v, x: power_iteration(v[0], x)), (f32(1, 64), f32(64))),
    'clipped steps': (
        sharded('s b d@data', 'd@data f', out='d@data f', mesh=MESH)(clipped_steps),
        (f32(100, 8, 64), f32(64, 8)),
    ),
    'tensor parallel': (
        sharded([('d f@data', 'f@data d')] * 20, 't d', out='t d', mesh=MESH)(tensor_parallel),
        TENSOR,
    ),
    'batch norm': (
        sharded(['d f'] * 20, 'b@data d', out='b@data d', mesh=MESH)(batch_norm),
        ([f32(64, 64)] * 20, f32(128, 64)),
    ),
    'few': (
        each(statistics_of_each_layer),
        ([f32(64)] * 10, f32(128, 64)),
    ),
}


@pytest.mark.parametrize('name', WITHOUT)
def test_programs_that_need_their_collectives(name):
    function, args = WITHOUT[name]
    assert explain(function, *args, chip='TPU v5e').collectives
    assert latency_notes(function, *args) == []


def test_a_note_remains_after_the_search():
    (note,) = [
        note
        for note in explain(MANY['chain'][0], *GAINS, chip='TPU v5e', tries=1).notes
        if note.kind in KINDS
    ]
    assert re.search('instead, stack the values and reduce them once', note.text)
