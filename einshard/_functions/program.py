"""One jitted program of a `sharded` function: for one call signature and mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType

from .._errors import EinshardError
from .._sharding.collective_axes import ShardedBy, find_sharded_by
from .._sharding.context import (
    Context,
    current_context,
    is_mesh_in_context,
    is_staging,
    is_tracing,
    mesh_scope,
    other_program_mesh,
    program_mesh_error,
)
from .._sharding.legacy_mesh import warn_if_ignored
from .._sharding.mesh import AnyMesh, MeshLike, is_partial
from .._trees.specs import is_none
from .error_notes import ErrorNotes
from .parameters import CallSignature, Declaration, positional_signature
from .promise import Budget, CheckedJit
from .sharding_trees import abstract_mesh, has_partial_axes, same_shardings, shardings_of
from .value_spec import ValueSpec


class WrongShardings(ValueError):
    """Stops a trace if the mesh, arguments or result need other shardings than jit was given.

    Callers handle it like jit's ValueErrors about shardings: they look up the right program.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """How a decorated function is jitted.

    Attributes:
        mesh: the mesh from `mesh=` or the specs; None for the mesh in context at each call.
        reshard: whether to reshard arguments that are sharded differently.
        options: `jax.jit` options, except those that name parameters.
        budget: checks the limits on collectives and memory; None without limits.
    """

    function: Callable[..., Any]
    name: str
    declaration: Declaration
    mesh: MeshLike | None
    reshard: bool
    options: Mapping[str, Any]
    budget: Budget | None

    def context(self) -> Context:
        """Returns mesh and axis rules. Inside a trace, a mesh from `jax.set_mesh` is abstract."""
        try:
            return current_context(self.mesh)
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def mesh_key(self, context: Context) -> tuple[AnyMesh, bool]:
        """Returns a cache key: the mesh (abstract if ambient), and the result of `is_ambient`."""
        mesh = context.lowering_mesh
        is_ambient = self.is_ambient(mesh)
        return (abstract_mesh(mesh) if is_ambient else mesh), is_ambient

    def is_ambient(self, mesh: AnyMesh) -> bool:
        """Whether the mesh comes from `jax.set_mesh`, so that jit resolves PartitionSpecs on it."""
        if isinstance(mesh, AbstractMesh) and not is_tracing():
            return False  # jax.sharding.use_abstract_mesh: there are no devices
        return self.mesh is None and is_mesh_in_context(mesh)


UNKNOWN: Any = object()  # out_shardings before the shapes of the result are known


class TracedFunction:
    """The function that JAX traces: it checks specs, enters the mesh, calls the user's function.

    Each trace checks ranks and sizes. JAX traces again for new shapes or pytrees, so a call that
    does not trace needs no check.

    Attributes:
        arguments, result: the specs of the arguments and of the result.
        static: the positions of static arguments.
        in_shardings: the sharding, or pytree of shardings, of each argument; None without a spec.
        out_shardings: the same for the result; `UNKNOWN` at first.
        wrapper: the function for `jax.jit`.
    """

    def __init__(self, setup: Setup, call: CallSignature, values: Sequence[Any]):
        self.setup = setup
        self.call = call
        self.arguments = setup.declaration.arguments(call)
        self.result = setup.declaration.result
        self.names = [str(argument.name) for argument in self.arguments]
        self.static = self.positions(setup.declaration.static)
        context = setup.context()
        self.mesh = context.lowering_mesh
        self.mesh_is_ambient = setup.is_ambient(self.mesh)
        try:
            self.in_shardings = self.argument_shardings(values)
        except EinshardError:
            self.check(values)  # raises an error that names the leaf
            raise
        self.out_shardings: Any = UNKNOWN
        self.wrapper = self.set_names(self._make_wrapper())
        self._eval_shape = jax.jit(self.wrapper, static_argnums=tuple(self.static)).eval_shape

    @property
    def constrains_result(self) -> bool:
        """Whether a call inside a trace must constrain the result.

        With explicit mesh axes, JAX ignores the out_shardings of a nested jit.
        """
        return self.result.spec is not None and AxisType.Explicit in self.mesh.axis_types

    @property
    def has_shardings(self) -> bool:
        """Whether an argument or the result has a spec. Else jit runs on its arguments' devices."""
        return self.result.spec is not None or bool(jtu.tree_leaves(self.in_shardings))

    def scope(self, mesh: AnyMesh) -> AbstractContextManager[Any]:
        """Makes `mesh` the default mesh in a `with` block that traces the function."""
        return mesh_scope(mesh, is_program=self.has_shardings)

    def check_devices(self, values: Sequence[Any]) -> None:
        """Raises if the function is called in a program that runs on other devices."""
        other = other_program_mesh(self.mesh, jtu.tree_leaves(values))
        if other is not None and self.has_shardings:
            raise program_mesh_error(self.mesh, other).about(function=self.setup.name)

    def positions(self, names: Collection[str]) -> list[int]:
        return [i for i, name in enumerate(self.names) if name in names]

    def argument_shardings(self, values: Sequence[Any]) -> list[Any]:
        """Returns the shardings of each argument on the current mesh."""
        return self._for_each_argument(ValueSpec.shardings, values)

    def constrain_arguments(self, values: Sequence[Any]) -> list[Any]:
        return self._for_each_argument(ValueSpec.constrain, values)

    def check(self, values: Sequence[Any]) -> None:
        """Raises an error for the first argument whose rank or sizes do not fit its spec."""
        self._for_each_argument(ValueSpec.find_placements, values)

    def _for_each_argument(
        self, step: Callable[[ValueSpec, Any, Context], Any], values: Sequence[Any]
    ) -> list[Any]:
        context = self.setup.context()
        return [step(spec, x, context) for spec, x in zip(self.arguments, values, strict=True)]

    def result_shardings(self, values: Sequence[Any]) -> Any:
        """Returns the shardings of the result on the current mesh."""
        # if they depend on the result's shapes, this traces before the call; jit reuses the trace
        context = self.setup.context()
        result = self._eval_shape(*values) if self.result.needs_leaves(context) else None
        return self.result.shardings(result, context)

    def matches_arguments(self, values: Sequence[Any]) -> bool:
        """Whether the specs give these arguments the shardings in `in_shardings`."""
        context = self.setup.context()
        rows = zip(self.arguments, values, self.in_shardings, strict=True)
        return all(
            same_shardings(argument.shardings(value, context), shardings)
            for argument, value, shardings in rows
            if argument.needs_leaves(context)
        )

    def matches_result(self, values: Sequence[Any]) -> bool:
        """Whether the specs of the result still resolve to `out_shardings` for these arguments."""
        # the wrapper compares the shardings when it is traced for these arguments
        if self.result.needs_leaves(self.setup.context()):
            try:
                self._eval_shape(*values)
            except WrongShardings:
                return False
        return True

    def sharded_by(self, values: Sequence[Any], result: Any) -> ShardedBy:
        """Returns, for each axis name in the specs, the mesh axes that shard this axis.

        `result` is a pytree of ShapeDtypeStructs, or None if it is unknown.
        """
        pairs = [*zip(self.arguments, values, strict=True)]
        if result is not None:
            pairs.append((self.result, result))
        with mesh_scope(self.mesh):
            context = self.setup.context()
            arrays = (x for spec, value in pairs for x in spec.named_shardings(value, context))
            return find_sharded_by(arrays)

    def for_jit(self, shardings: Any) -> Any:
        """Converts shardings for jit: those on a mesh from `jax.set_mesh` become PartitionSpecs.

        Jit resolves PartitionSpecs on the mesh in context at each call, so that one program serves
        all meshes that differ only in their devices.
        """
        if not self.mesh_is_ambient:
            return shardings
        mesh = abstract_mesh(self.mesh)

        def convert(sharding: Any) -> Any:
            if sharding is None or abstract_mesh(sharding.mesh) != mesh:
                return sharding
            return sharding.spec

        return jtu.tree_map(convert, shardings, is_leaf=is_none)

    def set_names(self, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the names of a wrapper, which jit shows in programs and errors; returns it."""
        wrapper.__name__ = wrapper.__qualname__ = self.setup.name
        wrapper.__wrapped__ = self.setup.function  # type: ignore[attr-defined]
        wrapper.__signature__ = positional_signature(self.names)  # type: ignore[attr-defined]
        return wrapper

    def _make_wrapper(self) -> Callable[..., Any]:
        def wrapper(*values: Any) -> Any:
            context = self.setup.context()
            mesh = context.lowering_mesh
            if abstract_mesh(mesh) != abstract_mesh(self.mesh) or not self.matches_arguments(
                values
            ):
                raise WrongShardings
            self.check_devices(())  # of an enclosing program, or those of `jax.set_mesh`
            warn_if_ignored(self.setup.name, context.mesh)
            self.check(values)
            is_explicit = AxisType.Explicit in self.mesh.axis_types
            if is_explicit:
                # in_shardings place the arguments but do not change their types
                with self.scope(mesh):
                    values = tuple(self.constrain_arguments(values))
            with ErrorNotes(self.setup.name, self.arguments, values, context), self.scope(mesh):
                args, kwargs = self.call.split(values)
                result = self.setup.function(*args, **kwargs)
            self._check_result(result, context)
            if is_explicit and has_partial_axes(self.result.shardings(result, context)):
                # without this, JAX 0.8.1 returns a sum that is too large
                return self.result.constrain(result, context)
            return result

        return wrapper

    def _check_result(self, result: Any, context: Context) -> None:
        if not self.result.needs_leaves(context):
            self.result.find_placements(result, context)
        elif self.out_shardings is not UNKNOWN:
            needed = self.result.shardings(result, context)
            if not same_shardings(needed, self.out_shardings):
                raise WrongShardings


@dataclass(eq=False)
class Program:
    """A function jitted with the shardings of its specs, for one call signature.

    Attributes:
        options: options of jit, without shardings.
        jitted: the jitted function, to run and to lower.
        nested: the version for calls inside a trace. It constrains the result, and has no
            out_shardings: in a nested jit, JAX ignores them on explicit axes, and in the backward
            pass they become in_shardings, which reject cotangents with other shardings.
        runnable: the function that a call runs: `jitted`, or `checked.call`.
        checked: checks the limits on collectives and memory; None without limits.
        without_spec: with limits, the positions of arguments that have leaves without a spec.
        shardings_without_spec: the shardings of those arguments. The program is only for these:
            for others, JAX would recompile without a trace, so the limits would not be checked.
        args_checked: whether `place_arguments` has run for a call.
    """

    traced: TracedFunction
    options: Mapping[str, Any]
    jitted: Any
    nested: Any
    runnable: Any
    checked: CheckedJit | None
    without_spec: Sequence[int]
    shardings_without_spec: tuple[Any, ...]
    args_checked: bool = False

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh has no devices, so that the program can be traced but not run."""
        traced = self.traced
        return isinstance(traced.mesh, AbstractMesh) and not traced.mesh_is_ambient

    def run(self, *values: Any) -> Any:
        """Runs the program; inside a trace, calls `nested`."""
        if self.checked is None and is_tracing():
            return self.nested(*values)
        return self.runnable(*values)

    def is_for(self, values: Sequence[Any]) -> bool:
        """Whether a call with these values needs the shardings of this program."""
        return (
            self.traced.matches_arguments(values)
            and shardings_of(values, self.without_spec) == self.shardings_without_spec
            and self.traced.matches_result(values)
        )

    def must_place_arguments(self) -> bool:
        """Whether each call must place the arguments, because jit would not.

        On an ambient mesh, `nested` has no in_shardings, so under jax.grad or jax.vmap outside jit
        it would accept any sharding. And jit cannot place host data as a partial sum: it raises, or
        in JAX 0.8.1 returns a sum that is too large.
        """
        if is_tracing():
            return self.traced.mesh_is_ambient and not is_staging()
        return has_partial_axes(self.traced.in_shardings)

    def clear_cache(self) -> None:
        self.jitted.clear_cache()
        self.nested.clear_cache()
        if self.checked is not None:
            self.checked.clear_cache()

    def trace_as_called(
        self, n_args: int, given: Collection[str], order: Sequence[str], values: Sequence[Any]
    ) -> jax.stages.Traced:
        """Traces a call that passes the parameters in `given` by keyword.

        `jax.jit` with in_shardings rejects keyword arguments, so ShapeDtypeStructs have the
        shardings instead. `order` has the names of `values[n_args:]`: the parameters in `given`,
        and omitted parameters whose defaults contain arrays.
        """
        traced, names = self.traced, dict(enumerate(order, n_args))
        context = traced.setup.context()
        structs = [
            value if i in traced.static else argument.as_structs(value, context)
            for i, (argument, value) in enumerate(zip(traced.arguments, values, strict=True))
        ]

        def as_called(*args: Any, **kwargs: Any) -> Any:
            omitted = {i: name for i, name in names.items() if name not in given}
            specs = traced.arguments
            defaults = {name: specs[i].constrain(values[i], context) for i, name in omitted.items()}
            return traced.wrapper(*args, *map({**defaults, **kwargs}.__getitem__, order))

        as_called.__name__ = as_called.__qualname__ = traced.setup.name
        as_called.__wrapped__ = traced.setup.function  # type: ignore[attr-defined]
        donated = self.options.get('donate_argnums', ())
        options: dict[str, Any] = {
            **self.options,
            'static_argnums': tuple(i for i in traced.static if i < n_args),
            'static_argnames': tuple(names[i] for i in traced.static if i >= n_args),
            'donate_argnums': tuple(i for i in donated if i < n_args),
            'donate_argnames': tuple(names[i] for i in donated if i >= n_args),
        }
        if traced.out_shardings is not None:
            options['out_shardings'] = traced.for_jit(traced.out_shardings)
        by_keyword = {name: structs[i] for i, name in names.items() if name in given}
        return jax.jit(as_called, **options).trace(*structs[:n_args], **by_keyword)


def make_program(setup: Setup, call: CallSignature, values: Sequence[Any]) -> Program:
    """Makes the program for a call. This traces if out_shardings depend on the result's shapes."""
    traced = TracedFunction(setup, call, values)
    traced.out_shardings = traced.result_shardings(values)
    options: dict[str, Any] = {**setup.options, 'static_argnums': tuple(traced.static)}
    donated = traced.positions(setup.declaration.donated)
    if donated:
        options['donate_argnums'] = tuple(donated)
    with_shardings = dict(options)
    budget = setup.budget
    dynamic = [s for i, s in enumerate(traced.in_shardings) if i not in traced.static]
    if any(sharding is not None for sharding in dynamic):
        with_shardings['in_shardings'] = tuple(map(traced.for_jit, dynamic))
        if traced.mesh.size == 1:  # without in_shardings, the program may run on other devices
            budget = budget and budget.on_one_device()
    nested = _nested(traced, with_shardings)
    if traced.out_shardings is not None:
        with_shardings['out_shardings'] = traced.for_jit(traced.out_shardings)
    jitted = jax.jit(traced.wrapper, **with_shardings)
    if not traced.mesh_is_ambient and (
        traced.out_shardings is None or isinstance(traced.mesh, AbstractMesh)
    ):
        # nothing to constrain, or an abstract mesh that is not in context: constraints would fail
        nested = jitted
    if not traced.mesh_is_ambient and has_partial_axes(traced.in_shardings):
        nested = _choose_by_type(nested, _nested(traced, options))
    runnable, checked, without_spec = jitted, None, list[int]()
    if budget is not None:
        checked = CheckedJit(budget, traced.wrapper, traced.sharded_by, with_shardings, nested)
        runnable = checked.call
        without_spec = [i for i in range(len(values)) if _lacks_spec(traced, i)]
    shardings_without_spec = shardings_of(values, without_spec)
    return Program(
        traced, options, jitted, nested, runnable, checked, without_spec, shardings_without_spec
    )


def _nested(traced: TracedFunction, options: Mapping[str, Any]) -> Any:
    """Returns `Program.nested`, the version for calls inside a trace."""
    # like `Program.jitted`, jits `traced.wrapper`: calls inside and outside a trace share one trace
    without_shardings: dict[str, Any] = {**options, 'in_shardings': None}
    inlined = jax.jit(traced.wrapper, **dict[str, Any](without_shardings, inline=True))
    if traced.mesh_is_ambient:
        # shardings would tie the trace to these devices, but JAX reuses it on other devices
        options = without_shardings

    def nested(*values: Any) -> Any:
        if traced.mesh_is_ambient:
            values = tuple(traced.constrain_arguments(values))
        context, result = traced.setup.context(), inlined(*values)
        with traced.scope(context.lowering_mesh):
            return traced.result.constrain(result, context)

    return jax.jit(traced.set_names(nested), **options)


def _choose_by_type(nested: Any, without_shardings: Any) -> Callable[..., Any]:
    """Calls `without_shardings` if the type of an argument has unreduced or reduced mesh axes.

    JAX gives the gradient of such an argument the in_shardings of `nested`, '=' instead of '+':
    JAX 0.8.1 returns a sum that is too large, and newer versions raise an error.
    """

    def call(*values: Any) -> Any:
        arrays = (x for x in jtu.tree_leaves(values) if isinstance(x, jax.Array))
        partial = any(is_partial(jax.typeof(x).sharding) for x in arrays)
        return (without_shardings if partial else nested)(*values)

    def clear_cache() -> None:
        nested.clear_cache()
        without_shardings.clear_cache()

    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call


def _lacks_spec(traced: TracedFunction, i: int) -> bool:
    """Whether argument `i`, or one of its leaves, has no spec."""
    shardings = jtu.tree_leaves(traced.in_shardings[i], is_leaf=is_none)
    return i not in traced.static and any(map(is_none, shardings))
