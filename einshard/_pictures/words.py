"""What a picture means, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .._errors import plural
from .._mesh import AnyMesh, is_device_mesh
from .._words import columns, shape_text
from .boxes import Blocks


def meaning(blocks: Blocks, dtype: str, entries: Sequence[tuple[Any, ...]]) -> str:
    """The picture in a sentence; with the mesh axes of each array axis, where they have names."""
    n_shards, replicas = math.prod(blocks.parts), blocks.devices.shape[-1]
    cut = [axis for axis, count in enumerate(blocks.parts) if count > 1]
    whole = '' if blocks.sizes is None else f', {dtype}{shape_text(blocks.sizes)}'
    if not cut:
        thing = 'scalar' if blocks.sizes == () else 'whole array'
        holders = 'the one device' if replicas == 1 else f'each of the {replicas} devices'
        return f'nothing is sharded: {holders} holds the {thing}{whole if blocks.sizes else ""}'
    clauses: list[str] = []
    for i, axis in enumerate(cut):
        verb = ' is in' if i == 0 else ' in'
        clause = f'{blocks.names[axis]}{verb} {blocks.parts[axis]}{"" if i else " parts"}'
        if entries:
            clause += f' over {_group(entries[axis])}'
        clauses.append(clause)
    held = f'1/{n_shards} of the array'
    if blocks.sizes is not None:
        sizes = zip(blocks.sizes, blocks.parts, strict=True)
        held = f'{dtype}{shape_text([size // count for size, count in sizes])}, {held}'
    on = 'one device' if replicas == 1 else plural(replicas, 'device')
    return f'{", ".join(clauses)}; each shard is on {on}; a device holds {held}'


def device_order(
    mesh: AnyMesh, names: Sequence[str], entries: Sequence[tuple[Any, ...]]
) -> list[str]:
    """The dimensions of the devices, as the right side of an expression lists them."""
    owner = {axis: names[i] for i, entry in enumerate(entries) for axis in entry}
    named = not is_device_mesh(mesh)
    grid: list[tuple[str | None, Any, int]] = []
    for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
        holder = owner.get(axis)
        if size > 1 and grid and grid[-1][0] == holder and not named:
            grid[-1] = (holder, axis, grid[-1][2] * size)
        elif size > 1:
            grid.append((holder, axis, size))
    if len(grid) < 2 or not owner:
        return []
    texts: list[str] = []
    for holder, axis, size in grid:
        what = f'{size} replicas' if holder is None else f'{size} parts of {holder}'
        texts.append(f'{axis} ({what})' if named else what)
    thing = 'mesh axes' if named else 'devices'
    return [f'{thing}, slowest first: {(", " if named else " x ").join(texts)}']


def _group(mesh_axes: Sequence[Any]) -> str:
    axes = ','.join(map(str, mesh_axes))
    return axes if len(mesh_axes) == 1 else f'({axes})'


def wrapped(words: Sequence[str], width: int) -> Iterator[str]:
    """Lines of at most `width` columns, broken between clauses where that will do."""
    for line in words:
        clauses = ''
        for clause in re.split('(?<=[;:]) ', line):
            if clauses and columns(clauses) + columns(clause) >= width:
                yield from _filled(clauses, width)
                clauses = clause
            else:
                clauses = f'{clauses} {clause}'.lstrip()
        yield from _filled(clauses, width)


def _filled(text: str, width: int) -> Iterator[str]:
    # textwrap counts characters, of which some are two columns wide
    line = ''
    for word in text.split():
        if line and columns(f'{line} {word}') > width:
            yield line
            line = word
        else:
            line = f'{line} {word}'.lstrip()
    yield line
