"""Source files that are edited in place: everything else keeps its bytes."""

from __future__ import annotations

import ast
import difflib
import functools
import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..._program.jaxpr.spans import Span


class Piece(NamedTuple):
    """Replaces the bytes from `start` to `end` of a file by `text`.

    Attributes:
        other: of the parts that `around` puts at both ends of an expression, where the other is.
        is_once: whether it is code that runs once, when the module is imported.
        is_import: whether it adds an import.
    """

    start: int
    end: int
    text: str
    other: int | None = None
    is_once: bool = False
    is_import: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """At one place, what closes an expression is before what opens one, inner parts inside."""
        if self.other is None:
            return self.start, 2, self.end
        return self.start, int(self.other > self.start), -self.other


def around(start: int, end: int, before: str, after: str) -> tuple[Piece, Piece]:
    return Piece(start, start, before, end), Piece(end, end, after, start)


class Source:
    """A file of Python. Offsets count bytes of its text in UTF-8, as the columns of `ast` do."""

    def __init__(self, path: Path):
        self.path = path
        data = path.read_bytes()
        self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        self.text = data.decode(self.encoding)
        self.utf8 = self.text.encode()
        # the line ends of Python: `splitlines` would also split at form feeds
        ends = [*re.finditer(rb'\r\n|\r|\n', self.utf8)]
        self.starts = [0, *(end.end() for end in ends)]
        self.newline = ends[0][0].decode() if ends else '\n'
        self.tree = ast.parse(self.text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self._nodes: dict[tuple[int | None, ...], ast.AST] = {}
        for node in ast.walk(self.tree):  # from the outside, so that the innermost node stays
            self.parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
            if isinstance(node, ast.expr | ast.stmt):
                end = node.end_lineno, node.end_col_offset
                self._nodes[node.lineno, node.col_offset, *end] = node

    def node(self, span: Span) -> ast.AST | None:
        """Returns the expression or statement at a span."""
        if (found := self._nodes.get(span[1:])) is not None:
            return found
        # the span of a call of a method on a line of its own begins at the name of the method
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func
                assert name.end_col_offset is not None
                begin = (name.end_lineno, name.end_col_offset - len(name.attr.encode()))
                if (*begin, node.end_lineno, node.end_col_offset) == span[1:]:
                    return node
        return None

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields what an expression or statement is in, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[reportAttributeAccessIssue]

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[reportAttributeAccessIssue]

    def segment(self, node: ast.AST) -> str:
        return self.utf8[self.start(node) : self.end(node)].decode()

    def replace(self, node: ast.AST, text: str) -> Piece:
        return Piece(self.start(node), self.end(node), text)

    def imported(self, statement: str) -> Piece:
        """Adds an import after the others at the top of the module."""
        last, body = 0, self.tree.body
        for i, node in enumerate(body):
            is_docstring = (
                i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            )
            if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring:
                last = node.end_lineno or 0
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                break
        for node in body:  # after a semicolon, a statement may end in a later line
            if node.lineno <= last < (node.end_lineno or 0):
                last = node.end_lineno or 0
        if last < len(self.starts):
            at, text = self.starts[last], statement + self.newline
        else:
            at, text = len(self.utf8), self.newline + statement
        return Piece(at, at, text, is_once=True, is_import=True)

    def edited(self, pieces: Iterable[Piece]) -> str | None:
        """Returns the text with other pieces, or None if two of them replace the same bytes."""
        new, at = list[bytes](), 0
        for piece in sorted({*pieces}, key=lambda one: one.order):
            if piece.start < at:
                return None
            new += [self.utf8[at : piece.start], piece.text.encode()]
            at = piece.end
        return b''.join([*new, self.utf8[at:]]).decode()

    def diff(self, new: str, name: str) -> str:
        """Returns a unified diff as git writes it. Bytes that are not UTF-8 are surrogates."""
        marks = [f'{side}/{name}' for side in 'ab']
        if re.search(r'[\x00-\x1f"\\]', name):
            escaped = [re.sub(r'["\\]', r'\\\g<0>', m).replace('\t', '\\t') for m in marks]
            marks = [f'"{m}"' for m in escaped]
        elif ' ' in name:
            marks = [m + '\t' for m in marks]
        before, after = self._lines(self.text), self._lines(new)
        body = [f'--- {marks[0]}\n', f'+++ {marks[1]}\n']
        for line in [*difflib.unified_diff(before, after, lineterm='')][2:]:
            is_end = not line.endswith('\n') and not line.startswith('@@')
            body += [line.removesuffix('\n'), '\n', '\\ No newline at end of file\n' * is_end]
        return ''.join(body)

    def _lines(self, text: str) -> Sequence[str]:
        """The lines, as the tools that apply patches see them: only '\\n' ends one."""
        data = text.encode(self.encoding).decode('utf-8', 'surrogateescape')
        return re.findall(r'[^\n]*\n|[^\n]+$', data)


@functools.lru_cache(maxsize=64)
def _read(path: Path, stamp: tuple[int, int]) -> Source | None:
    try:
        return Source(path)
    except (OSError, RecursionError, SyntaxError, ValueError):
        return None  # a sum of 3,000 terms is too deep for `ast`


def read_source(file: str) -> Source | None:
    """Returns a file, behind symbolic links, or None if there is none or it is not Python."""
    try:
        path = Path(file).resolve(strict=True)
        status = path.stat()
    except (OSError, ValueError):
        return None
    return _read(path, (status.st_mtime_ns, status.st_size))


def relative_to(paths: Sequence[Path]) -> Path:
    """Returns the folder in which a patch of files is applied: the current one, if it can be."""
    current = Path.cwd()
    if all(path.is_relative_to(current) for path in paths):
        return current
    return Path(os.path.commonpath([path.parent for path in paths]))
