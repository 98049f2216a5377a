"""Writes changes of a program as a unified diff of its source files."""

from __future__ import annotations

import ast
import difflib
import linecache
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

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


def make_patch(points: Sequence[tuple[Point, NamedSharding]], others: Sequence[str]) -> str:
    """Returns a unified diff of the constraints, with other changes as comments at its top."""
    by_file: dict[str, list[tuple[Point, NamedSharding]]] = defaultdict(list)
    for point, sharding in points:
        by_file[point.span.file].append((point, sharding))
    texts = [f'# {text}\n' for text in others]
    for file, several in by_file.items():
        lines = linecache.getlines(file)
        new = ''.join(lines).encode()
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        written_spans: set[Span] = set()
        # from the end of the file, so that earlier spans stay valid; inner ones before outer ones
        for point, sharding in sorted(several, key=lambda one: one[0].span[1:], reverse=True):
            span = point.span
            # a constraint may change in two ways
            source = None if span in written_spans else source_of(span)
            written = _written(point, sharding, source, ''.join(lines))
            if written is None:
                placement, mapped = placement_of(point, sharding.mesh)
                texts.append(f"# {span.source}: constrain the value to '{placement}'{mapped}\n")
                continue
            written_spans.add(span)
            start = starts[span.line - 1] + span.column
            end = starts[span.end_line - 1] + span.end_column
            new = new[:start] + written.encode() + new[end:]
        changed = new.decode().splitlines(keepends=True)
        # as git writes it, from the current folder
        path = Path(file)
        name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        texts += difflib.unified_diff(lines, changed, f'a/{name}', f'b/{name}')
    return ''.join(texts)


def _written(
    point: Point, sharding: NamedSharding, source: str | None, file_text: str
) -> str | None:
    """Writes the expression with its constraint. Returns None if that cannot be done in place."""
    found = point.seen
    # nor can the `jax.vmap` be found
    if source is None or found is None or found[1]:
        return None
    axes, _ = found
    placement = expression_of(axes, sharding.mesh)
    entries = [_entry(axis.mesh_axes) for axis in axes]
    if point.of_operand:
        start, end = _operand(source)
        value = replace(point, is_constraint=False, of_operand=False)
        written = _written(value, sharding, operand_text(source), file_text) if end else None
        text = source.encode()
        return None if written is None else (text[:start] + written.encode() + text[end:]).decode()
    if point.is_constraint:
        return _rewritten(source, placement, entries)
    uses = [*_calls(file_text)]
    mesh = next((mesh for _, mesh in uses if mesh), '')
    if any(name == 'einshard' for name, _ in uses):
        return f"einshard({source}, '{placement}'{f', mesh={mesh}' if mesh else ''})"
    if mesh and (alias := _alias_of_spec(file_text)):
        spec = f'{alias}({", ".join(entries)})'
        return f'jax.lax.with_sharding_constraint({source}, NamedSharding({mesh}, {spec}))'
    if 'import einshard' in file_text:
        return f"einshard.einshard({source}, '{placement}')"
    return None


def _entry(mesh_axes: Sequence[str]) -> str:
    if len(mesh_axes) > 1:
        return f'({", ".join(map(repr, mesh_axes))})'
    return repr(mesh_axes[0]) if mesh_axes else 'None'


def _rewritten(source: str, placement: str, entries: Sequence[str]) -> str | None:
    """Writes another placement into the call of a constraint."""
    try:
        call = ast.parse(source.strip(), mode='eval').body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call):
        return None
    segment = source.strip()
    for node in ast.walk(call):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node in call.args:
            old = ast.get_source_segment(segment, node)
            return old and segment.replace(old, repr(placement), 1)
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and _name(node.func) in ('P', 'PartitionSpec'):
            old = ast.get_source_segment(segment, node)
            new = f'{ast.get_source_segment(segment, node.func)}({", ".join(entries)})'
            return old and segment.replace(old, new, 1)
    return None


def _calls(text: str) -> Iterator[tuple[str, str]]:
    """Yields (name, mesh) for the calls in a file that constrain values or make shardings."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, mesh = _name(node.func), ''
            if name == 'einshard' and isinstance(node.func, ast.Name):
                given: Any = next((k.value for k in node.keywords if k.arg == 'mesh'), None)
            elif name == 'NamedSharding' and node.args:
                given = node.args[0]
            else:
                continue
            if given is not None and isinstance(given, ast.Name | ast.Attribute):
                mesh = ast.get_source_segment(text, given) or ''
            yield name, mesh


def _name(node: ast.expr) -> str:
    return getattr(node, 'id', getattr(node, 'attr', ''))


def _alias_of_spec(text: str) -> str:
    if found := re.search(r'PartitionSpec as (\w+)', text):
        return found[1]
    return 'PartitionSpec' if re.search(r'\bPartitionSpec\b', text) else ''
