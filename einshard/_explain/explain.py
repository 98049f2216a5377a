"""explain: compiles a function and reports on the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding
from jax.stages import Compiled

from .._chips.chip import Chip
from .._chips.table import as_chip, find_chip
from .._errors import EinshardError, public
from .._functions.promise import program_text
from .._profile.form import pack, read_form
from .._program.hlo.memory import read_memory
from .._program.hlo.temporaries import largest_temporaries
from .._program.hlo.text import HloModule
from .._program.jaxpr.graph import flatten
from .._sharding.collective_axes import find_sharded_by
from .._sharding.mesh import Device, MeshLike, is_canonical_mesh, position
from .arrays import (
    array_row,
    find_arguments,
    find_names,
    find_results,
    results_in_place,
    with_memory,
)
from .call_checks import suggest_partial
from .collectives import Collectives
from .findings.causes import with_causes
from .findings.facts import Facts
from .findings.find import find_findings
from .frameworks import MARKER
from .intermediates import find_intermediates
from .kernel_costs import read_kernel_costs
from .oversized import Oversized, compile_stages
from .partition import Compiled as Simulated
from .report import Report
from .search.advice import with_advice
from .stages import Stages, compiled_shardings
from .trace_call import trace_to_compile


@public
def explain(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    replicated_above: int = 2**20,
    intermediates: bool = False,
    chip: Chip | str | None = None,
    tries: int = 12,
    seconds: float | None = None,
    costs: Mapping[str, tuple[float, float]] | None = None,
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
            If nothing in the function is sharded either, arguments are replicated over the mesh.
        replicated_above: a size in bytes. `Report.notes` lists larger replicated arguments and
            results.
        intermediates: whether to list the placements of intermediate values.
        chip: a `Chip` or its name, such as 'H100', whose speeds set the lower bounds on time.
            Default: the chip of the devices. Without a chip, as on CPUs, there are no bounds.
        tries: how many changes of the program to compile in search of suggestions, at most. All
            changes of one array or constraint are ranked by the compiler's propagation, which
            compiles nothing, and only those that may be cheaper are compiled: for as many simulated
            CPU devices, in a process of their own. They are compared by the sum of their lower
            bounds: those of the chip, or of TPU v5e on CPUs. What helps is compiled once more for
            the devices of the program, which does not count. With 0, nothing is suggested.
        seconds: the time after which no further change is tried. Default: no limit, so that
            reports do not depend on the speed of the machine.
        costs: what kernels cost, for the estimates of `Report.timeline`: the flops and the bytes of
            HBM of one call on one device, such as `{'flash': (4e9, 2e7)}`. A name is the target of
            a custom call, or a `jax.named_scope`, whose operations then take this time, whatever
            they are compiled to. The backward pass of a scope is 'transpose(flash)'. A
            `cost_estimate` of a Pallas kernel need not be repeated.

    Returns:
        A `Report`, which renders in the REPL, notebooks, rich and print. A program that does not
        fit into the memory of a TPU also gets a report.

    Raises:
        EinshardError: the arguments do not match the function; the function does not compile; the
            backend does not return the HLO of the compiled program; or `mesh` is given for a
            function of `jax.jit`, or one that has its own mesh.
    """
    if isinstance(tries, bool) or not isinstance(tries, int) or tries < 0:
        raise EinshardError(f'tries= must be a non-negative integer, not {tries!r}')
    with suggest_partial(fn, 'chip'):
        chip = None if chip is None else as_chip(chip)
    stages = trace_to_compile(fn, args, kwargs, mesh)
    with suggest_partial(fn, 'costs'):
        return explain_stages(
            stages, chip, replicated_above, intermediates, tries, seconds, costs=costs
        )


def explain_stages(
    stages: Stages,
    chip: Chip | None = None,
    replicated_above: int = 2**20,
    intermediates: bool = False,
    tries: int = 0,
    seconds: float | None = None,
    simulated: Simulated | None = None,
    costs: Mapping[str, tuple[float, float]] | None = None,
    compiled: Any = None,
) -> Report:
    facts = read_facts(stages, chip, replicated_above, simulated, compiled, costs=costs)
    report = _make_report(facts, intermediates)
    return with_advice(report, facts, tries, seconds) if tries else report


