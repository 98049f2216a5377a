# ---
# jupyter:
#   mystnb:
#     execution_in_temp: false
# ---

# %% [markdown]
"""# Train on several hosts

    python docs/examples/many_hosts.py --processes 2

Each host reads its own rows of every batch. Here the hosts are processes on one machine, which
share eight simulated devices. On real hosts, call `jax.distributed.initialize()` and `main` on
each, not `start`.

The notebook needs this script, `many_hosts.py`, next to it: the processes that the notebook starts
run the script.
"""

# %%
import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einshard import Rules, describe, einshard, from_local, gather, sharded

N_DEVICES = 8
BATCH = 64  # rows, of all processes together

# %% [markdown]
# ## Write the rules
#
# The hidden units are sharded over two neighbors, which are on one host, and the batch over those
# pairs. Only the sums of the gradients and of the loss cross hosts.

# %%
PARAMETERS = Rules(
    [
        ('up/kernel', 'x hidden -> * x hidden2'),
        ('up/bias', 'hidden -> * hidden2'),
        ('down/kernel', 'hidden y -> * hidden2 y'),
        ('down/bias', 'y -> * y'),
    ]
)
ROWS = 'batch x -> batch* x 2'

# %% [markdown]
# ## Initialize parameters and read rows
#
# All processes have the same parameters, from the same seed, and rows of their own.


# %%
def init() -> dict[str, Any]:
    """The same numbers in every process."""
    rng = np.random.default_rng(0)

    def dense(n_in: int, n_out: int) -> dict[str, np.ndarray]:
        return {'kernel': rng.normal(scale=n_in**-0.5, size=(n_in, n_out)), 'bias': np.zeros(n_out)}

    return {'up': dense(16, 128), 'down': dense(128, 1)}


def own_rows(step: int, process: int, n_processes: int) -> dict[str, np.ndarray]:
    """The rows of each batch that the input pipeline of one host reads."""
    rows = np.arange(BATCH).reshape(n_processes, -1)[process]
    x = np.stack([np.random.default_rng([step, row]).normal(size=16) for row in rows])
    return {'x': x, 'y': np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]}


# %% [markdown]
# ## Shard the training step


# %%
def loss_of(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ parameters['up']['kernel'] + parameters['up']['bias'])
    hidden = einshard(hidden, 'batch hidden -> batch* hidden2')
    out = hidden @ parameters['down']['kernel'] + parameters['down']['bias']
    return jnp.mean((out - y) ** 2)


@sharded(PARAMETERS, ROWS, ROWS, out=(PARAMETERS, '... -> * ...'))
def train_step(parameters: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
    return jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradients), loss


# %% [markdown]
# ## Train
#
# `from_local` makes one batch of the rows of all processes.


# %%
def train(steps: int) -> tuple[Any, np.ndarray]:
    """The parameters and the loss of every step, the same in every process."""
    process, n_processes = jax.process_index(), jax.process_count()
    parameters = einshard(init(), PARAMETERS)
    losses: list[float] = []
    for step in range(steps):
        rows = own_rows(step, process, n_processes)
        # all batches have equal sizes, so the first one is enough to compare
        batch = from_local(rows, ROWS, check=step == 0)
        parameters, loss = train_step(parameters, **batch)
        losses.append(float(loss))
    return parameters, np.array(losses)


def main(steps: int) -> None:
    """What every process does."""
    parameters, losses = train(steps)
    kernel = parameters['up']['kernel']
    norm = np.linalg.norm(gather(kernel))
    here = f'{len(kernel.addressable_shards)} of {kernel.sharding.num_devices} devices'
    print(
        f'process {jax.process_index()}: {here}, up/kernel {describe(kernel)!r}, '
        f'loss {losses[0]:.5f} -> {losses[-1]:.5f}, norm {norm:.5f}',
        flush=True,
    )


# %% [markdown]
# ## Start the processes


# %%
def start(program: str, n_processes: int, steps: int) -> None:
    """Runs this program in several processes, and prints their output."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{listener.getsockname()[1]}'
    devices = f'--xla_force_host_platform_device_count={N_DEVICES // n_processes}'
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': devices}
    common = ['--processes', str(n_processes), '--steps', str(steps), '--address', address]
    command = [sys.executable, program, *common, '--process']
    processes = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(n_processes)
    ]
    for process in processes:
        said, _ = process.communicate()
        # gloo, the network of simulated devices, prints its connections too
        print(*(line for line in said.splitlines() if line.startswith('process')), sep='\n')
    if any(process.returncode for process in processes):
        raise SystemExit('A process has failed.')


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0].strip('# '))
    parser.add_argument('--processes', type=int, choices=(1, 2, 4), default=2)
    parser.add_argument('--steps', type=int, default=30)
    parser.add_argument('--address', help='where the processes meet; set by the launcher')
    parser.add_argument('--process', type=int, help='which one this is; set by the launcher')
    options = parser.parse_args(arguments)
    if options.process is None:
        start(__file__, options.processes, options.steps)
        return
    # before the first use of a device. On real hosts: jax.distributed.initialize()
    jax.distributed.initialize(options.address, options.processes, options.process)
    main(options.steps)
    jax.distributed.shutdown()


# %% [markdown]
# Both processes print the same losses and norm, as would one or four:

# %% tags=["active-ipynb"]
# start('many_hosts.py', 2, steps=30)

# %% tags=["active-py"]
if __name__ == '__main__':
    run()
