"""Reports on functions that Flax NNX and Equinox jit, compared with `jax.jit` by hand."""

import functools
import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from placed import mesh_of

from einshard import (
    DifferentResults,
    EinshardError,
    Rules,
    UnexpectedCollectives,
    assert_collectives,
    check_same,
    einshard,
    explain,
    per_device,
    plan,
    to_jax,
)

MESH = mesh_of(batch=8, tp=2)
RULES = Rules(
    [
        ('up/weight', 'o i -> o@tp i'),
        ('down/weight', 'o i -> o i@tp'),
        ('up/kernel', 'i o -> i o@tp'),
        ('down/kernel', 'i o -> i@tp o'),
    ],
    default='... -> ...',
)
NNX_PATHS = ['down/bias', 'down/kernel', 'up/bias', 'up/kernel']
EQX_PATHS = ['up/weight', 'up/bias', 'down/weight', 'down/bias']


class NnxModel(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(64, 16, rngs=nnx.Rngs(1))
        self.activation = jax.nn.relu

    def __call__(self, x):
        return self.down(self.activation(self.up(x)))

    @nnx.jit
    def run(self, x):
        return self(x)


class EqxModel(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: object

    def __init__(self):
        self.up = eqx.nn.Linear(16, 64, key=jax.random.key(0))
        self.down = eqx.nn.Linear(64, 16, key=jax.random.key(1))
        self.activation = jax.nn.relu

    def __call__(self, x):
        return self.down(self.activation(self.up(x)))

    @eqx.filter_jit
    def run(self, x):
        return jax.vmap(self)(x)


@pytest.fixture
def x():
    return einshard(np.ones((32, 16), np.float32), 'b d -> b@batch d', mesh=MESH)


@pytest.fixture
def nnx_model():
    model = NnxModel()
    nnx.update(model, einshard(nnx.state(model, nnx.Param), RULES, mesh=MESH))
    return model


@pytest.fixture
def eqx_model():
    return einshard(EqxModel(), RULES, mesh=MESH)


def rows(report):
    return {row.path: (row.array, row.placement) for row in report.arguments}


def paths(rows):
    return [row.path for row in rows]


def kinds(report):
    return [one.kind for one in (*report.findings, *report.notes)]


# --- Flax NNX -----------------------------------------------------------------------------------


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def nnx_step(model, optimizer, x, unused):
    loss, gradients = nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, gradients)
    return loss


def test_a_train_step_of_nnx(nnx_model, x):
    optimizer = nnx.Optimizer(nnx_model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(nnx_model)))
    report = explain(nnx.jit(nnx_step), nnx_model, optimizer, x, x, tries=0)
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(nnx_model)))
    jax.tree.map(np.testing.assert_array_equal, before, after)  # nothing ran

    graphdef, state = nnx.split((nnx_model, optimizer))

    @jax.jit
    def by_hand(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss = nnx_step(model, optimizer, x, None)
        return nnx.state((model, optimizer)), loss

    assert report.collectives.counts == explain(by_hand, state, x, tries=0).collectives.counts
    assert report.collectives.counts['all-reduce'] > 0
    model = [f'model/{path}' for path in NNX_PATHS]
    trace = [f'optimizer/opt_state/0/trace/{path}' for path in NNX_PATHS]
    assert paths(report.arguments) == [*model, *trace, 'optimizer/step', 'x', 'unused']
    assert rows(report)['model/up/kernel'] == ('float32[16,64]', 'a b -> a b@tp')
    assert rows(report)['unused'] == ('float32[32,16]', 'not used')
    updated = [f'result/{path}' for path in (*model, *trace, 'optimizer/step')]
    assert paths(report.results) == [*updated, 'result']
    assert 'not checked' not in kinds(report)


def test_a_forward_pass_of_nnx_updates_statistics(x):
    class Normed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

    report = explain(nnx.jit(lambda model, x: {'y': model.norm(x)}), Normed(), x, tries=0)
    norm = [f'model/norm/{name}' for name in ('bias', 'mean', 'scale', 'var')]
    assert paths(report.arguments) == [*norm, 'x']
    assert paths(report.results) == [*(f'result/{path}' for path in norm), 'result/y']


def test_stages_of_nnx(nnx_model, x):
    forward = nnx.jit(lambda model, x: model(x))
    traced, lowered = forward.trace(nnx_model, x), forward.lower(nnx_model, x)
    expected = rows(explain(forward, nnx_model, x, tries=0))
    assert list(expected) == [*(f'model/{path}' for path in NNX_PATHS), 'x']
    for stage in (traced, lowered, lowered.compile(), lowered.lowered):
        assert rows(explain(stage, tries=0)) == expected
        assert_collectives(stage, allowed={'all-reduce': 1})
        with pytest.raises(UnexpectedCollectives):
            assert_collectives(stage, allowed=())
    with pytest.raises(EinshardError, match='already has its arguments'):
        explain(lowered, x, tries=0)


@pytest.mark.parametrize('option', ['graph', 'graph_updates'])
def test_nnx_without_graphs(nnx_model, x, option):
    if option not in inspect.signature(nnx.jit).parameters:
        pytest.skip('not in this version of Flax')
    report = explain(
        nnx.jit(lambda model, x: model(x), **{option: False}), nnx_model.up, x, tries=0
    )
    assert len(report.arguments) == 3
    assert paths(report.results) == ['result']


def test_checks_of_nnx(nnx_model, x):
    forward = nnx.jit(lambda model, x: model(x))
    assert_collectives(forward, nnx_model, x, allowed={'all-reduce': 1})
    with pytest.raises(UnexpectedCollectives):
        assert_collectives(forward, nnx_model, x, allowed=())
    check_same(forward, nnx_model, x, gradients=False)


def test_checks_of_nnx_compare_updates(nnx_model, x):
    """A train step returns only its loss; the new parameters and moments are compared too."""
    optimizer = nnx.Optimizer(nnx_model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    comparison = check_same(nnx.jit(nnx_step), nnx_model, optimizer, x, x)
    updated = [f'model/{path}' for path in NNX_PATHS]
    updated += [f'optimizer/opt_state/0/trace/{path}' for path in NNX_PATHS]
    rows = [row.path for row in comparison.rows if not row.path.startswith('gradient')]
    assert sorted(rows) == sorted(
        ['result', *(f'result/{path}' for path in updated), 'result/optimizer/step']
    )
    forward = check_same(nnx.jit(lambda model, x: model(x)), nnx_model, x, gradients=False)
    assert [row.path for row in forward.rows] == ['result']  # it updates nothing


def test_a_wrong_update_of_nnx(nnx_model, x):
    def step(model, x):
        @per_device('b d -> b@batch d', out='d', mesh=MESH, check_vma=False)
        def wrong(x):
            return x.sum(0)  # of this device's rows, without a psum

        model.down.bias[...] += wrong(x)

    with pytest.raises(DifferentResults, match='result/model/down/bias'):
        check_same(nnx.jit(step), nnx_model, x)


# --- Equinox ------------------------------------------------------------------------------------


def eqx_loss(model, x, *more, scale=None):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def test_equinox_as_by_hand(eqx_model, x):
    arrays, static = eqx.partition(eqx_model, eqx.is_array)
    loss = jax.value_and_grad(lambda arrays, x: eqx_loss(eqx.combine(arrays, static), x))
    by_hand = explain(jax.jit(loss), arrays, x, tries=0)
    report = explain(eqx.filter_jit(eqx.filter_value_and_grad(eqx_loss)), eqx_model, x, tries=0)
    assert report.collectives.counts == by_hand.collectives.counts
    assert report.collectives.counts['all-reduce'] > 0
    assert report.flops == by_hand.flops
    assert list(rows(report).values()) == list(rows(by_hand).values())
    assert kinds(report) == kinds(by_hand)
    gradients = [f'result/1/{path}' for path in EQX_PATHS]
    assert paths(report.results) == ['result/0', *gradients]


def test_paths_of_equinox_in_any_order(eqx_model, x):
    call = {'scale': x, 'x': x, 'model': eqx_model}  # the order of keywords does not matter
    expected = [*(f'model/{path}' for path in EQX_PATHS), 'x', 'scale']
    assert paths(explain(eqx.filter_jit(eqx_loss), **call, tries=0).arguments) == expected


@pytest.mark.parametrize(
    ('donate', 'by_number'), [('all', (0, 1)), ('all-except-first', 1), ('none', ())]
)
def test_donations_of_equinox(eqx_model, x, donate, by_number):
    def step(model, x):
        return eqx_loss(model, x), x + 1, eqx.filter(model, eqx.is_array)

    arrays, static = eqx.partition(eqx_model, eqx.is_array)
    by_hand = explain(
        jax.jit(lambda model, x: step(eqx.combine(model, static), x), donate_argnums=by_number),
        arrays,
        x,
        tries=0,
    )
    report = explain(eqx.filter_jit(step, donate=donate), eqx_model, x, tries=0)
    assert {*report.in_place} == {*by_hand.in_place}
    assert bool(report.in_place) == (donate != 'none')
    assert rows(report) == rows(by_hand)  # a dict: Equinox sorts donated arrays first


def test_stages_of_equinox_have_no_paths(eqx_model, x):
    lowered = eqx.filter_jit(eqx_loss).lower(eqx_model, x)
    for stage in (lowered, lowered.compile()):
        report = explain(stage, tries=0)
        first = [f'first argument, leaf {i}' for i in range(4)]
        assert paths(report.arguments) == [*first, 'other arguments, leaf 0']
        assert paths(report.results) == ['result']
        assert 'not checked' in kinds(report)
        assert_collectives(stage, allowed='all-reduce')


def test_checks_of_results_with_static_leaves(eqx_model, x):
    """The result is a module, whose activation function is not compared."""

    def step(model, x):
        return {'model': model, 'x': 2 * x, 'name': 'step'}

    comparison = check_same(eqx.filter_jit(step), eqx_model, x)
    results = [f'result/model/{path}' for path in EQX_PATHS]
    assert [row.path for row in comparison.rows[:5]] == [*results, 'result/x']


def test_constraints_in_equinox_functions(eqx_model, x):
    @eqx.filter_jit
    def forward(model, x):
        einshard(x, 'b d -> b@batch d', mesh=MESH)  # without effect
        return einshard(jax.vmap(model)(x), 'b d -> b@batch d', mesh=MESH)

    (finding,) = explain(forward, eqx_model, x, tries=0).findings
    assert finding.kind == 'no effect'
    assert "NamedSharding(mesh, P('batch'))" in to_jax(forward, eqx_model, x)


def test_arrays_of_an_equinox_function(eqx_model, x):
    """The function may be a module itself."""
    of_batch = eqx.filter_jit(eqx.Partial(eqx_loss, eqx_model))
    report = explain(of_batch, x, tries=0)
    model = [f'eqx_loss/args/0/{path}' for path in EQX_PATHS]
    assert sorted(paths(report.arguments)) == sorted([*model, 'args[0]'])
    assert report.collectives.counts == explain(of_batch.lower(x), tries=0).collectives.counts


def test_an_equinox_function_closes_over_arrays(eqx_model, x):
    report = explain(eqx.filter_jit(lambda model, y: eqx_loss(model, y + x)), eqx_model, x, tries=0)
    assert paths(report.arguments) == [*(f'model/{path}' for path in EQX_PATHS), 'y']


def test_checks_of_equinox(eqx_model, x):
    loss = eqx.filter_jit(eqx_loss)
    assert_collectives(loss, eqx_model, x, allowed='all-reduce')
    with pytest.raises(UnexpectedCollectives):
        assert_collectives(loss, eqx_model, x, allowed=())
    check_same(loss, eqx_model, x, gradients=False)


# --- methods, and devices you don't have --------------------------------------------------------


class NnxCall(NnxModel):
    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


class EqxCall(EqxModel):
    @eqx.filter_jit
    def __call__(self, x):
        return jax.vmap(super().__call__)(x)


class Scale(eqx.Module):
    weight: jax.Array

    @jax.jit
    def run(self, x):
        return self.weight * x


@pytest.mark.parametrize('cls', [NnxCall, EqxCall])
def test_modules_with_a_jitted_call(x, cls):
    model = cls()
    assert paths(explain(model, x, tries=0).arguments) == paths(
        explain(cls.__call__, model, x, tries=0).arguments
    )
    assert_collectives(model, x, allowed=())
    check_same(model, x, gradients=False)
    assert model(x).shape == (32, 16)  # as before


def test_a_jitted_method_of_equinox(x):
    report = explain(Scale(jnp.ones(16)).run, x, tries=0)
    assert paths(report.arguments) == ['self/weight', 'x']


def shapes_of(tree):
    """The arrays as ShapeDtypeStructs, with their shardings."""

    def struct(leaf):
        is_array = isinstance(leaf, jax.Array)
        return (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if is_array
            else leaf
        )

    return jax.tree.map(struct, tree)


def test_equinox_with_shapes_is_as_with_arrays(eqx_model, x):
    """Equinox itself takes shapes for static values, and fails in the function."""
    loss = eqx.filter_jit(eqx.filter_value_and_grad(eqx_loss))
    with pytest.raises(Exception, match=r'.'):
        loss.lower(shapes_of(eqx_model), shapes_of(x))
    expected, report = (
        explain(loss, eqx_model, x, tries=0),
        explain(loss, shapes_of(eqx_model), shapes_of(x), tries=0),
    )
    assert report.collectives.counts == expected.collectives.counts
    assert report.collectives.counts['all-reduce'] > 0
    assert report.flops == expected.flops
    assert rows(report) == rows(expected)
    assert report.results == expected.results
    assert_collectives(loss, shapes_of(eqx_model), shapes_of(x), allowed='all-reduce')


def two_results(x, model):
    return eqx.filter(model, eqx.is_array), x + 1


@pytest.mark.parametrize('donate', ['all', 'all-except-first', 'none'])
def test_equinox_with_shapes_donates(eqx_model, x, donate):
    step = eqx.filter_jit(two_results, donate=donate)
    expected = explain(step, x, eqx_model, tries=0).in_place
    assert {*explain(step, shapes_of(x), shapes_of(eqx_model), tries=0).in_place} == {*expected}
    assert bool(expected) == (donate != 'none')


def test_shapes_in_an_equinox_function(eqx_model, x):
    """The function itself may be a module with shapes."""
    vmapped = eqx.filter_jit(eqx.filter_vmap(shapes_of(eqx_model)))
    report = explain(vmapped, shapes_of(x), tries=0)
    model = [f'_VmapWrapper/_fun/{path}' for path in EQX_PATHS]
    assert sorted(paths(report.arguments)) == sorted([*model, 'x'])
    assert report.collectives.counts == {'all-reduce': 1}


@pytest.mark.parametrize('kind', ['nnx_model', 'eqx_model'])
def test_frameworks_with_mesh(request, x, kind):
    """mesh= replaces the devices of all arrays, including those of `self`."""
    model = request.getfixturevalue(kind)
    mesh = mesh_of(jax.devices()[:4], batch=4)
    x = einshard(jax.ShapeDtypeStruct(x.shape, x.dtype), 'b d -> b@batch d', mesh=mesh)
    for call in (model.run, functools.partial(type(model).run, model)):
        report = explain(call, x, mesh=mesh, tries=0)
        placements = {path: placement for path, (_, placement) in rows(report).items()}
        assert placements.pop('x') == 'a b -> a@batch b'
        assert {*placements.values()} <= {'a -> 4 a', 'a b -> 4 a b'}
        assert report.collectives.counts == {}
    assert 'plan for' in str(plan_of(type(model).run, model))


def plan_of(run, model):
    def step(model, x):
        return einshard(run(model, einshard(x, 'batch d')), 'batch d')

    jit = nnx.jit if isinstance(model, nnx.Module) else eqx.filter_jit
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    return plan(jit(step), model, x, mesh=jax.devices()[:4], objective='bytes', compilations=1)


def test_a_failed_call_leaves_a_module_as_it_was(nnx_model, x):
    before = nnx.to_pure_dict(nnx.state(nnx_model))

    def fails(model, x):
        model.up.kernel[...] += 1
        del model.down.bias
        return model(x[0])

    for call in (explain, check_same, functools.partial(assert_collectives, allowed=())):
        with pytest.raises((EinshardError, TypeError)):
            call(nnx.jit(fails), nnx_model, jnp.ones((4, 3)))
        after = nnx.to_pure_dict(nnx.state(nnx_model))
        assert jax.tree.structure(after) == jax.tree.structure(before)
        jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_method_that_updates_its_module(x):
    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] += 1
            return x

    model = Counting()
    for call in (model, model.__call__):
        with pytest.raises(
            EinshardError, match='updates a module that is not an argument'
        ) as error:
            explain(call, x, tries=0)
        assert error.value.facts['instead'].endswith(f'nnx.jit({Counting.__call__.__qualname__})')
    assert model.count[...] == 0
    report = explain(nnx.jit(Counting.__call__), model, x, tries=0)  # the way out
    assert paths(report.results) == ['result/self/count', 'result']


def test_rules_and_reports_have_the_same_paths(nnx_model, x):
    """Also if JAX flattens the module: without the 'value' of the variables."""
    seen = []
    einshard(nnx.state(nnx_model, nnx.Param), lambda path, leaf: seen.append(path), mesh=MESH)
    assert seen == NNX_PATHS
    report = explain(lambda model, x: model(x), nnx_model, x, tries=0)
    assert paths(report.arguments) == [*(f'model/{path}' for path in NNX_PATHS), 'x']
    comparison = check_same(lambda model, x: model(x), nnx_model, x)
    assert [row.path for row in comparison.rows][1:] == [
        f'gradient of {path}' for path in paths(report.arguments)
    ]


def test_two_arguments_share_a_module(nnx_model, x):
    """NNX passes the arrays once: they have the path in the first argument."""
    report = explain(nnx.jit(lambda a, b, x: a(x) + b(x)), nnx_model, nnx_model, x, tries=0)
    assert paths(report.arguments) == [*(f'a/{path}' for path in NNX_PATHS), 'x']


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name='up')(x)


