"""Optimizer states: which parameter a leaf follows, what it gets of its spec, and ZeRO."""

import copy
import dataclasses
import pickle
import re
import textwrap
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on, shardings, struct

from einshard import (
    EinshardError,
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


def message(function, *args, **kwargs):
    with pytest.raises(EinshardError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def expected(text):
    return textwrap.dedent(text).strip('\n')


# ------------------------------------------------------------------------ the states of optax

PARAMS = {
    'attn': {'kernel': struct(256, 128), 'bias': struct(128)},
    'mlp': {'kernel': struct(128, 512), 'bias': struct(512)},
    'norm': {'scale': struct(64)},
}
# anchored, so that the rules alone would find none of the moments
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
    """The shardings of a state as optax itself tells which leaf belongs to which parameter."""

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

AXES = {'data': 2, 'fsdp': 4, 'expert': 2, 'tensor': 8}
LARGE = AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 4)
INTO, OUT_OF = ('fsdp', 'tensor'), ('tensor', 'fsdp')
# the mesh axes of each array axis, by the last two keys of the path
LLAMA = {
    'embed_tokens/embedding': OUT_OF,
    'q_proj/kernel': INTO,
    'k_proj/kernel': INTO,
    'v_proj/kernel': INTO,
    'o_proj/kernel': OUT_OF,
    'gate_proj/kernel': INTO,
    'up_proj/kernel': INTO,
    'down_proj/kernel': OUT_OF,
    'lm_head/kernel': INTO,
    'input_layernorm/weight': (None,),
    'post_attention_layernorm/weight': (None,),
    'norm/weight': (None,),
}
MIXTRAL = LLAMA | {
    'gate/kernel': ('fsdp', None),
    'w1/kernel': ('expert', 'fsdp', 'tensor'),
    'w2/kernel': ('expert', 'tensor', 'fsdp'),
    'w3/kernel': ('expert', 'fsdp', 'tensor'),
}
GPT2 = {
    'wte/embedding': (None, 'fsdp'),  # the rule says ('tensor', 'fsdp'), but 8 divides no 50,257
    'wpe/embedding': (None, 'fsdp'),
    'c_attn/kernel': INTO,
    'c_fc/kernel': INTO,
    'c_proj/kernel': OUT_OF,
    'c_attn/bias': ('tensor',),
    'c_fc/bias': ('tensor',),
    'c_proj/bias': (None,),
    **{
        f'{norm}/{kind}': (None,) for norm in ('ln_1', 'ln_2', 'ln_f') for kind in ('scale', 'bias')
    },
}
MODELS = {
    'Llama 8B': (
        model_shapes.LLAMA_8B,
        LLAMA,
        Rules(
            [
                ('embed_tokens/|[od]_proj/|down_proj/', P('tensor', 'fsdp')),
                ('^model/layers/.*_proj/kernel', 'i o -> i@fsdp o@tensor'),
                ('^lm_head', P('fsdp', 'tensor')),
                ('norm/weight$', EVERYWHERE),
            ]
        ),
    ),
    'Mixtral 8x7B': (
        model_shapes.MIXTRAL,
        MIXTRAL,
        Rules(
            [
                ('embed_tokens/|o_proj/', P('tensor', 'fsdp')),
                ('w2/kernel$', 'expert mlp embed -> expert@expert mlp@tensor embed@fsdp'),
                ('experts', P('expert', 'fsdp', 'tensor')),
                ('moe/gate/', P('fsdp')),
                ('(q|k|v)_proj/|^lm_head', P('fsdp', 'tensor')),
                ('norm/weight$', EVERYWHERE),
            ]
        ),
    ),
    'GPT-2 XL': (
        model_shapes.GPT2_XL,
        GPT2,
        Rules(
            [
                ('^transformer/wte', P('tensor', 'fsdp')),
                ('^transformer/wpe', P(None, 'fsdp')),
                ('c_proj/kernel', P('tensor', 'fsdp')),
                ('/kernel$', P('fsdp', 'tensor')),
                ('c_(attn|fc)/bias$', P('tensor')),
                ('bias$|scale$', P()),
            ],
            indivisible='replicate',
        ),
    ),
}


def by_keys(table, params):
    """The mesh axes of the axes of each parameter; as a tree whose leaves are lists."""

    def of(path, leaf):
        return list(table['/'.join(str(key.key) for key in path[-2:])])

    return jax.tree_util.tree_map_with_path(of, params)


def placed_so(axes):
    axes = list(axes)
    while axes and axes[-1] is None:
        axes.pop()
    return NamedSharding(LARGE, P(*axes))


def is_list_of_axes(node):
    return isinstance(node, list) and (not node or node[0] is None or isinstance(node[0], str))


@pytest.fixture(params=MODELS, scope='module')
def model(request):
    params, table, rules = MODELS[request.param]
    return params, by_keys(table, params), for_optimizer(params, rules)


def same_as(tree, leaf_expected, params, axes):
    """Compares the shardings of a tree of the structure of the parameters."""
    leaves, weights = jax.tree.leaves(tree), jax.tree.leaves(params)
    cut = jax.tree.leaves(axes, is_leaf=is_list_of_axes)
    assert len(leaves) == len(weights) == len(cut) > 100
    for leaf, weight, axes_of in zip(leaves, weights, cut, strict=True):
        assert leaf.sharding == placed_so(leaf_expected(weight.shape, axes_of)), (leaf, weight)


def test_moments_of_models(model):
    params, axes, spec = model
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    adam = einshard(state, spec, mesh=LARGE)[0]
    same_as(adam.mu, lambda shape, axes: axes, params, axes)
    same_as(adam.nu, lambda shape, axes: axes, params, axes)
    assert adam.count.sharding == NamedSharding(LARGE, P())


def test_factored_moments_of_models(model):
    """As optax documents: v_row lacks the largest axis, v_col the second; v is where none is."""
    params, axes, spec = model
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    factored = einshard(state, spec, mesh=LARGE)[0]

    def is_factored(shape):
        return len(shape) > 1 and sorted(shape)[-2] >= 128

    def lacking(which):
        def left(shape, axes):
            if not is_factored(shape):
                return []  # one element in the place of a moment
            axis = sorted(range(len(shape)), key=shape.__getitem__)[which]
            return [one for i, one in enumerate(axes) if i != axis]

        return left

    same_as(factored.v_row, lacking(-1), params, axes)
    same_as(factored.v_col, lacking(-2), params, axes)
    same_as(factored.v, lambda shape, axes: [] if is_factored(shape) else axes, params, axes)


FREE = ('data', 'expert')  # they cut no matrix of Llama
LLAMA_ZERO = {
    'embed_tokens/embedding': [('tensor', *FREE), 'fsdp'],
    'q_proj/kernel': [('fsdp', *FREE), 'tensor'],  # 1,024 x 512 on a device
    'k_proj/kernel': [('fsdp', *FREE), 'tensor'],
    'v_proj/kernel': [('fsdp', *FREE), 'tensor'],
    'o_proj/kernel': ['tensor', ('fsdp', *FREE)],
    'gate_proj/kernel': ['fsdp', ('tensor', *FREE)],  # 1,024 x 1,792 on a device
    'up_proj/kernel': ['fsdp', ('tensor', *FREE)],
    'down_proj/kernel': [('tensor', *FREE), 'fsdp'],
    'lm_head/kernel': ['fsdp', ('tensor', *FREE)],
    'input_layernorm/weight': [tuple(AXES)],
    'post_attention_layernorm/weight': [tuple(AXES)],
    'norm/weight': [tuple(AXES)],
}


def test_zero_on_llama():
    params, _, rules = MODELS['Llama 8B']
    spec = for_optimizer(params, rules, zero=True)
    adam = einshard(jax.eval_shape(optax.adamw(1e-3).init, params), spec, mesh=LARGE)[0]
    whole = 0
    for (path, leaf), weight in zip(
        jax.tree_util.tree_leaves_with_path(adam.mu), jax.tree.leaves(params), strict=True
    ):
        name = '/'.join(str(key.key) for key in path[-2:])
        assert leaf.sharding == NamedSharding(LARGE, P(*LLAMA_ZERO[name])), name
        whole += weight.size
    # nothing is held twice, but for the count
    table = spec.table(adam, mesh=LARGE)
    assert table.bytes_per_device == 2 * 2 * whole // 128 + 4


# --------------------------------------------------------------------------- axes that are left out


@pytest.mark.parametrize(
    ('expression', 'whole', 'left', 'by_hand'),
    [
        # counts: the devices that cut the axis hold replicas, in their place
        ('x y -> x4 y4', (8, 16), (16,), 'y -> 4 y4'),
        ('x y -> x4 y4', (8, 16), (8,), 'x -> x4 4'),
        ('x y -> y4 x4', (8, 16), (8,), 'x -> 4 x4'),
        ('x y -> x2 4 y2', (8, 16), (16,), 'y -> 8 y2'),
        # stars have the counts that they had
        ('x y -> x* y2', (8, 16), (16,), 'y -> 8 y2'),
        ('x y -> x* y2', (8, 16), (8,), 'x -> x8 2'),
        ('x y -> x* y*', (8, 16), (16,), 'y -> 4 y4'),
        ('x y -> x4* y*', (8, 16), (8,), 'x -> x8 2'),
        ('x y -> x4* y*', (8, 16), (16,), 'y -> 8 y2'),
        ('x y -> * x y', (8, 16), (16,), EVERYWHERE),
        # axes that come again, or after others
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
        # axes in front, as the history of L-BFGS
        ('x y -> x4 y4', (8, 16), (10, 8, 16), 'n x y -> n x4 y4'),
        ('a y -> a4 y4', (8, 16), (10, 2, 8, 16), 'm n a y -> m n a4 y4'),
        # placeholders and scalars
        ('x y -> x4 y4', (8, 16), (1,), EVERYWHERE),
        ('x y -> x4 y4', (8, 16), (), EVERYWHERE),
        ('x y -> x4 y4', (8, 16), (1, 1), EVERYWHERE),
    ],
)
def test_axes_left_out(expression, whole, left, by_hand):
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
        # mixed: counts keep the mesh axes that they had, and take none of the axis left out
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
        # what is replicated for its size stays so, and only that
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
def test_axes_left_out_on_a_mesh_with_names(spec, whole, left, by_hand, axis_type):
    mesh = mesh_of(types=axis_type, **NAMED)
    spec = for_optimizer({'w': struct(*whole)}, spec)
    state = {'v': {'w': np.zeros(left, np.float32)}}
    assert einshard(state, spec, mesh=mesh)['v']['w'].sharding == NamedSharding(mesh, by_hand)
    with jax.set_mesh(mesh):
        assert einshard(state, spec)['v']['w'].sharding == NamedSharding(mesh, by_hand)


def test_other_factors_than_those_of_the_one_mesh():
    twelve = jax.devices()[:12]  # as 3 x 2 x 2, on which 'x4 y3' does not fall
    spec = for_optimizer({'w': struct(8, 6)}, 'x y -> x4 y3')
    state = einshard({'row': {'w': struct(8)}, 'column': {'w': struct(6)}}, spec, mesh=twelve)
    assert state['row']['w'].sharding == make_sharding('x -> x4 3', mesh=twelve)
    held = state['column']['w'].sharding.devices_indices_map((6,))
    assert [held[device][0].start for device in twelve] == [0, 2, 4] * 4
    shared = for_optimizer({'w': struct(8, 6)}, 'x y -> x2 6 y', zero=True)
    state = einshard({'mu': {'w': struct(8, 6)}}, shared, mesh=twelve)
    assert state['mu']['w'].sharding == make_sharding('x y -> x2 y6', mesh=twelve)


def test_axis_rules_of_the_place_of_use():
    mesh = mesh_of(**NAMED)
    spec = for_optimizer({'w': struct(8, 16)}, 'batch heads')
    state = {'mu': {'w': struct(8, 16)}, 'v': {'w': struct(16)}}
    for rules, whole, left in (
        ({'batch': '@data', 'heads': '@tp'}, P('data', 'tp'), P('tp')),
        ({'heads': '@(tp,fsdp)'}, P(None, ('tp', 'fsdp')), P(('tp', 'fsdp'))),
        ({'batch': '@data'}, P('data'), P()),
    ):
        with axis_rules(**rules):
            placed = einshard(state, spec, mesh=mesh)
        assert placed['mu']['w'].sharding.spec == whole
        assert placed['v']['w'].sharding.spec == left


@pytest.mark.parametrize('shape', [(4, 4), (4, 4, 8), (8, 4, 4), (4, 8, 4)])
def test_square_kernels_of_adafactor(shape):
    """Which axes the moments have is seen in their values after one step of optax itself."""
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
    # named by optax, but not what optax leaves out: the sizes decide
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
        # in its place, behind what cuts an axis already
        ('x y -> x2 * y', (64, 256), 'x y -> x2 y*'),
        ('x y -> x y2 *', (64, 256), 'x y -> x y*'),
        ('x y -> x y2 *', (256, 64), 'x y -> y2 x*'),
        ('x y -> x2 4 y2', (64, 256), 'x y -> x8 y2'),
        # an axis that is not cut to the right goes first, though it is smaller
        ('x y -> * x y2', (64, 256), 'x y -> x8 y2'),
        ('x y -> * x2 y', (64, 256), 'x y -> y8 x2'),
        # else in front of the next cut
        ('x y -> * x y2', (3, 256), 'x y -> x y16'),
        ('x y -> * x4 y2', (64, 256), 'x y -> x8 y2'),
        ('x y -> * y4 x2', (64, 256), 'x y -> y8 x2'),
        ('x -> * x2', (64,), 'x*'),
        # replicas in several places
        ('x y -> 2 x4 2 y', (64, 256), 'x y -> y2 x4 y2'),
        ('x y -> 2 x4 2 y', (64, 3), 'x y -> x16 y'),
        ('x y z -> 2 x4 2 y z', (4, 2, 2), 'x y z -> y2 x4 z2'),
        # as many as divide, and the others again
        (EVERYWHERE, (4, 4), 'x y -> x4 y4'),
        (EVERYWHERE, (8, 2), 'x y -> x8 y2'),
        (EVERYWHERE, (8, 3), 'x y -> x8 2 y'),
        (EVERYWHERE, (3, 6), 'x y -> x y2 8'),
        ('x y -> * x y2', (4, 256), 'x y -> x4 y4'),
        # none does
        (EVERYWHERE, (3, 5), EVERYWHERE),
        (EVERYWHERE, (7,), EVERYWHERE),
        ('x y -> x2 * y', (2, 5), 'x y -> x2 * y'),
        # nothing is held twice
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
        # size on a device: 256 / 4 beside 100
        (P('data', None), (256, 100), 'fsdp', P('data', 'fsdp')),
        (P(('tp', 'fsdp')), (256, 2), True, P(('tp', 'fsdp', 'data'))),
        # counts on a mesh with names
        ('x y -> * x y2', (64, 256), True, P(None, ('tp', 'data', 'fsdp'))),
        ('x y -> * x y2', (64, 256), 'fsdp', P(None, ('tp', 'fsdp'))),
        ('x y -> * x y2', (64, 2), True, P(('data', 'fsdp'), 'tp')),
        ('x y -> * x y', (4, 2), True, P('data', 'fsdp')),
        ('x y -> x* y@data', (64, 256), True, P(('fsdp', 'tp'), 'data')),
        # what is not cut for its size holds replicas
        ('lenient', (6, 256), True, P(None, ('tp', 'data', 'fsdp'))),
        ('lenient', (6, 256), 'data', P(None, ('tp', 'data'))),
    ],
)
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_zero_on_a_mesh_with_names(spec, shape, zero, by_hand, axis_type):
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
def test_zero_with_axes_left_out(left, by_hand):
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


