"""The user's source lines of the operations of a traced function."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..._errors import plural
from ..._hlo.sources import innermost_user_line
from ..._text import first_of, short_source
from ..report_rows import CollectiveRow

_MAX_FRAMES = 100  # of the call stack, from the innermost
_FRAME = re.compile(r'(.*?):(\d+)\b')


def line_of(eqn: Any, innermost: bool = False) -> str:
    """Returns the source line of an equation, as in its HLO: 'model.py:12'. Returns '' if unknown.

    HLO of JAX 0.8 has only the innermost line of the call stack, even if it is in a library such as
    Flax. If `innermost`, returns this line instead of the user's.
    """
    # imported here because it loads modules that nothing else needs
    from jax.extend.source_info_util import summarize

    stack = summarize(eqn.source_info, _MAX_FRAMES).split('\n')
    matches = (_FRAME.match(frame.strip()) for frame in reversed(stack))
    frames = [(match[1], match[2]) for match in matches if match]
    if innermost:
        return ':'.join(frames[0]) if frames else ''
    return innermost_user_line(frames) or ''


def lines_text(rows: Iterable[CollectiveRow]) -> str:
    """Returns for example 'model.py:12', or '2 lines, model.py:12, model.py:15'."""
    lines = list(dict.fromkeys(short_source(row.source) for row in rows if row.source))
    if len(lines) > 1:
        return f'{plural(len(lines), "line")}, {first_of(lines, 3)}'
    return lines[0] if lines else 'unknown lines'
