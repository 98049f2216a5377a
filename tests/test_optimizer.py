"""for_optimizer: the parameter of each state array, its spec, ZeRO, and errors."""

import copy
import dataclasses
import pickle
import re
import textwrap
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
from model_rules import AXES, MESH_128, MODELS
from model_rules import by_hand as by_hand_of
from placed import mesh_of, on, shardings, struct
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


def message(*args, **kwargs):
    return str(refusal(*args, **kwargs))


def expected(text):
    return textwrap.dedent(text).strip('\n')


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


@pytest.fixture(params=['Llama 8B', 'Mixtral 8x7B', 'GPT-2 XL'], scope='module')
def model(request):
    params, rules, specs = MODELS[request.param]
    return params, specs, for_optimizer(params, rules)


def test_moments_of_models(model):
    params, specs, spec = model
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    adam = einshard(state, spec, mesh=MESH_128)[0]
    assert shardings(adam.mu) == shardings(adam.nu) == on(MESH_128, specs)
    assert adam.count.sharding == NamedSharding(MESH_128, P())


def test_factored_moments_of_models(model):
    """As optax documents: v_row lacks the largest axis, v_col the second; v is the unfactored."""
    params, specs, spec = model
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    factored = einshard(state, spec, mesh=MESH_128)[0]

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


FREE = ('data', 'expert')  # mesh axes that replicate the matrices of Llama
ROWS_ZERO, COLUMNS_ZERO = P(('fsdp', *FREE), 'tensor'), P('fsdp', ('tensor', *FREE))
LLAMA_ZERO = {
    # a kernel of 1,024 x 512 per device, and others
    **dict.fromkeys([f'{name}_proj/kernel' for name in 'qkv'], ROWS_ZERO),
    **dict.fromkeys(['gate_proj/kernel', 'up_proj/kernel', 'lm_head/kernel'], COLUMNS_ZERO),
    'embed_tokens/embedding': P(('tensor', *FREE), 'fsdp'),
    'down_proj/kernel': P(('tensor', *FREE), 'fsdp'),
    'o_proj/kernel': P('tensor', ('fsdp', *FREE)),
    'input_layernorm/weight': P(tuple(AXES)),
    'post_attention_layernorm/weight': P(tuple(AXES)),
    'norm/weight': P(tuple(AXES)),
}


def test_zero_on_llama():
    params, rules, _ = MODELS['Llama 8B']
    spec = for_optimizer(params, rules, zero=True)
    adam = einshard(jax.eval_shape(optax.adamw(1e-3).init, params), spec, mesh=MESH_128)[0]
    assert shardings(adam.mu) == on(MESH_128, by_hand_of(LLAMA_ZERO, params))
    # nothing is replicated but the count
    n_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    table = spec.table(adam, mesh=MESH_128)
    assert table.bytes_per_device == 2 * 2 * n_parameters // 128 + 4


# ------------------------------------------------------------------------------- missing axes


@pytest.mark.parametrize(
    ('expression', 'whole', 'left', 'by_hand'),
    [
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
        ('x y -> x4 y4', (8, 16), (1, 1), EVERYWHERE),
    ],
)
def test_missing_axes(expression, whole, left, by_hand):
    spec = for_optimizer({'w': struct(*whole)}, expression)
    state = einshard({'mu': {'w': struct(*whole)}, 'v': {'w': struct(*left)}}, spec)
    assert state['mu']['w'].sharding == make_sharding(expression, ndim=len(whole))
    assert state['v']['w'].sharding == make_sharding(by_hand, ndim=len(left))


NAMED = {'data': 4, 'fsdp': 2, 'tp': 2}


