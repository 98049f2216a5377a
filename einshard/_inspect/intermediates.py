"""Finds the placements of intermediate values.

A partitioned program has only the shapes of shards. So this module compiles the function again, and
makes XLA dump the program before partitioning, when instructions have global shapes and shardings.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.stages import Lowered

from .._errors import EinshardError
from .._hlo.groups import read_groups
from .._hlo.module import Instruction, Module
from .._progress import progress
from .._sharding.describe import describe_named
from .._sharding.mesh import AnyMesh, partition_spec, spec_axes
from .collective_axes import sharding_of
from .report_rows import ArrayRow

_SHARDING = re.compile(r'\bsharding=\{(?!\{)((?:[^{}]|\{[^{}]*\})*)\}')  # but not of a tuple
_ELEMENT = re.compile(r'\{((?:[^{}]|\{[^{}]*\})*)\}')
_OUTERMOST = re.compile(r'jit\([^)]*\)/')
_TILES = re.compile(r'devices=\[([\d,]+)\](<=\S+|[\d,]+)')
_MESH = re.compile(r'(mesh\[.*?\](?:, device_ids=\(.*?\))?), \[(.*)\]')
# opcodes that compute no value of the user's code
_NO_VALUES = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'broadcast', 'copy', 'bitcast'}


def find_intermediates(lowered: Lowered, meshes: Sequence[AnyMesh]) -> list[ArrayRow]:
    """Finds the intermediate arrays that have a source line."""
    if not meshes or meshes[0].size == 1:
        return []
    text = _before_partitioning(lowered)
    if text is None:
        # the program came from JAX's persistent cache, whose key ignores xla_dump options
        with _no_persistent_cache():
            text = _before_partitioning(lowered)
    if text is None:
        raise EinshardError('the compiler did not dump the program before partitioning')
    return list(dict.fromkeys(_read(text, meshes)))


def _before_partitioning(lowered: Lowered) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        # a program that does not fit into the memory of a device is dumped before it fails
        with contextlib.suppress(jax.errors.JaxRuntimeError), progress('compiling again'):
            lowered.compile(
                compiler_options={
                    'xla_dump_to': folder,
                    'xla_dump_hlo_as_text': True,
                    'xla_dump_hlo_pass_re': 'spmd-partitioning',
                }
            )
        written = sorted(Path(folder).glob('*before_*spmd-partitioning*.txt'))
        return written[-1].read_text(encoding='utf-8') if written else None


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _no_persistent_cache() -> Generator[None, None, None]:
    """Disables JAX's persistent compilation cache, also for other threads.

    The resets are needed because JAX checks only once whether the cache is enabled.
    """
    from jax.experimental.compilation_cache import compilation_cache

    config: Any = jax.config
    with _one_at_a_time:
        enabled = config.jax_enable_compilation_cache
        config.update('jax_enable_compilation_cache', False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            config.update('jax_enable_compilation_cache', enabled)
            compilation_cache.reset_cache()


def _read(text: str, meshes: Sequence[AnyMesh]) -> Iterator[ArrayRow]:
    module = Module(text)
    placements: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    for _, _, op in module.find(' sharding={'):
        source, sharding = module.source(op), _SHARDING.search(op.attributes)
        is_value = op.op_name.startswith('jit(') and op.opcode not in _NO_VALUES
        if not is_value or source is None or sharding is None:
            continue
        (array,) = op.results
        key = sharding[1], len(array.shape)
        if key not in placements:
            placements[key] = _placement(*key, meshes)
        placement, parts = placements[key]
        yield ArrayRow(
            path=_OUTERMOST.sub('', op.op_name, count=1),
            shape=array.shape,
            dtype=array.dtype,
            placement=placement,
            bytes=-(-array.bytes // math.prod(parts)),
            sharded=math.prod(parts) > 1,
            source=source,
        )


def shardings_in(
    op: Instruction, n_dims: Sequence[int], mesh: AnyMesh
) -> list[NamedSharding | None]:
    """Reads the shardings of an instruction, for arrays of these ranks; None if not on `mesh`."""
    if mesh.size == 1:
        return [NamedSharding(mesh, PartitionSpec()) for _ in n_dims]
    _, _, text = op.attributes.partition('sharding=')
    texts = _ELEMENT.findall(text[text.startswith('{{') :])[: len(n_dims)]
    texts += [''] * (len(n_dims) - len(texts))
    blocks = [
        _blocks(text, n, mesh.size) if text else None for text, n in zip(texts, n_dims, strict=True)
    ]
    return [None if one is None else sharding_of(one, mesh) for one in blocks]


def _placement(text: str, n_dims: int, meshes: Sequence[AnyMesh]) -> tuple[str, tuple[int, ...]]:
    """Converts a sharding in HLO text to an expression and the number of shards per axis."""
    blocks = _blocks(text, n_dims, meshes[0].size)
    if blocks is None:
        return text, (1,) * n_dims
    parts = tuple(max(of_axis) + 1 for of_axis in blocks)
    terms = _terms(text, n_dims, meshes[0].size)
    for mesh in meshes:
        # as if the terms of a sum were stacked along one more axis
        sharding = sharding_of([*blocks, terms], mesh)
        if sharding is None:
            continue
        entries = spec_axes(sharding.spec)
        axes = entries[n_dims] if len(entries) > n_dims else ()
        if not axes or AxisType.Explicit in mesh.axis_types:
            sharding = NamedSharding(mesh, partition_spec(entries[:n_dims], axes))
            return describe_named(sharding, n_dims), parts
    return text, parts


def _terms(text: str, n_dims: int, n_devices: int) -> list[int]:
    """Lists which term of a sum each device has; zeros if the value is not a partial sum."""
    terms = [0] * n_devices
    kinds = re.search(r'last_tile_dims=\{(.*unreduced.*?)\}', text)
    if kinds and (tiles := _TILES.match(text)):
        dimension = n_dims + kinds[1].split(', ').index('unreduced')
        for at, device in np.ndenumerate(_grid(tiles)):
            terms[device] = at[dimension]
    elif (mesh := _MESH.match(text)) and (axes := re.search(r'unreduced=\{(.*?)\}', text)):
        for group in read_groups(f'{mesh[1]} {{{axes[1]}}}'):
            for term, device in enumerate(group):
                terms[device] = term
    return terms


def _grid(tiles: re.Match[str]) -> np.ndarray[Any, Any]:
    """Returns the device of each tile."""
    shape, order = [int(size) for size in tiles[1].split(',')], tiles[2]
    n = math.prod(shape)
    (ids,) = read_groups(f'[1,{n}]{order}' if order[0] == '<' else f'{{{{{order}}}}}')
    return np.array(ids).reshape(shape)


def _blocks(text: str, n_dims: int, n_devices: int) -> list[list[int]] | None:
    """Lists, for each axis, the block index of each device; None if the text does not tell."""
    blocks = [[0] * n_devices for _ in range(n_dims)]
    if text.startswith('replicated') or text.endswith(' replicated'):
        return blocks
    if tiles := _TILES.match(text):
        if 'manual' in text:
            return None
        for at, device in np.ndenumerate(_grid(tiles)):
            for axis in range(n_dims):
                blocks[axis][device] = at[axis]
        return blocks
    if mesh := _MESH.match(text):
        axes = re.findall(r'\{([^{}]*)\}', mesh[2])
        if len(axes) != n_dims or 'manual' in text:
            return None
        for axis, mesh_axes in enumerate(axes):
            for group in read_groups(f'{mesh[1]} {{{mesh_axes}}}') if mesh_axes else ():
                for block, device in enumerate(group):
                    blocks[axis][device] = block
        return blocks
    return None
