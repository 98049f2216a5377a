"""Flax: modules of NNX by their state, variables of Linen, boxes with names of axes."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import counted
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from placed import MESH, check_equal, check_placed

from einshard import (
    EinshardError,
    Rules,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    explain,
    plan,
    shard_largest,
    sharded,
    to_jax,
)

X = np.float32(np.random.default_rng(0).normal(size=(16, 8)))
CLOSE = {'rtol': 1e-4, 'atol': 1e-5}

RULES = Rules(
    [
        ('up/kernel', 'd f -> * d f2'),
        ('(up|norm)/', 'f -> * f2'),
        ('down/kernel', 'f d -> * f2 d'),
    ],
    default='... -> * ...',
)
ROWS = 'batch d -> batch8 d 2'
SHARDED = {
    'up/kernel': P(None, 'tp'),
    **dict.fromkeys(('up/bias', 'norm/bias', 'norm/scale', 'norm/mean', 'norm/var'), P('tp')),
    'down/kernel': P('tp'),
}
# each array is in a Variable
SHARDED_NNX = {f'{path}/value': spec for path, spec in SHARDED.items()}


# ------------------------------------------------------------------------------------------ NNX


class MLP(nnx.Module):
    """State of every kind: parameters, statistics, keys and counters of a generator."""

    def __init__(self, rngs, hidden='b f -> b8 f2'):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.hidden = hidden

    def __call__(self, x):
        hidden = self.drop(self.norm(nnx.relu(self.up(x))))
        return self.down(einshard(hidden, self.hidden))


def make(hidden='b f -> b8 f2'):
    model = MLP(nnx.Rngs(0), hidden)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def learn(model, optimizer, x):
    loss, gradient = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


@pytest.fixture(scope='module')
def unsharded():
    """State of the same model on one device, then losses and state of four steps, all by Flax."""
    # in one program: operation by operation it takes seconds
    model, optimizer = nnx.jit(lambda: make(hidden=None))()
    first = jax.tree.map(jnp.copy, nnx.state(model))  # the variables are the model's own
    learn_jitted = nnx.jit(learn)
    losses = [float(learn_jitted(model, optimizer, X)) for _ in range(4)]
    return first, losses, nnx.state((model, optimizer))


def test_placed_state_updates_a_module(unsharded):
    before, *_ = unsharded
    placed = einshard(before, RULES)
    check_placed(placed, SHARDED_NNX)
    check_equal(placed, before)
    assert isinstance(placed['up']['kernel'], nnx.Param)
    assert isinstance(placed['norm']['mean'], nnx.BatchStat)
    model = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
    nnx.update(model, placed)
    check_placed(nnx.state(model), SHARDED_NNX)
    statistics = einshard(nnx.state(model, nnx.BatchStat), RULES)
    check_placed(statistics, {'mean/value': P('tp'), 'var/value': P('tp')})


def placed_by_constraint():
    modules = make()
    for module in modules:
        nnx.update(module, einshard(nnx.state(module), RULES))
    return modules


@pytest.mark.parametrize(
    'born',
    [
        lambda: sharded(out=RULES)(lambda: nnx.state(MLP(nnx.Rngs(0))))(),
        lambda: sharded(out=(None, RULES))(lambda: nnx.split(MLP(nnx.Rngs(0))))()[1],
        lambda: nnx.state(nnx.jit(placed_by_constraint)()[0]),
    ],
    ids=['state', 'split', 'nnx.jit'],
)
def test_modules_are_born_sharded(born, unsharded):
    state = born()
    check_placed(state, SHARDED_NNX)
    check_equal(state, unsharded[0], rtol=1e-6)


def trained_by_sharded():
    """The state after each of four steps, with the loss."""
    graphdef, state = sharded(out=(None, RULES))(lambda: nnx.split(make()))()

    @counted
    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss = learn(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    f = sharded(RULES, ROWS, out=(RULES, None), donate_argnames='state')(step)
    for _ in range(4):
        state, loss = f(state, X)
        yield state, float(loss)
    assert step.runs == 1


def trained_by_nnx_jit():
    model, optimizer = nnx.jit(placed_by_constraint)()

    @counted
    def step(model, optimizer, x):
        loss = learn(model, optimizer, einshard(x, ROWS))
        for module in (model, optimizer):
            nnx.update(module, einshard(nnx.state(module), RULES))
        return loss

    f = nnx.jit(step)
    for _ in range(4):
        loss = f(model, optimizer, X)
        yield nnx.state((model, optimizer)), float(loss)
    assert step.runs == 1


@pytest.mark.parametrize('trained', [trained_by_sharded, trained_by_nnx_jit])
def test_training_keeps_shardings(trained, unsharded):
    _, expected, expected_state = unsharded
    losses = []
    for state, loss in trained():
        check_placed(state, SHARDED_NNX)
        losses.append(loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    check_equal(state, expected_state, **CLOSE)
    # dropout and batch norm ran
    assert int(state[0]['drop']['rngs']['count'][...]) == 4
    assert float(jnp.abs(state[0]['norm']['mean'][...]).sum()) > 0


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(einshard(self.linear(x), 'b d -> b8 d2')))


class Deep(nnx.Module):
    """Blocks stacked for a scan, and in a list, rematerialized."""

    def __init__(self, rngs):
        self.stacked = nnx.split_rngs(splits=4)(nnx.vmap(Block))(rngs)
        self.listed = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.stacked
        )
        for block in self.listed:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


def test_stacks_and_lists_of_modules():
    rules = Rules(
        [
            ('stacked/linear/kernel', 'layer i o -> * layer i o2'),
            (r'listed/\d+/linear/kernel', 'i o -> * i o2'),
            ('stacked/drop/rngs/key', 'layer -> * layer2'),
        ],
        default='... -> * ...',
    )
    model = nnx.jit(lambda: Deep(nnx.Rngs(0)))()
    nnx.update(model, einshard(nnx.state(model), rules))
    specs_of = {
        'stacked/linear/kernel/value': P(None, None, 'tp'),
        'listed/0/linear/kernel/value': P(None, 'tp'),
        'listed/1/linear/kernel/value': P(None, 'tp'),
        'stacked/drop/rngs/key/value': P('tp'),
    }
    check_placed(nnx.state(model), specs_of)
    assert nnx.state(model)['stacked']['drop']['rngs']['key'].shape == (4,)
    expected = X
    for kernel in (*model.stacked.linear.kernel[...], *(b.linear.kernel for b in model.listed)):
        expected = np.tanh(expected @ np.asarray(kernel))
    y = nnx.jit(lambda model, x: model(x))(model, X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


def test_tied_weights():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            self.again = self.embed
            self.one = nnx.Linear(8, 8, rngs=rngs)
            self.two = nnx.Linear(8, 8, rngs=rngs)
            self.two.kernel = self.one.kernel

    model = nnx.jit(lambda: Tied(nnx.Rngs(0)))()
    rules = Rules([('embedding', 'v d -> v* d'), ('kernel', 'i o -> * i o2')], default='* f')
    nnx.update(model, einshard(nnx.state(model), rules))
    assert model.again is model.embed
    assert model.two.kernel is model.one.kernel
    specs_of = {'embedding/value': P(('data', 'tp')), 'kernel/value': P(None, 'tp')}
    check_placed(nnx.state(model), specs_of)
    # and in the state from a compiled function
    model = nnx.merge(*sharded(out=(None, rules))(lambda: nnx.split(Tied(nnx.Rngs(0))))())
    assert model.two.kernel is model.one.kernel
    check_placed(nnx.state(model), specs_of)


def test_methods_of_a_module():
    class Linear(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        @sharded(ROWS, out='batch z -> batch8 z 2')
        def __call__(self, x):
            return self.linear(x)

    model = Linear()
    for y in (model(X), nnx.jit(lambda model: model(X))(model)):
        check_placed(y, {'': P('data')})
        np.testing.assert_allclose(y, model.linear(X), rtol=1e-5, atol=1e-6)


def test_an_update_that_sharded_would_lose():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return 2 * x

    def apply(model, x):
        return model(x)

    model = Counting()
    f = sharded(None, ROWS)(apply)
    for call in (f, f.lower):
        with pytest.raises(EinshardError, match="apply updates 'model/calls' in place") as error:
            call(model, X)
        assert 'nnx.jit(apply)' in error.value.facts['instead']
    assert float(model.calls[...]) == 0
    # the other way out: return the new state
    y, state = sharded(None, ROWS)(lambda model, x: (model(x), nnx.state(model)))(model, X)
    nnx.update(model, state)
    np.testing.assert_array_equal(y, 2 * X)
    assert float(model.calls[...]) == 1
    # a module made in the function, and a function that only reads
    graphdef, state = nnx.split(model)
    for read in (lambda state, x: nnx.merge(graphdef, state)(x), lambda model, x: x * model.calls):
        sharded(None, ROWS)(read)(state if 'merge' in read.__code__.co_names else model, X)
    assert float(model.calls[...]) == 1


# ----------------------------------------------------------------------- names of axes, in boxes


def short_form(spec):
    """Axis names of Flax as an expression in the short form."""
    return ' '.join(name or free for name, free in zip(spec, 'abcdefgh', strict=False)) or '...'


NAMED_SHARDED = {'up/kernel': P(None, 'tp'), 'down/kernel': P('tp')}


def short_forms(names):
    return jax.tree.map(short_form, names, is_leaf=lambda leaf: isinstance(leaf, P))


class NamedNNX(nnx.Module):
    def __init__(self, rngs):
        def named(*names):
            return {'kernel_init': nnx.with_partitioning(nnx.initializers.lecun_normal(), names)}

        self.up = nnx.Linear(8, 16, **named('embed', 'mlp'), rngs=rngs)
        self.down = nnx.Linear(16, 8, **named('mlp', None), rngs=rngs)


def test_names_of_axes_of_nnx():
    def init():
        return nnx.state(NamedNNX(nnx.Rngs(0)))

    with nnx.use_eager_sharding(False):  # else Flax reads the names as mesh axes
        specs = short_forms(nnx.get_partition_spec(nnx.eval_shape(init)))
        with axis_rules(mlp='2'):
            state = sharded(out=specs)(init)()
        with axis_rules(mlp='@tp'):
            again = einshard(init(), specs, mesh=MESH)
    for placed in (state, again):
        check_placed(placed, {f'{path}/value': spec for path, spec in NAMED_SHARDED.items()})
    check_equal(again, state, rtol=1e-6)


def by_names(tree, *rules):
    return Rules.from_axis_names(tree, rules, default='... -> ...')


def test_rules_from_the_names_of_nnx():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([NamedNNX(rngs) for _ in range(3)])
            bias = nnx.with_partitioning(nnx.initializers.ones, ('mlp',))
            self.layers[2].out = nnx.Linear(8, 8, bias_init=bias, rngs=rngs)

    with nnx.use_eager_sharding(False):
        model = Deep(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    rules = by_names(nnx.state(model))
    assert dict(rules.rules) == {
        r'(^|/)layers/\d+/down/kernel$': 'mlp a',
        r'(^|/)layers/\d+/up/kernel$': 'embed mlp',
        r'(^|/)layers/\d+/out/bias$': 'mlp',
    }
    expected = {'layers/2/out/bias/value': P('tp')} | {
        f'layers/{i}/{path}/value': spec for i in range(3) for path, spec in NAMED_SHARDED.items()
    }
    modules = nnx.state((model, optimizer))
    with jax.set_mesh(MESH), axis_rules(mlp='@tp'):
        placed = einshard(modules, rules)
        again = einshard(modules, by_names(modules))
    check_placed(placed, expected)
    check_placed(again, expected)
    check_equal(placed, modules)


def test_rules_from_the_names_of_linen():
    model = Named()
    with axis_rules(batch='@data', mlp='@tp'), jax.set_mesh(MESH):
        rules = by_names(jax.eval_shape(model.init, jax.random.key(0), X))
        variables = jax.jit(model.init)(jax.random.key(0), X)
        state = optax.adam(1e-2).init(nn.unbox(variables))
        check_placed(einshard(nn.unbox(variables), rules), NAMED_SHARDED)
        check_placed(einshard(state, rules), NAMED_SHARDED)
        placed = einshard(variables, rules)
        check_placed(placed, {f'{path}/value': spec for path, spec in NAMED_SHARDED.items()})
        made = sharded(None, None, out=rules)(model.init)(jax.random.key(0), X)
        check_placed(made, {f'{path}/value': spec for path, spec in NAMED_SHARDED.items()})


class Array:
    """Has the attributes of a NamedArray of Haliax."""

    def __init__(self, array, axes):
        self.array, self.axes = array, axes


jax.tree_util.register_pytree_node(
    Array, lambda x: ((x.array,), x.axes), lambda axes, children: Array(children[0], axes)
)


def named_array(*names, size=8):
    axes = tuple(SimpleNamespace(name=name, size=size) for name in names)
    return Array(np.ones((size,) * len(names)), axes)


def test_rules_from_the_names_of_haliax():
    tree = {'w': named_array('embed', 'mlp'), 'b': named_array('mlp'), 'step': named_array()}
    with jax.set_mesh(MESH), axis_rules(mlp='@tp'):
        placed = einshard(tree, Rules.from_axis_names(tree))
    assert placed['w'].array.sharding.spec == P(None, 'tp')
    assert placed['b'].array.sharding.spec == P('tp')
    model = jax.eval_shape(lambda: tree)
    found = plan(
        lambda tree, x: x @ tree['w'].array,
        model,
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        mesh=jax.devices()[:4],
        objective='bytes',
        compilations=1,
    )
    assert {'embed', 'mlp'} <= {*dict(found.best.candidate.axes)} | {*found.rules}


def test_rules_from_names_match_their_own_arrays():
    def box(*names):
        return nn.LogicallyPartitioned(np.ones((8,) * len(names)), names)

    tree = {
        'w': box('mlp', None),
        'up': {'w': box(None, 'mlp')},
        'down': {'w': np.ones((8, 8))},
        'layers': [{'v': box('mlp', None)}, {'v': box(None, 'mlp')}],
        'stack': [{'v1': box('mlp')}, {'v1': box('mlp')}],
    }
    rules = by_names(tree, ('down', 'i o -> i@data o'))
    expected = {
        'up/w/value': P(None, 'tp'),
        'w/value': P('tp'),
        'down/w': P('data'),
        'layers/0/v/value': P('tp'),
        'layers/1/v/value': P(None, 'tp'),
        'stack/0/v1/value': P('tp'),
        'stack/1/v1/value': P('tp'),
    }
    with jax.set_mesh(MESH), axis_rules(mlp='@tp'):
        check_placed(einshard(tree, rules), expected)
    # also without a rule for the array without names
    with jax.set_mesh(MESH), axis_rules(mlp='@tp'):
        check_placed(einshard(tree, by_names(tree)), expected | {'down/w': P()})


def test_a_plan_of_a_module_with_keys():
    """JAX 0.10 and 0.12 export a key without a sharding with one on an empty mesh."""

    def loss(model, x):
        return jnp.mean(model(einshard(x, 'batch d')) ** 2)

    model = nnx.jit(lambda: MLP(nnx.Rngs(0), hidden='batch f'))()
    found = plan(nnx.jit(loss), model, X, mesh=jax.devices()[:4], objective='bytes', compilations=1)
    assert not found.best.error


def test_names_of_stacked_layers_of_nnx():
    """plan says which names it does not use: nnx.vmap adds an axis, but no name."""
    plans = []
    for metadata in ({}, {nnx.PARTITION_NAME: 'layers'}):

        class Stacked(nnx.Module):
            def __init__(self, metadata=metadata):
                rngs = nnx.split_rngs(splits=3)
                self.layers = rngs(nnx.vmap(NamedNNX, transform_metadata=metadata))(nnx.Rngs(0))

            def __call__(self, x):
                for i in range(3):
                    x = einshard(x, 'batch embed') @ self.layers.up.kernel[i]
                    x = x @ self.layers.down.kernel[i]
                return x

        with nnx.use_eager_sharding(False):
            model = nnx.eval_shape(Stacked)
        step = nnx.jit(lambda model, x: model(x))
        plans.append(
            plan(step, model, X, mesh=jax.devices()[:4], objective='bytes', compilations=1)
        )
    without, named = plans
    assert without.notes[0].startswith(
        "metadata names 2 axes of float32[3,16,8], leaf '0/layers/down"
    )
    assert not any('names are not used' in note for note in named.notes)
    assert 'mlp' in dict(named.best.candidate.axes)


class Named(nn.Module):
    """A module of Linen with boxes around the kernels."""

    @nn.compact
    def __call__(self, x):
        def dense(n, name, *names):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.Dense(n, kernel_init=init, name=name)

        hidden = nn.relu(dense(16, 'up', 'embed', 'mlp')(x))
        return dense(8, 'down', 'mlp', None)(einshard(hidden, 'batch mlp'))


def test_names_of_axes_of_linen():
    model = Named()
    with axis_rules(batch='@data', mlp='@tp'), jax.set_mesh(MESH):
        boxed = jax.jit(model.init)(jax.random.key(0), X)
        specs = short_forms(nn.get_partition_spec(boxed))
        assert specs['params']['down'] == {'kernel': 'mlp b', 'bias': '...'}
        variables = einshard(nn.unbox(boxed), specs)
        check_placed(variables, NAMED_SHARDED)
        y = sharded(specs, 'batch embed', out='batch embed')(model.apply)(variables, X)
        check_placed(y, {'': P('data')})
    expected = nn.unbox(boxed)['params']
    hidden = np.maximum(X @ expected['up']['kernel'], 0)
    np.testing.assert_allclose(y, hidden @ expected['down']['kernel'], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('with_names', [nn.with_partitioning, nn.with_logical_partitioning])
def test_boxes_are_kept(with_names):
    init = with_names(nn.initializers.lecun_normal(), ('embed', 'mlp'))
    boxed = jax.jit(nn.Dense(16, kernel_init=init, name='up').init)(jax.random.key(0), X)
    placed = einshard({'up': boxed['params']}, RULES)
    check_placed(placed, {'up/kernel/value': P(None, 'tp'), 'up/bias': P('tp')})
    assert type(placed['up']['kernel']) is type(boxed['params']['kernel'])
    assert placed['up']['kernel'].names == ('embed', 'mlp')
    check_equal(placed, {'up': boxed['params']})
    # the spec of a box is for its array
    placed = einshard(boxed, {'params': {'kernel': 'd f -> * d f2', 'bias': '* f'}})
    check_placed(placed, {'kernel/value': P(None, 'tp')})


# ---------------------------------------------------------------------------------------- Linen


class LinenMLP(nn.Module):
    hidden: str | None = 'b f -> b8 f2'

    @nn.compact
    def __call__(self, x, train=False):
        hidden = nn.relu(nn.Dense(16, name='up')(x))
        hidden = nn.BatchNorm(use_running_average=not train, name='norm')(hidden)
        hidden = nn.Dropout(0.5, deterministic=not train)(hidden)
        return nn.Dense(8, name='down')(einshard(hidden, self.hidden))


class State(TrainState):
    batch_stats: dict
    key: jax.Array


def linen_state(model):
    def init():
        variables = model.init(jax.random.key(0), jnp.ones((16, 8)))
        return State.create(
            apply_fn=model.apply, tx=optax.adamw(1e-2), key=jax.random.key(1), **variables
        )

    return init


def linen_step(state, x):
    def mean_loss(params):
        y, updates = state.apply_fn(
            {'params': params, 'batch_stats': state.batch_stats},
            x,
            train=True,
            mutable=['batch_stats'],
            rngs={'dropout': jax.random.fold_in(state.key, state.step)},
        )
        return jnp.mean((y - x) ** 2), updates

    (loss, updates), gradient = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradient, **updates), loss


def test_frozen_dicts():
    variables = flax.core.freeze(jax.jit(LinenMLP().init)(jax.random.key(0), X))
    placed = einshard(variables, RULES)
    assert type(placed) is flax.core.FrozenDict
    check_placed(placed, SHARDED)
    specs = flax.core.freeze({'params': RULES, 'batch_stats': 'f -> * f2'})
    check_placed(einshard(variables, specs), SHARDED)


def test_a_train_state_keeps_its_shardings():
    model, unsharded = LinenMLP(), LinenMLP(hidden=None)
    state, expected = sharded(out=RULES)(linen_state(model))(), jax.jit(linen_state(unsharded))()
    check_placed(state, SHARDED)
    body = counted(linen_step)
    step = sharded(RULES, ROWS, out=(RULES, None), donate_argnames='state')(body)
    unsharded_step = jax.jit(linen_step)
    for _ in range(4):
        state, loss = step(state, X)
        expected, expected_loss = unsharded_step(expected, X)
        check_placed(state, SHARDED)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert body.runs == 1
    assert int(state.step) == 4
    check_equal((state.params, state.batch_stats), (expected.params, expected.batch_stats), **CLOSE)


def test_layers_that_linen_scans():
    class Layer(nn.Module):
        spec: str | None

        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(einshard(nn.Dense(8, name='up')(x), self.spec)), None

    class Tower(nn.Module):
        spec: str | None = 'b d -> b8 d2'

        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Layer), variable_axes={'params': 0}, split_rngs={'params': True}, length=3
            )
            return layers(self.spec, name='layers')(x, None)[0]

    rules = Rules([('layers/up/kernel', 'l d f -> * l d f2')], default='... -> * ...')
    variables = sharded(out=rules)(Tower().init)(jax.random.key(0), jnp.ones((16, 8)))
    check_placed(variables, {'up/kernel': P(None, None, 'tp')})
    y = sharded(rules, ROWS)(Tower().apply)(variables, X)
    np.testing.assert_allclose(y, jax.jit(Tower(None).apply)(variables, X), rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- example


def test_the_example_learns(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / 'docs' / 'examples')
    import flax_nnx

    model, losses = flax_nnx.main()
    assert losses[-1] < losses[0] / 2
    specs = {'up/kernel': P(None, 'tp'), 'up/bias': P('tp'), 'down/kernel': P('tp')}
    check_placed(nnx.state(model), {f'{path}/value': spec for path, spec in specs.items()})
    assert describe(model.down.kernel[...]) == 'a b -> 8 a2 b'


def test_reports_name_the_layer():
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    graph, state = nnx.split(Mlp(nnx.Rngs(0)))
    rules = Rules([('kernel', 'i o -> i* o')], default='... -> * ...')

    @sharded(rules, 'b d -> b* d', mesh=jax.devices()[:8])
    def apply(state, x):
        return nnx.merge(graph, state)(x)

    rows = explain(apply, state, X).collectives
    assert {row.of for row in rows} == {(f'state/layers/{i}/kernel',) for i in (0, 1)}
    assert rows.counts == {'all-gather': 2}
    line = inspect.getsourcelines(Mlp.__call__)[1] + 2
    assert {row.source for row in rows} == {f'{__file__}:{line}'}


# --- suggestions for nnx.jit --------------------------------------------------------------------


def contracted(types, at):
    """Returns a model with one weight, placed as `at` says, its data and its mesh."""
    mesh = device_mesh(jax.devices()[:8], axis_types=types, data=2, tensor=4)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.down = nnx.Linear(4096, 512, use_bias=False, rngs=rngs)

        def __call__(self, x):
            kernel = self.down.kernel[...]
            if types == AxisType.Auto:
                return x @ kernel
            return jnp.einsum('bf,fd->bd', x, kernel, out_sharding=P('data', None))

    def struct(shape, spec):
        return einshard(jax.ShapeDtypeStruct(shape, jnp.float32), spec, mesh=mesh)

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    model.down.kernel.set_value(struct((4096, 512), f'f d -> {at}'))
    return model, struct((2048, 4096), 'b f -> b@data f@tensor'), mesh


TYPES = pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])


class Holder(nnx.Module):
    def __init__(self, part):
        self.part = part


def call(model, x):
    return model(x)


def call_shared(model, holder, x):
    return model(x), holder.part


@TYPES
@pytest.mark.parametrize('is_shared', [False, True])
def test_changes_of_modules_are_tried(types, is_shared):
    def report_for(at, tries):
        model, x, mesh = contracted(types, at)
        args = (model, Holder(model.down), x) if is_shared else (model, x)
        function = call_shared if is_shared else call
        with jax.set_mesh(mesh):
            return explain(nnx.jit(function), *args, tries=tries)

    report = report_for('f d@tensor', 8)
    tried = [finding for finding in report.findings if finding.tried]
    assert "shard model/down/kernel with 'a b -> a@tensor b'" in tried[0].suggestion
    by_hand = report_for('f@tensor d', 0)
    assert tried[0].tried.network_bytes == by_hand.network_bytes < report.network_bytes / 2
    assert tried[0].tried.flops == by_hand.flops
    assert 'not tried' not in [note.kind for note in report.notes]


def test_weights_that_nnx_jit_returns_are_weights():
    """Those of `jax.jit`, which returns no state, have the same cost."""
    model, x, _ = contracted(AxisType.Auto, 'f d@tensor')
    of_jax, of_nnx = (explain(jit(call), model, x, tries=0) for jit in (jax.jit, nnx.jit))
    expected, found = (
        [
            (note.text.partition(': ')[0], note.reason)
            for note in report.notes
            if note.kind == 'cost'
        ]
        for report in (of_jax, of_nnx)
    )
    assert expected == found
    assert expected[0][0] == 'all-gather of x along tensor sends 12.0 MiB'
    assert 'model/down/kernel has tensor on axis 1' in expected[0][1]


# --- to_jax ---------------------------------------------------------------------------------------


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query, self.value = (nnx.Linear(64, 64, rngs=rngs) for _ in range(2))
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in (self.query, self.value, *self.layers):
            x = nnx.relu(layer(x))
        return x


@pytest.mark.parametrize(
    'spec',
    [
        shard_largest('data', min_bytes=1024),
        Rules(
            [('value/kernel$', 'i o -> i o@data'), ('kernel$', 'i o -> i@data o')], default='...'
        ),
        Rules([('layers', '... -> ...')], default=shard_largest('data', min_bytes=1024)),
    ],
    ids=['function', 'rules', 'both'],
)
@pytest.mark.parametrize('split', [nnx.split, lambda module: (None, module)])
def test_to_jax_of_nnx_state(spec, split):
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    graph, state = split(Attention(nnx.Rngs(0)))

    def step(state, x):
        def loss(state):
            return jnp.mean((nnx.merge(graph, state) if graph else state)(x) ** 2)

        return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))

    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    ours = sharded(spec, 'b d -> b@data d', out=spec, mesh=mesh)(step)
    names = {}
    exec(to_jax(ours, state, x), names)
    theirs = names['jit_step'](step, state, state)
    texts = [f.lower(state, x).compile().as_text() for f in (ours, theirs)]
    assert hlo_without_sources(texts[0]) == hlo_without_sources(texts[1])
    exec(to_jax(spec, state, mesh=mesh), names)
    found = names['shardings'](names['RULES'], state)
    assert jax.tree.leaves(found) == jax.tree.leaves(ours.in_shardings(state, x)['state'])


def hlo_without_sources(text):
    text = re.sub(r', metadata=\{[^}]*\}', '', text)
    return [line for line in text.splitlines() if ' = ' in line]


def test_to_jax_of_rules_for_nnx_state():
    rules = Rules(
        [('value/kernel$', 'i o -> i o@data'), ('kernel$', 'i o -> i@data o')], default='...'
    )
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    state = nnx.state(Attention(nnx.Rngs(0)))
    names = {}
    exec(to_jax(rules, mesh=mesh), names)
    found = names['shardings'](names['RULES'], state)
    placed = einshard(state, rules, mesh=mesh)
    assert jax.tree.leaves(found) == [x.sharding for x in jax.tree.leaves(placed)]
