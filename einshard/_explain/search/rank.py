"""Ranks the neighbours of a program by what the compiler's own propagation says they cost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log

from ..._program.cost.score import Costs, Score
from ..._program.traced.outline import Place
from ..._program.traced.program import Axes
from ..._program.traced.shardy import NotPropagated
from ..._program.traced.variants import Variants
from .groups import Group
from .neighbours import Neighbour, find_neighbours, pairs

# a neighbour is a candidate below this part of the bounds of the program as it is compiled
_CANDIDATE = 0.97
# changes of different groups whose pairs are scored
_N_PAIRED = 6
# scores that differ by less are equal: 0.1 %
_EQUAL = 1e-3
# simpler changes come first among equals
_KINDS = ('argument', 'data', 'result', 'constraint', 'value')


@dataclass(frozen=True)
class Ranked:
    """A neighbour and what it costs.

    Attributes:
        seconds: the estimate of the sum of its bounds.
        memory: bytes of arguments and results on a device.
    """

    seconds: float
    memory: int
    neighbour: Neighbour

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """The cheapest first; of equal ones the plainest, and without new memory."""
        kinds = [_KINDS.index(group.kind) for group in self.neighbour.groups]
        axes = [a for x in self.neighbour.changes.values() for dim in x or () for a in dim]
        equal = round(log(self.seconds or 1e-12) / _EQUAL)
        return equal, len(kinds), sum(kinds), self.memory, len({*axes})


@dataclass
class _Known:
    """What a neighbour changed in an earlier round: its gain, and the steps that it touched."""

    gain: float
    memory: int
    touched: frozenset[int]


@dataclass
class Ranking:
    """Scores the neighbours of one program, round after round.

    Attributes:
        changes: those that earlier rounds have accepted.
        n_scored: how many variants have been propagated.
        n_refused: how many Shardy could not propagate.
        n_left: how many neighbours there was no time for in the last round.
    """

    variants: Variants
    costs: Costs
    groups: Sequence[Group]
    changes: dict[Place, Axes | None] = field(default_factory=dict['Place', 'Axes | None'])
    n_scored: int = 0
    n_refused: int = 0
    n_left: int = 0
    _known: dict[frozenset[tuple[Place, Axes | None]], _Known] = field(
        default_factory=dict['frozenset[tuple[Place, Axes | None]]', '_Known']
    )
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
            self.n_refused += 1
            return None
        self.n_scored += 1
        return self.costs.score(shardings)

    def neighbours(self) -> list[Neighbour]:
        """All changes of one group, from the program with the accepted changes."""
        now, variants = self.now, self.variants
        if now is None:
            return []

        def propagated(site: Place) -> Axes:
            return now.shardings[variants.value(site)].axes

        given = {**variants.given, **self.changes}
        mesh = variants.outline.mesh
        return [*find_neighbours(self.groups, given, variants.shape, propagated, mesh)]

    def rank(self, seconds: float = inf) -> list[Ranked]:
        """Returns the neighbours and pairs of the best, the cheapest first.

        Args:
            seconds: the time that this may take. Groups of large arrays come first.
        """
        end = time.monotonic() + seconds
        sizes = {g.key: max(map(self.variants.bytes, g.sites)) for g in self.groups}
        ordered = sorted(self.neighbours(), key=lambda n: -sizes[n.groups[0].key])
        now, self.n_left = self.now, 0
        if now is None:
            return []
        ranked = self._scored(ordered, end)
        ranked.sort(key=lambda one: one.order)
        best = [one.neighbour for one in ranked[:_N_PAIRED] if one.seconds < now.seconds]
        ranked += self._scored(pairs(best), end)
        return sorted(ranked, key=lambda one: one.order)

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
                if score is None:
                    continue
                known = self._known[key] = _Known(
                    score.seconds - now.seconds,
                    score.memory - now.memory,
                    self._touched(now, score, neighbour.changes),
                )
            seconds, memory = now.seconds + known.gain, now.memory + known.memory
            found.append(Ranked(seconds, memory, neighbour))
        return found

    def _touched(self, a: Score, b: Score, sites: Iterable[Place]) -> frozenset[int]:
        """The steps of which an operand or a result is sharded differently, and those at sites."""
        pairs = zip(a.shardings, b.shardings, strict=True)
        values = [v for v, (x, y) in enumerate(pairs) if x != y]
        steps = self.variants.outline.steps_of
        # a constraint may change nothing now, and hold a sharding when something else changes
        values += map(self.variants.value, sites)
        return frozenset(s for v in values for s in steps.get(v, ()))


def candidates(ranked: Sequence[Ranked], compiled: float, n: int = 4) -> list[Ranked]:
    """Returns the best neighbours that may be cheaper than the program as it is.

    Args:
        ranked: the cheapest first.
        compiled: the sum of the bounds of the compiled program. As scores are nearly lower bounds,
            few neighbours of a right program are below it.
        n: how many. Of one group, at most two, with different scores.
    """
    found: list[Ranked] = []
    seen: dict[frozenset[object], list[int]] = {}
    for one in ranked:
        if one.seconds >= _CANDIDATE * compiled or len(found) == n:
            break
        scores = seen.setdefault(frozenset(g.key for g in one.neighbour.groups), [])
        if len(scores) < 2 and one.order[0] not in scores:
            scores.append(one.order[0])
            found.append(one)
    return found
