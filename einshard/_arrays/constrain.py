"""Applies placements to traced values, as sharding constraints."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax import memory
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from .._errors import EinshardError, Suggestion, quoted
from .._notation.expression import ELLIPSIS, Expression, axis_letters
from .._notation.layout import axis_positions
from .._sharding.context import USE_MESH_IN_CONTEXT
from .._sharding.describe import find_expression
from .._sharding.mesh import (
    AnyMesh,
    has_equal_axes,
    is_partial,
    memory_kind_of,
    mesh_fact,
    partial_axes,
    partition_spec,
    spec_axes,
)
from .._sharding.placement import Placement
from .._sharding.program_mesh import device_mismatch_error
from .._sharding.tracing import is_staging, user_stacklevel
from .._text import first_line
from .device_put import identity
from .reshard import reshard

# The expressions of the constraints that `plan` has traced so far, or None outside its traces.
constraints_of_trace: ContextVar[list[Expression] | None] = ContextVar(
    'constraints_of_trace', default=None
)


def constrain(x: Any, placement: Placement) -> Any:
    """Constrains a traced array, or checks the sharding of a traced `jax.Ref`."""
    sharding = _sharding_in_context(x, placement)
    expressions = constraints_of_trace.get()
    if expressions is not None:
        expressions.append(placement.expression)
    if isinstance(x, jax.Ref):
        if set(sharding.mesh.axis_types) == {AxisType.Explicit} and type_matches(x, sharding):
            return x
        raise placement.expression.error(
            'a jax.Ref cannot be constrained: its sharding is fixed when it is created',
            code='array',
            instead=f"constrain its value: einshard(ref[...], '{placement.expression.text}')",
        )
    # outside jit, on a mesh with Auto and Explicit axes, with_sharding_constraint removes the
    # Explicit axes from the type: under jax.grad and jax.vmap, and when jax.checkpoint runs what
    # it has staged
    is_mixed = len({*sharding.mesh.axis_types}) > 1
    try:
        with _scope(x, placement):
            if is_mixed and is_staging():  # a new function, because a cached trace has an old line
                return jax.jit(lambda x: _constrain(x, sharding))(x)
            return (_constrain_in_jit if is_mixed else _constrain)(x, sharding)
    except ValueError as error:
        # a tracer of jax.grad outside jit does not show which devices its value is on
        raise _cannot_constrain(placement, error) from error


def _scope(x: Any, placement: Placement) -> Any:
    """Names the axes of a constraint, for `explain` and `to_jax`."""
    from .._program.jaxpr.names import constraint_scope  # concrete arrays need no `_program`

    names, without_rule = placement.expression.names, placement.names_without_rule
    return jax.named_scope(constraint_scope(names, np.ndim(x), without_rule))


def place_constant(x: Any, placement: Placement) -> Any:
    """Places or constrains a concrete array that a traced function closes over."""
    sharding = _sharding_in_context(x, placement)
    try:
        # device_put needs devices, and fails for unconstrained, unreduced or reduced axes
        is_abstract = isinstance(sharding.mesh, AbstractMesh)
        with _scope(x, placement):
            if is_abstract or placement.is_unconstrained or is_partial(sharding):
                return _constrain_in_jit(x, sharding)
            # under jit, device_put returns a tracer and places nothing; under jax.grad or jax.vmap
            # outside jit, it returns a placed array
            moved = jax.device_put(x, sharding)
            return _constrain(moved, sharding) if isinstance(moved, Tracer) else moved
    except ValueError as error:
        raise _cannot_constrain(placement, error) from error


def warn_replicated(placement: Placement) -> None:
    """Warns that an expression with neither placements nor '->' replicates a value."""
    text = placement.expression.text
    warnings.warn(
        f"'{text}' has no placement, and no axis_rules apply: the value is replicated over the "
        f'mesh {mesh_fact(placement.sharding.mesh)}; to replicate it on purpose, write '
        f"'{' '.join(placement.expression.names)} -> {text}'",
        stacklevel=user_stacklevel(),
    )


def _constrain(x: Any, sharding: NamedSharding) -> Any:
    types = set(sharding.mesh.axis_types)
    # a constraint ignores the memory kind; the type of a traced value has only two memory spaces
    on_host = memory_kind_of(sharding) == 'pinned_host'
    is_moved = on_host != (jax.typeof(x).memory_space == memory.Space.Host)
    if is_moved and not on_host:  # before the constraint: XLA computes in device memory
        x = jax.device_put(x, memory.Space.Device)
    if AxisType.Explicit in types:
        spec = restrict_to_type(sharding, AxisType.Explicit).spec
        x = reshard(x, NamedSharding(sharding.mesh, spec))  # JAX allows no memory kind
    if AxisType.Auto in types:
        x = jax.lax.with_sharding_constraint(x, restrict_to_type(sharding, AxisType.Auto))
    return jax.device_put(x, memory.Space.Host) if is_moved and on_host else x


_constrain_in_jit = jax.jit(_constrain, static_argnums=1)


def restrict_to_type(sharding: NamedSharding, axis_type: AxisType) -> NamedSharding:
    mesh = sharding.mesh
    if set(mesh.axis_types) == {axis_type}:
        return sharding
    types = _axis_types(mesh)
    kept = [
        tuple(axis for axis in entry if types[axis] == axis_type)
        for entry in spec_axes(sharding.spec)
    ]
    partial = partial_axes(sharding) if axis_type == AxisType.Explicit else ()
    return NamedSharding(mesh, partition_spec(kept, *partial))


def _axis_types(mesh: AnyMesh) -> dict[Any, AxisType]:
    """Maps each mesh axis to its type, and P.UNCONSTRAINED to Auto."""
    types: dict[Any, AxisType] = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types | {PartitionSpec.UNCONSTRAINED: AxisType.Auto}


def type_matches(x: Any, sharding: NamedSharding) -> bool:
    """Whether a traced value's type has this sharding along the explicit mesh axes."""
    actual: Any = jax.typeof(x).sharding
    if partial_axes(actual) != partial_axes(sharding):
        return False
    explicit = restrict_to_type(sharding, AxisType.Explicit)
    entries, actual_entries = spec_axes(explicit.spec), spec_axes(actual.spec)
    ndim = max(len(entries), len(actual_entries))
    padded = entries + [()] * (ndim - len(entries))
    return padded == actual_entries + [()] * (ndim - len(actual_entries))


