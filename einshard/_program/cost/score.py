"""The cost of a program from the shardings of its values, without compiling it.

Nearly the sum of the lower bounds of the compiled program (`bounds.py`), in seconds of the chip:
products, the collectives of the cheapest way to run each operation, and what arguments and results
take to be read and written. Temporaries, and what the compiler fuses, are unknown before it runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import fsum, inf, prod
from typing import NamedTuple

from ..._chips.chip import Chip
from ..traced.attributes import Sharding
from ..traced.outline import MOVE, PRODUCTS, Form, Outline, Step, bytes_of
from ..traced.propagated import Axes, Axis, Rule
from .mesh_network import MeshNetwork
from .temporaries import Temporaries

# more ways to run an operation than 2 to this power are not tried
_MAX_OPTIONS = 5
# the CPU backend widens these, see `find_bounds`
_WIDENED = frozenset(('f32', 'f16'))


@dataclass(frozen=True)
class Score:
    """What a program with certain shardings costs.

    Attributes:
        seconds: the sum of the estimates for compute, HBM and network.
        memory: bytes of arguments and results on a device. Results in the memory of donated
            arguments count once.
        shardings: of each value, by its number.
        ways: how each step runs.
        of_steps: the seconds of each step, without what its operands take to be resharded.
        of_values: of each value, the seconds in which it is read, resharded and written.
    """

    seconds: float
    memory: int
    shardings: Sequence[Sharding] = field(repr=False)
    ways: Sequence[Way] = field(repr=False)
    of_steps: Sequence[float] = field(repr=False)
    of_values: Mapping[int, float] = field(repr=False)


class Way(NamedTuple):
    """A way to run an operation: the operands that are resharded before, and the rest."""

    moves: tuple[tuple[int, Axes], ...]
    collectives: float
    compute: float


_NOTHING = Way((), 0.0, 0.0)


class Costs:
    """Finds the costs of one outline with different shardings.

    Args:
        share: which part of a chip each device has.
        is_widened: whether f32 products count as those of bf16; see `find_bounds`.
    """

    def __init__(
        self,
        outline: Outline,
        network: MeshNetwork,
        chip: Chip,
        share: float = 1.0,
        is_widened: bool = True,
    ):
        self.outline, self.network, self.chip = outline, network, chip
        self.share, self.is_widened = share, is_widened
        self._ways: dict[tuple[Form, tuple[Axes, ...]], Way] = {}
        self._bytes = [bytes_of(type_) for type_ in outline.types]
        read, written = _traffic(outline)
        # how often; one layer may stand for several
        self._read, self._written = Counter(read), Counter(written)
        # the steps that take each value, and as which operand
        self._uses: dict[int, list[tuple[int, int]]] = {v: [] for v in (*read, *written)}
        for s, step in enumerate(outline.steps):
            for i, v in enumerate(step.operands):
                self._uses.setdefault(v, []).append((s, i))

    def score(self, shardings: Sequence[Sharding], near: Score | None = None) -> Score:
        """Returns what the program costs with these shardings.

        Args:
            near: the score with others. Only what differs is computed again.
        """
        outline, n_bytes = self.outline, self._bytes
        shards = self.network.n_shards
        kept = {*outline.aliases.values()}
        memory = sum(n_bytes[v] // shards(shardings[v].axes) for v in outline.arguments)
        memory += sum(
            n_bytes[v] // shards(shardings[v].axes)
            for i, v in enumerate(outline.ends)
            if i not in kept
        )
        axes = [sharding.axes for sharding in shardings]
        if near is None:
            steps: Iterable[int] = range(len(outline.steps))
            values: Iterable[int] = self._uses
            ways, of_steps = [_NOTHING] * len(outline.steps), [0.0] * len(outline.steps)
            of_values: dict[int, float] = {}
        else:
            pairs = enumerate(zip(shardings, near.shardings, strict=True))
            changed = [v for v, (a, b) in pairs if a is not b and a.axes != b.axes]
            steps = {s for v in changed for s in outline.steps_of.get(v, ())}
            taken = (v for s in steps for v in outline.steps[s].operands)
            values = {*taken, *(v for v in changed if v in self._uses)}
            ways, of_steps, of_values = [*near.ways], [*near.of_steps], {**near.of_values}
        for s in steps:
            way = ways[s] = self._way_of(outline.steps[s], axes)
            of_steps[s] = outline.steps[s].runs * (way.collectives + way.compute)
        for v in values:
            of_values[v] = self._seconds_of(v, axes, ways)
        # the same sum in any order
        seconds = fsum(chain(of_steps, of_values.values()))
        return Score(seconds, memory, shardings, ways, of_steps, of_values)

    def peak(self, score: Score) -> int:
        """The bytes of a device that a program needs: those of its score, and temporary ones.

        A lower bound, as the compiler may keep more of them.
        """
        n_shards, n_bytes = self.network.n_shards, self._bytes
        copies: dict[int, int] = {}
        for s, way in enumerate(score.ways):
            if way.moves and self.outline.steps[s].form.kind != MOVE:
                operands = self.outline.steps[s].operands
                copies[s] = sum(n_bytes[operands[i]] // n_shards(axes) for i, axes in way.moves)
        axes = [sharding.axes for sharding in score.shardings]
        return score.memory + self._temporaries.peak(axes, n_shards, copies)

    @functools.cached_property
    def _temporaries(self) -> Temporaries:
        return Temporaries(self.outline)

    def _way_of(self, step: Step, axes: Sequence[Axes]) -> Way:
        form, operands, results, _, _ = step
        if form.kind == MOVE:
            [value], [to] = operands, results
            return Way(((0, axes[to]),), 0.0, 0.0) if axes[value] != axes[to] else _NOTHING
        key = form, tuple([axes[v] for v in (*operands, *results)])
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = self._way(form, key[1])
        return way

    def _seconds_of(self, value: int, axes: Sequence[Axes], ways: Sequence[Way]) -> float:
        """The seconds in which a value is read, resharded and written."""
        have, n_bytes, network = axes[value], self._bytes[value], self.network
        bandwidth = self.chip.memory_bandwidth * self.share
        # into how many parts an argument is divided of which a device reads one: of an argument of
        # which an operation only needs a slice, only that is read
        n_read = inf
        # a value that several operations need alike is resharded once
        moved = dict[Axes, int]()
        for s, i in self._uses[value]:
            wants = [want for j, want in ways[s].moves if i == j]
            for want in wants:
                moved.setdefault(want, self.outline.steps[s].runs)
            if value in self._read:
                want = wants[0] if wants else have
                only_slices = all(x[: len(y)] == y for y, x in zip(have, want, strict=True))
                n_read = min(n_read, network.n_shards(want if only_slices else have))
        seconds = sum(runs * network.reshard(have, want, n_bytes) for want, runs in moved.items())
        if value in self._read:
            n = network.n_shards(have) if n_read == inf else n_read
            seconds += self._read[value] * n_bytes / n / bandwidth
        if value in self._written:
            seconds += self._written[value] * n_bytes / network.n_shards(have) / bandwidth
        return seconds

    # --- one operation ----------------------------------------------------------------------------

    def _way(self, form: Form, axes: tuple[Axes, ...]) -> Way:
        """The cheapest way to run an operation on values with these mesh axes."""
        n = len(form.operands)
        axes = tuple(self.network.split(*axes))
        ins, outs = axes[:n], axes[n:]
        if form.groups:
            # a collective that the user wrote inside `shard_map`
            larger = max(map(bytes_of, (*form.operands, *form.results)))
            kind = form.kind.replace('_', '-')
            per_byte = self.network.network.seconds_per_byte(kind, form.groups)
            return Way((), per_byte * larger, 0.0)
        if form.kind in ('dynamic_slice', 'dynamic_update_slice'):
            return self._slice(form, ins, outs[0])
        if form.rule is None:
            # XLA partitions none of the operations that Shardy does not know, such as a QR
            whole = ((i, ((),) * len(x)) for i, x in enumerate(ins) if any(x))
            return Way(tuple(whole), 0.0, 0.0)
        return self._ruled(form, form.rule, ins, outs)

    def _ruled(self, form: Form, rule: Rule, ins: Sequence[Axes], outs: Sequence[Axes]) -> Way:
        network, n, is_product = self.network, len(ins), form.kind in PRODUCTS
        kept = {f for dims in rule.tensors[n:] for dim in dims for f in dim}
        found = [self._by_factor(rule, i, x) for i, x in enumerate(ins)]
        wanted = {
            f: axes for f, axes in self._by_factor(rule, n, outs[0]).items() if f not in rule.whole
        }
        held: dict[tuple[int, Axis], int] = {}
        for by in found:
            for pair in ((f, a) for f, axes in by.items() for a in axes if f not in rule.whole):
                held[pair] = held.get(pair, 0) + 1
        # XLA leaves a mesh axis where an operand and the result have it, and sums over an axis
        # along which all operands are contracted. Where one is, it may gather it (measured on CPU).
        agreed = {a for f, a in held if a in wanted.get(f, ())}
        is_reduction = form.kind == 'reduce'
        summed_over = [
            (f, a)
            for (f, a), k in held.items()
            if f not in kept and a not in agreed and (is_reduction or k == n > 1)
        ]
        agreed |= {a for _, a in summed_over}
        options = [(f, a) for f, a in held if f not in kept and a not in agreed][:_MAX_OPTIONS]
        n_devices, n_agreed = prod(network.mesh.values()), prod(map(network.size, agreed))
        rate = 1.0
        if form.flops:
            dtype = form.operands[0].dtype
            dtype = 'bf16' if self.is_widened and dtype in _WIDENED else dtype
            rate = self.chip.rate(dtype) * self.share
        n_out = sum(map(bytes_of, form.results))
        best: tuple[float, Way] | None = None
        subsets = (combinations(options, k) for k in range(len(options) + 1))
        for chosen in chain.from_iterable(subsets):
            chosen = (*summed_over, *chosen)
            names = {a for _, a in chosen}
            if len(names) < len(chosen):
                continue
            n_used = n_agreed * prod(map(network.size, names - agreed))
            alone = {f for f, a in chosen if a not in agreed}
            left = any(by.get(f, ()) and not names.issuperset(by[f]) for f in alone for by in found)
            if is_product and alone and (n_used != n_devices or left):
                # it finds no way to sum if devices would repeat the product, or an operand has
                # other mesh axes there
                continue
            use = {f: tuple(a for a in axes if a not in names) for f, axes in wanted.items()}
            for f, a in chosen:
                use[f] = (*use.get(f, ()), a)

            def place(i: int, use: Mapping[int, tuple[Axis, ...]] = use) -> Axes:
                return tuple(
                    tuple(a for f in dim for a in use.get(f, ())) for dim in rule.tensors[i]
                )

            moves = [(i, want) for i in range(n) if (want := place(i)) != ins[i]]
            made, partial = place(n), [a for f, a in chosen if f not in kept]
            scattered = [a for a in partial if any(a in dim for dim in outs[0])]
            summed = [a for a in partial if a not in scattered]
            local = n_out / network.n_shards(made)
            sent = network.seconds('reduce-scatter', scattered, local)
            local /= prod(map(network.size, scattered))
            sent += network.seconds('all-reduce', summed, local)
            made = tuple(
                (*dim, *(a for a in scattered if a in want))
                for dim, want in zip(made, outs[0], strict=True)
            )
            sent += network.reshard(made, outs[0], n_out)
            used = prod(network.size(a) for axes in use.values() for a in axes)
            compute = form.flops / used / rate
            before = sum(
                network.reshard(ins[i], want, bytes_of(form.operands[i])) for i, want in moves
            )
            seconds = before + sent + compute
            if best is None or seconds < best[0]:
                best = seconds, Way(tuple(moves), sent, compute)
        assert best is not None  # no axis is one of the choices
        return best[1]

    def _by_factor(self, rule: Rule, tensor: int, axes: Axes) -> dict[int, tuple[Axis, ...]]:
        found: dict[int, tuple[Axis, ...]] = {}
        for factors, dim in zip(rule.tensors[tensor], axes, strict=True):
            left = [*dim]
            for f in factors:
                size, mine = rule.sizes[f], list[Axis]()
                while left and (size % self.network.size(left[0]) == 0 or f == factors[-1]):
                    mine.append(left.pop(0))
                    size //= self.network.size(mine[-1])
                found[f] = tuple(mine)
        return found

    def _slice(self, form: Form, ins: Sequence[Axes], out: Axes) -> Way:
        """XLA masks slices and updates of one element along a sharded axis.

        For longer ones, it gathers the array.
        """
        is_update = form.kind == 'dynamic_update_slice'
        array, part = (
            (form.results[0], form.operands[1])
            if is_update
            else (form.operands[0], form.results[0])
        )
        sizes = [*zip(array.shape, part.shape, strict=True)]
        if is_update:
            made = tuple(x if m in (1, n) else () for (n, m), x in zip(sizes, out, strict=True))
            update = tuple(x if m == n else () for (n, m), x in zip(sizes, out, strict=True))
            moves = [(i, x) for i, x in ((0, made), (1, update)) if x != ins[i]]
            return Way(tuple(moves), self.network.reshard(made, out, bytes_of(array)), 0.0)
        lost = [a for (n, m), dim in zip(sizes, ins[0], strict=True) if m == 1 < n for a in dim]
        want = tuple(
            tuple(a for a in new if a not in lost) if m == n else old if m == 1 else ()
            for (n, m), old, new in zip(sizes, ins[0], out, strict=True)
        )
        whole = (
            self.network.size(a)
            for (n, m), dim in zip(sizes, want, strict=True)
            if m == n
            for a in dim
        )
        sent = self.network.seconds('all-reduce', lost, bytes_of(part) / prod(whole))
        return Way(((0, want),) if want != ins[0] else (), sent, 0.0)


# operations whose result may be in the place of the first operand, and those that fuse into others
_IN_PLACE = frozenset(('dynamic_update_slice', 'scatter', 'reshape', 'convert', MOVE))
_FUSED = frozenset(('reshape', 'convert', MOVE))


def _traffic(outline: Outline) -> tuple[list[int], list[int]]:
    """Returns the arguments that are read, and the results that are written, as values.

    As in `min_hbm_bytes`: what a gather reads is unknown, and donated arguments may be updated in
    place.
    """
    first: dict[int, int] = {}
    users: dict[int, list[Step]] = {}
    for step in outline.steps:
        for v in step.operands:
            users.setdefault(v, []).append(step)
        if step.form.kind in _IN_PLACE:
            for v in step.results:
                first.setdefault(v, step.operands[0])

    def is_read(value: int) -> bool:
        """Whether an operation other than a gather of its elements reads a value."""
        todo = dict.fromkeys([value])
        for v in (queue := [value]):
            inside = outline.carried.get(v, ())
            for step in users.get(v, ()):
                if step.form.kind in _FUSED:
                    inside = [*inside, *step.results]
                elif step.form.kind != 'gather' or step.operands[0] != v:
                    return True
            queue += [r for r in inside if r not in todo]
            todo |= dict.fromkeys(inside)
        return False

    def is_written(number: int, value: int) -> bool:
        while value in first:
            value = first[value]
        return value not in inputs or (value, number) not in kept

    inputs = {*outline.arguments}
    kept = {(outline.arguments[a], number) for a, number in outline.aliases.items()}
    ends = enumerate(zip(outline.results, outline.ends, strict=True))
    return (
        [v for v in outline.arguments if is_read(v)],
        [end for i, (v, end) in ends if is_written(i, v)],
    )
