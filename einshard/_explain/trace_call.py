"""Traces, lowers and compiles a function for `explain`, and keeps the names of its arguments."""

from __future__ import annotations

import functools
import os
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered, Traced

from .._errors import EinshardError, hide_frames
from .._functions.bound_method import unwrap_partial
from .._functions.error_notes import note_error, sharding_facts
from .._functions.program import Program
from .._functions.sharded_function import ShardedFunction
from .._program.edits.fixed_function import FixedFunction
from .._program.private_jax import devices_of
from .._sharding.cuda_plugin import start_backend
from .._sharding.mesh import AnyMesh, MeshLike, mesh_fact
from .._sharding.scopes import current_context, mesh_scope
from .._sharding.tracing import LIBRARY_FOLDERS
from .._text import first_line, name_of, short_source
from .call_checks import (
    check_arguments,
    check_devices,
    check_no_refs,
    concrete,
    format_call,
    jit_of_call,
    suggest_partial,
    without_devices,
)
from .frameworks import (
    JITTED,
    Framework,
    can_filter_jit,
    equinox_jaxpr,
    equinox_paths,
    framework_of,
    has_shapes,
    is_filter_jitted,
    is_jitted,
    is_update_of_module,
    jax_stage,
    jitted_by_haliax,
    nnx_jit_of_method,
    positional_parameters,
    restored_if_failed,
    trace_filtered,
    unbound,
)
from .local_devices import local_device, local_devices_asked, remember_asked
from .stages import Stages


def trace_call(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: MeshLike | None
) -> Stages:
    """Traces a function, or wraps a `Traced`, `Lowered` or `Compiled` that the user passed."""
    if (stage := jax_stage(fn)) is not None:
        return _wrap_stage(stage, framework_of(fn), args, kwargs, mesh)
    if not callable(fn):
        raise EinshardError(
            f'{reprlib.repr(fn)} ({type(fn).__name__}) is not a function',
            facts={'expected': 'a function, or a lowered function: f.lower(...)'},
        )
    _hide_our_source_lines()
    start_backend()
    name, called = name_of(fn), fn
    fn, args, kwargs = unwrap_partial(fn, args, kwargs)
    check_arguments(fn, name, args, kwargs)
    fn, args, kwargs = unbound(fn, args, kwargs)
    if isinstance(fn, FixedFunction):
        fn, args, kwargs = fn.bound(args, kwargs)
    with suggest_partial(fn, 'mesh'):
        context = None if mesh is None else current_context(mesh)
        target = context and concrete(context.lowering_mesh, 'compile for')
    if target is not None:
        # the devices of the mesh may not exist, so keep only the shapes and dtypes of arrays
        check_no_refs(name, target, args, kwargs)
        check_devices(name, target, args, kwargs)
        args, kwargs = jtu.tree_map(without_devices, (tuple(args), dict(kwargs)))
    with (
        mesh_scope(target),
        restored_if_failed(fn, args, kwargs),
        local_devices_asked(_is_for_other_devices(fn, args, kwargs)) as asked,
    ):
        stages = _trace(fn, name, args, kwargs, target)
        has_mesh = stages.program is not None or current_context().mesh is not None
    stages = replace(stages, called=called, has_mesh=has_mesh)
    remember_asked(stages.jaxpr, asked)
    if stages.program is not None and target is not None and stages.program.setup.mesh is not None:
        raise EinshardError(
            f'{name} has its own mesh, so mesh= cannot be given',
            code='mesh',
            facts={f'mesh of {name}': mesh_fact(stages.program.mesh), 'mesh=': mesh_fact(target)},
        )
    return stages


def trace_to_compile(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: MeshLike | None
) -> Stages:
    """Traces a function as `trace_call` does, and makes sure that it compiles for `mesh`.

    JAX compiles for its default device if no argument and no value in the function has a sharding,
    so arguments are replicated over `mesh` then.
    """
    stages = trace_call(fn, args, kwargs, mesh)
    target: Any = None if mesh is None else current_context(mesh).lowering_mesh
    if target is None or _devices_of(stages) == {*target.devices.flat}:
        return stages
    replicated = NamedSharding(target, PartitionSpec())
    called = fn
    fn, args, kwargs = unbound(*unwrap_partial(fn, args, kwargs))

    def placed(x: Any) -> Any:
        x = without_devices(x)
        is_struct = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(sharding=replicated) if is_struct and x.sharding is None else x

    args, kwargs = jtu.tree_map(placed, (tuple(args), dict(kwargs)))
    stages = replace(trace_call(fn, args, kwargs, mesh), called=called)
    if _devices_of(stages) in (None, {*target.devices.flat}):
        return stages
    raise EinshardError(
        f'no argument of {stages.name} is an array, and no value in it is on the devices of mesh=',
        code='mesh',
        facts={
            'mesh=': mesh_fact(target),
            'instead': "constrain a value in the function: einshard(x, '...')",
        },
    )


