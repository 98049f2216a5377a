"""The web page of a report, as a file: what a reader decides by, then findings, then the rest."""

from __future__ import annotations

import datetime
import html
import linecache
import os
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .._errors import printable
from .._page import Page
from .._page_html import document, section_html
from .._text import format_bytes, format_flops, format_seconds, short_source
from .._version import __version__
from .fold_layers import fold
from .report_rows import Figures, Finding, Tried
from .timeline import Timeline

Report: TypeAlias = Any  # its module imports this one
_MAX_BARS = 12
_CONTEXT = 3  # lines of source around one that has a cost


def report_document(report: Report, page: Page, timeline: Timeline | None, patch: str) -> str:
    """Returns an HTML document.

    Args:
        page: the tables and notes of the report.
        patch: the suggestions as a diff; '' if there are none.
    """
    first = [each for each in page.sections if each.picture]
    rest = [each for each in page.sections if not each.picture]
    rest.sort(key=lambda each: not each.comes_first)
    body = [
        f'<h1>{_escaped(page.title)}</h1>',
        _figures(report, timeline),
        *_findings(report, patch),
        *(section_html(each) for each in first),
        *_bars('sent by line', *_sent_by_line(report)),
        *_bars('memory by array, on a device', *_memory_by_array(report)),
        *_sources(report),
        *(section_html(each) for each in rest),
        *_texts('notes', page.notes),
        _foot(),
        f'<script>{_SCRIPT}</script>',
    ]
    return document(page.title, _STYLE, '\n'.join(filter(None, body)))


# --- what a reader decides by -------------------------------------------------------------------


def _figures(report: Report, timeline: Timeline | None) -> str:
    found = [('sent by a device', format_bytes(report.network_bytes), 'in one run', '')]
    memory = report.memory
    if memory is not None:
        capacity, note, mood = memory.capacity, '', ''
        if capacity:
            fits = memory.total <= capacity
            share = memory.total / capacity
            percent = f'{share:.0%}' if share >= 0.01 else '<1%'
            note = f'{"fits" if fits else "does not fit"}: {percent} of {format_bytes(capacity)}'
            mood = '' if fits else 'bad'
        found.append(('memory of a device', format_bytes(memory.total), note, mood))
    if (largest := report.bounds.largest) is not None:
        of = f'{largest.resource} {largest.along}'.strip()
        found.append(('largest lower bound', format_seconds(largest.seconds), of, ''))
    if timeline is not None and timeline.totals.step is not None:
        totals, step = timeline.totals, timeline.totals.step
        share = (totals.exposed or 0.0) / (step or 1.0)
        what = 'estimated step' if timeline.source == 'estimated' else 'measured step'
        found.append((what, format_seconds(step), f'{share:.0%} waiting for collectives', ''))
    cells = ''.join(
        f'<div class="figure {mood}"><span>{_escaped(name)}</span><b>{_escaped(value)}</b>'
        f'<span>{_escaped(note)}</span></div>'
        for name, value, note, mood in found
    )
    return f'<div class="figures">{cells}</div>'


# --- findings -----------------------------------------------------------------------------------


def _findings(report: Report, patch: str) -> Iterator[str]:
    yield '<h2>findings</h2>' if report.findings or report.total else ''
    yield from map(_card, dict.fromkeys(report.findings))
    yield from (f'<p>{_escaped(line)}</p>' for line in report.total)
    if patch:
        yield (
            '<details open><summary>all suggestions as a patch</summary><div class="diff">'
            f'<button hidden>copy</button><pre>{_diff(patch)}</pre></div></details>'
        )


def _card(finding: Finding) -> str:
    line = short_source(finding.source) if finding.source else ''
    where = f'<span class="where">{_escaped(line)}</span>' if line else ''
    parts = [f'<p>{where}<b>{_escaped(finding.kind)}</b>: {_escaped(finding.text)}</p>']
    if finding.suggestion:
        text = finding.suggestion
        parts.append(f'<p class="do">{_escaped(text[0].upper() + text[1:])}.</p>')
    if finding.tried is not None:
        parts.append(_before_and_after(finding.tried.before, finding.tried))
    if finding.reason:
        parts.append(f'<p class="why">{_escaped(finding.reason)}</p>')
    return f'<div class="card">{"".join(parts)}</div>'


