"""Interleaved runs of two calls in one process: the source of every time in the benchmarks.

A time on its own says as much about the machine as about the code. So the two calls take turns
(a b, b a, a b, ...), each round gives one ratio, and the result is the median ratio. Whatever slows
down both calls of a round cancels.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._report import Detail, Row

Call = Callable[[], Any]
Clock = Callable[[], float]
Agree = Callable[[int], int]

BLOCK = 0.5e-3  # seconds: calls that are much shorter are timed in blocks
MAX_CALLS = 4096
SLOW = 0.05  # seconds: the time of a slower call is estimated from one call
MIN_ROUNDS, MAX_ROUNDS = 9, 5000


@dataclass
class Bench:
    """A running benchmark: measures and collects rows."""

    name: str
    seconds: float = 2.0  # per figure
    tiny: bool = False
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    progress: Callable[[str], None] = lambda text: None
    clock: Clock = time.perf_counter
    agree: Agree = lambda n: n

    def compare(
        self,
        name: str,
        ours: Call,
        against: str,
        theirs: Call,
        n_calls: int = 1,
        rounds: int | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> Row:
        """Add a row: the time of `ours` and of `theirs`, in interleaved rounds.

        If each of them is a loop of `n_calls` calls, the row has the time of one call. Calls that
        take seconds get a number of `rounds`, and are warmed up by the caller.
        """
        self.progress(f'{name}, against {against}')
        a, b = interleave(ours, theirs, self.seconds, self.tiny, self.clock, rounds, self.agree)
        figures, others = ([time / n_calls for time in times] for times in (a, b))
        return self.record(name, 's', figures, against, others, details)

    def record(
        self,
        name: str,
        unit: str,
        figures: Sequence[float],
        against: str = '',
        others: Sequence[float] = (),
        details: Mapping[str, Detail] | None = None,
    ) -> Row:
        """Add a row for figures measured round by round, with `others` in the same rounds."""
        row = Row(self.name, name, unit, median(figures), against, rounds=len(figures))
        row.details.update(details or {})
        if others:
            row.other = median(others)
        if others and all(others):
            ratios = [a / b for a, b in zip(figures, others, strict=True)]
            row.ratio = median(ratios)
            row.spread = relative_spread(ratios)
        self.rows.append(row)
        return row

    def leave_out(self, what: str, why: str) -> None:
        """Report what is not measured here."""
        self.left_out.append(f'{what}: {why}')


def median(values: Sequence[float]) -> float:
    return _six_digits(statistics.median(values))


def relative_spread(ratios: Sequence[float]) -> float | None:
    """Half the interquartile range, relative to the median."""
    if len(ratios) < 2:
        return None
    q1, middle, q3 = statistics.quantiles(ratios, n=4, method='inclusive')
    return _six_digits((q3 - q1) / 2 / middle)


def _six_digits(value: float) -> float:
    return float(f'{value:.6g}')


def interleave(
    a: Call,
    b: Call,
    seconds: float,
    tiny: bool = False,
    clock: Clock = time.perf_counter,
    rounds: int | None = None,
    agree: Agree = lambda n: n,
) -> tuple[list[float], list[float]]:
    """Seconds per call of `a` and of `b`, round by round, for about `seconds` in total.

    With `rounds`, that many rounds of one call each. Processes that meet in collectives must make
    the same number of calls: `agree` returns one number in all of them. As in `timeit`, the garbage
    collector is off: it would slow down whichever call it interrupts.
    """
    a_calls = b_calls = 1
    if rounds is None:
        a_calls, a_estimate = _calls_per_block(a, 0.0 if tiny else BLOCK, clock)
        b_calls, b_estimate = _calls_per_block(b, 0.0 if tiny else BLOCK, clock)
        per_round = max(a_calls * a_estimate + b_calls * b_estimate, 1e-9)
        rounds = 4 if tiny else min(max(int(seconds / per_round), MIN_ROUNDS), MAX_ROUNDS)
        a_calls, b_calls, rounds = agree(a_calls), agree(b_calls), agree(rounds)
    a_times: list[float] = []
    b_times: list[float] = []
    turns = [(a, a_calls, a_times), (b, b_calls, b_times)]
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for call, n_calls, times in turns:
                times.append(_time(call, n_calls, clock))
            turns.reverse()
    finally:
        if was_enabled:
            gc.enable()
    return a_times, b_times


def agree(n: int) -> int:
    """The first process's number, in all processes."""
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(n)))


def _calls_per_block(call: Call, block: float, clock: Clock) -> tuple[int, float]:
    """How many calls to time at once, and the estimated time of one. Warms the call up."""
    call()
    estimate = _time(call, 1, clock)
    if estimate < SLOW:
        estimate = min(estimate, _time(call, 1, clock), _time(call, 1, clock))
    estimate = max(estimate, 1e-9)
    return min(max(math.ceil(block / estimate), 1), MAX_CALLS), estimate


def _time(call: Call, n_calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(n_calls):
        call()
    return (clock() - start) / n_calls


def progress_line(name: str) -> Callable[[str], None]:
    """Shows what is being measured on one line of the terminal, which it overwrites."""
    if not sys.stderr.isatty():
        return lambda text: None
    start = time.perf_counter()

    def show(text: str) -> None:
        line = f'{name} {time.perf_counter() - start:4.0f} s  {text}' if text else ''
        # a wrapped line could not be overwritten; some terminals report a width of 0
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f'\r\x1b[K{line[: width - 1]}')
        sys.stderr.flush()

    return show
