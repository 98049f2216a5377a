"""Source lines of the instructions of an HLO program. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_HERE = str(Path(__file__).parent.parent)  # the package
_OF_JAX = re.compile(r'[\\/](?:site|dist)-packages[\\/]jax(?:lib)?[\\/]|[\\/]jax[\\/]_src[\\/]')
# for layers of Flax, users want the line of their model that calls the layer
_OF_LIBRARY = re.compile(
    r'[\\/](?:(?:site|dist)-packages|lib[\\/]python3\.\d+)[\\/]|^<frozen ', re.IGNORECASE
)
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})')


class Sources:
    """The tables of files and stack frames at the top of a module.

    JAX 0.8 has no such tables: it writes file and line at every instruction.
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
        # XLA's parent ids are off by one (1 means none), so the first frame seems its own parent.
        # Once XLA fixes that, it has parent 0.
        self._beyond = 1 if self._frames.get(1, (0, 0))[1] == 1 else 0

    def line(self, metadata: str) -> str | None:
        """'model.py:12': the innermost frame outside of libraries, or else outside of JAX."""
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
    """The unescaped op_name, the JAX operation that an instruction comes from, or ''."""
    found = _OP_NAME.search(metadata)
    escaped = found[1].encode() if found else b''
    return re.sub(rb'\\([0-7]{3}|.)', _unescaped, escaped).decode(errors='replace')


def _unescaped(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8)]) if len(found[1]) == 3 else found[1]


def number_of(name: str, text: str) -> int:
    """The number after 'name=', or 0."""
    found = re.search(rf'\b{name}=(\d+)', text)
    return int(found[1]) if found else 0
