"""Notes collectives of a few numbers that take much of the time, because each has its latency."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..._errors import plural
from ..._program.cost.network import Network
from ..._program.hlo.collective import Collective
from ..._program.hlo.graph import Loop, Node
from ..._program.hlo.opcodes import COPIES, ELEMENTWISE
from ..._program.hlo.queries import reached, strip
from ..._text import first_of, format_bytes, format_seconds, short_source
from ..report_rows import Finding
from .facts import Facts

_MIN_SHARE = 0.05  # of the sum of the bounds
_MAX_BYTES = 32  # some scalars; larger arrays, such as statistics of a batch norm, have their use
_MIN_RUNS = 16
# XLA for CPU sums in two steps, of which the first is a reduce-window
_KEEPS_PRODUCTS = {'reduce', 'reduce-window', *COPIES, *ELEMENTWISE}


def tested_in_loop(facts: Facts) -> Iterator[Finding]:
    """Notes loops whose condition depends on sharded values.

    Leaves out a condition on what a loop in the body computes: it tests once after several steps.
    """
    by_loop: dict[Loop, list[Collective]] = {}
    for row in _small(facts):
        node = row.nodes[0]
        if node.scope.is_condition:
            by_loop.setdefault(node.loops[-1], []).append(row)
    for loop, rows in by_loop.items():
        time, row = _time_text(facts, rows), rows[0]
        if time and not _tests_inner_loop(rows, loop):
            yield Finding.about(
                'collective in a condition',
                f'the condition of a loop needs an {row.kind} of {row.arrays} along '
                f'{row.along or "unknown axes"} before each iteration: {time}; instead, carry a '
                'scalar that the body computes with its other reductions, or test after every few '
                'iterations, which a jax.lax.fori_loop in the body runs',
                rows,
            )


def too_many_small(facts: Facts) -> Iterator[Finding]:
    """Notes collectives of a few numbers over the same devices that could be one.

    XLA has merged those that do not depend on each other, except in different iterations.
    """
    scopes: dict[object, list[Collective]] = {}
    for row in _small(facts):
        if not row.nodes[0].scope.is_condition:
            key = row.kind, row.device_groups, row.nodes[0].loop
            scopes.setdefault(key, []).append(row)
    for rows in scopes.values():
        loop = rows[0].nodes[0].loop
        others = sum(row.executions for row in facts.collectives if row.nodes[0].loop is loop)
        others -= sum(row.executions for row in rows)
        for is_one, what, instead in _CASES:
            found = [row for row in rows if is_one(row, loop)]
            n = sum(row.executions for row in found)
            time = _time_text(facts, found) if n >= _MIN_RUNS else ''
            # next to as many large ones, such as those of tensor parallelism, they matter less
            if time and n > 2 * others:
                largest = format_bytes(max(row.bytes for row in found))
                yield Finding.about(
                    'many small collectives',
                    f'{n} {rows[0].kind}s of at most {largest} along '
                    f'{rows[0].along or "unknown axes"} {what}, in {_lines_text(found)}: {time}; '
                    f'instead, {instead}',
                    found,
                )
                break


def _tests_inner_loop(rows: Sequence[Collective], loop: Loop) -> bool:
    """Whether the condition of a loop depends on a value that another loop in the body computes."""

    def sources(node: Node) -> Sequence[Node]:
        return node.inputs if loop in node.loops and node.opcode != 'exit' else ()

    found = reached((node for row in rows for node in row.nodes), sources)
    return any(node.opcode == 'exit' and node.loop is loop for node in found)


def _small(facts: Facts) -> Iterator[Collective]:
    for row in facts.unexplained if facts.chip and facts.chip.latency else ():
        if row.bytes <= _MAX_BYTES and row.network_bytes and not row.in_branch:
            yield row


def _time_text(facts: Facts, rows: Sequence[Collective]) -> str:
    """Describes the latency of collectives in one run, or returns '' if it is a small share."""
    assert facts.chip is not None
    network = Network(facts.devices, facts.chip)
    latency = sum(network.latency(row) * row.executions for row in rows)
    rest = sum(bound.seconds for bound in facts.bounds)
    if latency <= _MIN_SHARE * rest:
        return ''
    times = ' each time' * (len(rows) == 1 and not rows[0].is_exact)
    return (
        f'at least {format_seconds(latency)}{times} by the latency of {facts.chip.name}, where the '
        f'lower bounds add up to {format_seconds(rest)}'
    )


def _lines_text(rows: Iterable[Collective]) -> str:
    """Returns for example 'model.py:12', or '2 lines, model.py:12, model.py:15'."""
    lines = list(dict.fromkeys(short_source(row.source) for row in rows if row.source))
    if len(lines) > 1:
        return f'{plural(len(lines), "line")}, {first_of(lines, 3)}'
    return lines[0] if lines else 'unknown lines'


def _is_outside(row: Collective, loop: Loop | None) -> bool:
    return loop is None


def _is_independent(row: Collective, loop: Loop | None) -> bool:
    """Whether no later iteration of the loop around a collective depends on it."""
    node = row.nodes[0]

    def later(one: Node) -> Iterable[Node]:
        return (user for user in one.users if loop in user.loops)

    return not any(node in one.users for one in reached([node], later))


def _is_row_product(row: Collective, loop: Loop | None) -> bool:
    """Whether it reduces a product with a row of an array that the loop does not change."""

    def terms(node: Node) -> Sequence[Node]:
        is_kept = node.opcode != 'multiply' and node.opcode in _KEEPS_PRODUCTS
        return node.inputs if is_kept and loop in node.loops else ()

    for node in reached(row.nodes[0].inputs, terms):
        if node.opcode in ('dot', 'multiply'):
            for factor in map(strip, node.inputs):
                source = strip(factor.inputs[0]) if factor.opcode == 'dynamic-slice' else factor
                if source is not factor and loop not in source.loops:
                    return True
    return False


# the first that applies
_CASES: Sequence[tuple[Callable[[Collective, Loop | None], bool], str, str]] = (
    (
        _is_outside,
        'run one after another',
        'stack the values and reduce them once; where one is computed from another, use the value '
        'of each shard, and reduce all of them at the end',
    ),
    (
        _is_independent,
        'run in a loop, whose iterations do not need them',
        'reduce the values of all iterations at once, before or after the loop',
    ),
    (
        _is_row_product,
        'run in a loop over the rows of an array',
        'multiply by all rows at once, and reduce the products together',
    ),
)
