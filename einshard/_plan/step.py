"""A step whose axis names come from its operations: what a candidate changes, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import gcd, inf, prod
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from .._explain.findings.facts import Facts
from .._explain.findings.next_call import next_arguments, weights_of_gradients
from .._explain.local_devices import asked_texts
from .._explain.search.edits import edits_of, variants_of
from .._explain.search.groups import Group, Named, find_groups
from .._explain.search.trials import Trials
from .._program.cost.mesh_network import MeshNetwork
from .._program.cost.network import Network
from .._program.cost.score import Costs, Score
from .._program.edits.call import JittedCall
from .._program.edits.edit import Edit, PlaceArguments
from .._program.traced.outline import Place
from .._program.traced.program import Axes
from .._program.traced.shardy import NotPropagated
from .._trees.axis_names import MetadataNames
from .candidate import Candidate
from .model import Array, Model
from .named_classes import Names, name_classes

# constraints that bring a step as near to the score of all as this are enough
_ENOUGH = 1.02
_EQUAL = 1.005
_MAX_CONSTRAINTS = 4


class Step:
    """A traced step, with names for the axes of its arrays.

    A candidate places these names. All arguments are sharded by their names, and so are the values
    of the step: of those that a constraint may hold, only as few are as the score needs.

    Attributes:
        facts: the step as it is.
        model: the names of its axes, and its arguments.
        n_scored: how many candidates have been propagated.

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
        self.facts, self._is_kept = facts, is_kept
        self.trials = Trials(facts, call)
        self._variants = variants = variants_of(call, facts.mesh)
        paths = [array.path for array in facts.arguments]
        replaced = {**next_arguments(facts), **weights_of_gradients(facts)}
        named = Named(paths, [array.path for array in facts.results], facts.data, replaced)
        groups = find_groups(variants, named)
        variants.fold(group.sites for group in groups)
        given = {i: names for i, names in enumerate(labels) if names is not None}
        self._values = [group for group in groups if group.kind == 'value' and constraints]
        self.named = name_classes(variants, paths, facts.data, groups, given)
        self._costs: dict[tuple[tuple[str, int], ...], Costs] = {}
        self._near: tuple[Any, Score] | None = None
        self._scores: dict[tuple[Candidate, tuple[Any, ...]], Score | None] = {}
        self._needed: dict[Candidate, tuple[Group, ...]] = {}
        self._often: list[Group] = []  # of other candidates, the latest last
        self.n_scored = 0
        self.model = self._model(call)

    def _model(self, call: JittedCall) -> Model:
        facts, donated = self.facts, call.eqn.params['donated_invars']
        weights = {
            p.index
            for p, names in self.named.names.items()
            if p.kind == 'argument' and not _is_data(names)
        }
        arrays: list[Array] = []
        for i, array in enumerate(facts.arguments):
            names = tuple((n,) * bool(n) for n in self.named.names[Place('argument', i)])
            n_bytes = prod(array.shape) * array.dtype.itemsize
            is_state = i in weights
            arrays.append(
                Array(array.shape, str(array.dtype), names, is_state, donated[i], n_bytes)
            )
        each = {tuple(n for n in names if n) for names in self.named.names.values()}
        return Model(
            name=facts.stages.name,
            axis_sizes=self.named.sizes,
            array_names=tuple(sorted(each)),
            arrays=tuple(arrays),
            results=(),
            costly_ops=(),
            live_sets=(),
            metadata_names=(),
            asked=tuple(asked_texts(facts.stages.jaxpr, facts.devices[0].device_kind)),
        )

    # --- scores -----------------------------------------------------------------------------------

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...] | None:
        """The axes of the mesh that candidates keep, or None if they may have any."""
        return tuple(self.facts.mesh.shape.items()) if self._is_kept else None  # type: ignore[reportOptionalMemberAccess]

    @property
    def n_operations(self) -> int:
        return len(self._variants.outline.steps)

    def score(self, candidate: Candidate, held: Sequence[Group] | None = None) -> Score | None:
        """The score of a candidate, or None if Shardy cannot propagate it.

        Args:
            held: the values that are constrained. Default: all.
        """
        groups = self._values if held is None else held
        key = candidate, tuple(sorted(str(group.key) for group in groups))
        if key not in self._scores:
            costs = self._on(candidate)
            try:
                shardings = self._variants.propagate(self._changes(candidate, groups))
            except NotPropagated:
                self._scores[key] = None
            else:
                near = self._near
                score = costs.score(shardings, near[1] if near and near[0] is costs else None)
                self._near, self._scores[key] = (costs, score), score
            self.n_scored += 1
        return self._scores[key]

    def seconds(self, candidate: Candidate, held: Sequence[Group] | None = None) -> float:
        score = self.score(candidate, held)
        return inf if score is None else score.seconds

    def _on(self, candidate: Candidate) -> Costs:
        """Puts the step on the mesh of a candidate."""
        if candidate.mesh not in self._costs:
            mesh, facts, trials = self.mesh_of(candidate), self.facts, self.trials
            network = Network([*mesh.devices.flat], trials.chip)
            share = trials.chip.share(facts.devices[0])
            self._costs[candidate.mesh] = Costs(
                self._variants.outline,
                MeshNetwork(dict(candidate.mesh), network),
                trials.chip,
                share,
            )
        if tuple(self._variants.outline.mesh.items()) != candidate.mesh:
            self._variants.move_to(dict(candidate.mesh))
        return self._costs[candidate.mesh]

    def mesh_of(self, candidate: Candidate) -> Mesh:
        mesh = self.facts.mesh
        assert isinstance(mesh, Mesh)
        return mesh if self._is_kept else candidate.mesh_of(mesh)

    # --- changes ----------------------------------------------------------------------------------

    def _changes(self, candidate: Candidate, held: Iterable[Group]) -> dict[Place, Axes | None]:
        axes, sizes = dict(candidate.axes), dict(candidate.mesh)
        changes: dict[Place, Axes | None] = {}
        for place, names in self.named.names.items():
            if place.kind == 'argument':
                names = ('',) * len(names) if self._is_key(place.index) else names
                changes[place] = _placed(names, self._variants.shape(place), axes, sizes)
        for group in held:
            for place in group.sites:
                if place in self.named.names:
                    shape = self._variants.shape(place)
                    placed = _placed(self.named.names[place], shape, axes, sizes)
                    if any(placed):
                        changes[place] = placed
        return changes

    def edits(self, candidate: Candidate) -> tuple[Edit, ...]:
        """What makes the step a candidate: arguments placed, and as few constraints as needed."""
        changes, mesh = self._changes(candidate, self.needed(candidate)), self.mesh_of(candidate)
        edits = edits_of(changes, self._variants, mesh)
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
        names = self.named.names

        def is_placed(group: Group) -> bool:
            places = [p for p in group.sites if p in names]
            return any(any(_placed(names[p], self._variants.shape(p), axes, sizes)) for p in places)

        groups = [group for group in self._values if is_placed(group)]
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


def _is_data(names: Names) -> bool:
    return 'batch' in names


def _placed(
    names: Names,
    shape: Sequence[int],
    axes: Mapping[str, Collection[str]],
    sizes: Mapping[str, int],
) -> Axes:
    """The mesh axes of each axis of an array: each once, and only where they divide its size."""
    used = set[str]()
    found: list[tuple[str, ...]] = []
    for name, n in zip(names, shape, strict=True):
        mine = tuple(a for a in axes.get(name, ()) if a not in used)
        if gcd(n, prod(sizes[a] for a in mine)) != prod(sizes[a] for a in mine):
            mine = ()
        used.update(mine)
        found.append(mine)
    return tuple(found)
