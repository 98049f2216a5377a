"""Finds all-reduces after which each device keeps only a slice of the result.

A reduce-scatter would send half as much. XLA replaces an all-reduce and a slice by a
reduce-scatter, but not if other operations come between them, and never on CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .all_gathers import source_axes
from .module import Module, Site, Value

_ELEMENTWISE = frozenset(
    (
        *('abs', 'add', 'ceil', 'cosine', 'divide', 'exponential', 'floor', 'log', 'logistic'),
        *('maximum', 'minimum', 'multiply', 'negate', 'power', 'rsqrt', 'select', 'sine', 'sqrt'),
        *('subtract', 'tanh'),
    )
)
_COPIES = frozenset(('copy', 'convert', 'bitcast', 'opt-barrier'))
_MAX_USES = 200
_MAX_STEPS = 30  # from the offset of a slice back to the device number


class SlicedSum(NamedTuple):
    """An all-reduce after which each device keeps only a slice of the result."""

    parts: tuple[tuple[int, int], ...]  # (dimension, number of slices) for each sliced dimension
    is_direct: bool  # whether only copies are between the all-reduce and the slice


def find_sliced_sum(module: Module, site: Site) -> SlicedSum | None:
    """Returns None unless each device uses only one slice of the all-reduce at `site`."""
    op = site.op
    if len(op.operands) != 1 or op.type.startswith('('):
        return None
    shape = op.results[0].shape
    value = Value(site.comp, op.name)
    uses = list(_Finder(module, shape).uses(value, (), range(len(shape)), True))
    slices = [use for use in uses if use is not None]
    if not slices or len(slices) < len(uses) or len({use.parts for use in slices}) > 1:
        return None
    return SlicedSum(slices[0].parts, all(use.is_direct for use in slices))


class _Finder:
    def __init__(self, module: Module, shape: Sequence[int]):
        self.module = module
        self.shape = shape
        self.uses_left = _MAX_USES

    def uses(
        self, value: Value, outside: tuple[Value, ...], axes: Sequence[int], is_direct: bool
    ) -> Iterator[SlicedSum | None]:
        """Yields each slice of `value` or of a value computed from it, and None for other uses.

        Args:
            value: the all-reduce, or a value computed from it.
            outside: the fusions that contain the value, outermost first.
            axes: for each dimension of the value, the dimension of the all-reduce.
            is_direct: whether the value is the all-reduce or a copy of it.
        """
        comp, shape = value.comp, value.op.results[0].shape
        self.uses_left -= 1
        if self.uses_left < 0:
            yield None
            return
        if value.name == comp.root.name:
            if outside:
                yield from self.uses(outside[-1], outside[:-1], axes, is_direct)
            else:
                yield None
        for user in comp.users(value.name):
            result = value.sibling(user.name)
            callee = self.module.called(user) if user.opcode == 'fusion' else None
            is_array = not user.type.startswith('(')
            moved_axes = source_axes(user, value.op, value.op.results[0]) if is_array else None
            if user.opcode == 'dynamic-slice' and user.operands[0] == value.name:
                yield self.read_slice(result, axes, is_direct)
            elif callee is not None and is_array:
                for i, operand in enumerate(user.operands):
                    if operand == value.name:
                        inside = result.in_callee(callee, callee.parameter(i))
                        yield from self.uses(inside, (*outside, result), axes, is_direct)
            elif moved_axes is not None:
                still_direct = is_direct and user.opcode in _COPIES
                yield from self.uses(result, outside, [axes[i] for i in moved_axes], still_direct)
            elif is_array and user.opcode in _ELEMENTWISE and user.results[0].shape == shape:
                yield from self.uses(result, outside, axes, False)
            elif is_array and user.opcode == 'reduce' and user.operands[0] == value.name:
                dimensions = re.search(r'dimensions=\{([\d,]*)\}', user.attributes)
                reduced = {int(i) for i in re.findall(r'\d+', dimensions[1] if dimensions else '')}
                remaining = [axis for i, axis in enumerate(axes) if i not in reduced]
                yield from self.uses(result, outside, remaining, False)
            else:
                yield None

    def read_slice(self, value: Value, axes: Sequence[int], is_direct: bool) -> SlicedSum | None:
        """Returns None unless the offsets of the dynamic-slice `value` depend on the device."""
        op = value.op
        parts = {
            axis: self.shape[axis] // size
            for axis, size in zip(axes, op.results[0].shape, strict=True)
            if 0 < size < self.shape[axis]
        }
        sliced = [i for i, axis in enumerate(axes) if axis in parts]
        if not parts or not all(
            self.depends_on_device(value.sibling(op.operands[1 + i]), _MAX_STEPS) for i in sliced
        ):
            return None
        return SlicedSum(tuple(sorted(parts.items())), is_direct)

    def depends_on_device(self, value: Value, steps: int) -> bool:
        """Whether an offset is computed from the device number, in at most `steps` steps."""
        op = value.op
        if op.opcode in ('partition-id', 'replica-id'):
            return True
        if not steps:
            return False
        if op.opcode == 'parameter':
            return bool(value.arguments) and self.depends_on_device(
                value.arguments[op.parameter_number], steps - 1
            )
        called = self.module.called(op) if op.opcode == 'fusion' else None
        if called is not None:
            return self.depends_on_device(value.in_callee(called), steps - 1)
        return any(self.depends_on_device(value.sibling(name), steps - 1) for name in op.operands)
