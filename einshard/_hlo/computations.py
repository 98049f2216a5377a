"""Optimised HLO text -> its computations, of which only what is asked for is parsed; no JAX."""

from __future__ import annotations

import bisect
import functools
import itertools
import re

from .syntax import Instruction, Sources, read_instruction

_HEADER = re.compile(r'\n(ENTRY )?%?(\S+) [^\n]*\{(?=\n)')
_LINE = re.compile(r'  (ROOT )?%?(\S+) = ([^\n]*)')
_OPERAND = re.compile(r'%([^\s,()]+)')
_CALLS, _BODY = (re.compile(rf' ({word})=%?([^\s,]+)') for word in ('calls', 'body'))


class Computation:
    """Instructions by name. Lines are parsed when they are asked for: most are not."""

    def __init__(self, name: str, text: str, is_entry: bool):
        self.name = name
        self.is_entry = is_entry
        self.lines: dict[str, str] = {}
        self.users: dict[str, list[str]] = {}
        self.root = ''
        self._parsed: dict[str, Instruction] = {}
        for found in _LINE.finditer(text):
            is_root, made, line = found.groups()
            self.lines[made] = found[0]
            if is_root:
                self.root = made
            for operand in _OPERAND.findall(line.partition('), ')[0]):
                self.users.setdefault(operand, []).append(made)

    def __getitem__(self, name: str) -> Instruction:
        made = self._parsed.get(name)
        if made is None:
            made = self._parsed[name] = read_instruction(self.lines[name])
        return made

    def parameter(self, number: int) -> str:
        at = f' parameter({number})'
        return next(name for name, line in self.lines.items() if at in line)


class Computations:
    """The computations of a program, by their place in its text."""

    def __init__(self, text: str):
        self.text = text
        headers = list(_HEADER.finditer(text))
        self.starts = [header.start() for header in headers]
        self.ends = [header.end() for header in headers]
        self.names = [header[2] for header in headers]
        self.entry = next((i for i, header in enumerate(headers) if header[1]), -1)
        self.numbers = {name: i for i, name in enumerate(self.names)}
        self.sources = Sources(text[: self.starts[0] if headers else 0].splitlines())

    @functools.cache  # noqa: B019  (lives as long as the reader)
    def computation(self, i: int) -> Computation:
        end = self.text.find('\n}', self.ends[i])
        return Computation(self.names[i], self.text[self.ends[i] : end], i == self.entry)

    def line(self, at: int) -> Instruction:
        start = self.text.rfind('\n', 0, at) + 1
        return read_instruction(self.text[start : self.text.find('\n', start)])

    def caller(self, word: str, name: str) -> tuple[Computation | None, Instruction | None]:
        """The instruction that runs a computation as its 'calls' or its 'body'."""
        at = self.calls.get((word, name))
        if at is None:
            return None, None
        return self.computation(bisect.bisect(self.starts, at) - 1), self.line(at)

    @functools.cached_property
    def calls(self) -> dict[tuple[str, str], int]:
        """Where computations are run from."""
        found = itertools.chain(*(call.finditer(self.text) for call in (_CALLS, _BODY)))
        return {(call[1], call[2]): call.start() for call in found}
