"""Finds arrays that are gathered needlessly: again, in every iteration, or only to be sliced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..._errors import plural
from ..._hlo.all_gathers import AllGather
from ..._hlo.collectives import Collective
from ..._sharding.describe import describe_named
from ..._sharding.mesh import AnyMesh
from ..._text import first_of, format_bytes, short_source
from ..collective_axes import sharding_of
from ..fold_layers import fold
from ..report_rows import Finding
from .activations import contracted_axes, missing_constraint
from .expressions import expression_of
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
    """Describes the shardings before and after an all-gather of which devices keep a slice."""
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


class _Again(NamedTuple):
    """An array that is gathered several times.

    Attributes:
        gather: the first all-gather.
        times: 'gathered 2 times', or in what loop.
        lines: the lines that gather it.
        bytes: bytes that a device sends in all of them.
        is_weight: whether it is a weight in training.
        along: the mesh axes of the first all-gather.
    """

    gather: AllGather
    times: str
    lines: Sequence[str]
    bytes: int
    is_weight: bool
    along: frozenset[str]


def gathered_again(facts: Facts) -> Iterator[Finding]:
    """Reports activations that are gathered twice in a pass, and arrays gathered in each iteration.

    Weights are gathered again in the backward pass, and for each microbatch, because to keep them
    would take the memory that sharding them saves.
    """
    # activations may be gathered twice because of a wrong sharding, which other findings report
    has_cause = any(itertools.chain(missing_constraint(facts), contracted_axes(facts)))
    for one in _gathered_again(facts):
        line = one.lines[0] if one.lines else None
        if not (one.is_weight or (has_cause and line in facts.lines)):
            parameter = one.gather.parameter
            path = '' if parameter is None else f'{facts.inputs[parameter].path}, '
            what = f'{path}{one.gather.array}{"," * bool(path)}'
            elsewhere = ', '.join(map(short_source, one.lines[1:]))
            also = f', also at {elsewhere}' if elsewhere else ''
            text = f'{what} is {one.times}{also}'
            yield Finding('gathered again', text, line, one.bytes, _before_loop(facts, one))


def weights_gathered_again(facts: Facts) -> Iterator[Finding]:
    """Notes weights that are gathered several times; folds paths: 'layers/{gate,up}'."""
    groups: dict[str, dict[str, _Again]] = {}
    for one in _gathered_again(facts):
        if one.is_weight:
            parameter = one.gather.parameter
            what = str(one.gather.array) if parameter is None else facts.inputs[parameter].path
            groups.setdefault(one.times, {})[what] = one
    for times, several in groups.items():
        folded = [path for path, _ in fold(list(several), [None] * len(several), few=1)]
        verb = 'is' if len(several) == 1 else 'are'
        first = next((one.lines[0] for one in several.values() if one.lines), None)
        n_bytes = sum(one.bytes for one in several.values())
        yield Finding('gathered again', f'{first_of(folded, 3)} {verb} {times}', first, n_bytes)


def _before_loop(facts: Facts, one: _Again) -> str:
    """Suggests a constraint that gathers an argument before the loop."""
    parameter = one.gather.parameter
    if not one.gather.invariant or parameter is None or facts.mesh is None or not one.along:
        return ''
    array = facts.inputs[parameter]
    axes = [
        replace(axis, mesh=tuple(name for name in axis.mesh if name not in one.along))
        for axis in facts.argument_axes(facts.arguments.index(array))
    ]
    name = array.path.split('/')[-1]
    return f"gather it once, before the loop: {name} = einshard({name}, '" + (
        f"{expression_of(axes, facts.mesh)}')"
    )


def _gathered_again(facts: Facts) -> Iterator[_Again]:
    of_one: dict[object, list[tuple[AllGather, Collective, frozenset[str]]]] = {}
    of_weights: set[object] = set()
    for one, row, along in zip(facts.collectives, facts.rows, facts.along, strict=True):
        gather = facts.all_gathers.get(one.name)
        if gather is not None:
            is_weight = facts.is_training and row.role == 'weights'
            in_backward = row.is_backward and not is_weight
            key = (gather.origin, gather.dimension, one.groups, in_backward)
            of_one.setdefault(key, []).append((gather, one, along))
            if is_weight:
                of_weights.add(key)
    for key, several in of_one.items():
        gather, one, along = several[0]
        lines = list(dict.fromkeys(other.source for _, other, _ in several if other.source))
        # XLA gathers activations again, in the same line, to save memory
        if len(several) > 1 and (len(lines) > 1 or key in of_weights):
            times = f'gathered {len(several)} times'
        elif gather.invariant:
            times = 'gathered in every iteration of a loop that does not change it'
            if one.executions is not None:
                times = times.replace('every', f'each of {one.executions}', 1)
                times = times.replace('iteration ', 'iterations ')
        else:
            continue
        sent = sum(sent_bytes(other) for _, other, _ in several)
        yield _Again(gather, times, lines, sent, key in of_weights, along)
