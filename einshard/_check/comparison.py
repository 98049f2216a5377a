"""The result of `check_same`: the differences of all results and gradients, as plain data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._arrays.gather import gather
from .._display import Display, as_json
from .._errors import plural
from .._page import Column, Page, Section
from .._text import shape_text
from .tolerance import Rounding, rounding_unit

_SAFETY = 4  # a few perturbed runs may miss the largest change of the result


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A result or the gradient of an argument, compared with the same array on one device.

    Attributes:
        path: such as 'result/loss' or 'gradient of params/w'.
        array: the dtype and shape, such as 'float32[8,16]'.
        difference: the largest absolute difference from the array on one device, or between
            replicas, divided as `relative_to` says. For integers, the fraction of elements that
            differ.
        relative_to: what `difference` is divided by. 'largest element' is the largest absolute
            value in the array. If the array updates an argument, 'largest change' is the largest
            change of that argument. 'elements' is the number of elements of an integer array.
        tolerance: the largest difference that rounding can explain.
        because: the reason for the tolerance: the rounding of a dtype, as in 'float32, longest sum:
            512 terms'; 'integers'; or 'rounding of arguments', if the tolerance comes from runs
            with perturbed arguments.
        replicas_differ: whether replicas of a shard differ by more than the tolerance.
    """

    path: str
    array: str
    difference: float
    relative_to: str
    tolerance: float
    because: str
    replicas_differ: bool = False

    @property
    def same(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def is_noise(self) -> bool:
        """Whether rounding can explain a difference of any size, as in a sum whose terms cancel."""
        return self.tolerance >= 1


@dataclass(frozen=True, repr=False)
class Comparison(Display):
    """A comparison of results on several devices with those on one, made by `check_same`.

    Attributes:
        name: the name of the function.
        n_devices: the number of devices of the first result.
        rows: one row for each array of the result, followed by one for the gradient of each
            floating-point argument, if gradients were compared.
        notes: the reason why gradients were not compared. Empty if they were.
    """

    name: str
    n_devices: int
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether all differences are within their tolerance.

        For some arrays, such as a sum whose terms cancel, rounding can explain any difference.
        Their tolerance is 1 or more, and a note below the table lists them as not compared.
        """
        return all(row.same for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Converts the comparison to dictionaries, lists, strings and numbers, for JSON."""
        rows = [{**as_json(row), 'same': row.same} for row in self.rows]
        return {'schema': 1, **as_json(self), 'rows': rows, 'same': self.same}

    def _page(self) -> Page:
        verdict = 'same results as' if self.same else 'different results than'
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            difference, tolerance = f'{row.difference:.1e}', f'{row.tolerance:.1e}'
            of = row.path, row.array
            rows.append((*of, difference, row.relative_to, tolerance, row.because))
        noise = ', '.join(row.path for row in self.rows if row.is_noise and row.same)
        notes = [f'not compared, because of large rounding errors: {noise}'] * bool(noise)
        title = f'{self.name} on {plural(self.n_devices, "device")}: {verdict} on one device'
        return Page(title, (Section('', _COLUMNS, tuple(rows), (*self.notes, *notes)),))


_COLUMNS = (
    Column('of', shorten='middle'),
    Column('array', shorten='middle'),
    Column('difference', right=True),
    Column('relative to'),
    Column('tolerance', right=True),
    Column('because'),
)


def compare(
    path: str, found: jax.Array, computed: Sequence[Any], before: Sequence[Any], rounding: Rounding
) -> ComparedRow:
    """Compares an array with the same array on one device.

    Args:
        computed: that array, and then as computed from each perturbed copy of the arguments.
        before: in each of these, the argument that the array updates, or 0 if it updates none.
    """
    value, *replicas = _copies(found)
    array = f'{found.dtype}{shape_text(found.shape)}'
    expected = _as_wide_numpy(computed[0])
    change, *perturbed = [
        _as_wide_numpy(after) - old for after, old in zip(computed, before, strict=True)
    ]
    if jnp.issubdtype(found.dtype, jnp.inexact):
        # if the array equals `before`, differences are relative to its largest element
        scale = _largest(change) or _largest(expected)
        is_update = not isinstance(before[0], int) and _largest(change)
        relative_to = 'largest change' if is_update else 'largest element'
        # each of the two arrays is rounded to its dtype
        rounding_error = 2 * rounding_unit(found.dtype) * _largest(expected)
        tolerance = rounding.tolerance + _relative(rounding_error, scale)
        because = str(rounding)
        distance = functools.partial(_distance, scale=scale)
    else:
        relative_to, tolerance, because = 'elements', 0.0, 'integers'
        distance = _fraction_different
    rounding_change = max((distance(other, change) for other in perturbed), default=0.0)
    if _SAFETY * rounding_change > tolerance:
        tolerance, because = _SAFETY * rounding_change, 'rounding of arguments'
    disagreement = max((distance(replica, value) for replica in replicas), default=0.0)
    difference = max(distance(value, expected), disagreement)
    differ = disagreement > tolerance
    return ComparedRow(path, array, difference, relative_to, tolerance, because, differ)


def _copies(array: jax.Array) -> Iterator[Any]:
    """Yields each replica as a full array. Yields an unreduced array once, as its sum."""
    array = key_data(array)
    if isinstance(array.sharding, NamedSharding) and array.sharding.spec.unreduced:
        yield _as_wide_numpy(gather(array))
        return
    copies: dict[int, Any] = {}
    for shard in array.addressable_shards:
        copy = copies.setdefault(shard.replica_id, np.zeros(array.shape, _wide_dtype(array.dtype)))
        copy[shard.index] = _as_wide_numpy(shard.data)
    yield from (copies[i] for i in sorted(copies))


def _as_wide_numpy(array: Any) -> Any:
    return np.asarray(array).astype(_wide_dtype(array.dtype))


def key_data(array: Any) -> Any:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _wide_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.complex128
    return np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype


def _largest(array: Any) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _distance(a: Any, b: Any, scale: float) -> float:
    """Returns the largest difference relative to `scale`, or inf if NaNs or infinities differ."""
    with np.errstate(invalid='ignore'):
        differences = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    differences = np.where(same, 0.0, differences)
    if not np.isfinite(differences).all():
        return math.inf
    return _relative(float(differences.max(initial=0.0)), scale)


def _relative(difference: float, scale: float) -> float:
    if scale:
        return difference / scale
    return math.inf if difference else 0.0


def _fraction_different(a: Any, b: Any) -> float:
    return float(np.mean(a != b)) if a.size else 0.0
