# %% [markdown]
"""# Shard a Flax NNX model

    pip install '.[examples]'
    python docs/examples/flax_nnx.py

The model is initialized sharded, and trained with data and tensor parallelism. Without an
accelerator, it runs on eight simulated devices.
"""

# %%
import os

# before JAX starts. A count in your own XLA_FLAGS wins; accelerators ignore the flag
os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count=8 {os.getenv("XLA_FLAGS", "")}'

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from einshard import Rules, describe, einshard, sharded

STEPS, BATCH = 60, 240
X, HIDDEN, Z = 16, 128, 4

# %% [markdown]
# ## Write the rules
#
# The hidden layer is split within each pair of neighboring devices, and the batch over the pairs.
# So the first weight has `'x y -> * x y2'`. The rules match the optimizer's moments too, whose
# paths end like those of their parameters. If the number of devices is odd, there are no pairs, and
# the rules are those of data parallelism.

# %%
MEMBERS = 2 if jax.device_count() % 2 == 0 else 1

RULES = Rules(
    [
        ('up/kernel', f'x y -> * x y{MEMBERS}'),
        ('up/bias', f'y -> * y{MEMBERS}'),
        ('down/kernel', f'y z -> * y{MEMBERS} z'),
    ],
    default='... -> * ...',
)
ROWS = f'batch d -> batch* d {MEMBERS}'

# %% [markdown]
# ## Constrain the hidden layer


# %%
class MLP(nnx.Module):
    """Two layers, with dropout between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(X, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, Z, rngs=rngs)

    def __call__(self, x):
        hidden = einshard(nnx.relu(self.up(x)), f'batch y -> batch* y{MEMBERS}')
        return self.down(self.dropout(hidden))


# %% [markdown]
# ## Shard the training step
#
# The step is a function of the state of the model and the optimizer.


# %%
def init():
    """The model and its optimizer, as graph definition and state."""
    model = MLP(nnx.Rngs(0))
    return nnx.split((model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)))


def mean_loss(model, x, z):
    return jnp.mean((model(x) - z) ** 2)


@sharded(None, RULES, ROWS, ROWS, out=(RULES, None), donate_argnames='state')
def step(graphdef, state, x, z):
    """One step: the new state, and the loss before it."""
    model, optimizer = nnx.merge(graphdef, state)
    loss, gradient = nnx.value_and_grad(mean_loss)(model, x, z)
    optimizer.update(model, gradient)
    return nnx.state((model, optimizer)), loss


# %% [markdown]
# ## Train
#
# `init` is sharded too, so no device ever holds an unsharded kernel.


# %%
def batches():
    """Inputs, and sines of their weighted sums."""
    rng = np.random.default_rng(0)
    weights = rng.normal(scale=0.25, size=(X, Z))
    for _ in range(STEPS):
        x = np.float32(rng.normal(size=(BATCH, X)))
        yield x, np.float32(np.sin(x @ weights))


def main():
    graphdef, state = sharded(out=(None, RULES))(init)()
    losses = []
    for x, z in batches():
        state, loss = step(graphdef, state, x, z)
        losses.append(float(loss))
    model, optimizer = nnx.merge(graphdef, state)
    moment = optimizer.opt_state[0].mu['up']['kernel']
    print(f'loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.3f}')
    print('up/kernel            ', describe(model.up.kernel[...]))
    print('its first moment     ', describe(moment[...]))
    return model, losses


# %%
if __name__ == '__main__':
    main()
