"""axis_rules: placements for logical axis names."""

import asyncio
import contextvars
import copy
import pickle
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from placed import mesh_of

import einshard as einshard_package
from einshard import (
    DECODING_AXES,
    TRAINING_AXES,
    EinshardError,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    make_sharding,
    sharded,
)

MESH = mesh_of(data=2, fsdp=2, tp=2)
X = np.zeros((8, 8, 8), np.float32)


def spec(expression, mesh=MESH):
    return make_sharding(expression, mesh=mesh).spec


def test_names_take_the_placement_of_their_rule():
    with axis_rules(batch='@(data,fsdp)', heads='@tp'):
        assert spec('batch heads d') == P(('data', 'fsdp'), 'tp')
        assert spec('heads d') == P('tp')
        # without a rule an axis is not sharded, and the mesh replicates
        assert spec('a b') == P()
        # rules do not apply to an axis with its own placement, or with an arrow
        assert spec('batch@data heads') == P('data', 'tp')
        assert spec('batch d -> batch@tp d') == P('tp')
        assert spec('batch ...') == P(('data', 'fsdp'))
    assert spec('batch heads d') == P()


@pytest.mark.parametrize(
    ('rule', 'expression', 'same'),
    [
        ('*', 'batch d', 'batch d -> batch* d'),
        ('4', 'batch d', 'batch d -> * batch4 d'),
        ('2*', 'batch d*', 'batch d -> batch2* d*'),
        ('8', 'batch d', 'batch d -> batch8 d'),
        ('', 'batch d', 'batch d -> * batch d'),
    ],
)
def test_counts_and_stars(rule, expression, same, devices8):
    with axis_rules(batch=rule):
        given = make_sharding(expression, mesh=devices8) if rule != '2*' else None
    if rule == '2*':
        devices8 = jax.devices()[:2]
        with axis_rules(batch=rule):
            given = make_sharding(expression, mesh=devices8)
    assert given == make_sharding(same, mesh=devices8)


def test_rules_nest():
    with axis_rules(batch='@data', heads='@tp'):
        with axis_rules(batch='@fsdp', d='@data'):
            assert spec('batch heads d') == P('fsdp', 'tp', 'data')
            with axis_rules(heads=''):
                assert spec('batch heads d') == P('fsdp', None, 'data')
        assert spec('batch heads d') == P('data', 'tp')


def test_on_arrays_and_in_traced_functions():
    with axis_rules(batch='@data', heads='@tp'):
        placed = einshard(X, 'batch heads d', mesh=MESH)
        made = jax.jit(lambda x: einshard(x * 2, 'heads batch d', mesh=MESH))(X)
    assert describe(placed) == 'a b c -> a@data b@tp c'
    assert describe(made) == 'a b c -> a@tp b@data c'


def test_as_a_decorator_also_of_a_recursion():
    @axis_rules(batch='@data')
    def specs(n):
        return [spec('batch'), *(specs(n - 1) if n else [])]

    assert specs(2) == [P('data')] * 3
    assert specs.__name__ == 'specs'
    assert spec('batch') == P()


def test_sharded_has_a_program_for_each_set_of_rules():
    traced = []

    @sharded('batch d', out='batch d', mesh=MESH)
    def f(x):
        traced.append(1)
        return einshard(x + 1, 'batch d')

    x = np.zeros((8, 8), np.float32)
    with pytest.warns(UserWarning, match="'batch d' has no placement"):
        assert f(x).sharding.spec == P()
    for _ in range(3):
        with axis_rules(batch='@data'):
            assert f(x).sharding.spec == P('data')
        with axis_rules(batch='@(tp,fsdp)'):
            assert f(x).sharding.spec == P(('tp', 'fsdp'))
    assert f(x).sharding.spec == P()
    assert len(traced) == 3


def test_seen_by_tasks_and_in_copied_contexts():
    seen = {}

    def note(name):
        seen[name] = spec('batch')

    async def task():
        note('task')

    async def main():
        await asyncio.create_task(task())

    with axis_rules(batch='@data'):
        asyncio.run(main())
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=[note, 'copied'])
        thread.start()
        thread.join()
    assert seen['task'] == seen['copied'] == P('data')
    note('after')
    assert seen['after'] == P()


def test_two_names_that_claim_one_mesh_axis():
    rules = axis_rules(batch='@(data,fsdp)', embed='@fsdp')
    with rules, pytest.raises(EinshardError) as caught:
        spec('batch embed')
    assert str(caught.value) == (
        "mesh axis 'fsdp' is used 2 times; each mesh axis can be used once\n"
        '    batch@(data,fsdp) embed@fsdp\n'
        '    ^^^^^^^^^^^^^^^^^ ^^^^^^^^^^\n'
        "  before axis rules: 'batch embed'\n"
        '  instead:           leave one of the axes unsharded: name it without a rule; '
        "or use taken='next'"
    )