class LinenMethod(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name='up')(x)


@pytest.mark.parametrize('jitted', [nn.jit(LinenModel), LinenMethod])
def test_linen_jit(x, jitted):
    variables = jitted().init(jax.random.key(0), x)
    variables = einshard(variables, Rules([('kernel', 'i o -> i@tp o')], default='...'), mesh=MESH)
    report = explain(jitted().apply, variables, x, tries=0)
    expected = explain(jax.jit(LinenModel().apply), variables, x, tries=0)
    assert report.collectives.counts == expected.collectives.counts == {'all-reduce': 1}
    assert report.flops == expected.flops
    assert [row.path.split('/')[-1] for row in report.arguments[:2]] == ['bias', 'kernel']
    assert (
        explain(jitted().apply, shapes_of(variables), shapes_of(x), tries=0).flops == expected.flops
    )
    check_same(jitted().apply, variables, x, gradients=False)
    assert explain(jitted().apply, variables, x, mesh=MESH, tries=0).n_devices == 16


# --- both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['nnx_model', 'eqx_model'])
def test_bound_methods_and_partials(request, x, kind):
    model = request.getfixturevalue(kind)
    jitted = type(model).run
    expected = rows(explain(jitted, model, x, tries=0))
    assert all(path.startswith('self/') or path == 'x' for path in expected)
    for bound in (model.run, functools.partial(jitted, model)):
        assert rows(explain(bound, x, tries=0)) == expected


