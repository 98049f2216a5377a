"""Totals of a report: bytes by kind, mesh axis and role; flops by source line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .._errors import plural
from .._program.hlo.flops import ProductRow
from .._text import format_bytes, format_flops, short_source
from .collectives import Collectives

_ALL_BRANCHES = ' (all branches counted)'


def network_lines(rows: Collectives) -> Iterator[str]:
    """Yields lines about the bytes sent, by kind, by mesh axis, by role and by pass."""
    if not rows.network_bytes:
        return
    total = sum(rows.network_bytes.values())
    by_kind = _shares(rows.network_bytes, total)
    is_lower_bound = any(not row.is_exact or row.network_bytes is None for row in rows)
    # a collective with unknown groups counts as one group of all devices
    is_upper_bound = any(not row.groups and row.network_bytes for row in rows)
    bound = 'at least ' if is_lower_bound else 'at most ' * is_upper_bound
    branches = _ALL_BRANCHES * any(row.in_branch for row in rows)
    yield f'sent in one run: {bound}{format_bytes(total)}{branches}{": " * bool(by_kind)}{by_kind}'
    axes, passes = rows.bytes_by('along'), rows.bytes_by('is_backward')
    for preposition, parts in (
        ('along', {key or 'unknown axes': n for key, n in axes.items()}),
        ('for', rows.bytes_by('role')),
        ('in', {f'{"backward" if key else "forward"} pass': n for key, n in passes.items()}),
    ):
        if shares := _shares(parts, total):
            yield f'sent {preposition}: {shares}'
    if any(row.widened for row in rows):
        yield '(f32): the compiler runs these collectives in f32; bytes are for bf16'


def _shares(parts: Mapping[str, int], total: int) -> str:
    """Formats 'all-gather 1.5 GiB (60%), all-reduce 1.0 GiB (40%)'. Returns '' for one part."""
    if len(parts) < 2 or not total:
        return ''
    return ', '.join(f'{key} {format_bytes(n)} ({_percent(n, total)})' for key, n in parts.items())


def _percent(part: float, total: float) -> str:
    percent = 100 * part / total
    return '<1%' if 0 < percent < 0.5 else f'{percent:.0f}%'


_MAX_LINES = 3  # source lines in `compute_line`


def compute_line(flops: float, products: Sequence[ProductRow]) -> str:
    """Formats 'compute: 1.5 Gflop in one run: backward 67%, forward 33%; f.py:12 80%, ..'."""
    at_least = 'at least ' * any(row.at_least for row in products)
    lines, passes = Counter[str](), Counter[str]()
    for row in products:
        lines[short_source(row.source) or 'unknown lines'] += row.flops
        passes['backward' if row.is_backward else 'forward'] += row.flops
    more = len(lines) - _MAX_LINES
    shares = [
        [f'{key} {_percent(n, flops)}' for key, n in counts.most_common(_MAX_LINES)]
        for counts in (passes, lines)
        if len(counts) > 1
    ]
    if more > 0:
        shares[-1].append(plural(more, 'other line'))
    listed = '; '.join(map(', '.join, shares))
    run = f'one run{_ALL_BRANCHES * any(row.in_branch for row in products)}'
    return f'compute: {at_least}{format_flops(flops)} in {run}{": " * bool(listed)}{listed}'
