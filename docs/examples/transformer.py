# %% [markdown]
"""# Train a transformer and generate text

    pip install .
    python docs/examples/transformer.py --parallelism both --steps 120

A decoder-only transformer (RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, a tied or
an untied head) learns Python's license and docstrings byte by byte, and generates text with a cache
of keys and values. The model is plain JAX. Three tables, with an expression for each array, shard
it; the losses are those of the unsharded model. Without an accelerator, it runs on eight simulated
devices.
"""

# %%
import argparse
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

# before JAX starts. A count in your own XLA_FLAGS wins; accelerators ignore the flag
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8 ' + os.environ.get(
    'XLA_FLAGS', ''
)

import jax
import jax.numpy as jnp
import numpy as np

from einshard import einshard, sharded

TOLERANCE = 1e-5  # relative, on the loss of every step
DOCUMENTED = 'builtins argparse collections datetime inspect json logging pathlib random statistics'
T = TypeVar('T')

# %% [markdown]
# ## Configure the model


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the code"}
@dataclass(frozen=True)
class Config:
    """Sizes and learning rate. `n_heads` is divisible by `n_kv_heads`; `d_head` is even."""

    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 16
    n_kv_heads: int = 8  # each for n_heads / n_kv_heads heads of queries
    d_head: int = 8
    d_ff: int = 192
    vocab: int = 256  # a token is a byte
    tied: bool = False  # whether the embedding is the head too
    sequence: int = 64
    batch: int = 16
    learning_rate: float = 6e-3
    warm_up: int = 10  # steps


class Layers(NamedTuple, Generic[T]):
    """All layers at once, stacked along the first axis. T is an array, or the expression of one."""

    attention_norm: T
    q: T
    k: T
    v: T
    o: T
    mlp_norm: T
    gate: T
    up: T
    down: T


class Weights(NamedTuple, Generic[T]):
    embed: T
    layers: Layers[T]
    norm: T
    head: T | None  # None where it is tied


class Cache(NamedTuple):
    """Keys and values of all layers, [layers, batch, positions, kv heads, head]."""

    k: jax.Array
    v: jax.Array


class State(NamedTuple):
    """The weights, Adam's two moments of their gradients, and the step counter."""

    weights: Any
    mean: Any
    square: Any
    step: Any = None


# %% [markdown]
# ## Choose a placement
#
# The letters are the axes: l layers, v vocabulary, d model, h heads of queries, k of keys and
# values, e inside a head, f feed-forward; b batch, s positions of a sequence, t positions of the
# cache. The tables use the short form: `'l d h* e'` is `'l d h e -> l d h* e'`.
#
# Data parallelism shards the batch and replicates the weights. Tensor parallelism shards heads,
# hidden units and vocabulary: weights that produce them along the output axis, weights that consume
# them along the input axis. The third table has both, with tensor parallelism over two neighbors.


# %%
class Placement(NamedTuple):
    """An expression for each array; None leaves it on one device."""

    tokens: str | None = None  # inputs
    weights: Weights[str] | str | None = None
    cache: str | None = None
    stream: str | None = None  # values in between: the residual stream,
    heads: str | None = None  # queries, keys and values,
    hidden: str | None = None  # inside the feed-forward layer,
    logits: str | None = None


UNSHARDED = Placement()

# the batch over all devices, weights replicated
DATA = Placement(
    tokens='b* s',
    weights='... -> * ...',
    cache='l b* t k e',
    stream='b* s d',
    heads='b* s h e',
    hidden='b* s f',
    logits='b* s v',
)

# heads, hidden units and vocabulary over all devices, the batch replicated
TENSOR = Placement(
    tokens='* b s',
    weights=Weights(
        embed='v* d',
        layers=Layers(
            attention_norm='* l d',
            q='l d h* e',
            k='l d k* e',
            v='l d k* e',
            o='l h* e d',
            mlp_norm='* l d',
            gate='l d f*',
            up='l d f*',
            down='l f* d',
        ),
        norm='* d',
        head='d v*',
    ),
    cache='l b t k* e',
    stream='* b s d',
    heads='b s h* e',
    hidden='b s f*',
    logits='b s v*',
)

