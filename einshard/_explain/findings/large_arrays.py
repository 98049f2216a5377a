"""Notes large replicated arrays and large constants."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import first_of, format_bytes
from ..fold_layers import fold_paths
from ..report_rows import ArrayRow, Finding
from .facts import Facts


def replicated(facts: Facts) -> Iterator[Finding]:
    explained = facts.explained
    by_array: dict[str, list[ArrayRow]] = {}
    for row in (*facts.argument_rows, *facts.result_rows):
        is_large = facts.n_devices > 1 and row.bytes > facts.replicated_above
        if is_large and not row.sharded and row.path not in explained:
            by_array.setdefault(row.array, []).append(row)
    for array, rows in by_array.items():
        paths = first_of(fold_paths(row.path for row in rows), 4)
        text = (
            f'{paths}, {array}, {"is" if len(rows) == 1 else "are"} replicated on '
            f'{facts.n_devices} devices: {format_bytes(rows[0].bytes)} '
            f'{"" if len(rows) == 1 else "per array "}on each'
        )
        yield Finding('replicated', text, bytes=sum(row.bytes for row in rows))


def large_constants(facts: Facts) -> Iterator[Finding]:
    """Notes arrays that a function closes over, of which each device holds a full copy.

    XLA folds no operation of jax.numpy into a constant of this size, so these are not its own.
    """
    arrays: dict[str, int] = {}
    for node in facts.graph.nodes:
        if node.opcode == 'constant' and node.array.bytes > 2**20:
            # several computations may hold copies of one constant
            arrays[str(node.array)] = node.array.bytes
    for array, size in arrays.items():
        text = (
            f'{array} is a constant of the program, such as an array that the function closes '
            f'over: {format_bytes(size)} on each device'
        )
        yield Finding('constant', text, bytes=size)
