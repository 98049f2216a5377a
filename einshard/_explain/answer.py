"""The answer to `Report.why`: why a program has a collective, or why a value is sharded so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._display import Display
from .._errors import EinshardError
from .._page import Page, Section
from .._program.hlo.collective import Collective
from .._text import first_of, format_bytes, short_arrays, short_source
from .findings.facts import Facts
from .why import UNKNOWN, Reason, ValueReason, why_value


@dataclass(frozen=True, repr=False)
class Why(Display):
    """Why collectives are in a program, and why values are sharded as they are.

    Attributes:
        reasons: for each collective, its `cause`, a sentence as `text`, and the `origins` of the
            mesh axes that it is about.
        values: for each value, its mesh axes, each with its `origin` and the lines that it
            travelled.
        note: why nothing is known, or what may differ from the compiled program; or ''.
    """

    reasons: tuple[Reason, ...] = ()
    values: tuple[ValueReason, ...] = ()
    note: str = ''

    def to_dict(self) -> dict[str, Any]:
        """Converts the answer to dictionaries, lists and strings, for JSON."""
        reasons = [
            {
                'name': reason.row.name,
                'kind': reason.row.kind,
                'source': reason.row.source,
                'cause': reason.cause,
                'text': reason.text,
                'origins': [list(pair) for pair in reason.origins],
                'travelled': [list(lines) for lines in reason.travelled],
            }
            for reason in self.reasons
        ]
        values = [
            {
                'name': value.name,
                'dtype': value.value.dtype,
                'shape': list(value.value.shape),
                'axes': [
                    {
                        'mesh_axis': axis.axis,
                        'dimension': axis.dimension,
                        'origin': axis.origin,
                        'travelled': list(axis.travelled),
                    }
                    for axis in value.axes
                ],
            }
            for value in self.values
        ]
        return {'schema': 1, 'reasons': reasons, 'values': values, 'note': self.note}

    def _page(self) -> Page:
        sections = [
            Section(title, lines=tuple(dict.fromkeys(lines)))
            for title, lines in (
                ('collectives', [*map(_reason_line, self.reasons)]),
                ('values', [*map(str, self.values)]),
            )
            if lines
        ]
        return Page('', tuple(sections), notes=(self.note,) if self.note else ())


def _reason_line(reason: Reason) -> str:
    row = reason.row
    along = f' along {row.along}' if row.along else ''
    sent = '' if row.network_bytes is None else f', {format_bytes(row.total_bytes)} sent'
    what = f'{row.kind} of {short_arrays(row.arrays)}{along}{sent}'
    cause = f' ({reason.cause})' if reason.cause != UNKNOWN else ' (reason unknown)'
    return f'{short_source(row.source) or "no line"}: {what}{cause}: {reason.text}'


def answer(facts: Facts, where: Collective | str) -> Why:
    """See `Report.why`."""
    program, note = facts.propagation
    if program is None:
        return Why(note=f'the reasons are unknown: {note}')
    if isinstance(where, Collective):
        rows = [c for c in facts.collectives if c.name == where.name]
        place = where.name
    else:
        place = where
        rows = [
            c
            for c in facts.collectives
            if any(f'/{line}'.endswith(f'/{place}') for line in (c.source, c.called_at) if line)
        ]
    values = () if isinstance(where, Collective) else why_value(program, place, facts.joined_axes)
    if not rows and not values:
        lines = dict.fromkeys(short_source(c.source) for c in facts.collectives if c.source)
        raise EinshardError(
            f"the program has no collective and no value at '{place}'",
            code='argument',
            facts={
                'expected': 'a row of report.collectives, a line such as model.py:34, or the path '
                'of an argument or result',
                'lines of collectives': first_of([*lines], 5) or 'none',
            },
        )
    return Why(tuple(facts.reasons[c.name] for c in rows), values, note)
