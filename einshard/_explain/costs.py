"""What costs a program most: sends, and products or reads that several devices repeat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .._chips.table import default_chip
from .._program.cost.bounds import Bounds
from .._program.hlo.collective import PERMUTE, Collective
from .._program.hlo.hbm_traffic import min_bytes_read, min_hbm_bytes
from .._program.hlo.slices import Reshard
from .._program.traced.conflicts import MOVED
from .._program.traced.propagated import Propagated, name_of
from .._text import first_of, format_bytes
from .findings.facts import Facts
from .findings.gathers import reshard_text
from .findings.values import PRODUCTS, argument_of, unused_mesh_axes
from .fold_layers import fold_paths
from .reading import Reading
from .report_rows import Finding

REPEATED, READ = 'repeated product', 'repeated read'
REMATERIALIZED = 'full rematerialization'  # also the kind of the finding


@dataclass(frozen=True)
class Cost:
    """A send, or a product or a read from HBM that several devices repeat.

    Attributes:
        kind: of the collective; or 'full rematerialization' for an all-gather of which each device
            keeps a slice, 'repeated product' or 'repeated read'.
        seconds: the lower bound on its time, or on the time of the repeated part.
        line, column: its place in the source; '' and 0 if unknown.
        mesh_axes: the mesh axes of the send, or those over which devices repeat the rest.
        role: of what is sent.
        of: the paths of what is sent or read.
        bytes: those that a device sends or reads.
        n_repeats: how many devices repeat the product or the read; 0 for a send.
        names: what it is, as in `Finding.explains`.
        text: it in words.
    """

    kind: str
    seconds: float
    line: str
    column: int
    mesh_axes: tuple[str, ...]
    role: str
    of: tuple[str, ...]
    bytes: int
    n_repeats: int
    names: tuple[str, ...]
    text: str

    @property
    def place(self) -> tuple[Any, ...]:
        """What it has in common with the same cost of another compiled program."""
        return self.kind, self.line, self.column, self.mesh_axes, self.role

    def __str__(self) -> str:
        return self.text


def find_costs(
    reading: Reading, bounds: Bounds, program: Propagated | None, paths: Sequence[str] = ()
) -> list[Cost]:
    """Returns the costs of a compiled program, largest first.

    Args:
        bounds: its lower bounds on the chip for which costs are compared.
        program: the program as the compiler's propagation leaves it, if that is known.
        paths: the paths of its arguments, by number.
    """
    found = [*_sends(reading, bounds)]
    if program is not None:
        found += [*_products(reading, bounds, program), *_reads(reading, bounds, program, paths)]
    return sorted(found, key=lambda cost: -cost.seconds)


def saved(before: Sequence[Cost], after: Sequence[Cost]) -> Cost | None:
    """Returns the cost that a change lowers most, or None if it lowers none."""
    left: dict[Any, float] = defaultdict(float)
    for cost in after:
        left[cost.place] += cost.seconds
    best, gain = None, 0.0
    for cost in before:
        kept = min(left[cost.place], cost.seconds)
        left[cost.place] -= kept
        if cost.seconds - kept > gain:
            best, gain = cost, cost.seconds - kept
    return best


def _sends(reading: Reading, bounds: Bounds) -> Iterator[Cost]:
    seconds = {bound.along: bound.seconds for bound in bounds if bound.resource == 'network'}
    sent: dict[str, int] = defaultdict(int)
    for c in reading.collectives:
        sent[c.along] += c.total_bytes
    order = [str(name) for name in reading.mesh.axis_names] if reading.mesh is not None else []
    reshard_of: dict[Any, Reshard] = {
        node: reshard for reshard in reading.reshards.values() for node in reshard.gathers
    }
    groups: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for c in reading.collectives:
        if c.total_bytes:
            reshard = next((reshard_of[node] for node in c.nodes if node in reshard_of), None)
            # not mesh_axes: XLA exchanges what a split moves in steps, some of which involve only
            # some of the devices of an axis
            groups[c.source, c.column, c.along, c.kind, c.role, c.of, reshard].append(c)
    for (*_, reshard), several in groups.items():
        first, n_bytes = several[0], sum(c.total_bytes for c in several)
        mesh_axes = {axis for c in several for axis in c.mesh_axes}
        # in inference, data arguments have the role of weights too
        paths = first_of(fold_paths(first.of), 3) if first.role == 'weights' else ''
        of = f' of {paths or first.role}' if first.role else ''
        along = first.along or 'all devices'
        text = f'{first.kind}{of} along {along} sends {format_bytes(n_bytes)}'
        if reshard is not None:
            text = reshard_text(reshard, reading.meshes)
        elif reading.is_simulated:
            text += ' (on simulated CPUs)'
        yield Cost(
            first.kind if reshard is None else REMATERIALIZED,
            sum(seconds.get(c.along, 0) * c.total_bytes / sent[c.along] for c in several),
            first.source or '',
            first.column,
            tuple(sorted(mesh_axes, key=lambda a: order.index(a) if a in order else -1)),
            first.role,
            first.of,
            n_bytes,
            0,
            tuple(c.name for c in several),
            text,
        )


def _products(reading: Reading, bounds: Bounds, program: Propagated) -> Iterator[Cost]:
    """Yields the lines with products whose flops are not shared by all mesh axes."""
    compute = next((b.seconds for b in bounds if b.resource == 'compute'), 0.0)
    compiled: dict[str, int] = defaultdict(int)
    for row in reading.products:
        if row.source:
            compiled[row.source] += row.flops
    total = sum(compiled.values())
    # {line: {unused mesh axes: flops on a device}}, each operation once, as if no loop ran it
    flops: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
    for op in program.operations:
        if op.kind in PRODUCTS and op.rule is not None and 'shard_map' not in op.path:
            unused = tuple(unused_mesh_axes(op, program))
            used = {a for value in op.values for axes in value.axes for a in axes}
            n = prod(program.mesh[name_of(a)] for a in {name_of(a) for a in used})
            flops[op.place][unused] += prod(op.rule.sizes) / n
    for line, by_axes in flops.items():
        every = sum(by_axes.values())
        repeated = {axes: f for axes, f in by_axes.items() if axes}
        if not repeated or line not in compiled:
            continue
        axes = max(repeated, key=lambda axes: repeated[axes])
        n = prod(program.mesh[name] for name in axes)
        wasted = sum(
            f * (1 - 1 / prod(program.mesh[name] for name in a)) for a, f in repeated.items()
        )
        yield Cost(
            REPEATED,
            compute * compiled[line] / total * wasted / every,
            line,
            0,
            axes,
            '',
            (),
            0,
            n,
            (line,),
            f'{n} devices repeat the products in this line: {", ".join(axes)} shards none of their '
            'arrays',
        )


def _reads(
    reading: Reading, bounds: Bounds, program: Propagated, paths: Sequence[str]
) -> Iterator[Cost]:
    """Yields the caches that several devices read, of which each could read a part.

    Not weights: that each replica of a model has its own is what data parallelism costs.
    """
    largest, caches = bounds.largest, {n for n, r in reading.roles.items() if r == 'cache'}
    if largest is None or largest.resource != 'HBM' or not caches:
        return
    per_byte = largest.seconds / min_hbm_bytes(reading.graph)
    read = min_bytes_read(reading.graph)
    for op in program.operations:
        for value in op.operands if op.kind in PRODUCTS else ():
            n = argument_of(value)
            axes = tuple(unused_mesh_axes(op, program))
            if n in caches and axes and op.place and read.get(n):
                caches.remove(n)  # one cost
                path = (paths[n],) if n < len(paths) else ()
                times, n_bytes = prod(program.mesh[name] for name in axes), read[n]
                yield Cost(
                    READ,
                    per_byte * n_bytes * (1 - 1 / times),
                    op.place,
                    0,
                    axes,
                    'cache',
                    path,
                    n_bytes,
                    times,
                    path,
                    f'{times} devices read the same {format_bytes(n_bytes)} of '
                    f'{", ".join(path)} from HBM',
                )


_MIN_SHARE = 0.1  # of the sum of the lower bounds
_MIN_SHARE_MOVED = 0.03  # for what another program avoids
_MAX_NOTES = 3


def cost_notes(facts: Facts) -> Iterator[Finding]:
    """Notes the largest costs, with their reasons.

    Gathers of weights and sums of gradients are what data parallelism costs. An operation that
    moves elements along a sharded axis, such as a split, has a kind of its own: no sharding makes
    it cheaper, but another program does, so it stays when all changes of shardings were tried.
    """
    if facts.n_devices == 1:
        return
    chip = facts.chip or default_chip()
    bounds = facts.bounds_on(chip)
    total = sum(bound.seconds for bound in bounds)
    paths = [array.path for array in facts.used]
    explained = facts.explained
    costs = [
        cost
        for cost in find_costs(facts, bounds, facts.propagation.program, paths)
        if cost.seconds >= _MIN_SHARE_MOVED * total
        and explained.isdisjoint(cost.names)
        and not (
            facts.is_training and cost.role in ('weights', 'gradients') and cost.kind in _OF_WEIGHTS
        )
    ]
    noted = set[tuple[str, str]]()
    for cost in costs:
        rows = [c for c in facts.collectives if c.name in cost.names]
        is_moved = cost.kind in (PERMUTE, 'all-to-all') and _is_moved(facts, rows)
        if len(noted) == _MAX_NOTES or not (is_moved or cost.seconds >= _MIN_SHARE * total):
            continue
        text = f'{cost}: {cost.seconds / total:.0%} of the lower bounds of {chip.name}'
        reason = facts.reason_of(rows)
        if is_moved and (cost.line, reason) in noted:  # one exchange in several steps
            continue
        noted.add((cost.line, reason))
        kind = 'moved elements' if is_moved else 'cost'
        yield Finding(kind, text, cost.line or None, cost.bytes, '', cost.names, None, reason)


def _is_moved(facts: Facts, rows: Sequence[Collective]) -> bool:
    """Whether operations that move elements along sharded axes are the reason of collectives."""
    reasons = (facts.reasons[row.name] for row in rows if row.name in facts.reasons)
    kinds = {conflict.kind for reason in reasons for conflict in reason.conflicts}
    return kinds == {MOVED}


_OF_WEIGHTS = ('all-gather', 'all-reduce', 'reduce-scatter')
