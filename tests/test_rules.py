"""Rules: which rule a leaf gets, its sharding, and errors."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_rules import MESH_128, MODELS
from placed import mesh_of, on, shardings, struct
from refusal import refusal

from einshard import (
    Rules,
    clear_caches,
    device_mesh,
    einshard,
    for_optimizer,
    make_sharding,
    shard_largest,
    sharded,
    to_jax,
)

ROWS, COLUMNS, EVERYWHERE = 'i o -> i* o', 'i o -> i o*', '... -> * ...'
W, B = struct(16, 16), struct(16)
BY_HAND = mesh_of(d0=2, d1=2, d2=2, d3=2)
ALL = ('d0', 'd1', 'd2', 'd3')
MESH = mesh_of(data=2, fsdp=4, tp=2)


def spec_of(tree, rules, **options):
    """The PartitionSpec of the one leaf of a tree."""
    (leaf,) = jax.tree.leaves(einshard(tree, rules, **options))
    return leaf.sharding.spec


# ------------------------------------------------------------------------------- matching of paths


@pytest.mark.parametrize(
    ('pairs', 'expected'),
    [
        ([('kernel', ROWS), ('kernel', COLUMNS)], P(ALL)),
        ([('kernel', COLUMNS), ('kernel', ROWS)], P(None, ALL)),
        ([('bias', ROWS), ('kernel', COLUMNS)], P(None, ALL)),
        ([('', ROWS), ('kernel', COLUMNS)], P(ALL)),
        # search, not match: anywhere in the path, unless the pattern has anchors
        ([('^kernel', ROWS), ('ern', COLUMNS)], P(None, ALL)),
        ([('mlp$', ROWS), ('^layers/', COLUMNS)], P(None, ALL)),
        ([(r'layers/\d+/mlp/kernel$', ROWS), ('', COLUMNS)], P(ALL)),
        ([(r'layers/0/', ROWS), (r'layers/1/', COLUMNS)], P(None, ALL)),
        ([(r'layers\.1', ROWS), ("\\['", ROWS), ('kernel', COLUMNS)], P(None, ALL)),
        ([('KERNEL', ROWS), ('(?i)KERNEL', COLUMNS)], P(None, ALL)),
    ],
)
def test_the_first_rule_that_matches_wins(pairs, expected):
    tree = {'layers': [{}, {'mlp': {'kernel': W}}]}
    for rules in (pairs, tuple(pairs), map(list, pairs)):
        assert spec_of(tree, Rules(rules)) == expected


# ------------------------------------------------------------------------------- kinds of specs


@pytest.mark.parametrize(
    ('spec', 'expected'),
    [
        (ROWS, P(ALL)),
        ('i* o', P(ALL)),
        ('... o -> ... o*', P(None, ALL)),
        ('i o -> 4 i o4', P(None, ('d2', 'd3'))),
        (EVERYWHERE, P()),
        ('i o -> i@d1 o@(d0,d3)', P('d1', ('d0', 'd3'))),
        (P(), P()),
        (P(None), P(None)),
        (P(None, None), P(None, None)),
        (P('d1'), P('d1')),
        (P(('d1',)), P('d1')),
        (P('d1', None), P('d1', None)),
        (P('d2', 'd0'), P('d2', 'd0')),
        (P(None, ('d3', 'd0')), P(None, ('d3', 'd0'))),
        (P((), 'd0'), P(None, 'd0')),
        (lambda path, leaf: ROWS, P(ALL)),
        (lambda path, leaf: P('d3'), P('d3')),
        (lambda path, leaf: lambda path, leaf: COLUMNS, P(None, ALL)),
        (lambda path, leaf: {'w': P('d0')}[path], P('d0')),
        (lambda path, leaf: {2: P('d1')}[leaf.ndim], P('d1')),
        (Rules([('', COLUMNS)]), P(None, ALL)),
        (lambda path, leaf: Rules([('', P('d1'))]), P('d1')),
        (shard_largest, P(ALL)),
    ],
)
def test_every_kind_of_spec(spec, expected):
    for rules in (Rules([('w', spec)]), Rules([], default=spec)):
        for tree in ({'w': W}, {'w': np.ones((16, 16))}, {'w': jnp.ones((16, 16))}):
            assert spec_of(tree, rules, mesh=BY_HAND) == expected


def test_none_as_a_spec():
    x, y = np.ones(16), jnp.ones(16)
    placed = einshard({'x': x, 'y': y, 'z': x}, Rules([('x|y', None)], default='a*'))
    assert placed['x'] is x
    assert placed['y'] is y
    assert placed['z'].sharding == make_sharding('a*')
    assert einshard({'x': x}, Rules([('x', lambda path, leaf: None)]))['x'] is x


def test_scalars_are_replicated_by_any_rules():
    tree = [np.int32(3), np.ones(()), jnp.ones(()), jax.random.key(0)]
    for rules in (Rules([]), Rules([('', ROWS)]), Rules([('', None)]), Rules([], default=None)):
        placed = einshard(tree, rules)
        for leaf in jax.tree.leaves(placed):
            assert leaf.sharding.device_set == set(jax.devices())
            assert leaf.is_fully_replicated


def test_leaves_that_are_not_arrays_are_returned():
    tree = {'f': jax.nn.relu, 's': 'gelu', 'rate': 0.1, 'flag': True, 'none': None}
    tree |= {'mesh': BY_HAND, 'spec': P('x'), 'types': (jnp.bfloat16, np.float32), 'w': W}
    rules = Rules([('w$', ROWS)])
    for spec in (rules, shard_largest, shard_largest(), for_optimizer(tree, rules)):
        placed = einshard(tree, spec)
        assert placed == tree | {'w': placed['w']}
        assert placed['none'] is None
        assert placed['w'].sharding.spec == P(ALL)
    assert [row.path for row in rules.table(tree).rows] == ['w']
    assert "('w$', " in to_jax(rules, tree)


# -------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ('tree', 'rules', 'expected'),
    [
        # min_size= counts elements; small arrays need no rule, and no size that divides
        (struct(16), Rules([], default='o*', min_size=32), P()),
        (struct(2, 16), Rules([], default=COLUMNS, min_size=32), P(None, ALL)),
        (struct(0, 16), Rules([], default=COLUMNS, min_size=32), P()),
        ({'bias': struct(7)}, Rules([('kernel', 'i* o')], min_size=np.int64(50)), P()),
        # rules in rules keep their options
        ({'w': struct(3, 4)}, Rules([('w', Rules([('', ROWS)], indivisible='replicate'))]), P()),
        (struct(3, 4), Rules([], default=Rules([('', ROWS)], indivisible='replicate')), P()),
    ],
)
def test_options(tree, rules, expected):
    assert spec_of(tree, rules) == expected


def test_a_default_applies_to_leaves_that_no_rule_matches():
    placed = einshard({'w': W, 'v': W}, Rules([('w', ROWS)], default=COLUMNS))
    assert [placed[name].sharding.spec for name in 'wv'] == [P(ALL), P(None, ALL)]
    assert einshard({'w': W, 'v': W}, Rules([('w', ROWS)], default=None))['v'] is W


# shape, expression, and PartitionSpec on MESH if indivisible axes are replicated
INDIVISIBLE = [
    ((8, 8), 'a b -> a@fsdp b@tp', P('fsdp', 'tp')),
    ((6, 8), 'a b -> a@fsdp b@tp', P(None, 'tp')),
    ((6, 7), 'a b -> a@fsdp b@tp', P()),
    # an axis is replicated even if one of its mesh axes would divide it
    ((4, 2), 'a b -> a@(data,fsdp) b@tp', P(None, 'tp')),
    # counts take the axes of the mesh in order
    ((4, 4, 4), 'a b c -> a2 b4 c2', P('data', 'fsdp', 'tp')),
    ((4, 6, 4), 'a b c -> a2 b4 c2', P('data', None, 'tp')),
    ((4, 6, 5), 'a b c -> a2 b4 c2', P('data')),
    ((8, 3), 'a b -> * a4 b2', P('fsdp')),
    ((3, 8), 'a* b2', P(None, 'tp')),
    # an axis with two counts
    ((8, 8), 'a b -> a2 b4 a2', P(('data', 'tp'), 'fsdp')),
    ((2, 8), 'a b -> a2 b4 a2', P(None, 'fsdp')),
    ((4, 6), 'a b -> a2 b4 a2', P(('data', 'tp'))),
    # mixed: counts use the mesh axes that names leave
    ((8, 2), 'a b -> a* b@tp', P(('data', 'fsdp'), 'tp')),
    ((4, 2), 'a b -> a* b@tp', P(None, 'tp')),
    ((8, 3), 'a b -> a4 2 b@data', P('fsdp')),
    # behind an ellipsis
    ((5, 8, 6), '... a b -> ... a@fsdp b@tp', P(None, 'fsdp', 'tp')),
    ((5, 6, 6), '... a b -> ... a@fsdp b@tp', P(None, None, 'tp')),
]


@pytest.mark.parametrize(('shape', 'expression', 'expected'), INDIVISIBLE)
def test_indivisible_axes_replicate_if_asked(shape, expression, expected):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    strict, lenient = (
        Rules([('w', expression)], indivisible=way) for way in ('error', 'replicate')
    )
    placed = einshard({'w': x}, lenient, mesh=MESH)['w']
    assert placed.sharding == NamedSharding(MESH, expected)
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])
    # strict rules reject the shapes that need replication, and only those
    if placed.sharding == make_sharding(expression, ndim=len(shape), mesh=MESH):
        assert einshard({'w': x}, strict, mesh=MESH)['w'].sharding == placed.sharding
    else:
        assert 'is not divisible by' in refusal(einshard, {'w': x}, strict, mesh=MESH).sentence


@pytest.mark.parametrize(
    ('n', 'shape', 'expression', 'same_as'),
    [
        (12, (3, 2), 'a b -> a4 b3', EVERYWHERE),
        (12, (4, 2), 'a b -> a4 b3', 'a b -> a4 3 b'),
        (12, (3, 3), 'a b -> a4 b3', 'a b -> 4 a b3'),
        (16, (2, 16), 'a b -> a4 b4', 'a b -> 4 a b4'),
        (16, (5, 5, 5), 'a b c -> a2 b4 c2', EVERYWHERE),
        (8, (4, 4), 'a b -> a2 b2 a2', 'a b -> a2 b2 a2'),
        (8, (2, 4), 'a b -> a2 b2 a2', 'a b -> 2 a b2 2'),
    ],
)
def test_replicated_axes_give_the_same_sharding_as_without_them(n, shape, expression, same_as):
    """On the same mesh, so that jit does not trace again."""
    rules, devices = Rules([('', expression)], indivisible='replicate'), jax.devices()[:n]
    placed = einshard(np.ones(shape), rules, mesh=devices)
    assert placed.sharding == make_sharding(same_as, ndim=len(shape), mesh=devices)


# ------------------------------------------------------------------------------ shard_largest


@pytest.mark.parametrize(
    ('shape', 'n', 'expression'),
    [
        ((15,), 16, EVERYWHERE),
        ((16, 16), 16, 'a b -> a* b'),
        ((100, 16, 48), 16, 'a b c -> a b c*'),
        ((), 16, '-> *'),
        ((8, 3), 8, 'a* b'),
        ((4, 4), 1, 'a* b'),
    ],
)
def test_shard_largest_shards_the_largest_divisible_axis(shape, n, expression):
    devices, x = jax.devices()[:n], np.ones(shape, np.float32)
    expected = make_sharding(expression, ndim=len(shape), mesh=devices)
    for spec in (shard_largest, Rules([], default=shard_largest), {'w': shard_largest}):
        assert einshard({'w': x}, spec, mesh=devices)['w'].sharding == expected
        for options in ({'out': spec}, {'t': spec}):
            same = sharded(**options, mesh=devices)(lambda t: t)
            assert same({'w': x})['w'].sharding.is_equivalent_to(expected, len(shape))
        with jax.set_mesh(device_mesh(devices)):
            assert einshard({'w': x}, spec)['w'].sharding == expected


def test_shard_largest_on_an_abstract_mesh():
    # 16 is divisible by the 16 devices here, but not by 64
    mesh = AbstractMesh((64,), ('fsdp',), axis_types=(AxisType.Auto,))
    assert spec_of(struct(16, 3), shard_largest, mesh=mesh) == P()
    assert spec_of(struct(16, 64), shard_largest, mesh=mesh) == P(None, 'fsdp')


# ---------------------------------------------------------------------------- rules in other specs


def test_rules_in_a_tree_of_specs():
    rules = Rules([('^decoder/w', ROWS), ('^encoder/w', COLUMNS)])  # the path is from the top
    tree = {'encoder': {'w': W}, 'decoder': {'w': W}, 'head': W, 'frozen': {'w': W}}
    spec = {'encoder': rules, 'decoder': rules, 'head': COLUMNS, 'frozen': None}
    placed = einshard(tree, spec)
    assert placed['encoder']['w'].sharding.spec == P(None, ALL)
    assert placed['decoder']['w'].sharding.spec == P(ALL)
    assert placed['head'].sharding.spec == P(None, ALL)
    assert placed['frozen']['w'] is W


def test_rules_as_the_only_spec_of_sharded():
    rules = Rules([('kernel', ROWS), ('bias', EVERYWHERE)])
    double = sharded(rules, out=rules)(lambda params: jax.tree.map(lambda x: 2 * x, params))
    params = {'kernel': np.ones((16, 16), np.float32), 'bias': np.ones(3, np.float32)}
    expected = {'kernel': make_sharding(ROWS), 'bias': make_sharding(EVERYWHERE)}
    assert double.in_shardings(params) == {'params': expected}
    assert shardings(double(params)) == expected
    np.testing.assert_array_equal(double(params)['kernel'], 2 * params['kernel'])
    # other shapes and leaves
    assert double({'kernel': np.ones((32, 2), np.float32)})['kernel'].sharding.spec == P(ALL)


def test_an_explicit_mesh():
    rules = Rules([('w', 'a b -> a8 b2')], indivisible='replicate')
    with jax.set_mesh(device_mesh(axis_types=AxisType.Explicit)):
        placed = einshard({'w': np.ones((8, 4), np.float32), 'v/w': np.ones((8, 3))}, rules)
        assert jax.typeof(placed['w']).sharding.spec == P(('d0', 'd1', 'd2'), 'd3')
        assert jax.typeof(placed['v/w']).sharding.spec == P(('d0', 'd1', 'd2'), None)


def test_threads_agree(in_threads):
    trees = [{f'layer{i}': {'w': W, 'b': B} for i in range(n)} for n in range(1, 20)]
    rules = Rules([('w$', ROWS), ('b$', 'o*')])

    def work(seed):
        for i in np.random.default_rng(seed).permutation(len(trees)):
            for leaf in jax.tree.leaves(einshard(trees[i], rules)):
                assert leaf.sharding.spec == P(ALL)
            if seed == 0:
                clear_caches()

    in_threads(8, work)


@pytest.mark.parametrize(
    'again', [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_rules_in_a_configuration_may_be_copied(again):
    rules = again(Rules([('w', P('data')), ('b', 'o*')], indivisible='replicate'))
    assert spec_of({'w': struct(2, 3)}, rules, mesh=MESH) == P('data')
    assert spec_of({'b': struct(3)}, rules, mesh=MESH) == P()
    assert 'matches no rule' in refusal(einshard, {'v': W}, rules).sentence
    assert einshard({'v': W}, again(Rules([], default=None)))['v'] is W


# ------------------------------------------------------------------------------ missing mesh axes


def test_a_missing_mesh_axis():
    rules = Rules([('w', P('data', 'model'))])
    error = refusal(einshard, {'w': W}, rules, mesh=MESH)
    assert error.sentence == "the mesh has no axis 'model'"
    assert error.fix == "einshard(..., missing='replicate')"
    error = refusal(einshard, {'w': W}, rules)
    assert 'there is no mesh' in error.sentence
    assert error.fix is None


@pytest.mark.parametrize(
    ('spec', 'expected'),
    [
        (P('data', 'model'), P('data')),
        (P(('model', 'data')), P('data')),
        (P('model', ('expert', 'data')), P(None, 'data')),
        (P('model'), P()),
        ('i o -> o@(model,tp) i@data', P('data', 'tp')),
        ('i* o@model', P(('data', 'tp'))),
        (lambda path, leaf: P('model', 'tp'), P(None, 'tp')),
        (lambda path, leaf: Rules([('', P('model', 'tp'))]), P(None, 'tp')),
        (P('data', 'tp'), P('data', 'tp')),
    ],
)
def test_missing_mesh_axes_replicate_if_asked(spec, expected):
    mesh = mesh_of(data=2, tp=4)
    for rules in (
        Rules([('w', spec)], missing='replicate'),
        Rules([], default=spec, missing='replicate'),
        Rules([('w', spec)], missing='replicate', indivisible='replicate'),
        Rules([('', lambda path, leaf: Rules([('w', spec)], missing='replicate'))]),
    ):
        assert spec_of({'w': W}, rules, mesh=mesh) == expected
        assert spec_of({'w': np.ones((16, 16))}, rules, mesh=mesh) == expected
        f = sharded(rules, out=rules, mesh=mesh)(lambda x: x)
        result = f({'w': np.ones((16, 16))})['w']
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, expected), 2)


def test_axes_may_be_missing_and_others_not_divisible():
    mesh = mesh_of(data=2, tp=4)
    rules = [('', P(('pod', 'data'), ('tp', 'seq')))]
    shape = struct(16, 6)
    both = Rules(rules, missing='replicate', indivisible='replicate')
    assert spec_of(shape, both, mesh=mesh) == P('data')
    error = refusal(einshard, shape, Rules(rules, missing='replicate'), mesh=mesh)
    assert error.sentence.startswith("axis 'b' (size 6) is not divisible by 4")
    error = refusal(einshard, shape, Rules(rules, indivisible='replicate'), mesh=mesh)
    assert error.sentence == "the mesh has no axis 'pod'"


# ---------------------------------------------------------------------------------------- errors


def test_errors_of_rules_name_the_leaf():
    @sharded(Rules([('kernel', ROWS)]))
    def step(params):
        return params

    error = refusal(step, {'kernel': np.ones((16, 16)), 'scale': np.ones(16)})
    assert error.sentence == '1 path matches no rule'
    assert error.facts['spec of'] == "parameter 'params' of step"
    assert error.facts['paths'] == "'scale' float64[16]"
    error = refusal(step, {'kernel': np.ones((6, 16))})
    assert error.facts['array'] == "float64[6,16], parameter 'params/kernel' of step"
    # an array alone has no path
    error = refusal(einshard, np.ones((8, 4), np.float32), Rules([('', 'x y* z')]))
    assert error.facts['array'] == 'float32[8,4]'


def test_unmatched_leaves_are_one_error():
    tree = {'mlp': {'kernel': W, 'bias': B, 'scale': B}, 'step': 3, 'name': 'x'}
    error = refusal(einshard, tree, Rules([('kernel$', ROWS), ('mlp/scales', COLUMNS)]))
    assert error.sentence == '2 paths match no rule'
    assert error.facts['paths'] == "'mlp/bias' float32[16], 'mlp/scale' float32[16]"
    assert "'mlp/scales'" in error.facts['nearest rules']
    error = refusal(einshard, {f'leaf{i}': B for i in range(20)}, Rules([]))
    assert error.facts['paths'].endswith(', and 12 more')


@pytest.mark.parametrize(
    ('spec', 'sentence'),
    [
        (ROWS, 'the expression names 2 axes, but the array has 1 dimension'),
        (P('data', 'tp'), "P('data', 'tp') has 2 entries, but the array has 1 dimension"),
        (P(None, 'tp'), "P(None, 'tp') has 2 entries, but the array has 1 dimension"),
        (P('tp', None), "P('tp', None) has 2 entries, but the array has 1 dimension"),
        (lambda path, leaf: ROWS, 'the expression names 2 axes, but the array has 1 dimension'),
    ],
)
def test_a_rule_for_a_kernel_that_hits_a_bias(spec, sentence):
    for way in ('error', 'replicate'):
        rules = Rules([('^mlp', spec)], indivisible=way)
        error = refusal(einshard, {'mlp': {'bias': B}}, rules, mesh=MESH)
        assert error.sentence.replace('PartitionSpec', 'P') == sentence
        assert error.facts['array'] == "float32[16], leaf 'mlp/bias'"
        assert error.facts['rule'] == "'^mlp'"
        assert refusal(rules.table, {'mlp': {'bias': B}}, mesh=MESH).facts['rule'] == "'^mlp'"


def test_caches_distinguish_shapes():
    rules = Rules([('w', 'i* o')], min_size=8, indivisible='replicate')
    for _ in range(2):
        for shape, expected in (((16, 2), P(ALL)), ((2, 2), P()), ((5, 2), P()), ((), P())):
            assert spec_of({'w': struct(*shape)}, rules) == expected
        assert refusal(einshard, {'w': struct(16)}, rules).facts['rule'] == "'w'"
    seen = []
    rules = Rules([('w', lambda path, leaf: seen.append(leaf.dtype))])
    for dtype in (np.float32, np.int32):
        einshard({'w': struct(4, dtype=dtype)}, rules)
    assert seen == [np.float32, np.int32]


@pytest.mark.parametrize('pattern', ['(', 'a)b', 'layers/[0-9', '*kernel', 'é(', 'a{2,1}'])
def test_invalid_regular_expressions(pattern):
    error = refusal(Rules, [('ok', ROWS), (pattern, ROWS)])
    with pytest.raises(re.error) as theirs:
        re.compile(pattern)
    assert error.sentence == f'rule 1 is not a valid regular expression: {theirs.value.msg}'
    assert str(error).splitlines()[1:] == [f'    {pattern}', '    ' + ' ' * theirs.value.pos + '^']


def test_a_regular_expression_too_large():
    error = refusal(Rules, [('a{99999999999999999999}', ROWS)])
    assert error.sentence.startswith('rule 0 is not a valid regular expression: ')


@pytest.mark.parametrize(
    'rules',
    [
        ['kernel'],
        [('kernel',)],
        [('kernel', ROWS, ROWS)],
        [(b'kernel', ROWS)],
        [(None, ROWS)],
        [{'kernel': ROWS}],
        [None],
        'kernel',
        {'kernel': ROWS},
        None,
        3,
    ],
)
def test_invalid_lists_of_rules(rules):
    error = refusal(Rules, rules)
    assert 'pair' in error.sentence
    assert 'kernel$' in error.facts['example']


@pytest.mark.parametrize(
    'spec', [3, ROWS.encode(), {'kernel': ROWS}, [ROWS], (), (ROWS,), jax.devices()[0]]
)
def test_invalid_specs_of_rules(spec):
    assert refusal(Rules, [('w', spec)]).facts['rule'] == "'w'"
    refusal(Rules, [], default=spec)
    rules = Rules([('w', lambda path, leaf: spec)])
    error = refusal(einshard, {'w': W}, rules)
    assert 'not a spec' in error.sentence
    assert error.facts['rule'] == "'w'"
    assert error.facts['array'] == "float32[16,16], leaf 'w'"


@pytest.mark.parametrize(
    'spec', [P('data', P.UNCONSTRAINED), P('data', unreduced={'tp'}), P(reduced={'tp'})], ids=str
)
def test_partition_specs_for_traced_values_only(spec):
    refusal(einshard, {'w': W}, Rules([('w', lambda path, leaf: spec)]), mesh=MESH)


@pytest.mark.parametrize(
    ('pairs', 'options', 'sentence', 'facts'),
    [
        ([('w', 'a b -> a** b')], {}, "'a**' has more than one star", {'rule': "'w'"}),
        ([], {'default': 'a -> b'}, "'b' is not on the left side", {'rule': 'default='}),
        *[([], {'missing': bad}, f"or 'replicate', not {bad!r}", {}) for bad in (None, True)],
        *[
            ([], {'min_size': bad}, f'elements, not {bad!r}', {})
            for bad in ('3', None, 2.5, -1, True)
        ],
    ],
)
def test_wrong_specs_and_options_are_refused_at_once(pairs, options, sentence, facts):
    error = refusal(Rules, pairs, **options)
    assert sentence in error.sentence
    assert error.facts.items() >= facts.items()


# ------------------------------------------------------------------------------ published models

MESHES = {'128 devices': MESH_128, '16 devices': mesh_of(data=2, fsdp=2, expert=2, tensor=2)}


@pytest.mark.parametrize('name', model_shapes.PUBLISHED_PARAMETERS)
def test_shapes_add_up_to_the_published_number_of_parameters(name):
    shapes, n_parameters = model_shapes.PUBLISHED_PARAMETERS[name]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == n_parameters


@pytest.mark.parametrize('devices', MESHES)
@pytest.mark.parametrize('name', MODELS)
def test_models_and_their_moments_are_placed_as_by_hand(name, devices):
    shapes, rules, by_hand = MODELS[name]
    mesh = MESHES[devices]
    state = {'count': struct(dtype=np.int32), 'mu': shapes}
    by_hand = {'count': NamedSharding(mesh, P()), 'mu': on(mesh, by_hand)}

    def is_placed(x, sharding):
        entries = [*x.sharding.spec]
        while entries and entries[-1] is None:  # P(None) as P()
            entries.pop()
        return NamedSharding(x.sharding.mesh, P(*entries)) == sharding

    for tree, expected in ((shapes, by_hand['mu']), (state, by_hand)):
        assert jax.tree.all(jax.tree.map(is_placed, einshard(tree, rules, mesh=mesh), expected))


def test_memory_does_not_grow_with_the_number_of_paths_and_shapes():
    """A server, or a step whose shapes change, may ask for any number of them."""
    rules = Rules([('w', 'a ... -> a* ...')])
    leaves = [jax.ShapeDtypeStruct((16,) * i, np.float32) for i in (1, 2)]
    states = for_optimizer({'w': leaves[0]}, rules)

    for i in range(70_000):
        rules(f'{i}/w', leaves[i % 2])
        states(f'{i}/w', leaves[0])
    # the caches are private
    caches = rules._matches, rules._by_path_and_shape, states._matches
    assert max(map(len, caches)) <= 65_536
    assert states('0/w', leaves[0]) == rules('0/w', leaves[0])
