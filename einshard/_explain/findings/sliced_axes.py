"""Finds slices along sharded axes."""

from __future__ import annotations

from collections.abc import Iterator

from ..._program.hlo.sources import operations
from ..._text import format_bytes
from ..report_rows import Finding
from .facts import Facts
from .lines import is_in_call
from .trace import Slice

# collectives that move slices; an all-reduce on the same line has another cause
_KINDS = ('collective-permute', 'all-to-all', 'all-gather')
# operations that move data along a sharded axis themselves. A slice may also be moved for the
# operation that reads it, such as a matmul, so not only collectives of slices count
_MOVING = {
    *('approx_top_k', 'argmax', 'argmin', 'argsort', 'cumlogsumexp', 'cummax', 'cummin'),
    *('cumprod', 'cumsum', 'fft', 'gather', 'reshard', 'rev', 'scatter', 'scatter-add'),
    *('sharding_constraint', 'sort', 'top_k'),
}


def sliced_axis(facts: Facts) -> Iterator[Finding]:
    """Reports slices along a sharded axis, such as those of `jnp.split` on a fused projection.

    The parts are on different devices. The compiler reshards each part over all devices of the mesh
    axis.
    """
    slices: dict[tuple[str, tuple[str, ...]], list[Slice]] = {}
    for sliced in facts.trace.slices if facts.trace else ():
        slices.setdefault((sliced.line, sliced.axis.mesh_axes), []).append(sliced)
    for (line, mesh_axes), several in slices.items():
        rows = [
            c
            for c in facts.unexplained
            if c.source == line
            and c.kind in _KINDS
            and facts.partly_along(c) & set(mesh_axes)
            and any(is_in_call(c, sliced.frames) for sliced in several)
            and _MOVING.isdisjoint(operations(c.op_name))
        ]
        n_bytes = sum(row.total_bytes for row in rows)
        if n_bytes <= facts.min_bytes:
            continue
        sliced = several[0]
        name = f"axis '{sliced.axis.name}'" if sliced.axis.name else f'axis {sliced.dim}'
        largest = max(rows, key=lambda row: row.total_bytes)
        yield Finding(
            'sliced axis',
            f'{name}, which is sharded along {largest.along}, is split or sliced: '
            f'{format_bytes(n_bytes)} are sent to shard the parts',
            line,
            n_bytes,
            explains=tuple(row.name for row in rows),
        )
