"""Finds the placements of intermediate values.

A partitioned program has only the shapes of shards. So this module compiles the function again, and
makes XLA dump the program before partitioning, with global shapes and shardings.
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
from .._program.hlo.groups import read_groups
from .._program.hlo.opcodes import FREE
from .._program.hlo.text import Instruction, Program
from .._program.jaxpr.names import without_names
from .._progress import progress
from .._sharding.collective_axes import sharding_of_blocks
from .._sharding.describe import describe_named
from .._sharding.mesh import AnyMesh, partition_spec, spec_axes
from .report_rows import ArrayRow

# the sharding of an array, and that of one element of a tuple
_SHARDING = re.compile(r'\bsharding=\{(?!\{)((?:[^{}]|\{[^{}]*\})*)\}')
_ELEMENT = re.compile(r'\{((?:[^{}]|\{[^{}]*\})*)\}')
_OUTERMOST = re.compile(r'jit\([^)]*\)/')
_TILES = re.compile(r'devices=\[([\d,]+)\](<=\S+|[\d,]+)')
_MESH = re.compile(r'(mesh\[.*?\](?:, device_ids=\(.*?\))?), \[(.*)\]')
_TRIVIAL = FREE | {'broadcast', 'copy'}  # compute no new numbers


def find_intermediates(lowered: Lowered, meshes: Sequence[AnyMesh]) -> list[ArrayRow]:
    """Finds the intermediate arrays with a source line.

    Returns [] without a mesh or on one device, because XLA then partitions nothing.
    """
    if not meshes or meshes[0].size == 1:
        return []
    text = _hlo_before_partitioning(lowered)
    if not text:
        # the program came from JAX's persistent cache, whose key ignores xla_dump options
        with _no_persistent_cache():
            text = _hlo_before_partitioning(lowered)
    if not text:
        raise EinshardError(
            'the compiler did not dump the program before partitioning', code='does-not-compile'
        )
    return list(dict.fromkeys(_read_values(text, meshes)))


def _hlo_before_partitioning(lowered: Lowered) -> str:
    """Returns the HLO before partitioning, or '' if XLA does not dump it."""
    with tempfile.TemporaryDirectory() as folder:
        compile_with_dumps(lowered, folder)
        return newest_dump(folder, 'before_*spmd-partitioning*')


def compile_with_dumps(lowered: Lowered, folder: str) -> None:
    """Compiles again, and makes XLA dump the program to `folder` at several stages."""
    options = {
        'xla_dump_to': folder,
        'xla_dump_hlo_as_text': True,
        'xla_dump_hlo_pass_re': 'spmd-partitioning',
    }
    # a program that does not fit into the memory of a device is dumped before compilation fails
    with contextlib.suppress(jax.errors.JaxRuntimeError), progress('compiling again'):
        lowered.compile(compiler_options=options)


def newest_dump(folder: str, ending: str) -> str:
    """Reads the newest file that matches the glob '*{ending}.txt'. Returns '' if none does."""
    # XLA numbers modules and passes: module_0012.jit_step.0034.<pass>.before_<pass>.txt
    files = Path(folder).glob(f'*{ending}.txt')
    newest = max(files, key=lambda f: [*map(int, re.findall(r'\d+', f.name))], default=None)
    return '' if newest is None else newest.read_text(encoding='utf-8')


_cache_lock = threading.Lock()


@contextlib.contextmanager
def _no_persistent_cache() -> Generator[None, None, None]:
    """Disables JAX's persistent compilation cache in all threads.

    Resets the cache, because JAX checks only once whether it is enabled.
    """
    from jax.experimental.compilation_cache import compilation_cache

    config: Any = jax.config
    with _cache_lock:
        enabled = config.jax_enable_compilation_cache
        config.update('jax_enable_compilation_cache', False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            config.update('jax_enable_compilation_cache', enabled)
            compilation_cache.reset_cache()


def _read_values(text: str, meshes: Sequence[AnyMesh]) -> Iterator[ArrayRow]:
    """Yields a row for each computed array that has a sharding and a source line."""
    program = Program(text)
    ops = (op for ops in program.computations.values() for op in ops)
    placements: dict[tuple[str, int], tuple[str, int, bool]] = {}
    for op in ops:
        sharding = _SHARDING.search(op.attributes)
        source = program.source(op) if sharding else None
        is_value = op.op_name.startswith('jit(') and op.opcode not in _TRIVIAL
        if not is_value or source is None or sharding is None:
            continue
        (array,) = op.results
        key = sharding[1], len(array.shape)
        if key not in placements:
            placements[key] = _placement(*key, meshes)
        placement, n_shards, is_partial_sum = placements[key]
        yield ArrayRow(
            path=_OUTERMOST.sub('', without_names(op.op_name), count=1),
            shape=array.shape,
            dtype=array.dtype,
            placement=placement,
            bytes=-(-array.bytes // n_shards),
            sharded=n_shards > 1 or is_partial_sum,
            source=source,
        )


def read_shardings(
    op: Instruction, ndims: Sequence[int], mesh: AnyMesh
) -> list[NamedSharding | None]:
    """Returns the sharding of each result of `op`, or None if `mesh` cannot express it."""
    if mesh.size == 1:
        return [NamedSharding(mesh, PartitionSpec()) for _ in ndims]
    _, _, text = op.attributes.partition('sharding=')
    # the sharding of a tuple has another pair of braces around it
    elements = _ELEMENT.findall(text[text.startswith('{{') :])
    elements = elements or ['replicated'] * len(ndims)  # the partitioner's default
    shardings: list[NamedSharding | None] = []
    for element, ndim in zip(elements, ndims, strict=False):
        blocks = _block_indices(element, ndim, mesh.size)
        shardings.append(None if blocks is None else sharding_of_blocks(blocks, mesh))
    return shardings


def _placement(text: str, ndim: int, meshes: Sequence[AnyMesh]) -> tuple[str, int, bool]:
    """Returns the expression for a sharding, the number of shards, and whether it is a partial sum.

    If no expression describes the sharding, `text`, in HLO syntax, takes its place.
    """
    n_devices = meshes[0].size
    blocks, terms = _block_indices(text, ndim, n_devices), _term_indices(text, ndim, n_devices)
    if blocks is None:
        return text, 1, any(terms)
    n_shards = math.prod(max(indices) + 1 for indices in blocks)
    for mesh in meshes:
        # pass the terms of a partial sum as the blocks of one more axis
        sharding = sharding_of_blocks([*blocks, terms], mesh)
        if sharding is None:
            continue
        entries = spec_axes(sharding.spec)
        unreduced = entries[ndim] if len(entries) > ndim else ()
        # JAX has partial sums only on Explicit axes; on other axes, the HLO text is returned
        if not unreduced or AxisType.Explicit in mesh.axis_types:
            sharding = NamedSharding(mesh, partition_spec(entries[:ndim], unreduced))
            return describe_named(sharding, ndim), n_shards, any(terms)
    return text, n_shards, any(terms)


def _term_indices(text: str, ndim: int, n_devices: int) -> list[int]:
    """Returns which term of a partial sum each device holds, or only zeros for other arrays."""
    terms = [0] * n_devices
    kinds = re.search(r'last_tile_dims=\{(.*unreduced.*?)\}', text)
    if kinds and (tiles := _TILES.match(text)):
        dimension = ndim + kinds[1].split(', ').index('unreduced')
        for tile, device in np.ndenumerate(_tile_devices(tiles)):
            terms[device] = tile[dimension]
    elif (mesh := _MESH.match(text)) and (axes := re.search(r'unreduced=\{(.*?)\}', text)):
        for group in read_groups(f'{mesh[1]} {{{axes[1]}}}'):
            for term, device in enumerate(group):
                terms[device] = term
    return terms


def _tile_devices(tiles: re.Match[str]) -> np.ndarray[Any, Any]:
    """Returns the device of each tile: 'devices=[2,2]<=[4]' -> [[0, 1], [2, 3]]."""
    shape, order = [int(size) for size in tiles[1].split(',')], tiles[2]
    n = math.prod(shape)
    (ids,) = read_groups(f'[1,{n}]{order}' if order[0] == '<' else f'{{{{{order}}}}}')
    return np.array(ids).reshape(shape)


def _block_indices(text: str, ndim: int, n_devices: int) -> list[list[int]] | None:
    """Returns `blocks[axis][device]`, the index of the block that a device holds along an axis.

    Returns None if the sharding is manual or of an unknown kind.
    """
    blocks = [[0] * n_devices for _ in range(ndim)]
    if text.startswith('replicated') or text.endswith(' replicated'):
        return blocks
    if tiles := _TILES.match(text):
        if 'manual' in text:
            return None
        for tile, device in np.ndenumerate(_tile_devices(tiles)):
            for axis in range(ndim):
                blocks[axis][device] = tile[axis]
        return blocks
    if mesh := _MESH.match(text):
        axes = re.findall(r'\{([^{}]*)\}', mesh[2])
        if len(axes) != ndim or 'manual' in text:
            return None
        for axis, mesh_axes in enumerate(axes):
            for group in read_groups(f'{mesh[1]} {{{mesh_axes}}}') if mesh_axes else ():
                for block, device in enumerate(group):
                    blocks[axis][device] = block
        return blocks
    return None
