"""A module with many equal layers, as one with three of them.

A train step with 64 unrolled layers has 24,000 operations, and propagating it takes a second. Its
layers are equal: the first and the last have other neighbours, the second stands for all between.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .outline import Outline, Place, main_of
from .propagated import CONSTRAINT
from .shardy import POSITION, SHARDING, Op, all_ops

# fewer layers are not worth it
_MIN_COPIES = 6
# distances between equal operations that may be a layer
_N_PERIODS = 48
_CONSTRAINT = f'sdy.{CONSTRAINT}'
# numbers of calls, which differ
_COUNTED = frozenset((POSITION, 'channel_handle'))

_NUMBER = re.compile(rf'{re.escape(POSITION)} = \d+')

# the position of an operation in the main block and the number of its result; an argument has -1
_Value: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Twin:
    """A module in which one layer stands for others.

    Attributes:
        count: how many layers it stands for, itself included.
        standing: the positions of its operations.
        folded: for each place that is gone, the one that stands for it.
        results: the numbers of the results that are left.
    """

    module: Op
    count: int
    standing: frozenset[int]
    folded: dict[Place, Place]
    results: list[int]

    def scale(self, outline: Outline) -> None:
        """Counts what the outline of this module computes as often as the whole program does."""
        outline.standing, outline.n_standing = self.standing, self.count
        n = len(outline.ends)
        stands = Counter(self.folded.values())
        steps = [
            step._replace(runs=step.runs * self.count) if step.op in self.standing else step
            for step in outline.steps[: len(outline.steps) - n]
        ]
        for i, step in zip(self.results, outline.steps[len(outline.steps) - n :], strict=True):
            steps.append(step._replace(runs=step.runs * (1 + stands[Place('result', i)])))
        outline.steps = steps
        folded = {place: each.index for place, each in self.folded.items()}
        arguments, number = outline.arguments, {r: i for i, r in enumerate(self.results)}
        outline.arguments = [
            arguments[folded.get(Place('argument', i), i)] for i in range(len(arguments))
        ]
        n_results = n + sum(place.kind == 'result' for place in folded)
        at = [number[folded.get(Place('result', i), i)] for i in range(n_results)]
        outline.results = [outline.results[i] for i in at]
        outline.ends = [outline.ends[i] for i in at]
        for place, index in folded.items():
            if place.kind == 'constraint':  # whose value is asked for
                outline.constraints[place.index] = outline.constraints[index]


class _Family(NamedTuple):
    """Copies of a sequence of operations, one after the other."""

    start: int
    period: int
    copies: int


class _At(NamedTuple):
    """Where an operation is: the family, the copy, and the position in it."""

    family: int
    copy: int
    offset: int


def _attributes(op: Op) -> list[Any]:
    """What two operations have in common if they are equal."""
    try:
        return [x for x in op.attributes.items() if x[0] not in _COUNTED]
    except TypeError:  # JAX has no Python type for complex constants
        return [_NUMBER.sub('', str(op).partition(' = ')[2])]


def find_twin(module: Op, site_of: Callable[[int], Hashable]) -> Twin | None:
    """Returns a smaller module, or None if there are not many equal layers.

    Args:
        module: with numbered operations, inside `shardy.locked`.
        site_of: what edits change at the constraint at a position.
    """
    return _Finder(module, site_of).find()


class _Finder:
    def __init__(self, module: Op, site_of: Callable[[int], Hashable]):
        self._module, self._site_of = module, site_of
        self._main = main_of(module)
        self._block = self._main.regions[0].blocks[0]
        self._ops: list[Op] = [view.operation for view in self._block.operations]
        self._read: list[list[_Value]] = []
        self._at: dict[int, _At] = {}
        # of each family, the layer of its first copy, and that of the next one less that
        self._layers: dict[int, tuple[int, int]] = {}
        # of each argument of a layer: what takes it, and the layer
        self._arguments: dict[int, tuple[Hashable, int]] = {}

    def find(self) -> Twin | None:
        # 1. sequences of equal operations that repeat
        families = _families(np.array(self._signatures()))
        if not families:
            return None
        for f, family in enumerate(families):
            for t in range(family.period * family.copies):
                self._at[family.start + t] = _At(f, *divmod(t, family.period))
        # 2. which copies belong to one layer: forward, backward and update
        self._families = families
        self._align()
        ends = [sorted((self._layer(f, 0), self._layer(f, families[f].copies - 1)))
                for f in self._layers]  # fmt: skip
        low, high = max(a for a, _ in ends), min(b for _, b in ends)
        if high - low + 1 < _MIN_COPIES:
            return None
        self._first, self._stands, self._last = low, low + 1, high
        # 3. they take equal values
        if not self._are_equal():
            return None
        return self._cut()

    def _signatures(self) -> list[int]:
        numbers: dict[Any, int] = {}
        producers: dict[Any, _Value] = {v: (-1, i) for i, v in enumerate(self._block.arguments)}
        found: list[int] = []
        for t, op in enumerate(self._ops):
            key: list[Any] = []
            read: list[_Value] = []
            inner: dict[Any, int] = {}
            for each in all_ops(op):
                key += [each.name, len(each.operands)]
                key += _attributes(each)
                if each.name == _CONSTRAINT:
                    key.append(self._site_of(each.attributes[POSITION].value))
                for value in each.operands:
                    key.append(value.type)
                    if value in producers:
                        read.append(producers[value])
                    else:
                        key.append(inner.get(value))
                for region in each.regions:
                    for block in region.blocks:
                        for value in block.arguments:
                            inner[value] = len(inner)
                for value in each.results:
                    key.append(value.type)
                    inner[value] = len(inner)
            producers |= {value: (t, r) for r, value in enumerate(op.results)}
            self._read.append(read)
            found.append(numbers.setdefault(tuple(key), len(numbers)))
        return found

    # --- layers -----------------------------------------------------------------------------------

    def _layer(self, family: int, copy: int) -> int:
        first, step = self._layers[family]
        return first + step * copy

    def _copy(self, family: int, layer: int) -> int:
        first, step = self._layers[family]
        return (layer - first) * step

    def _layer_of(self, value: _Value) -> int | None:
        t, r = value
        if t < 0:
            return self._arguments[r][1] if r in self._arguments else None
        at = self._at.get(t)
        return None if at is None or at.family not in self._layers else self._layer(*at[:2])

    def _slots(self, family: int) -> Iterator[tuple[tuple[int, int, int], list[_Value]]]:
        """Yields what each copy reads at one place."""
        start, period, copies = self._families[family]
        for i in range(period):
            each = [self._read[start + period * k + i] for k in range(copies)]
            for j, values in enumerate(zip(*each, strict=True)):
                yield (family, i, j), [*values]

    def _align(self) -> None:
        families = self._families
        largest = max(range(len(families)), key=lambda f: families[f].period * families[f].copies)
        self._layers[largest] = 0, 1
        todo = {largest}
        while todo:
            for f in todo:
                for slot, values in self._slots(f):
                    is_new = all(t < 0 and r not in self._arguments for t, r in values)
                    if is_new and len({*values}) == len(values):
                        for k, (_, r) in enumerate(values):
                            self._arguments[r] = slot, self._layer(f, k)
            votes: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
            for f in range(len(families)):
                for _, values in self._slots(f):
                    for g, pairs in self._pairs(f, values).items():
                        # at both ends, something else may be read
                        pairs = sorted(pairs)[1:-1]
                        steps = {(b[1] - a[1], b[0] - a[0]) for a, b in pairwise(pairs)}
                        if steps in ({(1, 1)}, {(-1, 1)}):
                            [(step, _)] = steps
                            votes[g][pairs[0][1] - step * pairs[0][0], step] += 1
            todo = {g for g in votes if g not in self._layers}
            self._layers |= {g: votes[g].most_common(1)[0][0] for g in todo}

    def _pairs(self, f: int, values: Sequence[_Value]) -> dict[int, list[tuple[int, int]]]:
        """The copies of families without known layers and the layers that they are connected to."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for k, value in enumerate(values):
            if f not in self._layers:
                layer = self._layer_of(value)
                if layer is not None:
                    found[f].append((k, layer))
            elif value[0] in self._at and self._at[value[0]].family not in self._layers:
                at = self._at[value[0]]
                found[at.family].append((at.copy, self._layer(f, k)))
        return found

    def _are_equal(self) -> bool:
        for f in self._layers:
            copies = [self._copy(f, n) for n in range(self._stands, self._last)]
            for _, values in self._slots(f):
                first = self._seen_from(values[copies[0]], self._stands)
                for k in copies[1:]:
                    if self._seen_from(values[k], self._layer(f, k)) != first:
                        return False
        given = self._main.attributes.get('arg_attrs')
        for r, (slot, layer) in self._arguments.items():
            other = self._argument(slot, self._stands) if self._is_folded(layer) else r
            if other is None:
                return False
            if given is not None and _sharding(given[r]) != _sharding(given[other]):
                return False
        return True

    def _seen_from(self, value: _Value, layer: int) -> Hashable:
        t, r = value
        own = self._layer_of(value)
        if own is None:
            return value
        if t < 0:
            return self._arguments[r][0], own - layer
        return self._at[t].family, own - layer, self._at[t].offset, r

    def _argument(self, slot: Hashable, layer: int) -> int | None:
        if not hasattr(self, '_by_slot'):
            self._by_slot = {each: r for r, each in self._arguments.items()}
        return self._by_slot.get((slot, layer))

    def _is_folded(self, layer: int | None) -> bool:
        return layer is not None and self._stands < layer < self._last

    def _in_layer(self, value: _Value, layer: int) -> _Value | None:
        """The same value of another layer."""
        t, r = value
        if t < 0:
            found = self._argument(self._arguments[r][0], layer)
            return None if found is None else (-1, found)
        at = self._at[t]
        start, period, _ = self._families[at.family]
        return start + period * self._copy(at.family, layer) + at.offset, r

    # --- the smaller module -----------------------------------------------------------------------

    def _cut(self) -> Twin | None:
        from jax.extend.mlir import ir

        gone = [t for t in range(len(self._ops)) if self._is_folded(self._layer_of((t, 0)))]
        is_gone, folded, standing = {*gone}, dict[Place, Place](), set[int]()
        for t in gone:
            other = self._in_layer((t, 0), self._stands)
            assert other is not None
            pairs = zip(all_ops(self._ops[t]), all_ops(self._ops[other[0]]), strict=True)
            for a, b in pairs:
                at, to = a.attributes[POSITION].value, b.attributes[POSITION].value
                if a.name == _CONSTRAINT:
                    folded[Place('constraint', at)] = Place('constraint', to)
                standing.add(to)
        # 1. what the layers that are left read from one that is gone
        last = len(self._ops) - 1
        reads: dict[tuple[int, int], _Value] = {}
        results: dict[int, int] = {}
        for t, values in enumerate(self._read):
            for j, value in enumerate(values) if t not in is_gone else ():
                layer, own = self._layer_of(value), self._layer_of((t, 0))
                if not self._is_folded(layer):
                    continue
                assert layer is not None
                if t == last:
                    other = self._in_layer(value, self._stands)
                    if other is None or other not in values:
                        return None
                    results[j] = values.index(other)
                    continue
                to = {
                    (self._stands, self._stands + 1): self._last,
                    (self._last, self._last - 1): self._stands,
                }.get((own or 0, layer))
                other = None if own is None or to is None else self._in_layer(value, to)
                if other is None:
                    return None
                reads[t, j] = other
        # 2. connect them, and remove the rest
        module = self._module.clone()
        main = main_of(module)
        block = main.regions[0].blocks[0]
        ops: list[Op] = [view.operation for view in block.operations]

        def value_of(value: _Value) -> Any:
            t, r = value
            return block.arguments[r] if t < 0 else ops[t].results[r]

        for t in {t for t, _ in reads}:
            outer = self._outer(ops[t], block)
            for j, (op, i) in enumerate(outer):
                if (t, j) in reads:
                    op.operands[i] = value_of(reads[t, j])
        end = ops[last]
        kept = [j for j in range(len(end.operands)) if j not in results]
        operands = [end.operands[j] for j in kept]
        given, place = dict(end.attributes.items()), ir.InsertionPoint(end)
        new = ir.Operation.create(end.name, [], operands, given, loc=end.location, ip=place)
        end.erase()
        inputs = [v.type for v in block.arguments]
        type_ = ir.FunctionType.get(inputs, [v.type for v in new.operands])
        main.attributes['function_type'] = ir.TypeAttr.get(type_)
        if 'res_attrs' in main.attributes:
            given = main.attributes['res_attrs']
            for j, other in results.items():
                if _sharding(given[j]) != _sharding(given[other]):
                    return None
            main.attributes['res_attrs'] = ir.ArrayAttr.get([given[j] for j in kept])
        for t in reversed(gone):
            ops[t].erase()
        folded |= {Place('result', j): Place('result', other) for j, other in results.items()}
        for r, (slot, layer) in self._arguments.items():
            if self._is_folded(layer):
                other = self._argument(slot, self._stands)
                assert other is not None
                folded[Place('argument', r)] = Place('argument', other)
        count = self._last - self._stands
        return Twin(module, count, frozenset(standing), folded, kept)

    def _outer(self, op: Op, block: Any) -> list[tuple[Op, int]]:
        """The operands that come from outside, in the order of `_signatures`."""
        inner: set[Any] = set()
        found: list[tuple[Op, int]] = []
        for each in all_ops(op):
            found += [(each, i) for i, v in enumerate(each.operands) if v not in inner]
            for region in each.regions:
                for b in region.blocks:
                    inner |= {*b.arguments}
            inner |= {*each.results}
        return found


