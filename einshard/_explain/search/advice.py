"""The advice of a report: changes that were tried, and how to apply them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh, NamedSharding

from ..._errors import EinshardError, plural
from ..._program.edits.apply import apply
from ..._program.edits.edit import (
    Constrain,
    Edit,
    MoveThrough,
    PlaceArguments,
    PlaceResults,
    RemoveConstraint,
    ReplaceConstraint,
    combine,
    indices,
    placements,
)
from ..._program.hlo.memory import read_memory
from ..._program.traced.shardy import NotPropagated
from ..._sharding.scopes import mesh_scope
from ..._text import first_of, format_bytes, format_seconds
from ..costs import REMATERIALIZED
from ..findings.arguments import parameters_of_new_states, states_of_parameters
from ..findings.expressions import shard_text
from ..findings.facts import Facts
from ..findings.gathered_axes import IN_TWO_LEVELS
from ..findings.next_call import (
    next_arguments,
    results_to_pin,
    weights_of_gradients,
)
from ..kinds import FACTS, PINNED, URGENT, FindingKind
from ..partition import ENDED
from ..report import Report
from ..report_rows import Figures, Finding, Tried, changes
from ..stages import Stages
from .per_device import try_per_device
from .proposals import MIN_GAIN, Proposals
from .search import MIN_SECONDS, Accepted, Search
from .trials import NOT_WRITTEN, Trials, as_tried
from .with_edits import fixed_function, patch_of
from .words import Words, pin_text, strategy_text

# Findings whose change was made before the search.
_First = tuple[Finding, tuple[Edit, ...]]


class Advice:
    """Changes of a program that were tried, and the report without them."""

    def __init__(
        self, report: Report, facts: Facts, search: Search | None, first: Sequence[_First] = ()
    ):
        self._report, self._facts, self._search = report, facts, search
        self._words = Words(facts)
        self._made = [*dict.fromkeys(finding for finding, _ in first)]
        self._first = _combined(first)
        self._pins: tuple[Edit, ...] = ()
        self._pinned, self._pin_costs = None, ''
        self._replaced = {**next_arguments(facts), **weights_of_gradients(facts)}

    def try_pins(self) -> None:
        """Tries to shard results like the arguments that they replace, and the reverse.

        The reverse is what the next call runs anyway, if nothing is changed. So results are pinned,
        which leaves the arguments as they are, unless that costs more. Gradients are only pinned.
        Leaves out what other changes move.
        """
        facts, replaced = self._facts, self._replaced
        others = self._first if self._search is None else self._search.edits
        moved, returned = indices(others, 'argument'), indices(others, 'result')
        results = {
            i: sharding
            for i, sharding in results_to_pin(facts, replaced).items()
            if i not in returned and replaced[i] not in moved
        }
        self._pins, self._pinned, self._pin_costs = (), None, ''
        call = facts.call if results else None
        if call is None:
            return
        trials = Trials(facts, call)
        edits: tuple[Edit, ...] = (PlaceResults(results),)
        pinned = trials.run(combine(others, edits))
        base = None
        if not facts.gradients:
            as_returned = {i: facts.results[i].sharding for i in results}
            shardings = {i: s for i, s in as_returned.items() if isinstance(s, NamedSharding)}
            moves = {replaced[i]: s for i, s in shardings.items()}
            moved = (PlaceArguments(moves, shardings),)
            base = trials.run(combine(others, moved))
            if base is not None and pinned is not None:
                self._pin_costs = str(as_tried(base.figures, pinned.figures))
            if base is not None and (not pinned or _costs_more(base.figures, pinned.figures)):
                edits, pinned = moved, base
        if base is None:
            base = self._search.current if self._search else trials.run(self._first)
        if base is None or pinned is None or _costs_more(base.figures, pinned.figures):
            return
        self._pinned = as_tried(base.figures, pinned.figures, pinned.reading.is_simulated)
        self._pins = edits

    def report(self) -> Report:
        """Returns the report, with the changes that help as findings."""
        search, report = self._search, self._report
        rules, notes = [*report.findings], [*report.notes]
        accepted = [] if search is None else search.accepted
        found = [*self._made, *(self._finding(each, rules) for each in accepted)]
        lines = list[str]()
        if search is not None:
            # what the search found in order is no news
            notes = [note for note in notes if note.kind != 'cost']
            if search.target is not None and len(found) > 1:
                costs = '; '.join(changes(*search.target)) or 'the same costs'
                lines.append(
                    f'{len(found)} changes, together, compiled for {report.device_kind}: {costs}'
                )
            elif search.target is not None and accepted and self._facts.platform != 'cpu':
                found = [replace(found[0], tried=as_tried(*search.target))]
            if accepted and self._facts.chip is not None:
                mark = ' (the largest)' * (len(search.bounds) > 1)
                left = (f'{b}{mark * (b is search.bounds.largest)}' for b in search.bounds)
                what = 'the change' if len(found) == 1 else 'all changes'
                lines.append(f'lower bounds with {what}: {"; ".join(left)}')
            if accepted or search.cut or search.left_out:
                lines.append(search.summary)
            notes += self._not_tried(search)
        findings, notes = self._others(found, rules, notes)
        if search is not None and not (findings or lines or search.refused):
            lines.append(self._nothing_found(search))
        return replace(
            report, findings=findings, notes=notes, total=tuple(lines) or report.total, fixes=self
        )

    def _nothing_found(self, search: Search) -> str:
        bound, chip = search.base.figures.bound, search.trials.chip.name
        text = f'no change lowers the bounds by {MIN_GAIN:.0%}: {search.summary}'
        if search.is_used_up:
            text += '; tries= is used up, and report.try_more() goes on'
        if MIN_GAIN * bound < MIN_SECONDS:
            text += f'. The program is too small: its lower bounds on {chip} add up to '
            text += format_seconds(bound)
        return text

    def _not_tried(self, search: Search) -> list[Finding]:
        ended = [error for _, error in search.failed if error.startswith(ENDED)]
        if ended and search.accepted:
            n = len(ended)
            return [Finding('not tried', f'{plural(n, "change")} dropped: {ended[0]}')]
        if search.refused:
            kind = self._report.device_kind
            text = f'a change that helps does not compile for {kind}: {search.refused}'
            return [Finding('not tried', text)]
        if search.accepted or not search.failed or search.has_compiled:
            return []
        # the most promising change, or one after which JAX names what to write
        named = (each for each in search.failed if 'out_sharding' in each[1])
        edits, error = next(named, search.failed[0])
        text = (
            f'none of the changes that were tried compiles ({len(search.failed)}), such as: '
            f'{self._words.say(edits)}. {"JAX says: " * (not error.startswith(NOT_WRITTEN))}{error}'
        )
        return [Finding('not tried', text)]

    def _others(
        self, found: Sequence[Finding], rules: Sequence[Finding], notes: Sequence[Finding]
    ) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Returns the findings and the notes, without what the changes in `found` account for.

        What no change has lowered becomes a note, unless nothing could be tried.
        """
        explained = {name for finding in found for name in finding.explains}
        if self._search is not None and found:  # what the changes have made disappear
            explained |= {one.cost.line for one in self._search.accepted if one.cost is not None}
            after = {c.source for c in self._search.current.reading.collectives}
            after |= {row.source for row in self._search.current.reading.products}
            before = {c.source or '' for c in self._search.base.reading.collectives}
            explained |= before - after
        findings, left = [*found], list[Finding]()
        for finding in rules:
            if finding.kind in PINNED:
                if self._pinned is not None or not found:  # or else other changes move these arrays
                    suggestion = self._pin(finding)
                    findings.append(replace(finding, suggestion=suggestion, tried=self._pinned))
            elif finding.kind in FACTS:
                findings.append(finding)
            elif explained.isdisjoint((*finding.explains, finding.source or '')):
                stays = self._facts.is_explicit or self._search is None
                (findings if stays else left).append(finding)
        for note in notes:
            # a note about no collective stays true, whatever a change of its line saves
            about = {*note.explains, note.source} - {None} if note.explains else set[str]()
            # per_device is not tried where the operation may need all elements, and may be better
            if 'per_device' in note.text or explained.isdisjoint(about):
                left.append(note)
        pinned = [one for one in findings if one.kind in PINNED and one.suggestion]
        if len(pinned) > 1:
            together = f' (tried for {len(pinned)} findings together)'
            findings = [
                replace(one, suggestion=one.suggestion + together) if one in pinned else one
                for one in findings
            ]
        # whatever suggested it: what costs more is not a suggestion
        findings = [
            replace(one, suggestion='', tried=None)
            if one.tried is not None
            and _costs_more(one.tried.before, one.tried)
            and one.kind != 'does not fit'
            else one
            for one in findings
        ]
        findings.sort(key=lambda one: one.kind not in URGENT)
        return tuple(findings), tuple(left)

    def _pin(self, finding: Finding) -> str:
        """Returns the change after which the next call of a program does not compile again."""
        facts, replaced = self._facts, self._replaced
        pinned = [i for i in placements(self._pins)[1] if facts.results[i].path in finding.explains]
        if not pinned:
            return ''
        it = 'it' if len(pinned) == 1 else 'them'
        shown = [f"'{facts.argument_rows[replaced[i]].placement}'" for i in pinned]
        pin = pin_text(facts, it, first_of(list(dict.fromkeys(shown)), 3))
        if not indices(self._pins, 'argument'):
            return pin
        moves = self._words.say(self._pins)
        costs = f', which costs more: {self._pin_costs}' if self._pin_costs else ''
        return f'{moves}, as the step returns {it}. Or {pin}{costs}'

    def _finding(self, accepted: Accepted, rules: list[Finding]) -> Finding:
        """Returns the finding of a change, in the words of one of `rules`, which it removes."""
        cost, facts, words = accepted.cost, self._facts, self._words
        suggestion = words.say(accepted.edits)
        if text := strategy_text(facts, accepted.edits):
            suggestion += f' ({text})'
        other = accepted.other
        if other is not None and (said := words.say(other.edits)) not in suggestion:
            bounds = map(format_seconds, (other.tried.bound, accepted.tried.bound))
            suggestion += f'. Or: {said} (sum of lower bounds {", of the first ".join(bounds)})'
        memory = next((rule for rule in rules if rule.kind == 'does not fit'), None)
        if memory is not None and (accepted.tried.memory or 0) < (
            accepted.tried.before.memory or 0
        ):
            rules.remove(memory)
            return replace(memory, suggestion=suggestion, tried=accepted.tried)
        kind = kind_of(accepted.edits)
        if cost is None:
            text = str(accepted.bound)
            return Finding(kind, text, suggestion=suggestion, tried=accepted.tried)
        if cost.kind == REMATERIALIZED and kind in ('reshard', 'placement'):
            kind = cost.kind
        text, source, n_bytes = cost.text, cost.line, cost.bytes
        names, places = cost.names, {cost.line, *words.sources(accepted.edits)}
        moved = words.paths(accepted.edits)
        for rule in rules:
            about = {*rule.explains}
            is_same = rule.source in places or not moved.isdisjoint(about)
            if rule.kind not in ('no effect', *PINNED) and (is_same or about & {*names}):
                # the bytes in its text, of its collectives on the target
                text, kind, n_bytes = rule.text, rule.kind, rule.bytes or n_bytes
                names = (*rule.explains, *names)
                rules.remove(rule)
                break
        # in the program of the report, collectives may have other names
        rows = [
            c
            for c in facts.collectives
            if (c.source or '') == cost.line and c.mesh_axes.intersection(cost.mesh_axes)
        ]
        rows = [c for c in rows if c.kind == cost.kind] or rows
        reason = '' if cost.n_repeats else facts.reason_of(rows)
        source = source or facts.function_source  # moves of arguments and results have no line
        return Finding(kind, text, source, n_bytes, suggestion, names, accepted.tried, reason)

    @property
    def _edits(self) -> tuple[Edit, ...]:
        """All changes that help."""
        return combine(self._first if self._search is None else self._search.edits, self._pins)

    def patch(self) -> str:
        """See `Report.patch`."""
        comments = [finding.suggestion for finding in self._made]
        return patch_of(self._facts, self._edits, comments)

    def function(self) -> Any:
        """See `Report.fixed_function`."""
        edits = self._edits
        if self._facts.stages.call is None or not edits:
            raise EinshardError('no change of the program was found that helps', code='argument')
        return fixed_function(self._facts, edits)

    def more(self, tries: int, seconds: float | None = None) -> Report:
        """See `Report.try_more`."""
        if self._search is not None:
            self._search.run(tries, seconds)
            self._search.confirm()
        self.try_pins()
        return self.report()


