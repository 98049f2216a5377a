"""Tries to run operations on the shards of each device, where the partitioner gathers them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import prod

from jax.sharding import Mesh

from ..._program.edits.per_device import RunPerDevice
from ..._program.jaxpr.batch_axes import BatchAxis, batch_axes
from ..._program.jaxpr.graph import Op
from ..._program.jaxpr.two_levels import axis_in_place, code_in_two_levels
from ..._sharding.mesh import is_canonical_mesh
from ..._text import format_bytes, shape_text, short_source
from ..findings.expressions import expression_of, short_code
from ..findings.facts import Facts
from ..findings.gathered_axes import along_of, gathered_operations, operand_text
from ..findings.values import Axes, Axis
from ..report_rows import Finding
from .proposals import MIN_GAIN
from .trials import Trials, as_tried

_MAX_TRIES = 4


def try_per_device(trials: Trials) -> list[tuple[Finding, RunPerDevice]]:
    """Returns the operations that are cheaper per device, with the costs.

    They are compiled for the target, because library loops and custom calls differ on CPUs.
    """
    facts, found = trials.facts, list[tuple[Finding, RunPerDevice]]()
    if not isinstance(facts.mesh, Mesh) or facts.traced is None or facts.is_explicit:
        return []
    before, n_tried = trials.as_compiled().figures, 0
    gathered = gathered_operations(facts, facts.collectives)
    for collectives, op, v, dim, values in sorted(
        gathered, key=lambda one: -sum(c.total_bytes for c in one[0])
    ):
        made = {(one.span, one.primitive) for _, one in found}
        if (op.site.frames[0], op.primitive) in made:
            continue
        sent = {name for c in collectives for name in c.mesh_axes}
        ways = _ways(facts, op, v, dim, values, sent)
        for changes, text, suggestion, sends_less in ways:
            if n_tried == _MAX_TRIES:
                break
            n_tried += 1
            changes = [one for one in changes if (one.span, one.primitive) not in made]
            trial = trials.run([*(one for _, one in found), *changes], on_target=True)
            if trial is None or trial.figures.bound > (1 - MIN_GAIN) * before.bound:
                continue
            after = trial.figures
            if sends_less and after.network_bytes > (1 - MIN_GAIN) * before.network_bytes:
                continue
            text += f' {format_bytes(sum(c.total_bytes for c in collectives))} sent'
            kind, line = 'gathered for an operation', op.site.source
            finding = Finding.about(kind, text, collectives, line)
            finding = replace(finding, suggestion=suggestion, tried=as_tried(before, after))
            found += [(finding, change) for change in changes]
            before = after
            break
    return found


def _ways(
    facts: Facts, op: Op, v: int, dim: int, values: Sequence[Axes], sent: set[str]
) -> Iterator[tuple[Sequence[RunPerDevice], str, str, bool]]:
    """Yields the ways to run an operation per device, those that keep more in place first.

    For each, the changes, what is gathered, what to write, and whether it also has to send less.

    Args:
        v, dim: an operand and its axis that is gathered.
        sent: the mesh axes of the gathers.
    """
    assert isinstance(facts.mesh, Mesh)
    assert facts.traced is not None
    mesh, span, sharded = facts.mesh, op.site.frames[0], _sharded(op, values)
    array = facts.traced.values[v]
    text = operand_text(array, op, values[v], dim)
    dim_along, along = along_of(facts, op, values)
    if along:  # also where the gather is over its batch
        change = RunPerDevice(span, op.primitive, sharded, mesh, along, dim_along)
        yield [change], text, _in_two_levels(facts, op, values, dim_along, along), False
    batch = [name for _, entry in sharded for name in entry]
    if sent.isdisjoint(batch):
        for axes in _moved(facts, op, values, sent):
            change = RunPerDevice(span, op.primitive, axes, mesh)
            # XLA itself moves the axis of a sort
            yield [change], text, _moving(facts, op, axes), True
        return
    # the gather may only move on to the next operation of this kind, as between an FFT and its
    # inverse
    same = {
        (other.site.frames[0], _sharded(other, values)): other
        for other in reversed(facts.traced.ops)
        if other.primitive == op.primitive
        and other.site.frames
        and not other.site.is_backward
        and _sharded(other, values)
    }
    several = [op, *(other for other in same.values() if other.site.frames != op.site.frames)]
    text = (
        f'{op.primitive.replace("_", " ")} of {array.dtype}{shape_text(array.shape)}, of which '
        f'{", ".join(batch)} shards only batch axes, is gathered:'
    )
    for ops in [[op]] + [several] * (len(several) > 1):
        changes = [
            RunPerDevice(one.site.frames[0], one.primitive, _sharded(one, values), mesh)
            for one in ops
        ]
        yield changes, text, ', and '.join(_suggestion(facts, one, values) for one in ops), False


def _moved(
    facts: Facts, op: Op, values: Sequence[Axes], sent: Collection[str]
) -> Iterator[tuple[tuple[int | str, tuple[str, ...]], ...]]:
    """Yields batch axes that can be sharded in place of those along which an operation runs."""
    if op.eqn is None or op.site.n_shards or op.site.n_mapped or op.ins[0] is None:
        return
    assert facts.mesh is not None
    known, current, shape = _batch_axes(op), dict(_sharded(op, values)), op.eqn.invars[0].aval.shape
    used = {name for entry in current.values() for name in entry}
    batch = {axis.ins[0] for axis in known.values()}
    names = tuple(
        name
        for d, axis in enumerate(values[op.ins[0]])
        for name in axis.mesh_axes
        if d not in batch and name not in used
    )
    for key, axis in known.items():
        d, entry = axis.ins[0], (*current.get(key, ()), *names)
        n = prod(facts.mesh.shape[name] for name in entry)
        is_same = not axis.groups and not axis.is_summed and d is not None
        if is_same and not {*names}.isdisjoint(sent) and shape[d] % n == 0:
            yield tuple({**current, key: entry}.items())


def _moving(facts: Facts, op: Op, axes: tuple[tuple[int | str, tuple[str, ...]], ...]) -> str:
    """Returns what to write to reshard the operand of an operation to other axes first."""
    assert facts.mesh is not None
    known = _batch_axes(op)
    placed = {known[key].ins[0]: entry for key, entry in axes}
    ndim = len(op.eqn.invars[0].aval.shape)
    text = expression_of([Axis('', placed.get(d, ())) for d in range(ndim)], facts.mesh)
    placement = text.rpartition('-> ')[2]
    specs = ', '.join([f"'{placement}'"] * len(op.ins))
    return (
        f'{_run_text(op)} with another axis sharded: '
        f"per_device({specs}, out='{placement}'), with the axes as {op.primitive} has them"
    )


def _in_two_levels(
    facts: Facts, op: Op, values: Sequence[Axes], dim: int, along: tuple[str, ...]
) -> str:
    """Returns the code of an operation in two levels. x is its operand."""
    assert facts.mesh is not None
    mesh, (v,) = facts.mesh, op.arrays_in
    used = {*along, *(name for _, entry in _sharded(op, values) for name in entry)}
    axes = [axis.without_mesh_axes({*axis.mesh_axes} - used) for axis in values[v]]
    n, moved = prod(mesh.shape[name] for name in along), [*axes]
    to = axis_in_place(op.eqn, dim, n)
    moved[dim] = replace(axes[dim], mesh_axes=())
    moved[to] = replace(axes[to], mesh_axes=along)
    placement, out = (expression_of(each, mesh).rpartition('-> ')[2] for each in (axes, moved))
    # on the canonical mesh, collectives name array axes
    names = (expression_of(axes, mesh).split(' ')[dim],) if is_canonical_mesh(mesh) else along
    code = code_in_two_levels(op.eqn, placement, out, names, dim, n)
    return f'{_run_text(op)} in two levels, where x is its operand: {code}'


def _run_text(op: Op) -> str:
    span = op.site.frames[0]
    return f'run {short_code(span) or op.primitive} in {short_source(span.source)}'


def _sharded(op: Op, values: Sequence[Axes]) -> tuple[tuple[int | str, tuple[str, ...]], ...]:
    """Returns the batch axes of an operation that are sharded, with the mesh axes.

    Returns () in a `shard_map` and under `jax.vmap`, where the code does not see all axes.
    """
    found: dict[int | str, tuple[str, ...]] = {}
    if op.eqn is None or op.site.n_shards or op.site.n_mapped:
        return ()
    for name, axis in _batch_axes(op).items():
        for value, d in zip(op.ins, axis.ins, strict=True):
            used = {other for entry in found.values() for other in entry}
            entry = () if value is None or d is None else values[value][d].mesh_axes
            if entry and name not in found and used.isdisjoint(entry):
                found[name] = entry
    return tuple(found.items())


def _batch_axes(op: Op) -> dict[int | str, BatchAxis]:
    ins, outs = ([tuple(v.aval.shape) for v in vs] for vs in (op.eqn.invars, op.eqn.outvars))
    return batch_axes(op.primitive, op.eqn.params, ins, outs)


def _suggestion(facts: Facts, op: Op, values: Sequence[Axes]) -> str:
    """Returns the `per_device` line to write around the expression that calls the operation."""
    assert facts.mesh is not None
    assert facts.traced is not None
    mesh, span, known = facts.mesh, op.site.frames[0], _batch_axes(op)
    axes = {known[name]: entry for name, entry in _sharded(op, values)}
    text = _run_text(op)
    inside = [
        other
        for other in facts.traced.ops
        if other.site.frames[:1] == (span,) and not other.site.is_backward
    ]
    made = {v for other in inside for v in other.arrays_out}
    entering = dict.fromkeys(v for other in inside for v in other.arrays_in if v not in made)
    used = {name for entry in axes.values() for name in entry}
    whole = f'{text} per device over {", ".join(sorted(used))}, with per_device'

    def written(axes: Sequence[Axis]) -> str:
        left, _, right = expression_of(axes, mesh).partition(' -> ')
        return right if any(axis.mesh_axes for axis in axes) else left

    def entries(v: int) -> list[tuple[str, ...]]:
        return [axis.without_mesh_axes({*axis.mesh_axes} - used).mesh_axes for axis in values[v]]

    specs: list[str] = []
    for v in entering:
        named = zip(values[v], entries(v), strict=True)
        specs.append(f"'{written([replace(axis, mesh_axes=entry) for axis, entry in named])}'")
        # the operation may work on other axes than the expression, as after a transpose
        if any(entries(v)) and entries(v) not in map(entries, op.arrays_in):
            return whole
    letters: dict[int, Axis] = {}
    for axis, entry in axes.items():
        v, i, d = op.ins[0], axis.ins[0], axis.outs[0]
        if v is None or i is None or d is None:
            return whole
        letters[d] = Axis(values[v][i].name, entry)
    results = [{axis.outs[o] for axis in axes} for o in range(len(op.eqn.outvars))]
    if all(dims == {*range(len(axes))} for dims in results):
        out = f'{written([letters[d] for d in range(len(axes))])} ...'
    elif len(results) == 1:
        out = written([letters.get(d, Axis()) for d in range(len(op.eqn.outvars[0].aval.shape))])
    else:
        return whole
    groups = [
        f', with {axis.groups}={op.eqn.params[axis.groups]} // {prod(mesh.shape[n] for n in entry)}'
        for axis, entry in axes.items()
        if axis.groups
    ]
    return f"{text} per device: per_device({', '.join(specs)}, out='{out}'){''.join(groups)}"
