"""Finds the sends, repeated products and repeated reads that cost a program most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import Sharding

from ..._program.hlo.collective import Collective
from ..._program.hlo.hbm_traffic import min_bytes_read, min_hbm_bytes
from ..._program.hlo.slices import Reshard
from ..._program.jaxpr.graph import Op
from ..._sharding.mesh import AnyMesh
from ..findings.facts import Facts
from ..findings.trace import PRODUCTS, read_trace
from .trials import Trial

_MIN_SHARE = 0.02  # of the sum of the bounds
_MIN_RATIO = 1.4  # of the flops of a line to its share of those before partitioning
_MIN_WASTED = 0.05  # of all flops, on a line with a smaller ratio


@dataclass(frozen=True)
class Cost:
    """A send, or a product or a read from HBM that several devices repeat.

    Attributes:
        seconds: the lower bound on its time, or on the time of the repeated part.
        line: its source line, or ''.
        mesh_axes: the mesh axes of the send, or those over which devices repeat the rest.
        kind: of the collective, or 'product' or 'read'.
        n_repeats: how many devices repeat the product or the read; 0 for a send.
        names: what it is, as in `Finding.explains`.
        reshard: set if it is an all-gather of which each device keeps a slice.
    """

    seconds: float
    line: str
    column: int
    mesh_axes: tuple[str, ...]
    kind: str
    role: str
    of: tuple[str, ...]
    bytes: int
    n_repeats: int
    names: tuple[str, ...]
    reshard: Reshard | None = None


def find_costs(facts: Facts, trial: Trial) -> list[Cost]:
    """Returns the costs of a program that a change could lower, largest first."""
    total = trial.figures.bound
    hbm = _hbm_seconds(facts, trial)
    costs = [*_sends(facts, trial), *_repeats(facts, trial, hbm), *_reads(facts, trial, hbm)]
    costs = [cost for cost in costs if cost.seconds >= _MIN_SHARE * total]
    return sorted(costs, key=lambda cost: -cost.seconds)


def _sends(facts: Facts, trial: Trial) -> Iterator[Cost]:
    seconds = {bound.along: bound.seconds for bound in trial.bounds if bound.resource == 'network'}
    sent: dict[str, int] = defaultdict(int)
    for c in trial.reading.collectives:
        sent[c.along] += c.total_bytes
    lookups = [op for op in trial.traced.ops if op.primitive == 'gather' and op.site.frames]
    lines = {op.site.frames[0].source for op in lookups}
    numbers = {trial.values[v].argument for op in lookups for v in op.arrays_in[:1]} - {None}
    numbers |= {trial.values[v].argument for v in looped(trial)}
    paths = {facts.arguments[i].path for i in numbers if i is not None}
    assert facts.mesh is not None
    names = [str(name) for name in facts.mesh.axis_names]
    # no placement of its arguments makes the compiler partition a kernel
    kernels = {
        (op.site.frames[0].source, op.site.frames[0].column + 1)
        for op in trial.traced.ops
        if op.primitive == 'pallas_call' and op.site.frames
    }
    reshard_of = {
        node: reshard for reshard in trial.reading.reshards.values() for node in reshard.gathers
    }
    groups: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for c in trial.reading.collectives:
        reshard = next((reshard_of[node] for node in c.nodes if node in reshard_of), None)
        # gathering weights that are sharded like the batch, and adding up their gradients, is what
        # data parallelism costs, except for the rows of a table, and layers that a loop runs over
        is_of_weights = facts.is_training and c.role in ('weights', 'gradients')
        is_of_table = c.source in lines or not paths.isdisjoint(c.of)
        if is_of_weights and not (is_of_table or reshard):
            continue
        if c.mesh_axes and c.total_bytes and (c.source, c.column) not in kernels:
            key = c.source, c.column, c.mesh_axes, c.kind, c.role, c.of, reshard
            groups[key].append(c)
    for (*_, reshard), several in groups.items():
        first = several[0]
        yield Cost(
            sum(seconds.get(c.along, 0) * c.total_bytes / sent[c.along] for c in several),
            first.source or '',
            first.column,
            tuple(name for name in names if name in first.mesh_axes),
            first.kind,
            first.role,
            first.of,
            sum(c.total_bytes for c in several),
            0,
            tuple(c.name for c in several),
            reshard,
        )


def looped(trial: Trial) -> list[int]:
    """Returns the values whose first axis is sharded and has a loop that runs over it."""
    values = trial.values
    return [v for scan in trial.traced.scans for v in scan.xs if values[v].axes[0].mesh_axes]


def _repeats(facts: Facts, trial: Trial, hbm: Mapping[int, float]) -> Iterator[Cost]:
    mesh = facts.mesh
    assert mesh is not None
    compute = next((b.seconds for b in trial.bounds if b.resource == 'compute'), 0.0)
    compiled: dict[str, int] = defaultdict(int)
    for row in trial.reading.products:
        if row.source and not row.at_least:
            compiled[row.source] += row.flops
    total = sum(compiled.values())
    # their shardings do not matter here
    trace = read_trace(trial.traced, (), mesh)
    ideal: dict[str, int] = defaultdict(int)
    for product in trace.products:
        if product.line and product.flops and not product.is_lookup:
            ideal[product.line] += product.flops
    for line, flops in compiled.items():
        share = ideal.get(line, 0) / facts.n_devices
        ratio = flops / share if share else 0
        if ratio > facts.n_devices * 1.01:
            continue
        n, axes = round(ratio), tuple[str, ...]()
        if ratio >= _MIN_RATIO:
            axes = _axes_of_size(facts, trial, line, n)
        elif flops - share >= _MIN_WASTED * total:
            # of the many products of a helper's line, a few repeat
            axes = _axes_of_some(mesh, trial, line)
            n = prod(mesh.shape[name] for name in axes)
        if not axes:
            continue
        read = sum(hbm.get(i, 0.0) for i in _read_by(trial, line, axes))
        yield Cost(
            compute * (flops - share) / total + read * (1 - 1 / n),
            line,
            0,
            axes,
            'product',
            '',
            (),
            0,
            n,
            (line,),
        )


def _reads(facts: Facts, trial: Trial, hbm: Mapping[int, float]) -> Iterator[Cost]:
    """Yields the caches that several devices read, of which each could read a part.

    Not weights: that each replica of a model has its own is what data parallelism costs.
    """
    mesh = facts.mesh
    assert mesh is not None
    caches = {facts.used_arguments[n] for n, role in facts.roles.items() if role == 'cache'}
    for op in trial.traced.ops:
        for i in _arguments_of(trial, op) & caches if op.primitive in PRODUCTS else ():
            seconds = hbm.get(i, 0.0)
            used = _axes_of_argument(trial, i)
            axes = tuple(str(n) for n, size in mesh.shape.items() if size > 1 and n not in used)
            n = prod(mesh.shape[name] for name in axes)
            if seconds and axes and op.site.frames:
                caches.remove(i)  # one cost
                line, names = op.site.frames[0].source, (facts.arguments[i].path,)
                n_bytes = bytes_on_device(facts, i, trial.arguments[i].sharding)
                seconds *= 1 - 1 / n
                yield Cost(seconds, line, 0, axes, 'read', 'cache', names, n_bytes, n, names)


def bytes_on_device(facts: Facts, argument: int, sharding: Sharding) -> int:
    array = facts.arguments[argument]
    return prod(sharding.shard_shape(array.shape)) * getattr(array.dtype, 'itemsize', 4)


def _hbm_seconds(facts: Facts, trial: Trial) -> dict[int, float]:
    """Returns the time to read each argument from HBM. Empty if another bound is larger."""
    largest = trial.bounds.largest
    if largest is None or largest.resource != 'HBM':
        return {}
    per_byte = largest.seconds / min_hbm_bytes(trial.reading.graph)
    n_bytes = min_bytes_read(trial.reading.graph)
    return {i: per_byte * n_bytes.get(n, 0) for n, i in enumerate(facts.used_arguments)}


def _arguments_of(trial: Trial, op: Op) -> set[int]:
    """Returns the arguments that an operation reads."""
    return {i for v in op.arrays_in if (i := trial.values[v].argument) is not None}


def _axes_of_argument(trial: Trial, argument: int) -> set[str]:
    v = trial.traced.arguments[argument]
    return set() if v is None else trial.values[v].mesh_axes


def _read_by(trial: Trial, line: str, axes: tuple[str, ...]) -> set[int]:
    """Returns the arguments that the products of a line read, and that mesh axes do not shard."""
    return {
        i
        for op in trial.traced.ops
        if op.primitive in PRODUCTS and any(span.source == line for span in op.site.frames[:1])
        for i in _arguments_of(trial, op)
        if _axes_of_argument(trial, i).isdisjoint(axes)
    }


def _axes_of_some(mesh: AnyMesh, trial: Trial, line: str) -> tuple[str, ...]:
    """Returns the mesh axes that shard no operand of some products of a line, with most flops."""
    flops: dict[tuple[str, ...], int] = defaultdict(int)
    for op in trial.traced.ops:
        if op.primitive in PRODUCTS and any(span.source == line for span in op.site.frames[:1]):
            used = {name for v in op.arrays_in for name in trial.values[v].mesh_axes}
            unused = tuple(str(n) for n, size in mesh.shape.items() if size > 1 and n not in used)
            if unused and op.rule.einsum is not None:
                flops[unused] += op.rule.einsum.flops * (op.site.runs or 1)
    return max(flops, key=lambda axes: flops[axes], default=())


def _axes_of_size(facts: Facts, trial: Trial, line: str, n: int) -> tuple[str, ...]:
    """Chooses the mesh axes over which `n` devices repeat the products of a line.

    Those that shard no operand come first.
    """
    assert facts.mesh is not None
    sizes = {str(name): size for name, size in facts.mesh.shape.items() if size > 1}
    used: set[str] = set()
    for op in trial.traced.ops:
        if op.primitive in PRODUCTS and any(span.source == line for span in op.site.frames[:1]):
            for v in op.arrays_in:
                used |= trial.values[v].mesh_axes
    unused = [name for name in sizes if name not in used]
    for names in ([name] for name in (*unused, *sizes)):
        if sizes[names[0]] == n:
            return tuple(names)
    if unused and prod(sizes[name] for name in unused) <= n:
        return tuple(unused)
    return tuple(unused[:1] or [*sizes][:1])