def _costs_more(before: Figures, after: Figures | Tried) -> bool:
    """Whether the sum of the bounds is larger, as `changes` would print it."""
    return after.bound > 1.01 * before.bound


def kind_of(edits: Sequence[Edit]) -> FindingKind:
    """Names a mistake by the change that corrects it."""
    for kind, mistake in _MISTAKES.items():
        if any(isinstance(edit, kind) for edit in edits):
            return mistake
    return 'placement'


_MISTAKES: dict[type[Edit], FindingKind] = {
    ReplaceConstraint: 'wrong constraint',
    RemoveConstraint: 'needless constraint',
    Constrain: 'missing constraint',
    MoveThrough: 'reshard',
}


def with_advice(report: Report, facts: Facts, tries: int, seconds: float | None) -> Report:
    """Tries changes of a program, and returns the report with those that help.

    If the program cannot be edited, the report stays as it is, with a note that says why.
    """
    report = _try_new_states(report, facts)
    trials = make_trials(facts)
    if isinstance(trials, str):
        return _not_tried(report, trials) if trials and report.network_bytes else report
    first: list[_First] = [(finding, (edit,)) for finding, edit in try_per_device(trials)]
    if not facts.is_explicit:  # two levels that were tried and do not help
        notes = (replace(n, text=n.text.partition(IN_TWO_LEVELS)[0]) for n in report.notes)
        report = replace(report, notes=tuple(notes))
    if (states := _try_states(report, trials, _combined(first))) is not None:
        first.append(states)
    search, costs = None, trials.as_compiled().costs
    if costs:
        search = _start(trials, _combined(first))
        if isinstance(search, str):
            report, search = _not_tried(report, search), None
    if search is not None:
        search.run(tries, seconds)
        search.confirm()
    advice = Advice(report, facts, search, first)
    advice.try_pins()
    report = advice.report()
    if not costs and not report.findings:
        nothing = 'no device sends anything, or repeats what another one does: nothing was tried'
        return replace(report, total=(nothing,))
    return report


