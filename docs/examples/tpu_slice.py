# %% [markdown]
"""# Compare two layouts on sixteen TPUs you don't have

    pip install '.[tpu]'
    python docs/examples/tpu_slice.py

The TPU compiler, libtpu, runs on Linux machines without TPUs. So you can see what a training step
sends on a TPU slice, and whether it fits in memory, before you have a slice. You need only shapes,
not arrays.
"""

# %%
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from einshard import einshard, explain, sharded, topology

SLICE = 'v5e:4x4'  # sixteen chips
LAYERS, D, F, BATCH = 64, 2048, 8192, 4096

# %% [markdown]
# ## Write the training step
#
# 64 layers of two matrices each, with 2.1 billion parameters in all, trained with momentum. The
# axes are l layers, d model, f hidden, b batch. A layout is an expression for each array, in the
# short form: `'l d f*'` is `'l d f -> l d f*'`.


# %%
class Layout(NamedTuple):
    up: str
    down: str
    rows: str  # the batch, and the residual stream
    hidden: str


class State(NamedTuple):
    weights: Any
    velocity: Any


def mean_loss(weights, x, y, p: Layout) -> jax.Array:
    @jax.checkpoint  # keeps only the residual stream for the backward pass
    def layer(x, w):
        hidden = einshard(jax.nn.relu(x @ w['up']), p.hidden)
        return einshard(x + hidden @ w['down'], p.rows), None

    x, _ = jax.lax.scan(layer, x, weights)
    return jnp.mean(jnp.square((x - y).astype(jnp.float32)))


def make_step(p: Layout):
    """One step in a layout: the new state, and the loss before it."""
    weights = {'up': p.up, 'down': p.down}
    state_spec = State(weights, weights)

    @sharded(state_spec, p.rows, p.rows, out=(state_spec, None), donate_argnames='state')
    def step(state: State, x, y) -> tuple[State, jax.Array]:
        loss, gradient = jax.value_and_grad(mean_loss)(state.weights, x, y, p)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state.velocity, gradient)
        weights = jax.tree.map(lambda w, v: w - 1e-3 * v, state.weights, velocity)
        return State(weights, velocity), loss

    return step


def shapes() -> tuple[State, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of the arguments of a step."""
    shape = {'up': (LAYERS, D, F), 'down': (LAYERS, F, D)}
    weights = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shape.items()}
    rows = jax.ShapeDtypeStruct((BATCH, D), jnp.bfloat16)
    return State(weights, weights), rows, rows


def compile_for_slice(p: Layout):
    return explain(make_step(p), *shapes(), mesh=topology(SLICE))


# %% [markdown]
# ## Compile tensor parallelism
#
# The hidden units are sharded over all sixteen chips, and the batch is replicated. Every layer ends
# in sums over all chips: the all-reduces in this report.

# %%
TENSOR = Layout(up='l d f*', down='l f* d', rows='* b d', hidden='b f*')

tensor = compile_for_slice(TENSOR)
print(tensor)

# %% [markdown]
# ## Compile data and tensor parallelism
#
# The batch is sharded over groups of four neighbors, and the hidden units over the four chips of a
# group. The sums in every layer are now over four chips and a quarter of the rows. The sums of
# gradients over the groups are new.

# %%
BOTH = Layout(up='* l d f4', down='* l f4 d', rows='b* 4 d', hidden='b* f4')

both = compile_for_slice(BOTH)
print(both)

# %% [markdown]
# ## Compare the reports
#
# With both, each chip has four times the weights, and sends less:

# %%
print(tensor.diff(both))

# %% [markdown]
# ## Check the memory
#
# Reports are data for tests and scripts.

# %%
for name, report in {'tensor': tensor, 'both': both}.items():
    sent, memory = report.network_bytes / 1e9, report.memory.total / report.memory.capacity
    print(f'{name:8}{sent:.2f} GB sent by each chip in a step, {memory:.0%} of its memory')
