"""for_optimizer: the parameter that a state array belongs to, by its path."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal

from einshard import Rules, einshard, for_optimizer, sharded

MESH = mesh_of(a=2, b=4)
PARAMS = {
    'mlp': {'kernel': struct(16, 32), 'bias': struct(32)},
    'head': {'kernel': struct(32, 8)},
    'mu': struct(8, 4),
}
SPECS = {'mlp': {'kernel': P('a', 'b'), 'bias': P('b')}, 'head': {'kernel': P('b')}, 'mu': P('a')}
RULES = Rules(
    [('^mlp/kernel$', P('a', 'b')), ('^mlp/bias$', P('b')), ('^head/', P('b')), ('^mu$', P('a'))]
)


def specs_of(state, **options):
    placed = einshard(state, for_optimizer(PARAMS, RULES, **options), mesh=MESH)
    return jax.tree.map(lambda x: x.sharding.spec, placed)


def below(params, **moments):
    """The state of an optimizer that holds the moments of each parameter below its path."""
    return jax.tree.map(lambda p: {name: moment(p) for name, moment in moments.items()}, params)


def same(p):
    return p


def test_states_below_their_parameter():
    """For example {'mlp': {'kernel': {'mu': .., 'nu': ..}}}."""
    expected = below(SPECS, mu=same, nu=same)
    assert specs_of(below(PARAMS, mu=same, nu=same)) == expected
    assert specs_of({'state': {'0': below(PARAMS, mu=same, nu=same)}}) == {'state': {'0': expected}}


def test_factored_states_below_their_parameter():
    state = below(
        {'mlp': {'kernel': PARAMS['mlp']['kernel']}},
        v_row=lambda p: struct(p.shape[0]),
        v_col=lambda p: struct(p.shape[1]),
        count=lambda p: struct(),
    )
    assert specs_of(state) == {'mlp': {'kernel': {'v_row': P('a'), 'v_col': P('b'), 'count': P()}}}


def test_factored_states_of_square_parameters_below_them():
    params = {'w': struct(16, 16)}
    state = {'w': {'v_row': struct(16), 'v_col': struct(16)}, 'v_row': {'w': struct(16)}}
    placed = einshard(state, for_optimizer(params, 'x y -> x@a y@b'), mesh=MESH)
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    assert specs['w']['v_row'] == specs['v_row']['w']
    assert {specs['w']['v_row'], specs['w']['v_col']} == {P('a'), P('b')}


@pytest.mark.parametrize(
    ('state', 'expected'),
    [
        # the longest part of the path wins
        ({'mlp': {'kernel': {'mu': struct(16, 32)}}}, P('a', 'b')),
        ({'mlp': {'bias': {'head': {'kernel': struct(32, 8)}}}}, P('b')),
        # of equally long parts, the last
        ({'mlp': {'kernel': {'mlp': {'bias': struct(32)}}}}, P('b')),
        ({'head': {'kernel': {'mlp': {'kernel': struct(32, 8)}}}}, P('b')),
        # a parameter of another shape does not count
        ({'mlp': {'kernel': {'mu': struct(8, 4)}}}, P('a')),
    ],
)
def test_paths_that_contain_several_parameters(state, expected):
    (found,) = jax.tree.leaves(specs_of(state), is_leaf=lambda x: isinstance(x, P))
    assert found == expected


def test_zero_and_training_loops():
    params = {'mlp': {'kernel': np.ones((16, 32), np.float32)}}
    rules = Rules([('kernel', P(None, 'b'))])
    spec = for_optimizer(params, rules, zero='a')

    @sharded(rules, out=spec, mesh=MESH)
    def init(params):
        return below(params, mu=lambda p: p * 0, nu=lambda p: p * 0)

    state = init(params)
    assert state['mlp']['kernel']['mu'].sharding.spec == P('a', 'b')
    assert state['mlp']['kernel']['nu'].sharding.spec == P('a', 'b')


def test_no_parameter_in_the_path():
    error = refusal(einshard, {'mlp': {'gate': {'mu': struct(3, 5)}}}, for_optimizer(PARAMS, RULES))
    assert error.sentence == '1 array matches no parameter by path and shape'
    near = refusal(specs_of, {'mlp': {'kernel': {'rms': struct(3, 5)}}})
    assert near.facts['arrays'] == (
        "'mlp/kernel/rms' float32[3,5] (its parameter is float32[16,32])"
    )
