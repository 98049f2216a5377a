"""Reads programs that do not compile because they do not fit into the memory of a device.

The TPU compiler raises RESOURCE_EXHAUSTED only after optimization. So this module compiles a second
time, and makes the compiler dump the optimized program and the sizes of its buffers.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from .._errors import EinshardError
from .._program.hlo.groups import read_groups
from .._program.hlo.text import HloModule, Instruction
from .._program.private_jax import compile_options, devices_of, kept_arguments
from .._progress import progress
from .._sharding.collective_axes import sharding_of_blocks
from .._sharding.mesh import AnyMesh, device_mesh
from .stages import Stages

_AVAILABLE = re.compile(r'exceeds available HBM \((\d+(?:\.\d+)?)([KMGT]?)\)')
_UNITS = {'': 0, 'K': 1, 'M': 2, 'G': 3, 'T': 4}
# the sharding of one element of a tuple
_ELEMENT = re.compile(r'\{((?:[^{}]|\{[^{}]*\})*)\}')
_TILES = re.compile(r'devices=\[([\d,]+)\](<=\S+|[\d,]+)')
_MESH = re.compile(r'(mesh\[.*?\](?:, device_ids=\(.*?\))?), \[(.*)\]')
_ALLOCATION = re.compile(r'^allocation \d+: size (\d+), (.*)', re.MULTILINE)


@dataclass(frozen=True)
class Oversized:
    """Stands in for the `Compiled` of a program that does not fit into memory, in reports.

    `available` is the memory that a device has for programs, in bytes.
    """

    args_info: Any
    input_shardings: Any
    out_info: Any
    text: str
    memory: Any
    available: int

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Any:
        return self.memory


def compile_stages(stages: Stages) -> Compiled | Oversized:
    """Compiles a program. If it does not fit into memory, reads the compiler's dumps instead.

    Raises the compiler's error if the dumps cannot be read, for example because no mesh expresses
    their shardings.
    """
    try:
        return stages.compile()
    except EinshardError as error:
        available = _AVAILABLE.search(str(error.__cause__))
        if available is None:
            raise
        size, unit = available.groups()
        oversized = _read_oversized(stages.lower(), int(float(size) * 1024 ** _UNITS[unit]))
        if oversized is None:
            raise
        return oversized


def _read_oversized(lowered: Lowered, available: int) -> Oversized | None:
    """Compiles again and reads the compiler's dumps. Returns None if they cannot be read."""
    # the devices may be known only from `in_shardings=` or from constraints
    options, devices, kept = compile_options(lowered), devices_of(lowered), kept_arguments(lowered)
    given = (options[f'{name}_shardings'] for name in ('in', 'out', 'intermediate'))
    meshes = [s.mesh for each in given for s in each if isinstance(s, NamedSharding)]
    meshes += [options['context_mesh'], device_mesh(devices)]
    # the partitioner numbers the devices in this order
    meshes = [m for m in meshes if isinstance(m, Mesh) and [*m.devices.flat] == devices]
    with tempfile.TemporaryDirectory() as folder:
        dumped = {
            'xla_dump_to': folder,
            'xla_dump_hlo_as_text': True,
            'xla_dump_hlo_pass_re': 'spmd-partitioning',
        }
        # what does not fit into the memory of a device is dumped before compilation fails
        with contextlib.suppress(jax.errors.JaxRuntimeError), progress('compiling again'):
            lowered.compile(compiler_options=dumped)
        before = newest_dump(folder, 'before_*spmd-partitioning*')
        # for a single device, there is no partitioning
        before = before or newest_dump(folder, '.before_optimizations')
        after = newest_dump(folder, '.after_optimizations')
        buffers = newest_dump(folder, '.after_optimizations-buffer-assignment')
    if not (before and after and buffers):
        return None
    program = HloModule(before)
    parameters = program.parameters
    leaves, treedef = jtu.tree_flatten(lowered.args_info)
    if len(kept) != len(parameters):
        return None
    results, out_tree = jtu.tree_flatten(lowered.out_info)
    arrays = [(op, [len(leaves[i].shape)]) for i, op in zip(kept, parameters, strict=True)]
    arrays.append((program.root, [len(result.shape) for result in results]))
    for mesh in dict.fromkeys(meshes):
        shardings = [s for op, ndims in arrays for s in read_shardings(op, ndims, mesh)]
        if None not in shardings:
            break
    else:
        return None
    argument_shardings = dict(zip(kept, shardings, strict=False))
    out_info = out_tree.unflatten(
        jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding)
        for result, sharding in zip(results, shardings[len(kept) :], strict=True)
    )
    return Oversized(
        lowered.args_info,
        treedef.unflatten([argument_shardings.get(i) for i in range(len(leaves))]),
        out_info,
        after,
        read_sizes(buffers),
        available,
    )


def read_sizes(buffers: str) -> Any:
    """Converts a dumped buffer assignment to the fields of `Compiled.memory_analysis()`."""
    sizes = {'argument': 0, 'output': 0, 'temp': 0, 'alias': 0, 'constant': 0}
    sizes['generated_code'] = 0
    for size, description in _ALLOCATION.findall(buffers):
        if 'color ' in description:  # in a memory other than HBM, such as VMEM
            continue
        is_argument, is_output = 'parameter ' in description, 'maybe-live-out' in description
        is_constant = 'constant:' in description
        for kind, included in (
            ('argument', is_argument),
            ('output', is_output),
            ('alias', is_argument and is_output),
            ('constant', is_constant),
            ('temp', not (is_argument or is_output or is_constant)),
        ):
            sizes[kind] += int(size) * included
    return SimpleNamespace(**{f'{kind}_size_in_bytes': n for kind, n in sizes.items()})


# --- dumps of the compiler ------------------------------------------------------------------------


def newest_dump(folder: str, ending: str) -> str:
    """Reads the newest file that matches the glob '*{ending}.txt'. Returns '' if none does."""
    # XLA numbers modules and passes: module_0012.jit_step.0034.<pass>.before_<pass>.txt
    files = Path(folder).glob(f'*{ending}.txt')
    newest = max(files, key=lambda f: [*map(int, re.findall(r'\d+', f.name))], default=None)
    return '' if newest is None else newest.read_text(encoding='utf-8')


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