def _combined(first: Sequence[_First]) -> tuple[Edit, ...]:
    return functools.reduce(combine, (edits for _, edits in first), ())


def make_trials(facts: Facts) -> Trials | str:
    """Returns why the program cannot be edited if it cannot; '' if another note says so."""
    stages = facts.stages
    if stages.jaxpr is None or facts.n_devices == 1:
        return ''
    if not isinstance(facts.mesh, Mesh):
        return 'only programs whose arguments and results are on one mesh are changed'
    if stages.jitted is None:
        return 'pass the function instead of the traced program'
    call = facts.call
    if call is None:
        return f'{stages.name} cannot be traced again as a call of its arrays{_instead(stages)}'
    return Trials(facts, call)


def _instead(stages: Stages) -> str:
    if stages.framework == 'nnx':
        return (
            '. Pass a function of jax.jit that takes the state: graphdef, state = nnx.split(...), '
            'and nnx.merge(graphdef, state) in the function'
        )
    return '. Pass a function of jax.jit' if stages.is_equinox else ''


def _start(trials: Trials, first: tuple[Edit, ...]) -> Search | str:
    """Returns a search, or why there is none."""
    base = trials.run(first)
    if base is None:
        return f'it does not compile again. JAX says: {trials.error}'
    try:
        proposals = Proposals(trials, first)
    except NotPropagated as error:
        return str(error)
    return Search(trials, proposals, base, first)


