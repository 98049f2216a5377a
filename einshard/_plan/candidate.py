"""Candidate: one way to shard a model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from jax.sharding import Mesh

from .._notation.expression import Term
from .._sharding.axis_rules import axis_rules
from .._sharding.context import mesh_scope
from .._sharding.mesh import device_mesh, named_mesh


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh shape, and the mesh axes over which each axis name is sharded.

    Attributes:
        mesh: the mesh axes and their sizes, slowest-varying first: (('x', 64), ('y', 4)).
        axes: the mesh axes of every axis name of the model, in the order of `Model.sizes`:
            (('batch', ('x',)), ('embed', ('x', 'y')), ('layers', ())).
    """

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def placements(self) -> dict[str, str]:
        """The placement of each axis name, for `axis_rules`: {'batch': '@x', 'layers': ''}."""
        return {name: str(Term('', mesh_axes=axes)) if axes else '' for name, axes in self.axes}

    def mesh_of(self, devices: Mesh) -> Mesh:
        """Returns the mesh of this candidate, made of the devices of another mesh."""
        mesh = named_mesh(device_mesh(devices), dict(self.mesh), 'device_mesh(devices, ')
        return cast(Mesh, mesh)

    @contextmanager
    def scope(self, devices: Mesh) -> Generator[Mesh, None, None]:
        """Makes the mesh and the axis rules of this candidate the current ones."""
        mesh = self.mesh_of(devices)
        with mesh_scope(mesh), axis_rules(self.placements):
            yield mesh

    @property
    def mesh_text(self) -> str:
        """The mesh axes and their sizes: 'x=64, y=4'."""
        return ', '.join(f'{name}={size}' for name, size in self.mesh)

    def changed_names(self, other: Candidate) -> list[str]:
        """The axis names that the two candidates shard over different mesh axes."""
        pairs = zip(self.axes, other.axes, strict=True)
        return [name for (name, axes), (_, others) in pairs if axes != others]

    def __str__(self) -> str:
        rules = ', '.join(f'{name}{text}' for name, text in self.placements.items() if text)
        return f'{self.mesh_text}: {rules or "everything replicated"}'
