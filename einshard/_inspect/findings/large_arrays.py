"""Notes large arrays that all devices hold."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import format_bytes
from ..report_rows import Finding
from .facts import Facts


def replicated(facts: Facts) -> Iterator[Finding]:
    """Notes large replicated arguments and results, as in data parallelism."""
    for row in (*facts.argument_rows, *facts.result_rows):
        if facts.n_devices > 1 and not row.sharded and row.bytes > facts.replicated_above:
            text = (
                f'{row.path}, {row.array}, is replicated on {facts.n_devices} devices: '
                f'{format_bytes(row.bytes)} on each'
            )
            yield Finding('replicated', text, bytes=row.bytes)
