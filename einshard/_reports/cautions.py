"""A compiled program -> what in it is probably not meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .._describe import describe_named
from .._errors import plural
from .._hlo.collectives import Collective
from .._hlo.movements import Gathering
from .._mesh import AnyMesh
from .._promises import Allowed, allowed_text, counts_text, more_than
from .._words import amount, short_source
from .along import sharding_of
from .rows import ArrayRow, Caution

Names = tuple[str, ...] | None


def promise_broken(allowed: Allowed | None, collectives: Sequence[Collective]) -> Iterator[Caution]:
    """The `collectives=` of a function, where its program has others: a call of it raises."""
    too_many = [] if allowed is None else more_than(allowed, collectives)
    if allowed is not None and too_many:
        text = f'collectives= promises {allowed_text(allowed)}, and here is {counts_text(too_many)}'
        yield Caution('promise broken', text, too_many[0].source)


def replicated(rows: Sequence[ArrayRow], n_devices: int, above: int) -> Iterator[Caution]:
    """Large arrays that every device holds whole."""
    for row in rows:
        if n_devices > 1 and not row.sharded and row.bytes > above:
            yield Caution(
                'replicated',
                f'{row.path}, {row.array}, is whole on each of {n_devices} devices: '
                f'{amount(row.bytes)} on each',
            )


def moved_whole(
    gatherings: Mapping[str, Gathering],
    collectives: Sequence[Collective],
    meshes: Sequence[AnyMesh],
    inputs: Sequence[tuple[str, tuple[int, ...], Names]],
) -> Iterator[Caution]:
    """Arrays that are gathered whole though every device keeps a part alone.

    `inputs` are path, shape and axis names of the parameters of the program.
    """
    for one in collectives:
        gathering = gatherings.get(one.name)
        if gathering is None or gathering.kept is None:
            continue
        names: Names = None
        what, whole = str(gathering.array), one.n_groups == 1
        if gathering.parameter is not None:
            path, shape, names = inputs[gathering.parameter]
            is_as_given = shape == gathering.array.shape
            names = names if is_as_given else None
            what, whole = f'{path}, {what},', whole or is_as_given
        ways = _from_and_to(gathering, one, meshes, names) if whole else None
        route = f" from '{ways[0]}' to '{ways[1]}'" if ways else ''
        if ways and ways[0] == ways[1]:
            route = f", '{ways[0]}' before and after,"
        copies = 'a whole copy' if whole else f'the parts of {plural(one.parties, "device")}'
        yield Caution(
            'moved whole',
            f'{what} is moved{route} by way of {copies} on each device, which keeps a part of it: '
            f'{amount(gathering.array.bytes)}',
            one.source,
        )


def _from_and_to(
    gathering: Gathering, one: Collective, meshes: Sequence[AnyMesh], names: Names
) -> tuple[str, str] | None:
    n_dims = len(gathering.array.shape)
    assert gathering.kept is not None
    held = [[0] * one.n_devices for _ in range(n_dims)]
    for group in one.groups or (tuple(range(one.n_devices)),):
        for i, device in enumerate(group):
            held[gathering.dimension][device] = i
    for mesh in meshes:
        before, after = sharding_of(held, mesh), sharding_of(gathering.kept, mesh)
        if before is not None and after is not None:
            return describe_named(before, n_dims, names), describe_named(after, n_dims, names)
    return None


def gathered_again(
    gatherings: Mapping[str, Gathering],
    collectives: Sequence[Collective],
    inputs: Sequence[tuple[str, tuple[int, ...], Names]],
) -> Iterator[Caution]:
    """Arrays that are gathered several times, by several collectives or in each turn of a loop."""
    of_one: dict[object, list[tuple[Gathering, Collective]]] = {}
    for one in collectives:
        gathering = gatherings.get(one.name)
        if gathering is not None:
            key = (gathering.origin, gathering.dimension, one.groups)
            of_one.setdefault(key, []).append((gathering, one))
    for several in of_one.values():
        gathering, one = several[0]
        what = str(gathering.array)
        if gathering.parameter is not None:
            what = f'{inputs[gathering.parameter][0]}, {what},'
        if len(several) > 1:
            lines = dict.fromkeys(other.source for _, other in several if other.source)
            elsewhere = list(map(short_source, lines))[1:]
            also = f', also at {", ".join(elsewhere)}' if elsewhere else ''
            yield Caution(
                'gathered again', f'{what} is gathered {len(several)} times{also}', one.source
            )
        elif gathering.invariant:
            turns = 'every turn' if one.times is None else f'each of {one.times} turns'
            yield Caution(
                'gathered again',
                f'{what} is gathered in {turns} of a loop that does not change it',
                one.source,
            )
