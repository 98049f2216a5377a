"""explain: compiles a function and reports on the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from .._functions.promise import program_text
from .._hlo.all_gathers import AllGather, find_all_gathers
from .._hlo.buffers import largest_temporaries
from .._hlo.collectives import Collective, find_collectives
from .._hlo.hardware import Chip, as_chip, find_chip
from .._hlo.memory import read_memory
from .._hlo.module import Module
from .._sharding.mesh import AnyMesh, MeshLike, is_device_mesh, spec_axes
from .arrays import ProgramArray, array_row, find_arguments, find_results
from .bounds import NO_BOUNDS, find_bounds
from .carried import Carried, find_carried, find_weights, results_in_place
from .collective_axes import ShardedBy, along, mesh_axes_between, mesh_axes_of
from .collectives import Collectives
from .findings.causes import with_causes
from .findings.facts import Facts
from .findings.find import find_findings, find_notes
from .intermediates import find_intermediates
from .lowered import Stages, compiled_shardings, trace_call
from .oversized import Oversized, compile_stages, given_mesh
from .report import Report
from .report_rows import ArrayRow, CollectiveRow
from .totals import product_rows


def explain(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    replicated_above: int = 2**20,
    intermediates: bool = False,
    chip: Chip | str | None = None,
    **kwargs: Any,
) -> Report:
    """Compiles a function and lists its placements, collectives, memory and likely mistakes.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from einshard import explain, sharded
        >>> @sharded('x* y', 'y z -> * y z')
        ... def product(x, w):
        ...     return x @ w
        >>> x = jax.ShapeDtypeStruct((8 * jax.device_count(), 32), jnp.float32)
        >>> w = jax.ShapeDtypeStruct((32, 8), jnp.float32)
        >>> report = explain(product, x, w)  # print(report) shows everything
        >>> report.collectives.counts
        {}
        >>> [(row.path, row.array) for row in report.arguments[1:]]
        [('w', 'float32[32,8]')]

    `explain` compiles the function once; later calls of the function reuse the compiled program.

    Args:
        fn: a `sharded` or jitted function, any other function (it is jitted), or the result of its
            `lower(...)`, compiled or not.
        args, kwargs: arguments of the call: arrays, or `jax.ShapeDtypeStruct` in place of arrays.
            Omit them for a lowered program. Pass arguments by position if their names clash with
            those below.
        mesh: the mesh to compile for, unless `fn` has its own; `topology` makes one of devices you
            don't have. If `mesh=` is given, only the shapes and dtypes of the arguments matter.
        replicated_above: note replicated arguments and results of more than this many bytes.
        intermediates: whether to list the placements of intermediate values; this compiles again.
        chip: the chip for the lower bounds on time: a `Chip`, or a name such as 'H100'. Default:
            the chip of the devices; there are no bounds for CPUs.

    Returns:
        A `Report`, which renders in the REPL, notebooks, rich and print.

    Raises:
        EinshardError: the arguments do not fit the function; it does not compile; or the compiler
            does not expose the program. A program that is too large for a TPU gets a report.
    """
    given = None if chip is None else as_chip(chip)
    stages = trace_call(fn, args, kwargs, mesh)
    of = given_mesh(stages, (args, kwargs), mesh)
    return explain_stages(stages, of, given, replicated_above, intermediates)


def explain_stages(
    stages: Stages,
    mesh: AnyMesh | None,
    chip: Chip | None = None,
    replicated_above: int = 2**20,
    intermediates: bool = False,
) -> Report:
    """Compiles a traced program for a mesh, if that is known, and reports on it."""
    compiled = compile_stages(stages, mesh)
    module = Module(program_text(stages.name or 'the program', compiled))
    held, results_info = compiled_shardings(compiled)  # type: ignore[reportArgumentType]
    arguments = find_arguments(stages, compiled, held, module)
    results = find_results(stages, results_info)
    shardings = [array.sharding for array in (*arguments, *results)]
    meshes = list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))
    devices = _devices(shardings)
    sharded_by = _sharded_by([*arguments, *results])
    in_rows, out_rows = ([array_row(array) for array in part] for part in (arguments, results))
    used = [array for array in arguments if array.sharding is not None]
    paths = [array.path for array in used]
    outputs = _output_paths(out_rows, paths, module)
    ids = [device.id for device in devices]
    collectives, all_gathers = _communication(module, ids, len(used))
    weights = find_weights(module, [(a.path, str(a.dtype)) for a in used], outputs)
    carried = find_carried(module, collectives, weights, paths, outputs)
    products = product_rows(module)
    rows = Collectives(
        _collective_row(one, what, meshes, sharded_by)
        for one, what in zip(collectives, carried, strict=True)
    )
    chip = chip or find_chip(devices[0].device_kind)
    capacity = int(chip.memory * chip.share(devices[0])) if chip else None
    memory = read_memory(
        compiled, compiled.available if isinstance(compiled, Oversized) else capacity
    )
    facts = Facts(
        stages=stages,
        compiled=compiled,
        module=module,
        memory=memory,
        platform=devices[0].platform,
        n_devices=len(devices),
        slices=[getattr(device, 'slice_index', None) or 0 for device in devices],
        meshes=meshes,
        arguments=arguments,
        results=results,
        argument_rows=in_rows,
        result_rows=out_rows,
        collectives=collectives,
        rows=rows,
        all_gathers=all_gathers,
        weights=weights,
        products=products,
        replicated_above=replicated_above,
    )
    return Report(
        name=stages.name or module.name or 'the program',
        n_devices=len(devices),
        device_kind=devices[0].device_kind,
        mesh=_mesh_axes(meshes),
        arguments=tuple(in_rows),
        results=tuple(out_rows),
        collectives=with_causes(facts),
        memory=memory,
        flops=sum(row.flops for row in products) or None,
        products=products,
        in_place=results_in_place(in_rows, out_rows, module),
        findings=find_findings(facts),
        notes=find_notes(facts),
        intermediates=tuple(find_intermediates(stages.lower(), meshes)) if intermediates else None,
        temporaries=largest_temporaries(module),
        chip=chip.name if chip else None,
        bounds=find_bounds(
            chip,
            devices,
            module,
            products,
            [(one, row.along) for one, row in zip(collectives, rows, strict=True)],
        )
        if chip
        else NO_BOUNDS,
    )


def _communication(
    module: Module, device_ids: Sequence[int], n_inputs: int
) -> tuple[Sequence[Collective], dict[str, AllGather]]:
    """Finds the collectives of a program, and its all-gathers by name.

    Parameters after the inputs belong to `jax.Ref`s that the function closes over.
    """
    collectives = find_collectives(module, device_ids)
    if all(one.kind != 'all-gather' for one in collectives):
        return collectives, {}
    all_gathers = {one.name: one for one in find_all_gathers(module, len(device_ids))}
    for name, one in all_gathers.items():
        if one.parameter is not None and one.parameter >= n_inputs:
            all_gathers[name] = replace(one, parameter=None)
    return collectives, all_gathers


def _devices(shardings: Sequence[Sharding | None]) -> list[Any]:
    """Returns the devices that run the program; one if it has no inputs and outputs."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return list(sharding.mesh.devices.flat)  # type: ignore[reportOptionalMemberAccess]
        if sharding is not None:
            return list(sharding.device_set)
    return jax.devices()[:1]


