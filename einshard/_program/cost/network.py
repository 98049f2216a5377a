"""Lower bounds on the time of collectives, from the positions of their devices in the network.

Each set of devices gives a lower bound: the bytes that must enter it, divided by the bandwidth of
the links into it. The bytes that must leave it give another. The sets are each chip, each slice or
NVLink domain, and each range of positions along one torus dimension. All bytes divided by the
bandwidth of all links give one more bound. This module returns the largest. On a ring of n devices,
it gives the formulas of the scaling book (chapter 3), but with (n-1)/n where the book rounds to 1.

If collectives run at the same time, their bytes into a set add up, but their times do not. On a
line of 4 chips, the last chip receives 3/4 of the array in an all-gather and sends 1/4. In a
reduce-scatter, it receives 1/4 and sends 3/4. One after the other, the two take as long as sending
3/4 + 3/4 of the array over a link. At the same time, they take as long as sending 3/4 + 1/4.

Only links on a shortest path between devices of one group count. For example, a group of 4
neighbors in a ring of 16 is a line, and the chip at its end receives over one link. Twisted tori
count as ordinary tori, because device coordinates do not show the twist.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._chips.chip import Chip
from ..hlo.collective import Collective

Ints = Sequence[int]


class Network:
    """The location of each device of a program: its slice (or NVLink domain), chip and coordinates.

    Attributes:
        slices: the index of the slice (or domain) of each device.
        chips: the index of the chip of each device. A chip can have several devices.
        positions: an array [device, torus dimension] of coordinates.
        sizes: the size of each torus dimension.
        wraps: whether each torus dimension is a ring.
        has_coords: whether the devices have coordinates. Without coordinates, there are no torus
            dimensions, and links may connect any two devices.
    """

    def __init__(self, devices: Sequence[Any], chip: Chip):
        self.chip = chip
        n = len(devices)
        coords = [getattr(device, 'coords', None) for device in devices]
        self.has_coords = bool(chip.torus) and all(c is not None for c in coords)
        if chip.torus:
            slices: list[Any] = [getattr(device, 'slice_index', None) or 0 for device in devices]
        else:
            slices = _domains(devices, chip.domain)
        self.slices: Any = np.unique(slices, return_inverse=True)[1]
        self.n_slices = int(self.slices.max()) + 1
        self.sizes: tuple[int, ...] = ()
        self.positions: Any = np.zeros((n, 0), int)
        chip_keys = np.arange(n)
        if self.has_coords:
            coords = np.array([list(c)[: chip.torus] for c in coords])  # type: ignore[reportArgumentType]
            self.positions = coords - coords.min(0)
            self.sizes = tuple(int(size) + 1 for size in self.positions.max(0))
            chip_keys = np.concatenate([self.slices[:, None], self.positions], 1)
        self.chips: Any = np.unique(chip_keys, axis=0, return_inverse=True)[1].reshape(-1)
        self.n_chips = int(self.chips.max()) + 1
        wraps = [size % chip.wraps_at == 0 for size in self.sizes]
        self.wraps = wraps if chip.torus < 3 else [all(wraps)] * len(wraps)
        self._crossings: dict[Any, Any] = {}
        self._bandwidths: dict[Any, Any] = {}
        self._n_links: dict[Any, int] = {}

    def seconds(self, *collectives: Collective) -> float:
        """Returns the minimum time of collectives that may run at the same time.

        Collectives with unknown groups or bytes count as 0 seconds.
        """
        by_pattern: dict[_Pattern, Any] = {}
        for pattern, n_bytes in self._bytes_per_run(collectives):
            by_pattern[pattern] = by_pattern.get(pattern, 0) + n_bytes
        bounds = [
            _max_seconds(n_bytes, self.bandwidths((pattern,)))
            for pattern, n_bytes in by_pattern.items()
        ]
        if len(bounds) > 1:  # the bytes of all collectives, over all their links
            total = sum(by_pattern.values())
            bounds.append(_max_seconds(total, self.bandwidths(tuple(by_pattern))))
        return max(bounds, default=0.0)

    def seconds_per_byte(self, kind: str, groups: Sequence[Ints]) -> float:
        """Returns the minimum time of a collective in these groups, per byte of its array.

        Of a 'collective-permute', the groups are pairs (source, target).
        """
        pattern = _Pattern(kind == 'collective-permute', tuple(map(tuple, groups)))
        return _max_seconds(self.crossings(kind, pattern), self.bandwidths((pattern,)))

    def seconds_in_turn(self, *collectives: Collective) -> float:
        """Returns the minimum time if every chip runs the collectives one after another."""
        start = 2 * (self.n_slices + self.n_chips)  # the first entry of bytes within a slice
        entries = slice(start, start + 2 * self.n_chips)
        busy = np.zeros(self.n_chips)
        for pattern, n_bytes in self._bytes_per_run(collectives):
            received, sent = _seconds(n_bytes, self.bandwidths((pattern,)))[entries].reshape(2, -1)
            busy += np.maximum(received, sent)  # a chip receives and sends at the same time
        return max(float(busy.max()), self.seconds(*collectives))

    def by_link(self, *collectives: Collective) -> dict[str, tuple[int, float]]:
        """Returns what collectives send within slices or domains, and between them.

        {'within': (bytes, seconds), 'between': ...}: the most bytes that enter or leave a chip, and
        the minimum time if the collectives run one after another.
        """
        n_slices, n_chips = 2 * self.n_slices, 2 * self.n_chips
        start = n_slices + n_chips  # the first entry of bytes within a slice
        n_bytes, seconds = np.zeros(start + n_chips), np.zeros(start + n_chips)
        for pattern, each in self._bytes_per_run(collectives):
            n_bytes += each[: len(n_bytes)]
            seconds += _seconds(each, self.bandwidths((pattern,)))[: len(n_bytes)]
        return {
            'within': (round(n_bytes[start:].max()), float(seconds[start:].max())),
            'between': (round(n_bytes[n_slices:start].max()), float(seconds[:start].max())),
        }

    def latency(self, collective: Collective) -> float:
        """Returns the time of one execution that sends next to nothing; 0 if it is unknown.

        In a torus, data of each device has to reach the farthest device of its group.
        """
        groups = collective.pairs or collective.device_groups
        if groups not in self._n_links:
            self._n_links[groups] = 1
            for group in groups if self.has_coords else ():
                at = self.positions[list(group)]
                apart = np.abs(at[:, None] - at)
                back = np.where(self.wraps, np.array(self.sizes) - apart, apart)
                farthest = np.minimum(apart, back).sum(-1).max()
                self._n_links[groups] = max(self._n_links[groups], int(farthest))
        return (self.chip.latency or 0.0) * self._n_links[groups]

    def _bytes_per_run(self, collectives: Sequence[Collective]) -> Iterator[tuple[_Pattern, Any]]:
        """Yields the pattern of each collective, and its bytes for each entry listed below."""
        for collective in collectives:
            devices = collective.pairs or collective.device_groups
            if not devices or collective.kind in ('custom-call', 'ragged-all-to-all'):
                continue
            pattern = _Pattern(bool(collective.pairs), devices)
            kind, n_bytes = collective.kind, collective.executions * collective.bytes
            if kind == 'all-reduce' and collective.sent is not None:
                # in a one-shot kernel, each device reads the arrays of all others
                kind, n_bytes = 'all-gather', n_bytes * collective.group_size
            yield pattern, n_bytes * self.crossings(kind, pattern)

    # `crossings` and `bandwidths` return arrays with these entries, in this order:
    # - bytes between slices: into each slice, out of each slice, into each chip, out of each chip
    # - bytes within a slice: into each chip, out of each chip, into and out of each range
    # - bytes within all slices, over all links: one entry

    def crossings(self, kind: str, pattern: _Pattern) -> Any:
        """Returns the bytes of each entry listed above, per byte of the array."""
        key = kind, pattern
        if key not in self._crossings:
            within, across = self.split_by_slice(pattern)
            parts = [
                *_owner_crossings(kind, across, self.slices),
                *_owner_crossings(kind, across, self.chips),
                *_owner_crossings(kind, within, self.chips),
            ]
            for axis in range(len(self.sizes)):
                parts += self._range_crossings(kind, within, axis)
            # an all-gather over n chips sends n - 1 copies of the array, over all links
            n_gathers = {'all-gather': 1, 'reduce-scatter': 1, 'all-reduce': 2}.get(kind, 0)
            copies = sum(len(set(self.chips[list(group)].tolist())) - 1 for group in within)
            self._crossings[key] = np.concatenate([*parts, [n_gathers * copies]])
        return self._crossings[key]

    def bandwidths(self, patterns: Sequence[_Pattern]) -> Any:
        """Returns the bytes per second for each entry that `crossings` returns for `patterns`."""
        key = frozenset(patterns)
        if key not in self._bandwidths:
            chip = self.chip
            # each chip has its own part of the network between slices
            _, chips = np.unique(self.chips, return_index=True)  # one device of each
            chips_per_slice = np.bincount(self.slices[chips])
            all_links = (2 * chip.torus or 1) * chip.link
            parts: list[Any] = [
                np.tile(chips_per_slice * chip.network, 2),
                np.full(2 * self.n_chips, all_links + chip.network),
            ]
            if self.has_coords:
                links = _Links(self, patterns)
                parts += [n * chip.link for n in links.count_at_chips()]
                for axis in range(len(self.sizes)):
                    across = [
                        links.across(axis, start, start + length, self.wraps[axis])
                        for start, length in self._ranges(axis)
                    ]
                    parts.append(np.ravel(np.array(across, float).reshape(-1, 2)) * chip.link)
                parts.append([links.total * chip.link])
            else:
                parts += [np.full(2 * self.n_chips, all_links), [0.0]]
            self._bandwidths[key] = np.concatenate(parts)
        return self._bandwidths[key]

    def split_by_slice(self, pattern: _Pattern) -> tuple[list[Ints], list[Ints]]:
        """Returns the groups within a slice and those across slices. Omits groups of one device."""
        within, across = list[Ints](), list[Ints]()
        for group in pattern.groups:
            if len(set(group)) > 1:
                is_within = len(set(self.slices[list(group)].tolist())) == 1
                (within if is_within else across).append(group)
        return within, across

    def _ranges(self, axis: int) -> Iterator[tuple[int, int]]:
        """Yields (start, length) of the ranges of positions along a torus dimension.

        On a ring, a range has at most half of the positions, because bytes into a longer range are
        bytes out of the other positions. On a line, all ranges start at position 0, because other
        ranges do not give larger bounds.
        """
        size, wraps = self.sizes[axis], self.wraps[axis]
        for start in range(size if wraps else 1):
            for length in range(1, (size // 2 if wraps else size - 1) + 1):
                yield start, length

    def _range_crossings(self, kind: str, groups: Sequence[Ints], axis: int) -> Iterator[Any]:
        """Yields the bytes into and out of each range of positions along a torus dimension."""
        size, coords = self.sizes[axis], self.positions[:, axis]
        counts = np.zeros((len(groups), size), int)  # devices of each group at each coordinate
        for i, group in enumerate(groups):
            np.add.at(counts[i], coords[list(group)], 1)
        n = counts.sum(1)
        roots = coords[[group[0] for group in groups]]
        crosses_axis = bool((np.count_nonzero(counts, axis=1) > 1).any())
        for start, length in self._ranges(axis):
            positions = np.arange(start, start + length) % size
            if not crosses_axis:
                yield np.zeros(2)
            elif kind == 'collective-permute':
                inside = np.isin(coords[np.array(groups)], positions)  # columns: source, target
                enters, leaves = inside[:, 1] & ~inside[:, 0], inside[:, 0] & ~inside[:, 1]
                yield np.array([enters.sum(), leaves.sum()], float)
            else:
                inside = counts[:, positions].sum(1)
                kinds = kind, _REVERSED.get(kind, kind)
                has_root = np.isin(roots, positions)
                yield np.array([_entering(k, inside, n, has_root).sum() for k in kinds])


def _domains(devices: Sequence[Any], size: int) -> list[int]:
    """Returns the index of the NVLink domain of each device.

    Of GPUs you don't have, the first coordinate is the domain. Otherwise, the devices of a domain
    have consecutive ids.
    """
    found = [0] * len(devices)
    domains: dict[Any, int] = {}
    counts: dict[Any, int] = {}  # devices with lower ids and the same coordinate
    for i in sorted(range(len(devices)), key=lambda i: devices[i].id):
        device, outer = devices[i], None
        if getattr(device, 'platform', None) == 'gpu' and getattr(device, 'coords', None):
            outer = getattr(device, 'slice_index', None), device.coords[0]
        rank = counts.get(outer, 0)
        counts[outer] = rank + 1
        found[i] = domains.setdefault((outer, rank // size), len(domains))
    return found


class _Pattern(NamedTuple):
    """The devices that send to each other."""

    is_directed: bool  # whether `groups` are the pairs (source, target) of a permute
    groups: tuple[tuple[int, ...], ...]


def _owner_crossings(kind: str, groups: Sequence[Ints], owners: Any) -> tuple[Any, Any]:
    """Returns the bytes into and out of each slice or chip, per byte of the array.

    `owners` has the index of the slice or chip of each device.
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
        has_root = members == owners[group[0]]
        enters[members] += _entering(kind, counts, len(group), has_root)
        leaves[members] += _entering(_REVERSED.get(kind, kind), counts, len(group), has_root)
    return enters, leaves