def test_methods_and_partials_of_jax():
    class Scaled:
        @functools.partial(jax.jit, static_argnums=0, donate_argnames='x')
        def run(self, x):
            return 2 * x

    scaled, x = Scaled(), jnp.ones(3)
    for call in (scaled.run, functools.partial(Scaled.run, scaled)):
        report = explain(call, x, tries=0)
        assert report.in_place == (('result', 'x'),)


def test_an_unjitted_function_of_an_equinox_module(eqx_model, x):
    with pytest.raises(EinshardError) as error:
        explain(eqx_loss, eqx_model, x, tries=0)
    assert error.value.facts['instead'] == 'equinox.filter_jit(eqx_loss)'


@pytest.mark.parametrize('fails', [False, True])
def test_a_function_that_something_else_jits(fails):
    class Jitted:
        def __call__(self, x):
            return float(x) if fails else x

        def trace(self, x):
            return 'a trace'

        lower = trace

    with pytest.raises(EinshardError, match='not by JAX, Flax or Equinox') as error:
        explain(Jitted(), jnp.ones(3), tries=0)
    instead = None if fails else 'jax.jit(lambda *args: Jitted(*args))'
    assert error.value.facts.get('instead') == instead


class Operator(eqx.Module):
    """A linear operator, whose methods have the names of those of jitted functions."""

    factor: float = 3.0
    __wrapped__ = None

    def __call__(self, x):
        return self.factor * x

    def trace(self):
        return self.factor

    def lower(self):
        return self


