"""Programs whose collectives are known by theory, in plain JAX on a mesh made by hand.

Every program is a function of a mesh with the axes data and model; it gives a jitted function and
its arguments. `EXPECTED` says what communication each needs, from the sizes alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

B, D, F, LAYERS = 64, 128, 256, 12  # batch, model dimension, hidden dimension

PROGRAMS = {}

# the sizes of the axes data and model
MACHINES = {
    'cpu_4': (1, 4),
    'cpu_8': (2, 4),
    'cpu_16': (2, 8),
    'v5e_4x4': (2, 8),
    'v5e_16x16': (32, 8),
    'v5p_2x2x2': (2, 4),
    'tpu7x_2x2x1': (2, 4),
    '2_v5e_2x4': (2, 8),  # two slices
    'gpu_8': (2, 4),
}

# the description of a GPU that the compiler needs, of an H100
GPU = """
platform_name: "CUDA"
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 84978434048
  memory_bandwidth: 3352320000000
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def mesh_of(machine, axes=('data', 'model')):
    grid = np.array(devices_of(machine)).reshape(MACHINES[machine])
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * 2)


def devices_of(machine):
    *slices, kind, size = machine.split('_')
    if kind == 'cpu':
        return jax.devices()[: int(size)]
    from jax.experimental.topologies import get_topology_desc

    if kind == 'gpu':
        return get_topology_desc('', 'cuda', topology=f'1x1x{size}', target_config=GPU).devices
    several = {'num_slices': int(slices[0])} if slices else {}
    return get_topology_desc(f'{kind}:{size}', 'tpu', **several).devices


def text_of(name, machine):
    """The optimized program."""
    function, arguments = PROGRAMS[name](mesh_of(machine))
    lowered = function.lower(*arguments)
    options = {
        'cpu': {'xla_backend_optimization_level': 0},  # half the time would go to LLVM, after HLO
        'gpu': {'xla_gpu_autotune_level': 0},  # by running on one
    }.get(machine.split('_')[0])
    return lowered.compile(compiler_options=options).as_text()


