"""The memory that a compiled program needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ..._errors import EinshardError
from ..._text import format_bytes
from .wire import fields, messages


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a program needs, in bytes per device, as the compiler reports it.

    Attributes:
        arguments, results, temporaries: bytes of arrays.
        code: bytes of the program itself.
        aliased: bytes of the results that reuse the memory of donated arguments.
        peak: the compiler's peak memory (some compilers exclude temporaries), or None.
        capacity: bytes that programs can use on a device; None if its chip is unknown, as for CPUs.
        constants: bytes of arrays that are part of the program, such as arrays that a function
            closes over. On TPU, they are part of `code`.
    """

    arguments: int
    results: int
    temporaries: int
    code: int
    aliased: int
    peak: int | None
    capacity: int | None = None
    constants: int = 0

    @property
    def total(self) -> int:
        """What the program needs in all; aliased bytes count once."""
        program = self.code + self.constants
        return self.arguments + self.results + self.temporaries + program - self.aliased

    @property
    def parts(self) -> dict[str, str]:
        """The parts that are not 0, as text: {'arguments': '1.2 GiB'}."""
        names = ('arguments', 'results', 'temporaries', 'code', 'constants')
        parts = {name: format_bytes(getattr(self, name)) for name in names if getattr(self, name)}
        if self.aliased:
            parts['results'] += f' ({format_bytes(self.aliased)} in place of arguments)'
        return parts


def read_memory(compiled: Any, capacity: int | None = None) -> Memory | None:
    """Returns None if the compiler does not report memory use."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    peak = getattr(stats, 'peak_memory_in_bytes', 0)
    constants = getattr(stats, 'constant_size_in_bytes', None)
    if constants is None:
        constants = _constant_bytes(getattr(stats, 'serialized_buffer_assignment_proto', None))
    code = stats.generated_code_size_in_bytes
    if code >= constants:  # on CPU, the code has 0 bytes; on other platforms, it has the constants
        code -= constants
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=code,
        aliased=stats.alias_size_in_bytes,
        peak=peak if peak > 0 else None,
        capacity=capacity,
        constants=constants,
    )


# in xla/service/hlo.proto: BufferAssignmentProto.buffer_allocations, and the fields of
# BufferAllocationProto
_ALLOCATION, _SIZE, _IS_CONSTANT = 3, 2, 12


def _constant_bytes(buffer_assignment: bytes | None) -> int:
    """Sums the constants in a serialized BufferAssignmentProto.

    On CPU, no other field of `memory_analysis()` counts them.
    """
    found = messages(memoryview(buffer_assignment or b''), _ALLOCATION)
    allocations = [dict(fields(each)) for each in found]
    sizes = (each.get(_SIZE, 0) for each in allocations if each.get(_IS_CONSTANT))
    return sum(size for size in sizes if isinstance(size, int))


def parse_bytes(value: object, given_as: str) -> int:
    """Converts a size such as '15 GB' (15 * 10**9 bytes), '15 GiB' (15 * 2**30) or 1500 to bytes.

    `given_as` names the value in the error.

    >>> from einshard._program.hlo.memory import parse_bytes
    >>> parse_bytes('1.5 kB', 'memory='), parse_bytes('2 GiB', 'memory=')
    (1500, 2147483648)
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
        return int(value)
    match = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B\s*', str(value))
    if not isinstance(value, str) or match is None:
        raise EinshardError(
            f'{value!r} is not a valid size for {given_as}',
            facts={'expected': "'15 GB', '14.5 GiB' or a number of bytes"},
        )
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ' KMGT'.index(prefix.upper() or ' '))
