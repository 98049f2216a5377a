"""Finds optimizer states and results that are replicated although the parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.sharding import NamedSharding

from ..._program.hlo.graph import Node
from ..._text import first_of, format_bytes
from ..._trees.paths import common_suffix_length
from ..arrays import array_row
from ..fold_layers import fold_paths
from ..kinds import FindingKind
from ..report_rows import ArrayRow, Finding
from .facts import Facts
from .next_call import next_arguments, weights_of_gradients


def states_of_parameters(facts: Facts) -> dict[int, int]:
    """Returns {optimizer state: its parameter}, by the indices of the arguments.

    Parameters are the arguments that matmuls or lookups read; states are the other arguments that a
    train step updates. They have the same shape, dtype and last key of the path. If several
    parameters do, the path with the longest common suffix is that of the parameter.
    """
    if not facts.is_training:
        return {}
    rows, found = facts.argument_rows, dict[int, int]()
    read = facts.multiplied.intersection(facts.weights_and_states)

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


class Parameter(NamedTuple):
    """An argument or a result that is a parameter of an optimizer state."""

    row: ArrayRow
    sharding: NamedSharding


def parameters_of_new_states(facts: Facts) -> dict[int, Parameter]:
    """Returns {result: the parameter with its type and the longest common suffix of the path}.

    The parameter may be an argument that the program does not use, as in `jax.jit(optimizer.init)`,
    which makes zeros of its shape: JAX drops the argument, and with it the sharding. Or, where
    states are filled with a constant, a sharded result, as in a function that makes a model and its
    optimizer.
    """
    rows, found = facts.result_rows, dict[int, Parameter]()
    unsharded = [i for i, row in enumerate(rows) if not row.sharded and row.shape]
    parameters = [*_unused_parameters(facts)] if unsharded else []
    results = [
        Parameter(row, result.sharding)
        for row, result in zip(rows, facts.results, strict=True)
        if row.sharded and isinstance(result.sharding, NamedSharding)
    ]
    filled = {i for i, node in enumerate(facts.graph.outputs) if results and _is_filled(node)}
    replaced = next_arguments(facts) if filled else {}
    # a bias of zeros is in a tree with other numbers, and is not a state
    trees = {tree for i, row in enumerate(rows) if i not in filled for tree in _trees(row.path)}
    for result in unsharded:
        row = rows[result]
        is_new = result in filled and result not in replaced
        owners = parameters + results if is_new else parameters
        alike = [
            (common_suffix_length(row.path, owner.row.path), -i)
            for i, owner in enumerate(owners)
            if owner.row.array == row.array
        ]
        length, i = max(alike, default=(0, 0))
        if not length:
            continue
        is_state = -i < len(parameters) or [*_trees(row.path)][-length] not in trees
        if is_state and owners[-i].sharding.shard_shape(row.shape) != row.shape:
            found[result] = owners[-i]
    return found


def _trees(path: str) -> Iterator[str]:
    """Yields the paths of the trees that a leaf is in, such as 'result' and 'result/0'."""
    keys = path.split('/')
    yield from ('/'.join(keys[:i]) for i in range(len(keys)))


def _unused_parameters(facts: Facts) -> Iterator[Parameter]:
    unused = [i for i, array in enumerate(facts.arguments) if array.sharding is None]
    call = facts.call if unused else None
    if call is None:
        return
    for i in unused:
        sharding = getattr(call.leaves[call.dynamic[i]], 'sharding', None)
        if isinstance(sharding, NamedSharding):
            array = replace(facts.arguments[i], sharding=sharding)
            yield Parameter(array_row(array, [sharding.mesh]), sharding)


def _is_filled(node: Node) -> bool:
    """Whether all numbers of an array are the same constant."""
    while node.opcode in ('bitcast', 'broadcast', 'copy') and node.inputs:
        node = node.inputs[0]
    return node.opcode == 'constant' and not node.array.shape


def unsharded_new_states(facts: Facts) -> Iterator[Finding]:
    """Reports new optimizer states on one device, or replicated, of sharded parameters."""
    pairs = [
        (facts.result_rows[result], parameter.row)
        for result, parameter in parameters_of_new_states(facts).items()
    ]
    if sum(row.bytes for row, _ in pairs) > facts.replicated_above:
        on_one = facts.n_devices == 1
        yield from _replicated(
            'unsharded new states',
            pairs,
            ('its parameter {}', 'their parameters {}'),
            'on one device' if on_one else 'replicated',
        )


def _replicated(
    kind: FindingKind,
    pairs: Iterable[tuple[ArrayRow, ArrayRow]],
    of: tuple[str, str],
    where: str = 'replicated',
) -> Iterator[Finding]:
    """Yields one finding for all pairs of a replicated array and the sharded one it belongs to."""
    pairs = [(row, other) for row, other in pairs if other.sharded and not row.sharded]
    if not pairs:
        return
    replicated, sharded = ([pair[i] for pair in pairs] for i in (0, 1))
    n_bytes, if_sharded = (sum(row.bytes for row in rows) for rows in (replicated, sharded))
    device = 'each device' if where == 'replicated' else 'this one'
    are, of_them = ('is', of[0]) if len(pairs) == 1 else ('are', of[1])
    yield Finding(
        kind,
        f'{_paths(replicated)} {are} {where}, but {of_them.format(_paths(sharded))} {are} '
        f'sharded: {format_bytes(n_bytes)} on {device} instead of {format_bytes(if_sharded)}',
        None,
        n_bytes,
        explains=tuple(row.path for row in replicated),
    )


def _paths(rows: Sequence[ArrayRow]) -> str:
    return first_of(fold_paths(row.path for row in rows), 3)
