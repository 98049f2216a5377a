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

_SAFETY = 4  # a few perturbed runs may miss the largest change of the result


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A result or the gradient of an argument, compared with the same array on one device.

    Attributes:
        path: 'result/loss', or 'gradient of params/w'.
        array: 'float32[8,16]'.
        difference: the largest difference from the array on one device, or between replicas,
            divided by what `relative_to` names. For integers: the fraction of elements that differ.
        relative_to: 'largest element', the array's largest absolute value; 'largest change' of an
            element, if the array updates an argument; 'elements' for integers.
        tolerance: the largest difference that rounding can explain.
        because: the reason for the tolerance: 'float32, longest sum: 512 terms'; 'integers', whose
            tolerance is 0; or 'rounding of arguments', if that can explain a larger difference.
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
        """Whether the array may consist of rounding errors, as a sum of terms that cancel does."""
        return self.tolerance >= 1


@dataclass(frozen=True, repr=False)
class Comparison(Display):
    """The results of a function on several devices, compared with those on one device.

    Made by `check_same`.

    Attributes:
        name: the name of the function.
        n_devices: the number of devices of the first result.
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

        For some arrays, such as a sum whose terms cancel, rounding can explain any difference. The
        tolerance is then 1 or more, and the text below the table lists them as not compared.
        """
        return all(row.same for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Converts the comparison to dictionaries, lists, strings and numbers, for JSON."""
        rows = [{**as_json(row), 'same': row.same} for row in self.rows]
        return {**as_json(self), 'rows': rows, 'same': self.same}

    def _page(self) -> Page:
        verdict = 'the same on one device' if self.same else 'not the same on one device'
        rows = tuple(
            (
                row.path,
                row.array,
                f'{row.difference:.1e}',
                row.relative_to,
                f'{row.tolerance:.1e}',
                row.because,
            )
            for row in self.rows
        )
        noise = ', '.join(row.path for row in self.rows if row.is_noise and row.same)
        notes = [f'not compared, because of large rounding errors: {noise}'] * bool(noise)
        title = f'{self.name} on {plural(self.n_devices, "device")}: {verdict}'
        return Page(title, (Section('', _COLUMNS, rows, (*self.notes, *notes)),))


_COLUMNS = (
    Column('of', elastic='middle'),
    Column('array', elastic='middle'),
    Column('difference', right=True),
    Column('relative to'),
    Column('tolerance', right=True),
    Column('because'),
)


@dataclass(frozen=True)
class Reference:
    """An array computed on one device.

    Attributes:
        value: the array.
        perturbed: the array, computed from each perturbed copy of the arguments.
        before: the argument that the array is an update of; the number 0 if there is none.
        perturbed_before: `before` in each perturbed copy.
    """

    value: Any
    perturbed: Sequence[Any]
    before: Any
    perturbed_before: Sequence[Any]


def compare(path: str, found: jax.Array, reference: Reference, rounding: Rounding) -> ComparedRow:
    value, *replicas = _copies(found)
    array = f'{found.dtype}{shape_text(found.shape)}'
    expected = _as_wide_numpy(reference.value)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        difference, tolerance, because = _fraction_different(value, expected), 0.0, 'integers'
        relative_to = 'elements'
        rounding_changes = [
            _fraction_different(_as_wide_numpy(x), expected) for x in reference.perturbed
        ]
        between_replicas = [_fraction_different(replica, value) for replica in replicas]
    else:
        # if the argument did not change, differences are relative to its value
        change = _largest(expected - reference.before)
        scale = change or _largest(expected)
        is_update = not isinstance(reference.before, int)
        relative_to = 'largest change' if is_update and change else 'largest element'
        rounding_error = rounding_unit(found.dtype) * _largest(expected)  # of one element
        difference = _distance(value, expected, scale)
        # both arrays are rounded to their dtype
        tolerance = rounding.tolerance + _relative(2 * rounding_error, scale)
        because = str(rounding)
        rounding_changes = [
            _distance(_as_wide_numpy(after) - before, expected - reference.before, scale)
            for after, before in zip(reference.perturbed, reference.perturbed_before, strict=True)
        ]
        between_replicas = [_distance(replica, value, scale) for replica in replicas]
    if _SAFETY * max(rounding_changes, default=0.0) > tolerance:
        tolerance, because = _SAFETY * max(rounding_changes), 'rounding of arguments'
    disagreement = max(between_replicas, default=0.0)
    return ComparedRow(
        path,
        array,
        max(difference, disagreement),
        relative_to,
        tolerance,
        because,
        replicas_differ=disagreement > tolerance,
    )


def _copies(array: jax.Array) -> Iterator[Any]:
    """Yields one full array for each replica, made of its shards; for a partial sum, the sum."""
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
    return float(np.mean(a != b)) if a.size else 0.0
