"""Parses the optimized HLO text of a program: its computations and their instructions."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

from .sources import Sources, Span, number_of, op_name


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
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\]')


def array_types(text: str) -> tuple[ArrayType, ...]:
    """Returns the arrays in an HLO type, which may be a tuple.

    >>> from einshard._program.hlo.text import array_types
    >>> [str(array) for array in array_types('(f32[8,128]{1,0:T(8,128)}, s32[])')]
    ['f32[8,128]', 's32[]']
    """
    return tuple(
        ArrayType(dtype, tuple(int(size.lstrip('<=')) for size in sizes.split(',') if size))
        for dtype, sizes in _ARRAY.findall(text)
    )


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
    constant, or the number of a parameter. `metadata` is the rest of the line after 'metadata={'.
    XLA writes backend_config before or after the metadata, so it is in `attributes` or `metadata`.
    """

    name: str
    type: str
    opcode: str
    operand_text: str
    attributes: str
    metadata: str
    is_root: bool
    results: _Arrays

    @property
    def operands(self) -> list[str]:
        return _OPERAND.findall(self.operand_text)

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


def read_instruction(line: str, types: Callable[[str], _Arrays] = array_types) -> Instruction:
    match = _INSTRUCTION.match(line)
    if not match:
        raise ValueError(f'not an HLO instruction: {line}')
    root, name, type_, opcode, rest = match.groups()
    operand_text, *after = _BEFORE_ATTRIBUTES.split(rest, maxsplit=1)
    if not after:
        operand_text = rest.rpartition(')')[0]
    attributes, _, metadata = ''.join(after).partition('metadata={')
    opcode = sys.intern(opcode)
    return Instruction(
        name, type_, opcode, operand_text, attributes, metadata, bool(root), types(type_)
    )


# --- the program --------------------------------------------------------------------------------

_HEADER = re.compile(r'(ENTRY )?%?(\S+) [^\n]*\{$')
_PALLAS_METADATA = re.compile(r'kernel_metadata=\{\n(?:".*\n)*\}')


def _lines(text: str) -> Iterator[str]:
    # not a list, which would take as much memory as the text
    start = 0
    while (end := text.find('\n', start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


class Program:
    """An optimized HLO module, parsed.

    Attributes:
        text: the HLO text.
        computations: the instructions of each computation, by name.
        entry: the name of the computation that runs first; '' if there is none.
        head: the text before the first computation.
    """

    def __init__(self, text: str):
        self.text = text
        # the metadata of a Pallas kernel has several lines
        if 'kernel_metadata={\n' in text:
            text = _PALLAS_METADATA.sub(lambda match: match[0].replace('\n', ' '), text)
        # a program has few types: each is parsed once
        self.array_types = functools.cache(array_types)
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ''
        head: list[str] = []
        instructions: list[Instruction] | None = None
        for line in _lines(text):
            if instructions is not None:
                if line.startswith('}'):
                    instructions = None
                else:
                    instructions.append(read_instruction(line, self.array_types))
            elif (header := _HEADER.match(line)) and not line.startswith('HloModule '):
                instructions = self.computations[header[2]] = []
                if header[1]:
                    self.entry = header[2]
            elif not self.computations:
                head.append(line)
        self.head = '\n'.join(head)
        self.sources = Sources(head)

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

    def span(self, op: Instruction) -> Span | None:
        """Returns the user's source code that an instruction comes from, or None."""
        return self.sources.span(op.metadata) if op.metadata else None

    def source(self, op: Instruction) -> str | None:
        """Returns the user's source line, such as 'model.py:12'."""
        span = self.span(op)
        return span.text if span else None
