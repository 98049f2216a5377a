"""The user's source lines of the operations of a traced function."""

from __future__ import annotations

import re
from typing import Any

from ..._hlo.sources import innermost_user_line

_FRAMES = 100  # innermost frames to look at
_FRAME = re.compile(r'(.*?):(\d+)\b')


def line_of(eqn: Any, innermost: bool = False) -> str:
    """Returns the source line of an equation, such as 'model.py:12'; '' if unknown.

    It equals the source line of the HLO that JAX makes of the equation.

    Args:
        eqn: the equation.
        innermost: whether to return the innermost line of the call stack, which may be in a library
            such as Flax, instead of the user's line. HLO of JAX 0.8 has only the innermost line.
    """
    # imported here because it loads modules that nothing else needs
    from jax.extend.source_info_util import summarize

    stack = summarize(eqn.source_info, _FRAMES).split('\n')
    found = (_FRAME.match(frame.strip()) for frame in reversed(stack))
    if innermost:
        return next((f'{frame[1]}:{frame[2]}' for frame in found if frame), '')
    frames = [(frame[1], frame[2]) for frame in found if frame]
    return innermost_user_line(frames) or ''