def sharding_rejected_by_jit(x: Any, in_shardings: Any) -> Sharding | None:
    """Returns the sharding of `x` if jit rejects `x`. Otherwise, and inside jit, returns None.

    Calls jit to find out, because a tracer of jax.grad or jax.vmap does not expose its sharding.
    """
    if is_staging():
        return None
    try:
        jax.jit(identity, in_shardings=in_shardings)(x)
    except ValueError:
        return _inspect_sharding(x)
    return None


def _inspect_sharding(x: Any) -> Sharding:
    shardings: list[Sharding] = []
    try:
        jax.debug.inspect_array_sharding(x, callback=shardings.append)
    except AttributeError:  # host data, which jit does not shard over several processes
        return SingleDeviceSharding(jax.local_devices()[0])
    return shardings[0]


def batched_sharding(x: Any) -> tuple[Sharding, int]:
    """Returns the sharding of a tracer's value, and how many batch axes of jax.vmap come first.

    The tracer itself shows neither how many batch axes its value has, nor where they are.
    """
    values = [x]
    probe: Any = jax.custom_batching.custom_vmap(identity)

    @probe.def_vmap
    def batched(_: int, in_batched: Sequence[bool], value: Any) -> tuple[Any, bool]:
        values.append(value)  # JAX has moved the batch axis to the front
        return probe(value), in_batched[0]

    probe(jax.lax.stop_gradient(x))  # jax.grad cannot differentiate `batched`
    return _inspect_sharding(values[-1]), values[-1].ndim - x.ndim


