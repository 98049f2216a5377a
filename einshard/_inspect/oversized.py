"""Reads programs that do not compile because they do not fit into the memory of a device.

The compiler for TPUs raises RESOURCE_EXHAUSTED only after optimization. So a second compilation
makes it dump the optimized program and the sizes of its buffers.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding
from jax.stages import Compiled

from .._errors import EinshardError
from .._hlo.module import Module
from .._progress import progress
from .._sharding.context import current_context, is_mesh_in_context
from .._sharding.mesh import AnyMesh, MeshLike
from .intermediates import shardings_in
from .lowered import Stages

_AVAILABLE = re.compile(r'exceeds available HBM \((\d+(?:\.\d+)?)([KMGT]?)\)')
_UNITS = {'': 0, 'K': 1, 'M': 2, 'G': 3, 'T': 4}
_ALLOCATION = re.compile(r'^allocation \d+: size (\d+), (.*)', re.MULTILINE)


class Oversized:
    """A program that does not fit into memory, with the methods of `Compiled` that reports use.

    Attributes:
        available: bytes that the device has for programs.
    """

    def __init__(
        self, args_info: Any, shardings: Any, out_info: Any, text: str, memory: Any, available: int
    ):
        self.args_info = args_info
        self.input_shardings = shardings
        self.out_info = out_info
        self.available = available
        self._text = text
        self._memory = memory

    def as_text(self) -> str:
        return self._text

    def memory_analysis(self) -> Any:
        return self._memory

    def cost_analysis(self) -> Mapping[str, float]:
        return {}


def given_mesh(stages: Stages, args: Any, mesh: MeshLike | None) -> AnyMesh | None:
    """Finds the mesh that a function will be compiled for; None if it is not known yet."""
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
    """Compiles the program; if it does not fit, reads it from what the compiler dumped.

    Args:
        mesh: the mesh that the function is compiled for, if it is known.
    """
    try:
        return stages.compile()
    except EinshardError as error:
        says = str(error.__cause__)
        available = _AVAILABLE.search(says)
        if available is None or mesh is None or isinstance(mesh, AbstractMesh):
            raise
        dumped = _dumped(stages, mesh)
        if dumped is None:
            raise
        size, unit = available.groups()
        return Oversized(*dumped, available=int(float(size) * 1024 ** _UNITS[unit]))


def _dumped(stages: Stages, mesh: AnyMesh) -> tuple[Any, ...] | None:
    """Compiles again with dumps; returns arguments of `Oversized`, or None if dumps are missing."""
    lowered = stages.lower()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            'xla_dump_to': folder,
            'xla_dump_hlo_as_text': True,
            'xla_dump_hlo_pass_re': 'spmd-partitioning',
        }
        with contextlib.suppress(jax.errors.JaxRuntimeError), progress('compiling again'):
            lowered.compile(compiler_options=options)
        before, after, buffers = (
            _newest(folder, ending)
            for ending in (
                'before_*spmd-partitioning*.txt',
                '.after_optimizations.txt',
                '.after_optimizations-buffer-assignment.txt',
            )
        )
        if mesh.size == 1:  # there is no partitioning
            before = _newest(folder, '.before_optimizations.txt')
    if not (before and after and buffers):
        return None
    module = Module(before)
    parameters = sorted(module.entry.parameters(), key=lambda op: op.parameter_number)
    leaves, treedef = jtu.tree_flatten(lowered.args_info)
    kept = _kept(stages, len(leaves))
    if len(kept) != len(parameters):
        return None
    argument_shardings = {
        i: shardings_in(op, [len(leaves[i].shape)], mesh)[0]
        for i, op in zip(kept, parameters, strict=True)
    }
    results, out_tree = jtu.tree_flatten(lowered.out_info)
    result_shardings = shardings_in(module.entry.root, [len(one.shape) for one in results], mesh)
    if None in argument_shardings.values() or None in result_shardings:
        return None
    shardings = treedef.unflatten([argument_shardings.get(i) for i in range(len(leaves))])
    out_info = out_tree.unflatten(
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
        for one, sharding in zip(results, result_shardings, strict=True)
    )
    return lowered.args_info, shardings, out_info, after, read_sizes(buffers)


def _newest(folder: str, ending: str) -> str:
    written = sorted(Path(folder).glob(f'*{ending}'))
    return written[-1].read_text(encoding='utf-8') if written else ''


def _kept(stages: Stages, n_leaves: int) -> Sequence[int]:
    """Returns the indices of the arguments that the program has: JAX drops unused ones."""
    if stages.traced is None:
        return range(n_leaves)
    jaxpr = stages.traced.jaxpr.jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return [i for i, variable in enumerate(jaxpr.invars) if id(variable) in used]


def read_sizes(buffers: str) -> Any:
    """Sums the sizes of buffers; returns an object with the fields of `memory_analysis()`."""
    sizes = {'argument': 0, 'output': 0, 'temp': 0, 'alias': 0, 'generated_code': 0}
    for size, description in _ALLOCATION.findall(buffers):
        if 'color ' in description:  # other memory, such as VMEM
            continue
        is_argument, is_output = 'parameter ' in description, 'maybe-live-out' in description
        for kind, counts in (
            ('argument', is_argument),
            ('output', is_output),
            ('alias', is_argument and is_output),
            ('temp', not (is_argument or is_output)),
        ):
            sizes[kind] += int(size) * counts
    return SimpleNamespace(**{f'{kind}_size_in_bytes': n for kind, n in sizes.items()})
