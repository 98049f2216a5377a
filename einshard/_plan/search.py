"""Searches the candidates: estimates choose what to compile, and compilers choose the plan.

The three judges are the levels of successive halving (Jamieson and Talwalkar, 2016): an estimate
for every candidate, XLA's partitioner for tens of them, the target's compiler for a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from .candidate import Candidate
from .judgement import Judgement, Objective

# Compiles candidates one after another.
CompileAll: TypeAlias = Callable[[Sequence[Candidate]], Generator[Judgement, None, None]]

_FINALISTS = 3  # best plans for the target's compiler; one contrast is added
_MAX_FINALISTS = 5
_TIE = 1.02  # plans whose costs differ by less than this ratio are equally good
_MARGIN = 1.5  # of large models, the partitioner's memory was 0.95 to 1.42 times the TPU compiler's


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: after a number of compilations, or after a time.

    Attributes:
        compilations: candidates for the partitioner; the target's compiler gets at most 5 more.
        seconds: no compilation starts after this time; None for no limit.
    """

    compilations: int
    seconds: float | None = None


@dataclass
class Search:
    """One search, and what it has found.

    Attributes:
        estimates: the candidates left after pruning, in order of their estimates.
        extra: candidates of the user, which are always compiled.
        by_partitioner, by_compiler: judge candidates by XLA's partitioner and by the target's
            compiler. Either may be None if it cannot be used.
        limit: the memory of a device in bytes; None if unknown.
        judged: the last judgement of each compiled candidate.
        stopped: why the search ended early, or ''.
    """

    estimates: Sequence[Judgement]
    extra: Sequence[Candidate]
    by_partitioner: CompileAll | None
    by_compiler: CompileAll | None
    objective: Objective
    limit: int | None
    budget: Budget
    judged: dict[Candidate, Judgement] = field(default_factory=dict)
    stopped: str = ''

    def run(self) -> None:
        """Fills `judged`. A KeyboardInterrupt ends the search if it has found something."""
        self._started = time.monotonic()
        try:
            if self.by_partitioner is not None:
                self._explore(self.by_partitioner)
            if self.by_compiler is not None:
                self._decide(self.by_compiler)
        except KeyboardInterrupt:
            if not self.judged:
                raise
            self.stopped = 'interrupted'

    def ranking(self) -> list[Judgement]:
        """The compiled candidates: the best one that the target's compiler knows, then the others.

        Without the target's compiler, all are in the partitioner's order.
        """
        ranked = sorted(self.judged.values(), key=self._rank)
        known = [one for one in ranked if one.judge == 'compiler' and self.fits(one)]
        return [*known[:1], *(one for one in ranked if one not in known[:1])]

    def fits(self, judgement: Judgement) -> bool:
        """Whether a candidate compiles and needs no more memory than a device has."""
        if judgement.error:
            return False
        return self.limit is None or judgement.memory is None or judgement.memory <= self.limit

    def _rank(self, judgement: Judgement) -> tuple[object, ...]:
        fits = self.fits(judgement)
        excess = 0 if fits else float(judgement.memory or 'inf')
        return (
            not fits,
            excess,
            *judgement.cost(self.objective),
            len(judgement.candidate.mesh),
            str(judgement.candidate),
        )

    # --- the partitioner -------------------------------------------------------------------------

    def _explore(self, compile_all: CompileAll) -> None:
        """Compiles the best estimates of every mesh shape, then moves around the best plan."""
        compilations = self.budget.compilations
        first = [*self.extra, *_spread(self.estimates, max(1, compilations // 2))]
        self._compile(compile_all, first[:compilations])
        while not self.stopped and (left := compilations - len(self.judged)) > 0:
            batch = self._next(min(left, max(2, compilations // 8)))
            if not batch:
                return
            self._compile(compile_all, batch)

    def _next(self, n: int) -> list[Candidate]:
        """The next candidates: half are moves from the best plan, half the best estimates."""
        new = [one for one in self.estimates if one.candidate not in self.judged]
        best = next(iter(self.ranking()), None)
        moves = [] if best is None else [o for o in new if is_move(best.candidate, o.candidate)]
        chosen = dict.fromkeys(one.candidate for one in moves[: (n + 1) // 2])
        for one in new:
            if len(chosen) < n:
                chosen.setdefault(one.candidate)
        return list(chosen)

    # --- the target's compiler -------------------------------------------------------------------

    def _decide(self, compile_all: CompileAll) -> None:
        """Compiles the finalists and a contrast for the target.

        If it orders them differently, more are compiled, as long as each is better than all before.
        """
        ranked = self.ranking() or list(self.estimates)
        likely = [one for one in ranked if self._may_fit(one)]
        by_cost = sorted(likely, key=lambda one: one.cost(self.objective)) or ranked
        # first the best plan that fits by the partitioner, then those that may fit
        plans = list(dict.fromkeys(one.candidate for one in [*likely[:1], *by_cost]))
        finalists, others = plans[:_FINALISTS], plans[_FINALISTS:]
        contrast = next((c for c in others if c.mesh != finalists[0].mesh), None)
        mine = [c for c in self.extra if c not in finalists]
        first = list(dict.fromkeys([*finalists, *mine, *filter(None, [contrast])]))
        self._compile(compile_all, first)
        newest = None
        for candidate in (c for c in others if c not in first):
            best = self.ranking()[0].candidate
            n = len(self._by_target()) - len(mine)
            is_enough = n >= _MAX_FINALISTS and best != newest
            if is_enough or self.stopped or (best == finalists[0] and self._agree(by_cost)):
                return
            self._compile(compile_all, [candidate])
            newest = candidate

    def _agree(self, ranked: Sequence[Judgement]) -> bool:
        """Whether the target's compiler puts its candidates in this order, give or take 2 %."""
        most = 0.0
        for one in ranked:
            judged = self.judged.get(one.candidate)
            if judged is not None and judged.judge == 'compiler' and self.fits(judged):
                cost = judged.cost(self.objective)[0]
                if cost * _TIE < most:
                    return False
                most = max(most, cost)
        return True

    def _may_fit(self, judgement: Judgement) -> bool:
        if judgement.error:
            return False
        return not self.limit or (judgement.memory or 0) <= _MARGIN * self.limit

    def _by_target(self) -> list[Candidate]:
        return [c for c, one in self.judged.items() if one.judge == 'compiler']

    def _compile(self, compile_all: CompileAll, candidates: Sequence[Candidate]) -> None:
        if self._out_of_time():
            return
        with closing(compile_all(candidates)) as judgements:
            for judgement in judgements:
                self.judged[judgement.candidate] = judgement
                if self._out_of_time():
                    return

    def _out_of_time(self) -> bool:
        seconds = self.budget.seconds
        if seconds is not None and time.monotonic() - self._started > seconds:
            self.stopped = f'stopped after {seconds:g} s'
        return bool(self.stopped)

    def line(self) -> str:
        """Describes the progress."""
        n = len(self.judged)
        target = len(self._by_target())
        text = f'plan: compiled {n} of {self.budget.compilations} candidates'
        return f'{text}, {target} for the target' if target else text


def is_move(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates differ in the mesh axes of one name, or only in the mesh sizes."""
    changed = sum(a != b for a, b in zip(one.axes, other.axes, strict=True))
    if one.mesh == other.mesh:
        return changed == 1
    names = [name for name, _ in one.mesh] == [name for name, _ in other.mesh]
    return names and not changed


def _spread(estimates: Sequence[Judgement], n: int) -> list[Candidate]:
    """The first n candidates, alternating between the best overall and the best of each shape."""
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