def test_a_module_with_the_attributes_of_a_jitted_function(x):
    report, by_hand = explain(Operator(), x, tries=0), explain(lambda x: 3.0 * x, x, tries=0)
    assert paths(report.results) == ['result']
    assert (report.results, report.memory) == (by_hand.results, by_hand.memory)
    check_same(Operator(), x)


# --- suggestions --------------------------------------------------------------------------------

FOUR_BY_TWO = mesh_of(jax.devices()[:8], batch=4, tp=2)


class Mlp(eqx.Module):
    up: jax.Array
    down: jax.Array
    activation: object  # a leaf that is no array

    def __call__(self, x):
        h = einshard(self.activation(x @ self.up), 'b f -> b f@tp', mesh=FOUR_BY_TWO)
        return einshard(h @ self.down, 'b d -> b@batch d', mesh=FOUR_BY_TWO)


def mlp_and_batch():
    """The batch is sharded; a constraint in the model drops it."""
    up = einshard(np.ones((512, 2048), np.float32), 'd f -> d f@tp', mesh=FOUR_BY_TWO)
    down = einshard(np.ones((2048, 512), np.float32), 'f d -> f@tp d', mesh=FOUR_BY_TWO)
    x = einshard(np.ones((2048, 512), np.float32), 'b d -> b@batch d', mesh=FOUR_BY_TWO)
    return Mlp(up, down, jax.nn.silu), x


