"""Finds collectives of activations that another sharding may avoid or make cheaper."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..._program.hlo.collective import Collective, ring_bytes
from ..._text import first_of, format_bytes
from ..fold_layers import fold_paths
from ..report_rows import Finding
from .facts import Facts
from .lines import is_in_call, lines_text
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

    @property
    def weight_index(self) -> int:
        """0 if the weight is the left operand, 1 if it is the right one."""
        return 1 if self.weight == self.product.right else 0


def _find_product_collectives(facts: Facts) -> Iterator[_ProductCollective]:
    """Pairs collectives with the matmuls of weights on the same source line, in the same call.

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
        # not by column: for TPUs, XLA gives a gather that of the matmul before
        for product in by_line.get(collective.source or '', ()):
            operands = weight_and_data(product)
            if operands is not None and is_in_call(collective, product.frames):
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
        line = _first_unconstrained_line(facts, along, items)
        if line is None:
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
            explains=_names(distinct),
        )


def _is_cheaper_to_gather_weight(facts: Facts, item: _ProductCollective) -> bool:
    """Whether a collective along mesh axes of the batch sends more than gathering the weight."""
    batch = item.data.axes[0] if item.data.axes else Axis()
    # the batch's sharding comes from an input or a constraint, not from a weight
    is_batch = facts.is_data(batch.origin) or isinstance(batch.origin, str)
    if not is_batch or not item.along <= set(batch.mesh_axes):
        return False
    batch_dims = {pair[item.weight_index] for pair in item.product.batch}
    is_weight_sharded = any(
        i not in batch_dims and item.along & set(axis.mesh_axes)
        for i, axis in enumerate(item.weight.axes)
    )
    return is_weight_sharded and (item.collective.network_bytes or 0) > _gathered_bytes(facts, item)


def _gathered_bytes(facts: Facts, item: _ProductCollective) -> int:
    assert item.weight.argument is not None
    array = facts.arguments[item.weight.argument]
    sizes = (array.shape[axis.dim] for axis in item.weight.axes if axis.dim >= 0)
    return prod(sizes) * array.dtype.itemsize // _n_shards(facts, item.weight, item.along)


def _first_unconstrained_line(
    facts: Facts, along: frozenset[str], items: Sequence[_ProductCollective]
) -> str | None:
    """Returns the line of the first value that has no constraint, or None.

    First choice: a lookup whose indices are sharded over mesh axes in `along`. The compiler may
    shard its result like the table. Second choice: the first matmul whose batch has the sharding of
    an input.
    """
    assert facts.trace is not None
    constrained = {constraint.before for constraint in facts.trace.constraints}
    lines = [
        product.line
        for product in facts.trace.products
        if product.is_lookup
        and product.result not in constrained
        and along & product.right.mesh_axes
    ]
    lines += [item.product.line for item in items if facts.is_data(item.data.axes[0].origin)]
    return next(iter(lines), None)


# --- contracted axes ----------------------------------------------------------------------------


def contracted_axes(facts: Facts) -> Iterator[Finding]:
    """Reports contracted axes that are sharded in the data, but not in the weight.

    Leaves out those for which the partial sums would send more than the gathered data.
    """
    # keyed by (argument index of the lookup table, mesh axes)
    inherited: dict[tuple[int, frozenset[str]], list[_ProductCollective]] = {}
    # keyed by (source line, axis, sizes of the matmul): layers of an unrolled loop have one line
    gathered: dict[tuple[str, Axis, tuple[int, ...]], list[tuple[_ProductCollective, object]]] = {}
    # in a helper function, a line may have matmuls of several sizes
    sizes: dict[str, set[tuple[int, ...]]] = {}
    order = {id(p): i for i, p in enumerate(facts.trace.products)} if facts.trace else {}
    found = sorted(_find_product_collectives(facts), key=lambda item: order[id(item.product)])
    for item in found:
        if not item.product.is_backward:
            sizes.setdefault(item.product.line, set()).add(item.product.sizes)
    origins = set[object]()  # the weights of these axes; what follows may inherit their sharding
    for item in found:
        line = item.product.line
        for axis in _mismatched_axes(facts, item):
            if isinstance(axis.origin, int) and axis.origin in facts.lookup_tables:
                inherited.setdefault((axis.origin, item.along), []).append(item)
            elif item.collective.kind != 'all-reduce' and (
                len(sizes[line]) == 1 or _sends_data(facts, item, axis, item.collective)
            ):
                key = line, Axis(axis.name, axis.mesh_axes), item.product.sizes
                gathered.setdefault(key, []).append((item, axis.origin))
    for (table, along), items in inherited.items():
        yield from _inherited_sharding(facts, table, along, items)
    for (line, axis, _), pairs in gathered.items():
        items = [item for item, origin in pairs if origin not in origins]
        if not items:
            continue
        distinct = {item.collective.name: item for item in items}.values()
        products = {id(item.product): item for item in items}.values()
        first, name = items[0], axis.name
        # on TPU, XLA gives some all-gathers the line of the operation before the matmul
        n_gathered = sum(
            c.total_bytes
            for c in facts.collectives
            if c.name in _names(distinct)
            or (c.kind == 'all-gather' and _sends_data(facts, first, axis, c))
        )
        if n_gathered <= sum(_summed_bytes(facts, item) for item in products):
            continue
        origins.update(item.weight.argument for item in items)
        n_bytes = sum(item.collective.total_bytes for item in distinct)
        paths = _paths_of(facts, [item.weight for item in items])
        what = f"contracted axis '{name}'" if name else 'the contracted axis'
        kinds = ', '.join(dict.fromkeys(item.collective.kind for item in distinct))
        yield Finding(
            'contracted axis',
            f'{what} is sharded along {first.collective.along} in the activations '
            f'but not in {paths}: {kinds} of {format_bytes(n_bytes)}',
            line,
            n_bytes,
            explains=_names(distinct),
        )


