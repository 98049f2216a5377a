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
from jax.sharding import AbstractMesh, NamedSharding
from jax.stages import Compiled

from .._errors import EinshardError
from .._hlo.module import Module
from .._sharding.context import current_context, is_mesh_in_context
from .._sharding.mesh import AnyMesh, MeshLike
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


def find_compile_mesh(stages: Stages, args: Any, mesh: MeshLike | None) -> AnyMesh | None:
    """Finds the mesh that a program will be compiled for, or None if it is unknown.

    `mesh` is the user's `mesh=`.
    """
    if stages.program is not None:
        return stages.program.mesh
    if mesh is not None:
        return current_context(mesh).lowering_mesh
    for leaf in jtu.tree_leaves(args):
        sharding = getattr(leaf, 'sharding', None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    ambient = current_context(None).lowering_mesh
    return ambient if is_mesh_in_context(ambient) else None


def compile_stages(stages: Stages, mesh: AnyMesh | None) -> Compiled | Oversized:
    """Compiles a program. If it does not fit into memory, reads the compiler's dumps instead.

    Raises the compiler's error if the dumps cannot be read, for example because there is no mesh.
    """
    try:
        return stages.compile()
    except EinshardError as error:
        available = _AVAILABLE.search(str(error.__cause__))
        if available is None or mesh is None or isinstance(mesh, AbstractMesh):
            raise
        size, unit = available.groups()
        oversized = _read_oversized(stages, mesh, int(float(size) * 1024 ** _UNITS[unit]))
        if oversized is None:
            raise
        return oversized


def _read_oversized(stages: Stages, mesh: AnyMesh, available: int) -> Oversized | None:
    """Compiles again and reads the compiler's dumps. Returns None if they cannot be read."""
    lowered = stages.lower()
    with tempfile.TemporaryDirectory() as folder:
        compile_with_dumps(lowered, folder)
        # for a single device, there is no partitioning
        ending = 'before_*spmd-partitioning*' if mesh.size > 1 else '.before_optimizations'
        before = newest_dump(folder, ending)
        after = newest_dump(folder, '.after_optimizations')
        buffers = newest_dump(folder, '.after_optimizations-buffer-assignment')
    if not (before and after and buffers):
        return None
    module = Module(before)
    parameters = sorted(module.entry.parameters(), key=lambda op: op.parameter_number)
    leaves, treedef = jtu.tree_flatten(lowered.args_info)
    used = _used_arguments(stages, len(leaves))
    if len(used) != len(parameters):
        return None
    argument_shardings = {
        i: read_shardings(op, [len(leaves[i].shape)], mesh)[0]
        for i, op in zip(used, parameters, strict=True)
    }
    results, out_tree = jtu.tree_flatten(lowered.out_info)
    ndims = [len(result.shape) for result in results]
    result_shardings = read_shardings(module.entry.root, ndims, mesh)
    if None in argument_shardings.values() or None in result_shardings:
        return None
    shardings = treedef.unflatten([argument_shardings.get(i) for i in range(len(leaves))])
    out_info = out_tree.unflatten(
        jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding)
        for result, sharding in zip(results, result_shardings, strict=True)
    )
    sizes = read_sizes(buffers)
    return Oversized(lowered.args_info, shardings, out_info, after, sizes, available)


def _used_arguments(stages: Stages, n_leaves: int) -> Sequence[int]:
    """Returns the indices of the argument leaves that JAX keeps, or all if there is no jaxpr."""
    if stages.traced is None:
        return range(n_leaves)
    jaxpr = stages.traced.jaxpr.jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return [i for i, variable in enumerate(jaxpr.invars) if id(variable) in used]


def read_sizes(buffers: str) -> Any:
    """Converts a dumped buffer assignment to the fields of `Compiled.memory_analysis()`."""
    sizes = {'argument': 0, 'output': 0, 'temp': 0, 'alias': 0, 'generated_code': 0}
    for size, description in _ALLOCATION.findall(buffers):
        if 'color ' in description:  # in a memory other than HBM, such as VMEM
            continue
        is_argument, is_output = 'parameter ' in description, 'maybe-live-out' in description
        for kind, included in (
            ('argument', is_argument),
            ('output', is_output),
            ('alias', is_argument and is_output),
            ('temp', not (is_argument or is_output)),
        ):
            sizes[kind] += int(size) * included
    return SimpleNamespace(**{f'{kind}_size_in_bytes': n for kind, n in sizes.items()})
