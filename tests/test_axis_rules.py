"""axis_rules: placements for logical axis names."""

import asyncio
import contextlib
import copy
import pickle
import types

import jax
import numpy as np
import pytest
from counting import counted
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from placed import mesh_of
from refusal import refusal

import einshard as einshard_package
from einshard import (
    DECODING_AXES,
    TRAINING_AXES,
    axis_rules,
    device_mesh,
    einshard,
    make_sharding,
    sharded,
)

MESH = mesh_of(data=2, fsdp=2, tp=2)
X = np.zeros((8, 8, 8), np.float32)


def spec(expression, mesh=MESH):
    return make_sharding(expression, mesh=mesh).spec


NO_POD = "the mesh has no axis 'pod'"
RULES = {'batch': '@(data,fsdp)', 'heads': '@tp'}
PLAIN = {'batch': '@data', 'heads': '@tp'}
POD = {'batch': '@(data,pod)', 'missing': 'replicate'}


@pytest.mark.parametrize(
    ('contexts', 'expression', 'expected'),
    [
        # names take the placement of their rule
        ([RULES], 'batch heads d', P(('data', 'fsdp'), 'tp')),
        ([RULES], 'heads d', P('tp')),
        ([RULES], 'batch ...', P(('data', 'fsdp'))),
        # without a rule an axis is not sharded, and the mesh replicates
        ([RULES], 'a b', P()),
        ([], 'batch heads d', P()),
        # rules do not apply to an axis with its own placement, or with an arrow
        ([RULES], 'batch@data heads', P('data', 'tp')),
        ([RULES], 'batch d -> batch@tp d', P('tp')),
        ([RULES], 'batch d -> batch d', P()),
        # they nest
        ([PLAIN, {'batch': '@fsdp', 'd': '@data'}], 'batch heads d', P('fsdp', 'tp', 'data')),
        ([PLAIN, {'heads': ''}], 'batch heads d', P('data')),
        ([{}, PLAIN], 'batch', P('data')),
        # names that are parameters, and decomposed ones: expressions compose them
        ([{'self': '@fsdp', 'placements': '@tp'}], 'placements self', P('tp', 'fsdp')),
        ([{'e\u0301': '@data'}], '\u00e9 d', P('data')),
        # mesh axes that are missing
        ([POD], 'batch d', P('data')),
        ([POD], 'batch d2', P('data', 'tp')),
        ([{**POD, 'batch': '@(tp,pod,data)'}], 'batch d', P(('tp', 'data'))),
        ([{**POD, 'batch': '@pod'}], 'batch', P()),
        ([{**POD, 'batch': '@pod'}], 'batch ...', P()),
        ([{**POD, 'batch': '@pod'}], 'd batch', P()),
        ([{**POD, 'batch': '@pod'}], 'batch d@tp', P(None, 'tp')),
        ([{**POD, 'batch': '@pod'}], 'batch d*', P(None, ('data', 'fsdp', 'tp'))),
        ([{**POD, 'batch': '@(pod,fsdp)'}], 'batch d2', P('fsdp', 'tp')),
        ([{**POD, 'batch': '4'}], 'batch d', P(('fsdp', 'tp'))),
        ([{**POD, 'embed': '@pod'}], 'batch embed', P('data')),
        ([POD, {'heads': '@pod'}], 'batch d', P('data')),
        ([POD, {'heads': '@(pod,tp)', 'missing': 'replicate'}], 'batch heads', P('data', 'tp')),
        # only rules that say so may name them
        ([POD], 'batch d@pod', NO_POD),
        ([POD], 'd@pod', NO_POD),
        ([POD], 'batch d -> batch@(data,pod) d', NO_POD),
        ([POD, {'heads': '@pod'}], 'batch heads', NO_POD),
        ([POD, {'batch': '@(tp,pod)'}], 'batch d', NO_POD),
    ],
)
def test_rules(contexts, expression, expected):
    with contextlib.ExitStack() as stack:
        for rules in contexts:
            missing = rules.get('missing', 'error')
            mapping = {name: rule for name, rule in rules.items() if name != 'missing'}
            stack.enter_context(axis_rules(mapping, missing=missing))
        if isinstance(expected, str):
            assert refusal(spec, expression).sentence == expected
        else:
            assert spec(expression) == expected
    assert spec('batch heads d') == P()


