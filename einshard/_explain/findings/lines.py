"""The user's source lines of the operations of a traced function."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..._errors import plural
from ..._program.hlo.collective import Collective
from ..._program.hlo.sources import innermost_user_frame
from ..._program.jaxpr.spans import Span
from ..._text import first_of, short_source

_MAX_FRAMES = 100  # of the call stack, from the innermost
_FRAME = re.compile(r'(.*?):(\d+)(?::(\d+))?\b')  # file, line, column


class Frame(NamedTuple):
    file: str
    line: str
    column: str | None


def stack_of(eqn: Any) -> tuple[Frame, ...]:
    """Returns the call stack of an equation, innermost frame first. Empty if unknown."""
    # imported here because it loads modules that nothing else needs
    from jax.extend.source_info_util import summarize

    stack = summarize(eqn.source_info, _MAX_FRAMES).split('\n')
    matches = (_FRAME.match(frame.strip()) for frame in reversed(stack))
    return tuple(Frame(match[1], match[2], match[3]) for match in matches if match)


def user_line(stack: Sequence[Frame]) -> str:
    """Returns the innermost line outside libraries, such as 'model.py:12', or '' if unknown."""
    frame = innermost_user_frame(stack)
    return f'{frame.file}:{frame.line}' if frame else ''


def line_of(eqn: Any) -> str:
    """Returns the source line of an equation, as in its HLO: 'model.py:12', or '' if unknown."""
    return user_line(stack_of(eqn))


def is_in_call(collective: Collective, frames: Sequence[Span]) -> bool:
    """Whether a collective is in the same call of a function as an operation on its line.

    A line of a helper has the collectives of all callers. `frames` are those of the operation.
    """
    calls = {span.source for span in frames[1:]}
    return collective.called_at is None or not calls or collective.called_at in calls


def lines_text(rows: Iterable[Collective]) -> str:
    """Returns for example 'model.py:12', or '2 lines, model.py:12, model.py:15'."""
    lines = list(dict.fromkeys(short_source(row.source) for row in rows if row.source))
    if len(lines) > 1:
        return f'{plural(len(lines), "line")}, {first_of(lines, 3)}'
    return lines[0] if lines else 'unknown lines'
