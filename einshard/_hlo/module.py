"""Reads optimized HLO text, which may be tens of megabytes long.

`Module` finds the headers of computations, and parses a line only when a caller needs it.
In this package, `op` is an instruction, and `comp` is the computation that contains it.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from .elements import add_tuple_elements
from .sources import Sources, number_of, op_name


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array in an HLO program; `str` gives 'f32[8,128]'.

    >>> from einshard._hlo.module import ArrayType
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


_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\]')


def array_types(text: str) -> tuple[ArrayType, ...]:
    """Returns the arrays in an HLO type, which may be a tuple.

    >>> from einshard._hlo.module import array_types
    >>> [str(array) for array in array_types('(f32[8,128]{1,0:T(8,128)}, s32[])')]
    ['f32[8,128]', 's32[]']
    """
    return tuple(
        ArrayType(dtype, tuple(int(size.lstrip('<=')) for size in sizes.split(',') if size))
        for dtype, sizes in _ARRAY.findall(text)
    )


# --- instructions -------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)')
_OPERAND = re.compile(r'%([^\s,()]+)')
_BEFORE_ATTRIBUTES = re.compile(r'\), (?=\w+=)')  # types also contain '), '
_CALLEE = re.compile(r'\b(?:calls|to_apply)=%?([^\s,]+)')
_BODY = re.compile(r'\bbody=%?([^\s,]+)')
_OTHER_MEMORY = re.compile(r'\{[^}]*S\([1-9]')
_CALLEES = re.compile(
    r'\b(?:calls|to_apply|condition|body|(?:true|false)_computation'
    r'|(?:branch|called)_computations)=(?:\{(%[^}]*)\}|(%[^\s,]+))'
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

    @property
    def operands(self) -> list[str]:
        return _OPERAND.findall(self.operand_text)

    @property
    def parameter_number(self) -> int:
        return int(self.operand_text)

    @property
    def integer_constant(self) -> int | None:
        is_integer = re.fullmatch(r'-?\d+', self.operand_text)
        return int(self.operand_text) if self.opcode == 'constant' and is_integer else None

    @property
    def results(self) -> tuple[ArrayType, ...]:
        return array_types(self.type)

    @property
    def is_in_hbm(self) -> bool:
        """False if the result is in host memory, or in the VMEM of a TPU."""
        return _OTHER_MEMORY.search(self.type) is None

    @property
    def callee(self) -> str:
        """The name of the computation that a fusion, call or reduction runs, or ''."""
        match = _CALLEE.search(self.attributes)
        return match[1] if match else ''

    @property
    def callees(self) -> list[str]:
        # user-chosen names in backend_config may look like references
        attributes = self.attributes.partition(', backend_config=')[0]
        lists = (several or single for several, single in _CALLEES.findall(attributes))
        return [name for names in lists for name in names.replace('%', '').split(', ')]

    @property
    def joins_slices(self) -> bool:
        """Whether this is a ConcatBitcast, which on TPU joins slices of an array without a copy."""
        return '"ConcatBitcast"' in self.attributes

    @property
    def body(self) -> str:
        match = _BODY.search(self.attributes)
        return match[1] if match else ''

    @property
    def element(self) -> int:
        """The index that a get-tuple-element reads, or -1 for other instructions."""
        match = re.match(r'index=(\d+)', self.attributes)
        return int(match[1]) if match else -1

    @property
    def op_name(self) -> str:
        return op_name(self.metadata)


def read_instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if not match:
        raise ValueError(f'not an HLO instruction: {line}')
    name, type_, opcode, rest = match.groups()
    operand_text, *after = _BEFORE_ATTRIBUTES.split(rest, maxsplit=1)
    if not after:
        operand_text = rest.rpartition(')')[0]
    attributes = ''.join(after)
    attributes, _, metadata = attributes.partition('metadata={')
    return Instruction(name, type_, opcode, operand_text, attributes, metadata)


# --- computations -------------------------------------------------------------------------------

_LINE = re.compile(r'\n  (ROOT )?%?([^\s=]+) = ')  # 10 times faster than with ^ for \n
_PARAMETER = re.compile(r' parameter\(\d+\)')


class Computation:
    """`computation[name]` is an instruction; `computation['']` is the root."""

    def __init__(self, name: str, text: str, start: int, is_entry: bool):
        self.name = name
        self.is_entry = is_entry
        self._text = text
        self._span = start, text.find('\n}', start) + 1
        self._parsed: dict[str, Instruction] = {}

    def __getitem__(self, name: str) -> Instruction:
        op = self._parsed.get(name)
        if op is None:
            start = self._lines[name]
            line = self._text[start : self._text.index('\n', start)]
            op = self._parsed[name] = read_instruction(line)
        return op

    @property
    def root(self) -> Instruction:
        return self['']

    def instructions(self) -> Iterator[Instruction]:
        return (self[name] for name in self._lines if name)

    def users(self, name: str) -> list[Instruction]:
        return [self[user] for user in self._users.get(name, ())]

    def parameters(self) -> Iterator[Instruction]:
        for match in _PARAMETER.finditer(self._text, *self._span):
            start = self._text.rindex('\n', 0, match.start()) + 1
            yield read_instruction(self._text[start : self._text.index('\n', start)])

    def parameter(self, number: int) -> str:
        return next(op.name for op in self.parameters() if op.parameter_number == number)

    @functools.cached_property
    def _lines(self) -> dict[str, int]:
        """{name of an instruction: offset of its line}; '' is the root."""
        lines: dict[str, int] = {}
        for match in _LINE.finditer(self._text, *self._span):
            lines[match[2]] = match.start() + 1
            if match[1]:
                lines[''] = match.start() + 1
        return lines

    @functools.cached_property
    def _users(self) -> dict[str, list[str]]:
        users: dict[str, list[str]] = {}
        names = {name: name for name in self._lines}  # to save memory, stores each name once
        for match in _LINE.finditer(self._text, *self._span):
            start, end = match.end(), self._text.index('\n', match.end())
            operands = _BEFORE_ATTRIBUTES.split(self._text[start:end], maxsplit=1)[0]
            for operand in _OPERAND.findall(operands):
                name = names.get(operand) or operand
                users.setdefault(name, []).append(names[match[2]])
        return users


class Value(NamedTuple):
    """The value that the instruction `name` of `comp` computes. The name '' means the root.

    `arguments` are the values passed for the parameters of `comp`, or () if unknown.
    """

    comp: Computation
    name: str = ''
    arguments: tuple[Value, ...] = ()

    @property
    def op(self) -> Instruction:
        return self.comp[self.name]

    def sibling(self, name: str) -> Value:
        return self._replace(name=name)

    def in_callee(self, callee: Computation, name: str = '') -> Value:
        return Value(callee, name, tuple(map(self.sibling, self.op.operands)))


# --- the program --------------------------------------------------------------------------------


class Site(NamedTuple):
    """An instruction and where it is: its computation, and the offset of its line in the text."""

    start: int
    comp: Computation
    op: Instruction


_HEADER = re.compile(r'\n(ENTRY )?%?(\S+) [^\n]*\{(?=\n)')
_PALLAS_METADATA = re.compile(r'kernel_metadata=\{\n(?:".*\n)*\}')
# references to computations; `call_sites` drops matches in user-chosen names
_REFERENCE = re.compile(r'=(?:\{(%[^}]*)\}|(%[^\s,]+))')


class Module:
    """An optimized HLO module.

    Attributes:
        text: the program, one instruction per line.
        head: the text before the first computation.
    """

    def __init__(self, text: str):
        if 'kernel_metadata={\n' in text:
            text = _PALLAS_METADATA.sub(lambda match: match[0].replace('\n', ' '), text)
        text = add_tuple_elements(text)
        self.text = text
        headers = list(_HEADER.finditer(text))
        self._names = [header[2] for header in headers]
        self._starts = [header.end() for header in headers]
        self._numbers = {name: i for i, name in enumerate(self._names)}
        self._entry = next((i for i, header in enumerate(headers) if header[1]), -1)
        self._computations: dict[int, Computation] = {}
        self._call_sites: dict[str, list[Site]] = {}
        self.head = text[: headers[0].start() + 1 if headers else len(text)]
        self.sources = Sources(self.head.splitlines())

    @property
    def name(self) -> str:
        match = re.match(r'HloModule (?:jit_)?([^\s,]+)', self.head)
        return match[1] if match else ''

    @property
    def n_partitions(self) -> int:
        return number_of('num_partitions', self.head) or number_of('replica_count', self.head) or 1

    @property
    def entry(self) -> Computation:
        return self._computation(self._entry)

    @property
    def aliases(self) -> dict[int, int]:
        """The outputs that reuse the memory of a parameter: {output number: parameter number}."""
        line = self.head.partition('\n')[0]
        return {int(o or 0): int(p) for o, p in re.findall(r'\{(\d*)\}: \((\d+), \{\}', line)}

    def source(self, op: Instruction) -> str | None:
        """Returns the user's source line, such as 'model.py:12'."""
        return self.sources.line(op.metadata) if op.metadata else None

    def find(self, *marks: str) -> Iterator[Site]:
        """Finds the instructions whose line contains one of `marks`, in text order."""
        starts: set[int] = set()
        for mark in marks:
            at = self.text.find(mark, len(self.head))
            while at >= 0:
                starts.add(self.text.rindex('\n', 0, at) + 1)
                at = self.text.find(mark, at + 1)
        for start in sorted(starts):
            if self.text.startswith('  ', start):  # not a header
                yield self._site(start)

    def called(self, op: Instruction) -> Computation | None:
        number = self._numbers.get(op.callee)
        return None if number is None else self._computation(number)

    def computation(self, name: str) -> Computation:
        return self._computation(self._numbers[name])

    def call_sites(self, computation: Computation) -> list[Site]:
        """Finds the instructions that run `computation`, except -update and -done instructions."""
        name = computation.name
        sites = self._call_sites.get(name)
        if sites is None:
            sites = self._call_sites[name] = [
                site
                for site in map(self._site, self._references.get(name, ()))
                if name in site.op.callees and not site.op.opcode.endswith(('-update', '-done'))
            ]
        return sites

    def is_shared(self, computation: Computation) -> bool:
        """Whether several instructions run `computation`, as is common for reducers."""
        return len(self.call_sites(computation)) > 1

    def path(self, computation: Computation) -> list[Site] | None:
        """Returns one chain of call sites from the entry to `computation`, or None if unused."""
        if computation.is_entry:
            return []
        for site in self.call_sites(computation):
            path = self.path(site.comp)
            if path is not None:
                return [*path, site]
        return None

    def is_in_branch(self, computation: Computation) -> bool:
        sites = self.path(computation) or ()
        return any(site.op.opcode == 'conditional' for site in sites)

    @functools.cached_property
    def _references(self) -> dict[str, list[int]]:
        """{computation name: offsets of the lines that refer to it}."""
        lines: dict[str, list[int]] = {}
        for match in _REFERENCE.finditer(self.text, len(self.head)):
            for name in (match[1] or match[2]).replace('%', '').split(', '):
                if name in self._numbers:
                    start = self.text.rindex('\n', 0, match.start()) + 1
                    lines.setdefault(name, []).append(start)
        return lines

    def _computation(self, i: int) -> Computation:
        comp = self._computations.get(i)
        if comp is None:
            comp = Computation(self._names[i], self.text, self._starts[i], i == self._entry)
            self._computations[i] = comp
        return comp

    def _site(self, start: int) -> Site:
        comp = self._computation(bisect.bisect(self._starts, start) - 1)
        line = self.text[start : self.text.index('\n', start)]
        return Site(start, comp, read_instruction(line))
