"""Finds products that several devices repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ..._text import first_of, format_flops, short_source
from ..fold_layers import fold_paths
from ..report_rows import Finding
from .activations import missing_constraint, weight_and_data
from .expressions import expression_of
from .facts import Facts
from .values import Axis, Product, Value

_REPEATED = 1.5  # least ratio of the flops of all devices to those of the traced function
_LARGE = 0.05  # fraction of all flops; less, such as in the router of experts, is not reported


class _RepeatedLine(NamedTuple):
    """A source line whose products are the same on several devices."""

    line: str
    wasted: int  # flops of a device beyond its share of the flops of the traced function
    products: Sequence[Product]  # of the forward pass if it has any; the largest first


def replicated_compute(facts: Facts) -> Iterator[Finding]:
    """Reports lines whose products take more flops on all devices than before partitioning.

    Rematerialization does not matter, because it is in both counts. Lines with loops of unknown
    trip count are omitted.
    """
    if facts.trace is None or facts.mesh is None:
        return
    total = sum(row.flops for row in facts.products)
    groups: dict[tuple[int, tuple[str, ...]], list[_RepeatedLine]] = {}
    for times, line in _repeated_lines(facts):
        unused = _unused_mesh_axes(facts, line.products[0])
        groups.setdefault((times, unused), []).append(line)
    for (times, unused), lines in groups.items():
        wasted = sum(line.wasted for line in lines)
        if wasted < _LARGE * total or (not unused and any(missing_constraint(facts))):
            continue
        texts = first_of([short_source(line.line) for line in lines], 4)
        yield Finding(
            'replicated compute',
            f'{times} devices repeat the products in {texts}: {format_flops(wasted)} more on each '
            'device in one run than if each computed a part',
            max(lines, key=lambda line: line.wasted).line,
            0,
            _suggestion(facts, unused, lines),
        )


def _unused_mesh_axes(facts: Facts, product: Product) -> tuple[str, ...]:
    """Returns the mesh axes that shard no operand of a product."""
    used = product.left.mesh_axes | product.right.mesh_axes
    return tuple(name for name in _mesh_axes(facts) if name not in used)


def _mesh_axes(facts: Facts) -> list[str]:
    """Returns the mesh axes of size 2 or more."""
    assert facts.mesh is not None
    return [str(name) for name, size in facts.mesh.shape.items() if size > 1]


def _repeated_lines(facts: Facts) -> Iterator[tuple[int, _RepeatedLine]]:
    """Yields (number of devices that compute it, line) for each repeated line, in program order."""
    assert facts.trace is not None
    by_line: dict[str, list[Product]] = {}
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
        # TPUs pad small convolutions
        is_padded = facts.platform == 'tpu' and any(p.is_convolution for p in products)
        if line in unknown or len(flops) < len(products) or is_padded:
            continue
        times = compiled[line] * facts.n_devices / max(sum(flops), 1)
        wasted = compiled[line] - sum(flops) / facts.n_devices
        if times >= _REPEATED:
            forward = [product for product in products if not product.is_backward] or products
            forward.sort(key=lambda product: -(product.flops or 0))
            yield round(times), _RepeatedLine(line, int(wasted), forward)


def _suggestion(facts: Facts, unused: tuple[str, ...], lines: Sequence[_RepeatedLine]) -> str:
    """Suggests a change after which each device computes a part of the products; '' if unknown.

    If no argument is sharded over the mesh axes in `unused`, the change is to shard the batch over
    them; else, to shard the weights. Without unused mesh axes, it is a constraint on the result.

    Args:
        facts: the program.
        unused: the mesh axes that shard no operand of the products.
        lines: the lines of the products.
    """
    if not unused:
        return _constrain_result(facts, lines[0])
    if not any(set(unused) & value.mesh_axes for value in facts.values):
        return _shard_batch(facts, unused, lines[0].products[0])
    return _shard_weights(facts, unused, lines)


def _constrain_result(facts: Facts, line: _RepeatedLine) -> str:
    """Suggests a constraint on the result of a product that uses all mesh axes; '' if unsure.

    If an operand is gathered, suggests sharding the batch instead.
    """
    assert facts.mesh is not None
    if any(_unused_mesh_axes(facts, product) for product in line.products):
        return ''  # the line has other products, which the constraint may not fit
    product = line.products[0]
    # if the compiler gathers an operand, as it gathers weights in FSDP, then devices along the mesh
    # axes that shard only this operand compute the same
    split = _mesh_axes_of_result(product)
    if gathered := tuple(name for name in _mesh_axes(facts) if name not in split):
        return _shard_batch(facts, gathered, product)
    placement = expression_of(product.result.axes, facts.mesh)
    return f"constrain the result of the product in {short_source(line.line)}: '{placement}'"


def _mesh_axes_of_result(product: Product) -> set[str]:
    """Returns the mesh axes over which the result is sharded, or is a partial sum."""
    sides = zip(*product.contracted, strict=True) if product.contracted else ((), ())
    left, right = (
        {name for i in indices for name in value.axes[i].mesh_axes}
        for value, indices in zip((product.left, product.right), sides, strict=True)
    )
    return product.result.mesh_axes | (left & right)


def _shard_weights(facts: Facts, unused: tuple[str, ...], lines: Sequence[_RepeatedLine]) -> str:
    """Suggests sharding the weights of the products over the mesh axes `unused`; '' if none fit."""
    assert facts.mesh is not None
    names: set[str] = set()  # array axes that the suggestion shards
    placements: dict[str, str] = {}
    for line in lines:
        for product in line.products:
            sides = weight_and_data(product)
            if sides is None or sides[0].argument is None:
                continue
            axis = _axis_to_shard(facts, product, sides[0], unused, names)
            if axis is None:
                continue
            names.add(axis.name)
            axes = [
                replace(other, mesh_axes=unused) if other.dim == axis.dim else other
                for other in facts.argument_axes(sides[0].argument)
            ]
            path = facts.arguments[sides[0].argument].path
            placements.setdefault(path, expression_of(axes, facts.mesh))
    return _placements_text(placements)


def _shard_batch(facts: Facts, unused: tuple[str, ...], product: Product) -> str:
    """Suggests sharding the batch over the mesh axes `unused` too; '' if no batch is divisible.

    The batch is the first axis of an argument that is data and sharded along its first axis. If
    there is none, it is the first axis of the data in the product.
    """
    assert facts.mesh is not None
    data = [(i, value) for i, value in enumerate(facts.values) if value.is_data and value.axes]
    sides = weight_and_data(product)
    operands = [(i, value) for i, value in data if sides and sides[1].argument == i]
    for i, value in [pair for pair in data if pair[1].axes[0].mesh_axes] or operands:
        batch = value.axes[0]
        mesh_axes = (*batch.mesh_axes, *(name for name in unused if name not in value.mesh_axes))
        array, n_shards = facts.arguments[i], prod(facts.mesh.shape[name] for name in mesh_axes)
        if mesh_axes != batch.mesh_axes and array.shape[0] % n_shards == 0:
            axes = (replace(batch, mesh_axes=mesh_axes), *value.axes[1:])
            return f"shard {array.path} with '{expression_of(axes, facts.mesh)}'"
    return ''


def _axis_to_shard(
    facts: Facts,
    product: Product,
    weight: Value,
    unused: tuple[str, ...],
    names: Collection[str],
) -> Axis | None:
    """Chooses the axis of a weight to shard over the mesh axes `unused`.

    `names` are the axes along which the suggestion shards other weights. First choice is an axis in
    `names` that is contracted here, as in the second product of an MLP, because the data is sharded
    along it then. Second choice is a free axis of the product. None if no axis fits.
    """
    assert facts.mesh is not None
    assert weight.argument is not None
    side = 0 if product.left is weight else 1
    n_shards = prod(facts.mesh.shape[name] for name in unused)
    shape = facts.arguments[weight.argument].shape
    fits = [
        axis.dim >= 0 and not axis.mesh_axes and shape[axis.dim] % n_shards == 0
        for axis in weight.axes
    ]
    contracted = [pair[side] for pair in product.contracted]
    batch = [pair[side] for pair in product.batch]
    for i in contracted:
        if fits[i] and weight.axes[i].name in names:
            return weight.axes[i]
    # without names, the data may be sharded along a contracted axis, and would be gathered
    if names and not all(axis.name for axis in weight.axes):
        return None
    for i, axis in enumerate(weight.axes):
        if fits[i] and i not in contracted and i not in batch:
            return axis
    return None


def _placements_text(placements: Mapping[str, str]) -> str:
    by_placement: dict[str, list[str]] = {}
    for path, placement in placements.items():
        by_placement.setdefault(placement, []).append(path)
    texts: list[str] = []
    for placement, paths in by_placement.items():
        texts.append(f"{first_of(fold_paths(paths), 3)} with '{placement}'")
    return f'shard {", ".join(texts)}' if texts else ''
