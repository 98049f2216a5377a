"""The order of the axes of a mesh that several expressions make together. Imports no jax.

Every expression is read from left to right along the row of axes. An axis that it names has to be
its next one; the axes of others it skips, or, where it spells out replicas, takes for some of
those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._errors import EinshardError
from .._layout import mesh_text
from .mesh_members import Cell, Member, texts_of


@dataclass(frozen=True, slots=True)
class Reading:
    """What one expression says of the row."""

    member: Member
    cells: tuple[Cell, ...]

    def read(self, rest: tuple[Cell, ...], name: str | None, count: int) -> tuple[Cell, ...] | None:
        """What is left of `rest` after an axis, or replicas; None where they cannot come next."""
        if name in self.member.shares:
            return rest
        if name is not None and rest[:1] == ((name, count),):
            return rest[1:]
        if name in self.member.cuts:
            return None
        if not self.member.is_whole:
            return rest
        left = _replicas(rest)
        if left % count:
            return None
        return rest[1:] if left == count else ((None, left // count), *rest[1:])


def _replicas(rest: tuple[Cell, ...]) -> int:
    """How many replicas come next."""
    return rest[0][1] if rest and rest[0][0] is None else 1


def find_orders(
    members: Sequence[Member], counts: Mapping[str, int], n_devices: int
) -> list[tuple[Cell, ...]]:
    """The row of the axes of more than one part, and of replicas that are none of them.

    Raises where there is none; two rows are enough to know that there are several.
    """
    readings = [Reading(member, tuple(member.cells(counts, n_devices))) for member in members]
    rows = list(itertools.islice(_rows(readings, counts, n_devices), 2))
    if not rows:
        raise _no_order(readings, counts, n_devices)
    return rows


def _rows(
    readings: Sequence[Reading], counts: Mapping[str, int], n_devices: int
) -> Iterator[tuple[Cell, ...]]:
    """Every row with which all readings agree."""

    def rows(
        rests: Sequence[tuple[Cell, ...]], left: tuple[str, ...], replicas: int, after: str | None
    ) -> Iterator[tuple[Cell, ...]]:
        if not left and replicas == 1:
            yield ()
        candidates: list[Cell] = [(name, counts[name]) for name in left]
        if replicas > 1 and after is not None:
            both = zip(readings, rests, strict=True)
            common = math.gcd(replicas, *(_replicas(rest) for r, rest in both if r.member.is_whole))
            candidates += [(None, common)] if common > 1 else []
        for name, count in candidates:
            read = [r.read(rest, name, count) for r, rest in zip(readings, rests, strict=True)]
            below = [rest for rest in read if rest is not None]
            if len(below) == len(read):
                others = tuple(other for other in left if other != name)
                fewer = replicas if name is not None else replicas // count
                for row in rows(below, others, fewer, name):
                    yield ((name, count), *row)

    cut = tuple(name for name, count in counts.items() if count > 1)
    replicas = n_devices // math.prod(counts.values())
    return rows([reading.cells for reading in readings], cut, replicas, '')


def _no_order(
    readings: Sequence[Reading], counts: Mapping[str, int], n_devices: int
) -> EinshardError:
    guilty = readings
    for pair in itertools.combinations(readings, 2):
        names = {name for r in pair for name in (*r.member.cuts, *r.member.shares)}
        theirs = {name: count for name, count in counts.items() if name in names}
        if next(_rows(pair, theirs, n_devices), None) is None:
            guilty = pair
            break
    apart = [reading.member for reading in guilty]
    whose = 'two expressions' if len(apart) == 2 else 'the expressions'
    return apart[0].expression.error(
        f'{whose} disagree on the order of the devices',
        [term for term in apart[0].expression.right if term.placed],
        **texts_of(apart),
        devices=f'{n_devices}, as {mesh_text({k: n for k, n in counts.items() if n > 1})}',
    )
