"""Spans of a timeline, and their picture."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._text import MONOSPACED, format_seconds


class Bar(NamedTuple):
    """What runs in one lane of a timeline for some time.

    Attributes:
        lane: 'compute', 'network' or 'copy'; in a measured run, the name of a stream.
        start, seconds: when it starts, from the start of the run or of the iteration, and how long
            it takes.
        kind: a kind of collective, or 'product', 'other' computing, 'wait' for a collective, 'copy'
            or the wait for one, 'loop', or 'unknown'.
        label: a source line, or what is sent.
        row: the collective that runs, or for which the device waits, by its index.
        trips: of a loop, how often it runs.
        waiting: of a loop, the seconds of all its iterations in which the device waits.
        inner: of a loop, the spans of one iteration.
    """

    lane: str
    start: float
    seconds: float
    kind: str
    label: str = ''
    row: int | None = None
    trips: int = 1
    waiting: float = 0.0
    inner: tuple[Bar, ...] = ()


# colors on which dark text is readable, and that are visible on light and dark pages
_COLORS = {
    'product': '#6ea3dc',
    'other': '#b4cfec',
    'wait': '#f0624a',
    'copy': '#b3b3b3',
    'loop': '#d3dae4',
    'unknown': '#e3cfe8',
    'all-gather': '#74bf98',
    'reduce-scatter': '#e0b050',
    'all-reduce': '#b596da',
    'all-to-all': '#c79a80',
    'collective-permute': '#6fc3c8',
}
_OTHER_KIND = '#9fae8f'
_NAMES = {
    'product': 'products',
    'other': 'other computing',
    'wait': 'waiting',
    'loop': 'a loop',
}
_LANES = ('compute', 'network', 'copy')
_FONT, _CHARACTER = 11, 6.7  # sizes in pixels: of text, and of a monospaced character in it
_BAR, _LANE = 22, 40  # heights of a bar, and of a lane with its name
_WIDE, _NARROW = 880, 360  # widths for which labels are shortened
_TINY = 0.0004  # of a panel: half a pixel
_MAX_PANELS = 4
_MIN_LANE = 0.01  # of the panel: a lane with less is left out
_MIN_LOOP = 0.1  # of the step: shorter loops get no panel


def spans_svg(
    title: str,
    spans: Sequence[Bar],
    seconds: float,
    has_times: bool = True,
    estimate: tuple[Sequence[Bar], float] | None = None,
) -> str:
    """Draws a step, and one iteration of each of its long loops.

    The drawing is as wide as the page; only the places and widths of boxes change with it, not the
    size of text.

    Args:
        seconds: the time of the step.
        has_times: whether to write times, or only shares.
        estimate: spans and seconds of an estimate, which is drawn below, on the same scale.
    """
    # each with the seconds of its width
    panels: list[tuple[str, float, Sequence[Bar], float]] = [('the step', seconds, spans, seconds)]
    if estimate is not None:
        estimated, length = estimate
        width = max(seconds, length)
        panels = [('measured', seconds, spans, width), ('estimated', length, estimated, width)]
    runs = [1] * len(panels)  # how often each panel runs in the step
    for n, (_, _, inside, _) in zip(runs, panels, strict=True):  # which grow
        long = [s for s in inside if s.inner and n * s.seconds >= _MIN_LOOP * seconds]
        for loop in long[: _MAX_PANELS - len(panels)]:
            name, once = f'one of {loop.trips} iterations', loop.seconds / loop.trips
            panels.append((name, once, loop.inner, once))
            runs.append(n * loop.trips)
    y, parts = _FONT + 4.0, list[str]()
    parts.append(_text(0, y, title, 'font-weight="bold"'))
    for name, total, inside, width in panels:
        y += 26
        time = f': {format_seconds(total)}' if has_times else ''
        parts.append(_text(0, y, f'{name}{time}', 'font-weight="bold"'))
        for lane in dict.fromkeys((*_LANES, *(span.lane for span in inside))):
            boxes = _joined([span for span in inside if span.lane == lane], width or 1)
            if sum(box.seconds for box in boxes) > _MIN_LANE * total:
                parts.append(_text(0, y + 14, lane, 'opacity="0.7"'))
                parts += _bar(boxes, width or 1, y + 18, has_times)
                y += _LANE
    kinds = dict.fromkeys(span.kind for _, _, inside, _ in panels for span in inside)
    parts += _legend([k for k in dict.fromkeys((*_COLORS, *kinds)) if k in kinds], y + 14)
    height = int(y + 40 + 16 * -(-len(kinds) // 2))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1280" height="{height}" '
        f'style="width: 100%" font-family="{MONOSPACED}" font-size="{_FONT}" '
        f'fill="currentColor">{_STYLE}{"".join(parts)}</svg>'
    )


_STYLE = (
    '<style>.spans-narrow { display: none } @media (max-width: 700px) '
    '{ .spans-narrow { display: inline } .spans-wide { display: none } }</style>'
)


def _joined(spans: Sequence[Bar], total: float) -> list[Bar]:
    """Joins neighbors that are too narrow to be seen, so that drawings stay small."""
    joined: list[Bar] = []
    for span in spans:
        last = joined[-1] if joined else None
        gap = 0.0 if last is None else span.start - (last.start + last.seconds)
        if last and max(gap, min(last.seconds, span.seconds)) < _TINY * total:
            longer = max(last, span, key=lambda one: one.seconds)
            end = span.start + span.seconds
            joined[-1] = longer._replace(start=last.start, seconds=end - last.start)
        else:
            joined.append(span)
    return joined


def _bar(spans: Sequence[Bar], total: float, y: float, has_times: bool) -> Iterator[str]:
    yield f'<rect x="0" y="{y:g}" width="100%" height="{_BAR}" fill="#808080" opacity="0.15"/>'
    for span in spans:
        share = span.seconds / total
        x, width = f'{100 * span.start / total:.3f}%', f'{100 * share:.3f}%'
        color = _COLORS.get(span.kind, _OTHER_KIND)
        time = format_seconds(span.seconds) if has_times else f'{share:.1%}'
        label = span.label
        if span.inner and has_times:
            label = f'{span.trips} x {format_seconds(span.seconds / span.trips)}'
        about = f'{time}: {_NAMES.get(span.kind, span.kind)} {span.label}'.strip()
        # a picture in the picture, which clips the label
        yield f'<svg x="{x}" y="{y:g}" width="{width}" height="{_BAR}">'
        yield f'<title>{html.escape(about)}</title>'
        yield f'<rect width="100%" height="100%" fill="{color}"/>'
        waiting = span.waiting / span.seconds if span.seconds else 0
        if waiting:
            left, part = f'{100 - 100 * waiting:.2f}%', f'{100 * waiting:.2f}%'
            yield f'<rect x="{left}" width="{part}" height="100%" fill="{_COLORS["wait"]}"/>'
        labels = [_fitting(label, share * (1 - waiting) * w) for w in (_WIDE, _NARROW)]
        for text, style in zip(labels, ('spans-wide', 'spans-narrow'), strict=True):
            if text:
                yield _text(3, 15, text, f'fill="#111" class="{style}"')
        yield '</svg>'


def _fitting(label: str, width: float) -> str:
    """Shortens a label, such as 'model.py:12 params/w', to fit into a box; '' if it cannot."""
    room = int((width - 6) / _CHARACTER)
    texts = [label]
    source, _, rest = label.partition(' ')
    if ':' in source:
        shorter = [f'{label[: room - 2]}..'] if rest and room > len(source) + 4 else []
        texts += [*shorter, source, source[source.rfind(':') :]]
    return next((text for text in texts if len(text) <= room), '')


def _legend(kinds: Sequence[str], y: float) -> Iterator[str]:
    for i, kind in enumerate(kinds):
        x, top = f'{50 * (i % 2)}%', y + 16 * (i // 2)
        color = _COLORS.get(kind, _OTHER_KIND)
        yield f'<svg x="{x}" y="{top:g}" width="50%" height="16">'
        yield f'<rect width="11" height="11" fill="{color}"/>'
        yield f'{_text(16, 10, _NAMES.get(kind, kind))}</svg>'


def _text(x: float, y: float, text: str, style: str = '') -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>'
