"""Draws the plans of a search, as SVG."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Sequence

from .._text import format_bytes
from .candidate import Evaluation

_WIDTH, _HEIGHT, _MARGIN = 480, 280, 76


def scatter_svg(evaluations: Sequence[Evaluation], limit: int | None, n_numbered: int) -> str:
    """Draws plans as points, and the memory limit as a line. Bytes sent are on a log scale.

    The point of the best plan is filled, and the points of the first `n_numbered` plans have
    numbers. Plans that do not compile, or whose memory is unknown, have no points. A limit of more
    than about four times the largest memory has no line. Returns '' if there are no points.
    """
    points = {
        i: plan for i, plan in enumerate(evaluations) if plan.memory is not None and not plan.error
    }
    if not points:
        return ''
    sent = [math.log2(max(1, plan.network_bytes)) for plan in points.values()]
    low, high = min(sent), max(sent)
    top = max(plan.memory or 0 for plan in points.values()) * 1.08
    if limit and top > limit / 4:  # a higher limit would squeeze the points together
        top = max(top, limit * 1.08)
    xs = [_MARGIN + (x - low) / ((high - low) or 1) * (_WIDTH - 2 * _MARGIN) for x in sent]
    ys = [_y(plan.memory or 0, top) for plan in points.values()]
    parts = [_axes_svg(2**low, 2**high, top)]
    if limit and limit < top:
        y = _y(limit, top)
        parts.append(
            f'<line x1="{_MARGIN}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-dasharray="4 3"/>'
            f'<text x="{_WIDTH - 8}" y="{y - 4:.1f}" text-anchor="end">'
            f'memory limit: {format_bytes(limit)}</text>'
        )
    labels: defaultdict[tuple[int, int], list[str]] = defaultdict(list)  # keyed by (x, y)
    for (i, plan), x, y in zip(points.items(), xs, ys, strict=True):
        fill = 'currentColor' if i == 0 else 'none'
        title = html.escape(
            f'plan {i}: {plan.candidate}; memory {format_bytes(plan.memory or 0)}, '
            f'sent {format_bytes(plan.network_bytes)}'
        )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="currentColor">'
            f'<title>{title}</title></circle>'
        )
        if i < n_numbered:
            labels[round(x), round(y)].append(str(i))
    parts += [
        f'<text x="{x + 8}" y="{y + 4}">{", ".join(numbers)}</text>'
        for (x, y), numbers in labels.items()
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="max-width: {_WIDTH}px; width: 100%" font-size="11" fill="currentColor" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def _y(memory: float, top: float) -> float:
    return _HEIGHT - _MARGIN / 2 - memory / top * (_HEIGHT - _MARGIN)


def _axes_svg(low: float, high: float, top: float) -> str:
    bottom = _HEIGHT - _MARGIN / 2
    middle = (_MARGIN + _WIDTH) / 2
    highest = top / 1.08
    return (
        f'<path d="M{_MARGIN - 12} {_MARGIN / 2}V{bottom}H{_WIDTH - 8}" fill="none" '
        'stroke="currentColor" opacity="0.5"/>'
        f'<text x="4" y="16">memory per device</text>'
        f'<text x="{_MARGIN - 16}" y="{bottom}" text-anchor="end">0</text>'
        f'<text x="{_MARGIN - 16}" y="{_y(highest, top) + 4:.1f}" text-anchor="end">'
        f'{format_bytes(round(highest))}</text>'
        f'<text x="{_MARGIN}" y="{bottom + 16}">{format_bytes(int(low))}</text>'
        f'<text x="{_WIDTH - 8}" y="{bottom + 16}" text-anchor="end">'
        f'{format_bytes(int(high))}</text>'
        f'<text x="{middle}" y="{bottom + 30}" text-anchor="middle">'
        'sent by a device (log scale)</text>'
    )
