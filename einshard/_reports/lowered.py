"""A function and arguments -> its lowered program, with what the user calls things in it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh
from jax.stages import Compiled, Lowered, Traced

from .._errors import EinshardError
from .._mesh import AnyMesh, MeshLike, given_mesh, mesh_fact, resolve_mesh
from .._parameters import name_of
from .._program import Program
from .._promises import Allowed
from .._sharded_function import ShardedFunction
from .._specs import LeafSpec, array_text, leaf_specs


@dataclass(frozen=True)
class Stages:
    """A program on its way through JAX, as far as it has come.

    Attributes:
        name: of the function; '' where only the program is known.
        lowered, traced: None where the user gave what comes after.
        compiled: None where the user gave what comes before.
        labels: the names of the arguments by position; None where they are not known.
        program: of a `sharded` function, and the values it is called with.
        promise: what that may communicate; None where it promises nothing.
    """

    name: str
    compiled: Compiled | None = None
    lowered: Lowered | None = None
    traced: Traced | None = None
    labels: Mapping[int, str] | None = None
    program: Program | None = None
    values: tuple[Any, ...] = ()
    promise: Allowed | None = None

    def lower(self) -> Lowered:
        """The lowered program."""
        if self.lowered is not None:
            return self.lowered
        if self.traced is None:
            raise EinshardError(
                'in a Compiled, the values in between are not to be found any more',
                facts={'give': 'the function, or what lower(...) of it returns'},
            )
        return self.traced.lower()

    def compile(self) -> Compiled:
        """The compiled program; a call of the function takes the same one."""
        if self.compiled is not None:
            return self.compiled
        try:
            return self.lower().compile()
        except (RuntimeError, TypeError, ValueError) as error:  # JaxRuntimeError is the first
            raise EinshardError(
                f'{self.name or "the program"} does not compile',
                facts={'the compiler says': str(error).strip().partition('\n')[0]},
            ) from error

    def argument_specs(self) -> list[LeafSpec | None] | None:
        """The spec of every leaf of the arguments; None where the function has no specs."""
        if self.program is None:
            return None
        specs: list[LeafSpec | None] = []
        for i, (spec, value) in enumerate(zip(self.program.specs, self.values, strict=True)):
            if i not in self.program.static:
                specs += leaf_specs(value, jtu.tree_leaves(value), spec, self.program.mesh)
        return specs

    def result_specs(self, result: Any) -> list[LeafSpec | None] | None:
        """The spec of every leaf of a result of this structure."""
        if self.program is None:
            return None
        spec, mesh = self.program.out, self.program.mesh
        return list(leaf_specs(result, jtu.tree_leaves(result), spec, mesh))


def lower(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: MeshLike | None) -> Stages:
    """The lowered program of a call of any kind of function; a lowered one as it is."""
    if isinstance(fn, Compiled | Lowered | Traced):
        return _given(fn, args, kwargs, mesh)
    if not callable(fn):
        raise EinshardError(
            f'{type(fn).__name__} cannot be explained',
            facts={'give': 'a function, or what lower(...) of one gives'},
        )
    _leave_out_our_lines()
    name = name_of(fn)
    check_arguments(fn, name, args, kwargs)
    target = None if mesh is None else _concrete(resolve_mesh(mesh))
    if target is not None:
        # what is placed here cannot be moved to devices that need not be there
        args, kwargs = jtu.tree_map(_struct, (tuple(args), dict(kwargs)))
    with nullcontext() if target is None else given_mesh(target):
        stages = _trace(fn, name, args, kwargs, target)
    if stages.program is not None and target is not None and stages.program.mesh_given is not None:
        raise EinshardError(
            f'{name} is for a mesh of its own, and cannot be explained on another',
            facts={'its mesh': mesh_fact(stages.program.mesh), 'mesh=': mesh_fact(target)},
        )
    return stages


@functools.cache
def _leave_out_our_lines() -> None:
    """Has JAX note where the user calls einshard, not where that calls JAX."""
    # not at import: it would take 15 % of that
    from jax.extend.source_info_util import register_exclusion

    register_exclusion(f'{Path(__file__).parent.parent}{os.sep}')


def _given(stage: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Any) -> Stages:
    kind = type(stage).__name__
    if args or kwargs or mesh is not None:
        given = 'arguments' if args or kwargs else 'mesh='
        raise EinshardError(
            f'a {kind} has its arguments and its devices: {given} cannot be given',
            facts={'give': 'the function itself, or leave them out'},
        )
    if isinstance(stage, Compiled):
        return Stages('', compiled=stage)
    if isinstance(stage, Lowered):
        return Stages('', lowered=stage)
    return Stages('', traced=stage)


def _trace(
    fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], target: AnyMesh | None
) -> Stages:
    lower = getattr(fn, 'lower', None)
    if isinstance(lower, functools.partial):  # of a sharded method
        args, lower = (*lower.args, *args), lower.func
    made = getattr(lower, '__self__', None)
    try:
        if isinstance(made, ShardedFunction):
            # the arguments that its programs take are in a row, and may have been placed
            program, values, traced = made._call(args, kwargs, _trace_with)  # type: ignore[reportPrivateUsage]
            labels = [p for i, p in enumerate(program.labels) if i not in program.static]
            return Stages(
                name,
                traced=traced,
                labels=dict(enumerate(labels)),
                program=program,
                values=values,
                promise=made._promise,  # type: ignore[reportPrivateUsage]
            )
        if not hasattr(fn, 'trace'):
            # a fresh function where the mesh is given: jit knows by the function what it has traced
            fn = jax.jit(fn if target is None else functools.wraps(fn)(_fresh(fn)))
        elif target is not None:
            raise EinshardError(
                f'mesh= is for functions of einshard and for plain ones; {name} is jitted already',
                facts={
                    'instead': 'give its arguments with their shardings: '
                    'einshard(jax.ShapeDtypeStruct(...), spec, mesh=mesh)'
                },
            )
        return Stages(name, traced=fn.trace(*args, **kwargs))
    except EinshardError:
        raise
    except (TypeError, ValueError) as error:
        raise EinshardError(
            f'{name} cannot be traced with these arguments',
            facts={'JAX says': str(error).partition('\n')[0], 'arguments': _listed(args, kwargs)},
        ) from error


def _trace_with(program: Program) -> Callable[..., Any]:
    return lambda *values: (program, values, program.jitted.trace(*values))


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: fn(*args, **kwargs)


def _concrete(mesh: AnyMesh) -> AnyMesh:
    if isinstance(mesh, AbstractMesh):
        raise EinshardError(
            'to explain is to compile, and the mesh is abstract: it has no devices to compile for',
            facts={
                'mesh': mesh_fact(mesh),
                'give': "devices, or those of a TPU that is not here: topology('v5e:4x4')",
            },
        )
    return mesh


def check_arguments(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises where a function has no parameters for these arguments, or more of them."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins; JAX will say what it thinks
        return
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=signature.empty)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise EinshardError(
            f'the arguments do not match the parameters of {name}: {error}',
            facts={
                'parameters': str(shown)[1:-1] or 'none',
                'arguments': _listed(args, kwargs),
            },
        ) from None


def _struct(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _listed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments in short: 'float32[8,4], lr=float 0.1'; trees by their type."""
    named = [f'{name}={array_text(value)}' for name, value in kwargs.items()]
    return ', '.join([*map(array_text, args), *named]) or 'none'
