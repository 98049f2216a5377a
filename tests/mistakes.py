"""Train steps whose sharding is right or wrong in one place, for the findings of explain.

A language model of two layers: an embedding, layers with a gated feed-forward part and attention,
and a head. `Choices` says where its arrays are; the defaults are those of a correct program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from einshard import einshard, sharded

V, D, H, E, F = 256, 64, 8, 8, 256
BATCH, LENGTH, LAYERS = 64, 32, 2

# names of the axes of the mesh: 'data' and 'tensor'
FSDP = {
    'embed': 'v@data d',
    **dict.fromkeys('qkv', 'd@data h e'),
    'o': 'h e d@data',
    'gate': 'd@data f',
    'up': 'd@data f',
    'down': 'f@data d',
    'scale': 'd',
    'head': 'd@data v',
}
MEGATRON = {
    'embed': 'v@tensor d',
    **dict.fromkeys('qkv', 'd h@tensor e'),
    'o': 'h@tensor e d',
    'gate': 'd f@tensor',
    'up': 'd f@tensor',
    'down': 'f@tensor d',
    'scale': 'd',
    'head': 'd v@tensor',
}
BOTH = {
    'embed': 'v@tensor d@data',
    **dict.fromkeys('qkv', 'd@data h@tensor e'),
    'o': 'h@tensor e d@data',
    'gate': 'd@data f@tensor',
    'up': 'd@data f@tensor',
    'down': 'f@tensor d@data',
    'scale': 'd',
    'head': 'd@data v@tensor',
}
IN_LAYERS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down', 'scale')
SHAPES = {
    'embed': (V, D),
    **dict.fromkeys('qkv', (D, H, E)),
    'o': (H, E, D),
    'gate': (D, F),
    'up': (D, F),
    'down': (F, D),
    'scale': (D,),
    'head': (D, V),
}


class Choices(NamedTuple):
    weights: Any = None  # expressions by name
    states: Any = None  # of the optimizer; None: like the weights
    tokens: str = 'b@data s'
    embedded: str | None = 'b s d -> b@data s d'
    attended: str | None = None
    mixed: str | None = None
    hidden: str | None = None
    summed: str | None = None
    after: str | None = None
    logits: str | None = None
    out: Any = None  # of the weights; None: like the weights
    microbatches: int = 1
    in_blocks: bool = False  # whether a microbatch is a block of rows, instead of every nth row
    parts: str | None = None  # all microbatches, on a new first axis
    remat: bool = False
    layers: int = LAYERS


def constrained(x, spec):
    return x if spec is None else einshard(x, spec)


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(x, w, c):
    q, k, v = (jnp.einsum('bsd,dhe->bshe', x, w[name]) for name in 'qkv')
    scores = jax.nn.softmax(jnp.einsum('bshe,bthe->bhst', q, k))
    mixed = constrained(jnp.einsum('bhst,bthe->bshe', scores, v), c.mixed)
    return jnp.einsum('bshe,hed->bsd', mixed, w['o'])


def layer(x, w, c):
    x = x + constrained(attention(norm(x, w['scale']), w, c), c.attended)
    y = norm(x, w['scale'])
    hidden = jax.nn.silu(y @ w['gate']) * (y @ w['up'])
    x = constrained(x + constrained(hidden, c.hidden) @ w['down'], c.summed)
    return constrained(x, c.after)


def loss(weights, tokens, c):
    x = constrained(weights['embed'][tokens[:, :-1]], c.embedded)
    run = jax.checkpoint(layer, static_argnums=2) if c.remat else layer
    for w in weights['layers']:
        x = run(x, w, c)
    logits = constrained(x @ weights['head'], c.logits)
    right = tokens[:, 1:, None] == jnp.arange(V)
    picked = jnp.sum(jnp.where(right, logits, 0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def gradients(weights, tokens, c):
    if c.microbatches == 1:
        return jax.grad(loss)(weights, tokens, c)

    def accumulate(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part, c)), None

    zeros = jax.tree.map(jnp.zeros_like, weights)
    if c.in_blocks:
        parts = tokens.reshape(c.microbatches, -1, tokens.shape[-1])
    else:
        parts = tokens.reshape(-1, c.microbatches, tokens.shape[-1]).swapaxes(0, 1)
    return jax.lax.scan(accumulate, zeros, constrained(parts, c.parts))[0]


def update(weights, states, g):
    states = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, states, g)
    return jax.tree.map(lambda w, m: w - 0.01 * m, weights, states), states


def tree(by_name, n_layers=LAYERS):
    """A value for each array of the model."""
    layers = [{name: by_name[name] for name in IN_LAYERS} for _ in range(n_layers)]
    return {'embed': by_name['embed'], 'layers': layers, 'head': by_name['head']}


def make_step(c: Choices, mesh: Any, **options: Any) -> Any:
    """A train step of plain JAX."""
    weights = tree(c.weights, c.layers)
    states = weights if c.states is None else tree(c.states, c.layers)
    out = weights if c.out is None else tree(c.out, c.layers)

    @sharded(
        {'w': weights, 'm': states}, c.tokens, out={'w': out, 'm': states}, mesh=mesh, **options
    )
    def step(state, tokens):
        g = gradients(state['w'], tokens, c)
        w, m = update(state['w'], state['m'], g)
        return {'w': w, 'm': m}

    return step


def arguments(n_layers=LAYERS):
    """The arguments of a step, as shapes."""
    shapes = tree({n: jax.ShapeDtypeStruct(s, np.float32) for n, s in SHAPES.items()}, n_layers)
    return {'w': shapes, 'm': shapes}, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), np.int32)