def test_a_rule_for_a_missing_mesh_axis():
    with axis_rules(batch='@dta'), pytest.raises(EinshardError) as caught:
        spec('batch d')
    assert str(caught.value) == (
        "the mesh has no axis 'dta'\n"
        '    batch@dta d\n'
        '    ^^^^^^^^^\n'
        "  mesh: 'data': 2, 'fsdp': 2, 'tp': 2\n"
        "  try:  'batch@data d'"
    )


def test_an_expression_with_an_arrow_is_not_the_short_form_of_itself():
    with axis_rules(batch='@data'):
        assert spec('batch d') == P('data')
        assert spec('batch d -> batch d') == P()
        assert spec('batch d -> batch d@tp') == P(None, 'tp')


@pytest.mark.parametrize(
    'placement', ['data', '@', 'x*', '0', '* *', ' *', None, 4, '...', ' -> x@data']
)
def test_invalid_placements(placement):
    with pytest.raises(EinshardError, match='which is not a valid placement'):
        axis_rules(batch=placement)


@pytest.mark.parametrize('name', ['b1', 'a b', '', '...', '2', ' a', 'a -> a', 'a@x', 3, None, ()])
def test_invalid_names(name):
    with pytest.raises(EinshardError, match='which is not a valid axis name'):
        axis_rules({name: '@data'})


@pytest.mark.parametrize(
    ('given', 'placement'),
    [
        (None, ''),
        ('tensor', '@tensor'),
        (('data',), '@data'),
        (('data', 'fsdp'), '@(data,fsdp)'),
        (['data', 'fsdp'], '@(data,fsdp)'),
        ((), ''),
    ],
)
def test_mesh_axes_as_other_tables_give_them(given, placement):
    with pytest.raises(EinshardError) as caught:
        axis_rules({'batch': given})
    assert caught.value.fix == repr(placement)
    assert axis_rules([('batch', given)]).rules == axis_rules({'batch': placement}).rules


@pytest.mark.parametrize('given', [4, 'x*', ('a b',), (3,), ('data', 'data'), ('',)])
def test_invalid_mesh_axes_are_not_suggested(given):
    with pytest.raises(EinshardError) as caught:
        axis_rules({'batch': given})
    assert caught.value.fix is None


# -------------------------------------------------------------------------------- ready mappings


def test_a_mapping_and_keywords():
    ready = types.MappingProxyType({'batch': '@data', 'heads': '@tp'})
    with axis_rules(ready, d='@fsdp'):
        assert spec('batch heads d') == P('data', 'tp', 'fsdp')
    with axis_rules(ready), axis_rules(batch='@fsdp'):
        assert spec('batch heads d') == P('fsdp', 'tp')
    with axis_rules({'missing': '@data'}, placements='@tp', self='@fsdp'):
        assert spec('missing placements self') == P('data', 'tp', 'fsdp')
    with axis_rules({}), axis_rules():
        assert spec('batch') == P()
    with axis_rules({'e\u0301': '@data'}):  # decomposed; expressions compose it
        assert spec('\u00e9 d') == P('data')


def test_two_rules_for_one_axis():
    with pytest.raises(EinshardError) as caught:
        axis_rules({'batch': '@data', 'heads': '@tp'}, batch='@fsdp')
    assert str(caught.value) == (
        "axis_rules has two rules for axis 'batch'\n"
        "  rules:   '@data' and '@fsdp'\n"
        "  instead: pass taken='next' if one is a fallback; or nest axis_rules, where the inner "
        'rule wins'
    )
    with pytest.raises(EinshardError, match="two rules for axis '\u00e9'"):
        axis_rules({'e\u0301': '@data', '\u00e9': '@data'})


@pytest.mark.parametrize('placements', ['batch', ['batch'], None, 3, {'batch'}])
def test_invalid_mappings(placements):
    with pytest.raises(EinshardError) as caught:
        axis_rules(placements)
    assert str(caught.value) == (
        'axis_rules needs a mapping from axis names to placements, or a list of pairs, not '
        f'{placements!r}\n'
        "  examples: axis_rules(batch='@data'), axis_rules([('batch', 'data')])"
    )


# --------------------------------------------------------------------------- missing mesh axes

