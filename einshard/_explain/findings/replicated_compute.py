"""Finds matmuls that several devices repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..._text import first_of, format_flops, short_source
from ..report_rows import Finding
from .facts import Facts
from .values import Product

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
            explains=tuple(repeated.line for repeated in lines),
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
