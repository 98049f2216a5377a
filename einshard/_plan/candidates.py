"""Lists the candidates of a model that are worth compiling, the best estimate first.

A small space is enumerated. In a large one, a beam search changes the set of names that a mesh axis
shards, one mesh axis at a time; then mesh axes are split in two, and names are added, removed and
replaced. The same model always gives the same candidates.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .candidate import Candidate
from .estimate import Estimator, Totals
from .judgement import Objective
from .space import NameSet, PlanTuple, Sizes, Space

T = TypeVar('T')

# spaces of up to this many plans are enumerated; each plan takes 0.1 ms
MAX_ENUMERATED = 20_000
# the beam search starts from at most this many plans for each mesh shape
_STARTS = 2000
# how many plans each step of the beam search keeps
_BEAM = 12


@dataclass(frozen=True)
class Candidates:
    """The candidates of a model that are worth compiling.

    Attributes:
        ranked: the best estimate first; those that need too much memory come last.
        pruned: how many plans, names or sets of names were left out, by reason:
            {'indivisible': 120}.
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
    """Finds the candidates with the best estimates in a space.

    Names whose sharding does not lower the cost are left unsharded.

    Args:
        memory: the bytes that a plan may use on a device; None if unknown.
    """
    search = _CandidateSearch(space, estimator, memory, objective)
    if search.n_plans() <= MAX_ENUMERATED:
        search.add(search.all_plans())
    else:
        search.vary_names()
        search.split()
        search.refine()
    best = search.ranked()[:max_candidates]
    simple = sorted(dict.fromkeys(map(search.simplified, best)), key=search.key)
    pruned = Counter(space.pruned) + search.pruned
    pruned['without effect'] += len(best) - len(simple)
    return Candidates(
        tuple(map(space.candidate, simple)), {reason: n for reason, n in pruned.items() if n}
    )