# the batch over groups of two neighbors, the model over the two devices of a group
BOTH = Placement(
    tokens='b* 2 s',
    weights=Weights(
        embed='* v2 d',
        layers=Layers(
            attention_norm='* l d',
            q='* l d h2 e',
            k='* l d k2 e',
            v='* l d k2 e',
            o='* l h2 e d',
            mlp_norm='* l d',
            gate='* l d f2',
            up='* l d f2',
            down='* l f2 d',
        ),
        norm='* d',
        head='* d v2',
    ),
    cache='l b* t k2 e',
    stream='b* 2 s d',
    heads='b* s h2 e',
    hidden='b* s f2',
    logits='b* s v2',
)

PLACEMENTS = {'data': DATA, 'tensor': TENSOR, 'both': BOTH}

# %% [markdown]
# In the third table, the output matrix of attention is sharded over heads; the four groups hold
# replicas:

# %% tags=["active-ipynb"]
# from einshard import show
#
# show(BOTH.weights.layers.o, devices=8)

# %% [markdown]
# ## Write the model
#
# `einshard` constrains the residual stream, the heads, the hidden units and the logits.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the code"}
def init_state(key: jax.Array, c: Config) -> State:
    """Random weights of variance 1 / inputs."""
    keys = iter(jax.random.split(key, 9))

    def normal(*shape: int, inputs: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * inputs**-0.5

    n, d = c.n_layers, c.d_model
    layers = Layers(
        attention_norm=jnp.ones((n, d)),
        q=normal(n, d, c.n_heads, c.d_head, inputs=d),
        k=normal(n, d, c.n_kv_heads, c.d_head, inputs=d),
        v=normal(n, d, c.n_kv_heads, c.d_head, inputs=d),
        o=normal(n, c.n_heads, c.d_head, d, inputs=c.n_heads * c.d_head),
        mlp_norm=jnp.ones((n, d)),
        gate=normal(n, d, c.d_ff, inputs=d),
        up=normal(n, d, c.d_ff, inputs=d),
        down=normal(n, c.d_ff, d, inputs=c.d_ff),
    )
    embed = normal(c.vocab, d, inputs=d)
    head = None if c.tied else normal(d, c.vocab, inputs=d)
    weights = Weights(embed, layers, jnp.ones(d), head)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return State(weights, zeros, zeros, jnp.zeros((), jnp.int32))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of queries or keys, [b, s, heads, e], at positions [s]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x, y = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1)


