"""Search: chooses the candidates to compile, and ranks them.

As in successive halving (Jamieson and Talwalkar, 2016), each round evaluates fewer candidates at a
higher cost: scores rank all of them, XLA's partitioner compiles tens of them, and the
target's compiler compiles a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from .._text import format_seconds
from .candidate import Candidate, Evaluation, Objective

# compiles candidates one after another, and yields the evaluation of each
EvaluateAll: TypeAlias = Callable[[Sequence[Candidate]], Generator[Evaluation, None, None]]

_FINALISTS = 3  # this many of the best plans are compiled for the target at first
_CLOSE = 1.5  # the program as it is is compiled for the target if it costs at most so much more
_TIE = 1.02  # plans whose costs have at most this ratio count as equally good
# for large models, the partitioner reports 0.95 to 1.42 times as much memory as the TPU compiler
_MEMORY_MARGIN = 1.5


@dataclass
class PlanSearch:
    """A search over candidates, and its results so far.

    Attributes:
        candidates: those to choose from, the best score first.
        user_candidates: the user's candidates, which are compiled first.
        partitioner: compiles with XLA's partitioner, for simulated CPU devices.
        compiler: compiles for the target, or None if the target is CPUs.
        limit: the bytes that a plan may use on a device, or None if unknown.
        compilations: the maximum number of candidates to compile with the partitioner.
        target_compilations: after this many for the target, another one is compiled only if the
            newest is the best.
        seconds: no compilation starts after this time. None means no limit.
        evaluated: the latest evaluation of each compiled candidate.
        stopped: why the search ended early, or ''.
    """

    candidates: Sequence[Candidate]
    user_candidates: Sequence[Candidate]
    partitioner: EvaluateAll
    compiler: EvaluateAll | None
    objective: Objective
    limit: int | None
    compilations: int
    target_compilations: int = 5
    seconds: float | None = None
    evaluated: dict[Candidate, Evaluation] = field(default_factory=dict)
    stopped: str = ''

    def run(self) -> None:
        """Runs the search, which fills `evaluated`.

        A KeyboardInterrupt stops the search. It is raised again only if `evaluated` is empty.
        """
        self._started = time.monotonic()
        try:
            self._explore()
            if self.compiler is not None and not self.stopped:
                self._compile_for_target(self.compiler)
        except KeyboardInterrupt:
            if not self.evaluated:
                raise
            self.stopped = 'interrupted'

    def ranking(self) -> list[Evaluation]:
        """Ranks the compiled candidates.

        The first is the best one that was compiled for the target and fits into memory. If there is
        none, it is the best of all.
        """
        ranked = sorted(self.evaluated.values(), key=self._sort_key)
        for_target = [
            one for one in ranked if one.costs_from == 'compiler' and one.fits(self.limit)
        ]
        best = for_target[:1]
        return [*best, *(one for one in ranked if one not in best)]

    def progress_text(self) -> str:
        text = f'plan: compiled {len(self.evaluated)} of {self.compilations} candidates'
        if n := self._n_for_target():
            text += f', {n} of {self.target_compilations} for the target'
        best = next((one for one in self.ranking() if one.bounds), None)
        return f'{text}; best: {format_seconds(best.seconds[1])}' if best else text

    def _sort_key(self, evaluation: Evaluation) -> tuple[object, ...]:
        """Returns a key that sorts plans that fit by cost, and then the others by memory."""
        fits = evaluation.fits(self.limit)
        return (
            not fits,
            0 if fits else evaluation.memory or float('inf'),
            *evaluation.cost(self.objective),
            len(evaluation.candidate.mesh),
            str(evaluation.candidate),
        )

    # --- the partitioner -------------------------------------------------------------------------

    def _explore(self) -> None:
        """Compiles the user's candidates, then the best by score, then others in batches."""
        by_score = _mix_shapes(self.candidates, max(1, self.compilations // 2))
        first = list(dict.fromkeys([*self.user_candidates, *by_score]))
        self._compile(self.partitioner, first[: self.compilations])
        while not self.stopped and (left := self.compilations - len(self.evaluated)) > 0:
            # up to half of a batch are neighbors of the best candidate, the others by score
            n = min(left, max(2, self.compilations // 8))
            new = [one for one in self.candidates if one not in self.evaluated]
            best = self.ranking()[0].candidate
            neighbors = [candidate for candidate in new if is_neighbor(best, candidate)]
            batch = list(dict.fromkeys([*neighbors[: (n + 1) // 2], *new]))[:n]
            if not batch:
                return
            self._compile(self.partitioner, batch)

    # --- the target's compiler -------------------------------------------------------------------

    def _compile_for_target(self, evaluate_all: EvaluateAll) -> None:
        """Compiles the best plans, the user's plans, and a plan of another mesh shape.

        Then compiles more plans, one at a time, while the target's compiler disagrees with the
        partitioner's ranking. After `target_compilations`, goes on only while the newest plan is
        the best.
        """
        ranked = self.ranking()
        high_limit = None if self.limit is None else _MEMORY_MARGIN * self.limit
        may_fit = [one for one in ranked if one.fits(high_limit)]
        by_cost = sorted(may_fit, key=lambda one: one.cost(self.objective)) or ranked
        # first the partitioner's best plan, then the cheapest ones that may fit
        plans = list(dict.fromkeys(one.candidate for one in [*may_fit[:1], *by_cost]))
        n = min(_FINALISTS, self.target_compilations)
        finalists, others = plans[:n], plans[n:]
        other_shape = [c for c in others if c.mesh != finalists[0].mesh]
        other_shape = other_shape[: self.target_compilations > n]
        limit = _CLOSE * by_cost[0].cost(self.objective)[0]
        far = {one.candidate for one in ranked if one.cost(self.objective)[0] > limit}
        of_user = [c for c in self.user_candidates if c not in finalists]
        of_user = [c for c in of_user if not (c.is_given and c in far)]
        first = list(dict.fromkeys([*finalists, *of_user, *other_shape]))
        self._compile(evaluate_all, first)
        newest = None
        for candidate in (c for c in others if c not in first):
            best = self.ranking()[0].candidate
            is_enough = (
                self._n_for_target() - len(of_user) >= self.target_compilations and best != newest
            )
            is_as_expected = best == finalists[0] and self._keeps_order(by_cost)
            if is_enough or self.stopped or is_as_expected:
                return
            self._compile(evaluate_all, [candidate])
            newest = candidate

    def _keeps_order(self, ranked: Sequence[Evaluation]) -> bool:
        """Whether the target's compiler ranks plans in the same order as `ranked`, except for ties.

        Ignores plans that do not fit into memory, or were not compiled for the target.
        """
        highest = 0.0
        for one in ranked:
            evaluation = self.evaluated[one.candidate]
            if evaluation.costs_from == 'compiler' and evaluation.fits(self.limit):
                cost = evaluation.cost(self.objective)[0]
                if cost * _TIE < highest:
                    return False
                highest = max(highest, cost)
        return True

    def _n_for_target(self) -> int:
        return sum(one.costs_from == 'compiler' for one in self.evaluated.values())

    def _compile(self, evaluate_all: EvaluateAll, candidates: Sequence[Candidate]) -> None:
        if self._should_stop():
            return
        with closing(evaluate_all(candidates)) as evaluations:
            for evaluation in evaluations:
                self.evaluated[evaluation.candidate] = evaluation
                if self._should_stop():
                    return

    def _should_stop(self) -> bool:
        if self.seconds is not None and time.monotonic() - self._started > self.seconds:
            self.stopped = f'stopped after {self.seconds:g} s'
        return bool(self.stopped)


def is_neighbor(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates shard one name differently, or differ only in mesh axis sizes."""
    changed = one.changed_names(other)
    if one.mesh == other.mesh:
        return len(changed) == 1
    same_mesh_axes = [name for name, _ in one.mesh] == [name for name, _ in other.mesh]
    return same_mesh_axes and not changed


def _mix_shapes(ranked: Sequence[Candidate], n: int) -> list[Candidate]:
    """Chooses n candidates, alternating between the best of all and the best of each mesh shape."""
    ranked = list(dict.fromkeys(ranked))
    by_shape: dict[object, list[Candidate]] = {}
    for candidate in ranked:
        by_shape.setdefault(candidate.mesh, []).append(candidate)
    overall = iter(ranked)
    shapes = [iter(candidates) for candidates in by_shape.values()]
    chosen: dict[Candidate, None] = {}
    while len(chosen) < min(n, len(ranked)):
        for source in [overall, *shapes]:
            with suppress(StopIteration):
                chosen.setdefault(next(source))
                if source is not overall:
                    chosen.setdefault(next(overall))
    return list(chosen)[:n]