class _CandidateSearch:
    """A search for the best plans of a space. It keeps the sort key of each plan it evaluates."""

    def __init__(
        self, space: Space, estimator: Estimator, memory: float | None, objective: Objective
    ):
        self.space = space
        self.estimator = estimator
        self.memory = math.inf if memory is None else memory
        self.objective: Objective = objective
        self.pruned: Counter[str] = Counter()
        self._keys: dict[PlanTuple, tuple[float, ...]] = {}  # of the evaluated plans

    # --- costs --------------------------------------------------------------------------------

    def totals(self, plan: PlanTuple) -> Totals:
        return self.estimator.totals(self.space.axes(plan))

    def key(self, plan: PlanTuple) -> tuple[float, ...]:
        """Returns the sort key of a plan, and keeps it.

        It has the memory that a device lacks, the objective, memory, bytes sent, and the number of
        mesh axes.
        """
        key = self._keys.get(plan)
        if key is None:
            totals = self.totals(plan)
            missing = max(totals.memory - self.memory, 0)
            first = {'bound': totals.seconds, 'bytes': totals.sent, 'memory': totals.memory}
            # rounded, because equal sums of many numbers may differ in their last digits
            numbers = (first[self.objective], totals.memory, totals.sent)
            key = missing, *(float(f'{number:.9g}') for number in numbers), len(plan[0])
            self._keys[plan] = key
        return key

    def add(self, plans: Iterable[PlanTuple]) -> None:
        """Evaluates plans; leaves out those that are not valid, or repeat one with fewer axes."""
        for plan in plans:
            if not self.space.is_valid(plan):
                self.pruned['indivisible'] += 1
            elif self.merged(plan) != plan:
                self.pruned['same as with fewer mesh axes'] += 1
            else:
                self.key(plan)

    def best(self, plans: Iterable[PlanTuple]) -> list[PlanTuple]:
        """Returns the best valid plans, as many as a step of the beam search keeps."""
        valid = [plan for plan in plans if self.space.is_valid(plan)]
        return sorted(dict.fromkeys(valid), key=self.key)[:_BEAM]

    def ranked(self) -> list[PlanTuple]:
        """Returns the evaluated plans, best first, without those that only rename mesh axes."""
        found: dict[object, PlanTuple] = {}
        for plan in sorted(self._keys, key=self.key):
            axes = sorted((size, sorted(names)) for size, names in zip(*plan, strict=True))
            found.setdefault((plan[0], str(axes)), plan)
        # not added up, because a search ranks its plans several times
        self.pruned['same after renaming mesh axes'] = len(self._keys) - len(found)
        return list(found.values())

    def simplified(self, plan: PlanTuple) -> PlanTuple:
        """Removes names whose sharding does not lower the cost of a plan, and merges mesh axes."""
        sizes, name_sets = plan
        for axis, names in enumerate(name_sets):
            for name in sorted(names - self.space.pinned.keys()):
                fewer = _replaced(name_sets, axis, name_sets[axis] - {name})
                # each mesh axis must shard something, except those of the user
                is_allowed = fewer[axis] or self.space.mesh is not None
                if is_allowed and self.key((sizes, fewer)) <= self.key((sizes, name_sets)):
                    name_sets = fewer
        return self.merged((sizes, name_sets))

    def merged(self, plan: PlanTuple) -> PlanTuple:
        """Merges mesh axes that shard the same names, except the axis across slices."""
        if self.space.mesh is not None or any(self.space.pinned.values()):
            return plan  # the user has named the mesh axes
        sizes: dict[tuple[NameSet, bool], int] = {}
        for i, (size, names) in enumerate(zip(*plan, strict=True)):
            key = names, i == 0 and self.space.n_slices > 1
            sizes[key] = sizes.get(key, 1) * size
        return tuple(sizes.values()), tuple(names for names, _ in sizes)

    # --- the steps ----------------------------------------------------------------------------

    def n_plans(self) -> int:
        """Counts the plans in the space."""
        return sum(
            math.prod(len(self.space.name_sets(sizes, axis)) for axis in range(len(sizes)))
            for sizes in self.space.shapes()
        )

    def all_plans(self) -> Iterator[PlanTuple]:
        for sizes in self.space.shapes():
            name_sets = [self.space.name_sets(sizes, axis) for axis in range(len(sizes))]
            yield from ((sizes, chosen) for chosen in itertools.product(*name_sets))

    def vary_names(self) -> None:
        """Tries all name sets of each mesh axis in turn, in the best plans of each mesh shape."""
        # shapes with more axes come from `split`, unless pins need more
        for sizes in self.space.shapes(2) or self.space.shapes():
            found = self.best(self.starts(sizes))
            # in both directions, because the best set for an axis depends on those of the others
            for axis in (*range(len(sizes))[::-1], *range(len(sizes))):
                changed = [
                    (sizes, _replaced(name_sets, axis, names))
                    for _, name_sets in found
                    for names in self.space.name_sets(sizes, axis)
                ]
                self.add(changed)
                found = self.best([*found, *changed])

    def starts(self, sizes: Sizes) -> list[PlanTuple]:
        """Combines name sets that are best for one mesh axis alone, by time, memory or compute."""
        alone: list[list[NameSet]] = []
        n_each = int(_STARTS ** (1 / len(sizes)))
        for axis, size in enumerate(sizes):
            # the other mesh axes stay, with size 1, because specs may name them
            shape = _replaced((1,) * len(sizes), axis, size)
            costs = [
                (names, self.totals((shape, _replaced((frozenset(),) * len(sizes), axis, names))))
                for names in self.space.name_sets(sizes, axis)
            ]
            by_time = sorted(costs, key=lambda one: one[1].seconds)[:4]
            by_memory = sorted(costs, key=lambda one: (one[1].memory, one[1].seconds))[:4]
            by_compute = sorted(costs, key=lambda one: (one[1].compute, one[1].sent))[:4]
            best = itertools.chain(*zip(by_time, by_memory, by_compute, strict=True))
            alone.append([*dict.fromkeys(names for names, _ in best)][:n_each])
        return [(sizes, name_sets) for name_sets in itertools.product(*alone)]

    def split(self) -> None:
        """Splits mesh axes of the best plans in two, and gives one of the two another name set."""
        if self.space.mesh is not None:
            return
        ranked = self.ranked()
        good = {names for _, name_sets in ranked[: 4 * _BEAM] for names in name_sets}
        for plan in ranked[:_BEAM]:
            if len(plan[0]) < len(self.space.mesh_axes):
                # pins name mesh axes, and those after the split one get other names (y becomes z)
                self.add(filter(self.space.obeys_pins, self.splits(plan, good)))

    def splits(self, plan: PlanTuple, good: Container[NameSet]) -> Iterator[PlanTuple]:
        """Yields plans with two mesh axes in place of one.

        One of the two has the names of that axis, the other a name set in `good`.
        """
        sizes, name_sets = plan
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
        """Changes up to two names of a mesh axis in the best plans, until these stay the same."""
        tried: set[PlanTuple] = set()
        while new := [plan for plan in self.ranked()[:_BEAM] if plan not in tried]:
            tried.update(new)
            for plan in new:
                self.add(self.neighbors(plan))

    def neighbors(self, plan: PlanTuple) -> Iterator[PlanTuple]:
        """Yields the plans that differ in up to two names of one mesh axis."""
        sizes, name_sets = plan
        for axis, names in enumerate(name_sets):
            for other in self.space.name_sets(sizes, axis):
                if len(names ^ other) <= 2:
                    yield sizes, _replaced(name_sets, axis, other)


def _replaced(items: tuple[T, ...], i: int, new: T) -> tuple[T, ...]:
    return (*items[:i], new, *items[i + 1 :])
