"""Proposes changes of a program: all neighbours, as edits, the cheapest first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from jax.sharding import Mesh

from ..._program.cost.mesh_network import MeshNetwork
from ..._program.cost.network import Network
from ..._program.cost.score import Costs
from ..._program.edits.edit import Edit, PlaceArguments, placements
from ..._program.traced.outline import Place
from ..._program.traced.propagated import Axes
from ..._program.traced.variants import Variants
from ..findings.facts import Facts
from ..findings.next_call import next_arguments, weights_of_gradients
from ..findings.values import mesh_entries
from .edits import edits_of, variants_of
from .groups import Group, Named, find_groups
from .neighbours import Neighbour
from .rank import Ranked, Ranking
from .trials import Trials

MIN_GAIN = 0.03  # of the sum of the bounds
MIN_GAIN_OF_BOLD = 0.1


@dataclass(frozen=True)
class Proposal:
    """A change of a program, and what it may cost.

    Attributes:
        seconds: the estimate of the sum of the lower bounds.
        added: the bytes that it adds to the arguments and results on a device.
        edits: the change.
        neighbour: the same as shardings in the lowered module.
        min_gain: what it has to save, as a part of the bound: more if callers see another result,
            if arguments take more memory, or if it moves what an earlier change has moved.
    """

    seconds: float
    added: int
    edits: tuple[Edit, ...]
    neighbour: Neighbour
    min_gain: float


def groups_of(facts: Facts, variants: Variants) -> list[Group]:
    """Returns what changes together in a program, of which one layer then stands for others."""
    arguments, results = (
        [array.path for array in arrays] for arrays in (facts.arguments, facts.results)
    )
    replaced = {**next_arguments(facts), **weights_of_gradients(facts)}
    groups = find_groups(variants, Named(arguments, results, facts.data, replaced))
    variants.fold(group.sites for group in groups)
    return groups


class Proposals:
    """Ranks the changes of one program, round after round.

    Args:
        first: changes that are made already. Operations that run per device count as before.

    Attributes:
        ranking: of the neighbours.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """

    def __init__(self, trials: Trials, first: Sequence[Edit]):
        facts = trials.facts
        assert isinstance(facts.mesh, Mesh)
        self._mesh, self._replaced = facts.mesh, next_arguments(facts)
        variants = variants_of(trials.call, facts.mesh, moves=bool(facts.reshards))
        groups = groups_of(facts, variants)
        sizes = {str(name): size for name, size in facts.mesh.shape.items()}
        chip, share = trials.chip, trials.chip.share(facts.devices[0])
        self._network = MeshNetwork(sizes, Network(facts.devices, chip))
        costs = Costs(variants.outline, self._network, chip, share)
        self.ranking = Ranking(variants, costs, groups)
        arguments, results = placements(first)
        for kind, placed in (('argument', arguments), ('result', results)):
            for i, sharding in placed.items():
                site = Place(kind, i)
                entries = mesh_entries(sharding, len(variants.shape(site)))
                self.ranking.changes[site] = tuple(entries)

    @property
    def seconds(self) -> float:
        """The score of the program with what was accepted."""
        return self.ranking.now.seconds if self.ranking.now is not None else 0.0

    def rank(self, end: float | None) -> list[Proposal]:
        """Returns the changes of the program with what was accepted, the cheapest first."""
        now = self.ranking.now
        if now is None:
            return []
        ranked = self.ranking.rank(inf if end is None else max(0.0, end - time.monotonic()))
        return [self._proposal(one, one.memory - now.memory) for one in ranked]

    def _proposal(self, one: Ranked, added: int) -> Proposal:
        changes = one.neighbour.changes
        edits: tuple[Edit, ...] = ()
        # a part of a mesh axis has no name that code can write
        if not any(':' in name for axes in changes.values() for dim in axes or () for name in dim):
            edits = tuple(
                map(self._with_results, edits_of(changes, self.ranking.variants, self._mesh))
            )
        # results follow arguments, and are what the caller expects if only the code changes
        is_seen = any(place.kind != 'argument' for place in changes) and any(
            i not in self._replaced for i in one.results
        )
        is_again = not self.ranking.changes.keys().isdisjoint(changes)
        is_bold = is_seen or is_again or self._grows(changes)
        min_gain = MIN_GAIN_OF_BOLD if is_bold else MIN_GAIN
        return Proposal(one.seconds, added, edits, one.neighbour, min_gain)

    def _grows(self, changes: Mapping[Place, Axes | None]) -> bool:
        """Whether arguments take more memory."""
        variants, n_shards = self.ranking.variants, self._network.n_shards
        given = {**variants.given, **self.ranking.changes}
        added = sum(
            variants.bytes(place) / n_shards(axes or ())
            - variants.bytes(place) / n_shards(given[place] or ())
            for place, axes in changes.items()
            if place.kind == 'argument'
        )
        return added > 0

    def _with_results(self, edit: Edit) -> Edit:
        """Shards the results that replace arguments in the next call as these."""
        if not isinstance(edit, PlaceArguments):
            return edit
        replaced = {r: edit.arguments[a] for r, a in self._replaced.items() if a in edit.arguments}
        return PlaceArguments(edit.arguments, {**replaced, **edit.results})
