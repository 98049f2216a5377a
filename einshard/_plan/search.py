"""Searches the candidates: estimates choose what to compile, compilations choose the plan.

As in successive halving (Jamieson and Talwalkar, 2016), candidates are judged at three levels: all
by an estimate, tens of them by XLA's partitioner, a few by the target's compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from .candidate import Candidate
from .judgement import Judgement, Objective

# compiles candidates one after another, and yields their costs
JudgeAll: TypeAlias = Callable[[Sequence[Candidate]], Generator[Judgement, None, None]]

_FINALISTS = 3  # how many of the best plans are first compiled for the target
_MAX_FINALISTS = 5  # after this many, another plan is compiled only if the newest is the best
_TIE = 1.02  # plans whose costs differ by up to this ratio are equally good
# for large models, the partitioner reports 0.95 to 1.42 times the memory that the TPU compiler does
_MEMORY_MARGIN = 1.5


@dataclass
class Search:
    """A search over candidates, and its results so far.

    Attributes:
        estimates: the candidates left after pruning, the best estimate first.
        given: the user's candidates, which are compiled first.
        judge_by_partitioner: compiles with XLA's partitioner, for simulated CPU devices.
        judge_by_compiler: compiles for the target; None if the target is CPUs.
        limit: the bytes that a plan may use on a device; None if unknown.
        compilations: the maximum number of candidates to compile with the partitioner.
        seconds: no compilation starts after this time; None for no limit.
        judged: the last judgement of each compiled candidate.
        stopped: why the search ended early, or ''.
    """

    estimates: Sequence[Judgement]
    given: Sequence[Candidate]
    judge_by_partitioner: JudgeAll
    judge_by_compiler: JudgeAll | None
    objective: Objective
    limit: int | None
    compilations: int
    seconds: float | None = None
    judged: dict[Candidate, Judgement] = field(default_factory=dict)
    stopped: str = ''

    def run(self) -> None:
        """Runs the search, which fills `judged`.

        A KeyboardInterrupt stops the search, and is raised only if nothing is judged yet.
        """
        self._started = time.monotonic()
        try:
            self._explore()
            if self.judge_by_compiler is not None and not self.stopped:
                self._compile_for_target(self.judge_by_compiler)
        except KeyboardInterrupt:
            if not self.judged:
                raise
            self.stopped = 'interrupted'

    def ranking(self) -> list[Judgement]:
        """Ranks the compiled candidates.

        First comes the best one that was compiled for the target and fits into memory.
        """
        ranked = sorted(self.judged.values(), key=self._sort_key)
        for_target = [one for one in ranked if one.judge == 'compiler' and one.fits(self.limit)]
        best = for_target[:1]
        return [*best, *(one for one in ranked if one not in best)]

    def progress_text(self) -> str:
        text = f'plan: compiled {len(self.judged)} of {self.compilations} candidates'
        n_for_target = self._n_for_target()
        return f'{text}, {n_for_target} for the target' if n_for_target else text

    def _sort_key(self, judgement: Judgement) -> tuple[object, ...]:
        """Returns a sort key: first the plans that fit, by cost; then the others, by memory."""
        fits = judgement.fits(self.limit)
        return (
            not fits,
            0 if fits else judgement.memory or float('inf'),
            *judgement.cost(self.objective),
            len(judgement.candidate.mesh),
            str(judgement.candidate),
        )

    # --- the partitioner -------------------------------------------------------------------------

    def _explore(self) -> None:
        """Compiles the user's candidates and the best estimates, then others in batches."""
        first = [*self.given, *_spread(self.estimates, max(1, self.compilations // 2))]
        self._compile(self.judge_by_partitioner, first[: self.compilations])
        while not self.stopped and (left := self.compilations - len(self.judged)) > 0:
            batch = self._next_batch(min(left, max(2, self.compilations // 8)))
            if not batch:
                return
            self._compile(self.judge_by_partitioner, batch)

    def _next_batch(self, n: int) -> list[Candidate]:
        """Chooses up to n candidates: n/2 neighbors of the best plan, then the best estimates."""
        new = [one.candidate for one in self.estimates if one.candidate not in self.judged]
        best = self.ranking()[0].candidate
        neighbors = [candidate for candidate in new if is_neighbor(best, candidate)]
        return list(dict.fromkeys([*neighbors[: (n + 1) // 2], *new]))[:n]

    # --- the target's compiler -------------------------------------------------------------------

    def _compile_for_target(self, judge_all: JudgeAll) -> None:
        """Compiles for the target: the best plans, one of another mesh shape, and the user's.

        More plans follow, one by one, while the target's compiler orders the plans differently than
        the partitioner; after `_MAX_FINALISTS`, only while the newest plan is the best.
        """
        ranked = self.ranking()
        high_limit = None if self.limit is None else _MEMORY_MARGIN * self.limit
        may_fit = [one for one in ranked if one.fits(high_limit)]
        by_cost = sorted(may_fit, key=lambda one: one.cost(self.objective)) or ranked
        # first the partitioner's best plan, then the cheapest ones that may fit
        plans = list(dict.fromkeys(one.candidate for one in [*may_fit[:1], *by_cost]))
        finalists, others = plans[:_FINALISTS], plans[_FINALISTS:]
        other_shape = [c for c in others if c.mesh != finalists[0].mesh][:1]
        given = [c for c in self.given if c not in finalists]
        first = list(dict.fromkeys([*finalists, *given, *other_shape]))
        self._compile(judge_all, first)
        newest = None
        for candidate in (c for c in others if c not in first):
            best = self.ranking()[0].candidate
            is_enough = self._n_for_target() - len(given) >= _MAX_FINALISTS and best != newest
            is_as_expected = best == finalists[0] and self._keeps_order(by_cost)
            if is_enough or self.stopped or is_as_expected:
                return
            self._compile(judge_all, [candidate])
            newest = candidate

    def _keeps_order(self, ranked: Sequence[Judgement]) -> bool:
        """Whether the target's compiler orders plans like `ranked`, up to ties.

        Compares only the plans that were compiled for the target and fit into memory.
        """
        highest = 0.0
        for one in ranked:
            judged = self.judged[one.candidate]
            if judged.judge == 'compiler' and judged.fits(self.limit):
                cost = judged.cost(self.objective)[0]
                if cost * _TIE < highest:
                    return False
                highest = max(highest, cost)
        return True

    def _n_for_target(self) -> int:
        return sum(one.judge == 'compiler' for one in self.judged.values())

    def _compile(self, judge_all: JudgeAll, candidates: Sequence[Candidate]) -> None:
        if self._is_out_of_time():
            return
        with closing(judge_all(candidates)) as judgements:
            for judgement in judgements:
                self.judged[judgement.candidate] = judgement
                if self._is_out_of_time():
                    return

    def _is_out_of_time(self) -> bool:
        if self.seconds is not None and time.monotonic() - self._started > self.seconds:
            self.stopped = f'stopped after {self.seconds:g} s'
        return bool(self.stopped)


def is_neighbor(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates differ only in the mesh axes of one name, or in the mesh sizes."""
    changed = one.changed_names(other)
    if one.mesh == other.mesh:
        return len(changed) == 1
    same_mesh_axes = [name for name, _ in one.mesh] == [name for name, _ in other.mesh]
    return same_mesh_axes and not changed


def _spread(estimates: Sequence[Judgement], n: int) -> list[Candidate]:
    """Chooses n candidates: in turn, the best one left and the best one of the next mesh shape."""
    by_shape: dict[object, list[Candidate]] = {}
    for one in estimates:
        by_shape.setdefault(one.candidate.mesh, []).append(one.candidate)
    overall = iter([one.candidate for one in estimates])
    shapes = [iter(candidates) for candidates in by_shape.values()]
    chosen: dict[Candidate, None] = {}
    while len(chosen) < min(n, len(estimates)):
        for source in [overall, *shapes]:
            with suppress(StopIteration):
                chosen.setdefault(next(source))
                if source is not overall:
                    chosen.setdefault(next(overall))
    return list(chosen)[:n]
