"""Interleaved runs in one process: what every figure of every benchmark comes from.

A figure on its own says as much about the machine, and about what else ran on it, as about the
code. So a and b run turn by turn, a b, b a, a b, ..., each round gives one ratio, and the median
of the ratios is the result, its quartiles the spread: what slows both of a round falls out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _schema
from ._schema import Environment, Report, Result, Row, Spread, Target

Call = Callable[[], Any]
Clock = Callable[[], float]
Agree = Callable[[int], int]

BLOCK = 0.5e-3  # seconds: calls much shorter than this are timed several at once
MAX_CALLS = 4096
SLOW = 0.05  # seconds: one such call says what others will take
MIN_ROUNDS, MAX_ROUNDS = 9, 5000


def ratio_at_most(limit: float) -> Target:
    return {'of': 'ratio', 'at_most': limit}


def figure_at_most(limit: float) -> Target:
    return {'of': 'figure', 'at_most': limit}


@dataclass
class Bench:
    """A benchmark at work: it measures, and collects the rows."""

    name: str
    seconds: float = 2.0  # for one figure
    tiny: bool = False
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    subject: str = 'einshard'
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    progress: Callable[[str], None] = lambda text: None
    clock: Clock = time.perf_counter
    agree: Agree = lambda n: n

    def compare(
        self,
        name: str,
        ours: Call,
        compared_with: str,
        theirs: Call,
        target: Target | None = None,
        n_calls: int = 1,
        rounds: int | None = None,
        **parameters: str | int | float,
    ) -> Row:
        """A row for the time of `ours`, beside that of `theirs`, in interleaved rounds.

        Where each of them stands for a loop of `n_calls` calls, the figures are of one. Calls that
        take seconds are given their number of `rounds`, and are warmed up before by who gives it.
        """
        figures, others = self._times(name, ours, compared_with, theirs, n_calls, rounds)
        return self.record(name, 's', figures, compared_with, others, target, **parameters)

    def difference(
        self,
        name: str,
        ours: Call,
        compared_with: str,
        theirs: Call,
        target: Target,
        n_calls: int = 1,
        **parameters: str | int | float,
    ) -> Row:
        """A row as of `compare`, and one for how much more `ours` takes, with the target."""
        figures, others = self._times(name, ours, compared_with, theirs, n_calls)
        self.record(name, 's', figures, compared_with, others, **parameters)
        more = [a - b for a, b in zip(figures, others, strict=True)]
        return self.record(f'{name}: how much more', 's', more, target=target, **parameters)

    def _times(
        self,
        name: str,
        ours: Call,
        compared_with: str,
        theirs: Call,
        n_calls: int,
        rounds: int | None = None,
    ) -> tuple[list[float], list[float]]:
        self.progress(f'{name}, against {compared_with}')
        a, b = interleave(ours, theirs, self.seconds, self.tiny, self.clock, rounds, self.agree)
        return [time / n_calls for time in a], [time / n_calls for time in b]

    def record(
        self,
        name: str,
        unit: str,
        figures: Sequence[float],
        compared_with: str | None = None,
        others: Sequence[float] | None = None,
        target: Target | None = None,
        **parameters: str | int | float,
    ) -> Row:
        """A row for figures that were measured round by round, `others` in the same rounds.

        There is no ratio to what is 0, as the bytes that a program without collectives sends.
        """
        ratios = None
        if others and all(others):
            ratios = [a / b for a, b in zip(figures, others, strict=True)]
        figure, ratio = spread(figures), spread(ratios) if ratios else None
        met = None
        if target is not None:
            judged = ratio if target['of'] == 'ratio' else figure
            if judged is None:
                raise ValueError(f'{name!r} has a target for a ratio, but is compared with nothing')
            met = judged['median'] <= target['at_most']
        row: Row = {
            'name': name,
            'subject': self.subject,
            'parameters': parameters,
            'unit': unit,
            'figure': figure,
            'compared_with': compared_with,
            'other': spread(others) if others else None,
            'ratio': ratio,
            'rounds': len(figures),
            'target': target,
            'met': met,
        }
        self.rows.append(row)
        return row

    def leave_out(self, what: str, why: str) -> None:
        """Says what is not measured here."""
        self.left_out.append(f'{what}: {why}')

    def result(self, about: str) -> Result:
        return {
            'name': self.name,
            'about': about,
            'tiny': self.tiny,
            'seconds_a_figure': float(self.seconds),
            'rows': self.rows,
            'left_out': self.left_out,
        }


def interleave(
    a: Call,
    b: Call,
    seconds: float,
    tiny: bool = False,
    clock: Clock = time.perf_counter,
    rounds: int | None = None,
    agree: Agree = lambda n: n,
) -> tuple[list[float], list[float]]:
    """Seconds for a call of `a` and of `b`, round by round, for about `seconds` in all.

    With `rounds` just so many, of one call each. `agree` makes a number the same in all processes,
    which otherwise would wait for each other in collectives.

    The garbage collector rests meanwhile, as in `timeit`: it would fall on whichever call happens
    to come when it is due.
    """
    a_calls = b_calls = 1
    if rounds is None:
        a_calls, a_estimate = _calls_for_a_block(a, 0.0 if tiny else BLOCK, clock)
        b_calls, b_estimate = _calls_for_a_block(b, 0.0 if tiny else BLOCK, clock)
        a_round = a_calls * a_estimate + b_calls * b_estimate
        rounds = min(max(int(seconds / max(a_round, 1e-9)), MIN_ROUNDS), MAX_ROUNDS)
        rounds = 4 if tiny else rounds
        a_calls, b_calls, rounds = agree(a_calls), agree(b_calls), agree(rounds)
    a_times: list[float] = []
    b_times: list[float] = []
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            if i % 2 == 0:
                a_times.append(_time(a, a_calls, clock))
                b_times.append(_time(b, b_calls, clock))
            else:
                b_times.append(_time(b, b_calls, clock))
                a_times.append(_time(a, a_calls, clock))
    finally:
        if enabled:
            gc.enable()
    return a_times, b_times


def agree(n: int) -> int:
    """The number that the first process has, in all processes."""
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(n)))


def _calls_for_a_block(call: Call, block: float, clock: Clock) -> tuple[int, float]:
    """How many calls to time at once, and what one takes; warms it up too."""
    call()
    estimate = max(_time(call, 1, clock), 1e-9)
    if estimate < SLOW:
        estimate = max(min(estimate, _time(call, 1, clock), _time(call, 1, clock)), 1e-9)
    return min(max(math.ceil(block / estimate), 1), MAX_CALLS), estimate


def _time(call: Call, calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles, in six digits; of one value, that value."""
    quartiles = [values[0]] * 3
    if len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method='inclusive')
    q1, median, q3 = (float(f'{value:.6g}') for value in quartiles)
    return {'q1': q1, 'median': median, 'q3': q3}


