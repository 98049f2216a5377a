"""The facts about a program that diagnoses read, each computed once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jax.sharding import AxisType
from jax.stages import Compiled

from ..._hlo.all_gathers import AllGather
from ..._hlo.collectives import MARKS, Collective
from ..._hlo.groups import Groups
from ..._hlo.memory import Memory
from ..._hlo.module import Module, Place
from ..._sharding.mesh import AnyMesh
from ..arrays import ProgramArray
from ..collective_axes import mesh_axes_of
from ..lowered import Stages
from ..oversized import Oversized
from ..report_rows import ArrayRow, CollectiveRow, ProductRow
from .trace import Trace, argument_values, read_trace
from .values import Axis, Value

Names: TypeAlias = tuple[str, ...] | None


@dataclass(frozen=True)
class Facts:
    """A compiled program, and what the report knows about it.

    Attributes:
        stages, compiled: the program as JAX has it.
        module: its HLO.
        memory: of a device; None if unknown.
        platform: such as 'cpu' or 'tpu'.
        n_devices: the number of devices that run it.
        slices: the TPU slice of each device.
        meshes: the meshes of its arguments and results.
        arguments, results: its arrays, including unused ones.
        argument_rows, result_rows: the same, as rows of the report.
        collectives, rows: its collectives, as the compiler wrote them and as rows of the report.
        all_gathers: its all-gathers with a single operand, by the name of the instruction.
        weights: whether a parameter of the program, by number, is a weight or optimizer state.
        products: its matrix products by line.
        replicated_above: replicated arrays of more bytes than this are noted.
    """

    stages: Stages
    compiled: Compiled | Oversized
    module: Module
    memory: Memory | None
    platform: str
    n_devices: int
    slices: Sequence[int]
    meshes: Sequence[AnyMesh]
    arguments: Sequence[ProgramArray]
    results: Sequence[ProgramArray]
    argument_rows: Sequence[ArrayRow]
    result_rows: Sequence[ArrayRow]
    collectives: Sequence[Collective]
    rows: Sequence[CollectiveRow]
    all_gathers: Mapping[str, AllGather]
    weights: Mapping[int, bool]
    products: Sequence[ProductRow]
    replicated_above: int

    @functools.cached_property
    def inputs(self) -> Sequence[ProgramArray]:
        """The parameters of the compiled program: the arguments that it uses."""
        return [array for array in self.arguments if array.sharding is not None]

    @functools.cached_property
    def is_training(self) -> bool:
        """Whether the program has a backward pass."""
        return '/transpose(' in self.module.text

    @functools.cached_property
    def updated(self) -> Sequence[int]:
        """The numbers of the arguments that are weights or states of optimizers."""
        used = (i for i, array in enumerate(self.arguments) if array.sharding is not None)
        return [i for n, i in enumerate(used) if self.is_training and self.weights.get(n)]

    @functools.cached_property
    def mesh(self) -> AnyMesh | None:
        """The mesh that the arguments and results have in common, or None."""
        return self.meshes[0] if len(self.meshes) == 1 and self.meshes[0].size > 1 else None

    @functools.cached_property
    def trace(self) -> Trace | None:
        """What the traced function does; None if it is unknown, as for a `Compiled`."""
        if self.stages.traced is None or self.mesh is None:
            return None
        jaxpr = self.stages.traced.jaxpr.jaxpr
        return read_trace(jaxpr, self.values, self.mesh, self.innermost_lines)

    @functools.cached_property
    def innermost_lines(self) -> bool:
        """Whether the HLO has innermost lines only, which may be in libraries."""
        return not self.module.sources.has_lines

    @functools.cached_property
    def values(self) -> Sequence[Value]:
        """The arguments, as values of the traced function."""
        assert self.mesh is not None
        used = [i for i, array in enumerate(self.arguments) if array.sharding is not None]
        is_data = {i: not self.weights.get(n, False) for n, i in enumerate(used)}
        return argument_values(self.arguments, is_data, self.mesh)

    @functools.cached_property
    def is_explicit(self) -> bool:
        """Whether the mesh has explicit axes, so that types decide on shardings."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    @functools.cached_property
    def lines(self) -> set[str]:
        """The lines with products."""
        return {product.line for product in self.trace.products} if self.trace else set()

    @functools.cached_property
    def tables(self) -> set[int]:
        """The arguments that are looked up, such as embeddings."""
        products = self.trace.products if self.trace else ()
        tables = (one.left.argument for one in products if one.is_lookup)
        return {table for table in tables if table is not None}

    def is_data(self, argument: object) -> bool:
        """Whether an argument, by number, is data and not a weight."""
        return isinstance(argument, int) and self.values[argument].is_data

    def argument_axes(self, argument: int) -> Sequence[Axis]:
        return self.values[argument].axes

    @functools.cached_property
    def places(self) -> Mapping[str, Place]:
        """The instructions of collectives, by name."""
        return {place.op.name: place for place in self.module.find(*MARKS)}

    @functools.cached_property
    def along(self) -> Sequence[frozenset[str]]:
        """The mesh axes that each collective runs along; empty if unknown."""
        known: dict[Groups, frozenset[str]] = {}
        for one in self.collectives:
            if one.groups not in known:
                axes = mesh_axes_of(one.groups, self.mesh) if self.mesh and one.groups else None
                known[one.groups] = frozenset(axes or ())
        return [known[one.groups] for one in self.collectives]


def sent_bytes(one: Collective) -> int:
    """Bytes that a device sends in one run of the program, as far as known."""
    return (one.network_bytes or 0) * (1 if one.executions is None else one.executions)
