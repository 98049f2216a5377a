"""for_optimizer: the parameter of each state array, its spec, ZeRO, and errors."""

import copy
import dataclasses
import pickle
import re
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_rules import MESH_128, MODELS
from placed import check_equal, check_placed, mesh_of, on, shardings, struct
from refusal import refusal

from einshard import (
    Rules,
    axis_rules,
    describe,
    einshard,
    for_optimizer,
    make_sharding,
    shard_largest,
    sharded,
)

EVERYWHERE = '... -> * ...'


# ------------------------------------------------------------------------ the states of optax

PARAMS = {
    'attn': {'kernel': struct(256, 128), 'bias': struct(128)},
    'mlp': {'kernel': struct(128, 512), 'bias': struct(512)},
    'norm': {'scale': struct(64)},
}
# anchored: without for_optimizer, the rules match no moments
RULES = Rules(
    [('^attn/kernel$', P(('a', 'b'))), ('^mlp/kernel$', P(None, 'c')), ('^mlp/bias$', P('c'))],
    default=EVERYWHERE,
)
GRID = {'a': 2, 'b': 2, 'c': 2}
BY_HAND = {
    'attn': {'kernel': P(('a', 'b')), 'bias': P()},
    'mlp': {'kernel': P(None, 'c'), 'bias': P('c')},
    'norm': {'scale': P()},
}


MATRICES = {'attn': {'kernel': True, 'bias': False}, 'mlp': {'kernel': True, 'bias': False}}
LABELS = jax.tree.map(lambda leaf: 'matrix' if leaf.ndim == 2 else 'vector', PARAMS)
OPTIMIZERS = {
    'adamw': optax.adamw(1e-3),
    'adamw in bfloat16': optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    'sgd': optax.sgd(1e-3),
    'momentum': optax.sgd(1e-3, momentum=0.9, nesterov=True),
    'lion': optax.lion(1e-3),
    'amsgrad': optax.amsgrad(1e-3),
    'rmsprop': optax.rmsprop(1e-3, centered=True, momentum=0.9),
    'ema': optax.ema(0.9),
    'clip': optax.chain(optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.1)),
    'chain': optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.chain(optax.adamw(1e-3), optax.add_noise(0.1, 0.5, jax.random.key(0))),
        optax.scale_by_schedule(lambda count: 1.0 / (count + 1)),
    ),
    'hyperparameters': optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    'several steps': optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4),
    'masked': optax.masked(optax.adam(1e-3), {**MATRICES, 'norm': {'scale': False}}),
    'several optimizers': optax.multi_transform(
        {'matrix': optax.adam(1e-3), 'vector': optax.sgd(1e-3, momentum=0.9)}, LABELS
    ),
    'if finite': optax.apply_if_finite(optax.lion(1e-3), max_consecutive_errors=3),
    'schedule-free': optax.contrib.schedule_free_adamw(1e-3),
    'frozen': optax.multi_transform(
        {'matrix': optax.adam(1e-3), 'vector': optax.set_to_zero()}, LABELS
    ),
    'adafactor of small arrays': optax.adafactor(1e-3, min_dim_size_to_factor=1024),
}


