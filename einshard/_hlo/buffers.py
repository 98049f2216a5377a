"""Finds the largest temporary arrays of an HLO program. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .module import ArrayType, Computation, Instruction, Module


@dataclass(frozen=True, slots=True)
class Temporary:
    """An array that a program computes and needs for a while.

    Attributes:
        array: the dtype and shape on one device: 'bf16[8,128]'.
        bytes: bytes per device, without padding.
        source: the source line, such as 'model.py:12', or None.
        op_name: the JAX operation that computes it; or an HLO opcode, such as 'copy', if the
            compiler added it.
    """

    array: str
    bytes: int
    source: str | None
    op_name: str


# these allocate no array
_NO_ARRAY = frozenset(
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
_MOVED_MEMORY = re.compile(r'\{[^}]*S\([1-9]')  # VMEM on TPU, host memory


def largest_temporaries(module: Module, n: int = 5) -> tuple[Temporary, ...]:
    """Finds the largest temporaries; arrays of the same line and shape are listed once.

    Several of them may use the same memory, one after another.
    """
    found: dict[tuple[str, str | None], Temporary] = {}
    for array, made in sorted(_arrays(module), key=lambda pair: -pair[0].bytes):
        key = str(array), module.source(made)
        name = made.op_name or made.opcode
        found.setdefault(key, Temporary(key[0], array.bytes, key[1], name))
        if len(found) == n:
            break
    return tuple(found.values())


def _arrays(module: Module) -> Iterator[tuple[ArrayType, Instruction]]:
    """Yields the arrays that take memory, each with the instruction that makes it."""
    for here in _running(module):
        root = here['']
        # the results of the program and of loop bodies are not temporaries
        outputs = {root.name, *(root.operands if root.opcode == 'tuple' else ())}
        for made in here.instructions():
            if made.opcode in _NO_ARRAY or made.opcode.endswith(('-start', '-update')):
                continue
            if made.name in outputs or _MOVED_MEMORY.search(made.type) or _in_place(module, made):
                continue
            arrays = made.results[:1] if made.opcode.endswith('-done') else made.results
            yield from ((array, made) for array in arrays)


def _running(module: Module) -> Iterator[Computation]:
    """Yields the entry computation, and those that loops, conditionals and calls run."""
    seen, left = {module.entry.name}, [module.entry]
    while left:
        here = left.pop()
        yield here
        for made in here.instructions():
            if made.opcode in ('while', 'conditional', 'call'):
                for name in made.callees:
                    if name not in seen:
                        seen.add(name)
                        left.append(module.computation(name))


def _unmoved(here: Computation, name: str) -> Instruction:
    """Returns the instruction that computes a value, before copies, converts and bitcasts."""
    made = here[name]
    while made.opcode in ('bitcast', 'convert', 'copy'):
        made = here[made.operands[0]]
    return made


def _in_place(module: Module, made: Instruction) -> bool:
    """Whether an instruction only changes a part of its operand."""
    while made.opcode == 'fusion' and (called := module.called(made)):
        made = _unmoved(called, '')
    return made.opcode in ('dynamic-update-slice', 'scatter')
