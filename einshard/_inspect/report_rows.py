"""The rows of a report: arrays, collectives, memory, warnings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .._hlo.memory import Memory as Memory
from .._text import old_name, shape_text


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """An argument, result or intermediate, with its placement.

    Attributes:
        path: 'params/w' for an argument, 'result/0' for a result; for an intermediate, its name in
            the program.
        shape: the global shape.
        dtype: such as 'float32'.
        placement: an expression, with the axis names of the spec if there is one; or a description.
        bytes: bytes per device.
        sharded: whether each device holds only a shard, or a term of a sum.
        source: 'model.py:12', for intermediates.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    bytes: int
    sharded: bool
    source: str | None = None

    @property
    def array(self) -> str:
        """float32[8,16]"""
        return f'{self.dtype}{shape_text(self.shape)}'


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A collective of the program.

    Attributes:
        kind: 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
            'ragged-all-to-all', 'collective-broadcast', or 'custom-call' for a kernel that
            communicates, such as a Pallas kernel on TPU.
        arrays: the results of an all-gather, the operands of others, as the compiler writes them:
            'f32[8,16]'.
        bytes: bytes of those arrays, per device.
        group_size: the number of devices in each group.
        groups: the number of groups.
        along: the mesh axes that it runs along, on a user's mesh; else the array axes sharded over
            the same devices: 'b,x' is both axes, 'h|k' is either one. '' if unknown.
        executions: how often it runs in one run of the program; None if a loop has an unknown trip
            count.
        network_bytes: bytes that a device sends per execution; None for a custom call.
        is_async: whether it overlaps with computation.
        source: 'model.py:12', or None.
        of: the path of the argument that it gathers, or of the results that it becomes (the
            all-reduce of a gradient becomes the new weights); may be empty.
        op_name: the JAX operation that it comes from.
    """

    kind: str
    arrays: str
    bytes: int
    group_size: int
    groups: int
    along: str
    executions: int | None
    network_bytes: int | None
    is_async: bool
    source: str | None
    of: tuple[str, ...]
    op_name: str

    parties = old_name('parties', 'group_size')
    times = old_name('times', 'executions')

    @property
    def total_bytes(self) -> int:
        """Bytes that a device sends in one run of the program, as far as known."""
        return (self.network_bytes or 0) * (1 if self.executions is None else self.executions)


class Collectives(tuple[CollectiveRow, ...]):
    """The collectives of a program, in order; those in loops appear once."""

    __slots__ = ()

    @property
    def counts(self) -> dict[str, int]:
        """The number of collectives by kind; one in a loop counts once."""
        return dict(Counter(row.kind for row in self))

    @property
    def network_bytes(self) -> dict[str, int]:
        """Bytes that a device sends in one run of the program, by kind, including loops.

        Custom calls are not included.
        """
        total: Counter[str] = Counter()
        for row in self:
            if row.network_bytes is not None:
                total[row.kind] += row.total_bytes
        return dict(total)


@dataclass(frozen=True, slots=True)
class Caution:
    """A likely mistake.

    Attributes:
        kind: 'does not fit', 'promise broken', 'replicated', 'full rematerialization', 'gathered
            again' or 'no effect'.
        text: a sentence about it.
        source: 'model.py:12', or None.
    """

    kind: str
    text: str
    source: str | None = None
