"""Lists the placements of intermediate values, as the compiler's propagation gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax.sharding import AxisType, NamedSharding

from .._errors import EinshardError
from .._program.hlo.text import ArrayType
from .._program.jaxpr.names import without_names
from .._program.traced.propagated import CONSTRAINT, PASSING, SHARD, Operation, Propagated, Value
from .._sharding.describe import describe_named
from .._sharding.mesh import AnyMesh, partition_spec
from .findings.facts import Facts
from .report_rows import ArrayRow

_OUTERMOST = re.compile(r'jit\([^)]*\)/')
# operations that compute no new numbers
_TRIVIAL = PASSING | {SHARD, 'constant', 'iota', 'broadcast_in_dim', 'reshape', 'convert'}


def find_intermediates(facts: Facts) -> list[ArrayRow]:
    """Finds the intermediate arrays with a source line.

    Returns [] without a mesh or on one device, because XLA then partitions nothing.
    """
    if facts.stages.compiled is not None:
        facts.stages.lower()  # raises the error that says so
    if not facts.meshes or facts.meshes[0].size == 1:
        return []
    program, note = facts.propagation
    if program is None:
        raise EinshardError(
            f'the placements of intermediate values are unknown: {note}',
            code='does-not-compile',
            facts={'instead': 'omit intermediates=, or pass the function'},
        )
    rows = (
        _row(op, value, program, facts.meshes)
        for op in program.operations
        if _is_new(op)
        for value in op.results
        if value.shape
    )
    return list(dict.fromkeys(rows))


def _is_new(op: Operation) -> bool:
    if op.kind == CONSTRAINT and op.operands[0].axes == op.results[0].axes:
        return False
    return op.kind not in _TRIVIAL and op.path.startswith('jit(') and bool(op.place)


def _row(op: Operation, value: Value, program: Propagated, meshes: Sequence[AnyMesh]) -> ArrayRow:
    shard = ArrayType(value.dtype, program.local_shape(value))
    return ArrayRow(
        path=_OUTERMOST.sub('', without_names(op.path), count=1),
        shape=value.shape,
        dtype=value.dtype,
        placement=_placement(op, value, program, meshes),
        bytes=shard.bytes,
        sharded=shard.shape != value.shape or bool(value.unreduced),
        source=op.place,
    )


def _placement(op: Operation, value: Value, program: Propagated, meshes: Sequence[AnyMesh]) -> str:
    """Returns an expression, or what no expression describes in Shardy's words."""
    if 'shard_map' in op.path:
        return 'manual'
    entries = value.axes or ((),) * len(value.shape)
    has_parts = any(':' in axis for axes in entries for axis in axes)
    mesh = next((m for m in meshes if dict(m.shape) == program.mesh), None)
    # JAX has partial sums only on Explicit axes
    is_partial = value.unreduced and AxisType.Explicit not in getattr(mesh, 'axis_types', ())
    if mesh is None or has_parts or is_partial:
        dims = ', '.join(f'{{{", ".join(axes)}}}' for axes in entries)
        unreduced = f', unreduced={{{", ".join(value.unreduced)}}}' if value.unreduced else ''
        return f'[{dims}]{unreduced}'
    sharding = NamedSharding(mesh, partition_spec(entries, value.unreduced))
    return describe_named(sharding, len(value.shape))
