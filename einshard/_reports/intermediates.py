"""A lowered program -> where the partitioner places the values in between.

What devices compute on after partitioning are parts, and nothing says of what. So the program is
compiled once more, and has XLA write down what it is before it is partitioned, when every
instruction has its sharding.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jax.stages import Lowered

from .._describe import describe_named
from .._errors import EinshardError
from .._hlo.device_groups import read_groups
from .._hlo.syntax import Sources, op_name, read_instruction
from .._mesh import AnyMesh
from .along import sharding_of
from .rows import ArrayRow

_LINE = re.compile(r'^  .* sharding=\{(?!\{).*op_name="jit\(.*$', re.MULTILINE)
_SHARDING = re.compile(r'\bsharding=\{((?:[^{}]|\{[^{}]*\})*)\}')
_OUTERMOST = re.compile(r'jit\([^)]*\)/')
_TILES = re.compile(r'devices=\[([\d,]+)\](<=\S+|[\d,]+)')
_MESH = re.compile(r'(mesh\[.*?\](?:, device_ids=\(.*?\))?), \[(.*)\]')
# these make no value that anyone named
_NO_VALUES = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'broadcast', 'copy', 'bitcast'}


def find_intermediates(lowered: Lowered, meshes: Sequence[AnyMesh]) -> list[ArrayRow]:
    """The arrays in between that have a line in the source, with their placements."""
    if not meshes or meshes[0].size == 1:
        return []
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(
            compiler_options={
                'xla_dump_to': folder,
                'xla_dump_hlo_as_text': True,
                'xla_dump_hlo_pass_re': 'spmd-partitioning',
            }
        )
        written = sorted(Path(folder).glob('*before_*spmd-partitioning*.txt'))
        if not written:
            raise EinshardError(
                'the compiler did not show the program before it was partitioned',
                facts={'perhaps': 'it was in the compilation cache of JAX'},
            )
        text = written[-1].read_text(encoding='utf-8')
    return list(dict.fromkeys(_read(text, meshes)))


def _read(text: str, meshes: Sequence[AnyMesh]) -> Iterator[ArrayRow]:
    start = re.search(r'^(?:%|ENTRY )', text, re.MULTILINE)
    sources = Sources(text[: start.start() if start else 0].splitlines())
    known: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    for found in _LINE.finditer(text):
        made = read_instruction(found[0])
        source = sources.line(made.metadata)
        sharding, name = _SHARDING.search(made.attributes), op_name(made.metadata)
        if made.opcode in _NO_VALUES or source is None or sharding is None or not name:
            continue
        (array,) = made.results
        key = sharding[1], len(array.shape)
        if key not in known:
            known[key] = _placement(*key, meshes)
        placement, parts = known[key]
        yield ArrayRow(
            path=_OUTERMOST.sub('', name, count=1),
            shape=array.shape,
            dtype=array.dtype,
            placement=placement,
            bytes=-(-array.bytes // math.prod(parts)),
            sharded=math.prod(parts) > 1,
            source=source,
        )


def _placement(text: str, n_dims: int, meshes: Sequence[AnyMesh]) -> tuple[str, tuple[int, ...]]:
    """The expression of a sharding as XLA writes it, and into how many parts it cuts each axis."""
    blocks = _blocks(text, n_dims, meshes[0].size)
    if blocks is None:
        return text, (1,) * n_dims
    parts = tuple(max(of_axis) + 1 for of_axis in blocks)
    for mesh in meshes:
        sharding = sharding_of(blocks, mesh)
        if sharding is not None:
            return describe_named(sharding, n_dims), parts
    return text, parts


def _blocks(text: str, n_dims: int, n_devices: int) -> list[list[int]] | None:
    """Which block of each axis every device holds; None where that is not said."""
    blocks = [[0] * n_devices for _ in range(n_dims)]
    if text.startswith('replicated') or text.endswith(' replicated'):
        return blocks
    if tiles := _TILES.match(text):
        if 'manual' in text:
            return None
        shape = [int(size) for size in tiles[1].split(',')]
        order = tiles[2]
        (ids,) = read_groups(f'[1,{n_devices}]{order}' if order[0] == '<' else f'{{{{{order}}}}}')
        grid = np.array(ids).reshape(shape)
        for at, device in np.ndenumerate(grid):
            for axis in range(n_dims):
                blocks[axis][device] = at[axis]
        return blocks
    if mesh := _MESH.match(text):
        cuts = re.findall(r'\{([^{}]*)\}', mesh[2])
        if len(cuts) != n_dims or 'unreduced' in text or 'manual' in text:
            return None
        for axis, cut in enumerate(cuts):
            for group in read_groups(f'{mesh[1]} {{{cut}}}') if cut else ():
                for block, device in enumerate(group):
                    blocks[axis][device] = block
        return blocks
    return None
