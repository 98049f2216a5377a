"""explain: compiles a function and reports on the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding
from jax.stages import Compiled

from .._functions.promise import program_text
from .._hlo.all_gathers import AllGather, find_all_gathers
from .._hlo.buffers import largest_temporaries
from .._hlo.collective import Collective
from .._hlo.find_collectives import find_collectives
from .._hlo.hardware import Chip, as_chip, find_chip
from .._hlo.memory import read_memory
from .._hlo.module import Module
from .._sharding.collective_axes import ShardedBy, along_text, find_sharded_by
from .._sharding.mesh import AnyMesh, Device, MeshLike, is_canonical_mesh, position
from .arrays import array_row, find_arguments, find_names, find_results, results_in_place
from .bounds import NO_BOUNDS, find_bounds
from .findings.causes import with_causes
from .findings.facts import Facts
from .findings.find import find_findings, find_notes
from .intermediates import find_intermediates
from .lowered import Stages, compiled_shardings, suggest_partial, trace_call
from .oversized import Oversized, compile_stages
from .payloads import Payload, find_payloads, find_weights
from .report import Report
from .report_rows import CollectiveRow
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

    Later calls of the function reuse the compiled program. The exception is the first call of a
    `sharded` function with `collectives=` or `memory=`, which compiles again.

    Args:
        fn: a `sharded` or jitted function, also by `flax.nnx.jit` or `equinox.filter_jit`, or the
            result of `f.trace(...)`, `f.lower(...)` or `f.lower(...).compile()`. Any other function
            is jitted first.
        args, kwargs: arguments of the call. A `jax.ShapeDtypeStruct` can replace an array. Omit
            them for a traced, lowered or compiled program. If a parameter has the name of an
            option, pass it by position or bind it: `functools.partial(step, mesh=...)`.
        mesh: the mesh to compile for. `topology` makes a mesh of devices you don't have. With
            `mesh=`, `explain` ignores the shardings of arrays, but not those of ShapeDtypeStructs.
        replicated_above: a size in bytes. `Report.notes` lists larger replicated arguments and
            results.
        intermediates: whether to list the placements of intermediate values, which needs a second
            compilation.
        chip: a `Chip` or its name, such as 'H100', whose speeds set the lower bounds on time.
            Default: the chip of the devices. Without a chip, as on CPUs, there are no bounds.

    Returns:
        A `Report`, which renders in the REPL, notebooks, rich and print. A program that does not
        fit into the memory of a TPU also gets a report.

    Raises:
        EinshardError: the arguments do not match the function; the function does not compile; the
            backend does not return the HLO of the compiled program; or `mesh` is given for a
            function that is already jitted or has its own mesh.
    """
    with suggest_partial(fn, 'chip'):
        chip = None if chip is None else as_chip(chip)
    stages = trace_call(fn, args, kwargs, mesh)
    return explain_stages(stages, chip, replicated_above, intermediates)


def explain_stages(
    stages: Stages,
    chip: Chip | None = None,
    replicated_above: int = 2**20,
    intermediates: bool = False,
) -> Report:
    facts = _read_program(stages, compile_stages(stages), chip, replicated_above)
    return _make_report(facts, intermediates)


def _read_program(
    stages: Stages, compiled: Compiled | Oversized, chip: Chip | None, replicated_above: int
) -> Facts:
    module = Module(program_text(stages.name or 'the program', compiled))
    argument_shardings, result_info = compiled_shardings(compiled)  # type: ignore[reportArgumentType]
    names = find_names(stages, compiled, argument_shardings, module)
    arguments = find_arguments(stages, compiled, argument_shardings, names)
    results = find_results(stages, result_info, names)
    shardings = [array.sharding for array in (*arguments, *results)]
    meshes = list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))
    devices = _devices(shardings)
    chip = chip or find_chip(devices[0].device_kind)
    inputs = [(a.path, str(a.dtype)) for a in arguments if a.sharding is not None]
    outputs = _output_paths([array.path for array in results], inputs, module)
    collectives, all_gathers = _read_collectives(module, [d.id for d in devices], len(inputs))
    weights = find_weights(module, inputs, outputs)
    payloads = find_payloads(module, collectives, weights, inputs, outputs)
    sharded_by = find_sharded_by(
        (array.names, array.sharding)
        for array in (*arguments, *results)
        if array.names is not None and isinstance(array.sharding, NamedSharding)
    )
    return Facts(
        stages=stages,
        compiled=compiled,
        module=module,
        memory=read_memory(compiled, _memory_capacity(compiled, chip, devices[0])),
        chip=chip,
        devices=devices,
        meshes=meshes,
        arguments=arguments,
        results=results,
        argument_rows=[array_row(array, meshes) for array in arguments],
        result_rows=[array_row(array, meshes) for array in results],
        collectives=collectives,
        rows=[
            _collective_row(collective, payload, meshes, sharded_by)
            for collective, payload in zip(collectives, payloads, strict=True)
        ],
        all_gathers=all_gathers,
        weights=weights,
        products=product_rows(module),
        replicated_above=replicated_above,
    )


