"""The table of the largest temporaries of a program."""

from __future__ import annotations

from collections.abc import Sequence

from .._page import Column, Section
from .._program.hlo.memory import Memory
from .._program.hlo.sources import operations
from .._program.hlo.temporaries import Temporary
from .._text import format_bytes, short_source

_TEMPORARIES = (
    Column('array'),
    Column('on a device', right=True),
    Column('line'),
    Column('of'),
    Column('kept as'),
)


def temporaries_section(rows: Sequence[Temporary], memory: Memory | None) -> Section:
    min_bytes = max(2**20, memory.total // 100 if memory else 0)
    shown = tuple(
        (
            f'{row.count} x {row.array}' if row.count > 1 else row.array,
            format_bytes(row.bytes),
            short_source(row.source),
            ', '.join(operations(row.op_name)),
            row.kept,
        )
        for row in rows
        if row.bytes >= min_bytes
    )
    return Section('largest temporaries', _TEMPORARIES if shown else (), shown)
