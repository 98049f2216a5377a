"""A decorated function and the options of `sharded`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh

from .._errors import EinshardError
from .._sharding.context import Context, current_context, is_mesh_in_context, is_tracing
from .._sharding.mesh import AnyMesh, MeshLike
from .parameters import Declaration
from .promise import Budget
from .sharding_trees import abstract_mesh


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A decorated function and the options of `sharded`.

    Attributes:
        mesh: the mesh from `mesh=` or the specs, or None to use the mesh in context at each call.
        reshard: whether to reshard arguments that are sharded differently.
        options: `jax.jit` options, except those that name parameters.
        budget: checks the limits on collectives and memory. None if there are no limits.
    """

    function: Callable[..., Any]
    name: str
    declaration: Declaration
    mesh: MeshLike | None
    reshard: bool
    options: Mapping[str, Any]
    budget: Budget | None

    def context(self) -> Context:
        """Returns the mesh and axis rules. In a trace, a mesh from `jax.set_mesh` is abstract."""
        try:
            return current_context(self.mesh)
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def mesh_key(self, context: Context) -> tuple[AnyMesh, bool]:
        """Returns a cache key: the mesh, in abstract form if ambient, and whether it is ambient."""
        mesh = context.lowering_mesh
        is_ambient = self.is_ambient(mesh)
        return (abstract_mesh(mesh) if is_ambient else mesh), is_ambient

    def is_ambient(self, mesh: AnyMesh) -> bool:
        """Whether the mesh is from `jax.set_mesh`, which lets jit resolve PartitionSpecs on it."""
        if isinstance(mesh, AbstractMesh) and not is_tracing():
            return False  # from jax.sharding.use_abstract_mesh, without devices
        return self.mesh is None and is_mesh_in_context(mesh)
