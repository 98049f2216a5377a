# ruff: noqa: F722, F821, UP037
"""Functions whose annotations are strings, as `from __future__ import annotations` makes them."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, NamedTuple

import jax
from jaxtyping import Array, Float

from einshard import Sharded, sharded

if TYPE_CHECKING:
    from pathlib import Path


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Bias:
    b: Sharded[Array, 'b i*']

    @sharded
    def add(self: Bias, x: Rows) -> Bias:
        return Bias(x + self.b)


Rows = Sharded[Array, 'b* i']


Foreign = typing.Iterable['Elsewhere']


@dataclasses.dataclass(frozen=True)
class Config:
    folder: Path | None = None
    note: 'any text' = None


@sharded(static_argnames=('config', 'folder'))
def with_config(
    x: 'Rows', y: 'the second term', config: Config, other: Config, folder: Path, foreign: Foreign
) -> 'the sum':
    return x + y


@sharded
def with_path(x: Path):
    return x
