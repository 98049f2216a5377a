"""The hand-written programs: a mesh, PartitionSpecs and `jax.jit`.

Every mesh has the axes 'data' and 'model'; if one of them has size 1, the same specs mean tensor or
data parallelism alone.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).parents[1] / 'docs' / 'examples'))
# only the types: arguments and results must be the same pytrees
import transformer as transformer
from transformer import Layers, State, Weights

BATCH, HIDDEN = P('data', None), P('data', 'model')
W_IN, W_OUT = P(None, 'model'), P('model', None)


def on(mesh, specs):
    """A tree of PartitionSpecs as shardings."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


def constrain(x, mesh, spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def mlp_forward(mesh):
    @functools.partial(
        jax.jit,
        in_shardings=on(mesh, ((W_IN, W_OUT), BATCH)),
        out_shardings=on(mesh, BATCH),
    )
    def forward(weights, x):
        w_in, w_out = weights
        return constrain(jax.nn.relu(x @ w_in), mesh, HIDDEN) @ w_out

    return forward


def mlp_step(mesh):
    def mean_loss(weights, x, y):
        w_in, w_out = weights
        predicted = constrain(jax.nn.relu(x @ w_in), mesh, HIDDEN) @ w_out
        return jnp.mean((predicted - y) ** 2)

    @functools.partial(
        jax.jit,
        in_shardings=on(mesh, ((W_IN, W_OUT), BATCH, BATCH)),
        out_shardings=(on(mesh, (W_IN, W_OUT)), None),
        donate_argnums=0,
    )
    def step(weights, x, y):
        loss, gradient = jax.value_and_grad(mean_loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

    return step


def attention(mesh):
    heads = P('data', None, 'model', None)
    w_in, w_out = P(None, 'model', None), P('model', None, None)
    stream = P('data', None, None)

    @functools.partial(
        jax.jit,
        in_shardings=on(mesh, (stream, w_in, w_in, w_in, w_out)),
        out_shardings=on(mesh, stream),
    )
    def attend(x, w_q, w_k, w_v, w_o):
        q = constrain(jnp.einsum('bsd,dhe->bshe', x, w_q), mesh, heads)
        k = constrain(jnp.einsum('bsd,dhe->bshe', x, w_k), mesh, heads)
        v = constrain(jnp.einsum('bsd,dhe->bshe', x, w_v), mesh, heads)
        shares = jax.nn.softmax(jnp.einsum('bshe,bthe->bhst', q, k) * q.shape[-1] ** -0.5)
        return jnp.einsum('bshe,hed->bsd', jnp.einsum('bhst,bthe->bshe', shares, v), w_o)

    return attend


def scan(mesh):
    @functools.partial(
        jax.jit,
        in_shardings=on(mesh, ((P(None, None, 'model'), P(None, 'model', None)), BATCH)),
        out_shardings=on(mesh, BATCH),
    )
    def layers(stacked, x):
        def layer(x, weights):
            w_in, w_out = weights
            hidden = constrain(jax.nn.relu(x @ w_in), mesh, HIDDEN)
            return constrain(x + hidden @ w_out, mesh, BATCH), None

        return lax.scan(layer, x, stacked)[0]

    return layers


def _transformer(c, mesh):
    """Specs of the weights, and the functions from weights and tokens to logits."""
    stream, heads = P('data', None, None), P('data', None, 'model', None)
    hidden = logits_spec = P('data', None, 'model')
    weights_spec = Weights(
        embed=P('model', None),
        layers=Layers(
            attention_norm=P(),
            q=P(None, None, 'model', None),
            k=P(None, None, 'model', None),
            v=P(None, None, 'model', None),
            o=P(None, 'model', None, None),
            mlp_norm=P(),
            gate=P(None, None, 'model'),
            up=P(None, None, 'model'),
            down=P(None, 'model', None),
        ),
        norm=P(),
        head=None if c.tied else P(None, 'model'),
    )

    def rms_norm(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def rotate(x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        x, y = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1)

    def attend(x, w):
        positions = 0 + jnp.arange(x.shape[1])
        q = constrain(jnp.einsum('bsd,dhe->bshe', x, w.q), mesh, heads)
        k = constrain(jnp.einsum('bsd,dke->bske', x, w.k), mesh, heads)
        q, k = rotate(q, positions), rotate(k, positions)
        v = constrain(jnp.einsum('bsd,dke->bske', x, w.v), mesh, heads)
        grouped = q.reshape(*q.shape[:2], c.n_kv_heads, c.n_heads // c.n_kv_heads, c.d_head)
        scores = jnp.einsum('bskge,btke->bkgst', grouped, k) * c.d_head**-0.5
        seen = jnp.arange(k.shape[1]) <= positions[:, None]
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum('bkgst,btke->bskge', shares, v).reshape(q.shape)
        return jnp.einsum('bshe,hed->bsd', constrain(mixed, mesh, heads), w.o)

    def feed_forward(x, w):
        return constrain(jax.nn.silu(x @ w.gate) * (x @ w.up), mesh, hidden) @ w.down

    def layer(x, w):
        x = constrain(x + attend(rms_norm(x, w.attention_norm), w), mesh, stream)
        return constrain(x + feed_forward(rms_norm(x, w.mlp_norm), w), mesh, stream), None

    def to_logits(weights, tokens):
        x = constrain(weights.embed[tokens], mesh, stream)
        x, _ = lax.scan(layer, x, weights.layers)
        head = weights.embed.T if c.tied else weights.head
        return constrain(rms_norm(x, weights.norm) @ head, mesh, logits_spec)

    return weights_spec, to_logits


def transformer_forward(c, mesh):
    """The logits of docs/examples/transformer.py."""
    weights_spec, to_logits = _transformer(c, mesh)
    return jax.jit(
        to_logits,
        in_shardings=on(mesh, (weights_spec, P('data', None))),
        out_shardings=on(mesh, P('data', None, 'model')),
    )


def transformer_step(c, mesh):
    """The training step of docs/examples/transformer.py."""
    weights_spec, to_logits = _transformer(c, mesh)
    state_sharding = on(mesh, State(weights_spec, weights_spec, weights_spec))

    def mean_loss(weights, tokens):
        targets = tokens[:, 1:]
        logits = to_logits(weights, tokens[:, :-1])
        right = targets[:, :, None] == jnp.arange(c.vocab)
        picked = jnp.sum(jnp.where(right, logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    @functools.partial(
        jax.jit,
        in_shardings=(state_sharding, on(mesh, P('data', None))),
        out_shardings=(state_sharding, None),
        donate_argnums=0,
    )
    def train_step(state, tokens):
        loss, gradient = jax.value_and_grad(mean_loss)(state.weights, tokens)
        step = state.step + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
        square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, state.square, gradient)
        rate = c.learning_rate * jnp.minimum(1, step / c.warm_up)

        def update(w, m, s):
            m, s = m / (1 - 0.9**step), s / (1 - 0.95**step)
            return w - rate * m / (jnp.sqrt(s) + 1e-8)

        updated = jax.tree.map(update, state.weights, mean, square)
        return State(updated, mean, square, step), loss

    return train_step