def _before_and_after(before: Figures, after: Tried) -> str:
    rows = [
        ('sent', format_bytes(before.network_bytes), format_bytes(after.network_bytes)),
        ('sum of lower bounds', format_seconds(before.bound), format_seconds(after.bound)),
        ('flops', format_flops(before.flops), format_flops(after.flops)),
    ]
    if before.memory and after.memory:
        rows.insert(1, ('memory', format_bytes(before.memory), format_bytes(after.memory)))
    if before.step and after.step:
        rows.append(('estimated step', format_seconds(before.step), format_seconds(after.step)))
    cells = ''.join(
        f'<tr><th>{name}</th><td>{_escaped(old)}</td><td>{_escaped(new)}</td></tr>'
        for name, old, new in rows
        if old != new
    )
    on = ', on simulated CPUs' * after.is_simulated
    head = f'<tr><th></th><td>as it is{on}</td><td>with this change</td></tr>'
    return f'<table class="tried">{head}{cells}</table>' if cells else ''


def _diff(patch: str) -> str:
    kinds = {'+': 'add', '-': 'del', '@': 'at', '#': 'at'}
    return '\n'.join(
        f'<span class="{kinds[line[0]]}">{_escaped(line)}</span>'
        if line[:1] in kinds
        else _escaped(line)
        for line in patch.rstrip('\n').split('\n')
    )


# --- bars ---------------------------------------------------------------------------------------


def _bars(title: str, rows: Sequence[tuple[str, int]], total: int) -> Iterator[str]:
    if not rows or not total:
        return
    shown = [*rows[:_MAX_BARS]]
    if left := sum(n for _, n in rows[_MAX_BARS:]):
        shown.append((f'{len(rows) - _MAX_BARS} others', left))
    largest = max(n for _, n in shown)
    items = ''.join(
        f'<div class="bar"><span>{_escaped(label)}</span>'
        f'<i style="width: {60 * n / largest:.1f}%"></i><span>{format_bytes(n)}</span></div>'
        for label, n in shown
    )
    yield f'<h2>{title}</h2><div class="bars">{items}</div>'


def _sent_by_line(report: Report) -> tuple[list[tuple[str, int]], int]:
    sent = _bytes_by_line(report)
    rows = sorted(sent.items(), key=lambda pair: -pair[1])
    return [(short_source(line) or 'unknown line', n) for line, n in rows if n], sum(sent.values())


def _bytes_by_line(report: Report) -> Mapping[str, int]:
    sent = Counter[str]()
    for row in report.collectives:
        sent[row.source or ''] += row.total_bytes
    return sent


def _memory_by_array(report: Report) -> tuple[list[tuple[str, int]], int]:
    in_place = {result for result, _ in report.in_place}
    arrays = [*report.arguments, *(row for row in report.results if row.path not in in_place)]
    rows = [
        (path, sum(arrays[i].bytes for i in indices))
        for path, indices in fold([row.path for row in arrays], [row.array for row in arrays])
    ]
    rows += [(f'temporaries: {row.array}', row.bytes) for row in report.temporaries]
    rows = sorted(((path, n) for path, n in rows if n), key=lambda pair: -pair[1])
    return rows, sum(n for _, n in rows)


# --- the user's source --------------------------------------------------------------------------


def _sources(report: Report) -> Iterator[str]:
    """The lines that have costs, with those around them, for each file that is here."""
    costs: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
    sent, flops = _bytes_by_line(report), Counter[str]()
    for row in report.products:
        flops[row.source or ''] += row.flops
    texts = [(line, f'sends {format_bytes(n)}') for line, n in sent.items() if n]
    texts += [(line, format_flops(int(n))) for line, n in flops.items()]
    for line, text in texts:
        file, _, number = line.rpartition(':')
        if file and number.isdecimal():
            costs[file].setdefault(int(number), []).append(text)
    for file, of_line in costs.items():
        lines = linecache.getlines(file)
        if lines:
            body = ''.join(_source_lines(lines, of_line))
            name = _escaped(short_source(file))
            yield f'<details><summary>{name}, with its costs</summary><pre>{body}</pre></details>'


def _source_lines(lines: Sequence[str], costs: Mapping[int, Sequence[str]]) -> Iterator[str]:
    shown = {n for at in costs for n in range(at - _CONTEXT, at + _CONTEXT + 1)}
    last = 0
    for n in sorted(n for n in shown if 0 < n <= len(lines)):
        if last and n > last + 1:
            yield '<span class="gap">..</span>\n'
        last, text = n, _escaped(lines[n - 1].rstrip('\n'))
        if n in costs:
            yield f'<mark>{n:>5}  {text}</mark>  <span class="cost">{"; ".join(costs[n])}</span>\n'
        else:
            yield f'{n:>5}  {text}\n'


def _texts(title: str, texts: Iterable[str]) -> Iterator[str]:
    items = ''.join(f'<li>{_escaped(text)}</li>' for text in texts)
    if items:
        yield f'<h2>{title}</h2><ul class="notes">{items}</ul>'


def _foot() -> str:
    jax = sys.modules.get('jax')
    command = shlex.join([os.path.basename(sys.argv[0] or 'python'), *sys.argv[1:]])
    date = datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M')
    versions = f'einshard {__version__}, JAX {getattr(jax, "__version__", "")}'
    return f'<footer>{_escaped(command)}<br>{versions}, {date}</footer>'