@pytest.mark.parametrize(
    ('spec', 'whole', 'left', 'by_hand'),
    [
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
        (Rules([('w', P('data', 'tp'))], indivisible='replicate'), (6, 16), (6,), P()),
        (Rules([('w', P('data', 'tp'))], indivisible='replicate'), (6, 16), (16,), P('tp')),
        (Rules([('w', 'x y -> x4 2 y2')], indivisible='replicate'), (8, 3), (8,), P('data')),
        (lambda path, leaf: {2: 'x y -> x@tp y@data'}[leaf.ndim], (8, 16), (16,), P('data')),
        ({'w': 'x y -> x@tp y@data'}, (8, 16), (8,), P('tp')),
        (shard_largest, (8, 16), (16,), P(('data', 'fsdp', 'tp'))),
        (shard_largest, (8, 16), (8,), P()),
    ],
)
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_missing_axes_on_named_meshes(spec, whole, left, by_hand, axis_type):
    mesh = mesh_of(types=axis_type, **NAMED)
    spec = for_optimizer({'w': struct(*whole)}, spec)
    state = {'v': {'w': np.zeros(left, np.float32)}}
    assert einshard(state, spec, mesh=mesh)['v']['w'].sharding == NamedSharding(mesh, by_hand)
    with jax.set_mesh(mesh):
        assert einshard(state, spec)['v']['w'].sharding == NamedSharding(mesh, by_hand)


def test_other_factors_than_those_of_the_canonical_mesh():
    twelve = jax.devices()[:12]  # as 3 x 2 x 2, on which 'x4 y3' does not fall
    spec = for_optimizer({'w': struct(8, 6)}, 'x y -> x4 y3')
    state = einshard({'row': {'w': struct(8)}, 'column': {'w': struct(6)}}, spec, mesh=twelve)
    assert state['row']['w'].sharding == make_sharding('x -> x4 3', mesh=twelve)
    held = state['column']['w'].sharding.devices_indices_map((6,))
    assert [held[device][0].start for device in twelve] == [0, 2, 4] * 4
    shared = for_optimizer({'w': struct(8, 6)}, 'x y -> x2 6 y', zero=True)
    state = einshard({'mu': {'w': struct(8, 6)}}, shared, mesh=twelve)
    assert state['mu']['w'].sharding == make_sharding('x y -> x2 y6', mesh=twelve)


@pytest.mark.parametrize(
    ('rules', 'full', 'left'),
    [
        ({'batch': '@data', 'heads': '@tp'}, P('data', 'tp'), P('tp')),
        ({'heads': '@(tp,fsdp)'}, P(None, ('tp', 'fsdp')), P(('tp', 'fsdp'))),
        ({'batch': '@data'}, P('data'), P()),
    ],
)
def test_axis_rules_in_use(rules, full, left):
    spec = for_optimizer({'w': struct(8, 16)}, 'batch heads')
    state = {'mu': {'w': struct(8, 16)}, 'v': {'w': struct(16)}}
    with axis_rules(**rules):
        placed = einshard(state, spec, mesh=mesh_of(**NAMED))
    assert (placed['mu']['w'].sharding.spec, placed['v']['w'].sharding.spec) == (full, left)


@pytest.mark.parametrize('shape', [(4, 4), (4, 4, 8), (8, 4, 4), (4, 8, 4)])
def test_square_kernels_of_adafactor(shape):
    """The values of moments after a step of optax show which axes they have."""
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    params = {'w': jnp.ones(shape)}

    @jax.jit
    def moments_of(grad):
        _, state = optimizer.update({'w': grad}, optimizer.init(params), params)
        return {'v_row': state.v_row['w'], 'v_col': state.v_col['w']}

    # a gradient that varies along one axis only: so do the moments that have it
    index = np.indices(shape, dtype=np.float32)
    moments = {axis: moments_of(1 + index[axis]) for axis in range(len(shape))}
    rule = 'x y -> x2 4 y2' if len(shape) == 2 else 'x y z -> x2 2 y2 z2'
    cut = (0, 3) if len(shape) == 2 else (0, 2, 3)  # by which of the four factors of 16
    spec = for_optimizer(params, rule)
    state = einshard(jax.eval_shape(optimizer.init, params), spec)
    mesh = make_sharding(rule).mesh
    for name in ('v_row', 'v_col'):
        kept = [axis for axis in moments if np.ptp(moments[axis][name]) > 0]
        assert len(kept) == len(shape) - 1
        by_hand = NamedSharding(mesh, P(*(mesh.axis_names[cut[axis]] for axis in kept)))
        assert getattr(state, name)['w'].sharding == by_hand


