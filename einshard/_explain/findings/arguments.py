"""Finds optimizer states and results that are replicated although the parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..._text import first_of, format_bytes
from ..._trees.paths import common_suffix_length
from ..fold_layers import fold_paths
from ..report_rows import ArrayRow, Finding
from .facts import Facts
from .next_call import next_arguments, weights_of_gradients


def states_of_parameters(facts: Facts) -> dict[int, int]:
    """Returns {optimizer state: its parameter}, by the indices of the arguments.

    Parameters are the arguments that matmuls or lookups read; states are the other arguments that a
    train step updates. They have the same shape, dtype and last key of the path. If several
    parameters do, the path with the longest common suffix is that of the parameter.
    """
    if not facts.is_training or facts.trace is None:
        return {}
    rows, found = facts.argument_rows, dict[int, int]()
    read = {
        value.argument
        for product in facts.trace.products
        for value in (product.left, product.right)
        if value.argument is not None and not value.is_data
    }

    def key(i: int) -> tuple[str, str]:
        return rows[i].array, rows[i].path.split('/')[-1]

    for state in facts.weights_and_states:
        candidates = [] if state in read else [i for i in sorted(read) if key(i) == key(state)]
        lengths = [common_suffix_length(rows[state].path, rows[i].path) for i in candidates]
        if lengths and lengths.count(max(lengths)) == 1:
            found[state] = candidates[lengths.index(max(lengths))]
    return found


def unsharded_states(facts: Facts) -> Iterator[Finding]:
    """Reports replicated optimizer states of sharded parameters."""
    rows = facts.argument_rows
    pairs = [(rows[state], rows[i]) for state, i in states_of_parameters(facts).items()]
    yield from _replicated('unsharded states', pairs, ('its parameter {}', 'their parameters {}'))


def replicated_results(facts: Facts) -> Iterator[Finding]:
    """Reports replicated results that replace a sharded argument in the next call.

    Also replicated gradients of sharded weights.
    """
    texts = '{}, which it replaces in the next call,', '{}, which they replace in the next call,'
    of_gradients = 'its weight {}', 'their weights {}'
    for pairs, of in ((next_arguments, texts), (weights_of_gradients, of_gradients)):
        rows = [
            (facts.result_rows[result], facts.argument_rows[argument])
            for result, argument in pairs(facts).items()
        ]
        yield from _replicated('replicated result', rows, of)


def _replicated(
    kind: str, pairs: Iterable[tuple[ArrayRow, ArrayRow]], of: tuple[str, str]
) -> Iterator[Finding]:
    """Yields one finding for all pairs of a replicated array and the sharded one it belongs to."""
    pairs = [(row, other) for row, other in pairs if other.sharded and not row.sharded]
    if not pairs:
        return
    replicated, sharded = ([pair[i] for pair in pairs] for i in (0, 1))
    n_bytes, if_sharded = (sum(row.bytes for row in rows) for rows in (replicated, sharded))
    are, of_them = ('is', of[0]) if len(pairs) == 1 else ('are', of[1])
    yield Finding(
        kind,
        f'{_paths(replicated)} {are} replicated, but {of_them.format(_paths(sharded))} {are} '
        f'sharded: {format_bytes(n_bytes)} on each device instead of {format_bytes(if_sharded)}',
        None,
        n_bytes,
        explains=tuple(row.path for row in replicated),
    )


def _paths(rows: Sequence[ArrayRow]) -> str:
    return first_of(fold_paths(row.path for row in rows), 3)
