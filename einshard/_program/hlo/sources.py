"""Finds the source lines of the instructions of an HLO program."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

_PACKAGE = str(Path(__file__).parent.parent.parent)
_JAX_FILE = re.compile(r'[\\/](?:site|dist)-packages[\\/]jax(?:lib)?[\\/]|[\\/]jax[\\/]_src[\\/]')
# A line of the user's model is more useful than the line of Flax that it calls.
_LIBRARY_FILE = re.compile(
    r'[\\/](?:(?:site|dist)-packages|lib[\\/]python3\.\d+)[\\/]|^<frozen ', re.IGNORECASE
)
_Function: TypeAlias = tuple[int, int]  # (file id, function name id)


class SourceRange(NamedTuple):
    """A place in the user's source code.

    Columns count from 1, as in editors, and those of HLO from 0. The column is 0 if it is unknown.
    """

    file: str
    line: int
    column: int = 0

    @property
    def text(self) -> str:
        """For example 'model.py:12'."""
        return f'{self.file}:{self.line}'


_Frame = TypeVar('_Frame', bound=tuple[Any, ...])
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})')


class Sources:
    """The tables of files and stack frames at the top of an HLO module."""

    def __init__(self, lines: Iterable[str]):
        tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        for line in lines:
            if line.isidentifier():
                rows = tables.setdefault(line, {})
            elif row := _ROW.fullmatch(line):
                rows[int(row[1][:19])] = row[2] or row[3]
        self._files = tables.get('FileNames', {})  # {file id: file name}
        self._locations = {
            number: SourceRange(
                self._files.get(number_of('file_name_id', row), ''),
                number_of('line', row),
                number_of('column', row, -1) + 1,
            )
            for number, row in tables.get('FileLocations', {}).items()
        }
        self._functions = {  # {location id: (file id, function name id)}
            number: (number_of('file_name_id', row), number_of('function_name_id', row))
            for number, row in tables.get('FileLocations', {}).items()
        }
        self._frames = {  # {frame id: (location id, id of the parent frame)}
            number: (number_of('file_location_id', row), number_of('parent_frame_id', row))
            for number, row in tables.get('StackFrames', {}).items()
        }
        # XLA's parent ids are one too high, so the first frame is its own parent. If XLA fixes
        # this, the first frame has parent 0.
        self._parent_offset = 1 if self._frames.get(1, (0, 0))[1] == 1 else 0

    def span(self, metadata: str) -> SourceRange | None:
        """Returns the source code of the instruction with this metadata."""
        stack = self._stack(number_of('stack_frame_id', metadata))
        return innermost_user_frame(self._locations[location] for _, location in stack)

    def caller(self, metadata: str) -> str | None:
        """Returns the line that calls a helper function, if the instruction is in one.

        A function counts as a helper if only one of its lines is in the module's stack frames, or
        if another function calls it from several lines. Callers that are helpers themselves are
        skipped, except the outermost. Returns None outside helpers.
        """
        stack = [
            (frame, location)
            for frame, location in self._stack(number_of('stack_frame_id', metadata))
            if is_user_file(self._locations[location].file) and frame not in self._shared_frames
        ]
        for (_, location), (_, outside) in pairwise(stack):
            if not self._is_helper(self._functions[location]):
                return None
            if not self._is_helper(self._functions[outside]) or outside == stack[-1][1]:
                text = self._locations[outside].text
                return None if text == self._locations[stack[0][1]].text else text
        return None

    def _stack(self, frame: int) -> Iterator[tuple[int, int]]:
        """Yields (frame id, location id) from `frame` outward, for frames that have a file."""
        seen: set[int] = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, parent = self._frames[frame]
            if location in self._locations and self._locations[location].file:
                yield frame, location
            frame = parent - self._parent_offset

    @functools.cached_property
    def _shared_frames(self) -> set[int]:
        """The frames that all stacks share, such as the jitted function and its callers.

        The stacks of some operations, such as the addition of a `psum`, lack these callers. So only
        the stacks with the most common outermost frame count.
        """
        parents = {parent - self._parent_offset for _, parent in self._frames.values()}
        by_outermost: dict[int, list[set[int]]] = defaultdict(list)
        for frame in self._frames.keys() - parents:
            if stack := [frame for frame, _ in self._stack(frame)]:
                by_outermost[stack[-1]].append({*stack})
        stacks = max(by_outermost.values(), key=len, default=[])
        return set[int].intersection(*stacks) if stacks else set()

    def _is_helper(self, function: _Function) -> bool:
        lines, calls = self._lines_and_calls[function]
        callers = Counter(caller for caller, _ in calls)
        return len(lines) == 1 or max(callers.values(), default=0) > 1

    @functools.cached_property
    def _lines_and_calls(self) -> dict[_Function, tuple[set[int], set[tuple[_Function, int]]]]:
        """Maps each function to (its lines, the (function, line) pairs that call it)."""
        uses: dict[_Function, tuple[set[int], set[tuple[_Function, int]]]] = {}
        for frame in self._frames:
            stack = [location for _, location in self._stack(frame)]
            for location, outside in zip(stack, [*stack[1:], 0], strict=True):
                lines, calls = uses.setdefault(self._functions[location], (set(), set()))
                lines.add(self._locations[location].line)
                if outside:
                    calls.add((self._functions[outside], self._locations[outside].line))
        return uses


def innermost_user_frame(frames: Iterable[_Frame]) -> _Frame | None:
    """Returns the innermost frame outside libraries.

    Falls back to the innermost frame outside JAX and einshard, then to the innermost frame.
    `frames` are tuples that begin with a file, innermost first.
    """
    innermost = in_library = None
    for frame in frames:
        innermost = innermost or frame
        if is_user_file(frame[0]):
            return frame
        if not (frame[0].startswith(_PACKAGE) or _JAX_FILE.search(frame[0])):
            in_library = in_library or frame
    return in_library or innermost


def is_user_file(file: str) -> bool:
    is_library = file.startswith(_PACKAGE) or _JAX_FILE.search(file) or _LIBRARY_FILE.search(file)
    return bool(file) and not is_library


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def op_name(metadata: str) -> str:
    """Returns the JAX operation of an instruction, unescaped, or ''."""
    match = _OP_NAME.search(metadata)
    escaped = match[1].encode() if match else b''
    return re.sub(rb'\\([0-7]{3}|.)', _unescaped, escaped).decode(errors='replace')


def operations(op_name: str) -> list[str]:
    """Returns the last part of an `op_name`, or of each of those that XLA combined.

    'jit(f)/jvp()/tanh' has one operation. '(jit(f)/mul:jit(f)/(dot_general:reduce_sum))' has three,
    which may repeat in XLA's text, but not here.
    """
    return list(dict.fromkeys(last for _, last in _combined(op_name)))


def full_names(op_name: str) -> list[str]:
    """Returns the JAX operations of an `op_name`, in which XLA may have combined several.

    >>> from einshard._program.hlo.sources import full_names
    >>> full_names('(jit(f)/mul:jit(f)/(dot_general:reduce_sum))')
    ['jit(f)/mul', 'jit(f)/dot_general', 'jit(f)/reduce_sum']
    """
    return list(dict.fromkeys(before + last for before, last in _combined(op_name) if last))


def _combined(op_name: str) -> Iterator[tuple[str, str]]:
    """Yields the names in an `op_name`, each as what comes before its last part, and that part."""
    pending = [('', op_name)]
    while pending:
        before, text = pending.pop()
        depth, start = 0, 0
        for i, character in enumerate(text):
            depth += (character == '(') - (character == ')')
            if depth == 0 and character == ':':
                pending += [(before, text[i + 1 :]), (before, text[:i])]
                break
            if depth == 0 and character == '/':
                start = i + 1
        else:
            before, last = before + text[:start], text[start:]
            if last.startswith('(') and last.endswith(')'):
                pending.append((before, last[1:-1]))
            else:
                yield before, last


def _unescaped(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8)]) if len(match[1]) == 3 else match[1]


def number_of(name: str, text: str, default: int = 0) -> int:
    """Reads the integer after `name` and '=' in `text`, or returns `default`."""
    match = re.search(rf'\b{name}=(\d+)', text)
    return int(match[1][:19]) if match else default  # longer numbers do not fit into 64 bits
