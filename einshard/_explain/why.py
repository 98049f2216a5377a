"""Says why a compiled program has a collective, and why a value is sharded as it is.

Shardy decides how each value is sharded before XLA partitions the program. Where the operands and
results of an operation disagree about a mesh axis, XLA inserts a collective. So the reason of a
collective is such a conflict (`traced/conflicts.py`) near the operation that XLA names, of the size
that the collective has.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from .._program.hlo.collective import KINDS, PERMUTE, Collective
from .._program.hlo.opcodes import MOVES
from .._program.hlo.queries import reached, strip
from .._program.hlo.sources import full_names
from .._program.traced.conflicts import (
    DISAGREE,
    DROPPED,
    MOVED,
    REDUCE,
    WHOLE,
    Conflict,
    Conflicts,
)
from .._program.traced.origins import (
    is_asked,
    origin,
)
from .._program.traced.propagated import (
    CONSTRAINT,
    MANUAL_IN,
    MANUAL_OUT,
    PASSING,
    Axis,
    Operation,
    Propagated,
    Value,
    name_of,
)
from .._program.traced.propagated import RESULT as PROGRAM_RESULT
from .._text import short_source
from .why_words import AxisReason, JoinAxes, Words, way_text

REQUESTED, INSERTED, UNKNOWN = 'requested', 'inserted', 'unknown'

# the conflicts that a collective resolves, the likely ones first
_RESOLVED_BY = {
    'all-gather': (DISAGREE, DROPPED, WHOLE, MOVED, REDUCE),
    'all-reduce': (REDUCE, WHOLE, DROPPED, MOVED, DISAGREE),
    'reduce-scatter': (REDUCE,),
    'all-to-all': (DISAGREE, DROPPED, WHOLE, MOVED),
    # XLA may exchange the terms of a sum before it reduces along another axis
    PERMUTE: (MOVED, DISAGREE, DROPPED, WHOLE, REDUCE),
    'ragged-all-to-all': (DISAGREE, MOVED, WHOLE),
    'collective-broadcast': (DROPPED, DISAGREE),
}
# an operation of the user may be lowered to several; these prepare its operands
_PREPARING = PASSING | {'broadcast_in_dim', 'convert', 'iota', 'reshape'}
# what the user may have written in a `shard_map`; custom calls are kernels
_WRITTEN = frozenset(kind.replace('-', '_') for kind in KINDS[:-1])


@dataclass(frozen=True)
class Reason:
    """Why a program has a collective.

    Attributes:
        row: the collective.
        cause: 'requested' if the user wrote it in a `shard_map`, or wrote the constraint, the
            sharding of a result or the specs that ask for it; 'inserted' for other conflicts;
            'unknown' if no reason was found.
        short: half a sentence, such as "params/w has tensor on axis 1; your constraint at
            model.py:13 drops it". Of a combined collective, about its first array.
        text: a sentence about all of it, with the lines through which the sharding came. If
            unknown, why.
        conflicts: for each mesh axis of the collective, the conflict; empty if unknown, and for
            collectives that the user wrote.
        origins: for each mesh axis of a conflict and each side, where the axis comes from, such as
            ('tensor', 'argument params/w').
        travelled: for each conflict, the lines from the origin to the operation.
    """

    row: Collective
    cause: str
    short: str
    text: str
    conflicts: tuple[Conflict, ...] = ()
    origins: tuple[tuple[str, str], ...] = ()
    travelled: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ValueReason:
    """Why a value is sharded as it is.

    Attributes:
        value: the value.
        name: in words, such as 'the product at model.py:34'.
        axes: a reason for each mesh axis that shards it.
        text: a sentence with all of it.
    """

    value: Value
    name: str
    axes: tuple[AxisReason, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def find_reasons(
    program: Propagated, rows: Iterable[Collective], joined: JoinAxes = ' and '.join
) -> tuple[Reason, ...]:
    """Returns the reason of each collective.

    Args:
        program: the traced program; its arguments have the user's names.
        rows: the collectives of the compiled program, with their `mesh_axes`. With `nodes`, a
            collective whose operand XLA has sharded differently than Shardy is unknown.
        joined: writes several mesh axes.
    """
    why = _Why(program, joined)
    return tuple(why.reason(row) for row in rows)


def why_value(
    program: Propagated, place: str, joined: JoinAxes = ' and '.join
) -> tuple[ValueReason, ...]:
    """Returns why the values of a line, or an argument, are sharded as they are.

    Args:
        place: a line, such as 'model.py:34' or a longer path, or the name of an argument or result.
    """
    words = Words(program, joined)
    values = [v for v in (*program.arguments, *program.results) if v.name == place]
    if not values:
        ops = [
            op
            for line, at_line in program.by_place.items()
            if line == place or line.endswith((f'/{place}', f'\\{place}'))
            for op in at_line
            if op.kind != 'constant'
        ]
        computing = [op for op in ops if op.kind not in _PREPARING]
        values = [v for op in computing or ops for v in op.results if v.shape]
    alike: dict[tuple[tuple[int, ...], str, tuple[AxisReason, ...]], list[Value]] = {}
    for value in values:
        axes = tuple(
            AxisReason(
                axis, i, words.origin(origin(program, value, axis)), words.lines(value, axis)
            )
            for i, axes in enumerate(value.axes)
            for axis in axes
        )
        alike.setdefault((value.shape, value.dtype, axes), []).append(value)
    return tuple(
        ValueReason(same[0], name, axes, words.value_reason(same[0], name, axes))
        for (*_, axes), same in alike.items()
        for name in [words.names(same)]
    )


# --- which conflict a collective belongs to -------------------------------------------------------


class _Why:
    def __init__(self, program: Propagated, joined: JoinAxes):
        self.program, self.words = program, Words(program, joined)
        self.conflicts = Conflicts(program)
        # unrolled layers have one conflict for each collective: a used one is less likely
        self.used: Counter[Conflict] = Counter()
        # Unrolled layers have the same path and line, so a program has few places.
        self.known: dict[object, list[tuple[float, Conflict, frozenset[int]]]] = {}

    @functools.cached_property
    def arguments(self) -> dict[str, list[Value]]:
        found: dict[str, list[Value]] = {}
        for value in self.program.arguments:
            found.setdefault(value.path, []).append(value)
        return found

    @functools.cached_property
    def by_end(self) -> dict[str, list[Operation]]:
        """Operations by each end of their path: XLA may drop or add a beginning."""
        found: dict[str, list[Operation]] = {}
        for path, ops in self.program.by_path.items():
            while path:
                found.setdefault(path, []).extend(ops)
                _, _, path = path.partition('/')
        return found

    def reason(self, row: Collective) -> Reason:
        names = tuple(full_names(row.op_name or _name_of_operand(row)))
        if not row.is_spmd_generated:
            written = [op for n in names for op in self._at_path(n) if op.kind in _WRITTEN]
            if written or row.kind == 'custom-call':
                text = f'you wrote it at {self.words.at(written[0])}' if written else 'a kernel'
                return Reason(row, REQUESTED, text, text)
        if (differs := self._differs(row)) is not None:
            return Reason(row, UNKNOWN, differs, differs)
        found: list[Conflict] = []
        for sizes in _sizes_of(row):
            axes = sorted(row.mesh_axes) or list(self.program.mesh)
            best = [c for a in axes if (c := self._best(row, names, a, sizes)) is not None]
            if not best:
                # XLA may communicate along one axis to change where another is
                rest = [a for a in self.program.mesh if a not in axes]
                fits = (self._best(row, names, a, sizes) for a in rest)
                best = [c for c in fits if c is not None][:1]
            self.used.update(best)
            found += best
        if not found:
            place = short_source(row.source) or row.op_name or 'the results'
            text = f'no shardings of an array of this size disagree at {place}'
            return Reason(row, UNKNOWN, text, text)
        found = list(dict.fromkeys(found))
        shorts = self.words.conflicts(found)
        short = shorts[0] + (f'; and {len(shorts) - 1} more' if shorts[1:] else '')
        text = '; '.join(shorts[:_MAX_PARTS])
        if shorts[_MAX_PARTS:]:
            text += f'; and {len(shorts) - _MAX_PARTS} more'
        lines = tuple(self.words.lines(c.sharded[0], c.axis) for c in found)
        origins: dict[tuple[str, str], None] = {}
        for c in found:
            for value in c.sharded:
                source = origin(self.program, value, c.axis)
                origins[c.axis, self.words.origin(source)] = None
            if c.operation.kind == CONSTRAINT:
                origins[c.axis, self.words.constraint(c.operation)] = None
        way = next((way_text(each) for each in lines if each[1:]), '')
        cause = REQUESTED if all(map(_is_requested, found)) else INSERTED
        return Reason(row, cause, short, text + way, tuple(found), tuple(origins), lines)

    def _best(
        self, row: Collective, names: tuple[str, ...], axis: Axis, sizes: frozenset[int]
    ) -> Conflict | None:
        """Returns the conflict that fits best to the place, the kind and the size."""
        best, best_score = None, 0.0
        for score, conflict, possible in self._candidates(row, names, axis):
            if conflict.size in sizes:
                score += 1
            elif sizes.isdisjoint(possible):
                # the edges of shards, as a shifted value or a convolution needs them
                is_edge = row.kind == PERMUTE and conflict.kind == MOVED
                if not is_edge or min(sizes) > conflict.size:
                    continue
            score -= self.used[conflict] / 8
            if score > best_score:
                best, best_score = conflict, score
        return best

    def _candidates(
        self, row: Collective, names: tuple[str, ...], axis: Axis
    ) -> list[tuple[float, Conflict, frozenset[int]]]:
        """Returns conflicts near a collective: how well each fits, and sizes that it may have."""
        key = row.kind, names, row.source, row.column, axis
        if key not in self.known:
            kinds = _RESOLVED_BY.get(row.kind, ())
            is_backward = any('transpose(' in name for name in names)
            self.known[key] = [
                (
                    at
                    + 4
                    - 3 * kinds.index(c.kind) / len(kinds)
                    # what `jax.checkpoint` computes again has the path of the backward pass
                    + (('transpose(' in op.path) == is_backward),
                    c,
                    _possible_sizes(self.program, row.kind, c),
                )
                for op, at in self._near(row, names).items()
                for c in self.conflicts(op, axis)
                if c.kind in kinds
                # XLA gathers what each device found of an argmax; it sums up everything else
                and (row.kind != 'all-gather' or c.kind != REDUCE or len(op.results) > 1)
            ]
        return self.known[key]

    def _near(self, row: Collective, names: tuple[str, ...]) -> dict[Operation, float]:
        """Returns operations that a collective may belong to, and how well their place fits."""
        near: dict[Operation, float] = {}
        for name in names:
            for op in self._at_path(name):
                near[op] = 6
        for op in self.program.by_place.get(row.source or '', ()):
            is_column = op.frame is not None and op.frame.column == row.column
            near[op] = near.get(op, 0) + 2 + is_column

        def add(op: Operation, score: float) -> None:
            near[op] = max(near.get(op, 0), score)

        # XLA names a collective after the value that it moves, or after a user of the value
        for op, score in list(near.items()):
            for value in op.results:
                for user in _users(value):
                    add(user, score - 1)
            for value in op.operands:
                for producer in _producers(value):
                    add(producer, score - 2)
        for name in names:
            for value in self.arguments.get(name, ()):
                for user in _users(value):
                    add(user, 5)
        if not near and not row.op_name and not row.source:
            near = {v.producer: 1 for v in self.program.results if v.producer is not None}
        return {op: score for op, score in near.items() if score > 0}

    def _at_path(self, name: str) -> list[Operation]:
        found = self.program.by_path.get(name)
        # XLA's name may begin earlier, or later, than that of the traced program; 'add' alone says
        # nothing
        while found is None and '/' in name:
            found = self.by_end.get(name)
            _, _, name = name.partition('/')
        return found or []

    def _differs(self, row: Collective) -> str | None:
        """Says how XLA has sharded the operand of a collective differently than Shardy, or None.

        XLA shards the bodies of some backward loops in another way, 4 % of the places. Then no
        conflict of the propagated program explains the collective.
        """
        for node in row.nodes[:1]:
            for operand in node.inputs:
                computed = strip(operand)
                kind = _HLO_KINDS.get(computed.opcode, computed.opcode.replace('-', '_'))
                ops = self.program.by_path.get(computed.op.op_name, ()) if kind in _KEPT else ()
                possible = [
                    self.program.possible_sizes(op.results[0]) for op in ops if op.kind == kind
                ]
                size = prod(computed.array.shape)
                if possible and not any(size in sizes for sizes in possible):
                    same = [op for op in ops if op.kind == kind]
                    shapes = {self.program.local_shape(op.results[0]) for op in same}
                    texts = (f'[{",".join(map(str, shape))}]' for shape in sorted(shapes))
                    return (
                        f'XLA computes {self.words.operation(same[0])} as {computed.array} on '
                        f'each device, and Shardy propagates {" or ".join(texts)}'
                    )
        return None


def _name_of_operand(row: Collective) -> str:
    """Returns the JAX operation that computes what a collective without a name sends, or ''."""
    sent = (strip(operand, MOVES) for node in row.nodes for operand in node.inputs)
    return next((node.op.op_name for node in sent if node.op.op_name), '')


_MAX_PARTS = 3  # that are said of a combined collective
_HLO_KINDS = {'dot': 'dot_general'}
# XLA computes these with the shape that the traced program has
_KEPT = frozenset(('dot_general', 'concatenate', 'add', 'multiply', 'tanh', 'exponential'))


def _sizes_of(row: Collective) -> list[frozenset[int]]:
    """Returns the sizes of a collective, a set for each of those that XLA combined into it."""
    pairs = [
        {prod(a.shape), prod(b.shape)} for a, b in zip(row.operands, row.results, strict=False)
    ]
    if row.kind in ('all-reduce', 'all-gather', 'reduce-scatter', PERMUTE):
        return list(dict.fromkeys(map(frozenset, pairs)))
    # an all-to-all sends a piece of the array to each device
    pairs += [{sum(prod(a.shape) for a in arrays)} for arrays in (row.operands, row.results)]
    return [frozenset[int]().union(*pairs)]


def _possible_sizes(program: Propagated, kind: str, c: Conflict) -> frozenset[int]:
    """The sizes of collectives that may resolve a conflict.

    XLA may gather or reduce along the axes of a value one after the other, so the others may be
    gone already, or still be there.
    """
    if c.kind == REDUCE:
        sizes = frozenset[int]().union(*(program.possible_sizes(r) for r in c.operation.results))
        if kind == 'all-gather':
            sizes = frozenset(n * program.mesh[name_of(c.axis)] for n in sizes)
        return sizes
    return program.possible_sizes(c.value)


def _users(value: Value) -> list[Operation]:
    """Returns the users of a value, also inside and after loops and inner functions."""

    def passed(at: Value) -> list[Value]:
        return [v for user, _ in at.users if user.kind in PASSING for v in user.results]

    return [user for at in reached([value], passed) for user, _ in at.users]


def _producers(value: Value) -> list[Operation]:
    def passed(at: Value) -> list[Value]:
        return at.producer.operands if at.producer and at.producer.kind in PASSING else []

    return [at.producer for at in reached([value], passed) if at.producer is not None]


def _is_requested(c: Conflict) -> bool:
    """Whether the user asked for the communication of a conflict: for another placement."""
    if c.kind not in (DROPPED, DISAGREE):
        return False
    if c.operation.kind in (CONSTRAINT, PROGRAM_RESULT, MANUAL_IN, MANUAL_OUT):
        return True
    # Shardy hands the sharding of a constraint to the value that it constrains
    constrained = (c.operation.values[i] for i in c.others if i >= len(c.operation.operands))
    return any(
        value.shape == c.value.shape
        and any(is_asked(user) or user.kind == PROGRAM_RESULT for user, _ in value.users)
        for value in constrained
    )
