# %% [markdown]
"""# Shard an Equinox model

    pip install '.[examples]'
    python docs/examples/equinox_mlp.py

The model is trained with data and tensor parallelism and Optax. It is a pytree with an activation
function among its leaves; `einshard` shards it, including inside `eqx.filter_jit`. Without an
accelerator, it runs on eight simulated devices.
"""

# %%
import os

# before JAX starts. A count in your own XLA_FLAGS wins; accelerators ignore the flag
os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count=8 {os.getenv("XLA_FLAGS", "")}'

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from einshard import Rules, describe, einshard

STEPS, BATCH = 60, 240
X, HIDDEN, Z = 16, 128, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

# %% [markdown]
# ## Write the rules
#
# The hidden layer is split within each pair of neighboring devices, and the batch over the pairs.
# So the first weight, which is [out, in], has `'y x -> * y2 x'`. The rules match the optimizer's
# moments too, whose paths end like those of their parameters. If the number of devices is odd,
# there are no pairs, and the rules are those of data parallelism.

# %%
MEMBERS = 2 if jax.device_count() % 2 == 0 else 1

RULES = Rules(
    [
        ('layers/0/weight', f'y x -> * y{MEMBERS} x'),
        ('layers/0/bias', f'y -> * y{MEMBERS}'),
        ('layers/1/weight', f'z y -> * z y{MEMBERS}'),
    ],
    default='... -> * ...',
)
ROWS = f'batch d -> batch* d {MEMBERS}'

# %% [markdown]
# ## Constrain the model in `filter_jit`
#
# The model and the optimizer state are constrained when they are initialized, and after each step.


# %%
@eqx.filter_jit
def init(key):
    """The model and the state of its optimizer, sharded."""
    model = eqx.nn.MLP(X, Z, HIDDEN, depth=1, key=key)
    return einshard((model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))), RULES)


def mean_loss(model, x, z):
    return jnp.mean((jax.vmap(model)(x) - z) ** 2)


@eqx.filter_jit
def step(model, state, x, z):
    """One step: the new model and state, and the loss before it."""
    x, z = einshard((x, z), ROWS)
    loss, gradient = eqx.filter_value_and_grad(mean_loss)(model, x, z)
    updates, state = OPTIMIZER.update(gradient, state, eqx.filter(model, eqx.is_array))
    model = eqx.apply_updates(model, updates)
    return *einshard((model, state), RULES), loss


# %% [markdown]
# ## Train


# %%
def batches():
    """Inputs, and sines of their weighted sums."""
    rng = np.random.default_rng(0)
    weights = rng.normal(scale=0.25, size=(X, Z))
    for _ in range(STEPS):
        x = np.float32(rng.normal(size=(BATCH, X)))
        yield x, np.float32(np.sin(x @ weights))


def main():
    model, state = init(jax.random.key(0))
    losses = []
    for x, z in batches():
        model, state, loss = step(model, state, x, z)
        losses.append(float(loss))
    adam = state[1][0]
    print(f'loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.3f}')
    print('layers/0/weight      ', describe(model.layers[0].weight))
    print('its first moment     ', describe(adam.mu.layers[0].weight))
    return model, losses


# %%
if __name__ == '__main__':
    main()
