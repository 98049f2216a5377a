"""Gradient accumulation with partial sums: one all-reduce, after the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import program
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from placed import check_equal, mesh_of, struct

from einshard import (
    Rules,
    describe,
    einshard,
    einsum,
    explain,
    gather,
    make_sharding,
    sharded,
    topology,
)

EXPLICIT = AxisType.Explicit
MESH = mesh_of(types=EXPLICIT, data=4, tensor=2)
N = 3  # micro-batches


def shared(tree, sign):
    """The placements of the leaves, with a sign."""
    return jax.tree.map(lambda placement: f'{placement} {sign}', describe(tree))


def accumulated(loss, weights, zeros, batches):
    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, batch)), None

    return jax.lax.scan(add, zeros, batches)[0]


# --- a multilayer perceptron --------------------------------------------------------------------

WEIGHTS = {
    'up': np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32),
    'down': np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32),
}
BATCHES = np.random.default_rng(2).normal(size=(N, 8, 16)).astype(np.float32)
ZEROS = jax.tree.map(np.zeros_like, WEIGHTS)
ROWS = 'n b d -> n b* d'


def mlp_loss(weights, x):
    return ((jax.nn.relu(x @ weights['up']) @ weights['down'] - x) ** 2).sum()


def accumulate(weights, zeros, batches):
    return accumulated(mlp_loss, weights, zeros, batches)


def counts(report):
    return [(row.kind, row.executions) for row in report.collectives]


def test_the_loop_has_no_collectives():
    with jax.set_mesh(MESH):
        ordinary = sharded('... -> * ...', '... -> * ...', ROWS)
        partial = sharded('... =*', '... +*', ROWS, out='... +*', collectives=())
        arguments = WEIGHTS, ZEROS, BATCHES
        assert counts(explain(ordinary(accumulate), *arguments)) == [('all-reduce', N)]
        assert counts(explain(partial(accumulate), *arguments)) == []
        total = partial(accumulate)(*arguments)
        assert describe(total['up']) == 'a b -> a b +@(data,tensor)'
        expected = jax.jit(accumulate)(WEIGHTS, ZEROS, BATCHES)
        check_equal(gather(total), gather(expected), rtol=1e-4, atol=1e-4)


def test_the_finding_about_the_ordinary_loop():
    rows = 'n b d -> n b@data d'
    with jax.set_mesh(mesh_of(types=EXPLICIT, data=8)):
        ordinary = sharded('... -> * ...', '... -> * ...', rows)(accumulate)
        (found,) = explain(ordinary, WEIGHTS, ZEROS, BATCHES).findings
        assert found.kind == 'summed in a loop'
        partial = sharded('... =@data', '... +@data', rows, out='... +@data')(accumulate)
        assert explain(partial, WEIGHTS, ZEROS, BATCHES).findings == ()


def test_one_all_reduce_in_one_program():
    with jax.set_mesh(MESH):

        @sharded('... -> * ...', ROWS, collectives={'all-reduce': 1})
        def ours(weights, batches):
            zeros = einshard(jax.tree.map(jnp.zeros_like, weights), '... +*')
            total = accumulate(einshard(weights, '... =*'), zeros, batches)
            return einshard(total, '... -> * ...')

        everything = {'data', 'tensor'}

        @jax.jit
        def by_hand(weights, batches):
            zeros = jax.tree.map(jnp.zeros_like, weights)
            zeros = reshard(zeros, P(None, None, unreduced=everything))
            total = accumulate(reshard(weights, P(None, None, reduced=everything)), zeros, batches)
            return reshard(total, P(None, None))

        weights = reshard(WEIGHTS, P())
        batches = reshard(BATCHES, P(None, ('data', 'tensor')))
        compiled = ours.lower(weights, batches).compile()
        assert program(compiled) == program(by_hand.lower(weights, batches).compile())
        assert counts(explain(ours, weights, batches)) == [('all-reduce', 1)]
        expected = jax.jit(accumulate)(WEIGHTS, ZEROS, BATCHES)
        check_equal(gather(ours(weights, batches)), gather(expected), rtol=1e-4, atol=1e-4)


# --- a transformer with tensor parallelism ------------------------------------------------------

RULES = Rules(
    [
        ('embed', 'vocab d -> vocab@tensor d'),
        ('[qkv]$', 'layer d heads k -> layer d heads@tensor k'),
        ('o$', 'layer heads k d -> layer heads@tensor k d'),
        ('up', 'layer d f -> layer d f@tensor'),
        ('down', 'layer f d -> layer f@tensor d'),
    ]
)
SHAPES = {'q': (16, 4, 8), 'k': (16, 4, 8), 'v': (16, 4, 8), 'o': (4, 8, 16)}
SHAPES |= {'up': (16, 32), 'down': (32, 16)}
RNG = np.random.default_rng(3)
PARAMS = {
    'embed': RNG.normal(size=(24, 16)).astype(np.float32) / 4,
    'layers': {k: RNG.normal(size=(2, *s)).astype(np.float32) / 4 for k, s in SHAPES.items()},
}
TOKENS = RNG.integers(0, 24, (N, 8, 9), dtype=np.int32)


def block(x, w):
    q, k, v = (jnp.einsum('bsd,dhk->bshk', x, w[name]) for name in 'qkv')
    scores = jax.nn.softmax(jnp.einsum('bshk,bthk->bhst', q, k))
    heads = jnp.einsum('bhst,bthk->bshk', scores, v)
    x += einsum('b s heads k, heads k d -> b@data s d', heads, w['o'])
    hidden = jax.nn.gelu(x @ w['up'])
    return x + einsum('b s f, f d -> b@data s d', hidden, w['down'])


def transformer_loss(params, tokens):
    x = params['embed'].at[tokens[:, :-1]].get(out_sharding=make_sharding('b@data s d'))
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params['layers'])
    logits = x @ params['embed'].T
    return -(jax.nn.one_hot(tokens[:, 1:], 24) * jax.nn.log_softmax(logits)).sum()


def gradients(params, tokens):
    zeros = einshard(jax.tree.map(jnp.zeros_like, params), shared(params, '+@data'))
    weights = einshard(params, shared(params, '=@data'))
    return einshard(accumulated(transformer_loss, weights, zeros, tokens), RULES)


def in_the_loop(params, tokens):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return accumulated(transformer_loss, params, zeros, tokens)


def along_data(report):
    return [row.executions for row in report.collectives if row.group_size == 4]


def test_a_transformer():
    with jax.set_mesh(MESH):
        both = sharded(RULES, 'n b s -> n b@data s', out=RULES)
        assert along_data(explain(both(gradients), PARAMS, TOKENS, tries=0)) == [1]
        executions = along_data(explain(both(in_the_loop), PARAMS, TOKENS, tries=0))
        assert min(executions) == N
        ours, expected = both(gradients)(PARAMS, TOKENS), both(in_the_loop)(PARAMS, TOKENS)
        assert describe(ours) == describe(expected)
        check_equal(gather(ours), gather(expected), rtol=1e-4, atol=1e-4)


# --- on TPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('target', 'kind'),
    [('* b f', 'all-reduce'), ('b@data f', 'reduce-scatter'), ('b f@data', 'reduce-scatter')],
)
def test_a_sum_on_tpu(target, kind):
    pytest.importorskip('libtpu')
    mesh = topology('v5e:4x4', axis_types=EXPLICIT, data=8, tp=2)

    @sharded('b d@data', 'd@data f', out=target, mesh=mesh)
    def product(x, w):
        return einshard(einsum('b d, d f -> b f +@data', x, w), target)

    rows = explain(product, struct(1024, 2048), struct(2048, 512), tries=0).collectives
    assert [row.kind for row in rows] == [kind]


def square(w, x):
    return ((x @ w) ** 2).sum()


def test_accumulation_on_tpu():
    pytest.importorskip('libtpu')
    mesh = topology('v5e:4x4', axis_types=EXPLICIT, data=8, tp=2)

    @sharded('d f', 'n b@data d', out='d@data f', mesh=mesh)
    def gradient(w, batches):
        zeros = einshard(jnp.zeros_like(w), 'd f +@data')
        total = accumulated(square, einshard(w, 'd f =@data'), zeros, batches)
        return einshard(total, 'd@data f')

    report = explain(gradient, struct(1024, 512), struct(N, 256, 1024), tries=0)
    assert counts(report) == [('reduce-scatter', 1)]
