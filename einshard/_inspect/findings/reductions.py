"""Finds all-reduces that send more than necessary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from jax.sharding import AxisType, NamedSharding

from ..._hlo.loops import trip_count
from ..._hlo.module import Place
from ..._hlo.sliced_sums import SlicedSum, find_sliced_sum
from ..._notation.expression import Term
from ..._text import format_bytes, short_source
from ..fold_layers import fold_paths
from ..report_rows import CollectiveRow, Finding
from .expressions import expression_of
from .facts import Facts
from .trace import Loop, mesh_entries

_SMALL = 1024  # bytes; smaller sums are not worth a change
_LARGE = 0.02  # fraction of all bytes sent; less, such as for the scales of norms, is not reported


def sliced_sums(facts: Facts) -> Iterator[Finding]:
    """Reports all-reduces of products if each device keeps only a slice of the sum."""
    for row, along, place in zip(facts.rows, facts.along, facts.places, strict=True):
        if row.kind != 'all-reduce' or place is None or row.is_backward or row.bytes < _SMALL:
            continue
        found = find_sliced_sum(facts.module, place)
        # the CPU backend has no reduce-scatter
        if found is None or (found.is_direct and facts.platform == 'cpu'):
            continue
        suggestion = _constraint(facts, row.source or '', along, found)
        if not suggestion:  # it may not be the sum of a product
            continue
        yield Finding(
            'sliced all-reduce',
            f'{row.arrays} is all-reduced along {row.along or "all devices"}, and each device '
            f'keeps a slice of the sum: {format_bytes(row.total_bytes)}, of which a reduce-scatter '
            'sends half',
            row.source,
            row.total_bytes,
            suggestion,
        )


def _constraint(facts: Facts, line: str, along: frozenset[str], found: SlicedSum) -> str:
    """Suggests a constraint after which the product in a line is reduce-scattered; '' if unsure."""
    products = facts.trace.products if facts.trace else ()
    results = {p.result for p in products if p.line == line and not p.is_backward}
    if len(results) != 1 or len(found.parts) != 1 or facts.mesh is None:
        return ''
    (result,), ((dim, parts),) = results, found.parts
    mesh_axes = tuple(str(name) for name in facts.mesh.axis_names if name in along)
    is_all = parts == prod(facts.mesh.shape[name] for name in mesh_axes)
    if dim >= len(result.axes) or not is_all or along & result.mesh_axes:
        return ''
    axes = [
        replace(axis, mesh_axes=(*axis.mesh_axes, *mesh_axes)) if i == dim else axis
        for i, axis in enumerate(result.axes)
    ]
    used = [name for axis in axes for name in axis.mesh_axes]
    if len(set(used)) < len(used):  # the trace shards another axis over `mesh_axes`
        return ''
    placement = expression_of(axes, facts.mesh)
    return f"constrain the result of the product in {short_source(line)}: '{placement}'"


# --- loops --------------------------------------------------------------------------------------


def summed_in_loop(facts: Facts) -> Iterator[Finding]:
    """Reports all-reduces of gradients in a loop that only adds them up.

    Does not report gradients of weights that are sharded over the same mesh axes: without the
    all-reduces, the loop would carry unsharded gradients, which take the memory that sharding
    saves.
    """
    loops = {
        loop.line: loop
        for loop in (facts.trace.loops if facts.trace else ())
        # not if it only adds up scalars, such as the loss
        if loop.length > 1 and any(value.axes for value in loop.sums)
    }
    found: dict[tuple[str, str], list[CollectiveRow]] = {}
    for row, along, place in zip(facts.rows, facts.along, facts.places, strict=True):
        loop = _loop_around(facts, place, loops) if row.kind == 'all-reduce' else None
        if loop and along and row.role == 'gradients' and not _is_result_sharded(facts, row, along):
            found.setdefault((loop.line, row.along), []).append(row)
    sent_in_all = sum(row.total_bytes for row in facts.rows)
    for (line, along), rows in found.items():
        n_bytes, n = sum(row.total_bytes for row in rows), loops[line].length
        if n_bytes < _LARGE * sent_in_all:
            continue
        folded = ', '.join(fold_paths(path for row in rows for path in row.of))
        yield Finding(
            'summed in a loop',
            f'the gradients that become {folded} are all-reduced along {along} in each of '
            f'{n} iterations, and only added up: {format_bytes(n_bytes)} instead of '
            f'{format_bytes(n_bytes // n)}',
            line,
            n_bytes,
            _reduce_after_loop(facts, line, along),
        )


def _reduce_after_loop(facts: Facts, line: str, along: str) -> str:
    """Suggests how to reduce gradients once, after the loop in a line."""
    mesh, source = facts.mesh, short_source(line)
    axes = tuple(axis for axis in mesh.axis_names if axis in along.split(',')) if mesh else ()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if mesh else {}
    if axes and {types[axis] for axis in axes} == {AxisType.Explicit}:
        weights, total = (Term(mesh_axes=axes, sign=sign) for sign in '=+')
        return (
            f"in {source}, give the weights the sign '{weights}' and the sum '{total}', and "
            'reshard the sum after the loop'
        )
    return (
        f'run the loop of {source} in a function of per_device, make its weights varying '
        "(jax.lax.pcast(..., to='varying')), and reduce the gradients once after it"
    )


def _loop_around(facts: Facts, place: Place | None, loops: dict[str, Loop]) -> Loop | None:
    """Returns the loop around an instruction, of those in `loops` (by line); None without one."""
    if not loops or place is None:
        return None
    for site in facts.module.path(place.comp) or ():
        loop = loops.get(facts.module.source(site.op) or '')
        if loop and site.op.opcode == 'while' and trip_count(facts.module, site) == loop.length:
            return loop
    return None


def _is_result_sharded(facts: Facts, row: CollectiveRow, along: frozenset[str]) -> bool:
    """Whether a result computed from a collective is sharded over the mesh axes in `along`."""
    for array in facts.results:
        if array.path in row.of and isinstance(array.sharding, NamedSharding):
            entries = mesh_entries(array.sharding, len(array.shape))
            if any(along & set(entry or ()) for entry in entries):
                return True
    return False
