"""A function -> its compiled program -> a report."""

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

from .._describe import describe, describe_named
from .._expression import ELLIPSIS, axis_letters, parse
from .._hlo.collectives import Collective, read_collectives
from .._hlo.ends import read_ends
from .._hlo.movements import Gathering, read_gatherings
from .._mesh import MeshLike, entry_axes, is_device_mesh
from .._promises import program_text
from .._specs import LeafSpec, as_lenient, path_text
from .along import Cuts, along, mesh_axes_of
from .cautions import gathered_again, moved_whole, promise_broken, replicated
from .constraints import idle_constraints
from .intermediates import find_intermediates
from .lowered import Stages, lower
from .report import Report
from .rows import ArrayRow, Caution, CollectiveRow, Collectives, Memory


def explain(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    replicated_above: int = 2**20,
    intermediates: bool = False,
    **kwargs: Any,
) -> Report:
    """What the compiler made of a function: placements, collectives, memory, likely mistakes.

        >>> @sharded('x y -> x* y', 'y z -> y z*', mesh=jax.devices()[:8])
        ... def product(x, w):
        ...     return x @ w
        >>> shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((64, 32), (32, 8))]
        >>> report = explain(product, *shapes)
        >>> report.collectives.counts
        {'all-gather': 1}
        >>> [(row.path, row.placement) for row in report.arguments]
        [('x', 'x y -> x8 y'), ('w', 'y z -> y z8')]

    It costs one compilation, which a later call of the function does not repeat.

    Args:
        fn: a `sharded` or jitted function, any other function (it is jitted), or what its
            `lower(...)` gives, compiled or not.
        args, kwargs: what it is called with; arrays, or a `ShapeDtypeStruct` for one. None for a
            program that is lowered already. By position for a parameter called as one below.
        mesh: the mesh to compile for, of a `sharded` function without a mesh of its own; also one
            that is not here, as `topology` makes. Of arguments only shapes are looked at then.
        replicated_above: arguments and results of more bytes than this that every device holds
            whole are warned of.
        intermediates: whether to report where the values in between are, too, which takes another
            compilation.

    Returns:
        A `Report`, which `print`, the prompt, rich and notebooks show.

    Raises:
        EinshardError: the arguments do not fit the function, it does not compile, or the compiler
            does not show the program.
    """
    stages = lower(fn, args, kwargs, mesh)
    compiled = stages.compile()
    text = program_text(stages.name or 'the program', compiled)
    arguments = _arguments(stages, compiled, text)
    results = _results(stages, compiled)
    shardings = [array.sharding for array in (*arguments, *results)]
    meshes = list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))
    devices = _devices(shardings)
    cuts = _cuts([*arguments, *results])
    collectives, gatherings = _read_communication(text, [device.id for device in devices])
    in_rows, out_rows = ([_array_row(array) for array in part] for part in (arguments, results))
    used = [array for array in arguments if array.sharding is not None]
    inputs = [(array.path, array.shape, array.names) for array in used]
    ends = read_ends(text, [one.name for one in collectives]) if collectives else {}
    flops = (compiled.cost_analysis() or {}).get('flops', 0)
    return Report(
        name=stages.name or _module_name(text),
        n_devices=len(devices),
        device_kind=devices[0].device_kind,
        mesh=_mesh_axes(meshes),
        arguments=tuple(in_rows),
        results=tuple(out_rows),
        collectives=Collectives(
            _collective_row(
                one, _of(gatherings.get(one.name), ends[one.name], inputs, out_rows), meshes, cuts
            )
            for one in collectives
        ),
        memory=_memory(compiled),
        flops=flops if flops > 0 else None,
        warnings=tuple(
            itertools.chain(
                promise_broken(stages.promise, collectives),
                replicated([*in_rows, *out_rows], len(devices), replicated_above),
                moved_whole(gatherings, collectives, meshes, inputs),
                gathered_again(gatherings, collectives, inputs),
                _of_constraints(stages, arguments),
            )
        ),
        intermediates=tuple(find_intermediates(stages.lower(), meshes)) if intermediates else None,
    )


