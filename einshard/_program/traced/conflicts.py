"""Finds what an operation needs communication for, from its values' shardings and its rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from .propagated import PASSING, RESULT, SHARD, Axis, Operation, Propagated, Rule, Value, name_of

# sums, or takes the maximum, over a dimension that the axis shards
REDUCE = 'reduce'
# each device needs the sharded dimension in full, as in a sort
WHOLE = 'whole'
# moves elements to other positions of the dimension, as a concatenation or a slice does
MOVED = 'moved'
# another operand or result has the axis on a dimension that does not correspond
DISAGREE = 'disagree'
# a result has the dimension, but not sharded by the axis
DROPPED = 'dropped'
CUSTOM = 'custom_call'
# operations that move elements only if the dimension changes its size, which their rules don't tell
_MAY_MOVE = frozenset(
    ('slice', 'pad', 'concatenate', 'dynamic_slice', 'dynamic_update_slice', 'reverse')
)


@dataclass(frozen=True)
class Conflict:
    """An operand whose sharding along one mesh axis the operation can't use as it is.

    Attributes:
        kind: one of those above.
        operation: the operation.
        axis: the mesh axis.
        position: the operand that is gathered, reduced or moved; results come after operands.
        size: the elements on a device after the communication.
        others: positions of the operands and results that take part.
    """

    kind: str
    operation: Operation
    axis: Axis
    position: int
    size: int
    others: tuple[int, ...] = ()

    @property
    def value(self) -> Value:
        """The value that is gathered, reduced or moved."""
        return self.operation.values[self.position]

    @property
    def sharded(self) -> list[Value]:
        """The values that the axis shards, beginning with `value`."""
        values = self.operation.values
        positions = dict.fromkeys((self.position, *self.others))
        return [values[i] for i in positions if values[i].dimension(self.axis) is not None]


@dataclass(eq=False)
class Conflicts:
    """Finds the conflicts of a program's operations, each once."""

    program: Propagated
    _known: dict[tuple[Operation, Axis], tuple[Conflict, ...]] = field(
        default_factory=dict[tuple[Operation, Axis], 'tuple[Conflict, ...]']
    )

    def __call__(self, op: Operation, axis: Axis) -> tuple[Conflict, ...]:
        """Returns the conflicts of an operation about a mesh axis."""
        key = op, axis
        if key not in self._known:
            self._known[key] = tuple(self._find(op, axis))
        return self._known[key]

    def _find(self, op: Operation, axis: Axis) -> list[Conflict]:
        values, n = op.values, len(op.operands)
        held = [(i, v, d) for i, v in enumerate(values) if (d := v.dimension(axis)) is not None]
        if not held or op.kind == SHARD:
            return []
        if op.rule is None and op.kind not in PASSING:
            # XLA partitions none of the operations that Shardy does not know, such as a QR
            sizes = ((i, self.program.local_size(v, axis)) for i, v, _ in held)
            return [Conflict(WHOLE, op, axis, i, size) for i, size in sizes if i < n]
        rule, program, result = op.rule, self.program, op.results[0].shape if op.results else ()
        if rule is None:  # each dimension passes as it is
            shape = values[0].shape
            rule = Rule((tuple((d,) for d in range(len(shape))),) * len(values), shape)
        # the factor that the axis shards, of each value that has the axis
        factor = {
            i: self._factor(rule, i, value, dim, axis)
            for i, value, dim in held
            if i < len(rule.tensors)
        }
        found: list[Conflict] = []
        for i, value, dim in held:
            if i >= n or i not in factor:
                continue
            mine, others = factor[i], [j for j in factor if j != i]
            gathered = program.local_size(value, (axis,))
            changes_size = dim < len(result) and result[dim] != value.shape[dim]
            if mine in rule.reduction:
                size = program.local_size(op.results[0])
                same = tuple(j for j in others if factor[j] == mine)
                found.append(Conflict(REDUCE, op, axis, i, size, same))
            elif mine in rule.whole or (op.kind == CUSTOM and _is_alone(rule, mine)):
                found.append(Conflict(WHOLE, op, axis, i, gathered, tuple(others)))
            elif mine in rule.moved or (op.kind in _MAY_MOVE and changes_size):
                size = program.local_size(value)
                found.append(Conflict(MOVED, op, axis, i, size, tuple(others)))
            clashes = tuple(j for j in others if factor[j] != mine)
            lost = tuple(
                j
                for j in range(n, len(rule.tensors))
                if j not in factor and any(mine in factors for factors in rule.tensors[j])
            )
            if clashes:
                found.append(Conflict(DISAGREE, op, axis, i, gathered, clashes))
            elif lost and mine not in rule.whole and (op.kind != RESULT or values[lost[0]].axes):
                # a result without out_shardings has no axes: it takes those of the value
                found.append(Conflict(DROPPED, op, axis, i, gathered, lost))
        return found

    def _factor(self, rule: Rule, i: int, value: Value, dim: int, axis: Axis) -> int:
        """Returns the factor of a dimension that an axis shards; -1 if there is none."""
        factors = rule.tensors[i][dim]
        if not factors:
            return -1
        left = [rule.sizes[f] for f in factors]
        for a in value.axes[dim]:
            # the major axes of a dimension shard its major factors
            at = next((k for k, size in enumerate(left) if size > 1), len(left) - 1)
            if name_of(a) == name_of(axis):
                return factors[at]
            left[at] //= self.program.size(a)
        return -1


def _is_alone(rule: Rule, factor: int) -> bool:
    """Whether only one tensor has a factor, as with the operands of a kernel for a QR."""
    return sum(factor in factors for tensor in rule.tensors for factors in tensor) == 1
