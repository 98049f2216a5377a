"""Program: a `sharded` function jitted with the shardings of its specs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from .._errors import EinshardError
from .._sharding.collective_axes import ShardedBy, find_sharded_by
from .._sharding.context import Context
from .._sharding.mesh import AnyMesh, is_partial
from .._sharding.program_mesh import device_mismatch_error, warn_if_legacy_mesh
from .._sharding.scopes import mesh_scope
from .._sharding.tracing import is_staging, is_tracing
from .._trees.partition import find_modules, join, partition_modules
from .._trees.specs import is_none
from .error_notes import ErrorNotes
from .module_updates import check_updates, module_leaves
from .parameters import CallSignature, positional_signature
from .promise import CheckedJit
from .setup import Setup
from .value_spec import ValueSpec


class WrongShardings(ValueError):
    """Stops a trace whose mesh or shardings differ from those given to jit.

    Callers handle it like jit's ValueErrors about shardings: they look up the right program.
    """


class HasModules(Exception):
    """Stops a trace with modules of Equinox that the caller has not converted to `Partitioned`."""


_UNKNOWN: Any = object()  # out_shardings before the shapes of the result are known


class Program:
    """A function jitted with the shardings of its specs, for one call signature and mesh.

    It is made in two steps, because the second may trace the user's function: threads that need the
    same program share the first step, so that JAX traces `wrapper` once for all of them.

    Attributes:
        arguments, result: the specs of the arguments and of the result.
        static: the positions of static arguments.
        in_shardings: the sharding or pytree of shardings of each argument, or None without a spec.
        out_shardings: the sharding or pytree of shardings of the result, or None without a spec.
        wrapper: the function that JAX traces. It checks the specs, enters the mesh, and calls the
            user's function. Calls without a trace need no check of ranks and sizes, because JAX
            traces again for new shapes or pytrees.
        without_spec: the positions of arguments that have leaves without a spec. Empty if there are
            no limits on collectives or memory.
        shardings_without_spec: the shardings of those arguments. Other shardings need another
            program: JAX would recompile this one without a trace, so limits would not be checked.

    The rest is set by `jit`:
        jitted: the jitted function, to run and to lower.
        nested: the version for calls inside a trace.
        constrained: `nested` for arguments that are placed: constraints instead of in_shardings,
            which would reject an argument of jax.vmap whose mapped axis is sharded.
        runnable: the function that a call runs: `jitted`, or `checked.call`.
        checked: checks the limits on collectives and memory. None if there are no limits.
        args_checked: whether `place_arguments` has run for a call.
    """

    jitted: Any = None
    nested: Any
    constrained: Any
    runnable: Any
    checked: CheckedJit | None
    args_checked = False

    def __init__(
        self, setup: Setup, call: CallSignature, values: Sequence[Any], context: Context
    ) -> None:
        self.setup = setup
        self.call = call
        self.arguments = setup.declaration.arguments(call)
        self.result = setup.declaration.result
        self.names = [str(argument.name) for argument in self.arguments]
        self.static = self.positions(setup.declaration.static)
        self.mesh = context.lowering_mesh
        self.mesh_is_ambient = setup.is_ambient(self.mesh)
        try:
            self.in_shardings = self.argument_shardings(values, context)
        except EinshardError:
            self.check(values, context)  # raises an error that names the leaf
            raise
        self.out_shardings: Any = _UNKNOWN
        self.wrapper = self._with_names(self._make_wrapper())
        self._eval_shape = jax.jit(self.wrapper, static_argnums=tuple(self.static)).eval_shape
        self._budget = setup.budget
        # the in_shardings keep the program on one device, which has no collectives
        is_on_one_device = self.mesh.size == 1 and bool(self._dynamic_in_shardings)
        if setup.budget and is_on_one_device and setup.budget.limits.memory is None:
            self._budget = None
        self.without_spec = [
            i
            for i, shardings in enumerate(self.in_shardings if self._budget else ())
            if i not in self.static and None in jtu.tree_leaves(shardings, is_leaf=is_none)
        ]
        self.shardings_without_spec = shardings_of(values, self.without_spec)
        self._lock = threading.Lock()

    def jit(self, values: Sequence[Any], context: Context) -> None:
        """Jits the function. Traces it if its out_shardings depend on the shapes of the result."""
        # 1. the options of jit. The keys are left out without a spec, so that JAX decides.
        self.out_shardings = self.result_shardings(values, context)
        options: dict[str, Any] = {**self.setup.jit_options, 'static_argnums': tuple(self.static)}
        donated = self.positions(self.setup.declaration.donated)
        if donated:
            options['donate_argnums'] = tuple(donated)
        in_shardings: dict[str, Any] = {}
        if dynamic := self._dynamic_in_shardings:
            in_shardings['in_shardings'] = tuple(map(self.for_jit, dynamic))
        with_shardings = options | in_shardings
        if self.out_shardings is not None:
            with_shardings['out_shardings'] = self.for_jit(self.out_shardings)
        jitted: Any = jax.jit(self.wrapper, **with_shardings)
        # 2. the versions for calls inside a trace
        constrained = self._jit_with_constraints(options, constrain_arguments=True)
        # constraints would fail on an abstract mesh that is not in context
        can_constrain = not isinstance(self.mesh, AbstractMesh)
        keeps_mapped_axes = self.setup.options.keeps_mapped_axes and can_constrain
        if self.mesh_is_ambient or keeps_mapped_axes:
            # in_shardings would tie the trace to these devices, but JAX reuses it on other devices;
            # and they replicate a mapped axis, where constraints leave it as it is
            nested = constrained
        else:
            nested = jitted
            if self.out_shardings is not None and can_constrain:
                # In a nested jit, JAX ignores out_shardings on explicit axes. In the backward pass,
                # it uses them as in_shardings, which reject cotangents with other shardings.
                nested = self._jit_with_constraints(
                    {**options, **in_shardings}, constrain_arguments=False
                )
            if has_partial_axes(self.in_shardings):
                without_shardings = self._jit_with_constraints(options, constrain_arguments=False)
                nested = _choose_by_type(nested, without_shardings)
        # 3. limits
        checked = self._budget and CheckedJit(
            self._budget,
            self.wrapper,
            self.sharded_by,
            lambda: self.setup.context().lowering_mesh,
            with_shardings,
            nested,
        )
        with self._lock:  # another thread may have made it at the same time
            if self.jitted is None:
                self.options, self.nested, self.constrained = options, nested, constrained
                self.checked, self.runnable = checked, checked.call if checked else jitted
                self.jitted = jitted

    @property
    def _dynamic_in_shardings(self) -> list[Any]:
        """The in_shardings that jit gets, or [] if no argument has a spec."""
        dynamic = [s for i, s in enumerate(self.in_shardings) if i not in self.static]
        return dynamic if jtu.tree_leaves(dynamic) else []

    def run(self, *values: Any) -> Any:
        if self.checked is None and is_tracing():
            return self.nested(*values)
        return self.runnable(*values)

    def clear_cache(self) -> None:
        for function in (self.jitted, self.nested, self.checked):
            if function is not None:
                function.clear_cache()

    # --- which calls it is for -------------------------------------------------------------------

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh has no devices, so that the program can be traced but not run."""
        return isinstance(self.mesh, AbstractMesh) and not self.mesh_is_ambient

    @property
    def constrains_result(self) -> bool:
        """Whether a call inside a trace must constrain the result.

        With explicit mesh axes, JAX ignores the out_shardings of a nested jit.
        """
        return self.result.spec is not None and AxisType.Explicit in self.mesh.axis_types

    @property
    def compared(self) -> Sequence[int]:
        """The positions of arguments whose host data the processes must compare in each call."""
        checks = self.setup.options.check_processes
        if not (checks and isinstance(self.mesh, Mesh) and self.mesh.is_multi_process):
            return ()
        rows = enumerate(self.arguments)
        return [i for i, x in rows if i not in self.static and x.spec is not None]

    def must_place_arguments(self) -> bool:
        """Whether `place_arguments` must run in each call.

        Under jax.grad or jax.vmap outside jit, `nested` accepts any sharding if it has no
        in_shardings. Jit cannot place host data as a partial sum: it raises.
        """
        if is_tracing():
            return self.nested is self.constrained and not is_staging()
        return has_partial_axes(self.in_shardings)

    def is_for(self, values: Sequence[Any], context: Context) -> bool:
        """Whether the shardings of this program are right for a call with these values."""
        if not self.matches_arguments(values, context):
            return False
        if shardings_of(values, self.without_spec) != self.shardings_without_spec:
            return False
        if self.result.needs_leaves(context):
            try:
                self._eval_shape(*values)  # the wrapper compares the shardings
            except WrongShardings:
                return False
        return True

    def matches_arguments(self, values: Sequence[Any], context: Context) -> bool:
        """Whether the specs give these arguments the shardings in `in_shardings`."""
        rows = zip(self.arguments, values, self.in_shardings, strict=True)
        return all(
            _same_shardings(argument.shardings(value, context), shardings)
            for argument, value, shardings in rows
            if argument.needs_leaves(context)
        )

    def check_devices(self, values: Sequence[Any]) -> None:
        """Raises if the function is called in a program that runs on other devices."""
        error = device_mismatch_error(self.mesh, jtu.tree_leaves(values))
        if error is not None and self._has_shardings:
            raise error.about(function=self.setup.name)

    # --- specs -----------------------------------------------------------------------------------

    def positions(self, names: Collection[str]) -> list[int]:
        return [i for i, name in enumerate(self.names) if name in names]

    def argument_shardings(self, values: Sequence[Any], context: Context) -> list[Any]:
        """Returns the shardings of each argument on the mesh of `context`."""
        return self._for_each_argument(ValueSpec.shardings, values, context)

    def result_shardings(self, values: Sequence[Any], context: Context) -> Any:
        """Returns the shardings of the result on the mesh of `context`."""
        # this may trace the function for the shapes of its result; jit reuses the trace
        result = self._eval_shape(*values) if self.result.needs_leaves(context) else None
        return self.result.shardings(result, context)

    def check(self, values: Sequence[Any], context: Context) -> None:
        """Raises an error for the first argument whose rank or sizes do not fit its spec."""
        self._for_each_argument(ValueSpec.find_placements, values, context)

    def _for_each_argument(
        self,
        step: Callable[[ValueSpec, Any, Context], Any],
        values: Sequence[Any],
        context: Context,
    ) -> list[Any]:
        return [step(spec, x, context) for spec, x in zip(self.arguments, values, strict=True)]

    def for_jit(self, shardings: Any) -> Any:
        """Converts shardings on a mesh from `jax.set_mesh` to PartitionSpecs.

        Jit resolves them on the mesh in context at each call, so one program works on all meshes
        that differ only in their devices.
        """
        if not self.mesh_is_ambient:
            return shardings
        mesh = self.mesh.abstract_mesh

        def convert(sharding: Any) -> Any:
            if sharding is None or sharding.mesh.abstract_mesh != mesh:
                return sharding
            return sharding.spec

        return jtu.tree_map(convert, shardings, is_leaf=is_none)

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

    # --- what JAX traces -------------------------------------------------------------------------

    @property
    def _has_shardings(self) -> bool:
        """Whether an argument or the result has a spec. If not, jit uses its arguments' devices."""
        return bool(jtu.tree_leaves((self.in_shardings, self.result.spec)))

    def _scope(self, mesh: AnyMesh) -> AbstractContextManager[Any]:
        """Makes `mesh` the default mesh in a `with` block that traces the function."""
        return mesh_scope(mesh, self._has_shardings, self.setup.axis_rules)

    def _make_wrapper(self) -> Callable[..., Any]:
        def wrapper(*values: Any) -> Any:
            # 1. stop if the caller must look up another program
            context = self.setup.context()
            mesh = context.lowering_mesh
            same_mesh = mesh.abstract_mesh == self.mesh.abstract_mesh
            if not (same_mesh and self.matches_arguments(values, context)):
                raise WrongShardings
            has_modules = self.setup.has_modules
            if not has_modules.is_set() and find_modules(values):
                has_modules.set()
                raise HasModules
            # 2. check and constrain the arguments
            self.check_devices(())  # against `jax.set_mesh` or an enclosing program
            warn_if_legacy_mesh(self.setup.name, context.mesh)
            self.check(values, context)
            is_explicit = AxisType.Explicit in self.mesh.axis_types
            if is_explicit:
                # in_shardings place the arguments but do not change their types
                with self._scope(mesh):
                    values = tuple(self._for_each_argument(ValueSpec.constrain, values, context))
            # 3. call the user's function
            with ErrorNotes(self.setup.name, self.arguments, values, context), self._scope(mesh):
                args, kwargs = self.call.split(join(values) if has_modules.is_set() else values)
                before = module_leaves((args, kwargs))
                result = self.setup.function(*args, **kwargs)
            # 4. check the result
            names = dict(enumerate(self.names))
            check_updates(self.setup.name, names, before, (args, kwargs), result)
            if find_modules(result):
                if not has_modules.is_set():
                    has_modules.set()
                    raise HasModules
                result = partition_modules(result, 'result')
            if not self.result.needs_leaves(context):
                self.result.find_placements(result, context)
            elif self.out_shardings is not _UNKNOWN:
                needed = self.result.shardings(result, context)
                if not _same_shardings(needed, self.out_shardings):
                    raise WrongShardings
            if is_explicit and has_partial_axes(self.result.shardings(result, context)):
                # without this, JAX gives the result a sharding that has no spec
                return self.result.constrain(result, context)
            return result

        return wrapper

    def _jit_with_constraints(self, options: Mapping[str, Any], constrain_arguments: bool) -> Any:
        """Jits the function with constraints on the result and, if asked, on the arguments."""
        # jits the same function as `jitted`, so that JAX reuses its trace
        inner: dict[str, Any] = {**options, 'in_shardings': None}
        inner.pop('compiler_options', None)  # JAX rejects them in a nested jit
        nested = jax.jit(self.wrapper, **inner)

        def constrained(*values: Any) -> Any:
            context = self.setup.context()
            if constrain_arguments:
                values = tuple(self._for_each_argument(ValueSpec.constrain, values, context))
            result = nested(*values)
            with self._scope(context.lowering_mesh):
                return self.result.constrain(result, context)

        return jax.jit(self._with_names(constrained), **options)

    def _with_names(self, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the names that jit shows in programs and errors, and returns the wrapper."""
        wrapper.__name__ = wrapper.__qualname__ = self.setup.name
        wrapper.__wrapped__ = self.setup.function  # type: ignore[attr-defined]
        wrapper.__signature__ = positional_signature(self.names)  # type: ignore[attr-defined]
        return wrapper


def _choose_by_type(nested: Any, without_shardings: Any) -> Callable[..., Any]:
    """Returns a function that calls `without_shardings` if an argument is unreduced or reduced.

    The gradient of a reduced argument is unreduced, but JAX gives it the reduced in_sharding of the
    argument, and raises an error.
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


def shardings_of(values: Sequence[Any], positions: Sequence[int]) -> tuple[Any, ...]:
    """Returns the sharding of each leaf of `values[i]` for `i` in `positions`, or () in a trace.

    For host data, the sharding is None.
    """
    if not positions or is_tracing():
        return ()
    # Does not read `leaf.committed`, which would double the time. It matters only for arrays on a
    # part of the mesh, and jit rejects those if they are committed.
    leaves = [leaf for i in positions for leaf in jtu.tree_leaves(values[i])]
    return tuple([getattr(leaf, 'sharding', None) for leaf in leaves])


def has_partial_axes(shardings: Any) -> bool:
    return any(map(is_partial, jtu.tree_leaves(shardings)))


def _same_shardings(a: Any, b: Any) -> bool:
    """Whether pytrees of shardings are equal, ignoring devices and memory kinds."""
    a_leaves, a_treedef = jtu.tree_flatten(a, is_leaf=is_none)
    b_leaves, b_treedef = jtu.tree_flatten(b, is_leaf=is_none)
    return a_treedef == b_treedef and all(
        x is y is None or (x and y and _without_devices(x) == _without_devices(y))
        for x, y in zip(a_leaves, b_leaves, strict=True)
    )


def _without_devices(sharding: NamedSharding) -> Any:
    return sharding.mesh.abstract_mesh, sharding.spec
