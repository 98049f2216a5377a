"""The program that a report is about, and what its diagnoses share."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import AxisType, NamedSharding

from ..._program.edits.call import JittedCall
from ..._program.hlo.collective import Collective
from ..._program.hlo.slices import Gather, find_gather
from ..._program.hlo.sources import is_user_file
from ..._program.traced.conflicts import Conflicts
from ..._program.traced.propagated import Value
from ..._sharding.collective_axes import axes_text
from ..._sharding.mesh import is_canonical_mesh
from ..arrays import ProgramArray
from ..estimate import estimate, refusal
from ..propagation import Propagation, propagate
from ..reading import Reading
from ..report_rows import ArrayRow, Finding
from ..stages import Stages
from ..timeline import Timeline
from ..why import Reason, find_reasons
from .values import PRODUCTS, Axes, Axis, argument_of, axes_of_values, mesh_entries, name_values

_MIN_FRACTION = 0.02  # of the bytes of all collectives; gradients of norm scales send less


@dataclass(frozen=True, eq=False, kw_only=True)
class Facts(Reading):
    """The program of a report, and what diagnoses have found in it.

    Attributes:
        is_oversized: whether the compiler refused the program, because it does not fit.
        arguments, results: the arrays, including unused ones.
        argument_rows, result_rows: the same arrays, as rows of the report.
        replicated_above: the number of bytes above which a replicated array is noted.
        found: the findings so far.
    """

    stages: Stages
    is_oversized: bool
    arguments: Sequence[ProgramArray]
    results: Sequence[ProgramArray]
    argument_rows: Sequence[ArrayRow]
    result_rows: Sequence[ArrayRow]
    replicated_above: int
    found: list[Finding] = field(default_factory=list)

    @property
    def explained(self) -> set[str]:
        """What the findings so far account for; see `Finding.explains`."""
        return {name for finding in self.found for name in finding.explains}

    @property
    def unexplained(self) -> Sequence[Collective]:
        """The collectives that no finding so far accounts for."""
        explained = self.explained
        return [c for c in self.collectives if c.name not in explained]

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def slices(self) -> Sequence[int]:
        """The index of the TPU slice of each device."""
        return [getattr(device, 'slice_index', None) or 0 for device in self.devices]

    @property
    def call(self) -> JittedCall | None:
        """The program as a call of its arrays, or None if it cannot be traced again as that."""
        call = self.stages.call
        return call if call is not None and len(call.dynamic) == len(self.arguments) else None

    @functools.cached_property
    def used_arguments(self) -> Sequence[int]:
        """The indices of the arguments that are parameters of the compiled program."""
        return [i for i, array in enumerate(self.arguments) if array.sharding is not None]

    @functools.cached_property
    def used(self) -> Sequence[ProgramArray]:
        """The arguments in `used_arguments`, indexed by parameter number."""
        return [self.arguments[i] for i in self.used_arguments]

    @functools.cached_property
    def replaced(self) -> Mapping[int, Sequence[int]]:
        """{result number: the parameters that the result replaces in the next call}."""
        found, gradients = self.payloads.replaced, self.payloads.gradients
        n = len(self.results)
        return {i: p for i, p in found.items() if i < n and i not in gradients}

    @functools.cached_property
    def gradients(self) -> Mapping[int, Sequence[int]]:
        """{result number: the parameters of which it may be the gradient}."""
        return {i: p for i, p in self.payloads.gradients.items() if i < len(self.results)}

    @functools.cached_property
    def is_training(self) -> bool:
        """Whether the program has a backward pass."""
        return '/transpose(' in self.graph.program.text

    @functools.cached_property
    def weights_and_states(self) -> Sequence[int]:
        """The indices of the arguments that are weights or optimizer state. Empty in inference."""
        numbers = enumerate(self.used_arguments)
        return [i for n, i in numbers if self.is_training and self.roles.get(n) == 'weights']

    @functools.cached_property
    def timeline(self) -> Timeline:
        return estimate(self)

    @property
    def step(self) -> float | None:
        """The estimated seconds of one run. None if there is no timeline, or if it is unknown."""
        return self.timeline.totals.step if refusal(self) is None else None

    @functools.cached_property
    def exposed(self) -> Mapping[str, float]:
        """The part of all exposed time of each collective; empty if there is no estimate."""
        rows = self.timeline.rows if refusal(self) is None else ()
        return {row.name: row.share or 0.0 for row in rows}

    @functools.cached_property
    def propagation(self) -> Propagation:
        if self.n_devices == 1:
            return Propagation(None, 'a program for one device is not partitioned')
        paths = ([array.path for array in arrays] for arrays in (self.used, self.results))
        return propagate(self.stages, *paths)

    @functools.cached_property
    def reasons(self) -> Mapping[str, Reason]:
        """Why the program has each collective, by its name. Empty if it was not propagated."""
        program = self.propagation.program
        if program is None:
            return {}
        found = find_reasons(program, self.collectives, self.joined_axes)
        return {reason.row.name: reason for reason in found}

    @functools.cached_property
    def conflicts(self) -> Conflicts:
        """Finds what operations of the propagated program need communication for."""
        assert self.propagation.program is not None
        return Conflicts(self.propagation.program)

    def joined_axes(self, names: Sequence[str]) -> str:
        """Writes mesh axes; those of the canonical mesh by the array axes that they shard."""
        mesh = self.mesh
        if mesh is None or not is_canonical_mesh(mesh) or any(':' in name for name in names):
            return ' and '.join(names)
        return axes_text(tuple(names), mesh, self.sharded_by)

    def reason_of(self, rows: Iterable[Collective]) -> str:
        """Half a sentence on why the program has the largest of these collectives, or ''."""
        known = (c for c in rows if c.name in self.reasons and self.reasons[c.name].conflicts)
        largest = max(known, key=lambda c: c.total_bytes, default=None)
        return '' if largest is None else self.reasons[largest.name].short

    @functools.cached_property
    def axis_names(self) -> Mapping[Value, tuple[str, ...]]:
        """The user's names of the axes of propagated values."""
        program = self.propagation.program
        given = enumerate(array.names or () for array in self.used)
        return {} if program is None else name_values(program, dict(given))

    @functools.cached_property
    def axes(self) -> Sequence[Axes]:
        """The axes of the values of `traced`, by index. Empty if it was not propagated."""
        program = self.propagation.program
        if program is None or self.traced is None:
            return ()
        numbers = {i: n for n, i in enumerate(self.used_arguments)}
        return axes_of_values(self.traced, program, numbers, self.axis_names)

    def axes_of_argument(self, i: int) -> Axes:
        """The axes of an argument, with its sharding on `mesh`."""
        array = self.arguments[i]
        names, sharding = array.names or ('',) * len(array.shape), array.sharding
        entries: Sequence[tuple[str, ...]] = [()] * len(names)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            entries = mesh_entries(sharding, len(names))
        return tuple(Axis(name, entry) for name, entry in zip(names, entries, strict=True))

    @functools.cached_property
    def is_explicit(self) -> bool:
        """Whether the mesh has Explicit axes, so that types determine the shardings."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    @functools.cached_property
    def data(self) -> set[int]:
        """The arguments that are neither weights nor states, such as tokens, and no caches."""
        pairs = enumerate(self.used_arguments)
        return {i for n, i in pairs if self.roles.get(n) == 'activations'}

    @functools.cached_property
    def multiplied(self) -> set[int]:
        """The arguments that are operands of products, and the tables that rows are taken from."""
        program = self.propagation.program
        if program is None:
            return set()
        operands = [
            value
            for op in program.operations
            if op.kind in (*PRODUCTS, 'gather')
            for value in op.operands[: 2 if op.kind in PRODUCTS else 1]
        ]
        numbers = (argument_of(value) for value in operands)
        return {self.used_arguments[n] for n in numbers if n is not None}

    @functools.cached_property
    def gathers(self) -> Mapping[str, Gather]:
        """The all-gathers of one array, by the name of the collective.

        Parameters after `used` are Refs that the function closes over, which have no path.
        """
        found = {c.name: find_gather(self.graph, c) for c in self.collectives}
        return {
            name: replace(gather, parameter=None)
            if gather.parameter is not None and gather.parameter >= len(self.used)
            else gather
            for name, gather in found.items()
            if gather is not None
        }

    @functools.cached_property
    def function_source(self) -> str | None:
        """The line of the function, for operations that have no line, or None if unknown."""
        info = getattr(getattr(self.stages.jaxpr, 'debug_info', None), 'func_src_info', None)
        match = re.search(r' at (.+):(\d+)$', info or '')
        return f'{match[1]}:{match[2]}' if match and is_user_file(match[1]) else None

    @property
    def free_memory(self) -> float:
        """The bytes of memory that the program leaves free on a device; infinity if unknown."""
        if self.memory is None or self.memory.capacity is None:
            return math.inf
        return self.memory.capacity - self.memory.total

    @functools.cached_property
    def min_bytes(self) -> float:
        """Collectives that send fewer bytes than this in one run are not worth a finding."""
        return _MIN_FRACTION * sum(c.total_bytes for c in self.collectives)
