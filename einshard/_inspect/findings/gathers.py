"""Finds arrays that are gathered needlessly: again, in every iteration, or only to be sliced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..._errors import plural
from ..._hlo.all_gathers import AllGather
from ..._hlo.collectives import Collective
from ..._sharding.describe import describe_named
from ..._sharding.mesh import AnyMesh
from ..._text import format_bytes, short_source
from ..collective_axes import sharding_of
from ..report_rows import Finding
from .activations import contracted_axes, missing_constraint
from .facts import Facts, Names, sent_bytes


def fully_rematerialized(facts: Facts) -> Iterator[Finding]:
    """Reports arrays that are resharded by a full all-gather, of which devices keep a slice."""
    for one in facts.collectives:
        gather = facts.all_gathers.get(one.name)
        if gather is None or gather.kept is None:
            continue
        names: Names = None
        what, is_full = str(gather.array), one.n_groups == 1
        if gather.parameter is not None:
            array = facts.inputs[gather.parameter]
            same_shape = array.shape == gather.array.shape
            names = array.names if same_shape else None
            what, is_full = f'{array.path}, {what},', is_full or same_shape
        ways = _from_and_to(gather, one, facts.meshes, names) if is_full else None
        route = f" from '{ways[0]}' to '{ways[1]}'" if ways else ''
        if ways and ways[0] == ways[1]:
            route = f", '{ways[0]}' before and after,"
        among = plural(one.group_size, 'device')
        via = 'a full all-gather' if is_full else f'an all-gather among {among}'
        yield Finding(
            'full rematerialization',
            f'{what} is resharded{route} via {via} (involuntary full rematerialization): '
            f'{format_bytes(gather.array.bytes)}',
            one.source,
            sent_bytes(one),
        )


def _from_and_to(
    gather: AllGather, one: Collective, meshes: Sequence[AnyMesh], names: Names
) -> tuple[str, str] | None:
    n_dims = len(gather.array.shape)
    assert gather.kept is not None
    held = [[0] * one.n_devices for _ in range(n_dims)]
    for group in one.groups or (tuple(range(one.n_devices)),):
        for i, device in enumerate(group):
            held[gather.dimension][device] = i
    for mesh in meshes:
        before, after = sharding_of(held, mesh), sharding_of(gather.kept, mesh)
        if before is not None and after is not None:
            return describe_named(before, n_dims, names), describe_named(after, n_dims, names)
    return None


def gathered_again(facts: Facts) -> Iterator[Finding]:
    """Reports activations that are gathered twice in a pass, and arrays gathered in each iteration.

    Weights are gathered again in the backward pass, and for each microbatch, because to keep them
    would take the memory that sharding them saves.
    """
    # a wrong sharding may have activations gathered twice, too; other findings have its cause
    has_cause = any(itertools.chain(missing_constraint(facts), contracted_axes(facts)))
    for finding, is_weight in _gathered_again(facts):
        if not (is_weight or (has_cause and finding.source in facts.lines)):
            yield finding


def weights_gathered_again(facts: Facts) -> Iterator[Finding]:
    """Notes weights that are gathered several times."""
    return (finding for finding, is_weight in _gathered_again(facts) if is_weight)


def _gathered_again(facts: Facts) -> Iterator[tuple[Finding, bool]]:
    """Yields findings, and whether they are about weights in training."""
    of_one: dict[object, list[tuple[AllGather, Collective]]] = {}
    of_weights: set[object] = set()
    for one, row in zip(facts.collectives, facts.rows, strict=True):
        gather = facts.all_gathers.get(one.name)
        if gather is not None:
            is_weight = facts.is_training and row.role == 'weights'
            in_backward = row.is_backward and not is_weight
            key = (gather.origin, gather.dimension, one.groups, in_backward)
            of_one.setdefault(key, []).append((gather, one))
            if is_weight:
                of_weights.add(key)
    for key, several in of_one.items():
        gather, one = several[0]
        what = str(gather.array)
        if gather.parameter is not None:
            what = f'{facts.inputs[gather.parameter].path}, {what},'
        if len(several) > 1:
            lines = dict.fromkeys(other.source for _, other in several if other.source)
            elsewhere = list(map(short_source, lines))[1:]
            also = f', also at {", ".join(elsewhere)}' if elsewhere else ''
            text = f'{what} is gathered {len(several)} times{also}'
        elif gather.invariant:
            iterations = 'every iteration'
            if one.executions is not None:
                iterations = f'each of {one.executions} iterations'
            text = f'{what} is gathered in {iterations} of a loop that does not change it'
        else:
            continue
        again = sum(sent_bytes(one) for _, one in several)
        yield Finding('gathered again', text, one.source, again), key in of_weights
