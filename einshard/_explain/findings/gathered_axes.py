"""Notes operations for which the partitioner gathers a sharded axis."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from ..._program.hlo.collective import Collective
from ..._program.hlo.graph import Node
from ..._program.hlo.opcodes import COPIES
from ..._program.hlo.queries import reached
from ..._program.jaxpr.graph import Op
from ..._program.jaxpr.spans import Span
from ..._program.jaxpr.two_levels import (
    axis_in_place,
    axis_in_two_levels,
    bytes_in_two_levels,
)
from ..._sharding.mesh import is_canonical_mesh
from ..._text import format_bytes, shape_text
from ..report_rows import Finding
from .expressions import expression_of
from .facts import Facts
from .values import Axes, Axis

# JAX operations along an axis that the partitioner gathers if it is sharded, in whole or in part
_ALONG_AN_AXIS = re.compile(
    r'sort|top_k|approx_top_k|cum\w+|fft|concatenate|pad|rev|split|slice|dynamic_slice'
    r'|dynamic_update_slice|gather|scatter.*|reshape|conv_general_dilated|reduce_window.*'
    r'|custom_call|ffi_call|pure_callback|io_callback|eigh?|svd|qr|lu|cholesky|triangular_solve'
    r'|schur|hessenberg|tridiagonal|tridiagonal_solve|householder_product|pallas_call'
)
_SLICES = ('slice', 'dynamic_slice', 'split', 'pad')  # gathered only along the axes they change
IN_TWO_LEVELS = '. In two levels, with per_device, each device sends '
_CUMULATIVE = {'cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp'}
# What one element of a result depends on is known to the function that they call.
_CALLS = ('pure_callback', 'io_callback', 'custom_call', 'ffi_call')


def gathered_for_operation(facts: Facts) -> Iterator[Finding]:
    """Notes sends for operations along a sharded axis, such as a sort."""
    for several, op, v, dim, values in gathered_operations(facts, facts.unexplained):
        assert facts.traced is not None
        operand = operand_text(facts.traced.values[v], op, values[v], dim)
        text = f'{operand} {format_bytes(sum(c.total_bytes for c in several))} sent'
        text += _if_independent(facts, op, dim, values[v]) + _if_in_two_levels(facts, op, values)
        yield Finding.about('gathered for an operation', text, several, op.site.source)


def operand_text(array: Any, op: Op, axes: Axes, dim: int) -> str:
    """Returns which axis of the operand of an operation is sharded."""
    axis = axes[dim]
    return (
        f'{op.primitive.replace("_", " ")} of {array.dtype}{shape_text(array.shape)}, whose '
        f'axis {repr(axis.name) if axis.name else dim} is sharded along '
        f'{", ".join(axis.mesh_axes)}:'
    )


def gathered_operations(
    facts: Facts, collectives: Sequence[Collective]
) -> Iterator[tuple[Sequence[Collective], Op, int, int, Sequence[Axes]]]:
    """Yields operations for which sharded axes are gathered.

    For each, the collectives, the operation, an operand and its axis that the mesh axes of the
    collectives shard, and the shardings of all values.
    """
    if not facts.axes or facts.traced is None:
        return
    values = facts.axes
    large = [c for c in collectives if c.mesh_axes and c.total_bytes >= facts.min_bytes]
    words = {c.name: _words(c) for c in large}
    found = set[str]()
    # JAX 0.12 may give a gather the line of what makes its operand, not of what reads its result
    for lines_of in (_own_line, _lines_of_users):
        sends: dict[tuple[str, int], list[Collective]] = defaultdict(list)
        for c in large:
            for line in lines_of(facts, c) if c.name not in found else ():
                sends[line].append(c)
        for (line, column), several in sends.items():
            for op in facts.traced.ops:
                frames = op.site.frames
                if not frames or frames[0].source != line or op.site.is_backward:
                    continue
                if not _ALONG_AN_AXIS.fullmatch(op.primitive) or is_lookup(op):
                    continue
                is_on_line = frames[0].line == frames[0].end_line
                if column and frames[0].column != column - 1 and is_on_line:
                    continue
                # an interpreted kernel is a loop, whose operations have its place in the source
                is_kernel = op.primitive == 'pallas_call'
                mine = [
                    c
                    for c in several
                    if (is_kernel or op.primitive in words[c.name]) and _is_in_call(c, frames)
                ]
                axes = {axis for c in mine for axis in c.mesh_axes}
                sharded = [
                    (v, dim)
                    for i, v in enumerate(op.ins)
                    if v is not None
                    for dim, axis in enumerate(values[v])
                    if axes & {*axis.mesh_axes}
                    and (op.primitive not in _SLICES or _changes_size(op, i, dim))
                ]
                if sharded and found.isdisjoint(c.name for c in mine):
                    found.update(c.name for c in mine)
                    yield mine, op, *sharded[0], values
                    break


def _is_in_call(collective: Collective, frames: Sequence[Span]) -> bool:
    """Whether a collective is in the same call of a function as an operation on its line.

    A line of a helper has the collectives of all callers. `frames` are those of the operation.
    """
    calls = {span.source for span in frames[1:]}
    return collective.called_at is None or not calls or collective.called_at in calls


def _changes_size(op: Op, i: int, dim: int) -> bool:
    """Whether an operation changes the size of an axis of an operand."""
    shape = op.eqn.invars[i].aval.shape
    shapes = (v.aval.shape for v in op.eqn.outvars)
    return any(len(new) == len(shape) and new[dim] != shape[dim] for new in shapes)


def _own_line(facts: Facts, collective: Collective) -> Iterator[tuple[str, int]]:
    if collective.source:
        yield collective.source, collective.column


def _lines_of_users(facts: Facts, collective: Collective) -> Iterator[tuple[str, int]]:
    spans = [facts.graph.program.span(user.op) for user in _users(collective)]
    yield from dict.fromkeys((span.text, span.column) for span in spans if span is not None)


def _users(collective: Collective) -> Iterator[Node]:
    """Yields the operations that read the result of a collective, or copies of it."""

    def copied(node: Node) -> Iterable[Node]:
        return (user for user in node.users if user.opcode == 'element' or user.opcode in COPIES)

    for node in reached(collective.nodes, copied):
        yield from node.users


def _words(collective: Collective) -> set[str]:
    """Returns the names of operations for which a collective may send.

    A line has other sends, such as those of weights in `(x.reshape(-1, d) @ w).reshape(x.shape)`.
    JAX 0.12 gives a gather of an argument the name of the argument, so what reads it counts too.
    """
    if collective.kind in ('all-reduce', 'reduce-scatter') and collective.role == 'gradients':
        return set()
    names = [collective.op_name, *(user.op.op_name for user in _users(collective))]
    words = {word for name in names for word in re.findall(r'[\w-]+', name)}
    # JAX runs cumulative operations in other ones
    if any(word.startswith(('reduce_window', 'associative_scan')) for word in words):
        words |= _CUMULATIVE
    return words


def _if_independent(facts: Facts, op: Op, dim: int, axes: Sequence[Axis]) -> str:
    """Says what to write for a kernel, and for a call that computes each element on its own."""
    assert facts.mesh is not None
    if op.primitive == 'pallas_call':
        return (
            '. The compiler cannot partition a Pallas kernel, also if it is interpreted: use '
            'per_device, which runs the kernel on the shards of each device (not tried)'
        )
    shape = op.eqn.invars[0].aval.shape if op.eqn.invars else ()
    results = [v.aval.shape for v in op.eqn.outvars]
    is_alike = dim == 0 and all(result[:1] == shape[:1] for result in results)
    if op.primitive not in _CALLS or not is_alike or op.site.n_mapped or len(op.arrays_in) > 1:
        return ''
    placement = expression_of(axes, facts.mesh).rpartition('-> ')[2]
    out = placement.split(' ')[0]
    return (
        f'. If it computes each element of this axis on its own, per_device('
        f"'{placement}', out='{out} ...') around the call sends nothing (not tried)"
    )


def along_of(facts: Facts, op: Op, values: Sequence[Axes]) -> tuple[int, tuple[str, ...]]:
    """Returns the axis along which an operation can run in two levels, with its mesh axes.

    There are none in a `shard_map` and under `jax.vmap`, where the code does not see all axes.
    """
    if op.eqn is None or op.site.n_shards or op.site.n_mapped or len(op.ins) != 1:
        return 0, ()
    (v,) = op.ins
    entries = [] if v is None else [axis.mesh_axes for axis in values[v]]
    axis = axis_in_two_levels(op.primitive, op.eqn.params, entries) if entries else None
    if axis is None or (op.primitive == 'fft' and not _can_move(facts, op, axis, entries[axis])):
        return 0, ()
    return axis, entries[axis]


def _can_move(facts: Facts, op: Op, axis: int, names: Sequence[str]) -> bool:
    """Whether `per_device` can run an FFT with another axis sharded after it.

    Not on the canonical mesh, where the axes of argument and result would need devices of their
    own; nor with `norm=`, `s=` or another order of axes, which add operations to the expression.
    """
    assert facts.traced is not None
    assert facts.mesh is not None
    span, n = op.site.frames[:1], prod(facts.mesh.shape[name] for name in names)
    inside = {other.primitive for other in facts.traced.ops if other.site.frames[:1] == span}
    is_plain = inside <= {'fft', 'convert_element_type'} and not is_canonical_mesh(facts.mesh)
    return is_plain and axis_in_place(op.eqn, axis, n) != axis


def _if_in_two_levels(facts: Facts, op: Op, values: Sequence[Axes]) -> str:
    """Says what the operation sends in two levels, with `per_device`."""
    dim, names = along_of(facts, op, values)
    if not names:
        return ''
    assert facts.mesh is not None
    aval, (v,) = op.eqn.invars[0].aval, op.arrays_in
    shard = [
        size // prod(facts.mesh.shape[name] for name in axis.mesh_axes)
        for size, axis in zip(aval.shape, values[v], strict=True)
    ]
    n = prod(facts.mesh.shape[name] for name in names)
    itemsize = aval.dtype.itemsize
    sent = bytes_in_two_levels(op.primitive, op.eqn.params, shard, dim, itemsize, n)
    sent *= op.site.runs or 1
    return f'{IN_TWO_LEVELS}{format_bytes(sent)} (computed, not tried)'


def is_lookup(op: Op) -> bool:
    """Whether an operation gathers full rows of a table."""
    if op.primitive != 'gather' or op.outs[0] is None:
        return False
    numbers, sizes = op.eqn.params['dimension_numbers'], op.eqn.params['slice_sizes']
    is_rows = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    return is_rows and sizes[1:] == op.eqn.invars[0].aval.shape[1:]
