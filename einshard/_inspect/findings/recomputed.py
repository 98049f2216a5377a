"""Finds sums over devices that `jax.checkpoint` computes again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ..._hlo.loops import trip_count
from ..._hlo.module import Place
from ..._text import format_bytes
from ..report_rows import CollectiveRow, Finding
from .facts import Facts

_LARGE = 0.02  # fraction of all bytes sent
# not gathers: a saved value keeps the sharding that it has before it is gathered
_SUMS = ('all-reduce', 'reduce-scatter')


class _Sent(NamedTuple):
    """A collective, and its instruction if it has one of its own."""

    row: CollectiveRow
    place: Place | None


def recomputed_collectives(facts: Facts) -> Iterator[Finding]:
    """Notes activations that are reduced in the forward pass, and again by `jax.checkpoint`."""
    forward: dict[object, list[_Sent]] = {}
    recomputed: dict[object, list[_Sent]] = {}
    for row, place in zip(facts.rows, facts.places, strict=True):
        if row.role != 'activations' or row.kind not in _SUMS:
            continue
        # JAX 0.8 gives the backward pass the line of the loop
        key = row.kind, row.arrays, None if facts.innermost_lines else row.source
        if '/rematted_computation/' in row.op_name:
            recomputed.setdefault(key, []).append(_Sent(row, place))
        elif not row.is_backward:
            forward.setdefault(key, []).append(_Sent(row, place))
    sent_in_all = sum(row.total_bytes for row in facts.rows)
    for key, again in recomputed.items():
        pairs = list(zip(forward.get(key, ()), again, strict=False))
        n_bytes = sum(sent.row.total_bytes for _, sent in pairs)
        if not pairs or n_bytes < _LARGE * sent_in_all:
            continue
        row, saved = again[0].row, [_saved_bytes(facts, *pair) for pair in pairs]
        memory = '' if None in saved else f', which takes {format_bytes(sum(filter(None, saved)))}'
        yield Finding(
            'sent again',
            f'the {row.kind} of {row.arrays} runs again in the backward pass, where jax.checkpoint '
            f'repeats the forward pass: {format_bytes(n_bytes)}',
            row.source,
            n_bytes,
            f"save its result{memory}: name it with checkpoint_name(..., 'sum') of "
            'jax.ad_checkpoint, and pass '
            "policy=jax.checkpoint_policies.save_only_these_names('sum') to jax.checkpoint",
        )


def _saved_bytes(facts: Facts, forward: _Sent, again: _Sent) -> int | None:
    """Returns the bytes per device of keeping a result until the backward pass.

    Loops around only the forward pass keep the results of all their iterations. Loops around both
    passes, such as one over microbatches, keep one result at a time. None if a trip count or an
    instruction is unknown.
    """
    if forward.place is None or again.place is None:
        return None
    path, path_again = (
        facts.module.path(place.comp) or () for place in (forward.place, again.place)
    )
    loops = [site for site in path if site not in path_again and site.op.opcode == 'while']
    trips = [trip_count(facts.module, loop) for loop in loops]
    row = forward.row
    result_bytes = row.bytes // (row.group_size if row.kind == 'reduce-scatter' else 1)
    return None if None in trips else result_bytes * prod(filter(None, trips))
