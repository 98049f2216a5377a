"""A user's file: type checkers see these types, and an error in each line marked as wrong."""

from typing import Any, NamedTuple, assert_type

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from einshard import (
    Rules,
    Sharded,
    describe,
    device_mesh,
    einshard,
    explain,
    from_local,
    gather,
    make_sharding,
    per_device,
    sharded,
)

Host = np.ndarray[Any, np.dtype[Any]]


Columns = Sharded[Float[Array, 'x y'], 'x y*']


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


@sharded('b x -> b* x', None, out='b* y', collectives='all-reduce')
def product(x: jax.Array, params: Params) -> jax.Array:
    return x @ params.w + params.b


@sharded(static_argnames='scale')
def scaled(x: Columns, *, scale: int) -> tuple[jax.Array, int]:
    return x * scale, scale


@per_device('b* x', out='b* x')
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


class Model:
    @sharded('b* x')
    def __call__(self, x: jax.Array, name: str = '') -> jax.Array:
        return x


def right(
    x: jax.Array, host: Host, params: Params, struct: jax.ShapeDtypeStruct, model: Model
) -> None:
    assert_type(einshard(x, 'b* x'), jax.Array)
    assert_type(einshard(host, 'b* x'), jax.Array)
    assert_type(einshard(np.float32(3), '*'), jax.Array)
    assert_type(einshard(3.0, '*'), jax.Array)
    assert_type(einshard(params, Rules([('', '* ...')])), Params)
    assert_type(einshard({'w': x}, '* ...'), dict[str, jax.Array])
    assert_type(einshard({'w': host}, '* ...'), dict[str, Host])  # leaves keep their type
    assert_type(einshard(struct, '*'), jax.ShapeDtypeStruct)
    assert_type(from_local(host, 'b* x'), jax.Array)
    assert_type(gather(x), Host)
    assert_type(gather(params), Params)
    assert_type(product(x, params), jax.Array)
    assert_type(product.lower(x, params).compile(), jax.stages.Compiled)
    assert_type(product.trace(x, params=params), jax.stages.Traced)
    assert_type(scaled(x, scale=2), tuple[jax.Array, int])
    assert_type(doubled(einshard(host, 'b* x')), jax.Array)
    assert_type(doubled.lower(x), jax.stages.Lowered)
    assert_type(model(x, name='a'), jax.Array)
    assert_type(make_sharding('b* x', mesh=device_mesh()), NamedSharding)
    assert_type(describe(x), str)
    assert_type(explain(product, x, params).name, str)


def mistakes(x: jax.Array, host: Host, params: Params, model: Model) -> None:
    einshard(x)  # wrong
    einshard(x, 'b* x', donated=True)  # wrong
    einshard(x, 'b* x', indivisible='pad')  # wrong
    placed: Host = einshard(host, 'b* x')  # wrong
    gathered: jax.Array = gather(x)  # wrong
    product(x)  # wrong
    product.lower(params, x)  # wrong
    scaled(x, 2)  # wrong
    per_device('b* x')(doubled)  # wrong
    model(x, 'a', 'b')  # wrong
    text: str = doubled(x)  # wrong
    make_sharding('b* x', ndim='2')  # wrong
    print(placed, gathered, text)