def followed(params, specs, state, **options):
    """The expressions that the leaves of a state get."""
    spec = for_optimizer(params, specs, **options)
    return jax.tree.leaves(describe(einshard(state, spec)))


ACROSS, DOWN, WHOLE = 'a b -> a b16', 'a b -> a16 b', 'a b -> 16 a b'
SCALAR = '... -> 16 ...'


def test_the_longest_path_is_followed():
    w = struct(16, 16)
    params = {'kernel': w, 'mlp': {'kernel': w}, 'deep': {'mlp': {'kernel': w}}}
    specs = {'kernel': ROWS, 'mlp': COLUMNS, 'deep': '* x y'}
    state = {'mu': params}
    assert followed(params, specs, state) == [WHOLE, DOWN, ACROSS]
    assert followed(params, specs, params) == [WHOLE, DOWN, ACROSS]
    assert followed(params, specs, {'mlp': {'other': {'kernel': w}}}) == [DOWN]


def test_whole_keys_are_compared():
    w = struct(16, 16)
    params = {'kernel': w, 'up': {'w': w}}
    assert 'matches no parameter' in message(followed, params, ROWS, {'mykernel': w})
    assert 'matches no parameter' in message(followed, params, ROWS, {'pup': {'w': w}})
    assert 'matches no parameter' in message(followed, params, ROWS, {'w': w})


