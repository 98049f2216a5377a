"""Operations along a sharded axis in two levels: in each shard, and between the shards.

A cumulative sum of each shard lacks the sums of the shards before it, and each of the k largest
numbers is among the k largest ones of its shard. So devices need not gather the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ..._sharding.mesh import partition_spec

# the last number of each shard is combined by the second function, and then with the shard
_CUMULATIVE: Mapping[str, tuple[str, str]] = {
    'cumsum': ('{} + {}', 'jnp.sum'),
    'cumlogsumexp': ('jnp.logaddexp({}, {})', 'jax.nn.logsumexp'),
}


def axis_in_two_levels(primitive: str, params: Mapping[str, Any], ndim: int) -> int | None:
    """Returns the axis along which an operation can run in two levels, or None."""
    if primitive not in (*_CUMULATIVE, 'top_k'):
        return None
    return params.get('axis', -1) % max(ndim, 1)


def bytes_in_two_levels(
    primitive: str, params: Mapping[str, Any], shard: Sequence[int], itemsize: int, n: int
) -> int:
    """Returns what a device sends: results of its shard to the n - 1 others.

    Args:
        shard: the shape of a shard of the operand.
    """
    axis = axis_in_two_levels(primitive, params, len(shard))
    assert axis is not None
    n_others = prod(shard) // shard[axis] * (n - 1)
    if primitive == 'top_k':
        return n_others * min(params['k'], shard[axis]) * (itemsize + 4)
    return n_others * itemsize


def run_in_two_levels(eqn: Any, mesh: Mesh, entries: Sequence[tuple[str, ...]]) -> Any:
    """Returns a function that runs an operation whose operand is sharded as in `entries`."""
    primitive, params = eqn.primitive.name, dict(eqn.params)
    axis = axis_in_two_levels(primitive, params, len(entries))
    assert axis is not None
    names, spec = entries[axis], partition_spec(entries)
    n = prod(mesh.shape[name] for name in names)

    def best_of_shard(x: Any) -> Any:
        size = x.shape[axis]
        best, at = eqn.primitive.bind(x, **{**params, 'k': min(params['k'], size)})
        return best, at + lax.axis_index(names) * size

    def top_k(x: Any) -> Any:
        best, at = sharded(best_of_shard, (spec, spec))(x)
        best, i = eqn.primitive.bind(best, **params)
        return [best, jnp.take_along_axis(at, i, axis)]

    def cumulative(x: Any) -> Any:
        y, is_reverse = eqn.primitive.bind(x, **params), params['reverse']
        last = lax.slice_in_dim(y, 0, 1, axis=axis)
        if not is_reverse:
            last = lax.slice_in_dim(y, y.shape[axis] - 1, None, axis=axis)
        totals = lax.all_gather(last, names, axis=axis, tiled=True)
        at, shards = lax.axis_index(names), jnp.arange(n)
        before = shards > at if is_reverse else shards < at
        where = before.reshape([-1 if d == axis else 1 for d in range(x.ndim)])
        if primitive == 'cumsum':
            rest = jnp.sum(totals, axis, keepdims=True, where=where, dtype=y.dtype)
            return [y + rest]
        return [jnp.logaddexp(y, jax.nn.logsumexp(totals, axis, keepdims=True, where=where))]

    def sharded(run: Any, out: Any) -> Any:
        return jax.shard_map(run, mesh=mesh, in_specs=(spec,), out_specs=out, check_vma=False)

    return jax.jit(top_k if primitive == 'top_k' else sharded(cumulative, [spec]))


def code_in_two_levels(eqn: Any, placement: str, names: Sequence[str], n: int) -> str:
    """Writes an operation in two levels, of an array x that is placed like `placement`."""
    primitive, params = eqn.primitive.name, eqn.params
    ndim = len(eqn.invars[0].aval.shape)
    axis = axis_in_two_levels(primitive, params, ndim)
    assert axis is not None
    name = repr(names[0] if len(names) == 1 else tuple(names))
    if primitive == 'top_k':
        k = min(params['k'], eqn.invars[0].aval.shape[axis] // n)
        options = '' if axis == ndim - 1 else f', axis={axis}'
        return (
            f"best, at = per_device('{placement}', out=('{placement}', '{placement}'))"
            f'(lambda x: ((t := jax.lax.top_k(x, {k}{options}))[0], '
            f't[1] + jax.lax.axis_index({name}) * x.shape[{axis}]))(x); '
            f'best, i = jax.lax.top_k(best, {params["k"]}{options}); '
            f'at = jnp.take_along_axis(at, i, {axis})'
        )
    is_reverse = params['reverse']
    call = f'jax.lax.{primitive}(x, {axis}{", reverse=True" * is_reverse})'
    last = f'y[{":, " * axis}{":1" if is_reverse else "-1:"}]'
    gathered = f'jax.lax.all_gather({last}, {name}, axis={axis}, tiled=True)'
    sign, more = '>' if is_reverse else '<', '[:' + ', None' * (ndim - 1 - axis) + ']'
    where = f'(jnp.arange({n}) {sign} jax.lax.axis_index({name}))'
    where += more if axis < ndim - 1 else ''
    combined, reduce = _CUMULATIVE[primitive]
    rest = f'{reduce}({gathered}, {axis}, keepdims=True, where={where})'
    body = combined.format(f'(y := {call})', rest)
    return f"y = per_device('{placement}', out='{placement}')(lambda x: {body})(x)"
