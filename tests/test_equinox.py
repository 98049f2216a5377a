"""Equinox: modules with leaves that are not arrays, and optax."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import counted
from jax.sharding import PartitionSpec as P
from placed import check_equal, check_placed

from einshard import Rules, describe, einshard, shard_largest, sharded

X = np.float32(np.random.default_rng(0).normal(size=(16, 8)))
CLOSE = {'rtol': 1e-4, 'atol': 1e-5}

RULES = Rules(
    [
        ('up/weight', 'f d -> * f2 d'),
        ('up/bias', 'f -> * f2'),
        ('down/weight', 'd f -> * d f2'),
        ('noise', 'k -> k8 2'),
    ],
    default='... -> * ...',
)
ROWS = 'batch d -> batch8 d 2'
SHARDED = {'up/weight': P('tp'), 'up/bias': P('tp'), 'down/weight': P(None, 'tp')}
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 10))
)


class MLP(eqx.Module):
    """Leaves of every kind: arrays, typed keys, a function, a string, and no bias."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    noise: jax.Array
    activation: object
    extra: dict
    depth: int = eqx.field(static=True, default=2)

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.up = eqx.nn.Linear(8, 16, key=first)
        self.down = eqx.nn.Linear(16, 8, use_bias=False, key=second)
        self.noise = jax.random.split(third, 8)
        self.activation = jax.nn.relu
        self.extra = {'name': 'mlp', 'scales': [jnp.ones(8), None]}

    def __call__(self, x):
        noise = 0.1 * jax.random.normal(self.noise[0], (16,))
        hidden = self.activation(self.up(x)) + noise
        return self.down(hidden) * self.extra['scales'][0]


def initialized(init):
    return eqx.filter_jit(init)(jax.random.key(0))  # operation by operation it takes seconds


def arrays(tree):
    return eqx.filter(tree, eqx.is_array)


