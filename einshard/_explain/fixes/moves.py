"""Finds placements through which an array is moved more cheaply than directly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeAlias

from ..._errors import EinshardError
from ..reading import read_simulated
from .trials import compile_in_worker

# the mesh axes of each array axis
Entries: TypeAlias = tuple[tuple[str, ...], ...]

_MAX_SENT = 2  # times the bytes of the shard that a device gets; a direct move may send this much
_MAX_COMPILED = 16  # placements on the way, 0.1 to 0.5 s each
_ENOUGH = 1.5  # times the bytes of that shard, at which the search ends
_MAX_ENDED = 3  # XLA aborts its process on some moves over 12 devices
_MIN_GAIN = 0.1  # of the bytes of the direct move


class Move(NamedTuple):
    """An array that changes its placement."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    before: Entries
    after: Entries


@dataclass
class Moves:
    """Compiles moves alone, for simulated devices.

    The partitioner is the same on all platforms, so that the placement that is best for CPUs is
    good for others.

    Attributes:
        sizes: the sizes of the mesh axes.
        end: the time after which nothing is compiled, or None.
    """

    sizes: Mapping[str, int]
    end: float | None = None
    _found: dict[Move, Entries | None] = field(default_factory=dict)
    _n_ended: int = 0

    def is_costly(self, move: Move, sent: float) -> bool:
        """Whether sending this many bytes from each device is much for a move."""
        return sent > _MAX_SENT * self._shard(move, move.after)

    def through(self, move: Move) -> Entries | None:
        """Returns the placement through which the move sends the fewest bytes.

        Returns None if the direct move is not costly, or if no placement is better.
        """
        if move not in self._found:
            self._found[move] = self._search(move)
        return self._found[move]

    def _search(self, move: Move) -> Entries | None:
        direct = self._sent(move, ())
        if direct is None or not self.is_costly(move, direct):
            return None
        sent: dict[Entries, int] = {}
        for entries in itertools.islice(self._placements(move), _MAX_COMPILED):
            if self.end is not None and time.monotonic() > self.end:
                break
            n_bytes = self._sent(move, (entries,))
            if n_bytes is not None:
                sent[entries] = n_bytes
                if n_bytes <= _ENOUGH * self._shard(move, move.after):
                    break
        best = min(sent, key=lambda entries: sent[entries], default=None)
        return None if best is None or sent[best] > (1 - _MIN_GAIN) * direct else best

    def _sent(self, move: Move, through: Sequence[Entries]) -> int | None:
        """Returns the bytes that a device sends, or None if that does not compile."""
        if self._n_ended >= _MAX_ENDED:
            return None
        request = {
            'shape': move.shape,
            'dtype': move.dtype,
            'axes': tuple(self.sizes.items()),
            'placements': (move.before, *through, move.after),
        }
        try:
            compiled = compile_in_worker(prod(self.sizes.values()), request)
        except EinshardError:  # the process has ended
            self._n_ended += 1
            return None
        except ValueError:
            return None
        return sum(c.total_bytes for c in read_simulated(compiled).collectives)

    def _placements(self, move: Move) -> Iterator[Entries]:
        """Yields placements on the way, those that change the fewest mesh axes first."""
        names = [name for name, size in self.sizes.items() if size > 1]
        # a device holds no more of the array on the way than before or after
        largest = max(self._shard(move, move.before), self._shard(move, move.after))
        found: list[tuple[int, int, Entries]] = []
        for dims in itertools.product([None, *range(len(move.shape))], repeat=len(names)):
            along = [
                [name for name, at in zip(names, dims, strict=True) if at == dim]
                for dim in range(len(move.shape))
            ]
            for entries in itertools.product(*map(itertools.permutations, along)):
                if entries in (move.before, move.after) or not self._divides(move, entries):
                    continue
                if self._shard(move, entries) > largest:
                    continue
                steps = [_changes(move.before, entries), _changes(entries, move.after)]
                found.append((sum(steps), max(steps), entries))
        found.sort(key=lambda one: one[:2])
        return (entries for *_, entries in found)

    def _divides(self, move: Move, entries: Entries) -> bool:
        pairs = zip(move.shape, entries, strict=True)
        return all(size % prod(self.sizes[name] for name in entry) == 0 for size, entry in pairs)

    def _shard(self, move: Move, entries: Entries) -> float:
        n = prod(self.sizes[name] for entry in entries for name in entry)
        return move.itemsize * prod(move.shape) / n


def _changes(before: Entries, after: Entries) -> int:
    """Counts the mesh axes that shard another axis, or that come in another order."""
    moved = {name for entry in before for name in entry} ^ {
        name for entry in after for name in entry
    }
    n = len(moved)
    for old, new in zip(before, after, strict=True):
        stayed = [name for name in old if name in new]
        n += sum(name not in new and name not in moved for name in old)
        # the first axes can stay in place; those after another one cannot
        n += stayed != [name for name in new if name in old] or old[: len(stayed)] != tuple(stayed)
    return n
