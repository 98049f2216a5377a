"""Finds the largest temporary arrays of an HLO program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .hbm_traffic import is_in_hbm
from .opcodes import VIEWS
from .text import ArrayType, Instruction, Program, Reading


@dataclass(frozen=True, slots=True)
class Temporary:
    """An intermediate array in the memory of a device.

    Attributes:
        array: the dtype and shape on one device: 'bf16[8,128]'.
        bytes: bytes per device, without padding.
        source: the source line, such as 'model.py:12'.
        op_name: the JAX operation that computes the array, or an HLO opcode such as 'copy' if the
            compiler added the array.
    """

    array: str
    bytes: int
    source: str | None
    op_name: str


def largest_temporaries(program: Program, n: int = 5) -> tuple[Temporary, ...]:
    """Finds the `n` largest temporaries, one per source line, dtype and shape.

    Temporaries that are not needed at the same time may share memory.
    """
    found: dict[tuple[str, str | None], Temporary] = {}
    for array, op in sorted(_temporaries(program), key=lambda pair: -pair[0].bytes):
        key = str(array), program.source(op)
        name = op.op_name or op.opcode
        found.setdefault(key, Temporary(key[0], array.bytes, key[1], name))
        if len(found) == n:
            break
    return tuple(found.values())


def _temporaries(program: Program) -> Iterator[tuple[ArrayType, Instruction]]:
    for name in _executed(program):
        ops = program.computations[name]
        root = next(op for op in ops if op.is_root)
        # the results of the program, of loop bodies and of branches are not temporaries
        outputs = {root.name, *(root.operands if root.opcode == 'tuple' else ())}
        with Reading(program) as reading:
            for op in ops:
                reading.op = op
                if op.opcode in VIEWS or op.opcode.endswith(('-start', '-update')):
                    continue
                if op.name in outputs or not is_in_hbm(op.type) or _updates_in_place(program, op):
                    continue
                arrays = op.results[:1] if op.opcode.endswith('-done') else op.results
                yield from ((array, op) for array in arrays)


def _executed(program: Program) -> Iterator[str]:
    """Yields the entry computation, and those that loops, conditionals and calls run."""
    pending = [program.entry]
    seen = set(pending)
    while pending:
        name = pending.pop()
        yield name
        for op in program.computations[name]:
            if op.opcode in ('while', 'conditional', 'call'):
                called = [name for names in op.callees.values() for name in names]
                pending += [name for name in called if name not in seen]
                seen.update(called)


def _updates_in_place(program: Program, op: Instruction) -> bool:
    while op.opcode == 'fusion':
        [callee] = op.callees['calls']
        ops = {inner.name: inner for inner in program.computations[callee]}
        op = next(inner for inner in ops.values() if inner.is_root)
        while op.opcode in ('bitcast', 'convert', 'copy'):
            op = ops[op.operands[0].partition('#')[0]]
    return op.opcode in ('dynamic-update-slice', 'scatter')