def _mismatched_axes(facts: Facts, item: _ProductCollective) -> Iterator[Axis]:
    """Yields the contracted axes of data that are sharded, where that of the weight is not.

    Omits a contracted batch, and matmuls of the backward pass.
    """
    if item.product.is_backward:
        return
    for pair in item.product.contracted:
        axis = item.data.axes[pair[1 - item.weight_index]]
        weight_axis = item.weight.axes[pair[item.weight_index]]
        is_batch = facts.is_data(axis.origin) and pair[1 - item.weight_index] == 0
        is_sharded = item.along & set(axis.mesh_axes)
        if not is_batch and is_sharded and not item.along & set(weight_axis.mesh_axes):
            yield axis


def _sends_data(facts: Facts, item: _ProductCollective, axis: Axis, collective: Collective) -> bool:
    """Whether a collective has the size of the data, gathered along the mesh axes of `axis`."""
    assert facts.mesh is not None
    size = item.product.sizes[1 - item.weight_index]
    n_gathered = size // _n_shards(facts, item.data, axis.mesh_axes)
    shard = n_gathered // prod(facts.mesh.shape[name] for name in axis.mesh_axes)
    sizes = [prod(array.shape) for array in collective.array_types]
    is_along = collective.mesh_axes == item.along
    return is_along and not {n_gathered, shard}.isdisjoint((*sizes, sum(sizes)))


def _summed_bytes(facts: Facts, item: _ProductCollective) -> int:
    """Returns the bytes that a device sends to sum up the result of the matmul instead.

    XLA for CPU has no reduce-scatter.
    """
    product, along = item.product, item.along
    is_scattered = facts.platform != 'cpu' and along <= product.result.mesh_axes
    kind = 'reduce-scatter' if is_scattered else 'all-reduce'
    block = product.result_bytes // _n_shards(facts, product.result, along)
    return ring_bytes(kind, block, item.collective.group_size) * (product.runs or 1)


def _n_shards(facts: Facts, value: Value, gathered: Collection[str]) -> int:
    """Returns the number of shards of a value that is not sharded over the mesh axes `gathered`."""
    assert facts.mesh is not None
    return prod(facts.mesh.shape[name] for name in value.mesh_axes.difference(gathered))


def _inherited_sharding(
    facts: Facts, table: int, along: frozenset[str], items: Sequence[_ProductCollective]
) -> Iterator[Finding]:
    """Reports activations that inherit the sharding of `table`, if they are gathered repeatedly."""
    products = facts.trace.products if facts.trace else ()
    lookup = next(p for p in products if p.is_lookup and p.left.argument == table)
    if loops_over_batch(facts):  # another finding, to be fixed first
        return
    activations = [c for c in facts.unexplained if c.role == 'activations' and c.mesh_axes == along]
    gathers = [c for c in activations if c.kind == 'all-gather']
    # if only the result of the lookup is gathered, sums are all-reduced, which sends as much again
    # as reduce-scatters
    gathered = sum(c.total_bytes for c in gathers)
    scattered = sum(c.total_bytes for c in activations if c.kind == 'reduce-scatter')
    block = lookup.result_bytes // _n_shards(facts, lookup.result, along)
    once = ring_bytes('all-gather', block, items[0].collective.group_size) * (lookup.runs or 1)
    n_bytes = gathered - scattered - once
    if n_bytes <= facts.min_bytes:
        return
    yield Finding(
        'inherited sharding',
        f'activations inherit the sharding of {facts.arguments[table].path} along '
        f'{items[0].collective.along}, and are gathered along it in {lines_text(gathers)}: '
        f'{format_bytes(gathered)}, {format_bytes(n_bytes)} more than necessary',
        lookup.line,
        n_bytes,
        explains=tuple(c.name for c in gathers),
    )


def _names(items: Iterable[_ProductCollective]) -> tuple[str, ...]:
    return tuple(item.collective.name for item in items)


def _paths_of(facts: Facts, values: Sequence[Value]) -> str:
    """Returns text such as 'params/layers/{gate,up}'."""
    indices = [value.argument for value in values if value.argument is not None]
    return first_of(fold_paths(facts.arguments[i].path for i in indices), 3)