def test_equal_sizes_that_make_no_difference():
    w = struct(64, 64, 32)
    for expression, by_hand in (
        ('x y z -> * x y z2', 'x z -> * x z2'),
        ('x y z -> * x y z', EVERYWHERE),
    ):
        spec = for_optimizer({'w': w}, expression)
        placed = einshard({'rows': {'w': struct(64, 32)}}, spec)['rows']['w']
        assert placed.sharding == make_sharding(by_hand, ndim=2)
    # not the shape that optax gives v_col: the sizes decide
    spec = for_optimizer({'w': struct(64, 32, 64)}, 'x y z -> x4 4 y z')
    placed = einshard({'v_col': {'w': struct(64, 64)}}, spec)['v_col']['w']
    assert placed.sharding == make_sharding('x z -> x4 4 z')


# ------------------------------------------------------------------------------------------ zero


@pytest.mark.parametrize(
    ('expression', 'shape', 'by_hand'),
    [
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
        # as many mesh axes as divide it, then the others
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
    ],
)
def test_zero_by_counts(expression, shape, by_hand):
    params = {'w': struct(*shape)}
    placed = einshard({'mu': params}, for_optimizer(params, expression, zero=True))
    assert placed['mu']['w'].sharding == make_sharding(by_hand, ndim=len(shape))
    stays = einshard({'mu': params}, for_optimizer(params, expression))
    assert stays['mu']['w'].sharding == make_sharding(expression, ndim=len(shape))


@pytest.mark.parametrize(
    ('spec', 'shape', 'zero', 'by_hand'),
    [
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
        # indivisible axes of the parameter
        ('lenient', (6, 256), True, P(None, ('tp', 'data', 'fsdp'))),
        ('lenient', (6, 256), 'data', P(None, ('tp', 'data'))),
    ],
)
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_zero_on_named_meshes(spec, shape, zero, by_hand, axis_type):
    mesh = mesh_of(types=axis_type, **NAMED)
    rules = Rules([('', spec)])
    if spec == 'lenient':
        rules = Rules([('', P('data', 'tp'))], indivisible='replicate')
    params = {'w': struct(*shape)}
    placed = einshard({'mu': params}, for_optimizer(params, rules, zero=zero), mesh=mesh)
    assert placed['mu']['w'].sharding == NamedSharding(mesh, by_hand)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with jax.set_mesh(mesh):
        placed = einshard({'mu': {'w': x}}, for_optimizer(params, rules, zero=zero))['mu']['w']
    assert placed.sharding == NamedSharding(mesh, by_hand)
    np.testing.assert_array_equal(placed, x)


@pytest.mark.parametrize(
    ('left', 'by_hand'),
    [
        ((64,), 'x -> x8 2'),  # the replicas of the parameter; those of what is left out stay
        ((256,), 'y*'),
        ((10, 64, 256), 'n x y -> n x8 y2'),
        ((1,), EVERYWHERE),
        ((), EVERYWHERE),
    ],
)
def test_zero_with_missing_axes(left, by_hand):
    params = {'w': struct(64, 256)}
    spec = for_optimizer(params, 'x y -> * x y2', zero=True)
    placed = einshard({'v': {'w': struct(*left)}}, spec)['v']['w']
    assert placed.sharding == make_sharding(by_hand, ndim=len(left))


def test_zero_false_and_empty():
    params = {'w': struct(64, 256)}
    for zero in (False, (), []):
        placed = einshard({'mu': params}, for_optimizer(params, EVERYWHERE, zero=zero))
        assert placed['mu']['w'].sharding == make_sharding(EVERYWHERE)


