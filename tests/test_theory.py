"""parallelism against the compiler: the same placements, collectives and bytes."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo.programs import partitioner
from hlo.read import collectives_of
from jax.sharding import AxisType
from placed import mesh_of, struct
from refusal import refusal

from einshard import einshard, make_sharding, parallelism, sharded

EINSUMS = [
    'b x, x y -> b y',  # a layer
    'n a b, n b c -> n a c',  # batched
    'a, b -> a b',  # outer
    'x, x ->',  # inner
    'b h s k, b h t k -> b h s t',  # attention: scores
    'b h s t, b h t k -> b h s k',  # values
    'a x y, x y b -> a b',  # two contracted axes
    'a b, a b -> a b',
    'a b -> b a',
    'a b -> a',
]
# an operand is summed before it is multiplied
SUMMED_FIRST = ['a b, b c -> c', 'a b c, a c d -> b']
SIZE = 16  # of every axis


def assignments(names, n_devices):
    """All ways to split the devices among the axes: {name: count}."""
    counts = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
    for chosen in itertools.product(counts, repeat=len(names)):
        if math.prod(chosen) == n_devices:
            yield dict(zip(names, chosen, strict=True))


def axes_of(einsum):
    """The axes of each operand, those of the result, and all, of an einsum of single letters."""
    operands, _, result = einsum.partition('->')
    names = dict.fromkeys(operands.replace(',', '').split())
    return [operand.split() for operand in operands.split(',')], result.split(), [*names]


def compiled(einsum, placements, devices, out=None, sizes=None):
    operands, _, names = axes_of(einsum)
    sizes = sizes or dict.fromkeys(names, SIZE)
    shapes = [
        einshard(struct(*(sizes[name] for name in operand)), placement, mesh=devices)
        for operand, placement in zip(operands, placements, strict=True)
    ]
    out = None if out is None else make_sharding(out, mesh=devices)
    subscripts = einsum.replace(' ', '')
    program = jax.jit(lambda *xs: jnp.einsum(subscripts, *xs), out_shardings=out)
    return program.lower(*shapes).compile()


def total(collectives):
    """The product of group sizes by kind and bytes: XLA may reduce axis by axis, or at once."""
    sizes = {}
    for c in collectives:
        sizes[c.kind, c.bytes] = sizes.get((c.kind, c.bytes), 1) * c.group_size
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize('einsum', [*EINSUMS, *SUMMED_FIRST])
def test_the_compiler_does_the_first_choice(einsum, devices8):
    _, result, names = axes_of(einsum)
    for counts in assignments(names, 8 if len(names) < 4 else 4):
        theory = parallelism(einsum, sizes=dict.fromkeys(names, SIZE), **counts)
        devices = devices8[: math.prod(counts.values())]
        program = compiled(einsum, theory.operands, devices)
        assert total(collectives_of(program)) == total(theory.collectives), (counts, str(theory))
        expected = make_sharding(theory.result, mesh=devices)
        assert program.output_shardings.is_equivalent_to(expected, len(result)), counts


@pytest.mark.slow
@pytest.mark.parametrize('einsum', EINSUMS)
def test_a_sum_whose_result_is_sharded(einsum, devices8):
    """A reduce-scatter in theory; XLA for CPU all-reduces, and each device keeps its part.

    If the result is sharded along an axis of both operands, XLA also gathers it over that axis
    before it shards it again.
    """
    operands, _, names = axes_of(einsum)
    for counts in assignments(names, 4):
        theory = parallelism(einsum, sizes=dict.fromkeys(names, SIZE), **counts)
        all_reduced = total(theory.collectives)
        for choice in theory.choices[1:]:
            program = compiled(einsum, theory.operands, devices8[:4], out=choice.result)
            found, scattered = total(collectives_of(program)), total(choice.collectives)
            assert {kind for kind, _ in scattered} == {'reduce-scatter'}
            if found in (scattered, all_reduced):
                continue
            along = next(n for n in names if n in choice.result and counts[n] > 1)
            assert all(along in operand for operand in operands)
            rest = {key: n for key, n in found.items() if key[0] != 'all-gather'}
            assert rest != found
            assert rest == all_reduced, (counts, str(choice), found)


@pytest.mark.parametrize('left', ['8 b x', 'b8 x', 'b x8'])
@pytest.mark.parametrize('right', ['8 x y', 'x8 y', 'x y8'])
def test_operands_that_are_sharded_independently(left, right, devices8):
    theory = parallelism(f'{left}, {right} -> b y', sizes={'b': 16, 'x': 16, 'y': 16})
    found = total(collectives_of(compiled('b x, x y -> b y', [left, right], devices8)))
    assert found in [total(choice.collectives) for choice in theory.choices]
    matching = [('8 b x', '8 x y'), ('b8 x', '8 x y'), ('8 b x', 'x y8'), ('b x8', 'x8 y')]
    fits = (left, right) in matching
    assert (theory.kind == 'resharding') != fits
    assert bool(theory.conflicts) != fits


SAME_DEVICES = (
    "'x' of operand 0 and 'y' of operand 1 are sharded over the same devices, so for some blocks "
    'of the product no device has both inputs'
)


@pytest.mark.parametrize(
    ('operands', 'conflict'),
    [
        ('b x8, x y8', SAME_DEVICES),
        ('b x@(p,q), x y@q', SAME_DEVICES),
        ('b x8, 8 x y', "'x' is sharded in operand 0 but not in operand 1"),
        ('b x@(p,q), x@(q,p) y', "'x' is sharded differently in operand 0 and operand 1"),
    ],
)
def test_a_conflict_is_reported_once(operands, conflict):
    counts = {'p': 2, 'q': 4} if '@' in operands else {}
    assert parallelism(f'{operands} -> b y', **counts).conflicts == (conflict,)


@pytest.mark.parametrize('i', [8, 64])
@pytest.mark.parametrize(('j', 'k'), [(16, 64), (64, 64), (64, 16), (128, 64)])
def test_the_compiler_does_not_always_do_the_first_choice(i, j, k, devices8):
    """The compiler sums if the result is smaller than operand 0; else it gathers operand 0."""
    sizes = {'i': i, 'j': j, 'k': k}
    theory = parallelism('i j8, 8 j k -> i k', sizes=sizes)
    first, *_, last = theory.choices
    assert [c.kind for c in first.collectives] == ['all-reduce']
    assert [(c.kind, c.of) for c in last.collectives] == [('all-gather', 'operand 0')]
    program = compiled('i j, j k -> i k', ['i j8', '8 j k'], devices8, sizes=sizes)
    expected = first if k < j else last
    assert total(collectives_of(program)) == total(expected.collectives)


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [(16, 128, 64), (128, 16, 64)], ids=str)
def test_the_compiler_reshards_operands_for_the_result(sizes, devices8):
    sizes = dict(zip('bxy', sizes, strict=True))

    def placements(left, right):
        return f'8 {left} {right}', f'{left}8 {right}', f'{left} {right}8'

    every = [placements(*names) for names in ('bx', 'xy', 'by')]
    for left, right, out in itertools.product(*every):
        theory = parallelism(f'{left}, {right} -> {out}', sizes=sizes)
        program = compiled('b x, x y -> b y', [left, right], devices8, out=out, sizes=sizes)
        found = total(collectives_of(program))
        if (left, right) == ('b x8', 'x8 y') and out != '8 b y':
            assert {kind for kind, _ in found} == {'all-reduce'}  # no reduce-scatter on CPU
        else:
            assert found in [total(choice.collectives) for choice in theory.choices]


def test_an_operand_moved_to_match_the_result():
    theory = parallelism('b x8, 8 x y -> b8 y', sizes={'b': 64, 'x': 64, 'y': 64})
    cheapest = min(theory.choices, key=lambda choice: choice.bytes)
    assert cheapest.bytes == 2048
    assert [(c.kind, c.of) for c in cheapest.collectives] == [('all-to-all', 'operand 0')]
    # the first sends least, the others are those of other shardings of the operands
    assert theory.collectives[0].bytes == 2048
    assert max(choice.bytes for choice in theory.choices) == 16384
    # in the order that the result has
    turned = parallelism('b x@(p,q), * x y -> b@(q,p) y', p=2, q=4)
    assert turned.result == 'b y -> b@(q,p) y'
    assert [c.kind for c in turned.collectives] == ['collective-permute', 'all-to-all']


def test_choices_that_the_sizes_do_not_divide_are_left_out():
    options = {'u': 2, 'v': 2, 'sizes': {'b': 4, 'x': 2, 'y': 8}}
    for result in ('b y', 'b@u y', 'b y@(v,u)'):
        choices = parallelism(f'b x@v, x@u y -> {result}', **options).choices
        assert choices
        assert not any('x/4' in choice.block for choice in choices)


# ------------------------------------------------------------------- without the compiler

LAYER = 'b x, x y -> b y'


# einsum, counts, the kind, and the placements of the operands
PLACEMENTS = [
    (LAYER, {}, 'replicated', '1 b x', '1 x y'),
    (LAYER, {'devices': 4}, 'replicated', '4 b x', '4 x y'),
    (LAYER, {'x': 1}, 'replicated', '1 b x', '1 x y'),
    (LAYER, {'b': 8}, 'data parallelism', 'b8 x', '8 x y'),
    (LAYER, {'y': 8}, 'data parallelism', '8 b x', 'x y8'),
    (LAYER, {'b': 2, 'y': 4}, 'data parallelism', 'b2 4 x', '2 x y4'),
    (LAYER, {'x': 8}, 'tensor parallelism', 'b x8', 'x8 y'),
    # in the order of the keywords
    (LAYER, {'b': 2, 'x': 4}, 'hybrid', 'b2 x4', '2 x4 y'),
    (LAYER, {'x': 4, 'b': 2}, 'hybrid', 'x4 b2', 'x4 y 2'),
    # devices that the counts or mesh axes leave hold replicas, or are taken by stars
    (LAYER, {'x': 4, 'devices': 8}, 'tensor parallelism', '2 b x4', '2 x4 y'),
    ('b@p x, x y -> b y', {'p': 2, 'devices': 16}, 'data parallelism', '8 b2 x', '16 x y'),
    ('b@p x*, x* y -> b y', {'p': 2, 'devices': 16}, 'resharding', 'x8 b2', 'x16 y'),
    ('b@d0 x, x y -> b y', {'d0': 2, 'devices': 16}, 'data parallelism', '8 b2 x', '16 x y'),
]


@pytest.mark.parametrize(('einsum', 'counts', 'kind', 'b_x', 'x_y'), PLACEMENTS)
def test_kinds_and_placements(einsum, counts, kind, b_x, x_y):
    theory = parallelism(einsum, **counts)
    n = counts.get('devices', math.prod(counts.values()))
    assert theory.kind == kind
    assert math.prod(theory.devices.values()) == n
    devices = jax.devices()[:n]
    for ours, expected in zip(theory.operands, (f'b x -> {b_x}', f'x y -> {x_y}'), strict=True):
        assert make_sharding(ours, mesh=devices) == make_sharding(expected, mesh=devices)


# einsum with placements, the result's, and the collectives of the first choice
RESULTS = [
    ('b x8, x8 y -> 8 b y', 'b y -> 8 b y', ['all-reduce']),
    ('b x8, x8 y -> b8 y', 'b y -> b8 y', ['reduce-scatter']),
    ('b8 x, 8 x y -> 8 b y', 'b y -> 8 b y', ['all-gather']),
    ('b8 x, 8 x y -> b y8', 'b y -> b y8', ['all-gather']),
    ('8 b x, 8 x y -> b y8', 'b y -> b y8', []),
    ('b x8, 8 x y -> b8 y', 'b y -> b8 y', ['all-to-all']),
    ('b2 x4, 2 x4 y -> b y2 4', 'b y -> b y2 4', ['all-gather', 'all-reduce']),
]


@pytest.mark.parametrize(('einsum', 'result', 'kinds'), RESULTS)
def test_a_result_as_the_einsum_places_it(einsum, result, kinds, devices8):
    theory = parallelism(einsum, sizes=dict.fromkeys('bxy', SIZE))
    assert (theory.result, [c.kind for c in theory.collectives]) == (result, kinds)
    assert [c.kind for c in parallelism(einsum).collectives] == kinds
    operands, out = einsum.split(' -> ')
    program = compiled('b x, x y -> b y', operands.split(', '), devices8, out=out)
    found = total(collectives_of(program))
    if 'reduce-scatter' in kinds:  # the CPU has none
        assert {kind for kind, _ in found} == {'all-reduce'}
    else:
        assert found == total(theory.collectives)


def test_groups_of_collectives():
    theory = parallelism('b@data x@tp, x@tp y -> b@data y', data=2, tp=4)
    assert theory.kind == 'hybrid'
    (only,) = theory.collectives
    assert (only.kind, only.over, only.group_size, only.groups) == ('all-reduce', ('tp',), 4, 2)
    (only,) = parallelism(LAYER, x=4, devices=8).collectives
    assert (only.group_size, only.groups) == (4, 2)
    assert parallelism('b@data x, x y -> b@data y', data=8).collectives == ()


def test_devices_of_named_axes_and_of_chains():
    assert parallelism('b@p x, x y -> b y', p=2, devices=2).devices == {'p': 2}
    # in a chain, counts may be those of another step
    chain = parallelism(['b@p x, x y -> b y', 'b y, y z -> b z'], p=2, z=4)
    assert [math.prod(step.devices.values()) for step in chain] == [8, 8]


def test_bytes_without_sizes():
    theory = parallelism(LAYER, x=8)
    assert theory.choices[0].bytes is None
    assert theory.collectives[0].block == 'b y'
    assert theory.choices[0].block == '[b x/8] [x/8 y]'


# ---------------------------------------------------------------------------------------- chains


def arguments(placements, ndim, devices):
    return [einshard(struct(*[SIZE] * ndim), placement, mesh=devices) for placement in placements]


def test_a_chain_has_the_collectives_of_a_compiled_mlp(devices8):
    steps = ['b x, x y -> b y', 'b y, y z -> b z']
    sizes = dict.fromkeys('bxyz', SIZE)
    for counts in assignments('bxyz', 8):
        theory = parallelism(steps, sizes=sizes, **counts)
        shapes = arguments([*theory[0].operands, theory[1].operands[1]], 2, devices8)
        program = jax.jit(lambda x, v, w: jax.nn.relu(x @ v) @ w).lower(*shapes).compile()
        found, expected = (
            {(c.kind, c.bytes) for c in rows}
            for rows in (collectives_of(program), theory.collectives)
        )
        assert found == expected, (counts, str(theory))


def test_a_chain_has_the_collectives_of_compiled_attention(devices8):
    steps = [
        'b s d, d h k -> b s h k',
        'b t d, d h k -> b t h k',
        'b s h k, b t h k -> b h s t',
        'b h s t, b t h k -> b s h k',
        'b s h k, h k d -> b s d',
    ]
    theory = parallelism(steps, b=2, h=4, sizes=dict.fromkeys('bsthkd', SIZE))
    assert [step.kind for step in theory] == ['data parallelism'] * 4 + ['hybrid']

    def attention(x, q, k, v, o):
        q, k, v = (jnp.einsum('bsd,dhk->bshk', x, w) for w in (q, k, v))
        scores = jax.nn.softmax(jnp.einsum('bshk,bthk->bhst', q, k))
        return jnp.einsum('bshk,hkd->bsd', jnp.einsum('bhst,bthk->bshk', scores, v), o)

    weights = [theory[0].operands[1]] * 3 + [theory[4].operands[1]]
    shapes = arguments([theory[0].operands[0], *weights], 3, devices8)
    program = jax.jit(attention).lower(*shapes).compile()
    assert total(collectives_of(program)) == total(theory.collectives)
    assert make_sharding(theory[4].result, mesh=devices8).is_equivalent_to(
        program.output_shardings, 3
    )


def test_words():
    sizes = {'b': 8, 'x': 8, 'y': 8}
    assert (
        f'\n{parallelism("b2 x 2, 2 x2 y -> b y", sizes=sizes)}'
        == """
