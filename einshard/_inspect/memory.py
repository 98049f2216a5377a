"""Reports on memory: programs that do not fit, and the largest temporaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.stages import Compiled

from .._hlo.buffers import Temporary
from .._hlo.memory import Memory
from .._page import Column, Section
from .._text import format_bytes, short_source
from .oversized import Oversized
from .report_rows import Caution


def does_not_fit(
    compiled: Compiled | Oversized, memory: Memory | None, platform: str
) -> Iterator[Caution]:
    """Reports a program that needs more memory than a device has."""
    if memory is None or memory.capacity is None:
        return
    is_refused = isinstance(compiled, Oversized)
    if is_refused or memory.total > memory.capacity:
        # the CPU backend computes bf16 in f32, and plans memory differently
        as_compiled = ', as compiled for a CPU' if platform == 'cpu' else ''
        yield Caution(
            'does not fit',
            f'the program needs {format_bytes(memory.total)} of memory{as_compiled}, '
            f'and a device has {format_bytes(memory.capacity)}'
            f'{" (it does not compile)" * is_refused}',
        )


_TEMPORARIES = (Column('array'), Column('on a device', right=True), Column('line'), Column('of'))


def temporaries_section(rows: Sequence[Temporary], memory: Memory | None) -> Section:
    """Lists the largest temporaries, of at least 1 MiB and 1% of the memory of the program."""
    least = max(2**20, memory.total // 100 if memory else 0)
    shown = tuple(
        (one.array, format_bytes(one.bytes), short_source(one.source), one.op_name.split('/')[-1])
        for one in rows
        if one.bytes >= least
    )
    return Section('largest temporaries', _TEMPORARIES if shown else (), shown)
