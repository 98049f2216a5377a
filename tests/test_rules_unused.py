"""Rules that match nothing, and errors about several leaves."""

import copy
import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal

from einshard import Rules, einshard, for_optimizer, sharded

ROWS, EVERYWHERE = 'i o -> i* o', '... -> * ...'
PARAMS = {'mlp': {'kernel': struct(16, 16), 'bias': struct(16)}, 'scale': struct()}
# as in EasyDeL: patterns with the paths of another framework, and a default at the end
MISSPELT = [('mlp/weight', P('fsdp', 'tp')), ('mlp/b$', P())]
MESH = mesh_of(fsdp=4, tp=4)


@pytest.mark.parametrize(
    ('pairs', 'tree'),
    [
        ([('kernel', ROWS), ('nothing', ROWS)], PARAMS),
        ([('scale', ROWS)], PARAMS),  # a scalar, which needs no rule
        ([], PARAMS),
        ([('kernel', ROWS)], struct(8, 8)),  # an array alone has no path
        ([('kernel', ROWS)], {}),
        ([('kernel', ROWS)], {'epoch': 3}),
    ],
)
def test_a_default_with_rules_that_match(pairs, tree):
    placed = einshard(tree, Rules(pairs, default=EVERYWHERE))
    assert jax.tree.structure(placed) == jax.tree.structure(tree)


def test_strict_rules_must_all_match():
    pairs = [('kernel', ROWS), ('weight', ROWS), ('kernel$', ROWS), ('wte', ROWS), ('', EVERYWHERE)]
    assert einshard(PARAMS, Rules(pairs))
    error = refusal(einshard, PARAMS, Rules(pairs, strict=True))
    assert error.sentence == '2 rules match no path of the tree'
    assert error.facts['rules'] == "'weight', 'wte'"
    # rules behind others that match first are not an error: the table lists them
    known = Rules([pairs[0], pairs[2], pairs[4]], strict=True)
    for rules in (known, copy.copy(known), pickle.loads(pickle.dumps(known))):
        for _ in range(2):
            assert einshard(PARAMS, rules) == einshard(PARAMS, Rules(pairs))
            error = refusal(einshard, {'bias': struct(16)}, rules)
            assert error.facts['rules'] == "'kernel', 'kernel$'"


def test_strict_rules_of_an_empty_tree():
    error = refusal(einshard, {}, Rules([('kernel$', ROWS)], strict=True))
    assert error.sentence == 'no rule matches any path of the tree'
    assert error.facts == {'rules': "'kernel$'", 'paths': 'none'}


def test_strict_rules_in_traces_and_sharded_functions():
    rules = Rules([('kernel', ROWS), ('wte', ROWS)], default=EVERYWHERE, strict=True)
    x = {'kernel': np.ones((16, 16), np.float32)}
    for function in (jax.jit(lambda x: einshard(x, rules)), sharded(rules)(lambda x: x)):
        assert refusal(function, x).facts['rules'] == "'wte'"
        both = {**x, 'wte': np.ones((16, 16), np.float32)}
        assert function(both)['wte'].sharding.is_equivalent_to(
            einshard(both, rules)['wte'].sharding, 2
        )


def test_the_table_shows_unused_rules_of_strict_rules_too():
    table = Rules(MISSPELT, default=EVERYWHERE, strict=True).table(PARAMS)
    assert table.unused == ('mlp/weight', 'mlp/b$')


def test_rules_within_rules_are_not_checked():
    inner = Rules([('nothing', ROWS)], default=EVERYWHERE, strict=True)
    assert einshard(PARAMS, Rules([('kernel', ROWS)], default=inner))
    state = {'count': struct(), 'mu': PARAMS}
    assert einshard(state, for_optimizer(PARAMS, Rules([('kernel', ROWS)], default=inner)))


# -------------------------------------------------------------------- errors about several leaves

ODD = {f'layer_{i}': {'kernel': struct(6, 8), 'bias': struct(8)} for i in range(12)}
PAIRS = [('kernel', 'x y -> x@fsdp y'), ('bias', 'y -> y@tp')]


def test_an_error_names_its_rule_and_lists_all_leaves():
    error = refusal(einshard, ODD, Rules(PAIRS), mesh=MESH)
    assert error.sentence == "axis 'x' (size 6) is not divisible by 4, the size of mesh axis 'fsdp'"
    assert [*error.facts][:2] == ['array', 'rule']
    assert error.facts['array'] == "float32[6,8], leaf 'layer_0/kernel'"
    assert error.facts['rule'] == "'kernel'"
    also = error.facts['also'].split('; ')
    assert also[0] == "float32[6,8], leaf 'layer_1/kernel'"
    assert (len(also), also[-1]) == (9, 'and 3 more')


@pytest.mark.parametrize('n', [1, 2])
def test_an_error_about_few_leaves(n):
    tree = {name: ODD[name] for name in [*ODD][:n]}
    facts = refusal(einshard, tree, Rules(PAIRS), mesh=MESH).facts
    assert ('also' in facts) == (n > 1)


def test_ranks_are_checked_for_all_leaves():
    tree = {'a': struct(8, 8), 'b': struct(8), 'c': struct(8, 8, 8)}
    error = refusal(einshard, tree, Rules([('', ROWS)]))
    assert error.facts['array'] == "float32[8], leaf 'b'"
    assert error.facts['rule'] == "''"
    assert error.facts['also'].startswith("float32[8,8,8], leaf 'c': ")


def test_an_error_about_the_default_and_nested_rules():
    tree = {'a': struct(6, 8), 'kernel': struct(8, 8)}
    by_default = Rules([('kernel', ROWS)], default='x y -> x@fsdp y')
    assert refusal(einshard, tree, by_default, mesh=MESH).facts['rule'] == 'default='
    nested = Rules([('kernel', 'x y -> x y')], default=Rules([('a', 'x y -> x@fsdp y')]))
    mesh = AbstractMesh((4,), ('fsdp',))
    assert refusal(einshard, tree, nested, mesh=mesh).facts['rule'] == "'a'"


def test_errors_of_sharded_functions_and_tables_list_all_leaves():
    rules = Rules(PAIRS)
    tree = {name: ODD[name] for name in [*ODD][:2]}
    function = sharded(rules, mesh=MESH)(lambda x: x)
    calls = (lambda: function.eval_shape(tree), lambda: rules.table(tree, mesh=MESH))
    for call in calls:
        facts = refusal(call).facts
        assert facts['rule'] == "'kernel'"
        assert 'layer_0/kernel' in facts['array']
        assert 'layer_1/kernel' in facts['also']


def test_trees_without_rules_list_all_leaves():
    error = refusal(einshard, [struct(6), struct(8), struct(3)], 'x@fsdp', mesh=MESH)
    assert error.facts['array'] == "float32[6], leaf '0'"
    also = "float32[3], leaf '2': axis 'x' (size 3) is not divisible by 4, the size of mesh axis"
    assert error.facts['also'] == f"{also} 'fsdp'"
