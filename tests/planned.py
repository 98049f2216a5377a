"""Models with axis names for the tests of `plan`, and costs computed by hand."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from placed import struct

from einshard import Rules, einshard, sharded

# private: one worker for all plans, which saves 3 s for each
from einshard._explain.partition import Worker
from einshard._plan import evaluate


class _SharedWorker(Worker):
    """A worker that goes on when a plan closes it."""

    def close(self):
        pass


@contextlib.contextmanager
def one_worker(n_devices):
    """Inside, all plans share a process, since starting one takes a second."""
    worker = _SharedWorker(n_devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, 'Worker', lambda n_devices: worker)
        yield
    Worker.close(worker)


MLP_RULES = Rules([('up', 'embed mlp'), ('down', 'mlp embed')])


def mlp_step(tokens=64, width=16, hidden=32):
    """A training step of an MLP, with its arguments."""

    @sharded(MLP_RULES, 'batch act', out=(MLP_RULES, None), donate_argnames='weights')
    def step(weights, x):
        def loss(weights):
            h = einshard(jax.nn.relu(x @ weights['up']), 'batch mlp')
            return jnp.sum(einshard(h @ weights['down'], 'batch act') ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradient), value

    shapes = {'up': (width, hidden), 'down': (hidden, width)}
    return step, ({name: struct(*shape) for name, shape in shapes.items()}, struct(tokens, width))


class Sizes(NamedTuple):
    """Sizes of the transformer."""

    layers: int = 2
    embed: int = 64
    heads: int = 8
    kv: int = 4
    head: int = 8
    mlp: int = 128
    vocab: int = 256
    seq: int = 32
    batch: int = 16


RULES = Rules(
    [
        (r'\bnorm$', 'layers embed'),
        (r'\bq$', 'layers embed heads head'),
        (r'\bk$', 'layers embed kv head'),
        (r'\bo$', 'layers heads head embed'),
        (r'\bup$', 'layers embed mlp'),
        (r'\bdown$', 'layers mlp embed'),
        (r'\btable$', 'vocab embed'),
    ],
    default='... -> * ...',
)

SIZES = Sizes()


def transformer_step(c=SIZES, pieces=1):
    """A training step: layers in a scan with remat, Adam, gradients accumulated over pieces."""
    import optax

    optimizer = optax.adam(1e-3)
    shapes = {
        'norm': (c.layers, c.embed),
        'q': (c.layers, c.embed, c.heads, c.head),
        'k': (c.layers, c.embed, c.kv, c.head),
        'o': (c.layers, c.heads, c.head, c.embed),
        'up': (c.layers, c.embed, c.mlp),
        'down': (c.layers, c.mlp, c.embed),
        'table': (c.vocab, c.embed),
    }
    weights = {name: struct(*shape) for name, shape in shapes.items()}

    @sharded(RULES, RULES, 'batch seq', out=(RULES, RULES, None), donate_argnums=(0, 1))
    def step(weights, state, tokens):
        if pieces == 1:
            loss, gradient = jax.value_and_grad(_loss)(weights, tokens)
        else:
            pairs = einshard(tokens.reshape(pieces, -1, c.seq), 'piece batch seq')
            zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, weights)
            (loss, gradient), _ = jax.lax.scan(functools.partial(_add, weights), zero, pairs)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state, loss

    state = jax.eval_shape(optimizer.init, weights)
    return step, (weights, state, struct(c.batch, c.seq, dtype='int32'))


def _add(weights, total, tokens):
    return jax.tree.map(jnp.add, total, jax.value_and_grad(_loss)(weights, tokens)), None


def _loss(weights, tokens):
    table = weights['table'].astype('bfloat16')
    x = einshard(table[tokens], 'batch norm_seq act')
    layers = {name: w for name, w in weights.items() if name != 'table'}
    x, _ = jax.lax.scan(jax.checkpoint(_layer), x, layers)
    logits = einshard(x @ table.T, 'batch seq vocab').astype('float32')
    right = tokens[..., None] == jnp.arange(logits.shape[-1])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(right, logits, 0), -1))


def _layer(x, weights):
    w = {name: array.astype(x.dtype) for name, array in weights.items()}
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w['norm']
    q = einshard(jnp.einsum('bsd,dhe->bshe', h, w['q']), 'batch seq heads head')
    k = einshard(jnp.einsum('bsd,dke->bske', h, w['k']), 'batch seq kv head')
    grouped = q.reshape(*k.shape[:3], -1, k.shape[3]).swapaxes(3, 4)
    scores = jax.nn.softmax(jnp.einsum('bskeg,btke->bkgst', grouped, k), -1)
    mixed = jnp.einsum('bkgst,btke->bskge', scores, k).reshape(q.shape)
    out = jnp.einsum('bshe,hed->bsd', einshard(mixed, 'batch seq heads head'), w['o'])
    x = einshard(x + out, 'batch norm_seq act')
    h = einshard(jax.nn.relu(x @ w['up']), 'batch seq mlp')
    return einshard(x + h @ w['down'], 'batch norm_seq act'), None


def experts_step(tokens=512, width=256, hidden=1024, experts=8, capacity=64):
    """A training step of a mixture of experts: tokens go to the experts by products."""
    rules = Rules(
        [('router', 'embed choice'), ('up', 'expert embed mlp'), ('down', 'expert mlp embed')]
    )

    def layer(weights, x):
        chosen = jnp.argmax(x @ weights['router'], -1)
        one_hot = jax.nn.one_hot(chosen, experts, dtype='int32')
        place = jax.nn.one_hot(jnp.cumsum(one_hot, 0) * one_hot - 1, capacity, dtype=x.dtype)
        place = einshard(place, 'batch expert place')
        each = einshard(jnp.einsum('bep,bd->epd', place, x), 'expert place act')
        h = einshard(
            jax.nn.relu(jnp.einsum('epd,edf->epf', each, weights['up'])), 'expert place mlp'
        )
        each = einshard(jnp.einsum('epf,efd->epd', h, weights['down']), 'expert place act')
        return einshard(jnp.einsum('bep,epd->bd', place, each), 'batch act')

    @sharded(rules, 'batch act', out=(rules, None), donate_argnums=0)
    def step(weights, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(layer(w, x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradient), loss

    shapes = {
        'router': (width, experts),
        'up': (experts, width, hidden),
        'down': (experts, hidden, width),
    }
    return step, ({name: struct(*shape) for name, shape in shapes.items()}, struct(tokens, width))
