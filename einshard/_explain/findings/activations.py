"""Finds collectives of activations that another sharding would avoid or make cheaper."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ..._program.cost.contraction import Step, reduce, reshard
from ..._program.hlo.collective import Collective, ring_bytes
from ..._text import first_of, format_bytes
from ..fold_layers import fold_paths
from ..report_rows import Finding
from .expressions import expression_of
from .facts import Facts
from .lines import lines_text
from .sharded_loops import loops_over_batch
from .values import Axis, Product, Value, weight_and_data


class _ProductCollective(NamedTuple):
    """A collective, and a matmul on the same source line.

    Attributes:
        weight: the operand of the matmul that is a weight, or a part of one.
        data: the other operand.
    """

    collective: Collective
    product: Product
    weight: Value
    data: Value

    @property
    def along(self) -> frozenset[str]:
        return self.collective.mesh_axes


def _find_product_collectives(facts: Facts) -> Iterator[_ProductCollective]:
    """Pairs collectives with the matmuls of weights on the same source line.

    Omits collectives of gradients. Yields nothing on a mesh with Explicit axes, because types
    determine the shardings there.
    """
    if facts.trace is None or facts.is_explicit:
        return
    by_line: dict[str, list[Product]] = {}
    for product in facts.trace.products:
        if not (product.in_shard_map or product.is_lookup):
            by_line.setdefault(product.line, []).append(product)
    for collective in facts.unexplained:
        if not collective.mesh_axes or collective.role == 'gradients':
            continue
        for product in by_line.get(collective.source or '', ()):
            operands = weight_and_data(product)
            if operands is not None:
                yield _ProductCollective(collective, product, *operands)


# --- batch --------------------------------------------------------------------------------------


def missing_constraint(facts: Facts) -> Iterator[Finding]:
    """Reports activations sent along the batch's mesh axes, if gathering weights would send less.

    In fully sharded data parallelism (FSDP) without constraints on the activations, the compiler
    may shard the features of the activations like those of the weights, instead of the batch.
    """
    flagged: dict[frozenset[str], list[_ProductCollective]] = {}
    for item in _find_product_collectives(facts):
        # `of` has a path if an argument is gathered, such as a frozen weight
        is_activation = item.collective.role == 'activations' and not item.collective.of
        if is_activation and _is_cheaper_to_gather_weight(facts, item):
            flagged.setdefault(item.along, []).append(item)
    for along, items in flagged.items():
        distinct = {item.collective.name: item for item in items}.values()
        n_bytes = sum(item.collective.total_bytes for item in distinct)
        value = _value_to_constrain(facts, along, items)
        if value is None or facts.mesh is None:
            continue
        line, axes, what = value
        if not any(along & set(axis.mesh_axes) for axis in axes):
            continue
        largest = max(distinct, key=lambda item: item.collective.total_bytes)
        paths = _paths_of(facts, [item.weight for item in items])
        yield Finding(
            'missing constraint',
            f'the compiler sends activations along {largest.collective.along}, which shards the '
            f'batch, instead of gathering the weights {paths}: {format_bytes(n_bytes)} in '
            f'{lines_text(item.collective for item in distinct)}',
            line,
            n_bytes,
            facts.constrain(what, line, axes),
            _names(distinct),
        )


def _is_cheaper_to_gather_weight(facts: Facts, item: _ProductCollective) -> bool:
    """Whether a collective along mesh axes of the batch sends more than gathering the weight."""
    batch = item.data.axes[0] if item.data.axes else Axis()
    # the batch's sharding comes from an input or a constraint, not from a weight
    is_batch = facts.is_data(batch.origin) or isinstance(batch.origin, str)
    if not is_batch or not item.along <= set(batch.mesh_axes):
        return False
    _, weight_index = _operand_indices(item)
    batch_dims = {pair[weight_index] for pair in item.product.batch}
    is_weight_sharded = any(
        i not in batch_dims and item.along & set(axis.mesh_axes)
        for i, axis in enumerate(item.weight.axes)
    )
    return is_weight_sharded and (item.collective.network_bytes or 0) > _gathered_bytes(facts, item)


def _operand_indices(item: _ProductCollective) -> tuple[int, int]:
    """Returns (index of the data, index of the weight) in the matmul: 0 for left, 1 for right."""
    return (0, 1) if item.weight == item.product.right else (1, 0)


def _gathered_bytes(facts: Facts, item: _ProductCollective) -> int:
    assert item.weight.argument is not None
    assert facts.mesh is not None
    array = facts.arguments[item.weight.argument]
    n_shards = _n_shards(facts, item.weight, item.along)
    sizes = (array.shape[axis.dim] for axis in item.weight.axes if axis.dim >= 0)
    return prod(sizes) * array.dtype.itemsize // n_shards


def _value_to_constrain(
    facts: Facts, along: frozenset[str], items: Sequence[_ProductCollective]
) -> tuple[str, Sequence[Axis], str] | None:
    """Returns the line, axes and description of the value to constrain, or None.

    First choice: the unconstrained result of a lookup whose indices are sharded over mesh axes in
    `along`. The compiler may shard it like the table. Second choice: the data of the first matmul
    whose batch has the sharding of an input.
    """
    assert facts.trace is not None
    constrained = {constraint.before for constraint in facts.trace.constraints}
    for product in facts.trace.products:
        is_unconstrained_lookup = product.is_lookup and product.result not in constrained
        if is_unconstrained_lookup and along & product.right.mesh_axes:
            return product.line, product.result.axes, 'the result of the lookup'
    for item in items:
        if facts.is_data(item.data.axes[0].origin):
            return item.product.line, item.data.axes, 'the activations of the matmul'
    return None


# --- contracted axes ----------------------------------------------------------------------------


class _GatheredAxis(NamedTuple):
    """A contracted axis that is sharded in the data, but not in the weight.

    Attributes:
        axis: the axis of the data.
        placement: the expression of the weight if it is sharded like the data.
        items: the collectives on the line of the matmul.
    """

    axis: Axis
    placement: str
    items: list[_ProductCollective]


def contracted_axes(facts: Facts) -> Iterator[Finding]:
    """Reports contracted axes that are sharded in the data, but not in the weight.

    If the activations inherit the sharding of a lookup table, suggests constraining the result of
    the lookup. Otherwise, suggests sharding the axis of the weight.
    """
    if facts.trace is None:
        return
    # keyed by (argument index of the lookup table, mesh axes)
    inherited: dict[tuple[int, frozenset[str]], list[_ProductCollective]] = {}
    gathered: dict[int, _GatheredAxis] = {}  # by the position of the product in the trace
    order = {id(product): i for i, product in enumerate(facts.trace.products)}
    # the sizes of the matmuls on each line; in a helper function, a line may have several
    sizes: dict[str, set[tuple[int, ...]]] = {}
    for product in facts.trace.products:
        if not (product.is_lookup or product.is_backward):
            sizes.setdefault(product.line, set()).add(product.sizes)
    for item in sorted(_find_product_collectives(facts), key=lambda item: order[id(item.product)]):
        for axis, weight_axis in _mismatched_axes(facts, item):
            if isinstance(axis.origin, int) and axis.origin in facts.lookup_tables:
                inherited.setdefault((axis.origin, item.along), []).append(item)
            elif item.collective.kind != 'all-reduce' and (
                len(sizes[item.product.line]) == 1 or _sends_data(facts, item, axis)
            ):
                placement = _weight_sharded_like_data(facts, item, axis, weight_axis)
                if placement is not None:
                    at = order[id(item.product)]
                    gathered.setdefault(at, _GatheredAxis(axis, placement, [])).items.append(item)
    for (table, along), items in inherited.items():
        yield from _inherited_sharding(facts, table, along, items)
    for (line, name, placement), items in _to_reshard(facts, [*gathered.values()]).items():
        distinct = {item.collective.name: item for item in items}.values()
        n_bytes = sum(item.collective.total_bytes for item in distinct)
        paths = _paths_of(facts, [item.weight for item in items])
        what = f"contracted axis '{name}'" if name else 'the contracted axis'
        kinds = ', '.join(dict.fromkeys(item.collective.kind for item in distinct))
        yield Finding(
            'contracted axis',
            f'{what} is sharded along {items[0].collective.along} in the activations '
            f'but not in {paths}: {kinds} of {format_bytes(n_bytes)}',
            line,
            n_bytes,
            f"shard {paths} with '{placement}'",
            _names(distinct),
        )


def _to_reshard(
    facts: Facts, gathered: Sequence[_GatheredAxis]
) -> dict[tuple[str, str, str], list[_ProductCollective]]:
    """Chooses the axes for which resharding the weight sends less.

    Keyed by (source line, name of the contracted axis, suggested expression of the weight).
    """
    chosen: dict[tuple[str, str, str], list[_ProductCollective]] = {}
    # arguments that a suggestion reshards; data whose sharding comes from one needs no suggestion
    resharded: set[int] = set()
    similar: dict[tuple[int, ...], list[_GatheredAxis]] = {}
    for found in gathered:
        similar.setdefault(found.items[0].product.sizes, []).append(found)
    for found in gathered:
        item = found.items[0]
        if found.axis.origin not in resharded and _is_cheaper_to_reduce(
            facts, found, similar[item.product.sizes]
        ):
            key = item.product.line, found.axis.name, found.placement
            chosen.setdefault(key, []).extend(found.items)
            assert item.weight.argument is not None
            resharded.add(item.weight.argument)
    return chosen


def _mismatched_axes(facts: Facts, item: _ProductCollective) -> Iterator[tuple[Axis, Axis]]:
    """Yields (axis of data, axis of weight) for each contracted axis sharded only in the data.

    Omits a contracted batch, and matmuls of the backward pass.
    """
    data_index, weight_index = _operand_indices(item)
    if item.product.is_backward:
        return
    for pair in item.product.contracted:
        data_axis = item.data.axes[pair[data_index]]
        weight_axis = item.weight.axes[pair[weight_index]]
        is_batch = facts.is_data(data_axis.origin) and pair[data_index] == 0
        is_data_sharded = item.along & set(data_axis.mesh_axes)
        if not is_batch and is_data_sharded and not item.along & set(weight_axis.mesh_axes):
            yield data_axis, weight_axis


def _weight_sharded_like_data(
    facts: Facts, item: _ProductCollective, data_axis: Axis, weight_axis: Axis
) -> str | None:
    """Returns an expression that shards the contracted axis of a weight like that of the data.

    Returns None if `weight_axis` is already sharded, is not divisible, or is not an axis of the
    argument itself.
    """
    assert item.weight.argument is not None
    assert facts.mesh is not None
    array = facts.arguments[item.weight.argument]
    size = prod(facts.mesh.shape[name] for name in data_axis.mesh_axes)
    if weight_axis.dim < 0 or weight_axis.mesh_axes or array.shape[weight_axis.dim] % size:
        return None
    axes = [
        replace(other, mesh_axes=data_axis.mesh_axes)
        if other.dim == weight_axis.dim
        else other.without_mesh_axes(data_axis.mesh_axes)
        for other in facts.argument_axes(item.weight.argument)
    ]
    return expression_of(axes, facts.mesh)


def _is_cheaper_to_reduce(
    facts: Facts, found: _GatheredAxis, similar: Sequence[_GatheredAxis]
) -> bool:
    """Whether reducing the result sends less than gathering the data.

    Compares all matmuls of the same sizes, `similar`, because on TPU XLA gives some all-gathers the
    line of the operation before the matmul.
    """
    assert facts.mesh is not None
    names, product = frozenset(found.axis.mesh_axes), found.items[0].product
    n_gathered = _n_gathered(facts, found.items[0], names)
    n_reduced = product.sizes[2] // _n_shards(facts, product.result, names)
    on_line = {item.collective.name for found in similar for item in found.items}
    # if the result is sharded over `names`, a reduce-scatter replaces the gather of the data, and a
    # gather of the result stays. On CPU, XLA all-reduces instead, and needs no gather of the result
    is_scattered = facts.platform != 'cpu' and names <= product.result.mesh_axes
    gathered = 0
    for collective in facts.collectives:
        sizes = _n_elements(collective)
        is_of_data = (
            collective.kind != 'all-reduce'
            and collective.mesh_axes == names
            and n_gathered in sizes
        )
        if collective.name in on_line or (is_of_data and n_gathered != n_reduced):
            gathered += 0 if is_scattered and n_reduced in sizes else collective.total_bytes
    partial_sum = product.result.sharding(without=names)
    reduced = product.result.sharding() if is_scattered else partial_sum
    steps, _ = reduce(partial_sum, names, reduced)
    return gathered > len(similar) * _sent_bytes(facts, product, steps)


def _sends_data(facts: Facts, item: _ProductCollective, axis: Axis) -> bool:
    """Whether the collective has the size of the data, gathered along the mesh axes of `axis`."""
    assert facts.mesh is not None
    n_gathered = _n_gathered(facts, item, axis.mesh_axes)
    shard = n_gathered // prod(facts.mesh.shape[name] for name in axis.mesh_axes)
    return not {n_gathered, shard}.isdisjoint(_n_elements(item.collective))


def _n_gathered(facts: Facts, item: _ProductCollective, names: Collection[str]) -> int:
    """Returns the number of elements of the data on a device, if it is gathered along `names`."""
    return item.product.sizes[_operand_indices(item)[0]] // _n_shards(facts, item.data, names)


def _n_shards(facts: Facts, value: Value, gathered: Collection[str]) -> int:
    """Returns the number of shards of a value that is not sharded over the mesh axes `gathered`."""
    assert facts.mesh is not None
    return prod(facts.mesh.shape[name] for name in value.mesh_axes.difference(gathered))


def _n_elements(collective: Collective) -> list[int]:
    """Returns the number of elements of each array, and of all arrays."""
    sizes = [prod(array.shape) for array in collective.array_types]
    return [*sizes, sum(sizes)]


def _inherited_sharding(
    facts: Facts, table: int, along: frozenset[str], items: Sequence[_ProductCollective]
) -> Iterator[Finding]:
    """Reports activations that inherit the sharding of `table`, if a constraint sends less."""
    lookup = lookup_in(facts, table)
    if lookup is None or loops_over_batch(facts):  # another finding, to be fixed first
        return
    sizes = {
        size
        for axis, size in zip(lookup.result.axes, lookup.aval.shape, strict=True)
        if axis.origin == table and along & set(axis.mesh_axes)
    }
    activations = [c for c in facts.unexplained if c.role == 'activations' and c.mesh_axes == along]
    gathers = [
        collective
        for collective in activations
        if (gather := facts.gathers.get(collective.name)) is not None
        and gather.array.shape[gather.dimension] in sizes
    ]
    # a constraint on the lookup needs one all-gather, and all-reduces instead of reduce-scatters,
    # which send twice as much
    gathered = sum(row.total_bytes for row in gathers)
    scattered = sum(c.total_bytes for c in activations if c.kind == 'reduce-scatter')
    steps = reshard(lookup.result.sharding(), lookup.result.sharding(without=along))
    n_bytes = gathered - scattered - _sent_bytes(facts, lookup, steps)
    if n_bytes <= facts.min_bytes:
        return
    path, mesh_axes = facts.arguments[table].path, items[0].collective.along
    yield Finding(
        'inherited sharding',
        f'activations inherit the sharding of {path} along {mesh_axes}, and are gathered along it '
        f'in {lines_text(gathers)}: {format_bytes(gathered)}, '
        f'{format_bytes(n_bytes)} more than necessary',
        lookup.line,
        n_bytes,
        constrain_lookup(
            facts,
            lookup,
            [
                axis.without_mesh_axes(along) if axis.origin == table else axis
                for axis in lookup.result.axes
            ],
        ),
        tuple(row.name for row in gathers),
    )


def _sent_bytes(facts: Facts, product: Product, steps: Iterable[Step[str, int]]) -> int:
    """Returns the bytes that a device sends in one run for these collectives of the result."""
    assert facts.mesh is not None
    sizes, n_bytes = facts.mesh.shape, 0
    for step in steps:
        block = product.result_bytes // prod(sizes[name] for name in step.block)
        n_bytes += ring_bytes(step.kind, block, prod(sizes[name] for name in step.axes))
    return n_bytes * (product.runs or 1)


def lookup_in(facts: Facts, table: int) -> Product | None:
    """Returns the first lookup in an argument."""
    products = facts.trace.products if facts.trace else ()
    return next((p for p in products if p.is_lookup and p.left.argument == table), None)


def constrain_lookup(facts: Facts, lookup: Product, axes: Sequence[Axis]) -> str:
    """Suggests constraining the result of a lookup."""
    return facts.constrain('the result of the lookup', lookup.line, axes)


def _names(items: Iterable[_ProductCollective]) -> tuple[str, ...]:
    return tuple(item.collective.name for item in items)


def _paths_of(facts: Facts, values: Sequence[Value]) -> str:
    """Returns text such as 'params/layers/{gate,up}'."""
    indices = [value.argument for value in values if value.argument is not None]
    return first_of(fold_paths(facts.arguments[i].path for i in indices), 3)