def _not_tried(report: Report, reason: str) -> Report:
    note = Finding('not tried', f'no change of the program could be tried: {reason}')
    return replace(report, notes=(*report.notes, note))


def _try_new_states(report: Report, facts: Facts) -> Report:
    """Compiles a function that makes states with the shardings of their parameters."""
    rule = next((each for each in report.findings if each.kind == 'unsharded new states'), None)
    call = facts.stages.call
    if rule is None or call is None or report.memory is None:
        return report
    shardings = {r: found.sharding for r, found in parameters_of_new_states(facts).items()}
    try:
        with mesh_scope(facts.stages.scope):
            edited = apply(call, [PlaceResults(shardings)])
            memory = read_memory(edited.function.lower(*edited.args, **edited.kwargs).compile())
    except (RuntimeError, TypeError, ValueError):  # such as results that a framework rearranges
        return report
    if memory is None or memory.total >= report.memory.total:
        return report
    needs = f'{format_bytes(memory.total)} instead of {format_bytes(report.memory.total)}'
    suggestion = (
        'shard these results like their parameters, with sharded(out=for_optimizer(...)) or '
        f'out_shardings=: compiled so, the program needs {needs}'
    )
    tried = replace(rule, suggestion=suggestion)
    findings = (tried if each is rule else each for each in report.findings)
    return replace(report, findings=tuple(findings))


def _try_states(
    report: Report, trials: Trials, first: tuple[Edit, ...]
) -> tuple[Finding, tuple[Edit, ...]] | None:
    """Tries to shard replicated states of the optimizer as their parameters.

    Keeps that if it saves memory and raises no cost: states are in memory between steps.
    """
    facts = trials.facts
    rule = next((each for each in report.findings if each.kind == 'unsharded states'), None)
    if rule is None:
        return None
    parameters, shardings = states_of_parameters(facts), dict[int, NamedSharding]()
    for state, i in parameters.items():
        sharding = facts.arguments[i].sharding
        if facts.arguments[state].path in rule.explains and isinstance(sharding, NamedSharding):
            shardings[state] = sharding
    replaced = next_arguments(facts).items()
    results = {r: shardings[state] for r, state in replaced if state in shardings}
    edits = (PlaceArguments(shardings, results),)
    both = (trials.run(each, on_target=True) for each in (first, combine(first, edits)))
    before, after = (None if trial is None else trial.figures for trial in both)
    if before is None or after is None or after.bound > before.bound:
        return None
    if (after.memory or 0) > (1 - MIN_GAIN) * (before.memory or 0):
        return None
    shown = {
        facts.arguments[state].path: facts.argument_rows[parameters[state]].placement
        for state in shardings
    }
    tried = as_tried(before, after)
    suggestion = f'{shard_text(shown)}, as for_optimizer does'
    return replace(rule, suggestion=suggestion, tried=tried), edits