# a reduce-scatter is an all-gather in reverse: what enters a set in one leaves it in the other
_REVERSED = {
    'all-gather': 'reduce-scatter',
    'reduce-scatter': 'all-gather',
    'collective-broadcast': 'reduce',  # of partial sums, to the root
}


def _entering(kind: str, inside: Any, n: Any, has_root: Any) -> Any:
    """Returns the fraction of the array that must enter a set of devices.

    Args:
        inside: how many devices of the group are in the set, or an array of one number per group.
        n: the number of devices of the group, or an array of one number per group.
        has_root: whether the set has the first device of the group, which sends a broadcast.
    """
    is_split = (inside > 0) & (inside < n)
    fraction = {
        'all-gather': (n - inside) / n,  # the shards of the devices outside
        'reduce-scatter': inside / n,  # a partial sum of each result shard inside
        'all-to-all': inside * (n - inside) / n,  # 1/n from each device outside to each inside
        'collective-broadcast': 1.0 - has_root,
        'reduce': 1.0 * has_root,
    }.get(kind, 1.0)  # each element, or in an all-reduce, a partial sum of it
    return is_split * fraction


def _max_seconds(n_bytes: Any, bandwidths: Any) -> float:
    return float(_seconds(n_bytes, bandwidths).max())


def _seconds(n_bytes: Any, bandwidths: Any) -> Any:
    """Divides bytes by bandwidths. Returns 0 where the bandwidth is 0, which means unknown."""
    return np.divide(n_bytes, bandwidths, out=np.zeros(len(n_bytes)), where=bandwidths > 0)


