"""The user's source lines of collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..._errors import plural
from ..._program.hlo.collective import Collective
from ..._program.jaxpr.spans import Span
from ..._text import first_of, short_source


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