@dataclass(frozen=True)
class _Array:
    """An argument or a result; its axes have names where its spec gives them."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None  # None: the program does not use it
    names: tuple[str, ...] | None


def _read_communication(
    text: str, device_ids: Sequence[int]
) -> tuple[Sequence[Collective], dict[str, Gathering]]:
    """The collectives of a program, and by their names what its all-gathers gather."""
    collectives = read_collectives(text, device_ids)
    if all(one.kind != 'all-gather' for one in collectives):
        return collectives, {}
    gatherings = {one.name: one for one in read_gatherings(text, len(device_ids))}
    # the compiler's own all-gathers have no line: what caused them is who reads their result
    sources = {name: one.source for name, one in gatherings.items()}
    return [
        replace(one, source=sources.get(one.name)) if one.source is None else one
        for one in collectives
    ], gatherings


def _of_constraints(stages: Stages, arguments: Sequence[_Array]) -> Iterator[Caution]:
    if stages.traced is not None:
        shardings = {i: array.sharding for i, array in enumerate(arguments)}
        yield from idle_constraints(stages.traced.jaxpr, shardings)


def _arguments(stages: Stages, compiled: Compiled, text: str) -> list[_Array]:
    leaves = jtu.tree_leaves_with_path(compiled.args_info)
    shardings = jtu.tree_structure(compiled.args_info).flatten_up_to(compiled.input_shardings)
    specs = stages.argument_specs() or [None] * len(leaves)
    labels = stages.labels or _labels([path for path, _ in leaves], shardings, text)
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


def _results(stages: Stages, compiled: Compiled) -> list[_Array]:
    leaves = jtu.tree_leaves_with_path(compiled.out_info)
    shardings = jtu.tree_structure(compiled.out_info).flatten_up_to(compiled.output_shardings)
    specs = stages.result_specs(compiled.out_info) or [None] * len(leaves)
    return [
        _Array(
            '/'.join(filter(None, ('result', path_text(path)))),
            tuple(leaf.shape),
            leaf.dtype,
            sharding,
            _names(spec, len(leaf.shape)),
        )
        for (path, leaf), sharding, spec in zip(leaves, shardings, specs, strict=True)
    ]


def _label(path: Sequence[Any], labels: Mapping[Any, str]) -> str:
    """What an argument is called: by its parameter, or by where it stands."""
    by_keyword = path[0].idx == 1
    if by_keyword:
        return str(path[1].key)
    return labels.get(path[1].idx, f'args[{path[1].idx}]')


_PARAMETER = re.compile(r' parameter\((\d+)\).*?op_name="([^"\[.]*)')


def _labels(
    paths: Sequence[Sequence[Any]], shardings: Sequence[Sharding | None], text: str
) -> dict[int, str]:
    """Parameters by position, from the names that the program has for its inputs.

    It has none for arguments that it does not use.
    """
    entry = text[text.rfind('\nENTRY ') :]
    names = {int(number): name for number, name in _PARAMETER.findall(entry)}
    used = [path for path, s in zip(paths, shardings, strict=True) if s is not None]
    labels = {path[1].idx: names.get(i, '') for i, path in enumerate(used) if path[0].idx == 0}
    known = [label for label in labels.values() if label]
    # those of *args are all called args
    return {i: label for i, label in labels.items() if label and known.count(label) == 1}


def _names(spec: LeafSpec | None, n_dims: int) -> tuple[str, ...] | None:
    """The names of an array's axes; those behind '...' are letters that are free."""
    if spec is None:
        return None
    names = parse(as_lenient(spec).expression).names
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
    return ArrayRow(
        path=array.path,
        shape=shape,
        dtype=str(array.dtype),
        placement=_placement(array),
        bytes=0 if sharding is None else math.prod(held) * array.dtype.itemsize,
        sharded=held != shape,
    )


def _placement(array: _Array) -> str:
    if array.sharding is None:
        return 'not used'
    if isinstance(array.sharding, NamedSharding):
        return describe_named(array.sharding, len(array.shape), array.names)
    return describe(array.sharding)


def _devices(shardings: Sequence[Sharding | None]) -> list[Any]:
    """The devices that run the program; one if it takes and gives nothing."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return list(sharding.mesh.devices.flat)  # type: ignore[reportOptionalMemberAccess]
        if sharding is not None:
            return list(sharding.device_set)
    return jax.devices()[:1]


def _cuts(arrays: Sequence[_Array]) -> dict[str, list[tuple[str, ...]]]:
    """The mesh axes that cut the axes which the user has names for."""
    cuts: dict[str, list[tuple[str, ...]]] = {}
    for array in arrays:
        if array.names is None or not isinstance(array.sharding, NamedSharding):
            continue
        for name, entry in zip(array.names, array.sharding.spec, strict=False):
            axes = entry_axes(entry)
            if axes and axes not in cuts.setdefault(name, []):
                cuts[name].append(axes)
    return cuts


def _of(
    gathering: Gathering | None,
    ends: Sequence[int],
    inputs: Sequence[tuple[str, Any, Any]],
    results: Sequence[ArrayRow],
) -> tuple[str, ...]:
    """The argument that a collective gathers, or the results that it becomes."""
    if gathering is not None and gathering.parameter is not None:
        return (inputs[gathering.parameter][0],)
    return tuple(results[i].path for i in ends)


def _collective_row(
    one: Collective, of: tuple[str, ...], meshes: Sequence[Any], cuts: Cuts
) -> CollectiveRow:
    words = ''
    for mesh in meshes:
        axes = mesh_axes_of(one.groups, mesh)
        if axes is not None:
            words = along(axes, mesh, cuts)
            break
    return CollectiveRow(
        kind=one.kind,
        arrays=one.shape_text,
        bytes=one.bytes,
        parties=one.parties,
        groups=one.n_groups,
        along=words,
        times=one.times,
        network_bytes=one.network_bytes,
        is_async=one.is_async,
        source=one.source,
        of=of,
        op_name=one.op_name,
    )


def _mesh_axes(meshes: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh of the user's; those of the one mesh, d0, d1, .., say nothing."""
    for mesh in meshes:
        if not is_device_mesh(mesh):
            return tuple(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
    return ()


def _memory(compiled: Compiled) -> Memory | None:
    figures = compiled.memory_analysis()
    if figures is None:
        return None
    peak = getattr(figures, 'peak_memory_in_bytes', 0)
    return Memory(
        arguments=figures.argument_size_in_bytes,
        results=figures.output_size_in_bytes,
        temporaries=figures.temp_size_in_bytes,
        code=figures.generated_code_size_in_bytes,
        aliased=figures.alias_size_in_bytes,
        peak=peak if peak > 0 else None,
    )


def _module_name(text: str) -> str:
    found = re.match(r'HloModule (?:jit_)?([^\s,]+)', text)
    return found[1] if found else 'the program'
