"""The suggestions of a report: changes that were tried, and how to apply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding

from ..._errors import EinshardError
from ..._program.jaxpr.edits import PerDevice
from ..._text import format_bytes, short_source
from ..findings.expressions import expression_of, shard_text
from ..findings.facts import Facts
from ..findings.next_call import next_arguments, results_to_pin
from ..findings.trace import mesh_entries
from ..findings.values import Axis
from ..report import Report
from ..report_rows import Finding, Tried, changes
from .patch import make_patch, source_of
from .per_device import try_per_device
from .search import MIN_GAIN, Accepted, Search, make_trials, start_search
from .trials import Edits, Trials

# They do not depend on what a change costs: the program does not run, or code has no effect.
_FACTS = ('does not fit', 'promise broken', 'no effect', 'names without a rule', 'second compile')


class Fixes:
    """Changes of a program that were tried, and the report without them."""

    def __init__(
        self,
        report: Report,
        facts: Facts,
        search: Search | None,
        per_device: Sequence[tuple[Finding, PerDevice]] = (),
    ):
        self._report, self._facts, self._search = report, facts, search
        self._per_device = [*dict.fromkeys(finding for finding, _ in per_device)]
        self._first = Edits(per_device=tuple(change for _, change in per_device))
        self._pins, self._pinned = Edits(), None

    def try_pins(self) -> None:
        """Tries to shard results like the arguments that they replace, and the reverse.

        Keeps the change with the smaller bound. If the difference is less than 3 %, the results are
        pinned, because that leaves the arguments as they are. Leaves out what other changes move.
        """
        facts, replaced = self._facts, next_arguments(self._facts)
        others = self._first if self._search is None else self._search.edits
        results = {
            i: sharding
            for i, sharding in results_to_pin(facts).items()
            if i not in others.results and replaced[i] not in others.arguments
        }
        self._pins, self._pinned = Edits(), None
        call = facts.stages.call if results and not facts.is_explicit else None
        if call is None or len(call.dynamic) != len(facts.arguments):
            return
        trials = Trials(facts, call)
        as_returned = {i: facts.results[i].sharding for i in results}
        shardings = {i: s for i, s in as_returned.items() if isinstance(s, NamedSharding)}
        options = (
            Edits(results=results),
            Edits(arguments={replaced[i]: s for i, s in shardings.items()}, results=shardings),
        )
        base = self._search.current if self._search else trials.run(self._first)
        tried = [(trials.run(others | edits), edits) for edits in options]
        found = [(trial.figures, edits) for trial, edits in tried if trial is not None]
        if not found or base is None:
            return
        least = min(after.bound for after, _ in found)
        after, edits = next(pair for pair in found if (1 - MIN_GAIN) * pair[0].bound <= least)
        costs = after.network_bytes, after.memory, after.flops, after.bound
        self._pins, self._pinned = edits, Tried(*costs, base.figures)

    def report(self) -> Report:
        """Returns the report, with the changes that help as findings."""
        search, report = self._search, self._report
        if search is None:
            found = self._without_suggestions(self._per_device, [])
            return replace(report, **found, fixes=self)
        rules = [*report.findings]
        found = [self._finding(accepted, rules) for accepted in search.accepted]
        found = [*self._per_device, *found]
        lines = list[str]()
        if search.target is not None and (len(found) > 1 or self._facts.platform != 'cpu'):
            together = 'all together, ' * (len(found) > 1)
            costs = '; '.join(changes(*search.target))
            lines.append(f'{together}compiled for {report.device_kind}: {costs}')
        if search.cut:
            lines.append(f'{search.n_tried} changes tried ({search.cut}: the search was stopped)')
        return replace(
            report,
            **self._without_suggestions(found, search.accepted),
            total=tuple(lines),
            fixes=self,
        )

    def _without_suggestions(
        self, found: Sequence[Finding], accepted: Sequence[Accepted]
    ) -> dict[str, Any]:
        """Returns the findings and notes of the report, without suggestions that were not tried.

        Costs that no change lowers are notes.
        """
        if self._facts.is_explicit:  # they cannot be tried, and the types show what is right
            return {'findings': self._report.findings, 'notes': self._report.notes}
        explained = {name for finding in found for name in finding.explains}
        explained |= {one.change.cost.line for one in accepted}
        if self._search is not None and accepted:  # what the changes have made disappear
            after = {c.source for c in self._search.current.collectives}
            after |= {row.source for row in self._search.current.products}
            before = {c.source or '' for c in self._search.base.collectives}
            explained |= before - after
        findings, notes = [*found], list[Finding]()
        for finding in self._report.findings:
            if finding.kind == 'second compile':
                if self._pinned is None and found:
                    continue  # other changes move these arrays
                suggestion = finding.suggestion if self._pinned else ''
                if self._pins.arguments:
                    suggestion = ', and '.join(self._moves(self._pins))
                findings.append(replace(finding, suggestion=suggestion, tried=self._pinned))
            elif finding.kind in _FACTS:
                findings.append(finding)
            elif explained.isdisjoint((*finding.explains, finding.source or '')):
                notes.append(replace(finding, suggestion=''))
        for note in self._report.notes:
            if note.source is None or explained.isdisjoint((*note.explains, note.source)):
                notes.append(replace(note, suggestion=''))
        findings.sort(key=lambda one: one.kind not in _FACTS[:2])
        return {'findings': tuple(findings), 'notes': tuple(notes)}

    def _finding(self, accepted: Accepted, rules: list[Finding]) -> Finding:
        """Returns the finding of a change, in the words of one of `rules`, which it removes."""
        cost = accepted.change.cost
        if cost.n_repeats:
            text = f'{cost.n_repeats} devices repeat the matmuls in this line'
        else:
            axes = ', '.join(cost.mesh_axes)
            what = f' of {cost.role}' if cost.role else ''
            text = f'{cost.kind}{what} along {axes} sends {format_bytes(cost.bytes)}'
        kind, names = accepted.change.kind, cost.names
        for rule in rules:
            if rule.source == cost.line or {*rule.explains} & {*names}:
                text, kind, names = rule.text, rule.kind, (*rule.explains, *names)
                rules.remove(rule)
                break
        return Finding(
            kind,
            text,
            cost.line or None,
            cost.bytes,
            self._suggestion(accepted),
            tuple(names),
            accepted.tried,
        )

    def _suggestion(self, accepted: Accepted) -> str:
        facts, change = self._facts, accepted.change
        assert facts.mesh is not None
        texts: list[str] = []
        for point in change.points:
            axes = point.seen_axes
            placement = expression_of(point.axes if axes is None else axes, facts.mesh)
            mapped = ', with the axes that jax.vmap adds' if axes is None else ''
            source, line = source_of(point.span), short_source(point.span.source)
            what = (
                f'`{source}`' if source and len(source) < 60 and '\n' not in source else 'the value'
            )
            if point.is_constraint:
                texts.append(f"change the constraint in {line} to '{placement}'{mapped}")
            else:
                call = f"einshard(..., '{placement}')"
                texts.append(f'constrain {what} in {line}: {call}{mapped}')
        texts += self._moves(change.edits)
        return ', and '.join(texts)

    def _moves(self, edits: Edits) -> list[str]:
        """Returns what to shard otherwise: arguments, or else results."""
        facts, texts = self._facts, list[str]()
        arguments = {
            facts.arguments[i].path: self._placement(facts.values[i].axes, sharding)
            for i, sharding in edits.arguments.items()
        }
        if arguments:
            texts.append(shard_text(arguments))
        elif edits.results:
            results = {
                facts.results[i].path: self._placement([Axis()] * len(sharding.spec), sharding)
                for i, sharding in edits.results.items()
            }
            texts.append(shard_text(results))
        return texts

    def _placement(self, axes: Sequence[Axis], sharding: NamedSharding) -> str:
        assert self._facts.mesh is not None
        entries = mesh_entries(sharding, len(axes))
        pairs = zip(axes, entries, strict=True)
        moved = [replace(axis, mesh_axes=entry or ()) for axis, entry in pairs]
        return expression_of(moved, self._facts.mesh)

    def patch(self) -> str:
        """See `Report.patch`."""
        search = self._search
        others = [finding.suggestion for finding in self._per_device]
        if search is None or not search.accepted:
            return make_patch((), [*others, *self._moves(self._pins)])
        points = {point.span: point for one in search.accepted for point in one.change.points}
        shardings = [(points[edit.span], edit.sharding) for edit in search.edits.values]
        return make_patch(shardings, [*others, *self._moves(search.edits | self._pins)])

    def function(self) -> Any:
        """See `Report.fixed_function`."""
        search, call = self._search, self._facts.stages.call
        edits = (self._first if search is None else search.edits) | self._pins
        if call is None or edits == Edits():
            raise EinshardError('no change of the program was found that helps', code='argument')
        if self._facts.stages.framework is not None:
            raise EinshardError(
                'the changes of a function that Flax or Equinox jits cannot be applied',
                code='argument',
                facts={'instead': 'change the lines that report.findings name'},
            )
        return Trials(self._facts, call).edited(edits).function

    def more(self, tries: int, seconds: float | None = None) -> Report:
        """See `Report.try_more`."""
        if self._search is not None:
            self._search.run(tries, seconds)
            self._search.confirm()
        self.try_pins()
        return self.report()


def with_fixes(report: Report, facts: Facts, tries: int, seconds: float | None) -> Report:
    """Tries changes of a program, and returns the report with those that help."""
    trials = make_trials(facts)
    per_device = [] if trials is None else try_per_device(trials)
    first = Edits(per_device=tuple(change for _, change in per_device))
    search = None if trials is None else start_search(trials, first)
    fixes = Fixes(report, facts, search, per_device)
    if search is not None:
        search.run(tries, seconds)
        if search.accepted:
            search.confirm()
    fixes.try_pins()
    return fixes.report()
