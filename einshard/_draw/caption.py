"""Writes the sentences below a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._text import display_width, shape_text
from .blocks import Blocks


def describe_shards(blocks: Blocks, dtype: str, entries: Sequence[tuple[Any, ...]]) -> str:
    """Describes the shards: 'x is split into 4 parts; each shard is on one device; ..'.

    `entries` has the mesh axes that shard each array axis, or is [] to leave them out.
    """
    n_shards = blocks.n_blocks
    sharded = [axis for axis, count in enumerate(blocks.parts) if count > 1]
    if not sharded:
        noun = 'scalar' if blocks.sizes == () else 'full array'
        type_text = f', {dtype}{shape_text(blocks.sizes)}' if blocks.sizes else ''
        if blocks.terms > 1:
            comma = ',' if type_text else ''
            return f'nothing is sharded: the {noun}{type_text}{comma} {_holders_text(blocks)}'
        n = blocks.replicas
        holds = 'the one device holds' if n == 1 else f'each of the {n} devices holds a replica of'
        return f'nothing is sharded: {holds} the {noun}{type_text}'
    clauses: list[str] = []
    for i, axis in enumerate(sharded):
        verb = 'into' if i else 'is split into'
        clause = f'{blocks.names[axis]} {verb} {blocks.parts[axis]}{"" if i else " parts"}'
        if entries:
            names = ','.join(map(str, entries[axis]))
            clause += f' over {names}' if len(entries[axis]) == 1 else f' over ({names})'
        clauses.append(clause)
    shard = f'1/{n_shards} of the array'
    if blocks.sizes is not None:
        sizes = zip(blocks.sizes, blocks.parts, strict=True)
        shard = f'{dtype}{shape_text([size // count for size, count in sizes])}, {shard}'
    return f'{", ".join(clauses)}; each shard {_holders_text(blocks)}; a device holds {shard}'


def _holders_text(blocks: Blocks) -> str:
    terms, replicas = blocks.terms, blocks.replicas
    if terms == 1:
        return f'is replicated on {replicas} devices' if replicas > 1 else 'is on one device'
    each = f', each replicated on {replicas} devices' if replicas > 1 else f' on {terms} devices'
    return f'is a sum of {terms} terms{each}'


def legend(blocks: Blocks) -> str:
    """Returns 'a sum of 2 terms, hatched: 4 replicas', or '' if neither applies."""
    words = [f'a sum of {blocks.terms} terms'] * (blocks.terms > 1)
    words += [f'hatched: {blocks.replicas} replicas'] * (blocks.replicas > 1)
    return ', '.join(words)


def describe_device_order(
    mesh: Mapping[Any, int],
    named: bool,
    names: Sequence[str],
    entries: Sequence[tuple[Any, ...]],
    signs: Mapping[Any, str],
) -> list[str]:
    """Returns one line, such as 'devices, slowest-varying first: 2 replicas x 4 parts of a'.

    Without signs, returns [] if nothing is sharded or if the device grid has fewer than two
    dimensions. For the arguments, see `draw`.
    """
    array_axis = {axis: names[i] for i, entry in enumerate(entries) for axis in entry}
    dimensions: list[tuple[str, Any, int]] = []  # label, mesh axis, size
    for axis, size in mesh.items():
        if axis in array_axis:
            label = f'parts of {array_axis[axis]}'
        else:
            label = _LABEL_OF_SIGN[signs.get(axis, '')]
        if size > 1 and dimensions and dimensions[-1][0] == label and not named:
            dimensions[-1] = (label, axis, dimensions[-1][2] * size)
        elif size > 1:
            dimensions.append((label, axis, size))
    if not signs and (len(dimensions) < 2 or not array_axis):
        return []
    texts = [f'{axis} ({n} {label})' if named else f'{n} {label}' for label, axis, n in dimensions]
    noun = 'mesh axes' if named else 'devices'
    return [f'{noun}, slowest-varying first: {(", " if named else " x ").join(texts)}']


_LABEL_OF_SIGN = {
    '': 'replicas',
    '+': 'terms of a sum',
    '=': 'replicas whose gradients are terms of a sum',
}


def wrapped(sentences: Sequence[str], width: int) -> Iterator[str]:
    """Wraps text to `width` columns, between clauses if possible."""
    for sentence in sentences:
        clauses = ''
        for clause in re.split('(?<=[;:]) ', sentence):
            if clauses and display_width(clauses) + display_width(clause) >= width:
                yield from _filled(clauses, width)
                clauses = clause
            else:
                clauses = f'{clauses} {clause}'.lstrip()
        yield from _filled(clauses, width)


def _filled(text: str, width: int) -> Iterator[str]:
    # not textwrap, which counts a wide character as one column
    line = ''
    for word in text.split():
        if line and display_width(f'{line} {word}') > width:
            yield line
            line = word
        else:
            line = f'{line} {word}'.lstrip()
    yield line
