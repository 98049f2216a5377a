"""Counts the floating-point operations of an optimized HLO program.

XLA's cost analysis counts a loop body once. This module counts the matrix products and convolutions
of every iteration, including matrix-vector products that XLA writes as multiply and reduce. It
ignores elementwise operations and other reductions, which have few flops.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from .find_collectives import count_executions, user_with_source
from .graph import Graph, Node
from .opcodes import COPIES
from .queries import strip
from .text import HloModule, Instruction, LineErrors


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, a convolution, or a kernel that declares its flops.

    Attributes:
        flops: floating-point operations of one execution, on each device.
        executions, is_exact: see `count_executions`.
        dtype: the dtype of its first operand, such as 'bf16'.
        source: the source line, such as 'model.py:12'.
        column: the column in that line, from 1; 0 if it is unknown.
        in_branch: whether it is in a branch of a conditional.
    """

    flops: int
    executions: int
    is_exact: bool
    dtype: str
    source: str | None
    column: int
    op_name: str
    in_branch: bool = False

    @property
    def total(self) -> int:
        return self.flops * self.executions


@dataclass(frozen=True, slots=True)
class ProductRow:
    """The flops of one source line in one dtype, in the forward or the backward pass.

    Attributes:
        flops: floating-point operations of a device in one run, in matmuls, convolutions, and
            kernels that declare their flops. All loop iterations count.
        dtype: the dtype of the first operand, as in HLO: 'bf16'.
        is_backward: whether these operations belong to the backward pass.
        source: the source line, such as 'model.py:12', or None.
        column: the column in that line, from 1; 0 if it is unknown.
        at_least: whether they are in a loop whose trip count is unknown and counts as 1.
        in_branch: whether they are in a branch of a conditional. Totals include all branches.
    """

    flops: int
    dtype: str
    is_backward: bool
    source: str | None
    column: int
    at_least: bool
    in_branch: bool = False


def product_rows(graph: Graph) -> tuple[ProductRow, ...]:
    """Adds up the flops of products that agree in all other fields of `ProductRow`."""
    flops: Counter[tuple[str, bool, str | None, int, bool, bool]] = Counter()
    for product in find_products(graph):
        is_backward, at_least = 'transpose(' in product.op_name, not product.is_exact
        place = product.source, product.column
        flops[product.dtype, is_backward, *place, at_least, product.in_branch] += product.total
    return tuple(ProductRow(n, *key) for key, n in flops.most_common())


def find_products(graph: Graph) -> Iterator[Product]:
    """Finds the matrix products, the convolutions, and the kernels that declare their flops.

    >>> from einshard._program.hlo.flops import find_products
    >>> from einshard._program.hlo.graph import Graph
    >>> from einshard._program.hlo.text import HloModule
    >>> text = '''HloModule jit_f
    ...
    ... ENTRY %main (x: f32[2,8], w: f32[8,4]) -> f32[2,4] {
    ...   %x = f32[2,8]{1,0} parameter(0)
    ...   %w = f32[8,4]{1,0} parameter(1)
    ...   ROOT %y = f32[2,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }
    ... '''
    >>> [product.total for product in find_products(Graph(HloModule(text)))]  # 2 * 2 * 8 * 4
    [128]
    """
    outputs = set(graph.outputs)
    for node in graph.nodes:
        if node.opcode not in ('convolution', 'custom-call', 'dot', 'reduce'):
            continue
        with LineErrors(graph.program) as errors:
            errors.op = node.op
            flops = flops_of(node)
            if flops and node.opcode in ('convolution', 'dot'):
                flops //= _expansion(outputs, node)
            if not flops:
                continue
            op = _with_source(graph.program, node)
            span = graph.program.span(op)
            executions, is_exact = count_executions(node)
        yield Product(
            flops=flops,
            executions=executions,
            is_exact=is_exact,
            dtype=node.inputs[0].array.dtype if node.inputs else '',
            source=span.text if span else None,
            column=span.column if span else 0,
            op_name=op.op_name,
            in_branch=node.scope.in_branch,
        )


def _with_source(program: HloModule, node: Node) -> Instruction:
    """Returns the op of a node, its fusion or a consumer: the first with a source line, if any."""
    call = node.scope.op
    fusions = [call] if call is not None and call.opcode == 'fusion' else []
    for op in (node.op, *fusions):
        if program.span(op) is not None:
            return op
    return user_with_source(program, node) or (fusions[0] if fusions else node.op)


def flops_of(node: Node) -> int:
    if node.opcode == 'dot':
        contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', node.attributes)
        return _dot_flops(node, contracted[1] if contracted else '')
    if node.opcode == 'convolution':
        return _convolution_flops(node)
    if node.opcode == 'reduce':
        return _reduce_flops(node)
    return _custom_call_flops(node) if node.opcode == 'custom-call' else 0


