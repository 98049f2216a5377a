"""Notes the communication that the device waits longest for, as the estimated timeline has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..._program.hlo.collective import Collective
from ..._program.hlo.opcodes import FREE
from ..._text import format_seconds
from ..estimate import refusal
from ..report_rows import Finding
from ..timeline import TimelineRow
from .facts import Facts

_MIN_SHARE = 0.05  # of the step
_MAX_HIDDEN = 0.1  # of its time: else, something hides it


def exposed_communication(facts: Facts) -> Iterator[Finding]:
    """Notes the largest exposed collective that nothing hides, and where it stands."""
    if refusal(facts) is not None:
        return
    timeline, explained = facts.timeline, facts.explained
    waiting = sum(line.exposed for line in timeline.lines)  # of the step
    groups: defaultdict[object, list[TimelineRow]] = defaultdict(list)
    for row in timeline.rows:
        is_hidden = row.hidden is None or row.hidden > _MAX_HIDDEN
        if row.share is not None and not is_hidden and row.name not in explained:
            groups[row.kind, row.of, row.along, row.source].append(row)
    share, rows = max(
        ((sum(row.share or 0.0 for row in rows), rows) for rows in groups.values()),
        key=lambda pair: pair[0],
        default=(0.0, list[TimelineRow]()),
    )
    if share * waiting < _MIN_SHARE:
        return
    names = tuple(row.name for row in rows)
    collectives = [c for c in facts.collectives if c.name in names]
    row, step = rows[0], timeline.totals.step
    time = f'{share * waiting:.0%} of the estimated step'
    if step is not None:
        time = f'{format_seconds(share * waiting * step)}, {time}'
    along = f' along {row.along}' if row.along else ''
    yield Finding(
        'exposed communication',
        f'the device waits for the {row.kind} of {row.of or row.arrays}{along} ({time}), which '
        f'nothing hides: {_reason(facts, collectives[0])}',
        row.source,
        sum(c.total_bytes for c in collectives),
        explains=names,
    )


def _reason(facts: Facts, row: Collective) -> str:
    """Says where a collective stands in the schedule."""
    op = row.nodes[0].op
    computations = facts.graph.program.computations.values()
    ops = next((ops for ops in computations if any(each.name == op.name for each in ops)), [])
    is_synchronous = not op.opcode.endswith('-start') and row.nodes[0].scope.fusion is None
    what = 'it is synchronous' if is_synchronous else 'little is computed between start and end'
    names = [each.name for each in ops]
    after = ops[names.index(op.name) + 1 :] if op.name in names else []
    is_last = all(each.opcode in FREE or each.opcode.endswith('-done') for each in after)
    if after and is_last and row.nodes[0].loop is not None:
        return f'{what}, at the end of the body of a loop'
    return what
