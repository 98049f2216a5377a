"""Candidate: one way to shard a model; Evaluation: its compiled costs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from jax.sharding import Mesh

from .._notation.expression import Term
from .._program.cost.bounds import NO_BOUNDS, Bounds
from .._sharding.axis_rules import axis_rules
from .._sharding.mesh import device_mesh, named_mesh
from .._sharding.scopes import only_mesh_scope
from .._text import format_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh shape, and the mesh axes over which each axis name is sharded.

    Attributes:
        mesh: the mesh axes and their sizes, slowest-varying first: (('x', 64), ('y', 4)).
        axes: the mesh axes of every axis name of the model, in the order of `Model.sizes`:
            (('batch', ('x',)), ('embed', ('x', 'y')), ('layers', ())).
        is_given: whether it is the program as the user has it.
    """

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    is_given: bool = False

    @property
    def placements(self) -> dict[str, str]:
        """The placement of each axis name, for `axis_rules`: {'batch': '@x', 'layers': ''}."""
        return {name: str(Term('', mesh_axes=axes)) if axes else '' for name, axes in self.axes}

    def mesh_of(self, devices: Mesh) -> Mesh:
        """Returns the mesh of this candidate, made of the devices of another mesh."""
        mesh = named_mesh(device_mesh(devices), dict(self.mesh), 'device_mesh(devices, ')
        return cast(Mesh, mesh)

    @contextmanager
    def scope(self, mesh: Mesh) -> Generator[Mesh, None, None]:
        """Makes its mesh and its axis rules the current ones."""
        with only_mesh_scope(mesh), axis_rules(self.placements):
            yield mesh

    @property
    def mesh_text(self) -> str:
        """The mesh axes and their sizes: 'x=64, y=4'."""
        return ', '.join(f'{name}={size}' for name, size in self.mesh)

    def changed_names(self, other: Candidate) -> list[str]:
        """The axis names that the two candidates shard over different mesh axes."""
        pairs = zip(self.axes, other.axes, strict=True)
        return [name for (name, axes), (_, others) in pairs if axes != others]

    def __str__(self) -> str:
        if self.is_given:
            return f'{self.mesh_text}: you have this now'
        rules = ', '.join(f'{name}{text}' for name, text in self.placements.items() if text)
        return f'{self.mesh_text}: {rules or "everything replicated"}'


Objective: TypeAlias = Literal['bound', 'bytes', 'memory']
CostSource: TypeAlias = Literal['partitioner', 'compiler']


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The costs of a candidate.

    Attributes:
        costs_from: 'partitioner' (compiled for simulated CPU devices) or 'compiler' (compiled for
            the target).
        bounds: lower bounds on the time of one run; empty if the chip is unknown.
        memory: bytes per device, or None if unknown.
        sent: bytes that a device sends in one run, keyed by mesh axes: {'x': 10, 'x,y': 20}.
        sent_by: the same bytes, keyed by the kind of collective and the role of its arrays:
            {('all-gather', 'weights'): 10}.
        counts: the number of collectives of each kind, for `collectives=` of `sharded`.
        error: why the candidate does not compile, or ''.
        step: the seconds of a run by `Report.timeline`, an estimate. None if unknown.
    """

    candidate: Candidate
    costs_from: CostSource
    bounds: Bounds = NO_BOUNDS
    memory: int | None = None
    sent: Mapping[str, int] = field(default_factory=dict)
    sent_by: Mapping[tuple[str, str], int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    error: str = ''
    step: float | None = None

    @property
    def network_bytes(self) -> int:
        return sum(self.sent.values())

    @property
    def sent_text(self) -> str:
        """Formats `sent`: '56.0 MiB along y, 32.0 MiB along x'."""
        sent = self.sent.items()
        return ', '.join(f'{format_bytes(n)} along {axes or "unknown axes"}' for axes, n in sent)

    @property
    def seconds(self) -> tuple[float, float]:
        """The largest bound, as if all resources overlapped, and the sum, as if none did."""
        each = [bound.seconds for bound in self.bounds]
        return max(each, default=0.0), sum(each)

    def fits(self, limit: float | None) -> bool:
        """Whether the candidate compiles and needs at most `limit` bytes of memory.

        If the memory or the limit is unknown, the candidate only needs to compile.
        """
        return not self.error and (limit is None or (self.memory or 0) <= limit)

    def cost(self, objective: Objective) -> tuple[float, float, float]:
        """Returns the costs for ranking: the objective, then memory, then bytes sent.

        The first is infinite if the candidate does not compile.
        """
        memory, sent = float(self.memory or 0), float(self.network_bytes)
        costs = {'bound': self.seconds[1], 'bytes': sent, 'memory': memory}
        return (float('inf') if self.error else costs[objective], memory, sent)
