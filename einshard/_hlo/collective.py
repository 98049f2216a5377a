"""The collectives of compiled programs, and the bytes that they send."""

from __future__ import annotations

from dataclasses import dataclass

from .groups import Groups
from .module import ArrayType

PERMUTE = 'collective-permute'
KINDS = (
    'all-reduce',
    'all-gather',
    'reduce-scatter',
    'all-to-all',
    PERMUTE,
    'ragged-all-to-all',
    'collective-broadcast',
    'custom-call',
)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: one of KINDS; 'custom-call' is a Pallas kernel that communicates.
        name: the name of its instruction.
        operands: the inputs of each device; for a ragged all-to-all, only the array that is sent.
        results: the outputs of each device.
        groups: the devices that communicate with each other, as positions in the device list of the
            program. For a permute, the connected components of `pairs`. Empty if the HLO text has
            no groups, as for custom calls, and with JAX 0.8 on a newer libtpu.
        pairs: the (source, target) pairs of a permute; empty for other kinds.
        executions: how often one run of the program executes it, if all branches of conditionals
            run. None if a trip count is unknown.
        is_async: whether it can overlap with computation.
        source: the source line, such as '/home/me/model.py:12', or None. If the compiler inserted
            the collective, the line of an operation that uses its result.
        op_name: the JAX operation it comes from, such as 'jit(step)/jvp()/dot_general'.
        n_devices: the number of devices of the program.
        widened: whether the compiled program runs it in f32 although the user's arrays are bf16 or
            f16, as on CPU. `operands` and `results` have the user's dtype.
        called_at: the line that calls the helper function in which `source` is, or None. See
            `Sources.caller`.
        sent: for a collective matmul (see windowed.py), the bytes that a device sends in one
            execution; None for other collectives.
        in_branch: whether it is in a branch of a conditional, which may not be taken.
    """

    kind: str
    name: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    executions: int | None
    is_async: bool
    source: str | None
    op_name: str
    n_devices: int
    widened: bool = False
    called_at: str | None = None
    sent: int | None = None
    in_branch: bool = False

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The results of an all-gather; the operands of other collectives."""
        return self.results if self.kind == 'all-gather' else self.operands

    @property
    def shape_text(self) -> str:
        """The dtypes and shapes of `arrays`, such as 'f32[8,8]'."""
        return ', '.join(map(str, self.arrays))

    @property
    def group_size(self) -> int:
        """The size of the largest group, or the number of devices if the text lists no groups."""
        return max(map(len, self.groups), default=self.n_devices)

    @property
    def n_groups(self) -> int:
        """The number of groups, or 0 if the text lists none.

        Ignores groups of one device, unless there are no others. In a permute, a device that sends
        only to itself is such a group.
        """
        return sum(len(group) > 1 for group in self.groups) or len(self.groups)

    @property
    def bytes(self) -> int:
        """Bytes of `arrays`, per device."""
        return sum(array.bytes for array in self.arrays)

    @property
    def network_bytes(self) -> int | None:
        """Bytes that a device sends in one execution, rounded up, or None for a custom call.

        In a permute, a device sends its operand, unless all devices send to themselves. In a
        broadcast, every device but the last sends the array. The sizes of a ragged all-to-all are
        known only at run time, so this assumes equal pieces. For other kinds, see `ring_bytes`.
        """
        n = self.group_size
        if self.sent is not None:
            return self.sent
        if self.kind == 'custom-call':
            return None
        if self.kind == PERMUTE:
            return self.bytes if any(a != b for a, b in self.pairs) else 0
        if self.kind == 'collective-broadcast':
            return self.bytes if n > 1 else 0
        return ring_bytes(self.kind, self.bytes, n)


def ring_bytes(kind: str, n_bytes: int, group_size: int) -> int:
    """Bytes that a device sends in a collective, rounded up.

    `n_bytes` is the size of an all-gather's result, or of another collective's operand. Uses
    the bandwidth terms of ring algorithms, from Thakur, Rabenseifner, Gropp: "Optimization of
    Collective Communication Operations in MPICH", 2005. An all-gather, reduce-scatter or
    all-to-all in groups of n sends (n-1)/n of the array; an all-reduce sends twice that.
    """
    rounds = 2 if kind == 'all-reduce' else 1
    return -(-rounds * n_bytes * (group_size - 1) // group_size)
