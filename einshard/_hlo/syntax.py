"""What the text of an optimised HLO program consists of; no JAX.

Nothing is parsed that nobody asks for: the text of a large program has tens of megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array in an HLO program; `str` gives 'f32[8,128]'.

    >>> from einshard._hlo.syntax import ArrayType
    >>> ArrayType('bf16', (8, 128)).bytes, ArrayType('s4', (5,)).bytes
    (2048, 3)
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes, packed: two four-bit numbers to a byte."""
        return -(-prod(self.shape) * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f'{self.dtype}[{",".join(map(str, self.shape))}]'


def _bits(dtype: str) -> int:
    if dtype == 'pred':
        return 8
    digits = re.search(r'\d+', dtype)  # the first ones: f8e4m3fn has eight bits
    return int(digits[0]) if digits else 0  # a token


_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\]')


def array_types(text: str) -> tuple[ArrayType, ...]:
    """The arrays of a type, those of a tuple in order.

    >>> from einshard._hlo.syntax import array_types
    >>> [str(array) for array in array_types('(f32[8,128]{1,0:T(8,128)}, s32[])')]
    ['f32[8,128]', 's32[]']
    """
    return tuple(
        ArrayType(dtype, tuple(int(size.lstrip('<=')) for size in sizes.split(',') if size))
        for dtype, sizes in _ARRAY.findall(text)
    )


# --- instructions -------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)')
_NAME = re.compile(r'\n  (ROOT )?%?([^\s=]+) = ')  # a literal beginning: 10 times faster than ^
_OPERAND = re.compile(r'%([^\s,()]+)')


class Instruction(NamedTuple):
    """One line of a computation.

    `given` is what the parentheses hold: operands, a constant, the number of a parameter.
    """

    name: str
    type: str
    opcode: str
    given: str
    attributes: str
    metadata: str

    @property
    def operands(self) -> list[str]:
        return _OPERAND.findall(self.given)

    @property
    def results(self) -> tuple[ArrayType, ...]:
        return array_types(self.type)

    @property
    def callee(self) -> str:
        """The computation that a fusion or a call runs."""
        found = re.search(r'(?:calls|to_apply)=%?([^\s,]+)', self.attributes)
        return found[1] if found else ''


def read_instruction(line: str) -> Instruction:
    found = _INSTRUCTION.match(line)
    if not found:
        raise ValueError(f'no HLO instruction: {line}')
    name, type_, opcode, rest = found.groups()
    # with its type an operand has parentheses too, but none that a comma and a space follow
    given, closing, attributes = rest.partition('), ')
    if not closing:
        given, attributes = rest.rpartition(')')[0], ''
    attributes, _, metadata = attributes.partition('metadata={')
    return Instruction(name, type_, opcode, given, attributes, metadata)


class Program:
    """The text of a program, in which instructions are found by name."""

    def __init__(self, text: str):
        self.text = text
        self.spans: dict[str, tuple[int, int]] = {}  # of computations, from { to }
        self._lines: dict[str, dict[str, int]] = {}  # where in the text an instruction is

    def open(self, computation: str, start: int) -> None:
        """Tell where in the text the instructions of a computation start."""
        self.spans[computation] = start, self.text.find('\n}', start) + 1

    def instruction(self, computation: str, name: str) -> Instruction:
        """That of this name; without a name, the root."""
        start = self._instructions(computation)[name]
        return read_instruction(self.text[start : self.text.index('\n', start)])

    def _instructions(self, computation: str) -> dict[str, int]:
        lines = self._lines.get(computation)
        if lines is None:
            lines = self._lines[computation] = {}
            for match in _NAME.finditer(self.text, *self.spans[computation]):
                lines[match[2]] = match.start() + 1
                if match[1]:
                    lines[''] = match.start() + 1
        return lines


# --- where in the source ------------------------------------------------------------------------

_HERE = str(Path(__file__).parent.parent)  # of the package
_OF_JAX = re.compile(r'[\\/](?:site|dist)-packages[\\/]jax(?:lib)?[\\/]|[\\/]jax[\\/]_src[\\/]')
# a layer of Flax is in Flax, and its user wants the line of the model that calls it
_OF_LIBRARY = re.compile(
    r'[\\/](?:(?:site|dist)-packages|lib[\\/]python3\.\d+)[\\/]|^<frozen ', re.IGNORECASE
)
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})')


class Sources:
    """The tables of files and stack frames at the top of a module, if it has them.

    JAX 0.8 writes a file and a line beside every instruction instead.
    """

    def __init__(self, lines: Iterable[str]):
        tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        for line in lines:
            if line.isidentifier():
                rows = tables.setdefault(line, {})
            elif row := _ROW.fullmatch(line):
                rows[int(row[1])] = row[2] or row[3]
        self._files = tables.get('FileNames', {})
        self._places = {
            number: (number_of('file_name_id', row), number_of('line', row))
            for number, row in tables.get('FileLocations', {}).items()
        }
        self._frames = {
            number: (number_of('file_location_id', row), number_of('parent_frame_id', row))
            for number, row in tables.get('StackFrames', {}).items()
        }
        # XLA writes one more than the number of the parent, 1 for a frame that has none, so the
        # first frame seems its own parent; were that mended, it would have a parent 0
        self._beyond = 1 if self._frames.get(1, (0, 0))[1] == 1 else 0

    def line(self, metadata: str) -> str | None:
        """'model.py:12' of the innermost frame that is of no library; else of none but JAX."""
        if file := re.search(r'source_file="([^"]*)"', metadata):
            return f'{file[1]}:{number_of("source_line", metadata)}'
        frame = number_of('stack_frame_id', metadata)
        innermost = of_library = None
        while frame in self._frames:
            place, parent = self._frames[frame]
            file_id, line = self._places.get(place, (0, 0))
            if file := self._files.get(file_id):
                innermost = innermost or f'{file}:{line}'
                if not (file.startswith(_HERE) or _OF_JAX.search(file)):
                    if not _OF_LIBRARY.search(file):
                        return f'{file}:{line}'
                    of_library = of_library or f'{file}:{line}'
            frame = parent - self._beyond
        return of_library or innermost


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def op_name(metadata: str) -> str:
    """JAX's name for what became an instruction, '' if there is none; XLA escapes what is in it."""
    found = _OP_NAME.search(metadata)
    escaped = found[1].encode() if found else b''
    return re.sub(rb'\\([0-7]{3}|.)', _unescaped, escaped).decode(errors='replace')


def _unescaped(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8)]) if len(found[1]) == 3 else found[1]


def number_of(name: str, text: str) -> int:
    """The number after 'name=', 0 if there is none."""
    found = re.search(rf'\b{name}=(\d+)', text)
    return int(found[1]) if found else 0
