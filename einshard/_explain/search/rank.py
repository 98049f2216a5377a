"""Ranks the neighbours of a program by what the compiler's own propagation says they cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import Any

from ..._program.cost.score import Costs, Score
from ..._program.traced.outline import Place
from ..._program.traced.propagated import Axes
from ..._program.traced.shardy import NotPropagated
from ..._program.traced.variants import Variants
from .groups import Group
from .neighbours import Neighbour, find_neighbours, pairs

# changes of different groups whose pairs are scored
_N_PAIRED = 6
# operations in all propagated neighbours: some 20 s
_MAX_STEPS = 600_000
_MIN_SCORED = 100
_IN_CODE = frozenset(('constraint', 'value', 'through'))
# scores that differ by less are equal: 0.1 %
_EQUAL = 1e-3
# simpler changes come first among equals
_KINDS = ('argument', 'data', 'axis', 'result', 'constraint', 'value', 'through')


@dataclass(frozen=True)
class Ranked:
    """A neighbour and what it costs.

    Attributes:
        seconds: the estimate of the sum of its bounds.
        memory: bytes of arguments and results on a device.
        results: those that it shards in another way.
    """

    seconds: float
    memory: int
    results: frozenset[int]
    neighbour: Neighbour

    @property
    def order(self) -> tuple[int, int, int, int, int, int]:
        """The cheapest first; of equal ones the plainest, without new memory, and the earliest."""
        kinds = [_KINDS.index(group.kind) for group in self.neighbour.groups]
        axes = [a for x in self.neighbour.changes.values() for dim in x or () for a in dim]
        equal = round(log(self.seconds or 1e-12) / _EQUAL)
        first = min(place.index for place in self.neighbour.changes)
        return equal, len(kinds), sum(kinds), self.memory, len({*axes}), first


@dataclass
class _Known:
    """What a neighbour changed in an earlier round: its gain, and the steps that it touched."""

    gain: float
    memory: int
    results: frozenset[int]
    touched: frozenset[int]


@dataclass
class Ranking:
    """Scores the neighbours of one program, round after round.

    Attributes:
        changes: those that earlier rounds have accepted.
        n_scored: how many variants have been propagated.
        n_left: how many neighbours there was no time for in the last round.
    """

    variants: Variants
    costs: Costs
    groups: Sequence[Group]
    changes: dict[Place, Axes | None] = field(default_factory=dict)
    n_scored: int = 0
    n_left: int = 0
    _known: dict[frozenset[tuple[Place, Axes | None]], _Known] = field(default_factory=dict)
    _now: Score | None = None

    @property
    def now(self) -> Score | None:
        """The score with the accepted changes, or None if Shardy cannot propagate it."""
        if self._now is None:
            self._now = self.score(self.changes)
        return self._now

    def score(self, changes: Mapping[Place, Axes | None]) -> Score | None:
        """The score of the program with changes, or None if Shardy cannot propagate it."""
        try:
            shardings = self.variants.propagate(changes)
        except NotPropagated:
            return None
        self.n_scored += 1
        return self.costs.score(shardings, self._now)

    def neighbours(self) -> list[Neighbour]:
        """All changes of one group, from the program with the accepted changes."""
        now, variants = self.now, self.variants
        if now is None:
            return []

        def propagated(site: Place) -> Axes:
            return now.shardings[variants.value(site)].axes

        given, mesh = {**variants.given, **self.changes}, variants.outline.mesh
        found: dict[Any, Neighbour] = {}
        for one in find_neighbours(self.groups, given, variants.shape, propagated, mesh):
            found.setdefault(frozenset(one.changes.items()), one)  # groups overlap
        return [*found.values()]

    def rank(self, seconds: float = inf) -> list[Ranked]:
        """Returns the neighbours and pairs of the best, the cheapest first.

        Args:
            seconds: the time that this may take.
        """
        end = time.monotonic() + seconds
        now = self.now
        if now is None:
            return []
        ordered = self._ordered(now)
        n = max(_MIN_SCORED, _MAX_STEPS // len(self.variants.outline.steps))
        self.n_left = max(0, len(ordered) - n)
        ordered = ordered[:n]
        ranked = self._scored(ordered, end)
        ranked.sort(key=lambda one: one.order)
        best = [one.neighbour for one in ranked[:_N_PAIRED] if one.seconds < now.seconds]
        ranked += self._scored(pairs(best), end)
        return sorted(ranked, key=lambda one: one.order)

    def _ordered(self, now: Score) -> list[Neighbour]:
        """The neighbours, with the most promising first.

        Arguments and results by their size, in turn with changes of the code by what the operations
        next to them cost. What moves through another placement only helps where it costs something.
        """
        sizes = {g.key: max(map(self.variants.bytes, g.sites)) for g in self.groups}
        costs = {g.key: self._cost_at(g, now) for g in self.groups if g.kind in _IN_CODE}
        of_arrays, of_code = list[Neighbour](), list[Neighbour]()
        for one in self.neighbours():
            group = one.groups[0]
            if group.kind not in _IN_CODE:
                of_arrays.append(one)
            elif group.kind != 'through' or costs[group.key]:
                of_code.append(one)
        of_arrays.sort(key=lambda one: -sizes[one.groups[0].key])
        of_code.sort(key=lambda one: (one.groups[0].kind == 'through', -costs[one.groups[0].key]))
        pairs = itertools.zip_longest(of_arrays, of_code)
        return [one for pair in pairs for one in pair if one is not None]

    def _cost_at(self, group: Group, now: Score) -> float:
        """The seconds of the operations next to what a group changes."""
        outline = self.variants.outline
        values = {self.variants.value(site) for site in group.sites}
        near = {s for value in values for s in outline.steps_of.get(value, ())}
        values.update(v for s in near for v in outline.steps[s].operands)
        moved = sum(now.of_values.get(value, 0.0) for value in values)
        return moved + sum(now.of_steps[s] for s in near)

    def accept(self, neighbour: Neighbour) -> None:
        """Makes a neighbour the program of the next round.

        What does not touch an operation that it touches is not scored again.
        """
        before = self.now
        self.changes.update(neighbour.changes)
        self._now = None
        after = self.now
        if before is None or after is None:
            self._known.clear()
            return
        touched = self._touched(before, after, neighbour.changes)
        changed = neighbour.changes.keys()
        self._known = {
            key: known
            for key, known in self._known.items()
            if not known.touched & touched and not any(site in changed for site, _ in key)
        }

    def _scored(self, neighbours: Iterable[Neighbour], end: float) -> list[Ranked]:
        now, found = self.now, list[Ranked]()
        assert now is not None
        for neighbour in neighbours:
            key = frozenset(neighbour.changes.items())
            known = self._known.get(key)
            if known is None:
                if time.monotonic() > end:
                    self.n_left += 1
                    continue
                score = self.score({**self.changes, **neighbour.changes})
                # what changes no sharding changes no program
                if score is None or score.shardings == now.shardings:
                    continue
                known = self._known[key] = _Known(
                    score.seconds - now.seconds,
                    score.memory - now.memory,
                    self._results(now, score),
                    self._touched(now, score, neighbour.changes),
                )
            seconds, memory = now.seconds + known.gain, now.memory + known.memory
            found.append(Ranked(seconds, memory, known.results, neighbour))
        return found

    def _results(self, a: Score, b: Score) -> frozenset[int]:
        ends = enumerate(self.variants.outline.ends)
        return frozenset(i for i, v in ends if a.shardings[v].axes != b.shardings[v].axes)

    def _touched(self, a: Score, b: Score, sites: Iterable[Place]) -> frozenset[int]:
        """The steps of which an operand or a result is sharded differently, and those at sites."""
        pairs = zip(a.shardings, b.shardings, strict=True)
        values = [v for v, (x, y) in enumerate(pairs) if x != y]
        steps = self.variants.outline.steps_of
        # a constraint may change nothing now, and hold a sharding when something else changes
        values += map(self.variants.value, sites)
        return frozenset(s for v in values for s in steps.get(v, ()))
