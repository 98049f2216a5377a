"""Reading: one compiled program, read once and lazily for all who ask about it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._chips.chip import Chip
from .._functions.promise import program_text
from .._program.cost.bounds import NO_BOUNDS, Bounds, find_bounds
from .._program.cost.kernels import Kernel
from .._program.hlo.collective import Collective
from .._program.hlo.find_collectives import find_collectives
from .._program.hlo.flops import ProductRow, product_rows
from .._program.hlo.graph import Graph
from .._program.hlo.groups import Groups
from .._program.hlo.memory import Memory, read_memory
from .._program.hlo.slices import Reshard, find_reshards
from .._program.hlo.target_collectives import target_collectives
from .._program.hlo.text import HloModule
from .._program.jaxpr.graph import FlatJaxpr
from .._sharding.collective_axes import ShardedBy, along_text, mesh_axes_of
from .._sharding.mesh import AnyMesh, Device
from .partition import WORKER_FILE, Compiled
from .report_rows import Figures
from .roles import Payloads, find_named_lines


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading:
    """A compiled program.

    Attributes:
        program: its optimized HLO.
        memory: None if unknown.
        devices: the devices of the program, in its order.
        meshes: the meshes of its arguments and results.
        chip: None if unknown, as for CPUs. Without one, there are no bounds.
        inputs: (path, dtype) of each argument that the program uses, by parameter number.
        outputs: the path of each output, by number.
        traced: the function before partitioning. None if there is no jaxpr, as for a `Lowered` or
            `Compiled`, or if there is only one device.
        sharded_by: the array axes that shard over each mesh axis, by name, for `Collective.along`.
        is_simulated: whether it is compiled for CPUs that simulate the devices, in the process of a
            `Worker`.
        kernels: those whose costs the user declares, by name; see `explain`.
        form: its canonical form, compressed, with which a profile is compared. None if the compiler
            gives none, as for a program that does not fit.
    """

    program: HloModule
    memory: Memory | None
    devices: Sequence[Device] = ()
    meshes: Sequence[AnyMesh] = ()
    chip: Chip | None = None
    inputs: Sequence[tuple[str, str]] = ()
    outputs: Mapping[int, str] = field(default_factory=dict)
    traced: FlatJaxpr | None = None
    sharded_by: ShardedBy = field(default_factory=dict)
    is_simulated: bool = False
    kernels: Mapping[str, Kernel] = field(default_factory=dict[str, Kernel])
    form: bytes | None = None

    @property
    def n_devices(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def graph(self) -> Graph:
        return Graph(self.program)

    @functools.cached_property
    def mesh(self) -> AnyMesh | None:
        """The only mesh of more than one device. None if there are several, or none."""
        return self.meshes[0] if len(self.meshes) == 1 and self.meshes[0].size > 1 else None

    @functools.cached_property
    def payloads(self) -> Payloads:
        lines = find_named_lines(self.traced) if self.traced else {}
        return Payloads(self.graph, self.inputs, self.outputs, lines)

    @property
    def roles(self) -> Mapping[int, str]:
        """{parameter number: 'weights' (also optimizer states), 'cache' or 'activations'}."""
        return self.payloads.roles

    @functools.cached_property
    def collectives(self) -> Sequence[Collective]:
        """The collectives, with what they send and along which axes."""
        ids = () if self.is_simulated else [device.id for device in self.devices]
        found: Sequence[Collective] = find_collectives(self.graph, ids)
        if self.is_simulated:
            # what has no line gets that of the call in the worker
            found = [
                replace(c, source=None, column=0) if (c.source or '').startswith(WORKER_FILE) else c
                for c in target_collectives(self.graph, found)
            ]

        # 256 devices have long groups, which many collectives share
        @functools.cache
        def axes_of(groups: Groups) -> frozenset[str]:
            axes = mesh_axes_of(groups, self.mesh) if groups and self.mesh is not None else None
            return frozenset(axes or ())

        @functools.cache
        def along(groups: Groups, pairs: tuple[tuple[int, int], ...]) -> str:
            return along_text(groups, pairs, self.meshes, self.sharded_by)

        return [
            replace(
                self.payloads.of(c),
                along=along(c.device_groups, c.pairs),
                mesh_axes=axes_of(c.device_groups),
            )
            for c in found
        ]

    @functools.cached_property
    def products(self) -> Sequence[ProductRow]:
        return product_rows(self.graph)

    @functools.cached_property
    def reshards(self) -> Mapping[str, Reshard]:
        """The arrays that are gathered and then sliced, by the name of their first all-gather."""
        return find_reshards(self.graph, self.collectives)

    @functools.cached_property
    def bounds(self) -> Bounds:
        """The lower bounds on the time of one run; empty if `chip` is None."""
        return NO_BOUNDS if self.chip is None else self.bounds_on(self.chip)

    def bounds_on(self, chip: Chip) -> Bounds:
        rows = self.graph, self.products, self.collectives
        return find_bounds(chip, list(self.devices), *rows, is_cpu=self.is_simulated)

    def figures(self, bounds: Bounds) -> Figures:
        return Figures(
            sum(c.total_bytes for c in self.collectives),
            self.memory and self.memory.total,
            sum(row.flops for row in self.products),
            sum(bound.seconds for bound in bounds),
            next((bound.seconds for bound in bounds if bound.resource == 'HBM'), 0.0),
        )


def read(name: str, compiled: Any, **fields: Any) -> Reading:
    """Reads what JAX's compiler returned."""
    program = HloModule(program_text(name, compiled))
    return Reading(program=program, memory=read_memory(compiled), **fields)


def read_simulated(compiled: Compiled, **fields: Any) -> Reading:
    """Reads what a `Worker` returned."""
    return Reading(
        program=HloModule(compiled.text), memory=compiled.memory, **fields, is_simulated=True
    )