@pytest.mark.parametrize(
    ('rule', 'expression', 'n', 'same'),
    [
        ('*', 'batch d', 8, 'batch d -> batch* d'),
        ('4', 'batch d', 8, 'batch d -> * batch4 d'),
        ('2*', 'batch d*', 2, 'batch d -> batch2* d*'),
        ('8', 'batch d', 8, 'batch d -> batch8 d'),
        ('', 'batch d', 8, 'batch d -> * batch d'),
    ],
)
def test_counts_and_stars(rule, expression, n, same):
    devices = jax.devices()[:n]
    with axis_rules(batch=rule):
        given = make_sharding(expression, mesh=devices)
    assert given == make_sharding(same, mesh=devices)


@pytest.mark.parametrize(
    ('rules', 'expression', 'expected'),
    [
        ({'batch': '4'}, 'batch d', P('tp')),
        ({'batch': '2'}, 'batch d', P('data')),
        ({'batch': '2'}, 'batch ...', P('data')),
        ({'batch': '2', 'd': '4'}, 'batch d', P('data', 'tp')),
        ({'batch': '4', 'd': '2'}, 'batch d', None),
        # a star in the expression stays where it is
        ({'batch': '2'}, '* batch d', None),
    ],
)
def test_counts_take_mesh_axes_that_fit(rules, expression, expected):
    """The star that rules add comes first, or last if the counts fit only then."""
    mesh = mesh_of(data=2, tp=4)
    with axis_rules(rules):
        if expected is None:
            error = refusal(spec, expression, mesh)
            assert error.sentence == 'the counts do not match the mesh axes'
        else:
            assert spec(expression, mesh) == expected


def test_as_a_decorator_also_of_a_recursion():
    @axis_rules({'batch': '@(data,pod)'}, missing='replicate')
    def specs(n):
        return [spec('batch'), *(specs(n - 1) if n else [])]

    assert specs(2) == [P('data')] * 3
    assert specs.__name__ == 'specs'
    assert spec('batch') == P()


@pytest.mark.parametrize(
    ('decorated', 'kind'),
    [
        (classmethod(spec), 'classmethod'),
        (staticmethod(spec), 'staticmethod'),
        (property(spec), 'property'),
        (dict, 'class dict'),
        (None, 'NoneType'),
    ],
)
def test_decorating_something_other_than_a_function(decorated, kind):
    sentence = f'axis_rules must decorate a function, not {kind}'
    assert refusal(axis_rules(), decorated).sentence == sentence


def test_sharded_has_a_program_for_each_set_of_rules():
    body = counted(lambda x: einshard(x + 1, 'batch d'))
    f, x = sharded('batch d', out='batch d', mesh=MESH)(body), np.zeros((8, 8), np.float32)
    with pytest.warns(UserWarning, match="'batch d' has no placement"):
        assert f(x).sharding.spec == P()
    for _ in range(3):
        for rules, expected in (
            (axis_rules(batch='@data'), P('data')),
            (axis_rules(batch='@(tp,fsdp)'), P(('tp', 'fsdp'))),
            (axis_rules(batch='@(data,pod)', missing='replicate'), P('data')),
        ):
            with rules:
                assert f(x).sharding.spec == expected
        with axis_rules(batch='@(data,pod)'):
            assert refusal(f, x).sentence == NO_POD
    assert f(x).sharding.spec == P()
    assert body.runs == 4


def test_tasks_have_the_rules_of_the_code_that_starts_them():
    async def task():
        return spec('batch')

    async def main():
        return await asyncio.create_task(task())

    with axis_rules(batch='@data'):
        assert asyncio.run(main()) == P('data')
    assert spec('batch') == P()