def _escaped(text: str) -> str:
    return html.escape(printable(text))


_STYLE = """
:root { color-scheme: light dark; --line: rgba(128,128,128,0.3); --soft: rgba(128,128,128,0.1);
  --bad: #c62828; --do: #2e7d32; --bar: #4a7fd4 }
@media (prefers-color-scheme: dark) { :root { --bad: #ff6b6b; --do: #81c784; --bar: #6fa0ee } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 16px; max-width: 1200px;
  overflow-wrap: anywhere }
h1 { font-size: 20px; margin: 0 0 12px } h2 { font-size: 16px; margin: 28px 0 8px }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px }
.figure span { display: block; opacity: 0.75; font-size: 13px }
.figure b { display: block; font-size: 26px; line-height: 1.3 }
.bad, .bad span { color: var(--bad); opacity: 1 }
.card { border: 1px solid var(--line); border-left: 4px solid #d9a400; border-radius: 6px;
  padding: 4px 14px; margin: 10px 0 }
.card p { margin: 8px 0 } .do { color: var(--do); font-weight: 600 } .why { opacity: 0.75 }
.where { font-family: ui-monospace, monospace; background: var(--soft); border-radius: 4px;
  padding: 1px 6px; margin-right: 8px; font-size: 13px }
table.tried { border-collapse: collapse; margin: 8px 0; font-size: 14px }
.tried :is(th, td) { border-top: 1px solid var(--line); padding: 3px 24px 3px 0;
  text-align: left; font-weight: normal }
.tried td { font-family: ui-monospace, monospace; font-size: 13px }
.tried tr:first-child :is(th, td) { border: none; opacity: 0.75; font-family: inherit }
pre { background: var(--soft); padding: 10px; border-radius: 6px; overflow: auto;
  font: 13px/1.45 ui-monospace, monospace; overflow-wrap: normal }
.add { color: var(--do) } .del { color: var(--bad) } .at, .gap { opacity: 0.65 }
.cost { opacity: 0.8; font-style: italic } mark { background: rgba(217,164,0,0.2); color: inherit }
.einshard-page table { width: 100% }
.diff { position: relative }
.diff button { position: absolute; right: 8px; top: 8px; font: inherit; font-size: 13px }
summary { cursor: pointer; margin: 10px 0 4px; font-weight: 600 }
.bar { display: grid; grid-template-columns: minmax(120px, 30%) 1fr; align-items: center;
  column-gap: 10px; font-size: 14px; margin: 3px 0 }
.bar > span:first-child { text-align: right } .bar i { display: inline-block; height: 14px;
  background: var(--bar); border-radius: 3px; grid-column: 2; min-width: 2px }
.bar > span:last-child { grid-column: 2; font-size: 12px; opacity: 0.8; margin-top: -19px;
  justify-self: end }
.notes { padding-left: 18px } footer { margin-top: 32px; padding-top: 8px; font-size: 13px;
  border-top: 1px solid var(--line); opacity: 0.75 }
table.sortable th { cursor: pointer }
@media (max-width: 640px) { body { padding: 10px } .figure b { font-size: 22px }
  .bar { grid-template-columns: 1fr } .bar > span:first-child { text-align: left }
  .bar i, .bar > span:last-child { grid-column: 1 } }
"""
# Without a script, all can be read: it copies patches and sorts tables.
_SCRIPT = """
for (const button of document.querySelectorAll('.diff button')) {
  button.hidden = false;
  button.onclick = () => navigator.clipboard.writeText(button.nextElementSibling.textContent);
}
const size = { B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824, ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1 };
const value = (text) => {
  const match = text.match(/^(?:(\\d+) x )?([\\d.]+)\\s*([A-Za-z]+)?/);
  return match ? (match[1] || 1) * match[2] * (size[match[3]] || 1) : text;
};
for (const head of document.querySelectorAll('.einshard-page tr:first-child th')) {
  head.style.cursor = 'pointer';
  head.tabIndex = 0;
  const sort = () => {
    const table = head.closest('table'), i = [...head.parentNode.children].indexOf(head);
    const rows = [...table.rows].slice(1), groups = [];
    for (const row of rows)
      row.className === 'below' ? groups[groups.length - 1].push(row) : groups.push([row]);
    const up = head.dataset.up !== '1';
    head.dataset.up = up ? '1' : '';
    const key = (group) => value(group[0].cells[i].textContent);
    groups.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (up ? 1 : -1));
    for (const group of groups) for (const row of group) row.parentNode.append(row);
  };
  head.onclick = sort;
  head.onkeydown = (event) => { if (event.key === 'Enter') sort(); };
}
"""
