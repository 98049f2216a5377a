"""The headline figures of the performance page, each against hand-written JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._report import Row


class Headline(NamedTuple):
    """A figure that the page shows above the table of all."""

    benchmark: str
    pattern: str  # of the row's name
    words: str  # what is compared; {0} is the pattern's first group

    def text(self, row: Row) -> str | None:
        """What a row compares; None if it is not of this headline."""
        match = re.fullmatch(self.pattern, row.name)
        if match is None or row.benchmark != self.benchmark:
            return None
        return self.words.format(*match.groups())


HEADLINES = (
    Headline(
        'tpu',
        '(.*), transformer, training step: different lines',
        'Program of a training step of a transformer for TPU {0}: lines that differ from '
        'hand-written sharding',
    ),
    Headline(
        'tpu',
        '(.*), transformer, training step: trace and compile',
        'Trace and compile that step for TPU {0}, against hand-written sharding',
    ),
    Headline(
        'placement',
        'array placed already',
        'Place an array that is already placed, against `jax.device_put`',
    ),
    Headline(
        'placement',
        '1,000 (numpy|jax) leaves',
        'Place a pytree of 1,000 {0} arrays, against one `jax.device_put` with ready shardings',
    ),
    Headline(
        'dispatch',
        'one argument, 1 device',
        'Call a `sharded` function with one array on one device, against `jax.jit` with '
        'hand-written shardings',
    ),
    Headline(
        'dispatch',
        r'200 leaves, a function of the path, (\d+ devices?)',
        'Call a `sharded` function with a pytree of 200 arrays on {0}, against `jax.jit`',
    ),
    Headline(
        'expressions',
        'make_sharding, a new expression, (9,216) devices',
        'Parse a new expression for {0} devices, against `NamedSharding(mesh, PartitionSpec(..))`',
    ),
    Headline(
        'import',
        'import einshard, after import jax',
        'Import einshard after JAX; "by hand" is the import of JAX',
    ),
)


def headline_rows(rows: Sequence[Row]) -> Iterator[tuple[Headline, str, Row]]:
    """The headlines that were measured, with what they compare and their rows, in this order."""
    for headline in HEADLINES:
        for row in rows:
            if text := headline.text(row):
                yield headline, text, row