def _dot_flops(node: Node, contracted: str) -> int:
    """`contracted` lists the contracted axes of the left operand, such as '0,2'."""
    left = node.inputs[0].array
    sizes = [left.shape[int(axis)] for axis in re.findall(r'\d+', contracted)]
    # a complex multiply-add takes 4 real multiplications and 4 real additions
    per_term = 8 if left.dtype in ('c64', 'c128') else 2
    return per_term * prod(node.array.shape) * prod(sizes)


def _reduce_flops(node: Node) -> int:
    """Counts the flops of a matrix-vector product that XLA wrote as a multiply and a reduce."""
    if not node.op.op_name.endswith('/dot_general'):
        return 0
    terms = strip(node.inputs[0])
    return 2 * prod(terms.array.shape) if terms.opcode == 'multiply' else 0


_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')  # cuBLAS calls
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')  # Pallas kernels


def _custom_call_flops(node: Node) -> int:
    config = node.op.config
    if contracted := _CONTRACTED.search(config):
        return _dot_flops(node, contracted[1])
    if 'custom_call_target="__cudnn$conv' in config:
        return _convolution_flops(node)
    estimate = _ESTIMATE.search(config)
    return int(estimate[1]) if estimate else 0


def _expansion(outputs: Collection[Node], node: Node) -> int:
    """Returns how often the CPU backend computes the elements of a convolution that it needs.

    It has no batch groups, as in weight gradients of depthwise convolutions. For n groups, it
    computes the elements of all pairs of groups, masks all but 1/n, and sums over the masked axis.
    The other backends compute only the groups, and CPUs stand in for them.
    """
    while len(node.users) == 1 and node not in outputs:
        (user,) = node.users
        if user.opcode in ('reduce', 'reduce-window'):
            is_own = user.op.op_name.endswith('/conv_general_dilated')  # not a sum by the user
            return prod(node.array.shape) // prod(user.array.shape) if is_own else 1
        if user.opcode != 'select' and user.opcode not in COPIES:
            return 1
        node = user
    return 1


# --- convolutions -------------------------------------------------------------------------------

_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')


def _convolution_flops(node: Node) -> int:
    """Counts 2 flops for each product of a kernel element and an input element, without padding.

    On TPU, XLA writes matrix products as convolutions, too. Batch axes become padded spatial axes.
    """
    labels = _LABELS.search(node.attributes)
    if labels is None:
        return 0
    inputs, kernel, output = (
        dict(zip(names, shape, strict=False))
        for names, shape in zip(labels.groups(), _shapes(node), strict=True)
    )
    window = re.search(r'window=\{([^}]*)\}', node.attributes)
    fields = dict(field.split('=') for field in window[1].split()) if window else {}
    counts = [
        _count_pairs(
            inputs[axis],
            kernel[axis],
            output[axis],
            *(_field(fields, name, int(axis), default) for name, default in _FIELDS),
        )
        for axis in inputs
        if axis.isdecimal()  # spatial axes have numbers
    ]
    groups = re.search(r'batch_group_count=(\d+)', node.attributes)
    batch = inputs['b'] // (int(groups[1]) if groups else 1)
    return 2 * batch * kernel['i'] * kernel['o'] * prod(counts)


def _shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a convolution in the order of `dim_labels`: input, kernel, output.

    cuDNN labels gradients like the forward convolution, with the result as the input or kernel.
    """
    operands = [read.array.shape for read in node.inputs[:2]]
    result = node.array.shape
    if '$convBackwardInput' in node.attributes:
        return result, operands[1], operands[0]
    if '$convBackwardFilter' in node.attributes:
        return operands[0], result, operands[1]
    return operands[0], operands[1], result


_FIELDS = (('stride', 1), ('pad', 0), ('lhs_dilate', 1), ('rhs_dilate', 1))


def _field(fields: dict[str, str], name: str, axis: int, default: int) -> int:
    """Reads the number for `axis` in a field: for 'pad=3_2x0_1', 3 on axis 0, and 0 on axis 1."""
    values = fields[name].split('x') if name in fields else []
    return int(values[axis].partition('_')[0]) if axis < len(values) else default


@functools.lru_cache(maxsize=256)
def _count_pairs(
    inputs: int,
    kernel: int,
    output: int,
    stride: int,
    padding: int,
    input_dilation: int,
    kernel_dilation: int,
) -> int:
    """Counts the (output, kernel) index pairs on one axis that read an input element."""
    count = 0
    for i in range(kernel):
        for j in range(output):
            position = j * stride - padding + i * kernel_dilation
            count += position % input_dilation == 0 and 0 <= position // input_dilation < inputs
    return count
