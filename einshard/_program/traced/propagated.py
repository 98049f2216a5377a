"""A traced program as data: its values, their shardings and origins, and its operations."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import prod
from typing import NamedTuple, TypeAlias

from ..hlo.sources import innermost_user_frame, is_user_file

# A mesh axis, 'x', or a part of one as Shardy writes it: 'x:(2)4' has 4 parts, and the parts
# before it have 2.
Axis: TypeAlias = str
Axes: TypeAlias = tuple[tuple[Axis, ...], ...]  # of each dimension

# Kinds of operations that Shardy has no rule for because they pass values on: each has a single
# result, and all its values have corresponding dimensions.
LOOP = 'loop'  # a carried value of a loop: (the first value, that of the next iteration) -> it
BRANCH = 'branch'  # a result of a conditional: (its value in each branch) -> it
CALL = 'call'  # an argument or a result of an inner jitted function, a scan's body, a checkpoint
BARRIER = 'optimization_barrier'
MANUAL_IN = 'shard_map input'  # an argument as `in_specs` say
MANUAL_OUT = 'shard_map output'  # a result as `out_specs` say
RESULT = 'result'  # a result of the program as `out_shardings` say
PASSING = frozenset((LOOP, BRANCH, CALL, BARRIER, MANUAL_IN, MANUAL_OUT, RESULT))
# between the value of all devices and the value of one, where dimensions don't correspond
SHARD = 'shard'
CONSTRAINT = 'sharding_constraint'


class Frame(NamedTuple):
    """A place in the source. Columns count from 1, the end is exclusive, and 0 if it is unknown."""

    file: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0

    @property
    def place(self) -> str:
        """For example '/home/me/model.py:12'."""
        return f'{self.file}:{self.line}'


@dataclass(frozen=True, slots=True)
class Rule:
    """Which dimensions of an operation's operands and results belong together.

    Attributes:
        tensors: for each operand, then for each result, the factors of each dimension, major first.
            Dimensions with the same factor have to be sharded alike. A reshape splits and joins
            dimensions, so a dimension may have several.
        sizes: the size of each factor.
        reduction: the factors that the operation sums over, or takes the maximum of.
        whole: the factors that each device needs in full.
        moved: the factors along which elements move to other positions.
    """

    tensors: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()


# for each step: the mesh axis, the position that it came from, the positions that it went to.
# Positions count operands, then results.
Edges: TypeAlias = tuple[tuple[Axis, int, tuple[int, ...]], ...]


@dataclass(slots=True, eq=False)
class Value:
    """An array of the program.

    Attributes:
        shape: of all devices, except inside a `shard_map`, where manual axes have divided it.
        dtype: as in HLO, such as 'f32'.
        axes: the mesh axes of each dimension, after propagation.
        replicated, unreduced: mesh axes in `P(reduced=...)` and `P(unreduced=...)`.
        origin_names: where each mesh axis comes from, in Shardy's words: see `origins.origin`.
        producer: the operation that gives it; None for arguments of the program, and for values
            inside a `shard_map` that stand for an argument.
        index: which result of the producer it is.
        users: the operations that take it, with the number of the operand.
        argument: its number, if it is an argument of the program.
        result: its number, if it is a result of the program.
        name: the user's name of an argument or result, such as 'params/w'.
        path: JAX's name of an argument, as in the compiled program: "params['w']".
    """

    shape: tuple[int, ...]
    dtype: str
    axes: Axes = ()
    replicated: tuple[Axis, ...] = ()
    unreduced: tuple[Axis, ...] = ()
    origin_names: dict[Axis, str] = field(default_factory=dict[Axis, str])
    producer: Operation | None = field(default=None, repr=False)
    index: int = 0
    users: list[tuple[Operation, int]] = field(
        default_factory=list['tuple[Operation, int]'], repr=False
    )
    argument: int | None = None
    result: int | None = None
    name: str = ''
    path: str = ''

    def dimension(self, axis: Axis) -> int | None:
        """The dimension that a mesh axis, or a part of it, shards."""
        for i, axes in enumerate(self.axes):
            for a in axes:
                if a == axis or name_of(a) == axis:
                    return i
        return None


@dataclass(eq=False)
class Operation:
    """An operation of the program.

    Attributes:
        kind: its StableHLO name, such as 'dot_general', or one of the kinds at the top of this
            file.
        path: its `op_name` in the compiled program, such as 'jit(step)/jvp()/dot_general'.
        frames: where it is in the source, innermost first, with the calls of inner functions.
        operands, results: its arrays.
        rule: None for operations that Shardy does not know, and for those of PASSING.
        edges: how mesh axes traveled through it.
    """

    kind: str
    path: str
    frames: tuple[Frame, ...]
    operands: list[Value]
    results: list[Value]
    rule: Rule | None = None
    edges: Edges = ()

    @property
    def values(self) -> list[Value]:
        return self.operands + self.results

    @functools.cached_property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames outside libraries, or the innermost one."""
        users = tuple(f for f in self.frames if is_user_file(f.file))
        innermost = innermost_user_frame(self.frames)
        return users or ((innermost,) if innermost else ())

    @functools.cached_property
    def frame(self) -> Frame | None:
        """The user's innermost line."""
        return self.user_frames[0] if self.user_frames else None

    @property
    def place(self) -> str:
        """'file:line', or ''."""
        return self.frame.place if self.frame else ''

    @property
    def is_forward(self) -> bool:
        return 'transpose(' not in self.path or '/rematted_computation/' in self.path


