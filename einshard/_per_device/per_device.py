"""per_device: `jax.shard_map` with specs in einshard's notation.

At decoration, the specs are read (`device_specs.py`). At a call, their expressions give a mesh
(`joint_mesh.py`) and PartitionSpecs on it (`resolver.py`), for `jax.shard_map` (`mapped_call.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import public
from .._functions.parameters import JIT_OPTIONS, copied, with_copied_options
from .._functions.promise import Promise
from .._functions.setup import Options
from .._functions.sharded import check_traceable, no_function_error
from .._functions.sharded import decorate as decorate_sharded
from .._functions.sharded_function import ShardedFunction
from .._sharding.axis_rules import check_flag
from .._sharding.mesh import MeshLike
from .._trees.specs import Spec, is_none, mesh_of
from .device_specs import DeviceSpecs, expression_of
from .mapped_call import call_shard_map

P = ParamSpec('P')
R = TypeVar('R')


@public
def per_device(
    *in_specs: Spec,
    out: Spec,
    mesh: MeshLike | None = None,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
    reshard: bool = False,
    collectives: Promise | None = None,
    check_processes: bool = True,
    **named_specs_and_jit_options: Any,
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]:
    """`jax.shard_map` in einshard's notation: each device runs the function on its own shards.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import per_device
        >>> @per_device('b x*', 'x* y', out='b y -> * b y')
        ... def product(x, w):  # shards of x and w
        ...     return jax.lax.psum(x @ w, 'x')
        >>> n = jax.device_count()
        >>> y = product(np.ones((8, 3 * n)), np.ones((3 * n, 5)))
        >>> y.shape, bool((y == 3 * n).all())
        ((8, 5), True)

    Each sharded axis of the expressions becomes a mesh axis of the same name, for collectives such
    as `jax.lax.psum(z, 'x')`. An expression lists its sharded axes in device order. Its array is
    replicated over the other mesh axes. A count in one expression applies to all of them.
    `'y@x'` shards y over the devices of x, as after `psum_scatter` over 'x'. If a mesh is in
    context or passed as `mesh=`, collectives use the axis names of that mesh instead.

    Arguments are placed and checked as for `sharded`.

    Args:
        in_specs: specs by position: expressions, PartitionSpecs, NamedShardings, or pytree prefixes
            of these. '...' replicates an argument. Every argument that is not static needs a spec.
            Exception: if all manual mesh axes are explicit, None as a spec, or no specs at all,
            shards arguments as their types say. The `self` of a method is replicated.
        out: the spec of the result, or a pytree prefix of specs.
        mesh: a mesh or a sequence of devices. Default: the mesh of the NamedShardings among the
            specs, or else the mesh in context, or else all devices.
        axis_names: the mesh axes that are manual, as in `jax.shard_map`. Along the other axes the
            function sees global arrays, sharded by `einshard` or the compiler. Default: all axes.
        check_vma: whether JAX checks that results are replicated where `out` says so. JAX infers
            this for `psum`, but for `all_gather` only with `to='invarying'`.
        reshard: whether to reshard arguments that are sharded differently.
        collectives: the collectives that the compiled program may have, as for `sharded`.
        check_processes: as for `sharded`.
        named_specs_and_jit_options: specs by parameter name, and options of `jax.jit`.

    Returns:
        A decorator that turns the function into a `ShardedFunction` of global arrays.

    Raises:
        EinshardError: at decoration, for invalid specs; at the first call, if the expressions
            disagree on a count or on the device order, or do not use all devices; at any call, if
            an array does not fit, a collective uses an axis that no expression shards, or the call
            is inside a per-device function in which all mesh axes are manual.
        UnexpectedCollectives: at a call, if the program has collectives that are not allowed.
    """
    check_flag('reshard', reshard)
    check_flag('check_processes', check_processes)
    named = with_copied_options(named_specs_and_jit_options)
    mesh, axis_names = copied(mesh), copied(axis_names)
    spec_mesh = mesh_of([in_specs, out, named])
    mesh = spec_mesh if mesh is None else mesh
    in_specs, out, named = jtu.tree_map(  # PartitionSpecs and NamedShardings to expressions
        lambda x: expression_of(x) if isinstance(x, NamedSharding | PartitionSpec) else x,
        (in_specs, out, named),
        is_leaf=is_none,
    )

    @public
    def decorate(*functions: Any, **unexpected: Any) -> Any:
        function = functions[0] if len(functions) == 1 and not unexpected else None
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        if not callable(function):
            arguments = [*functions, *unexpected.values()]
            raise no_function_error('per_device', arguments, in_specs)
        check_traceable(function)
        jit_options = {name: value for name, value in named.items() if name in JIT_OPTIONS}
        own = {name: spec for name, spec in named.items() if name not in JIT_OPTIONS}
        specs = DeviceSpecs(function, in_specs, own, out, mesh, spec_mesh, axis_names, jit_options)

        @functools.wraps(function)
        def on_global_arrays(*args: Any, **kwargs: Any) -> Any:
            return call_shard_map(function, specs, check_vma, args, kwargs)

        on_global_arrays.__name__ = specs.name
        own |= specs.optional()
        return decorate_sharded(
            on_global_arrays,
            [*map(specs.resolved_at_call, in_specs)],
            specs.resolved_at_call(out),
            jit_options | {name: specs.resolved_at_call(spec) for name, spec in own.items()},
            Options(
                spec_mesh or mesh,
                reshard,
                collectives=collectives,
                check_processes=check_processes,
                keeps_mapped_axes=bool(specs.manual),
                is_per_device=True,
            ),
        )

    return decorate
