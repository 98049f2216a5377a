"""Traces, lowers and compiles a function for `explain`, and keeps the names of its arguments."""

from __future__ import annotations

import functools
import inspect
import os
import re
import reprlib
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.stages import Compiled, Lowered, Traced

from .._errors import EinshardError, hide_frames
from .._functions.bound_method import unwrap_partial
from .._functions.error_notes import note_error, sharding_facts
from .._functions.program import Program
from .._functions.promise import Limits
from .._functions.sharded_function import ShardedFunction
from .._program.edits.call import JittedCall, read_call
from .._program.edits.fixed_function import FixedFunction
from .._program.private_jax import devices_of, shardings_of_compiled
from .._progress import progress
from .._sharding.context import LIBRARY_FOLDERS, current_context, mesh_scope
from .._sharding.cuda_plugin import start_backend
from .._sharding.leaf_spec import AnySpec
from .._sharding.mesh import AnyMesh, MeshLike, mesh_fact
from .._text import array_text, first_line, name_of
from .._trees.partition import with_static_nodes
from .._trees.specs import leaf_specs
from .frameworks import (
    JITTED,
    Framework,
    can_filter_jit,
    equinox_jaxpr,
    equinox_paths,
    flatten_graph,
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


@dataclass(frozen=True)
class Stages:
    """A traced, lowered or compiled program.

    Attributes:
        name: the name of the function, or '' if unknown.
        compiled, lowered, traced: the stage that the user passed, or the traced function. Only one
            of the three is set.
        argument_names: the names of the dynamic arguments of a `sharded` function, by position.
            None for other functions.
        framework: the framework that jitted the function, or None for JAX and `sharded`.
        paths: the path of each argument leaf of an Equinox function. None for other functions.
        lowered_jaxpr: the jaxpr of a lowered Equinox function, or None.
        program: the program of a `sharded` function. None for other functions.
        values: the values of `program.arguments` in the call, including static ones.
        limits: the limits of a `sharded` function on collectives and memory, or None.
        jitted: the jitted function, its arguments and keyword arguments, or None for a stage that
            the user passed.
        scope: the mesh that was in context by `mesh=`, or None.
        called: the function that the user passed.
        is_filtered: whether Equinox jitted the function, and it was traced for ShapeDtypeStructs,
            with its arguments and result in the user's structure. `framework` is None then.
    """

    name: str
    compiled: Compiled | None = None
    lowered: Lowered | None = None
    traced: Traced | None = None
    argument_names: Mapping[int, str] | None = None
    framework: Framework | None = None
    paths: Sequence[str] | None = None
    lowered_jaxpr: Any = None
    program: Program | None = None
    values: tuple[Any, ...] = ()
    limits: Limits | None = None
    jitted: tuple[Any, Sequence[Any], Mapping[str, Any]] | None = None
    scope: AnyMesh | None = None
    called: Any = None
    is_filtered: bool = False

    @property
    def is_equinox(self) -> bool:
        return self.is_filtered or self.framework == 'equinox'

    @functools.cached_property
    def call(self) -> JittedCall | None:
        """The call as one equation, which can be edited. None if it cannot be traced as one."""
        if self.jitted is None or self.jaxpr is None:
            return None
        result_tree = None
        if self.framework is None and self.traced is not None:
            result_tree = jtu.tree_structure(self.traced.out_info)
        flatten = flatten_graph if self.framework == 'nnx' else jtu.tree_flatten
        with nullcontext() if self.scope is None else mesh_scope(self.scope):
            call = read_call(
                *self.jitted, result_tree, numbers_are_static=self.is_equinox, flatten=flatten
            )
        # a `sharded` function reshards its arguments as its specs say
        return replace(call, trace_again=None) if call and self.program is not None else call

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the arguments of `jitted` for a call of the function that the user passed."""
        fn, args, kwargs = unbound(*unwrap_partial(self.called, args, kwargs))
        if isinstance(fn, ShardedFunction):
            return fn._flatten(args, kwargs), {}  # type: ignore[reportPrivateUsage]
        if isinstance(fn, FixedFunction):
            return fn.bound(args, kwargs)[1:]
        return args, kwargs

    @property
    def jaxpr(self) -> Any | None:
        """The jaxpr of the function. None for a lowered or compiled function."""
        return self.lowered_jaxpr if self.traced is None else self.traced.jaxpr.jaxpr

    def lower(self) -> Lowered:
        if self.lowered is not None:
            return self.lowered
        if self.traced is None:
            raise EinshardError(
                'a compiled function has no list of intermediate values',
                facts={'instead': 'pass the function, or the lowered function: f.lower(...)'},
            )
        return self.traced.lower()

    def compile(self) -> Compiled:
        """Compiles the program. Later calls return the executable that JAX has cached."""
        if self.compiled is not None:
            return self.compiled
        try:
            lowered = self.lower()
            with progress(f'compiling {self.name or "the program"}'):
                return lowered.compile()
        except EinshardError:  # from an expect_collectives block
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # JaxRuntimeError is a RuntimeError
            raise EinshardError(
                f'{self.name or "the program"} does not compile',
                code='does-not-compile',
                facts={'the compiler says': first_line(error)},
            ) from error

    def dynamic_leaves(self) -> list[Any]:
        """Returns the leaves of the arguments of a `sharded` function, without static arguments."""
        static = () if self.program is None else self.program.static
        return jtu.tree_leaves([x for i, x in enumerate(self.values) if i not in static])

    def argument_specs(self) -> list[AnySpec | None] | None:
        if self.program is None:
            return None
        specs: list[AnySpec | None] = []
        pairs = zip(self.program.arguments, self.values, strict=True)
        for i, (argument, value) in enumerate(pairs):
            if i not in self.program.static:
                tree = with_static_nodes(value)
                specs += leaf_specs(tree, jtu.tree_leaves(tree), argument.spec, self.program.mesh)
        return specs

    def result_specs(self, result: Any) -> list[AnySpec | None] | None:
        if self.program is None:
            return None
        spec, mesh = self.program.result.spec, self.program.mesh
        tree = with_static_nodes(result)
        return list(leaf_specs(tree, jtu.tree_leaves(tree), spec, mesh))


def compiled_shardings(compiled: Compiled) -> tuple[list[Sharding | None], Any]:
    """Returns the sharding of each argument leaf, and `out_info`. Unused leaves have None.

    JAX adds the final value of a `jax.Ref` to the outputs, but not to `out_tree`. In such programs,
    `out_info` raises, and `input_shardings` may raise or be wrong.
    """
    leaves, treedef = jtu.tree_flatten(compiled.args_info)
    try:
        return treedef.flatten_up_to(compiled.input_shardings), compiled.out_info
    except ValueError:
        kept, results = shardings_of_compiled(compiled)
        results = results[: compiled.out_tree.num_leaves]
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in results]
        shardings = [kept.get(i) for i in range(len(leaves))]
        return shardings, jtu.tree_unflatten(compiled.out_tree, structs)


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
        _check_no_refs(name, target, args, kwargs)
        _check_devices(name, target, args, kwargs)
        args, kwargs = jtu.tree_map(_without_devices, (tuple(args), dict(kwargs)))
    with (
        nullcontext() if target is None else mesh_scope(target),
        restored_if_failed(fn, args, kwargs),
        local_devices_asked(_is_for_other_devices(fn, args, kwargs)) as asked,
    ):
        stages = replace(_trace(fn, name, args, kwargs, target), called=called)
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
        x = _without_devices(x)
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
                jitted=(jitted, values, {}),
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
            function = jtu.tree_map(_without_devices, fn) if target is not None else fn
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
                facts={'got': type(made).__name__, **_jit_of_call(fn, name, args, kwargs)},
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
            'arguments': _format_call(args, kwargs),
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
            facts['line'] = f'{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}'
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


def _jit_of_call(
    fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """Returns a fact that says to jit a function that calls `fn`, if JAX can trace that."""
    try:
        jax.jit(lambda *args, **kwargs: fn(*args, **kwargs)).trace(*args, **kwargs)
    except Exception:  # the function may raise anything
        return {}
    return {'instead': f'jax.jit(lambda *args: {name}(*args))'}


def _is_hashable(fn: Any) -> bool:
    try:
        hash(fn)
    except TypeError:
        return False
    return True


def _trace_program(program: Program) -> Callable[..., Any]:
    return lambda *values: (program, values, program.jitted.trace(*values))


def _check_no_refs(
    name: str, mesh: AnyMesh, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Rejects Refs, because JAX does not accept a ShapeDtypeStruct in place of one."""
    if any(isinstance(leaf, jax.Ref) for leaf in jtu.tree_leaves((tuple(args), dict(kwargs)))):
        raise EinshardError(
            f'{name} takes a jax.Ref, so mesh= cannot be given',
            code='array',
            facts={
                'arguments': _format_call(args, kwargs),
                'mesh=': mesh_fact(mesh),
                'instead': 'pass an array, and call jax.new_ref inside the function',
            },
        )


def _check_devices(name: str, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    example_of: dict[AnyMesh, Any] = {}
    for leaf in jtu.tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(leaf.sharding, NamedSharding):
            example_of[leaf.sharding.mesh] = leaf
    for other, leaf in example_of.items():
        if isinstance(other, Mesh) and {*other.devices.flat} != {*mesh.devices.flat}:
            raise EinshardError(
                f'an argument of {name} is not on the devices of mesh=',
                code='mesh',
                facts={
                    'array': array_text(leaf),
                    'mesh of the argument': mesh_fact(other),
                    'mesh=': mesh_fact(mesh),
                    'instead': 'omit mesh=, or the sharding of the argument',
                },
            )


def concrete(mesh: AnyMesh, use: str) -> Mesh:
    if isinstance(mesh, AbstractMesh):
        raise EinshardError(
            f'an abstract mesh has no devices to {use}',
            code='mesh',
            facts={
                'mesh': mesh_fact(mesh),
                'instead': "pass a Mesh with devices; for those you don't have, "
                "topology('v5e:4x4') or topology('h100:8')",
            },
        )
    return mesh


def check_arguments(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins: leave the check to JAX
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        # newer Pythons say 'keyword-only argument'
        missing = re.fullmatch(r"missing a required .*argument: '(\w+)'", str(error))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        shown = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise EinshardError(
            f'the arguments do not match the parameters of {name}: {error}',
            facts={
                'parameters': str(shown)[1:-1] or 'none',
                'arguments': _format_call(args, kwargs),
                **(_partial_fact(name, missing[1]) if missing and missing[1] in _OPTIONS else {}),
            },
        ) from None


# options of explain, plan, to_jax and assert_collectives: parameters of a function with these names
# cannot be passed to them by keyword
_OPTIONS = (
    *('mesh', 'replicated_above', 'intermediates', 'chip', 'memory', 'objective', 'pin', 'tries'),
    *('candidates', 'compilations', 'seconds', 'shape', 'allowed'),
)


def _partial_fact(name: str, option: str) -> dict[str, str]:
    return {f'parameter {option}': f'functools.partial({name}, {option}=...) in place of {name}'}


@contextmanager
def suggest_partial(fn: Any, option: str) -> Generator[None]:
    """Adds to errors about an option that a parameter of the function has its name."""
    try:
        yield
    except EinshardError as error:
        names: Collection[str] = ()
        with suppress(TypeError, ValueError):  # some builtins have no signature
            names = inspect.signature(fn).parameters
        if option not in names:
            raise
        raise error.about(**_partial_fact(name_of(fn), option)) from None


def _without_devices(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        aval: Any = jax.typeof(leaf)  # float32 for a float64 array of NumPy
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return leaf


def _format_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Formats 'float32[8,4], dict, lr=float 0.1'."""
    by_keyword = [f'{name}={array_text(value)}' for name, value in kwargs.items()]
    return ', '.join([*map(array_text, args), *by_keyword]) or 'none'