@pytest.mark.parametrize('placement', ['data', '@', 'x*', '0', '* *', ' *', None, 4, '...', 'x@a'])
def test_invalid_placements(placement):
    error = refusal(axis_rules, batch=placement)
    assert 'which is not a valid placement' in error.sentence


@pytest.mark.parametrize('name', ['b1', 'a b', '', '...', '2', ' a', 'a -> a', 'a@x', 3, None, ()])
def test_invalid_names(name):
    error = refusal(axis_rules, {name: '@data'})
    assert 'which is not a valid axis name' in error.sentence


@pytest.mark.parametrize(
    ('given', 'placement'),
    [
        (None, ''),
        ('tensor', '@tensor'),
        (['data', 'fsdp'], '@(data,fsdp)'),
        ((), ''),
        # invalid names are not suggested
        *[(bad, None) for bad in (4, 'x*', ('a b',), (3,), ('data', 'data'), ('',))],
    ],
)
def test_mesh_axes_as_in_rules_of_flax(given, placement):
    fix = refusal(axis_rules, {'batch': given}).fix
    assert fix == (None if placement is None else f"axis_rules({{'batch': '{placement}'}})")
    if placement is not None:
        assert axis_rules([('batch', given)]).rules == axis_rules({'batch': placement}).rules


@pytest.mark.parametrize('placement', ['4', '2*', '*', '@data', '@(data,tp)'])
def test_placements_in_a_list_of_pairs(placement):
    assert axis_rules([('batch', placement)]).rules == axis_rules(batch=placement).rules


def test_a_mapping_and_keywords():
    ready = types.MappingProxyType({'batch': '@data', 'heads': '@tp'})
    with axis_rules(ready, d='@fsdp'):
        assert spec('batch heads d') == P('data', 'tp', 'fsdp')
    with axis_rules({'missing': '@data'}, placements='@tp', self='@fsdp'):
        assert spec('missing placements self') == P('data', 'tp', 'fsdp')
    with axis_rules({}), axis_rules():
        assert spec('batch') == P()


@pytest.mark.parametrize('placements', [['batch'], None, 3, {'batch'}])
def test_invalid_mappings(placements):
    assert refusal(axis_rules, placements).sentence == (
        'axis_rules needs a mapping from axis names to placements, or a list of pairs, not '
        f'{placements!r}'
    )


def test_two_rules_for_one_axis():
    error = refusal(axis_rules, {'e\u0301': '@data', '\u00e9': '@data'})
    assert error.sentence == "axis_rules has two rules for axis '\u00e9'"


@pytest.mark.parametrize('missing', [None, True, '@tp', ['replicate'], b'error'])
def test_invalid_values_of_missing(missing):
    error = refusal(axis_rules, missing=missing)
    assert error.sentence == f"missing= must be 'error' or 'replicate', not {missing!r}"


# --------------------------------------------------------------------------- missing mesh axes


def test_missing_axes_of_other_meshes():
    with axis_rules(batch='@(data,pod)', embed='@pod', missing='replicate'):
        error = refusal(make_sharding, 'batch embed', mesh=AbstractMesh((2,), ('pod',)))
        assert "mesh axis 'pod' is used 2 times" in error.sentence
    # on the mesh of all devices every name is missing
    with axis_rules(batch='@(data,fsdp)', heads='@d0', missing='replicate'):
        assert make_sharding('batch heads').spec == P()
        assert make_sharding('batch heads*').spec == P(None, ('d0', 'd1', 'd2', 'd3'))
        # a given mesh has named axes
        assert make_sharding('batch heads', mesh=device_mesh()).spec == P(None, 'd0')


