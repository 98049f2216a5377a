"""Compares plans with tables written by hand, all evaluated by the compiler of the target.

    python -m benchmarks.plan_by_hand          # all TPU models; takes an hour on two cores
    python -m benchmarks.plan_by_hand 128B
    python -m benchmarks.plan_by_hand 8B       # by `plan`, for 64 H100s; needs JAX's CUDA plugin

The sizes, batches and mesh shapes for TPUs are those of MaxText's published configurations for
v5e-256. 8B has the sizes of Llama 3 8B, and 2 sequences on each GPU. The model is ours: a
transformer with attention in blocks, Adam, and remat of whole layers.
"""

import os
import sys
import time
from contextlib import closing
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import optax
from jax import ShapeDtypeStruct as Shape

from einshard import Rules, einshard, plan, shard_largest, sharded, topology
from einshard._chips.table import as_chip
from einshard._plan.evaluate import Function, Partitioner
from einshard._plan.named_program import find_named
from einshard._plan.search import PlanSearch
from einshard._plan.space import Space, read_candidate
from einshard._plan.starts import Starts

SEQ, HEAD, BLOCK, DEVICES = 2048, 128, 256, 256
COMPILATIONS = 12


class Sizes(NamedTuple):
    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int
    batch: int
    tensor: int = 1
    is_gpt: bool = False  # no gate in the MLP, and the embedding also makes the logits
    kv_heads: int | None = None  # default: heads


MODELS = {
    '16B': Sizes(32, 4096, 64, 28672, 32000, batch=6 * 256),
    '32B': Sizes(32, 8192, 64, 28672, 32000, batch=4 * 256),
    '64B': Sizes(64, 8192, 64, 28672, 32000, batch=2 * 256),
    '128B': Sizes(64, 8192, 128, 57344, 32000, batch=256, tensor=16),
    '175B': Sizes(96, 12288, 96, 49152, 50304, batch=128, tensor=16, is_gpt=True),
}
GPU = Sizes(32, 4096, 32, 14336, 128256, batch=2 * 64, kv_heads=8)
GPUS = 'h100:8x8'
RULES = Rules(
    [
        (r'\bnorms$', 'layers two embed'),
        (r'\b[qkv]$', 'layers embed heads head'),
        (r'\bout$', 'layers heads head embed'),
        (r'\b(up|gate)$', 'layers embed mlp'),
        (r'\bdown$', 'layers mlp embed'),
        (r'\bvocab$', 'vocab embed'),
        (r'\blogits$', 'embed vocab'),
    ],
    default='... -> * ...',
)


def weights_of(c):
    shapes = {
        'norms': (c.layers, 2, c.embed),
        'q': (c.layers, c.embed, c.heads, HEAD),
        **dict.fromkeys('kv', (c.layers, c.embed, c.kv_heads or c.heads, HEAD)),
        'out': (c.layers, c.heads, HEAD, c.embed),
        'up': (c.layers, c.embed, c.mlp),
        'down': (c.layers, c.mlp, c.embed),
        'vocab': (c.vocab, c.embed),
    }
    if not c.is_gpt:
        shapes |= {'gate': shapes['up'], 'logits': (c.embed, c.vocab)}
    return {name: Shape(shape, 'float32') for name, shape in shapes.items()}


def attention(q, k, v):
    """Attention of one block of queries at a time, which needs little memory."""
    k, v = (jnp.repeat(one, q.shape[2] // one.shape[2], 2) for one in (k, v))

    @jax.checkpoint
    def block(_, q):
        scores = jnp.einsum('bqhe,bkhe->bhqk', q, k).astype(jnp.float32) * HEAD**-0.5
        return None, jnp.einsum('bhqk,bkhe->bqhe', jax.nn.softmax(scores).astype(v.dtype), v)

    blocks = q.reshape(q.shape[0], -1, BLOCK, *q.shape[2:]).swapaxes(0, 1)
    return jax.lax.scan(block, None, blocks)[1].swapaxes(0, 1).reshape(q.shape)


def norm(x, scale):
    x32 = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)
    return (x32 * root).astype(x.dtype) * scale


def layer(x, weights):
    w = {name: one.astype(x.dtype) for name, one in weights.items()}
    h = norm(x, w['norms'][0])
    heads = 'batch seq heads head'
    q, k, v = (einshard(jnp.einsum('bsd,dhe->bshe', h, w[name]), heads) for name in 'qkv')
    mixed = einshard(attention(q, k, v), heads)
    x = einshard(x + jnp.einsum('bshe,hed->bsd', mixed, w['out']), 'batch norm_seq act')
    h = norm(x, w['norms'][1])
    up = einshard(h @ w['up'], 'batch seq mlp')
    hidden = jax.nn.silu(einshard(h @ w['gate'], 'batch seq mlp')) * up if 'gate' in w else up
    return einshard(x + jax.nn.gelu(hidden) @ w['down'], 'batch norm_seq act'), None


def loss(weights, tokens):
    layers = {name: w for name, w in weights.items() if name not in ('vocab', 'logits')}
    x = einshard(weights['vocab'].astype('bfloat16')[tokens], 'batch norm_seq act')
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
    last = weights.get('logits', weights['vocab'].T).astype(x.dtype)
    logits = einshard(x @ last, 'batch seq vocab').astype('float32')
    right = tokens[..., None] == jnp.arange(logits.shape[-1])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(right, logits, 0), -1))