def by_optax(optimizer, params, state, specs):
    """The PartitionSpecs of a state, by optax.tree_map_params."""

    def spec_of(leaf, spec, param):
        masked = isinstance(leaf, optax.MaskedNode)
        return leaf if masked else spec if leaf.shape == param.shape else P()

    return optax.tree_map_params(
        optimizer,
        spec_of,
        state,
        specs,
        params,
        transform_non_params=lambda _: P(),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_moments_are_placed_as_their_parameters(name):
    optimizer, mesh = OPTIMIZERS[name], mesh_of(**GRID)
    state = jax.eval_shape(optimizer.init, PARAMS)
    placed = einshard(state, for_optimizer(PARAMS, RULES), mesh=mesh)
    by_hand = on(mesh, by_optax(optimizer, PARAMS, state, BY_HAND))
    assert shardings(placed) == by_hand
    assert jax.tree.structure(placed) == jax.tree.structure(state)


# ------------------------------------------------------------------------------ published models


@pytest.mark.parametrize('name', ['Llama 8B', 'Mixtral 8x7B', 'GPT-2 XL'])
def test_factored_moments_of_models(name):
    """As optax documents: v_row lacks the largest axis, v_col the second; v is not factored."""
    params, rules, specs = MODELS[name]
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    factored = einshard(state, for_optimizer(params, rules), mesh=MESH_128)[0]

    def is_factored(leaf):
        return leaf.ndim > 1 and sorted(leaf.shape)[-2] >= 128

    def without_axis(which):
        def spec_of(leaf, spec):
            if not is_factored(leaf):
                return P()  # a placeholder of one element
            axes = [*spec, *[None] * (leaf.ndim - len(spec))]
            del axes[sorted(range(leaf.ndim), key=leaf.shape.__getitem__)[which]]
            return P(*axes) if axes[-1] else P(*axes[:-1]) if any(axes) else P()

        return jax.tree.map(spec_of, params, specs)

    unfactored = jax.tree.map(lambda leaf, spec: P() if is_factored(leaf) else spec, params, specs)
    assert shardings(factored.v_row) == on(MESH_128, without_axis(-1))
    assert shardings(factored.v_col) == on(MESH_128, without_axis(-2))
    assert shardings(factored.v) == on(MESH_128, unfactored)


# ------------------------------------------------------------------- state arrays, by their shape

# expression and shape of a parameter, shape of a state array, and its placement by hand
FEWER_AXES = [
    # counts: replicas take the place of the missing axis
    ('x y -> x4 y4', (8, 16), (16,), 'y -> 4 y4'),
    ('x y -> x4 y4', (8, 16), (8,), 'x -> x4 4'),
    ('x y -> y4 x4', (8, 16), (8,), 'x -> 4 x4'),
    ('x y -> x2 4 y2', (8, 16), (16,), 'y -> 8 y2'),
    # stars keep their counts
    ('x y -> x* y2', (8, 16), (16,), 'y -> 8 y2'),
    ('x y -> x* y2', (8, 16), (8,), 'x -> x8 2'),
    ('x y -> x* y*', (8, 16), (16,), 'y -> 4 y4'),
    ('x y -> x4* y*', (8, 16), (8,), 'x -> x8 2'),
    ('x y -> x4* y*', (8, 16), (16,), 'y -> 8 y2'),
    ('x y -> * x y', (8, 16), (16,), EVERYWHERE),
    # axes with two counts, and other orders
    ('i o -> i2 o4 i2', (8, 16), (8,), 'i -> i2 4 i2'),
    ('i o -> i2 o4 i2', (8, 16), (16,), 'o -> 2 o4 2'),
    ('a b c -> c2 a4 b2', (8, 4, 2), (8, 4), 'a b -> 2 a4 b2'),
    ('a b c -> c2 a4 b2', (8, 4, 2), (4, 2), 'b c -> c2 4 b2'),
    ('a b c -> c2 a4 b2', (8, 4, 2), (4,), 'b -> 8 b2'),
    # the ellipsis, and the short form
    ('... o -> ... o* 2', (4, 8, 16), (4, 16), 'a o -> a o8 2'),
    ('... o -> ... o* 2', (4, 8, 16), (4, 8), EVERYWHERE),
    ('a ... -> a4 4 ...', (8, 3, 5), (8, 5), 'a b -> a4 4 b'),
    ('a ... -> a4 4 ...', (8, 3, 5), (5,), EVERYWHERE),
    ('x4 y4', (8, 16), (16,), 'y -> 4 y4'),
    # added axes, as in the history of L-BFGS
    ('x y -> x4 y4', (8, 16), (10, 8, 16), 'n x y -> n x4 y4'),
    ('a y -> a4 y4', (8, 16), (10, 2, 8, 16), 'm n a y -> m n a4 y4'),
    # placeholders and scalars
    ('x y -> x4 y4', (8, 16), (1,), EVERYWHERE),
    ('x y -> x4 y4', (8, 16), (), EVERYWHERE),
    # equal sizes that make no difference
    ('x y z -> * x y z2', (64, 64, 32), (64, 32), 'x z -> * x z2'),
    ('x y z -> * x y z', (64, 64, 32), (64, 32), EVERYWHERE),
]
ZERO = [
    (EVERYWHERE, (64, 256), 'x y -> x y*'),
    (EVERYWHERE, (256, 64), 'x y -> x* y'),
    (EVERYWHERE, (64, 64), 'x y -> x* y'),
    (EVERYWHERE, (48, 100), 'x y -> x* y'),
    (EVERYWHERE, (32,), 'x*'),
    (EVERYWHERE, (3, 32, 5), 'x y* z'),
    # minor to the counts of an axis
    ('x y -> x2 * y', (64, 256), 'x y -> x2 y*'),
    ('x y -> x y2 *', (64, 256), 'x y -> x y*'),
    ('x y -> x y2 *', (256, 64), 'x y -> y2 x*'),
    ('x y -> x2 4 y2', (64, 256), 'x y -> x8 y2'),
    # an axis with no count to the right comes first, even if it is smaller
    ('x y -> * x y2', (64, 256), 'x y -> x8 y2'),
    ('x y -> * x2 y', (64, 256), 'x y -> y8 x2'),
    # else the one with the next count
    ('x y -> * x y2', (3, 256), 'x y -> x y16'),
    ('x y -> * x4 y2', (64, 256), 'x y -> x8 y2'),
    ('x y -> * y4 x2', (64, 256), 'x y -> y8 x2'),
    ('x -> * x2', (64,), 'x*'),
    # replicas in several places
    ('x y -> 2 x4 2 y', (64, 256), 'x y -> y2 x4 y2'),
    ('x y -> 2 x4 2 y', (64, 3), 'x y -> x16 y'),
    ('x y z -> 2 x4 2 y z', (4, 2, 2), 'x y z -> y2 x4 z2'),
    # as many mesh axes as divide the axis; the others shard the next
    (EVERYWHERE, (4, 4), 'x y -> x4 y4'),
    (EVERYWHERE, (8, 2), 'x y -> x8 y2'),
    (EVERYWHERE, (8, 3), 'x y -> x8 2 y'),
    (EVERYWHERE, (3, 6), 'x y -> x y2 8'),
    ('x y -> * x y2', (4, 256), 'x y -> x4 y4'),
    # indivisible
    (EVERYWHERE, (3, 5), EVERYWHERE),
    (EVERYWHERE, (7,), EVERYWHERE),
    ('x y -> x2 * y', (2, 5), 'x y -> x2 * y'),
    # no replicas
    ('x y -> x4 y4', (64, 256), 'x y -> x4 y4'),
    ('x y -> x* y', (64, 256), 'x y -> x* y'),
    ('-> *', (), '-> *'),
]
ZERO_FEWER_AXES = [
    # over the replicas of the parameter, but not over the devices of its missing axis
    ('x y -> * x y2', (64, 256), (64,), 'x -> x8 2'),
    ('x y -> * x y2', (64, 256), (256,), 'y*'),
    ('x y -> * x y2', (64, 256), (10, 64, 256), 'n x y -> n x8 y2'),
    ('x y -> * x y2', (64, 256), (1,), EVERYWHERE),
    ('x y -> * x y2', (64, 256), (), EVERYWHERE),
]


@pytest.mark.parametrize(
    ('zero', 'expression', 'shape', 'state_shape', 'by_hand'),
    [
        *[(False, *row) for row in FEWER_AXES],
        *[(True, *row) for row in ZERO_FEWER_AXES],
        *[(True, e, shape, shape, by_hand) for e, shape, by_hand in ZERO],
        *[(False, e, shape, shape, e) for e, shape, _ in ZERO],
    ],
)
def test_states_by_counts(zero, expression, shape, state_shape, by_hand):
    spec = for_optimizer({'w': struct(*shape)}, expression, zero=zero)
    placed = einshard({'v': {'w': struct(*state_shape)}}, spec)['v']['w']
    assert placed.sharding == make_sharding(by_hand, ndim=len(state_shape))


def test_sizes_decide_if_the_name_in_optax_does_not_fit():
    spec = for_optimizer({'w': struct(64, 32, 64)}, 'x y z -> x4 4 y z')
    placed = einshard({'v_col': {'w': struct(64, 64)}}, spec)['v_col']['w']
    assert placed.sharding == make_sharding('x z -> x4 4 z')


LENIENT = Rules([('w', P('data', 'tp'))], indivisible='replicate')
NAMED = {'data': 4, 'fsdp': 2, 'tp': 2}
NAMED_MESH = mesh_of(**NAMED)
# spec and shape of a parameter, shape of a state array, and its PartitionSpec by hand
NAMED_FEWER_AXES = [
    ('b d -> b@data d@(fsdp,tp)', (8, 16), (16,), P(('fsdp', 'tp'))),
    ('b d -> b@data d@(fsdp,tp)', (8, 16), (8,), P('data')),
    ('b d -> b d@(tp,data)', (8, 16), (16,), P(('tp', 'data'))),
    # mixed: counts keep their mesh axes
    ('b d -> b* d@tp', (8, 16), (8,), P(('data', 'fsdp'))),
    ('b d -> b* d@data', (8, 16), (8,), P(('fsdp', 'tp'))),
    ('b d -> b* d@data', (8, 16), (16,), P('data')),
    ('b d -> 2 b2 d@data', (8, 16), (8,), P('tp')),
    ('b d e -> b4 d2 e@tp', (8, 16, 32), (16, 32), P('fsdp', 'tp')),
    ('b d e -> b4 d2 e@tp', (8, 16, 32), (8, 16), P('data', 'fsdp')),
    ('b d -> * b d', (8, 16), (16,), P()),
    (Rules([('w', P('tp', ('data', 'fsdp')))]), (8, 16), (16,), P(('data', 'fsdp'))),
    (Rules([('w', P('tp'))]), (8, 16), (8,), P('tp')),
    (Rules([('w', P('tp'))]), (8, 16), (16,), P()),
    # indivisible axes remain replicated
    (LENIENT, (6, 16), (6,), P()),
    (LENIENT, (6, 16), (16,), P('tp')),
    (Rules([('w', 'x y -> x4 2 y2')], indivisible='replicate'), (8, 3), (8,), P('data')),
    (lambda path, leaf: {2: 'x y -> x@tp y@data'}[leaf.ndim], (8, 16), (16,), P('data')),
    ({'w': 'x y -> x@tp y@data'}, (8, 16), (8,), P('tp')),
    (shard_largest, (8, 16), (16,), P(('data', 'fsdp', 'tp'))),
    (shard_largest, (8, 16), (8,), P()),
]
# spec and shape of a parameter, zero=, and the PartitionSpec of its moments
NAMED_ZERO = [
    (P(), (64, 256), True, P(None, ('data', 'fsdp', 'tp'))),
    (P(), (64, 256), 'data', P(None, 'data')),
    (P(), (64, 256), ('data', 'fsdp'), P(None, ('data', 'fsdp'))),
    (P(), (64, 256), ['tp', 'data'], P(None, ('data', 'tp'))),
    (P('fsdp', 'tp'), (64, 256), True, P('fsdp', ('tp', 'data'))),
    (P('fsdp', 'tp'), (256, 64), True, P(('fsdp', 'data'), 'tp')),
    (P('fsdp', 'tp'), (256, 64), 'data', P(('fsdp', 'data'), 'tp')),
    (P('fsdp', 'tp'), (256, 64), 'tp', P('fsdp', 'tp')),
    (P('fsdp', 'tp'), (2, 2), True, P('fsdp', 'tp')),
    # sizes per device: 256 / 4 and 100
    (P('data', None), (256, 100), 'fsdp', P('data', 'fsdp')),
    (P(('tp', 'fsdp')), (256, 2), True, P(('tp', 'fsdp', 'data'))),
    # counts on a mesh with names
    ('x y -> * x y2', (64, 256), True, P(None, ('tp', 'data', 'fsdp'))),
    ('x y -> * x y2', (64, 256), 'fsdp', P(None, ('tp', 'fsdp'))),
    ('x y -> * x y2', (64, 2), True, P(('data', 'fsdp'), 'tp')),
    ('x y -> * x y', (4, 2), True, P('data', 'fsdp')),
    ('x y -> x* y@data', (64, 256), True, P(('fsdp', 'tp'), 'data')),
    (P(), (64, 256), (), P()),
    # indivisible axes of the parameter
    (LENIENT, (6, 256), True, P(None, ('tp', 'data', 'fsdp'))),
    (LENIENT, (6, 256), 'data', P(None, ('tp', 'data'))),
]


@pytest.mark.parametrize(
    ('spec', 'shape', 'state_shape', 'zero', 'by_hand'),
    [
        *[(*row, False, by_hand) for *row, by_hand in NAMED_FEWER_AXES],
        *[(spec, shape, shape, *row) for spec, shape, *row in NAMED_ZERO],
    ],
)
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_states_on_named_meshes(spec, shape, state_shape, zero, by_hand, axis_type):
    mesh = mesh_of(types=axis_type, **NAMED)
    spec = for_optimizer({'w': struct(*shape)}, spec, zero=zero)
    x = np.arange(np.prod(state_shape), dtype=np.float32).reshape(state_shape)
    annotated = einshard({'v': {'w': struct(*state_shape)}}, spec, mesh=mesh)['v']['w']
    with jax.set_mesh(mesh):
        placed = einshard({'v': {'w': x}}, spec)['v']['w']
    assert placed.sharding == annotated.sharding == NamedSharding(mesh, by_hand)
    np.testing.assert_array_equal(placed, x)


def test_other_factors_than_those_of_the_canonical_mesh():
    twelve = jax.devices()[:12]  # 3 x 2 x 2, which 'x4 y3' does not fit
    for expression, state_shape, zero, by_hand in (
        ('x y -> x4 y3', (8,), False, 'x -> x4 3'),
        ('x y -> x4 y3', (6,), False, 'y -> 4 y3'),
        ('x y -> x2 6 y', (8, 6), True, 'x y -> x2 y6'),
    ):
        spec = for_optimizer({'w': struct(8, 6)}, expression, zero=zero)
        placed = einshard({'v': {'w': struct(*state_shape)}}, spec, mesh=twelve)['v']['w']
        assert placed.sharding.is_equivalent_to(make_sharding(by_hand, mesh=twelve), placed.ndim)


def test_axis_rules_in_use():
    spec = for_optimizer({'w': struct(8, 16)}, 'batch heads')
    for rules, w, moment in (
        ({'heads': '@(tp,fsdp)'}, P(None, ('tp', 'fsdp')), P(('tp', 'fsdp'))),
        ({'batch': '@data'}, P('data'), P()),
    ):
        with axis_rules(**rules):
            placed = einshard([{'w': struct(8, 16)}, {'w': struct(16)}], spec, mesh=NAMED_MESH)
        assert [leaf['w'].sharding.spec for leaf in placed] == [w, moment]


@pytest.mark.parametrize('shape', [(4, 4), (4, 4, 8), (8, 4, 4), (4, 8, 4)])
def test_square_kernels_of_adafactor(shape):
    """The values of moments after a step of optax show which axes they have."""
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    params = {'w': jnp.ones(shape)}

    @jax.jit
    def moments_of(grad):
        _, state = optimizer.update({'w': grad}, optimizer.init(params), params)
        return {'v_row': state.v_row['w'], 'v_col': state.v_col['w']}

    # a gradient that varies along one axis only makes the moments with this axis vary
    index = np.indices(shape, dtype=np.float32)
    moments = {axis: moments_of(1 + index[axis]) for axis in range(len(shape))}
    rule = 'x y -> x2 4 y2' if len(shape) == 2 else 'x y z -> x2 2 y2 z2'
    mesh_axes = (0, 3) if len(shape) == 2 else (0, 2, 3)  # of x, y and z, of four
    spec = for_optimizer(params, rule)
    state = einshard(jax.eval_shape(optimizer.init, params), spec)
    mesh = make_sharding(rule).mesh
    for name in ('v_row', 'v_col'):
        kept = [axis for axis in moments if np.ptp(moments[axis][name]) > 0]
        assert len(kept) == len(shape) - 1
        by_hand = NamedSharding(mesh, P(*(mesh.axis_names[mesh_axes[axis]] for axis in kept)))
        assert getattr(state, name)['w'].sharding == by_hand


# ------------------------------------------------------------------------------------------ paths

ROWS, COLUMNS = 'x y -> x* y', 'x y -> x y*'
BY_COLUMNS, BY_ROWS, UNSHARDED = 'a b -> a b16', 'a b -> a16 b', 'a b -> 16 a b'
SCALAR = '... -> 16 ...'


def placements(params, specs, state, **options):
    """The expressions that the leaves of a state get."""
    return jax.tree.leaves(describe(einshard(state, for_optimizer(params, specs, **options))))


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    step: Any
    params: Any
    opt_state: Any


def state_of(optimizer, params):
    return jax.eval_shape(optimizer.init, params)


W = struct(16, 16)
NESTED = {'kernel': W, 'mlp': {'kernel': W}, 'deep': {'mlp': {'kernel': W}}}
LAYERS = {'kernel': ROWS, 'mlp': COLUMNS, 'deep': '* x y'}
NAMESAKES = {'mu': {'w': struct(16, 8)}, 'w': struct(32, 16)}
PAIR = [Pair(W, struct(32, 16)), struct(16, 32)]
PAIR_SPECS = [Pair(ROWS, COLUMNS), '* x y']
PLACED_PAIR = [BY_ROWS, BY_COLUMNS, UNSHARDED]
LOOKING = optax.LookaheadParams({'w': W}, {'w': W})


@pytest.mark.parametrize(
    ('params', 'specs', 'state', 'expected'),
    [
        # the longest path wins
        (NESTED, LAYERS, {'mu': NESTED}, [UNSHARDED, BY_ROWS, BY_COLUMNS]),
        (NESTED, LAYERS, NESTED, [UNSHARDED, BY_ROWS, BY_COLUMNS]),
        (NESTED, LAYERS, {'mlp': {'other': {'kernel': W}}}, [BY_ROWS]),
        # if its shape fits: a field of the state may have the name of a module
        (NAMESAKES, {'mu': 'x y -> x y8 2', 'w': ROWS}, {'mu': NAMESAKES, 'nu': NAMESAKES},
         ['a b -> a b8 2', BY_ROWS] * 2),
        # a single parameter has the empty path
        (W, ROWS, state_of(optax.adam(1e-3), W), [SCALAR, BY_ROWS, BY_ROWS]),
        (PAIR, PAIR_SPECS, TrainState(0, PAIR, state_of(optax.adamw(1e-3), PAIR)),
         ['on the host: int', *PLACED_PAIR, SCALAR, *PLACED_PAIR * 2]),
        # two copies of the parameters
        ({'w': W}, ROWS, LOOKING, [BY_ROWS, BY_ROWS]),
        ({'w': W}, ROWS, state_of(optax.lookahead(optax.adam(1e-3), 5, 0.5), LOOKING),
         [SCALAR, BY_ROWS, BY_ROWS, SCALAR]),
    ],
)  # fmt: skip
def test_paths(params, specs, state, expected):
    assert placements(params, specs, state) == expected


@pytest.mark.parametrize('state', [{'mykernel': W}, {'pup': {'w': W}}, {'w': W}, struct(3, 3)])
def test_keys_must_be_equal(state):
    error = refusal(placements, {'kernel': W, 'up': {'w': W}}, ROWS, state)
    assert error.sentence == '1 array matches no parameter by path and shape'


def test_zero_in_a_tree_of_specs_is_for_the_moments_alone():
    state = TrainState(np.int32(0), PAIR, state_of(optax.adamw(1e-3), PAIR))
    spec = TrainState(EVERYWHERE, PAIR_SPECS, for_optimizer(PAIR, PAIR_SPECS, zero=True))
    moments = [BY_ROWS, BY_COLUMNS, BY_COLUMNS]
    placed = jax.tree.leaves(describe(einshard(state, spec)))
    assert placed == [SCALAR, *PLACED_PAIR, SCALAR, *moments * 2]


def test_flax_modules():
    nnx = pytest.importorskip('flax.nnx')
    model = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    rules = Rules([('^kernel', P(None, 'tp'))], default=EVERYWHERE)
    spec = for_optimizer(nnx.state(model, nnx.Param), rules)
    placed = einshard(nnx.state(optimizer), spec, mesh=mesh_of(data=8, tp=2))
    check_placed(placed, {'mu/kernel/value': P(None, 'tp'), 'nu/kernel/value': P(None, 'tp')})


def test_equinox_modules():
    eqx = pytest.importorskip('equinox')
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0)))
    rules = Rules([(r'^layers/\d/weight', 'o i -> o i*')], default=EVERYWHERE)
    arrays = eqx.filter(model, lambda leaf: hasattr(leaf, 'shape'))
    for params in (model, arrays):  # with and without its functions
        placed = placements(params, rules, state_of(optax.adamw(1e-3), arrays))
        assert placed == [SCALAR, *[BY_COLUMNS, 'a -> 16 a'] * 6]


