"""Parses the optimized HLO text of a program: its computations and their instructions."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import NamedTuple, TypeAlias

from ..._errors import EinshardError
from .opcodes import OPCODES, is_known
from .sources import SourceRange, Sources, number_of, op_name


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array in an HLO program; `str` gives 'f32[8,128]'.

    >>> from einshard._program.hlo.text import ArrayType
    >>> ArrayType('bf16', (8, 128)).bytes, ArrayType('s4', (5,)).bytes
    (2048, 3)
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return -(-prod(self.shape) * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f'{self.dtype}[{",".join(map(str, self.shape))}]'


def _bits(dtype: str) -> int:
    if dtype == 'pred':
        return 8
    digits = re.search(r'\d+', dtype)  # the first number: f8e4m3fn has 8 bits
    return int(digits[0]) if digits else 0  # a token has no data


_Arrays: TypeAlias = tuple[ArrayType, ...]
MAX_NUMBER = 2**63  # XLA's sizes and counts have 64 bits
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\]')


def array_types(text: str) -> tuple[ArrayType, ...]:
    """Returns the arrays in an HLO type, which may be a tuple.

    >>> from einshard._program.hlo.text import array_types
    >>> [str(array) for array in array_types('(f32[8,128]{1,0:T(8,128)}, s32[])')]
    ['f32[8,128]', 's32[]']
    """
    arrays = tuple(
        ArrayType(dtype, tuple(int(size.lstrip('<=')) for size in sizes.split(',') if size))
        for dtype, sizes in _ARRAY.findall(text)
    )
    if any(prod(array.shape) >= MAX_NUMBER for array in arrays):
        raise ValueError('has an array of more than 2**63 elements')
    return arrays


# --- instructions -------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)')
_OPERAND = re.compile(r'%([^\s,()]+)')
_BEFORE_ATTRIBUTES = re.compile(r'\), (?=[\w-]+=)')  # types also contain '), '
_CALLEES = re.compile(
    r'\b(calls|to_apply|condition|body|(?:true|false)_computation'
    r'|(?:branch|called)_computations)=(?:\{(%[^}]*)\}|%?([^\s,{}]+))'
)


class Instruction(NamedTuple):
    """One line of a computation.

    `operand_text` is the text in parentheses after the opcode: the operands, the value of a
    constant, or the number of a parameter. `metadata` is the rest
    of the line after 'metadata={'. XLA writes backend_config before or after the metadata, so it is
    in `attributes` or `metadata`.
    """

    name: str
    type: str
    opcode: str
    operand_text: str
    attributes: str
    metadata: str
    is_root: bool
    results: _Arrays
    line: int = 0  # in the text of the program

    @property
    def operands(self) -> list[str]:  # not stored, which would take half as much as the text
        return _OPERAND.findall(self.operand_text) if '%' in self.operand_text else []

    @property
    def config(self) -> str:
        """The attributes and the metadata, one of which has the backend_config."""
        return self.attributes + self.metadata

    @property
    def op_name(self) -> str:
        return op_name(self.metadata)

    @property
    def callees(self) -> dict[str, list[str]]:
        """The computations that it runs, by attribute: {'body': ['loop'], 'condition': ['test']}"""
        # user-chosen names in backend_config may look like references
        attributes = self.attributes.partition(', backend_config=')[0]
        return {
            attribute: (several or single).replace('%', '').split(', ')
            for attribute, several, single in _CALLEES.findall(attributes)
        }


def read_instruction(
    line: str, types: Callable[[str], _Arrays] = array_types, number: int = 0
) -> Instruction:
    match = _INSTRUCTION.match(line)
    if not match:
        raise ValueError('is not an instruction')
    root, name, type_, opcode, rest = match.groups()
    operand_text, *after = _BEFORE_ATTRIBUTES.split(rest, maxsplit=1)
    if not after:
        operand_text = rest.rpartition(')')[0]
    attributes, _, metadata = ''.join(after).partition('metadata={')
    opcode = sys.intern(opcode)
    results = types(type_)
    return Instruction(
        name, type_, opcode, operand_text, attributes, metadata, bool(root), results, number
    )


class Unreadable(ValueError):
    """Raised for an instruction that cannot be read: `what` continues 'line 12 of the program'."""

    def __init__(self, op: Instruction, what: str, name: str = ''):
        self.op, self.what, self.name = op, what, name
        super().__init__(what)


class LineErrors:
    """A context in which errors become an EinshardError about a line of a program.

    HLO is not written by users, but texts may be cut off, and newer compilers write new forms.

    Attributes:
        op: the instruction that is being read, to be set before each.
    """

    def __init__(self, program: HloModule):
        self.program, self.op = program, None

    op: Instruction | None

    def __enter__(self) -> LineErrors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Unreadable):
            raise self.program.error(error.op.line, error.what, error.name) from error
        is_ours = isinstance(error, EinshardError) or self.op is None
        if isinstance(error, _INVALID) and not is_ours:
            assert self.op is not None
            what = f'cannot be read: {type(error).__name__}: {error}'
            raise self.program.error(self.op.line, what) from error


# what Python raises for names and numbers that are not there
_INVALID = (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError)


# --- the program --------------------------------------------------------------------------------

_STARTS = ('-start', '-update', 'recv', 'send')  # another instruction ends what these start
_HEADER = re.compile(r'(ENTRY )?%?(\S+) [^\n]*\{$')


def _lines(text: str) -> Iterator[str]:
    # not a list, which would take as much memory as the text
    start = 0
    while (end := text.find('\n', start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


class HloModule:
    """An optimized HLO module, parsed.

    Attributes:
        text: the HLO text.
        computations: the instructions of each computation, by name.
        entry: the name of the computation that runs first; '' if there is none.
        head: the text before the first computation.
    """

    def __init__(self, text: str):
        self.text = text
        # a program has few types: each is parsed once
        self.array_types = functools.cache(array_types)
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ''
        head: list[str] = []
        instructions: list[Instruction] | None = None
        name, n_opened, number = '', 0, 0
        lines = enumerate(_lines(text), 1)
        for number, line in lines:
            if instructions is not None:
                if line.startswith('}'):
                    instructions = None
                    continue
                if line.endswith('kernel_metadata={'):  # of a Pallas kernel, on several lines
                    for _, more in lines:
                        line += f' {more}'
                        if more.startswith('}'):
                            break
                try:
                    instructions.append(read_instruction(line, self.array_types, number))
                except ValueError as error:
                    raise self.error(number, str(error)) from error
            elif (header := _HEADER.match(line)) and not line.startswith('HloModule '):
                name, n_opened = header[2], number
                instructions = self.computations[name] = []
                if header[1]:
                    self.entry = name
            elif _INSTRUCTION.match(line):
                raise self.error(number, 'is an instruction outside of a computation')
            elif not self.computations:
                head.append(line)
        if instructions is not None:
            raise self.error(n_opened, f'opens %{name}, which no brace closes', name)
        self.head = '\n'.join(head)
        self.sources = Sources(head)
        if text.strip():
            self._check(number)

    def error(self, line: int, what: str, name: str = '') -> EinshardError:
        """Returns an error about a line of the text, in which it marks `name`."""
        text = self.text.split('\n', line)[line - 1].strip()
        start = max(text.find(name), 0)
        first = max(start - 40, 0)
        shown = text[first : first + 100]
        return EinshardError(
            f'line {line} of the compiled program {what}',
            code='hlo',
            expression=shown,
            spans=[(start - first, min(start - first + len(name), len(shown)))] if name else (),
        )

    def _check(self, n_lines: int) -> None:
        """Raises an error if a part of the text is missing, so that no collective is overlooked."""
        if not self.head.lstrip().startswith('HloModule'):
            raise self.error(1, 'is not the start of an HLO module')
        if not self.entry:
            raise self.error(n_lines, 'is the last one, and no computation before it is the ENTRY')
        for name, ops in self.computations.items():
            # sets, because a large program has 100,000 operations
            used = {operand for op in ops for operand in op.operands}
            for operand in [*used.difference({op.name for op in ops})]:
                base = operand.partition('#')[0]  # '%pair#0' is an element of '%pair'
                used.add(base)
                if not any(op.name == base for op in ops):
                    op = next(op for op in ops if operand in op.operands)
                    what = f'uses %{base}, which no line of %{name} defines'
                    raise self.error(op.line, what, base)
            if not any(op.is_root for op in ops):
                line = ops[-1].line if ops else n_lines
                raise self.error(line, f'is the last one of %{name}, which has no ROOT')
            for op in ops:
                if op.opcode.endswith(_STARTS) and op.name not in used and not op.is_root:
                    what = f'starts %{op.name}, but no line of %{name} uses it'
                    raise self.error(op.line, what, op.name)
                for attribute, names in op.callees.items() if '%' in op.attributes else ():
                    # what a reduction or a sort applies to elements has no arrays to read
                    is_run = attribute != 'to_apply' or op.opcode == 'call'
                    missing = [name for name in names if name not in self.computations]
                    if missing and is_run:
                        what = f'calls %{missing[0]}, which the program does not define'
                        raise self.error(op.line, what, missing[0])

    @functools.cached_property
    def unknown(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the lines of operations that are not in opcodes.py, by opcode."""
        found: dict[str, list[int]] = {}
        for ops in self.computations.values():
            for op in ops:
                if op.opcode not in OPCODES and not is_known(op.opcode):
                    found.setdefault(op.opcode, []).append(op.line)
        return found

    @property
    def name(self) -> str:
        match = re.match(r'HloModule (?:jit_)?([^\s,]+)', self.head)
        return match[1] if match else ''

    @property
    def n_partitions(self) -> int:
        return number_of('num_partitions', self.head) or number_of('replica_count', self.head) or 1

    @property
    def aliases(self) -> dict[int, int]:
        """The outputs that reuse the memory of a parameter: {output number: parameter number}."""
        line = self.head.partition('\n')[0]
        return {int(o or 0): int(p) for o, p in re.findall(r'\{(\d*)\}: \((\d+), \{\}', line)}

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters of the program, by number."""
        found = [op for op in self.computations.get(self.entry, ()) if op.opcode == 'parameter']
        return sorted(found, key=lambda op: int(op.operand_text))

    @property
    def root(self) -> Instruction:
        """The instruction that returns the results of the program."""
        return next(op for op in self.computations[self.entry] if op.is_root)

    def span(self, op: Instruction) -> SourceRange | None:
        """Returns the user's source code that an instruction comes from, or None."""
        return self.sources.span(op.metadata) if op.metadata else None

    def source(self, op: Instruction) -> str | None:
        """Returns the user's source line, such as 'model.py:12'."""
        span = self.span(op)
        return span.text if span else None
