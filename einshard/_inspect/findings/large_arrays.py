"""Notes large replicated arrays."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import first_of, format_bytes
from ..fold_layers import fold_paths
from ..report_rows import ArrayRow, Finding
from .facts import Facts


def replicated(facts: Facts) -> Iterator[Finding]:
    by_array: dict[str, list[ArrayRow]] = {}
    for row in (*facts.argument_rows, *facts.result_rows):
        if facts.n_devices > 1 and not row.sharded and row.bytes > facts.replicated_above:
            by_array.setdefault(row.array, []).append(row)
    for array, rows in by_array.items():
        paths = first_of(fold_paths(row.path for row in rows), 4)
        text = (
            f'{paths}, {array}, {"is" if len(rows) == 1 else "are"} replicated on '
            f'{facts.n_devices} devices: {format_bytes(rows[0].bytes)} '
            f'{"" if len(rows) == 1 else "per array "}on each'
        )
        yield Finding('replicated', text, bytes=sum(row.bytes for row in rows))