@pytest.mark.parametrize(
    ('default', 'stats'),
    [
        (EVERYWHERE, 'a -> 16 a'),
        (shard_largest, 'a -> a16'),
        (lambda path, leaf: 'x*' if path == 'stats' else '* x', 'a -> a16'),
        (Rules([('key', '* x'), ('stats', 'x*')]), 'a -> a16'),
    ],
)
def test_default(default, stats):
    key = struct(2, dtype=np.uint32)
    state = {'f': max, 'key': key, 'mu': {'w': W}, 'n': np.int32(3), 'stats': struct(32)}
    spec = for_optimizer({'w': W}, ROWS, default=default)
    assert jax.tree.leaves(describe(einshard(state, spec))) == ['a -> 16 a', BY_ROWS, SCALAR, stats]
    assert einshard(state, spec)['f'] is max
    assert einshard(state, for_optimizer({'w': W}, ROWS, default=None))['key'] is key


def test_parameters_without_a_spec():
    params = {'w': struct(16, 32), 'b': struct(32)}
    state = {'mu': params, 'v': {'w': struct(16), 'b': struct(1)}}
    for zero in (False, True):
        placed = einshard(state, for_optimizer(params, {'w': None, 'b': 'x*'}, zero=zero))
        assert placed['mu']['w'] is state['mu']['w']
        assert placed['v']['w'] is state['v']['w']
        assert placed['mu']['b'].sharding == make_sharding('x*')