# ------------------------------------------------------------------------------------------ paths

ROWS, COLUMNS, PLANES = 'x y -> x* y', 'x y -> x y*', 'x y z -> x* y z'


def placements(params, specs, state, **options):
    """The expressions that the leaves of a state get."""
    spec = for_optimizer(params, specs, **options)
    return jax.tree.leaves(describe(einshard(state, spec)))


ACROSS, DOWN, WHOLE = 'a b -> a b16', 'a b -> a16 b', 'a b -> 16 a b'
SCALAR = '... -> 16 ...'


def test_the_longest_path_wins():
    w = struct(16, 16)
    params = {'kernel': w, 'mlp': {'kernel': w}, 'deep': {'mlp': {'kernel': w}}}
    specs = {'kernel': ROWS, 'mlp': COLUMNS, 'deep': '* x y'}
    state = {'mu': params}
    assert placements(params, specs, state) == [WHOLE, DOWN, ACROSS]
    assert placements(params, specs, params) == [WHOLE, DOWN, ACROSS]
    assert placements(params, specs, {'mlp': {'other': {'kernel': w}}}) == [DOWN]


@pytest.mark.parametrize('state', [{'mykernel': 0}, {'pup': {'w': 0}}, {'w': 0}])
def test_complete_keys_are_compared(state):
    w = struct(16, 16)
    state = jax.tree.map(lambda _: w, state)
    params = {'kernel': w, 'up': {'w': w}}
    assert 'matches no parameter' in message(placements, params, ROWS, state)


def test_the_longest_path_that_fits_wins():
    """A field of the state may have the name of a module."""
    params = {'mu': {'w': struct(16, 8)}, 'w': struct(32, 16)}
    state = {'mu': params, 'nu': params}
    assert placements(params, {'mu': COLUMNS.replace('y*', 'y8 2'), 'w': ROWS}, state) == [
        'a b -> a b8 2',
        DOWN,
        'a b -> a b8 2',
        DOWN,
    ]


@pytest.mark.parametrize('params', [struct(16, 32), np.ones((16, 32)), jnp.ones((16, 32))])
def test_a_single_parameter_is_found_by_shape(params):
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    assert placements(params, ROWS, state) == [SCALAR, DOWN, DOWN]
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, params)
    assert placements(params, ROWS, state)[:4] == [SCALAR, 'a -> a16', 'a -> 16 a', 'a -> 16 a']
    assert 'matches no parameter' in message(placements, params, ROWS, struct(3, 3))


def test_sequences_and_records():
    class Pair(NamedTuple):
        first: Any
        second: Any

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class TrainState:
        step: Any
        params: Any
        opt_state: Any

    params = [Pair(struct(16, 16), struct(32, 16)), struct(16, 32)]
    state = TrainState(np.int32(0), params, jax.eval_shape(optax.adamw(1e-3).init, params))
    specs = [Pair(ROWS, COLUMNS), '* x y']
    each = [DOWN, ACROSS, WHOLE]
    spec = for_optimizer(params, specs)
    assert jax.tree.leaves(describe(einshard(state, spec))) == [SCALAR, *each, SCALAR, *each, *each]
    # in a tree of specs: only the moments are sharded further
    zero = TrainState(EVERYWHERE, specs, for_optimizer(params, specs, zero=True))
    shared = [DOWN, ACROSS, ACROSS]
    placed = jax.tree.leaves(describe(einshard(state, zero)))
    assert placed == [SCALAR, *each, SCALAR, *shared, *shared]


def test_lookahead():
    """The state of Lookahead has two copies of the parameters."""
    params = {'w': struct(16, 16), 'b': struct(16)}
    specs = {'w': ROWS, 'b': 'x*'}
    both = optax.LookaheadParams(params, params)
    state = jax.eval_shape(optax.lookahead(optax.adam(1e-3), 5, 0.5).init, both)
    each = ['a -> a16', DOWN]
    assert placements(params, specs, both) == [*each, *each]
    assert placements(params, specs, state) == [SCALAR, *each, *each, SCALAR]


