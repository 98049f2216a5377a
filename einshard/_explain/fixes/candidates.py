"""Proposes changes for the sends and the repeated products that cost a program most."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from jax.sharding import Mesh, NamedSharding

from ..._program.hlo.collective import Collective
from ..._program.jaxpr.edits import ValueEdit
from ..._program.jaxpr.graph import Op
from ..._program.jaxpr.spans import Span
from ..._sharding.mesh import partition_spec
from ..findings.arguments import states_of_parameters
from ..findings.facts import Facts
from ..findings.next_call import next_arguments
from ..findings.trace import PRODUCTS, read_trace
from ..findings.values import Axis
from .trials import Edits, Trial

_MIN_SHARE = 0.02  # of the sum of the bounds
_MIN_RATIO = 1.4  # of the flops of a line to its share of those before partitioning
_MAX_POINTS = 5  # for each cost
_CONSTRAINT = 'sharding_constraint'

Entries: TypeAlias = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Cost:
    """A send, or a product that several devices repeat.

    Attributes:
        seconds: the lower bound on its time, or on the time of the repeated part.
        line: its source line, or ''.
        mesh_axes: the mesh axes of the send, or those over which devices repeat the product.
        n_repeats: how many devices repeat the product; 0 for a send.
        names: what it is, as in `Finding.explains`.
    """

    seconds: float
    line: str
    column: int
    mesh_axes: tuple[str, ...]
    kind: str
    role: str
    of: tuple[str, ...]
    bytes: int
    n_repeats: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """A value that a change constrains.

    Attributes:
        axes: its axes, with the new sharding.
        is_constraint: whether the change replaces a constraint.
        n_mapped: how many axes `jax.vmap` adds to it, which the code does not see.
    """

    span: Span
    axes: tuple[Axis, ...]
    is_constraint: bool
    n_mapped: int

    @property
    def seen_axes(self) -> tuple[Axis, ...] | None:
        """The axes that the code sees. None if `jax.vmap` adds one that is sharded.

        The added axes are the first ones.
        """
        added = self.axes[: self.n_mapped]
        return None if any(axis.mesh_axes for axis in added) else self.axes[self.n_mapped :]


@dataclass(frozen=True)
class Change:
    """A change that may lower a cost.

    Attributes:
        kind: the kind of the finding if it does.
        points: for each of `edits.values`, the value.
    """

    kind: str
    cost: Cost
    edits: Edits
    points: tuple[Point, ...] = ()


def find_costs(facts: Facts, trial: Trial) -> list[Cost]:
    """Returns the costs of a program that a change could lower, largest first."""
    total = trial.figures.bound
    costs = [*_sends(facts, trial), *_repeats(facts, trial)]
    costs = [cost for cost in costs if cost.seconds >= _MIN_SHARE * total]
    return sorted(costs, key=lambda cost: -cost.seconds)


def _sends(facts: Facts, trial: Trial) -> Iterator[Cost]:
    seconds = {bound.along: bound.seconds for bound in trial.bounds if bound.resource == 'network'}
    sent: dict[str, int] = defaultdict(int)
    for c in trial.collectives:
        sent[c.along] += c.total_bytes
    lookups = [op for op in trial.traced.ops if op.primitive == 'gather' and op.site.frames]
    lines = {op.site.frames[0].source for op in lookups}
    numbers = {trial.values[v].argument for op in lookups for v in op.arrays_in[:1]} - {None}
    numbers |= {trial.values[v].argument for v in _looped(trial)}
    paths = {facts.arguments[i].path for i in numbers if i is not None}
    assert facts.mesh is not None
    names = [str(name) for name in facts.mesh.axis_names]
    groups: dict[tuple[object, ...], list[Collective]] = defaultdict(list)
    for c in trial.collectives:
        # gathering weights that are sharded like the batch, and adding up their gradients, is what
        # data parallelism costs, except for the rows of a table, and layers that a loop runs over
        is_of_weights = facts.is_training and c.role in ('weights', 'gradients')
        if is_of_weights and c.source not in lines and paths.isdisjoint(c.of):
            continue
        if c.mesh_axes and c.total_bytes:
            groups[c.source, c.column, c.mesh_axes, c.kind, c.role, c.of].append(c)
    for several in groups.values():
        first = several[0]
        yield Cost(
            sum(seconds.get(c.along, 0) * c.total_bytes / sent[c.along] for c in several),
            first.source or '',
            first.column,
            tuple(name for name in names if name in first.mesh_axes),
            first.kind,
            first.role,
            first.of,
            sum(c.total_bytes for c in several),
            0,
            tuple(c.name for c in several),
        )


def _looped(trial: Trial) -> list[int]:
    """Returns the values whose first axis is sharded and has a loop that runs over it."""
    values = trial.values
    return [v for scan in trial.traced.scans for v in scan.xs if values[v].axes[0].mesh_axes]


def _repeats(facts: Facts, trial: Trial) -> Iterator[Cost]:
    mesh = facts.mesh
    assert mesh is not None
    compute = next((b.seconds for b in trial.bounds if b.resource == 'compute'), 0.0)
    compiled: dict[str, int] = defaultdict(int)
    for row in trial.products:
        if row.source and not row.at_least:
            compiled[row.source] += row.flops
    total = sum(compiled.values())
    # their shardings do not matter here
    trace = read_trace(trial.traced, (), mesh, facts.has_only_innermost_lines)
    ideal: dict[str, int] = defaultdict(int)
    for product in trace.products:
        if product.line and product.flops and not product.is_lookup:
            ideal[product.line] += product.flops
    for line, flops in compiled.items():
        share = ideal.get(line, 0) / facts.n_devices
        ratio = flops / share if share else 0
        if not _MIN_RATIO <= ratio <= facts.n_devices * 1.01:
            continue
        axes = _axes_of_size(facts, trial, line, round(ratio))
        yield Cost(
            compute * (flops - share) / total,
            line,
            0,
            axes,
            'product',
            '',
            (),
            0,
            round(ratio),
            (line,),
        )


def _axes_of_size(facts: Facts, trial: Trial, line: str, n: int) -> tuple[str, ...]:
    """Chooses the mesh axes over which `n` devices repeat the products of a line.

    Those that shard no operand come first.
    """
    assert facts.mesh is not None
    sizes = {str(name): size for name, size in facts.mesh.shape.items() if size > 1}
    used: set[str] = set()
    for op in trial.traced.ops:
        if op.primitive in PRODUCTS and any(span.source == line for span in op.site.frames[:1]):
            for v in op.arrays_in:
                used |= trial.values[v].mesh_axes
    unused = [name for name in sizes if name not in used]
    for names in ([name] for name in (*unused, *sizes)):
        if sizes[names[0]] == n:
            return tuple(names)
    if unused and prod(sizes[name] for name in unused) <= n:
        return tuple(unused)
    return tuple(unused[:1] or [*sizes][:1])


class Candidates:
    """Proposes changes of one program."""

    def __init__(self, facts: Facts, trial: Trial):
        assert isinstance(facts.mesh, Mesh)
        self.facts, self.trial, self.mesh = facts, trial, facts.mesh
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
        self.argument_of = {
            value: i for i, value in enumerate(trial.traced.arguments) if value is not None
        }

    def of(self, cost: Cost) -> Iterator[Change]:
        """Yields changes for a cost, the most promising first.

        Constraints cannot be inserted where types determine the shardings.
        """
        for change in self._of(cost):
            if not (self.facts.is_explicit and change.points):
                yield change

    def _of(self, cost: Cost) -> Iterator[Change]:
        ops = self.by_line.get(cost.line, [])
        ops = [op for op in ops if op.site.frames[0].column == cost.column - 1] or ops
        forward = [op for op in ops if not op.site.is_backward] or ops
        is_repeat = cost.n_repeats > 0
        forward.sort(key=lambda op: -self._weight_of(op))
        yield from self._dropped(cost)
        yield from self._loops(cost)
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
        is_product = op.primitive in PRODUCTS or op.primitive.startswith('ragged')
        return n_bytes * (1000 if is_product else 1)

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
                    edits, point = self._constrained(op, new)
                    yield Change('wrong constraint', cost, edits, (point,))

    def _loops(self, cost: Cost) -> Iterator[Change]:
        """Shards another axis of the values that a loop runs over along a sharded axis."""
        edits, points = Edits(), list[Point]()
        for v in _looped(self.trial):
            first, *rest = (axis.mesh_axes for axis in self.trial.values[v].axes)
            shape = self.trial.traced.values[v].shape
            current: Entries = ((), *rest)
            added = (self._with(current, shape, dim, first) for dim in range(1, len(shape)))
            new = next(filter(None, added), None)
            if new is None:
                continue
            if v in self.argument_of:
                edits |= self._state(self.argument_of[v], new)
            for op in self.producers[v]:
                if op.site.frames and not op.site.is_backward and op.primitive not in _PASSING:
                    edit, point = self._constrained(op, new)
                    edits, points = edits | edit, [*points, point]
        if edits != Edits():
            yield Change('sharded loop axis', cost, edits, tuple(points))

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
        edits, points = Edits(), list[Point]()
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
                    edits |= self._state(argument, new)
                    break
        for op in self.constraints:
            v = op.arrays_out[0]
            shape = self.trial.traced.values[v].shape
            current = tuple(axis.mesh_axes for axis in self.trial.values[v].axes)
            dims = [dim for dim in range(len(shape)) if self.logical(v, dim) == root]
            new = self._with(current, shape, dims[0], axes) if dims else None
            if new is not None and op.site.frames[0] not in {point.span for point in points}:
                edit, point = self._constrained(op, new)
                edits, points = edits | edit, [*points, point]
        if edits == Edits():
            return None
        kind = 'replicated compute' if cost.n_repeats else 'unsharded axis'
        return Change(kind, cost, edits, tuple(points))

    def _constrained(self, op: Op, entries: Entries) -> tuple[Edits, Point]:
        span, axes = op.site.frames[0], self.trial.values[op.arrays_out[0]].axes
        pairs = zip(axes, entries, strict=True)
        named = tuple(replace(axis, mesh_axes=entry) for axis, entry in pairs)
        edits = Edits((ValueEdit(span, self._sharding(entries)),))
        return edits, Point(span, named, op.primitive == _CONSTRAINT, op.site.n_mapped)

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
            edits = Edits()
            entries: Entries | None = None
            for i, array in enumerate(self.facts.arguments):
                if not self._is_data(i) or len(array.shape) <= dim or array.shape[dim] != size:
                    continue
                current = self._entries_of_argument(i)
                if current is None:
                    continue
                new = self._with(current, array.shape, dim, axes)
                if new is not None:
                    edits |= self._state(i, new)
                    entries = new if i == argument or entries is None else entries
            if entries is not None:
                kind = 'replicated compute' if cost.n_repeats else 'unsharded data'
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
        kinds = (_CONSTRAINT, 'gather', *PRODUCTS, 'scatter-add', 'scatter', 'reduce_sum', 'add')
        if is_result and op.primitive != _CONSTRAINT:
            return False
        return is_float and len(value.shape) >= 2 and op.primitive in kinds

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
                    edits, point = self._constrained(op, new)
                    yield Change(kind, cost, edits, (point,))
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
                        yield Change(kind, cost, self._state(argument, each))

    def _state(self, argument: int, entries: Entries) -> Edits:
        """Shards an argument, the same argument of other layers, its states and the results."""
        sharding, facts = self._sharding(entries), self.facts
        path, shape = _folded(facts.arguments[argument].path), facts.arguments[argument].shape
        end = path.partition('/')[2] or path

        def is_same(other: str, other_shape: Sequence[int]) -> bool:
            folded = _folded(other)
            return tuple(other_shape) == tuple(shape) and (
                folded == path or folded.endswith(f'/{end}')
            )

        arguments = {
            i
            for i, array in enumerate(facts.arguments)
            if array.sharding is not None and is_same(array.path, array.shape)
        }
        arguments |= {state for state, i in self.states.items() if i in arguments}
        results = {i for i, row in enumerate(facts.results) if is_same(row.path, row.shape)}
        results |= {result for result, i in self.replaced.items() if i in arguments}
        return Edits(
            (), dict.fromkeys(sorted(arguments), sharding), dict.fromkeys(sorted(results), sharding)
        )

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
                    yield Change('placement', cost, self._state(argument, new))

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
                yield Change('replicated result', cost, Edits(results={i: self._sharding(new)}))

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


def _folded(path: str) -> str:
    """Replaces the numbers in a path, such as those of layers: 'w/3/up' becomes 'w/*/up'."""
    return re.sub(r'(?<=/)\d+(?=/|$)', '*', path)