def call_mlp(model, x, scale):
    return {'y': model(x) * scale, 'model': model}


@pytest.mark.parametrize('of', [lambda tree: tree, shapes_of], ids=['arrays', 'shapes'])
def test_suggestions_for_equinox_are_those_for_jax(of):
    model, x = mlp_and_batch()
    arrays, static = eqx.partition(of(model), lambda leaf: leaf is not jax.nn.silu)
    by_hand = jax.jit(lambda arrays, x: call_mlp(eqx.combine(arrays, static), x, 2.0)['y'])
    (expected,) = explain(by_hand, arrays, of(x), tries=4).findings
    report = explain(eqx.filter_jit(call_mlp), of(model), of(x), 2.0, tries=4)
    (finding,) = report.findings
    # the model, which Equinox returns, is written too: the bounds are larger
    without_bounds, of_jax = (
        re.sub(r' \(sum of lower bounds .*\)', '', each.suggestion) for each in (finding, expected)
    )
    assert without_bounds == of_jax
    assert of_jax.startswith('remove the constraint in test_frameworks.py:')
    tried, by_hand = finding.tried, expected.tried
    assert (tried.network_bytes, tried.flops) == (by_hand.network_bytes, by_hand.flops)
    assert tried.before.network_bytes == by_hand.before.network_bytes == report.network_bytes
    assert '+        h = self.activation(x @ self.up)\n' in report.patch()
    with pytest.raises(EinshardError, match='that Flax or Equinox jits cannot be applied'):
        report.fixed_function()


