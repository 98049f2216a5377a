"""Searches for changes of a program that lower its costs.

All changes of one group of arrays or constraints are ranked by the compiler's propagation, which is
nearly a lower bound on their costs and takes milliseconds. The best are compiled, and what the
compiler's figures prefer is kept, until nothing helps any more.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ..._errors import plural
from ..._program.cost.bounds import NO_BOUNDS, Bound, Bounds
from ..._program.edits.edit import (
    Edit,
    PlaceArguments,
    PlaceResults,
    RemoveConstraint,
    ReplaceConstraint,
    combine,
    indices,
    placements,
)
from ..._progress import progress
from ..costs import Cost, saved
from ..report_rows import Figures, Tried, compare_steps
from .proposals import MIN_GAIN, Proposal, Proposals
from .trials import Trial, Trials, as_tried
from .words import replaced_strategy

MIN_SECONDS = 2e-7  # less is noise: bounds leave out latencies
_MAX_COMPILED = 4  # in a round
_MAX_REFUSED = 24  # in a round, by types of Explicit axes
_MAX_ROUNDS = 3
_MAX_OF_GROUP = 2  # compiled changes of one group: it may score wrong alike
_ALIKE = 0.03  # of the bound, or of what a change gains: then the plainer one is better
_NEAR = 0.1  # of the bound: what keeps results, memory and tensor parallelism may cost so much more
_NOTHING = 0.003  # of the bound: an edit that saves no more is not needed


@dataclass(frozen=True)
class Accepted:
    """A change that was kept.

    Attributes:
        edits: what it changes, on top of the changes before it.
        cost: the cost that it lowers most; None if it lowers none of them.
        bound: the lower bound that it lowers most, as it was before.
        tried: the costs with it.
        other: the next best change of that round, or None.
    """

    edits: tuple[Edit, ...]
    cost: Cost | None
    bound: Bound | None
    tried: Tried
    trial: Trial
    other: Accepted | None = None


@dataclass
class Search:
    """The changes of a program that were tried.

    Attributes:
        base: the program that is changed, compiled, with the edits `first`.
        accepted: the changes that were kept, in order. Each was tried on top of those before.
        n_ranked: how many changes were scored by propagation, in the last round.
        left_out: how many there was no time to score.
        n_tried: how many changes were compiled.
        failed: those that JAX does not trace or compile, and why.
        cut: why the search stopped early, or ''.
        refused: why the target's compiler refuses the changes that would be accepted, or ''.
        target: the costs on the target without and with all accepted changes, or None.
        bounds: those on the target with all accepted changes.
    """

    trials: Trials
    proposals: Proposals
    base: Trial
    first: tuple[Edit, ...] = ()
    accepted: list[Accepted] = field(default_factory=list)
    n_ranked: int = 0
    left_out: int = 0
    n_tried: int = 0
    failed: list[tuple[tuple[Edit, ...], str]] = field(default_factory=list)
    cut: str = ''
    refused: str = ''
    target: tuple[Figures, Figures] | None = None
    bounds: Bounds = NO_BOUNDS
    _known: dict[tuple[Edit, ...], Trial | None] = field(default_factory=dict)
    _refused: set[tuple[Edit, ...]] = field(default_factory=set)

    @property
    def edits(self) -> tuple[Edit, ...]:
        return functools.reduce(combine, (one.edits for one in self.accepted), self.first)

    @property
    def current(self) -> Trial:
        kept = [one for one in self.accepted if one.edits]
        return kept[-1].trial if kept else self.base

    @property
    def has_compiled(self) -> bool:
        """Whether any change did."""
        return any(trial is not None for trial in self._known.values())

    def run(self, tries: int, seconds: float | None) -> None:
        """Compiles up to `tries` more changes."""
        self._end = None if seconds is None else time.monotonic() + seconds
        self._left = self.n_tried + tries
        try:
            for _ in range(_MAX_ROUNDS):
                if self._is_over() or not self._improve():
                    break
            self._drop_needless()
        except KeyboardInterrupt:
            self.cut = 'interrupted'

    def _is_over(self) -> bool:
        if self._end is not None and time.monotonic() > self._end:
            self.cut = 'seconds'
        return bool(self.cut) or self.n_tried >= self._left

    def _improve(self) -> bool:
        """Accepts the best change of the program as it is now. Returns whether there is one."""
        before, edits = self.current.figures, self.edits
        too_large = not self._fits(before)
        # 1. score all neighbours; what does not score below what the program costs cannot help
        with progress(f'ranking the changes of {self.trials.facts.stages.name or "the program"}'):
            ranked = self.proposals.rank(self._end)
        self.n_ranked, self.left_out = len(ranked), self.proposals.ranking.n_left
        ranked = [one for one in ranked if one.edits]
        # scores are nearly lower bounds, but where latencies count, XLA combines what is scored
        limit = max(before.bound, self.proposals.seconds)
        cheaper = [one for one in ranked if _is_less(one.seconds, limit, one.min_gain)]
        if too_large:
            # what saves memory of arguments and results, in turn with what costs less, which may
            # save that of temporaries
            smaller = [one for one in ranked if one.added < 0]
            smaller.sort(key=lambda one: (not self._has_room(self._memory_of(one)), one.seconds))
            pairs = itertools.zip_longest(smaller, cheaper)
            ranked = [one for pair in pairs for one in pair if one is not None]
        else:
            ranked = [one for one in cheaper if self._has_room(self._memory_of(one))]
        # 2. compile the best, with few of each group
        trials: list[tuple[Proposal, Trial]] = []
        for one, trial in self._compiled(ranked):
            smaller = (trial.figures.memory or 0) < (1 - MIN_GAIN) * (before.memory or 0)
            is_cheaper = _is_less(trial.figures.bound, before.bound, one.min_gain)
            if (too_large and smaller) or (is_cheaper and self._fits(trial.figures)):
                trials.append((one, trial))
        if not trials:
            return False
        # 3. keep the best by the compiler's figures, or a plainer one that is as good
        trials.sort(key=lambda pair: pair[1].figures.bound)
        trials.sort(key=lambda pair: too_large and not self._fits(pair[1].figures))
        best = trials[0][1].figures
        near = [
            pair
            for pair in trials
            if _is_near(pair[1].figures.bound, best.bound, before.bound)
            and self._fits(pair[1].figures) == self._fits(best)
        ]
        facts = self.trials.facts
        plain = [
            (one, trial)
            for one, trial in near
            if one.min_gain == MIN_GAIN and not replaced_strategy(facts, combine(edits, one.edits))
        ] or near
        best = plain[0][1].figures
        alike = [pair for pair in plain if _is_alike(pair[1].figures, best, before)]
        least = min(pair[1].figures.memory or 0 for pair in alike)
        room = _ALIKE * (before.memory or 0)
        small = [pair for pair in alike if (pair[1].figures.memory or 0) <= least + room]
        one, trial = min(small, key=lambda pair: plainness(pair[0].edits))
        other = next((self._accepted(*pair) for pair in trials if pair[0] is not one), None)
        self.accepted.append(replace(self._accepted(one, trial), other=other))
        self.proposals.ranking.accept(one.neighbour)
        return True

    def _accepted(self, one: Proposal, trial: Trial) -> Accepted:
        now = self.current
        return Accepted(
            one.edits,
            saved(now.costs, trial.costs),
            _lowered(now.bounds, trial.bounds),
            as_tried(now.figures, trial.figures, trial.reading.is_simulated),
            trial,
        )

    def _compiled(self, ranked: Sequence[Proposal]) -> Iterator[tuple[Proposal, Trial]]:
        """Compiles the best changes: of one group at most two, whose scores differ.

        Only one of them changes two groups, unless no change of one group may help: what helps
        beside another change is found in the next round. What JAX does not even trace, as types of
        Explicit axes may refuse it, or what its code cannot say, does not count.
        """
        chosen: list[Proposal] = []
        singles = [one for one in ranked if len(one.neighbour.groups) == 1]
        best = singles[0].seconds if singles else inf
        n_pairs = n_refused = 0
        for one in ranked:
            is_pair = len(one.neighbour.groups) > 1 and bool(singles)
            if is_pair and (n_pairs or one.seconds > (1 - MIN_GAIN) * best):
                continue
            same = [other for other in chosen if other.neighbour.groups == one.neighbour.groups]
            if len(same) >= _MAX_OF_GROUP or any(o.seconds == one.seconds for o in same):
                continue
            if len(chosen) == _MAX_COMPILED or n_refused == _MAX_REFUSED or self._is_over():
                return
            edits = combine(self.edits, one.edits)
            trial = self._try(edits)
            if edits in self._refused:
                n_refused += 1
                continue
            chosen.append(one)
            n_pairs += is_pair
            if trial is not None:
                yield one, trial

    def _try(self, edits: tuple[Edit, ...]) -> Trial | None:
        if edits not in self._known:
            with progress(f'trying change {self.n_tried + 1}'):
                trial = self._known[edits] = self.trials.run(edits)
            if self.trials.is_traced:
                self.n_tried += 1
            else:
                self._refused.add(edits)
            if trial is None and self.trials.error:
                self.failed.append((edits, self.trials.error))
        return self._known[edits]

    def _drop_needless(self) -> None:
        """Drops each edit without which the program costs the same."""
        for i in reversed(range(len(self.accepted))):
            for edit in reversed(self.accepted[i].edits):
                if self._is_over() or sum(len(one.edits) for one in self.accepted) == 1:
                    return
                self._drop(i, edit)
        self.accepted = [one for one in self.accepted if one.edits]

    def _drop(self, i: int, edit: Edit) -> None:
        kept, end = [*self.accepted], self.current
        kept[i] = replace(kept[i], edits=tuple(one for one in kept[i].edits if one is not edit))
        trial = self._try(functools.reduce(combine, (one.edits for one in kept), self.first))
        if trial is None or trial.figures.bound > (1 + _NOTHING) * end.figures.bound:
            return
        if self._fits(trial.figures) or not self._fits(end.figures):
            last = max(n for n, one in enumerate(kept) if one.edits)
            tried = as_tried(kept[last].tried.before, trial.figures, trial.reading.is_simulated)
            kept[last] = replace(kept[last], trial=trial, tried=tried)
            self.accepted = kept

    def _memory_of(self, one: Proposal) -> float:
        """Estimates the memory that the program needs after a change, from that of arguments."""
        return (self.current.figures.memory or 0) + one.added

    def _has_room(self, memory: float) -> bool:
        chip, before = self.trials.chip, self.base.figures.memory
        limit = chip.memory * chip.share(self.trials.facts.devices[0])
        return memory <= max(limit, before or 0)

    def _fits(self, figures: Figures) -> bool:
        chip = self.trials.facts.chip
        if figures.memory is None or chip is None:
            return True
        return figures.memory <= chip.memory * chip.share(self.trials.facts.devices[0])

    def confirm(self) -> None:
        """Compiles the accepted changes for the target. Drops them if they do not help there.

        The next best change of the last round is compiled too if it costs as much on simulated
        devices, which do not tell what only the target's compiler knows, or if the best one fails.
        """
        if not self.accepted:
            return
        compiled = self.trials.as_compiled()
        base = self.trials.run(self.first, on_target=True) if self.first else compiled
        if base is None:
            self.accepted = []
            return
        without = base.figures
        last, best, returned = self.accepted[-1], None, set[int]()
        options = [self.accepted]
        if last.other is not None:
            options.append([*self.accepted[:-1], last.other])
        for accepted in options:
            self.accepted = accepted
            is_alike = accepted[-1].tried.bound <= (1 + _ALIKE) * last.tried.bound
            if best is not None and not is_alike:
                break
            trial = self.trials.run(self.edits, on_target=True)
            if trial is None:
                self.refused = self.trials.error
                continue
            after = trial.figures
            gains_memory = not self._fits(without) and (after.memory or 0) < (without.memory or 0)
            is_cheaper = _is_less(after.bound, without.bound, MIN_GAIN)
            if not (gains_memory or (self._fits(after) and is_cheaper)):
                continue
            # by estimates, unless only the other one gives callers another result
            moves = indices(self.edits, 'result') - returned
            by_step = 0 if moves or best is None else compare_steps(after.step, best[1].step)
            is_near = best and _is_near(best[1].bound, after.bound, without.bound)
            if best is None or by_step < 0 or (by_step == 0 and not is_near):
                best, returned = (accepted, after, trial.bounds), indices(self.edits, 'result')
        self.accepted = [] if best is None else best[0]
        if best is not None:
            self.refused = ''
            self.target, self.bounds = (compiled.figures, best[1]), best[2]

    @property
    def is_used_up(self) -> bool:
        """Whether the tries ended the search."""
        return not self.cut and self.n_tried >= self._left

    @property
    def summary(self) -> str:
        """How many changes were ranked and compiled."""
        n_refused = len(self._refused)
        n_failed = sum(edits not in self._refused for edits, _ in self.failed)
        failed = f' ({n_failed} failed)' * bool(n_failed)
        failed += f', {n_refused} more not possible' * bool(n_refused)
        cut = f' ({self.cut}: the search was stopped)' * bool(self.cut)
        left = f', {self.left_out} left out' * bool(self.left_out)
        ranked = plural(self.n_ranked, 'change')
        return f'{ranked} ranked{left}, {self.n_tried} compiled{failed}{cut}'


def _is_near(one: float, best: float, before: float) -> bool:
    """Whether a change may be preferred to one with the best bound, as it is better otherwise."""
    return one <= best + max(_NEAR * best, _ALIKE * (before - best))


def _is_alike(one: Figures, best: Figures, before: Figures) -> bool:
    """Whether a change gains about as much as the best one."""
    slack = _ALIKE * max(best.bound, before.bound - best.bound)
    return one.bound <= best.bound + min(slack, _NEAR * best.bound)


def _is_less(after: float, before: float, min_gain: float) -> bool:
    """Whether bounds are less by a part of them, and by more than latencies vary."""
    return before - after > max(min_gain * before, MIN_SECONDS)


def _lowered(before: Bounds, after: Bounds) -> Bound | None:
    left = {(bound.resource, bound.along): bound.seconds for bound in after}

    def gain(bound: Bound) -> float:
        return bound.seconds - left.get((bound.resource, bound.along), 0.0)

    return max(before, key=gain, default=None)


def plainness(edits: Sequence[Edit]) -> tuple[int, ...]:
    """Orders changes that cost as much.

    Fewer edits come first, of arguments rather than in the code, and with one mesh axis on an axis
    rather than two.
    """
    kinds = [next(i for i, kind in enumerate(_PLAIN) if isinstance(edit, kind)) for edit in edits]
    placed = [s.spec for each in placements(edits) for s in each.values()]
    n_split = sum(isinstance(entry, tuple) for spec in placed for entry in spec)
    return len(edits), sum(kinds), n_split, len(placed)


_PLAIN = (PlaceArguments, PlaceResults, ReplaceConstraint, RemoveConstraint, Edit)