def init(key):
    model = MLP(key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


UNSHARDED = eqx.filter_jit(init)
BORN = eqx.filter_jit(lambda key: einshard(init(key), RULES))


def mean_loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def learn(model, state, x):
    loss, gradient = eqx.filter_value_and_grad(mean_loss)(model, x)
    updates, state = OPTIMIZER.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


@pytest.fixture(scope='module')
def reference():
    """Losses, model and optimizer state of four steps on one device, without einshard."""
    model, state = UNSHARDED(jax.random.key(0))
    learn_jitted = eqx.filter_jit(learn)
    losses = []
    for _ in range(4):
        model, state, loss = learn_jitted(model, state, X)
        losses.append(float(loss))
    return losses, (model, state)


def check(tree):
    """The model and the moments of the optimizer are sharded by the rules."""
    noise = {'noise': P('data')}  # moments have none
    check_placed(arrays(tree), SHARDED | noise)
    if isinstance(tree, tuple):
        for moments in (tree[1][1][0].mu, tree[1][1][0].nu):
            check_placed(moments, SHARDED)


def test_a_module_is_placed_as_it_is():
    model, _ = UNSHARDED(jax.random.key(0))
    placed = einshard(model, RULES)
    check(placed)
    check_equal(arrays(placed), arrays(model))
    assert placed.activation is jax.nn.relu
    assert placed.extra['name'] == 'mlp'
    assert placed.extra['scales'][1] is None
    assert placed.down.bias is None
    assert jnp.issubdtype(placed.noise.dtype, jax.dtypes.prng_key)
    apply = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    np.testing.assert_allclose(apply(placed, X), apply(model, X), rtol=1e-5, atol=1e-6)


def test_numbers_in_a_module_are_not_placed():
    """Equinox treats leaves that are not arrays as static: Python code can branch on them."""
    model = {'drop': eqx.nn.Dropout(0.5), 'norm': eqx.nn.LayerNorm(8)}
    placed = einshard(model, Rules([], default='... -> * ...'))
    assert placed['drop'].inference is False
    assert placed['drop'].p == 0.5
    dropped = eqx.filter_jit(placed['drop'])(jnp.ones(100), key=jax.random.key(0))
    assert set(np.unique(dropped)) == {0.0, 2.0}


def test_no_device_holds_an_unsharded_weight():
    @eqx.filter_jit
    def init(key):
        return einshard(eqx.nn.Linear(1024, 1024, use_bias=False, key=key), shard_largest)

    figures = init.lower(jax.random.key(0)).compile().compiled.memory_analysis()
    assert figures.output_size_in_bytes + figures.temp_size_in_bytes < 4 * 1024 * 1024


def test_modules_are_born_sharded_by_sharded():
    params = sharded(out=RULES)(lambda key: arrays(MLP(key)))(jax.random.key(0))
    shapes = eqx.filter_eval_shape(MLP, jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    model = eqx.combine(params, static)
    check(model)
    assert jax.tree.structure(model) == jax.tree.structure(UNSHARDED(jax.random.key(0))[0])


def trained_by_filter_jit():
    """The model and the state after each of four steps, with the loss."""
    model, state = BORN(jax.random.key(0))

    @counted
    def step(x, model, state):
        model, state, loss = learn(model, state, einshard(x, ROWS))
        return *einshard((model, state), RULES), loss

    f = eqx.filter_jit(step, donate='all-except-first')
    for _ in range(4):
        model, state, loss = f(X, model, state)
        yield (model, state), float(loss)
    assert step.runs == 1


def trained_by_sharded():
    model, state = einshard(UNSHARDED(jax.random.key(0)), RULES)
    params, static = eqx.partition(model, eqx.is_array)

    @counted
    def step(params, state, x):
        model, state, loss = learn(eqx.combine(params, static), state, x)
        return arrays(model), state, loss

    options = {'out': (RULES, RULES, None), 'donate_argnames': ('params', 'state')}
    f = sharded(RULES, RULES, ROWS, **options)(step)
    for _ in range(4):
        params, state, loss = f(params, state, X)
        yield (params, state), float(loss)
    assert step.runs == 1


@pytest.mark.parametrize('trained', [trained_by_filter_jit, trained_by_sharded])
def test_training_keeps_shardings(trained, reference):
    losses = []
    for tree, loss in trained():
        check(tree)
        losses.append(loss)
    np.testing.assert_allclose(losses, reference[0], rtol=1e-5)
    check_equal(arrays(tree), arrays(reference[1]), **CLOSE)


def test_statistics_of_batch_norm():
    class Normed(eqx.Module):
        up: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.up = eqx.nn.Linear(8, 16, key=key)
            self.norm = eqx.nn.BatchNorm(16, 'batch', mode='batch')

        def __call__(self, x, state):
            return self.norm(self.up(x), state)

    model, state = initialized(eqx.nn.make_with_state(Normed))
    vmapped = eqx.filter_vmap(
        lambda model, state, x: model(x, state),
        in_axes=(None, None, 0),
        out_axes=(0, None),
        axis_name='batch',
    )
    params, static = eqx.partition(model, eqx.is_array)
    params, placed = einshard((params, state), RULES)
    check_placed(params, {'up/weight': P('tp'), 'up/bias': P('tp')})
    check_placed(placed, {})

    @counted
    def step(params, state, x):
        return vmapped(eqx.combine(params, static), state, x)

    f = sharded(RULES, '... -> * ...', ROWS, out=(None, '... -> * ...'))(step)
    for _ in range(3):
        y, placed = f(params, placed, X)
        expected, state = eqx.filter_jit(vmapped)(model, state, X)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        check_placed(placed, {})
        check_equal(placed, state, **CLOSE)
    assert step.runs == 1


def test_shared_layers():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            embed = eqx.nn.Embedding(16, 8, key=key)
            linear = eqx.nn.Linear(8, 16, use_bias=False, key=key)
            self.shared = eqx.nn.Shared(
                (embed, linear), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
            )

        def __call__(self, token):
            embed, linear = self.shared()
            return linear(embed(token))

    model = initialized(Tied)
    placed = einshard(model, Rules([('0/weight', 'v d -> v* d')]))
    check_placed(arrays(placed), {'weight': P(('data', 'tp'))})
    embed, linear = placed.shared()
    assert embed.weight is linear.weight
    np.testing.assert_allclose(placed(3), model(3), rtol=1e-5)


def test_the_example_learns(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / 'docs' / 'examples')
    import equinox_mlp

    model, losses = equinox_mlp.main()
    assert losses[-1] < losses[0] / 2
    specs = {'0/weight': P('tp'), '0/bias': P('tp'), '1/weight': P(None, 'tp')}
    check_placed(arrays(model), specs)
    assert describe(model.layers[1].weight) == 'a b -> 8 a b2'
