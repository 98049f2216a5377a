"""What a program in two ways compiles to and how it runs: rows of a case and a measure."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from einshard import explain

from ._canonical import canonical
from ._harness import Bench, Call, figure_at_most
from ._models import Case
from ._schema import Row

BY_HAND = 'jax.jit, mesh and PartitionSpecs by hand'


class Made(NamedTuple):
    """A function, and its program compiled for shapes."""

    function: Any
    compiled: Any


def make(new: Callable[[], Any], arguments: tuple[Any, ...]) -> Made:
    function = new()
    return Made(function, function.lower(*arguments).compile())


def compiled(new: Callable[[], Any], arguments: tuple[Any, ...]) -> Made:
    """With the program for the function: what a call costs beside the program is not of interest.

    A state has leaves whose placement is left to the compiler. When the compiler's choice comes
    back as an argument, a function compiles once more, and the program does not.
    """
    program = make(new, arguments).compiled
    return Made(program, program)


def compare_programs(
    bench: Bench, case: Case, rounds: int, prefix: str = '', **size: str | int | float
) -> tuple[Made, Made]:
    """The rows of what can be said without running the program; both sides of it, made."""
    name = prefix + case.name
    made: dict[str, Made] = {}

    def make_anew(side: str, new: Callable[[], Any]) -> None:
        made[side] = make(new, case.arguments)

    for new in () if bench.tiny else (case.ours, case.by_hand):
        # what all functions of the kind have in common is traced once in a process
        new().lower(*case.arguments)
    bench.compare(
        f'{name}: compile time',
        partial(make_anew, 'ours', case.ours),
        BY_HAND,
        partial(make_anew, 'by hand', case.by_hand),
        rounds=rounds,
        case=name,
        measure='compile time',
        **size,
    )
    ours, by_hand = made['ours'], made['by hand']
    record(
        bench,
        name,
        'differences',
        'lines',
        differences(ours.compiled, by_hand.compiled),
        target=figure_at_most(0),
        **size,
    )
    record_report(bench, name, ours, BY_HAND, by_hand, **size)
    return ours, by_hand


def record_report(
    bench: Bench, case: str, ours: Made, compared_with: str, theirs: Made, **size: Any
) -> None:
    """Rows of collectives, of the bytes they send, and of memory."""
    report, other = explain(ours.compiled), explain(theirs.compiled)
    counts = report.collectives.counts
    size |= {'kinds': ', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none'}
    both = len(report.collectives), len(other.collectives)
    record(bench, case, 'collectives', 'collectives', *both, compared_with, **size)
    both = report.network_bytes, other.network_bytes
    record(bench, case, 'network bytes', 'bytes', *both, compared_with, **size)
    if report.memory is None or other.memory is None:
        bench.leave_out(f'{case}: memory', 'this compiler does not say')
        return
    both = report.memory.total, other.memory.total
    record(bench, case, 'memory', 'bytes', *both, compared_with, **size)


def record(
    bench: Bench,
    case: str,
    measure: str,
    unit: str,
    figure: float,
    other: float | None = None,
    compared_with: str | None = None,
    target: Any = None,
    **parameters: Any,
) -> Row:
    return bench.record(
        f'{case}: {measure}',
        unit,
        [figure],
        compared_with,
        None if other is None else [other],
        target,
        case=case,
        measure=measure,
        **parameters,
    )


def differences(a: Any, b: Any) -> int:
    """Lines that only one of two compiled programs has, and arrays that are placed otherwise."""
    first, second = canonical(a.as_text()), canonical(b.as_text())
    n = 0
    if first != second:
        lines = difflib.unified_diff(first, second, n=0, lineterm='')
        n += sum(line[0] in '+-' and line[:3] not in ('+++', '---') for line in lines)
    return n + sum(
        not sharding.is_equivalent_to(other, n_dims)
        for (sharding, n_dims), (other, _) in zip(_shardings(a), _shardings(b), strict=True)
    )


def _shardings(program: Any) -> list[tuple[Any, int]]:
    leaves = jax.tree.leaves((program.input_shardings, program.output_shardings))
    avals = jax.tree.leaves((program.in_avals, program.out_info))
    return [(leaf, len(aval.shape)) for leaf, aval in zip(leaves, avals, strict=True)]


def runner(made: Made, values: tuple[Any, ...], carries: bool) -> Call:
    """A call with these values, placed as the program has them; it waits for the result."""
    arguments = list(jax.device_put(values, made.compiled.input_shardings[0]))

    def call() -> None:
        result = jax.block_until_ready(made.function(*arguments))
        if carries:
            arguments[0] = result[0]

    return call


def host_values(shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Small random numbers of these shapes; zeros where they are integers."""
    rng = np.random.default_rng(0)

    def value(leaf: Any) -> np.ndarray[Any, Any]:
        if not np.issubdtype(leaf.dtype, np.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.random(leaf.shape, leaf.dtype) / 32

    return jax.tree.map(value, shapes)