def _make_report(facts: Facts, intermediates: bool) -> Report:
    module, chip = facts.module, facts.chip
    intermediate_rows = None
    if intermediates:
        intermediate_rows = tuple(find_intermediates(facts.stages.lower(), facts.meshes))
    meshes = tuple(
        tuple(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
        for mesh in facts.meshes
        if not is_canonical_mesh(mesh)
    )
    bounds = NO_BOUNDS
    if chip is not None:
        pairs = zip(facts.collectives, facts.rows, strict=True)
        with_axes = [(collective, row.along) for collective, row in pairs]
        bounds = find_bounds(chip, facts.devices, module, facts.products, with_axes)
    return Report(
        name=facts.stages.name or module.name or 'the program',
        n_devices=facts.n_devices,
        device_kind=facts.devices[0].device_kind,
        mesh=meshes[0] if meshes else (),
        arguments=tuple(facts.argument_rows),
        results=tuple(facts.result_rows),
        collectives=with_causes(facts),
        memory=facts.memory,
        flops=sum(row.flops for row in facts.products) or None,
        products=tuple(facts.products),
        in_place=results_in_place(facts.argument_rows, facts.result_rows, module),
        findings=find_findings(facts),
        notes=find_notes(facts),
        intermediates=intermediate_rows,
        temporaries=largest_temporaries(module),
        chip=chip.name if chip else None,
        bounds=bounds,
        meshes=meshes,
    )


def _memory_capacity(
    compiled: Compiled | Oversized, chip: Chip | None, device: Device
) -> int | None:
    if isinstance(compiled, Oversized):
        return compiled.available
    return int(chip.memory * chip.share(device)) if chip else None


def _read_collectives(
    module: Module, device_ids: Sequence[int], n_inputs: int
) -> tuple[Sequence[Collective], dict[str, AllGather]]:
    """Returns all collectives, and an `AllGather` for each all-gather of one array, by name.

    Parameters numbered `n_inputs` and up are Refs that the function closes over. They have no
    path, so their all-gathers get `parameter=None`.
    """
    collectives = find_collectives(module, device_ids)
    if all(collective.kind != 'all-gather' for collective in collectives):
        return collectives, {}
    all_gathers = {gather.name: gather for gather in find_all_gathers(module, len(device_ids))}
    for name, gather in all_gathers.items():
        if gather.parameter is not None and gather.parameter >= n_inputs:
            all_gathers[name] = replace(gather, parameter=None)
    return collectives, all_gathers


def _devices(shardings: Sequence[Sharding | None]) -> list[Device]:
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return list(sharding.mesh.devices.flat)  # type: ignore[reportOptionalMemberAccess]
        if sharding is not None:
            return sorted(sharding.device_set, key=position)
    return jax.devices()[:1]


def _output_paths(
    results: Sequence[str], inputs: Sequence[tuple[str, str]], module: Module
) -> Mapping[int, str]:
    """Returns the path of each output, by number.

    An output after the results is the final value of a `jax.Ref`, and has the path of the Ref.
    """
    paths = dict(enumerate(results))
    for output, parameter in module.aliases.items():
        if output not in paths and parameter < len(inputs):
            paths[output] = inputs[parameter][0]
    return paths


def _collective_row(
    collective: Collective, payload: Payload, meshes: Sequence[AnyMesh], sharded_by: ShardedBy
) -> CollectiveRow:
    return CollectiveRow(
        kind=collective.kind,
        arrays=collective.shape_text,
        bytes=collective.bytes,
        group_size=collective.group_size,
        groups=collective.n_groups,
        along=along_text(collective.groups, collective.pairs, meshes, sharded_by),
        executions=collective.executions,
        network_bytes=collective.network_bytes,
        is_async=collective.is_async,
        source=collective.source,
        of=payload.of,
        op_name=collective.op_name,
        role=payload.role,
        is_backward=payload.is_backward,
        axes=payload.axes,
        widened=collective.widened,
        called_at=collective.called_at,
        in_branch=collective.in_branch,
    )
