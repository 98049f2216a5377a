"""The rows of a report: arrays, collectives, flops, findings."""

from __future__ import annotations

from dataclasses import dataclass

from .._text import deprecated_alias, shape_text


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """An argument, result or intermediate, with its placement.

    Attributes:
        path: 'params/w' for an argument, or 'result/0' for a result. For an intermediate, its name
            in the program.
        shape: the global shape.
        dtype: such as 'float32'.
        placement: an expression, or a description such as 'not used'. The expression has the axis
            names of the spec, if there is one.
        bytes: bytes per device, or 0 if the program does not use the array.
        sharded: whether each device holds only a shard, or only one term of a partial sum.
        source: the source line of an intermediate, such as 'model.py:12'. None for others.
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
        """The dtype and global shape, such as 'float32[8,16]'."""
        return f'{self.dtype}{shape_text(self.shape)}'


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A collective of the program.

    Attributes:
        kind: 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
            'ragged-all-to-all', 'collective-broadcast', or 'custom-call' for a kernel that
            communicates, such as a Pallas kernel on TPU.
        arrays: the results of an all-gather, the operands of other kinds, as in HLO: 'f32[8,16]'.
        bytes: bytes of `arrays`, per device.
        group_size: the number of devices in each group.
        groups: the number of groups, or 0 for a custom call. Programs of JAX 0.8 with a newer
            libtpu do not list groups: `groups` is 0, and `network_bytes` assumes one group.
        along: the mesh axes that it runs along. For a permute, the mesh axes along which senders
            and receivers differ. In expressions with counts, mesh axes have no names: 'b,x' then
            means the mesh axes that shard the array axes b and x, and 'h|k' those that shard h in
            one array and k in another. Empty if unknown.
        executions: how often it runs in one run of the program, or None if it is in a loop with an
            unknown trip count.
        network_bytes: bytes that a device sends per execution, or None for a custom call.
        is_async: whether it can overlap with computation.
        source: the source line, such as 'model.py:12', or None.
        of: the path of the argument that it sends. If it sends no argument, the paths of the
            results computed from what it sends, such as new weights from a gradient.
        op_name: the JAX operation that it comes from.
        role: 'weights', 'gradients' or 'activations', depending on what it sends. In a train step,
            weights are the arguments that the step updates, or all arguments if it updates none. In
            inference, all arguments that are not updated are called weights, even batches. Only
            floating-point arguments count.
        is_backward: whether it sends gradients or belongs to the backward pass, including what
            `jax.checkpoint` computes again.
        axes: the axis names of activations, such as 'b s d', from the einsum or the constraint on
            the source line. If the array could be several arrays of the einsum, or none, then the
            full einsum, such as 'bsd,df->bsf'. Empty if unknown.
        widened: whether the compiled program runs it in float32 although the arrays are bfloat16,
            as XLA does on CPU. `arrays`, `bytes` and `network_bytes` are for bfloat16.
        called_at: the nearest calling line outside helper functions, if `source` is in one.
            Otherwise None.
        in_branch: whether it is in a branch of a conditional. Totals include all branches.
        cause: 'requested' if it comes from a constraint, or from a collective in a `shard_map`;
            'inserted' if the compiler added it; and 'unknown' in other cases, because XLA may have
            dropped the name of a constraint.
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
    role: str = 'activations'
    is_backward: bool = False
    axes: str = ''
    widened: bool = False
    called_at: str | None = None
    in_branch: bool = False
    cause: str = 'unknown'

    parties = deprecated_alias('parties', 'group_size')
    times = deprecated_alias('times', 'executions')

    @property
    def total_bytes(self) -> int:
        """Bytes sent in one run. An unknown trip count counts as 1, a custom call as 0 bytes."""
        return (self.network_bytes or 0) * (1 if self.executions is None else self.executions)


@dataclass(frozen=True, slots=True)
class ProductRow:
    """The flops of one source line in one dtype, in the forward or the backward pass.

    Attributes:
        flops: floating-point operations of a device in one run, in matmuls, convolutions, and
            kernels that declare their flops. All loop iterations count.
        dtype: the dtype of the first operand, as in HLO: 'bf16'.
        is_backward: whether these operations belong to the backward pass.
        source: the source line, such as 'model.py:12', or None.
        at_least: whether they are in a loop whose trip count is unknown and counts as 1.
        in_branch: whether they are in a branch of a conditional. Totals include all branches.
    """

    flops: int
    dtype: str
    is_backward: bool
    source: str | None
    at_least: bool
    in_branch: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A likely mistake in a program, and what to write instead.

    Attributes:
        kind: such as 'missing constraint'; docs/explain.md lists the kinds of `Report.findings`.
        text: a sentence that names the arrays as in the user's code.
        source: the source line, such as 'model.py:12', or None.
        bytes: the bytes per device that the finding is about: those sent in one run, the size of
            the arrays, or the memory that the program needs. 0 if it is not about bytes.
        suggestion: the change to make, as a sentence with the expression to write. Empty if none is
            known.
    """

    kind: str
    text: str
    source: str | None = None
    bytes: int = 0
    suggestion: str = ''
