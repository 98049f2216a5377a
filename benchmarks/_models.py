"""The programs that several benchmarks run: an MLP, and the transformer of the docs.

Their einshard versions are here and in docs/examples/transformer.py, the hand-written ones in
`_handwritten.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from einshard import device_mesh, einshard, sharded

from . import _handwritten
from ._handwritten import transformer  # from docs/examples
from ._measure import Bench

Config = transformer.Config


class Sizes(NamedTuple):
    """Sizes of the programs. Batches are per device."""

    mlp: tuple[int, int, int]  # batch, width, width of the hidden layer
    transformer: Any  # a Config


TINY = Sizes(
    (1, 32, 64),
    Config(n_layers=1, d_model=32, d_head=4, d_ff=64, vocab=64, sequence=8, batch=2),
)
SMALL = Sizes((32, 256, 1024), Config(batch=2))
MEDIUM = Sizes(
    (64, 1024, 4096), Config(d_model=256, d_head=16, d_ff=512, vocab=1024, sequence=128, batch=2)
)
LARGE = Sizes(
    (512, 4096, 16384),
    Config(n_layers=4, d_model=1024, d_head=64, d_ff=4096, vocab=8192, sequence=512, batch=4),
)


def device_counts(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})


def sizes_for(bench: Bench) -> Sizes:
    """Sizes that take tens of milliseconds, on CPUs as on accelerators."""
    return TINY if bench.tiny else SMALL if jax.default_backend() == 'cpu' else LARGE


class Case(NamedTuple):
    """A program in two ways: each returns a new function, `sharded` or jitted."""

    name: str
    ours: Callable[[], Any]
    by_hand: Callable[[], Any]
    arguments: tuple[Any, ...]  # shapes and dtypes
    carries: bool  # whether the first result is the first argument of the next call


def cases(devices: Sequence[Any], sizes: Sizes) -> list[Case]:
    """All programs on these devices; on an even number, with tensor parallelism over two."""
    n = len(devices)
    m = 2 if n % 2 == 0 else 1
    placement = transformer.BOTH if m == 2 else transformer.DATA
    mesh = mesh_by_hand(devices, m)
    batch, width, hidden = sizes.mlp
    weights, x = (floats(width, hidden), floats(hidden, width)), floats(batch * n, width)
    c = config_on(n, sizes)
    state, tokens = state_shapes(c), token_shapes(c)
    return [
        Case(
            'MLP, forward',
            partial(mlp_forward, devices, m),
            partial(_handwritten.mlp_forward, mesh),
            (weights, x),
            carries=False,
        ),
        Case(
            'MLP, training step',
            partial(mlp_step, devices, m),
            partial(_handwritten.mlp_step, mesh),
            (weights, x, x),
            carries=True,
        ),
        Case(
            'transformer, forward',
            partial(transformer_forward, placement, devices),
            partial(_handwritten.transformer_forward, c, mesh),
            (state.weights, tokens),
            carries=False,
        ),
        Case(
            'transformer, training step',
            lambda: transformer.make_model(c, placement, mesh=devices).train_step,
            partial(_handwritten.transformer_step, c, mesh),
            (state, tokens),
            carries=True,
        ),
    ]


def config_on(n_devices: int, sizes: Sizes) -> Any:
    """The transformer, with the batch of that many devices."""
    c = sizes.transformer
    return Config(**{**vars(c), 'batch': c.batch * n_devices})


def mesh_by_hand(devices: Sequence[Any], model: int) -> Mesh:
    """A typical hand-written mesh, over the devices in einshard's order."""
    in_order = np.array(device_mesh(devices).devices).reshape(-1, model)
    return Mesh(in_order, ('data', 'model'), axis_types=(AxisType.Auto,) * 2)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def state_shapes(c: Any) -> Any:
    return jax.eval_shape(lambda: transformer.init_state(jax.random.key(0), c))


def token_shapes(c: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((c.batch, c.sequence + 1), np.int32)


def model_flops(c: Any) -> float:
    """Flops of a training step's matrix products, by the usual formula.

    Per token, six for each weight in a product, and 12 x layers x width of the heads x positions
    for attention (Chowdhery et al.: PaLM, 2022, appendix B). An embedding lookup is not a product.
    """
    heads = c.d_head * (2 * c.n_heads + 2 * c.n_kv_heads)
    weights = c.n_layers * c.d_model * (heads + 3 * c.d_ff) + c.d_model * c.vocab
    attention = 12 * c.n_layers * c.n_heads * c.d_head * c.sequence
    return float(c.batch * c.sequence * (6 * weights + attention))


# --- in einshard; the transformer's training step is that of the docs ---------------------------


def mlp_forward(devices: Sequence[Any], m: int) -> Any:
    batch = f'b x -> b* x {m}'

    @sharded((f'x y -> * x y{m}', f'y z -> * y{m} z'), batch, out=batch, mesh=devices)
    def forward(weights: Any, x: Any) -> Any:
        w_in, w_out = weights
        return einshard(jax.nn.relu(x @ w_in), f'b y -> b* y{m}') @ w_out

    return forward


def mlp_step(devices: Sequence[Any], m: int) -> Any:
    batch, weights_spec = f'b x -> b* x {m}', (f'x y -> * x y{m}', f'y z -> * y{m} z')

    def mean_loss(weights: Any, x: Any, y: Any) -> Any:
        w_in, w_out = weights
        predicted = einshard(jax.nn.relu(x @ w_in), f'b y -> b* y{m}') @ w_out
        return jnp.mean((predicted - y) ** 2)

    @sharded(weights_spec, batch, batch, out=(weights_spec, None), mesh=devices, donate_argnums=0)
    def step(weights: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(mean_loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

    return step


def transformer_forward(placement: Any, devices: Sequence[Any]) -> Any:
    p = placement

    @sharded(p.weights, p.tokens, out=p.logits, mesh=devices)
    def forward(weights: Any, tokens: Any) -> Any:
        return transformer.forward(weights, tokens, p)[0]

    return forward