LENIENT = {
    # rule, expression: what it is on (data=2, fsdp=2, tp=2)
    ('@(data,pod)', 'batch d'): P('data'),
    ('@(pod,data)', 'batch d'): P('data'),
    ('@(tp,pod,data)', 'batch d'): P(('tp', 'data')),
    ('@pod', 'batch d'): P(),
    ('@pod', 'batch'): P(),
    ('@pod', 'batch ...'): P(),
    ('@pod', 'd batch'): P(),
    ('@pod', 'batch d@tp'): P(None, 'tp'),
    ('@pod', 'batch d*'): P(None, ('data', 'fsdp', 'tp')),
    ('@pod', 'batch d2'): P(None, 'tp'),
    ('@(pod,fsdp)', 'batch d2'): P('fsdp', 'tp'),
    ('@(data,tp)', 'batch d'): P(('data', 'tp')),
    ('4', 'batch d'): P(('fsdp', 'tp')),
}


@pytest.mark.parametrize(('rule', 'expression'), LENIENT)
def test_rules_with_missing_mesh_axes(rule, expression):
    with axis_rules(batch=rule, missing='replicate'):
        assert spec(expression) == LENIENT[rule, expression]


def test_only_rules_that_say_so_may_name_missing_axes():
    with axis_rules(batch='@(data,pod)', missing='replicate'):
        for expression in ('batch d@pod', 'd@pod', 'batch d -> batch@(data,pod) d'):
            with pytest.raises(EinshardError, match="the mesh has no axis 'pod'"):
                spec(expression)
        with axis_rules(heads='@pod'):
            assert spec('batch d') == P('data')
            with pytest.raises(EinshardError, match="the mesh has no axis 'pod'"):
                spec('batch heads')
        with axis_rules(batch='@(tp,pod)'), pytest.raises(EinshardError, match="no axis 'pod'"):
            spec('batch d')
        with axis_rules(heads='@(pod,tp)', missing='replicate'):
            assert spec('batch heads') == P('data', 'tp')
        assert spec('batch d') == P('data')


def test_missing_axes_never_conflict():
    with axis_rules(batch='@(data,pod)', embed='@pod', missing='replicate'):
        assert spec('batch embed') == P('data')
        with pytest.raises(EinshardError, match="mesh axis 'pod' is used 2 times"):
            make_sharding('batch embed', mesh=AbstractMesh((2,), ('pod',)))


def test_on_the_mesh_of_all_devices_every_name_is_missing():
    with axis_rules(batch='@(data,fsdp)', heads='@d0', missing='replicate'):
        assert make_sharding('batch heads').spec == P()
        assert make_sharding('batch heads*').spec == P(None, ('d0', 'd1', 'd2', 'd3'))
        # a given mesh has named axes
        assert make_sharding('batch heads', mesh=device_mesh()).spec == P(None, 'd0')


def test_missing_axes_in_a_decorator():
    @axis_rules({'batch': '@(data,pod)'}, missing='replicate')
    def inside():
        return spec('batch d')

    assert inside() == P('data')


def test_sharded_tells_rules_apart_by_what_may_be_missing():
    traced = []

    @sharded('batch d', out='batch d', mesh=MESH)
    def f(x):
        traced.append(1)
        return einshard(x + 1, 'd batch')

    x = np.zeros((8, 8), np.float32)
    for _ in range(2):
        with axis_rules(batch='@(data,pod)', missing='replicate'):
            y = f(x)
            assert y.sharding.spec == P('data')
        with axis_rules(batch='@(data,pod)'), pytest.raises(EinshardError, match='no axis'):
            f(x)
    assert len(traced) == 1
    np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize('missing', ['drop', None, True, '@tp', ['replicate'], b'error'])
def test_invalid_values_of_missing(missing):
    with pytest.raises(EinshardError) as caught:
        axis_rules(missing=missing)
    assert str(caught.value) == (
        f"missing= must be 'error' or 'replicate', not {missing!r}\n"
        "  for an axis named missing: axis_rules({'missing': '@tp'})"
    )


def test_the_error_suggests_missing_if_it_works():
    with axis_rules(batch='@(data,pod)'), pytest.raises(EinshardError) as caught:
        spec('batch d')
    assert str(caught.value) == (
        "the mesh has no axis 'pod'\n"
        '    batch@(data,pod) d\n'
        '    ^^^^^^^^^^^^^^^^\n'
        "  mesh: 'data': 2, 'fsdp': 2, 'tp': 2\n"
        "  try:  axis_rules(..., missing='replicate')"
    )
    for expression in ('batch d3', 'batch d@other'):  # missing= would only lead to another error
        with axis_rules(batch='@(data,pod)'), pytest.raises(EinshardError) as caught:
            spec(expression)
        assert caught.value.fix is None
    # without a mesh, the mesh is missing
    with axis_rules(batch='@data'), pytest.raises(EinshardError, match='no mesh') as caught:
        make_sharding('batch d')
    assert caught.value.fix is None


