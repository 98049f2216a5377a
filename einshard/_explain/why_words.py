"""Words for where a sharding comes from, and for conflicts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._program.traced.conflicts import (
    DISAGREE,
    MOVED,
    REDUCE,
    WHOLE,
    Conflict,
)
from .._program.traced.origins import (
    ARGUMENT,
    ASKED,
    MANUAL,
    RESULT,
    TYPE,
    Origin,
    is_asked,
    origin,
    travelled,
)
from .._program.traced.propagated import (
    CALL,
    CONSTRAINT,
    LOOP,
    MANUAL_IN,
    Axis,
    Operation,
    Propagated,
    Value,
)
from .._program.traced.propagated import RESULT as PROGRAM_RESULT
from .._text import short_source

JoinAxes: TypeAlias = Callable[[Sequence[str]], str]


# a value after these is still the argument that it was, to a reader
_SAME = frozenset(
    (
        *('convert', 'reshape', 'transpose', 'dynamic_slice', 'slice', 'broadcast_in_dim'),
        *(CONSTRAINT, CALL, LOOP, MANUAL_IN, 'optimization_barrier', 'reduce_precision'),
    )
)


_NAMES = {
    'conv_general_dilated': 'convolution',
    'dot_general': 'product',
    'gather': 'lookup',
    'convert': 'cast',
    'dynamic_update_slice': 'update of a slice',
    'dynamic_slice': 'slice',
    'broadcast_in_dim': 'broadcast',
    'concatenate': 'concatenation',
    'reduce': 'reduction',
    'add_any': 'sum of gradients',
    'select_n': 'select',
    'mul': 'multiplication',
    'div': 'division',
    'exp': 'exponential',
}


@dataclass(frozen=True)
class AxisReason:
    """Where one mesh axis of a value comes from."""

    axis: Axis
    dimension: int
    origin: str
    travelled: tuple[str, ...]


_MAX_LINES = 5  # through which a sharding came


def way_text(lines: Sequence[str]) -> str:
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 2], '..', lines[-1]]
    return f' (through {" > ".join(lines)})' if lines[1:] else ''


class Words:
    def __init__(self, program: Propagated, joined: JoinAxes):
        self.program, self.joined = program, joined

    @functools.cached_property
    def n_shared(self) -> int:
        """How many outermost frames all operations share: where the function itself is called."""
        stacks = {op.user_frames[::-1] for op in self.program.operations if op.user_frames}
        n = 0
        for frames in zip(*stacks, strict=False):
            if len({*frames}) > 1:
                break
            n += 1
        return n

    def line(self, op: Operation) -> str:
        return short_source(op.place) or 'an unknown line'

    def lines(self, value: Value, axis: Axis) -> tuple[str, ...]:
        return tuple(short_source(frame.place) for frame in travelled(value, axis))

    def operation(self, op: Operation) -> str:
        # JAX's name, 'scatter-add', says more than that of MLIR
        name = op.path.rpartition('/')[2] if op.rule is not None else op.kind
        name = _NAMES.get(op.kind) or _NAMES.get(name, name).replace('_', ' ')
        return f'the {name} at {self.line(op)}'

    def constraint(self, op: Operation) -> str:
        """A constraint or a type, with the call of the helper that it is in."""
        if not is_asked(op):
            return f'the type of {self.operation(op)}'
        place = self.at(op)
        return f'your constraint at {place}{"," * ("," in place)}'

    def at(self, op: Operation) -> str:
        """The line of an operation, and that of the call of the helper that it is in."""
        place = self.line(op)
        # a lambda is called on its own line
        outsides = (frame for frame in op.user_frames[1:] if frame.place != op.place)
        outside = next(outsides, None)
        if len(op.user_frames) <= self.n_shared + 1 or outside is None:
            return place
        is_same = op.frame is not None and outside.file == op.frame.file
        called = f'line {outside.line}' if is_same else short_source(outside.place)
        return f'{place}, called at {called}'

    def origin(self, found: Origin) -> str:
        if found.kind == ARGUMENT and found.value is not None:
            return f'argument {found.value.name}'
        if found.kind == RESULT and found.value is not None:
            return f'out_shardings of {found.value.name}'
        if found.operation is not None and found.kind == MANUAL:
            side = 'in_specs' if found.operation.kind == MANUAL_IN else 'out_specs'
            return f'{side} of the shard_map at {self.line(found.operation)}'
        if found.operation is not None and found.kind in (ASKED, TYPE):
            return self.constraint(found.operation).rstrip(',')
        return 'an unknown place'

    def named(self, value: Value) -> tuple[str, Value]:
        """The user's name of an argument, also after casts and slices, or a value's line.

        And the argument itself: a stacked weight has an axis more than its slice for one layer.
        """
        at, seen = value, set[Value]()
        while at not in seen:
            seen.add(at)
            if at.argument is not None or at.result is not None:
                return at.name, at
            op = at.producer
            if op is None or op.kind not in _SAME or not op.operands:
                break
            if op.kind == LOOP and op.operands[1] is not at:
                return f'the carry of {self.operation(op)}', value
            at = op.operands[0]
        return self.value_at(at), value

    def value_at(self, value: Value) -> str:
        if value.argument is not None or value.result is not None:
            return value.name
        return self.operation(value.producer) if value.producer is not None else 'a value'

    def names(self, values: Sequence[Value]) -> str:
        """The name of the first value, and how many others there are."""
        names = list(dict.fromkeys(map(self.value_at, values)))
        return names[0] if len(names) == 1 else f'{names[0]} (and {len(names) - 1} more)'

    def value_reason(self, value: Value, name: str, axes: Sequence[AxisReason]) -> str:
        alike: dict[str, list[str]] = {}
        for axis in axes:
            is_own = axis.origin in (f'argument {name}', f'out_shardings of {name}')
            source = ', as given' if is_own else f', from {axis.origin}'
            text = f' on axis {axis.dimension}{source}{way_text(axis.travelled)}'
            alike.setdefault(text, []).append(axis.axis)
        array = f'{value.dtype}[{",".join(map(str, value.shape))}]'
        texts = (self.joined(found) + text for text, found in alike.items())
        return f'{name}, {array}: {"; ".join(texts) or "not sharded"}'

    def conflicts(self, found: Iterable[Conflict]) -> list[str]:
        """A text for each conflict; one for those that differ only in the mesh axis."""
        alike: dict[str, dict[str, None]] = {}
        for c in found:
            alike.setdefault(self.conflict(c), {})[c.axis] = None
        return [text.replace(_AXIS, self.joined([*axes])) for text, axes in alike.items()]

    def has(self, value: Value, axis: Axis) -> str:
        """For example "params/w has tensor on axis 1, from your constraint at model.py:9"."""
        (name, named), found = self.named(value), origin(self.program, value, axis)
        shown = value if named.dimension(axis) is None else named
        text = f'{name} has {_AXIS} on axis {shown.dimension(axis)}'
        is_own = found.value is not None and found.value.name == name
        return text if is_own else f'{text}, from {self.origin(found)}'

    def conflict(self, c: Conflict) -> str:
        """Both sides, with `_AXIS` in place of the mesh axis."""
        op, values, n, axis = c.operation, c.operation.values, len(c.operation.operands), c.axis
        has, what = self.has(c.value, axis), self.operation(op)
        result = op.results[0] if op.results else None
        target = result.dimension(axis) if result is not None else None
        asks = 'drops it' if target is None else f'has it on axis {target}'
        if c.kind == REDUCE:
            sides = dict.fromkeys(
                self.has(values[i], axis) for i in sorted((c.position, *c.others))
            )
            return f'{" and ".join(sides)}; {what} {_reduces(op)} that axis'
        if c.kind == WHOLE:
            return f'{has}; {what} needs that axis unsharded'
        if c.kind == MOVED:
            advice = ': give the parts an axis of their own' * (' split at ' in what)
            return f'{has}; {what} moves elements along that axis{advice}'
        if op.kind == CONSTRAINT:
            return f'{has}; {self.constraint(op)} {asks}'
        if op.kind == PROGRAM_RESULT and result is not None:
            plural = 'drop it' if target is None else f'have it on axis {target}'
            return f'{has}; out_shardings of {result.name} {plural}'
        if op.kind == MANUAL_IN:
            plural = 'drop it' if target is None else f'have it on axis {target}'
            return f'{has}; in_specs of the shard_map at {self.line(op)} {plural}'
        if c.kind == DISAGREE:
            others = [i for i in c.others if i < n]
            if others:
                sides = dict.fromkeys(self.has(values[i], axis) for i in others)
                return f'{has}, and {" and ".join(sides)}: different axes of {what}'
            source = origin(self.program, values[c.others[0]], axis)
            on = values[c.others[0]].dimension(axis)
            return f'{has}; the result of {what} has it on axis {on}, from {self.origin(source)}'
        return f'{has}; the result of {what} does not{self._bound(c)}'

    def _bound(self, c: Conflict) -> str:
        """Which constraint a result without the axis is for, if one uses it."""
        for i in c.others:
            for user, _ in c.operation.values[i].users:
                if user.kind == CONSTRAINT:
                    return f': {self.constraint(user)} drops it'
                if user.kind == PROGRAM_RESULT and user.results[0].axes:
                    return f': out_shardings of {user.results[0].name} drop it'
        return ''


# in a text about one mesh axis, before others like it are known
_AXIS = '\0'


def _reduces(op: Operation) -> str:
    name = op.path.rpartition('/')[2]
    return 'sums over' if op.kind != 'reduce' or name == 'reduce_sum' else 'reduces'
