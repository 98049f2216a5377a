"""Reads programs that do not compile because they do not fit into the memory of a device.

The TPU compiler raises RESOURCE_EXHAUSTED only after optimization. So this module compiles a second
time, and makes the compiler dump the optimized program and the sizes of its buffers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from .._errors import EinshardError
from .._program.hlo.text import Program
from .._sharding.mesh import device_mesh
from .intermediates import compile_with_dumps, newest_dump, read_shardings
from .lowered import Stages

_AVAILABLE = re.compile(r'exceeds available HBM \((\d+(?:\.\d+)?)([KMGT]?)\)')
_UNITS = {'': 0, 'K': 1, 'M': 2, 'G': 3, 'T': 4}
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
    kept, meshes = _arguments_and_meshes(lowered)
    with tempfile.TemporaryDirectory() as folder:
        compile_with_dumps(lowered, folder)
        before = newest_dump(folder, 'before_*spmd-partitioning*')
        # for a single device, there is no partitioning
        before = before or newest_dump(folder, '.before_optimizations')
        after = newest_dump(folder, '.after_optimizations')
        buffers = newest_dump(folder, '.after_optimizations-buffer-assignment')
    if not (before and after and buffers):
        return None
    program = Program(before)
    parameters = program.parameters
    leaves, treedef = jtu.tree_flatten(lowered.args_info)
    if len(kept) != len(parameters):
        return None
    results, out_tree = jtu.tree_flatten(lowered.out_info)
    arrays = [(op, [len(leaves[i].shape)]) for i, op in zip(kept, parameters, strict=True)]
    arrays.append((program.root, [len(result.shape) for result in results]))
    for mesh in meshes:
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


def _arguments_and_meshes(lowered: Lowered) -> tuple[Sequence[int], Sequence[Mesh]]:
    """Returns the indices of the argument leaves that JAX keeps, and meshes of all its devices.

    The devices may be known only from `in_shardings=` or from constraints, and `Lowered` has no
    public property for them. So this reads private fields, which tests/test_jax_facts.py checks.
    """
    lowering: Any = lowered._lowering  # type: ignore[reportPrivateUsage]
    options, devices = lowering.compile_args, [*lowering._device_list]
    shardings = (
        *options['in_shardings'],
        *options['out_shardings'],
        *options['intermediate_shardings'],
    )
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    meshes += [options['context_mesh'], device_mesh(devices)]
    # the partitioner numbers the devices in this order
    found = [m for m in meshes if isinstance(m, Mesh) and [*m.devices.flat] == devices]
    return sorted(options['kept_var_idx']), list(dict.fromkeys(found))


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
