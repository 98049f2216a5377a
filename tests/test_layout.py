"""Which device holds which shard: expressions against numpy, and against each other."""

import math
import sys
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import EinshardError, make_sharding

# private: layouts of more devices than JAX can simulate here
from einshard._notation.counts import prime_factors
from einshard._notation.expression import parse
from einshard._notation.layout import Layout, Split, lay_out

pytestmark = oracle.ANY_SPACING

ROOT = Path(__file__).parent.parent


def index_map(expression, shape, devices, mesh=None):
    mesh = devices if mesh is None else mesh
    sharding = make_sharding(expression, ndim=len(shape), mesh=mesh)
    return oracle.of_sharding(sharding, devices, shape)


# ------------------------------------------------------------- against the numpy implementation


def test_shards_agree_with_numpy():
    seen = set()

    @oracle.examples(300)
    @given(case=oracle.cases())
    def holds(case):
        devices = jax.devices()[: case.n_devices]
        assert index_map(case.text, case.shape, devices) == case.index_map()
        axes = [term.axis for term in case.right if term.axis]
        seen.update(
            {
                ('devices', case.n_devices),
                ('rank', case.n_dims),
                ('stars', sum(term.star for term in case.right)),
                ('replicas', sum(term.axis is None for term in case.right)),
                ('short', '->' not in case.text),
                ('again', len(set(axes)) < len(axes)),
                ('ellipsis', '...' in axes),
                ('permuted', axes != sorted(axes, key=case.left.index)),
                ('latin', case.text.isascii()),
            }
        )

    holds()
    # the generator must reach every kind of expression
    assert seen >= {('devices', n) for n in oracle.DEVICE_COUNTS}
    assert seen >= {('rank', n) for n in range(6)}
    assert seen >= {('stars', n) for n in range(5)}
    assert seen >= {('replicas', n) for n in range(4)}
    for switch in ('short', 'again', 'ellipsis', 'permuted', 'latin'):
        assert seen >= {(switch, True), (switch, False)}


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
@oracle.examples(120)
@given(case=oracle.mesh_cases())
def test_shards_on_a_named_mesh_agree_with_numpy(types, case):
    mesh = mesh_of(types=types, **dict(case.mesh))
    if oracle.expressible(case):
        found = index_map(case.text, case.shape, list(mesh.devices.flat), mesh)
        assert found == case.index_map()
    else:
        with pytest.raises(EinshardError, match='do not match the mesh axes'):
            make_sharding(case.text, ndim=case.n_dims, mesh=mesh)


