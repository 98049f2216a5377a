"""explain: compiles a function and reports on the program."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, Sharding
from jax.stages import Compiled

from .._functions.promise import program_text
from .._hlo.all_gathers import AllGather, find_all_gathers
from .._hlo.buffers import largest_temporaries
from .._hlo.collectives import Collective, find_collectives
from .._hlo.hardware import Chip, as_chip, find_chip
from .._hlo.memory import read_memory
from .._hlo.module import Module
from .._notation.expression import ELLIPSIS, axis_letters
from .._sharding.describe import Description, describe, describe_named
from .._sharding.leaf_spec import AnySpec, as_leaf_spec
from .._sharding.mesh import AnyMesh, MeshLike, is_device_mesh, spec_axes
from .._trees.paths import path_text
from .bounds import NO_BOUNDS, find_bounds
from .carried import Carried, find_carried, find_weights, results_in_place
from .collective_axes import ShardedBy, along, mesh_axes_of
from .diagnosis import (
    fully_rematerialized,
    gathered_again,
    idle_constraints,
    promise_broken,
    replicated,
)
from .intermediates import find_intermediates
from .lowered import Stages, compiled_shardings, lower
from .memory import does_not_fit
from .oversized import Oversized, compile_stages, given_mesh
from .report import Report
from .report_rows import ArrayRow, Caution, CollectiveRow, Collectives
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

    It compiles the function once; later calls reuse the compiled program.

    Args:
        fn: a `sharded` or jitted function, any other function (it is jitted), or the result of its
            `lower(...)`, compiled or not.
        args, kwargs: arguments of the call: arrays, or `jax.ShapeDtypeStruct` in place of arrays.
            None for a lowered program. Pass arguments by position if their names clash with those
            below.
        mesh: the mesh to compile for, if a `sharded` function has none; `topology` makes one of
            devices you don't have. Then only shapes and dtypes of the arguments matter.
        replicated_above: warn about replicated arguments and results of more than this many bytes.
        intermediates: whether to list the placements of intermediate values; this compiles again.
        chip: the chip for the lower bounds on time: a `Chip`, or a name such as 'H100'. Default:
            the chip of the devices; there are no bounds for CPUs.

    Returns:
        A `Report` for print, the prompt, rich and notebooks.

    Raises:
        EinshardError: the arguments do not fit the function; it does not compile; or the compiler
            does not expose the program. A program that is too large for a TPU gets a report.
    """
    given = None if chip is None else as_chip(chip)
    stages = lower(fn, args, kwargs, mesh)
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
    arguments = _arguments(stages, compiled, held, module)
    results = _results(stages, results_info)
    shardings = [array.sharding for array in (*arguments, *results)]
    meshes = list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))
    devices = _devices(shardings)
    sharded_by = _sharded_by([*arguments, *results])
    in_rows, out_rows = ([_array_row(array) for array in part] for part in (arguments, results))
    used = [array for array in arguments if array.sharding is not None]
    inputs = [(array.path, array.shape, array.names) for array in used]
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
    return Report(
        name=stages.name or module.name or 'the program',
        n_devices=len(devices),
        device_kind=devices[0].device_kind,
        mesh=_mesh_axes(meshes),
        arguments=tuple(in_rows),
        results=tuple(out_rows),
        collectives=rows,
        memory=memory,
        flops=sum(row.flops for row in products) or None,
        products=products,
        in_place=results_in_place(in_rows, out_rows, module),
        warnings=tuple(
            itertools.chain(
                does_not_fit(compiled, memory, devices[0].platform),
                promise_broken(stages.promise, collectives, memory),
                replicated([*in_rows, *out_rows], len(devices), replicated_above),
                fully_rematerialized(all_gathers, collectives, meshes, inputs),
                gathered_again(all_gathers, collectives, inputs),
                _of_constraints(stages, arguments),
            )
        ),
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


@dataclass(frozen=True)
class _Array:
    """An argument or result; `names` has the axis names of its spec, if it has one."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None  # None: unused
    names: tuple[str, ...] | None


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


def _of_constraints(stages: Stages, arguments: Sequence[_Array]) -> Iterator[Caution]:
    if stages.traced is not None:
        shardings = {i: array.sharding for i, array in enumerate(arguments)}
        yield from idle_constraints(stages.traced.jaxpr, shardings)


def _arguments(
    stages: Stages,
    compiled: Compiled | Oversized,
    shardings: Sequence[Sharding | None],
    module: Module,
) -> list[_Array]:
    leaves = jtu.tree_leaves_with_path(compiled.args_info)
    specs = stages.argument_specs() or [None] * len(leaves)
    labels = stages.labels or _labels([path for path, _ in leaves], shardings, module)
    labels = _signature_labels(labels, len(compiled.args_info[0]), stages.parameters)
    return [
        _Array(
            '/'.join(filter(None, (_label(path, labels), path_text(path[2:])))),
            tuple(leaf.shape),
            leaf.dtype,
            sharding,
            _names(spec, len(leaf.shape)),
        )
        for (path, leaf), sharding, spec in zip(leaves, shardings, specs, strict=True)
    ]


def _results(stages: Stages, results: Any) -> list[_Array]:
    leaves = jtu.tree_leaves_with_path(results)
    specs = stages.result_specs(results) or [None] * len(leaves)
    return [
        _Array(
            '/'.join(filter(None, ('result', path_text(path)))),
            tuple(leaf.shape),
            leaf.dtype,
            leaf.sharding,
            _names(spec, len(leaf.shape)),
        )
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    ]


def _label(path: Sequence[Any], labels: Mapping[Any, str]) -> str:
    """Labels an argument by its parameter name, or as args[i]."""
    by_keyword = path[0].idx == 1
    if by_keyword:
        return str(path[1].key)
    return labels.get(path[1].idx, f'args[{path[1].idx}]')


def _labels(
    paths: Sequence[Sequence[Any]], shardings: Sequence[Sharding | None], module: Module
) -> dict[int, str]:
    """Finds parameter names by position, from the input names in the program.

    Unused arguments have no name there.
    """
    parameters = module.entry.parameters()
    names = {int(made.given): re.split(r'[\[.]', made.op_name)[0] for made in parameters}
    used = [path for path, s in zip(paths, shardings, strict=True) if s is not None]
    labels = {path[1].idx: names.get(i, '') for i, path in enumerate(used) if path[0].idx == 0}
    known = [label for label in labels.values() if label]
    # all values of *args have the name 'args'
    return {i: label for i, label in labels.items() if label and known.count(label) == 1}


def _signature_labels(
    labels: Mapping[int, str], n_positions: int, parameters: Sequence[str]
) -> Mapping[int, str]:
    """Takes names from the signature if JAX has Arg_0, .., as it does with a `jax.Ref`."""
    if not any(label.startswith('Arg_') for label in labels.values()):
        return labels
    known = parameters if len(parameters) == n_positions else ()  # not so with static ones
    return dict(enumerate(known))


def _names(spec: AnySpec | None, n_dims: int) -> tuple[str, ...] | None:
    """Names the axes of an array; axes of '...' get unused letters."""
    if spec is None:
        return None
    names = as_leaf_spec(spec).expression.names
    if ELLIPSIS not in names:
        return names
    if len(names) == 1:
        return None
    at = names.index(ELLIPSIS)
    free = (letter for letter in axis_letters() if letter not in names)
    between = itertools.islice(free, n_dims - len(names) + 1)
    return (*names[:at], *between, *names[at + 1 :])


def _array_row(array: _Array) -> ArrayRow:
    sharding, shape = array.sharding, array.shape
    held = shape if sharding is None else sharding.shard_shape(shape)
    is_term = isinstance(sharding, NamedSharding) and bool(sharding.spec.unreduced)
    return ArrayRow(
        path=array.path,
        shape=shape,
        dtype=str(array.dtype),
        placement=_placement(array),
        bytes=0 if sharding is None else math.prod(held) * array.dtype.itemsize,
        sharded=is_term or held != shape,
    )


def _placement(array: _Array) -> str:
    if array.sharding is None:
        return Description('not used')
    if isinstance(array.sharding, NamedSharding):
        return describe_named(array.sharding, len(array.shape), array.names)
    return describe(array.sharding)


def _devices(shardings: Sequence[Sharding | None]) -> list[Any]:
    """Returns the devices that run the program; one if it has no inputs and outputs."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return list(sharding.mesh.devices.flat)  # type: ignore[reportOptionalMemberAccess]
        if sharding is not None:
            return list(sharding.device_set)
    return jax.devices()[:1]


def _sharded_by(arrays: Sequence[_Array]) -> dict[str, list[tuple[str, ...]]]:
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
    words = ''
    for mesh in meshes if one.groups else ():
        axes = mesh_axes_of(one.groups, mesh)
        if axes is not None:
            words = along(axes, mesh, sharded_by)
            break
    return CollectiveRow(
        kind=one.kind,
        arrays=one.shape_text,
        bytes=one.bytes,
        group_size=one.group_size,
        groups=one.n_groups,
        along=words,
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


def _mesh_axes(meshes: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Returns the axes of a user's mesh; those of the canonical mesh (d0, d1, ..) are omitted."""
    for mesh in meshes:
        if not is_device_mesh(mesh):
            return tuple(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
    return ()
