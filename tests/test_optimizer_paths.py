"""for_optimizer: the parameter that a state array belongs to, by its path."""

import jax
import pytest
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal

from einshard import Rules, einshard, for_optimizer

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


def specs_of(state):
    placed = einshard(state, for_optimizer(PARAMS, RULES), mesh=MESH)
    return jax.tree.map(lambda x: x.sharding.spec, placed)


def test_states_below_their_parameter():
    """For example {'mlp': {'kernel': {'mu': .., 'nu': ..}}}."""
    state, expected = (jax.tree.map(lambda x: {'mu': x, 'nu': x}, t) for t in (PARAMS, SPECS))
    assert specs_of(state) == expected
    assert specs_of({'state': {'0': state}}) == {'state': {'0': expected}}


def test_factored_states_below_their_parameter():
    state = {'v_row': struct(16), 'v_col': struct(32), 'count': struct()}
    expected = {'v_row': P('a'), 'v_col': P('b'), 'count': P()}
    assert specs_of({'mlp': {'kernel': state}}) == {'mlp': {'kernel': expected}}


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


def test_a_parameter_of_another_shape_in_the_path():
    near = refusal(specs_of, {'mlp': {'kernel': {'rms': struct(3, 5)}}})
    assert near.facts['arrays'] == (
        "'mlp/kernel/rms' float32[3,5] (its parameter is float32[16,32])"
    )
