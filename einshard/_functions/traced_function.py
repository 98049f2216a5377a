"""Setup: a decorated function; TracedFunction: the function that it passes to `jax.jit`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from .._errors import EinshardError, quoted
from .._sharding.collective_axes import ShardedBy, find_sharded_by
from .._sharding.context import (
    AxisRule,
    Context,
    Fallback,
    changed,
    current_context,
    device_mismatch_error,
    is_mesh_in_context,
    is_tracing,
    mesh_scope,
    warn_if_legacy_mesh,
    with_rules,
)
from .._sharding.mesh import AnyMesh, MeshLike, is_partial
from .._text import first_of
from .._trees.partition import find_modules, join, partition_modules
from .._trees.paths import argument_path, leaves_with_paths
from .._trees.specs import is_none
from .error_notes import ErrorNotes
from .parameters import CallSignature, Declaration, positional_signature
from .promise import Budget, Promise
from .value_spec import ValueSpec

# Given an error, a call and its values, returns the error without fixes that do not work for them.
TryFixes: TypeAlias = Callable[[EinshardError, CallSignature, Sequence[Any]], EinshardError]


class Options(NamedTuple):
    """The options of `sharded` and `per_device`, and what `per_device` asks of `sharded`."""

    mesh: MeshLike | None = None
    reshard: bool = False
    indivisible: Fallback = 'error'
    collectives: Promise | None = None
    memory: str | int | None = None
    check_processes: bool = True
    axis_rules: Sequence[AxisRule] | None = None  # if given, jaxtyping annotations are specs
    # whether calls in traces leave a mapped axis of `jax.vmap` as it is, where `jax.jit` with
    # `in_shardings` replicates it
    keeps_mapped_axes: bool = False
    try_fixes: TryFixes | None = None  # for errors of spec functions

    @property
    def are_default(self) -> bool:
        return all(x is default for x, default in zip(self, Options(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A decorated function, its specs and its options."""

    function: Callable[..., Any]
    name: str
    declaration: Declaration
    options: Options
    mesh: MeshLike | None  # of the options or the specs; None: the mesh in context at each call
    jit_options: Mapping[str, Any]  # except those that select parameters
    budget: Budget | None  # None: no limits on collectives and memory
    # Set once a call has a module of Equinox, in its arguments or its result. From then on, calls
    # convert them to `Partitioned`. Functions without modules do not look for them in each call.
    has_modules: threading.Event = field(default_factory=threading.Event)

    @property
    def axis_rules(self) -> Sequence[AxisRule]:
        """The rules for the specs and the body of the function."""
        return self.options.axis_rules or ()

    def context(self) -> Context:
        """Returns the mesh and axis rules. In a trace, a mesh from `jax.set_mesh` is abstract."""
        try:
            context = with_rules(current_context(self.mesh), self.axis_rules)
            indivisible = self.options.indivisible
            return changed(context, indivisible=indivisible) if indivisible != 'error' else context
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def mesh_key(self, context: Context) -> tuple[AnyMesh, bool]:
        """Returns a cache key: the mesh, in abstract form if ambient, and whether it is ambient."""
        mesh = context.lowering_mesh
        is_ambient = self.is_ambient(mesh)
        return (abstract_mesh(mesh) if is_ambient else mesh), is_ambient

    def is_ambient(self, mesh: AnyMesh) -> bool:
        """Whether the mesh is that of `jax.set_mesh`. If so, jit resolves PartitionSpecs on it."""
        if isinstance(mesh, AbstractMesh) and not is_tracing():
            return False  # from jax.sharding.use_abstract_mesh, without devices
        may_be = self.mesh is None or isinstance(self.mesh, AbstractMesh)
        return may_be and is_mesh_in_context(mesh)


