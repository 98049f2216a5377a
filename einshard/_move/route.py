"""Finds the cheapest route of a move, by compiling routes in a process that may abort."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .._cache import register_cache, remember
from .._errors import EinshardError
from .._explain.partition import ENDED, compile_in_worker
from .._program.hlo.collective import Collective
from .._program.hlo.find_collectives import find_collectives
from .._program.hlo.graph import Graph
from .._program.hlo.target_collectives import target_collectives
from .._program.hlo.text import HloModule
from .candidates import Candidate, list_candidates
from .placed import Placed, bound, boxes

MAX_TRIES = 12  # compilations for each number of intermediate placements
GOOD_ENOUGH = 1.05  # times the bound, which end the search
TRY_TWO = 1.3  # times the bound, above which two intermediate placements are tried
_SCALARS = 1024  # bytes of temporaries that do not count: offsets of each device's shard
_MAX_FIRST = 60  # placements that routes through two are made of


@dataclass(frozen=True)
class Move:
    """What a route depends on. Devices are numbered in the order of the source.

    `targets` are as for `move_program`: to which device each sends its shard at the end.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    before: Placed
    after: Placed
    targets: tuple[int, ...] = ()

    def bound(self) -> int:
        """Returns the bound by pieces in bytes, for `after`."""
        ends = (boxes(placed, self.shape) for placed in (self.before, self.after))
        return bound(*ends) * self.itemsize


@dataclass(frozen=True)
class Route:
    """A route that compiles, with what the compiler says about it.

    Attributes:
        through: the intermediate placements.
        sent: bytes that a device sends.
        temporaries: bytes on a device.
    """

    through: tuple[Placed, ...]
    sent: int
    temporaries: int
    collectives: tuple[Collective, ...] = ()

    @property
    def cost(self) -> tuple[int, int]:
        return self.sent, self.temporaries


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: the cheapest route, or None if none compiles.
        direct: the move without a placement on the way, or None if it does not compile.
        compilations: how many routes were compiled.
    """

    best: Route | None
    direct: Route | None
    compilations: int


_found: dict[Move, Found] = register_cache({})


def find_route(move: Move) -> Found:
    """Finds the cheapest route of a move. Remembers it.

    What is compiled, and thus the result, depends neither on the devices nor on their kind.
    """
    found = _found.get(move)
    return found or remember(_found, move, _search(move))


def remember_route(move: Move, found: Found) -> None:
    remember(_found, move, found)


def _search(move: Move) -> Found:
    if move.before == move.after and not move.targets:
        stays = Route((), 0, 0)
        return Found(stays, stays, 0)
    # 1. the direct move
    least = move.bound()
    direct = best = compile_route(move, ())
    n = 1

    def is_within(factor: float) -> bool:
        return best is not None and best.sent <= factor * least

    if is_within(GOOD_ENOUGH):
        return Found(best, direct, n)
    # 2. through one placement, then through two: the most promising first
    candidates = list_candidates(move.before, move.after, move.shape)
    ones = ((candidate.placed,) for candidate in candidates)
    for routes in (ones, _pairs(candidates)):
        for through in itertools.islice(routes, MAX_TRIES):
            route = compile_route(move, through)
            n += 1
            # fewer bytes are not worth more temporaries: memory is what moves run out of
            is_allowed = route is not None and (
                direct is None
                or (
                    route.sent <= direct.sent and route.temporaries <= direct.temporaries + _SCALARS
                )
            )
            if route is not None and is_allowed and (best is None or route.cost < best.cost):
                best = route
                if is_within(GOOD_ENOUGH):
                    return Found(best, direct, n)
        if is_within(TRY_TWO):
            break
    return Found(best, direct, n)


def _pairs(candidates: Sequence[Candidate]) -> Iterator[tuple[Placed, Placed]]:
    """Yields two placements on the way, those with the smallest sum of bounds first."""
    few = candidates[:_MAX_FIRST]
    pairs = [
        (one.bounds[0] + bound(one.boxes, other.boxes) + other.bounds[1], one.placed, other.placed)
        for one, other in itertools.permutations(few, 2)
    ]
    return ((one, other) for _, one, other in sorted(pairs, key=lambda pair: pair[0]))


def compile_route(move: Move, through: Sequence[Placed]) -> Route | None:
    """Compiles a route in the worker. Returns None if the compiler raises or aborts."""
    stages = tuple(tuple(placed) for placed in (move.before, *through, move.after))
    request: dict[str, Any] = {
        'shape': move.shape,
        'dtype': move.dtype,
        'stages': stages,
        'targets': move.targets,
    }
    try:
        compiled = compile_in_worker(prod(move.before.sizes), request)
    except EinshardError as error:  # the compiler has aborted the worker
        if not error.sentence.startswith(ENDED):
            raise
        return None
    except ValueError:  # the compiler raises
        return None
    graph = Graph(HloModule(compiled.text))
    collectives = tuple(target_collectives(graph, find_collectives(graph)))
    memory = compiled.memory
    assert memory is not None, 'the compiler for CPUs reports memory'
    sent = sum(collective.total_bytes for collective in collectives)
    return Route(tuple(through), sent, memory.temporaries, collectives)
