"""Plan: the result of `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding

from .._display import Display
from .._errors import EinshardError, plural, quoted
from .._explain.diff import Diff
from .._explain.report import Report
from .._explain.search.with_edits import fixed_function
from .._explain.stages import Stages
from .._page import Column, Page, Section
from .._text import format_bytes, format_seconds
from .candidate import Candidate, Evaluation, Objective
from .evaluate import Function
from .named_classes import ACTIVATION
from .plot import scatter_svg
from .source import mesh_call
from .step_function import StepFunction

_SHOWN = 4  # plans in the printed table


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Display):
    """The best plan that `plan` found, and the other plans that it compiled.

    Prints as code to paste, with a table of the best plans. `axis_rules(plan.rules)` applies the
    best one. Of a function without axis names, `place`, `patch` and `function` do.

    Attributes:
        name: the name of the function.
        devices: a mesh of the devices. Each plan arranges them in its own mesh.
        chip: the name of the chip whose speeds set the bounds, or None if unknown.
        objective: what is minimized.
        limit: the bytes that a plan may use on a device, or None if unknown.
        sizes: the axis names of the model, with their sizes.
        choices: the compiled plans with their costs, best first.
        code: the specs of the function with the placements of the best plan, as source text.
        n_candidates: the number of candidates that scores selected, at most 200.
        stopped: why the search ended early, or ''.
        notes: remarks on the result, such as which plans the bounds do not tell apart.
        warnings: why the result may be unusable.
    """

    name: str
    devices: Mesh
    chip: str | None
    objective: Objective
    limit: int | None
    sizes: Mapping[str, int]
    choices: tuple[Evaluation, ...]
    code: tuple[str, ...]
    n_candidates: int
    stopped: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    _function: Function

    @property
    def best(self) -> Evaluation:
        """The best of `choices`."""
        return self.choices[0]

    @property
    def mesh(self) -> Mesh:
        """The mesh of the best plan."""
        return self._function.mesh_of(self.best.candidate)

    @property
    def rules(self) -> dict[str, str]:
        """The placement of each axis name in the best plan, for `axis_rules`."""
        return self.best.candidate.placements

    @property
    def is_of_step(self) -> bool:
        """Whether the axis names are not those of the function, but found in its operations."""
        return isinstance(self._function, StepFunction)

    @property
    def fits(self) -> bool:
        """Whether the best plan fits into memory. True if its memory or the limit is unknown."""
        return self.best.fits(self.limit)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The sharding of each array of the arguments, for `in_shardings=` of `jax.jit`.

        A tree for each positional argument, with None for what is no array. Keyword arguments,
        which `in_shardings=` does not take, are left out.

        Raises:
            EinshardError: the axis names are those of the function.
        """
        function = self._step()
        tree = jtu.tree_structure((tuple(function.args), dict(function.kwargs)))
        args, _ = tree.unflatten(function.shardings(self.best.candidate))
        return args

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Places the arguments of a call as in the best plan.

        Args:
            args, kwargs: arrays or ShapeDtypeStructs in the structure of the arguments that the
                plan is of, and anything else, which is returned as it is.

        Returns:
            The arguments; if there is only one, the argument itself. With keyword arguments, a pair
            of positional and keyword arguments.

        Raises:
            EinshardError: the arguments have another structure; or the function has axis names, of
                which `rules` has the placements.
        """
        function = self._step()
        leaves, tree = jtu.tree_flatten((tuple(args), dict(kwargs)))
        expected = jtu.tree_structure((tuple(function.args), dict(function.kwargs)))
        if tree != expected:
            raise EinshardError(
                f'these are not the arguments of {self.name} that were planned',
                code='argument',
                facts={'expected': str(expected), 'got': str(tree)},
            )
        shardings = function.shardings(self.best.candidate)
        pairs = zip(leaves, shardings, strict=True)
        placed = tree.unflatten([x if s is None else _placed(x, s) for x, s in pairs])
        if kwargs:
            return placed
        return placed[0][0] if len(args) == 1 else placed[0]

    def patch(self) -> str:
        """Returns the best plan as a patch of the source, which `patch -p1` applies.

        What is no change of an expression in a file, such as the placement of arguments, is in
        comments above it.
        """
        return self._step().patch(self.best.candidate)

    def function(self) -> Any:
        """Returns the jitted step with the best plan. It places its arguments, where needed.

        Raises:
            EinshardError: Flax or Equinox jits the step; apply `place` and `patch` then.
        """
        function, candidate = self._step(), self.best.candidate
        return fixed_function(function.facts_of(candidate), function.edits(candidate))

    def _step(self) -> StepFunction:
        if not isinstance(self._function, StepFunction):
            raise EinshardError(
                f'{self.name} has axis names, which the plan places',
                code='plan',
                facts={'instead': 'with jax.set_mesh(plan.mesh), axis_rules(plan.rules): ...'},
            )
        return self._function

    def explain(self, i: int = 0) -> Report:
        """Returns the report of `explain` on plan `i`. This may compile the plan again."""
        return self._function.report(self._choice(i).candidate)

    def trace(self) -> Stages:
        """Traces the function with the best plan."""
        return self._function.trace(self.best.candidate)

    def why(self, name: str) -> Why:
        """Compares the best plan with those that differ only in the placement of axis `name`."""
        if name not in self.sizes:
            raise EinshardError(
                f"the model has no axis named '{name}'",
                code='plan',
                facts={'axis names': quoted(list(self.sizes))},
            )
        best = self.best.candidate
        others = [
            one
            for one in self.choices[1:]
            if one.candidate.mesh == best.mesh and one.candidate.changed_names(best) == [name]
        ]
        rows = [(one.candidate.placements[name], one) for one in [self.best, *others]]
        return Why(name, tuple(rows), self.limit)

    def diff(self, other: Plan | int) -> Diff:
        """Compares the best plan with plan number `other`, or with the best plan of a `Plan`."""
        ours, theirs = self.best, other.best if isinstance(other, Plan) else self._choice(other)
        before, after = (
            {'mesh shape': one.candidate.mesh_text, **one.candidate.placements}
            for one in (ours, theirs)
        )
        kinds = {**ours.counts, **theirs.counts}
        counts = [(kind, ours.counts.get(kind, 0), theirs.counts.get(kind, 0)) for kind in kinds]
        changed = tuple((kind, a, b) for kind, a, b in counts if a != b)
        numbers = [
            ('sent in one run', ours.network_bytes, theirs.network_bytes),
            ('memory', ours.memory or 0, theirs.memory or 0),
        ]
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return Diff(
            arrays=tuple((name, before.get(name), after.get(name)) for name in names),
            collectives=changed,
            numbers=tuple((name, a, b) for name, a, b in numbers if a != b),
            # the bytes and source lines of single collectives are unknown
            details=((0, ''),) * len(changed),
        )

    def plot(self) -> str:
        """Draws memory against bytes sent, with a point for each compiled plan, as SVG."""
        return scatter_svg(self.choices, self.limit, _SHOWN)

    def to_dict(self) -> dict[str, Any]:
        """Converts the plan to dictionaries, lists, strings and numbers, for JSON."""
        return {
            'schema': 2,
            'name': self.name,
            'n_devices': self.devices.size,
            'mesh': dict(self.best.candidate.mesh),
            'rules': self.rules,
            'objective': self.objective,
            'memory_limit': self.limit,
            'fits': self.fits,
            'choices': [_evaluation_dict(one) for one in self.choices],
            'n_candidates': self.n_candidates,
            'stopped': self.stopped,
            'notes': list(self.notes),
            'warnings': list(self.warnings),
        }

    def _repr_html_(self) -> str:
        return f'{super()._repr_html_()}{self.plot()}'

    def _choice(self, i: int) -> Evaluation:
        if not 0 <= i < len(self.choices):
            raise EinshardError(
                f'there is no plan {i}',
                code='plan',
                facts={'plans': f'0 to {len(self.choices) - 1}'},
            )
        return self.choices[i]

    @property
    def _mesh_call(self) -> str:
        return mesh_call(self.devices, self.best.candidate)

    def _code(self) -> list[str]:
        uses_rules = any('Rules([' in line for line in self.code)
        if isinstance(self._function, StepFunction):
            names = f'{"Rules, " * uses_rules}device_mesh, einshard'
            head = ['import jax'] * ('jax.' in self._mesh_call) + [f'from einshard import {names}']
            return [*head, '', f'mesh = {self._mesh_call}', *self.code]
        lines = [
            'import jax',
            f'from einshard import {"Rules, " * uses_rules}axis_rules, device_mesh',
            '',
            f'mesh = {self._mesh_call}',
            f'rules = {self.rules}',
        ]
        name = self.name if self.name.isidentifier() else 'f'
        if self._function.had_rules:
            lines[1] = f'from einshard import {"Rules, " * uses_rules}device_mesh, sharded'
            lines += [
                '# in place of its own: @sharded(axis_rules=rules)',
                'with jax.set_mesh(mesh):',
                f'    {name}(...)',
            ]
        else:
            lines += ['with jax.set_mesh(mesh), axis_rules(rules):', f'    {name}(...)']
        if self.code:
            lines += ['', '# or, without axis_rules:', *self.code]
        if self.best.costs_from == 'compiler':
            check = f'collectives={dict(self.best.counts)!r}'
            lines += ['', '# an option of sharded, to check the collectives:', check]
        return lines

    def _page(self) -> Page:
        kind = self.devices.devices.flat[0].device_kind
        devices = plural(self.devices.size, 'device')
        rows = [self._row(i, one) for i, one in enumerate(self.choices[:_SHOWN])]
        sources = [one.costs_from for one in self.choices]
        lines = [
            f'{plural(self.n_candidates, "candidate")} ranked by their scores; '
            f'{len(sources)} compiled, {sources.count("compiler")} by the compiler of the target'
            f'{f" ({self.stopped})" if self.stopped else ""}',
        ]
        chip = f' ({self.chip})' if self.chip else ''
        names = self._names()
        sections = (
            *([Section('axis names', lines=tuple(names))] if names else []),
            Section(_OBJECTIVES[self.objective], code=tuple(self._code())),
            Section(f'plans{chip}', _COLUMNS, tuple(rows), tuple(lines)),
        )
        title = f'plan for {self.name} on {devices} ({kind})'
        return Page(title, sections, self.warnings, self.notes)

    def _placed(self, candidate: Candidate) -> str:
        """Says what a plan shards, and of a step without names, what it changes in the code."""
        if candidate.is_given:
            return 'as you have it now'
        sharded = ' '.join(f'{name}{p}' for name, p in candidate.placements.items() if p)
        sharded = sharded or 'replicated'
        if not isinstance(self._function, StepFunction):
            return sharded
        n = self._function.n_constraints(candidate)
        code = f'{plural(n, "constraint")} in the code' if n else 'the code as it is'
        return f'{sharded}, and {code}'

    def _names(self) -> list[str]:
        """Which axes the names of a step are of."""
        examples = self._function.examples if isinstance(self._function, StepFunction) else {}
        return [
            f'{name} ({self.sizes[name]}): {example}'
            for name, example in examples.items()
            if not name.startswith(ACTIVATION)
        ]

    def _row(self, i: int, one: Evaluation) -> tuple[str, ...]:
        least, most = one.seconds
        largest = one.bounds.largest
        step = '' if one.step is None else f', about {format_seconds(one.step)}'
        return (
            str(i),
            one.candidate.mesh_text,
            f'{format_seconds(least)} .. {format_seconds(most)}{step}' if one.bounds else '',
            '?' if one.memory is None else format_bytes(one.memory),
            format_bytes(one.network_bytes),
            '' if largest is None else f'{largest.resource} {largest.along}'.strip(),
            one.costs_from,
            self._placed(one.candidate),
            one.sent_text,
            why_worse(one, self.best, self.limit) if i else '',
        )


def _placed(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    return jax.device_put(x, sharding)


_OBJECTIVES: dict[Objective, str] = {
    'bound': 'smallest sum of lower bounds',
    'bytes': 'fewest bytes sent',
    'memory': 'least memory',
}
_COLUMNS = (
    Column('plan', right=True),
    Column('mesh'),
    Column('bound', right=True),
    Column('memory', right=True),
    Column('sent', right=True),
    Column('largest bound'),
    Column('costs from'),
    Column('axes', below=True),
    Column('sends', below=True),
    Column('vs. plan 0:', below=True),
)


@dataclass(frozen=True, repr=False)
class Why(Display):
    """The result of `Plan.why`: a comparison of plans that shard one axis differently.

    Attributes:
        name: the axis name.
        rows: the placement of the axis in each plan, and the costs of the plan; best plan first.
        limit: the bytes that a plan may use on a device, or None if unknown.
    """

    name: str
    rows: tuple[tuple[str, Evaluation], ...]
    limit: int | None

    def _page(self) -> Page:
        (chosen, best), *others = self.rows
        lines = [f'{self.name}{chosen}: {_cost_text(best)}']
        lines += [
            f'{self.name}{text}: {_cost_text(one)}: {why_worse(one, best, self.limit)}'
            for text, one in others
        ]
        if not others:
            lines.append('no compiled plan shards only this axis differently')
        return Page('', (Section('', lines=tuple(lines)),))


def _cost_text(one: Evaluation) -> str:
    bound = f'bound {format_seconds(one.seconds[1])}, ' if one.bounds else ''
    memory = '' if one.memory is None else f', memory {format_bytes(one.memory)}'
    return f'{bound}sent {format_bytes(one.network_bytes)}{memory}'


def _evaluation_dict(one: Evaluation) -> dict[str, Any]:
    least, most = one.seconds
    return {
        'mesh': dict(one.candidate.mesh),
        'rules': one.candidate.placements,
        'costs_from': one.costs_from,
        'bounds': [
            {'resource': b.resource, 'along': b.along, 'seconds': b.seconds} for b in one.bounds
        ],
        'seconds': [least, most],
        'step': one.step,
        'memory': one.memory,
        'sent': dict(one.sent),
        'collectives': dict(one.counts),
        'error': one.error,
    }


_VERBS = {
    'all-gather': 'gathers',
    'all-reduce': 'reduces',
    'reduce-scatter': 'reduces',
    'all-to-all': 'exchanges',
    'collective-permute': 'sends',
}


def why_worse(worse: Evaluation, better: Evaluation, limit: int | None) -> str:
    """Returns, for example, 'gathers 2.0 GiB of weights per run (instead of 0 B)'."""
    if worse.error:
        return f'does not compile: {worse.error}'
    parts = [_largest_increase(worse, better)]
    memory = worse.memory or 0
    if limit is not None and not worse.fits(limit):
        parts.append(f'needs {format_bytes(memory)} of memory, more than {format_bytes(limit)}')
    elif not parts[0] and memory > (better.memory or 0):
        parts.append(f'needs {format_bytes(memory)} of memory')
    return '; '.join(filter(None, parts)) or 'about equal'


def _largest_increase(worse: Evaluation, better: Evaluation) -> str:
    """Describes the resource whose bounds grow most, or the bytes sent if there are no bounds.

    Returns '' if the bounds grow by at most 1% of their sum in `better`, or the bytes not at all.
    """
    before, after = _seconds_by_resource(better), _seconds_by_resource(worse)
    if not after:
        return _sends(worse, better) if worse.network_bytes > better.network_bytes else ''
    growth = {name: after[name] - before.get(name, 0.0) for name in after}
    resource = max(growth, key=growth.__getitem__)
    if growth[resource] <= 0.01 * sum(before.values()):  # the rounded numbers would look equal
        return ''
    if resource == 'network':
        return _sends(worse, better)
    verb = 'computes' if resource == 'compute' else 'reads and writes HBM'
    instead = format_seconds(before.get(resource, 0.0))
    return f'{verb} for {format_seconds(after[resource])} (instead of {instead})'


def _seconds_by_resource(evaluation: Evaluation) -> dict[str, float]:
    total: dict[str, float] = {}
    for bound in evaluation.bounds:
        total[bound.resource] = total.get(bound.resource, 0.0) + bound.seconds
    return total


def _sends(worse: Evaluation, better: Evaluation) -> str:
    """Describes the collectives whose bytes grow most, or all bytes sent if none grow."""
    growth = {key: n - better.sent_by.get(key, 0) for key, n in worse.sent_by.items()}
    kind, role = key = max(growth, key=growth.__getitem__)
    if growth[key] <= 0:  # no more bytes, but along slower mesh axes
        return f'sends {worse.sent_text}'
    sent, instead = format_bytes(worse.sent_by[key]), format_bytes(better.sent_by.get(key, 0))
    return f'{_VERBS.get(kind, "sends")} {sent} of {role} per run (instead of {instead})'
