# %% [markdown]
"""# Train on handwritten digits

    pip install '.[demo]'
    python docs/examples/digits.py

A two-layer network learns the handwritten digits of scikit-learn: unsharded, with tensor
parallelism, then with data and tensor parallelism. One expression per array shards the model. The
losses of all three are equal up to rounding. Without an accelerator, it runs on eight simulated
devices.
"""

# %%
import os
import time
from typing import NamedTuple

# before JAX starts. A count in your own XLA_FLAGS wins; accelerators ignore the flag
os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count=8 {os.getenv("XLA_FLAGS", "")}'

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from sklearn.datasets import load_digits

from einshard import einshard, sharded, show

PIXELS, HIDDEN, CLASSES = 64, 480, 10
TRAINING, BATCH, EPOCHS = 1440, 240, 50  # 480 and 240 are divisible by most numbers of devices
LEARNING_RATE, MOMENTUM = 0.05, 0.9
TOLERANCE = 1e-5  # relative, on the loss of every step

# %% [markdown]
# ## Choose a layout
#
# The network multiplies the images, `[batch, x]`, by `w1`, `[x, y]`, and the hidden layer by `w2`,
# `[y, z]`. A layout is an expression for each array. With tensor parallelism, the hidden layer is
# split over the devices: each holds the columns of `w1` and the rows of `w2` for its part, and all
# images. The hidden layer needs no communication. The products with `w2` are partial sums, which
# the devices add up.


# %%
class Layout(NamedTuple):
    """An expression for each array; None leaves it on one device."""

    name: str
    images: str | None = None
    labels: str | None = None
    w1: str | None = None
    hidden: str | None = None
    w2: str | None = None


UNSHARDED = Layout('no sharding')
TENSOR = Layout(
    'tensor parallelism',
    images='... -> * ...',
    labels='... -> * ...',
    w1='x y -> x y*',
    hidden='b y -> b y*',
    w2='y z -> y* z',
)

# %% tags=["active-ipynb"]
# show(TENSOR.w1, devices=8)

# %% tags=["active-ipynb"]
# show(TENSOR.w2, devices=8)

# %% [markdown]
# With data and tensor parallelism, the images are sharded over groups of two devices, and the
# hidden layer over the two devices of a group. The first term on the right of each expression is
# for the groups. Its network is the slowest, but groups communicate only once a step, to add up the
# gradients.


# %%
def data_and_tensor(n_devices: int) -> Layout:
    """Images over groups of two devices, the hidden layer over the two devices of a group.

    On eight devices there are four groups: 'b x -> b4 x 2', 'x y -> 4 x y2', 'y z -> 4 y2 z'. An
    odd number of devices makes groups of one, which is data parallelism alone.
    """
    members = 2 if n_devices % 2 == 0 else 1
    groups = n_devices // members
    return Layout(
        f'data and tensor, {groups} x {members}',
        images=f'b x -> b{groups} x {members}',
        labels=f'b -> b{groups} {members}',
        w1=f'x y -> {groups} x y{members}',
        hidden=f'b y -> b{groups} y{members}',
        w2=f'y z -> {groups} y{members} z',
    )


# %% tags=["active-ipynb"]
# show(data_and_tensor(8).images, devices=8)

# %% tags=["active-ipynb"]
# show(data_and_tensor(8).w1, devices=8)

# %% [markdown]
# ## Load images and initialize weights
#
# Both are numpy arrays on the host.


# %%
class Digits(NamedTuple):
    images: np.ndarray
    labels: np.ndarray


