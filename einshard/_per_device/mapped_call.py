"""Calls `jax.shard_map` with the specs of a per-device function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from .._errors import EinshardError
from .._functions.error_notes import SpecLeaf
from .._functions.parameters import CallSignature
from .._notation.layout import axis_positions, mesh_text
from .._sharding.leaf_spec import LeafSpec
from .._sharding.mesh import sizes_of, spec_axes
from .._text import array_text
from .._trees.partition import join, partition_modules, with_static_nodes
from .._trees.paths import leaves_with_paths, path_text
from .._trees.specs import is_array, leaf_specs
from .device_specs import REPLICATED, DeviceSpecs
from .jax_errors import explain_different_sizes, explain_unknown_axis, explain_varying_result
from .resolver import Resolver


def call_shard_map(
    function: Callable[..., Any],
    specs: DeviceSpecs,
    check_vma: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a function on the shards of global arrays, on the mesh of the current call."""
    if len(args) > len(specs.parameters.names) and specs.parameters.var_positional is None:
        return function(*args, **kwargs)  # raises Python's TypeError
    resolver = specs.resolver()

    # 1. Only arguments with arrays go through `jax.shard_map`. It does not look for tracers,
    # because under `jax.disable_jit` there are none.
    labels = specs.parameters.value_labels(CallSignature(len(args), tuple(kwargs)))
    values = [
        value if label in specs.static else partition_modules(value, label)
        for label, value in zip(labels, (*args, *kwargs.values()), strict=True)
    ]
    dynamic = [
        i
        for i, value in enumerate(values)
        if labels[i] not in specs.static and any(map(is_array, jtu.tree_leaves(value)))
    ]
    arguments = {labels[i]: values[i] for i in dynamic}

    def body(*dynamic_shards: Any) -> Any:
        shards = list(values)
        for i, shard in zip(dynamic, dynamic_shards, strict=True):
            shards[i] = shard
        n, shards = len(args), join(shards)
        result = function(*shards[:n], **dict(zip(kwargs, shards[n:], strict=True)))
        result = partition_modules(result, 'result')
        _result_leaves(specs, resolver, result)  # raises clearer errors than JAX
        return result

    def body_without_scalars(*dynamic_shards: Any) -> Any:
        # the spec of a scalar could not name the mesh axes of size 1
        return jtu.tree_map(jnp.atleast_1d, body(*dynamic_shards))

    # 2. Specs of arguments follow from their ranks. Those of results may need theirs, and then the
    # body is traced once more.
    for each in (body, body_without_scalars):
        each.__name__ = each.__qualname__ = specs.name
    in_specs = tuple(_argument_specs(specs, resolver, *pair) for pair in arguments.items())
    shard_map: Callable[..., Any] = functools.partial(
        jax.shard_map, mesh=resolver.mesh, axis_names=specs.manual, in_specs=in_specs
    )
    mapped, arrays = functools.partial(shard_map, body), [*arguments.values()]
    try:
        if resolver.size_one_axes or any(map(resolver.needs_rank, jtu.tree_leaves(specs.out))):
            # traces the body for the ranks of its results; any out_specs give the same ranks
            shapes = jax.eval_shape(mapped(out_specs=PartitionSpec(), check_vma=False), *arrays)
            leaves = _result_leaves(specs, resolver, shapes)
            found = [resolver.result_spec(spec, ndim) for spec, ndim in leaves]
            out_specs = jtu.tree_unflatten(jtu.tree_structure(shapes), found)
        else:
            shapes = None
            out_specs = jtu.tree_map(lambda spec: resolver.partition_spec(spec, None), specs.out)
        if not resolver.size_one_axes:
            return join(mapped(out_specs=out_specs, check_vma=check_vma)(*arrays))
        mapped = functools.partial(shard_map, body_without_scalars)
        results = mapped(out_specs=out_specs, check_vma=check_vma)(*arrays)
        return join(jtu.tree_map(lambda y, x: y if x.ndim else y[0], results, shapes))

    # 3. JAX's errors about axes are told in terms of the expressions.
    except EinshardError:
        raise
    except (NameError, AssertionError, KeyError, ValueError, TypeError) as error:
        varying = explain_varying_result(specs.name, error)
        if varying is not None:
            raise varying from None
        shards = _shards(specs, resolver, arguments, in_specs)
        different = explain_different_sizes(specs.name, error, shards)
        if different is not None:
            raise different from error
        if isinstance(error, TypeError):  # JAX never raises it for an unknown axis
            raise
        unknown = explain_unknown_axis(specs.name, resolver, mapped, arrays)
        if unknown is not None:
            raise unknown from None
        raise


