"""Model: the arguments of a function, with the names of their axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._trees.axis_names import MetadataNames

# the names of one array axis: mostly one, as in ('embed',); none for an axis that is not sharded
AxisNames: TypeAlias = tuple[str, ...]
ArrayNames: TypeAlias = tuple[AxisNames, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """An array (leaf) in the arguments of a function.

    Attributes:
        names: the names of each axis. An axis without names has `()`, and is never sharded.
        is_state: whether the array is a weight or other state, not data. This is a guess. Donated
            arrays are state. So are the arrays of a pytree argument if their first axis names
            differ (in data, all arrays start with the batch). If nothing is donated and there are
            several results, arrays with the shape and dtype of a result are state, too.
        donated: whether the argument is donated, so that a result can reuse its memory.
    """

    shape: tuple[int, ...]
    dtype: str
    names: ArrayNames
    is_state: bool
    donated: bool
    bytes: int


@dataclass(frozen=True)
class Model:
    """The arguments of a function, and the names of its axes.

    Attributes:
        axis_sizes: the axis names in order of appearance, each with the distinct sizes of its axes
            in ascending order.
        array_names: the axis names of each array that is an argument or has a constraint. Each
            combination of names occurs once.
        metadata_names: for each leaf of the arguments of the call, the axis names in its metadata
            that shard it, or None.
        unnamed_data: the arguments without axis names that carry data, as text.
        is_named_in_code: whether expressions have names, and not only metadata of arguments.
        asked: see `asked_texts`.
    """

    name: str
    axis_sizes: Mapping[str, Sequence[int]]
    array_names: tuple[tuple[str, ...], ...]
    arrays: tuple[Array, ...]
    metadata_names: tuple[MetadataNames | None, ...] = ()
    unnamed_data: tuple[str, ...] = ()
    is_named_in_code: bool = False
    asked: tuple[str, ...] = ()

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of the largest axis with each name, or 0 if no axis has it."""
        return {name: max(sizes, default=0) for name, sizes in self.axis_sizes.items()}

    @functools.cached_property
    def divisors(self) -> dict[str, int]:
        """The greatest common divisor of the sizes, which the number of shards must divide."""
        return {name: math.gcd(*sizes) for name, sizes in self.axis_sizes.items()}

    def axis_text(self, name: str) -> str:
        """Formats an axis name with its sizes: "'a' (size 6)" or "'a' (sizes 9 and 15)"."""
        sizes = self.axis_sizes[name]
        if len(sizes) < 2:
            return f"'{name}' (size {sizes[0] if sizes else 'unknown'})"
        return f"'{name}' (sizes {', '.join(map(str, sizes[:-1]))} and {sizes[-1]})"
