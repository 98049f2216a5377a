"""The setup of a `sharded` function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh

from .._errors import EinshardError
from .._sharding.context import (
    AxisRule,
    Context,
    current_context,
    is_mesh_in_context,
    is_tracing,
    with_rules,
)
from .._sharding.mesh import AnyMesh, MeshLike
from .parameters import CallSignature, Declaration
from .promise import Budget
from .sharding_trees import abstract_mesh

# Given an error, a call and its values, returns the error without fixes that do not work for them.
TryFixes: TypeAlias = Callable[[EinshardError, CallSignature, Sequence[Any]], EinshardError]


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A decorated function, its specs, and the options of `sharded`."""

    function: Callable[..., Any]
    name: str
    declaration: Declaration
    mesh: MeshLike | None  # None: the mesh in context at each call
    reshard: bool
    options: Mapping[str, Any]  # `jax.jit` options, except those that select parameters
    budget: Budget | None  # None: no limits on collectives and memory
    check_processes: bool
    # Set once a call has a module of Equinox, in its arguments or its result. From then on, calls
    # convert them to `Partitioned`. Functions without modules do not look for them in each call.
    has_modules: threading.Event = field(default_factory=threading.Event)
    axis_rules: Sequence[AxisRule] = ()  # for the specs and the body of the function
    keeps_mapped_axes: bool = False  # whether nested calls leave an axis of jax.vmap as it is
    try_fixes: TryFixes | None = None

    def context(self) -> Context:
        """Returns the mesh and axis rules. In a trace, a mesh from `jax.set_mesh` is abstract."""
        try:
            return with_rules(current_context(self.mesh), self.axis_rules)
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def mesh_key(self, context: Context) -> tuple[AnyMesh, bool]:
        """Returns a cache key: the mesh, in abstract form if ambient, and whether it is ambient."""
        mesh = context.lowering_mesh
        is_ambient = self.is_ambient(mesh)
        return (abstract_mesh(mesh) if is_ambient else mesh), is_ambient

    def is_ambient(self, mesh: AnyMesh) -> bool:
        """Whether the mesh is from `jax.set_mesh`. If so, jit resolves PartitionSpecs on it."""
        if isinstance(mesh, AbstractMesh) and not is_tracing():
            return False  # from jax.sharding.use_abstract_mesh, without devices
        return self.mesh is None and is_mesh_in_context(mesh)
