"""Finds collectives of activations that another sharding avoids or makes cheaper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ..._errors import plural
from ..._hlo.collectives import Collective
from ..._text import first_of, format_bytes, short_source
from ..fold_layers import fold_paths
from ..report_rows import CollectiveRow, Finding
from .expressions import expression_of
from .facts import Facts
from .values import Axis, Product, Value


class _SentAtProduct(NamedTuple):
    """A collective in the line of a product of data and a weight.

    Attributes:
        collective, row: the collective, as the compiler wrote it and as a row of the report.
        product: the product.
        weight: the operand that is a part of a weight.
        data: the other operand.
        along: the mesh axes that the collective runs along.
    """

    collective: Collective
    row: CollectiveRow
    product: Product
    weight: Value
    data: Value
    along: frozenset[str]


def _find_sent_at_products(facts: Facts) -> Iterator[_SentAtProduct]:
    """Yields the collectives of activations and weights in lines of products with weights.

    Yields none on a mesh with explicit axes, where types decide on shardings.
    """
    if facts.trace is None or facts.is_explicit:
        return
    by_line: dict[str, list[Product]] = {}
    for product in facts.trace.products:
        if not (product.in_shard_map or product.is_lookup):
            by_line.setdefault(product.line, []).append(product)
    for collective, row, along in zip(facts.collectives, facts.rows, facts.along, strict=True):
        if not along or row.role == 'gradients':
            continue
        for product in by_line.get(row.source or '', ()):
            sides = weight_and_data(product)
            if sides is not None:
                yield _SentAtProduct(collective, row, product, *sides, along)


def weight_and_data(product: Product) -> tuple[Value, Value] | None:
    """Returns the weight of a product and the other operand; None if neither is a weight."""
    for weight, data in ((product.right, product.left), (product.left, product.right)):
        if weight.argument is not None and not weight.is_data:
            return weight, data
    return None


# --- batch --------------------------------------------------------------------------------------


def missing_constraint(facts: Facts) -> Iterator[Finding]:
    """Reports activations that are sent along the mesh axes of the batch, instead of weights.

    This happens in fully sharded data parallelism (FSDP) without constraints on the activations:
    the compiler shards them like the weights, along other axes than the batch.
    """
    flagged: dict[frozenset[str], list[_SentAtProduct]] = {}
    for sent in _find_sent_at_products(facts):
        # an argument that is gathered may be a frozen weight
        is_activation = sent.row.role == 'activations' and not sent.row.of
        if is_activation and _is_cheaper_to_gather_weight(facts, sent):
            flagged.setdefault(sent.along, []).append(sent)
    for along, sent_list in flagged.items():
        distinct = {sent.collective.name: sent for sent in sent_list}.values()
        n_bytes = sum(sent.row.total_bytes for sent in distinct)
        line, axes, what = _value_to_constrain(facts, along, sent_list)
        if not facts.mesh or not any(along & set(axis.mesh_axes) for axis in axes):
            continue
        largest = max(distinct, key=lambda sent: sent.row.total_bytes)
        paths = _paths_of(facts, [sent.weight for sent in sent_list])
        yield Finding(
            'missing constraint',
            f'activations are reduced or gathered along {largest.row.along}, over which the batch '
            f'is sharded, instead of gathering the weights {paths}: {format_bytes(n_bytes)} in '
            f'{_lines_of(distinct)}',
            line,
            n_bytes,
            f"constrain {what} in {short_source(line)}: einshard(..., '"
            f"{expression_of(axes, facts.mesh)}')",
        )


def _is_cheaper_to_gather_weight(facts: Facts, sent: _SentAtProduct) -> bool:
    """Whether gathering the weight along the mesh axes of the batch would send fewer bytes."""
    batch = sent.data.axes[0] if sent.data.axes else Axis()
    if not facts.is_data(batch.origin) or not sent.along <= set(batch.mesh_axes):
        return False
    _, weight_side = _sides(sent)
    batch_axes = {pair[weight_side] for pair in sent.product.batch}
    is_sharded = any(
        i not in batch_axes and sent.along & set(axis.mesh_axes)
        for i, axis in enumerate(sent.weight.axes)
    )
    return is_sharded and (sent.collective.network_bytes or 0) > _bytes_to_gather(facts, sent)


def _sides(sent: _SentAtProduct) -> tuple[int, int]:
    """Returns the sides of the data and of the weight in the product: 0 for left, 1 for right."""
    return (0, 1) if sent.weight == sent.product.right else (1, 0)


def _bytes_to_gather(facts: Facts, sent: _SentAtProduct) -> int:
    """Returns the bytes that a device would send to gather the weight."""
    assert sent.weight.argument is not None
    assert facts.mesh is not None
    array = facts.arguments[sent.weight.argument]
    n_shards = prod(facts.mesh.shape[name] for name in sent.weight.mesh_axes - sent.along)
    sizes = (array.shape[axis.dim] for axis in sent.weight.axes if axis.dim >= 0)
    return prod(sizes) * array.dtype.itemsize // n_shards


def _value_to_constrain(
    facts: Facts, along: frozenset[str], sent_list: Sequence[_SentAtProduct]
) -> tuple[str, Sequence[Axis], str]:
    """Returns the line, the axes and a description of the value to constrain.

    This is the result of a lookup, if the mesh axes in `along` shard its indices: the compiler may
    shard the result like the table. Else it is the data of the first product in `sent_list`.
    """
    assert facts.trace is not None
    for product in facts.trace.products:
        if product.is_lookup and along & product.right.mesh_axes:
            return product.line, product.result.axes, 'the result of the lookup'
    first = sent_list[0]
    return first.product.line, first.data.axes, 'the operand of the product'


# --- contracted axes ----------------------------------------------------------------------------


def contracted_axes(facts: Facts) -> Iterator[Finding]:
    """Reports contracted axes that are sharded in the data, but not in the weight.

    If the activations inherit the sharding of a lookup table, such as an embedding sharded along d,
    the suggestion is to constrain the result of the lookup; else, to shard weights like data.
    """
    if facts.trace is None:
        return
    # by lookup table and mesh axes
    inherited: dict[tuple[int, frozenset[str]], list[_SentAtProduct]] = {}
    # by source line, axis name and suggested expression
    reshardable: dict[tuple[str, str, str], list[_SentAtProduct]] = {}
    # weights that a suggestion reshards; data that inherits an axis from them is resharded too
    changed: set[int] = set()
    order = {id(product): i for i, product in enumerate(facts.trace.products)}
    for sent in sorted(_find_sent_at_products(facts), key=lambda sent: order[id(sent.product)]):
        for axis, weight_axis in _mismatched(facts, sent):
            if isinstance(axis.origin, int) and axis.origin in facts.lookup_tables:
                inherited.setdefault((axis.origin, sent.along), []).append(sent)
            elif sent.row.kind != 'all-reduce' and axis.origin not in changed:
                placement = _sharded_alike(facts, sent, axis, weight_axis)
                if placement is not None and sent.weight.argument is not None:
                    key = sent.product.line, axis.name, placement
                    reshardable.setdefault(key, []).append(sent)
                    changed.add(sent.weight.argument)
    for (table, along), sent_list in inherited.items():
        yield from _inherited(facts, table, along, sent_list)
    for (line, name, placement), sent_list in reshardable.items():
        distinct = {sent.collective.name: sent for sent in sent_list}.values()
        n_bytes = sum(sent.row.total_bytes for sent in distinct)
        paths = _paths_of(facts, [sent.weight for sent in sent_list])
        what = f"axis '{name}' is summed over, and" if name else 'the contracted axis is'
        kinds = ', '.join(dict.fromkeys(sent.row.kind for sent in distinct))
        yield Finding(
            'contracted axis',
            f'{what} sharded along {sent_list[0].row.along} in the activations '
            f'but not in {paths}: {kinds} of {format_bytes(n_bytes)}',
            line,
            n_bytes,
            f"shard {paths} with '{placement}'",
        )


def _mismatched(facts: Facts, sent: _SentAtProduct) -> Iterator[tuple[Axis, Axis]]:
    """Yields (axis of data, axis of weight) for contracted axes sharded only in the data.

    Yields no batch axes, and nothing in the backward pass.
    """
    data_side, weight_side = _sides(sent)
    if sent.product.is_backward:
        return
    for pair in sent.product.contracted:
        data_axis, weight_axis = (
            sent.data.axes[pair[data_side]],
            sent.weight.axes[pair[weight_side]],
        )
        is_batch = facts.is_data(data_axis.origin) and pair[data_side] == 0
        in_data = sent.along & set(data_axis.mesh_axes)
        if not is_batch and in_data and not sent.along & set(weight_axis.mesh_axes):
            yield data_axis, weight_axis


def _sharded_alike(
    facts: Facts, sent: _SentAtProduct, data_axis: Axis, weight_axis: Axis
) -> str | None:
    """Returns the expression that shards a contracted axis of the weight like the data.

    None if it is sharded already, its size is not divisible, or it is not an axis of the argument.
    """
    assert sent.weight.argument is not None
    assert facts.mesh is not None
    array = facts.arguments[sent.weight.argument]
    size = prod(facts.mesh.shape[name] for name in data_axis.mesh_axes)
    if weight_axis.dim < 0 or weight_axis.mesh_axes or array.shape[weight_axis.dim] % size:
        return None
    axes = [
        replace(other, mesh_axes=data_axis.mesh_axes)
        if other.dim == weight_axis.dim
        else other.without_mesh_axes(data_axis.mesh_axes)
        for other in facts.argument_axes(sent.weight.argument)
    ]
    return expression_of(axes, facts.mesh)


def _inherited(
    facts: Facts, table: int, along: frozenset[str], sent_list: Sequence[_SentAtProduct]
) -> Iterator[Finding]:
    """Yields the finding about activations that inherit the sharding of a lookup table, if any.

    There is none if that sharding costs nothing.
    """
    assert facts.trace is not None
    assert facts.mesh is not None
    distinct = {sent.collective.name: sent for sent in sent_list}.values()
    n_bytes = sum(sent.row.total_bytes for sent in distinct)
    # without the inherited sharding, an all-reduce would send as much as the reduce-scatter and the
    # all-gather do, so the sharding costs nothing
    scattered = sum(
        row.total_bytes
        for row, axes in zip(facts.rows, facts.along, strict=True)
        if row.kind == 'reduce-scatter' and row.role == 'activations' and axes == along
    )
    if scattered > n_bytes / 2:
        return
    for product in facts.trace.products:
        if product.is_lookup and product.left.argument == table:
            axes = [
                axis.without_mesh_axes(along) if axis.origin == table else axis
                for axis in product.result.axes
            ]
            array = facts.arguments[table]
            lines = _lines_of(distinct)
            yield Finding(
                'inherited sharding',
                f'activations inherit the sharding of {array.path} along '
                f'{sent_list[0].row.along}, and are sent along it in {lines}: '
                f'{format_bytes(n_bytes)}',
                product.line,
                n_bytes,
                f'constrain the result of the lookup in {short_source(product.line)}: '
                f"einshard(..., '{expression_of(axes, facts.mesh)}')",
            )
            return


def _paths_of(facts: Facts, values: Sequence[Value]) -> str:
    """Formats the paths of weights, folded: 'params/layers/{gate,up}'."""
    indices = [value.argument for value in values if value.argument is not None]
    return first_of(fold_paths(facts.arguments[i].path for i in indices), 3)


def _lines_of(sent_list: Iterable[_SentAtProduct]) -> str:
    """Formats source lines: 'model.py:12', or '2 lines, model.py:12, model.py:20'."""
    lines = list(dict.fromkeys(short_source(sent.collective.source) for sent in sent_list))
    return lines[0] if len(lines) == 1 else f'{plural(len(lines), "line")}, {first_of(lines, 3)}'