def attention(
    x: jax.Array, w: Layers[jax.Array], cache: Cache | None, start: Any, p: Placement
) -> tuple[jax.Array, Any]:
    """Grouped-query attention of positions `start`, `start + 1`, ... to those before them."""
    positions = start + jnp.arange(x.shape[1])
    q = rotate(einshard(jnp.einsum('bsd,dhe->bshe', x, w.q), p.heads), positions)
    k = rotate(einshard(jnp.einsum('bsd,dke->bske', x, w.k), p.heads), positions)
    v = einshard(jnp.einsum('bsd,dke->bske', x, w.v), p.heads)
    if cache is not None:
        k = jax.lax.dynamic_update_slice_in_dim(cache.k, k, start, axis=1)
        v = jax.lax.dynamic_update_slice_in_dim(cache.v, v, start, axis=1)
        cache = Cache(k, v)
    b, s, _, e = q.shape
    grouped = q.reshape(b, s, k.shape[2], -1, e)  # g heads of queries to each of k
    scores = jnp.einsum('bskge,btke->bkgst', grouped, k) * e**-0.5
    seen = jnp.arange(k.shape[1]) <= positions[:, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum('bkgst,btke->bskge', shares, v).reshape(q.shape)
    return jnp.einsum('bshe,hed->bsd', einshard(mixed, p.heads), w.o), cache


def feed_forward(x: jax.Array, w: Layers[jax.Array], p: Placement) -> jax.Array:
    """SwiGLU."""
    hidden = jax.nn.silu(x @ w.gate) * (x @ w.up)
    return einshard(hidden, p.hidden) @ w.down


def forward(
    weights: Weights[jax.Array],
    tokens: jax.Array,
    p: Placement,
    cache: Cache | None = None,
    start: Any = 0,
) -> tuple[jax.Array, Any]:
    """Logits [b, s, v] for what follows each token; and the cache, with these tokens in it."""

    def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
        w, cache = scanned
        attended, cache = attention(rms_norm(x, w.attention_norm), w, cache, start, p)
        x = einshard(x + attended, p.stream)
        x = einshard(x + feed_forward(rms_norm(x, w.mlp_norm), w, p), p.stream)
        return x, cache

    x = einshard(weights.embed[tokens], p.stream)
    x, cache = jax.lax.scan(layer, x, (weights.layers, cache))
    head = weights.embed.T if weights.head is None else weights.head
    return einshard(rms_norm(x, weights.norm) @ head, p.logits), cache


def mean_loss(weights: Weights[jax.Array], tokens: jax.Array, p: Placement) -> jax.Array:
    """Cross entropy of each token after those before it, in nats."""
    logits, _ = forward(weights, tokens[:, :-1], p)
    # elementwise, so the vocabulary stays sharded
    right = tokens[:, 1:, None] == jnp.arange(logits.shape[-1])
    picked = jnp.sum(jnp.where(right, logits, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def adam(state: State, gradient: Weights[jax.Array], c: Config) -> State:
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, state.square, gradient)
    rate = c.learning_rate * jnp.minimum(1, step / c.warm_up)

    def update(w: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        m, s = m / (1 - 0.9**step), s / (1 - 0.95**step)
        return w - rate * m / (jnp.sqrt(s) + 1e-8)

    return State(jax.tree.map(update, state.weights, mean, square), mean, square, step)


# %% [markdown]
# ## Shard the four jitted functions
#
# Adam's two moments, `mean` and `square`, are sharded like the weights. Specs are pytree prefixes:
# the step counter of the state needs none. The training step donates the old state; the decoding
# step donates the old cache.


# %%
class Model(NamedTuple):
    """The jitted functions of one configuration in one placement."""

    init: Callable[[jax.Array], State]
    train_step: Callable[[State, Any], tuple[State, jax.Array]]
    empty_cache: Callable[[int, int], Cache]
    decode_step: Callable[[Weights[jax.Array], Cache, Any, int], tuple[jax.Array, Cache]]


def make_model(c: Config, p: Placement, mesh: Any = None) -> Model:
    """Shards the model by a placement, over all devices or those of `mesh`."""
    state_spec = State(p.weights, p.weights, p.weights)

    @sharded(out=state_spec, mesh=mesh)
    def init(key: jax.Array) -> State:
        return init_state(key, c)

    @sharded(state_spec, p.tokens, out=(state_spec, None), mesh=mesh, donate_argnames='state')
    def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, gradient = jax.value_and_grad(mean_loss)(state.weights, tokens, p)
        return adam(state, gradient, c), loss

    @sharded(out=p.cache, mesh=mesh, static_argnames=('batch', 'positions'))
    def empty_cache(batch: int, positions: int) -> Cache:
        shape = (c.n_layers, batch, positions, c.n_kv_heads, c.d_head)
        return Cache(jnp.zeros(shape), jnp.zeros(shape))

    @sharded(
        p.weights,
        p.cache,
        p.tokens,
        None,
        out=(None, p.cache),
        mesh=mesh,
        donate_argnames='cache',
    )
    def decode_step(
        weights: Weights[jax.Array], cache: Cache, tokens: jax.Array, start: Any
    ) -> tuple[jax.Array, Cache]:
        """Logits [b, v] for what follows the last of the tokens, which begin at `start`."""
        logits, cache = forward(weights, tokens, p, cache, start)
        return logits[:, -1], cache

    return Model(init, train_step, empty_cache, decode_step)


# %% [markdown]
# ## Generate, read texts, train


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the code"}
def generate(
    model: Model, weights: Weights[jax.Array], prompts: np.ndarray, length: int
) -> np.ndarray:
    """The prompts, [b, s], and the `length` most likely tokens after them."""
    written = [prompts]
    start = 0
    cache = model.empty_cache(len(prompts), prompts.shape[1] + length)
    for _ in range(length):
        logits, cache = model.decode_step(weights, cache, written[-1], start)
        start += written[-1].shape[1]
        written.append(np.asarray(jnp.argmax(logits, axis=-1), np.int32)[:, None])
    return np.concatenate(written, axis=1)


def text() -> bytes:
    """Text that every machine has: Python's license, and docstrings of its library."""
    places = (Path(os.__file__).parent, Path(sys.base_prefix))
    licences = [place / 'LICENSE.txt' for place in places]
    texts = [path.read_text(encoding='utf-8') for path in licences if path.exists()][:1]
    for name in DOCUMENTED.split():
        members = vars(importlib.import_module(name)).values()
        texts += [inspect.getdoc(member) or '' for member in members if callable(member)]
    return '\n\n'.join(dict.fromkeys(texts)).encode()  # each once


def batches(c: Config) -> Iterator[np.ndarray]:
    """Pieces of the text, [b, s + 1], the same ones each time."""
    data = np.frombuffer(text(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(len(data) - c.sequence, size=(c.batch, 1))
        yield data[starts + np.arange(c.sequence + 1)]


class Run(NamedTuple):
    weights: Weights[jax.Array]
    losses: np.ndarray  # of every step
    seconds: float


def train(
    model: Model, c: Config, steps: int, on_step: Callable[[int, float], Any] = lambda *_: None
) -> Run:
    """Trains from the same weights on the same batches in every placement."""
    start = time.perf_counter()
    state = model.init(jax.random.key(0))
    losses: list[float] = []
    for step, tokens in zip(range(steps), batches(c), strict=False):
        state, loss = model.train_step(state, tokens)
        losses.append(float(loss))
        on_step(step, losses[-1])
    return Run(state.weights, np.array(losses), time.perf_counter() - start)


def difference(run: Run, other: Run) -> float:
    """The largest relative difference between the losses of two runs, over all steps."""
    return float(np.max(np.abs(run.losses - other.losses) / other.losses))


# %% [markdown]
# ## Compare sharded and unsharded training
#
# A smaller model takes ten steps, unsharded and with both parallelisms. The losses are equal up to
# rounding.

# %% tags=["active-ipynb"]
# c = Config(n_layers=2, d_model=32, d_ff=64, sequence=32, batch=8)
# placement = BOTH if jax.device_count() % 2 == 0 else DATA  # an odd number makes no pairs
# with jax.default_matmul_precision('float32'):
#     unsharded, both = (train(make_model(c, p), c, steps=10) for p in (UNSHARDED, placement))
# print(both.losses.round(3))
# difference(both, unsharded)

# %% [markdown]
# After every step, the weights are sharded as the table says:

# %% tags=["active-ipynb"]
# from einshard import describe
#
# jax.tree.map(describe, both.weights.layers)._asdict()


# %% tags=["active-py"]
def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Trains unsharded and sharded, prints the losses, and returns the two runs."""
    devices = jax.devices()
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0].strip('# '))
    best = 'both' if len(devices) % 2 == 0 else 'data'
    parser.add_argument('--parallelism', choices=PLACEMENTS, default=best)
    parser.add_argument('--steps', type=int, default=120)
    parser.add_argument('--tied', action='store_true', help='embedding and head are one array')
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error('--steps must be at least 1')
    c = Config(tied=options.tied)

    def report(step: int, loss: float) -> None:
        if step % 10 == 0:
            print(f'step {step:4}  loss {loss:.4f}')

    kind = 'simulated' if devices[0].platform == 'cpu' else devices[0].device_kind
    print(f'Devices: {len(devices)} {kind}. Text: {len(text()) // 1000} kB.')
    runs: list[Run] = []
    # accelerators round the factors of a product by default, which would drown the comparison
    with jax.default_matmul_precision('float32'):
        for name in ('none', options.parallelism):
            placement = PLACEMENTS.get(name, UNSHARDED)
            print(f'\nParallelism: {name}')
            model = make_model(c, placement)
            runs.append(train(model, c, options.steps, report))
            print(f'last       loss {runs[-1].losses[-1]:.4f}, {runs[-1].seconds:.1f} s')
        prompts = next(batches(c))[:, : c.sequence // 2]
        written = generate(model, runs[-1].weights, prompts, c.sequence)
    for row in written[:2]:
        prompt, rest = np.split(row.astype(np.uint8), [prompts.shape[1]])
        print(f'\nprompt: {bytes(prompt)!r}\nwrites: {bytes(rest)!r}')
    apart = difference(runs[1], runs[0])
    print(f'\nThe largest relative difference between the losses of the two: {apart:.1e}')
    if not apart <= TOLERANCE:
        raise SystemExit(f'That is more than {TOLERANCE:.0e}.')
    return runs


if __name__ == '__main__':
    main()
