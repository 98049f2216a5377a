"""The numpy functions of HLO's integer arithmetic, by opcode. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

ARITHMETIC: Mapping[str, Any] = {
    'add': np.add,
    'subtract': np.subtract,
    'multiply': np.multiply,
    'divide': np.floor_divide,
    'remainder': np.remainder,
    'minimum': np.minimum,
    'maximum': np.maximum,
    'and': np.bitwise_and,
    'shift-left': np.left_shift,
    'shift-right-logical': np.right_shift,
}