@pytest.mark.parametrize(
    ('rule', 'expression', 'mesh', 'fix'),
    [
        ('@(data,pod)', 'batch d', MESH, "axis_rules(..., missing='replicate')"),
        ('@dta', 'batch d', MESH, "axis_rules(batch='@data')"),
        ('@tp', 'batch d@dta', MESH, "'batch@tp d@data'"),
        ('@tp', 'batch@dta d', MESH, "'batch@data d'"),
        # missing= would only lead to another error
        ('@(data,pod)', 'batch d3', MESH, None),
        ('@(data,pod)', 'batch d@other', MESH, None),
        # without a mesh, the mesh is missing
        ('@data', 'batch d', None, None),
    ],
)
def test_the_error_suggests_missing_if_it_works(rule, expression, mesh, fix):
    with axis_rules(batch=rule):
        assert refusal(make_sharding, expression, mesh=mesh).fix == fix


# ------------------------------------------------------------------ the sets for language models

BATCH = ('data', 'fsdp')
HEADS = P(BATCH, 'sequence', 'tensor'), P(BATCH, None, 'tensor')
ARRAYS = [
    # axes; PartitionSpec with all five mesh axes there, for training and for decoding
    ('vocab embed', P('tensor', 'fsdp'), P('tensor')),
    ('embed heads head_dim', P('fsdp', 'tensor'), P(None, 'tensor')),
    ('embed kv_heads head_dim', P('fsdp', 'tensor'), P(None, 'tensor')),
    ('heads head_dim embed', P('tensor', None, 'fsdp'), P('tensor')),
    ('embed', P('fsdp'), P()),
    ('embed mlp', P('fsdp', 'tensor'), P(None, 'tensor')),
    ('mlp embed', P('tensor', 'fsdp'), P('tensor')),
    ('embed expert', P('fsdp', 'expert'), P(None, 'expert')),
    ('expert embed mlp', P('expert', 'fsdp', 'tensor'), P('expert', None, 'tensor')),
    ('expert mlp embed', P('expert', 'tensor', 'fsdp'), P('expert', 'tensor')),
    ('layers embed mlp', P(None, 'fsdp', 'tensor'), P(None, None, 'tensor')),
    # activations: the model axis needs no rule
    ('batch sequence', P(BATCH, 'sequence'), P(BATCH)),
    ('batch sequence d', P(BATCH, 'sequence'), P(BATCH)),
    ('batch sequence heads head_dim', *HEADS),
    ('batch sequence kv_heads head_dim', *HEADS),
    ('batch sequence mlp', *HEADS),
    ('batch sequence vocab', *HEADS),
    ('expert tokens d', P('expert'), P('expert')),
]
MESHES = [
    {'data': 2, 'fsdp': 2, 'tensor': 2, 'sequence': 2, 'expert': 1},
    {'data': 1, 'fsdp': 4, 'expert': 2, 'tensor': 2, 'sequence': 1},
    {'data': 2, 'fsdp': 4, 'tensor': 2},
    {'data': 8, 'tensor': 2},
    {'fsdp': 16},
    {'tensor': 4, 'stage': 2},
    {'stage': 4},
]


def without_missing_axes(entry, axes):
    """An entry of a PartitionSpec, on a mesh that has only these axes."""
    if isinstance(entry, tuple):
        kept = tuple(axis for axis in entry if axis in axes)
        return kept[0] if len(kept) == 1 else kept or None
    return entry if entry in axes else None


@pytest.mark.parametrize('sizes', MESHES, ids=lambda sizes: ','.join(sizes))
@pytest.mark.parametrize(('axes', 'training', 'decoding'), ARRAYS)
def test_ready_sets_are_as_by_hand(axes, training, decoding, sizes):
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    for ready, by_hand in ((TRAINING_AXES, training), (DECODING_AXES, decoding)):
        entries = [without_missing_axes(entry, sizes) for entry in by_hand]
        while entries and entries[-1] is None:
            entries.pop()
        with axis_rules(ready, missing='replicate'):
            assert make_sharding(axes, mesh=mesh).spec == P(*entries)
        if len(sizes) == 5:
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


def test_the_model_axis_of_activations_has_no_rule():
    with axis_rules(TRAINING_AXES, missing='replicate'):
        error = refusal(spec, 'batch sequence embed')
    assert "mesh axis 'fsdp' is used 2 times" in error.sentence
