"""Options of `sharded` and `per_device`; Setup: a decorated function with its specs and options."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from .._errors import EinshardError
from .._sharding.context import AxisRule, Context, Fallback, changed, with_rules
from .._sharding.mesh import AnyMesh, MeshLike
from .._sharding.scopes import current_context, is_mesh_in_context
from .._sharding.tracing import is_tracing
from .parameters import Declaration
from .promise import Budget, Promise


class Options(NamedTuple):
    """The options of `sharded` and `per_device`, and what `per_device` asks of `sharded`."""

    mesh: MeshLike | None = None
    reshard: bool = False
    indivisible: Fallback = 'error'
    collectives: Promise | None = None
    memory: str | int | None = None
    check_processes: bool = True
    axis_rules: Sequence[AxisRule] | None = None  # if given, jaxtyping annotations are specs
    # whether calls in traces leave a mapped axis of `jax.vmap` as it is, where `jax.jit` with
    # `in_shardings` replicates it
    keeps_mapped_axes: bool = False
    is_per_device: bool = False  # whether `per_device` made the specs, as functions

    @property
    def are_default(self) -> bool:
        return all(x is default for x, default in zip(self, Options(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A decorated function, its specs and its options."""

    function: Callable[..., Any]
    name: str
    declaration: Declaration
    options: Options
    mesh: MeshLike | None  # of the options or the specs; None: the mesh in context at each call
    jit_options: Mapping[str, Any]  # except those that select parameters
    budget: Budget | None  # None: no limits on collectives and memory
    # Set once a call has a module of Equinox, in its arguments or its result. From then on, calls
    # convert them to `Partitioned`. Functions without modules do not look for them in each call.
    has_modules: threading.Event = field(default_factory=threading.Event)

    @property
    def axis_rules(self) -> Sequence[AxisRule]:
        """The rules for the specs and the body of the function."""
        return self.options.axis_rules or ()

    def context(self) -> Context:
        """Returns the mesh and axis rules. In a trace, a mesh from `jax.set_mesh` is abstract."""
        try:
            context = with_rules(current_context(self.mesh), self.axis_rules)
            indivisible = self.options.indivisible
            return changed(context, indivisible=indivisible) if indivisible != 'error' else context
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def mesh_key(self, context: Context) -> tuple[AnyMesh, bool]:
        """Returns a cache key: the mesh, in abstract form if ambient, and whether it is ambient."""
        mesh = context.lowering_mesh
        is_ambient = self.is_ambient(mesh)
        return (mesh.abstract_mesh if is_ambient else mesh), is_ambient

    def is_ambient(self, mesh: AnyMesh) -> bool:
        """Whether the mesh is that of `jax.set_mesh`. If so, jit resolves PartitionSpecs on it."""
        if isinstance(mesh, AbstractMesh) and not is_tracing():
            return False  # from jax.sharding.use_abstract_mesh, without devices
        may_be = self.mesh is None or isinstance(self.mesh, AbstractMesh)
        return may_be and is_mesh_in_context(mesh)
