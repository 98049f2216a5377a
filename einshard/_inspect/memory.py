"""The memory of a program: what it needs, what a device has, and the largest temporaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.stages import Compiled

from .._hlo.buffers import Temporary
from .._hlo.hardware import Chip
from .._page import Column, Section
from .._text import format_bytes, short_source
from .oversized import Oversized
from .report_rows import Caution, Memory


def read_memory(compiled: Compiled | Oversized, chip: Chip | None, device: Any) -> Memory | None:
    """The compiler's figures, and what a device has; None if there are none."""
    figures = compiled.memory_analysis()
    if figures is None:
        return None
    peak = getattr(figures, 'peak_memory_in_bytes', 0)
    capacity = int(chip.memory * chip.share(device)) if chip else None
    return Memory(
        arguments=figures.argument_size_in_bytes,
        results=figures.output_size_in_bytes,
        temporaries=figures.temp_size_in_bytes,
        code=figures.generated_code_size_in_bytes,
        aliased=figures.alias_size_in_bytes,
        peak=peak if peak > 0 else None,
        capacity=compiled.available if isinstance(compiled, Oversized) else capacity,
    )


def does_not_fit(compiled: Compiled | Oversized, memory: Memory | None) -> Iterator[Caution]:
    """A program that the compiler gave up on; or one larger than the memory of the chip."""
    if memory is not None and memory.capacity is not None and memory.total > memory.capacity:
        is_refused = isinstance(compiled, Oversized)
        yield Caution(
            'does not fit',
            f'the program needs {format_bytes(memory.total)} of memory, and a device has '
            f'{format_bytes(memory.capacity)}{" (it does not compile)" * is_refused}',
        )


_TEMPORARIES = (Column('array'), Column('on a device', right=True), Column('line'), Column('of'))


def temporaries_section(rows: Sequence[Temporary], memory: Memory | None) -> Section:
    """The largest temporaries, without those that matter little."""
    least = max(2**20, memory.total // 100 if memory else 0)
    shown = tuple(
        (one.array, format_bytes(one.bytes), short_source(one.source), one.op_name.split('/')[-1])
        for one in rows
        if one.bytes >= least
    )
    return Section('largest temporaries', _TEMPORARIES if shown else (), shown)