class _Links:
    """The links on shortest paths between the devices of each group.

    `plus[axis]` and `minus[axis]` are boolean arrays over slices and positions. `plus[axis]` says
    whether a path uses the link from a position to the next one along the axis. `minus[axis]` says
    the same about the link from the next position back.
    """

    def __init__(self, network: Network, patterns: Sequence[_Pattern]):
        self.network = network
        shape = (network.n_slices, *network.sizes)
        axes = range(len(network.sizes))
        self.plus, self.minus = ([np.zeros(shape, bool) for _ in axes] for _ in range(2))
        for pattern in patterns:
            for group in network.split_by_slice(pattern)[0]:
                self._add(group, pattern.is_directed)

    def _add(self, group: Ints, is_directed: bool) -> None:
        network = self.network
        paths: list[tuple[Any, ...]] = []
        for axis, coords in enumerate(network.positions[list(group)].T):
            size, wraps = network.sizes[axis], network.wraps[axis]
            ends = coords if is_directed else np.unique(coords)
            paths.append(_shortest_paths(tuple(ends), size, wraps, is_directed))
        covered = [np.flatnonzero(positions) for _, _, positions in paths]
        for axis in range(len(network.sizes)):
            for links, used in zip((self.plus, self.minus), paths[axis][:2], strict=True):
                positions = [*covered[:axis], np.flatnonzero(used), *covered[axis + 1 :]]
                links[axis][np.ix_([network.slices[group[0]]], *positions)] = True

    @property
    def total(self) -> int:
        return sum(int(links.sum()) for links in (*self.plus, *self.minus))

    def count_at_chips(self) -> tuple[Any, Any]:
        """Returns the number of links into each chip, and out of each chip."""
        network = self.network
        into = np.zeros_like(self.plus[0], int)
        out = np.zeros_like(into)
        for axis, (plus, minus) in enumerate(zip(self.plus, self.minus, strict=True), 1):
            into += np.roll(plus, 1, axis) + minus.astype(int)
            out += plus + np.roll(minus, 1, axis).astype(int)
        _, devices = np.unique(network.chips, return_index=True)  # one device of each chip
        positions = (network.slices[devices], *network.positions[devices].T)
        return into[positions], out[positions]

    def across(self, axis: int, start: int, end: int, wraps: bool) -> tuple[int, int]:
        """Returns the number of links into and out of the positions from start to end - 1."""
        plus, minus = self._counts[axis]
        before, last = start - 1, (end - 1) % len(plus)
        has_before = wraps or start > 0
        into = minus[last] + (plus[before] if has_before else 0)
        out = plus[last] + (minus[before] if has_before else 0)
        return into, out

    @functools.cached_property
    def _counts(self) -> list[tuple[list[int], list[int]]]:
        """For each axis, the number of links from each position to the next one, and back."""

        def count(links: Any, axis: int) -> list[int]:
            others = tuple(i for i in range(links.ndim) if i != axis + 1)
            return links.sum(others).tolist()

        pairs = enumerate(zip(self.plus, self.minus, strict=True))
        return [(count(plus, axis), count(minus, axis)) for axis, (plus, minus) in pairs]


@functools.lru_cache(maxsize=4096)
def _shortest_paths(
    positions: tuple[int, ...], size: int, wraps: bool, is_directed: bool
) -> tuple[Any, ...]:
    """Finds the shortest paths between positions along one dimension of the torus.

    Returns three boolean arrays over all positions: whether a path uses the link to the next
    position, whether one uses the link from the next position back, and whether one visits the
    position. If `is_directed`, only paths from the first of `positions` to the second count.
    """
    plus, minus, covered = (np.zeros(size, bool) for _ in range(3))
    covered[list(positions)] = True
    for a, b in [positions] if is_directed else itertools.permutations(positions, 2):
        ahead, back = (b - a) % size, (a - b) % size
        goes_ahead, goes_back = (ahead <= back, back <= ahead) if wraps else (a < b, b < a)
        if goes_ahead:
            plus[[(a + i) % size for i in range(ahead)]] = True
            covered[[(a + i) % size for i in range(ahead)]] = True
        if goes_back:
            minus[[(b + i) % size for i in range(back)]] = True
            covered[[(b + i) % size for i in range(back)]] = True
    return plus, minus, covered
