"""The collectives of compiled programs, and the bytes that they send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .graph import Node
from .groups import Groups
from .text import ArrayType

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


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    `find_collectives` reads it from HLO. `Reading.collectives` adds the user's arrays and mesh axes
    (`role`, `of`, `axes`, `is_backward`, `along`, `mesh_axes`), and `with_causes` the `cause`.

    Attributes:
        kind: 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
            'ragged-all-to-all', 'collective-broadcast', or 'custom-call' for a kernel that
            communicates, such as a Pallas kernel on TPU.
        name: the name of its instruction.
        operands: the inputs of each device; for a ragged all-to-all, only the array that is sent.
        results: the outputs of each device.
        device_groups: the devices that communicate with each other, as positions in the device list
            of the program. For a permute, the connected components of `pairs`. Empty if the HLO
            text has no groups, as for custom calls.
        pairs: the (source, target) pairs of a permute; empty for other kinds.
        n_devices: the number of devices of the program.
        executions: how often it runs in one run of the program, if all branches of conditionals
            run. A loop with an unknown trip count counts as one iteration.
        is_exact: whether `executions` is exact: false if a trip count is unknown.
        is_async: whether it can overlap with computation.
        source: the source line, such as '/home/me/model.py:12', or None. If the compiler inserted
            the collective, the line of an operation that uses its result.
        column: the column in that line, from 1; 0 if it is unknown.
        called_at: the nearest calling line outside helper functions, if `source` is in one.
            Otherwise None.
        op_name: the JAX operation that it comes from, such as 'jit(step)/jvp()/dot_general'.
        widened: whether the compiled program runs it in float32 although the arrays are bfloat16 or
            float16, as XLA does on CPU. `arrays`, `bytes` and `network_bytes` are for the narrow
            dtype.
        in_branch: whether it is in a branch of a conditional, which may not be taken. Totals
            include all branches.
        sent: the bytes that a device sends in one execution of a collective matmul (see
            collective_matmuls.py) or of a one-shot kernel for GPUs; None for other collectives.
            In the kernel, each of n devices reads the full arrays of the n - 1 others.
        along: the mesh axes that it runs along. For a permute, the mesh axes along which senders
            and receivers differ. In expressions with counts, mesh axes have no names: 'b,x' then
            means the mesh axes that shard the array axes b and x, and 'h|k' those that shard h in
            one array and k in another. Empty if unknown.
        mesh_axes: the names of the mesh axes that its groups span in full. Empty if unknown.
        of: the paths of the arguments that it sends. If it sends no argument, the paths of the
            results computed from what it sends, such as new weights from a gradient.
        role: 'weights', 'gradients', 'cache' or 'activations', depending on what it sends. In a
            train step, weights are the arguments that the step updates, or all arguments if it
            updates none. In inference, arguments that are updated are a cache, and all others are
            called weights, even batches. Only floating-point arguments count.
        is_backward: whether it sends gradients or belongs to the backward pass, including what
            `jax.checkpoint` computes again.
        axes: the axis names of activations, such as 'b s d', from the einsum or the constraint on
            the source line. If the array could be several arrays of the einsum, or none, then the
            full einsum, such as 'bsd,df->bsf'. Empty if unknown.
        cause: 'requested' if it comes from a constraint, or from a collective in a `shard_map`;
            'inserted' if the compiler added it; and 'unknown' in other cases, because XLA may have
            dropped the name of a constraint.
        is_spmd_generated: whether XLA marks it as made by its partitioner, also for a constraint
            that the user wrote. The mark is missing on collectives in a `shard_map`, on all with
            JAX 0.10, and on some asynchronous ones that XLA combines for TPU.
        nodes: its operations in the graph of the program: several if a computation that contains it
            is called several times, and for a collective matmul. Empty in a `Report`.
    """

    kind: str
    name: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    device_groups: Groups
    pairs: tuple[tuple[int, int], ...]
    n_devices: int
    executions: int = 1
    is_exact: bool = True
    is_async: bool = False
    source: str | None = None
    column: int = 0
    called_at: str | None = None
    op_name: str = ''
    widened: bool = False
    in_branch: bool = False
    sent: int | None = None
    along: str = ''
    mesh_axes: frozenset[str] = frozenset()
    of: tuple[str, ...] = ()
    role: str = 'activations'
    is_backward: bool = False
    axes: str = ''
    cause: str = 'unknown'
    is_spmd_generated: bool = False
    nodes: tuple[Node, ...] = field(default=(), repr=False, compare=False)

    # what JSON shows
    json_fields: ClassVar[tuple[str, ...]] = (
        *('name', 'kind', 'arrays', 'bytes', 'group_size', 'groups', 'along', 'executions'),
        *('is_exact', 'network_bytes', 'is_async', 'source', 'column', 'called_at'),
        *('of', 'op_name', 'role', 'is_backward', 'axes', 'widened', 'in_branch', 'cause'),
    )

    @property
    def array_types(self) -> tuple[ArrayType, ...]:
        """The results of an all-gather; the operands of other collectives."""
        return self.results if self.kind == 'all-gather' else self.operands

    @property
    def arrays(self) -> str:
        """The dtypes and shapes of `array_types`, such as 'f32[8,8]'."""
        return ', '.join(map(str, self.array_types))

    @property
    def bytes(self) -> int:
        """Bytes of `array_types`, per device."""
        return sum(array.bytes for array in self.array_types)

    @property
    def group_size(self) -> int:
        """The size of the largest group, or the number of devices if the text lists no groups."""
        return max(map(len, self.device_groups), default=self.n_devices)

    @property
    def groups(self) -> int:
        """The number of groups, or 0 if the HLO text lists none; see `device_groups`.

        Ignores groups of one device, unless there are no others. In a permute, a device that sends
        only to itself is such a group.
        """
        return sum(len(group) > 1 for group in self.device_groups) or len(self.device_groups)

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

    @property
    def total_bytes(self) -> int:
        """Bytes that a device sends in one run; 0 for a custom call. See `executions`."""
        return (self.network_bytes or 0) * self.executions

    @property
    def runs(self) -> str:
        """How often it runs: '80', or '80 x ?' in a loop with an unknown trip count."""
        return runs_text(self.executions, self.is_exact)


def runs_text(executions: int, is_exact: bool) -> str:
    unknown = f'{executions} x ?' if executions != 1 else '?'
    return str(executions) if is_exact else unknown


def ring_bytes(kind: str, n_bytes: int, group_size: int) -> int:
    """Bytes that a device sends in a collective, rounded up.

    `n_bytes` is the size of an all-gather's result, or of another collective's operand. Uses
    the bandwidth terms of ring algorithms, from Thakur, Rabenseifner, Gropp: "Optimization of
    Collective Communication Operations in MPICH", 2005. An all-gather, reduce-scatter or
    all-to-all in groups of n sends (n-1)/n of the array; an all-reduce sends twice that.
    """
    rounds = 2 if kind == 'all-reduce' else 1
    return -(-rounds * n_bytes * (group_size - 1) // group_size)
