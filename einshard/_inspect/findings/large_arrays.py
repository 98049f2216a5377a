"""Notes large replicated arrays."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import format_bytes
from ..fold_layers import fold
from ..report_rows import Finding
from .facts import Facts


def replicated(facts: Facts) -> Iterator[Finding]:
    rows = [
        row
        for row in (*facts.argument_rows, *facts.result_rows)
        if facts.n_devices > 1 and not row.sharded and row.bytes > facts.replicated_above
    ]
    for path, indices in fold([row.path for row in rows], [row.array for row in rows]):
        row = rows[indices[0]]
        text = (
            f'{path}, {row.array}, {"is" if len(indices) == 1 else "are"} replicated on '
            f'{facts.n_devices} devices: {format_bytes(row.bytes)} on each'
        )
        yield Finding('replicated', text, bytes=row.bytes * len(indices))