def _families(ids: Any) -> list[_Family]:
    """Sequences that repeat, those that cover most first."""
    order = np.argsort(ids, kind='stable')
    same = ids[order[1:]] == ids[order[:-1]]
    gaps, counts = np.unique((order[1:] - order[:-1])[same], return_counts=True)
    gaps = gaps[(counts >= _MIN_COPIES - 1) & (gaps > 1)]
    counts = counts[np.isin(np.unique((order[1:] - order[:-1])[same]), gaps)]
    periods = sorted(gaps[np.argsort(-gaps * counts)][:_N_PERIODS].tolist())
    free, found = np.ones(len(ids), bool), list[_Family]()
    while True:
        best: _Family | None = None
        for p in periods:
            equal = (ids[p:] == ids[:-p]) & free[p:] & free[:-p]
            edges = np.concatenate([[-1], np.flatnonzero(~equal), [len(equal)]])
            i = int(np.argmax(np.diff(edges)))
            run = int(edges[i + 1] - edges[i] - 1)
            family = _Family(int(edges[i]) + 1, p, run // p + 1)
            is_larger = best is None or p * family.copies > best.period * best.copies
            if family.copies >= _MIN_COPIES and is_larger:
                best = family
        if best is None:
            return found
        found.append(best)
        free[best.start : best.start + best.period * best.copies] = False


def _sharding(attributes: Any) -> Any:
    # `get` of an attribute of attributes is something else
    return attributes[SHARDING] if SHARDING in attributes else None  # noqa: SIM401
