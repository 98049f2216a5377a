"""Programs that the findings of explain were not developed on: correct ones, and planted mistakes.

`python tests/held_out.py` prints what is found in each, on 16 simulated devices; with `tpu`, for
TPU v5e 4x4; with `gpu`, for two domains of 8 H100s. docs/explain.md has the error rates.
"""

from __future__ import annotations

import functools
import os
import sys

if __name__ == '__main__':
    os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=16'
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import device_mesh, einshard, explain, for_optimizer, per_device, sharded, topology

TARGET = {'tpu': 'v5e:4x4', 'gpu': 'h100:2x8'}.get(*sys.argv[1:2] or [''])


def mesh(**axes):
    return topology(TARGET, **axes) if TARGET else device_mesh(jax.devices()[:16], **axes)


def f32(*shape, spec=None, on=None, dtype=np.float32):
    sharding = None if spec is None else NamedSharding(on, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


i32 = functools.partial(f32, dtype=np.int32)


def sgd(loss):
    def step(w, *data):
        g = jax.grad(loss)(w, *data)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g)

    return step


# --- a classifier of images, with convolutions and batch norm, in Flax ---------------------------


class Images(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), strides=2)(x)
            x = nn.relu((x - x.mean((0, 1, 2))) / (x.std((0, 1, 2)) + 1e-3))
        return nn.Dense(128)(x.reshape(len(x), -1))


def images(batch='b* h w c'):
    model = Images()
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 4)))

    def loss(w, x):
        return jnp.mean(jax.nn.logsumexp(model.apply(w, x), -1))

    on = mesh()
    weights = jax.tree.map(lambda _: '* ...', params)
    step = sharded(weights, batch, out=weights, mesh=on)(sgd(loss))
    return explain(step, params, f32(256, 32, 32, 4))


# --- an encoder and a decoder, plain JAX with PartitionSpecs ------------------------------------


ROWS, COLUMNS = P('tensor', None), P(None, 'tensor')


def encoder_decoder(embed=ROWS, constrain=True, cross=COLUMNS, out=ROWS):
    on = mesh(data=2, tensor=8)
    d, f, v = 256, 512, 1024

    def held(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(on, P('data'))) if constrain else x

    def block(x, w, memory=None):
        q = jax.nn.silu(x @ w['in'])
        if memory is not None:
            k = memory @ w['cross']
            share = jax.nn.softmax(jnp.einsum('bsf,btf->bst', q, k) / 16)
            q = jnp.einsum('bst,btf->bsf', share, k)
        return held(x + q @ w['out'])

    def loss(w, source, target):
        x, y = held(w['embed'][source]), held(w['embed'][target])
        for layer in w['encoder']:
            x = block(x, layer)
        for layer in w['decoder']:
            y = block(y, layer, x)
        return jnp.mean(jax.nn.logsumexp(y @ w['embed'].T, -1))

    layer = {'in': f32(d, f, spec=P(None, 'tensor'), on=on), 'out': f32(f, d, spec=out, on=on)}
    cross_layer = layer | {'cross': f32(d, f, spec=cross, on=on)}
    w = {'encoder': [layer] * 2, 'decoder': [cross_layer] * 2}
    w['embed'] = f32(v, d, spec=embed, on=on)
    tokens = i32(32, 64, spec=P('data'), on=on)
    return explain(jax.jit(sgd(loss)), w, tokens, tokens)


# --- a mixture of experts ------------------------------------------------------------------------


def experts(w_in='e* d f', w_out='e* f d', dispatched='e* g c d', combined='g* s d'):
    on = mesh()
    g, s, d, e, c, f = 32, 64, 128, 16, 8, 512

    def loss(w, x):
        shares = jax.nn.softmax(x @ w['router'])
        chosen = jax.nn.one_hot(jnp.argsort(-shares, 1)[:, :c], s)  # g c e s
        sent = einshard(jnp.einsum('gces,gsd->egcd', chosen, x), dispatched)
        h = jax.nn.relu(jnp.einsum('egcd,edf->egcf', sent, w['in']))
        back = einshard(jnp.einsum('egcf,efd->egcd', h, w['out']), dispatched)
        y = einshard(jnp.einsum('gces,egcd->gsd', chosen, back), combined)
        return jnp.mean((x + y) ** 2)

    w = {'router': f32(d, e), 'in': f32(e, d, f), 'out': f32(e, f, d)}
    spec = {'router': '* d e', 'in': w_in, 'out': w_out}
    return explain(sharded(spec, 'g* s d', out=spec, mesh=on)(sgd(loss)), w, f32(g, s, d))