def _is_for_other_devices(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a program is for devices that are not those of this process, as of `topology`."""
    is_sharded = isinstance(fn, ShardedFunction)
    context = fn._setup.context() if is_sharded else current_context()  # type: ignore[reportPrivateUsage]
    shardings = (getattr(leaf, 'sharding', None) for leaf in jtu.tree_leaves((args, kwargs)))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    meshes.append(context.lowering_mesh)
    if any(isinstance(mesh, AbstractMesh) for mesh in meshes):  # `plan` decides the devices later
        return True
    first = [mesh.devices.flat[0] for mesh in meshes if isinstance(mesh, Mesh)]
    kinds = {(device.platform, device.device_kind) for device in first}
    own = local_device()
    return own is not None and not kinds <= {(own.platform, own.device_kind)}


def _devices_of(stages: Stages) -> set[Any] | None:
    """Returns the devices that a program compiles for, or None if it cannot be lowered.

    JAX does not lower Explicit axes inside a function without knowing the devices from arguments.
    """
    try:
        lowered = stages.lower()
    except (RuntimeError, TypeError, ValueError):
        return None
    return {*devices_of(lowered)}


@functools.cache
def _hide_our_source_lines() -> None:
    """Makes JAX record the user's source lines instead of those of einshard."""
    # at the top of the file, this import would add 15% to the import time of einshard
    from jax.extend.source_info_util import register_exclusion

    register_exclusion(f'{Path(__file__).parent.parent}{os.sep}')


def _wrap_stage(
    stage: Any,
    framework: Framework | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Any,
) -> Stages:
    kind = type(stage).__name__.lower()
    if args or kwargs or mesh is not None:
        option = 'arguments' if args or kwargs else 'mesh='
        raise EinshardError(
            f'a {kind} function already has its arguments and devices, so {option} cannot be given',
            code='mesh',
            facts={'instead': f'omit {option}, or pass the function'},
        )
    return Stages('', framework=framework, **{kind: stage})


def _trace(
    fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], target: AnyMesh | None
) -> Stages:
    jitted = fn
    try:
        if isinstance(fn, ShardedFunction):
            # not fn.trace, which does not return the program and the values of its arguments
            program, values, traced = fn._call(args, kwargs, _trace_program)  # type: ignore[reportPrivateUsage]
            names = [p for i, p in enumerate(program.names) if i not in program.static]
            return Stages(
                name,
                traced=traced,
                argument_names=dict(enumerate(names)),
                program=program,
                values=values,
                limits=fn.limits,
                jitted=(program.jitted, values, {}),
                scope=target,
            )
        if not is_jitted(fn):
            jitted = jax.jit(fn)
        elif target is not None and isinstance(fn, JITTED):
            raise EinshardError(
                f'{name} is already jitted, so mesh= cannot be given',
                code='mesh',
                facts={
                    'instead': 'pass arguments with shardings: '
                    'einshard(jax.ShapeDtypeStruct(...), spec, mesh=mesh)'
                },
            )
        if jitted_by_haliax(fn) and isinstance(stage := fn.lower(*args, **kwargs), Lowered):
            return Stages(name, lowered=stage, scope=target)
        is_filtered = is_filter_jitted(jitted)
        if is_filtered and (target is not None or has_shapes(args, kwargs)):
            function = jtu.tree_map(without_devices, fn) if target is not None else fn
            traced, jitted = trace_filtered(function, args, kwargs)
            names = dict(enumerate(positional_parameters(fn)))
            return Stages(
                name,
                traced=traced,
                argument_names=names,
                jitted=jitted,
                scope=target,
                is_filtered=True,
            )
        made = (jitted.lower if is_filtered else jitted.trace)(*args, **kwargs)
        stage, framework = jax_stage(made), framework_of(made)
        if isinstance(stage, Traced):
            jitted = (jitted, args, kwargs)
            return Stages(name, traced=stage, framework=framework, jitted=jitted, scope=target)
        if not isinstance(stage, Lowered):
            raise EinshardError(
                f'{name} is jitted, but not by JAX, Flax or Equinox',
                facts={'got': type(made).__name__, **jit_of_call(fn, name, args, kwargs)},
            )
        return Stages(
            name,
            lowered=stage,
            framework=framework,
            paths=equinox_paths(fn, args, kwargs, stage.args_info),
            lowered_jaxpr=equinox_jaxpr(fn, args, kwargs, stage.args_info),
            jitted=(jitted, args, kwargs),
            scope=target,
        )
    except EinshardError:
        raise
    except (TypeError, ValueError) as error:
        facts = {
            'JAX says': first_line(error),
            'arguments': format_call(args, kwargs),
        }
        if can_filter_jit(fn, args, kwargs):
            facts['instead'] = f'equinox.filter_jit({name})'
        elif not _is_hashable(fn):  # a pytree with arrays, for example
            facts['instead'] = f'pass {name} as an argument: lambda f, *args: f(*args)'
        hide_frames(error)
        entries = traceback.extract_tb(error.__traceback__)
        lines = [x for x in entries if not x.filename.startswith(LIBRARY_FOLDERS)]
        lines = [x for x in lines if 'site-packages' not in x.filename] or lines
        if lines and 'instead' not in facts:
            source = short_source(f'{lines[-1].filename}:{lines[-1].lineno}')
            facts['line'] = f'{source}: {lines[-1].line}'
        facts |= sharding_facts(error)
        raise EinshardError(
            f'tracing {name} with these arguments failed', code='tracing', facts=facts
        ) from error
    except Exception as error:
        note_error(name, error)
        if not is_update_of_module(error):
            raise
        facts = {'Flax says': str(error).partition(' (https')[0]}
        if jitted_method := nnx_jit_of_method(fn, args, kwargs):
            facts['instead'] = f'pass the module as an argument: {jitted_method}'
        raise EinshardError(
            f'{name} updates a module that is not an argument', code='tracing', facts=facts
        ) from error


def _is_hashable(fn: Any) -> bool:
    try:
        hash(fn)
    except TypeError:
        return False
    return True


def _trace_program(program: Program) -> Callable[..., Any]:
    return lambda *values: (program, values, program.jitted.trace(*values))
