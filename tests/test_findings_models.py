"""The findings of explain on models of Flax and Equinox: planted mistakes and their fixes."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistakes import constrained
from placed import mesh_of

from einshard import Rules, device_mesh, explain, for_optimizer, sharded

VOCABULARY, D, F, BATCH, LENGTH = 256, 64, 256, 64, 32
OPTIMIZER = optax.adamw(1e-3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(use_bias=False)(x)
        y = nn.gelu(nn.Dense(F, use_bias=False, name='up')(y))
        return x + nn.Dense(D, use_bias=False, name='down')(y)


class Model(nn.Module):
    stream: str | None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name='embed')(tokens)
        x = constrained(x, self.stream)
        for i in range(2):
            x = Block(name=f'block_{i}')(x)
        return nn.Dense(VOCABULARY, use_bias=False, name='head')(x)


class Layer(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key)
        self.up = 0.1 * jax.random.normal(keys[0], (D, F))
        self.down = 0.1 * jax.random.normal(keys[1], (F, D))

    def __call__(self, x):
        return x + jax.nn.gelu(x @ self.up) @ self.down


class Network(eqx.Module):
    embed: jax.Array
    layers: list
    head: jax.Array
    stream: str | None = eqx.field(static=True)

    def __init__(self, key, stream):
        keys = jax.random.split(key, 4)
        self.embed = 0.1 * jax.random.normal(keys[0], (VOCABULARY, D))
        self.layers = [Layer(key) for key in keys[1:3]]
        self.head = 0.1 * jax.random.normal(keys[3], (D, VOCABULARY))
        self.stream = stream

    def __call__(self, tokens):
        x = constrained(self.embed[tokens], self.stream)
        for layer in self.layers:
            x = layer(x)
        return x @ self.head


def model_of(library, stream):
    """The parameters of a model, as shapes, and its function."""
    if library == 'flax':
        model = Model(stream)
        tokens = jnp.zeros((1, LENGTH), jnp.int32)
        params = jax.eval_shape(Model(None).init, jax.random.key(0), tokens)['params']
        return params, lambda params, tokens: model.apply({'params': params}, tokens)
    network = eqx.filter_eval_shape(Network, jax.random.key(0), stream)
    params, static = eqx.partition(network, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return params, lambda params, tokens: eqx.combine(params, static)(tokens)


@functools.cache  # a suggested fix often is the correct program
def report_of(library, stream, rules, states=None, mesh=None, tries=0):
    params, apply = model_of(library, stream)
    weights = Rules([*rules, ('scale', 'd' if 'data' in mesh.axis_names else '* d')])
    spec = {'params': weights, 'opt': for_optimizer(params, weights) if states is None else states}

    @sharded(spec, tokens_spec(mesh), out=spec, mesh=mesh)
    def step(state, tokens):
        def loss(params):
            logits = apply(params, tokens[:, :-1])
            right = tokens[:, 1:, None] == jnp.arange(VOCABULARY)
            return -jnp.mean(jnp.sum(jnp.where(right, jax.nn.log_softmax(logits), 0), -1))

        g = jax.grad(loss)(state['params'])
        updates, opt = OPTIMIZER.update(g, state['opt'], state['params'])
        return {'params': optax.apply_updates(state['params'], updates), 'opt': opt}

    state = {'params': params, 'opt': jax.eval_shape(OPTIMIZER.init, params)}
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), np.int32)
    return explain(step, state, tokens, chip='TPU v5e', tries=tries)


def tokens_spec(mesh):
    return 'b@data s' if 'data' in mesh.axis_names else 'b* s'


def rules_of(**specs):
    """In the short form."""
    return tuple((name, spec.rpartition('-> ')[2]) for name, spec in specs.items())


BOTH = rules_of(
    embed='v@tensor d@data', up='d@data f@tensor', down='f@tensor d@data', head='d@data v@tensor'
)
STREAM = 'b s d -> b@data s d'
# on the canonical mesh, all 16 devices share the batch and each weight
CANONICAL = rules_of(embed='v* d', up='d* f', down='f d*', head='d* v')


def is_recovered(report, right):
    """Whether the bounds with the changes are at most those of the right program, or 3% more."""
    cost, best = (sum(bound.seconds for bound in one.bounds) for one in (report, right))
    return (report.findings[-1].tried.bound if report.findings else cost) <= 1.03 * best


@pytest.mark.slow
@pytest.mark.parametrize('library', ['flax', 'equinox'])
def test_a_missing_constraint(library):
    mesh = mesh_of(data=4, tensor=4)
    wrong = report_of(library, None, BOTH, mesh=mesh)
    right = report_of(library, STREAM, BOTH, mesh=mesh)
    assert right.findings == ()
    assert right.network_bytes < wrong.network_bytes
    tried = report_of(library, None, BOTH, mesh=mesh, tries=12)
    assert is_recovered(tried, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('weight', 'mistake', 'more'),
    [('down', 'f d@tensor', 'network_bytes'), ('head', 'd v', 'flops')],
)
def test_a_wrong_weight(weight, mistake, more):
    mesh = mesh_of(data=4, tensor=4)
    megatron = {name: spec.replace('@data', '') for name, spec in BOTH}

    def report_with(tries=0, **changed):
        return report_of('flax', STREAM, rules_of(**megatron | changed), mesh=mesh, tries=tries)

    wrong, right = report_with(12, **{weight: mistake}), report_with()
    assert is_recovered(wrong, right)
    assert right.findings == ()
    assert getattr(wrong, more) > getattr(right, more)


def test_unsharded_states_on_the_canonical_mesh():
    mesh = device_mesh(jax.devices()[:16])
    wrong = report_of('equinox', 'b* s d', CANONICAL, states='* ...', mesh=mesh)
    (finding,) = wrong.findings
    assert finding.kind == 'unsharded states'
    fixed = report_of('equinox', 'b* s d', CANONICAL, mesh=mesh)
    assert fixed.findings == ()
    assert fixed.memory.arguments < wrong.memory.arguments
