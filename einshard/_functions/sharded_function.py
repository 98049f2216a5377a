"""ShardedFunction: a function decorated with `sharded`, and its calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax.core import Tracer

from .._arrays.device_put import topology_error
from .._errors import EinshardError, hide_frames, public
from .._sharding.context import Context
from .._sharding.mesh import mesh_fact
from .._sharding.scopes import add_to_cache_keys, innermost_scope, matches_cache_keys
from .._sharding.tracing import is_tracing
from .._trees.partition import find_modules, join, partition_modules
from .bound_method import BoundMethod
from .parameters import CallSignature
from .place_arguments import place_arguments
from .program import HasModules, Program, WrongShardings
from .program_cache import ProgramCache
from .promise import Limits
from .setup import Setup
from .trace_as_called import trace_as_called

P = ParamSpec('P')
Q = ParamSpec('Q')
R = TypeVar('R')

# Returns the method that a call runs: `program.run`, `program.jitted.lower`, ...
_GetMethod: TypeAlias = Callable[[Program], Callable[..., Any]]


class ShardedFunction(Generic[P, R]):
    """A function decorated with `sharded`, with the methods of a jitted function."""

    # The state is in slots because `functools.wraps` copies `__dict__` to wrappers. `__dict__` has
    # only the attributes of the decorated function. Slots are also faster to read.
    __slots__ = ('__dict__', '__weakref__', '_fast_path', '_programs', '_setup')

    def __init__(self, setup: Setup):
        functools.update_wrapper(self, setup.function)
        for name in [*vars(self)]:
            # the attributes of a callable object would shadow methods, such as `lower`
            if hasattr(ShardedFunction, name) and not name.startswith('__'):
                del vars(self)[name]
        self._setup = setup
        self._programs = ProgramCache(setup)
        # The key is the number of positional arguments or, in a call with keywords, a tuple of that
        # number and the keywords as written. The value is the jitted function, the order in which
        # it takes the keywords, `Program.constrains_result`, and `Program.compared`.
        # The last item has the labels of the arguments whose modules of Equinox are converted, by
        # position, or is None if the function has no modules.
        self._fast_path: dict[
            Any, tuple[Any, tuple[str, ...], bool, Sequence[int], Mapping[int, str] | None]
        ] = {}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # This adds 0.5 us to the 4.3 us of `jax.jit` on one device. To save time, it does not check
        # that the jitted function is right for these arguments. If it is not, jit or the trace
        # raises; for an array on the same devices in another order, only at the second such call.
        # Comparing `value.sharding` with that of an earlier call would take 0.1 to 0.5 us more, and
        # would not reach the leaves of pytrees.
        try:
            entry = self._fast_path.get((len(args), *kwargs) if kwargs else len(args))
            if entry is None or entered_scope() is not None:
                return self._call(args, kwargs, _run)
            jitted, order, constrains_result, compared, dynamic = entry
            if constrains_result and is_tracing():
                return self._call(args, kwargs, _run)
            values = (*args, *map(kwargs.__getitem__, order)) if kwargs else args
            if dynamic is not None:
                values = _partition(values, dynamic)
            if compared and _has_host_data(values, compared):
                return self._call(args, kwargs, _run)
            for value in values:
                if type(value) in _concrete_types:
                    continue
                # is_tracing takes 0.5 us, so it is not called for a `self` whose attributes are
                # concrete; in `jax.shard_map`, tracers have attributes
                attributes = {} if isinstance(value, Tracer) else getattr(value, '__dict__', {})
                if attributes and _concrete_types.issuperset(map(type, attributes.values())):
                    continue
                if is_tracing():
                    return self._call(args, kwargs, _run)
                break
            try:
                return jitted(*values) if dynamic is None else join(jitted(*values))
            except HasModules:
                return self._call(args, kwargs, _run)
            except (ValueError, RuntimeError, TypeError) as error:
                # ValueError: other shardings or another mesh; RuntimeError: no mesh in context;
                # TypeError: a leaf is not an array
                if dynamic is None and find_modules(values):
                    return self._call(args, kwargs, _run)
                call, _, flattened = self._setup.declaration.flatten_call(args, kwargs)
                return self._retry(error, jitted, call, self._converted(call, flattened), _run)
        except Exception as error:
            hide_frames(error)
            raise

    @overload
    def __get__(self, instance: None, owner: Any = None) -> ShardedFunction[P, R]: ...
    @overload
    def __get__(
        self: ShardedFunction[Concatenate[Any, Q], R], instance: object, owner: Any = None
    ) -> ShardedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __repr__(self) -> str:
        decorator = 'per_device' if self._setup.options.is_per_device else 'sharded'
        return f'<{decorator} function {self._setup.name}>'

    def __reduce__(self) -> str:
        # pickle stores functions by name, and copy returns the function itself. A partial has no
        # name in its module, so pickle raises an error.
        return vars(self).get('__qualname__', self._setup.name)

    @property
    def __globals__(self) -> dict[str, Any]:
        function = inspect.unwrap(self._setup.function)
        return function.__globals__  # jaxtyped resolves annotations with them

    @public
    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Like `jax.jit(f).lower`. Does not check `collectives=` or `memory=`."""
        if kwargs or self._setup.declaration.array_defaults:
            return self._trace_as_called(args, kwargs).lower()
        return self._call(args, kwargs, lambda program: program.jitted.lower)

    @public
    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Like `jax.jit(f).trace`."""
        if kwargs or self._setup.declaration.array_defaults:
            return self._trace_as_called(args, kwargs)
        return self._call(args, kwargs, lambda program: program.jitted.trace)

    @public
    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Like `jax.jit(f).eval_shape`. Returns the shapes and dtypes of the result."""
        return join(self._call(args, kwargs, lambda program: program.jitted.eval_shape))

    @public
    def in_shardings(self, /, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Returns the sharding or pytree of shardings of each argument, or None without a spec."""
        program, values, context = self._checked_program(args, kwargs)
        shardings = join(program.argument_shardings(values, context))
        return dict(zip(program.names, shardings, strict=True))

    @public
    def out_shardings(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Returns the sharding or pytree of shardings of the result, or None without `out=`."""
        program, values, context = self._checked_program(args, kwargs)
        return join(program.result_shardings(values, context))

    @property
    def has_mesh(self) -> bool:
        """Whether `mesh=` or a spec sets the mesh. If so, the mesh in context is not used."""
        return self._setup.mesh is not None

    @property
    def limits(self) -> Limits | None:
        """The limits that `collectives=` and `memory=` set, or None without limits."""
        return self._setup.budget and self._setup.budget.limits

    def clear_cache(self) -> None:
        """Drops all programs, and what JAX has traced and compiled for them."""
        self._fast_path = {}
        self._programs.clear()

    def _trace_as_called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.stages.Traced:
        _, order, _ = self._setup.declaration.flatten_call(args, kwargs)

        def get_method(program: Program) -> Callable[..., Any]:
            return functools.partial(trace_as_called, program, len(args), kwargs, order)

        return self._call(args, kwargs, get_method)

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the values that the program of a call takes."""
        call, _, values = self._setup.declaration.flatten_call(args, kwargs)
        return self._converted(call, values)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], get_method: _GetMethod) -> Any:
        """Finds the program of a call, and calls the method that `get_method` returns.

        If the function has modules of Equinox, the method gets `Partitioned` instead.
        """
        try:
            return self._call_once(args, kwargs, get_method)
        except HasModules:  # the first call: from now on, they are converted
            self._fast_path = {}
            return self._call_once(args, kwargs, get_method)

    def _call_once(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], get_method: _GetMethod
    ) -> Any:
        if entered_scope() and not (matches_cache_keys() or is_tracing()):
            # This thread has copied the contextvars of another thread. The copy includes the scope,
            # but not JAX's cache keys, which are per thread.
            with add_to_cache_keys():
                return self._call_once(args, kwargs, get_method)
        call, order, values = self._setup.declaration.flatten_call(args, kwargs)
        if not self._setup.has_modules.is_set() and find_modules(values):
            self._setup.has_modules.set()
            self._fast_path = {}
        values = self._converted(call, values)
        context = self._setup.context()
        program = self._find_program(call, values, context)
        if get_method is _run and program.is_abstract and not is_tracing():
            raise EinshardError(
                f'{self._setup.name} cannot run on an abstract mesh, which has no devices',
                code='mesh',
                facts={
                    'mesh': mesh_fact(program.mesh),
                    'try': f'{self._setup.name}.eval_shape(...) or {self._setup.name}.trace(...)',
                },
            )
        program.check_devices(values)
        if get_method is _run and program.must_place_arguments():
            values = place_arguments(program, values, context, not is_tracing())
        elif not is_tracing() and not (
            get_method is _run
            and program.args_checked
            and not _has_host_data(values, program.compared)
        ):
            # jit accepts an array on the same devices in another order, then fails at the next
            # call; `trace` accepts any array, and the lowering fails
            running = get_method is _run
            values = place_arguments(program, values, context, running)
            program.args_checked |= running
        try:
            result = get_method(program)(*values)
        except (ValueError, RuntimeError) as error:
            return self._retry(error, program.runnable, call, values, get_method)
        except (AttributeError, AssertionError) as error:
            converted = topology_error(error)
            if converted is None:
                raise
            raise converted.about(function=self._setup.name) from None
        needs_slow_path = (
            len(values) > len(args) + len(kwargs)  # defaults were added
            or self._programs.need_full_lookup
            or entered_scope()
            or is_tracing()
            or program.must_place_arguments()
        )
        if get_method is _run and not needs_slow_path:
            key = (len(args), *kwargs) if kwargs else len(args)
            dynamic = self._dynamic(call) if self._setup.has_modules.is_set() else None
            entry = program.runnable, order, program.constrains_result, program.compared, dynamic
            self._fast_path[key] = entry
            _concrete_types.update(type(x) for x in values if isinstance(x, jax.Array))
        return join(result) if get_method is _run else result

    def _dynamic(self, call: CallSignature) -> dict[int, str]:
        """Returns the labels of the arguments of a call that are not static, by position."""
        labels = self._setup.declaration.parameters.value_labels(call)
        static = self._setup.declaration.static
        return {i: label for i, label in enumerate(labels) if label not in static}

    def _converted(self, call: CallSignature, values: Sequence[Any]) -> Sequence[Any]:
        """Converts modules of Equinox to `Partitioned`, if the function has any."""
        if not self._setup.has_modules.is_set():
            return values
        return _partition(values, self._dynamic(call))

    def _find_program(
        self, call: CallSignature, values: Sequence[Any], context: Context
    ) -> Program:
        try:
            return self._programs.find(call, values, context)
        except EinshardError as error:
            # in `per_device`, a fix for one array may not fit the expressions of the others
            is_per_device = self._setup.options.is_per_device
            raise (error.with_fix(None) if is_per_device else error) from error.__cause__

    def _retry(
        self,
        error: Exception,
        failed: Any,
        call: CallSignature,
        values: Sequence[Any],
        get_method: _GetMethod,
    ) -> Any:
        """Retries a call in which the jitted function `failed` raised `error`.

        If `failed` belongs to the wrong program, runs the right one. If that fails or `failed` was
        right, places the arguments and tries again. Raises the last error if no argument changes.
        """
        if isinstance(error, EinshardError):
            raise error
        context = self._setup.context()
        program = self._programs.find(call, values, context)
        # If the fast path ran the wrong program, the trace raises WrongShardings, or jit raises its
        # own error before the trace.
        is_wrong = isinstance(error, WrongShardings) or program.runnable is not failed
        if is_wrong or not program.matches_arguments(values, context):
            self._fast_path = {}
            program = self._programs.find(call, values, context, failed)
            try:
                result = get_method(program)(*values)
                return join(result) if get_method is _run else result
            except EinshardError:
                raise
            except (ValueError, RuntimeError) as second:
                error = second
        placed = place_arguments(program, values, context, get_method is _run)
        if placed is values:
            raise error
        if get_method is not _run:
            return get_method(program)(*placed)
        return join((program.constrained if is_tracing() else program.run)(*placed))

    def _checked_program(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Program, Sequence[Any], Context]:
        """Checks a call. Returns its program, its flattened values and its context."""
        call, _, values = self._setup.declaration.flatten_call(args, kwargs)
        if find_modules(values):
            self._setup.has_modules.set()
        values = self._converted(call, values)
        context = self._setup.context()
        program = self._find_program(call, values, context)
        program.check(values, context)
        if not program.is_for(values, context):
            program = self._programs.find(call, values, context, program.runnable)
        return program, values, context


entered_scope = innermost_scope.get  # saves 0.04 us per call

# types of values that are not tracers; array types are added as they appear
_concrete_types: set[type] = {np.ndarray, bool, int, float, complex, str, type(None)}


def _has_host_data(values: Sequence[Any], positions: Sequence[int]) -> bool:
    """Whether an argument at `positions` has a leaf that is not an array of several processes."""
    return any(
        not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        for i in positions
        for leaf in jax.tree.leaves(values[i])
    )


def _partition(values: Sequence[Any], labels: Mapping[int, str]) -> Sequence[Any]:
    converted = [*values]
    for i, label in labels.items():
        converted[i] = partition_modules(values[i], label)
    return converted


def _run(program: Program) -> Callable[..., Any]:
    return program.run