def _argument_specs(specs: DeviceSpecs, resolver: Resolver, label: str, value: Any) -> Any:
    """Returns the PartitionSpecs of an argument. Raises if an array of it cannot have one."""
    leaves, treedef = jtu.tree_flatten(value)
    found: list[PartitionSpec] = []
    written = leaf_specs(with_static_nodes(value), leaves, specs.spec_for(label))
    mesh_axes = sizes_of(resolver.mesh)
    for spec, leaf in zip(written, leaves, strict=True):
        if isinstance(spec, LeafSpec):
            found.append(resolver.partition_spec(spec, np.ndim(leaf)))
        elif resolver.is_explicit:
            found.append(resolver.spec_of_type(leaf))
        else:
            raise _no_spec_error(f"parameter '{label}' of {specs.name}", leaf)
        axes = {axis for entry in spec_axes(jax.typeof(leaf).sharding.spec) for axis in entry}
        for axis in sorted(axes - {*mesh_axes}):
            raise EinshardError(
                f"parameter '{label}' is sharded over Explicit mesh axis '{axis}', but the mesh "
                'of per_device has no such axis',
                code='mesh',
                facts={
                    'function': specs.name,
                    'array': array_text(leaf),
                    'mesh': mesh_text(mesh_axes),
                    'try': f'per_device(..., mesh={label}.sharding.mesh)',
                },
            )
    return jtu.tree_unflatten(treedef, found)


def _result_leaves(
    specs: DeviceSpecs, resolver: Resolver, result: Any
) -> list[tuple[LeafSpec, int]]:
    """Returns the spec and rank of each array. Raises if an array does not fit."""
    leaves = jtu.tree_leaves(result)
    try:
        written = leaf_specs(with_static_nodes(result), leaves, specs.out)
    except EinshardError as error:
        raise error.about(spec_of=f'the result of {specs.name}') from None
    found: list[tuple[LeafSpec, int]] = []
    for spec, (path, leaf) in zip(written, leaves_with_paths(result), strict=True):
        suffix = f" '{path_text(path)}'" if path else ''
        owner = f'result{suffix} of {specs.name}'
        if not isinstance(spec, LeafSpec):
            raise _no_spec_error(owner if path else f'the {owner}', leaf)
        try:
            axis_positions(resolver.expression(spec), np.ndim(leaf))
        except EinshardError as error:
            raise error.about(array=f'{array_text(leaf)} per device, {owner}') from None
        found.append((spec, np.ndim(leaf)))
    return found


def _no_spec_error(owner: str, leaf: Any) -> EinshardError:
    return EinshardError(
        f'{owner} has no spec',
        code='spec',
        facts={'array': array_text(leaf), 'try': f"'{REPLICATED}' as its spec, to replicate it"},
    )


def _shards(
    specs: DeviceSpecs, resolver: Resolver, arguments: Mapping[str, Any], in_specs: Sequence[Any]
) -> Iterator[SpecLeaf]:
    """Yields the leaves of the arguments, with the shapes that the body sees."""
    for (label, argument), partition_specs in zip(arguments.items(), in_specs, strict=True):
        leaves = leaves_with_paths(argument)
        tree = with_static_nodes(argument)
        written = leaf_specs(tree, [leaf for _, leaf in leaves], specs.spec_for(label))
        rows = zip(leaves, written, jtu.tree_leaves(partition_specs), strict=True)
        for (path, leaf), spec, partition_spec in rows:
            shape = resolver.shard_shape(leaf.shape, partition_spec)
            expression = resolver.expression(spec) if isinstance(spec, LeafSpec) else None
            name = '/'.join(filter(None, [label, path_text(path)]))
            yield SpecLeaf(name, jax.ShapeDtypeStruct(shape, leaf.dtype), expression)
