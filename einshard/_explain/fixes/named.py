"""The source text and the placement of the expressions that suggestions name."""

from __future__ import annotations

import ast
import linecache

from ..._program.jaxpr.spans import Span
from ..._sharding.mesh import AnyMesh, is_canonical_mesh
from ..findings.expressions import expression_of
from .candidates import Point


def source_of(span: Span) -> str | None:
    """Returns the text of an expression, or None if its file cannot be read."""
    lines = [line.encode() for line in linecache.getlines(span.file)[span.line - 1 : span.end_line]]
    if len(lines) < span.end_line - span.line + 1:
        return None
    lines[-1] = lines[-1][: span.end_column]
    lines[0] = lines[0][span.column :]
    return b''.join(lines).decode()


def placement_of(point: Point, mesh: AnyMesh) -> tuple[str, str]:
    """Returns the expression to write for a value, and what else to write, after a comma."""
    found = point.seen
    # the mesh axes of the canonical mesh have no names that code can write
    if found is None or (found[1] and is_canonical_mesh(mesh)):
        return expression_of(point.axes, mesh), ', with the axes that jax.vmap adds'
    axes, names = found
    if not names:
        return expression_of(axes, mesh), ''
    name = repr(names[0] if len(names) == 1 else names)
    which = 'the jax.vmap' if point.n_mapped == 1 else 'the outermost jax.vmap'
    placement = expression_of(axes, mesh) if axes else '... -> ...'
    return placement, f', and spmd_axis_name={name} in {which} around it'


def operand_text(source: str) -> str:
    """Returns the text of the value in a call that constrains it, or ''."""
    start, end = _operand(source)
    return source.encode()[start:end].decode()


def _operand(source: str) -> tuple[int, int]:
    """Returns where the first argument of a call begins and ends, in bytes, or (0, 0)."""
    try:
        call = ast.parse(source, mode='eval').body
    except SyntaxError:
        return 0, 0
    if not (isinstance(call, ast.Call) and call.args):
        return 0, 0
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    first = call.args[0]
    assert first.end_lineno is not None
    assert first.end_col_offset is not None
    return (
        starts[first.lineno - 1] + first.col_offset,
        starts[first.end_lineno - 1] + first.end_col_offset,
    )
