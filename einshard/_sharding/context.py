"""Context: the mesh, the axis rules and the options that a spec is resolved with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from jax.sharding import AbstractMesh, AxisType, Mesh

from .._cache import cached
from .._errors import EinshardError
from .mesh import (
    AnyMesh,
    check_one_topology,
    device_mesh,
    has_equal_axes,
    is_reshaped,
    mesh_fact,
    shrink_mesh,
)


class AxisRule(NamedTuple):
    name: str
    placement: str
    ignores_missing: bool = False  # ignore mesh axes that the mesh lacks
    replicates_indivisible: bool = False  # replicate axes that are not divisible
    skips_taken: bool = False  # skip the rule if its mesh axes are in use


AxisRules: TypeAlias = tuple[AxisRule, ...]

# What to do with mesh axes that the mesh lacks, or with array axes that are not divisible.
Fallback: TypeAlias = Literal['error', 'replicate']
# For traced values, XLA pads the last shards of an axis.
Indivisible: TypeAlias = Literal['error', 'replicate', 'pad']


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The mesh, the axis rules and the options that an expression is resolved with.

    `make_context` returns one object for equal arguments, so contexts compare by identity. Hashing
    the fields would add 0.3 us to the 1.0 us that `einshard` takes for a placed array.
    """

    mesh: AnyMesh | None = None  # None: `device_mesh()`, the canonical mesh of all devices
    mesh_is_ambient: bool = False  # the mesh is in JAX's context, so `lower` never replaces it
    axis_rules: AxisRules = ()
    on_one_device: bool = False  # for check_same: counts, stars and mesh axis sizes become 1
    # options of the call; no scope has them, so they are not in cache keys
    memory_kind: str | None = None
    missing: Fallback = 'error'
    indivisible: Indivisible = 'error'

    @property
    def lowering_mesh(self) -> AnyMesh:
        return self.mesh or device_mesh()

    @property
    def replicates_indivisible(self) -> bool:
        by_rule = any(rule.replicates_indivisible for rule in self.axis_rules)
        return by_rule or self.indivisible == 'replicate'

    def key(self) -> ContextKey | None:
        """Returns the value that is added to JAX's cache keys."""
        key = self.mesh, self.axis_rules, self.on_one_device
        return key if self.mesh or self.axis_rules else None


# what to write instead of a mesh= that does not match the mesh in context
USE_MESH_IN_CONTEXT = 'omit mesh=, and use the axes of the mesh in context'

ContextKey: TypeAlias = tuple[AnyMesh | None, AxisRules, bool]


@cached
def make_context(
    mesh: AnyMesh | None,
    mesh_is_ambient: bool = False,
    axis_rules: AxisRules = (),
    on_one_device: bool = False,
    *options: Any,
) -> Context:
    if isinstance(mesh, Mesh):
        check_one_topology(list(mesh.devices.flat))
    return Context(mesh, mesh_is_ambient, axis_rules, on_one_device, *options)


NO_CONTEXT = Context()
_OPTIONS = tuple(Context.__slots__).index('on_one_device') + 1  # the position of the first option


@cached
def changed(context: Context, **changes: Any) -> Context:
    """Returns the context with other values of some fields."""
    values = [changes.get(name, getattr(context, name)) for name in Context.__slots__]
    defaults = [getattr(NO_CONTEXT, name) for name in Context.__slots__]
    # equal contexts must be one object, and the cache takes left out arguments for others
    return make_context(*values[:_OPTIONS] if values[_OPTIONS:] == defaults[_OPTIONS:] else values)


@cached
def in_memory(context: Context, memory_kind: str) -> Context:
    # with `changed`, whose arguments are keywords, a cache lookup would take 0.08 us longer
    return changed(context, memory_kind=memory_kind)


def context_on(mesh: AnyMesh, context: Context) -> Context:
    """Replaces the mesh of a context with that of a NamedSharding, or raises if they conflict."""
    expected_mesh = context.mesh
    if context.on_one_device:
        mesh = shrink_mesh(mesh, context.lowering_mesh)
    elif expected_mesh is not None:
        is_abstract = isinstance(mesh, AbstractMesh)
        if mesh == expected_mesh or (is_abstract and has_equal_axes(mesh, expected_mesh)):
            return context
        may_differ = context.mesh_is_ambient and AxisType.Manual not in expected_mesh.axis_types
        if not (may_differ or is_reshaped(mesh, expected_mesh)):
            actual, expected = mesh_fact(mesh), mesh_fact(expected_mesh)
            where = 'different devices' if actual == expected else 'a different mesh'
            source = 'mesh in context' if context.mesh_is_ambient else 'mesh='
            other = 'the mesh in context' if context.mesh_is_ambient else source
            raise EinshardError(
                f'the NamedSharding is on {where} from {other}',
                code='mesh',
                facts={'mesh of the spec': actual, source: expected},
            )
    return changed(context, mesh=mesh, mesh_is_ambient=False)


def with_rules(context: Context, rules: Sequence[AxisRule]) -> Context:
    """Adds axis rules to a context. The new rule of an axis wins."""
    if not rules:
        return context
    names = {rule.name for rule in rules}
    merged = [*rules, *(rule for rule in context.axis_rules if rule.name not in names)]
    # sorted, so that equal rules have equal cache keys; the order of taken='next' rules matters
    merged.sort(key=lambda rule: (True,) if rule.skips_taken else (False, rule))
    return changed(context, axis_rules=tuple(merged))
