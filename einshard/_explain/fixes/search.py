"""Tries changes of a program, and keeps those that lower its costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from jax.sharding import Mesh

from ..._program.cost.bounds import NO_BOUNDS, Bounds
from ..._program.edits.edit import Edit, combine, key_of
from ..._progress import progress
from ..findings.facts import Facts
from ..lowered import Stages
from ..report_rows import Figures, Tried
from .candidates import Candidates, Change
from .costs import Cost, find_costs
from .moves import Moves
from .trials import Trial, Trials

MIN_GAIN = 0.03  # of the sum of the bounds
_TRIES_PER_COST = 5
# other costs whose first change is compared with the best one, and by how much it must be better
_MAX_COMPARED = 2
_MIN_BETTER = 0.1


@dataclass(frozen=True)
class Accepted:
    """A change that was kept."""

    change: Change
    tried: Tried
    trial: Trial


@dataclass
class Search:
    """The changes of a program that were tried.

    Attributes:
        first: the changes that are part of `base`.
        diagnosed: the lines of weights with a wrong axis, whose costs come first: larger ones are
            often right, such as the all-reduces of tensor parallelism.
        accepted: the changes that were kept, in order. Each was tried on top of those before.
        n_tried: how many changes were compiled.
        failed: those that did not compile, and why.
        cut: why the search stopped early, or ''.
        target: the costs on the target without and with all accepted changes, or None.
        bounds: those on the target with all accepted changes.
    """

    trials: Trials
    base: Trial
    moves: Moves
    first: tuple[Edit, ...] = ()
    diagnosed: Collection[str | None] = ()
    accepted: list[Accepted] = field(default_factory=list)
    n_tried: int = 0
    failed: list[tuple[Change, str]] = field(default_factory=list)
    cut: str = ''
    target: tuple[Figures, Figures] | None = None
    bounds: Bounds = NO_BOUNDS
    _rejected: list[tuple[Edit, ...]] = field(default_factory=list)

    @property
    def edits(self) -> tuple[Edit, ...]:
        edits = self.first
        for accepted in self.accepted:
            edits = combine(edits, accepted.change.edits)
        return edits

    @property
    def current(self) -> Trial:
        return self.accepted[-1].trial if self.accepted else self.base

    def run(self, tries: int, seconds: float | None) -> None:
        """Tries up to `tries` more changes."""
        end = None if seconds is None else time.monotonic() + seconds
        self.moves.end = end
        left = tries
        try:
            while left > 0:
                used = self._improve(left, end)
                left -= abs(used)
                if used <= 0 or self.cut:
                    break
        except KeyboardInterrupt:
            self.cut = 'interrupted'

    def _improve(self, tries: int, end: float | None) -> int:
        """Accepts the best change for the first cost that one lowers.

        That change may work around the cause of another cost, so it is compared with the first
        changes of costs about as large.

        Returns how many changes it tried; minus that if none is accepted.
        """
        n_before, current = self.n_tried, self.current
        proposals = Candidates(self.trials.facts, current, self.moves)
        best: Accepted | None = None
        n_compared = 0
        costs = find_costs(self.trials.facts, current)
        for cost in sorted(costs, key=lambda cost: cost.line not in self.diagnosed):
            changes = self._untried(proposals.of(cost))
            if best is None:
                # replicated weights take memory, so other changes come first
                replicated = self._untried(proposals.replicated(cost))
                changes = itertools.chain(
                    itertools.islice(changes, _TRIES_PER_COST), itertools.islice(replicated, 2)
                )
            elif n_compared == _MAX_COMPARED or not self._is_comparable(cost, best):
                break
            else:
                changes = itertools.islice(changes, 1)
                n_compared += 1
            first = best
            for change in changes:
                if self.n_tried - n_before >= tries:
                    break
                if end is not None and time.monotonic() > end:
                    self.cut = 'seconds'
                    break
                trial = self._try(change)
                if trial is None or not self._fits(trial.figures):
                    continue
                before, after = current.figures, trial.figures
                if after.bound > (1 - MIN_GAIN) * before.bound:
                    continue
                if first is not None and after.bound > (1 - _MIN_BETTER) * first.tried.bound:
                    continue
                if best is None or after.bound < best.tried.bound:
                    tried = as_tried(before, after, trial.reading.is_simulated)
                    best = Accepted(change, tried, trial)
                # it has removed most of the cost
                if before.bound - after.bound > 0.6 * cost.seconds:
                    break
            if self.n_tried - n_before >= tries or self.cut:
                break
        used = self.n_tried - n_before
        if best is None:
            return -used
        self.accepted.append(best)
        self._rejected.clear()
        return used

    def _is_comparable(self, cost: Cost, best: Accepted) -> bool:
        """Whether a change for another cost may lower the bound more than the best one so far."""
        largest, tried = best.change.cost.seconds, best.tried
        is_left = tried.before.bound - tried.bound < largest + cost.seconds
        return is_left and cost.seconds > 0.5 * largest

    def _try(self, change: Change) -> Trial | None:
        self._rejected.append(change.edits)
        self.n_tried += 1
        with progress(f'trying {change.kind} at {change.cost.line}'):
            trial = self.trials.run(combine(self.edits, change.edits))
        if trial is None and self.trials.error:
            self.failed.append((change, self.trials.error))
        return trial

    def _untried(self, changes: Iterator[Change]) -> Iterator[Change]:
        for change in changes:
            if change.edits not in self._rejected and not self._is_undone(change):
                yield change

    def _is_undone(self, change: Change) -> bool:
        """Whether it places what an accepted change moves in two steps to its placement."""
        through = {what for kind, what in key_of(self.edits) if kind == 'through'}
        return not through.isdisjoint(key_of(change.edits))

    def _fits(self, figures: Figures) -> bool:
        chip, before = self.trials.chip, self.base.figures.memory
        limit = chip.memory * chip.share(self.trials.facts.devices[0])
        return figures.memory is None or figures.memory <= max(limit, before or 0)

    def confirm(self) -> None:
        """Compiles the accepted changes for the target. Drops them if they do not help there."""
        before = self.trials.as_compiled().figures
        without = before if not self.first else self.trials.on_target(self.first)
        found = self.trials.bounds_on_target(self.edits)
        if found is None or without is None or not self._fits(found[0]):
            self.accepted.clear()
            return
        after, bounds = found
        if after.bound > (1 - MIN_GAIN) * without.bound:
            self.accepted.clear()
            return
        self.target, self.bounds = (before, after), bounds


def as_tried(before: Figures, after: Figures, is_simulated: bool = False) -> Tried:
    costs = after.network_bytes, after.memory, after.flops, after.bound
    return Tried(*costs, before, is_simulated, after.hbm)


def make_trials(facts: Facts) -> Trials | str:
    """Returns why the program cannot be edited if it cannot; '' if another note says so."""
    stages, call = facts.stages, None
    if stages.jaxpr is None or facts.n_devices == 1:
        return ''
    if facts.trace is None or not isinstance(facts.mesh, Mesh):
        return 'only programs whose arguments and results are on one mesh are changed'
    if stages.jitted is None:
        return 'pass the function instead of the traced program'
    call = stages.call
    if call is None or len(call.dynamic) != len(facts.arguments):
        return f'{stages.name} cannot be traced again as a call of its arrays{_instead(stages)}'
    return Trials(facts, call)


def _instead(stages: Stages) -> str:
    if stages.framework == 'nnx':
        return (
            '. Pass a function of jax.jit that takes the state: graphdef, state = nnx.split(...), '
            'and nnx.merge(graphdef, state) in the function'
        )
    return '. Pass a function of jax.jit' if stages.is_equinox else ''


def has_candidates(trials: Trials) -> bool:
    """Whether a program has costs that a change may lower."""
    facts, compiled = trials.facts, trials.as_compiled()
    return any(map(Candidates(facts, compiled).has_any, find_costs(facts, compiled)))


def start_search(
    trials: Trials, first: tuple[Edit, ...], diagnosed: Collection[str | None]
) -> Search | None:
    """Compiles a program for simulated devices. Returns None if that fails.

    `first` are changes that are made already, `diagnosed` as in `Search`.
    """
    facts, base = trials.facts, trials.run(first)
    assert facts.mesh is not None
    sizes = {str(name): size for name, size in facts.mesh.shape.items()}
    return None if base is None else Search(trials, base, Moves(sizes), first, diagnosed)