def test_history_of_lbfgs():
    params = {'w': struct(16, 16)}
    state = jax.eval_shape(optax.lbfgs(memory_size=4).init, params)
    spec = for_optimizer(params, ROWS, default=EVERYWHERE)
    memory = einshard(state, spec)[0]
    assert describe(memory.diff_params_memory['w']) == 'a b c -> a b16 c'
    assert describe(memory.params['w']) == DOWN
    assert describe(memory.weights_memory) == 'a -> 16 a'


def test_flax_modules():
    nnx = pytest.importorskip('flax.nnx')

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 32, rngs=rngs)
            self.down = nnx.Linear(32, 8, rngs=rngs)

    def make():
        return nnx.Optimizer(model(), optax.adamw(1e-3), wrt=nnx.Param)

    def model():
        return Model(nnx.Rngs(0))

    rules = Rules([('^up/kernel', COLUMNS), ('^down/kernel', ROWS)], default=EVERYWHERE)
    spec = for_optimizer(nnx.state(nnx.eval_shape(model), nnx.Param), rules)
    state = einshard(nnx.state(nnx.eval_shape(make)), spec)
    adam = state['opt_state'][0]
    for moment in (adam['mu'], adam['nu']):
        for layer, expression in (('up', COLUMNS), ('down', ROWS)):
            (kernel,), (bias,) = map(
                jax.tree.leaves, (moment[layer]['kernel'], moment[layer]['bias'])
            )
            assert kernel.sharding == make_sharding(expression)
            assert bias.sharding == make_sharding(EVERYWHERE)
    for count in jax.tree.leaves([adam['count'], state['step']]):
        assert count.sharding == make_sharding(EVERYWHERE)


def test_equinox_modules():
    eqx = pytest.importorskip('equinox')
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0)))
    rules = Rules([(r'^layers/\d/weight', 'o i -> o i*')], default=EVERYWHERE)
    optimizer = optax.adamw(1e-3)
    arrays = eqx.filter(model, lambda leaf: hasattr(leaf, 'shape'))
    for params in (model, arrays):  # with and without its functions
        spec = for_optimizer(params, rules)
        state = einshard(jax.eval_shape(optimizer.init, arrays), spec)
        for layer in state[0].mu.layers:
            assert layer.weight.sharding == make_sharding('o i -> o i*')
            assert layer.bias.sharding == make_sharding(EVERYWHERE)
        placed = einshard(model, rules)  # functions are passed through
        assert placed.activation is model.activation


def test_default():
    params = {'w': struct(16, 16)}
    state = {
        'key': struct(2, dtype=np.uint32),
        'stats': struct(32),
        'mu': params,
        'n': np.int32(3),
        'f': max,
    }
    for default, key, stats in (
        (EVERYWHERE, 'a -> 16 a', 'a -> 16 a'),
        (shard_largest, 'a -> 16 a', 'a -> a16'),
        (lambda path, leaf: 'x*' if path == 'stats' else '* x', 'a -> 16 a', 'a -> a16'),
        (Rules([('key', '* x'), ('stats', 'x*')]), 'a -> 16 a', 'a -> a16'),
    ):
        placed = einshard(state, for_optimizer(params, ROWS, default=default))
        assert (describe(placed['key']), describe(placed['stats'])) == (key, stats)
        assert describe(placed['mu']['w']) == DOWN
        assert placed['f'] is max
        assert describe(placed['n']) == SCALAR
    left_alone = einshard(state, for_optimizer(params, ROWS, default=None))
    assert left_alone['key'] is state['key']


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
    assert describe(einshard({'mu': {'w': struct(16, 16)}}, spec)['mu']['w']) == DOWN


# ------------------------------------------------------------------------------------ as a spec