# ------------------------------------------------------------------ the sets for language models

PARAMETERS = {
    # name: its axes; its PartitionSpec with all five axes there, for training and for decoding
    'embedding': ('vocab embed', P('tensor', 'fsdp'), P('tensor')),
    'q': ('embed heads head_dim', P('fsdp', 'tensor'), P(None, 'tensor')),
    'k': ('embed kv_heads head_dim', P('fsdp', 'tensor'), P(None, 'tensor')),
    'o': ('heads head_dim embed', P('tensor', None, 'fsdp'), P('tensor')),
    'norm': ('embed', P('fsdp'), P()),
    'gate': ('embed mlp', P('fsdp', 'tensor'), P(None, 'tensor')),
    'down': ('mlp embed', P('tensor', 'fsdp'), P('tensor')),
    'router': ('embed expert', P('fsdp', 'expert'), P(None, 'expert')),
    'expert up': (
        'expert embed mlp',
        P('expert', 'fsdp', 'tensor'),
        P('expert', None, 'tensor'),
    ),
    'expert down': ('expert mlp embed', P('expert', 'tensor', 'fsdp'), P('expert', 'tensor')),
    'stacked': ('layers embed mlp', P(None, 'fsdp', 'tensor'), P(None, None, 'tensor')),
}
BATCH = ('data', 'fsdp')
ACTIVATIONS = {
    'tokens': ('batch sequence', P(BATCH, 'sequence'), P(BATCH)),
    'stream': ('batch sequence d', P(BATCH, 'sequence'), P(BATCH)),
    'queries': (
        'batch sequence heads head_dim',
        P(BATCH, 'sequence', 'tensor'),
        P(BATCH, None, 'tensor'),
    ),
    'cache': (
        'batch sequence kv_heads head_dim',
        P(BATCH, 'sequence', 'tensor'),
        P(BATCH, None, 'tensor'),
    ),
    'hidden': ('batch sequence mlp', P(BATCH, 'sequence', 'tensor'), P(BATCH, None, 'tensor')),
    'logits': ('batch sequence vocab', P(BATCH, 'sequence', 'tensor'), P(BATCH, None, 'tensor')),
    'routed': ('expert tokens d', P('expert'), P('expert')),
}
MESHES = [
    {'data': 2, 'fsdp': 2, 'tensor': 2, 'sequence': 2, 'expert': 1},
    {'data': 1, 'fsdp': 4, 'expert': 2, 'tensor': 2, 'sequence': 1},
    {'data': 2, 'fsdp': 4, 'tensor': 2},
    {'data': 8, 'tensor': 2},
    {'fsdp': 16},
    {'tensor': 4, 'stage': 2},
    {'stage': 4},
]


def among(entry, axes):
    """An entry of a PartitionSpec by hand, on a mesh that has these axes only."""
    if isinstance(entry, tuple):
        kept = tuple(axis for axis in entry if axis in axes)
        return kept[0] if len(kept) == 1 else kept or None
    return entry if entry in axes else None


@pytest.mark.parametrize('sizes', MESHES, ids=lambda sizes: ','.join(sizes))
@pytest.mark.parametrize('name', [*PARAMETERS, *ACTIVATIONS])
def test_ready_sets_are_as_by_hand(name, sizes):
    axes, training, decoding = (PARAMETERS | ACTIVATIONS)[name]
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    for ready, by_hand in ((TRAINING_AXES, training), (DECODING_AXES, decoding)):
        entries = [among(entry, sizes) for entry in by_hand]
        while entries and entries[-1] is None:
            entries.pop()
        with axis_rules(ready, missing='replicate'):
            assert make_sharding(axes, mesh=mesh).spec == P(*entries)
        if {'data', 'fsdp', 'tensor', 'sequence', 'expert'} <= set(sizes):
            with axis_rules(ready):  # nothing is missing
                assert make_sharding(axes, mesh=mesh).spec == by_hand


def test_ready_sets_are_read_only():
    for ready in (TRAINING_AXES, DECODING_AXES):
        with pytest.raises(TypeError):
            ready['batch'] = '@tensor'
    assert list(TRAINING_AXES) == list(DECODING_AXES)
    with axis_rules({**TRAINING_AXES, 'batch': '@data'}, missing='replicate'):
        assert spec('batch embed') == P('data', 'fsdp')