@pytest.mark.parametrize('of', [lambda tree: tree, shapes_of], ids=['arrays', 'shapes'])
def test_suggestions_for_a_function_of_equinox_with_arrays(of):
    model, x = mlp_and_batch()
    report = explain(eqx.filter_jit(eqx.Partial(of(model))), of(x), tries=4)
    (finding,) = report.findings
    assert finding.tried.network_bytes < 0.5 * report.network_bytes


@pytest.mark.parametrize('of', [lambda tree: tree, shapes_of], ids=['arrays', 'shapes'])
def test_arguments_of_equinox_are_moved(of):
    def update(model, x):
        def loss(model):
            return jnp.mean((model.activation(x @ model.up) @ model.down) ** 2)

        return eqx.apply_updates(model, eqx.filter_grad(loss)(model))

    model, x = einshard(mlp_and_batch(), '... -> ...', mesh=FOUR_BY_TWO)
    report = explain(eqx.filter_jit(update), of(model), of(x), tries=4)
    (finding,) = report.findings
    assert finding.kind == 'placement'
    assert finding.tried.flops < 0.3 * finding.tried.before.flops
    patch = report.patch()
    assert patch.startswith('# shard ')
    # eqx.filter_jit has no out_shardings=
    *code, last = (line.removeprefix('# ') for line in patch.rstrip().splitlines()[1:])
    assert last == 'of the results: return einshard(..., result, mesh=mesh)'
    names = {'einshard': einshard, 'Rules': Rules, 'model': of(model), 'mesh': FOUR_BY_TWO}
    exec('\n'.join(code), names)
    pinned = eqx.filter_jit(
        lambda *args: einshard(update(*args), names['result'], mesh=FOUR_BY_TWO)
    )
    after = explain(pinned, names['model'], of(x), tries=0)
    assert (after.network_bytes, after.flops) == (finding.tried.network_bytes, finding.tried.flops)