def _sharded_by(arrays: Sequence[ProgramArray]) -> dict[str, list[tuple[str, ...]]]:
    """Collects the mesh axes that shard each named axis."""
    sharded_by: dict[str, list[tuple[str, ...]]] = {}
    for array in arrays:
        if array.names is None or not isinstance(array.sharding, NamedSharding):
            continue
        for name, axes in zip(array.names, spec_axes(array.sharding.spec), strict=False):
            if axes and axes not in sharded_by.setdefault(name, []):
                sharded_by[name].append(axes)
    return sharded_by


def _output_paths(
    results: Sequence[ArrayRow], inputs: Sequence[str], module: Module
) -> Mapping[int, str]:
    """Lists the paths of the program outputs: results, followed by final values of refs."""
    paths = {i: row.path for i, row in enumerate(results)}
    for output, parameter in module.aliases.items():
        if output not in paths and parameter < len(inputs):
            paths[output] = inputs[parameter]
    return paths


def _collective_row(
    one: Collective, what: Carried, meshes: Sequence[Any], sharded_by: ShardedBy
) -> CollectiveRow:
    return CollectiveRow(
        kind=one.kind,
        arrays=one.shape_text,
        bytes=one.bytes,
        group_size=one.group_size,
        groups=one.n_groups,
        along=_along(one, meshes, sharded_by),
        executions=one.executions,
        network_bytes=one.network_bytes,
        is_async=one.is_async,
        source=one.source,
        of=what.of,
        op_name=one.op_name,
        role=what.role,
        is_backward=what.is_backward,
        axes=what.axes,
        widened=one.widened,
        called_at=one.called_at,
        in_branch=one.in_branch,
    )


def _along(one: Collective, meshes: Sequence[Any], sharded_by: ShardedBy) -> str:
    for mesh in meshes if one.groups else ():
        axes = mesh_axes_of(one.groups, mesh)
        if axes is not None:
            return along(axes, mesh, sharded_by)
    # the pairs of a permute may not connect all devices along its axes
    for mesh in meshes[:1] if one.pairs else ():
        return along(mesh_axes_between(one.pairs, mesh), mesh, sharded_by)
    return ''


def _mesh_axes(meshes: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Returns the axes of a user's mesh; those of the canonical mesh (d0, d1, ..) are omitted."""
    for mesh in meshes:
        if not is_device_mesh(mesh):
            return tuple(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
    return ()
