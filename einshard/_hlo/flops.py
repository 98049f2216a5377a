"""Counts the floating-point operations of an optimized HLO program.

XLA's cost analysis counts a loop body once. This module counts the matrix products and convolutions
of every iteration, including matrix-vector products that XLA writes as multiply and reduce. It
ignores elementwise operations and other reductions, which have few flops.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .loops import Executions
from .module import Instruction, Module, Site
from .origins import user_with_source


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, a convolution, or a kernel that declares its flops.

    Attributes:
        flops: floating-point operations of one execution, on each device.
        executions: see `Executions.of`.
        dtype: the dtype of its first operand, such as 'bf16'.
        source: the source line, such as 'model.py:12'.
        in_branch: whether it is in a branch of a conditional.
    """

    flops: int
    executions: int | None
    dtype: str
    source: str | None
    op_name: str
    in_branch: bool = False

    @property
    def total(self) -> int:
        return self.flops * (1 if self.executions is None else self.executions)


def find_products(module: Module) -> Iterator[Product]:
    """Finds the matrix products, the convolutions, and the kernels that declare their flops.

    >>> from einshard._hlo.flops import find_products
    >>> from einshard._hlo.module import Module
    >>> text = '''HloModule jit_f
    ...
    ... ENTRY %main (x: f32[2,8], w: f32[8,4]) -> f32[2,4] {
    ...   %x = f32[2,8]{1,0} parameter(0)
    ...   %w = f32[8,4]{1,0} parameter(1)
    ...   ROOT %y = f32[2,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }
    ... '''
    >>> [product.total for product in find_products(Module(text))]  # 2 * 2 * 8 * 4
    [128]
    """
    executions = Executions(module)
    for site in module.find(' dot(', ' convolution(', ' custom-call(', ' reduce('):
        flops = _flops(site)
        if flops and site.op.opcode in ('convolution', 'dot'):
            flops //= _expansion(module, site)
        if not flops or module.path(site.comp) is None:
            continue
        op = _with_source(module, site)
        operands = [array for name in site.op.operands for array in site.comp[name].results]
        yield Product(
            flops=flops,
            executions=executions.of(site.comp),
            dtype=operands[0].dtype if operands else '',
            source=module.source(op),
            op_name=op.op_name,
            in_branch=module.is_in_branch(site.comp),
        )


def _with_source(module: Module, site: Site) -> Instruction:
    """Returns the op at `site`, its fusion or a consumer: the first with a source line, if any."""
    if module.source(site.op) is not None:
        return site.op
    fusions = [call for call in module.call_sites(site.comp) if call.op.opcode == 'fusion']
    outer = fusions[0] if fusions else site
    if module.source(outer.op) is not None:
        return outer.op
    return user_with_source(module, outer.comp, outer.op.name) or outer.op


def _flops(site: Site) -> int:
    op = site.op
    if op.opcode == 'dot':
        contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', op.attributes)
        return _dot_flops(site, contracted[1] if contracted else '')
    if op.opcode == 'convolution':
        return _convolution_flops(site)
    if op.opcode == 'reduce':
        return _reduce_flops(site)
    return _custom_call_flops(site) if op.opcode == 'custom-call' else 0


def _dot_flops(site: Site, contracted: str) -> int:
    """`contracted` lists the contracted axes of the left operand, such as '0,2'."""
    left = site.comp[site.op.operands[0]].results[0]
    sizes = [left.shape[int(axis)] for axis in re.findall(r'\d+', contracted)]
    # a complex multiply-add takes 4 real multiplications and 4 real additions
    per_term = 8 if left.dtype in ('c64', 'c128') else 2
    return per_term * prod(site.op.results[0].shape) * prod(sizes)


def _reduce_flops(site: Site) -> int:
    """Counts the flops of a matrix-vector product that XLA wrote as a multiply and a reduce."""
    if not site.op.op_name.endswith('/dot_general'):
        return 0
    op = site.comp[site.op.operands[0]]
    while op.opcode in ('bitcast', 'convert', 'copy', 'transpose'):
        op = site.comp[op.operands[0]]
    return 2 * prod(op.results[0].shape) if op.opcode == 'multiply' else 0


_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')  # cuBLAS calls
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')  # Pallas kernels


def _custom_call_flops(site: Site) -> int:
    config = site.op.attributes + site.op.metadata
    if contracted := _CONTRACTED.search(config):
        return _dot_flops(site, contracted[1])
    if 'custom_call_target="__cudnn$conv' in config:
        return _convolution_flops(site)
    estimate = _ESTIMATE.search(config)
    return int(estimate[1]) if estimate else 0


_MASKS_AND_MOVES = frozenset(('bitcast', 'convert', 'copy', 'reshape', 'select', 'transpose'))


def _expansion(module: Module, site: Site) -> int:
    """Returns how often the CPU backend computes the elements of a convolution that it needs.

    It has no batch groups, as in weight gradients of depthwise convolutions. For n groups, it
    computes the elements of all pairs of groups, masks all but 1/n, and sums over the masked axis.
    The other backends compute only the groups, and CPUs stand in for them.
    """
    comp, name = site.comp, site.op.name
    for _ in range(16):
        if name == comp.root.name:
            fusions = [call for call in module.call_sites(comp) if call.op.opcode == 'fusion']
            if not fusions:
                return 1
            comp, name = fusions[0].comp, fusions[0].op.name
            continue
        users = comp.users(name)
        if len(users) != 1:
            return 1
        (user,) = users
        if user.opcode in ('reduce', 'reduce-window'):
            if not user.op_name.endswith('/conv_general_dilated'):  # a sum by the user
                return 1
            (masked,), (kept, *_) = comp[name].results, user.results
            return prod(masked.shape) // prod(kept.shape)
        called = module.called(user) if user.opcode == 'fusion' else None
        if called is not None:
            comp, name = called, called.parameter(user.operands.index(name))
        elif user.opcode in _MASKS_AND_MOVES:
            name = user.name
        else:
            return 1
    return 1


# --- convolutions -------------------------------------------------------------------------------

_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')


def _convolution_flops(site: Site) -> int:
    """Counts 2 flops for each product of a kernel element and an input element, without padding.

    On TPU, XLA writes matrix products as convolutions, too. Batch axes become padded spatial axes.
    """
    op = site.op
    labels = _LABELS.search(op.attributes)
    if labels is None:
        return 0
    inputs, kernel, output = (
        dict(zip(names, shape, strict=False))
        for names, shape in zip(labels.groups(), _shapes(site), strict=True)
    )
    window = re.search(r'window=\{([^}]*)\}', op.attributes)
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
    groups = re.search(r'batch_group_count=(\d+)', op.attributes)
    batch = inputs['b'] // (int(groups[1]) if groups else 1)
    return 2 * batch * kernel['i'] * kernel['o'] * prod(counts)


def _shapes(site: Site) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a convolution in the order of `dim_labels`: input, kernel, output.

    cuDNN labels gradients like the forward convolution, with the result as the input or kernel.
    """
    operands = [site.comp[name].results[0].shape for name in site.op.operands[:2]]
    result = site.op.results[0].shape
    if '$convBackwardInput' in site.op.attributes:
        return result, operands[1], operands[0]
    if '$convBackwardFilter' in site.op.attributes:
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
