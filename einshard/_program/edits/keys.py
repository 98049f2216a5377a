"""What an edit changes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from ..jaxpr.spans import Span

# The user's frames, innermost first: an expression, the call of the function that it is in, and so
# on, up to the jitted function. A shorter path is that of all calls.
Path: TypeAlias = tuple[Span, ...]
# For example ('argument', 3), ('value', path).
Key: TypeAlias = tuple[str, Hashable]