def test_suggestions_for_nnx():
    class Model(nnx.Module):
        def __init__(self, model):
            self.up, self.down = nnx.Param(model.up), nnx.Param(model.down)

        def __call__(self, x):
            return Mlp(self.up[...], self.down[...], jax.nn.silu)(x)

    model, x = mlp_and_batch()
    report = explain(nnx.jit(lambda m, x: (m(x), m)), Model(model), x, tries=4)
    (finding,) = report.findings
    assert finding.tried.network_bytes < 0.5 * report.network_bytes


def test_large_state_of_frameworks_that_is_not_donated():
    """`eqx.filter_jit` has no `donate_argnums=`."""

    def step(w, m, x):
        m = {'w': 0.9 * m['w'] + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w['w'])}
        return {'w': w['w'] - 0.1 * m['w']}, m

    w = {'w': einshard(np.ones((4096, 4096), np.float32), 'd f -> d f@tp', mesh=FOUR_BY_TWO)}
    x = einshard(np.ones((64, 4096), np.float32), 'b d -> b@batch d', mesh=FOUR_BY_TWO)

    def donations(step, *args):
        return [
            note.text for note in explain(step, *args, tries=0).notes if note.kind == 'donation'
        ]

    for args in ((w, w, x), shapes_of((w, w, x))):
        (text,) = donations(eqx.filter_jit(step), *args)
        assert text.endswith("; eqx.filter_jit(..., donate='all') frees them")
        assert donations(eqx.filter_jit(step, donate='all'), *args) == []
    with pytest.raises(ValueError, match='donate_argnums'):
        eqx.filter_jit(step, donate_argnums=0)
    (text,) = donations(nnx.jit(step), w, w, x)
    assert text.endswith('; donate_argnums= frees them')
    assert donations(nnx.jit(step, donate_argnums=(0, 1)), w, w, x) == []
