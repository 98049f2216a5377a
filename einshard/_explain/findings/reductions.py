"""Finds all-reduces and reduce-scatters that send more than necessary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from jax.sharding import NamedSharding

from ..._program.hlo.collective import Collective
from ..._program.hlo.integers import count_trips
from ..._program.hlo.slices import find_sliced_sum
from ..._text import format_bytes
from ..fold_layers import fold_paths
from ..report_rows import Finding
from .facts import Facts
from .values import PRODUCTS, mesh_entries

_MIN_BYTES = 1024  # smaller sums are not worth a change


def sliced_sums(facts: Facts) -> Iterator[Finding]:
    """Reports all-reduces after matmuls if each device keeps only a slice of the result."""
    for row in facts.unexplained:
        if row.kind != 'all-reduce' or row.is_backward or row.bytes < _MIN_BYTES:
            continue
        found = find_sliced_sum(facts.graph, row)
        # direct slices are what the suggestion gives; XLA decides whether to reduce-scatter them
        if found is None or found.is_direct or row.total_bytes < facts.min_bytes:
            continue
        program = facts.propagation.program
        on_line = program.by_place.get(row.source or '', ()) if program else ()
        n_products = sum(op.kind in PRODUCTS and op.is_forward for op in on_line)
        # each device keeps one slice, of a matmul that is alone in its line
        if n_products != 1 or [n for _, n in found.parts] != [row.group_size]:
            continue
        yield Finding.about(
            'sliced all-reduce',
            f'{row.arrays} is all-reduced along {row.along or "all devices"}, and each device '
            f'keeps only a slice: the all-reduce sends {format_bytes(row.total_bytes)}, a '
            'reduce-scatter would send half of that',
            [row],
        )


# --- loops --------------------------------------------------------------------------------------


def summed_in_loop(facts: Facts) -> Iterator[Finding]:
    """Reports all-reduces of gradients in a loop that only adds them up.

    Omits weights that are sharded over the same mesh axes: without the all-reduces, the loop would
    carry unsharded gradients, which take the memory that sharding saves.
    """
    # {line of a scan: its length}; those that only add up scalars, such as the loss, are left out
    sums = facts.traced.sums if facts.traced else ()
    loops = {line: length for line, length in sums if length > 1}
    found: dict[tuple[str, str], list[Collective]] = {}
    for row in facts.unexplained:
        loop = _loop_around(facts, row, loops) if row.kind == 'all-reduce' else None
        is_gradient = row.role == 'gradients' and not _is_result_sharded(facts, row)
        if loop and row.mesh_axes and is_gradient:
            found.setdefault((loop, row.along), []).append(row)
    for (line, along), rows in found.items():
        n_bytes, n = sum(row.total_bytes for row in rows), loops[line]
        if n_bytes < facts.min_bytes:
            continue
        folded = ', '.join(fold_paths(path for row in rows for path in row.of))
        yield Finding.about(
            'summed in a loop',
            f'the gradients for {folded} are all-reduced along {along} in each of {n} iterations '
            f'of a loop that only adds them up: {format_bytes(n_bytes)} instead of '
            f'{format_bytes(n_bytes // n)}',
            rows,
            line,
        )


def _loop_around(facts: Facts, row: Collective, lengths: Mapping[str, int]) -> str | None:
    """Finds the line of the scan around a collective. `lengths` is {line: length}."""
    for outer in row.nodes[0].loops:
        line = facts.graph.program.source(outer.op) or ''
        if line in lengths and count_trips(outer) == lengths[line]:
            return line
    return None


def _is_result_sharded(facts: Facts, row: Collective) -> bool:
    for array in facts.results:
        if array.path in row.of and isinstance(array.sharding, NamedSharding):
            entries = mesh_entries(array.sharding, len(array.shape))
            if any(row.mesh_axes & set(entry) for entry in entries):
                return True
    return False


# --- jax.checkpoint -----------------------------------------------------------------------------

# without all-gathers, because to save their results does not help: jax.checkpoint saves the value
# as it is sharded, and gathers it again
_SUMS = ('all-reduce', 'reduce-scatter')


def recomputed_collectives(facts: Facts) -> Iterator[Finding]:
    """Notes activations that `jax.checkpoint` reduces again in the backward pass."""
    forward: dict[object, list[Collective]] = {}
    recomputed: dict[object, list[Collective]] = {}
    for row in facts.unexplained:
        if row.role != 'activations' or row.kind not in _SUMS:
            continue
        key = row.kind, row.arrays, row.source
        if '/rematted_computation/' in row.op_name:
            recomputed.setdefault(key, []).append(row)
        elif not row.is_backward:
            forward.setdefault(key, []).append(row)
    for key, again in recomputed.items():
        pairs = list(zip(forward.get(key, ()), again, strict=False))
        n_bytes = sum(repeated.total_bytes for _, repeated in pairs)
        if not pairs or n_bytes < facts.min_bytes:
            continue
        row, saved = again[0], [_saved_bytes(*pair) for pair in pairs]
        n_saved = None if None in saved else sum(filter(None, saved))
        if n_saved is not None and n_saved > facts.free_memory:
            continue  # jax.checkpoint makes the program fit
        memory = '' if n_saved is None else f'; to save it takes {format_bytes(n_saved)}'
        yield Finding.about(
            'sent again',
            f'the {row.kind} of {row.arrays} runs again in the backward pass, where jax.checkpoint '
            f'repeats the forward pass: {format_bytes(n_bytes)}{memory}',
            [repeated for _, repeated in pairs],
        )


def _saved_bytes(forward: Collective, again: Collective) -> int | None:
    """Returns the bytes per device that saving the result for the backward pass would take.

    A loop around only the forward pass keeps the results of all its iterations. A loop around both
    passes, such as one over microbatches, keeps one result at a time. Returns None if a trip count
    is unknown.
    """
    shared = again.nodes[0].loops
    trips = [count_trips(loop) for loop in forward.nodes[0].loops if loop not in shared]
    n_shards = forward.group_size if forward.kind == 'reduce-scatter' else 1
    result_bytes = forward.bytes // n_shards
    return None if None in trips else result_bytes * prod(filter(None, trips))
