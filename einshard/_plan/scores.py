"""What candidates cost, by the compiler's propagation of one lowered module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from math import prod

from jax.sharding import Mesh

from .._chips.chip import Chip
from .._program.cost.mesh_network import MeshNetwork
from .._program.cost.network import Network
from .._program.cost.score import Costs, Score
from .._program.traced.outline import Place
from .._program.traced.propagated import Axes
from .._program.traced.shardy import NotPropagated
from .._program.traced.variants import Variants
from .candidate import Candidate
from .model import ArrayNames, Model


class Scores(ABC):
    """Scores the candidates of one program: its module, with other meshes and shardings.

    Attributes:
        variants: the module.
        model: the names of its axes, and its arguments.
        mesh: the devices.
        mesh_axes: the axes of the mesh that candidates keep, or None if they may have any.
        n_scored: how many candidates have been propagated.
    """

    variants: Variants
    model: Model

    def __init__(self, mesh: Mesh, chip: Chip, is_kept: bool):
        self.mesh, self.chip = mesh, chip
        self.mesh_axes = tuple(mesh.shape.items()) if is_kept else None
        self.n_scored = 0
        self._costs: dict[tuple[tuple[str, int], ...], Costs] = {}
        self._near: tuple[Costs, Score] | None = None

    @abstractmethod
    def score(self, candidate: Candidate) -> Score | None:
        """The score of a candidate, or None if Shardy cannot propagate it."""

    @property
    def n_operations(self) -> int:
        return len(self.variants.outline.steps)

    def mesh_of(self, candidate: Candidate) -> Mesh:
        return candidate.mesh_of(self.mesh) if self.mesh_axes is None else self.mesh

    def propagated(
        self, candidate: Candidate, changes: Mapping[Place, Axes | None]
    ) -> Score | None:
        """The score of the module on the mesh of a candidate, with other shardings of places."""
        costs = self._on(candidate)
        self.n_scored += 1
        try:
            shardings = self.variants.propagate(changes)
        except NotPropagated:
            return None
        near = self._near
        score = costs.score(shardings, near[1] if near and near[0] is costs else None)
        self._near = costs, score
        return score

    def peak(self, candidate: Candidate, score: Score) -> int:
        """The bytes that a candidate needs on a device, at least."""
        return self._costs[candidate.mesh].peak(score)

    def _on(self, candidate: Candidate) -> Costs:
        """Puts the module on the mesh of a candidate."""
        variants, sizes = self.variants, dict(candidate.mesh)
        if candidate.mesh not in self._costs:
            devices = [*self.mesh_of(candidate).devices.flat]
            network = MeshNetwork(sizes, Network(devices, self.chip))
            share = self.chip.share(devices[0])
            self._costs[candidate.mesh] = Costs(variants.outline, network, self.chip, share)
        if tuple(variants.outline.mesh.items()) != candidate.mesh:
            variants.move_to(sizes)
        return self._costs[candidate.mesh]


def placed(
    names: ArrayNames,
    shape: Sequence[int],
    axes: Mapping[str, Collection[str]],
    sizes: Mapping[str, int],
) -> Axes:
    """The mesh axes of each axis of an array: each once, and only where they divide its size."""
    used = set[str]()
    found: list[tuple[str, ...]] = []
    for each, n in zip(names, shape, strict=True):
        # expressions may name mesh axes, too
        mine = tuple(
            dict.fromkeys(
                axis
                for name in each
                for axis in axes.get(name, (name,) if name in sizes else ())
                if axis not in used
            )
        )
        if n % prod(sizes[axis] for axis in mine):
            mine = ()
        used.update(mine)
        found.append(mine)
    return tuple(found)
