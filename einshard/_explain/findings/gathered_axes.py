"""Notes operations for which the partitioner gathers a sharded axis."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from ..._program.hlo.collective import Collective
from ..._text import format_bytes, shape_text
from ..report_rows import Finding
from .facts import Facts
from .trace import is_lookup, propagate

# JAX operations along an axis that the partitioner gathers if it is sharded, in whole or in part
_ALONG_AN_AXIS = re.compile(
    r'sort|top_k|approx_top_k|cum\w+|fft|concatenate|pad|rev|split|slice|dynamic_slice'
    r'|dynamic_update_slice|gather|scatter.*|reshape|conv_general_dilated|reduce_window.*'
    r'|custom_call|ffi_call|pure_callback|io_callback|eigh?|svd|qr|lu|cholesky|triangular_solve'
)


def gathered_for_operation(facts: Facts) -> Iterator[Finding]:
    """Notes sends for operations along a sharded axis, such as a sort."""
    if facts.traced is None or facts.mesh is None:
        return
    values = propagate(facts.traced, facts.values, facts.mesh)
    sends: dict[tuple[str, int], list[Collective]] = defaultdict(list)
    for c in facts.unexplained:
        if c.source and c.mesh_axes and c.total_bytes >= facts.min_bytes:
            sends[c.source, c.column].append(c)
    for (line, column), several in sends.items():
        axes = {axis for c in several for axis in c.mesh_axes}
        for op in facts.traced.ops:
            frames = op.site.frames
            if not frames or frames[0].source != line or op.site.is_backward:
                continue
            if not _ALONG_AN_AXIS.fullmatch(op.primitive) or is_lookup(op):
                continue
            if column and frames[0].column != column - 1 and frames[0].line == frames[0].end_line:
                continue
            sharded = [
                (v, dim)
                for v in op.arrays_in
                for dim, axis in enumerate(values[v].axes)
                if axes & {*axis.mesh_axes}
            ]
            if not sharded:
                continue
            v, dim = sharded[0]
            array = facts.traced.values[v]
            names = [axis.name for axis in values[v].axes]
            which = f"axis '{names[dim]}'" if names[dim] else f'axis {dim}'
            along = ', '.join(values[v].axes[dim].mesh_axes)
            yield Finding(
                'gathered for an operation',
                f'{op.primitive.replace("_", " ")} of {array.dtype}{shape_text(array.shape)}, '
                f'whose {which} is sharded along {along}: '
                f'{format_bytes(sum(c.total_bytes for c in several))} sent',
                line,
                sum(c.total_bytes for c in several),
                '',
                tuple(c.name for c in several),
            )
            break
