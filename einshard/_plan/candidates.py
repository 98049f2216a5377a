"""Lists the candidates of a model that are worth compiling, the best estimate first.

A plan is a candidate as a `PlanTuple`: a mesh shape, and a set of axis names for each mesh axis.
Spaces of up to `MAX_ENUMERATED` plans are enumerated. In larger ones, a beam search changes the
name set of each mesh axis; then mesh axes are split in two, and name sets change by up to two
names. The same model always gives the same candidates.
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

MAX_ENUMERATED = 20_000  # plans; an estimate takes 0.1 ms
_MAX_STARTS = 2000  # plans from which the beam search starts, for each mesh shape
_BEAM_WIDTH = 12


@dataclass(frozen=True)
class Candidates:
    """The candidates of a model that are worth compiling.

    Attributes:
        ranked: the best estimate first; candidates that need too much memory come last.
        pruned: what was left out, as {reason: number}: {'indivisible': 120}. The number is of
            candidates, of axis names, or of sets of axis names to shard over one mesh axis.
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
    """Finds the candidates with the best estimates, sharding axes only where it lowers the cost.

    `memory` is the bytes that a candidate may use on a device; None if unknown.
    """
    search = _CandidateSearch(space, estimator, memory, objective)
    if search.n_plans() <= MAX_ENUMERATED:
        search.add(search.all_plans())
    else:
        search.vary_names()
        search.split()
        search.refine()
    best = search.ranked()[:max_candidates]
    simplified = sorted(dict.fromkeys(map(search.simplified, best)), key=search.key)
    pruned = Counter(space.pruned) + search.pruned
    pruned['without effect'] += len(best) - len(simplified)
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
        self._keys: dict[PlanTuple, tuple[float, ...]] = {}  # sort keys of the evaluated plans

    # --- costs --------------------------------------------------------------------------------

    def totals(self, plan: PlanTuple) -> Totals:
        return self.estimator.totals(self.space.axes(plan))

    def key(self, plan: PlanTuple) -> tuple[float, ...]:
        """Evaluates a plan, and returns its sort key, which is smallest for the best plan.

        The key is the bytes above the memory limit, the objective, memory, bytes sent, and the
        number of mesh axes.
        """
        key = self._keys.get(plan)
        if key is None:
            totals = self.totals(plan)
            excess = max(totals.memory - self.memory, 0)
            costs = {'bound': totals.seconds, 'bytes': totals.sent, 'memory': totals.memory}
            # rounded, because sums that should be equal may differ in their last digits
            numbers = (costs[self.objective], totals.memory, totals.sent)
            key = excess, *(float(f'{number:.9g}') for number in numbers), len(plan[0])
            self._keys[plan] = key
        return key

    def add(self, plans: Iterable[PlanTuple]) -> None:
        """Evaluates plans, but not those that are invalid or equal a plan with fewer mesh axes."""
        for plan in plans:
            if not self.space.is_valid(plan):
                self.pruned['indivisible'] += 1
            elif self.merged(plan) != plan:
                self.pruned['same as with fewer mesh axes'] += 1
            else:
                self.key(plan)

    def best(self, plans: Iterable[PlanTuple]) -> list[PlanTuple]:
        valid = [plan for plan in plans if self.space.is_valid(plan)]
        return sorted(dict.fromkeys(valid), key=self.key)[:_BEAM_WIDTH]

    def ranked(self) -> list[PlanTuple]:
        """Returns the evaluated plans, best first, without repeats after renaming mesh axes."""
        found: dict[object, PlanTuple] = {}
        for plan in sorted(self._keys, key=self.key):
            axes = sorted((size, sorted(names)) for size, names in zip(*plan, strict=True))
            found.setdefault((plan[0], str(axes)), plan)
        # not `+=`, because this method is called several times
        self.pruned['same after renaming mesh axes'] = len(self._keys) - len(found)
        return list(found.values())

    def simplified(self, plan: PlanTuple) -> PlanTuple:
        """Removes names from mesh axes if that does not raise the cost, and merges mesh axes."""
        sizes, name_sets = plan
        for axis, names in enumerate(name_sets):
            for name in sorted(names - self.space.pinned.keys()):
                fewer = _replaced(name_sets, axis, name_sets[axis] - {name})
                # a mesh axis may shard nothing only if the user chose the mesh shape
                is_allowed = fewer[axis] or self.space.mesh is not None
                if is_allowed and self.key((sizes, fewer)) <= self.key((sizes, name_sets)):
                    name_sets = fewer
        return self.merged((sizes, name_sets))

    def merged(self, plan: PlanTuple) -> PlanTuple:
        """Merges the mesh axes that shard the same names, except the one across TPU slices."""
        if self.space.mesh is not None or any(self.space.pinned.values()):
            return plan  # the user has named mesh axes
        sizes: dict[tuple[NameSet, bool], int] = {}
        for i, (size, names) in enumerate(zip(*plan, strict=True)):
            key = names, i == 0 and self.space.n_slices > 1
            sizes[key] = sizes.get(key, 1) * size
        return tuple(sizes.values()), tuple(names for names, _ in sizes)

    # --- the steps ----------------------------------------------------------------------------

    def n_plans(self) -> int:
        return sum(
            math.prod(len(self.space.name_sets(sizes, axis)) for axis in range(len(sizes)))
            for sizes in self.space.shapes()
        )

    def all_plans(self) -> Iterator[PlanTuple]:
        for sizes in self.space.shapes():
            name_sets = [self.space.name_sets(sizes, axis) for axis in range(len(sizes))]
            yield from ((sizes, chosen) for chosen in itertools.product(*name_sets))

    def vary_names(self) -> None:
        """Runs a beam search for each mesh shape, over the names of one mesh axis at a time."""
        # Up to two mesh axes, unless pinned names need three; `split` adds more.
        for sizes in self.space.shapes(2) or self.space.shapes():
            found = self.best(self.starts(sizes))
            # backward and forward: the best name set of a mesh axis depends on the other axes
            for axis in (*range(len(sizes))[::-1], *range(len(sizes))):
                changed = [
                    (sizes, _replaced(name_sets, axis, names))
                    for _, name_sets in found
                    for names in self.space.name_sets(sizes, axis)
                ]
                self.add(changed)
                found = self.best([*found, *changed])

    def starts(self, sizes: Sizes) -> list[PlanTuple]:
        """Combines the name sets that are best for each mesh axis alone, to start the search."""
        best_alone: list[list[NameSet]] = []
        n_each = int(_MAX_STARTS ** (1 / len(sizes)))
        for axis, size in enumerate(sizes):
            # the other mesh axes get size 1: they cannot be dropped, because specs may name them
            shape = _replaced((1,) * len(sizes), axis, size)
            pairs = [
                (names, self.totals((shape, _replaced((frozenset(),) * len(sizes), axis, names))))
                for names in self.space.name_sets(sizes, axis)
            ]
            by_time = sorted(pairs, key=lambda pair: pair[1].seconds)[:4]
            by_memory = sorted(pairs, key=lambda pair: (pair[1].memory, pair[1].seconds))[:4]
            by_compute = sorted(pairs, key=lambda pair: (pair[1].compute, pair[1].sent))[:4]
            best = itertools.chain(*zip(by_time, by_memory, by_compute, strict=True))
            best_alone.append([*dict.fromkeys(names for names, _ in best)][:n_each])
        return [(sizes, name_sets) for name_sets in itertools.product(*best_alone)]

    def split(self) -> None:
        if self.space.mesh is not None:
            return
        ranked = self.ranked()
        good = {names for _, name_sets in ranked[: 4 * _BEAM_WIDTH] for names in name_sets}
        for plan in ranked[:_BEAM_WIDTH]:
            if len(plan[0]) < len(self.space.mesh_axes):
                # splitting x renames y to z, so names pinned to y may now be sharded over z
                self.add(filter(self.space.obeys_pins, self.splits(plan, good)))

    def splits(self, plan: PlanTuple, good: Container[NameSet]) -> Iterator[PlanTuple]:
        """Yields plans in which one mesh axis is split in two.

        One of the two axes shards the same names as before, the other a name set in `good`.
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
        """Evaluates the neighbors of the best plans, until the best plans stay the same."""
        tried: set[PlanTuple] = set()
        while new := [plan for plan in self.ranked()[:_BEAM_WIDTH] if plan not in tried]:
            tried.update(new)
            for plan in new:
                self.add(self.neighbors(plan))

    def neighbors(self, plan: PlanTuple) -> Iterator[PlanTuple]:
        """Yields the plans that differ from `plan` in up to two names of one mesh axis."""
        sizes, name_sets = plan
        for axis, names in enumerate(name_sets):
            for other in self.space.name_sets(sizes, axis):
                if len(names ^ other) <= 2:
                    yield sizes, _replaced(name_sets, axis, other)


def _replaced(items: tuple[T, ...], i: int, new: T) -> tuple[T, ...]:
    return (*items[:i], new, *items[i + 1 :])
