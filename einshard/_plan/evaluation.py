"""Evaluation: the costs of a candidate, estimated or read from a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .._program.cost.bounds import NO_BOUNDS, Bounds
from .._text import format_bytes
from .candidate import Candidate

Objective: TypeAlias = Literal['bound', 'bytes', 'memory']
CostSource: TypeAlias = Literal['estimate', 'partitioner', 'compiler']


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The costs of a candidate.

    Attributes:
        costs_from: 'estimate' (nothing was compiled), 'partitioner' (compiled for simulated CPU
            devices) or 'compiler' (compiled for the target).
        bounds: lower bounds on the time of one run; empty if the chip is unknown.
        memory: bytes per device, or None if unknown.
        sent: bytes that a device sends in one run, keyed by mesh axes: {'x': 10, 'x,y': 20}.
        sent_by: the same bytes, keyed by the kind of collective and the role of its arrays:
            {('all-gather', 'weights'): 10}.
        counts: the number of collectives of each kind, for `collectives=` of `sharded`; empty for
            an estimate.
        error: why the candidate does not compile, or ''.
    """

    candidate: Candidate
    costs_from: CostSource
    bounds: Bounds = NO_BOUNDS
    memory: int | None = None
    sent: Mapping[str, int] = field(default_factory=dict)
    sent_by: Mapping[tuple[str, str], int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    error: str = ''

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
