"""A train step of a Llama-like model, in plain JAX on a mesh with the axes data and tensor.

It has what large training programs have: a scan over layers with remat, attention in chunks,
tensor parallelism with the sequence sharded between products, weights sharded over data too,
gradient accumulation, and Adam. `flops` counts its matrix products by hand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Config:
    layers: int = 32
    d: int = 4096  # model
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    f: int = 14336  # hidden
    vocab: int = 128256
    sequence: int = 4096
    batch: int = 64
    accumulated: int = 2  # microbatches
    chunk: int = 512  # of queries


# of the same proportions, for simulated devices
SMALL = Config(
    layers=3,
    d=64,
    heads=8,
    kv_heads=4,
    head=16,
    f=192,
    vocab=512,
    sequence=64,
    batch=16,
    accumulated=2,
    chunk=16,
)

SHAPES = {  # and axes of the mesh
    'embed': (('vocab', 'd'), P('tensor', 'data')),
    'wq': (('layers', 'd', 'heads', 'head'), P(None, 'data', 'tensor')),
    'wk': (('layers', 'd', 'kv_heads', 'head'), P(None, 'data', 'tensor')),
    'wv': (('layers', 'd', 'kv_heads', 'head'), P(None, 'data', 'tensor')),
    'wo': (('layers', 'heads', 'head', 'd'), P(None, 'tensor', None, 'data')),
    'gate': (('layers', 'd', 'f'), P(None, 'data', 'tensor')),
    'up': (('layers', 'd', 'f'), P(None, 'data', 'tensor')),
    'down': (('layers', 'f', 'd'), P(None, 'tensor', 'data')),
    'norm_1': (('layers', 'd'), P()),
    'norm_2': (('layers', 'd'), P()),
    'norm': (('d',), P()),
    'unembed': (('d', 'vocab'), P('data', 'tensor')),
}
IN_LAYERS = tuple(name for name, (axes, _) in SHAPES.items() if axes[0] == 'layers')


def constrain(x, *axes):
    return jax.lax.with_sharding_constraint(x, P(*axes))


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, -1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale.astype(x.dtype)


def attention(q, k, v, c: Config):
    """Causal attention of one chunk of queries after another."""
    b, s, _, e = q.shape
    groups = c.heads // c.kv_heads

    @jax.checkpoint
    def attend(_, i):
        start = i * c.chunk
        part = jax.lax.dynamic_slice_in_dim(q, start, c.chunk, 1)
        part = part.reshape(b, c.chunk, c.kv_heads, groups, e)
        scores = jnp.einsum('bqkge,bske->bkgqs', part, k, preferred_element_type=jnp.float32)
        seen = start + jnp.arange(c.chunk)[:, None] >= jnp.arange(s)
        weights = jax.nn.softmax(jnp.where(seen, scores * e**-0.5, -1e30)).astype(v.dtype)
        return None, jnp.einsum('bkgqs,bske->bqkge', weights, v)

    _, parts = jax.lax.scan(attend, None, jnp.arange(s // c.chunk))
    return jnp.moveaxis(parts, 0, 1).reshape(q.shape)


def layer(x, w, c: Config):
    h = constrain(rms_norm(x, w['norm_1']), 'data', None, None)
    q = constrain(jnp.einsum('bsd,dhe->bshe', h, w['wq']), 'data', None, 'tensor', None)
    k = constrain(jnp.einsum('bsd,dhe->bshe', h, w['wk']), 'data', None, 'tensor', None)
    v = constrain(jnp.einsum('bsd,dhe->bshe', h, w['wv']), 'data', None, 'tensor', None)
    heads = attention(q, k, v, c)
    x = x + constrain(jnp.einsum('bshe,hed->bsd', heads, w['wo']), 'data', 'tensor', None)
    h = constrain(rms_norm(x, w['norm_2']), 'data', None, None)
    hidden = jax.nn.silu(h @ w['gate']) * (h @ w['up'])
    hidden = constrain(hidden, 'data', None, 'tensor')
    return x + constrain(hidden @ w['down'], 'data', 'tensor', None), None


def mean_loss(params, tokens, c: Config):
    w = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = constrain(w['embed'][tokens], 'data', 'tensor', None)
    step = jax.checkpoint(functools.partial(layer, c=c), policy=getattr(c, 'policy', None))
    x, _ = jax.lax.scan(step, x, {name: w[name] for name in IN_LAYERS})
    x = constrain(rms_norm(x, w['norm']), 'data', None, None)
    logits = constrain(x @ w['unembed'], 'data', None, 'tensor').astype(jnp.float32)
    predicted = jax.nn.log_softmax(logits)
    targets = jax.nn.one_hot(jnp.roll(tokens, -1, 1), c.vocab, dtype=jnp.float32)
    return -jnp.mean(jnp.sum(predicted * targets, -1))


def adam(state, gradients):
    n = state['n'] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state['m'], gradients)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state['v'], gradients)

    def updated(p, m, v):
        return p - 3e-4 * (m / (1 - 0.9**n)) / (jnp.sqrt(v / (1 - 0.95**n)) + 1e-8)

    params = jax.tree.map(updated, state['params'], m, v)
    return {'params': params, 'm': m, 'v': v, 'n': n}


def train_step(mesh, c: Config):
    """The jitted step, to be called under `jax.set_mesh(mesh)`."""

    def step(state, tokens):
        def accumulate(total, part):
            loss, gradients = jax.value_and_grad(mean_loss)(state['params'], part, c)
            return jax.tree.map(jnp.add, total, (loss, gradients)), None

        zeros = jax.tree.map(jnp.zeros_like, state['params'])
        (loss, gradients), _ = jax.lax.scan(accumulate, (jnp.float32(0), zeros), tokens)
        return adam(state, jax.tree.map(lambda g: g / c.accumulated, gradients)), loss

    specs = {name: NamedSharding(mesh, spec) for name, (_, spec) in SHAPES.items()}
    state = {'params': specs, 'm': specs, 'v': specs, 'n': NamedSharding(mesh, P())}
    rows, replicated = NamedSharding(mesh, P(None, 'data')), NamedSharding(mesh, P())
    return jax.jit(
        step, in_shardings=(state, rows), out_shardings=(state, replicated), donate_argnums=0
    )


def arguments(c: Config):
    """The state and the tokens, as shapes."""
    shape = {name: tuple(getattr(c, axis) for axis in axes) for name, (axes, _) in SHAPES.items()}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shape.items()}
    count = jax.ShapeDtypeStruct((), jnp.float32)
    state = {'params': params, 'm': params, 'v': params, 'n': count}
    tokens = (c.accumulated, c.batch // c.accumulated, c.sequence)
    return state, jax.ShapeDtypeStruct(tokens, jnp.int32)


def text_of(mesh, c: Config):
    """The optimized program."""
    with jax.set_mesh(mesh):
        return train_step(mesh, c).lower(*arguments(c)).compile().as_text()


def flops(c: Config):
    """The flops of the matrix products of one step, on all devices together."""
    tokens = c.batch * c.sequence
    attention = c.d * c.head * (2 * c.heads + 2 * c.kv_heads)
    per_layer = attention + 3 * c.d * c.f
    scores = 2 * c.batch * c.heads * c.sequence**2 * c.head  # weighting the values costs the same
    trained = 6 * tokens * (c.layers * per_layer + c.d * c.vocab) + 3 * 2 * c.layers * scores
    # the backward pass repeats a layer, but for its last product; and the scores once more
    again = 2 * tokens * (per_layer - c.d * c.f) + 3 * scores
    return trained + c.layers * again
