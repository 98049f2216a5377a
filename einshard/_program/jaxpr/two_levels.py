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


def axis_in_two_levels(
    primitive: str, params: Mapping[str, Any], entries: Sequence[Sequence[str]]
) -> int | None:
    """Returns the axis along which an operation can run in two levels, or None.

    An FFT of all axes runs along the unsharded ones, and then along the sharded one, in whose place
    another is sharded. `entries` are the mesh axes that shard each axis.
    """
    ndim = len(entries)
    if primitive in (*_CUMULATIVE, 'top_k'):
        return params.get('axis', -1) % max(ndim, 1)
    if primitive != 'fft' or not 1 < ndim == len(params['fft_lengths']):
        return None
    sharded = [axis for axis, entry in enumerate(entries) if entry]
    kind = _fft_kind(params)
    # the real axis comes first, or last
    is_possible = kind in ('FFT', 'IFFT') or (kind == 'RFFT' and sharded != [ndim - 1])
    return sharded[0] if len(sharded) == 1 and is_possible else None


def _fft_kind(params: Mapping[str, Any]) -> str:
    return lax.FftType(params['fft_type']).name


def axis_in_place(eqn: Any, axis: int, n: int) -> int:
    """Returns the axis of the result that is sharded over `n` devices in place of `axis`.

    That is `axis` itself, also if no other can be, except for FFTs.
    """
    sizes = eqn.outvars[0].aval.shape
    others = [d for d, size in enumerate(sizes) if d != axis and size % n == 0]
    return others[0] if eqn.primitive.name == 'fft' and others else axis


def bytes_in_two_levels(
    primitive: str,
    params: Mapping[str, Any],
    shard: Sequence[int],
    axis: int,
    itemsize: int,
    n: int,
) -> int:
    """Returns what a device sends: results of its shard to the n - 1 others.

    Args:
        shard: the shape of a shard of the operand.
        axis: the axis along which the operation runs.
    """
    if primitive == 'fft':
        real = _fft_kind(params) == 'RFFT'
        last = shard[-1] // 2 + 1 if real else shard[-1]
        return prod(shard[:-1]) * last * itemsize * (1 + real) * (n - 1) // n
    n_others = prod(shard) // shard[axis] * (n - 1)
    if primitive == 'top_k':
        return n_others * min(params['k'], shard[axis]) * (itemsize + 4)
    return n_others * itemsize


def run_in_two_levels(eqn: Any, mesh: Mesh, entries: Sequence[tuple[str, ...]], axis: int) -> Any:
    """Returns a function that runs an operation whose operand is sharded as in `entries`."""
    primitive, params = eqn.primitive.name, dict(eqn.params)
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

    def transform(x: Any) -> Any:
        inner, outer = _fft_names(params)
        others = [d for d in range(x.ndim) if d != axis]
        y = getattr(jnp.fft, inner)(x, axes=others)
        y = lax.all_to_all(y, names, to, axis, tiled=True)
        return [getattr(jnp.fft, outer)(y, axis=axis)]

    def sharded(run: Any, out: Any) -> Any:
        return jax.shard_map(run, mesh=mesh, in_specs=(spec,), out_specs=out, check_vma=False)

    if primitive == 'fft':
        to = axis_in_place(eqn, axis, n)
        moved = [names if d == to else () if d == axis else e for d, e in enumerate(entries)]
        return jax.jit(sharded(transform, [partition_spec(moved)]))
    return jax.jit(top_k if primitive == 'top_k' else sharded(cumulative, [spec]))


def _fft_names(params: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the functions of `jnp.fft` for the unsharded axes, and for the sharded one."""
    kind = _fft_kind(params).lower()
    return f'{kind}n', kind.removeprefix('r')


def code_in_two_levels(
    eqn: Any, placement: str, out: str, names: Sequence[str], axis: int, n: int
) -> str:
    """Writes an operation in two levels along `axis`, of an array x.

    `placement` is that of x, and `out` that of the result.
    """
    primitive, params = eqn.primitive.name, eqn.params
    ndim = len(eqn.invars[0].aval.shape)
    name = repr(names[0] if len(names) == 1 else tuple(names))
    if primitive == 'fft':
        inner, outer = _fft_names(params)
        others = tuple(d for d in range(ndim) if d != axis)
        to = axis_in_place(eqn, axis, n)
        return (
            f"y = per_device('{placement}', out='{out}')(lambda x: jnp.fft.{outer}("
            f'jax.lax.all_to_all(jnp.fft.{inner}(x, axes={others}), {name}, {to}, {axis}, '
            f'tiled=True), axis={axis}))(x)'
        )
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
