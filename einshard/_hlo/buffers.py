"""Finds the largest temporary arrays of an HLO program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .module import ArrayType, Computation, Instruction, Module


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


_NOT_ALLOCATING = frozenset(
    (
        'parameter',
        'constant',
        'tuple',
        'get-tuple-element',
        'bitcast',
        'while',
        'conditional',
        'call',
        'opt-barrier',
        'dynamic-update-slice',
        'scatter',
        'copy-start',
        'copy-done',
        'after-all',
    )
)


def largest_temporaries(module: Module, n: int = 5) -> tuple[Temporary, ...]:
    """Finds the `n` largest temporaries, one per source line, dtype and shape.

    Temporaries that are not needed at the same time may share memory.
    """
    found: dict[tuple[str, str | None], Temporary] = {}
    for array, op in sorted(_temporaries(module), key=lambda pair: -pair[0].bytes):
        key = str(array), module.source(op)
        name = op.op_name or op.opcode
        found.setdefault(key, Temporary(key[0], array.bytes, key[1], name))
        if len(found) == n:
            break
    return tuple(found.values())


def _temporaries(module: Module) -> Iterator[tuple[ArrayType, Instruction]]:
    for comp in _executed(module):
        root = comp.root
        # the results of the program, of loop bodies and of branches are not temporaries
        outputs = {root.name, *(root.operands if root.opcode == 'tuple' else ())}
        for op in comp.instructions():
            if op.opcode in _NOT_ALLOCATING or op.opcode.endswith(('-start', '-update')):
                continue
            if op.name in outputs or not op.is_in_hbm or _updates_in_place(module, op):
                continue
            arrays = op.results[:1] if op.opcode.endswith('-done') else op.results
            yield from ((array, op) for array in arrays)


def _executed(module: Module) -> Iterator[Computation]:
    """Yields the entry computation, and those that loops, conditionals and calls run."""
    seen, pending = {module.entry.name}, [module.entry]
    while pending:
        comp = pending.pop()
        yield comp
        for op in comp.instructions():
            if op.opcode in ('while', 'conditional', 'call'):
                for name in op.callees:
                    if name not in seen:
                        seen.add(name)
                        pending.append(module.computation(name))


def _updates_in_place(module: Module, op: Instruction) -> bool:
    while op.opcode == 'fusion' and (called := module.called(op)):
        op = called.root
        while op.opcode in ('bitcast', 'convert', 'copy'):
            op = called[op.operands[0]]
    return op.opcode in ('dynamic-update-slice', 'scatter')