def train_step(c, specs=RULES):
    optimizer = optax.adamw(3e-5, 0.9, 0.95)

    @sharded(specs, specs, 'batch seq', out=(specs, specs, None), donate_argnums=(0, 1))
    def step(weights, state, tokens):
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights = weights_of(c)
    state = jax.eval_shape(optimizer.init, weights)
    return step, (weights, state, Shape((c.batch, SEQ), 'int32'))


def tables(c):
    """The tables to evaluate, with the axis names of the model: FSDP, and that of MaxText."""
    fsdp = {'batch': '@fsdp', 'embed': '@fsdp'}
    if c.batch % DEVICES == 0:
        yield 'FSDP', ({'fsdp': DEVICES}, fsdp)
    if c.tensor > 1:
        tensor = dict.fromkeys(['act', 'heads', 'mlp', 'vocab'], '@tensor')
        mesh = {'fsdp': DEVICES // c.tensor, 'tensor': c.tensor}
        yield 'MaxText', (mesh, fsdp | tensor)


def evaluate_largest(c, mesh):
    """Evaluates `shard_largest` for weights and optimizer, with the batch over most devices."""
    step, args = train_step(c, shard_largest)
    model = find_named(*train_step(c), {}, mesh, as_chip('TPU v5e')).model
    fsdp = min(c.batch, DEVICES)
    table = {'fsdp': fsdp, 'rest': DEVICES // fsdp}, {'batch': '@fsdp'}
    candidate = read_candidate(0, table, model, DEVICES)
    return Function(step, args, {}, mesh, as_chip('TPU v5e')).evaluate(candidate)


def find_best(step, args, named, given):
    """Searches as `plan` does, up to the partitioner's best plan that fits."""
    mesh, chip = named.mesh, as_chip('TPU v5e')
    start = time.process_time()
    ranked = Starts(named, Space(named.model, DEVICES), chip.memory).find()
    print(f'  {named.n_scored} scores in {time.process_time() - start:.0f} s', flush=True)
    with closing(Partitioner(Function(step, args, {}, mesh, chip))) as fast:
        limit = int(chip.memory)
        search = PlanSearch(ranked, given, fast.evaluate_all, None, 'bound', limit, COMPILATIONS)
        search.run()
    return search.ranking()


def compare(name):
    c, mesh = MODELS[name], topology('v5e:16x16')
    step, args = train_step(c)
    n = sum(one.size for one in jax.tree.leaves(args[0])) / 1e9
    print(f'{name}: {n:.1f} billion parameters', flush=True)
    named = find_named(step, args, {}, mesh, as_chip('TPU v5e'))
    given = {label: read_candidate(0, table, named.model, DEVICES) for label, table in tables(c)}
    ranking = find_best(step, args, named, list(given.values()))
    for i, one in enumerate(ranking):
        show(f'{i}', one)
    function = Function(step, args, {}, mesh, as_chip('TPU v5e'))
    if ranking[0].candidate not in given.values():
        given['plan'] = ranking[0].candidate
    for label, candidate in given.items():
        show(label, function.evaluate(candidate))
    show('shard_largest', evaluate_largest(c, mesh))


def gpu_tables():
    """FSDP over all GPUs, FSDP with tensor parallelism in each domain, and HSDP over domains."""
    fsdp = {'batch': '@fsdp', 'embed': '@fsdp'}
    yield 'FSDP 64', ({'fsdp': 64}, fsdp)
    tensor = dict.fromkeys(['heads', 'mlp', 'vocab'], '@tensor')
    yield 'FSDP 8 x tensor 8', ({'fsdp': 8, 'tensor': 8}, fsdp | tensor)
    yield 'HSDP 8 x 8', ({'data': 8, 'fsdp': 8}, {'batch': '@(data,fsdp)', 'embed': '@fsdp'})


def compare_on_gpus():
    """Plans without knowing the tables, then evaluates these for the same GPUs."""
    mesh, chip = topology(GPUS), as_chip('H100')
    step, args = train_step(GPU)
    start = time.perf_counter()
    found = plan(step, *args, mesh=mesh)
    print(f'8B for {GPUS}: plan took {time.perf_counter() - start:.0f} s')
    print(found, flush=True)
    model = find_named(step, args, {}, mesh, chip).model
    function = Function(step, args, {}, mesh, chip)
    for label, table in gpu_tables():
        show(label, function.evaluate(read_candidate(0, table, model, mesh.size)))


def show(label, one):
    memory = one.memory or 0
    figures = f'{one.network_bytes / 2**30:.1f} GiB sent, {memory / 2**30:.1f} GiB of memory'
    seconds = one.seconds[1]
    print(f'  {label}: {figures}, {seconds:.2f} s by {one.costs_from}; {one.candidate} {one.error}')
    print(f'      {one.sent_text}', flush=True)


def main(*names):
    for name in names or MODELS:
        compare_on_gpus() if name == '8B' else compare(name)


if __name__ == '__main__':
    main(*sys.argv[1:])