def test_of_two_paths_the_one_whose_shape_fits():
    """A field of the state may be called as a module is."""
    params = {'mu': {'w': struct(16, 8)}, 'w': struct(32, 16)}
    state = {'mu': params, 'nu': params}
    assert followed(params, {'mu': COLUMNS.replace('y*', 'y8 2'), 'w': ROWS}, state) == [
        'a b -> a b8 2',
        DOWN,
        'a b -> a b8 2',
        DOWN,
    ]


@pytest.mark.parametrize('params', [struct(16, 32), np.ones((16, 32)), jnp.ones((16, 32))])
def test_a_single_array_is_followed_by_its_shape(params):
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    assert followed(params, ROWS, state) == [SCALAR, DOWN, DOWN]
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, params)
    assert followed(params, ROWS, state)[:4] == [SCALAR, 'a -> a16', 'a -> 16 a', 'a -> 16 a']
    assert 'matches no parameter' in message(followed, params, ROWS, struct(3, 3))


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
    # a tree of specs may hold it: here the parameters keep theirs while moments are shared out
    zero = TrainState(EVERYWHERE, specs, for_optimizer(params, specs, zero=True))
    shared = [DOWN, ACROSS, ACROSS]
    placed = jax.tree.leaves(describe(einshard(state, zero)))
    assert placed == [SCALAR, *each, SCALAR, *shared, *shared]


