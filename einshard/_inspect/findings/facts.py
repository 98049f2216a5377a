"""What the diagnoses know about a program, computed once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jax.stages import Compiled

from ..._hlo.all_gathers import AllGather
from ..._hlo.collectives import Collective
from ..._hlo.memory import Memory
from ..._hlo.module import Module
from ..._sharding.mesh import AnyMesh
from ..arrays import ProgramArray
from ..lowered import Stages
from ..oversized import Oversized
from ..report_rows import ArrayRow, CollectiveRow

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
        meshes: those of its arguments and results.
        arguments, results: its arrays, those that it does not use too.
        argument_rows, result_rows: the same, as rows of the report.
        collectives, rows: its collectives, as the compiler wrote them and as rows of the report.
        all_gathers: those with a single operand, by the name of the instruction.
        weights: whether a parameter of the program, by number, is a weight or optimizer state.
        replicated_above: note replicated arrays of more bytes than this.
    """

    stages: Stages
    compiled: Compiled | Oversized
    module: Module
    memory: Memory | None
    platform: str
    n_devices: int
    meshes: Sequence[AnyMesh]
    arguments: Sequence[ProgramArray]
    results: Sequence[ProgramArray]
    argument_rows: Sequence[ArrayRow]
    result_rows: Sequence[ArrayRow]
    collectives: Sequence[Collective]
    rows: Sequence[CollectiveRow]
    all_gathers: Mapping[str, AllGather]
    weights: Mapping[int, bool]
    replicated_above: int

    @functools.cached_property
    def inputs(self) -> Sequence[ProgramArray]:
        """The parameters of the compiled program: the arguments that it uses."""
        return [array for array in self.arguments if array.sharding is not None]

    @functools.cached_property
    def is_training(self) -> bool:
        """Whether the program has a backward pass."""
        return '/transpose(' in self.module.text


def sent_bytes(one: Collective) -> int:
    """Bytes that a device sends in one run of the program, as far as known."""
    return (one.network_bytes or 0) * (1 if one.executions is None else one.executions)
