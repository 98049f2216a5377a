"""Lower bounds on the time of a collective, from where its devices are.

Take any part of the devices: what a collective must bring into it (or out of it) goes over the
links at its border, so bytes / bandwidth of the border is a lower bound. The parts tried here are
every chip, every stretch of a dimension of the torus, and every slice or node. On a ring of n this
gives the formulas of the scaling book (chapter 3), with (n-1)/n where the book rounds up to 1.

Links count if they are on a shortest path between devices of one group: a group of 4 neighbors in
a ring of 16 is a line, and the chip at its end receives over one link. Twisted tori are taken as
plain ones: their devices have the same coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._hlo.collectives import Collective
from .._hlo.hardware import Chip

Ints = Sequence[int]


class Network:
    """The devices of a program, as chips at positions in slices (or GPUs in nodes).

    Args:
        devices: in the order of the program. Devices without coordinates, such as CPUs, are taken
            as chips that may be next to each other.
    """

    def __init__(self, devices: Sequence[Any], chip: Chip):
        self.chip = chip
        n = len(devices)
        coords = [getattr(device, 'coords', None) for device in devices]
        self.has_coords = bool(chip.torus) and all(c is not None for c in coords)
        if chip.torus:
            slices: list[Any] = [getattr(device, 'slice_index', None) or 0 for device in devices]
        else:  # ids number the GPUs node by node
            ranks = np.argsort(np.argsort([device.id for device in devices]))
            slices = list(ranks // chip.node)
        self.slices: Any = np.unique(slices, return_inverse=True)[1]
        self.sizes: tuple[int, ...] = ()
        at: Any = np.zeros((n, 0), int)
        if self.has_coords:
            at = np.array([list(c)[: chip.torus] for c in coords])  # type: ignore[reportArgumentType]
            at -= at.min(0)
            self.sizes = tuple(int(size) + 1 for size in at.max(0))
        self.at = at
        places = np.concatenate([self.slices[:, None], at], 1) if self.has_coords else np.arange(n)
        self.chips: Any = np.unique(places, axis=0, return_inverse=True)[1].reshape(-1)
        wraps = [size >= chip.wraps_at and size % chip.wraps_at == 0 for size in self.sizes]
        self.wraps = wraps if chip.torus < 3 else [all(wraps)] * len(wraps)
        self._known: dict[Any, float] = {}

    def seconds(self, one: Collective) -> float:
        """The least time of one execution; 0 if it is not known what is sent to whom."""
        if one.kind in ('custom-call', 'ragged-all-to-all') or not (one.groups or one.pairs):
            return 0.0
        key = one.kind, one.groups, one.pairs
        if key not in self._known:
            self._known[key] = max(self._per_byte(one), default=0.0)
        return self._known[key] * one.bytes

    def _per_byte(self, one: Collective) -> Iterator[float]:
        """Lower bounds in seconds for each byte of the collective."""
        chip, within, across = self.chip, list[Ints](), list[Ints]()
        for group in one.pairs or one.groups:
            if len(set(group)) > 1:
                is_within = len(set(self.slices[list(group)].tolist())) == 1
                (within if is_within else across).append(group)
        if across:
            n_slices = int(self.slices.max()) + 1
            size = len(self.slices) / n_slices if chip.torus else chip.node
            total = 2 * chip.torus * chip.link if chip.torus else chip.link
            yield self._busiest(one.kind, across, self.slices, size * chip.network)
            yield self._busiest(one.kind, across, self.chips, total + chip.network)
        if not within:
            return
        if not self.has_coords:
            total = (2 * chip.torus or 1) * chip.link
            yield self._busiest(one.kind, within, self.chips, total)
            return
        links = _Links(self, within, directed=bool(one.pairs))
        into, out = links.of_chips()
        chips = self.chips
        yield self._busiest(one.kind, within, chips, into * chip.link, out * chip.link)
        for axis in range(len(self.sizes)):
            yield from self._stretches(one.kind, within, axis, links)
        # every chip but one has to be sent the array, or its sum, by some chip
        if links.total and one.kind in ('all-gather', 'reduce-scatter', 'all-reduce'):
            rounds = 2 if one.kind == 'all-reduce' else 1
            sends = sum(rounds * (len(set(chips[list(group)].tolist())) - 1) for group in within)
            yield sends / (links.total * chip.link)

    def _busiest(
        self, kind: str, groups: Sequence[Ints], parts: Any, into: Any, out: Any = None
    ) -> float:
        """The bound of the part that needs longest; `parts` has the part of every device."""
        n_parts = int(parts.max()) + 1
        inside = np.zeros((n_parts, 2))
        for group in groups:
            members, counts = np.unique(parts[list(group)], return_counts=True)
            if kind == 'collective-permute':
                source, target = parts[group[0]], parts[group[1]]
                if source != target:
                    inside[target, 0] += 1
                    inside[source, 1] += 1
                continue
            inside[members, 0] += _entering(kind, counts, len(group))
            inside[members, 1] += _entering(_REVERSED.get(kind, kind), counts, len(group))
        return _longest(inside[:, 0], into, inside[:, 1], into if out is None else out)

    def _stretches(
        self, kind: str, groups: Sequence[Ints], axis: int, links: _Links
    ) -> Iterator[float]:
        """Bounds for the stretches of consecutive positions along a dimension of the torus."""
        size, wraps = self.sizes[axis], self.wraps[axis]
        at = self.at[:, axis]
        counts = np.zeros((len(groups), size), int)
        for i, group in enumerate(groups):
            np.add.at(counts[i], at[list(group)], 1)
        n = counts.sum(1)
        for start in range(size if wraps else 1):
            for length in range(1, (size // 2 if wraps else size - 1) + 1):
                part = np.arange(start, start + length) % size
                inside = counts[:, part].sum(1)
                if kind == 'collective-permute':
                    ends = np.isin(at[np.array(groups)], part)
                    needs = [(ends[:, 1] & ~ends[:, 0]).sum(), (ends[:, 0] & ~ends[:, 1]).sum()]
                else:
                    reverse = _REVERSED.get(kind, kind)
                    needs = [_entering(k, inside, n).sum() for k in (kind, reverse)]
                into, out = links.across(axis, start, start + length, wraps)
                link = self.chip.link
                yield _longest(needs[0], into * link, needs[1], out * link)


_REVERSED = {'all-gather': 'reduce-scatter', 'reduce-scatter': 'all-gather'}


def _entering(kind: str, inside: Any, n: Any) -> Any:
    """What has to enter a part with some of the n devices of a group, as a share of the array.

    For an all-gather, all that is outside; for a reduce-scatter, one term of the sums that end
    inside; for an all-reduce, one term of all sums. In an all-to-all, each device inside gets 1/n
    from each outside. What has to leave a part is what has to enter in the reverse collective.
    """
    split = (inside > 0) & (inside < n)
    share = {
        'all-gather': (n - inside) / n,
        'reduce-scatter': inside / n,
        'all-to-all': inside * (n - inside) / n,
    }.get(kind, 1.0)
    return split * share


def _longest(needs: Any, into: Any, needs_out: Any, out: Any) -> float:
    with np.errstate(divide='ignore', invalid='ignore'):
        seconds = np.concatenate([np.ravel(needs / into), np.ravel(needs_out / out)])
    return float(np.nanmax(seconds, initial=0.0, where=np.isfinite(seconds)))


class _Links:
    """The links on shortest paths between the devices of each group.

    `plus[axis]` has the links from each position to the next along an axis, `minus[axis]` those
    from the next back. Devices of a pair send in one direction only.
    """

    def __init__(self, network: Network, groups: Sequence[Ints], directed: bool):
        self.network = network
        shape = (int(network.slices.max()) + 1, *network.sizes)
        axes = range(len(network.sizes))
        self.plus, self.minus = ([np.zeros(shape, bool) for _ in axes] for _ in range(2))
        for group in groups:
            at = network.at[list(group)]
            kinds = [
                _along(tuple(at[:, i] if directed else np.unique(at[:, i])), size, wraps, directed)
                for i, (size, wraps) in enumerate(zip(network.sizes, network.wraps, strict=True))
            ]
            covered = [np.flatnonzero(positions) for _, _, positions in kinds]
            for axis in axes:
                for links, used in zip((self.plus, self.minus), kinds[axis][:2], strict=True):
                    where = [*covered[:axis], np.flatnonzero(used), *covered[axis + 1 :]]
                    links[axis][np.ix_([network.slices[group[0]]], *where)] = True

    @property
    def total(self) -> int:
        return sum(int(links.sum()) for links in (*self.plus, *self.minus))

    def of_chips(self) -> tuple[Any, Any]:
        """The number of links into and out of each chip."""
        network = self.network
        into = np.zeros_like(self.plus[0], int)
        out = np.zeros_like(into)
        for axis, (plus, minus) in enumerate(zip(self.plus, self.minus, strict=True), 1):
            into += np.roll(plus, 1, axis) + minus.astype(int)
            out += plus + np.roll(minus, 1, axis).astype(int)
        places = (network.slices, *network.at.T)
        found = [np.zeros(int(network.chips.max()) + 1, int) for _ in range(2)]
        for links, numbers in zip(found, (into, out), strict=True):
            links[network.chips] = numbers[places]
        return found[0], found[1]

    def across(self, axis: int, start: int, end: int, wraps: bool) -> tuple[int, int]:
        """The number of links into and out of the positions from start to end."""
        plus, minus = self._counts[axis]
        before, last = start - 1, (end - 1) % len(plus)
        has_before = wraps or start > 0
        into = minus[last] + (plus[before] if has_before else 0)
        out = plus[last] + (minus[before] if has_before else 0)
        return into, out

    @functools.cached_property
    def _counts(self) -> list[tuple[list[int], list[int]]]:
        """The numbers of links from each position, by axis: to the next one, and back."""

        def count(links: Any, axis: int) -> list[int]:
            others = tuple(i for i in range(links.ndim) if i != axis + 1)
            return links.sum(others).tolist()

        both = enumerate(zip(self.plus, self.minus, strict=True))
        return [(count(plus, axis), count(minus, axis)) for axis, (plus, minus) in both]


@functools.lru_cache(maxsize=4096)
def _along(positions: tuple[int, ...], size: int, wraps: bool, directed: bool) -> tuple[Any, ...]:
    """The links (plus, minus) and positions on shortest paths along one dimension."""
    plus, minus, covered = (np.zeros(size, bool) for _ in range(3))
    covered[list(positions)] = True
    pairs = [(a, b) for a in positions for b in positions if a != b]
    for a, b in [(positions[0], positions[1])] if directed else pairs:
        ahead, back = (b - a) % size, (a - b) % size
        goes = (ahead <= back, back <= ahead) if wraps else (b > a, a > b)
        if goes[0] and a != b:
            plus[[(a + i) % size for i in range(ahead)]] = True
            covered[[(a + i) % size for i in range(ahead)]] = True
        if goes[1] and a != b:
            minus[[(b + i) % size for i in range(back)]] = True
            covered[[(b + i) % size for i in range(back)]] = True
    return plus, minus, covered