def test_lookahead():
    """Its parameters are twice those of the model, which are what for_optimizer is given."""
    params = {'w': struct(16, 16), 'b': struct(16)}
    specs = {'w': ROWS, 'b': 'x*'}
    both = optax.LookaheadParams(params, params)
    state = jax.eval_shape(optax.lookahead(optax.adam(1e-3), 5, 0.5).init, both)
    each = ['a -> a16', DOWN]
    assert followed(params, specs, both) == [*each, *each]
    assert followed(params, specs, state) == [SCALAR, *each, *each, SCALAR]


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
        whole = einshard((model, state), (rules, spec))  # functions are passed through
        assert whole[0].activation is model.activation


def test_leaves_that_follow_nothing():
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


def test_parameters_left_alone():
    params = {'w': struct(16, 32), 'b': struct(32)}
    state = {'mu': params, 'v': {'w': struct(16), 'b': struct(1)}}
    for zero in (False, True):
        placed = einshard(state, for_optimizer(params, {'w': None, 'b': 'x*'}, zero=zero))
        assert placed['mu']['w'] is state['mu']['w']
        assert placed['v']['w'] is state['v']['w']
        assert placed['mu']['b'].sharding == make_sharding('x*')


def test_nothing_of_the_parameters_is_kept():
    x = jnp.ones((16, 16))
    alive = weakref.ref(x)
    spec = for_optimizer({'w': x}, ROWS)
    del x
    assert alive() is None
    assert describe(einshard({'mu': {'w': struct(16, 16)}}, spec)['mu']['w']) == DOWN


