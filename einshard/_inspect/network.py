"""Lower bounds on the time of collectives, from the positions of their devices in the network.

Take any set of devices. The bytes that collectives must send into it (or out of it) cross the links
at its border, so these bytes / the bandwidth of these links is a lower bound on the time. This
module tries every chip, every range of consecutive positions along a dimension of the torus, and
every slice or node. On a ring of n devices this gives the formulas of the scaling book (chapter 3),
but with (n-1)/n where the book rounds to 1.

If collectives run at the same time, their bytes add up at each border, but their times do not: on a
line of 4 chips, an all-gather and a reduce-scatter together take the time in which a link sends 1.0
array; one after the other, the time for 1.5 arrays.

Only links on a shortest path between devices of one group count: a group of 4 neighbors in a ring
of 16 is a line, and the chip at its end receives over one link. Twisted tori count as ordinary
tori, because their devices have the same coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._hlo.collectives import Collective
from .._hlo.hardware import Chip

Ints = Sequence[int]


class Network:
    """The devices of a program, as chips at positions in slices (or GPUs in nodes).

    Args:
        devices: the devices in the order of the program. Any two devices without coordinates, such
            as CPUs, may be neighbors.
        chip: the kind of all devices.

    Attributes:
        slices: for each device, the index of its slice or node.
        chips: for each device, the index of its chip; a chip may have several devices.
        positions: the torus coordinates of each device, with a column for each dimension.
        sizes, wraps: for each dimension of the torus, its size and whether it is a ring.
        has_coords: whether positions are known; if not, `positions` and `sizes` are empty.
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
        self.positions: Any = np.zeros((n, 0), int)
        if self.has_coords:
            coords = np.array([list(c)[: chip.torus] for c in coords])  # type: ignore[reportArgumentType]
            self.positions = coords - coords.min(0)
            self.sizes = tuple(int(size) + 1 for size in self.positions.max(0))
        places = np.arange(n)
        if self.has_coords:
            places = np.concatenate([self.slices[:, None], self.positions], 1)
        self.chips: Any = np.unique(places, axis=0, return_inverse=True)[1].reshape(-1)
        wraps = [size % chip.wraps_at == 0 for size in self.sizes]
        self.wraps = wraps if chip.torus < 3 else [all(wraps)] * len(wraps)
        self._crossings: dict[Any, Any] = {}
        self._bandwidths: dict[Any, Any] = {}

    def seconds(self, *collectives: Collective) -> float:
        """Returns the minimum time of collectives that may run at the same time.

        Collectives whose senders and receivers are unknown count as 0.
        """
        by_pattern: dict[_Pattern, Any] = {}
        for pattern, n_bytes in self._all_crossings(collectives):
            by_pattern[pattern] = by_pattern.get(pattern, 0) + n_bytes
        bounds = [
            _longest(n_bytes, self.bandwidths((pattern,)))
            for pattern, n_bytes in by_pattern.items()
        ]
        if len(bounds) > 1:  # the bytes of all patterns, over all their links
            bounds.append(_longest(sum(by_pattern.values()), self.bandwidths(tuple(by_pattern))))
        return max(bounds, default=0.0)

    def seconds_per_byte(self, kind: str, groups: Sequence[Ints]) -> float:
        """Returns the minimum time of a collective in these groups, per byte of its array."""
        pattern = _Pattern(False, tuple(map(tuple, groups)))
        return _longest(self.crossings(kind, pattern), self.bandwidths((pattern,)))

    def seconds_in_turn(self, *collectives: Collective) -> float:
        """Returns the minimum time of collectives that every chip runs one after another."""
        n_slices, n_chips = int(self.slices.max()) + 1, int(self.chips.max()) + 1
        first = 2 * (n_slices + n_chips)  # the borders of chips, for bytes within a slice
        busy = np.zeros(n_chips)
        for pattern, n_bytes in self._all_crossings(collectives):
            seconds = _seconds(n_bytes, self.bandwidths((pattern,)))[first : first + 2 * n_chips]
            busy += seconds.reshape(2, n_chips).max(0)  # receives and sends
        return max(float(busy.max()), self.seconds(*collectives))

    def _all_crossings(self, collectives: Sequence[Collective]) -> Iterator[tuple[_Pattern, Any]]:
        """Yields the pattern of each collective, and the bytes that cross each border."""
        for collective in collectives:
            devices = collective.pairs or collective.groups
            if not devices or collective.kind in ('custom-call', 'ragged-all-to-all'):
                continue
            pattern = _Pattern(bool(collective.pairs), devices)
            runs = 1 if collective.executions is None else collective.executions
            yield pattern, runs * collective.bytes * self.crossings(collective.kind, pattern)

    # `crossings` and `bandwidths` list borders in this order: of every slice and every chip, for
    # bytes between slices; of every chip and every range of positions, for bytes within a slice;
    # and all links together. Each border but the last has two numbers, into it and out of it. For
    # slices and chips, all numbers into them come first; for ranges, the two are adjacent.

    def crossings(self, kind: str, pattern: _Pattern) -> Any:
        """Returns the bytes that cross each border, per byte of the array that is sent."""
        key = kind, pattern
        if key not in self._crossings:
            within, across = self.split_by_slice(pattern)
            parts = [
                *_crossing(kind, across, self.slices),
                *_crossing(kind, across, self.chips),
                *_crossing(kind, within, self.chips),
            ]
            for axis in range(len(self.sizes)):
                parts += self._range_crossings(kind, within, axis)
            # over all links, the array, or its sum, must reach every other chip of the group
            rounds = {'all-gather': 1, 'reduce-scatter': 1, 'all-reduce': 2}.get(kind, 0)
            chips = self.chips
            sends = sum(rounds * (len(set(chips[list(group)].tolist())) - 1) for group in within)
            self._crossings[key] = np.concatenate([*parts, [sends]])
        return self._crossings[key]

    def bandwidths(self, patterns: Sequence[_Pattern]) -> Any:
        """Returns the bytes per second that can cross each border, over the patterns' links."""
        key = frozenset(patterns)
        if key not in self._bandwidths:
            chip, n_slices = self.chip, int(self.slices.max()) + 1
            slice_size = len(self.slices) / n_slices if chip.torus else chip.node
            n_chips = int(self.chips.max()) + 1
            all_links = (2 * chip.torus or 1) * chip.link
            parts: list[Any] = [
                np.full(2 * n_slices, slice_size * chip.network),
                np.full(2 * n_chips, all_links + chip.network),
            ]
            if self.has_coords:
                links = _Links(self, patterns)
                parts += [n * chip.link for n in links.of_chips()]
                for axis in range(len(self.sizes)):
                    across = [
                        links.across(axis, start, start + length, self.wraps[axis])
                        for start, length in self._ranges(axis)
                    ]
                    parts.append(np.ravel(np.array(across, float).reshape(-1, 2)) * chip.link)
                parts.append([links.total * chip.link])
            else:
                parts += [np.full(2 * n_chips, all_links), [0.0]]
            self._bandwidths[key] = np.concatenate(parts)
        return self._bandwidths[key]

    def split_by_slice(self, pattern: _Pattern) -> tuple[list[Ints], list[Ints]]:
        """Splits groups or pairs into those within a slice and those across slices.

        Leaves out groups of a single device.
        """
        within, across = list[Ints](), list[Ints]()
        for group in pattern.groups:
            if len(set(group)) > 1:
                is_within = len(set(self.slices[list(group)].tolist())) == 1
                (within if is_within else across).append(group)
        return within, across

    def _ranges(self, axis: int) -> Iterator[tuple[int, int]]:
        """Yields (start, length) of ranges of positions along a dimension of the torus.

        On a ring, these are the ranges of at most half of it: longer ranges have the same borders.
        On a line, these are the ranges at its start: no other range gives a larger bound.
        """
        size, wraps = self.sizes[axis], self.wraps[axis]
        for start in range(size if wraps else 1):
            for length in range(1, (size // 2 if wraps else size - 1) + 1):
                yield start, length

    def _range_crossings(self, kind: str, groups: Sequence[Ints], axis: int) -> Iterator[Any]:
        """Yields, for each range of positions, the bytes that enter it and that leave it."""
        size, at = self.sizes[axis], self.positions[:, axis]
        counts = np.zeros((len(groups), size), int)
        for i, group in enumerate(groups):
            np.add.at(counts[i], at[list(group)], 1)
        n = counts.sum(1)
        some_group_extends = bool((np.count_nonzero(counts, axis=1) > 1).any())
        for start, length in self._ranges(axis):
            positions = np.arange(start, start + length) % size
            if not some_group_extends:
                yield np.zeros(2)
            elif kind == 'collective-permute':
                inside = np.isin(at[np.array(groups)], positions)  # of each pair: source, target
                enters, leaves = inside[:, 1] & ~inside[:, 0], inside[:, 0] & ~inside[:, 1]
                yield np.array([enters.sum(), leaves.sum()], float)
            else:
                inside = counts[:, positions].sum(1)
                kinds = kind, _REVERSED.get(kind, kind)
                yield np.array([_entering(k, inside, n).sum() for k in kinds])


class _Pattern(NamedTuple):
    """The devices that send to each other."""

    directed: bool  # whether `groups` are the pairs (source, target) of a permute
    groups: tuple[tuple[int, ...], ...]


def _crossing(kind: str, groups: Sequence[Ints], owners: Any) -> tuple[Any, Any]:
    """Returns the bytes that enter each slice or chip, and those that leave it, as two arrays.

    They are per byte of the array that is sent. `owners` has, for each device, the index of its
    slice or chip.
    """
    enters, leaves = (np.zeros(int(owners.max()) + 1) for _ in range(2))
    for group in groups:
        if kind == 'collective-permute':
            source, target = owners[group[0]], owners[group[1]]
            if source != target:
                enters[target] += 1
                leaves[source] += 1
            continue
        members, counts = np.unique(owners[list(group)], return_counts=True)
        enters[members] += _entering(kind, counts, len(group))
        leaves[members] += _entering(_REVERSED.get(kind, kind), counts, len(group))
    return enters, leaves


_REVERSED = {'all-gather': 'reduce-scatter', 'reduce-scatter': 'all-gather'}


def _entering(kind: str, inside: Any, n: Any) -> Any:
    """Returns the fraction of the array that must enter a set of devices.

    The set has `inside` of the n devices of the group; both may be arrays, one number per group.

    In an all-gather, all shards outside must enter. In a reduce-scatter, one term of each sum whose
    result is inside; in an all-reduce, one term of every sum. In an all-to-all, each device inside
    receives 1/n from each device outside. What must leave the set is what enters it in the reverse
    collective.
    """
    split = (inside > 0) & (inside < n)
    share = {
        'all-gather': (n - inside) / n,
        'reduce-scatter': inside / n,
        'all-to-all': inside * (n - inside) / n,
    }.get(kind, 1.0)
    return split * share


def _longest(n_bytes: Any, bandwidths: Any) -> float:
    """Returns the time at the border that takes longest."""
    return float(_seconds(n_bytes, bandwidths).max())


def _seconds(n_bytes: Any, bandwidths: Any) -> Any:
    """Returns the time at each border; 0 if the links that cross it are unknown."""
    return np.divide(n_bytes, bandwidths, out=np.zeros(len(n_bytes)), where=bandwidths > 0)


class _Links:
    """The links on shortest paths between the devices of each group.

    `plus[axis]` is a boolean array over slices and positions: whether the link to the next position
    along the axis is used. `minus[axis]` is the same for the link from the next position back. The
    pairs of a permute send in one direction only.
    """

    def __init__(self, network: Network, patterns: Sequence[_Pattern]):
        self.network = network
        shape = (int(network.slices.max()) + 1, *network.sizes)
        axes = range(len(network.sizes))
        self.plus, self.minus = ([np.zeros(shape, bool) for _ in axes] for _ in range(2))
        for pattern in patterns:
            for group in network.split_by_slice(pattern)[0]:
                self._add(group, pattern.directed)

    def _add(self, group: Ints, directed: bool) -> None:
        network, at = self.network, self.network.positions[list(group)]
        paths = [
            _shortest_paths(
                tuple(at[:, i] if directed else np.unique(at[:, i])), size, wraps, directed
            )
            for i, (size, wraps) in enumerate(zip(network.sizes, network.wraps, strict=True))
        ]
        covered = [np.flatnonzero(positions) for _, _, positions in paths]
        for axis in range(len(network.sizes)):
            for links, used in zip((self.plus, self.minus), paths[axis][:2], strict=True):
                where = [*covered[:axis], np.flatnonzero(used), *covered[axis + 1 :]]
                links[axis][np.ix_([network.slices[group[0]]], *where)] = True

    @property
    def total(self) -> int:
        return sum(int(links.sum()) for links in (*self.plus, *self.minus))

    def of_chips(self) -> tuple[Any, Any]:
        """Returns the number of links into each chip, and out of each chip."""
        network = self.network
        into = np.zeros_like(self.plus[0], int)
        out = np.zeros_like(into)
        for axis, (plus, minus) in enumerate(zip(self.plus, self.minus, strict=True), 1):
            into += np.roll(plus, 1, axis) + minus.astype(int)
            out += plus + np.roll(minus, 1, axis).astype(int)
        places = (network.slices, *network.positions.T)
        counts = [np.zeros(int(network.chips.max()) + 1, int) for _ in range(2)]
        for of_chip, of_place in zip(counts, (into, out), strict=True):
            of_chip[network.chips] = of_place[places]
        return counts[0], counts[1]

    def across(self, axis: int, start: int, end: int, wraps: bool) -> tuple[int, int]:
        """Returns the number of links into, and out of, the positions from start to end - 1."""
        plus, minus = self._counts[axis]
        before, last = start - 1, (end - 1) % len(plus)
        has_before = wraps or start > 0
        into = minus[last] + (plus[before] if has_before else 0)
        out = plus[last] + (minus[before] if has_before else 0)
        return into, out

    @functools.cached_property
    def _counts(self) -> list[tuple[list[int], list[int]]]:
        """By axis: the numbers of links from each position to the next one, and back."""

        def count(links: Any, axis: int) -> list[int]:
            others = tuple(i for i in range(links.ndim) if i != axis + 1)
            return links.sum(others).tolist()

        pairs = enumerate(zip(self.plus, self.minus, strict=True))
        return [(count(plus, axis), count(minus, axis)) for axis, (plus, minus) in pairs]


@functools.lru_cache(maxsize=4096)
def _shortest_paths(
    positions: tuple[int, ...], size: int, wraps: bool, directed: bool
) -> tuple[Any, ...]:
    """Returns the links (plus, minus) and the positions on shortest paths between `positions`.

    These are positions along one dimension. The results are three boolean arrays over all positions
    of the dimension. If `directed`, only paths from the first position to the second count.
    """
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
