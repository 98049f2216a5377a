"""Finds optimizer states and results that are replicated although the parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..._text import first_of, format_bytes
from ..._trees.paths import common_suffix_length
from ..fold_layers import fold_paths
from ..report_rows import ArrayRow, Finding
from .facts import Facts


def unsharded_states(facts: Facts) -> Iterator[Finding]:
    """Reports replicated optimizer states of sharded parameters.

    Parameters are the arguments that matmuls or lookups read; states are the other arguments that a
    train step updates.
    """
    if not facts.is_training or facts.trace is None:
        return
    read = {
        value.argument
        for product in facts.trace.products
        for value in (product.left, product.right)
        if not value.is_data
    }
    parameters = [facts.argument_rows[i] for i in sorted(n for n in read if n is not None)]
    states = [
        facts.argument_rows[i]
        for i in facts.weights_and_states
        if i not in read and not facts.argument_rows[i].sharded
    ]
    pairs = [(state, row) for state, row in _paired(states, parameters) if row.sharded]
    yield from _folded(
        'unsharded states',
        pairs,
        '{replicated} are replicated, but their parameters {sharded} are sharded: {bytes} on each '
        'device instead of {bytes_if_sharded}',
        'shard them like the parameters, with for_optimizer(params, spec): {placements}',
    )


def _paired(
    rows: Sequence[ArrayRow], others: Sequence[ArrayRow]
) -> Iterator[tuple[ArrayRow, ArrayRow]]:
    """Pairs each row with one of `others` that has the same shape, dtype and last key of the path.

    If several match, chooses the one whose path has the longest common suffix. Omits rows without
    a match, and rows with a tie.
    """
    by_last_key: dict[object, list[ArrayRow]] = {}
    for other in others:
        by_last_key.setdefault((other.array, other.path.split('/')[-1]), []).append(other)
    for row in rows:
        candidates = [
            (common_suffix_length(row.path, other.path), other)
            for other in by_last_key.get((row.array, row.path.split('/')[-1]), ())
        ]
        longest = max((length for length, _ in candidates), default=0)
        best = [other for length, other in candidates if length == longest]
        if len(best) == 1:
            yield row, best[0]


def replicated_results(facts: Facts) -> Iterator[Finding]:
    """Reports replicated results that replace a sharded argument in the next call."""
    candidates = [facts.argument_rows[i] for i in facts.weights_and_states]
    pairs = [
        (result, argument)
        for result, argument in _paired(facts.result_rows, candidates)
        # the path of a single result is only 'result': it has no key to match
        if argument.sharded and not result.sharded and result.path != 'result'
    ]
    yield from _folded(
        'replicated result',
        pairs,
        '{replicated} are replicated, but {sharded}, which they replace in the next call, are '
        'sharded: {bytes} on each device instead of {bytes_if_sharded}',
        'give them the specs of the arguments, with out= or out_shardings=: {placements}',
    )


_SINGULARS = {
    ' are ': ' is ',
    'they replace': 'it replaces',
    'their parameters': 'its parameter',
    'them like the parameters': 'it like the parameter',
    'them the specs of the arguments': 'it the spec of the argument',
}


def _folded(
    kind: str, pairs: Sequence[tuple[ArrayRow, ArrayRow]], text: str, suggestion: str
) -> Iterator[Finding]:
    """Yields one finding for all (replicated, sharded) pairs."""
    if not pairs:
        return
    replicated, sharded = ([pair[i] for pair in pairs] for i in (0, 1))
    n_bytes = sum(row.bytes for row in replicated)
    placements = dict.fromkeys(f"'{row.placement}'" for row in sharded)
    words = {
        'replicated': _paths(replicated),
        'sharded': _paths(sharded),
        'bytes': format_bytes(n_bytes),
        'bytes_if_sharded': format_bytes(sum(row.bytes for row in sharded)),
        'placements': first_of(list(placements), 3),
    }
    if len(pairs) == 1:
        for plural, singular in _SINGULARS.items():
            text = text.replace(plural, singular)
            suggestion = suggestion.replace(plural, singular)
    text, suggestion = text.format_map(words), suggestion.format_map(words)
    explained = tuple(row.path for row in replicated)
    yield Finding(kind, text, None, n_bytes, suggestion, explained)


def _paths(rows: Sequence[ArrayRow]) -> str:
    return first_of(fold_paths(row.path for row in rows), 3)
