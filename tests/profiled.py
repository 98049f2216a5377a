"""Functions that tests profile. As a script, traces them in a process of its own.

In a process that has loaded a newer libtpu, the profiler of JAX 0.10 crashes.
"""

import functools
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

RUNS = 3
MESH = Mesh(
    np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2
)


def put(shape, *spec):
    return jax.device_put(np.ones(shape, np.float32) / 64, NamedSharding(MESH, P(*spec)))


ARGUMENTS = put((64, 32), 'data'), put((32, 64), None, 'tensor'), put((64, 32), 'tensor')
X, W_IN, W_OUT = ARGUMENTS
SMALL = put((32, 32), 'data'), *ARGUMENTS[1:]


def step_with(constant):
    @jax.jit
    def step(x, w_in, w_out):
        return jax.nn.relu(x @ w_in) @ w_out * constant

    return step


STEPS = [step_with(constant) for constant in (1.5, 2.5, 3.5, 4.5)]


@jax.jit
def older(x, w_in, w_out):
    return jnp.tanh(x @ w_in) @ w_out


@jax.jit
def never(x, w_in, w_out):
    return jnp.sin(x @ w_in) @ w_out


@jax.jit
def looped(x, w_in, w_out):
    """A train step with a loop, with recomputation, and a gradient that crosses devices."""

    @jax.checkpoint
    def layer(y, _):
        y = jnp.tanh(y @ w_in) @ w_out
        return jax.lax.with_sharding_constraint(y, NamedSharding(MESH, P('data', 'tensor'))), None

    def loss(x):
        return (jax.lax.scan(layer, x, length=3)[0] ** 2).sum()

    return jax.grad(loss)(x)


def slow_line(x, w_in):
    y = x @ w_in
    return jnp.sort(jnp.tile(y, (8, 1)), axis=0)  # slow


@functools.partial(jax.jit, donate_argnums=0)
def train(params, batch):
    def loss(params):
        return ((jax.nn.relu(batch @ params['w_in']) @ params['w_out']) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@functools.partial(jax.jit, donate_argnums=0)
def consumed(x):
    return x.sum(0) + 1, x * 2 @ x.T  # x itself is not returned


def product(x):  # not jitted
    return x @ x.T


SEEN = []


@jax.jit
def counted(state, x):
    """Returns its next state, and shows which one it is given."""
    jax.debug.callback(lambda first: SEEN.append(float(first)), state['w'][0])
    key, _ = jax.random.split(state['key'])
    return {'w': state['w'] + 1.0, 'key': key}, (x * state['w']).sum()


def traced(folder, *calls):
    for function, arguments in calls:
        jax.block_until_ready(function(*arguments))
    with jax.profiler.trace(folder):
        for function, arguments in calls:
            for _ in range(RUNS):
                jax.block_until_ready(function(*arguments))


def main(folder):
    from counting import counting

    from einshard import EinshardError, profile

    for step in STEPS:
        jax.block_until_ready(step(*ARGUMENTS))
    traced(folder / 'older', (older, ARGUMENTS))
    traced(folder / 'four', *((step, ARGUMENTS) for step in STEPS))
    traced(folder / 'two', (older, ARGUMENTS), (older, SMALL))
    traced(folder / 'looped', (looped, ARGUMENTS))
    params = {'w_in': ARGUMENTS[1], 'w_out': ARGUMENTS[2]}
    reports = {
        'train': profile(train, params, ARGUMENTS[0], tries=0, chip='H100'),
        'consumed': profile(consumed, ARGUMENTS[0], runs=2, tries=0),
        'slow': profile(slow_line, *ARGUMENTS[:2], runs=2, tries=0),
        'one': profile(lambda x: x @ x, jnp.ones((64, 64)), tries=0),
    }
    state = {'w': jnp.zeros(8), 'key': jax.random.key(0)}
    profile(counted, state, jnp.ones(8), runs=3, tries=0)
    jax.effects_barrier()
    reports['seen'] = SEEN
    with counting() as counts:
        profile(product, ARGUMENTS[0], runs=2, tries=0)
    reports['compiled'] = counts.compiled.count('jit(product)')
    with mock.patch.object(jax, 'default_backend', return_value='gpu'):
        reports['as on GPUs'] = profile(train, params, ARGUMENTS[0], tries=0)
        static = jax.jit(lambda x, n: x * n, static_argnums=1)
        reports['static'] = profile(static, ARGUMENTS[0], 3, tries=0)
    with ThreadPoolExecutor() as threads:
        steps = threads.map(lambda step: profile(step, *ARGUMENTS, runs=RUNS, tries=0), STEPS[:3])
        reports['in threads'] = [*steps]
    deleted = [leaf.is_deleted() for leaf in jax.tree.leaves((params, ARGUMENTS))]
    with jax.profiler.trace(folder / 'outer'):
        try:
            profile(older, *ARGUMENTS)
        except EinshardError as error:
            refusal = error
    (folder / 'reports.pickle').write_bytes(pickle.dumps((reports, deleted, refusal)))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
