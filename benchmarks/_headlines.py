"""The headline figures, each against hand-written JAX, and their targets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ._report import Row


class Headline(NamedTuple):
    """A figure with a target, or one that the performance page shows first, or both."""

    benchmark: str
    pattern: str  # of the row's name
    words: str  # what is compared; {0} is the pattern's first group
    of: Literal['ratio', 'figure', 'difference']  # what the target limits
    at_most: float | None  # the target
    shown: bool = False  # in the table above the folds

    def judged(self, row: Row) -> float:
        """The number that must not exceed the bound."""
        if self.of == 'figure':
            return row.figure
        if row.ratio is None or row.other is None:
            raise ValueError(f'{row.name!r} is compared with nothing, but its {self.of} is bounded')
        return row.ratio if self.of == 'ratio' else row.figure - row.other

    def is_met(self, row: Row) -> bool:
        return self.at_most is None or self.judged(row) <= self.at_most


HEADLINES = (
    Headline(
        'programs',
        'transformer, training step: different lines',
        'Program of a training step of a transformer: lines that differ from hand-written sharding',
        'figure',
        0,
    ),
    Headline(
        'tpu',
        '(.*), transformer, training step: different lines',
        'Program of a training step of a transformer for TPU {0}: lines that differ from '
        'hand-written sharding',
        'figure',
        0,
        shown=True,
    ),
    Headline(
        'tpu',
        '(.*), transformer, training step: trace and compile',
        'Trace and compile that step for TPU {0}, against hand-written sharding',
        'ratio',
        None,
        shown=True,
    ),
    Headline(
        'placement',
        'array placed already',
        'Place an array that is already placed, against `jax.device_put`',
        'ratio',
        1 / 15,
        shown=True,
    ),
    Headline(
        'placement',
        '(numpy|jax) array of 1 MiB',
        'Place a {0} array of 1 MiB, against `jax.device_put` with a ready sharding',
        'ratio',
        1.05,
    ),
    Headline(
        'placement',
        '1,000 (numpy|jax) leaves',
        'Place a pytree of 1,000 {0} arrays, against one `jax.device_put` with ready shardings',
        'ratio',
        1.05,
        shown=True,
    ),
    Headline(
        'dispatch',
        'one argument, 1 device',
        'Call a `sharded` function with one array on one device, against `jax.jit` with '
        'hand-written shardings',
        'difference',
        0.5e-6,
        shown=True,
    ),
    Headline(
        'dispatch',
        r'one argument, (\d+ devices)',
        'Call a `sharded` function with one array on {0}, against `jax.jit`',
        'ratio',
        1.03,
    ),
    Headline(
        'dispatch',
        r'200 leaves, a function of the path, (\d+ devices?)',
        'Call a `sharded` function with a pytree of 200 arrays on {0}, against `jax.jit`',
        'ratio',
        1.03,
        shown=True,
    ),
    Headline(
        'dispatch',
        'a method, 1 device',
        'Call a `sharded` method on one device, against the same method under `jax.jit`',
        'ratio',
        1.25,
    ),
    Headline(
        'dispatch',
        '(traces|compilations) of 6 calls: one argument',
        'Number of {0} in 6 calls with several shapes and shardings, against `jax.jit`',
        'ratio',
        1,
    ),
    Headline(
        'expressions',
        'make_sharding, cached',
        'Look up a known expression, against `NamedSharding(mesh, PartitionSpec(..))`',
        'figure',
        1e-6,
    ),
    Headline(
        'expressions',
        'make_sharding, a new expression, (9,216) devices',
        'Parse a new expression for {0} devices, against `NamedSharding(mesh, PartitionSpec(..))`',
        'figure',
        100e-6,
        shown=True,
    ),
    Headline(
        'import',
        'import einshard, after import jax',
        'Import einshard after JAX; "by hand" is the import of JAX',
        'figure',
        70e-3,
        shown=True,
    ),
)


def find_headline(row: Row) -> Headline | None:
    return next((line for line in HEADLINES if _words(line, row)), None)


def headline_rows(rows: Sequence[Row]) -> Iterator[tuple[Headline, str, Row]]:
    """The headlines that were measured, with their words and rows, in the order of HEADLINES."""
    for headline in HEADLINES:
        for row in rows:
            if words := _words(headline, row):
                yield headline, words, row


def _words(headline: Headline, row: Row) -> str | None:
    if row.benchmark != headline.benchmark:
        return None
    match = re.fullmatch(headline.pattern, row.name)
    return match and headline.words.format(*match.groups())