def read_facts(
    stages: Stages,
    chip: Chip | None = None,
    replicated_above: int = 2**20,
    simulated: Simulated | None = None,
    compiled: Any = None,
    costs: Mapping[str, tuple[float, float]] | None = None,
) -> Facts:
    """Compiles a program, and reads it.

    Args:
        simulated: what a `Worker` has compiled it to, whose text and memory are read instead.
        compiled: stands in for the compiled program.
        costs: see `explain`.
    """
    compiled = compile_stages(stages) if compiled is None else compiled
    text = simulated.text if simulated else program_text(stages.name or 'the program', compiled)
    program = HloModule(text)
    argument_shardings, result_info = compiled_shardings(compiled)  # type: ignore[reportArgumentType]
    names = find_names(stages, compiled, argument_shardings, program)
    arguments = find_arguments(stages, compiled, argument_shardings, names)
    results = find_results(stages, result_info, names)
    if (jaxpr := stages.jaxpr) is not None:
        arguments = with_memory(arguments, jaxpr.invars)
        results = with_memory(results, jaxpr.outvars)
    shardings = [array.sharding for array in (*arguments, *results)]
    meshes = list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))
    devices = _devices(shardings)
    chip = chip or find_chip(devices[0].device_kind)
    inputs = [(a.path, str(a.dtype)) for a in arguments if a.sharding is not None]
    capacity = _memory_capacity(compiled, chip, devices[0])
    memory = read_memory(compiled, capacity)
    if simulated is not None and simulated.memory is not None:
        memory = replace(simulated.memory, capacity=capacity)
    traced = None
    if stages.jaxpr is not None and len(devices) > 1:
        traced = flatten(stages.jaxpr)
    return Facts(
        program=program,
        memory=memory,
        is_simulated=simulated is not None,
        devices=devices,
        meshes=meshes,
        chip=chip,
        inputs=inputs,
        outputs=_output_paths([a.path for a in results], inputs, program),
        traced=traced,
        sharded_by=find_sharded_by(
            (array.names, array.sharding)
            for array in (*arguments, *results)
            if array.names is not None and isinstance(array.sharding, NamedSharding)
        ),
        stages=stages,
        is_oversized=isinstance(compiled, Oversized),
        arguments=arguments,
        results=results,
        form=None if simulated else program_form(compiled),
        argument_rows=[array_row(array, meshes) for array in arguments],
        result_rows=[array_row(array, meshes) for array in results],
        replicated_above=replicated_above,
        kernels=read_kernel_costs(costs, program, stages.jaxpr),
    )


def program_form(compiled: Any) -> bytes | None:
    """Returns the canonical form of a program, compressed, for `Report.with_profile`.

    It is made at once, at 0.1 us for each byte of the module, because the module itself holds all
    constants, and takes several times the memory of the form.
    """
    executable = getattr(compiled, 'runtime_executable', None)  # `Oversized` has none
    if executable is None:
        return None
    module = executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    return pack(read_form(memoryview(module)))


def _make_report(facts: Facts, intermediates: bool) -> Report:
    program, chip = facts.program, facts.chip
    intermediate_rows = None
    if intermediates:
        intermediate_rows = tuple(find_intermediates(facts))
    meshes = tuple(
        tuple(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
        for mesh in facts.meshes
        if not is_canonical_mesh(mesh)
    )
    findings, notes = find_findings(facts)
    return Report(
        name=facts.stages.name or program.name or 'the program',
        n_devices=facts.n_devices,
        device_kind=facts.devices[0].device_kind,
        mesh=meshes[0] if meshes else (),
        arguments=tuple(facts.argument_rows),
        results=tuple(row for row in facts.result_rows if row.path != MARKER),
        # without the graph, which takes several times the memory of the program's text
        collectives=Collectives(replace(c, nodes=()) for c in with_causes(facts)),
        memory=facts.memory,
        flops=sum(row.flops for row in facts.products) or None,
        products=tuple(facts.products),
        in_place=results_in_place(facts.argument_rows, facts.result_rows, program),
        findings=findings,
        notes=notes,
        intermediates=intermediate_rows,
        temporaries=largest_temporaries(facts.graph),
        chip=chip.name if chip else None,
        bounds=facts.bounds,
        step=facts.step,
        meshes=meshes,
        reading=facts,
    )


def _memory_capacity(
    compiled: Compiled | Oversized, chip: Chip | None, device: Device
) -> int | None:
    if isinstance(compiled, Oversized):
        return compiled.available
    return int(chip.memory * chip.share(device)) if chip else None


def _devices(shardings: Sequence[Sharding | None]) -> list[Device]:
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return list(sharding.mesh.devices.flat)  # type: ignore[reportOptionalMemberAccess]
        if sharding is not None:
            return sorted(sharding.device_set, key=position)
    return jax.devices()[:1]


def _output_paths(
    results: Sequence[str], inputs: Sequence[tuple[str, str]], program: HloModule
) -> Mapping[int, str]:
    """Returns the path of each output, by number.

    An output after the results is the final value of a `jax.Ref`, and has the path of the Ref.
    """
    paths = dict(enumerate(results))
    for output, parameter in program.aliases.items():
        if output not in paths and parameter < len(inputs):
            paths[output] = inputs[parameter][0]
    return paths
