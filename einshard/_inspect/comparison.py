"""The result of `check_same`: the differences of all results and gradients, as plain data."""

from __future__ import annotations

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

_SAFETY = 4  # the few samples of rounded arguments may all change the result little


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """The comparison of a result, or of the gradient of an argument.

    Attributes:
        path: 'result/loss', or 'gradient of params/w'.
        array: 'float32[8,16]'.
        difference: the largest difference from the array on one device, or between replicas,
            relative to the largest absolute value. If the array is the updated value of an
            argument: relative to the largest change of an element. For integers: the fraction of
            elements that differ.
        tolerance: the largest difference that rounding explains.
        because: the reason for the tolerance: 'float32, sums of 512 terms'; 'integers', for
            which it is 0; or 'rounded arguments', if rounding the arguments changes the array more.
        replicas_differ: whether replicas of a shard differ by more than the tolerance.
    """

    path: str
    array: str
    difference: float
    tolerance: float
    because: str
    replicas_differ: bool = False

    @property
    def same(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def is_noise(self) -> bool:
        """Whether rounding can change the array entirely; a small difference then shows nothing."""
        return self.tolerance >= 1


@dataclass(frozen=True, repr=False)
class Comparison(Display):
    """The results of a function on several devices, compared with those on one device.

    Made by `check_same`.

    Attributes:
        name: the name of the function.
        n_devices: the number of devices of its result.
        rows: one row for each array of the result; and, if gradients were compared, for the
            gradient of each floating-point argument.
        notes: why no gradients were compared; empty if they were.
    """

    name: str
    n_devices: int
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether all differences are within their tolerance.

        Rounding alone can change an array entirely, such as a sum whose terms cancel. Such arrays
        have a tolerance of 1 or more; those within it are listed below the table as not compared.
        """
        return all(row.same for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Converts the comparison to dictionaries, lists, strings and numbers, for JSON."""
        rows = [{**as_json(row), 'same': row.same} for row in self.rows]
        return {**as_json(self), 'rows': rows, 'same': self.same}

    def _page(self) -> Page:
        verdict = 'the same on one device' if self.same else 'not the same on one device'
        rows = tuple(
            (row.path, row.array, f'{row.difference:.1e}', f'{row.tolerance:.1e}', row.because)
            for row in self.rows
        )
        noise = ', '.join(row.path for row in self.rows if row.is_noise and row.same)
        notes = [f'not compared, because rounding changes it entirely: {noise}'] * bool(noise)
        title = f'{self.name} on {plural(self.n_devices, "device")}: {verdict}'
        return Page(title, (Section('', _COLUMNS, rows, (*self.notes, *notes)),))


_COLUMNS = (
    Column('of', elastic='middle'),
    Column('array', elastic='middle'),
    Column('difference', right=True),
    Column('tolerance', right=True),
    Column('because'),
)


@dataclass(frozen=True)
class Reference:
    """An array computed on one device.

    Attributes:
        value: the array.
        rounded: the array for each sample of rounded arguments.
        before: the argument whose updated value the array is; 0 if it is not an update.
        rounded_before: `before` for each of `rounded`.
    """

    value: Any
    rounded: Sequence[Any]
    before: Any
    rounded_before: Sequence[Any]


def compare(path: str, found: jax.Array, reference: Reference, rounding: Rounding) -> ComparedRow:
    """Compares an array with the same array on one device."""
    value, *replicas = _copies(found)
    array = f'{found.dtype}{shape_text(found.shape)}'
    expected = _numbers(reference.value)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        difference, tolerance, because = _fraction_different(value, expected), 0.0, 'integers'
        by_rounding = [_fraction_different(_numbers(x), expected) for x in reference.rounded]
        between_replicas = [_fraction_different(replica, value) for replica in replicas]
    else:
        # an argument that did not change has no change to compare with
        scale = _largest(expected - reference.before) or _largest(expected)
        rounding_error = rounding_unit(found.dtype) * _largest(expected)  # of one element
        difference = _distance(value, expected, scale)
        # both arrays are rounded to their dtype
        tolerance = rounding.tolerance + _relative(2 * rounding_error, scale)
        because = str(rounding)
        by_rounding = [
            _distance(_numbers(after) - before, expected - reference.before, scale)
            for after, before in zip(reference.rounded, reference.rounded_before, strict=True)
        ]
        between_replicas = [_distance(replica, value, scale) for replica in replicas]
    if _SAFETY * max(by_rounding, default=0.0) > tolerance:
        tolerance, because = _SAFETY * max(by_rounding), 'rounded arguments'
    disagreement = max(between_replicas, default=0.0)
    return ComparedRow(
        path,
        array,
        max(difference, disagreement),
        tolerance,
        because,
        replicas_differ=disagreement > tolerance,
    )


def _copies(array: jax.Array) -> Iterator[Any]:
    """Yields one full array for each replica, made of its shards; for a partial sum, the sum."""
    array = key_data(array)
    if isinstance(array.sharding, NamedSharding) and array.sharding.spec.unreduced:
        yield _numbers(gather(array))
        return
    copies: dict[int, Any] = {}
    for shard in array.addressable_shards:
        copy = copies.setdefault(shard.replica_id, np.zeros(array.shape, _wide_dtype(array.dtype)))
        copy[shard.index] = _numbers(shard.data)
    yield from (copies[i] for i in sorted(copies))


def _numbers(array: Any) -> Any:
    """Converts an array to NumPy, in a dtype without further rounding."""
    return np.asarray(array).astype(_wide_dtype(array.dtype))


def key_data(array: Any) -> Any:
    """Returns the data of an array of PRNG keys; other arrays unchanged."""
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
    """Returns the largest difference relative to `scale`; infinity if NaNs or infinities differ."""
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
    """Returns the fraction of elements that differ."""
    return float(np.mean(a != b)) if a.size else 0.0
