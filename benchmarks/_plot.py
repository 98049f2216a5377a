"""Curves over the number of devices, as SVG in the page's own text colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._schema import Row, Spread

WIDTH, HEIGHT, MARGIN, TOP, BOTTOM = 460, 260, 60, 34, 44
COLOURS = {'fixed': '#3b7dd8', 'growing': '#d9822b'}
# alone in a browser there is no page: then as its theme has it
STYLE = (
    'svg.einshard-plot:root{color:#222;background:#fff}'
    '@media(prefers-color-scheme:dark){svg.einshard-plot:root{color:#ddd;background:#111}}'
)


class Point(NamedTuple):
    devices: int
    share: Spread  # of the best there is; 1 is best


def scaling_svg(rows: Sequence[Row]) -> str:
    """Of the rows of the scaling benchmark; a curve for each problem, with its quartiles."""
    curves = {
        problem: [
            point(row, problem) for row in rows if row['parameters'].get('problem') == problem
        ]
        for problem in COLOURS
    }
    shares = [value for curve in curves.values() for _, share in curve for value in share.values()]
    highest = max(1.0, *shares)
    most = max(devices for curve in curves.values() for devices, _ in curve)

    def x(devices: int) -> float:
        return MARGIN + (WIDTH - MARGIN - 20) * math.log2(devices) / max(math.log2(most), 1)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / highest

    numbers = sorted({devices for curve in curves.values() for devices, _ in curve})
    parts = [
        *(line(MARGIN, y(s), WIDTH - 20, y(s), opacity=0.2) for s in (0, 0.25, 0.5, 0.75)),
        line(MARGIN, y(1), WIDTH - 20, y(1), opacity=0.6, dashes='4 3'),
        *(text(MARGIN - 8, y(s) + 4, f'{s:.0%}', 'end') for s in (0, 0.25, 0.5, 0.75, 1)),
        *(text(x(n), HEIGHT - BOTTOM + 18, str(n)) for n in numbers),
        text((MARGIN + WIDTH - 20) / 2, HEIGHT - 8, 'devices'),
        text(WIDTH - 20, 16, 'speed, of the best', 'end'),
    ]
    for i, (problem, points) in enumerate(curves.items()):
        parts += curve(points, COLOURS[problem], x, y)
        parts.append(text(MARGIN + 150 * i, 16, f'{problem} problem', 'start', COLOURS[problem]))
    body = '\n'.join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="einshard-plot" role="img" '
        f'aria-label="Share of the best speed, by number of devices" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="currentColor">\n'
        f'<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def point(row: Row, problem: str) -> Point:
    """The ratio as a share: of a fixed problem the best is 1 / devices, of a growing one 1."""
    devices, ratio = int(row['parameters']['devices']), row['ratio']
    if ratio is None:
        raise ValueError(f'{row["name"]!r} is compared with nothing')
    best = 1 / devices if problem == 'fixed' else 1.0
    q1, median, q3 = (best / ratio[name] for name in ('q3', 'median', 'q1'))
    return Point(devices, {'q1': q1, 'median': median, 'q3': q3})


def curve(
    points: Sequence[Point], colour: str, x: Callable[[int], float], y: Callable[[float], float]
) -> list[str]:
    path = ' '.join(f'{x(n):.1f},{y(share["median"]):.1f}' for n, share in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for n, share in points:
        parts.append(line(x(n), y(share['q1']), x(n), y(share['q3']), colour))
        parts.append(
            f'<circle cx="{x(n):.1f}" cy="{y(share["median"]):.1f}" r="3" fill="{colour}"/>'
        )
    return parts


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    colour: str = 'currentColor',
    opacity: float = 1,
    dashes: str = '',
) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ''
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-opacity="{opacity}"{dashed}/>'
    )


def text(
    x: float, y: float, words: str, anchor: str = 'middle', colour: str = 'currentColor'
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'