# --- decoding with a cache -----------------------------------------------------------------------


def decoding(q='d h@tensor e', o='h@tensor e d', cache='b@data t h@tensor e', down='f@tensor d'):
    on = mesh(data=2, tensor=8)
    b, t, d, h, e, f = 16, 128, 512, 16, 32, 1024

    def decode(w, cache, x, n):
        for layer in w:
            q, k = (jnp.einsum('bd,dhe->bhe', x, layer[name]) for name in 'qk')
            keys = jax.lax.dynamic_update_slice_in_dim(cache, k[:, None], n, 1)
            share = jax.nn.softmax(jnp.einsum('bhe,bthe->bht', q, keys))
            x = x + jnp.einsum('bhe,hed->bd', jnp.einsum('bht,bthe->bhe', share, keys), layer['o'])
            x = einshard(x + jax.nn.gelu(x @ layer['up']) @ layer['down'], 'b d -> b@data d')
        return x, keys

    layer = dict.fromkeys('qk', f32(d, h, e)) | {'o': f32(h, e, d)}
    layer |= {'up': f32(d, f), 'down': f32(f, d)}
    spec = {'q': q, 'k': q, 'o': o, 'up': 'd f@tensor', 'down': down}
    step = sharded([spec] * 2, cache, 'b@data d', None, out=('b@data d', cache), mesh=on)(decode)
    return explain(step, [layer] * 2, f32(b, t, h, e), f32(b, d), 3)


# --- fine-tuning of adapters, with optax --------------------------------------------------------


def adapters(states=None, frozen='d@data f', constraint='b d -> b@data d'):
    on = mesh(data=16)
    b, d, r = 256, 512, 8
    optimizer = optax.adam(1e-3)
    spec = {'a': 'd@data r', 'b': 'r d@data'}
    params = {'a': f32(d, r), 'b': f32(r, d)}
    opt = jax.eval_shape(optimizer.init, params)

    def step(params, opt, frozen, x):
        def loss(p):
            y = x
            for w in frozen:
                y = jnp.tanh(y @ w + (y @ p['a']) @ p['b'])
                y = y if constraint is None else einshard(y, constraint)
            return jnp.mean(y**2)

        updates, new = optimizer.update(jax.grad(loss)(params), opt)
        return optax.apply_updates(params, updates), new

    opt_spec = for_optimizer(params, spec) if states is None else states
    f = sharded(spec, opt_spec, [frozen] * 3, 'b@data d', out=(spec, opt_spec), mesh=on)(step)
    return explain(f, params, opt, [f32(d, d)] * 3, f32(b, d))


# --- a recurrent network, scanned over time -------------------------------------------------------


def recurrent(w='h@data k', constrain=True, accumulate=1):
    on = mesh(data=16)
    b, t, h = 64, 16, 256

    def loss(p, x):
        def step(state, x):
            state = jnp.tanh(state @ p['w'] + x @ p['u'])
            return (einshard(state, 'b h -> b@data h') if constrain else state), None

        zeros = jnp.zeros((x.shape[0], h))
        return jnp.mean(jax.lax.scan(step, zeros, x.swapaxes(0, 1))[0] ** 2)

    def train(p, x):
        if accumulate == 1:
            return sgd(loss)(p, x)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, part)), None

        parts = x.reshape(-1, accumulate, t, h).swapaxes(0, 1)
        g, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), parts)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, g)

    spec = {'w': w, 'u': w}
    f = sharded(spec, 'b@data t h', out=spec, mesh=on)(train)
    return explain(f, {'w': f32(h, h), 'u': f32(h, h)}, f32(b, t, h))


