"""Finds the candidates that are worth compiling, by their estimates.

A space of up to `MAX_ENUMERATED` points is enumerated. A larger space is searched in three steps: a
beam search over meshes of up to two axes, then splits of mesh axes, then local search. The search
is deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .candidate import Candidate, Objective
from .estimate import Estimator, Totals
from .space import NameSet, Point, Sizes, Space

T = TypeVar('T')

MAX_ENUMERATED = 20_000  # points; an estimate takes 0.1 ms
_MAX_STARTS = 2000  # for each mesh shape, at most this many points start the beam search
_BEAM_WIDTH = 12


@dataclass(frozen=True)
class Candidates:
    """The candidates of a model that are worth compiling.

    Attributes:
        ranked: the best estimate first; candidates that need too much memory come last.
        pruned: how many choices were left out for each reason: {'indivisible': 120}. Depending on
            the reason, a choice is a candidate, an axis name, or a set of axis names.
    """

    ranked: tuple[Candidate, ...]
    pruned: Mapping[str, int]


def find_candidates(
    space: Space,
    estimator: Estimator,
    *,
    memory: float | None,
    objective: Objective = 'bound',
    max_candidates: int = 200,
) -> Candidates:
    """Finds the candidates with the best estimates.

    `memory` is the number of bytes that a candidate may use on a device, or None if unknown.
    """
    search = _CandidateSearch(space, estimator, memory, objective)
    if search.n_points() <= MAX_ENUMERATED:
        search.evaluate(search.all_points())
    else:
        search.beam_search()
        search.split_mesh_axes()
        search.refine()
    best = search.ranked()[:max_candidates]
    simplified = sorted(dict.fromkeys(map(search.simplified, best)), key=search.key)
    pruned = Counter(space.pruned) + search.pruned
    pruned['sharding without effect'] += len(best) - len(simplified)
    return Candidates(
        tuple(map(space.candidate, simplified)), {reason: n for reason, n in pruned.items() if n}
    )


class _CandidateSearch:
    def __init__(
        self, space: Space, estimator: Estimator, memory: float | None, objective: Objective
    ):
        self.space = space
        self.estimator = estimator
        self.memory = math.inf if memory is None else memory
        self.objective: Objective = objective
        self.pruned: Counter[str] = Counter()
        self._keys: dict[Point, tuple[float, ...]] = {}  # the sort key of each evaluated point

    # --- costs --------------------------------------------------------------------------------

    def totals(self, point: Point) -> Totals:
        return self.estimator.totals(self.space.axes(point))

    def key(self, point: Point) -> tuple[float, ...]:
        """Evaluates a point, and returns its sort key. The best point has the smallest key.

        The key consists of the bytes above the memory limit, the objective, the memory, the bytes
        sent, and the number of mesh axes.
        """
        if point not in self._keys:
            totals = self.totals(point)
            excess = max(totals.memory - self.memory, 0)
            costs = {'bound': totals.seconds, 'bytes': totals.sent, 'memory': totals.memory}
            # rounded, because sums that should be equal may differ in their last digits
            numbers = (costs[self.objective], totals.memory, totals.sent)
            rounded = (float(f'{number:.9g}') for number in numbers)
            self._keys[point] = excess, *rounded, len(point[0])
        return self._keys[point]

    def evaluate(self, points: Iterable[Point]) -> None:
        """Evaluates the points that are valid and have no mesh axes that can be merged."""
        for point in points:
            if not self.space.is_valid(point):
                self.pruned['indivisible'] += 1
            elif self.space.merged(point) != point:
                self.pruned['equal to a plan with fewer mesh axes'] += 1
            else:
                self.key(point)

    def best_valid(self, points: Iterable[Point]) -> list[Point]:
        valid = [point for point in points if self.space.is_valid(point)]
        return sorted(dict.fromkeys(valid), key=self.key)[:_BEAM_WIDTH]

    def ranked(self) -> list[Point]:
        """Returns the evaluated points, best first.

        If two points differ only by swapping mesh axes of equal size, only one is returned.
        """
        found: dict[object, Point] = {}
        for point in sorted(self._keys, key=self.key):
            axes = sorted((size, sorted(names)) for size, names in zip(*point, strict=True))
            found.setdefault((point[0], str(axes)), point)
        # not `+=`, because this method is called several times
        self.pruned['equal after renaming mesh axes'] = len(self._keys) - len(found)
        return list(found.values())

    def simplified(self, point: Point) -> Point:
        """Drops names from name sets if that does not raise the cost, and merges mesh axes."""
        sizes, name_sets = point
        for axis, names in enumerate(name_sets):
            for name in sorted(names - self.space.pinned.keys()):
                fewer = _replace_at(name_sets, axis, name_sets[axis] - {name})
                # a mesh axis may shard nothing only if the user chose the mesh shape
                is_allowed = fewer[axis] or self.space.mesh is not None
                if is_allowed and self.key((sizes, fewer)) <= self.key((sizes, name_sets)):
                    name_sets = fewer
        return self.space.merged((sizes, name_sets))

    # --- search -------------------------------------------------------------------------

    def n_points(self) -> int:
        return sum(
            math.prod(len(self.space.name_sets(sizes, axis)) for axis in range(len(sizes)))
            for sizes in self.space.shapes()
        )

    def all_points(self) -> Iterator[Point]:
        for sizes in self.space.shapes():
            name_sets = [self.space.name_sets(sizes, axis) for axis in range(len(sizes))]
            yield from ((sizes, chosen) for chosen in itertools.product(*name_sets))

    def beam_search(self) -> None:
        """Runs a beam search for each mesh shape, over the names of one mesh axis at a time."""
        # two mesh axes are enough unless pins need three, because `split_mesh_axes` adds a third
        for sizes in self.space.shapes(2) or self.space.shapes():
            found = self.best_valid(self.start_points(sizes))
            # backward and forward: the best name set of a mesh axis depends on the other axes
            for axis in (*range(len(sizes))[::-1], *range(len(sizes))):
                changed = [
                    (sizes, _replace_at(name_sets, axis, names))
                    for _, name_sets in found
                    for names in self.space.name_sets(sizes, axis)
                ]
                self.evaluate(changed)
                found = self.best_valid([*found, *changed])

    def start_points(self, sizes: Sizes) -> list[Point]:
        """Combines the name sets that are good for each mesh axis if the others have size 1."""
        good_alone: list[list[NameSet]] = []
        n_each = int(_MAX_STARTS ** (1 / len(sizes)))
        for axis, size in enumerate(sizes):
            # the other mesh axes have size 1 instead of being dropped, because specs may name them
            shape = _replace_at((1,) * len(sizes), axis, size)
            pairs = [
                (names, self.totals((shape, _replace_at((frozenset(),) * len(sizes), axis, names))))
                for names in self.space.name_sets(sizes, axis)
            ]
            by_time = sorted(pairs, key=lambda pair: pair[1].seconds)[:4]
            by_memory = sorted(pairs, key=lambda pair: (pair[1].memory, pair[1].seconds))[:4]
            by_compute = sorted(pairs, key=lambda pair: (pair[1].compute, pair[1].sent))[:4]
            best = itertools.chain(*zip(by_time, by_memory, by_compute, strict=True))
            good_alone.append([*dict.fromkeys(names for names, _ in best)][:n_each])
        return [(sizes, name_sets) for name_sets in itertools.product(*good_alone)]

    def split_mesh_axes(self) -> None:
        if self.space.mesh is not None:
            return
        ranked = self.ranked()
        good = {names for _, name_sets in ranked[: 4 * _BEAM_WIDTH] for names in name_sets}
        for point in ranked[:_BEAM_WIDTH]:
            if len(point[0]) < len(self.space.mesh_axes):
                # mesh axes are named by position: if x is split, y becomes z, and pins to y break
                self.evaluate(filter(self.space.obeys_pins, self.with_split_axis(point, good)))

    def with_split_axis(self, point: Point, good: Container[NameSet]) -> Iterator[Point]:
        """Yields points in which one mesh axis is split into two.

        One of the two axes keeps the name set. The other one gets a name set from `good`.
        """
        sizes, name_sets = point
        first = 1 if self.space.n_slices > 1 else 0  # the axis across slices is not split
        for axis in range(first, len(sizes)):
            for size in range(2, sizes[axis] // 2 + 1):
                if sizes[axis] % size:
                    continue
                split = (*sizes[:axis], size, sizes[axis] // size, *sizes[axis + 1 :])
                for changed in (0, 1):
                    for names in self.space.name_sets(split, axis + changed):
                        pair = (name_sets[axis], names) if changed else (names, name_sets[axis])
                        if names in good:
                            yield split, (*name_sets[:axis], *pair, *name_sets[axis + 1 :])

    def refine(self) -> None:
        """Evaluates the neighbors of the best points until no new point is among the best."""
        tried: set[Point] = set()
        while new := [point for point in self.ranked()[:_BEAM_WIDTH] if point not in tried]:
            tried.update(new)
            for point in new:
                self.evaluate(self.neighbors(point))

    def neighbors(self, point: Point) -> Iterator[Point]:
        """Yields points that differ from `point` by up to two names on one mesh axis."""
        sizes, name_sets = point
        for axis, names in enumerate(name_sets):
            for other in self.space.name_sets(sizes, axis):
                if len(names ^ other) <= 2:
                    yield sizes, _replace_at(name_sets, axis, other)


def _replace_at(items: tuple[T, ...], i: int, new: T) -> tuple[T, ...]:
    return (*items[:i], new, *items[i + 1 :])
