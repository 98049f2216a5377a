# ruff: noqa: F722, F821, UP037
"""Functions whose annotations are strings, as `from __future__ import annotations` makes them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from einshard import Sharded, sharded


class Layer(NamedTuple):
    w: Sharded[Float[Array, 'i o'], 'i o*']
    b: Sharded[Float[Array, 'o'], 'o*'] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Parameters:
    layers: list[Layer]
    head: Float[Array, 'o c']


@sharded
def forward(
    parameters: Parameters, x: Sharded[Float[Array, 'b i'], 'b* i']
) -> Sharded[Float[Array, 'b c'], 'b* c']:
    for layer in parameters.layers:
        x = x @ layer.w + (0 if layer.b is None else layer.b)
    return x @ parameters.head


class Model:
    def __init__(self, w):
        self.w = w

    def make(self):
        @sharded
        def apply(x: Sharded[Array, 'b* i']) -> Sharded[Array, 'b i*']:
            return x @ self.w

        return apply