def test_parameters_are_not_kept_alive():
    x = jnp.ones((16, 16))
    alive = weakref.ref(x)
    spec = for_optimizer({'w': x}, ROWS)
    del x
    assert alive() is None
    assert describe(einshard({'mu': {'w': struct(16, 16)}}, spec)['mu']['w']) == BY_ROWS


# ------------------------------------------------------------------------------------ as a spec


def test_it_is_a_spec():
    params = {'w': struct(16, 32)}
    spec = for_optimizer(params, COLUMNS)
    state = {'mu': params}
    for other in (
        {'mu': spec},
        lambda path, leaf: spec,
        lambda path, leaf: spec(path, leaf),
        Rules([('mu', spec)]),
        Rules([], default=spec),
    ):
        assert describe(einshard(state, other)['mu']['w']) == BY_COLUMNS
    as_only_spec = sharded(spec)(lambda state: state)  # callable, but not a function to decorate
    assert as_only_spec.in_shardings(state)['state']['mu']['w'] == make_sharding(COLUMNS)
    assert repr(spec) == f'for_optimizer(1 parameter, {COLUMNS!r})'
    nothing = for_optimizer([], None, zero='tp')
    assert repr(nothing) == "for_optimizer(0 parameters, None, zero=('tp',))"


@pytest.mark.parametrize('again', [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize('mesh', [None, jax.devices(), mesh_of(data=8, tp=2)], ids=type)
def test_it_may_be_copied_once_used(again, mesh):
    spec = for_optimizer({'w': struct(16, 32)}, Rules([('w', COLUMNS)]), zero=True)
    state = {'mu': {'w': np.ones((16, 32), np.float32)}}
    placed = einshard(state, spec, mesh=mesh)['mu']['w']
    assert einshard(state, again(spec), mesh=mesh)['mu']['w'].sharding == placed.sharding


def test_specs_are_resolved_in_use():
    params = {'w': struct(16, 48)}
    spec = for_optimizer(params, shard_largest, zero=True)
    for n, by_hand in ((16, 'x y*'), (4, 'x y*'), (5, '* x y'), (16, 'x y*')):
        mesh = jax.devices()[:n]
        placed = einshard({'mu': params}, spec, mesh=mesh)['mu']['w']
        assert placed.sharding == make_sharding(by_hand, mesh=mesh)


def test_table():
    params = {'w': struct(64, 256)}
    state = {'count': struct(dtype=np.int32), 'mu': params, 'v_row': {'w': struct(64)}}
    state['key'] = struct(2, dtype=np.uint32)
    spec = for_optimizer(params, 'x y -> * x y2', zero=True, default='... -> * ...')
    table = spec.table(state)
    assert [(row.path, row.rule, row.shard_shape) for row in table.rows] == [
        ('count', 'scalar', ()),
        ('key', 'default', (2,)),
        ('mu/w', 'as w', (8, 128)),
        ('v_row/w', 'as w', (8,)),
    ]
    assert table.bytes_per_device == 4 * (1 + 2 + 8 * 128 + 8)
    mesh = AbstractMesh((512,), ('data',), axis_types=(AxisType.Auto,))
    rows = for_optimizer(params, EVERYWHERE, zero=True, default=EVERYWHERE).table(state, mesh=mesh)
    assert rows.rows[2].shard_shape == (64, 256)  # one axis of 512 divides neither 64 nor 256


# ---------------------------------------------------------------------------------- training steps


def train(optimizer):
    def step(params, state, batch):
        def loss(params):
            hidden = jax.nn.relu(batch @ params['up'] + params['bias'])
            return jnp.mean((hidden @ params['down'] - batch) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def init(key):
    up, down = jax.random.split(key)
    return {
        'up': jax.random.normal(up, (128, 256)) / 16,
        'bias': jnp.zeros(256),
        'down': jax.random.normal(down, (256, 128)) / 16,
    }


REPLICATED = {'up': EVERYWHERE, 'bias': EVERYWHERE, 'down': EVERYWHERE}
TENSOR = {'up': 'd f -> * d f2', 'bias': 'f -> * f2', 'down': 'f d -> * f2 d'}


@pytest.mark.parametrize(
    ('rules', 'optimizer'),
    [
        (REPLICATED, optax.adamw(1e-2)),
        (TENSOR, optax.adamw(1e-2)),
        (TENSOR, optax.chain(optax.clip_by_global_norm(0.1), optax.adafactor(1e-2))),
    ],
)
def test_a_step_with_zero_gives_the_same_numbers(rules, optimizer):
    params = init(jax.random.key(0))
    batches = jax.random.normal(jax.random.key(1), (3, 32, 128))
    plain = params, optimizer.init(params)
    spec = for_optimizer(params, rules, zero=True)
    ours = einshard(params, rules), sharded(out=spec)(optimizer.init)(params)
    born = shardings(ours)
    step = train(optimizer)
    plain_step = jax.jit(step)
    our_step = sharded(rules, spec, 'b d -> b8 2 d', out=(rules, spec, None))(step)
    for batch in batches:
        *plain, plain_loss = plain_step(*plain, batch)
        *ours, our_loss = our_step(*ours, batch)
        np.testing.assert_allclose(our_loss, plain_loss, rtol=1e-5)
    assert shardings(tuple(ours)) == born
    check_equal(ours, plain, rtol=1e-4, atol=1e-5)


def test_memory_of_zero():
    """Each device has a sixteenth of the moments, from initialization on."""
    params = jax.eval_shape(init, jax.random.key(0))
    moments = 2 * sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    for rules, parts in ((REPLICATED, 1), (TENSOR, 2)):
        for zero, n_shards in ((False, parts), (True, 16)):
            born = sharded(out=for_optimizer(params, rules, zero=zero))(optax.adamw(1e-2).init)
            held = born.lower(params).compile().memory_analysis().output_size_in_bytes
            # and the count, and a table of pointers
            assert 0 <= held - moments // n_shards < 512


def test_communication_of_zero():
    """ZeRO adds only all-gathers of the new parameters."""
    optimizer, params = optax.adamw(1e-2), jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)
    mesh = mesh_of(data=8, tp=2)
    rules = Rules([('up', P(None, 'tp')), ('bias', P('tp')), ('down', P('tp'))])

    def collectives(spec):
        step = sharded(rules, spec, 'b d -> b@data d', out=(rules, spec, None), mesh=mesh)
        program = step(train(optimizer)).lower(params, state, struct(32, 128)).compile().as_text()
        kinds = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
        found = re.findall(rf' = .*? ({kinds})(?:-start)?\(', program)
        gathered = re.findall(r' = (f32\[[0-9,]*\])\S* all-gather(?:-start)?\(', program)
        return set(found), sorted(gathered)

    assert collectives(for_optimizer(params, rules)) == ({'all-reduce'}, [])
    kinds, gathered = collectives(for_optimizer(params, rules, zero=True))
    assert kinds <= {'all-reduce', 'reduce-scatter', 'all-gather'}
    assert gathered == ['f32[128,128]', 'f32[128,128]', 'f32[128]']


# ----------------------------------------------------------------------------------------- errors


def test_many_arrays_without_a_parameter():
    spec = for_optimizer([struct(8)] * 5, 'x*')
    facts = refusal(einshard, {'x': [struct(7)] * 11}, spec).facts
    assert facts['arrays'].endswith("'x/7' float32[7], and 3 more")
    assert facts['parameters'] == "'0' float32[8], '1' float32[8], '2' float32[8], and 2 more"


def test_rules_or_a_function_decide_for_ambiguous_axes():
    params = {'w': struct(64, 64)}
    state = {'rows': {'w': struct(64)}, 'mu': params}
    spec = for_optimizer(params, 'd f -> d4 f4')
    error = refusal(einshard, state, spec)
    assert error.sentence.startswith('ambiguous')
    fix, _, _ = error.facts['instead'].partition(', where')
    names = {'Rules': Rules, 'for_optimizer': lambda _: spec, 'spec': 'd -> d4 4'}
    fixed = einshard(state, eval(fix, names))
    assert jax.tree.leaves(describe(fixed)) == ['a b -> a4 b4', 'a -> a4 4']

    def knows(path, leaf):
        return 'd -> d4 4' if path.startswith('rows') else spec(path, leaf)

    assert jax.tree.leaves(describe(einshard(state, knows))) == ['a b -> a4 b4', 'a -> a4 4']


SIXES = {'w': struct(6, 64), 'b': struct(64)}
BLOCKS = Rules([('w', 'x y -> x4 4 y')], default=EVERYWHERE)
IN = 'model parameters, in for_optimizer'


@pytest.mark.parametrize(
    ('spec', 'options', 'parts'),
    [
        ({'w': ROWS}, {}, ['the specs do not match the tree', IN]),
        (Rules([('w', ROWS)]), {}, ['1 path matches no rule', IN]),
        ({'w': ROWS, 'b': 'x**'}, {}, ["'x**'"]),
        (3, {}, ['3 is not a spec']),
        (ROWS, {'default': 3}, ['3 is not a spec']),
        *[(ROWS, {'zero': bad}, [f'not {bad!r}']) for bad in ({'data'}, ('data', 2), None, b'd')],
        # a moment with all axes is named itself, one without some by its parameter
        (BLOCKS, {}, ["axis 'x' (size 6) is not divisible by 4", "leaf 'mu/w'"]),
    ],
)
def test_specs_that_do_not_fit_the_parameters(spec, options, parts):
    text = str(refusal(lambda: einshard({'mu': SIXES}, for_optimizer(SIXES, spec, **options))))
    assert all(part in text for part in parts), text


def test_errors_in_the_spec_of_a_parameter_show_that_parameter():
    error = refusal(einshard, {'v': {'w': struct(64)}}, for_optimizer(SIXES, BLOCKS))
    assert error.sentence == "axis 'x' (size 6) is not divisible by 4"
    assert error.facts['array'] == "float32[6,64], parameter 'w'"
