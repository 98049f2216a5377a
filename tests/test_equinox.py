"""Equinox: modules with leaves that are not arrays, and optax."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import counted
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import MESH, check_equal, check_placed

from einshard import (
    EinshardError,
    Rules,
    UnexpectedCollectives,
    check_same,
    describe,
    einshard,
    explain,
    per_device,
    shard_largest,
    sharded,
    to_jax,
)

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
    # and the module itself
    check(sharded(out=RULES)(MLP)(jax.random.key(0)))


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


def trained_as_modules():
    """The modules themselves are arguments and results."""
    model, state = sharded(out=RULES)(init)(jax.random.key(0))
    body = counted(learn)
    options = {'out': (RULES, RULES, None), 'donate_argnames': ('model', 'state')}
    f = sharded(RULES, RULES, ROWS, **options)(body)
    for _ in range(4):
        before = model
        model, state, loss = f(model, state, X)
        assert before.up.weight.is_deleted()  # donated
        assert model.activation is jax.nn.relu
        assert model.extra['name'] == 'mlp'
        yield (model, state), float(loss)
    assert body.runs == 1


@pytest.mark.parametrize('trained', [trained_by_filter_jit, trained_by_sharded, trained_as_modules])
def test_training_keeps_shardings(trained, reference):
    losses = []
    for tree, loss in trained():
        check(tree)
        losses.append(loss)
    np.testing.assert_allclose(losses, reference[0], rtol=1e-5)
    check_equal(arrays(tree), arrays(reference[1]), **CLOSE)


# ---------------------------------------------------------------------------- modules in sharded


class Layer(eqx.Module):
    """A leaf that Python code branches on, and one that it calls."""

    linear: eqx.nn.Linear
    scale: float
    activation: object = jax.nn.relu

    def __call__(self, x):
        y = jax.vmap(self.linear)(x)
        return self.activation(y) * self.scale if self.scale > 0.5 else y


LAYER_RULES = Rules([('linear/weight', 'o i -> 8 o2 i')], default='... -> * ...')


@pytest.fixture(scope='module')
def layer():
    return einshard(Layer(eqx.nn.Linear(8, 16, key=jax.random.key(0)), 2.0), LAYER_RULES)


def apply(layer, x):
    return layer(x)


def expected_of(layer, x=X):
    return eqx.filter_jit(apply)(layer, x)


def test_modules_as_by_hand(layer):
    """The same placements, HLO and numbers as `jax.jit` of the arrays with in_shardings."""
    f = sharded(LAYER_RULES, ROWS, out='b o -> b8 o2')(apply)
    dynamic, static = eqx.partition(layer, eqx.is_array)
    shardings = (jax.tree.map(lambda x: x.sharding, dynamic), f.in_shardings(layer, X)['x'])

    def by_hand(dynamic, x):
        return apply(eqx.combine(dynamic, static), x)

    by_hand.__name__ = by_hand.__qualname__ = 'apply'
    jitted = jax.jit(by_hand, in_shardings=shardings, out_shardings=f.out_shardings(layer, X))

    def instructions(lowered):
        text = lowered.compile().as_text()
        return [line.partition(', metadata=')[0] for line in text.splitlines() if ' = ' in line]

    assert instructions(f.lower(layer, X)) == instructions(jitted.lower(dynamic, X))
    np.testing.assert_array_equal(f(layer, X), jitted(dynamic, X))
    in_shardings = f.in_shardings(layer, X)['layer']
    assert in_shardings.linear.weight.is_equivalent_to(NamedSharding(MESH, P('tp')), 2)
    assert in_shardings.scale == 2.0
    struct = f.eval_shape(layer, X)
    assert struct.shape == (16, 16)
    report = explain(f, layer, X)
    assert [row.path for row in report.arguments] == [
        'layer/linear/weight',
        'layer/linear/bias',
        'x',
    ]
    assert report.arguments[0].placement == 'o i -> 8 o2 i'
    check_same(f, layer, X)
    assert "'linear/weight'" in to_jax(f, layer, X)


def test_a_changed_static_part_retraces(layer):
    body = counted(apply)
    f = sharded(LAYER_RULES, ROWS)(body)
    for n, (where, new) in enumerate(
        [('scale', 2.0), ('scale', 0.25), ('activation', jnp.tanh), ('scale', 2.0)]
    ):
        changed = eqx.tree_at(lambda layer, where=where: getattr(layer, where), layer, new)
        for _ in range(2):
            np.testing.assert_allclose(f(changed, X), expected_of(changed), rtol=1e-5)
        assert body.runs == min(n + 1, 3)
    # a function made in each call is another function
    for _ in range(2):
        f(eqx.tree_at(lambda layer: layer.activation, layer, lambda x: x), X)
    assert body.runs == 5


def test_numbers_outside_modules_are_traced(layer):
    body = counted(lambda layer, x, number: layer(x) * number)
    f = sharded(LAYER_RULES, ROWS, None)(body)
    for number in (1.0, 2.0, 3):
        np.testing.assert_allclose(f(layer, X, number), expected_of(layer) * number, rtol=1e-5)
    assert body.runs == 2  # once for floats, and once for integers


def test_modules_by_keyword_and_in_containers(layer):
    f = sharded(layers=LAYER_RULES, x=ROWS)(lambda x, *, layers: [layer(x) for layer in layers])
    for _ in range(2):
        for y in f(layers=(layer, layer), x=X):
            np.testing.assert_allclose(y, expected_of(layer), rtol=1e-5)
    assert f.lower(layers=(layer, layer), x=X).compile()


def test_a_container_of_a_module_and_numbers(layer):
    """A prefix of expressions; numbers in the container, but outside the module, are traced."""
    body = counted(lambda tree, x: {'layer': tree['layer'], 'y': tree['layer'](x) * tree['n']})
    specs = {'layer': '... -> * ...', 'n': None}
    f = sharded(specs, ROWS, out={'layer': '... -> * ...', 'y': 'b o -> b8 o 2'})(body)
    replicated = einshard(layer, Rules([], default='... -> * ...'))
    for n in (2.0, 3.0):
        result = f({'layer': replicated, 'n': n}, X)
        np.testing.assert_allclose(result['y'], expected_of(layer) * n, rtol=1e-5)
        assert result['layer'].scale == 2.0
        check_placed(arrays(result['layer']), {})
        check_placed(result['y'], {'': P('data')})
    assert body.runs == 1
    found = f.in_shardings({'layer': layer, 'n': 2.0}, X)['tree']
    assert found['n'] is None
    assert found['layer'].linear.weight.is_fully_replicated


def test_modules_in_per_device(layer):
    """Each device has all weights, and some rows."""
    f = per_device('...', ROWS, out=ROWS, mesh=MESH)(lambda layer, x: layer(x))
    np.testing.assert_allclose(f(layer_of(layer), X), expected_of(layer), rtol=1e-5)


def layer_of(layer):
    return jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, layer)


def test_a_module_of_specs(layer):
    """A pytree prefix with the structure of the module."""
    specs = jax.tree.map(lambda _: '... -> * ...', eqx.filter(layer, eqx.is_array))
    specs = eqx.tree_at(lambda specs: specs.linear.weight, specs, 'o i -> 8 o2 i')
    f = sharded(specs, ROWS, out=specs)(lambda layer, x: layer)
    weight = f.in_shardings(layer, X)['layer'].linear.weight
    assert weight.is_equivalent_to(NamedSharding(MESH, P('tp')), 2)
    check_placed(arrays(f(layer, X)), {'weight': P('tp')})


def test_methods_of_modules():
    class Method(Layer):
        @sharded(ROWS, out='b o -> b8 o2')
        def __call__(self, x):
            return super().__call__(x)

    layer = Method(eqx.nn.Linear(8, 16, key=jax.random.key(0)), 2.0)
    expected = Layer.__call__(layer, X)
    for _ in range(2):
        np.testing.assert_allclose(layer(X), expected, rtol=1e-5)
    np.testing.assert_allclose(eqx.filter_jit(apply)(layer, X), expected, rtol=1e-5)


def test_transformations_of_functions_of_modules(layer):
    f = sharded(LAYER_RULES, ROWS)(lambda layer, x: jnp.mean(layer(x) ** 2))
    plain = lambda layer, x: jnp.mean(layer(x) ** 2)  # noqa: E731
    for transform in (eqx.filter_grad, eqx.filter_jit):
        result, expected = transform(f)(layer, X), transform(plain)(layer, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)


def test_a_function_meets_modules_later(layer):
    """After calls without modules, in arguments or in results."""
    f = sharded(None, ROWS)(lambda layer, x: layer if callable(layer) else x + layer)
    np.testing.assert_array_equal(f(1.0, X), X + 1)
    np.testing.assert_array_equal(f(1.0, X), X + 1)
    for _ in range(2):
        assert f(layer, X).activation is jax.nn.relu
        np.testing.assert_array_equal(f(1.0, X), X + 1)
    born = sharded(None)(lambda x: Layer(eqx.nn.Linear(8, 8, key=x[0]), 1.0) if x.ndim else x)
    key = jax.random.key(0)
    for _ in range(2):
        assert born(key) == key
        assert born(key[None]).scale == 1.0


def test_limits_of_functions_of_modules(layer):
    f = sharded(LAYER_RULES, ROWS, out='b o -> b8 o2', collectives=())(apply)
    np.testing.assert_allclose(f(layer, X), expected_of(layer), rtol=1e-5)
    f = sharded(LAYER_RULES, ROWS, out='b o -> * b o', collectives=())(apply)
    with pytest.raises(UnexpectedCollectives):
        f(layer, X)


def test_a_module_of_arrays_runs_compiled():
    """As before: such a module is an ordinary pytree."""
    linear = einshard(eqx.nn.Linear(8, 16, key=jax.random.key(0)), '... -> * ...')
    f = sharded('... -> * ...', ROWS)(lambda linear, x: jax.vmap(linear)(x))
    x = einshard(X, ROWS)
    np.testing.assert_allclose(f.lower(linear, x).compile()(linear, x), f(linear, x))


def test_an_unhashable_static_leaf(layer):
    f = sharded(LAYER_RULES, ROWS)(apply)
    bad = eqx.tree_at(lambda layer: layer.activation, layer, {'a': {1, 2}})
    for good in (None, layer):  # before and after the fast path
        if good is not None:
            f(good, X)
        with pytest.raises(EinshardError, match='is not hashable') as error:
            f(bad, X)
        assert error.value.facts['leaf'] == "'layer/activation/a'"


# ------------------------------------------------------------------------------------------------


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
