"""Plans of steps without axis names."""

import subprocess
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import struct

from einshard import EinshardError, device_mesh, einshard, explain, plan, topology

EIGHT = device_mesh(jax.devices()[:8])
OPTIONS = {'mesh': EIGHT, 'chip': 'TPU v5e', 'compilations': 4}
D, F, B, L = 128, 512, 1024, 4


def loss(params, x, y):
    def layer(h, w):
        return h + jax.nn.relu(h @ w['up']) @ w['down'], None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, params['layers'])
    return jnp.mean((h @ params['head'] - y) ** 2)


def step(state, x, y):
    params, momentum = state
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value


PARAMS = {
    'layers': {'up': struct(L, D, F), 'down': struct(L, F, D)},
    'head': struct(D, D // 2),
}
ARGUMENTS = ((PARAMS, PARAMS), struct(B, D), struct(B, D // 2))


def arrays(seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape, scale=0.05), x.dtype), ARGUMENTS
    )


@pytest.fixture(scope='module')
def found():
    return plan(jax.jit(step, donate_argnums=0), *ARGUMENTS, **OPTIONS)


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def bound(report):
    return sum(each.seconds for each in report.bounds)


# --- names ----------------------------------------------------------------------------------------


def test_names_follow_what_operations_link(found):
    sizes = {name: size for name, size in found.sizes.items() if 'activation' not in name}
    assert sizes['batch'] == B
    assert sizes['layers'] == L
    assert sizes['width'] == D
    [hidden] = [name for name, size in sizes.items() if size == F]
    assert hidden in ('down_up', 'up_down')
    # of the width, weights and activations have names of their own
    assert found.sizes['activation_width'] == D
    assert 'activation_batch' not in found.sizes


# --- the plan -------------------------------------------------------------------------------------


def by_hand(mesh, weights, data):
    """The step with its arguments placed."""
    state, x, y = ARGUMENTS

    def placed(path, leaf):
        keys = [key.key for key in path if hasattr(key, 'key')]
        return leaf.update(sharding=NamedSharding(mesh, weights.get(keys[-1], P())))

    state = jax.tree_util.tree_map_with_path(placed, state)
    x, y = (leaf.update(sharding=NamedSharding(mesh, data)) for leaf in (x, y))
    report = explain(jax.jit(step, donate_argnums=0), state, x, y, chip='TPU v5e', tries=0)
    return bound(report)


def test_not_worse_than_by_hand(found):
    mesh = Mesh(EIGHT.devices.reshape(-1), ('x',))
    tensor = {'up': P(None, None, 'x'), 'down': P(None, 'x', None)}
    best = min(
        by_hand(mesh, {}, P('x')),
        by_hand(mesh, tensor, P()),
        by_hand(mesh, {'up': P(None, 'x'), 'down': P(None, None, 'x'), 'head': P('x')}, P('x')),
    )
    assert bound(found.explain()) <= 1.02 * best
    assert found.rules['batch']


def test_the_step_as_it_is_has_a_row(found):
    [i] = [i for i, one in enumerate(found.choices) if one.candidate.is_given]
    assert found.choices[i].seconds[1] > found.best.seconds[1]
    assert bound(found.explain(i)) == pytest.approx(found.choices[i].seconds[1])
    assert len(found.choices) == OPTIONS['compilations'] + 1


def test_rows_are_what_explain_says(found):
    for i, one in enumerate(found.choices):
        report = found.explain(i)
        assert report.network_bytes == one.network_bytes
        assert report.memory.total == one.memory
        assert bound(report) == pytest.approx(one.seconds[1])


def test_values_are_those_of_the_step(found):
    state, x, y = arrays()
    expected = step(state, x, y)
    result = found.function()(*arrays())
    jax.tree.map(assert_close, result, expected)
    placed = found.place(*arrays())
    assert placed[1].sharding.mesh.shape == found.mesh.shape
    result = jax.jit(step, donate_argnums=0)(*placed)
    jax.tree.map(assert_close, result, expected)


def test_shardings_are_in_shardings(found):
    jitted = jax.jit(step, in_shardings=found.shardings)
    compiled = jitted.lower(*ARGUMENTS).compile()
    expected = jax.tree.leaves(found.shardings)
    assert jax.tree.leaves(compiled.input_shardings[0]) == expected
    shapes = jax.tree.leaves(found.place(*ARGUMENTS))
    assert [x.sharding for x in shapes] == expected


def test_code_places_the_arguments(found):
    """What is printed is run, and compared with the shardings."""
    state, x, y = arrays()
    names = {'state': state, 'x': x, 'y': y}
    exec('\n'.join(found._code()), names)
    placed = jax.tree.leaves((names['state'], names['x'], names['y']))
    for array, sharding in zip(placed, jax.tree.leaves(found.shardings), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


@pytest.mark.slow
def test_pins_and_candidates():
    pinned = plan(step, *ARGUMENTS, pin={'batch': '', 'width': '@x'}, **OPTIONS)
    assert pinned.rules['width'] == '@x'
    assert not pinned.rules['batch']
    ours = {'data': 4, 'tensor': 2}, {'batch': '@data', 'width': '@data'}
    found = plan(step, *ARGUMENTS, candidates=[ours], **OPTIONS)
    assert ours[0] in [dict(one.candidate.mesh) for one in found.choices]


@pytest.mark.slow
def test_memory_is_a_limit():
    """Replicated, weights and momentum take 4.4 MiB; with the least memory, an eighth."""
    found = plan(step, *ARGUMENTS, **OPTIONS | {'objective': 'memory'})
    [as_it_is] = [one for one in found.choices if one.candidate.is_given]
    assert found.best.memory < as_it_is.memory / 3


@pytest.mark.slow
def test_arguments_that_are_placed():
    """The step as it is has the placements of its arguments."""
    mesh = Mesh(EIGHT.devices.reshape(-1), ('devices',))
    state, x, y = ARGUMENTS
    x, y = (leaf.update(sharding=NamedSharding(mesh, P('devices'))) for leaf in (x, y))
    found = plan(step, state, x, y, **OPTIONS)
    [as_it_is] = [one for one in found.choices if one.candidate.is_given]
    expected = explain(step, state, x, y, chip='TPU v5e', tries=0)
    assert as_it_is.memory < 2 * expected.memory.total
    assert as_it_is.seconds[1] <= 1.02 * bound(expected)
    assert found.best.seconds[1] <= as_it_is.seconds[1]


def test_the_step_as_it_is_may_be_the_best():
    """Its code has a bare PartitionSpec, and `plan` has the mesh, which is in no context."""
    mesh = device_mesh(jax.devices()[:8], data=8)

    @jax.jit
    def step(w, x):
        def loss(w):
            return (jax.lax.with_sharding_constraint(x @ w, P('data')) ** 2).mean()

        return w - 0.1 * jax.grad(loss)(w)

    w = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((4096, 64), np.float32, sharding=NamedSharding(mesh, P('data')))
    found = plan(step, w, x, mesh=mesh, compilations=1, chip='TPU v5e')
    assert found.best.candidate.is_given
    assert "x = einshard(x, 'a b -> a@data b', mesh=mesh)" in str(found)


@pytest.mark.parametrize('given', [pytest.param(True, marks=pytest.mark.slow), False])
def test_code_that_names_mesh_axes_keeps_the_mesh(given):
    mesh = Mesh(EIGHT.devices.reshape(4, 2), ('data', 'tensor'))

    def constrained(state, x, y):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data')))
        return step(state, x, y)

    found = plan(constrained, *ARGUMENTS, **OPTIONS | ({'mesh': mesh} if given else {}))
    assert {one.candidate.mesh for one in found.choices} == {(('data', 4), ('tensor', 2))}
    assert found.mesh == mesh


@pytest.mark.slow
def test_a_jit_that_places_its_arguments():
    """The step as it is has its `in_shardings=`, and plans keep their mesh."""
    mesh = Mesh(EIGHT.devices.reshape(4, 2), ('data', 'tensor'))
    data, replicated = NamedSharding(mesh, P('data')), NamedSharding(mesh, P())
    jitted = jax.jit(step, in_shardings=(replicated, data, data))
    found = plan(jitted, *ARGUMENTS, **OPTIONS)
    [as_it_is] = [one for one in found.choices if one.candidate.is_given]
    assert {one.candidate.mesh for one in found.choices} == {(('data', 4), ('tensor', 2))}
    state, x, y = ARGUMENTS
    x, y = (leaf.update(sharding=data) for leaf in (x, y))
    state = jax.tree.map(lambda leaf: leaf.update(sharding=replicated), state)
    by_hand = plan(step, state, x, y, **OPTIONS | {'mesh': mesh})
    [expected] = [one for one in by_hand.choices if one.candidate.is_given]
    assert as_it_is.seconds == pytest.approx(expected.seconds)
    assert as_it_is.memory == expected.memory
    assert found.best.seconds[1] <= as_it_is.seconds[1]
    expected = step(*arrays())
    jax.tree.map(assert_close, found.function()(*arrays()), expected)


def test_code_on_explicit_axes():
    """Its types refuse some plans; these are rows with an error."""
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = Mesh(EIGHT.devices.reshape(4, 2), ('data', 'tensor'), axis_types=types)

    def typed(w, x):
        h = jnp.einsum('bi,io->bo', x, w['up'], out_sharding=P('data'))
        return jnp.einsum('bi,io->bo', jax.nn.relu(h), w['down'], out_sharding=P('data'))

    w, x = {'up': struct(D, F), 'down': struct(F, D)}, struct(B, D)
    found = plan(typed, w, x, **OPTIONS | {'mesh': mesh})
    assert found.best.candidate.placements['batch'] == '@data'
    assert found.mesh == mesh
    with jax.set_mesh(mesh):
        report = explain(jax.jit(typed), *found.place(w, x), chip='TPU v5e', tries=0)
    assert report.network_bytes == 0


def test_names_of_mesh_axes_in_metadata_are_no_names():
    """They say where an axis is, not what it is."""
    nnx = pytest.importorskip('flax.nnx')
    mesh = Mesh(EIGHT.devices.reshape(4, 2), ('data', 'tensor'))

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            up = nnx.with_partitioning(init, ('data', 'tensor'))
            down = nnx.with_partitioning(init, ('data', 'tensor'))
            self.up = nnx.Linear(D, F, kernel_init=up, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(F, D, kernel_init=down, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    with nnx.use_eager_sharding(False):
        model = Mlp(nnx.Rngs(0))
    forward = nnx.jit(lambda model, x: model(x))
    found = plan(forward, model, struct(B, D), **OPTIONS | {'mesh': mesh})
    assert {'data', 'tensor'}.isdisjoint(found.sizes)
    assert {D, F, B} <= {*found.sizes.values()}


@pytest.mark.slow
def test_a_patch_applies(tmp_path, monkeypatch):
    """The patched step, with its arguments placed, has the costs of the plan."""
    source = """\
    import jax
    import jax.numpy as jnp


    def loss(w, tokens):
        x = w['embed'][tokens]
        for layer in w['layers']:
            x = x + jax.nn.relu(x @ layer['up']) @ layer['down']
        return jnp.mean((x @ w['head']) ** 2)


    @jax.jit
    def train(w, tokens):
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, tokens))
    """
    (tmp_path / 'unplanned.py').write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import unplanned

    layer = {'up': struct(256, 1024), 'down': struct(1024, 256)}
    w = {'embed': struct(4096, 256), 'head': struct(256, 64), 'layers': [layer] * 2}
    tokens = jax.ShapeDtypeStruct((64, 64), jnp.int32)
    found = plan(unplanned.train, w, tokens, pin={'batch': '@x', 'width': '@x'}, **OPTIONS)
    patch = found.patch()
    assert 'with_sharding_constraint' in patch
    subprocess.run(['patch', '-p1'], input=patch, text=True, check=True, capture_output=True)
    names = {}
    exec(compile((tmp_path / 'unplanned.py').read_text(), 'unplanned.py', 'exec'), names)
    with jax.set_mesh(found.mesh):
        report = explain(names['train'], *found.place(w, tokens), chip='TPU v5e', tries=0)
    expected = explain(found.function(), w, tokens, chip='TPU v5e', tries=0)
    assert report.network_bytes == expected.network_bytes
    assert report.memory.total == expected.memory.total


@pytest.mark.slow
def test_flax_nnx():
    nnx = pytest.importorskip('flax.nnx')

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(D, F, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.relu(self.up(x)))

    @nnx.jit
    def train(model, x):
        gradients = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda a, b: a - b, nnx.state(model), gradients))

    model, x = Mlp(nnx.Rngs(0)), jnp.ones((B, D))
    found = plan(train, model, x, constraints=False, **OPTIONS)
    placed, y = found.place(model, x)
    assert isinstance(placed, Mlp)
    assert y.sharding.mesh.shape == found.mesh.shape
    report, expected = explain(train, placed, y, tries=0), found.explain()
    rows = [(row.array, row.placement) for row in report.arguments]
    assert rows == [(row.array, row.placement) for row in expected.arguments]
    assert any('@' in placement for _, placement in rows)
    with pytest.raises(EinshardError, match='Flax or Equinox jits'):
        found.function()


def test_keys_of_random_numbers_have_their_own_axes():
    """In the compiled module, a key has one axis more."""

    def noisy(key, x, w):
        return jnp.tanh(x @ w + jax.random.normal(key, (B, D)))

    found = plan(noisy, jax.random.key(0), struct(B, D), struct(D, D), **OPTIONS)
    assert sorted({size for sizes in found.sizes.values() for size in np.ravel(sizes)}) == [D, B]
    assert found.shardings[0].is_fully_replicated


@pytest.mark.slow
def test_equinox():
    eqx = pytest.importorskip('equinox')
    model = eqx.nn.MLP(D, D, F, 2, key=jax.random.key(0))

    @eqx.filter_jit
    def train(model, x):
        gradients = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(jnp.negative, gradients))

    x = jnp.ones((B, D))
    found = plan(train, model, x, constraints=False, **OPTIONS)
    placed, y = found.place(model, x)
    report, expected = explain(train, placed, y, tries=0), found.explain()
    rows = [(row.array, row.placement) for row in report.arguments]
    assert rows == [(row.array, row.placement) for row in expected.arguments]
    assert any('@' in placement for _, placement in rows)


@pytest.mark.slow
def test_topology():
    found = plan(step, *ARGUMENTS, mesh=topology('v5e:2x4'), compilations=3)
    assert found.best.costs_from == 'compiler'
    [as_it_is] = [one for one in found.choices if one.candidate.is_given]
    assert found.best.seconds[1] < as_it_is.seconds[1]
    assert bound(found.explain()) == pytest.approx(found.best.seconds[1])


# --- bad input ------------------------------------------------------------------------------------


def test_nothing_divides():
    with pytest.raises(EinshardError, match='can be sharded over this mesh'):
        plan(lambda w, x: x @ w, struct(7, 5), struct(3, 7), **OPTIONS)


def test_does_not_trace():
    with pytest.raises(EinshardError, match='tracing'):
        plan(lambda w, x: x @ w, struct(8, 8), struct(4, 4), **OPTIONS)


def test_other_arguments(found):
    with pytest.raises(EinshardError, match='not the arguments of step'):
        found.place(ARGUMENTS[0])


def test_a_function_with_names_has_no_place():
    found = plan(lambda x: einshard(x, 'batch width') * 2, struct(64, 64), **OPTIONS)
    with pytest.raises(EinshardError, match='has axis names, which the plan places'):
        found.place(struct(64, 64))
