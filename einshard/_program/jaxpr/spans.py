"""The source expressions of the equations of a traced program."""

from __future__ import annotations

from types import CodeType
from typing import Any, NamedTuple

from ..hlo.sources import is_user_file


class Span(NamedTuple):
    """An expression in the user's source code, as the attributes of an `ast` node.

    Lines count from 1, columns from 0 in bytes of UTF-8.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    @property
    def source(self) -> str:
        """For example 'model.py:12'."""
        return f'{self.file}:{self.line}'

    def contains(self, line: int, column: int) -> bool:
        start, end = (self.line, self.column), (self.end_line, self.end_column)
        return start <= (line, column) < end


class Frames:
    """Reads the frames of one program: those of equations, or of functions that run."""

    def __init__(self) -> None:
        # a code object as a key would be hashed by all its constants
        self._spans: dict[int, tuple[CodeType, list[Span | None]]] = {}  # by the id of the code

    def of(self, eqn: Any) -> tuple[Span, ...]:
        """Returns the spans of the user's frames in the traceback of an equation, innermost first.

        The code positions of the frames give the exact expression, where `summarize` of JAX gives a
        line. Libraries are left out. The traceback of an equation in an inner jaxpr begins at the
        function that was traced.
        """
        traceback = eqn.source_info.traceback
        if traceback is None:
            return ()
        spans = map(self.span, *traceback.raw_frames())
        return tuple(span for span in spans if span is not None)

    def span(self, code: CodeType, instruction: int) -> Span | None:
        spans, at = self.spans(code), instruction // 2  # each instruction has two bytes
        return spans[at] if at < len(spans) else None

    def spans(self, code: CodeType) -> list[Span | None]:
        """Returns the expression of each instruction, or None if unknown; [] of libraries."""
        if id(code) not in self._spans:
            positions = code.co_positions() if is_user_file(code.co_filename) else ()
            self._spans[id(code)] = (
                code,
                [
                    None
                    if None in (line, end_line, column, end_column)
                    else Span(code.co_filename, line, column, end_line, end_column)  # type: ignore[reportArgumentType]
                    for line, end_line, column, end_column in positions
                ],
            )
        return self._spans[id(code)][1]


def with_callers(own: tuple[Span, ...], callers: tuple[Span, ...]) -> tuple[Span, ...]:
    """Returns the frames of an equation in an inner jaxpr, with those of its callers.

    JAX traces a function such as `jax.nn.silu` once and uses its jaxpr again, so that the callers
    in `own` may be those of its first use. `own` is kept up to the first frame of `callers`.
    """
    if callers and callers[0] in own:
        own = own[: own.index(callers[0])]
    return (*own, *callers)
