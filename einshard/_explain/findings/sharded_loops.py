"""Finds loops over a sharded axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..._program.hlo.collective import Collective
from ..._sharding.mesh import is_canonical_mesh
from ..._text import array_text, first_of, format_bytes
from ..fold_layers import fold_paths
from ..report_rows import Finding
from .facts import Facts
from .lines import lines_text
from .trace import Scanned
from .values import Value, weight_and_data


class _ShardedScan(NamedTuple):
    line: str
    mesh_axes: tuple[str, ...]  # the mesh axes that shard the scanned axis
    is_data: bool  # whether the scanned arrays are data, not weights


def sharded_loop_axis(facts: Facts) -> Iterator[Finding]:
    """Reports scans over a sharded axis, such as the axis of microbatches or of stacked layers.

    The compiler gathers stacked weights, often in each iteration. If the axis of microbatches is
    sharded, the rows of a microbatch are not, and the compiler may send activations.
    """
    for scan, arrays, rows in _reported_scans(facts):
        line, _, is_data = scan
        n_bytes = sum(row.total_bytes for row in rows)
        sent = format_bytes(n_bytes)
        effect = f': {sent} are sent to gather it'
        if is_data:
            effect = f', so each iteration has an unsharded batch: {sent} of activations are sent'
        yield Finding(
            'sharded loop axis',
            f'the loop runs over the first axis of {_arrays_text(facts, arrays)}, which is sharded '
            f'along {_along_text(facts, arrays[0].value)}{effect} in {lines_text(rows)}',
            line,
            n_bytes,
            explains=(*(row.name for row in rows), *_paths(facts, arrays)),
        )


def loops_over_batch(facts: Facts) -> bool:
    """Whether a loop runs over a sharded axis of data, so that its iterations have no batch."""
    return any(scan.is_data for scan in _arrays_of_scans(facts))


def _reported_scans(
    facts: Facts,
) -> Iterator[tuple[_ShardedScan, list[Scanned], list[Collective]]]:
    """Yields (scan, scanned arrays, collectives) if the collectives send enough bytes."""
    for scan, arrays in _arrays_of_scans(facts).items():
        if scan.is_data:
            rows = _collectives_of_activations(facts, scan.mesh_axes)
        else:
            rows = _collectives_of_weights(facts, scan.mesh_axes, arrays)
        if sum(row.total_bytes for row in rows) > facts.min_bytes:
            yield scan, arrays, rows


def _arrays_of_scans(facts: Facts) -> dict[_ShardedScan, list[Scanned]]:
    arrays: dict[_ShardedScan, list[Scanned]] = {}
    # on Explicit mesh axes, JAX raises an error for a scan over a sharded axis
    loops = facts.trace.loops if facts.trace and not facts.is_explicit else ()
    for loop in loops:
        for scanned in loop.xs if loop.length > 1 else ():
            value = scanned.value
            if value.axes[0].mesh_axes and (value.is_data or value.argument is not None):
                scan = _ShardedScan(loop.line, value.axes[0].mesh_axes, value.is_data)
                group = arrays.setdefault(scan, [])
                if scanned not in group:  # the backward pass also scans it
                    group.append(scanned)
    return arrays


def _collectives_of_activations(facts: Facts, mesh_axes: Sequence[str]) -> list[Collective]:
    """Returns the collectives of activations along `mesh_axes`.

    Omits lines without a matmul of a weight, and lines where `mesh_axes` shard the batch.
    """
    assert facts.trace is not None
    lines: set[str] = set()
    lines_with_sharded_batch: set[str] = set()
    for product in facts.trace.products:
        operands = None if product.in_shard_map or product.is_lookup else weight_and_data(product)
        if operands is not None:
            lines.add(product.line)
            # skip axes whose sharding comes from a weight: they are not the batch
            if any(
                set(mesh_axes) & set(axis.mesh_axes)
                and (isinstance(axis.origin, str) or facts.is_data(axis.origin))
                for axis in operands[1].axes
            ):
                lines_with_sharded_batch.add(product.line)
    lines -= lines_with_sharded_batch
    return [
        c
        for c in facts.unexplained
        if c.role == 'activations'
        and facts.partly_along(c) & set(mesh_axes)
        and (c.source or '') in lines
    ]


def _collectives_of_weights(
    facts: Facts, mesh_axes: Sequence[str], arrays: Sequence[Scanned]
) -> list[Collective]:
    paths = set(_paths(facts, arrays))
    return [
        c
        for c in facts.unexplained
        if c.role == 'weights' and facts.partly_along(c) & set(mesh_axes) and paths & set(c.of)
    ]


def _paths(facts: Facts, arrays: Sequence[Scanned]) -> list[str]:
    indices = [value.argument for value, _ in arrays]
    return [facts.arguments[i].path for i in indices if i is not None]


def _arrays_text(facts: Facts, arrays: Sequence[Scanned]) -> str:
    """Returns paths such as 'params/{up,down}', or shapes if an array is not an argument."""
    if all(_is_axis_of_argument(facts, scanned) for scanned in arrays):
        return first_of(fold_paths(_paths(facts, arrays)), 3)
    return first_of([array_text(aval) for _, aval in arrays], 3)


def _along_text(facts: Facts, value: Value) -> str:
    """Returns the mesh axes that shard the first axis. On the canonical mesh, returns an axis name.

    The name is that of the first axis or, for microbatches without one, of the batch axis after it.
    Without either name, returns the mesh axes.
    """
    first, *rest = value.axes
    names = [axis.name for axis in (first, *rest[:1]) if axis.name]
    if facts.mesh is not None and is_canonical_mesh(facts.mesh) and names:
        return names[0]
    return ','.join(first.mesh_axes)


def _is_axis_of_argument(facts: Facts, scanned: Scanned) -> bool:
    """Whether the scan runs over the full first axis of an argument, not over a part of it."""
    value, aval = scanned
    if value.argument is None or value.axes[0].dim != 0:
        return False
    return aval.shape[0] == facts.arguments[value.argument].shape[0]