def abstract_mesh(mesh: AnyMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


class WrongShardings(ValueError):
    """Stops a trace whose mesh or shardings differ from those given to jit.

    Callers handle it like jit's ValueErrors about shardings: they look up the right program.
    """


class HasModules(Exception):
    """Stops a trace with modules of Equinox that the caller has not converted to `Partitioned`."""


UNKNOWN: Any = object()  # out_shardings before the shapes of the result are known


class TracedFunction:
    """The function that JAX traces for a call signature and mesh.

    It checks the specs, enters the mesh, and calls the user's function. Calls without a trace need
    no check of ranks and sizes, because JAX traces again for new shapes or pytrees.

    Attributes:
        arguments, result: the specs of the arguments and of the result.
        static: the positions of static arguments.
        in_shardings: the sharding or pytree of shardings of each argument, or None without a spec.
        out_shardings: the sharding or pytree of shardings of the result, or None without a spec.
            It is `UNKNOWN` until `Program` sets it.
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
        """Whether an argument or the result has a spec. If not, jit uses its arguments' devices."""
        return bool(jtu.tree_leaves((self.in_shardings, self.result.spec)))

    def scope(self, mesh: AnyMesh) -> AbstractContextManager[Any]:
        """Makes `mesh` the default mesh in a `with` block that traces the function."""
        return mesh_scope(mesh, self.has_shardings, self.setup.axis_rules)

    def check_devices(self, values: Sequence[Any]) -> None:
        """Raises if the function is called in a program that runs on other devices."""
        error = device_mismatch_error(self.mesh, jtu.tree_leaves(values))
        if error is not None and self.has_shardings:
            raise error.about(function=self.setup.name)

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
        # this may trace the function for the shapes of its result; jit reuses the trace
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
        """Whether the result for these arguments has the shardings in `out_shardings`."""
        if self.result.needs_leaves(self.setup.context()):
            try:
                self._eval_shape(*values)  # the wrapper compares the shardings
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
        """Converts shardings on a mesh from `jax.set_mesh` to PartitionSpecs.

        Jit resolves them on the mesh in context at each call, so one program works on all meshes
        that differ only in their devices.
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
        """Sets the names that jit shows in programs and errors, and returns the wrapper."""
        wrapper.__name__ = wrapper.__qualname__ = self.setup.name
        wrapper.__wrapped__ = self.setup.function  # type: ignore[attr-defined]
        wrapper.__signature__ = positional_signature(self.names)  # type: ignore[attr-defined]
        return wrapper

    def _make_wrapper(self) -> Callable[..., Any]:
        def wrapper(*values: Any) -> Any:
            context = self.setup.context()
            mesh = context.lowering_mesh
            same_mesh = abstract_mesh(mesh) == abstract_mesh(self.mesh)
            if not (same_mesh and self.matches_arguments(values)):
                raise WrongShardings
            has_modules = self.setup.has_modules
            if not has_modules.is_set() and find_modules(values):
                has_modules.set()
                raise HasModules
            self.check_devices(())  # against `jax.set_mesh` or an enclosing program
            warn_if_legacy_mesh(self.setup.name, context.mesh)
            self.check(values)
            is_explicit = AxisType.Explicit in self.mesh.axis_types
            if is_explicit:
                # in_shardings place the arguments but do not change their types
                with self.scope(mesh):
                    values = tuple(self.constrain_arguments(values))
            with ErrorNotes(self.setup.name, self.arguments, values, context), self.scope(mesh):
                args, kwargs = self.call.split(join(values) if has_modules.is_set() else values)
                before = module_leaves((args, kwargs))
                result = self.setup.function(*args, **kwargs)
            names = dict(enumerate(self.names))
            check_updates(self.setup.name, names, before, (args, kwargs), result)
            if find_modules(result):
                if not has_modules.is_set():
                    has_modules.set()
                    raise HasModules
                result = partition_modules(result, 'result')
            self._check_result(result, context)
            if is_explicit and has_partial_axes(self.result.shardings(result, context)):
                # without this, JAX gives the result a sharding that has no spec
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


def has_partial_axes(shardings: Any) -> bool:
    return any(map(is_partial, jtu.tree_leaves(shardings)))


def same_shardings(a: Any, b: Any) -> bool:
    """Whether pytrees of shardings are equal, ignoring devices and memory kinds."""
    a_leaves, a_treedef = jtu.tree_flatten(a, is_leaf=is_none)
    b_leaves, b_treedef = jtu.tree_flatten(b, is_leaf=is_none)
    return a_treedef == b_treedef and all(
        x is y is None or (x and y and _without_devices(x) == _without_devices(y))
        for x, y in zip(a_leaves, b_leaves, strict=True)
    )


def _without_devices(sharding: NamedSharding) -> Any:
    return abstract_mesh(sharding.mesh), sharding.spec


def module_leaves(arguments: Any) -> Mapping[tuple[Any, ...], Any]:
    """Returns the leaves of the NNX modules in `(args, kwargs)`, by path."""
    nnx: Any = sys.modules.get('flax.nnx')
    if nnx is None:
        return {}

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Pytree)

    return {
        (*path, *inner): leaf
        for path, node in jtu.tree_leaves_with_path(arguments, is_leaf=is_module)
        if is_module(node)
        for inner, leaf in leaves_with_paths(node)
    }


def check_updates(
    name: str,
    names: Mapping[int, str],
    before: Mapping[tuple[Any, ...], Any],
    arguments: Any,
    result: Any,
) -> None:
    """Raises if a function updates a module in its arguments, and does not return the new array.

    The function gets copies of the modules, so the caller's modules keep their arrays.
    """
    after = module_leaves(arguments) if before else {}
    returned = {id(leaf) for leaf in jtu.tree_leaves(result)}
    lost = [
        argument_path(path, names)
        for path in {**before, **after}
        if after.get(path) is not before.get(path) and id(after.get(path)) not in returned
    ]
    if lost:
        raise EinshardError(
            f'{name} updates {quoted(lost[:1])} in place, and sharded drops the update',
            code='tracing',
            facts={
                'updated': first_of(lost, 8),
                'instead': f'nnx.jit({name}), with einshard on arguments and results; '
                'or return nnx.state(...) of the module',
            },
        )
