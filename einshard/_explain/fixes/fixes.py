"""The suggestions of a report: changes that were tried, and how to apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, Sharding

from ..._errors import EinshardError, plural
from ..._program.edits.apply import Edited, apply
from ..._program.edits.edit import (
    Edit,
    MoveThrough,
    PlaceArguments,
    PlaceResults,
    combine,
    indices,
    placements,
)
from ..._program.edits.fixed_function import FixedFunction
from ..._program.edits.per_device import RunPerDevice
from ..._program.hlo.memory import read_memory
from ..._sharding.context import mesh_scope
from ..._sharding.mesh import is_canonical_mesh
from ..._text import first_line, first_of, format_bytes, short_source
from ..findings.arguments import parameters_of_new_states, states_of_parameters
from ..findings.expressions import expression_of, shard_text
from ..findings.facts import Facts
from ..findings.gathered_axes import IN_TWO_LEVELS
from ..findings.gathers import reshard_text
from ..findings.next_call import (
    next_arguments,
    pin_text,
    results_to_pin,
    weights_of_gradients,
)
from ..findings.trace import mesh_entries
from ..findings.values import Axis
from ..lowered import trace_call
from ..partition import ENDED
from ..patch.arguments import code_to_place, in_jit
from ..patch.patch import make_patch
from ..patch.write import Change as Written
from ..report import Report
from ..report_rows import Figures, Finding, Tried, changes
from .candidates import Change, Point
from .costs import find_costs
from .named import operand_text, placement_of, source_of
from .per_device import try_per_device
from .search import (
    MIN_GAIN,
    Accepted,
    Search,
    as_tried,
    has_candidates,
    make_trials,
    start_search,
)
from .trials import Trial, Trials

# They do not depend on what a change costs: the program does not run, or code has no effect.
_FACTS = (
    *('does not fit', 'promise broken', 'no effect', 'names without a rule'),
    'unsharded new states',
)
# About results that are sharded unlike the arguments that they replace in the next call.
_PINNED = ('second compile', 'replicated result')

# changes that leave both placements as they are
_THROUGH = ('full rematerialization', 'reshard')


class Fixes:
    """Changes of a program that were tried, and the report without them."""

    def __init__(
        self,
        report: Report,
        facts: Facts,
        search: Search | None,
        per_device: Sequence[tuple[Finding, RunPerDevice]] = (),
        can_try: bool = True,
        states: tuple[Finding, tuple[Edit, ...]] | None = None,
    ):
        self._report, self._facts, self._search = report, facts, search
        self._can_try = can_try
        self._per_device = [*dict.fromkeys(finding for finding, _ in per_device)]
        self._first: tuple[Edit, ...] = tuple(change for _, change in per_device)
        if states is not None:
            self._per_device.append(states[0])
            self._first = combine(self._first, states[1])
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
        call = facts.stages.call if results else None
        if call is None or len(call.dynamic) != len(facts.arguments):
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
        rules = [*report.findings]
        accepted = [] if search is None else search.accepted
        found = [*self._per_device, *(self._finding(each, rules) for each in accepted)]
        lines = list[str]()
        if search is not None:
            if search.target is not None and len(found) > 1:
                costs = '; '.join(changes(*search.target)) or 'the same costs'
                lines.append(f'all together, compiled for {report.device_kind}: {costs}')
            elif search.target is not None and accepted and self._facts.platform != 'cpu':
                found = [replace(found[0], tried=as_tried(*search.target))]
            if accepted and self._facts.chip is not None:
                mark = ' (the largest)' * (len(search.bounds) > 1)
                left = (f'{b}{mark * (b is search.bounds.largest)}' for b in search.bounds)
                what = 'this change' if len(found) == 1 else 'all changes'
                lines.append(f'lower bounds with {what}: {"; ".join(left)}')
            if search.cut:
                lines.append(
                    f'{search.n_tried} changes tried ({search.cut}: the search was stopped)'
                )
        findings, notes = self._others(found, rules)
        ended = [error for _, error in search.failed if error.startswith(ENDED)] if search else []
        if ended and accepted:
            dropped = f'{plural(len(ended), "change")} dropped: {ended[0]}'
            notes = (*notes, Finding('not tried', dropped))
        if search is not None and not accepted and len(search.failed) == search.n_tried > 0:
            # the most promising change, or one after which JAX names what to write
            named = (each for each in search.failed if 'out_sharding' in each[1])
            change, error = next(named, search.failed[0])
            text = (
                f'none of the changes that were tried compiles ({search.n_tried}), such as: '
                f'{self._suggestion(change)}. JAX says: {error}'
            )
            notes = (*notes, Finding('not tried', text))
        return replace(
            report, findings=findings, notes=notes, total=tuple(lines) or report.total, fixes=self
        )

    def _others(
        self, found: Sequence[Finding], rules: Sequence[Finding]
    ) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Returns the findings and the notes, with the changes that were found to help.

        Of the other findings of the report, `rules`, costs that no change lowers become notes. They
        stay if none can be tried, and on Explicit axes, where few can.
        """
        explained = {name for finding in found for name in finding.explains}
        if self._search is not None and found:  # what the changes have made disappear
            explained |= {one.change.cost.line for one in self._search.accepted}
            after = {c.source for c in self._search.current.reading.collectives}
            after |= {row.source for row in self._search.current.reading.products}
            before = {c.source or '' for c in self._search.base.reading.collectives}
            explained |= before - after
            left = self._repeats(self._search.current)
            rules = [
                rule
                for rule in rules
                if rule.kind != 'replicated compute'
                or rule.source in left
                or rule.source not in self._repeats(self._search.base)
            ]
        is_left = self._search is None or bool(self._search.current.reading.reshards)
        findings, notes = [*found], list[Finding]()
        for finding in rules:
            if finding.kind in _PINNED:
                if self._pinned is not None or not found:  # or else other changes move these arrays
                    suggestion = self._pin(finding)
                    findings.append(replace(finding, suggestion=suggestion, tried=self._pinned))
            elif finding.kind in _FACTS:
                findings.append(finding)
            elif found and finding.kind == 'full rematerialization' and not is_left:
                continue
            elif explained.isdisjoint((*finding.explains, finding.source or '')):
                stays = self._facts.is_explicit or not self._can_try
                (findings if stays else notes).append(finding)
        for note in self._report.notes:
            # a note about no collective stays true, whatever a change of its line saves
            about = {*note.explains, note.source} - {None} if note.explains else set[str]()
            if explained.isdisjoint(about):
                notes.append(note)
        # whatever suggested it: what costs more is not a suggestion
        findings = [
            replace(one, suggestion='', tried=None)
            if one.tried is not None and _costs_more(one.tried.before, one.tried)
            else one
            for one in findings
        ]
        findings.sort(key=lambda one: one.kind not in _FACTS[:2])
        return tuple(findings), tuple(notes)

    def _repeats(self, trial: Trial) -> set[str]:
        """Returns the lines of the products that several devices repeat."""
        return {cost.line for cost in find_costs(self._facts, trial) if cost.n_repeats}

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
        moves = ', and '.join(self._moves(self._pins))
        costs = f', which costs more: {self._pin_costs}' if self._pin_costs else ''
        return f'{moves}, as the step returns {it}. Or {pin}{costs}'

    def _finding(self, accepted: Accepted, rules: list[Finding]) -> Finding:
        """Returns the finding of a change, in the words of one of `rules`, which it removes."""
        cost = accepted.change.cost
        if cost.kind == 'read':
            what = f'{format_bytes(cost.bytes)} of {", ".join(cost.of)}'
            text = f'{cost.n_repeats} devices read the same {what} from HBM'
        elif cost.n_repeats:
            text = f'{cost.n_repeats} devices repeat the matmuls in this line'
        else:
            axes = ', '.join(cost.mesh_axes)
            what = f' of {cost.role}' if cost.role else ''
            text = f'{cost.kind}{what} along {axes} sends {format_bytes(cost.bytes)}'
        kind, names = accepted.change.kind, cost.names
        change, source, n_bytes = accepted.change, cost.line or None, cost.bytes
        if cost.reshard is not None:
            text = reshard_text(cost.reshard, self._facts.meshes)
        if accepted.trial.reading.is_simulated and not cost.n_repeats:
            text += ' (on simulated CPUs)'
        lines = {cost.line, *(point.span.source for point in change.points)}
        moved = self._paths(change.edits)
        for rule in rules:
            if rule.kind == 'no effect':
                continue
            is_same = rule.source == cost.line
            if rule.kind == change.kind:
                # on the target, its collectives may have other names and lines
                is_same |= rule.source in lines or not moved.isdisjoint(rule.explains)
                is_same |= kind == 'full rematerialization' and not cost.line
            if is_same or {*rule.explains} & {*names}:
                if rule.kind == change.kind == 'full rematerialization':
                    source = rule.source
                # the bytes in its text, of its collectives on the target
                text, kind, n_bytes = rule.text, rule.kind, rule.bytes or n_bytes
                names = (*rule.explains, *names)
                rules.remove(rule)
                break
        # in the program of the report, collectives may have other names
        rows = [
            c
            for c in self._facts.collectives
            if (c.source or '') == cost.line and c.mesh_axes.intersection(cost.mesh_axes)
        ]
        return Finding(
            kind,
            text,
            source,
            n_bytes,
            self._suggestion(change),
            tuple(names),
            accepted.tried,
            '' if cost.n_repeats else self._facts.reason_of(rows),
        )

    def _paths(self, edits: Sequence[Edit]) -> set[str]:
        """Returns the arguments and results that get new shardings."""
        arguments = {self._facts.arguments[i].path for i in indices(edits, 'argument')}
        return arguments | {self._facts.results[i].path for i in indices(edits, 'result')}

    def _suggestion(self, change: Change) -> str:
        facts = self._facts
        assert facts.mesh is not None
        texts: list[str] = []
        for point in change.points:
            placement, mapped = placement_of(point, facts.mesh)
            source, line = source_of(point.span), short_source(point.span.source)
            what = (
                f'`{source}`' if source and len(source) < 60 and '\n' not in source else 'the value'
            )
            if point.of_operand:
                value = operand_text(source or '')
                texts.append(_through(value, placement, f'before {line}') + mapped)
            elif change.kind in _THROUGH:
                texts.append(_through(source or '', placement, f'in {line}') + mapped)
            elif point.is_constraint:
                texts.append(f"change the constraint in {line} to '{placement}'{mapped}")
            else:
                call = f"einshard(..., '{placement}')"
                texts.append(f'constrain {what} in {line}: {call}{mapped}')
            if point.n_calls > 1:
                texts[-1] += f' (changes all {point.n_calls} calls of this function)'
        texts += self._moves(change.edits)
        if change.added:
            texts[-1] += f' (adds {format_bytes(change.added)} to the memory of each device'
            texts[-1] += ')' if facts.chip else ', of an unknown chip: check that they have it)'
        texts += self._through(change.edits)
        return ', and '.join(texts)

    def _moves(self, edits: Sequence[Edit]) -> list[str]:
        """Returns what to shard otherwise: arguments, or else results."""
        facts = self._facts
        moved, returned = placements(edits)
        arguments = {
            facts.arguments[i].path: self._placement(facts.values[i].axes, sharding)
            for i, sharding in moved.items()
        }
        # without out_shardings=, results are sharded like the arguments that they replace
        call, replaced = facts.stages.call, next_arguments(facts)
        given = () if call is None else call.eqn.params['out_shardings']
        results = dict[str, str]()
        for i, sharding in returned.items():
            argument = replaced.get(i, -1)
            if argument not in moved or (given and isinstance(given[i], Sharding)):
                values = facts.values[argument].axes if argument in moved else ()
                axes = values or [Axis()] * len(sharding.spec)
                results[facts.results[i].path] = self._placement(axes, sharding)
        return [*(shard_text(each) for each in (arguments, results) if each)]

    def _through(self, edits: Sequence[Edit]) -> list[str]:
        """Returns how to move arguments and results through other placements."""
        facts, texts = self._facts, list[str]()
        for edit in edits:
            if not (isinstance(edit, MoveThrough) and isinstance(i := edit.what[1], int)):
                continue
            if edit.what[0] == 'argument':
                placement = self._placement(facts.values[i].axes, edit.sharding)
                path = facts.arguments[i].path
                texts.append(_edge(path, placement, 'at the start of the function'))
                continue
            names = facts.results[i].names or [''] * len(facts.results[i].shape)
            placement = self._placement([Axis(name) for name in names], edit.sharding)
            texts.append(_edge(facts.results[i].path, placement, 'before the function returns'))
        return texts

    def _placement(self, axes: Sequence[Axis], sharding: NamedSharding) -> str:
        assert self._facts.mesh is not None
        entries = mesh_entries(sharding, len(axes))
        pairs = zip(axes, entries, strict=True)
        moved = [replace(axis, mesh_axes=entry or ()) for axis, entry in pairs]
        return expression_of(moved, self._facts.mesh)

    def patch(self) -> str:
        """See `Report.patch`."""
        search, call = self._search, self._facts.stages.call
        accepted = [] if search is None else search.accepted
        edits = combine(search.edits if search is not None and accepted else (), self._pins)
        others = [finding.suggestion for finding in self._per_device]
        others += [*self._code_to_place(edits), *self._through(edits)]
        if call is None:
            return make_patch({}, (), None, others)
        points = [one for each in accepted for one in each.change.points]
        pairs = [(edit, point) for point in points for edit in point.edits if edit in edits]
        changes = {edit: self._written(edit, point) for edit, point in pairs}
        placed = in_jit(self._facts.stages.called, call, edits)
        return make_patch(changes, edits, Trials(self._facts, call), others, placed)

    def _code_to_place(self, edits: Sequence[Edit]) -> list[str]:
        """Returns how to shard arguments and results, in words and as code to paste."""
        facts, (moved, returned) = self._facts, placements(edits)
        arguments = {
            facts.arguments[i].path: self._placement(facts.values[i].axes, sharding)
            for i, sharding in moved.items()
        }
        results = {
            facts.results[i].path: self._placement(
                [
                    Axis(name)
                    for name in facts.results[i].names or [''] * len(facts.results[i].shape)
                ],
                sharding,
            )
            for i, sharding in returned.items()
        }
        assert facts.mesh is not None or not edits
        mesh = '' if facts.mesh is None or is_canonical_mesh(facts.mesh) else ', mesh=mesh'
        texts = self._moves(edits)
        call = '{name} = einshard({name}, {spec}' + mesh + ')'
        texts += code_to_place(arguments, [each.path for each in facts.arguments], call)
        jitted = facts.stages.call
        given = () if jitted is None else jitted.eqn.params['in_shardings']
        if any(isinstance(given[i], Sharding) for i in moved if i < len(given)):
            texts.append('and in_shardings= of jax.jit, which has to be the same')
        if results:
            paths = [each.path for each in facts.results]
            texts += code_to_place(results, paths, '{name} = {spec}')
            texts.append('of the results: sharded(..., out=result), or out_shardings= of jax.jit')
        return texts

    def _written(self, edit: Edit, point: Point) -> Written:
        """Returns the change of a value, as code can say it."""
        assert self._facts.mesh is not None
        placement, mapped = placement_of(point, self._facts.mesh)
        path: Any = edit.what[1] if isinstance(edit, MoveThrough) else getattr(edit, 'path', ())
        kind = 'replace' if point.is_constraint else 'constrain'
        return Written(
            'operand' if point.of_operand else kind,
            path,
            point.sharding,
            f"constrain the value to '{placement}'{mapped}",
            placement,
            'it is under jax.vmap' if mapped else '',
        )

    def function(self) -> Any:
        """See `Report.fixed_function`."""
        search, call = self._search, self._facts.stages.call
        edits = combine(self._first if search is None else search.edits, self._pins)
        if call is None or not edits:
            raise EinshardError('no change of the program was found that helps', code='argument')
        if self._facts.stages.framework is not None or self._facts.stages.is_filtered:
            raise EinshardError(
                'the changes of a function that Flax or Equinox jits cannot be applied',
                code='argument',
                facts={'instead': 'change the lines of report.patch()'},
            )
        edited = Trials(self._facts, call).edited(edits)
        stages = self._facts.stages

        def trace(
            args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]
        ) -> Edited | str:
            with nullcontext() if stages.scope is None else mesh_scope(stages.scope):
                if call.trace_again is not None:
                    new = call.trace_again(leaves)
                else:
                    new = trace_call(stages.called, args, kwargs, stages.scope).call
            if new is None or new.dynamic != call.dynamic:
                return 'other arguments are arrays'
            try:
                edited = Trials(self._facts, new).edited(edits)
            except ValueError as error:  # a value that a constraint does not divide
                return first_line(error)
            return edited if edited.is_complete else 'an expression is not evaluated'

        moved = [call.dynamic[i] for i in indices(edits, 'argument')]
        named = zip(call.dynamic, self._facts.arguments, strict=True)
        paths = {leaf: argument.path for leaf, argument in named}
        return FixedFunction(call, edited, moved, paths, stages.bind, trace)

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


