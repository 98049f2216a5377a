"""Finds the candidates of a program that are worth compiling, by their scores.

A mesh axis shards a set of axis names. Sets grow by one class at a time, which is placed in the
weights, in the activations or in both. Sets that are good alone are combined on meshes of two and
three axes, and the best of these are refined.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from math import inf

from .candidate import Candidate, Objective
from .named_classes import ACTIVATION
from .scores import Scores
from .space import NameSet, Point, Sizes, Space

_BEAM = 3
_N_SIMPLIFIED = 6
_NEAR = 1.25  # of the best score
_NOTHING = 2e-3  # of the score: what saves less is not needed
_MAX_NAMES = 6  # on one mesh axis
_N_ALONE = 3  # sets of a mesh axis that are combined
_N_SPLIT = 3  # points on two mesh axes that get a third
_N_REFINED = 1
_N_REFINED_OF_CHEAP = 4  # of steps that take little time to score
_N_ATOMS = 10  # classes that sets grow by
# operations in all propagated candidates: some 15 s
_MAX_STEPS = 400_000
_MIN_SCORED, _MAX_SCORED = 150, 800


class Starts:
    """The candidates of a program, by their scores.

    Args:
        memory: the bytes that a candidate may use on a device, or None if unknown.
        end: when no more are scored, as `time.monotonic()`.
    """

    def __init__(
        self,
        scores: Scores,
        space: Space,
        memory: float | None,
        objective: Objective = 'bound',
        end: float = inf,
    ):
        self._scores, self._space, self._objective, self._end = scores, space, objective, end
        self._memory = inf if memory is None else memory
        self._keys: dict[Point, tuple[float, ...]] = {}
        self._left = min(_MAX_SCORED, max(_MIN_SCORED, _MAX_STEPS // scores.n_operations))
        self._enough = self._left // 2
        self._good: dict[object, list[NameSet]] = {}
        names = space.model.sizes
        weights = [n for n in names if not n.startswith(ACTIVATION)]
        atoms: list[NameSet] = []
        for name in weights:
            atoms.append(frozenset((name,)))
            if (other := ACTIVATION + name) in names:
                atoms += [frozenset((other,)), frozenset((name, other))]
        rest = [n for n in names if n.startswith(ACTIVATION) and n[len(ACTIVATION) :] not in names]
        self._atoms = [*atoms, *(frozenset((name,)) for name in rest)]

    def find(self, n: int = 200) -> list[Candidate]:
        """Returns the best candidates, the best first."""
        shapes = self._space.shapes()
        for n_axes in range(1, 1 + max(map(len, shapes), default=0)):
            for sizes in shapes:
                if len(sizes) == n_axes:
                    self._combine(sizes)
            refined = set[Point]()
            while len(refined) < _N_REFINED or self._left > self._enough:
                best = [p for p in self.ranked() if len(p[0]) == n_axes][:_N_REFINED_OF_CHEAP]
                point = next((p for p in best if p not in refined), None)
                if point is None or self._is_over():
                    break
                self._evaluate(self._neighbors(point))
                refined.add(point)
        best = dict.fromkeys(map(self._simplified, self.ranked()[:_N_SIMPLIFIED]))
        rest = [point for point in self.ranked() if point not in best]
        points = [*sorted(best, key=self._key), *rest]
        # scores that are near tell less than memory does
        limit = _NEAR * self._key(points[0])[1] if points else 0.0
        near = [point for point in points if self._key(point)[1] <= limit]
        near.sort(key=lambda point: (self._key(point)[0], self._key(point)[2]))
        pairs = itertools.zip_longest(points, near)
        mixed = dict.fromkeys(point for pair in pairs for point in pair if point is not None)
        return [self._space.candidate(point) for point in itertools.islice(mixed, n)]

    def ranked(self) -> list[Point]:
        """The points, the best first; of those with the same costs, the one with fewest names."""
        merged = [point for point in self._keys if self._space.merged(point) == point]
        if self._space.n_slices > 1 and self._space.mesh is None:
            # slices compute the same only if they cannot divide the batch
            merged = [point for point in merged if point[1][0]] or merged
        merged.sort(key=lambda point: (self._keys[point], sum(map(len, point[1]))))
        found: dict[object, Point] = {}
        for point in merged:
            excess, seconds, memory, _ = self._keys[point]
            if seconds < inf:
                found.setdefault((tuple(sorted(point[0])), excess, seconds, memory), point)
        return [*found.values()]

    def _combine(self, sizes: Sizes) -> None:
        """Evaluates the sets of names that are good for each mesh axis together.

        Of three axes, two shard what is good on meshes of two.
        """
        each = [self._alone(sizes, axis) for axis in range(len(sizes))]
        if len(sizes) < 3 or self._space.mesh is not None:
            self._evaluate((sizes, sets) for sets in itertools.product(*each))
            return
        good = [sets for _, sets in self.ranked()[:_N_SPLIT] if len(sets) == 2]
        for (a, b), third in itertools.product(good, dict.fromkeys(itertools.chain(*each))):
            ways = [(a, b, third), (a, third, b), (third, a, b)]
            if self._space.n_slices > 1:  # a is across slices
                ways.pop()
            self._evaluate((sizes, sets) for sets in ways)

    def _simplified(self, point: Point) -> Point:
        """Drops classes that save nothing."""
        sizes, sets = point
        limit = self._key(point)[1] * (1 + _NOTHING)
        for axis, names in enumerate(sets):
            for name in sorted(names - self._space.pinned.keys(), reverse=True):
                fewer = _replace_at(sets, axis, sets[axis] - {name})
                if fewer[axis] or self._space.mesh is not None:
                    key = self._key((sizes, fewer))
                    if key[0] <= self._key((sizes, sets))[0] and key[1] <= limit:
                        sets = fewer
        return self._space.merged((sizes, sets))

    def _key(self, point: Point) -> tuple[float, ...]:
        if point not in self._keys:
            candidate = self._space.candidate(point)
            score = self._scores.score(candidate)
            self._left -= 1
            if score is None:
                self._keys[point] = (inf, inf, inf, len(point[0]))
            else:
                memory = self._scores.peak(candidate, score)
                excess = max(0.0, memory - self._memory)
                cost = memory if self._objective == 'memory' else score.seconds
                self._keys[point] = excess, float(f'{cost:.4g}'), memory, len(point[0])
        return self._keys[point]

    def _is_over(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._end

    def _evaluate(self, points: Iterable[Point]) -> None:
        for point in points:
            if self._is_over():
                return
            # mesh axes that shard the same names are one
            is_one = self._space.merged(point) != point and len({*point[1]}) == 1
            if self._space.is_valid(point) and not is_one:
                self._key(point)

    def _alone(self, sizes: Sizes, axis: int) -> list[NameSet]:
        """The best sets of names for a mesh axis while the others shard only what is pinned.

        First any, then without the batch, which is mostly best on one of the axes. Axes of two
        sizes that divide the same classes have the same sets.
        """
        allowed = tuple(self._allowed(sizes, axis, self._pinned(axis), self._atoms))
        key = allowed, self._pinned(axis)
        if key not in self._good:
            found = self._grown(sizes, axis, allowed)
            batch = self._space.batch_names()
            if rest := tuple(atom for atom in allowed if atom.isdisjoint(batch)):
                found += self._grown(sizes, axis, rest)
            self._good[key] = [*dict.fromkeys(found)]
        return self._good[key]

    def _grown(self, sizes: Sizes, axis: int, atoms: Iterable[NameSet]) -> list[NameSet]:
        first = tuple(self._pinned(i) for i in range(len(sizes)))
        beam, scored = [first], list[tuple[NameSet, ...]]()

        def order(sets: tuple[NameSet, ...]) -> tuple[float, ...]:
            # what does not fit may fit if the other mesh axes are used, too
            key = self._keys[sizes, sets]
            return key if len(sizes) == 1 else key[1:]

        found, is_first = {first: None}, True
        for _ in range(_MAX_NAMES):
            grown = [
                _replace_at(sets, axis, sets[axis] | atom)
                for sets in beam
                for atom in self._allowed(sizes, axis, sets[axis], atoms)
            ]
            new = [sets for sets in dict.fromkeys(grown) if sets not in found]
            self._evaluate((sizes, sets) for sets in [*beam, *new])
            found |= dict.fromkeys(new)
            before = order(scored[0]) if scored else None
            scored = [sets for sets in found if (sizes, sets) in self._keys]
            scored.sort(key=order)
            if not scored or self._is_over() or order(scored[0]) == before:
                break
            if is_first:  # what is worst alone is not combined
                alone = [sets[axis] - first[axis] for sets in scored]
                atoms = [names for names in alone if names in atoms][:_N_ATOMS]
                is_first = False
            beam = scored[:_BEAM]
        by_time, by_memory = (
            sorted(scored, key=lambda sets: self._keys[sizes, sets][i]) for i in (1, 2)
        )
        best = [*scored[:_N_ALONE], *by_time[: _N_ALONE - 1], *by_memory[:1]]
        return [sets[axis] for sets in best]

    def _pinned(self, axis: int) -> NameSet:
        name = self._space.mesh_axes[axis]
        return frozenset(n for n, axes in self._space.pinned.items() if name in axes)

    def _allowed(
        self, sizes: Sizes, axis: int, names: NameSet, atoms: Iterable[NameSet]
    ) -> Iterator[NameSet]:
        """The classes that can be added to the names of a mesh axis."""
        space = self._space
        others = set[str]().union(*(space.conflicts[name] for name in names))
        own = space.mesh_axes[axis] if space.mesh is not None else None
        across = space.n_slices > 1 and space.mesh is None and axis == 0
        batch = space.batch_names() if across else ()
        for atom in atoms:
            if atom <= names or not atom.isdisjoint(space.pinned) or not atom.isdisjoint(others):
                continue
            if any(space.model.divisors[name] % sizes[axis] for name in atom):
                continue
            if any(own in space.conflicts[name] for name in atom):  # as b of 'a@data b', over data
                continue
            if not across or all(name in batch for name in atom):
                yield atom

    def _neighbors(self, point: Point) -> Iterator[Point]:
        """Points with one class more or less on one mesh axis."""
        sizes, sets = point
        for axis, names in enumerate(sets):
            for atom in self._atoms:
                if atom <= names and atom.isdisjoint(self._space.pinned):
                    yield sizes, _replace_at(sets, axis, names - atom)
            for atom in self._allowed(sizes, axis, names, self._atoms):
                yield sizes, _replace_at(sets, axis, names | atom)


def _replace_at(sets: tuple[NameSet, ...], i: int, new: NameSet) -> tuple[NameSet, ...]:
    return (*sets[:i], new, *sets[i + 1 :])
