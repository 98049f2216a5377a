"""What makes the next call compile again, donations that free nothing, and dense groups."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import Chip, device_mesh, einshard, explain

MESH = device_mesh(jax.devices()[:8], data=4, model=2)


def put(x, *spec):
    return jax.device_put(jnp.asarray(x, jnp.float32), NamedSharding(MESH, P(*spec)))


def kinds(rows):
    return [row.kind for row in rows]


def loss(p, batch):
    return jnp.mean((jax.nn.relu(batch @ p['up'] + p['b']) @ p['down']) ** 2)


def test_result_that_is_sharded_unlike_the_next_argument():
    @jax.jit
    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    params = {
        'up': put(np.ones((256, 1024)), None, 'model'),
        'b': put(np.zeros(1024)),
        'down': put(np.ones((1024, 256)), 'model', None),
    }
    batch = put(np.ones((8192, 256)), 'data')
    report = explain(step, params, batch, tries=4)
    (finding,) = report.findings
    assert finding.kind == 'second compile'
    assert "result/b is sharded as 'a -> a@model'" in finding.text
    assert finding.tried is not None
    # the function with the suggestion returns its state as it was given
    fixed = report.fixed_function()
    after = fixed(params, batch)
    for name, x in params.items():
        assert after[name].sharding.is_equivalent_to(x.sharding, x.ndim)
    assert not step(params, batch)['b'].sharding.is_equivalent_to(params['b'].sharding, 1)
    assert kinds(explain(fixed, params, batch, tries=0).findings) == []


def test_results_that_are_pinned_together():
    """They have the costs of all, and say so."""

    def loss(p, batch):
        return jnp.mean((jax.nn.relu(batch @ p['up'] * p['s'] + p['b']) @ p['down']) ** 2)

    @jax.jit
    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    params = {
        'up': put(np.ones((256, 1024)), None, 'model'),
        's': put(np.ones((1, 1024))),
        'b': put(np.zeros(1024)),
        'down': put(np.ones((1024, 256)), 'model', None),
    }
    one, other = explain(step, params, put(np.ones((8192, 256)), 'data'), tries=4).findings
    assert one.kind == other.kind == 'second compile'
    assert one.tried == other.tried
    for finding in (one, other):
        assert finding.suggestion.endswith(' (tried for 2 findings together)')


def test_results_of_equinox_are_constrained():
    """`eqx.filter_jit` has no `out_shardings=`."""
    eqx = pytest.importorskip('equinox')

    def step(params, batch, at_end=lambda params: params):
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))
        return at_end(new)

    params = {
        'up': put(np.ones((256, 1024)), None, 'model'),
        'b': put(np.zeros(1024)),
        'down': put(np.ones((1024, 256)), 'model', None),
    }
    batch = put(np.ones((8192, 256)), 'data')
    (finding,) = explain(eqx.filter_jit(step), params, batch, tries=4).findings
    text = "constrain it with einshard before the function returns: 'a -> 8 a'"
    assert finding.suggestion == text
    assert finding.tried is not None

    def as_given(params):
        return {**params, 'b': einshard(params['b'], 'a -> 8 a', mesh=MESH)}

    assert explain(eqx.filter_jit(step), params, batch, as_given, tries=0).findings == ()


ZERO = device_mesh(jax.devices()[:8], x=2, y=4)


def zero_step(p, m, x, t):
    """ZeRO-1 without `out_shardings=`: states are sharded, weights replicated."""

    def loss(p):
        return jnp.mean((jax.nn.relu(x @ p['w1']) @ p['w2'] - t) ** 2)

    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(loss)(p))
    return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m


def zero_arguments(spec='a b -> a b', state='a b -> a@x b@y'):
    shapes = {'w1': (1024, 2048), 'w2': (2048, 1024)}
    p = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = einshard(jax.ShapeDtypeStruct((4096, 1024), jnp.float32), 'b d -> b@x d', mesh=ZERO)
    return einshard(p, spec, mesh=ZERO), einshard(p, state, mesh=ZERO), x, x


@pytest.mark.slow
@pytest.mark.parametrize(('donate', 'nested'), [((), False), ((0, 1), True)])
def test_second_compile_of_sharded_states(donate, nested):
    """What is suggested costs no more than what the next call runs anyway."""

    def outer(*arguments):
        return jax.jit(zero_step)(*arguments)

    step = jax.jit(outer if nested else zero_step, donate_argnums=donate)
    arguments = zero_arguments()
    report = explain(step, *arguments, chip='TPU v5e', tries=4)
    for finding in report.findings:
        if finding.tried is not None:
            assert finding.tried.bound <= 1.01 * finding.tried.before.bound
    (finding,) = (one for one in report.findings if one.kind == 'second compile')
    assert 'out= or out_shardings=' in finding.suggestion
    # with the suggestions, the next call has the arguments of this one
    fixed = report.fixed_function()
    values = [
        jax.tree.map(lambda s: jax.device_put(np.ones(s.shape, s.dtype), s.sharding), a)
        for a in arguments
    ]
    p, m = fixed(*values)
    again = fixed(p, m, *values[2:])
    for old, new in zip(jax.tree.leaves((p, m)), jax.tree.leaves(again), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, 2)


def mlp(x, ws):
    for w in ws['w']:
        x = jax.nn.relu(x @ w)
    return (x**2).mean()


@pytest.mark.parametrize(
    ('function', 'of'),
    [
        (jax.grad(mlp, 1), lambda gradients: gradients),
        (jax.value_and_grad(mlp, 1), lambda gradients: (None, gradients)),
        (
            jax.grad(jax.jit(lambda x, ws: jax.checkpoint(mlp)(x, ws)), 1),
            lambda gradients: gradients,
        ),
    ],
    ids=['grad', 'value_and_grad', 'nested'],
)
def test_gradients_are_pinned_like_their_weights(function, of):
    mesh = device_mesh(jax.devices()[:8], fsdp=8)
    sharding = NamedSharding(mesh, P('fsdp', None))
    ws = {'w': [jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)] * 3}
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32, sharding=sharding)
    # replicated weights, which send less, do not fit
    chip = Chip('ours', {'f32': 1e14}, memory=40 * 2**20, memory_bandwidth=8e11, link=9e10)
    report = explain(jax.jit(function), x, ws, chip=chip, tries=4)
    (finding,) = report.findings
    assert finding.kind == 'replicated result'
    assert 'are replicated, but their weights ws/w/0-2 are sharded: 12.0 MiB on' in finding.text
    assert finding.suggestion == "pin them with out= or out_shardings=: 'a b -> a@fsdp b'"
    # as written by hand
    by_hand = jax.jit(function, out_shardings=of({'w': [sharding] * 3}))
    after = explain(by_hand, x, ws, chip=chip, tries=0)
    assert after.findings == ()
    assert finding.tried.network_bytes == after.network_bytes
    assert finding.tried.memory == after.memory.total
    assert finding.tried.bound <= finding.tried.before.bound
    assert report.memory.results - after.memory.results == 3 * 2**22 * 7 // 8
    values = [jax.device_put(np.ones(s.shape, s.dtype), s.sharding) for s in (x, *ws['w'])]
    found = report.fixed_function()(values[0], {'w': values[1:]})
    for w in jax.tree.leaves(found)[-3:]:
        assert w.sharding.is_equivalent_to(sharding, 2)


def init(params):
    return {'count': jnp.zeros([], jnp.int32), 'mu': jax.tree.map(jnp.zeros_like, params)}


@pytest.mark.parametrize('in_context', [False, True])
@pytest.mark.parametrize('kind', ['jit', 'nested', 'optax', 'equinox'])
def test_new_states_that_are_not_sharded(kind, in_context):
    """JAX drops the unused arguments of init, and makes all states on one device."""
    sharding = NamedSharding(MESH, P('data', 'model'))
    w = jax.device_put(np.ones((1024, 1024), np.float32), sharding)
    params = {'layers': [{'w': w}, {'w': w}]}
    function = jax.jit(init)
    if kind == 'nested':
        function = jax.jit(lambda params: jax.jit(init)(params))
    if kind == 'optax':
        function = jax.jit(pytest.importorskip('optax').sgd(0.1, momentum=0.9).init)
    if kind == 'equinox':
        function = pytest.importorskip('equinox').filter_jit(init)
    with jax.set_mesh(MESH) if in_context else contextlib.nullcontext():
        made = function(params)
        report = explain(function, params, tries=1)
    states = [x for x in jax.tree.leaves(made) if x.ndim]
    assert all(x.sharding.shard_shape(x.shape) == x.shape for x in states)  # what JAX does
    (finding,) = report.findings
    assert finding.kind == 'unsharded new states'
    assert ('replicated' if in_context else 'on one device') in finding.text
    assert '8.0 MiB on ' in finding.text
    assert finding.text.endswith('instead of 1.0 MiB')
    if kind != 'equinox':
        needs = 'out_shardings=: compiled so, the program needs 1.0 MiB instead of 8.0 MiB'
        assert finding.suggestion.endswith(needs)
    # with out_shardings=, or where values are used, nothing is said
    like = jax.tree.map(lambda x: x.sharding, params)
    good = jax.jit(init, out_shardings={'count': None, 'mu': like})
    assert explain(good, params, tries=0).findings == ()
    assert explain(jax.jit(lambda p: jax.tree.map(jnp.copy, p)), params, tries=0).findings == ()


def test_new_states_of_new_parameters():
    """XLA replicates what is filled with a constant. A bias of zeros is not a state."""
    optax = pytest.importorskip('optax')

    def create(key):
        layers = [
            {'w': einshard(jax.random.normal(key, (1024, 1024)), 'i o -> i o@model', mesh=MESH)}
            for _ in range(2)
        ]
        bias = [jnp.zeros(2**20), einshard(jnp.zeros(2**20), 'i -> i@model', mesh=MESH)]
        params = [{**layer, 'b': b} for layer, b in zip(layers, bias, strict=True)]
        return {'params': params, 'state': optax.adam(1e-3).init(layers)}

    shardings = jax.jit(create).lower(jax.random.key(0)).compile().output_shardings
    assert all(x.is_fully_replicated for x in jax.tree.leaves(shardings['state']))
    (finding,) = explain(jax.jit(create), jax.random.key(0), tries=0).findings
    assert finding.kind == 'unsharded new states'
    n_shards = MESH.shape['model']
    assert finding.text == (
        'result/state/0/{mu,nu}/0-1/w are replicated, but their parameters result/params/0-1/w are '
        f'sharded: 16.0 MiB on each device instead of {16 / n_shards:.1f} MiB'
    )


def struct(shape, spec, dtype=jnp.float32):
    return einshard(jax.ShapeDtypeStruct(shape, dtype), spec, mesh=MESH)


def adam(p, m, x):
    g = jax.grad(lambda p: jnp.mean((x @ p['w']) ** 2))(p)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
    return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m


def test_large_state_that_is_not_donated():
    w = {'w': struct((4096, 4096), 'd f -> d f@model')}
    x = struct((64, 4096), 'b d -> b@data d')
    (note,) = [n for n in explain(jax.jit(adam), w, w, x, tries=0).notes if n.kind == 'donation']
    assert note.bytes == 2 * 4096 * 2048 * 4
    assert 'not donated' in note.text
    report = explain(jax.jit(adam, donate_argnums=(0, 1)), w, w, x, tries=0)
    assert 'donation' not in kinds(report.notes)


def bare_adam(w, m, v, x):
    """Adam of an array that is passed bare, as are its states."""
    value, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g**2
    return w - 0.1 * m / jnp.sqrt(v + 1e-8), m, v, value


def test_states_that_are_passed_bare_and_not_donated():
    w = struct((4096, 4096), 'd f -> d f@model')
    x = struct((64, 4096), 'b d -> b@data d')
    report = explain(jax.jit(bare_adam), w, w, w, x, tries=0)
    (note,) = [n for n in report.notes if n.kind == 'donation']
    assert note.text.startswith('{w,m,v} are replaced by results, and not donated')
    assert note.bytes == 3 * 4096 * 2048 * 4
    report = explain(jax.jit(bare_adam, donate_argnums=(1, 2)), w, w, w, x, tries=0)
    (note,) = [n for n in report.notes if n.kind == 'donation']
    assert note.text.startswith('w is replaced by results, and not donated')
    report = explain(jax.jit(bare_adam, donate_argnums=(0, 1, 2)), w, w, w, x, tries=0)
    assert 'donation' not in kinds(report.notes)


@pytest.mark.parametrize('write', [jax.lax.dynamic_update_slice, None])
def test_cache_that_is_passed_bare_and_not_donated(write):
    def decode(w, cache, x, at):
        key = x @ w
        if write is None:
            cache = cache.at[:, at].set(key)
        else:
            cache = write(cache, key[:, None], (0, at, 0))
        return jnp.einsum('bd,bsd->bs', key, cache), cache

    cache = struct((64, 4096, 256), 'b s d -> b@data s d')
    w, x = struct((256, 256), 'd f -> d f'), struct((64, 256), 'b d -> b@data d')
    at = jax.ShapeDtypeStruct((), jnp.int32)
    (note,) = [
        n for n in explain(jax.jit(decode), w, cache, x, at, tries=0).notes if n.kind == 'donation'
    ]
    assert note.text.startswith('cache is replaced by results, and not donated')
    report = explain(jax.jit(decode, donate_argnums=1), w, cache, x, at, tries=0)
    assert 'donation' not in kinds(report.notes)


def test_results_that_replace_nothing():
    """Of two equal updates of an argument, either may replace it; a layer returns no state."""

    def both(w, x):
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * g, w + 0.1 * g

    def layer(x, w):
        return x + jax.nn.relu(x @ w)

    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w = struct((4096, 4096), 'd f -> d f@model')
    x = struct((4096, 4096), 'b d -> b@data d')
    for function, *arguments in ((both, w, x), (layer, x, w), (gradient, w, x)):
        report = explain(jax.jit(function), *arguments, tries=0)
        assert 'donation' not in kinds(report.notes), function


def test_donation_that_frees_nothing():
    def cast(state, x):
        return {'w': (state['w'] + x.sum()).astype(jnp.bfloat16)}

    w = {'w': struct((4096, 4096), 'd f -> d f@model')}
    x = struct((64,), 'b -> b@data')
    report = explain(jax.jit(cast, donate_argnums=0), w, x, tries=0)
    (note,) = [n for n in report.notes if n.kind == 'donation']
    assert 'the result of its shape is bfloat16' in note.text
    (note,) = [n for n in report.notes if n.kind == 'second compile']
    assert 'result/w is bfloat16, but state/w' in note.text


def test_ragged_dot_that_runs_as_a_dense_product():
    n, d, f, groups = 512, 64, 32, 16

    def local(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    mesh = device_mesh(jax.devices()[:8], z=8)
    specs = P('z'), P(), P()
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P('z'), check_vma=False)
    shapes = (8 * n, d), (groups, d, f), (groups,)
    arguments = [
        jax.ShapeDtypeStruct(
            shape, jnp.int32 if len(shape) == 1 else jnp.float32, sharding=NamedSharding(mesh, spec)
        )
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    report = explain(jax.jit(step), *arguments, tries=0)
    (note,) = [n for n in report.notes if n.kind == 'dense groups']
    assert report.flops == 2 * n * d * f * groups
    assert f'over {groups} groups' in note.text


def test_ragged_dot_without_groups():
    mesh = device_mesh(jax.devices()[:8], z=8)
    shapes = (64, 16), (0, 16, 32), (0,)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
        for shape, dtype in zip(shapes, (jnp.float32, jnp.float32, jnp.int32), strict=True)
    ]
    step = jax.jit(lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes))
    report = explain(step, *arguments, tries=0)
    assert not [n for n in report.notes if n.kind == 'dense groups']


@pytest.mark.parametrize('tries', [0, 8])
def test_dense_groups_stay_a_note_next_to_a_change_of_their_line(tries):
    """The change saves collectives, not flops."""
    mesh, n, d, f, groups = device_mesh(jax.devices()[:8], ep=8), 4096, 256, 512, 16

    def moe(x, router, w):
        expert = jnp.argmax(x @ router, -1)
        order = jnp.argsort(expert)
        y = jax.lax.ragged_dot(x[order], w, jnp.bincount(expert, length=groups))
        return jnp.zeros_like(y).at[order].set(y)

    shapes = ((n, d), P('ep')), ((d, groups), P()), ((groups, d, f), P('ep'))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes
    ]
    report = explain(jax.jit(moe), *arguments, tries=tries)
    assert bool(report.findings) == bool(tries)
    (note,) = [n for n in report.notes if n.kind == 'dense groups']
    assert f'over {groups} groups' in note.text


def test_sort_along_a_sharded_axis():
    def smallest(x):
        return jnp.sort(x, axis=0)[:8]

    report = explain(jax.jit(smallest), struct((4096, 256), 'n d -> n@data d'), tries=0)
    (note,) = [n for n in report.notes if n.kind == 'gathered for an operation']
    assert note.text.startswith('sort of float32[4096,256], whose axis 0 is sharded along data')
    assert note.bytes > 0
    report = explain(jax.jit(smallest), struct((4096, 256), 'n d -> n d@data'), tries=0)
    assert 'gathered for an operation' not in kinds(report.notes)


def test_sends_on_the_line_of_a_reshape_that_are_not_for_it():
    """The gather of a weight, and the sum of its gradient, begin at the column of the reshape."""

    def layer(w, x):
        return (x.reshape(-1, 256) @ w).reshape(x.shape)

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(layer(w, x) ** 2))(w)

    w, x = struct((256, 256), 'd f -> d@data f'), struct((64, 8, 256), 'b s d -> b@data s d')
    for function in (layer, step):
        report = explain(jax.jit(function), w, x, tries=0)
        assert {c.role for c in report.collectives} <= {'weights', 'gradients'}
        assert report.network_bytes > 0
        assert 'gathered for an operation' not in kinds(report.notes)


def test_a_sort_of_a_product_with_a_gathered_weight():
    def smallest(w, x):
        return (x @ w).sort(axis=0)

    w, x = struct((256, 256), 'd f -> d@data f'), struct((4096, 256), 'b d -> b@data d')
    report = explain(jax.jit(smallest), w, x, tries=0)
    notes = [n for n in report.notes if n.kind == 'gathered for an operation']
    gathers = {c.name for c in report.collectives if c.of == ('w',)}
    assert notes
    assert gathers
    assert all(gathers.isdisjoint(note.explains) for note in notes)


def attended(x, keys, values, at):
    """One query each of 16 sequences reads caches of 1024 tokens, after an update of a token."""
    keys = jax.lax.dynamic_update_slice(keys, x[:, None], (0, at, 0))
    values = jax.lax.dynamic_update_slice(values, 2 * x[:, None], (0, at, 0))
    weights = jax.nn.softmax(jnp.einsum('bd,btd->bt', x, keys))
    return jnp.einsum('bt,btd->bd', weights, values), keys, values


def layers_as_xs(caches, x, at):
    def layer(x, cache):
        x, *new = attended(x, *cache, at)
        return x, tuple(new)

    return jax.lax.scan(layer, x, caches)


def layers_as_carry(caches, x, at):
    def layer(carry, i):
        x, keys, values = carry
        at_i = i, 0, at, 0
        keys = jax.lax.dynamic_update_slice(keys, x[None, :, None], at_i)
        values = jax.lax.dynamic_update_slice(values, 2 * x[None, :, None], at_i)
        weights = jax.nn.softmax(jnp.einsum('bd,btd->bt', x, keys[i]))
        return (jnp.einsum('bt,btd->bd', weights, values[i]), keys, values), None

    return jax.lax.scan(layer, (x, *caches), jnp.arange(4))[0]


def one_layer(caches, x, at):
    return attended(x, caches[0][0], caches[1][0], at)


@pytest.mark.parametrize(
    ('fn', 'copied'), [(layers_as_xs, 2), (layers_as_carry, 0), (one_layer, 0)]
)
def test_donated_caches_that_a_loop_copies(fn, copied):
    """The temporaries of XLA hold the second copies."""
    n_bytes = 4 * 16 * 1024 * 128 * 4  # of one cache on a device
    cache = jax.ShapeDtypeStruct(
        (4, 16, 1024, 256), jnp.float32, sharding=NamedSharding(MESH, P(None, None, None, 'model'))
    )
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=NamedSharding(MESH, P(None, 'model')))
    report = explain(jax.jit(fn, donate_argnums=0), (cache, cache), x, 3, tries=0)
    found = [row for row in report.findings if row.kind == 'copied donation']
    assert len(found) == copied
    lines = {
        f'{__file__}:{attended.__code__.co_firstlineno + 2}',
        f'{__file__}:{attended.__code__.co_firstlineno + 3}',
    }
    assert {row.source for row in found} == (lines if copied else set())
    for i, row in enumerate(sorted(found, key=lambda row: row.text)):
        assert row.text.startswith(f'caches/{i}, f32[4,16,1024,128] on a device, is donated, but')
        assert row.bytes >= n_bytes
    assert report.memory is not None
    assert (report.memory.temporaries >= copied * n_bytes) or not copied
    if not copied:
        assert report.memory.temporaries < n_bytes


def test_a_shift_that_the_program_asks_for_is_not_a_copy():
    def shift(cache, x):
        return jnp.concatenate([cache[:, 1:], x[:, None]], axis=1)

    def optimizer(cache, x):
        return cache * 0.9 + x[:, None]

    cache = jax.ShapeDtypeStruct(
        (16, 2048, 256), jnp.float32, sharding=NamedSharding(MESH, P(None, None, 'model'))
    )
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=NamedSharding(MESH, P(None, 'model')))
    for fn in (shift, optimizer):
        assert kinds(explain(jax.jit(fn, donate_argnums=0), cache, x, tries=0).findings) == []


def test_a_slice_of_another_axis_is_not_what_gathers():
    """JAX 0.12 gives the gather the line of the slice before the qr."""

    def f(a):
        b = a[:, :64]
        return jnp.linalg.qr(b)[1]

    placed = jax.ShapeDtypeStruct(
        (2048, 2048), jnp.float32, sharding=NamedSharding(MESH, P('data', None))
    )
    report = explain(jax.jit(f), placed, tries=0)
    (note,) = [row for row in report.notes if row.kind == 'gathered for an operation']
    assert note.text.startswith('qr of float32[2048,64], whose axis 0 is sharded along data:')
    assert note.source == f'{__file__}:{f.__code__.co_firstlineno + 2}'
    assert not explain(jax.jit(lambda a: a[:, :64]), placed, tries=0).collectives


def test_a_large_cholesky_is_noted():
    def f(a):
        return jnp.linalg.cholesky(a) @ jnp.ones(2048)

    placed = jax.ShapeDtypeStruct(
        (2048, 2048), jnp.float32, sharding=NamedSharding(MESH, P('data', None))
    )
    report = explain(jax.jit(f), placed, tries=0)
    (note,) = [row for row in report.notes if row.kind == 'gathered for an operation']
    assert note.text.startswith('cholesky of float32[2048,2048], whose axis 0 is sharded')
    assert note.bytes == sum(c.total_bytes for c in report.collectives if c.name in note.explains)


@pytest.mark.parametrize('is_swapped', [False, True])
def test_donated_caches_that_change_places(is_swapped):
    """XLA holds a copy of one of them at least. Without the swap, nothing is copied."""
    sharding = NamedSharding(MESH, P(None, None, 'model'))
    cache = jax.ShapeDtypeStruct((16, 512, 128), jnp.float32, sharding=sharding)
    n_bytes = 4 * 16 * 512 * 128 // MESH.shape['model']

    def step(caches, x, at):
        x, *new = attended(x, *caches, at)
        return x, tuple(reversed(new)) if is_swapped else tuple(new)

    x = jax.ShapeDtypeStruct((16, 128), jnp.float32, sharding=NamedSharding(MESH, P(None, 'model')))
    jitted = jax.jit(step, donate_argnums=0)
    report = explain(jitted, (cache, cache), x, 3, tries=0)
    temporaries = jitted.lower((cache, cache), x, 3).compile().memory_analysis().temp_size_in_bytes
    assert (temporaries >= n_bytes) == is_swapped
    found = [row for row in report.findings if row.kind == 'copied donation']
    assert sorted(row.text.split(',')[0] for row in found) == ['caches/0', 'caches/1'] * is_swapped
    assert all(row.bytes >= n_bytes for row in found)


def in_place(window, row, at):
    return jax.lax.dynamic_update_slice(window, row[None], (at, 0)), row.sum()


def of_one_row(window, row, at):
    return jnp.where(jnp.arange(4096)[:, None] == at, row, window), window[at]


def of_many_rows(window, row, at):
    return jnp.where(jnp.arange(4096)[:, None] < at, row, window), window[at]


@pytest.mark.parametrize('fn', [in_place, of_one_row, of_many_rows])
def test_donated_states_that_are_written_anew(fn):
    """The last one changes many rows, so an update in place may write as much."""
    window = struct((4096, 1024), 'n d -> n d@model')
    row = struct((1024,), 'd -> d@model')
    report = explain(jax.jit(fn, donate_argnums=0), window, row, 3, tries=0)
    found = [row for row in report.findings if row.kind == 'copied donation']
    assert len(found) == (fn is of_one_row)
    for finding in found:
        assert finding.source == f'{__file__}:{fn.__code__.co_firstlineno + 1}'
        assert 'is donated, but written anew and not updated in place' in finding.text
        assert finding.bytes >= 4096 * 1024 * 4 // MESH.shape['model']
