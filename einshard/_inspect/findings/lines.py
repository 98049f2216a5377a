"""The user's source lines of the operations of a traced function."""

from __future__ import annotations

import re
from typing import Any

from ..._hlo.sources import users_line

_FRAMES = 100  # innermost frames to look at
_FRAME = re.compile(r'(.*?):(\d+)\b')


def line_of(eqn: Any) -> str:
    """Returns the line of an equation, such as 'model.py:12', as HLO has it; '' if unknown."""
    # imported here because it loads modules that nothing else needs
    from jax.extend.source_info_util import summarize

    stack = summarize(eqn.source_info, _FRAMES).split('\n')
    found = (_FRAME.match(frame.strip()) for frame in reversed(stack))
    frames = [(frame[1], frame[2]) for frame in found if frame]
    return users_line(frames) or ''
