"""All small changes of a program's shardings: one group, and one mesh axis or two array axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..._program.traced.outline import Place
from ..._program.traced.propagated import Axes, Axis
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
        if group.dims:
            yield from _along_axis(group, given, shape_of, mesh)
            continue
        sites = group.sites
        placed = [site for site in sites if given[site] is not None]
        # arrays of different ranks, such as tokens and labels, move by their leading dimensions
        ndim = min(len(shape_of(site)) for site in sites)
        if placed and group.kind == 'constraint':
            yield Neighbour(dict.fromkeys(placed), (group,))
        first = given[placed[0]] if placed else None
        start = propagated(sites[0]) if first is None else first
        start = (start or ((),) * ndim)[:ndim]
        if group.kind == 'through':
            targets = dict.fromkeys(_placements(start, mesh))
        else:
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
            is_same = target == start and not placed and group.kind in ('value', 'through')
            key = tuple(changes.items())
            if changes and not is_same and key not in seen:
                seen.add(key)  # type: ignore[reportArgumentType]
                yield Neighbour(changes, (group,))


def _along_axis(
    group: Group,
    given: Mapping[Place, Axes | None],
    shape_of: Callable[[Place], Sequence[int]],
    mesh: Mapping[str, int],
) -> Iterator[Neighbour]:
    """Mesh axes added to an axis of all its arrays, or dropped from it."""
    placed = [given[site] or ((),) * len(shape_of(site)) for site in group.sites]
    for names in _blocks(placed, mesh):
        for is_added in (True, False):
            changes: dict[Place, Axes | None] = {}
            for site, d, axes in zip(group.sites, group.dims, placed, strict=True):
                if not is_added and not {*names} & {*axes[d]}:
                    continue
                new = _without(axes, names)
                if is_added:
                    new = (*new[:d], (*new[d], *names), *new[d + 1 :])
                if new != axes and _fits(new, shape_of(site), mesh):
                    changes[site] = new
            if changes:
                yield Neighbour(changes, (group,))


def _blocks(placed: Iterable[Axes], mesh: Mapping[str, int]) -> Iterable[tuple[str, ...]]:
    """The mesh axes, and those that move together: the axes of one dimension, and unused ones.

    A mesh without names has an axis for each prime factor of its size.
    """
    found = {(name,): None for name, size in mesh.items() if size > 1}
    for axes in placed:
        found |= {dim: None for dim in axes if len(dim) > 1 and not any(':' in a for a in dim)}
        used = {a.partition(':')[0] for dim in axes for a in dim}
        if len(unused := tuple(n for n, size in mesh.items() if size > 1 and n not in used)) > 1:
            found[unused] = None
    return found


def _without(axes: Axes, names: Collection[str]) -> Axes:
    return tuple(tuple(a for a in dim if a.partition(':')[0] not in names) for dim in axes)


def pairs(ranked: Sequence[Neighbour]) -> Iterator[Neighbour]:
    """Yields pairs of changes of different groups."""
    for a, b in itertools.combinations(ranked, 2):
        if not a.changes.keys() & b.changes.keys():
            yield a | b


def _targets(axes: Axes, mesh: Mapping[str, int]) -> Iterator[Axes]:
    """Two array axes swapped; mesh axes moved, added or dropped."""
    for d, e in itertools.combinations(range(len(axes)), 2):
        order = [*range(len(axes))]
        order[d], order[e] = e, d
        yield tuple(axes[i] for i in order)
    for names in _blocks([axes], mesh):
        without = _without(axes, names)
        yield without
        for d, dim in enumerate(without):
            for new in dict.fromkeys(((*dim, *names), (*names, *dim))):
                yield (*without[:d], new, *without[d + 1 :])


def _placements(axes: Axes, mesh: Mapping[str, int]) -> Iterator[Axes]:
    """All placements with shards as small as these: what is moved may not need more memory."""
    used = [a for dim in axes for a in dim]
    if any(':' in a for a in used):
        return
    names = [name for name, size in mesh.items() if size > 1]
    n_shards = prod(mesh[a] for a in used)
    for dims in itertools.product([None, *range(len(axes))], repeat=len(names)):
        along = [
            [n for n, at in zip(names, dims, strict=True) if at == d] for d in range(len(axes))
        ]
        if prod(mesh[n] for dim in along for n in dim) >= n_shards:
            yield from itertools.product(*map(itertools.permutations, along))


def _fits(axes: Axes, shape: Sequence[int], mesh: Mapping[str, int]) -> bool:
    def size(axis: Axis) -> int:
        return mesh[axis] if axis in mesh else int(axis.rpartition(')')[2])

    used = [a.partition(':')[0] for dim in axes for a in dim]
    divides = all(n % prod(map(size, dim)) == 0 for n, dim in zip(shape, axes, strict=True))
    return divides and len({*used}) == len(used)