def environment() -> Environment:
    """Where this runs. Starts JAX's backend."""
    import jax
    import jaxlib

    import einshard

    device = jax.devices()[0]
    affinity = getattr(os, 'sched_getaffinity', None)  # Linux only
    return {
        'python': platform.python_version(),
        'jax': jax.__version__,
        'jaxlib': jaxlib.__version__,
        'libtpu': version_of('libtpu'),
        'einshard': einshard.__version__,
        'platform': device.platform,
        'device_kind': device.device_kind,
        'device_count': jax.device_count(),
        'process_count': jax.process_count(),
        'cores': len(affinity(0)) if affinity else os.cpu_count() or 1,
        'system': f'{platform.system()} {platform.machine()}',
        'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report(results: list[Result]) -> Report:
    document: Report = {
        'schema': _schema.VERSION,
        'environment': environment(),
        'benchmarks': results,
    }
    _schema.check(document)
    return document


def progress_line(name: str) -> Callable[[str], None]:
    """Shows on a terminal what is being measured, on one line that is written over."""
    if not sys.stderr.isatty():
        return lambda text: None
    start = time.perf_counter()

    def show(text: str) -> None:
        line = f'{name} {time.perf_counter() - start:4.0f} s  {text}' if text else ''
        # a line that is folded could not be written over; a terminal may have no width
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f'\r\x1b[K{line[: width - 1]}')
        sys.stderr.flush()

    return show
