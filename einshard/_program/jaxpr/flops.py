"""The flops of the contractions of a traced program."""

from __future__ import annotations

from math import prod
from typing import Any


def eqn_flops(eqn: Any) -> int:
    """Counts the flops of one execution of a dot, a ragged dot or a convolution; 0 for others.

    A ragged dot or its gradient is a dot that has one matrix for each group of rows.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in ('dot_general', 'ragged_dot_general', 'conv_general_dilated'):
        return 0
    left, right = (v.aval.shape for v in eqn.invars[:2])
    out, numbers = eqn.outvars[0].aval.shape, params.get('dimension_numbers')
    if name == 'conv_general_dilated':
        # an input feature of the kernel, and its window, for each element of the result
        _, *features_and_window = numbers.rhs_spec
        return 2 * prod(out) * prod(right[d] for d in features_and_window)
    groups = ()
    if name == 'ragged_dot_general':
        ragged = params['ragged_dot_dimension_numbers']
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (_, contracted), (_, batch) = numbers
    free = (n for d, n in enumerate(right) if d not in (*contracted, *batch))
    return 2 * prod(left) * prod(free) // max(prod(right[d] for d in groups), 1)
