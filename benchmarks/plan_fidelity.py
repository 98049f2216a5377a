"""Compares the two judges of `plan`: the partitioner for CPU, and the compiler for TPU v5e.

    python -m benchmarks.plan_fidelity            # all programs, 8 and 16 devices; takes minutes
    python -m benchmarks.plan_fidelity mlp v5e:2x4 10

It judges some candidates of each program twice, and prints Spearman's correlation of their bounds,
bytes and memory, and the candidates whose costs differ most.
"""

import itertools
import os
import random
import sys

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
from scipy.stats import spearmanr

from einshard import Rules, einshard, sharded, topology
from einshard._hlo.hardware import find_chip
from einshard._plan.candidate import Candidate
from einshard._plan.judge import Function, Partitioner, compile_on_target

BATCH, SEQ, ACT, HEADS, HEAD, MLP, EXPERTS = 16, 256, 1024, 16, 64, 4096, 16
MESHES = {
    'v5e:2x4': [{'x': 8}, {'x': 4, 'y': 2}, {'x': 2, 'y': 4}],
    'v5e:4x4': [{'x': 16}, {'x': 4, 'y': 4}, {'x': 8, 'y': 2}, {'x': 2, 'y': 8}],
}


def norm(x):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def mlp(p, x):
    h = einshard(jnp.einsum('bsd,df->bsf', x, p['up']), 'batch seq mlp')
    return einshard(jnp.einsum('bsf,fd->bsd', jax.nn.gelu(h), p['down']), 'batch seq act')


def attention(p, x):
    def heads(name):
        made = jnp.einsum('bsd,dhe->bshe', x, p[name])
        return einshard(made, 'batch attn_seq heads head')

    q, k, v = map(heads, ('q', 'k', 'v'))
    scores = jnp.einsum('bqhe,bkhe->bhqk', q, k) * HEAD**-0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    y = einshard(jnp.einsum('bhqk,bkhe->bqhe', weights, v), 'batch attn_seq heads head')
    return einshard(jnp.einsum('bshe,hed->bsd', y, p['out']), 'batch seq act')


def block(p, x):
    x = x + attention(p, norm(x))
    return x + mlp(p, norm(x))


def layers(p, x):
    step = jax.checkpoint(lambda x, w: (block(w, x), None))
    return jax.lax.scan(step, x, p)[0]


def moe(p, x):
    s = x.shape[1]
    capacity = 2 * s // EXPERTS
    gates = jax.nn.softmax(jnp.einsum('bsd,de->bse', x, p['gates']).astype(jnp.float32))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = jnp.cumsum(chosen, 1) * chosen - 1
    slots = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
    sent = jnp.einsum('bsd,bsec->becd', x, slots)
    sent = einshard(sent, 'expert_batch expert capacity act')
    h = jnp.einsum('becd,edf->becf', sent, p['w1'])
    h = einshard(jax.nn.gelu(h), 'expert_batch expert capacity mlp')
    y = jnp.einsum('becf,efd->becd', h, p['w2'])
    y = einshard(y, 'expert_batch expert capacity act')
    weights = (jnp.max(gates, -1)[..., None, None] * slots).astype(x.dtype)
    return einshard(jnp.einsum('becd,bsec->bsd', y, weights), 'batch seq act')


RULES = Rules(
    [
        ('up', '... embed mlp'),
        ('down', '... mlp embed'),
        ('[qkv]', '... embed heads head'),
        ('out', '... heads head embed'),
        ('gates', 'embed expert'),
        ('w1', 'expert embed mlp'),
        ('w2', 'expert mlp embed'),
    ]
)
SIZES = {
    'batch': BATCH,
    'expert_batch': BATCH,
    'seq': SEQ,
    'attn_seq': SEQ,
    'act': ACT,
    'embed': ACT,
    'mlp': MLP,
    'heads': HEADS,
    'head': HEAD,
    'expert': EXPERTS,
    'capacity': 2 * SEQ // EXPERTS,
}
WEIGHTS = {
    'mlp': {'up': 'embed mlp', 'down': 'mlp embed'},
    'attention': {**dict.fromkeys('qkv', 'embed heads head'), 'out': 'heads head embed'},
    'moe': {'gates': 'embed expert', 'w1': 'expert embed mlp', 'w2': 'expert mlp embed'},
}
WEIGHTS['block'] = WEIGHTS['layers'] = {**WEIGHTS['attention'], **WEIGHTS['mlp']}
ACTIVATIONS = {
    'mlp': ['batch seq act', 'batch seq mlp'],
    'attention': ['batch seq act', 'batch attn_seq heads head'],
    'moe': ['batch seq act', 'expert_batch expert act', 'expert_batch expert mlp'],
}
ACTIVATIONS['block'] = ACTIVATIONS['layers'] = ACTIVATIONS['attention'] + ACTIVATIONS['mlp']
FREE = {
    'mlp': ['batch', 'seq', 'embed', 'mlp'],
    'attention': ['batch', 'seq', 'embed', 'heads'],
    'moe': ['batch', 'expert_batch', 'embed', 'mlp', 'expert'],
    'block': ['batch', 'seq', 'embed', 'mlp', 'heads'],
}
FREE['layers'] = FREE['block']


