"""Finds optimizer states and results that are replicated although the parameters are sharded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..._text import first_of, format_bytes
from ..fold_layers import fold
from ..report_rows import ArrayRow, Finding
from .facts import Facts


def unsharded_states(facts: Facts) -> Iterator[Finding]:
    """Reports optimizer states that are not sharded while their parameters are.

    Parameters are the arguments that products or lookups read; states those that are only updated.
    """
    if not facts.is_training or facts.trace is None:
        return
    read = {
        value.argument
        for product in facts.trace.products
        for value in (product.left, product.right)
        if not value.is_data
    }
    rows = [facts.argument_rows[i] for i in sorted(n for n in read if n is not None)]
    states = [
        facts.argument_rows[i]
        for i in facts.updated
        if i not in read and not facts.argument_rows[i].sharded
    ]
    sharded = {row.path for row in rows if row.sharded}
    pairs = [pair for pair in _paired(states, rows) if pair[1].path in sharded]
    yield from _folded(
        'unsharded states',
        pairs,
        '{left} are replicated, but their parameters {right} are sharded: {bytes} on each device '
        'instead of {other}',
        'shard them like the parameters, with for_optimizer(params, spec): {placements}',
    )


def _paired(
    rows: Sequence[ArrayRow], others: Sequence[ArrayRow]
) -> Iterator[tuple[ArrayRow, ArrayRow]]:
    """Pairs arrays of the same shape and dtype whose paths end alike; the longest end wins."""
    by_end: dict[object, list[ArrayRow]] = {}
    for other in others:
        by_end.setdefault((other.array, other.path.split('/')[-1]), []).append(other)
    for row in rows:
        alike = [
            (_common_end(row.path, other.path), other)
            for other in by_end.get((row.array, row.path.split('/')[-1]), ())
        ]
        longest = max((n for n, _ in alike), default=0)
        best = [other for n, other in alike if n == longest]
        if len(best) == 1:
            yield row, best[0]


def _common_end(a: str, b: str) -> int:
    """The number of parts that two paths have in common at their ends."""
    pairs = zip(reversed(a.split('/')), reversed(b.split('/')), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def less_sharded_results(facts: Facts) -> Iterator[Finding]:
    """Reports results that replace an argument in the next call, but are replicated."""
    updated = [facts.argument_rows[i] for i in facts.updated]
    pairs = [
        (result, argument)
        for result, argument in _paired(facts.result_rows, updated)
        if argument.sharded and not result.sharded and result.path != 'result'
    ]
    yield from _folded(
        'replicated result',
        pairs,
        '{left} are replicated, but {right}, which they replace in the next call, are sharded: '
        '{bytes} on each device instead of {other}',
        'give them the specs of the arguments, by out= or out_shardings=: {placements}',
    )


def _folded(
    kind: str, pairs: Sequence[tuple[ArrayRow, ArrayRow]], text: str, suggestion: str
) -> Iterator[Finding]:
    """Yields one finding for all pairs of arrays (replicated, sharded)."""
    if not pairs:
        return
    lefts, rights = ([pair[i] for pair in pairs] for i in (0, 1))
    n_bytes = sum(row.bytes for row in lefts)
    placements = dict.fromkeys(f"'{row.placement}'" for row in rights)
    words = {
        'left': _paths(lefts),
        'right': _paths(rights),
        'bytes': format_bytes(n_bytes),
        'other': format_bytes(sum(row.bytes for row in rights)),
        'placements': first_of(list(placements), 3),
    }
    filled = text.format_map(words)
    if len(pairs) == 1:
        for several, one in _ONE:
            filled = filled.replace(several, one)
    yield Finding(kind, filled, None, n_bytes, suggestion.format_map(words))


_ONE = ((' are ', ' is '), ('they replace', 'it replaces'), ('their parameters', 'its parameter'))


def _paths(rows: Sequence[ArrayRow]) -> str:
    paths = list(dict.fromkeys(row.path for row in rows))
    return first_of([path for path, _ in fold(paths, [None] * len(paths), few=1)], 3)
