"""Stages: a traced, lowered or compiled program, and what reports read of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Sharding
from jax.stages import Compiled, Lowered, Traced

from .._errors import EinshardError
from .._functions.bound_method import unwrap_partial
from .._functions.program import Program
from .._functions.promise import Limits
from .._functions.sharded_function import ShardedFunction
from .._program.edits.call import JittedCall, read_call
from .._program.edits.fixed_function import FixedFunction
from .._program.private_jax import shardings_of_compiled
from .._progress import progress
from .._sharding.leaf_spec import AnySpec
from .._sharding.mesh import AnyMesh
from .._sharding.scopes import mesh_scope
from .._text import first_line
from .._trees.partition import with_static_nodes
from .._trees.specs import leaf_specs
from .frameworks import (
    Framework,
    flatten_graph,
    unbound,
)


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
        has_mesh: whether a mesh was in context, so that expressions in the function find it.
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
    has_mesh: bool = False
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
        with mesh_scope(self.scope):
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