def test_it_is_a_spec():
    params = {'w': struct(16, 32)}
    spec = for_optimizer(params, COLUMNS)
    state = {'mu': params}
    for other in (
        spec,
        {'mu': spec},
        lambda path, leaf: spec,
        lambda path, leaf: spec(path, leaf),
        Rules([('mu', spec)]),
        Rules([], default=spec),
        copy.deepcopy(spec),
        pickle.loads(pickle.dumps(spec)),
    ):
        assert describe(einshard(state, other)['mu']['w']) == ACROSS
    assert repr(spec) == f'for_optimizer(1 parameter, {COLUMNS!r})'
    assert (
        repr(for_optimizer([], None, zero='tp'))
        == "for_optimizer(0 parameters, None, zero=('tp',))"
    )


@pytest.mark.parametrize('again', [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize('mesh', [None, 'devices', 'named'])
def test_it_may_be_copied_once_used(again, mesh):
    meshes = {None: None, 'devices': jax.devices(), 'named': mesh_of(data=8, tp=2)}
    spec = for_optimizer({'w': struct(16, 32)}, Rules([('w', COLUMNS)]), zero=True)
    state = {'mu': {'w': np.ones((16, 32), np.float32)}}
    placed = einshard(state, spec, mesh=meshes[mesh])['mu']['w']
    spec.table(state, mesh=meshes[mesh])
    again_placed = einshard(state, again(spec), mesh=meshes[mesh])['mu']['w']
    assert again_placed.sharding == placed.sharding


def test_as_the_only_spec_of_sharded():
    """It is callable, but not a function to decorate."""
    params = {'w': np.ones((16, 32), np.float32)}

    @sharded(for_optimizer(params, COLUMNS))
    def halve(state):
        return jax.tree.map(lambda leaf: leaf / 2, state)

    assert describe(halve({'mu': params})['mu']['w']) == ACROSS


def test_specs_are_resolved_in_use():
    params = {'w': struct(16, 48)}
    spec = for_optimizer(params, shard_largest, zero=True)
    for n, by_hand in (
        (16, 'x y -> x y*'),
        (4, 'x y -> x y*'),
        (5, EVERYWHERE),
        (16, 'x y -> x y*'),
    ):
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
    for one, other in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_memory_of_zero():
    """Each device has a sixteenth of the moments, from initialization on."""
    optimizer = optax.adamw(1e-2)
    params = jax.eval_shape(init, jax.random.key(0))
    moments = 2 * sum(4 * leaf.size for leaf in jax.tree.leaves(params))

    def made(spec):
        compiled = sharded(out=spec)(optimizer.init).lower(params).compile()
        return compiled.memory_analysis().output_size_in_bytes

    def stepped(rules, spec):
        state = jax.eval_shape(optimizer.init, params)
        step = sharded(rules, spec, 'b d -> b8 2 d', out=(rules, spec, None))(train(optimizer))
        compiled = step.lower(params, state, struct(32, 128)).compile()
        return compiled.memory_analysis().argument_size_in_bytes

    for rules, parts in ((REPLICATED, 1), (TENSOR, 2)):
        follows = for_optimizer(params, rules)
        zero = for_optimizer(params, rules, zero=True)
        few = 512  # the count, and a table of pointers
        assert moments // parts <= made(follows) < moments // parts + few
        assert moments // 16 <= made(zero) < moments // 16 + few
        assert stepped(rules, follows) - stepped(rules, zero) == moments // parts - moments // 16


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


def test_no_parameter():
    params = {'mlp': {'w': struct(8, 4), 'b': struct(4)}}
    state = {
        'mu': params,
        'rng': struct(2, dtype=np.uint32),
        'p': {'mlp': {'w': struct(8, 8), 'b': struct(1)}},
    }
    spec = for_optimizer(params, Rules([('', EVERYWHERE)]))
    assert message(einshard, state, spec) == expected("""
        2 arrays match no parameter by path and shape
          arrays:     'p/mlp/w' float32[8,8] (its parameter is float32[8,4]), 'rng' uint32[2]
          parameters: 'mlp/b' float32[4], 'mlp/w' float32[8,4]
          try:        default='... -> * ...', the spec for arrays that match no parameter
        """)
    assert message(einshard, struct(3), for_optimizer({}, None)) == expected("""
        1 array matches no parameter by path and shape
          arrays:     '' float32[3]
          parameters: none
          try:        default='... -> * ...', the spec for arrays that match no parameter
        """)


def test_many_without_a_parameter():
    params = [struct(8)] * 5
    error = message(einshard, {'x': [struct(7)] * 11}, for_optimizer(params, 'x*'))
    assert "'x/7' float32[7], and 3 more" in error
    assert "parameters: '0' float32[8], '1' float32[8], '2' float32[8], and 2 more" in error


def test_ambiguous_axes():
    params = {'w': struct(64, 64)}
    spec = for_optimizer(params, 'd f -> d4 f4')
    assert message(einshard, {'rows': {'w': struct(64)}}, spec) == expected("""
        ambiguous: several parameter axes have this size
          array:     float32[64], leaf 'rows/w'
          parameter: float32[64,64], parameter 'w'
          could be:  'd -> d4 4' or 'f -> 4 f4'
          instead:   pass a function (path, leaf) -> spec that decides for this leaf
        """)

    def knows(path, leaf):
        return 'd -> d4 4' if path.startswith('rows') else spec(path, leaf)

    placed = einshard({'rows': {'w': struct(64)}, 'mu': params}, knows)
    assert describe(placed['rows']['w']) == 'a -> a4 4'
    assert describe(placed['mu']['w']) == 'a b -> a4 b4'


def test_specs_that_do_not_fit_the_parameters():
    params = {'w': struct(6, 64), 'b': struct(64)}
    assert message(for_optimizer, params, {'w': ROWS}) == expected("""
        spec tree does not match: no spec for 'b' at the root
          value: model parameters, in for_optimizer
          specs: dict with w
          tree:  dict with b, w
        """)
    assert message(for_optimizer, params, {'w': ROWS, 'b': 'x**'}).startswith("'x**'")
    assert message(for_optimizer, params, 3).startswith('3 is not a spec')
    assert message(for_optimizer, params, ROWS, default=3).startswith('3 is not a spec')
    state = {'mu': params}
    error = message(einshard, state, for_optimizer(params, Rules([('w', ROWS)])))
    assert error.startswith('1 path matches no rule')
    assert 'value:    model parameters, in for_optimizer' in error
    # an error in the spec of a parameter shows that parameter
    only = {'v': {'w': struct(64)}}
    spec = for_optimizer(params, Rules([('w', 'x y -> x4 4 y')], default=EVERYWHERE))
    error = message(einshard, only, spec)
    assert error.startswith("axis 'x' (size 6) is not divisible by 4")
    assert "array:      float32[6,64], parameter 'w'" in error
    # the same where the moment has all axes
    assert "leaf 'mu/w'" in message(einshard, state, spec)


def test_mesh_axes_of_zero():
    params = {'w': struct(8, 8)}
    state = {'mu': params}
    for bad in (3, {'data'}, ('data', 2), None, b'data'):
        assert message(for_optimizer, params, ROWS, zero=bad) == (
            f'zero= must be True or names of mesh axes, not {bad!r}\n'
            "  example: zero=True (all mesh axes), zero='data', zero=('data', 'fsdp')"
        )
    assert message(einshard, state, for_optimizer(params, ROWS, zero='data')) == expected("""
        zero= names 'data', but there is no mesh
          expected:          mesh=mesh or 'with jax.set_mesh(mesh):'
          for all mesh axes: zero=True
        """)
    spec = for_optimizer(params, ROWS, zero='dta')
    mesh = mesh_of(data=4, tp=2)
    assert message(einshard, state, spec, mesh=mesh) == expected("""
        zero= names 'dta', but the mesh has no such axis
          mesh: 'data': 4, 'tp': 2 (Auto)
          try:  zero='data'
        """)
