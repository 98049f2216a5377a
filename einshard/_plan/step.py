"""A step whose axis names come from its operations: what a candidate changes, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from .._explain.findings.facts import Facts
from .._explain.local_devices import asked_texts
from .._explain.search.edits import edits_of, variants_of
from .._explain.search.groups import Group
from .._explain.search.proposals import groups_of
from .._explain.search.trials import Trials
from .._program.cost.score import Score
from .._program.edits.call import JittedCall
from .._program.edits.edit import Edit, PlaceArguments
from .._program.traced.outline import Place
from .._program.traced.propagated import Axes
from .._trees.axis_names import MetadataNames
from .candidate import Candidate
from .model import Array, Model
from .named_classes import name_classes
from .scores import Scores, placed

# constraints that bring a step as near to the score of all as this are enough
_ENOUGH = 1.02
_EQUAL = 1.005
_MAX_CONSTRAINTS = 4


class Step(Scores):
    """A traced step, with names for the axes of its arrays.

    A candidate places these names. All arguments are sharded by their names, and so are the values
    of the step: of those that a constraint may hold, only as few are as the score needs.

    Attributes:
        facts: the step as it is.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """

    def __init__(
        self,
        facts: Facts,
        call: JittedCall,
        is_kept: bool = False,
        labels: Sequence[MetadataNames | None] = (),
        constraints: bool = True,
    ):
        """
        Args:
            is_kept: whether the mesh is that of the user, which candidates keep.
            labels: the names that arguments have in their metadata, or None.
            constraints: whether candidates may constrain values.
        """
        assert isinstance(facts.mesh, Mesh)
        self.facts, self.trials = facts, Trials(facts, call)
        super().__init__(facts.mesh, self.trials.chip, is_kept)
        self.variants = variants = variants_of(call, facts.mesh)
        groups = groups_of(facts, variants)
        paths = [array.path for array in facts.arguments]
        given = {i: names for i, names in enumerate(labels) if names is not None}
        self._values = [group for group in groups if group.kind == 'value' and constraints]
        self.named = name_classes(variants, paths, facts.data, groups, given)
        self._names = {
            place: tuple((name,) * bool(name) for name in names)
            for place, names in self.named.names.items()
        }
        self._scores: dict[tuple[Candidate, tuple[Any, ...]], Score | None] = {}
        self._needed: dict[Candidate, tuple[Group, ...]] = {}
        self._often: list[Group] = []  # of other candidates, the latest last
        self.model = self._model(call)

    def _model(self, call: JittedCall) -> Model:
        facts, donated = self.facts, call.eqn.params['donated_invars']
        weights = {
            p.index
            for p, names in self.named.names.items()
            if p.kind == 'argument' and 'batch' not in names
        }
        arrays: list[Array] = []
        for i, array in enumerate(facts.arguments):
            names, dtype = self._names[Place('argument', i)], array.dtype
            n_bytes = prod(array.shape) * dtype.itemsize
            arrays.append(Array(array.shape, str(dtype), names, i in weights, donated[i], n_bytes))
        each = {tuple(n for n in names if n) for names in self.named.names.values()}
        return Model(
            name=facts.stages.name,
            axis_sizes=self.named.sizes,
            array_names=tuple(sorted(each)),
            arrays=tuple(arrays),
            asked=tuple(asked_texts(facts.stages.jaxpr, facts.devices[0].device_kind)),
        )

    # --- scores -----------------------------------------------------------------------------------

    def score(self, candidate: Candidate, held: Sequence[Group] | None = None) -> Score | None:
        """The score of a candidate, or None if Shardy cannot propagate it.

        Args:
            held: the values that are constrained. Default: all.
        """
        groups = self._values if held is None else held
        key = candidate, tuple(sorted(str(group.key) for group in groups))
        if key not in self._scores:
            self._scores[key] = self.propagated(candidate, self._changes(candidate, groups))
        return self._scores[key]

    def seconds(self, candidate: Candidate, held: Sequence[Group] | None = None) -> float:
        score = self.score(candidate, held)
        return inf if score is None else score.seconds

    # --- changes ----------------------------------------------------------------------------------

    def _changes(self, candidate: Candidate, held: Iterable[Group]) -> dict[Place, Axes | None]:
        axes, sizes = dict(candidate.axes), dict(candidate.mesh)
        changes: dict[Place, Axes | None] = {}
        for place, names in self._names.items():
            if place.kind == 'argument':
                names = ((),) * len(names) if self._is_key(place.index) else names
                changes[place] = placed(names, self.variants.shape(place), axes, sizes)
        for group in held:
            for place in group.sites:
                if place in self._names:
                    shape = self.variants.shape(place)
                    new = placed(self._names[place], shape, axes, sizes)
                    if any(new):
                        changes[place] = new
        return changes

    def edits(self, candidate: Candidate) -> tuple[Edit, ...]:
        """What makes the step a candidate: arguments placed, and as few constraints as needed."""
        changes, mesh = self._changes(candidate, self.needed(candidate)), self.mesh_of(candidate)
        edits = edits_of(changes, self.variants, mesh)
        return tuple(map(self._with_keys, edits))

    def _with_keys(self, edit: Edit) -> Edit:
        """Replicates keys of random numbers, which have one axis more in the module."""
        if not isinstance(edit, PlaceArguments):
            return edit
        placed = {
            i: s.update(spec=PartitionSpec()) if self._is_key(i) else s
            for i, s in edit.arguments.items()
        }
        return PlaceArguments(placed, edit.results)

    def _is_key(self, i: int) -> bool:
        return len(self.facts.arguments[i].shape) != len(self.named.names[Place('argument', i)])

    def needed(self, candidate: Candidate) -> tuple[Group, ...]:
        """The values that have to be constrained for the score of a candidate.

        Adds those that save most, one after another; all if that does not help.
        """
        if candidate not in self._needed:
            self._needed[candidate] = self._find_needed(candidate)
        return self._needed[candidate]

    def _find_needed(self, candidate: Candidate) -> tuple[Group, ...]:
        axes, sizes = dict(candidate.axes), dict(candidate.mesh)
        names = self._names

        def isplaced(group: Group) -> bool:
            places = [p for p in group.sites if p in names]
            return any(any(placed(names[p], self.variants.shape(p), axes, sizes)) for p in places)

        groups = [group for group in self._values if isplaced(group)]
        goal = _ENOUGH * self.seconds(candidate, groups)
        held: list[Group] = []
        now = self.seconds(candidate, held)
        for _ in range(_MAX_CONSTRAINTS):
            if now <= goal:
                break
            # first those that other candidates needed
            likely = [group for group in self._often if group in groups and group not in held]
            best = self._best(candidate, held, likely)
            if best is None or best[0] > goal:
                others = [g for g in groups if g not in held and g not in likely]
                best = self._best(candidate, held, [*likely, *others])
            if best is None or best[0] >= now:
                break
            now, group = best
            held.append(group)
        if now > goal and now > 1.1 * goal:
            return tuple(groups)
        self._often = [*(g for g in self._often if g not in held), *held]
        return tuple(held)

    def _best(
        self, candidate: Candidate, held: Sequence[Group], groups: Sequence[Group]
    ) -> tuple[float, Group] | None:
        """The value to constrain beside others, and the score: of equal ones, the first."""
        each = [(self.seconds(candidate, [*held, group]), group) for group in groups]
        least = min((seconds for seconds, _ in each), default=inf)
        return next((pair for pair in each if pair[0] <= _EQUAL * least), None)
