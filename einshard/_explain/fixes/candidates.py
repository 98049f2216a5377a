"""Proposes changes for the costs of a program."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding

from ..._program.edits.edit import (
    Constrain,
    Edit,
    MoveThrough,
    PlaceArguments,
    PlaceResults,
    ReplaceConstraint,
    combine,
    placements,
)
from ..._program.edits.keys import Path
from ..._program.jaxpr.graph import Op
from ..._program.jaxpr.spans import Span
from ..._sharding.mesh import partition_spec
from ..._trees.paths import common_suffix_length
from ..findings.arguments import states_of_parameters
from ..findings.facts import Facts
from ..findings.gathers import before_and_after
from ..findings.next_call import next_arguments
from ..findings.trace import PRODUCTS, mesh_entries
from ..findings.values import Axis
from .costs import Cost, bytes_on_device, looped
from .moves import Entries, Move, Moves
from .trials import Trial

_MAX_POINTS = 5  # for each cost
_CONSTRAINT = 'sharding_constraint'


@dataclass(frozen=True)
class Point:
    """A value that a change constrains.

    Attributes:
        axes: its axes, with the new sharding.
        edits: one for each call of the function that computes it.
        is_constraint: whether the change replaces a constraint.
        of_operand: whether the value is the operand of a constraint, which is kept.
        n_mapped: how many axes `jax.vmap` adds to it, which the code does not see.
        mapped: the position of the axis that the outermost `jax.vmap` adds, which a matmul may put
            last.
        is_alone: whether `spmd_axis_name=` in that `jax.vmap` changes no other constraints.
        n_calls: how many expressions call the function that computes it. A change of the function
            changes all of these calls.
    """

    span: Span
    axes: tuple[Axis, ...]
    sharding: NamedSharding
    edits: tuple[Edit, ...]
    is_constraint: bool
    n_mapped: int
    of_operand: bool = False
    mapped: int = 0
    is_alone: bool = True
    n_calls: int = 1

    @property
    def seen(self) -> tuple[tuple[Axis, ...], tuple[str, ...]] | None:
        """The axes that the code sees, and the `spmd_axis_name=` of the outermost `jax.vmap`.

        There are no axes if the code sees none that is sharded. None if they are unknown.
        """
        if not self.n_mapped:
            return self.axes, ()
        names = self.axes[self.mapped].mesh_axes
        others = (*self.axes[: self.mapped], *self.axes[self.mapped + 1 :])
        if names and not any(axis.mesh_axes for axis in others):
            return ((), names) if self.is_alone else None
        if self.n_mapped == 1:
            return (others, names) if self.is_alone or not names else None
        # the added axes are the first ones
        added = self.axes[: self.n_mapped]
        is_seen = not names and not any(axis.mesh_axes for axis in added)
        return (self.axes[self.n_mapped :], ()) if is_seen else None


class _Moved(NamedTuple):
    """A value that changes its placement.

    Attributes:
        op: the constraint that moves it, or else the operation that computes it. None for an
            argument or a result.
        argument, result: its index, if it moves as it enters or leaves the program.
    """

    shape: tuple[int, ...]
    before: Entries
    after: Entries
    op: Op | None = None
    argument: int | None = None
    result: int | None = None


@dataclass(frozen=True)
class Change:
    """A change that may lower a cost.

    Attributes:
        kind: the kind of the finding if it does.
        points: for each of `edits.values`, the value.
        added: the bytes that it adds to the arguments of each device.
    """

    kind: str
    cost: Cost
    edits: tuple[Edit, ...]
    points: tuple[Point, ...] = ()
    added: int = 0


class Candidates:
    """Proposes changes of one program.

    Without `moves`, proposes no reshards.
    """

    def __init__(self, facts: Facts, trial: Trial, moves: Moves | None = None):
        assert isinstance(facts.mesh, Mesh)
        self.facts, self.trial, self.mesh, self.moves = facts, trial, facts.mesh, moves
        self.states, self.replaced = states_of_parameters(facts), next_arguments(facts)
        self.sizes = {str(name): size for name, size in self.mesh.shape.items()}
        self.producers: dict[int, list[Op]] = defaultdict(list)
        self.users: dict[int, list[Op]] = defaultdict(list)
        self.back: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.by_line: dict[str, list[Op]] = defaultdict(list)
        self.parents: dict[tuple[int, int], tuple[int, int]] = {}
        self.origins: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.constraints: list[Op] = []
        for op in trial.traced.ops:
            is_forward = not op.site.is_backward and not op.site.n_shards
            if op.primitive == _CONSTRAINT and op.arrays_out and op.site.frames and is_forward:
                self.constraints.append(op)
            for out in op.arrays_out:
                self.producers[out].append(op)
            for v in op.arrays_in:
                self.users[v].append(op)
            if op.rule.einsum is not None:
                firsts: dict[int, tuple[int, int]] = {}
                for i, indices in zip(op.rule.einsum.operands, op.rule.einsum.indices, strict=True):
                    for d, index in enumerate(indices):
                        if (v := op.ins[i]) is not None:
                            self._join(firsts.setdefault(index, (v, d)), (v, d))
            for i, d, o, e in op.rule.links:
                old, new = op.ins[i], op.outs[o]
                if old is not None and new is not None and op.primitive != 'scan_axis':
                    self.back[new, e].append((old, d))
                    self._join((old, d), (new, e))
            if op.eqn is not None and op.site.frames and op.primitive not in _PASSING:
                self.by_line[op.site.frames[0].source].append(op)
        # one expression is an error where a helper constrains values of several ndims
        ndims: dict[Span, set[int]] = defaultdict(set)
        for op in self.constraints:
            n_seen = len(trial.traced.values[op.arrays_out[0]].shape) - op.site.n_mapped
            ndims[op.site.frames[0]].add(n_seen)
        self.constraints = [op for op in self.constraints if len(ndims[op.site.frames[0]]) == 1]
        self.argument_of = {
            value: i for i, value in enumerate(trial.traced.arguments) if value is not None
        }
        products = () if facts.trace is None else facts.trace.products
        read = {value.argument for p in products for value in (p.left, p.right)}
        self._multiplied = {i for i in read if i is not None}

    def has_any(self, cost: Cost) -> bool:
        """Whether there may be a change for a cost."""
        changes = itertools.chain(self._moved(cost), self.of(cost), self.replicated(cost))
        return any(True for _ in changes)

    def of(self, cost: Cost) -> Iterator[Change]:
        """Yields changes for a cost, the most promising first.

        Constraints cannot be inserted where types determine the shardings.
        """
        is_explicit = self.facts.is_explicit
        if self.moves is not None and not is_explicit:
            yield from self._reshards(cost, self.moves)
        for change in self._changes(cost):
            if not (is_explicit and change.points) and not self._shifts_a_move(change):
                yield change

    def _changes(self, cost: Cost) -> Iterator[Change]:
        ops = self.by_line.get(cost.line, [])
        ops = [op for op in ops if op.site.frames[0].column == cost.column - 1] or ops
        is_repeat, is_part = cost.n_repeats > 0, False
        if is_repeat:  # those of a line that repeat, as some calls of a helper do
            repeated = [
                op
                for op in ops
                if op.primitive in PRODUCTS
                and not any(
                    {*cost.mesh_axes} & self.trial.values[v].mesh_axes for v in op.arrays_in
                )
            ]
            is_part, ops = 0 < len(repeated) < len(ops), repeated or ops
        forward = [op for op in ops if not op.site.is_backward] or ops
        forward.sort(key=lambda op: -self._weight_of(op))
        yield from self._dropped(cost)
        yield from self._loops(cost)
        if is_part:  # the weight of these calls, such as an output layer
            yield from itertools.islice(self._weights(cost, cost.mesh_axes, forward[0]), 1)
        # a send may be for the product that uses its line
        consumers = [] if is_repeat else self._consumers(self._values_of(cost, forward))
        ops = [*forward[:1], *consumers, *forward[1:2]]
        axes = dict.fromkeys([cost.mesh_axes, *((axis,) for axis in cost.mesh_axes)])
        for names in () if is_repeat else axes:
            # the batch of a lookup, then a weight that its product cannot use as it is sharded
            lookups = [
                point
                for op in forward[:1]
                for point in self._points(op)[1]
                if point.primitive == 'gather'
            ]
            yield from self._values(cost, names, lookups[:1], 'missing constraint')
            for op in ops:
                if self._disagrees(op, names):
                    yield from itertools.islice(self._weights(cost, names, op), 1)
        for op in ops:
            yield from self._of_op(cost, op)
        yield from self._results(cost)
        yield from self._arguments_by_path(cost)

    def replicated(self, cost: Cost) -> Iterator[Change]:
        """Replicates weights along the mesh axes along which inference gathers them.

        First all weights that are gathered along these axes, then those of the cost. Not if another
        bound is larger: with many tokens, FSDP gathers weights while it computes.
        """
        if self.facts.is_training or (cost.kind, cost.role) != ('all-gather', 'weights'):
            return
        largest = self.trial.bounds.largest
        if largest is None or largest.resource != 'network':
            return
        by_path = {array.path: i for i, array in enumerate(self.facts.arguments)}
        gathered = [
            (by_path[path], c.name in cost.names)
            for c in self.trial.reading.collectives
            if (c.kind, c.role, c.mesh_axes) == (cost.kind, cost.role, {*cost.mesh_axes})
            for path in c.of
            if path in by_path and (lines := self.weights.get(by_path[path]))
            if not c.source or c.source in lines  # an exported program may lack lines
        ]
        for of_cost in (False, True):
            edits: tuple[Edit, ...] = ()
            added = 0
            for argument in (i for i, is_of_cost in gathered if is_of_cost or not of_cost):
                current = self._entries_of_argument(argument)
                if current is None:
                    continue
                new = tuple(tuple(a for a in entry if a not in cost.mesh_axes) for entry in current)
                if new != current:
                    edits = combine(edits, [self._state(argument, new)])
            for i, new in placements(edits)[0].items():
                old = self.trial.arguments[i].sharding
                added += bytes_on_device(self.facts, i, new) - bytes_on_device(self.facts, i, old)
            if edits:
                yield Change('gathered weights', cost, edits, added=added)

    @functools.cached_property
    def weights(self) -> Mapping[int, set[str]]:
        """The lines of the products that read an argument which is larger than the other operand.

        In inference, roles do not tell weights from data. Empty for what a result replaces.
        """
        found, traced = defaultdict[int, set[str]](set), self.trial.traced
        for op in traced.ops:
            if op.rule.einsum is None or not _is_product(op):
                continue
            pair = [op.ins[i] for i in op.rule.einsum.operands[:2]]
            for v, other in (pair, pair[::-1]):
                if v is None or other is None:
                    continue
                shape = traced.values[v].shape
                if prod(shape) > prod(traced.values[other].shape):
                    origins = (self._origins(v, dim) for dim in range(len(shape)))
                    arguments = {i for pairs in origins for i, _ in pairs}
                    if len(arguments) == 1 and arguments.isdisjoint(self.replaced.values()):
                        found[arguments.pop()].update(span.source for span in op.site.frames)
        return found

    def _values_of(self, cost: Cost, ops: Sequence[Op]) -> list[int]:
        """Returns what a cost sends: arguments, or the first result of an operation in its line."""
        by_path = {array.path: i for i, array in enumerate(self.facts.arguments)}
        arguments = [by_path[path] for path in cost.of if path in by_path]
        values = [self.trial.traced.arguments[i] for i in arguments]
        found = [v for v in values if v is not None]
        return found or [v for op in ops[:1] for v in op.arrays_out]

    def _consumers(self, values: Sequence[int]) -> list[Op]:
        """Returns the first products that compute with values."""
        found: list[Op] = []
        waiting, seen = [*values], {*values}
        while waiting and len(found) < 2:
            for user in self.users.get(waiting.pop(0), ()):
                if user.site.is_backward:
                    continue
                if user.primitive in PRODUCTS:
                    found += [user] * (user not in found)
                    continue
                waiting += [v for v in user.arrays_out if v not in seen]
                seen.update(user.arrays_out)
        return found

    def _weight_of(self, op: Op) -> float:
        n_bytes = sum(self.trial.traced.values[v].bytes for v in (*op.arrays_in, *op.arrays_out))
        return n_bytes * (1000 if _is_product(op) else 1)

    def _of_op(self, cost: Cost, op: Op) -> Iterator[Change]:
        axes = cost.mesh_axes
        for names in dict.fromkeys([axes, *((axis,) for axis in axes)]):
            constraints, others = self._points(op)
            yield from self._logical_axes(cost, names, op)
            yield from self._values(cost, names, constraints, 'wrong constraint')
            yield from self._data(cost, names, op)
            yield from self._values(cost, names, others, 'missing constraint')
            yield from self._weights(cost, names, op)

    def _dropped(self, cost: Cost) -> Iterator[Change]:
        """Returns a mesh axis to constraints that drop it from an axis of their value."""
        spans: set[Span] = set()
        for op in self.constraints:
            before, after = self.trial.values[op.arrays_in[0]], self.trial.values[op.arrays_out[0]]
            current = tuple(axis.mesh_axes for axis in after.axes)
            shape = self.trial.traced.values[op.arrays_out[0]].shape
            for dim, axis in enumerate(before.axes):
                dropped = tuple(a for a in axis.mesh_axes if a in cost.mesh_axes)
                if not dropped or {*dropped} & after.mesh_axes or op.site.frames[0] in spans:
                    continue
                new = self._with(current, shape, dim, dropped)
                if new is not None:
                    spans.add(op.site.frames[0])
                    point = self._constrained(op, new)
                    yield Change('wrong constraint', cost, point.edits, (point,))

    def _loops(self, cost: Cost) -> Iterator[Change]:
        """Shards another axis of the values that a loop runs over along a sharded axis."""
        edits: tuple[Edit, ...] = ()
        points: list[Point] = []
        for v in looped(self.trial):
            first, *rest = (axis.mesh_axes for axis in self.trial.values[v].axes)
            shape = self.trial.traced.values[v].shape
            current: Entries = ((), *rest)
            added = (self._with(current, shape, dim, first) for dim in range(1, len(shape)))
            new = next(filter(None, added), None)
            if new is None:
                continue
            if v in self.argument_of:
                edits = combine(edits, [self._state(self.argument_of[v], new)])
            for op in self.producers[v]:
                if op.site.frames and not op.site.is_backward and op.primitive not in _PASSING:
                    point = self._constrained(op, new)
                    edits, points = combine(edits, point.edits), [*points, point]
        if edits:
            yield Change('sharded loop axis', cost, edits, tuple(points))

    # --- reshards -----------------------------------------------------------------------------

    def _reshards(self, cost: Cost, moves: Moves) -> Iterator[Change]:
        """Moves a value through another placement, if that sends less."""
        sent = sum(
            c.network_bytes or 0 for c in self.trial.reading.collectives if c.name in cost.names
        )
        for moved in self._moved(cost):
            move = Move(moved.shape, *self._dtype(moved), moved.before, moved.after)
            if not (cost.reshard or moves.is_costly(move, sent)):
                continue
            entries = moves.through(move)
            if entries is None:
                continue
            points: tuple[Point, ...] = ()
            sharding = self._sharding(entries)
            if moved.op is not None:
                is_constraint = moved.op.primitive == _CONSTRAINT
                point = self._constrained(moved.op, entries, is_constraint, is_move=True)
                edits, points = point.edits, (point,)
            elif moved.argument is not None:
                edits = (MoveThrough(('argument', moved.argument), sharding),)
            else:
                assert moved.result is not None
                edits = (MoveThrough(('result', moved.result), sharding),)
            kind = 'full rematerialization' if cost.reshard else 'reshard'
            yield Change(kind, cost, edits, points)

    def _moved(self, cost: Cost) -> Iterator[_Moved]:
        """Finds the values whose moves a cost may be."""
        if cost.n_repeats:
            return
        traced, reshard = self.trial.traced, cost.reshard
        lines, shape, compiled = {cost.line}, (), None
        if reshard is not None:
            spans = (self.trial.reading.graph.program.span(node.op) for node in reshard.slices)
            lines |= {span.text for span in spans if span is not None}
            shape = reshard.array.shape
            placements = before_and_after(reshard, [self.mesh]) or (None, None)
            before, after = (self._entries(each, len(shape)) for each in placements)
            compiled = None if before is None or after is None else (before, after)
        lines.discard('')
        n_found = 0
        for moved in self._explicit_moves(lines, cost):
            # the partitioner need not have followed what arguments and constraints imply
            if compiled and moved.shape == shape and moved.after == compiled[1]:
                moved = moved._replace(before=compiled[0])
            if moved.before != moved.after and self._fit(moved):
                n_found += 1
                yield moved
        if n_found or compiled is None:
            return
        # the use of an argument or of another value implies its placement
        for i, v in enumerate(traced.arguments):
            if v is None or self.facts.arguments[i].path not in cost.of:
                continue
            if traced.values[v].shape == shape:
                yield _Moved(shape, *compiled, argument=i)
                return
        for op in (op for line in lines for op in self.by_line.get(line, ())):
            shapes = [traced.values[v].shape for v in op.arrays_out[:1]]
            if shapes == [shape] and not op.site.n_shards:
                yield _Moved(shape, *compiled, op=op)
                return

    def _explicit_moves(self, lines: set[str], cost: Cost) -> Iterator[_Moved]:
        """Finds values that are constrained, or returned, in another placement."""
        facts, traced = self.facts, self.trial.traced
        sent = {i for i, array in enumerate(facts.arguments) if array.path in cost.of}

        def is_sent(v: int) -> bool:
            producers = (op.site.frames[:1] for op in self.producers[v])
            return self.argument_of.get(v) in sent or any(
                span.source in lines for spans in producers for span in spans
            )

        def entries_of(v: int) -> Entries:
            return tuple(axis.mesh_axes for axis in self.trial.values[v].axes)

        for op in self.constraints:
            v, out = op.arrays_in[0], op.arrays_out[0]
            if op.site.frames[0].source in lines or is_sent(v):
                yield _Moved(traced.values[v].shape, entries_of(v), entries_of(out), op=op)
        for i, v in enumerate(traced.results):
            if v is None:
                continue
            shape = traced.values[v].shape
            after = self._entries(facts.results[i].sharding, len(shape))
            if after is None:
                continue
            if is_sent(v) or facts.results[i].path in cost.of:
                yield _Moved(shape, entries_of(v), after, result=i)

    def _dtype(self, moved: _Moved) -> tuple[str, int]:
        """Returns the dtype of a value, and its size."""
        if moved.op is not None:
            dtype: Any = self.trial.traced.values[moved.op.arrays_out[0]].dtype
        elif moved.argument is not None:
            dtype = self.facts.arguments[moved.argument].dtype
        else:
            assert moved.result is not None
            dtype = self.facts.results[moved.result].dtype
        return str(dtype), getattr(dtype, 'itemsize', 4)

    def _shifts_a_move(self, change: Change) -> bool:
        """Whether it places arguments or results otherwise that the program only moves.

        Then their callers would have to move them.
        """
        arguments, results = placements(change.edits)
        return not (
            self.only_moved[0].isdisjoint(arguments) and self.only_moved[1].isdisjoint(results)
        )

    @functools.cached_property
    def only_moved(self) -> tuple[set[int], set[int]]:
        """The arguments that are results in another placement, and these results."""
        arguments, results = set[int](), set[int]()
        for i, v in enumerate(self.trial.traced.results):
            while v is not None and [op.primitive for op in self.producers[v]] == [_CONSTRAINT]:
                v = self.producers[v][0].arrays_in[0]
            argument = self.argument_of.get(v) if v is not None else None
            if argument is not None and argument < len(self.facts.arguments):
                ndim = len(self.facts.results[i].shape)
                before = self._entries(self.facts.arguments[argument].sharding, ndim)
                if before != self._entries(self.facts.results[i].sharding, ndim):
                    arguments.add(argument)
                    results.add(i)
        return arguments, results

    def _entries(self, sharding: Any, ndim: int) -> Entries | None:
        """Returns the mesh axes of each axis, or None for a sharding on another mesh."""
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        entries = mesh_entries(sharding, ndim)
        return None if None in entries else tuple(entry or () for entry in entries)

    def _fit(self, moved: _Moved) -> bool:
        both = moved.before, moved.after
        return all(
            len(entries) == len(moved.shape) and self._checked(entries, moved.shape) is not None
            for entries in both
        )

    # --- logical axes -------------------------------------------------------------------------

    def _logical_axes(self, cost: Cost, axes: tuple[str, ...], op: Op) -> Iterator[Change]:
        """Shards an axis of a product wherever it occurs: in arguments and constraints.

        Axes that an operation links, and that it contracts, are one logical axis, such as the batch
        or the experts.
        """
        einsum = op.rule.einsum
        ranks: dict[tuple[int, int], tuple[int, int]] = {}
        for i, v in enumerate(op.ins):
            if v is None:
                continue
            is_data = self.trial.values[v].is_data
            for dim in range(len(self.trial.traced.values[v].shape)):
                rank = 1 if is_data else 2
                if einsum is not None and i in einsum.operands:
                    index = einsum.indices[einsum.operands.index(i)][dim]
                    is_shared = all(index in indices for indices in einsum.indices)
                    if index not in einsum.out:
                        rank = 3
                    elif is_shared and len(einsum.indices) > 1:
                        rank = 0
                root = self.logical(v, dim)
                ranks[root] = min(ranks.get(root, (9, 0)), (rank, dim))
        for root in sorted(ranks, key=lambda root: ranks[root])[:4]:
            # moving a weight is another strategy, unless the product cannot use how it is sharded
            if ranks[root][0] >= 2 and not cost.n_repeats and not self._disagrees(op, axes):
                continue
            change = self._logical_axis(cost, axes, root)
            if change is not None:
                yield change

    def _logical_axis(
        self, cost: Cost, axes: tuple[str, ...], root: tuple[int, int]
    ) -> Change | None:
        edits: tuple[Edit, ...] = ()
        points: list[Point] = []
        for argument, array in enumerate(self.facts.arguments):
            v = self.trial.traced.arguments[argument]
            current = self._entries_of_argument(argument)
            if v is None or current is None:
                continue
            for dim in range(len(array.shape)):
                new = None
                if self.logical(v, dim) == root:
                    new = self._with(current, array.shape, dim, axes)
                if new is not None:
                    edits = combine(edits, [self._state(argument, new)])
                    break
        for op in self.constraints:
            v = op.arrays_out[0]
            shape = self.trial.traced.values[v].shape
            current = tuple(axis.mesh_axes for axis in self.trial.values[v].axes)
            dims = [dim for dim in range(len(shape)) if self.logical(v, dim) == root]
            new = self._with(current, shape, dims[0], axes) if dims else None
            if new is not None and op.site.frames[0] not in {point.span for point in points}:
                point = self._constrained(op, new)
                edits, points = combine(edits, point.edits), [*points, point]
        if not edits:
            return None
        kind = 'replicated compute' if cost.kind == 'product' else 'unsharded axis'
        return Change(kind, cost, edits, tuple(points))

    def _constrained(
        self, op: Op, entries: Entries, of_operand: bool = False, is_move: bool = False
    ) -> Point:
        span, axes = op.site.frames[0], self.trial.values[op.arrays_out[0]].axes
        pairs = zip(axes, entries, strict=True)
        named = tuple(replace(axis, mesh_axes=entry) for axis, entry in pairs)
        mapped = self._mapped(op.arrays_out[0]) if op.site.n_mapped else 0
        is_alone = all(
            self.trial.values[v].axes[self._mapped(v)].mesh_axes == entries[mapped]
            for other in self.constraints
            if other.site.n_mapped and other.site.frames[0] != span
            for v in other.arrays_out
        )
        is_constraint, n_mapped = op.primitive == _CONSTRAINT, op.site.n_mapped
        # the code of a function is that of all its calls
        calls = dict.fromkeys(
            each.site.frames
            for each in (op, *self.by_line[span.source])
            if each.site.frames[0] == span and not (each.site.is_backward or each.site.n_shards)
        )
        sharding = self._sharding(entries)

        def change(path: Path) -> Edit:
            if is_move:
                what = 'constraint' if is_constraint else 'value'
                return MoveThrough((what, path), sharding)
            return (ReplaceConstraint if is_constraint else Constrain)(path, sharding)

        edits = tuple(map(change, calls or [op.site.frames]))
        callers = {path[1:2] for path in calls}
        of = is_constraint, n_mapped, of_operand, mapped, is_alone, len(callers)
        return Point(span, named, sharding, edits, *of)

    def _mapped(self, v: int) -> int:
        """Returns the axis that the outermost `jax.vmap` adds: the first axis of the data."""
        for dim in range(len(self.trial.traced.values[v].shape)):
            if any(at == 0 and self._is_data(i) for i, at in self._origins(v, dim)):
                return dim
        return 0

    def _disagrees(self, op: Op, axes: tuple[str, ...]) -> bool:
        """Whether mesh axes shard a contracted axis of one operand, but not of the other."""
        einsum = op.rule.einsum
        if op.primitive not in PRODUCTS or einsum is None:
            return False
        sharded: list[dict[int, set[str]]] = []
        for i, indices in zip(einsum.operands, einsum.indices, strict=True):
            v = op.ins[i]
            values = () if v is None else self.trial.values[v].axes
            pairs = zip(indices, values, strict=False)
            sharded.append({index: {*axis.mesh_axes} & {*axes} for index, axis in pairs})
        return any(
            index not in einsum.out and one != sharded[1].get(index, one)
            for index, one in sharded[0].items()
        )

    def logical(self, v: int, dim: int) -> tuple[int, int]:
        """Returns the first of the axes that are the same logical axis."""
        at, path = (v, dim), list[tuple[int, int]]()
        while (parent := self.parents.get(at, at)) != at:
            path.append(at)
            at = parent
        self.parents.update(dict.fromkeys(path, at))
        return at

    def _join(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        one, other = self.logical(*one), self.logical(*other)
        self.parents[max(one, other)] = min(one, other)

    # --- data ---------------------------------------------------------------------------------

    def _data(self, cost: Cost, axes: tuple[str, ...], op: Op) -> Iterator[Change]:
        """Shards the data that an operation computes with: tokens, targets, masks, edges."""
        found: dict[tuple[int, int], None] = {}
        for v in op.arrays_in:
            for dim in range(len(self.trial.traced.values[v].shape)):
                for argument, at in self._origins(v, dim):
                    if self._is_data(argument):
                        found[argument, at] = None
        for (argument, dim), _ in zip(
            sorted(found, key=lambda pair: pair[1]), range(3), strict=False
        ):
            size = self.facts.arguments[argument].shape[dim]
            edits: tuple[Edit, ...] = ()
            entries: Entries | None = None
            for i, array in enumerate(self.facts.arguments):
                if not self._is_data(i) or len(array.shape) <= dim or array.shape[dim] != size:
                    continue
                current = self._entries_of_argument(i)
                if current is None:
                    continue
                new = self._with(current, array.shape, dim, axes)
                if new is not None:
                    edits = combine(edits, [self._state(i, new)])
                    entries = new if i == argument or entries is None else entries
            if entries is not None:
                kind = 'replicated compute' if cost.kind == 'product' else 'unsharded data'
                yield Change(kind, cost, edits)

    def _is_data(self, argument: int) -> bool:
        return (
            argument < len(self.facts.arguments)
            and self.facts.values[argument].is_data
            and self.facts.arguments[argument].sharding is not None
        )

    # --- values -------------------------------------------------------------------------------

    def _points(self, op: Op) -> tuple[list[Op], list[Op]]:
        """Returns the constraints, and the lookups and products, that an operation computes with.

        The operation itself comes first.
        """
        constraints: list[Op] = []
        lookups: list[Op] = []
        products: list[Op] = [op] if self._is_point(op) else []
        waiting, seen = list(op.arrays_in), {*op.arrays_in}
        if op.primitive == _CONSTRAINT:
            constraints.append(op)
        while waiting and len(constraints) + len(lookups) + len(products) < 3 * _MAX_POINTS:
            v = waiting.pop(0)
            for producer in self.producers.get(v, ()):
                if producer.site.is_backward:
                    continue
                if self._is_point(producer):
                    if producer.primitive == _CONSTRAINT:
                        constraints.append(producer)
                    elif producer.primitive == 'gather':
                        lookups.append(producer)
                    else:
                        products.append(producer)
                for old in producer.arrays_in:
                    if old not in seen:
                        seen.add(old)
                        waiting.append(old)
        return constraints[:_MAX_POINTS], [*lookups[:2], *products[:3]]

    def _is_point(self, op: Op) -> bool:
        """Whether a constraint on the result of an operation makes sense."""
        if len(op.arrays_out) != 1 or not op.site.frames or op.site.n_shards:
            return False
        # callers would get the result of the program in another sharding
        is_result = op.arrays_out[0] in self.trial.traced.results
        value = self.trial.traced.values[op.arrays_out[0]]
        is_float = getattr(value.dtype, 'kind', '') in 'fVc'
        if op.primitive == _CONSTRAINT and all(op is not one for one in self.constraints):
            return False
        kinds = (_CONSTRAINT, 'gather', *PRODUCTS, 'scatter-add', 'scatter', 'reduce_sum', 'add')
        if op.primitive != _CONSTRAINT and (is_result or self._is_inside(op)):
            return False
        # an expression of one ndim would be an error where a helper computes values of another one
        others = (
            other
            for other in self.by_line[op.site.frames[0].source]
            if other.site.frames[0] == op.site.frames[0] and other.primitive == op.primitive
        )
        ndims = {
            len(self.trial.traced.values[v].shape) - other.site.n_mapped
            for other in others
            if not other.site.is_backward
            for v in other.arrays_out
        }
        if len(ndims) > 1:
            return False
        return is_float and len(value.shape) >= 2 and op.primitive in kinds

    def _is_inside(self, op: Op) -> bool:
        """Whether only the expression of an operation reads its result.

        The expression may call a library: `nn.MultiHeadDotProductAttention(..)(x)` has the products
        of queries, keys and values in it, and the code that calls it can constrain none of them.
        """
        users = [
            user.site.frames
            for user in self.users[op.arrays_out[0]]
            if user.eqn is not None and user.primitive not in _PASSING and not user.site.is_backward
        ]
        return bool(users) and all(op.site.frames[0] in frames for frames in users)

    def _values(
        self, cost: Cost, axes: tuple[str, ...], points: Iterable[Op], kind: str
    ) -> Iterator[Change]:
        for op in points:
            v = op.arrays_out[0]
            shape = self.trial.traced.values[v].shape
            current: Entries = tuple(axis.mesh_axes for axis in self.trial.values[v].axes)
            was_constrained = op.primitive == _CONSTRAINT
            n_found = 0
            for dim in self._batch_dims(v):
                new = self._with(current, shape, dim, axes)
                # the compiler need not have followed what the arguments imply
                if new is None and {*axes} <= {*current[dim]} and not was_constrained:
                    new = current
                if new is not None:
                    point = self._constrained(op, new)
                    yield Change(kind, cost, point.edits, (point,))
                    n_found += 1
                    if n_found == (2 if was_constrained else 1):
                        break

    def _batch_dims(self, v: int) -> list[int]:
        """Returns the axes of a value: one of data first, then another one, then the rest."""
        dims = range(len(self.trial.traced.values[v].shape))

        def is_of_data(dim: int) -> bool:
            return any(self._is_data(argument) for argument, _ in self._origins(v, dim))

        data = [dim for dim in dims if is_of_data(dim)]
        others = [dim for dim in dims if dim not in data]
        return [*data[:1], *others[:1], *data[1:], *others[1:]]

    # --- weights and states -------------------------------------------------------------------

    def _weights(self, cost: Cost, axes: tuple[str, ...], op: Op) -> Iterator[Change]:
        """Shards the weights of a product over other axes."""
        for v in op.arrays_in:
            dims = range(len(self.trial.traced.values[v].shape))
            origins = {dim: self._origins(v, dim) for dim in dims}
            arguments = {argument for found in origins.values() for argument, _ in found}
            if len(arguments) != 1:
                continue
            (argument,) = arguments
            if argument >= len(self.facts.arguments) or self._is_data(argument):
                continue
            current = self._entries_of_argument(argument)
            shape = self.facts.arguments[argument].shape
            if current is None:
                continue
            used = {at: dim for dim, found in origins.items() for _, at in found}
            had = [at for at in used if {*axes} & {*current[at]}]
            einsum, rank = op.rule.einsum, dict[int, int]()
            if einsum is not None and op.primitive in PRODUCTS:
                i = op.ins.index(v)
                indices = einsum.indices[einsum.operands.index(i)]
                both = {*einsum.indices[0]} & {*einsum.indices[-1]}
                # a batch axis of the product, then one of the result, then a contracted one
                rank = {
                    at: 0
                    if indices[dim] in both and indices[dim] in einsum.out
                    else 1
                    if indices[dim] in einsum.out
                    else 2
                    for at, dim in used.items()
                }
            for at in sorted({*used} - {*had}, key=lambda at: (rank.get(at, 1), -at)):
                new = self._with(current, shape, at, axes)
                swapped = None
                if had and current[at]:
                    entries = [*current]
                    entries[at], entries[had[0]] = entries[had[0]], entries[at]
                    swapped = self._checked(tuple(entries), shape)
                for each in (swapped, new):
                    if each is not None and each != current:
                        kind = 'contracted axis' if op.primitive in PRODUCTS else 'placement'
                        yield Change(kind, cost, (self._state(argument, each),))

    def _state(self, argument: int, entries: Entries) -> PlaceArguments:
        """Shards an argument, the same argument of other layers, its states and the results."""
        arguments, sharding = self.facts.arguments, self._sharding(entries)
        path, current = _folded(arguments[argument].path), self._entries_of_argument(argument)
        same_shape = [
            i
            for i, array in enumerate(arguments)
            if array.sharding is not None and array.shape == arguments[argument].shape
        ]
        # 1. The same argument of other layers, unless it has another placement: the square kernels
        #    of Dense_0 and Dense_1 may be sharded over different axes.
        chosen = {
            i
            for i in same_shape
            if _folded(arguments[i].path) == path and self._entries_of_argument(i) == current
        }
        # 2. The states of these: what has the same path in another tree, such as 'mu/0/up' for
        #    'params/0/up'; and what a train step updates but does not multiply, whose path ends
        #    as theirs, such as 'state/opt_state/0/mu/0/up' for 'state/params/0/up'.
        end = f'/{path.partition("/")[2] or path}'
        weights = [i for i in same_shape if i in self._multiplied]
        states = set(self.facts.weights_and_states) - self._multiplied
        chosen |= {
            i
            for i in same_shape
            if _folded(arguments[i].path).endswith(end)
            or (i in states and self._same_end(arguments[i].path, weights) & chosen)
        }
        chosen |= {state for state, i in self.states.items() if i in chosen}
        # 3. The results that replace them.
        replacing = {result for result, i in self.replaced.items() if i in chosen}
        return PlaceArguments(
            dict.fromkeys(sorted(chosen), sharding),
            {
                i: sharding
                for i, array in enumerate(self.facts.results)
                if array.shape == arguments[argument].shape
                and (
                    _folded(array.path).endswith((end, f'/{path}'))
                    or self._same_end(array.path, same_shape) & chosen
                    or i in replacing
                )
            },
        )

    def _same_end(self, path: str, arguments: Sequence[int]) -> set[int]:
        """Returns the arguments whose paths have most keys in common with the end of a path."""
        paths = [self.facts.arguments[i].path for i in arguments]
        lengths = [common_suffix_length(path, other) for other in paths]
        longest = max((1, *lengths))
        return {i for i, n in zip(arguments, lengths, strict=True) if n == longest}

    def _arguments_by_path(self, cost: Cost) -> Iterator[Change]:
        """Shards the arguments that a send is about over another axis."""
        by_path = {array.path: i for i, array in enumerate(self.facts.arguments)}
        for path in cost.of[:1]:
            argument = by_path.get(path)
            current = None if argument is None else self._entries_of_argument(argument)
            if argument is None or current is None:
                continue
            shape = self.facts.arguments[argument].shape
            for dim in range(len(shape)):
                new = self._with(current, shape, dim, cost.mesh_axes)
                if new is not None:
                    yield Change('placement', cost, (self._state(argument, new),))

    # --- results ------------------------------------------------------------------------------

    def _results(self, cost: Cost) -> Iterator[Change]:
        """Leaves a result as it is computed."""
        by_path = {array.path: i for i, array in enumerate(self.facts.results)}
        for path in cost.of:
            i = by_path.get(path)
            v = None if i is None else self.trial.traced.results[i]
            if i is None or v is None:
                continue
            shape = self.facts.results[i].shape
            current = self.facts.results[i].sharding
            axes = tuple(axis.mesh_axes for axis in self.trial.values[v].axes)
            new = self._checked(axes, shape)
            if new is not None and self._sharding(new) != current:
                yield Change('replicated result', cost, (PlaceResults({i: self._sharding(new)}),))

    # --- shardings ----------------------------------------------------------------------------

    def _origins(self, v: int, dim: int) -> list[tuple[int, int]]:
        """Returns the (argument, axis) pairs that an axis of a value comes from."""
        if (v, dim) in self.origins:
            return self.origins[v, dim]
        found: dict[tuple[int, int], None] = {}
        waiting, seen = [(v, dim)], {(v, dim)}
        while waiting:
            at = waiting.pop()
            if at[0] in self.argument_of:
                found[self.argument_of[at[0]], at[1]] = None
            for before in self.back.get(at, ()):
                if before not in seen:
                    seen.add(before)
                    waiting.append(before)
        self.origins[v, dim] = [*found]
        return self.origins[v, dim]

    def _entries_of_argument(self, argument: int) -> Entries | None:
        sharding = self.trial.arguments[argument].sharding
        if sharding is None:
            return None
        v = self.trial.traced.arguments[argument]
        if v is None:
            return None
        return tuple(axis.mesh_axes for axis in self.trial.values[v].axes)

    def _with(
        self, current: Entries, shape: Sequence[int], dim: int, axes: tuple[str, ...]
    ) -> Entries | None:
        """Returns a sharding of axis `dim` also over `axes`, or None if it does not divide it."""
        entries = [tuple(a for a in entry if a not in axes) for entry in current]
        kept = tuple(a for a in current[dim] if a in axes)
        entries[dim] = (*entries[dim], *kept, *(a for a in axes if a not in kept))
        new = tuple(entries)
        return None if new == current else self._checked(new, shape)

    def _checked(self, entries: Entries, shape: Sequence[int]) -> Entries | None:
        for entry, size in zip(entries, shape, strict=True):
            if size % prod(self.sizes[axis] for axis in entry):
                return None
        return entries

    def _sharding(self, entries: Entries) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(entries))


_PASSING = ('carry', 'scan_input', 'scan_output', 'scan_axis', 'shards')


def _is_product(op: Op) -> bool:
    return op.primitive in PRODUCTS or op.primitive.startswith('ragged')


def _folded(path: str) -> str:
    """Replaces the numbers in a path, such as those of layers: 'w/layer_3/up', 'w/layer_*/up'."""
    return re.sub(r'(?<=[/_])\d+(?=/|$)', '*', path)
