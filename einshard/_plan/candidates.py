"""Lists the candidates of a model that are worth compiling, the best estimate first.

The role of a mesh axis is the set of axis names that it shards. A small space is enumerated. In a
large one, a beam search changes the role of one mesh axis at a time; then mesh axes are split in
two, and single names are added and removed. The search is deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .candidate import Candidate
from .estimate import Estimator, Totals
from .judgement import Objective
from .space import Plan, Role, Sizes, Space

# spaces of up to this many plans are enumerated; each plan takes 0.1 ms
FULL = 20_000
# the number of plans that the search starts from, for each mesh shape
STARTS = 2000
# the number of plans that each step of the search keeps
BEAM = 12


@dataclass(frozen=True)
class Candidates:
    """The candidates of a model, the best estimate first.

    Attributes:
        found: each with its estimate; those that need too much memory come last.
        pruned: how many plans, or roles of mesh axes, were left out, by reason.
        is_complete: whether the space was enumerated.
    """

    found: tuple[tuple[Candidate, Totals], ...]
    pruned: Mapping[str, int]
    is_complete: bool


def find_candidates(
    space: Space,
    estimator: Estimator,
    *,
    memory: float | None,
    objective: Objective = 'bound',
    limit: int = 200,
) -> Candidates:
    """Searches the candidates of a space.

    Args:
        memory: the bytes that a device has; None if unknown.
        limit: the number of candidates to return.
    """
    search = _Search(space, estimator, memory, objective)
    is_complete = search.n_plans() <= FULL
    if is_complete:
        search.add(search.all_plans())
    else:
        search.vary_roles()
        search.split()
        search.refine()
    ranked = search.ranked()
    simple = list(dict.fromkeys(search.simplified(plan) for plan in ranked[:limit]))
    simple.sort(key=search.key)
    pruned = Counter(space.pruned) + search.pruned
    pruned['without effect'] += len(ranked[:limit]) - len(simple)
    return Candidates(
        tuple((space.candidate(plan), search.known[plan]) for plan in simple),
        {reason: n for reason, n in pruned.items() if n},
        is_complete,
    )


class _Search:
    def __init__(
        self, space: Space, estimator: Estimator, memory: float | None, objective: Objective
    ):
        self.space = space
        self.estimator = estimator
        self.memory = math.inf if memory is None else memory
        self.objective: Objective = objective
        self.known: dict[Plan, Totals] = {}
        self.keys: dict[Plan, tuple[float, ...]] = {}
        self.pruned: Counter[str] = Counter()

    # --- costs --------------------------------------------------------------------------------

    def totals(self, plan: Plan) -> Totals:
        known = self.known.get(plan)
        if known is None:
            known = self.known[plan] = self.estimator.totals(self.space.axes(plan))
        return known

    def key(self, plan: Plan) -> tuple[float, ...]:
        """Returns the sort key of a plan: whether it fits, the objective, memory, bytes sent."""
        known = self.keys.get(plan)
        if known is None:
            known = self.keys[plan] = self._key(plan)
        return known

    def _key(self, plan: Plan) -> tuple[float, ...]:
        totals = self.totals(plan)
        over = max(totals.memory - self.memory, 0)
        first = {'bound': totals.seconds, 'bytes': totals.sent, 'memory': totals.memory}
        # rounded, because equal sums of many numbers may differ in their last digits
        numbers = (first[self.objective], totals.memory, totals.sent)
        return (over, *(float(f'{number:.9g}') for number in numbers), len(plan[0]))

    def add(self, plans: Iterable[Plan]) -> None:
        for plan in plans:
            if not self.space.is_valid(plan):
                self.pruned['indivisible'] += 1
            elif self.merged(plan) != plan:
                self.pruned['same as with fewer mesh axes'] += 1
            else:
                self.totals(plan)

    def best(self, plans: Iterable[Plan], n: int) -> list[Plan]:
        kept = [plan for plan in plans if self.space.is_valid(plan)]
        return sorted(dict.fromkeys(kept), key=self.key)[:n]

    def ranked(self) -> list[Plan]:
        """Returns all plans, best first, without those that only rename the mesh axes."""
        found: dict[object, Plan] = {}
        for plan in sorted(self.known, key=self.key):
            same = tuple(sorted((size, sorted(role)) for size, role in zip(*plan, strict=True)))
            same = plan[0], str(same)
            if same in found:
                self.pruned['same after renaming mesh axes'] += 1
            found.setdefault(same, plan)
        return list(found.values())

    def simplified(self, plan: Plan) -> Plan:
        """Returns the plan without the names whose sharding does not lower its cost."""
        sizes, roles = plan
        for axis, name in [(i, name) for i, role in enumerate(roles) for name in sorted(role)]:
            if name in self.space.pinned:
                continue
            fewer = (*roles[:axis], roles[axis] - {name}, *roles[axis + 1 :])
            may_be_unused = fewer[axis] or self.space.mesh is not None
            if may_be_unused and self.key((sizes, fewer)) <= self.key((sizes, roles)):
                roles = fewer
        return self.merged((sizes, roles))

    def merged(self, plan: Plan) -> Plan:
        """Merges mesh axes that shard the same names, except the axis between slices."""
        if self.space.mesh is not None or any(self.space.pinned.values()):
            return plan  # the user has named the mesh axes
        sizes: dict[tuple[Role, bool], int] = {}
        for i, (size, role) in enumerate(zip(*plan, strict=True)):
            key = role, i == 0 and self.space.n_slices > 1
            sizes[key] = sizes.get(key, 1) * size
        return tuple(sizes.values()), tuple(role for role, _ in sizes)

    # --- the steps ----------------------------------------------------------------------------

    def n_plans(self) -> int:
        """The number of plans in the space."""
        return sum(
            math.prod(len(self.space.roles(sizes, axis)) for axis in range(len(sizes)))
            for n_axes in self.axis_counts
            for sizes in self.space.shapes(n_axes)
        )

    @property
    def axis_counts(self) -> range:
        return range(1, max(len(self.space.mesh_axes), 1) + 1)

    def all_plans(self) -> Iterator[Plan]:
        for n_axes in self.axis_counts:
            for sizes in self.space.shapes(n_axes):
                roles = [self.space.roles(sizes, axis) for axis in range(n_axes)]
                yield from ((sizes, chosen) for chosen in itertools.product(*roles))

    def vary_roles(self) -> None:
        """Tries all roles of one mesh axis, with the best roles of the others, for each axis."""
        counts = self.axis_counts if self.space.mesh else self.axis_counts[:2]
        for n_axes in counts:
            for sizes in self.space.shapes(n_axes):
                found = self.best(self.starts(sizes), BEAM)
                for axis in (*range(n_axes)[::-1], *range(n_axes)):
                    changed = [
                        (sizes, (*roles[:axis], role, *roles[axis + 1 :]))
                        for _, roles in found
                        for role in self.space.roles(sizes, axis)
                    ]
                    self.add(changed)
                    found = self.best([*found, *changed], BEAM)

    def starts(self, sizes: Sizes) -> list[Plan]:
        """Combines the roles that are best for each mesh axis alone, by time, memory and bytes."""
        alone: list[list[Role]] = []
        most = int(STARTS ** (1 / len(sizes)))
        for axis, size in enumerate(sizes):
            plans = [((size,), (role,)) for role in self.space.roles(sizes, axis)]
            keys = [(plan, self.estimator.totals(self.space.axes(plan))) for plan in plans]
            by_time = sorted(keys, key=lambda one: one[1].seconds)[:4]
            by_memory = sorted(keys, key=lambda one: (one[1].memory, one[1].seconds))[:4]
            by_bytes = sorted(keys, key=lambda one: (one[1].compute, one[1].sent))[:4]
            best = itertools.chain(*zip(by_time, by_memory, by_bytes, strict=True))
            alone.append([*dict.fromkeys(plan[1][0] for plan, _ in best)][:most])
        return [(sizes, roles) for roles in itertools.product(*alone)]

    def split(self) -> None:
        """Splits a mesh axis of the best plans; one half gets a role from another good plan."""
        if self.space.mesh is not None:
            return
        ranked = self.ranked()
        good = {role for _, roles in ranked[: 4 * BEAM] for role in roles}
        for plan in ranked[:BEAM]:
            if len(plan[0]) < len(self.space.mesh_axes):
                self.add(self.splits(plan, good))

    def splits(self, plan: Plan, good: Container[Role]) -> Iterator[Plan]:
        sizes, roles = plan
        first = 1 if self.space.n_slices > 1 else 0
        for axis in range(first, len(sizes)):
            for part in range(2, sizes[axis] // 2 + 1):
                if sizes[axis] % part:
                    continue
                both = (*sizes[:axis], part, sizes[axis] // part, *sizes[axis + 1 :])
                for at in (0, 1):
                    for role in self.space.roles(both, axis + at):
                        pair = (role, roles[axis]) if at == 0 else (roles[axis], role)
                        if role in good:
                            yield both, (*roles[:axis], *pair, *roles[axis + 1 :])

    def refine(self) -> None:
        """Adds and removes single names of the best plans, as long as that helps."""
        tried: set[Plan] = set()
        while True:
            new = [plan for plan in self.ranked()[:BEAM] if plan not in tried]
            if not new:
                return
            tried.update(new)
            for plan in new:
                self.add(self.neighbors(plan))

    def neighbors(self, plan: Plan) -> Iterator[Plan]:
        sizes, roles = plan
        for axis, role in enumerate(roles):
            for other in self.space.roles(sizes, axis):
                if len(role ^ other) <= 2:
                    yield sizes, (*roles[:axis], other, *roles[axis + 1 :])