def _edge(path: str, placement: str, where: str) -> str:
    name = path if path.isidentifier() else ''
    return _through(name, placement, where if name else f'{where}, for {path}')


def _through(value: str, placement: str, where: str) -> str:
    """Writes a reshard through another placement."""
    assigned = f'{value} = ' if value.isidentifier() else ''
    if not value or len(value) > 40 or '\n' in value:
        value = '...'
    return f"reshard in two steps, {where}: {assigned}einshard({value}, '{placement}')"


def with_fixes(report: Report, facts: Facts, tries: int, seconds: float | None) -> Report:
    """Tries changes of a program, and returns the report with those that help.

    If the program cannot be edited, the report stays as it is, with a note that says why.
    """
    report = _try_new_states(report, facts)
    trials = make_trials(facts)
    if isinstance(trials, str):
        return _not_tried(report, trials) if trials and report.network_bytes else report
    per_device, needs_search = try_per_device(trials), has_candidates(trials)
    if not facts.is_explicit:  # two levels that were tried and do not help
        notes = (replace(n, text=n.text.partition(IN_TWO_LEVELS)[0]) for n in report.notes)
        report = replace(report, notes=tuple(notes))
    first: tuple[Edit, ...] = tuple(change for _, change in per_device)
    states = _try_states(report, trials, first)
    if states is not None:
        first = combine(first, states[1])
    diagnosed = {each.source for each in report.findings if each.kind == 'contracted axis'}
    search = start_search(trials, first, diagnosed) if needs_search else None
    can_try = search is not None or not needs_search
    fixes = Fixes(report, facts, search, per_device, can_try, states)
    if search is not None:
        search.run(tries, seconds)
        if search.accepted:
            search.confirm()
    elif needs_search:
        report = _not_tried(report, f'it does not compile again. JAX says: {trials.error}')
        fixes = Fixes(report, facts, search, per_device, can_try, states)
    fixes.try_pins()
    return fixes.report()


def _not_tried(report: Report, reason: str) -> Report:
    note = Finding('not tried', f'no change of the program could be tried: {reason}')
    return replace(report, notes=(*report.notes, note))


def _try_new_states(report: Report, facts: Facts) -> Report:
    """Compiles a function that makes states with the shardings of their parameters."""
    rule = next((each for each in report.findings if each.kind == 'unsharded new states'), None)
    call, scope = facts.stages.call, facts.stages.scope
    if rule is None or call is None or report.memory is None:
        return report
    shardings = {r: found.sharding for r, found in parameters_of_new_states(facts).items()}
    try:
        with nullcontext() if scope is None else mesh_scope(scope):
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
    before, after = trials.on_target(first), trials.on_target(combine(first, edits))
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