# --- tensor parallelism by hand, in per_device ----------------------------------------------------


def by_hand():
    on = mesh(data=4, tensor=4)

    @per_device('b@data d', 'd f@tensor', 'f@tensor d', out='b@data d', mesh=on)
    def layer(x, w_in, w_out):
        return jax.lax.psum(jax.nn.relu(x @ w_in) @ w_out, 'tensor')

    return explain(layer, f32(256, 256), f32(256, 1024), f32(1024, 256))


# --- attention over a sharded context -------------------------------------------------------------


def context(heads='b@data s@context h e', q='d@data h e'):
    on = mesh(data=4, context=4)
    b, s, d, h, e = 16, 256, 256, 8, 32

    def loss(w, x):
        for layer in w:
            q, k, v = (jnp.einsum('bsd,dhe->bshe', x, layer[name]) for name in 'qkv')
            k, v = (einshard(y, 'b s h e -> b@data s h e') for y in (k, v))
            share = jax.nn.softmax(jnp.einsum('bshe,bthe->bhst', einshard(q, heads), k))
            mixed = einshard(jnp.einsum('bhst,bthe->bshe', share, v), heads)
            x = einshard(x + jnp.einsum('bshe,hed->bsd', mixed, layer['o']), 'b@data s@context d')
        return jnp.mean(x**2)

    layer = {name: f32(d, h, e) for name in 'qkv'} | {'o': f32(h, e, d)}
    spec = dict.fromkeys('qkv', q) | {'o': 'h e d@data'}
    f = sharded([spec] * 2, 'b@data s@context d', out=[spec] * 2, mesh=on)(sgd(loss))
    return explain(f, [layer] * 2, f32(b, s, d))


CORRECT = {
    'images, data parallel': images,
    'encoder and decoder': encoder_decoder,
    'encoder and decoder, no constraints': lambda: encoder_decoder(constrain=False),
    'experts': experts,
    'decoding': decoding,
    'adapters': adapters,
    'adapters on replicated weights': lambda: adapters(frozen='d f'),
    'recurrent, FSDP': recurrent,
    'recurrent, data parallel': lambda: recurrent(w='h k'),
    'recurrent, FSDP, microbatches': lambda: recurrent(accumulate=4),
    'by hand': by_hand,
    'context parallel': context,
}
# program, and the kinds of findings of which one has to be there
MISTAKES = {
    'images, replicated batch': (lambda: images('* b h w c'), 'placement'),
    'embedding over d': (
        lambda: encoder_decoder(embed=P(None, 'tensor'), constrain=False),
        'missing constraint',
    ),
    'output projection': (lambda: encoder_decoder(out=P(None, 'tensor')), 'placement'),
    'unsharded cross attention': (lambda: encoder_decoder(cross=P()), 'placement'),
    'replicated experts': (
        lambda: experts('* e d f', '* e f d', '* e g c d'),
        'placement',
    ),
    'replicated heads': (lambda: decoding('d h e', 'h e d', 'b@data t h e'), 'placement'),
    'down projection in decoding': (lambda: decoding(down='f d@tensor'), 'placement'),
    'states of adapters': (lambda: adapters(states='...'), 'unsharded states'),
    'recurrent, no constraint': (lambda: recurrent(constrain=False), 'missing constraint'),
    'recurrent, reduced in the loop': (
        lambda: recurrent(w='h k', accumulate=4),
        'summed in a loop',
    ),
    'context, replicated heads': (lambda: context(heads='b@data s h e'), 'placement'),
}


def main():
    for name, build in CORRECT.items():
        print(f'correct  {name}: {[finding.kind for finding in build().findings]}', flush=True)
    for name, (build, kind) in MISTAKES.items():
        report = build()
        kinds = [finding.kind for finding in report.findings]
        print(f'mistake  {name} ({kind}): {kinds}', flush=True)
        if '-v' in sys.argv:
            print(report)


if __name__ == '__main__':
    main()