def elements_match(x: Any, sharding: NamedSharding) -> bool:
    """Whether a tracer's value is sharded like this, apart from the batch axes of jax.vmap."""
    batched, n_batch_axes = batched_sharding(x)
    if not isinstance(batched, NamedSharding):
        return False
    if isinstance(sharding.mesh, AbstractMesh):
        if not has_equal_axes(batched.mesh, sharding.mesh):
            return False
        sharding = NamedSharding(batched.mesh, sharding.spec)
    spec = PartitionSpec(*spec_axes(batched.spec)[n_batch_axes:])
    return NamedSharding(batched.mesh, spec).is_equivalent_to(sharding, x.ndim)


def reshard_traced(x: Any, sharding: NamedSharding, replicated: Any) -> Any:
    """Reshards an argument of a jitted function that is called under jax.grad or jax.vmap.

    `device_put` under jax.vmap would shard the wrong axes. A constraint would not, but cannot move
    `x` to other devices. If it fails, `device_put(x, replicated)` replicates `x` there first.
    """
    try:
        return _constrain_in_jit(x, sharding)
    except ValueError:
        return _constrain_in_jit(jax.device_put(x, replicated), sharding)


def _sharding_in_context(x: Any, placement: Placement) -> NamedSharding:
    """Returns the sharding of a constraint, on the mesh in context if its own mesh is abstract.

    Raises if JAX would ignore, misread or reject the constraint in the current context.
    """
    sharding = placement.sharding
    error = placement.expression.error
    mesh = sharding.mesh
    if sharding.memory_kind not in (None, 'device', 'pinned_host'):
        raise error(
            f'memory_kind={sharding.memory_kind!r} cannot be set on a traced value',
            code='array',
            instead='set it in the spec of an argument or of the result',
        )
    context = jax.sharding.get_abstract_mesh()
    is_abstract = isinstance(mesh, AbstractMesh)
    if is_abstract and context.empty:
        raise error(
            'an abstract mesh for a traced value must be the mesh in context',
            code='mesh',
            mesh=mesh_fact(mesh),
            instead="use 'with jax.set_mesh(mesh):', or pass a Mesh with devices",
        )
    has_explicit = AxisType.Explicit in (*mesh.axis_types, *context.axis_types)
    differs = not context.empty and not has_equal_axes(mesh, context)
    if differs and (is_abstract or has_explicit):
        raise error(
            'mesh= must match the mesh in context',
            code='mesh',
            mesh=mesh_fact(mesh),
            mesh_in_context=mesh_fact(context),
            instead=USE_MESH_IN_CONTEXT,
        )
    mismatch = device_mismatch_error(mesh, [x])
    if mismatch is not None:
        raise EinshardError(**mismatch.parts(expression=placement.expression.text))
    types = _axis_types(mesh)
    entries = spec_axes(sharding.spec)
    explicit_first = [
        tuple(sorted(entry, key=lambda axis: types[axis] == AxisType.Auto)) for entry in entries
    ]
    for entry, in_order in zip(entries, explicit_first, strict=True):
        if entry != in_order:
            positions = axis_positions(placement.expression, np.ndim(x))
            names = {i: name for name, i in positions.items() if name != ELLIPSIS}
            letters = (letter for letter in axis_letters() if letter not in positions)
            all_names = [names.get(i) or next(letters) for i in range(np.ndim(x))]
            in_jax_order = NamedSharding(mesh, partition_spec(explicit_first))
            fix = find_expression(in_jax_order, np.ndim(x), all_names)
            raise error(
                f'an array axis is sharded over {quoted(map(str, entry))}, with an Auto mesh axis '
                'before an Explicit one; JAX requires Explicit axes first',
                code='mesh',
                mesh=mesh_fact(mesh),
                fix=fix and Suggestion(fix.text),
            )
    if is_abstract and mesh != context:
        return NamedSharding(context, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def _cannot_constrain(placement: Placement, error: ValueError) -> EinshardError:
    return placement.expression.error(
        'JAX cannot constrain this value to the devices of the mesh',
        code='mesh',
        JAX_says=first_line(error),
        mesh=mesh_fact(placement.sharding.mesh),
    )