# --------------------------------------------------------------------------- as a spec among others


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


def test_alone_before_a_function():
    """It can be called, but is no function to decorate."""
    params = {'w': np.ones((16, 32), np.float32)}

    @sharded(for_optimizer(params, COLUMNS))
    def halve(state):
        return jax.tree.map(lambda leaf: leaf / 2, state)

    assert describe(halve({'mu': params})['mu']['w']) == ACROSS


def test_the_place_of_use_decides():
    """Nothing is resolved before, and what was is not used for another mesh."""
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
    """Of the moments every device has a sixteenth, from their making on."""
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
    """Beside what a step sums anyway it gathers new parameters, and nothing else."""
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
          expected:   default=, a spec for such arrays: default='... -> * ...'
        """)
    assert message(einshard, struct(3), for_optimizer({}, None)) == expected("""
        1 array matches no parameter by path and shape
          arrays:     '' float32[3]
          parameters: none
          expected:   default=, a spec for such arrays: default='... -> * ...'
        """)


def test_many_without_a_parameter():
    params = [struct(8)] * 5
    error = message(einshard, {'x': [struct(7)] * 11}, for_optimizer(params, 'x*'))
    assert "'x/7' float32[7], and 3 more" in error
    assert "parameters: '0' float32[8], '1' float32[8], '2' float32[8], and 2 more" in error


def test_several_ways_to_follow():
    params = {'w': struct(64, 64)}
    spec = for_optimizer(params, 'd f -> d4 f4')
    assert message(einshard, {'rows': {'w': struct(64)}}, spec) == expected("""
        ambiguous: several parameter axes have this size
          array:     float32[64], leaf 'rows/w'
          parameter: float32[64,64], parameter 'w'
          could be:  'd -> d4 4' or 'f -> 4 f4'
          instead:   a function (path, leaf) -> spec that decides for this leaf
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
          of:    the parameters of for_optimizer
          specs: dict with w
          tree:  dict with b, w
        """)
    assert message(for_optimizer, params, {'w': ROWS, 'b': 'x**'}).startswith("'x**'")
    assert message(for_optimizer, params, 3).startswith('3 is not a spec')
    assert message(for_optimizer, params, ROWS, default=3).startswith('3 is not a spec')
    state = {'mu': params}
    error = message(einshard, state, for_optimizer(params, Rules([('w', ROWS)])))
    assert error.startswith('1 path matches no rule')
    assert 'of:       the parameters of for_optimizer' in error
    # the parameter's own fault, with its path and its shape
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
            "  example: zero=True, zero='data', zero=('data', 'fsdp')"
        )
    assert message(einshard, state, for_optimizer(params, ROWS, zero='data')) == expected("""
        zero= names 'data', but there is no mesh
          expected: mesh= or 'with jax.set_mesh(mesh):'; or zero=True
        """)
    spec = for_optimizer(params, ROWS, zero='dta')
    mesh = mesh_of(data=4, tp=2)
    assert message(einshard, state, spec, mesh=mesh) == expected("""
        zero= names 'dta', but the mesh has no such axis
          mesh: 'data': 4, 'tp': 2 (Auto)
          try:  zero='data'
        """)