@dataclass(eq=False)
class Propagated:
    """A program that Shardy has propagated. It holds no MLIR object.

    Attributes:
        mesh: the size of each mesh axis.
        arguments: those that the compiled program keeps.
        results: as the caller gets them.
        operations: in program order; operations in a loop come before the values that the loop
            carries, whose operation ends the loop.
        constraints: the constraints by Shardy's name, such as 'constraint_2'.
        manual: arguments and results of `shard_map` calls, by Shardy's name: 'mc_0_input: 1'.
    """

    mesh: dict[str, int]
    arguments: list[Value]
    results: list[Value]
    operations: list[Operation] = field(repr=False)
    constraints: dict[str, Operation] = field(default_factory=dict[str, Operation])
    manual: dict[str, Operation] = field(default_factory=dict[str, Operation])
    _sizes: dict[tuple[tuple[int, ...], Axes], frozenset[int]] = field(
        default_factory=dict[tuple[tuple[int, ...], Axes], frozenset[int]], repr=False
    )

    @functools.cached_property
    def by_path(self) -> dict[str, list[Operation]]:
        found: dict[str, list[Operation]] = {}
        for op in self.operations:
            found.setdefault(op.path, []).append(op)
        return found

    @functools.cached_property
    def by_place(self) -> dict[str, list[Operation]]:
        """The operations of each innermost line of the user."""
        found: dict[str, list[Operation]] = {}
        for op in self.operations:
            if op.place:
                found.setdefault(op.place, []).append(op)
        return found

    def size(self, axis: Axis) -> int:
        """The size of a mesh axis, or of a part of one."""
        return int(axis.rpartition(')')[2]) if ':' in axis else self.mesh[axis]

    def local_shape(self, value: Value, without: Collection[str] = ()) -> tuple[int, ...]:
        """The shape of a device's shard, if the mesh axes `without` did not shard it.

        XLA pads dimensions that are not divisible, so sizes are rounded up.
        """
        if not value.axes:
            return value.shape
        return tuple(
            -(-n // prod(self.size(a) for a in axes if name_of(a) not in without))
            for n, axes in zip(value.shape, value.axes, strict=True)
        )

    def possible_sizes(self, value: Value) -> frozenset[int]:
        """The sizes of a device's shard of a value if any of its mesh axes are gone."""
        key = value.shape, value.axes  # the same in all unrolled layers
        if key not in self._sizes:
            names = axis_names(value)
            subsets = chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))
            self._sizes[key] = frozenset(self.local_size(value, gone) for gone in subsets)
        return self._sizes[key]

    def local_size(self, value: Value, without: Collection[str] = ()) -> int:
        return prod(self.local_shape(value, without))


def name_of(axis: Axis) -> str:
    """The mesh axis that an axis is, or is a part of."""
    return axis.partition(':')[0]


def axis_names(value: Value) -> Sequence[str]:
    """The mesh axes that shard a value, without repetition."""
    return list(dict.fromkeys(name_of(a) for axes in value.axes for a in axes))