def load() -> tuple[Digits, Digits]:
    """1,440 digits for training, and the other 357, held out; the same ones each time."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = np.float32(images[order] / 16), np.int32(labels[order])
    learned, held_out = slice(TRAINING), slice(TRAINING, None)
    return Digits(images[learned], labels[learned]), Digits(images[held_out], labels[held_out])


def init() -> dict[str, np.ndarray]:
    """The same initial weights for every layout, on the host: the first step places them."""
    rng = np.random.default_rng(1)
    w1 = rng.normal(scale=(2 / PIXELS) ** 0.5, size=(PIXELS, HIDDEN))
    w2 = rng.normal(scale=(1 / HIDDEN) ** 0.5, size=(HIDDEN, CLASSES))
    return {'w1': np.float32(w1), 'w2': np.float32(w2)}


# %% [markdown]
# ## Write the model and the training step
#
# The layout appears in two places: a constraint on the hidden layer, and the specs of the training
# step, which places weights and batches from the host.


# %%
def scores(weights, images, layout: Layout = UNSHARDED) -> jax.Array:
    """Logits, [images, 10]."""
    hidden = jax.nn.relu(images @ weights['w1'])
    return einshard(hidden, layout.hidden) @ weights['w2']


def mean_loss(weights, images, labels, layout: Layout) -> jax.Array:
    """Cross entropy."""
    log_probabilities = jax.nn.log_softmax(scores(weights, images, layout))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def make_step(layout: Layout):
    """A step of gradient descent with momentum, with its arguments and results in a layout."""
    w = {'w1': layout.w1, 'w2': layout.w2}  # of the weights, and of their velocity

    @sharded(w, w, layout.images, layout.labels, out=(w, w, None))
    def step(weights, velocity, images, labels):
        loss, gradient = jax.value_and_grad(mean_loss)(weights, images, labels, layout)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v - LEARNING_RATE * g, velocity, gradient)
        return jax.tree.map(jnp.add, weights, velocity), velocity, loss

    return step


# %% [markdown]
# ## Train
#
# All runs start from the same weights and see the same batches in the same order.


# %%
class Run(NamedTuple):
    layout: Layout
    weights: dict[str, jax.Array]
    losses: np.ndarray  # of every step
    accuracy: float  # on the held-out digits
    seconds: float


def train(layout: Layout, epochs: int = EPOCHS, on_step=lambda loss: None) -> Run:
    """Trains from the same weights on the same batches in every layout."""
    digits, held_out = load()
    start = time.perf_counter()
    step = make_step(layout)
    weights = init()
    velocity = jax.tree.map(np.zeros_like, weights)
    rng = np.random.default_rng(2)
    losses = []
    for _ in range(epochs):
        for batch in rng.permutation(TRAINING).reshape(-1, BATCH):
            images, labels = digits.images[batch], digits.labels[batch]
            weights, velocity, loss = step(weights, velocity, images, labels)
            losses.append(float(loss))
            on_step(losses[-1])
    seconds = time.perf_counter() - start
    right = jnp.argmax(scores(weights, held_out.images), axis=1) == held_out.labels
    return Run(layout, weights, np.array(losses), float(right.mean()), seconds)


def difference(run: Run, other: Run) -> float:
    """The largest relative difference between the losses of two runs, over all steps."""
    return float(np.max(np.abs(run.losses - other.losses) / other.losses))


# %% [markdown]
# ## Compare sharded and unsharded training


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the code"}
def main(console: Console | None = None, epochs: int = EPOCHS) -> list[Run]:
    """Trains unsharded and with both layouts, prints a summary, and returns the runs."""
    console = console or Console(highlight=False)
    devices = jax.devices()
    kind = 'simulated' if devices[0].platform == 'cpu' else devices[0].device_kind
    console.print(f'[bold]Handwritten digits[/], devices: {len(devices)} {kind}')
    runs = []
    # accelerators round the factors of a product by default, which would drown the comparison
    with jax.default_matmul_precision('float32'):
        for layout in (UNSHARDED, TENSOR, data_and_tensor(len(devices))):
            console.print(f'\n[bold cyan]{layout.name}')
            if layout != UNSHARDED:
                console.print(pictures(layout, len(devices)))
            runs.append(train_with_progress(layout, epochs, console))
    console.print()
    console.print(summary(runs))
    apart = max(difference(run, runs[0]) for run in runs[1:])
    if not apart <= TOLERANCE:
        raise SystemExit(f'Sharded and unsharded losses differ by {apart:.1e}, relative.')
    console.print(f'[green]Sharded and unsharded losses agree to {TOLERANCE:.0e}, relative.')
    return runs


def pictures(layout: Layout, n_devices: int) -> Table:
    """Pictures of the images and the weights, side by side."""
    arrays = {'images': layout.images, 'w1': layout.w1, 'w2': layout.w2}
    grid = Table.grid(*(Column(ratio=ratio) for ratio in (3, 4, 3)), padding=(0, 2), expand=True)
    grid.add_row(*(f"[bold]{name}[/] [green]'{text}'" for name, text in arrays.items()))
    grid.add_row(*(show(text, devices=n_devices) for text in arrays.values()))
    return grid


def train_with_progress(layout: Layout, epochs: int, console: Console) -> Run:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn('loss {task.fields[loss]:.4f}'))
    with Progress(TextColumn('training'), *columns, console=console) as progress:
        task = progress.add_task('', total=epochs * (TRAINING // BATCH), loss=np.nan)
        return train(layout, epochs, lambda loss: progress.update(task, advance=1, loss=loss))


def summary(runs: list[Run]) -> Table:
    heads = ('held-out digits', 'training', 'loss difference')
    table = Table('', *(Column(head, justify='right') for head in heads))
    for run in runs:
        apart = f'{difference(run, runs[0]):.1e}' if run is not runs[0] else ''
        right = f'{run.accuracy:.1%} right'
        table.add_row(run.layout.name, right, f'{run.seconds:.1f} s', apart)
    return table


# %% tags=["active-ipynb"]
# page = Console(force_jupyter=False, force_terminal=False, width=100, highlight=False)
# unsharded, tensor, both = main(page)

# %% [markdown]
# The last column is the largest relative difference between the loss of a step and the loss of the
# same step without sharding, over all steps. It is not zero, because floating-point sums over
# shards are taken in another order. The new weights are sharded as the layout says:

# %% tags=["active-ipynb"]
# from einshard import describe
#
# print(describe(tensor.weights['w1']))
# print(describe(both.weights['w1']))

# %% tags=["active-py"]
if __name__ == '__main__':
    main()
