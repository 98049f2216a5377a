"""Places arguments of a `sharded` function before jit receives them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from .._arrays.constrain import (
    batched_sharding,
    elements_match,
    reshard_traced,
    sharding_rejected_by_jit,
)
from .._arrays.device_put import TopologyError, device_put, make_movable, put
from .._arrays.place import check_ref
from .._arrays.process_agreement import PlannedArray, check_same_contents, mesh_to_compare_on
from .._errors import EinshardError
from .._sharding.context import Context
from .._sharding.describe import describe, describe_in
from .._sharding.leaf_spec import REPLICATED, with_memory_kind
from .._sharding.mesh import is_partial, memory_kind_of, partial_axes, process_count
from .._sharding.placement import Placement
from .._sharding.tracing import is_tracing
from .._text import first_of
from .._trees.paths import leaves_with_paths
from .program import Program
from .value_spec import ValueSpec, as_struct


def place_arguments(
    program: Program, values: Sequence[Any], context: Context, running: bool
) -> Sequence[Any]:
    """Places the arguments that jit would reject or cannot place.

    Returns `values` itself if no argument changes.

    Raises for an array that is already sharded, but not as its spec says, unless `reshard=True`.
    Raises for an array without a spec that is committed to devices other than those of the mesh. If
    `running`, raises if the processes pass different data for an array sharded over several
    processes. If not, returns ShapeDtypeStructs for devices that cannot hold arrays.
    """
    pairs = [*zip(program.arguments, values, strict=True)]
    # check all before resharding any
    placements = [argument.find_placements(value, context) for argument, value in pairs]
    # without shardings, jit runs on the devices of its arguments
    jit_has_shardings = bool(jtu.tree_leaves((program.in_shardings, program.out_shardings)))
    placed: dict[int, Any] = {}
    to_compare: list[tuple[PlannedArray, Any]] = []
    for i, (argument, value) in enumerate(pairs):
        if i in program.static:
            continue
        if argument.spec is None:
            if jit_has_shardings:
                for path, leaf in leaves_with_paths(value):
                    _check_devices(program, argument, path, leaf)
            continue
        leaves: list[Any] = []
        for path, leaf, placement in placements[i]:
            new = leaf
            if placement is not None:
                new = _place(program, argument, path, leaf, placement, running)
            elif jit_has_shardings:
                _check_devices(program, argument, path, leaf)
            leaves.append(new)
            if placement is None or not program.setup.options.check_processes:
                continue
            if mesh_to_compare_on(leaf, placement.sharding.mesh) is not None:
                planned = argument.leaf_text(path, leaf), placement.expression.text
                to_compare.append((planned, leaf))
        if any(new is not old for new, (_, old, _) in zip(leaves, placements[i], strict=True)):
            placed[i] = jtu.tree_unflatten(jtu.tree_structure(value), leaves)
    if to_compare and running and isinstance(program.mesh, Mesh) and not is_tracing():
        check_same_contents(to_compare, program.mesh)
    return [placed.get(i, value) for i, value in enumerate(values)] if placed else values


def _place(
    program: Program,
    argument: ValueSpec,
    path: Sequence[Any],
    leaf: Any,
    placement: Placement,
    running: bool,
) -> Any:
    sharding, options = placement.sharding, program.setup.options
    # 1. A mutable array stays where it is. On an abstract mesh, the function is only traced, which
    #    needs only shapes.
    if isinstance(leaf, jax.Ref) and not isinstance(leaf, Tracer):
        try:
            check_ref(leaf, placement)
        except EinshardError as error:
            raise error.about(array=argument.leaf_text(path, leaf)) from None
        return leaf
    if not (program.mesh_is_ambient or isinstance(program.mesh, Mesh) or is_tracing()):
        return leaf

    # 2. Find the sharding of an array that jit rejects: a traced one, also on the abstract mesh
    #    that `jax.set_mesh` sets in a trace, or one that is committed to other devices.
    is_ambient = program.mesh_is_ambient and isinstance(sharding.mesh, AbstractMesh)
    is_traced = isinstance(leaf, Tracer) or is_ambient
    current: Sharding | None = None
    if is_traced:
        current = sharding_rejected_by_jit(leaf, program.for_jit(sharding))
        if current is not None and options.keeps_mapped_axes and elements_match(leaf, sharding):
            current = None
    elif _is_committed(leaf) and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        current = leaf.sharding
    if current is not None and not (_is_unsharded(current) or options.reshard):
        raise _placed_differently(program, current, placement, leaf, argument, path) from None

    # 3. Leave host data and uncommitted arrays to jit where it can place them. It cannot place a
    #    partial sum. In a program with several processes, it does not shard host data, and does not
    #    check that uncommitted arrays are equal in all processes.
    needs_put = is_partial(sharding) or process_count() > 1
    is_fixed = isinstance(leaf, jax.ShapeDtypeStruct | jax.Ref | Tracer) or _is_committed(leaf)
    if current is None and (is_fixed or not needs_put):
        return leaf

    # 4. Reshard or place the rest.
    try:
        if is_traced:
            replicated = program.for_jit(NamedSharding(sharding.mesh, P()))
            return reshard_traced(leaf, sharding, replicated)
        if needs_put:
            return put([leaf], [sharding])[0]
        # unlike put, accepts an abstract mesh
        return device_put(make_movable(leaf, sharding), sharding)
    except TopologyError:
        if running or is_tracing():
            raise
        return as_struct(leaf, placement)


def _placed_differently(
    program: Program,
    current: Sharding,
    placement: Placement,
    leaf: Any,
    argument: ValueSpec,
    path: Sequence[Any],
) -> EinshardError:
    memory, expected = memory_kind_of(current), memory_kind_of(placement.sharding)
    facts: dict[str, str] = {}
    n_batch_axes = 0
    if memory != expected:
        sentence = f'the argument is in {memory} memory, but its spec expects {expected} memory'
    else:
        if isinstance(leaf, Tracer):
            current, n_batch_axes = batched_sharding(leaf)
        current_text = describe_in(placement.expression, current, leaf.ndim, n_batch_axes)
        as_text = f"as '{current_text}'"
        if n_batch_axes:
            first = 'first axis is' if n_batch_axes == 1 else f'first {n_batch_axes} axes are'
            as_text += f', whose {first} mapped by jax.vmap'
        unreduced, _ = partial_axes(current)
        is_sum = unreduced and not is_partial(placement.sharding)
        sentence = f'the argument is already sharded differently, {as_text}'
        if is_sum:
            sentence = f"the argument is a partial sum, '{current_text}', but its spec has no '+'"
        mesh = placement.sharding.mesh
        outside = set[Any]() if isinstance(mesh, AbstractMesh) else _outside(current, mesh)
        order = (_device_order(current), _device_order(placement.sharding))
        if outside:
            sentence = f'the argument is on devices outside the mesh, sharded {as_text}'
            facts['outside the mesh'] = _devices_text(outside)
        elif current_text == str(placement.expression) and None not in order and len({*order}) > 1:
            sentence = 'the argument is sharded as its spec says, but in a different device order'
    spec = with_memory_kind(str(placement.expression), placement.sharding.memory_kind)
    value = f'{argument.name}{jtu.keystr(tuple(path))}'
    fix = f'reshard=True in the decorator, or {_einshard_call(program, value, spec)}'
    if n_batch_axes:
        # `einshard` would only be a constraint, and keep the batch axes as they are
        fix = 'reshard=True in the decorator'
        if AxisType.Explicit in placement.sharding.mesh.axis_types:
            fix = ''  # resharding fails if the spec uses the mesh axes of a batch axis
    return placement.expression.error(
        sentence,
        [term for term in placement.expression.right if term.spans_devices],
        code='placed-differently',
        array=argument.leaf_text(path, leaf),
        **facts,
        **({'try': fix} if fix else {}),
    )


def _check_devices(program: Program, argument: ValueSpec, path: Sequence[Any], leaf: Any) -> None:
    """Raises if a committed array is not on exactly the devices of the mesh, in mesh order."""
    if isinstance(program.mesh, AbstractMesh) or not _is_committed(leaf):
        return
    devices = tuple(program.mesh.devices.flat)
    leaf_devices = leaf.sharding.device_set
    outside = _outside(leaf.sharding, program.mesh)
    if outside:
        where = 'devices outside the mesh'
    elif len(leaf_devices) < len(devices):
        where = f'{len(leaf_devices)} of the {len(devices)} devices'
    elif _device_order(leaf.sharding) not in (None, devices):
        where = 'the devices of the mesh in a different order'
    else:
        return
    device, *others = leaf_devices
    declaration, label = program.setup.declaration, str(argument.name)
    # the path is part of the name only if other leaves of the argument have a spec
    name = label if argument.spec is None else argument.leaf_name(path)
    own = declaration.parameters.names[: declaration.parameters.n_self]  # which have no spec
    if label in own or declaration.is_annotated or not declaration.specs:
        value = label if argument.spec is None else f'{label}{jtu.keystr(tuple(path))}'
        fix = _einshard_call(program, value, REPLICATED)
    else:
        must_reshard = not (_is_unsharded(leaf.sharding) or program.setup.options.reshard)
        reshard = ', and reshard=True,' if must_reshard else ''
        fix = f"'{REPLICATED}' instead of None{reshard} in the decorator, to replicate it"
    raise EinshardError(
        f'argument {name!r} has no spec and is committed to {where}',
        code='placed-differently',
        facts={
            'array': argument.leaf_text(path, leaf),
            'placement': describe(leaf) if others else f'on {device}',
            **({'outside the mesh': _devices_text(outside)} if outside else {}),
            'try': fix,
        },
    ) from None


def _outside(sharding: Sharding, mesh: Mesh) -> set[Any]:
    return sharding.device_set - {*mesh.devices.flat}


def _devices_text(devices: Collection[Any]) -> str:
    """Formats devices as 'cpu:8, cpu:9'. `str(device)` depends on the version of JAX."""
    in_order = sorted(devices, key=lambda device: (device.platform, device.id))
    return first_of([f'{device.platform}:{device.id}' for device in in_order], 8)


def _einshard_call(program: Program, name: str, spec: str) -> str:
    mesh = '' if program.setup.mesh is None else ', mesh=...'
    return f"einshard({name}, '{spec}'{mesh}) before the call"


def _device_order(sharding: Sharding) -> tuple[Any, ...] | None:
    """Returns the devices in mesh order, or None if no public API exposes the order."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed


def _is_unsharded(sharding: Sharding) -> bool:
    # `is_fully_replicated` is true of reduced axes too
    is_replicated = sharding.is_fully_replicated and not is_partial(sharding)
    return len(sharding.device_set) == 1 or is_replicated
