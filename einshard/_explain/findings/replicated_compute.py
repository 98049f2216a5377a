"""Finds matmuls that several devices repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ..._text import first_of, format_flops, short_source
from ..report_rows import Finding
from .activations import constrain_lookup, lookup_in
from .expressions import expression_of, shard_text
from .facts import Facts
from .sharded_loops import looped_dims, suggestion_for_batch
from .values import Axis, Product, Value, is_free_axis, weight_and_data

# the smallest ratios that are reported
_MIN_RATIO = 1.5  # flops of all devices / flops before partitioning
_MIN_WASTED = 0.05  # wasted flops / all flops of a device; the router of an MoE layer wastes less


class _RepeatedLine(NamedTuple):
    """A source line whose matmuls are the same on several devices."""

    line: str
    n_repeats: float  # the number of devices that compute a matmul, on average
    is_count: bool  # whether it is that number for all matmuls of the line
    wasted: int  # flops of a device beyond its share of the flops before partitioning
    products: Sequence[Product]  # of the forward pass, or else the backward pass; largest first
    is_part: bool  # whether the line has other matmuls


def replicated_compute(facts: Facts) -> Iterator[Finding]:
    """Reports lines whose matmuls take more flops on all devices together than before partitioning.

    Both counts include rematerialization. Omits lines in loops of unknown trip count and in
    conditionals.
    """
    if facts.trace is None or facts.mesh is None:
        return
    total = sum(row.flops for row in facts.products)
    groups: dict[tuple[float, bool, tuple[str, ...]], list[_RepeatedLine]] = {}
    for repeated in _repeated_lines(facts):
        unused = _unused_mesh_axes(facts, repeated.products[0])
        key = repeated.n_repeats, repeated.is_count, unused
        groups.setdefault(key, []).append(repeated)
    has_cause = facts.has_found('missing constraint', 'sharded loop axis')
    for (n_repeats, is_count, unused), lines in groups.items():
        wasted = sum(repeated.wasted for repeated in lines)
        if wasted < _MIN_WASTED * total or (not unused and has_cause):
            continue
        texts = first_of([short_source(repeated.line) for repeated in lines], 4)
        repeats = f'{n_repeats:.0f} devices compute the same matmuls in {texts}'
        if not is_count:
            repeats = f'on average, {n_repeats} devices compute the same matmul in {texts}'
        elif any(repeated.is_part for repeated in lines):
            repeats = f'{n_repeats:.0f} devices compute the same results of some matmuls in {texts}'
        yield Finding(
            'replicated compute',
            f'{repeats}: {format_flops(wasted)} of redundant work on each device in one run',
            max(lines, key=lambda repeated: repeated.wasted).line,
            0,
            _suggestion(facts, unused, lines),
            tuple(repeated.line for repeated in lines),
        )


def _unused_mesh_axes(facts: Facts, product: Product) -> tuple[str, ...]:
    used = product.left.mesh_axes | product.right.mesh_axes
    return tuple(name for name in _mesh_axes(facts) if name not in used)


def _mesh_axes(facts: Facts) -> list[str]:
    assert facts.mesh is not None
    return [str(name) for name, size in facts.mesh.shape.items() if size > 1]


def _repeated_lines(facts: Facts) -> Iterator[_RepeatedLine]:
    assert facts.trace is not None
    by_line: dict[str, list[Product]] = {}
    total = sum(row.flops for row in facts.products)
    for product in facts.trace.products:
        if not product.is_lookup:
            by_line.setdefault(product.line, []).append(product)
    compiled: Counter[str] = Counter()
    unknown = {''}
    for row in facts.products:
        compiled[row.source or ''] += row.flops
        if row.at_least or row.in_branch:
            unknown.add(row.source or '')
    for line, products in by_line.items():
        flops = [product.flops for product in products if product.flops is not None]
        # XLA pads small convolutions on TPU, and elsewhere makes dense convolutions of some grouped
        # ones; both add flops
        on_tpu = facts.platform == 'tpu'
        has_more_flops = any(p.is_convolution if on_tpu else p.is_grouped for p in products)
        if line in unknown or len(flops) < len(products) or has_more_flops:
            continue
        ratio = compiled[line] * facts.n_devices / max(sum(flops), 1)
        wasted = compiled[line] - sum(flops) / facts.n_devices
        is_part = False
        if ratio < _MIN_RATIO and wasted >= _MIN_WASTED * total:
            # of the many matmuls of a helper's line, those that repeat may be few
            n, products = _repeated_products(facts, products, wasted)
            is_part, ratio = n > 1, n
        # with a larger ratio, XLA has added flops
        if ratio >= _MIN_RATIO and round(ratio) <= facts.n_devices:
            forward = [product for product in products if not product.is_backward] or [*products]
            forward.sort(key=lambda product: -(product.flops or 0))
            # an average over matmuls that different numbers of devices repeat may be any number
            unused = {_unused_mesh_axes(facts, product) for product in products}
            n = round(ratio)
            is_count = abs(ratio - n) < 0.01 * n and facts.n_devices % n == 0 and len(unused) == 1
            n_repeats = n if is_count else round(ratio, 1)
            yield _RepeatedLine(line, n_repeats, is_count, int(wasted), forward, is_part)


def _repeated_products(
    facts: Facts, products: Sequence[Product], wasted: float
) -> tuple[int, Sequence[Product]]:
    """Returns the matmuls of a line that some mesh axes do not shard, and the size of these axes.

    Returns (1, products) if their flops are not what the compiled line wastes.
    """
    by_size: dict[int, list[Product]] = {}
    for product in products:
        unused = _unused_mesh_axes(facts, product)
        n = prod(facts.mesh.shape[name] for name in unused) if facts.mesh is not None else 1
        by_size.setdefault(n, []).append(product)
    by_size.pop(1, None)
    for n, several in by_size.items():
        expected = sum(p.flops or 0 for p in several) * (n - 1) / facts.n_devices
        if len(by_size) == 1 and abs(expected - wasted) < 0.1 * wasted:
            return n, several
    return 1, products


def _suggestion(facts: Facts, unused: tuple[str, ...], lines: Sequence[_RepeatedLine]) -> str:
    """Suggests a change after which each device computes a part of the matmuls, or returns ''.

    `unused` are the mesh axes that shard no operand of the largest matmul in each line.
    """
    if not unused:
        return _constrain_result(facts, lines[0])
    if change := suggestion_for_batch(facts, unused):
        return change
    if not any(set(unused) & value.mesh_axes for value in facts.values):
        return _shard_batch(facts, unused, lines[0].products[0])
    return _shard_weights(facts, unused, lines)


def _constrain_result(facts: Facts, repeated: _RepeatedLine) -> str:
    """Suggests constraining the result of a matmul whose operands are sharded over all mesh axes.

    If the compiler gathers an operand, suggests sharding the batch instead. Returns '' if neither
    is sure to help.
    """
    assert facts.mesh is not None
    if any(_unused_mesh_axes(facts, product) for product in repeated.products):
        return ''  # the line has other matmuls, whose results the constraint may not fit
    product = repeated.products[0]
    # along mesh axes that shard only a gathered operand, such as a weight in FSDP, devices compute
    # the same result
    used = _mesh_axes_of_result(product)
    if unused := tuple(name for name in _mesh_axes(facts) if name not in used):
        _, data = weight_and_data(product) or (None, None)
        if data is not None and data.mesh_axes & set(unused):
            return _shard_lookup(facts, unused, data)
        return _shard_batch(facts, unused, product)
    return facts.constrain('the result of the matmul', repeated.line, product.result.axes)


def _shard_lookup(facts: Facts, unused: tuple[str, ...], data: Value) -> str:
    """Suggests sharding the batch of a lookup over mesh axes that it inherits from the table.

    Returns '' if they shard the data of the matmul for another reason, or if the batch is not
    divisible.
    """
    assert facts.mesh is not None
    origins = {axis.origin for axis in data.axes if set(unused) & set(axis.mesh_axes)}
    table = origins.pop()
    lookup = lookup_in(facts, table) if isinstance(table, int) and not origins else None
    if lookup is None or not set(unused) <= lookup.result.mesh_axes:
        return ''
    batch, *rest = (axis.without_mesh_axes(unused) for axis in lookup.result.axes)
    batch = replace(batch, mesh_axes=(*batch.mesh_axes, *unused))
    if lookup.aval.shape[0] % prod(facts.mesh.shape[name] for name in batch.mesh_axes):
        return ''
    return constrain_lookup(facts, lookup, [batch, *rest])


def _mesh_axes_of_result(product: Product) -> set[str]:
    """Returns the mesh axes over which the result of a matmul is sharded or partially summed."""
    left = {name for i, _ in product.contracted for name in product.left.axes[i].mesh_axes}
    right = {name for _, j in product.contracted for name in product.right.axes[j].mesh_axes}
    return product.result.mesh_axes | (left & right)


def _shard_weights(facts: Facts, unused: tuple[str, ...], lines: Sequence[_RepeatedLine]) -> str:
    assert facts.mesh is not None
    sharded_names: set[str] = set()
    placements: dict[str, str] = {}
    explained = facts.explained  # another finding has a suggestion for these arrays
    for repeated in lines:
        for product in repeated.products:
            weight, _ = weight_and_data(product) or (None, None)
            if weight is None or weight.argument is None:
                continue
            if facts.arguments[weight.argument].path in explained:
                continue
            axis = _axis_to_shard(facts, product, weight, unused, sharded_names)
            if axis is None:
                continue
            sharded_names.add(axis.name)
            axes = [
                replace(other, mesh_axes=unused)
                if other.dim == axis.dim
                else other.without_mesh_axes(unused)
                for other in facts.argument_axes(weight.argument)
            ]
            path = facts.arguments[weight.argument].path
            placements.setdefault(path, expression_of(axes, facts.mesh))
    return shard_text(placements)


def _shard_batch(facts: Facts, added: tuple[str, ...], product: Product) -> str:
    """Suggests sharding a batch also over the mesh axes `added`, or returns ''.

    A batch is the first axis of a data argument that no loop runs over. Chooses the first divisible
    batch among those that are sharded already. If none is sharded, it is the batch that the matmul
    reads.
    """
    assert facts.mesh is not None
    looped = looped_dims(facts)
    data: list[tuple[int, int]] = []  # (argument, batch axis)
    for i, value in enumerate(facts.values):
        dims = [dim for dim in range(len(value.axes)) if (i, dim) not in looped]
        if value.is_data and dims:
            data.append((i, dims[0]))
    sharded = [(i, dim) for i, dim in data if facts.argument_axes(i)[dim].mesh_axes]
    for i, dim in sharded or [pair for pair in data if is_free_axis(product, *pair)]:
        value, array = facts.values[i], facts.arguments[i]
        batch = value.axes[dim]
        mesh_axes = (*batch.mesh_axes, *(name for name in added if name not in value.mesh_axes))
        n_shards = prod(facts.mesh.shape[name] for name in mesh_axes)
        if mesh_axes != batch.mesh_axes and array.shape[dim] % n_shards == 0:
            axes = [*value.axes]
            axes[dim] = replace(batch, mesh_axes=mesh_axes)
            return f"shard {array.path} with '{expression_of(axes, facts.mesh)}'"
    return ''


def _axis_to_shard(
    facts: Facts,
    product: Product,
    weight: Value,
    unused: tuple[str, ...],
    sharded_names: Collection[str],
) -> Axis | None:
    """Chooses the axis of a weight to shard over the mesh axes `unused`.

    First choice: a contracted axis with a name in `sharded_names`, the axes that the suggestion
    already shards in other weights, as in the second matmul of an MLP. Second choice: a free axis.
    """
    assert facts.mesh is not None
    assert weight.argument is not None
    operand_index = 0 if product.left is weight else 1
    n_shards = prod(facts.mesh.shape[name] for name in unused)
    shape = facts.arguments[weight.argument].shape
    fits = [
        axis.dim >= 0 and not axis.mesh_axes and shape[axis.dim] % n_shards == 0
        for axis in weight.axes
    ]
    contracted = [pair[operand_index] for pair in product.contracted]
    batch = [pair[operand_index] for pair in product.batch]
    for i in contracted:
        if fits[i] and weight.axes[i].name in sharded_names:
            return weight.axes[i]
    # an axis without a name may be contracted with a sharded axis, and would then be gathered
    if sharded_names and not all(axis.name for axis in weight.axes):
        return None
    for i, axis in enumerate(weight.axes):
        if fits[i] and i not in contracted and i not in batch:
            return axis
    return None