@contextlib.contextmanager
def partitioner(name):
    """Within, JAX compiles with 'shardy' or 'gspmd'."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update('jax_use_shardy_partitioner', name == 'shardy')
    try:
        yield
    finally:
        jax.config.update('jax_use_shardy_partitioner', before)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def program(*arguments, inputs, out):
    """A function under jit with these shardings."""

    def decorate(function):
        def on(mesh):
            shard = functools.partial(jax.tree.map, functools.partial(NamedSharding, mesh))
            return jax.jit(
                function, in_shardings=shard(inputs), out_shardings=shard(out)
            ), arguments

        PROGRAMS[function.__name__] = on
        return function

    return decorate


def mapped(*arguments, inputs, out):
    """A function under shard_map; `m` is the size of the model axis."""

    def decorate(function):
        def on(mesh):
            local = functools.partial(function, m=mesh.shape['model'])
            local.__name__ = function.__name__
            local = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=out, check_vma=False)
            return jax.jit(local), arguments

        PROGRAMS[function.__name__] = on
        return function

    return decorate


def matmul(x, y):
    return jnp.matmul(x, y, precision='highest')  # else TPU would gather in bfloat16


# --- the four products --------------------------------------------------------------------------


@program(floats(B, D), floats(D, F), inputs=(P('data'), P(None, 'model')), out=P('data', 'model'))
def product_of_free_axes(x, y):
    return matmul(x, y)


@program(floats(B, D), floats(D, F), inputs=(P(None, 'model'), P()), out=P())
def product_gathered(x, y):
    return matmul(x, y)


@program(floats(B, D), floats(D, F), inputs=(P(None, 'model'), P('model')), out=P())
def product_reduced(x, y):
    return matmul(x, y)


@program(floats(B, D), floats(D, F), inputs=(P(None, 'model'), P('model')), out=P('model'))
def product_scattered(x, y):
    return matmul(x, y)


@program(floats(B, D), floats(D, F), inputs=(P('model'), P(None, 'model')), out=P('model'))
def product_on_one_axis(x, y):
    return matmul(x, y)


# --- training -----------------------------------------------------------------------------------

WEIGHTS = (floats(D, F), floats(F, D))
EVERYWHERE = (P(), P())
ON_MODEL = (P(None, 'model'), P('model'))
ON_ALL = (P(('data', 'model')),) * 2


def mlp(weights, x):
    w_in, w_out = weights
    hidden = jnp.tanh(matmul(x, w_in))
    return matmul(hidden, w_out)  # the line of the all-reduce


def step(weights, x):
    gradient = jax.grad(lambda weights: jnp.sum(mlp(weights, x) ** 2))(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


@program(WEIGHTS, floats(B, D), inputs=(EVERYWHERE, P('data')), out=EVERYWHERE)
def data_parallel(weights, x):
    return step(weights, x)


@program(WEIGHTS, floats(B, D), inputs=(ON_MODEL, P('data')), out=P('data'))
def tensor_parallel(weights, x):
    return mlp(weights, x)


@program(WEIGHTS, floats(16 * B, D), inputs=(ON_ALL, P(('data', 'model'))), out=ON_ALL)
def fully_sharded(weights, x):
    return step(weights, x)


@program(
    (floats(LAYERS, D, F), floats(LAYERS, F, D)),
    floats(B, D),
    inputs=((P(None, None, 'model'), P(None, 'model')), P('data')),
    out=P('data'),
)
def scanned(weights, x):
    return jax.lax.scan(lambda x, weights: (mlp(weights, x), None), x, weights)[0]


# --- by hand ------------------------------------------------------------------------------------


def right(m):
    return [(i, (i + 1) % m) for i in range(m)]


@mapped(floats(B, D), inputs=P('model'), out=P('model'))
def ring(x, m):
    """A sum by passing shards around, m - 1 times."""

    def pass_on(_, state):
        shard, total = state
        shard = jax.lax.ppermute(shard, 'model', right(m))
        return shard, total + shard

    return jax.lax.fori_loop(0, m - 1, pass_on, (x, x))[1]


@mapped(floats(B, D), inputs=P('model'), out=P(None, 'model'))
def transposed(x, m):
    return jax.lax.all_to_all(x, 'model', 1, 0, tiled=True)


@mapped(floats(4 * B, 4 * D), inputs=P(), out=P('model'))
def summed_and_scattered(x, m):
    return jax.lax.psum_scatter(x, 'model', scatter_dimension=0, tiled=True)


@mapped(floats(B, D), inputs=P('model'), out=P('model'))
def nested(x, m):
    def inner(x, _):
        return jax.lax.psum(jnp.sin(x), 'model'), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=5)[0], None

    return jax.lax.scan(outer, x, None, length=3)[0]


@mapped(floats(), floats(B, D), inputs=(P(), P('model')), out=P())
def branches(p, x, m):
    def gathered(x):
        return jax.lax.all_gather(x, 'model').sum(0)

    return jax.lax.cond(p > 0, lambda x: jax.lax.psum(x, 'model'), gathered, x)


@mapped(floats(B, D), inputs=P('model'), out=P('model'))
def until_small(x, m):
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jax.lax.psum(x, 'model') / 100, x)


@mapped(floats(B, D), inputs=P(None, 'model'), out=P(None, 'model'))
def called_twice(x, m):
    @jax.jit
    def total(x):
        return jax.lax.psum(jnp.sin(x), 'model')

    return total(total(x))


# --- by theory ----------------------------------------------------------------------------------


def expected(name, data, model, platform):
    """{(kind, axes, executions): bytes of the unsharded arrays} on one device."""
    both = 'data model'
    # only for TPU and GPU, XLA turns an all-reduce whose sum is sliced into a reduce-scatter
    scatter = 'all-reduce' if platform == 'cpu' else 'reduce-scatter'
    # for TPU, XLA all-reduces gradients as small as these and then slices them
    gradients = 'reduce-scatter' if platform == 'gpu' else 'all-reduce'
    needed = {
        'product_of_free_axes': [],
        'product_gathered': [('all-gather', 'model', 1, B * D)],
        'product_reduced': [('all-reduce', 'model', 1, B * F)],
        'product_scattered': [(scatter, 'model', 1, B * F)],
        # x would do as well; XLA takes y
        'product_on_one_axis': [('all-gather', 'model', 1, D * F)],
        'data_parallel': [('all-reduce', 'data', 1, 2 * D * F)],
        'tensor_parallel': [('all-reduce', 'model', 1, B // data * D)],
        'fully_sharded': [('all-gather', both, 1, 2 * D * F), (gradients, both, 1, 2 * D * F)],
        'scanned': [('all-reduce', 'model', LAYERS, B // data * D)],
        'ring': [('collective-permute', 'model', model - 1, B // model * D)],
        'transposed': [('all-to-all', 'model', 1, B // model * D)],
        'summed_and_scattered': [('reduce-scatter', 'model', 1, 16 * B * D)],
        'nested': [('all-reduce', 'model', 5 * 3, B // model * D)],
        'branches': [
            ('all-reduce', 'model', 1, B // model * D),
            ('all-gather', 'model', 1, B * D),
        ],
        'until_small': [('all-reduce', 'model', None, B // model * D)],
        'called_twice': [('all-reduce', 'model', 1, 2 * B * D // model)],
    }
    size = {'data': data, 'model': model, both: data * model}
    return Counter(
        {(kind, axes, runs): 4 * n for kind, axes, runs, n in needed[name] if size[axes] > 1}
    )
