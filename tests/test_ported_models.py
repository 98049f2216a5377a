"""Models as other code bases shard them: the same losses, bit for bit, as with JAX by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import check_equal

from einshard import axis_rules, einshard, sharded

DEVICES = jax.devices()[:8]
MESH = jax.make_mesh((4, 2), ('data', 'tensor'), (AxisType.Auto,) * 2, devices=DEVICES)
ON = {'act_batch': 'data', 'act_heads': 'tensor', 'act_mlp': 'tensor', 'act_vocab': 'tensor'}
ON |= {'embed': 'data', 'mlp': 'tensor', 'heads': 'tensor', 'vocab': 'tensor'}

LAYERS, VOCAB, EMBED, HEADS, DEPTH, MLP, BATCH, LENGTH = 2, 32, 16, 4, 4, 32, 8, 8
SIZES = {'layers': LAYERS, 'vocab': VOCAB, 'embed': EMBED, 'heads': HEADS, 'kv': DEPTH, 'mlp': MLP}
NAMES = {
    'embedding': 'vocab embed',
    'layers': {
        'q': 'layers embed heads kv',
        'k': 'layers embed heads kv',
        'v': 'layers embed heads kv',
        'o': 'layers heads kv embed',
        'up': 'layers embed mlp',
        'down': 'layers mlp embed',
    },
    'logits': 'embed vocab',
}
RANDOM = np.random.default_rng(0)
PARAMS = jax.tree.map(
    lambda names: RANDOM.normal(0, 0.1, [SIZES[n] for n in names.split()]).astype(np.float32), NAMES
)
TOKENS = RANDOM.integers(0, VOCAB, (BATCH, LENGTH))


def loss(params, tokens, constrain):
    """The loss of a decoder; `constrain` takes a value and the logical names of its axes."""
    x = constrain(params['embedding'][tokens], 'act_batch length hidden')
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    @jax.checkpoint
    def layer(x, w):
        q, k, v = (
            constrain(jnp.einsum('btd,dhk->bthk', x, w[name]), 'act_batch length act_heads kv')
            for name in 'qkv'
        )
        scores = jnp.where(mask, jnp.einsum('bthk,bshk->bhts', q, k), -1e9)
        mixed = jnp.einsum('bhts,bshk->bthk', jax.nn.softmax(scores), v)
        x = constrain(x + jnp.einsum('bthk,hkd->btd', mixed, w['o']), 'act_batch length hidden')
        up = constrain(jax.nn.gelu(x @ w['up']), 'act_batch length act_mlp')
        return constrain(x + up @ w['down'], 'act_batch length hidden'), None

    x, _ = jax.lax.scan(layer, x, params['layers'])
    logits = constrain(x @ params['logits'], 'act_batch length act_vocab')
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()


def train(constrain, place, specs, wrap):
    """Losses and parameters of a few steps."""

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens, constrain)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params, tokens = place(PARAMS, specs[0]), place(TOKENS, specs[1])
    step, losses = wrap(step), []
    for _ in range(3):
        params, value = step(params, tokens)
        losses.append(float(value))
    return losses, params


def partition_spec(names):
    return P(*(ON.get(name) for name in names.split()))


def named(names):
    return NamedSharding(MESH, partition_spec(names))


def constrain_by_hand(x, names):
    return jax.lax.with_sharding_constraint(x, named(names))


def counts(names):
    """The same placement on the canonical mesh: 'a b -> b4 a2' for a on tensor, b on data."""
    names = names.split()
    of = {ON[name]: name for name in names if name in ON}
    rest = [name for name in names if name not in of.values()]
    right = [f'{of.get("data", "")}4', f'{of.get("tensor", "")}2', *rest]
    return f'{" ".join(names)} -> {" ".join(right)}'


def by_hand():
    specs = jax.tree.map(named, NAMES), named('act_batch length')
    jitted = functools.partial(jax.jit, out_shardings=(specs[0], NamedSharding(MESH, P())))
    return train(constrain_by_hand, jax.device_put, specs, jitted)


def with_einshard(of, out, **options):
    specs = jax.tree.map(of, NAMES), of('act_batch length')
    return train(
        lambda x, names: einshard(x, of(names), **options),
        lambda tree, spec: einshard(tree, spec, **options),
        specs,
        sharded(*specs, out=(specs[0], out), **options),
    )


def index_map(x):
    return x.sharding.devices_indices_map(x.shape)


def test_a_decoder():
    losses, params = by_hand()
    assert losses[0] > losses[1] > losses[2]
    results = [
        with_einshard(partition_spec, P(), mesh=MESH),
        with_einshard(named, P()),
        with_einshard(counts, '... -> * ...', mesh=DEVICES),
    ]
    with jax.set_mesh(MESH), axis_rules({name: f'@{axis}' for name, axis in ON.items()}):
        results.append(with_einshard(str, '...'))
    for other_losses, other_params in results:
        assert other_losses == losses
        check_equal(other_params, params)
        shards = [jax.tree.map(index_map, tree) for tree in (params, other_params)]
        assert shards[0] == shards[1]


def decode(constrain, place):
    """The activations of a few decoding steps with a cache of keys and values."""
    cache = place(np.zeros((2, BATCH, LENGTH, HEADS, DEPTH), np.float32), 'n act_batch t heads k')
    layer = {name: place(PARAMS['layers'][name][0], 'd heads k') for name in 'qkv'}

    @jax.jit
    def step(cache, x, position):
        q, *new = (constrain(jnp.einsum('bd,dhk->bhk', x, layer[n]), 'b heads k') for n in 'qkv')
        cache = jax.lax.dynamic_update_slice(
            cache, jnp.stack(new)[:, :, None], (0, 0, position, 0, 0)
        )
        keys, values = constrain(cache, 'n act_batch t heads k')
        scores = jnp.where(
            jnp.arange(LENGTH) <= position, jnp.einsum('bhk,bthk->bht', q, keys), -1e9
        )
        mixed = jnp.einsum('bht,bthk->bhk', jax.nn.softmax(scores), values)
        return cache, constrain(mixed.reshape(BATCH, EMBED), 'act_batch hidden')

    x, found = place(PARAMS['embedding'][TOKENS[:, 0]], 'act_batch hidden'), []
    for position in range(4):
        cache, x = step(cache, x, position)
        found.append(np.asarray(x))
    return found


def test_a_cache_of_keys_and_values():
    expected = decode(constrain_by_hand, lambda x, names: jax.device_put(x, named(names)))
    for spec, options in [
        (named, {}),
        (partition_spec, {'mesh': MESH}),
        (counts, {'mesh': DEVICES}),
    ]:
        found = decode(*[lambda x, names, s=spec, o=options: einshard(x, s(names), **o)] * 2)
        assert all(map(np.array_equal, found, expected))
