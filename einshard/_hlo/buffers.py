"""The large arrays of an optimized HLO program: temporaries, arguments, results. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .module import ArrayType, Computation, Instruction, Module


@dataclass(frozen=True, slots=True)
class Temporary:
    """An array that a program computes and needs for a while.

    Attributes:
        array: as the compiler writes it, for one device: 'bf16[8,128]'.
        bytes: bytes per device, without padding.
        source: 'model.py:12', or None.
        op_name: the JAX operation that it comes from, or that of the compiler, such as 'copy'.
    """

    array: str
    bytes: int
    source: str | None
    op_name: str


# these make no array of their own
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
    """The largest temporaries, those of one line and shape once.

    The compiler may give several of them the same memory, one after another.
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
    """The arrays that take memory, and the instructions that make them."""
    for here in _running(module):
        root = here['']
        # the results of the program and of loop bodies are no temporaries
        outputs = {root.name, *(root.operands if root.opcode == 'tuple' else ())}
        for made in here.instructions():
            if made.opcode in _NO_ARRAY or made.opcode.endswith(('-start', '-update')):
                continue
            if made.name in outputs or _MOVED_MEMORY.search(made.type) or _in_place(module, made):
                continue
            arrays = made.results[:1] if made.opcode.endswith('-done') else made.results
            yield from ((array, made) for array in arrays)


def _running(module: Module) -> Iterator[Computation]:
    """The entry, and the computations that loops, conditionals and calls run."""
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
    """The instruction that a value comes from, without bitcasts and the like."""
    made = here[name]
    while made.opcode in ('bitcast', 'convert', 'copy'):
        made = here[made.operands[0]]
    return made


def _in_place(module: Module, made: Instruction) -> bool:
    """Whether an instruction only changes a part of its operand."""
    while made.opcode == 'fusion' and (called := module.called(made)):
        made = _unmoved(called, '')
    return made.opcode in ('dynamic-update-slice', 'scatter')


def bytes_once(module: Module) -> int:
    """Bytes per device of the arguments that are read and of the results that are written.

    Not counted: arguments that are only indexed, such as an embedding table; results that are
    changed in place in a part, or are arguments.
    """
    entry = module.entry
    reads = _Reads(module)
    total = 0
    for made in entry.parameters():
        if not _MOVED_MEMORY.search(made.type) and reads.of(entry, made.name):
            total += sum(array.bytes for array in made.results)
    root = entry['']
    for made in [entry[name] for name in root.operands] if root.opcode == 'tuple' else [root]:
        if not _MOVED_MEMORY.search(made.type) and _is_written(module, entry, made):
            total += sum(array.bytes for array in made.results)
    return total


def _is_written(module: Module, here: Computation, made: Instruction) -> bool:
    """Whether all of a result is written; not so an argument, or what a loop updates in place."""
    while made.opcode == 'bitcast':
        made = here[made.operands[0]]
    if made.opcode == 'get-tuple-element':
        loop = here[made.operands[0]]
        if loop.opcode == 'while':
            body = _body(module, loop)
            made = body[body[''].operands[made.element]] if body[''].opcode == 'tuple' else made
            return made.opcode != 'get-tuple-element' and not _in_place(module, made)
    return made.opcode != 'parameter' and not _in_place(module, made)


class _Reads:
    """Which values are read in full."""

    def __init__(self, module: Module):
        self._module = module
        self._seen: set[tuple[str, str, int]] = set()

    def of(self, here: Computation, name: str, element: int = -1, in_loop: bool = False) -> bool:
        """Whether a value, or an element of a tuple, is read in full."""
        key = here.name, name, element
        if key in self._seen:
            return False
        self._seen.add(key)
        return any(self._by(here, name, element, user, in_loop) for user in here.users(name))

    def _by(
        self, here: Computation, name: str, element: int, user: Instruction, in_loop: bool
    ) -> bool:
        at = user.operands.index(name)
        match user.opcode:
            case 'tuple':
                return user.name != here[''].name and self.of(here, user.name, at, in_loop)
            case 'get-tuple-element':
                return user.element == element and self.of(here, user.name, -1, in_loop)
            case 'bitcast' | 'opt-barrier':
                return self.of(here, user.name, element, in_loop)
            case 'while':
                body = _body(self._module, user)
                return self.of(body, body.parameter(0), element, True)
            case 'fusion' | 'call' if called := self._module.called(user):
                if self.of(called, called.parameter(at), element, in_loop):
                    return True
                # on TPU there are fusions of nothing but a bitcast
                only_moves = _unmoved(called, '').name == called.parameter(at)
                return only_moves and self.of(here, user.name, element, in_loop)
            case 'dynamic-slice':
                # a loop over layers reads all of them, one after another
                return at == 0 and in_loop
            case 'gather' | 'dynamic-update-slice' | 'scatter':
                return at != 0
            case _:
                return True


def _body(module: Module, loop: Instruction) -> Computation:
    found = re.search(r'\bbody=%?([^\s,]+)', loop.attributes)
    assert found
    return module.computation(found[1])
