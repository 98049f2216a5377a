"""All small changes of a program's shardings: one group, and one mesh axis or two array axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..._program.traced.outline import Place
from ..._program.traced.program import Axes, Axis
from .groups import Group


@dataclass(frozen=True)
class Neighbour:
    """A change of the shardings of one group, or of two.

    Attributes:
        changes: the new mesh axes of each site. None removes a constraint.
        groups: what changes.
    """

    changes: Mapping[Place, Axes | None]
    groups: tuple[Group, ...]

    def __or__(self, other: Neighbour) -> Neighbour:
        return Neighbour({**self.changes, **other.changes}, self.groups + other.groups)


def find_neighbours(
    groups: Iterable[Group],
    given: Mapping[Place, Axes | None],
    shape_of: Callable[[Place], Sequence[int]],
    propagated: Callable[[Place], Axes],
    mesh: Mapping[str, int],
) -> Iterator[Neighbour]:
    """Yields all changes of one group.

    Args:
        given: the mesh axes of each site as the program is, or None.
        propagated: the mesh axes that a value without a constraint has.
    """
    for group in groups:
        sites = group.sites
        placed = [site for site in sites if given[site] is not None]
        # arrays of different ranks, such as tokens and labels, move by their leading dimensions
        ndim = min(len(shape_of(site)) for site in sites)
        if placed and group.kind == 'constraint':
            yield Neighbour(dict.fromkeys(placed), (group,))
        first = given[placed[0]] if placed else None
        start = propagated(sites[0]) if first is None else first
        start = (start or ((),) * ndim)[:ndim]
        targets = dict.fromkeys(_targets(start, mesh))
        # members that are sharded differently may take the placement of another
        targets |= {axes: None for site in placed if len(axes := given[site] or ()) == ndim}
        if group.kind == 'result' and not placed:
            targets[start] = None  # pinned as the compiler computes it
        seen: set[tuple[tuple[Place, Axes], ...]] = set()
        for target in targets:
            changes: dict[Place, Axes | None] = {}
            for site in sites:
                full = target + (given[site] or ((),) * len(shape_of(site)))[ndim:]
                # results of an argument's group that the user did not place follow by themselves
                follows = site.kind == 'result' and group.kind != 'result' and given[site] is None
                if not follows and full != given[site] and _fits(full, shape_of(site), mesh):
                    changes[site] = full
            is_same = target == start and not placed and group.kind == 'value'
            key = tuple(changes.items())
            if changes and not is_same and key not in seen:
                seen.add(key)  # type: ignore[reportArgumentType]
                yield Neighbour(changes, (group,))


def pairs(ranked: Sequence[Neighbour]) -> Iterator[Neighbour]:
    """Yields pairs of changes of different groups."""
    for a, b in itertools.combinations(ranked, 2):
        if not a.changes.keys() & b.changes.keys():
            yield a | b


def _targets(axes: Axes, mesh: Mapping[str, int]) -> Iterator[Axes]:
    """Two array axes swapped; a mesh axis moved, added or dropped."""
    for d, e in itertools.combinations(range(len(axes)), 2):
        order = [*range(len(axes))]
        order[d], order[e] = e, d
        yield tuple(axes[i] for i in order)
    for name, size in mesh.items():
        if size == 1:
            continue
        without = tuple(tuple(a for a in dim if a.partition(':')[0] != name) for dim in axes)
        yield without
        for d, dim in enumerate(without):
            for new in dict.fromkeys(((*dim, name), (name, *dim))):
                yield (*without[:d], new, *without[d + 1 :])


def _fits(axes: Axes, shape: Sequence[int], mesh: Mapping[str, int]) -> bool:
    def size(axis: Axis) -> int:
        return mesh[axis] if axis in mesh else int(axis.rpartition(')')[2])

    used = [a.partition(':')[0] for dim in axes for a in dim]
    divides = all(n % prod(map(size, dim)) == 0 for n, dim in zip(shape, axes, strict=True))
    return divides and len({*used}) == len(used)
