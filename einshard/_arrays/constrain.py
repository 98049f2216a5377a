"""Placement -> constraint: what einshard does to values of a function that is being traced."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, Sharding

from .._errors import EinshardError
from .._sharding.context import depth_of_user, is_staging
from .._sharding.mesh import mesh_fact, partition_spec, spec_axes
from .._sharding.resolve import Placement


def constrain(x: Any, placement: Placement) -> Any:
    """Constrains a traced value: explicit mesh axes by reshard, automatic ones by constraint."""
    _check_context(placement)
    if isinstance(x, jax.Ref):
        return _same_ref(x, placement)
    try:
        return _constrain(x, placement.sharding)
    except ValueError as error:
        # in jax.grad without jit the value itself may be on other devices, which no tracer tells
        raise _refused(placement, error) from error


def place_constant(x: Any, placement: Placement) -> Any:
    """Places or constrains an array that a traced function has from outside."""
    _check_context(placement)
    sharding = placement.sharding
    try:
        if isinstance(sharding.mesh, AbstractMesh):
            return _constrain_in_jit(x, sharding)
        # under jit this is a tracer, which device_put has not placed; under jax.grad and jax.vmap
        # alone it is an array on the right devices
        moved = jax.device_put(x, sharding)
        return _constrain(moved, sharding) if isinstance(moved, Tracer) else moved
    except ValueError as error:
        raise _refused(placement, error) from error


def warn_replicated(placement: Placement) -> None:
    """Warns of a short form that replicates a value without saying so."""
    text = placement.expression.text
    warnings.warn(
        f"'{text}' has no placement, and no axis_rules apply: the value is replicated over the "
        f'mesh {mesh_fact(placement.sharding.mesh)}; to replicate it on purpose, write '
        f"'{' '.join(placement.expression.names)} -> {text}'",
        stacklevel=depth_of_user(),
    )


def _same_ref(ref: Any, placement: Placement) -> Any:
    """A traced `jax.Ref`, if its type says that it is placed so; JAX has no constraint for it."""
    sharding = placement.sharding
    if set(sharding.mesh.axis_types) == {AxisType.Explicit} and has_type(ref, sharding):
        return ref
    raise placement.expression.error(
        'a jax.Ref cannot be constrained: it keeps the sharding that it was made with',
        instead=f"einshard(ref[...], '{placement.expression.text}'), which constrains its value",
    )


def _constrain(x: Any, sharding: NamedSharding) -> Any:
    types = set(sharding.mesh.axis_types)
    if AxisType.Explicit in types:
        x = jax.sharding.reshard(x, only(sharding, AxisType.Explicit))
    if AxisType.Auto in types:
        x = jax.lax.with_sharding_constraint(x, only(sharding, AxisType.Auto))
    return x


_constrain_in_jit = jax.jit(_constrain, static_argnums=1)


def only(sharding: NamedSharding, kind: AxisType) -> NamedSharding:
    """A sharding over the mesh axes of one type."""
    mesh = sharding.mesh
    if set(mesh.axis_types) == {kind}:
        return sharding
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kept = [
        tuple(axis for axis in entry if types[axis] == kind) for entry in spec_axes(sharding.spec)
    ]
    return NamedSharding(mesh, partition_spec(kept))


def has_type(x: Any, sharding: NamedSharding) -> bool:
    """Whether the type of a traced value says what the sharding does on explicit mesh axes."""
    typed_as: Any = jax.typeof(x).sharding.spec
    if typed_as.unreduced or typed_as.reduced:
        return False
    wanted, typed = spec_axes(only(sharding, AxisType.Explicit).spec), spec_axes(typed_as)
    n_dims = max(len(wanted), len(typed))
    return wanted + [()] * (n_dims - len(wanted)) == typed + [()] * (n_dims - len(typed))


def sharding_refused(x: Any, for_jit: Any) -> Sharding | None:
    """Where a value is that jit refuses for its placement, in jax.grad or jax.vmap alone.

    None where it takes the value, as it does in a program. No tracer tells; so jit is asked.
    """
    if is_staging():
        return None
    try:
        jax.jit(_same, in_shardings=for_jit)(x)
    except ValueError:
        found: list[Sharding] = []
        jax.debug.inspect_array_sharding(x, callback=found.append)
        return found[0]
    return None


def move_traced(x: Any, sharding: NamedSharding, replicated: Any) -> Any:
    """Moves a value that jit refuses in jax.grad or jax.vmap alone.

    Not by device_put, which under jax.vmap shards the wrong axes. From other devices, where a
    constraint does not lead, by way of `replicated`.
    """
    try:
        return _constrain_in_jit(x, sharding)
    except ValueError:
        return _constrain_in_jit(jax.device_put(x, replicated), sharding)


def _same(x: Any) -> Any:
    return x


def _check_context(placement: Placement) -> None:
    """Raises where JAX would ignore or misread a constraint."""
    sharding = placement.sharding
    error = placement.expression.error
    mesh = sharding.mesh
    if sharding.memory_kind not in (None, 'device'):
        raise error(
            f'a traced value has no place in memory yet: memory_kind={sharding.memory_kind!r} is '
            'for arrays',
            instead='place the argument or the result',
        )
    context = jax.sharding.get_abstract_mesh()
    is_abstract = isinstance(mesh, AbstractMesh)
    if is_abstract and context.empty:
        raise error(
            'an abstract mesh can be used in a traced function only while it is in context',
            mesh=mesh_fact(mesh),
            give="'with jax.set_mesh(mesh):', or a mesh of devices",
        )
    explicit = AxisType.Explicit in (*mesh.axis_types, *context.axis_types)
    other = not context.empty and context != (mesh if is_abstract else mesh.abstract_mesh)
    if other and (is_abstract or explicit):
        raise error(
            'the mesh given is not the mesh in context',
            mesh_given=mesh_fact(mesh),
            mesh_in_context=mesh_fact(context),
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for entry in spec_axes(sharding.spec):
        kinds = [types[axis] == AxisType.Explicit for axis in entry]
        if kinds != sorted(kinds, reverse=True):
            raise error(
                f'one array axis is cut over {", ".join(map(str, entry))}, where an automatic mesh '
                'axis comes before an explicit one; JAX has the explicit ones first',
                mesh=mesh_fact(mesh),
            )


def _refused(placement: Placement, error: ValueError) -> EinshardError:
    return placement.expression.error(
        'JAX cannot constrain this value to the devices of the mesh',
        JAX_says=str(error).splitlines()[0],
        mesh=mesh_fact(placement.sharding.mesh),
    )
