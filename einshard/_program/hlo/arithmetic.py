"""Maps the opcodes of integer operations in HLO to numpy functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def _divide(a: Any, b: Any) -> Any:
    """Divides and rounds toward zero, as HLO does; numpy rounds down."""
    quotient = np.floor_divide(np.abs(a), np.abs(b))
    return np.where(np.less(a, 0) == np.less(b, 0), quotient, -quotient)


ARITHMETIC: Mapping[str, Any] = {
    'add': np.add,
    'subtract': np.subtract,
    'multiply': np.multiply,
    'divide': _divide,
    'remainder': np.fmod,
    'minimum': np.minimum,
    'maximum': np.maximum,
    'and': np.bitwise_and,
    'shift-left': np.left_shift,
    'shift-right-logical': np.right_shift,  # an arithmetic shift, but indices are never negative
}