b x, x y -> b y   on 4 devices
  free: b, y; reduced: x
  resharding: the blocks do not match, so an operand must be resharded first
  'x' is sharded in operand 1 but not in operand 0
  operand 0: 'b x -> b2 x 2'
  operand 1: 'x y -> 2 x2 y'
  1. each device multiplies [b/2 x/2] [x/2 y]
     result 'b y -> b2 y 2'
     slice operand 0 along x (no communication)
     all-reduce of the result over d1: [b/2 y], 128 bytes, among 2 groups of 2 devices
  2. each device multiplies [b/2 x/2] [x/2 y]
     result 'b y -> b4 y'
     slice operand 0 along x (no communication)
     reduce-scatter of the result over d1: [b/2 y], 128 bytes, among 2 groups of 2 devices
  3. each device multiplies [b/2 x/2] [x/2 y]
     result 'b y -> b2 y2'
     slice operand 0 along x (no communication)
     reduce-scatter of the result over d1: [b/2 y], 128 bytes, among 2 groups of 2 devices
  4. each device multiplies [b/2 x] [x y]
     result 'b y -> b2 y 2'
     all-gather of operand 1 over d1: [x y], 256 bytes, among 2 groups of 2 devices"""
    )
    # a chain has a sum of its steps
    first, second, end = str(parallelism(['a, a ->', 'a, b -> a b'], a=4)).split('\n\n')
    assert 'only reduced axes are sharded: each device computes a partial sum' in first
    assert 'only free axes are sharded: each device computes its part of the result' in second
    assert end == '1 collective in all'


@pytest.mark.parametrize(
    ('before', 'after', 'n_bytes'),
    [
        ('a@d0 b', 'a b@d1', 4 * 16 * 16 // 4),  # gathered over d0 from parts of b
        ('a@d1 b', 'a b@d0', 4 * 16 * 16 // 2),
        ('a@d0 b', 'a b@(d1,d0)', 4 * 16 * 16 // 8),
        ('a@d1 b', 'a b@(d0,d1)', 4 * 16 * 16 // 8),
    ],
)
def test_the_compiler_also_slices_before_it_communicates(before, after, n_bytes):
    theory = parallelism(f'{before} -> {after}', d0=2, d1=4, sizes={'a': 16, 'b': 16})
    reshard = sharded(before, out=after, mesh=mesh_of(d0=2, d1=4))(lambda x: x + 1)
    found = collectives_of(reshard.lower(struct(16, 16)).compile())
    assert [c.bytes for c in theory.collectives] == [n_bytes]
    # the order of the parts of b may also need a permute
    without_permutes = [c for c in found if c.kind != 'collective-permute']
    assert total(without_permutes) == total(theory.collectives)


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_in_context_has_no_part(types):
    expected = str(parallelism(LAYER, b=2, x=4))
    seen = []

    @jax.jit
    def f(x):
        seen.append(str(parallelism(LAYER, b=2, x=4)))
        return x

    with jax.set_mesh(mesh_of(types=types, m0=4, b=2)):
        seen.append(str(parallelism(LAYER, b=2, x=4)))
        f(np.ones(8))
    assert seen == [expected] * 2


def test_without_shardy():
    with partitioner('gspmd'):
        error = refusal(parallelism, LAYER, b=2)
    assert error.sentence == "parallelism needs Shardy, XLA's propagation, which did not run"
    assert 'lowered for GSPMD' in str(error.facts['because'])


@pytest.mark.parametrize(
    ('before', 'after', 'kinds', 'block'),
    [
        ('a@d0 b', 'a@d0 b', [], None),
        ('* a b', 'a@d0 b', [], None),
        ('a@d0 b', 'a@(d0,d1) b', [], None),
        ('a@(d0,d1) b', 'a@d0 b', ['all-gather'], 'a/2 b'),
        ('a@d0 b', 'a b@d0', ['all-to-all'], 'a/2 b'),
        ('a@(d0,d1) b', 'a@(d1,d0) b', ['collective-permute'], 'a/8 b'),
        # an array is sharded further before it moves
        ('a@d0 b', 'a b@(d0,d1)', ['all-to-all'], 'a/8 b'),
        ('a@d1 b', 'a@(d0,d1) b', ['collective-permute'], 'a/8 b'),
    ],
)
def test_resharding(before, after, kinds, block):
    named = {axis: n for axis, n in (('d0', 2), ('d1', 4)) if axis in before + after}
    theory = parallelism(f'{before} -> {after}', devices=8, sizes={'a': 16, 'b': 16}, **named)
    assert [c.kind for c in theory.collectives] == kinds
    assert [c.block for c in theory.collectives][:1] == [block][: len(kinds)]
    reshard = sharded(before, out=after, mesh=mesh_of(d0=2, d1=4))(lambda x: x + 1)
    found = {c.kind for c in collectives_of(reshard.lower(struct(16, 16)).compile())}
    # the order of the parts of b may also need a permute
    assert found - {'collective-permute'} == {*kinds} - {'collective-permute'}
    assert found >= {*kinds}


@pytest.mark.parametrize(
    'options',
    [{'x': 0}, {'x': True}, {'x': '2'}, {'devices': -8}, {'devices': 2.0}, {'item_bytes': 0}],
)
def test_counts_are_positive_integers(options):
    assert 'must be a positive integer' in refusal(parallelism, LAYER, **options).sentence


@pytest.mark.parametrize('einsum', [LAYER, [LAYER]], ids=['einsum', 'chain'])
def test_numpy_integers_are_converted_for_json(einsum):
    def data(integer):
        sizes = dict.fromkeys('bxy', integer(16))
        options = {'devices': integer(8), 'item_bytes': integer(2), 'x': integer(4)}
        return json.dumps(parallelism(einsum, sizes=sizes, **options).to_dict())

    assert data(np.int64) == data(int)


@pytest.mark.parametrize(
    ('text', 'axis', 'fix'),
    [
        ('bx,xy->by', 'b', "'b x, x y -> b y'"),
        ('bx,xy->by', 'z', None),
        ('ij,ji', 'i', "'i j, j i ->'"),
        ('batch', 'b', None),
    ],
)
def test_letters_without_spaces(text, axis, fix):
    assert refusal(parallelism, text, **{axis: 2}).fix == fix
