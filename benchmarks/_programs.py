"""Compile a program in two ways, compare the results, and run them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from einshard import explain

from ._canonical import canonical
from ._measure import Bench, Call
from ._models import Case
from ._report import Detail

BY_HAND = 'jax.jit with hand-written mesh and PartitionSpecs'


def compiled(new: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
    """A new function, compiled for these shapes.

    The compiled program is what runs: some leaves of a state are left to the compiler, and when its
    choice comes back as an argument, a call of the function would compile once more.
    """
    return new().lower(*arguments).compile()


def compare_programs(bench: Bench, case: Case, rounds: int, prefix: str = '') -> tuple[Any, Any]:
    """Rows that do not run the program: compile time and differing lines. Returns both programs."""
    name = prefix + case.name
    programs: dict[str, Any] = {}

    def compile_anew(side: str, new: Callable[[], Any]) -> None:
        programs[side] = compiled(new, case.arguments)

    for new in () if bench.tiny else (case.ours, case.by_hand):
        # trace once what all functions of the kind share
        new().lower(*case.arguments)
    row = bench.compare(
        f'{name}: trace and compile',
        partial(compile_anew, 'ours', case.ours),
        BY_HAND,
        partial(compile_anew, 'by hand', case.by_hand),
        rounds=rounds,
    )
    ours, by_hand = programs['ours'], programs['by hand']
    row.details |= communication_and_memory(ours)
    bench.record(f'{name}: different lines', 'lines', [different_lines(ours, by_hand)])
    return ours, by_hand


def communication_and_memory(program: Any) -> dict[str, Detail]:
    """Of one device in one run, as `explain` reports it."""
    report = explain(program)
    counts = report.collectives.counts.items()
    kinds = ', '.join(f'{count} {kind}' for kind, count in counts)
    details: dict[str, Detail] = {'collectives': kinds or 'none'}
    details['sent'] = report.network_bytes, 'bytes'
    if report.memory is not None:  # not every compiler reports it
        details['memory'] = report.memory.total, 'bytes'
    return details


def different_lines(a: Any, b: Any) -> int:
    """Lines that only one of two compiled programs has, plus arguments sharded differently."""
    lines = difflib.unified_diff(*(canonical(x.as_text()) for x in (a, b)), n=0, lineterm='')
    n = sum(line[0] in '+-' and line[:3] not in ('+++', '---') for line in lines)
    return n + sum(
        not sharding.is_equivalent_to(other, ndim)
        for (sharding, ndim), (other, _) in zip(_shardings(a), _shardings(b), strict=True)
    )


def _shardings(program: Any) -> list[tuple[Any, int]]:
    leaves = jax.tree.leaves((program.input_shardings, program.output_shardings))
    avals = jax.tree.leaves((program.in_avals, program.out_info))
    return [(leaf, len(aval.shape)) for leaf, aval in zip(leaves, avals, strict=True)]


def runner(program: Any, shapes: tuple[Any, ...], carries: bool) -> Call:
    """A call with small values, placed as the program requires; it waits for the result.

    With `carries`, the first result is the first argument of the next call.
    """
    arguments = list(jax.device_put(host_values(shapes), program.input_shardings[0]))

    def call() -> None:
        result = jax.block_until_ready(program(*arguments))
        if carries:
            arguments[0] = result[0]

    return call


def host_values(shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Small random numbers of these shapes; zeros for integers."""
    rng = np.random.default_rng(0)

    def value(leaf: Any) -> np.ndarray[Any, Any]:
        if not np.issubdtype(leaf.dtype, np.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.random(leaf.shape, leaf.dtype) / 32

    return jax.tree.map(value, shapes)