@pytest.mark.parametrize('name', ['TRAINING_AXES', 'DECODING_AXES'])
def test_ready_sets_may_be_copied_and_pickled(name):
    ready = getattr(einshard_package, name)
    for again in (copy.copy(ready), copy.deepcopy(ready), pickle.loads(pickle.dumps(ready))):
        assert again is ready
    assert pickle.loads(pickle.dumps({'axes': ready, 'mesh': (4, 2)}))['axes'] == dict(ready)
    assert ready | {'batch': '@data'} == {**ready, 'batch': '@data'}
    assert {'batch': '@data', 'q': '@tp'} | ready == {'q': '@tp', **ready}
    assert eval(repr(ready)) == ready


def test_the_model_axis_of_activations_needs_no_rule():
    with axis_rules(TRAINING_AXES, missing='replicate'), pytest.raises(EinshardError) as caught:
        spec('batch sequence embed')
    assert str(caught.value) == (
        "mesh axis 'fsdp' is used 2 times; each mesh axis can be used once\n"
        '    batch@(data,fsdp) sequence embed@fsdp\n'
        '    ^^^^^^^^^^^^^^^^^          ^^^^^^^^^^\n'
        "  before axis rules: 'batch sequence embed'\n"
        '  instead:           leave one of the axes unsharded: name it without a rule; '
        "or use taken='next'"
    )


def block(weights, x):
    """Attention with grouped heads, and a gated feed-forward."""
    q = einshard(jnp.einsum('bsd,dhe->bshe', x, weights['q']), 'batch sequence heads head_dim')
    k = einshard(jnp.einsum('bsd,dke->bske', x, weights['k']), 'batch sequence kv_heads head_dim')
    v = einshard(jnp.einsum('bsd,dke->bske', x, weights['v']), 'batch sequence kv_heads head_dim')
    k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
    shares = jax.nn.softmax(jnp.einsum('bshe,bthe->bhst', q, k))
    mixed = jnp.einsum('bhst,bthe->bshe', shares, v)
    x = einshard(x + jnp.einsum('bshe,hed->bsd', mixed, weights['o']), 'batch sequence d')
    hidden = jax.nn.silu(x @ weights['gate']) * (x @ weights['up'])
    hidden = einshard(hidden, 'batch sequence mlp')
    return einshard(x + hidden @ weights['down'], 'batch sequence d')


WEIGHTS = {
    'q': ('embed heads head_dim', (16, 8, 2)),
    'k': ('embed kv_heads head_dim', (16, 4, 2)),
    'v': ('embed kv_heads head_dim', (16, 4, 2)),
    'o': ('heads head_dim embed', (8, 2, 16)),
    'gate': ('embed mlp', (16, 32)),
    'up': ('embed mlp', (16, 32)),
    'down': ('mlp embed', (32, 16)),
}


def block_by_hand(w, x):
    """The same in numpy."""
    q = np.einsum('bsd,dhe->bshe', x, w['q'])
    k, v = (np.einsum('bsd,dke->bske', x, w[n]).repeat(2, axis=2) for n in 'kv')
    scores = np.exp(np.einsum('bshe,bthe->bhst', q, k))
    shares = scores / scores.sum(axis=-1, keepdims=True)
    x = x + np.einsum('bshe,hed->bsd', np.einsum('bhst,bthe->bshe', shares, v), w['o'])
    gate = x @ w['gate']
    return x + (gate / (1 + np.exp(-gate)) * (x @ w['up'])) @ w['down']


@pytest.mark.parametrize('ready', [TRAINING_AXES, DECODING_AXES], ids=['training', 'decoding'])
@pytest.mark.parametrize('sizes', [{'data': 2, 'fsdp': 2, 'tensor': 2, 'sequence': 2}, {'data': 8}])
def test_one_model_works_on_any_mesh(ready, sizes):
    mesh = mesh_of(**sizes)
    rng = np.random.default_rng(0)
    host = {name: rng.normal(size=shape) / 4 for name, (_, shape) in WEIGHTS.items()}
    x = rng.normal(size=(8, 4, 16))
    with jax.set_mesh(mesh), axis_rules(ready, missing='replicate'):
        weights = einshard(host, {name: axes for name, (axes, _) in WEIGHTS.items()})
        # a new function each time, since jit caches by function and rules
        y = jax.jit(lambda *args: block(*args))(weights, einshard(x, 'batch sequence d'))
        assert y.sharding == make_sharding('batch sequence d')
    np.testing.assert_allclose(y, block_by_hand(host, x), rtol=1e-4, atol=1e-5)