def test_shards_on_64_devices_agree_with_numpy():
    collected = []

    @oracle.examples(60)
    @given(case=oracle.cases(device_counts=(64,)))
    def collect(case):
        collected.append(case)

    collect()
    questions = [(case.text, case.shape) for case in collected]
    questions.append(('a b c -> a* b* c*', (4, 8, 12)))
    answers = oracle.answers_of(sys.executable, 64, questions, cwd=str(ROOT))
    cube = np.arange(64).reshape(4, 4, 4)
    for device, (a, b, c) in answers.pop().items():
        part = (a.start, b.start // 2, c.start // 3)
        assert cube[part] == device
    for case, answer in zip(collected, answers, strict=True):
        assert answer == case.index_map(), case


# ------------------------------------------------------------------- the examples of the notation


@pytest.mark.parametrize(
    ('expression', 'n', 'grid'),
    [
        ('a b -> 2 a2 b4', 16, [(None, 2), ('a', 2), ('b', 4)]),
        ('a b -> * a2 b', 16, [(None, 8), ('a', 2)]),
        ('a b -> 2 a2* b*', 16, [(None, 2), ('a', 4), ('b', 2)]),
        ('a b -> a2* b*', 8, [('a', 4), ('b', 2)]),
        ('a b -> * a* b2*', 16, [(None, 2), ('a', 2), ('b', 4)]),
        ('a b -> b2 a4', 8, [('b', 2), ('a', 4)]),
        ('i o -> i2 o4 i2', 16, [('i', 2), ('o', 4), ('i', 2)]),
        ('x y -> x y*', 8, [('y', 8)]),
        ('b x -> b4 x 2', 8, [('b', 4), (None, 2)]),
        ('x y -> 4 x y2', 8, [(None, 4), ('y', 2)]),
        ('a b c -> a* b* c*', 64, [('a', 4), ('b', 4), ('c', 4)]),
        ('a b c d -> a* b* c* d*', 16, [('a', 2), ('b', 2), ('c', 2), ('d', 2)]),
        ('a b -> 3* a5* b', 60, [(None, 6), ('a', 10)]),
        ('a -> a*', 9216, [('a', 9216)]),
        ('a b c -> a* b* c*', 10**6, [('a', 100), ('b', 100), ('c', 100)]),
        ('-> *', 8, [(None, 8)]),
        ('a -> a', 1, []),
        ('a b -> a* b*', 1, []),
        ('a b -> 1 a1 b8 1*', 8, [('b', 8)]),
    ],
)
def test_grids(expression, n, grid):
    parsed = parse(expression)
    splits = tuple(
        Split(count, None if name is None else parsed.names.index(name)) for name, count in grid
    )
    assert lay_out(parsed, len(parsed.names), n) == Layout(splits)


def test_layouts_distinguish_terms_of_a_sum_from_replicas():
    layout = lay_out(parse('b d -> b2 2 +2 d'), 2, 8)
    assert layout.splits == (Split(2, 0), Split(2, None), Split(2, None, sign='+'))
    assert layout != lay_out(parse('b d -> b2 4 d'), 2, 8)


# ------------------------------------------------------------------ expressions that must agree

AGREE = [
    # (devices, rank, spellings)
    (8, 2, ['a b -> a8 b', 'a b -> a* b', 'a* b', 'a8 b', 'a b->a* b', 'a ... -> a* ...', 'a* ...',
            'batch d -> batch* d', 'b a -> b* a', 'a b -> b a8', 'a b -> b1 a*', 'a b -> a2 a4 b',
            'a b -> a2 b a4', 'a b -> a2* a* b', ' a\tb\n-> a2 1 a2 1 a2 b ', 'a* b1', '1 a* b',
            'é b -> e\u0301* b', '行 列 -> 行* 列', 'a b ... -> a* ... b', '... a b -> a* b ...']),
    (8, 2, ['a b -> a4 2 b', 'a4 2 b', 'a b -> b a4 *', 'a* 2 b', 'a b -> a4 b 2',
            'a ... -> a4 2 ...', 'a b -> a4 2 b1']),
    (8, 2, ['a b -> 8 a b', '* ...', '8 a b', '2 4 ...', '... -> * ...', '* * 2 ...',
            'a b -> a 2 b 4', '2* ...', '... *', '4 ... *', 'a b -> b a *', 'a b -> 2 2 2 a b']),
    (8, 2, ['a b -> b2 a4', 'a b -> b2 a*', 'a b -> b* a2*', 'x y -> y2 x4', 'a b -> b2 a2 a2']),
    (8, 2, ['a b -> 2 a2 b2', 'a b -> * a2 b2', '2 a2 b2', '* a* b*', 'a b -> 2 a* b*', '* a2 b2']),
    (8, 3, ['a b c -> a* b* c*', 'a2 b2 c2', 'a b c -> a2 b* c2', 'a2* b2* c2*']),
    (12, 2, ['a b -> a3 b4', 'a3 b*', 'a3* b4*', 'a b -> a3 b2 b2', 'a b -> a3 b* b*']),
    (12, 2, ['a b -> a4 b3', 'a4 b*', 'a* b3', 'a b -> a2 a2 b3']),
    (16, 2, ['i o -> i2 o4 i2', 'i o -> i2 o2 o2 i2', 'i o -> i2 o* i2', 'a b -> a* b2* a*']),
    (16, 4, ['a ... d -> 4 a2 ... d2', 'a b c d -> 4 a2 b c d2', 'a b c d -> * a2 d2 b c',
             '4 a2 ... d2', 'a b ... d -> 4 a2 b d2 ...']),
    (6, 0, ['-> *', '-> 6', '... -> * ...', '* ...', '*', '6', '2 3', '-> 3 2', '... 2 *']),
    (1, 2, ['a b -> a b', 'a b', 'a* b*', 'a1 b', '1 a b', '* ...', '...', 'a b -> b a', 'b a']),
]  # fmt: skip


@pytest.mark.parametrize(('n', 'n_dims', 'spellings'), AGREE)
def test_equivalent_expressions(n, n_dims, spellings):
    devices = jax.devices()[:n]
    shardings = [make_sharding(text, ndim=n_dims, mesh=devices) for text in spellings]
    for spelling, sharding in zip(spellings, shardings, strict=True):
        assert sharding == shardings[0], spelling
        assert hash(sharding) == hash(shardings[0]), spelling
        assert sharding.spec == shardings[0].spec, spelling


def test_lists_of_equivalent_expressions_differ():
    by_devices = {}
    for n, n_dims, spellings in AGREE:
        sharding = make_sharding(spellings[0], ndim=n_dims, mesh=jax.devices()[:n])
        assert sharding not in by_devices.setdefault((n, n_dims), set())
        by_devices[n, n_dims].add(sharding)


DATA_TP, DATA_FSDP_TP = {'data': 4, 'tp': 2}, {'data': 2, 'fsdp': 2, 'tp': 4}
ON_NAMED_MESHES = [
    (DATA_TP, P('data', 'tp'),
     ['b d -> b@data d@tp', 'b@data d@tp', 'b d -> d@tp b@data', 'b d -> b* d@tp', 'b4 d2',
      'b d -> d@tp b*', 'b d -> b@data d*', 'b@data d2', 'b4 d*', 'b* d2', 'b d -> b2 b2 d2',
      'b d -> b@( data ) d@tp']),
    (DATA_TP, P('data'),
     ['b d -> b@data d', 'b@data d', 'b@data ...', 'b@data d 2', 'b@data * d', 'b4 2 d',
      'b d -> d b4 *', 'b@data 2 d 1']),
    # splits of an axis are in the order written, major first
    (DATA_TP, P(('data', 'tp')), ['b d -> b4 d b@tp', 'b@(data,tp) d', 'b8 d']),
    (DATA_TP, P(('tp', 'data')), ['b d -> b@tp d b4', 'b@(tp,data) d']),
    (DATA_FSDP_TP, P(('data', 'fsdp'), 'tp'),
     ['b d -> b@(data,fsdp) d@tp', 'b d -> b@(data, fsdp) d@tp', 'b4 d4', 'b* d*', 'b* d@tp',
      'b d -> b@data b@fsdp d@tp', 'b d -> b2 b2 d*', 'b@(data,fsdp) d*']),
    (DATA_FSDP_TP, P(None, 'fsdp', ('tp', 'data')),
     ['a b c -> a b@fsdp c@(tp,data)', '... b c -> ... b@fsdp c@(tp,data)',
      'a b c -> c@(tp,data) b@fsdp a', 'a b c -> b* c@(tp,data) a', 'a b2 c@(tp,data)']),
    ({'one': 1, 'x': 8}, P('x'), ['a b -> a@x b', 'a8 b', 'a* b', 'a* ...', 'a b -> a2 a4 b']),
]  # fmt: skip


@pytest.mark.parametrize(('sizes', 'spec', 'spellings'), ON_NAMED_MESHES)
def test_equivalent_expressions_on_a_named_mesh(sizes, spec, spellings):
    expected = NamedSharding(mesh_of(**sizes), spec)
    for spelling in spellings:
        sharding = make_sharding(spelling, ndim=max(2, len(spec)), mesh=expected.mesh)
        assert sharding == expected, spelling
        assert hash(sharding) == hash(expected), spelling


@oracle.examples(100)
@given(case=oracle.cases())
def test_stars_agree_with_explicit_counts(case):
    devices = jax.devices()[: case.n_devices]
    counts = oracle.solve(case.right, case.n_devices)
    terms = [
        str(oracle.Term(term.axis, None if term.axis == '...' else count))
        for term, count in zip(case.right, counts, strict=True)
    ]
    plain = f'{" ".join(case.left)} -> {" ".join(terms)}'
    written, counted = (
        make_sharding(text, ndim=case.n_dims, mesh=devices) for text in (case.text, plain)
    )
    assert written == counted
    assert hash(written) == hash(counted)


# ------------------------------------------------------------------------------ factors and ranks


@pytest.mark.parametrize('n', [*range(1, 65), 97, 1024, 9216, 10**6])
def test_prime_factors(n):
    factors = prime_factors(n)
    assert math.prod(factors) == n
    assert list(factors) == sorted(factors, reverse=True)
    assert all(all(p % d for d in range(2, p)) for p in factors)


def test_ndim_is_only_needed_after_an_ellipsis(devices8):
    first, again = (make_sharding('a ... -> a* ...', ndim=n, mesh=devices8) for n in (None, 5))
    assert first.spec == again.spec
    assert make_sharding('a ... b -> a* ... b', mesh=devices8).spec[0] is not None
    with pytest.raises(EinshardError, match='depends on ndim'):
        make_sharding('... b -> ... b*', mesh=devices8)
