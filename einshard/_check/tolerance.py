"""Computes how much results may differ because of rounding.

If two programs add the same n numbers in different orders, their results differ by about sqrt(n)
rounding errors. In dtypes narrower than float32, a device accumulates a sum in float32 and rounds
only the result. For these dtypes, n is the number of operations plus the number of devices in each
all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .._program.jaxpr.graph import inner_jaxprs

_SAFETY = 4  # the largest of many differences exceeds the typical one
# by platform: the dtype to which matmuls round float32 operands by default, and its rounding unit
_DOT_DTYPES = {'tpu': ('bfloat16', 2.0**-8), 'gpu': ('tfloat32', 2.0**-11)}


@dataclass(frozen=True)
class Rounding:
    """The rounding errors of an operation in a program.

    Attributes:
        dtype: the dtype to which numbers are rounded, such as 'bfloat16'.
        unit: the largest relative error of one rounding.
        terms: how many rounding errors add up. In float32, the number of terms that the operation
            sums, times the loop iterations. In a narrow dtype, the loop iterations plus the number
            of devices.
        is_narrow: whether the dtype is narrower than float32.
    """

    dtype: str
    unit: float
    terms: int
    is_narrow: bool = False

    @property
    def tolerance(self) -> float:
        """The largest relative difference that rounding can explain."""
        return _SAFETY * self.unit * math.sqrt(self.terms)

    def __str__(self) -> str:
        if self.terms == 1:
            return self.dtype
        n = f'{self.terms:,}'
        terms = f'{n} roundings' if self.is_narrow else f'longest sum: {n} terms'
        return f'{self.dtype}, {terms}'


def largest_rounding(jaxpr: Any, n_devices: int, platform: str) -> Rounding:
    """Finds the operation of a traced function whose rounding gives the largest tolerance."""
    found = [Rounding('float32', rounding_unit(jnp.float32), 1)]
    for eqn, runs in _equations(jaxpr, 1):
        for variable in eqn.outvars:
            dtype = getattr(variable.aval, 'dtype', None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
                continue
            unit, name = rounding_unit(dtype), str(dtype)
            is_narrow = unit > rounding_unit(jnp.float32)
            terms = runs + n_devices if is_narrow else runs * _n_terms(eqn)
            found.append(Rounding(name, unit, terms, is_narrow))
            is_dot = eqn.primitive.name in ('dot_general', 'conv_general_dilated')
            may_round = is_dot and 'HIGH' not in str(eqn.params.get('precision')).upper()
            if name == 'float32' and platform in _DOT_DTYPES and may_round:
                found.append(Rounding(*_DOT_DTYPES[platform], runs + n_devices, is_narrow=True))
    return max(found, key=lambda rounding: rounding.tolerance)


def rounding_unit(dtype: Any) -> float:
    """Returns the largest relative error of rounding a number to a dtype, or 0 for integers."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps) / 2


def _equations(jaxpr: Any, runs: int) -> Iterator[tuple[Any, int]]:
    """Yields all equations, including nested ones, and how often each runs.

    `runs` is how often the jaxpr runs.
    """
    for eqn in jaxpr.eqns:
        yield eqn, runs
        # the trip count of a while loop is unknown, and counts as 1
        trip_count = eqn.params['length'] if eqn.primitive.name == 'scan' else 1
        for inner in inner_jaxprs(eqn.params.values()):
            yield from _equations(inner, runs * trip_count)


def _n_terms(eqn: Any) -> int:
    """Counts the terms that are added or multiplied for each element of the result."""
    name, operands = eqn.primitive.name, [variable.aval for variable in eqn.invars]
    if name == 'dot_general':
        (contracted, _), _ = eqn.params['dimension_numbers']
        return math.prod(operands[0].shape[axis] for axis in contracted)
    if name == 'conv_general_dilated':
        kernel, axis = operands[1].shape, eqn.params['dimension_numbers'].rhs_spec[0]
        return math.prod(kernel) // max(1, kernel[axis])  # without the output channels
    if name in ('reduce_sum', 'reduce_prod'):
        return math.prod(operands[0].shape[axis] for axis in eqn.params['axes'])
    if name in ('cumsum', 'cumprod', 'cumlogsumexp'):
        return operands[0].shape[eqn.params['axis']]
    if name == 'scatter-add':
        return math.prod(operands[1].shape[:-1])
    return 1