def train_step(name):
    apply = globals()[name]

    @sharded(RULES, 'batch seq act', out=(RULES, None), donate_argnums=0)
    def step(params, x):
        def loss(params):
            half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
            return jnp.mean((apply(half, x) - x).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    stacked = (4,) if name == 'layers' else ()
    params = {
        key: jax.ShapeDtypeStruct((*stacked, *(SIZES[axis] for axis in axes.split())), jnp.float32)
        for key, axes in WEIGHTS[name].items()
    }
    return step, (params, jax.ShapeDtypeStruct((BATCH, SEQ, ACT), jnp.bfloat16))


def candidates(name, meshes):
    arrays = [axes.split() for axes in (*WEIGHTS[name].values(), *ACTIVATIONS[name])]
    for mesh in meshes:
        ways = [(), *((axis,) for axis in mesh), *([tuple(mesh)] if len(mesh) > 1 else [])]
        for chosen in itertools.product(ways, repeat=len(FREE[name])):
            axes = dict(zip(FREE[name], chosen, strict=True))
            used = [[a for n in names for a in axes.get(n, ())] for names in arrays]
            divides = all(SIZES[n] % _size(mesh, on) == 0 for n, on in axes.items())
            if divides and axes['batch'] and all(len(set(a)) == len(a) for a in used):
                yield Candidate(tuple(mesh.items()), tuple(axes.items()))


def _size(mesh, axes):
    n = 1
    for axis in axes:
        n *= mesh[axis]
    return n


def compare(name, slice_name, n=24):
    mesh = topology(slice_name)
    chip = find_chip(mesh.devices.flat[0].device_kind)
    step, args = train_step(name)
    every = list(candidates(name, MESHES[slice_name]))
    chosen = random.Random(0).sample(every, min(n, len(every)))
    function = Function(step, args, {}, mesh, chip)
    with Partitioner(function) as partitioner:
        fast = list(partitioner.judge(chosen))
    slow = [compile_on_target(function, candidate) for candidate in chosen]
    pairs = [(a, b) for a, b in zip(fast, slow, strict=True) if not (a.error or b.error)]
    failed = [(a, b) for a, b in zip(fast, slow, strict=True) if a.error or b.error]
    rows = {
        'bound': lambda one: one.seconds[1] * 1e3,
        'bytes': lambda one: one.network_bytes / 2**30,
        'memory': lambda one: (one.memory or 0) / 2**30,
    }
    figures = {
        key: spearmanr(*zip(*((of(a), of(b)) for a, b in pairs), strict=True)).statistic
        for key, of in rows.items()
    }
    text = ', '.join(f'{key} {value:.3f}' for key, value in figures.items())
    print(f'{name} on {slice_name}, {len(pairs)} of {len(every)} candidates: {text}', flush=True)
    cost = rows['bound']
    for a, b in sorted(pairs, key=lambda pair: -abs(1 - cost(pair[0]) / cost(pair[1])))[:4]:
        both = [f'{cost(one):.2f} ms {dict(one.sent_by)}' for one in (a, b)]
        print('   ', a.candidate, *both, sep='\n      ')
    for a, b in failed:
        print('   ', a.candidate, a.error, b.error, sep='\n      ')
    return pairs


def main(name='', slice_name='', n='24'):
    for one, other in itertools.product(FREE, MESHES):
        if name in ('', one) and slice_name in ('', other):
            compare(one, other, int(n))


if __name__ == '__main__':
    main(*sys.argv[1:])
